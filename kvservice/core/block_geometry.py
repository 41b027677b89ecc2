"""Where the blocks of a pool lie in registered segments, and where two pools are cut alike.

Block `b` of a pool is its pieces, one after the other; piece `p` is the `lengths[p]` bytes from
`offsets[p] + b * strides[p]` on in segment `segments[p]`. Three pools of two layers and four
blocks, with `0.1` for layer 1 of block 0:

    block-major, one piece      | 0.0 0.1 | 1.0 1.1 | 2.0 2.1 | 3.0 3.1 |
    piecewise, a piece a layer  | 0.0 | 1.0 | 2.0 | 3.0 | 0.1 | 1.1 | 2.1 | 3.1 |
    with padding (a stride      | 0.0 0.1 --- | 1.0 1.1 --- | 2.0 2.1 --- | 3.0 3.1 --- |
    longer than the piece)

A block has the same bytes in the same order in each of them, so one pool's block can go into
another's, cut at the ends of the pieces of both: `shared_fragments`.

Bytes between the pieces belong to somebody else, as far as this file knows. Who owns the padding
on both sides declares it as part of the piece, and whole runs of blocks become one operation.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from kvservice.core.errors import BlockSizeError, InvalidFieldError
from kvservice.core.limits import PIECES_LIMIT
from kvservice.core.slots import I64, U32, U64

SEGMENTS_LIMIT = 1 << 16
"""Segments of one pool: a hundred times what an engine with one for K and V of each layer has."""

BLOCKS_LIMIT = (1 << 32) - 1
"""The number of blocks travels as a u32."""

POSITION_LIMIT = 1 << 62
"""All segments together are smaller, so a position, and the sum of two, fits an int64."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class BlockGeometry:
    """How the blocks of one pool lie in its segments. It checks itself when it is built.

    segment_sizes_bytes: (segments,) uint64.
    segments: (pieces,) uint32, index of each piece's segment in `segment_sizes_bytes`.
    offsets, strides, lengths: (pieces,) uint64, bytes. With one block only, strides say nothing.
    segment_starts, origins: derived, (segments,) and (pieces,) int64: *positions* of the segments'
        first bytes, and of the pieces of block 0. Positions count bytes over all segments, with one
        between two segments that is nobody's, so that no segment looks adjacent to the next.

    Raises:
        InvalidFieldError: a piece leaves its segment or is empty, a block overlaps the next one,
            pieces overlap, or a limit is passed.
    """

    segment_sizes_bytes: U64
    segments: U32
    offsets: U64
    strides: U64
    lengths: U64
    blocks_count: int
    segment_starts: I64 = field(init=False, repr=False)
    origins: I64 = field(init=False, repr=False)

    def __post_init__(self) -> None:
        """Check every field, and derive the positions."""
        self._check_arrays()
        self._check_pieces()
        # Beyond the checks: all of it is far below the limits of an int64.
        sizes = self.segment_sizes_bytes.astype(np.int64) + 1
        object.__setattr__(self, "segment_starts", np.cumsum(sizes) - sizes)
        origins = self.segment_starts[self.segments] + self.offsets.astype(np.int64)
        object.__setattr__(self, "origins", origins)
        self._check_apart()

    @property
    def pieces_count(self) -> int:
        """Number of pieces of a block."""
        return len(self.segments)

    @property
    def block_bytes(self) -> int:
        """Bytes of one block: its pieces, without what lies between them."""
        return int(self.lengths.sum())

    def places(self, positions: I64) -> tuple[U32, U64]:
        """Return the segments of positions, and the offsets in them."""
        if len(self.segment_starts) == 1:
            return np.zeros(len(positions), np.uint32), positions.view(np.uint64)
        found = self.segment_starts.searchsorted(positions, side="right") - 1
        return found.astype(np.uint32), (positions - self.segment_starts[found]).view(np.uint64)

    def positions(self, segments: U32, offsets: U64) -> I64:
        """Return the positions of offsets in segments: the inverse of `places`."""
        found: I64 = self.segment_starts[segments] + offsets.view(np.int64)
        return found

    def _check_arrays(self) -> None:
        """Hold types, counts and sums to their limits."""
        for name, dtype in (
            ("segment_sizes_bytes", np.uint64),
            ("segments", np.uint32),
            ("offsets", np.uint64),
            ("strides", np.uint64),
            ("lengths", np.uint64),
        ):
            check_array(f"geometry.{name}", getattr(self, name), dtype)
        pieces_count = len(self.segments)
        _check_range("geometry: number of pieces", pieces_count, low=1, high=PIECES_LIMIT)
        if not len(self.offsets) == len(self.strides) == len(self.lengths) == pieces_count:
            raise InvalidFieldError(
                f"geometry has {pieces_count} segments, {len(self.offsets)} offsets, {len(self.strides)} "
                f"strides and {len(self.lengths)} lengths: allowed is one of each for a piece"
            )
        _check_range(
            "geometry: number of segments", len(self.segment_sizes_bytes), low=1, high=SEGMENTS_LIMIT
        )
        _check_range("geometry.blocks_count", self.blocks_count, low=1, high=BLOCKS_LIMIT)
        total_bytes = sum(self.segment_sizes_bytes.tolist()) + len(self.segment_sizes_bytes)
        _check_range("geometry: sum of segment_sizes_bytes", total_bytes, low=1, high=POSITION_LIMIT - 1)

    def _check_pieces(self) -> None:
        """Hold each piece of the last block to its segment; the others lie before it."""
        sizes = self.segment_sizes_bytes.tolist()
        last = self.blocks_count - 1
        columns = (self.segments, self.offsets, self.strides, self.lengths)
        # Python's integers do not wrap, and this is done once in the life of a geometry.
        rows = zip(*(column.tolist() for column in columns), strict=True)
        for piece, (segment, offset, stride, length) in enumerate(rows):
            if segment >= len(sizes):
                raise InvalidFieldError(
                    f"geometry.segments[{piece}] = {segment}: allowed is 0..{len(sizes) - 1}, "
                    "the segments that have a size"
                )
            size = sizes[segment]
            _check_range(f"geometry.lengths[{piece}]", length, low=1, high=size)
            if last and stride < length:
                raise InvalidFieldError(
                    f"geometry.strides[{piece}] = {stride}: allowed is {length} at least, the length of "
                    "the piece, or a block would begin within the one before it"
                )
            end = offset + last * stride + length
            if end > size:
                raise InvalidFieldError(
                    f"geometry.offsets[{piece}] = {offset}: the piece of the last of {self.blocks_count} "
                    f"blocks ends at byte {end} of segment {segment}; allowed is {size}, its size"
                )

    def _check_apart(self) -> None:
        """Refuse pieces that share bytes: a copy into them would end as it happens to be ordered.

        Pieces whose blocks alternate (K and V within a block) must have one stride, and different
        places in it. Other strides could miss each other too; no engine lays blocks so, and to tell
        would take a look at each block.
        """
        lengths, strides = self.lengths.view(np.int64), self.strides.view(np.int64)
        order, bands = _bands(self.origins, self.origins + (self.blocks_count - 1) * strides + lengths)
        shared = np.flatnonzero(bands[1:] == bands[:-1])
        if not len(shared):
            return
        # One block has no next one to run into.
        periods = strides[order] if self.blocks_count > 1 else np.full(len(order), POSITION_LIMIT)
        differ = shared[periods[shared] != periods[shared + 1]]
        if len(differ):
            one, other = order[differ[0]], order[differ[0] + 1]
            raise InvalidFieldError(
                f"geometry.strides[{other}] = {self.strides[other]}: allowed is {self.strides[one]}, "
                f"the stride of piece {one}, since blocks of the two pieces alternate"
            )
        places = self.origins[order] % periods
        by_place = np.lexsort((places, bands))
        order, places, periods = order[by_place], places[by_place], periods[by_place]
        # Above a piece lies the next one of its band; above the last, the first of the next block.
        is_last = np.append(bands[1:] != bands[:-1], True)
        above = np.where(is_last, bands.searchsorted(bands), np.arange(1, len(bands) + 1))
        limits = places[above] + np.where(is_last, periods, 0)
        crossed = np.flatnonzero(places + lengths[order] > limits)
        if len(crossed):
            one, other = sorted((int(order[crossed[0]]), int(order[above[crossed[0]]])))
            raise InvalidFieldError(
                f"geometry.offsets[{other}] = {self.offsets[other]}: piece {other} shares bytes with piece "
                f"{one} at {self.offsets[one]}; allowed are pieces that lie apart"
            )


@dataclass(frozen=True, slots=True, eq=False)
class Fragments:
    """A block's bytes, cut where either of two geometries cuts them, in the order of the source.

    source_origins, target_origins: (fragments,) int64, positions in block 0.
    source_strides, target_strides, lengths: (fragments,) int64, bytes.
    band_width: so many fragments in a row lie between each other's blocks on the source; 1 where
        all blocks of a fragment come before the next fragment.
    is_dense: on both sides each fragment of a block ends where that of the next block begins.
    """

    source_origins: I64
    source_strides: I64
    target_origins: I64
    target_strides: I64
    lengths: I64
    band_width: int
    is_dense: bool

    def __len__(self) -> int:
        """Return the number of fragments of a block."""
        return len(self.lengths)


def shared_fragments(source: BlockGeometry, target: BlockGeometry) -> Fragments:
    """Cut a block so that each fragment is contiguous on both sides.

    Raises:
        BlockSizeError: the blocks of the two sides differ in length.
    """
    if source.block_bytes != target.block_bytes:
        raise BlockSizeError(
            f"a block of the source has {source.block_bytes} bytes, one of the target "
            f"{target.block_bytes}: only equal lengths can be mapped"
        )
    stops = np.union1d(np.cumsum(source.lengths), np.cumsum(target.lengths)).astype(np.int64)
    lengths = np.diff(stops, prepend=0)
    source_origins, source_strides = _cut(source, stops - lengths)
    target_origins, target_strides = _cut(target, stops - lengths)
    order = np.argsort(source_origins)
    columns = (source_origins, source_strides, target_origins, target_strides, lengths)
    columns = _joined(*(column[order] for column in columns))
    source_origins, source_strides, target_origins, target_strides, lengths = columns
    ends = source_origins + (source.blocks_count - 1) * source_strides + lengths
    _, bands = _bands(source_origins, ends)
    widths = np.bincount(bands)
    return Fragments(
        *columns,
        # Bands of different widths have no common shape; they are sorted by address instead.
        band_width=int(widths[0]) if (widths == widths[0]).all() else 1,
        is_dense=bool((source_strides == lengths).all() and (target_strides == lengths).all()),
    )


def check_array(name: str, array: npt.NDArray[np.generic], dtype: npt.DTypeLike) -> None:
    """Refuse what is not a one-dimensional array of a type: a cast would wrap in silence."""
    if array.dtype != dtype or array.ndim != 1:
        raise InvalidFieldError(
            f"{name} is an array of {array.dtype} in {array.ndim} dimensions: "
            f"allowed is {np.dtype(dtype)} in one"
        )


def _bands(starts: I64, ends: I64) -> tuple[I64, I64]:
    """Group ranges that touch each other's insides.

    Returns the order of the ranges by their starts, and in that order the number of each one's
    group, from 0 on.
    """
    order = np.argsort(starts)
    reached = np.maximum.accumulate(ends[order])
    bands = np.zeros(len(order), np.int64)
    np.cumsum(starts[order][1:] >= reached[:-1], out=bands[1:])
    return order, bands


def _cut(geometry: BlockGeometry, starts: I64) -> tuple[I64, I64]:
    """Return the positions in block 0 of bytes of the block, and the strides of their pieces."""
    stops = np.cumsum(geometry.lengths).astype(np.int64)
    pieces = stops.searchsorted(starts, side="right")
    inner = starts - stops[pieces] + geometry.lengths[pieces].view(np.int64)
    return geometry.origins[pieces] + inner, geometry.strides[pieces].view(np.int64)


def _joined(
    source_origins: I64, source_strides: I64, target_origins: I64, target_strides: I64, lengths: I64
) -> tuple[I64, I64, I64, I64, I64]:
    """Make one fragment of neighbours that are adjacent on both sides.

    Adjacent in block 0 is adjacent in every block: pieces that alternate have one stride.
    """
    is_joined = (source_origins[1:] - source_origins[:-1] == lengths[:-1]) & (
        target_origins[1:] - target_origins[:-1] == lengths[:-1]
    )
    starts = np.flatnonzero(np.append(True, ~is_joined))
    return (
        source_origins[starts],
        source_strides[starts],
        target_origins[starts],
        target_strides[starts],
        np.add.reduceat(lengths, starts),
    )


def _check_range(name: str, value: int, *, low: int, high: int) -> None:
    if type(value) is not int or not low <= value <= high:
        raise InvalidFieldError(f"{name} = {value!r}: allowed is {low}..{high}")
