"""From the pieces of a transfer to the fewest one-sided operations on the slots of an arena."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kvservice.core.errors import MalformedError
from kvservice.core.slots import U32, U64
from kvservice.ports.transport import Pieces
from kvservice.transports.blockmap import slot_addresses_per_piece

OPERATION_BYTES_MAX = 4 << 20
"""Long enough that an operation's cost is its bytes, short enough that a deadline is kept to within a
few milliseconds and that several lanes get their share."""


@dataclass(frozen=True, slots=True)
class Operations:
    """Parallel arrays, (operations,): where in the arena, where in this process, and how much.

    segment_indexes: uint32; offsets, addresses, lengths: uint64, bytes.
    """

    segment_indexes: U32
    offsets: U64
    addresses: U64
    lengths: U64


def operations_of(slot_segments: U32, slot_offsets: U64, pieces: Pieces) -> Operations:
    """Return the operations between slots and the pieces of their blocks.

    slot_segments: (slots,) uint32. slot_offsets: (slots,) uint64, bytes from the beginning of the segment.

    Raises:
        MalformedError: there is not one slot for each block.
    """
    if not len(slot_segments) == len(slot_offsets) == pieces.blocks_count:
        raise MalformedError(f"{len(slot_offsets)} slots were granted for {pieces.blocks_count} blocks")
    per_piece = Operations(
        slot_segments if pieces.counts is None else np.repeat(slot_segments, pieces.counts),
        slot_addresses_per_piece(slot_offsets, pieces),
        pieces.addresses,
        pieces.lengths,
    )
    if not pieces.lengths.all():
        per_piece = _take(per_piece, pieces.lengths != 0)
    return _split(_merged(per_piece))


def _merged(some: Operations) -> Operations:
    """Make one of neighbours that are adjacent on both sides, as the slots of one batch often are."""
    lengths = some.lengths
    is_start = np.ones(len(lengths), np.bool_)
    is_start[1:] = some.segment_indexes[1:] != some.segment_indexes[:-1]
    is_start[1:] |= some.offsets[1:] - some.offsets[:-1] != lengths[:-1]
    is_start[1:] |= some.addresses[1:] - some.addresses[:-1] != lengths[:-1]
    if is_start.all():
        return some
    starts = np.flatnonzero(is_start)
    return Operations(
        some.segment_indexes[starts],
        some.offsets[starts],
        some.addresses[starts],
        np.add.reduceat(lengths, starts),
    )


def _split(some: Operations) -> Operations:
    """Cut what is longer than one operation should be."""
    lengths = some.lengths
    if not len(lengths) or int(lengths.max()) <= OPERATION_BYTES_MAX:
        return some
    counts = (-(-lengths.astype(np.int64) // OPERATION_BYTES_MAX)).astype(np.int64)
    owners = np.repeat(np.arange(len(lengths)), counts)
    numbers = np.arange(len(owners)) - np.repeat(np.cumsum(counts) - counts, counts)
    done = (numbers * OPERATION_BYTES_MAX).astype(np.uint64)
    left = lengths[owners] - done
    return Operations(
        some.segment_indexes[owners],
        some.offsets[owners] + done,
        some.addresses[owners] + done,
        np.minimum(left, np.uint64(OPERATION_BYTES_MAX)),
    )


def _take(some: Operations, chosen: np.typing.NDArray[np.bool_]) -> Operations:
    return Operations(
        some.segment_indexes[chosen], some.offsets[chosen], some.addresses[chosen], some.lengths[chosen]
    )
