"""One-sided transfers: the process of a session moves the bytes, and this daemon sees nothing of it.

So a transfer belongs to the session that began it. What bounds it:

- A **read** ends by its session's word, with its session's certain end, or when no operation of it
  can be under way any more: its own deadline, after which its reader begins no operation, and the
  bound of one operation. What is read later than that is discarded by the reader, which is told so
  when it ends the transfer.
- A **write** ends by its session's word that the bytes are there. One that failed, or whose writer is
  gone, may still have bytes on the way; its slots stay pinned until what takes them in has been cut
  off (`WritersCut`), never for a time that is a guess. A session whose death cannot be seen could not
  be cut off in time, so one-sided writes are not offered to it.
"""

from __future__ import annotations

from collections import OrderedDict

from kvservice.core.answers import TransferAnswer
from kvservice.core.books import Books
from kvservice.core.drains import unpin
from kvservice.core.errors import (
    InvalidFieldError,
    KvError,
    LeaseExpiredError,
    LimitReachedError,
    NotOwnerError,
    NoWayError,
)
from kvservice.core.events import BeginOneSided, EndOneSided, WritersCut
from kvservice.core.limits import RETRY_AFTER_MS
from kvservice.core.records import Session, TransferRecord
from kvservice.core.transfer_desk import answer_of, check_sums, pin_slots, unpin_slots

TRANSFERS_LIMIT = 1024
"""Of one session at once: more than any client has threads for."""

ANSWERED_LIMIT = 4096
"""Ends that are remembered, so that one that is sent again gets the answer that was lost."""


class OneSidedDesk:
    """Handles BeginOneSided, EndOneSided and WritersCut."""

    def __init__(self, books: Books) -> None:
        self._books = books
        self._answered: OrderedDict[int, tuple[bytes, KvError | None]] = OrderedDict()

    def begin(self, event: BeginOneSided, now: int) -> TransferAnswer:
        """Check the capability and pin its slots for the session's own process."""
        books = self._books
        session = books.session(event.token, now)
        if event.is_write and not session.is_local:
            raise NoWayError(
                "one-sided writes are not offered to a session of another host, whose process could not be "
                "cut off: write over tcp"
            )
        if len(session.transfers) >= TRANSFERS_LIMIT:
            raise LimitReachedError(
                f"the session has {len(session.transfers)} one-sided transfers under way, which is the limit",
                retry_after_ms=RETRY_AFTER_MS,
            )
        ttl_ns = books.ttl_ns(event.ttl_ns)
        record = pin_slots(books, session, event)
        record.owner = session
        session.transfers.add(record.transfer_id)
        if not record.is_write:
            record.until_ns = now + ttl_ns + books.limits.operation_bound_ns
            books.schedule(record.until_ns, record.transfer_id)
        return answer_of(books, record, remaining_ns=ttl_ns)

    def end(self, event: EndOneSided, now: int) -> None:
        """Unpin; fail if the capability has ended meanwhile. A second end is answered as the first was."""
        books = self._books
        session = books.session(event.token, now)
        record = books.transfers.get(event.transfer_id)
        if record is None or record.is_uncut:
            self._answer_again(event)
            return
        if record.owner is not session:
            raise NotOwnerError(f"transfer {event.transfer_id} was begun by another session")
        check_sums(record, event.checksums)
        session.transfers.discard(event.transfer_id)
        if record.is_write and event.checksums is None and not event.is_settled:
            record.is_uncut = True
            self._note(record, session.token, None)
            return
        try:
            unpin_slots(books, record, event.checksums)
        except KvError as error:
            self._note(record, session.token, error)
            raise
        self._note(record, session.token, None)

    def expire(self, record: TransferRecord) -> None:
        """End a read whose reader has not ended it and cannot be reading any more."""
        books = self._books
        del books.transfers[record.transfer_id]
        unpin(record.batch)
        if record.owner is not None:
            record.owner.transfers.discard(record.transfer_id)
            late = LeaseExpiredError(
                f"transfer {record.transfer_id} outlived its deadline before it was ended; discard the bytes"
            )
            self._note(record, record.owner.token, late)

    def cut(self, event: WritersCut, now: int) -> None:
        """Unpin what failed writers may have been writing to; idempotent."""
        del now
        books = self._books
        for transfer_id in event.transfer_ids:
            record = books.transfers.get(transfer_id)
            if record is None or not record.is_uncut:
                continue
            del books.transfers[transfer_id]
            unpin(record.batch)
            reservation = books.reservations.get(record.capability_id)
            if reservation is not None:
                reservation.writes_count -= 1

    def _note(self, record: TransferRecord, token: bytes, error: KvError | None) -> None:
        self._answered[record.transfer_id] = (token, error)
        if len(self._answered) > ANSWERED_LIMIT:
            self._answered.popitem(last=False)

    def _answer_again(self, event: EndOneSided) -> None:
        token, error = self._answered.get(event.transfer_id, (b"", None))
        if token != event.token:
            self._books.check_life(event.transfer_id, "transfer")
            raise InvalidFieldError(
                f"transfer_id {event.transfer_id} names no transfer of this session; discard the bytes"
            )
        self._books.late_ends_count += 1
        if error is not None:
            raise type(error)(error.message)


def close_transfers(books: Books, session: Session, *, is_certain: bool) -> None:
    """End the one-sided transfers of a session that is no more.

    is_certain: its process was seen to die, or said good-bye. One that is only silent may be reading
    until its own deadline; it has no writes.
    """
    if not is_certain:
        return
    for transfer_id in sorted(session.transfers):
        record = books.transfers[transfer_id]
        if record.is_write:
            record.is_uncut = True
            continue
        del books.transfers[transfer_id]
        unpin(record.batch)
    session.transfers.clear()


def uncut_transfers(books: Books) -> tuple[int, ...]:
    """Return the writes that wait for what takes in their bytes to be cut off."""
    return tuple(number for number, record in books.transfers.items() if record.is_uncut)
