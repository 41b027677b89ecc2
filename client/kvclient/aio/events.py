"""What happens to blocks, as a stream."""

from __future__ import annotations

from types import TracebackType
from typing import Self

from kvclient._backends.aio import EventSource
from kvproto.kv.v1 import event_service_pb2


class EventStream:
    """Events of the tenant, in order and without gaps; `KvClient.watch_events` makes it."""

    def __init__(self, source: EventSource[event_service_pb2.WatchEventsResponse]) -> None:
        self._source = source

    async def next(self, timeout_s: float) -> event_service_pb2.WatchEventsResponse | None:
        """Return the next events, or None when nothing happened in time.

        Raises:
            EventsLostError: the point to resume from is older than the history kept.
            StaleIncarnationError: it is of another life of the daemon.
            LimitReachedError: this reader fell behind.
            PeerUnavailableError: the connection was lost; watch again from the last sequence.
        """
        return await self._source.next(timeout_s)

    async def close(self) -> None:
        """Follow no more. Idempotent."""
        await self._source.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()
