"""Fetches the blocks of a claimed handoff into pools of this process."""

from __future__ import annotations

import functools
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy.typing as npt

from kvclient._backends.aio import run_blocking
from kvclient.aio.namespace import Namespace
from kvclient.aio.session import Session
from kvclient.handoff_source import (
    Planners,
    check_checksums,
    check_targets,
    named_blocks,
    plan_parts,
    pool_buffers,
)
from kvclient.holdings import Kind
from kvclient.keys import KEY_BYTES
from kvclient.pool import BlockPool
from kvclient.results import Claim, DirectSource
from kvservice.core.errors import (
    BlockSizeError,
    DeadlineError,
    HandoffEndedError,
    InvalidFieldError,
    MalformedError,
)
from kvservice.core.outcomes import ItemOutcome
from kvservice.core.slots import U32


@dataclass(frozen=True, slots=True)
class Moved:
    """What was fetched: packed keys, and their bytes."""

    keys: bytes
    bytes_moved: int


class Receiver:
    """Fetches under claims of one session."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._planners = Planners()

    async def fetch(
        self,
        namespace: Namespace,
        claim: Claim,
        into: Sequence[BlockPool],
        blocks: npt.ArrayLike,
        *,
        first_key: int,
    ) -> Moved:
        """Copy the blocks of some keys of a claim; see `Handoffs.receive`.

        When this returns the claim may have ended meanwhile: the bytes are good only if
        its completion says so.
        """
        _check_pools(namespace, into)
        keys_count = len(claim.keys) // KEY_BYTES
        named = named_blocks(blocks, None, len(into))
        count = len(named)
        if not 0 <= first_key <= first_key + count <= keys_count:
            raise InvalidFieldError(
                f"blocks names {count} keys from key {first_key} on; the handoff has {keys_count}"
            )
        keys = claim.keys[first_key * KEY_BYTES : (first_key + count) * KEY_BYTES]
        check_targets(into, named)
        if not count:
            return Moved(b"", 0)
        holdings = self._session.holdings
        holdings.begin_copy(claim.handoff_id, Kind.HANDOFF)
        try:
            if claim.source is not None:
                read = functools.partial(self._read_direct, claim, claim.source, into, named, first_key)
                moved = await run_blocking(read)
            else:
                moved = await self._read_staged(namespace, claim, into, named, first_key)
        finally:
            holdings.end_copy(claim.handoff_id)
        return Moved(keys, moved)

    def check_completed(self, claim: Claim, outcome: ItemOutcome) -> None:
        """Raise HandoffEndedError unless a claim was alive until its completion."""
        self._session.holdings.discard(claim.handoff_id)
        if outcome is not ItemOutcome.DONE and outcome is not ItemOutcome.ALREADY_COMPLETED:
            raise HandoffEndedError(
                f"handoff {claim.handoff_id} had ended before its blocks had arrived ({outcome.name}); "
                "discard them, and look the blocks up or compute them"
            )

    def _read_direct(
        self,
        claim: Claim,
        source: DirectSource,
        into: Sequence[BlockPool],
        named: U32,
        first_key: int,
    ) -> int:
        """Read out of the memory of the engine that offered; blocking."""
        wanted = source.blocks[first_key : first_key + len(named)]
        one_sided = self._session.one_sided.endpoint()
        end_s = time.monotonic() + self._session.settings.transfer_timeout_s
        left_s = functools.partial(self._left_s, claim, end_s)
        for read in plan_parts(self._planners, source, into, wanted, named, left_s=left_s):
            one_sided.read(read)
        if source.checksums is not None and self._session.settings.verify:
            check_checksums(into, named, source.checksums[first_key : first_key + len(named)])
        return sum(pool.block_bytes for pool in into) * len(named)

    def _left_s(self, claim: Claim, end_s: float) -> float:
        """Return for how long operations may be posted under a claim, whose renewals move its deadline.

        Raises:
            HandoffEndedError: not any more: it ended, or was not renewed.
            DeadlineError: the transfer took too long.
        """
        holdings, now_s = self._session.holdings, time.monotonic()
        deadline_s = holdings.deadline_s(claim.handoff_id, claim.deadline_s)
        if holdings.has_ended(claim.handoff_id) or deadline_s <= now_s:
            raise HandoffEndedError(
                f"handoff {claim.handoff_id} ended, or passed its deadline, before its blocks were read; "
                "look them up, or compute them"
            )
        if end_s <= now_s:
            raise DeadlineError(
                f"the blocks of handoff {claim.handoff_id} were not read within "
                f"{self._session.settings.transfer_timeout_s} s (transfer_timeout_s)"
            )
        return min(end_s, deadline_s) - now_s

    async def _read_staged(
        self, namespace: Namespace, claim: Claim, into: Sequence[BlockPool], named: U32, first_key: int
    ) -> int:
        """Read out of the arena, under the lease that the claim brought."""
        lease = claim.lease
        if lease is None:
            raise MalformedError(f"the claim of handoff {claim.handoff_id} names no way to its blocks")
        buffers = pool_buffers(into, named)
        keys = claim.keys[first_key * KEY_BYTES :][: len(named) * KEY_BYTES]
        return await namespace.read_some(lease, keys, buffers, first_key=first_key)


def _check_pools(namespace: Namespace, into: Sequence[BlockPool]) -> None:
    if len(into) != len(namespace.parts):
        raise InvalidFieldError(f"into has {len(into)} pools for {len(namespace.parts)} parts; give one each")
    for pool, size_bytes in zip(into, namespace.block_bytes, strict=True):
        if pool.block_bytes != size_bytes:
            raise BlockSizeError(f"a block of the pool has {pool.block_bytes} bytes, its part {size_bytes}")
