"""Messages to events and answers to messages; the only place that knows both."""

from __future__ import annotations

from typing import Any

import numpy as np
from google.protobuf.duration_pb2 import Duration

from kvproto.kv.v1 import (
    block_pb2,
    capabilities_service_pb2,
    event_service_pb2,
    lifecycle_service_pb2,
    representation_pb2,
    session_service_pb2,
)
from kvservice.core import events
from kvservice.core.answers import (
    BeatAnswer,
    LeaseAnswer,
    LookupAnswer,
    OpenAnswer,
    RenewAnswer,
    ReserveAnswer,
)
from kvservice.core.errors import InvalidFieldError
from kvservice.core.history import Fact
from kvservice.core.limits import Limits
from kvservice.core.representation import Identity, Part, Shape
from kvservice.core.slots import U8, U32, U64, Slots

NANOSECONDS = 1_000_000_000


def identity_of(message: representation_pb2.Identity) -> Identity:
    """Return the identity; raises InvalidFieldError."""
    return Identity(**{field: getattr(message, field) for field in _IDENTITY_FIELDS})


def part_of(message: representation_pb2.Part) -> Part:
    """Return the part; raises InvalidFieldError, BlockSizeError."""
    shape = {field: getattr(message.shape, field) for field in _SHAPE_FIELDS}
    shape["strides_bytes"] = tuple(message.shape.strides_bytes)
    part = {field: getattr(message, field) for field in _PART_FIELDS}
    return Part(**part, shape=Shape(**shape))


_IDENTITY_FIELDS = [field.name for field in representation_pb2.Identity.DESCRIPTOR.fields]
_SHAPE_FIELDS = [field.name for field in representation_pb2.Shape.DESCRIPTOR.fields]
_PART_FIELDS = [field.name for field in representation_pb2.Part.DESCRIPTOR.fields if field.name != "shape"]


def open_event(token: bytes, request: session_service_pb2.OpenNamespaceRequest) -> events.OpenNamespace:
    """OpenNamespaceRequest to event."""
    return events.OpenNamespace(
        token,
        identity_of(request.identity),
        request.salt,
        tuple(part_of(part) for part in request.parts),
    )


def open_response(answer: OpenAnswer) -> session_service_pb2.OpenNamespaceResponse:
    """Answer to OpenNamespaceResponse."""
    return session_service_pb2.OpenNamespaceResponse(
        namespace_id=answer.namespace_id,
        space_ids=answer.space_ids,
        identity_digest=answer.identity_digest,
        shape_digests=answer.shape_digests,
    )


def lookup_event(token: bytes, request: lifecycle_service_pb2.LookupRequest) -> events.Lookup:
    """LookupRequest to event."""
    ttl = ttl_ns(request, "lease_ttl") if request.acquire else None
    return events.Lookup(token, tuple(request.space_ids), request.keys, ttl, is_locating=request.locate)


def lookup_response(answer: LookupAnswer) -> lifecycle_service_pb2.LookupResponse:
    """Answer to LookupResponse."""
    return lifecycle_service_pb2.LookupResponse(
        outcomes=answer.outcomes.tobytes(),
        prefix_count=answer.prefix_count,
        lease=None if answer.lease is None else lease_message(answer.lease),
        slots=None if answer.slots is None else slot_arrays(answer.slots),
    )


def lease_message(lease: LeaseAnswer) -> lifecycle_service_pb2.Lease:
    """Lease to message."""
    return lifecycle_service_pb2.Lease(
        lease_id=lease.lease_id,
        keys_count=lease.keys_count,
        slots=slot_arrays(lease.slots),
        remaining=duration(lease.remaining_ns),
    )


def reserve_event(token: bytes, request: lifecycle_service_pb2.ReserveRequest) -> events.Reserve:
    """ReserveRequest to event."""
    return events.Reserve(
        token,
        request.request_id,
        tuple(request.space_ids),
        request.keys,
        ttl_ns(request, "ttl"),
        unnamed_count=request.unnamed_count,
    )


def reserve_response(answer: ReserveAnswer) -> lifecycle_service_pb2.ReserveResponse:
    """Answer to ReserveResponse."""
    return lifecycle_service_pb2.ReserveResponse(
        reservation_id=answer.reservation_id,
        outcomes=answer.outcomes.tobytes(),
        slots=slot_arrays(answer.slots),
        remaining=duration(answer.remaining_ns),
    )


def renew_response(answer: RenewAnswer) -> lifecycle_service_pb2.RenewResponse:
    """Answer to RenewResponse."""
    return lifecycle_service_pb2.RenewResponse(
        lease_outcomes=answer.lease_outcomes.tobytes(),
        reservation_outcomes=answer.reservation_outcomes.tobytes(),
        remaining=duration(answer.remaining_ns),
    )


def beat_event(token: bytes, request: session_service_pb2.HeartbeatRequest) -> events.Beat:
    """HeartbeatRequest to event."""
    if len(request.touched_segments) != len(request.touched_granules):
        raise InvalidFieldError(
            f"touched_granules has {len(request.touched_granules)} entries for "
            f"{len(request.touched_segments)} touched_segments; give one for each"
        )
    return events.Beat(
        token,
        u64_array(request.lease_ids),
        u64_array(request.reservation_ids),
        u64_array(request.acknowledged_ids),
        u32_array(request.touched_segments),
        u32_array(request.touched_granules),
        u64_array(request.handoff_ids),
        u64_array(request.noticed_handoff_ids),
    )


def beat_response(answer: BeatAnswer) -> session_service_pb2.HeartbeatResponse:
    """Answer to HeartbeatResponse."""
    return session_service_pb2.HeartbeatResponse(
        lease_outcomes=answer.renewal.lease_outcomes.tobytes(),
        reservation_outcomes=answer.renewal.reservation_outcomes.tobytes(),
        remaining=duration(answer.renewal.remaining_ns),
        revoked_ids=answer.revoked_ids.tolist(),
        handoff_outcomes=answer.handoff_outcomes.tobytes(),
    )


def event_message(fact: Fact) -> event_service_pb2.BlockEvent:
    """One event of the history to message."""
    return event_service_pb2.BlockEvent(
        sequence=fact.sequence,
        kind=event_service_pb2.BlockEvent.Kind.Name(fact.kind),
        namespace_id=fact.namespace_id,
        space_id=fact.space_id,
        keys=fact.keys,
    )


def limits_message(limits: Limits) -> capabilities_service_pb2.Limits:
    """Bounds to message."""
    return capabilities_service_pb2.Limits(
        max_batch_keys=limits.max_batch_keys,
        max_block_bytes=limits.segment_bytes,
        max_message_bytes=limits.max_message_bytes,
        max_ttl_ms=limits.max_ttl_ns // 1_000_000,
        max_reservations=limits.max_reservations,
        max_leases=limits.max_leases,
        arena_bytes=limits.arena_bytes,
        segment_bytes=limits.segment_bytes,
    )


def slot_arrays(slots: Slots) -> block_pb2.SlotArrays:
    """Slots to message."""
    return block_pb2.SlotArrays(
        segments=slots.segments.tobytes(),
        granules=slots.granules.tobytes(),
        generations=slots.generations.tobytes(),
        checksums=b"" if slots.checksums is None else slots.checksums.tobytes(),
    )


def packed_u32(packed: bytes, field: str) -> U32:
    """Bytes of little-endian u32 to (n,) uint32."""
    if len(packed) % 4:
        raise InvalidFieldError(f"{field} has {len(packed)} bytes, which is no multiple of 4")
    return np.frombuffer(packed, dtype=np.uint32)


def packed_u64(packed: bytes, field: str) -> U64:
    """Bytes of little-endian u64 to (n,) uint64."""
    if len(packed) % 8:
        raise InvalidFieldError(f"{field} has {len(packed)} bytes, which is no multiple of 8")
    return np.frombuffer(packed, dtype=np.uint64)


def duration(nanoseconds: int) -> Duration:
    """Nanoseconds to Duration."""
    seconds, rest = divmod(nanoseconds, NANOSECONDS)
    return Duration(seconds=seconds, nanos=rest)


def ttl_ns(request: Any, field: str) -> int:
    """Return the life that a request asks for; 0 where it asks for none."""
    if not request.HasField(field):
        return 0
    value: Duration = getattr(request, field)
    nanoseconds = value.seconds * NANOSECONDS + value.nanos
    if nanoseconds <= 0:
        raise InvalidFieldError(
            f"{field} is {nanoseconds} ns; give a positive duration, or leave it out for the default"
        )
    return nanoseconds


def u64_array(values: Any) -> U64:
    """A packed repeated field to (n,) uint64."""
    return np.fromiter(values, dtype=np.uint64, count=len(values))


def u32_array(values: Any) -> U32:
    """A packed repeated field to (n,) uint32."""
    return np.fromiter(values, dtype=np.uint32, count=len(values))


def outcome_bytes(outcomes: U8) -> bytes:
    """(n,) uint8 to one byte per item."""
    return outcomes.tobytes()
