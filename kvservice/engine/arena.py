"""The daemon's memory: segments lent to tenants, and the tenants' directories."""

from __future__ import annotations

import logging
import threading

import numpy as np

from kvservice.core.row_layout import ROW_DTYPE
from kvservice.core.row_table import Rows
from kvservice.core.slots import GRANULE_BYTES, U32, U64
from kvservice.transports.segments import OwnedSegment, OwnedTable

_log = logging.getLogger(__name__)

JOIN_TIMEOUT_S = 5.0
"""Touching a step takes milliseconds; the thread looks at its stop flag after each."""


class Arena:
    """`segments_count` segments of `segment_bytes`, and a directory per tenant.

    Implements `core.books.ArenaMemory`. The memory stays mapped until `close`.
    """

    def __init__(self, *, segments_count: int, segment_bytes: int) -> None:
        self.segment_bytes = segment_bytes
        self._segments = [OwnedSegment.create(segment_bytes) for _ in range(segments_count)]
        self._bases: U64 = np.array([s.address for s in self._segments], dtype=np.uint64)
        self._directories: dict[str, OwnedTable] = {}
        self._retired: list[OwnedTable] = []
        self._stopping = threading.Event()
        self._toucher: threading.Thread | None = None

    def generations(self, segment: int) -> U64:
        """Return the page of generations of a segment, (granules,) uint64."""
        return self._segments[segment].generations

    def create_directory(self, tenant: str, capacity_rows: int) -> Rows:
        """Return zeroed rows for a tenant; its earlier directory is superseded.

        The old memory stays mapped here for as long as the caller copies from it,
        that is until the next growth; clients keep their own mappings of it.
        """
        table = OwnedTable.create(capacity_rows)
        old = self._directories.get(tenant)
        self._directories[tenant] = table
        if old is not None:
            old.supersede()
            self._retired.append(old)
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

    def scrub(self, segment: int) -> None:
        """Zero a segment before another tenant may see it."""
        self._segments[segment].scrub()

    def start_touching_ahead(self) -> None:
        """Make the pages of all segments resident, in the background."""
        self._toucher = threading.Thread(target=self._touch_all, name="kv-touch", daemon=True)
        self._toucher.start()

    def close(self) -> None:
        """Unmap everything. No transfer may be running."""
        self._stopping.set()
        if self._toucher is not None:
            self._toucher.join(JOIN_TIMEOUT_S)
        for segment in self._segments:
            segment.close()
        for table in (*self._directories.values(), *self._retired):
            table.close()

    def _touch_all(self) -> None:
        for segment in self._segments:
            if self._stopping.is_set():
                return
            segment.touch_ahead()
        _log.debug("arena touched", extra={"bytes": len(self._segments) * self.segment_bytes})
