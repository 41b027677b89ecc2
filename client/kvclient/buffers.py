"""The caller's memory of some blocks, checked once and turned into addresses.

A block may lie in several pieces (an engine keeps K and V, or each layer, in
tensors of their own); the pieces of a block follow one another in the stored
block. Blocks are key-major: key 0 part 0, key 0 part 1, key 1 part 0...
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from kvclient.memory_address import Located, locate_one
from kvservice import native
from kvservice.core.errors import BatchSizeError, BlockSizeError, InvalidFieldError
from kvservice.core.slots import I64, U32, U64
from kvservice.ports.transport import Pieces

Blocks = Any
"""What `put` and `get` take as memory: a `BlockBuffers`; one contiguous buffer that
holds all blocks; a sequence of buffers, one a block; or a sequence of sequences,
the pieces of each block. A buffer is whatever exports contiguous bytes, a NumPy
array, or a CPU torch tensor. mypy cannot name torch here, so this is Any; each
item is checked when it is located."""


class BlockBuffers:
    """Memory of `blocks_count` blocks. Immutable; keeps the memory alive.

    The memory stays the caller's. While a `put` runs it must not change; while a
    `get` runs nobody else may touch it.
    """

    __slots__ = ("_owners", "is_writable", "lengths", "pieces", "uniform_bytes")

    def __init__(
        self, pieces: Pieces, lengths: U64, owners: object, *, is_writable: bool, uniform_bytes: int
    ) -> None:
        """Take values that a constructor below has checked; not for callers.

        lengths: (blocks,) uint64, bytes of each block.
        uniform_bytes: bytes of every block, or 0 if they differ.
        """
        self.pieces = pieces
        self.lengths = lengths
        self.is_writable = is_writable
        self.uniform_bytes = uniform_bytes
        self._owners = owners

    @property
    def blocks_count(self) -> int:
        """Number of blocks."""
        return len(self.lengths)

    @property
    def size_bytes(self) -> int:
        """Bytes of all blocks together."""
        if self.uniform_bytes:
            return self.uniform_bytes * len(self.lengths)
        return int(self.lengths.sum())

    @classmethod
    def of(cls, blocks: Blocks, block_bytes: Sequence[int] = ()) -> BlockBuffers:
        """Take whatever `Blocks` allows.

        block_bytes: sizes of the parts of one key, which say how one contiguous
            buffer is cut; unused for the other forms.

        Raises:
            BatchSizeError: there is no block.
            BlockSizeError: a contiguous buffer holds no whole number of keys.
            InvalidFieldError: an item is no contiguous CPU memory.
        """
        if isinstance(blocks, BlockBuffers):
            return blocks
        if type(blocks) is np.ndarray and len(block_bytes) == 1:
            found = cls._of_array(blocks, block_bytes[0])
            if found is not None:
                return found
        if not isinstance(blocks, list | tuple):
            return cls.contiguous(blocks, block_bytes)
        if not blocks:
            raise BatchSizeError("blocks is empty; give one block at least")
        if isinstance(blocks[0], list | tuple):
            return cls._of_pieces(blocks)
        located = Located()
        located.add(blocks, "blocks")
        return cls._one_piece_each(located)

    @classmethod
    def _of_array(cls, array: npt.NDArray[Any], block_bytes: int) -> BlockBuffers | None:
        """Cut one array into blocks of one size; None where `contiguous` has to say what is wrong.

        The usual form of a call, so it takes the shortest way.
        """
        try:
            address, size_bytes = native.buffer_address(array, False)
        except BufferError:
            return None
        count, rest = divmod(size_bytes, block_bytes)
        if rest or not count:
            return None
        addresses = np.arange(address, address + size_bytes, block_bytes, dtype=np.uint64)
        lengths = _uniform(count, block_bytes)
        return cls(
            Pieces(addresses, lengths),
            lengths,
            array,
            is_writable=array.flags.writeable,
            uniform_bytes=block_bytes,
        )

    @classmethod
    def contiguous(cls, buffer: Blocks, block_bytes: Sequence[int]) -> BlockBuffers:
        """Cut one buffer that holds the blocks one after the other.

        block_bytes: sizes of the parts of one key, repeated to the buffer's end.

        Raises:
            BlockSizeError: the buffer's size is no multiple of their sum.
            InvalidFieldError: it is no contiguous CPU memory.
        """
        found = locate_one(buffer, "blocks")
        size_bytes = found.sizes[0]
        if len(block_bytes) == 1 and size_bytes == block_bytes[0]:
            return cls._one_piece_each(found)
        key_bytes = sum(block_bytes)
        if key_bytes <= 0 or size_bytes % key_bytes:
            raise BlockSizeError(
                f"blocks is one buffer of {size_bytes} bytes, which holds no whole number of keys of "
                f"{key_bytes} bytes (parts {list(block_bytes)}); give whole keys, or a list of buffers"
            )
        keys_count = size_bytes // key_bytes
        if len(block_bytes) == 1:
            lengths = _uniform(keys_count, key_bytes)
            addresses = np.arange(keys_count, dtype=np.uint64)
            addresses *= key_bytes
            addresses += found.addresses[0]
            pieces = Pieces(addresses, lengths)
            return cls(pieces, lengths, found.owners, is_writable=found.is_writable, uniform_bytes=key_bytes)
        lengths = np.tile(np.asarray(block_bytes, np.uint64), keys_count)
        addresses = np.empty_like(lengths)
        addresses[0] = found.addresses[0]
        np.cumsum(lengths[:-1], out=addresses[1:])
        addresses[1:] += addresses[0]
        uniform_bytes = block_bytes[0] if len(set(block_bytes)) == 1 else 0
        return cls(
            Pieces(addresses, lengths),
            lengths,
            found.owners,
            is_writable=found.is_writable,
            uniform_bytes=uniform_bytes,
        )

    @classmethod
    def from_addresses(
        cls,
        addresses: npt.ArrayLike,
        lengths: npt.ArrayLike,
        counts: npt.ArrayLike | None = None,
        owner: object = None,
        *,
        is_writable: bool = True,
    ) -> BlockBuffers:
        """Take raw addresses of this process, at the caller's own risk.

        addresses, lengths: (pieces,), bytes; a wrong one crashes the process.
        counts: (blocks,), consecutive pieces of each block; None if each piece is
            one block.
        owner: whatever keeps the memory alive; held as long as this is.

        Raises:
            BatchSizeError: there is no block.
            InvalidFieldError: the arrays contradict one another.
        """
        piece_addresses = np.ascontiguousarray(addresses, np.uint64)
        piece_lengths = np.ascontiguousarray(lengths, np.uint64)
        if piece_addresses.ndim != 1 or piece_addresses.shape != piece_lengths.shape:
            raise InvalidFieldError(
                f"addresses has shape {piece_addresses.shape} and lengths {piece_lengths.shape}; "
                "give one length for each address"
            )
        piece_counts = None if counts is None else np.ascontiguousarray(counts, np.uint32)
        return cls._of_arrays(piece_addresses, piece_lengths, piece_counts, owner, is_writable=is_writable)

    @classmethod
    def strided(cls, tensors: Sequence[Any], block_ids: npt.ArrayLike) -> BlockBuffers:
        """Take blocks out of an engine's KV tensors, without touching them.

        tensors: NumPy arrays or CPU torch tensors of shape (engine_blocks, ...); one
            index along the first dimension must be contiguous. Piece j of a block is
            its slice of tensor j.
        block_ids: (blocks,) integers, index along the first dimension.

        Raises:
            BatchSizeError: there is no tensor or no id.
            InvalidFieldError: a tensor is unfit or an id is out of its range.
        """
        ids = np.ascontiguousarray(block_ids, np.int64)
        if not tensors or ids.ndim != 1 or not len(ids):
            raise BatchSizeError(
                f"strided got {len(tensors)} tensors and block_ids of shape {ids.shape}; "
                "give one of each at least"
            )
        smallest, largest = int(ids.min()), int(ids.max())
        pools = [_pool(tensor, index) for index, tensor in enumerate(tensors)]
        for index, pool in enumerate(pools):
            if smallest < 0 or largest >= pool.blocks_count:
                raise InvalidFieldError(
                    f"block_ids reach from {smallest} to {largest}, but tensors[{index}] has blocks "
                    f"0 to {pool.blocks_count - 1}"
                )
        strides = np.array([pool.stride_bytes for pool in pools], np.int64)
        bases = np.array([pool.address for pool in pools], np.uint64)
        # Strides may be negative in NumPy views; two's complement makes the unsigned sum right.
        addresses = (bases[None, :] + (ids[:, None] * strides[None, :]).view(np.uint64)).reshape(-1)
        sizes = np.array([pool.block_bytes for pool in pools], np.uint64)
        block_bytes = int(sizes.sum())
        is_single = len(pools) == 1
        lengths = np.full(len(ids), block_bytes, np.uint64)
        pieces = Pieces(
            addresses,
            lengths if is_single else np.tile(sizes, len(ids)),
            None if is_single else np.full(len(ids), len(pools), np.uint32),
        )
        return cls(
            pieces,
            lengths,
            list(tensors),
            is_writable=all(pool.is_writable for pool in pools),
            uniform_bytes=block_bytes,
        )

    def check(self, block_bytes: Sequence[int], *, keys_count: int, is_target: bool) -> None:
        """Hold the memory to what the keys need.

        block_bytes: sizes of the parts of one key.
        is_target: bytes will be written into it.

        Raises:
            InvalidFieldError: the number of blocks is wrong, or a target is read-only.
            BlockSizeError: a block has another size than its part.
        """
        parts_count = len(block_bytes)
        if len(self.lengths) != keys_count * parts_count:
            raise InvalidFieldError(
                f"blocks has {len(self.lengths)} blocks for {keys_count} keys of {parts_count} parts; "
                f"give {keys_count * parts_count}, key-major"
            )
        if is_target and not self.is_writable:
            raise InvalidFieldError(
                "into is read-only memory; give a bytearray, a writable array or a tensor"
            )
        if parts_count == 1 and self.uniform_bytes == block_bytes[0]:
            return
        expected = np.tile(np.asarray(block_bytes, np.uint64), keys_count)
        wrong = np.flatnonzero(self.lengths != expected)
        if len(wrong):
            index = int(wrong[0])
            raise BlockSizeError(
                f"blocks[{index}] has {self.lengths[index]} bytes, but part {index % parts_count} of the "
                f"namespace has blocks of {expected[index]} bytes"
            )

    def first(self, blocks_count: int) -> BlockBuffers:
        """Return the first blocks, over the same memory."""
        if blocks_count == len(self.lengths):
            return self
        return self.take(np.arange(blocks_count))

    def take(self, indexes: I64) -> BlockBuffers:
        """Return the blocks at `indexes`, in that order, over the same memory."""
        lengths = self.lengths[indexes]
        counts = self.pieces.counts
        if counts is None:
            pieces = Pieces(self.pieces.addresses[indexes], lengths)
        else:
            taken = counts[indexes]
            ends = np.cumsum(counts, dtype=np.int64)
            starts = (ends - counts)[indexes]
            # Number within its block of each piece taken, from a running count that restarts per block.
            within = np.arange(int(taken.sum())) - np.repeat(np.cumsum(taken, dtype=np.int64) - taken, taken)
            chosen = np.repeat(starts, taken) + within
            pieces = Pieces(self.pieces.addresses[chosen], self.pieces.lengths[chosen], taken)
        return BlockBuffers(
            pieces,
            lengths,
            self._owners,
            is_writable=self.is_writable,
            uniform_bytes=self.uniform_bytes,
        )

    @classmethod
    def _one_piece_each(cls, located: Located) -> BlockBuffers:
        sizes = located.sizes
        count = len(sizes)
        # One array for both: making an array costs more than slicing one.
        numbers = np.array((*located.addresses, *sizes), np.uint64)
        lengths = numbers[count:]
        return cls(
            Pieces(numbers[:count], lengths),
            lengths,
            located.owners,
            is_writable=located.is_writable,
            uniform_bytes=sizes[0] if sizes.count(sizes[0]) == count else 0,
        )

    @classmethod
    def _of_pieces(cls, blocks: Sequence[Sequence[Any]]) -> BlockBuffers:
        located = Located()
        counts: list[int] = []
        for index, pieces in enumerate(blocks):
            if not isinstance(pieces, list | tuple) or not pieces:
                raise InvalidFieldError(
                    f"blocks[{index}] is no list of pieces, or an empty one, while blocks[0] is a list; "
                    "give each block as a list of its pieces"
                )
            located.add(pieces, f"blocks[{index}]")
            counts.append(len(pieces))
        return cls._of_arrays(
            np.array(located.addresses, np.uint64),
            np.array(located.sizes, np.uint64),
            np.array(counts, np.uint32),
            located.owners,
            is_writable=located.is_writable,
        )

    @classmethod
    def _of_arrays(
        cls, addresses: U64, piece_lengths: U64, counts: U32 | None, owner: object, *, is_writable: bool
    ) -> BlockBuffers:
        blocks_count = len(addresses) if counts is None else len(counts)
        if not blocks_count:
            raise BatchSizeError("blocks is empty; give one block at least")
        lengths = piece_lengths
        if counts is not None:
            if counts.ndim != 1 or not counts.all() or int(counts.sum()) != len(addresses):
                raise InvalidFieldError(
                    f"counts add up to {int(counts.sum())} pieces of {len(addresses)}, or one is 0; "
                    "give each block's number of pieces"
                )
            starts = np.cumsum(counts, dtype=np.int64) - counts
            lengths = np.add.reduceat(piece_lengths, starts)
        first = int(lengths[0])
        uniform_bytes = first if bool((lengths == first).all()) else 0
        return cls(
            Pieces(addresses, piece_lengths, counts),
            lengths,
            owner,
            is_writable=is_writable,
            uniform_bytes=uniform_bytes,
        )


@functools.lru_cache(maxsize=64)
def _uniform(count: int, block_bytes: int) -> U64:
    """(count,) uint64, all `block_bytes`; shared, so read-only."""
    lengths = np.full(count, block_bytes, np.uint64)
    lengths.flags.writeable = False
    return lengths


class _Pool:
    """One tensor whose first dimension is the engine's blocks."""

    __slots__ = ("address", "block_bytes", "blocks_count", "is_writable", "stride_bytes")

    def __init__(
        self, *, address: int, blocks_count: int, block_bytes: int, stride_bytes: int, is_writable: bool
    ) -> None:
        self.address = address
        self.blocks_count = blocks_count
        self.block_bytes = block_bytes
        self.stride_bytes = stride_bytes
        self.is_writable = is_writable


def _pool(tensor: Any, index: int) -> _Pool:
    name = f"tensors[{index}]"
    if isinstance(tensor, np.ndarray):
        if tensor.ndim == 0 or not len(tensor) or not tensor[0:1].flags.c_contiguous:
            raise _unfit(name, tensor.shape)
        return _Pool(
            address=tensor.__array_interface__["data"][0],
            blocks_count=len(tensor),
            block_bytes=tensor[0:1].nbytes,
            stride_bytes=tensor.strides[0],
            is_writable=bool(tensor.flags.writeable),
        )
    torch = sys.modules.get("torch")
    if torch is None or not isinstance(tensor, torch.Tensor):
        raise InvalidFieldError(
            f"{name} is a {type(tensor).__name__}; give NumPy arrays or CPU torch tensors"
        )
    if tensor.device.type != "cpu":
        raise InvalidFieldError(f"{name} is on {tensor.device}; copy it to host memory first")
    if tensor.dim() == 0 or not len(tensor) or not tensor[0].is_contiguous():
        raise _unfit(name, tuple(tensor.shape))
    return _Pool(
        address=tensor.data_ptr(),
        blocks_count=len(tensor),
        block_bytes=tensor[0].numel() * tensor.element_size(),
        stride_bytes=tensor.stride(0) * tensor.element_size(),
        is_writable=True,
    )


def _unfit(name: str, shape: tuple[int, ...]) -> InvalidFieldError:
    return InvalidFieldError(
        f"{name} of shape {shape} has no contiguous blocks along its first dimension; pass one view for each "
        "contiguous run (for a (2, blocks, ...) cache: tensor[0] and tensor[1])"
    )
