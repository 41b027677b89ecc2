"""The rules that must never break, as one check of a whole state.

Randomised tests call `check` after each step; it is slow and changes nothing.
"""

from __future__ import annotations

import numpy as np

from kvservice.core.books import Books, Tenant
from kvservice.core.errors import invariant
from kvservice.core.handoff_choice import HandoffChoice
from kvservice.core.outcomes import ItemOutcome
from kvservice.core.records import Handoff, Session
from kvservice.core.row_table import RowTable
from kvservice.core.slot_pool import SlotPool, SlotState
from kvservice.core.slots import I64
from kvservice.core.state import KvState


def check(state: KvState) -> None:
    """Raise InvariantError, with the rule that is broken, unless all hold."""
    books = state.books
    for tenant in books.tenants.values():
        for pool in tenant.pools.values():
            _check_conservation(books, pool)
        _check_visibility(books, tenant)
        _check_quota(tenant)
    _check_segments(books)
    _check_pins(books)
    _check_owners(books)
    _check_transfers(books)
    _check_handoffs(books)


def _check_conservation(books: Books, pool: SlotPool) -> None:
    """Every slot is in one state, for each segment, and the free ones are listed once."""
    for number in pool.segments:
        state = pool.state[pool.segment_slots(number)]
        counts = np.bincount(state, minlength=6)
        invariant(
            int(counts[: SlotState.ABSENT].sum()) == pool.slots_per_segment,
            f"segment {number}: slot states {counts.tolist()} do not add up",
        )
        page = books.memory.generations(number)
        shown = page[: pool.slots_per_segment * pool.slot_granules : pool.slot_granules]
        invariant(
            bool((shown == pool.generations[pool.segment_slots(number)]).all()),
            f"segment {number}: the page of generations differs from the pool's",
        )
    free = pool.free_indexes()
    invariant(len(np.unique(free)) == len(free), "a free slot is listed twice")
    invariant(
        bool((pool.state[free] == SlotState.FREE).all())
        and int((pool.state == SlotState.FREE).sum()) == len(free),
        "the list of free slots differs from their states",
    )
    invariant(not pool.pins[free].any(), "an allocatable slot is touched by somebody")
    invariant(bool((pool.pins >= 0).all()), "a slot has fewer than no pins")


def _check_visibility(books: Books, tenant: Tenant) -> None:
    """A key is visible exactly if its slot is committed; pending exactly if reserved by name."""
    unnamed: dict[SlotPool, list[int]] = {}
    for reservation in books.reservations.values():
        for group in reservation.batch.groups if reservation.unnamed_count else ():
            unnamed.setdefault(group.pool, []).extend(group.indexes.tolist())
    for table, state in (
        (tenant.directory, SlotState.COMMITTED),
        (tenant.pending, SlotState.RESERVED),
    ):
        slots = 0
        for pool in tenant.pools.values():
            indexes = np.flatnonzero(pool.state == state)
            if state is SlotState.RESERVED:
                indexes = np.setdiff1d(indexes, np.array(unnamed.get(pool, ()), dtype=np.int64))
            slots += len(indexes)
            _check_rows(table, pool, indexes)
        invariant(
            len(table) == slots == _live_rows(table),
            f"tenant {tenant.name!r}: {_live_rows(table)} rows, {len(table)} counted, "
            f"for {slots} {state.name} slots",
        )


def _check_rows(table: RowTable, pool: SlotPool, indexes: I64) -> None:
    slots = pool.slots(indexes, with_checksums=False)
    spaces = pool.spaces[indexes]
    for space in np.unique(spaces).tolist():
        here = spaces == space
        located = table.find(pool.keys[indexes[here]].tobytes(), space)
        invariant(
            bool(located.found.all())
            and bool((located.segments == slots.segments[here]).all())
            and bool((located.granules == slots.granules[here]).all()),
            f"a row of space {space} does not lead to the slot that holds its key",
        )


def _live_rows(table: RowTable) -> int:
    return int((table.rows["space"] != 0).sum())


def _check_quota(tenant: Tenant) -> None:
    invariant(
        tenant.charged_bytes() <= tenant.quota_bytes,
        f"tenant {tenant.name!r} is charged {tenant.charged_bytes()} of {tenant.quota_bytes} bytes",
    )


def _check_segments(books: Books) -> None:
    """Every segment is free or lent to one pool, which has it."""
    numbers = [*books.free_segments, *books.lent]
    invariant(
        len(numbers) == len(set(numbers)) == books.limits.segments_count,
        f"segments are {sorted(numbers)}, not {books.limits.segments_count} different ones",
    )
    for number, pool in books.lent.items():
        invariant(pool.has_segment(number), f"segment {number} is lent to a pool that lacks it")


def _check_pins(books: Books) -> None:
    """Pins are what leases, transfers and quarantines account for, slot by slot."""
    expected: dict[int, I64] = {}
    pools = {id(pool): pool for tenant in books.tenants.values() for pool in tenant.pools.values()}
    for key, pool in pools.items():
        expected[key] = np.zeros(len(pool.state), dtype=np.int64)
    batches = [lease.batch for lease in books.leases.values()]
    batches += [transfer.batch for transfer in books.transfers.values()]
    batches += [quarantine.batch for quarantine in books.quarantines.values()]
    batches += [handoff.staged for handoff in books.handoffs.values() if handoff.staged is not None]
    for batch in batches:
        for group in batch.groups:
            expected[id(group.pool)][group.indexes] += 1
    for key, pool in pools.items():
        invariant(bool((pool.pins == expected[key]).all()), "pins differ from their holders")
    for quarantine in books.quarantines.values():
        invariant(bool(quarantine.waiting), "a quarantine waits for nobody")
        invariant(quarantine.waiting <= books.sessions.keys(), "a quarantine waits for the dead")


def _check_owners(books: Books) -> None:
    """Reservations and leases belong to living sessions, and sessions know theirs."""
    for session in books.sessions.values():
        invariant(
            session.reservations
            == {r.reservation_id for r in books.reservations.values() if r.session is session},
            "a session's reservations differ from the books'",
        )
        invariant(
            session.leases == {x.lease_id for x in books.leases.values() if x.session is session},
            "a session's leases differ from the books'",
        )
    owned = sum(len(s.leases) + len(s.reservations) for s in books.sessions.values())
    invariant(owned == len(books.leases) + len(books.reservations), "something has no owner")
    invariant(
        len(books.leases) == books.leases_granted_count - books.leases_ended_count,
        "leases held differ from those granted less those ended",
    )


def _check_transfers(books: Books) -> None:
    """A one-sided transfer is of a living session, or ends by itself, or waits to be cut off."""
    known: dict[int, Session] = {}
    for session in books.sessions.values():
        known.update(dict.fromkeys(session.transfers, session))
    invariant(
        sum(len(session.transfers) for session in books.sessions.values()) == len(known),
        "a transfer has two owners",
    )
    for number, record in books.transfers.items():
        owner = known.pop(number, None)
        if record.owner is None:
            invariant(
                owner is None and not record.is_uncut, f"transfer {number} is the daemon's own, and owned"
            )
            continue
        invariant(owner is None or owner is record.owner, f"transfer {number} is another session's")
        is_due = record.until_ns > 0 and (record.until_ns, number) in books.deadlines
        invariant(
            (record.is_write and record.until_ns == 0) or (is_due and not record.is_uncut),
            f"nothing ends the read {number}, or time would end the write {number}",
        )
        invariant(
            (owner is not None) != record.is_uncut or is_due,
            f"transfer {number} is nobody's, or its living writer was cut off",
        )
    invariant(not known, f"sessions have transfers that are not there: {sorted(known)}")


def _check_handoffs(books: Books) -> None:
    """A handoff has one owner at each moment, and its memory is held while somebody may read it."""
    for handoff in books.handoffs.values():
        _check_handoff(books, handoff)
    named = [h for h in books.handoffs.values() if h.owner.token in books.sessions]
    invariant(
        books.handoff_requests == {(h.owner.engine, h.request_id): h.handoff_id for h in named},
        "the requests of handoffs differ from the handoffs of the living",
    )
    for session in books.sessions.values():
        for name, known, found in (
            ("offers", session.offered, [h for h in books.handoffs.values() if h.owner is session]),
            ("claims", session.claimed, [h for h in books.handoffs.values() if h.claimer is session]),
        ):
            invariant(known == {h.handoff_id for h in found}, f"a session's {name} differ from the books'")
        invariant(
            all(books.layouts[number].token == session.token for number in session.layouts)
            and all(books.engine_segments[number].token == session.token for number in session.segments),
            "a session's segments differ from the books'",
        )
    for hold in books.holds.values():
        invariant(bool(hold.waiting), f"the memory of handoff {hold.handoff_id} is held for nobody")
        invariant(hold.handoff_id in books.ended_handoffs, f"handoff {hold.handoff_id} is held and lives")
    invariant(
        sum(len(s.segments) for s in books.sessions.values()) == len(books.engine_segments)
        and sum(len(s.layouts) for s in books.sessions.values()) == len(books.layouts),
        "a segment or layout has no owner",
    )


def _check_handoff(books: Books, handoff: Handoff) -> None:
    number, claimer = handoff.handoff_id, handoff.claimer
    is_staged = handoff.decision is not None and handoff.decision.choice is HandoffChoice.STAGED
    is_without_memory = not handoff.layouts and (is_staged or handoff.staged is not None)
    invariant(
        handoff.owner.token in books.sessions or is_without_memory,
        f"handoff {number} was offered by the dead",
    )
    invariant(number not in books.ended_handoffs, f"handoff {number} lives and has ended")
    invariant((claimer is None) == (handoff.decision is None), f"handoff {number} is half claimed")
    invariant(claimer is None or claimer.token in books.sessions, f"handoff {number} is a dead one's")
    invariant(claimer is None or handoff.staged is None, f"handoff {number} is pinned twice")
    invariant(handoff.deadline_ns <= handoff.hold_until_ns, f"handoff {number} outlives its hold")
    invariant(not handoff.silent & books.sessions.keys(), f"handoff {number} calls the living silent")
    for layout in handoff.layouts:
        invariant(layout.layout_id in books.layouts, f"handoff {number} is of memory that is gone")
    lease, ended = books.leases.get(handoff.lease_id), books.ended.get(handoff.lease_id)
    invariant(is_staged == (handoff.lease_id > 0), f"handoff {number} goes through the arena without a lease")
    invariant(
        lease is None or (lease.session is claimer and lease.deadline_ns >= handoff.deadline_ns),
        f"handoff {number} outlives its lease",
    )
    # Only so may Complete answer DONE: what was read was read under the lease.
    invariant(
        ended is None or ended.outcome is ItemOutcome.ALREADY_RELEASED,
        f"handoff {number} has lost its lease by no word of its claimer",
    )
