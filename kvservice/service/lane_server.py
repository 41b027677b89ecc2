"""The local lane: the Unix socket that hands over memory and carries calls.

A call here costs a tenth of a gRPC call, since it is one frame each way, handled
at once on the event loop without a task. The socket is the session's stream:
what is revoked is told on it unasked. A session outlives its connection for as
long as its process lives, which a pidfd tells.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
import socket
import stat
from pathlib import Path

from kvproto.kv.v1 import session_service_pb2
from kvservice.core.errors import TenantUnknownError
from kvservice.core.events import SessionEnded
from kvservice.core.records import Notice
from kvservice.engine.arena import Arena
from kvservice.engine.coordinator import Coordinator
from kvservice.ports.methods import Method
from kvservice.service.credentials import Credentials
from kvservice.service.dispatcher import Caller, Dispatcher
from kvservice.service.event_feed import EventFeed
from kvservice.service.handoff_mapping import notice_message
from kvservice.service.lane_connection import LaneConnection
from kvservice.service.local_process import peer_process
from kvservice.transports.frames import FrameKind, encode, encode_error

_log = logging.getLogger(__name__)

BACKLOG_COUNT = 128
SOCKET_MODE = 0o660
"""The owner and its group; who may connect is a matter of the folder and the group."""


class LaneServer:
    """Accepts connections on a Unix socket and knows which session is on which."""

    def __init__(
        self,
        *,
        dispatcher: Dispatcher,
        coordinator: Coordinator,
        arena: Arena,
        credentials: Credentials,
        feed: EventFeed,
    ) -> None:
        self.dispatcher = dispatcher
        self.coordinator = coordinator
        self.arena = arena
        self.feed = feed
        self._credentials = credentials
        self._loop = asyncio.get_running_loop()
        self._listener: socket.socket | None = None
        self._path = ""
        self._connections: set[LaneConnection] = set()
        self._by_token: dict[bytes, LaneConnection] = {}
        self._pidfds: dict[bytes, int] = {}

    def start(self, path: str) -> None:
        """Listen at `path`; a socket that nobody listens on any more is replaced.

        Raises:
            OSError: EADDRINUSE if somebody listens there.
        """
        Path(path).parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        _check_folder(Path(path).parent)
        _remove_dead_socket(path)
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        try:
            listener.bind(path)
            os.chmod(path, SOCKET_MODE)  # noqa: PTH101 - the listener's own path
            listener.listen(BACKLOG_COUNT)
        except OSError as error:
            listener.close()
            # Named, since the line that the operator reads is all there is.
            raise OSError(error.errno, error.strerror, path) from error
        self._listener, self._path = listener, path
        self._loop.add_reader(listener.fileno(), self._accept)

    def stop(self) -> None:
        """Stop listening and close every connection."""
        if self._listener is not None:
            self._loop.remove_reader(self._listener.fileno())
            self._listener.close()
            with contextlib.suppress(FileNotFoundError):
                Path(self._path).unlink()
            self._listener = None
        for connection in list(self._connections):
            connection.close()
        for token in list(self._pidfds):
            self.session_ended(token)

    def announce_drain(self) -> None:
        """Tell every session that the daemon is about to stop."""
        notice = session_service_pb2.StreamResponse(draining=True).SerializeToString()
        # A copy: a connection that turns out to be gone removes itself.
        for connection in list(self._by_token.values()):
            connection.push(encode(FrameKind.STREAM, Method.STREAM, 0, 0, notice))

    def revoke(self, token: bytes, capability_id: int) -> None:
        """Tell the session, if it is connected; else it learns with its next beat."""
        self._tell(token, session_service_pb2.StreamResponse(revoked_ids=[capability_id]))

    def notify(self, token: bytes, notice: Notice) -> None:
        """Tell the session what became of a handoff; one that is not connected learns with its next beat."""
        self._tell(token, session_service_pb2.StreamResponse(notices=[notice_message(notice)]))

    def session_ended(self, token: bytes) -> None:
        """Forget a session; its process is no longer watched for it."""
        self._by_token.pop(token, None)
        pidfd = self._pidfds.pop(token, None)
        if pidfd is not None:
            self._loop.remove_reader(pidfd)
            os.close(pidfd)

    def session_attached(self, connection: LaneConnection, token: bytes) -> None:
        """A session now speaks over this connection."""
        self._by_token[token] = connection
        if token in self._pidfds:
            return
        pidfd = os.dup(connection.process.pidfd)
        self._pidfds[token] = pidfd
        self._loop.add_reader(pidfd, self._end_session, token)

    def connection_closed(self, connection: LaneConnection) -> None:
        """A connection is gone; its session lives on with its process."""
        self._connections.discard(connection)
        token = connection.caller.token
        if self._by_token.get(token) is connection:
            del self._by_token[token]

    def drop_session(self, token: bytes) -> None:
        """End a session that its connection has left behind."""
        # Soon, since a connection also closes within an effect, under the coordinator's lock.
        self._loop.call_soon(self._end_session, token)

    def _tell(self, token: bytes, message: session_service_pb2.StreamResponse) -> None:
        connection = self._by_token.get(token)
        if connection is not None:
            connection.push(encode(FrameKind.STREAM, Method.STREAM, 0, 0, message.SerializeToString()))

    def _end_session(self, token: bytes) -> None:
        self.coordinator.submit(SessionEnded(token))
        self.session_ended(token)

    def _accept(self) -> None:
        if self._listener is None:
            return
        try:
            accepted, _ = self._listener.accept()
        except (BlockingIOError, ConnectionAbortedError):
            return
        except OSError:
            _log.exception("cannot accept a connection on the local lane")
            return
        accepted.setblocking(False)
        try:
            process = peer_process(accepted)
        except OSError:
            accepted.close()
            return
        try:
            tenant = self._credentials.tenant_of_uid(process.uid)
        except TenantUnknownError as error:
            with contextlib.suppress(OSError):
                accepted.send(encode(FrameKind.ERROR, 0, 0, 0, encode_error(error)))
            accepted.close()
            os.close(process.pidfd)
            return
        caller = Caller(tenant, b"", is_local=True)
        connection = LaneConnection(self, accepted, process, caller, self._loop)
        self._connections.add(connection)


def _check_folder(folder: Path) -> None:
    """Raise PermissionError where another user could put a socket of their own in our place."""
    status = folder.stat()
    is_ours = status.st_uid in {0, os.geteuid()}
    is_open = status.st_mode & stat.S_IWOTH and not status.st_mode & stat.S_ISVTX
    if not is_ours or is_open:
        raise PermissionError(
            errno.EACCES,
            "belongs to another user, or everybody may change it: name a folder of your own "
            "(server.socket_path)",
            str(folder),
        )


def _remove_dead_socket(path: str) -> None:
    """Remove a socket file that a daemon left behind when it was killed.

    Raises FileExistsError for anything else: a connect to a plain file is refused just
    like one to a dead socket, and a mistyped path must not cost anybody a file.
    """
    with contextlib.suppress(FileNotFoundError):
        if not stat.S_ISSOCK(os.lstat(path).st_mode):
            raise FileExistsError(errno.EEXIST, "is there and is no socket: name another path", path)
    probe = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        probe.connect(path)
    except FileNotFoundError:
        return
    except ConnectionRefusedError:
        Path(path).unlink()
    finally:
        probe.close()
