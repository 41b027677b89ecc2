"""Another process as one lane sees it: endpoints, attached segments, and whether it still lives.

On this host there are two endpoints. CMA does the work by the one that UCX does not watch;
the other, over tcp, is watched and stands by, since only it learns that the peer is gone. To
another host there is one, watched, since whatever hangs on it can be cut off.
"""

from __future__ import annotations

import os
import re
import select
import threading
import time
from dataclasses import dataclass

from kvservice.core.engine_memory import EngineSegment, SegmentWay
from kvservice.core.errors import InvalidFieldError, MalformedError, NoWayError, PeerUnavailableError
from kvservice.native import ucx
from kvservice.transports.ucx.address import PeerAddress, started_ticks
from kvservice.transports.ucx.chunks import parse_keys

_LANE = re.compile(r"lane\[\d+\]: +\d+:(\S+?)\.\d+ .*? seg \d+ *(.*)")

ONE_COPY = "cma"
"""How UCX's description of an endpoint names the transport that needs no other side."""


@dataclass(frozen=True, slots=True)
class Attached:
    """The chunks of a segment, in order, with their lengths in bytes."""

    lengths: tuple[int, ...]
    chunks: tuple[ucx.RemoteSegment, ...]


class Peer:
    """One connected process. Thread-safe."""

    def __init__(self, worker: ucx.Worker, address: bytes, deadline_ns: int) -> None:
        """Connect, and see by which transports UCX goes.

        Raises:
            MalformedError: it is no address.
            PeerUnavailableError: the process is gone, or does not answer by `deadline_ns`.
            NoWayError: UCX has no one-sided operations to it.
        """
        found = PeerAddress.parse(address)
        self._lock = threading.Lock()
        self._segments: dict[tuple[bytes, int, int], Attached] = {}
        self._pidfd = -1
        if found.is_here:
            self._pidfd = _open_process(found)
        try:
            self.watched = worker.connect(found.packed, is_watched=True)
            _wire(self.watched, deadline_ns)
            self.data = self.watched
            if found.is_here:
                self.data = self._unwatched(worker, found, deadline_ns)
            if not found.by_messages:
                _check_one_sided(self.data.describe())
        except BaseException:
            self.close()
            raise

    def _unwatched(self, worker: ucx.Worker, found: PeerAddress, deadline_ns: int) -> ucx.Endpoint:
        """Return the endpoint for data on this host: CMA's, if UCX takes it; else the watched one.

        One that is not watched and goes over anything else could hang and not be cut off.
        """
        endpoint = worker.connect(found.packed, is_watched=False)
        if endpoint.wire(deadline_ns) and ONE_COPY in endpoint.describe():
            return endpoint
        endpoint.close()
        return self.watched

    @property
    def is_alive(self) -> bool:
        """Whether nothing has been heard of its end; looked at before each use."""
        if self.watched.failure is not None or self.watched.is_closed or self.data.failure is not None:
            return False
        return self._pidfd < 0 or not _has_ended(self._pidfd)

    def attach(self, segment: EngineSegment, way: SegmentWay) -> Attached:
        """Return the chunks of the segment, ready to read; attached once.

        Raises:
            PeerUnavailableError: the key is not one of the peer's, or not for this memory.
        """
        key = (way.key, segment.base_address, segment.size_bytes)
        with self._lock:
            attached = self._segments.get(key)
            if attached is None:
                try:
                    attached = self._attach(segment, way)
                except (MalformedError, ValueError) as error:
                    raise InvalidFieldError(f"the key of a segment cannot be used: {error}") from error
                except ucx.UcxError as error:
                    raise PeerUnavailableError(f"the segment cannot be attached: {error}") from error
                self._segments[key] = attached
            return attached

    def _attach(self, segment: EngineSegment, way: SegmentWay) -> Attached:
        found = parse_keys(way.key, segment.size_bytes)
        place, chunks = segment.base_address, []
        for length, key in found:
            chunks.append(self.data.attach(key, place, length))
            place += length
        return Attached(tuple(length for length, _ in found), tuple(chunks))

    def close(self) -> None:
        """Let go of it; transfers under way are stopped. Idempotent."""
        for name in ("data", "watched"):
            endpoint: ucx.Endpoint | None = getattr(self, name, None)
            if endpoint is not None:
                endpoint.close()
        pidfd, self._pidfd = self._pidfd, -1
        if pidfd >= 0:
            os.close(pidfd)


def _wire(endpoint: ucx.Endpoint, deadline_ns: int) -> None:
    if not endpoint.wire(deadline_ns):
        raise PeerUnavailableError(f"the process does not answer: {endpoint.failure or 'no word in time'}")


def _open_process(found: PeerAddress) -> int:
    """Return a pidfd of the process that an address names, and of no later one with its number."""
    try:
        pidfd = os.pidfd_open(found.pid)
    except OSError as error:
        raise PeerUnavailableError(f"process {found.pid} is gone") from error
    if started_ticks(found.pid) != found.started_ticks:
        os.close(pidfd)
        raise PeerUnavailableError(f"process {found.pid} is gone; its number is another's by now")
    return pidfd


def _has_ended(pidfd: int) -> bool:
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    return bool(poll.poll(0))


def _check_one_sided(description: str) -> None:
    """Raise NoWayError where reads would be made of messages that the lender does not want."""
    if not any("rma" in uses for _, uses in _LANE.findall(description)):
        raise NoWayError(
            f"no one-sided operation leads to the process, only {devices_of(description)}, which could end "
            "it: read the blocks out of the arena, or let it be read so (one_sided.by_messages)"
        )


def devices_of(description: str) -> str:
    """Return the transports and devices that do one-sided operations, out of UCX's words on an endpoint.

    Where none does, UCX makes them out of messages, and the other side has to take part.
    """
    one_sided, messages = [], []
    for transport, uses in _LANE.findall(description):
        if "rma" in uses:
            one_sided.append(transport)
        elif "am" in uses.split():
            messages.append(transport)
    return ", ".join(one_sided) or f"{', '.join(messages)} (by messages)"


def deadline_after(timeout_s: float) -> int:
    """Return a deadline by CLOCK_MONOTONIC, in nanoseconds."""
    return time.monotonic_ns() + int(timeout_s * 1e9)
