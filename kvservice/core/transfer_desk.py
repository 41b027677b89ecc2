"""Transfers over a wire: slots are pinned while a wire may touch them."""

from __future__ import annotations

from kvservice.core.answers import TransferAnswer
from kvservice.core.batches import describe, payload_bytes, pin, subset
from kvservice.core.books import Books, Ended
from kvservice.core.drains import unpin
from kvservice.core.errors import (
    InvalidFieldError,
    KvError,
    LeaseExpiredError,
    LeaseUnknownError,
    NotOwnerError,
    ReservationAbortedError,
    ReservationExpiredError,
    ReservationUnknownError,
)
from kvservice.core.events import BeginOneSided, BeginTransfer, EndTransfer
from kvservice.core.outcomes import ItemOutcome
from kvservice.core.records import Lease, Reservation, Session, TransferRecord
from kvservice.core.slots import U32


class TransferDesk:
    """Handles BeginTransfer and EndTransfer: the daemon itself moves the bytes."""

    def __init__(self, books: Books) -> None:
        self._books = books

    def begin(self, event: BeginTransfer, now: int) -> TransferAnswer:
        """Check the capability and pin its slots."""
        books = self._books
        session = books.session(event.token, now)
        record = pin_slots(books, session, event)
        return answer_of(books, record)

    def end(self, event: EndTransfer, now: int) -> None:
        """Unpin; fail if the capability has ended meanwhile."""
        del now
        books = self._books
        record = books.transfers.get(event.transfer_id)
        if record is None or record.owner is not None:
            raise InvalidFieldError(f"transfer_id {event.transfer_id} names no running transfer")
        unpin_slots(books, record, event.checksums)


def pin_slots(books: Books, session: Session, event: BeginTransfer | BeginOneSided) -> TransferRecord:
    """Check a capability and pin slots of it; what is refused has pinned nothing."""
    capability = _capability(books, session, event)
    indexes = event.slot_indexes
    books.check_batch(len(indexes), "slot_indexes", smallest=1)
    highest = capability.batch.count
    if int(indexes.min()) < 0 or int(indexes.max()) >= highest:
        raise InvalidFieldError(
            f"slot_indexes goes from {int(indexes.min())} to {int(indexes.max())}; "
            f"the capability has slots 0 to {highest - 1}"
        )
    if len(set(indexes.tolist())) != len(indexes):
        raise InvalidFieldError("slot_indexes names a slot twice; name each once")
    batch = subset(capability.batch, indexes)
    pin(batch)
    if isinstance(capability, Reservation):
        capability.writes_count += 1
    record = TransferRecord(books.mint(), event.capability_id, batch, indexes, is_write=event.is_write)
    books.transfers[record.transfer_id] = record
    return record


def answer_of(books: Books, record: TransferRecord, *, remaining_ns: int = 0) -> TransferAnswer:
    """Return what whoever moves the bytes has to know."""
    slots = describe(record.batch, with_checksums=not record.is_write)
    return TransferAnswer(record.transfer_id, slots, payload_bytes(books, record.batch), remaining_ns)


def unpin_slots(books: Books, record: TransferRecord, checksums: U32 | None) -> None:
    """End a transfer; raises when its capability has ended meanwhile, with the slots unpinned all the same.

    checksums: of the bytes that arrived; None for a read or a failed transfer.
    """
    check_sums(record, checksums)
    del books.transfers[record.transfer_id]
    unpin(record.batch)
    if record.is_write:
        reservation = books.reservations.get(record.capability_id)
        if reservation is None:
            raise _why_ended(books.ended.get(record.capability_id), record.capability_id)
        reservation.writes_count -= 1
        if checksums is not None:
            arrived = zip(record.slot_indexes.tolist(), checksums.tolist(), strict=True)
            reservation.arrived.update(arrived)
    elif record.capability_id not in books.leases:
        raise LeaseExpiredError(
            f"lease {record.capability_id} ended while its slots were read; discard the bytes"
        )


def check_sums(record: TransferRecord, checksums: U32 | None) -> None:
    """Raise InvalidFieldError unless there is a checksum for each slot, or none at all."""
    if checksums is not None and len(checksums) != record.batch.count:
        raise InvalidFieldError(
            f"checksums has {len(checksums)} entries for {record.batch.count} slots of the transfer"
        )


def _capability(books: Books, session: Session, event: BeginTransfer | BeginOneSided) -> Reservation | Lease:
    name = "reservation" if event.is_write else "lease"
    books.check_life(event.capability_id, name)
    found: Reservation | Lease | None
    if event.is_write:
        found = books.reservations.get(event.capability_id)
    else:
        found = books.leases.get(event.capability_id)
    if found is not None:
        if found.session.engine != session.engine:
            raise NotOwnerError(f"{name} {event.capability_id} belongs to another engine")
        return found
    ended = books.ended.get(event.capability_id)
    if ended is not None and ended.is_lease == event.is_write:
        ended = None  # The id of a lease names no reservation, nor the other way round.
    if ended is not None and ended.engine != session.engine:
        raise NotOwnerError(f"{name} {event.capability_id} belongs to another engine")
    if event.is_write:
        raise _why_ended(ended, event.capability_id)
    if ended is None:
        raise LeaseUnknownError(f"lease {event.capability_id} was never granted; acquire first")
    raise LeaseExpiredError(f"lease {event.capability_id} has ended; acquire again")


def _why_ended(ended: Ended | None, reservation_id: int) -> KvError:
    if ended is None:
        return ReservationUnknownError(f"reservation {reservation_id} was never granted")
    if ended.outcome is ItemOutcome.ALREADY_EXPIRED:
        return ReservationExpiredError(f"reservation {reservation_id} has expired; reserve again")
    return ReservationAbortedError(f"reservation {reservation_id} has ended; reserve again")
