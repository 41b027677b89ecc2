"""The gRPC edge: the same operations as the local lane, framed by gRPC.

Handlers are made from the dispatcher's table, so that an RPC exists on both
edges or on none. The session comes as metadata `kv-session-bin`, the tenant from
`authorization: Bearer ...`.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, TypeVar

import grpc
import grpc.aio
from google.protobuf.message import DecodeError, Message
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from kvproto.kv.v1 import event_service_pb2, session_service_pb2
from kvservice.core.errors import KvError, MalformedError, SessionUnknownError
from kvservice.core.records import Notice
from kvservice.ports.methods import Method
from kvservice.service.credentials import Credentials
from kvservice.service.dispatcher import Caller, Dispatcher, Operation
from kvservice.service.event_feed import EventFeed
from kvservice.service.handoff_mapping import notice_message
from kvservice.transports.frames import MAX_FRAME_BYTES, encode_error
from kvservice.transports.status_codes import STATUS_BY_REASON

_M = TypeVar("_M", bound=Message)

_log = logging.getLogger(__name__)

SESSION_METADATA = "kv-session-bin"
STATUS_METADATA = "grpc-status-details-bin"
PACKAGE = "kv.v1"
STREAM_QUEUE_LIMIT = 1024
"""Unasked notices that wait for one slow stream; its next beat repeats them all."""

MAX_CALLS_PER_CONNECTION = 1024
"""Calls at a time. One that a peer only begins costs 13 KiB, and a peer may begin any number."""

WATCH_INTERVAL_S = 0.5
"""How often to look whether gRPC still serves: well within the patience of a client's call."""

_CODES = {code.value[0]: code for code in grpc.StatusCode}


class GrpcServer:
    """Serves every operation, health and reflection on one port."""

    def __init__(self, *, dispatcher: Dispatcher, credentials: Credentials, feed: EventFeed) -> None:
        self._dispatcher = dispatcher
        self._credentials = credentials
        self._feed = feed
        self._streams: dict[bytes, asyncio.Queue[Message | None]] = {}
        self._health = health.aio.HealthServicer()
        self._server = self._make_server()
        self._watcher: asyncio.Task[None] | None = None
        self.restarts_count = 0

    async def start(self, address: str) -> int:
        """Listen at "host:port" and return the port.

        Raises:
            OSError: the address cannot be had.
        """
        _check_free(address)
        port = await self._listen(address)
        await self._health.set("", health_pb2.HealthCheckResponse.SERVING)
        self._watcher = asyncio.create_task(self._watch_over(f"{address.rpartition(':')[0]}:{port}"))
        return port

    async def announce_drain(self) -> None:
        """Answer NOT_SERVING from now on, and tell every stream."""
        await self._health.enter_graceful_shutdown()
        for queue in self._streams.values():
            _offer(queue, session_service_pb2.StreamResponse(draining=True))

    async def stop(self, grace_s: float) -> None:
        """Stop; calls in flight have `grace_s` to end."""
        if self._watcher is not None:
            self._watcher.cancel()
            await asyncio.wait([self._watcher])
        await self._server.stop(grace_s)

    def revoke(self, token: bytes, capability_id: int) -> None:
        """Tell a session that has a stream; others learn with their next beat."""
        queue = self._streams.get(token)
        if queue is not None:
            _offer(queue, session_service_pb2.StreamResponse(revoked_ids=[capability_id]))

    def notify(self, token: bytes, notice: Notice) -> None:
        """Tell a session that has a stream what became of a handoff; others learn with their next beat."""
        queue = self._streams.get(token)
        if queue is not None:
            _offer(queue, session_service_pb2.StreamResponse(notices=[notice_message(notice)]))

    def session_ended(self, token: bytes) -> None:
        """End the stream of a session that is no more."""
        queue = self._streams.get(token)
        if queue is None:
            return
        if queue.full():
            queue.get_nowait()
        queue.put_nowait(None)

    async def _listen(self, address: str) -> int:
        try:
            port = self._server.add_insecure_port(address)
        except RuntimeError as error:
            raise OSError(f"{address}: {error}") from error
        await self._server.start()
        return int(port)

    async def _watch_over(self, address: str) -> None:
        """Serve anew whenever gRPC has given up by itself, until cancelled.

        Its loop over all requests ends for good when one of them has a path that is no
        UTF-8, which anybody may send.
        """
        while True:
            try:
                while await self._server.wait_for_termination(WATCH_INTERVAL_S):
                    pass
            except Exception:  # noqa: BLE001 # border: rpc
                _log.exception("gRPC ended by itself; it is started anew")
            self.restarts_count += 1
            try:
                await self._server.stop(None)
            except Exception:  # noqa: BLE001 # border: rpc
                # What it ended by is raised once more where the stop comes before its own.
                await self._server.stop(None)
            await self._serve_anew(address)

    async def _serve_anew(self, address: str) -> None:
        while True:
            self._server = self._make_server()
            try:
                await self._listen(address)
            except OSError:
                _log.exception("gRPC cannot be started anew; it is tried again")
                await asyncio.sleep(WATCH_INTERVAL_S)
            else:
                return

    def _make_server(self) -> grpc.aio.Server:
        server = grpc.aio.server(
            options=[
                ("grpc.max_receive_message_length", MAX_FRAME_BYTES),
                ("grpc.max_send_message_length", MAX_FRAME_BYTES),
                ("grpc.max_concurrent_streams", MAX_CALLS_PER_CONNECTION),
                ("grpc.so_reuseport", 0),
            ]
        )
        self._add_handlers(server)
        return server

    def _add_handlers(self, server: grpc.aio.Server) -> None:
        services: dict[str, dict[str, Any]] = {}
        for method, operation in self._dispatcher.operations.items():
            handler: Any = grpc.unary_unary_rpc_method_handler(
                self._unary(method, operation),
            )
            services.setdefault(operation.service, {})[operation.rpc] = handler
        services["SessionService"]["Stream"] = grpc.stream_stream_rpc_method_handler(
            self._stream,
            response_serializer=_serialize,
        )
        services["EventService"] = {
            "WatchEvents": grpc.unary_stream_rpc_method_handler(
                self._watch,
                response_serializer=_serialize,
            )
        }
        names = [f"{PACKAGE}.{service}" for service in services]
        for service, methods in services.items():
            generic = grpc.method_handlers_generic_handler(f"{PACKAGE}.{service}", methods)
            server.add_generic_rpc_handlers((generic,))
        health_pb2_grpc.add_HealthServicer_to_server(self._health, server)
        names += [health.SERVICE_NAME, reflection.SERVICE_NAME]
        reflection.enable_server_reflection(names, server)

    def _caller(self, context: Any) -> Caller:
        metadata = dict(context.invocation_metadata() or ())
        token = None
        authorization = metadata.get("authorization")
        if authorization is not None:
            scheme, _, token = str(authorization).partition(" ")
            token = token if scheme.lower() == "bearer" else ""
        tenant = self._credentials.tenant_of_token(token)
        return Caller(tenant, bytes(metadata.get(SESSION_METADATA, b"")), is_local=False)

    def _unary(self, method: Method, operation: Operation) -> Callable[[Any, Any], Awaitable[bytes]]:
        # Bytes in and out: a message that gRPC itself fails to parse would end without a reason.
        async def handle(request: bytes, context: Any) -> bytes:
            try:
                caller = self._caller(context)
                self._dispatcher.check_tenant(caller)
                return self._dispatcher.call_packed(method, request, caller)
            except KvError as error:
                await _fail(context, error)
                raise
            except Exception:  # border: rpc
                _log.exception("a handler failed", extra={"rpc": operation.rpc})
                await _fail(context, KvError("the daemon failed to handle this call; see its log"))
                raise

        return handle

    async def _stream(self, requests: AsyncIterator[bytes], context: Any) -> None:
        try:
            caller = self._caller(context)
            self._dispatcher.check_session(caller)
        except KvError as error:
            await _fail(context, error)
            return
        queue: asyncio.Queue[Message | None] = asyncio.Queue(STREAM_QUEUE_LIMIT)
        self._streams[caller.token] = queue
        sender = asyncio.create_task(_send_from(queue, context))
        reader = asyncio.create_task(self._take_beats(requests, caller, queue))
        try:
            # The sender ends only when the session does.
            await asyncio.wait((reader, sender), return_when=asyncio.FIRST_COMPLETED)
            for ended in (reader, sender):
                if ended.done():
                    ended.result()
        except KvError as error:
            await _fail(context, error)
        finally:
            sender.cancel()
            reader.cancel()
            if self._streams.get(caller.token) is queue:
                del self._streams[caller.token]

    async def _take_beats(self, requests: AsyncIterator[bytes], caller: Caller, queue: Any) -> None:
        async for body in requests:
            request = _parsed(session_service_pb2.StreamRequest, body)
            beat = self._dispatcher.beat(request.heartbeat, caller)
            await queue.put(session_service_pb2.StreamResponse(heartbeat=beat))

    async def _watch(self, body: bytes, context: Any) -> AsyncIterator[Message]:
        try:
            request = _parsed(event_service_pb2.WatchEventsRequest, body)
            caller = self._caller(context)
            self._dispatcher.check_session(caller)
            async for response in self._feed.follow(caller.tenant, request):
                yield response
        except KvError as error:
            await _fail(context, error)


def _parsed(request_type: type[_M], body: bytes) -> _M:
    try:
        return request_type.FromString(body)
    except DecodeError as error:
        raise MalformedError(f"{len(body)} bytes are no {request_type.DESCRIPTOR.name}: {error}") from error


def _serialize(message: Message) -> bytes:
    packed: bytes = message.SerializeToString()
    return packed


def _offer(queue: asyncio.Queue[Message | None], notice: Message) -> None:
    if not queue.full():
        queue.put_nowait(notice)


async def _send_from(queue: asyncio.Queue[Message | None], context: Any) -> None:
    while (message := await queue.get()) is not None:
        await context.write(message)
    raise SessionUnknownError("the session has ended; attach again")


def _check_free(address: str) -> None:
    """Raise OSError where an address is in use: gRPC would say so on stderr in words of its own."""
    host, _, port = address.rpartition(":")
    for family, kind, protocol, _, place in socket.getaddrinfo(
        host.strip("[]"), int(port), type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    ):
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(place)
            except OSError as error:
                raise OSError(error.errno, error.strerror, address) from error


async def _fail(context: Any, error: KvError) -> None:
    """End the call with the status of an error; raises to leave the handler."""
    code = _CODES[STATUS_BY_REASON[error.reason]]
    await context.abort(code, error.message, ((STATUS_METADATA, encode_error(error)),))
