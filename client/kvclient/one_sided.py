"""The endpoint by which this process lends and reads memory, made when it is first needed."""

from __future__ import annotations

import threading

from kvservice.core.errors import NoWayError, PeerUnavailableError
from kvservice.ports.lanes import LaneReport
from kvservice.ports.one_sided import OneSided
from kvservice.transports.one_sided import EndpointSettings, make_endpoint, usable_transports


class LazyOneSided:
    """Thread-safe. Nothing is loaded before `endpoint` is asked for.

    endpoint: one that is there already, for tests and embedded use; closed with this.
    """

    def __init__(self, settings: EndpointSettings, endpoint: OneSided | None = None) -> None:
        self._settings = settings
        self._endpoint = endpoint
        self._usable: list[str] | None = None
        self._lock = threading.Lock()
        self._is_closed = False

    def transports(self) -> list[str]:
        """Return the transports by which this process can read others' memory."""
        if self._endpoint is not None:
            return [self._endpoint.transport]
        if self._usable is None:
            # Looked for once: it may take milliseconds, and every claim asks.
            self._usable = usable_transports(self._settings)
        return self._usable

    def endpoint(self) -> OneSided:
        """Return the endpoint.

        Raises:
            NoWayError: no one-sided transport is usable here, and why.
        """
        with self._lock:
            if self._is_closed:
                raise PeerUnavailableError("the client was closed; connect a new one")
            if self._endpoint is None:
                self._endpoint = make_endpoint(self._settings)
            if self._endpoint is None:
                raise NoWayError("this process reads and lends no memory: the settings name no transport")
            return self._endpoint

    def lanes(self) -> tuple[LaneReport, ...]:
        """Return what the lanes did lately; none where no endpoint was needed yet."""
        endpoint = self._endpoint
        return () if endpoint is None else endpoint.lanes()

    def close(self) -> None:
        """Let go of peers and lent memory. Idempotent."""
        with self._lock:
            self._is_closed = True
            endpoint = self._endpoint
        if endpoint is not None:
            endpoint.close()
