"""Reservations whose keys are named at their commit: slots ahead of the keys."""

import pytest

from kvservice.core.errors import (
    DuplicateKeyError,
    InvalidFieldError,
    NotOwnerError,
    RequestIdReusedError,
    ReservationExpiredError,
)
from kvservice.core.outcomes import ItemOutcome
from kvservice.core.slot_pool import SlotState
from tests.core_world import LARGE_BYTES, SMALL_BYTES, World, places_of

DONE, PENDING, ALREADY = ItemOutcome.DONE, ItemOutcome.PENDING, ItemOutcome.ALREADY_COMMITTED
HIT, MISS = ItemOutcome.HIT, ItemOutcome.MISS


@pytest.fixture
def world():
    """Make a state with nothing in it."""
    return World()


@pytest.fixture
def client(world):
    """Attach a session."""
    return world.attach()


@pytest.fixture
def spaces(client):
    """Open one space."""
    return client.open()


def reserved(world):
    """Return how many slots are reserved."""
    pools = [pool for tenant in world.books.tenants.values() for pool in tenant.pools.values()]
    return sum(int((pool.state == SlotState.RESERVED).sum()) for pool in pools)


def test_the_keys_become_visible_with_the_commit_that_names_them(client, spaces):
    """Nothing is pending and nothing is there before; afterwards each key is in the slots of its place."""
    ahead = client.reserve_unnamed(spaces, 3)
    assert ahead.outcomes.tolist() == [ItemOutcome.GRANTED] * 3
    assert client.outcomes(spaces, [1, 2, 3]) == [MISS] * 3
    answer = client.commit_named(ahead, [1, 2, 3], [11, 12, 13])
    assert (answer.keys_count, list(answer.outcomes)) == (3, [DONE] * 3)
    lease = client.acquire(spaces, [1, 2, 3])
    assert places_of(lease.slots) == places_of(ahead.slots)
    assert lease.slots.checksums.tolist() == [11, 12, 13]


def test_what_is_left_over_goes_back(world, client, spaces):
    """A writer may have reserved for more than it has to store."""
    ahead = client.reserve_unnamed(spaces, 5)
    client.commit_named(ahead, [1, 2], [1, 2])
    assert client.outcomes(spaces, [1, 2]) == [HIT] * 2
    assert reserved(world) == 0
    with pytest.raises(InvalidFieldError, match="keys names 3 keys"):
        client.commit_named(client.reserve_unnamed(spaces, 2), [7, 8, 9])


def test_what_others_stored_meanwhile_is_an_outcome(world, client, spaces):
    """The first to commit wins; a key that somebody else is writing is left to them."""
    ahead = client.reserve_unnamed(spaces, 4)
    client.put(spaces, [1])
    other = client.reserve(spaces, [3])
    answer = client.commit_named(ahead, [1, 2, 3, 4], [91, 92, 93, 94])
    assert list(answer.outcomes) == [ALREADY, DONE, PENDING, DONE]
    assert answer.keys_count == 2
    assert reserved(world) == 1
    client.commit(other, [33])
    assert client.acquire(spaces, [1, 2, 3, 4]).slots.checksums.tolist() == [1, 92, 33, 94]


def test_a_commit_that_stores_nothing_is_done_all_the_same(world, client, spaces):
    """All keys were there: every slot goes back, and a second commit says the same."""
    client.put(spaces, [1, 2])
    ahead = client.reserve_unnamed(spaces, 2)
    assert client.commit_named(ahead, [1, 2]).keys_count == 0
    assert client.commit_named(ahead, [1, 2]).outcome is DONE
    assert reserved(world) == 0


def test_blocks_of_several_parts_are_named_all_or_not_at_all(client):
    """Slots are key-major, so the first slots are the parts of the first key."""
    both = client.open(SMALL_BYTES, LARGE_BYTES)
    client.put(both, [2])
    ahead = client.reserve_unnamed(both, 3)
    answer = client.commit_named(ahead, [1, 2, 3], range(1, 7))
    assert list(answer.outcomes) == [DONE, ALREADY, DONE]
    assert client.acquire(both, [1]).slots.checksums.tolist() == [1, 2]
    assert client.acquire(both, [3]).slots.checksums.tolist() == [5, 6]


def test_the_rules_of_a_reservation_hold(world, client, spaces):
    """Owner, expiry, request id, abort and unique keys are as for a reservation by name."""
    stranger = world.attach("acme", engine=b"another engine..")
    stranger.open()
    ahead = client.reserve_unnamed(spaces, 2)
    with pytest.raises(NotOwnerError):
        stranger.commit_named(ahead, [1])
    with pytest.raises(DuplicateKeyError):
        client.commit_named(ahead, [1, 1])
    with pytest.raises(InvalidFieldError, match="checksums has 1 entries for 2 keys"):
        client.commit_named(ahead, [1, 2], [5])
    assert client.abort(ahead.reservation_id) is DONE
    assert reserved(world) == 0
    late = client.reserve_unnamed(spaces, 2, request_id=b"r" * 16)
    assert client.reserve_unnamed(spaces, 2, request_id=b"r" * 16).reservation_id == late.reservation_id
    with pytest.raises(RequestIdReusedError):
        client.reserve_unnamed(spaces, 3, request_id=b"r" * 16)
    world.advance(11)
    with pytest.raises(ReservationExpiredError):
        client.commit_named(late, [1])


def test_keys_are_named_once(client, spaces):
    """Where the reserve named them the commit does not, and a reserve names keys or a number."""
    with pytest.raises(InvalidFieldError, match="leave it out"):
        client.commit_named(client.reserve(spaces, [1]), [1], [1])
    with pytest.raises(InvalidFieldError, match="give one of them"):
        client.reserve_unnamed(spaces, 2, keys=bytes(32))
