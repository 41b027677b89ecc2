"""A clock that does not count the time in which the daemon itself stood still.

A daemon that was stopped (SIGSTOP, a suspended machine, a starved host) could
not hear renewals meanwhile. Expiring by the time that passed would punish the
living, so a gap between two looks at the clock beyond what the reaper allows is
a stall, and is taken out: every deadline moves by it.
"""

from __future__ import annotations

from collections.abc import Callable

LONGEST_GAP_NS = 1_500_000_000
"""The reaper looks at the clock each second; half a second more is load, what is
beyond it is a stall."""


class StallAwareClock:
    """Nanoseconds that never go back and leave stalls out. Callers serialise."""

    def __init__(self, read_ns: Callable[[], int], *, longest_gap_ns: int = LONGEST_GAP_NS) -> None:
        self._read_ns = read_ns
        self._longest_gap_ns = longest_gap_ns
        self._last = read_ns()
        self.stalled_ns = 0

    def now_ns(self) -> int:
        """Return the time, less all stalls so far."""
        raw = self._read_ns()
        gap = raw - self._last
        if gap > self._longest_gap_ns:
            self.stalled_ns += gap - self._longest_gap_ns
        self._last = raw
        return raw - self.stalled_ns
