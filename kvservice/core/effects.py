"""What the state asks of the world; values only. Running one twice is harmless."""

from __future__ import annotations

from dataclasses import dataclass

from kvservice.core.records import Notice


class Effect:
    """Base of all effects."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class LendSegment(Effect):
    """A segment now serves a tenant.

    is_fresh: its memory was never used, so its pages are worth touching ahead.
    """

    segment: int
    tenant: str
    is_fresh: bool


@dataclass(frozen=True, slots=True)
class Revoke(Effect):
    """Tell a session that a reservation or lease of its engine has ended."""

    token: bytes
    capability_id: int


@dataclass(frozen=True, slots=True)
class Tell(Effect):
    """Tell a session what became of a handoff that it offered."""

    token: bytes
    notice: Notice


@dataclass(frozen=True, slots=True)
class EndSession(Effect):
    """A session has ended: close what the edge holds for it."""

    token: bytes


@dataclass(frozen=True, slots=True)
class NewsForTenant(Effect):
    """The history of a tenant has grown: wake those who watch it."""

    tenant: str
