"""The row table: how it lies in memory, and the reference for the loops over it.

A table is `capacity` rows of 64 bytes, a power of two of them, each one cache line
when the first one is aligned so. All numbers are little endian.

    byte   0        8       16       24       32      36        40        44
           +--------+--------+--------+--------+-------+---------+---------+--------+
           |          key (32 bytes)           | space | segment | granule | length |
           +--------+--------+--------+--------+-------+---------+---------+--------+
    byte  48         52        56          64
           +----------+---------+------------+
           | checksum | version | generation |
           +----------+---------+------------+

    space       0: the row is empty, and all its fields but the version are zero
    granule     offset in the segment, in units of 512 bytes
    length      bytes of the block
    checksum    of the block as stored: CRC-32C, 0 for none (`core.checksums`)
    version     odd while the writer changes the row
    generation  of the slot when the row was written

**Home slot.** The key is four u64 words, little endian as they lie. All arithmetic
is modulo 2^64, `^` is exclusive or:

    mixed = space * 0x9E3779B97F4A7C15
    for word in words:
        mixed = (mixed ^ word) * 0xD6E8FEB86659FD93
        mixed = mixed ^ (mixed >> 32)
    mixed = mixed * 0xFF51AFD7ED558CCD;  mixed = mixed ^ (mixed >> 29)
    mixed = mixed * 0xC4CEB9FE1A85EC53;  mixed = mixed ^ (mixed >> 32)
    home  = mixed & (capacity - 1)

A multiplication carries a difference upwards, a shift brings it down again, so keys
that count up in their first or in their last byte spread alike. It is no defence
against keys chosen to collide: block keys are hashes, and spaces part tenants.

**Search** goes from the home slot upwards, around the end, until the key or an empty
row. **Removal** shifts later rows back, so there are no tombstones and a table never
wears out. **Each change of a row** is: version + 1 (odd), release fence, body,
release fence, version + 2 of before (even). A reader takes the version, the body and
the version again, and believes the body only if the version was even and stayed. It
may miss a row that is being moved; it never sees a mixture. Versions belong to the
place, not to the key, and only grow (modulo 2^32).

One writer at a time; readers anywhere. These functions are the reference for those of
`kvservice.native`, which give the same bytes; they order their loads only as far as
the processor does by itself, so concurrent readers need an x86-64.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Any

import numpy as np
import numpy.typing as npt

from kvservice.core.slots import I64, U32, U64

ROW_DTYPE = np.dtype(
    [
        ("key", "<u8", (4,)),
        ("space", "<u4"),
        ("segment", "<u4"),
        ("granule", "<u4"),
        ("length", "<u4"),
        ("checksum", "<u4"),
        ("version", "<u4"),
        ("generation", "<u8"),
    ]
)
ROW_BYTES = 64
KEY_BYTES = 32

SEQLOCK_ATTEMPTS = 8
"""Looks at a row that keeps changing, before it counts as missing: more would only
wait for a writer that lost its processor."""

_BODY_FIELDS = ("key", "space", "segment", "granule", "length", "checksum", "generation")
_SPACE_FACTOR = np.uint64(0x9E3779B97F4A7C15)
_WORD_FACTOR = np.uint64(0xD6E8FEB86659FD93)
_FINISH = (
    (np.uint64(0xFF51AFD7ED558CCD), np.uint64(29)),
    (np.uint64(0xC4CEB9FE1A85EC53), np.uint64(32)),
)
_HALF = np.uint64(32)

Rows = npt.NDArray[np.void]
"""(capacity,) of ROW_DTYPE."""

Contiguous = bytes | bytearray | memoryview | npt.NDArray[Any]
"""Any C-contiguous buffer."""


class ReadOutcome(IntEnum):
    """What became of one block of a directory read."""

    HIT = 0
    """The bytes are in the target, and are the block's."""
    MISS = 1
    """No such row, or its slot has another owner by now."""
    UNMAPPED = 2
    """The block lies in a segment that this process has not mapped."""
    STALE = 3
    """The slot changed owner during the copy; the target holds anything."""
    CORRUPT = 4
    """The bytes differ from their checksum; the target holds them."""
    LENGTH = 5
    """The block is of another length than the target."""


class SlotOutcome(IntEnum):
    """What became of a copy under a capability (`native.copy_slots`)."""

    COPIED = 0
    UNMAPPED = 1
    OUTSIDE = 2
    STALE = 3
    """A slot had another owner before the copy; no byte moved."""
    MOVED = 4
    """A slot got another owner during the copy; the target holds garbage."""


def mix_keys(words: U64, spaces: U32 | int) -> U64:
    """Return the mixed value of each key.

    words: (keys, 4) uint64; spaces: (keys,) uint32, or one for all.
    """
    mixed = np.broadcast_to(np.asarray(spaces, dtype=np.uint64), words.shape[:1]) * _SPACE_FACTOR
    for column in range(words.shape[1]):
        mixed = (mixed ^ words[:, column]) * _WORD_FACTOR
        mixed ^= mixed >> _HALF
    for factor, shift in _FINISH:
        mixed = mixed * factor
        mixed ^= mixed >> shift
    return mixed


def rows_of(table: Contiguous, capacity: int) -> Rows:
    """View `capacity` rows in a buffer, writable if it is."""
    if capacity <= 0 or capacity & (capacity - 1):
        raise ValueError(f"capacity must be a power of two, not {capacity}")
    if isinstance(table, np.ndarray) and table.dtype == ROW_DTYPE and len(table) == capacity:
        return table
    if _size_bytes(table) < capacity * ROW_BYTES:
        raise ValueError(f"table must hold {capacity} rows of {ROW_BYTES} bytes")
    return np.frombuffer(table, dtype=ROW_DTYPE, count=capacity)


def words_of(keys: Contiguous) -> U64:
    """View packed keys as (keys, 4) uint64."""
    if _size_bytes(keys) % KEY_BYTES:
        raise ValueError(f"keys must be a multiple of {KEY_BYTES} bytes")
    return np.frombuffer(keys, dtype="<u8").reshape(-1, 4)


def find_rows(table: Contiguous, capacity: int, keys: Contiguous, space: int, positions: I64) -> int:
    """Write the row of each packed key, or -1, into `positions`.

    Returns the number of keys before the first missing one.
    """
    found, _ = search_rows(table, capacity, keys, space)
    positions[:] = found
    missing = np.flatnonzero(found < 0)
    return int(missing[0]) if missing.size else len(found)


def search_rows(table: Contiguous, capacity: int, keys: Contiguous, space: int) -> tuple[I64, Rows]:
    """Return the position of each packed key, or -1, and each found row as it was at one moment."""
    _check_space(space)
    rows = rows_of(table, capacity)
    words = words_of(keys)
    slots = _home_slots(words, space, capacity)
    found = np.full(len(words), -1, dtype=np.int64)
    snapshots = np.zeros(len(words), dtype=ROW_DTYPE)
    pending = np.arange(len(words))
    for _ in range(capacity):
        if not pending.size:
            break
        here, is_steady = _snapshot(rows, slots[pending])
        is_live = is_steady & (here["space"] != 0)
        is_same = is_live & (here["space"] == space) & (here["key"] == words[pending]).all(axis=1)
        found[pending[is_same]] = slots[pending[is_same]]
        snapshots[pending[is_same]] = here[is_same]
        pending = pending[is_live & ~is_same]
        slots[pending] = (slots[pending] + 1) & (capacity - 1)
    return found, snapshots


def insert_rows(  # noqa: PLR0913, PLR0917 - the columns of a row; a structure would be taken apart again in C
    table: Contiguous,
    capacity: int,
    keys: Contiguous,
    space: int,
    segments: U32,
    granules: U32,
    length: int,
    checksums: U32,
    generations: U64,
) -> None:
    """Insert packed keys of one space and one length; all or nothing.

    The caller keeps the load at one half or less.

    Raises:
        ValueError: a key is present or twice in the batch, or no row is empty; the
            message says at which index, and nothing has been inserted.

    """
    rows = rows_of(table, capacity)
    words = words_of(keys)
    found, _ = search_rows(rows, capacity, keys, space)
    _check_absent(words, found)
    body = np.zeros(len(words), dtype=ROW_DTYPE)
    body["key"], body["space"], body["length"] = words, space, length
    body["segment"], body["granule"] = segments, granules
    body["checksum"], body["generation"] = checksums, generations
    homes = _home_slots(words, space, capacity)
    placed: list[int] = []
    for index, home in enumerate(homes.tolist()):
        slot = _empty_slot(rows, home)
        if slot < 0:
            for used in reversed(placed):
                _erase(rows, used)
            raise ValueError(f"no empty row for key {index}; nothing was inserted")
        _write(rows, slot, body[index])
        placed.append(slot)


def remove_rows(table: Contiguous, capacity: int, keys: Contiguous, spaces: U32) -> int:
    """Remove those of the packed keys that are there, each of its own space; return how many."""
    rows = rows_of(table, capacity)
    words = words_of(keys)
    removed = 0
    for index, space in enumerate(spaces.tolist()):
        if space == 0:
            continue
        found, _ = search_rows(rows, capacity, words[index].tobytes(), space)
        if found[0] >= 0:
            _erase(rows, int(found[0]))
            removed += 1
    return removed


def copy_rows(
    source_table: Contiguous, source_capacity: int, target_table: Contiguous, target_capacity: int
) -> None:
    """Insert every row of a table into another, zeroed one.

    Raises:
        ValueError: no row of the target is empty any more.

    """
    source = rows_of(source_table, source_capacity)
    target = rows_of(target_table, target_capacity)
    live = source[source["space"] != 0]
    homes = _home_slots(live["key"], live["space"], target_capacity)
    for row, home in zip(live, homes.tolist(), strict=True):
        slot = _empty_slot(target, home)
        if slot < 0:
            raise ValueError("no empty row left in target_table")
        _write(target, slot, row)


def _size_bytes(buffer: Contiguous) -> int:
    return buffer.nbytes if isinstance(buffer, np.ndarray) else memoryview(buffer).nbytes


def _check_space(space: int) -> None:
    if not 0 < space <= np.iinfo(np.uint32).max:
        raise ValueError("space must not be 0: it marks empty rows" if space == 0 else "space must be a u32")


def _check_absent(words: U64, found: I64) -> None:
    seen: set[bytes] = set()
    for index, position in enumerate(found.tolist()):
        key = words[index].tobytes()
        if position >= 0 or key in seen:
            raise ValueError(f"key {index} is present already; nothing was inserted")
        seen.add(key)


def _home_slots(words: U64, spaces: U32 | int, capacity: int) -> I64:
    return (mix_keys(words, spaces) & np.uint64(capacity - 1)).astype(np.int64)


def _snapshot(rows: Rows, slots: I64) -> tuple[Rows, npt.NDArray[np.bool_]]:
    """Copy rows, and say of each whether it was steady meanwhile."""
    versions = rows["version"]
    copies = np.zeros(len(slots), dtype=ROW_DTYPE)
    is_steady = np.zeros(len(slots), dtype=np.bool_)
    pending = np.arange(len(slots))
    for _ in range(SEQLOCK_ATTEMPTS):
        places = slots[pending]
        before = versions[places]
        copies[pending] = rows[places]
        is_steady[pending] = (before & 1 == 0) & (before == versions[places])
        pending = pending[~is_steady[pending]]
        if not pending.size:
            break
    return copies, is_steady


def _write(rows: Rows, slot: int, body: np.void) -> None:
    """Give a row another body under its seqlock."""
    version = rows["version"][slot : slot + 1]  # a view, whose sums wrap without a warning
    version += np.uint32(1)
    for field in _BODY_FIELDS:
        rows[field][slot] = body[field]
    version += np.uint32(1)


def _empty_slot(rows: Rows, home: int) -> int:
    spaces = rows["space"]
    for step in range(len(rows)):
        slot = (home + step) & (len(rows) - 1)
        if spaces[slot] == 0:
            return slot
    return -1


def _erase(rows: Rows, slot: int) -> None:
    """Empty a row and shift back the rows behind it that may fill the gap."""
    mask = len(rows) - 1
    empty = _empty_slot(rows, slot)
    behind = (slot + np.arange(1, (empty - slot) & mask if empty >= 0 else len(rows))) & mask
    homes = _home_slots(rows["key"][behind], rows["space"][behind], len(rows))
    hole = slot
    for place, home in zip(behind.tolist(), homes.tolist(), strict=True):
        # A row may fill the hole when the hole lies between its home and its place.
        if (place - home) & mask >= (place - hole) & mask:
            _write(rows, hole, rows[place].copy())
            hole = place
    _write(rows, hole, np.zeros(1, dtype=ROW_DTYPE)[0])
