"""Put, get, lookup and lease against a daemon on this host."""

import numpy as np
import pytest

from kvclient import (
    ArenaFullError,
    BatchSizeError,
    BlockBuffers,
    BlockSizeError,
    ChecksumMismatchError,
    InvalidFieldError,
    ItemOutcome,
    LeaseExpiredError,
    StaleGenerationError,
    UnknownMethodError,
)
from kvservice.ports.methods import Method
from tests.unit.kvclient.conftest import BLOCK_BYTES, blocks_of, part_of, settings_of

HIT, MISS, DONE = ItemOutcome.HIT, ItemOutcome.MISS, ItemOutcome.DONE
ALREADY = ItemOutcome.ALREADY_COMMITTED


@pytest.fixture
def client(daemon, flavour):
    """Connect a client of either flavour."""
    return flavour.connect(settings_of(daemon))


@pytest.fixture
def namespace(client, flavour, identity, part):
    """Open a namespace of one part."""
    return flavour.run(client.open_namespace, identity, [part])


def keys_of(rng, count):
    """Draw keys, a list of 32 bytes each."""
    return [rng.randbytes(32) for _ in range(count)]


def test_what_is_put_is_got(namespace, flavour, rng):
    """Bytes come back as they went, through a round trip for the put and none for the get."""
    keys, blocks = keys_of(rng, 5), blocks_of(rng, 5)
    stored = flavour.run(namespace.put, keys, blocks)
    assert (stored.outcomes.tolist(), stored.stored_count) == ([DONE] * 5, 5)
    assert stored.bytes_moved == 5 * BLOCK_BYTES
    into = np.zeros_like(blocks)
    got = flavour.run(namespace.get, keys, into)
    assert (got.outcomes.tolist(), got.prefix_count, got.bytes_moved) == ([HIT] * 5, 5, 5 * BLOCK_BYTES)
    assert (into == blocks).all()


def test_a_get_makes_no_call(daemon, namespace, flavour, rng):
    """The directory answers: the daemon does not hear of a read before the next beat."""
    keys = keys_of(rng, 2)
    flavour.run(namespace.put, keys, blocks_of(rng, 2))
    flavour.run(namespace.get, keys, bytearray(2 * BLOCK_BYTES))
    before = len(daemon.calls)
    flavour.run(namespace.get, keys, bytearray(2 * BLOCK_BYTES))
    assert flavour.run(namespace.lookup_local, keys).prefix_count == 2
    assert len(daemon.calls) == before


def test_each_key_of_a_local_get_has_its_own_outcome(namespace, flavour, rng):
    """A miss in the middle does not hide the hits behind it; the prefix ends there."""
    keys, blocks = keys_of(rng, 3), blocks_of(rng, 3)
    flavour.run(namespace.put, [keys[0], keys[2]], [blocks[0], blocks[2]])
    into = [bytearray(BLOCK_BYTES) for _ in keys]
    got = flavour.run(namespace.get, keys, into)
    assert (got.outcomes.tolist(), got.prefix_count) == ([HIT, MISS, HIT], 1)
    assert (into[0], into[2]) == (blocks[0].tobytes(), blocks[2].tobytes())
    for lookup in (namespace.lookup, namespace.lookup_local):
        found = flavour.run(lookup, keys)
        assert (found.outcomes.tolist(), found.prefix_count) == ([HIT, MISS, HIT], 1)


def test_what_others_store_is_an_outcome(daemon, namespace, flavour, rng):
    """Only granted keys are copied; a put of nothing new commits nothing."""
    keys, blocks = keys_of(rng, 4), blocks_of(rng, 4)
    flavour.run(namespace.put, keys[1:3], blocks[1:3])
    stored = flavour.run(namespace.put, keys, blocks)
    assert stored.outcomes.tolist() == [DONE, ALREADY, ALREADY, DONE]
    assert (stored.stored_count, stored.bytes_moved) == (2, 2 * BLOCK_BYTES)
    into = np.zeros_like(blocks)
    flavour.run(namespace.get, keys, into)
    assert (into == blocks).all()
    assert flavour.run(namespace.put, keys, blocks).stored_count == 0
    assert daemon.count(Method.COMMIT) == 2


def test_a_key_of_several_parts_needs_them_all(client, flavour, identity, rng):
    """Blocks are key-major over parts of different sizes; a damaged generation of one part loses the key."""
    parts = [part_of(1024), part_of(4096, kv_group=1)]
    namespace = flavour.run(client.open_namespace, identity, parts)
    keys = keys_of(rng, 3)
    blocks = [rng.randbytes(size) for _ in keys for size in (1024, 4096)]
    flavour.run(namespace.put, keys[1:], blocks[2:])
    flavour.run(namespace.put, keys, blocks)
    into = [bytearray(len(block)) for block in blocks]
    got = flavour.run(namespace.get, keys, into)
    assert (got.prefix_count, got.bytes_moved) == (3, 3 * 5120)
    assert into == blocks
    view = namespace.lease(keys)
    flavour.enter(view)
    assert [bytes(block) for block in view.views] == blocks
    flavour.leave(view)


def test_strided_tensors_go_and_come(namespace, flavour, rng):
    """Engine tensors are read and written in place, block by block."""
    keys = keys_of(rng, 3)
    source = np.frombuffer(rng.randbytes(2 * 8 * BLOCK_BYTES // 2), np.uint8).reshape(2, 8, -1)
    target = np.zeros_like(source)
    flavour.run(namespace.put, keys, BlockBuffers.strided([source[0], source[1]], [1, 5, 2]))
    flavour.run(namespace.get, keys, BlockBuffers.strided([target[0], target[1]], [7, 0, 3]))
    assert (target[:, [7, 0, 3]] == source[:, [1, 5, 2]]).all()
    assert not target[:, [1, 2, 4, 5, 6]].any()


def test_an_evicted_block_is_a_miss(daemon, namespace, flavour, rng):
    """A generation that moved means the slot is another's, whatever the row says."""
    keys = keys_of(rng, 2)
    flavour.run(namespace.put, keys, blocks_of(rng, 2))
    daemon.evict(keys[0])
    got = flavour.run(namespace.get, keys, bytearray(2 * BLOCK_BYTES))
    assert (got.outcomes.tolist(), got.prefix_count) == ([MISS, HIT], 0)


def test_damaged_bytes_are_an_error_that_names_the_key(daemon, namespace, flavour, rng):
    """Wrong KV must never reach a model: the read fails instead of handing it on."""
    keys = keys_of(rng, 3)
    flavour.run(namespace.put, keys, blocks_of(rng, 3))
    daemon.damage(keys[1])
    with pytest.raises(ChecksumMismatchError, match=rf"1 blocks .* keys\[1\] {keys[1].hex()}"):
        flavour.run(namespace.get, keys, bytearray(3 * BLOCK_BYTES))
    with pytest.raises(ChecksumMismatchError, match="the first is block 1"):
        flavour.enter(namespace.lease(keys, verify=True))


def test_a_client_that_verifies_nothing_takes_what_is_there(daemon, flavour, identity, part, rng):
    """`verify` is a setting: without it the bytes come as they lie."""
    client = flavour.connect(settings_of(daemon, verify=False))
    namespace = flavour.run(client.open_namespace, identity, [part])
    keys, blocks = keys_of(rng, 1), blocks_of(rng, 1)
    flavour.run(namespace.put, keys, blocks)
    daemon.damage(keys[0])
    into = bytearray(BLOCK_BYTES)
    assert flavour.run(namespace.get, keys, into).prefix_count == 1
    assert into[1:] == blocks[0].tobytes()[1:]


def test_a_directory_that_moved_is_mapped_anew(daemon, namespace, flavour, rng):
    """A superseded table proves no miss: the reader asks for the new one and finds what it holds."""
    keys = keys_of(rng, 2)
    flavour.run(namespace.put, keys[:1], blocks_of(rng, 1))
    daemon.replace_directory()
    flavour.run(namespace.put, keys[1:], blocks_of(rng, 1))
    maps_before = daemon.count(Method.MAP_SEGMENTS)
    got = flavour.run(namespace.get, keys, bytearray(2 * BLOCK_BYTES))
    assert got.prefix_count == 2
    assert daemon.count(Method.MAP_SEGMENTS) == maps_before + 1
    flavour.run(namespace.get, keys, bytearray(2 * BLOCK_BYTES))
    assert daemon.count(Method.MAP_SEGMENTS) == maps_before + 1


def test_a_segment_is_mapped_when_a_row_points_into_it(daemon, namespace, flavour, identity, part, rng):
    """What another process put lies in memory that this one has not seen: it maps it, then reads."""
    keys, blocks = keys_of(rng, 2), blocks_of(rng, 2)
    flavour.run(namespace.put, keys, blocks)
    reader = flavour.connect(settings_of(daemon))
    other = flavour.run(reader.open_namespace, identity, [part])
    into = np.zeros_like(blocks)
    assert flavour.run(other.get, keys, into).prefix_count == 2
    assert (into == blocks).all()


@pytest.mark.parametrize("moves", [False, True])
def test_without_a_directory_the_prefix_is_located(daemon, flavour, identity, part, rng, moves):
    """Where there is no directory a get is a call and a copy; what moved meanwhile is read under a lease.

    Keys behind a miss are misses.
    """
    daemon.is_directory_offered, daemon.moves_located_slots = False, moves
    client = flavour.connect(settings_of(daemon))
    namespace = flavour.run(client.open_namespace, identity, [part])
    keys, blocks = keys_of(rng, 3), blocks_of(rng, 3)
    flavour.run(namespace.put, [keys[0], keys[2]], [blocks[0], blocks[2]])
    into = np.zeros_like(blocks)
    got = flavour.run(namespace.get, keys, into)
    assert (got.outcomes.tolist(), got.prefix_count, got.bytes_moved) == ([HIT, MISS, MISS], 1, BLOCK_BYTES)
    assert (into[0] == blocks[0]).all()
    assert not into[1:].any()
    flavour.run(client.list_tiers)
    assert daemon.count(Method.RELEASE) == daemon.count(Method.ACQUIRE) == int(moves)
    assert flavour.run(namespace.get, keys[1:], into[1:]).prefix_count == 0
    assert flavour.run(namespace.lookup_local, keys).prefix_count == 1


def test_a_leased_get_releases_its_lease(daemon, namespace, client, flavour, rng):
    """By name it may be asked for although there is a directory."""
    keys, blocks = keys_of(rng, 2), blocks_of(rng, 2)
    flavour.run(namespace.put, keys[:1], blocks[:1])
    into = np.zeros_like(blocks)
    got = flavour.run(namespace.get_leased, keys, into)
    assert (got.outcomes.tolist(), got.prefix_count) == ([HIT, MISS], 1)
    assert (into[0] == blocks[0]).all()
    flavour.run(client.list_tiers)
    assert daemon.count(Method.RELEASE) == daemon.count(Method.ACQUIRE) == 1


def test_a_lease_shows_blocks_in_place_until_it_ends(daemon, namespace, flavour, rng):
    """Views are read-only, of the prefix, and refuse access afterwards; the lease is released."""
    keys, blocks = keys_of(rng, 3), blocks_of(rng, 3)
    flavour.run(namespace.put, keys[:2], blocks[:2])
    view = flavour.enter(namespace.lease(keys))
    assert view.prefix_count == 2
    assert [bytes(block) for block in view.views] == [blocks[0].tobytes(), blocks[1].tobytes()]
    assert all(block.readonly for block in view.views)
    flavour.run(view.check)
    flavour.leave(view)
    with pytest.raises(ValueError, match="released"):
        bytes(view.views[0])
    flavour.wait(daemon.wait_for, Method.RELEASE)


def test_a_lease_of_nothing_is_an_empty_view(daemon, namespace, flavour, rng):
    """A miss is data: the context works and shows no block."""
    view = flavour.enter(namespace.lease(keys_of(rng, 2)))
    assert (view.prefix_count, view.views) == (0, [])
    flavour.run(view.check)
    flavour.leave(view)
    assert daemon.count(Method.RELEASE) == 0


def test_a_view_whose_slot_moved_on_is_refused(daemon, namespace, flavour, rng):
    """The check and the end of the context both say that what was seen may not be used."""
    keys = keys_of(rng, 1)
    flavour.run(namespace.put, keys, blocks_of(rng, 1))
    view = flavour.enter(namespace.lease(keys))
    daemon.evict(keys[0])
    with pytest.raises(StaleGenerationError):
        flavour.run(view.check)
    with pytest.raises(StaleGenerationError):
        flavour.leave(view)
    flavour.wait(daemon.wait_for, Method.RELEASE)


def test_a_lease_past_its_own_deadline_is_refused(daemon, namespace, flavour, rng):
    """The holder keeps its own time: without a renewal nothing read under the lease is handed on."""
    keys = keys_of(rng, 1)
    flavour.run(namespace.put, keys, blocks_of(rng, 1))
    daemon.ttl_s = 0.0
    view = flavour.enter(namespace.lease(keys))
    with pytest.raises(LeaseExpiredError, match="passed its deadline"):
        flavour.leave(view)
    lease = flavour.run(namespace.acquire, keys)
    with pytest.raises(LeaseExpiredError):
        flavour.run(namespace.read, lease, bytearray(BLOCK_BYTES))


def test_a_worker_reads_under_the_lease_of_its_scheduler(daemon, namespace, flavour, identity, part, rng):
    """A lease travels between processes of an engine; one renewed elsewhere is asked for, not refused."""
    keys, blocks = keys_of(rng, 2), blocks_of(rng, 2)
    flavour.run(namespace.put, keys, blocks)
    daemon.ttl_s = 0.0
    lease = flavour.run(namespace.acquire, keys)
    worker = flavour.connect(settings_of(daemon))
    theirs = flavour.run(worker.open_namespace, identity, [part])
    into = np.zeros_like(blocks)
    assert flavour.run(theirs.read, lease, into) == 2 * BLOCK_BYTES
    assert (into == blocks).all()
    assert daemon.last(Method.RENEW).lease_ids == [lease.lease_id]


def test_a_scheduler_commits_what_its_worker_wrote(client, namespace, flavour, rng):
    """The steps of a put, one by one, are open to callers that split them over processes."""
    keys, blocks = keys_of(rng, 3), blocks_of(rng, 3)
    flavour.run(namespace.put, keys[:1], blocks[:1])
    reservation = flavour.run(namespace.reserve, keys)
    assert reservation.granted.tolist() == [1, 2]
    checksums = flavour.run(namespace.write, reservation, blocks)
    assert flavour.run(client.commit, reservation, checksums) == 2
    into = np.zeros_like(blocks)
    assert flavour.run(namespace.get, keys, into).prefix_count == 3
    assert (into == blocks).all()
    assert flavour.run(client.abort, reservation) is ItemOutcome.DONE
    lease = flavour.run(namespace.acquire, keys)
    renewed, _ = flavour.run(client.renew, [lease])
    assert renewed.tolist() == [DONE]
    assert flavour.run(client.release, [lease]).tolist() == [DONE]


def test_a_put_that_fails_is_aborted(daemon, namespace, flavour, rng):
    """A reservation does not outlive the put that asked for it."""
    daemon.failures[Method.COMMIT] = ArenaFullError("no room", retry_after_ms=7)
    with pytest.raises(ArenaFullError) as caught:
        flavour.run(namespace.put, keys_of(rng, 1), blocks_of(rng, 1))
    assert caught.value.retry_after_ms == 7
    flavour.wait(daemon.wait_for, Method.ABORT)
    assert daemon.last(Method.ABORT).reservation_id == daemon.last(Method.COMMIT).reservation_id


def test_bad_input_is_refused_before_any_call(daemon, namespace, flavour, rng):
    """What the client can see for itself costs no round trip."""
    keys, blocks = keys_of(rng, 2), blocks_of(rng, 2)
    before = len(daemon.calls)
    with pytest.raises(InvalidFieldError, match="1 blocks for 2 keys"):
        flavour.run(namespace.put, keys, blocks[:1])
    with pytest.raises(BlockSizeError):
        flavour.run(namespace.put, keys[:1], [bytes(100)])
    with pytest.raises(InvalidFieldError, match="read-only"):
        flavour.run(namespace.get, keys, bytes(2 * BLOCK_BYTES))
    with pytest.raises(BatchSizeError):
        flavour.run(namespace.lookup, [])
    assert len(daemon.calls) == before


def test_the_rest_of_the_daemon_is_a_call_away(client, namespace, flavour):
    """Tiers, limits, purge and facts come as the daemon sends them."""
    assert [tier.name for tier in flavour.run(client.list_tiers).tiers] == ["dram"]
    assert flavour.run(client.capabilities).version == "fake"
    assert flavour.run(client.purge, namespace) == 0
    assert len(namespace.namespace_id) == 32
    assert client.attachment.limits.max_batch_keys == 1000


def test_events_are_followed(client, flavour):
    """A stream gives what comes, and None when nothing came in time."""
    stream = flavour.run(client.watch_events, 41)
    assert flavour.run(stream.next, 2.0).events[0].sequence == 42
    assert flavour.run(stream.next, 0.01) is None
    flavour.run(stream.close)
    assert flavour.run(client.capabilities).version == "fake"


def test_an_error_ends_a_stream(daemon, client, flavour):
    """The daemon's reason reaches the reader of the stream."""
    daemon.failures[Method.WATCH_EVENTS] = UnknownMethodError("not here")
    stream = flavour.run(client.watch_events)
    with pytest.raises(UnknownMethodError, match="not here"):
        flavour.run(stream.next, 2.0)
    flavour.run(stream.close)
