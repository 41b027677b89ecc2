"""An engine's own memory as the daemon knows it: segments, ways to them, and layouts.

Values only, checked when they are built. The daemon never touches this memory; it
passes on where it is, so what is wrong here would make others read elsewhere.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import IntEnum

import numpy as np

from kvservice.core.block_geometry import BlockGeometry
from kvservice.core.errors import InvalidFieldError, LimitReachedError
from kvservice.core.limits import (
    LAYOUTS_PER_CALL_LIMIT,
    SEGMENTS_PER_CALL_LIMIT,
    WAY_BYTES_LIMIT,
    WAYS_LIMIT,
)

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
    layout: BlockGeometry
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


def check_call(*, segments_count: int, layouts_count: int) -> None:
    """Raise InvalidFieldError where one call would register more than it may, or no memory at all."""
    for name, count, smallest, most in (
        ("segments", segments_count, 1, SEGMENTS_PER_CALL_LIMIT),
        ("layouts", layouts_count, 0, LAYOUTS_PER_CALL_LIMIT),
    ):
        if not smallest <= count <= most:
            raise InvalidFieldError(f"{name} has {count} entries; {smallest} to {most} are allowed")


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
