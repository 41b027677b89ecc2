"""The transport within one process: for tests, simulation, and embedded use."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from kvservice import native
from kvservice.core.checksums import differing
from kvservice.core.errors import BlockSizeError, ChecksumMismatchError, PeerUnavailableError
from kvservice.core.slots import U32
from kvservice.ports.transport import Grant, Transfer, TransferAuthority, TransportCapabilities
from kvservice.transports.blockmap import check_transfer, slot_addresses_per_piece


class InprocTransport:
    """Asks the authority, then copies between its memory and the caller's."""

    def __init__(self, authority: TransferAuthority, session_token: Callable[[], bytes]) -> None:
        self._authority = authority
        self._session_token = session_token
        self._is_closed = False

    @property
    def capabilities(self) -> TransportCapabilities:
        """The authority checks; it hands out no views."""
        return TransportCapabilities(name="inproc", has_views=False, is_checked_by_owner=True)

    def write(self, transfer: Transfer) -> None:
        """Copy the pieces into the slots; see Transport.write."""
        self._check(transfer)
        if not len(transfer.lengths):
            return
        grant = self._authority.begin_write(
            session_token=self._session_token(),
            reservation_id=transfer.capability_id,
            slot_indexes=transfer.slot_indexes,
        )
        received: U32 | None = None
        try:
            _check_lengths(grant, transfer)
            pieces = transfer.pieces
            targets = slot_addresses_per_piece(grant.addresses, pieces)
            sums = np.zeros(len(grant.addresses), dtype=np.uint32)
            native.copy_blocks(targets, pieces.addresses, pieces.lengths, pieces.counts, sums)
            received = sums
        finally:
            self._authority.end(grant.transfer_id, checksums=received)
        if transfer.checksums is not None:
            transfer.checksums[:] = received

    def read(self, transfer: Transfer) -> None:
        """Copy the slots into the pieces; see Transport.read.

        Raises:
            ChecksumMismatchError: a checksum was asked for, and differs from the
                committed one.
        """
        self._check(transfer)
        if not len(transfer.lengths):
            return
        grant = self._authority.begin_read(
            session_token=self._session_token(),
            lease_id=transfer.capability_id,
            slot_indexes=transfer.slot_indexes,
        )
        try:
            _check_lengths(grant, transfer)
            pieces = transfer.pieces
            sources = slot_addresses_per_piece(grant.addresses, pieces)
            native.copy_blocks(pieces.addresses, sources, pieces.lengths, pieces.counts, transfer.checksums)
        finally:
            self._authority.end(grant.transfer_id, checksums=None)
        if transfer.checksums is None or grant.checksums is None:
            return
        differs = differing(transfer.checksums, grant.checksums)
        if len(differs):
            raise ChecksumMismatchError(
                f"{len(differs)} of {len(grant.checksums)} slots of lease {transfer.capability_id} "
                "do not have their committed checksum: drop them and take another copy"
            )

    def close(self) -> None:
        """Refuse what follows; the authority belongs to its maker. Idempotent."""
        self._is_closed = True

    def _check(self, transfer: Transfer) -> None:
        if self._is_closed:
            raise PeerUnavailableError("the in-process transport was closed")
        check_transfer(transfer)


def _check_lengths(grant: Grant, transfer: Transfer) -> None:
    if not np.array_equal(grant.lengths, transfer.lengths):
        raise BlockSizeError(
            f"the blocks of this transfer are not as long as the slots of {transfer.capability_id}"
        )
