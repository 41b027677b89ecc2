"""Hands over what was prefilled here: from the end of a request until nobody reads its blocks any more.

vLLM asks once, when a request has finished, whether its blocks may be freed. Where they are on offer the
answer is no, and they are freed when a worker reports the request as sent: the next step's plan tells the
workers of those that are released. vLLM goes on making steps while it has such requests, also without any
other.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from kvplugins.vllm.scheduler_handoffs import Handoffs, Offer
from kvplugins.vllm.scheduler_side import Request
from kvplugins.vllm.ticket import asks_for_handoff

# Asking costs some microseconds each, in every step.
OFFERS_PER_STEP_MAX = 256


@dataclass(slots=True)
class PrefillCounts:
    """Totals since the start.

    handoffs_offered, blocks_offered: requests whose blocks were offered, and their blocks, of one rank.
    handoffs_unoffered: requests that asked for it and were not offered: no service, or nobody could read.
    handoffs_released: offered requests whose blocks were given back to vLLM.
    """

    handoffs_offered: int = 0
    blocks_offered: int = 0
    handoffs_unoffered: int = 0
    handoffs_released: int = 0


class PrefillSide:
    """The requests that have finished here and wait elsewhere. Used by vLLM's scheduler thread alone."""

    def __init__(self, *, handoffs: Handoffs, block_tokens: int) -> None:
        self.counts = PrefillCounts()
        self._handoffs = handoffs
        self._block_tokens = block_tokens
        self._offers: dict[str, Offer] = {}

    @property
    def open_count(self) -> int:
        """Number of requests whose blocks vLLM keeps for others."""
        return len(self._offers)

    def finished(
        self, request: Request, block_ids: Sequence[int], *, is_whole: bool
    ) -> tuple[bool, dict[str, object] | None]:
        """Offer the prompt's whole blocks; return whether vLLM must keep them, and what to tell the client.

        block_ids: all blocks of the request.
        is_whole: whether the request came to its own end, and was not aborted.
        """
        if not is_whole or not asks_for_handoff(request.kv_transfer_params):
            return False, None
        tokens_count = min(request.num_computed_tokens, request.num_prompt_tokens)
        count = min(tokens_count // self._block_tokens, len(request.block_hashes), len(block_ids))
        if not count:
            return False, None  # A prompt shorter than a block: there is nothing to hand over.
        offer = self._handoffs.offer(request.block_hashes[:count], block_ids[:count])
        if offer is None:
            self.counts.handoffs_unoffered += 1
            return False, None
        params = None
        if offer.ticket is None:
            self.counts.handoffs_unoffered += 1
        else:
            params = offer.ticket.params()
            self.counts.handoffs_offered += 1
            self.counts.blocks_offered += count
        # Last: vLLM takes it for a bug of its own to be given back what it was not told to keep.
        self._offers[request.request_id] = offer
        return True, params

    def take_released(self) -> list[str]:
        """Return requests whose blocks may be used again, once each; of very many offers, some at a time."""
        asked = list(itertools.islice(self._offers.items(), OFFERS_PER_STEP_MAX))
        # Nothing is forgotten before all have been asked, so that a fault here costs a step and no block.
        released = {request_id for request_id, offer in asked if offer.is_released()}
        for request_id, offer in asked:
            del self._offers[request_id]
            if request_id not in released:
                self._offers[request_id] = offer  # behind those that have not been asked
            elif offer.ticket is not None:
                self.counts.handoffs_released += 1
        return sorted(released)
