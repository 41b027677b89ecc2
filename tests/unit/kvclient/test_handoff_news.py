"""Blocks that were offered are used again when the daemon says so, or when nobody can be reading them."""

import threading
import time

import pytest

from kvclient import HandoffNews, HandoffState
from kvclient.handoff_news import EARLY_LIMIT, ENDED_LIMIT, HandoffWatch
from kvproto.kv.v1 import handoff_service_pb2

WAIT_S = 5.0
HOLD_S = 100.0
OFFERED, CLAIMED, EXPIRED = HandoffState.OFFERED, HandoffState.CLAIMED, HandoffState.EXPIRED
COMPLETED, REJECTED, ABORTED = HandoffState.COMPLETED, HandoffState.REJECTED, HandoffState.ABORTED


class Clock:
    """Seconds that only the test moves."""

    def __init__(self):
        self.now_s = 1000.0

    def __call__(self):
        return self.now_s


@pytest.fixture
def clock():
    """Stand still."""
    return Clock()


@pytest.fixture
def watch(clock):
    """Watch the handoffs 1 and 2, whose hold ends at the same time."""
    watched = HandoffWatch(clock)
    for handoff_id in (1, 2):
        watched.offered(handoff_id, hold_until_s=clock.now_s + HOLD_S)
    return watched


def notice(handoff_id, state, *, is_released=False, reason=""):
    """Say something of a handoff, as the daemon does."""
    return handoff_service_pb2.HandoffNotice(
        handoff_id=handoff_id, state=int(state), is_released=is_released, reason=reason
    )


def test_an_offer_waits_until_it_is_told_of(watch):
    """Nothing is released by itself, and what was not offered here is nobody's wait."""
    assert watch.news(1) == HandoffNews(1, OFFERED, False, "")
    assert not watch.is_released(1)
    assert watch.news(3) is None
    assert watch.is_released(3)
    assert watch.wait_released(3, 0.0) is None


def test_the_news_is_what_was_told_last(watch):
    """Claimed, ended but still read, released: each as it comes."""
    for state, is_released, reason in (
        (CLAIMED, False, "direct"),
        (ABORTED, False, "no"),
        (ABORTED, True, "no"),
    ):
        watch.told([notice(1, state, is_released=is_released, reason=reason)])
        assert watch.news(1) == HandoffNews(1, state, is_released, reason)
        assert watch.is_released(1) == is_released
    assert not watch.is_released(2)
    assert watch.wait_released(1, 0.0) == watch.news(1)


def test_what_is_noticed_is_the_end_and_nothing_before(watch):
    """A staged handoff is released with its claim; for that word the daemon must not forget its end."""
    watch.told([notice(1, CLAIMED, is_released=True), notice(2, ABORTED)])
    assert watch.is_released(1)
    assert watch.noticed() == []
    watch.told([notice(1, REJECTED, is_released=True), notice(2, ABORTED, is_released=True)])
    assert watch.news(1).state is REJECTED
    assert watch.noticed() == [1, 2]
    watch.acknowledged([1, 7])
    assert watch.noticed() == [2]


def test_an_older_word_does_not_undo_a_newer_one(watch):
    """The answer to a beat and the stream are two ways: what was said before may be heard after."""
    for handoff_id, is_released in ((1, True), (2, False)):
        watch.told([notice(handoff_id, COMPLETED, is_released=is_released)])
        watch.told([notice(handoff_id, CLAIMED, is_released=is_released)])
        watch.told([notice(handoff_id, CLAIMED)])
        assert watch.news(handoff_id).state is COMPLETED
        assert watch.is_released(handoff_id) == is_released


def test_news_may_come_before_the_offer_is_noted(clock):
    """Another thread may read of a claim while the offer's answer is still on its way to its caller."""
    watch = HandoffWatch(clock)
    watch.told([notice(1, CLAIMED), notice(2, COMPLETED, is_released=True), notice(3, CLAIMED)])
    watch.told([notice(3, ABORTED, is_released=True)])
    for handoff_id in (1, 2, 3):
        watch.offered(handoff_id, hold_until_s=clock.now_s + HOLD_S)
    assert (watch.news(1).state, watch.is_released(1)) == (CLAIMED, False)
    assert (watch.news(2).state, watch.is_released(2)) == (COMPLETED, True)
    assert (watch.news(3).state, watch.is_released(3)) == (ABORTED, True)


@pytest.mark.parametrize("state", [0, 77, -1])
def test_a_state_that_only_a_later_daemon_knows_is_no_failure(watch, state):
    """Whoever reads the connection must get on; what counts is whether the memory is released."""
    watch.told([notice(2, CLAIMED)])
    watch.told([notice(1, state), notice(2, state), notice(9, state)])
    assert (watch.news(1).state, watch.news(2).state) == (OFFERED, CLAIMED)
    assert not watch.is_released(1)
    watch.told([notice(1, state, is_released=True, reason="a new way")])
    assert watch.news(1) == HandoffNews(1, ABORTED, True, "a new way")
    assert watch.noticed() == [1]


@pytest.mark.parametrize(
    ("told", "state"), [([], EXPIRED), ([CLAIMED], EXPIRED), ([ABORTED], ABORTED), ([REJECTED], REJECTED)]
)
def test_a_hold_ends_without_a_word(clock, watch, told, state):
    """A daemon that is away says nothing; after the hold nobody can be reading any more."""
    watch.told([notice(1, each) for each in told])
    clock.now_s += HOLD_S - 0.001
    assert not watch.is_released(1)
    assert watch.overdue_s(1) == pytest.approx(clock.now_s + 0.001)
    clock.now_s += 0.002
    assert watch.is_released(1)
    assert watch.overdue_s(1) is None
    assert watch.wait_released(1, 0.0) == HandoffNews(1, state, True, "its hold is over")
    watch.told([notice(1, COMPLETED, is_released=True)])
    assert watch.news(1).state is COMPLETED


def test_a_lost_session_releases_nothing_before_the_hold_is_over(clock, watch):
    """The daemon restarted: it knows of no claim, but its claimers may be reading."""
    watch.told([notice(1, CLAIMED), notice(9, CLAIMED)])
    watch.told([notice(2, COMPLETED, is_released=True)])
    watch.session_lost()
    assert watch.noticed() == []
    assert watch.news(1).state is ABORTED
    assert "session" in watch.news(1).reason
    assert (watch.news(2).state, watch.is_released(2)) == (COMPLETED, True)
    assert watch.wait_released(1, 0.0) is None
    clock.now_s += HOLD_S - 0.001
    assert not watch.is_released(1)
    clock.now_s += 0.002
    assert watch.is_released(1)
    assert watch.news(1).state is ABORTED


def test_a_waiter_is_woken_by_the_release(watch):
    """Another thread reads the news; no change that leaves the memory held ends the wait."""
    found = []
    waiting = threading.Event()
    thread = threading.Thread(target=lambda: (waiting.set(), found.append(watch.wait_released(1, WAIT_S))))
    thread.start()
    assert waiting.wait(WAIT_S)
    watch.told([notice(2, COMPLETED, is_released=True), notice(1, CLAIMED)])
    assert thread.is_alive()
    watch.told([notice(1, COMPLETED, is_released=True)])
    thread.join(WAIT_S)
    assert [news.state for news in found] == [COMPLETED]


def test_a_waiter_takes_the_end_of_a_hold_by_itself():
    """Nobody tells it: it wakes when the hold is over."""
    watch = HandoffWatch()
    watch.offered(1, hold_until_s=time.monotonic() + 0.02)
    assert watch.wait_released(1, 0.001) is None
    assert watch.wait_released(1, WAIT_S).state is EXPIRED


def test_each_change_wakes_those_who_asked_to_be_woken(watch):
    """For the flavour in which no thread may wait; none is called after its context has ended."""
    calls = []
    with watch.waking(lambda: calls.append("first")):
        with watch.waking(lambda: calls.append("second")):
            watch.told([notice(1, CLAIMED)])
        watch.session_lost()
    watch.told([notice(1, COMPLETED, is_released=True)])
    assert calls == ["first", "second", "first"]


def test_what_is_remembered_is_bounded(clock):
    """Ends, early words and offers that nobody asks about do not pile up for ever."""
    watch = HandoffWatch(clock)
    many = range(1, ENDED_LIMIT + 11)
    watch.told([notice(number, COMPLETED, is_released=True) for number in many])
    assert watch.news(10) is None
    assert watch.news(11).state is COMPLETED
    early = range(100_000, 100_000 + EARLY_LIMIT + 5)
    watch.told([notice(number, CLAIMED) for number in early])
    watch.offered(early[0], hold_until_s=clock.now_s + HOLD_S)
    watch.offered(early[-1], hold_until_s=clock.now_s + HOLD_S)
    assert (watch.news(early[0]).state, watch.news(early[-1]).state) == (OFFERED, CLAIMED)


def test_an_offer_that_nobody_asks_about_is_let_go(clock):
    """The next offers take the oldest along once their holds are over."""
    watch = HandoffWatch(clock)
    for number in range(1, 101):
        watch.offered(number, hold_until_s=clock.now_s + HOLD_S)
    clock.now_s += HOLD_S
    for number in range(101, 151):
        watch.offered(number, hold_until_s=clock.now_s + HOLD_S)
    assert len(watch) == 50


def test_asking_about_one_of_many_costs_about_one():
    """An engine looks after each of its offers at each step: that must not be the square of them."""
    looks = []
    watch = HandoffWatch(lambda: looks.append(None) or 0.0)
    for number in range(4096):
        watch.offered(number, hold_until_s=HOLD_S)
    looks.clear()
    assert not any(watch.is_released(number) for number in range(4096))
    assert len(looks) <= 2 * 4096
