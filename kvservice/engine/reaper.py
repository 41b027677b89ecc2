"""Turns the passing of time into events."""

from __future__ import annotations

import asyncio

from kvservice.core.events import Tick
from kvservice.engine.coordinator import Coordinator

LONGEST_SLEEP_S = 1.0
"""A look each second costs 20 microseconds, and is how the clock tells a stall."""

SHORTEST_SLEEP_S = 0.005
"""Deadlines closer together than this expire in one look."""


class Reaper:
    """Ticks the state at its next deadline, and once a second at least."""

    def __init__(self, coordinator: Coordinator, *, longest_sleep_s: float = LONGEST_SLEEP_S) -> None:
        self._coordinator = coordinator
        self._longest_sleep_s = longest_sleep_s

    async def run(self) -> None:
        """Tick until cancelled."""
        while True:
            self._coordinator.submit(Tick())
            pause_s = self._coordinator.look(lambda state, now: _pause(state.next_deadline_ns(), now))
            await asyncio.sleep(min(pause_s, self._longest_sleep_s))


def _pause(deadline_ns: int | None, now_ns: int) -> float:
    if deadline_ns is None:
        return LONGEST_SLEEP_S
    return min(max((deadline_ns - now_ns) / 1e9, SHORTEST_SLEEP_S), LONGEST_SLEEP_S)
