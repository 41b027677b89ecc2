"""Lookups and leases: what is leased stays, until it is released, expires, or its session ends."""

import numpy as np
import pytest

from kvservice.core.effects import Revoke
from kvservice.core.errors import (
    ArenaFullError,
    BatchSizeError,
    InvalidFieldError,
    LimitReachedError,
    QuotaExceededError,
)
from kvservice.core.limits import RETRY_AFTER_MS
from kvservice.core.outcomes import ItemOutcome
from kvservice.core.slot_pool import SlotState
from tests.core_world import OTHER_ENGINE, SECOND_NS, World, places_of

HIT, MISS, PENDING, DONE = ItemOutcome.HIT, ItemOutcome.MISS, ItemOutcome.PENDING, ItemOutcome.DONE


@pytest.fixture
def world():
    """Give a world with one segment, so that eviction is never far."""
    return World(segments_count=1)


@pytest.fixture
def client(world):
    """Give a local process of an engine."""
    return world.attach()


@pytest.fixture
def spaces(client):
    """Give an open space with the keys 0 to 9 committed."""
    opened = client.open()
    client.put(opened, range(10))
    return opened


def test_only_the_contiguous_prefix_is_leased(client, spaces):
    """A block behind a gap is of no use to an engine: it lies behind tokens that must be computed."""
    numbers = [0, 1, 50, 2, 3]
    answer = client.lookup(spaces, numbers, ttl_s=0)
    assert answer.outcomes.tolist() == [HIT, HIT, MISS, HIT, HIT]
    assert answer.prefix_count == answer.lease.keys_count == len(answer.lease.slots) == 2
    acquired = client.acquire(spaces, numbers)
    assert acquired.slots.granules.tolist() == answer.lease.slots.granules.tolist()


def test_a_lookup_leases_in_the_same_call(world, client, spaces):
    """Between a lookup and a later acquire the blocks might go; this way they cannot."""
    lease = client.lookup(spaces, range(10), ttl_s=5).lease
    assert lease.remaining_ns == 5 * SECOND_NS
    other = world.attach("bolt")
    with pytest.raises(ArenaFullError):
        other.reserve(other.open(), [1])
    assert client.outcomes(spaces, range(10)) == [HIT] * 10


def test_a_lookup_without_a_lease_pins_nothing(world, client, spaces):
    """It is a question; asking twice is free."""
    assert client.lookup(spaces, range(10)).lease is None
    assert not world.pool().pins.any()
    assert world.books.leases == {}


def test_without_a_prefix_there_is_no_lease(client, spaces):
    """A lease over nothing would only have to be released."""
    assert client.lookup(spaces, [50, 1], ttl_s=0).lease is None
    assert client.acquire(spaces, [50, 1]) is None
    client.reserve(spaces, [60])
    assert client.acquire(spaces, [60]) is None


def test_a_leased_block_is_not_evicted(client, spaces):
    """Everything else goes first, and then the arena is full."""
    client.acquire(spaces, range(8))
    client.put(spaces, range(100, 108))
    assert client.outcomes(spaces, range(10)) == [HIT] * 8 + [MISS] * 2
    client.acquire(spaces, range(100, 108))
    with pytest.raises((ArenaFullError, QuotaExceededError)):
        client.reserve(spaces, [200])


def test_a_release_is_data_when_it_comes_twice(world, client, spaces):
    """Each item says what became of it; late ones are counted and change nothing."""
    lease = client.acquire(spaces, range(3))
    expired = client.acquire(spaces, range(3), ttl_s=1)
    world.advance(1)
    unknown = lease.lease_id + 1000
    assert client.release(lease.lease_id, lease.lease_id, expired.lease_id, unknown) == [
        DONE,
        ItemOutcome.ALREADY_RELEASED,
        ItemOutcome.ALREADY_EXPIRED,
        ItemOutcome.UNKNOWN,
    ]
    assert world.books.late_ends_count == 3
    assert client.release() == []


def test_leases_of_one_block_are_counted_apart(world, client, spaces):
    """Each success is another lease, and the block is held until the last has ended."""
    one, two = client.acquire(spaces, [0]), client.acquire(spaces, [0])
    assert one.lease_id != two.lease_id
    client.release(one.lease_id)
    assert int(world.pool().pins.sum()) == 1
    client.release(two.lease_id)
    assert int(world.pool().pins.sum()) == 0


def test_a_stranger_cannot_release_or_renew(world, client, spaces):
    """To another engine a lease does not exist."""
    stranger = world.attach(engine=OTHER_ENGINE)
    lease = client.acquire(spaces, [0])
    assert stranger.release(lease.lease_id) == [ItemOutcome.UNKNOWN]
    assert stranger.renew(leases=[lease.lease_id]).lease_outcomes.tolist() == [ItemOutcome.UNKNOWN]
    client.release(lease.lease_id)
    assert stranger.release(lease.lease_id) == [ItemOutcome.UNKNOWN]


def test_another_process_of_the_engine_may_release(world, client, spaces):
    """A scheduler acquires, a worker reads and releases."""
    lease = client.acquire(spaces, [0])
    assert world.attach().release(lease.lease_id) == [DONE]


def test_a_lease_ends_at_its_deadline(world, client, spaces):
    """A server-side expiry: nothing is pinned for ever by a client that forgot."""
    lease = client.acquire(spaces, [0], ttl_s=1)
    world.now_ns += SECOND_NS - 1
    assert client.renew(leases=[lease.lease_id]).lease_outcomes.tolist() == [DONE]
    world.now_ns += 10 * SECOND_NS
    assert client.release(lease.lease_id) == [ItemOutcome.ALREADY_EXPIRED]


def test_a_renewal_prolongs_from_now(world, client, spaces):
    """Leases and reservations alike, by the life asked for."""
    lease, reservation = client.acquire(spaces, [0], ttl_s=2), client.reserve(spaces, [60], ttl_s=2)
    world.advance(1)
    answer = client.renew(leases=[lease.lease_id], reservations=[reservation.reservation_id], ttl_s=5)
    assert answer.remaining_ns == 5 * SECOND_NS
    world.advance(4.9)
    assert client.release(lease.lease_id) == [DONE]
    client.commit(reservation)


def test_a_renewal_never_shortens(world, client, spaces):
    """A late and small one must not take away what an earlier one gave."""
    lease, reservation = client.acquire(spaces, [0], ttl_s=2), client.reserve(spaces, [60], ttl_s=2)
    for ttl_s in (9, 1):
        client.renew(leases=[lease.lease_id], reservations=[reservation.reservation_id], ttl_s=ttl_s)
    world.advance(2)
    world.advance(6)
    assert client.release(lease.lease_id) == [DONE]
    client.commit(reservation)


def test_a_renewal_of_what_has_ended_says_how(world, client, spaces):
    """Outcomes, not errors: one ended item does not stop the renewal of the others."""
    live, released = client.acquire(spaces, [0]), client.acquire(spaces, [0])
    committed, aborted = client.reserve(spaces, [60]), client.reserve(spaces, [61])
    expired = client.reserve(spaces, [62], ttl_s=1)
    client.release(released.lease_id)
    client.commit(committed)
    client.abort(aborted.reservation_id)
    world.advance(1)
    answer = client.renew(
        leases=[live.lease_id, released.lease_id, 5],
        reservations=[each.reservation_id for each in (committed, aborted, expired)] + [5],
    )
    assert answer.lease_outcomes.tolist() == [DONE, ItemOutcome.ALREADY_RELEASED, ItemOutcome.UNKNOWN]
    assert answer.reservation_outcomes.tolist() == [
        ItemOutcome.ALREADY_COMMITTED,
        ItemOutcome.ALREADY_ABORTED,
        ItemOutcome.ALREADY_EXPIRED,
        ItemOutcome.UNKNOWN,
    ]


def test_a_beat_renews_with_the_default_life(world, client, spaces):
    """All of a session's leases and reservations in one message."""
    lease, reservation = client.acquire(spaces, [0], ttl_s=2), client.reserve(spaces, [60], ttl_s=2)
    answer = client.beat(leases=[lease.lease_id], reservations=[reservation.reservation_id])
    assert answer.renewal.lease_outcomes.tolist() == [DONE]
    assert answer.renewal.reservation_outcomes.tolist() == [DONE]
    assert answer.renewal.remaining_ns == world.limits.default_ttl_ns
    assert answer.revoked_ids.tolist() == []
    world.advance(9)
    assert client.release(lease.lease_id) == [DONE]


def test_batches_of_ids_are_bounded():
    """Every list of a request has a limit."""
    client = World(max_batch_keys=2).attach()
    three = [1, 2, 3]
    slots = np.arange(3, dtype=np.uint32)
    for call in (
        lambda: client.release(*three),
        lambda: client.renew(leases=three),
        lambda: client.renew(reservations=three),
        lambda: client.beat(leases=three),
        lambda: client.beat(reservations=three),
        lambda: client.beat(acknowledged=three),
        lambda: client.beat(touched=type("Slots", (), {"segments": slots, "granules": slots})),
    ):
        with pytest.raises(BatchSizeError, match="0 to 2 are allowed"):
            call()
    with pytest.raises(BatchSizeError, match="1 to 2 are allowed"):
        client.lookup(client.open(), [])


def test_a_session_holds_a_bounded_number_of_leases():
    """A client that leaks them is told; asking without a lease still works."""
    client = World(max_leases=2).attach()
    spaces = client.open()
    client.put(spaces, [0])
    first = client.acquire(spaces, [0])
    client.acquire(spaces, [0])
    with pytest.raises(LimitReachedError) as caught:
        client.lookup(spaces, [0], ttl_s=0)
    assert caught.value.retry_after_ms == RETRY_AFTER_MS
    assert client.outcomes(spaces, [0]) == [HIT]
    client.release(first.lease_id)
    assert client.acquire(spaces, [0])


def test_a_life_is_never_negative(client, spaces):
    """A lease that is over before it began protects nothing."""
    with pytest.raises(InvalidFieldError, match="must not be negative"):
        client.acquire(spaces, [0], ttl_s=-1)
    with pytest.raises(InvalidFieldError, match="must not be negative"):
        client.renew(ttl_s=-1)


def test_an_expired_lease_pins_until_every_local_process_has_let_go(world, client, spaces):
    """They map the memory and may still be reading: a deadline that passed stops no copy."""
    peer = world.attach()
    lease = client.acquire(spaces, range(10), ttl_s=1)
    world.advance(1)
    told = {effect.token for effect in world.last_effects if isinstance(effect, Revoke)}
    assert told == {client.token, peer.token}
    world.advance(1000)
    assert int(world.pool().pins.sum()) == 10
    assert client.beat(acknowledged=[lease.lease_id]).revoked_ids.tolist() == []
    assert peer.beat().revoked_ids.tolist() == [lease.lease_id]
    assert int(world.pool().pins.sum()) == 10
    peer.beat(acknowledged=[lease.lease_id])
    assert int(world.pool().pins.sum()) == 0


def test_a_block_with_an_expired_lease_stays_visible(world, client, spaces):
    """A lease only reads: others may lease the block while its last reader is waited for."""
    client.acquire(spaces, range(10), ttl_s=1)
    world.advance(1)
    assert client.acquire(spaces, range(10)).keys_count == 10


def test_leases_held_are_those_granted_less_those_ended(world, client, spaces):
    """No lease is lost or counted twice, however it ends."""
    peer = world.attach()
    peer.open()
    leases = [each.acquire(spaces, [0], ttl_s=ttl_s) for each in (client, peer) for ttl_s in (1, 9, 9)]
    client.release(leases[1].lease_id)
    world.advance(1)
    peer.leave()
    books = world.books
    assert (books.leases_granted_count, books.leases_ended_count) == (6, 5)
    assert list(books.leases) == [leases[2].lease_id]
    assert world.states_count(SlotState.COMMITTED) == 10


def test_a_lookup_can_locate_without_a_lease(world, client, spaces):
    """A reader on the same host needs places and generations, and leaves nothing behind."""
    client.put(spaces, [101, 102])
    answer = client.lookup(spaces, [101, 102, 103], locate=True)
    leased = client.acquire(spaces, [101, 102])
    assert answer.lease is None
    for name in ("segments", "granules", "generations", "checksums"):
        assert getattr(answer.slots, name).tolist() == getattr(leased.slots, name).tolist()
    client.release(leased.lease_id)
    assert not world.books.leases
    assert client.lookup(spaces, [103], locate=True).slots is None
    assert client.lookup(spaces, [101]).slots is None


def test_a_damaged_block_is_dropped_alone(world, client, spaces):
    """Its slot is free at once; the others stay, and the key can be written again."""
    slots = client.lookup(spaces, [3], locate=True).slots
    assert client.discard(slots) == 1
    assert client.outcomes(spaces, range(2, 5)) == [HIT, MISS, HIT]
    assert world.is_moved(slots)
    client.put(spaces, [3])
    assert client.outcomes(spaces, [3]) == [HIT]


def test_what_was_written_since_is_not_dropped(client, spaces):
    """A late report is about a block that is gone: the slot's next owner must not pay for it."""
    slots = client.lookup(spaces, [3], locate=True).slots
    client.discard(slots)
    client.put(spaces, [3])
    assert client.lookup(spaces, [3], locate=True).slots.granules.tolist() == slots.granules.tolist()
    assert client.discard(slots) == 0
    assert client.outcomes(spaces, [3]) == [HIT]


def test_a_damaged_block_under_a_lease_goes_with_the_lease(world, client, spaces):
    """Who reads it may go on, and sees by the checksum what it is; nobody new comes to it."""
    lease = client.acquire(spaces, [3])
    assert client.discard(client.lookup(spaces, [3], locate=True).slots) == 1
    assert client.outcomes(spaces, [3]) == [MISS]
    assert world.states_count(SlotState.EVICTING) == 1
    assert client.release(lease.lease_id) == [DONE]
    assert world.states_count(SlotState.EVICTING) == 0


def test_nobody_drops_the_blocks_of_another_tenant(world, client, spaces):
    """A location is no right."""
    slots = client.lookup(spaces, [3], locate=True).slots
    assert world.attach("bolt").discard(slots) == 0
    assert client.outcomes(spaces, [3]) == [HIT]


def test_one_block_is_located_as_many_are(world, client, spaces):
    """The short way for one key answers the same, and counts as a use too."""
    many = client.lookup(spaces, [4, 5], locate=True).slots
    for position, number in enumerate((4, 5)):
        answer = client.lookup(spaces, [number], locate=True)
        assert (answer.outcomes.tolist(), answer.prefix_count, answer.lease) == ([HIT], 1, None)
        alone, among = answer.slots, many.take(slice(position, position + 1))
        assert places_of(alone) == places_of(among)
        assert alone.generations.tolist() == among.generations.tolist()
        assert alone.checksums.tolist() == among.checksums.tolist()
    pool = world.pool()
    newest = int(pool.indexes_of(many.segments[1:], many.granules[1:])[0])
    assert pool.policy.newest(slice(None)) == pool.policy.newest(np.array([newest]))
    assert client.lookup(spaces, [77], locate=True).slots is None
