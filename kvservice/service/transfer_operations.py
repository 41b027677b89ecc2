"""What the methods of one-sided transfers do, for the dispatcher's table."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
from google.protobuf.message import Message

from kvproto.kv.v1 import transfer_service_pb2
from kvservice.core.answers import TransferAnswer
from kvservice.core.engine_memory import EngineSegment
from kvservice.core.errors import KvError, NoWayError
from kvservice.core.events import BeginOneSided, EndOneSided
from kvservice.core.slots import GRANULE_BYTES
from kvservice.engine.coordinator import Coordinator
from kvservice.engine.ucx_arena import UcxArena
from kvservice.ports.methods import Method
from kvservice.service.mapping import duration, packed_u32, ttl_ns
from kvservice.transports.segment_messages import segment_message

if TYPE_CHECKING:
    from kvservice.service.dispatcher import Caller


class TransferOperations:
    """Handlers of TransferService; they compute and return.

    lender: of the arena; None where it is lent to nobody.
    """

    def __init__(self, coordinator: Coordinator, lender: UcxArena | None) -> None:
        self._submit = coordinator.submit
        self._lender = lender

    def rows(self) -> list[tuple[Method, str, str, Any, Callable[[Any, Caller], Message]]]:
        """Return what each method is called and who runs it."""
        transfer = transfer_service_pb2
        return [
            (Method.BEGIN_TRANSFER, "TransferService", "BeginTransfer", transfer, self._begin),
            (Method.END_TRANSFER, "TransferService", "EndTransfer", transfer, self._end),
        ]

    def _begin(self, request: transfer_service_pb2.BeginTransferRequest, caller: Caller) -> Message:
        lender = self._lender
        if lender is None:
            raise NoWayError("this daemon does not lend its arena (ucx.enabled): use another transport")
        answer = self._submit(
            BeginOneSided(
                caller.token,
                request.capability_id,
                packed_u32(request.slot_indexes, "slot_indexes").astype(np.int64),
                request.is_write,
                ttl_ns(request, "timeout"),
            )
        )
        numbers, indexes = np.unique(answer.slots.segments, return_inverse=True)
        try:
            segments = lender.segments(numbers.tolist())
        except KvError:
            # Nobody has been told where to write, so nothing is under way.
            self._submit(EndOneSided(caller.token, answer.transfer_id, None, is_settled=True))
            raise
        return _begun(answer, segments, indexes.astype(np.uint32).tobytes())

    def _end(self, request: transfer_service_pb2.EndTransferRequest, caller: Caller) -> Message:
        sums = packed_u32(request.checksums, "checksums")
        event = EndOneSided(
            caller.token, request.transfer_id, sums if len(sums) else None, is_settled=request.is_settled
        )
        try:
            self._submit(event)
        finally:
            if self._lender is not None and not request.is_settled and not len(sums):
                self._lender.look_again()
        return transfer_service_pb2.EndTransferResponse()


def _begun(answer: TransferAnswer, segments: tuple[EngineSegment, ...], indexes: bytes) -> Message:
    slots = answer.slots
    offsets = slots.granules.astype(np.uint64) * np.uint64(GRANULE_BYTES)
    return transfer_service_pb2.BeginTransferResponse(
        transfer_id=answer.transfer_id,
        segments=[segment_message(segment) for segment in segments],
        segment_indexes=indexes,
        offsets_bytes=offsets.tobytes(),
        lengths_bytes=answer.block_bytes.tobytes(),
        checksums=b"" if slots.checksums is None else slots.checksums.tobytes(),
        remaining=duration(answer.remaining_ns),
    )
