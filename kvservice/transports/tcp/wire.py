"""One connection: frames and raw payload, each wait bounded.

The socket blocks, with SO_RCVTIMEO and SO_SNDTIMEO as its bounds: unlike a
timeout of Python's, these let one system call (MSG_WAITALL) fill a whole chunk.
They bound a call and not the peer's silence: a call that moved a byte before its time
was up succeeds, and the next one begins a wait of its own. So the wait for bytes is
made of short calls, and that the peer takes bytes is held by TCP_USER_TIMEOUT, since
the buffers between the two ends take some long after the peer has stopped.
"""

from __future__ import annotations

import contextlib
import socket
import struct
import time

from kvservice.core.errors import DeadlineError, KvError, MalformedError, PeerUnavailableError
from kvservice.transports.frames import (
    HEADER_BYTES,
    Frame,
    FrameKind,
    decode_error,
    decode_header,
    encode,
)

SILENCE_TIMEOUT_S = 10.0
"""A peer that neither sends nor takes a byte for so long, or a quarter more, is given up."""

MAX_BODY_BYTES = 1 << 20
"""Largest message on this wire, some hundred thousand slots: what a stranger can make
a connection thread allocate."""

_SILENCE_PARTS_COUNT = 4
_MAX_VIEWS_COUNT = 1024  # IOV_MAX of Linux.
_TIMEVAL = struct.Struct("@ll")
_LAST_WORDS_S = 0.2
_MAX_PORT = 0xFFFF


class Wire:
    """A connected socket, and where in the protocol it stands.

    can_listen: the next byte from the peer begins a frame.
    can_speak: the next byte to the peer begins a frame.
    """

    def __init__(self, connection: socket.socket) -> None:
        connection.settimeout(None)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket = connection
        self._deadline_s = 0.0
        self._silence_s = SILENCE_TIMEOUT_S
        self._timeouts_ms = {socket.SO_RCVTIMEO: 0, socket.SO_SNDTIMEO: 0}
        self._untaken_ms = 0
        self.can_listen = True
        self.can_speak = True

    def arm(self, deadline_s: float, silence_s: float = SILENCE_TIMEOUT_S) -> None:
        """Bound what follows: by a moment of `time.monotonic`, and by how long the
        peer may be silent.
        """
        self._deadline_s = deadline_s
        self._silence_s = silence_s

    @property
    def is_reusable(self) -> bool:
        """Whether another call may begin: in step, and the peer has not hung up."""
        if not (self.can_listen and self.can_speak):
            return False
        try:
            self._socket.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except BlockingIOError:
            return True
        except OSError:
            return False
        return False  # It hung up, or speaks out of turn.

    def read_frame(self) -> Frame:
        """Return the next frame.

        Raises:
            MalformedError: what came is no frame, or too large for this wire.
            PeerUnavailableError, DeadlineError: the wire failed.
        """
        self.can_listen = False
        header = bytearray(HEADER_BYTES)
        self.receive([memoryview(header)])
        frame, body_bytes = decode_header(header)
        if body_bytes > MAX_BODY_BYTES:
            raise MalformedError(f"a message of {body_bytes} bytes; {MAX_BODY_BYTES} are allowed")
        if body_bytes:
            body = bytearray(body_bytes)
            self.receive([memoryview(body)])
            frame.body = bytes(body)
        self.can_listen = True
        return frame

    def send_frame(
        self, kind: FrameKind, method: int, call_id: int, body: bytes, deadline_ms: int = 0
    ) -> None:
        """Send one frame.

        Raises:
            PeerUnavailableError, DeadlineError: the wire failed.
        """
        self.can_speak = False
        self.send([memoryview(encode(kind, method, call_id, deadline_ms, body))])
        self.can_speak = True

    def send(self, views: list[memoryview]) -> None:
        """Send the views one after the other, all of them.

        Raises:
            PeerUnavailableError, DeadlineError: the wire failed.
        """
        self._bound_untaken()
        while views:
            self._bound(socket.SO_SNDTIMEO, self._silence_s)
            try:
                sent = self._socket.sendmsg(views[:_MAX_VIEWS_COUNT])
            except OSError as error:
                raise self._failure(error, "took") from error
            views = _after(views, sent)

    def receive(self, views: list[memoryview]) -> None:
        """Fill the views one after the other, all of them.

        Raises:
            PeerUnavailableError, DeadlineError: the wire failed.
        """
        heard_s = time.monotonic()
        while views:
            self._bound(socket.SO_RCVTIMEO, self._silence_s / _SILENCE_PARTS_COUNT)
            try:
                if len(views) == 1:
                    received = self._socket.recv_into(views[0], 0, socket.MSG_WAITALL)
                else:
                    received, _, _, _ = self._socket.recvmsg_into(
                        views[:_MAX_VIEWS_COUNT], 0, socket.MSG_WAITALL
                    )
            except OSError as error:
                is_early = time.monotonic() < min(heard_s + self._silence_s, self._deadline_s)
                if isinstance(error, BlockingIOError) and is_early:
                    continue
                raise self._failure(error, "sent") from error
            if received == 0:
                raise PeerUnavailableError("the peer closed the tcp connection")
            heard_s = time.monotonic()
            views = _after(views, received)

    def last_words(self, failure: KvError) -> KvError:
        """Return the error that the peer sent before it hung up, or `failure`."""
        if not self.can_listen:
            return failure
        self.arm(time.monotonic() + _LAST_WORDS_S)
        try:
            frame = self.read_frame()
        except KvError:
            return failure
        return decode_error(frame.body) if frame.kind is FrameKind.ERROR else failure

    def hang_up(self) -> None:
        """Make every wait of another thread on this wire fail now."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the socket; the caller is the only user left. Idempotent."""
        self.can_listen = self.can_speak = False
        with contextlib.suppress(OSError):
            # What was sent last is still delivered, and the peer told at once.
            self._socket.shutdown(socket.SHUT_WR)
        self._socket.close()

    def _bound(self, option: int, longest_s: float) -> None:
        """Give the next system call the time that is left, `longest_s` at most."""
        remaining_s = self._deadline_s - time.monotonic()
        if remaining_s <= 0:
            raise DeadlineError("the deadline of the transfer passed")
        # Rounded up: 0 would be no bound at all.
        timeout_ms = int(min(remaining_s, longest_s) * 1000) + 1
        if timeout_ms == self._timeouts_ms[option]:
            return
        self._timeouts_ms[option] = timeout_ms
        timeval = _TIMEVAL.pack(timeout_ms // 1000, timeout_ms % 1000 * 1000)
        self._set(socket.SOL_SOCKET, option, timeval)

    def _bound_untaken(self) -> None:
        """Have the connection end when the peer's buffer stays full for as long as it may be silent."""
        untaken_ms = int(self._silence_s * 1000) + 1
        if untaken_ms != self._untaken_ms:
            self._untaken_ms = untaken_ms
            self._set(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, untaken_ms)

    def _set(self, level: int, option: int, value: int | bytes) -> None:
        try:
            self._socket.setsockopt(level, option, value)
        except OSError as error:
            raise PeerUnavailableError("the tcp connection was closed") from error

    def _failure(self, error: OSError, verb: str) -> KvError:
        if not isinstance(error, BlockingIOError | TimeoutError):
            return PeerUnavailableError(f"the tcp connection was lost: {error}")
        if time.monotonic() >= self._deadline_s:
            return DeadlineError("the deadline of the transfer passed")
        return PeerUnavailableError(f"the peer {verb} nothing for {self._silence_s} s")


def split_address(address: str) -> tuple[str, int]:
    """Return host and port of "host:port" or "[host]:port".

    Raises:
        ValueError: it is neither.
    """
    host, colon, port = address.rpartition(":")
    if not colon or not port.isdecimal() or int(port) > _MAX_PORT:
        raise ValueError(f"{address!r} is no address: give host:port")
    return host.removeprefix("[").removesuffix("]"), int(port)


def _after(views: list[memoryview], moved: int) -> list[memoryview]:
    """Return what is left of the views after so many bytes."""
    for index, view in enumerate(views):
        if moved < len(view):
            return [view[moved:], *views[index + 1 :]]
        moved -= len(view)
    return []
