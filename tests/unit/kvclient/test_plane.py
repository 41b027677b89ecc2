"""How a client reads the arena of a remote daemon, and what it makes of the daemon's answers."""

import asyncio
import types

import numpy as np
import pytest

from kvclient import ClientSettings, plane
from kvclient._backends.aio import from_threads, run_blocking
from kvclient.one_sided import LazyOneSided
from kvclient.plane import plane_of
from kvclient.remote_authority import DaemonAuthority, reaches_by_rdma
from kvclient.touch_ahead import TouchAhead
from kvproto.kv.v1 import capabilities_service_pb2, transfer_service_pb2
from kvservice.core.errors import (
    DeadlineError,
    InvalidFieldError,
    MalformedError,
    PeerUnavailableError,
)
from kvservice.ports.methods import Method
from kvservice.transports.one_sided import EndpointSettings

ENDPOINT = "grpc://127.0.0.1:1"


class FakeDaemonCalls:
    """Answers calls with what a test put there, and remembers them."""

    def __init__(self) -> None:
        self.answers: dict[Method, object] = {}
        self.asked: list[tuple[Method, object]] = []

    def __call__(self, method, request, response_type):
        self.asked.append((method, request))
        answer = self.answers.get(method, response_type())
        if isinstance(answer, Exception):
            raise answer
        return answer

    def count(self, method: Method) -> int:
        return sum(asked is method for asked, _ in self.asked)


@pytest.fixture
def calls():
    """A daemon that answers everything with an empty message."""
    return FakeDaemonCalls()


def name_of(calls, settings: ClientSettings, *, tcp_address: str = "127.0.0.1:1") -> str:
    """Return the name of the transport that a session would read by."""
    attachment = types.SimpleNamespace(
        tcp_address=tcp_address, session_token=b"token", epoch=1, daemon_incarnation=b"life"
    )
    endpoint = types.SimpleNamespace(transport="ucx", close=lambda: None)
    found = plane_of(
        attachment,
        settings,
        touch_ahead=TouchAhead(),
        one_sided=LazyOneSided(settings.one_sided, endpoint),
        call=calls,
    )
    try:
        return found.transport.capabilities.name
    finally:
        found.close()


@pytest.mark.parametrize(
    ("wish", "devices", "name"),
    [
        ("", (), "tcp"),
        ("", ("mlx5_0",), "ucx"),
        ("tcp", ("mlx5_0",), "tcp"),
        ("ucx", (), "ucx"),
    ],
)
def test_one_sided_reads_are_for_rdma_or_by_name(calls, monkeypatch, wish, devices, name):
    """Over tcp alone sockets are faster; and a session costs no call for the choice."""
    monkeypatch.setattr(plane, "rdma_devices", lambda: devices)
    assert name_of(calls, ClientSettings(ENDPOINT, arena_transport=wish)) == name
    assert not calls.asked


def test_a_daemon_without_any_data_plane_is_named(calls):
    """There is no way to the bytes, and the error says what to do."""
    with pytest.raises(PeerUnavailableError, match="no tcp data plane"):
        name_of(calls, ClientSettings(ENDPOINT), tcp_address="")


@pytest.mark.parametrize("wish", ["rdma", "ucx "])
def test_a_wish_that_nobody_can_grant_is_refused(wish):
    """A misspelt transport must not be tcp in silence."""
    with pytest.raises(InvalidFieldError, match="arena_transport is"):
        ClientSettings(ENDPOINT, arena_transport=wish)
    with pytest.raises(InvalidFieldError, match="arena_transport is 'ucx'"):
        ClientSettings(ENDPOINT, arena_transport="ucx", one_sided=EndpointSettings(transport=""))


def test_the_daemon_says_whether_it_is_reached_by_rdma(calls):
    """By the devices beside the transport's name; one that does not answer is not."""
    answer = capabilities_service_pb2.GetCapabilitiesResponse()
    answer.transports.add(name="tcp", address="host:1")
    entry = answer.transports.add(name="ucx")
    calls.answers[Method.GET_CAPABILITIES] = answer
    assert not reaches_by_rdma(calls, "ucx")
    entry.address = "mlx5_0"
    assert reaches_by_rdma(calls, "ucx")
    assert not reaches_by_rdma(calls, "other")
    calls.answers[Method.GET_CAPABILITIES] = PeerUnavailableError("gone")
    assert not reaches_by_rdma(calls, "ucx")


def granted(**changes) -> transfer_service_pb2.BeginTransferResponse:
    """Return a good answer for two slots, with changes."""
    fields = {
        "transfer_id": 9,
        "segment_indexes": np.zeros(2, np.uint32).tobytes(),
        "offsets_bytes": np.array([0, 512], np.uint64).tobytes(),
        "lengths_bytes": np.array([512, 512], np.uint64).tobytes(),
        "checksums": np.array([1, 2], np.uint32).tobytes(),
        "remaining": {"seconds": 3},
    }
    answer = transfer_service_pb2.BeginTransferResponse(**(fields | changes))
    answer.segments.add(base_address=4096, size_bytes=4096, memory_kind=1).ways.add(
        transport="ucx", address=b"address", key=b"key"
    )
    return answer


def test_a_grant_is_what_the_daemon_answered(calls):
    """And its deadline counts from when it was asked for."""
    calls.answers[Method.BEGIN_TRANSFER] = granted()
    authority = DaemonAuthority(calls)
    grant = authority.begin_read(lease_id=5, slot_indexes=np.array([3, 1]), timeout_s=2.0)
    assert (grant.transfer_id, grant.offsets.tolist(), grant.lengths.tolist()) == (9, [0, 512], [512, 512])
    assert grant.checksums.tolist() == [1, 2]
    assert grant.segments[0].base_address == 4096
    ((_, request),) = calls.asked
    assert (request.capability_id, request.is_write, request.timeout.seconds) == (5, False, 2)
    assert np.frombuffer(request.slot_indexes, np.uint32).tolist() == [3, 1]
    authority.end(9, checksums=np.array([7], np.uint32), is_settled=True)
    assert calls.asked[-1][1].checksums == np.array([7], np.uint32).tobytes()


@pytest.mark.parametrize(
    "changes",
    [
        {"segment_indexes": b"\0" * 4},
        {"offsets_bytes": b"\0" * 17},
        {"lengths_bytes": b""},
        {"checksums": b"\0" * 4},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_a_grant_that_contradicts_itself_is_refused_and_ended(calls, changes):
    """Nobody posts what it says, and the slots are not pinned for it any longer."""
    calls.answers[Method.BEGIN_TRANSFER] = granted(**changes)
    with pytest.raises(MalformedError, match=next(iter(changes))):
        DaemonAuthority(calls).begin_write(reservation_id=5, slot_indexes=np.arange(2), timeout_s=2.0)
    assert calls.count(Method.END_TRANSFER) == 1
    assert calls.asked[-1][1].is_settled


def test_a_thread_calls_while_the_loop_goes_on():
    """It waits for the loop, not for ever, and learns when the call was cancelled."""
    ended = []

    async def answer(word: str, *, twice: bool) -> str:
        await asyncio.sleep(0)
        return word * 2 if twice else word

    async def hang() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.append("hang")

    async def cancelled() -> None:
        raise asyncio.CancelledError

    async def run() -> None:
        call = from_threads(answer, 5.0)
        assert await run_blocking(lambda: call("word", twice=True)) == "wordword"
        with pytest.raises(DeadlineError):
            await run_blocking(from_threads(hang, 0.05))
        with pytest.raises(PeerUnavailableError):
            await run_blocking(from_threads(cancelled, 5.0))

    asyncio.run(run())
    assert ended == ["hang"]
