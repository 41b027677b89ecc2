"""A Transport to another daemon's arena whose bytes this process moves itself, one-sidedly.

The capability is asked for over the control plane, before (`begin`, which pins the slots and says where
they are) and after (`end`, which says whether it still holds). Only then are bytes handed on. What the
owner would have summed is summed here, over the caller's own pieces.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from kvservice import native
from kvservice.core.checksums import differing
from kvservice.core.engine_memory import EngineSegment
from kvservice.core.errors import (
    BlockSizeError,
    ChecksumMismatchError,
    DeadlineError,
    NoWayError,
    PeerUnavailableError,
)
from kvservice.core.slots import I64, U32, U64
from kvservice.ports.one_sided import OneSided, RemoteRead
from kvservice.ports.transport import Transfer, TransportCapabilities
from kvservice.transports.blockmap import check_transfer
from kvservice.transports.ucx.arena_operations import operations_of
from kvservice.transports.ucx.endpoint import TRANSPORT


@dataclass(frozen=True, slots=True)
class RemoteGrant:
    """Leave to reach some slots of another process's memory, until `RemoteAuthority.end`.

    segments: where the slots are. segment_indexes: (slots,) uint32 into them.
    offsets: (slots,) uint64, bytes from the beginning of the segment. lengths: (slots,) uint64, bytes.
    checksums: (slots,) uint32 as committed (read); None (write).
    deadline_s: nothing is begun later, by CLOCK_MONOTONIC of this host.
    """

    transfer_id: int
    segments: tuple[EngineSegment, ...]
    segment_indexes: U32
    offsets: U64
    lengths: U64
    checksums: U32 | None
    deadline_s: float


class RemoteAuthority(Protocol):
    """The owner of the slots, asked from afar. Methods may be called from any thread, and wait."""

    def begin_write(self, *, reservation_id: int, slot_indexes: I64, timeout_s: float) -> RemoteGrant:
        """Check the capability and pin its slots for a write. Raises KvError; nothing is pinned."""

    def begin_read(self, *, lease_id: int, slot_indexes: I64, timeout_s: float) -> RemoteGrant:
        """Check the capability and pin its slots for a read. Raises KvError; nothing is pinned."""

    def end(self, transfer_id: int, *, checksums: U32 | None, is_settled: bool) -> None:
        """Unpin, and check the capability once more. Called once for each grant.

        checksums: CRC32C of what was written; None for a read or a failed transfer.
        is_settled: no operation can touch the slots any more.

        Raises:
            KvError: the capability no longer holds, or its owner gave no answer; the bytes are to be
                discarded.
        """


class UcxTransport:
    """Thread-safe.

    endpoint: returns what reads others' memory, made when it is first needed; stays its maker's.
    put: stores bytes in others' memory; None where this process may not.
    """

    def __init__(
        self,
        authority: RemoteAuthority,
        endpoint: Callable[[], OneSided],
        put: Callable[[RemoteRead], None] | None = None,
    ) -> None:
        self._authority = authority
        self._endpoint = endpoint
        self._put = put
        self._is_closed = False

    @property
    def capabilities(self) -> TransportCapabilities:
        """The owner checks, over the control plane; there are no views."""
        return TransportCapabilities(name=TRANSPORT, has_views=False, is_checked_by_owner=True)

    def write(self, transfer: Transfer) -> None:
        """Copy the pieces into the slots; see Transport.write.

        Raises:
            NoWayError: this session is not offered one-sided writes.
        """
        end_s = self._begin(transfer)
        if not len(transfer.lengths):
            return
        if self._put is None:
            raise NoWayError("this process stores nothing one-sidedly; write by another transport")
        pieces = transfer.pieces
        sums: U32 = np.zeros(pieces.blocks_count, np.uint32)
        grant = self._authority.begin_write(
            reservation_id=transfer.capability_id,
            slot_indexes=transfer.slot_indexes,
            timeout_s=transfer.timeout_s,
        )
        arrived: U32 | None = None
        is_settled = True
        try:
            operations = _operations(grant, transfer, end_s)
            native.checksum_blocks(pieces.addresses, pieces.lengths, pieces.counts, sums)
            is_settled = False
            self._put(operations)
            arrived, is_settled = sums, True
        finally:
            self._authority.end(grant.transfer_id, checksums=arrived, is_settled=is_settled)
        if transfer.checksums is not None:
            transfer.checksums[:] = sums

    def read(self, transfer: Transfer) -> None:
        """Copy the slots into the pieces; see Transport.read.

        Raises:
            ChecksumMismatchError: checksums are asked for, and one differs from the committed one.
            NoWayError: the memory cannot be reached from here; read by another transport.
        """
        end_s = self._begin(transfer)
        if not len(transfer.lengths):
            return
        endpoint = self._endpoint()
        grant = self._authority.begin_read(
            lease_id=transfer.capability_id,
            slot_indexes=transfer.slot_indexes,
            timeout_s=transfer.timeout_s,
        )
        sums, pieces = transfer.checksums, transfer.pieces
        try:
            endpoint.read(_operations(grant, transfer, end_s))
            if sums is not None:
                native.checksum_blocks(pieces.addresses, pieces.lengths, pieces.counts, sums)
        finally:
            self._authority.end(grant.transfer_id, checksums=None, is_settled=True)
        if sums is not None and grant.checksums is not None:
            _compare(sums, grant.checksums, transfer)

    def close(self) -> None:
        """Refuse what follows; endpoint and authority belong to their makers. Idempotent."""
        self._is_closed = True

    def _begin(self, transfer: Transfer) -> float:
        """Return by when the transfer has to end."""
        if self._is_closed:
            raise PeerUnavailableError("the transport was closed")
        check_transfer(transfer)
        return time.monotonic() + transfer.timeout_s


def _operations(grant: RemoteGrant, transfer: Transfer, end_s: float) -> RemoteRead:
    """Return what to post; nothing of it is later than the grant, nor than the caller's own deadline."""
    if not np.array_equal(grant.lengths, transfer.lengths):
        raise BlockSizeError(
            f"the blocks of this transfer are not as long as the slots of {transfer.capability_id}"
        )
    timeout_s = min(end_s, grant.deadline_s) - time.monotonic()
    if timeout_s <= 0:
        raise DeadlineError("the deadline of the transfer passed before its slots were granted")
    some = operations_of(grant.segment_indexes, grant.offsets, transfer.pieces)
    return RemoteRead(
        grant.segments, some.segment_indexes, some.offsets, some.addresses, some.lengths, timeout_s
    )


def _compare(sums: U32, committed: U32, transfer: Transfer) -> None:
    differs = differing(sums, committed)
    if len(differs):
        block = int(differs[0])
        raise ChecksumMismatchError(
            f"what arrived is not what was committed: {len(differs)} of {len(sums)} blocks, the first is "
            f"slot {int(transfer.slot_indexes[block])} of {transfer.capability_id}; CRC32C "
            f"{int(sums[block]):08x} here, {int(committed[block]):08x} committed"
        )
