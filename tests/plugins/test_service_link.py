"""A connection that an engine can do without."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Any

import pytest

from kvclient import ArenaFullError, DeadlineError, KvError, PeerUnavailableError
from kvplugins.common.link import ServiceLink

TIMEOUT_S = 10.0


class Host:
    """Where services come from: up or down, and a note of every one that was opened and closed."""

    def __init__(self) -> None:
        self.is_up = True
        self.opened: list[int] = []
        self.closed: list[int] = []
        self.has_closed = threading.Event()
        self.has_opened = threading.Event()
        self.has_refused = threading.Event()

    def connect(self) -> int:
        if not self.is_up:
            self.has_refused.set()
            raise PeerUnavailableError("nobody listens")
        self.opened.append(len(self.opened))
        self.has_opened.set()
        return self.opened[-1]

    def close(self, service: int) -> None:
        self.closed.append(service)
        self.has_closed.set()

    def link(self, retry_after_s: float = 0.01) -> ServiceLink[int]:
        return ServiceLink(
            name="the service",
            connect=self.connect,
            close=self.close,
            retry_after_s=retry_after_s,
            logger=logging.getLogger("test.link"),
        )


def until(is_so: Callable[[], bool]) -> None:
    """Look again and again until something is so."""
    waiter = threading.Event()
    for _ in range(int(TIMEOUT_S / 0.01)):
        if is_so():
            return
        waiter.wait(0.01)
    pytest.fail("it never came about")


def failing(error: KvError) -> Callable[[Any], Any]:
    """Return a call that fails so."""

    def call(service: Any) -> Any:
        raise error

    return call


def test_an_answer_is_passed_on_and_counted() -> None:
    """The normal case."""
    link = Host().link()
    link.start()
    assert link.call(lambda service: service + 41) == 41
    assert link.counts.answered == 1
    link.close()


def test_a_refusal_is_none_and_the_connection_stays() -> None:
    """A full service is no dead one."""
    host = Host()
    link = host.link()
    link.start()
    assert link.call(failing(ArenaFullError("full"))) is None
    assert link.is_connected
    assert link.counts.refused == 1
    link.close()
    assert host.closed == [0]


@pytest.mark.parametrize("error", [PeerUnavailableError("gone"), DeadlineError("late")])
def test_a_broken_connection_makes_no_more_calls(error: KvError) -> None:
    """One caller finds out; the others get None at once, without waiting for a deadline of their own."""
    host = Host()
    link = host.link(retry_after_s=3600)
    link.start()
    assert link.call(failing(error)) is None
    assert link.call(failing(AssertionError)) is None  # type: ignore[arg-type]
    assert (link.counts.lost, link.counts.skipped) == (1, 1)
    assert host.has_closed.wait(TIMEOUT_S)
    assert host.closed == [0]
    link.close()


def test_the_service_is_found_again_in_the_background() -> None:
    """Nobody waits for it, and nobody has to ask."""
    host = Host()
    host.is_up = False
    link = host.link()
    link.start()
    assert not link.is_connected
    assert link.call(lambda service: service) is None
    assert host.has_refused.wait(TIMEOUT_S)
    host.is_up = True
    assert host.has_opened.wait(TIMEOUT_S)
    until(lambda: link.is_connected)
    assert link.call(lambda service: service) == 0
    link.close()


def test_a_connection_that_is_renewed_is_replaced_in_the_background() -> None:
    """What it stood for has ended, though it still answers; nobody waits for the next one."""
    host = Host()
    link = host.link()
    link.start()
    assert link.service == 0
    host.has_opened.clear()
    link.renew(0, PeerUnavailableError("of an earlier life"))
    assert host.has_opened.wait(TIMEOUT_S)
    assert host.has_closed.wait(TIMEOUT_S)
    until(lambda: link.service == 1)
    link.renew(0, PeerUnavailableError("that one is gone already"))
    assert link.service == 1
    assert host.closed == [0]
    link.close()
    assert link.service is None


def test_a_connection_that_is_renewed_is_closed_by_its_last_user() -> None:
    """A passage that is under way ends in its own time."""
    host = Host()
    link = host.link(retry_after_s=3600)
    link.start()

    def renewing(service: int) -> list[int]:
        link.renew(service, PeerUnavailableError("of an earlier life"))
        return list(host.closed)

    assert link.call(renewing) == []
    assert host.has_closed.wait(TIMEOUT_S)
    assert host.closed == [0]
    link.close()


def test_each_change_of_state_is_one_line_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    """A log that repeats an outage at every request hides everything else."""
    host = Host()
    link = host.link(retry_after_s=3600)
    with caplog.at_level(logging.INFO):
        link.start()
        for _ in range(50):
            link.call(failing(PeerUnavailableError("gone")))
        link.close()
    assert [record.levelname for record in caplog.records if record.name == "test.link"] == [
        "INFO",
        "WARNING",
    ]


def test_a_refusal_is_a_warning_once(caplog: pytest.LogCaptureFixture) -> None:
    """A full service refuses at every step; one line says so."""
    link = Host().link()
    link.start()
    with caplog.at_level(logging.WARNING):
        for _ in range(50):
            link.call(failing(ArenaFullError("full")))
    link.close()
    assert len([record for record in caplog.records if record.name == "test.link"]) == 1


def test_a_connection_is_closed_by_its_last_user() -> None:
    """Closing unmaps memory that another thread's call may be copying from."""
    host = Host()
    link = host.link(retry_after_s=3600)
    link.start()
    inside, go_on = threading.Event(), threading.Event()

    def long_call(service: int) -> int:
        inside.set()
        assert go_on.wait(TIMEOUT_S)
        return service

    answers: list[int | None] = []
    user = threading.Thread(target=lambda: answers.append(link.call(long_call)))
    user.start()
    assert inside.wait(TIMEOUT_S)
    link.call(failing(PeerUnavailableError("gone")))
    link.close()
    assert host.closed == []
    go_on.set()
    user.join(TIMEOUT_S)
    assert host.has_closed.wait(TIMEOUT_S)
    assert answers == [0]


def test_a_closed_link_stays_closed() -> None:
    """Closing is idempotent, and what a late attempt opens is closed again."""
    host = Host()
    link = host.link()
    link.start()
    link.close()
    link.close()
    assert link.call(lambda service: service) is None
    link.start()
    assert not link.is_connected
    assert host.closed == host.opened
