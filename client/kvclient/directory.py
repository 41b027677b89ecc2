"""Local reads without a call: the tenant's table of committed blocks, mapped read-only.

A read is a probe, a copy, and a second look at the slot's generation, all in one
native call. A hit is right even when the table has been superseded, since the
generations are the daemon's own; only a miss of such a table proves nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kvclient.buffers import BlockBuffers
from kvservice import native
from kvservice.core.row_layout import KEY_BYTES, ROW_DTYPE, ReadOutcome
from kvservice.core.slots import I64, U8, U32
from kvservice.transports.segments import TABLE_HEADER_BYTES, TABLE_SUPERSEDED, MappedTable
from kvservice.transports.shm import SegmentMap

_STATE_OFFSET_BYTES = 24


@dataclass(slots=True)
class DirectoryRead:
    """What a read did. Not frozen, since that would double the cost of making one.

    outcomes: (keys,) uint8 of ReadOutcome, the worst of each key's parts.
    hits_count: keys of which every part is in place.
    touched: for each part, (keys,) int64 rows that were read, -1 elsewhere.
    """

    outcomes: U8
    hits_count: int
    touched: list[I64]


class Directory:
    """One mapped table, with the segments that its rows point into."""

    def __init__(self, table: MappedTable, segments: SegmentMap) -> None:
        self._table = table
        self._segments = segments
        self._capacity = table.rows_count
        self._rows = table.memory.view[TABLE_HEADER_BYTES:]
        self._state = table.memory.view[_STATE_OFFSET_BYTES : _STATE_OFFSET_BYTES + 8].cast("Q")

    @property
    def is_superseded(self) -> bool:
        """Whether another table has taken this one's place: map again."""
        return self._state[0] == TABLE_SUPERSEDED

    def find(self, keys: bytes, spaces: Sequence[int]) -> U8:
        """Return for each key whether it is there in all spaces, (keys,) uint8 of 0 and 1."""
        count = len(keys) // KEY_BYTES
        positions = np.empty(count, np.int64)
        native.find_rows(self._rows, self._capacity, keys, spaces[0], positions)
        found = positions >= 0
        for space in spaces[1:]:
            native.find_rows(self._rows, self._capacity, keys, space, positions)
            found &= positions >= 0
        return found.view(np.uint8)

    def read(self, keys: bytes, spaces: Sequence[int], into: BlockBuffers, *, verify: bool) -> DirectoryRead:
        """Copy the blocks of packed keys into `into`, key-major over the spaces.

        verify: compare each block with its committed CRC32C.
        """
        count = len(keys) // KEY_BYTES
        if len(spaces) == 1:
            outcomes, touched, hits_count = self._read_part(keys, count, spaces[0], into, verify=verify)
            return DirectoryRead(outcomes, hits_count, [touched])
        worst = np.zeros(count, np.uint8)
        rows: list[I64] = []
        for part, space in enumerate(spaces):
            blocks = into.take(np.arange(part, count * len(spaces), len(spaces)))
            outcomes, touched, _ = self._read_part(keys, count, space, blocks, verify=verify)
            np.maximum(worst, outcomes, out=worst)
            rows.append(touched)
        return DirectoryRead(worst, int(np.count_nonzero(worst == ReadOutcome.HIT)), rows)

    def segments_of(self, keys: bytes, spaces: Sequence[int]) -> list[int]:
        """Return the segments that hold these keys now, ascending."""
        positions = np.empty(len(keys) // KEY_BYTES, np.int64)
        numbers: set[int] = set()
        for space in spaces:
            native.find_rows(self._rows, self._capacity, keys, space, positions)
            numbers.update(self.locations(positions)[0].tolist())
        return sorted(numbers)

    def locations(self, positions: I64) -> tuple[U32, U32]:
        """Return the segments and granules that rows name now; rows of -1 are left out.

        (rows,) uint32 each. Hints: a row may have changed since it was read.
        """
        rows = np.frombuffer(self._rows, dtype=ROW_DTYPE)[positions[positions >= 0]]
        return rows["segment"], rows["granule"]

    def close(self) -> None:
        """Let go of the mapping; it ends when this object is gone, which a read under way prevents."""
        self._table.close()

    def _read_part(
        self, keys: bytes, count: int, space: int, into: BlockBuffers, *, verify: bool
    ) -> tuple[U8, I64, int]:
        outcomes = np.empty(count, np.uint8)
        touched = np.empty(count, np.int64)
        # The snapshot keeps its segments mapped until the copies have ended.
        mapped = self._segments.snapshot()
        pieces = into.pieces
        hits_count = native.read_rows(
            self._rows,
            self._capacity,
            keys,
            space,
            mapped.bases,
            mapped.generation_bases,
            pieces.addresses,
            pieces.lengths,
            pieces.counts,
            verify,
            native.STREAMING_THRESHOLD_BYTES,
            outcomes,
            touched,
        )
        return outcomes, touched, hits_count
