"""One block at a time, and leasing many without a copy: what a call costs beside its bytes."""

from __future__ import annotations

import ctypes
import statistics
import time
from collections.abc import Callable

import numpy as np

from kvclient.sync import KvClient, Namespace
from tests.bench import limits
from tests.bench.daemons import GIB, MIB, client, daemon, open_namespace
from tests.bench.harness import (
    Bench,
    Contender,
    Figure,
    Goal,
    Relation,
    cost_figure,
    mirrored,
    ratios,
)
from tests.bench.workload import KEY_BYTES, SMALL_BLOCK_BYTES

ARENA_BYTES = GIB
BLOCKS_COUNT = 8192
"""Half a GiB of blocks, walked through in random order: no cache holds the next one."""

TARGETS_BYTES = 64 * MIB
PUT_BLOCKS = 256
GETS_A_TURN = 200
LANE_GETS_A_TURN = 60
ROUNDS = 40

LEASED_BLOCKS = 256
LEASES_A_TURN = 40
LARGE_VIEW_BYTES = MIB

DIRECTORY_GOAL = Goal(Relation.AT_MOST, 2.0)
LANE_GOAL = Goal(Relation.AT_MOST, 4.0)
LEASE_GOAL = Goal(Relation.BELOW, 1.0, on_ratio=False)
SIZE_GOAL = Goal(Relation.WITHIN, 1.5)


def run(bench: Bench) -> None:
    """Measure the whole group."""
    with daemon(ARENA_BYTES) as running, client(running.lane) as connected, limits.echo_limit() as echo:
        namespace = open_namespace(connected, SMALL_BLOCK_BYTES)
        running.wait_until_settled()
        stored = _Stored(namespace, BLOCKS_COUNT, SMALL_BLOCK_BYTES)
        _single_gets(bench, connected, namespace, stored, echo)
    _leases(bench)


class _Stored:
    """Blocks in the arena: their keys, and where this process has them mapped."""

    def __init__(self, namespace: Namespace, blocks_count: int, block_bytes: int) -> None:
        random = np.random.default_rng(2)
        self.keys = [random.bytes(KEY_BYTES) for _ in range(blocks_count)]
        self.addresses: list[int] = []
        source = limits.touched(PUT_BLOCKS * block_bytes)
        for start in range(0, blocks_count, PUT_BLOCKS):
            some_keys = self.keys[start : start + PUT_BLOCKS]
            namespace.put(some_keys, source)
            with namespace.lease(some_keys) as lease:
                self.addresses += [limits.address(np.frombuffer(view, np.uint8)) for view in lease.views]


def _single_gets(
    bench: Bench, connected: KvClient, namespace: Namespace, stored: _Stored, echo: limits.EchoLimit
) -> None:
    targets = limits.touched(TARGETS_BYTES).reshape(-1, SMALL_BLOCK_BYTES)
    places = list(targets)
    addresses = [limits.address(place) for place in places]
    request = echo.request(64, 64)

    def copy(block: int, place: int) -> None:
        ctypes.memmove(addresses[place], stored.addresses[block], SMALL_BLOCK_BYTES)

    def get(block: int, place: int) -> None:
        namespace.get(stored.keys[block], places[place])

    def get_by_lane(block: int, place: int) -> None:
        namespace.get_located(stored.keys[block], places[place])

    def copy_and_echo(block: int, place: int) -> None:
        copy(block, place)
        echo.exchange(request, 64)

    walk = _Walk(len(stored.keys), len(places))
    rounds_count = bench.rounds(ROUNDS)
    for name, act, limit, turns_count, goal in (
        ("get of 64 KiB by the directory, of a bare copy", get, copy, GETS_A_TURN, DIRECTORY_GOAL),
        (
            "get of 64 KiB by the lane, of copy + echo",
            get_by_lane,
            copy_and_echo,
            LANE_GETS_A_TURN,
            LANE_GOAL,
        ),
    ):
        contenders = {"act": walk.median(act, turns_count), "limit": walk.median(limit, turns_count)}
        samples = mirrored(contenders, rounds_count)
        bench.add(cost_figure(f"single {name}", samples, "act", "limit", 1e6, goal, "us"))


class _Walk:
    """Goes through blocks and places in an order that no prefetcher knows."""

    def __init__(self, blocks_count: int, places_count: int) -> None:
        random = np.random.default_rng(3)
        self._blocks = random.permutation(blocks_count).tolist()
        self._places = random.permutation(places_count).tolist()
        self._turn = 0

    def median(self, act: Callable[[int, int], None], turns_count: int) -> Contender:
        """Return a contender whose cost is the median of so many single acts, in seconds."""

        def contender() -> float:
            costs_ns = []
            for _ in range(turns_count):
                block = self._blocks[self._turn % len(self._blocks)]
                place = self._places[self._turn % len(self._places)]
                self._turn += 1
                started_ns = time.perf_counter_ns()
                act(block, place)
                costs_ns.append(time.perf_counter_ns() - started_ns)
            return statistics.median(costs_ns) / 1e9

        return contender


def _leases(bench: Bench) -> None:
    """Lease, look and release, with nothing verified and nothing copied."""
    with daemon(ARENA_BYTES) as running, client(running.lane) as connected, limits.echo_limit() as echo:
        running.wait_until_settled()
        contenders: dict[str, Contender] = {}
        for name, block_bytes in (("small", SMALL_BLOCK_BYTES), ("large", LARGE_VIEW_BYTES)):
            namespace = open_namespace(connected, block_bytes)
            stored = _Stored(namespace, LEASED_BLOCKS, block_bytes)
            contenders[name] = _leasing(namespace, b"".join(stored.keys))
        # The same round trip with nothing at its end: keys there, slots back.
        request = echo.request(LEASED_BLOCKS * KEY_BYTES, LEASED_BLOCKS * 16)

        def exchange(_block: int, _place: int) -> None:
            echo.exchange(request, LEASED_BLOCKS * 16)

        contenders["echo"] = _Walk(1, 1).median(exchange, LEASES_A_TURN)
        samples = mirrored(contenders, bench.rounds(ROUNDS))
    for name, size in (("small", "64 KiB"), ("large", "1 MiB")):
        title = f"single lease and release of 256 views of {size}, of an echo"
        bench.add(cost_figure(title, samples, name, "echo", 1e3, LEASE_GOAL, "ms"))
    bench.add(
        Figure(
            name="single lease of 256 views, 1 MiB against 64 KiB",
            value=statistics.median(samples["large"]) * 1e3,
            unit="ms",
            limit=statistics.median(samples["small"]) * 1e3,
            ratios=ratios(samples, "large", "small"),
            goal=SIZE_GOAL,
        )
    )


def _leasing(namespace: Namespace, keys: bytes) -> Contender:
    def lease(_block: int, _place: int) -> None:
        with namespace.lease(keys) as leased:
            assert len(leased.views) == LEASED_BLOCKS

    return _Walk(1, 1).median(lease, LEASES_A_TURN)
