"""The substance of the blocking flavour: locks, one thread for the beats, direct calls.

`_backends/aio.py` has the same names with the same meaning.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar

from google.protobuf.message import Message

from kvclient._backends.grpc_sync import GrpcConnection, GrpcStream
from kvclient._backends.lane_sync import BegunCall, LaneConnection, LaneStream
from kvclient.config import ClientSettings
from kvclient.handoff_news import HandoffWatch
from kvclient.results import HandoffNews
from kvservice.core.errors import DeadlineError, KvError

__all__ = [
    "BegunCall",
    "Connection",
    "EventSource",
    "LaneConnection",
    "SingleFlight",
    "Ticker",
    "dial",
    "from_threads",
    "pause",
    "run_blocking",
    "run_copy",
    "take_news",
    "wait_news",
]

Result = TypeVar("Result")
Answer = TypeVar("Answer", bound=Message)

Connection = LaneConnection | GrpcConnection
EventSource = LaneStream[Answer] | GrpcStream[Answer]

_log = logging.getLogger("kvclient")


def dial(settings: ClientSettings, on_unasked: Callable[[bytes], None], timeout_s: float) -> Connection:
    """Return a new connection to the endpoint; no session is opened yet."""
    if settings.lane_path:
        return LaneConnection(settings.lane_path, on_unasked, timeout_s)
    return GrpcConnection(settings)


def pause(seconds: float) -> None:
    """Let time pass."""
    time.sleep(seconds)


DIRECT_COPY_LIMIT_BYTES = 1 << 62
"""Copies up to this size run where they are asked for: here, all of them."""


def run_copy(copy: Callable[[], Result], size_bytes: int) -> Result:  # noqa: ARG001 - as in aio
    """Run a copy here and now: the caller has said that it may block."""
    return copy()


def run_blocking(function: Callable[[], Result]) -> Result:
    """Run what takes long, here and now."""
    return function()


NEWS_SLICE_S = 0.05
"""Another thread may read, and take note of, what is waited for here."""


def from_threads(call: Callable[..., Any], limit_s: float) -> Callable[..., Any]:  # noqa: ARG001 - as in aio
    """Return what another thread can call: the same, since all calls wait where they are made."""
    return call


def take_news(connection: Connection | None) -> None:
    """Deal with what has been said unasked; waits for nothing."""
    if isinstance(connection, LaneConnection):
        connection.hear(0.0)


def wait_news(
    current: Callable[[], Connection | None], watch: HandoffWatch, handoff_id: int, timeout_s: float
) -> HandoffNews | None:
    """See HandoffWatch.wait_released; nobody else may be there to read the lane.

    current: returns the connection, which another thread may have replaced by a new one.
    """
    end_s = time.monotonic() + timeout_s
    while not watch.is_released(handoff_id):
        remaining_s = end_s - time.monotonic()
        if remaining_s <= 0:
            return None
        connection = current()
        if isinstance(connection, LaneConnection) and connection.is_open:
            connection.hear(min(remaining_s, NEWS_SLICE_S))
        else:
            watch.wait_released(handoff_id, min(remaining_s, NEWS_SLICE_S))
    return watch.news(handoff_id)


class SingleFlight:
    """Runs one action at a time. The action finds out itself whether it is still needed."""

    def __init__(self) -> None:
        self._lock = threading.Lock()

    def run(self, action: Callable[[], None], timeout_s: float) -> None:
        """Run the action, after those of other threads. Raises DeadlineError when its turn does not come."""
        if not self._lock.acquire(timeout=timeout_s):
            raise DeadlineError(f"another thread's attempt took longer than {timeout_s:.3f} s")
        try:
            action()
        finally:
            self._lock.release()


class Ticker:
    """Calls `action` each `interval_s`, and at once when woken, on a thread of its own."""

    def __init__(self, action: Callable[[], None], interval_s: float) -> None:
        self.interval_s = interval_s
        self._action = action
        self._woken = threading.Event()
        self._is_closed = False
        self._is_failing = False
        self._thread = threading.Thread(target=self._run, name="kvclient-ticker", daemon=True)
        self._pid = os.getpid()

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def wake(self) -> None:
        """Make the next call now. Any thread may."""
        self._woken.set()

    def close(self) -> None:
        """End, after the call under way. Idempotent."""
        self._is_closed = True
        self._woken.set()
        # In a child of a fork the thread does not exist.
        if os.getpid() == self._pid and self._thread.is_alive():
            self._thread.join()

    def _run(self) -> None:
        while True:
            self._woken.wait(self.interval_s)
            self._woken.clear()
            if self._is_closed:
                return
            try:
                self._action()
                self._is_failing = False
            except KvError as error:
                # Said once for each outage: a daemon that is away is no news with every beat.
                level = logging.DEBUG if self._is_failing else logging.WARNING
                self._is_failing = True
                _log.log(level, "heartbeat failed: %s", error, extra={"reason": error.reason.name})
            except Exception:  # noqa: BLE001 # border: task
                _log.exception("heartbeat failed")
