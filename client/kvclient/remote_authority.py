"""The daemon as the owner of slots that this process reaches one-sidedly, asked over the control plane."""

from __future__ import annotations

import contextlib
import time
from typing import Protocol, TypeVar

import numpy as np
from google.protobuf.message import Message

from kvclient import messages
from kvproto.kv.v1 import capabilities_service_pb2, transfer_service_pb2
from kvservice.core.errors import KvError, MalformedError
from kvservice.core.slots import I64, U32
from kvservice.ports.methods import Method
from kvservice.transports.segment_messages import segment_of
from kvservice.transports.ucx.arena_transport import RemoteGrant

Answer = TypeVar("Answer", bound=Message)


class BlockingCall(Protocol):
    """A call of one session's, made from a thread that may wait for it."""

    def __call__(self, method: Method, request: Message, response_type: type[Answer]) -> Answer:
        """Return the answer. Raises KvError; StaleIncarnationError where the session is gone."""


class DaemonAuthority:
    """`transports.ucx.arena_transport.RemoteAuthority` of one session."""

    def __init__(self, call: BlockingCall) -> None:
        self._call = call

    def begin_write(self, *, reservation_id: int, slot_indexes: I64, timeout_s: float) -> RemoteGrant:
        """See RemoteAuthority."""
        return self._begin(reservation_id, slot_indexes, timeout_s, is_write=True)

    def begin_read(self, *, lease_id: int, slot_indexes: I64, timeout_s: float) -> RemoteGrant:
        """See RemoteAuthority."""
        return self._begin(lease_id, slot_indexes, timeout_s, is_write=False)

    def end(self, transfer_id: int, *, checksums: U32 | None, is_settled: bool) -> None:
        """See RemoteAuthority."""
        request = transfer_service_pb2.EndTransferRequest(
            transfer_id=transfer_id,
            checksums=b"" if checksums is None else checksums.tobytes(),
            is_settled=is_settled,
        )
        self._call(Method.END_TRANSFER, request, transfer_service_pb2.EndTransferResponse)

    def _begin(
        self, capability_id: int, slot_indexes: I64, timeout_s: float, *, is_write: bool
    ) -> RemoteGrant:
        request = transfer_service_pb2.BeginTransferRequest(
            capability_id=capability_id,
            slot_indexes=slot_indexes.astype(np.uint32).tobytes(),
            is_write=is_write,
            timeout=messages.duration(timeout_s),
        )
        asked_s = time.monotonic()
        answer = self._call(Method.BEGIN_TRANSFER, request, transfer_service_pb2.BeginTransferResponse)
        try:
            return _grant(answer, asked_s, len(slot_indexes))
        except KvError:
            with contextlib.suppress(KvError):
                self.end(answer.transfer_id, checksums=None, is_settled=True)
            raise


def reaches_by_rdma(call: BlockingCall, transport: str) -> bool:
    """Ask whether the daemon lends its arena by a transport over RDMA devices."""
    try:
        answer = call(
            Method.GET_CAPABILITIES,
            capabilities_service_pb2.GetCapabilitiesRequest(),
            capabilities_service_pb2.GetCapabilitiesResponse,
        )
    except KvError:
        return False  # Whatever it is, the read itself will say it.
    return any(offered.name == transport and offered.address for offered in answer.transports)


def _grant(answer: transfer_service_pb2.BeginTransferResponse, asked_s: float, count: int) -> RemoteGrant:
    """Return the grant; its deadline errs to the short side. Raises MalformedError, InvalidFieldError."""
    lengths = {
        "segment_indexes": len(answer.segment_indexes) / 4,
        "offsets_bytes": len(answer.offsets_bytes) / 8,
        "lengths_bytes": len(answer.lengths_bytes) / 8,
        "checksums": len(answer.checksums) / 4 if answer.checksums else count,
    }
    wrong = {name: length for name, length in lengths.items() if length != count}
    if wrong:
        raise MalformedError(f"the daemon granted {count} slots and describes {wrong}")
    return RemoteGrant(
        answer.transfer_id,
        tuple(segment_of(segment) for segment in answer.segments),
        np.frombuffer(answer.segment_indexes, np.uint32),
        np.frombuffer(answer.offsets_bytes, np.uint64),
        np.frombuffer(answer.lengths_bytes, np.uint64),
        np.frombuffer(answer.checksums, np.uint32) if answer.checksums else None,
        asked_s + messages.seconds(answer.remaining),
    )
