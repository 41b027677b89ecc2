"""One lane: a UCX worker over some devices, its serving thread, and the peers that it reaches."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from kvservice.core.engine_memory import EngineSegment, MemoryKind, SegmentWay
from kvservice.core.errors import DeadlineError, PeerUnavailableError
from kvservice.core.slots import I64, U32, U64
from kvservice.native import ucx
from kvservice.transports.lane_statistics import LaneStatistics, clock_ns
from kvservice.transports.ucx.address import PeerAddress
from kvservice.transports.ucx.chunks import Chunking, joined
from kvservice.transports.ucx.peer import Peer, deadline_after

WINDOW = 64
"""Operations outstanding at once: enough to hide a network's latency behind 64 KiB blocks."""

PEERS_LIMIT = 256
"""Peers of a lane; the one that was used longest ago makes room."""

I32 = npt.NDArray[np.int32]

_log = logging.getLogger(__name__)


class Lane:
    """Thread-safe.

    config: UCX's settings by name, without UCX_. by_messages: see EndpointSettings.
    """

    def __init__(self, config: dict[str, str], name: str, *, by_messages: bool) -> None:
        """Open the worker and begin to serve. Raises UcxError."""
        self.name = name
        self.statistics = LaneStatistics()
        self._worker = ucx.Worker(config)
        self.address = PeerAddress.of_this_process(self._worker.address, by_messages=by_messages).encode()
        self._peers: dict[bytes, Peer] = {}
        self._lock = threading.Lock()
        self._stop = os.eventfd(0, os.EFD_CLOEXEC)
        # Others' requests (over tcp) and their disappearance are dealt with here, asleep otherwise.
        self._server = threading.Thread(
            target=self._worker.serve, args=(self._stop,), name=f"kvservice-ucx-{name}", daemon=True
        )
        self._server.start()

    def register(self, address: int, size_bytes: int, kind: MemoryKind) -> ucx.Registration:
        """Let peers reach memory by this lane. Raises UcxError."""
        return self._worker.register(address, size_bytes, "host" if kind is MemoryKind.HOST else "cuda")

    def describe(self, address: bytes, timeout_s: float) -> str:
        """Return UCX's words on the transports that it takes to a peer. Raises as `read`."""
        return self._peer(address, deadline_after(timeout_s)).data.describe()

    def move(
        self,
        segments: Sequence[tuple[EngineSegment, SegmentWay]],
        indexes: U32,
        remote: U64,
        local: U64,
        lengths: U64,
        *,
        is_put: bool,
        deadline_ns: int,
    ) -> I32:
        """Run the operations of one peer; return a status for each, 0 for what has arrived.

        segments: all of one peer. remote, local: (operations,) uint64 addresses.

        Raises:
            PeerUnavailableError: it is gone; nothing was read, and what of a put arrived is not known.
            DeadlineError: the deadline passed; what has no status 0 has not arrived.
        """
        peer = self._peer(segments[0][1].address, deadline_ns)
        attached = [peer.attach(segment, way) for segment, way in segments]
        chunks = [chunk for each in attached for chunk in each.chunks]
        parts: I64 | None = None
        if len(chunks) > len(segments):
            bases = [segment.base_address for segment, _ in segments]
            chunking = Chunking.of(bases, [each.lengths for each in attached])
            cut, parts = chunking.cut(indexes, remote, local, lengths)
            indexes, remote, local, lengths = cut.chunks, cut.remote, cut.local, cut.lengths
        statuses: I32 = np.full(len(lengths), ucx.STATUS_NOT_POSTED, np.int32)
        begun_ns = clock_ns()
        try:
            outcome = self._worker.transfer(
                is_put=is_put,
                segments=chunks,
                segment_indexes=indexes,
                local=local,
                remote=remote,
                lengths=lengths,
                statuses=statuses,
                window=WINDOW,
                deadline_ns=deadline_ns,
                watched=peer.watched if peer.watched is not peer.data else None,
            )
        except ucx.UnsettledError as error:
            # Only without its worker can nothing write to the caller's memory any more.
            self.close()
            _log.error("lane %s is given up, with all that is lent by it: %s", self.name, error)
            raise PeerUnavailableError(f"lane {self.name} had to be given up: {error}") from error
        except ucx.UcxError as error:
            self._forget(segments[0][1].address, peer)
            raise PeerUnavailableError(f"the transfer failed on lane {self.name}: {error}") from error
        is_done = statuses == 0
        self.statistics.add(
            begun_ns,
            clock_ns(),
            size_bytes=int(lengths[is_done].sum()),
            operations_count=int(is_done.sum()),
            errors_count=int((~is_done).sum()),
        )
        if outcome != ucx.Outcome.DONE:
            self._forget(segments[0][1].address, peer)
        if outcome == ucx.Outcome.DEADLINE:
            raise DeadlineError(
                f"{int((~is_done).sum())} of {len(statuses)} operations did not end in time "
                f"on lane {self.name}"
            )
        return statuses if parts is None else joined(statuses, parts)

    def close(self) -> None:
        """Let go of all peers, and serve no more. Idempotent."""
        with self._lock:
            peers = list(self._peers.values())
            self._peers.clear()
            if self._stop < 0:
                return
            stop, self._stop = self._stop, -1
        os.eventfd_write(stop, 1)
        self._server.join()
        for peer in peers:
            peer.close()
        self._worker.close()
        os.close(stop)

    def _peer(self, address: bytes, deadline_ns: int) -> Peer:
        with self._lock:
            if self._stop < 0:
                raise PeerUnavailableError("the endpoint was closed")
            peer = self._peers.pop(address, None)
            if peer is not None:
                self._peers[address] = peer  # The latest used stands last.
        if peer is not None and peer.is_alive:
            return peer
        if peer is not None:
            self._forget(address, peer)
        try:
            made = Peer(self._worker, address, deadline_ns)
        except ucx.UcxError as error:
            raise PeerUnavailableError(f"no connection on lane {self.name}: {error}") from error
        return self._keep(address, made)

    def _keep(self, address: bytes, made: Peer) -> Peer:
        """Remember a peer; where another thread was faster, its one."""
        surplus: list[Peer] = []
        with self._lock:
            kept = self._peers.setdefault(address, made)
            if kept is not made:
                surplus.append(made)
            if len(self._peers) > PEERS_LIMIT:
                surplus.append(self._peers.pop(next(iter(self._peers))))
        for each in surplus:
            each.close()
        return kept

    def _forget(self, address: bytes, peer: Peer) -> None:
        with self._lock:
            if self._peers.get(address) is peer:
                del self._peers[address]
        peer.close()
