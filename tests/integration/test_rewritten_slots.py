"""Slots are evicted and rewritten while readers copy them: never a wrong block.

The arena holds half of the keys, one process rewrites it without end, and every block is filled with
words of its key alone, so that one word of another block would show.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time

import numpy as np
import pytest

from kvclient import BlockBuffers, LeaseExpiredError, StaleGenerationError
from tests.integration.daemon_process import (
    ROOT,
    content,
    keys,
    opened,
    plain_environment,
    tier,
)

READS_WANTED = 1_000_000
SECONDS_LIMIT = 100.0
BATCH_COUNT = 32
ARENA_BYTES = 1 << 20
KEYS_SHARE = 2
"""Twice as many keys as fit: every second one is there, and each slot is rewritten every few milliseconds."""
PIECE_BYTES = 8
"""Small pieces make a copy take long, so that it is often interrupted in the middle."""


@pytest.fixture
def rewriter(start_daemon, seed):
    """Return a daemon with a tiny arena that a process rewrites, for a size of blocks."""
    processes = []

    def start(block_bytes: int, keys_count: int):
        daemon = start_daemon(capacity=str(ARENA_BYTES), segment="64KiB")
        command = [sys.executable, str(ROOT / "tests/integration/rewriter_child.py"), daemon.lane]
        process = subprocess.Popen(
            [*command, str(block_bytes), str(keys_count), str(seed)],
            cwd=ROOT,
            env=plain_environment(),
            stdout=subprocess.PIPE,
            text=True,
        )
        processes.append(process)
        assert process.stdout is not None
        assert process.stdout.readline() == "rewriting\n"
        return daemon, process

    yield start
    for process in processes:
        process.kill()
        process.wait()
        process.stdout.close()


@contextlib.contextmanager
def preempted():
    """Share one processor with a process that never rests.

    A slot is rewritten some hundred microseconds after its eviction, longer than any copy takes. Only a
    reader that is put aside in the middle of a copy meets the rewrite, so here that happens all the time: a
    reader that leaves out its second look at the generation delivers wrong blocks within seconds.
    """
    before = os.sched_getaffinity(0)
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as burner:
        try:
            for pid in (0, burner.pid):
                os.sched_setaffinity(pid, {min(before)})
            yield
        finally:
            os.sched_setaffinity(0, before)
            burner.kill()


def wrong_count(into: np.ndarray, hits: np.ndarray, expected: np.ndarray) -> int:
    """Count the blocks that hold any word that is not of their key."""
    return int((into.view(np.uint64)[hits] != expected.view(np.uint64)[hits]).any(axis=1).sum())


def scattered(into: np.ndarray) -> BlockBuffers:
    """Return the rows of an array as blocks of many small pieces."""
    count, block_bytes = into.shape
    pieces = block_bytes // PIECE_BYTES
    addresses = into.ctypes.data + np.arange(count * pieces, dtype=np.uint64) * PIECE_BYTES
    lengths = np.full(count * pieces, PIECE_BYTES, np.uint64)
    return BlockBuffers.from_addresses(addresses, lengths, np.full(count, pieces, np.uint32), into)


@pytest.mark.slow
@pytest.mark.timeout(90)
@pytest.mark.parametrize(
    ("block_bytes", "verify", "is_scattered", "share"),
    [(4096, False, False, 0.4), (16384, False, True, 0.4), (16384, True, True, 0.2)],
    ids=["whole", "scattered", "scattered and verified"],
)
def test_a_directory_read_is_right_or_a_miss(rewriter, rng, capsys, block_bytes, verify, is_scattered, share):
    """Generation before, copy, generation after: it must hold without the checksum's help, and with it
    a block that changed under the copy is a miss and never reported as corrupt.
    """
    keys_count = KEYS_SHARE * ARENA_BYTES // block_bytes
    daemon, process = rewriter(block_bytes, keys_count)
    blocks = content(range(keys_count), block_bytes)
    into = np.zeros((BATCH_COUNT, block_bytes), np.uint8)
    target = scattered(into) if is_scattered else into
    reads = hits_count = wrong = 0
    wanted, end_s = int(READS_WANTED * share), time.monotonic() + SECONDS_LIMIT * share
    with opened(daemon.lane, block_bytes, verify=verify) as (client, namespace), preempted():
        while reads < wanted and time.monotonic() < end_s:
            numbers = rng.sample(range(keys_count), BATCH_COUNT)
            result = namespace.get(keys(numbers), target)
            hits = result.outcomes == 1
            wrong += wrong_count(into, hits, blocks[numbers])
            reads += BATCH_COUNT
            hits_count += int(hits.sum())
        evicted = tier(client).evicted_count
    with capsys.disabled():
        sys.stdout.write(f"\n{reads} reads, {hits_count} hits, {evicted} evictions, {wrong} wrong\n")
    assert wrong == 0
    assert process.poll() is None, "the rewriter ended"
    assert reads > wanted // 20
    assert hits_count > reads // 20
    assert evicted > 1000


@pytest.mark.slow
@pytest.mark.timeout(90)
def test_leased_bytes_stand_still(rewriter, rng, capsys):
    """What is leased is never rewritten, in views and in copies alike."""
    block_bytes = 4096
    keys_count = KEYS_SHARE * ARENA_BYTES // block_bytes
    daemon, process = rewriter(block_bytes, keys_count)
    blocks = content(range(keys_count), block_bytes)
    into = np.zeros((8, block_bytes), np.uint8)
    reads = wrong = refused = 0
    end_s = time.monotonic() + 8.0
    with opened(daemon.lane, block_bytes, verify=False) as (client, namespace):
        while reads < READS_WANTED // 10 and time.monotonic() < end_s:
            numbers = rng.sample(range(keys_count), 8)
            try:
                with namespace.lease(keys(numbers)) as view:
                    for index, shown in enumerate(view.views):
                        wrong += bytes(shown) != blocks[numbers[index]].tobytes()
                    reads += view.prefix_count
                lease = namespace.acquire(keys(numbers))
                if lease is not None:
                    namespace.read(lease, into[: lease.keys_count])
                    wrong += not np.array_equal(into[: lease.keys_count], blocks[numbers[: lease.keys_count]])
                    reads += lease.keys_count
                    client.release([lease])
            except (LeaseExpiredError, StaleGenerationError):
                refused += 1
        evicted = tier(client).evicted_count
    with capsys.disabled():
        sys.stdout.write(f"\n{reads} leased reads, {evicted} evictions, {refused} refused, {wrong} wrong\n")
    assert wrong == 0
    assert refused == 0
    assert process.poll() is None, "the rewriter ended"
    assert reads > 1000
