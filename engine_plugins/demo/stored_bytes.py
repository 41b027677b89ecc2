"""Alter what a daemon has stored, behind its back: the fault that checksums are for.

Any process of the daemon's user can do it; nothing of the project is needed.
"""

from __future__ import annotations

import mmap
import os
from pathlib import Path

import numpy as np

# One byte in so many: more than one in each layer of each block, and quick.
EVERYWHERE_STRIDE_BYTES = 61


def alter(daemon_pid: int, *, segment_bytes: int, stride_bytes: int = EVERYWHERE_STRIDE_BYTES) -> int:
    """Change one byte in `stride_bytes` of the daemon's segments; return the number of segments.

    segment_bytes: size of a segment, which tells segments from the daemon's other shared memory.
    """
    found = set()
    for link in Path(f"/proc/{daemon_pid}/fd").iterdir():
        try:
            status = link.stat()
            is_segment = link.readlink().name.startswith("memfd:") and status.st_size == segment_bytes
        except FileNotFoundError:
            continue  # a descriptor that was closed meanwhile
        # The daemon may hold several descriptors of one segment; altered twice, it would be as before.
        if is_segment and status.st_ino not in found:
            found.add(status.st_ino)
            _alter_file(link, segment_bytes, stride_bytes)
    return len(found)


def _alter_file(path: Path, size_bytes: int, stride_bytes: int) -> None:
    descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        with mmap.mmap(descriptor, size_bytes) as memory:
            values = np.frombuffer(memory, np.uint8)
            values[::stride_bytes] ^= 0x55
            del values  # an export would keep the mapping open
    finally:
        os.close(descriptor)
