"""Outcome codes of the items of a batch; the numbers of `kv.v1.ItemOutcome`."""

from __future__ import annotations

from enum import IntEnum


class ItemOutcome(IntEnum):
    """What became of one item; batches carry one byte for each."""

    UNSPECIFIED = 0
    HIT = 1
    MISS = 2
    PENDING = 3
    GRANTED = 4
    ALREADY_COMMITTED = 5
    DONE = 6
    ALREADY_RELEASED = 7
    ALREADY_EXPIRED = 8
    ALREADY_ABORTED = 9
    UNKNOWN = 10
    ALREADY_COMPLETED = 11
    ALREADY_REJECTED = 12
