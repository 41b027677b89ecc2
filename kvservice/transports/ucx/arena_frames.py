"""What the daemon and the process that lends its arena tell each other, on a SOCK_SEQPACKET pair.

One message is one packet: kind, u8 | number, u32 | size, u64 | body. Little endian, packed.

    daemon   ADD number size           with the descriptor of a segment's memory, and nothing else of it
             DROP number
    lender   READY                     body: `LenderFacts`, after it was opened
             ADDED number              body: a `kv.v1.EngineSegment`, base address and ways of this life
             DROPPED number
             FAILED number             body: why, UTF-8; number 0 before READY: it cannot lend at all

Each request has one answer, and is the only one under way. The end of the socket ends the lender.
"""

from __future__ import annotations

import os
import socket
import struct
from dataclasses import dataclass
from enum import IntEnum
from typing import Self

from google.protobuf.message import DecodeError

from kvproto.kv.v1 import segment_service_pb2
from kvservice.core.engine_memory import EngineSegment
from kvservice.core.errors import MalformedError
from kvservice.transports.segment_messages import segment_of

PACKET_BYTES_MAX = 64 << 10
"""Eight ways of two kilobytes each, with room to spare; less than a socket's buffer."""

_HEAD = struct.Struct("<BIQ")
_DESCRIPTOR = struct.Struct("@i")
_SEPARATOR = b"\0"


class PacketKind(IntEnum):
    """What a packet says."""

    ADD = 1
    DROP = 2
    READY = 3
    ADDED = 4
    DROPPED = 5
    FAILED = 6


@dataclass(frozen=True, slots=True)
class Packet:
    """One packet. number: of a segment. size_bytes: of its memory, in ADD."""

    kind: PacketKind
    number: int = 0
    size_bytes: int = 0
    body: bytes = b""

    def encode(self) -> bytes:
        """Return the packet as it travels."""
        return _HEAD.pack(self.kind, self.number, self.size_bytes) + self.body

    @classmethod
    def parse(cls, packed: bytes) -> Self:
        """Take a packet apart. Raises MalformedError."""
        try:
            kind, number, size_bytes = _HEAD.unpack_from(packed)
            return cls(PacketKind(kind), number, size_bytes, packed[_HEAD.size :])
        except (struct.error, ValueError) as error:
            raise MalformedError(
                f"{len(packed)} bytes are no packet of the arena's lender: {error}"
            ) from error


@dataclass(frozen=True, slots=True)
class LenderFacts:
    """What a lender says of itself.

    rdma_devices: by which its memory can be reached; none where that is over tcp or by CMA alone.
    """

    transport: str
    rdma_devices: tuple[str, ...]

    def encode(self) -> bytes:
        """Return it as the body of READY: texts with a zero byte between each."""
        return _SEPARATOR.join(text.encode() for text in (self.transport, *self.rdma_devices))

    @classmethod
    def parse(cls, body: bytes) -> Self:
        """Take the body of READY apart. Raises MalformedError."""
        try:
            transport, *devices = (text.decode() for text in body.split(_SEPARATOR))
        except UnicodeDecodeError as error:
            raise MalformedError("the facts of the arena's lender are no text") from error
        return cls(transport, tuple(devices))


def send(wire: socket.socket, packet: Packet, descriptor: int = -1) -> None:
    """Send a packet, with a descriptor beside it if one is given. Raises OSError."""
    if descriptor < 0:
        wire.send(packet.encode())
    else:
        socket.send_fds(wire, [packet.encode()], [descriptor])


def receive(wire: socket.socket) -> tuple[Packet, list[int]] | None:
    """Return the next packet and the descriptors that came with it, which are the caller's; None at the end.

    Raises:
        MalformedError: what came is no packet.
        OSError: the socket failed, or there is nothing where it does not block.
    """
    # Not `recv_fds`, which leaves out the flags: a process started meanwhile would inherit the memory.
    packed, beside, _, _ = wire.recvmsg(
        PACKET_BYTES_MAX, socket.CMSG_SPACE(_DESCRIPTOR.size), socket.MSG_CMSG_CLOEXEC
    )
    if not packed:
        return None
    descriptors = [
        descriptor
        for level, kind, packed_descriptors in beside
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS)
        for (descriptor,) in _DESCRIPTOR.iter_unpack(packed_descriptors)
    ]
    try:
        return Packet.parse(packed), descriptors
    except MalformedError:
        for descriptor in descriptors:
            os.close(descriptor)
        raise


def parse_segment(body: bytes) -> EngineSegment:
    """Return the segment of a packed message. Raises MalformedError, InvalidFieldError."""
    try:
        return segment_of(segment_service_pb2.EngineSegment.FromString(body))
    except DecodeError as error:
        raise MalformedError(f"{len(body)} bytes describe no segment: {error}") from error
