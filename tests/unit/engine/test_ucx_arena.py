"""The supervisor of the lender: it starts, hands over what there is, and starts again, ever more slowly."""

import logging
import os
import re
import signal

import pytest

from kvservice.core.errors import NoWayError
from kvservice.engine.ucx_arena import LentArena, UcxArena
from kvservice.native import ucx
from kvservice.transports.one_sided import EndpointSettings
from tests.integration.daemon_process import until

SEGMENT_BYTES = 64 << 10


class Cuts:
    """Writes that wait to be cut off, and those that have been."""

    def __init__(self) -> None:
        self.waiting: tuple[int, ...] = ()
        self.told: list[tuple[int, ...]] = []

    def cut(self, transfer_ids: tuple[int, ...]) -> None:
        self.told.append(transfer_ids)
        self.waiting = ()


@pytest.fixture
def cuts():
    """Nothing waits."""
    return Cuts()


@pytest.fixture
def make(cuts):
    """Return a way to make lenders, which stop with the test."""
    made = []

    def lender(**settings) -> UcxArena:
        plain = {name: value for name, value in os.environ.items() if not name.startswith("KVSERVICE_")}
        settings = EndpointSettings(**({"devices": "lo"} | settings))
        made.append(UcxArena(settings, plain, uncut=lambda: cuts.waiting, cut=cuts.cut))
        return made[-1]

    yield lender
    for each in made:
        each.stop()
        each.stop()


@pytest.fixture
def arena():
    """An arena of two segments."""
    arena = LentArena(segments_count=2, segment_bytes=SEGMENT_BYTES)
    yield arena
    arena.close()


@pytest.fixture
def lender(make, arena):
    """A lender of that arena."""
    if ucx.why_not():
        pytest.skip(ucx.why_not())
    lender = make()
    lender.start({number: arena.segment(number) for number in range(2)})
    arena.lender = lender
    return lender


def is_lent(lender, *numbers: int) -> bool:
    """Say whether segments are lent."""
    try:
        return len(lender.segments(numbers)) == len(numbers)
    except NoWayError:
        return False


@pytest.mark.parametrize(
    ("settings", "words"),
    [({"library": "/nowhere/libucp.so"}, "/nowhere"), ({"transport": ""}, "no transport")],
)
def test_a_lender_that_cannot_lend_says_why(make, settings, words):
    """At the start, where somebody reads it; and it is not tried again and again."""
    lender = make(**settings)
    with pytest.raises(NoWayError, match=words):
        lender.start({})
    assert lender.lives_count == 0
    assert not is_lent(lender, 0)


def test_segments_come_and_go_with_the_arena(lender, arena):
    """What is made later is lent soon after; what is given up, at once no more."""
    assert lender.facts.transport == "ucx"
    first, second = lender.segments([0, 1])
    assert (first.size_bytes, second.size_bytes) == (SEGMENT_BYTES, SEGMENT_BYTES)
    assert first.base_address != second.base_address
    number = arena.create_segment()
    until(lambda: is_lent(lender, number), "the new segment is lent")
    arena.discard_segment(0)
    assert not is_lent(lender, 0)
    assert is_lent(lender, 1, number)
    with pytest.raises(NoWayError, match=r"segments \[0\] of the arena are not lent"):
        lender.segments([0, 1])


def test_a_lender_that_dies_again_and_again_comes_back_more_slowly(lender, caplog):
    """Each time with all segments, and each time the log says so, with the pause."""
    with caplog.at_level(logging.ERROR, "kvservice"):
        for life in range(1, 4):
            assert lender.lives_count == life
            before = lender.segments([0])[0].ways[0].address
            os.kill(lender.pid, signal.SIGKILL)
            until(lambda life=life: lender.lives_count > life and is_lent(lender, 0, 1), "another lives")
            assert lender.segments([0])[0].ways[0].address != before
    said = [record.getMessage() for record in caplog.records]
    assert [re.search(r"the next starts in (\S+) s", line)[1] for line in said] == ["0.1", "0.2", "0.4"]
    assert all("SIGKILL" in line for line in said)


def test_a_write_that_waits_is_cut_off_by_the_end_of_the_lender(lender, cuts):
    """It is told once the lender is dead, and not as a failure of it."""
    pid = lender.pid
    cuts.waiting = (7, 8)
    lender.look_again()
    until(lambda: cuts.told, "the writes are cut off")
    assert cuts.told == [(7, 8)]
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    until(lambda: is_lent(lender, 0, 1), "the arena is lent again", 5.0)
    assert lender.lives_count == 2


def test_stopping_ends_the_lender(lender):
    """In order, and nothing is lent any more."""
    pid = lender.pid
    lender.stop()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    assert not is_lent(lender, 0)
    lender.look_again()
    lender.drop(1)
