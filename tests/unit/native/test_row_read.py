import ctypes
import os
import threading
import time

import google_crc32c
import numpy as np
import pytest

from kvservice import native
from kvservice.core.row_layout import ROW_DTYPE, ReadOutcome
from kvservice.core.slots import GRANULE_BYTES

SPACE = 4
CAPACITY = 64
NEVER = 2**63


class Store:
    """Blocks in one segment with its generation words and directory, and a reader's targets."""

    def __init__(self, operations, *, blocks=8, length=3000, pieces=1):
        rng = np.random.default_rng(7)
        self.operations = operations
        self.blocks, self.length, self.pieces = blocks, length, pieces
        self.stride = -(-length // GRANULE_BYTES)
        self.segment = rng.integers(0, 256, (blocks + 1) * self.stride * GRANULE_BYTES, dtype=np.uint8)
        self.generations = np.full((blocks + 1) * self.stride, 11, dtype=np.uint64)
        self.table = np.zeros(CAPACITY, dtype=ROW_DTYPE)
        self.keys = [i.to_bytes(32, "big") for i in range(blocks)]
        self.granules = np.arange(1, blocks + 1, dtype=np.uint32) * np.uint32(self.stride)
        self.segment_bases = np.array([0, self.segment.ctypes.data], dtype=np.uint64)
        self.generation_bases = np.array([0, self.generations.ctypes.data], dtype=np.uint64)
        self.target = np.zeros(blocks * length, dtype=np.uint8)
        operations.insert_rows(
            self.table,
            CAPACITY,
            b"".join(self.keys),
            SPACE,
            np.ones(blocks, dtype=np.uint32),
            self.granules,
            length,
            np.array([google_crc32c.value(self.content(i)) for i in range(blocks)], dtype=np.uint32),
            np.full(blocks, 11, dtype=np.uint64),
        )

    def content(self, block):
        """Give a block's bytes as they are stored."""
        start = int(self.granules[block]) * GRANULE_BYTES
        return self.segment[start : start + self.length].tobytes()

    def delivered(self, block):
        """Give what lies in a block's target."""
        return self.target[block * self.length : (block + 1) * self.length].tobytes()

    def read(self, keys=None, *, verify=True, threshold=NEVER, lengths=None):
        """Read blocks and give outcomes and rows, after checks that hold for every read."""
        keys = self.keys if keys is None else keys
        count = len(keys)
        if lengths is None:
            cut = np.full(self.pieces, self.length // self.pieces, dtype=np.uint64)
            cut[0] += np.uint64(self.length % self.pieces)
            lengths = np.tile(cut, count)
        targets = np.uint64(self.target.ctypes.data) + np.cumsum(lengths) - lengths
        counts = None if self.pieces == 1 else np.full(count, self.pieces, dtype=np.uint32)
        outcomes = np.full(count, 99, dtype=np.uint8)
        touched = np.full(count, -9, dtype=np.int64)
        hits = self.operations.read_rows(
            self.table,
            CAPACITY,
            b"".join(keys),
            SPACE,
            self.segment_bases,
            self.generation_bases,
            targets,
            lengths,
            counts,
            verify,
            threshold,
            outcomes,
            touched,
        )
        assert hits == np.count_nonzero(outcomes == ReadOutcome.HIT)
        assert ((touched >= 0) == (outcomes == ReadOutcome.HIT)).all()
        return [ReadOutcome(code) for code in outcomes], touched


@pytest.mark.parametrize("threshold", [0, NEVER])
@pytest.mark.parametrize("verify", [False, True])
@pytest.mark.parametrize(("length", "pieces"), [(1, 1), (3000, 1), (3000, 7), (40001, 3)])
def test_hits_deliver_the_bytes(bulk, length, pieces, verify, threshold):
    """A block is scattered over its pieces as stored, and the row is named for recency."""
    store = Store(bulk, length=length, pieces=pieces)
    outcomes, touched = store.read(verify=verify, threshold=threshold)
    assert outcomes == [ReadOutcome.HIT] * store.blocks
    assert [store.delivered(i) for i in range(store.blocks)] == [
        store.content(i) for i in range(store.blocks)
    ]
    assert [store.table["key"][row].tobytes() for row in touched] == store.keys


def test_an_absent_key_misses_and_its_target_stays(operations):
    """A miss is an ordinary outcome between hits."""
    store = Store(operations, blocks=40)
    keys = [*store.keys[:20], b"\xff" * 32, *store.keys[21:]]
    outcomes, touched = store.read(keys)
    assert outcomes[20] is ReadOutcome.MISS
    assert touched[20] == -1
    assert outcomes.count(ReadOutcome.HIT) == 39
    assert store.delivered(20) == bytes(store.length)
    assert store.delivered(39) == store.content(39)


def test_a_row_in_change_is_a_miss(operations):
    """A reader looks a bounded number of times, then leaves: it never waits for the writer."""
    store = Store(operations)
    _, touched = store.read()
    store.table["version"][touched[3]] += 1
    assert store.read()[0][3] is ReadOutcome.MISS


def test_a_slot_with_another_owner_is_a_miss(operations):
    """The row may outlive the slot's ownership by a moment; the generation word tells."""
    store = Store(operations)
    store.generations[store.granules[2]] += 1
    outcomes, _ = store.read()
    assert outcomes[2] is ReadOutcome.MISS
    assert store.delivered(2) == bytes(store.length)


@pytest.mark.parametrize("bases", [[0], [0, 0]])
def test_a_segment_that_is_not_mapped_is_told_apart(operations, bases):
    """The client then maps the segment and asks again, rather than recomputing the block."""
    store = Store(operations)
    store.segment_bases = np.array(bases, dtype=np.uint64)
    store.generation_bases = store.generation_bases[: len(bases)]
    assert set(store.read()[0]) == {ReadOutcome.UNMAPPED}


def test_another_length_is_refused_before_a_byte_moves(operations):
    """A block never overruns its target, whatever the row says."""
    store = Store(operations)
    lengths = np.full(store.blocks, store.length, dtype=np.uint64)
    lengths[5] -= 1
    outcomes, _ = store.read(lengths=lengths)
    assert outcomes[5] is ReadOutcome.LENGTH
    assert outcomes.count(ReadOutcome.HIT) == store.blocks - 1


def test_changed_bytes_are_corrupt_only_when_verified(operations):
    """Verification finds a flipped bit; without it the bytes are handed over as they are."""
    store = Store(operations)
    store.segment[int(store.granules[1]) * GRANULE_BYTES + 17] ^= 1
    assert store.read(verify=True)[0][1] is ReadOutcome.CORRUPT
    assert store.read(verify=False)[0][1] is ReadOutcome.HIT


@pytest.mark.parametrize("name", ["outcomes", "touched", "targets", "generation_bases"])
def test_a_wrong_array_is_refused_by_name(operations, name):
    """Every array is checked against the batch before anything moves."""
    count = 1
    arguments = {
        "table": np.zeros(8, dtype=ROW_DTYPE),
        "capacity": 8,
        "keys": bytes(32),
        "space": 1,
        "segment_bases": np.zeros(2, dtype=np.uint64),
        "generation_bases": np.zeros(2, dtype=np.uint64),
        "targets": np.zeros(count, dtype=np.uint64),
        "lengths": np.zeros(count, dtype=np.uint64),
        "piece_counts": None,
        "verify": False,
        "streaming_threshold_bytes": 0,
        "outcomes": np.zeros(count, dtype=np.uint8),
        "touched": np.zeros(count, dtype=np.int64),
    }
    assert operations.read_rows(**arguments) == 0
    with pytest.raises(ValueError, match=name):
        operations.read_rows(**(arguments | {name: np.zeros(5, dtype=arguments[name].dtype)}))


@pytest.mark.skipif(not native.DIRECTORY_IS_SAFE, reason="the fallback has no fences on this processor")
def test_a_block_that_changes_owner_during_the_copy_is_never_a_hit(operations):
    """The generation moves before new bytes are written, so mixed bytes are always noticed."""
    store = Store(operations, blocks=1, length=1 << 20)
    word = ctypes.c_uint64.from_address(store.generations.ctypes.data + 8 * int(store.granules[0]))
    start = int(store.granules[0]) * GRANULE_BYTES
    content = store.segment[start : start + store.length]
    content[:] = 0
    key, one = store.keys[0], np.ones(1, dtype=np.uint32)
    is_over = threading.Event()

    def change_owner():
        generation = word.value
        while not is_over.is_set():
            generation += 1
            word.value = generation  # the slot leaves its owner
            content[:] = generation % 251  # the next owner writes
            operations.remove_rows(store.table, CAPACITY, key, one * np.uint32(SPACE))
            generations = np.array([generation], dtype=np.uint64)
            operations.insert_rows(
                store.table, CAPACITY, key, SPACE, one, store.granules, store.length, one, generations
            )
            is_over.wait(0.005)  # long enough for some reads to be hits

    writer = threading.Thread(target=change_owner)
    writer.start()
    seen = set()
    try:
        end = time.monotonic() + 0.5
        while time.monotonic() < end:
            outcome = store.read(verify=False)[0][0]
            seen.add(outcome)
            if outcome is ReadOutcome.HIT:
                assert (store.target == store.target[0]).all()
    finally:
        is_over.set()
        writer.join()
    # How often the two meet is up to the scheduler; that hits are possible is not.
    assert store.read(verify=False)[0] == [ReadOutcome.HIT]
    assert seen <= {ReadOutcome.HIT, ReadOutcome.MISS, ReadOutcome.STALE}


def churn(operations, table, stop_at):
    """Move rows about: keys come and go, each with fields that are functions of the key."""
    rng = np.random.default_rng(3)
    present = set()
    while time.monotonic() < stop_at:
        number = int(rng.integers(0, 24))
        key = number.to_bytes(32, "big")
        if number in present:
            present.remove(number)
            operations.remove_rows(table, len(table), key, np.array([SPACE], dtype=np.uint32))
        elif len(present) < len(table) // 2:
            present.add(number)
            fields = np.array([number], dtype=np.uint32)
            operations.insert_rows(
                table, len(table), key, SPACE, fields, fields, 512, fields, fields.astype(np.uint64)
            )


@pytest.mark.skipif(not native.DIRECTORY_IS_SAFE, reason="the fallback has no fences on this processor")
@pytest.mark.skipif(not hasattr(os, "fork"), reason="the writer is a forked process")
def test_a_reader_in_another_process_never_sees_a_torn_row(operations):
    """Rows that move under the reader are missed or seen whole: a hit has all of its own fields."""
    import mmap  # noqa: PLC0415 - shared memory for this test alone

    shared = mmap.mmap(-1, 32 * 64)
    table = np.frombuffer(shared, dtype=ROW_DTYPE)
    # Key n lies in granule n of segment n; only the segment that a whole row names is right.
    segment = np.repeat(np.arange(24, dtype=np.uint8), 512)
    bases = np.full(24, segment.ctypes.data, dtype=np.uint64)
    generations = np.arange(24, dtype=np.uint64)
    generation_bases = np.full(24, generations.ctypes.data, dtype=np.uint64)
    keys = b"".join(n.to_bytes(32, "big") for n in range(24))
    target = np.zeros((24, 512), dtype=np.uint8)
    targets = np.uint64(target.ctypes.data) + np.arange(24, dtype=np.uint64) * np.uint64(512)
    lengths = np.full(24, 512, dtype=np.uint64)
    outcomes, touched = np.zeros(24, dtype=np.uint8), np.zeros(24, dtype=np.int64)
    stop_at = time.monotonic() + 0.7
    child = os.fork()
    if child == 0:
        try:
            churn(operations, table, stop_at)
        finally:
            os._exit(0)
    hits = 0
    while time.monotonic() < stop_at:
        target[:] = 255
        hits += operations.read_rows(
            table,
            32,
            keys,
            SPACE,
            bases,
            generation_bases,
            targets,
            lengths,
            None,
            False,
            NEVER,
            outcomes,
            touched,
        )
        # A row mixed from two keys would name a generation or granule that is not the key's.
        assert set(outcomes.tolist()) <= {ReadOutcome.HIT, ReadOutcome.MISS}
        for number in np.flatnonzero(outcomes == ReadOutcome.HIT):
            assert (target[number] == number).all()
    assert os.waitpid(child, 0)[1] == 0
    assert hits > 0


def test_a_block_that_was_stored_without_a_checksum_is_read(operations):
    """A stored 0 says that there is none; it is no mismatch."""
    store = Store(operations, blocks=1)
    store.table["checksum"][store.table["space"] != 0] = 0
    outcomes, _ = store.read()
    assert outcomes == [ReadOutcome.HIT]
