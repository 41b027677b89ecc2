"""What every one-sided transport must keep to, written once.

A subclass of `OneSidedContract`, or of `RevokingContract`, gives a `harness` fixture: an endpoint
that reads, and a way to start lenders, each with known memory, which may live in other processes.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
import pytest

from kvservice.core.engine_memory import EngineSegment, MemoryKind, SegmentWay
from kvservice.core.errors import (
    DeadlineError,
    InvalidFieldError,
    KvError,
    NoWayError,
    PeerUnavailableError,
)
from kvservice.ports.one_sided import OneSided, RemoteRead
from tests.contract.one_sided_memory import SEGMENT_SIZES_BYTES, content

TIMEOUT_S = 10.0
UNTOUCHED = 0xA5
HUGE = 2**64 - 1
OUTSIDE = pytest.mark.parametrize(
    ("segment", "offset", "length"),
    [
        (1, 4096, 1),
        (1, 0, 4097),
        (1, 4095, 2),
        (0, HUGE, 1),
        (0, 1, HUGE),
        (0, HUGE, HUGE),
        (0, 1 << 63, 1 << 63),
        (3, 0, 1),
        (2**32 - 1, 0, 1),
    ],
)


class Lender(Protocol):
    """An endpoint that lends memory of SEGMENT_SIZES_BYTES, filled by `content` (`one_sided_memory`)."""

    @property
    def segments(self) -> tuple[EngineSegment, ...]:
        """What it lends, with the ways that its endpoint gave them."""

    def take_back(self, index: int) -> None:
        """Lend one segment no more; returns when it is so. Of RevokingContract."""

    def end(self) -> None:
        """Be gone, without a word to anybody; returns when it is so. Idempotent."""


@dataclass
class Harness:
    """An endpoint under test.

    endpoint: reads; the harness closes it.
    start: returns a lender, whose content has that seed, of which all is lent; the harness ends it.
    """

    endpoint: OneSided
    start: Callable[[int], Lender]


class Reading:
    """Operations on a lender's segments, into one array with gaps between the targets.

    operations: segment, offset and length of each.
    """

    def __init__(self, operations: Sequence[tuple[int, int, int]]) -> None:
        self.operations = list(operations)
        # What is out of bounds gets a byte to go to: nothing of it must come there.
        sizes = [length if length <= max(SEGMENT_SIZES_BYTES) else 1 for _, _, length in self.operations]
        stops = np.cumsum([size + 3 for size in sizes], dtype=np.int64)
        # Backwards in memory, so that no order is right by chance.
        self.starts = [int(stops[-1] - stop) for stop in stops]
        self.memory = np.full(int(stops[-1]) if len(stops) else 1, UNTOUCHED, np.uint8)

    def of(self, segments: tuple[EngineSegment, ...], *, timeout_s: float = TIMEOUT_S) -> RemoteRead:
        """Return the read."""
        columns = list(zip(*self.operations, strict=True)) or [(), (), ()]
        base = np.uint64(self.memory.ctypes.data)
        return RemoteRead(
            segments,
            np.array(columns[0], np.uint32),
            np.array(columns[1], np.uint64),
            np.array(self.starts, np.uint64) + base,
            np.array(columns[2], np.uint64),
            timeout_s,
        )

    def expected(self, seed: int) -> np.ndarray:
        """Return what the memory must hold afterwards: the bytes, and what was between them."""
        memory = np.full_like(self.memory, UNTOUCHED)
        sources = [content(seed, index) for index in range(len(SEGMENT_SIZES_BYTES))]
        for start, (segment, offset, length) in zip(self.starts, self.operations, strict=True):
            memory[start : start + length] = sources[segment][offset : offset + length]
        return memory

    @property
    def is_untouched(self) -> bool:
        """Whether nothing came."""
        return bool((self.memory == UNTOUCHED).all())


def fetch(
    endpoint: OneSided, segments: tuple[EngineSegment, ...], operations: Sequence[tuple[int, int, int]]
) -> Reading:
    """Read, and return the memory: whoever reads keeps it alive, since the read names addresses only."""
    reading = Reading(operations)
    endpoint.read(reading.of(segments))
    return reading


def whole(index: int) -> tuple[int, int, int]:
    """Return the operation that reads a segment from end to end."""
    return (index, 0, SEGMENT_SIZES_BYTES[index])


def scattered(count: int, longest: int, seed: int = 5) -> list[tuple[int, int, int]]:
    """Draw operations of any length in any place, in no order; print the seed."""
    print(f"operations of seed {seed}")  # noqa: T201 - a random test prints its seed
    generator = np.random.default_rng(seed)
    found = []
    for _ in range(count):
        segment = int(generator.integers(0, len(SEGMENT_SIZES_BYTES)))
        size = SEGMENT_SIZES_BYTES[segment]
        length = int(generator.integers(1, min(longest, size) + 1))
        found.append((segment, int(generator.integers(0, size - length + 1)), length))
    return found


SHAPES = {
    "one segment": lambda: [whole(0)],
    "all segments": lambda: [whole(2), whole(0), whole(1)],
    "a byte": lambda: [(1, 4095, 1)],
    "first and last": lambda: [(0, 0, 1), (0, SEGMENT_SIZES_BYTES[0] - 1, 1)],
    "one place, many times": lambda: [(2, 65536, 777)] * 50,
    "scattered": lambda: scattered(200, 70_000),
    "many small": lambda: scattered(20_000, 64),
    "blocks": lambda: [(0, block * 4096, 4096) for block in range(256)],
}


class OneSidedContract:
    """Tests of `ports.one_sided.OneSided`."""

    @pytest.mark.parametrize("shape", SHAPES)
    def test_a_read_brings_the_bytes_and_touches_nothing_else(self, harness, shape):
        """Every operation lands where it was told, whatever the order, and nothing beside it changes."""
        lender = harness.start(1)
        reading = fetch(harness.endpoint, lender.segments, SHAPES[shape]())
        assert (reading.memory == reading.expected(1)).all()

    def test_a_read_of_nothing_does_nothing(self, harness):
        """No operations are no error, with segments and without."""
        lender, reading = harness.start(1), Reading([])
        harness.endpoint.read(reading.of(lender.segments))
        harness.endpoint.read(reading.of(()))
        assert reading.is_untouched

    def test_what_is_read_is_what_is_there_now(self, harness):
        """The second read of a place is a read: nothing is remembered."""
        lender, reading = harness.start(1), Reading([whole(1)])
        for _ in range(2):
            reading.memory[:] = UNTOUCHED
            harness.endpoint.read(reading.of(lender.segments))
            assert (reading.memory == reading.expected(1)).all()

    def test_one_read_may_go_to_several_lenders(self, harness):
        """Segments of one read belong to whomever."""
        segments = [*harness.start(1).segments, *harness.start(2).segments]
        reading = Reading([whole(0), whole(1), whole(2)])
        mixed = replace(reading.of(tuple(segments)), segment_indexes=np.array([0, 4, 2], np.uint32))
        harness.endpoint.read(mixed)
        expected = reading.expected(1)
        expected[reading.starts[1] :][:4096] = content(2, 1)
        assert (reading.memory == expected).all()

    def test_threads_may_read_at_once(self, harness):
        """Each gets its own bytes, from the same lender and through the same endpoint."""
        lender = harness.start(1)
        readings = [Reading(scattered(300, 9000, seed)) for seed in range(8)]
        barrier = threading.Barrier(len(readings))

        def run(reading: Reading) -> None:
            barrier.wait(TIMEOUT_S)
            harness.endpoint.read(reading.of(lender.segments))

        with ThreadPoolExecutor(len(readings)) as pool:
            for future in [pool.submit(run, reading) for reading in readings]:
                future.result(TIMEOUT_S)
        for reading in readings:
            assert (reading.memory == reading.expected(1)).all()

    @OUTSIDE
    def test_an_operation_that_leaves_its_segment_is_refused_before_any_is_posted(
        self, harness, segment, offset, length
    ):
        """A bad address can crash the other process; so all are looked at first, and nothing is read."""
        lender, reading = harness.start(1), Reading([whole(1), (segment, offset, length)])
        with pytest.raises(InvalidFieldError, match="segment"):
            harness.endpoint.read(reading.of(lender.segments))
        assert reading.is_untouched

    @pytest.mark.parametrize("name", ["segment_indexes", "offsets", "addresses", "lengths"])
    def test_arrays_that_disagree_are_refused(self, harness, name):
        """One of each makes an operation."""
        lender, reading = harness.start(1), Reading([whole(1), (0, 0, 1)])
        read = reading.of(lender.segments)
        with pytest.raises(InvalidFieldError, match="segment indexes"):
            harness.endpoint.read(replace(read, **{name: getattr(read, name)[:1]}))
        assert reading.is_untouched

    def test_ways_of_other_transports_are_passed_over(self, harness):
        """A segment may be reached in several ways; the endpoint takes its own."""
        lender, reading = harness.start(1), Reading([whole(1)])
        other = SegmentWay("another", b"elsewhere", b"")
        segments = [replace(one, ways=(other, *one.ways[:7])) for one in lender.segments]
        harness.endpoint.read(reading.of(tuple(segments)))
        assert (reading.memory == reading.expected(1)).all()

    def test_without_a_way_of_the_transport_nothing_is_read(self, harness):
        """That is no way, and not a peer that is gone."""
        lender, reading = harness.start(1), Reading([whole(1)])
        other = (SegmentWay("another", b"elsewhere", b""),)
        segments = tuple(replace(one, ways=other) for one in lender.segments)
        with pytest.raises(NoWayError, match=harness.endpoint.transport):
            harness.endpoint.read(reading.of(segments))
        assert reading.is_untouched

    @pytest.mark.parametrize("key", [b"", b"\0", b"garbage" * 9])
    def test_a_key_that_is_none_is_refused(self, harness, key):
        """What comes over the wire is held to its form before a library is given it."""
        lender, reading = harness.start(1), Reading([whole(1)])
        segments = tuple(
            replace(one, ways=tuple(replace(way, key=key) for way in one.ways)) for one in lender.segments
        )
        with pytest.raises(KvError):
            harness.endpoint.read(reading.of(segments))
        assert reading.is_untouched

    @pytest.mark.parametrize("is_known", [True, False])
    def test_a_lender_that_is_gone_is_unavailable(self, harness, is_known):
        """Within the time of the read, whether it was read from before or not; others are read on."""
        lender, other = harness.start(1), harness.start(2)
        if is_known:
            fetch(harness.endpoint, lender.segments, [whole(1)])
        for _ in range(2):
            lender.end()
            with pytest.raises(PeerUnavailableError):
                fetch(harness.endpoint, lender.segments, [whole(0), whole(1)])
        reading = fetch(harness.endpoint, other.segments, [whole(0)])
        assert (reading.memory == reading.expected(2)).all()

    def test_nothing_is_posted_after_the_deadline(self, harness):
        """A read that comes too late leaves the memory alone, and the endpoint goes on."""
        lender, reading = harness.start(1), Reading([whole(0)])
        fetch(harness.endpoint, lender.segments, [whole(1)])
        with pytest.raises(DeadlineError):
            harness.endpoint.read(reading.of(lender.segments, timeout_s=0.0))
        assert reading.is_untouched
        harness.endpoint.read(reading.of(lender.segments))
        assert (reading.memory == reading.expected(1)).all()

    def test_it_says_how_it_would_read(self, harness):
        """In words for people, one for each lane; and it needs a way of its own for that too."""
        segment = harness.start(1).segments[1]
        words = harness.endpoint.describe(segment, TIMEOUT_S)
        assert words
        assert all(each and each.isprintable() for each in words)
        with pytest.raises(NoWayError):
            harness.endpoint.describe(
                replace(segment, ways=(SegmentWay("another", b"elsewhere", b""),)), TIMEOUT_S
            )

    def test_the_ways_that_it_makes_are_its_own(self, harness):
        """They bear its name, as many as the daemon passes on, and fit its limits."""
        memory = np.zeros(4096, np.uint8)
        lent = harness.endpoint.lend(memory.ctypes.data, memory.nbytes, MemoryKind.HOST)
        assert {way.transport for way in lent.ways} == {harness.endpoint.transport}
        segment = EngineSegment(memory.ctypes.data, memory.nbytes, MemoryKind.HOST, lent.ways)
        assert segment.transports == {harness.endpoint.transport}
        lent.close()
        lent.close()

    @pytest.mark.parametrize(("address", "size_bytes"), [(0, 4096), (1 << 20, 0), (0, 0)])
    def test_what_is_no_memory_is_not_lent(self, harness, address, size_bytes):
        """Nothing at all, or at no address."""
        with pytest.raises(InvalidFieldError, match=f"{size_bytes} bytes"):
            harness.endpoint.lend(address, size_bytes, MemoryKind.HOST)

    def test_a_closed_endpoint_neither_reads_nor_lends(self, harness):
        """It says so; closing it and what it lent once more does nothing."""
        lender, reading = harness.start(1), Reading([whole(1)])
        fetch(harness.endpoint, lender.segments, [whole(1)])
        memory = np.zeros(4096, np.uint8)
        lent = harness.endpoint.lend(memory.ctypes.data, memory.nbytes, MemoryKind.HOST)
        harness.endpoint.close()
        harness.endpoint.close()
        lent.close()
        with pytest.raises(PeerUnavailableError, match="closed"):
            harness.endpoint.read(reading.of(lender.segments))
        with pytest.raises(PeerUnavailableError, match="closed"):
            harness.endpoint.lend(memory.ctypes.data, memory.nbytes, MemoryKind.HOST)
        assert reading.is_untouched


class RevokingContract(OneSidedContract):
    """Of endpoints that ask at each read whether the memory is still lent.

    Not every wire can: who reads through the kernel needs nothing of the lender but its memory. There
    it is the control plane alone that tells readers to stop, and lenders when they have.
    """

    def test_memory_that_is_lent_no_more_cannot_be_read(self, harness):
        """Other memory of the same lender still can."""
        lender, reading = harness.start(1), Reading([whole(1)])
        harness.endpoint.read(reading.of(lender.segments))
        for _ in range(2):
            lender.take_back(0)
        with pytest.raises(PeerUnavailableError):
            fetch(harness.endpoint, lender.segments[:1], [whole(0)])
        reading = Reading([whole(2)])
        rest = replace(reading.of(lender.segments[1:]), segment_indexes=np.array([1], np.uint32))
        harness.endpoint.read(rest)
        assert (reading.memory == reading.expected(1)).all()
