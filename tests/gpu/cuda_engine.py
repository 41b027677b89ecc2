"""A process that lends CUDA memory: `cuda_engine.py ENDPOINT`.

It offers all of its blocks with each line of its stdin.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch

from kvclient import BlockPool, ClientSettings, EndpointSettings, HandoffPolicy, Identity, Part, Shape
from kvclient.sync import KvClient, Namespace

BLOCKS = 16
BLOCK_WORDS = 64 << 10
ON_DEVICE = EndpointSettings()
WORK_ROUNDS = 50
"""Matrix products before the blocks are written: long enough that an early read would find zeros."""


def block_of(index: int) -> torch.Tensor:
    """Return the contents of a block, on the device."""
    generator = torch.Generator(device="cuda").manual_seed(index)
    return torch.rand(BLOCK_WORDS, device="cuda", generator=generator)


def open_namespace(client: KvClient) -> Namespace:
    """Open the namespace that both sides work in."""
    identity = Identity(
        model_id="gpu", weights_revision="1", layers_count=1, kv_heads_count=1, k_head_dim=1, hash_tokens=1
    )
    shape = Shape(dtype="float32", kv_packing="opaque", block_tokens=1)
    part = Part(layers_count=1, heads_count=1, shape=shape, block_bytes=4 * BLOCK_WORDS)
    return client.open_namespace(identity, [part])


def main() -> None:
    """Lend, and offer as told."""
    memory = torch.zeros((BLOCKS, BLOCK_WORDS), device="cuda")
    settings = ClientSettings(sys.argv[1], engine_incarnation=os.urandom(16), one_sided=ON_DEVICE)
    with KvClient.connect(settings) as client:
        namespace = open_namespace(client)
        lent = client.handoffs.lend([BlockPool.of([memory])])
        say("ready")
        for line in sys.stdin:
            stream, done = torch.cuda.Stream(), torch.cuda.Event()
            memory.zero_()
            torch.cuda.synchronize()
            with torch.cuda.stream(stream):
                if "computed" in line:
                    busy = torch.rand((4096, 4096), device="cuda")
                    for _ in range(WORK_ROUNDS):
                        busy = busy @ busy / 4096
                for index in range(BLOCKS):
                    memory[index] = block_of(index)
                done.record(stream)
            keys = [os.urandom(32) for _ in range(BLOCKS)]
            offer = client.handoffs.offer(
                namespace, keys, lent, range(BLOCKS), policy=HandoffPolicy.DIRECT, ready=done.synchronize
            )
            say(str(offer.handoff_id))


def say(line: str) -> None:
    """Tell the parent."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
