"""What the daemon says of the handoffs that this process offered. Thread-safe.

The rule that this file keeps: blocks that were offered may be used again only when the daemon
says that they are released, or when nobody can be reading them any more: every claim ends at
the latest with the hold that the offer's answer named, and no operation takes longer than its
bound.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass

from kvclient.results import HandoffNews
from kvproto.kv.v1 import handoff_service_pb2
from kvservice.core.records import HandoffState

OPERATION_BOUND_S = 5.0
"""Longest that one operation of a reader may still run after the deadline up to which it posts."""

ENDED_LIMIT = 1 << 14
"""Released handoffs that are remembered for those who ask late."""


@dataclass(slots=True)
class _Offered:
    news: HandoffNews
    hold_until_s: float


class HandoffWatch:
    """The handoffs offered by this process, with the latest news of each."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._offered: dict[int, _Offered] = {}
        self._ended: OrderedDict[int, HandoffNews] = OrderedDict()
        self._noticed: set[int] = set()

    def offered(self, handoff_id: int, *, hold_until_s: float) -> None:
        """Watch a handoff from now on. hold_until_s: by CLOCK_MONOTONIC."""
        with self._changed:
            if handoff_id not in self._ended:
                news = HandoffNews(handoff_id, HandoffState.OFFERED, False, "")
                self._offered.setdefault(handoff_id, _Offered(news, hold_until_s))

    def told(self, notices: Iterable[handoff_service_pb2.HandoffNotice]) -> None:
        """Take what the daemon says; it says it again until `noticed`."""
        with self._changed:
            for notice in notices:
                news = HandoffNews(
                    notice.handoff_id, HandoffState(notice.state), notice.is_released, notice.reason
                )
                if news.is_released:
                    self._noticed.add(news.handoff_id)
                self._take(news)
            self._changed.notify_all()

    def news(self, handoff_id: int) -> HandoffNews | None:
        """Return the latest news of a handoff; None if this process never offered it, or long ago."""
        with self._changed:
            self._release_overdue()
            return self._latest(handoff_id)

    def is_released(self, handoff_id: int) -> bool:
        """Whether the blocks may be used again."""
        with self._changed:
            self._release_overdue()
            return handoff_id not in self._offered

    def wait_released(self, handoff_id: int, timeout_s: float) -> HandoffNews | None:
        """Wait until the blocks may be used again; return the news then, or None where it takes longer."""
        end_s = time.monotonic() + timeout_s
        with self._changed:
            while True:
                self._release_overdue()
                if handoff_id not in self._offered:
                    return self._latest(handoff_id)
                wait_s = min(end_s, self._offered[handoff_id].hold_until_s + OPERATION_BOUND_S)
                remaining_s = wait_s - time.monotonic()
                if end_s <= time.monotonic():
                    return None
                self._changed.wait(max(remaining_s, 0.001))

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
            for handoff_id, offered in self._offered.items():
                reason = "the session with the daemon was lost"
                offered.news = HandoffNews(handoff_id, HandoffState.ABORTED, False, reason)
            self._changed.notify_all()

    def _take(self, news: HandoffNews) -> None:
        offered = self._offered.get(news.handoff_id)
        if news.is_released:
            self._offered.pop(news.handoff_id, None)
            self._ended[news.handoff_id] = news
            if len(self._ended) > ENDED_LIMIT:
                self._ended.popitem(last=False)
        elif offered is not None:
            offered.news = news

    def _latest(self, handoff_id: int) -> HandoffNews | None:
        offered = self._offered.get(handoff_id)
        return self._ended.get(handoff_id) if offered is None else offered.news

    def _release_overdue(self) -> None:
        now_s = time.monotonic()
        for handoff_id, offered in list(self._offered.items()):
            if now_s >= offered.hold_until_s + OPERATION_BOUND_S:
                state = offered.news.state
                if state in {HandoffState.OFFERED, HandoffState.CLAIMED}:
                    state = HandoffState.EXPIRED
                self._take(HandoffNews(handoff_id, state, True, "its hold is over"))
