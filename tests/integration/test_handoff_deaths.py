"""Handoffs over UCX between processes that are killed, stopped and busy: typed errors, and nothing leaks."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from dataclasses import dataclass

import numpy as np
import pytest

from kvclient import (
    BlockPool,
    ClientSettings,
    DeadlineError,
    HandoffChoice,
    HandoffClaimedError,
    HandoffEndedError,
    HandoffState,
    NoWayError,
    PeerUnavailableError,
    StaleIncarnationError,
)
from kvclient.sync import KvClient, Namespace
from kvservice.transports.one_sided import EndpointSettings
from kvservice.transports.ucx import why_not
from tests.integration.daemon_process import (
    BLOCK_BYTES,
    WAIT_LIMIT_S,
    content,
    open_namespace,
)
from tests.integration.handoff_child import BLOCKS, ON_LOOPBACK
from tests.integration.scripted_child import ScriptedChild

pytestmark = pytest.mark.skipif(bool(why_not(ON_LOOPBACK)), reason=why_not(ON_LOOPBACK))

WIRES = {"cma": "", "tcp": "tcp"}
SHORT_LEASES = {
    "lease.ttl_ms": 1000,
    "lease.renew_interval_ms": 200,
    "lease.heartbeat_timeout_ms": 1000,
    "lease.operation_bound_ms": 500,
}


class ChildEngine(ScriptedChild):
    """`handoff_child.py` as a process."""

    def __init__(self, endpoint: str, transports: str = "", ttl_s: float = 30.0) -> None:
        super().__init__("handoff_child.py", endpoint, transports, ttl_s)
        assert self.hear() == "ready"

    def ask(self, *words: object) -> str:
        """Ask for something, and return the answer."""
        self.tell(*words)
        return self.hear()

    def signal(self, number: int) -> None:
        """Send a signal; a stop has taken effect when this returns."""
        super().signal(number)
        if number == signal.SIGSTOP:
            os.waitid(os.P_PID, self.pid, os.WSTOPPED | os.WNOWAIT)


@dataclass
class Engine:
    """An engine in this process."""

    client: KvClient
    namespace: Namespace
    memory: np.ndarray
    pool: BlockPool

    def receive(self, handoff_id: int, count: int):
        """Receive the first blocks of a handoff into ours of the same numbers."""
        return self.client.handoffs.receive(self.namespace, handoff_id, [self.pool], range(count))


@pytest.fixture
def start_engine():
    """Return a way to start engines as processes."""
    children: list[ChildEngine] = []

    def start(*arguments, **options) -> ChildEngine:
        children.append(ChildEngine(*arguments, **options))
        return children[-1]

    yield start
    for child in children:
        child.kill()


@pytest.fixture
def here():
    """Return a way to make engines in this process."""
    with contextlib.ExitStack() as stack:

        def make(endpoint: str, transports: str = "", **settings) -> Engine:
            client = stack.enter_context(
                KvClient.connect(
                    ClientSettings(
                        endpoint,
                        engine_incarnation=os.urandom(16),
                        one_sided=EndpointSettings(
                            devices="lo", transports=transports, by_messages=bool(transports)
                        ),
                        **settings,
                    )
                )
            )
            memory = np.zeros((BLOCKS, BLOCK_BYTES), np.uint8)
            return Engine(client, open_namespace(client), memory, BlockPool.of([memory]))

        yield make


def offer_of(child: ChildEngine, count: int) -> int:
    """Let a child offer its first blocks."""
    return int(child.ask("offer", count))


@pytest.mark.parametrize("transports", WIRES.values(), ids=WIRES)
@pytest.mark.parametrize("way", ["lane", "grpc"])
def test_blocks_go_between_processes(daemon, start_engine, here, transports, way):
    """Out of one process's memory into another's, again and again, directly."""
    prefill, decode = start_engine(getattr(daemon, way), transports), here(getattr(daemon, way), transports)
    assert prefill.ask("lend") == "lent"
    for _ in range(3):
        decode.memory[:] = 0
        received = decode.receive(offer_of(prefill, BLOCKS), BLOCKS)
        assert received.choice is HandoffChoice.DIRECT
        assert (decode.memory == content(range(BLOCKS))).all()


@pytest.mark.parametrize("transports", WIRES.values(), ids=WIRES)
def test_a_giver_killed_before_the_read(daemon, start_engine, here, transports):
    """Its blocks cannot be had any more; the reader is told, at once and in its own words."""
    prefill, decode = start_engine(daemon.lane, transports), here(daemon.lane, transports)
    prefill.ask("lend")
    decode.receive(offer_of(prefill, 2), 2)
    handoff_id = offer_of(prefill, 2)
    claim = decode.client.handoffs.claim(decode.namespace, handoff_id)
    prefill.kill()
    begun_s = time.monotonic()
    with pytest.raises((PeerUnavailableError, HandoffEndedError)):
        decode.receive(handoff_id, 2)
    assert time.monotonic() - begun_s < WAIT_LIMIT_S
    with pytest.raises(HandoffEndedError):
        decode.client.handoffs.complete(claim)


def test_the_lanes_say_what_they_did(daemon, start_engine, here):
    """Bytes and operations are counted, and a lane whose peer is gone counts its errors."""
    prefill, decode = start_engine(daemon.lane), here(daemon.lane)
    assert decode.client.handoffs.lanes() == ()
    prefill.ask("lend")
    decode.receive(offer_of(prefill, 8), 8)
    (lane,) = decode.client.handoffs.lanes()
    assert (lane.name, lane.totals.size_bytes, lane.totals.errors_count) == ("lo", 8 * BLOCK_BYTES, 0)
    assert lane.totals.operations_count >= 1
    # Spread over the windows that it lay in, each rounded.
    assert lane.windows.size_bytes.sum() == pytest.approx(8 * BLOCK_BYTES, abs=8)


def test_blocks_are_offered_when_they_are_ready(daemon, here):
    """What computes them is waited for before anybody can learn of the offer."""
    prefill, decode = here(daemon.lane), here(daemon.lane)
    lent = prefill.client.handoffs.lend([prefill.pool])

    def computed():
        prefill.memory[:4] = content(range(4))

    offer = prefill.client.handoffs.offer(
        prefill.namespace, [bytes([i]) * 32 for i in range(4)], lent, range(4), ready=computed
    )
    decode.receive(offer.handoff_id, 4)
    assert (decode.memory[:4] == content(range(4))).all()


def test_a_giver_is_not_read_by_messages_unless_it_wants_to(daemon, start_engine, here):
    """Over tcp UCX can end the process that it reads, which an engine is too dear for."""
    giver, decode = here(daemon.lane), here(daemon.lane, "tcp")
    lent = giver.client.handoffs.lend([giver.pool])
    offer = giver.client.handoffs.offer(giver.namespace, [b"k" * 32], lent, [0])
    with pytest.raises(NoWayError, match="by_messages"):
        decode.receive(offer.handoff_id, 1)
    news = giver.client.handoffs.wait_released(offer.handoff_id, WAIT_LIMIT_S)
    assert news.state is HandoffState.ABORTED


def test_a_giver_that_is_stopped_is_read_by_cma(daemon, start_engine, here):
    """The giver need not do anything: that is what one-sided means."""
    prefill, decode = start_engine(daemon.lane), here(daemon.lane)
    prefill.ask("lend")
    decode.receive(offer_of(prefill, 2), 2)
    handoff_id = offer_of(prefill, 8)
    prefill.signal(signal.SIGSTOP)
    decode.receive(handoff_id, 8)
    assert (decode.memory[:8] == content(range(8))).all()
    prefill.signal(signal.SIGCONT)


def test_a_giver_that_is_stopped_fails_by_the_deadline_over_tcp(daemon, start_engine, here):
    """What needs the other side ends by the deadline, and the next read of the same peer succeeds."""
    prefill, decode = start_engine(daemon.lane, "tcp"), here(daemon.lane, "tcp", transfer_timeout_s=0.5)
    prefill.ask("lend")
    decode.receive(offer_of(prefill, 2), 2)
    handoff_id = offer_of(prefill, 8)
    prefill.signal(signal.SIGSTOP)
    with pytest.raises((DeadlineError, PeerUnavailableError)):
        decode.receive(handoff_id, 8)
    memory = decode.memory.copy()
    prefill.signal(signal.SIGCONT)
    decode.receive(offer_of(prefill, 2), 2)
    assert (decode.memory[8:] == memory[8:]).all()


@pytest.mark.parametrize("transports", WIRES.values(), ids=WIRES)
def test_a_giver_whose_interpreter_is_busy_is_read_all_the_same(daemon, start_engine, here, transports):
    """No thread of Python's takes part on the giver's side: an engine compiles for seconds."""
    prefill, decode = start_engine(daemon.lane, transports), here(daemon.lane, transports)
    prefill.ask("lend")
    decode.receive(offer_of(prefill, 2), 2)
    handoff_id = offer_of(prefill, BLOCKS)
    prefill.tell("hog", 2.0)
    assert prefill.hear() == "hogging"
    begun_s = time.monotonic()
    decode.receive(handoff_id, BLOCKS)
    assert time.monotonic() - begun_s < 1.5
    assert (decode.memory == content(range(BLOCKS))).all()
    assert prefill.hear() == "done"


def test_a_reader_killed_with_a_claim_gives_the_blocks_back(daemon, start_engine, here):
    """Its death is seen, and the giver is told that nobody reads any more."""
    decode, prefill = start_engine(daemon.lane), here(daemon.lane)
    lent = prefill.client.handoffs.lend([prefill.pool])
    offer = prefill.client.handoffs.offer(prefill.namespace, [b"k" * 32], lent, [0])
    assert decode.ask("claim", offer.handoff_id) == "DIRECT"
    assert not prefill.client.handoffs.is_released(offer.handoff_id)
    decode.kill()
    news = prefill.client.handoffs.wait_released(offer.handoff_id, WAIT_LIMIT_S)
    assert news.state is HandoffState.ABORTED


def test_a_reader_that_is_stopped_holds_the_blocks_up_to_its_bound(start_daemon, start_engine, here):
    """Not for ever, and not a moment less: its deadline, and the longest that one operation takes."""
    daemon = start_daemon(settings=SHORT_LEASES)
    decode, prefill = start_engine(daemon.lane), here(daemon.lane)
    lent = prefill.client.handoffs.lend([prefill.pool])
    offer = prefill.client.handoffs.offer(prefill.namespace, [b"k" * 32], lent, [0])
    assert decode.ask("claim", offer.handoff_id) == "DIRECT"
    decode.signal(signal.SIGSTOP)
    begun_s = time.monotonic()
    news = prefill.client.handoffs.wait_released(offer.handoff_id, WAIT_LIMIT_S)
    assert news.state is HandoffState.EXPIRED
    assert time.monotonic() - begun_s > 1.0
    decode.signal(signal.SIGCONT)


def test_a_handoff_claimed_twice_goes_to_one(daemon, start_engine, here):
    """The second claimer is refused by name, and the first is not disturbed."""
    prefill, decode, other = start_engine(daemon.lane), here(daemon.lane), here(daemon.lane)
    prefill.ask("lend")
    handoff_id = offer_of(prefill, 4)
    claim = decode.client.handoffs.claim(decode.namespace, handoff_id)
    with pytest.raises(HandoffClaimedError):
        other.receive(handoff_id, 4)
    decode.client.handoffs.complete(claim)


def test_a_restarted_daemon_knows_nothing_of_the_claim(start_daemon, start_engine, here, tmp_path):
    """The reader may not use what it read; the giver keeps its blocks until nobody can be reading."""
    daemon = start_daemon(folder=tmp_path / "one")
    prefill, decode = start_engine(daemon.lane), here(daemon.lane)
    prefill.ask("lend")
    handoff_id = offer_of(prefill, 4)
    claim = decode.client.handoffs.claim(decode.namespace, handoff_id)
    daemon.kill()
    start_daemon(folder=tmp_path / "one")
    with pytest.raises((StaleIncarnationError, PeerUnavailableError)):
        decode.client.handoffs.complete(claim)
    answer = prefill.ask("offer", 1)
    assert "StaleIncarnationError" in answer or "PeerUnavailableError" in answer
    assert prefill.ask("lend") == "lent"
    decode.receive(offer_of(prefill, 4), 4)
    assert (decode.memory[:4] == content(range(4))).all()
