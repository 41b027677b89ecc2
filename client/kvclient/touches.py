"""Which blocks were read through the directory lately: hints for the daemon's eviction."""

from __future__ import annotations

import threading
from collections import deque

from kvservice.core.slots import I64

TOUCHES_LIMIT = 4096
"""Rows remembered between two heartbeats, about 16 KiB on the wire. More is dropped,
oldest first: they are hints, and a wrong one changes nothing."""


class Touches:
    """Row positions of recent directory reads. Thread-safe; holds at most about
    TOUCHES_LIMIT rows (one batch more, since whole batches are dropped).
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._batches: deque[I64] = deque()
        self._rows_count = 0

    def add(self, positions: I64) -> None:
        """Remember the rows of one read, (keys,) int64, -1 where nothing was read.

        The array is kept, not copied: the caller gives it away.
        """
        with self._lock:
            self._batches.append(positions)
            self._rows_count += len(positions)
            while self._rows_count - len(self._batches[0]) > TOUCHES_LIMIT:
                self._rows_count -= len(self._batches.popleft())

    def drain(self) -> list[I64]:
        """Return what was remembered, and forget it."""
        with self._lock:
            batches = list(self._batches)
            self._batches.clear()
            self._rows_count = 0
        return batches
