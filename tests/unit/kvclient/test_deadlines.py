"""Every call ends by its deadline, whatever the daemon does."""

import asyncio
import threading
import time

import pytest

from kvclient import DeadlineError, MalformedError, PeerUnavailableError, aio
from kvclient._backends.aio import DIRECT_COPY_LIMIT_BYTES
from kvclient.sync import KvClient
from kvservice.ports.methods import Method
from tests.unit.kvclient.conftest import BLOCK_BYTES, blocks_of, settings_of

TIMEOUT_S = 0.3
SLACK_S = 1.0


@pytest.fixture
def client(daemon, flavour):
    """Connect a client that does not wait for long."""
    return flavour.connect(settings_of(daemon, call_timeout_s=TIMEOUT_S))


def test_a_call_that_is_never_answered_ends_by_its_deadline(daemon, client, flavour, identity, part, rng):
    """DeadlineError after the time asked for, and the connection serves on."""
    namespace = flavour.run(client.open_namespace, identity, [part])
    daemon.silent = {Method.LOOKUP, Method.RESERVE}
    for call, arguments in ((namespace.lookup, ()), (namespace.put, (blocks_of(rng, 1),))):
        begun = time.monotonic()
        with pytest.raises(DeadlineError):
            flavour.run(call, [rng.randbytes(32)], *arguments)
        assert TIMEOUT_S * 0.5 <= time.monotonic() - begun < TIMEOUT_S + SLACK_S
    daemon.silent = set()
    assert flavour.run(namespace.lookup, [rng.randbytes(32)]).prefix_count == 0
    assert client.attachment.epoch == 1
    assert daemon.count(Method.ATTACH) == 1


def test_connecting_ends_by_its_deadline(daemon, flavour):
    """A daemon that accepts and says nothing is not waited for longer than asked."""
    daemon.silent = {Method.ATTACH}
    begun = time.monotonic()
    with pytest.raises((DeadlineError, PeerUnavailableError)):
        flavour.connect(settings_of(daemon, connect_timeout_s=TIMEOUT_S))
    assert time.monotonic() - begun < TIMEOUT_S + SLACK_S


def test_a_late_answer_is_not_taken_for_another(daemon, client, flavour, identity, part, rng):
    """An answer that comes after its call gave up is dropped, not given to the next call."""
    keys = [rng.randbytes(32)]
    namespace = flavour.run(client.open_namespace, identity, [part])
    flavour.run(namespace.put, keys, blocks_of(rng, 1))
    daemon.held_back = {Method.LOOKUP}
    with pytest.raises(DeadlineError):
        flavour.run(namespace.lookup, [rng.randbytes(32)])
    daemon.held_back = set()
    assert flavour.run(namespace.lookup, keys).prefix_count == 1


def test_threads_share_a_connection(daemon, identity, part, rng):
    """Calls of many threads on one blocking client each get their own answer."""
    with KvClient.connect(settings_of(daemon)) as client:
        namespace = client.open_namespace(identity, [part])
        keys = [rng.randbytes(32) for _ in range(8)]
        namespace.put(keys[:4], blocks_of(rng, 4))
        wrong = []

        def look(index):
            found = {namespace.lookup([keys[index]]).prefix_count for _ in range(50)}
            wrong.extend(found - {int(index < 4)})

        threads = [threading.Thread(target=look, args=(index,)) for index in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not wrong


def test_large_answers_come_in_many_pieces(daemon, flavour):
    """A frame larger than one receive is put together, and those behind it stay whole."""
    client = flavour.connect(settings_of(daemon))
    daemon.version = "x" * (3 << 20)
    for _ in range(2):
        assert len(flavour.run(client.capabilities).version) == 3 << 20
    daemon.version = "small"
    assert flavour.run(client.capabilities).version == "small"


def test_many_calls_at_once_each_get_their_own_answer(daemon, identity, part, rng):
    """The asynchronous client has any number of calls under way on one connection."""

    async def look():
        async with await aio.KvClient.connect(settings_of(daemon)) as client:
            namespace = await client.open_namespace(identity, [part])
            keys = [rng.randbytes(32) for _ in range(40)]
            await namespace.put(keys[:20], blocks_of(rng, 20))
            found = await asyncio.gather(*[namespace.lookup([key]) for key in keys])
            return [result.prefix_count for result in found]

    assert asyncio.run(look()) == [1] * 20 + [0] * 20


def test_an_answer_that_is_none_is_an_error_of_ours(daemon, client, flavour):
    """What cannot be parsed is a KvError too: nothing else may reach an engine."""
    daemon.garbage = {Method.LIST_TIERS}
    with pytest.raises(MalformedError, match="ListTiersResponse"):
        flavour.run(client.list_tiers)
    assert flavour.run(client.capabilities).version == daemon.version


def test_a_cancelled_put_leaves_no_copy_running(daemon, identity, part, rng):
    """A thread cannot be cancelled: the put ends only when its copy has, and then it is aborted."""
    blocks = blocks_of(rng, 512)
    keys = [rng.randbytes(32) for _ in range(200)]

    async def cancel():
        async with await aio.KvClient.connect(settings_of(daemon)) as client:
            namespace = await client.open_namespace(identity, [part])
            # Larger than what is copied on the loop itself.
            assert 2 * len(keys) * BLOCK_BYTES > DIRECT_COPY_LIMIT_BYTES
            putting = asyncio.ensure_future(namespace.put(keys, blocks[: len(keys)]))
            await asyncio.to_thread(daemon.wait_for, Method.RESERVE)
            putting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await putting
            await client.list_tiers()
            return daemon.count(Method.COMMIT)

    assert asyncio.run(cancel()) == 0
