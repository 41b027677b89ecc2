"""Lookups and leases: GRANTED -> RELEASED | EXPIRED."""

from __future__ import annotations

import numpy as np

from kvservice.core import drains
from kvservice.core.answers import LeaseAnswer, LookupAnswer, RenewAnswer
from kvservice.core.batches import (
    committed_mask,
    committed_slots,
    describe,
    pending_mask,
    pin,
    prefix_length,
    slots_at,
)
from kvservice.core.books import Books, Ended, Tenant
from kvservice.core.errors import LimitReachedError
from kvservice.core.events import Acquire, Lookup, Release, Renew
from kvservice.core.limits import RETRY_AFTER_MS
from kvservice.core.namespace import Space
from kvservice.core.outcomes import ItemOutcome
from kvservice.core.records import Lease, Session, SlotBatch
from kvservice.core.row_table import KEY_BYTES
from kvservice.core.slot_pool import SlotState
from kvservice.core.slots import U8, U32, U64, Slots

_HIT = int(ItemOutcome.HIT)
_MISS = int(ItemOutcome.MISS)
_DONE = int(ItemOutcome.DONE)
_ONE_HIT: U8 = np.array([_HIT], dtype=np.uint8)
_ONE_HIT.flags.writeable = False


class LeaseDesk:
    """Handles Lookup, Acquire, Renew and Release."""

    def __init__(self, books: Books) -> None:
        self._books = books

    def lookup(self, event: Lookup, now: int) -> LookupAnswer:
        """Say what is there, and lease the prefix if asked."""
        books = self._books
        session = books.session(event.token, now)
        spaces = books.opened(session, event.spaces)
        count = books.keys_count(event.keys)
        tenant = books.tenant(session.tenant)
        if count == 1 == len(spaces) and event.is_locating and event.ttl_ns is None:
            answer = self._locate_one(tenant, spaces[0], event.keys)
            if answer is not None:
                return answer
        # One space is the usual case, and needs one look at the directory for all that is asked.
        located = tenant.directory.find(event.keys, spaces[0].id)
        committed = located.found
        for space in spaces[1:]:
            committed = committed & tenant.directory.find_mask(event.keys, space.id)
        outcomes = np.full(count, _MISS, dtype=np.uint8)
        if len(tenant.pending) and not committed.all():
            outcomes[pending_mask(tenant, spaces, event.keys)] = ItemOutcome.PENDING
        outcomes[committed] = _HIT
        prefix = prefix_length(committed)
        if not prefix or (event.ttl_ns is None and not event.is_locating):
            return LookupAnswer(outcomes, prefix, None)
        if len(spaces) == 1:
            batch = slots_at(books, tenant, spaces[0], located, prefix)
        else:
            batch = committed_slots(books, tenant, spaces, event.keys[: prefix * KEY_BYTES])
        if event.ttl_ns is not None:
            lease = self._record(session, batch, prefix, books.ttl_ns(event.ttl_ns), now)
            return LookupAnswer(outcomes, prefix, lease)
        for group in batch.groups:
            group.pool.policy.touched(group.indexes)
        return LookupAnswer(outcomes, prefix, None, describe(batch, with_checksums=True))

    def _locate_one(self, tenant: Tenant, space: Space, key: bytes) -> LookupAnswer | None:
        """Say where one block is; None if it is not there.

        What `lookup` does, without arrays: on a batch of one they cost more than the whole round trip.
        """
        row = tenant.directory.row_of(key, space.id)
        if row is None:
            return None
        segments, granules = row["segment"].copy(), row["granule"].copy()
        pool = self._books.pool(tenant, space.slot_bytes)
        pool.policy.touched(np.array([pool.index_of(int(segments[0]), int(granules[0]))]))
        slots = Slots(segments, granules, row["generation"].copy(), row["checksum"].copy())
        return LookupAnswer(_ONE_HIT, 1, None, slots)

    def acquire(self, event: Acquire, now: int) -> LeaseAnswer | None:
        """Lease the contiguous committed prefix; None if its first key is missing."""
        books = self._books
        session = books.session(event.token, now)
        spaces = books.opened(session, event.spaces)
        books.keys_count(event.keys)
        tenant = books.tenant(session.tenant)
        if len(spaces) == 1:
            # The usual case needs one look at the directory, not two.
            located = tenant.directory.find(event.keys, spaces[0].id)
            prefix = prefix_length(located.found)
            if not prefix:
                return None
            batch = slots_at(books, tenant, spaces[0], located, prefix)
            return self._record(session, batch, prefix, books.ttl_ns(event.ttl_ns), now)
        prefix = prefix_length(committed_mask(tenant, spaces, event.keys))
        if not prefix:
            return None
        batch = committed_slots(books, tenant, spaces, event.keys[: prefix * KEY_BYTES])
        return self._record(session, batch, prefix, books.ttl_ns(event.ttl_ns), now)

    def release(self, event: Release, now: int) -> U8:
        """End leases by the engine's word; idempotent."""
        books = self._books
        session = books.session(event.token, now)
        books.check_batch(len(event.lease_ids), "lease_ids")
        outcomes = np.empty(len(event.lease_ids), dtype=np.uint8)
        for index, lease_id in enumerate(event.lease_ids.tolist()):
            lease = books.leases.get(lease_id)
            if lease is not None and lease.session.engine == session.engine:
                self._end(lease, ItemOutcome.ALREADY_RELEASED, set(), now)
                outcomes[index] = ItemOutcome.DONE
            else:
                books.late_ends_count += 1
                outcomes[index] = self._how_ended(lease_id, session, is_lease=True)
        return outcomes

    def renew(self, event: Renew, now: int) -> RenewAnswer:
        """Prolong leases and reservations, never shorten."""
        books = self._books
        session = books.session(event.token, now)
        books.check_batch(len(event.lease_ids), "lease_ids")
        books.check_batch(len(event.reservation_ids), "reservation_ids")
        ttl = books.ttl_ns(event.ttl_ns)
        return self.prolong(session, event.lease_ids, event.reservation_ids, ttl, now)

    def grant(
        self, session: Session, batch: SlotBatch, keys_count: int, ttl_ns: int, now: int
    ) -> LeaseAnswer:
        """Lease slots that were found before, for `ttl_ns` from now. Raises LimitReachedError."""
        return self._record(session, batch, keys_count, ttl_ns, now)

    def describe(self, lease_id: int, now: int) -> LeaseAnswer | None:
        """Return a lease as it was granted, with the time that it has left; None if it has ended."""
        lease = self._books.leases.get(lease_id)
        if lease is None:
            return None
        slots = describe(lease.batch, with_checksums=True)
        return LeaseAnswer(lease.lease_id, lease.keys_count, slots, lease.deadline_ns - now)

    def end_with_handoff(self, lease: Lease, waiting: set[bytes], now: int) -> None:
        """End the lease of a handoff; `waiting` are the processes that may still read under it."""
        outcome = ItemOutcome.ALREADY_EXPIRED if waiting else ItemOutcome.ALREADY_RELEASED
        self._end(lease, outcome, waiting & self._books.local_processes(lease.session.engine), now)

    def expire(self, lease: Lease, now: int) -> None:
        """End a lease whose deadline has passed."""
        waiting = self._books.local_processes(lease.session.engine)
        self._end(lease, ItemOutcome.ALREADY_EXPIRED, waiting, now)

    def lose(self, lease: Lease, now: int) -> None:
        """End a lease whose session has ended."""
        waiting = self._books.local_processes(lease.session.engine)
        self._end(lease, ItemOutcome.ALREADY_EXPIRED, waiting, now)

    def _record(
        self, session: Session, batch: SlotBatch, keys_count: int, ttl_ns: int, now: int
    ) -> LeaseAnswer:
        books = self._books
        if len(session.leases) >= books.limits.max_leases:
            raise LimitReachedError(
                f"the session holds {len(session.leases)} leases, which is the limit: release some",
                retry_after_ms=RETRY_AFTER_MS,
            )
        for group in batch.groups:
            group.pool.policy.touched(group.indexes)
        pin(batch)
        lease = Lease(books.mint(), session, batch, keys_count, now + ttl_ns)
        books.leases[lease.lease_id] = lease
        session.leases.add(lease.lease_id)
        books.schedule(lease.deadline_ns, lease.lease_id)
        books.leases_granted_count += 1
        return LeaseAnswer(lease.lease_id, keys_count, describe(batch, with_checksums=True), ttl_ns)

    def _end(self, lease: Lease, outcome: ItemOutcome, waiting: set[bytes], now: int) -> None:
        books = self._books
        del books.leases[lease.lease_id]
        lease.session.leases.discard(lease.lease_id)
        books.leases_ended_count += 1
        books.note_end(lease.lease_id, Ended(True, outcome, lease.session.engine, lease.keys_count))
        drains.disown_read(books, lease.batch, capability_id=lease.lease_id, waiting=waiting, now=now)

    def prolong(
        self, session: Session, lease_ids: U64, reservation_ids: U64, ttl_ns: int, now: int
    ) -> RenewAnswer:
        """Renew what the session's engine holds; an outcome for each."""
        books = self._books
        deadline = now + ttl_ns
        renewed: list[int] = []
        lease_outcomes = np.full(len(lease_ids), _DONE, dtype=np.uint8)
        for index, lease_id in enumerate(lease_ids.tolist()):
            lease = books.leases.get(lease_id)
            if lease is None or lease.session.engine != session.engine:
                lease_outcomes[index] = self._how_ended(lease_id, session, is_lease=True)
            else:
                lease.deadline_ns = max(lease.deadline_ns, deadline)
                renewed.append(lease.deadline_ns)
        reservation_outcomes = np.full(len(reservation_ids), _DONE, dtype=np.uint8)
        for index, reservation_id in enumerate(reservation_ids.tolist()):
            reservation = books.reservations.get(reservation_id)
            if reservation is None or reservation.session.engine != session.engine:
                how = self._how_ended(reservation_id, session, is_lease=False)
                done = how == ItemOutcome.DONE
                reservation_outcomes[index] = ItemOutcome.ALREADY_COMMITTED if done else how
            else:
                reservation.deadline_ns = max(reservation.deadline_ns, deadline)
                renewed.append(reservation.deadline_ns)
        remaining = min(renewed, default=deadline) - now
        return RenewAnswer(lease_outcomes, reservation_outcomes, remaining)

    def _how_ended(self, handle: int, session: Session, *, is_lease: bool) -> ItemOutcome:
        ended = self._books.how_ended(handle, session.engine, is_lease=is_lease)
        return ItemOutcome.UNKNOWN if ended is None else ended.outcome

    def touch(self, session: Session, segments: U32, granules: U32) -> None:
        """Learn of directory reads; what names no committed slot is passed over."""
        if not len(segments) or len(segments) != len(granules):
            return
        for pool in self._books.tenant(session.tenant).pools.values():
            indexes = pool.indexes_of(segments, granules)
            indexes = indexes[indexes >= 0]
            indexes = indexes[pool.state[indexes] == SlotState.COMMITTED]
            if len(indexes):
                pool.policy.touched(indexes)
