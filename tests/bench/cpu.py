"""CPU seconds: of client and daemon together per GB moved, and of a daemon with nothing to do."""

from __future__ import annotations

import time

from kvclient.sync import Namespace
from kvservice.core.slots import U8
from tests.bench import limits
from tests.bench.daemons import GIB, MIB, RunningDaemon, client, daemon, open_namespace
from tests.bench.harness import Bench, Contender, Figure, Goal, Relation, cheapest, cost_figure, mirrored
from tests.bench.workload import BATCH_BLOCKS, LARGE_BLOCK_BYTES, Workload

ARENA_BYTES = GIB
PRIVATE_BYTES = 128 * MIB
BATCHES_A_TURN = 8
"""A GiB there and one back: 0.4 s of CPU, so that the daemon's ticks of 10 ms are its rounding."""

STORED_BATCHES = 4
ROUNDS = 12

IDLE_S = 10.0
IDLE_QUICK_S = 4.0

COPY_GOAL = Goal(Relation.AT_MOST, 1.3)
IDLE_GOAL = Goal(Relation.BELOW, 0.01, on_ratio=False)

MEMCPY, STREAMING = "memcpy", "streaming copy"
SERVICE = "client and daemon"


def run(bench: Bench) -> None:
    """Measure the whole group."""
    private = limits.touched(PRIVATE_BYTES)
    with daemon(ARENA_BYTES) as running, client(running.lane) as connected:
        running.wait_until_settled()
        namespace = open_namespace(connected, LARGE_BLOCK_BYTES)
        _copies(bench, running, namespace, private)
        _idle(bench, running)


def _copies(bench: Bench, running: RunningDaemon, namespace: Namespace, private: U8) -> None:
    limit = limits.CopyLimit(
        private, size_bytes=ARENA_BYTES, block_bytes=LARGE_BLOCK_BYTES, blocks_count=BATCH_BLOCKS
    )
    workload = Workload(
        private, block_bytes=LARGE_BLOCK_BYTES, clock=lambda: time.process_time() + running.cpu_s()
    )
    put = workload.putting(namespace, BATCHES_A_TURN)
    get = workload.getting(namespace, BATCHES_A_TURN)

    def serve() -> float:
        cost = put()
        workload.store(namespace, STORED_BATCHES)
        return cost + get()

    def bare(threshold: int) -> Contender:
        def contender() -> float:
            started = time.process_time()
            for is_put in (True, False):
                limit.copy(BATCHES_A_TURN, threshold, is_put=is_put)
            return time.process_time() - started

        return contender

    contenders = {SERVICE: serve, MEMCPY: bare(limits.THROUGH_CACHE), STREAMING: bare(limits.STREAMING)}
    samples = mirrored(contenders, bench.rounds(ROUNDS))
    best = cheapest(samples, [MEMCPY, STREAMING])
    moved_gb = 2 * BATCHES_A_TURN * workload.batch_bytes / 1e9
    title = f"cpu of client and daemon, put and get of 64 x 2 MiB, of {best}"
    bench.add(cost_figure(title, samples, SERVICE, best, 1 / moved_gb, COPY_GOAL, "CPU s/GB"))


def _idle(bench: Bench, running: RunningDaemon) -> None:
    """Watch the daemon with one client that is attached and asks for nothing."""
    before_s, started = running.cpu_s(), time.monotonic()
    time.sleep(IDLE_QUICK_S if bench.is_quick else IDLE_S)
    share = (running.cpu_s() - before_s) / (time.monotonic() - started)
    bench.add(
        Figure(
            name="cpu of an idle daemon with one idle client",
            value=share,
            unit="cores",
            limit=1.0,
            ratios=[share],
            goal=IDLE_GOAL,
        )
    )
