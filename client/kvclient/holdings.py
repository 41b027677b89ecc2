"""What this process holds and touches: reservations, leases, claimed handoffs, and copies under them.

The rule that this file keeps: a revocation is acknowledged only when no copy of this
process runs under that id any more, since the daemon reuses the memory on our word.
And what has ended here is never copied under again. An id may be copied under without
being held here: a scheduler acquires, a worker copies.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

from kvservice.core.errors import HandoffEndedError, KvError, LeaseExpiredError, ReservationExpiredError
from kvservice.core.outcomes import ItemOutcome

ENDED_LIMIT = 1 << 16
"""Ended ids remembered. An older one is stopped by its slots' generations, which have
moved by then."""


class Kind(Enum):
    """What an id names."""

    RESERVATION = "reservation"
    LEASE = "lease"
    HANDOFF = "handoff"


_ENDED: dict[Kind, tuple[type[KvError], str]] = {
    Kind.RESERVATION: (ReservationExpiredError, "was ended, or revoked by the daemon; reserve again"),
    Kind.LEASE: (LeaseExpiredError, "was released, or revoked by the daemon; acquire again"),
    Kind.HANDOFF: (HandoffEndedError, "has ended; look the blocks up, or compute them"),
}


@dataclass(slots=True)
class _Held:
    kind: Kind
    deadline_s: float


@dataclass(frozen=True, slots=True)
class Beat:
    """What one heartbeat says; the ids are those at the time it was made."""

    lease_ids: list[int]
    reservation_ids: list[int]
    acknowledged_ids: list[int]
    handoff_ids: list[int]


class Holdings:
    """Thread-safe. `on_due` is called, outside the lock, when an acknowledgement became due."""

    def __init__(self, on_due: Callable[[], None]) -> None:
        self._lock = threading.Lock()
        self._held: dict[int, _Held] = {}
        self._copies: dict[int, int] = {}
        self._revoked: set[int] = set()
        self._ended: OrderedDict[int, None] = OrderedDict()
        self._on_due = on_due

    def __len__(self) -> int:
        """Return the number of ids held."""
        return len(self._held)

    def add(self, capability_id: int, kind: Kind, *, deadline_s: float) -> None:
        """Hold what was granted just now; the heartbeats renew it from now on."""
        with self._lock:
            self._held[capability_id] = _Held(kind, deadline_s)

    def discard(self, capability_id: int) -> None:
        """Hold it no more, since this process has ended it. Idempotent."""
        with self._lock:
            self._end(capability_id)

    def holds(self, capability_id: int) -> bool:
        """Whether this process holds it, and so renews it."""
        return capability_id in self._held

    def deadline_s(self, capability_id: int, otherwise_s: float) -> float:
        """Return the monotonic end of what is held, as last renewed; `otherwise_s` if it is not."""
        with self._lock:
            held = self._held.get(capability_id)
            return otherwise_s if held is None else held.deadline_s

    def begin_copy(self, capability_id: int, kind: Kind) -> None:
        """Note that this process touches the memory of the id from now on.

        Raises:
            LeaseExpiredError, ReservationExpiredError, HandoffEndedError: it was revoked or has
                ended; its memory must not be touched.
        """
        with self._lock:
            if capability_id in self._ended:
                error, why = _ENDED[kind]
                raise error(f"{kind.value} {capability_id} {why}")
            self._copies[capability_id] = self._copies.get(capability_id, 0) + 1

    def end_copy(self, capability_id: int) -> None:
        """Note that a copy begun under the id has ended."""
        with self._lock:
            count = self._copies[capability_id] - 1
            if count:
                self._copies[capability_id] = count
            else:
                del self._copies[capability_id]
            is_due = not count and capability_id in self._revoked
        if is_due:
            self._on_due()

    def has_ended(self, capability_id: int) -> bool:
        """Return whether this process or the daemon has ended it."""
        return capability_id in self._ended

    def revoke(self, capability_ids: list[int]) -> None:
        """Take note of revocations. Each is acknowledged by the next beat that finds no copy under it."""
        if not capability_ids:
            return
        with self._lock:
            self._revoked.update(capability_ids)
            for capability_id in capability_ids:
                self._end(capability_id)
            is_due = any(capability_id not in self._copies for capability_id in capability_ids)
        if is_due:
            self._on_due()

    def beat(self) -> Beat:
        """Return what the next heartbeat has to say."""
        with self._lock:
            ids: dict[Kind, list[int]] = {kind: [] for kind in Kind}
            for number, held in self._held.items():
                ids[held.kind].append(number)
            return Beat(
                ids[Kind.LEASE],
                ids[Kind.RESERVATION],
                [number for number in self._revoked if number not in self._copies],
                ids[Kind.HANDOFF],
            )

    def renewed(self, capability_ids: list[int], outcomes: bytes, deadline_s: float) -> None:
        """Take the answer to a renewal: one outcome for each id. Never shortens."""
        with self._lock:
            for capability_id, outcome in zip(capability_ids, outcomes, strict=False):
                held = self._held.get(capability_id)
                if held is None:
                    continue
                if outcome == ItemOutcome.DONE:
                    held.deadline_s = max(held.deadline_s, deadline_s)
                else:
                    self._end(capability_id)

    def acknowledged(self, capability_ids: list[int]) -> None:
        """Forget revocations that the daemon has our word on."""
        with self._lock:
            self._revoked.difference_update(capability_ids)

    def clear(self) -> None:
        """Forget everything that was granted, after the session was lost.

        Copies go on being counted: they end by themselves.
        """
        with self._lock:
            for capability_id in list(self._held):
                self._end(capability_id)
            self._revoked.clear()

    def _end(self, capability_id: int) -> None:
        self._held.pop(capability_id, None)
        self._ended[capability_id] = None
        if len(self._ended) > ENDED_LIMIT:
            self._ended.popitem(last=False)
