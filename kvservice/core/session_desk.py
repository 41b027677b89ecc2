"""Sessions and namespaces: who is there, and what KV it works with."""

from __future__ import annotations

import numpy as np

from kvservice.core import drains
from kvservice.core.allocation import lend_ahead
from kvservice.core.answers import AttachAnswer, OpenAnswer
from kvservice.core.books import Books
from kvservice.core.effects import EndSession, NewsForTenant
from kvservice.core.errors import BlockSizeError, DrainingError, InvalidFieldError, LimitReachedError
from kvservice.core.events import Attach, Discard, Drain, OpenNamespace, Purge, SessionEnded
from kvservice.core.handoff_desk import HandoffDesk
from kvservice.core.history import FactKind
from kvservice.core.lease_desk import LeaseDesk
from kvservice.core.limits import (
    CLIENT_NAME_LIMIT,
    RETRY_AFTER_MS,
    SALT_BYTES_LIMIT,
    SPACES_PER_CALL_LIMIT,
)
from kvservice.core.namespace import Space, namespace_id
from kvservice.core.one_sided_desk import close_transfers
from kvservice.core.records import Session
from kvservice.core.removal import withdraw
from kvservice.core.representation import Part, check_part
from kvservice.core.reservation_desk import ReservationDesk
from kvservice.core.segment_desk import SegmentDesk
from kvservice.core.slot_pool import SlotState

INCARNATION_BYTES = 16
NAMESPACE_BYTES = 32


class SessionDesk:
    """Handles Attach, SessionEnded, OpenNamespace, Purge and Drain."""

    def __init__(
        self,
        books: Books,
        reservations: ReservationDesk,
        leases: LeaseDesk,
        handoffs: HandoffDesk,
        segments: SegmentDesk,
    ) -> None:
        self._books = books
        self._reservations = reservations
        self._leases = leases
        self._handoffs = handoffs
        self._segments = segments

    def attach(self, event: Attach, now: int) -> AttachAnswer:
        """Open a session, or find the one that is resumed."""
        books = self._books
        _check_attach(event)
        old = books.sessions.get(event.resume_token)
        if (
            old is not None
            and old.engine == (event.tenant, event.engine_incarnation)
            and old.is_local == event.is_local
        ):
            old.heard_ns = now
            return AttachAnswer(old.token, old.session_id, is_resumed=True)
        if books.is_draining:
            raise DrainingError("the daemon is stopping and opens no session", retry_after_ms=1000)
        if len(books.sessions) >= books.limits.max_sessions:
            raise LimitReachedError(
                f"{len(books.sessions)} sessions live, which is the limit (limits.max_sessions)",
                retry_after_ms=RETRY_AFTER_MS,
            )
        session = Session(
            session_id=books.mint(),
            token=event.token,
            tenant=event.tenant,
            incarnation=event.engine_incarnation,
            client_name=event.client_name,
            is_local=event.is_local,
            born_ns=now,
            heard_ns=now,
        )
        books.tenant(event.tenant)
        books.sessions[event.token] = session
        if not event.is_local:
            books.schedule(now + books.limits.heartbeat_timeout_ns, session.session_id)
        return AttachAnswer(event.token, session.session_id, is_resumed=False)

    def ended(self, event: SessionEnded, now: int) -> None:
        """End a session and all that it asked for; idempotent."""
        session = self._books.sessions.pop(event.token, None)
        if session is not None:
            self.close(session, now, is_certain=True)

    def close(self, session: Session, now: int, *, is_certain: bool) -> None:
        """Let go of what a session held; it is no longer among the living.

        is_certain: its process was seen to die, or said good-bye; else it has only been silent.
        """
        books = self._books
        books.sessions.pop(session.token, None)
        # Before the leases: that of a claimed handoff ends with it.
        self._handoffs.close(session, now, is_certain=is_certain)
        self._segments.close(session, now)
        close_transfers(books, session, is_certain=is_certain)
        for reservation_id in sorted(session.reservations):
            self._reservations.lose(books.reservations[reservation_id], now)
        for lease_id in sorted(session.leases):
            self._leases.lose(books.leases[lease_id], now)
        # Only now: what it held itself may have been waiting for nobody but others.
        owed = [q.capability_id for q in books.quarantines.values() if session.token in q.waiting]
        drains.acknowledge(books, session, owed)
        for space in session.spaces:
            books.space_users[space] -= 1
        books.effects.append(EndSession(session.token))

    def silent_until(self, session: Session) -> int | None:
        """Return when a session ends unless it is heard; None for a local one."""
        if session.is_local:
            return None
        return session.heard_ns + self._books.limits.heartbeat_timeout_ns

    def open_namespace(self, event: OpenNamespace, now: int) -> OpenAnswer:
        """Derive the namespace and hand out a space for each part."""
        books = self._books
        session = books.session(event.token, now)
        if not 1 <= len(event.parts) <= SPACES_PER_CALL_LIMIT:
            raise InvalidFieldError(
                f"parts has {len(event.parts)} entries; 1 to {SPACES_PER_CALL_LIMIT} are allowed"
            )
        if len(event.salt) > SALT_BYTES_LIMIT:
            raise InvalidFieldError(
                f"salt has {len(event.salt)} bytes; at most {SALT_BYTES_LIMIT} are allowed"
            )
        for part in event.parts:
            check_part(event.identity, part, max_block_bytes=books.limits.segment_bytes)
        digest = event.identity.digest()
        name = namespace_id(
            session.tenant, identity_digest=digest, salt=event.salt, server_key=books.server_key
        )
        quota = books.tenant(session.tenant).quota_bytes
        largest = max(part.block_bytes for part in event.parts)
        if largest > quota:
            raise BlockSizeError(
                f"parts.block_bytes is {largest}, more than the quota of tenant "
                f"{session.tenant!r} ({quota} bytes): no such block could ever be stored"
            )
        spaces = self._open_spaces(name, session.tenant, event.parts)
        for space in spaces:
            lend_ahead(books, books.pool(books.tenant(session.tenant), space.slot_bytes))
            if space.id not in session.spaces:
                session.spaces.add(space.id)
                books.space_users[space.id] += 1
        return OpenAnswer(
            name,
            tuple(space.id for space in spaces),
            digest,
            tuple(part.shape.digest() for part in event.parts),
        )

    def _open_spaces(self, name: bytes, tenant: str, parts: tuple[Part, ...]) -> list[Space]:
        books = self._books
        try:
            return [books.spaces.open(name, tenant=tenant, part=part) for part in parts]
        except LimitReachedError:
            self._collect_spaces()
            return [books.spaces.open(name, tenant=tenant, part=part) for part in parts]

    def _collect_spaces(self) -> None:
        """Forget the spaces that no session has open and no slot is of."""
        books = self._books
        used = {space for space, users in books.space_users.items() if users > 0}
        for tenant in books.tenants.values():
            for pool in tenant.pools.values():
                busy = (pool.state != SlotState.FREE) & (pool.state != SlotState.ABSENT)
                used.update(np.unique(pool.spaces[busy]).tolist())
        for space in [space.id for space in books.spaces if space.id not in used]:
            books.spaces.discard(space)
            del books.space_users[space]

    def purge(self, event: Purge, now: int) -> int:
        """Make every block of a namespace of the caller's tenant invisible."""
        books = self._books
        session = books.session(event.token, now)
        if len(event.namespace_id) != NAMESPACE_BYTES:
            raise InvalidFieldError(
                f"namespace_id has {len(event.namespace_id)} bytes; it takes {NAMESPACE_BYTES}, "
                "as OpenNamespace answered them"
            )
        tenant = books.tenant(session.tenant)
        spaces = [
            space.id
            for space in books.spaces
            if space.namespace_id == event.namespace_id and space.tenant == session.tenant
        ]
        purged = 0
        for pool in tenant.pools.values():
            ours = np.flatnonzero((pool.state == SlotState.COMMITTED) & np.isin(pool.spaces, spaces))
            withdraw(books, pool, ours)
            purged += len(ours)
        if purged:
            tenant.history.append(FactKind.PURGED, namespace_id=event.namespace_id, space_id=0, keys=b"")
            books.effects.append(NewsForTenant(tenant.name))
        return purged

    def discard(self, event: Discard, now: int) -> int:
        """Make damaged blocks invisible; what has another owner by now is passed over."""
        books = self._books
        session = books.session(event.token, now)
        discarded = 0
        for pool in books.tenant(session.tenant).pools.values():
            indexes = pool.indexes_of(event.slots.segments, event.slots.granules)
            ours = indexes >= 0
            indexes = indexes[ours]
            meant = (pool.state[indexes] == SlotState.COMMITTED) & (
                pool.generations[indexes] == event.slots.generations[ours]
            )
            if meant.any():
                withdraw(books, pool, indexes[meant])
                discarded += int(meant.sum())
        return discarded

    def drain(self, event: Drain, now: int) -> None:
        """Take no new work from now on."""
        del event, now
        self._books.is_draining = True


def _check_attach(event: Attach) -> None:
    if len(event.engine_incarnation) != INCARNATION_BYTES:
        raise InvalidFieldError(
            f"engine_incarnation has {len(event.engine_incarnation)} bytes; it takes "
            f"{INCARNATION_BYTES}, drawn anew at each start of the engine"
        )
    if len(event.client_name) > CLIENT_NAME_LIMIT:
        raise InvalidFieldError(
            f"client_name has {len(event.client_name)} characters; at most {CLIENT_NAME_LIMIT}"
        )
