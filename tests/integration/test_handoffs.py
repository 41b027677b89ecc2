"""Handoffs over a real daemon, by both edges: who owns the blocks, and what each side is told."""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass

import numpy as np
import pytest

from kvclient import (
    BlockPool,
    ChecksumMismatchError,
    ClientSettings,
    HandoffChoice,
    HandoffClaimedError,
    HandoffEndedError,
    HandoffPolicy,
    HandoffState,
    HandoffUnknownError,
    ItemOutcome,
    NoWayError,
    RepresentationMismatchError,
    SegmentInUseError,
)
from kvclient.sync import KvClient, Namespace
from kvservice.transports.inproc_memory import InprocEndpoint, InprocMemoryHub
from tests.integration.daemon_process import (
    BLOCK_BYTES,
    WAIT_LIMIT_S,
    content,
    identity,
    keys,
    open_namespace,
    parts,
)

BLOCKS = 32
WAYS = ["lane", "grpc"]


@dataclass
class Engine:
    """A client of one engine, with a pool of blocks of its own memory."""

    client: KvClient
    namespace: Namespace
    memory: np.ndarray
    pool: BlockPool

    def fill(self, blocks, numbers):
        """Write the contents of some keys into blocks."""
        self.memory[list(blocks)] = content(numbers)


@pytest.fixture(params=WAYS)
def engines(request, shared_daemon, salt):
    """Return a way to make engines that can read each other's memory."""
    hub = InprocMemoryHub()
    with contextlib.ExitStack() as stack:

        def make(*, way=request.param, salt=salt, **settings) -> Engine:
            endpoint = getattr(shared_daemon, way)
            connected = KvClient.connect(
                ClientSettings(endpoint, engine_incarnation=os.urandom(16), **settings),
                endpoint=hub.endpoint(),
            )
            stack.enter_context(connected)
            memory = np.zeros((BLOCKS, BLOCK_BYTES), np.uint8)
            namespace = open_namespace(connected, salt=salt)
            return Engine(connected, namespace, memory, BlockPool.of([memory]))

        yield make


@pytest.fixture
def pair(engines):
    """An engine that offers, with its lent pool, and one that claims."""
    prefill, decode = engines(), engines()
    (lent,) = prefill.client.handoffs.lend([prefill.pool])
    return prefill, lent, decode


def offered(prefill, lent, numbers, blocks, **options):
    """Fill blocks with the contents of some keys, and offer them."""
    prefill.fill(blocks, numbers)
    return prefill.client.handoffs.offer(prefill.namespace, keys(numbers), [lent], blocks, **options)


def test_blocks_go_from_memory_to_memory(pair):
    """What is received is what was offered, where it was asked for, and the giver is told when it ends."""
    prefill, lent, decode = pair
    offer = offered(prefill, lent, range(6), [9, 3, 4, 5, 30, 0])
    assert not prefill.client.handoffs.is_released(offer.handoff_id)
    into = [1, 7, 6, 5, 4, 31]
    received = decode.client.handoffs.receive(decode.namespace, offer.handoff_id, [decode.pool], into)
    assert received.keys == b"".join(keys(range(6)))
    assert received.choice is HandoffChoice.DIRECT
    assert received.bytes_moved == 6 * BLOCK_BYTES
    assert (decode.memory[into] == content(range(6))).all()
    others = np.setdiff1d(np.arange(BLOCKS), into)
    assert not decode.memory[others].any()
    news = prefill.client.handoffs.wait_released(offer.handoff_id, WAIT_LIMIT_S)
    assert (news.state, news.is_released) == (HandoffState.COMPLETED, True)


def test_a_part_of_the_keys_can_be_received(pair):
    """Who has the first keys already fetches the others only."""
    prefill, lent, decode = pair
    offer = offered(prefill, lent, range(6), range(6))
    received = decode.client.handoffs.receive(
        decode.namespace, offer.handoff_id, [decode.pool], [20, 21], first_key=3
    )
    assert received.keys == b"".join(keys([3, 4]))
    assert (decode.memory[[20, 21]] == content([3, 4])).all()


def test_a_claim_succeeds_once(pair, engines):
    """The second who claims is refused, and so is everybody after the end."""
    prefill, lent, decode = pair
    other = engines()
    offer = offered(prefill, lent, range(2), [0, 1])
    claim = decode.client.handoffs.claim(decode.namespace, offer.handoff_id)
    with pytest.raises(HandoffClaimedError, match=str(offer.handoff_id)):
        other.client.handoffs.claim(other.namespace, offer.handoff_id)
    decode.client.handoffs.complete(claim)
    with pytest.raises(HandoffEndedError, match="COMPLETED"):
        other.client.handoffs.claim(other.namespace, offer.handoff_id)


def test_two_calls_of_one_client_do_not_receive_one_handoff(pair, monkeypatch):
    """The first to complete gives the memory back, so the second would read what is somebody's."""
    prefill, lent, decode = pair
    offer = offered(prefill, lent, range(2), [0, 1])
    read = InprocEndpoint.read
    refused = []

    def read_and_try_again(endpoint, what):
        with pytest.raises(HandoffClaimedError, match="another call of this client"):
            decode.client.handoffs.receive(decode.namespace, offer.handoff_id, [decode.pool], [2, 3])
        refused.append(True)
        read(endpoint, what)

    monkeypatch.setattr(InprocEndpoint, "read", read_and_try_again)
    decode.client.handoffs.receive(decode.namespace, offer.handoff_id, [decode.pool], [0, 1])
    assert refused
    assert (decode.memory[:2] == content(range(2))).all()


def test_a_staged_handoff_survives_the_one_who_offered(engines):
    """Blocks in the arena are read under a lease, whatever has become of the engine that put them."""
    prefill, decode = engines(), engines()
    prefill.namespace.put(keys(range(4)), content(range(4)))
    offer = prefill.client.handoffs.offer(prefill.namespace, keys(range(4)), policy=HandoffPolicy.STAGED)
    received = decode.client.handoffs.receive(
        decode.namespace, offer.handoff_id, [decode.pool], [5, 6], first_key=1
    )
    assert received.choice is HandoffChoice.STAGED
    assert (decode.memory[[5, 6]] == content([1, 2])).all()


def test_the_choice_and_its_reason_are_in_the_record(pair):
    """Where both ways are open the cheaper is taken, and the record says why."""
    prefill, lent, decode = pair
    prefill.namespace.put(keys(range(3)), content(range(3)))
    offer = offered(prefill, lent, range(3), [0, 1, 2])
    claim = decode.client.handoffs.claim(decode.namespace, offer.handoff_id)
    record = decode.client.handoffs.look(offer.handoff_id)
    assert record.choice == claim.choice
    assert "out of the arena by" in record.reason
    assert "out of the engine's memory" in record.reason
    assert record.keys_count == 3


def test_an_abort_by_the_giver_waits_for_the_reader(pair):
    """The giver's blocks are released when the reader has let go, and what it read is discarded."""
    prefill, lent, decode = pair
    offer = offered(prefill, lent, range(2), [0, 1])
    claim = decode.client.handoffs.claim(decode.namespace, offer.handoff_id)
    assert prefill.client.handoffs.abort(offer.handoff_id) is ItemOutcome.DONE
    with pytest.raises(HandoffEndedError, match="discard them"):
        decode.client.handoffs.complete(claim)
    news = prefill.client.handoffs.wait_released(offer.handoff_id, WAIT_LIMIT_S)
    assert news.state is HandoffState.ABORTED


def test_the_giver_learns_of_a_rejection_and_why(pair):
    """A reader that cannot use the blocks says so; nothing waits for a time-out."""
    prefill, lent, decode = pair
    offer = offered(prefill, lent, range(2), [0, 1])
    assert decode.client.handoffs.reject(offer.handoff_id, "another dtype") is ItemOutcome.DONE
    news = prefill.client.handoffs.wait_released(offer.handoff_id, WAIT_LIMIT_S)
    assert (news.state, news.reason) == (HandoffState.REJECTED, "another dtype")
    assert decode.client.handoffs.reject(offer.handoff_id, "again") is ItemOutcome.ALREADY_REJECTED


def test_the_death_of_the_reader_gives_the_blocks_back(pair, engines):
    """A session that ends releases what it had claimed."""
    prefill, lent, _ = pair
    reader = engines()
    offer = offered(prefill, lent, range(2), [0, 1])
    reader.client.handoffs.claim(reader.namespace, offer.handoff_id)
    reader.client.close()
    news = prefill.client.handoffs.wait_released(offer.handoff_id, WAIT_LIMIT_S)
    assert news.state is HandoffState.ABORTED


def test_the_death_of_the_giver_ends_the_claim(pair, engines):
    """What is read from memory that is going is discarded."""
    giver, _, decode = engines(), None, pair[2]
    (lent,) = giver.client.handoffs.lend([giver.pool])
    offer = offered(giver, lent, range(2), [0, 1])
    claim = decode.client.handoffs.claim(decode.namespace, offer.handoff_id)
    giver.client.close()
    with pytest.raises(HandoffEndedError):
        decode.client.handoffs.complete(claim)


def test_bytes_that_are_not_those_offered_are_refused(pair):
    """The checksum that was made at the offer is held against what arrives."""
    prefill, lent, decode = pair
    offer = offered(prefill, lent, range(3), [0, 1, 2])
    prefill.memory[1, 77] ^= 1
    with pytest.raises(ChecksumMismatchError, match="block 1"):
        decode.client.handoffs.receive(decode.namespace, offer.handoff_id, [decode.pool], [0, 1, 2])
    news = prefill.client.handoffs.wait_released(offer.handoff_id, WAIT_LIMIT_S)
    assert news.state is HandoffState.ABORTED


def test_another_representation_is_no_match(pair, engines):
    """A claim from another namespace takes nothing."""
    prefill, lent, _ = pair
    stranger = engines(salt=b"another salt")
    offer = offered(prefill, lent, range(2), [0, 1])
    with pytest.raises(RepresentationMismatchError, match="space_ids"):
        stranger.client.handoffs.claim(stranger.namespace, offer.handoff_id)
    assert stranger.client.handoffs.look(offer.handoff_id).state == HandoffState.OFFERED


def test_memory_in_use_is_not_taken_back(pair):
    """A pool that somebody may be reading stays lent, and says by which handoff."""
    prefill, lent, decode = pair
    offer = offered(prefill, lent, range(2), [0, 1])
    claim = decode.client.handoffs.claim(decode.namespace, offer.handoff_id)
    with pytest.raises(SegmentInUseError, match=str(offer.handoff_id)):
        prefill.client.handoffs.take_back([lent])
    decode.client.handoffs.complete(claim)
    prefill.client.handoffs.take_back([lent])
    prefill.client.handoffs.take_back([lent])
    with pytest.raises(Exception, match="layout"):
        offered(prefill, lent, range(2), [0, 1])


def test_what_cannot_be_offered_or_found_is_refused(pair):
    """Neither memory nor committed blocks: no way. An unknown number: unknown."""
    prefill, _, decode = pair
    with pytest.raises(NoWayError):
        prefill.client.handoffs.offer(prefill.namespace, keys([100, 101]))
    number = offered(prefill, pair[1], [0], [0]).handoff_id
    with pytest.raises(HandoffUnknownError):
        decode.client.handoffs.look(number + 1000)


def test_parts_and_pieces_of_any_cut(shared_daemon, salt):
    """Two parts, one of whole blocks and one of a tensor for each layer, both cut otherwise where they go."""
    hub = InprocMemoryHub()
    sizes = (8192, 12288)
    with contextlib.ExitStack() as stack:
        clients = [
            stack.enter_context(
                KvClient.connect(
                    ClientSettings(shared_daemon.lane, engine_incarnation=os.urandom(16)),
                    endpoint=hub.endpoint(),
                )
            )
            for _ in range(2)
        ]
        spaces = [client.open_namespace(identity(), parts(*sizes), salt=salt) for client in clients]
        rng = np.random.default_rng(7)
        whole = rng.integers(0, 256, (10, sizes[0]), np.uint8)
        layers = [rng.integers(0, 256, (10, sizes[1] // 3), np.uint8) for _ in range(3)]
        lent = clients[0].handoffs.lend([BlockPool.of([whole]), BlockPool.of(layers)])
        blocks = np.array([[3, 9], [1, 2], [0, 0]])
        offer = clients[0].handoffs.offer(spaces[0], keys(range(3)), lent, blocks)
        halves = [np.zeros((5, sizes[0] // 2), np.uint8) for _ in range(2)]
        lump = np.zeros((5, sizes[1]), np.uint8)
        into = [BlockPool.of(halves), BlockPool.of([lump])]
        targets = np.array([[4, 0], [2, 1], [0, 3]])
        clients[1].handoffs.receive(spaces[1], offer.handoff_id, into, targets)
        got = np.concatenate([half[targets[:, 0]] for half in halves], axis=1)
        assert (got == whole[blocks[:, 0]]).all()
        assert (lump[targets[:, 1]] == np.concatenate([x[blocks[:, 1]] for x in layers], axis=1)).all()
