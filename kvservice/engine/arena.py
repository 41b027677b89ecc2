"""The daemon's memory: segments lent to tenants, and the tenants' directories."""

from __future__ import annotations

import logging
import threading
from queue import SimpleQueue

import numpy as np

from kvservice.core.errors import KvError
from kvservice.core.row_layout import ROW_DTYPE
from kvservice.core.row_table import Rows
from kvservice.core.slots import GRANULE_BYTES, U32, U64
from kvservice.transports.segments import OwnedSegment, OwnedTable

_log = logging.getLogger(__name__)

JOIN_TIMEOUT_S = 5.0
"""Touching a step takes milliseconds; a whole segment less than a second."""


class Arena:
    """`segments_count` segments of `segment_bytes`, and a directory per tenant.

    Implements `core.books.ArenaMemory`. The memory stays mapped until `close`.
    """

    def __init__(self, *, segments_count: int, segment_bytes: int) -> None:
        self.segment_bytes = segment_bytes
        self._segments = {n: OwnedSegment.create(segment_bytes) for n in range(segments_count)}
        self._bases: U64 = np.zeros(segments_count, dtype=np.uint64)
        for number, segment in self._segments.items():
            self._bases[number] = segment.address
        self._directories: dict[str, OwnedTable] = {}
        self._retired: dict[str, OwnedTable] = {}
        self._untouched: SimpleQueue[OwnedSegment | None] = SimpleQueue()
        self._toucher: threading.Thread | None = None
        self._is_closing = False

    def generations(self, segment: int) -> U64:
        """Return the page of generations of a segment, (granules,) uint64."""
        return self._segments[segment].generations

    def create_directory(self, tenant: str, capacity_rows: int) -> Rows:
        """Return zeroed rows for a tenant; its earlier directory is superseded.

        The old memory stays mapped until the next growth, since the caller copies from
        it; clients keep their own mappings of it.
        """
        table = OwnedTable.create(capacity_rows)
        retired = self._retired.pop(tenant, None)
        if retired is not None:
            retired.close()
        old = self._directories.get(tenant)
        self._directories[tenant] = table
        if old is not None:
            old.supersede()
            self._retired[tenant] = old
        return table.rows.view(ROW_DTYPE).reshape(-1)

    def segment(self, number: int) -> OwnedSegment:
        """Return a segment."""
        return self._segments[number]

    def directory(self, tenant: str) -> OwnedTable:
        """Return the directory of a tenant that has one."""
        return self._directories[tenant]

    def addresses(self, segments: U32, granules: U32) -> U64:
        """(slots,) uint64: address of each slot in this process."""
        return self._bases[segments] + granules.astype(np.uint64) * np.uint64(GRANULE_BYTES)

    def create_segment(self) -> int:
        """Return the number of a fresh segment of zeros; numbers are never used again."""
        fresh = OwnedSegment.create(self.segment_bytes)
        number = len(self._bases)
        self._segments[number] = fresh
        self._bases = np.append(self._bases, np.uint64(fresh.address))
        return number

    def discard_segment(self, segment: int) -> None:
        """Give a segment's pages back to the machine; who has it mapped reads zeros."""
        self._segments.pop(segment).discard()
        self._bases[segment] = 0

    def start_touching_ahead(self) -> None:
        """Make the pages of all segments resident, in the background."""
        for segment in self._segments.values():
            self._untouched.put(segment)
        self._toucher = threading.Thread(target=self._touch, name="kv-touch", daemon=True)
        self._toucher.start()

    def touch_soon(self, segment: int) -> None:
        """Make the pages of a fresh segment resident, in the background."""
        if self._toucher is not None:
            self._untouched.put(self._segments[segment])

    def close(self) -> None:
        """Unmap everything. No transfer may be running."""
        self._is_closing = True
        if self._toucher is not None:
            self._untouched.put(None)
            self._toucher.join(JOIN_TIMEOUT_S)
        for segment in self._segments.values():
            segment.close()
        for table in (*self._directories.values(), *self._retired.values()):
            table.close()

    def _touch(self) -> None:
        while (segment := self._untouched.get()) is not None and not self._is_closing:
            try:
                segment.touch_ahead()
            except KvError as error:
                # Given up meanwhile, or no memory: the first writer pays, or is told.
                _log.warning("a segment was not touched ahead: %s", error)
