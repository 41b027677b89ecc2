"""The gRPC code of each reason: the one table for every edge.

It is the table written beside each value in `protos/kv/v1/error_reason.proto`.
"""

from __future__ import annotations

from enum import IntEnum

from kvservice.core.errors import Reason


class StatusCode(IntEnum):
    """The numbers of `google.rpc.Code`, which are those of gRPC."""

    OK = 0
    CANCELLED = 1
    UNKNOWN = 2
    INVALID_ARGUMENT = 3
    DEADLINE_EXCEEDED = 4
    NOT_FOUND = 5
    ALREADY_EXISTS = 6
    PERMISSION_DENIED = 7
    RESOURCE_EXHAUSTED = 8
    FAILED_PRECONDITION = 9
    ABORTED = 10
    OUT_OF_RANGE = 11
    UNIMPLEMENTED = 12
    INTERNAL = 13
    UNAVAILABLE = 14
    DATA_LOSS = 15
    UNAUTHENTICATED = 16


STATUS_BY_REASON: dict[Reason, StatusCode] = {
    Reason.UNSPECIFIED: StatusCode.UNKNOWN,
    Reason.INVALID_FIELD: StatusCode.INVALID_ARGUMENT,
    Reason.BATCH_SIZE: StatusCode.INVALID_ARGUMENT,
    Reason.DUPLICATE_KEY: StatusCode.INVALID_ARGUMENT,
    Reason.BLOCK_SIZE: StatusCode.INVALID_ARGUMENT,
    Reason.SESSION_UNKNOWN: StatusCode.UNAUTHENTICATED,
    Reason.TENANT_UNKNOWN: StatusCode.UNAUTHENTICATED,
    Reason.SPACE_NOT_OPEN: StatusCode.PERMISSION_DENIED,
    Reason.NOT_OWNER: StatusCode.PERMISSION_DENIED,
    Reason.RESERVATION_UNKNOWN: StatusCode.NOT_FOUND,
    Reason.LEASE_UNKNOWN: StatusCode.NOT_FOUND,
    Reason.RESERVATION_EXPIRED: StatusCode.FAILED_PRECONDITION,
    Reason.RESERVATION_ABORTED: StatusCode.FAILED_PRECONDITION,
    Reason.LEASE_EXPIRED: StatusCode.FAILED_PRECONDITION,
    Reason.STALE_INCARNATION: StatusCode.ABORTED,
    Reason.STALE_GENERATION: StatusCode.ABORTED,
    Reason.REQUEST_ID_REUSED: StatusCode.INVALID_ARGUMENT,
    Reason.ARENA_FULL: StatusCode.RESOURCE_EXHAUSTED,
    Reason.QUOTA_EXCEEDED: StatusCode.RESOURCE_EXHAUSTED,
    Reason.LIMIT_REACHED: StatusCode.RESOURCE_EXHAUSTED,
    Reason.CHECKSUM_MISMATCH: StatusCode.DATA_LOSS,
    Reason.DRAINING: StatusCode.UNAVAILABLE,
    Reason.EVENTS_LOST: StatusCode.OUT_OF_RANGE,
    Reason.MALFORMED: StatusCode.INVALID_ARGUMENT,
    Reason.UNKNOWN_METHOD: StatusCode.UNIMPLEMENTED,
    Reason.DEADLINE: StatusCode.DEADLINE_EXCEEDED,
    Reason.PEER_UNAVAILABLE: StatusCode.UNAVAILABLE,
    Reason.INVARIANT: StatusCode.INTERNAL,
    Reason.INCOMPLETE_BLOCK: StatusCode.FAILED_PRECONDITION,
    Reason.HANDOFF_UNKNOWN: StatusCode.NOT_FOUND,
    Reason.HANDOFF_CLAIMED: StatusCode.FAILED_PRECONDITION,
    Reason.HANDOFF_ENDED: StatusCode.FAILED_PRECONDITION,
    Reason.NO_WAY: StatusCode.FAILED_PRECONDITION,
    Reason.REPRESENTATION_MISMATCH: StatusCode.FAILED_PRECONDITION,
    Reason.SEGMENT_UNKNOWN: StatusCode.NOT_FOUND,
    Reason.SEGMENT_IN_USE: StatusCode.FAILED_PRECONDITION,
}
