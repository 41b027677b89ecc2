"""An engine is several processes: what one of them held is nobody's until all have let go or are gone."""

from __future__ import annotations

import contextlib
import os
import signal

import pytest

from kvclient import ArenaFullError, DeadlineError
from kvclient.sync import KvClient
from tests.integration.daemon_process import check_stored, content, keys, opened, settings_of, tier, until
from tests.integration.engine_child import READ, WRITTEN
from tests.integration.scripted_child import ScriptedChild, scripted_child

TOTAL_COUNT = 64
HELD_COUNT = len(READ) + len(WRITTEN)
SETTINGS = {"lease.ttl_ms": 600, "lease.renew_interval_ms": 150}
AT_ONCE_S = 2.0
"""Far less than any time-out that could be at work here, and long enough for two loaded cores."""


class House:
    """A daemon of TOTAL_COUNT slots, an onlooker of another engine, and the processes of one engine."""

    def __init__(self, daemon, client, namespace, stack: contextlib.ExitStack) -> None:
        self.daemon = daemon
        self.client = client
        self.namespace = namespace
        self.incarnation = os.urandom(16)
        self._stack = stack
        self._firsts = iter(range(1000, 1_000_000, 1000))

    def start(self, *verbs: str, incarnation: bytes = b"") -> list[ScriptedChild]:
        """Start processes of the engine, and wait until they hold what they hold."""
        engine = (incarnation or self.incarnation).hex()
        children = [
            self._stack.enter_context(scripted_child("engine_child.py", verb, self.daemon.lane, engine))
            for verb in verbs
        ]
        assert [child.hear() for child in children] == list(verbs)
        return children

    def sessions_count(self) -> int:
        """Count the sessions besides the onlooker's."""
        return len(self.client.list_tiers().owners) - 1

    def waiting_count(self) -> int:
        """Count the slots that wait for somebody's word."""
        counts = tier(self.client)
        return counts.slots_quarantined_count + counts.slots_evicting_count

    def wait_for_the_end(self) -> None:
        """Wait until the right to write and the right to read have ended; what was read is purged."""
        self.client.purge(self.namespace)
        until(lambda: not any(owner.leases_count for owner in self.client.list_tiers().owners), "no lease")
        until(lambda: not tier(self.client).slots_reserved_count, "no reservation")
        assert self.waiting_count() == HELD_COUNT

    def check_kept(self) -> None:
        """The held slots are nobody's: all others can be had at once, not one more, and they stay apart."""
        first = next(self._firsts)
        others = range(first, first + TOTAL_COUNT - HELD_COUNT)
        with pytest.raises(ArenaFullError) as caught:
            self.namespace.put(keys([first - 1, *others]), content([first - 1, *others]))
        assert caught.value.retry_after_ms
        assert self.namespace.put(keys(others), content(others)).stored_count == len(others)
        check_stored(self.namespace, others)
        assert self.waiting_count() == HELD_COUNT

    def check_free(self) -> None:
        """Every slot of the arena can be had at once."""
        until(lambda: not self.waiting_count(), "nothing waits", AT_ONCE_S)
        first = next(self._firsts)
        every = range(first, first + TOTAL_COUNT)
        assert self.namespace.put(keys(every), content(every)).stored_count == TOTAL_COUNT
        check_stored(self.namespace, every)


@pytest.fixture
def house(start_daemon):
    """A house with no process of the engine yet; the blocks that a lease is to be of are stored."""
    daemon = start_daemon(capacity="4MiB", segment="256KiB", settings=SETTINGS)
    with contextlib.ExitStack() as stack:
        client, namespace = stack.enter_context(opened(daemon.lane, client_name="onlooker"))
        namespace.put(keys(READ), content(READ))
        yield House(daemon, client, namespace, stack)
    assert "Traceback" not in daemon.said()


def stop(*children: ScriptedChild) -> None:
    """Make processes stand still: they neither acknowledge nor die."""
    for child in children:
        child.signal(signal.SIGSTOP)
    until(lambda: all(child.is_stopped() for child in children), "they stand still")


def test_slots_wait_until_every_process_of_the_engine_is_dead(house, rng):
    """The rights of one that stands still expire; it and others map the memory, and are killed one by one.

    One that lives acknowledges and is waited for no more; one of another engine never was.
    """
    *silent, lively = house.start("hold", "attend", "attend", "attend")
    (stranger,) = house.start("attend", incarnation=os.urandom(16))
    stop(stranger, *silent)
    house.wait_for_the_end()
    rng.shuffle(silent)
    while silent:
        house.check_kept()
        silent.pop().kill()
        until(lambda: house.sessions_count() == 2 + len(silent), "the session has ended", AT_ONCE_S)
    house.check_free()
    assert stranger.is_stopped()
    lively.tell("leave")
    assert lively.hear() == "left"


def test_the_word_of_one_process_is_not_that_of_another(house):
    """The holder dies. One of the others leaves, one dies, one acknowledges: only all of that is an end."""
    holder, *silent = house.start("hold", "attend", "attend", "attend")
    leaves, dies, goes_on = silent
    stop(*silent)
    holder.kill()
    until(lambda: house.sessions_count() == 3, "the session of the dead has ended", AT_ONCE_S)
    house.wait_for_the_end()
    house.check_kept()
    leaves.signal(signal.SIGCONT)
    leaves.tell("leave")
    assert leaves.hear() == "left"
    until(lambda: house.sessions_count() == 2, "one has left")
    house.check_kept()
    dies.kill()
    until(lambda: house.sessions_count() == 1, "one is dead", AT_ONCE_S)
    house.check_kept()
    goes_on.signal(signal.SIGCONT)
    house.check_free()
    assert house.sessions_count() == 1


def test_a_session_that_nobody_waited_for_is_not_waited_for(house):
    """Its Attach was answered too late: the caller had given up, so nobody will ever give its word."""
    (holder,) = house.start("hold")
    house.daemon.signal(signal.SIGSTOP)
    try:
        settings = settings_of(house.daemon.lane, engine_incarnation=house.incarnation, connect_timeout_s=0.1)
        for _ in range(3):
            with pytest.raises(DeadlineError):
                KvClient.connect(settings)
    finally:
        house.daemon.signal(signal.SIGCONT)
    until(lambda: house.sessions_count() == 1, "the late sessions have ended", AT_ONCE_S)
    holder.kill()
    until(lambda: house.sessions_count() == 0, "the session of the dead has ended", AT_ONCE_S)
    house.client.purge(house.namespace)
    house.check_free()
