"""The state of one daemon: events in, answers and effects out, one door.

`handle` is the only place where state changes. It reads no clock (`now_ns` comes
with each event, never going back), draws no randomness (tokens come with the
events) and does no I/O (memory is given to it when it is built).
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, TypeVar, cast

from kvservice.core import events
from kvservice.core.beat_desk import BeatDesk
from kvservice.core.books import ArenaMemory, Books, PolicyFactory, private_rows
from kvservice.core.effects import Effect
from kvservice.core.errors import invariant
from kvservice.core.eviction import LeastRecentlyUsed
from kvservice.core.handoff_desk import HandoffDesk
from kvservice.core.lease_desk import LeaseDesk
from kvservice.core.limits import Limits
from kvservice.core.one_sided_desk import OneSidedDesk
from kvservice.core.records import Session
from kvservice.core.reservation_desk import ReservationDesk
from kvservice.core.row_table import TableOperations
from kvservice.core.segment_desk import SegmentDesk
from kvservice.core.session_desk import SessionDesk
from kvservice.core.transfer_desk import TransferDesk

A = TypeVar("A")

_Handler = Callable[[Any, int], Any]


@dataclass(frozen=True, slots=True)
class Handled(Generic[A]):
    """The answer to an event, and what it asks of the world, in order."""

    answer: A
    effects: tuple[Effect, ...]


class KvState:
    """Sessions, namespaces, slots, reservations, leases and transfers of a daemon.

    life: 24 random bits, drawn at each start of the daemon.
    server_key: at least 16 bytes, from which namespaces are derived.
    """

    def __init__(
        self,
        limits: Limits,
        *,
        life: int,
        memory: ArenaMemory,
        operations: TableOperations,
        server_key: bytes,
        policy: PolicyFactory = LeastRecentlyUsed,
    ) -> None:
        self.books = Books(
            limits,
            life=life,
            memory=memory,
            operations=operations,
            server_key=server_key,
            policy=policy,
            private_rows=private_rows,
        )
        self._reservations = ReservationDesk(self.books)
        self._leases = LeaseDesk(self.books)
        self._handoffs = HandoffDesk(self.books, self._leases)
        self._segments = SegmentDesk(self.books, self._handoffs)
        self._sessions = SessionDesk(
            self.books, self._reservations, self._leases, self._handoffs, self._segments
        )
        self._transfers = TransferDesk(self.books)
        self._one_sided = OneSidedDesk(self.books)
        self._beats = BeatDesk(self.books, self._leases, self._handoffs)
        self._now = 0
        self._handlers: dict[type[events.Event[Any]], _Handler] = {
            events.Attach: self._sessions.attach,
            events.SessionEnded: self._sessions.ended,
            events.OpenNamespace: self._sessions.open_namespace,
            events.Purge: self._sessions.purge,
            events.Discard: self._sessions.discard,
            events.Drain: self._sessions.drain,
            events.Lookup: self._leases.lookup,
            events.Acquire: self._leases.acquire,
            events.Renew: self._leases.renew,
            events.Release: self._leases.release,
            events.Beat: self._beats.beat,
            events.Reserve: self._reservations.reserve,
            events.Commit: self._reservations.commit,
            events.Abort: self._reservations.abort,
            events.BeginTransfer: self._transfers.begin,
            events.EndTransfer: self._transfers.end,
            events.BeginOneSided: self._one_sided.begin,
            events.EndOneSided: self._one_sided.end,
            events.WritersCut: self._one_sided.cut,
            events.RegisterSegments: self._segments.register,
            events.UnregisterSegments: self._segments.unregister,
            events.Offer: self._handoffs.offer,
            events.Claim: self._handoffs.claim,
            events.EndHandoff: self._handoffs.end,
            events.LookAtHandoff: self._handoffs.look,
            events.Tick: self._tick,
        }

    def handle(self, event: events.Event[A], now_ns: int) -> Handled[A]:
        """Apply one event at a time that never goes back.

        What is due by `now_ns` has expired before the event is looked at.

        Raises:
            KvError: the event is refused and has changed nothing. Effects of what
                expired before it come with the next event.
        """
        now = max(now_ns, self._now)
        self._now = now
        if self.books.deadlines and self.books.deadlines[0][0] <= now:
            self._expire(now)
        handler = self._handlers.get(type(event))
        invariant(handler is not None, f"no handler for {type(event).__name__}")
        answer = cast("_Handler", handler)(event, now)
        effects = tuple(self.books.effects)
        self.books.effects.clear()
        return Handled(answer, effects)

    def tenant_of_session(self, token: bytes) -> str | None:
        """Return the tenant of a living session; None if there is no such session."""
        session = self.books.sessions.get(token)
        return None if session is None else session.tenant

    def next_deadline_ns(self) -> int | None:
        """When something may be due next; None if nothing is."""
        return self.books.deadlines[0][0] if self.books.deadlines else None

    def _tick(self, event: events.Tick, now: int) -> int | None:
        del event, now
        return self.next_deadline_ns()

    def _expire(self, now: int) -> None:
        """End what is due. A renewed thing is put back at its new deadline."""
        books = self.books
        by_id = {session.session_id: session for session in books.sessions.values()}
        while books.deadlines and books.deadlines[0][0] <= now:
            _, handle = heapq.heappop(books.deadlines)
            deadline = self._end_if_due(handle, by_id.get(handle), now)
            if deadline is not None:
                books.schedule(deadline, handle)

    def _end_if_due(self, handle: int, session: Session | None, now: int) -> int | None:
        """End what has this number if it is due; else say when it will be. None: it is no more."""
        books = self.books
        lease = books.leases.get(handle)
        reservation = books.reservations.get(handle)
        handoff, hold = books.handoffs.get(handle), books.holds.get(handle)
        transfer = books.transfers.get(handle)
        deadline: int | None = None
        if lease is not None:
            deadline, end = lease.deadline_ns, partial(self._leases.expire, lease, now)
        elif reservation is not None:
            deadline, end = reservation.deadline_ns, partial(self._reservations.expire, reservation, now)
        elif handoff is not None:
            deadline, end = handoff.deadline_ns, partial(self._handoffs.expire, handoff, now)
        elif hold is not None:
            deadline, end = hold.until_ns, partial(self._handoffs.let_go, hold)
        elif transfer is not None:
            deadline, end = transfer.until_ns, partial(self._one_sided.expire, transfer)
        elif session is not None and session.token in books.sessions:
            deadline, end = (
                self._sessions.silent_until(session),
                partial(self._sessions.close, session, now, is_certain=False),
            )
        if deadline is None or deadline > now:
            return deadline
        end()
        return None
