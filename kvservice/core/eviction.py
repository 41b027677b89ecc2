"""Which committed blocks to give up first, behind one interface."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import numpy as np
import numpy.typing as npt

from kvservice.core.slots import I64, U64

Mask = npt.NDArray[np.bool_]

Eligible = Callable[["I64 | slice"], Mask]
"""Says which of some slots may be evicted now."""

QUEUE_MIN_COUNT = 1024
"""Victims that one scan looks for at least: a scan reads every slot, so its cost
is spread over many evictions."""

QUEUE_SHARE = 16
"""...or one in so many of the slots, whichever is more."""


class EvictionPolicy(Protocol):
    """Order of eviction over the slots of one pool. Indexes are (n,) int64."""

    def resize(self, count: int) -> None:
        """Make room for `count` slots; new ones start unused."""

    def touched(self, indexes: I64) -> None:
        """Note a use. `indexes` follow the key chain, root first."""

    def victims(self, count: int, eligible: Eligible) -> I64:
        """Return up to `count` eligible slots, best victim first; changes nothing
        about them, so that the caller may take fewer.
        """

    def newest(self, indexes: I64 | slice) -> int:
        """Return the stamp of the latest use among `indexes`."""

    def oldest(self, eligible: Mask) -> int:
        """Return the stamp of the earliest use among the eligible; 2**63 if none."""


class LeastRecentlyUsed:
    """Least recently used, leaf before root.

    A chain touched together gets falling stamps from root to leaf, so the leaf
    goes first and what remains of a chain is still a prefix (field measurements
    on public traces: costs nothing against plain LRU). The clock is shared by all
    pools of the service, which makes their stamps comparable.
    """

    def __init__(self, clock: UseClock) -> None:
        self._clock = clock
        self._stamps: U64 = np.zeros(0, dtype=np.uint64)
        self._queue: I64 = np.zeros(0, dtype=np.int64)
        self._queue_stamps: U64 = np.zeros(0, dtype=np.uint64)

    def resize(self, count: int) -> None:
        """See EvictionPolicy."""
        grown = np.zeros(count, dtype=np.uint64)
        kept = min(count, len(self._stamps))
        grown[:kept] = self._stamps[:kept]
        self._stamps = grown
        self._queue = self._queue[:0]
        self._queue_stamps = self._queue_stamps[:0]

    def touched(self, indexes: I64) -> None:
        """See EvictionPolicy."""
        count = len(indexes)
        top = self._clock.advance(count)
        self._stamps[indexes] = np.arange(top, top - count, -1, dtype=np.uint64)

    def victims(self, count: int, eligible: Eligible) -> I64:
        """See EvictionPolicy."""
        if len(self._queue) < count or not self._is_valid(slice(count), eligible).all():
            self._drop_invalid(eligible)
            if len(self._queue) < count:
                self._scan(max(count, QUEUE_MIN_COUNT, len(self._stamps) // QUEUE_SHARE), eligible)
        return self._queue[:count]

    def newest(self, indexes: I64 | slice) -> int:
        """See EvictionPolicy."""
        return int(self._stamps[indexes].max(initial=0))

    def oldest(self, eligible: Mask) -> int:
        """See EvictionPolicy."""
        return int(self._stamps.min(where=eligible, initial=np.uint64(2**63)))

    def _is_valid(self, some: slice, eligible: Eligible) -> Mask:
        """Which of the queued were not used, evicted or pinned since the scan."""
        queued = self._queue[some]
        mask: Mask = self._stamps[queued] == self._queue_stamps[some]
        mask &= eligible(queued)
        return mask

    def _drop_invalid(self, eligible: Eligible) -> None:
        keep = self._is_valid(slice(None), eligible)
        self._queue = self._queue[keep]
        self._queue_stamps = self._queue_stamps[keep]

    def _scan(self, count: int, eligible: Eligible) -> None:
        candidates = np.flatnonzero(eligible(slice(None)))
        stamps = self._stamps[candidates]
        if len(candidates) > count:
            nearest = np.argpartition(stamps, count)[:count]
            candidates, stamps = candidates[nearest], stamps[nearest]
        order = np.argsort(stamps, kind="stable")
        self._queue, self._queue_stamps = candidates[order], stamps[order]


class UseClock:
    """Counts uses; larger is later."""

    def __init__(self) -> None:
        self._now = 0

    def advance(self, count: int) -> int:
        """Reserve `count` stamps and return the largest of them."""
        self._now += count
        return self._now
