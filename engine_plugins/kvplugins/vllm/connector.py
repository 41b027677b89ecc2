"""vLLM's connector interface, one line a hook: what each hook does is in `scheduler_side` and `worker_side`.

vLLM makes one object of this class in its scheduler and one in each worker. The worker's knows how the KV
lies; it tells the scheduler's through vLLM's handshake, before the first request.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorWorkerMetadata,
)

from kvclient import ClientSettings, Identity, Part
from kvplugins.common.link import ServiceLink
from kvplugins.common.service import Service, opener
from kvplugins.vllm import compat
from kvplugins.vllm.device import BlockMemory, block_memory
from kvplugins.vllm.identity import identity_of, incarnation_of, part_of
from kvplugins.vllm.leases import LinkedLeases
from kvplugins.vllm.metrics import FAULTS, LINKS, ServiceMetrics, link_counts
from kvplugins.vllm.plan import RankLent, StepPlan
from kvplugins.vllm.prefill_side import PrefillSide
from kvplugins.vllm.scheduler_handoffs import Handoffs, LinkedHandoffs, NoHandoffs
from kvplugins.vllm.scheduler_side import Roles, SchedulerSide
from kvplugins.vllm.sessions import Connected, client_settings, start_link
from kvplugins.vllm.settings import PluginSettings
from kvplugins.vllm.worker_handoffs import WorkerHandoffs, lending_opener
from kvplugins.vllm.worker_side import WorkerLimits, WorkerSide

logger = compat.logger_for("kvservice")

Answer = TypeVar("Answer")


@dataclass
class ServiceMetadata(KVConnectorMetadata):
    """A step's plan on its way to the workers."""

    plan: StepPlan


@dataclass
class ServiceHandshake(KVConnectorHandshakeMetadata):
    """What a worker's KV is, on its way to the scheduler; and how others can read it, if they can by then."""

    identity: Identity
    part: Part
    lent: RankLent | None


@dataclass
class LentMetadata(KVConnectorWorkerMetadata):
    """How the ranks' KV can be read now, on its way to the scheduler."""

    lent: dict[int, RankLent]

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVConnectorWorkerMetadata:
        """Add what other ranks say."""
        return LentMetadata(self.lent | other.lent) if isinstance(other, LentMetadata) else self


class KvServiceConnector(KVConnectorBase_V1):
    """Loads blocks from the service and stores blocks in it; without the service, does nothing."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config=vllm_config, role=role, kv_cache_config=kv_cache_config)
        transfer = vllm_config.kv_transfer_config
        self._settings = PluginSettings.from_extra_config(transfer.kv_connector_extra_config)
        compat.check_engine(vllm_config, kv_cache_config, allow_fail_policy=self._settings.allow_fail_policy)
        self._link: ServiceLink[Service] | None = None
        self._worker: WorkerSide | None = None
        self._worker_handoffs: WorkerHandoffs | None = None
        self._scheduler: SchedulerSide | None = None
        self._prefill: PrefillSide | None = None
        self._handoffs: LinkedHandoffs | None = None
        self._handshake: ServiceHandshake | None = None
        self._has_warned = False
        self._faults_count = 0
        self._reported: dict[str, int] = {}

    @property
    def requires_kv_delivery(self) -> bool:
        """A block that was not stored, or not handed over, is a later miss; nobody depends on it."""
        return False

    def counters(self) -> dict[str, int]:
        """Return all counts since the start, by name."""
        counts: dict[str, int] = {FAULTS: self._faults_count}
        tickets = None if self._scheduler is None else self._scheduler.tickets
        for side in (self._worker, self._scheduler, tickets, self._prefill):
            if side is not None:
                counts |= dataclasses.asdict(side.counts)
        handoffs = self._worker_handoffs
        links = (self._link, None if handoffs is None else handoffs.link)
        for name, link in zip(LINKS, links, strict=True):
            if link is not None:
                counts |= link_counts(name, link.counts)
        return counts

    # ------------------------------------------------------------------------------------- in each worker

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        """Take the engine's KV memory, say what it is, and connect."""
        names = compat.in_layer_order(list(kv_caches))
        memory = block_memory(
            {name: kv_caches[name] for name in names}, blocks_max=self._settings.blocks_per_call_max
        )
        facts = compat.collect_facts(self._vllm_config, self._kv_cache_config, names)
        identity = identity_of(
            facts,
            layers_count=len(memory.pieces_bytes),
            model_id=self._settings.model_id,
            weights_revision=self._settings.weights_revision,
        )
        part = part_of(facts, pieces_bytes=memory.pieces_bytes)
        logger.info("KV of this rank: %s; %s", identity, part)
        timeout_s = self._settings.transfer_timeout_ms / 1e3
        self._link = self._start_link(opener(self._client_settings(timeout_s, "worker"), identity, [part]))
        rank = facts.pipeline_parallel_rank * facts.tensor_parallel_size + facts.tensor_parallel_rank
        self._worker_handoffs = handoffs = self._start_handoffs(identity, part, memory, rank)
        lent = None if handoffs is None else handoffs.current()
        self._handshake = ServiceHandshake(identity, part, lent)
        self._worker = WorkerSide(
            link=self._link,
            memory=memory,
            limits=WorkerLimits(
                blocks_per_call_max=self._settings.blocks_per_call_max,
                queued_loads_max=self._settings.queued_loads_max,
                queued_load_timeout_s=self._settings.queued_load_timeout_ms / 1e3,
                step_save_timeout_s=timeout_s,
            ),
            saves=facts.tensor_parallel_rank % facts.kv_replicas_count == 0,
            handoffs=handoffs,
            clock=time.monotonic,
        )

    def _start_handoffs(
        self, identity: Identity, part: Part, memory: BlockMemory, rank: int
    ) -> WorkerHandoffs | None:
        """Lend this rank's memory, as far as this engine has blocks to hand over."""
        if self._settings.handoff == "off":
            return None
        settings = self._client_settings(self._settings.handoff_timeout_ms / 1e3, "handoffs")
        link = self._start_link(
            lending_opener(
                opener(settings, identity, [part]),
                memory.pool,
                lends=self._kv_transfer_config.is_kv_producer,
            )
        )
        return WorkerHandoffs(link=link, pool=memory.pool, rank=rank, is_host=memory.is_host)

    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata | None:
        """Tell the scheduler what this rank's KV is."""
        return self._handshake

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Queue the step's loads."""
        if self._worker is not None:
            self._worker.start_loads(self._plan().loads)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Do nothing: a request is not scheduled before all its layers are loaded."""

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        """Do nothing: a block is stored with all its layers, after the step."""

    def wait_for_save(self) -> None:
        """Store the step's blocks."""
        worker = self._worker
        if worker is not None:
            self._shielded("wait_for_save", lambda: worker.save(self._plan().saves), None)

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """Report the requests whose blocks others have done with, and the loads that have ended."""
        sent = set(self._plan().released) if self.has_connector_metadata() else set()
        return sent or None, (self._worker.take_ended() if self._worker is not None else None)

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Report the blocks that hold garbage; vLLM asks after `get_finished`."""
        return self._worker.take_lost_block_ids() if self._worker is not None else set()

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        """Tell the scheduler how this rank's KV can be read, whenever it believes otherwise."""
        if (handoffs := self._worker_handoffs) is None or not self.has_connector_metadata():
            return None
        lent = self._shielded("build_connector_worker_meta", handoffs.current, None)
        if lent is None or self._plan().known_layouts.get(handoffs.rank) == lent.pool.layout_id:
            return None
        return LentMetadata({handoffs.rank: lent})

    # ------------------------------------------------------------------------------------ in the scheduler

    def set_xfer_handshake_metadata_pp_aware(
        self, metadata: dict[tuple[int, int], KVConnectorHandshakeMetadata]
    ) -> None:
        """Learn what the ranks' KV is, and connect."""
        handshakes = [metadata[rank] for rank in sorted(metadata)]
        identities = {handshake.identity for handshake in handshakes}
        if len(identities) != 1:
            raise ValueError(f"The ranks of this engine disagree about which KV they hold: {identities}")
        # Ranks with the same KV share a part.
        parts = list(dict.fromkeys(handshake.part for handshake in handshakes))
        settings = self._client_settings(self._settings.lookup_timeout_ms / 1e3, "scheduler")
        # It writes no blocks; those that it offers lie in its workers, where it cannot sum them.
        settings = dataclasses.replace(settings, checksums=False)
        self._link = self._start_link(opener(settings, identities.pop(), parts))
        part_of_ranks = [parts.index(handshake.part) for handshake in handshakes]
        lent = {rank: each.lent for rank, each in enumerate(handshakes) if each.lent is not None}
        self._make_sides(self._scheduler_handoffs(self._link, part_of_ranks, lent))

    def _scheduler_handoffs(
        self, link: ServiceLink[Service], part_of_ranks: Sequence[int], lent: dict[int, RankLent]
    ) -> Handoffs:
        if self._settings.handoff == "off":
            return NoHandoffs()
        self._handoffs = LinkedHandoffs(
            link,
            part_of_ranks=part_of_ranks,
            wants_direct=self._settings.handoff == "direct",
            wait_s=self._settings.handoff_wait_ms / 1e3,
            clock=time.monotonic,
        )
        self._handoffs.learn(lent)
        return self._handoffs

    def _make_sides(self, handoffs: Handoffs) -> None:
        assert self._link is not None  # noqa: S101 - made by the caller, for the type
        transfer = self._kv_transfer_config
        tokens = compat.block_tokens(self._kv_cache_config)
        self._scheduler = SchedulerSide(
            leases=LinkedLeases(self._link),
            handoffs=handoffs,
            block_tokens=tokens,
            roles=Roles(
                loads=transfer.is_kv_consumer,
                saves=transfer.is_kv_producer,
                saves_decode=self._settings.save_decode,
                saves_handed_off=self._settings.save_handed_off,
            ),
        )
        if transfer.is_kv_producer:
            self._prefill = PrefillSide(handoffs=handoffs, block_tokens=tokens)

    def on_new_request(self, request: Any) -> None:
        """Remember a request."""
        if (scheduler := self._scheduler) is not None:
            self._shielded("on_new_request", lambda: scheduler.started(request), None)
        elif not self._has_warned:
            self._has_warned = True
            logger.warning("vLLM brought no word from its workers; the service is not used")

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        """Say how many tokens can be loaded; always asynchronously."""
        scheduler = self._scheduler
        if scheduler is None:
            return 0, False
        tokens_count = self._shielded(
            "get_num_new_matched_tokens", lambda: scheduler.matched_tokens(request, num_computed_tokens), 0
        )
        return tokens_count, tokens_count > 0

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Plan the load into the memory that the request has got.

        Not shielded: the scheduler has settled on the load, and a request whose load is never begun waits
        for ever.
        """
        if self._scheduler is not None:
            self._scheduler.allocated(request, blocks.get_block_ids()[0], num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        """Make the step's plan. Loads come first: a fault in what follows must not lose them."""
        scheduler = self._scheduler
        if scheduler is None:
            return ServiceMetadata(StepPlan())
        plan = StepPlan(loads=scheduler.take_loads())
        if (prefill := self._prefill) is not None:
            plan.released = self._shielded("build_connector_meta", prefill.take_released, [])
        if self._handoffs is not None:
            plan.known_layouts = self._handoffs.known_layouts

        def plan_saves() -> None:
            scheduler.preempted(scheduler_output.preempted_req_ids or ())
            plan.saves = scheduler.plan_saves(
                scheduler_output.num_scheduled_tokens,
                lambda request_id: scheduler_output.kv_connector_block_state.resolve_block_ids(request_id)[0],
            )

        self._shielded("build_connector_meta", plan_saves, None)
        return ServiceMetadata(plan)

    def update_connector_output(self, connector_output: Any) -> None:
        """Learn which loads have ended, and which failed; and what the workers lend."""
        lent = connector_output.kv_connector_worker_meta
        if self._handoffs is not None and isinstance(lent, LentMetadata):
            self._handoffs.learn(lent.lent)
        if (scheduler := self._scheduler) is not None:
            self._shielded(
                "update_connector_output",
                lambda: scheduler.workers_reported(
                    ended=connector_output.finished_recving or (),
                    failed=connector_output.failed_recving or (),
                    invalid_block_ids=connector_output.invalid_block_ids or (),
                ),
                None,
            )

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """Forget a request, and hand its blocks over if they go elsewhere; vLLM then keeps them.

        Otherwise they may be freed at once: saves were over with the step that made them.
        """
        if (scheduler := self._scheduler) is not None:
            self._shielded("request_finished", lambda: scheduler.finished(request.request_id), None)
        if (prefill := self._prefill) is None:
            return False, None
        is_whole = compat.has_ended_by_itself(request)
        freed: tuple[bool, dict[str, Any] | None] = (False, None)
        return self._shielded(
            "request_finished",
            lambda: prefill.finished(request, block_ids, is_whole=is_whole),
            freed,
        )

    def reset_cache(self) -> bool | None:
        """Drop what the service has of this KV, for all engines: the weights were changed in place, say."""
        link = self._link
        if link is None:
            return False
        return link.call(lambda service: service.client.purge(service.namespace)) is not None

    # --------------------------------------------------------------------------------------------- in both

    def get_kv_connector_stats(self) -> compat.ServiceStats | None:
        """Report what was counted since the last time."""
        counts = self.counters()
        changes = {name: count - self._reported.get(name, 0) for name, count in counts.items()}
        self._reported = counts
        stats = compat.ServiceStats({name: count for name, count in changes.items() if count})
        return None if stats.is_empty() else stats

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> compat.ServiceStats | None:
        """Make stats of what travelled between vLLM's processes."""
        return compat.ServiceStats(data or {})

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: Any,
        metric_types: Any,
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> ServiceMetrics:
        """Make the counters of vLLM's front end."""
        return ServiceMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    def shutdown(self) -> None:
        """End leases, loads and the sessions. Idempotent."""
        if self._scheduler is not None:
            self._shielded("shutdown", self._scheduler.shutdown, None)
        if self._worker is not None:
            self._shielded("shutdown", self._worker.shutdown, None)
        elif self._link is not None:
            self._link.close()

    def _plan(self) -> StepPlan:
        metadata: Any = self._get_connector_metadata()
        plan: StepPlan = metadata.plan
        return plan

    def _client_settings(self, timeout_s: float, name: str) -> ClientSettings:
        transfer = self._kv_transfer_config
        return client_settings(
            self._settings,
            engine_incarnation=incarnation_of(
                engine_id=transfer.engine_id or "", instance_id=self._vllm_config.instance_id
            ),
            name=f"vllm {transfer.kv_role} {name}",
            timeout_s=timeout_s,
        )

    def _start_link(self, connect: Callable[[], Connected]) -> ServiceLink[Connected]:
        return start_link(self._settings, connect, logger)

    def _shielded(self, hook: str, action: Callable[[], Answer], otherwise: Answer) -> Answer:
        """Run a hook; a fault of ours costs a recomputation and never the engine."""
        try:
            return action()
        except Exception:  # border: plugin
            self._faults_count += 1
            logger.exception("a fault in %s; the engine goes on without the service's answer", hook)
            return otherwise
