"""The functions of the C extension in NumPy, ctypes and google-crc32c.

They give the same bytes, outcomes and errors, and serve where no compiler was at hand.
What they lack: streaming stores, a checksum in the same pass as the copy, and fences,
so that a reader of a live directory needs a processor that orders loads by itself (see
`DIRECTORY_IS_SAFE`).

Addresses are those of memory that the caller owns and keeps mapped.
"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import google_crc32c
import numpy as np
import numpy.typing as npt

from kvservice.core import row_layout
from kvservice.core.checksums import NO_CHECKSUM, STANDS_FOR_ZERO
from kvservice.core.row_layout import ReadOutcome, SlotOutcome, search_rows
from kvservice.core.slots import GRANULE_BYTES, I64, U8, U32, U64

STREAMING_THRESHOLD_BYTES = 65536
"""As in `pieces.h`, where the measurement is told; here nothing is streamed."""

Buffer = bytes | bytearray | memoryview | mmap.mmap | npt.NDArray[Any]
"""Any C-contiguous buffer."""

_U32_MAX = 0xFFFFFFFF


def crc32c(buffer: Buffer, value: int = 0) -> int:
    """Return the CRC-32C of the bytes, continued from `value`."""
    _check_range(value, "value", _U32_MAX)
    return _extend(value, _contiguous(buffer, "buffer").tobytes())


def copy_blocks(
    targets: U64,
    sources: U64,
    lengths: U64,
    piece_counts: U32 | None,
    checksums: U32 | None,
    streaming_threshold_bytes: int = STREAMING_THRESHOLD_BYTES,
) -> None:
    """Copy pieces; sum up those of each block into `checksums`."""
    pieces = _Pieces.of(lengths, piece_counts)
    _check_array(targets, "targets", np.uint64, len(pieces.lengths))
    _check_array(sources, "sources", np.uint64, len(pieces.lengths))
    if checksums is not None:
        _check_array(checksums, "checksums", np.uint32, len(pieces), is_writable=True)
    _check_range(streaming_threshold_bytes, "streaming_threshold_bytes", 2**64 - 1)
    to, source = targets.tolist(), sources.tolist()
    for block, piece_range in enumerate(pieces):
        value = 0
        for piece in piece_range:
            value = _copy(to[piece], source[piece], pieces.lengths[piece], value, checksums is not None)
        if checksums is not None:
            checksums[block] = value


def checksum_blocks(sources: U64, lengths: U64, piece_counts: U32 | None, checksums: U32) -> None:
    """Sum up the pieces of each block."""
    pieces = _Pieces.of(lengths, piece_counts)
    _check_array(sources, "sources", np.uint64, len(pieces.lengths))
    _check_array(checksums, "checksums", np.uint32, len(pieces), is_writable=True)
    source = sources.tolist()
    for block, piece_range in enumerate(pieces):
        value = 0
        for piece in piece_range:
            value = _sum(source[piece], pieces.lengths[piece], value)
        checksums[block] = value


def buffer_address(obj: Buffer, writable: bool) -> tuple[int, int]:  # noqa: FBT001 - as in C
    """Return address and size in bytes; the caller keeps `obj` alive.

    Raises:
        TypeError: not a buffer.
        BufferError: not C-contiguous, or read-only where `writable` is asked for.

    """
    view = _view(obj, "obj")
    if not view.c_contiguous:
        raise BufferError("obj must be C-contiguous")
    if writable and view.readonly:
        raise BufferError("obj must be writable, but is read-only")
    if view.nbytes == 0:
        return 0, 0  # nothing will be read there
    return np.frombuffer(view, dtype=np.uint8).ctypes.data, view.nbytes


def find_rows(table: Buffer, capacity: int, keys: Buffer, space: int, positions: I64) -> int:
    """Write the row of each packed key, or -1; return how many lead without a gap."""
    packed = _packed_keys(keys)
    _check_array(positions, "positions", np.int64, _key_count(packed), is_writable=True)
    return row_layout.find_rows(_table(table, capacity), capacity, packed, space, positions)


def insert_rows(  # noqa: PLR0913, PLR0917 - as in row_layout
    table: Buffer,
    capacity: int,
    keys: Buffer,
    space: int,
    segments: U32,
    granules: U32,
    length: int,
    checksums: U32,
    generations: U64,
) -> None:
    """Insert absent keys, all or none."""
    packed = _packed_keys(keys)
    for array, name in ((segments, "segments"), (granules, "granules"), (checksums, "checksums")):
        _check_array(array, name, np.uint32, _key_count(packed))
    _check_array(generations, "generations", np.uint64, _key_count(packed))
    _check_range(length, "length", _U32_MAX)
    row_layout.insert_rows(
        _table(table, capacity, is_writable=True),
        capacity,
        packed,
        space,
        segments,
        granules,
        length,
        checksums,
        generations,
    )


def remove_rows(table: Buffer, capacity: int, keys: Buffer, spaces: U32) -> int:
    """Remove the keys that are there; return how many."""
    packed = _packed_keys(keys)
    _check_array(spaces, "spaces", np.uint32, _key_count(packed))
    return row_layout.remove_rows(_table(table, capacity, is_writable=True), capacity, packed, spaces)


def copy_rows(source_table: Buffer, source_capacity: int, target_table: Buffer, target_capacity: int) -> None:
    """Insert every row of a table into another, zeroed one."""
    row_layout.copy_rows(
        _table(source_table, source_capacity, "source_table"),
        source_capacity,
        _table(target_table, target_capacity, "target_table", is_writable=True),
        target_capacity,
    )


def read_rows(  # noqa: PLR0913, PLR0917 - as in C, where one call must do it all
    table: Buffer,
    capacity: int,
    keys: Buffer,
    space: int,
    segment_bases: U64,
    generation_bases: U64,
    targets: U64,
    lengths: U64,
    piece_counts: U32 | None,
    verify: bool,  # noqa: FBT001 - as in C
    streaming_threshold_bytes: int,
    outcomes: U8,
    touched: I64,
) -> int:
    """Find and copy blocks; write what became of each; return the number of hits."""
    packed = _packed_keys(keys)
    count = _key_count(packed)
    pieces = _Pieces.of(lengths, piece_counts)
    if len(pieces) != count:
        name = "lengths" if piece_counts is None else "piece_counts"
        raise ValueError(f"{name} must have {count} items, not {len(pieces)}")
    _check_array(segment_bases, "segment_bases", np.uint64, None)
    _check_array(generation_bases, "generation_bases", np.uint64, len(segment_bases))
    _check_array(targets, "targets", np.uint64, len(pieces.lengths))
    _check_array(outcomes, "outcomes", np.uint8, count, is_writable=True)
    _check_array(touched, "touched", np.int64, count, is_writable=True)
    _check_range(streaming_threshold_bytes, "streaming_threshold_bytes", 2**64 - 1)
    maps = _Maps(segment_bases.tolist(), generation_bases.tolist())
    found, rows = search_rows(_table(table, capacity), capacity, packed, space)
    to = targets.tolist()
    for block, piece_range in enumerate(pieces):
        outcome = ReadOutcome.MISS
        if found[block] >= 0:
            scatter = [(to[piece], pieces.lengths[piece]) for piece in piece_range]
            outcome = _read_block(rows[block], maps, scatter, verify=verify)
        outcomes[block] = outcome
        touched[block] = found[block] if outcome is ReadOutcome.HIT else -1
    return int(np.count_nonzero(outcomes == ReadOutcome.HIT))


def copy_slots(  # noqa: PLR0913, PLR0917 - as in C, where one call must do it all
    segments: U32,
    granules: U32,
    generations: U64,
    segment_bases: U64,
    segment_sizes: U64,
    generation_bases: U64,
    addresses: U64,
    lengths: U64,
    piece_counts: U32 | None,
    checksums: U32 | None,
    is_write: bool,  # noqa: FBT001 - as in C
    streaming_threshold_bytes: int = STREAMING_THRESHOLD_BYTES,
) -> tuple[int, int]:
    """Check the slots, copy between them and the pieces, check again; (SlotOutcome, index of the slot)."""
    pieces = _Pieces.of(lengths, piece_counts)
    for name, array, item in (
        ("segments", segments, np.uint32),
        ("granules", granules, np.uint32),
        ("generations", generations, np.uint64),
    ):
        _check_array(array, name, item, len(pieces))
    _check_array(segment_bases, "segment_bases", np.uint64, None)
    _check_array(segment_sizes, "segment_sizes", np.uint64, len(segment_bases))
    _check_array(generation_bases, "generation_bases", np.uint64, len(segment_bases))
    _check_array(addresses, "addresses", np.uint64, len(pieces.lengths))
    places: list[tuple[int, int]] = []
    for slot, piece_range in enumerate(pieces):
        segment, offset = int(segments[slot]), int(granules[slot]) * GRANULE_BYTES
        if segment >= len(segment_bases) or not segment_bases[segment]:
            return SlotOutcome.UNMAPPED, slot
        if offset + sum(pieces.lengths[piece] for piece in piece_range) > int(segment_sizes[segment]):
            return SlotOutcome.OUTSIDE, slot
        word = int(generation_bases[segment]) + 8 * int(granules[slot])
        if _word(word) != int(generations[slot]):
            return SlotOutcome.STALE, slot
        places.append((int(segment_bases[segment]) + offset, word))
    in_slots = np.empty(len(pieces.lengths), dtype=np.uint64)
    for (place, _), piece_range in zip(places, pieces, strict=True):
        start = place
        for piece in piece_range:
            in_slots[piece] = start
            start += pieces.lengths[piece]
    targets, sources = (in_slots, addresses) if is_write else (addresses, in_slots)
    copy_blocks(targets, sources, lengths, piece_counts, checksums, streaming_threshold_bytes)
    for slot, (_, word) in enumerate(places):
        if _word(word) != int(generations[slot]):
            return SlotOutcome.MOVED, slot
    return SlotOutcome.COPIED, 0


def _word(address: int) -> int:
    return ctypes.c_uint64.from_address(address).value


@dataclass(frozen=True, slots=True)
class _Pieces:
    """Lengths of pieces, and how many of them each block has; yields each block's range."""

    lengths: list[int]
    counts: list[int] | None

    @classmethod
    def of(cls, lengths: U64, piece_counts: U32 | None) -> _Pieces:
        _check_array(lengths, "lengths", np.uint64, None)
        if piece_counts is None:
            return cls(lengths.tolist(), None)
        _check_array(piece_counts, "piece_counts", np.uint32, None)
        counts = piece_counts.tolist()
        if sum(counts) != len(lengths):
            raise ValueError(f"piece_counts must add up to the {len(lengths)} lengths, not to {sum(counts)}")
        return cls(lengths.tolist(), counts)

    def __len__(self) -> int:
        return len(self.lengths if self.counts is None else self.counts)

    def __iter__(self) -> Iterator[range]:
        start = 0
        for count in self.counts if self.counts is not None else [1] * len(self.lengths):
            yield range(start, start + count)
            start += count


@dataclass(frozen=True, slots=True)
class _Maps:
    """Where this process has mapped the segments and their generation words; 0: nowhere."""

    segments: list[int]
    generations: list[int]


def _read_block(row: np.void, maps: _Maps, scatter: list[tuple[int, int]], *, verify: bool) -> ReadOutcome:
    segment, granule, generation = int(row["segment"]), int(row["granule"]), int(row["generation"])
    if int(row["length"]) != sum(length for _, length in scatter):
        return ReadOutcome.LENGTH
    if segment >= len(maps.segments) or maps.segments[segment] == 0:
        return ReadOutcome.UNMAPPED
    word = ctypes.c_uint64.from_address(maps.generations[segment] + 8 * granule)
    if word.value != generation:
        return ReadOutcome.MISS
    source = maps.segments[segment] + granule * GRANULE_BYTES
    value = 0
    for target, length in scatter:
        value = _copy(target, source, length, value, verify)
        source += length
    if word.value != generation:
        return ReadOutcome.STALE
    stored = int(row["checksum"])
    if verify and stored not in {NO_CHECKSUM, value or STANDS_FOR_ZERO}:
        return ReadOutcome.CORRUPT
    return ReadOutcome.HIT


def _copy(target: int, source: int, length: int, value: int, is_summed: bool) -> int:  # noqa: FBT001
    if length == 0:
        return value
    ctypes.memmove(target, source, length)
    # The sum is of the bytes delivered, since the source may change meanwhile.
    return _sum(target, length, value) if is_summed else value


def _sum(address: int, length: int, value: int) -> int:
    return _extend(value, ctypes.string_at(address, length)) if length else value


def _extend(value: int, content: bytes) -> int:
    return int(google_crc32c.extend(value, content))


def _view(obj: Buffer, name: str) -> memoryview:
    if isinstance(obj, np.ndarray):
        return obj.data
    try:
        return memoryview(obj)
    except TypeError as error:
        raise TypeError(f"{name} must support the buffer protocol, not {type(obj).__name__}") from error


def _contiguous(obj: Buffer, name: str, *, is_writable: bool = False) -> memoryview:
    view = _view(obj, name)
    if not view.c_contiguous or (is_writable and view.readonly):
        raise ValueError(f"{name} must be a {'writable ' if is_writable else ''}contiguous buffer")
    return view


def _packed_keys(keys: Buffer) -> memoryview:
    view = _contiguous(keys, "keys")
    if view.nbytes % row_layout.KEY_BYTES:
        raise ValueError(f"keys must be a multiple of {row_layout.KEY_BYTES} bytes, not {view.nbytes}")
    return view


def _key_count(packed: memoryview) -> int:
    return packed.nbytes // row_layout.KEY_BYTES


def _table(
    table: Buffer, capacity: int, name: str = "table", *, is_writable: bool = False
) -> row_layout.Rows:
    _check_range(capacity, "capacity", _U32_MAX)
    if isinstance(table, np.ndarray) and table.dtype == row_layout.ROW_DTYPE and table.flags.c_contiguous:
        if is_writable and not table.flags.writeable:
            raise ValueError(f"{name} must be a writable contiguous buffer")
        return row_layout.rows_of(table, capacity)
    return row_layout.rows_of(_contiguous(table, name, is_writable=is_writable), capacity)


def _check_range(value: int, name: str, limit: int) -> None:
    if not 0 <= value <= limit:
        raise ValueError(f"{name} must be between 0 and {limit}")


def _check_array(
    array: npt.NDArray[Any],
    name: str,
    dtype: type[np.generic],
    count: int | None,
    *,
    is_writable: bool = False,
) -> None:
    if not isinstance(array, np.ndarray):
        raise TypeError(f"{name} must support the buffer protocol, not {type(array).__name__}")
    flags = array.flags
    is_fit = array.ndim == 1 and array.dtype == dtype and flags.c_contiguous and flags.aligned
    if not is_fit or (is_writable and not flags.writeable):
        kind = "writable contiguous" if is_writable else "contiguous"
        raise ValueError(f"{name} must be a {kind}, aligned 1-D array of {np.dtype(dtype).name}")
    if count is not None and len(array) != count:
        raise ValueError(f"{name} must have {count} items, not {len(array)}")
