"""What calls answer: values, the same for both flavours of the client."""

from __future__ import annotations

from dataclasses import dataclass

from kvservice.core.block_geometry import BlockGeometry
from kvservice.core.engine_memory import EngineSegment
from kvservice.core.handoff_choice import HandoffChoice
from kvservice.core.records import HandoffState
from kvservice.core.slots import I64, U8, U32, Slots

__all__ = [
    "Attachment",
    "Claim",
    "DirectSource",
    "GetResult",
    "HandoffNews",
    "HandoffOffer",
    "Lease",
    "LentPool",
    "Limits",
    "LookupResult",
    "PutResult",
    "ReceiveResult",
    "Reservation",
]


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


@dataclass(frozen=True, slots=True)
class LentPool:
    """A pool of blocks that the daemon knows of; ends with the session, or when it is taken back.

    layout_id: what offers name. segment_ids: of its memory.
    epoch: the session of this client that it belongs to.
    """

    layout_id: int
    segment_ids: tuple[int, ...]
    blocks_count: int
    block_bytes: int
    epoch: int


@dataclass(frozen=True, slots=True)
class HandoffOffer:
    """Blocks that wait to be claimed.

    deadline_s: by when; hold_until_s: when no claim lasts any longer. CLOCK_MONOTONIC of this host.
    """

    handoff_id: int
    deadline_s: float
    hold_until_s: float


@dataclass(frozen=True, slots=True)
class HandoffNews:
    """What is known of a handoff.

    is_released: the memory it was offered from may be used again.
    """

    handoff_id: int
    state: HandoffState
    is_released: bool
    reason: str


@dataclass(frozen=True, slots=True)
class DirectSource:
    """Where the blocks of a claimed handoff lie in the memory of the engine that offered them.

    geometries: one for each part, over `segments`.
    blocks: (keys, parts) uint32, number of each block in its geometry.
    checksums: (keys, parts) uint32, CRC32C of each; None where none were given.
    """

    engine_incarnation: bytes
    segments: tuple[EngineSegment, ...]
    geometries: tuple[BlockGeometry, ...]
    blocks: U32
    checksums: U32 | None


@dataclass(frozen=True, slots=True)
class Claim:
    """A handoff that is this session's until it completes, rejects or aborts it.

    keys: packed. source: if the choice is DIRECT; lease: if it is STAGED.
    deadline_s: end by CLOCK_MONOTONIC of this host, unless renewed.
    """

    handoff_id: int
    choice: HandoffChoice
    reason: str
    keys: bytes
    source: DirectSource | None
    lease: Lease | None
    deadline_s: float
    daemon_incarnation: bytes


@dataclass(frozen=True, slots=True)
class ReceiveResult:
    """Blocks that have arrived and are good.

    keys: packed, those received. choice, reason: the way they went.
    """

    keys: bytes
    choice: HandoffChoice
    reason: str
    bytes_moved: int
