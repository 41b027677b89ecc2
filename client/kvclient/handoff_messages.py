"""Segments and handoffs: values into requests, and answers into values."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kvclient import messages
from kvclient.keys import KEY_BYTES
from kvclient.pool import BlockPool
from kvclient.results import Claim, DirectSource, HandoffOffer, LentPool
from kvproto.kv.v1 import handoff_service_pb2, segment_service_pb2
from kvservice.core.block_geometry import BlockGeometry
from kvservice.core.engine_memory import EngineSegment, SegmentWay
from kvservice.core.errors import InvalidFieldError, MalformedError
from kvservice.core.handoff_choice import HandoffChoice
from kvservice.core.outcomes import ItemOutcome
from kvservice.core.slots import U32
from kvservice.transports.segment_messages import layout_message, segment_message, segment_of

MEMORIES_LIMIT = 256
"""Engines that one process pulls from, with their parts."""


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
            lent = EngineSegment(address, size_bytes, pool.kind, tuple(ways[len(request.segments)]))
            request.segments.append(segment_message(lent))
        request.layouts.append(_layout_message(pool.geometry, first))
    return request


def lent_pools(
    answer: segment_service_pb2.RegisterSegmentsResponse, pools: Sequence[BlockPool], epoch: int
) -> list[LentPool]:
    """Return the pools as the daemon calls them.

    Raises:
        MalformedError: it does not name each of them.
    """
    segments_count = sum(len(pool.addresses) for pool in pools)
    if (len(answer.layout_ids), len(answer.segment_ids)) != (len(pools), segments_count):
        raise MalformedError(
            f"the daemon names {len(answer.layout_ids)} layouts and {len(answer.segment_ids)} segments "
            f"for {len(pools)} pools of {segments_count} segments"
        )
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
    answered_s = time.monotonic()
    return HandoffOffer(
        answer.handoff_id,
        asked_s + messages.seconds(answer.remaining),
        answered_s + messages.seconds(answer.hold),
    )


@dataclass(frozen=True, slots=True)
class EngineMemory:
    """The memory of an engine, as its layouts describe it; see DirectSource."""

    segments: tuple[EngineSegment, ...]
    geometries: tuple[BlockGeometry, ...]


class KnownMemory:
    """What layouts of the daemon mean, so that each is understood once. Thread-safe by the GIL."""

    def __init__(self) -> None:
        self._by_layouts: OrderedDict[tuple[bytes, ...], EngineMemory] = OrderedDict()

    def of(self, message: handoff_service_pb2.DirectSource, incarnation: bytes) -> EngineMemory:
        """Return the memory that a message describes. Raises InvalidFieldError."""
        if len(message.layout_ids) != len(message.layouts):
            return _memory(message)  # A daemon that does not say what they are called.
        key = (incarnation, np.array(message.layout_ids, np.uint64).tobytes())
        found = self._by_layouts.get(key)
        if found is None:
            found = self._by_layouts[key] = _memory(message)
            if len(self._by_layouts) > MEMORIES_LIMIT:
                self._by_layouts.popitem(last=False)
        return found


def claim(
    handoff_id: int,
    answer: handoff_service_pb2.ClaimHandoffResponse,
    asked_s: float,
    incarnation: bytes,
    known: KnownMemory,
) -> Claim:
    """Return a claim; its deadline errs to the short side.

    Raises:
        MalformedError: the daemon's answer contradicts itself.
    """
    try:
        found = Claim(
            handoff_id,
            HandoffChoice(answer.choice),
            answer.reason,
            answer.keys,
            _source(answer.direct, incarnation, known) if answer.HasField("direct") else None,
            messages.lease(answer.lease, asked_s, incarnation) if answer.HasField("lease") else None,
            asked_s + messages.seconds(answer.remaining),
            incarnation,
        )
    except (ValueError, InvalidFieldError, MalformedError) as error:
        raise MalformedError(f"the claim of handoff {handoff_id} makes no sense: {error}") from error
    _check_counts(found)
    return found


def outcome(number: int) -> ItemOutcome:
    """Return what became of a handoff. Raises MalformedError for what this client does not know."""
    try:
        return ItemOutcome(number)
    except ValueError as error:
        raise MalformedError(f"the daemon answers outcome {number}, which is unknown here") from error


def _check_counts(claim: Claim) -> None:
    """Raise MalformedError where the parts of a claim are of different numbers of keys."""
    keys_count, rest = divmod(len(claim.keys), KEY_BYTES)
    counts = {keys_count}
    if claim.source is not None:
        counts.add(len(claim.source.blocks))
        counts.add(keys_count if claim.source.checksums is None else len(claim.source.checksums))
    if claim.lease is not None:
        counts.add(claim.lease.keys_count)
    if rest or len(counts) != 1:
        raise MalformedError(
            f"the claim of handoff {claim.handoff_id} has {len(claim.keys)} bytes of keys, and says where "
            f"the blocks of {sorted(counts)} keys are"
        )


def _layout_message(geometry: BlockGeometry, first: int) -> segment_service_pb2.BlockLayout:
    return layout_message(geometry, (geometry.segments + np.uint32(first)).astype(np.uint32))


def _memory(message: handoff_service_pb2.DirectSource) -> EngineMemory:
    segments = tuple(segment_of(segment) for segment in message.segments)
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
    return EngineMemory(segments, geometries)


def _source(
    message: handoff_service_pb2.DirectSource, incarnation: bytes, known: KnownMemory
) -> DirectSource:
    memory = known.of(message, incarnation)
    parts_count = len(memory.geometries)
    return DirectSource(
        message.engine_incarnation,
        memory.segments,
        memory.geometries,
        _by_part(message.blocks, parts_count, "blocks"),
        _by_part(message.checksums, parts_count, "checksums") if message.checksums else None,
    )


def _by_part(packed: bytes, parts_count: int, name: str) -> U32:
    """Return (keys, parts) uint32."""
    if not parts_count or len(packed) % (4 * parts_count):
        raise MalformedError(f"a claim's {name} are {len(packed)} bytes for {parts_count} parts")
    return np.frombuffer(packed, np.uint32).reshape(-1, parts_count)
