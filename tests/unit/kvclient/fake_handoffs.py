"""The fake daemon's side of handoffs, a lender for its claims, and an endpoint that fails when told to."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import queue
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Self

import grpc
import numpy as np
from google.protobuf.duration_pb2 import Duration

from kvproto.kv.v1 import (
    handoff_service_pb2,
    lifecycle_service_pb2,
    segment_service_pb2,
    session_service_pb2,
)
from kvservice.core.engine_memory import MemoryKind
from kvservice.core.outcomes import ItemOutcome
from kvservice.ports.one_sided import RemoteRead
from kvservice.transports.inproc_memory import InprocEndpoint, InprocLent, InprocMemoryHub
from tests.unit.kvclient.fake_daemon import FakeDaemon
from tests.unit.kvclient.fake_grpc import FakeGrpc

HANDOFF = 7
BLOCKS = 8


class HandoffDaemon(FakeDaemon):
    """Answers claims with `claim`, whatever is claimed; takes offers, and tells what it is told to."""

    def __init__(self, path: str) -> None:
        super().__init__(path)
        self.hold_s = 100.0
        self.claim = handoff_service_pb2.ClaimHandoffResponse()
        self.completion = int(ItemOutcome.DONE)
        self.notices: list[handoff_service_pb2.HandoffNotice] = []
        self.forgets_layouts = False
        self._numbers = itertools.count(HANDOFF)

    def tell(self, handoff_id: int, state: int, *, is_released: bool = False, reason: str = "") -> None:
        """Tell everybody of a handoff, unasked."""
        notice = handoff_service_pb2.HandoffNotice(
            handoff_id=handoff_id, state=int(state), is_released=is_released, reason=reason
        )
        self.push(session_service_pb2.StreamResponse(notices=[notice]))

    def staged(self, keys: list[bytes]) -> handoff_service_pb2.ClaimHandoffResponse:
        """Return the answer to a claim of blocks that were put into the arena before."""
        wanted = lifecycle_service_pb2.AcquireRequest(space_ids=list(self.life.spaces), keys=b"".join(keys))
        answer = handoff_service_pb2.ClaimHandoffResponse(
            choice=2,  # type: ignore[arg-type]
            reason="staged",
            keys=wanted.keys,
            lease=self._acquire(wanted).lease,
            remaining=Duration(seconds=10),
        )
        assert answer.lease.keys_count == len(keys)
        return answer

    def _heartbeat(self, request: Any) -> Any:
        answer = super()._heartbeat(request)
        answer.handoff_outcomes = bytes([ItemOutcome.DONE]) * len(request.handoff_ids)
        self.notices = [one for one in self.notices if one.handoff_id not in request.noticed_handoff_ids]
        answer.notices.extend(self.notices)
        return answer

    def _register_segments(self, request: Any) -> Any:
        layouts_count = 0 if self.forgets_layouts else len(request.layouts)
        return segment_service_pb2.RegisterSegmentsResponse(
            segment_ids=[next(self._numbers) for _ in request.segments],
            layout_ids=[next(self._numbers) for _ in range(layouts_count)],
        )

    def _unregister_segments(self, request: Any) -> Any:
        return segment_service_pb2.UnregisterSegmentsResponse(segments_count=len(request.segment_ids))

    def _offer_handoff(self, request: Any) -> Any:
        return handoff_service_pb2.OfferHandoffResponse(
            handoff_id=next(self._numbers),
            remaining=Duration(seconds=10),
            hold=Duration(seconds=int(self.hold_s), nanos=int(self.hold_s % 1 * 1e9)),
        )

    def _claim_handoff(self, request: Any) -> Any:
        return self.claim

    def _complete_handoff(self, request: Any) -> Any:
        return handoff_service_pb2.CompleteHandoffResponse(outcome=self.completion)  # type: ignore[arg-type]

    def _reject_handoff(self, request: Any) -> Any:
        return handoff_service_pb2.RejectHandoffResponse(outcome=int(ItemOutcome.DONE))  # type: ignore[arg-type]

    def _abort_handoff(self, request: Any) -> Any:
        return handoff_service_pb2.AbortHandoffResponse(outcome=int(ItemOutcome.DONE))  # type: ignore[arg-type]

    def _get_handoff(self, request: Any) -> Any:
        return handoff_service_pb2.GetHandoffResponse(state=2, keys_count=3)  # type: ignore[arg-type]


class HandoffGrpc(FakeGrpc):
    """The other edge, with the stream on which sessions listen: `say` goes to whoever does."""

    def __init__(self, daemon: FakeDaemon) -> None:
        super().__init__(daemon)
        # Of the stream that began last.
        self._said: queue.Queue[session_service_pb2.StreamResponse | None] = queue.Queue()
        self._began: queue.Queue[None] = queue.Queue()
        self.listeners_count = 0

    def __enter__(self) -> Self:
        super().__enter__()
        stream = grpc.stream_stream_rpc_method_handler(
            self._stream,
            session_service_pb2.StreamRequest.FromString,
            session_service_pb2.StreamResponse.SerializeToString,
        )
        handler = grpc.method_handlers_generic_handler("kv.v1.SessionService", {"Stream": stream})
        self._server.add_generic_rpc_handlers((handler,))
        return self

    def __exit__(self, *_: object) -> None:
        self.end_stream()
        super().__exit__()

    def say(self, *notices: handoff_service_pb2.HandoffNotice) -> None:
        """Tell the one that listens."""
        self._said.put(session_service_pb2.StreamResponse(notices=notices))

    def end_stream(self) -> None:
        """End the stream that is open."""
        self._said.put(None)

    def wait_for_listener(self, timeout_s: float) -> None:
        """Wait for another stream to begin; raises queue.Empty."""
        self._began.get(timeout=timeout_s)

    def _stream(self, _requests: Any, context: Any) -> Iterator[session_service_pb2.StreamResponse]:
        said = self._said = queue.Queue()
        context.add_callback(lambda: said.put(None))
        self.listeners_count += 1
        self._began.put(None)
        while (message := said.get()) is not None:
            yield message


class Lender:
    """Memory of another engine: `BLOCKS` blocks, and claims that say where they are."""

    def __init__(self, hub: InprocMemoryHub, block_bytes: int, *, parts_count: int = 1) -> None:
        self.endpoint = hub.endpoint()
        self.memory = [self._blocks(part, block_bytes) for part in range(parts_count)]
        self.lent: list[InprocLent] = [
            self.endpoint.lend(one.ctypes.data, one.nbytes, MemoryKind.HOST) for one in self.memory
        ]

    def claim(
        self, keys: list[bytes], *, ttl_s: int = 10, checksums: bytes = b"", **changes: Any
    ) -> handoff_service_pb2.ClaimHandoffResponse:
        """Return the answer to a claim of some keys: key i is block i of each part."""
        answer = handoff_service_pb2.ClaimHandoffResponse(
            choice=1,  # type: ignore[arg-type]
            reason="direct: by the lender",
            keys=b"".join(keys),
            remaining=Duration(seconds=ttl_s),
        )
        source = answer.direct
        for part, (memory, lent) in enumerate(zip(self.memory, self.lent, strict=True)):
            one = source.segments.add(
                base_address=memory.ctypes.data,
                size_bytes=memory.nbytes,
                memory_kind=1,  # type: ignore[arg-type]
            )
            for way in lent.ways:
                one.ways.add(transport=way.transport, address=way.address, key=way.key)
            size = memory.shape[1]
            source.layouts.add(
                piece_segments=np.array([part], np.uint32).tobytes(),
                piece_offsets_bytes=np.array([0], np.uint64).tobytes(),
                piece_strides_bytes=np.array([size], np.uint64).tobytes(),
                piece_lengths_bytes=np.array([size], np.uint64).tobytes(),
                blocks_count=len(memory),
            )
        named = np.repeat(np.arange(len(keys), dtype=np.uint32), len(self.memory))
        source.blocks, source.checksums = named.tobytes(), checksums
        for name, value in changes.items():
            setattr(source if name == "blocks" else answer, name, value)
        return answer

    @staticmethod
    def _blocks(part: int, block_bytes: int) -> np.ndarray:
        count = BLOCKS * block_bytes
        return (np.arange(count) * 7 + part).astype(np.uint8).reshape(BLOCKS, block_bytes)


class WatchedEndpoint(InprocEndpoint):
    """Writes every read down; `before` is called ahead of each, and may raise."""

    def __init__(self, hub: InprocMemoryHub) -> None:
        super().__init__(hub)
        self.reads: list[RemoteRead] = []
        self.kinds: list[MemoryKind] = []
        self.before: Callable[[RemoteRead], None] | None = None

    def lend(self, address: int, size_bytes: int, kind: MemoryKind) -> InprocLent:
        """Lend memory of any kind: nobody reads what is not the host's."""
        self.kinds.append(kind)
        return super().lend(address, size_bytes, MemoryKind.HOST)

    def read(self, read: RemoteRead) -> None:
        """Fetch bytes."""
        self.reads.append(read)
        if self.before is not None:
            self.before(read)
        super().read(read)


@contextlib.contextmanager
def client_of(flavour: Any, settings: Any, endpoint: Any) -> Iterator[Any]:
    """Connect a client with an endpoint of the test's, and close it."""
    client = flavour.run(lambda: flavour.KvClient.connect(settings, endpoint=endpoint))
    try:
        yield client
    finally:
        flavour.run(client.close)


def run_all(flavour: Any, calls: list[Callable[[], Any]]) -> list[Any]:
    """Run calls of a client at the same time: on threads, or as tasks."""
    if flavour.name == "sync":
        with ThreadPoolExecutor(len(calls)) as pool:
            return [future.result() for future in [pool.submit(call) for call in calls]]

    async def gathered() -> list[Any]:
        return list(await asyncio.gather(*(call() for call in calls)))

    return flavour.run(gathered)
