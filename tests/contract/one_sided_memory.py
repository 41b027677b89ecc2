"""What lenders of the one-sided contract lend; light, for those that are processes of their own."""

from __future__ import annotations

import numpy as np

SEGMENT_SIZES_BYTES = (1 << 20, 4096, 3 * 65536 + 17)
"""Long, small, and of an odd size."""


def content(seed: int, index: int) -> np.ndarray:
    """Return what a lender's segment holds, (bytes,) uint8."""
    generator = np.random.default_rng((seed, index))
    return generator.integers(0, 256, SEGMENT_SIZES_BYTES[index], np.uint8)
