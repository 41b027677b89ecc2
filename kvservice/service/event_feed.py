"""Follows the history of a tenant for those who watch it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from kvproto.kv.v1 import event_service_pb2
from kvservice.core.errors import StaleIncarnationError
from kvservice.engine.coordinator import Coordinator
from kvservice.service import mapping

BATCH_COUNT = 256
"""Events in one message at most; each carries the keys of a whole batch."""


class EventFeed:
    """Wakes watchers when their tenant has news."""

    def __init__(self, coordinator: Coordinator, incarnation: bytes) -> None:
        self._coordinator = coordinator
        self._incarnation = incarnation
        self._waiting: dict[str, set[asyncio.Event]] = {}

    def wake(self, tenant: str) -> None:
        """There is news for a tenant; called on the event loop."""
        for waiter in self._waiting.get(tenant, ()):
            waiter.set()

    async def follow(
        self, tenant: str, request: event_service_pb2.WatchEventsRequest
    ) -> AsyncIterator[event_service_pb2.WatchEventsResponse]:
        """Yield the events of a tenant from the request's point on, for ever.

        Raises:
            EventsLostError: the point is older than the history kept.
            StaleIncarnationError: it is of another life of the daemon.
        """
        if request.daemon_incarnation not in {b"", self._incarnation}:
            raise StaleIncarnationError(
                f"daemon_incarnation {request.daemon_incarnation.hex()} is not this life of the "
                "daemon; list anew and follow from now"
            )
        sequence = self._coordinator.last_sequence(tenant)
        if request.HasField("after_sequence"):
            sequence = request.after_sequence
        news = asyncio.Event()
        self._waiting.setdefault(tenant, set()).add(news)
        try:
            while True:
                news.clear()
                facts = self._coordinator.facts_after(tenant, sequence, limit_count=BATCH_COUNT)
                if facts:
                    sequence = facts[-1].sequence
                    yield event_service_pb2.WatchEventsResponse(
                        daemon_incarnation=self._incarnation,
                        events=[mapping.event_message(fact) for fact in facts],
                    )
                else:
                    await news.wait()
        finally:
            self._waiting[tenant].discard(news)
