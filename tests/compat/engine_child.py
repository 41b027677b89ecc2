"""A client in an engine's own environment, with the engine's grpcio and protobuf; prints one JSON object.

`engine_child.py LANE GRPC ROOT`. The test that starts it reads what it prints.
"""

from __future__ import annotations

import asyncio
import json
import sys

import google.protobuf
import grpc
import numpy as np

import kvclient
from kvclient import ClientSettings, Identity, Part, Shape, aio
from kvclient.sync import KvClient
from kvproto.kv.v1 import lifecycle_service_pb2, lifecycle_service_pb2_grpc

BLOCK_BYTES = 8192
COUNT = 16


def keys(first: int) -> list[bytes]:
    """Return the keys of a batch."""
    return [(first + index).to_bytes(8, "little") * 4 for index in range(COUNT)]


def part() -> tuple[Identity, list[Part]]:
    """Return what the namespace holds."""
    identity = Identity(
        model_id="compat",
        weights_revision="1",
        layers_count=1,
        kv_heads_count=1,
        k_head_dim=1,
        hash_tokens=16,
    )
    shape = Shape(dtype="bfloat16", kv_packing="packed", block_tokens=16)
    return identity, [Part(layers_count=1, heads_count=1, shape=shape, block_bytes=BLOCK_BYTES)]


def round_trip(endpoint: str, first: int) -> bool:
    """Put and get with the blocking client."""
    blocks = np.random.default_rng(first).integers(0, 256, (COUNT, BLOCK_BYTES), np.uint8)
    into = np.zeros_like(blocks)
    with KvClient.connect(ClientSettings(endpoint=endpoint)) as client:
        namespace = client.open_namespace(*part())
        stored = namespace.put(keys(first), blocks).stored_count
        found = namespace.get(keys(first), into).prefix_count
        with namespace.lease(keys(first), verify=True) as view:
            seen = [bytes(shown) for shown in view.views]
    is_same = seen == [row.tobytes() for row in blocks]
    return (stored, found) == (COUNT, COUNT) and np.array_equal(blocks, into) and is_same


async def async_round_trip(endpoint: str, first: int) -> bool:
    """Put and get with the asynchronous client."""
    blocks = np.random.default_rng(first).integers(0, 256, (COUNT, BLOCK_BYTES), np.uint8)
    into = np.zeros_like(blocks)
    async with await aio.KvClient.connect(ClientSettings(endpoint=endpoint)) as client:
        namespace = await client.open_namespace(*part())
        await namespace.put(keys(first), blocks)
        found = (await namespace.get(keys(first), into)).prefix_count
    return found == COUNT and np.array_equal(blocks, into)


def tensors(endpoint: str, first: int) -> str:
    """Put CPU tensors and get them back, where there is torch."""
    try:
        import torch  # noqa: PLC0415 - not every engine has it
    except ImportError:
        return "no torch"
    generator = torch.Generator().manual_seed(first)
    whole = torch.randn((COUNT, BLOCK_BYTES // 4), generator=generator)
    into = [torch.zeros(BLOCK_BYTES // 2, dtype=torch.bfloat16) for _ in range(COUNT)]
    with KvClient.connect(ClientSettings(endpoint=endpoint)) as client:
        namespace = client.open_namespace(*part())
        namespace.put(keys(first), list(whole))
        namespace.get(keys(first), into)
        try:
            namespace.get(keys(first), [torch.zeros((BLOCK_BYTES, 2), dtype=torch.uint8)[:, 0]] * COUNT)
        except kvclient.InvalidFieldError as error:
            refused = "non-contiguous" in str(error)
    same = all(bool((one.view(torch.float32) == row).all()) for one, row in zip(into, whole, strict=True))
    return "same" if same and refused else "different"


def main() -> None:
    """Do everything and say how it went."""
    lane, remote = sys.argv[1:3]
    report = {
        "grpc": grpc.__version__,
        "protobuf": google.protobuf.__version__,
        "kvclient": kvclient.__file__,
        "lane": round_trip(lane, 1000),
        "remote": round_trip(remote, 2000),
        "aio_lane": asyncio.run(async_round_trip(lane, 3000)),
        "aio_remote": asyncio.run(async_round_trip(remote, 4000)),
        "tensors": tensors(lane, 5000),
        "has_stub": hasattr(lifecycle_service_pb2_grpc, "LifecycleServiceStub"),
        "bytes": lifecycle_service_pb2.ReleaseRequest(lease_ids=[1, 300]).SerializeToString().hex(),
    }
    sys.stdout.write(json.dumps(report))


if __name__ == "__main__":
    main()
