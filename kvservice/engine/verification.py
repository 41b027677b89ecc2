"""Holding stored blocks to their checksums, where they lie."""

from __future__ import annotations

import logging

import numpy as np

from kvservice import native
from kvservice.core.checksums import differing
from kvservice.core.errors import BatchSizeError
from kvservice.core.events import Discard, Lookup
from kvservice.core.limits import VERIFIED_BYTES_LIMIT, VERIFIED_KEYS_LIMIT
from kvservice.core.outcomes import ItemOutcome
from kvservice.core.row_table import KEY_BYTES
from kvservice.core.slots import U64
from kvservice.engine.arena import Arena
from kvservice.engine.coordinator import Coordinator

_log = logging.getLogger(__name__)


class Verifier:
    """Looks at blocks that somebody has read wrong bytes of."""

    def __init__(self, coordinator: Coordinator, arena: Arena) -> None:
        self._coordinator = coordinator
        self._arena = arena

    def verify(self, token: bytes, spaces: tuple[int, ...], keys: bytes) -> bytes:
        """Return HIT or MISS for each packed key, a byte each; what is damaged is a miss from now on.

        Raises:
            BatchSizeError: more keys than one call looks at.
            InvalidFieldError: keys is no multiple of 32 bytes.
            KvError: the state refused the keys or the spaces.
        """
        count = self._coordinator.look(lambda state, _: state.books.keys_count(keys))
        if count > VERIFIED_KEYS_LIMIT:
            raise BatchSizeError(
                f"keys has {count} items; at most {VERIFIED_KEYS_LIMIT} are verified in one call: "
                "split the batch"
            )
        # One by one: a lookup says where a prefix is, and what is damaged breaks a chain anywhere.
        singles = [keys[start : start + KEY_BYTES] for start in range(0, len(keys), KEY_BYTES)]
        return bytes(self._verify_one(token, spaces, key, count) for key in singles)

    def _verify_one(self, token: bytes, spaces: tuple[int, ...], key: bytes, count: int) -> ItemOutcome:
        answer = self._coordinator.submit(Lookup(token, spaces, key, None, is_locating=True))
        slots = answer.slots
        if slots is None or slots.checksums is None:
            return ItemOutcome.MISS
        lengths: U64 = self._coordinator.look(
            lambda state, _: np.array(
                [state.books.spaces.get(space).block_bytes for space in spaces], dtype=np.uint64
            )
        )
        if count > 1 and count * int(lengths.sum()) > VERIFIED_BYTES_LIMIT:
            raise BatchSizeError(
                f"keys has {count} items of {int(lengths.sum())} bytes each; at most "
                f"{VERIFIED_BYTES_LIMIT} bytes are verified in one call, or one key: split the batch"
            )
        sums = np.zeros(len(slots), dtype=np.uint32)
        native.checksum_blocks(self._arena.addresses(slots.segments, slots.granules), lengths, None, sums)
        if not len(differing(sums, slots.checksums)):
            return ItemOutcome.HIT
        # All parts go: one without the other is no block. What was rewritten while we looked
        # has another generation, and stays.
        discarded = self._coordinator.submit(Discard(token, slots))
        if discarded:
            _log.error("a stored block was damaged and is dropped", extra={"block_key": key.hex()})
        return ItemOutcome.MISS
