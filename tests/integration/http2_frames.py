"""HTTP/2 and gRPC by hand, right or wrong as asked: what a client library would never send."""

from __future__ import annotations

import base64
import contextlib
import random
import socket
import struct
from collections.abc import Iterator
from enum import IntEnum
from typing import Self

from google.protobuf.descriptor import Descriptor, FieldDescriptor

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
FRAME_BYTES = 9
END_STREAM, END_HEADERS, PADDED, PRIORITY_FLAG, ACK = 0x1, 0x4, 0x8, 0x20, 0x1
MOST_FRAME_BYTES = 1 << 14
"""SETTINGS_MAX_FRAME_SIZE where the peer has said nothing else."""

FIXED_WIDTH = {
    FieldDescriptor.TYPE_FIXED32: (5, 4),
    FieldDescriptor.TYPE_SFIXED32: (5, 4),
    FieldDescriptor.TYPE_FLOAT: (5, 4),
    FieldDescriptor.TYPE_FIXED64: (1, 8),
    FieldDescriptor.TYPE_SFIXED64: (1, 8),
    FieldDescriptor.TYPE_DOUBLE: (1, 8),
}
"""Wire type and bytes of the types that are not varints."""


class Kind(IntEnum):
    """What a frame is."""

    DATA = 0
    HEADERS = 1
    PRIORITY = 2
    RST_STREAM = 3
    SETTINGS = 4
    PUSH_PROMISE = 5
    PING = 6
    GOAWAY = 7
    WINDOW_UPDATE = 8
    CONTINUATION = 9


def frame(kind: int, flags: int, stream: int, payload: bytes = b"", *, length: int | None = None) -> bytes:
    """Return one frame; `length` may lie."""
    said = len(payload) if length is None else length
    return struct.pack(">I", said)[1:] + struct.pack(">BBI", kind, flags, stream) + payload


def header_block(headers: list[tuple[bytes, bytes]]) -> bytes:
    """Return headers as HPACK literals without indexing, which need no table."""
    return b"".join(b"\x00" + _literal(name) + _literal(value) for name, value in headers)


def headers_of(path: bytes, **metadata: bytes) -> list[tuple[bytes, bytes]]:
    """Return the headers of a gRPC request; metadata may replace them, `_` for `-`."""
    headers = {
        b":method": b"POST",
        b":scheme": b"http",
        b":path": path,
        b":authority": b"localhost",
        b"te": b"trailers",  # codespell:ignore te
        b"content-type": b"application/grpc",
    }
    headers |= {name.replace("_", "-").encode(): value for name, value in metadata.items()}
    return list(headers.items())


def binary(value: bytes) -> bytes:
    """Return the value of a `-bin` header."""
    return base64.b64encode(value).rstrip(b"=")


def message(body: bytes, *, flag: int = 0, length: int | None = None) -> bytes:
    """Return a length-prefixed gRPC message; `length` may lie."""
    return struct.pack(">BI", flag, len(body) if length is None else length) + body


def request(stream: int, headers: list[tuple[bytes, bytes]], body: bytes) -> bytes:
    """Return a whole unary request."""
    packed = frame(Kind.HEADERS, END_HEADERS, stream, header_block(headers))
    for start in range(0, len(body), MOST_FRAME_BYTES):
        packed += frame(Kind.DATA, 0, stream, body[start : start + MOST_FRAME_BYTES])
    return packed + frame(Kind.DATA, END_STREAM, stream)


def conversation(*frames: bytes) -> bytes:
    """Return what a connection says, from its first byte on."""
    return PREFACE + frame(Kind.SETTINGS, 0, 0) + b"".join(frames)


class Http2Socket:
    """A connection to the gRPC port that sends what it is given, and reads frames."""

    def __init__(self, address: str, timeout_s: float) -> None:
        host, _, port = address.rpartition(":")
        self._socket = socket.create_connection((host, int(port)), timeout=timeout_s)
        self._pending = b""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()

    def send(self, packed: bytes) -> None:
        """Send bytes; a peer that has hung up is no error."""
        with contextlib.suppress(ConnectionError):
            self._socket.sendall(packed)

    def frames(self) -> Iterator[tuple[int, int, int, bytes]]:
        """Yield kind, flags, stream and payload of each frame until the peer hangs up."""
        while True:
            header = self._exactly(FRAME_BYTES)
            if header is None:
                return
            length = int.from_bytes(header[:3], "big")
            kind, flags, stream = struct.unpack(">BBI", header[3:])
            payload = self._exactly(length)
            if payload is None:
                return
            yield kind, flags, stream, payload

    def wait_for(self, stream: int) -> bytes | None:
        """Return the first DATA of a stream; None once the stream or the connection is over without."""
        for kind, flags, of, payload in self.frames():
            if of == stream and kind == Kind.DATA:
                return payload
            is_over = kind == Kind.RST_STREAM or (kind == Kind.HEADERS and flags & END_STREAM)
            if (of == stream and is_over) or kind == Kind.GOAWAY:
                return None
        return None

    def _exactly(self, count: int) -> bytes | None:
        while len(self._pending) < count:
            try:
                received = self._socket.recv(1 << 16)
            except ConnectionError:
                return None
            if not received:
                return None
            self._pending += received
        taken, self._pending = self._pending[:count], self._pending[count:]
        return taken


def random_fields(
    rng: random.Random, descriptor: Descriptor, hints: dict[str, list[object]], depth: int = 0
) -> bytes:
    """Return a message of a type with random contents: right in form, wild in value.

    hints: by name of a field, values that get further than wild ones do.
    """
    packed = b""
    for field in descriptor.fields:
        if rng.random() < 0.15:
            continue
        for _ in range(rng.choice([1, 1, 1, 1, 2, 3])):
            packed += _random_field(rng, field, hints, depth)
    return packed


def _random_field(
    rng: random.Random, field: FieldDescriptor, hints: dict[str, list[object]], depth: int
) -> bytes:
    value = rng.choice(hints[field.name]) if field.name in hints and rng.random() < 0.85 else None
    if isinstance(value, bytes):
        return _delimited(field.number, value)
    if isinstance(value, int):
        return _varint(field.number << 3) + _varint(value)
    if field.type == FieldDescriptor.TYPE_MESSAGE:
        inner = b"" if depth > 3 else random_fields(rng, field.message_type, hints, depth + 1)
        return _delimited(field.number, inner)
    if field.type in {FieldDescriptor.TYPE_BYTES, FieldDescriptor.TYPE_STRING}:
        return _delimited(field.number, rng.randbytes(rng.choice([0, 1, 16, 31, 32, 33, 64, 1000])))
    if field.type in FIXED_WIDTH:
        wire_type, width = FIXED_WIDTH[field.type]
        return _varint(field.number << 3 | wire_type) + rng.randbytes(width)
    wild = rng.choice([0, 1, 2, 127, rng.getrandbits(20), rng.getrandbits(32), rng.getrandbits(64)])
    return _varint(field.number << 3) + _varint(wild)


def _delimited(number: int, value: bytes) -> bytes:
    return _varint(number << 3 | 2) + _varint(len(value)) + value


def _varint(value: int) -> bytes:
    packed = bytearray()
    while value > 0x7F:
        packed.append(value & 0x7F | 0x80)
        value >>= 7
    packed.append(value)
    return bytes(packed)


def _literal(text: bytes) -> bytes:
    """Return an HPACK string without Huffman coding; its length has a prefix of seven bits."""
    if len(text) < 0x7F:
        return bytes([len(text)]) + text
    return b"\x7f" + _varint(len(text) - 0x7F) + text
