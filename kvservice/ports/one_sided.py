"""Reading memory of other processes, without their doing.

An engine *lends* memory: it registers it with an endpoint of its own process and tells the
daemon the ways that lead there (`core.engine_memory.SegmentWay`). Another engine, which got
them with a claim, *reads*. The lender's interpreter takes no part in it, and nothing here
asks whether a reader may: that is the control plane's, before (the claim) and after (the
answer to its completion).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from kvservice.core.engine_memory import EngineSegment, MemoryKind, SegmentWay
from kvservice.core.slots import U32, U64
from kvservice.ports.lanes import LaneReport


@dataclass(frozen=True, slots=True)
class RemoteRead:
    """Operations of one transfer, in any order.

    segments: where to read.
    segment_indexes: (operations,) uint32, index into `segments`.
    offsets: (operations,) uint64, bytes from the beginning of the segment.
    addresses: (operations,) uint64, where the bytes go: memory of this process, which the
        caller keeps alive, and leaves alone, until the read has returned.
    lengths: (operations,) uint64, bytes.
    timeout_s: nothing is posted later.
    """

    segments: tuple[EngineSegment, ...]
    segment_indexes: U32
    offsets: U64
    addresses: U64
    lengths: U64
    timeout_s: float


class LentMemory(Protocol):
    """Memory of this process that others can read."""

    @property
    def ways(self) -> tuple[SegmentWay, ...]:
        """What the daemon passes on, the preferred one first."""

    def close(self) -> None:
        """Lend it no more; it may be unmapped then. Reads that come later fail, or read what is there: who
        lends waits for the control plane's word that nobody reads any more. Idempotent.
        """


class OneSided(Protocol):
    """An endpoint of this process. Methods may be called from any thread.

    Contract: `tests/contract/one_sided_contract.py`.
    """

    @property
    def transport(self) -> str:
        """Its name in the ways that it makes and follows."""

    def lend(self, address: int, size_bytes: int, kind: MemoryKind) -> LentMemory:
        """Make memory readable by others. It stays the caller's, who keeps it until `close`.

        Raises:
            InvalidFieldError: it is no memory that this endpoint can lend.
        """

    def read(self, read: RemoteRead) -> None:
        """Fetch bytes; returns or raises only when no operation touches local memory any more.

        Every operation is held to the bounds of its segment before any is posted.

        Raises:
            InvalidFieldError: an operation leaves its segment; nothing was read.
            NoWayError: a segment has no way of this transport.
            PeerUnavailableError: the other process is gone, or the memory is lent no more.
            DeadlineError: it took longer than `timeout_s`.
        """

    def describe(self, segment: EngineSegment, timeout_s: float) -> tuple[str, ...]:
        """Say for each lane by which device a segment would be read; for people. Raises as `read`."""

    def lanes(self) -> tuple[LaneReport, ...]:
        """Say what each lane did lately; none where there are no lanes."""

    def close(self) -> None:
        """Let go of all peers and of all memory that is lent. Idempotent."""
