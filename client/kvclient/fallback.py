"""Reads by a faster transport while it works, and by a plain one when it does not."""

from __future__ import annotations

import dataclasses
import logging
import threading
import time
from collections.abc import Callable

from kvservice.core.errors import (
    DeadlineError,
    KvError,
    NoWayError,
    PeerUnavailableError,
    UnknownMethodError,
)
from kvservice.ports.transport import Transfer, Transport, TransportCapabilities

FIRST_SHARE = 0.5
"""Of a read's time, for the faster transport: what is left is enough to read once more."""

PAUSE_FIRST_S = 1.0
PAUSE_LIMIT_S = 60.0
PAUSE_FACTOR = 2.0

_WIRE_ERRORS = (NoWayError, PeerUnavailableError, DeadlineError, UnknownMethodError)
"""What says that the way failed, and nothing of the capability."""

_log = logging.getLogger("kvclient")


class FallbackTransport:
    """Thread-safe. Writes go by the plain transport.

    first: tried for reads, unless it failed a little while ago.
    second: None where there is nothing to fall back to.
    is_worth_it: asked once, at the first read: whether `first` is the faster one between these two hosts.
    """

    def __init__(self, first: Transport, second: Transport | None, is_worth_it: Callable[[], bool]) -> None:
        self._first = first
        self._second = second
        self._is_worth_it = is_worth_it
        self._lock = threading.Lock()
        self._is_faster: bool | None = None
        self._pause_s = PAUSE_FIRST_S
        self._resume_s = 0.0
        self._is_out = False
        self._is_closed = False
        self.fallbacks_count = 0

    @property
    def capabilities(self) -> TransportCapabilities:
        """Those of the transport that is tried first."""
        return self._first.capabilities

    def write(self, transfer: Transfer) -> None:
        """See Transport."""
        if self._second is None:
            raise NoWayError(
                "the daemon has no tcp data plane, and one-sided writes are for its own host alone"
            )
        self._second.write(transfer)

    def read(self, transfer: Transfer) -> None:
        """See Transport."""
        second = self._second
        if second is None:
            self._first.read(transfer)
            return
        if not self._is_due():
            second.read(transfer)
            return
        begun_s = time.monotonic()
        try:
            self._first.read(dataclasses.replace(transfer, timeout_s=transfer.timeout_s * FIRST_SHARE))
        except _WIRE_ERRORS as error:
            if self._is_closed:
                raise
            self._fell_back(error)
            left_s = transfer.timeout_s - (time.monotonic() - begun_s)
            if left_s <= 0:
                raise
        else:
            self._went_well()
            return
        second.read(dataclasses.replace(transfer, timeout_s=left_s))

    def close(self) -> None:
        """Close both. Idempotent."""
        self._is_closed = True
        self._first.close()
        if self._second is not None:
            self._second.close()

    def _is_due(self) -> bool:
        if self._is_faster is None:
            self._is_faster = self._is_worth_it()
        return self._is_faster and time.monotonic() >= self._resume_s

    def _fell_back(self, error: KvError) -> None:
        with self._lock:
            self.fallbacks_count += 1
            # Said once for each outage: what follows is no news.
            level = logging.DEBUG if self._is_out else logging.WARNING
            self._is_out = True
            self._resume_s = time.monotonic() + self._pause_s
            self._pause_s = min(self._pause_s * PAUSE_FACTOR, PAUSE_LIMIT_S)
        _log.log(
            level,
            "reads go over %s instead of %s: %s",
            self._second.capabilities.name if self._second is not None else "nothing",
            self._first.capabilities.name,
            error,
            extra={"reason": error.reason.name, "fallbacks_count": self.fallbacks_count},
        )

    def _went_well(self) -> None:
        if not self._is_out:
            return
        with self._lock:
            self._is_out = False
            self._pause_s = PAUSE_FIRST_S
        _log.warning("reads go over %s again", self._first.capabilities.name)
