"""Bounds that one daemon keeps; values that never change during its life."""

from __future__ import annotations

from dataclasses import dataclass

SPACES_PER_CALL_LIMIT = 256
"""Parts of one block in one call: more than the ranks of any known deployment."""

VERIFIED_KEYS_LIMIT = 16
VERIFIED_BYTES_LIMIT = 64 << 20
"""A call of Verify looks at the bytes on the event loop, while all others wait: so many keys at
most, and only one where the blocks of more would be larger than this."""

SALT_BYTES_LIMIT = 256

CLIENT_NAME_LIMIT = 128

ENDED_LIMIT = 1 << 16
"""Ends of reservations and leases that are remembered, so that a late second end
answers ALREADY_...; at a thousand requests a second this is a minute."""

RETRY_AFTER_MS = 50
"""Hint for a full arena: a few round trips, far less than a lease."""

SEGMENTS_PER_CALL_LIMIT = 256
LAYOUTS_PER_CALL_LIMIT = 256
PIECES_LIMIT = 4096
"""Pieces of one block: K and V of two thousand layers, far more than any model has."""

WAYS_LIMIT = 8
WAY_BYTES_LIMIT = 8192
"""An address or key of a transport: those of UCX take 40 to 300 bytes, more with many devices, or where a
segment takes many registrations."""

REASON_CHARACTERS_LIMIT = 256


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds, with their units in their names.

    default_ttl_ns, max_ttl_ms: life of reservations and leases.
    heartbeat_timeout_ns: silence after which a remote session ends.
    max_handoffs, max_engine_segments, max_layouts: of one session.
    handoff_hold_ns: life of a handoff from its offer on, however often it is renewed.
    operation_bound_ns: longest that one operation of a reader may still run after the
        deadline up to which it posts operations.
    quotas_bytes: by tenant; a tenant without an entry may use the whole arena.
    """

    max_batch_keys: int = 16384
    max_message_bytes: int = 16 << 20
    default_ttl_ns: int = 10_000_000_000
    max_ttl_ns: int = 60_000_000_000
    renew_interval_ns: int = 3_000_000_000
    heartbeat_timeout_ns: int = 10_000_000_000
    max_sessions: int = 1024
    max_reservations: int = 4096
    max_leases: int = 16384
    max_handoffs: int = 4096
    max_engine_segments: int = 1024
    max_layouts: int = 1024
    handoff_hold_ns: int = 120_000_000_000
    operation_bound_ns: int = 5_000_000_000
    event_history_count: int = 65536
    segment_bytes: int = 256 << 20
    segments_count: int = 4
    quotas_bytes: tuple[tuple[str, int], ...] = ()

    @property
    def arena_bytes(self) -> int:
        """Size of the arena."""
        return self.segments_count * self.segment_bytes

    def quota_of(self, tenant: str) -> int:
        """Bytes that the tenant may hold."""
        return dict(self.quotas_bytes).get(tenant) or self.arena_bytes
