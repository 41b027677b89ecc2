"""The things that somebody owns: sessions, reservations, leases, transfers, handoffs."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum

from kvservice.core.engine_memory import KnownLayout
from kvservice.core.handoff_choice import Decision, HandoffPolicy
from kvservice.core.slot_pool import SlotPool
from kvservice.core.slots import I64, U32, U64, Slots


@dataclass(frozen=True, slots=True)
class SlotGroup:
    """Slots of one pool within a batch.

    indexes: (n,) int64 into the pool.
    positions: (n,) int64, where each stands in the batch's key-major order.
    """

    pool: SlotPool
    indexes: I64
    positions: I64


@dataclass(frozen=True, slots=True)
class SlotBatch:
    """Slots of one reservation or lease, over one or more pools."""

    groups: tuple[SlotGroup, ...]
    count: int


class HandoffState(IntEnum):
    """Where a handoff stands; the numbers of `kv.v1.HandoffState`."""

    OFFERED = 1
    CLAIMED = 2
    COMPLETED = 3
    REJECTED = 4
    ABORTED = 5
    EXPIRED = 6


@dataclass(frozen=True, slots=True)
class Notice:
    """News of a handoff for the session that offered it.

    is_released: nobody can be reading the memory it was offered from any more.
    """

    handoff_id: int
    state: HandoffState
    is_released: bool
    reason: str


@dataclass(slots=True)
class Session:
    """The liveness of one client process."""

    session_id: int
    token: bytes
    tenant: str
    incarnation: bytes
    client_name: str
    is_local: bool
    born_ns: int
    heard_ns: int
    spaces: set[int] = field(default_factory=set)
    reservations: set[int] = field(default_factory=set)
    leases: set[int] = field(default_factory=set)
    revoked: set[int] = field(default_factory=set)
    segments: set[int] = field(default_factory=set)
    layouts: set[int] = field(default_factory=set)
    offered: set[int] = field(default_factory=set)
    claimed: set[int] = field(default_factory=set)
    transfers: set[int] = field(default_factory=set)
    notices: dict[int, Notice] = field(default_factory=dict)

    @property
    def engine(self) -> tuple[str, bytes]:
        """Who may use each other's capabilities: one engine of one tenant."""
        return (self.tenant, self.incarnation)


@dataclass(slots=True)
class Reservation:
    """The exclusive right to write some slots, until `deadline_ns`.

    asked_keys: packed, of the request, to tell a retry from another request; empty where
        the commit is to name them: nothing is pending then.
    keys: packed, of the granted keys.
    slots: where `batch` is, which does not change before the end.
    prefix: those of the request's keys that were there before, with their generations.
    writes_count: transfers that write to the slots now.
    unnamed_count: keys that the commit will name; 0 where the reserve named them.
    arrived: slot index to the checksum of what came over a wire.
    """

    reservation_id: int
    session: Session
    request_id: bytes
    asked_keys: bytes
    spaces: tuple[int, ...]
    keys: bytes
    outcomes: bytes
    batch: SlotBatch
    slots: Slots
    prefix: SlotBatch
    prefix_generations: tuple[U64, ...]
    deadline_ns: int
    writes_count: int = 0
    unnamed_count: int = 0
    arrived: dict[int, int] = field(default_factory=dict)


@dataclass(slots=True)
class Lease:
    """The shared right to read some slots, until `deadline_ns`."""

    lease_id: int
    session: Session
    batch: SlotBatch
    keys_count: int
    deadline_ns: int


@dataclass(slots=True)
class Quarantine:
    """Slots of an ended capability that some process may still touch.

    waiting: tokens of the local sessions that have not acknowledged yet.
    is_write: slots of a reservation (QUARANTINED); else pins of a lease.
    """

    capability_id: int
    batch: SlotBatch
    waiting: set[bytes]
    is_write: bool
    since_ns: int


@dataclass(slots=True)
class TransferRecord:
    """A wire that touches slots now.

    owner: the session whose process moves the bytes, one-sidedly; None where this daemon moves them.
    until_ns: when no operation of the owner's can touch the slots any more; 0 where only its end tells.
    is_uncut: a one-sided write that failed, or whose writer is gone: bytes of it may still be on their
        way, and stay so until the end that takes them in has been cut off.
    """

    transfer_id: int
    capability_id: int
    batch: SlotBatch
    slot_indexes: I64
    is_write: bool
    owner: Session | None = None
    until_ns: int = 0
    is_uncut: bool = False


@dataclass(slots=True)
class Handoff:
    """Blocks on their way from the session that offered them to the one that claims them.

    owner: lives, but where the handoff goes through the arena: that survives it.
    spaces: of the parts of each key. keys: packed.
    layouts: one for each space; none where the blocks lie in the arena only, now or from the first.
    blocks, checksums: (keys * spaces,) uint32, key-major; no checksums at all for none.
    staged: the blocks in the arena, pinned until the claim or the end; None where they are not.
    deadline_ns: by when it must be claimed, or renewed by its claimer.
    hold_until_ns: no renewal goes beyond it.
    lease_id: of a claim through the arena; the lease itself is gone if its claimer has released it.
    silent: tokens of processes of the claimer's engine that fell silent during the claim, on other
        hosts, and may be reading all the same.
    """

    handoff_id: int
    owner: Session
    request_id: bytes
    spaces: tuple[int, ...]
    keys: bytes
    layouts: tuple[KnownLayout, ...]
    blocks: U32
    checksums: U32
    policy: HandoffPolicy
    staged: SlotBatch | None
    deadline_ns: int
    hold_until_ns: int
    claimer: Session | None = None
    decision: Decision | None = None
    lease_id: int = 0
    silent: set[bytes] = field(default_factory=set)


@dataclass(slots=True)
class Hold:
    """A handoff that has ended while its claimer may still be reading the memory it came from.

    waiting: tokens of the claimer's processes that have not acknowledged.
    until_ns: when none of them can be reading any more, acknowledged or not: they post nothing
        after their own deadline, and no operation takes longer than its bound.
    """

    handoff_id: int
    owner_token: bytes
    layouts: tuple[KnownLayout, ...]
    waiting: set[bytes]
    until_ns: int
    state: HandoffState
    reason: str
