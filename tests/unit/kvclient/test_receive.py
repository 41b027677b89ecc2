"""What is received is what was offered, or the claim is given up and the error says why."""

import tempfile
from pathlib import Path

import numpy as np
import pytest

from kvclient import (
    BlockPool,
    BlockSizeError,
    ChecksumMismatchError,
    DeadlineError,
    HandoffChoice,
    HandoffClaimedError,
    HandoffEndedError,
    InvalidFieldError,
    MalformedError,
    NotOwnerError,
    NoWayError,
    PeerUnavailableError,
    RepresentationMismatchError,
)
from kvclient.handoff_source import block_checksums
from kvproto.kv.v1 import handoff_service_pb2, session_service_pb2
from kvservice.core.outcomes import ItemOutcome
from kvservice.ports.methods import Method
from kvservice.transports.inproc_memory import InprocMemoryHub
from tests.unit.kvclient.conftest import BLOCK_BYTES, part_of, settings_of
from tests.unit.kvclient.fake_handoffs import (
    BLOCKS,
    HANDOFF,
    HandoffDaemon,
    Lender,
    WatchedEndpoint,
    client_of,
)

KEYS = [bytes([number]) * 32 for number in range(4)]


@pytest.fixture
def daemon():
    """Serve a fake daemon that hands blocks over."""
    with tempfile.TemporaryDirectory() as folder, HandoffDaemon(str(Path(folder) / "kv.sock")) as running:
        yield running


class Receiving:
    """A client with its namespace, an endpoint, a pool, and an engine that lends."""

    def __init__(self, daemon, flavour, client, namespace, endpoint, lender):
        self.daemon, self.flavour = daemon, flavour
        self.client, self.namespace, self.endpoint, self.lender = client, namespace, endpoint, lender
        self.memory = [np.zeros_like(one) for one in lender.memory]
        self.pools = [BlockPool.of([one]) for one in self.memory]
        self.handoff_id = HANDOFF - 1
        self.given_up_count = 0

    def receive(self, blocks, pools=None, **options):
        """Receive another handoff into the pools."""
        self.handoff_id += 1
        into = self.pools if pools is None else pools
        receive = self.client.handoffs.receive
        return self.flavour.run(receive, self.namespace, self.handoff_id, into, blocks, **options)

    def check_given_up(self):
        """Hold a failed receive to its word: the daemon is told, and the claim is renewed no more."""
        self.given_up_count += 1
        self.flavour.wait(self.daemon.wait_for, Method.ABORT_HANDOFF, self.given_up_count)
        assert self.daemon.last(Method.ABORT_HANDOFF).handoff_id == self.handoff_id
        beats_count = self.daemon.count(Method.HEARTBEAT)
        self.revoke(999)
        self.flavour.wait(self.daemon.wait_for, Method.HEARTBEAT, beats_count + 1)
        assert list(self.daemon.last(Method.HEARTBEAT).handoff_ids) == []

    def revoke(self, *capability_ids):
        """Say that something is revoked, and see that it is heard; what nobody holds wakes the beats."""
        self.daemon.push(session_service_pb2.StreamResponse(revoked_ids=capability_ids))
        self.client.handoffs.is_released(0)  # The blocking client reads by this, the other one by itself.


@pytest.fixture
def receiving(daemon, flavour, identity, request):
    """Make a client that receives; indirect parameter: the number of parts."""
    hub = InprocMemoryHub()
    lender = Lender(hub, BLOCK_BYTES, parts_count=getattr(request, "param", 1))
    endpoint = WatchedEndpoint(hub)
    with client_of(flavour, settings_of(daemon), endpoint) as client:
        parts = [part_of(BLOCK_BYTES, kv_group=part) for part in range(len(lender.memory))]
        namespace = flavour.run(client.open_namespace, identity, parts)
        daemon.claim = lender.claim(KEYS)
        yield Receiving(daemon, flavour, client, namespace, endpoint, lender)


def test_blocks_are_received_where_they_are_wanted(receiving):
    """Claimed with the transports of the endpoint, read, completed; and nothing is given up."""
    received = receiving.receive([7, 0, 3, 1])
    assert (received.keys, received.choice) == (b"".join(KEYS), HandoffChoice.DIRECT)
    assert (received.reason, received.bytes_moved) == ("direct: by the lender", 4 * BLOCK_BYTES)
    assert (receiving.memory[0][[7, 0, 3, 1]] == receiving.lender.memory[0][:4]).all()
    assert not receiving.memory[0][[2, 4, 5, 6]].any()
    claim = receiving.daemon.last(Method.CLAIM_HANDOFF)
    assert (claim.handoff_id, list(claim.transports)) == (HANDOFF, ["inproc"])
    assert receiving.daemon.count(Method.COMPLETE_HANDOFF) == 1
    assert receiving.daemon.count(Method.ABORT_HANDOFF) == 0


@pytest.mark.parametrize(
    ("first_key", "blocks"), [(0, [5]), (1, [4, 2]), (3, [0]), (2, []), (4, []), (0, [])]
)
def test_some_of_the_keys_are_received(receiving, first_key, blocks):
    """Those from the first one on, as many as there are blocks for; with none it is a plain completion."""
    received = receiving.receive(blocks, first_key=first_key)
    assert received.keys == b"".join(KEYS[first_key : first_key + len(blocks)])
    assert received.bytes_moved == len(blocks) * BLOCK_BYTES
    sources = np.arange(first_key, first_key + len(blocks))
    assert (receiving.memory[0][blocks] == receiving.lender.memory[0][sources]).all()
    assert len(receiving.endpoint.reads) == bool(blocks)
    assert receiving.daemon.count(Method.COMPLETE_HANDOFF) == 1


@pytest.mark.parametrize("receiving", [2], indirect=True)
def test_each_part_goes_to_its_own_pool(receiving):
    """With a number of its own for each part of each key, or one for all parts."""
    receiving.receive([[7, 0], [6, 1]])
    assert (receiving.memory[0][[7, 6]] == receiving.lender.memory[0][:2]).all()
    assert (receiving.memory[1][[0, 1]] == receiving.lender.memory[1][:2]).all()
    receiving.receive([3, 4])
    assert (receiving.memory[1][[3, 4]] == receiving.lender.memory[1][:2]).all()


@pytest.mark.parametrize(
    ("blocks", "options", "says"),
    [
        ([0] * 5, {}, "blocks names 5 keys from key 0 on; the handoff has 4"),
        ([0, 1], {"first_key": 3}, "blocks names 2 keys from key 3 on"),
        ([0], {"first_key": -1}, "from key -1 on"),
        ([], {"first_key": 5}, "from key 5 on"),
        ([0, 1, 0], {}, "blocks names block 0 of part 0 for two keys"),
        ([0, BLOCKS], {}, f"blocks names block {BLOCKS} of part 0"),
        ([-1], {}, "blocks goes from -1"),
        ([0.5], {}, "blocks has dtype"),
        ([[0, 1]], {}, "blocks has shape"),
        ([0], {"pools": []}, "into has 0 pools for 1 parts"),
    ],
)
def test_a_receive_into_what_cannot_be_is_given_up(receiving, blocks, options, says):
    """The field is named, nothing is read, and the giver need not wait for an expiry."""
    with pytest.raises(InvalidFieldError, match=says):
        receiving.receive(blocks, **options)
    assert receiving.endpoint.reads == []
    receiving.check_given_up()


def test_memory_that_does_not_fit_is_given_up(receiving):
    """Blocks of another size, and memory that cannot be written."""
    small = BlockPool.of([np.zeros((4, 512), np.uint8)])
    with pytest.raises(BlockSizeError, match="a block of the pool has 512 bytes, its part 4096"):
        receiving.receive([0], [small])
    receiving.check_given_up()
    frozen = np.zeros((4, BLOCK_BYTES), np.uint8)
    frozen.flags.writeable = False
    with pytest.raises(InvalidFieldError, match=r"into\[0\] is read-only"):
        receiving.receive([0], [BlockPool.of([frozen])])
    assert not frozen.any()
    receiving.check_given_up()


@pytest.mark.parametrize(
    "claim",
    [
        handoff_service_pb2.ClaimHandoffResponse(choice=1, keys=KEYS[0]),
        handoff_service_pb2.ClaimHandoffResponse(choice=9),
        handoff_service_pb2.ClaimHandoffResponse(keys=b"odd"),
        handoff_service_pb2.ClaimHandoffResponse(choice=2, keys=KEYS[0]),
    ],
)
def test_a_claim_that_makes_no_sense_is_given_up(receiving, claim):
    """The daemon believes that it is ours, so it is told; nothing else would end it but its expiry."""
    claim.remaining.FromSeconds(10)
    receiving.daemon.claim = claim
    with pytest.raises(MalformedError, match=str(HANDOFF)):
        receiving.receive([0])
    receiving.check_given_up()


def test_a_claim_of_other_parts_is_given_up(receiving):
    """Where the blocks of one part are is no answer for a namespace of another number of them."""
    receiving.daemon.claim.direct.layouts.add().CopyFrom(receiving.daemon.claim.direct.layouts[0])
    receiving.daemon.claim.direct.blocks *= 2
    with pytest.raises(MalformedError, match="2 parts are; they are 1"):
        receiving.receive([0])
    receiving.check_given_up()


@pytest.mark.parametrize(
    "error",
    [
        HandoffClaimedError("by another"),
        HandoffEndedError("as EXPIRED"),
        RepresentationMismatchError("another salt"),
        NoWayError("none"),
    ],
)
def test_a_claim_that_is_refused_is_not_given_up(receiving, error):
    """It is not ours: an abort would end it for the process of our engine that has it."""
    receiving.daemon.failures[Method.CLAIM_HANDOFF] = error
    with pytest.raises(type(error), match=error.message):
        receiving.receive([0])
    receiving.flavour.run(receiving.client.list_tiers)  # What was posted has come before it.
    assert receiving.daemon.count(Method.ABORT_HANDOFF) == 0


def test_a_claim_that_is_not_answered_is_given_up(daemon, flavour, identity):
    """The daemon may have given it to us, without our knowing where anything is."""
    settings = settings_of(daemon, call_timeout_s=0.2)
    with client_of(flavour, settings, InprocMemoryHub().endpoint()) as client:
        namespace = flavour.run(client.open_namespace, identity, [part_of(BLOCK_BYTES)])
        daemon.silent.add(Method.CLAIM_HANDOFF)
        with pytest.raises(DeadlineError, match="CLAIM_HANDOFF"):
            flavour.run(client.handoffs.claim, namespace, HANDOFF)
        flavour.wait(daemon.wait_for, Method.ABORT_HANDOFF)
        assert daemon.last(Method.ABORT_HANDOFF).handoff_id == HANDOFF


@pytest.mark.parametrize("error", [PeerUnavailableError("gone"), DeadlineError("late"), NoWayError("none")])
def test_a_read_that_fails_is_given_up(receiving, error):
    """With the error of the endpoint; it is not tried again behind the caller's back."""

    def fail(_read):
        raise error

    receiving.endpoint.before = fail
    with pytest.raises(type(error), match=error.message):
        receiving.receive([0, 1])
    assert len(receiving.endpoint.reads) == 1
    assert receiving.daemon.count(Method.COMPLETE_HANDOFF) == 0
    receiving.check_given_up()


def test_memory_that_is_lent_no_more_is_given_up(receiving):
    """What the lender took back while we were on our way is no block."""
    receiving.lender.lent[0].close()
    with pytest.raises(PeerUnavailableError, match="lent no more"):
        receiving.receive([0])
    receiving.check_given_up()


def test_bytes_with_another_checksum_are_given_up(receiving):
    """They are held to the checksums of the claim, from the first key wanted on; unless told not to."""
    pool = BlockPool.of([receiving.lender.memory[0]])
    sums = block_checksums([pool], np.arange(4, dtype=np.uint32)[:, None])
    receiving.daemon.claim.direct.checksums = sums.tobytes()
    receiving.receive([0, 1, 2], first_key=1)
    receiving.lender.memory[0][3, 17] ^= 1
    receiving.receive([0, 1], first_key=1)
    with pytest.raises(ChecksumMismatchError, match=r"1 of 2 .* the first is block 1"):
        receiving.receive([0, 1], first_key=2)
    receiving.check_given_up()


@pytest.mark.parametrize("outcome", ["ALREADY_ABORTED", "ALREADY_EXPIRED", "ALREADY_REJECTED", "UNKNOWN"])
def test_bytes_of_a_handoff_that_had_ended_are_given_up(receiving, outcome):
    """Only a completion says that the memory was the blocks' while it was read."""
    receiving.daemon.completion = int(ItemOutcome[outcome])
    with pytest.raises(HandoffEndedError, match=rf"{outcome}.*discard them"):
        receiving.receive([0])
    receiving.check_given_up()


def test_a_completion_that_is_refused_or_unknown_is_given_up(receiving):
    """Whatever the daemon says but that it is done: the bytes are not handed on."""
    receiving.daemon.completion = 77
    with pytest.raises(MalformedError, match="outcome 77"):
        receiving.receive([0])
    receiving.check_given_up()
    receiving.daemon.failures[Method.COMPLETE_HANDOFF] = NotOwnerError("not yours")
    with pytest.raises(NotOwnerError, match="not yours"):
        receiving.receive([0])
    receiving.check_given_up()


def test_a_claim_that_is_over_is_not_read(receiving):
    """Nothing is posted after the deadline, since the memory is somebody else's then."""
    receiving.daemon.claim = receiving.lender.claim(KEYS, ttl_s=0)
    with pytest.raises(HandoffEndedError, match="passed its deadline"):
        receiving.receive([0])
    assert receiving.endpoint.reads == []
    receiving.check_given_up()


@pytest.mark.parametrize("receiving", [2], indirect=True)
def test_each_part_is_read_within_what_is_left_of_the_claim(receiving):
    """The second part has less time than the first, and none once the claim is over."""
    receiving.daemon.claim = receiving.lender.claim(KEYS, ttl_s=9)
    receiving.receive([0])
    first, second = (read.timeout_s for read in receiving.endpoint.reads)
    assert 8 < second < first <= 9

    def end(_read):
        receiving.revoke(receiving.handoff_id, 999)
        receiving.daemon.wait_for(Method.HEARTBEAT)

    receiving.endpoint.before = end
    with pytest.raises(HandoffEndedError, match="ended"):
        receiving.receive([0])
    assert len(receiving.endpoint.reads) == 3
    receiving.check_given_up()
