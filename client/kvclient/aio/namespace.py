"""A namespace: put, get and lease blocks by key."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from google.protobuf.message import Message

from kvclient import messages, outcomes
from kvclient.aio.ahead import SlotsAhead
from kvclient.aio.lease_view import LeaseView
from kvclient.aio.moves import LocalBatch, Mover
from kvclient.aio.session import Session
from kvclient.buffers import BlockBuffers, Blocks
from kvclient.holdings import Kind
from kvclient.keys import KEY_BYTES, Keys, packed_keys, taken
from kvclient.plane import Plane
from kvclient.representation import Identity, Part
from kvclient.results import GetResult, Lease, LookupResult, PutResult, Reservation
from kvproto.kv.v1 import lifecycle_service_pb2, session_service_pb2
from kvservice.core.errors import (
    ChecksumMismatchError,
    ReservationAbortedError,
    ReservationExpiredError,
    StaleGenerationError,
    StaleIncarnationError,
)
from kvservice.core.outcomes import ItemOutcome
from kvservice.core.slots import U32
from kvservice.ports.methods import Method

Answer = TypeVar("Answer", bound=Message)

REQUEST_ID_BYTES = 16

OPEN_ATTEMPTS = 3
"""One for a session that was lost before, one for a daemon that restarts meanwhile."""


@dataclass(frozen=True, slots=True)
class Opening:
    """The handles of a namespace in one session."""

    epoch: int
    namespace_id: bytes
    space_ids: tuple[int, ...]


class Namespace:
    """Blocks of one identity, salt and list of parts; `KvClient.open_namespace` makes it.

    It outlives sessions: after a restart of the daemon it is opened again by its next
    use. Blocks are key-major over the parts, and a key is there only with all of them.
    """

    def __init__(self, session: Session, identity: Identity, parts: tuple[Part, ...], salt: bytes) -> None:
        self._session = session
        self._mover = Mover(session, tuple(part.block_bytes for part in parts))
        self._request = messages.open_request(identity, parts, salt)
        self._ahead = SlotsAhead(session, sum(part.block_bytes for part in parts))
        self._opening: Opening | None = None
        self.identity = identity
        self.parts = parts
        self.block_bytes = self._mover.block_bytes

    @property
    def namespace_id(self) -> bytes:
        """The 32 bytes that everyone who opens the same namespace gets."""
        return b"" if self._opening is None else self._opening.namespace_id

    async def open(self) -> None:
        """Open it in the present session. Idempotent; every call does it where needed."""
        for _ in range(OPEN_ATTEMPTS):
            epoch = self._session.epoch
            answer = await self._session.call(
                Method.OPEN_NAMESPACE, self._request, session_service_pb2.OpenNamespaceResponse
            )
            # A session that began during the call may or may not be the one that answered.
            if epoch == self._session.epoch:
                self._opening = Opening(epoch, answer.namespace_id, tuple(answer.space_ids))
                await self._session.prepare_memory()
                return
        raise StaleIncarnationError("sessions end faster than a namespace can be opened; is the daemon ill?")

    async def handles(self) -> Opening:
        """Return the handles that requests of the present session name it by."""
        return await self._opened()

    # ---- one call each

    async def lookup(self, keys: Keys) -> LookupResult:
        """Ask the daemon for each key whether it is committed in all parts."""
        packed = packed_keys(keys)

        def request(opening: Opening) -> Message:
            return lifecycle_service_pb2.LookupRequest(space_ids=opening.space_ids, keys=packed)

        answer = await self._call(Method.LOOKUP, request, lifecycle_service_pb2.LookupResponse)
        return LookupResult(messages.outcomes(answer.outcomes), answer.prefix_count)

    async def lookup_local(self, keys: Keys) -> LookupResult:
        """Answer like `lookup` from this host's directory, without a call.

        It knows no PENDING. Where there is no directory it is a `lookup`.
        """
        packed = packed_keys(keys)
        opening, plane = await self._opened_plane()
        directory = await self._mover.directory(plane)
        if directory is None:
            return await self.lookup(packed)
        found = directory.find(packed, opening.space_ids)
        return LookupResult(outcomes.from_found(found), outcomes.prefix_count(found))

    async def reserve(
        self, keys: Keys, request_id: bytes | None = None, ttl_s: float | None = None
    ) -> Reservation:
        """Ask for the right to write those keys that are neither committed nor pending.

        request_id: 16 bytes; the same again finds the same reservation. Random if None.

        Raises:
            ArenaFullError, QuotaExceededError, LimitReachedError: nothing was granted; later.
            DuplicateKeyError: a key stands twice.
        """
        packed = packed_keys(keys)
        request_id = request_id or os.urandom(REQUEST_ID_BYTES)
        ttl = messages.duration(ttl_s)

        def request(opening: Opening) -> Message:
            return lifecycle_service_pb2.ReserveRequest(
                request_id=request_id, space_ids=opening.space_ids, keys=packed, ttl=ttl
            )

        asked_s = time.monotonic()
        answer = await self._call(Method.RESERVE, request, lifecycle_service_pb2.ReserveResponse)
        reservation = messages.reservation(answer, asked_s, self._session.attachment.daemon_incarnation)
        if reservation.reservation_id:
            self._session.holdings.add(
                reservation.reservation_id, Kind.RESERVATION, deadline_s=reservation.deadline_s
            )
        return reservation

    async def verify(self, keys: Keys) -> LookupResult:
        """Hold stored blocks to their checksums, by the daemon; those that differ are dropped.

        At most 16 keys, and 64 MiB unless it is one. HIT: sound in all parts; MISS: not there, or no longer.
        """
        packed = packed_keys(keys)

        def request(opening: Opening) -> Message:
            return lifecycle_service_pb2.VerifyRequest(space_ids=opening.space_ids, keys=packed)

        answer = await self._call(Method.VERIFY, request, lifecycle_service_pb2.VerifyResponse)
        became = messages.outcomes(answer.outcomes)
        return LookupResult(became, outcomes.prefix_count((became == ItemOutcome.HIT).view(np.uint8)))

    async def acquire(self, keys: Keys, ttl_s: float | None = None) -> Lease | None:
        """Lease the longest contiguous committed prefix; None when the first key is a miss.

        Raises:
            LimitReachedError: this session holds as many leases as it may.
            PeerUnavailableError: the connection was lost; the lease, if there is one, expires.
        """
        packed = packed_keys(keys)
        ttl = messages.duration(ttl_s)

        def request(opening: Opening) -> Message:
            return lifecycle_service_pb2.AcquireRequest(space_ids=opening.space_ids, keys=packed, ttl=ttl)

        asked_s = time.monotonic()
        answer = await self._call(Method.ACQUIRE, request, lifecycle_service_pb2.AcquireResponse)
        if not answer.HasField("lease"):
            return None
        lease = messages.lease(answer.lease, asked_s, self._session.attachment.daemon_incarnation)
        self._session.holdings.add(lease.lease_id, Kind.LEASE, deadline_s=lease.deadline_s)
        return lease

    # ---- bytes under a capability

    async def write(self, reservation: Reservation, blocks: Blocks) -> U32:
        """Copy blocks into the slots of a reservation of any process of this engine.

        blocks: of all keys of the request, granted or not, key-major; only those of
            granted keys are read.

        Returns (slots,) uint32, the checksums to commit with.

        Raises:
            StaleIncarnationError: the daemon that granted it is gone.
            StaleGenerationError, ReservationExpiredError: it ended; abort.
        """
        keys_count = len(reservation.outcomes)
        buffers = BlockBuffers.of(blocks, self.block_bytes)
        buffers.check(self.block_bytes, keys_count=keys_count, is_target=False)
        return await self._mover.write(reservation, buffers)

    async def read(self, lease: Lease, into: Blocks) -> int:
        """Copy the blocks of a lease of any process of this engine; return the bytes moved.

        into: memory of the first `lease.keys_count` keys, key-major.

        Raises:
            StaleIncarnationError: the daemon that granted it is gone.
            LeaseExpiredError, StaleGenerationError: discard what was read.
            ChecksumMismatchError: the bytes are not those committed.
        """
        buffers = BlockBuffers.of(into, self.block_bytes)
        buffers.check(self.block_bytes, keys_count=lease.keys_count, is_target=True)
        await self._mover.read(lease, buffers, verify=self._session.settings.verify)
        return buffers.size_bytes

    async def read_some(self, lease: Lease, keys: bytes, into: BlockBuffers, *, first_key: int) -> int:
        """Copy the blocks of some keys of a lease, from `first_key` on; see `read`.

        keys: packed, those that are read. What is damaged of them, the daemon drops.
        """
        parts_count = len(self.parts)
        keys_count = into.blocks_count // parts_count
        into.check(self.block_bytes, keys_count=keys_count, is_target=True)
        first = first_key * parts_count
        try:
            await self._mover.read(lease, into, verify=self._session.settings.verify, first_slot=first)
        except ChecksumMismatchError:
            await self._report_damage(keys, keys_count)
            raise
        return into.size_bytes

    # ---- the whole way

    async def put(self, keys: Keys, blocks: Blocks) -> PutResult:
        """Store blocks: reserve, copy, commit. What others store is an outcome, not an error.

        blocks: see `Blocks`; the caller's, unchanged until this returns.

        Raises:
            KvError: nothing of this call became visible.
        """
        packed = packed_keys(keys)
        keys_count = len(packed) // KEY_BYTES
        buffers = BlockBuffers.of(blocks, self.block_bytes)
        buffers.check(self.block_bytes, keys_count=keys_count, is_target=False)
        opening, plane = await self._opened_plane()
        ahead = await self._ahead.take(keys_count, opening.epoch)
        result = None
        if ahead is not None:
            result = await self._put_ahead(ahead, opening, plane, packed, buffers)
        if result is None:
            result = await self._put_by_name(packed, buffers)
        if result.stored_count == keys_count:
            await self._ahead.ask(keys_count, opening.space_ids, opening.epoch)
        return result

    async def _put_by_name(self, packed: bytes, buffers: BlockBuffers) -> PutResult:
        reservation = await self.reserve(packed)
        stored_count = len(reservation.granted)
        if not stored_count:
            return PutResult(reservation.outcomes, 0, 0)
        try:
            checksums = await self._mover.write(reservation, buffers)
            await self._commit(reservation, checksums)
        except BaseException:
            await self._give_up(reservation)
            raise
        bytes_moved = stored_count * sum(self.block_bytes)
        return PutResult(outcomes.stored(reservation.outcomes), stored_count, bytes_moved)

    async def _put_ahead(
        self, ahead: Reservation, opening: Opening, plane: Plane, packed: bytes, buffers: BlockBuffers
    ) -> PutResult | None:
        """Store into slots that were reserved ahead; None where they are of no use."""
        directory = await self._mover.directory(plane)
        # A chain that is there already is there from its first key on; then by name it needs
        # no copy. What is there further on is found at the commit.
        if directory is None or directory.find(packed[:KEY_BYTES], opening.space_ids)[0]:
            await self._ahead.give_back(ahead, opening.epoch)
            return None
        try:
            checksums = await self._mover.write(ahead, buffers)
            answer = await self._commit(ahead, checksums, packed)
        except (
            ReservationExpiredError,
            ReservationAbortedError,
            StaleGenerationError,
            StaleIncarnationError,
        ):
            await self._give_up(ahead)
            return None  # They were taken back meanwhile; nothing of this became visible.
        except BaseException:
            await self._give_up(ahead)
            raise
        # The answer to a repeated commit has no outcomes: all are there, whoever stored them.
        became = messages.outcomes(answer.outcomes) if answer.outcomes else outcomes.stored(ahead.outcomes)
        return PutResult(became, answer.keys_count, buffers.size_bytes)

    async def get(self, keys: Keys, into: Blocks) -> GetResult:
        """Read blocks into memory of the caller's.

        On this host each key is looked up and read by itself, without a call, so every
        key gets its own outcome. Elsewhere the contiguous prefix is leased and read;
        keys behind the first miss are MISS, there or not.

        into: writable memory of all keys, see `Blocks`; the memory of a key that is no
            HIT holds garbage afterwards.

        Raises:
            ChecksumMismatchError: stored bytes are not those committed.
            KvError: the memory holds garbage.
        """
        packed = packed_keys(keys)
        buffers = BlockBuffers.of(into, self.block_bytes)
        buffers.check(self.block_bytes, keys_count=len(packed) // KEY_BYTES, is_target=True)
        opening, plane = await self._opened_plane()
        memory, directory = plane.memory, await self._mover.directory(plane)
        if memory is not None and directory is not None:
            batch = LocalBatch(packed, opening.space_ids, buffers)
            return await self._mover.get_local(memory, directory, batch)
        return await self._get_located(packed, buffers)

    async def get_leased(self, keys: Keys, into: Blocks) -> GetResult:
        """Read the contiguous prefix of some keys under a lease, wherever the daemon is.

        `get` does this by itself where there is no directory. Called by name, it asks
        the daemon for each read, which then knows of it at once and keeps the blocks
        for as long as the copy takes.

        into, errors: as for `get`; keys behind the first miss are MISS, there or not.
        """
        packed = packed_keys(keys)
        buffers = BlockBuffers.of(into, self.block_bytes)
        buffers.check(self.block_bytes, keys_count=len(packed) // KEY_BYTES, is_target=True)
        return await self._get_leased(packed, buffers)

    async def get_located(self, keys: Keys, into: Blocks) -> GetResult:
        """Read the contiguous prefix of some keys with one call and no lease, on this host.

        The daemon says where the blocks are; their generations are looked at before
        and after the copy, and what has moved is read again under a lease. Where the
        memory of the daemon is not mapped it is a `get_leased`.

        into, errors: as for `get`; keys behind the first miss are MISS, there or not.
        """
        packed = packed_keys(keys)
        buffers = BlockBuffers.of(into, self.block_bytes)
        buffers.check(self.block_bytes, keys_count=len(packed) // KEY_BYTES, is_target=True)
        return await self._get_located(packed, buffers)

    async def _get_located(self, packed: bytes, buffers: BlockBuffers) -> GetResult:
        _, plane = await self._opened_plane()
        if plane.memory is None:
            return await self._get_leased(packed, buffers)

        def request(opening: Opening) -> Message:
            return lifecycle_service_pb2.LookupRequest(space_ids=opening.space_ids, keys=packed, locate=True)

        answer = await self._call(Method.LOOKUP, request, lifecycle_service_pb2.LookupResponse)
        hits_count = answer.prefix_count
        prefix = buffers.first(hits_count * len(self.parts))
        if hits_count:
            try:
                await self._mover.read_located(plane, messages.slots(answer.slots), prefix)
            except StaleGenerationError:
                return await self._get_leased(packed, buffers)
            except ChecksumMismatchError:
                await self._report_damage(packed, hits_count)
                raise
        bytes_moved = prefix.size_bytes if hits_count else 0
        return outcomes.of_prefix(len(packed) // KEY_BYTES, hits_count, bytes_moved)

    async def _get_leased(self, packed: bytes, buffers: BlockBuffers) -> GetResult:
        lease = await self.acquire(packed)
        if lease is None:
            return outcomes.of_prefix(len(packed) // KEY_BYTES, 0, 0)
        try:
            prefix = buffers.first(lease.keys_count * len(self.parts))
            await self._mover.read(lease, prefix, verify=self._session.settings.verify)
        except ChecksumMismatchError:
            await self._report_damage(packed, lease.keys_count)
            raise
        finally:
            await self._release(lease)
        return outcomes.of_prefix(len(packed) // KEY_BYTES, lease.keys_count, prefix.size_bytes)

    def lease(self, keys: Keys, *, ttl_s: float | None = None, verify: bool = False) -> LeaseView:
        """Return a context in which the blocks can be seen, in place where possible.

        `async with namespace.lease(keys) as view:` - the views are good until it ends.

        verify: hold each block to its committed checksum first.
        """
        packed = packed_keys(keys)

        async def acquire() -> Lease | None:
            return await self.acquire(packed, ttl_s)

        return LeaseView(acquire, self._mover, self._release, verify=verify)

    # ---- private

    async def _opened(self) -> Opening:
        self._session.check_process()
        opening = self._opening
        if opening is None or opening.epoch != self._session.epoch:
            await self.open()
            opening = self._opening
        if opening is None:
            raise StaleIncarnationError("the session ended while the namespace was being opened; try again")
        return opening

    async def _opened_plane(self) -> tuple[Opening, Plane]:
        """Return handles and plane of one and the same session."""
        for _ in range(OPEN_ATTEMPTS):
            opening = await self._opened()
            plane = self._session.plane
            if plane.epoch == opening.epoch:
                return opening, plane
        raise StaleIncarnationError("sessions end faster than a namespace can be opened; is the daemon ill?")

    async def _call(
        self, method: Method, request: Callable[[Opening], Message], response_type: type[Answer]
    ) -> Answer:
        """Call with the present handles; where the session ended meanwhile, once more with new ones."""
        opening = await self._opened()
        try:
            return await self._session.call(method, request(opening), response_type, epoch=opening.epoch)
        except StaleIncarnationError:
            if opening.epoch == self._session.epoch:
                raise
        opening = await self._opened()
        return await self._session.call(method, request(opening), response_type, epoch=opening.epoch)

    async def _report_damage(self, packed: bytes, prefix_count: int) -> None:
        """Have the whole prefix looked at: the error of a transport does not say which keys it was."""
        opening = await self._opened()
        await self._mover.report_damage(opening.space_ids, taken(packed, range(prefix_count)))

    async def _commit(
        self, reservation: Reservation, checksums: U32, keys: bytes = b""
    ) -> lifecycle_service_pb2.CommitResponse:
        """Commit a reservation, with the keys that it has not named yet."""
        request = lifecycle_service_pb2.CommitRequest(
            reservation_id=reservation.reservation_id, checksums=checksums.tobytes(), keys=keys
        )
        epoch = self._session.epoch
        answer = await self._session.call(
            Method.COMMIT, request, lifecycle_service_pb2.CommitResponse, epoch=epoch
        )
        self._session.holdings.discard(reservation.reservation_id)
        return answer

    async def _give_up(self, reservation: Reservation) -> None:
        self._session.holdings.discard(reservation.reservation_id)
        request = lifecycle_service_pb2.AbortRequest(reservation_id=reservation.reservation_id)
        epoch = self._session.epoch
        await self._session.post(Method.ABORT, request, lifecycle_service_pb2.AbortResponse, epoch=epoch)

    async def _release(self, lease: Lease) -> None:
        self._session.holdings.discard(lease.lease_id)
        request = lifecycle_service_pb2.ReleaseRequest(lease_ids=[lease.lease_id])
        epoch = self._session.epoch
        await self._session.post(Method.RELEASE, request, lifecycle_service_pb2.ReleaseResponse, epoch=epoch)
