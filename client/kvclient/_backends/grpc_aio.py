"""A gRPC connection for an event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, Generic, TypeVar

import grpc
import grpc.aio
from google.protobuf.message import Message

from kvclient._backends import grpc_calls
from kvclient.config import ClientSettings
from kvservice.core.errors import KvError, PeerUnavailableError, UnknownMethodError
from kvservice.ports.methods import Method

Answer = TypeVar("Answer", bound=Message)

POSTED_LIMIT = 64
"""Posted calls under way at once; further ones wait for the oldest."""


class GrpcStream(Generic[Answer]):
    """The answers of one streaming call."""

    def __init__(self, call: Any, method: Method) -> None:
        self._call = call
        self._method = method
        self._reading: asyncio.Task[Any] | None = None

    async def next(self, timeout_s: float) -> Answer | None:
        """Return the next answer, or None when none came in time. Raises KvError at the end."""
        if self._reading is None:
            self._reading = asyncio.ensure_future(self._read())
        # The read outlives the wait: cancelling a read would cancel the whole call.
        done, _ = await asyncio.wait([self._reading], timeout=timeout_s)
        if not done:
            return None
        reading, self._reading = self._reading, None
        if reading.cancelled():
            raise PeerUnavailableError(f"{self._method.name}: the connection was closed under the stream")
        answer: Answer = reading.result()
        return answer

    async def _read(self) -> Any:
        try:
            answer = await self._call.read()
        except grpc.RpcError as error:
            raise grpc_calls.error_of(error, self._method) from error
        if answer is grpc.aio.EOF:
            raise PeerUnavailableError(f"{self._method.name}: the daemon ended the stream")
        return answer

    async def close(self) -> None:
        """End the call. Idempotent."""
        self._call.cancel()
        if self._reading is not None:
            self._reading.cancel()
            await asyncio.wait([self._reading])
            self._reading = None


class GrpcConnection:
    """One channel. `is_open` turns False when the daemon could not be reached."""

    def __init__(self, settings: ClientSettings) -> None:
        self._settings = settings
        self._channel = grpc.aio.insecure_channel(settings.grpc_target, options=grpc_calls.CHANNEL_OPTIONS)
        self._metadata = grpc_calls.metadata(b"", settings.token)
        self._callables: dict[Method, Any] = {}
        self._posted: set[asyncio.Task[None]] = set()
        self._listening: asyncio.Task[None] | None = None
        self.is_open = True

    def bind(self, session_token: bytes) -> None:
        """Carry the session's token from now on."""
        self._metadata = grpc_calls.metadata(session_token, self._settings.token)

    async def call(
        self, method: Method, request: Message, response_type: type[Answer], timeout_s: float
    ) -> Answer:
        """Send one request and return its answer. Raises KvError subclasses."""
        callable_ = self._callables.get(method)
        if callable_ is None:
            callable_ = self._callables[method] = self._channel.unary_unary(
                grpc_calls.PATHS[method],
                request_serializer=grpc_calls.serialize,
                response_deserializer=response_type.FromString,
            )
        try:
            answer: Answer = await callable_(request, timeout=timeout_s, metadata=self._metadata)
        except grpc.RpcError as error:
            raised = grpc_calls.error_of(error, method)
            self.is_open = self.is_open and not grpc_calls.is_lost(raised)
            raise raised from error
        except asyncio.CancelledError:
            # A channel that closes cancels its calls, as if the tasks that wait for them had been.
            task = asyncio.current_task()
            if self.is_open or (task is not None and task.cancelling()):
                raise
            raise PeerUnavailableError(f"{method.name}: the connection was closed under the call") from None
        return answer

    async def post(self, method: Method, request: Message, response_type: type[Answer]) -> None:
        """Send a request whose answer nobody waits for."""
        while len(self._posted) >= POSTED_LIMIT:
            await asyncio.wait(self._posted, return_when=asyncio.FIRST_COMPLETED)
        task = asyncio.ensure_future(self._post(method, request, response_type))
        self._posted.add(task)
        task.add_done_callback(self._posted.discard)

    async def _post(self, method: Method, request: Message, response_type: type[Answer]) -> None:
        try:
            await self.call(method, request, response_type, self._settings.call_timeout_s)
        except KvError:
            # The daemon ends what we could not: by expiry, or with the session.
            return

    async def map_segments(
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

    async def listen(self, on_unasked: Callable[[bytes], None]) -> None:
        """Take what the daemon says unasked, as a task, until the connection ends. Idempotent.

        A stream that the daemon has ended is opened again.
        """
        if self.is_open and (self._listening is None or self._listening.done()):
            call: Any = self._channel.stream_stream(grpc_calls.STREAM_PATH)(metadata=self._metadata)
            self._listening = asyncio.ensure_future(_take_unasked(call, on_unasked))

    async def close(self) -> None:
        """Close the channel; calls under way fail. Idempotent."""
        self.is_open = False
        if self._listening is not None:
            self._listening.cancel()
            await asyncio.wait([self._listening])
        if self._posted:
            await asyncio.wait(self._posted, timeout=self._settings.call_timeout_s)
        await self._channel.close()


async def _take_unasked(call: Any, on_unasked: Callable[[bytes], None]) -> None:
    try:
        # Read one by one: an iteration would hold the call open with no way to end it.
        while (message := await call.read()) is not grpc.aio.EOF:
            on_unasked(message)
    except grpc.RpcError:
        return  # The session or the connection ended: the next beat says which, and asks for the same.
    finally:
        call.cancel()
