"""What a MapSegments answer brings is mapped, and what it no longer names is let go."""

import os

import numpy as np
import pytest

from kvclient import MalformedError, Slots, StaleGenerationError
from kvclient.local_memory import LocalMemory
from kvclient.touch_ahead import TouchAhead
from kvproto.kv.v1 import local_lane_pb2
from kvservice.transports.segments import OwnedSegment, OwnedTable

SIZE_BYTES = 1 << 16


@pytest.fixture
def segment():
    """Own a small segment."""
    owned = OwnedSegment.create(SIZE_BYTES)
    yield owned
    owned.close()


@pytest.fixture
def memory():
    """Map nothing yet."""
    touch_ahead = TouchAhead()
    mapped = LocalMemory(touch_ahead)
    yield mapped
    touch_ahead.close()
    mapped.close()


def answer_of(segment, numbers, lent):
    """Build an answer and fresh descriptors for the same segment under several numbers."""
    answer = local_lane_pb2.MapSegmentsResponse(
        segments=numbers,
        sizes_bytes=[segment.size_bytes] * len(numbers),
        generations_bytes=[segment.generations_bytes] * len(numbers),
        lent_segments=lent,
    )
    return answer, [os.dup(fd) for _ in numbers for fd in (segment.fd, segment.generations_fd)]


def slots_of(segments, generations):
    """Name the first granule of each segment."""
    return Slots(
        np.array(segments, np.uint32), np.zeros(len(segments), np.uint32), np.array(generations, np.uint64)
    )


def test_what_the_tenant_has_no_more_is_let_go(memory, segment):
    """Numbers of segments never come back, so a mapping of one that went is only a cost."""
    assert memory.install(*answer_of(segment, [1, 2], [1, 2, 3])) == [3]
    assert memory.install(*answer_of(segment, [3], [2, 3])) == []
    assert memory.missing_numbers([1, 2, 3]) == [1]


def test_an_answer_that_does_not_fit_its_descriptors_leaks_none(memory, segment):
    """Every descriptor that came is closed, also when the answer is refused."""
    answer, descriptors = answer_of(segment, [1], [1])
    with pytest.raises(MalformedError, match="announced 2 descriptors and brought 1"):
        memory.install(answer, descriptors[:1])
    answer.sizes_bytes[0] += 4096
    answer.generations_bytes[0] += 64
    extra = os.dup(segment.fd)
    answer.directory_rows_count = 64
    with pytest.raises(MalformedError):
        memory.install(answer, [os.dup(segment.fd), descriptors[1], extra])
    for descriptor in (descriptors[0], descriptors[1], extra):
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(descriptor)


def test_generations_are_looked_at_in_every_segment(memory, segment):
    """One slot of another owner, in any segment, spoils the batch."""
    memory.install(*answer_of(segment, [1, 2], [1, 2]))
    other = OwnedSegment.create(SIZE_BYTES)
    other.generations[0] = 5
    memory.install(*answer_of(other, [3], [1, 2, 3]))
    memory.check_generations(slots_of([1, 2, 3], [0, 0, 5]))
    memory.check_generations(slots_of([3], [5]))
    for wrong in (slots_of([1, 2, 3], [0, 0, 4]), slots_of([3], [4])):
        with pytest.raises(StaleGenerationError):
            memory.check_generations(wrong)
    other.close()


def test_a_new_directory_takes_the_place_of_the_old(memory):
    """Rows read in the old table are forgotten: their positions mean nothing in the new one."""
    tables = [OwnedTable.create(64), OwnedTable.create(128)]
    for table in tables:
        answer = local_lane_pb2.MapSegmentsResponse(directory_rows_count=table.rows_count)
        memory.install(answer, [os.dup(table.fd)])
        assert memory.directory is not None
        if table is tables[0]:
            memory.touched(np.array([3, -1]))
    assert memory.drain_touches() == ([], [])
    memory.touched(np.array([3, -1]))
    assert memory.drain_touches() == ([0], [0])
    for table in tables:
        table.close()


def test_touching_ends_with_its_work_and_with_close(segment):
    """The thread lives as long as there is something to touch; nothing is taken after closing."""
    touch_ahead = TouchAhead()
    touch_ahead.submit([segment, segment])
    assert touch_ahead.wait(5.0)
    touch_ahead.close()
    touch_ahead.submit([segment])
    assert touch_ahead.wait(0.0)
