"""Segments of memory and layouts of blocks as messages: one meaning for daemon, lender and client."""

from __future__ import annotations

from kvproto.kv.v1 import segment_service_pb2
from kvservice.core.block_geometry import BlockGeometry
from kvservice.core.engine_memory import EngineSegment, MemoryKind, SegmentWay
from kvservice.core.errors import MalformedError
from kvservice.core.slots import U32


def segment_message(segment: EngineSegment) -> segment_service_pb2.EngineSegment:
    """Segment to message."""
    message = segment_service_pb2.EngineSegment(
        base_address=segment.base_address,
        size_bytes=segment.size_bytes,
        memory_kind=int(segment.memory_kind),  # type: ignore[arg-type]
    )
    for way in segment.ways:
        message.ways.add(transport=way.transport, address=way.address, key=way.key)
    return message


def segment_of(message: segment_service_pb2.EngineSegment) -> EngineSegment:
    """Message to segment. Raises MalformedError, InvalidFieldError."""
    try:
        kind = MemoryKind(message.memory_kind)
    except ValueError as error:
        raise MalformedError(f"memory of the kind {message.memory_kind} is not known here") from error
    ways = tuple(SegmentWay(way.transport, way.address, way.key) for way in message.ways)
    return EngineSegment(message.base_address, message.size_bytes, kind, ways)


def layout_message(geometry: BlockGeometry, segments: U32) -> segment_service_pb2.BlockLayout:
    """Layout to message. segments: (pieces,) uint32, where each piece's segment stands in the message."""
    return segment_service_pb2.BlockLayout(
        piece_segments=segments.tobytes(),
        piece_offsets_bytes=geometry.offsets.tobytes(),
        piece_strides_bytes=geometry.strides.tobytes(),
        piece_lengths_bytes=geometry.lengths.tobytes(),
        blocks_count=geometry.blocks_count,
    )
