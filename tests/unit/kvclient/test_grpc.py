"""The same client over gRPC and tcp: from another host, calls and bytes take other ways."""

import time

import numpy as np
import pytest

from kvclient import (
    ArenaFullError,
    ChecksumMismatchError,
    ClientSettings,
    ItemOutcome,
    LeaseUnknownError,
    PeerUnavailableError,
    StaleIncarnationError,
)
from kvservice.ports.methods import Method
from tests.unit.kvclient.conftest import BLOCK_BYTES, blocks_of, part_of
from tests.unit.kvclient.fake_grpc import FakeGrpc

HIT, MISS, DONE = ItemOutcome.HIT, ItemOutcome.MISS, ItemOutcome.DONE


@pytest.fixture
def edge(daemon):
    """Serve the fake daemon over gRPC and tcp."""
    with FakeGrpc(daemon) as running:
        yield running


@pytest.fixture
def client(edge, flavour):
    """Connect a client of either flavour."""
    return flavour.connect(ClientSettings(endpoint=edge.endpoint, token="secret"))


@pytest.fixture
def namespace(client, flavour, identity, part):
    """Open a namespace of one part."""
    return flavour.run(client.open_namespace, identity, [part])


def test_what_is_put_is_got(daemon, namespace, flavour, rng):
    """A get is a lease of the prefix, a transfer and a release."""
    keys, blocks = [rng.randbytes(32) for _ in range(4)], blocks_of(rng, 4)
    assert flavour.run(namespace.put, keys[:3], blocks[:3]).outcomes.tolist() == [DONE] * 3
    into = np.zeros_like(blocks)
    got = flavour.run(namespace.get, keys, into)
    assert (got.outcomes.tolist(), got.prefix_count) == ([HIT, HIT, HIT, MISS], 3)
    assert got.bytes_moved == 3 * BLOCK_BYTES
    assert (into[:3] == blocks[:3]).all()
    flavour.wait(daemon.wait_for, Method.RELEASE)
    assert flavour.run(namespace.lookup_local, keys).prefix_count == 3


def test_several_parts_go_over_the_wire(client, flavour, identity, rng):
    """Parts of different sizes keep their places in one payload."""
    parts = [part_of(1024), part_of(4096, kv_group=1)]
    namespace = flavour.run(client.open_namespace, identity, parts)
    keys = [rng.randbytes(32) for _ in range(2)]
    blocks = [rng.randbytes(size) for _ in keys for size in (1024, 4096)]
    flavour.run(namespace.put, keys, blocks)
    view = flavour.enter(namespace.lease(keys))
    assert [bytes(block) for block in view.views] == blocks
    assert all(block.readonly for block in view.views)
    flavour.leave(view)


def test_calls_carry_session_and_bearer(edge, namespace):
    """The session travels as metadata, the tenant as a bearer token."""
    assert edge.metadata[-1]["kv-session-bin"]
    assert edge.metadata[-1]["authorization"] == "Bearer secret"
    assert "kv-session-bin" not in edge.metadata[0]


def test_errors_keep_their_class_and_hint(daemon, namespace, flavour, rng):
    """The reason comes from the status details, not from the code alone."""
    daemon.failures[Method.RESERVE] = ArenaFullError("no room", retry_after_ms=9)
    with pytest.raises(ArenaFullError, match="no room") as caught:
        flavour.run(namespace.put, [rng.randbytes(32)], blocks_of(rng, 1))
    assert caught.value.retry_after_ms == 9


def test_damaged_bytes_are_never_handed_on(daemon, namespace, flavour, rng):
    """What arrived is held to the committed checksum."""
    keys = [rng.randbytes(32)]
    flavour.run(namespace.put, keys, blocks_of(rng, 1))
    daemon.damage(keys[0])
    with pytest.raises(ChecksumMismatchError):
        flavour.run(namespace.get, keys, bytearray(BLOCK_BYTES))
    flavour.wait(daemon.wait_for, Method.RELEASE)


def test_the_owner_of_the_bytes_may_refuse(daemon, namespace, flavour, rng):
    """The daemon checks the capability on every transfer; its reason comes through."""
    keys = [rng.randbytes(32)]
    flavour.run(namespace.put, keys, blocks_of(rng, 1))
    lease = flavour.run(namespace.acquire, keys)
    daemon.life.leases.clear()
    with pytest.raises(LeaseUnknownError):
        flavour.run(namespace.read, lease, bytearray(BLOCK_BYTES))


def test_an_unavailable_daemon_is_asked_once_more(daemon, client, namespace, flavour, rng):
    """A lost channel is a lost connection: safe calls go out again after the session was resumed."""
    daemon.hang_ups[Method.LOOKUP] = 1
    assert flavour.run(namespace.lookup, [rng.randbytes(32)]).prefix_count == 0
    assert daemon.count(Method.LOOKUP) == 2
    assert client.attachment.epoch == 1
    daemon.hang_ups[Method.ACQUIRE] = 1
    with pytest.raises(PeerUnavailableError):
        flavour.run(namespace.acquire, [rng.randbytes(32)])
    assert daemon.count(Method.ACQUIRE) == 1


def test_another_life_of_the_daemon_is_a_new_session(daemon, client, namespace, flavour, rng):
    """The session is unknown to the next life; a put begins anew, an old lease is stale."""
    keys, blocks = [rng.randbytes(32)], blocks_of(rng, 1)
    flavour.run(namespace.put, keys, blocks)
    lease = flavour.run(namespace.acquire, keys)
    daemon.hang_ups[Method.LOOKUP] = 1
    daemon.deaths = {Method.LOOKUP}
    assert flavour.run(namespace.lookup, keys).prefix_count == 0
    assert client.attachment.epoch == 2
    with pytest.raises(StaleIncarnationError):
        flavour.run(namespace.read, lease, bytearray(BLOCK_BYTES))
    assert flavour.run(namespace.put, keys, blocks).stored_count == 1
    assert flavour.run(namespace.get, keys, bytearray(BLOCK_BYTES)).prefix_count == 1


def test_nobody_there_is_an_error_in_time(flavour):
    """Connecting to a closed port ends by its deadline, and says that nobody is there."""
    begun = time.monotonic()
    with pytest.raises(PeerUnavailableError):
        flavour.connect(ClientSettings(endpoint="grpc://127.0.0.1:1", connect_timeout_s=1.0))
    assert time.monotonic() - begun < 2.0


def test_a_daemon_without_a_data_plane_says_so(daemon, edge, flavour, identity, part, rng):
    """Control works without tcp; the first byte that would move names what is missing."""
    daemon.tcp_address = ""
    client = flavour.connect(edge.endpoint)
    namespace = flavour.run(client.open_namespace, identity, [part])
    assert flavour.run(namespace.lookup, [rng.randbytes(32)]).prefix_count == 0
    with pytest.raises(PeerUnavailableError, match="no tcp data plane"):
        flavour.run(namespace.put, [rng.randbytes(32)], blocks_of(rng, 1))


def test_events_are_followed(client, flavour):
    """A stream gives what comes and ends with an error when the daemon ends it."""
    stream = flavour.run(client.watch_events, 41)
    assert flavour.run(stream.next, 2.0).events[0].sequence == 42
    with pytest.raises(PeerUnavailableError, match="ended the stream"):
        flavour.run(stream.next, 2.0)
    flavour.run(stream.close)
