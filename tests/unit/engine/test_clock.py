"""The clock that leaves out what the daemon slept through."""

import pytest

from kvservice.engine.clock import LONGEST_GAP_NS, StallAwareClock

SECOND_NS = 1_000_000_000


class Hand:
    """A clock's hand that the test sets."""

    def __init__(self):
        self.now_ns = 5 * SECOND_NS

    def __call__(self):
        return self.now_ns


@pytest.fixture
def hand():
    """The raw clock."""
    return Hand()


def test_time_passes_as_it_does(hand):
    """Gaps that a loaded daemon has are time like any other."""
    clock = StallAwareClock(hand)
    start = clock.now_ns()
    for _ in range(10):
        hand.now_ns += SECOND_NS
        clock.now_ns()
    assert clock.now_ns() - start == 10 * SECOND_NS
    assert clock.stalled_ns == 0


def test_a_stall_is_taken_out(hand):
    """A gap beyond the longest is a stall: only the longest gap of it counts."""
    clock = StallAwareClock(hand)
    start = clock.now_ns()
    hand.now_ns += 3600 * SECOND_NS
    assert clock.now_ns() - start == LONGEST_GAP_NS
    assert clock.stalled_ns == 3600 * SECOND_NS - LONGEST_GAP_NS
    hand.now_ns += SECOND_NS
    assert clock.now_ns() - start == LONGEST_GAP_NS + SECOND_NS


def test_stalls_add_up(hand):
    """Each stall is taken out once, and stays out."""
    clock = StallAwareClock(hand, longest_gap_ns=10)
    start = clock.now_ns()
    for _ in range(3):
        hand.now_ns += 110
        clock.now_ns()
    assert clock.stalled_ns == 300
    assert clock.now_ns() - start == 30


def test_time_never_goes_back(hand, rng):
    """Whatever gaps there are, each look is at or after the one before."""
    clock = StallAwareClock(hand, longest_gap_ns=100)
    last = clock.now_ns()
    for _ in range(1000):
        hand.now_ns += rng.choice([0, 1, 99, 100, 101, 10_000])
        now = clock.now_ns()
        assert last <= now <= last + 100
        last = now


@pytest.mark.parametrize(("gap", "counted"), [(99, 99), (100, 100), (101, 100)])
def test_the_bound_is_exact(hand, gap, counted):
    """A gap of just the longest is no stall."""
    clock = StallAwareClock(hand, longest_gap_ns=100)
    start = clock.now_ns()
    hand.now_ns += gap
    assert clock.now_ns() - start == counted
