"""A client of the tcp data plane dies or stands still in the middle of a transfer: nobody else is hurt."""

from __future__ import annotations

import contextlib
import signal
import socket
import time

import pytest

from kvclient import ArenaFullError
from kvproto.kv.v1.local_lane_pb2 import TransferRequest
from kvservice.ports.methods import Method
from kvservice.transports.frames import FrameKind
from kvservice.transports.tcp import TcpServer
from kvservice.transports.tcp.wire import Wire, split_address
from tests.contract.transport_fakes import TOKEN, FakeOwner
from tests.integration.daemon_process import check_stored, content, keys, opened, tier, until
from tests.integration.scripted_child import scripted_child
from tests.integration.transfer_child import HELD_COUNT, RECEIVE_BUFFER_BYTES

TOTAL_COUNT = 384
VERBS = ("read-released", "read", "write")
LEASE_S = 1.0
SETTINGS = {
    "lease.ttl_ms": 1000,
    "lease.renew_interval_ms": 200,
    "lease.heartbeat_timeout_ms": 1000,
}
LATE_S = 1.5
"""What two loaded cores may add to any of these times."""


class House:
    """A daemon, and a process in the middle of each kind of transfer, in a namespace of its own."""

    def __init__(self, daemon, deadline_ms: int, stack: contextlib.ExitStack) -> None:
        self.daemon = daemon
        lookers = {
            verb: stack.enter_context(opened(daemon.lane, salt=verb.encode(), client_name="onlooker"))
            for verb in VERBS
        }
        self.client, self.namespace = lookers["read"]
        self.children = {
            verb: stack.enter_context(
                scripted_child("transfer_child.py", verb, daemon.grpc, verb, deadline_ms)
            )
            for verb in VERBS
        }
        for verb, (_, namespace) in lookers.items():
            namespace.put(keys(range(HELD_COUNT)), content(range(HELD_COUNT)))
            assert self.children[verb].hear() == "ready"
        for child in self.children.values():
            child.tell("begin")
        for verb, (client, namespace) in lookers.items():
            assert self.children[verb].hear() == "in the middle"
            client.purge(namespace)

    def sessions_count(self) -> int:
        """Count the sessions besides the onlookers'."""
        return len(self.client.list_tiers().owners) - len(VERBS)

    def held_count(self) -> int:
        """Count the slots that are being written, or that are pinned although nobody can see them."""
        counts = tier(self.client)
        return counts.slots_reserved_count + counts.slots_evicting_count + counts.slots_quarantined_count

    def check_others_work(self) -> None:
        """A second client, over the same wires, stores and reads as if nothing was."""
        started = time.monotonic()
        with opened(self.daemon.grpc, salt=b"others") as (_, namespace):
            assert namespace.put(keys(range(8)), content(range(8))).stored_count == 8
            check_stored(namespace, range(8))
        assert time.monotonic() - started < LATE_S

    def check_all_but(self, count: int, first: int) -> None:
        """Fill the arena: all but so many slots can be had, and not one more; each block keeps its bytes."""
        free = range(first, first + TOTAL_COUNT - count)
        if count:
            with pytest.raises(ArenaFullError) as caught:
                self.namespace.put(keys([first - 1, *free]), content([first - 1, *free]))
            assert caught.value.retry_after_ms
        assert self.namespace.put(keys(free), content(free)).stored_count == len(free)
        check_stored(self.namespace, free)
        assert self.held_count() == count


@pytest.fixture
def start_house(start_daemon):
    """Return a way to make a house of TOTAL_COUNT slots, in which every process is in the middle."""
    with contextlib.ExitStack() as stack:

        def start(deadline_ms: int) -> House:
            return House(start_daemon(capacity="24MiB", settings=SETTINGS), deadline_ms, stack)

        yield start


def test_clients_killed_in_the_middle_of_a_transfer_hold_nothing(start_house):
    """The transfer ends with the connection, at once; what the session held ends with the lease."""
    house = start_house(0)
    house.check_others_work()
    house.check_all_but(3 * HELD_COUNT, 10_000)
    house.children["read-released"].kill()
    until(lambda: house.held_count() == 2 * HELD_COUNT, "the slots of the released lease are free", LATE_S)
    house.check_all_but(2 * HELD_COUNT, 20_000)
    house.children["read"].kill()
    house.children["write"].kill()
    until(lambda: not house.held_count(), "the slots are free", LEASE_S + LATE_S)
    until(lambda: not house.sessions_count(), "the sessions have ended", LEASE_S + LATE_S)
    house.check_all_but(0, 30_000)
    assert "Traceback" not in house.daemon.said()


def test_clients_that_stand_still_in_the_middle_are_given_up_at_their_deadline(start_house):
    """Nobody waits for them to go on: transfers end at their own deadline, sessions by their silence."""
    deadline_s = 1.2
    house = start_house(int(deadline_s * 1000))
    for child in house.children.values():
        child.signal(signal.SIGSTOP)
    started = time.monotonic()
    until(lambda: all(child.is_stopped() for child in house.children.values()), "they stand still")
    assert house.held_count() == 3 * HELD_COUNT
    house.check_others_work()
    until(lambda: not house.held_count(), "the slots are free", deadline_s + LATE_S)
    assert time.monotonic() - started < deadline_s + LATE_S
    until(lambda: not house.sessions_count(), "their sessions have ended", LATE_S)
    assert all(child.is_stopped() for child in house.children.values())
    house.check_all_but(0, 20_000)
    assert "Traceback" not in house.daemon.said()


def begin(server_address: str, owner: FakeOwner, method: Method, stack: contextlib.ExitStack) -> None:
    """Begin a transfer of twelve blocks by hand, move a little, and say and take no more."""
    number, capability = owner.reserve([1 << 19] * 12)
    capability.is_write = method is Method.WRITE_SLOTS
    connection = stack.enter_context(socket.socket())
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, RECEIVE_BUFFER_BYTES)
    connection.connect(split_address(server_address))
    wire = Wire(connection)
    wire.arm(time.monotonic() + 20.0)
    request = TransferRequest(session_token=TOKEN, capability_id=number, slot_indexes=range(12))
    wire.send_frame(FrameKind.REQUEST, method, 1, request.SerializeToString())
    assert wire.read_frame().kind is FrameKind.RESPONSE
    moved = memoryview(bytearray(100_000))
    if capability.is_write:
        wire.send([moved])
    else:
        wire.receive([moved])


def test_a_peer_that_says_and_takes_nothing_is_given_up_after_its_silence():
    """Once, not twice or thrice: bytes that went before it began, or that fill buffers, do not prolong it."""
    silence_s = 0.8
    owner = FakeOwner()
    server = TcpServer("127.0.0.1:0", owner, silence_timeout_s=silence_s)
    address = server.start()
    try:
        with contextlib.ExitStack() as stack:
            started = time.monotonic()
            for method in (Method.READ_SLOTS, Method.WRITE_SLOTS):
                begin(address, owner, method, stack)
            begun = time.monotonic()
            with owner.all_ended:
                assert owner.all_ended.wait_for(owner.ended.total, 5 * silence_s)
            assert time.monotonic() - started > 0.9 * silence_s
            assert owner.wait_until_all_ended(5 * silence_s)
            assert time.monotonic() - begun < 1.7 * silence_s
    finally:
        server.stop(drain_s=0.0)
        owner.close()
