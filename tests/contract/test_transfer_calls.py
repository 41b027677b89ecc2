"""BeginTransfer and EndTransfer over both edges, of daemons that lend their arena and that do not."""

from __future__ import annotations

import contextlib
from pathlib import Path

import numpy as np
import pytest

from kvservice.native import ucx
from kvservice.ports.methods import Method
from tests.contract.lifecycle_contract import BATCH_SIZE, INVALID_FIELD, NOT_OWNER, check_refused
from tests.contract.lifecycle_edges import BLOCK_BYTES, Engine, GrpcPeer, House, LanePeer, RefusedError
from tests.integration.daemon_process import until

NO_WAY = ("FAILED_PRECONDITION", "NO_WAY")
LEASE_EXPIRED = ("FAILED_PRECONDITION", "LEASE_EXPIRED")
LENDING = '[ucx]\nenabled = "on"\ndevices = "lo"\n'
EDGES = {"lane": LanePeer, "grpc": GrpcPeer}


class Neighbourhood:
    """Daemons, and engines connected to them; all of them end with the test."""

    def __init__(self, monkeypatch, folder: Path, stack: contextlib.ExitStack) -> None:
        self._new_house = lambda config: House(monkeypatch, folder, config=config)
        self._stack = stack

    def house(self, config: str = "") -> House:
        """Start a daemon."""
        house = self._new_house(config)
        self._stack.callback(house.close)
        return house

    def engine(self, house: House, edge: str) -> Engine:
        """Connect an engine, with a namespace."""
        peer = EDGES[edge](house)
        self._stack.callback(peer.close)
        engine = Engine(peer)
        engine.open()
        return engine


@pytest.fixture
def start(tmp_path, monkeypatch):
    """Return what starts daemons and engines."""
    with contextlib.ExitStack() as stack:
        yield Neighbourhood(monkeypatch, tmp_path, stack)


@pytest.fixture(params=EDGES)
def edge(request):
    """Each edge."""
    return request.param


@pytest.fixture
def lending(start):
    """A daemon that lends its arena."""
    if ucx.why_not():
        pytest.skip(ucx.why_not())
    return start.house(LENDING)


def indexes(*numbers: int) -> bytes:
    """Return packed slot indexes."""
    return np.array(numbers, np.uint32).tobytes()


def begin(engine: Engine, capability_id: int, *numbers: int, **fields):
    """Begin a transfer of some slots."""
    return engine.peer.call(
        Method.BEGIN_TRANSFER, capability_id=capability_id, slot_indexes=indexes(*numbers), **fields
    )


def end(engine: Engine, transfer_id: int, **fields):
    """End it."""
    return engine.peer.call(Method.END_TRANSFER, transfer_id=transfer_id, **fields)


def test_a_begun_read_says_where_each_slot_is(start, lending, edge):
    """The segments that are named, each once, with ways; and per slot its place, length and checksum."""
    engine = start.engine(lending, edge)
    engine.put([1, 2, 3])
    lease = engine.acquire([1, 2, 3]).lease
    answer = begin(engine, lease.lease_id, 2, 0, timeout={"seconds": 4})
    granules = np.frombuffer(lease.slots.granules, np.uint32)[[2, 0]]
    assert (
        np.frombuffer(answer.offsets_bytes, np.uint64).tolist() == (granules.astype(np.uint64) * 512).tolist()
    )
    assert np.frombuffer(answer.lengths_bytes, np.uint64).tolist() == [BLOCK_BYTES] * 2
    assert np.frombuffer(answer.segment_indexes, np.uint32).tolist() == [0, 0]
    assert answer.checksums == np.frombuffer(lease.slots.checksums, np.uint32)[[2, 0]].tobytes()
    assert answer.remaining.seconds == 4
    (segment,) = answer.segments
    assert {way.transport for way in segment.ways} == {"ucx"}
    assert int(granules.max()) * 512 + BLOCK_BYTES <= segment.size_bytes
    for _ in range(2):
        end(engine, answer.transfer_id)


def test_the_two_calls_refuse_by_name(start, lending, edge):
    """Whose it is, what it names, and whether it still holds."""
    engine, other = start.engine(lending, edge), start.engine(lending, edge)
    engine.put([1])
    lease = engine.acquire([1]).lease
    check_refused(BATCH_SIZE, begin, engine, lease.lease_id)
    check_refused(INVALID_FIELD, begin, engine, lease.lease_id, 1)
    check_refused(NOT_OWNER, begin, other, lease.lease_id, 0)
    odd = {"capability_id": lease.lease_id, "slot_indexes": b"odd"}
    check_refused(INVALID_FIELD, engine.peer.call, Method.BEGIN_TRANSFER, says="slot_indexes", **odd)
    answer = begin(engine, lease.lease_id, 0)
    check_refused(NOT_OWNER, end, other, answer.transfer_id)
    check_refused(INVALID_FIELD, end, engine, answer.transfer_id, checksums=b"odd", says="checksums")
    engine.release(lease.lease_id)
    check_refused(LEASE_EXPIRED, end, engine, answer.transfer_id)
    check_refused(LEASE_EXPIRED, begin, engine, lease.lease_id, 0)
    check_refused(INVALID_FIELD, end, engine, answer.transfer_id + 1)


def test_writes_are_for_local_sessions(start, lending):
    """Over gRPC alone the daemon does not see a process die."""
    remote, local = start.engine(lending, "grpc"), start.engine(lending, "lane")
    reservation = remote.reserve([1])
    check_refused(NO_WAY, begin, remote, reservation.reservation_id, 0, is_write=True, says="over tcp")
    assert remote.tier().slots_reserved_count == 1
    reservation = local.reserve([2])
    answer = begin(local, reservation.reservation_id, 0, is_write=True)
    assert answer.checksums == b""
    end(local, answer.transfer_id, checksums=np.array([7], np.uint32).tobytes())
    assert local.commit(reservation, [7]).keys_count == 1


def test_a_failed_write_is_cut_off(start, lending):
    """The lender is ended for it, and the slots are free then; a new one lends the arena again."""
    engine = start.engine(lending, "lane")
    engine.put([5])
    lease = engine.acquire([5]).lease
    old = begin(engine, lease.lease_id, 0)
    reservation = engine.reserve([1])
    answer = begin(engine, reservation.reservation_id, 0, is_write=True)
    end(engine, answer.transfer_id)
    engine.abort(reservation.reservation_id)
    until(lambda: not engine.tier().slots_quarantined_count, "the slots are free")
    fresh = []

    def has_begun() -> bool:
        with contextlib.suppress(RefusedError):
            fresh.append(begin(engine, lease.lease_id, 0))
        return bool(fresh)

    until(has_begun, "the arena is lent again")
    assert fresh[0].segments[0].ways[0].address != old.segments[0].ways[0].address


def test_a_daemon_that_does_not_lend_says_so(start, edge):
    """A client then uses tcp."""
    engine = start.engine(start.house(), edge)
    engine.put([1])
    lease = engine.acquire([1]).lease
    check_refused(NO_WAY, begin, engine, lease.lease_id, 0, says="does not lend")
    check_refused(INVALID_FIELD, end, engine, lease.lease_id)
    assert engine.release(lease.lease_id)
