"""A connection to the service that an engine can do without.

An engine must never wait for a service that is gone: `ServiceLink.call` answers None at once while there is
no connection, and a thread looks for the service in the background. The engine takes None for a miss.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from kvclient import DeadlineError, KvError, PeerUnavailableError, Reason, SessionUnknownError

# Failures that say something about the connection. All others are an answer to one call: the service lives.
CONNECTION_FAILURES = (DeadlineError, PeerUnavailableError, SessionUnknownError)
# How long `close` waits for the background thread, which may be in the middle of an attempt.
CLOSE_TIMEOUT_S = 5.0

Service = TypeVar("Service")
Answer = TypeVar("Answer")


@dataclass(slots=True)
class LinkCounts:
    """What became of the calls.

    answered: calls that the service answered.
    refused: calls that the service answered with a failure, for example because it is full.
    lost: calls that broke the connection.
    skipped: calls that were not made, since there was no connection.
    """

    answered: int = 0
    refused: int = 0
    lost: int = 0
    skipped: int = 0


class _Connection(Generic[Service]):
    """One life of the connection, closed by whoever uses it last."""

    def __init__(self, service: Service, close: Callable[[Service], None]) -> None:
        self.service = service
        self.users_count = 0
        self.is_retired = False
        self._close = close

    def close(self) -> None:
        """Close it; a service that is gone has nothing left to say about that."""
        try:
            self._close(self.service)
        except KvError as error:
            logging.getLogger(__name__).debug("closing a lost connection: %s", error)


class ServiceLink(Generic[Service]):
    """A connection that comes back by itself. Safe for any number of threads.

    connect: makes a connection, raises KvError, and has a deadline of its own.
    close: ends one. It is called when no call uses the connection any more, since a call may be copying to or
        from memory that closing unmaps.
    """

    def __init__(
        self,
        *,
        name: str,
        connect: Callable[[], Service],
        close: Callable[[Service], None],
        retry_after_s: float,
        logger: logging.Logger,
    ) -> None:
        self.counts = LinkCounts()
        self._name = name
        self._connect = connect
        self._close = close
        self._retry_after_s = retry_after_s
        self._logger = logger
        self._lock = threading.Lock()
        self._refusals: set[Reason] = set()
        self._connection: _Connection[Service] | None = None
        self._seeker: threading.Thread | None = None
        self._is_closed = threading.Event()

    @property
    def is_connected(self) -> bool:
        """Whether a call would be made now."""
        return self._connection is not None

    @property
    def service(self) -> Service | None:
        """What a call would be made with now, for a look at it that waits for nobody."""
        connection = self._connection
        return None if connection is None else connection.service

    def start(self) -> None:
        """Try once, now; what fails is tried again in the background."""
        error = self._attempt()
        if error is not None:
            self._report_loss(error)

    def call(self, action: Callable[[Service], Answer]) -> Answer | None:
        """Run `action` with the service and return its answer; None if there is no service or it refused."""
        connection = self._enter()
        if connection is None:
            return None
        try:
            answer = action(connection.service)
        except CONNECTION_FAILURES as error:
            self._retire(connection, error)
            return None
        except KvError as error:
            self._report_refusal(error)
            return None
        finally:
            self._leave(connection)
        with self._lock:
            self.counts.answered += 1
        return answer

    def renew(self, service: Service, why: KvError) -> None:
        """Take a connection out of use that still answers; another is looked for. Idempotent."""
        connection = self._connection
        if connection is not None and connection.service is service:
            with self._lock:
                connection.users_count += 1
            self._retire(connection, why)
            self._leave(connection)

    def close(self) -> None:
        """End the connection and stop looking for one. Idempotent."""
        self._is_closed.set()
        seeker = self._seeker
        if seeker is not None:
            seeker.join(CLOSE_TIMEOUT_S)
        with self._lock:
            connection, self._connection = self._connection, None
            is_unused = connection is not None and self._retire_locked(connection)
        if connection is not None and is_unused:
            connection.close()

    def _enter(self) -> _Connection[Service] | None:
        with self._lock:
            connection = self._connection
            if connection is None:
                self.counts.skipped += 1
            else:
                connection.users_count += 1
            return connection

    def _leave(self, connection: _Connection[Service]) -> None:
        with self._lock:
            connection.users_count -= 1
            is_last = connection.is_retired and connection.users_count == 0
        if is_last:
            # Saying goodbye to a service that does not answer takes a deadline, and the caller is an engine.
            threading.Thread(target=connection.close, name="kv-service-close", daemon=True).start()

    def _retire(self, connection: _Connection[Service], error: KvError) -> None:
        """Take a broken connection out of use; several threads may find out at once, and one of them
        reports.
        """
        with self._lock:
            self.counts.lost += 1
            is_first = self._connection is connection
            if is_first:
                self._connection = None
                connection.is_retired = True
        if is_first:
            self._report_loss(error)

    def _retire_locked(self, connection: _Connection[Service]) -> bool:
        connection.is_retired = True
        return connection.users_count == 0

    def _report_loss(self, error: KvError) -> None:
        self._logger.warning(
            "%s is out of reach (%s); the engine recomputes, and we try again every %g s",
            self._name,
            error,
            self._retry_after_s,
        )
        with self._lock:
            if self._seeker is None and not self._is_closed.is_set():
                self._seeker = threading.Thread(target=self._seek, name="kv-service-link", daemon=True)
                self._seeker.start()

    def _report_refusal(self, error: KvError) -> None:
        """Warn of the first refusal of its kind; a full service refuses at every step."""
        with self._lock:
            self.counts.refused += 1
            level = logging.DEBUG if error.reason in self._refusals else logging.WARNING
            self._refusals.add(error.reason)
        self._logger.log(level, "%s refused: %s", self._name, error)

    def _seek(self) -> None:
        """Try until there is a connection; then this thread ends."""
        while not self._is_closed.wait(self._retry_after_s):
            try:
                error = self._attempt()
            except Exception:  # border: plugin
                self._logger.exception(
                    "a fault while connecting to %s; the engine goes on without it", self._name
                )
                continue
            if error is None:
                return
            self._logger.debug("%s is still out of reach: %s", self._name, error)

    def _attempt(self) -> KvError | None:
        """Connect and put the connection to use; return what failed."""
        try:
            service = self._connect()
        except KvError as error:
            return error
        connection = _Connection(service, self._close)
        with self._lock:
            is_wanted = not self._is_closed.is_set()
            if is_wanted:
                self._connection = connection
                self._seeker = None
        if is_wanted:
            self._logger.info("connected to %s", self._name)
        else:
            connection.close()
        return None
