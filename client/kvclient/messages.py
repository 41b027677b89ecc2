"""Values into requests, and answers into values: the only place for both."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from google.protobuf.duration_pb2 import Duration

from kvclient.config import ClientSettings
from kvclient.holdings import Beat
from kvclient.outcomes import granted
from kvclient.representation import Identity, Part, identity_message, part_message
from kvclient.results import Attachment, Lease, Limits, Reservation
from kvproto.kv.v1 import block_pb2, capabilities_service_pb2, lifecycle_service_pb2, session_service_pb2
from kvservice.core.slots import U8, Slots


def seconds(duration: Duration) -> float:
    """Return a duration in seconds."""
    return duration.seconds + duration.nanos * 1e-9


def duration(value_s: float | None) -> Duration | None:
    """Return the message of a duration; None asks for the server's default."""
    if value_s is None:
        return None
    whole = int(value_s)
    return Duration(seconds=whole, nanos=int((value_s - whole) * 1e9))


def attach_request(settings: ClientSettings, before: Attachment | None) -> session_service_pb2.AttachRequest:
    """Return the request that opens a session, or resumes the one before."""
    return session_service_pb2.AttachRequest(
        engine_incarnation=settings.engine_incarnation,
        client_name=settings.client_name,
        resume_token=b"" if before is None else before.session_token,
    )


def attachment(answer: session_service_pb2.AttachResponse, before: Attachment | None) -> Attachment:
    """Return the session; its epoch moves unless it is the one before."""
    epoch = 1
    if before is not None:
        is_same = answer.resumed and answer.daemon_incarnation == before.daemon_incarnation
        epoch = before.epoch if is_same else before.epoch + 1
    return Attachment(
        session_token=answer.session_token,
        session_id=answer.session_id,
        daemon_incarnation=answer.daemon_incarnation,
        # A daemon that names no interval must not make us spin.
        renew_interval_s=seconds(answer.renew_interval) or 3.0,
        lease_ttl_s=seconds(answer.lease_ttl),
        limits=limits(answer.limits),
        tenant=answer.tenant,
        tcp_address=answer.tcp_address,
        epoch=epoch,
    )


def limits(message: capabilities_service_pb2.Limits) -> Limits:
    """Return the daemon's bounds."""
    return Limits(**{field.name: getattr(message, field.name) for field in message.DESCRIPTOR.fields})


def open_request(
    identity: Identity, parts: Sequence[Part], salt: bytes
) -> session_service_pb2.OpenNamespaceRequest:
    """Return the request that opens a namespace."""
    return session_service_pb2.OpenNamespaceRequest(
        identity=identity_message(identity), salt=salt, parts=[part_message(part) for part in parts]
    )


def heartbeats(
    beat: Beat, touched: tuple[Sequence[int], Sequence[int]], noticed: Sequence[int], *, limit: int
) -> Iterator[session_service_pb2.HeartbeatRequest]:
    """Yield the messages of one beat, one at least, with at most `limit` entries in each field."""
    segments, granules = touched
    lists = (beat.lease_ids, beat.reservation_ids, beat.acknowledged_ids, beat.handoff_ids, segments, noticed)
    longest = max(1, *(len(some) for some in lists))
    for start in range(0, longest, limit):
        chosen = slice(start, start + limit)
        yield session_service_pb2.HeartbeatRequest(
            lease_ids=beat.lease_ids[chosen],
            reservation_ids=beat.reservation_ids[chosen],
            acknowledged_ids=beat.acknowledged_ids[chosen],
            touched_segments=segments[chosen],
            touched_granules=granules[chosen],
            handoff_ids=beat.handoff_ids[chosen],
            noticed_handoff_ids=noticed[chosen],
        )


def slots(message: block_pb2.SlotArrays) -> Slots:
    """Return the slots of a message."""
    return Slots(
        np.frombuffer(message.segments, np.uint32),
        np.frombuffer(message.granules, np.uint32),
        np.frombuffer(message.generations, np.uint64),
        np.frombuffer(message.checksums, np.uint32) if message.checksums else None,
    )


def outcomes(packed: bytes) -> U8:
    """Return (items,) uint8 of ItemOutcome; read-only."""
    return np.frombuffer(packed, np.uint8)


def lease(message: lifecycle_service_pb2.Lease, asked_s: float, incarnation: bytes) -> Lease:
    """Return a lease; its deadline counts from when it was asked for, so that it errs to the short side."""
    return Lease(
        message.lease_id,
        message.keys_count,
        slots(message.slots),
        asked_s + seconds(message.remaining),
        incarnation,
    )


def reservation(
    message: lifecycle_service_pb2.ReserveResponse, asked_s: float, incarnation: bytes
) -> Reservation:
    """Return a reservation; its deadline errs to the short side too."""
    became = outcomes(message.outcomes)
    return Reservation(
        message.reservation_id,
        became,
        granted(became),
        slots(message.slots),
        asked_s + seconds(message.remaining),
        incarnation,
    )
