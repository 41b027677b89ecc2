"""The engine's KV memory, on whatever device it lies.

A block is taken whole, as bytes: one piece for each layer, in the order of the layers. What the bytes mean is
the engine's affair; on a CPU it orders the inside of a block by the kernel it runs, so nothing smaller may be
cut out.

`HostMemory` hands out the engine's own memory and copies nothing. `CudaMemory` goes through pinned host
memory on streams of its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from kvclient import BlockBuffers, BlockPool

Bytes = npt.NDArray[np.uint8]


class BlockMemory(Protocol):
    """Whole blocks of the engine, for the two copies that there are, and for passages without one."""

    @property
    def pieces_bytes(self) -> tuple[int, ...]:
        """Size of each layer's piece of a block."""

    @property
    def pool(self) -> BlockPool:
        """The blocks where they lie, for others to read and to receive into."""

    @property
    def is_host(self) -> bool:
        """Whether they lie in host memory."""

    def mark(self) -> object:
        """Remember the device work that was launched so far; for the thread that launches it."""

    def wait(self, mark: object) -> None:
        """Return when the device work of `mark` is done, and what it used may be written by others."""

    def outgoing(self, block_ids: Sequence[int], mark: object) -> BlockBuffers:
        """Show the blocks as host memory that holds what they held at `mark`.

        It may be read until the next call of this method; the caller sees to it that the engine does not
        reuse the blocks until then.
        """

    def incoming(self, block_ids: Sequence[int]) -> BlockBuffers:
        """Return host memory for bytes that are to become these blocks; `land` brings them there."""

    def land(self, block_ids: Sequence[int], mark: object) -> None:
        """Finish what `incoming` began, behind the device work of `mark`; the bytes are there when it
        returns.
        """


class HostMemory:
    """KV in host memory: bytes go to and from the engine's blocks without a copy in between.

    layers: one array (engine blocks, piece bytes) for each layer; rows may lie apart.
    pool: the same memory.
    """

    def __init__(self, layers: Sequence[Bytes], pool: BlockPool) -> None:
        self._layers = list(layers)
        self._pool = pool

    @property
    def pieces_bytes(self) -> tuple[int, ...]:
        """Size of each layer's piece of a block."""
        return tuple(layer.shape[1] for layer in self._layers)

    @property
    def pool(self) -> BlockPool:
        """The engine's own blocks."""
        return self._pool

    @property
    def is_host(self) -> bool:
        """They do."""
        return True

    def mark(self) -> object:
        """Return nothing: a CPU has computed when the call that computes returns."""
        return None

    def wait(self, mark: object) -> None:
        """Do nothing, for the same reason."""

    def outgoing(self, block_ids: Sequence[int], mark: object) -> BlockBuffers:
        """Show the engine's own blocks."""
        return BlockBuffers.strided(self._layers, block_ids)

    def incoming(self, block_ids: Sequence[int]) -> BlockBuffers:
        """Show the engine's own blocks."""
        return BlockBuffers.strided(self._layers, block_ids)

    def land(self, block_ids: Sequence[int], mark: object) -> None:
        """Do nothing: the bytes are where they belong."""


class CudaMemory:
    """KV in GPU memory, staged through pinned host memory.

    Untried: it was written without a GPU at hand and has run on none. It is kept to the few calls that
    matter. Saves and loads have a stream and a staging area each, since two threads use them, and each
    thread waits for its own stream before it goes on.

    layers: one uint8 tensor (engine blocks, piece bytes) for each layer; rows may lie apart.
    blocks_max: blocks that one call may name; pinned memory is twice that many blocks.
    """

    def __init__(self, layers: Sequence[Any], *, blocks_max: int) -> None:
        import torch

        self._torch = torch
        self._layers = list(layers)
        device = self._layers[0].device
        self._save_stream = torch.cuda.Stream(device)
        self._load_stream = torch.cuda.Stream(device)
        self._outgoing = [self._pinned(blocks_max, layer.shape[1]) for layer in self._layers]
        self._incoming = [self._pinned(blocks_max, layer.shape[1]) for layer in self._layers]

    @property
    def pieces_bytes(self) -> tuple[int, ...]:
        """Size of each layer's piece of a block."""
        return tuple(layer.shape[1] for layer in self._layers)

    @property
    def pool(self) -> BlockPool:
        """The engine's own blocks."""
        return BlockPool.of(self._layers)

    @property
    def is_host(self) -> bool:
        """They do not."""
        return False

    def wait(self, mark: Any) -> None:
        """Wait for the event."""
        mark.synchronize()

    def mark(self) -> object:
        """Record an event on the compute stream."""
        event = self._torch.cuda.Event()
        event.record(self._torch.cuda.current_stream(self._layers[0].device))
        return event

    def outgoing(self, block_ids: Sequence[int], mark: Any) -> BlockBuffers:
        """Copy the blocks into the staging area for saves."""
        count = len(block_ids)
        with self._torch.cuda.stream(self._save_stream):
            self._save_stream.wait_event(mark)
            rows = self._torch.tensor(block_ids, device=self._layers[0].device)
            for layer, staging in zip(self._layers, self._outgoing, strict=True):
                staging[:count].copy_(layer.index_select(0, rows), non_blocking=True)
        self._save_stream.synchronize()
        return BlockBuffers.strided(self._outgoing, range(count))

    def incoming(self, block_ids: Sequence[int]) -> BlockBuffers:
        """Show the staging area for loads."""
        return BlockBuffers.strided(self._incoming, range(len(block_ids)))

    def land(self, block_ids: Sequence[int], mark: Any) -> None:
        """Copy the staging area for loads into the blocks."""
        count = len(block_ids)
        with self._torch.cuda.stream(self._load_stream):
            self._load_stream.wait_event(mark)
            rows = self._torch.tensor(block_ids, device=self._layers[0].device)
            for layer, staging in zip(self._layers, self._incoming, strict=True):
                layer.index_copy_(0, rows, staging[:count].to(layer.device, non_blocking=True))
        self._load_stream.synchronize()

    def _pinned(self, blocks_count: int, piece_bytes: int) -> Any:
        return self._torch.empty((blocks_count, piece_bytes), dtype=self._torch.uint8, pin_memory=True)


def block_memory(kv_caches: Mapping[str, Any], *, blocks_max: int) -> BlockMemory:
    """Choose by where the engine's tensors lie.

    kv_caches: layer name -> tensor (engine blocks, ...), in the order of the layers.

    Raises:
        ValueError: a layer is no single tensor, its blocks are not dense, or the device is of another kind.
    """
    layers = [_rows(name, tensor) for name, tensor in _distinct(kv_caches).items()]
    kinds = {layer.device.type for layer in layers}
    if kinds == {"cpu"}:
        return HostMemory([layer.numpy() for layer in layers], BlockPool.of(layers))
    if kinds == {"cuda"}:
        return CudaMemory(layers, blocks_max=blocks_max)
    raise ValueError(
        f"KvServiceConnector moves KV of cpu and cuda devices; this engine's lies on {sorted(kinds)}."
    )


def _distinct(kv_caches: Mapping[str, Any]) -> dict[str, Any]:
    """Leave out layers that share the KV of another layer."""
    found: dict[int, str] = {}
    for name, tensor in kv_caches.items():
        if isinstance(tensor, list | tuple):
            raise ValueError(  # noqa: TRY004 - the engine's configuration is at fault, not a caller's type
                f"KvServiceConnector stores attention KV, one tensor a layer; layer {name} has {len(tensor)}."
            )
        found.setdefault(tensor.data_ptr(), name)
    return {name: kv_caches[name] for name in found.values()}


def _rows(name: str, tensor: Any) -> Any:
    """View a layer's tensor (engine blocks, ...) as bytes, one row a block."""
    import torch

    items_count = tensor[0].numel()
    span = 1 + sum(
        (size - 1) * step for size, step in zip(tensor.shape[1:], tensor.stride()[1:], strict=True)
    )
    if span != items_count:
        raise ValueError(
            f"KvServiceConnector copies whole blocks, but in layer {name} of shape {tuple(tensor.shape)} and "
            f"strides {tensor.stride()} a block is not one run of memory; choose a KV cache layout with the "
            "blocks outside."
        )
    item_bytes = tensor.element_size()
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(
        tensor.untyped_storage(),
        tensor.storage_offset() * item_bytes,
        (tensor.shape[0], items_count * item_bytes),
        (tensor.stride(0) * item_bytes, 1),
    )
