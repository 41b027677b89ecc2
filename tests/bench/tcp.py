"""The tcp data plane over loopback against a plain pipelined transfer."""

from __future__ import annotations

import functools

from tests.bench import limits
from tests.bench.daemons import GIB, client, daemon, open_namespace
from tests.bench.harness import (
    Bench,
    Contender,
    Goal,
    Relation,
    Samples,
    cost_figure,
    mirrored,
    speed_figure,
    timed,
)
from tests.bench.workload import BATCH_BLOCKS, LARGE_BLOCK_BYTES, Workload

ARENA_BYTES = 2 * GIB
STORED_BATCHES = 4
"""A quarter of the arena, read in every round: the puts between evict only one another."""

PRIVATE_BYTES = BATCH_BLOCKS * LARGE_BLOCK_BYTES
ROUNDS = 20

SPEED_GOAL = Goal(Relation.AT_LEAST, 0.90)
SYMMETRY_GOAL = Goal(Relation.AT_MOST, 1.3)
CHECKSUM_GOAL = Goal(Relation.AT_MOST, 1.25)


def run(bench: Bench) -> None:
    """Measure the whole group."""
    private = limits.touched(PRIVATE_BYTES)
    plain = limits.touched(PRIVATE_BYTES)
    workload = Workload(private, block_bytes=LARGE_BLOCK_BYTES)
    with (
        daemon(ARENA_BYTES, has_grpc=True) as running,
        client(running.grpc) as summed,
        client(running.grpc, is_checked=False) as bare,
        limits.stream_limit(GIB, LARGE_BLOCK_BYTES) as stream,
    ):
        running.wait_until_settled()
        namespaces = {
            name: open_namespace(one, LARGE_BLOCK_BYTES) for name, one in (("on", summed), ("off", bare))
        }
        workload.store(namespaces["on"], STORED_BATCHES)
        contenders: dict[str, Contender] = {}
        for name, namespace in namespaces.items():
            contenders[f"put {name}"] = workload.putting(namespace, 1)
            contenders[f"get {name}"] = workload.getting(namespace, 1)
        contenders["put limit"] = timed(functools.partial(stream.put, plain))
        contenders["get limit"] = timed(functools.partial(stream.get, plain))
        samples = mirrored(contenders, bench.rounds(ROUNDS))
    _report(bench, samples)


def _report(bench: Bench, samples: Samples) -> None:
    per_megabyte = 1e12 / PRIVATE_BYTES
    for direction in ("put", "get"):
        limit = f"{direction} limit"
        for way, goal in (("off", SPEED_GOAL), ("on", None)):
            title = f"tcp {direction}, 64 x 2 MiB, checksums {way}, of a plain transfer"
            bench.add(speed_figure(title, samples, f"{direction} {way}", limit, PRIVATE_BYTES / 1e9, goal))
        title = f"tcp {direction}, 64 x 2 MiB, cost of checksums"
        on, off = f"{direction} on", f"{direction} off"
        bench.add(cost_figure(title, samples, on, off, per_megabyte, CHECKSUM_GOAL, "us/MB"))
    title = "tcp get against put, 64 x 2 MiB, checksums off"
    bench.add(cost_figure(title, samples, "get off", "put off", per_megabyte, SYMMETRY_GOAL, "us/MB"))
