"""Segments in several registrations, where a wire limits how long one may be.

The key of such a segment is the keys of its chunks, one after the other:

    count, u16 | for each: length of the chunk in bytes, u64 | length of its key, u16 | key

An operation that crosses the end of a chunk is posted as two or more.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvservice.core.errors import MalformedError
from kvservice.core.slots import I64, U32, U64

_COUNT = struct.Struct("<H")
_CHUNK = struct.Struct("<QH")

I32 = npt.NDArray[np.int32]


def chunk_lengths(size_bytes: int, limit_bytes: int) -> list[int]:
    """Return the lengths of a segment's chunks; one where there is no limit (0)."""
    if not limit_bytes:
        return [size_bytes]
    whole, rest = divmod(size_bytes, limit_bytes)
    return [limit_bytes] * whole + ([rest] if rest else [])


def pack_keys(lengths: Sequence[int], keys: Sequence[bytes]) -> bytes:
    """Return the key of a segment whose chunks have these lengths and keys."""
    chunks = (_CHUNK.pack(length, len(key)) + key for length, key in zip(lengths, keys, strict=True))
    return _COUNT.pack(len(keys)) + b"".join(chunks)


def parse_keys(packed: bytes, size_bytes: int) -> list[tuple[int, bytes]]:
    """Return length and key of each chunk of a segment.

    Raises:
        MalformedError: it is no such key, or not that of a segment of this size.
    """
    try:
        (count,) = _COUNT.unpack_from(packed)
        place, found = _COUNT.size, []
        for _ in range(count):
            length, key_bytes = _CHUNK.unpack_from(packed, place)
            place += _CHUNK.size
            found.append((length, packed[place : place + key_bytes]))
            place += key_bytes
    except struct.error as error:
        raise MalformedError(f"{len(packed)} bytes are no key of a segment: {error}") from error
    total = sum(length for length, _ in found)
    if place != len(packed) or total != size_bytes or not all(length for length, _ in found):
        raise MalformedError(
            f"the key of a segment of {size_bytes} bytes has {count} chunks of {total} bytes in all"
        )
    return found


@dataclass(frozen=True, slots=True)
class Operations:
    """Operations of a batch, each within a chunk.

    chunks: (operations,) uint32, into the chunks of all segments, one segment after the other.
    remote, local: (operations,) uint64 addresses; lengths: (operations,) uint64.
    """

    chunks: U32
    remote: U64
    local: U64
    lengths: U64


@dataclass(frozen=True, slots=True)
class Chunking:
    """Where the chunks of some segments lie. Positions count bytes over all segments, one after the other.

    bases: (segments,) uint64, address of each segment. firsts: (segments,) uint64, its first position.
    starts, ends: (chunks,) uint64, positions.
    """

    bases: U64
    firsts: U64
    starts: U64
    ends: U64

    @classmethod
    def of(cls, bases: Sequence[int], lengths: Sequence[Sequence[int]]) -> Chunking:
        """Take the address of each segment, and the lengths of its chunks."""
        sizes = np.array([sum(each) for each in lengths], np.uint64)
        every = np.array([length for each in lengths for length in each], np.uint64)
        ends = np.cumsum(every, dtype=np.uint64)
        firsts = np.cumsum(sizes, dtype=np.uint64) - sizes
        return cls(np.array(bases, np.uint64), firsts, ends - every, ends)

    @property
    def is_plain(self) -> bool:
        """Whether each segment is one chunk, so that there is nothing to cut."""
        return len(self.bases) == len(self.ends)

    def cut(self, segments: U32, remote: U64, local: U64, lengths: U64) -> tuple[Operations, I64]:
        """Cut operations, which lie within their segments, at the ends of chunks.

        Returns also (operations,) int64, the first part of each: it has one at least.
        """
        begins = self.firsts[segments] + (remote - self.bases[segments])
        last = len(self.ends) - 1
        # One that is empty may stand at the end of the last chunk.
        first_chunks = np.minimum(np.searchsorted(self.ends, begins, side="right"), last)
        last_bytes = begins + np.maximum(lengths, 1) - np.uint64(1)
        last_chunks = np.minimum(np.searchsorted(self.ends, last_bytes, side="right"), last)
        counts = last_chunks - first_chunks + 1
        parts = np.cumsum(counts) - counts
        whole = np.repeat(np.arange(len(lengths)), counts)
        chunks = first_chunks[whole] + np.arange(len(whole)) - parts[whole]
        starts = np.maximum(begins[whole], self.starts[chunks])
        stops = np.minimum(begins[whole] + lengths[whole], self.ends[chunks])
        shifts = starts - begins[whole]
        cut = Operations(
            chunks.astype(np.uint32), remote[whole] + shifts, local[whole] + shifts, stops - starts
        )
        return cut, parts


def joined(statuses: I32, starts: I64) -> I32:
    """Return the status of each operation out of those of its parts: 0 if all are."""
    if not len(starts):
        return statuses[:0]
    # Statuses of failures are negative.
    found: I32 = np.minimum.reduceat(statuses, starts)
    return found
