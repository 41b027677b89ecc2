"""What operators see: the use of the arena, and who holds what."""

from __future__ import annotations

import numpy as np

from kvproto.kv.v1 import tier_service_pb2
from kvservice.core.slot_pool import SlotState
from kvservice.core.state import KvState

NANOSECONDS_PER_MS = 1_000_000


def tier_report(state: KvState, now_ns: int) -> tier_service_pb2.ListTiersResponse:
    """Describe the state; changes nothing."""
    books = state.books
    counts = np.zeros(len(SlotState), dtype=np.int64)
    used_bytes = 0
    for tenant in books.tenants.values():
        used_bytes += tenant.charged_bytes()
        for pool in tenant.pools.values():
            counts += np.bincount(pool.state, minlength=len(SlotState))
    tier = tier_service_pb2.Tier(
        name="dram",
        capacity_bytes=books.limits.arena_bytes,
        used_bytes=used_bytes,
        slots_total_count=int(counts.sum() - counts[SlotState.ABSENT]),
        slots_free_count=int(counts[SlotState.FREE]),
        slots_reserved_count=int(counts[SlotState.RESERVED]),
        slots_committed_count=int(counts[SlotState.COMMITTED]),
        slots_evicting_count=int(counts[SlotState.EVICTING]),
        slots_quarantined_count=int(counts[SlotState.QUARANTINED]),
        segments_lent_count=len(books.lent),
        segments_total_count=books.limits.segments_count,
        evicted_count=books.evicted_count,
    )
    owners = [
        tier_service_pb2.Owner(
            session_id=session.session_id,
            tenant=session.tenant,
            client_name=session.client_name,
            reservations_count=len(session.reservations),
            leases_count=len(session.leases),
            slots_reserved_count=sum(
                books.reservations[handle].batch.count for handle in session.reservations
            ),
            age_ms=(now_ns - session.born_ns) // NANOSECONDS_PER_MS,
            is_local=session.is_local,
        )
        for session in books.sessions.values()
    ]
    return tier_service_pb2.ListTiersResponse(tiers=[tier], owners=owners)
