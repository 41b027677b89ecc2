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


@dataclass(frozen=True, slots=True, eq=False)
class _LentOne:
    """A pool, and what its segments are registered as, one after the other."""

    pool: BlockPool
    memory: tuple[LentMemory, ...]

    def close(self) -> None:
        """Lend it no more. Idempotent."""
        for each in self.memory:
            each.close()


@dataclass(frozen=True, slots=True)
class Lent:
    """Pools that were registered together."""

    pools: tuple[_LentOne, ...]

    @property
    def ways(self) -> list[tuple[SegmentWay, ...]]:
        """The ways to each segment of each pool."""
        return [each.ways for one in self.pools for each in one.memory]

    def close(self) -> None:
        """Lend them no more. Idempotent."""
        for one in self.pools:
            one.close()


class Lending:
    """Which layouts of the daemon are which pools of ours. Thread-safe."""

    def __init__(self, one_sided: LazyOneSided) -> None:
        self._one_sided = one_sided
        self._lock = threading.Lock()
        self._by_layout: dict[int, _LentOne] = {}

    def lend(self, pools: Sequence[BlockPool]) -> Lent:
        """Register the memory of pools with the endpoint of this process. Raises NoWayError."""
        endpoint = self._one_sided.endpoint()
        lent: list[_LentOne] = []
        memory: list[LentMemory] = []
        try:
            for pool in pools:
                memory = []
                sizes = pool.geometry.segment_sizes_bytes.tolist()
                for address, size_bytes in zip(pool.addresses.tolist(), sizes, strict=True):
                    memory.append(endpoint.lend(address, size_bytes, pool.kind))
                lent.append(_LentOne(pool, tuple(memory)))
        except BaseException:
            for each in memory:
                each.close()
            Lent(tuple(lent)).close()
            raise
        return Lent(tuple(lent))

    def keep(self, lent_pools: Sequence[LentPool], lent: Lent) -> None:
        """Remember what the daemon calls them."""
        with self._lock:
            for named, one in zip(lent_pools, lent.pools, strict=True):
                self._by_layout[named.layout_id] = one

    def pools_of(self, lent_pools: Sequence[LentPool]) -> list[BlockPool]:
        """Return the pools. Raises SegmentUnknownError for one that another process lends."""
        with self._lock:
            found = [self._by_layout.get(named.layout_id) for named in lent_pools]
        for named, one in zip(lent_pools, found, strict=True):
            if one is None:
                raise SegmentUnknownError(
                    f"layout {named.layout_id} is not lent by this process, which so cannot sum its blocks: "
                    "give `checksums`"
                )
        return [one.pool for one in found if one is not None]

    def drop(self, lent_pools: Sequence[LentPool]) -> None:
        """Lend pools no more. Idempotent."""
        with self._lock:
            gone = [self._by_layout.pop(named.layout_id, None) for named in lent_pools]
        for one in gone:
            if one is not None:
                one.close()

    def close(self) -> None:
        """Lend nothing any more. Idempotent."""
        with self._lock:
            gone = list(self._by_layout.values())
            self._by_layout.clear()
        for one in gone:
            one.close()
