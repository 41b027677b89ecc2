"""Populates page tables in the background, so that no put pays for a first touch."""

from __future__ import annotations

import logging
import threading
from collections import deque
from typing import Protocol

from kvservice.core.errors import KvError

_log = logging.getLogger("kvclient")


class Touchable(Protocol):
    """Mapped memory whose pages can be populated ahead of use."""

    def touch_ahead(self) -> None:
        """Populate every page; the GIL is released meanwhile."""


class TouchAhead:
    """One thread, alive only while there is something to touch. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._pending: deque[Touchable] = deque()
        self._is_idle = threading.Event()
        self._is_idle.set()
        self._is_closed = False
        self._thread: threading.Thread | None = None

    def submit(self, memories: list[Touchable]) -> None:
        """Touch these soon, in order."""
        with self._lock:
            if self._is_closed or not memories:
                return
            self._pending.extend(memories)
            if self._is_idle.is_set():
                self._is_idle.clear()
                self._thread = threading.Thread(target=self._run, name="kvclient-touch", daemon=True)
                self._thread.start()

    def wait(self, timeout_s: float) -> bool:
        """Wait until everything submitted is touched; False when that takes longer."""
        return self._is_idle.wait(timeout_s)

    def close(self) -> None:
        """End the thread, after the segment that it is at. Idempotent."""
        with self._lock:
            self._is_closed = True
            self._pending.clear()
            thread = self._thread
        if thread is not None:
            # A child of a fork has no such thread; a bound keeps it from waiting for ever.
            thread.join(timeout=2.0)

    def _run(self) -> None:
        while True:
            with self._lock:
                if not self._pending:
                    self._is_idle.set()
                    return
                memory = self._pending.popleft()
            try:
                memory.touch_ahead()
            except KvError as error:
                # Unmapped meanwhile, or out of memory: the copy will say so to whoever asks for it.
                _log.debug("touch ahead ended early", extra={"error": str(error)})
