"""Where the slots of a batch are, as parallel arrays."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

GRANULE_BYTES = 512
"""Offsets in a segment are multiples of this. 512 is the smallest unit of direct
I/O, a multiple of the cache line, and lets a u32 of granules address 2 TiB."""

U8 = npt.NDArray[np.uint8]
U32 = npt.NDArray[np.uint32]
U64 = npt.NDArray[np.uint64]
I64 = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Slots:
    """Slots of a capability, key-major: one entry per (key, part).

    segments: (slots,) uint32, number of the segment.
    granules: (slots,) uint32, offset in the segment in units of GRANULE_BYTES.
    generations: (slots,) uint64, generation when the capability was given.
    checksums: (slots,) uint32, as stored (`core.checksums`); None in a reservation.
    """

    segments: U32
    granules: U32
    generations: U64
    checksums: U32 | None = None

    def __len__(self) -> int:
        """Return the number of slots."""
        return len(self.segments)

    def take(self, indexes: I64 | slice) -> Slots:
        """Return the slots at `indexes`, in that order."""
        checksums = None if self.checksums is None else self.checksums[indexes]
        return Slots(self.segments[indexes], self.granules[indexes], self.generations[indexes], checksums)
