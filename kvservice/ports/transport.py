"""What moves bytes between a client's buffers and slots, and who may.

Two interfaces meet here. A client holds a `Transport`: it moves the pieces of
its blocks into the slots of a reservation, or the slots of a lease into its
pieces. The side that has the bytes is a `TransferAuthority`: over a wire it
checks the capability before and after each transfer, and it is told when a
transfer has ended, so that no slot is reused while something may still touch it.

Transports are blocking and release the GIL while bytes move; an asynchronous
caller runs them in a thread.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from kvservice.core.slots import I64, U32, U64, Slots


@dataclass(frozen=True, slots=True)
class Pieces:
    """The client's memory of some blocks, as raw addresses.

    addresses: (pieces,) uint64, virtual addresses in this process.
    lengths: (pieces,) uint64, bytes.
    counts: (blocks,) uint32, consecutive pieces of each block; None if each
        piece is one block.

    Whoever makes this keeps the memory alive, and leaves it alone, until the
    transfer has returned.
    """

    addresses: U64
    lengths: U64
    counts: U32 | None = None

    @property
    def blocks_count(self) -> int:
        """Number of blocks."""
        return len(self.addresses) if self.counts is None else len(self.counts)


@dataclass(frozen=True, slots=True)
class Transfer:
    """One batch to move.

    capability_id: reservation (write) or lease (read).
    slots: the slots to move, in the order of the blocks of `pieces`.
    slot_indexes: (blocks,) int64, index of each within the capability's own slots.
    lengths: (blocks,) uint64, bytes of each block.
    checksums: (blocks,) uint32, filled by the transport with the CRC32C of the
        bytes that it moved; None leaves the checksum out.
    timeout_s: the transfer raises DeadlineError when it takes longer.
    """

    capability_id: int
    slots: Slots
    slot_indexes: I64
    lengths: U64
    pieces: Pieces
    checksums: U32 | None
    timeout_s: float


@dataclass(frozen=True, slots=True)
class TransportCapabilities:
    """What a transport can do; callers ask these and never its name.

    has_views: slots can be seen in place, without a copy.
    is_checked_by_owner: the side that has the bytes checks the capability.
    """

    name: str
    has_views: bool
    is_checked_by_owner: bool


class Transport(Protocol):
    """A client's way to the bytes. Contract: `tests/contract/transport_contract.py`."""

    @property
    def capabilities(self) -> TransportCapabilities:
        """What this transport can do."""

    def write(self, transfer: Transfer) -> None:
        """Copy the pieces into the slots.

        Nothing is visible before the commit. On any failure the slots hold
        garbage and the caller aborts the reservation.

        Raises:
            StaleGenerationError: a slot had another owner, before or after.
            ReservationExpiredError, NotOwnerError, ReservationUnknownError: the
                owner of the bytes refused.
            PeerUnavailableError, DeadlineError: the wire failed.
        """

    def read(self, transfer: Transfer) -> None:
        """Copy the slots into the pieces.

        When it raises, the pieces hold garbage.

        Raises:
            StaleGenerationError: a slot had another owner, before or after.
            LeaseExpiredError, NotOwnerError, LeaseUnknownError: the owner of the
                bytes refused.
            PeerUnavailableError, DeadlineError: the wire failed.
        """

    def close(self) -> None:
        """Let go of connections and mappings. Idempotent."""


@dataclass(frozen=True, slots=True)
class Grant:
    """Leave to move the bytes of some slots, until `TransferAuthority.end`.

    transfer_id: names the transfer to `end`.
    addresses: (slots,) uint64, addresses of the slots in the owner's process,
        which stay mapped and allocated until `end`.
    lengths: (slots,) uint64, bytes of each.
    checksums: (slots,) uint32 as committed (read); None (write).
    """

    transfer_id: int
    addresses: U64
    lengths: U64
    checksums: U32 | None


class TransferAuthority(Protocol):
    """The side that has the bytes. Methods may be called from any thread."""

    def begin_write(self, *, session_token: bytes, reservation_id: int, slot_indexes: I64) -> Grant:
        """Check the capability and pin its slots for a write.

        Raises:
            KvError: the capability does not hold; nothing is pinned.
        """

    def begin_read(self, *, session_token: bytes, lease_id: int, slot_indexes: I64) -> Grant:
        """Check the capability and pin its slots for a read.

        Raises:
            KvError: the capability does not hold; nothing is pinned.
        """

    def end(self, transfer_id: int, *, checksums: U32 | None) -> None:
        """Unpin, and check the capability once more.

        checksums: CRC32C of the bytes as they arrived (a completed write), which
            the commit is held to; None for a read or a failed transfer.

        Raises:
            KvError: the capability no longer holds; the bytes are to be
                discarded. The slots are unpinned all the same.
        """
