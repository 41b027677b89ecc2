"""How the bench measures: mirrored rounds, medians with intervals, and figures with goals.

A *contender* is a callable that does some work and returns what it cost (seconds,
mostly). A round runs the contenders in order and then in reverse (A B B A), so that a
drift of the machine meets all of them alike; its two costs are averaged. A ratio is
taken within each round, and reported is the median over the rounds.
"""

from __future__ import annotations

import enum
import json
import math
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

Contender = Callable[[], float]
Samples = dict[str, list[float]]
"""Cost of each contender in each round."""

CONFIDENCE = 0.95
GIGA = 1e9
MAIN_JOB = "main-job"
COMMAND = ".venv/bin/python -m tests.bench"


class Relation(enum.Enum):
    """How a figure must stand to its bound."""

    AT_LEAST = ">="
    AT_MOST = "<="
    BELOW = "<"
    WITHIN = "within a factor of"


@dataclass(frozen=True, slots=True)
class Goal:
    """What a figure is held to; `on_ratio` says whether its ratio or its value is."""

    relation: Relation
    bound: float
    on_ratio: bool = True

    def holds(self, value: float, ratio: float) -> bool:
        """Say whether a figure with this value and ratio reaches the goal."""
        subject = ratio if self.on_ratio else value
        match self.relation:
            case Relation.AT_LEAST:
                return subject >= self.bound
            case Relation.AT_MOST:
                return subject <= self.bound
            case Relation.BELOW:
                return subject < self.bound
            case Relation.WITHIN:
                return 1 / self.bound <= subject <= self.bound

    def __str__(self) -> str:
        subject = "ratio" if self.on_ratio else "value"
        return f"{subject} {self.relation.value} {self.bound:g}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """One measured number beside its limit; `ratios` has one entry a round.

    limit: in `unit`, measured in the same rounds.
    goal: None for a figure that is stated and held to nothing.
    """

    name: str
    value: float
    unit: str
    limit: float
    ratios: Sequence[float]
    goal: Goal | None
    issue: str = MAIN_JOB

    @property
    def ratio(self) -> float:
        """Median of the rounds' ratios."""
        return statistics.median(self.ratios)

    @property
    def holds(self) -> bool | None:
        """Whether the goal is reached; None where there is none."""
        return None if self.goal is None else self.goal.holds(self.value, self.ratio)

    def record(self, command: str) -> dict[str, Any]:
        """Return the figure as the object that `build/bench.json` holds."""
        low, high = median_interval(self.ratios)
        return {
            "name": self.name,
            "issue": self.issue,
            "value": rounded(self.value),
            "unit": self.unit,
            "limit": rounded(self.limit),
            "ratio": rounded(self.ratio),
            "goal": "" if self.goal is None else str(self.goal),
            "holds": self.holds,
            "command": command,
            "ci95": [rounded(low), rounded(high)],
            "rounds": len(self.ratios),
        }


@dataclass(slots=True)
class Bench:
    """What a group is given: how much to measure, and where figures go."""

    is_quick: bool = False
    figures: list[Figure] = field(default_factory=list)

    def rounds(self, full_count: int) -> int:
        """Return how many rounds to run; eight are enough for an interval."""
        return max(8, full_count // 3) if self.is_quick else full_count

    def add(self, figure: Figure) -> None:
        """Take a figure, and say on stderr that there is one more."""
        self.figures.append(figure)
        verdict = {True: "holds", False: "MISS", None: "stated"}[figure.holds]
        print(f"  {verdict:6} {figure.name}: ratio {figure.ratio:.3g}", file=sys.stderr, flush=True)


def mirrored(contenders: dict[str, Contender], rounds_count: int, *, warm_ups_count: int = 1) -> Samples:
    """Run the contenders in mirrored rounds; return each one's mean cost of every round."""
    order = [*contenders, *reversed(contenders)]
    for _ in range(warm_ups_count):
        for contender in contenders.values():
            contender()
    samples: Samples = {name: [] for name in contenders}
    for _ in range(rounds_count):
        costs = dict.fromkeys(contenders, 0.0)
        for name in order:
            costs[name] += contenders[name]() / 2
        for name, cost in costs.items():
            samples[name].append(cost)
    return samples


def timed(work: Callable[[], object]) -> Contender:
    """Return a contender whose cost is the wall time of the work, in seconds."""

    def contender() -> float:
        started = time.perf_counter()
        work()
        return time.perf_counter() - started

    return contender


def ratios(samples: Samples, above: str, below: str) -> list[float]:
    """Return cost of `above` over cost of `below`, round by round."""
    return [top / bottom for top, bottom in zip(samples[above], samples[below], strict=True)]


def cheapest(samples: Samples, names: Sequence[str]) -> str:
    """Return the name with the least median cost: the limit among several ways of doing it."""
    return min(names, key=lambda name: statistics.median(samples[name]))


def speed_figure(
    name: str,
    samples: Samples,
    contender: str,
    limit: str,
    size: float,
    goal: Goal | None,
    unit: str = "GB/s",
) -> Figure:
    """Return `size` units a second of a contender beside those of its limit; more is better."""
    return Figure(
        name=name,
        value=size / statistics.median(samples[contender]),
        unit=unit,
        limit=size / statistics.median(samples[limit]),
        ratios=ratios(samples, limit, contender),
        goal=goal,
    )


def cost_figure(
    name: str, samples: Samples, contender: str, limit: str, scale: float, goal: Goal | None, unit: str
) -> Figure:
    """Return the cost of a contender, times `scale`, beside that of its limit; less is better."""
    return Figure(
        name=name,
        value=scale * statistics.median(samples[contender]),
        unit=unit,
        limit=scale * statistics.median(samples[limit]),
        ratios=ratios(samples, contender, limit),
        goal=goal,
    )


def median_interval(values: Sequence[float], confidence: float = CONFIDENCE) -> tuple[float, float]:
    """Return an interval that holds the median of what the values are drawn from.

    By order statistics, so it supposes nothing about the distribution: the number of
    values below the true median is binomial. With fewer than six values there is no
    such interval of 95 %, and the extremes are returned.
    """
    ordered = sorted(values)
    count = len(ordered)
    tail = (1 - confidence) / 2
    below, rank = 0.0, 0
    while rank < count // 2:
        below += math.comb(count, rank) / 2**count
        if below > tail:
            break
        rank += 1
    first = max(rank - 1, 0)
    return ordered[first], ordered[count - 1 - first]


def rounded(value: float, digits: int = 4) -> float:
    """Return the value with so many significant digits."""
    return float(f"{value:.{digits}g}")


def write_json(path: Path, records: Sequence[dict[str, Any]]) -> None:
    """Write the records, making the folder if there is none."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(list(records), indent=1) + "\n", encoding="utf-8")


def table(records: Sequence[dict[str, Any]]) -> str:
    """Return the records as lines for a reader."""
    lines = [f"{'figure':58} {'value':>9} {'limit':>9} {'unit':9} {'ratio':>7} {'95 %':>15}  goal"]
    for record in records:
        verdict = {True: "holds", False: "MISS", None: ""}[record["holds"]]
        low, high = record["ci95"]
        interval = f"{low:.3g}..{high:.3g}"
        lines.append(
            f"{record['name']:58} {record['value']:9.4g} {record['limit']:9.4g} {record['unit']:9} "
            f"{record['ratio']:7.3g} {interval:>15}  {record['goal']} {verdict}".rstrip()
        )
    return "\n".join(lines)
