"""A client that is in the middle of a transfer for ever: `transfer_child.py VERB ENDPOINT SALT DEADLINE_MS`.

It begins when its stdin says so. Its data socket takes next to nothing, so the daemon is in the middle too,
and cannot be anywhere else. DEADLINE_MS 0 leaves the end of the transfer to the daemon.
"""

from __future__ import annotations

import socket
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from kvclient.sync import KvClient, Namespace
from kvproto.kv.v1.local_lane_pb2 import TransferRequest
from kvservice.ports.methods import Method
from kvservice.transports.frames import FrameKind
from kvservice.transports.tcp.wire import Wire, split_address
from tests.integration.daemon_process import content, keys, opened
from tests.integration.scripted_child import say

HELD_COUNT = 96
"""Blocks of the transfer: half as much again as a socket buffers by Linux's default settings."""

RECEIVE_BUFFER_BYTES = 4096
MOVED_BYTES = 100_000
"""One block and a half."""

WAIT_LIMIT_S = 20.0


def begin(client: KvClient, method: Method, capability_id: int, deadline_ms: int) -> Wire:
    """Ask for the transfer of all slots of a capability, and take the answer that precedes the payload."""
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, RECEIVE_BUFFER_BYTES)
    connection.connect(split_address(client.attachment.tcp_address))
    wire = Wire(connection)
    wire.arm(time.monotonic() + WAIT_LIMIT_S)
    request = TransferRequest(
        session_token=client.attachment.session_token,
        capability_id=capability_id,
        slot_indexes=range(HELD_COUNT),
    )
    wire.send_frame(FrameKind.REQUEST, method, 1, request.SerializeToString(), deadline_ms)
    answer = wire.read_frame()
    assert answer.kind is FrameKind.RESPONSE, answer
    return wire


def read(client: KvClient, namespace: Namespace, deadline_ms: int, *, is_released: bool = False) -> Wire:
    """Take the first block and a half under a lease."""
    lease = namespace.acquire(keys(range(HELD_COUNT)))
    assert lease is not None
    wire = begin(client, Method.READ_SLOTS, lease.lease_id, deadline_ms)
    moved = bytearray(MOVED_BYTES)
    wire.receive([memoryview(moved)])
    assert moved == content([0, 1]).tobytes()[:MOVED_BYTES]
    if is_released:
        client.release([lease])
    return wire


def read_released(client: KvClient, namespace: Namespace, deadline_ms: int) -> Wire:
    """The same, and end the lease: what pins the slots now is the transfer alone."""
    return read(client, namespace, deadline_ms, is_released=True)


def write(client: KvClient, namespace: Namespace, deadline_ms: int) -> Wire:
    """Send the first block and a half under a reservation."""
    reservation = namespace.reserve(keys(range(1000, 1000 + HELD_COUNT)))
    wire = begin(client, Method.WRITE_SLOTS, reservation.reservation_id, deadline_ms)
    wire.send([memoryview(content([1000, 1001]).tobytes())[:MOVED_BYTES]])
    return wire


VERBS = {"read": read, "read-released": read_released, "write": write}


def main(verb: str, endpoint: str, salt: str, deadline_ms: str) -> None:
    """Begin, and stay there."""
    with opened(endpoint, salt=salt.encode()) as (client, namespace):
        say("ready")
        sys.stdin.readline()
        wire = VERBS[verb](client, namespace, int(deadline_ms))
        say("in the middle")
        sys.stdin.read()
        wire.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
