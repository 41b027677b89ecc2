"""The things that somebody owns: sessions, reservations, leases, transfers."""

from __future__ import annotations

from dataclasses import dataclass, field

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
    """A wire that touches slots now."""

    transfer_id: int
    capability_id: int
    batch: SlotBatch
    slot_indexes: I64
    is_write: bool
    checksums: U32 | None = None
