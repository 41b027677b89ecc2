"""The frame of the local lane and of the tcp data plane, and its error bodies.

One frame, little endian, without padding:

    offset  size  field
         0     4  length: bytes after this field, 15 to MAX_FRAME_BYTES
         4     1  kind: 1 REQUEST, 2 RESPONSE, 3 ERROR, 4 STREAM
         5     2  method: kvservice.ports.methods.Method
         7     8  call id, chosen by the caller; 0 on an unasked STREAM
        15     4  deadline in ms from the arrival of the frame; 0 = none
        19     -  body: a protobuf message, `length - 15` bytes

The body of an ERROR is a google.rpc.Status with an ErrorInfo and, where a retry
can help, a RetryInfo. Malformed means: length below 15 or above the bound, or an
unknown kind. An unknown method is no malformed frame; it is answered.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from enum import IntEnum

from google.protobuf.message import DecodeError
from google.rpc import error_details_pb2, status_pb2

from kvservice.core.errors import ERROR_BY_REASON, KvError, MalformedError, Reason
from kvservice.transports.status_codes import STATUS_BY_REASON

MAX_FRAME_BYTES = 16 << 20
"""Largest value of the length field: ten times the largest batch of the protocol."""

HEADER_BYTES = 19
"""From the length field to the body."""

ERROR_DOMAIN = "kvservice"
"""Domain of the ErrorInfo of every error that the service itself raises."""

_LENGTH_BYTES = 4
_MIN_LENGTH = HEADER_BYTES - _LENGTH_BYTES
_HEADER = struct.Struct("<IBHQI")
_LENGTH = struct.Struct("<I")
_MAX_DEADLINE_MS = 0xFFFFFFFF
_MAX_RETRY_MS = 86_400_000


class FrameKind(IntEnum):
    """What a frame is."""

    REQUEST = 1
    RESPONSE = 2
    ERROR = 3
    STREAM = 4


_KINDS: dict[int, FrameKind] = {int(kind): kind for kind in FrameKind}


@dataclass(slots=True)
class Frame:
    """One frame. Not frozen, since that would double the cost of building one.

    method: a number that need not be a member of Method.
    deadline_ms: 0 means none.
    body: belongs to the frame; nothing overwrites it later.
    """

    kind: FrameKind
    method: int
    call_id: int
    deadline_ms: int
    body: bytes


def encode(kind: FrameKind, method: int, call_id: int, deadline_ms: int, body: bytes) -> bytes:
    """Return the frame's bytes; a deadline past 49 days travels as 49 days.

    Raises:
        MalformedError: the body is larger than a frame may be.
    """
    length = _MIN_LENGTH + len(body)
    if length > MAX_FRAME_BYTES:
        raise MalformedError(
            f"a message of {len(body)} bytes does not fit a frame of {MAX_FRAME_BYTES}: send smaller batches"
        )
    deadline_ms = min(deadline_ms, _MAX_DEADLINE_MS)
    return _HEADER.pack(length, kind, method, call_id, deadline_ms) + body


def decode_header(header: bytes | bytearray | memoryview) -> tuple[Frame, int]:
    """Return the frame whose first HEADER_BYTES these are, without its body, and
    the size of the body in bytes.

    For readers that must not read past the frame, since raw payload follows it.

    Raises:
        MalformedError: this is no frame.
    """
    length, kind, method, call_id, deadline_ms = _HEADER.unpack_from(header)
    _check_length(length)
    return Frame(_kind(kind), method, call_id, deadline_ms, b""), length - _MIN_LENGTH


class FrameReader:
    """Cuts a stream of bytes into frames. Not thread safe.

    The bytes of an incomplete frame are kept, at most MAX_FRAME_BYTES and one
    feed. After a MalformedError the stream cannot be read on.
    """

    __slots__ = ("_needed_bytes", "_pending")

    def __init__(self) -> None:
        self._pending = bytearray()
        # Bytes that must be pending before it is worth looking again.
        self._needed_bytes = _LENGTH_BYTES

    @property
    def is_empty(self) -> bool:
        """Whether the stream may end here: no frame is partly read."""
        return not self._pending

    def feed(self, received: bytes) -> list[Frame]:
        """Take bytes as they arrived; return the frames that they complete.

        Raises:
            MalformedError: what follows is no frame. Frames that were complete
                before it in the same feed are lost with the connection.
        """
        pending = self._pending
        if not pending:
            size = len(received)
            # The fast path: nearly every receive on a lane is one whole frame.
            if size >= HEADER_BYTES:
                length, kind, method, call_id, deadline_ms = _HEADER.unpack_from(received)
                if size == length + _LENGTH_BYTES and kind in _KINDS and length <= MAX_FRAME_BYTES:
                    return [Frame(_KINDS[kind], method, call_id, deadline_ms, received[HEADER_BYTES:])]
        pending += received
        if len(pending) < self._needed_bytes:
            return []
        return self._cut()

    def _cut(self) -> list[Frame]:
        """Take every whole frame out of the pending bytes."""
        pending = self._pending
        size = len(pending)
        frames: list[Frame] = []
        start = 0
        self._needed_bytes = _LENGTH_BYTES
        with memoryview(pending) as view:
            while size - start >= _LENGTH_BYTES:
                (length,) = _LENGTH.unpack_from(view, start)
                _check_length(length)
                if size - start == _LENGTH_BYTES:
                    # The kind is looked at early, so that garbage does not wait for its length.
                    self._needed_bytes = _LENGTH_BYTES + 1
                    break
                _kind(view[start + _LENGTH_BYTES])
                if size - start < length + _LENGTH_BYTES:
                    self._needed_bytes = length + _LENGTH_BYTES
                    break
                frame, _ = decode_header(view[start : start + HEADER_BYTES])
                stop = start + length + _LENGTH_BYTES
                frame.body = bytes(view[start + HEADER_BYTES : stop])
                frames.append(frame)
                start = stop
        # One deletion per feed, however many frames it held: no quadratic copying.
        del pending[:start]
        return frames


def encode_error(error: KvError) -> bytes:
    """Return the body of an ERROR frame: a google.rpc.Status."""
    return status_of(error).SerializeToString()  # type: ignore[no-any-return]


def status_of(error: KvError) -> status_pb2.Status:
    """Return the google.rpc.Status that stands for `error` on every edge."""
    status = status_pb2.Status(code=STATUS_BY_REASON[error.reason], message=error.message)
    info = error_details_pb2.ErrorInfo(domain=ERROR_DOMAIN, reason=error.reason.name)
    status.details.add().Pack(info)
    if error.retry_after_ms is not None:
        retry = error_details_pb2.RetryInfo()
        retry.retry_delay.FromMilliseconds(min(max(error.retry_after_ms, 0), _MAX_RETRY_MS))
        status.details.add().Pack(retry)
    return status


def decode_error(body: bytes | memoryview) -> KvError:
    """Return the failure in the body of an ERROR frame; never raises.

    A reason that this version does not know, and a body that cannot be parsed,
    give a plain KvError: a failed call must not fail again while it is explained.
    """
    try:
        status = status_pb2.Status.FromString(bytes(body))
    except DecodeError:
        return KvError("the peer reported an error that cannot be parsed")
    return error_of(status)


def error_of(status: status_pb2.Status) -> KvError:
    """Return the failure that `status` stands for; never raises."""
    error_type: type[KvError] = KvError
    retry_after_ms: int | None = None
    for detail in status.details:
        info = error_details_pb2.ErrorInfo()
        retry = error_details_pb2.RetryInfo()
        try:
            if detail.Unpack(info) and info.domain == ERROR_DOMAIN:
                reason = Reason.__members__.get(info.reason, Reason.UNSPECIFIED)
                error_type = ERROR_BY_REASON.get(reason, KvError)
            elif detail.Unpack(retry):
                retry_after_ms = _bounded_ms(retry.retry_delay.seconds, retry.retry_delay.nanos)
        except DecodeError:
            continue  # One detail that cannot be parsed does not spoil the others.
    message = status.message or f"the peer failed with code {status.code} and said no more"
    return error_type(message, retry_after_ms=retry_after_ms)


def _bounded_ms(seconds: int, nanos: int) -> int:
    return min(max(seconds * 1000 + nanos // 1_000_000, 0), _MAX_RETRY_MS)


def _check_length(length: int) -> None:
    if not _MIN_LENGTH <= length <= MAX_FRAME_BYTES:
        raise MalformedError(
            f"a frame declares {length} bytes; {_MIN_LENGTH} to {MAX_FRAME_BYTES} are allowed"
        )


def _kind(kind: int) -> FrameKind:
    known = _KINDS.get(kind)
    if known is None:
        raise MalformedError(f"a frame is of unknown kind {kind}")
    return known
