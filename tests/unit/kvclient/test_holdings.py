"""What is held is renewed; a revocation is acknowledged only when nothing touches its memory."""

import numpy as np
import pytest

from kvclient import LeaseExpiredError, ReservationExpiredError
from kvclient.holdings import ENDED_LIMIT, Holdings, Kind
from kvclient.touches import TOUCHES_LIMIT, Touches
from kvservice.core.outcomes import ItemOutcome

DONE, EXPIRED = ItemOutcome.DONE, ItemOutcome.ALREADY_EXPIRED


class Woken:
    """Counts how often an acknowledgement became due."""

    count = 0

    def __call__(self):
        self.count += 1


def test_a_beat_names_what_is_held():
    """Leases and reservations are renewed until they are let go."""
    holdings = Holdings(Woken())
    holdings.add(1, Kind.LEASE, deadline_s=10.0)
    holdings.add(2, Kind.RESERVATION, deadline_s=10.0)
    beat = holdings.beat()
    assert (beat.lease_ids, beat.reservation_ids, beat.acknowledged_ids) == ([1], [2], [])
    holdings.discard(1)
    holdings.discard(1)
    assert holdings.beat().lease_ids == []


def test_renewing_prolongs_and_never_shortens():
    """What the daemon says has ended is held no more; the rest lives to the later deadline."""
    holdings = Holdings(Woken())
    for number in (1, 2):
        holdings.add(number, Kind.LEASE, deadline_s=10.0)
    holdings.renewed([1, 2, 3], bytes([DONE, EXPIRED, DONE]), 20.0)
    assert holdings.deadline_s(1, 0.0) == 20.0
    assert not holdings.holds(2)
    holdings.renewed([1], bytes([DONE]), 5.0)
    assert holdings.deadline_s(1, 0.0) == 20.0


def test_a_revocation_waits_for_the_copy_under_it():
    """The daemon reuses memory on our word, so the word comes after the last copy has ended."""
    woken = Woken()
    holdings = Holdings(woken)
    holdings.add(1, Kind.RESERVATION, deadline_s=10.0)
    holdings.begin_copy(1, Kind.LEASE)
    holdings.begin_copy(1, Kind.LEASE)
    holdings.revoke([1])
    assert holdings.beat().acknowledged_ids == []
    assert holdings.beat().reservation_ids == []
    holdings.end_copy(1)
    assert holdings.beat().acknowledged_ids == []
    holdings.end_copy(1)
    assert holdings.beat().acknowledged_ids == [1]
    assert woken.count == 1


def test_a_revocation_of_what_nobody_here_holds_is_acknowledged_at_once():
    """Every process of the engine is asked, also those that never heard of the id."""
    woken = Woken()
    holdings = Holdings(woken)
    holdings.revoke([9])
    assert holdings.beat().acknowledged_ids == [9]
    assert woken.count == 1
    holdings.acknowledged([9])
    assert holdings.beat().acknowledged_ids == []


def test_no_copy_begins_under_what_was_revoked():
    """Once acknowledged, its memory may belong to somebody else; the same goes for what ended here."""
    holdings = Holdings(Woken())
    holdings.revoke([1])
    holdings.acknowledged([1])
    with pytest.raises(LeaseExpiredError, match="lease 1 was released, or revoked"):
        holdings.begin_copy(1, Kind.LEASE)
    holdings.discard(2)
    with pytest.raises(ReservationExpiredError, match="reservation 2 was ended"):
        holdings.begin_copy(2, Kind.RESERVATION)


def test_what_ended_is_remembered_within_bounds():
    """Memory of ended ids does not grow for ever; the oldest go first."""
    holdings = Holdings(Woken())
    for number in range(ENDED_LIMIT + 1):
        holdings.discard(number)
    assert not holdings.has_ended(0)
    assert holdings.has_ended(1)


def test_a_lost_session_forgets_grants_but_not_copies():
    """Copies end by themselves; nothing is acknowledged to a daemon that never revoked it."""
    holdings = Holdings(Woken())
    holdings.add(1, Kind.LEASE, deadline_s=10.0)
    holdings.begin_copy(1, Kind.LEASE)
    holdings.revoke([1])
    holdings.clear()
    holdings.end_copy(1)
    beat = holdings.beat()
    assert (beat.lease_ids, beat.acknowledged_ids) == ([], [])


def test_touches_are_bounded_and_drop_the_oldest():
    """Hints never grow without bound: the newest reads are worth the most."""
    touches = Touches()
    for number in range(10):
        touches.add(np.full(TOUCHES_LIMIT // 4, number))
    kept = [batch[0] for batch in touches.drain()]
    assert kept[-1] == 9
    assert kept[0] > 0
    assert len(kept) <= 5
    assert touches.drain() == []
