"""The substance of the asynchronous flavour: tasks, and threads for large copies.

`_backends/sync.py` has the same names with the same meaning.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

from google.protobuf.message import Message

from kvclient._backends.grpc_aio import GrpcConnection, GrpcStream
from kvclient._backends.lane_aio import BegunCall, LaneConnection, LaneStream
from kvclient.config import ClientSettings
from kvclient.handoff_news import HandoffWatch
from kvclient.results import HandoffNews
from kvservice.core.errors import DeadlineError, KvError, PeerUnavailableError

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

DIRECT_COPY_LIMIT_BYTES = 1 << 20
"""Smaller copies run on the loop: they take less than the 0.1 ms that a thread costs."""

_log = logging.getLogger("kvclient")


async def dial(settings: ClientSettings, on_unasked: Callable[[bytes], None], timeout_s: float) -> Connection:
    """Return a new connection to the endpoint; no session is opened yet."""
    if settings.lane_path:
        return await LaneConnection.open(settings.lane_path, on_unasked, timeout_s)
    return GrpcConnection(settings)


async def pause(seconds: float) -> None:
    """Let time pass."""
    await asyncio.sleep(seconds)


async def run_copy(copy: Callable[[], Result], size_bytes: int) -> Result:
    """Run a copy, on a thread if it is large; a cancelled caller still waits for its end."""
    if size_bytes <= DIRECT_COPY_LIMIT_BYTES:
        return copy()
    return await run_blocking(copy)


async def run_blocking(function: Callable[[], Result]) -> Result:
    """Run what takes long on a thread.

    A thread cannot be cancelled, and what it copies into must not be given back
    meanwhile: so a cancellation takes effect when the thread has ended.
    """
    running = asyncio.ensure_future(asyncio.to_thread(function))
    try:
        return await asyncio.shield(running)
    except asyncio.CancelledError:
        while not running.done():
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.wait([running])
        # The cancellation is what the caller gets to see; an error of the copy is moot.
        running.exception()
        raise


def from_threads(call: Callable[..., Coroutine[Any, Any, Any]], limit_s: float) -> Callable[..., Any]:
    """Return what another thread can call, and wait for, while this loop goes on. limit_s: longest wait."""
    loop = asyncio.get_running_loop()

    def run(*arguments: Any, **named: Any) -> Any:
        running = asyncio.run_coroutine_threadsafe(call(*arguments, **named), loop)
        try:
            return running.result(limit_s)
        except TimeoutError as error:
            running.cancel()
            raise DeadlineError(f"the event loop did not get to a call within {limit_s:.1f} s") from error
        except concurrent.futures.CancelledError as error:
            raise PeerUnavailableError("the client was closed under a call") from error

    return run


def take_news(connection: Connection | None) -> None:
    """Deal with what has been said unasked: the event loop has done it."""


async def wait_news(
    current: Callable[[], Connection | None],  # noqa: ARG001 - as in sync
    watch: HandoffWatch,
    handoff_id: int,
    timeout_s: float,
) -> HandoffNews | None:
    """See HandoffWatch.wait_released.

    No thread waits: there are only a few, and the copies of the handoffs that are under way
    need them.
    """
    end_s = time.monotonic() + timeout_s
    changed = asyncio.Event()
    # All that is told is told by tasks and callbacks of this loop.
    with watch.waking(changed.set):
        while not watch.is_released(handoff_id):
            overdue_s = watch.overdue_s(handoff_id)
            until_s = end_s if overdue_s is None else min(end_s, overdue_s)
            remaining_s = until_s - time.monotonic()
            if end_s <= time.monotonic():
                return None
            changed.clear()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(changed.wait(), max(remaining_s, 0.001))
    return watch.news(handoff_id)


class SingleFlight:
    """Runs one action at a time; who comes meanwhile waits for the same one."""

    def __init__(self) -> None:
        self._running: asyncio.Future[None] | None = None

    async def run(self, action: Callable[[], Awaitable[None]], timeout_s: float) -> None:
        """Run the action, or wait for the one under way. Raises DeadlineError when that takes too long.

        The action goes on when its first caller gives up.
        """
        running = self._running
        if running is None or running.done():
            running = self._running = asyncio.ensure_future(action())
            # So that nobody warns of an error when all who waited have given up.
            running.add_done_callback(lambda task: task.cancelled() or task.exception())
        done, _ = await asyncio.wait([running], timeout=timeout_s)
        if not done:
            raise DeadlineError(f"another caller's attempt took longer than {timeout_s:.3f} s")
        running.result()


class Ticker:
    """Calls `action` each `interval_s`, and at once when woken, as a task."""

    def __init__(self, action: Callable[[], Awaitable[None]], interval_s: float) -> None:
        self.interval_s = interval_s
        self._action = action
        self._woken = asyncio.Event()
        self._is_closed = False
        self._is_failing = False
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin."""
        self._task = asyncio.ensure_future(self._run())

    def wake(self) -> None:
        """Make the next call now. Only on the loop's own thread."""
        self._woken.set()

    async def close(self) -> None:
        """End, and cut a call under way short. Idempotent."""
        self._is_closed = True
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])

    async def _run(self) -> None:
        while not self._is_closed:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._woken.wait(), self.interval_s)
            self._woken.clear()
            try:
                await self._action()
                self._is_failing = False
            except KvError as error:
                # Said once for each outage: a daemon that is away is no news with every beat.
                level = logging.DEBUG if self._is_failing else logging.WARNING
                self._is_failing = True
                _log.log(level, "heartbeat failed: %s", error, extra={"reason": error.reason.name})
            except Exception:  # noqa: BLE001 # border: task
                _log.exception("heartbeat failed")
