"""The asynchronous client through deaths, restarts and stalls of its daemon, with many tasks at work."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import itertools
import signal
import time
from collections import Counter
from collections.abc import Awaitable, Callable

import numpy as np
import pytest

from kvclient import (
    DeadlineError,
    KvError,
    LeaseExpiredError,
    PeerUnavailableError,
    ReservationExpiredError,
    StaleGenerationError,
    StaleIncarnationError,
)
from kvclient.aio import EventStream, KvClient, Namespace
from tests.integration.daemon_process import (
    BLOCK_BYTES,
    DaemonProcess,
    content,
    identity,
    keys,
    opened,
    parts,
    settings_of,
    until,
)

WAYS = ["lane", "grpc"]
TASKS_COUNT = 5
ROUNDS_COUNT = 2
CALL_TIMEOUT_S = 0.6
LATE_S = 1.0
"""What two loaded cores may add to a deadline."""

SCENARIO_LIMIT_S = 40.0
REMOTE = {"lease.heartbeat_timeout_ms": 1000, "lease.renew_interval_ms": 200}
"""A session over gRPC ends by its silence, and soon."""

PAUSE_S = 0.02

OUTAGE = (
    PeerUnavailableError,
    DeadlineError,
    StaleIncarnationError,
    # A right that ended with the session, seen by a task that did not see the session end.
    LeaseExpiredError,
    ReservationExpiredError,
    StaleGenerationError,
)


@pytest.fixture(scope="module")
def lasting_daemon(tmp_path_factory):
    """A daemon for all tests here that only stop it for a while."""
    daemon = DaemonProcess(tmp_path_factory.mktemp("lasting"), settings=REMOTE)
    yield daemon
    daemon.kill()


@pytest.fixture
def daemon(lasting_daemon):
    """The same, which goes on after the test, whatever became of that."""
    yield lasting_daemon
    lasting_daemon.signal(signal.SIGCONT)


def run(scenario: Callable[[], Awaitable[None]]) -> None:
    """Run a scenario; it ends in time, leaves no task, and nothing that the loop would complain of."""
    complaints: list[dict[str, object]] = []

    async def watched() -> list[str]:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: complaints.append(context))
        await asyncio.wait_for(scenario(), SCENARIO_LIMIT_S)
        await turns()  # What was cancelled or is done is gone then.
        return [repr(task) for task in asyncio.all_tasks() if task is not asyncio.current_task()]

    left = asyncio.run(watched())
    gc.collect()  # A task that was destroyed while it was pending complains now.
    assert left == []
    assert complaints == []


async def turns() -> None:
    """Let everything happen that waits for nobody else."""
    for _ in range(50):
        await asyncio.sleep(0)


async def connect(endpoint: str, **fields) -> KvClient:
    """Connect with short deadlines."""
    names = ("call_timeout_s", "connect_timeout_s", "transfer_timeout_s")
    timeouts = dict.fromkeys(names, CALL_TIMEOUT_S)
    return await KvClient.connect(settings_of(endpoint, **(timeouts | fields)))


async def holds(is_so: Callable[[], object], what: str) -> None:
    """Wait until something is so, while the tasks go on."""
    end_s = time.monotonic() + SCENARIO_LIMIT_S / 2
    never = asyncio.Event()
    while not is_so():
        assert time.monotonic() < end_s, what
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(never.wait(), PAUSE_S)


async def succeeds(call: Callable[[], Awaitable[object]], what: str) -> None:
    """Call until it succeeds."""
    end_s = time.monotonic() + SCENARIO_LIMIT_S / 2
    never = asyncio.Event()
    while True:
        try:
            await call()
        except OUTAGE:
            assert time.monotonic() < end_s, what
        else:
            return
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(never.wait(), PAUSE_S)


class Worker:
    """A task that stores and reads blocks of its own, and takes note of how each call ends."""

    def __init__(self, namespace: Namespace, number: int) -> None:
        self.done_count = 0
        self.failures: Counter[str] = Counter()
        self.slowest_failure_s = 0.0
        self._namespace = namespace
        self._numbers = itertools.count(number * 1_000_000)

    async def work(self, end: asyncio.Event) -> None:
        """Go on until the end; an error is retried after a pause."""
        while not end.is_set():
            started = time.monotonic()
            try:
                await self._store_and_read()
            except OUTAGE as error:
                self.slowest_failure_s = max(self.slowest_failure_s, time.monotonic() - started)
                self.failures[type(error).__name__] += 1
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(end.wait(), PAUSE_S)
            else:
                self.done_count += 1

    async def _store_and_read(self) -> None:
        numbers = [next(self._numbers) for _ in range(2)]
        expected = content(numbers)
        assert (await self._namespace.put(keys(numbers), expected)).stored_count == 2
        into = np.zeros_like(expected)
        result = await self._namespace.get(keys(numbers), into)
        if result.prefix_count == 2:  # Else the daemon died between the two.
            assert np.array_equal(into, expected)
        result = await self._namespace.get_leased(keys(numbers), into)
        if result.prefix_count == 2:
            assert np.array_equal(into, expected)


@contextlib.asynccontextmanager
async def at_work(namespace: Namespace):
    """Workers that are at work; in the end they end."""
    end = asyncio.Event()
    workers = [Worker(namespace, number) for number in range(TASKS_COUNT)]
    tasks = [asyncio.create_task(worker.work(end)) for worker in workers]
    try:
        yield workers
    finally:
        end.set()
        await asyncio.wait_for(asyncio.gather(*tasks), SCENARIO_LIMIT_S / 2)


async def all_do(workers: list[Worker], rounds: int = ROUNDS_COUNT) -> None:
    """Wait until each has done so many rounds more."""
    wanted = [worker.done_count + rounds for worker in workers]
    await holds(
        lambda: all(worker.done_count >= count for worker, count in zip(workers, wanted, strict=True)),
        f"{rounds} rounds more of each",
    )


@pytest.mark.parametrize("way", WAYS)
def test_tasks_fail_in_time_and_carry_on_after_a_restart(start_daemon, way):
    """Each task gets typed errors within its deadlines; with the new daemon comes one new session for all."""

    async def scenario() -> None:
        first = await asyncio.to_thread(start_daemon)
        async with await connect(getattr(first, way)) as client:
            namespace = await client.open_namespace(identity(), parts())
            before = client.attachment
            async with at_work(namespace) as workers:
                await all_do(workers)
                old = await namespace.reserve(keys([987_654_321]))
                sums = await namespace.write(old, content([987_654_321]))
                await asyncio.to_thread(first.kill)
                await holds(lambda: all(worker.failures for worker in workers), "each task sees the outage")
                second = await asyncio.to_thread(start_daemon, grpc_listen=first.grpc.removeprefix("grpc://"))
                await all_do(workers)
            # A round is at most: open again, reserve, move, commit.
            assert max(worker.slowest_failure_s for worker in workers) < 4 * CALL_TIMEOUT_S + LATE_S
            assert client.attachment.epoch == before.epoch + 1
            assert client.attachment.daemon_incarnation != before.daemon_incarnation
            with pytest.raises(StaleIncarnationError, match="again"):
                await client.commit(old, sums)
            owners = (await client.list_tiers()).owners
            assert [owner.session_id for owner in owners] == [client.attachment.session_id]
        assert "Traceback" not in second.said()

    run(scenario)


async def failing(call: Callable[[], Awaitable[object]]) -> float:
    """Return how long a call takes that fails for want of a daemon."""
    started = time.monotonic()
    with pytest.raises((PeerUnavailableError, DeadlineError)):
        await call()
    return time.monotonic() - started


@pytest.mark.parametrize("way", WAYS)
def test_a_watcher_hears_of_the_restart(start_daemon, way):
    """The stream ends with an error; its place is of the earlier life, and a new one begins from now.

    Until then each call takes one deadline at most, however many tasks wait for the same connection.
    """

    async def scenario() -> None:
        first = await asyncio.to_thread(start_daemon)
        async with await connect(getattr(first, way)) as client:
            namespace = await client.open_namespace(identity(), parts())
            events = await client.watch_events(after_sequence=0)
            await namespace.put(keys([1]), content([1]))
            seen = await events.next(5.0)
            assert seen is not None
            reading = asyncio.create_task(events.next(10.0))
            await asyncio.to_thread(first.kill)
            with pytest.raises(PeerUnavailableError):
                await asyncio.wait_for(reading, 5.0)
            await events.close()
            calls = [
                lambda: namespace.lookup(keys([1])),
                lambda: namespace.acquire(keys([1])),
                lambda: namespace.put(keys([2]), content([2])),
                client.list_tiers,
                lambda: client.open_namespace(identity(), parts(), b"other"),
            ]
            took_s = await asyncio.gather(*(failing(call) for call in calls for _ in range(4)))
            assert max(took_s) < CALL_TIMEOUT_S + LATE_S
            await asyncio.to_thread(start_daemon, grpc_listen=first.grpc.removeprefix("grpc://"))
            await succeeds(lambda: namespace.put(keys([2]), content([2])), "the client is back")
            events = await client.watch_events(seen.events[-1].sequence, seen.daemon_incarnation)
            with pytest.raises(StaleIncarnationError):
                await events.next(5.0)
            await events.close()
            events = await client.watch_events(after_sequence=0)
            fresh = await events.next(5.0)
            assert fresh is not None
            assert fresh.events[0].keys == keys([2])[0]
            await events.close()

    run(scenario)


def test_a_transfer_that_waits_for_its_peer_holds_up_nobody_else(daemon, salt):
    """However little it moves: small copies once ran on the loop, so all tasks stood still with it."""

    async def scenario() -> None:
        async with await connect(daemon.grpc, transfer_timeout_s=1.0) as client:
            namespace = await client.open_namespace(identity(), parts(), salt)
            await namespace.put(keys([1]), content([1]))
            lease = await namespace.acquire(keys([1]))
            assert lease is not None
            reservation = await namespace.reserve(keys([2]))
            daemon.signal(signal.SIGSTOP)
            into = np.zeros((1, BLOCK_BYTES), np.uint8)
            started = time.monotonic()
            moving = [
                asyncio.create_task(call)
                for call in (namespace.read(lease, into), namespace.write(reservation, content([2])))
            ]
            done, _ = await asyncio.wait(moving, timeout=0.1)
            assert time.monotonic() - started < 0.9
            assert not done
            ends = await asyncio.gather(*moving, return_exceptions=True)
            assert [type(end) for end in ends] == [DeadlineError] * 2
            assert time.monotonic() - started < 1.0 + LATE_S
            daemon.signal(signal.SIGCONT)

    run(scenario)


async def watch_to_the_end(events: EventStream) -> None:
    """Follow a stream until it fails."""
    while True:
        await events.next(SCENARIO_LIMIT_S)


@pytest.mark.parametrize("way", WAYS)
def test_a_client_closes_while_its_daemon_hangs(daemon, salt, way):
    """All that its tasks wait for ends with a typed error, the close in time, the session once it is heard.

    The daemon then hears what was asked before the good-bye, finds nobody to answer, and reads on.
    """

    async def scenario() -> None:
        client = await connect(getattr(daemon, way))
        namespace = await client.open_namespace(identity(), parts(), salt)
        events = await client.watch_events()
        async with at_work(namespace) as workers:
            await all_do(workers)
            await namespace.acquire(keys([1]))
            watching = asyncio.create_task(watch_to_the_end(events))
            daemon.signal(signal.SIGSTOP)
            await holds(lambda: all(worker.failures for worker in workers), "each task sees the outage")
            calls = [asyncio.create_task(namespace.lookup(keys([number]))) for number in range(3)]
            await turns()
            started = time.monotonic()
            await client.close()
            # The good-bye, and what was posted before it.
            assert time.monotonic() - started < 2 * CALL_TIMEOUT_S + LATE_S
            await client.close()
            ends = await asyncio.gather(watching, *calls, return_exceptions=True)
            assert all(isinstance(end, PeerUnavailableError | DeadlineError) for end in ends), ends
        with pytest.raises(PeerUnavailableError):
            await namespace.lookup(keys([1]))
        await events.close()
        daemon.signal(signal.SIGCONT)

    with opened(daemon.lane) as (onlooker, _):
        run(scenario)
        until(lambda: len(onlooker.list_tiers().owners) == 1, "its session has ended", 5.0)


@pytest.mark.parametrize("way", WAYS)
def test_tasks_that_are_cancelled_in_an_outage_end_at_once(daemon, salt, way):
    """A cancelled call is over; the client works on, for others and later."""

    async def scenario() -> None:
        async with await connect(getattr(daemon, way)) as client:
            namespace = await client.open_namespace(identity(), parts(), salt)
            await namespace.put(keys([1]), content([1]))
            daemon.signal(signal.SIGSTOP)
            into = np.zeros((1, BLOCK_BYTES), np.uint8)
            tasks = [
                asyncio.create_task(call)
                for number in range(10, 10 + TASKS_COUNT)
                for call in (
                    namespace.lookup(keys([number])),
                    namespace.put(keys([number]), content([number])),
                    namespace.get_leased(keys([1]), into),
                )
            ]
            await turns()
            started = time.monotonic()
            for task in tasks:
                task.cancel()
            ends = await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), SCENARIO_LIMIT_S)
            assert time.monotonic() - started < 0.8 * CALL_TIMEOUT_S
            assert all(isinstance(end, asyncio.CancelledError | KvError) for end in ends)
            daemon.signal(signal.SIGCONT)
            await succeeds(lambda: namespace.put(keys([2]), content([2])), "the client works on")
            assert (await namespace.get_leased(keys([1]), into)).prefix_count == 1
            assert np.array_equal(into, content([1]))

    run(scenario)


def test_a_client_that_is_closed_while_it_comes_back_leaves_no_session(start_daemon):
    """The new daemon hangs in the middle of the attach, and goes on when the client is closed already."""

    async def scenario() -> None:
        first = await asyncio.to_thread(start_daemon)
        client = await connect(first.lane)
        namespace = await client.open_namespace(identity(), parts())
        await asyncio.to_thread(first.kill)
        second = await asyncio.to_thread(start_daemon)
        async with await KvClient.connect(settings_of(second.lane)) as onlooker:
            second.signal(signal.SIGSTOP)
            calls = [asyncio.create_task(namespace.lookup(keys([1]))) for _ in range(3)]
            await turns()
            await client.close()
            second.signal(signal.SIGCONT)
            ends = await asyncio.wait_for(asyncio.gather(*calls, return_exceptions=True), SCENARIO_LIMIT_S)
            assert all(isinstance(end, OUTAGE) for end in ends), ends

            async def is_alone() -> None:
                owners = (await onlooker.list_tiers()).owners
                if len(owners) > 1:
                    raise DeadlineError(f"{len(owners)} sessions are left")

            await succeeds(is_alone, "its session has ended")

    run(scenario)


def test_memory_that_comes_too_late_is_not_taken_for_what_was_asked_next(start_daemon):
    """Descriptors belong to one answer. Those of a call that gave up once spoilt the next one's."""

    async def scenario() -> None:
        daemon = await asyncio.to_thread(start_daemon, settings={"arena.touch_ahead": "false"})
        async with (
            await connect(daemon.lane, call_timeout_s=0.2) as reader_client,
            await connect(daemon.lane) as writer_client,
        ):
            reader = await reader_client.open_namespace(identity(), parts())
            writer = await writer_client.open_namespace(identity(), parts())
            numbers = range(128)
            await writer.put(keys(numbers), content(numbers))
            into = np.zeros((len(numbers), BLOCK_BYTES), np.uint8)
            daemon.signal(signal.SIGSTOP)
            for _ in range(2):
                with pytest.raises(DeadlineError):
                    await reader.get(keys(numbers), into)
            again = asyncio.create_task(reader.get(keys(numbers), into))
            await turns()
            daemon.signal(signal.SIGCONT)
            assert (await again).prefix_count == len(numbers)
            assert np.array_equal(into, content(numbers))

    run(scenario)


def test_nor_by_the_blocking_client(start_daemon):
    """The same, with the lock of the other flavour in the place of its tasks."""
    daemon = start_daemon(settings={"arena.touch_ahead": "false"})
    with (
        opened(daemon.lane, call_timeout_s=0.2) as (_, reader),
        opened(daemon.lane) as (_, writer),
    ):
        numbers = range(128)
        writer.put(keys(numbers), content(numbers))
        into = np.zeros((len(numbers), BLOCK_BYTES), np.uint8)
        daemon.signal(signal.SIGSTOP)
        for _ in range(2):
            with pytest.raises(DeadlineError):
                reader.get(keys(numbers), into)
        daemon.signal(signal.SIGCONT)
        assert reader.get(keys(numbers), into).prefix_count == len(numbers)
        assert np.array_equal(into, content(numbers))
