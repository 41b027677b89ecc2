"""Which KV an engine produces, and how it lies: all that vLLM's block hashes leave out.

A block hash says which tokens. It is the same for every model, so whatever else decides the bytes of a block
must stand in the identity or the shape; what is forgotten here is a wrong token somewhere.

**The weights.** A model from a hub is named by its commit. For a folder of weights we digest what tells two
sets of weights apart without reading them all: each file's name, size, head, and 256 samples spread over it.
Two fine-tunes of one model have the same names, sizes and heads; samples differ unless nearly all weights are
equal. Whoever edits single tensors in place, and keeps the folder, sets `weights_revision`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from kvclient import Identity, Part, Shape

WEIGHT_SUFFIXES = {".safetensors", ".bin", ".pt", ".pth", ".gguf"}
HEAD_BYTES = 1 << 16
SAMPLE_BYTES = 1 << 12
SAMPLES_COUNT = 256
# The service takes texts of up to 512 characters; longer ones travel as a digest.
TEXT_CHARACTERS_MAX = 512


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineFacts:
    """What vLLM says of itself; collected by `compat`, in plain values.

    model: name on the hub, or a folder.
    revision: commit of a model from the hub; empty if there is none.
    dummy_seed: seed of weights that are made up; None for real ones.
    model_config_text: the model's effective configuration, as canonical JSON.
    layout: vLLM's name for the order of the dimensions, for example "LBHNC".
    kv_replicas_count: consecutive tensor-parallel ranks that hold the same KV.
    """

    model: str
    revision: str
    dummy_seed: int | None
    model_config_text: str
    rope_text: str
    attention_kind: str
    layers_count: int
    kv_heads_count: int
    k_head_dim: int
    v_head_dim: int
    hash_algorithm: str
    hash_seed: str
    dtype: str
    cache_dtype: str
    weights_quantisation: str
    block_tokens: int
    attention_backend: str
    layout: str
    is_opaque: bool
    first_layer: int
    rank_heads_count: int
    kv_replicas_count: int
    tensor_parallel_rank: int
    tensor_parallel_size: int
    pipeline_parallel_rank: int
    pipeline_parallel_size: int


def identity_of(facts: EngineFacts, *, layers_count: int, model_id: str, weights_revision: str) -> Identity:
    """Describe which KV it is.

    layers_count: layers with KV of this rank; more than the model's own where a draft model adds some.
    model_id, weights_revision: the operator's words, or empty.

    Raises:
        ValueError: nothing tells which weights these are.
    """
    weights = weights_revision or _weights_of(facts)
    configured = hashlib.sha256(facts.model_config_text.encode()).hexdigest()
    return Identity(
        model_id=model_id or _model_name(facts.model),
        weights_revision=hashlib.sha256(f"{weights}\n{configured}".encode()).hexdigest(),
        rope=_bounded(facts.rope_text),
        attention_kind=facts.attention_kind,
        layers_count=max(facts.layers_count, facts.first_layer + layers_count),
        kv_heads_count=facts.kv_heads_count,
        k_head_dim=facts.k_head_dim,
        v_head_dim=facts.v_head_dim,
        hash_algorithm=facts.hash_algorithm,
        hash_seed=facts.hash_seed,
        hash_tokens=facts.block_tokens,
    )


def part_of(facts: EngineFacts, *, pieces_bytes: Sequence[int]) -> Part:
    """Describe what this rank's block holds, and how.

    pieces_bytes: size of each layer's piece of a block, in the order of the layers.

    Of the strides only the outermost is declared, the size of a layer's piece: the blocks of the engine's
    pool do not lie as the stored ones do, and inside a piece the order of the dimensions is all that vLLM
    declares.
    """
    rank = facts.tensor_parallel_rank // facts.kv_replicas_count
    size = facts.tensor_parallel_size // facts.kv_replicas_count
    return Part(
        first_layer=facts.first_layer,
        layers_count=len(pieces_bytes),
        first_head=rank * facts.kv_heads_count // size,
        heads_count=facts.rank_heads_count,
        shape=Shape(
            dtype=facts.dtype,
            quantisation=f"kv={facts.cache_dtype};weights={facts.weights_quantisation or 'none'}",
            kv_packing="opaque" if facts.is_opaque else "packed",
            dimension_order="L" + facts.layout.replace("L", "").replace("B", ""),
            block_tokens=facts.block_tokens,
            attention_backend=facts.attention_backend,
            tensor_parallel_rank=rank,
            tensor_parallel_size=size,
            pipeline_parallel_rank=facts.pipeline_parallel_rank,
            pipeline_parallel_size=facts.pipeline_parallel_size,
        ),
        block_bytes=sum(pieces_bytes),
    )


def incarnation_of(*, engine_id: str, instance_id: str) -> bytes:
    """Name this life of the engine, the same in all its processes.

    engine_id: vLLM's name for the engine, which an operator may have fixed.
    instance_id: what vLLM draws at each start.
    """
    return hashlib.sha256(f"{engine_id}\n{instance_id}".encode()).digest()[:16]


def weights_digest(folder: Path) -> str:
    """Digest a folder of weights as the module's docstring says; empty if it holds none."""
    files = sorted(path for path in folder.iterdir() if path.suffix in WEIGHT_SUFFIXES and path.is_file())
    if not files:
        return ""
    digest = hashlib.sha256()
    for path in files:
        size_bytes = path.stat().st_size
        digest.update(f"{path.name}\n{size_bytes}\n".encode())
        with path.open("rb") as file:
            digest.update(file.read(HEAD_BYTES))
            for number in range(SAMPLES_COUNT):
                file.seek(number * size_bytes // SAMPLES_COUNT)
                digest.update(file.read(SAMPLE_BYTES))
    return digest.hexdigest()


def _weights_of(facts: EngineFacts) -> str:
    if facts.dummy_seed is not None:
        return f"dummy:{facts.dummy_seed}"
    folder = Path(facts.model)
    found = weights_digest(folder) if folder.is_dir() else facts.revision
    if not found:
        raise ValueError(
            f"KvServiceConnector cannot tell which weights {facts.model!r} has: it is no folder of weights, "
            "and vLLM knows no commit of it. Pin one with --revision, or set "
            '"weights_revision" in kv_connector_extra_config.'
        )
    return found


def _model_name(model: str) -> str:
    """Name the model by the last part of a folder: the weights' digest tells two of one name apart."""
    folder = Path(model)
    return folder.resolve().name if folder.is_dir() else model


def _bounded(text: str) -> str:
    if len(text) <= TEXT_CHARACTERS_MAX:
        return text
    return "sha256:" + hashlib.sha256(text.encode()).hexdigest()
