"""Puts of one size, one after the other: the slots of the next are reserved while this one is copied."""

from __future__ import annotations

import asyncio

import numpy as np

from kvclient import ItemOutcome
from kvclient.aio import KvClient as AsyncClient
from tests.integration.daemon_process import (
    check_stored,
    content,
    identity,
    keys,
    opened,
    parts,
    settings_of,
    tier,
    until,
)

BATCH = 8


def batch(turn: int) -> range:
    """Return the numbers of one batch."""
    return range(turn * BATCH, (turn + 1) * BATCH)


def put_batches(namespace, turns) -> None:
    """Put some batches, and see that each is stored whole."""
    for turn in turns:
        result = namespace.put(keys(batch(turn)), content(batch(turn)))
        assert result.stored_count == BATCH
        assert set(result.outcomes.tolist()) == {ItemOutcome.DONE}


def test_slots_wait_after_two_puts_of_one_size_and_go_back_with_the_client(daemon):
    """They are charged as reserved while they wait, and end with the session."""
    with opened(daemon.lane) as (watcher, _):
        with opened(daemon.lane) as (client, namespace):
            put_batches(namespace, range(6))
            client.list_tiers()
            assert BATCH <= tier(watcher).slots_reserved_count <= 2 * BATCH
            check_stored(namespace, range(6 * BATCH))
        until(lambda: tier(watcher).slots_reserved_count == 0, "the slots to come back")


def test_another_size_gives_the_waiting_slots_back(daemon):
    """A batch of another size is stored by name, and nothing is left reserved for long."""
    with opened(daemon.lane) as (client, namespace):
        put_batches(namespace, range(4))
        few = range(1000, 1003)
        assert namespace.put(keys(few), content(few)).stored_count == 3
        check_stored(namespace, few)
        until(lambda: tier(client).slots_reserved_count == 0, "the slots to come back")


def test_what_another_client_stored_is_an_outcome_and_keeps_its_bytes(daemon):
    """Between the reserve ahead and the commit another client may store one of the keys."""
    with opened(daemon.lane) as (_, namespace), opened(daemon.lane) as (_, other):
        put_batches(namespace, range(4))
        shared = list(batch(4))
        other.put(keys(shared[:1]), content(shared[:1]))
        result = namespace.put(keys(shared), content(shared))
        assert result.outcomes.tolist() == [ItemOutcome.ALREADY_COMMITTED] + [ItemOutcome.DONE] * (BATCH - 1)
        assert result.stored_count == BATCH - 1
        check_stored(namespace, shared)


def test_slots_of_a_daemon_that_ended_are_forgotten(start_daemon, tmp_path):
    """After a restart the slots that waited mean nothing; the puts go on."""
    daemon = start_daemon()
    with opened(daemon.lane) as (_, namespace):
        put_batches(namespace, range(4))
        daemon.kill()
        start_daemon(folder=tmp_path)
        put_batches(namespace, range(4, 10))
        check_stored(namespace, range(4 * BATCH, 10 * BATCH))


def test_slots_that_expired_while_they_waited_are_not_written_to(start_daemon):
    """A writer that paused for longer than a lease stores by name."""
    daemon = start_daemon(settings={"lease.ttl_ms": 2500, "lease.renew_interval_ms": 300})
    with opened(daemon.lane) as (client, namespace):
        put_batches(namespace, range(4))
        until(lambda: tier(client).slots_reserved_count == 0, "the slots to expire")
        put_batches(namespace, range(4, 8))
        check_stored(namespace, range(8 * BATCH))


def test_the_asynchronous_client_does_the_same(daemon):
    """The same source makes both flavours, and the answer is taken from another queue."""

    async def run() -> int:
        async with await AsyncClient.connect(settings_of(daemon.lane)) as client:
            namespace = await client.open_namespace(identity(), parts(len(content([0])[0])))
            for turn in range(6):
                await namespace.put(keys(batch(turn)), content(batch(turn)))
            into = np.zeros_like(content(range(6 * BATCH)))
            result = await namespace.get(keys(range(6 * BATCH)), into)
            assert (into == content(range(6 * BATCH))).all()
            waiting = (await client.list_tiers()).tiers[0].slots_reserved_count
            assert BATCH <= waiting <= 2 * BATCH
            return result.prefix_count

    assert asyncio.run(run()) == 6 * BATCH
