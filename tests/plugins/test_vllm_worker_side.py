"""What a worker loads, saves and reports, without vLLM and with a service that may fail."""

from __future__ import annotations

import dataclasses
import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest

from kvclient import ArenaFullError, ChecksumMismatchError, DeadlineError, KvError, PeerUnavailableError
from kvplugins.common.link import ServiceLink
from kvplugins.common.service import Service
from kvplugins.vllm.plan import BlockWork
from kvplugins.vllm.worker_side import WorkerLimits, WorkerSide
from tests.plugins.fakes import FakeClient, FakeClock, FakeMemory, FakeNamespace, keys

TIMEOUT_S = 10.0


class Bench:
    """A worker with its memory, its store and its clock."""

    def __init__(self, **limits: Any) -> None:
        self.memory = FakeMemory()
        self.store = FakeNamespace()
        self.client = FakeClient()
        self.clock = FakeClock()
        self.connects: list[None] = []
        self.link: ServiceLink[Any] = ServiceLink(
            name="store",
            connect=self._connect,
            close=lambda _: None,
            retry_after_s=3600,
            logger=logging.getLogger("test"),
        )
        self.link.start()
        bounds = {
            "blocks_per_call_max": 4,
            "queued_loads_max": 8,
            "queued_load_timeout_s": 5.0,
            "step_save_timeout_s": 1.0,
        }
        self.worker = WorkerSide(
            link=self.link,
            memory=self.memory,
            limits=WorkerLimits(**(bounds | limits)),
            saves=True,
            handoffs=None,
            clock=self.clock,
        )

    def load(self, *works: BlockWork) -> tuple[set[str], set[int]]:
        """Load, and return what is reported once all have ended."""
        self.worker.start_loads(works)
        return self.reports({work.request_id for work in works})

    def reports(self, request_ids: set[str]) -> tuple[set[str], set[int]]:
        """Collect step by step what the worker reports, until all the requests have ended."""
        ended: set[str] = set()
        lost: set[int] = set()
        waiter = threading.Event()
        for _ in range(int(TIMEOUT_S / 0.002)):
            ended |= self.worker.take_ended()
            lost |= self.worker.take_lost_block_ids()
            if ended >= request_ids:
                return ended, lost
            waiter.wait(0.002)
        pytest.fail(f"{request_ids - ended} never ended")

    def _connect(self) -> Any:
        self.connects.append(None)
        return Service(client=self.client, namespace=self.store)  # type: ignore[arg-type]


@contextmanager
def bench(**limits: Any) -> Iterator[Bench]:
    """Return a bench whose threads end with the test."""
    found = Bench(**limits)
    try:
        yield found
    finally:
        found.worker.shutdown()


def work(name: str, prompt: str, block_ids: Sequence[int]) -> BlockWork:
    """Return work on the first blocks of a prompt."""
    return BlockWork(name, tuple(keys(prompt, len(block_ids))), tuple(block_ids), b"first")


def test_what_is_saved_comes_back_into_other_blocks_byte_for_byte() -> None:
    """A block is one run of bytes over all layers, wherever the engine keeps it."""
    with bench() as here:
        here.memory.fill(range(1, 11), start=5)
        before = [layer[1:11].copy() for layer in here.memory.layers]
        here.worker.save([work("a", "p", range(1, 11))])
        assert here.load(work("b", "p", range(30, 40))) == ({"b"}, set())
        for layer, expected in zip(here.memory.layers, before, strict=True):
            assert (layer[30:40] == expected).all()
        assert here.store.batches == [4, 4, 2, 4, 4, 2]
        assert here.worker.counts.blocks_saved == here.worker.counts.blocks_loaded == 10


def test_one_key_in_two_requests_of_a_step_is_saved_once() -> None:
    """Requests with a common prefix arrive together; the service takes a key once a batch."""
    with bench() as here:
        here.memory.fill(range(1, 9), start=9)
        here.worker.save([work("a", "p", [1, 2, 3]), work("b", "p", [5, 6, 7, 8])])
        assert set(here.store.blocks) == set(keys("p", 4))


def test_from_the_first_lost_block_on_everything_is_reported_lost() -> None:
    """VLLM recomputes from there: a later block that came is not worth its copy, and never a hole's cover."""
    with bench() as here:
        here.memory.fill(range(1, 13), start=1)
        here.worker.save([work("a", "p", range(1, 13))])
        del here.store.blocks[keys("p", 6)[5]]
        ended, lost = here.load(work("b", "p", range(20, 32)))
        assert ended == {"b"}
        assert lost == set(range(25, 32))
        assert here.memory.landed == [20, 21, 22, 23, 24]
        assert here.worker.counts.blocks_loaded == 5
        assert here.worker.counts.blocks_lost == 7


@pytest.mark.parametrize("fault", [PeerUnavailableError("gone"), DeadlineError("late")])
def test_a_dead_service_ends_every_load_with_all_blocks_lost(fault: KvError) -> None:
    """A load that never ends is a request that waits for ever; and nothing waits for a service known dead."""
    with bench() as here:
        here.store.fault = fault
        assert here.load(work("a", "p", [1, 2])) == ({"a"}, {1, 2})
        assert here.load(work("b", "p", [3, 4])) == ({"b"}, {3, 4})
        here.worker.save([work("c", "p", [5])])
        assert here.store.batches == [2]
        assert here.worker.counts.blocks_unsaved == 1


def test_altered_bytes_are_lost_blocks() -> None:
    """What does not have its checksum is never handed on, and says nothing against the connection."""
    with bench() as here:
        here.store.fault = ChecksumMismatchError("altered")
        assert here.load(work("a", "p", [1, 2])) == ({"a"}, {1, 2})
        assert here.link.is_connected


def test_a_fault_of_our_own_ends_the_load_too() -> None:
    """The loader outlives any bug in what it calls."""
    with bench() as here:
        here.store.fault = ZeroDivisionError("a bug")
        assert here.load(work("a", "p", [1, 2])) == ({"a"}, {1, 2})
        here.store.fault = None
        assert here.load(work("b", "q", [3])) == ({"b"}, {3})


def test_a_full_service_costs_one_refusal_a_step() -> None:
    """The rest of the step is not even tried; the connection stays."""
    with bench() as here:
        here.store.fault = ArenaFullError("full")
        here.worker.save([work("a", "p", range(1, 11))])
        assert here.store.batches == [4]
        assert here.worker.counts.blocks_unsaved == 10
        assert here.link.is_connected


def test_a_step_waits_for_its_saves_only_so_long() -> None:
    """A slow service delays the engine up to a bound, and then loses blocks instead."""
    with bench(step_save_timeout_s=1.0) as here:
        put = here.store.put

        def slow_put(wanted: list[bytes], buffers: Any) -> Any:
            here.clock.now_s += 0.6
            return put(wanted, buffers)

        here.store.put = slow_put  # type: ignore[method-assign]
        here.worker.save([work("a", "p", range(1, 17))])
        assert here.store.batches == [4, 4]
        assert here.worker.counts.blocks_unsaved == 8


def test_a_load_comes_from_the_daemon_that_promised_it() -> None:
    """Memory read without a call may be that of a daemon that has ended; a call finds its successor."""
    with bench() as here:
        here.memory.fill([1, 2], start=3)
        here.worker.save([work("a", "p", [1, 2])])
        here.client.successor = b"second"
        late = dataclasses.replace(work("b", "p", [5, 6]), daemon_incarnation=b"second")
        assert here.load(late) == ({"b"}, set())
        assert here.load(work("c", "p", [7, 8])) == ({"c"}, {7, 8})


def blocked(here: Bench) -> tuple[threading.Event, Callable[[], None]]:
    """Make the store's get wait; return what tells that one waits, and what lets it go on."""
    begun, go = threading.Event(), threading.Event()
    get = here.store.get

    def waiting_get(wanted: list[bytes], buffers: Any) -> Any:
        begun.set()
        assert go.wait(TIMEOUT_S)
        return get(wanted, buffers)

    here.store.get = waiting_get  # type: ignore[method-assign]
    return begun, go.set


def test_a_load_beyond_the_bound_fails_at_once() -> None:
    """The queue is bounded; whoever finds it full computes."""
    with bench(queued_loads_max=1) as here:
        begun, go_on = blocked(here)
        here.worker.start_loads([work("runs", "p", [1])])
        assert begun.wait(TIMEOUT_S)
        here.worker.start_loads([work("waits", "p", [2]), work("full", "p", [3])])
        assert here.worker.take_ended() == {"full"}
        assert here.worker.take_lost_block_ids() == {3}
        go_on()
        assert here.reports({"runs", "waits"})[0] == {"runs", "waits"}


def test_a_load_that_waited_too_long_does_not_begin() -> None:
    """By then computing is quicker; and a load that has not begun can be given up without a write to fear."""
    with bench(queued_load_timeout_s=5.0) as here:
        begun, go_on = blocked(here)
        here.worker.start_loads([work("runs", "p", [1]), work("waits", "q", [2])])
        assert begun.wait(TIMEOUT_S)
        here.clock.now_s += 6.0
        go_on()
        ended, lost = here.reports({"runs", "waits"})
        assert ended == {"runs", "waits"}
        assert lost == {1, 2}
        assert here.store.batches == [1]


def test_a_rank_that_holds_the_same_kv_as_another_stores_nothing() -> None:
    """MLA's latent is the same on all ranks; one of them stores it."""
    with bench() as here:
        silent = WorkerSide(
            link=here.link,
            memory=here.memory,
            limits=WorkerLimits(4, 8, 5.0, 1.0),
            saves=False,
            handoffs=None,
            clock=here.clock,
        )
        silent.save([work("a", "p", [1])])
        silent.shutdown()
        assert here.store.batches == []


def test_a_map_of_keys_to_blocks_that_is_not_one_to_one_is_refused() -> None:
    """Source and target are pairs; a list that is too short must not shift the others."""
    with pytest.raises(ValueError, match="2 keys for 3 blocks"):
        BlockWork("r", tuple(keys("p", 2)), (1, 2, 3))
