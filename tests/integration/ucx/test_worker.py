import gc
import resource
import select
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from kvservice import native
from kvservice.native import ucx
from tests.integration.ucx.peers import (
    CMA,
    LANES,
    LONG_S,
    MIB,
    TCP,
    Batch,
    Lane,
    anonymous_memory,
    deadline_ns,
)

IDLE_CPU_NS = 50_000_000
RECONNECTS = 150


def test_serving_sleeps_while_nothing_comes(lane):
    """A server that spins would take a core of the engine from it."""
    lane.batch().run(lane.worker, is_put=False)
    before = lane.peer.ask("cpu_ns")
    assert not lane.peer.is_speaking(1.0)  # the second passes in a poll, not in a sleep
    assert lane.peer.ask("cpu_ns") - before < IDLE_CPU_NS


def test_waiting_for_a_silent_peer_sleeps_too(open_worker, start_peer):
    """A transfer that waits half a second must not compute for half a second."""
    lane = Lane(open_worker(TCP), start_peer(TCP), is_watched=True)
    lane.peer.stop()
    before = time.thread_time_ns()
    assert lane.batch().run(lane.worker, is_put=False, seconds=0.5) is ucx.Outcome.DEADLINE
    assert time.thread_time_ns() - before < IDLE_CPU_NS


def test_a_server_whose_python_is_busy_serves_on(lane):
    """The loop has no need of the GIL, which engines hold for seconds: a get and a put arrive meanwhile."""
    lane.peer.tell("hold_gil")
    assert lane.peer.hear() == "holding"
    assert lane.batch().run(lane.worker, is_put=False) is ucx.Outcome.DONE
    lane.memory[0] = 255
    assert lane.batch().run(lane.worker, is_put=True) is ucx.Outcome.DONE
    assert lane.peer.hear() == 255


def test_many_threads_transfer_while_the_peer_reads_us(lane, serve, rng):
    """One worker under every kind of use at once: eight transfers, a server, and a peer that gets from it."""
    server = serve(lane.worker)
    own = anonymous_memory(MIB)
    own[:] = np.frombuffer(rng.randbytes(MIB), dtype=np.uint8)
    registration = lane.worker.register(own.ctypes.data, own.size)
    expected = np.arange(lane.peer.length // 8, dtype=np.uint64).view(np.uint8)
    wrong = []

    def transfer(number):
        part = lane.peer.length // 8
        segment = lane.endpoint.attach(lane.peer.rkey, lane.peer.base + number * part, part)
        memory = anonymous_memory(part)
        for block_bytes in (64 << 10, 4 << 10, 512, part) * 3:
            memory[:] = 0
            batch = Batch.of_blocks(segment, memory, block_bytes, part // block_bytes)
            outcome = batch.run(lane.worker, is_put=False, window=8)
            if outcome is not ucx.Outcome.DONE or not np.array_equal(
                memory, expected[number * part : (number + 1) * part]
            ):
                wrong.append((number, block_bytes, outcome, set(batch.statuses.tolist())))
            if batch.run(lane.worker, is_put=True, window=8) is not ucx.Outcome.DONE:
                wrong.append((number, block_bytes, "put"))

    threads = [threading.Thread(target=transfer, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for _ in range(5):
        read = lane.peer.ask(
            "read_back", lane.worker.address.hex(), registration.rkey.hex(), own.ctypes.data, MIB
        )
        assert read == [ucx.Outcome.DONE, native.crc32c(own)]
    for thread in threads:
        thread.join(LONG_S)
    assert not wrong
    assert not server.failures
    assert lane.peer.ask("digest", 0, lane.peer.length) == native.crc32c(expected)


def test_serving_goes_on_after_transfers(open_worker, start_peer, serve):
    """A server leaves the worker to transfers while there are any, and must come back afterwards."""
    lane = Lane(open_worker(TCP), start_peer(TCP), is_watched=True)
    serve(lane.worker)
    own = anonymous_memory(4096)
    registration = lane.worker.register(own.ctypes.data, own.size)
    for _ in range(20):
        assert lane.batch(1 << 16, 4).run(lane.worker, is_put=False) is ucx.Outcome.DONE
        read = lane.peer.ask(
            "read_back", lane.worker.address.hex(), registration.rkey.hex(), own.ctypes.data, 4096
        )
        assert read == [ucx.Outcome.DONE, native.crc32c(own)]


def test_one_thread_serves(open_worker, serve):
    """Two that sleep on one worker would take each other's events."""
    worker = open_worker(TCP)
    first, second = serve(worker), serve(worker)
    select.select([], [], [], 0)
    (first if first.failures else second).thread.join(LONG_S)
    assert [str(failure) for failure in first.failures + second.failures] == [
        "cannot serve: another thread does that already"
    ]
    with pytest.raises(ValueError, match="not open"):
        open_worker(TCP).serve(resource.getrlimit(resource.RLIMIT_NOFILE)[0] - 1)


def test_closing_the_worker_ends_its_server(open_worker, serve):
    """Nobody has to stop the server first."""
    worker = open_worker(TCP)
    server = serve(worker)
    worker.close()
    server.thread.join(LONG_S)
    assert not server.thread.is_alive()


def test_a_worker_closes_with_everything_open(lane):
    """Endpoints, segments and registrations go with it; each may still be closed, and dropped, after it."""
    registration = lane.worker.register(lane.memory.ctypes.data, lane.memory.size)
    fresh = lane.worker.connect(lane.peer.address, is_watched=not lane.endpoint.is_watched)
    segment = lane.peer.attach(fresh)
    lane.worker.close()
    lane.worker.close()
    assert lane.worker.is_closed
    assert lane.endpoint.is_closed
    for thing in (segment, lane.segment, fresh, lane.endpoint, registration):
        thing.close()
    assert registration.rkey  # what was given to peers stays readable
    assert lane.worker.address


def test_use_after_close_says_so(lane):
    """Every door of a closed worker, and of a closed endpoint, segment or registration, is shut."""
    batch = lane.batch()
    registration = lane.worker.register(lane.memory.ctypes.data, lane.memory.size)
    registration.close()
    with pytest.raises(ucx.UcxError, match="closed"):
        batch.run(lane.worker, is_put=False, local_memory=registration)
    other = lane.worker.connect(lane.peer.address, is_watched=True)
    other.close()
    other.close()
    with pytest.raises(ucx.UcxError, match="closed"):
        batch.run(lane.worker, is_put=False, watched=other)
    for use in (lambda: lane.peer.attach(other), lambda: other.wire(deadline_ns()), other.describe):
        with pytest.raises(ucx.UcxError, match="closed"):
            use()
    lane.segment.close()
    with pytest.raises(ucx.UcxError, match="closed"):
        batch.run(lane.worker, is_put=False)
    lane.worker.close()
    for use in (
        lambda: lane.worker.register(lane.memory.ctypes.data, 1),
        lambda: lane.worker.connect(lane.peer.address, is_watched=True),
        lambda: batch.run(lane.worker, is_put=False),
        lambda: lane.worker.serve(0),
        lane.worker.progress,
    ):
        with pytest.raises(ucx.UcxError, match="closed"):
            use()


def test_everything_is_a_context_manager(start_peer, library):
    """What `with` opened is closed behind it, and dropped in any order."""
    peer = start_peer(TCP)
    with ucx.Worker(TCP) as worker, worker.connect(peer.address, is_watched=True) as endpoint:
        with peer.attach(endpoint) as segment, worker.register(peer.base, 1) as registration:
            assert segment.length == peer.length
            assert registration.length == 1
        assert not endpoint.is_closed
    assert endpoint.is_closed
    assert worker.is_closed


@pytest.mark.parametrize("name", LANES)
def test_connecting_again_and_again_leaks_nothing(open_worker, start_peer, name):
    """Memory and references stay; descriptors too, or (tcp) go with the worker, on both sides."""
    settings, is_watched = LANES[name]
    peer, worker = start_peer(settings), open_worker(settings)
    memory = anonymous_memory(4096)
    peer_before = peer.ask("descriptors")

    def connect():
        endpoint = worker.connect(peer.address, is_watched=is_watched)
        batch = Batch.of_blocks(peer.attach(endpoint), memory, 512, 8)
        registration = worker.register(memory.ctypes.data, memory.size)
        assert batch.run(worker, is_put=True, local_memory=registration) is ucx.Outcome.DONE
        endpoint.close()

    for _ in range(20):
        connect()
    gc.collect()
    references = sys.getrefcount(worker)
    before = resident_bytes()
    for _ in range(RECONNECTS):
        connect()
    gc.collect()
    assert sys.getrefcount(worker) == references
    assert resident_bytes() - before < 4 * MIB
    assert peer.ask("descriptors") <= peer_before + (RECONNECTS + 30 if is_watched else 5)
    worker.close()
    end = time.monotonic() + LONG_S
    while peer.ask("descriptors") > peer_before + 5:
        assert time.monotonic() < end


def resident_bytes():
    """Tell how much memory this process has."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def test_an_endpoint_describes_its_transports(lane):
    """What an operator wants to know: which transports UCX chose."""
    words = lane.endpoint.describe()
    assert "tcp/lo" in words
    assert ("cma/memory" in words) == (not lane.endpoint.is_watched)


def test_settings_are_checked(library):
    """A setting that UCX does not know, or not so, is refused with its name."""
    for settings, words in (
        ({"NO_SUCH_SETTING": "1"}, "NO_SUCH_SETTING=1"),
        ({"TLS": "nonesuch"}, "cannot open UCX"),
    ):
        with pytest.raises(ucx.UcxError, match=words) as raised:
            ucx.Worker(settings)
        assert raised.value.status < 0
    for wrong in ({"TLS": 1}, {1: "tcp"}, [("TLS",)]):
        with pytest.raises((TypeError, AttributeError)):
            ucx.Worker(wrong)
    ucx.drain_log()


def test_registrations_are_checked(open_worker):
    """A range that cannot be one is refused before UCX sees it."""
    worker = open_worker(CMA)
    for address, length in ((0, 1), (4096, 0), (2**64 - 4096, 8192)):
        with pytest.raises(ValueError, match="range"):
            worker.register(address, length)
    with pytest.raises(ValueError, match="memory_kind"):
        worker.register(4096, 1, memory_kind="disk")
    with pytest.raises(ucx.UcxError, match="Unsupported"):  # CMA and tcp alone reach no GPU
        worker.register(4096, 1, memory_kind="cuda")


def test_a_worker_that_is_only_dropped_is_closed_with_a_warning(library):
    """Like a socket: closing is the owner's job."""
    worker = ucx.Worker(TCP)
    with pytest.warns(ResourceWarning, match="unclosed UCX worker") as warnings:
        del worker
    assert len(warnings) == 1
