"""Moves the bytes of blocks: under a capability, or through the directory."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from kvclient import outcomes
from kvclient._backends.aio import DIRECT_COPY_LIMIT_BYTES, run_blocking, run_copy
from kvclient.aio.session import Session
from kvclient.buffers import BlockBuffers
from kvclient.directory import Directory, DirectoryRead
from kvclient.holdings import Kind
from kvclient.keys import KEY_BYTES, taken
from kvclient.local_memory import LocalMemory
from kvclient.plane import Plane
from kvclient.results import GetResult, Lease, Reservation
from kvproto.kv.v1 import lifecycle_service_pb2
from kvservice.core.checksums import differing
from kvservice.core.errors import (
    BlockSizeError,
    ChecksumMismatchError,
    LeaseExpiredError,
    StaleIncarnationError,
)
from kvservice.core.limits import VERIFIED_BYTES_LIMIT, VERIFIED_KEYS_LIMIT
from kvservice.core.outcomes import ItemOutcome
from kvservice.core.row_layout import ReadOutcome
from kvservice.core.slots import U8, U32, U64, Slots
from kvservice.ports.methods import Method
from kvservice.ports.transport import Transfer, Transport

_HIT, _MISS = int(ReadOutcome.HIT), int(ReadOutcome.MISS)

DROPPED = "the daemon drops them: put them again"

KEYS_NAMED_LIMIT = 8
"""Keys that an error spells out; the rest are counted."""


@dataclass(slots=True)
class LocalBatch:
    """What a local read is asked for: packed keys, their spaces, and memory for them, key-major.

    Not frozen, since that would double the cost of making one, once for each read.
    """

    keys: bytes
    spaces: tuple[int, ...]
    into: BlockBuffers


class Mover:
    """Moves blocks between the caller's memory and slots, for one list of parts.

    block_bytes: bytes of one block of each part.
    """

    def __init__(self, session: Session, block_bytes: tuple[int, ...]) -> None:
        self._session = session
        self.block_bytes = block_bytes
        self._key_bytes = sum(block_bytes)

    # ---- under a capability

    async def write(self, reservation: Reservation, buffers: BlockBuffers) -> U32:
        """Copy the blocks of the granted keys; return (slots,) uint32 checksums to commit with.

        Empty where the settings leave checksums out: the blocks are stored without.

        buffers: the blocks of all keys of the reservation's request.
        """
        if not reservation.reservation_id:
            return np.empty(0, np.uint32)  # Every key was there: there is nothing to write.
        plane = self._plane_of(reservation)
        parts_count = len(self.block_bytes)
        if len(reservation.granted) < len(reservation.outcomes):
            # Key-major: the blocks of key i are i * parts and the ones behind it.
            chosen = reservation.granted[:, None] * parts_count + np.arange(parts_count)
            buffers = buffers.take(chosen.reshape(-1))
        transport = plane.transport
        is_summed = self._session.settings.checksums
        checksums = np.zeros(buffers.blocks_count if is_summed else 0, np.uint32)
        transfer = self._transfer(
            reservation.reservation_id, reservation.slots, buffers, checksums if is_summed else None
        )
        await self._map(plane, reservation.slots)
        holdings = self._session.holdings
        holdings.begin_copy(reservation.reservation_id, Kind.RESERVATION)
        try:
            await _run(transport, functools.partial(transport.write, transfer), buffers.size_bytes)
        finally:
            holdings.end_copy(reservation.reservation_id)
        # A deadline that passed meanwhile is no error yet: the daemon decides at the commit.
        return checksums

    async def read(self, lease: Lease, buffers: BlockBuffers, *, verify: bool, first_slot: int = 0) -> None:
        """Copy blocks of a lease into `buffers`, from `first_slot` on: all of it, by default.

        Raises:
            LeaseExpiredError, StaleGenerationError: discard what was read.
        """
        plane = self._plane_of(lease)
        transport = plane.transport
        checksums = np.zeros(buffers.blocks_count, np.uint32) if verify else None
        chosen = slice(first_slot, first_slot + buffers.blocks_count)
        slots = lease.slots if buffers.blocks_count == len(lease.slots) else lease.slots.take(chosen)
        transfer = self._transfer(lease.lease_id, slots, buffers, checksums, first_slot=first_slot)
        await self._map(plane, slots)
        holdings = self._session.holdings
        holdings.begin_copy(lease.lease_id, Kind.LEASE)
        try:
            await _run(transport, functools.partial(transport.read, transfer), buffers.size_bytes)
        finally:
            holdings.end_copy(lease.lease_id)
        await self.check_deadline(lease)

    async def read_located(self, plane: Plane, slots: Slots, buffers: BlockBuffers) -> None:
        """Copy slots that nothing holds into `buffers`, on this host.

        Raises:
            StaleGenerationError: a slot had another owner; the memory holds garbage.
        """
        sums = np.zeros(buffers.blocks_count, np.uint32) if self._session.settings.verify else None
        await self._map(plane, slots)
        copy = functools.partial(plane.transport.read, self._transfer(0, slots, buffers, sums))
        await run_copy(copy, buffers.size_bytes)

    async def views(self, lease: Lease) -> list[memoryview]:
        """Return a read-only view of each block of a lease, key-major.

        In place where the transport can; else private copies. The caller has begun a
        copy under the lease and ends it when the views are used no more.
        """
        lengths = self._lengths(lease.keys_count)
        plane = self._plane_of(lease)
        memory = plane.memory
        if memory is not None and plane.transport.capabilities.has_views:
            await self._map(plane, lease.slots)
            return memory.views(lease.slots, lengths)
        private = memoryview(bytearray(lease.keys_count * self._key_bytes))
        await self.read(lease, BlockBuffers.contiguous(private, self.block_bytes), verify=True)
        stops = np.cumsum(lengths).tolist()
        starts = [0, *stops[:-1]]
        shown = private.toreadonly()
        return [shown[start:stop] for start, stop in zip(starts, stops, strict=True)]

    async def check_deadline(self, lease: Lease) -> None:
        """Hold a lease to its own end.

        Raises:
            LeaseExpiredError: it has passed; nothing read under it may be used.
        """
        holdings = self._session.holdings
        if holdings.has_ended(lease.lease_id):
            raise LeaseExpiredError(
                f"lease {lease.lease_id} was released, or revoked by the daemon; acquire again"
            )
        if time.monotonic() <= holdings.deadline_s(lease.lease_id, lease.deadline_s):
            return
        if not holdings.holds(lease.lease_id) and await self._is_alive(lease):
            return
        raise LeaseExpiredError(
            f"lease {lease.lease_id} passed its deadline before the bytes could be handed on; acquire again"
        )

    def check_generations(self, lease: Lease) -> None:
        """Raise StaleGenerationError where a slot of a lease on this host has another owner by now."""
        memory = self._plane_of(lease).memory
        if memory is not None:
            memory.check_generations(lease.slots)

    async def verify(self, lease: Lease) -> None:
        """Raise ChecksumMismatchError where leased bytes on this host are not those committed.

        Private copies were held to their checksums when they were read.
        """
        memory = self._plane_of(lease).memory
        if memory is None or lease.slots.checksums is None:
            return
        lengths = self._lengths(lease.keys_count)
        sums = await run_copy(
            functools.partial(memory.checksums, lease.slots, lengths), lease.keys_count * self._key_bytes
        )
        wrong = differing(sums, lease.slots.checksums).tolist()
        if wrong:
            raise ChecksumMismatchError(
                f"{len(wrong)} of {len(sums)} blocks under lease {lease.lease_id} do not have their "
                f"committed checksum, the first is block {wrong[0]}; call `verify` with the keys to drop them"
            )

    def begin_view(self, lease: Lease) -> None:
        """Note that this process looks at leased memory. Raises LeaseExpiredError if it was revoked."""
        self._session.holdings.begin_copy(lease.lease_id, Kind.LEASE)

    def end_view(self, lease: Lease) -> None:
        """Note that it looks no more."""
        self._session.holdings.end_copy(lease.lease_id)

    # ---- through the directory

    async def directory(self, plane: Plane) -> Directory | None:
        """Return the directory on this host, mapped anew where it has moved; None where there is none."""
        memory = plane.memory
        if memory is None or not memory.can_read_directory():
            return None
        directory = memory.directory
        if directory is not None and directory.is_superseded:
            await self._session.map_segments(memory, [], directory=True)
            directory = memory.directory
        return directory

    async def get_local(self, memory: LocalMemory, directory: Directory, batch: LocalBatch) -> GetResult:
        """Read each key by itself; see `Namespace.get`."""
        read = await self._read_directory(memory, directory, batch)
        count = len(batch.keys) // KEY_BYTES
        if read.hits_count == count:
            return outcomes.all_hit(count, count * self._key_bytes)
        outcomes_read = read.outcomes
        # A miss is the common case, and needs no closer look.
        if int(outcomes_read.max()) != _MISS:
            if (outcomes_read == ReadOutcome.UNMAPPED).any():
                outcomes_read = await self._read_unmapped(memory, directory, batch, outcomes_read)
            damaged = np.flatnonzero(outcomes_read == ReadOutcome.CORRUPT).tolist()
            await self.report_damage(batch.spaces, taken(batch.keys, damaged))
            _check_sound(batch.keys, outcomes_read)
        found = (outcomes_read == _HIT).view(np.uint8)
        hits_count = int(np.count_nonzero(found))
        return GetResult(
            outcomes.from_found(found), outcomes.prefix_count(found), hits_count * self._key_bytes
        )

    async def _read_directory(
        self, memory: LocalMemory, directory: Directory, batch: LocalBatch
    ) -> DirectoryRead:
        verify = self._session.settings.verify
        size_bytes = batch.into.size_bytes
        if size_bytes <= DIRECT_COPY_LIMIT_BYTES:
            read = directory.read(batch.keys, batch.spaces, batch.into, verify=verify)
        else:
            copy = functools.partial(directory.read, batch.keys, batch.spaces, batch.into, verify=verify)
            read = await run_copy(copy, size_bytes)
        for touched in read.touched:
            memory.touched(touched)
        return read

    async def _read_unmapped(
        self, memory: LocalMemory, directory: Directory, batch: LocalBatch, outcomes_read: U8
    ) -> U8:
        """Map the segments of those keys that need it, and read these keys once more."""
        indexes = np.flatnonzero(outcomes_read == ReadOutcome.UNMAPPED)
        keys = b"".join(taken(batch.keys, indexes.tolist()))
        await self._map_numbers(memory, directory.segments_of(keys, batch.spaces))
        parts_count = len(self.block_bytes)
        chosen = (indexes[:, None] * parts_count + np.arange(parts_count)).reshape(-1)
        again = LocalBatch(keys, batch.spaces, batch.into.take(chosen))
        read = await self._read_directory(memory, directory, again)
        merged = outcomes_read.copy()
        merged[indexes] = read.outcomes
        return merged

    async def report_damage(self, spaces: Sequence[int], keys: Sequence[bytes]) -> None:
        """Let the daemon look at blocks that were read with wrong checksums, and drop what it must.

        Else they would be promised, and refused, for as long as they are asked for.
        """
        step = max(1, min(VERIFIED_KEYS_LIMIT, VERIFIED_BYTES_LIMIT // self._key_bytes))
        for start in range(0, len(keys), step):
            some = b"".join(keys[start : start + step])
            request = lifecycle_service_pb2.VerifyRequest(space_ids=spaces, keys=some)
            answer_type = lifecycle_service_pb2.VerifyResponse
            await self._session.post(Method.VERIFY, request, answer_type, epoch=self._session.epoch)

    # ---- private

    async def _map(self, plane: Plane, slots: Slots) -> None:
        memory = plane.memory
        if memory is not None and (missing := memory.missing(slots)):
            await self._map_numbers(memory, missing)

    async def _map_numbers(self, memory: LocalMemory, numbers: list[int]) -> None:
        # Twice, since a mapping under way may be joined that is of other segments.
        for _ in range(2):
            missing = memory.missing_numbers(numbers)
            if not missing:
                return
            await self._session.map_segments(memory, missing, directory=False)

    async def _is_alive(self, lease: Lease) -> bool:
        """Ask the daemon for a lease that another process of the engine holds and renews."""
        request = lifecycle_service_pb2.RenewRequest(lease_ids=[lease.lease_id])
        answer = await self._session.call(Method.RENEW, request, lifecycle_service_pb2.RenewResponse)
        return answer.lease_outcomes[0] == ItemOutcome.DONE

    def _transfer(
        self,
        capability_id: int,
        slots: Slots,
        buffers: BlockBuffers,
        checksums: U32 | None,
        *,
        first_slot: int = 0,
    ) -> Transfer:
        return Transfer(
            capability_id=capability_id,
            slots=slots,
            slot_indexes=np.arange(first_slot, first_slot + len(slots)),
            lengths=buffers.lengths,
            pieces=buffers.pieces,
            checksums=checksums,
            timeout_s=self._session.settings.transfer_timeout_s,
        )

    def _lengths(self, keys_count: int) -> U64:
        if len(self.block_bytes) == 1:
            return np.full(keys_count, self.block_bytes[0], np.uint64)
        return np.tile(np.array(self.block_bytes, np.uint64), keys_count)

    def _plane_of(self, held: Reservation | Lease) -> Plane:
        """Return the plane that a capability belongs to. Raises StaleIncarnationError if that is gone."""
        self._session.check_process()
        plane = self._session.plane
        if held.daemon_incarnation != plane.daemon_incarnation:
            raise StaleIncarnationError(
                f"{type(held).__name__} is of daemon {held.daemon_incarnation.hex()}, now it is "
                f"{plane.daemon_incarnation.hex()}; reserve or acquire again"
            )
        return plane


async def _run(transport: Transport, copy: Callable[[], None], size_bytes: int) -> None:
    """Run a copy by a transport. A wire waits for its peer, however little there is to move."""
    if transport.capabilities.is_checked_by_owner:
        await run_blocking(copy)
    else:
        await run_copy(copy, size_bytes)


def _check_sound(keys: bytes, outcomes_read: U8) -> None:
    for outcome, error, what in (
        (ReadOutcome.CORRUPT, ChecksumMismatchError, f"do not have their committed checksum; {DROPPED}"),
        (ReadOutcome.LENGTH, BlockSizeError, "are stored with another length; open the shape that they have"),
    ):
        wrong = np.flatnonzero(outcomes_read == outcome).tolist()
        if wrong:
            named_keys = zip(wrong, taken(keys, wrong[:KEYS_NAMED_LIMIT]), strict=False)
            named = [f"keys[{index}] {key.hex()}" for index, key in named_keys]
            raise error(f"{len(wrong)} blocks {what}: {', '.join(named)}")
