"""One-sided reads within one process: for tests, simulation, and embedded use."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterable

import numpy as np

from kvservice import native
from kvservice.core.engine_memory import EngineSegment, MemoryKind, SegmentWay
from kvservice.core.errors import DeadlineError, InvalidFieldError, NoWayError, PeerUnavailableError
from kvservice.core.slots import U64
from kvservice.ports.lanes import LaneReport
from kvservice.ports.one_sided import RemoteRead
from kvservice.transports.read_bounds import check_read

TRANSPORT = "inproc"

_NUMBER_BYTES = 8


class InprocMemoryHub:
    """What the endpoints of one process lend to each other. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._numbers = itertools.count(1)
        self._lent: dict[int, tuple[int, int]] = {}

    def endpoint(self) -> InprocEndpoint:
        """Return a new endpoint."""
        return InprocEndpoint(self)

    def add(self, address: int, size_bytes: int) -> int:
        """Lend memory; return its number."""
        with self._lock:
            number = next(self._numbers)
            self._lent[number] = (address, size_bytes)
            return number

    def remove(self, number: int) -> None:
        """Lend it no more. Idempotent."""
        with self._lock:
            self._lent.pop(number, None)

    def find(self, number: int) -> tuple[int, int] | None:
        """Return address and size of what is lent; None if it is not any more."""
        with self._lock:
            return self._lent.get(number)


class InprocLent:
    """Memory lent to other endpoints of the process."""

    def __init__(self, hub: InprocMemoryHub, address: int, size_bytes: int, lent: set[InprocLent]) -> None:
        """Lend it. lent: what an endpoint lends; it stands there until it is closed."""
        self._hub = hub
        self._number = hub.add(address, size_bytes)
        self._lent = lent
        lent.add(self)

    @property
    def ways(self) -> tuple[SegmentWay, ...]:
        """See LentMemory."""
        return (SegmentWay(TRANSPORT, b"", self._number.to_bytes(_NUMBER_BYTES, "little")),)

    def close(self) -> None:
        """See LentMemory."""
        self._hub.remove(self._number)
        self._lent.discard(self)


class InprocEndpoint:
    """`ports.one_sided.OneSided` over the memory of this process."""

    def __init__(self, hub: InprocMemoryHub) -> None:
        self._hub = hub
        self._lent: set[InprocLent] = set()
        self._is_closed = False

    @property
    def transport(self) -> str:
        """See OneSided."""
        return TRANSPORT

    @property
    def lent_count(self) -> int:
        """Number of segments that it lends."""
        return len(self._lent)

    def lend(self, address: int, size_bytes: int, kind: MemoryKind) -> InprocLent:
        """See OneSided."""
        self._check_open()
        if kind is not MemoryKind.HOST:
            raise InvalidFieldError("the in-process endpoint lends memory of the host only")
        if not address or not size_bytes:
            raise InvalidFieldError(f"{size_bytes} bytes at {address:#x} is no memory to lend")
        return InprocLent(self._hub, address, size_bytes, self._lent)

    def read(self, read: RemoteRead) -> None:
        """See OneSided."""
        self._check_open()
        check_read(read)
        if read.timeout_s <= 0:
            raise DeadlineError(f"a read was to be done within {read.timeout_s:.3f} s; none of it was posted")
        bases: U64 = np.array([self._base(segment) for segment in read.segments], np.uint64)
        native.copy_blocks(
            read.addresses, bases[read.segment_indexes] + read.offsets, read.lengths, None, None
        )
        for segment in read.segments:
            self._base(segment)  # Still lent: what was read while it was taken back is nothing.

    def describe(self, segment: EngineSegment, timeout_s: float) -> tuple[str, ...]:
        """See OneSided."""
        self._base(segment)
        return ("a copy within the process",)

    def lanes(self) -> tuple[LaneReport, ...]:
        """See OneSided."""
        return ()

    def close(self) -> None:
        """See OneSided."""
        self._is_closed = True
        for lent in list(self._lent):
            lent.close()

    def _base(self, segment: EngineSegment) -> int:
        found = self._hub.find(_number_of(segment.ways))
        if found is None or found != (segment.base_address, segment.size_bytes):
            raise PeerUnavailableError("the memory is lent no more; look the blocks up, or compute them")
        return found[0]

    def _check_open(self) -> None:
        if self._is_closed:
            raise PeerUnavailableError("the in-process endpoint was closed")


def _number_of(ways: Iterable[SegmentWay]) -> int:
    for way in ways:
        if way.transport == TRANSPORT:
            return int.from_bytes(way.key, "little")
    raise NoWayError(f"no way of the transport {TRANSPORT!r} leads to the segment")
