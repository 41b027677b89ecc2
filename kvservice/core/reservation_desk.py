"""Reservations: OPEN -> COMMITTED | ABORTED | EXPIRED."""

from __future__ import annotations

import numpy as np

from kvservice.core import drains
from kvservice.core.allocation import Need, allocate
from kvservice.core.answers import CommitAnswer, ReserveAnswer
from kvservice.core.batches import (
    Mask,
    committed_mask,
    committed_slots,
    describe,
    pending_mask,
    pick_keys,
    pin,
)
from kvservice.core.books import Books, Ended, Tenant
from kvservice.core.checksums import NO_CHECKSUM, as_stored
from kvservice.core.effects import NewsForTenant
from kvservice.core.errors import (
    ChecksumMismatchError,
    DrainingError,
    DuplicateKeyError,
    IncompleteBlockError,
    InvalidFieldError,
    LimitReachedError,
    NotOwnerError,
    RequestIdReusedError,
    ReservationAbortedError,
    ReservationExpiredError,
    ReservationUnknownError,
)
from kvservice.core.events import Abort, Commit, Reserve
from kvservice.core.history import FactKind
from kvservice.core.limits import RETRY_AFTER_MS
from kvservice.core.namespace import Space
from kvservice.core.outcomes import ItemOutcome
from kvservice.core.records import Reservation, Session, SlotBatch, SlotGroup
from kvservice.core.removal import withdraw
from kvservice.core.row_table import KEY_BYTES
from kvservice.core.slot_pool import SlotState
from kvservice.core.slots import U8, U32, Slots
from kvservice.core.unnamed import name_keys

REQUEST_ID_BYTES = 16

# Looking a member up in its class costs half a microsecond; these stand on the path of
# every batch.
_GRANTED = int(ItemOutcome.GRANTED)
_ALREADY_COMMITTED = int(ItemOutcome.ALREADY_COMMITTED)
_PENDING = int(ItemOutcome.PENDING)
_COMMITTED = int(SlotState.COMMITTED)

_NOTHING = Slots(np.empty(0, dtype=np.uint32), np.empty(0, dtype=np.uint32), np.empty(0, dtype=np.uint64))
_NO_SLOTS = SlotBatch((), 0)


class ReservationDesk:
    """Handles Reserve, Commit and Abort, and what ends a reservation otherwise."""

    def __init__(self, books: Books) -> None:
        self._books = books

    def reserve(self, event: Reserve, now: int) -> ReserveAnswer:
        """Grant the keys that are neither committed nor pending, or fail whole."""
        books = self._books
        session = books.session(event.token, now)
        if len(event.request_id) != REQUEST_ID_BYTES:
            raise InvalidFieldError(
                f"request_id has {len(event.request_id)} bytes; it takes {REQUEST_ID_BYTES} random ones"
            )
        spaces = books.opened(session, event.spaces)
        count = self._asked_count(event)
        ttl = books.ttl_ns(event.ttl_ns)
        known = books.requests.get((session.engine, event.request_id))
        if known is not None:
            return self._again(books.reservations[known], event, now)
        if books.is_draining:
            raise DrainingError("the daemon is stopping and takes no writes", retry_after_ms=1000)
        if len(session.reservations) >= books.limits.max_reservations:
            raise LimitReachedError(
                f"the session holds {len(session.reservations)} reservations, which is the limit: "
                "commit or abort some",
                retry_after_ms=RETRY_AFTER_MS,
            )
        tenant = books.tenant(session.tenant)
        if event.unnamed_count:
            keys, there = b"", _NO_SLOTS
            outcomes = np.full(count, _GRANTED, dtype=np.uint8)
            batch = self._take_slots(tenant, spaces, count, there)
            slots = describe(batch, with_checksums=False)
        else:
            outcomes, granted, there = self._sort_out(tenant, spaces, event.keys, count)
            if not granted.any():
                return ReserveAnswer(0, outcomes, _NOTHING, 0)
            keys = pick_keys(event.keys, granted)
            batch = self._take_slots(tenant, spaces, len(keys) // KEY_BYTES, there)
            slots = self._note_pending(tenant, spaces, keys, batch)
        reservation = Reservation(
            reservation_id=books.mint(),
            session=session,
            request_id=event.request_id,
            asked_keys=event.keys,
            spaces=event.spaces,
            keys=keys,
            outcomes=outcomes.tobytes(),
            batch=batch,
            slots=slots,
            prefix=there,
            prefix_generations=tuple(group.pool.generations[group.indexes] for group in there.groups),
            deadline_ns=now + ttl,
            unnamed_count=event.unnamed_count,
        )
        books.reservations[reservation.reservation_id] = reservation
        books.requests[(session.engine, event.request_id)] = reservation.reservation_id
        session.reservations.add(reservation.reservation_id)
        books.schedule(reservation.deadline_ns, reservation.reservation_id)
        return self._answer(reservation, now)

    def commit(self, event: Commit, now: int) -> CommitAnswer:
        """Make the blocks visible, all parts of all keys at once."""
        books = self._books
        session = books.session(event.token, now)
        books.check_life(event.reservation_id, "reservation_id")
        reservation = books.reservations.get(event.reservation_id)
        if reservation is None:
            return self._committed_before(event.reservation_id, session)
        if reservation.session.engine != session.engine:
            raise NotOwnerError(
                f"reservation {event.reservation_id} belongs to another engine; "
                "only processes of the engine that reserved may commit"
            )
        if not reservation.unnamed_count and len(event.checksums) not in {0, reservation.batch.count}:
            raise InvalidFieldError(
                f"checksums has {len(event.checksums)} entries for {reservation.batch.count} "
                "granted slots; give one CRC32C for each, or none at all"
            )
        if reservation.writes_count:
            raise IncompleteBlockError(
                f"{reservation.writes_count} writes of reservation {event.reservation_id} have not ended; "
                "commit when they have, or abort"
            )
        outcomes, checksums = self._named(reservation, event, now)
        if len(checksums):
            self._check_arrived(reservation, checksums)
            checksums = as_stored(checksums)
        else:
            checksums = np.full(reservation.batch.count, NO_CHECKSUM, dtype=np.uint32)
        if reservation.keys:
            self._publish(reservation, checksums)
        keys_count = len(reservation.keys) // KEY_BYTES
        self._forget(reservation, ItemOutcome.DONE, keys_count)
        return CommitAnswer(ItemOutcome.DONE, keys_count, outcomes)

    def abort(self, event: Abort, now: int) -> ItemOutcome:
        """Give a reservation up; idempotent."""
        books = self._books
        session = books.session(event.token, now)
        books.check_life(event.reservation_id, "reservation_id")
        reservation = books.reservations.get(event.reservation_id)
        if reservation is None:
            ended = books.how_ended(event.reservation_id, session.engine, is_lease=False)
            books.late_ends_count += 1
            if ended is None:
                return ItemOutcome.UNKNOWN
            if ended.outcome is ItemOutcome.DONE:
                return ItemOutcome.ALREADY_COMMITTED
            return ended.outcome
        if reservation.session.engine != session.engine:
            raise NotOwnerError(
                f"reservation {event.reservation_id} belongs to another engine; "
                "only processes of the engine that reserved may abort"
            )
        self._end(reservation, ItemOutcome.ALREADY_ABORTED, set(), now)
        return ItemOutcome.DONE

    def expire(self, reservation: Reservation, now: int) -> None:
        """End a reservation whose deadline has passed."""
        waiting = self._books.local_processes(reservation.session.engine)
        self._end(reservation, ItemOutcome.ALREADY_EXPIRED, waiting, now)

    def lose(self, reservation: Reservation, now: int) -> None:
        """End a reservation whose session has ended."""
        waiting = self._books.local_processes(reservation.session.engine)
        self._end(reservation, ItemOutcome.ALREADY_ABORTED, waiting, now)

    def _asked_count(self, event: Reserve) -> int:
        """Return the number of keys that a reserve is for."""
        if event.unnamed_count:
            if event.keys:
                raise InvalidFieldError(
                    f"unnamed_count is {event.unnamed_count} and keys has {len(event.keys)} bytes; "
                    "give one of them"
                )
            self._books.check_batch(event.unnamed_count, "unnamed_count", smallest=1)
            return event.unnamed_count
        count = self._books.keys_count(event.keys)
        _check_unique(event.keys, count)
        return count

    def _named(self, reservation: Reservation, event: Commit, now: int) -> tuple[bytes, U32]:
        """See that the keys of a reservation are known, and return their checksums."""
        if not reservation.unnamed_count:
            if event.keys:
                raise InvalidFieldError(
                    f"keys names {len(event.keys) // KEY_BYTES} keys, but those of reservation "
                    f"{reservation.reservation_id} were named when it was made; leave it out"
                )
            return b"", event.checksums
        count = self._books.keys_count(event.keys)
        _check_unique(event.keys, count)
        return name_keys(self._books, reservation, event.keys, event.checksums, now)

    def _again(self, reservation: Reservation, event: Reserve, now: int) -> ReserveAnswer:
        asked = (reservation.spaces, reservation.asked_keys, len(reservation.outcomes))
        if asked != (event.spaces, event.keys, self._asked_count(event)):
            raise RequestIdReusedError(
                f"request_id {reservation.request_id.hex()} was used with other keys or spaces; "
                "draw a fresh one for each request"
            )
        return self._answer(reservation, now)

    def _answer(self, reservation: Reservation, now: int) -> ReserveAnswer:
        return ReserveAnswer(
            reservation.reservation_id,
            np.frombuffer(reservation.outcomes, dtype=np.uint8),
            reservation.slots,
            reservation.deadline_ns - now,
        )

    def _sort_out(
        self, tenant: Tenant, spaces: list[Space], keys: bytes, count: int
    ) -> tuple[U8, Mask, SlotBatch]:
        """Outcome of each key, which are granted, and the slots of those that are there."""
        outcomes = np.full(count, _GRANTED, dtype=np.uint8)
        taken = committed_mask(tenant, spaces, keys)
        there = _NO_SLOTS
        if taken.any():
            outcomes[taken] = _ALREADY_COMMITTED
            there = committed_slots(self._books, tenant, spaces, pick_keys(keys, taken))
        if len(tenant.pending):
            pending = pending_mask(tenant, spaces, keys) & ~taken
            outcomes[pending] = _PENDING
            taken |= pending
        return outcomes, ~taken, there

    def _take_slots(self, tenant: Tenant, spaces: list[Space], count: int, there: SlotBatch) -> SlotBatch:
        """Find slots for `count` keys; `there` must not be given up for them."""
        books = self._books
        parts = len(spaces)
        pools = [books.pool(tenant, space.slot_bytes) for space in spaces]
        pin(there)
        try:
            taken = allocate(books, tenant, [Need(pool, count) for pool in pools])
        finally:
            for group in there.groups:
                group.pool.pins[group.indexes] -= 1
        groups: list[SlotGroup] = []
        for part, (space, pool, indexes) in enumerate(zip(spaces, pools, taken, strict=True)):
            pool.spaces[indexes] = space.id
            groups.append(SlotGroup(pool, indexes, np.arange(part, count * parts, parts)))
        return SlotBatch(tuple(groups), count * parts)

    def _note_pending(self, tenant: Tenant, spaces: list[Space], keys: bytes, batch: SlotBatch) -> Slots:
        """Let nobody else reserve the keys; return where their slots are."""
        slots = describe(batch, with_checksums=False)
        key_rows = np.frombuffer(keys, dtype=np.uint8).reshape(-1, KEY_BYTES)
        unknown = np.zeros(len(keys) // KEY_BYTES, dtype=np.uint32)
        for space, group in zip(spaces, batch.groups, strict=True):
            group.pool.keys[group.indexes] = key_rows
            own = slots if len(spaces) == 1 else slots.take(group.positions)
            tenant.pending.insert(
                keys,
                space.id,
                segments=own.segments,
                granules=own.granules,
                length_bytes=space.block_bytes,
                checksums=unknown,
                generations=own.generations,
            )
        return slots

    def _check_arrived(self, reservation: Reservation, checksums: U32) -> None:
        """Hold the writer's checksums to those of the bytes that came over a wire."""
        for index, arrived in reservation.arrived.items():
            if int(checksums[index]) != arrived:
                raise ChecksumMismatchError(
                    f"slot {index} of reservation {reservation.reservation_id} arrived with CRC32C "
                    f"{arrived:#010x}, the commit says {int(checksums[index]):#010x}: "
                    "abort and write it again"
                )

    def _publish(self, reservation: Reservation, checksums: U32) -> None:
        books = self._books
        tenant = books.tenant(reservation.session.tenant)
        is_single = len(reservation.spaces) == 1
        for space_id, group in zip(reservation.spaces, reservation.batch.groups, strict=True):
            pool, indexes = group.pool, group.indexes
            if not is_single:
                self._replace(tenant, reservation.keys, books.spaces.get(space_id))
            sums = checksums if is_single else np.ascontiguousarray(checksums[group.positions])
            pool.checksums[indexes] = sums
            pool.state[indexes] = _COMMITTED
            if reservation.asked_keys:
                tenant.pending.remove_of(reservation.keys, space_id)
            slots = reservation.slots if is_single else reservation.slots.take(group.positions)
            tenant.directory.insert(
                reservation.keys,
                space_id,
                segments=slots.segments,
                granules=slots.granules,
                length_bytes=books.spaces.get(space_id).block_bytes,
                checksums=sums,
                generations=slots.generations,
            )
            tenant.history.append(
                FactKind.COMMITTED,
                namespace_id=books.spaces.get(space_id).namespace_id,
                space_id=space_id,
                keys=reservation.keys,
            )
        _touch_chain(reservation)
        books.effects.append(NewsForTenant(tenant.name))

    def _replace(self, tenant: Tenant, keys: bytes, space: Space) -> None:
        """Drop the blocks that a batch of several parts writes anew.

        A key is granted when any of its parts is missing, so some of its other
        parts may be committed already.
        """
        mask = tenant.directory.find_mask(keys, space.id)
        if not mask.any():
            return
        old = committed_slots(self._books, tenant, [space], pick_keys(keys, mask))
        for group in old.groups:
            withdraw(self._books, group.pool, group.indexes)

    def _committed_before(self, reservation_id: int, session: Session) -> CommitAnswer:
        """Answer a commit that comes after the end."""
        ended = self._books.ended.get(reservation_id)
        self._books.late_ends_count += 1
        if ended is None or ended.is_lease:
            raise ReservationUnknownError(
                f"reservation {reservation_id} was never granted, or ended long ago; reserve again"
            )
        if ended.engine != session.engine:
            raise NotOwnerError(f"reservation {reservation_id} belongs to another engine")
        if ended.outcome is ItemOutcome.ALREADY_EXPIRED:
            raise ReservationExpiredError(
                f"reservation {reservation_id} expired before its commit; nothing is visible: "
                "reserve again, and renew while writing takes long"
            )
        if ended.outcome is ItemOutcome.ALREADY_ABORTED:
            raise ReservationAbortedError(
                f"reservation {reservation_id} was aborted before its commit; nothing is visible"
            )
        return CommitAnswer(ItemOutcome.DONE, ended.keys_count)

    def _end(self, reservation: Reservation, outcome: ItemOutcome, waiting: set[bytes], now: int) -> None:
        """End a reservation with nothing visible."""
        books = self._books
        tenant = books.tenant(reservation.session.tenant)
        for space_id in reservation.spaces:
            tenant.pending.remove_of(reservation.keys, space_id)
        self._forget(reservation, outcome, 0)
        drains.disown_written(
            books,
            reservation.batch,
            capability_id=reservation.reservation_id,
            waiting=waiting,
            now=now,
        )

    def _forget(self, reservation: Reservation, outcome: ItemOutcome, keys_count: int) -> None:
        books = self._books
        session = reservation.session
        del books.reservations[reservation.reservation_id]
        del books.requests[(session.engine, reservation.request_id)]
        session.reservations.discard(reservation.reservation_id)
        books.note_end(reservation.reservation_id, Ended(False, outcome, session.engine, keys_count))


def _touch_chain(reservation: Reservation) -> None:
    """Note the use of the whole chain, what was there before and what was written.

    In one go, so that the leaf of the chain is older than its root although its
    root was written first.
    """
    before = zip(reservation.prefix.groups, reservation.prefix_generations, strict=True)
    kept = [
        (group.pool, group.indexes[group.pool.generations[group.indexes] == generations])
        for group, generations in before
    ]
    for group in reservation.batch.groups:
        if not kept:
            group.pool.policy.touched(group.indexes)
            continue
        roots = [indexes for pool, indexes in kept if pool is group.pool]
        group.pool.policy.touched(np.concatenate([*roots, group.indexes]))


def _check_unique(keys: bytes, count: int) -> None:
    # The first words of keys that are hashes differ; only where they do not is it worth
    # the time to look at whole keys.
    if len(set(np.frombuffer(keys, dtype=np.uint64)[:: KEY_BYTES // 8].tolist())) == count:
        return
    first: dict[bytes, int] = {}
    for index in range(count):
        key = keys[index * KEY_BYTES : (index + 1) * KEY_BYTES]
        earlier = first.setdefault(key, index)
        if earlier != index:
            raise DuplicateKeyError(
                f"keys[{index}] is the same as keys[{earlier}] ({key.hex()}); name each key once in a batch"
            )
