"""The tcp data plane against peers that stall, vanish, or speak nonsense."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvproto.kv.v1.local_lane_pb2 import TransferRequest, TransferResponse
from kvservice.core.errors import (
    BatchSizeError,
    ChecksumMismatchError,
    DeadlineError,
    DrainingError,
    InvariantError,
    KvError,
    LimitReachedError,
    MalformedError,
    PeerUnavailableError,
    UnknownMethodError,
)
from kvservice.ports.methods import Method
from kvservice.transports.frames import (
    Frame,
    FrameKind,
    FrameReader,
    decode_error,
    encode,
    encode_error,
)
from kvservice.transports.tcp import TcpServer, TcpTransport
from kvservice.transports.tcp.region import views_of
from tests.contract.transport_contract import a_read, a_write, slots_of
from tests.contract.transport_fakes import TOKEN, FakeOwner

BOUND_S = 10.0
"""No wait of these tests comes near it unless something is broken."""


@contextlib.contextmanager
def serving(**limits):
    """An owner behind a server; both end with the block."""
    owner = FakeOwner()
    server = TcpServer("127.0.0.1:0", owner, **limits)
    address = server.start()
    try:
        yield owner, server, address
    finally:
        server.stop(drain_s=0.0)
        assert owner.wait_until_all_ended(BOUND_S)
        assert set(owner.ended.values()) <= {1}
        owner.close()


@contextlib.contextmanager
def transport_to(address, **options):
    """A transport that is closed with the block."""
    transport = TcpTransport(address, lambda: TOKEN, **options)
    try:
        yield transport
    finally:
        transport.close()


class Peer:
    """The other end of a socket, speaking frames by hand."""

    def __init__(self, connection):
        self.socket = connection
        self.socket.settimeout(BOUND_S)
        self._reader = FrameReader()
        self._frames = []

    @classmethod
    def connected_to(cls, address):
        host, port = address.rsplit(":", 1)
        return cls(socket.create_connection((host, int(port)), timeout=BOUND_S))

    def request(self, method, capability_id, indexes, call_id=1, deadline_ms=0):
        request = TransferRequest(session_token=TOKEN, capability_id=capability_id, slot_indexes=indexes)
        body = request.SerializeToString()
        self.socket.sendall(encode(FrameKind.REQUEST, method, call_id, deadline_ms, body))

    def frame(self):
        """Return the next frame, or None once the other end has hung up."""
        while not self._frames:
            try:
                received = self.socket.recv(65536)
            except ConnectionResetError:
                return None
            if not received:
                return None
            self._frames += self._reader.feed(received)
        return self._frames.pop(0)

    def error(self):
        """Return the error that comes next."""
        frame = self.frame()
        assert frame is not None
        assert frame.kind is FrameKind.ERROR
        return decode_error(frame.body)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.socket.close()


@contextlib.contextmanager
def fake_server(*scripts):
    """A server that answers its connections with scripts, one after the other."""
    listener = socket.create_server(("127.0.0.1", 0))
    failures = []

    def serve():
        for script in scripts:
            connection, _ = listener.accept()
            with Peer(connection) as peer:
                try:
                    script(peer)
                except (OSError, KvError, AssertionError, AttributeError) as failure:
                    failures.append(failure)

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield f"127.0.0.1:{listener.getsockname()[1]}"
    finally:
        thread.join(BOUND_S)
        listener.close()
    assert not failures


# ---- servers that fail their client


@pytest.mark.parametrize("make", [a_write, a_read])
def test_a_peer_that_never_answers_costs_the_deadline_and_no_more(make):
    """A stopped peer is a DeadlineError at the transfer's own time-out."""
    owner = FakeOwner()
    moved, capability, _ = make(owner, [[1024]], timeout_s=0.15)
    listener = socket.create_server(("127.0.0.1", 0))  # The kernel connects; nobody answers.
    address = f"127.0.0.1:{listener.getsockname()[1]}"
    with transport_to(address) as transport:
        started_s = time.monotonic()
        with pytest.raises(DeadlineError):
            (transport.write if capability.is_write else transport.read)(moved)
        assert 0.1 < time.monotonic() - started_s < 2.0
    listener.close()
    owner.close()


def test_nobody_listening_is_a_lost_peer():
    """A refused connection is told at once."""
    owner = FakeOwner()
    moved, _, _ = a_write(owner, [[1024]])
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"127.0.0.1:{listener.getsockname()[1]}"
    with transport_to(address) as transport, pytest.raises(PeerUnavailableError):
        transport.write(moved)
    owner.close()


def test_a_server_that_stopped_is_a_lost_peer_and_one_that_is_back_serves():
    """A pooled connection to a server that went is dropped; the next one is opened anew."""
    owner = FakeOwner()
    server = TcpServer("127.0.0.1:0", owner)
    address = server.start()
    with transport_to(address) as transport:
        transport.write(a_write(owner, [[1024]])[0])
        server.stop()
        with pytest.raises(PeerUnavailableError):
            transport.write(a_write(owner, [[1024]])[0])
        server = TcpServer(address, owner)
        server.start()
        moved, capability, buffers = a_write(owner, [[1024]])
        transport.write(moved)
        assert slots_of(owner, capability) == buffers.blocks()
    server.stop()
    owner.close()


def _answer(body, *, kind=FrameKind.RESPONSE, call_id=None, tail=b""):
    def script(peer):
        request = peer.frame()
        answer_id = request.call_id if call_id is None else call_id
        peer.socket.sendall(encode(kind, request.method, answer_id, 0, body) + tail)

    return script


_HEAD = TransferResponse(payload_bytes=1024).SerializeToString()


@pytest.mark.parametrize(
    ("script", "error_type"),
    [
        (lambda peer: peer.frame(), PeerUnavailableError),
        (lambda _: None, PeerUnavailableError),
        (_answer(_HEAD), PeerUnavailableError),
        (_answer(_HEAD, tail=bytes(700)), PeerUnavailableError),
        (_answer(_HEAD, tail=bytes(1024)), PeerUnavailableError),
        (_answer(_HEAD, tail=bytes(1024) + b"\xff" * 40), MalformedError),
        (_answer(_HEAD, call_id=99), MalformedError),
        (_answer(_HEAD, kind=FrameKind.STREAM), MalformedError),
        (_answer(b"\xff\xff"), MalformedError),
        (lambda peer: peer.frame() and peer.socket.sendall(b"HTTP/1.1 400 Bad\r\n\r\n"), MalformedError),
        (_answer(encode_error(DrainingError("no")), kind=FrameKind.ERROR), DrainingError),
        (_answer(encode_error(DrainingError("no")), kind=FrameKind.ERROR, call_id=0), DrainingError),
        (_answer(b"\xff\xff", kind=FrameKind.ERROR), KvError),
    ],
    ids=[
        "hangs up after the request",
        "hangs up at once",
        "hangs up before the payload",
        "hangs up in the payload",
        "hangs up before the last word",
        "garbage for a last word",
        "another call",
        "another kind",
        "no message",
        "no frame",
        "an error",
        "an error of the connection",
        "an unreadable error",
    ],
)
def test_a_server_that_breaks_the_protocol_fails_one_transfer(script, error_type):
    """A read ends in a typed error, and the next one gets a connection that is in step."""

    def serve_well(peer):
        request = peer.frame()
        answer = encode(FrameKind.RESPONSE, request.method, request.call_id, 0, _HEAD)
        last = encode(FrameKind.RESPONSE, request.method, request.call_id, 0, b"")
        peer.socket.sendall(answer + b"w" * 1024 + last)
        peer.frame()  # Stays until the client hangs up.

    owner = FakeOwner()
    with fake_server(script, serve_well) as address, transport_to(address) as transport:
        with pytest.raises(error_type):
            transport.read(a_read(owner, [[1024]], has_checksums=False)[0])
        moved, _, buffers = a_read(owner, [[1024]], has_checksums=False)
        try:
            transport.read(moved)
        except PeerUnavailableError:
            # After its error the first connection was kept, and broke only now.
            transport.read(moved)
        assert buffers.blocks() == [b"w" * 1024]
        transport.close()
    owner.close()


def test_a_reply_with_other_checksums_than_were_sent_is_a_mismatch():
    """A write is good only if what arrived has the checksum of what was sent."""

    def script(peer):
        request = peer.frame()
        peer.socket.sendall(encode(FrameKind.RESPONSE, request.method, request.call_id, 0, _HEAD))
        received = 0
        while received < 1024:
            received += len(peer.socket.recv(1024 - received))
        body = TransferResponse(checksums=[1]).SerializeToString()
        peer.socket.sendall(encode(FrameKind.RESPONSE, request.method, request.call_id, 0, body))
        peer.frame()

    owner = FakeOwner()
    with fake_server(script) as address, transport_to(address) as transport:
        with pytest.raises(ChecksumMismatchError):
            transport.write(a_write(owner, [[1024]])[0])
        transport.close()
    owner.close()


def test_a_write_that_is_cut_off_tells_the_servers_reason():
    """The error that a server sends before it hangs up, mid-payload, reaches the caller."""

    def script(peer):
        request = peer.frame()
        head = TransferResponse(payload_bytes=4 << 20).SerializeToString()
        error = encode_error(DrainingError("stopping"))
        peer.socket.sendall(encode(FrameKind.RESPONSE, request.method, request.call_id, 0, head))
        peer.socket.recv(1)
        peer.socket.sendall(encode(FrameKind.ERROR, request.method, request.call_id, 0, error))

    owner = FakeOwner()
    with fake_server(script) as address, transport_to(address) as transport, pytest.raises(DrainingError):
        transport.write(a_write(owner, [[4 << 20]])[0])
    owner.close()


def test_more_transfers_than_connections_wait_their_turn():
    """The pool is bounded: a transfer without a connection waits, until its deadline."""
    with serving() as (owner, _, address), transport_to(address, connections_count=1) as transport:
        entered, leave = threading.Event(), threading.Event()
        late, _, _ = a_write(owner, [[1024]], timeout_s=0.05)
        moved, capability, buffers = a_write(owner, [[1024]])

        def hold():
            entered.set()
            assert leave.wait(BOUND_S)

        owner.on_begin = hold
        holder = threading.Thread(target=transport.write, args=(moved,))
        holder.start()
        assert entered.wait(BOUND_S)
        with pytest.raises(DeadlineError):
            transport.write(late)
        leave.set()
        holder.join(BOUND_S)
        assert slots_of(owner, capability) == buffers.blocks()


def test_closing_a_transport_fails_its_running_transfer():
    """`close` cuts a transfer that another thread waits in, as a lost peer."""
    with serving() as (owner, _, address), transport_to(address) as transport:
        entered, leave = threading.Event(), threading.Event()

        def hold():
            entered.set()
            assert leave.wait(BOUND_S)

        owner.on_begin = hold
        moved, _, _ = a_write(owner, [[1024]])
        failures = []

        def write():
            try:
                transport.write(moved)
            except KvError as failure:
                failures.append(type(failure))

        writer = threading.Thread(target=write)
        writer.start()
        assert entered.wait(BOUND_S)
        transport.close()
        writer.join(BOUND_S)
        leave.set()
        assert failures == [PeerUnavailableError]


# ---- clients that fail their server


def _half_a_write(owner, address):
    """Return a peer in the middle of the payload of a write."""
    number, _ = owner.reserve([1 << 20])
    peer = Peer.connected_to(address)
    peer.request(Method.WRITE_SLOTS, number, [0])
    head = TransferResponse.FromString(peer.frame().body)
    assert head.payload_bytes == 1 << 20
    peer.socket.sendall(bytes(1000))
    return peer


def test_a_writer_that_vanishes_gives_its_slots_back():
    """The transfer ends, as failed, when its connection breaks mid-payload."""
    with serving() as (owner, _, address):
        _half_a_write(owner, address).socket.close()
        assert owner.wait_until_all_ended(BOUND_S)
        assert list(owner.ended.values()) == [1]


def test_a_reader_that_vanishes_gives_its_slots_back():
    """The transfer ends when its reader hangs up without taking the payload."""
    with serving() as (owner, _, address):
        number = a_read(owner, [[1 << 20]] * 6)[0].capability_id
        with Peer.connected_to(address) as peer:
            peer.request(Method.READ_SLOTS, number, list(range(6)))
            assert peer.socket.recv(100)
            linger = struct.pack("ii", 1, 0)
            peer.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
        assert owner.wait_until_all_ended(BOUND_S)
        assert list(owner.ended.values()) == [1]


def test_a_silent_writer_is_cut_and_told_why():
    """A peer that stalls mid-payload holds its slots and its thread for a bounded time."""
    with serving(silence_timeout_s=0.1) as (owner, _, address), _half_a_write(owner, address) as peer:
        assert isinstance(peer.error(), PeerUnavailableError)
        assert peer.frame() is None
        assert owner.wait_until_all_ended(BOUND_S)


def test_a_silent_reader_is_cut():
    """A peer that asks and never takes the payload holds nothing past the bound."""
    with serving(silence_timeout_s=0.1) as (owner, _, address), socket.socket() as slow:
        number = a_read(owner, [[1 << 20]] * 6)[0].capability_id
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        host, port = address.split(":")
        slow.connect((host, int(port)))
        Peer(slow).request(Method.READ_SLOTS, number, list(range(6)))
        with owner.all_ended:
            assert owner.all_ended.wait_for(lambda: owner.ended.total() == 1, BOUND_S)


def test_a_transfer_ends_at_the_clients_deadline():
    """The deadline of the request bounds the server too, however lively the peer is."""
    with serving() as (owner, _, address), Peer.connected_to(address) as peer:
        number, _ = owner.reserve([1 << 20])
        peer.request(Method.WRITE_SLOTS, number, [0], deadline_ms=100)
        peer.frame()
        assert isinstance(peer.error(), DeadlineError)


def test_no_deadline_is_longer_than_the_servers():
    """A client that asks for no bound gets the server's own."""
    with serving(max_transfer_s=0.1) as (owner, _, address), _half_a_write(owner, address) as peer:
        assert isinstance(peer.error(), DeadlineError)


def test_an_idle_connection_is_closed():
    """A connection that asks nothing goes after the idle time-out."""
    with serving(idle_timeout_s=0.05) as (_, _, address), Peer.connected_to(address) as peer:
        assert peer.frame() is None


def test_a_request_that_stops_halfway_is_closed():
    """A truncated frame holds its thread no longer than an idle connection does."""
    with serving(idle_timeout_s=0.1) as (_, _, address), Peer.connected_to(address) as peer:
        peer.socket.sendall(encode(FrameKind.REQUEST, Method.READ_SLOTS, 1, 0, bytes(100))[:40])
        assert peer.frame() is None


@pytest.mark.parametrize(
    ("frame", "error_type", "is_kept"),
    [
        (Frame(FrameKind.REQUEST, Method.LOOKUP, 1, 0, b"\x18\x00"), UnknownMethodError, True),
        (Frame(FrameKind.REQUEST, 999, 1, 0, b"\x18\x00"), UnknownMethodError, True),
        (Frame(FrameKind.REQUEST, Method.READ_SLOTS, 1, 0, b""), BatchSizeError, True),
        (Frame(FrameKind.RESPONSE, Method.READ_SLOTS, 1, 0, b""), MalformedError, False),
        (Frame(FrameKind.REQUEST, Method.READ_SLOTS, 1, 0, b"\xff\xff"), MalformedError, False),
        (Frame(FrameKind.REQUEST, Method.READ_SLOTS, 1, 0, bytes((1 << 20) + 1)), MalformedError, False),
    ],
    ids=["elsewhere", "nowhere", "no slots", "no request", "no message", "too large"],
)
def test_a_wrong_request_gets_its_error(frame, error_type, is_kept):
    """A wrong question is answered; only an unreadable one costs the connection."""
    with serving() as (owner, _, address), Peer.connected_to(address) as peer:
        whole = encode(frame.kind, frame.method, frame.call_id, frame.deadline_ms, frame.body)
        with contextlib.suppress(ConnectionError):  # It may hang up before it has all.
            peer.socket.sendall(whole)
        assert isinstance(peer.error(), error_type)
        if not is_kept:
            assert peer.frame() is None
            return
        number, _ = owner.reserve([1])
        peer.request(Method.WRITE_SLOTS, number, [0])
        assert peer.frame().kind is FrameKind.RESPONSE


@settings(max_examples=30, deadline=None)
@given(
    garbage=st.one_of(
        st.binary(min_size=1, max_size=200),
        st.builds(
            lambda kind, method, body: encode(kind, method, 1, 0, body),
            st.sampled_from(FrameKind),
            st.sampled_from(Method),
            st.binary(max_size=60),
        ),
    )
)
def test_nonsense_harms_nobody_else(server_of_all, garbage):
    """Whatever bytes come, the answer is an ERROR or a closed connection, and other
    connections are served on.
    """
    owner, address, transport = server_of_all
    with Peer.connected_to(address) as peer:
        peer.socket.sendall(garbage)
        with contextlib.suppress(OSError):  # The server may have hung up already.
            peer.socket.shutdown(socket.SHUT_WR)
        while (frame := peer.frame()) is not None:
            assert frame.kind is FrameKind.ERROR
    moved, capability, buffers = a_write(owner, [[600]])
    transport.write(moved)
    assert slots_of(owner, capability) == buffers.blocks()


@pytest.fixture(scope="module")
def server_of_all():
    """One server and one transport for all examples."""
    with serving() as (owner, _, address), transport_to(address) as transport:
        yield owner, address, transport


def test_connections_are_bounded():
    """One connection too many is refused with a retry hint; the others stay."""
    with serving(max_connections_count=1) as (owner, server, address):
        with transport_to(address) as transport:
            transport.write(a_write(owner, [[10]])[0])
            with Peer.connected_to(address) as peer:
                refusal = peer.error()
                assert isinstance(refusal, LimitReachedError)
                assert refusal.retry_after_ms
            with transport_to(address) as other, pytest.raises(LimitReachedError):
                other.write(a_write(owner, [[10]])[0])
            transport.write(a_write(owner, [[10]])[0])
        assert server.connections_count <= 1


def test_a_bug_of_the_authority_is_told_and_does_not_stop_the_server(caplog):
    """An unforeseen exception ends its connection with INVARIANT, and is logged."""
    with serving() as (owner, server, address), transport_to(address) as transport:
        owner.on_begin = lambda: {}["a bug"]
        with pytest.raises(InvariantError):
            transport.write(a_write(owner, [[10]])[0])
        owner.on_begin = lambda: None
        transport.write(a_write(owner, [[10]])[0])
    assert server.failures_count == 1
    assert "tcp connection failed" in caplog.text


# ---- stopping


def test_stopping_lets_a_running_transfer_end():
    """`stop` closes what is idle at once, and waits for a transfer that runs."""
    with serving() as (owner, server, address), transport_to(address) as transport:
        with Peer.connected_to(address) as idle:
            entered, leave = threading.Event(), threading.Event()

            def hold():
                entered.set()
                assert leave.wait(BOUND_S)

            owner.on_begin = hold
            moved, capability, buffers = a_write(owner, [[1 << 20]])
            writer = threading.Thread(target=transport.write, args=(moved,))
            writer.start()
            assert entered.wait(BOUND_S)
            stopper = threading.Thread(target=server.stop)
            stopper.start()
            assert idle.frame() is None  # So the stop has begun.
            leave.set()
            writer.join(BOUND_S)
            stopper.join(BOUND_S)
        assert slots_of(owner, capability) == buffers.blocks()
        assert server.connections_count == 0
        with pytest.raises(PeerUnavailableError):
            transport.write(moved)


def test_stopping_cuts_a_transfer_that_does_not_end():
    """After the drain's bound `stop` cuts the connection, and the transfer ends once."""
    with serving() as (owner, server, address), _half_a_write(owner, address) as peer:
        server.stop(drain_s=0.05)
        server.stop(drain_s=0.05)
        assert server.connections_count == 0
        assert list(owner.ended.values()) == [1]
        frame = peer.frame()
        assert frame is None or frame.kind is FrameKind.ERROR


def test_slots_side_by_side_travel_as_one_view():
    """Blocks that are neighbours in memory cost one iovec, whatever their number."""
    memory = np.arange(256, dtype=np.uint8)
    base = memory.ctypes.data
    addresses = np.array([0, 10, 20, 50, 40, 45], np.uint64) + np.uint64(base)
    lengths = np.array([10, 10, 5, 6, 5, 5], np.uint64)
    views = views_of(addresses, lengths)
    assert [bytes(view) for view in views] == [
        bytes(memory[0:25]),
        bytes(memory[50:56]),
        bytes(memory[40:50]),
    ]
