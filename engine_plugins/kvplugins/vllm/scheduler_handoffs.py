"""The scheduler's part in handoffs: what was prefilled here is offered, what was prefilled elsewhere is
taken.

**The rule**: blocks that were offered belong to whoever claims them until the service says that nobody reads
them any more, or their hold is over. So vLLM is told to keep them, and a request's blocks are given back
exactly once, whatever becomes of the offer, the decoding engine, or the daemon.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from kvclient import HandoffPolicy, HandoffUnknownError, ItemOutcome, StaleIncarnationError
from kvclient.sync import Namespace
from kvplugins.common.link import ServiceLink
from kvplugins.common.service import Service
from kvplugins.vllm.plan import RankLent
from kvplugins.vllm.ticket import Ticket

# An offer whose session was lost is asked about so often: it costs the scheduler a call.
LOOK_INTERVAL_S = 1.0


class Offer(Protocol):
    """Blocks on offer, or claimed."""

    @property
    def ticket(self) -> Ticket | None:
        """What a claimer needs; None where nobody is to claim: some rank's blocks could not be offered."""

    def is_released(self) -> bool:
        """Whether the blocks may be used again. Waits for nobody, or for a call's deadline."""


class Handoffs(Protocol):
    """What the scheduler asks of the service. No call raises or waits longer than its deadline."""

    @property
    def can_offer(self) -> bool:
        """Whether there is memory to offer out of."""

    def offer(self, keys: Sequence[bytes], block_ids: Sequence[int]) -> Offer | None:
        """Offer blocks of all ranks; None if nothing was offered."""

    def is_ours(self, ticket: Ticket) -> bool:
        """Whether the handoffs of a ticket can be claimed from here, as far as it says."""

    def reject(self, ticket: Ticket, reason: str) -> None:
        """Say that nobody will claim them. Idempotent."""


class NoHandoffs:
    """Handoffs of an engine that neither gives nor takes any."""

    can_offer = False

    def offer(self, keys: Sequence[bytes], block_ids: Sequence[int]) -> Offer | None:
        """Offer nothing."""
        return None

    def is_ours(self, ticket: Ticket) -> bool:
        """Take none."""
        return False

    def reject(self, ticket: Ticket, reason: str) -> None:
        """Do nothing: none was taken."""


class LinkedHandoffs:
    """Offers and rejects through a link.

    part_of_ranks: for each rank the number of its part, in the order in which the link opens them.
    wants_direct: allow no way but out of the engine's memory.
    wait_s: how long an offer waits for its claim.
    """

    def __init__(
        self,
        link: ServiceLink[Service],
        *,
        part_of_ranks: Sequence[int],
        wants_direct: bool,
        wait_s: float,
        clock: Callable[[], float],
    ) -> None:
        self._link = link
        self._part_of_ranks = tuple(part_of_ranks)
        self._wants_direct = wants_direct
        self._wait_s = wait_s
        self._clock = clock
        self._lent: dict[int, RankLent] = {}
        self._named_in: tuple[Namespace, bytes] | None = None

    @property
    def can_offer(self) -> bool:
        """Whether the memory of every rank is lent, and the service there."""
        service = self._link.service
        if service is None:
            return False
        incarnation = service.client.attachment.daemon_incarnation
        return len(self._lent_in(incarnation)) == len(self._part_of_ranks)

    @property
    def known_layouts(self) -> dict[int, int]:
        """Rank -> the layout that would be offered out of."""
        return {rank: lent.pool.layout_id for rank, lent in self._lent.items()}

    def learn(self, lent: Mapping[int, RankLent]) -> None:
        """Take the ranks' word for what they lend."""
        self._lent.update(lent)

    def offer(self, keys: Sequence[bytes], block_ids: Sequence[int]) -> Offer | None:
        """Offer the blocks of every rank, each in a handoff of its own: a rank claims what is its part."""
        packed = b"".join(keys)
        made: list[LinkedOffer] = []

        def offer(service: Service) -> Ticket | None:
            attachment = service.client.attachment
            lent = self._lent_in(attachment.daemon_incarnation)
            if len(lent) < len(self._part_of_ranks):
                return None
            begun = LinkedOffer(self._link, service, clock=self._clock)
            is_direct = self._wants_direct or not all(each.is_host for each in lent)
            policy = HandoffPolicy.DIRECT if is_direct else HandoffPolicy.ANY
            for part, each in zip(self._part_of_ranks, lent, strict=True):
                # The worker's session lends, ours offers: the daemon holds both to be of one engine.
                pool = dataclasses.replace(each.pool, epoch=attachment.epoch)
                offered = service.client.handoffs.offer(
                    service.by_part[part], packed, [pool], block_ids, ttl_s=self._wait_s, policy=policy
                )
                begun.handoff_ids.append(offered.handoff_id)
                made[:] = [begun]
            return Ticket(
                handoff_ids=tuple(begun.handoff_ids),
                blocks_count=len(keys),
                daemon_incarnation=attachment.daemon_incarnation,
                namespace_id=self._namespace_id(service),
            )

        ticket = self._link.call(offer)
        if not made:
            return None
        (begun,) = made
        begun.ticket = ticket
        if ticket is None:
            # Nobody will have these numbers, but the blocks are offered: they are released like all others.
            for number in begun.handoff_ids:
                self._link.call(functools.partial(_abort, handoff_id=number))
        return begun

    def is_ours(self, ticket: Ticket) -> bool:
        """Whether a ticket is of our daemon, of our KV, and of an engine with as many ranks."""

        def is_ours(service: Service) -> bool:
            return (
                service.is_with(ticket.daemon_incarnation)
                and self._namespace_id(service) == ticket.namespace_id
            )

        return len(ticket.handoff_ids) == len(self._part_of_ranks) and bool(self._link.call(is_ours))

    def reject(self, ticket: Ticket, reason: str) -> None:
        """Reject the handoffs of all ranks; those that somebody has claimed meanwhile stay his."""
        for handoff_id in ticket.handoff_ids:
            self._link.call(functools.partial(_reject, handoff_id=handoff_id, reason=reason))

    def _namespace_id(self, service: Service) -> bytes:
        """Return the name of our KV in the present life of the daemon; each life has names of its own."""
        namespace = service.by_part[0]
        incarnation = service.client.attachment.daemon_incarnation
        if self._named_in != (namespace, incarnation):
            namespace.open()
            self._named_in = (namespace, incarnation)
        return namespace.namespace_id

    def _lent_in(self, daemon_incarnation: bytes) -> list[RankLent]:
        """Return what the ranks lend in one life of the daemon, in their order."""
        ranks = range(len(self._part_of_ranks))
        found = [self._lent[rank] for rank in ranks if rank in self._lent]
        return [lent for lent in found if lent.daemon_incarnation == daemon_incarnation]


class LinkedOffer:
    """Blocks offered by one session, a handoff for each rank.

    That session is told of their release. Where it is lost, its client knows when their hold is over, which
    is the last resort: before that, a later session may ask the daemon.
    """

    def __init__(self, link: ServiceLink[Service], service: Service, *, clock: Callable[[], float]) -> None:
        self.ticket: Ticket | None = None
        self.handoff_ids: list[int] = []
        self._link = link
        self._service = service
        self._epoch = service.client.attachment.epoch
        self._clock = clock
        self._next_look_s = 0.0

    def is_released(self) -> bool:
        """Whether no rank's blocks can be being read."""
        made_by = self._service.client.handoffs
        if all(made_by.is_released(number) for number in self.handoff_ids):
            return True
        service = self._link.service
        if service is None or self._clock() < self._next_look_s or self._is_of(service):
            return False
        self._next_look_s = self._clock() + LOOK_INTERVAL_S
        return all(
            self._link.call(functools.partial(_look, handoff_id=number)) for number in self.handoff_ids
        )

    def _is_of(self, service: Service) -> bool:
        return service is self._service and service.client.attachment.epoch == self._epoch


def _abort(service: Service, handoff_id: int) -> ItemOutcome:
    return service.client.handoffs.abort(handoff_id)


def _reject(service: Service, handoff_id: int, reason: str) -> ItemOutcome:
    return service.client.handoffs.reject(handoff_id, reason)


def _look(service: Service, handoff_id: int) -> bool:
    """Ask the daemon; one that knows nothing of a handoff is no witness that nobody reads."""
    try:
        return service.client.handoffs.look(handoff_id).is_released
    except (HandoffUnknownError, StaleIncarnationError):
        return False
