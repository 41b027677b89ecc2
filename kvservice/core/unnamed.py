"""Reservations whose keys are named at their commit.

A writer that stores batch after batch reserves slots ahead, while it copies, and so
asks the daemon once for each batch and not twice. What others store meanwhile is
found when the keys are named: such keys are outcomes, as in a reserve, and their
slots go back with those that were left over. Until then the slots are nobody's keys,
so there is nothing pending and nothing to see.
"""

from __future__ import annotations

import numpy as np

from kvservice.core import drains
from kvservice.core.batches import (
    Mask,
    committed_mask,
    committed_slots,
    describe,
    pending_mask,
    pick_keys,
    subset,
)
from kvservice.core.books import Books
from kvservice.core.errors import InvalidFieldError
from kvservice.core.outcomes import ItemOutcome
from kvservice.core.records import Reservation, SlotBatch, SlotGroup
from kvservice.core.row_table import KEY_BYTES
from kvservice.core.slots import I64, U32


def name_keys(
    books: Books, reservation: Reservation, keys: bytes, checksums: U32, now: int
) -> tuple[bytes, U32]:
    """Give the first slots of a reservation their keys, and the other slots back.

    keys: packed and unique, at most as many as were reserved; the first `parts` slots
        hold the blocks of key 0, and so on.
    checksums: of those slots, or none at all.

    Returns the outcome of each key, a byte (DONE: it is the reservation's now, to be
    published), and the checksums of what is to be published.
    """
    spaces = [books.spaces.get(space) for space in reservation.spaces]
    tenant = books.tenant(reservation.session.tenant)
    count, parts = len(keys) // KEY_BYTES, len(spaces)
    if count > reservation.unnamed_count:
        raise InvalidFieldError(
            f"keys names {count} keys for reservation {reservation.reservation_id} of "
            f"{reservation.unnamed_count}; reserve as many as are to be committed"
        )
    if len(checksums) not in {0, count * parts}:
        raise InvalidFieldError(
            f"checksums has {len(checksums)} entries for {count} keys of {parts} parts; "
            "give one CRC32C for each, or none at all"
        )
    committed = committed_mask(tenant, spaces, keys)
    named = ~committed
    outcomes = bytes([ItemOutcome.DONE]) * count
    if committed.any() or len(tenant.pending):
        named, outcomes = _sort_out(books, reservation, keys, committed)
    if count < reservation.unnamed_count or not named.all():
        chosen = (np.flatnonzero(named)[:, None] * parts + np.arange(parts)).reshape(-1)
        _keep_only(books, reservation, chosen, now)
        keys = pick_keys(keys, named)
        checksums = checksums[chosen] if len(checksums) else checksums
    reservation.unnamed_count = 0
    reservation.keys = keys
    key_rows = np.frombuffer(keys, dtype=np.uint8).reshape(-1, KEY_BYTES)
    for group in reservation.batch.groups:
        group.pool.keys[group.indexes] = key_rows
    return outcomes, checksums


def _sort_out(books: Books, reservation: Reservation, keys: bytes, committed: Mask) -> tuple[Mask, bytes]:
    """Return which keys are left to the reservation, and the outcome of each."""
    spaces = [books.spaces.get(space) for space in reservation.spaces]
    tenant = books.tenant(reservation.session.tenant)
    pending = pending_mask(tenant, spaces, keys) & ~committed
    outcomes = np.full(len(committed), ItemOutcome.DONE, dtype=np.uint8)
    outcomes[pending] = ItemOutcome.PENDING
    outcomes[committed] = ItemOutcome.ALREADY_COMMITTED
    if committed.any():
        there = committed_slots(books, tenant, spaces, pick_keys(keys, committed))
        reservation.prefix = there
        reservation.prefix_generations = tuple(g.pool.generations[g.indexes] for g in there.groups)
    return ~(committed | pending), outcomes.tobytes()


def _keep_only(books: Books, reservation: Reservation, chosen: I64, now: int) -> None:
    """Give back the slots of a reservation that are not among `chosen`."""
    is_left = np.ones(reservation.batch.count, dtype=np.bool_)
    is_left[chosen] = False
    left = subset(reservation.batch, np.flatnonzero(is_left))
    kept = subset(reservation.batch, chosen)
    reservation.arrived = {
        place: reservation.arrived[index]
        for place, index in enumerate(chosen.tolist())
        if index in reservation.arrived
    }
    # The commit is the engine's word that nobody writes to them any more.
    drains.disown_written(books, left, capability_id=reservation.reservation_id, waiting=set(), now=now)
    reservation.batch = kept if len(chosen) else _empty(reservation.batch)
    reservation.slots = describe(reservation.batch, with_checksums=False)


def _empty(batch: SlotBatch) -> SlotBatch:
    """Return the groups of a batch with no slots, one for each space as before."""
    nothing = np.empty(0, dtype=np.int64)
    return SlotBatch(tuple(SlotGroup(group.pool, nothing, nothing) for group in batch.groups), 0)
