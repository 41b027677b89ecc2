"""What an engine says its KV is: everything that its block hashes leave out."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from kvplugins.vllm.identity import EngineFacts, identity_of, incarnation_of, part_of, weights_digest

FACTS = EngineFacts(
    model="maker/model",
    revision="0123abcd",
    dummy_seed=None,
    model_config_text="{}",
    rope_text='{"rope_theta": 10000.0}',
    attention_kind="gqa",
    layers_count=4,
    kv_heads_count=4,
    k_head_dim=64,
    v_head_dim=64,
    hash_algorithm="sha256",
    hash_seed="vllm-none-hash",
    dtype="bfloat16",
    cache_dtype="auto",
    weights_quantisation="",
    block_tokens=32,
    attention_backend="CPU_ATTN:vec",
    layout="LBHNC",
    is_opaque=True,
    first_layer=0,
    rank_heads_count=4,
    kv_replicas_count=1,
    tensor_parallel_rank=0,
    tensor_parallel_size=1,
    pipeline_parallel_rank=0,
    pipeline_parallel_size=1,
)
PIECES = (65536,) * 4


def described(facts: EngineFacts) -> tuple[bytes, bytes, bytes]:
    """Return what decides whether blocks meet: the digests of identity and shape, and what the part holds."""
    identity = identity_of(facts, layers_count=len(PIECES), model_id="", weights_revision="")
    part = part_of(facts, pieces_bytes=PIECES)
    return identity.digest(), part.shape.digest(), part.key()


@pytest.mark.parametrize(
    "change",
    [
        {"model": "maker/other"},
        {"revision": "4567"},
        {"dummy_seed": 0},
        {"model_config_text": '{"rms_norm_eps": 1e-06}'},
        {"rope_text": '{"rope_theta": 500000.0}'},
        {"attention_kind": "mla"},
        {"kv_heads_count": 8},
        {"k_head_dim": 128},
        {"hash_algorithm": "sha256_cbor"},
        {"hash_seed": "0"},
        {"dtype": "float32"},
        {"cache_dtype": "fp8"},
        {"weights_quantisation": "fp8"},
        {"block_tokens": 64},
        {"attention_backend": "CPU_ATTN:amx"},
        {"layout": "LBNHC"},
        {"is_opaque": False},
        {"tensor_parallel_size": 2, "rank_heads_count": 2},
    ],
    ids="-".join,
)
def test_engines_that_differ_in_what_decides_the_bytes_never_share_a_block(change: dict[str, object]) -> None:
    """VLLM's hash of the same tokens is the same for all of these."""
    assert described(FACTS) != described(dataclasses.replace(FACTS, **change))


def test_engines_that_agree_share_whatever_their_life() -> None:
    """What belongs to one process (addresses, number of blocks) is in neither identity nor shape."""
    assert described(FACTS) == described(dataclasses.replace(FACTS))


def test_ranks_hold_parts_that_lie_side_by_side() -> None:
    """The parts of a tensor-parallel group cover the heads once."""
    parts = [
        part_of(
            dataclasses.replace(FACTS, tensor_parallel_rank=rank, tensor_parallel_size=2, rank_heads_count=2),
            pieces_bytes=PIECES,
        )
        for rank in range(2)
    ]
    assert [(part.first_head, part.heads_count) for part in parts] == [(0, 2), (2, 2)]


def test_ranks_with_the_same_kv_share_one_part() -> None:
    """MLA's latent is the same on every rank: it is one part, stored once."""
    parts = {
        part_of(
            dataclasses.replace(
                FACTS,
                attention_kind="mla",
                kv_heads_count=1,
                rank_heads_count=1,
                kv_replicas_count=4,
                tensor_parallel_rank=rank,
                tensor_parallel_size=4,
            ),
            pieces_bytes=PIECES,
        )
        for rank in range(4)
    }
    assert len(parts) == 1


def test_a_draft_models_layers_do_not_pass_for_the_models_own() -> None:
    """With speculative decoding a block holds more layers."""
    identity = identity_of(FACTS, layers_count=5, model_id="", weights_revision="")
    assert identity.layers_count == 5


def test_weights_are_told_apart_by_what_is_in_them(tmp_path: Path) -> None:
    """Two fine-tunes have the same names, sizes and heads; a copy elsewhere is the same weights."""
    content = bytearray(range(256)) * 4096
    for folder in ("first", "copy", "tuned"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "model.safetensors").write_bytes(content)
    tuned = bytes(content[: 1 << 18]) + bytes(byte ^ 1 for byte in content[1 << 18 :])
    (tmp_path / "tuned" / "model.safetensors").write_bytes(tuned)
    digests = [weights_digest(tmp_path / folder) for folder in ("first", "copy", "tuned")]
    assert digests[0] == digests[1] != digests[2]


def test_weights_that_nothing_names_are_refused(tmp_path: Path) -> None:
    """Guessing would mix the KV of two models; the sentence says what to set."""
    for model, revision in (("maker/model", ""), (str(tmp_path), "")):
        facts = dataclasses.replace(FACTS, model=model, revision=revision)
        with pytest.raises(ValueError, match="weights_revision"):
            identity_of(facts, layers_count=4, model_id="", weights_revision="")
        assert identity_of(facts, layers_count=4, model_id="", weights_revision="mine").weights_revision


def test_every_start_of_an_engine_is_another_incarnation() -> None:
    """An operator may fix the engine's name; a life is still another."""
    lives = {incarnation_of(engine_id="fixed", instance_id=name) for name in ("a1", "b2")}
    assert len(lives) == 2
    assert {len(life) for life in lives} == {16}
