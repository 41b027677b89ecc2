"""Stand-ins for vLLM's objects, for the service, and for time."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np

from kvclient import BlockPool, GetResult, ItemOutcome, PutResult
from kvplugins.vllm.scheduler_handoffs import NoHandoffs
from kvplugins.vllm.scheduler_side import Roles, SchedulerSide
from kvplugins.vllm.ticket import Ticket

BLOCK_TOKENS = 4
BOTH_ROLES = Roles(loads=True, saves=True, saves_decode=False)


def key(name: str) -> bytes:
    """Return the block key of a name."""
    return hashlib.sha256(name.encode()).digest()


def keys(prompt: str, count: int) -> list[bytes]:
    """Return the keys of a prompt's first blocks."""
    return [key(f"{prompt}/{number}") for number in range(count)]


@dataclass
class FakeRequest:
    """What the plugin reads of vLLM's request; `prompt` names the tokens."""

    request_id: str
    prompt: str
    num_prompt_tokens: int
    num_tokens: int = 0
    num_computed_tokens: int = 0
    skip_reading_prefix_cache: bool = False
    kv_transfer_params: dict[str, object] | None = None
    block_hashes: list[bytes] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.num_tokens = self.num_tokens or self.num_prompt_tokens
        self.rehash()

    def rehash(self) -> None:
        """Hash the whole blocks, as vLLM does when tokens are appended."""
        self.block_hashes = keys(self.prompt, self.num_tokens // BLOCK_TOKENS)


@dataclass(frozen=True)
class FakeLease:
    """A lease over so many keys."""

    lease_id: int
    keys_count: int
    daemon_incarnation: bytes = b"first"


class FakeLeases:
    """A service that knows some keys and remembers every lease."""

    def __init__(self, stored: Sequence[bytes] = ()) -> None:
        self.stored = set(stored)
        self.lookups_count = 0
        self.granted: list[FakeLease] = []
        self.released: list[int] = []

    @property
    def held(self) -> set[int]:
        """Ids of the leases that were not released."""
        return {lease.lease_id for lease in self.granted} - set(self.released)

    def acquire(self, wanted: Sequence[bytes]) -> FakeLease | None:
        self.lookups_count += 1
        count = 0
        while count < len(wanted) and wanted[count] in self.stored:
            count += 1
        if not count:
            return None
        self.granted.append(FakeLease(len(self.granted) + 1, count))
        return self.granted[-1]

    def release(self, leases: Sequence[FakeLease]) -> None:
        self.released += [lease.lease_id for lease in leases]


OUR_DAEMON = b"first"
OUR_NAMESPACE = b"namespace"


def ticket(blocks: int, *handoff_ids: int, **other: Any) -> Ticket:
    """Return a ticket for the first blocks of a prompt that was prefilled elsewhere."""
    fields = {"daemon_incarnation": OUR_DAEMON, "namespace_id": OUR_NAMESPACE}
    return Ticket(handoff_ids=handoff_ids or (77,), blocks_count=blocks, **(fields | other))


class FakeOffer:
    """Blocks on offer until a test says that they are released."""

    def __init__(self, keys: Sequence[bytes], block_ids: Sequence[int], *, is_complete: bool) -> None:
        self.keys = list(keys)
        self.block_ids = list(block_ids)
        self.ticket = ticket(len(keys)) if is_complete else None
        self.has_been_released = False
        self.fault: Exception | None = None

    def is_released(self) -> bool:
        if self.fault is not None:
            raise self.fault
        return self.has_been_released


class FakeHandoffs:
    """A service that takes every offer, and knows which tickets are ours and which were given back."""

    def __init__(self) -> None:
        self.can_offer = True
        self.is_complete = True
        self.offers: list[FakeOffer] = []
        self.rejected: list[int] = []

    def offer(self, offered: Sequence[bytes], block_ids: Sequence[int]) -> FakeOffer | None:
        if not self.can_offer:
            return None
        self.offers.append(FakeOffer(offered, block_ids, is_complete=self.is_complete))
        return self.offers[-1]

    def is_ours(self, one: Ticket) -> bool:
        return (one.daemon_incarnation, one.namespace_id) == (OUR_DAEMON, OUR_NAMESPACE)

    def reject(self, one: Ticket, reason: str) -> None:
        assert reason
        self.rejected += one.handoff_ids


def make_side(
    leases: FakeLeases, *, handoffs: FakeHandoffs | NoHandoffs | None = None, roles: Roles = BOTH_ROLES
) -> SchedulerSide:
    """Return a scheduler's side over fakes."""
    return SchedulerSide(
        leases=leases, handoffs=handoffs or NoHandoffs(), block_tokens=BLOCK_TOKENS, roles=roles
    )


class FakeScheduler:
    """vLLM's scheduler as far as one connector sees it: who is asked what, in which order.

    Blocks are numbered from 1; a request's blocks are those that it was given when it was allocated.
    """

    def __init__(self, side: SchedulerSide) -> None:
        self.side = side
        self.block_ids: dict[str, list[int]] = {}
        self._next_block_id = 1

    def arrive(self, request: FakeRequest) -> FakeRequest:
        self.side.started(request)
        return request

    def admit(self, request: FakeRequest, *, local_tokens: int = 0) -> int:
        """Match and allocate; return the external tokens. With some, the request waits for its load."""
        external = self.side.matched_tokens(request, local_tokens)
        self.allocate(request, external)
        request.num_computed_tokens = local_tokens + external
        return external

    def allocate(self, request: FakeRequest, external_tokens: int) -> None:
        count = -(-request.num_tokens // BLOCK_TOKENS)
        self.block_ids[request.request_id] = list(range(self._next_block_id, self._next_block_id + count))
        self._next_block_id += count
        self.side.allocated(request, self.block_ids[request.request_id], external_tokens)

    def step(self, *scheduled: FakeRequest, tokens: int | None = None) -> SimpleNamespace:
        """Plan a step that computes `tokens` of each request, or all that it has left."""
        counts = {
            request.request_id: tokens or request.num_tokens - request.num_computed_tokens
            for request in scheduled
        }
        plan = SimpleNamespace(
            loads=self.side.take_loads(),
            saves=self.side.plan_saves(counts, self.block_ids.__getitem__),
        )
        for request in scheduled:
            request.num_computed_tokens += counts[request.request_id]
        return plan

    def load_ended(self, *request_ids: str, lost: Sequence[int] = ()) -> None:
        self.side.workers_reported(ended=request_ids, failed=(), invalid_block_ids=lost)

    def preempt(self, request: FakeRequest) -> None:
        request.num_computed_tokens = 0
        self.side.preempted([request.request_id])


class FakeNamespace:
    """A store in memory that a worker may put to and get from; `fault`, if set, is raised by every call."""

    def __init__(self) -> None:
        self.blocks: dict[bytes, bytes] = {}
        self.fault: Exception | None = None
        self.batches: list[int] = []

    def put(self, wanted: list[bytes], buffers: Any) -> PutResult:
        self._begin(wanted)
        outcomes = np.full(len(wanted), ItemOutcome.ALREADY_COMMITTED, np.uint8)
        moved = 0
        for number, name in enumerate(wanted):
            if name not in self.blocks:
                self.blocks[name] = b"".join(piece.tobytes() for piece in buffers[number])
                moved += len(self.blocks[name])
                outcomes[number] = ItemOutcome.DONE
        return PutResult(outcomes, int((outcomes == ItemOutcome.DONE).sum()), moved)

    def get(self, wanted: list[bytes], buffers: Any) -> GetResult:
        self._begin(wanted)
        outcomes = np.full(len(wanted), ItemOutcome.MISS, np.uint8)
        moved = 0
        for number, name in enumerate(wanted):
            data = self.blocks.get(name)
            if data is not None:
                for piece in buffers[number]:
                    piece[:], data = np.frombuffer(data[: piece.nbytes], np.uint8), data[piece.nbytes :]
                    moved += piece.nbytes
                outcomes[number] = ItemOutcome.HIT
        is_hit = outcomes == ItemOutcome.HIT
        return GetResult(outcomes, len(wanted) if is_hit.all() else int(is_hit.argmin()), moved)

    def _begin(self, wanted: list[bytes]) -> None:
        assert len(wanted) == len(set(wanted)), "the service refuses a key that stands twice in a batch"
        self.batches.append(len(wanted))
        if self.fault is not None:
            raise self.fault


class FakeClient:
    """A session with one daemon, which may end: a call then finds its successor."""

    def __init__(self) -> None:
        self.daemon_incarnation = b"first"
        self.successor = b"first"

    @property
    def attachment(self) -> Any:
        return self

    def list_tiers(self) -> None:
        self.daemon_incarnation = self.successor


class FakeMemory:
    """KV of two layers in NumPy arrays; buffers are lists of each block's pieces."""

    def __init__(self, blocks_count: int = 64, piece_bytes: int = 8) -> None:
        self.layers = [np.zeros((blocks_count, piece_bytes), np.uint8) for _ in range(2)]
        self.landed: list[int] = []

    @property
    def pieces_bytes(self) -> tuple[int, ...]:
        return tuple(layer.shape[1] for layer in self.layers)

    @property
    def pool(self) -> BlockPool:
        return BlockPool.of(self.layers)

    @property
    def is_host(self) -> bool:
        return True

    def mark(self) -> object:
        return None

    def wait(self, mark: object) -> None:
        pass

    def outgoing(self, block_ids: Sequence[int], mark: object) -> Any:
        return [[layer[number] for layer in self.layers] for number in block_ids]

    def incoming(self, block_ids: Sequence[int]) -> Any:
        return self.outgoing(block_ids, None)

    def land(self, block_ids: Sequence[int], mark: object) -> None:
        self.landed += block_ids

    def fill(self, block_ids: Sequence[int], start: int) -> None:
        """Write other bytes into each block and layer."""
        for number in block_ids:
            for depth, layer in enumerate(self.layers):
                layer[number] = (start + 2 * number + depth) % 251


class FakeClock:
    """Seconds that move when told to."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s
