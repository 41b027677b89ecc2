"""A client that is another user: `user_child.py UID GROUPS ENDPOINT`, the groups with commas between them.

It becomes that user once all is imported, since an interpreter may lie where only its owner can read. It
takes orders from its stdin, a line each, and answers each with a line.
"""

from __future__ import annotations

import os
import socket
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import numpy as np

from kvclient import KvError
from kvclient.sync import KvClient, Namespace
from kvproto.kv.v1 import local_lane_pb2, session_service_pb2
from kvservice.ports.methods import Method
from kvservice.transports.frames import Frame, FrameKind, FrameReader, decode_error, encode
from tests.integration.daemon_process import (
    BLOCK_BYTES,
    content,
    keys,
    open_namespace,
    settings_of,
)
from tests.integration.scripted_child import say

SHARED = range(8)
"""Keys that every user stores blocks of its own under."""


def become(uid: int, groups: list[int]) -> None:
    """Be that user from now on, in the first of the groups and the others."""
    os.setgroups(groups)
    os.setresgid(groups[0], groups[0], groups[0])
    os.setresuid(uid, uid, uid)


def own(uid: int) -> np.ndarray:
    """Return what a user stores under the shared keys."""
    return content([uid * 100 + number for number in SHARED])


def store(client: KvClient, namespace: Namespace, uid: int) -> str:
    """Store blocks under the shared keys; say how many were there, and where ours are."""
    there = namespace.lookup(keys(SHARED)).prefix_count + namespace.lookup_local(keys(SHARED)).prefix_count
    stored = namespace.put(keys(SHARED), own(uid)).stored_count
    lease = namespace.acquire(keys(SHARED))
    assert lease is not None
    segments = ",".join(str(number) for number in sorted(set(lease.slots.segments.tolist())))
    client.release([lease])
    return f"there {there} stored {stored} in {segments} token {client.attachment.session_token.hex()}"


def check(namespace: Namespace, uid: int) -> str:
    """Hold what is stored under the shared keys to what we stored."""
    into = np.zeros((len(SHARED), BLOCK_BYTES), np.uint8)
    found = namespace.get(keys(SHARED), into).prefix_count
    return f"found {found} {'ours' if np.array_equal(into[:found], own(uid)[:found]) else 'of others'}"


def steal(endpoint: str, segments: str, token: str) -> str:
    """Ask for memory of others by hand, and for their session."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(5.0)
        connection.connect(endpoint.removeprefix("unix:"))
        attach = session_service_pb2.AttachRequest(
            engine_incarnation=bytes(16), resume_token=bytes.fromhex(token)
        )
        attached = session_service_pb2.AttachResponse.FromString(
            asked(connection, Method.ATTACH, attach).body
        )
        wanted = [int(number) for number in segments.split(",")]
        refused = asked(connection, Method.MAP_SEGMENTS, local_lane_pb2.MapSegmentsRequest(segments=wanted))
        assert refused.kind is FrameKind.ERROR
        return f"resumed {attached.resumed} as {attached.tenant} {decode_error(refused.body).message}"


def asked(connection: socket.socket, method: Method, request) -> Frame:
    """Send a request and return its answer."""
    connection.sendall(encode(FrameKind.REQUEST, method, 1, 0, request.SerializeToString()))
    reader, frames = FrameReader(), []
    while not frames:
        received = connection.recv(1 << 16)
        assert received, "hung up on without a word"
        frames = reader.feed(received)
    return frames[0]


def main(uid: int, endpoint: str) -> None:
    """Say as whom we were let in, or why not; then obey."""
    try:
        client = KvClient.connect(settings_of(endpoint, client_name=f"user {uid}"))
    except KvError as error:
        say(f"{type(error).__name__}: {error.message}")
        return
    with client:
        say(f"tenant {client.attachment.tenant}")
        namespace = open_namespace(client)
        for line in sys.stdin:
            verb, *arguments = line.split()
            if verb == "store":
                say(store(client, namespace, uid))
            elif verb == "check":
                say(check(namespace, uid))
            elif verb == "purge":
                say(f"purged {client.purge(namespace)}")
            elif verb == "hold":
                say(f"holds {len(namespace.reserve(keys(range(100, 108))).granted)}")
            else:
                say(steal(endpoint, *arguments))


if __name__ == "__main__":
    become(int(sys.argv[1]), [int(group) for group in sys.argv[2].split(",")])
    main(int(sys.argv[1]), sys.argv[3])
