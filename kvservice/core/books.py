"""Everything that the state remembers, in one place, and who may end what.

The desks (`sessions`, `reservations`, `leases`, `transfers`, `handoffs`) share one `Books`;
each event is handled by exactly one of them, and only `KvState.handle` calls
them.
"""

from __future__ import annotations

import heapq
from collections import Counter, OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from kvservice.core.effects import Effect
from kvservice.core.engine_memory import KnownLayout, KnownSegment
from kvservice.core.errors import (
    BatchSizeError,
    InvalidFieldError,
    SessionUnknownError,
    SpaceNotOpenError,
    StaleIncarnationError,
)
from kvservice.core.eviction import EvictionPolicy, UseClock
from kvservice.core.handoff_choice import HandoffChoice
from kvservice.core.history import History
from kvservice.core.limits import ENDED_LIMIT, SPACES_PER_CALL_LIMIT, Limits
from kvservice.core.namespace import Space, Spaces
from kvservice.core.outcomes import ItemOutcome
from kvservice.core.records import (
    Handoff,
    HandoffState,
    Hold,
    Lease,
    Quarantine,
    Reservation,
    Session,
    TransferRecord,
)
from kvservice.core.row_layout import ROW_DTYPE
from kvservice.core.row_table import KEY_BYTES, Rows, RowTable, TableOperations
from kvservice.core.slot_pool import SlotPool
from kvservice.core.slots import U64

COUNTER_BITS = 40
"""Low bits of an id; the high 24 are drawn anew in each life of the daemon, so an
id of an earlier life is told from one that was never granted."""


class ArenaMemory(Protocol):
    """The memory that the state writes to, given to it when it is built."""

    def generations(self, segment: int) -> U64:
        """Return the page of generations of a segment, (granules,) uint64."""

    def create_directory(self, tenant: str, capacity_rows: int) -> Rows:
        """Return zeroed rows of a tenant's directory; an earlier one is superseded."""

    def create_segment(self) -> int:
        """Return the number, never used before, of a fresh segment of zeros.

        Raises:
            ArenaFullError: the machine refuses the memory.
        """

    def discard_segment(self, segment: int) -> None:
        """Give a segment's memory back, although others may still have it mapped."""


class PolicyFactory(Protocol):
    """Makes the eviction policy of one pool."""

    def __call__(self, clock: UseClock) -> EvictionPolicy:
        """Return a policy over no slots."""


class Tenant:
    """What one tenant has: its tables, pools and the bytes it is charged for."""

    def __init__(
        self,
        name: str,
        *,
        quota_bytes: int,
        history_count: int,
        operations: TableOperations,
        memory: ArenaMemory,
        private_rows: Callable[[int], Rows],
    ) -> None:
        self.name = name
        self.quota_bytes = quota_bytes
        self.directory = RowTable(operations, lambda rows: memory.create_directory(name, rows))
        self.pending = RowTable(operations, private_rows)
        self.pools: dict[int, SlotPool] = {}
        self.history = History(history_count)

    def charged_bytes(self) -> int:
        """Bytes of the slots that are not free."""
        return sum(pool.used_count() * pool.slot_bytes for pool in self.pools.values())


@dataclass(frozen=True, slots=True)
class Ended:
    """How a reservation or lease ended, and whose it was."""

    is_lease: bool
    outcome: ItemOutcome
    engine: tuple[str, bytes]
    keys_count: int


@dataclass(frozen=True, slots=True)
class EndedHandoff:
    """How a handoff ended, and in which tenant it was."""

    state: HandoffState
    reason: str
    tenant: str
    keys_count: int
    choice: HandoffChoice


class Books:
    """The tables of the state. Nothing here decides; the desks do."""

    def __init__(
        self,
        limits: Limits,
        *,
        life: int,
        memory: ArenaMemory,
        operations: TableOperations,
        server_key: bytes,
        policy: PolicyFactory,
        private_rows: Callable[[int], Rows],
    ) -> None:
        self.limits = limits
        self.memory = memory
        self.operations = operations
        self.server_key = server_key
        self.policy = policy
        self.private_rows = private_rows
        self.spaces = Spaces()
        self.space_users: Counter[int] = Counter()
        self.use_clock = UseClock()
        self.tenants: dict[str, Tenant] = {}
        self.sessions: dict[bytes, Session] = {}
        self.reservations: dict[int, Reservation] = {}
        self.requests: dict[tuple[tuple[str, bytes], bytes], int] = {}
        self.leases: dict[int, Lease] = {}
        self.quarantines: dict[int, Quarantine] = {}
        self.transfers: dict[int, TransferRecord] = {}
        self.ended: OrderedDict[int, Ended] = OrderedDict()
        self.engine_segments: dict[int, KnownSegment] = {}
        self.layouts: dict[int, KnownLayout] = {}
        self.handoffs: dict[int, Handoff] = {}
        self.handoff_requests: dict[tuple[tuple[str, bytes], bytes], int] = {}
        self.holds: dict[int, Hold] = {}
        self.ended_handoffs: OrderedDict[int, EndedHandoff] = OrderedDict()
        self.deadlines: list[tuple[int, int]] = []
        self.free_segments: deque[int] = deque(range(limits.segments_count))
        self.last_tenant: dict[int, str] = {}
        self.lent: dict[int, SlotPool] = {}
        self.effects: list[Effect] = []
        self.evicted_count = 0
        self.leases_granted_count = 0
        self.leases_ended_count = 0
        self.late_ends_count = 0
        self.is_draining = False
        self._life = life << COUNTER_BITS
        self._counter = 0

    def mint(self) -> int:
        """Return a fresh id of this life."""
        self._counter += 1
        return self._life | self._counter

    def check_life(self, handle: int, name: str) -> None:
        """Raise StaleIncarnationError for an id of another life of the daemon."""
        if (handle >> COUNTER_BITS) << COUNTER_BITS != self._life:
            raise StaleIncarnationError(
                f"{name} {handle} is not of this life of the daemon; attach and begin again"
            )

    def session(self, token: bytes, now: int) -> Session:
        """Return the living session of a token, and note that it was heard."""
        session = self.sessions.get(token)
        if session is None:
            raise SessionUnknownError("session_token names no living session; attach again")
        session.heard_ns = now
        return session

    def tenant(self, name: str) -> Tenant:
        """Return a tenant, made at its first use."""
        tenant = self.tenants.get(name)
        if tenant is None:
            tenant = Tenant(
                name,
                quota_bytes=self.limits.quota_of(name),
                history_count=self.limits.event_history_count,
                operations=self.operations,
                memory=self.memory,
                private_rows=self.private_rows,
            )
            self.tenants[name] = tenant
        return tenant

    def pool(self, tenant: Tenant, slot_bytes: int) -> SlotPool:
        """Return the tenant's pool for a slot size, made at its first use."""
        pool = tenant.pools.get(slot_bytes)
        if pool is None:
            pool = SlotPool(
                tenant=tenant.name,
                slot_bytes=slot_bytes,
                segment_bytes=self.limits.segment_bytes,
                policy=self.policy(self.use_clock),
            )
            tenant.pools[slot_bytes] = pool
        return pool

    def opened(self, session: Session, spaces: tuple[int, ...]) -> list[Space]:
        """Return the spaces of a request, each opened by the session before."""
        if not 1 <= len(spaces) <= SPACES_PER_CALL_LIMIT:
            raise InvalidFieldError(
                f"space_ids has {len(spaces)} entries; 1 to {SPACES_PER_CALL_LIMIT} are allowed"
            )
        if len(set(spaces)) != len(spaces):
            raise InvalidFieldError(f"space_ids {list(spaces)} names a space twice")
        for space in spaces:
            if space not in session.spaces:
                raise SpaceNotOpenError(
                    f"space_ids names {space}, which this session has not opened; call OpenNamespace first"
                )
        return [self.spaces.get(space) for space in spaces]

    def keys_count(self, keys: bytes) -> int:
        """Return the number of packed keys, after checking the batch's size."""
        count, rest = divmod(len(keys), KEY_BYTES)
        if rest:
            raise InvalidFieldError(f"keys has {len(keys)} bytes, which is no multiple of {KEY_BYTES}")
        self.check_batch(count, "keys", smallest=1)
        return count

    def check_batch(self, count: int, name: str, *, smallest: int = 0) -> None:
        """Raise BatchSizeError unless `count` items may come in one call."""
        if not smallest <= count <= self.limits.max_batch_keys:
            raise BatchSizeError(
                f"{name} has {count} items; {smallest} to {self.limits.max_batch_keys} "
                "are allowed in one call: split the batch"
            )

    def ttl_ns(self, asked_ns: int) -> int:
        """Return the life to grant for the one that was asked for."""
        if asked_ns < 0:
            raise InvalidFieldError(f"ttl is {asked_ns} ns; it must not be negative")
        return min(asked_ns or self.limits.default_ttl_ns, self.limits.max_ttl_ns)

    def note_end(self, handle: int, ended: Ended) -> None:
        """Remember how something ended, for a while."""
        self.ended[handle] = ended
        if len(self.ended) > ENDED_LIMIT:
            self.ended.popitem(last=False)

    def note_handoff_end(self, handoff_id: int, ended: EndedHandoff) -> None:
        """Remember how a handoff ended, for a while."""
        self.ended_handoffs[handoff_id] = ended
        if len(self.ended_handoffs) > ENDED_LIMIT:
            self.ended_handoffs.popitem(last=False)

    def schedule(self, deadline_ns: int, handle: int) -> None:
        """Look at `handle` again at its deadline."""
        heapq.heappush(self.deadlines, (deadline_ns, handle))

    def how_ended(self, handle: int, engine: tuple[str, bytes], *, is_lease: bool) -> Ended | None:
        """Return how an engine's reservation or lease ended; None if we do not know it."""
        ended = self.ended.get(handle)
        if ended is None or ended.engine != engine or ended.is_lease != is_lease:
            return None
        return ended

    def local_processes(self, engine: tuple[str, bytes]) -> set[bytes]:
        """Return the tokens of the engine's living processes that may map memory."""
        return {
            session.token
            for session in self.sessions.values()
            if session.is_local and session.engine == engine
        }


def private_rows(capacity_rows: int) -> Rows:
    """Return zeroed rows in this process's own memory."""
    return np.zeros(capacity_rows, dtype=ROW_DTYPE)
