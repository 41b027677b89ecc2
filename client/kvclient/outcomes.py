"""Arrays of outcomes, and prefixes of them."""

from __future__ import annotations

import numpy as np

from kvclient.results import GetResult
from kvservice.core.outcomes import ItemOutcome
from kvservice.core.slots import U8


def from_found(found: U8) -> U8:
    """Return HIT where `found` is 1 and MISS where it is 0, (keys,) uint8."""
    return np.where(found, np.uint8(ItemOutcome.HIT), np.uint8(ItemOutcome.MISS))


def prefix_count(found: U8) -> int:
    """Return how many lead without a 0."""
    missing = np.flatnonzero(found == 0)
    return int(missing[0]) if len(missing) else len(found)


def stored(reserved: U8) -> U8:
    """Return the outcomes of a put: what was granted is DONE once committed."""
    became = reserved.copy()
    became[became == ItemOutcome.GRANTED] = ItemOutcome.DONE
    return became


def of_prefix(keys_count: int, hits_count: int, bytes_moved: int) -> GetResult:
    """Return the result of reading the first `hits_count` of some keys."""
    became = np.full(keys_count, ItemOutcome.MISS, np.uint8)
    became[:hits_count] = ItemOutcome.HIT
    return GetResult(became, hits_count, bytes_moved)
