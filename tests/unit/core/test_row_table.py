"""The growing table of keys, over both implementations of its loops."""

import numpy as np
import pytest

from kvservice.core import row_layout
from kvservice.core.row_table import GROWTH_FACTOR, SMALLEST_CAPACITY_ROWS, RowTable
from tests.core_world import OPERATIONS, SEGMENT_BYTES, World, keys


@pytest.fixture(params=OPERATIONS)
def table(request):
    """Give an empty table over each implementation."""
    return RowTable(OPERATIONS[request.param], lambda rows: np.zeros(rows, dtype=row_layout.ROW_DTYPE))


def insert(table, numbers, *, space=1, first_granule=0):
    """Insert keys whose slots lie one after the other in segment 3."""
    count = len(numbers)
    table.insert(
        keys(numbers),
        space,
        segments=np.full(count, 3, dtype=np.uint32),
        granules=np.arange(first_granule, first_granule + count, dtype=np.uint32),
        length_bytes=100,
        checksums=np.zeros(count, dtype=np.uint32),
        generations=np.zeros(count, dtype=np.uint64),
    )


def test_a_key_is_found_where_it_was_put(table):
    """A row says where the block is; a missing key is told from it by `found`."""
    insert(table, [1, 2, 3], first_granule=7)
    located = table.find(keys([2, 9, 3]), 1)
    assert located.found.tolist() == [True, False, True]
    assert located.segments[located.found].tolist() == [3, 3]
    assert located.granules[located.found].tolist() == [8, 9]
    assert table.find_mask(keys([9, 1]), 1).tolist() == [False, True]


def test_a_search_without_a_hit_finds_nothing(table):
    """An empty answer needs no rows at all."""
    located = table.find(keys([1]), 1)
    assert located.found.tolist() == [False]
    assert len(located.segments) == len(located.granules) == 0


def test_the_same_key_in_two_spaces_is_two_rows(table):
    """A space is part of the index key."""
    insert(table, [1], space=1)
    insert(table, [1], space=2, first_granule=5)
    assert len(table) == 2
    assert table.find(keys([1]), 2).granules.tolist() == [5]
    assert not table.find_mask(keys([1]), 3).any()


def test_removal_counts_what_was_there(table):
    """A removal of an absent key changes nothing, so the number of keys stays right."""
    insert(table, [1, 2])
    assert table.remove(keys([1, 5]), np.array([1, 1], dtype=np.uint32)) == 1
    assert table.remove(keys([2]), np.array([9], dtype=np.uint32)) == 0
    assert len(table) == 1
    assert table.find_mask(keys([1, 2]), 1).tolist() == [False, True]


def test_growth_keeps_every_key(table):
    """At half its capacity the table moves to a larger one, with all that it held."""
    half = SMALLEST_CAPACITY_ROWS // 2
    insert(table, range(half))
    assert table.capacity_rows == SMALLEST_CAPACITY_ROWS
    before = table.rows
    insert(table, [half], first_granule=half)
    assert table.capacity_rows == SMALLEST_CAPACITY_ROWS * GROWTH_FACTOR
    assert table.rows is not before
    assert len(table) == half + 1
    located = table.find(keys(range(half + 1)), 1)
    assert located.found.all()
    assert (located.granules == np.arange(half + 1)).all()


def test_a_batch_may_outgrow_several_sizes_at_once(table):
    """One insertion grows as far as it needs, not one step."""
    insert(table, range(SMALLEST_CAPACITY_ROWS * GROWTH_FACTOR // 2 + 1))
    assert table.capacity_rows == SMALLEST_CAPACITY_ROWS * GROWTH_FACTOR**2


def test_a_tenant_outgrows_its_directory_and_keeps_every_block():
    """The memory of the larger directory is asked for from the arena, and lookups find every key in it."""
    count = SMALLEST_CAPACITY_ROWS // 2 + 100
    world = World(segment_bytes=SEGMENT_BYTES * 80, segments_count=1, check_every=1)
    client = world.attach()
    spaces = client.open(512)
    for first in range(0, count, 2000):
        client.put(spaces, range(first, min(first + 2000, count)))
    sizes = [len(rows) for rows in world.memory.directories["acme"]]
    assert sizes == [SMALLEST_CAPACITY_ROWS, SMALLEST_CAPACITY_ROWS * GROWTH_FACTOR]
    assert client.lookup(spaces, range(count)).prefix_count == count
    assert world.books.tenant("acme").directory.rows is world.memory.directories["acme"][-1]
