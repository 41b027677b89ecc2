"""The memory of a batch of blocks, cut into chunks for the socket.

A chunk is what one system call moves and one checksum step covers. It is small
enough to stay in a core's second-level cache, so that the checksum before a send
brings the bytes in for the send, and the one after a receive finds them there;
while one side sums, the other empties or fills the socket buffer.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from kvservice import native
from kvservice.core.slots import U32, U64
from kvservice.ports.transport import Pieces
from kvservice.transports.blockmap import bytes_per_block

CHUNK_BYTES = 512 << 10
"""A quarter of a second-level cache of 2 MiB; measured best of 128 KiB to 2 MiB."""

# All of this process's memory as one array: a slice of it makes a view from an
# address five times faster than a ctypes array for each, which also needs a type
# for each length. 2 ** 56 is past every user address of x86-64 and arm64.
_MEMORY = memoryview((ctypes.c_ubyte * (1 << 56)).from_address(0)).cast("B")


@dataclass(frozen=True, slots=True)
class Chunk:
    """Some whole blocks, or some bytes of one large block.

    views: the memory, in the order of the payload, neighbours joined.
    blocks: the blocks it covers.
    is_whole: whether those blocks are in it from first to last byte.
    is_first: whether a part of a block is its first.
    """

    views: list[memoryview]
    blocks: slice
    pieces: slice
    is_whole: bool
    is_first: bool


@dataclass(frozen=True, slots=True)
class Region:
    """The memory of some blocks; whoever makes it keeps the memory alive."""

    pieces: Pieces

    def chunks(self) -> Iterator[Chunk]:
        """Yield the chunks in the order of the payload."""
        addresses, lengths, counts = self.pieces.addresses, self.pieces.lengths, self.pieces.counts
        block_bytes = bytes_per_block(self.pieces)
        blocks_count = len(block_bytes)
        if counts is None:
            piece_starts = np.arange(blocks_count + 1)
        else:
            piece_starts = np.concatenate(([0], np.cumsum(counts, dtype=np.int64)))
        borders = _chunk_borders(block_bytes)
        piece_borders = piece_starts[borders].tolist()
        large = (block_bytes[borders[:-1]] > CHUNK_BYTES).tolist()
        places = borders.tolist()
        for index, is_large in enumerate(large):
            blocks = slice(places[index], places[index + 1])
            pieces = slice(piece_borders[index], piece_borders[index + 1])
            views = views_of(addresses[pieces], lengths[pieces])
            if is_large:
                yield from _parts(views, blocks, pieces)
            else:
                yield Chunk(views, blocks, pieces, is_whole=True, is_first=True)

    def add_checksum(self, chunk: Chunk, checksums: U32) -> None:
        """Write into `checksums` (blocks,) uint32 the CRC32C of the chunk's blocks;
        the parts of a large block add up, and must come in their order.
        """
        if chunk.is_whole:
            counts = self.pieces.counts
            native.checksum_blocks(
                self.pieces.addresses[chunk.pieces],
                self.pieces.lengths[chunk.pieces],
                None if counts is None else counts[chunk.blocks],
                checksums[chunk.blocks],
            )
            return
        block = chunk.blocks.start
        value = 0 if chunk.is_first else int(checksums[block])
        for view in chunk.views:
            value = native.crc32c(view, value)
        checksums[block] = value


def views_of(addresses: U64, lengths: U64) -> list[memoryview]:
    """Return writable views of pieces of memory, neighbours in memory joined."""
    pieces_count = len(addresses)
    if pieces_count == 1:
        start = int(addresses[0])
        return [_MEMORY[start : start + int(lengths[0])]]
    stops = addresses + lengths
    is_start = np.ones(pieces_count, dtype=np.bool_)
    is_start[1:] = addresses[1:] != stops[:-1]
    firsts = np.flatnonzero(is_start)
    lasts = np.append(firsts[1:], pieces_count) - 1
    runs = zip(addresses[firsts].tolist(), stops[lasts].tolist(), strict=True)
    return [_MEMORY[start:stop] for start, stop in runs]


def _chunk_borders(block_bytes: U64) -> np.typing.NDArray[np.int64]:
    """Return the first block of each chunk, and the number of blocks.

    A chunk holds the blocks that begin in the same CHUNK_BYTES of payload, so it
    is at most twice as large; a block larger than a chunk has chunks of its own.
    """
    starts = np.cumsum(block_bytes, dtype=np.uint64) - block_bytes
    buckets = starts // np.uint64(CHUNK_BYTES)
    is_large = block_bytes > CHUNK_BYTES
    is_border = np.ones(len(block_bytes), dtype=np.bool_)
    is_border[1:] = (buckets[1:] != buckets[:-1]) | is_large[1:] | is_large[:-1]
    return np.append(np.flatnonzero(is_border), len(block_bytes))


def _parts(views: list[memoryview], blocks: slice, pieces: slice) -> Iterator[Chunk]:
    """Cut one large block into chunks."""
    part: list[memoryview] = []
    room = CHUNK_BYTES
    is_first = True
    for view in views:
        rest = view
        while len(rest):
            part.append(rest[:room])
            taken = min(room, len(rest))
            rest = rest[taken:]
            room -= taken
            if room == 0:
                yield Chunk(part, blocks, pieces, is_whole=False, is_first=is_first)
                part, room, is_first = [], CHUNK_BYTES, False
    if part:
        yield Chunk(part, blocks, pieces, is_whole=False, is_first=is_first)
