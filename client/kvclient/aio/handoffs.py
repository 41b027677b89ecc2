"""Handoffs: blocks that go from the engine that computed them to the one that needs them."""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

import numpy as np
import numpy.typing as npt
from google.protobuf.message import Message

from kvclient import handoff_messages, messages
from kvclient._backends.aio import run_blocking
from kvclient.aio.namespace import Namespace
from kvclient.aio.receive import Receiver
from kvclient.aio.session import Session
from kvclient.handoff_source import block_checksums, named_blocks, named_checksums
from kvclient.holdings import Kind
from kvclient.keys import KEY_BYTES, Keys, packed_keys
from kvclient.lending import Lending
from kvclient.pool import BlockPool
from kvclient.results import Claim, HandoffNews, HandoffOffer, LentPool, ReceiveResult
from kvproto.kv.v1 import handoff_service_pb2, segment_service_pb2
from kvservice.core.errors import (
    DeadlineError,
    HandoffClaimedError,
    InvalidFieldError,
    KvError,
    MalformedError,
    PeerUnavailableError,
    StaleIncarnationError,
)
from kvservice.core.handoff_choice import HandoffPolicy
from kvservice.core.outcomes import ItemOutcome
from kvservice.core.slots import U32
from kvservice.ports.lanes import LaneReport
from kvservice.ports.methods import Method

Answer = TypeVar("Answer", bound=Message)

REQUEST_ID_BYTES = 16

_UNCERTAIN = (DeadlineError, MalformedError, PeerUnavailableError)
"""Ends of a call that say nothing of what the daemon has done."""


class Handoffs:
    """Offers blocks and receives them; `KvClient.handoffs`."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._lending = Lending(session.one_sided)
        self._receiver = Receiver(session)
        self._receiving: set[int] = set()
        self._known = handoff_messages.KnownMemory()

    # ---- the side that has the blocks

    async def lend(self, pools: Sequence[BlockPool]) -> list[LentPool]:
        """Make an engine's own memory readable by those who claim blocks in it.

        It stays the caller's, who keeps it mapped until `take_back`, or the end of the client.

        Raises:
            NoWayError: this process has no transport by which others could read its memory.
            LimitReachedError: the session lends as much as it may.
        """
        epoch = self._session.epoch
        lent = await run_blocking(functools.partial(self._lending.lend, pools))
        try:
            request = handoff_messages.register_request(pools, lent.ways)
            answer = await self._session.call(
                Method.REGISTER_SEGMENTS, request, segment_service_pb2.RegisterSegmentsResponse, epoch=epoch
            )
            found = handoff_messages.lent_pools(answer, pools, epoch)
        except BaseException:
            lent.close()
            raise
        self._lending.keep(found, lent)
        return found

    async def take_back(self, lent: Sequence[LentPool]) -> None:
        """Lend pools no more; offers out of them that nobody has claimed are aborted.

        Raises:
            SegmentInUseError: somebody may be reading them now.
        """
        ours = [pool for pool in lent if pool.epoch == self._session.epoch]
        if ours:
            segment_ids = [number for pool in ours for number in pool.segment_ids]
            request = segment_service_pb2.UnregisterSegmentsRequest(segment_ids=segment_ids)
            await self._call(
                Method.UNREGISTER_SEGMENTS, request, segment_service_pb2.UnregisterSegmentsResponse
            )
        self._lending.drop(lent)

    async def offer(
        self,
        namespace: Namespace,
        keys: Keys,
        lent: Sequence[LentPool] = (),
        blocks: npt.ArrayLike = (),
        *,
        ttl_s: float | None = None,
        policy: HandoffPolicy = HandoffPolicy.ANY,
        checksums: U32 | None = None,
        ready: Callable[[], object] | None = None,
    ) -> HandoffOffer:
        """Offer the blocks of some keys to whoever learns the number of the handoff.

        lent: the pool of each part; none where the blocks were put into the arena before.
        blocks: (keys,) or (keys, parts) integers, number of each block in its pool. They must not
            change until `is_released`.
        checksums: (keys, parts) uint32, CRC32C of each block; by default computed here where the
            memory is the host's and the settings ask for checksums.
        ready: waits until the bytes of the blocks are in memory, and is called before anything is
            offered: `synchronize` of a CUDA event that was recorded behind what computes them.

        Raises:
            NoWayError: there is neither a pool nor a committed block to offer.
            KvError: nothing is offered.
        """
        packed = packed_keys(keys)
        parts_count = len(namespace.parts)
        named = (
            named_blocks(blocks, len(packed) // KEY_BYTES, parts_count) if lent else np.empty(0, np.uint32)
        )
        if any(pool.epoch != self._session.epoch for pool in lent):
            raise StaleIncarnationError("lent is of an earlier session; lend the pools again")
        if lent and len(lent) != parts_count:
            raise InvalidFieldError(f"lent has {len(lent)} pools for {parts_count} parts; give one for each")
        if ready is not None:
            await run_blocking(ready)
        if checksums is not None:
            checksums = named_checksums(checksums, len(packed) // KEY_BYTES, parts_count)
        elif lent and self._session.settings.checksums:
            pools = self._lending.pools_of(lent)
            checksums = await run_blocking(functools.partial(block_checksums, pools, named))
        opening = await namespace.handles()
        await self._session.listen()
        request = handoff_service_pb2.OfferHandoffRequest(
            request_id=os.urandom(REQUEST_ID_BYTES),
            space_ids=opening.space_ids,
            keys=packed,
            layout_ids=[pool.layout_id for pool in lent],
            blocks=named.tobytes(),
            checksums=b"" if checksums is None else checksums.tobytes(),
            ttl=messages.duration(ttl_s),
            policy=int(policy),  # type: ignore[arg-type]
        )
        asked_s = time.monotonic()
        answer = await self._session.call(
            Method.OFFER_HANDOFF, request, handoff_service_pb2.OfferHandoffResponse, epoch=opening.epoch
        )
        offer = handoff_messages.handoff_offer(answer, asked_s)
        self._session.offered.offered(offer.handoff_id, hold_until_s=offer.hold_until_s)
        return offer

    def news(self, handoff_id: int) -> HandoffNews | None:
        """Return what is known here of a handoff that this client offered; asks nobody."""
        self._session.take_news()
        return self._session.offered.news(handoff_id)

    def is_released(self, handoff_id: int) -> bool:
        """Whether the blocks of an offer of this client may be used again; asks nobody.

        An id that it never offered, or that was released long ago, is nobody's to wait for: True.
        """
        self._session.take_news()
        return self._session.offered.is_released(handoff_id)

    async def wait_released(self, handoff_id: int, timeout_s: float) -> HandoffNews | None:
        """Wait until the blocks of an offer may be used again; None where that takes longer."""
        return await self._session.wait_news(handoff_id, timeout_s)

    # ---- the side that needs the blocks

    async def claim(self, namespace: Namespace, handoff_id: int) -> Claim:
        """Take a handoff over; it is renewed until it is completed, rejected or aborted.

        Raises:
            HandoffClaimedError, HandoffEndedError, HandoffUnknownError: it is not to be had.
            RepresentationMismatchError: the namespace is not the one that was offered.
            NoWayError: no transport leads to the blocks.
        """
        opening = await namespace.handles()
        await self._session.listen()
        one_sided = self._session.one_sided
        request = handoff_service_pb2.ClaimHandoffRequest(
            handoff_id=handoff_id, space_ids=opening.space_ids, transports=one_sided.transports()
        )
        asked_s = time.monotonic()
        try:
            answer = await self._session.call(
                Method.CLAIM_HANDOFF, request, handoff_service_pb2.ClaimHandoffResponse, epoch=opening.epoch
            )
            incarnation = self._session.attachment.daemon_incarnation
            claim = handoff_messages.claim(handoff_id, answer, asked_s, incarnation, self._known)
        except BaseException as error:
            if not isinstance(error, KvError) or isinstance(error, _UNCERTAIN):
                # It may be ours all the same, and its giver would wait for it to expire.
                await self._give_up(handoff_id)
            raise
        self._session.holdings.add(handoff_id, Kind.HANDOFF, deadline_s=claim.deadline_s)
        return claim

    async def receive(
        self,
        namespace: Namespace,
        handoff_id: int,
        into: Sequence[BlockPool],
        blocks: npt.ArrayLike,
        *,
        first_key: int = 0,
    ) -> ReceiveResult:
        """Claim a handoff, fetch its blocks, and complete it.

        into: the pool of each part. blocks: (keys,) or (keys, parts) integers, where in the pools
            the blocks go, for the keys from `first_key` on: those before it are not fetched, and
            neither are those behind the last one named.

        Raises:
            HandoffClaimedError: another, or another call of this client, has claimed it.
            KvError: the memory of `blocks` holds garbage; the handoff is given up.
        """
        if handoff_id in self._receiving:
            # The daemon gives one session its claim again and again; the first to complete would
            # give the memory back under the others.
            raise HandoffClaimedError(
                f"handoff {handoff_id} is being received by another call of this client"
            )
        self._receiving.add(handoff_id)
        try:
            return await self._receive(namespace, handoff_id, into, blocks, first_key=first_key)
        finally:
            self._receiving.discard(handoff_id)

    async def complete(self, claim: Claim) -> None:
        """End a claim whose bytes have arrived; only without an error are they good.

        Raises:
            HandoffEndedError: it had ended before; discard the bytes.
        """
        await self._complete(claim)

    async def reject(self, handoff_id: int, reason: str) -> ItemOutcome:
        """Say that this side cannot use a handoff. Idempotent."""
        self._session.holdings.discard(handoff_id)
        request = handoff_service_pb2.RejectHandoffRequest(handoff_id=handoff_id, reason=reason)
        answer = await self._call(Method.REJECT_HANDOFF, request, handoff_service_pb2.RejectHandoffResponse)
        return handoff_messages.outcome(answer.outcome)

    async def abort(self, handoff_id: int) -> ItemOutcome:
        """Give a handoff up, from either side. Idempotent."""
        self._session.holdings.discard(handoff_id)
        request = handoff_service_pb2.AbortHandoffRequest(handoff_id=handoff_id)
        answer = await self._call(Method.ABORT_HANDOFF, request, handoff_service_pb2.AbortHandoffResponse)
        return handoff_messages.outcome(answer.outcome)

    async def look(self, handoff_id: int) -> handoff_service_pb2.GetHandoffResponse:
        """Ask the daemon what became of a handoff. Raises HandoffUnknownError."""
        request = handoff_service_pb2.GetHandoffRequest(handoff_id=handoff_id)
        return await self._call(Method.GET_HANDOFF, request, handoff_service_pb2.GetHandoffResponse)

    def lanes(self) -> tuple[LaneReport, ...]:
        """Say what each lane to other engines' memory did lately; none before the first handoff."""
        return self._session.one_sided.lanes()

    def close(self) -> None:
        """Lend nothing any more. Idempotent."""
        self._lending.close()

    async def _receive(
        self,
        namespace: Namespace,
        handoff_id: int,
        into: Sequence[BlockPool],
        blocks: npt.ArrayLike,
        *,
        first_key: int,
    ) -> ReceiveResult:
        claim = await self.claim(namespace, handoff_id)
        try:
            moved = await self._receiver.fetch(namespace, claim, into, blocks, first_key=first_key)
            await self._complete(claim)
        except BaseException:
            await self._give_up(handoff_id)
            raise
        return ReceiveResult(moved.keys, claim.choice, claim.reason, moved.bytes_moved)

    async def _complete(self, claim: Claim) -> None:
        request = handoff_service_pb2.CompleteHandoffRequest(handoff_id=claim.handoff_id)
        try:
            answer = await self._call(
                Method.COMPLETE_HANDOFF, request, handoff_service_pb2.CompleteHandoffResponse
            )
            outcome = handoff_messages.outcome(answer.outcome)
        except KvError:
            self._session.holdings.discard(claim.handoff_id)
            raise
        self._receiver.check_completed(claim, outcome)

    async def _give_up(self, handoff_id: int) -> None:
        self._session.holdings.discard(handoff_id)
        abort = handoff_service_pb2.AbortHandoffRequest(handoff_id=handoff_id)
        answer_type = handoff_service_pb2.AbortHandoffResponse
        await self._session.post(Method.ABORT_HANDOFF, abort, answer_type, epoch=self._session.epoch)

    async def _call(self, method: Method, request: Message, response_type: type[Answer]) -> Answer:
        return await self._session.call(method, request, response_type)
