"""What is lent and offered, what stays of it when sessions end, and blocks that come out of the arena."""

import functools
import tempfile
import threading
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from kvclient import (
    BlockPool,
    ChecksumMismatchError,
    HandoffChoice,
    HandoffPolicy,
    InvalidFieldError,
    ItemOutcome,
    LimitReachedError,
    MalformedError,
    NoWayError,
    PeerUnavailableError,
    SegmentInUseError,
    SegmentUnknownError,
    StaleIncarnationError,
)
from kvclient.handoff_source import block_checksums
from kvservice.core.engine_memory import MemoryKind
from kvservice.ports.methods import Method
from kvservice.transports.inproc_memory import InprocMemoryHub
from kvservice.transports.one_sided import EndpointSettings
from tests.unit.kvclient.conftest import BLOCK_BYTES, blocks_of, settings_of
from tests.unit.kvclient.fake_handoffs import (
    HANDOFF,
    HandoffDaemon,
    Lender,
    WatchedEndpoint,
    client_of,
    run_all,
)

WAIT_S = 5.0
DEVICE_ADDRESS = 1 << 40
KEYS = [bytes([number]) * 32 for number in range(4)]


@pytest.fixture
def daemon():
    """Serve a fake daemon that hands blocks over."""
    with tempfile.TemporaryDirectory() as folder, HandoffDaemon(str(Path(folder) / "kv.sock")) as running:
        yield running


@pytest.fixture
def hub():
    """What the endpoints of this process lend to each other."""
    return InprocMemoryHub()


@pytest.fixture
def endpoint(hub):
    """An endpoint that takes memory of any kind."""
    return WatchedEndpoint(hub)


@pytest.fixture
def client(daemon, flavour, endpoint):
    """Connect a client of either flavour."""
    with client_of(flavour, settings_of(daemon), endpoint) as connected:
        yield connected


@pytest.fixture
def namespace(client, flavour, identity, part):
    """Open a namespace of one part."""
    return flavour.run(client.open_namespace, identity, [part])


@pytest.fixture
def pool():
    """Eight blocks with bytes in them."""
    return BlockPool.of([np.arange(8 * BLOCK_BYTES, dtype=np.uint32).astype(np.uint8).reshape(8, -1)])


class DeviceTensor:
    """Eight blocks in memory of a device, as torch would give them; nobody may touch it."""

    shape = (8, BLOCK_BYTES)
    device = SimpleNamespace(type="cuda")

    def data_ptr(self):
        return DEVICE_ADDRESS

    def nbytes(self):
        return 8 * BLOCK_BYTES

    def element_size(self):
        return 1

    def stride(self, axis):
        return (BLOCK_BYTES, 1)[axis]

    def untyped_storage(self):
        return self

    def is_contiguous(self):
        return True

    def __getitem__(self, index):
        return self


def device_pool():
    """A pool of that memory."""
    return BlockPool.of([DeviceTensor()])


# ---- what is lent


def test_memory_is_lent_as_what_it_is(daemon, client, flavour, endpoint, pool):
    """A device's as a device's: to the endpoint, and to the daemon, which passes it on."""
    lent = flavour.run(client.handoffs.lend, [pool, device_pool()])
    assert endpoint.kinds == [MemoryKind.HOST, MemoryKind.CUDA]
    request = daemon.last(Method.REGISTER_SEGMENTS)
    assert [one.memory_kind for one in request.segments] == [1, 2]
    assert [one.base_address for one in request.segments] == [int(pool.addresses[0]), DEVICE_ADDRESS]
    assert [(one.blocks_count, one.block_bytes, one.epoch) for one in lent] == [(8, BLOCK_BYTES, 1)] * 2
    assert endpoint.lent_count == 2


@pytest.mark.parametrize("error", [LimitReachedError, MalformedError])
def test_memory_that_the_daemon_does_not_take_is_not_lent(daemon, client, flavour, endpoint, pool, error):
    """Nobody would ever read it, and its owner would not know that somebody could."""
    daemon.forgets_layouts = True
    if error is LimitReachedError:
        daemon.failures[Method.REGISTER_SEGMENTS] = error("too many segments")
    with pytest.raises(error):
        flavour.run(client.handoffs.lend, [pool])
    assert endpoint.lent_count == 0


def test_each_pool_is_taken_back_by_itself(daemon, client, flavour, endpoint, pool):
    """Its memory is lent no more once the daemon has agreed, whatever it was lent together with."""
    first, second = flavour.run(client.handoffs.lend, [pool, device_pool()])
    daemon.failures[Method.UNREGISTER_SEGMENTS] = SegmentInUseError("handoffs [7] may be reading")
    with pytest.raises(SegmentInUseError):
        flavour.run(client.handoffs.take_back, [first])
    assert endpoint.lent_count == 2
    del daemon.failures[Method.UNREGISTER_SEGMENTS]
    flavour.run(client.handoffs.take_back, [first])
    assert list(daemon.last(Method.UNREGISTER_SEGMENTS).segment_ids) == list(first.segment_ids)
    assert endpoint.lent_count == 1
    flavour.run(client.handoffs.take_back, [first, second])
    flavour.run(client.handoffs.take_back, [])
    assert endpoint.lent_count == 0


def test_memory_of_an_earlier_session_is_neither_offered_nor_asked_about(
    daemon, client, namespace, flavour, endpoint, pool
):
    """The daemon that knew of it is gone; it is lent no more all the same."""
    lent = flavour.run(client.handoffs.lend, [pool])
    daemon.restart()
    flavour.run(client.list_tiers)
    assert client.attachment.epoch == 2
    with pytest.raises(StaleIncarnationError, match="lend the pools again"):
        flavour.run(client.handoffs.offer, namespace, KEYS[:1], lent, [0])
    flavour.run(client.handoffs.take_back, lent)
    assert endpoint.lent_count == 0
    assert daemon.count(Method.OFFER_HANDOFF) == daemon.count(Method.UNREGISTER_SEGMENTS) == 0
    lent = flavour.run(client.handoffs.lend, [pool])
    assert flavour.run(client.handoffs.offer, namespace, KEYS[:1], lent, [0]).handoff_id


def test_the_end_of_a_client_lends_nothing(daemon, flavour, endpoint, pool):
    """Without a word of its caller's."""
    with client_of(flavour, settings_of(daemon), endpoint) as client:
        flavour.run(client.handoffs.lend, [pool])
        assert endpoint.lent_count == 1
    assert endpoint.lent_count == 0
    with pytest.raises(PeerUnavailableError, match="closed"):
        flavour.run(client.handoffs.lend, [pool])


def test_a_client_without_an_endpoint_can_only_take_from_the_arena(daemon, flavour, identity, part, pool):
    """It says so before the daemon is asked, and claims by no transport."""
    settings = settings_of(daemon, one_sided=EndpointSettings(transport=""))
    with client_of(flavour, settings, None) as client:
        with pytest.raises(NoWayError, match="the settings name no transport"):
            flavour.run(client.handoffs.lend, [pool])
        assert daemon.count(Method.REGISTER_SEGMENTS) == 0
        namespace = flavour.run(client.open_namespace, identity, [part])
        daemon.failures[Method.CLAIM_HANDOFF] = NoWayError("no transport in common")
        with pytest.raises(NoWayError, match="in common"):
            flavour.run(client.handoffs.claim, namespace, HANDOFF)
        assert list(daemon.last(Method.CLAIM_HANDOFF).transports) == []


# ---- what is offered


def test_an_offer_names_blocks_and_their_checksums(daemon, client, namespace, flavour, pool):
    """Summed here, of the very blocks that are named; each offer has an id of its own."""
    lent = flavour.run(client.handoffs.lend, [pool])
    ids = set()
    for _ in range(2):
        offer = flavour.run(client.handoffs.offer, namespace, KEYS, lent, [7, 0, 3, 3])
        ids.add(daemon.last(Method.OFFER_HANDOFF).request_id)
        assert offer.deadline_s < offer.hold_until_s
    request = daemon.last(Method.OFFER_HANDOFF)
    named = np.array([[7], [0], [3], [3]], np.uint32)
    assert (request.keys, request.blocks) == (b"".join(KEYS), named.tobytes())
    assert request.checksums == block_checksums([pool], named).tobytes()
    assert list(request.layout_ids) == [lent[0].layout_id]
    assert (request.policy, request.HasField("ttl"), len(ids)) == (0, False, 2)
    assert all(len(request_id) == 16 for request_id in ids)


def test_an_offer_says_what_it_was_told(daemon, client, namespace, flavour, pool):
    """Checksums of the caller's, a life, a policy; and blocks of the arena with neither memory nor sums."""
    lent = flavour.run(client.handoffs.lend, [pool])
    sums = np.array([9, 8], np.uint32)
    options = {"ttl_s": 1.5, "policy": HandoffPolicy.DIRECT, "checksums": sums}
    flavour.run(lambda: client.handoffs.offer(namespace, KEYS[:2], lent, [0, 1], **options))
    request = daemon.last(Method.OFFER_HANDOFF)
    assert (request.ttl.ToMilliseconds(), request.policy, request.checksums) == (1500, 1, sums.tobytes())
    flavour.run(lambda: client.handoffs.offer(namespace, KEYS[:2], policy=HandoffPolicy.STAGED))
    request = daemon.last(Method.OFFER_HANDOFF)
    assert (request.policy, request.blocks, request.checksums) == (2, b"", b"")
    assert not request.layout_ids


def test_blocks_of_a_device_are_offered_without_checksums(daemon, client, namespace, flavour):
    """No pass over device memory is made for them, and none over the host's where settings say so."""
    lent = flavour.run(client.handoffs.lend, [device_pool()])
    flavour.run(client.handoffs.offer, namespace, KEYS[:2], lent, [0, 7])
    assert daemon.last(Method.OFFER_HANDOFF).checksums == b""


def test_checksums_can_be_left_out(daemon, flavour, identity, part, endpoint, pool):
    """As they can for blocks that are put."""
    with client_of(flavour, settings_of(daemon, checksums=False), endpoint) as client:
        namespace = flavour.run(client.open_namespace, identity, [part])
        lent = flavour.run(client.handoffs.lend, [pool])
        flavour.run(client.handoffs.offer, namespace, KEYS[:1], lent, [0])
        assert daemon.last(Method.OFFER_HANDOFF).checksums == b""


@pytest.mark.parametrize(
    ("blocks", "options", "says"),
    [
        ([0], {}, "blocks names 1 keys; 2 were given"),
        ([[0, 1], [0, 1]], {}, "blocks has shape"),
        ([0, 8], {}, "blocks goes from 0 to 8; the pool has blocks 0 to 7"),
        ([0, -1], {}, "blocks goes from -1"),
        ([0, 1], {"checksums": np.zeros(3, np.uint32)}, "checksums is an array"),
        ([0, 1], {"checksums": np.zeros(2, np.int64)}, "checksums is an array of int64"),
    ],
)
def test_a_bad_offer_is_refused_before_it_is_sent(
    daemon, client, namespace, flavour, pool, blocks, options, says
):
    """With the field named; the daemon hears nothing of it."""
    lent = flavour.run(client.handoffs.lend, [pool])
    with pytest.raises(InvalidFieldError, match=says):
        flavour.run(lambda: client.handoffs.offer(namespace, KEYS[:2], lent, blocks, **options))
    with pytest.raises(InvalidFieldError, match="lent has 2 pools for 1 parts"):
        flavour.run(client.handoffs.offer, namespace, KEYS[:2], lent * 2, [0, 1])
    assert daemon.count(Method.OFFER_HANDOFF) == 0


def test_a_scheduler_offers_what_its_worker_lends(daemon, client, namespace, flavour, endpoint, pool):
    """It names layouts of the engine; the blocks it cannot sum, so that it needs sums or goes without."""
    with client_of(flavour, settings_of(daemon), endpoint) as worker:
        lent = flavour.run(worker.handoffs.lend, [pool])
        with pytest.raises(SegmentUnknownError, match="give `checksums`"):
            flavour.run(client.handoffs.offer, namespace, KEYS[:1], lent, [0])
        sums = np.array([5], np.uint32)
        flavour.run(lambda: client.handoffs.offer(namespace, KEYS[:1], lent, [0], checksums=sums))
        assert daemon.last(Method.OFFER_HANDOFF).checksums == sums.tobytes()


def test_an_offer_is_sent_again_as_the_same(daemon, client, namespace, flavour, pool):
    """A connection that is lost in between makes no second handoff."""
    lent = flavour.run(client.handoffs.lend, [pool])
    daemon.hang_ups[Method.OFFER_HANDOFF] = 1
    offer = flavour.run(client.handoffs.offer, namespace, KEYS[:1], lent, [0])
    sent = [request for method, request in daemon.calls if method == Method.OFFER_HANDOFF]
    assert len(sent) == 2
    assert sent[0] == sent[1]
    assert not client.handoffs.is_released(offer.handoff_id)


def test_both_sides_end_a_handoff_by_its_number(daemon, client, flavour):
    """With the daemon's own outcome; one that this client does not know is the daemon's mistake."""
    assert flavour.run(client.handoffs.reject, 5, "another dtype") is ItemOutcome.DONE
    assert daemon.last(Method.REJECT_HANDOFF).reason == "another dtype"
    assert flavour.run(client.handoffs.abort, 6) is ItemOutcome.DONE
    assert daemon.last(Method.ABORT_HANDOFF).handoff_id == 6
    assert flavour.run(client.handoffs.look, 6).keys_count == 3


# ---- out of the arena


@pytest.fixture
def stored(daemon, namespace, flavour, rng):
    """Put four blocks; claims are of them."""
    blocks = blocks_of(rng, len(KEYS))
    flavour.run(namespace.put, KEYS, blocks)
    daemon.claim = daemon.staged(KEYS)
    return blocks


def receive(flavour, client, namespace, into, blocks, **options):
    """Receive the handoff."""
    return flavour.run(lambda: client.handoffs.receive(namespace, HANDOFF, [into], blocks, **options))


@pytest.mark.parametrize(("first_key", "blocks"), [(0, [3, 0, 2, 1]), (2, [5, 4]), (3, [7]), (1, [])])
def test_staged_blocks_are_received_under_the_lease_of_the_claim(
    client, namespace, flavour, endpoint, stored, first_key, blocks
):
    """From the first key wanted on, into the blocks that were named; no endpoint has to do with it."""
    memory = np.zeros((8, BLOCK_BYTES), np.uint8)
    received = receive(flavour, client, namespace, BlockPool.of([memory]), blocks, first_key=first_key)
    assert received.choice is HandoffChoice.STAGED
    assert received.keys == b"".join(KEYS[first_key:][: len(blocks)])
    assert (memory[blocks] == stored[first_key:][: len(blocks)]).all()
    assert not memory[np.setdiff1d(np.arange(8), blocks)].any()
    assert endpoint.reads == []


def test_damaged_blocks_of_the_arena_are_reported(daemon, client, namespace, flavour, stored):
    """The daemon drops what does not have its checksum; else it would be promised and refused for ever."""
    daemon.damage(KEYS[2])
    into = BlockPool.of([np.zeros((8, BLOCK_BYTES), np.uint8)])
    with pytest.raises(ChecksumMismatchError):
        receive(flavour, client, namespace, into, [0, 1], first_key=1)
    flavour.wait(daemon.wait_for, Method.VERIFY)
    assert daemon.last(Method.VERIFY).keys == b"".join(KEYS[1:3])
    flavour.wait(daemon.wait_for, Method.ABORT_HANDOFF)


def test_staged_blocks_do_not_go_to_a_device(daemon, client, namespace, flavour, stored):
    """The processor cannot write there; nothing is touched, and the claim is given up."""
    with pytest.raises(InvalidFieldError, match="into is device memory"):
        receive(flavour, client, namespace, device_pool(), [0, 1])
    flavour.wait(daemon.wait_for, Method.ABORT_HANDOFF)
    assert daemon.count(Method.COMPLETE_HANDOFF) == 0


def test_direct_blocks_may_go_to_a_device(daemon, client, namespace, flavour, endpoint, hub):
    """The endpoint is given addresses of the device, and nobody sums what arrives there."""
    sums = np.arange(4, dtype=np.uint32)
    daemon.claim = Lender(hub, BLOCK_BYTES).claim(KEYS, checksums=sums.tobytes())
    into = device_pool()
    moved = []
    endpoint.read = moved.append
    received = receive(flavour, client, namespace, into, [6, 1])
    assert received.choice is HandoffChoice.DIRECT
    (read,) = moved
    assert sorted(read.addresses.tolist()) == [DEVICE_ADDRESS + block * BLOCK_BYTES for block in (1, 6)]


def test_targets_are_held_to_the_pool_for_the_arena_too(daemon, client, namespace, flavour, stored):
    """Two keys into one block would leave one of them in the other's place, with both checksums right."""
    into = BlockPool.of([np.zeros((8, BLOCK_BYTES), np.uint8)])
    for blocks, says in (([3, 3], "block 3 of part 0 for two keys"), ([0, 8], "names block 8 of part 0")):
        daemon.calls.clear()
        with pytest.raises(InvalidFieldError, match=says):
            receive(flavour, client, namespace, into, blocks)
        flavour.wait(daemon.wait_for, Method.ABORT_HANDOFF)


def test_handoffs_are_received_side_by_side(daemon, flavour, identity, part, endpoint, hub):
    """Threads of one client, or its tasks, each get their own blocks."""
    daemon.claim = (lender := Lender(hub, BLOCK_BYTES)).claim(KEYS)
    memory = np.zeros((8 * 8, BLOCK_BYTES), np.uint8)
    pool, barrier = BlockPool.of([memory]), threading.Barrier(4)
    endpoint.before = lambda _read: barrier.wait(WAIT_S)
    with client_of(flavour, settings_of(daemon), endpoint) as client:
        namespace = flavour.run(client.open_namespace, identity, [part])

        def one(number):
            blocks = np.arange(4) + 8 * number
            return client.handoffs.receive(namespace, HANDOFF + number, [pool], blocks)

        run_all(flavour, [functools.partial(one, number) for number in range(4)])
    for number in range(4):
        assert (memory[8 * number :][:4] == lender.memory[0][:4]).all()
    assert daemon.count(Method.COMPLETE_HANDOFF) == 4
