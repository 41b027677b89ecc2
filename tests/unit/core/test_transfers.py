"""Transfers over a wire: the capability is checked before and after, and slots are pinned meanwhile."""

import pytest

from kvservice.core.errors import (
    BatchSizeError,
    InvalidFieldError,
    LeaseExpiredError,
    LeaseUnknownError,
    NotOwnerError,
    ReservationAbortedError,
    ReservationExpiredError,
    ReservationUnknownError,
    StaleIncarnationError,
)
from kvservice.core.outcomes import ItemOutcome
from kvservice.core.slot_pool import SlotState
from tests.core_world import LARGE_BYTES, OTHER_ENGINE, SMALL_BYTES, World


@pytest.fixture
def world():
    """Give a world with four segments."""
    return World()


@pytest.fixture
def client(world):
    """Give a remote process, which reads and writes over a wire."""
    return world.attach(is_local=False)


@pytest.fixture
def spaces(client):
    """Give the spaces of a block of two parts, the first of which is no whole number of granules."""
    return client.open(SMALL_BYTES - 100, LARGE_BYTES)


def test_a_transfer_gets_the_slots_that_it_names(client, spaces):
    """In the order of the indexes, with the bytes of each block; checksums to a reader only."""
    reservation = client.reserve(spaces, [1, 2])
    write = client.begin(reservation.reservation_id, [3, 0], is_write=True)
    assert write.slots.granules.tolist() == reservation.slots.granules[[3, 0]].tolist()
    assert write.slots.segments.tolist() == reservation.slots.segments[[3, 0]].tolist()
    assert write.slots.generations.tolist() == reservation.slots.generations[[3, 0]].tolist()
    assert write.slots.checksums is None
    assert write.block_bytes.tolist() == [LARGE_BYTES, SMALL_BYTES - 100]
    client.world.end_transfer(write.transfer_id)
    client.commit(reservation, [10, 11, 12, 13])
    lease = client.acquire(spaces, [1, 2])
    read = client.begin(lease.lease_id, [2, 1, 0], is_write=False)
    assert read.slots.checksums.tolist() == [12, 11, 10]


def test_a_transfer_over_one_part_names_one_pool(client, spaces):
    """A subset that happens to lie in one pool is no special case."""
    reservation = client.reserve(spaces, [1, 2])
    write = client.begin(reservation.reservation_id, [1, 3], is_write=True)
    assert write.slots.granules.tolist() == reservation.slots.granules[[1, 3]].tolist()
    single = client.reserve(spaces[:1], [5, 6, 7])
    write = client.begin(single.reservation_id, [2, 0], is_write=True)
    assert write.slots.granules.tolist() == single.slots.granules[[2, 0]].tolist()


def test_a_slot_under_transfer_is_not_freed_by_an_abort(world, client, spaces):
    """The wire may still write: it stays in quarantine until the transfer has ended."""
    reservation = client.reserve(spaces, [1])
    transfer = client.begin(reservation.reservation_id, [0], is_write=True)
    client.abort(reservation.reservation_id)
    assert world.states_count(SlotState.QUARANTINED) == 1
    world.advance(3600)
    assert world.states_count(SlotState.QUARANTINED) == 1
    with pytest.raises(ReservationAbortedError):
        world.end_transfer(transfer.transfer_id, [7])
    assert world.states_count(SlotState.QUARANTINED) == 0


def test_a_transfer_outlives_the_death_of_its_session(world, client, spaces):
    """The daemon's side of the wire ends it, not the client."""
    reservation = client.reserve(spaces, [1])
    transfer = client.begin(reservation.reservation_id, [0, 1], is_write=True)
    client.leave()
    assert world.states_count(SlotState.QUARANTINED) == 2
    with pytest.raises(ReservationAbortedError):
        world.end_transfer(transfer.transfer_id)
    assert world.states_count(SlotState.QUARANTINED) == 0


def test_an_expired_write_is_told_so(world, client, spaces):
    """The bytes came too late, and nothing of them is visible."""
    reservation = client.reserve(spaces, [1], ttl_s=1)
    transfer = client.begin(reservation.reservation_id, [0], is_write=True)
    world.advance(1)
    with pytest.raises(ReservationExpiredError):
        world.end_transfer(transfer.transfer_id, [7])


def test_bytes_read_under_an_ended_lease_are_discarded(world, client, spaces):
    """Checked after as well as before; the slots are unpinned all the same."""
    client.put(spaces, [1])
    lease = client.acquire(spaces, [1], ttl_s=1)
    transfer = client.begin(lease.lease_id, [0, 1], is_write=False)
    world.advance(1)
    assert world.pool(slot_bytes=SMALL_BYTES).pins.sum() == 1
    with pytest.raises(LeaseExpiredError, match="discard the bytes"):
        world.end_transfer(transfer.transfer_id)
    assert world.pool(slot_bytes=SMALL_BYTES).pins.sum() == 0


def test_a_purged_block_under_transfer_is_freed_after_it(world, client):
    """Release and purge do not pull memory from under a wire."""
    opened = client.open_answer()
    client.put(opened.space_ids, [1])
    lease = client.acquire(opened.space_ids, [1])
    transfer = client.begin(lease.lease_id, [0], is_write=False)
    client.purge(opened.namespace_id)
    client.release(lease.lease_id)
    assert world.states_count(SlotState.EVICTING) == 1
    with pytest.raises(LeaseExpiredError):
        world.end_transfer(transfer.transfer_id)
    assert world.states_count(SlotState.EVICTING) == 0


def test_a_good_transfer_ends_silently(world, client, spaces):
    """With the capability alive, the bytes are good."""
    client.put(spaces, [1])
    lease = client.acquire(spaces, [1])
    transfer = client.begin(lease.lease_id, [0], is_write=False)
    world.end_transfer(transfer.transfer_id)
    assert world.books.transfers == {}


def test_a_transfer_ends_once(world, client, spaces):
    """A second end would unpin what is not pinned."""
    transfer = client.begin(client.reserve(spaces, [1]).reservation_id, [0], is_write=True)
    world.end_transfer(transfer.transfer_id)
    with pytest.raises(InvalidFieldError, match="names no running transfer"):
        world.end_transfer(transfer.transfer_id)


def test_a_failed_write_is_not_held_against_the_commit(world, client, spaces):
    """Without checksums nothing arrived, and the writer may use another way."""
    reservation = client.reserve(spaces, [1])
    transfer = client.begin(reservation.reservation_id, [0], is_write=True)
    world.end_transfer(transfer.transfer_id)
    client.commit(reservation, [5, 6])
    assert client.outcomes(spaces, [1]) == [ItemOutcome.HIT]


def test_slot_indexes_are_those_of_the_capability(client, spaces):
    """At least one, each once, none beyond; a refused transfer pins nothing."""
    reservation = client.reserve(spaces, [1, 2])
    for indexes in ([4], [-1], [0, 4]):
        with pytest.raises(InvalidFieldError, match="has slots 0 to 3"):
            client.begin(reservation.reservation_id, indexes, is_write=True)
    with pytest.raises(InvalidFieldError, match="names a slot twice"):
        client.begin(reservation.reservation_id, [1, 1], is_write=True)
    with pytest.raises(BatchSizeError):
        client.begin(reservation.reservation_id, [], is_write=True)


def test_only_its_engine_uses_a_capability(world, client, spaces):
    """Any process of the engine may, no other engine, before the end and after it."""
    stranger, peer = world.attach(engine=OTHER_ENGINE), world.attach()
    client.put(spaces, [1])
    reservation, lease = client.reserve(spaces, [2]), client.acquire(spaces, [1])
    peer.begin(reservation.reservation_id, [0], is_write=True)
    peer.begin(lease.lease_id, [0], is_write=False)
    for _ in range(2):
        with pytest.raises(NotOwnerError, match=r"reservation .* belongs to another engine"):
            stranger.begin(reservation.reservation_id, [0], is_write=True)
        with pytest.raises(NotOwnerError, match=r"lease .* belongs to another engine"):
            stranger.begin(lease.lease_id, [0], is_write=False)
        client.abort(reservation.reservation_id)
        client.release(lease.lease_id)


def test_an_ended_capability_begins_no_transfer(world, client, spaces):
    """The error says how it ended."""
    client.put(spaces, [1])
    lease, short = client.acquire(spaces, [1]), client.acquire(spaces, [1], ttl_s=1)
    aborted, expired = client.reserve(spaces, [2]), client.reserve(spaces, [3], ttl_s=1)
    client.release(lease.lease_id)
    client.abort(aborted.reservation_id)
    world.advance(1)
    for capability_id in (lease.lease_id, short.lease_id):
        with pytest.raises(LeaseExpiredError):
            client.begin(capability_id, [0], is_write=False)
    with pytest.raises(ReservationAbortedError):
        client.begin(aborted.reservation_id, [0], is_write=True)
    with pytest.raises(ReservationExpiredError):
        client.begin(expired.reservation_id, [0], is_write=True)


def test_an_unknown_capability_begins_no_transfer(world, client, spaces):
    """One that was never granted is told from one of another life."""
    reservation = client.reserve(spaces, [1])
    unknown = reservation.reservation_id + 1000
    with pytest.raises(ReservationUnknownError):
        client.begin(unknown, [0], is_write=True)
    with pytest.raises(LeaseUnknownError):
        client.begin(unknown, [0], is_write=False)
    stale = World(life=8).attach()
    for is_write in (True, False):
        with pytest.raises(StaleIncarnationError):
            stale.begin(reservation.reservation_id, [0], is_write=is_write)


def test_a_read_capability_does_not_write(client, spaces):
    """Nor the other way round."""
    client.put(spaces, [1])
    lease, reservation = client.acquire(spaces, [1]), client.reserve(spaces, [2])
    with pytest.raises(ReservationUnknownError):
        client.begin(lease.lease_id, [0], is_write=True)
    with pytest.raises(LeaseUnknownError):
        client.begin(reservation.reservation_id, [0], is_write=False)
    assert client.outcomes(spaces, [1]) == [ItemOutcome.HIT]
