import hashlib
import struct

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvservice.core import row_layout
from kvservice.core.row_layout import KEY_BYTES, ROW_BYTES, ROW_DTYPE, mix_keys, words_of
from kvservice.native import fallback

try:
    from kvservice.native import _native
except ImportError:
    _native = None

SPACE = 3


def table_of(capacity):
    """Give an empty table."""
    return np.zeros(capacity, dtype=ROW_DTYPE)


def little(number):
    """Give a key that counts up in its first byte."""
    return number.to_bytes(KEY_BYTES, "little")


def big(number):
    """Give a key that counts up in its last byte."""
    return number.to_bytes(KEY_BYTES, "big")


def insert(operations, table, keys, space=SPACE, first=0):
    """Insert keys with fields that tell the key's index, counted from `first`."""
    count = len(keys)
    indexes = np.arange(first, first + count, dtype=np.uint32)
    operations.insert_rows(
        table,
        len(table),
        b"".join(keys),
        space,
        indexes,
        indexes * np.uint32(2),
        4096,
        indexes * np.uint32(3),
        indexes.astype(np.uint64) * np.uint64(5),
    )


def find(operations, table, keys, space=SPACE):
    """Look keys up; give the leading count and the positions."""
    positions = np.zeros(len(keys), dtype=np.int64)
    leading = operations.find_rows(table, len(table), b"".join(keys), space, positions)
    return leading, positions


def remove(operations, table, keys, spaces):
    """Remove keys; give how many were there."""
    return operations.remove_rows(table, len(table), b"".join(keys), np.array(spaces, dtype=np.uint32))


def test_the_row_is_the_one_that_is_drawn():
    """The layout is shared between processes and languages: its bytes never move unnoticed."""
    row = np.zeros(1, dtype=ROW_DTYPE)
    row[0] = ((1, 2, 3, 4), 5, 6, 7, 8, 9, 10, 11)
    assert ROW_DTYPE.itemsize == ROW_BYTES
    assert row.tobytes() == struct.pack("<4Q6IQ", 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11)


def test_the_home_slot_is_the_one_that_is_written_down(operations):
    """Both implementations place rows by the formula of the docstring, computed here with plain integers."""
    words, space, capacity = (1, 2**63, 3 << 40, 2**64 - 1), 9, 1 << 12
    mask = 2**64 - 1
    mixed = space * 0x9E3779B97F4A7C15 & mask
    for word in words:
        mixed = (mixed ^ word) * 0xD6E8FEB86659FD93 & mask
        mixed ^= mixed >> 32
    for factor, shift in ((0xFF51AFD7ED558CCD, 29), (0xC4CEB9FE1A85EC53, 32)):
        mixed = mixed * factor & mask
        mixed ^= mixed >> shift
    table = table_of(capacity)
    key = struct.pack("<4Q", *words)
    insert(operations, table, [key], space)
    assert find(operations, table, [key], space)[1].tolist() == [mixed % capacity]


@pytest.mark.parametrize(
    "make",
    [
        little,
        big,
        lambda i: bytes(12) + i.to_bytes(4, "big") + bytes(16),
        lambda i: hashlib.sha256(little(i)).digest(),
    ],
    ids=["little-endian", "big-endian", "inside", "hash"],
)
def test_counting_keys_spread_as_well_as_hashes(make):
    """Keys need not be random: a counter in any byte order fills the slots about evenly."""
    count, capacity = 1 << 14, 1 << 15
    words = words_of(b"".join(make(i) for i in range(count)))
    slots = mix_keys(words, SPACE) % np.uint64(capacity)
    used = len(np.unique(slots))
    assert used / capacity == pytest.approx(1 - np.exp(-0.5), rel=0.03)


def test_found_rows_are_counted_up_to_the_first_gap(operations):
    """A prefix hit is the longest run of leading keys; later keys are looked up all the same."""
    table = table_of(64)
    keys = [little(i) for i in range(20)]
    insert(operations, table, keys[:7] + keys[8:])
    leading, positions = find(operations, table, keys)
    assert leading == 7
    assert (positions >= 0).tolist() == [i != 7 for i in range(20)]
    assert find(operations, table, keys[8:])[0] == 12
    assert find(operations, table, [])[0] == 0
    assert find(operations, table, keys, space=SPACE + 1)[0] == 0
    assert all(table["key"][p].tobytes() == k for p, k in zip(positions, keys, strict=True) if p >= 0)


def test_a_table_may_be_any_buffer_and_read_only(operations):
    """Clients map the directory read-only; only writers need more."""
    table = table_of(16)
    keys = [little(1), little(2)]
    insert(operations, table, keys)
    frozen = table.tobytes()
    positions = np.zeros(2, dtype=np.int64)
    assert operations.find_rows(frozen, 16, b"".join(keys), SPACE, positions) == 2
    with pytest.raises(ValueError, match="table"):
        operations.remove_rows(frozen, 16, keys[0], np.array([SPACE], dtype=np.uint32))
    raw = bytearray(frozen)
    assert operations.remove_rows(raw, 16, keys[0], np.array([SPACE], dtype=np.uint32)) == 1


@pytest.mark.parametrize("capacity", [0, 3, 2**32])
def test_a_capacity_that_is_no_power_of_two_is_refused(operations, capacity):
    """The home slot is a mask of the mixed key."""
    with pytest.raises(ValueError, match="capacity"):
        operations.find_rows(table_of(8), capacity, little(1), SPACE, np.zeros(1, dtype=np.int64))


def test_a_short_table_and_odd_keys_are_refused(operations):
    """Nothing is read past the end of what was handed over."""
    positions = np.zeros(1, dtype=np.int64)
    with pytest.raises(ValueError, match="table"):
        operations.find_rows(table_of(8), 16, little(1), SPACE, positions)
    with pytest.raises(ValueError, match="keys"):
        operations.find_rows(table_of(8), 8, b"short", SPACE, positions)
    with pytest.raises(ValueError, match="positions"):
        operations.find_rows(table_of(8), 8, little(1) * 2, SPACE, positions)
    with pytest.raises(ValueError, match="space"):
        operations.find_rows(table_of(8), 8, little(1), 0, positions)


@pytest.mark.parametrize("batch", [[8, 9, 2, 10], [8, 9, 8, 10]], ids=["in-table", "in-batch"])
def test_a_present_key_refuses_the_whole_batch(operations, batch):
    """A key has one row at most, and a refused batch leaves no trace."""
    table = table_of(16)
    insert(operations, table, [little(i) for i in range(4)])
    before = table.tobytes()
    with pytest.raises(ValueError, match="key 2 is present"):
        insert(operations, table, [little(i) for i in batch])
    assert table.tobytes() == before


def test_a_batch_that_does_not_fit_is_taken_back(operations):
    """All or nothing also when the table fills up half way; only versions have moved on."""
    table = table_of(8)
    insert(operations, table, [little(i) for i in range(6)])
    before = table.copy()
    with pytest.raises(ValueError, match="no empty row for key 2"):
        insert(operations, table, [little(i) for i in range(10, 14)])
    after = table.copy()
    assert (after["version"] >= before["version"]).all()
    after["version"] = before["version"]
    assert after.tobytes() == before.tobytes()


def test_a_full_table_can_be_searched_and_emptied(operations):
    """Searches and shifts end after one turn, though no empty row stops them."""
    table = table_of(8)
    keys = [little(i) for i in range(8)]
    insert(operations, table, keys)
    assert find(operations, table, [*keys, little(99)])[0] == 8
    assert remove(operations, table, keys, [SPACE] * 8) == 8
    assert not table["space"].any()


def test_absent_keys_are_not_removed(operations):
    """Removal is idempotent, keeps to the space, and counts what was there."""
    table = table_of(16)
    insert(operations, table, [little(1)])
    assert remove(operations, table, [little(1), little(2), little(1)], [SPACE + 1, SPACE, 0]) == 0
    assert remove(operations, table, [little(1), little(1)], [SPACE, SPACE]) == 1


def test_versions_belong_to_the_place_and_only_grow(operations):
    """A reader that slept through a removal and an insertion still sees that something changed."""
    table = table_of(8)
    for turn in range(1, 4):
        insert(operations, table, [little(5)])
        assert table["version"].max() == 4 * turn - 2
        remove(operations, table, [little(5)], [SPACE])
        assert table["version"].max() == 4 * turn
    table["version"] = 2**32 - 2
    insert(operations, table, [little(5)])
    assert sorted(set(table["version"].tolist())) == [0, 2**32 - 2]


def test_growth_keeps_every_row(operations):
    """A larger table gives the same answers, with every field."""
    small, large = table_of(64), table_of(256)
    keys = [big(i) for i in range(32)]
    insert(operations, small, keys)
    operations.copy_rows(small, 64, large, 256)
    leading, positions = find(operations, large, keys)
    assert leading == 32
    assert large["segment"][positions].tolist() == list(range(32))
    assert large["generation"][positions].tolist() == [5 * i for i in range(32)]
    with pytest.raises(ValueError, match="target_table"):
        operations.copy_rows(small, 64, table_of(16), 16)


Step = st.tuples(
    st.sampled_from(["insert", "remove", "find"]),
    st.lists(st.integers(0, 15), min_size=1, max_size=6),
    st.integers(1, 2),
)


@given(
    capacity=st.sampled_from([8, 16, 64]),
    make=st.sampled_from([little, big]),
    steps=st.lists(Step, max_size=25),
)
@settings(max_examples=60, deadline=None)
def test_the_table_behaves_as_a_dict(capacity, make, steps):
    """Insertions and removals give what a dict gives, and all implementations give the same bytes."""
    modules = [row_layout, fallback] if _native is None else [row_layout, fallback, _native]
    tables = [table_of(capacity) for _ in modules]
    model = {}
    for turn, (action, numbers, space) in enumerate(steps):
        keys = [make(number) for number in numbers]
        if action == "insert":
            fresh = [k for k in dict.fromkeys(keys) if (k, space) not in model]
            fresh = fresh[: capacity // 2 - len(model)]
            model |= {(key, space): turn + i for i, key in enumerate(fresh)}
            results = [insert(m, t, fresh, space, turn) for m, t in zip(modules, tables, strict=True)]
        elif action == "remove":
            gone = sum(model.pop((key, space), None) is not None for key in keys)
            results = [remove(m, t, keys, [space] * len(keys)) for m, t in zip(modules, tables, strict=True)]
            assert results[0] == gone
        else:
            found = [find(m, t, keys, space) for m, t in zip(modules, tables, strict=True)]
            results = [(leading, positions.tolist()) for leading, positions in found]
            assert [p >= 0 for p in results[0][1]] == [(key, space) in model for key in keys]
        assert all(result == results[0] for result in results)
        assert all(table.tobytes() == tables[0].tobytes() for table in tables)
    live = tables[0][tables[0]["space"] != 0]
    assert {(r["key"].tobytes(), int(r["space"])): int(r["segment"]) for r in live} == model
    assert not tables[0]["key"][tables[0]["space"] == 0].any()
