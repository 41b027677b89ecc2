"""From the blocks of a transfer to its pieces: what every transport needs first."""

from __future__ import annotations

import numpy as np

from kvservice.core.errors import InvalidFieldError
from kvservice.core.slots import U64
from kvservice.ports.transport import Pieces, Transfer


def check_transfer(transfer: Transfer) -> None:
    """Hold the arrays of a transfer to each other, since native code trusts them.

    Raises:
        InvalidFieldError: numbers of blocks differ, or the pieces of a block are
            not as long as the block.
    """
    pieces = transfer.pieces
    blocks_count = len(transfer.lengths)
    sums = transfer.checksums
    if not (
        blocks_count == pieces.blocks_count == len(transfer.slot_indexes) == len(transfer.slots)
        and len(pieces.addresses) == len(pieces.lengths)
        and (sums is None or len(sums) == blocks_count)
    ):
        raise InvalidFieldError(
            f"a transfer of {blocks_count} lengths names {len(transfer.slots)} slots, "
            f"{len(transfer.slot_indexes)} slot indexes and {pieces.blocks_count} blocks of pieces"
        )
    sizes = bytes_per_block(pieces)
    if sizes is transfer.lengths or np.array_equal(sizes, transfer.lengths):
        return
    differs = np.flatnonzero(sizes != transfer.lengths)
    if len(differs):
        block = int(differs[0])
        raise InvalidFieldError(
            f"the pieces of block {block} are {int(bytes_per_block(pieces)[block])} bytes, "
            f"the block is {int(transfer.lengths[block])}"
        )


def bytes_per_block(pieces: Pieces) -> U64:
    """Return (blocks,) uint64: the sum of the lengths of each block's pieces.

    Raises:
        InvalidFieldError: a block has no piece, or the counts do not add up.
    """
    if pieces.counts is None:
        return pieces.lengths
    stops = np.cumsum(pieces.counts, dtype=np.int64)
    if not len(stops):
        return np.empty(0, dtype=np.uint64)
    if stops[-1] != len(pieces.lengths) or not pieces.counts.all():
        raise InvalidFieldError(
            f"the counts of {len(stops)} blocks add up to {int(stops[-1])} pieces of "
            f"{len(pieces.lengths)}; every block needs one at least"
        )
    sums: U64 = np.add.reduceat(pieces.lengths, stops - pieces.counts)
    return sums


def slot_addresses_per_piece(slot_addresses: U64, pieces: Pieces) -> U64:
    """Return (pieces,) uint64: where in its slot each piece belongs.

    A slot holds the pieces of its block one after the other.
    """
    if pieces.counts is None:
        return slot_addresses
    starts = np.cumsum(pieces.lengths, dtype=np.uint64) - pieces.lengths
    first_pieces = np.cumsum(pieces.counts, dtype=np.int64) - pieces.counts
    # Unsigned arithmetic wraps, and wraps back: only the difference matters.
    shifts = slot_addresses - starts[first_pieces]
    addresses: U64 = np.repeat(shifts, pieces.counts) + starts
    return addresses
