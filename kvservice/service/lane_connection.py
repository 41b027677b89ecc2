"""One connection of the local lane: frames in, frames and descriptors out."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from collections import deque
from typing import TYPE_CHECKING, TypeVar

from google.protobuf.message import DecodeError, Message

from kvproto.kv.v1 import event_service_pb2, local_lane_pb2, session_service_pb2
from kvservice.core.errors import (
    InvalidFieldError,
    KvError,
    MalformedError,
    SessionUnknownError,
    StaleIncarnationError,
    UnknownMethodError,
)
from kvservice.core.state import KvState
from kvservice.ports.methods import Method
from kvservice.service.dispatcher import Caller
from kvservice.service.local_process import LocalProcess
from kvservice.transports.frames import Frame, FrameKind, FrameReader, encode, encode_error

if TYPE_CHECKING:
    from kvservice.service.lane_server import LaneServer

_M = TypeVar("_M", bound=Message)

_log = logging.getLogger(__name__)

RECEIVE_BYTES = 256 << 10
"""One receive takes a lookup of 4,096 keys whole."""

# All connections are read on the event loop, one after the other, so one buffer serves
# them all; a fresh one of this size for each receive costs more than the receive.
_received = bytearray(RECEIVE_BYTES)
_received_view = memoryview(_received)

MAX_UNSENT_BYTES = 64 << 20
"""A client that does not read what it asked for is cut off here."""

MAX_MAPPED_PER_CALL = 64
"""Two descriptors each, within the 253 that one message may carry."""

_NEEDS_NO_SESSION = frozenset({Method.ATTACH, Method.DETACH, Method.LIST_TIERS, Method.GET_CAPABILITIES})


class LaneConnection:
    """Reads frames as they come and answers each at once, in order."""

    def __init__(
        self,
        server: LaneServer,
        connection: socket.socket,
        process: LocalProcess,
        caller: Caller,
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        self.process = process
        self.caller = caller
        self._server = server
        self._socket = connection
        self._loop = loop
        self._reader = FrameReader()
        self._unsent: deque[tuple[memoryview, list[int]]] = deque()
        self._unsent_bytes = 0
        self._watchers: set[asyncio.Task[None]] = set()
        self._is_open = True
        self._is_heard = True
        self._is_session_unused = False
        loop.add_reader(connection.fileno(), self._readable)

    def push(self, packed: bytes, descriptors: list[int] | None = None) -> None:
        """Send a frame, with descriptors beside its first byte; never blocks."""
        if not (self._is_open and self._is_heard):
            return
        if not self._unsent:
            sent = self._send(packed, descriptors or [])
            if sent == len(packed):
                return
            if sent < 0:
                return
            descriptors = descriptors if sent == 0 else None
            packed = packed[sent:]
            self._loop.add_writer(self._socket.fileno(), self._writable)
        self._unsent.append((memoryview(packed), descriptors or []))
        self._unsent_bytes += len(packed)
        if self._unsent_bytes > MAX_UNSENT_BYTES:
            _log.warning("a client on the local lane does not read", extra={"pid": self.process.pid})
            self.close()

    def close(self) -> None:
        """Close the connection; idempotent."""
        if not self._is_open:
            return
        self._is_open = False
        self._loop.remove_reader(self._socket.fileno())
        self._loop.remove_writer(self._socket.fileno())
        self._socket.close()
        os.close(self.process.pidfd)
        for watcher in self._watchers:
            watcher.cancel()
        self._server.connection_closed(self)
        if self._is_session_unused:
            # Who attached may have given up before the answer came. Nobody would use or end
            # the session, and whatever its engine loses would wait for its word.
            self._server.drop_session(self.caller.token)

    def _readable(self) -> None:
        try:
            count = self._socket.recv_into(_received)
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            self.close()
            return
        if not count:
            self.close()
            return
        try:
            frames = self._reader.feed(bytes(_received_view[:count]))
        except MalformedError as error:
            self.push(encode(FrameKind.ERROR, 0, 0, 0, encode_error(error)))
            self.close()
            return
        for frame in frames:
            if not self._is_open:
                return
            self._answer(frame)

    def _answer(self, frame: Frame) -> None:
        try:
            self._handle(frame)
        except KvError as error:
            packed = encode_error(error)
            self.push(encode(FrameKind.ERROR, frame.method, frame.call_id, 0, packed))
            if isinstance(error, MalformedError):
                self.close()
        except Exception:  # noqa: BLE001 # border: rpc
            _log.exception("a handler failed", extra={"method": frame.method})
            broken = KvError("the daemon failed to handle this call; its log says why")
            packed = encode_error(broken)
            self.push(encode(FrameKind.ERROR, frame.method, frame.call_id, 0, packed))

    def _handle(self, frame: Frame) -> None:
        """Run one request and send what it answers; raises KvError for a refusal."""
        if frame.kind is not FrameKind.REQUEST:
            raise MalformedError(f"a client sends requests, not {frame.kind.name} frames")
        self._is_session_unused = False
        if frame.method == Method.MAP_SEGMENTS:
            self._map_segments(frame)
            return
        if frame.method == Method.WATCH_EVENTS:
            self._watch(frame)
            return
        if not self.caller.token and frame.method not in _NEEDS_NO_SESSION:
            if frame.method not in self._server.dispatcher.operations:
                raise UnknownMethodError(f"method {frame.method} does not exist on this edge")
            raise SessionUnknownError("no session on this connection yet; call Attach first")
        body = self._server.dispatcher.call_packed(frame.method, frame.body, self.caller)
        if frame.method == Method.ATTACH:
            self._attached(body)
        self.push(encode(FrameKind.RESPONSE, frame.method, frame.call_id, 0, body))
        if frame.method == Method.DETACH:
            self._server.session_ended(self.caller.token)
            self.caller = Caller(self.caller.tenant, b"", is_local=True)

    def _attached(self, body: bytes) -> None:
        attached = session_service_pb2.AttachResponse.FromString(body)
        self.caller = Caller(self.caller.tenant, attached.session_token, is_local=True)
        self._is_session_unused = not attached.resumed
        self._server.session_attached(self, attached.session_token)

    def _map_segments(self, frame: Frame) -> None:
        """Hand over the memory of segments that are lent to the caller's tenant."""
        request = _parse(local_lane_pb2.MapSegmentsRequest(), frame.body)
        tenant = self.caller.tenant
        if not self.caller.token:
            raise SessionUnknownError("no session on this connection yet; call Attach first")
        lent = self._server.coordinator.look(
            lambda state, _: sorted(_segments_of(state, tenant)),
        )
        wanted = list(request.segments) or lent[:MAX_MAPPED_PER_CALL]
        if len(wanted) > MAX_MAPPED_PER_CALL:
            raise InvalidFieldError(
                f"segments has {len(wanted)} entries; at most {MAX_MAPPED_PER_CALL} in one call"
            )
        foreign = sorted(set(wanted) - set(lent))
        if foreign:
            raise StaleIncarnationError(
                f"segments {foreign} are not lent to tenant {tenant!r}; look the blocks up again"
            )
        arena = self._server.arena
        segments = [arena.segment(number) for number in wanted]
        response = local_lane_pb2.MapSegmentsResponse(
            segments=wanted,
            sizes_bytes=[segment.size_bytes for segment in segments],
            generations_bytes=[segment.generations_bytes for segment in segments],
            lent_segments=lent,
        )
        descriptors = [fd for segment in segments for fd in (segment.fd, segment.generations_fd)]
        if request.directory:
            directory = arena.directory(tenant)
            response.directory_rows_count = directory.rows_count
            descriptors.append(directory.fd)
        body = response.SerializeToString()
        self.push(encode(FrameKind.RESPONSE, frame.method, frame.call_id, 0, body), descriptors)

    def _watch(self, frame: Frame) -> None:
        """Answer with STREAM frames until the client goes or the feed fails."""
        if not self.caller.token:
            raise SessionUnknownError("no session on this connection yet; call Attach first")
        request = _parse(event_service_pb2.WatchEventsRequest(), frame.body)
        watcher = self._loop.create_task(self._follow(frame, request))
        self._watchers.add(watcher)
        watcher.add_done_callback(self._watchers.discard)

    async def _follow(self, frame: Frame, request: event_service_pb2.WatchEventsRequest) -> None:
        try:
            async for response in self._server.feed.follow(self.caller.tenant, request):
                body = response.SerializeToString()
                self.push(encode(FrameKind.STREAM, frame.method, frame.call_id, 0, body))
        except KvError as error:
            body = encode_error(error)
            self.push(encode(FrameKind.ERROR, frame.method, frame.call_id, 0, body))

    def _send(self, packed: bytes | memoryview, descriptors: list[int]) -> int:
        """Return the bytes that went; -1 when nobody is there to hear them.

        What the peer said before it hung up still counts, a good-bye above all: that is
        read on, until the end of it closes the connection.
        """
        try:
            if descriptors:
                return socket.send_fds(self._socket, [packed], descriptors)
            return self._socket.send(packed)
        except (BlockingIOError, InterruptedError):
            return 0
        except OSError:
            self._is_heard = False
            self._unsent.clear()
            self._unsent_bytes = 0
            self._loop.remove_writer(self._socket.fileno())
            return -1

    def _writable(self) -> None:
        while self._unsent:
            packed, descriptors = self._unsent[0]
            sent = self._send(packed, descriptors)
            if sent < 0:
                return
            self._unsent_bytes -= sent
            if sent < len(packed):
                self._unsent[0] = (packed[sent:], descriptors if sent == 0 else [])
                return
            self._unsent.popleft()
        self._loop.remove_writer(self._socket.fileno())


def _segments_of(state: KvState, tenant: str) -> list[int]:
    return [number for number, pool in state.books.lent.items() if pool.tenant == tenant]


def _parse(message: _M, body: bytes) -> _M:
    try:
        message.ParseFromString(body)
    except DecodeError as error:
        raise MalformedError(f"{len(body)} bytes are no {message.DESCRIPTOR.name}: {error}") from error
    return message
