"""The client's end: a Transport over a small pool of connections."""

from __future__ import annotations

import contextlib
import itertools
import socket
import threading
import time
from collections.abc import Callable, Iterator

import numpy as np
from google.protobuf.message import DecodeError

from kvproto.kv.v1.local_lane_pb2 import TransferRequest, TransferResponse
from kvservice.core.checksums import differing
from kvservice.core.errors import (
    BlockSizeError,
    ChecksumMismatchError,
    DeadlineError,
    MalformedError,
    PeerUnavailableError,
)
from kvservice.core.slots import I64, U32
from kvservice.ports.methods import Method
from kvservice.ports.transport import Transfer, TransportCapabilities
from kvservice.transports.blockmap import check_transfer
from kvservice.transports.frames import FrameKind, decode_error
from kvservice.transports.tcp.region import Region
from kvservice.transports.tcp.wire import Wire, split_address

CONNECTIONS_COUNT = 4
"""Transfers at a time; more wait. Two fill a host's memory bus, four a fast network."""

CONNECT_TIMEOUT_S = 5.0


class TcpTransport:
    """Transport to one TcpServer. Thread safe; each transfer has a connection of its own.

    session_token: asked for each transfer, since a session may be opened anew.
    """

    def __init__(
        self,
        address: str,
        session_token: Callable[[], bytes],
        *,
        connections_count: int = CONNECTIONS_COUNT,
        connect_timeout_s: float = CONNECT_TIMEOUT_S,
    ) -> None:
        self._pool = _Pool(address, connections_count, connect_timeout_s)
        self._session_token = session_token
        self._call_ids = itertools.count(1)

    @property
    def capabilities(self) -> TransportCapabilities:
        """The owner of the bytes checks; it hands out no views."""
        return TransportCapabilities(name="tcp", has_views=False, is_checked_by_owner=True)

    def write(self, transfer: Transfer) -> None:
        """Copy the pieces into the slots; see Transport.write.

        Raises:
            ChecksumMismatchError: checksums are asked for, and other bytes arrived
                than were summed here.
        """
        check_transfer(transfer)
        if not len(transfer.lengths):
            return
        region = Region(transfer.pieces)
        sums = transfer.checksums
        with self._pool.wire(time.monotonic() + transfer.timeout_s) as wire:
            call_id = self._request(wire, Method.WRITE_SLOTS, transfer)
            _check_size(_answer(wire, call_id, is_last=False), transfer)
            try:
                for chunk in region.chunks():
                    if sums is not None:
                        region.add_checksum(chunk, sums)
                    wire.send(chunk.views)
            except PeerUnavailableError as failure:
                raise wire.last_words(failure) from failure
            received = _checksums(_answer(wire, call_id, is_last=True))
        if sums is not None:
            _check_count(sums, received)
            _complain(
                sums,
                received,
                np.flatnonzero(sums != received),
                "what arrived is not what was sent",
                transfer,
            )

    def read(self, transfer: Transfer) -> None:
        """Copy the slots into the pieces; see Transport.read.

        Raises:
            ChecksumMismatchError: checksums are asked for, and one differs from the
                committed one.
        """
        check_transfer(transfer)
        if not len(transfer.lengths):
            return
        region = Region(transfer.pieces)
        sums = transfer.checksums
        with self._pool.wire(time.monotonic() + transfer.timeout_s) as wire:
            call_id = self._request(wire, Method.READ_SLOTS, transfer)
            head = _answer(wire, call_id, is_last=False)
            _check_size(head, transfer)
            wire.can_listen = False
            for chunk in region.chunks():
                wire.receive(chunk.views)
                if sums is not None:
                    region.add_checksum(chunk, sums)
            wire.can_listen = True
            _answer(wire, call_id, is_last=True)
        committed = _checksums(head)
        if sums is not None and len(committed):
            _check_count(sums, committed)
            _complain(
                sums,
                committed,
                differing(sums, committed),
                "what arrived is not what was committed",
                transfer,
            )

    def close(self) -> None:
        """Close every connection; transfers that run fail. Idempotent."""
        self._pool.close()

    def _request(self, wire: Wire, method: Method, transfer: Transfer) -> int:
        """Send the request; until the last answer the connection is out of step."""
        call_id = next(self._call_ids)
        request = TransferRequest(
            session_token=self._session_token(),
            capability_id=transfer.capability_id,
            slot_indexes=transfer.slot_indexes.tolist(),
            is_unsummed=transfer.checksums is None,
        )
        deadline_ms = max(1, int(transfer.timeout_s * 1000))
        body = request.SerializeToString()
        try:
            wire.send_frame(FrameKind.REQUEST, method, call_id, body, deadline_ms)
        except PeerUnavailableError as failure:
            # A full server says so before it hangs up.
            raise wire.last_words(failure) from failure
        wire.can_speak = False
        return call_id


class _Pool:
    """Connections to one address. A wire is used by one transfer at a time."""

    def __init__(self, address: str, connections_count: int, connect_timeout_s: float) -> None:
        self._address = address
        self._target = split_address(address)
        self._connections_count = connections_count
        self._connect_timeout_s = connect_timeout_s
        self._changed = threading.Condition()
        self._idle: list[Wire] = []
        self._busy: set[Wire] = set()
        self._opening_count = 0
        self._is_closed = False

    @contextlib.contextmanager
    def wire(self, deadline_s: float) -> Iterator[Wire]:
        """Lend a wire in step, bounded by the deadline; one out of step is closed after."""
        wire = self._take(deadline_s)
        wire.arm(deadline_s)
        try:
            yield wire
        finally:
            with self._changed:
                self._busy.discard(wire)
                is_kept = wire.can_listen and wire.can_speak and not self._is_closed
                if is_kept:
                    self._idle.append(wire)
                self._changed.notify()
            if not is_kept:
                wire.close()

    def close(self) -> None:
        with self._changed:
            self._is_closed = True
            idle, self._idle = self._idle, []
            for wire in self._busy:
                wire.hang_up()
            self._changed.notify_all()
        for wire in idle:
            wire.close()

    def _take(self, deadline_s: float) -> Wire:
        while True:
            wire = self._reserve(deadline_s)
            if wire is None:
                return self._open(deadline_s)
            if wire.is_reusable:
                return wire
            # The server closed it while it was idle.
            with self._changed:
                self._busy.discard(wire)
                self._changed.notify()
            wire.close()

    def _reserve(self, deadline_s: float) -> Wire | None:
        """Return an idle wire, or None with the right to open one."""
        with self._changed:
            while True:
                if self._is_closed:
                    raise PeerUnavailableError(f"the transport to {self._address} was closed")
                if self._idle:
                    wire = self._idle.pop()
                    self._busy.add(wire)
                    return wire
                if len(self._busy) + self._opening_count < self._connections_count:
                    self._opening_count += 1
                    return None
                remaining_s = deadline_s - time.monotonic()
                if remaining_s <= 0 or not self._changed.wait(remaining_s):
                    raise DeadlineError(
                        f"all {self._connections_count} connections to {self._address} were busy "
                        "until the deadline"
                    )

    def _open(self, deadline_s: float) -> Wire:
        wire: Wire | None = None
        try:
            wire = self._connect(deadline_s)
        finally:
            with self._changed:
                self._opening_count -= 1
                is_closed = self._is_closed
                if wire is not None and not is_closed:
                    self._busy.add(wire)
                self._changed.notify()
        if is_closed:
            wire.close()
            raise PeerUnavailableError(f"the transport to {self._address} was closed")
        return wire

    def _connect(self, deadline_s: float) -> Wire:
        remaining_s = deadline_s - time.monotonic()
        if remaining_s <= 0:
            raise DeadlineError(f"the deadline passed before a connection to {self._address}")
        timeout_s = min(remaining_s, self._connect_timeout_s)
        try:
            return Wire(socket.create_connection(self._target, timeout=timeout_s))
        except OSError as error:
            if isinstance(error, TimeoutError) and time.monotonic() >= deadline_s:
                raise DeadlineError(f"{self._address} took no connection in time") from error
            raise PeerUnavailableError(f"cannot connect to {self._address}: {error}") from error


def _answer(wire: Wire, call_id: int, *, is_last: bool) -> TransferResponse:
    """Return the server's answer to this call, or raise the error that it sent.

    After an error, as after the last answer, the connection is in step again.
    """
    frame = wire.read_frame()
    if frame.kind is FrameKind.ERROR:
        # Call id 0: the server speaks of the connection, and ends it.
        wire.can_speak = frame.call_id == call_id
        raise decode_error(frame.body)
    if frame.kind is not FrameKind.RESPONSE or frame.call_id != call_id:
        wire.can_listen = False
        raise MalformedError(f"the answer to call {call_id} is a {frame.kind.name} to call {frame.call_id}")
    try:
        response = TransferResponse.FromString(frame.body)
    except DecodeError as error:
        wire.can_listen = False
        raise MalformedError("the answer to a transfer cannot be parsed") from error
    wire.can_speak = is_last
    return response


def _check_size(response: TransferResponse, transfer: Transfer) -> None:
    """Hold the payload to the pieces. The caller's connection is out of step if not."""
    expected_bytes = int(transfer.lengths.sum())
    if response.payload_bytes != expected_bytes:
        raise BlockSizeError(
            f"the slots of {transfer.capability_id} hold {response.payload_bytes} bytes, the "
            f"pieces {expected_bytes}"
        )


def _checksums(response: TransferResponse) -> U32:
    return np.fromiter(response.checksums, dtype=np.uint32, count=len(response.checksums))


def _check_count(here: U32, there: U32) -> None:
    if len(here) != len(there):
        raise MalformedError(f"{len(there)} checksums came for {len(here)} blocks")


def _complain(here: U32, there: U32, differs: I64, complaint: str, transfer: Transfer) -> None:
    """Raise ChecksumMismatchError if there are blocks that differ."""
    if len(differs):
        block = int(differs[0])
        raise ChecksumMismatchError(
            f"{complaint}: {len(differs)} of {len(here)} blocks, the first is slot "
            f"{int(transfer.slot_indexes[block])} of {transfer.capability_id}; CRC32C "
            f"{int(here[block]):08x} here, {int(there[block]):08x} there"
        )
