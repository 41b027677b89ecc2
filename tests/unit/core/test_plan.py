"""Block lists to operations, in examples small enough to check by hand."""

import numpy as np
import pytest

from kvservice.core import plan as planning
from kvservice.core.block_geometry import BLOCKS_LIMIT, POSITION_LIMIT, BlockGeometry, shared_fragments
from kvservice.core.errors import BatchSizeError, BlockSizeError, InvalidFieldError
from kvservice.core.limits import PIECES_LIMIT
from kvservice.core.plan import Planner, plan

NO_LIMIT = POSITION_LIMIT


def geometry(pieces, *, blocks, sizes=(1000,), **replaced):
    """Build the geometry of pieces given as (segment, offset, stride, length)."""
    segments, offsets, strides, lengths = zip(*pieces, strict=True)
    fields = {
        "segment_sizes_bytes": np.array(sizes, np.uint64),
        "segments": np.array(segments, np.uint32),
        "offsets": np.array(offsets, np.uint64),
        "strides": np.array(strides, np.uint64),
        "lengths": np.array(lengths, np.uint64),
        "blocks_count": blocks,
    }
    return BlockGeometry(**{**fields, **replaced})


def operations(source, target, pairs, *, limit=NO_LIMIT):
    """Plan for (source block, target block) pairs; return (source, target, bytes) for each operation."""
    return listed(plan(source, target, *columns(pairs), max_operation_bytes=limit))


def columns(pairs):
    """Return the pairs as two arrays."""
    blocks = np.array(pairs, np.int64).reshape(-1, 2)
    return blocks[:, 0].copy(), blocks[:, 1].copy()


def listed(planned):
    """Return the operations of a plan as ((segment, offset), (segment, offset), bytes)."""
    sources = zip(planned.source_segments.tolist(), planned.source_offsets.tolist(), strict=True)
    targets = zip(planned.target_segments.tolist(), planned.target_offsets.tolist(), strict=True)
    return list(zip(sources, targets, planned.lengths.tolist(), strict=True))


# Whole blocks of 20 bytes; the same in layers of 10, one after the other; and in two segments.
WHOLE = geometry([(0, 0, 20, 20)], blocks=16)
LAYERS = geometry([(0, 0, 10, 10), (0, 160, 10, 10)], blocks=16)
LAYER_SEGMENTS = geometry([(0, 0, 10, 10), (1, 0, 10, 10)], blocks=16, sizes=(160, 160))


def test_consecutive_blocks_are_one_operation():
    """A run that is a run on both sides travels as one."""
    assert operations(WHOLE, WHOLE, [(0, 5), (1, 6), (2, 9)]) == [
        ((0, 0), (0, 100), 40),
        ((0, 40), (0, 180), 20),
    ]


def test_a_run_is_found_whatever_the_order_of_the_list():
    """The map says which block goes where; its order says nothing."""
    assert operations(WHOLE, WHOLE, [(2, 7), (0, 5), (1, 6)]) == [((0, 0), (0, 100), 60)]


def test_pairs_and_not_positions_say_where_a_block_goes():
    """A partial hit fills the slots that it was asked for, also where the other side runs backwards."""
    assert operations(WHOLE, WHOLE, [(3, 8), (4, 7)]) == [
        ((0, 60), (0, 160), 20),
        ((0, 80), (0, 140), 20),
    ]


def test_layers_coalesce_each_by_itself():
    """Two piecewise pools: a run of blocks is one operation for each layer."""
    assert operations(LAYERS, LAYERS, [(0, 5), (1, 6), (2, 9)]) == [
        ((0, 0), (0, 50), 20),
        ((0, 20), (0, 90), 10),
        ((0, 160), (0, 210), 20),
        ((0, 180), (0, 250), 10),
    ]


def test_a_whole_block_is_cut_where_the_other_side_is():
    """Each operation is contiguous on both sides, also between pools that are cut differently."""
    assert operations(WHOLE, LAYERS, [(0, 5), (1, 6)]) == [
        ((0, 0), (0, 50), 10),
        ((0, 10), (0, 210), 10),
        ((0, 20), (0, 60), 10),
        ((0, 30), (0, 220), 10),
    ]


def test_pieces_of_other_lengths_are_cut_at_the_ends_of_both():
    """Pieces of 5 and 15 bytes against 10 and 10: fragments of 5, 5 and 10."""
    uneven = geometry([(0, 0, 5, 5), (0, 80, 15, 15)], blocks=16)
    assert operations(uneven, LAYERS, [(1, 2)]) == [
        ((0, 5), (0, 20), 5),
        ((0, 95), (0, 25), 5),
        ((0, 100), (0, 180), 10),
    ]


def test_each_layer_may_have_a_segment_of_its_own():
    """Operations name their segments; the end of one is not adjacent to the beginning of the next."""
    everything = [(block, block) for block in range(16)]
    assert operations(LAYER_SEGMENTS, LAYER_SEGMENTS, everything) == [
        ((0, 0), (0, 0), 160),
        ((1, 0), (1, 0), 160),
    ]
    assert operations(LAYERS, LAYER_SEGMENTS, everything) == [
        ((0, 0), (0, 0), 160),
        ((0, 160), (1, 0), 160),
    ]


def test_layers_that_follow_each_other_on_both_sides_are_one_operation():
    """The last block of a layer is adjacent to the first of the next, and nobody need know why."""
    assert operations(LAYERS, LAYERS, [(block, block) for block in range(16)]) == [((0, 0), (0, 0), 320)]
    assert operations(LAYERS, LAYERS, [(15, 15), (0, 0)]) == [
        ((0, 0), (0, 0), 10),
        ((0, 150), (0, 150), 20),
        ((0, 310), (0, 310), 10),
    ]


def test_k_and_v_that_alternate_within_blocks_are_joined():
    """Pools that are declared in pieces and lie in whole blocks coalesce as such, in any order of pieces."""
    k_then_v = geometry([(0, 0, 20, 10), (0, 10, 20, 10)], blocks=16)
    v_then_k = geometry([(0, 10, 20, 10), (0, 0, 20, 10)], blocks=16)
    for pool in (k_then_v, v_then_k):
        assert len(shared_fragments(pool, pool)) == 1
        assert operations(pool, pool, [(0, 5), (1, 6)]) == [((0, 0), (0, 100), 40)]
    assert operations(k_then_v, v_then_k, [(0, 5), (1, 6)]) == [
        ((0, 0), (0, 110), 10),
        ((0, 10), (0, 100), 10),
        ((0, 20), (0, 130), 10),
        ((0, 30), (0, 120), 10),
    ]


def test_layers_whose_k_and_v_alternate_stay_in_the_order_of_the_source():
    """Bands of alternating pieces are ordered by band, then by block; of different widths, by sorting."""
    two = [(0, 0, 10, 5), (0, 5, 10, 5), (0, 160, 10, 5), (0, 165, 10, 5)]
    apart = geometry([(0, 0, 5, 5), (0, 80, 5, 5), (0, 160, 5, 5), (0, 240, 5, 5)], blocks=16)
    assert shared_fragments(geometry(two, blocks=16), apart).band_width == 2
    assert [source for source, _, _ in operations(geometry(two, blocks=16), apart, [(1, 1), (0, 0)])] == [
        *((0, offset) for offset in (0, 5, 10, 15)),
        *((0, offset) for offset in (160, 165, 170, 175)),
    ]
    uneven = geometry([*two[:2], (0, 160, 5, 5), (0, 240, 5, 5)], blocks=16)
    assert shared_fragments(uneven, apart).band_width == 1
    assert [source for source, _, _ in operations(uneven, apart, [(1, 1), (0, 0)])] == [
        *((0, offset) for offset in (0, 5, 10, 15)),
        *((0, offset) for offset in (160, 240)),
    ]


def test_padding_is_not_carried():
    """Bytes between blocks are somebody's; who owns them says so by the length of the piece."""
    padded = geometry([(0, 0, 32, 20)], blocks=16)
    assert operations(padded, padded, [(0, 0), (1, 1)]) == [((0, 0), (0, 0), 20), ((0, 32), (0, 32), 20)]
    owned = geometry([(0, 0, 32, 32)], blocks=16)
    assert operations(owned, owned, [(0, 0), (1, 1)]) == [((0, 0), (0, 0), 64)]


def test_an_operation_is_as_long_as_it_may_be_and_no_longer():
    """Full operations first, then the rest; a block may be longer than an operation."""
    assert operations(WHOLE, WHOLE, [(0, 0), (1, 1), (3, 3)], limit=16) == [
        ((0, 0), (0, 0), 16),
        ((0, 16), (0, 16), 16),
        ((0, 32), (0, 32), 8),
        ((0, 60), (0, 60), 16),
        ((0, 76), (0, 76), 4),
    ]
    assert operations(WHOLE, WHOLE, [(0, 0), (1, 1)], limit=40) == [((0, 0), (0, 0), 40)]


def test_one_source_may_have_several_targets():
    """Both copies are found as runs, and the operations are still in the order of the source."""
    pairs = [(0, 0), (0, 8), (1, 9), (1, 1)]
    assert operations(WHOLE, WHOLE, pairs) == [((0, 0), (0, 0), 40), ((0, 0), (0, 160), 40)]
    assert operations(WHOLE, WHOLE, pairs, limit=30) == [
        ((0, 0), (0, 0), 30),
        ((0, 0), (0, 160), 30),
        ((0, 30), (0, 30), 10),
        ((0, 30), (0, 190), 10),
    ]


def test_a_pool_may_have_one_block():
    """A stride leads to the next block; where there is none it may be anything."""
    single = geometry([(0, 7, 0, 10), (0, 17, 2**64 - 1, 10)], blocks=1)
    assert operations(single, WHOLE, [(0, 3), (0, 5)]) == [((0, 7), (0, 60), 20), ((0, 7), (0, 100), 20)]
    assert operations(WHOLE, single, [(3, 0)]) == [((0, 60), (0, 7), 20)]


def test_no_blocks_are_no_operations():
    """A miss is planned like anything else."""
    planned = plan(WHOLE, LAYERS, *columns([]), max_operation_bytes=NO_LIMIT)
    assert len(planned) == planned.total_bytes == 0
    assert planned.blocks_of(np.empty(0, np.int64)).tolist() == []


def test_a_plan_says_what_it_carries():
    """The totals and types of what a transport posts."""
    planned = plan(WHOLE, LAYERS, *columns([(0, 5), (1, 6)]), max_operation_bytes=NO_LIMIT)
    assert planned.total_bytes == int(planned.lengths.sum()) == 40
    assert planned.source_segments.dtype == planned.target_segments.dtype == np.uint32
    assert planned.source_offsets.dtype == planned.target_offsets.dtype == planned.lengths.dtype == np.uint64
    assert LAYERS.pieces_count == 2


def test_a_failed_operation_names_its_blocks():
    """blocks_of answers pairs of the caller's list: the blocks that are incomplete, and no others."""
    planned = plan(WHOLE, WHOLE, *columns([(2, 7), (9, 1), (0, 5), (1, 6)]), max_operation_bytes=30)
    assert listed(planned) == [
        ((0, 0), (0, 100), 30),
        ((0, 30), (0, 130), 30),
        ((0, 180), (0, 20), 20),
    ]
    assert planned.blocks_of(np.array([0])).tolist() == [2, 3]
    assert planned.blocks_of(np.array([1])).tolist() == [0, 3]
    assert planned.blocks_of(np.array([2])).tolist() == [1]
    assert planned.blocks_of(np.array([2, 0, 1, 1])).tolist() == [0, 1, 2, 3]
    assert planned.blocks_of(np.empty(0, np.int64)).tolist() == []


def test_a_plan_keeps_its_own_copy_of_the_map():
    """The caller may use its list for something else while the operations are under way."""
    sources, targets = columns([(0, 5), (3, 6)])
    planned = plan(WHOLE, WHOLE, sources, targets, max_operation_bytes=NO_LIMIT)
    targets[:] = 0
    assert planned.blocks_of(np.array([1])).tolist() == [1]


@pytest.mark.parametrize(
    ("pairs", "message"),
    [
        ([(0, 0), (16, 1)], r"source_blocks\[1\] = 16: allowed is 0\.\.15"),
        ([(0, 0), (-1, 1)], r"source_blocks\[1\] = -1: allowed is 0\.\.15"),
        ([(0, 99), (1, 1)], r"target_blocks\[0\] = 99: allowed is 0\.\.15"),
        ([(4, 1), (5, 3), (6, 1)], r"target_blocks\[2\] = 1: the block is target_blocks\[0\] already"),
        ([(4, 1), (5, 2), (1, 2)], r"target_blocks\[2\] = 2: the block is target_blocks\[1\] already"),
        ([(4, 1), (4, 1)], r"target_blocks\[1\] = 1: the block is target_blocks\[0\] already"),
    ],
)
def test_a_wrong_map_is_refused_by_name(pairs, message):
    """A one-sided operation touches whatever it is told to, so nothing wrong is ever posted."""
    with pytest.raises(InvalidFieldError, match=message):
        operations(WHOLE, LAYERS, pairs)


def test_a_map_is_two_lists_of_int64():
    """Other types would wrap in silence, other lengths leave a block without a place."""
    with pytest.raises(InvalidFieldError, match="source_blocks has 2 entries and target_blocks 1"):
        plan(WHOLE, WHOLE, np.array([0, 1]), np.array([0]), max_operation_bytes=1)
    with pytest.raises(InvalidFieldError, match="source_blocks is an array of int32 in 1 dimensions"):
        plan(WHOLE, WHOLE, np.array([0], np.int32), np.array([0]), max_operation_bytes=1)
    with pytest.raises(InvalidFieldError, match="target_blocks is an array of int64 in 2 dimensions"):
        plan(WHOLE, WHOLE, np.array([0]), np.array([[0]]), max_operation_bytes=1)


def test_blocks_of_different_lengths_have_no_plan():
    """That is another representation, and another room's work."""
    with pytest.raises(BlockSizeError, match="source has 20 bytes, one of the target 10"):
        Planner(WHOLE, geometry([(0, 0, 10, 10)], blocks=16), max_operation_bytes=1)


@pytest.mark.parametrize("limit", [0, -1, NO_LIMIT + 1, 4096.0, True])
def test_an_operation_has_a_length(limit):
    """The limit is the wire's: it has no default, and no zero that would mean none."""
    with pytest.raises(InvalidFieldError, match=r"max_operation_bytes = .*: allowed is 1\.\."):
        Planner(WHOLE, WHOLE, max_operation_bytes=limit)


def test_a_plan_has_a_limit(monkeypatch):
    """Many pieces or short operations make few blocks many operations; they are refused, not tried."""
    monkeypatch.setattr(planning, "OPERATIONS_LIMIT", 4)
    pairs = [(0, 0), (2, 1), (4, 2)]
    assert len(operations(LAYERS, LAYERS, pairs[:2])) == 4
    with pytest.raises(BatchSizeError, match="up to 6 operations: allowed is 4"):
        operations(LAYERS, LAYERS, pairs)
    assert len(operations(WHOLE, WHOLE, [(0, 0)], limit=5)) == 4
    with pytest.raises(BatchSizeError, match="up to 5 operations: allowed is 4"):
        operations(WHOLE, WHOLE, [(0, 0)], limit=4)


@pytest.mark.parametrize("wrong", [-1, 2])
def test_only_operations_of_the_plan_have_blocks(wrong):
    """An index from another plan is a bug in the caller, and answered as one."""
    planned = plan(WHOLE, WHOLE, *columns([(0, 0), (2, 2)]), max_operation_bytes=NO_LIMIT)
    with pytest.raises(InvalidFieldError, match=rf"operations\[1\] = {wrong}: allowed is 0\.\.1"):
        planned.blocks_of(np.array([0, wrong]))


@pytest.mark.parametrize(
    ("pieces", "blocks", "message"),
    [
        ([(1, 0, 10, 10)], 2, r"geometry\.segments\[0\] = 1: allowed is 0\.\.0"),
        ([(0, 0, 10, 0)], 2, r"geometry\.lengths\[0\] = 0: allowed is 1\.\.1000"),
        ([(0, 0, 10, 10), (0, 20, 9, 10)], 2, r"geometry\.strides\[1\] = 9: allowed is 10 at least"),
        ([(0, 0, 10, 10)], 101, r"offsets\[0\] = 0: .* ends at byte 1010 of segment 0; allowed is 1000"),
        ([(0, 991, 10, 10)], 1, r"offsets\[0\] = 991: .* ends at byte 1001 of segment 0; allowed is 1000"),
        ([(0, 2**64 - 1, 2**64 - 1, 10)], 2, r"offsets\[0\] = 18446744073709551615: "),
        ([(0, 0, 20, 10), (0, 9, 20, 10)], 4, r"offsets\[1\] = 9: piece 1 shares bytes with piece 0 at 0"),
        ([(0, 31, 20, 10), (0, 0, 20, 12)], 4, r"offsets\[1\] = 0: piece 1 shares bytes with piece 0 at 31"),
        ([(0, 0, 20, 10), (0, 0, 20, 10)], 4, "piece 1 shares bytes with piece 0"),
        ([(0, 0, 20, 10), (0, 15, 20, 8)], 4, r"offsets\[1\] = 15: piece 1 shares bytes with piece 0 at 0"),
        ([(0, 0, 20, 10), (0, 9, 20, 10)], 1, "piece 1 shares bytes with piece 0"),
        ([(0, 0, 0, 10), (0, 9, 30, 10)], 1, "piece 1 shares bytes with piece 0"),
        ([(0, 0, 20, 10), (0, 10, 30, 10)], 4, r"strides\[1\] = 30: allowed is 20, the stride of piece 0"),
        ([(0, 0, 10, 10)], 0, r"geometry\.blocks_count = 0: allowed is 1\.\."),
        ([(0, 0, 10, 10)], BLOCKS_LIMIT + 1, r"geometry\.blocks_count = 4294967296: allowed is 1\.\."),
        ([(0, 0, 1, 1)] * (PIECES_LIMIT + 1), 1, r"number of pieces = 4097: allowed is 1\.\.4096"),
    ],
)
def test_a_geometry_that_cannot_be_is_refused_by_name(pieces, blocks, message):
    """Whoever holds a geometry holds one whose every byte is inside its segment, and one block's only."""
    with pytest.raises(InvalidFieldError, match=message):
        geometry(pieces, blocks=blocks)


@pytest.mark.parametrize(
    ("replaced", "message"),
    [
        ({"offsets": np.zeros(2, np.uint64)}, "1 segments, 2 offsets, 1 strides and 1 lengths"),
        ({"segments": np.zeros(1, np.uint64)}, r"geometry\.segments is an array of uint64"),
        ({"segment_sizes_bytes": np.zeros(0, np.uint64)}, "number of segments = 0: allowed is 1"),
        ({"segment_sizes_bytes": np.full(2, 2**61, np.uint64)}, "sum of segment_sizes_bytes = 46116"),
        ({"segment_sizes_bytes": np.full(2, 2**63, np.uint64)}, "sum of segment_sizes_bytes = 18446"),
    ],
)
def test_the_arrays_of_a_geometry_agree(replaced, message):
    """They come from another process: what does not fit together, or an int64, is refused."""
    with pytest.raises(InvalidFieldError, match=message):
        geometry([(0, 0, 10, 10)], blocks=2, **replaced)
