"""Bulk copies, checksums and row searches: in C where built, else in NumPy.

Addresses are plain integers in uint64 arrays; whoever calls owns that memory and keeps
it mapped until the call returns. Source and target of a copy must not overlap. Arrays
are one-dimensional, contiguous and of the exact item type; a wrong one raises
ValueError with its name. The C functions release the GIL.

A *block* is `piece_counts[i]` consecutive pieces (None: one each). Pieces of
`streaming_threshold_bytes` and more go past the cache. Checksums are CRC-32C, of the
bytes as delivered, taken in the same pass as the copy.
"""

from __future__ import annotations

import platform

try:
    from kvservice.native._native import (
        STREAMING_THRESHOLD_BYTES,
        buffer_address,
        checksum_blocks,
        copy_blocks,
        copy_rows,
        copy_slots,
        crc32c,
        find_rows,
        insert_rows,
        read_rows,
        remove_rows,
    )

    _REASON = ""
except ImportError as missing:
    from kvservice.native.fallback import (
        STREAMING_THRESHOLD_BYTES,
        buffer_address,
        checksum_blocks,
        copy_blocks,
        copy_rows,
        copy_slots,
        crc32c,
        find_rows,
        insert_rows,
        read_rows,
        remove_rows,
    )

    _REASON = f"the C extension is not there (was it built without a compiler?): {missing}"

IS_NATIVE = _REASON == ""
"""Whether the functions are those of the C extension."""

DIRECTORY_IS_SAFE = IS_NATIVE or platform.machine() in {"x86_64", "AMD64"}
"""Whether `find_rows` and `read_rows` may look at a table that another process changes:
the fallback has no fences, and x86-64 alone keeps loads, and stores, in order without."""

__all__ = [
    "DIRECTORY_IS_SAFE",
    "IS_NATIVE",
    "STREAMING_THRESHOLD_BYTES",
    "buffer_address",
    "checksum_blocks",
    "copy_blocks",
    "copy_rows",
    "copy_slots",
    "crc32c",
    "find_rows",
    "insert_rows",
    "read_rows",
    "remove_rows",
    "why_not_native",
]


def why_not_native() -> str:
    """Say why the fallback serves; empty when it does not."""
    return _REASON
