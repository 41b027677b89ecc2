"""The owner's end: serves the slots of a TransferAuthority.

A thread for each connection, since the work is copies that release the GIL. All
of a thread's waits are bounded: for a request by the idle time-out, within a
transfer by its deadline and by the peer's silence.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
import time

import numpy as np
from google.protobuf.message import DecodeError

from kvproto.kv.v1.local_lane_pb2 import TransferRequest, TransferResponse
from kvservice.core.errors import (
    BatchSizeError,
    DrainingError,
    InvariantError,
    KvError,
    LimitReachedError,
    MalformedError,
    UnknownMethodError,
)
from kvservice.core.slots import I64, U32
from kvservice.ports.methods import Method
from kvservice.ports.transport import Pieces, TransferAuthority
from kvservice.transports.frames import Frame, FrameKind, encode_error
from kvservice.transports.tcp.region import Region
from kvservice.transports.tcp.wire import SILENCE_TIMEOUT_S, Wire, split_address

MAX_CONNECTIONS_COUNT = 256
"""Threads at most; each pins about 100 KiB and a descriptor."""

IDLE_TIMEOUT_S = 300.0
"""A connection without a request for so long is closed; clients open another."""

MAX_TRANSFER_S = 120.0
"""Longest transfer, whatever deadline the client asks: it pins slots."""

DRAIN_S = 5.0
"""What `stop` grants to transfers that run."""

_BACKLOG_COUNT = 128
_ERROR_SEND_S = 1.0
_ACCEPT_RETRY_S = 0.1

log = logging.getLogger(__name__)


class TcpServer:
    """Listens on one address until stopped."""

    def __init__(
        self,
        listen_address: str,
        authority: TransferAuthority,
        *,
        max_connections_count: int = MAX_CONNECTIONS_COUNT,
        idle_timeout_s: float = IDLE_TIMEOUT_S,
        silence_timeout_s: float = SILENCE_TIMEOUT_S,
        max_transfer_s: float = MAX_TRANSFER_S,
    ) -> None:
        self._listen_address = listen_address
        self._authority = authority
        self._max_connections_count = max_connections_count
        self._idle_timeout_s = idle_timeout_s
        self._silence_timeout_s = silence_timeout_s
        self._max_transfer_s = max_transfer_s
        self._listener: socket.socket | None = None
        self._accepting: threading.Thread | None = None
        self._changed = threading.Condition()
        self._is_stopping = False
        self._failures_count = 0
        self._threads: dict[Wire, threading.Thread] = {}
        self._busy: set[Wire] = set()

    @property
    def connections_count(self) -> int:
        """Connections that are open now."""
        return len(self._threads)

    @property
    def failures_count(self) -> int:
        """Connections that ended by a bug, since the start."""
        return self._failures_count

    def start(self) -> str:
        """Listen; return the bound address, "host:port".

        Raises:
            OSError: the address cannot be bound.
            ValueError: it is no address.
        """
        host, port = split_address(self._listen_address)
        listener = socket.create_server(
            (host, port),
            family=socket.AF_INET6 if ":" in host else socket.AF_INET,
            backlog=_BACKLOG_COUNT,
        )
        self._listener = listener
        self._accepting = threading.Thread(
            target=self._accept, args=(listener,), name="kv-tcp-listener", daemon=True
        )
        self._accepting.start()
        bound_host, bound_port = listener.getsockname()[:2]
        return f"[{bound_host}]:{bound_port}" if ":" in host else f"{bound_host}:{bound_port}"

    def stop(self, *, drain_s: float = DRAIN_S) -> None:
        """Take no more requests, let transfers end, cut those that have not after
        `drain_s`, and return when every connection is closed. Idempotent.
        """
        deadline_s = time.monotonic() + drain_s
        with self._changed:
            self._is_stopping = True
            if self._listener is not None:
                with contextlib.suppress(OSError):
                    self._listener.shutdown(socket.SHUT_RDWR)  # Wakes the accept.
            for wire in self._threads:
                if wire not in self._busy:
                    wire.hang_up()
            while self._busy and time.monotonic() < deadline_s:
                self._changed.wait(deadline_s - time.monotonic())
            for wire in self._threads:
                wire.hang_up()
            threads = list(self._threads.values())
        if self._accepting is not None:
            threads.append(self._accepting)
        # After the hang-up no wait of a thread is left but the authority's own.
        joined_s = time.monotonic() + self._silence_timeout_s
        for thread in threads:
            thread.join(max(0.0, joined_s - time.monotonic()))
        if self._listener is not None:
            self._listener.close()

    # ---- connections

    def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError as error:
                with self._changed:
                    if self._is_stopping:
                        return
                    # Out of descriptors, most likely: some connection must end first.
                    log.warning("tcp accept failed", extra={"error": str(error)})
                    self._changed.wait(_ACCEPT_RETRY_S)
                continue
            wire = Wire(connection)
            refusal = self._admit(wire)
            if refusal is not None:
                self._send_error(wire, method=0, call_id=0, error=refusal)
                wire.close()

    def _admit(self, wire: Wire) -> KvError | None:
        """Start the connection's thread, or return why not."""
        with self._changed:
            if self._is_stopping:
                return DrainingError("this daemon is stopping", retry_after_ms=1000)
            if len(self._threads) >= self._max_connections_count:
                return LimitReachedError(
                    f"all {self._max_connections_count} tcp connections are in use",
                    retry_after_ms=1000,
                )
            thread = threading.Thread(target=self._serve, args=(wire,), name="kv-tcp-connection", daemon=True)
            self._threads[wire] = thread
            thread.start()
        return None

    def _serve(self, wire: Wire) -> None:
        try:
            while self._serve_request(wire):
                pass
        except Exception:  # border: task
            # A bug in one transfer costs its connection; the server serves on.
            with self._changed:
                self._failures_count += 1
            log.exception("tcp connection failed")
        finally:
            with self._changed:
                self._threads.pop(wire, None)
                self._busy.discard(wire)
                self._changed.notify_all()
            wire.close()

    def _serve_request(self, wire: Wire) -> bool:
        """Serve one request; return whether the connection is fit for another."""
        wire.arm(time.monotonic() + self._idle_timeout_s, self._idle_timeout_s)
        try:
            frame = wire.read_frame()
        except MalformedError as error:
            self._send_error(wire, method=0, call_id=0, error=error)
            return False
        except KvError:
            return False  # The peer hung up, or has nothing to ask.
        with self._changed:
            is_stopping = self._is_stopping
            if not is_stopping:
                self._busy.add(wire)
        if is_stopping:
            draining = DrainingError("this daemon is stopping", retry_after_ms=1000)
            self._send_error(wire, frame.method, call_id=0, error=draining)
            return False
        try:
            return self._handle(wire, frame)
        finally:
            with self._changed:
                self._busy.discard(wire)
                self._changed.notify_all()

    # ---- transfers

    def _handle(self, wire: Wire, frame: Frame) -> bool:
        """Run the transfer that a request asks for; return whether to go on."""
        limit_s = self._max_transfer_s
        if frame.deadline_ms:
            limit_s = min(limit_s, frame.deadline_ms / 1000)
        wire.arm(time.monotonic() + limit_s, self._silence_timeout_s)
        try:
            self._dispatch(wire, frame)
        except KvError as error:
            is_kept = wire.can_listen and wire.can_speak and not isinstance(error, MalformedError)
            self._send_error(wire, frame.method, frame.call_id if is_kept else 0, error)
            return is_kept
        except Exception:
            # Tell the peer before the border above logs it and ends the connection.
            bug = InvariantError("the transfer failed inside the daemon; its log says more")
            self._send_error(wire, frame.method, call_id=0, error=bug)
            raise
        return True

    def _dispatch(self, wire: Wire, frame: Frame) -> None:
        request, indexes = _parse(frame)
        if frame.method == Method.READ_SLOTS:
            self._read(wire, frame, request, indexes)
        elif frame.method == Method.WRITE_SLOTS:
            self._write(wire, frame, request, indexes)
        else:
            raise UnknownMethodError(f"method {frame.method} is not served on this wire")

    def _read(self, wire: Wire, frame: Frame, request: TransferRequest, indexes: I64) -> None:
        """Push the slots; the second frame says whether the lease held to the end."""
        grant = self._authority.begin_read(
            session_token=request.session_token,
            lease_id=request.capability_id,
            slot_indexes=indexes,
        )
        try:
            head = TransferResponse(payload_bytes=int(grant.lengths.sum()))
            if grant.checksums is not None:
                head.checksums.extend(grant.checksums.tolist())
            _respond(wire, frame, head)
            wire.can_speak = False
            for chunk in Region(Pieces(grant.addresses, grant.lengths)).chunks():
                wire.send(chunk.views)
            wire.can_speak = True
        finally:
            self._authority.end(grant.transfer_id, checksums=None)
        _respond(wire, frame, TransferResponse())

    def _write(self, wire: Wire, frame: Frame, request: TransferRequest, indexes: I64) -> None:
        """Give leave, take the payload into the slots, and answer with its checksums."""
        grant = self._authority.begin_write(
            session_token=request.session_token,
            reservation_id=request.capability_id,
            slot_indexes=indexes,
        )
        received: U32 | None = None
        try:
            _respond(wire, frame, TransferResponse(payload_bytes=int(grant.lengths.sum())))
            wire.can_listen = False
            region = Region(Pieces(grant.addresses, grant.lengths))
            sums = np.zeros(len(indexes), dtype=np.uint32)
            for chunk in region.chunks():
                wire.receive(chunk.views)
                if not request.is_unsummed:
                    region.add_checksum(chunk, sums)
            wire.can_listen = True
            received = None if request.is_unsummed else sums
        finally:
            self._authority.end(grant.transfer_id, checksums=received)
        _respond(wire, frame, TransferResponse(checksums=[] if received is None else received.tolist()))

    def _send_error(self, wire: Wire, method: int, call_id: int, error: KvError) -> None:
        """Tell the peer, where the wire still carries a frame; never raises.

        call_id: 0 tells the client that the connection ends with this.
        """
        log.debug("tcp transfer failed", extra={"method": method, "call_id": call_id, "error": str(error)})
        if not wire.can_speak:
            return
        wire.arm(time.monotonic() + _ERROR_SEND_S)
        with contextlib.suppress(KvError):
            wire.send_frame(FrameKind.ERROR, method, call_id, encode_error(error))


def _parse(frame: Frame) -> tuple[TransferRequest, I64]:
    if frame.kind is not FrameKind.REQUEST:
        raise MalformedError(f"a {frame.kind.name} frame came where a request was due")
    try:
        request = TransferRequest.FromString(frame.body)
    except DecodeError as error:
        raise MalformedError("the transfer request cannot be parsed") from error
    if not request.slot_indexes:
        raise BatchSizeError("a transfer of no slots")
    return request, np.array(request.slot_indexes, dtype=np.int64)


def _respond(wire: Wire, frame: Frame, response: TransferResponse) -> None:
    body = response.SerializeToString()
    wire.send_frame(FrameKind.RESPONSE, frame.method, frame.call_id, body)
