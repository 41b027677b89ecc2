"""The tree of failures, one class per reason.

A normal outcome (a miss, a key that is committed already) is a return value; a
failure is one of these. Every edge maps them through one table
(`kvservice.service.status`), and clients get the same classes back
(`kvclient.errors`). `Reason` mirrors `kv.v1.ErrorReason`, which the core cannot
import; a test holds the two together.
"""

from __future__ import annotations

from enum import IntEnum
from typing import ClassVar


class Reason(IntEnum):
    """Machine-readable reason; the numbers of `kv.v1.ErrorReason`."""

    UNSPECIFIED = 0
    INVALID_FIELD = 1
    BATCH_SIZE = 2
    DUPLICATE_KEY = 3
    BLOCK_SIZE = 4
    SESSION_UNKNOWN = 5
    TENANT_UNKNOWN = 6
    SPACE_NOT_OPEN = 7
    NOT_OWNER = 8
    RESERVATION_UNKNOWN = 9
    LEASE_UNKNOWN = 10
    RESERVATION_EXPIRED = 11
    RESERVATION_ABORTED = 12
    LEASE_EXPIRED = 13
    STALE_INCARNATION = 14
    STALE_GENERATION = 15
    REQUEST_ID_REUSED = 16
    ARENA_FULL = 17
    QUOTA_EXCEEDED = 18
    LIMIT_REACHED = 19
    CHECKSUM_MISMATCH = 20
    DRAINING = 21
    EVENTS_LOST = 22
    MALFORMED = 23
    UNKNOWN_METHOD = 24
    DEADLINE = 25
    PEER_UNAVAILABLE = 26
    INVARIANT = 27
    INCOMPLETE_BLOCK = 28
    HANDOFF_UNKNOWN = 29
    HANDOFF_CLAIMED = 30
    HANDOFF_ENDED = 31
    NO_WAY = 32
    REPRESENTATION_MISMATCH = 33
    SEGMENT_UNKNOWN = 34
    SEGMENT_IN_USE = 35


class KvError(Exception):
    """Base of every failure of the service.

    The message says what is wrong, with which id or value, and what to do.
    `retry_after_ms` is a hint, or None where a retry of the same call is useless.
    """

    reason: ClassVar[Reason] = Reason.UNSPECIFIED

    def __init__(self, message: str, *, retry_after_ms: int | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.retry_after_ms = retry_after_ms


class InvalidFieldError(KvError):
    """A field is missing, malformed or out of its range."""

    reason = Reason.INVALID_FIELD


class BatchSizeError(KvError):
    """A batch is empty or too large."""

    reason = Reason.BATCH_SIZE


class DuplicateKeyError(KvError):
    """One key stands twice in one batch."""

    reason = Reason.DUPLICATE_KEY


class BlockSizeError(KvError):
    """A block's size contradicts its declaration, or no segment can hold it."""

    reason = Reason.BLOCK_SIZE


class SessionUnknownError(KvError):
    """The session is unknown or has ended."""

    reason = Reason.SESSION_UNKNOWN


class TenantUnknownError(KvError):
    """The credentials name no tenant."""

    reason = Reason.TENANT_UNKNOWN


class SpaceNotOpenError(KvError):
    """The space was not opened by this session."""

    reason = Reason.SPACE_NOT_OPEN


class NotOwnerError(KvError):
    """The reservation or lease belongs to another engine."""

    reason = Reason.NOT_OWNER


class ReservationUnknownError(KvError):
    """No such reservation was granted to this engine."""

    reason = Reason.RESERVATION_UNKNOWN


class LeaseUnknownError(KvError):
    """No such lease was granted to this engine."""

    reason = Reason.LEASE_UNKNOWN


class ReservationExpiredError(KvError):
    """The reservation expired; nothing was committed."""

    reason = Reason.RESERVATION_EXPIRED


class ReservationAbortedError(KvError):
    """The reservation was aborted; nothing was committed."""

    reason = Reason.RESERVATION_ABORTED


class LeaseExpiredError(KvError):
    """The lease expired; what was read under it must be discarded."""

    reason = Reason.LEASE_EXPIRED


class StaleIncarnationError(KvError):
    """The handle is of an earlier life of the daemon."""

    reason = Reason.STALE_INCARNATION


class StaleGenerationError(KvError):
    """The slot had another owner since; no byte of it may be used."""

    reason = Reason.STALE_GENERATION


class RequestIdReusedError(KvError):
    """The same request id came with other content."""

    reason = Reason.REQUEST_ID_REUSED


class ArenaFullError(KvError):
    """No memory can be freed for this now."""

    reason = Reason.ARENA_FULL


class QuotaExceededError(KvError):
    """The tenant's quota is used up by blocks that cannot be evicted."""

    reason = Reason.QUOTA_EXCEEDED


class LimitReachedError(KvError):
    """A bound on sessions, reservations or leases is reached."""

    reason = Reason.LIMIT_REACHED


class ChecksumMismatchError(KvError):
    """Bytes do not have the checksum that was committed."""

    reason = Reason.CHECKSUM_MISMATCH


class DrainingError(KvError):
    """The daemon is draining and takes no new work."""

    reason = Reason.DRAINING


class EventsLostError(KvError):
    """The resume point is older than the history kept."""

    reason = Reason.EVENTS_LOST


class MalformedError(KvError):
    """A frame or message cannot be parsed."""

    reason = Reason.MALFORMED


class UnknownMethodError(KvError):
    """The method does not exist on this edge."""

    reason = Reason.UNKNOWN_METHOD


class DeadlineError(KvError):
    """The deadline passed before an answer; the call may have taken effect."""

    reason = Reason.DEADLINE


class PeerUnavailableError(KvError):
    """The other side is gone or cannot be reached."""

    reason = Reason.PEER_UNAVAILABLE


class InvariantError(KvError):
    """A rule of the service itself is broken: a bug, which stops the daemon."""

    reason = Reason.INVARIANT


class IncompleteBlockError(KvError):
    """A commit came while bytes of the reservation were still being written."""

    reason = Reason.INCOMPLETE_BLOCK


class HandoffUnknownError(KvError):
    """No such handoff was offered in this tenant, or it is forgotten."""

    reason = Reason.HANDOFF_UNKNOWN


class HandoffClaimedError(KvError):
    """Another session has claimed the handoff."""

    reason = Reason.HANDOFF_CLAIMED


class HandoffEndedError(KvError):
    """The handoff had ended before; what was read under it must be discarded."""

    reason = Reason.HANDOFF_ENDED


class NoWayError(KvError):
    """The two sides have no way in common by which the blocks could go."""

    reason = Reason.NO_WAY


class RepresentationMismatchError(KvError):
    """The reader cannot read blocks of this representation."""

    reason = Reason.REPRESENTATION_MISMATCH


class SegmentUnknownError(KvError):
    """No such segment or layout is registered by this engine."""

    reason = Reason.SEGMENT_UNKNOWN


class SegmentInUseError(KvError):
    """Somebody may read the segment now."""

    reason = Reason.SEGMENT_IN_USE


ERROR_BY_REASON: dict[Reason, type[KvError]] = {error.reason: error for error in KvError.__subclasses__()}


def invariant(condition: bool, message: str) -> None:  # noqa: FBT001 - reads as an assertion
    """Raise InvariantError unless `condition`; unlike assert it stays under -O."""
    if not condition:
        raise InvariantError(message)
