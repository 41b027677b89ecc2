"""Arrays of outcomes, and prefixes of them."""

from __future__ import annotations

import functools

import numpy as np

from kvclient.results import GetResult
from kvservice.core.outcomes import ItemOutcome
from kvservice.core.slots import I64, U8

# Bound once: looking a member up in its enumeration costs more than the array it goes into.
_HIT, _MISS = np.uint8(ItemOutcome.HIT), np.uint8(ItemOutcome.MISS)
_GRANTED, _DONE = np.uint8(ItemOutcome.GRANTED), np.uint8(ItemOutcome.DONE)


def from_found(found: U8) -> U8:
    """Return HIT where `found` is 1 and MISS where it is 0, (keys,) uint8."""
    return np.where(found, _HIT, _MISS)


def prefix_count(found: U8) -> int:
    """Return how many lead without a 0."""
    first = int(found.argmin())
    return len(found) if found[first] else first


def stored(reserved: U8) -> U8:
    """Return the outcomes of a put: what was granted is DONE once committed."""
    became: U8 = np.where(reserved == _GRANTED, _DONE, reserved)
    return became


def granted(reserved: U8) -> I64:
    """Return the indexes of the keys that a reservation grants."""
    indexes: I64 = (reserved == _GRANTED).nonzero()[0]
    return indexes


def all_hit(keys_count: int, bytes_moved: int) -> GetResult:
    """Return the result of a read of which every key is in place; its outcomes are read-only."""
    return GetResult(_hits(keys_count), keys_count, bytes_moved)


@functools.lru_cache(maxsize=64)
def _hits(keys_count: int) -> U8:
    """(keys,) uint8, all HIT; shared, so read-only."""
    became = np.full(keys_count, _HIT, np.uint8)
    became.flags.writeable = False
    return became


def of_prefix(keys_count: int, hits_count: int, bytes_moved: int) -> GetResult:
    """Return the result of reading the first `hits_count` of some keys."""
    if hits_count == keys_count:
        return all_hit(keys_count, bytes_moved)
    became = np.full(keys_count, _MISS, np.uint8)
    became[:hits_count] = _HIT
    return GetResult(became, hits_count, bytes_moved)
