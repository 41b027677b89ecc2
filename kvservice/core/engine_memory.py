"""An engine's own memory as the daemon knows it: segments, ways to them, and layouts.

Values only, checked when they are built. The daemon never touches this memory; it
passes on where it is, so what is wrong here would make others read elsewhere.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import IntEnum

import numpy as np

from kvservice.core.errors import InvalidFieldError, LimitReachedError
from kvservice.core.limits import PIECES_LIMIT, WAY_BYTES_LIMIT, WAYS_LIMIT
from kvservice.core.slots import U32, U64

ADDRESS_LIMIT = 1 << 63
"""Addresses of processes are below it, and sums of two of them fit 64 bits."""


class MemoryKind(IntEnum):
    """Where memory is; the numbers of `kv.v1.MemoryKind`."""

    HOST = 1
    CUDA = 2


@dataclass(frozen=True, slots=True)
class SegmentWay:
    """One way to a segment: a transport, its endpoint, and what opens the memory to it."""

    transport: str
    address: bytes
    key: bytes

    def __post_init__(self) -> None:
        """Hold the fields to their limits."""
        if not self.transport:
            raise InvalidFieldError("ways.transport is empty; name a transport, such as ucx")
        for name, packed in (("address", self.address), ("key", self.key)):
            if len(packed) > WAY_BYTES_LIMIT:
                raise InvalidFieldError(
                    f"ways.{name} has {len(packed)} bytes; at most {WAY_BYTES_LIMIT} are allowed: "
                    "name fewer devices"
                )


@dataclass(frozen=True, slots=True)
class EngineSegment:
    """Memory of one process, contiguous there."""

    base_address: int
    size_bytes: int
    memory_kind: MemoryKind
    ways: tuple[SegmentWay, ...]

    def __post_init__(self) -> None:
        """Hold the fields to their limits."""
        if not 0 < self.size_bytes <= ADDRESS_LIMIT or not 0 < self.base_address <= ADDRESS_LIMIT:
            raise InvalidFieldError(
                f"segments: {self.size_bytes} bytes at {self.base_address:#x} is no memory; "
                f"address and size are 1 to {ADDRESS_LIMIT:#x}"
            )
        if not 1 <= len(self.ways) <= WAYS_LIMIT:
            raise InvalidFieldError(
                f"segments.ways has {len(self.ways)} entries; 1 to {WAYS_LIMIT} are allowed"
            )

    @property
    def transports(self) -> frozenset[str]:
        """Names of the transports that lead to it."""
        return frozenset(way.transport for way in self.ways)


@dataclass(frozen=True, slots=True)
class EngineLayout:
    """How the blocks of one part lie in segments; see `kv.v1.BlockLayout`.

    segments: (pieces,) uint32, index of each piece's segment in a list kept beside this.
    offsets, strides, lengths: (pieces,) uint64, bytes.
    """

    segments: U32
    offsets: U64
    strides: U64
    lengths: U64
    blocks_count: int

    @property
    def block_bytes(self) -> int:
        """Bytes of one block."""
        # Lengths of 64 bits may add up to more, and a sum that wrapped would pass for a small block.
        return sum(self.lengths.tolist())

    def check(self, segment_sizes_bytes: list[int]) -> None:
        """Hold every piece of every block to its segment.

        Raises:
            InvalidFieldError: a piece leaves its segment, or the arrays disagree.
        """
        pieces_count = len(self.segments)
        if not 1 <= pieces_count <= PIECES_LIMIT:
            raise InvalidFieldError(f"layouts has {pieces_count} pieces; 1 to {PIECES_LIMIT} make a block")
        if not len(self.offsets) == len(self.strides) == len(self.lengths) == pieces_count:
            raise InvalidFieldError(
                f"layouts has {pieces_count} piece_segments, {len(self.offsets)} offsets, "
                f"{len(self.strides)} strides and {len(self.lengths)} lengths; give one of each for a piece"
            )
        if self.blocks_count < 1:
            raise InvalidFieldError("layouts.blocks_count is 0; a layout has one block at least")
        # Python's integers do not wrap, and this is done once in the life of a layout.
        rows = zip(
            self.segments.tolist(),
            self.offsets.tolist(),
            self.strides.tolist(),
            self.lengths.tolist(),
            strict=True,
        )
        for piece, (segment, offset, stride, length) in enumerate(rows):
            if segment >= len(segment_sizes_bytes):
                raise InvalidFieldError(
                    f"layouts: piece {piece} names segment {segment} of {len(segment_sizes_bytes)}"
                )
            if not length or (self.blocks_count > 1 and stride < length):
                raise InvalidFieldError(
                    f"layouts: piece {piece} has {length} bytes every {stride}; blocks must not be "
                    "empty, nor overlap"
                )
            end = offset + (self.blocks_count - 1) * stride + length
            if end > segment_sizes_bytes[segment]:
                raise InvalidFieldError(
                    f"layouts: piece {piece} of the last block ends at byte {end} of segment {segment}, "
                    f"which has {segment_sizes_bytes[segment]}"
                )


@dataclass(frozen=True, slots=True, eq=False)
class KnownSegment:
    """A registered segment, and the session it ends with."""

    segment_id: int
    segment: EngineSegment
    token: bytes


@dataclass(frozen=True, slots=True, eq=False)
class KnownLayout:
    """A registered layout over registered segments.

    segments: what the indexes of `layout.segments` mean.
    """

    layout_id: int
    layout: EngineLayout
    segments: tuple[KnownSegment, ...]
    token: bytes

    @property
    def used_segments(self) -> tuple[KnownSegment, ...]:
        """Those of its segments that pieces lie in; the others were only registered with them."""
        used: list[int] = np.unique(self.layout.segments).tolist()
        return tuple(self.segments[index] for index in used)

    @property
    def transports(self) -> frozenset[str]:
        """Names of the transports that lead to all of the segments that it uses."""
        return _held_by_all(known.segment.transports for known in self.used_segments)


def shared_transports(layouts: tuple[KnownLayout, ...]) -> frozenset[str]:
    """Return the transports that lead to all of some layouts."""
    return _held_by_all(layout.transports for layout in layouts)


def check_count(count: int, name: str, *, most: int) -> None:
    """Raise LimitReachedError where a session would have more of something than it may."""
    if count > most:
        raise LimitReachedError(f"the session would have {count} {name}, more than {most}: drop some first")


def _held_by_all(sets: Iterable[frozenset[str]]) -> frozenset[str]:
    """Return what all have; nothing where there is none."""
    rest = iter(sets)
    shared = next(rest, frozenset())
    for each in rest:
        shared = shared & each
    return shared
