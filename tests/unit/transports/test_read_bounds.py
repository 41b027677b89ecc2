"""No operation that leaves its segment is ever posted, whatever its numbers are."""

from dataclasses import replace

import numpy as np
import pytest

from kvservice.core.engine_memory import EngineSegment, MemoryKind, SegmentWay
from kvservice.core.errors import InvalidFieldError
from kvservice.ports.one_sided import RemoteRead
from kvservice.transports.read_bounds import check_read

EDGES = [
    0,
    1,
    2,
    4095,
    4096,
    4097,
    2**31,
    2**32 - 1,
    2**32,
    2**63 - 1,
    2**63,
    2**64 - 4096,
    2**64 - 2,
    2**64 - 1,
]
SIZES = [1, 4096, 2**32, 2**63]


def read_of(sizes, operations):
    """Return a read; operations: segment, offset, length of each."""
    columns = list(zip(*operations, strict=True)) or [(), (), ()]
    way = (SegmentWay("wire", b"", b""),)
    return RemoteRead(
        tuple(EngineSegment(4096, size, MemoryKind.HOST, way) for size in sizes),
        np.array(columns[0], np.uint32),
        np.array(columns[1], np.uint64),
        np.full(len(operations), 1 << 20, np.uint64),
        np.array(columns[2], np.uint64),
        1.0,
    )


def is_refused(read):
    """Say whether a read is refused."""
    try:
        check_read(read)
    except InvalidFieldError:
        return True
    return False


@pytest.mark.parametrize("offset", EDGES)
@pytest.mark.parametrize("size", SIZES)
def test_what_is_refused_is_what_does_not_fit(size, offset):
    """As integers that do not wrap say it: sums of 64 bits are small again where it matters most."""
    for length in EDGES:
        assert is_refused(read_of([size], [(0, offset, length)])) == (offset + length > size), length


def test_one_bad_operation_among_many_is_found(rng):
    """Wherever it stands; and the refusal says which it is."""
    sizes = [1 << 20, 777, 1 << 16]
    for _ in range(50):
        operations = []
        for _ in range(200):
            segment = rng.randrange(3)
            length = rng.randint(0, sizes[segment])
            operations.append((segment, rng.randint(0, sizes[segment] - length), length))
        check_read(read_of(sizes, operations))
        bad = rng.randrange(200)
        segment, offset, _ = operations[bad]
        operations[bad] = (segment, offset, sizes[segment] - offset + rng.choice([1, 2**32, 2**63]))
        with pytest.raises(InvalidFieldError, match=f"operation {bad} reads"):
            check_read(read_of(sizes, operations))


def test_a_segment_that_is_not_there_is_refused():
    """The index is held to the list before it is used, in a list of none as well."""
    for sizes, index in (([], 0), ([5], 1), ([5, 5], 2**32 - 1)):
        with pytest.raises(InvalidFieldError, match=f"segment {index} of {len(sizes)}"):
            check_read(read_of(sizes, [(index, 0, 1)]))


@pytest.mark.parametrize("name", ["segment_indexes", "offsets", "addresses", "lengths"])
@pytest.mark.parametrize("kept", [0, 1, 3])
def test_arrays_of_different_lengths_are_refused(name, kept):
    """One more or fewer would be read from beyond an array; no length is taken for the others'."""
    read = read_of([4096], [(0, 0, 1)] * 2)
    array = getattr(read, name)
    with pytest.raises(InvalidFieldError, match="segment indexes"):
        check_read(replace(read, **{name: np.resize(array, kept)}))


def test_a_read_of_nothing_passes():
    """No operation leaves its segment, whether there are segments or not."""
    assert not is_refused(read_of([], []))
    assert not is_refused(read_of([1], []))
