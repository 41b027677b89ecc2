"""The heartbeat: renewals, acknowledgements, news and reports of use, in one event."""

from __future__ import annotations

import numpy as np

from kvservice.core import drains
from kvservice.core.answers import BeatAnswer, RenewAnswer
from kvservice.core.books import Books
from kvservice.core.events import Beat
from kvservice.core.handoff_desk import HandoffDesk
from kvservice.core.lease_desk import LeaseDesk


class BeatDesk:
    """Handles Beat."""

    def __init__(self, books: Books, leases: LeaseDesk, handoffs: HandoffDesk) -> None:
        self._books = books
        self._leases = leases
        self._handoffs = handoffs

    def beat(self, event: Beat, now: int) -> BeatAnswer:
        """Renew, acknowledge and learn of use; answers what ended and what is new."""
        books = self._books
        session = books.session(event.token, now)
        for name, ids in (
            ("lease_ids", event.lease_ids),
            ("reservation_ids", event.reservation_ids),
            ("acknowledged_ids", event.acknowledged_ids),
            ("touched_segments", event.touched_segments),
            ("handoff_ids", event.handoff_ids),
            ("noticed_handoff_ids", event.noticed_ids),
        ):
            books.check_batch(len(ids), name)
        acknowledged = event.acknowledged_ids.tolist()
        drains.acknowledge(books, session, acknowledged)
        self._handoffs.acknowledge(session, acknowledged, event.noticed_ids.tolist())
        self._leases.touch(session, event.touched_segments, event.touched_granules)
        ttl = books.limits.default_ttl_ns
        renewal = self._leases.prolong(session, event.lease_ids, event.reservation_ids, ttl, now)
        outcomes, deadlines = self._handoffs.prolong(session, event.handoff_ids, now)
        remaining = min([renewal.remaining_ns, *(deadline - now for deadline in deadlines)])
        return BeatAnswer(
            RenewAnswer(renewal.lease_outcomes, renewal.reservation_outcomes, remaining),
            np.array(sorted(session.revoked), dtype=np.uint64),
            outcomes,
            tuple(session.notices.values()),
        )
