"""What goes first: the policy by itself, and what the state evicts by it."""

import numpy as np
import pytest

from kvservice.core.eviction import QUEUE_MIN_COUNT, LeastRecentlyUsed, UseClock
from kvservice.core.outcomes import ItemOutcome
from tests.core_world import World

HIT, MISS = ItemOutcome.HIT, ItemOutcome.MISS


@pytest.fixture
def clock():
    """Give the clock that pools share."""
    return UseClock()


@pytest.fixture
def policy(clock):
    """Give a policy over 8 slots."""
    made = LeastRecentlyUsed(clock)
    made.resize(8)
    return made


def array(*indexes):
    """Return slot indexes."""
    return np.array(indexes, dtype=np.int64)


class Allowed:
    """Which slots may be evicted now."""

    def __init__(self, count, *barred):
        self.mask = np.ones(count, dtype=bool)
        self.bar(*barred)

    def bar(self, *indexes):
        self.mask[list(indexes)] = False

    def __call__(self, indexes):
        return self.mask[indexes]


def test_the_leaf_goes_before_the_root(policy):
    """What remains of a chain is a prefix of it, and a prefix is what a lookup can use."""
    policy.touched(array(3, 1, 2))
    assert policy.victims(3, Allowed(8, 0, 4, 5, 6, 7)).tolist() == [2, 1, 3]


def test_a_chain_used_earlier_goes_first(policy):
    """Least recently used, chain by chain."""
    policy.touched(array(0, 1))
    policy.touched(array(2, 3))
    policy.touched(array(0, 1))
    assert policy.victims(2, Allowed(8, 4, 5, 6, 7)).tolist() == [3, 2]


def test_only_the_eligible_are_victims(policy):
    """There may be fewer than were asked for, also none."""
    policy.touched(array(0, 1, 2))
    assert policy.victims(8, Allowed(8, 1, 3, 4, 5, 6, 7)).tolist() == [2, 0]
    assert policy.victims(1, Allowed(8, *range(8))).tolist() == []


def test_asking_changes_nothing(policy):
    """The caller may take fewer victims than it asked for."""
    policy.touched(array(0, 1, 2))
    allowed = Allowed(8, 3, 4, 5, 6, 7)
    assert policy.victims(2, allowed).tolist() == policy.victims(2, allowed).tolist() == [2, 1]


def test_a_victim_that_was_used_or_pinned_since_the_scan_is_passed_over(policy):
    """The queue of an earlier scan is only a guess."""
    policy.touched(array(0, 1, 2, 3))
    allowed = Allowed(8, 4, 5, 6, 7)
    assert policy.victims(1, allowed).tolist() == [3]
    policy.touched(array(3))
    allowed.bar(2)
    assert policy.victims(2, allowed).tolist() == [1, 0]


def test_a_scan_of_more_than_it_looks_for_finds_the_oldest(clock):
    """A scan sorts only the oldest of a large pool; they are still the oldest."""
    policy = LeastRecentlyUsed(clock)
    count = QUEUE_MIN_COUNT * 3
    policy.resize(count)
    order = np.random.default_rng(5).permutation(count)
    for index in order:
        policy.touched(array(index))
    assert policy.victims(100, Allowed(count)).tolist() == order[:100].tolist()
    assert policy.victims(QUEUE_MIN_COUNT, Allowed(count)).tolist() == order[:QUEUE_MIN_COUNT].tolist()


def test_growing_keeps_the_order(policy):
    """New slots start unused; old ones keep their age."""
    policy.touched(array(0, 1))
    policy.resize(16)
    assert policy.newest(slice(8, 16)) == 0
    assert policy.victims(2, Allowed(16, *range(2, 16))).tolist() == [1, 0]


def test_stamps_of_two_pools_compare(policy, clock):
    """One clock for all pools, so that a segment can be taken from the pool that is idler."""
    other = LeastRecentlyUsed(clock)
    other.resize(2)
    policy.touched(array(0))
    other.touched(array(0))
    assert policy.newest(array(0)) < other.newest(array(0))
    assert policy.oldest(Allowed(8, *range(1, 8)).mask) < other.oldest(np.array([True, False]))


def test_nothing_is_oldest_among_nothing(policy):
    """A pool that has nothing to give is no reason to spare another's segment."""
    assert policy.oldest(np.zeros(8, dtype=bool)) == 2**63
    assert policy.newest(array()) == 0


def test_a_full_arena_gives_up_the_leaf_of_the_oldest_chain():
    """A reserve finds its room at the end of what was used least lately."""
    world = World(segments_count=1)
    client = world.attach()
    spaces = client.open()
    client.put(spaces, range(8))
    client.put(spaces, range(100, 108))
    client.put(spaces, range(200, 203))
    assert client.outcomes(spaces, range(8)) == [HIT] * 5 + [MISS] * 3
    assert client.outcomes(spaces, range(100, 108)) == [HIT] * 8
    assert world.books.evicted_count == 3


def test_a_reader_can_tell_that_a_block_was_evicted():
    """A directory read holds no lease: the generation of the slot is how it learns that it came too late."""
    world = World(segments_count=1)
    client = world.attach()
    spaces = client.open()
    client.put(spaces, range(16))
    old = client.acquire(spaces, range(16))
    client.release(old.lease_id)
    assert not world.is_moved(old.slots)
    client.put(spaces, range(100, 116))
    assert world.is_moved(old.slots)


def test_a_lease_makes_a_chain_young():
    """A use is a use: what was leased and released since is not the oldest any more."""
    world = World(segments_count=1)
    client = world.attach()
    spaces = client.open()
    client.put(spaces, range(8))
    client.put(spaces, range(100, 108))
    client.release(client.acquire(spaces, range(8)).lease_id)
    client.put(spaces, [200])
    assert client.outcomes(spaces, [7, 107]) == [HIT, MISS]


def test_a_directory_read_makes_a_block_young():
    """Reads without a call are reported with the beat, and count as uses; wrong hints change nothing."""
    world = World(segments_count=1)
    client, stranger = world.attach(), world.attach("bolt")
    spaces = client.open()
    first = client.put(spaces, range(8))
    second = client.put(spaces, range(100, 108))
    client.beat(touched=first.slots)
    stranger.beat(touched=second.slots)
    client.beat(touched=second.slots.take(slice(0, 0)))
    client.put(spaces, [200])
    assert client.outcomes(spaces, [7, 107]) == [HIT, MISS]


def test_a_hint_that_fits_nothing_changes_nothing():
    """Hints of unequal lengths, of no segment, or of slots that hold no block, are passed over."""
    world = World(segments_count=1)
    client = world.attach()
    spaces = client.open()
    client.put(spaces, range(8))
    reserved = client.reserve(spaces, range(100, 104))
    stamp = world.books.use_clock.advance(0)
    client.beat(touched=reserved.slots)
    client.beat(touched=type(reserved.slots)(*(np.array([77], dtype=np.uint32) for _ in range(3))))
    client.beat(touched=type(reserved.slots)(*(np.zeros(n, dtype=np.uint32) for n in (1, 2, 1))))
    assert world.books.use_clock.advance(0) == stamp


def test_extending_a_chain_does_not_make_its_root_the_victim():
    """A reserve that names committed keys uses them: older chains go first."""
    world = World(segments_count=1)
    client = world.attach()
    spaces = client.open()
    client.put(spaces, range(8))
    client.put(spaces, range(100, 108))
    client.put(spaces, range(12))
    assert client.outcomes(spaces, range(12)) == [HIT] * 12
    assert client.outcomes(spaces, range(100, 108)) == [HIT] * 4 + [MISS] * 4
