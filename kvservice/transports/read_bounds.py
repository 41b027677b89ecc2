"""What every one-sided transport holds a read to before it posts any of it."""

from __future__ import annotations

import numpy as np

from kvservice.core.errors import InvalidFieldError
from kvservice.core.slots import U64
from kvservice.ports.one_sided import RemoteRead


def check_read(read: RemoteRead) -> None:
    """Hold each operation to the bounds of its segment: a bad address can crash the peer.

    Raises:
        InvalidFieldError: an operation leaves its segment, or the arrays disagree.
    """
    count = len(read.lengths)
    if not count == len(read.segment_indexes) == len(read.offsets) == len(read.addresses):
        raise InvalidFieldError(
            f"a read of {count} lengths has {len(read.segment_indexes)} segment indexes, "
            f"{len(read.offsets)} offsets and {len(read.addresses)} addresses"
        )
    if not count:
        return
    highest = int(read.segment_indexes.max())
    if highest >= len(read.segments):
        raise InvalidFieldError(f"a read names segment {highest} of {len(read.segments)}")
    sizes: U64 = np.array([segment.size_bytes for segment in read.segments], np.uint64)
    here = sizes[read.segment_indexes]
    # Subtracted rather than added: nothing wraps.
    outside = (read.lengths > here) | (read.offsets > here - np.minimum(read.lengths, here))
    if outside.any():
        first = int(outside.argmax())
        raise InvalidFieldError(
            f"operation {first} reads {int(read.lengths[first])} bytes from byte {int(read.offsets[first])} "
            f"of a segment of {int(here[first])}; it was not posted, and neither were the others"
        )
