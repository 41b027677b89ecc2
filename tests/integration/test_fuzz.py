"""Random bytes on every door: the daemon serves others on, and the peer is told or hung up on."""

from __future__ import annotations

import contextlib
import errno
import random
import socket
import struct
import time

import pytest

from kvproto.kv.v1 import local_lane_pb2, session_service_pb2
from kvservice.ports.methods import Method
from kvservice.transports.frames import FrameKind, FrameReader, encode
from tests.integration.daemon_process import check_stored, content, keys, opened, tier

SECONDS_PER_DOOR = 3.0
ROUNDS_LIMIT = 3000
ANSWER_LIMIT_S = 5.0


@pytest.fixture
def bystander(daemon):
    """Another client, which must notice nothing."""
    with opened(daemon.lane) as (client, namespace):
        namespace.put(keys(range(8)), content(range(8)))
        yield client, namespace
        check_stored(namespace, range(8))
        assert namespace.put(keys([100]), content([100])).stored_count == 1
        counts = tier(client)
        assert (counts.slots_reserved_count, counts.slots_quarantined_count) == (0, 0)
    assert "Traceback" not in daemon.said(), daemon.said()
    assert daemon.stop() == 0


def rounds(rng: random.Random):
    """Yield numbers until the time or the number of rounds is used up."""
    end_s = time.monotonic() + SECONDS_PER_DOOR
    for number in range(ROUNDS_LIMIT):
        if time.monotonic() > end_s and number > 50:
            return
        yield number


def lane_socket(daemon) -> socket.socket:
    """Connect to the local lane."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.settimeout(ANSWER_LIMIT_S)
    connection.connect(daemon.socket_path)
    return connection


def tcp_socket(address: str) -> socket.socket:
    """Connect to a port."""
    host, _, port = address.rpartition(":")
    connection = socket.create_connection((host, int(port)), timeout=ANSWER_LIMIT_S)
    connection.settimeout(ANSWER_LIMIT_S)
    return connection


def attach_frame(rng: random.Random) -> bytes:
    """Return a good first frame, half of the time."""
    request = session_service_pb2.AttachRequest(engine_incarnation=rng.randbytes(16))
    packed = encode(FrameKind.REQUEST, Method.ATTACH, 1, 0, request.SerializeToString())
    return packed if rng.random() < 0.5 else b""


def random_frames(rng: random.Random, methods) -> bytes:
    """Return frames with random bodies, broken in random places."""
    packed = b""
    for _ in range(rng.randint(1, 4)):
        method = rng.choice([*methods, rng.randrange(1 << 16)])
        body = rng.randbytes(rng.choice([0, 1, 7, 40, 500]))
        if rng.random() < 0.3:
            # Fields of the right kind with wild values get deeper than noise does.
            body = b"".join(
                bytes([rng.choice([0x08, 0x0A, 0x10, 0x12, 0x1A, 0x20])]) + rng.randbytes(rng.randint(1, 4))
                for _ in range(rng.randint(1, 6))
            )
        frame = bytearray(encode(FrameKind.REQUEST, method, rng.getrandbits(63), rng.getrandbits(31), body))
        trouble = rng.random()
        if trouble < 0.2:
            frame[rng.randrange(len(frame))] ^= 1 << rng.randrange(8)
        elif trouble < 0.3:
            del frame[rng.randrange(len(frame)) :]
        elif trouble < 0.4:
            frame[:4] = struct.pack("<I", rng.choice([0, 14, 15, 1 << 24, (1 << 24) + 1, 0xFFFFFFFF]))
        packed += frame
    return packed


def say_no_more(connection: socket.socket) -> None:
    """Close our half; the daemon may have closed both before."""
    try:
        connection.shutdown(socket.SHUT_WR)
    except OSError as error:
        if error.errno != errno.ENOTCONN:
            raise


def answers_or_end(connection: socket.socket) -> bool:
    """Read to the end of the connection; False if the daemon said something that is no frame."""
    reader = FrameReader()
    with contextlib.suppress(ConnectionError):
        say_no_more(connection)
        while received := connection.recv(1 << 16):
            for frame in reader.feed(received):
                if frame.kind not in {FrameKind.RESPONSE, FrameKind.ERROR, FrameKind.STREAM}:
                    return False
    return True


def test_random_frames_on_the_lane(daemon, bystander, rng):
    """Each connection ends in answers, an ERROR frame or a hang-up; none of it reaches another client."""
    count = 0
    for number in rounds(rng):
        with lane_socket(daemon) as connection:
            with contextlib.suppress(ConnectionError):
                noise = rng.randbytes(rng.randint(1, 200)) if number % 4 == 0 else random_frames(rng, Method)
                connection.sendall(attach_frame(rng) + noise)
            assert answers_or_end(connection)
        count = number
    assert count >= 50
    client, namespace = bystander
    check_stored(namespace, range(8))
    # The fuzzer's own sessions live as long as this process; they hold nothing.
    assert not any(owner.slots_reserved_count for owner in client.list_tiers().owners)


def test_a_truncated_frame_is_no_request(daemon, bystander, rng):
    """A frame that stops in the middle is waited for, and forgotten with its connection."""
    request = local_lane_pb2.MapSegmentsRequest(directory=True).SerializeToString()
    whole = encode(FrameKind.REQUEST, Method.MAP_SEGMENTS, 9, 0, request)
    for stop in range(len(whole)):
        with lane_socket(daemon) as connection:
            connection.sendall(whole[:stop])
            connection.shutdown(socket.SHUT_WR)
            assert connection.recv(1 << 16) == b""
    check_stored(bystander[1], range(8))


@pytest.mark.parametrize("door", ["grpc", "tcp"])
def test_random_bytes_on_the_ports(daemon, bystander, rng, door):
    """Noise, half an HTTP/2 greeting, and frames of the other edge are hung up on."""
    address = daemon.tcp_address if door == "tcp" else daemon.grpc.removeprefix("grpc://")
    greetings = [b"", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", b"GET / HTTP/1.1\r\n\r\n", b"\x16\x03\x01"]
    count = 0
    for number in rounds(rng):
        with tcp_socket(address) as connection, contextlib.suppress(ConnectionError):
            transfers = [Method.READ_SLOTS, Method.WRITE_SLOTS]
            noise = rng.randbytes(rng.randint(1, 300)) if number % 2 else random_frames(rng, transfers)
            connection.sendall((rng.choice(greetings) if door == "grpc" else b"") + noise)
            say_no_more(connection)
            while connection.recv(1 << 16):
                pass
        count = number
    assert count >= 50
    with opened(daemon.grpc) as (_, namespace):
        check_stored(namespace, range(8))


def test_a_transfer_with_a_wild_capability_is_refused(daemon, bystander, rng):
    """Well-formed requests for slots that nobody was given get an ERROR frame, and nothing else."""
    for _ in range(200):
        request = local_lane_pb2.TransferRequest(
            session_token=rng.randbytes(16),
            capability_id=rng.getrandbits(64),
            slot_indexes=[rng.getrandbits(32) for _ in range(rng.randint(1, 5))],
        )
        method = rng.choice([Method.READ_SLOTS, Method.WRITE_SLOTS])
        with tcp_socket(daemon.tcp_address) as connection:
            connection.sendall(encode(FrameKind.REQUEST, method, 3, 1000, request.SerializeToString()))
            frames, reader = [], FrameReader()
            while not frames:
                received = connection.recv(1 << 16)
                assert received, "hung up on without a word"
                frames = reader.feed(received)
            assert [frame.kind for frame in frames] == [FrameKind.ERROR]
    check_stored(bystander[1], range(8))
