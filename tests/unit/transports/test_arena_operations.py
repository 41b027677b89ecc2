"""From pieces to one-sided operations: every byte once, in as few operations as may be."""

import random

import numpy as np
import pytest

from kvservice.core.errors import InvalidFieldError, MalformedError
from kvservice.ports.transport import Pieces
from kvservice.transports.ucx.arena_operations import OPERATION_BYTES_MAX, operations_of


def u64(values) -> np.ndarray:
    """Return (n,) uint64."""
    return np.array(list(values), np.uint64)


def u32(values) -> np.ndarray:
    """Return (n,) uint32."""
    return np.array(list(values), np.uint32)


def rows(found) -> list[tuple[int, ...]]:
    """Return (segment, offset, address, length) of each operation."""
    columns = (found.segment_indexes, found.offsets, found.addresses, found.lengths)
    return list(zip(*(column.tolist() for column in columns), strict=True))


def test_neighbours_on_both_sides_are_one_operation():
    """Slots of one batch lie side by side, and so does the memory of a contiguous caller."""
    pieces = Pieces(u64([1000, 1512, 2024, 9000]), u64([512] * 4))
    found = operations_of(u32([0, 0, 0, 0]), u64([0, 512, 1024, 1536]), pieces)
    assert rows(found) == [(0, 0, 1000, 1536), (0, 1536, 9000, 512)]


def test_neighbours_on_one_side_or_of_two_segments_are_two_operations():
    """What only looks adjacent must not be merged."""
    pieces = Pieces(u64([1000, 1512, 2024]), u64([512] * 3))
    found = operations_of(u32([0, 0, 1]), u64([0, 1024, 1536]), pieces)
    assert rows(found) == [(0, 0, 1000, 512), (0, 1024, 1512, 512), (1, 1536, 2024, 512)]


def test_the_pieces_of_a_block_lie_one_after_the_other_in_its_slot():
    """Pieces that are adjacent here too are one operation; empty ones are none."""
    pieces = Pieces(u64([100, 110, 7000, 50]), u64([10, 20, 5, 0]), u32([3, 1]))
    found = operations_of(u32([1, 0]), u64([512, 0]), pieces)
    assert rows(found) == [(1, 512, 100, 30), (1, 542, 7000, 5)]


def test_a_long_run_is_cut():
    """So that a deadline is kept within the time of one operation."""
    length = 2 * OPERATION_BYTES_MAX + 3
    found = operations_of(u32([4]), u64([512]), Pieces(u64([1 << 40]), u64([length])))
    assert found.lengths.tolist() == [OPERATION_BYTES_MAX, OPERATION_BYTES_MAX, 3]
    assert (found.offsets - np.uint64(512)).tolist() == [0, OPERATION_BYTES_MAX, 2 * OPERATION_BYTES_MAX]
    assert (found.addresses - np.uint64(1 << 40)).tolist() == [
        0,
        OPERATION_BYTES_MAX,
        2 * OPERATION_BYTES_MAX,
    ]


@pytest.mark.parametrize("counts", [None, [1, 1, 2]])
def test_another_number_of_slots_than_blocks_is_refused(counts):
    """A daemon that grants something else must not make this process write elsewhere."""
    pieces = Pieces(u64([0] * 4), u64([1] * 4), None if counts is None else u32(counts))
    with pytest.raises(MalformedError):
        operations_of(u32([0, 0]), u64([0, 512]), pieces)


def test_counts_that_do_not_add_up_are_never_used():
    """`check_transfer` comes first; what it lets through fits."""
    pieces = Pieces(u64([0, 8]), u64([1, 1]), u32([1, 3]))
    with pytest.raises((InvalidFieldError, ValueError, IndexError)):
        operations_of(u32([0, 0]), u64([0, 512]), pieces)


def test_every_byte_goes_to_its_place_once(seed):
    """Random blocks of random pieces, by operations and byte by byte."""
    random_ = random.Random(seed)
    for _ in range(50):
        blocks = [[random_.randrange(40) for _ in range(random_.randrange(1, 5))] for _ in range(30)]
        lengths = [length for block in blocks for length in block]
        gaps = np.cumsum([0, *(length + random_.choice([0, 0, 7]) for length in lengths)])
        segments = sorted(random_.randrange(3) for _ in blocks)
        offsets = (np.cumsum([0] + [random_.choice([256, 512])] * len(blocks))[:-1]).tolist()
        pieces = Pieces(u64(gaps[:-1]), u64(lengths), u32(len(block) for block in blocks))
        found = operations_of(u32(segments), u64(offsets), pieces)
        expected = {}
        numbers = iter(range(len(lengths)))
        for segment, offset, block in zip(segments, offsets, blocks, strict=True):
            for length in block:
                start = int(gaps[next(numbers)])
                for byte in range(length):
                    expected[start + byte] = (segment, offset + byte)
                offset += length  # noqa: PLW2901 - where the next piece of the block is
        moved = {}
        for segment, offset, address, length in rows(found):
            for byte in range(length):
                assert address + byte not in moved
                moved[address + byte] = (segment, offset + byte)
        assert moved == expected
