"""Lost connections, lost sessions, and what survives them."""

import contextlib
import os
import threading
import time
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from kvclient import (
    DeadlineError,
    InvariantError,
    ItemOutcome,
    PeerUnavailableError,
    StaleIncarnationError,
    TenantUnknownError,
)
from kvservice.ports.methods import Method
from tests.unit.kvclient.conftest import BLOCK_BYTES, blocks_of, settings_of


@pytest.fixture
def client(daemon, flavour):
    """Connect a client of either flavour."""
    return flavour.connect(settings_of(daemon))


@pytest.fixture
def namespace(client, flavour, identity, part):
    """Open a namespace of one part."""
    return flavour.run(client.open_namespace, identity, [part])


def open_descriptors():
    """What this process has open, besides the folder that it lists."""
    found = Counter()
    for entry in list(Path("/proc/self/fd").iterdir()):
        with contextlib.suppress(FileNotFoundError):
            found[str(entry.readlink())] += 1
    return found


def test_nobody_there_is_an_error_at_once(flavour, tmp_path):
    """Connecting to a daemon that is not there says so, and says what to do."""
    with pytest.raises(PeerUnavailableError, match="start kvservice serve"):
        flavour.connect(f"unix:{tmp_path}/none.sock")


def test_a_daemon_that_refuses_us_says_why(daemon, flavour):
    """The daemon's own reason comes through, not the loss of the connection that follows."""
    daemon.failures[Method.ATTACH] = TenantUnknownError("user 7 is of no tenant")
    with pytest.raises(TenantUnknownError, match="user 7"):
        flavour.connect(settings_of(daemon))


def test_a_daemon_that_hangs_up_on_us_says_why(daemon, flavour):
    """Last words before hanging up, of no call, are the reason that callers see."""
    daemon.last_words = TenantUnknownError("user 8 is of no tenant")
    with pytest.raises(TenantUnknownError, match="user 8"):
        flavour.connect(settings_of(daemon))


def test_a_lost_connection_is_resumed_by_token(daemon, client, namespace, flavour, rng):
    """The session lives on with its process: what it holds is still good, nothing is opened again."""
    keys = [rng.randbytes(32)]
    reservation = flavour.run(namespace.reserve, keys)
    daemon.drop_connections()
    flavour.run(namespace.lookup, keys)
    assert client.attachment.epoch == 1
    assert daemon.last(Method.ATTACH).resume_token == client.attachment.session_token
    assert daemon.count(Method.OPEN_NAMESPACE) == 1
    checksums = flavour.run(namespace.write, reservation, blocks_of(rng, 1))
    assert flavour.run(client.commit, reservation, checksums) == 1


@pytest.mark.parametrize("method", ["LOOKUP", "RESERVE"])
def test_a_call_in_flight_is_sent_once_more_where_that_is_safe(daemon, namespace, flavour, rng, method):
    """The daemon hung up instead of answering: the same request goes out again, with the same id."""
    keys = [rng.randbytes(32)]
    daemon.hang_ups[Method[method]] = 1
    flavour.run(getattr(namespace, method.lower()), keys)
    assert daemon.count(Method[method]) == 2
    requests = [request for called, request in daemon.calls if called == Method[method]]
    assert requests[0] == requests[1]


def test_a_commit_in_flight_is_sent_once_more(daemon, namespace, flavour, rng):
    """A commit that was done and not heard of is DONE again, so the put succeeds."""
    keys, blocks = [rng.randbytes(32)], blocks_of(rng, 1)
    daemon.hang_ups[Method.COMMIT] = 1
    assert flavour.run(namespace.put, keys, blocks).outcomes.tolist() == [ItemOutcome.DONE]
    assert daemon.count(Method.COMMIT) == 2


def test_an_acquire_in_flight_is_never_sent_twice(daemon, namespace, flavour, rng):
    """Each success is another lease, and the first would be held by nobody."""
    daemon.hang_ups[Method.ACQUIRE] = 1
    with pytest.raises(PeerUnavailableError):
        flavour.run(namespace.acquire, [rng.randbytes(32)])
    assert daemon.count(Method.ACQUIRE) == 1
    assert flavour.run(namespace.acquire, [rng.randbytes(32)]) is None


def test_a_retry_is_one_retry(daemon, namespace, flavour, rng):
    """A daemon that hangs up again is not asked a third time by the same call."""
    daemon.hang_ups[Method.LOOKUP] = 2
    with pytest.raises(PeerUnavailableError):
        flavour.run(namespace.lookup, [rng.randbytes(32)])
    assert daemon.count(Method.LOOKUP) == 2


def test_a_restart_is_a_new_session(daemon, client, namespace, flavour, rng):
    """Namespaces are opened again by their next use; memory is mapped anew; old blocks are misses."""
    keys, blocks = [rng.randbytes(32) for _ in range(2)], blocks_of(rng, 2)
    flavour.run(namespace.put, keys, blocks)
    lease = flavour.run(namespace.acquire, keys)
    reservation = flavour.run(namespace.reserve, [rng.randbytes(32)])
    before = client.attachment
    daemon.restart()
    assert flavour.run(namespace.lookup, keys).prefix_count == 0
    assert client.attachment.epoch == before.epoch + 1
    assert client.attachment.daemon_incarnation == daemon.life.incarnation
    for call in (
        lambda: flavour.run(client.release, [lease]),
        lambda: flavour.run(client.renew, [lease]),
        lambda: flavour.run(namespace.read, lease, bytearray(2 * BLOCK_BYTES)),
        lambda: flavour.run(namespace.write, reservation, blocks[:1]),
        lambda: flavour.run(client.abort, reservation),
        lambda: flavour.run(client.commit, reservation, np.zeros(1, np.uint32)),
    ):
        with pytest.raises(StaleIncarnationError):
            call()
    into = np.zeros_like(blocks)
    assert flavour.run(namespace.get, keys, into).prefix_count == 0
    assert flavour.run(namespace.put, keys, blocks).stored_count == 2
    assert flavour.run(namespace.get, keys, into).prefix_count == 2
    assert (into == blocks).all()
    assert daemon.count(Method.OPEN_NAMESPACE) == 2


def test_a_restart_in_the_middle_of_a_put_fails_the_put(daemon, namespace, flavour, rng):
    """The reservation died with the daemon: the put says so, and the next one works."""
    keys, blocks = [rng.randbytes(32)], blocks_of(rng, 1)
    daemon.hang_ups[Method.COMMIT] = 1
    daemon.deaths = {Method.COMMIT}
    with pytest.raises(StaleIncarnationError):
        flavour.run(namespace.put, keys, blocks)
    assert daemon.count(Method.COMMIT) == 1
    assert flavour.run(namespace.put, keys, blocks).stored_count == 1


def test_a_session_that_the_daemon_ended_begins_anew(daemon, client, namespace, flavour, rng):
    """SESSION_UNKNOWN means that nothing was done: even an acquire goes out again, with new handles."""
    keys, blocks = [rng.randbytes(32)], blocks_of(rng, 1)
    flavour.run(namespace.put, keys, blocks)
    daemon.forget_sessions()
    lease = flavour.run(namespace.acquire, keys)
    assert lease is not None
    assert client.attachment.epoch == 2
    daemon.forget_sessions()
    assert flavour.run(client.capabilities).version == "fake"
    assert client.attachment.epoch == 3
    daemon.forget_sessions()
    assert flavour.run(namespace.put, [rng.randbytes(32)], blocks).stored_count == 1


def test_local_reads_go_on_while_the_daemon_is_away(daemon, namespace, flavour, rng):
    """The generations still stand, so the bytes are right: a get needs nobody."""
    keys, blocks = [rng.randbytes(32)], blocks_of(rng, 1)
    flavour.run(namespace.put, keys, blocks)
    daemon.stop()
    assert flavour.run(namespace.get, keys, bytearray(BLOCK_BYTES)).prefix_count == 1
    with pytest.raises(PeerUnavailableError):
        flavour.run(namespace.acquire, keys)


def test_a_daemon_that_is_down_fails_calls_at_once(daemon, flavour):
    """The call that was in flight waits for a return, by its deadline; those after it do not wait."""
    client = flavour.connect(settings_of(daemon, call_timeout_s=0.1))
    daemon.stop()
    with pytest.raises((PeerUnavailableError, DeadlineError)):
        flavour.run(client.list_tiers)
    begun = time.monotonic()
    for _ in range(100):
        with pytest.raises(PeerUnavailableError):
            flavour.run(client.list_tiers)
    assert time.monotonic() - begun < 1.0


def test_a_closed_client_says_so(daemon, client, namespace, flavour, rng):
    """Closing is idempotent, detaches, and every later call names it."""
    flavour.run(client.close)
    flavour.run(client.close)
    assert daemon.count(Method.DETACH) == 1
    with pytest.raises(PeerUnavailableError, match="closed"):
        flavour.run(client.list_tiers)
    with pytest.raises(PeerUnavailableError):
        flavour.run(namespace.get, [rng.randbytes(32)], bytearray(BLOCK_BYTES))


def test_closing_leaves_no_thread_and_no_descriptor(daemon, flavour, identity, part, rng):
    """Who opens closes: the ticker, the touching thread, the socket and the mappings go with the client."""
    flavour.wait(int)
    threads = set(threading.enumerate())
    descriptors = open_descriptors()
    client = flavour.run(flavour.KvClient.connect, settings_of(daemon))
    namespace = flavour.run(client.open_namespace, identity, [part])
    flavour.run(namespace.put, [rng.randbytes(32)], blocks_of(rng, 1))
    flavour.run(client.close)
    daemon.join_connections()
    left = {thread for thread in threading.enumerate() if thread.name.startswith("kvclient")}
    assert not left - threads
    assert open_descriptors() <= descriptors


def test_a_fork_is_refused(daemon, client, namespace, flavour, rng):
    """In a child the socket is shared, the memory unmapped and the ticker gone: the error says what to do."""
    keys = [rng.randbytes(32)]
    flavour.run(namespace.put, keys, blocks_of(rng, 1))
    refused = []

    def child(call, *arguments):
        try:
            flavour.run(call, *arguments)
        except InvariantError as error:
            refused.append("connect in the child" in str(error))

    real_pid = os.getpid
    try:
        os.getpid = lambda: real_pid() + 1
        child(client.list_tiers)
        child(namespace.get, keys, bytearray(BLOCK_BYTES))
        child(namespace.put, keys, blocks_of(rng, 1))
    finally:
        os.getpid = real_pid
    assert refused == [True, True, True]
