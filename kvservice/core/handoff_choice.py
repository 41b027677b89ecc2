"""Which way a handoff goes: out of the engine's memory, or out of the arena.

Pure: what is possible and what is allowed go in, a choice with its reason comes out.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

from kvservice.core.errors import NoWayError


class HandoffPolicy(IntEnum):
    """What the one who offers allows; the numbers of `kv.v1.HandoffPolicy`."""

    ANY = 0
    DIRECT = 1
    STAGED = 2


class HandoffChoice(IntEnum):
    """Which way was picked; the numbers of `kv.v1.HandoffChoice`."""

    UNDECIDED = 0
    DIRECT = 1
    STAGED = 2


@dataclass(frozen=True, slots=True)
class WireCost:
    """What moving bytes takes: a fixed part, and bytes a nanosecond (which is GB/s)."""

    fixed_ns: int
    bytes_per_ns: float

    def of(self, size_bytes: int) -> float:
        """Return the nanoseconds for so many bytes."""
        return self.fixed_ns + size_bytes / self.bytes_per_ns


WIRE_COSTS = {
    "shm": WireCost(20_000, 7.0),
    "ucx": WireCost(100_000, 5.0),
    "tcp": WireCost(250_000, 3.5),
}
"""Of one host, cold, in blocks of 64 KiB and more, as measured on a machine without RDMA. They only
order the ways, so what matters is that shared memory is ahead of one-sided reads, and both of sockets."""

UNKNOWN_WIRE = WireCost(500_000, 1.0)
"""Of a transport that is not built in: taken where there is no other."""


@dataclass(frozen=True, slots=True)
class Ways:
    """What is possible between the two sides of one handoff.

    size_bytes: of all blocks.
    direct: transports that lead to the memory offered and that the claimer has.
    is_offered_direct: the blocks lie in an engine's memory at all.
    staged: transport by which the claimer reads the arena; None where the blocks are not there.
    """

    size_bytes: int
    direct: frozenset[str]
    is_offered_direct: bool
    staged: str | None


@dataclass(frozen=True, slots=True)
class Decision:
    """The choice, and a sentence for the record."""

    choice: HandoffChoice
    reason: str


def decide(policy: HandoffPolicy, ways: Ways) -> Decision:
    """Pick the allowed way that costs least; a tie goes to the arena, which holds nobody's memory.

    Raises:
        NoWayError: none is both possible and allowed.
    """
    direct_ns, staged_ns = _direct_ns(ways), _staged_ns(ways)
    if policy is HandoffPolicy.STAGED:
        direct_ns = None
    elif policy is HandoffPolicy.DIRECT:
        staged_ns = None
    if direct_ns is None and staged_ns is None:
        raise NoWayError(_why_not(policy, ways))
    if staged_ns is None:
        return Decision(HandoffChoice.DIRECT, f"direct: {_only(policy, HandoffPolicy.DIRECT)}")
    if direct_ns is None:
        return Decision(HandoffChoice.STAGED, f"staged: {_only(policy, HandoffPolicy.STAGED)}")
    compared = (
        f"{staged_ns / 1e6:.3f} ms out of the arena by {ways.staged}, "
        f"{direct_ns / 1e6:.3f} ms out of the engine's memory"
    )
    if staged_ns <= direct_ns:
        return Decision(HandoffChoice.STAGED, f"staged: {compared}")
    return Decision(HandoffChoice.DIRECT, f"direct: {compared}")


def _direct_ns(ways: Ways) -> float | None:
    costs = [WIRE_COSTS.get(name, UNKNOWN_WIRE).of(ways.size_bytes) for name in ways.direct]
    return min(costs, default=None)


def _staged_ns(ways: Ways) -> float | None:
    if ways.staged is None:
        return None
    return WIRE_COSTS.get(ways.staged, UNKNOWN_WIRE).of(ways.size_bytes)


def _only(policy: HandoffPolicy, wanted: HandoffPolicy) -> str:
    return "the policy of the offer" if policy is wanted else "the only way that both sides have"


def _why_not(policy: HandoffPolicy, ways: Ways) -> str:
    where = "neither in memory that this side can read nor in the arena"
    if policy is HandoffPolicy.STAGED:
        where = "not in the arena, which the offer's policy asks for"
    elif policy is HandoffPolicy.DIRECT and not ways.is_offered_direct:
        where = "not in an engine's memory, which the offer's policy asks for"
    elif ways.is_offered_direct:
        where = "in memory that no transport of this side leads to"
    return f"the blocks are {where}; compute them, or offer them another way"
