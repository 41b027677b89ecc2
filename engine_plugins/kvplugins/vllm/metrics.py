"""The plugin's counts on vLLM's `/metrics`, one counter each: `vllm:kvservice_<count>_total`.

They are summed over ranks, and over the scheduler and its workers; what each counts stands with its
dataclass.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics

from kvplugins.common.link import LinkCounts
from kvplugins.vllm.prefill_side import PrefillCounts
from kvplugins.vllm.scheduler_side import SchedulerCounts
from kvplugins.vllm.ticket_desk import TicketCounts
from kvplugins.vllm.worker_side import WorkerCounts

PREFIX = "vllm:kvservice_"
FAULTS = "faults"
# Which link a count is of: the one of the store, or that of handoffs.
LINKS = ("calls", "handoff_calls")


def link_counts(name: str, counts: LinkCounts) -> dict[str, int]:
    """Return a link's counts by the names that they are reported under."""
    return {f"{name}_{key}": count for key, count in dataclasses.asdict(counts).items()}


def count_names() -> list[str]:
    """Return the names of all counts; the set is closed."""
    kinds = (WorkerCounts, SchedulerCounts, TicketCounts, PrefillCounts)
    names = [field.name for kind in kinds for field in dataclasses.fields(kind)]
    return [FAULTS, *names, *(name for link in LINKS for name in link_counts(link, LinkCounts()))]


class ServiceMetrics(KVConnectorPromMetrics):
    """Counters for Prometheus, in vLLM's front end."""

    def __init__(
        self,
        vllm_config: Any,
        metric_types: Any,
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._counters = {name: self._made(name) for name in count_names()}

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Add the counts of an interval."""
        for name, count in transfer_stats_data.items():
            self._counters[name][engine_idx].inc(count)

    def _made(self, name: str) -> Mapping[int, Any]:
        counter = self._counter_cls(
            name=PREFIX + name,
            documentation=f"kvservice connector: {name.replace('_', ' ')}",
            labelnames=self._labelnames,
        )
        values = self.per_engine_labelvalues.items()
        return {engine: counter.labels(*labels) for engine, labels in values}
