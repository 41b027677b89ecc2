"""Shared memory: what is sealed, who can see it, and when it goes."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
from pathlib import Path

import numpy as np
import pytest

from kvservice.core.errors import ArenaFullError, InvalidFieldError, MalformedError
from kvservice.transports import segments
from kvservice.transports.segments import (
    TABLE_HEADER_BYTES,
    TABLE_MAGIC,
    MappedSegment,
    MappedTable,
    OwnedSegment,
    OwnedTable,
    touch_ahead,
)

SIZE_BYTES = 1 << 20


@pytest.fixture
def owned():
    """A segment as its owner holds it."""
    owned = OwnedSegment.create(SIZE_BYTES)
    yield owned
    owned.close()


@pytest.fixture
def table():
    """A directory as its owner holds it."""
    table = OwnedTable.create(100)
    yield table
    table.close()


def map_segment(owned: OwnedSegment) -> MappedSegment:
    """Map what an owner would send."""
    return MappedSegment.map(
        os.dup(owned.fd), owned.size_bytes, os.dup(owned.generations_fd), owned.generations_bytes
    )


def names_in(folder: str) -> list[str]:
    """Return the names in a folder."""
    return sorted(path.name for path in Path(folder).iterdir())


def descriptors_count() -> int:
    """Count the open descriptors of this process."""
    return len(names_in("/proc/self/fd"))


def test_both_sides_see_the_same_bytes(owned):
    """What one side writes, the other reads, in data and in generations."""
    mapped = map_segment(owned)
    mapped.memory.view[4096:4100] = b"data"
    owned.generations[8] = 3
    assert bytes(owned.memory.view[4096:4100]) == b"data"
    assert mapped.generations[8] == 3
    assert len(mapped.generations) == SIZE_BYTES // 512
    mapped.close()


def test_nobody_can_change_the_size(owned, table):
    """A holder of a descriptor can neither shrink (and fault the owner) nor grow it."""
    for fd in (owned.fd, owned.generations_fd, table.fd):
        for size_bytes in (0, 4096, SIZE_BYTES * 64):
            with pytest.raises(PermissionError):
                os.ftruncate(fd, size_bytes)
        with pytest.raises(PermissionError):
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)


def test_only_the_owner_writes_generations_and_directory(owned, table):
    """Neither a writable mapping, nor a write, nor mprotect gets past the seal."""
    libc = ctypes.CDLL(None, use_errno=True)
    for fd in (owned.generations_fd, table.fd):
        with pytest.raises(PermissionError):
            mmap.mmap(fd, 4096, prot=mmap.PROT_READ | mmap.PROT_WRITE)
        with pytest.raises(PermissionError):
            os.pwrite(fd, b"x", 0)
        reopened = os.open(f"/proc/self/fd/{fd}", os.O_RDWR)
        with pytest.raises(PermissionError):
            mmap.mmap(reopened, 4096)
        os.close(reopened)
    mapped = map_segment(owned)
    page = ctypes.c_void_p(mapped.generations_address)
    assert libc.mprotect(page, 4096, mmap.PROT_READ | mmap.PROT_WRITE) == -1
    assert ctypes.get_errno() == errno.EACCES
    mapped.close()
    owned.generations[0] = 1  # The owner still can.
    table.supersede()


def test_what_must_not_be_written_is_a_read_only_array(owned, table):
    """A reader's mistake is an exception, and no fault."""
    mapped = map_segment(owned)
    mapped_table = MappedTable.map(os.dup(table.fd), 100)
    for array in (mapped.generations, mapped_table.header, mapped_table.rows):
        assert not array.flags.writeable
    mapped.close()
    mapped_table.close()


def test_nothing_has_a_name():
    """Nothing appears in /dev/shm, so nothing stays there after a crash."""
    before = names_in("/dev/shm")
    owned = OwnedSegment.create(SIZE_BYTES)
    assert names_in("/dev/shm") == before
    owned.close()


def test_a_mapping_keeps_no_descriptor(owned, table):
    """Mapping closes the descriptors it was given, also when it refuses them."""
    before = descriptors_count()
    mapped = map_segment(owned)
    mapped_table = MappedTable.map(os.dup(table.fd), 100)
    with pytest.raises(MalformedError):
        MappedTable.map(os.dup(table.fd), 99)
    with pytest.raises(MalformedError):
        MappedSegment.map(os.dup(owned.fd), SIZE_BYTES, os.dup(owned.generations_fd), 8)
    assert descriptors_count() == before
    mapped.close()
    mapped_table.close()


def test_a_forked_child_has_none_of_it(owned, table):
    """A child does not inherit the mappings, so it cannot keep memory from its next owner."""
    mapped = map_segment(owned)
    libc = ctypes.CDLL(None, use_errno=True)
    addresses = [owned.address, mapped.address, mapped.generations_address, table.address]
    child = os.fork()
    if child == 0:
        resident = ctypes.create_string_buffer(16)
        is_gone = all(
            libc.mincore(ctypes.c_void_p(address), 4096, resident) == -1
            and ctypes.get_errno() == errno.ENOMEM
            for address in addresses
        )
        os._exit(0 if is_gone else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    mapped.close()


def test_a_memfd_that_could_shrink_is_refused():
    """An unsealed memfd could fault its mapper later, so it is not mapped at all."""
    data = os.memfd_create("unsealed", os.MFD_ALLOW_SEALING)
    os.ftruncate(data, SIZE_BYTES)
    page = os.memfd_create("unsealed", os.MFD_ALLOW_SEALING)
    os.ftruncate(page, SIZE_BYTES // 64)
    with pytest.raises(MalformedError, match="sealed"):
        MappedSegment.map(data, SIZE_BYTES, page, SIZE_BYTES // 64)


def test_a_descriptor_that_is_no_memfd_is_refused(tmp_path):
    """A file or a pipe in place of memory is told as such."""
    path = tmp_path / "file"
    path.write_bytes(bytes(TABLE_HEADER_BYTES + 64))
    for fd in (os.open(path, os.O_RDWR), os.open("/dev/null", os.O_RDWR)):
        with pytest.raises(MalformedError):
            MappedTable.map(fd, 1)


@pytest.mark.parametrize("size_bytes", [0, -4096, 4095, 512])
def test_a_segment_is_whole_pages(size_bytes):
    """A segment of another size than a multiple of the page is refused."""
    with pytest.raises(InvalidFieldError):
        OwnedSegment.create(size_bytes)


def test_memory_that_the_machine_refuses_is_a_full_arena():
    """A failing allocation is told with a retry hint, and leaves no descriptor behind."""
    before = descriptors_count()
    with pytest.raises(ArenaFullError) as caught:
        OwnedSegment.create(1 << 52)
    assert caught.value.retry_after_ms
    assert descriptors_count() == before


def test_the_header_of_a_directory_is_fixed(table):
    """Four numbers, then zeros, in 64 bytes: magic, layout version, rows, state."""
    golden = b"KVROWS\x00\x01" + bytes([1]) + bytes(7) + bytes([100]) + bytes(7) + bytes([1]) + bytes(39)
    assert bytes(table.memory.view[:TABLE_HEADER_BYTES]) == golden
    assert table.header[0] == TABLE_MAGIC
    assert table.rows.shape == (100, 64)
    assert table.rows_address == table.address + 64


def test_readers_see_that_a_directory_was_superseded(table):
    """The state word is how a reader learns to map the next directory."""
    mapped = MappedTable.map(os.dup(table.fd), 100)
    assert mapped.is_live
    table.rows[99, 63] = 7
    table.supersede()
    assert not mapped.is_live
    assert mapped.rows[99, 63] == 7
    assert mapped.rows_address == mapped.address + 64
    mapped.close()
    assert not mapped.is_live


def test_another_layout_is_refused(table):
    """A directory of another version of the layout is not read as this one."""
    table.header[1] = 2
    with pytest.raises(MalformedError):
        MappedTable.map(os.dup(table.fd), 100)


def resident_pages(address: int, size_bytes: int) -> int:
    """Count the pages of a range that this process has in its page tables."""
    with Path("/proc/self/pagemap").open("rb") as pagemap:
        pagemap.seek(address // mmap.PAGESIZE * 8)
        entries = np.frombuffer(pagemap.read(size_bytes // mmap.PAGESIZE * 8), np.uint64)
    return int((entries >> np.uint64(63)).sum())


@pytest.mark.parametrize("is_supported", [True, False])
def test_touching_ahead_populates_and_changes_nothing(owned, monkeypatch, is_supported):
    """Every page of the range is present afterwards and its content is untouched, with
    the kernel's help or without.
    """
    if not is_supported:
        monkeypatch.setattr(segments, "_MADV_POPULATE_WRITE", 9999)
    owned.memory.view[8192:8196] = b"kept"
    assert resident_pages(owned.address, SIZE_BYTES) == 1
    touch_ahead(owned.memory, 4096, SIZE_BYTES - 4096)
    assert resident_pages(owned.address, SIZE_BYTES) == SIZE_BYTES // mmap.PAGESIZE - 1
    assert bytes(owned.memory.view[8192:8196]) == b"kept"


def test_every_kind_of_mapping_can_be_touched(owned, table):
    """Read-only mappings are populated too, and need no right to write."""
    mapped = map_segment(owned)
    mapped_table = MappedTable.map(os.dup(table.fd), 100)
    for toucher in (owned, mapped, table, mapped_table):
        toucher.touch_ahead()
    assert resident_pages(mapped.generations_address, owned.generations_bytes) == 4
    assert resident_pages(mapped.address, SIZE_BYTES) == SIZE_BYTES // mmap.PAGESIZE
    mapped.close()
    mapped_table.close()


def test_touching_past_the_end_is_refused(owned):
    """Neither a range outside the mapping nor a closed mapping is touched."""
    for offset, size in ((-1, 10), (0, SIZE_BYTES + 1), (SIZE_BYTES, 1), (0, -1)):
        with pytest.raises(InvalidFieldError):
            touch_ahead(owned.memory, offset, size)
    owned.close()
    with pytest.raises(InvalidFieldError):
        owned.touch_ahead()


def test_a_discarded_segment_gives_its_pages_back_while_others_have_it_mapped(owned):
    """A tenant that keeps a mapping keeps neither the bytes nor the memory, and never faults."""
    mapped = map_segment(owned)
    owned.touch_ahead()
    owned.memory.view[:] = b"x" * SIZE_BYTES
    owned.discard()
    assert resident_pages(mapped.address, SIZE_BYTES) == 0
    assert not np.frombuffer(mapped.memory.view, np.uint8).any()
    mapped.close()


def test_closing_unmaps_at_once_and_may_come_twice(owned, table):
    """With no view left, `close` takes the memory out of the process."""
    mapped = map_segment(owned)
    mapped.close()
    mapped.close()
    assert mapped.is_unmapped
    for mine in (owned, table):
        mine.close()
        mine.close()
        assert mine.memory.is_unmapped
