"""What the lanes of an endpoint did lately, for those who show it."""

from __future__ import annotations

from dataclasses import dataclass

from kvservice.core.slots import I64


@dataclass(frozen=True, slots=True)
class LaneTotals:
    """Counts since the lane was opened. stalled_ns: time beyond what the bytes should have taken."""

    size_bytes: int
    operations_count: int
    errors_count: int
    transfers_count: int
    stalls_count: int
    stalled_ns: int
    best_bytes_per_ns: float


@dataclass(frozen=True, slots=True)
class LaneWindows:
    """The last seconds, oldest window first.

    first_ns: when the first window began, by CLOCK_MONOTONIC.
    size_bytes: (windows,) int64; the bytes of a transfer are spread evenly over its time.
    errors_count: (windows,) int64, where the transfer ended.
    busy_ns: (windows,) int64, time in which a transfer was under way; of parallel ones the sum.
    stalled_ns: (windows,) int64, the part of it that the bytes do not explain.
    """

    first_ns: int
    window_ns: int
    size_bytes: I64
    errors_count: I64
    busy_ns: I64
    stalled_ns: I64


@dataclass(frozen=True, slots=True)
class LaneReport:
    """One lane: its name, its counts, and its last seconds."""

    name: str
    totals: LaneTotals
    windows: LaneWindows
