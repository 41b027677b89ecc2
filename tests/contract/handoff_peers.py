"""Engines that lend memory and hand blocks over, as raw peers of the daemon; for the contract's tests."""

from __future__ import annotations

import numpy as np

from kvproto.kv.v1 import handoff_service_pb2
from kvservice.ports.methods import Method
from tests.contract.lifecycle_edges import BLOCK_BYTES, Engine, keys

OFFERED = handoff_service_pb2.HANDOFF_STATE_OFFERED
CLAIMED = handoff_service_pb2.HANDOFF_STATE_CLAIMED
COMPLETED = handoff_service_pb2.HANDOFF_STATE_COMPLETED
REJECTED = handoff_service_pb2.HANDOFF_STATE_REJECTED
ABORTED = handoff_service_pb2.HANDOFF_STATE_ABORTED
EXPIRED = handoff_service_pb2.HANDOFF_STATE_EXPIRED

ANY_POLICY = handoff_service_pb2.HANDOFF_POLICY_UNSPECIFIED
DIRECT_POLICY = handoff_service_pb2.HANDOFF_POLICY_DIRECT
STAGED_POLICY = handoff_service_pb2.HANDOFF_POLICY_STAGED
DIRECT = handoff_service_pb2.HANDOFF_CHOICE_DIRECT
STAGED = handoff_service_pb2.HANDOFF_CHOICE_STAGED

BASE = 0x7F00_0000_0000
POOL_BLOCKS = 16
POOL_BYTES = POOL_BLOCKS * BLOCK_BYTES
WIRE = "wire"
"""A transport that the daemon has never heard of: it only passes on where the memory is."""

HOLD_S = 120
OPERATION_BOUND_S = 5


def segment(**changes) -> dict:
    """Return the fields of an EngineSegment of one pool, reached over WIRE."""
    ways = [{"transport": WIRE, "address": b"here", "key": b"opens"}]
    return {"base_address": BASE, "size_bytes": POOL_BYTES, "memory_kind": 1, "ways": ways} | changes


def layout(*pieces: tuple[int, int, int, int], blocks_count: int = POOL_BLOCKS, **changes: bytes) -> dict:
    """Return the fields of a BlockLayout. pieces: segment, offset, stride and length of each."""
    columns = np.array(pieces or [(0, 0, BLOCK_BYTES, BLOCK_BYTES)], np.uint64).reshape(-1, 4)
    return {
        "piece_segments": columns[:, 0].astype("<u4").tobytes(),
        "piece_offsets_bytes": columns[:, 1].astype("<u8").tobytes(),
        "piece_strides_bytes": columns[:, 2].astype("<u8").tobytes(),
        "piece_lengths_bytes": columns[:, 3].astype("<u8").tobytes(),
        "blocks_count": blocks_count,
    } | changes


def packed(numbers) -> bytes:
    """Return block numbers or checksums as they travel."""
    return np.array(list(numbers), "<u4").tobytes()


class Peer(Engine):
    """An engine with a namespace open, which hands blocks over and takes them."""

    def __init__(self, peer, *block_bytes: int, salt: bytes = b"", **identity) -> None:
        super().__init__(peer, **identity)
        self.open(*block_bytes, salt=salt)
        self.layouts: list[int] = []
        self.segments: list[int] = []

    def lend(self, segments=None, layouts=None):
        """Make memory known: one pool of one part by default."""
        answer = self.peer.call(
            Method.REGISTER_SEGMENTS,
            segments=[segment()] if segments is None else segments,
            layouts=[layout()] if layouts is None else layouts,
        )
        self.segments, self.layouts = list(answer.segment_ids), list(answer.layout_ids)
        return answer

    def take_back(self, *segment_ids: int) -> int:
        """Make memory unknown and return how much of it was known."""
        return self.peer.call(Method.UNREGISTER_SEGMENTS, segment_ids=segment_ids).segments_count

    def offering(self, numbers=(1, 2), **fields) -> dict:
        """Return the fields of an offer out of what was lent."""
        numbers = list(numbers)
        blocks = packed(range(len(numbers) * len(self.layouts)))
        defaults = {"space_ids": self.spaces, "layout_ids": self.layouts, "blocks": blocks}
        return {"request_id": self.fresh(), "keys": keys(numbers)} | defaults | fields

    def offer(self, numbers=(1, 2), **fields):
        """Offer blocks and return the answer."""
        return self.peer.call(Method.OFFER_HANDOFF, **self.offering(numbers, **fields))

    def claim(self, handoff_id: int, **fields):
        """Take a handoff over and return the answer."""
        fields = {"space_ids": self.spaces, "transports": [WIRE]} | fields
        return self.peer.call(Method.CLAIM_HANDOFF, handoff_id=handoff_id, **fields)

    def complete(self, handoff_id: int) -> int:
        """Say that the bytes have arrived and return the outcome."""
        return self.peer.call(Method.COMPLETE_HANDOFF, handoff_id=handoff_id).outcome

    def reject(self, handoff_id: int, reason: str = "") -> int:
        """Say that they are of no use and return the outcome."""
        return self.peer.call(Method.REJECT_HANDOFF, handoff_id=handoff_id, reason=reason).outcome

    def give_up(self, handoff_id: int) -> int:
        """End a handoff and return the outcome."""
        return self.peer.call(Method.ABORT_HANDOFF, handoff_id=handoff_id).outcome

    def look(self, handoff_id: int) -> handoff_service_pb2.GetHandoffResponse:
        """Ask what became of it."""
        return self.peer.call(Method.GET_HANDOFF, handoff_id=handoff_id)

    def told(self) -> tuple[int, int, bool]:
        """Return what is said of a handoff next, unasked: number, state, and whether it is released."""
        (notice,) = self.peer.notice().notices
        return notice.handoff_id, notice.state, notice.is_released

    def revoked(self) -> list[int]:
        """Return what is revoked next, unasked."""
        return list(self.peer.notice().revoked_ids)
