"""A stand-in for an engine where there is no vLLM: it speaks what `engine_process.py` speaks.

Its "KV" is a stream of bytes that hangs on every token before it, and its next token a digest of all the KV
bytes and of the tokens behind the last whole block. So a wrong byte of a loaded block is a wrong token, as in
a real engine.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import sys
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from kvclient import ClientSettings, Identity, ItemOutcome, KvError, Part, Shape
from kvclient.sync import KvClient

BLOCK_TOKENS = 32
BLOCK_BYTES = 1 << 18
VOCABULARY = 1000

COUNTERS = ("blocks_loaded", "bytes_loaded", "blocks_lost", "blocks_saved", "bytes_saved")

Kv = npt.NDArray[np.uint8]
"""Whole blocks, (blocks, block bytes)."""

IDENTITY = Identity(
    model_id="toy",
    weights_revision="1",
    layers_count=1,
    kv_heads_count=1,
    k_head_dim=64,
    hash_tokens=BLOCK_TOKENS,
)
PART = Part(
    layers_count=1,
    heads_count=1,
    shape=Shape(dtype="uint8", kv_packing="opaque", block_tokens=BLOCK_TOKENS),
    block_bytes=BLOCK_BYTES,
)


class ToyEngine:
    """Computes, loads and stores blocks."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self._role = arguments.role
        self._namespace: Any = None
        self._client: Any = None
        if arguments.endpoint:
            settings = ClientSettings(
                endpoint=arguments.endpoint,
                client_name=f"toy {arguments.role}",
                verify=not arguments.careless,
            )
            self._client = KvClient.connect(settings)
            self._namespace = self._client.open_namespace(IDENTITY, [PART])

    def generate(self, command: dict[str, Any]) -> dict[str, Any]:
        """Answer prompts, and say where their KV came from."""
        begin = time.monotonic()
        sources = {"local_compute": 0, "local_cache_hit": 0, "external_kv_transfer": 0}
        counters = dict.fromkeys(COUNTERS, 0)
        tokens = []
        for prompt in command["prompts"]:
            kv = self._prefill(prompt, command.get("salt", ""), sources, counters)
            tokens.append(continue_prompt(kv, prompt, command["max_tokens"]))
        return {
            "tokens": tokens,
            "finish": ["length"] * len(tokens),
            "seconds": time.monotonic() - begin,
            "sources": sources,
            "counters": counters,
        }

    def close(self) -> None:
        """End the session."""
        if self._client is not None:
            self._client.close()

    def _prefill(
        self, prompt: Sequence[int], salt: str, sources: dict[str, int], counters: dict[str, int]
    ) -> Kv:
        """Return the KV of the prompt's whole blocks, (blocks, bytes)."""
        keys = block_keys(prompt, salt)
        kv = np.empty((len(keys), BLOCK_BYTES), np.uint8)
        loaded_count = 0
        if keys and self._role == "kv_consumer":
            loaded_count = self._load(keys[: (len(prompt) - 1) // BLOCK_TOKENS], kv, counters)
        for number in range(loaded_count, len(keys)):
            kv[number] = computed(keys[number])
        if keys and self._role == "kv_producer":
            result = self._namespace.put(keys, kv)
            counters["blocks_saved"] += result.stored_count
            counters["bytes_saved"] += result.bytes_moved
        sources["external_kv_transfer"] += loaded_count * BLOCK_TOKENS
        sources["local_compute"] += len(prompt) - loaded_count * BLOCK_TOKENS
        return kv

    def _load(self, keys: list[bytes], kv: Kv, counters: dict[str, int]) -> int:
        """Load the blocks that the service has from the first on; return their number."""
        promised_count, hits_count = 0, 0
        try:
            lease = self._namespace.acquire(keys) if keys else None
            if lease is not None:
                promised_count = lease.keys_count
                result = self._namespace.get(keys[:promised_count], kv[:promised_count])
                is_hit = result.outcomes == ItemOutcome.HIT
                hits_count = promised_count if is_hit.all() else int(is_hit.argmin())
                counters["bytes_loaded"] += result.bytes_moved
                self._client.release([lease])
        except KvError as error:
            print(f"the service failed, computing: {error}", file=sys.stderr)
        counters["blocks_loaded"] += hits_count
        counters["blocks_lost"] += promised_count - hits_count
        return hits_count


def block_keys(prompt: Sequence[int], salt: str) -> list[bytes]:
    """Chain a key for each whole block."""
    keys: list[bytes] = []
    key = hashlib.sha256(salt.encode()).digest()
    for start in range(0, len(prompt) - BLOCK_TOKENS + 1, BLOCK_TOKENS):
        key = hashlib.sha256(key + repr(prompt[start : start + BLOCK_TOKENS]).encode()).digest()
        keys.append(key)
    return keys


def computed(key: bytes) -> Kv:
    """Compute a block's KV; the key stands for all tokens up to its end."""
    return np.frombuffer(np.random.default_rng(int.from_bytes(key[:8])).bytes(BLOCK_BYTES), np.uint8)


def continue_prompt(kv: Kv, prompt: Sequence[int], count: int) -> list[int]:
    """Return the next tokens."""
    context = hashlib.sha256(kv.tobytes())
    context.update(repr(prompt[len(kv) * BLOCK_TOKENS :]).encode())
    tokens: list[int] = []
    for _ in range(count):
        tokens.append(int.from_bytes(context.digest()[:8]) % VOCABULARY)
        context.update(repr(tokens[-1]).encode())
    return tokens


def main() -> None:
    """Serve until told to quit, or until standard input ends."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--answers", type=int, required=True, help="file descriptor for the answers")
    parser.add_argument("--role", default="", help="kv_producer, kv_consumer, or neither")
    parser.add_argument("--endpoint", default="")
    parser.add_argument("--careless", action="store_true", help="do not check the bytes that come")
    arguments = parser.parse_args()
    begin = time.monotonic()
    with os.fdopen(arguments.answers, "w", buffering=1) as answers:
        engine = ToyEngine(arguments)
        answers.write(json.dumps({"ready": True, "seconds": time.monotonic() - begin}) + "\n")
        for line in sys.stdin:
            command = json.loads(line)
            if command["op"] == "quit":
                break
            # It keeps nothing between two calls, so there is nothing to forget.
            answer = engine.generate(command) if command["op"] == "generate" else {"reset": True}
            answers.write(json.dumps(answer) + "\n")
        engine.close()
        answers.write(json.dumps({"ended": True}) + "\n")


if __name__ == "__main__":
    main()
