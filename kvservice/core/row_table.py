"""A hash table of rows: which key lies in which slot.

Two of these serve each tenant. The *directory* holds the committed blocks; its
rows lie in memory that every local client of the tenant maps read-only, so the
index that the daemon trusts and the one that clients read are one and the same.
The *pending* table holds reserved keys and lies in private memory.

The row itself and the algorithms are in `row_layout`; the loops may be the NumPy
ones from there or the C ones of the native extension, which a test holds equal.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from kvservice.core.slots import I64, U32, U64

Rows = npt.NDArray[np.void]
"""(capacity,) of `row_layout.ROW_DTYPE`."""

SMALLEST_CAPACITY_ROWS = 1 << 14
"""A megabyte of rows: enough for 8,192 blocks before the first growth."""

GROWTH_FACTOR = 2
"""Growth copies every row, at 10 million a second; a larger factor would leave a table
of a million blocks three quarters empty."""

KEY_BYTES = 32


class TableOperations(Protocol):
    """The loops over a table; `kvservice.native` and `row_layout` both have them."""

    def find_rows(self, table: Rows, capacity: int, keys: bytes, space: int, positions: I64) -> int:
        """Fill `positions` with the row of each key or -1; return the found prefix."""

    def insert_rows(  # noqa: PLR0913, PLR0917 - one call of the C extension, for speed
        self,
        table: Rows,
        capacity: int,
        keys: bytes,
        space: int,
        segments: U32,
        granules: U32,
        length: int,
        checksums: U32,
        generations: U64,
    ) -> None:
        """Insert absent keys; load stays at one half or less."""

    def remove_rows(self, table: Rows, capacity: int, keys: bytes, spaces: U32) -> int:
        """Remove the keys that are there; return how many."""

    def copy_rows(self, source: Rows, source_capacity: int, target: Rows, target_capacity: int) -> None:
        """Insert every live row of `source` into an empty `target`."""


@dataclass(frozen=True, slots=True)
class RowLocations:
    """Where the rows of a batch say that their blocks are.

    found: (keys,) bool.
    segments, granules: (keys,) uint32; undefined where not found.
    """

    found: npt.NDArray[np.bool_]
    segments: U32
    granules: U32


class RowTable:
    """Keys to slots, growing as needed.

    `create(capacity_rows)` gives zeroed memory for that many rows; the caller of
    it learns by it that the table has moved.
    """

    def __init__(self, operations: TableOperations, create: Callable[[int], Rows]) -> None:
        self._operations = operations
        self._create = create
        self._rows = create(SMALLEST_CAPACITY_ROWS)
        self._used = 0

    def __len__(self) -> int:
        """Return the number of keys held."""
        return self._used

    @property
    def capacity_rows(self) -> int:
        """Rows of the table as it is now."""
        return len(self._rows)

    @property
    def rows(self) -> Rows:
        """The rows themselves, for invariant checks."""
        return self._rows

    def find(self, keys: bytes, space: int) -> RowLocations:
        """Look up packed keys of one space."""
        positions = np.empty(len(keys) // KEY_BYTES, dtype=np.int64)
        self._operations.find_rows(self._rows, len(self._rows), keys, space, positions)
        found = positions >= 0
        if not found.any():
            return RowLocations(found, _NO_U32, _NO_U32)
        rows = self._rows
        return RowLocations(found, rows["segment"][positions], rows["granule"][positions])

    def row_of(self, key: bytes, space: int) -> Rows | None:
        """Return the row of one key as an array of one row, good until the table changes; None if absent."""
        position = np.empty(1, dtype=np.int64)
        if not self._operations.find_rows(self._rows, len(self._rows), key, space, position):
            return None
        first = int(position[0])
        return self._rows[first : first + 1]

    def find_mask(self, keys: bytes, space: int) -> npt.NDArray[np.bool_]:
        """Say for each packed key whether it is there."""
        positions = np.empty(len(keys) // KEY_BYTES, dtype=np.int64)
        self._operations.find_rows(self._rows, len(self._rows), keys, space, positions)
        return positions >= 0

    def insert(
        self,
        keys: bytes,
        space: int,
        *,
        segments: U32,
        granules: U32,
        length_bytes: int,
        checksums: U32,
        generations: U64,
    ) -> None:
        """Insert packed keys, none of which may be there yet."""
        count = len(keys) // KEY_BYTES
        self._make_room(count)
        self._operations.insert_rows(
            self._rows,
            len(self._rows),
            keys,
            space,
            segments,
            granules,
            length_bytes,
            checksums,
            generations,
        )
        self._used += count

    def remove(self, keys: bytes, spaces: U32) -> int:
        """Remove packed keys, each of its own space; return how many were there."""
        removed = self._operations.remove_rows(self._rows, len(self._rows), keys, spaces)
        self._used -= removed
        return removed

    def remove_of(self, keys: bytes, space: int) -> int:
        """Remove packed keys of one space; return how many were there."""
        return self.remove(keys, np.full(len(keys) // KEY_BYTES, space, dtype=np.uint32))

    def _make_room(self, count: int) -> None:
        capacity = len(self._rows)
        while (self._used + count) * 2 > capacity:
            capacity *= GROWTH_FACTOR
        if capacity == len(self._rows):
            return
        grown = self._create(capacity)
        self._operations.copy_rows(self._rows, len(self._rows), grown, capacity)
        self._rows = grown


_NO_U32: Any = np.empty(0, dtype=np.uint32)
