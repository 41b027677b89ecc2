"""Slots of one size: free lists, generations, segments that come and go."""

import numpy as np
import pytest

from kvservice.core.errors import InvariantError
from kvservice.core.eviction import LeastRecentlyUsed, UseClock
from kvservice.core.slot_pool import SlotPool, SlotState
from kvservice.core.slots import GRANULE_BYTES

SLOT_BYTES = 4 * GRANULE_BYTES
SLOTS = 8
GRANULES = SLOTS * 4


@pytest.fixture
def pages():
    """Give the generation pages of three segments, each of which began at another number."""
    return [np.full(GRANULES, number, dtype=np.uint64) for number in (0, 100, 200)]


@pytest.fixture
def pool(pages):
    """Give a pool with segments 5 and 3."""
    made = SlotPool(
        tenant="acme",
        slot_bytes=SLOT_BYTES,
        segment_bytes=SLOTS * SLOT_BYTES,
        policy=LeastRecentlyUsed(UseClock()),
    )
    made.add_segment(5, pages[0])
    made.add_segment(3, pages[1])
    return made


def array(*numbers, dtype=np.uint32):
    """Return numbers as an array."""
    return np.array(numbers, dtype=dtype)


def test_a_fresh_segment_is_handed_out_as_one_extent(pool):
    """Neighbours in a batch are neighbours in memory, so a copy of them coalesces."""
    taken = pool.take(SLOTS)
    slots = pool.slots(taken, with_checksums=False)
    assert set(slots.segments.tolist()) == {3}
    assert slots.granules.tolist() == list(range(0, GRANULES, 4))
    assert slots.generations.tolist() == [100] * SLOTS
    assert slots.checksums is None
    assert (pool.state[taken] == SlotState.RESERVED).all()


def test_free_and_used_slots_add_up(pool):
    """A tenant is charged for every slot that is neither free nor absent."""
    assert (pool.free_count, pool.used_count()) == (2 * SLOTS, 0)
    taken = pool.take(5)
    assert (pool.free_count, pool.used_count()) == (2 * SLOTS - 5, 5)
    assert not set(taken.tolist()) & set(pool.free_indexes().tolist())
    pool.give_back(taken)
    assert (pool.free_count, pool.used_count()) == (2 * SLOTS, 0)


def test_more_than_is_free_cannot_be_taken(pool):
    """Asking for it is a bug of the caller, which stops the daemon."""
    with pytest.raises(InvariantError, match="more slots taken than are free"):
        pool.take(2 * SLOTS + 1)


def test_a_disowned_slot_moves_its_generation_on_the_page(pool, pages):
    """Readers watch the page: every slot that lost its owner moves there, over segments alike."""
    taken = pool.take(SLOTS + 2)
    before = pool.slots(taken, with_checksums=False).generations
    pool.move_generation(taken)
    after = pool.slots(taken, with_checksums=False)
    assert (after.generations == before + 1).all()
    assert pages[1][::4].tolist() == [101] * SLOTS
    assert sorted(pages[0][::4].tolist()) == [0] * (SLOTS - 2) + [1, 1]
    assert pages[0][1::4].tolist() == [0] * SLOTS


def test_nothing_disowned_moves_nothing(pool, pages):
    """An empty batch is no special case for callers."""
    pool.move_generation(np.empty(0, dtype=np.int64))
    assert not pages[0].any()


def test_slots_are_found_by_their_place(pool):
    """A hint names a place; one that is no slot of the pool is -1, never another slot."""
    segments, granules = array(5, 3, 9, 5, 3), array(4, 0, 0, GRANULES, 6)
    assert pool.indexes_of(segments, granules).tolist() == [1, SLOTS, -1, -1, SLOTS + 1]
    assert pool.indexes_of(array(9), array(0)).tolist() == [-1]
    assert pool.indexes_of(array(), array()).tolist() == []


def test_a_segment_goes_back_only_when_all_of_it_is_free(pool):
    """A slot in use would be handed to another tenant."""
    taken = pool.take(1)
    with pytest.raises(InvariantError, match="segment 3 goes back with slots in use"):
        pool.remove_segment(3)
    assert pool.slots(taken, with_checksums=False).segments.tolist() == [3]


def test_a_segment_that_went_is_not_allocatable(pool):
    """Its slots are absent: neither free nor charged, and not handed out."""
    pool.remove_segment(3)
    assert pool.segments == [5]
    assert not pool.has_segment(3)
    assert (pool.free_count, pool.used_count()) == (SLOTS, 0)
    assert int((pool.state == SlotState.ABSENT).sum()) == SLOTS
    assert set(pool.slots(pool.take(SLOTS), with_checksums=False).segments.tolist()) == {5}


def test_another_segment_takes_the_place_of_one_that_went(pool, pages):
    """Slot indexes do not grow for ever; generations are those of the new segment's page."""
    pool.remove_segment(3)
    pool.add_segment(8, pages[2])
    assert len(pool.state) == 2 * SLOTS
    slots = pool.slots(pool.take(SLOTS), with_checksums=True)
    assert slots.segments.tolist() == [8] * SLOTS
    assert slots.generations.tolist() == [200] * SLOTS
    assert pool.segment_slots(8) == slice(SLOTS, 2 * SLOTS)


def test_only_committed_and_untouched_slots_are_evictable(pool):
    """A reserved block has a writer, a pinned one a reader."""
    taken = pool.take(3)
    pool.state[taken[:2]] = SlotState.COMMITTED
    pool.pins[taken[0]] = 1
    assert np.flatnonzero(pool.evictable()).tolist() == [taken[1]]


def test_a_subset_of_slots_keeps_its_order(pool):
    """`Slots.take` gives the slots at some positions, with or without checksums."""
    slots = pool.slots(pool.take(4), with_checksums=True)
    picked = slots.take(array(2, 0, dtype=np.int64))
    assert len(picked) == 2
    assert picked.granules.tolist() == [8, 0]
    assert picked.checksums.tolist() == [0, 0]
    assert pool.slots(pool.take(2), with_checksums=False).take(slice(0, 1)).checksums is None
