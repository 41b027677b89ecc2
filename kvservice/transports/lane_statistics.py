"""What a lane did lately, in windows short enough to show a stall of some milliseconds."""

from __future__ import annotations

import threading
import time

import numpy as np
import numpy.typing as npt

from kvservice.ports.lanes import LaneTotals, LaneWindows

WINDOW_NS = 5_000_000
WINDOWS_COUNT = 2000
"""Ten seconds."""

STALL_NS = 2_000_000
"""A transfer that takes so much longer than its bytes at the lane's best rate has stalled."""

F64 = npt.NDArray[np.float64]


def clock_ns() -> int:
    """Return CLOCK_MONOTONIC, in nanoseconds."""
    return time.monotonic_ns()


class LaneStatistics:
    """Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._rows: F64 = np.zeros((4, WINDOWS_COUNT), np.float64)
        self._newest = 0
        self._size_bytes = 0
        self._operations_count = 0
        self._errors_count = 0
        self._transfers_count = 0
        self._stalls_count = 0
        self._stalled_ns = 0
        self._best = 0.0

    def add(
        self, begun_ns: int, ended_ns: int, *, size_bytes: int, operations_count: int, errors_count: int
    ) -> None:
        """Count a transfer."""
        took_ns = max(ended_ns - begun_ns, 1)
        with self._lock:
            self._size_bytes += size_bytes
            self._operations_count += operations_count
            self._errors_count += errors_count
            self._transfers_count += 1
            self._best = max(self._best, size_bytes / took_ns)
            expected_ns = size_bytes / self._best if self._best else 0.0
            stalled_ns = took_ns - expected_ns
            if stalled_ns < STALL_NS:
                stalled_ns = 0.0
            else:
                self._stalls_count += 1
                self._stalled_ns += int(stalled_ns)
            self._spread(begun_ns, ended_ns, size_bytes, errors_count, stalled_ns)

    def totals(self) -> LaneTotals:
        """Return the counts since the beginning."""
        with self._lock:
            return LaneTotals(
                self._size_bytes,
                self._operations_count,
                self._errors_count,
                self._transfers_count,
                self._stalls_count,
                self._stalled_ns,
                self._best,
            )

    def windows(self, now_ns: int) -> LaneWindows:
        """Return the windows up to the one that `now_ns` is in."""
        with self._lock:
            self._advance(now_ns // WINDOW_NS)
            order = (np.arange(WINDOWS_COUNT) + self._newest + 1) % WINDOWS_COUNT
            sizes, errors, busy, stalled = (np.rint(row[order]).astype(np.int64) for row in self._rows)
            first_ns = (self._newest - WINDOWS_COUNT + 1) * WINDOW_NS
            return LaneWindows(first_ns, WINDOW_NS, sizes, errors, busy, stalled)

    def _spread(
        self, begun_ns: int, ended_ns: int, size_bytes: int, errors_count: int, stalled_ns: float
    ) -> None:
        """Count a transfer in the windows that its time lies in, as far as they are kept."""
        last = ended_ns // WINDOW_NS
        self._advance(last)
        if begun_ns // WINDOW_NS == last > self._newest - WINDOWS_COUNT:
            column = self._rows[:, last % WINDOWS_COUNT]
            column += (size_bytes, errors_count, ended_ns - begun_ns, stalled_ns)
            return
        first = max(begun_ns // WINDOW_NS, self._newest - WINDOWS_COUNT + 1)
        if last < first:
            return
        numbers = np.arange(first, last + 1)
        starts = np.maximum(numbers * WINDOW_NS, begun_ns)
        stops = np.minimum((numbers + 1) * WINDOW_NS, max(ended_ns, begun_ns + 1))
        shares = (stops - starts) / max(ended_ns - begun_ns, 1)
        places = numbers % WINDOWS_COUNT
        self._rows[0, places] += shares * size_bytes
        self._rows[1, last % WINDOWS_COUNT] += errors_count
        self._rows[2, places] += stops - starts
        self._rows[3, places] += shares * stalled_ns

    def _advance(self, newest: int) -> None:
        """Begin the windows up to `newest`, empty."""
        if newest <= self._newest:
            return
        fresh = np.arange(max(self._newest + 1, newest - WINDOWS_COUNT + 1), newest + 1)
        self._rows[:, fresh % WINDOWS_COUNT] = 0
        self._newest = newest
