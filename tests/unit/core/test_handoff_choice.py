"""Which way a handoff goes: what is possible and allowed, and of that the cheapest."""

import pytest

from kvservice.core.errors import NoWayError
from kvservice.core.handoff_choice import (
    UNKNOWN_WIRE,
    WIRE_COSTS,
    HandoffChoice,
    HandoffPolicy,
    Ways,
    WireCost,
    decide,
)

ANY, DIRECT_ONLY, STAGED_ONLY = HandoffPolicy
DIRECT, STAGED = HandoffChoice.DIRECT, HandoffChoice.STAGED


def ways(*direct: str, staged: str | None = None, size_bytes: int = 64 << 20, offered: bool = True) -> Ways:
    """Return what is possible, with blocks that lie in an engine's memory unless told."""
    return Ways(size_bytes, frozenset(direct), offered, staged)


@pytest.mark.parametrize(
    ("policy", "possible", "choice"),
    [
        (ANY, ways("ucx"), DIRECT),
        (ANY, ways(staged="tcp", offered=False), STAGED),
        (ANY, ways(staged="tcp"), STAGED),
        (ANY, ways("ucx", staged="shm"), STAGED),
        (ANY, ways("ucx", staged="tcp"), DIRECT),
        (ANY, ways("tcp", staged="shm"), STAGED),
        (DIRECT_ONLY, ways("tcp", staged="shm"), DIRECT),
        (STAGED_ONLY, ways("ucx", staged="tcp"), STAGED),
    ],
)
def test_the_cheapest_way_that_is_possible_and_allowed_is_taken(policy, possible, choice):
    """Shared memory before one-sided reads before sockets, unless the policy leaves no choice."""
    assert decide(policy, possible).choice is choice


def test_a_tie_goes_to_the_arena():
    """It holds nobody's memory: the engine that offered has its own back at the claim."""
    assert decide(ANY, ways("tcp", staged="tcp")).choice is STAGED
    assert decide(ANY, ways("carrier pigeon", staged="other pigeon")).choice is STAGED


def test_several_ways_into_an_engines_memory_cost_what_the_best_costs():
    """A claimer that has sockets too is not taken for one that has nothing else."""
    assert decide(ANY, ways("tcp", "ucx", "carrier pigeon", staged="tcp")).choice is DIRECT


@pytest.mark.parametrize("size_bytes", [0, 64 << 10, 64 << 20, 64 << 30])
def test_a_transport_that_nobody_knows_is_the_last_choice(size_bytes):
    """Its cost is a guess, so anything built in goes before it, at any size."""
    for name, cost in WIRE_COSTS.items():
        assert cost.of(size_bytes) < UNKNOWN_WIRE.of(size_bytes)
        unknown = ways("carrier pigeon", staged=name, size_bytes=size_bytes)
        assert decide(ANY, unknown).choice is STAGED
        assert decide(ANY, ways("carrier pigeon")).choice is DIRECT


def test_a_cost_has_a_fixed_part_and_one_for_the_bytes():
    """A gigabyte a second is a byte a nanosecond."""
    assert WireCost(1000, 2.0).of(0) == 1000
    assert WireCost(1000, 2.0).of(500) == 1250


@pytest.mark.parametrize(
    ("policy", "possible", "why"),
    [
        (ANY, ways(offered=False), "neither in memory that this side can read nor in the arena"),
        (ANY, ways(), "in memory that no transport of this side leads to"),
        (DIRECT_ONLY, ways(staged="shm"), "in memory that no transport of this side leads to"),
        (STAGED_ONLY, ways("ucx"), "not in the arena, which the offer's policy asks for"),
        (STAGED_ONLY, ways(offered=False), "not in the arena, which the offer's policy asks for"),
        (DIRECT_ONLY, ways(staged="shm", offered=False), "not in an engine's memory"),
    ],
)
def test_without_a_way_the_error_says_which_is_missing(policy, possible, why):
    """Who reads it must know whether to stage the blocks, or to bring another transport."""
    with pytest.raises(NoWayError, match=why):
        decide(policy, possible)


@pytest.mark.parametrize(
    ("policy", "possible", "reason"),
    [
        (DIRECT_ONLY, ways("ucx", staged="shm"), "direct: the policy of the offer"),
        (STAGED_ONLY, ways("ucx", staged="shm"), "staged: the policy of the offer"),
        (ANY, ways("ucx"), "direct: the only way that both sides have"),
        (ANY, ways(staged="tcp"), "staged: the only way that both sides have"),
    ],
)
def test_the_reason_says_why_there_was_no_choice(policy, possible, reason):
    """It is for people who wonder why their bytes went the slow way."""
    assert decide(policy, possible).reason == reason


def test_the_reason_says_what_was_compared():
    """Both costs, whichever of them won: 7 MB at 7 GB/s and at 5 GB/s."""
    staged = decide(ANY, ways("ucx", staged="shm", size_bytes=7_000_000))
    assert staged.reason == ("staged: 1.020 ms out of the arena by shm, 1.500 ms out of the engine's memory")
    direct = decide(ANY, ways("ucx", staged="tcp", size_bytes=7_000_000))
    assert direct.reason == ("direct: 2.250 ms out of the arena by tcp, 1.500 ms out of the engine's memory")
