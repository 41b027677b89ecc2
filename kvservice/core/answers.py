"""What the state answers to an event; values only."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvservice.core.engine_memory import KnownLayout
from kvservice.core.handoff_choice import Decision, HandoffChoice
from kvservice.core.outcomes import ItemOutcome
from kvservice.core.records import HandoffState, Notice
from kvservice.core.slots import U8, U32, U64, Slots


@dataclass(frozen=True, slots=True)
class AttachAnswer:
    """The session that the caller now has."""

    token: bytes
    session_id: int
    is_resumed: bool


@dataclass(frozen=True, slots=True)
class OpenAnswer:
    """Handles of a namespace: one space for each part asked for."""

    namespace_id: bytes
    space_ids: tuple[int, ...]
    identity_digest: bytes
    shape_digests: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class LeaseAnswer:
    """A lease over the first `keys_count` keys of the request."""

    lease_id: int
    keys_count: int
    slots: Slots
    remaining_ns: int


@dataclass(frozen=True, slots=True)
class LookupAnswer:
    """outcomes: (keys,) uint8 of ItemOutcome: HIT, PENDING or MISS.

    slots: where the prefix is, if that was asked for; nothing holds them.
    """

    outcomes: U8
    prefix_count: int
    lease: LeaseAnswer | None
    slots: Slots | None = None


@dataclass(frozen=True, slots=True)
class ReserveAnswer:
    """outcomes: (keys,) uint8: GRANTED, ALREADY_COMMITTED or PENDING.

    slots: those of the granted keys, key-major. reservation_id is 0 when nothing
    was granted.
    """

    reservation_id: int
    outcomes: U8
    slots: Slots
    remaining_ns: int


@dataclass(frozen=True, slots=True)
class CommitAnswer:
    """Outcome DONE, by this call or by an earlier one.

    outcomes: one byte for each key that the commit named; empty where it named none.
    """

    outcome: ItemOutcome
    keys_count: int
    outcomes: bytes = b""


@dataclass(frozen=True, slots=True)
class RenewAnswer:
    """Outcomes, (n,) uint8 each, and the shortest time left among the renewed."""

    lease_outcomes: U8
    reservation_outcomes: U8
    remaining_ns: int


@dataclass(frozen=True, slots=True)
class BeatAnswer:
    """A renewal, the ids whose memory this process may still touch, and news of what it offered.

    handoff_outcomes: (n,) uint8 of the claimed handoffs that were to be renewed.
    """

    renewal: RenewAnswer
    revoked_ids: U64
    handoff_outcomes: U8
    notices: tuple[Notice, ...]


@dataclass(frozen=True, slots=True)
class TransferAnswer:
    """Slots pinned for a transfer. block_bytes: (slots,) uint64, payload of each.

    remaining_ns: how long a one-sided transfer may begin operations.
    """

    transfer_id: int
    slots: Slots
    block_bytes: U64
    remaining_ns: int = 0


@dataclass(frozen=True, slots=True)
class SegmentsAnswer:
    """Numbers of registered segments and layouts, in the order of the request."""

    segment_ids: tuple[int, ...]
    layout_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class OfferAnswer:
    """A handoff that waits for its claim.

    hold_ns: time after which the memory is released in any case.
    """

    handoff_id: int
    remaining_ns: int
    hold_ns: int


@dataclass(frozen=True, slots=True)
class ClaimAnswer:
    """A claimed handoff.

    keys: packed. layouts: one for each space, if it is direct; lease: if it is staged.
    blocks, checksums: as offered, key-major.
    """

    decision: Decision
    keys: bytes
    engine_incarnation: bytes
    layouts: tuple[KnownLayout, ...]
    blocks: U32
    checksums: U32
    lease: LeaseAnswer | None
    remaining_ns: int


@dataclass(frozen=True, slots=True)
class HandoffAnswer:
    """What is known of a handoff."""

    state: HandoffState
    is_released: bool
    keys_count: int
    choice: HandoffChoice = field(default=HandoffChoice.UNDECIDED)
    reason: str = ""
