"""A worker's part in handoffs: it lends the memory of its KV, and receives blocks out of that of others.

It has a session of its own for that, beside the one of the store: a passage may take longer than a step may
wait, and a store that is slow must not end the lending, and with it every handoff that is under way.

What is lent ends with the session, so after a lost one (the daemon was restarted, say) the memory is lent
anew, in the background; `current` says what is lent now, and the scheduler learns it after the next step.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

from kvclient import BlockPool, KvError, LentPool, NoWayError, ReceiveResult, StaleIncarnationError
from kvclient.sync import KvClient
from kvplugins.common.link import CONNECTION_FAILURES, ServiceLink
from kvplugins.common.service import Service
from kvplugins.vllm.plan import BlockWork, RankLent

logger = logging.getLogger(__name__)

# What the service takes of a reason.
REASON_CHARACTERS_MAX = 256


@dataclass(frozen=True, slots=True)
class LendingService(Service):
    """A session that lends this worker's memory. lent: None where it lends none."""

    lent: LentPool | None = None


def lending_opener(
    open_service: Callable[[], Service], pool: BlockPool, *, lends: bool
) -> Callable[[], LendingService]:
    """Return what opens a session and lends the pool, for a `ServiceLink`.

    lends: whether there is anything to hand over from here.
    """

    def open_lending() -> LendingService:
        service = open_service()
        try:
            lent = _lent(service.client, pool) if lends else None
        except BaseException:
            service.close()
            raise
        return LendingService(service.client, service.namespace, service.by_part, lent)

    return open_lending


class WorkerHandoffs:
    """Handoffs of one rank. Used by the engine's thread and by the loader."""

    def __init__(
        self, *, link: ServiceLink[LendingService], pool: BlockPool, rank: int, is_host: bool
    ) -> None:
        self.rank = rank
        self._link = link
        self._pool = pool
        self._is_host = is_host

    @property
    def link(self) -> ServiceLink[LendingService]:
        """The connection, for its counts."""
        return self._link

    def current(self) -> RankLent | None:
        """Return what is lent now; asks nobody. Where the session was lost, sees to the next."""
        service = self._link.service
        if service is None or service.lent is None:
            return None
        attachment = service.client.attachment
        if attachment.epoch != service.lent.epoch:
            why = StaleIncarnationError("the daemon was restarted, or ended the session; lending anew")
            self._link.renew(service, why)
            return None
        return RankLent(attachment.daemon_incarnation, service.lent, self._is_host)

    def receive(self, work: BlockWork) -> ReceiveResult | None:
        """Fetch the blocks of a load where they wait; None if they did not come.

        The engine keeps the target blocks until this returns. Whatever came is good only if its keys are
        those of the load: the caller compares.
        """
        handoff = work.handoff
        if handoff is None or self.rank >= len(handoff.handoff_ids):
            return None
        handoff_id = handoff.handoff_ids[self.rank]

        def receive(service: LendingService) -> ReceiveResult | None:
            if not service.is_with(work.daemon_incarnation):
                return None
            handoffs = service.client.handoffs
            try:
                return handoffs.receive(
                    service.namespace, handoff_id, [self._pool], work.block_ids, first_key=handoff.first_key
                )
            except CONNECTION_FAILURES:
                raise
            except KvError as error:
                # What was claimed has been given up by then; what could not be claimed still waits.
                _reject(service.client, handoff_id, str(error))
                raise

        return self._link.call(receive)

    def close(self) -> None:
        """Lend and receive no more. Idempotent."""
        self._link.close()


def _lent(client: KvClient, pool: BlockPool) -> LentPool | None:
    """Lend the pool; None where nobody could read it, which leaves the way through the store."""
    try:
        return client.handoffs.lend([pool])[0]
    except NoWayError as error:
        logger.warning(
            "this worker's KV cannot be read by other engines (%s); it goes through the store", error
        )
        return None


def _reject(client: KvClient, handoff_id: int, reason: str) -> None:
    """Say that nobody comes, so that the other engine has its blocks back before they time out."""
    try:
        client.handoffs.reject(handoff_id, reason[:REASON_CHARACTERS_MAX])
    except KvError as error:
        logger.debug("handoff %d could not be rejected: %s", handoff_id, error)
