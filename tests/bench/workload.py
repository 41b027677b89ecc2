"""Batches of blocks put and got one after the other, as field/peers.md has them."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np

from kvclient.sync import Namespace
from kvservice.core.slots import U8
from tests.bench.daemons import KIB, MIB
from tests.bench.harness import Contender

KEY_BYTES = 32
SMALL_BLOCK_BYTES = 64 * KIB
LARGE_BLOCK_BYTES = 2 * MIB
BATCH_BLOCKS = 64


class WrongBytesError(Exception):
    """A get brought other bytes than were put: no figure of such a run means anything."""


class Workload:
    """Puts and gets over private memory that several batches take in turn.

    private: whole batches; its bytes are put, and overwritten by what is got.
    clock: what the cost of a contender is counted in, seconds.
    """

    def __init__(
        self,
        private: U8,
        *,
        block_bytes: int,
        blocks_count: int = BATCH_BLOCKS,
        clock: Callable[[], float] = time.perf_counter,
        seed: int = 1,
    ) -> None:
        self._private = private
        self._blocks_count = blocks_count
        self.batch_bytes = block_bytes * blocks_count
        self._places_count = len(private) // self.batch_bytes
        self._clock = clock
        self._random = np.random.default_rng(seed)
        self._stored: list[bytes] = []
        self._turn = 0

    def putting(self, namespace: Namespace, batches_count: int) -> Contender:
        """Return a contender that puts so many batches of keys that are new."""

        def contender() -> float:
            keys = [self._fresh_keys() for _ in range(batches_count)]
            parts = [self._next_part() for _ in range(batches_count)]
            started = self._clock()
            for some_keys, part in zip(keys, parts, strict=True):
                namespace.put(some_keys, part)
            return self._clock() - started

        return contender

    def getting(self, namespace: Namespace, batches_count: int) -> Contender:
        """Return a contender that gets so many of the stored batches, in turn."""

        def contender() -> float:
            keys = [self._next_stored() for _ in range(batches_count)]
            parts = [self._next_part() for _ in range(batches_count)]
            hits_count = 0
            started = self._clock()
            for some_keys, part in zip(keys, parts, strict=True):
                hits_count += namespace.get(some_keys, part).prefix_count
            cost = self._clock() - started
            if hits_count != batches_count * self._blocks_count:
                raise WrongBytesError(
                    f"{hits_count} blocks hit of {batches_count * self._blocks_count} stored"
                )
            return cost

        return contender

    def store(self, namespace: Namespace, batches_count: int) -> None:
        """Put batches that `getting` finds, and check that the bytes come back."""
        self._stored = []
        for _ in range(batches_count):
            keys = self._fresh_keys()
            self._stored.append(keys)
            namespace.put(keys, self._next_part())
        part = self._next_part()
        expected = part.copy()
        keys = self._fresh_keys()
        namespace.put(keys, part)
        part[:] = 0
        namespace.get(keys, part)
        if not np.array_equal(part, expected):
            raise WrongBytesError("a batch came back with other bytes than it was put with")

    def _next_part(self) -> U8:
        self._turn = (self._turn + 1) % self._places_count
        return self._private[self._turn * self.batch_bytes : (self._turn + 1) * self.batch_bytes]

    def _next_stored(self) -> bytes:
        keys = self._stored.pop(0)
        self._stored.append(keys)
        return keys

    def _fresh_keys(self) -> bytes:
        return self._random.bytes(self._blocks_count * KEY_BYTES)
