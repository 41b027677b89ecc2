"""The client: one session with one daemon."""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType
from typing import Self, TypeVar

from google.protobuf.message import Message

from kvclient import messages
from kvclient._backends.aio import dial
from kvclient.aio.events import EventStream
from kvclient.aio.handoffs import Handoffs
from kvclient.aio.namespace import Namespace
from kvclient.aio.session import Dial, Session
from kvclient.config import ClientSettings
from kvclient.representation import Identity, Part
from kvclient.results import Attachment, Lease, Reservation
from kvproto.kv.v1 import (
    capabilities_service_pb2,
    event_service_pb2,
    lifecycle_service_pb2,
    tier_service_pb2,
)
from kvservice.core.errors import StaleIncarnationError
from kvservice.core.outcomes import ItemOutcome
from kvservice.core.slots import U8, U32
from kvservice.ports.methods import Method
from kvservice.ports.one_sided import OneSided
from kvservice.ports.transport import Transport

Answer = TypeVar("Answer", bound=Message)


class KvClient:
    """An asynchronous client of one daemon; `await KvClient.connect()` makes one.

    Reservations and leases that it hands out are renewed in the background until they
    are committed, aborted, released or revoked. A client belongs to the process that
    connected it, and is of no use in a fork.
    """

    def __init__(self, session: Session) -> None:
        """Take an open session; callers use `connect`."""
        self._session = session
        self.handoffs = Handoffs(session)

    @classmethod
    async def connect(
        cls,
        settings: ClientSettings | str | None = None,
        dial: Dial = dial,
        endpoint: OneSided | None = None,
    ) -> KvClient:
        """Open a session with the daemon.

        settings: or just the endpoint; None takes the default endpoint.
        dial: opens the connection; tests bring their own network.
        endpoint: by which to lend and read memory, in place of the one that the settings
            name; closed with the client.

        Raises:
            InvalidFieldError: the endpoint is malformed.
            PeerUnavailableError: no daemon is there.
            TenantUnknownError: the daemon does not know us.
        """
        if settings is None:
            settings = ClientSettings()
        elif isinstance(settings, str):
            settings = ClientSettings(endpoint=settings)
        session = Session(settings, dial, endpoint)
        try:
            await session.open()
        except BaseException:
            await session.close()
            raise
        return cls(session)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """End the session: open reservations are aborted, leases released. Idempotent."""
        await self._session.close()
        self.handoffs.close()

    @property
    def attachment(self) -> Attachment:
        """The session as the daemon opened it: limits, tenant, intervals."""
        return self._session.attachment

    @property
    def wire(self) -> Transport:
        """The transport of the session's bytes, for those who show what it does."""
        return self._session.plane.transport

    @property
    def is_draining(self) -> bool:
        """Whether the daemon has said that it is about to stop."""
        return self._session.is_draining

    async def open_namespace(self, identity: Identity, parts: Sequence[Part], salt: bytes = b"") -> Namespace:
        """Open a namespace to work in; on this host its memory is mapped and touched.

        parts: what each key consists of; blocks come and go key-major over them.
        salt: keeps apart what must not meet.

        Raises:
            InvalidFieldError, BlockSizeError: the daemon does not accept them.
        """
        namespace = Namespace(self._session, identity, tuple(parts), salt)
        await namespace.open()
        return namespace

    async def commit(self, reservation: Reservation, checksums: U32) -> int:
        """Make written blocks visible; return the number of keys. Idempotent.

        checksums: (slots,) uint32, CRC32C of each granted slot, as `Namespace.write` gives.

        Raises:
            ReservationExpiredError, ReservationAbortedError: nothing was committed.
            StaleIncarnationError: the daemon that granted it is gone.
        """
        if not reservation.reservation_id:
            return 0  # Every key was there before.
        self._check_life(reservation)
        request = lifecycle_service_pb2.CommitRequest(
            reservation_id=reservation.reservation_id, checksums=checksums.tobytes()
        )
        answer = await self._call(Method.COMMIT, request, lifecycle_service_pb2.CommitResponse)
        self._session.holdings.discard(reservation.reservation_id)
        return answer.keys_count

    async def abort(self, reservation: Reservation) -> ItemOutcome:
        """Give a reservation up; nobody of the engine may write under it any more. Idempotent."""
        if not reservation.reservation_id:
            return ItemOutcome.DONE  # Nothing was granted, so there is nothing to give up.
        self._check_life(reservation)
        self._session.holdings.discard(reservation.reservation_id)
        request = lifecycle_service_pb2.AbortRequest(reservation_id=reservation.reservation_id)
        answer = await self._call(Method.ABORT, request, lifecycle_service_pb2.AbortResponse)
        return ItemOutcome(answer.outcome)

    async def renew(
        self,
        leases: Sequence[Lease] = (),
        reservations: Sequence[Reservation] = (),
        ttl_s: float | None = None,
    ) -> tuple[U8, U8]:
        """Prolong now, beyond what the background does; never shortens.

        Returns outcomes of the leases and of the reservations, uint8 of ItemOutcome.
        """
        for lease in leases:
            self._check_life(lease)
        for reservation in reservations:
            self._check_life(reservation)
        request = lifecycle_service_pb2.RenewRequest(
            lease_ids=[lease.lease_id for lease in leases],
            reservation_ids=[reservation.reservation_id for reservation in reservations],
            ttl=messages.duration(ttl_s),
        )
        answer = await self._call(Method.RENEW, request, lifecycle_service_pb2.RenewResponse)
        return messages.outcomes(answer.lease_outcomes), messages.outcomes(answer.reservation_outcomes)

    async def release(self, leases: Sequence[Lease]) -> U8:
        """End leases; nobody of the engine may read under them any more. Idempotent.

        Returns outcomes, (leases,) uint8 of ItemOutcome.
        """
        for lease in leases:
            self._check_life(lease)
            self._session.holdings.discard(lease.lease_id)
        request = lifecycle_service_pb2.ReleaseRequest(lease_ids=[lease.lease_id for lease in leases])
        answer = await self._call(Method.RELEASE, request, lifecycle_service_pb2.ReleaseResponse)
        return messages.outcomes(answer.outcomes)

    async def list_tiers(self) -> tier_service_pb2.ListTiersResponse:
        """Return the tiers with their use, and every session that lives."""
        return await self._call(
            Method.LIST_TIERS, tier_service_pb2.ListTiersRequest(), tier_service_pb2.ListTiersResponse
        )

    async def purge(self, namespace: Namespace) -> int:
        """Drop every committed block of a namespace; return how many are no longer visible. Idempotent."""
        request = tier_service_pb2.PurgeNamespaceRequest(namespace_id=namespace.namespace_id)
        answer = await self._call(Method.PURGE_NAMESPACE, request, tier_service_pb2.PurgeNamespaceResponse)
        return answer.blocks_count

    async def capabilities(self) -> capabilities_service_pb2.GetCapabilitiesResponse:
        """Return what the daemon can do and where it draws the line."""
        return await self._call(
            Method.GET_CAPABILITIES,
            capabilities_service_pb2.GetCapabilitiesRequest(),
            capabilities_service_pb2.GetCapabilitiesResponse,
        )

    async def watch_events(
        self, after_sequence: int | None = None, daemon_incarnation: bytes = b""
    ) -> EventStream:
        """Follow what happens to the tenant's blocks.

        after_sequence: last number seen; None starts with the next event.
        daemon_incarnation: the life of the daemon that the number belongs to.
        """
        request = event_service_pb2.WatchEventsRequest(
            daemon_incarnation=daemon_incarnation, after_sequence=after_sequence
        )
        source = await self._session.stream(
            Method.WATCH_EVENTS, request, event_service_pb2.WatchEventsResponse
        )
        return EventStream(source)

    async def _call(self, method: Method, request: Message, response_type: type[Answer]) -> Answer:
        return await self._session.call(method, request, response_type)

    def _check_life(self, held: Reservation | Lease) -> None:
        if held.daemon_incarnation != self._session.attachment.daemon_incarnation:
            raise StaleIncarnationError(
                f"{type(held).__name__} is of daemon {held.daemon_incarnation.hex()}, now it is "
                f"{self._session.attachment.daemon_incarnation.hex()}; reserve or acquire again"
            )
