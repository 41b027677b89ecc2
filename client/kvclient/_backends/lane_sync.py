"""The local lane for blocking callers: one socket, one lock, no thread.

A call holds the lock from its request to its answer, so an answer is read by the one
who waits for it and nobody is woken. Frames of others that come first - answers to
posted requests, events, revocations - are dealt with on the way.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import struct
import threading
import time
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

_TIMEVAL = struct.Struct("ll")


class LaneStream(Generic[Answer]):
    """The answers of one call that is answered by many."""

    def __init__(self, connection: LaneConnection, call_id: int, response_type: type[Answer]) -> None:
        self._connection = connection
        self._call_id = call_id
        self._response_type = response_type
        self._queue: deque[Frame] = deque()
        # Another thread's call may read our frame: it tells the waiting poll through this.
        self._arrived = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._is_closed = False
        self._has_overflowed = False

    def arrived(self, frame: Frame) -> None:
        """Take a frame; called by whoever reads the socket, under its lock."""
        if self._is_closed:
            return
        if len(self._queue) >= STREAM_QUEUE_LIMIT:
            self._has_overflowed = True
        else:
            self._queue.append(frame)
        os.eventfd_write(self._arrived, 1)

    def next(self, timeout_s: float) -> Answer | None:
        """Return the next answer, or None when none came in time. Raises KvError at the end."""
        end_s = time.monotonic() + timeout_s
        while not self._queue:
            if self._has_overflowed:
                raise LimitReachedError(
                    "the reader of the stream fell behind; watch again from the last sequence"
                )
            remaining_s = end_s - time.monotonic()
            if remaining_s <= 0 or self._is_closed:
                return None
            self._connection.wait_readable(self._arrived, remaining_s)
        frame = self._queue.popleft()
        if frame.kind == _ERROR:
            raise decode_error(frame.body)
        return parsed(self._response_type, frame.body)

    def close(self) -> None:
        """Take no more answers. Idempotent."""
        if not self._is_closed:
            self._is_closed = True
            self._connection.forget_stream(self._call_id)
            os.close(self._arrived)


class BegunCall:
    """A request that was sent and whose answer is still to be taken, once."""

    def __init__(self, connection: LaneConnection, method: Method, call_id: int) -> None:
        self._connection = connection
        self._method = method
        self._call_id = call_id

    def finish(self, response_type: type[Answer], timeout_s: float) -> Answer:
        """Return the answer; raises as `LaneConnection.call`."""
        return self._connection.finish(self._method, self._call_id, response_type, timeout_s)


class LaneConnection:
    """One connected Unix socket. Thread-safe.

    `on_unasked(payload)` takes StreamResponse messages, serialized; it must not call
    back into the connection. `is_open` turns False when the socket is lost.
    """

    def __init__(self, path: str, on_unasked: Callable[[bytes], None], timeout_s: float) -> None:
        """Connect. Raises PeerUnavailableError when nobody listens at `path`."""
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._on_unasked = on_unasked
        self._lock = threading.Lock()
        self._reader = FrameReader()
        self._arrived: deque[Frame] = deque()
        self._call_id = 0
        self._posted_count = 0
        self._streams: dict[int, LaneStream[Any]] = {}
        self._begun: dict[int, Frame | None] = {}
        self._kernel_timeout_s = -1.0
        self._last_words: KvError | None = None
        self.is_open = True
        self._set_timeout(timeout_s)
        try:
            self._socket.connect(path)
        except OSError as error:
            self._socket.close()
            raise unreachable(path, error) from error

    def bind(self, session_token: bytes) -> None:
        """The connection itself is the session: nothing to carry."""

    def call(self, method: Method, request: Message, response_type: type[Answer], timeout_s: float) -> Answer:
        """Send one request and return its answer.

        Raises:
            DeadlineError: no answer within `timeout_s`; the call may have taken effect.
            PeerUnavailableError: the connection was lost before the answer.
            KvError: what the daemon answered.
        """
        frame, _ = self._exchange(method, request, timeout_s, takes_descriptors=False)
        return parsed(response_type, frame.body)

    def map_segments(
        self, request: Message, response_type: type[Answer], timeout_s: float
    ) -> tuple[Answer, list[int]]:
        """Like `call`, with the descriptors that came along; the caller owns them."""
        frame, descriptors = self._exchange(Method.MAP_SEGMENTS, request, timeout_s, takes_descriptors=True)
        return parsed_with(descriptors, response_type, frame.body), descriptors

    def post(self, method: Method, request: Message, response_type: type[Answer]) -> None:
        """Send a request whose answer nobody waits for. Raises PeerUnavailableError."""
        payload = request.SerializeToString()
        with self._lock:
            self._send(method, payload, 0.0)
            self._posted_count += 1
            if self._posted_count >= POSTED_LIMIT:
                self._read_available()

    def begin(self, method: Method, request: Message) -> BegunCall:
        """Send a request whose answer is taken later. Raises PeerUnavailableError."""
        payload = request.SerializeToString()
        with self._lock:
            call_id = self._send(method, payload, 0.0)
            self._begun[call_id] = None
        return BegunCall(self, method, call_id)

    def finish(self, method: Method, call_id: int, response_type: type[Answer], timeout_s: float) -> Answer:
        """Return the answer of a call that was begun. Raises as `call`."""
        end_s = time.monotonic() + timeout_s
        if not self._lock.acquire(timeout=timeout_s):
            raise DeadlineError(f"{method.name}: another call held the connection for {timeout_s} s")
        try:
            frame = self._begun.pop(call_id, None)
            if frame is None:
                frame = self._await(call_id, method, end_s, None)
        finally:
            self._lock.release()
        if frame.kind == FrameKind.ERROR:
            raise decode_error(frame.body)
        return parsed(response_type, frame.body)

    def stream(self, method: Method, request: Message, response_type: type[Answer]) -> LaneStream[Answer]:
        """Open a call that is answered by many messages."""
        with self._lock:
            call_id = self._send(method, request.SerializeToString(), 0.0)
            stream = LaneStream(self, call_id, response_type)
            self._streams[call_id] = stream
        return stream

    def forget_stream(self, call_id: int) -> None:
        """Drop what still comes for a stream."""
        self._streams.pop(call_id, None)

    def wait_readable(self, arrived: int, timeout_s: float) -> None:
        """Wait, without the lock, until frames or word of another reader come; then read."""
        poll = select.poll()
        poll.register(self._socket, select.POLLIN)
        poll.register(arrived, select.POLLIN)
        ready = {descriptor for descriptor, _ in poll.poll(timeout_s * 1000)}
        if arrived in ready:
            os.eventfd_read(arrived)
        elif ready and self._lock.acquire(timeout=timeout_s):
            try:
                self._read_available()
            finally:
                self._lock.release()
        if not self.is_open:
            raise PeerUnavailableError(
                "the connection to the daemon was lost; watch again from the last sequence"
            )

    def listen(self, on_unasked: Callable[[bytes], None]) -> None:
        """The connection itself brings what is said unasked; here there is nothing to begin."""

    def hear(self, timeout_s: float) -> None:
        """Deal with what was said unasked; waits at most so long for something to come. Never raises."""
        if not self.is_open:
            return
        if timeout_s > 0:
            poll = select.poll()
            try:
                poll.register(self._socket, select.POLLIN)
            except ValueError:
                return  # Another thread closed it just now.
            poll.poll(timeout_s * 1000)
        # Who holds the lock is reading, and deals with it in our place.
        if self._lock.acquire(blocking=False):
            try:
                if self.is_open:
                    self._read_available()
            except KvError:
                return  # The connection is lost, which the next call finds out and mends.
            finally:
                self._lock.release()

    def close(self) -> None:
        """Close the socket; a call under way in another thread fails. Idempotent."""
        if self.is_open:
            self.is_open = False
            with contextlib.suppress(OSError):
                # Wakes a thread that waits in recv; close alone would leave it there.
                self._socket.shutdown(socket.SHUT_RDWR)
        with self._lock:
            self._socket.close()

    def _exchange(
        self, method: Method, request: Message, timeout_s: float, *, takes_descriptors: bool
    ) -> tuple[Frame, list[int]]:
        payload = request.SerializeToString()
        end_s = time.monotonic() + timeout_s
        if not self._lock.acquire(timeout=timeout_s):
            raise DeadlineError(
                f"{method.name}: another call held the connection for {timeout_s} s; it was not sent"
            )
        descriptors: list[int] = []
        try:
            call_id = self._send(method, payload, timeout_s)
            frame = self._await(call_id, method, end_s, descriptors if takes_descriptors else None)
        except BaseException:
            close_all(descriptors)
            raise
        finally:
            self._lock.release()
        if frame.kind == _ERROR:
            close_all(descriptors)
            raise decode_error(frame.body)
        return frame, descriptors

    def _send(self, method: Method, payload: bytes, timeout_s: float) -> int:
        if not self.is_open:
            raise PeerUnavailableError(f"{method.name}: the connection to the daemon is closed")
        self._call_id = call_id = self._call_id + 1
        try:
            self._socket.sendall(encode(_REQUEST, method, call_id, int(timeout_s * 1000), payload))
        except OSError as error:
            # Part of the frame may be out, so the connection cannot go on.
            with contextlib.suppress(OSError, KvError):
                self._read_available()
            raise self._lost(method, error) from error
        return call_id

    def _await(self, call_id: int, method: Method, end_s: float, descriptors: list[int] | None) -> Frame:
        arrived = self._arrived
        while True:
            while arrived:
                frame = arrived.popleft()
                if frame.call_id == call_id:
                    return frame
                if frame.method == method == Method.MAP_SEGMENTS and descriptors:
                    # For a call that gave up; what came along is not for this one.
                    close_all(descriptors)
                    descriptors.clear()
                self._dispatch(frame)
            self._receive(method, end_s, descriptors)

    def _receive(self, method: Method, end_s: float, descriptors: list[int] | None) -> None:
        remaining_s = end_s - time.monotonic()
        if remaining_s <= 0:
            raise _late(method)
        # The kernel's own time-out spares a poll before each recv. It is set anew only where
        # it would be off by more than a hundredth: most calls come with the same time-out.
        if not remaining_s <= self._kernel_timeout_s <= remaining_s * 1.01 + 0.001:
            self._set_timeout(remaining_s)
        try:
            if descriptors is None:
                received = self._socket.recv(RECEIVE_BYTES)
            else:
                received = receive_with_descriptors(self._socket, descriptors)
        except BlockingIOError:
            raise _late(method) from None
        except OSError as error:
            raise self._lost(method, error) from error
        self._take(method, received)

    def _read_available(self) -> None:
        """Deal with what is there already; waits for nothing."""
        try:
            while self.is_open:
                self._take(_STREAM, self._socket.recv(RECEIVE_BYTES, socket.MSG_DONTWAIT))
        except BlockingIOError:
            pass
        except OSError as error:
            raise self._lost(_STREAM, error) from error
        while self._arrived:
            self._dispatch(self._arrived.popleft())

    def _take(self, method: Method, received: bytes) -> None:
        if not received:
            raise self._lost(method, None)
        try:
            self._arrived.extend(self._reader.feed(received))
        except MalformedError as error:
            raise self._lost(method, error) from error

    def _dispatch(self, frame: Frame) -> None:
        stream = self._streams.get(frame.call_id)
        if frame.call_id in self._begun:
            self._begun[frame.call_id] = frame
        elif stream is not None:
            stream.arrived(frame)
        elif frame.method == _STREAM:
            self._on_unasked(frame.body)
        elif frame.call_id == 0 and frame.kind == _ERROR:
            # Said before hanging up: why we are not welcome.
            self._last_words = decode_error(frame.body)
        else:
            # The answer to a posted request, or to a call that gave up.
            self._posted_count = max(0, self._posted_count - 1)

    def _set_timeout(self, timeout_s: float) -> None:
        self._kernel_timeout_s = timeout_s
        seconds = int(timeout_s)
        # Zero would mean "for ever".
        value = _TIMEVAL.pack(seconds, max(1, int((timeout_s - seconds) * 1e6)))
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, value)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, value)

    def _lost(self, method: Method, error: Exception | None) -> KvError:
        self.is_open = False
        while self._arrived:
            self._dispatch(self._arrived.popleft())
        if self._last_words is not None:
            return self._last_words
        why = "closed by the daemon" if error is None else str(error)
        return PeerUnavailableError(f"{method.name}: the connection to the daemon was lost: {why}")


def _late(method: Method) -> DeadlineError:
    return DeadlineError(f"{method.name}: no answer in time; the call may have taken effect")
