"""What the daemon says of the handoffs that this process offered. Thread-safe.

The rule that this file keeps: blocks that were offered may be used again only when the daemon
says that they are released, or when nobody can be reading them any more: the hold that the
offer's answer named is over, which no claim outlives, with all its operations.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from kvclient.results import HandoffNews
from kvproto.kv.v1 import handoff_service_pb2
from kvservice.core.records import HandoffState

ENDED_LIMIT = 1 << 14
"""Released handoffs that are remembered for those who ask late."""

EARLY_LIMIT = 1 << 10
"""Handoffs of which there was news before their offer's answer had been dealt with."""

_LIVE = frozenset({HandoffState.OFFERED, HandoffState.CLAIMED})


@dataclass(slots=True)
class _Offered:
    news: HandoffNews
    hold_until_s: float


class HandoffWatch:
    """The handoffs offered by this process, with the latest news of each.

    clock: seconds; what `hold_until_s` is in.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._changed = threading.Condition()
        self._offered: dict[int, _Offered] = {}
        self._early: OrderedDict[int, HandoffNews] = OrderedDict()
        self._ended: OrderedDict[int, HandoffNews] = OrderedDict()
        self._noticed: set[int] = set()
        self._waiters: list[Callable[[], None]] = []

    def __len__(self) -> int:
        """Return the number of offers whose blocks may not be used again yet."""
        return len(self._offered)

    def offered(self, handoff_id: int, *, hold_until_s: float) -> None:
        """Watch a handoff from now on. hold_until_s: by CLOCK_MONOTONIC."""
        with self._changed:
            self._release_oldest()
            if handoff_id in self._ended:
                return
            # Another thread may have read of its claim before we came to note the offer.
            news = self._early.pop(handoff_id, None)
            if news is None:
                news = HandoffNews(handoff_id, HandoffState.OFFERED, False, "")
            self._offered.setdefault(handoff_id, _Offered(news, hold_until_s))

    def told(self, notices: Iterable[handoff_service_pb2.HandoffNotice]) -> None:
        """Take what the daemon says; it says it again until `noticed`."""
        with self._changed:
            for notice in notices:
                news = self._news_of(notice)
                # One that still lives will have its end told as well: that is what is noticed.
                if news.is_released and news.state not in _LIVE:
                    self._noticed.add(news.handoff_id)
                self._take(news)
            self._announce()

    def news(self, handoff_id: int) -> HandoffNews | None:
        """Return the latest news of a handoff; None if this process never offered it, or long ago."""
        with self._changed:
            self._release_overdue(handoff_id)
            return self._latest(handoff_id)

    def is_released(self, handoff_id: int) -> bool:
        """Whether the blocks may be used again, as those of what was not offered here may."""
        with self._changed:
            self._release_overdue(handoff_id)
            return handoff_id not in self._offered

    def overdue_s(self, handoff_id: int) -> float | None:
        """Return when its blocks are released without a word; None if they are already."""
        with self._changed:
            offered = self._offered.get(handoff_id)
            return None if offered is None else offered.hold_until_s

    def wait_released(self, handoff_id: int, timeout_s: float) -> HandoffNews | None:
        """Wait until the blocks may be used again; return the news then, or None where it takes longer."""
        end_s = self._clock() + timeout_s
        with self._changed:
            while True:
                self._release_overdue(handoff_id)
                offered = self._offered.get(handoff_id)
                if offered is None:
                    return self._latest(handoff_id)
                now_s = self._clock()
                if end_s <= now_s:
                    return None
                wait_s = min(end_s, offered.hold_until_s) - now_s
                self._changed.wait(max(wait_s, 0.001))

    @contextlib.contextmanager
    def waking(self, waiter: Callable[[], None]) -> Iterator[None]:
        """Call `waiter` at each change while the context lasts, on the thread that tells of it."""
        with self._changed:
            self._waiters.append(waiter)
        try:
            yield
        finally:
            with self._changed:
                self._waiters.remove(waiter)

    def noticed(self) -> list[int]:
        """Return what the next beat may tell the daemon to say no more of."""
        with self._changed:
            return sorted(self._noticed)

    def acknowledged(self, handoff_ids: Iterable[int]) -> None:
        """The daemon knows that we know."""
        with self._changed:
            self._noticed.difference_update(handoff_ids)

    def session_lost(self) -> None:
        """The daemon that knew of them is gone: each is released when its hold is over."""
        with self._changed:
            self._noticed.clear()
            self._early.clear()
            for handoff_id, offered in self._offered.items():
                reason = "the session with the daemon was lost"
                offered.news = HandoffNews(handoff_id, HandoffState.ABORTED, False, reason)
            self._announce()

    def _news_of(self, notice: handoff_service_pb2.HandoffNotice) -> HandoffNews:
        """Read a notice. A state that only a later daemon knows of is an end like an abort, or no news."""
        try:
            state = HandoffState(notice.state)
        except ValueError:
            before = self._latest(notice.handoff_id)
            state = HandoffState.OFFERED if before is None else before.state
            if notice.is_released:
                state = HandoffState.ABORTED
        return HandoffNews(notice.handoff_id, state, notice.is_released, notice.reason)

    def _take(self, news: HandoffNews) -> None:
        before, offered = self._latest(news.handoff_id), self._offered.get(news.handoff_id)
        if before is not None and before.state not in _LIVE and news.state in _LIVE:
            return  # Said before the end, and heard after it: a beat and a stream are two ways.
        if news.is_released:
            self._offered.pop(news.handoff_id, None)
            self._early.pop(news.handoff_id, None)
            self._ended[news.handoff_id] = news
            if len(self._ended) > ENDED_LIMIT:
                self._ended.popitem(last=False)
        elif offered is not None:
            offered.news = news
        elif news.handoff_id not in self._ended:
            self._early[news.handoff_id] = news
            if len(self._early) > EARLY_LIMIT:
                self._early.popitem(last=False)

    def _announce(self) -> None:
        self._changed.notify_all()
        for waiter in self._waiters:
            waiter()

    def _latest(self, handoff_id: int) -> HandoffNews | None:
        offered = self._offered.get(handoff_id)
        return self._ended.get(handoff_id) if offered is None else offered.news

    def _release_oldest(self) -> None:
        """Let go of what nobody asks about: all holds are about as long, so the oldest end first."""
        for handoff_id in list(itertools.islice(self._offered, 2)):
            self._release_overdue(handoff_id)

    def _release_overdue(self, handoff_id: int) -> None:
        offered = self._offered.get(handoff_id)
        if offered is None or self._clock() < offered.hold_until_s:
            return
        state = offered.news.state
        if state in _LIVE:
            state = HandoffState.EXPIRED
        self._take(HandoffNews(handoff_id, state, True, "its hold is over"))
