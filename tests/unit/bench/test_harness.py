"""The arithmetic of the bench: rounds, intervals, figures and goals."""

from __future__ import annotations

import itertools
import json
import random

import pytest

from tests.bench.harness import (
    Bench,
    Figure,
    Goal,
    Relation,
    cheapest,
    cost_figure,
    median_interval,
    mirrored,
    ratios,
    rounded,
    speed_figure,
    table,
    write_json,
)


def figure(value: float, ratio: float, goal: Goal | None) -> Figure:
    """Build a figure of eight equal rounds."""
    return Figure(name="x", value=value, unit="GB/s", limit=1.0, ratios=[ratio] * 8, goal=goal)


def test_a_round_runs_its_contenders_there_and_back():
    """A B B A: a drift of the machine meets every contender alike."""
    order: list[str] = []
    costs = itertools.count(1)

    def contender(name):
        return lambda: (order.append(name), float(next(costs)))[1]

    samples = mirrored({"a": contender("a"), "b": contender("b")}, 2, warm_ups_count=0)
    assert order == ["a", "b", "b", "a"] * 2
    # A cost that rises steadily is the same for both.
    assert samples == {"a": [2.5, 6.5], "b": [2.5, 6.5]}


def test_warm_ups_are_run_and_not_counted():
    """The first run of anything pays for page faults and caches."""
    calls: list[int] = []
    samples = mirrored({"a": lambda: (calls.append(1), 1.0)[1]}, 3, warm_ups_count=2)
    assert len(calls) == 2 + 2 * 3
    assert samples["a"] == [1.0] * 3


@pytest.mark.parametrize(
    ("count", "first"),
    [(1, 0), (5, 0), (6, 0), (8, 0), (9, 1), (25, 7), (60, 21)],
)
def test_the_interval_of_a_median_takes_the_tabled_order_statistics(count, first):
    """The ranks are those of the binomial table for 95 %; too few values give their extremes."""
    values = [float(value) for value in range(count)]
    random.Random(1).shuffle(values)
    assert median_interval(values) == (float(first), float(count - 1 - first))


def test_the_interval_covers_the_median_as_often_as_it_says():
    """Of many samples of a skewed distribution, at least 95 % of the intervals hold its median."""
    seeded = random.Random(7)
    trials_count, median = 2000, 0.6931
    covered = 0
    for _ in range(trials_count):
        low, high = median_interval([seeded.expovariate(1.0) for _ in range(20)])
        covered += low <= median <= high
    assert covered / trials_count > 0.945


def test_ratios_are_taken_within_a_round():
    """A round in which everything was slow must not move the ratio."""
    samples = {"limit": [1.0, 10.0, 1.0], "act": [2.0, 20.0, 2.0]}
    assert ratios(samples, "limit", "act") == [0.5, 0.5, 0.5]


def test_the_limit_is_the_better_of_several_ways():
    """The copy limit is whichever copy is faster on this machine."""
    assert (
        cheapest({"memcpy": [2.0, 2.0, 9.0], "streaming": [3.0, 1.0, 1.0]}, ["memcpy", "streaming"])
        == "streaming"
    )


def test_speed_and_cost_look_the_right_way_round():
    """Twice the time is half the speed and twice the cost."""
    samples = {"act": [2.0] * 8, "limit": [1.0] * 8}
    speed = speed_figure("s", samples, "act", "limit", 4.0, None)
    cost = cost_figure("c", samples, "act", "limit", 1e6, None, "us")
    assert (speed.value, speed.limit, speed.ratio) == (2.0, 4.0, 0.5)
    assert (cost.value, cost.limit, cost.ratio) == (2e6, 1e6, 2.0)


@pytest.mark.parametrize(
    ("goal", "value", "ratio", "holds"),
    [
        (Goal(Relation.AT_LEAST, 0.9), 1.0, 0.9, True),
        (Goal(Relation.AT_LEAST, 0.9), 1.0, 0.899, False),
        (Goal(Relation.AT_MOST, 2.0), 1.0, 2.0, True),
        (Goal(Relation.AT_MOST, 2.0), 1.0, 2.01, False),
        (Goal(Relation.BELOW, 1.0, on_ratio=False), 1.0, 0.5, False),
        (Goal(Relation.BELOW, 1.0, on_ratio=False), 0.99, 5.0, True),
        (Goal(Relation.WITHIN, 1.5), 1.0, 0.6, False),
        (Goal(Relation.WITHIN, 1.5), 1.0, 0.7, True),
        (Goal(Relation.WITHIN, 1.5), 1.0, 1.51, False),
    ],
)
def test_a_goal_holds_its_ratio_or_its_value_to_the_bound(goal, value, ratio, holds):
    """A goal is met at its bound and missed beyond it; `on_ratio` picks what is looked at."""
    assert goal.holds(value, ratio) is holds


def test_a_record_has_what_scripts_read(tmp_path):
    """The keys of build/bench.json are part of the contract."""
    record = figure(1.23456, 0.987654, Goal(Relation.AT_LEAST, 0.9)).record("make bench")
    write_json(tmp_path / "build" / "bench.json", [record])
    (read,) = json.loads((tmp_path / "build" / "bench.json").read_text())
    assert read == {
        "name": "x",
        "issue": "main-job",
        "value": 1.235,
        "unit": "GB/s",
        "limit": 1.0,
        "ratio": 0.9877,
        "goal": "ratio >= 0.9",
        "holds": True,
        "command": "make bench",
        "ci95": [0.9877, 0.9877],
        "rounds": 8,
    }


def test_a_miss_is_printed_as_a_miss():
    """Neither a missed nor a missing goal may pass for one that holds."""
    goal = Goal(Relation.AT_LEAST, 0.9)
    lines = table(
        [figure(1.0, r, g).record("c") for r, g in ((0.5, goal), (0.95, goal), (0.5, None))]
    ).splitlines()
    assert lines[1].endswith("MISS")
    assert lines[2].endswith("holds")
    assert "holds" not in lines[3]
    assert "MISS" not in lines[3]


def test_a_quick_bench_still_runs_enough_for_an_interval():
    """Below six rounds there is no 95 % interval of a median."""
    assert Bench(is_quick=True).rounds(60) == 20
    assert Bench(is_quick=True).rounds(9) == 8
    assert Bench().rounds(60) == 60


@pytest.mark.parametrize(("value", "expected"), [(123456.0, 123500.0), (0.0012345, 0.001234), (0.0, 0.0)])
def test_numbers_are_rounded_to_digits_not_places(value, expected):
    """A figure of 0.0012 cores must not turn into 0."""
    assert rounded(value) == pytest.approx(expected, rel=1e-3)
