"""Shared memory: batches of 64 blocks against plain copies, and what checksums cost."""

from __future__ import annotations

import functools
import statistics

from kvclient.sync import Namespace
from tests.bench import limits
from tests.bench.daemons import GIB, MIB, client, daemon, open_namespace
from tests.bench.harness import (
    Bench,
    Contender,
    Goal,
    Relation,
    Samples,
    cheapest,
    cost_figure,
    mirrored,
    speed_figure,
    timed,
)
from tests.bench.workload import LARGE_BLOCK_BYTES, SMALL_BLOCK_BYTES, Workload

ARENA_BYTES = GIB
PRIVATE_BYTES = 128 * MIB
TURN_BYTES = {LARGE_BLOCK_BYTES: 128 * MIB, SMALL_BLOCK_BYTES: 16 * MIB}
"""Moved by one contender's turn: few milliseconds, so that many turns pass undisturbed on a busy machine."""

ROUNDS = {LARGE_BLOCK_BYTES: 60, SMALL_BLOCK_BYTES: 150}
FRESH_DAEMONS = 9
LATER_PUTS = 8

LARGE_GOAL = Goal(Relation.AT_LEAST, 0.90)
SMALL_GOAL = Goal(Relation.AT_LEAST, 0.75)
CHECKSUM_GOAL = Goal(Relation.AT_MOST, 1.10)
FIRST_PUT_GOAL = Goal(Relation.AT_LEAST, 0.80)

MEMCPY, STREAMING = "memcpy", "streaming copy"
SUMMED, BARE = "checksums on", "checksums off"


def run(bench: Bench) -> None:
    """Measure the whole group."""
    private = limits.touched(PRIVATE_BYTES)
    for block_bytes in (LARGE_BLOCK_BYTES, SMALL_BLOCK_BYTES):
        with (
            daemon(ARENA_BYTES) as running,
            client(running.lane) as summed,
            client(running.lane, is_checked=False) as bare,
        ):
            running.wait_until_settled()
            namespaces = {
                SUMMED: open_namespace(summed, block_bytes),
                BARE: open_namespace(bare, block_bytes),
            }
            workload = Workload(private, block_bytes=block_bytes)
            limit = limits.CopyLimit(
                private, size_bytes=ARENA_BYTES, block_bytes=block_bytes, blocks_count=64
            )
            _batches(bench, namespaces, workload, limit, block_bytes)
    _first_put(bench)


def _batches(
    bench: Bench,
    namespaces: dict[str, Namespace],
    workload: Workload,
    limit: limits.CopyLimit,
    block_bytes: int,
) -> None:
    count = TURN_BYTES[block_bytes] // workload.batch_bytes
    for direction in ("put", "get"):
        is_put = direction == "put"
        # A full arena is the usual state of a cache, so puts are measured with the evictions they cause.
        fill_count = (
            ARENA_BYTES // workload.batch_bytes if is_put else ARENA_BYTES // workload.batch_bytes // 2
        )
        workload.store(namespaces[SUMMED], fill_count)
        act = workload.putting if is_put else workload.getting
        contenders: dict[str, Contender] = {
            name: act(namespace, count) for name, namespace in namespaces.items()
        }
        for name, threshold in ((MEMCPY, limits.THROUGH_CACHE), (STREAMING, limits.STREAMING)):
            contenders[name] = timed(functools.partial(limit.copy, count, threshold, is_put=is_put))
        samples = mirrored(contenders, bench.rounds(ROUNDS[block_bytes]), warm_ups_count=2)
        _report(bench, samples, direction, block_bytes)


def _report(bench: Bench, samples: Samples, direction: str, block_bytes: int) -> None:
    is_large = block_bytes == LARGE_BLOCK_BYTES
    size = "2 MiB" if is_large else "64 KiB"
    limit = cheapest(samples, [MEMCPY, STREAMING]) if is_large else MEMCPY
    goal = LARGE_GOAL if is_large else SMALL_GOAL
    for name in (SUMMED, BARE):
        title = f"shm {direction}, 64 x {size}, {name}, of {limit}"
        bench.add(speed_figure(title, samples, name, limit, TURN_BYTES[block_bytes] / 1e9, goal))
    title = f"shm {direction}, 64 x {size}, cost of checksums"
    bench.add(
        cost_figure(title, samples, SUMMED, BARE, 1e12 / TURN_BYTES[block_bytes], CHECKSUM_GOAL, "us/MB")
    )


def _first_put(bench: Bench) -> None:
    """Compare the first put of a daemon's life with those into an arena that is in use.

    Right after the start the daemon is still touching its arena; a settled one is done
    with it and has never been written to.
    """
    private = limits.touched(PRIVATE_BYTES)
    for is_settled in (True, False):
        samples: Samples = {"first": [], "later": []}
        for _ in range(bench.rounds(FRESH_DAEMONS)):
            workload = Workload(private, block_bytes=LARGE_BLOCK_BYTES)
            with daemon(ARENA_BYTES) as running, client(running.lane) as connected:
                if is_settled:
                    running.wait_until_settled()
                namespace = open_namespace(connected, LARGE_BLOCK_BYTES)
                put = workload.putting(namespace, 1)
                samples["first"].append(put())
                workload.store(namespace, ARENA_BYTES // workload.batch_bytes)
                samples["later"].append(statistics.median(put() for _ in range(LATER_PUTS)))
        when = "settled daemon" if is_settled else "daemon that has just started"
        title = f"shm first put, {when}, of a later put"
        gigabytes = PRIVATE_BYTES / 1e9
        bench.add(speed_figure(title, samples, "first", "later", gigabytes, FIRST_PUT_GOAL))
