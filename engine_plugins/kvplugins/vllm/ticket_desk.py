"""The tickets that requests bring, from their arrival until a load spends them or they are given back."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass

from kvplugins.vllm.scheduler_handoffs import Handoffs
from kvplugins.vllm.ticket import Ticket

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class TicketCounts:
    """Totals since the start.

    tickets_spent, tickets_returned: tickets by which a load was begun, and those that were not needed.
    tickets_refused: tickets that are not for this engine, or for no engine.
    """

    tickets_spent: int = 0
    tickets_returned: int = 0
    tickets_refused: int = 0


class TicketDesk:
    """Used by vLLM's scheduler thread alone."""

    def __init__(self, handoffs: Handoffs) -> None:
        self.counts = TicketCounts()
        self._handoffs = handoffs
        # Of tickets that some request has: the samples of one prompt all bring the same.
        self._held_handoffs: set[int] = set()

    def take(self, request_id: str, params: Mapping[str, object] | None) -> Ticket | None:
        """Read a request's ticket; one that is no good says nothing against the request."""
        try:
            ticket = Ticket.of(params)
        except ValueError as error:
            self.counts.tickets_refused += 1
            logger.warning("request %s: no ticket of ours (%s)", request_id, error)
            return None
        if ticket is None:
            return None
        if not self._held_handoffs.isdisjoint(ticket.handoff_ids) or not self._handoffs.is_ours(ticket):
            self.counts.tickets_refused += 1
            logger.debug("request %s: its ticket is not for this engine", request_id)
            return None
        self._held_handoffs.update(ticket.handoff_ids)
        return ticket

    def spend(self, ticket: Ticket) -> None:
        """Note that a load has been begun by it."""
        self.counts.tickets_spent += 1

    def give_back(self, ticket: Ticket, reason: str) -> None:
        """Let the other engine have its blocks back: no load will be begun."""
        self.counts.tickets_returned += 1
        self._held_handoffs.difference_update(ticket.handoff_ids)
        self._handoffs.reject(ticket, reason)

    def load_ended(self, ticket: Ticket, *, has_lost_blocks: bool) -> None:
        """Forget a spent ticket. A load that failed may not have claimed what waits for it."""
        self._held_handoffs.difference_update(ticket.handoff_ids)
        if has_lost_blocks:
            self._handoffs.reject(ticket, "the load failed")
