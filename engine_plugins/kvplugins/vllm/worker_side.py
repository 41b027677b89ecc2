"""The half that lives in vLLM's workers: it moves the bytes.

**Loads** run in a thread of their own, one after the other. vLLM keeps a loading request's blocks until the
load is reported as ended, even when the request is aborted, so the thread may write to them; it reports
exactly once, whatever happens, since a request whose load never ends waits for ever. A block that could not
be loaded is reported as invalid in the same step, and vLLM computes it.

**Saves** run inside `wait_for_save`, in the engine's own thread. The alternative, a saver thread, would read
blocks that vLLM frees, reuses and overwrites on preemption and at the end of a request; holding them back
needs a second protocol (delayed frees, a wait before each preemption), and a prefill instance would still
answer before its KV can be found. The price is that a step waits for its blocks to be stored, at most
`transfer_timeout_ms`: after that, and whenever the service is gone, full or slow, what is left is not saved,
which costs a later miss and nothing else.

**Handed over** blocks come from the engine that computed them; where they do not, the store is asked for the
same keys before they are given up, since the other engine has most often stored them too.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from kvclient import GetResult, HandoffChoice
from kvplugins.common.link import ServiceLink
from kvplugins.common.service import Service
from kvplugins.vllm.device import BlockMemory
from kvplugins.vllm.plan import BlockWork
from kvplugins.vllm.worker_handoffs import WorkerHandoffs

logger = logging.getLogger(__name__)

# How long `shutdown` waits for a load in the middle of its last call, on top of that call's own deadline.
SHUTDOWN_GRACE_S = 2.0


@dataclass(frozen=True, slots=True)
class WorkerLimits:
    """Bounds of one worker.

    blocks_per_call_max: blocks that one call moves.
    queued_loads_max: loads that wait; one more fails at once.
    queued_load_timeout_s: a load that has waited longer fails without having begun.
    step_save_timeout_s: after that, the rest of a step's blocks is not saved.
    """

    blocks_per_call_max: int
    queued_loads_max: int
    queued_load_timeout_s: float
    step_save_timeout_s: float


@dataclass(slots=True)
class WorkerCounts:
    """Totals since the start, in blocks and bytes.

    loaded, lost: blocks of loads that came, and that did not.
    saved, known: blocks that were stored, and that the service had already.
    unsaved: blocks that were not stored, since the service was gone, full or slow.
    handoffs_received, handoffs_failed: handoffs that came, and that did not.
    handoffs_direct: those that came out of the other engine's memory. bytes_handed_over: of all that came.
    """

    blocks_loaded: int = 0
    blocks_lost: int = 0
    bytes_loaded: int = 0
    blocks_saved: int = 0
    blocks_known: int = 0
    blocks_unsaved: int = 0
    bytes_saved: int = 0
    handoffs_received: int = 0
    handoffs_direct: int = 0
    handoffs_failed: int = 0
    bytes_handed_over: int = 0


@dataclass(frozen=True, slots=True)
class _Job:
    work: BlockWork
    mark: object
    begin_until_s: float


class WorkerSide:
    """Moves blocks for one rank. Everything but the loader is used by the engine's thread alone.

    clock: seconds that never go back.
    saves: whether this rank stores what it computes; of ranks that hold the same KV, one does.
    handoffs: None where blocks go through the store alone.
    """

    def __init__(
        self,
        *,
        link: ServiceLink[Service],
        memory: BlockMemory,
        limits: WorkerLimits,
        saves: bool,
        handoffs: WorkerHandoffs | None,
        clock: Callable[[], float],
    ) -> None:
        self.counts = WorkerCounts()
        self._handoffs = handoffs
        self._link = link
        self._memory = memory
        self._limits = limits
        self._saves = saves
        self._clock = clock
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._lock = threading.Lock()  # guards what follows
        self._waiting_count = 0
        self._ended: set[str] = set()
        self._lost_block_ids: set[int] = set()
        self._loader = threading.Thread(target=self._run_loader, name="kv-loader", daemon=True)
        self._loader.start()

    def start_loads(self, works: Sequence[BlockWork]) -> None:
        """Queue the loads of a step; returns at once. The engine keeps the blocks until each has ended."""
        if not works:
            return
        mark = self._memory.mark()
        until = self._clock() + self._limits.queued_load_timeout_s
        for work in works:
            with self._lock:
                has_room = self._waiting_count < self._limits.queued_loads_max
                self._waiting_count += has_room
            if has_room:
                self._jobs.put(_Job(work, mark, until))
            else:
                self._end(work, lost=work.block_ids)

    def save(self, works: Sequence[BlockWork]) -> None:
        """Store a step's blocks, as many as the time allows. Afterwards nothing of ours reads them."""
        # Requests with a common prefix may bring the same key in one step; the service takes a key once a
        # batch.
        blocks = {key: block for work in works for key, block in zip(work.keys, work.block_ids, strict=True)}
        if not blocks or not self._saves:
            return
        keys, block_ids = list(blocks), list(blocks.values())
        until = self._clock() + self._limits.step_save_timeout_s
        mark = self._memory.mark()
        for chunk in self._chunks(len(keys)):
            if self._clock() >= until or not self._save_chunk(keys[chunk], block_ids[chunk], mark):
                with self._lock:
                    self.counts.blocks_unsaved += len(keys) - chunk.start
                return

    def take_ended(self) -> set[str]:
        """Return the requests whose load has ended since the last call, well or not."""
        with self._lock:
            ended, self._ended = self._ended, set()
        return ended

    def take_lost_block_ids(self) -> set[int]:
        """Return the blocks that hold garbage, since the last call.

        To be called after `take_ended` in the same step: a load files its lost blocks and its end together,
        so that no request is ever told to have ended well which has not.
        """
        with self._lock:
            lost, self._lost_block_ids = self._lost_block_ids, set()
        return lost

    def shutdown(self) -> None:
        """End the loader and the connections."""
        self._jobs.put(None)
        self._loader.join(self._limits.step_save_timeout_s + SHUTDOWN_GRACE_S)
        self._link.close()
        if self._handoffs is not None:
            self._handoffs.close()

    def _save_chunk(self, keys: list[bytes], block_ids: list[int], mark: object) -> bool:
        """Store some blocks; say whether the service took them."""
        if not self._link.is_connected:
            return False
        buffers = self._memory.outgoing(block_ids, mark)
        result = self._link.call(lambda service: service.namespace.put(keys, buffers))
        if result is None:
            return False
        with self._lock:
            self.counts.blocks_saved += result.stored_count
            self.counts.blocks_known += len(keys) - result.stored_count
            self.counts.bytes_saved += result.bytes_moved
        return True

    def _run_loader(self) -> None:
        while (job := self._jobs.get()) is not None:
            with self._lock:
                self._waiting_count -= 1
            lost: Sequence[int] = job.work.block_ids
            try:
                lost = self._load(job)
            except Exception:  # border: plugin
                logger.exception("request %s: a fault while loading; it recomputes", job.work.request_id)
            self._end(job.work, lost=lost)

    def _load(self, job: _Job) -> Sequence[int]:
        """Load a request's blocks; return those that are lost.

        vLLM recomputes from the first lost block on, so what lies behind it is not worth the copy.
        """
        work = job.work
        if self._clock() > job.begin_until_s:
            return work.block_ids
        if work.handoff is not None and self._receive(work, job.mark):
            return ()
        for chunk in self._chunks(len(work.keys)):
            hits_count = self._load_chunk(work, chunk, job.mark)
            if hits_count < len(work.keys[chunk]):
                return work.block_ids[chunk.start + hits_count :]
        return ()

    def _receive(self, work: BlockWork, mark: object) -> bool:
        """Fetch a load's blocks from the engine that computed them; say whether all are there.

        The number of the handoff came with the request, through other hands: only the keys say that these are
        the request's blocks. Others are garbage, which the store or the engine then overwrites.
        """
        self._memory.wait(mark)
        result = self._handoffs.receive(work) if self._handoffs is not None else None
        is_there = result is not None and result.keys == b"".join(work.keys)
        with self._lock:
            if result is None or not is_there:
                self.counts.handoffs_failed += 1
            else:
                self.counts.handoffs_received += 1
                self.counts.handoffs_direct += result.choice is HandoffChoice.DIRECT
                self.counts.bytes_handed_over += result.bytes_moved
                self.counts.bytes_loaded += result.bytes_moved
        if not is_there:
            what = "did not come" if result is None else "brought blocks of another prompt"
            logger.warning("request %s: its handoff %s; the store is asked", work.request_id, what)
        return is_there

    def _load_chunk(self, work: BlockWork, chunk: slice, mark: object) -> int:
        """Load some blocks; return how many from the first on are there."""
        keys, block_ids = list(work.keys[chunk]), work.block_ids[chunk]
        buffers = self._memory.incoming(block_ids)

        def get(service: Service) -> GetResult | None:
            if not service.is_with(work.daemon_incarnation):
                return None
            return service.namespace.get(keys, buffers)

        result = self._link.call(get)
        if result is None:
            return 0
        hits_count = result.prefix_count
        if hits_count:
            self._memory.land(block_ids[:hits_count], mark)
        with self._lock:
            self.counts.bytes_loaded += result.bytes_moved
        return hits_count

    def _end(self, work: BlockWork, *, lost: Sequence[int]) -> None:
        with self._lock:
            self._ended.add(work.request_id)
            self._lost_block_ids.update(lost)
            self.counts.blocks_lost += len(lost)
            self.counts.blocks_loaded += len(work.block_ids) - len(lost)

    def _chunks(self, count: int) -> Iterator[slice]:
        step = self._limits.blocks_per_call_max
        return (slice(start, min(start + step, count)) for start in range(0, count, step))
