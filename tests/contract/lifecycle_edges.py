"""A daemon in this process, on a clock that the test moves, and raw peers on both of its edges.

Nothing of kvclient is used here: over gRPC the peers are the generated stubs, over the local lane they
write and read frames themselves.
"""

from __future__ import annotations

import asyncio
import itertools
import queue
import socket
import threading
from dataclasses import dataclass
from pathlib import Path

import grpc
import numpy as np
from google.protobuf.message import Message
from google.rpc import code_pb2, error_details_pb2, status_pb2

from kvproto.kv.v1 import (
    capabilities_service_pb2,
    capabilities_service_pb2_grpc,
    event_service_pb2,
    event_service_pb2_grpc,
    handoff_service_pb2,
    handoff_service_pb2_grpc,
    lifecycle_service_pb2,
    lifecycle_service_pb2_grpc,
    segment_service_pb2,
    segment_service_pb2_grpc,
    session_service_pb2,
    session_service_pb2_grpc,
    tier_service_pb2,
    tier_service_pb2_grpc,
    transfer_service_pb2,
    transfer_service_pb2_grpc,
)
from kvservice.daemon import wiring
from kvservice.daemon.config import load
from kvservice.engine.clock import StallAwareClock
from kvservice.ports.methods import Method
from kvservice.transports.frames import Frame, FrameKind, FrameReader, encode

WAIT_S = 10.0
"""Bound of every wait: on the edges an answer takes a millisecond."""

SECOND_NS = 1_000_000_000
SEGMENT_BYTES = 256 << 10
BLOCK_BYTES = 4096
CAPACITY_BYTES = 1 << 20
"""Four segments, 256 blocks."""

SERVICES = {
    "SessionService": (session_service_pb2, session_service_pb2_grpc.SessionServiceStub),
    "LifecycleService": (lifecycle_service_pb2, lifecycle_service_pb2_grpc.LifecycleServiceStub),
    "SegmentService": (segment_service_pb2, segment_service_pb2_grpc.SegmentServiceStub),
    "HandoffService": (handoff_service_pb2, handoff_service_pb2_grpc.HandoffServiceStub),
    "TransferService": (transfer_service_pb2, transfer_service_pb2_grpc.TransferServiceStub),
    "TierService": (tier_service_pb2, tier_service_pb2_grpc.TierServiceStub),
    "EventService": (event_service_pb2, event_service_pb2_grpc.EventServiceStub),
    "CapabilitiesService": (
        capabilities_service_pb2,
        capabilities_service_pb2_grpc.CapabilitiesServiceStub,
    ),
}
RPCS = {
    Method.ATTACH: ("SessionService", "Attach"),
    Method.DETACH: ("SessionService", "Detach"),
    Method.OPEN_NAMESPACE: ("SessionService", "OpenNamespace"),
    Method.HEARTBEAT: ("SessionService", "Heartbeat"),
    Method.LOOKUP: ("LifecycleService", "Lookup"),
    Method.RESERVE: ("LifecycleService", "Reserve"),
    Method.COMMIT: ("LifecycleService", "Commit"),
    Method.ABORT: ("LifecycleService", "Abort"),
    Method.ACQUIRE: ("LifecycleService", "Acquire"),
    Method.RENEW: ("LifecycleService", "Renew"),
    Method.RELEASE: ("LifecycleService", "Release"),
    Method.VERIFY: ("LifecycleService", "Verify"),
    Method.REGISTER_SEGMENTS: ("SegmentService", "RegisterSegments"),
    Method.UNREGISTER_SEGMENTS: ("SegmentService", "UnregisterSegments"),
    Method.OFFER_HANDOFF: ("HandoffService", "OfferHandoff"),
    Method.CLAIM_HANDOFF: ("HandoffService", "ClaimHandoff"),
    Method.COMPLETE_HANDOFF: ("HandoffService", "CompleteHandoff"),
    Method.REJECT_HANDOFF: ("HandoffService", "RejectHandoff"),
    Method.ABORT_HANDOFF: ("HandoffService", "AbortHandoff"),
    Method.GET_HANDOFF: ("HandoffService", "GetHandoff"),
    Method.BEGIN_TRANSFER: ("TransferService", "BeginTransfer"),
    Method.END_TRANSFER: ("TransferService", "EndTransfer"),
    Method.LIST_TIERS: ("TierService", "ListTiers"),
    Method.PURGE_NAMESPACE: ("TierService", "PurgeNamespace"),
    Method.WATCH_EVENTS: ("EventService", "WatchEvents"),
    Method.GET_CAPABILITIES: ("CapabilitiesService", "GetCapabilities"),
}


def request_of(method: Method, **fields) -> Message:
    """Return the request message of a method."""
    service, rpc = RPCS[method]
    return getattr(SERVICES[service][0], f"{rpc}Request")(**fields)


def response_type(method: Method) -> type[Message]:
    """Return the type of a method's answer."""
    service, rpc = RPCS[method]
    return getattr(SERVICES[service][0], f"{rpc}Response")


@dataclass(frozen=True, slots=True)
class Refusal:
    """A failure as it came over the wire: the code's name, the reason, the words, the hint."""

    code: str
    reason: str
    message: str
    retry_ms: int | None

    @classmethod
    def of(cls, packed: bytes) -> Refusal:
        """Read a google.rpc.Status; written out here, since the product's own reader is under test."""
        status = status_pb2.Status.FromString(packed)
        info, retry, retry_ms = error_details_pb2.ErrorInfo(), error_details_pb2.RetryInfo(), None
        for detail in status.details:
            if detail.Is(error_details_pb2.RetryInfo.DESCRIPTOR):
                detail.Unpack(retry)
                retry_ms = retry.retry_delay.ToMilliseconds()
            else:
                assert detail.Unpack(info), f"a detail that is no ErrorInfo: {detail.type_url}"
        assert info.domain == "kvservice"
        return cls(code_pb2.Code.Name(status.code), info.reason, status.message, retry_ms)

    @property
    def kind(self) -> tuple[str, str]:
        """Code and reason."""
        return (self.code, self.reason)


class RefusedError(Exception):
    """A call failed; `refusal` says how."""

    def __init__(self, refusal: Refusal) -> None:
        super().__init__(str(refusal))
        self.refusal = refusal


class VirtualTime:
    """Nanoseconds that only the test moves."""

    def __init__(self) -> None:
        self.now_ns = 1000 * SECOND_NS

    def read(self) -> int:
        """Return the time."""
        return self.now_ns

    def advance(self, seconds: float) -> None:
        """Let time pass; the daemon notices with its next event."""
        self.now_ns += round(seconds * SECOND_NS)


class House:
    """A whole daemon on an event loop in a thread; `close` stops it."""

    def __init__(self, monkeypatch, folder: Path, *, config: str = "", **environ: str) -> None:
        self.time = VirtualTime()

        def clock(_read_ns, **_options):
            return StallAwareClock(self.time.read, longest_gap_ns=1 << 62)

        monkeypatch.setattr(wiring, "StallAwareClock", clock)
        path = None
        if config:
            path = folder / "kvservice.toml"
            path.write_text(config)
        flags = {
            "server.socket_path": str(folder / "lane.sock"),
            "server.grpc_listen": "127.0.0.1:0",
            "server.tcp_listen": "127.0.0.1:0",
            "arena.capacity_bytes": str(CAPACITY_BYTES),
            "arena.segment_bytes": str(SEGMENT_BYTES),
            "server.drain_timeout_ms": "0",
        }
        for name in environ:
            flags.pop(name.removeprefix("KVSERVICE_").replace("__", ".").lower(), None)
        self._settings = load(path, environ=environ, flags=flags)
        self._ready: queue.Queue = queue.Queue()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stopping: asyncio.Event | None = None
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()), name="house", daemon=True)
        self._thread.start()
        endpoints = self._ready.get(timeout=WAIT_S)
        if isinstance(endpoints, BaseException):
            raise endpoints
        self.endpoints = endpoints

    def begin_stop(self) -> None:
        """Tell the daemon to drain and stop; returns at once."""
        assert self._loop is not None
        assert self._stopping is not None
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._stopping.set)

    @property
    def is_running(self) -> bool:
        """Whether the daemon has not ended yet."""
        return self._thread.is_alive()

    def close(self) -> None:
        """Stop the daemon and wait for its end."""
        if self._thread.is_alive():
            self.begin_stop()
        self._thread.join(WAIT_S)
        assert not self._thread.is_alive(), "the daemon did not stop"

    async def _serve(self) -> None:
        self._loop, self._stopping = asyncio.get_running_loop(), asyncio.Event()
        daemon = wiring.Daemon(self._settings)
        try:
            self._ready.put(await daemon.start())
        except BaseException as error:
            self._ready.put(error)
            raise
        await self._stopping.wait()
        await daemon.stop()


class LanePeer:
    """One connection of the local lane, frame by frame."""

    is_local = True

    def __init__(self, house: House, token: str = "") -> None:
        del token  # On the lane the user id is the credential.
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.socket.settimeout(WAIT_S)
        self.socket.connect(house.endpoints.socket_path)
        self.session_token = b""
        self._reader = FrameReader()
        self._arrived: list[Frame] = []
        self._call_ids = itertools.count(1)

    def call(self, method: Method, **fields) -> Message:
        """Call with the fields of the request and return the answer, or raise RefusedError."""
        return self.call_raw(method, request_of(method, **fields).SerializeToString())

    def call_raw(self, method: int, body: bytes) -> Message:
        """Call with any bytes for a body."""
        call_id = self.send(method, body)
        frame = self.frame(lambda one: one.call_id == call_id)
        assert frame.method == method
        if frame.kind is FrameKind.ERROR:
            raise RefusedError(Refusal.of(frame.body))
        assert frame.kind is FrameKind.RESPONSE
        answer = response_type(Method(method)).FromString(frame.body)
        if method == Method.ATTACH:
            self.session_token = answer.session_token
        return answer

    def send(self, method: int, body: bytes) -> int:
        """Send a request and return its call id."""
        call_id = next(self._call_ids)
        self.socket.sendall(encode(FrameKind.REQUEST, method, call_id, 0, body))
        return call_id

    def frame(self, is_wanted) -> Frame:
        """Return the first frame that is wanted; others wait their turn."""
        while True:
            for index, frame in enumerate(self._arrived):
                if is_wanted(frame):
                    return self._arrived.pop(index)
            received = self.socket.recv(1 << 16)
            if not received:
                raise ConnectionError("the daemon closed the connection")
            self._arrived += self._reader.feed(received)

    def notice(self) -> session_service_pb2.StreamResponse:
        """Return what the daemon says unasked, next."""
        frame = self.frame(lambda one: one.kind is FrameKind.STREAM and one.call_id == 0)
        assert frame.method == Method.STREAM
        return session_service_pb2.StreamResponse.FromString(frame.body)

    def listen(self) -> None:
        """The connection is the stream already."""

    def watch(self, **fields) -> LaneWatch:
        """Follow the events."""
        request = request_of(Method.WATCH_EVENTS, **fields)
        return LaneWatch(self, self.send(Method.WATCH_EVENTS, request.SerializeToString()))

    def is_closed_by_daemon(self) -> bool:
        """Wait for the end of the connection; frames that come first are passed over."""
        try:
            self.frame(lambda _: False)
        except ConnectionError:
            return True
        raise AssertionError

    def close(self) -> None:
        """Hang up."""
        self.socket.close()


class LaneWatch:
    """The STREAM frames of one WatchEvents call."""

    def __init__(self, peer: LanePeer, call_id: int) -> None:
        self._peer = peer
        self._call_id = call_id

    def next(self) -> event_service_pb2.WatchEventsResponse:
        """Return the next answer, or raise RefusedError."""
        frame = self._peer.frame(lambda one: one.call_id == self._call_id)
        if frame.kind is FrameKind.ERROR:
            raise RefusedError(Refusal.of(frame.body))
        assert frame.kind is FrameKind.STREAM
        return event_service_pb2.WatchEventsResponse.FromString(frame.body)


class GrpcPeer:
    """One channel with the generated stubs; `listen` opens the bidirectional stream."""

    is_local = False

    def __init__(self, house: House, token: str = "") -> None:
        self.channel = grpc.insecure_channel(house.endpoints.grpc_address)
        self.stubs = {name: stub(self.channel) for name, (_, stub) in SERVICES.items()}
        self.session_token = b""
        self._bearer = token
        self._beats: queue.Queue | None = None
        self._stream = None

    @property
    def metadata(self) -> list[tuple[str, str | bytes]]:
        """What every call carries."""
        pairs: list[tuple[str, str | bytes]] = []
        if self.session_token:
            pairs.append(("kv-session-bin", self.session_token))
        if self._bearer:
            pairs.append(("authorization", f"Bearer {self._bearer}"))
        return pairs

    def call(self, method: Method, **fields) -> Message:
        """Call with the fields of the request and return the answer, or raise RefusedError."""
        service, rpc = RPCS[method]
        stub = getattr(self.stubs[service], rpc)
        try:
            answer = stub(request_of(method, **fields), timeout=WAIT_S, metadata=self.metadata)
        except grpc.RpcError as error:
            raise RefusedError(refusal_of(error)) from error
        if method is Method.ATTACH:
            self.session_token = answer.session_token
        return answer

    def listen(self) -> None:
        """Open the session's stream, and see that it is heard."""
        self._beats = queue.Queue()
        beats = iter(self._beats.get, None)
        self._stream = self.stubs["SessionService"].Stream(beats, timeout=WAIT_S, metadata=self.metadata)
        self.beat()

    def beat(self, **fields) -> session_service_pb2.HeartbeatResponse:
        """Send one beat on the stream and return its answer."""
        assert self._beats is not None
        beat = session_service_pb2.HeartbeatRequest(**fields)
        self._beats.put(session_service_pb2.StreamRequest(heartbeat=beat))
        return self.notice().heartbeat

    def notice(self) -> session_service_pb2.StreamResponse:
        """Return what comes next on the stream, or raise RefusedError."""
        try:
            return next(self._stream)
        except grpc.RpcError as error:
            raise RefusedError(refusal_of(error)) from error

    def watch(self, **fields) -> GrpcWatch:
        """Follow the events."""
        request = request_of(Method.WATCH_EVENTS, **fields)
        stub = self.stubs["EventService"]
        return GrpcWatch(stub.WatchEvents(request, timeout=WAIT_S, metadata=self.metadata))

    def close(self) -> None:
        """Hang up."""
        if self._beats is not None:
            self._beats.put(None)
        self.channel.close()


class GrpcWatch:
    """The answers of one WatchEvents call."""

    def __init__(self, call) -> None:
        self._call = call

    def next(self) -> event_service_pb2.WatchEventsResponse:
        """Return the next answer, or raise RefusedError."""
        try:
            return next(self._call)
        except grpc.RpcError as error:
            raise RefusedError(refusal_of(error)) from error


def refusal_of(error: grpc.RpcError) -> Refusal:
    """Return what a failed call says; its code and words must be those of its status details."""
    details = dict(error.trailing_metadata() or ()).get("grpc-status-details-bin")
    if details is None:
        return Refusal(error.code().name, "", error.details(), None)
    refusal = Refusal.of(details)
    assert (error.code().name, error.details()) == (refusal.code, refusal.message)
    return refusal


class Engine:
    """A session on one peer, with short verbs; numbers stand for keys."""

    _fresh = itertools.count(1)

    def __init__(
        self, peer, *, incarnation: bytes = b"", name: str = "contract", resume: bytes = b""
    ) -> None:
        self.peer = peer
        self.incarnation = incarnation or self.fresh()
        self.attached = peer.call(
            Method.ATTACH, engine_incarnation=self.incarnation, client_name=name, resume_token=resume
        )
        self.spaces: list[int] = []
        self.namespace_id = b""

    @classmethod
    def fresh(cls) -> bytes:
        """Return 16 bytes that no call returned before."""
        return next(cls._fresh).to_bytes(16, "little")

    def open(
        self, *block_bytes: int, salt: bytes = b"", **identity
    ) -> session_service_pb2.OpenNamespaceResponse:
        """Open a namespace with a part for each size, in groups of their own, and work in it."""
        answer = self.peer.call(
            Method.OPEN_NAMESPACE, **open_fields(*(block_bytes or (BLOCK_BYTES,)), salt=salt, **identity)
        )
        self.spaces, self.namespace_id = list(answer.space_ids), answer.namespace_id
        return answer

    def reserve(self, numbers, *, request_id: bytes = b"", **fields):
        """Ask for the right to write."""
        fields = {"space_ids": self.spaces, "keys": keys(numbers)} | fields
        return self.peer.call(Method.RESERVE, request_id=request_id or self.fresh(), **fields)

    def commit(self, reservation, checksums=()):
        """Commit a reservation, given by its answer."""
        sums = np.array(checksums, dtype="<u4").tobytes()
        return self.peer.call(Method.COMMIT, reservation_id=reservation.reservation_id, checksums=sums)

    def put(self, numbers):
        """Reserve and commit; the bytes are nobody's business here."""
        reservation = self.reserve(numbers)
        self.commit(reservation)
        return reservation

    def abort(self, reservation_id: int) -> int:
        """Give a reservation up and return the outcome."""
        return self.peer.call(Method.ABORT, reservation_id=reservation_id).outcome

    def lookup(self, numbers, **fields):
        """Look keys up."""
        return self.peer.call(Method.LOOKUP, space_ids=self.spaces, keys=keys(numbers), **fields)

    def outcomes(self, numbers) -> list[int]:
        """Look keys up and return their outcomes."""
        return list(self.lookup(numbers).outcomes)

    def acquire(self, numbers, **fields):
        """Lease the committed prefix."""
        return self.peer.call(Method.ACQUIRE, space_ids=self.spaces, keys=keys(numbers), **fields)

    def verify(self, numbers) -> list[int]:
        """Have blocks looked at and return the outcomes."""
        return list(self.peer.call(Method.VERIFY, space_ids=self.spaces, keys=keys(numbers)).outcomes)

    def renew(self, **fields):
        """Prolong."""
        return self.peer.call(Method.RENEW, **fields)

    def release(self, *lease_ids: int) -> list[int]:
        """End leases and return the outcomes."""
        return list(self.peer.call(Method.RELEASE, lease_ids=lease_ids).outcomes)

    def beat(self, **fields):
        """Send a heartbeat."""
        return self.peer.call(Method.HEARTBEAT, **fields)

    def tier(self) -> tier_service_pb2.Tier:
        """Return the tier's counts."""
        return self.peer.call(Method.LIST_TIERS).tiers[0]


def key(number: int) -> bytes:
    """Return the block key of a number."""
    return number.to_bytes(8, "big") * 4


def keys(numbers) -> bytes:
    """Return packed keys; bytes pass as they are."""
    return numbers if isinstance(numbers, bytes) else b"".join(key(number) for number in numbers)


def open_fields(*block_bytes: int, salt: bytes = b"", **identity) -> dict:
    """Return the fields of an OpenNamespaceRequest."""
    fields = {
        "model_id": "model",
        "weights_revision": "1",
        "layers_count": 64,
        "kv_heads_count": 8,
        "k_head_dim": 128,
        "hash_tokens": 16,
    } | identity
    shape = {
        "dtype": "bfloat16",
        "kv_packing": "packed",
        "block_tokens": 16,
        "tensor_parallel_size": 1,
        "pipeline_parallel_size": 1,
    }
    parts = [
        {"kv_group": group, "layers_count": 1, "heads_count": 1, "shape": shape, "block_bytes": size}
        for group, size in enumerate(block_bytes)
    ]
    return {"identity": fields, "salt": salt, "parts": parts}


@dataclass(frozen=True, slots=True)
class Unpacked:
    """Slot arrays as lists of numbers."""

    segments: list[int]
    granules: list[int]
    generations: list[int]
    checksums: list[int]

    @classmethod
    def of(cls, slots) -> Unpacked:
        """Read packed arrays, little endian, as block.proto draws them."""
        widths = {"segments": "<u4", "granules": "<u4", "generations": "<u8", "checksums": "<u4"}
        return cls(*(np.frombuffer(getattr(slots, name), dtype).tolist() for name, dtype in widths.items()))

    @property
    def places(self) -> list[tuple[int, int]]:
        """Segment and granule of each slot."""
        return list(zip(self.segments, self.granules, strict=True))
