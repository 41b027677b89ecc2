"""The last events of each tenant, numbered, for those who follow or resume."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from enum import IntEnum

from kvservice.core.errors import EventsLostError

KEY_BYTES = 32

KEYS_PER_EVENT = 8
"""So a history of 65,536 events holds 16 MiB of keys at most."""


class FactKind(IntEnum):
    """What happened to keys; the numbers of `kv.v1.BlockEvent.Kind`."""

    COMMITTED = 1
    REMOVED = 2
    PURGED = 3


@dataclass(frozen=True, slots=True)
class Fact:
    """One event: `keys` (packed) of a space; space 0 and no keys for a purge."""

    sequence: int
    kind: FactKind
    namespace_id: bytes
    space_id: int
    keys: bytes


class History:
    """A bounded, gapless log; sequence numbers start at 1.

    limit_count: events kept. Their keys are bounded as well, since one event may carry
    thousands: at `KEYS_PER_EVENT` for each event on average.
    """

    def __init__(self, limit_count: int) -> None:
        self._facts: deque[Fact] = deque()
        self._limit_count = limit_count
        self._limit_bytes = limit_count * KEYS_PER_EVENT * KEY_BYTES
        self._kept_bytes = 0
        self._last = 0

    @property
    def last_sequence(self) -> int:
        """Number of the newest event; 0 before the first."""
        return self._last

    def append(self, kind: FactKind, *, namespace_id: bytes, space_id: int, keys: bytes) -> None:
        """Record an event; the oldest ones make room."""
        self._last += 1
        self._facts.append(Fact(self._last, kind, namespace_id, space_id, keys))
        self._kept_bytes += len(keys)
        while len(self._facts) > self._limit_count or (
            self._kept_bytes > self._limit_bytes and len(self._facts) > 1
        ):
            self._kept_bytes -= len(self._facts.popleft().keys)

    def after(self, sequence: int, *, limit_count: int) -> list[Fact]:
        """Return the next events after `sequence`, in order, at most `limit_count`.

        Raises:
            EventsLostError: some of them are no longer kept, or lie in the future.
        """
        if sequence > self._last:
            raise EventsLostError(
                f"after_sequence {sequence} lies beyond the newest event {self._last}; "
                "it belongs to another life of the daemon: list anew and follow from now"
            )
        oldest = self._last - len(self._facts) + 1
        if sequence + 1 < oldest:
            raise EventsLostError(
                f"events {sequence + 1} to {oldest - 1} are no longer kept; "
                "list anew and follow from the newest"
            )
        start = sequence + 1 - oldest
        count = min(limit_count, len(self._facts) - start)
        return [self._facts[start + i] for i in range(count)]
