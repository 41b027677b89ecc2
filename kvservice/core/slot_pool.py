"""The slots of one size that one tenant has, over all segments lent for them.

```
        ┌────────── commit ─────────┐
 FREE ──reserve──> RESERVED         v
  ^                   │ abort    COMMITTED ──evict (no pins)──> FREE
  │                   │ expiry      │ purge while leased
  │                   v             v
  └──drained── QUARANTINED      EVICTING ──last pin gone──> FREE
```

A slot is a row of parallel arrays here; operations take arrays of slot indexes.
A slot's *generation* moves whenever it loses its owner, so whoever still holds
an old capability can tell. `pins` counts what may touch the bytes: leases and
running transfers. Slots of segments that went back to the arena are ABSENT.
"""

from __future__ import annotations

from enum import IntEnum

import numpy as np
import numpy.typing as npt

from kvservice.core.errors import invariant
from kvservice.core.eviction import EvictionPolicy
from kvservice.core.slots import GRANULE_BYTES, I64, U8, U32, U64, Slots

KEY_BYTES = 32

_ONE = np.uint64(1)


class SlotState(IntEnum):
    """State of one slot."""

    FREE = 0
    RESERVED = 1
    COMMITTED = 2
    EVICTING = 3
    QUARANTINED = 4
    ABSENT = 5


# Looking a member up in its class costs half a microsecond; these stand on the path of
# every batch.
_FREE = int(SlotState.FREE)
_RESERVED = int(SlotState.RESERVED)
_COMMITTED = int(SlotState.COMMITTED)


class SlotPool:
    """Slots of `slot_bytes` of one tenant."""

    def __init__(self, *, tenant: str, slot_bytes: int, segment_bytes: int, policy: EvictionPolicy) -> None:
        self.tenant = tenant
        self.slot_bytes = slot_bytes
        self.slot_granules = slot_bytes // GRANULE_BYTES
        self.slots_per_segment = segment_bytes // slot_bytes
        self.policy = policy
        self.state: U8 = np.zeros(0, dtype=np.uint8)
        self.pins: npt.NDArray[np.int32] = np.zeros(0, dtype=np.int32)
        self.keys: U8 = np.zeros((0, KEY_BYTES), dtype=np.uint8)
        self.spaces: U32 = np.zeros(0, dtype=np.uint32)
        self.checksums: U32 = np.zeros(0, dtype=np.uint32)
        self.generations: U64 = np.zeros(0, dtype=np.uint64)
        self.free_count = 0
        self._free: I64 = np.zeros(0, dtype=np.int64)
        self._segments: list[int] = []
        self._segment_numbers: U32 = np.zeros(0, dtype=np.uint32)
        self._position_of: dict[int, int] = {}
        self._pages: list[U64] = []

    @property
    def segments(self) -> list[int]:
        """Numbers of the segments that the pool has."""
        return list(self._position_of)

    def add_segment(self, number: int, page: U64) -> None:
        """Take a segment over.

        page: (granules,) uint64, its generations, which readers watch; every word
        has moved since the segment served other slots.
        """
        count = self.slots_per_segment
        if -1 in self._segments:
            position = self._segments.index(-1)
        else:
            position = len(self._segments)
            self._segments.append(-1)
            self._pages.append(page)
            self._grow((position + 1) * count)
        self._segments[position] = number
        self._pages[position] = page
        self._position_of[number] = position
        self._segment_numbers = np.array([max(n, 0) for n in self._segments], dtype=np.uint32)
        slots = slice(position * count, (position + 1) * count)
        self.state[slots] = SlotState.FREE
        self.pins[slots] = 0
        self.generations[slots] = page[: count * self.slot_granules : self.slot_granules]
        # The stack is popped from its end: highest index first in, lowest first out,
        # so that a fresh segment is handed out as one contiguous extent.
        descending = np.arange(slots.stop - 1, slots.start - 1, -1, dtype=np.int64)
        self._push(descending)

    def remove_segment(self, number: int) -> None:
        """Give a segment back; all of its slots are free."""
        position = self._position_of.pop(number)
        slots = self.segment_slots_at(position)
        invariant(
            bool((self.state[slots] == SlotState.FREE).all()),
            f"segment {number} goes back with slots in use",
        )
        self._segments[position] = -1
        self.state[slots] = SlotState.ABSENT
        free = self._free[: self.free_count]
        kept = free[(free < slots.start) | (free >= slots.stop)]
        self._free[: len(kept)] = kept
        self.free_count = len(kept)

    def segment_slots(self, number: int) -> slice:
        """Return the indexes of the slots of a segment."""
        return self.segment_slots_at(self._position_of[number])

    def segment_slots_at(self, position: int) -> slice:
        """Return the indexes of the slots of the segment at a position."""
        start = position * self.slots_per_segment
        return slice(start, start + self.slots_per_segment)

    def has_segment(self, number: int) -> bool:
        """Say whether the segment serves this pool."""
        return number in self._position_of

    def take(self, count: int) -> I64:
        """Pop `count` free slots, ascending, into RESERVED."""
        invariant(count <= self.free_count, "more slots taken than are free")
        start = self.free_count - count
        taken = np.sort(self._free[start : self.free_count])
        self.free_count = start
        self.state[taken] = _RESERVED
        return taken

    def give_back(self, indexes: I64) -> None:
        """Make slots allocatable whose generation has moved already."""
        self.state[indexes] = _FREE
        self._push(indexes[::-1])

    def move_generation(self, indexes: I64) -> None:
        """Disown the slots: whoever holds them from before can tell."""
        generations = self.generations[indexes] + _ONE
        self.generations[indexes] = generations
        positions, inner = np.divmod(indexes, self.slots_per_segment)
        granules = inner * self.slot_granules
        first = int(positions[0]) if len(positions) else 0
        here = positions == first
        if here.all():
            self._pages[first][granules] = generations
            return
        for position in np.unique(positions).tolist():
            here = positions == position
            self._pages[position][granules[here]] = generations[here]

    def slots(self, indexes: I64, *, with_checksums: bool) -> Slots:
        """Return where the slots are."""
        positions, inner = np.divmod(indexes, self.slots_per_segment)
        granules = inner * self.slot_granules
        return Slots(
            self._segment_numbers[positions],
            granules.astype(np.uint32),
            self.generations[indexes],
            self.checksums[indexes] if with_checksums else None,
        )

    def indexes_of(self, segments: U32, granules: U32) -> I64:
        """Return the indexes of slots given by location; -1 for no slot of ours."""
        if _is_uniform(segments) and int(segments[0]) in self._position_of:
            # The usual case: a batch that was written together lies in one segment.
            start = self._position_of[int(segments[0])] * self.slots_per_segment
            inside: I64 = granules // np.uint32(self.slot_granules) + np.int64(start)
            if int(inside.max()) < start + self.slots_per_segment:
                return inside
        indexes = np.full(len(segments), -1, dtype=np.int64)
        numbers = [int(segments[0])] if _is_uniform(segments) else np.unique(segments).tolist()
        for number in numbers:
            position = self._position_of.get(number)
            if position is None:
                continue
            here = segments == number
            inside = granules[here].astype(np.int64) // self.slot_granules
            inside[inside >= self.slots_per_segment] = -1
            indexes[here] = np.where(inside < 0, -1, position * self.slots_per_segment + inside)
        return indexes

    def index_of(self, segment: int, granule: int) -> int:
        """Return the index of one of our slots."""
        return self._position_of[segment] * self.slots_per_segment + granule // self.slot_granules

    def evictable(self, indexes: I64 | slice = slice(None)) -> npt.NDArray[np.bool_]:
        """(n,) bool: which of the slots are committed and touched by nobody."""
        mask: npt.NDArray[np.bool_] = self.state[indexes] == _COMMITTED
        mask &= self.pins[indexes] == 0
        return mask

    def victims(self, count: int) -> I64:
        """Return up to `count` evictable slots, the least worth keeping first."""
        return self.policy.victims(count, self.evictable)

    def free_indexes(self) -> I64:
        """Return the allocatable slots."""
        return self._free[: self.free_count]

    def used_count(self) -> int:
        """Slots that are charged to the tenant: neither free nor absent."""
        return len(self._position_of) * self.slots_per_segment - self.free_count

    def _push(self, indexes: I64) -> None:
        end = self.free_count + len(indexes)
        self._free[self.free_count : end] = indexes
        self.free_count = end

    def _grow(self, count: int) -> None:
        def grown(array: npt.NDArray[np.generic]) -> npt.NDArray[np.generic]:
            larger = np.zeros((count, *array.shape[1:]), dtype=array.dtype)
            larger[: len(array)] = array
            return larger

        self.state = grown(self.state)  # type: ignore[assignment]
        self.pins = grown(self.pins)  # type: ignore[assignment]
        self.keys = grown(self.keys)  # type: ignore[assignment]
        self.spaces = grown(self.spaces)  # type: ignore[assignment]
        self.checksums = grown(self.checksums)  # type: ignore[assignment]
        self.generations = grown(self.generations)  # type: ignore[assignment]
        self._free = grown(self._free)  # type: ignore[assignment]
        self.policy.resize(count)


def _is_uniform(values: U32) -> bool:
    """Say whether there are values and all are the same: the usual case of a batch."""
    return len(values) > 0 and bool((values == values[0]).all())
