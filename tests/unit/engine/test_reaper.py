import logging

from kvservice.engine.clock import StallAwareClock
from kvservice.engine.coordinator import Coordinator
from kvservice.engine.reaper import QUARANTINE_ALARM_NS, Reaper
from tests.core_world import World


def test_a_quarantine_that_lasts_raises_one_alarm(caplog):
    """Nothing is freed by time alone, so somebody has to be told who keeps the slots."""
    world = World()
    client = world.attach(name="stuck engine")
    client.reserve(client.open(), [1, 2])
    world.advance(11)
    coordinator = Coordinator(
        world.state,
        arena=None,
        clock=StallAwareClock(lambda: world.now_ns, longest_gap_ns=2 * QUARANTINE_ALARM_NS),
    )

    with caplog.at_level(logging.WARNING, "kvservice"):
        reaper = Reaper(coordinator)
        reaper.raise_alarms()
        assert not caplog.records
        world.now_ns += QUARANTINE_ALARM_NS
        reaper.raise_alarms()
        reaper.raise_alarms()
    told = [record.getMessage() for record in caplog.records if "stuck engine" in record.getMessage()]
    assert len(told) == 1
    assert "2 slots" in told[0]
