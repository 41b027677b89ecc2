"""The pools that this process lends: registered with its endpoint, until they are taken back."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass

from kvclient.one_sided import LazyOneSided
from kvclient.pool import BlockPool
from kvclient.results import LentPool
from kvservice.core.engine_memory import SegmentWay
from kvservice.core.errors import SegmentUnknownError
from kvservice.ports.one_sided import LentMemory


@dataclass(frozen=True, slots=True)
class Lent:
    """Pools, and the memory registered for them, segment after segment."""

    pools: tuple[BlockPool, ...]
    memory: tuple[LentMemory, ...]

    @property
    def ways(self) -> list[tuple[SegmentWay, ...]]:
        """The ways to each segment of each pool."""
        return [each.ways for each in self.memory]

    def close(self) -> None:
        """Lend it no more. Idempotent."""
        for each in self.memory:
            each.close()


class Lending:
    """Which layouts of the daemon are which pools of ours. Thread-safe."""

    def __init__(self, one_sided: LazyOneSided) -> None:
        self._one_sided = one_sided
        self._lock = threading.Lock()
        self._by_layout: dict[int, tuple[BlockPool, Lent]] = {}

    def lend(self, pools: Sequence[BlockPool]) -> Lent:
        """Register the memory of pools with the endpoint of this process. Raises NoWayError."""
        endpoint = self._one_sided.endpoint()
        memory: list[LentMemory] = []
        try:
            for pool in pools:
                sizes = pool.geometry.segment_sizes_bytes.tolist()
                for address, size_bytes in zip(pool.addresses.tolist(), sizes, strict=True):
                    memory.append(endpoint.lend(address, size_bytes, pool.kind))
        except BaseException:
            Lent((), tuple(memory)).close()
            raise
        return Lent(tuple(pools), tuple(memory))

    def keep(self, lent_pools: Sequence[LentPool], lent: Lent) -> None:
        """Remember what the daemon calls them."""
        with self._lock:
            for named, pool in zip(lent_pools, lent.pools, strict=True):
                self._by_layout[named.layout_id] = (pool, lent)

    def pools_of(self, lent_pools: Sequence[LentPool]) -> list[BlockPool]:
        """Return the pools. Raises SegmentUnknownError for one that another process lends."""
        with self._lock:
            found = [self._by_layout.get(named.layout_id) for named in lent_pools]
        for named, entry in zip(lent_pools, found, strict=True):
            if entry is None:
                raise SegmentUnknownError(
                    f"layout {named.layout_id} is not lent by this process, which so cannot sum its blocks: "
                    "give `checksums`"
                )
        return [entry[0] for entry in found if entry is not None]

    def drop(self, lent_pools: Sequence[LentPool]) -> None:
        """Lend pools no more; the memory of a registration goes with its last pool. Idempotent."""
        with self._lock:
            gone = [self._by_layout.pop(named.layout_id, None) for named in lent_pools]
            kept = {id(lent) for _, lent in self._by_layout.values()}
        for entry in gone:
            if entry is not None and id(entry[1]) not in kept:
                entry[1].close()

    def close(self) -> None:
        """Lend nothing any more. Idempotent."""
        with self._lock:
            all_lent = {id(lent): lent for _, lent in self._by_layout.values()}
            self._by_layout.clear()
        for lent in all_lent.values():
            lent.close()
