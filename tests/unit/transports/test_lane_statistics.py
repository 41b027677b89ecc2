"""What a lane did lately: every byte is in a window, and a stall of some milliseconds shows."""

from __future__ import annotations

import pytest

from kvservice.transports.lane_statistics import STALL_NS, WINDOW_NS, WINDOWS_COUNT, LaneStatistics

MS = 1_000_000
START_NS = 1000 * WINDOW_NS * WINDOWS_COUNT


def add(statistics, begun_ns, took_ns, size_bytes, errors_count=0):
    """Count a transfer that began so long after the start."""
    statistics.add(
        START_NS + begun_ns,
        START_NS + begun_ns + took_ns,
        size_bytes=size_bytes,
        operations_count=4,
        errors_count=errors_count,
    )


@pytest.mark.parametrize("took_ns", [1, MS, WINDOW_NS, 3 * WINDOW_NS + 7, 40 * WINDOW_NS])
def test_the_bytes_of_a_transfer_are_spread_over_its_time(took_ns):
    """No byte is lost or counted twice, however many windows a transfer lies in."""
    statistics = LaneStatistics()
    add(statistics, 3, took_ns, 1 << 30)
    windows = statistics.windows(START_NS + took_ns)
    assert windows.size_bytes.sum() == pytest.approx(1 << 30, rel=1e-6)
    assert windows.busy_ns.sum() == pytest.approx(took_ns, abs=len(windows.busy_ns))
    busy = windows.busy_ns.nonzero()[0]
    assert len(busy) in {-(-took_ns // WINDOW_NS), took_ns // WINDOW_NS + 1}


def test_a_stall_of_some_milliseconds_shows_where_it_was():
    """Transfers of one size take a millisecond each, and one of them takes eight."""
    statistics = LaneStatistics()
    for number in range(10):
        add(statistics, number * 10 * MS, 8 * MS if number == 6 else MS, 1 << 20)
    totals = statistics.totals()
    assert (totals.stalls_count, totals.stalled_ns) == (1, pytest.approx(7 * MS, rel=0.01))
    windows = statistics.windows(START_NS + 100 * MS)
    stalled = windows.stalled_ns.nonzero()[0]
    at_ns = [windows.first_ns + int(index) * windows.window_ns - START_NS for index in stalled]
    assert 55 * MS <= min(at_ns) <= max(at_ns) < 70 * MS


def test_what_is_slow_by_less_than_a_stall_is_none():
    """The first transfer sets the rate; one that is a little slower is no news."""
    statistics = LaneStatistics()
    add(statistics, 0, MS, 1 << 20)
    add(statistics, 10 * MS, MS + STALL_NS // 2, 1 << 20)
    assert statistics.totals().stalls_count == 0


def test_errors_are_counted_where_the_transfer_ended():
    """Also those of transfers that moved nothing."""
    statistics = LaneStatistics()
    add(statistics, 0, 12 * MS, 0, errors_count=3)
    assert statistics.totals().errors_count == 3
    windows = statistics.windows(START_NS + 12 * MS)
    assert windows.errors_count.tolist()[-1] == 3
    assert windows.errors_count.sum() == 3


def test_old_windows_go():
    """Memory is bounded: after the last of the windows nothing of a transfer is left in them."""
    statistics = LaneStatistics()
    add(statistics, 0, MS, 1 << 20)
    later = statistics.windows(START_NS + (WINDOWS_COUNT + 2) * WINDOW_NS)
    assert not later.size_bytes.any()
    assert statistics.totals().size_bytes == 1 << 20
    add(statistics, -5 * WINDOW_NS * WINDOWS_COUNT, MS, 1)
    assert not statistics.windows(START_NS + (WINDOWS_COUNT + 2) * WINDOW_NS).size_bytes.any()


def test_a_transfer_longer_than_all_windows_fills_them():
    """What lies before the oldest window is only in the totals."""
    statistics = LaneStatistics()
    took_ns = 2 * WINDOWS_COUNT * WINDOW_NS
    add(statistics, 0, took_ns, 1 << 30)
    windows = statistics.windows(START_NS + took_ns - 1)
    assert windows.size_bytes.sum() == pytest.approx(1 << 29, rel=0.01)
