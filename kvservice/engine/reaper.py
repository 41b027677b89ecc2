"""Turns the passing of time into events."""

from __future__ import annotations

import asyncio
import logging

from kvservice.core.events import Tick
from kvservice.core.state import KvState
from kvservice.engine.coordinator import Coordinator

LONGEST_SLEEP_S = 1.0
"""A look each second costs 20 microseconds, and is how the clock tells a stall."""

QUARANTINE_ALARM_NS = 30_000_000_000
"""Ten beats of a client: one that lives has answered long before."""

_log = logging.getLogger(__name__)

SHORTEST_SLEEP_S = 0.005
"""Deadlines closer together than this expire in one look."""


class Reaper:
    """Ticks the state at its next deadline, and once a second at least."""

    def __init__(self, coordinator: Coordinator, *, longest_sleep_s: float = LONGEST_SLEEP_S) -> None:
        self._coordinator = coordinator
        self._longest_sleep_s = longest_sleep_s
        self._alarmed: set[int] = set()

    async def run(self) -> None:
        """Tick until cancelled."""
        while True:
            self._coordinator.submit(Tick())
            self.raise_alarms()
            pause_s = self._coordinator.look(lambda state, now: _pause(state.next_deadline_ns(), now))
            await asyncio.sleep(min(pause_s, self._longest_sleep_s))

    def raise_alarms(self) -> None:
        """Say once of each quarantine that has lasted too long who it waits for.

        Nothing is freed by it: only the processes that map the memory can say that they
        do not touch it any more.
        """
        overdue = self._coordinator.look(_overdue)
        for capability_id, (slots_count, names) in overdue.items():
            if capability_id not in self._alarmed:
                _log.warning(
                    "capability %d ended %d s ago or more, and %d slots still wait for the word of %s",
                    capability_id,
                    QUARANTINE_ALARM_NS // 1_000_000_000,
                    slots_count,
                    ", ".join(names),
                )
        self._alarmed = set(overdue)


def _overdue(state: KvState, now_ns: int) -> dict[int, tuple[int, list[str]]]:
    """Return the quarantines that have lasted too long: slots, and names of those who have to answer."""
    books = state.books
    return {
        quarantine.capability_id: (
            quarantine.batch.count,
            sorted(books.sessions[token].client_name or "(no name)" for token in quarantine.waiting),
        )
        for quarantine in books.quarantines.values()
        if now_ns - quarantine.since_ns >= QUARANTINE_ALARM_NS
    }


def _pause(deadline_ns: int | None, now_ns: int) -> float:
    if deadline_ns is None:
        return LONGEST_SLEEP_S
    return min(max((deadline_ns - now_ns) / 1e9, SHORTEST_SLEEP_S), LONGEST_SLEEP_S)
