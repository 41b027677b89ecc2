"""An engine's own memory as a pool of blocks: what it lends, and where it receives."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from kvservice.core.block_geometry import BlockGeometry
from kvservice.core.engine_memory import MemoryKind
from kvservice.core.errors import InvalidFieldError
from kvservice.core.slots import U64
from kvservice.ports.transport import Pieces

KINDS = {"cpu": MemoryKind.HOST, "cuda": MemoryKind.CUDA}
"""Memory that can be told by the type of a tensor's device. That of others is neither: to take it
for the host's would be a crash."""


class BlockPool:
    """Numbered blocks of one part, in memory of this process. Immutable; keeps the memory alive.

    The memory stays the caller's. While it is lent, or received into, the blocks concerned must
    not change by other hands.

    addresses: (segments,) uint64, where each segment of `geometry` begins.
    kind: where the memory is.
    owners: whatever keeps it alive.
    is_writable: blocks can be received into it.
    """

    __slots__ = ("_owners", "addresses", "geometry", "is_writable", "kind")

    def __init__(
        self,
        addresses: npt.ArrayLike,
        geometry: BlockGeometry,
        kind: MemoryKind,
        owners: object,
        *,
        is_writable: bool = True,
    ) -> None:
        """Take raw addresses, at the caller's own risk: a wrong one crashes the process."""
        self.addresses: U64 = np.ascontiguousarray(addresses, np.uint64)
        if self.addresses.shape != geometry.segment_sizes_bytes.shape:
            raise InvalidFieldError(
                f"addresses has shape {self.addresses.shape} for {len(geometry.segment_sizes_bytes)} "
                "segments; give one for each"
            )
        self.geometry = geometry
        self.kind = kind
        self.is_writable = is_writable
        self._owners = owners

    @classmethod
    def of(cls, tensors: Sequence[Any]) -> BlockPool:
        """Take an engine's KV tensors: piece j of a block is its slice of tensor j.

        tensors: NumPy arrays or torch tensors (CPU or CUDA) of shape (blocks, ...), all with the
            same number of blocks; one index along the first dimension must be contiguous. Tensors
            in one storage become one segment.

        Raises:
            InvalidFieldError: they are no such tensors.
        """
        if not isinstance(tensors, list | tuple) or not tensors:
            kind = "empty" if isinstance(tensors, list | tuple) else f"a {type(tensors).__name__}"
            raise InvalidFieldError(f"tensors is {kind}; give a list of one at least")
        found = [_Located(tensor, index) for index, tensor in enumerate(tensors)]
        counts = {each.blocks_count for each in found}
        if len(counts) != 1:
            raise InvalidFieldError(f"tensors have {sorted(counts)} blocks; give all the same number")
        kinds = {each.kind for each in found}
        if len(kinds) != 1:
            raise InvalidFieldError("tensors are of the host and of a device; give one pool for each")
        ranges: dict[tuple[int, int], int] = {}
        for each in found:
            ranges.setdefault(each.storage, len(ranges))
        geometry = BlockGeometry(
            segment_sizes_bytes=np.array([size for _, size in ranges], np.uint64),
            segments=np.array([ranges[each.storage] for each in found], np.uint32),
            offsets=np.array([each.address - each.storage[0] for each in found], np.uint64),
            strides=np.array([each.stride_bytes for each in found], np.uint64),
            lengths=np.array([each.block_bytes for each in found], np.uint64),
            blocks_count=counts.pop(),
        )
        return cls(
            [address for address, _ in ranges],
            geometry,
            kinds.pop(),
            tuple(tensors),
            is_writable=all(each.is_writable for each in found),
        )

    @property
    def blocks_count(self) -> int:
        """Number of blocks."""
        return self.geometry.blocks_count

    @property
    def block_bytes(self) -> int:
        """Bytes of one block."""
        return self.geometry.block_bytes

    def piece_addresses(self, blocks: npt.NDArray[np.int64]) -> U64:
        """Return (blocks, pieces) uint64: where each piece of some blocks begins."""
        geometry = self.geometry
        first = self.addresses[geometry.segments] + geometry.offsets
        found: U64 = first[None, :] + blocks.astype(np.uint64)[:, None] * geometry.strides[None, :]
        return found

    def pieces(self, blocks: npt.NDArray[np.int64]) -> Pieces:
        """Return the memory of some blocks, in their order. Raises InvalidFieldError."""
        if len(blocks) and not 0 <= int(blocks.min()) <= int(blocks.max()) < self.blocks_count:
            raise InvalidFieldError(
                f"blocks goes from {int(blocks.min())} to {int(blocks.max())}; the pool has blocks 0 to "
                f"{self.blocks_count - 1}"
            )
        count = self.geometry.pieces_count
        return Pieces(
            self.piece_addresses(blocks).reshape(-1),
            np.tile(self.geometry.lengths, len(blocks)),
            None if count == 1 else np.full(len(blocks), count, np.uint32),
        )


class _Located:
    """Where the blocks of one tensor lie. storage: address and size of what it is part of."""

    def __init__(self, tensor: Any, index: int) -> None:
        name = f"tensors[{index}]"
        is_array = isinstance(tensor, np.ndarray)
        if not is_array and not hasattr(tensor, "data_ptr"):
            raise InvalidFieldError(f"{name} is a {type(tensor).__name__}; give an array or a tensor")
        if len(tensor.shape) < 1 or not tensor.shape[0]:
            raise InvalidFieldError(f"{name} has shape {tuple(tensor.shape)}; give (blocks, ...)")
        self.blocks_count = int(tensor.shape[0])
        self.is_writable = True
        if is_array:
            if tensor.dtype.hasobject:
                raise InvalidFieldError(f"{name} is an array of Python objects; give one of numbers")
            self.kind = MemoryKind.HOST
            self.is_writable = bool(tensor.flags.writeable)
            self.address = int(tensor.__array_interface__["data"][0])
            self.stride_bytes, item_bytes = int(tensor.strides[0]), tensor.itemsize
            is_contiguous = tensor[0].flags.c_contiguous
        else:
            if tensor.device.type not in KINDS:
                raise InvalidFieldError(f"{name} is on {tensor.device}; give tensors of {' or '.join(KINDS)}")
            self.kind = KINDS[tensor.device.type]
            self.address = int(tensor.data_ptr())
            item_bytes = int(tensor.element_size())
            self.stride_bytes = int(tensor.stride(0)) * item_bytes
            is_contiguous = tensor[0].is_contiguous()
        if not is_contiguous:
            raise InvalidFieldError(f"{name}: a block of it is not contiguous; give it dense")
        self.block_bytes = item_bytes * int(np.prod(tensor.shape[1:], dtype=np.int64))
        if not self.block_bytes:
            raise InvalidFieldError(f"{name} has shape {tuple(tensor.shape)}, whose blocks are empty")
        if self.blocks_count == 1:
            self.stride_bytes = self.block_bytes  # A tensor of one block may say anything, or less than 0.
        if self.stride_bytes < self.block_bytes:
            raise InvalidFieldError(f"{name}: its blocks overlap or run backwards; give them in order")
        self.storage = self._storage(tensor)

    def _storage(self, tensor: Any) -> tuple[int, int]:
        """Return the memory that a tensor is part of, so that what lies in one is registered once."""
        if not isinstance(tensor, np.ndarray):
            whole = tensor.untyped_storage()
            return int(whole.data_ptr()), int(whole.nbytes())
        base: Any = tensor
        while isinstance(base.base, np.ndarray):
            base = base.base
        if base.flags.forc:
            return int(base.__array_interface__["data"][0]), int(base.nbytes)
        extent = (self.blocks_count - 1) * self.stride_bytes + self.block_bytes
        return self.address, extent
