"""What calls answer: values, the same for both flavours of the client."""

from __future__ import annotations

from dataclasses import dataclass

from kvservice.core.slots import I64, U8, Slots

__all__ = ["Attachment", "GetResult", "Lease", "Limits", "LookupResult", "PutResult", "Reservation"]


@dataclass(frozen=True, slots=True)
class LookupResult:
    """What is there.

    outcomes: (keys,) uint8 of ItemOutcome: HIT, PENDING or MISS.
    prefix_count: length of the contiguous prefix of hits, in keys.
    """

    outcomes: U8
    prefix_count: int


@dataclass(frozen=True, slots=True)
class PutResult:
    """What became of each key.

    outcomes: (keys,) uint8 of ItemOutcome: DONE (stored by this call),
        ALREADY_COMMITTED or PENDING (another writer is at it).
    stored_count: keys stored by this call.
    bytes_moved: bytes copied.
    """

    outcomes: U8
    stored_count: int
    bytes_moved: int


@dataclass(frozen=True, slots=True)
class GetResult:
    """What was read.

    outcomes: (keys,) uint8 of ItemOutcome: HIT (all parts of the key are in place)
        or MISS (the memory of that key holds garbage).
    prefix_count: length of the contiguous prefix of hits, in keys.
    bytes_moved: bytes of the keys that hit.
    """

    outcomes: U8
    prefix_count: int
    bytes_moved: int


@dataclass(frozen=True, slots=True)
class Reservation:
    """The right to write some blocks; any process of the engine may use it.

    reservation_id: 0 when nothing was granted.
    outcomes: (keys,) uint8: GRANTED, ALREADY_COMMITTED or PENDING.
    granted: (granted,) int64, indexes of the granted keys in the request.
    slots: of the granted keys, key-major.
    deadline_s: end by CLOCK_MONOTONIC of this host, unless renewed.
    daemon_incarnation: the life of the daemon that it belongs to.
    """

    reservation_id: int
    outcomes: U8
    granted: I64
    slots: Slots
    deadline_s: float
    daemon_incarnation: bytes


@dataclass(frozen=True, slots=True)
class Lease:
    """The right to read some blocks; any process of the engine may use it.

    keys_count: keys covered, from the first of the request on.
    slots: key-major.
    deadline_s: end by CLOCK_MONOTONIC of this host, unless renewed.
    daemon_incarnation: the life of the daemon that it belongs to.
    """

    lease_id: int
    keys_count: int
    slots: Slots
    deadline_s: float
    daemon_incarnation: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Bounds that the daemon keeps; the fields of `kv.v1.Limits`."""

    max_batch_keys: int
    max_block_bytes: int
    max_message_bytes: int
    max_ttl_ms: int
    max_reservations: int
    max_leases: int
    arena_bytes: int
    segment_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Attachment:
    """One session with the daemon.

    epoch: counts the sessions of this client; it moves when the daemon did not
        resume the earlier one, and every handle of that is void.
    tcp_address: "host:port" of the data plane; empty where there is none.
    """

    session_token: bytes
    session_id: int
    daemon_incarnation: bytes
    renew_interval_s: float
    lease_ttl_s: float
    limits: Limits
    tenant: str
    tcp_address: str
    epoch: int
