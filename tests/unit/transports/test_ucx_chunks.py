"""Segments in several registrations: every byte is in one part of its operation, and in one chunk."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvservice.core.errors import MalformedError
from kvservice.transports.ucx.chunks import Chunking, chunk_lengths, joined, pack_keys, parse_keys

SEGMENTS = st.lists(st.lists(st.integers(1, 40), min_size=1, max_size=6), min_size=1, max_size=4)


@given(lengths=SEGMENTS, data=st.data())
def test_parts_cover_each_operation_once_and_stay_in_their_chunk(lengths, data):
    """Held against a plain walk over the bytes."""
    bases = [1000 * (len(lengths) - number) for number in range(len(lengths))]
    chunking = Chunking.of(bases, lengths)
    asked = []
    for _ in range(data.draw(st.integers(0, 6))):
        segment = data.draw(st.integers(0, len(lengths) - 1))
        size = sum(lengths[segment])
        begin = data.draw(st.integers(0, size))
        asked.append((segment, bases[segment] + begin, 7000 + begin, data.draw(st.integers(0, size - begin))))
    columns = list(zip(*asked, strict=True)) or [()] * 4
    arrays = [np.array(column, kind) for column, kind in zip(columns, ("u4", "u8", "u8", "u8"), strict=True)]
    cut, parts = chunking.cut(*arrays)
    expected = [
        [(owner_of(bases, lengths, segment, there + i), there + i, here + i) for i in range(length)]
        for segment, there, here, length in asked
    ]
    stops = [*parts.tolist()[1:], len(cut.chunks)]
    for start, stop, each in zip(parts.tolist(), stops, expected, strict=False):
        assert stop > start
        got = [
            (int(cut.chunks[part]), int(cut.remote[part]) + i, int(cut.local[part]) + i)
            for part in range(start, stop)
            for i in range(int(cut.lengths[part]))
        ]
        assert got == each
    assert chunking.is_plain == all(len(each) == 1 for each in lengths)


def owner_of(bases, lengths, segment, address):
    """Return the number of the chunk that an address is in."""
    first = sum(len(each) for each in lengths[:segment])
    ends = np.cumsum(lengths[segment]) + bases[segment]
    return first + int((ends <= address).sum())


@given(st.integers(1, 10_000), st.integers(0, 3000))
def test_chunks_are_as_long_as_they_may_be_and_add_up(size_bytes, limit_bytes):
    """No chunk is empty, or longer than the limit."""
    lengths = chunk_lengths(size_bytes, limit_bytes)
    assert sum(lengths) == size_bytes
    assert all(0 < length <= (limit_bytes or size_bytes) for length in lengths)
    assert all(length == limit_bytes for length in lengths[:-1])


@given(st.lists(st.tuples(st.integers(1, 1 << 40), st.binary(max_size=80)), min_size=1, max_size=20))
def test_keys_come_back_as_they_were_packed(chunks):
    """Lengths and keys, in order."""
    lengths, keys = [length for length, _ in chunks], [key for _, key in chunks]
    assert parse_keys(pack_keys(lengths, keys), sum(lengths)) == chunks


@given(st.binary(max_size=60), st.integers(1, 100))
def test_what_is_no_key_is_refused(packed, size_bytes):
    """Random bytes never name memory beyond the segment."""
    try:
        found = parse_keys(packed, size_bytes)
    except MalformedError:
        return
    assert sum(length for length, _ in found) == size_bytes


@pytest.mark.parametrize("change", [lambda p: p[:-1], lambda p: p + b"x", lambda p: b"\x05" + p[1:]])
def test_a_damaged_key_is_refused(change):
    """Cut short, too long, and with another count."""
    packed = pack_keys([10, 20], [b"one", b"two"])
    with pytest.raises(MalformedError):
        parse_keys(change(packed), 30)
    with pytest.raises(MalformedError, match="2 chunks of 30 bytes"):
        parse_keys(packed, 31)


def test_an_operation_is_done_when_all_of_its_parts_are():
    """One failed part fails it, with that part's status."""
    statuses = np.array([0, 0, -3, 0, 0], np.int32)
    assert joined(statuses, np.array([0, 1, 3])).tolist() == [0, -3, 0]
    assert joined(statuses[:0], np.array([], np.int64)).tolist() == []
