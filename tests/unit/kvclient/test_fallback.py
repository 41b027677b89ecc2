"""Reads by a faster transport while it works, and by the plain one when it does not."""

import logging

import numpy as np
import pytest

from kvclient import fallback
from kvclient.fallback import PAUSE_FIRST_S, PAUSE_LIMIT_S, FallbackTransport
from kvservice.core.errors import (
    ChecksumMismatchError,
    DeadlineError,
    LeaseExpiredError,
    NoWayError,
    PeerUnavailableError,
)
from kvservice.core.slots import Slots
from kvservice.ports.transport import Pieces, Transfer, TransportCapabilities

TIMEOUT_S = 8.0


class FakeTransport:
    """Notes what it is asked for, and fails when told to."""

    def __init__(self, name: str, clock) -> None:
        self.name = name
        self.error: Exception | None = None
        self.takes_s = 0.0
        self.reads: list[float] = []
        self.writes_count = 0
        self.closes_count = 0
        self._clock = clock

    @property
    def capabilities(self) -> TransportCapabilities:
        return TransportCapabilities(self.name, has_views=False, is_checked_by_owner=True)

    def read(self, transfer: Transfer) -> None:
        self.reads.append(transfer.timeout_s)
        self._clock.now_s += self.takes_s
        if self.error is not None:
            raise self.error

    def write(self, transfer: Transfer) -> None:
        self.writes_count += 1

    def close(self) -> None:
        self.closes_count += 1


class Clock:
    """A clock that the test moves."""

    now_s = 1000.0

    def monotonic(self) -> float:
        return self.now_s


@pytest.fixture
def clock(monkeypatch):
    """Give the module a clock."""
    clock = Clock()
    monkeypatch.setattr(fallback, "time", clock)
    return clock


@pytest.fixture
def first(clock):
    """The faster transport."""
    return FakeTransport("ucx", clock)


@pytest.fixture
def second(clock):
    """The plain one."""
    return FakeTransport("tcp", clock)


def transfer() -> Transfer:
    """Return a transfer of nothing."""
    none = np.empty(0, np.uint64)
    slots = Slots(none.astype(np.uint32), none.astype(np.uint32), none)
    return Transfer(1, slots, np.empty(0, np.int64), none, Pieces(none, none), None, TIMEOUT_S)


def test_while_it_works_the_faster_one_reads_and_the_plain_one_writes(first, second):
    """The capabilities are the reader's; closing closes both."""
    both = FallbackTransport(first, second, lambda: True)
    both.read(transfer())
    both.write(transfer())
    both.close()
    assert (len(first.reads), first.writes_count, second.writes_count, second.reads) == (1, 0, 1, [])
    assert both.capabilities.name == "ucx"
    assert (first.closes_count, second.closes_count) == (1, 1)


@pytest.mark.parametrize("error", [NoWayError, PeerUnavailableError, DeadlineError])
def test_a_way_that_fails_gives_way_within_the_time_of_the_read(first, second, clock, error, caplog):
    """The read succeeds all the same; it is counted, and said loudly once."""
    both = FallbackTransport(first, second, lambda: True)
    first.error, first.takes_s = error("broken"), 3.0
    with caplog.at_level(logging.WARNING, "kvclient"):
        both.read(transfer())
        clock.now_s += PAUSE_FIRST_S
        both.read(transfer())
    assert first.reads == [TIMEOUT_S / 2] * 2
    assert second.reads == [TIMEOUT_S - 3.0] * 2
    assert both.fallbacks_count == 2
    assert len(caplog.records) == 1
    assert "tcp instead of ucx: broken" in caplog.text


def test_what_says_nothing_of_the_way_is_the_answer(first, second):
    """A lease that has ended, or damage, would be no other over tcp."""
    both = FallbackTransport(first, second, lambda: True)
    for error in (LeaseExpiredError("ended"), ChecksumMismatchError("damaged")):
        first.error = error
        with pytest.raises(type(error)):
            both.read(transfer())
    assert second.reads == []
    assert both.fallbacks_count == 0


def test_after_a_failure_it_is_left_alone_for_a_while(first, second, clock, caplog):
    """Longer with each failure, up to a limit; and it comes back, which is said too."""
    both = FallbackTransport(first, second, lambda: True)
    first.error = PeerUnavailableError("gone")
    pause_s = PAUSE_FIRST_S
    for attempt in range(1, 10):
        both.read(transfer())
        clock.now_s += pause_s - 0.001
        both.read(transfer())
        assert len(first.reads) == attempt
        clock.now_s += 0.001
        pause_s = min(2 * pause_s, PAUSE_LIMIT_S)
    first.error = None
    with caplog.at_level(logging.WARNING, "kvclient"):
        both.read(transfer())
    assert "over ucx again" in caplog.text
    first.error = PeerUnavailableError("gone again")
    both.read(transfer())
    clock.now_s += PAUSE_FIRST_S
    first.error = None
    both.read(transfer())
    assert len(first.reads) == 12


def test_with_no_time_left_its_error_is_the_answer(first, second):
    """There is nothing to fall back to when the caller's time is over."""
    both = FallbackTransport(first, second, lambda: True)
    first.error, first.takes_s = DeadlineError("hangs"), TIMEOUT_S
    with pytest.raises(DeadlineError, match="hangs"):
        both.read(transfer())
    assert second.reads == []


def test_whether_it_is_the_faster_one_is_asked_once(first, second):
    """And where it is not, it is never tried."""
    asked = []
    both = FallbackTransport(first, second, lambda: bool(asked.append(1)))
    both.read(transfer())
    both.read(transfer())
    assert (len(asked), first.reads, len(second.reads)) == (1, [], 2)


def test_what_ends_with_the_client_is_not_done_by_another_way(first, second, caplog):
    """A client that closes has no use for the bytes, and nothing has failed."""
    both = FallbackTransport(first, second, lambda: True)
    both.close()
    first.error = PeerUnavailableError("the transport was closed")
    with caplog.at_level(logging.WARNING, "kvclient"), pytest.raises(PeerUnavailableError):
        both.read(transfer())
    assert (second.reads, both.fallbacks_count, caplog.records) == ([], 0, [])


def test_alone_it_reads_and_fails_by_itself(first):
    """A daemon without a tcp data plane is read one-sidedly, and not written to."""
    alone = FallbackTransport(first, None, lambda: False)
    alone.read(transfer())
    assert first.reads == [TIMEOUT_S]
    with pytest.raises(NoWayError):
        alone.write(transfer())
    alone.close()
    assert first.closes_count == 1
