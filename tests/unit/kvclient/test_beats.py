"""The background beats: renewals, revocations, and reports of what was read."""

import numpy as np
import pytest

from kvclient import LeaseExpiredError, ReservationExpiredError
from kvproto.kv.v1 import session_service_pb2
from kvservice.core.slots import GRANULE_BYTES
from kvservice.ports.methods import Method
from tests.unit.kvclient.conftest import BLOCK_BYTES, blocks_of, settings_of
from tests.unit.kvclient.fake_daemon import SEGMENT


@pytest.fixture
def eager_daemon(daemon):
    """Ask clients to beat a hundred times a second."""
    daemon.renew_interval_s = 0.01
    return daemon


@pytest.fixture
def namespace(daemon, flavour, identity, part):
    """Open a namespace of one part."""
    client = flavour.connect(settings_of(daemon))
    return flavour.run(client.open_namespace, identity, [part])


def test_what_is_held_is_renewed_in_the_background(eager_daemon, namespace, flavour, rng):
    """One message names every lease and reservation; renewing moves the holder's own deadline."""
    keys = [rng.randbytes(32) for _ in range(2)]
    flavour.run(namespace.put, keys[:1], blocks_of(rng, 1))
    eager_daemon.ttl_s = 0.0
    lease = flavour.run(namespace.acquire, keys[:1])
    reservation = flavour.run(namespace.reserve, keys[1:])
    eager_daemon.ttl_s = 10.0
    flavour.wait(eager_daemon.wait_for, Method.HEARTBEAT, eager_daemon.count(Method.HEARTBEAT) + 3)
    beat = eager_daemon.last(Method.HEARTBEAT)
    assert list(beat.lease_ids) == [lease.lease_id]
    assert list(beat.reservation_ids) == [reservation.reservation_id]
    assert flavour.run(namespace.read, lease, bytearray(BLOCK_BYTES)) == BLOCK_BYTES


def test_what_was_read_locally_is_reported(eager_daemon, namespace, flavour, rng):
    """Directory reads leave no trace at the daemon but these hints: segment and granule of each block."""
    keys = [rng.randbytes(32) for _ in range(3)]
    flavour.run(namespace.put, keys, blocks_of(rng, 3))
    flavour.run(namespace.get, keys[::2], bytearray(2 * BLOCK_BYTES))
    flavour.wait(eager_daemon.wait_for, Method.HEARTBEAT, eager_daemon.count(Method.HEARTBEAT) + 3)
    reports = [
        request
        for method, request in eager_daemon.calls
        if method == Method.HEARTBEAT and request.touched_segments
    ]
    step = BLOCK_BYTES // GRANULE_BYTES
    assert [list(report.touched_segments) for report in reports] == [[SEGMENT, SEGMENT]]
    assert list(reports[0].touched_granules) == [0, 2 * step]


def test_a_revocation_without_a_copy_is_acknowledged_at_once(daemon, namespace, flavour):
    """The beat after a revocation acknowledges it, without waiting for the interval."""
    daemon.revoked_ids = [99]
    daemon.push(session_service_pb2.StreamResponse(revoked_ids=[99]))
    flavour.run(namespace.lookup, bytes(32))
    flavour.wait(daemon.wait_for, Method.HEARTBEAT)
    assert list(daemon.last(Method.HEARTBEAT).acknowledged_ids) == [99]


def test_a_revoked_view_is_acknowledged_after_it_ends(daemon, namespace, flavour, rng):
    """While a view is open this process may look at the memory, so the word waits for its end."""
    keys = [rng.randbytes(32)]
    flavour.run(namespace.put, keys, blocks_of(rng, 1))
    view = flavour.enter(namespace.lease(keys))
    lease_id = daemon.life.next_id
    daemon.revoked_ids = [lease_id]
    daemon.push(session_service_pb2.StreamResponse(revoked_ids=[lease_id]))
    flavour.run(namespace.lookup, keys)
    with pytest.raises(LeaseExpiredError, match="revoked"):
        flavour.run(view.check)
    assert daemon.count(Method.HEARTBEAT) == 0
    with pytest.raises(LeaseExpiredError):
        flavour.leave(view)
    flavour.wait(daemon.wait_for, Method.HEARTBEAT)
    assert list(daemon.last(Method.HEARTBEAT).acknowledged_ids) == [lease_id]


def test_a_put_under_a_revoked_reservation_copies_nothing(daemon, namespace, flavour, rng):
    """The slots may belong to somebody else by now."""
    keys = [rng.randbytes(32)]
    reservation = flavour.run(namespace.reserve, keys)
    daemon.push(session_service_pb2.StreamResponse(revoked_ids=[reservation.reservation_id]))
    flavour.run(namespace.lookup, keys)
    before = bytes(daemon.life.segment.memory.view)
    with pytest.raises(ReservationExpiredError, match="revoked"):
        flavour.run(namespace.write, reservation, np.full(BLOCK_BYTES, 7, np.uint8))
    assert bytes(daemon.life.segment.memory.view) == before


def test_draining_is_told(daemon, flavour):
    """An engine may look elsewhere before its puts are refused."""
    client = flavour.connect(settings_of(daemon))
    assert not client.is_draining
    daemon.push(session_service_pb2.StreamResponse(draining=True))
    flavour.run(client.list_tiers)
    assert client.is_draining


def test_beats_go_on_after_a_restart(eager_daemon, namespace, flavour):
    """The ticker finds a restarted daemon by itself; nothing of the old life is renewed."""
    flavour.run(namespace.reserve, bytes(32))
    eager_daemon.restart()
    eager_daemon.calls.clear()
    flavour.wait(eager_daemon.wait_for, Method.HEARTBEAT, 2)
    assert list(eager_daemon.last(Method.HEARTBEAT).reservation_ids) == []
