"""Who waits for the end of a handoff hears of it at once, whatever the beats are, and holds nobody up."""

import asyncio
import concurrent.futures
import contextlib
import re
import select
import tempfile
import threading
import time
from pathlib import Path

import grpc
import numpy as np
import pytest

from kvclient import BlockPool, ClientSettings, HandoffState
from kvclient._backends.grpc_sync import GrpcConnection
from kvclient._backends.lane_sync import LaneConnection
from kvproto.kv.v1 import handoff_service_pb2
from kvservice.ports.methods import Method
from kvservice.transports.frames import FrameKind, encode
from kvservice.transports.inproc_memory import InprocMemoryHub
from tests.unit.kvclient.conftest import BLOCK_BYTES, settings_of
from tests.unit.kvclient.fake_handoffs import (
    HANDOFF,
    HandoffDaemon,
    HandoffGrpc,
    Lender,
    WatchedEndpoint,
    client_of,
    run_all,
)

WAIT_S = 5.0
"""Less than the fake daemon's interval between beats, which is a minute."""

KEYS = [b"k" * 32]
ABORTED, CLAIMED, COMPLETED = HandoffState.ABORTED, HandoffState.CLAIMED, HandoffState.COMPLETED
WAYS = ["lane", "grpc"]
only_aio = pytest.mark.parametrize("flavour", ["aio"], indirect=True)
only_sync = pytest.mark.parametrize("flavour", ["sync"], indirect=True)


@pytest.fixture
def daemon():
    """Serve a fake daemon that hands blocks over."""
    with tempfile.TemporaryDirectory() as folder, HandoffDaemon(str(Path(folder) / "kv.sock")) as running:
        yield running


@pytest.fixture
def edge(daemon):
    """Serve the fake daemon over gRPC, with the stream that sessions listen on."""
    with HandoffGrpc(daemon) as running:
        yield running


class Giver:
    """A client that offers one block after the other."""

    def __init__(self, flavour, client, namespace):
        self.flavour, self.client, self.handoffs = flavour, client, client.handoffs
        self._namespace = namespace
        pool = BlockPool.of([np.zeros((8, BLOCK_BYTES), np.uint8)])
        self._lent = flavour.run(self.handoffs.lend, [pool])

    def offer(self):
        """Offer a block and return the number."""
        offer = self.flavour.run(self.handoffs.offer, self._namespace, KEYS, self._lent, [0])
        return offer.handoff_id

    async def offer_async(self):
        """Do so as a task."""
        return (await self.handoffs.offer(self._namespace, KEYS, self._lent, [0])).handoff_id

    def wait(self, handoff_id, timeout_s=WAIT_S):
        """Wait for its release and return the news."""
        return self.flavour.run(self.handoffs.wait_released, handoff_id, timeout_s)

    @contextlib.contextmanager
    def waiting(self, handoff_id):
        """Wait while the context runs; yields a function that returns the news."""
        if self.flavour.name == "sync":
            with concurrent.futures.ThreadPoolExecutor(1) as pool:
                future = pool.submit(self.handoffs.wait_released, handoff_id, WAIT_S)
                yield lambda: future.result(WAIT_S)
            return

        async def begin():
            task = asyncio.ensure_future(self.handoffs.wait_released(handoff_id, WAIT_S))
            await asyncio.sleep(0)
            return task

        task = self.flavour.run(begin)
        yield lambda: self.flavour.run(asyncio.wait_for, task, WAIT_S)


@contextlib.contextmanager
def giver_of(flavour, settings, identity, part):
    """Connect a client that offers."""
    with client_of(flavour, settings, WatchedEndpoint(InprocMemoryHub())) as client:
        yield Giver(flavour, client, flavour.run(client.open_namespace, identity, [part]))


@pytest.fixture
def giver(daemon, flavour, identity, part):
    """Offer over the lane."""
    with giver_of(flavour, settings_of(daemon), identity, part) as offering:
        yield offering


@pytest.fixture
def remote(edge, flavour, identity, part):
    """Offer over gRPC."""
    settings = ClientSettings(endpoint=edge.endpoint, call_timeout_s=WAIT_S)
    with giver_of(flavour, settings, identity, part) as offering:
        yield offering


def notice(handoff_id, state=COMPLETED, *, is_released=True):
    """Say something of a handoff."""
    return handoff_service_pb2.HandoffNotice(handoff_id=handoff_id, state=int(state), is_released=is_released)


# ---- over the lane


def test_an_end_is_heard_at_once(daemon, giver):
    """By whoever waits for it then, and by whoever waits already; no beat has to come."""
    handoff_id = giver.offer()
    assert giver.wait(handoff_id, 0.001) is None
    daemon.tell(handoff_id, CLAIMED)
    assert giver.wait(handoff_id, 0.1) is None
    assert giver.handoffs.news(handoff_id).state is CLAIMED
    assert not giver.handoffs.is_released(handoff_id)
    with giver.waiting(handoff_id) as result:
        daemon.tell(handoff_id, ABORTED)
        daemon.tell(handoff_id, ABORTED, is_released=True, reason="no room")
        news = result()
    assert (news.state, news.is_released, news.reason) == (ABORTED, True, "no room")
    assert giver.handoffs.is_released(handoff_id)
    assert daemon.count(Method.HEARTBEAT) == 0


def test_looking_at_the_news_asks_nobody(daemon, giver):
    """An engine looks at each step: what has been said is dealt with, and nothing is sent."""
    handoff_id = giver.offer()
    daemon.tell(handoff_id, COMPLETED, is_released=True)
    calls_count = len(daemon.calls)
    if giver.flavour.name == "aio":
        giver.flavour.run(asyncio.sleep, 0)  # The loop reads for itself, once it is let.
    assert giver.handoffs.is_released(handoff_id)
    assert giver.handoffs.news(handoff_id).state is COMPLETED
    assert len(daemon.calls) == calls_count


def test_what_was_lost_on_the_way_comes_with_the_beats(daemon, flavour, identity, part):
    """They bring the news until they have said that it was noticed."""
    daemon.renew_interval_s = 0.01
    with giver_of(flavour, settings_of(daemon), identity, part) as giver:
        handoff_id = giver.offer()
        daemon.notices = [notice(handoff_id, CLAIMED, is_released=False)]
        flavour.wait(daemon.wait_for, Method.HEARTBEAT, daemon.count(Method.HEARTBEAT) + 3)
        assert giver.handoffs.news(handoff_id).state is CLAIMED
        assert not daemon.last(Method.HEARTBEAT).noticed_handoff_ids
        daemon.notices = [notice(handoff_id)]
        assert giver.wait(handoff_id).state is COMPLETED
        flavour.wait(daemon.wait_for, Method.HEARTBEAT, daemon.count(Method.HEARTBEAT) + 3)
        beats = [request for method, request in daemon.calls if method == Method.HEARTBEAT]
        assert [handoff_id] in [list(beat.noticed_handoff_ids) for beat in beats]
        assert daemon.notices == []
        assert not daemon.last(Method.HEARTBEAT).noticed_handoff_ids


def test_a_wait_outlives_the_connection(daemon, giver):
    """Another call resumes the session; what is said on the new connection is heard at once too."""
    handoff_id = giver.offer()
    with giver.waiting(handoff_id) as result:
        daemon.drop_connections()
        giver.flavour.run(giver.client.list_tiers)
        assert giver.client.attachment.epoch == 1
        daemon.tell(handoff_id, COMPLETED, is_released=True)
        assert result().state is COMPLETED


def test_a_lost_session_releases_at_the_end_of_the_hold(daemon, giver):
    """A restarted daemon knows of no claim, but its claimers may be reading: only time helps."""
    daemon.hold_s = 0.4
    short = giver.offer()
    daemon.hold_s = 100.0
    long = giver.offer()
    offered_s = time.monotonic()
    daemon.restart()
    giver.flavour.run(giver.client.list_tiers)
    assert giver.client.attachment.epoch == 2
    for handoff_id in (short, long):
        assert giver.handoffs.news(handoff_id).state is ABORTED
        assert not giver.handoffs.is_released(handoff_id)
    assert giver.wait(short).reason == "its hold is over"
    assert time.monotonic() - offered_s > 0.3
    assert not giver.handoffs.is_released(long)


def test_words_that_make_no_sense_hold_nobody_up(daemon, giver):
    """A state of a later daemon, and what is no message: calls and news go on behind them."""
    handoff_id = giver.offer()
    for connection in daemon.connections:
        connection.sendall(encode(FrameKind.STREAM, Method.STREAM, 0, 0, b"\xff\xff\xff"))
    daemon.tell(handoff_id, 77)
    giver.flavour.run(giver.client.list_tiers)
    assert giver.handoffs.news(handoff_id).state is HandoffState.OFFERED
    daemon.notices = [notice(handoff_id, 99, is_released=False)]
    daemon.tell(handoff_id, COMPLETED, is_released=True)
    assert giver.wait(handoff_id).state is COMPLETED


def test_waiting_for_a_daemon_that_is_away_only_takes_its_time(daemon, giver):
    """No error: what is not known is not released."""
    handoff_id = giver.offer()
    daemon.stop()
    assert giver.wait(handoff_id, 0.1) is None
    assert not giver.handoffs.is_released(handoff_id)


def test_a_client_that_is_closed_releases_nothing(giver):
    """Who waits on another thread gets no news, and no error of a socket that is gone."""
    handoff_id = giver.offer()
    begun = threading.Event()
    found = []

    def wait():
        begun.set()
        found.append(giver.wait(handoff_id, 0.3))

    if giver.flavour.name == "aio":
        giver.flavour.run(giver.client.close)
        wait()
    else:
        thread = threading.Thread(target=wait)
        thread.start()
        assert begun.wait(WAIT_S)
        giver.client.close()
        thread.join(WAIT_S)
    assert found == [None]
    assert not giver.handoffs.is_released(handoff_id)


def test_a_socket_that_is_closed_under_a_look_is_no_error(daemon, monkeypatch):
    """Another thread may close the connection between any two steps of one that only wants to hear."""
    connection = LaneConnection(daemon.path, lambda _body: None, WAIT_S)
    poll = select.poll

    def close_first():
        connection.close()
        return poll()

    monkeypatch.setattr(select, "poll", close_first)
    connection.hear(WAIT_S)
    assert not connection.is_open


@only_aio
def test_waits_take_no_threads_and_end_when_they_are_cancelled(daemon, flavour, giver, identity, part):
    """An engine waits for hundreds of offers; the few threads of the loop are for the copies."""

    async def scenario():
        numbers = [await giver.offer_async() for _ in range(64)]
        waits = [asyncio.ensure_future(giver.handoffs.wait_released(one, 60.0)) for one in numbers]
        await asyncio.sleep(0)
        assert await asyncio.wait_for(asyncio.to_thread(lambda: "free"), WAIT_S) == "free"
        daemon.tell(numbers[0], COMPLETED, is_released=True)
        assert (await asyncio.wait_for(waits.pop(0), WAIT_S)).state is COMPLETED
        for wait in waits:
            wait.cancel()
        _, pending = await asyncio.wait(waits, timeout=WAIT_S)
        assert not pending
        assert all(wait.cancelled() for wait in waits)

    flavour.run(scenario)


@only_aio
def test_a_receive_that_is_cancelled_lets_go_when_its_read_has_ended(daemon, flavour, identity, part):
    """The thread that reads cannot be stopped, and until it has ended nothing may be given up."""
    hub = InprocMemoryHub()
    lender, endpoint = Lender(hub, BLOCK_BYTES), WatchedEndpoint(hub)
    daemon.claim = lender.claim(KEYS)
    reading, go_on = threading.Event(), threading.Event()

    def before(_read):
        reading.set()
        assert go_on.wait(WAIT_S)

    endpoint.before = before
    pool = BlockPool.of([np.zeros((8, BLOCK_BYTES), np.uint8)])

    async def scenario(client):
        namespace = await client.open_namespace(identity, [part])
        task = asyncio.ensure_future(client.handoffs.receive(namespace, HANDOFF, [pool], [3]))
        assert await asyncio.to_thread(reading.wait, WAIT_S)
        task.cancel()
        await client.list_tiers()
        assert not task.done()
        assert daemon.count(Method.ABORT_HANDOFF) == 0
        go_on.set()
        await asyncio.wait([task], timeout=WAIT_S)
        assert task.cancelled()
        await asyncio.to_thread(daemon.wait_for, Method.ABORT_HANDOFF)
        assert daemon.count(Method.COMPLETE_HANDOFF) == 0

    with client_of(flavour, settings_of(daemon), endpoint) as client:
        flavour.run(scenario, client)


@only_aio
def test_a_claim_that_is_cancelled_is_given_up(daemon, flavour, giver, identity, part):
    """The daemon may have given it to us already; its giver need not wait for it to expire."""
    daemon.silent.add(Method.CLAIM_HANDOFF)

    async def scenario():
        namespace = await giver.client.open_namespace(identity, [part])
        task = asyncio.ensure_future(giver.handoffs.claim(namespace, HANDOFF))
        await asyncio.to_thread(daemon.wait_for, Method.CLAIM_HANDOFF)
        task.cancel()
        await asyncio.wait([task], timeout=WAIT_S)
        assert task.cancelled()
        await asyncio.to_thread(daemon.wait_for, Method.ABORT_HANDOFF)
        assert daemon.last(Method.ABORT_HANDOFF).handoff_id == HANDOFF

    flavour.run(scenario)


# ---- over gRPC


def test_a_stream_brings_the_news_at_once(daemon, edge, remote):
    """It is opened with the first offer, once, and brings what the lane brings by itself."""
    assert edge.listeners_count == 0
    first, second = remote.offer(), remote.offer()
    remote.flavour.wait(edge.wait_for_listener, WAIT_S)
    with remote.waiting(first) as result:
        edge.say(notice(first, CLAIMED, is_released=False), notice(second))
        edge.say(notice(first))
        assert result().state is COMPLETED
    assert remote.handoffs.is_released(second)
    assert edge.listeners_count == 1
    assert daemon.count(Method.HEARTBEAT) == 0


def test_a_stream_that_ended_is_opened_again(edge, remote):
    """The daemon may end it with the channel still good; the next offer listens anew."""
    first = remote.offer()
    remote.flavour.wait(edge.wait_for_listener, WAIT_S)
    edge.say(notice(first, 77, is_released=False))
    edge.say(notice(first))
    assert remote.wait(first).is_released
    edge.end_stream()
    second = remote.offer()
    end_s = time.monotonic() + WAIT_S
    while edge.listeners_count < 2:  # The client hears of the end of the stream when it does.
        assert time.monotonic() < end_s
        second = remote.offer()
    edge.say(notice(second))
    assert remote.wait(second).is_released
    assert edge.listeners_count == 2


@only_sync
def test_offers_at_once_open_one_stream(edge, flavour, remote):
    """A second one would take the first one's place at the daemon, and a thread that nobody ends."""
    numbers = run_all(flavour, [remote.offer] * 8)
    edge.wait_for_listener(WAIT_S)
    assert edge.listeners_count == 1
    edge.say(*(notice(number) for number in numbers))
    assert all(remote.wait(number) for number in numbers)


@pytest.mark.parametrize("way", WAYS)
def test_nothing_of_it_outlives_the_client(daemon, edge, flavour, identity, part, way):
    """Neither a thread nor a task; and no warning."""
    before = set(threading.enumerate())
    settings = settings_of(daemon) if way == "lane" else ClientSettings(endpoint=edge.endpoint)
    with giver_of(flavour, settings, identity, part) as giver:
        handoff_id = giver.offer()
        if way == "grpc":
            flavour.wait(edge.wait_for_listener, WAIT_S)
        assert giver.wait(handoff_id, 0.01) is None
    if flavour.name == "aio":
        assert flavour.run(lambda: asyncio.all_tasks() - {asyncio.current_task()}) == set()
    assert left_running(before) == []


def test_a_call_that_fails_at_once_does_not_wait_for_our_words(monkeypatch):
    """It calls nobody back that asks after its end; a thread of gRPC's would wait for ever."""
    silences = []

    class Call:
        def add_callback(self, _callback):
            return False

        def cancel(self):
            pass

        def __iter__(self):
            return iter(())

    class Channel:
        def stream_stream(self, _path):
            return lambda silence, **_options: silences.append(silence) or Call()

        def close(self):
            pass

    monkeypatch.setattr(grpc, "insecure_channel", lambda _target, **_options: Channel())
    connection = GrpcConnection(ClientSettings(endpoint="grpc://127.0.0.1:1"))
    connection.listen(lambda _body: None)
    drawing = threading.Thread(target=list, args=silences, daemon=True)
    drawing.start()
    drawing.join(WAIT_S)
    assert not drawing.is_alive()
    connection.close()


def left_running(before):
    """Return the names of this client's threads that do not end, by what was there before it."""
    # Of the servers, of the loop, and the one with which gRPC serves all loops of a process.
    others = re.compile(r"ThreadPoolExecutor.*|asyncio.*|.*\((_serve|_accept|_poll_wrapper)\)")
    end_s = time.monotonic() + WAIT_S
    left = [one for one in set(threading.enumerate()) - before if not others.fullmatch(one.name)]
    for thread in left:
        thread.join(max(0.0, end_s - time.monotonic()))
    return [thread.name for thread in left if thread.is_alive()]


def test_a_stream_that_cannot_be_opened_leaves_no_thread():
    """Its thread ends by itself, and so does the one in which gRPC waits for what we say."""
    before = set(threading.enumerate())
    connection = GrpcConnection(ClientSettings(endpoint="grpc://127.0.0.1:1"))
    connection.listen(lambda _body: None)
    connection.close()
    connection.listen(lambda _body: None)
    assert left_running(before) == []
