"""Numbers of the methods in a frame of the local lane and of the tcp data plane.

The gRPC name is `/kv.v1.<service>/<method>`. Numbers are never reused.
"""

from __future__ import annotations

from enum import IntEnum


class Method(IntEnum):
    """Method number; the name of each member is the RPC's name in snake case."""

    ATTACH = 1
    DETACH = 2
    OPEN_NAMESPACE = 3
    HEARTBEAT = 4
    STREAM = 5
    """Unasked StreamResponse messages from the daemon (kind STREAM, call id 0)."""
    LOOKUP = 10
    RESERVE = 11
    COMMIT = 12
    ABORT = 13
    ACQUIRE = 14
    RENEW = 15
    RELEASE = 16
    VERIFY = 17
    LIST_TIERS = 20
    PURGE_NAMESPACE = 21
    WATCH_EVENTS = 30
    """A call that is answered by STREAM frames with its call id until it fails."""
    GET_CAPABILITIES = 40
    MAP_SEGMENTS = 50
    """Local lane only: the answer brings file descriptors."""
    REGISTER_SEGMENTS = 51
    UNREGISTER_SEGMENTS = 52
    READ_SLOTS = 60
    """Tcp data plane only."""
    WRITE_SLOTS = 61
    """Tcp data plane only."""
    OFFER_HANDOFF = 70
    CLAIM_HANDOFF = 71
    COMPLETE_HANDOFF = 72
    REJECT_HANDOFF = 73
    ABORT_HANDOFF = 74
    GET_HANDOFF = 75
    BEGIN_TRANSFER = 80
    END_TRANSFER = 81
