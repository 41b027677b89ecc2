"""Rules that the core once broke: each test failed before its fix, and its docstring tells the story."""

import contextlib

import pytest

from kvservice.core import invariants
from kvservice.core.errors import (
    ArenaFullError,
    KvError,
    RequestIdReusedError,
    ReservationUnknownError,
)
from kvservice.core.outcomes import ItemOutcome
from tests.core_world import LARGE_BYTES, SEGMENT_BYTES, SMALL_BYTES, World

HIT, MISS = ItemOutcome.HIT, ItemOutcome.MISS
SMALL_PER_SEGMENT = SEGMENT_BYTES // SMALL_BYTES


def test_a_failed_lending_ahead_keeps_no_slot():
    """When the machine refuses memory after the slots were taken, they go back, or the call goes on.

    `allocate` takes the slots and then lends ahead; a refusal there leaves them RESERVED for ever.
    """
    world = World(segments_count=2, check_every=0)
    acme, bolt = world.attach("acme"), world.attach("bolt")
    spaces, others = acme.open(LARGE_BYTES), bolt.open()
    acme.put(spaces, [1])
    bolt.put(others, [1])
    world.memory.is_exhausted = True
    with pytest.raises(ArenaFullError):
        bolt.reserve(others, range(10, 10 + SMALL_PER_SEGMENT))
    with contextlib.suppress(KvError):
        bolt.reserve(others, [100])
    invariants.check(world.state)


def test_a_namespace_opens_without_memory_for_lending_ahead():
    """OpenNamespace needs no memory, so want of it is no reason to refuse (its errors do not list it)."""
    world = World(segments_count=1)
    acme, bolt = world.attach("acme"), world.attach("bolt")
    acme.put(acme.open(), [1])
    spaces = bolt.open()
    world.memory.is_exhausted = True
    with pytest.raises(ArenaFullError):
        bolt.reserve(spaces, [1])
    assert bolt.open(LARGE_BYTES)


def test_a_call_refused_by_the_machine_evicts_nothing():
    """The blocks of a segment are given up before its replacement was got: a failed call costs them all."""
    world = World(segments_count=1)
    acme, bolt = world.attach("acme"), world.attach("bolt")
    spaces, others = acme.open(), bolt.open()
    acme.put(spaces, range(8))
    world.memory.is_exhausted = True
    with pytest.raises(ArenaFullError):
        bolt.reserve(others, [1])
    assert acme.outcomes(spaces, range(8)) == [HIT] * 8


def test_a_refused_batch_of_several_parts_evicts_nothing():
    """The first part's slots are found, by evicting, before it is known whether the second has any."""
    world = World(segments_count=2)
    client, other = world.attach(), world.attach("bolt")
    spaces = client.open(SMALL_BYTES, LARGE_BYTES)
    client.put(spaces[:1], range(SMALL_PER_SEGMENT))
    client.acquire(spaces[:1], [0])
    other.reserve(other.open(), [1])
    with pytest.raises(ArenaFullError):
        client.reserve(spaces, [100, 101])
    assert client.outcomes(spaces[:1], range(SMALL_PER_SEGMENT)) == [HIT] * SMALL_PER_SEGMENT


def test_a_request_with_many_spaces_is_told_from_another():
    """The digest of a request takes the first 64 characters of its list of spaces, and no more."""
    world = World(segment_bytes=1 << 20)
    client = world.attach()
    spaces = client.open(*([512] * 41))
    request_id = world.fresh()
    client.reserve(spaces[:40], [1], request_id=request_id)
    for others in ((*spaces[:39], spaces[40]), spaces):
        with pytest.raises(RequestIdReusedError):
            client.reserve(others, [1], request_id=request_id)


def test_a_lease_is_no_reservation():
    """A commit with the id of a released lease answers DONE, as if something were visible."""
    client = World().attach()
    spaces = client.open()
    client.put(spaces, [1])
    lease = client.acquire(spaces, [1])
    client.release(lease.lease_id)
    with pytest.raises(ReservationUnknownError):
        client.commit_id(lease.lease_id)


def test_an_abort_of_a_lease_is_unknown():
    """No reservation has that id; ALREADY_RELEASED is no outcome of Abort."""
    client = World().attach()
    spaces = client.open()
    client.put(spaces, [1])
    lease = client.acquire(spaces, [1])
    client.release(lease.lease_id)
    assert client.abort(lease.lease_id) is ItemOutcome.UNKNOWN


def test_a_reservation_is_no_lease():
    """A release, or a renewal as a lease, of a committed reservation answers DONE, as if it were held."""
    client = World().attach()
    spaces = client.open()
    reservation = client.put(spaces, [1])
    assert client.renew(leases=[reservation.reservation_id]).lease_outcomes.tolist() == [ItemOutcome.UNKNOWN]
    assert client.release(reservation.reservation_id) == [ItemOutcome.UNKNOWN]


def test_a_renewal_says_the_shortest_time_left():
    """`remaining` is the shortest time left among those renewed; it is always the life asked for."""
    client = World().attach()
    spaces = client.open()
    client.put(spaces, [1])
    lease = client.acquire(spaces, [1], ttl_s=9)
    assert client.renew(leases=[lease.lease_id], ttl_s=1).remaining_ns == 9_000_000_000


def test_what_a_reserve_calls_committed_is_not_evicted_by_it():
    """ALREADY_COMMITTED says that nothing need be written, so the same call must not evict the block."""
    world = World(segments_count=1)
    client = world.attach()
    spaces = client.open()
    client.put(spaces, range(10))
    with pytest.raises(ArenaFullError):
        client.reserve(spaces, range(10 + 12))
    answer = client.reserve(spaces, range(10 + 6))
    assert answer.outcomes.tolist()[:10] == [ItemOutcome.ALREADY_COMMITTED] * 10
    assert client.outcomes(spaces, range(10)) == [HIT] * 10


def test_a_chain_written_in_two_batches_loses_its_leaf_first():
    """Leaf before root, over the whole chain: the second batch is younger, so the end of the first goes."""
    world = World(segments_count=1)
    client = world.attach()
    spaces = client.open()
    client.put(spaces, range(8))
    client.put(spaces, range(16))
    client.put(spaces, [100, 101, 102])
    assert client.outcomes(spaces, range(16)) == [HIT] * 13 + [MISS] * 3


def test_a_tenant_without_a_quota_is_told_that_the_arena_is_full():
    """Its quota is the arena, so it is told to ask for a larger quota where there is no memory."""
    world = World(segments_count=1)
    client = world.attach()
    spaces = client.open()
    client.reserve(spaces, range(SMALL_PER_SEGMENT))
    with pytest.raises(ArenaFullError):
        client.reserve(spaces, [100])


def test_nothing_is_committed_while_a_wire_still_writes_it():
    """The daemon moves these bytes: after the commit they change under readers, and are never checked."""
    world = World()
    client = world.attach(is_local=False)
    spaces = client.open()
    reservation = client.reserve(spaces, [1])
    transfer = client.begin(reservation.reservation_id, [0], is_write=True)
    try:
        client.commit(reservation)
    except KvError:
        return
    assert client.outcomes(spaces, [1]) != [HIT], "visible, and still being written"
    world.end_transfer(transfer.transfer_id, [1])
