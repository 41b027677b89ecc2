"""What may happen to the state: one class per event, with the answer it gets.

`KvState.handle(event, now_ns)` takes these. Keys travel packed (`bytes`, 32 per
key), ids as integers, per-slot arrays key-major. `token` is the secret of the
session on whose behalf the event comes.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Generic, TypeVar

import numpy as np

from kvservice.core.answers import (
    AttachAnswer,
    BeatAnswer,
    ClaimAnswer,
    CommitAnswer,
    HandoffAnswer,
    LeaseAnswer,
    LookupAnswer,
    OfferAnswer,
    OpenAnswer,
    RenewAnswer,
    ReserveAnswer,
    SegmentsAnswer,
    TransferAnswer,
)
from kvservice.core.block_geometry import BlockGeometry
from kvservice.core.engine_memory import EngineSegment
from kvservice.core.handoff_choice import HandoffPolicy
from kvservice.core.outcomes import ItemOutcome
from kvservice.core.records import HandoffState
from kvservice.core.representation import Identity, Part
from kvservice.core.slots import I64, U8, U32, U64, Slots

A_co = TypeVar("A_co", covariant=True)

NO_IDS: U64 = np.empty(0, dtype=np.uint64)
NO_U32: U32 = np.empty(0, dtype=np.uint32)


class Event(Generic[A_co]):
    """Base of all events; `A_co` is the type of the answer."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class Attach(Event[AttachAnswer]):
    """A client process arrives, or comes back with its token.

    token: 16 fresh random bytes for a new session.
    is_local: its death will be reported by SessionEnded; it needs no heartbeat.
    """

    tenant: str
    engine_incarnation: bytes
    client_name: str
    token: bytes
    resume_token: bytes
    is_local: bool


@dataclass(frozen=True, slots=True)
class SessionEnded(Event[None]):
    """The process is gone (or said good-bye): nothing of it touches memory now."""

    token: bytes


@dataclass(frozen=True, slots=True)
class OpenNamespace(Event[OpenAnswer]):
    """A session names the KV that it will read and write."""

    token: bytes
    identity: Identity
    salt: bytes
    parts: tuple[Part, ...]


@dataclass(frozen=True, slots=True)
class Lookup(Event[LookupAnswer]):
    """Which keys are committed in all spaces; with `ttl_ns`, lease the prefix.

    ttl_ns: life of the lease; 0 asks for the default; None asks for no lease.
    is_locating: also say where the prefix is, without a lease.
    """

    token: bytes
    spaces: tuple[int, ...]
    keys: bytes
    ttl_ns: int | None
    is_locating: bool = False


@dataclass(frozen=True, slots=True)
class Reserve(Event[ReserveAnswer]):
    """Ask for the right to write; `ttl_ns` 0 asks for the default.

    unnamed_count: instead of `keys`, so many keys that the commit will name.
    """

    token: bytes
    request_id: bytes
    spaces: tuple[int, ...]
    keys: bytes
    ttl_ns: int
    unnamed_count: int = 0


@dataclass(frozen=True, slots=True)
class Commit(Event[CommitAnswer]):
    """Make written blocks visible.

    checksums: (slots,) uint32, CRC32C of each; none at all stores them without.
    keys: of a reservation whose keys were not named, in the order of its slots.
    """

    token: bytes
    reservation_id: int
    checksums: U32
    keys: bytes = b""


@dataclass(frozen=True, slots=True)
class Abort(Event[ItemOutcome]):
    """Give a reservation up; the engine no longer writes to it."""

    token: bytes
    reservation_id: int


@dataclass(frozen=True, slots=True)
class Acquire(Event[LeaseAnswer | None]):
    """Lease the contiguous committed prefix; `ttl_ns` 0 asks for the default."""

    token: bytes
    spaces: tuple[int, ...]
    keys: bytes
    ttl_ns: int


@dataclass(frozen=True, slots=True)
class Renew(Event[RenewAnswer]):
    """Prolong leases and reservations, (n,) uint64 each."""

    token: bytes
    lease_ids: U64
    reservation_ids: U64
    ttl_ns: int


@dataclass(frozen=True, slots=True)
class Release(Event[U8]):
    """End leases; the engine no longer reads under them."""

    token: bytes
    lease_ids: U64


@dataclass(frozen=True, slots=True)
class Beat(Event[BeatAnswer]):
    """Heartbeat with renewals, acknowledgements and reports of use.

    handoff_ids: claimed ones to renew. noticed_ids: handoffs of which there is no need to tell more.
    """

    token: bytes
    lease_ids: U64
    reservation_ids: U64
    acknowledged_ids: U64
    touched_segments: U32
    touched_granules: U32
    handoff_ids: U64 = field(default_factory=lambda: NO_IDS)
    noticed_ids: U64 = field(default_factory=lambda: NO_IDS)


@dataclass(frozen=True, slots=True)
class Discard(Event[int]):
    """Make damaged blocks invisible; answers how many were still those that were meant.

    slots: as located, with their generations.
    """

    token: bytes
    slots: Slots


@dataclass(frozen=True, slots=True)
class Purge(Event[int]):
    """Drop a namespace; answers the number of blocks that are no longer visible."""

    token: bytes
    namespace_id: bytes


@dataclass(frozen=True, slots=True)
class BeginTransfer(Event[TransferAnswer]):
    """A wire is about to touch slots of a capability: pin them."""

    token: bytes
    capability_id: int
    slot_indexes: I64
    is_write: bool


@dataclass(frozen=True, slots=True)
class EndTransfer(Event[None]):
    """The wire no longer touches them; fails if the capability has ended since.

    checksums: (slots,) uint32 of what arrived; None for a read or a failed one.
    """

    transfer_id: int
    checksums: U32 | None


@dataclass(frozen=True, slots=True)
class BeginOneSided(Event[TransferAnswer]):
    """A session's own process is about to touch slots of a capability: pin them.

    ttl_ns: how long it may begin operations; 0 asks for the default.
    """

    token: bytes
    capability_id: int
    slot_indexes: I64
    is_write: bool
    ttl_ns: int


@dataclass(frozen=True, slots=True)
class EndOneSided(Event[None]):
    """That process says that it is done; fails if the capability has ended since. Idempotent.

    checksums: (slots,) uint32 of what was written; None for a read or a failed one.
    is_settled: no operation can touch the slots any more; a failed write may not know.
    """

    token: bytes
    transfer_id: int
    checksums: U32 | None
    is_settled: bool


@dataclass(frozen=True, slots=True)
class WritersCut(Event[None]):
    """What took in the bytes of these transfers is gone, and with it all that was on the way."""

    transfer_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class RegisterSegments(Event[SegmentsAnswer]):
    """An engine makes memory of its own known; `layouts` are over `segments`, all of them, in order."""

    token: bytes
    segments: tuple[EngineSegment, ...]
    layouts: tuple[BlockGeometry, ...]


@dataclass(frozen=True, slots=True)
class UnregisterSegments(Event[int]):
    """Forget segments; answers how many there were."""

    token: bytes
    segment_ids: U64


@dataclass(frozen=True, slots=True)
class Offer(Event[OfferAnswer]):
    """Blocks are there for another engine; see `kv.v1.OfferHandoffRequest`.

    blocks, checksums: (keys * spaces,) uint32, key-major; empty for none.
    """

    token: bytes
    request_id: bytes
    spaces: tuple[int, ...]
    keys: bytes
    layout_ids: tuple[int, ...]
    blocks: U32
    checksums: U32
    ttl_ns: int
    policy: HandoffPolicy


@dataclass(frozen=True, slots=True)
class Claim(Event[ClaimAnswer]):
    """An engine takes a handoff over; `transports` are those by which it reads others' memory."""

    token: bytes
    handoff_id: int
    spaces: tuple[int, ...]
    transports: frozenset[str]


@dataclass(frozen=True, slots=True)
class EndHandoff(Event[ItemOutcome]):
    """One side ends a handoff; `how` is COMPLETED, REJECTED or ABORTED."""

    token: bytes
    handoff_id: int
    how: HandoffState
    reason: str = ""


@dataclass(frozen=True, slots=True)
class LookAtHandoff(Event[HandoffAnswer]):
    """What became of a handoff."""

    token: bytes
    handoff_id: int


@dataclass(frozen=True, slots=True)
class Drain(Event[None]):
    """The daemon is about to stop: take no new work."""


@dataclass(frozen=True, slots=True)
class Tick(Event[int | None]):
    """Time has passed: expire what is due. Answers the next deadline, or None."""
