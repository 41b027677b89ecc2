"""The one door: order of events, time, effects, and the invariants that watch over it."""

import numpy as np
import pytest

from kvservice.core import invariants
from kvservice.core.effects import EndSession, NewsForTenant, Revoke
from kvservice.core.errors import InvariantError, SpaceNotOpenError
from kvservice.core.events import Event, Lookup, Tick
from kvservice.core.outcomes import ItemOutcome
from kvservice.core.slot_pool import SlotState
from tests.core_world import LARGE_BYTES, OPERATIONS, SECOND_NS, SMALL_BYTES, World, key


@pytest.fixture
def world():
    """Give a world that does not check itself."""
    return World(check_every=0)


def test_an_unknown_event_is_a_bug(world):
    """Every event has one handler; another would be lost silently."""
    with pytest.raises(InvariantError, match="no handler for Event"):
        world.handle(Event())


def test_time_never_goes_back(world):
    """An event with an earlier time is handled at the latest time seen, so nothing lives longer by it."""
    client = world.attach()
    spaces = client.open()
    client.reserve(spaces, [1], ttl_s=5)
    world.advance(3)
    world.now_ns -= 3 * SECOND_NS
    assert client.reserve(spaces, [2], ttl_s=1).remaining_ns == SECOND_NS
    world.now_ns += 4 * SECOND_NS
    assert client.outcomes(spaces, [1, 2]) == [ItemOutcome.PENDING, ItemOutcome.MISS]


def test_the_effects_of_a_refused_event_come_with_the_next(world):
    """What expired before it has happened all the same, and the world hears of it."""
    client = world.attach()
    reservation = client.reserve(client.open(), [1], ttl_s=1)
    world.now_ns += SECOND_NS
    with pytest.raises(SpaceNotOpenError):
        client.outcomes((99,), [1])
    client.beat()
    assert world.last_effects == (Revoke(client.token, reservation.reservation_id),)
    client.beat()
    assert world.last_effects == ()


def test_the_next_deadline_is_when_something_may_be_due(world):
    """Never too late; a renewed or ended thing may be looked at for nothing."""
    assert world.state.next_deadline_ns() is None
    client = world.attach()
    spaces = client.open()
    client.put(spaces, [1])
    start = world.now_ns
    lease = client.acquire(spaces, [1], ttl_s=2)
    reservation = client.reserve(spaces, [2], ttl_s=1)
    assert world.handle(Tick()) == start + SECOND_NS
    client.renew(leases=[lease.lease_id], reservations=[reservation.reservation_id], ttl_s=5)
    assert world.advance(1) == start + 2 * SECOND_NS
    assert world.advance(1) == start + 5 * SECOND_NS
    client.release(lease.lease_id)
    client.commit(reservation)
    assert world.advance(3) == start + 10 * SECOND_NS
    assert world.advance(7) is None


def test_what_is_due_together_ends_together(world):
    """However many things expire between two events, the later event sees none of them."""
    local, remote = world.attach(), world.attach(is_local=False)
    spaces = local.open()
    remote.open()
    local.put(spaces, [1])
    for client, number in ((local, 2), (remote, 3)):
        client.acquire(spaces, [1])
        client.reserve(spaces, [number])
    world.advance(3600)
    assert world.books.leases == world.books.reservations == {}
    assert EndSession(remote.token) in world.last_effects
    assert local.outcomes(spaces, [1, 2, 3]) == [ItemOutcome.HIT, ItemOutcome.MISS, ItemOutcome.MISS]


@pytest.mark.parametrize("operations", OPERATIONS)
def test_the_loops_in_c_and_in_numpy_serve_alike(operations):
    """The state gives the same answers over either; the walk in tests/property compares much more."""
    client = World(operations=OPERATIONS[operations]).attach()
    spaces = client.open(SMALL_BYTES, LARGE_BYTES)
    client.put(spaces, range(5))
    answer = client.lookup(spaces, range(6), ttl_s=0)
    assert answer.outcomes.tolist() == [ItemOutcome.HIT] * 5 + [ItemOutcome.MISS]
    assert answer.lease.slots.checksums.tolist() == list(range(1, 11))


def test_a_world_starts_sound(world):
    """Before any event every rule holds."""
    invariants.check(world.state)
    assert world.effects == []


def test_effects_name_the_tenant_whose_news_they_are(world):
    """Followers of other tenants are not woken."""
    client = world.attach()
    client.put(client.open(), [1])
    assert world.last_effects == (NewsForTenant("acme"),)


def broken_states():
    """Yield ways to break a state of one tenant with a lease, a reservation and a quarantine."""

    def pool(world):
        return world.pool()

    def set_state(world):
        pool(world).state[np.flatnonzero(pool(world).state == SlotState.COMMITTED)[0]] = SlotState.FREE

    def lose_slot(world):
        pool(world).state[np.flatnonzero(pool(world).state == SlotState.FREE)[0]] = SlotState.ABSENT

    def list_twice(world):
        free = pool(world).free_indexes()
        free[0] = free[1]

    def list_taken(world):
        pool(world).free_indexes()[0] = np.flatnonzero(pool(world).state == SlotState.COMMITTED)[0]

    def touch_free(world):
        pool(world).pins[pool(world).free_indexes()[0]] = 1

    def unpin(world):
        pool(world).pins[np.flatnonzero(pool(world).pins)[0]] = 0

    def pin_below_none(world):
        pool(world).pins[np.flatnonzero(pool(world).state == SlotState.RESERVED)[0]] = -1

    def move_page(world):
        world.memory.pages[0] += np.uint64(1)

    def hide_key(world):
        tenant = world.books.tenant("acme")
        tenant.directory.remove(key(0), np.array([1], dtype=np.uint32))

    def swap_keys(world):
        taken = np.flatnonzero(pool(world).state == SlotState.COMMITTED)[:2]
        pool(world).keys[taken] = pool(world).keys[taken[::-1]]

    def shrink_quota(world):
        world.books.tenant("acme").quota_bytes = 1

    def lose_segment(world):
        del world.books.lent[0]

    def lend_elsewhere(world):
        world.books.lent[world.books.free_segments.pop()] = pool(world)

    def forget_lease(world):
        world.books.leases.clear()

    def forget_owner(world):
        next(iter(world.books.sessions.values())).reservations.clear()

    def wait_for_nobody(world):
        next(iter(world.books.quarantines.values())).waiting.clear()

    def wait_for_the_dead(world):
        next(iter(world.books.quarantines.values())).waiting.add(b"dead")

    def lose_session(world):
        world.books.quarantines.clear()
        world.books.sessions.clear()
        pool(world).pins[pool(world).state == SlotState.QUARANTINED] = 0

    def miscount(world):
        world.books.leases_ended_count += 1

    return [value for value in locals().values() if callable(value) and value is not pool]


@pytest.mark.parametrize("breaks", broken_states(), ids=lambda each: each.__name__)
def test_a_broken_state_is_noticed(breaks):
    """The check is what every randomised test relies on, so each of its rules is seen to bite."""
    world = World()
    client = world.attach()
    spaces = client.open()
    client.put(spaces, range(3))
    client.reserve(spaces, [20], ttl_s=1)
    world.advance(1)
    client.acquire(spaces, [0])
    client.reserve(spaces, [30])
    breaks(world)
    with pytest.raises(InvariantError):
        invariants.check(world.state)


def test_a_lookup_changes_nothing_but_the_time_it_was_heard(world):
    """It is a question: the tables are byte for byte what they were."""
    client = world.attach()
    spaces = client.open()
    client.put(spaces, [1])
    rows = world.books.tenant("acme").directory.rows.copy()
    world.handle(Lookup(client.token, spaces, key(1) + key(2), None))
    assert world.last_effects == ()
    assert world.books.tenant("acme").directory.rows.tobytes() == rows.tobytes()
