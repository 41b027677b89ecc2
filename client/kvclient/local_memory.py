"""The memory of a daemon on this host, as one session has it mapped."""

from __future__ import annotations

import os
from collections.abc import Sequence

import numpy as np

from kvclient.directory import Directory
from kvclient.touch_ahead import Touchable, TouchAhead
from kvclient.touches import Touches
from kvproto.kv.v1 import local_lane_pb2
from kvservice import native
from kvservice.core.errors import MalformedError, StaleGenerationError
from kvservice.core.slots import GRANULE_BYTES, I64, U32, U64, Slots
from kvservice.transports.segments import MappedSegment, MappedTable
from kvservice.transports.shm import SegmentMap, ShmTransport

SEGMENTS_PER_CALL = 64
"""Bound of `MapSegmentsRequest.segments`."""


class LocalMemory:
    """Segments, directory and transport of one session on the local lane. Thread-safe.

    What is mapped stays mapped until `close`; the mapping itself ends when the last
    copy or view that uses it is gone.
    """

    def __init__(self, touch_ahead: TouchAhead) -> None:
        self.segments = SegmentMap()
        self.transport = ShmTransport(self.segments)
        self.directory: Directory | None = None
        self._touches = Touches()
        self._touch_ahead = touch_ahead

    def missing(self, slots: Slots) -> list[int]:
        """Return the segments of these slots that are not mapped yet."""
        mapped, segments = self.segments.snapshot(), slots.segments
        first = int(segments[0])
        # Nearly always one segment that is mapped, since a batch is allocated together.
        if first in mapped.segments and (len(segments) == 1 or (segments == first).all()):
            return []
        return mapped.missing(segments)

    def missing_numbers(self, numbers: Sequence[int]) -> list[int]:
        """Return those of the segments that are not mapped yet."""
        mapped = self.segments.snapshot().segments
        return [number for number in numbers if number not in mapped]

    def install(self, answer: local_lane_pb2.MapSegmentsResponse, descriptors: Sequence[int]) -> list[int]:
        """Map what a MapSegments call brought; takes the descriptors over.

        Returns the segments that the tenant has and this process has not mapped.

        Raises:
            MalformedError: descriptors and answer do not fit.
            ArenaFullError: this process can map no more.
        """
        remaining = list(descriptors)
        fresh: list[Touchable] = []
        try:
            expected_count = 2 * len(answer.segments) + (1 if answer.directory_rows_count else 0)
            if expected_count != len(remaining):
                raise MalformedError(
                    f"MapSegments announced {expected_count} descriptors and brought {len(remaining)}"
                )
            places = zip(answer.segments, answer.sizes_bytes, answer.generations_bytes, strict=True)
            for number, size_bytes, generations_bytes in places:
                memory, generations = remaining.pop(0), remaining.pop(0)
                segment = MappedSegment.map(memory, size_bytes, generations, generations_bytes)
                self.segments.add(number, segment)
                fresh.append(segment)
            if answer.directory_rows_count:
                table = MappedTable.map(remaining.pop(0), answer.directory_rows_count)
                self._take_directory(table)
                fresh.insert(0, table)
        finally:
            for descriptor in remaining:
                os.close(descriptor)
        self._touch_ahead.submit(fresh)
        self._forget_all_but(answer.lent_segments)
        return self.missing_numbers(answer.lent_segments)

    def _forget_all_but(self, lent: Sequence[int]) -> None:
        """Let go of segments that the tenant has no more; their numbers never come back."""
        gone = set(self.segments.snapshot().segments).difference(lent)
        for number in gone if lent else ():
            self.segments.remove(number)

    def _take_directory(self, table: MappedTable) -> None:
        replaced, self.directory = self.directory, Directory(table, self.segments)
        if replaced is not None:
            replaced.close()
        # Rows of the old table mean nothing in the new one.
        self._touches.drain()

    def can_read_directory(self) -> bool:
        """Whether directory reads are right on this processor, and there is a directory."""
        return native.DIRECTORY_IS_SAFE and self.directory is not None

    def touched(self, positions: I64) -> None:
        """Remember rows that were read, (keys,) int64; the array is given away."""
        self._touches.add(positions)

    def drain_touches(self) -> tuple[list[int], list[int]]:
        """Return segments and granules of the blocks read since the last call."""
        directory = self.directory
        numbers: list[int] = []
        granules: list[int] = []
        for positions in self._touches.drain():
            if directory is not None:
                places = directory.locations(positions)
                numbers += places[0].tolist()
                granules += places[1].tolist()
        return numbers, granules

    def views(self, slots: Slots, lengths: U64) -> list[memoryview]:
        """Return a read-only view of each slot; see `ShmTransport.views`."""
        return self.transport.views(slots, lengths)

    def check_generations(self, slots: Slots) -> None:
        """Raise StaleGenerationError where a slot has another owner than when the capability was given."""
        pages = self.segments.snapshot().generations
        first = int(slots.segments[0])
        if (slots.segments == first).all():
            is_fresh = bool((pages[first][slots.granules] == slots.generations).all())
        else:
            is_fresh = all(
                bool((pages[number][slots.granules[chosen]] == slots.generations[chosen]).all())
                for number in np.unique(slots.segments).tolist()
                for chosen in [slots.segments == number]
            )
        if not is_fresh:
            raise StaleGenerationError("slots have another owner by now; nothing read from them may be used")

    def checksums(self, slots: Slots, lengths: U64) -> U32:
        """Return the CRC32C of each slot's bytes as they are, (slots,) uint32."""
        mapped = self.segments.snapshot()
        sums = np.empty(len(slots), np.uint32)
        addresses = mapped.bases[slots.segments] + slots.granules.astype(np.uint64) * np.uint64(GRANULE_BYTES)
        native.checksum_blocks(addresses, lengths, None, sums)
        return sums

    def close(self) -> None:
        """Let go of everything. Idempotent."""
        self.transport.close()
        if self.directory is not None:
            self.directory.close()
            self.directory = None
        self.segments.close()
