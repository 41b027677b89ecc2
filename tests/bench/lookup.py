"""Lookups of 4,096 keys at once, and what an indexed block costs in memory."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from kvclient.sync import Namespace
from tests.bench import limits
from tests.bench.daemons import GIB, MIB, RunningDaemon, client, daemon, open_namespace
from tests.bench.harness import Bench, Contender, Figure, Goal, Relation, mirrored, speed_figure, timed
from tests.bench.workload import KEY_BYTES

ARENA_BYTES = GIB
SEGMENT_BYTES = 64 * MIB
BLOCK_BYTES = 512
BATCH_KEYS = 4096
BATCHES_COUNT = 32
"""Different batches asked for in turn, so that no cache holds the rows of the next."""

ROUNDS = 40
ROW_BYTES = 64


@dataclass(frozen=True, slots=True)
class _Size:
    """An index of so many blocks, and the keys per second due through each way."""

    name: str
    blocks_count: int
    local_goal: float
    lane_goal: float


SIZES = (
    _Size("10 thousand", 10_000, 8e6, 4e6),
    _Size("1 million", 1_000_000, 4e6, 2e6),
)


def run(bench: Bench) -> None:
    """Measure the whole group."""
    for size in SIZES:
        with (
            daemon(ARENA_BYTES, segment_bytes=SEGMENT_BYTES) as running,
            client(running.lane) as connected,
            limits.echo_limit() as echo,
        ):
            namespace = open_namespace(connected, BLOCK_BYTES)
            running.wait_until_settled()
            keys = _fill(bench, running, namespace, size)
            _lookups(bench, namespace, keys, echo, size)


def _fill(bench: Bench, running: RunningDaemon, namespace: Namespace, size: _Size) -> list[bytes]:
    """Put blocks, state what indexing them cost, and return batches of their keys in random order."""
    random = np.random.default_rng(4)
    keys = np.frombuffer(random.bytes(size.blocks_count * KEY_BYTES), np.uint8).reshape(-1, KEY_BYTES)
    source = limits.touched(BATCH_KEYS * BLOCK_BYTES)
    # The first block of a tenant brings its tables and a segment, which belong to no block.
    namespace.put(random.bytes(KEY_BYTES), source[:BLOCK_BYTES])
    running.wait_until_settled()
    before_bytes = running.resident_bytes()
    for start in range(0, size.blocks_count, BATCH_KEYS):
        some_keys = keys[start : start + BATCH_KEYS]
        namespace.put(some_keys, source[: len(some_keys) * BLOCK_BYTES])
    grown_bytes = running.resident_bytes() - before_bytes
    per_block = grown_bytes / size.blocks_count
    bench.add(
        Figure(
            name=f"lookup memory per indexed block, {size.name} blocks",
            value=per_block,
            unit="bytes",
            limit=ROW_BYTES,
            ratios=[per_block / ROW_BYTES],
            goal=None,
        )
    )
    # Parts of permutations: a batch may not hold a key twice.
    chosen = [random.permutation(size.blocks_count)[:BATCH_KEYS] for _ in range(BATCHES_COUNT)]
    return [keys[indexes].tobytes() for indexes in chosen]


def _lookups(
    bench: Bench, namespace: Namespace, batches: list[bytes], echo: limits.EchoLimit, size: _Size
) -> None:
    rows = limits.GatherLimit(2 * size.blocks_count)
    places = [rows.places(BATCH_KEYS, seed) for seed in range(BATCHES_COUNT)]
    request = echo.request(BATCH_KEYS * KEY_BYTES, BATCH_KEYS)
    requests = [request] * BATCHES_COUNT
    contenders: dict[str, Contender] = {
        "local": _each(batches, functools.partial(_look, namespace.lookup_local)),
        "lane": _each(batches, functools.partial(_look, namespace.lookup)),
        "gather": _each(places, rows.gather),
        "echo": _each(requests, lambda sent: echo.exchange(sent, BATCH_KEYS)),
    }
    samples = mirrored(contenders, bench.rounds(ROUNDS))
    keys_count = BATCH_KEYS * BATCHES_COUNT / 1e6
    for way, limit, goal in (("local", "gather", size.local_goal), ("lane", "echo", size.lane_goal)):
        through = "directory" if way == "local" else "lane"
        title = f"lookup of 4,096 keys by the {through}, {size.name} blocks, of {limit}"
        due = Goal(Relation.AT_LEAST, goal / 1e6, on_ratio=False)
        bench.add(speed_figure(title, samples, way, limit, keys_count, due, unit="M keys/s"))


def _each(
    arguments: list[bytes] | list[np.typing.NDArray[np.int64]], act: Callable[..., object]
) -> Contender:
    """Return a contender that acts on each of the arguments once."""

    def work() -> None:
        for argument in arguments:
            act(argument)

    return timed(work)


def _look(call: Callable[[bytes], object], keys: bytes) -> None:
    answer = call(keys)
    assert answer.prefix_count == BATCH_KEYS
