"""The transport of one host: segments mapped into this process.

A write is one copy and a read is one copy, or none (`views`). Nobody but the
holder checks: the slot's generation is looked at before and after, in a page
that only the daemon writes, and the holder keeps its own deadline.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field

import numpy as np

from kvservice import native
from kvservice.core.checksums import differing
from kvservice.core.errors import (
    ChecksumMismatchError,
    InvalidFieldError,
    KvError,
    PeerUnavailableError,
    StaleGenerationError,
)
from kvservice.core.row_layout import SlotOutcome
from kvservice.core.slots import GRANULE_BYTES, U32, U64, Slots
from kvservice.ports.transport import Transfer, TransportCapabilities
from kvservice.transports.blockmap import check_transfer
from kvservice.transports.segments import MappedSegment

MAX_SEGMENTS_COUNT = 1 << 20
"""Bound on segment numbers (256 TiB of arena): the arrays grow to the largest."""

_GENERATION_BYTES = 8


@dataclass(frozen=True, slots=True)
class MapSnapshot:
    """What is mapped, at one moment. Its arrays never change, and its segments
    stay mapped while it is referenced: hold it as long as its addresses are used.

    bases, generation_bases: (numbers,) uint64, address by segment number of its
        first byte and of its first generation; 0 = not mapped.
    sizes: (numbers,) uint64, bytes by segment number; 0 = not mapped.
    """

    bases: U64
    generation_bases: U64
    sizes: U64
    segments: dict[int, MappedSegment]
    # The segments' memory itself, which a concurrent `close` of one cannot unmap.
    views: dict[int, memoryview]
    generations: dict[int, U64]

    def missing(self, segments: U32) -> list[int]:
        """Return the numbers in `segments` that are not mapped, ascending."""
        numbers = np.unique(segments).tolist()
        return [number for number in numbers if number not in self.segments]


@dataclass(slots=True)
class SegmentMap:
    """The segments that this process has mapped, by number. Thread safe.

    Readers take a snapshot and need no lock; writers replace it.
    """

    _snapshot: MapSnapshot = field(default_factory=lambda: _snapshot_of({}))
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def bases(self) -> U64:
        """See MapSnapshot; only as safe as the segments stay mapped."""
        return self._snapshot.bases

    @property
    def generation_bases(self) -> U64:
        """See MapSnapshot; only as safe as the segments stay mapped."""
        return self._snapshot.generation_bases

    def snapshot(self) -> MapSnapshot:
        """Return what is mapped now."""
        return self._snapshot

    def missing(self, segments: U32) -> list[int]:
        """Return the numbers in `segments` that are not mapped, ascending."""
        return self._snapshot.missing(segments)

    def add(self, number: int, segment: MappedSegment) -> None:
        """Take over a mapped segment; one that has the number already is closed.

        Raises:
            InvalidFieldError: the number is out of bounds.
        """
        if not 0 <= number < MAX_SEGMENTS_COUNT:
            raise InvalidFieldError(f"segment number {number}: must be below {MAX_SEGMENTS_COUNT}")
        with self._lock:
            segments = dict(self._snapshot.segments)
            replaced = segments.get(number)
            segments[number] = segment
            self._snapshot = _snapshot_of(segments)
        if replaced is not None and replaced is not segment:
            replaced.close()

    def remove(self, number: int) -> MappedSegment | None:
        """Close and return a segment, or None if it is not mapped.

        It is unmapped at once, or when the transfers and views that use it have
        ended; `is_unmapped` of what is returned tells.
        """
        with self._lock:
            segments = dict(self._snapshot.segments)
            segment = segments.pop(number, None)
            self._snapshot = _snapshot_of(segments)
        if segment is not None:
            segment.close()
        return segment

    def close(self) -> None:
        """Close every segment. Idempotent."""
        with self._lock:
            segments = self._snapshot.segments
            self._snapshot = _snapshot_of({})
        for segment in segments.values():
            segment.close()


class ShmTransport:
    """Transport over the segments of a SegmentMap, which its maker closes."""

    def __init__(self, mapping: SegmentMap) -> None:
        self._mapping = mapping
        self._is_closed = False

    @property
    def capabilities(self) -> TransportCapabilities:
        """Slots can be seen in place; nobody else checks."""
        return TransportCapabilities(name="shm", has_views=True, is_checked_by_owner=False)

    def write(self, transfer: Transfer) -> None:
        """Copy the pieces into the slots; see Transport.write."""
        self._copy(transfer, is_write=True)

    def read(self, transfer: Transfer) -> None:
        """Copy the slots into the pieces; see Transport.read.

        Raises:
            ChecksumMismatchError: a checksum was asked for, the slots carry the
                committed ones, and they differ.
        """
        self._copy(transfer, is_write=False)
        committed = transfer.slots.checksums
        if transfer.checksums is None or committed is None:
            return
        differs = differing(transfer.checksums, committed)
        if len(differs):
            slot = int(differs[0])
            raise ChecksumMismatchError(
                f"{len(differs)} of {len(committed)} slots do not have their committed checksum, "
                f"the first is slot {int(transfer.slot_indexes[slot])} of lease "
                f"{transfer.capability_id}: drop them and take another copy"
            )

    def views(self, slots: Slots, lengths: U64) -> list[memoryview]:
        """Return a read-only view of each slot, without a copy.

        lengths: (slots,) uint64. A view is good for as long as the lease is held;
        whoever keeps it longer reads another owner's bytes, or old ones. The bytes
        are not checked.

        Raises:
            StaleGenerationError: a slot has another owner already.
            PeerUnavailableError: a segment is not mapped.
        """
        snapshot = self._open_snapshot()
        _slot_addresses(snapshot, slots, lengths)
        _check_generations(snapshot, slots, "before it was viewed")
        offsets = slots.granules.astype(np.int64) * GRANULE_BYTES
        places = zip(slots.segments.tolist(), offsets.tolist(), lengths.tolist(), strict=True)
        memory = snapshot.views
        return [memory[number][start : start + size] for number, start, size in places]

    def close(self) -> None:
        """Refuse what follows; the mapping belongs to its maker. Idempotent."""
        self._is_closed = True

    def _copy(self, transfer: Transfer, *, is_write: bool) -> None:
        check_transfer(transfer)
        if not len(transfer.slots):
            return
        snapshot, slots, pieces = self._open_snapshot(), transfer.slots, transfer.pieces
        outcome, slot = native.copy_slots(
            slots.segments,
            slots.granules,
            slots.generations,
            snapshot.bases,
            snapshot.sizes,
            snapshot.generation_bases,
            pieces.addresses,
            pieces.lengths,
            pieces.counts,
            transfer.checksums,
            is_write,
        )
        if outcome:
            raise _failure(SlotOutcome(outcome), snapshot, slots, slot)

    def _open_snapshot(self) -> MapSnapshot:
        if self._is_closed:
            raise PeerUnavailableError("the shm transport was closed")
        return self._mapping.snapshot()


def _snapshot_of(segments: dict[int, MappedSegment]) -> MapSnapshot:
    numbers_count = max(segments, default=-1) + 1
    bases = np.zeros(numbers_count, dtype=np.uint64)
    generation_bases = np.zeros(numbers_count, dtype=np.uint64)
    sizes = np.zeros(numbers_count, dtype=np.uint64)
    for number, segment in segments.items():
        bases[number] = segment.address
        generation_bases[number] = segment.generations_address
        sizes[number] = segment.size_bytes
    return MapSnapshot(
        bases,
        generation_bases,
        sizes,
        segments,
        {number: segment.memory.view.toreadonly() for number, segment in segments.items()},
        {number: segment.generations for number, segment in segments.items()},
    )


def _failure(outcome: SlotOutcome, snapshot: MapSnapshot, slots: Slots, slot: int) -> KvError:
    """Return the error for a copy that was refused, or has failed, because of a slot."""
    where = f"segment {int(slots.segments[slot])} at {int(slots.granules[slot]) * GRANULE_BYTES}"
    if outcome is SlotOutcome.UNMAPPED:
        missing = snapshot.missing(slots.segments)[:8]
        return PeerUnavailableError(f"segments {missing} are not mapped here: map them first")
    if outcome is SlotOutcome.OUTSIDE:
        return InvalidFieldError(f"slot {slot} reaches past the end of its segment, {where}")
    when = "before" if outcome is SlotOutcome.STALE else "during"
    return StaleGenerationError(
        f"slot {slot} ({where}, generation {int(slots.generations[slot])}) had another owner {when} "
        "the copy; discard what was copied"
    )


def _slot_addresses(snapshot: MapSnapshot, slots: Slots, lengths: U64) -> U64:
    """Return (slots,) uint64: the address of each slot, checked against its segment."""
    segments = slots.segments
    if not len(segments):
        return np.empty(0, dtype=np.uint64)
    if int(segments.max()) >= len(snapshot.bases) or not snapshot.bases[segments].all():
        raise PeerUnavailableError(
            f"segments {snapshot.missing(segments)[:8]} are not mapped here: map them first"
        )
    offsets = slots.granules.astype(np.uint64) * np.uint64(GRANULE_BYTES)
    sizes = snapshot.sizes[segments]
    # Two comparisons, since the sum of a wrong offset and a wrong length may wrap.
    if ((lengths > sizes) | (offsets > sizes - lengths)).any():
        raise InvalidFieldError("a slot reaches past the end of its segment")
    addresses: U64 = snapshot.bases[segments] + offsets
    return addresses


def _check_generations(snapshot: MapSnapshot, slots: Slots, when: str) -> None:
    """Hold the slots' generations to those of the owner's pages.

    On processors with weak ordering the look after a copy is ordered after it by
    the fence at the end of `native.copy_blocks`.
    """
    segments = slots.segments
    if not len(segments):
        return
    first = int(segments[0])
    if (segments == segments[0]).all():
        now = snapshot.generations[first][slots.granules]
    else:
        now = np.empty(len(segments), dtype=np.uint64)
        for number in np.unique(segments).tolist():
            chosen = segments == number
            now[chosen] = snapshot.generations[number][slots.granules[chosen]]
    stale = np.flatnonzero(now != slots.generations)
    if len(stale):
        slot = int(stale[0])
        raise StaleGenerationError(
            f"{len(stale)} of {len(segments)} slots had another owner {when}, the first in segment "
            f"{int(segments[slot])} at {int(slots.granules[slot]) * GRANULE_BYTES}: generation "
            f"{int(now[slot])}, not {int(slots.generations[slot])}; discard what was copied"
        )
