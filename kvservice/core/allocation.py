"""Finding slots: free ones, fresh segments, then the blocks least worth keeping.

It is planned first and done second: what cannot be planned, and what the machine
refuses memory for, costs nobody a block. The order is: free slots of the pool; a
segment that nobody has; the pool's own oldest blocks, or a whole segment of
another pool whose newest use is older than those (else a size that was busy
yesterday would hold its memory for ever).
"""

from __future__ import annotations

from dataclasses import dataclass

from kvservice.core.books import Books, Tenant
from kvservice.core.effects import LendSegment
from kvservice.core.errors import ArenaFullError, KvError, QuotaExceededError
from kvservice.core.limits import RETRY_AFTER_MS
from kvservice.core.removal import evict, evict_segment, idle_segments
from kvservice.core.slot_pool import SlotPool
from kvservice.core.slots import I64

SPARE_LIMIT_COUNT = 256
SPARE_SHARE = 64


@dataclass(frozen=True, slots=True)
class Need:
    """So many slots of a pool."""

    pool: SlotPool
    count: int


@dataclass(slots=True)
class _Move:
    """A segment that is to go to a pool; `owner` None: nobody has it.

    fresh: number of the memory that takes its place, where it changes its tenant.
    """

    number: int
    owner: SlotPool | None
    target: SlotPool
    fresh: int | None = None


def allocate(books: Books, tenant: Tenant, needs: list[Need]) -> list[I64]:
    """Return the slots of each need, now RESERVED.

    Raises:
        QuotaExceededError, ArenaFullError: not enough can be freed now; nothing
            was given up.
    """
    totals: dict[SlotPool, int] = {}
    for need in needs:
        totals[need.pool] = totals.get(need.pool, 0) + need.count
    excess = _check_quota(books, tenant, totals)
    moves = _plan_moves(books, totals)
    _get_memory(books, moves)
    for move in moves:
        _carry_out(books, move)
    _make_quota(books, tenant, excess, first=list(totals))
    for pool, count in totals.items():
        missing = count - pool.free_count
        if missing > 0:
            evict(books, pool, pool.victims(missing + _spare(pool)))
    taken = [need.pool.take(need.count) for need in needs]
    for pool in totals:
        lend_ahead(books, pool)
    return taken


def lend_ahead(books: Books, pool: SlotPool) -> None:
    """Give a pool an unused segment before it needs it, while there are any.

    Writers map it and touch its pages while they still fill the one before. It costs
    the others nothing: an empty segment is the first to move when they need it.
    """
    if pool.free_count >= pool.slots_per_segment or not books.free_segments:
        return
    move = _Move(books.free_segments[0], None, pool)
    try:
        _get_memory(books, [move])
    except ArenaFullError:
        return  # Nobody has asked for it yet.
    _carry_out(books, move)


def _check_quota(books: Books, tenant: Tenant, totals: dict[SlotPool, int]) -> int:
    """Return the bytes that the tenant must give up for its quota's sake."""
    if tenant.quota_bytes >= books.limits.arena_bytes:
        return 0
    asked = sum(pool.slot_bytes * count for pool, count in totals.items())
    excess = tenant.charged_bytes() + asked - tenant.quota_bytes
    if excess <= 0:
        return 0
    evictable = sum(int(each.evictable().sum()) * each.slot_bytes for each in tenant.pools.values())
    if evictable < excess:
        raise QuotaExceededError(
            f"tenant {tenant.name!r} asks for {asked} bytes and may free {evictable} of the "
            f"{tenant.charged_bytes()} it holds; its quota is {tenant.quota_bytes} bytes: "
            "release leases, or ask for a larger quota",
            retry_after_ms=RETRY_AFTER_MS,
        )
    return excess


def _make_quota(books: Books, tenant: Tenant, excess: int, *, first: list[SlotPool]) -> None:
    """Evict the tenant's own blocks until `excess` bytes are gone."""
    others = [other for other in tenant.pools.values() if other not in first]
    for pool in (*first, *others):
        if excess <= 0:
            return
        victims = pool.victims(-(-excess // pool.slot_bytes) + _spare(pool))
        evict(books, pool, victims)
        excess -= len(victims) * pool.slot_bytes


def _spare(pool: SlotPool) -> int:
    """Slots to free beyond what is asked for, so that the next batches find some.

    Giving up a block costs its share of a batch's overhead; a sixty-fourth of the
    slots changes no hit rate that could be measured.
    """
    return min(SPARE_LIMIT_COUNT, len(pool.state) // SPARE_SHARE)


def _plan_moves(books: Books, totals: dict[SlotPool, int]) -> list[_Move]:
    """Choose the segments to move; raises ArenaFullError if it cannot be enough."""
    moves: list[_Move] = []
    unused = list(books.free_segments)
    short: dict[SlotPool, int] = {}
    for pool, count in totals.items():
        missing = count - pool.free_count
        while missing > 0 and unused:
            moves.append(_Move(unused.pop(0), None, pool))
            missing -= pool.slots_per_segment
        if missing > 0:
            short[pool] = missing
    lent_count = len(books.lent) + len(moves)
    for pool, missing in short.items():
        own_count = len(pool.segments) + sum(move.target is pool for move in moves)
        if own_count == lent_count and len(pool.victims(missing)) >= missing:
            continue  # The usual case: one pool has the whole arena, and turns over.
        _plan_idle(books, totals, moves, pool, missing)
    return moves


def _plan_idle(
    books: Books, totals: dict[SlotPool, int], moves: list[_Move], pool: SlotPool, missing: int
) -> None:
    """Add to `moves` the idle segments of other pools that `pool` is to get."""
    planned = {move.number for move in moves}
    own = int(pool.evictable().sum()) - sum(pool.slots_per_segment for move in moves if move.owner is pool)
    oldest = pool.policy.oldest(pool.evictable())
    for newest, owner, number in idle_segments(books):
        # A segment of another pool goes first if it was idle for longer than what
        # this pool would have to give up, or if this pool has too little to give.
        if missing <= 0 or (missing <= own and newest >= oldest):
            break
        if owner is pool or number in planned or not _can_spare(owner, totals, moves):
            continue
        moves.append(_Move(number, owner, pool))
        missing -= pool.slots_per_segment
    if missing > own:
        raise ArenaFullError(
            f"{totals[pool]} slots of {pool.slot_bytes} bytes are asked for and "
            f"{totals[pool] - missing + own} can be freed of an arena of "
            f"{books.limits.arena_bytes} bytes: the rest is reserved, leased or in quarantine; "
            "retry, or store less at once",
            retry_after_ms=RETRY_AFTER_MS,
        )


def _can_spare(owner: SlotPool, totals: dict[SlotPool, int], moves: list[_Move]) -> bool:
    """Say whether a pool that is asked for slots itself can lose one more idle segment."""
    if owner not in totals:
        return True
    gone = 1 + sum(move.owner is owner for move in moves)
    come = sum(move.target is owner for move in moves)
    left = owner.free_count + int(owner.evictable().sum()) + (come - gone) * owner.slots_per_segment
    return left >= totals[owner]


def _get_memory(books: Books, moves: list[_Move]) -> None:
    """Have memory made for the segments that change their tenant.

    A tenant that had one may have it mapped for as long as it likes, so neither its
    memory nor its number serve anybody else.
    """
    try:
        for move in moves:
            if books.last_tenant.get(move.number, move.target.tenant) != move.target.tenant:
                move.fresh = books.memory.create_segment()
    except KvError:
        for move in moves:
            if move.fresh is not None:
                books.memory.discard_segment(move.fresh)
        raise


def _carry_out(books: Books, move: _Move) -> None:
    number, pool = move.number, move.target
    if move.owner is None:
        books.free_segments.remove(number)
    else:
        evict_segment(books, move.owner, number)
    was_used = books.last_tenant.pop(number, None) is not None
    if move.fresh is not None:
        books.memory.discard_segment(number)
        number, was_used = move.fresh, False
    page = books.memory.generations(number)
    if was_used:
        # The slots of the pool before began at other granules; readers that still
        # hold one must find its generation moved, wherever it began.
        page += 1
    books.lent[number] = pool
    books.last_tenant[number] = pool.tenant
    pool.add_segment(number, page)
    books.effects.append(LendSegment(number, pool.tenant, is_fresh=move.fresh is not None))
