"""Finding slots: free ones, fresh segments, then the blocks least worth keeping.

The order is: free slots of the pool; a segment that nobody has; the pool's own
oldest blocks, or a whole segment of another pool whose newest use is older than
those (else a size that was busy yesterday would hold its memory for ever). It is
decided before anything is given up whether enough can be found: a request that
fails costs nobody a block.
"""

from __future__ import annotations

import numpy as np

from kvservice.core.books import Books, Tenant
from kvservice.core.effects import LendSegment, NewsForTenant
from kvservice.core.errors import ArenaFullError, KvError, QuotaExceededError
from kvservice.core.history import FactKind
from kvservice.core.limits import RETRY_AFTER_MS
from kvservice.core.slot_pool import SlotPool, SlotState
from kvservice.core.slots import I64

SPARE_LIMIT_COUNT = 256
SPARE_SHARE = 64


def allocate(books: Books, pool: SlotPool, count: int) -> I64:
    """Return `count` slots of `pool`, now RESERVED.

    Raises:
        QuotaExceededError, ArenaFullError: not enough can be freed now; nothing
            was given up.
    """
    tenant = books.tenant(pool.tenant)
    excess = tenant.charged_bytes() + count * pool.slot_bytes - tenant.quota_bytes
    if excess > 0:
        _check_quota(tenant, pool, count, excess)
    if not _has_memory(books, pool, count):
        _check_memory(books, pool, count)
    if excess > 0:
        _make_quota(books, tenant, pool, excess)
    if pool.free_count < count:
        _find_memory(books, pool, count)
    taken = pool.take(count)
    lend_ahead(books, pool)
    return taken


def lend_ahead(books: Books, pool: SlotPool) -> None:
    """Give a pool an unused segment before it needs it, while there are any.

    Writers map it and touch its pages while they still fill the one before. It costs
    the others nothing: an empty segment is the first to move when they need it.
    """
    if pool.free_count < pool.slots_per_segment and books.free_segments:
        _lend(books, pool, books.free_segments.popleft())


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


def _check_quota(tenant: Tenant, pool: SlotPool, count: int, excess: int) -> None:
    """Raise QuotaExceededError unless the tenant can give up `excess` bytes."""
    wanted = -(-excess // pool.slot_bytes)
    if len(pool.victims(wanted)) >= wanted:
        return
    evictable = sum(int(each.evictable().sum()) * each.slot_bytes for each in tenant.pools.values())
    if evictable < excess:
        raise QuotaExceededError(
            f"tenant {tenant.name!r} asks for {count * pool.slot_bytes} bytes and may free "
            f"{evictable} of the {tenant.charged_bytes()} it holds; its quota is "
            f"{tenant.quota_bytes} bytes: release leases, or ask for a larger quota",
            retry_after_ms=RETRY_AFTER_MS,
        )


def _make_quota(books: Books, tenant: Tenant, pool: SlotPool, excess: int) -> None:
    """Evict the tenant's own blocks until `excess` bytes are gone."""
    others = [other for other in tenant.pools.values() if other is not pool]
    for each in (pool, *others):
        if excess <= 0:
            return
        victims = each.victims(-(-excess // each.slot_bytes) + _spare(each))
        evict(books, each, victims)
        excess -= len(victims) * each.slot_bytes


def _spare(pool: SlotPool) -> int:
    """Slots to free beyond what is asked for, so that the next batches find some.

    Giving up a block costs its share of a batch's overhead; a sixty-fourth of the
    slots changes no hit rate that could be measured.
    """
    return min(SPARE_LIMIT_COUNT, len(pool.state) // SPARE_SHARE)


def _has_memory(books: Books, pool: SlotPool, count: int) -> bool:
    """Say, cheaply, whether memory for `count` slots is certain to be found."""
    missing = count - pool.free_count - len(books.free_segments) * pool.slots_per_segment
    return missing <= 0 or len(pool.victims(missing)) >= missing


def _check_memory(books: Books, pool: SlotPool, count: int) -> None:
    """Raise ArenaFullError unless memory for `count` slots can be freed."""
    freeable = (
        pool.free_count
        + int(pool.evictable().sum())
        + (len(books.free_segments) + len(_segments_of_others(books, pool))) * pool.slots_per_segment
    )
    if freeable < count:
        raise ArenaFullError(
            f"{count} slots of {pool.slot_bytes} bytes are asked for and {freeable} can be freed "
            f"of an arena of {books.limits.arena_bytes} bytes: the rest is reserved, leased or in "
            "quarantine; retry, or store less at once",
            retry_after_ms=RETRY_AFTER_MS,
        )


def _find_memory(books: Books, pool: SlotPool, count: int) -> None:
    """Make `count` slots of the pool free; it was checked that it can be done."""
    while pool.free_count < count and books.free_segments:
        _lend(books, pool, books.free_segments.popleft())
    missing = count - pool.free_count
    if missing > 0 and len(books.lent) > len(pool.segments):
        missing = _move_idle_segments(books, pool, missing)
    if missing > 0:
        evict(books, pool, pool.victims(missing + _spare(pool)))


def _move_idle_segments(books: Books, pool: SlotPool, missing: int) -> int:
    """Take segments that other pools used less lately; return what is still missing."""
    own = int(pool.evictable().sum())
    for newest, owner, number in _segments_of_others(books, pool):
        # A segment of another pool goes first if it was idle for longer than what
        # this pool would have to give up, or if this pool has too little to give.
        if missing <= 0 or (missing <= own and newest >= pool.policy.oldest(pool.evictable())):
            break
        _take_segment(books, owner, number)
        _lend(books, pool, number)
        missing -= pool.slots_per_segment
    return missing


def _segments_of_others(books: Books, pool: SlotPool) -> list[tuple[int, SlotPool, int]]:
    """List the segments of other pools that can be emptied now, idlest first.

    Each comes with the stamp of its latest use, 0 if it is empty.
    """
    found = []
    for number, owner in books.lent.items():
        if owner is pool:
            continue
        slots = owner.segment_slots(number)
        state = owner.state[slots]
        idle = (state == SlotState.FREE) | (state == SlotState.COMMITTED)
        if bool(idle.all()) and not owner.pins[slots].any():
            committed = np.flatnonzero(state == SlotState.COMMITTED) + slots.start
            found.append((owner.policy.newest(committed), owner, number))
    found.sort(key=lambda entry: (entry[0], entry[2]))
    return found


def _take_segment(books: Books, owner: SlotPool, number: int) -> None:
    slots = owner.segment_slots(number)
    committed = np.flatnonzero(owner.state[slots] == SlotState.COMMITTED) + slots.start
    evict(books, owner, committed)
    owner.remove_segment(number)
    del books.lent[number]


def _lend(books: Books, pool: SlotPool, number: int) -> None:
    """Hand a segment that nobody has to a pool."""
    before = books.last_tenant.get(number)
    is_fresh = before not in {None, pool.tenant}
    if is_fresh:
        number = _renew(books, number)
    page = books.memory.generations(number)
    if before is not None and not is_fresh:
        # The slots of the pool before began at other granules; readers that still
        # hold one must find its generation moved, wherever it began.
        page += np.uint64(1)
    books.lent[number] = pool
    books.last_tenant[number] = pool.tenant
    pool.add_segment(number, page)
    books.effects.append(LendSegment(number, pool.tenant, is_fresh))


def _renew(books: Books, number: int) -> int:
    """Replace the memory of a segment that changes its tenant; return its new number."""
    try:
        fresh = books.memory.renew(number)
    except KvError:
        books.free_segments.append(number)
        raise
    del books.last_tenant[number]
    return fresh
