"""Write a small Llama with random weights, for vLLM to load: `python tiny_llama.py DIR [--seed N]`.

Runs in vLLM's environment. The weights are wide enough apart that greedy answers vary and hang on the whole
prompt, so that wrong KV shows as wrong tokens. The tokenizer's words are t3, t4, ...: prompts can be given as
text or ids.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit

LAYERS = 4
HIDDEN = 256
HEADS = 8
KV_HEADS = 4
# The smallest that vLLM's CPU kernels take is 32; 64 makes a block's KV a round 256 KiB at 32 tokens.
HEAD_DIM = 64
INTERMEDIATE = 512
VOCABULARY = 1024
POSITIONS = 4096
WEIGHT_DEVIATION = 0.15

SPECIAL = {"<unk>": 0, "<s>": 1, "</s>": 2}


def main() -> None:
    """Write the folder."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    write_model(arguments.folder, seed=arguments.seed)


def write_model(folder: Path, *, seed: int) -> None:
    """Write configuration, weights and tokenizer."""
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / "config.json", model_config())
    write_json(folder / "generation_config.json", {"bos_token_id": 1, "eos_token_id": 2, "do_sample": False})
    save_file(weights(seed), folder / "model.safetensors", metadata={"format": "pt"})
    write_tokenizer(folder)


def model_config() -> dict[str, Any]:
    """Return the configuration as transformers reads it."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "num_hidden_layers": LAYERS,
        "hidden_size": HIDDEN,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "intermediate_size": INTERMEDIATE,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": POSITIONS,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
    }


def weights(seed: int) -> dict[str, torch.Tensor]:
    """Draw all weights from one generator."""
    generator = torch.Generator().manual_seed(seed)

    def drawn(rows: int, columns: int, deviation: float = WEIGHT_DEVIATION) -> torch.Tensor:
        return torch.randn(rows, columns, generator=generator) * deviation

    found = {
        "model.embed_tokens.weight": drawn(VOCABULARY, HIDDEN, 1.0),
        "lm_head.weight": drawn(VOCABULARY, HIDDEN),
        "model.norm.weight": torch.ones(HIDDEN),
    }
    for number in range(LAYERS):
        layer = {
            "self_attn.q_proj": drawn(HEADS * HEAD_DIM, HIDDEN),
            "self_attn.k_proj": drawn(KV_HEADS * HEAD_DIM, HIDDEN),
            "self_attn.v_proj": drawn(KV_HEADS * HEAD_DIM, HIDDEN),
            "self_attn.o_proj": drawn(HIDDEN, HEADS * HEAD_DIM),
            "mlp.gate_proj": drawn(INTERMEDIATE, HIDDEN),
            "mlp.up_proj": drawn(INTERMEDIATE, HIDDEN),
            "mlp.down_proj": drawn(HIDDEN, INTERMEDIATE),
            "input_layernorm": torch.ones(HIDDEN),
            "post_attention_layernorm": torch.ones(HIDDEN),
        }
        found |= {f"model.layers.{number}.{name}.weight": tensor for name, tensor in layer.items()}
    return found


def write_tokenizer(folder: Path) -> None:
    """Write a tokenizer with one word for each id."""
    words = SPECIAL | {f"t{number}": number for number in range(len(SPECIAL), VOCABULARY)}
    tokenizer = Tokenizer(WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "unk_token": "<unk>",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "model_max_length": POSITIONS,
    }
    write_json(folder / "tokenizer_config.json", config)


def write_json(path: Path, value: object) -> None:
    """Write a file that people can read too."""
    path.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
