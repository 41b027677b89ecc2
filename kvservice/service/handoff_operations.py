"""What the methods of segments and handoffs do, for the dispatcher's table."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from google.protobuf.message import Message

from kvproto.kv.v1 import handoff_service_pb2, segment_service_pb2
from kvservice.core.events import EndHandoff, LookAtHandoff
from kvservice.core.records import HandoffState
from kvservice.engine.coordinator import Coordinator
from kvservice.ports.methods import Method
from kvservice.service import handoff_mapping

if TYPE_CHECKING:
    from kvservice.service.dispatcher import Caller


class HandoffOperations:
    """Handlers of SegmentService and HandoffService; they compute and return."""

    def __init__(self, coordinator: Coordinator) -> None:
        self._submit = coordinator.submit

    def rows(self) -> list[tuple[Method, str, str, Any, Callable[[Any, Caller], Message]]]:
        """Return what each method is called and who runs it."""
        segment, handoff = segment_service_pb2, handoff_service_pb2
        return [
            (Method.REGISTER_SEGMENTS, "SegmentService", "RegisterSegments", segment, self._register),
            (Method.UNREGISTER_SEGMENTS, "SegmentService", "UnregisterSegments", segment, self._unregister),
            (Method.OFFER_HANDOFF, "HandoffService", "OfferHandoff", handoff, self._offer),
            (Method.CLAIM_HANDOFF, "HandoffService", "ClaimHandoff", handoff, self._claim),
            (Method.COMPLETE_HANDOFF, "HandoffService", "CompleteHandoff", handoff, self._complete),
            (Method.REJECT_HANDOFF, "HandoffService", "RejectHandoff", handoff, self._reject),
            (Method.ABORT_HANDOFF, "HandoffService", "AbortHandoff", handoff, self._abort),
            (Method.GET_HANDOFF, "HandoffService", "GetHandoff", handoff, self._get),
        ]

    def _register(self, request: segment_service_pb2.RegisterSegmentsRequest, caller: Caller) -> Message:
        event = handoff_mapping.register_event(caller.token, request)
        return handoff_mapping.register_response(self._submit(event))

    def _unregister(self, request: segment_service_pb2.UnregisterSegmentsRequest, caller: Caller) -> Message:
        count = self._submit(handoff_mapping.unregister_event(caller.token, request))
        return segment_service_pb2.UnregisterSegmentsResponse(segments_count=count)

    def _offer(self, request: handoff_service_pb2.OfferHandoffRequest, caller: Caller) -> Message:
        event = handoff_mapping.offer_event(caller.token, request)
        return handoff_mapping.offer_response(self._submit(event))

    def _claim(self, request: handoff_service_pb2.ClaimHandoffRequest, caller: Caller) -> Message:
        event = handoff_mapping.claim_event(caller.token, request)
        return handoff_mapping.claim_response(self._submit(event))

    def _complete(self, request: handoff_service_pb2.CompleteHandoffRequest, caller: Caller) -> Message:
        outcome = self._submit(EndHandoff(caller.token, request.handoff_id, HandoffState.COMPLETED))
        return handoff_service_pb2.CompleteHandoffResponse(outcome=int(outcome))  # type: ignore[arg-type]

    def _reject(self, request: handoff_service_pb2.RejectHandoffRequest, caller: Caller) -> Message:
        event = EndHandoff(caller.token, request.handoff_id, HandoffState.REJECTED, request.reason)
        outcome = self._submit(event)
        return handoff_service_pb2.RejectHandoffResponse(outcome=int(outcome))  # type: ignore[arg-type]

    def _abort(self, request: handoff_service_pb2.AbortHandoffRequest, caller: Caller) -> Message:
        outcome = self._submit(EndHandoff(caller.token, request.handoff_id, HandoffState.ABORTED))
        return handoff_service_pb2.AbortHandoffResponse(outcome=int(outcome))  # type: ignore[arg-type]

    def _get(self, request: handoff_service_pb2.GetHandoffRequest, caller: Caller) -> Message:
        answer = self._submit(LookAtHandoff(caller.token, request.handoff_id))
        return handoff_mapping.handoff_response(answer)
