"""Messages of segments and handoffs to events, and answers to messages."""

from __future__ import annotations

import functools

import numpy as np

from kvproto.kv.v1 import handoff_service_pb2, segment_service_pb2
from kvservice.core import events
from kvservice.core.answers import ClaimAnswer, HandoffAnswer, OfferAnswer, SegmentsAnswer
from kvservice.core.block_geometry import BlockGeometry
from kvservice.core.engine_memory import EngineSegment, KnownLayout, check_call
from kvservice.core.errors import InvalidFieldError, MalformedError
from kvservice.core.handoff_choice import HandoffPolicy
from kvservice.core.records import HandoffState, Notice
from kvservice.core.slots import U32, U64
from kvservice.service.mapping import duration, lease_message, packed_u32, packed_u64, ttl_ns, u64_array
from kvservice.transports.segment_messages import layout_message, segment_message, segment_of

LAYOUTS_REMEMBERED = 256
"""Descriptions of engines' memory; each is some kilobytes for a model with a tensor a layer."""


def register_event(
    token: bytes, request: segment_service_pb2.RegisterSegmentsRequest
) -> events.RegisterSegments:
    """RegisterSegmentsRequest to event; raises InvalidFieldError."""
    # Before the work that grows with them.
    check_call(segments_count=len(request.segments), layouts_count=len(request.layouts))
    segments = tuple(_segment_of(segment) for segment in request.segments)
    sizes: U64 = np.array([segment.size_bytes for segment in segments], dtype=np.uint64)
    layouts = tuple(
        _layout_of(layout, f"layouts[{index}]", sizes) for index, layout in enumerate(request.layouts)
    )
    return events.RegisterSegments(token, segments, layouts)


def register_response(answer: SegmentsAnswer) -> segment_service_pb2.RegisterSegmentsResponse:
    """Answer to RegisterSegmentsResponse."""
    return segment_service_pb2.RegisterSegmentsResponse(
        segment_ids=answer.segment_ids, layout_ids=answer.layout_ids
    )


def unregister_event(
    token: bytes, request: segment_service_pb2.UnregisterSegmentsRequest
) -> events.UnregisterSegments:
    """UnregisterSegmentsRequest to event."""
    return events.UnregisterSegments(token, u64_array(request.segment_ids))


def offer_event(token: bytes, request: handoff_service_pb2.OfferHandoffRequest) -> events.Offer:
    """OfferHandoffRequest to event; raises InvalidFieldError."""
    return events.Offer(
        token,
        request.request_id,
        tuple(request.space_ids),
        request.keys,
        tuple(request.layout_ids),
        packed_u32(request.blocks, "blocks"),
        packed_u32(request.checksums, "checksums"),
        ttl_ns(request, "ttl"),
        _policy_of(request.policy),
    )


def offer_response(answer: OfferAnswer) -> handoff_service_pb2.OfferHandoffResponse:
    """Answer to OfferHandoffResponse."""
    return handoff_service_pb2.OfferHandoffResponse(
        handoff_id=answer.handoff_id,
        remaining=duration(answer.remaining_ns),
        hold=duration(answer.hold_ns),
    )


def claim_event(token: bytes, request: handoff_service_pb2.ClaimHandoffRequest) -> events.Claim:
    """ClaimHandoffRequest to event."""
    return events.Claim(token, request.handoff_id, tuple(request.space_ids), frozenset(request.transports))


def claim_response(answer: ClaimAnswer) -> handoff_service_pb2.ClaimHandoffResponse:
    """Answer to ClaimHandoffResponse."""
    return handoff_service_pb2.ClaimHandoffResponse(
        choice=int(answer.decision.choice),  # type: ignore[arg-type]
        reason=answer.decision.reason,
        keys=answer.keys,
        direct=_direct_source(answer) if answer.layouts else None,
        lease=None if answer.lease is None else lease_message(answer.lease),
        remaining=duration(answer.remaining_ns),
    )


def handoff_response(answer: HandoffAnswer) -> handoff_service_pb2.GetHandoffResponse:
    """Answer to GetHandoffResponse."""
    return handoff_service_pb2.GetHandoffResponse(
        state=_state_name(answer.state),
        is_released=answer.is_released,
        choice=int(answer.choice),  # type: ignore[arg-type]
        reason=answer.reason,
        keys_count=answer.keys_count,
    )


def notice_message(notice: Notice) -> handoff_service_pb2.HandoffNotice:
    """News of a handoff to message."""
    return handoff_service_pb2.HandoffNotice(
        handoff_id=notice.handoff_id,
        state=_state_name(notice.state),
        is_released=notice.is_released,
        reason=notice.reason,
    )


def _state_name(state: HandoffState) -> handoff_service_pb2.HandoffState:
    return int(state)  # type: ignore[return-value]


def _policy_of(value: int) -> HandoffPolicy:
    try:
        return HandoffPolicy(value)
    except ValueError:
        known = [policy.value for policy in HandoffPolicy]
        raise InvalidFieldError(f"policy is {value}; this daemon knows {known}") from None


def _segment_of(message: segment_service_pb2.EngineSegment) -> EngineSegment:
    try:
        return segment_of(message)
    except MalformedError:
        raise InvalidFieldError(
            f"segments.memory_kind is {message.memory_kind}; it is 1 (host) or 2 (CUDA)"
        ) from None


def _layout_of(
    message: segment_service_pb2.BlockLayout, name: str, segment_sizes_bytes: U64
) -> BlockGeometry:
    segments = packed_u32(message.piece_segments, f"{name}.piece_segments")
    offsets = packed_u64(message.piece_offsets_bytes, f"{name}.piece_offsets_bytes")
    strides = packed_u64(message.piece_strides_bytes, f"{name}.piece_strides_bytes")
    lengths = packed_u64(message.piece_lengths_bytes, f"{name}.piece_lengths_bytes")
    try:
        return BlockGeometry(
            segment_sizes_bytes=segment_sizes_bytes,
            segments=segments,
            offsets=offsets,
            strides=strides,
            lengths=lengths,
            blocks_count=message.blocks_count,
        )
    except InvalidFieldError as error:
        raise InvalidFieldError(f"{name}: {error.message}") from None


def _direct_source(answer: ClaimAnswer) -> handoff_service_pb2.DirectSource:
    source = handoff_service_pb2.DirectSource()
    source.CopyFrom(_memory_of(answer.layouts))
    source.engine_incarnation = answer.engine_incarnation
    source.blocks = answer.blocks.tobytes()
    source.checksums = answer.checksums.tobytes()
    return source


@functools.lru_cache(LAYOUTS_REMEMBERED)
def _memory_of(layouts: tuple[KnownLayout, ...]) -> handoff_service_pb2.DirectSource:
    """Describe the memory of some layouts, each segment once, although many layouts lie in it.

    Remembered, since an engine offers out of the same layouts for all of its life.
    """
    source = handoff_service_pb2.DirectSource(layout_ids=[known.layout_id for known in layouts])
    places: dict[int, int] = {}
    for known in layouts:
        for index in np.unique(known.layout.segments).tolist():
            segment = known.segments[index]
            if segment.segment_id not in places:
                places[segment.segment_id] = len(places)
                source.segment_ids.append(segment.segment_id)
                source.segments.append(segment_message(segment.segment))
        source.layouts.append(_layout_message(known, places))
    return source


def _layout_message(known: KnownLayout, places: dict[int, int]) -> segment_service_pb2.BlockLayout:
    layout = known.layout
    moved: U32 = np.array(
        [places[known.segments[index].segment_id] for index in layout.segments.tolist()], dtype=np.uint32
    )
    return layout_message(layout, moved)
