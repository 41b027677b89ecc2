"""Blocks seen in place, for as long as a lease holds."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from types import TracebackType
from typing import Self

from kvclient.aio.moves import Mover
from kvclient.results import Lease


class LeaseView:
    """Views of the longest committed prefix of some keys; `Namespace.lease` makes it.

    The memory is the daemon's: it may be read until the context ends and not after,
    when the views refuse access. An array made from a view keeps it from being
    released; whoever keeps such an array past the end reads other blocks' bytes.
    """

    def __init__(
        self,
        acquire: Callable[[], Awaitable[Lease | None]],
        mover: Mover,
        release: Callable[[Lease], Awaitable[None]],
        *,
        verify: bool,
    ) -> None:
        self._acquire = acquire
        self._mover = mover
        self._release = release
        self._verify = verify
        self._lease: Lease | None = None
        self.prefix_count = 0
        """Number of keys seen, from the first on; 0 without a lease."""
        self.views: list[memoryview] = []
        """One for each block of the prefix, key-major; read-only."""

    async def check(self) -> None:
        """Say whether what was read so far may be used.

        Raises:
            LeaseExpiredError: the lease's end has passed, or the daemon revoked it.
            StaleGenerationError: a slot has another owner.
        """
        if self._lease is not None:
            self._mover.check_generations(self._lease)
            await self._mover.check_deadline(self._lease)

    async def __aenter__(self) -> Self:
        lease = await self._acquire()
        if lease is None:
            return self
        self._mover.begin_view(lease)
        self._lease = lease
        self.prefix_count = lease.keys_count
        try:
            self.views = await self._mover.views(lease)
            if self._verify:
                await self._mover.verify(lease)
                await self.check()
        except BaseException:
            await self._end(lease)
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        lease = self._lease
        if lease is None:
            return
        try:
            if error is None:
                await self.check()
        finally:
            await self._end(lease)

    async def _end(self, lease: Lease) -> None:
        _release_all(self.views)
        self._lease = None
        self._mover.end_view(lease)
        await self._release(lease)


def _release_all(views: list[memoryview]) -> None:
    remaining = iter(views)
    while True:
        try:
            for view in remaining:
                view.release()
            return
        except BufferError:
            # An array over this view keeps it open; its owner was told what that means.
            continue
