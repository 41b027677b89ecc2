"""Shared memory: segments, their pages of generations, and the directory.

All of it lives in memfds, which have no name (nothing stays in /dev/shm after a
crash) and reach other processes only as descriptors over the Unix socket.

    segment      data of the slots; every holder of the descriptor may write it.
                 Sealed against shrinking and growing, or a client could make the
                 daemon fault by truncating what it has mapped.
    generations  one u64 for each granule (512 bytes) of the segment, at the
                 granule's index; the generation of a slot is that of its first
                 granule.
    directory    64-byte header, then rows of 64 bytes. Header, u64 each, little
                 endian: magic, layout version, rows count, state (1 live, 2
                 superseded: map again), four times 0.

The last two are sealed against future writable mappings once their owner has
mapped them, so that only the owner can ever change them.

A mapping is unmapped when it was closed *and* the last array or view of it is
gone: a view that outlives `close` reads old bytes, never unmapped memory.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
import weakref
from dataclasses import dataclass

import numpy as np

from kvservice.core.errors import ArenaFullError, InvalidFieldError, KvError, MalformedError
from kvservice.core.slots import GRANULE_BYTES, U8, U64

ROW_BYTES = 64
TABLE_HEADER_BYTES = 64
TABLE_MAGIC = int.from_bytes(b"KVROWS\x00\x01", "little")
TABLE_LAYOUT_VERSION = 1
TABLE_LIVE = 1
TABLE_SUPERSEDED = 2

TOUCH_STEP_BYTES = 4 << 20
"""Bytes populated in one system call. It takes about a millisecond, so that the
address space, which the call locks, is free again for everyone else."""

_PAGE_BYTES = mmap.PAGESIZE
_GENERATION_BYTES = 8
_MADV_POPULATE_READ = 22
_MADV_POPULATE_WRITE = 23
_F_SEAL_FUTURE_WRITE = 0x10
_FALLOC_KEEP_SIZE = 0x01
_FALLOC_PUNCH_HOLE = 0x02
_SIZE_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
_MAP_FAILED = ctypes.c_void_p(-1).value

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_long,
]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_libc.fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_long, ctypes.c_long]
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


class Mapping:
    """A shared mapping of a descriptor, not inherited by forks.

    Not `mmap.mmap`: that one keeps a duplicate of the descriptor (an arena has
    thousands), and cannot be closed while a view of it is alive.
    """

    def __init__(self, fd: int, size_bytes: int, *, is_writable: bool) -> None:
        protection = mmap.PROT_READ | (mmap.PROT_WRITE if is_writable else 0)
        address = _libc.mmap(None, size_bytes, protection, mmap.MAP_SHARED, fd, 0)
        if address == _MAP_FAILED:
            raise _no_memory(ctypes.get_errno(), f"cannot map {size_bytes} bytes")
        self.address: int = address
        self.size_bytes = size_bytes
        self.is_writable = is_writable
        # A child that kept the mapping would keep the memory past the end of its
        # session; and KV caches have no place in a core dump.
        _libc.madvise(address, size_bytes, mmap.MADV_DONTFORK)
        _libc.madvise(address, size_bytes, mmap.MADV_DONTDUMP)
        memory = (ctypes.c_ubyte * size_bytes).from_address(address)
        view = memoryview(memory).cast("B")
        self._view: memoryview | None = view if is_writable else view.toreadonly()
        self._unmap = weakref.finalize(memory, _unmap, address, size_bytes, os.getpid())
        self._unmap.atexit = False

    @property
    def view(self) -> memoryview:
        """All bytes of the mapping.

        Raises:
            InvalidFieldError: it was closed.
        """
        if self._view is None:
            raise InvalidFieldError("the mapping was closed; map it again")
        return self._view

    @property
    def is_unmapped(self) -> bool:
        """Whether this process can no longer touch the memory."""
        return not self._unmap.alive

    def close(self) -> None:
        """Unmap now, or as soon as the last array or view of it is gone. Idempotent."""
        self._view = None


class OwnedSegment:
    """A segment with its page of generations, as the daemon holds it."""

    def __init__(self, fd: int, generations_fd: int, memory: Mapping, page: Mapping) -> None:
        self.fd = fd
        self.generations_fd = generations_fd
        self.memory = memory
        self.generations: U64 = np.frombuffer(page.view, dtype=np.uint64)
        self._page = page

    @classmethod
    def create(cls, size_bytes: int) -> OwnedSegment:
        """Return a new segment of zeros whose pages are not yet populated.

        Raises:
            InvalidFieldError: the size is no multiple of the page size.
            ArenaFullError: the machine refuses the memory or the descriptors.
        """
        if size_bytes <= 0 or size_bytes % _PAGE_BYTES:
            raise InvalidFieldError(
                f"a segment of {size_bytes} bytes: it must be a multiple of {_PAGE_BYTES}"
            )
        fd, memory = _create("kv-segment", size_bytes, is_owner_only=False)
        try:
            generations_bytes = size_bytes // GRANULE_BYTES * _GENERATION_BYTES
            generations_fd, page = _create("kv-generations", generations_bytes, is_owner_only=True)
        except BaseException:
            memory.close()
            os.close(fd)
            raise
        return cls(fd, generations_fd, memory, page)

    @property
    def address(self) -> int:
        """Address of the segment's first byte in this process."""
        return self.memory.address

    @property
    def size_bytes(self) -> int:
        """Size of the segment."""
        return self.memory.size_bytes

    @property
    def generations_bytes(self) -> int:
        """Size of the page of generations."""
        return self._page.size_bytes

    def touch_ahead(self) -> None:
        """Populate every page, of the generations too; takes about 0.3 s per GiB."""
        touch_ahead(self._page, 0, self._page.size_bytes)
        touch_ahead(self.memory, 0, self.memory.size_bytes)

    def discard(self) -> None:
        """Close, and give the pages back although others may have the memory mapped.

        Whoever still reads there finds zeros; the size stays, so nobody faults.
        """
        _punch(self.fd, self.memory.size_bytes)
        self.close()

    def close(self) -> None:
        """Close the descriptors and let go of the memory. Idempotent."""
        for fd in (self.fd, self.generations_fd):
            if fd >= 0:
                os.close(fd)
        self.fd = self.generations_fd = -1
        self.generations = np.empty(0, dtype=np.uint64)
        self.memory.close()
        self._page.close()


class OwnedTable:
    """The memory of a directory, as the daemon holds it: header and rows."""

    def __init__(self, fd: int, memory: Mapping, rows_count: int) -> None:
        self.fd = fd
        self.memory = memory
        self.rows_count = rows_count
        self.header: U64 = np.frombuffer(memory.view[:TABLE_HEADER_BYTES], dtype=np.uint64)
        # (rows, 64) uint8; view them with the dtype of `kvservice.core`.
        self.rows: U8 = _rows(memory)

    @classmethod
    def create(cls, rows_count: int) -> OwnedTable:
        """Return a live table of rows of zeros.

        Raises:
            InvalidFieldError: there are no rows.
            ArenaFullError: the machine refuses the memory or the descriptor.
        """
        if rows_count <= 0:
            raise InvalidFieldError(f"a directory of {rows_count} rows: it needs one at least")
        size_bytes = TABLE_HEADER_BYTES + rows_count * ROW_BYTES
        fd, memory = _create("kv-directory", size_bytes, is_owner_only=True)
        table = cls(fd, memory, rows_count)
        table.header[:4] = (TABLE_MAGIC, TABLE_LAYOUT_VERSION, rows_count, TABLE_LIVE)
        return table

    @property
    def address(self) -> int:
        """Address of the header in this process."""
        return self.memory.address

    @property
    def rows_address(self) -> int:
        """Address of the first row in this process."""
        return self.memory.address + TABLE_HEADER_BYTES

    def supersede(self) -> None:
        """Tell every reader that another directory has taken this one's place."""
        self.header[3] = TABLE_SUPERSEDED

    def touch_ahead(self) -> None:
        """Populate every page."""
        touch_ahead(self.memory, 0, self.memory.size_bytes)

    def close(self) -> None:
        """Close the descriptor and let go of the memory. Idempotent."""
        if self.fd >= 0:
            os.close(self.fd)
        self.fd = -1
        self.header = np.empty(0, dtype=np.uint64)
        self.rows = np.empty((0, ROW_BYTES), dtype=np.uint8)
        self.memory.close()


@dataclass(slots=True)
class MappedSegment:
    """Another process's segment, mapped here: data writable, generations read only."""

    memory: Mapping
    page: Mapping
    generations: U64

    @classmethod
    def map(cls, fd: int, size_bytes: int, generations_fd: int, generations_bytes: int) -> MappedSegment:
        """Map and close both descriptors, also when it fails.

        Raises:
            MalformedError: a descriptor is not of the declared size, or could be
                shrunk under this process.
            ArenaFullError: this process can map no more.
        """
        try:
            if generations_bytes != size_bytes // GRANULE_BYTES * _GENERATION_BYTES:
                raise MalformedError(
                    f"a segment of {size_bytes} bytes came with {generations_bytes} bytes of "
                    "generations: one u64 for each granule is due"
                )
            memory = _map_sealed(fd, size_bytes, is_writable=True)
            page = _map_sealed(generations_fd, generations_bytes, is_writable=False)
        finally:
            os.close(fd)
            os.close(generations_fd)
        return cls(memory, page, np.frombuffer(page.view, dtype=np.uint64))

    @property
    def address(self) -> int:
        """Address of the segment's first byte in this process."""
        return self.memory.address

    @property
    def generations_address(self) -> int:
        """Address of the first generation in this process."""
        return self.page.address

    @property
    def size_bytes(self) -> int:
        """Size of the segment."""
        return self.memory.size_bytes

    @property
    def is_unmapped(self) -> bool:
        """Whether this process can no longer touch the segment."""
        return self.memory.is_unmapped and self.page.is_unmapped

    def touch_ahead(self) -> None:
        """Populate this process's page tables, so that no copy pays for it later."""
        touch_ahead(self.page, 0, self.page.size_bytes)
        touch_ahead(self.memory, 0, self.memory.size_bytes)

    def close(self) -> None:
        """Let go of the memory; see `Mapping.close`. Idempotent."""
        self.generations = np.empty(0, dtype=np.uint64)
        self.memory.close()
        self.page.close()


@dataclass(slots=True)
class MappedTable:
    """A directory of another process, mapped read only.

    header: (8,) uint64; rows: (rows, 64) uint8. Both change under the reader.
    """

    memory: Mapping
    header: U64
    rows: U8

    @classmethod
    def map(cls, fd: int, rows_count: int) -> MappedTable:
        """Map and close the descriptor, also when it fails.

        Raises:
            MalformedError: the descriptor is no directory of so many rows.
            ArenaFullError: this process can map no more.
        """
        try:
            size_bytes = TABLE_HEADER_BYTES + rows_count * ROW_BYTES
            memory = _map_sealed(fd, size_bytes, is_writable=False)
        finally:
            os.close(fd)
        header: U64 = np.frombuffer(memory.view[:TABLE_HEADER_BYTES], dtype=np.uint64)
        if header[:3].tolist() != [TABLE_MAGIC, TABLE_LAYOUT_VERSION, rows_count]:
            raise MalformedError(
                f"no directory of {rows_count} rows in layout {TABLE_LAYOUT_VERSION}: its header "
                f"reads {header[:3].tolist()}"
            )
        return cls(memory, header, _rows(memory))

    @property
    def rows_count(self) -> int:
        """Number of rows."""
        return len(self.rows)

    @property
    def address(self) -> int:
        """Address of the header in this process."""
        return self.memory.address

    @property
    def rows_address(self) -> int:
        """Address of the first row in this process."""
        return self.memory.address + TABLE_HEADER_BYTES

    @property
    def is_live(self) -> bool:
        """Whether no other directory has taken this one's place."""
        return bool(self.header[3] == TABLE_LIVE)

    def touch_ahead(self) -> None:
        """Populate this process's page tables."""
        touch_ahead(self.memory, 0, self.memory.size_bytes)

    def close(self) -> None:
        """Let go of the memory; see `Mapping.close`. Idempotent."""
        self.header = np.zeros(8, dtype=np.uint64)
        self.rows = np.empty((0, ROW_BYTES), dtype=np.uint8)
        self.memory.close()


def touch_ahead(mapping: Mapping, offset_bytes: int, size_bytes: int) -> None:
    """Populate the pages of a range, in steps, without changing a byte.

    A first touch inside a copy makes the copy four times slower. The GIL is
    released meanwhile; run it on a thread that can wait.

    Raises:
        InvalidFieldError: the range is not within the mapping, or it was closed.
        ArenaFullError: the machine has no memory left for it.
    """
    view = mapping.view  # Also keeps the memory mapped until this returns.
    if not 0 <= offset_bytes <= offset_bytes + size_bytes <= mapping.size_bytes:
        raise InvalidFieldError(f"cannot touch {size_bytes} bytes at {offset_bytes} of {mapping.size_bytes}")
    advice = _MADV_POPULATE_WRITE if mapping.is_writable else _MADV_POPULATE_READ
    start = offset_bytes // _PAGE_BYTES * _PAGE_BYTES
    stop = offset_bytes + size_bytes
    for step in range(start, stop, TOUCH_STEP_BYTES):
        step_bytes = min(TOUCH_STEP_BYTES, stop - step)
        if _libc.madvise(mapping.address + step, step_bytes, advice) == 0:
            continue
        code = ctypes.get_errno()
        if code != errno.EINVAL:
            raise _no_memory(code, f"cannot populate {step_bytes} bytes")
        # A kernel before 5.14. A read allocates the page, and leaves a cheap fault
        # to the first write; a write could undo what another process has written.
        np.frombuffer(view[step : step + step_bytes], dtype=np.uint8)[::_PAGE_BYTES].max()


def _create(name: str, size_bytes: int, *, is_owner_only: bool) -> tuple[int, Mapping]:
    """Return a sealed memfd and the owner's writable mapping of it."""
    seals = _SIZE_SEALS | fcntl.F_SEAL_SEAL | (_F_SEAL_FUTURE_WRITE if is_owner_only else 0)
    try:
        fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    except OSError as error:
        raise _no_memory(error.errno or 0, f"cannot create {name}") from error
    try:
        os.ftruncate(fd, size_bytes)
        memory = Mapping(fd, size_bytes, is_writable=True)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
    except BaseException:
        os.close(fd)
        raise
    return fd, memory


def _map_sealed(fd: int, size_bytes: int, *, is_writable: bool) -> Mapping:
    """Map a descriptor that another process sent, after a look at what it is."""
    try:
        actual_bytes = os.fstat(fd).st_size
        seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
    except OSError as error:
        raise MalformedError("the descriptor that came is no memfd") from error
    if size_bytes <= 0 or actual_bytes != size_bytes:
        raise MalformedError(f"a memfd of {actual_bytes} bytes was declared as {size_bytes}")
    if not seals & fcntl.F_SEAL_SHRINK:
        raise MalformedError("the memfd is not sealed against shrinking: it could fault us later")
    return Mapping(fd, size_bytes, is_writable=is_writable)


def _rows(memory: Mapping) -> U8:
    rows: U8 = np.frombuffer(memory.view[TABLE_HEADER_BYTES:], dtype=np.uint8)
    return rows.reshape(-1, ROW_BYTES)


def _no_memory(code: int, message: str) -> KvError:
    return ArenaFullError(f"{message}: {os.strerror(code)}", retry_after_ms=1000)


def _unmap(address: int, size_bytes: int, owner_pid: int) -> None:
    # A child of a fork has other memory at this address, or none.
    if os.getpid() == owner_pid:
        _libc.munmap(address, size_bytes)


def _punch(fd: int, size_bytes: int) -> None:
    """Free all pages of a memfd and keep its size."""
    mode = _FALLOC_KEEP_SIZE | _FALLOC_PUNCH_HOLE
    if _libc.fallocate(fd, mode, 0, size_bytes) != 0:
        raise _no_memory(ctypes.get_errno(), f"cannot free {size_bytes} bytes")
