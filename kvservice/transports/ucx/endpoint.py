"""The UCX endpoint of a process: `ports.one_sided.OneSided` over one lane or several."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np

from kvservice.core.engine_memory import EngineSegment, MemoryKind, SegmentWay
from kvservice.core.errors import InvalidFieldError, NoWayError, PeerUnavailableError
from kvservice.core.slots import I64, U64
from kvservice.native import ucx
from kvservice.ports.lanes import LaneReport
from kvservice.ports.one_sided import RemoteRead
from kvservice.transports.lane_statistics import clock_ns
from kvservice.transports.one_sided import EndpointSettings
from kvservice.transports.read_bounds import check_read
from kvservice.transports.ucx.chunks import chunk_lengths, pack_keys
from kvservice.transports.ucx.lane import I32, Lane
from kvservice.transports.ucx.peer import deadline_after, devices_of

TRANSPORT = "ucx"
LANES_LIMIT = 8
LANE_SEPARATOR = ";"


class UcxLent:
    """Memory registered with every lane."""

    def __init__(
        self, lanes: Sequence[Lane], address: int, size_bytes: int, kind: MemoryKind, *, limit_bytes: int
    ) -> None:
        self._registered: list[ucx.Registration] = []
        lengths = chunk_lengths(size_bytes, limit_bytes)
        keys: list[bytes] = []
        try:
            for lane in lanes:
                made = self._register(lane, address, lengths, kind)
                keys.append(pack_keys(lengths, [each.rkey for each in made]))
        except (ucx.UcxError, ValueError) as error:
            self.close()
            raise InvalidFieldError(f"{size_bytes} bytes at {address:#x} cannot be lent: {error}") from error
        self._ways = tuple(
            SegmentWay(TRANSPORT, lane.address, key) for lane, key in zip(lanes, keys, strict=True)
        )

    def _register(
        self, lane: Lane, address: int, lengths: Sequence[int], kind: MemoryKind
    ) -> list[ucx.Registration]:
        made: list[ucx.Registration] = []
        for length in lengths:
            made.append(lane.register(address, length, kind))
            self._registered.append(made[-1])
            address += length
        return made

    @property
    def ways(self) -> tuple[SegmentWay, ...]:
        """See LentMemory."""
        return self._ways

    def close(self) -> None:
        """See LentMemory."""
        for registered in self._registered:
            registered.close()


@dataclass(frozen=True, slots=True)
class _Group:
    """Operations of a transfer that go to one process.

    operations: (n,) int64 into the transfer. segments: into the transfer's segments.
    """

    operations: I64
    segments: list[int]
    is_put: bool


class UcxEndpoint:
    """Lends memory of this process and reads that of others. Thread-safe.

    Several lanes share the operations of a read by their bytes. What fails on one is tried on
    the next, and counted; a read fails when it has failed on all.
    """

    def __init__(self, settings: EndpointSettings) -> None:
        """Load the library and open the lanes. Raises NoWayError."""
        devices = settings.devices.split(LANE_SEPARATOR)
        if len(devices) > LANES_LIMIT:
            raise InvalidFieldError(f"devices names {len(devices)} lanes; at most {LANES_LIMIT} are allowed")
        self._lanes: list[Lane] = []
        self._registration_bytes = settings.registration_bytes
        self._pool: ThreadPoolExecutor | None = None
        self._lock = threading.Lock()
        self._is_closed = False
        try:
            ucx.load(settings.library)
            for index, names in enumerate(devices):
                config = {"TLS": settings.transports, "NET_DEVICES": names}
                config = dict(ucx.CMA_SETTINGS) | {name: value for name, value in config.items() if value}
                self._lanes.append(Lane(config, names or str(index), by_messages=settings.by_messages))
        except ucx.UcxError as error:
            self.close()
            raise NoWayError(f"ucx cannot be used here: {error}") from error

    @property
    def transport(self) -> str:
        """See OneSided."""
        return TRANSPORT

    def lanes(self) -> tuple[LaneReport, ...]:
        """See OneSided."""
        now_ns = clock_ns()
        return tuple(
            LaneReport(lane.name, lane.statistics.totals(), lane.statistics.windows(now_ns))
            for lane in self._lanes
        )

    def lend(self, address: int, size_bytes: int, kind: MemoryKind) -> UcxLent:
        """See OneSided."""
        if self._is_closed:
            raise PeerUnavailableError("the endpoint was closed")
        if not address or not size_bytes:
            raise InvalidFieldError(f"{size_bytes} bytes at {address:#x} is no memory to lend")
        return UcxLent(self._lanes, address, size_bytes, kind, limit_bytes=self._registration_bytes)

    def read(self, read: RemoteRead) -> None:
        """See OneSided."""
        self._run(read, is_put=False)

    def write(self, write: RemoteRead) -> None:
        """Store bytes: the operations of a read the other way round, from `addresses` to the segments.

        When it returns, all of them are in place. When it raises, some may be, and some may still be on
        their way: the side whose memory it is must cut this process off before it uses that memory again.

        Raises: as `read`.
        """
        self._run(write, is_put=True)

    def _run(self, read: RemoteRead, *, is_put: bool) -> None:
        check_read(read)
        if self._is_closed:
            raise PeerUnavailableError("the endpoint was closed")
        if not len(read.lengths):
            return
        deadline_ns = deadline_after(read.timeout_s)
        if len(self._lanes) == len(read.segments) == 1:
            self._move_plain(read, deadline_ns, is_put=is_put)
            return
        for group in _groups(read, is_put=is_put):
            self._move_group(read, group, deadline_ns)

    def describe(self, segment: EngineSegment, timeout_s: float) -> tuple[str, ...]:
        """See OneSided."""
        ways = _ways(segment)
        return tuple(
            f"lane {lane.name}: {devices_of(lane.describe(way.address, timeout_s))}"
            for lane, way in zip(self._lanes, ways, strict=False)
        )

    def close(self) -> None:
        """See OneSided."""
        with self._lock:
            self._is_closed = True
            pool, self._pool = self._pool, None
        if pool is not None:
            pool.shutdown()
        for lane in self._lanes:
            lane.close()

    def _move_plain(self, read: RemoteRead, deadline_ns: int, *, is_put: bool) -> None:
        """Do what `_move_group` does where there is one lane and one segment: sorting would cost more."""
        segment = read.segments[0]
        statuses = self._lanes[0].move(
            [(segment, _ways(segment)[0])],
            read.segment_indexes,
            read.offsets + np.uint64(segment.base_address),
            read.addresses,
            read.lengths,
            is_put=is_put,
            deadline_ns=deadline_ns,
        )
        if statuses.any():
            raise _lost(int(np.count_nonzero(statuses)), len(statuses))

    def _move_group(self, read: RemoteRead, group: _Group, deadline_ns: int) -> None:
        ways_count = min(len(_ways(read.segments[index])) for index in group.segments)
        lanes_count = min(len(self._lanes), ways_count)
        shares = [group.operations]
        if lanes_count > 1:
            shares = _shares(read.lengths, group.operations, lanes_count)
        failed = self._on_all(read, group, shares, deadline_ns)
        # A lane that failed leaves its operations to the next one, once around. Not those of a put, whose
        # bytes may still be on their way over the first, and would arrive when the memory is another's.
        for turn in range(1, 1 if group.is_put else lanes_count):
            if not any(len(some) for some in failed):
                return
            moved = [failed[(index - turn) % lanes_count] for index in range(lanes_count)]
            left = self._on_all(read, group, moved, deadline_ns)
            failed = [left[(index + turn) % lanes_count] for index in range(lanes_count)]
        lost_count = sum(len(some) for some in failed)
        if lost_count:
            raise _lost(lost_count, len(group.operations))

    def _on_all(self, read: RemoteRead, group: _Group, shares: Sequence[I64], deadline_ns: int) -> list[I64]:
        """Run a share on each lane, at the same time; return what failed on each."""
        if len(shares) == 1:
            return [self._on_lane(0, read, group, shares[0], deadline_ns)]
        with self._lock:
            if self._is_closed:
                raise PeerUnavailableError("the endpoint was closed")
            if self._pool is None:
                self._pool = ThreadPoolExecutor(len(self._lanes), "kvservice-ucx-read")
            running = [
                self._pool.submit(self._on_lane, index, read, group, share, deadline_ns)
                for index, share in enumerate(shares)
            ]
        errors = [future.exception() for future in running]  # All have ended before anything is raised.
        for error in errors:
            if error is not None:
                raise error
        return [future.result() for future in running]

    def _on_lane(self, index: int, read: RemoteRead, group: _Group, operations: I64, deadline_ns: int) -> I64:
        """Run operations on one lane; return those that failed. Raises DeadlineError."""
        if not len(operations):
            return operations
        lane = self._lanes[index]
        numbers = np.zeros(len(read.segments), np.uint32)
        numbers[group.segments] = np.arange(len(group.segments), dtype=np.uint32)
        bases: U64 = np.array([segment.base_address for segment in read.segments], np.uint64)
        of_segment = read.segment_indexes[operations]
        segments = [(read.segments[place], _ways(read.segments[place])[index]) for place in group.segments]
        try:
            statuses: I32 = lane.move(
                segments,
                numbers[of_segment],
                bases[of_segment] + read.offsets[operations],
                read.addresses[operations],
                read.lengths[operations],
                is_put=group.is_put,
                deadline_ns=deadline_ns,
            )
        except PeerUnavailableError:
            if len(self._lanes) == 1:
                raise
            now_ns = clock_ns()
            lane.statistics.add(
                now_ns, now_ns, size_bytes=0, operations_count=0, errors_count=len(operations)
            )
            return operations
        failed: I64 = operations[statuses != 0]
        return failed


def _lost(lost_count: int, count: int) -> PeerUnavailableError:
    return PeerUnavailableError(
        f"{lost_count} of {count} operations on another process's memory failed on every lane: the process "
        "is gone, or lends the memory no more"
    )


def _ways(segment: EngineSegment) -> list[SegmentWay]:
    ways = [way for way in segment.ways if way.transport == TRANSPORT]
    if not ways:
        raise NoWayError(f"no way of the transport {TRANSPORT!r} leads to the segment")
    return ways


def _groups(read: RemoteRead, *, is_put: bool) -> list[_Group]:
    """Sort the operations of a transfer by the process that they go to: in most transfers there is one."""
    by_address: dict[bytes, list[int]] = {}
    used = np.unique(read.segment_indexes).tolist()
    for index in used:
        by_address.setdefault(_ways(read.segments[index])[0].address, []).append(index)
    if len(by_address) == 1:
        return [_Group(np.arange(len(read.lengths)), used, is_put)]
    return [
        _Group(np.flatnonzero(np.isin(read.segment_indexes, places)), places, is_put)
        for places in by_address.values()
    ]


def _shares(lengths: U64, operations: I64, count: int) -> list[I64]:
    """Cut operations into runs of about as many bytes each."""
    ends = np.cumsum(lengths[operations])
    cuts = np.searchsorted(ends, ends[-1] * np.arange(1, count) // count)
    return list(np.split(operations, cuts))
