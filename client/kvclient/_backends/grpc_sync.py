"""A gRPC connection for blocking callers."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from typing import Any, Generic, TypeVar

import grpc
from google.protobuf.message import Message

from kvclient._backends import grpc_calls
from kvclient.config import ClientSettings
from kvservice.core.errors import KvError, PeerUnavailableError, UnknownMethodError
from kvservice.ports.methods import Method

Answer = TypeVar("Answer", bound=Message)

POSTED_LIMIT = 64
"""Posted calls under way at once; further ones are made and waited for instead."""

STREAM_QUEUE_LIMIT = 256
"""Messages of one stream that wait for their reader; then the daemon is held back."""


class GrpcStream(Generic[Answer]):
    """The answers of one streaming call.

    gRPC's blocking iterator knows no time-out, so a thread of this stream's own reads
    it; the thread ends with the call.
    """

    def __init__(self, call: Any, method: Method) -> None:
        self._call = call
        self._method = method
        self._queue: queue.Queue[Answer | KvError] = queue.Queue(STREAM_QUEUE_LIMIT)
        self._is_closed = threading.Event()
        self._thread = threading.Thread(target=self._read, name="kvclient-stream", daemon=True)
        self._thread.start()

    def next(self, timeout_s: float) -> Answer | None:
        """Return the next answer, or None when none came in time. Raises KvError at the end."""
        try:
            item = self._queue.get(timeout=timeout_s)
        except queue.Empty:
            return None
        if isinstance(item, KvError):
            raise item
        return item

    def close(self) -> None:
        """End the call. Idempotent."""
        self._is_closed.set()
        self._call.cancel()
        self._thread.join()

    def _read(self) -> None:
        try:
            for answer in self._call:
                self._put(answer)
            self._put(PeerUnavailableError(f"{self._method.name}: the daemon ended the stream"))
        except grpc.RpcError as error:
            self._put(grpc_calls.error_of(error, self._method))

    def _put(self, item: Any) -> None:
        while not self._is_closed.is_set():
            try:
                self._queue.put(item, timeout=0.1)
            except queue.Full:
                continue
            return


class GrpcConnection:
    """One channel. Thread-safe. `is_open` turns False when the daemon could not be reached."""

    def __init__(self, settings: ClientSettings) -> None:
        self._settings = settings
        self._channel = grpc.insecure_channel(settings.grpc_target, options=grpc_calls.CHANNEL_OPTIONS)
        self._metadata = grpc_calls.metadata(b"", settings.token)
        self._callables: dict[Method, Any] = {}
        self._posted_lock = threading.Condition()
        self._posted_count = 0
        self._listening_lock = threading.Lock()
        self._listening: tuple[Any, threading.Thread] | None = None
        self.is_open = True

    def bind(self, session_token: bytes) -> None:
        """Carry the session's token from now on."""
        self._metadata = grpc_calls.metadata(session_token, self._settings.token)

    def call(self, method: Method, request: Message, response_type: type[Answer], timeout_s: float) -> Answer:
        """Send one request and return its answer. Raises KvError subclasses."""
        callable_ = self._callable(method, response_type)
        try:
            answer: Answer = callable_(request, timeout=timeout_s, metadata=self._metadata)
        except grpc.RpcError as error:
            raised = grpc_calls.error_of(error, method)
            self.is_open = self.is_open and not grpc_calls.is_lost(raised)
            raise raised from error
        return answer

    def post(self, method: Method, request: Message, response_type: type[Answer]) -> None:
        """Send a request whose answer nobody waits for; the daemon ends what did not arrive."""
        with self._posted_lock:
            is_full = self._posted_count >= POSTED_LIMIT
            self._posted_count += not is_full
        if is_full:
            self.call(method, request, response_type, self._settings.call_timeout_s)
            return
        callable_ = self._callable(method, response_type)
        future = callable_.future(request, timeout=self._settings.call_timeout_s, metadata=self._metadata)
        future.add_done_callback(self._post_ended)

    def map_segments(
        self, request: Message, response_type: type[Answer], timeout_s: float
    ) -> tuple[Answer, list[int]]:
        """Descriptors cannot travel over gRPC."""
        raise UnknownMethodError("MAP_SEGMENTS goes over the local lane only")

    def stream(self, method: Method, request: Message, response_type: type[Answer]) -> GrpcStream[Answer]:
        """Open a call that is answered by many messages."""
        call = self._channel.unary_stream(
            grpc_calls.PATHS[method],
            request_serializer=grpc_calls.serialize,
            response_deserializer=response_type.FromString,
        )(request, metadata=self._metadata)
        return GrpcStream(call, method)

    def listen(self, on_unasked: Callable[[bytes], None]) -> None:
        """Take what the daemon says unasked, on a thread, until the connection ends. Idempotent.

        A stream that the daemon has ended is opened again.
        """
        with self._listening_lock:
            if not self.is_open or (self._listening is not None and self._listening[1].is_alive()):
                return
            silence: Any = grpc_calls.Silence()
            call: Any = self._channel.stream_stream(grpc_calls.STREAM_PATH)(silence, metadata=self._metadata)
            if not call.add_callback(silence.end):
                silence.end()  # The call has failed already, and calls nobody back.
            thread = threading.Thread(
                target=_take_unasked, args=(call, on_unasked), name="kvclient-notices", daemon=True
            )
            self._listening = (call, thread)
            thread.start()

    def close(self) -> None:
        """Close the channel; calls under way fail. Idempotent."""
        with self._listening_lock:
            self.is_open = False
            listening, self._listening = self._listening, None
        if listening is not None:
            call, thread = listening
            call.cancel()
            thread.join()
        end_s = time.monotonic() + self._settings.call_timeout_s
        with self._posted_lock:
            while self._posted_count and self._posted_lock.wait(max(0.0, end_s - time.monotonic())):
                pass
        self._channel.close()

    def _callable(self, method: Method, response_type: type[Answer]) -> Any:
        callable_ = self._callables.get(method)
        if callable_ is None:
            callable_ = self._callables[method] = self._channel.unary_unary(
                grpc_calls.PATHS[method],
                request_serializer=grpc_calls.serialize,
                response_deserializer=response_type.FromString,
            )
        return callable_

    def _post_ended(self, _future: object) -> None:
        with self._posted_lock:
            self._posted_count -= 1
            self._posted_lock.notify_all()


def _take_unasked(call: Any, on_unasked: Callable[[bytes], None]) -> None:
    try:
        for message in call:
            on_unasked(message)
    except grpc.RpcError:
        return  # The session or the connection ended: the next beat says which, and asks for the same.
