"""Slots that lost their owner: free at once, or quarantined until nobody touches them.

A capability that ended by its engine's own word (commit, abort, release) is
touched no more: the word says so. One that ended otherwise (expiry, death of
the session) may still be in use by another process of the engine, which maps
the memory; those are asked (`Revoke`) and the slots wait for their
acknowledgement or death, never for a time-out. A wire that is still moving bytes
holds a pin of its own.
"""

from __future__ import annotations

from kvservice.core.books import Books
from kvservice.core.effects import Revoke
from kvservice.core.records import Quarantine, Session, SlotBatch
from kvservice.core.slot_pool import SlotPool, SlotState
from kvservice.core.slots import I64

_COMMITTED = int(SlotState.COMMITTED)


def disown_written(
    books: Books, batch: SlotBatch, *, capability_id: int, waiting: set[bytes], now: int
) -> None:
    """Take RESERVED slots from their writer; free them when nobody can touch them."""
    for group in batch.groups:
        group.pool.move_generation(group.indexes)
        group.pool.state[group.indexes] = SlotState.QUARANTINED
    if waiting:
        for group in batch.groups:
            group.pool.pins[group.indexes] += 1
        _wait(books, batch, capability_id=capability_id, waiting=waiting, now=now, is_write=True)
        return
    for group in batch.groups:
        _settle(group.pool, group.indexes)


def disown_read(books: Books, batch: SlotBatch, *, capability_id: int, waiting: set[bytes], now: int) -> None:
    """End the pins of a lease, now or when the last process has let go."""
    if waiting:
        _wait(books, batch, capability_id=capability_id, waiting=waiting, now=now, is_write=False)
        return
    unpin(batch)


def unpin(batch: SlotBatch) -> None:
    """Count one holder less of each slot, and free those that waited for it."""
    for group in batch.groups:
        group.pool.pins[group.indexes] -= 1
        _settle(group.pool, group.indexes)


def acknowledge(books: Books, session: Session, capability_ids: list[int]) -> None:
    """A process says that it no longer touches the memory of these; idempotent."""
    for capability_id in capability_ids:
        session.revoked.discard(capability_id)
        quarantine = books.quarantines.get(capability_id)
        if quarantine is None:
            continue
        quarantine.waiting.discard(session.token)
        if not quarantine.waiting:
            del books.quarantines[capability_id]
            unpin(quarantine.batch)


def _wait(
    books: Books,
    batch: SlotBatch,
    *,
    capability_id: int,
    waiting: set[bytes],
    now: int,
    is_write: bool,
) -> None:
    books.quarantines[capability_id] = Quarantine(capability_id, batch, waiting, is_write, now)
    for token in sorted(waiting):
        books.sessions[token].revoked.add(capability_id)
        books.effects.append(Revoke(token, capability_id))


def _settle(pool: SlotPool, indexes: I64) -> None:
    """Free the slots among `indexes` that are on their way out and unpinned."""
    if not (pool.state[indexes] > _COMMITTED).any():
        return  # The usual end of a lease: its blocks stay.
    idle = indexes[pool.pins[indexes] == 0]
    state = pool.state[idle]
    quarantined = idle[state == SlotState.QUARANTINED]
    if len(quarantined):
        pool.give_back(quarantined)
    evicting = idle[state == SlotState.EVICTING]
    if len(evicting):
        pool.move_generation(evicting)
        pool.give_back(evicting)
