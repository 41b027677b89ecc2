"""A process that reaches a lent arena, to be killed and stopped: `remote_arena_child.py VERB ...`."""

from __future__ import annotations

import sys
from pathlib import Path

import google_crc32c
import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from kvservice.core.engine_memory import EngineSegment, MemoryKind, SegmentWay
from kvservice.core.errors import KvError
from kvservice.ports.one_sided import RemoteRead
from kvservice.transports.ucx import UcxEndpoint
from kvservice.transports.ucx.chunks import pack_keys
from tests.integration.daemon_process import keys, opened
from tests.integration.remote_arena import OVER_TCP, authority_of
from tests.integration.scripted_child import say

COUNT = 8
HEADER_BYTES, RANGE_BYTES = 16, 16
CHUNK_HEAD_BYTES = 12
NOWHERE = 0x1000
"""Linux maps nothing in the first pages."""


def read(endpoint: str, grpc: str, timeout_s: str) -> None:
    """Begin to read the blocks 0 to 7, release the lease, and stay there."""
    with opened(endpoint) as (client, namespace), authority_of(client, grpc) as authority:
        lease = namespace.acquire(keys(range(COUNT)))
        grant = authority.begin_read(
            lease_id=lease.lease_id, slot_indexes=np.arange(COUNT), timeout_s=float(timeout_s)
        )
        client.release([lease])
        say(f"begun {len(grant.lengths)}")
        sys.stdin.read()


def write(endpoint: str, grpc: str, timeout_s: str) -> None:
    """Begin to write the blocks 100 to 107, and stay there."""
    with opened(endpoint) as (client, namespace), authority_of(client, grpc) as authority:
        reservation = namespace.reserve(keys(range(100, 100 + COUNT)))
        grant = authority.begin_write(
            reservation_id=reservation.reservation_id,
            slot_indexes=np.arange(COUNT),
            timeout_s=float(timeout_s),
        )
        say(f"begun {len(grant.lengths)}")
        sys.stdin.read()


def wild(address: str, key: str) -> None:
    """Read where the peer has nothing, with a key that says it had."""
    # The key of a segment in one chunk: a count, the chunk's length, its key's length, and the key.
    sealed = bytearray.fromhex(key)[CHUNK_HEAD_BYTES:]
    body = sealed[HEADER_BYTES:]
    body[:8] = NOWHERE.to_bytes(8, "little")
    body[8:RANGE_BYTES] = (1 << 20).to_bytes(8, "little")
    sealed[12:HEADER_BYTES] = google_crc32c.value(bytes(sealed[:12] + body)).to_bytes(4, "little")
    forged = pack_keys([1 << 20], [bytes(sealed[:HEADER_BYTES] + body)])
    way = SegmentWay("ucx", bytes.fromhex(address), forged)
    segment = EngineSegment(NOWHERE, 1 << 20, MemoryKind.HOST, (way,))
    into = np.zeros(64, np.uint8)
    endpoint = UcxEndpoint(OVER_TCP)
    one = np.array([64], np.uint64)
    place = np.array([into.ctypes.data], np.uint64)
    try:
        endpoint.read(RemoteRead((segment,), np.zeros(1, np.uint32), 0 * one, place, one, 5.0))
    except KvError as error:
        say(type(error).__name__)
    else:
        say("read")
    endpoint.close()


VERBS = {"read": read, "write": write, "wild": wild}

if __name__ == "__main__":
    VERBS[sys.argv[1]](*sys.argv[2:])
