"""To a daemon's arena: by each transport that it offers, through the client that engines use."""

from __future__ import annotations

import dataclasses
import os
import statistics
import time
from pathlib import Path

import numpy as np

from kvclient import ClientSettings, Identity, KvError, Part, Shape
from kvclient.fallback import FallbackTransport
from kvclient.sync import KvClient, Namespace
from kvservice.cli.doctor_report import Wire
from kvservice.ports.transport import Transport
from kvservice.transports.one_sided import EndpointSettings

TO = "the arena of the daemon"
BLOCK_BYTES = 1 << 20
SMALL_BYTES = 4096
KEY_BYTES = 32
REPEATS = 3
LATENCY_REPEATS = 50
ARENA_SHARE = 4
"""The doctor fills a quarter of an arena at most: it is there while others work."""


def peer_wires(
    endpoint: str | None, token: str, settings: EndpointSettings, *, size_bytes: int
) -> list[Wire]:
    """Measure each way to a daemon. Raises KvError where there is none."""
    asked = ClientSettings(client_name="kvservice doctor", token=token, one_sided=settings)
    if endpoint:
        asked = dataclasses.replace(asked, endpoint=endpoint)
    with KvClient.connect(asked) as client:
        offered = {each.name: each.address for each in client.capabilities().transports}
        life = client.attachment.daemon_incarnation
        size_bytes = min(size_bytes, client.attachment.limits.arena_bytes // ARENA_SHARE)
        if asked.lane_path:
            wires = [_measured(client, "shm", asked.lane_path, "the daemon is on this host", size_bytes)]
            wires += [
                Wire(
                    TO,
                    name,
                    address,
                    is_usable=False,
                    is_selected=False,
                    why="for clients elsewhere; name --endpoint grpc://HOST:PORT to measure it",
                )
                for name, address in offered.items()
                if name != "shm"
            ]
            return wires
        wires = [_shared_memory(offered.get("shm", ""), life, asked)]
        wires += _remote(client, asked, offered, size_bytes)
        return wires


def _shared_memory(socket_path: str, life: bytes, asked: ClientSettings) -> Wire:
    """Say whether shared memory could be had instead."""
    why = "the daemon is on another host: its socket is not here"
    if not socket_path:
        why = "the daemon has no local lane"
    elif Path(socket_path).is_socket():
        try:
            with KvClient.connect(dataclasses.replace(asked, endpoint=f"unix:{socket_path}")) as client:
                if client.attachment.daemon_incarnation == life:
                    why = f"it is on this host, and faster: name --endpoint unix:{socket_path}"
        except KvError as error:
            why = f"its socket is here, but {error.message}"
    return Wire(TO, "shm", socket_path, is_usable=False, is_selected=False, why=why)


def _measured(client: KvClient, name: str, details: str, why: str, size_bytes: int) -> Wire:
    try:
        write_gbps, read_gbps = _rates(client, size_bytes)
        latency_us = _latency_us(client)
    except KvError as error:
        return Wire(TO, name, details, is_usable=False, is_selected=True, why=f"it fails: {error}")
    return Wire(
        TO,
        name,
        details,
        is_usable=True,
        is_selected=True,
        why=why,
        write_gbps=write_gbps,
        read_gbps=read_gbps,
        latency_us=latency_us,
    )


def _open(client: KvClient, block_bytes: int) -> Namespace:
    """Return a namespace that nobody else has, by its salt."""
    identity = Identity(
        model_id="kvservice doctor",
        weights_revision="1",
        layers_count=1,
        kv_heads_count=1,
        k_head_dim=1,
        hash_tokens=1,
    )
    shape = Shape(dtype="uint8", kv_packing="opaque", block_tokens=1)
    part = Part(layers_count=1, heads_count=1, shape=shape, block_bytes=block_bytes)
    return client.open_namespace(identity, [part], salt=os.urandom(16))


def _rates(client: KvClient, size_bytes: int) -> tuple[float, float]:
    """Return GB/s of writing and of reading; what was written is dropped again."""
    count = max(1, size_bytes // BLOCK_BYTES)
    namespace = _open(client, BLOCK_BYTES)
    memory = np.ones(count * BLOCK_BYTES, np.uint8)
    writes, reads = [], []
    for _ in range(REPEATS):
        keys = os.urandom(count * KEY_BYTES)
        begun_s = time.perf_counter()
        namespace.put(keys, memory)
        wrote_s = time.perf_counter()
        hits_count = namespace.get(keys, memory).prefix_count
        reads.append(time.perf_counter() - wrote_s)
        writes.append(wrote_s - begun_s)
        client.purge(namespace)
        if hits_count != count:
            raise KvError(f"{count - hits_count} of {count} blocks were gone at once: the arena is too full")
    moved = count * BLOCK_BYTES / 1e9
    return moved / statistics.median(writes), moved / statistics.median(reads)


def _latency_us(client: KvClient) -> float:
    namespace = _open(client, SMALL_BYTES)
    key, memory = os.urandom(KEY_BYTES), np.ones(SMALL_BYTES, np.uint8)
    namespace.put(key, memory)
    costs = []
    for _ in range(LATENCY_REPEATS):
        begun_s = time.perf_counter()
        namespace.get(key, memory)
        costs.append(time.perf_counter() - begun_s)
    client.purge(namespace)
    return statistics.median(costs) * 1e6


def _remote(client: KvClient, asked: ClientSettings, offered: dict[str, str], size_bytes: int) -> list[Wire]:
    """Measure what a client elsewhere could use; one of them is what it does use."""
    selected = client.wire.capabilities.name
    wires = []
    for name, address in offered.items():
        if name == "shm":
            continue
        try:
            with KvClient.connect(dataclasses.replace(asked, arena_transport=name)) as other:
                wire = _measured(other, name, address, _reason(name, selected), size_bytes)
                wire = dataclasses.replace(wire, is_selected=name == selected)
                wires.append(_without_fallback(wire, other.wire))
        except KvError as error:
            wires.append(
                Wire(TO, name, address, is_usable=False, is_selected=name == selected, why=str(error))
            )
    return wires


def _reason(name: str, selected: str) -> str:
    if name == selected:
        return "what a client with these settings uses"
    if name == "tcp":
        return "one-sided reads are faster here"
    return "both hosts would need RDMA devices: over tcp, sockets are faster (arena_transport overrides)"


def _without_fallback(wire: Wire, transport: Transport) -> Wire:
    """What was measured while reads went by another transport says nothing of this one."""
    if not isinstance(transport, FallbackTransport):
        return wire
    if transport.fallbacks_count:
        why = "reads fail by it and go over tcp instead; the warning above says why"
        return dataclasses.replace(
            wire, is_usable=False, why=why, read_gbps=None, write_gbps=None, latency_us=None
        )
    # One-sided writes are for the daemon's own host, so others write over tcp.
    return dataclasses.replace(wire, write_gbps=None)
