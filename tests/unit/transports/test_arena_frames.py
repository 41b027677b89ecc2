"""What the daemon and the lender of its arena say to each other: the bytes are the format."""

import os
import socket

import pytest

from kvproto.kv.v1 import segment_service_pb2
from kvservice.core.engine_memory import EngineSegment, MemoryKind, SegmentWay
from kvservice.core.errors import InvalidFieldError, MalformedError
from kvservice.transports.segment_messages import segment_message
from kvservice.transports.ucx.arena_frames import (
    LenderFacts,
    Packet,
    PacketKind,
    parse_segment,
    receive,
    send,
)

SEGMENT = EngineSegment(0x10000, 1 << 20, MemoryKind.HOST, (SegmentWay("ucx", b"where", b"what"),))
GOLDEN = {
    Packet(PacketKind.ADD, 3, 1 << 20): "01030000000000100000000000",
    Packet(PacketKind.DROP, 0x01020304): "02040302010000000000000000",
    Packet(PacketKind.READY, body=LenderFacts("ucx", ("mlx5_0", "mlx5_1")).encode()): (
        "03000000000000000000000000" + b"ucx\0mlx5_0\0mlx5_1".hex()
    ),
    Packet(PacketKind.ADDED, 3, body=b"message"): "04030000000000000000000000" + b"message".hex(),
    Packet(PacketKind.DROPPED, 3): "05030000000000000000000000",
    Packet(PacketKind.FAILED, 3, body=b"why"): "06030000000000000000000000" + b"why".hex(),
}


@pytest.fixture
def wires():
    """Give both ends of a pair."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        yield ours, theirs


@pytest.mark.parametrize("packet", GOLDEN, ids=lambda packet: packet.kind.name)
def test_the_bytes_of_each_packet_are_fixed(packet):
    """Both ends are of one installation; the drawing in the module is what they keep to."""
    assert packet.encode().hex() == GOLDEN[packet]
    assert Packet.parse(packet.encode()) == packet


@pytest.mark.parametrize("packed", [b"", b"\1\0", b"\0" * 13, b"\7" + b"\0" * 12])
def test_what_is_no_packet_is_refused(packed):
    """A short one, or one of a kind that is not known."""
    with pytest.raises(MalformedError):
        Packet.parse(packed)


@pytest.mark.parametrize("devices", [(), ("mlx5_0",), ("mlx5_0", "mlx5_1")])
def test_the_facts_come_as_they_went(devices):
    """No devices are none, and not one without a name."""
    assert LenderFacts.parse(LenderFacts("ucx", devices).encode()) == LenderFacts("ucx", devices)
    with pytest.raises(MalformedError):
        LenderFacts.parse(b"\xff\xfe")


def test_a_segment_comes_as_it_went():
    """Address, size, kind and ways; nonsense is refused by name."""
    assert parse_segment(segment_message(SEGMENT).SerializeToString()) == SEGMENT
    with pytest.raises(MalformedError):
        parse_segment(b"\xff")
    odd = segment_service_pb2.EngineSegment(base_address=1, size_bytes=1, memory_kind=7)
    with pytest.raises(MalformedError):
        parse_segment(odd.SerializeToString())
    odd = segment_service_pb2.EngineSegment(base_address=1, size_bytes=1, memory_kind=1)
    with pytest.raises(InvalidFieldError):
        parse_segment(odd.SerializeToString())


def test_a_descriptor_travels_beside_its_packet(wires):
    """One packet, one descriptor, and the end of the socket is told from both."""
    ours, theirs = wires
    descriptor = os.memfd_create("some memory")
    os.write(descriptor, b"content")
    send(ours, Packet(PacketKind.ADD, 1, 7), descriptor)
    send(ours, Packet(PacketKind.DROP, 1))
    os.close(descriptor)
    packet, descriptors = receive(theirs)
    assert (packet.kind, len(descriptors)) == (PacketKind.ADD, 1)
    assert os.pread(descriptors[0], 10, 0) == b"content"
    assert not os.get_inheritable(descriptors[0])
    os.close(descriptors[0])
    assert receive(theirs) == (Packet(PacketKind.DROP, 1), [])
    ours.close()
    assert receive(theirs) is None


def test_a_descriptor_beside_nonsense_is_closed(wires):
    """What cannot be read must not cost a descriptor."""
    ours, theirs = wires
    reader, writer = os.pipe()
    socket.send_fds(ours, [b"nonsense"], [writer])
    os.close(writer)
    with pytest.raises(MalformedError):
        receive(theirs)
    assert os.read(reader, 1) == b""
    os.close(reader)
