"""The feed of events: from a point on, in order, waking when there is news."""

import asyncio

import pytest

from kvproto.kv.v1.event_service_pb2 import WatchEventsRequest
from kvservice.core.errors import EventsLostError, StaleIncarnationError
from kvservice.service.event_feed import BATCH_COUNT, EventFeed
from tests.core_world import World

LIFE = b"life of a daemon"
LIMIT_S = 5.0


class WorldCoordinator:
    """What the feed asks of a coordinator, answered from a world."""

    def __init__(self, world):
        self._world = world

    def facts_after(self, tenant, sequence, *, limit_count):
        return self._world.books.tenant(tenant).history.after(sequence, limit_count=limit_count)

    def last_sequence(self, tenant):
        return self._world.books.tenant(tenant).history.last_sequence


@pytest.fixture
def world():
    """A state with 64 slots."""
    return World()


@pytest.fixture
def feed(world):
    """A feed over it."""
    return EventFeed(WorldCoordinator(world), LIFE)


def put(world, numbers, tenant="acme"):
    """Commit some keys, one batch each."""
    client = world.attach(tenant)
    spaces = client.open()
    for number in numbers:
        client.put(spaces, [number])


def sequences(response):
    """Return the numbers of the events."""
    return [event.sequence for event in response.events]


def test_the_past_comes_first_and_then_the_news(world, feed):
    """A watcher gets what it missed, then waits, and is woken by its tenant's news alone."""

    async def work():
        put(world, [1, 2])
        follow = feed.follow("acme", WatchEventsRequest(after_sequence=0))
        first = await asyncio.wait_for(anext(follow), LIMIT_S)
        assert first.daemon_incarnation == LIFE
        assert sequences(first) == [1, 2]
        waiting = asyncio.ensure_future(anext(follow))
        await asyncio.sleep(0)
        feed.wake("other")
        await asyncio.sleep(0)
        assert not waiting.done()
        put(world, [3])
        feed.wake("acme")
        assert sequences(await asyncio.wait_for(waiting, LIMIT_S)) == [3]
        await follow.aclose()

    asyncio.run(work())


def test_without_a_point_only_the_future_comes(world, feed):
    """Unset starts with the next event; zero starts with the first."""

    async def work():
        put(world, [1, 2])
        follow = feed.follow("acme", WatchEventsRequest())
        waiting = asyncio.ensure_future(anext(follow))
        await asyncio.sleep(0)
        put(world, [3])
        feed.wake("acme")
        assert sequences(await asyncio.wait_for(waiting, LIMIT_S)) == [3]
        await follow.aclose()

    asyncio.run(work())


def test_a_long_past_comes_in_pieces(feed, world):
    """A message is bounded; nothing is left out or told twice."""

    async def work():
        client = world.attach()
        spaces = client.open()
        for number in range(BATCH_COUNT + 10):
            client.put(spaces, [number])
        total = world.books.tenant("acme").history.last_sequence
        seen = []
        async for response in feed.follow("acme", WatchEventsRequest(after_sequence=0)):
            assert len(response.events) <= BATCH_COUNT
            seen += sequences(response)
            if seen[-1] == total:
                break
        assert seen == list(range(1, total + 1))

    asyncio.run(work())


def test_tenants_have_histories_of_their_own(feed, world):
    """Another tenant's blocks are nobody's news."""

    async def work():
        put(world, [1], "acme")
        put(world, [1, 2], "other")
        follow = feed.follow("other", WatchEventsRequest(after_sequence=1))
        assert sequences(await asyncio.wait_for(anext(follow), LIMIT_S)) == [2]
        await follow.aclose()

    asyncio.run(work())


def test_a_watcher_that_goes_is_forgotten(feed, world):
    """News after the end of a watch wake nobody, and a later watch starts anew."""

    async def work():
        for _ in range(3):
            follow = feed.follow("acme", WatchEventsRequest())
            waiting = asyncio.ensure_future(anext(follow))
            await asyncio.sleep(0)
            waiting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiting
            await follow.aclose()
        put(world, [1])
        feed.wake("acme")
        follow = feed.follow("acme", WatchEventsRequest(after_sequence=0, daemon_incarnation=LIFE))
        assert sequences(await asyncio.wait_for(anext(follow), LIMIT_S)) == [1]
        await follow.aclose()

    asyncio.run(work())


def test_what_is_not_kept_is_an_error():
    """A gap is said, never passed over; a number of the future, or of another life, is one too."""
    world = World(event_history_count=2)
    feed = EventFeed(WorldCoordinator(world), LIFE)
    put(world, [1, 2, 3])

    async def first(**fields):
        return await asyncio.wait_for(anext(feed.follow("acme", WatchEventsRequest(**fields))), LIMIT_S)

    with pytest.raises(EventsLostError, match="events 1 to 1"):
        asyncio.run(first(after_sequence=0))
    with pytest.raises(EventsLostError, match="99"):
        asyncio.run(first(after_sequence=99))
    with pytest.raises(StaleIncarnationError):
        asyncio.run(first(after_sequence=1, daemon_incarnation=b"another life...."))
    assert sequences(asyncio.run(first(after_sequence=1))) == [2, 3]
