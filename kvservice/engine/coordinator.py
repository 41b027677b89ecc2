"""The single writer of the state: events in, effects run, answers out.

gRPC, the local lane and the reaper call it on the event loop; the threads of the
tcp data plane call it too. One lock serialises them. It is held for microseconds
(the state is pure computation) and never across a wait; effects run under it, so
that no answer leaves before what it names is ready.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import TypeVar

from kvservice.core.answers import TransferAnswer
from kvservice.core.effects import Effect, EndSession, LendSegment, NewsForTenant, Revoke, Tell
from kvservice.core.errors import InvariantError
from kvservice.core.events import BeginTransfer, EndTransfer, Event
from kvservice.core.history import Fact
from kvservice.core.records import Notice
from kvservice.core.slots import I64, U32
from kvservice.core.state import KvState
from kvservice.engine.arena import Arena
from kvservice.engine.clock import StallAwareClock
from kvservice.ports.transport import Grant

_log = logging.getLogger(__name__)

A = TypeVar("A")


class Coordinator:
    """Applies events to the state and runs what they ask for.

    The listeners are called under the lock, from any thread: they hand the news
    to their own thread and return.
    """

    def __init__(self, state: KvState, *, arena: Arena, clock: StallAwareClock) -> None:
        self._state = state
        self._arena = arena
        self._clock = clock
        self._lock = threading.Lock()
        self.on_revoke: Callable[[bytes, int], None] = _ignore_two
        self.on_notice: Callable[[bytes, Notice], None] = _ignore_two
        self.on_session_end: Callable[[bytes], None] = _ignore
        self.on_news: Callable[[str], None] = _ignore
        self.on_broken: Callable[[InvariantError], None] = _ignore

    def submit(self, event: Event[A]) -> A:
        """Apply an event now and return its answer.

        Raises:
            KvError: it was refused and has changed nothing.
        """
        with self._lock:
            try:
                handled = self._state.handle(event, self._clock.now_ns())
            except InvariantError as error:
                self.on_broken(error)
                raise
            for effect in handled.effects:
                self._run(effect)
            return handled.answer

    def facts_after(self, tenant: str, sequence: int, *, limit_count: int) -> list[Fact]:
        """Return the next events of a tenant; raises EventsLostError."""
        with self._lock:
            history = self._state.books.tenant(tenant).history
            return history.after(sequence, limit_count=limit_count)

    def last_sequence(self, tenant: str) -> int:
        """Return the number of the tenant's newest event."""
        with self._lock:
            return self._state.books.tenant(tenant).history.last_sequence

    def look(self, reader: Callable[[KvState, int], A]) -> A:
        """Let `reader(state, now_ns)` read the state; it changes nothing."""
        with self._lock:
            return reader(self._state, self._clock.now_ns())

    def _run(self, effect: Effect) -> None:
        match effect:
            case LendSegment(segment, _, is_fresh):
                if is_fresh:
                    self._arena.touch_soon(segment)
            case Revoke(token, capability_id):
                self.on_revoke(token, capability_id)
            case Tell(token, notice):
                self.on_notice(token, notice)
            case EndSession(token):
                self.on_session_end(token)
            case NewsForTenant(tenant):
                self.on_news(tenant)
            case _:
                raise InvariantError(f"no way to run {effect!r}")


class ArenaAuthority:
    """Lets wires at the arena: `ports.transport.TransferAuthority`."""

    def __init__(self, coordinator: Coordinator, arena: Arena) -> None:
        self._coordinator = coordinator
        self._arena = arena

    def begin_write(self, *, session_token: bytes, reservation_id: int, slot_indexes: I64) -> Grant:
        """See TransferAuthority."""
        return self._begin(session_token, reservation_id, slot_indexes, is_write=True)

    def begin_read(self, *, session_token: bytes, lease_id: int, slot_indexes: I64) -> Grant:
        """See TransferAuthority."""
        return self._begin(session_token, lease_id, slot_indexes, is_write=False)

    def end(self, transfer_id: int, *, checksums: U32 | None) -> None:
        """See TransferAuthority."""
        self._coordinator.submit(EndTransfer(transfer_id, checksums))

    def _begin(self, token: bytes, capability_id: int, slot_indexes: I64, *, is_write: bool) -> Grant:
        answer: TransferAnswer = self._coordinator.submit(
            BeginTransfer(token, capability_id, slot_indexes, is_write=is_write)
        )
        addresses = self._arena.addresses(answer.slots.segments, answer.slots.granules)
        return Grant(answer.transfer_id, addresses, answer.block_bytes, answer.slots.checksums)


def _ignore(_: object) -> None:
    """Stand in for a listener that nobody has set."""


def _ignore_two(_: object, __: object) -> None:
    """Stand in for a listener that nobody has set."""
