"""A KvState in a small world of its own: memory, a clock that the test moves, and short verbs.

Every event is followed by `invariants.check`, unless the world was told otherwise.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable

import numpy as np

from kvservice import native
from kvservice.core import events, invariants, row_layout
from kvservice.core.block_geometry import BlockGeometry
from kvservice.core.effects import Effect, LendSegment
from kvservice.core.engine_memory import EngineSegment, MemoryKind, SegmentWay
from kvservice.core.errors import ArenaFullError, invariant
from kvservice.core.handoff_choice import HandoffPolicy
from kvservice.core.limits import Limits
from kvservice.core.records import HandoffState
from kvservice.core.representation import Identity, Part, Shape
from kvservice.core.slots import GRANULE_BYTES
from kvservice.core.state import KvState

SECOND_NS = 1_000_000_000
SEGMENT_BYTES = 64 << 10
SMALL_BYTES = 4 << 10
"""16 slots a segment."""
LARGE_BYTES = 12 << 10
"""5 slots a segment, and a rest that no slot fits in."""
ENGINE = b"engine one......"
OTHER_ENGINE = b"engine two......"
NO_IDS = events.NO_IDS
NO_U32 = events.NO_U32
OPERATIONS = {"native": native, "numpy": row_layout}


def key(number: int) -> bytes:
    """Return the block key of a number."""
    return number.to_bytes(8, "big") * 4


def keys(numbers: Iterable[int]) -> bytes:
    """Return the packed block keys of some numbers."""
    return b"".join(key(number) for number in numbers)


def identity(model: str = "model", **changes) -> Identity:
    """Return the identity of a model."""
    fields = {"layers_count": 64, "kv_heads_count": 8, "k_head_dim": 128, "hash_tokens": 16} | changes
    return Identity(model_id=model, weights_revision="1", **fields)


def part(block_bytes: int = SMALL_BYTES, *, group: int = 0, **changes) -> Part:
    """Return a part with blocks of that many bytes; `changes` are fields of its shape."""
    fields = {"dtype": "bfloat16", "kv_packing": "packed", "block_tokens": 16} | changes
    return Part(kv_group=group, layers_count=1, heads_count=1, shape=Shape(**fields), block_bytes=block_bytes)


def ids(numbers: Iterable[int]) -> np.ndarray:
    """Return ids as batches carry them."""
    return np.array(list(numbers), dtype=np.uint64)


def places_of(slots) -> list[tuple[int, int]]:
    """Return (segment, granule) where each of some slots begins."""
    return list(zip(slots.segments.tolist(), slots.granules.tolist(), strict=True))


def block_layout(
    *pieces: tuple[int, int, int, int], blocks_count: int = 2, sizes: Iterable[int]
) -> BlockGeometry:
    """Return a layout with pieces of (segment, offset, stride, length), over segments of some sizes."""
    columns = list(zip(*pieces, strict=True))
    offsets, strides, lengths = (np.array(column, dtype=np.uint64) for column in columns[1:])
    return BlockGeometry(
        segment_sizes_bytes=np.array(list(sizes), dtype=np.uint64),
        segments=np.array(columns[0], dtype=np.uint32),
        offsets=offsets,
        strides=strides,
        lengths=lengths,
        blocks_count=blocks_count,
    )


class HeapMemory:
    """Arena memory that is plain arrays.

    pages: of every segment there ever was; stale readers still watch those of the ones that are gone.
    is_exhausted: the machine refuses fresh segments.
    """

    def __init__(self, limits: Limits) -> None:
        granules = limits.segment_bytes // GRANULE_BYTES
        self.pages = [np.zeros(granules, dtype=np.uint64) for _ in range(limits.segments_count)]
        self.gone: set[int] = set()
        self.directories: dict[str, list[np.ndarray]] = {}
        self.is_exhausted = False

    def generations(self, segment: int) -> np.ndarray:
        """See ArenaMemory."""
        invariant(segment not in self.gone, f"segment {segment} was given up")
        return self.pages[segment]

    def create_segment(self) -> int:
        """See ArenaMemory."""
        if self.is_exhausted:
            raise ArenaFullError("the machine refuses the memory")
        self.pages.append(np.zeros_like(self.pages[0]))
        return len(self.pages) - 1

    def discard_segment(self, segment: int) -> None:
        """See ArenaMemory."""
        invariant(segment not in self.gone, f"segment {segment} was given up before")
        self.gone.add(segment)

    def create_directory(self, tenant: str, capacity_rows: int) -> np.ndarray:
        """See ArenaMemory."""
        rows = np.zeros(capacity_rows, dtype=row_layout.ROW_DTYPE)
        self.directories.setdefault(tenant, []).append(rows)
        return rows


class World:
    """A state, its memory, the time, and the effects of the events so far.

    check_every: events between two checks of the invariants; 0 for no checks.
    """

    def __init__(self, *, operations=native, check_every: int = 1, life: int = 7, **limits) -> None:
        fields = {"segment_bytes": SEGMENT_BYTES, "segments_count": 4} | limits
        self.limits = Limits(**fields)
        self.memory = HeapMemory(self.limits)
        self.now_ns = SECOND_NS
        self.effects: list[Effect] = []
        self.last_effects: tuple[Effect, ...] = ()
        self.state = KvState(
            self.limits, life=life, memory=self.memory, operations=operations, server_key=bytes(range(32))
        )
        self.books = self.state.books
        self._check_every = check_every
        self._numbers = itertools.count(1)

    def handle(self, event):
        """Give an event to the state now, and return its answer."""
        number = next(self._numbers)
        try:
            handled = self.state.handle(event, self.now_ns)
        finally:
            if self._check_every and number % self._check_every == 0:
                invariants.check(self.state)
        self.last_effects = handled.effects
        self.effects.extend(handled.effects)
        return handled.answer

    def advance(self, seconds: float) -> int | None:
        """Let time pass, and let the state notice."""
        self.now_ns += round(seconds * SECOND_NS)
        return self.handle(events.Tick())

    def fresh(self) -> bytes:
        """Return 16 bytes that no call returned before, like a token or a request id."""
        return next(self._numbers).to_bytes(16, "little")

    def attach(self, tenant="acme", *, engine=ENGINE, is_local=True, resume=b"", name="test") -> Client:
        """Open or resume a session."""
        answer = self.handle(events.Attach(tenant, engine, name, self.fresh(), resume, is_local))
        return Client(self, answer)

    def end_transfer(self, transfer_id: int, checksums: Iterable[int] | None = None) -> None:
        """Say that a wire touches its slots no more."""
        sums = None if checksums is None else np.array(list(checksums), dtype=np.uint32)
        self.handle(events.EndTransfer(transfer_id, sums))

    def facts(self, tenant: str = "acme", *, after: int = 0) -> list:
        """Return what the history of a tenant says."""
        return self.books.tenant(tenant).history.after(after, limit_count=1 << 30)

    def lent(self, number: int | None = None) -> list[LendSegment]:
        """Return the loans so far, of one segment if told."""
        loans = [effect for effect in self.effects if isinstance(effect, LendSegment)]
        return [loan for loan in loans if number in {None, loan.segment}]

    def pool(self, tenant: str = "acme", slot_bytes: int = SMALL_BYTES):
        """Return the pool of a tenant for a slot size."""
        return self.books.tenant(tenant).pools[slot_bytes]

    def states_count(self, slot_state: int, tenant: str = "acme") -> int:
        """Count a tenant's slots in a state."""
        return sum(int((p.state == slot_state).sum()) for p in self.books.tenant(tenant).pools.values())

    def is_moved(self, slots) -> bool:
        """Say whether a reader would see that every one of the slots had another owner since."""
        shown = [int(self.memory.pages[segment][granule]) for segment, granule in places_of(slots)]
        return all(now > then for now, then in zip(shown, slots.generations.tolist(), strict=True))


class Client:
    """The verbs of one session."""

    def __init__(self, world: World, answer) -> None:
        self.world = world
        self.token: bytes = answer.token
        self.session_id: int = answer.session_id
        self.is_resumed: bool = answer.is_resumed

    def leave(self) -> None:
        """End the session."""
        self.world.handle(events.SessionEnded(self.token))

    def open(self, *parts: Part | int, salt=b"", model="model") -> tuple[int, ...]:
        """Open a namespace; a number is a part of its own, with blocks of that many bytes."""
        return self.open_answer(*parts, salt=salt, model=model).space_ids

    def open_answer(self, *parts: Part | int, salt=b"", model="model"):
        """Open a namespace and return the whole answer."""
        asked = parts or (SMALL_BYTES,)
        made = tuple(
            part(each, group=(index << 20) + each) if isinstance(each, int) else each
            for index, each in enumerate(asked)
        )
        return self.world.handle(events.OpenNamespace(self.token, identity(model), salt, made))

    def reserve(self, spaces, numbers, *, request_id=None, ttl_s: float = 0):
        """Ask for the right to write."""
        packed = numbers if isinstance(numbers, bytes) else keys(numbers)
        request = self.world.fresh() if request_id is None else request_id
        ttl_ns = round(ttl_s * SECOND_NS)
        return self.world.handle(events.Reserve(self.token, request, tuple(spaces), packed, ttl_ns))

    def commit(self, reservation, checksums=None):
        """Commit a reservation, given by its answer; checksums are 1, 2, 3... unless given."""
        sums = np.arange(1, len(reservation.slots) + 1) if checksums is None else list(checksums)
        return self.commit_id(reservation.reservation_id, sums)

    def commit_id(self, reservation_id: int, checksums=()):
        """Commit a reservation, given by its id."""
        sums = np.array(checksums, dtype=np.uint32)
        return self.world.handle(events.Commit(self.token, reservation_id, sums))

    def reserve_unnamed(self, spaces, count, *, request_id: bytes | None = None, keys: bytes = b""):
        """Reserve slots for so many keys that the commit will name."""
        request_id = request_id or self.world.fresh()
        event = events.Reserve(self.token, request_id, tuple(spaces), keys, 0, unnamed_count=count)
        return self.world.handle(event)

    def commit_named(self, reservation, numbers, checksums=()):
        """Commit a reservation of unnamed keys under these."""
        sums = np.array(list(checksums), dtype=np.uint32)
        event = events.Commit(self.token, reservation.reservation_id, sums, keys(numbers))
        return self.world.handle(event)

    def put(self, spaces, numbers):
        """Reserve and commit; return the answer to the reserve."""
        reservation = self.reserve(spaces, numbers)
        self.commit(reservation)
        return reservation

    def abort(self, reservation_id: int):
        """Give a reservation up."""
        return self.world.handle(events.Abort(self.token, reservation_id))

    def lookup(self, spaces, numbers, *, ttl_s: float | None = None, locate: bool = False):
        """Look keys up, with a lease if a life is given (0: the default), or located without one."""
        packed = numbers if isinstance(numbers, bytes) else keys(numbers)
        ttl_ns = None if ttl_s is None else round(ttl_s * SECOND_NS)
        return self.world.handle(events.Lookup(self.token, tuple(spaces), packed, ttl_ns, is_locating=locate))

    def outcomes(self, spaces, numbers) -> list[int]:
        """Look keys up and return their outcomes."""
        return self.lookup(spaces, numbers).outcomes.tolist()

    def acquire(self, spaces, numbers, *, ttl_s: float = 0):
        """Lease the committed prefix."""
        ttl_ns = round(ttl_s * SECOND_NS)
        return self.world.handle(events.Acquire(self.token, tuple(spaces), keys(numbers), ttl_ns))

    def release(self, *lease_ids: int) -> list[int]:
        """End leases and return the outcomes."""
        return self.world.handle(events.Release(self.token, ids(lease_ids))).tolist()

    def renew(self, *, leases=(), reservations=(), ttl_s: float = 0):
        """Prolong leases and reservations."""
        ttl_ns = round(ttl_s * SECOND_NS)
        return self.world.handle(events.Renew(self.token, ids(leases), ids(reservations), ttl_ns))

    def beat(self, *, leases=(), reservations=(), acknowledged=(), touched=None, handoffs=(), noticed=()):
        """Send a heartbeat; `touched` are slots read through the directory."""
        segments, granules = (NO_U32, NO_U32) if touched is None else (touched.segments, touched.granules)
        beat = events.Beat(
            self.token,
            ids(leases),
            ids(reservations),
            ids(acknowledged),
            segments,
            granules,
            ids(handoffs),
            ids(noticed),
        )
        return self.world.handle(beat)

    def purge(self, namespace_id: bytes) -> int:
        """Drop a namespace."""
        return self.world.handle(events.Purge(self.token, namespace_id))

    def discard(self, slots) -> int:
        """Drop what lies in some slots, if it still does."""
        return self.world.handle(events.Discard(self.token, slots))

    def begin(self, capability_id: int, indexes, *, is_write: bool):
        """Begin a transfer over some slots of a capability."""
        slots = np.array(list(indexes), dtype=np.int64)
        return self.world.handle(events.BeginTransfer(self.token, capability_id, slots, is_write))

    # ---- handoffs

    def register(self, segments, layouts):
        """Make memory known."""
        return self.world.handle(events.RegisterSegments(self.token, tuple(segments), tuple(layouts)))

    def register_pools(self, *block_bytes: int, blocks_count: int = 16, transports=("ucx",)):
        """Make a pool of whole blocks known for each size, in a segment of its own."""
        ways = tuple(SegmentWay(name, b"address", b"key") for name in transports)
        sizes = [each * blocks_count for each in block_bytes or (SMALL_BYTES,)]
        layouts = [
            block_layout((index, 0, each, each), blocks_count=blocks_count, sizes=sizes)
            for index, each in enumerate(block_bytes or (SMALL_BYTES,))
        ]
        return self.register([EngineSegment(0x10000, each, MemoryKind.HOST, ways) for each in sizes], layouts)

    def unregister(self, *segment_ids: int) -> int:
        """Forget memory; return how many segments there were."""
        return self.world.handle(events.UnregisterSegments(self.token, ids(segment_ids)))

    def offer(
        self,
        spaces,
        numbers,
        *,
        layouts=(),
        blocks=None,
        checksums=(),
        ttl_s: float = 0,
        policy=HandoffPolicy.ANY,
        request_id: bytes | None = None,
    ):
        """Offer blocks; in the memory of the layouts they are the blocks 0, 1, 2... unless told."""
        packed = numbers if isinstance(numbers, bytes) else keys(numbers)
        count = len(packed) // len(key(0)) * len(spaces) if layouts else 0
        event = events.Offer(
            self.token,
            self.world.fresh() if request_id is None else request_id,
            tuple(spaces),
            packed,
            tuple(layouts),
            np.array(range(count) if blocks is None else blocks, dtype=np.uint32),
            np.array(checksums, dtype=np.uint32),
            round(ttl_s * SECOND_NS),
            policy,
        )
        return self.world.handle(event)

    def claim(self, handoff_id: int, spaces, *, transports=("ucx",)):
        """Take a handoff over."""
        event = events.Claim(self.token, handoff_id, tuple(spaces), frozenset(transports))
        return self.world.handle(event)

    def complete(self, handoff_id: int):
        """End a claim whose bytes have arrived."""
        return self.end_handoff(handoff_id, HandoffState.COMPLETED)

    def reject(self, handoff_id: int, reason: str = ""):
        """End a handoff that cannot be used."""
        return self.end_handoff(handoff_id, HandoffState.REJECTED, reason)

    def abort_handoff(self, handoff_id: int):
        """End a handoff that is given up."""
        return self.end_handoff(handoff_id, HandoffState.ABORTED)

    def end_handoff(self, handoff_id: int, how: HandoffState, reason: str = ""):
        """End a handoff in one of the ways that there are."""
        return self.world.handle(events.EndHandoff(self.token, handoff_id, how, reason))

    def look(self, handoff_id: int):
        """Ask what became of a handoff."""
        return self.world.handle(events.LookAtHandoff(self.token, handoff_id))
