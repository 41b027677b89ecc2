"""What both gRPC backends share: names of methods, metadata, and errors.

Stubs are not used: one table from `Method` to path serves every call, so that the
lane and gRPC look the same from above.
"""

from __future__ import annotations

import threading
from typing import Any, Self

import grpc
from google.protobuf.message import Message

from kvservice.core.errors import DeadlineError, KvError, PeerUnavailableError, UnknownMethodError
from kvservice.ports.methods import Method
from kvservice.transports import frames

SESSION_METADATA = "kv-session-bin"
AUTHORIZATION_METADATA = "authorization"
DETAILS_METADATA = "grpc-status-details-bin"

PATHS = {
    Method.ATTACH: "/kv.v1.SessionService/Attach",
    Method.DETACH: "/kv.v1.SessionService/Detach",
    Method.OPEN_NAMESPACE: "/kv.v1.SessionService/OpenNamespace",
    Method.HEARTBEAT: "/kv.v1.SessionService/Heartbeat",
    Method.LOOKUP: "/kv.v1.LifecycleService/Lookup",
    Method.RESERVE: "/kv.v1.LifecycleService/Reserve",
    Method.COMMIT: "/kv.v1.LifecycleService/Commit",
    Method.ABORT: "/kv.v1.LifecycleService/Abort",
    Method.ACQUIRE: "/kv.v1.LifecycleService/Acquire",
    Method.RENEW: "/kv.v1.LifecycleService/Renew",
    Method.RELEASE: "/kv.v1.LifecycleService/Release",
    Method.VERIFY: "/kv.v1.LifecycleService/Verify",
    Method.REGISTER_SEGMENTS: "/kv.v1.SegmentService/RegisterSegments",
    Method.UNREGISTER_SEGMENTS: "/kv.v1.SegmentService/UnregisterSegments",
    Method.OFFER_HANDOFF: "/kv.v1.HandoffService/OfferHandoff",
    Method.CLAIM_HANDOFF: "/kv.v1.HandoffService/ClaimHandoff",
    Method.COMPLETE_HANDOFF: "/kv.v1.HandoffService/CompleteHandoff",
    Method.REJECT_HANDOFF: "/kv.v1.HandoffService/RejectHandoff",
    Method.ABORT_HANDOFF: "/kv.v1.HandoffService/AbortHandoff",
    Method.GET_HANDOFF: "/kv.v1.HandoffService/GetHandoff",
    Method.BEGIN_TRANSFER: "/kv.v1.TransferService/BeginTransfer",
    Method.END_TRANSFER: "/kv.v1.TransferService/EndTransfer",
    Method.LIST_TIERS: "/kv.v1.TierService/ListTiers",
    Method.PURGE_NAMESPACE: "/kv.v1.TierService/PurgeNamespace",
    Method.WATCH_EVENTS: "/kv.v1.EventService/WatchEvents",
    Method.GET_CAPABILITIES: "/kv.v1.CapabilitiesService/GetCapabilities",
}

CHANNEL_OPTIONS = (
    # A batch of keys fits the lane's frame; the default of 4 MiB would cut it.
    ("grpc.max_receive_message_length", frames.MAX_FRAME_BYTES),
    ("grpc.max_send_message_length", frames.MAX_FRAME_BYTES),
    # Our own backoff decides when to try again; gRPC's would wait up to two minutes.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1000),
)


def serialize(message: Message) -> bytes:
    """Return the wire form of any message."""
    return message.SerializeToString()


def metadata(session_token: bytes, bearer_token: str) -> tuple[tuple[str, str | bytes], ...]:
    """Return what every call of a session carries."""
    entries: list[tuple[str, str | bytes]] = []
    if session_token:
        entries.append((SESSION_METADATA, session_token))
    if bearer_token:
        entries.append((AUTHORIZATION_METADATA, f"Bearer {bearer_token}"))
    return tuple(entries)


def is_lost(error: KvError) -> bool:
    """Return whether the error came from the wire itself, not from the daemon."""
    return isinstance(error, WireLostError)


class WireLostError(PeerUnavailableError):
    """The channel could not reach the daemon; PeerUnavailableError to callers."""


def error_of(error: grpc.RpcError, method: Method) -> KvError:
    """Return the KvError of a failed call."""
    call: Any = error
    for name, value in call.trailing_metadata() or ():
        if name == DETAILS_METADATA:
            return frames.decode_error(value)
    code = call.code()
    text = f"{method.name}: {code.name}: {call.details()}"
    if code is grpc.StatusCode.DEADLINE_EXCEEDED:
        return DeadlineError(f"{text}; the call may have taken effect")
    if code is grpc.StatusCode.UNIMPLEMENTED:
        return UnknownMethodError(text)
    if code in {grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED}:
        return WireLostError(f"{text}; the daemon cannot be reached")
    return PeerUnavailableError(text)


STREAM_PATH = "/kv.v1.SessionService/Stream"


class Silence:
    """Requests of a stream that is there to listen: none, until it is over. gRPC draws on its own thread."""

    def __init__(self) -> None:
        self._is_over = threading.Event()

    def end(self) -> None:
        """Let the thread that draws go. Idempotent."""
        self._is_over.set()

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> bytes:
        self._is_over.wait()
        raise StopIteration
