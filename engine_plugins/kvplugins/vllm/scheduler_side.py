"""The half that lives in vLLM's scheduler: which blocks a request may load, and which are worth saving.

A request that may load holds a lease from the moment it is promised blocks until its load has ended: eviction
cannot take what the scheduler counts on. Every way out of a request's life ends its lease, and always by the
id of the lease (engine_plugins/DESIGN.md has the table of hooks).

A request that was prefilled elsewhere may bring a ticket: its blocks then come from the engine that computed
them. A ticket is spent by the load, or given back as soon as there will be none, so that the other engine has
its memory again.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from kvplugins.vllm.plan import BlockWork, HandoffWork
from kvplugins.vllm.scheduler_handoffs import Handoffs
from kvplugins.vllm.ticket import Ticket, asks_for_handoff
from kvplugins.vllm.ticket_desk import TicketDesk

logger = logging.getLogger(__name__)


class Request(Protocol):
    """What we read of vLLM's request."""

    request_id: str
    block_hashes: Sequence[bytes]
    num_tokens: int
    num_prompt_tokens: int
    num_computed_tokens: int
    skip_reading_prefix_cache: bool
    kv_transfer_params: Mapping[str, object] | None


class HeldLease(Protocol):
    """A lease over the first `keys_count` keys that were asked for."""

    @property
    def keys_count(self) -> int:
        """How many keys it covers."""

    @property
    def daemon_incarnation(self) -> bytes:
        """The life of the daemon that granted it."""


class Leases(Protocol):
    """What the scheduler asks of the service. Neither call raises or waits longer than its deadline."""

    def acquire(self, keys: Sequence[bytes]) -> HeldLease | None:
        """Lease the longest contiguous stored prefix of the keys; None if there is none, or no service."""

    def release(self, leases: Sequence[HeldLease]) -> None:
        """End leases; one that has ended already is no mistake."""


@dataclass(frozen=True, slots=True)
class Roles:
    """What this engine does with the service, from vLLM's `kv_role` and the settings."""

    loads: bool
    saves: bool
    saves_decode: bool
    saves_handed_off: bool = True


@dataclass(slots=True)
class SchedulerCounts:
    """Totals since the start.

    lookups: times the service was asked.
    blocks_promised: blocks that the scheduler was told it may load.
    loads_begun, loads_failed: loads handed to the workers, and those that lost at least one block.
    """

    lookups: int = 0
    blocks_promised: int = 0
    loads_begun: int = 0
    loads_failed: int = 0


@dataclass(frozen=True, slots=True)
class _Claim:
    """Blocks [first_block, end_block) of a request, under a lease, or by the request's ticket."""

    first_block: int
    end_block: int
    source: HeldLease | Ticket


@dataclass(frozen=True, slots=True)
class _Load:
    """A load that the workers have been told of and have not ended."""

    block_ids: frozenset[int]
    source: HeldLease | Ticket


@dataclass(slots=True)
class _Tracked:
    """One request.

    ticket: where its blocks wait in another engine; None once it is spent or given back.
    claim: promised, memory not allocated yet.
    load: under way at the workers.
    first_block: the first block that the engine did not have itself when it last asked.
    missed_at: that block if the service had nothing for it, so that asking again costs nothing.
    has_lost_blocks: a load of this request failed. It never claims again: vLLM would ask for the same lost
        block for ever, without computing a token.
    saved_count: blocks handed to the workers for saving, from the first on.
    is_finished: vLLM is done with it, except for a load that has not ended.
    """

    request: Request
    ticket: Ticket | None = None
    claim: _Claim | None = None
    load: _Load | None = None
    first_block: int = 0
    missed_at: int | None = None
    has_lost_blocks: bool = False
    saved_count: int = 0
    is_finished: bool = False


class SchedulerSide:
    """Decides for all requests of one engine. Used by vLLM's scheduler thread alone."""

    def __init__(self, *, leases: Leases, handoffs: Handoffs, block_tokens: int, roles: Roles) -> None:
        self.counts = SchedulerCounts()
        self.tickets = TicketDesk(handoffs)
        self._leases = leases
        self._handoffs = handoffs
        self._block_tokens = block_tokens
        self._roles = roles
        self._tracked: dict[str, _Tracked] = {}
        self._planned_loads: list[BlockWork] = []

    @property
    def requests_count(self) -> int:
        """Number of requests that we remember."""
        return len(self._tracked)

    def matched_tokens(self, request: Request, local_tokens: int) -> int:
        """Say how many tokens beyond the first `local_tokens` can be loaded; whole blocks, leased.

        vLLM asks again for each step that a request waits for memory: the answer of the first time stays.
        """
        if not self._roles.loads or request.skip_reading_prefix_cache:
            return 0
        tracked = self._track(request)
        if tracked.has_lost_blocks or tracked.load is not None:
            return 0
        first = tracked.first_block = local_tokens // self._block_tokens
        claim = tracked.claim
        if claim is not None and claim.first_block <= first < claim.end_block:
            return (claim.end_block - first) * self._block_tokens
        self._drop_claim(tracked)
        if tracked.missed_at == first:
            return 0
        return self._claim(tracked, first) * self._block_tokens

    def allocated(self, request: Request, block_ids: Sequence[int], external_tokens: int) -> None:
        """Begin the load, now that the request has memory; no external tokens means that there is none.

        block_ids: all blocks of the request, its own cached ones first.
        """
        tracked = self._tracked.get(request.request_id)
        if tracked is None:
            return
        claim = tracked.claim
        if external_tokens == 0 or claim is None:
            self._drop_claim(tracked)
            self._return_ticket(tracked, "the engine has the blocks itself, or computes them")
            return
        first = tracked.first_block
        end = first + external_tokens // self._block_tokens
        source = claim.source
        work = BlockWork(
            request_id=request.request_id,
            keys=tuple(request.block_hashes[first:end]),
            block_ids=tuple(block_ids[first:end]),
            daemon_incarnation=source.daemon_incarnation,
            handoff=HandoffWork(source.handoff_ids, first) if isinstance(source, Ticket) else None,
        )
        if isinstance(source, Ticket):
            tracked.ticket = None
            self.tickets.spend(source)
        else:
            self._return_ticket(tracked, "the engine has those blocks itself")
        tracked.claim = None
        tracked.load = _Load(frozenset(work.block_ids), source)
        self._planned_loads.append(work)
        self.counts.loads_begun += 1

    def take_loads(self) -> list[BlockWork]:
        """Hand over the loads planned since the last time."""
        loads, self._planned_loads = self._planned_loads, []
        return loads

    def plan_saves(
        self,
        scheduled_tokens: Mapping[str, int],
        resolve_block_ids: Callable[[str], Sequence[int]],
    ) -> list[BlockWork]:
        """Choose the blocks that are complete once this step has run.

        scheduled_tokens: request id -> tokens that the step computes.
        resolve_block_ids: request id -> all its blocks.

        From a request's first block on, those too that it found in the engine's own cache: the service may
        have lost them since, and a prefix with a hole is worth nothing to others. What it still has, it does
        not copy.
        """
        if not self._roles.saves:
            return []
        saves = []
        for request_id, tokens_count in scheduled_tokens.items():
            tracked = self._tracked.get(request_id)
            if tracked is None or self._is_handed_off_only(tracked.request):
                continue
            end = self._complete_blocks(tracked.request, tokens_count)
            if end > tracked.saved_count:
                ids = resolve_block_ids(request_id)
                chosen = slice(tracked.saved_count, end)
                keys = tuple(tracked.request.block_hashes[chosen])
                saves.append(BlockWork(request_id, keys, tuple(ids[chosen])))
                tracked.saved_count = end
        return saves

    def preempted(self, request_ids: Iterable[str]) -> None:
        """Let preempted requests look again: they start over, and the service may know more by now."""
        for request_id in request_ids:
            tracked = self._tracked.get(request_id)
            if tracked is not None:
                self._drop_claim(tracked)
                tracked.missed_at = None

    def started(self, request: Request) -> None:
        """Remember a new request."""
        self._track(request)

    def workers_reported(
        self, *, ended: Iterable[str], failed: Iterable[str], invalid_block_ids: Iterable[int]
    ) -> None:
        """Learn which loads have ended at all ranks, and which lost blocks.

        invalid_block_ids: blocks that hold garbage; they may come before the end of their load.
        """
        invalid = frozenset(invalid_block_ids)
        if invalid:
            for tracked in self._tracked.values():
                if tracked.load is not None and tracked.load.block_ids & invalid:
                    self._lost_blocks(tracked)
        for request_id in failed:
            if request_id in self._tracked:
                self._lost_blocks(self._tracked[request_id])
        for request_id in ended:
            tracked_or_none = self._tracked.get(request_id)
            if tracked_or_none is not None:
                self._end_load(tracked_or_none)

    def finished(self, request_id: str) -> None:
        """Forget a request that has finished or was aborted, unless its load is under way.

        vLLM then keeps the blocks until the workers report the end, and so do we keep the lease: they may be
        copying under it.
        """
        tracked = self._tracked.get(request_id)
        if tracked is None:
            return
        self._drop_claim(tracked)
        self._return_ticket(tracked, "the request has ended")
        tracked.is_finished = True
        if tracked.load is None:
            del self._tracked[request_id]

    def shutdown(self) -> None:
        """End every lease, and give back every ticket."""
        leases = [
            held.source
            for tracked in self._tracked.values()
            for held in (tracked.claim, tracked.load)
            if held is not None and not isinstance(held.source, Ticket)
        ]
        for tracked in self._tracked.values():
            self._return_ticket(tracked, "the engine stops")
        self._tracked.clear()
        self._planned_loads.clear()
        if leases:
            self._leases.release(leases)

    def _track(self, request: Request) -> _Tracked:
        tracked = self._tracked.get(request.request_id)
        if tracked is None:
            tracked = self._tracked[request.request_id] = _Tracked(request)
            tracked.ticket = self.tickets.take(request.request_id, request.kv_transfer_params)
        return tracked

    def _return_ticket(self, tracked: _Tracked, reason: str) -> None:
        ticket, tracked.ticket = tracked.ticket, None
        if ticket is not None:
            self.tickets.give_back(ticket, reason)

    def _is_handed_off_only(self, request: Request) -> bool:
        """Whether a request's blocks go to another engine and not into the store as well."""
        return (
            not self._roles.saves_handed_off
            and asks_for_handoff(request.kv_transfer_params)
            and self._handoffs.can_offer
        )

    def _claim(self, tracked: _Tracked, first: int) -> int:
        """Find what can be loaded from block `first` on, and keep it so; return the number of blocks.

        The last token is always computed here, even where the prompt ends with a block: the engine needs its
        hidden state to sample the next one.
        """
        request = tracked.request
        end = (request.num_tokens - 1) // self._block_tokens
        ticket = tracked.ticket
        if ticket is not None and first < min(end, ticket.blocks_count):
            return self._promise(tracked, _Claim(first, min(end, ticket.blocks_count), ticket))
        keys = request.block_hashes[first:end]
        lease = None
        if keys:
            self.counts.lookups += 1
            lease = self._leases.acquire(keys)
        if lease is None:
            tracked.missed_at = first
            return 0
        return self._promise(tracked, _Claim(first, first + lease.keys_count, lease))

    def _promise(self, tracked: _Tracked, claim: _Claim) -> int:
        tracked.missed_at = None
        tracked.claim = claim
        blocks_count = claim.end_block - claim.first_block
        self.counts.blocks_promised += blocks_count
        return blocks_count

    def _complete_blocks(self, request: Request, scheduled_count: int) -> int:
        """Count the blocks of known tokens whose KV exists after the step.

        Draft tokens may be rejected, but a block with one of them has no hash yet.
        """
        tokens_count = request.num_computed_tokens + scheduled_count
        if not self._roles.saves_decode:
            tokens_count = min(tokens_count, request.num_prompt_tokens)
        return min(tokens_count // self._block_tokens, len(request.block_hashes))

    def _lost_blocks(self, tracked: _Tracked) -> None:
        if not tracked.has_lost_blocks:
            tracked.has_lost_blocks = True
            self.counts.loads_failed += 1
            logger.warning(
                "request %s: blocks were lost between lookup and load; it recomputes",
                tracked.request.request_id,
            )

    def _end_load(self, tracked: _Tracked) -> None:
        load, tracked.load = tracked.load, None
        source = None if load is None else load.source
        if isinstance(source, Ticket):
            self.tickets.load_ended(source, has_lost_blocks=tracked.has_lost_blocks)
        elif source is not None:
            self._leases.release([source])
        if tracked.is_finished:
            del self._tracked[tracked.request.request_id]

    def _drop_claim(self, tracked: _Tracked) -> None:
        claim, tracked.claim = tracked.claim, None
        # A ticket stays the request's until it is spent or given back.
        if claim is not None and not isinstance(claim.source, Ticket):
            self._leases.release([claim.source])
