"""Blocks go in and come out byte for byte, with both clients, over both ways."""

from __future__ import annotations

import asyncio
import hashlib
import itertools

import numpy as np
import pytest

from kvclient import BlockBuffers, ItemOutcome, TenantUnknownError, aio
from kvclient.sync import KvClient
from tests.integration.daemon_process import (
    BLOCK_BYTES,
    check_stored,
    content,
    identity,
    keys,
    open_namespace,
    opened,
    parts,
    settings_of,
    tier,
)

WAYS = ["lane", "grpc"]


@pytest.fixture(params=WAYS)
def endpoint(request, shared_daemon):
    """The daemon's address over one of the two ways."""
    return getattr(shared_daemon, request.param)


def blocks_as(form: str, array: np.ndarray):
    """Return the memory of some blocks in one of the forms that callers have."""
    count, size = array.shape
    if form == "one array":
        return array
    if form == "bytes":
        return array.tobytes()
    if form == "bytearrays":
        return [bytearray(row.tobytes()) for row in array]
    if form == "memoryviews":
        return [memoryview(row.tobytes()) for row in array]
    if form == "float arrays":
        return [row.view(np.float32).reshape(4, -1) for row in array]
    if form == "pieces":
        cuts = [0, 1, 513, size // 2 + 7, size]
        return [[row[start:stop].copy() for start, stop in itertools.pairwise(cuts)] for row in array]
    if form == "strided":
        pools = [np.zeros((2 * count, size // 2), np.uint8) for _ in range(2)]
        pools[0][::2], pools[1][::2] = array[:, : size // 2], array[:, size // 2 :]
        return BlockBuffers.strided(pools, np.arange(0, 2 * count, 2))
    raise AssertionError(form)


@pytest.mark.parametrize(
    "form", ["one array", "bytes", "bytearrays", "memoryviews", "float arrays", "pieces", "strided"]
)
def test_any_memory_goes_in_and_comes_out_the_same(endpoint, salt, form):
    """Whatever exports contiguous bytes can be stored, whole or in pieces."""
    numbers = range(10)
    with opened(endpoint, salt=salt) as (_, namespace):
        result = namespace.put(keys(numbers), blocks_as(form, content(numbers)))
        assert result.stored_count == 10
        assert result.bytes_moved == 10 * BLOCK_BYTES
        check_stored(namespace, numbers)


@pytest.mark.parametrize("way", ["bytearrays", "pieces", "strided", "float arrays"])
def test_blocks_are_read_into_any_writable_memory(endpoint, salt, way):
    """A get scatters into the caller's pieces, and into nothing beside them."""
    numbers = range(6)
    with opened(endpoint, salt=salt) as (_, namespace):
        namespace.put(keys(numbers), content(numbers))
        if way == "bytearrays":
            into = [bytearray(BLOCK_BYTES) for _ in numbers]
            read = into
        elif way == "float arrays":
            into = [np.zeros((16, BLOCK_BYTES // 64), np.float32) for _ in numbers]
        elif way == "pieces":
            guarded = np.zeros((6, BLOCK_BYTES + 2), np.uint8)
            into = [[row[1:1001], row[1001:-1]] for row in guarded]
        else:
            pool = np.zeros((12, BLOCK_BYTES), np.uint8)
            into = BlockBuffers.strided([pool], np.arange(10, -2, -2))
        assert namespace.get(keys(numbers), into).prefix_count == 6
        if way == "pieces":
            assert not guarded[:, 0].any()
            assert not guarded[:, -1].any()
            read = guarded[:, 1:-1]
        elif way == "strided":
            assert not pool[1::2].any()
            read = pool[10::-2]
        elif way == "float arrays":
            read = [row.tobytes() for row in into]
        for got, expected in zip(read, content(numbers), strict=True):
            assert bytes(got) == expected.tobytes()


def test_several_parts_of_a_key_come_and_go_together(endpoint, salt):
    """Blocks of parts are key-major and may differ in size; a key is there with all of them."""
    sizes = (4096, 100, 8192)
    with opened(endpoint, *sizes, salt=salt) as (_, namespace):
        blocks = [
            content([10 * number + part], size)[0] for number in range(3) for part, size in enumerate(sizes)
        ]
        assert namespace.put(keys(range(3)), blocks).stored_count == 3
        into = [bytearray(len(block)) for block in blocks]
        assert namespace.get(keys(range(3)), into).prefix_count == 3
        assert [bytes(one) for one in into] == [block.tobytes() for block in blocks]


@pytest.mark.parametrize("writer", WAYS)
@pytest.mark.parametrize("reader", WAYS)
def test_what_one_client_stores_another_reads(shared_daemon, salt, writer, reader):
    """Both ways lead to the same blocks, and views are the same bytes as copies."""
    numbers = range(20)
    with (
        opened(getattr(shared_daemon, writer), salt=salt) as (_, one),
        opened(getattr(shared_daemon, reader), salt=salt) as (_, two),
    ):
        one.put(keys(numbers), content(numbers))
        check_stored(two, numbers)
        assert two.lookup(keys([0, 1, 99])).outcomes.tolist() == [1, 1, 2]
        with two.lease(keys([0, 1, 2, 99]), verify=True) as view:
            assert view.prefix_count == 3
            assert all(shown.readonly for shown in view.views)
            assert [bytes(shown) for shown in view.views] == [row.tobytes() for row in content(range(3))]
        again = one.put(keys([0, 20]), content([0, 20]))
        assert again.outcomes.tolist() == [ItemOutcome.ALREADY_COMMITTED, ItemOutcome.DONE]


@pytest.mark.parametrize("way", WAYS)
def test_the_async_client_does_the_same(daemon, way):
    """One source, two flavours: put, get, lookup, lease, reserve, commit, abort, events."""

    async def work() -> list[int]:
        async with await aio.KvClient.connect(settings_of(getattr(daemon, way))) as client:
            namespace = await client.open_namespace(identity(), parts())
            events = await client.watch_events(after_sequence=0)
            await namespace.put(keys(range(8)), content(range(8)))
            into = np.zeros((8, BLOCK_BYTES), np.uint8)
            result = await namespace.get(keys(range(8)), into)
            assert result.prefix_count == 8
            assert np.array_equal(into, content(range(8)))
            async with namespace.lease(keys(range(8)), verify=True) as view:
                assert [bytes(shown) for shown in view.views] == [row.tobytes() for row in content(range(8))]
            reservation = await namespace.reserve(keys([50, 51]))
            checksums = await namespace.write(reservation, content([50, 51]))
            assert await client.commit(reservation, checksums) == 2
            dropped = await namespace.reserve(keys([60]))
            assert await client.abort(dropped) == ItemOutcome.DONE
            outcomes = (await namespace.lookup(keys([50, 51, 60]))).outcomes.tolist()
            seen = await events.next(10.0)
            assert seen is not None
            assert seen.events[0].keys == b"".join(keys(range(8)))
            await events.close()
            return outcomes

    assert asyncio.run(work()) == [1, 1, 2]


def test_many_async_calls_share_one_client(daemon):
    """Concurrent puts and gets on one connection get their own answers."""

    async def work() -> None:
        async with await aio.KvClient.connect(settings_of(daemon.lane)) as client:
            namespace = await client.open_namespace(identity(), parts(4096))

            async def one(number: int) -> None:
                numbers = range(10 * number, 10 * number + 10)
                await namespace.put(keys(numbers), content(numbers, 4096))
                into = np.zeros((10, 4096), np.uint8)
                assert (await namespace.get(keys(numbers), into)).prefix_count == 10
                assert np.array_equal(into, content(numbers, 4096))

            await asyncio.gather(*(one(number) for number in range(50)))
            assert (await client.list_tiers()).tiers[0].slots_committed_count == 500

    asyncio.run(work())


@pytest.mark.parametrize("way", WAYS)
def test_a_block_as_large_as_a_segment_fits(start_daemon, way):
    """The bound is the segment, to the byte; one byte more is refused by name at the opening."""
    daemon = start_daemon(capacity="4MiB", segment="1MiB")
    size = 1 << 20
    with opened(getattr(daemon, way), size) as (_, namespace):
        namespace.put(keys([1, 2]), content([1, 2], size))
        check_stored(namespace, [1, 2], size)


@pytest.mark.parametrize("way", WAYS)
def test_a_batch_of_thousands_goes_through(start_daemon, way):
    """4,096 keys in one put and one get."""
    daemon = start_daemon(capacity="32MiB", segment="4MiB")
    with opened(getattr(daemon, way), 4096) as (client, namespace):
        numbers = range(4096)
        assert namespace.put(keys(numbers), content(numbers, 4096)).stored_count == 4096
        check_stored(namespace, numbers, 4096)
        assert tier(client).slots_committed_count == 4096


def test_two_tenants_never_see_each_other(start_daemon):
    """Same model, same salt, same keys: tenants by token find their own bytes, and purge only those."""
    digests = {name: hashlib.sha256(name.encode()).hexdigest() for name in ("red", "blue")}
    config = "".join(f'[tenants.{name}]\ntoken_sha256 = "{digests[name]}"\n' for name in digests)
    daemon = start_daemon(config=config)
    with (
        opened(daemon.grpc, token="red") as (red_client, red),
        opened(daemon.grpc, token="blue") as (blue_client, blue),
        opened(daemon.lane) as (_, default),
    ):
        assert (red_client.attachment.tenant, blue_client.attachment.tenant) == ("red", "blue")
        red.put(keys(range(4)), content(range(4)))
        assert not blue.lookup(keys(range(4))).prefix_count
        assert not default.lookup_local(keys(range(4))).prefix_count
        blue.put(keys(range(4)), content(range(100, 104)))
        check_stored(red, range(4))
        into = np.zeros((4, BLOCK_BYTES), np.uint8)
        assert blue.get(keys(range(4)), into).prefix_count == 4
        assert np.array_equal(into, content(range(100, 104)))
        assert blue_client.purge(blue) == 4
        check_stored(red, range(4))
        assert default.get(keys(range(4)), into).prefix_count == 0
    with pytest.raises(TenantUnknownError, match="token"):
        KvClient.connect(settings_of(daemon.grpc, token="green"))


def test_memory_that_changes_its_tenant_is_scrubbed(start_daemon):
    """A segment that was another tenant's shows nothing of it, not even to a reader of raw memory."""
    digest = hashlib.sha256(b"red").hexdigest()
    daemon = start_daemon(
        capacity="1MiB", segment="256KiB", config=f'[tenants.red]\ntoken_sha256 = "{digest}"\n'
    )
    with opened(daemon.grpc, token="red") as (client, red):
        red.put(keys(range(16)), np.full((16, BLOCK_BYTES), 0xEE, np.uint8))
        client.purge(red)
    with opened(daemon.lane, 256 << 10) as (client, default):
        for number in range(4):
            reservation = default.reserve(keys([number]))
            # Committed unwritten: what a reader then sees is what the memory held.
            client.commit(reservation, np.zeros(1, np.uint32))
        with default.lease(keys(range(4))) as view:
            assert view.prefix_count >= 1
            assert not any(np.frombuffer(bytes(shown), np.uint8).any() for shown in view.views)


def test_a_client_may_open_many_namespaces(daemon):
    """Salts keep apart what must not meet, in one session too."""
    with opened(daemon.lane, 4096) as (client, first):
        spaces = [open_namespace(client, 4096, salt=bytes([number])) for number in range(20)]
        for number, namespace in enumerate(spaces):
            namespace.put(keys([7]), content([number], 4096))
        assert not first.lookup(keys([7])).prefix_count
        into = np.zeros((1, 4096), np.uint8)
        for number, namespace in enumerate(spaces):
            namespace.get(keys([7]), into)
            assert np.array_equal(into, content([number], 4096))
