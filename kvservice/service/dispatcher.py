"""What each method does, once, for every edge.

An edge (gRPC, the local lane) reads a message, says on whose behalf it came, and
frames what comes back; everything between is here. Handlers compute and return,
none waits, so an edge may call them on the event loop.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from google.protobuf.message import DecodeError, Message

from kvproto.kv.v1 import (
    capabilities_service_pb2,
    lifecycle_service_pb2,
    session_service_pb2,
    tier_service_pb2,
)
from kvservice.core import events
from kvservice.core.errors import MalformedError, SessionUnknownError, UnknownMethodError
from kvservice.core.limits import Limits
from kvservice.engine.coordinator import Coordinator
from kvservice.engine.ucx_arena import UcxArena
from kvservice.engine.verification import Verifier
from kvservice.ports.methods import Method
from kvservice.service import handoff_mapping, mapping
from kvservice.service.handoff_operations import HandoffOperations
from kvservice.service.tier_report import tier_report
from kvservice.service.transfer_operations import TransferOperations

TOKEN_BYTES = 16


@dataclass(frozen=True, slots=True)
class Caller:
    """On whose behalf a message came.

    tenant: whom the credentials stand for. token: of the session; empty before
    Attach. is_local: the caller is a process of this host whose death is seen.
    """

    tenant: str
    token: bytes
    is_local: bool


@dataclass(frozen=True, slots=True)
class Facts:
    """What does not change during one life of the daemon."""

    version: str
    incarnation: bytes
    limits: Limits
    has_native: bool
    socket_path: str
    tcp_address: str


NOT_OF_THIS_TENANT = "session_token names no living session of this tenant; attach again"


@dataclass(frozen=True, slots=True)
class Operation:
    """One method: its gRPC name, its messages, and what it does."""

    service: str
    rpc: str
    request_type: type[Message]
    response_type: type[Message]
    run: Callable[[Any, Caller], Message]


class Dispatcher:
    """Finds and runs the operation of a method.

    lender: of the arena; None where it is lent to nobody.
    """

    def __init__(
        self, coordinator: Coordinator, verifier: Verifier, facts: Facts, lender: UcxArena | None = None
    ) -> None:
        self._submit = coordinator.submit
        self._coordinator = coordinator
        self._verifier = verifier
        self._lender = lender
        self.facts = facts
        self.operations = self._table()

    def call_packed(self, method: int, body: bytes | memoryview, caller: Caller) -> bytes:
        """Run a method on a message as it came over a wire.

        Raises:
            KvError: it was refused, or is no message of the method's.
        """
        operation = self.operations.get(method)  # type: ignore[call-overload]
        if operation is None:
            raise UnknownMethodError(f"method {method} does not exist on this edge")
        request = operation.request_type()
        try:
            request.ParseFromString(body)
        except DecodeError as error:
            raise MalformedError(
                f"{operation.rpc}: {len(body)} bytes are no {request.DESCRIPTOR.name}: {error}"
            ) from error
        packed: bytes = operation.run(request, caller).SerializeToString()
        return packed

    def check_tenant(self, caller: Caller) -> None:
        """Raise SessionUnknownError where the caller names a living session of another tenant.

        A stolen session token is of no use without its tenant's credentials.
        """
        tenant = self._coordinator.look(lambda state, _: state.tenant_of_session(caller.token))
        if tenant not in {None, caller.tenant}:
            raise SessionUnknownError(NOT_OF_THIS_TENANT)

    def check_session(self, caller: Caller) -> None:
        """Raise SessionUnknownError unless the caller's session lives and is of the caller's tenant."""
        tenant = self._coordinator.look(lambda state, _: state.tenant_of_session(caller.token))
        if tenant != caller.tenant:
            raise SessionUnknownError(NOT_OF_THIS_TENANT)

    def beat(
        self, request: session_service_pb2.HeartbeatRequest, caller: Caller
    ) -> session_service_pb2.HeartbeatResponse:
        """Run one beat of a stream."""
        answer = self._submit(mapping.beat_event(caller.token, request))
        response = mapping.beat_response(answer)
        response.notices.extend(handoff_mapping.notice_message(notice) for notice in answer.notices)
        return response

    def _table(self) -> dict[Method, Operation]:
        session, life = session_service_pb2, lifecycle_service_pb2
        tier, capabilities = tier_service_pb2, capabilities_service_pb2
        rows: list[tuple[Method, str, str, Any, Callable[[Any, Caller], Message]]] = [
            (Method.ATTACH, "SessionService", "Attach", session, self._attach),
            (Method.DETACH, "SessionService", "Detach", session, self._detach),
            (Method.OPEN_NAMESPACE, "SessionService", "OpenNamespace", session, self._open),
            (Method.HEARTBEAT, "SessionService", "Heartbeat", session, self.beat),
            (Method.LOOKUP, "LifecycleService", "Lookup", life, self._lookup),
            (Method.RESERVE, "LifecycleService", "Reserve", life, self._reserve),
            (Method.COMMIT, "LifecycleService", "Commit", life, self._commit),
            (Method.ABORT, "LifecycleService", "Abort", life, self._abort),
            (Method.ACQUIRE, "LifecycleService", "Acquire", life, self._acquire),
            (Method.RENEW, "LifecycleService", "Renew", life, self._renew),
            (Method.RELEASE, "LifecycleService", "Release", life, self._release),
            (Method.VERIFY, "LifecycleService", "Verify", life, self._verify),
            (Method.LIST_TIERS, "TierService", "ListTiers", tier, self._list_tiers),
            (Method.PURGE_NAMESPACE, "TierService", "PurgeNamespace", tier, self._purge),
            (
                Method.GET_CAPABILITIES,
                "CapabilitiesService",
                "GetCapabilities",
                capabilities,
                self._capabilities,
            ),
            *HandoffOperations(self._coordinator).rows(),
            *TransferOperations(self._coordinator, self._lender).rows(),
        ]
        return {
            method: Operation(
                service,
                rpc,
                getattr(module, f"{rpc}Request"),
                getattr(module, f"{rpc}Response"),
                run,
            )
            for method, service, rpc, module, run in rows
        }

    def _attach(self, request: session_service_pb2.AttachRequest, caller: Caller) -> Message:
        answer = self._submit(
            events.Attach(
                tenant=caller.tenant,
                engine_incarnation=request.engine_incarnation,
                client_name=request.client_name,
                token=secrets.token_bytes(TOKEN_BYTES),
                resume_token=request.resume_token,
                is_local=caller.is_local,
            )
        )
        limits = self.facts.limits
        response = session_service_pb2.AttachResponse(
            session_token=answer.token,
            session_id=answer.session_id,
            daemon_incarnation=self.facts.incarnation,
            resumed=answer.is_resumed,
            lease_ttl=mapping.duration(limits.default_ttl_ns),
            renew_interval=mapping.duration(limits.renew_interval_ns),
            limits=mapping.limits_message(limits),
            tenant=caller.tenant,
            tcp_address=self.facts.tcp_address,
        )
        if not caller.is_local:
            response.heartbeat_timeout.CopyFrom(mapping.duration(limits.heartbeat_timeout_ns))
        return response

    def _detach(self, request: Message, caller: Caller) -> Message:
        del request
        self._submit(events.SessionEnded(caller.token))
        return session_service_pb2.DetachResponse()

    def _open(self, request: session_service_pb2.OpenNamespaceRequest, caller: Caller) -> Message:
        return mapping.open_response(self._submit(mapping.open_event(caller.token, request)))

    def _lookup(self, request: lifecycle_service_pb2.LookupRequest, caller: Caller) -> Message:
        return mapping.lookup_response(self._submit(mapping.lookup_event(caller.token, request)))

    def _reserve(self, request: lifecycle_service_pb2.ReserveRequest, caller: Caller) -> Message:
        return mapping.reserve_response(self._submit(mapping.reserve_event(caller.token, request)))

    def _commit(self, request: lifecycle_service_pb2.CommitRequest, caller: Caller) -> Message:
        answer = self._submit(
            events.Commit(
                caller.token,
                request.reservation_id,
                mapping.packed_u32(request.checksums, "checksums"),
                request.keys,
            )
        )
        return lifecycle_service_pb2.CommitResponse(
            outcome=int(answer.outcome),  # type: ignore[arg-type]
            keys_count=answer.keys_count,
            outcomes=answer.outcomes,
        )

    def _abort(self, request: lifecycle_service_pb2.AbortRequest, caller: Caller) -> Message:
        outcome = self._submit(events.Abort(caller.token, request.reservation_id))
        return lifecycle_service_pb2.AbortResponse(outcome=int(outcome))  # type: ignore[arg-type]

    def _acquire(self, request: lifecycle_service_pb2.AcquireRequest, caller: Caller) -> Message:
        lease = self._submit(
            events.Acquire(
                caller.token,
                tuple(request.space_ids),
                request.keys,
                mapping.ttl_ns(request, "ttl"),
            )
        )
        return lifecycle_service_pb2.AcquireResponse(
            lease=None if lease is None else mapping.lease_message(lease)
        )

    def _renew(self, request: lifecycle_service_pb2.RenewRequest, caller: Caller) -> Message:
        answer = self._submit(
            events.Renew(
                caller.token,
                mapping.u64_array(request.lease_ids),
                mapping.u64_array(request.reservation_ids),
                mapping.ttl_ns(request, "ttl"),
            )
        )
        return mapping.renew_response(answer)

    def _release(self, request: lifecycle_service_pb2.ReleaseRequest, caller: Caller) -> Message:
        outcomes = self._submit(events.Release(caller.token, mapping.u64_array(request.lease_ids)))
        return lifecycle_service_pb2.ReleaseResponse(outcomes=outcomes.tobytes())

    def _verify(self, request: lifecycle_service_pb2.VerifyRequest, caller: Caller) -> Message:
        outcomes = self._verifier.verify(caller.token, tuple(request.space_ids), request.keys)
        return lifecycle_service_pb2.VerifyResponse(outcomes=outcomes)

    def _list_tiers(self, request: Message, caller: Caller) -> Message:
        del request, caller
        return self._coordinator.look(tier_report)

    def _purge(self, request: tier_service_pb2.PurgeNamespaceRequest, caller: Caller) -> Message:
        count = self._submit(events.Purge(caller.token, request.namespace_id))
        return tier_service_pb2.PurgeNamespaceResponse(blocks_count=count)

    def _capabilities(self, request: Message, caller: Caller) -> Message:
        del request, caller
        facts = self.facts
        response = capabilities_service_pb2.GetCapabilitiesResponse(
            version=facts.version,
            daemon_incarnation=facts.incarnation,
            limits=mapping.limits_message(facts.limits),
            tiers=["dram"],
            representation_versions=[1],
            has_native=facts.has_native,
        )
        for name, address in (("shm", facts.socket_path), ("tcp", facts.tcp_address)):
            if address:
                response.transports.add(name=name, address=address)
        if self._lender is not None:
            lender = self._lender.facts
            response.transports.add(name=lender.transport, address=",".join(lender.rdma_devices))
        return response
