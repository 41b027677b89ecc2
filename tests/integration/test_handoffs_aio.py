"""Handoffs over a real daemon by the asynchronous client: news without beats, and many at once."""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
import time
from dataclasses import dataclass

import numpy as np
import pytest

from kvclient import (
    BlockPool,
    ClientSettings,
    HandoffChoice,
    HandoffClaimedError,
    HandoffEndedError,
    HandoffPolicy,
    HandoffState,
    ItemOutcome,
)
from kvclient.aio import KvClient, Namespace
from kvservice.transports.inproc_memory import InprocMemoryHub
from tests.integration.daemon_process import WAIT_LIMIT_S, content, identity, keys, parts

BLOCK_BYTES = 4096
BLOCKS = 64
WAYS = ["lane", "grpc"]
AT_ONCE_S = 2.0
"""News that came with a beat would take three seconds, which is the daemon's interval."""


@dataclass
class Engine:
    """A client of one engine, with a pool of blocks of its own memory."""

    client: KvClient
    namespace: Namespace
    memory: np.ndarray
    pool: BlockPool

    async def offer(self, lent, numbers, blocks, **options) -> int:
        """Fill blocks with the contents of some keys, and offer them."""
        self.memory[list(blocks)] = content(numbers, self.memory.shape[1])
        offer = await self.client.handoffs.offer(self.namespace, keys(numbers), lent, list(blocks), **options)
        return offer.handoff_id

    async def take(self, handoff_id, blocks, **options):
        """Receive a handoff into blocks of the pool."""
        receive = self.client.handoffs.receive
        return await receive(self.namespace, handoff_id, [self.pool], list(blocks), **options)


class World:
    """Engines of one test over one edge, which can read each other's memory."""

    def __init__(self, endpoint: str, salt: bytes, stack: contextlib.AsyncExitStack) -> None:
        self._endpoint, self._salt, self._stack = endpoint, salt, stack
        self._hub = InprocMemoryHub()

    async def engine(self, *, block_bytes: int = BLOCK_BYTES, blocks: int = BLOCKS) -> Engine:
        """Connect another engine."""
        settings = ClientSettings(
            self._endpoint, engine_incarnation=os.urandom(16), call_timeout_s=WAIT_LIMIT_S
        )
        client = await KvClient.connect(settings, endpoint=self._hub.endpoint())
        await self._stack.enter_async_context(client)
        namespace = await client.open_namespace(identity(), parts(block_bytes), salt=self._salt)
        memory = np.zeros((blocks, block_bytes), np.uint8)
        return Engine(client, namespace, memory, BlockPool.of([memory]))


@pytest.fixture(params=WAYS)
def play(request, shared_daemon, salt):
    """Return a way to run a scenario, which is given a world; nothing of it is left afterwards."""

    def run(scenario) -> None:
        async def whole() -> None:
            before = asyncio.all_tasks()
            async with contextlib.AsyncExitStack() as stack:
                await scenario(World(getattr(shared_daemon, request.param), salt, stack))
            left = asyncio.all_tasks() - before
            if left:  # gRPC hears of the end of its calls in tasks of its own.
                _, left = await asyncio.wait(left, timeout=AT_ONCE_S)
            assert not left

        asyncio.run(asyncio.wait_for(whole(), 2 * WAIT_LIMIT_S))

    return run


async def told(engine: Engine, handoff_id: int):
    """Wait for a release, and hold its news to coming at once."""
    begun_s = time.monotonic()
    news = await engine.client.handoffs.wait_released(handoff_id, WAIT_LIMIT_S)
    assert time.monotonic() - begun_s < AT_ONCE_S
    return news


def test_blocks_go_from_memory_to_memory(play):
    """What is received is what was offered, and the giver hears of each step at once."""

    async def scenario(world: World) -> None:
        prefill, decode = await world.engine(), await world.engine()
        lent = await prefill.client.handoffs.lend([prefill.pool])
        handoff_id = await prefill.offer(lent, range(6), [9, 3, 4, 5, 30, 0])
        waiting = asyncio.ensure_future(told(prefill, handoff_id))
        received = await decode.take(handoff_id, [1, 7, 6, 5], first_key=2)
        assert (received.keys, received.choice) == (b"".join(keys(range(2, 6))), HandoffChoice.DIRECT)
        assert (decode.memory[[1, 7, 6, 5]] == content(range(2, 6), BLOCK_BYTES)).all()
        news = await waiting
        assert (news.state, news.is_released) == (HandoffState.COMPLETED, True)

    play(scenario)


def test_each_end_reaches_its_giver_at_once(play):
    """Rejected, aborted by either side, given up by a reader that goes: nothing waits for a beat."""

    async def scenario(world: World) -> None:
        prefill, decode = await world.engine(), await world.engine()
        lent = await prefill.client.handoffs.lend([prefill.pool])
        rejected = await prefill.offer(lent, [1], [0])
        await decode.client.handoffs.reject(rejected, "another dtype")
        news = await told(prefill, rejected)
        assert (news.state, news.reason) == (HandoffState.REJECTED, "another dtype")
        aborted = await prefill.offer(lent, [2], [1])
        claim = await decode.client.handoffs.claim(decode.namespace, aborted)
        assert await prefill.client.handoffs.abort(aborted) is ItemOutcome.DONE
        # The reader is told as well, and what it answers by itself releases the memory.
        assert (await told(prefill, aborted)).state is HandoffState.ABORTED
        with pytest.raises(HandoffEndedError, match="ALREADY_ABORTED"):
            await decode.client.handoffs.complete(claim)
        left = await prefill.offer(lent, [3], [2])
        await decode.client.handoffs.claim(decode.namespace, left)
        await decode.client.close()
        assert (await told(prefill, left)).state is HandoffState.ABORTED

    play(scenario)


def test_staged_blocks_release_the_memory_with_their_claim(play):
    """Out of the arena nobody reads the engine's own; the end is told all the same."""

    async def scenario(world: World) -> None:
        prefill, decode = await world.engine(), await world.engine()
        lent = await prefill.client.handoffs.lend([prefill.pool])
        await prefill.namespace.put(keys(range(4)), content(range(4), BLOCK_BYTES))
        handoff_id = await prefill.offer(lent, range(4), range(4), policy=HandoffPolicy.STAGED)
        claim = await decode.client.handoffs.claim(decode.namespace, handoff_id)
        assert (await told(prefill, handoff_id)).state is HandoffState.CLAIMED
        assert claim.lease is not None
        into = np.zeros((4, BLOCK_BYTES), np.uint8)
        await decode.namespace.read(claim.lease, into)
        assert (into == content(range(4), BLOCK_BYTES)).all()
        await decode.client.handoffs.complete(claim)
        end_s = time.monotonic() + AT_ONCE_S
        while prefill.client.handoffs.news(handoff_id).state is not HandoffState.COMPLETED:
            assert time.monotonic() < end_s
            await asyncio.sleep(0)

    play(scenario)


def test_many_handoffs_are_received_at_once(play):
    """Each claimed once, whoever of two engines is faster, each with its own bytes."""

    async def scenario(world: World) -> None:
        prefill, *decodes = [await world.engine() for _ in range(3)]
        lent = await prefill.client.handoffs.lend([prefill.pool])
        ids = [await prefill.offer(lent, [2 * n, 2 * n + 1], [2 * n, 2 * n + 1]) for n in range(BLOCKS // 2)]
        waits = [asyncio.ensure_future(told(prefill, handoff_id)) for handoff_id in ids]

        async def take(decode: Engine, index: int) -> bool:
            try:
                await decode.take(ids[index], [BLOCKS - 1 - 2 * index, BLOCKS - 2 - 2 * index])
            except (HandoffClaimedError, HandoffEndedError):
                return False
            return True

        tries = [(decode, index) for index in range(len(ids)) for decode in decodes]
        outcomes = await asyncio.gather(*(take(decode, index) for decode, index in tries))
        for index in range(len(ids)):
            winners = [
                decode for (decode, of), won in zip(tries, outcomes, strict=True) if of == index and won
            ]
            assert len(winners) == 1, index
            got = winners[0].memory[[BLOCKS - 1 - 2 * index, BLOCKS - 2 - 2 * index]]
            assert (got == content([2 * index, 2 * index + 1], BLOCK_BYTES)).all()
        for news in await asyncio.gather(*waits):
            assert news.state is HandoffState.COMPLETED

    play(scenario)


def test_a_batch_of_the_largest_size_goes_in_one_handoff(play):
    """As many keys as one call may name, scattered on both sides."""
    count, size = 16_384, 512

    async def scenario(world: World) -> None:
        prefill, decode = [await world.engine(block_bytes=size, blocks=count) for _ in range(2)]
        order = np.random.default_rng(11).permutation(count)
        lent = await prefill.client.handoffs.lend([prefill.pool])
        handoff_id = await prefill.offer(lent, range(count), order)
        received = await decode.take(handoff_id, order[::-1])
        assert received.bytes_moved == count * size
        assert (decode.memory[order[::-1]] == content(range(count), size)).all()

    play(scenario)


def test_no_thread_outlives_the_clients(play):
    """Not that of a stream, nor those that copied."""
    before = set(threading.enumerate())

    async def scenario(world: World) -> None:
        prefill, decode = await world.engine(), await world.engine()
        lent = await prefill.client.handoffs.lend([prefill.pool])
        handoff_id = await prefill.offer(lent, [1], [0])
        await decode.take(handoff_id, [0])
        await told(prefill, handoff_id)

    play(scenario)
    # gRPC serves all loops of a process by one thread, which it keeps.
    left = [one for one in set(threading.enumerate()) - before if "_poll_wrapper" not in one.name]
    for thread in left:
        thread.join(WAIT_LIMIT_S)
    assert not [thread.name for thread in left if thread.is_alive()]
