"""Making blocks invisible and their slots free."""

from __future__ import annotations

import numpy as np

from kvservice.core.books import Books
from kvservice.core.effects import NewsForTenant
from kvservice.core.history import FactKind
from kvservice.core.slot_pool import SlotPool, SlotState
from kvservice.core.slots import I64


def evict(books: Books, pool: SlotPool, indexes: I64) -> None:
    """Make committed, unpinned slots free, and their keys invisible."""
    if not len(indexes):
        return
    make_invisible(books, pool, indexes)
    pool.move_generation(indexes)
    pool.give_back(indexes)
    books.evicted_count += len(indexes)


def withdraw(books: Books, pool: SlotPool, indexes: I64) -> None:
    """Make committed slots invisible; they are free when their last pin is gone."""
    pinned = indexes[pool.pins[indexes] > 0]
    evict(books, pool, indexes[pool.pins[indexes] == 0])
    if len(pinned):
        make_invisible(books, pool, pinned)
        pool.state[pinned] = SlotState.EVICTING


def make_invisible(books: Books, pool: SlotPool, indexes: I64) -> None:
    """Take the keys of committed slots out of the directory, and tell it."""
    tenant = books.tenant(pool.tenant)
    spaces = pool.spaces[indexes]
    all_keys = pool.keys[indexes].tobytes()
    tenant.directory.remove(all_keys, spaces)
    is_uniform = bool((spaces == spaces[0]).all())
    for space in [int(spaces[0])] if is_uniform else np.unique(spaces).tolist():
        keys = all_keys if is_uniform else pool.keys[indexes[spaces == space]].tobytes()
        tenant.history.append(
            FactKind.REMOVED,
            namespace_id=books.spaces.get(space).namespace_id,
            space_id=space,
            keys=keys,
        )
    books.effects.append(NewsForTenant(tenant.name))


def idle_segments(books: Books) -> list[tuple[int, SlotPool, int]]:
    """List the lent segments that could be emptied now, idlest first.

    Each comes as the stamp of its latest use (0 if it is empty), its pool and its number.
    """
    found = []
    for number, owner in books.lent.items():
        slots = owner.segment_slots(number)
        state = owner.state[slots]
        idle = (state == SlotState.FREE) | (state == SlotState.COMMITTED)
        if bool(idle.all()) and not owner.pins[slots].any():
            committed = np.flatnonzero(state == SlotState.COMMITTED) + slots.start
            found.append((owner.policy.newest(committed), owner, number))
    found.sort(key=lambda entry: (entry[0], entry[2]))
    return found


def evict_segment(books: Books, owner: SlotPool, number: int) -> None:
    """Empty an idle segment and take it from its pool."""
    slots = owner.segment_slots(number)
    committed = np.flatnonzero(owner.state[slots] == SlotState.COMMITTED) + slots.start
    evict(books, owner, committed)
    owner.remove_segment(number)
    del books.lent[number]
