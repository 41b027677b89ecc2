"""Somebody dies, stands still, or comes back: nothing of others is lost, and nothing stays theirs."""

from __future__ import annotations

import signal
import time

import numpy as np
import pytest

from kvclient import (
    ArenaFullError,
    DeadlineError,
    KvError,
    PeerUnavailableError,
    StaleIncarnationError,
)
from tests.integration.daemon_process import (
    BLOCK_BYTES,
    check_stored,
    content,
    keys,
    open_namespace,
    opened,
    tier,
    until,
    until_passed,
)

WAYS = ["lane", "grpc"]
AT_ONCE_S = 2.0
"""Far less than a lease of ten seconds, and long enough for two loaded cores."""


@pytest.fixture
def watched(daemon):
    """An onlooker on the local lane, with the blocks 0 to 7 stored."""
    with opened(daemon.lane, client_name="onlooker") as (client, namespace):
        yield client, namespace


def is_back(client) -> bool:
    """Say whether only the onlooker is left and no slot is reserved, on its way out or in quarantine."""
    report = client.list_tiers()
    (one,) = report.tiers
    assert one.slots_total_count == (
        one.slots_free_count
        + one.slots_reserved_count
        + one.slots_committed_count
        + one.slots_evicting_count
        + one.slots_quarantined_count
    )
    return (
        len(report.owners) == 1
        and not report.owners[0].leases_count
        and not one.slots_reserved_count + one.slots_evicting_count + one.slots_quarantined_count
    )


def test_a_client_killed_between_write_and_commit_leaves_nothing(daemon, watched, start_child):
    """The space of a local client that died in a put is free at once, and others can write its keys."""
    client, namespace = watched
    child = start_child("reserve", daemon.lane)
    assert child.hear() == "reserved"
    assert tier(client).slots_reserved_count == 8
    assert namespace.lookup(keys(range(8))).outcomes.tolist() == [3] * 8
    child.kill()
    until(lambda: is_back(client), "the space of the dead is free", AT_ONCE_S)
    assert tier(client).used_bytes == 0
    assert namespace.put(keys(range(8)), content(range(8))).stored_count == 8
    check_stored(namespace, range(8))


def test_a_client_killed_in_the_middle_of_copying_leaves_nothing_half_written(
    daemon, watched, start_child, rng
):
    """Killed at any moment of its puts: every block that is visible is whole, and the rest is free."""
    client, namespace = watched
    for _ in range(3):
        child = start_child("put-on", daemon.lane)
        assert child.hear() == "putting"
        evicted = tier(client).evicted_count
        until_passed(rng.uniform(0.0, 0.05))
        child.kill()
        until(lambda: is_back(client), "the space of the dead is free", AT_ONCE_S)
        assert tier(client).evicted_count >= evicted
        numbers = [1_000_000 + index for index in range(6000)]
        into = np.zeros((300, BLOCK_BYTES), np.uint8)
        seen = 0
        found = namespace.lookup_local(keys(numbers)).outcomes == 1
        present = np.array(numbers)[found].tolist()
        for start in range(0, len(present), 300):
            some = present[start : start + 300]
            result = namespace.get(keys(some), into[: len(some)])
            hits = result.outcomes == 1
            assert np.array_equal(into[: len(some)][hits], content(some)[hits])
            seen += int(hits.sum())
        assert seen == len(present) > 0
        client.purge(namespace)


def test_a_client_killed_while_it_reads_leaves_no_lease(daemon, watched, start_child):
    """Leases of the dead are gone at once, whole pages of them, and the blocks stay."""
    client, namespace = watched
    namespace.put(keys(range(8)), content(range(8)))
    for verb, word in (("lease", "leased 8"), ("get-on", "getting")):
        child = start_child(verb, daemon.lane)
        assert child.hear() == word
        assert sum(owner.leases_count for owner in client.list_tiers().owners) >= 1
        child.kill()
        until(lambda: is_back(client), "the leases of the dead are gone", AT_ONCE_S)
    check_stored(namespace, range(8))


def test_a_stopped_client_keeps_its_slots_in_quarantine_until_it_dies(start_daemon, start_child):
    """A process that stands still may still write: its expired slots are nobody's until it is gone."""
    daemon = start_daemon(
        capacity="1MiB", segment="256KiB", settings={"lease.ttl_ms": 400, "lease.renew_interval_ms": 100}
    )
    with opened(daemon.lane) as (client, namespace):
        child = start_child("reserve", daemon.lane)
        assert child.hear() == "reserved"
        child.signal(signal.SIGSTOP)
        until(lambda: tier(client).slots_quarantined_count == 8, "the reservation expires")
        assert tier(client).used_bytes == 8 * BLOCK_BYTES
        with pytest.raises(KvError) as caught:
            namespace.put(keys(range(20, 33)), content(range(20, 33)))
        assert caught.value.retry_after_ms is not None
        assert namespace.put(keys(range(20, 28)), content(range(20, 28))).stored_count == 8
        check_stored(namespace, range(20, 28))
        assert tier(client).slots_quarantined_count == 8
        child.kill()
        until(lambda: not tier(client).slots_quarantined_count, "its death frees them", AT_ONCE_S)
        assert namespace.put(keys(range(40, 48)), content(range(40, 48))).stored_count == 8


def test_a_stopped_client_that_comes_back_lets_go(start_daemon, start_child):
    """A process that goes on hears of the revocation, stops, and acknowledges; no time-out is involved."""
    daemon = start_daemon(settings={"lease.ttl_ms": 400, "lease.renew_interval_ms": 100})
    with opened(daemon.lane) as (client, namespace):
        child = start_child("reserve", daemon.lane)
        assert child.hear() == "reserved"
        child.signal(signal.SIGSTOP)
        until(lambda: tier(client).slots_quarantined_count == 8, "the reservation expires")
        child.signal(signal.SIGCONT)
        until(lambda: not tier(client).slots_quarantined_count, "its acknowledgement frees them")
        assert len(client.list_tiers().owners) == 2
        assert namespace.put(keys(range(8)), content(range(8))).stored_count == 8


def test_a_stopped_local_client_keeps_its_session(start_daemon, start_child):
    """A process of this host dies when it dies, never by a missed beat: engines compile for seconds."""
    daemon = start_daemon(
        settings={
            "lease.ttl_ms": 500,
            "lease.renew_interval_ms": 100,
            "lease.heartbeat_timeout_ms": 300,
        }
    )
    with opened(daemon.lane) as (client, _):
        child = start_child("attach", daemon.lane)
        assert child.hear() == "attached"
        child.signal(signal.SIGSTOP)
        until_passed(1.0)
        assert len(client.list_tiers().owners) == 2
        child.signal(signal.SIGCONT)
        assert child.finish() == 0


def test_a_silent_remote_client_ends_by_its_heartbeat(start_daemon, start_child):
    """Elsewhere silence is death: after heartbeat_timeout its space is free, without quarantine."""
    daemon = start_daemon(
        settings={
            "lease.ttl_ms": 5000,
            "lease.renew_interval_ms": 100,
            "lease.heartbeat_timeout_ms": 600,
        }
    )
    with opened(daemon.lane) as (client, _):
        child = start_child("reserve", daemon.grpc)
        assert child.hear() == "reserved"
        until_passed(1.0)
        assert tier(client).slots_reserved_count == 8
        child.signal(signal.SIGSTOP)
        until(lambda: is_back(client), "silence ends the session", 4.0)


@pytest.mark.parametrize("way", WAYS)
def test_clients_get_a_typed_error_in_time_and_go_on_after_a_restart(start_daemon, way):
    """A dead daemon is an error within the deadline; a new one is found, and old handles are stale."""
    first = start_daemon()
    with opened(getattr(first, way), call_timeout_s=1.0, connect_timeout_s=1.0) as (client, namespace):
        namespace.put(keys(range(8)), content(range(8)))
        reservation = namespace.reserve(keys([50]))
        checksums = namespace.write(reservation, content([50]))
        lease = namespace.acquire(keys(range(8)))
        first.kill()
        for attempt in (
            lambda: namespace.lookup(keys([1])),
            lambda: namespace.put(keys([9]), content([9])),
            lambda: client.commit(reservation, checksums),
            client.list_tiers,
        ):
            started = time.monotonic()
            with pytest.raises((PeerUnavailableError, DeadlineError)):
                attempt()
            assert time.monotonic() - started < 2.0
        second = start_daemon(grpc_listen=first.grpc.removeprefix("grpc://"))
        until(lambda: can(lambda: namespace.put(keys([1, 60]), content([1, 60]))), "the client is back")
        check_stored(namespace, [1, 60])
        assert namespace.lookup(keys([2, 50])).outcomes.tolist() == [2, 2]
        with pytest.raises(StaleIncarnationError, match="again"):
            client.commit(reservation, checksums)
        assert lease is not None
        with pytest.raises(StaleIncarnationError):
            namespace.read(lease, np.zeros((8, BLOCK_BYTES), np.uint8))
        with pytest.raises(StaleIncarnationError):
            client.release([lease])
        assert second.stop() == 0


def can(attempt) -> bool:
    """Say whether a call succeeds now."""
    try:
        attempt()
    except (PeerUnavailableError, DeadlineError):
        return False
    return True


@pytest.mark.parametrize("way", WAYS)
def test_a_daemon_that_hangs_costs_a_client_its_deadline_and_no_more(daemon, way):
    """No answer is an error at the deadline; afterwards the same client works on."""
    with opened(getattr(daemon, way), call_timeout_s=0.5) as (client, namespace):
        namespace.put(keys([1]), content([1]))
        daemon.signal(signal.SIGSTOP)
        try:
            started = time.monotonic()
            with pytest.raises(DeadlineError):
                namespace.lookup(keys([1]))
            assert 0.4 < time.monotonic() - started < 2.0
        finally:
            daemon.signal(signal.SIGCONT)
        until(lambda: can(lambda: namespace.lookup(keys([1]))), "it answers again")
        assert namespace.put(keys([2]), content([2])).stored_count == 1
        check_stored(namespace, [1, 2])
        assert client.attachment.epoch == 1


@pytest.mark.parametrize(("ttl_ms", "renew_ms"), [(3000, 500), (800, 200)])
def test_a_daemon_that_stood_still_expires_nobody_who_was_alive(start_daemon, ttl_ms, renew_ms):
    """The stall of the daemon is added to every deadline, however short a lease is against it."""
    daemon = start_daemon(
        settings={
            "lease.ttl_ms": ttl_ms,
            "lease.renew_interval_ms": renew_ms,
            "lease.heartbeat_timeout_ms": ttl_ms,
        }
    )
    with (
        opened(daemon.lane) as (local_client, local),
        opened(daemon.grpc) as (remote_client, remote),
    ):
        numbers = {local: [1, 2], remote: [3, 4]}
        held = {namespace: namespace.reserve(keys(numbers[namespace])) for namespace in numbers}
        sums = {
            namespace: namespace.write(held[namespace], content(numbers[namespace])) for namespace in numbers
        }
        daemon.signal(signal.SIGSTOP)
        try:
            until_passed(ttl_ms / 1000 + 1.5)
        finally:
            daemon.signal(signal.SIGCONT)
        for client, namespace in ((local_client, local), (remote_client, remote)):
            assert client.commit(held[namespace], sums[namespace]) == 2
            assert client.attachment.epoch == 1
            check_stored(namespace, numbers[namespace])


def test_a_full_arena_refuses_with_a_hint_and_loses_nothing(start_daemon):
    """All leased: the put fails whole, every leased block stays, and after a release it succeeds."""
    daemon = start_daemon(capacity="1MiB", segment="256KiB")
    with opened(daemon.lane) as (client, namespace):
        numbers = range(16)
        namespace.put(keys(numbers), content(numbers))
        with namespace.lease(keys(numbers)) as view:
            assert view.prefix_count == 16
            with pytest.raises(ArenaFullError) as caught:
                namespace.put(keys([100]), content([100]))
            assert caught.value.retry_after_ms
            check_stored(namespace, numbers)
            assert tier(client).slots_committed_count == 16
        until(lambda: not client.list_tiers().owners[0].leases_count, "the lease is released")
        assert namespace.put(keys([100]), content([100])).stored_count == 1
        check_stored(namespace, [100])


def test_more_at_once_than_the_arena_holds_is_refused_whole(start_daemon):
    """A batch that can never fit evicts nobody."""
    daemon = start_daemon(capacity="1MiB", segment="256KiB")
    with opened(daemon.lane) as (_, namespace):
        namespace.put(keys(range(16)), content(range(16)))
        with pytest.raises(KvError) as caught:
            namespace.put(keys(range(100, 117)), content(range(100, 117)))
        assert caught.value.reason.name in {"ARENA_FULL", "QUOTA_EXCEEDED"}
        check_stored(namespace, range(16))


def test_a_dead_client_takes_nothing_of_its_siblings(daemon, start_child):
    """Another namespace, another process: the death of one changes nothing for the other."""
    with opened(daemon.lane) as (client, _):
        namespace = open_namespace(client, salt=b"sibling")
        namespace.put(keys(range(8)), content(range(8)))
        with namespace.lease(keys(range(8))) as view:
            child = start_child("reserve", daemon.lane)
            assert child.hear() == "reserved"
            child.kill()
            until(lambda: not tier(client).slots_reserved_count, "the dead has let go", AT_ONCE_S)
            assert [bytes(shown) for shown in view.views] == [row.tobytes() for row in content(range(8))]
