"""One-sided reads and writes of another process's memory: UCX by CMA, beside the bare system call."""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator

import numpy as np

from kvclient import BlockPool, ClientSettings
from kvclient.sync import KvClient, Namespace
from kvservice.core.block_geometry import BlockGeometry
from kvservice.core.engine_memory import EngineSegment, MemoryKind, SegmentWay
from kvservice.core.plan import Planner
from kvservice.core.slots import U8, U32, U64
from kvservice.native import ucx
from kvservice.ports.one_sided import RemoteRead
from kvservice.transports.ucx import UcxEndpoint
from kvservice.transports.ucx.lane import WINDOW
from kvservice.transports.ucx.peer import Peer, deadline_after
from tests.bench import limits
from tests.bench.daemons import GIB, KIB, MIB, ROOT, daemon, open_namespace
from tests.bench.harness import (
    Bench,
    Contender,
    Figure,
    Goal,
    Relation,
    Samples,
    cost_figure,
    mirrored,
    speed_figure,
    timed,
)
from tests.bench.lender import LOOPBACK
from tests.bench.workload import BATCH_BLOCKS, LARGE_BLOCK_BYTES, SMALL_BLOCK_BYTES

ISSUE = "ucx"
LENT_BYTES = GIB
PRIVATE_BYTES = 128 * MIB
TURN_BYTES = {LARGE_BLOCK_BYTES: 128 * MIB, SMALL_BLOCK_BYTES: 16 * MIB}
ROUNDS = {LARGE_BLOCK_BYTES: 40, SMALL_BLOCK_BYTES: 100}
DEADLINE_S = 60.0

PIECE_BYTES = 4 * KIB
RUN_BLOCKS = 16
PIECES_COUNT = 4096
PIECE_ROUNDS = 60

PULLS_A_ROUND = 20
PULL_ROUNDS = 40

CMA_GOAL = Goal(Relation.AT_LEAST, 0.95)
COALESCED_GOAL = Goal(Relation.AT_LEAST, 1.5)
PULL_GOAL = Goal(Relation.BELOW, 8.0)
OVERHEAD_GOAL = Goal(Relation.BELOW, 0.3, on_ratio=False)


def run(bench: Bench) -> None:
    """Measure the whole group."""
    with daemon(64 * MIB) as running, _lender(running.lane) as lender:
        memory = limits.touched(PRIVATE_BYTES)
        for block_bytes in (LARGE_BLOCK_BYTES, SMALL_BLOCK_BYTES):
            _batches(bench, lender, memory, block_bytes)
        _coalesced(bench, lender, memory)
        _overhead(bench, lender, memory)
        _pulls(bench, lender, memory, running.lane)


class Lender:
    """The other process, and our ways to its memory: by UCX, and by the bare system call."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        said = self._hear()
        transport, address, key = said["way"]
        self.pid, self.address = process.pid, said["address"]
        way = SegmentWay(transport, bytes.fromhex(address), bytes.fromhex(key))
        self.segment = EngineSegment(self.address, LENT_BYTES, MemoryKind.HOST, (way,))
        self.endpoint = UcxEndpoint(LOOPBACK)
        self._worker = ucx.Worker({**ucx.CMA_SETTINGS, "NET_DEVICES": "lo"})
        self._peer = Peer(self._worker, way.address, deadline_after(DEADLINE_S))
        (self._attached,) = self._peer.attach(self.segment, way).chunks

    def offers(self, count: int) -> list[int]:
        """Return the numbers of so many fresh handoffs, of a block each."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{count}\n")
        self._process.stdin.flush()
        return list(self._hear())

    def bare(self, remote: U64, local: U64, lengths: U64, *, is_put: bool = False) -> None:
        """One call of the binding, with nothing of ours around it."""
        statuses = np.zeros(len(lengths), np.int32)
        outcome = self._worker.transfer(
            is_put=is_put,
            segments=[self._attached],
            segment_indexes=np.zeros(len(lengths), np.uint32),
            local=local,
            remote=remote,
            lengths=lengths,
            statuses=statuses,
            window=WINDOW,
            deadline_ns=deadline_after(DEADLINE_S),
            watched=self._peer.watched,
        )
        if outcome != ucx.Outcome.DONE:
            raise OSError(f"the transfer ended as {outcome}: {sorted(set(statuses.tolist()))}")

    def close(self) -> None:
        """Let go of its memory."""
        self._peer.close()
        self._worker.close()
        self.endpoint.close()

    def _hear(self) -> dict[str, object] | list[int]:
        assert self._process.stdout is not None
        return json.loads(self._process.stdout.readline())


@contextlib.contextmanager
def _lender(lane: str) -> Iterator[Lender]:
    command = [sys.executable, "-m", "tests.bench.lender", str(LENT_BYTES), str(SMALL_BLOCK_BYTES), lane]
    with subprocess.Popen(
        command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            lender = Lender(process)
            try:
                yield lender
            finally:
                lender.close()
        finally:
            process.kill()


class _SystemCall:
    """`process_vm_readv` and `writev` with lists made before."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        library = ctypes.CDLL(None, use_errno=True)
        self._calls = {False: library.process_vm_readv, True: library.process_vm_writev}
        for call in self._calls.values():
            call.restype = ctypes.c_ssize_t

    def prepared(self, remote: U64, local: U64, lengths: U64, *, is_put: bool) -> Callable[[], None]:
        """Return a call that moves all of it at once."""
        # An iovec is an address and a length: rows of two words.
        here = np.ascontiguousarray(np.stack([local, lengths], axis=1))
        there = np.ascontiguousarray(np.stack([remote, lengths], axis=1))
        size, count = int(lengths.sum()), ctypes.c_ulong(len(lengths))
        call, pid = self._calls[is_put], self._pid
        pointers = ctypes.c_void_p(here.ctypes.data), ctypes.c_void_p(there.ctypes.data)

        def move() -> None:
            if call(pid, pointers[0], count, pointers[1], count, ctypes.c_ulong(0)) != size:
                raise OSError(
                    f"the system call moved other than {size} bytes of {here.shape} and {there.shape}"
                )

        return move


class _Walk:
    """Batches through both memories in turn, so that no cache holds the next one."""

    def __init__(self, lender: Lender, memory: U8, block_bytes: int) -> None:
        self._base, self._memory = lender.address, memory
        self._batch_bytes = block_bytes * BATCH_BLOCKS
        self.lengths: U64 = np.full(BATCH_BLOCKS, block_bytes, np.uint64)
        self._offsets: U64 = np.arange(BATCH_BLOCKS, dtype=np.uint64) * np.uint64(block_bytes)
        self._turn = 0

    def next(self) -> tuple[U64, U64, U64]:
        """Return the remote and local addresses and the lengths of a batch."""
        turn, self._turn = self._turn, self._turn + 1
        remote = self._base + turn * self._batch_bytes % LENT_BYTES
        local = limits.address(self._memory) + turn * self._batch_bytes % len(self._memory)
        return self._offsets + np.uint64(remote), self._offsets + np.uint64(local), self.lengths


def _batches(bench: Bench, lender: Lender, memory: U8, block_bytes: int) -> None:
    count = TURN_BYTES[block_bytes] // (block_bytes * BATCH_BLOCKS)
    bare = _SystemCall(lender.pid)
    size = "2 MiB" if block_bytes == LARGE_BLOCK_BYTES else "64 KiB"
    for is_put in (False, True):
        walk = _Walk(lender, memory, block_bytes)

        def by_ucx(walk: _Walk = walk, is_put: bool = is_put) -> float:
            batches = [walk.next() for _ in range(count)]
            started = time.perf_counter()
            for batch in batches:
                lender.bare(*batch, is_put=is_put)
            return time.perf_counter() - started

        def by_call(walk: _Walk = walk, is_put: bool = is_put) -> float:
            moves = [bare.prepared(*walk.next(), is_put=is_put) for _ in range(count)]
            started = time.perf_counter()
            for move in moves:
                move()
            return time.perf_counter() - started

        contenders: dict[str, Contender] = {"ucx": by_ucx, "call": by_call}
        samples = mirrored(contenders, bench.rounds(ROUNDS[block_bytes]), warm_ups_count=2)
        name = "put" if is_put else "get"
        title = f"ucx (CMA) {name}, 64 x {size}, of process_vm_{'writev' if is_put else 'readv'}"
        gigabytes = TURN_BYTES[block_bytes] / 1e9
        _add(bench, speed_figure(title, samples, "ucx", "call", gigabytes, CMA_GOAL))


def _coalesced(bench: Bench, lender: Lender, memory: U8) -> None:
    """Read small pieces that lie in runs: planned as the runs that they are, and one by one."""
    source = _pool(LENT_BYTES // PIECE_BYTES)
    target = _pool(len(memory) // PIECE_BYTES)
    random = np.random.default_rng(3)
    runs = random.permutation(LENT_BYTES // PIECE_BYTES // RUN_BLOCKS)[: PIECES_COUNT // RUN_BLOCKS]
    blocks = (runs[:, None] * RUN_BLOCKS + np.arange(RUN_BLOCKS)).reshape(-1)
    places = np.arange(PIECES_COUNT)
    whole = Planner(source, target, max_operation_bytes=4 * MIB)
    single = Planner(source, target, max_operation_bytes=PIECE_BYTES)

    def act(planner: Planner) -> Callable[[], None]:
        def work() -> None:
            plan = planner.plan(blocks, places)
            lender.endpoint.read(
                _read_of(lender, memory, plan.source_offsets, plan.target_offsets, plan.lengths)
            )

        return work

    contenders = {"runs": timed(act(whole)), "singly": timed(act(single))}
    samples = mirrored(contenders, bench.rounds(PIECE_ROUNDS))
    title = f"ucx get, 4 KiB pieces in runs of {RUN_BLOCKS}, coalesced, of not"
    gigabytes = PIECES_COUNT * PIECE_BYTES / 1e9
    _add(bench, speed_figure(title, samples, "runs", "singly", gigabytes, COALESCED_GOAL))


def _overhead(bench: Bench, lender: Lender, memory: U8) -> None:
    """What the endpoint adds to the binding's own call, for each operation of a batch."""
    offsets = np.random.default_rng(4).permutation(LENT_BYTES // PIECE_BYTES)[:PIECES_COUNT]
    remote = offsets.astype(np.uint64) * np.uint64(PIECE_BYTES)
    local = np.arange(PIECES_COUNT, dtype=np.uint64) * np.uint64(PIECE_BYTES)
    lengths = np.full(PIECES_COUNT, PIECE_BYTES, np.uint64)
    read = _read_of(lender, memory, remote, local, lengths)
    there, here = remote + np.uint64(lender.address), local + np.uint64(limits.address(memory))
    contenders = {
        "endpoint": timed(lambda: lender.endpoint.read(read)),
        "binding": timed(lambda: lender.bare(there, here, lengths)),
    }
    samples = mirrored(contenders, bench.rounds(PIECE_ROUNDS))
    added = [whole - bare for whole, bare in zip(samples["endpoint"], samples["binding"], strict=True)]
    costs: Samples = {"added": added, "binding": samples["binding"]}
    scale = 1e6 / PIECES_COUNT
    title = "ucx, what the transport adds to an operation, of the operation"
    _add(bench, cost_figure(title, costs, "added", "binding", scale, OVERHEAD_GOAL, "us"))


def _pulls(bench: Bench, lender: Lender, memory: U8, lane: str) -> None:
    """One block from claim to completion, beside the bare operation."""
    pool = BlockPool.of([memory.reshape(-1, SMALL_BLOCK_BYTES)])
    settings = ClientSettings(lane, one_sided=LOOPBACK)
    with KvClient.connect(settings, endpoint=lender.endpoint) as client:
        namespace = open_namespace(client, SMALL_BLOCK_BYTES)
        turns = iter(range(1 << 30))

        def pull() -> float:
            return _pull_some(client, namespace, pool, lender.offers(PULLS_A_ROUND))

        def bare() -> float:
            lengths: U64 = np.full(1, SMALL_BLOCK_BYTES, np.uint64)
            cost = 0.0
            for _ in range(PULLS_A_ROUND):
                turn = next(turns)
                there = np.array([lender.address + turn * SMALL_BLOCK_BYTES % LENT_BYTES], np.uint64)
                here = np.array([limits.address(memory) + turn * SMALL_BLOCK_BYTES % len(memory)], np.uint64)
                started = time.perf_counter()
                lender.bare(there, here, lengths)
                cost += time.perf_counter() - started
            return cost

        samples = mirrored({"pull": pull, "bare": bare}, bench.rounds(PULL_ROUNDS))
    title = "direct pull of 64 KiB, claim to complete, of the bare operation"
    _add(bench, cost_figure(title, samples, "pull", "bare", 1e6 / PULLS_A_ROUND, PULL_GOAL, "us"))


def _pull_some(client: KvClient, namespace: Namespace, pool: BlockPool, handoffs: list[int]) -> float:
    started = time.perf_counter()
    for place, handoff_id in enumerate(handoffs):
        client.handoffs.receive(namespace, handoff_id, [pool], [place])
    return time.perf_counter() - started


def _pool(blocks_count: int) -> BlockGeometry:
    return BlockGeometry(
        segment_sizes_bytes=np.array([blocks_count * PIECE_BYTES], np.uint64),
        segments=np.zeros(1, np.uint32),
        offsets=np.zeros(1, np.uint64),
        strides=np.full(1, PIECE_BYTES, np.uint64),
        lengths=np.full(1, PIECE_BYTES, np.uint64),
        blocks_count=blocks_count,
    )


def _read_of(lender: Lender, memory: U8, offsets: U64, places: U64, lengths: U64) -> RemoteRead:
    indexes: U32 = np.zeros(len(lengths), np.uint32)
    addresses = places + np.uint64(limits.address(memory))
    return RemoteRead((lender.segment,), indexes, offsets, addresses, lengths, DEADLINE_S)


def _add(bench: Bench, figure: Figure) -> None:
    bench.add(dataclasses.replace(figure, issue=ISSUE))
