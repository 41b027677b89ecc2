"""The local lane for an event loop: one socket, any number of calls under way."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections import deque
from collections.abc import Callable
from typing import Any, Generic, TypeVar

from google.protobuf.message import Message

from kvclient._backends.lane_frames import (
    POSTED_LIMIT,
    RECEIVE_BYTES,
    STREAM_QUEUE_LIMIT,
    close_all,
    parsed,
    parsed_with,
    receive_with_descriptors,
    unreachable,
)
from kvservice.core.errors import (
    DeadlineError,
    KvError,
    LimitReachedError,
    MalformedError,
    PeerUnavailableError,
)
from kvservice.ports.methods import Method
from kvservice.transports.frames import Frame, FrameKind, FrameReader, decode_error, encode

Answer = TypeVar("Answer", bound=Message)

# Bound once: looking a member up in its enumeration costs a tenth of a call.
_REQUEST, _ERROR, _STREAM = FrameKind.REQUEST, FrameKind.ERROR, Method.STREAM
_MAP_SEGMENTS = Method.MAP_SEGMENTS

BACKLOG_LIMIT_BYTES = 64 << 20
"""Requests that the daemon has not taken yet: four frames of the largest size."""


class LaneStream(Generic[Answer]):
    """The answers of one call that is answered by many."""

    def __init__(self, connection: LaneConnection, call_id: int, response_type: type[Answer]) -> None:
        self._connection = connection
        self._call_id = call_id
        self._response_type = response_type
        self._queue: deque[Frame] = deque()
        self._arrived = asyncio.Event()
        self._end: KvError | None = None

    def arrived(self, frame: Frame) -> None:
        """Take a frame."""
        if len(self._queue) >= STREAM_QUEUE_LIMIT:
            self.ended(
                LimitReachedError("the reader of the stream fell behind; watch again from the last sequence")
            )
        elif frame.kind == _ERROR:
            self.ended(decode_error(frame.body))
        else:
            self._queue.append(frame)
            self._arrived.set()

    def ended(self, error: KvError) -> None:
        """Let the reader see what came before, then the error."""
        self._end = self._end or error
        self._arrived.set()

    async def next(self, timeout_s: float) -> Answer | None:
        """Return the next answer, or None when none came in time. Raises KvError at the end."""
        if not self._queue and self._end is None:
            self._arrived.clear()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._arrived.wait(), timeout_s)
        if self._queue:
            return parsed(self._response_type, self._queue.popleft().body)
        if self._end is not None:
            raise self._end
        return None

    async def close(self) -> None:
        """Take no more answers. Idempotent."""
        self._connection.forget_stream(self._call_id)


class BegunCall:
    """A request that was sent and whose answer is still to be taken, once."""

    def __init__(self, method: Method, future: asyncio.Future[Frame]) -> None:
        self._method = method
        self._future = future
        # An answer that nobody comes for is no error of anybody's.
        future.add_done_callback(lambda done: done.cancelled() or done.exception())

    async def finish(self, response_type: type[Answer], timeout_s: float) -> Answer:
        """Return the answer; raises as `LaneConnection.call`."""
        try:
            frame = await asyncio.wait_for(self._future, timeout_s)
        except TimeoutError:
            raise DeadlineError(f"{self._method.name}: no answer in time") from None
        if frame.kind == _ERROR:
            raise decode_error(frame.body)
        return parsed(response_type, frame.body)


class LaneConnection:
    """One connected Unix socket, of the loop that made it.

    `on_unasked(body)` takes StreamResponse messages, serialized. `is_open` turns
    False when the socket is lost; calls under way then fail with PeerUnavailableError.
    """

    def __init__(self, connected: socket.socket, on_unasked: Callable[[bytes], None]) -> None:
        """Take a connected, non-blocking socket over."""
        self._socket = connected
        self._on_unasked = on_unasked
        self._loop = asyncio.get_running_loop()
        self._reader = FrameReader()
        self._calls: dict[int, asyncio.Future[Frame]] = {}
        self._streams: dict[int, LaneStream[Any]] = {}
        self._descriptors: list[int] = []
        self._mapping_count = 0
        self._backlog = bytearray()
        self._posted_count = 0
        self._call_id = 0
        self._loss: KvError | None = None
        self.is_open = True
        self._loop.add_reader(connected.fileno(), self._on_readable)

    @classmethod
    async def open(cls, path: str, on_unasked: Callable[[bytes], None], timeout_s: float) -> LaneConnection:
        """Connect. Raises PeerUnavailableError when nobody listens at `path`."""
        connecting = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        try:
            loop = asyncio.get_running_loop()
            await asyncio.wait_for(loop.sock_connect(connecting, path), timeout_s)
        except (OSError, TimeoutError) as error:
            connecting.close()
            raise unreachable(path, error) from error
        except BaseException:
            connecting.close()
            raise
        return cls(connecting, on_unasked)

    async def listen(self, on_unasked: Callable[[bytes], None]) -> None:
        """The connection itself brings what is said unasked; here there is nothing to begin."""

    def bind(self, session_token: bytes) -> None:
        """The connection itself is the session: nothing to carry."""

    async def call(
        self, method: Method, request: Message, response_type: type[Answer], timeout_s: float
    ) -> Answer:
        """Send one request and return its answer.

        Raises:
            DeadlineError: no answer within `timeout_s`; the call may have taken effect.
            PeerUnavailableError: the connection was lost before the answer.
            KvError: what the daemon answered.
        """
        frame = await self._exchange(method, request, timeout_s)
        return parsed(response_type, frame.body)

    async def map_segments(
        self, request: Message, response_type: type[Answer], timeout_s: float
    ) -> tuple[Answer, list[int]]:
        """Like `call`, with the descriptors that came along; the caller owns them.

        One at a time: descriptors do not say which answer they belong to.
        """
        if self._mapping_count:
            raise LimitReachedError("MAP_SEGMENTS is under way already; wait for it")
        self._mapping_count += 1
        try:
            frame = await self._exchange(Method.MAP_SEGMENTS, request, timeout_s)
            descriptors, self._descriptors = self._descriptors, []
        finally:
            self._mapping_count -= 1
            close_all(self._descriptors)
            self._descriptors = []
        return parsed_with(descriptors, response_type, frame.body), descriptors

    async def post(self, method: Method, request: Message, response_type: type[Answer]) -> None:
        """Send a request whose answer nobody waits for. Raises PeerUnavailableError."""
        self._posted_count += 1
        if self._posted_count >= POSTED_LIMIT:
            # Lets the loop read the answers that wait in the socket.
            await asyncio.sleep(0)
            self._posted_count = 0
        self._send(method, request.SerializeToString(), 0.0)

    async def begin(self, method: Method, request: Message) -> BegunCall:
        """Send a request whose answer is taken later. Raises PeerUnavailableError."""
        call_id = self._send(method, request.SerializeToString(), 0.0)
        future: asyncio.Future[Frame] = self._loop.create_future()
        self._calls[call_id] = future
        return BegunCall(method, future)

    def stream(self, method: Method, request: Message, response_type: type[Answer]) -> LaneStream[Answer]:
        """Open a call that is answered by many messages."""
        call_id = self._send(method, request.SerializeToString(), 0.0)
        stream = LaneStream(self, call_id, response_type)
        self._streams[call_id] = stream
        return stream

    def forget_stream(self, call_id: int) -> None:
        """Drop what still comes for a stream."""
        self._streams.pop(call_id, None)

    async def close(self) -> None:
        """Close the socket; calls under way fail. Idempotent."""
        self._lose(PeerUnavailableError("the client was closed"))

    async def _exchange(self, method: Method, request: Message, timeout_s: float) -> Frame:
        call_id = self._send(method, request.SerializeToString(), timeout_s)
        future: asyncio.Future[Frame] = self._loop.create_future()
        self._calls[call_id] = future
        # A timer of our own costs a fifth of asyncio.timeout.
        timer = self._loop.call_later(timeout_s, self._expire, call_id, method)
        try:
            frame = await future
        finally:
            timer.cancel()
            self._calls.pop(call_id, None)
        if frame.kind == _ERROR:
            raise decode_error(frame.body)
        return frame

    def _expire(self, call_id: int, method: Method) -> None:
        future = self._calls.pop(call_id, None)
        if future is not None and not future.done():
            future.set_exception(
                DeadlineError(f"{method.name}: no answer in time; the call may have taken effect")
            )

    def _send(self, method: Method, body: bytes, timeout_s: float) -> int:
        if not self.is_open:
            raise PeerUnavailableError(f"{method.name}: the connection to the daemon is closed")
        if len(self._backlog) > BACKLOG_LIMIT_BYTES:
            raise LimitReachedError(f"{method.name}: the daemon takes no more requests; send fewer at once")
        self._call_id = call_id = self._call_id + 1
        frame = encode(_REQUEST, method, call_id, int(timeout_s * 1000), body)
        if self._backlog:
            self._backlog += frame
            return call_id
        try:
            sent_bytes = self._socket.send(frame)
        except BlockingIOError:
            sent_bytes = 0
        except OSError as error:
            # The daemon may have said why before it hung up.
            self._on_readable()
            raise self._lose(_lost(method.name, error)) from error
        if sent_bytes < len(frame):
            self._backlog += frame[sent_bytes:]
            self._loop.add_writer(self._socket.fileno(), self._on_writable)
        return call_id

    def _on_writable(self) -> None:
        try:
            sent_bytes = self._socket.send(self._backlog)
        except BlockingIOError:
            return
        except OSError as error:
            self._lose(_lost("send", error))
            return
        del self._backlog[:sent_bytes]
        if not self._backlog:
            self._loop.remove_writer(self._socket.fileno())

    def _on_readable(self) -> None:
        try:
            if self._mapping_count:
                received = receive_with_descriptors(self._socket, self._descriptors)
            else:
                received = self._socket.recv(RECEIVE_BYTES)
            if not received:
                self._lose(_lost("receive", "closed by the daemon"))
                return
            arrived = self._reader.feed(received)
        except BlockingIOError:
            return
        except (OSError, MalformedError) as error:
            self._lose(_lost("receive", error))
            return
        for frame in arrived:
            self._dispatch(frame)

    def _dispatch(self, frame: Frame) -> None:
        future = self._calls.pop(frame.call_id, None)
        if future is not None:
            if not future.done():
                future.set_result(frame)
            return
        stream = self._streams.get(frame.call_id)
        if stream is not None:
            stream.arrived(frame)
        elif frame.method == _STREAM:
            self._on_unasked(frame.body)
        elif frame.call_id == 0 and frame.kind == _ERROR:
            # Said before hanging up: why we are not welcome.
            self._lose(decode_error(frame.body))
        elif frame.method == _MAP_SEGMENTS:
            # For a call that gave up; what came along is not for the one that waits now.
            close_all(self._descriptors)
            self._descriptors = []

    def _lose(self, error: KvError) -> KvError:
        """Close for good; return why, which is what was said first."""
        if self.is_open:
            self.is_open = False
            self._loss = error
            self._loop.remove_reader(self._socket.fileno())
            self._loop.remove_writer(self._socket.fileno())
            self._socket.close()
            for future in self._calls.values():
                if not future.done():
                    future.set_exception(type(error)(error.message, retry_after_ms=error.retry_after_ms))
            self._calls.clear()
            for stream in self._streams.values():
                stream.ended(error)
            close_all(self._descriptors)
            self._descriptors = []
        return self._loss or error


def _lost(what: str, why: object) -> PeerUnavailableError:
    return PeerUnavailableError(f"{what}: the connection to the daemon was lost: {why}")
