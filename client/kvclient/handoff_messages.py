"""Segments and handoffs: values into requests, and answers into values."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kvclient import messages
from kvclient.pool import BlockPool
from kvclient.results import Claim, DirectSource, HandoffOffer, LentPool
from kvproto.kv.v1 import handoff_service_pb2, segment_service_pb2
from kvservice.core.block_geometry import BlockGeometry
from kvservice.core.engine_memory import EngineSegment, MemoryKind, SegmentWay
from kvservice.core.errors import MalformedError
from kvservice.core.handoff_choice import HandoffChoice
from kvservice.core.slots import U32


def register_request(
    pools: Sequence[BlockPool], ways: Sequence[Sequence[SegmentWay]]
) -> segment_service_pb2.RegisterSegmentsRequest:
    """Return the request that makes pools known.

    ways: to each segment of each pool, pool after pool.
    """
    request = segment_service_pb2.RegisterSegmentsRequest()
    for pool in pools:
        first = len(request.segments)
        sizes = pool.geometry.segment_sizes_bytes.tolist()
        for address, size_bytes in zip(pool.addresses.tolist(), sizes, strict=True):
            segment = request.segments.add(
                base_address=address,
                size_bytes=size_bytes,
                memory_kind=int(pool.kind),
            )
            for way in ways[len(request.segments) - 1]:
                segment.ways.add(transport=way.transport, address=way.address, key=way.key)
        request.layouts.append(_layout_message(pool.geometry, first))
    return request


def lent_pools(
    answer: segment_service_pb2.RegisterSegmentsResponse, pools: Sequence[BlockPool], epoch: int
) -> list[LentPool]:
    """Return the pools as the daemon calls them."""
    found: list[LentPool] = []
    first = 0
    for pool, layout_id in zip(pools, answer.layout_ids, strict=True):
        count = len(pool.addresses)
        segment_ids = tuple(answer.segment_ids[first : first + count])
        found.append(LentPool(layout_id, segment_ids, pool.blocks_count, pool.block_bytes, epoch))
        first += count
    return found


def handoff_offer(answer: handoff_service_pb2.OfferHandoffResponse, asked_s: float) -> HandoffOffer:
    """Return an offer; the claim's end errs to the short side, the hold to the long one."""
    answered_s = messages.now_s()
    return HandoffOffer(
        answer.handoff_id,
        asked_s + messages.seconds(answer.remaining),
        answered_s + messages.seconds(answer.hold),
    )


def claim(
    handoff_id: int,
    answer: handoff_service_pb2.ClaimHandoffResponse,
    asked_s: float,
    incarnation: bytes,
) -> Claim:
    """Return a claim; its deadline errs to the short side.

    Raises:
        MalformedError: the daemon's answer contradicts itself.
    """
    return Claim(
        handoff_id,
        HandoffChoice(answer.choice),
        answer.reason,
        answer.keys,
        _source(answer.direct) if answer.HasField("direct") else None,
        messages.lease(answer.lease, asked_s, incarnation) if answer.HasField("lease") else None,
        asked_s + messages.seconds(answer.remaining),
        incarnation,
    )


def _layout_message(geometry: BlockGeometry, first: int) -> segment_service_pb2.BlockLayout:
    return segment_service_pb2.BlockLayout(
        piece_segments=(geometry.segments + np.uint32(first)).astype(np.uint32).tobytes(),
        piece_offsets_bytes=geometry.offsets.tobytes(),
        piece_strides_bytes=geometry.strides.tobytes(),
        piece_lengths_bytes=geometry.lengths.tobytes(),
        blocks_count=geometry.blocks_count,
    )


def _source(message: handoff_service_pb2.DirectSource) -> DirectSource:
    segments = tuple(
        EngineSegment(
            segment.base_address,
            segment.size_bytes,
            MemoryKind(segment.memory_kind),
            tuple(SegmentWay(way.transport, way.address, way.key) for way in segment.ways),
        )
        for segment in message.segments
    )
    sizes = np.array([segment.size_bytes for segment in segments], np.uint64)
    # Checked by their constructor: what a claim says is held to its own bounds before it is read.
    geometries = tuple(
        BlockGeometry(
            segment_sizes_bytes=sizes,
            segments=np.frombuffer(layout.piece_segments, np.uint32),
            offsets=np.frombuffer(layout.piece_offsets_bytes, np.uint64),
            strides=np.frombuffer(layout.piece_strides_bytes, np.uint64),
            lengths=np.frombuffer(layout.piece_lengths_bytes, np.uint64),
            blocks_count=layout.blocks_count,
        )
        for layout in message.layouts
    )
    parts_count = len(geometries)
    return DirectSource(
        message.engine_incarnation,
        segments,
        geometries,
        _by_part(message.blocks, parts_count, "blocks"),
        _by_part(message.checksums, parts_count, "checksums") if message.checksums else None,
    )


def _by_part(packed: bytes, parts_count: int, name: str) -> U32:
    """Return (keys, parts) uint32."""
    if not parts_count or len(packed) % (4 * parts_count):
        raise MalformedError(f"a claim's {name} are {len(packed)} bytes for {parts_count} parts")
    return np.frombuffer(packed, np.uint32).reshape(-1, parts_count)
