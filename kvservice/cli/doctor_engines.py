"""Between two engines of this host: another process lends memory, and this one reads it."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time

import numpy as np

from kvservice.cli.doctor_report import Wire
from kvservice.core.engine_memory import EngineSegment, MemoryKind, SegmentWay
from kvservice.core.errors import KvError
from kvservice.ports.lanes import LaneReport
from kvservice.ports.one_sided import OneSided, RemoteRead
from kvservice.transports.one_sided import EndpointSettings, make_endpoint, usable_transports

TO = "another engine of this host"
BLOCK_BYTES = 1 << 20
SMALL_BYTES = 4096
TIMEOUT_S = 20.0
REPEATS = 5
LATENCY_REPEATS = 200
LENDER_STOP_S = 5.0


def engine_wires(settings: EndpointSettings, *, size_bytes: int) -> list[Wire]:
    """Measure the one-sided transport between this process and a child."""
    if not usable_transports(settings):
        why = _why_not(settings)
        return [Wire(TO, settings.transport or "none", "", is_usable=False, is_selected=False, why=why)]
    try:
        return [_measured(settings, size_bytes - size_bytes % BLOCK_BYTES)]
    except (KvError, OSError, ValueError) as error:
        return [Wire(TO, settings.transport, "", is_usable=False, is_selected=False, why=str(error))]


def _why_not(settings: EndpointSettings) -> str:
    try:
        make_endpoint(settings)
    except KvError as error:
        return error.message
    return "the settings name no transport"


def _measured(settings: EndpointSettings, size_bytes: int) -> Wire:
    command = [sys.executable, "-m", "kvservice.cli.lend_memory", str(size_bytes)]
    command += [settings.transport, settings.library, settings.transports, settings.devices]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as lender:
        try:
            said = lender.stdout.readline() if lender.stdout is not None else ""
            if not said:
                raise OSError("the other process ended before it lent anything")
            segment = _segment_of(json.loads(said))
            endpoint = make_endpoint(settings)
            if endpoint is None:
                raise ValueError("the settings name no transport")
            try:
                return _wire(endpoint, segment)
            finally:
                endpoint.close()
        finally:
            if lender.stdin is not None:
                lender.stdin.close()
            try:
                lender.wait(LENDER_STOP_S)
            except subprocess.TimeoutExpired:
                lender.kill()


def _segment_of(said: dict[str, object]) -> EngineSegment:
    ways = said["ways"]
    if not isinstance(ways, list):
        raise TypeError("the other process said nothing of its ways")
    return EngineSegment(
        int(str(said["address"])),
        int(str(said["size_bytes"])),
        MemoryKind.HOST,
        tuple(SegmentWay(name, bytes.fromhex(address), bytes.fromhex(key)) for name, address, key in ways),
    )


def _wire(endpoint: OneSided, segment: EngineSegment) -> Wire:
    into = np.zeros(segment.size_bytes, np.uint8)
    large = _read_of(segment, into, BLOCK_BYTES, segment.size_bytes // BLOCK_BYTES)
    small = _read_of(segment, into, SMALL_BYTES, 1)
    endpoint.read(large)  # Connects, and touches our pages.
    took_s = statistics.median(_timed(endpoint, large) for _ in range(REPEATS))
    latency_s = statistics.median(_timed(endpoint, small) for _ in range(LATENCY_REPEATS))
    details = "; ".join([*endpoint.describe(segment, TIMEOUT_S), *map(_troubles, endpoint.lanes())])
    return Wire(
        TO,
        endpoint.transport,
        details,
        is_usable=True,
        is_selected=True,
        why="used for direct handoffs",
        read_gbps=segment.size_bytes / took_s / 1e9,
        latency_us=latency_s * 1e6,
    )


def _troubles(lane: LaneReport) -> str:
    totals = lane.totals
    return (
        f"{totals.errors_count} errors and {totals.stalls_count} stalls ({totals.stalled_ns / 1e6:.0f} ms) "
        f"in {totals.transfers_count} transfers"
    )


def _read_of(segment: EngineSegment, into: np.ndarray, block_bytes: int, count: int) -> RemoteRead:
    offsets = np.arange(count, dtype=np.uint64) * np.uint64(block_bytes)
    return RemoteRead(
        (segment,),
        np.zeros(count, np.uint32),
        offsets,
        offsets + np.uint64(into.__array_interface__["data"][0]),
        np.full(count, block_bytes, np.uint64),
        TIMEOUT_S,
    )


def _timed(endpoint: OneSided, read: RemoteRead) -> float:
    begun_s = time.perf_counter()
    endpoint.read(read)
    return time.perf_counter() - begun_s
