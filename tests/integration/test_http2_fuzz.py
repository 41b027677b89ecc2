"""Wrong HTTP/2, wrong gRPC and wrong messages: the daemon serves others on, in bounded memory."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import random
import struct
import threading
import time
from pathlib import Path

import grpc
import numpy as np
import pytest
from google.protobuf.descriptor import MethodDescriptor

from kvclient import DeadlineError, KvError, MalformedError, PeerUnavailableError
from kvclient.sync import KvClient
from kvproto.kv.v1 import (
    capabilities_service_pb2,
    event_service_pb2,
    handoff_service_pb2,
    lifecycle_service_pb2,
    segment_service_pb2,
    session_service_pb2,
    tier_service_pb2,
)
from kvservice.transports.frames import decode_error
from tests.integration import http2_frames as h2
from tests.integration.daemon_process import (
    BLOCK_BYTES,
    check_stored,
    content,
    identity,
    keys,
    open_namespace,
    opened,
    parts,
    settings_of,
    tier,
    until,
)
from tests.integration.http2_frames import Http2Socket, Kind

SECONDS = 2.0
ROUNDS_MIN = 60
ANSWER_LIMIT_S = 5.0
PAUSE_S = 0.005
SLOWEST_S = 3.0
GROWTH_LIMIT_BYTES = 64 << 20
"""Of the daemon's own memory, without the arena: what threads, buffers and the allocator may keep."""

METHODS: list[MethodDescriptor] = [
    method
    for module in (
        capabilities_service_pb2,
        event_service_pb2,
        handoff_service_pb2,
        lifecycle_service_pb2,
        segment_service_pb2,
        session_service_pb2,
        tier_service_pb2,
    )
    for service in module.DESCRIPTOR.services_by_name.values()
    for method in service.methods
]
CAPABILITIES = b"/kv.v1.CapabilitiesService/GetCapabilities"
GOOD = h2.conversation(h2.request(1, h2.headers_of(CAPABILITIES), h2.message(b"")))
STRANGE_PATHS = [
    b"",
    b"/",
    b"//",
    b"/kv.v1.LifecycleService",
    b"/kv.v1.LifecycleService/Nothing",
    b"/kv.v2.LifecycleService/Lookup",
    b"/kv.v1.LifecycleService/Lookup\x00",
    b"/" + b"x" * 5000,
    b"/grpc.health.v1.Health/Check",
    b"/grpc.health.v1.Health/Watch",
    b"/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo",
]
STRANGE_METADATA = {
    "content_type": [b"text/html", b"application/grpc+json", b"", b"application/grpc" * 50],
    "te": [b"", b"gzip"],  # codespell:ignore te
    "grpc_timeout": [b"1n", b"0S", b"99999999H", b"-1S", b"abc", b"", b"1000000000000S", b"1u"],
    "grpc_encoding": [b"gzip", b"nonsense", b""],
    "content_length": [b"18446744073709551616", b"-1", b"5"],
    "kv_session_bin": [b"", b"!", b"////", h2.binary(b"short"), h2.binary(bytes(5000))],
    "authorization": [
        b"",
        b"Bearer",
        b"Bearer ",
        b"Basic Zg==",
        b"bearer \xff\xfe",
        b"Bearer " + b"y" * 7000,
    ],
    "user_agent": [b"\x00\x01", b"z" * 3000],
}
TOKEN = "fuzz"
CONFIG = f"""
[tenants.fuzz]
token_sha256 = "{hashlib.sha256(TOKEN.encode()).hexdigest()}"
quota_bytes = "2MiB"
"""
"""Who is fuzzed with has a tenant of its own, so that what it stores by accident evicts nobody."""

SETTINGS = {"lease.ttl_ms": 1500, "lease.renew_interval_ms": 300, "lease.heartbeat_timeout_ms": 1500}


class Bystander(threading.Thread):
    """A healthy client over gRPC, at work all the time; it must notice nothing."""

    def __init__(self, endpoint: str) -> None:
        super().__init__(name="bystander")
        self.done_count = 0
        self.outages_count = 0
        self.slowest_s = 0.0
        self.error: BaseException | None = None
        self._endpoint = endpoint
        self._end = threading.Event()

    def run(self) -> None:
        """Store and read until the end."""
        try:
            with opened(self._endpoint, client_name="bystander") as (_, namespace):
                into = np.zeros((2, BLOCK_BYTES), np.uint8)
                for number in itertools.count():
                    if self._end.wait(PAUSE_S):
                        return
                    numbers = [2 * number, 2 * number + 1]
                    started = time.monotonic()
                    try:
                        assert namespace.put(keys(numbers), content(numbers)).stored_count == 2
                        assert namespace.get(keys(numbers), into).prefix_count == 2
                    except (PeerUnavailableError, DeadlineError):
                        self.outages_count += 1
                        continue
                    self.slowest_s = max(self.slowest_s, time.monotonic() - started)
                    assert np.array_equal(into, content(numbers))
                    self.done_count += 1
        except (KvError, AssertionError) as error:
            self.error = error

    def end(self) -> None:
        """Let it end, and wait until it has."""
        self._end.set()
        self.join(20.0)
        assert not self.is_alive()


class Insider:
    """A session of the fuzzer's own: requests in its name get deeper than a stranger's."""

    def __init__(self, client: KvClient) -> None:
        self._client = client
        self._namespace = open_namespace(client)
        self.hints: dict[str, list[object]] = {}
        self.session_token = b""
        self.refresh()

    def refresh(self) -> None:
        """Take stock: a request may have ended the session, and all that it had."""
        namespace = self._namespace
        namespace.put(keys(range(4)), content(range(4)))
        lease = namespace.acquire(keys(range(4)))
        reservation = namespace.reserve(keys([99]))
        assert lease is not None
        spaces = [*namespace.handles().space_ids, 7]
        self.session_token = self._client.attachment.session_token
        packed = [b"".join(keys(range(count))) for count in (1, 4, 200)]
        self.hints = {
            "space_ids": list(spaces),
            "space_id": list(spaces),
            "keys": [*packed, b"", packed[0] * 2, packed[1][:-1]],
            "request_id": [bytes(16), b"r" * 16],
            "engine_incarnation": [bytes(16)],
            "lease_ids": [lease.lease_id],
            "lease_id": [lease.lease_id],
            "reservation_ids": [reservation.reservation_id],
            "reservation_id": [reservation.reservation_id],
            "namespace_id": [namespace.namespace_id, bytes(32)],
            "checksums": [bytes(4), bytes(3)],
            "seconds": [0, 1, 60, 1 << 62, (1 << 64) - 1],
            "nanos": [0, 1, 999_999_999, (1 << 64) - 1],
            "identity": [OPENING.identity.SerializeToString()],
            "parts": [OPENING.parts[0].SerializeToString()],
        }


def opening() -> session_service_pb2.OpenNamespaceRequest:
    """Return a good request to open a namespace, by field names that both sides share."""
    request = session_service_pb2.OpenNamespaceRequest()
    for field in request.identity.DESCRIPTOR.fields:
        setattr(request.identity, field.name, getattr(identity(), field.name))
    part, message = parts()[0], request.parts.add()
    for field in message.DESCRIPTOR.fields:
        if field.name != "shape":
            setattr(message, field.name, getattr(part, field.name))
    message.shape.dtype, message.shape.kv_packing = part.shape.dtype, part.shape.kv_packing
    message.shape.block_tokens = part.shape.block_tokens
    return request


OPENING = opening()


@pytest.fixture
def ground(start_daemon):
    """A daemon with a bystander at work on it; in the end it is as it was."""
    daemon = start_daemon(config=CONFIG, settings=SETTINGS)
    bystander = Bystander(daemon.grpc)
    bystander.start()
    try:
        with opened(daemon.lane, client_name="onlooker") as (client, _):
            until(lambda: bystander.done_count > 20 or bystander.error, "the bystander is at work")
            settled = daemon.descriptors_count()
            yield daemon, bystander
            before = bystander.done_count
            until(lambda: bystander.done_count > before + 20 or bystander.error, "it works on")
            bystander.end()
            assert bystander.error is None, repr(bystander.error)
            assert bystander.slowest_s < SLOWEST_S
            until(lambda: len(client.list_tiers().owners) == 1, "no session of the fuzzer is left")
            until(lambda: daemon.descriptors_count() < settled + 3, "nor a connection")
            assert tier(client).slots_reserved_count + tier(client).slots_evicting_count == 0
    finally:
        bystander.end()
    with opened(daemon.grpc) as (_, namespace):
        namespace.put(keys([7]), content([7]))
        check_stored(namespace, [7])
    assert all("started anew" in line for line in complaints(daemon)), complaints(daemon)
    assert daemon.stop() == 0


def complaints(daemon) -> list[str]:
    """Return what the daemon itself complained of; gRPC, too, writes on stderr what it thinks of requests."""
    text = Path(daemon.socket_path).with_name("stderr").read_text(errors="replace")
    return [line for line in text.splitlines() if " ERROR kvservice" in line or " CRITICAL kvservice" in line]


def own_bytes(daemon) -> int:
    """Return the daemon's resident memory, without what it shares with clients."""
    lines = Path(f"/proc/{daemon.pid}/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("RssAnon:"))


def a_request(rng: random.Random, insider: Insider, stream: int) -> bytes:
    """Return a request that is wrong in some way, or in none."""
    method = rng.choice(METHODS)
    body = h2.random_fields(rng, method.input_type, insider.hints)
    path = f"/{method.containing_service.full_name}/{method.name}".encode()
    metadata = {
        "kv_session_bin": h2.binary(insider.session_token),
        "authorization": f"Bearer {TOKEN}".encode(),
    }
    if rng.random() < 0.15:
        path = rng.choice(STRANGE_PATHS)
    for name, values in STRANGE_METADATA.items():
        if rng.random() < 0.04:
            metadata[name] = rng.choice(values)
    if body and rng.random() < 0.2:
        body = body[: rng.randrange(len(body))]
    if body and rng.random() < 0.1:
        spoilt = bytearray(body)
        spoilt[rng.randrange(len(spoilt))] ^= 1 << rng.randrange(8)
        body = bytes(spoilt)
    packed = h2.message(body)
    trouble = rng.random()
    if trouble < 0.06:
        packed = h2.message(
            body, length=rng.choice([0, 1, len(body) + 1, 1 << 24, (1 << 24) + 1, (1 << 32) - 1])
        )
    elif trouble < 0.1:
        packed = h2.message(body, flag=rng.choice([1, 2, 255]))
    elif trouble < 0.14:
        packed += h2.message(body)
    elif trouble < 0.18:
        packed = packed[: rng.randrange(len(packed) + 1)]
    whole = h2.request(stream, h2.headers_of(path, **metadata), packed)
    if rng.random() < 0.1:
        whole += h2.frame(Kind.RST_STREAM, 0, stream, struct.pack(">I", rng.choice([0, 8, 99])))
    return whole


def an_oddity(rng: random.Random, stream: int) -> bytes:
    """Return frames that belong to no request, some of them allowed."""
    any_stream = rng.choice([0, 1, stream, stream + 1, 2, (1 << 31) - 1])
    payload = rng.randbytes(rng.choice([0, 1, 4, 5, 6, 8, 9, 36, 300]))
    headers = h2.header_block(h2.headers_of(CAPABILITIES))
    return rng.choice(
        [
            h2.frame(Kind.PING, rng.choice([0, h2.ACK]), 0, rng.randbytes(8)),
            h2.frame(Kind.WINDOW_UPDATE, 0, any_stream, struct.pack(">I", rng.choice([0, 1, (1 << 31) - 1]))),
            h2.frame(Kind.SETTINGS, 0, 0, struct.pack(">HI", rng.randrange(8), rng.getrandbits(32))),
            h2.frame(Kind.PRIORITY, 0, any_stream, struct.pack(">IB", any_stream, 1)),
            h2.frame(Kind.RST_STREAM, 0, any_stream, struct.pack(">I", 8)),
            h2.frame(Kind.GOAWAY, 0, 0, struct.pack(">II", 0, rng.getrandbits(4)) + payload),
            h2.frame(Kind.CONTINUATION, h2.END_HEADERS, any_stream, payload),
            h2.frame(Kind.PUSH_PROMISE, h2.END_HEADERS, any_stream, payload),
            h2.frame(Kind.HEADERS, h2.END_HEADERS, any_stream, headers),
            h2.frame(Kind.HEADERS, h2.END_HEADERS | h2.PADDED, stream, b"\xff" + headers),
            h2.frame(Kind.HEADERS, 0, stream, headers),
            h2.frame(Kind.DATA, h2.PADDED, any_stream, b"\x09" + payload),
            h2.frame(Kind.DATA, 0, any_stream, payload),
            h2.frame(rng.randrange(256), rng.randrange(256), any_stream, payload),
            h2.frame(
                rng.randrange(10), 0, any_stream, payload, length=rng.choice([0, 1, 1 << 14, (1 << 24) - 1])
            ),
        ]
    )


def a_conversation(rng: random.Random, insider: Insider) -> tuple[bytes, int]:
    """Return what a connection says, and the stream on which a good request ends it."""
    packed = h2.conversation()
    stream = 1
    for _ in range(rng.randint(1, 8)):
        packed += an_oddity(rng, stream) if rng.random() < 0.12 else a_request(rng, insider, stream)
        stream += 2
    if rng.random() < 0.15:
        spoilt = bytearray(packed)
        for _ in range(rng.choice([1, 1, 20])):
            # Never the highest bit: paths that are no text have a test of their own.
            spoilt[rng.randrange(len(h2.PREFACE), len(spoilt))] ^= 1 << rng.randrange(7)
        packed = bytes(spoilt)
    return packed + h2.request(stream, h2.headers_of(CAPABILITIES), h2.message(b"")), stream


def is_answered(daemon, packed: bytes, stream: int, timeout_s: float) -> bool:
    """Say whether the good request at the end of a conversation is answered."""
    with Http2Socket(daemon.grpc.removeprefix("grpc://"), timeout_s) as connection:
        connection.send(packed)
        with contextlib.suppress(TimeoutError):
            answer = connection.wait_for(stream)
            if answer is not None:
                capabilities_service_pb2.GetCapabilitiesResponse.FromString(answer[5:])
                return True
    return False


def test_wrong_requests_harm_nobody(ground, rng):
    """Headers, prefixes, messages and frames that are wrong in one place: an error, a reset, or a hang-up."""
    daemon, bystander = ground
    assert is_answered(daemon, GOOD, 1, ANSWER_LIMIT_S)
    rounds_count = answered_count = 0
    with KvClient.connect(settings_of(daemon.grpc, token=TOKEN, client_name="insider")) as client:
        insider = Insider(client)
        end_s = time.monotonic() + SECONDS
        before = 0
        while time.monotonic() < end_s or rounds_count < ROUNDS_MIN:
            if rounds_count % 20 == 0:
                insider.refresh()
            if rounds_count == ROUNDS_MIN // 2:
                before = own_bytes(daemon)
            answered_count += is_answered(daemon, *a_conversation(rng, insider), 0.2)
            rounds_count += 1
        grown = own_bytes(daemon) - before
    assert answered_count > rounds_count // 10, (answered_count, rounds_count)
    assert grown < GROWTH_LIMIT_BYTES, grown
    assert (bystander.outages_count, complaints(daemon)) == (0, [])


FLOOD_COUNT = 5000


def floods() -> dict[str, bytes]:
    """Return by name what floods a connection: much of something that is cheap to say."""
    path = b"/kv.v1.LifecycleService/Lookup"
    headers = h2.header_block(h2.headers_of(path))
    open_stream = h2.frame(Kind.HEADERS, h2.END_HEADERS, 1, headers)
    streams = range(1, 2 * FLOOD_COUNT, 2)
    return {
        "streams that are reset at once": b"".join(
            h2.frame(Kind.HEADERS, h2.END_HEADERS, stream, headers)
            + h2.frame(Kind.DATA, 0, stream, h2.message(b""))
            + h2.frame(Kind.RST_STREAM, 0, stream, struct.pack(">I", 8))
            for stream in streams
        ),
        "streams that never end": b"".join(
            h2.frame(Kind.HEADERS, h2.END_HEADERS, stream, headers) for stream in streams
        ),
        "messages that are announced and never come": b"".join(
            h2.frame(Kind.HEADERS, h2.END_HEADERS, stream, headers)
            + h2.frame(Kind.DATA, 0, stream, h2.message(b"", length=16 << 20))
            for stream in streams
        ),
        "headers that never end": h2.frame(Kind.HEADERS, 0, 1, headers)
        + h2.frame(Kind.CONTINUATION, 0, 1, h2.header_block([(b"x", b"y" * 16_000)])) * (FLOOD_COUNT // 20),
        "pings": h2.frame(Kind.PING, 0, 0, bytes(8)) * FLOOD_COUNT,
        "settings": h2.frame(Kind.SETTINGS, 0, 0, struct.pack(">HI", 4, 65_535)) * FLOOD_COUNT,
        "data of nothing": open_stream + h2.frame(Kind.DATA, 0, 1) * FLOOD_COUNT,
        "windows": open_stream + h2.frame(Kind.WINDOW_UPDATE, 0, 1, struct.pack(">I", 1)) * FLOOD_COUNT,
        "resets of nothing": h2.frame(Kind.RST_STREAM, 0, 99, struct.pack(">I", 8)) * FLOOD_COUNT,
    }


def test_floods_cost_a_bounded_amount(ground):
    """Nobody reads the answers, and all connections stay open until the memory has been looked at."""
    daemon, _ = ground
    address = daemon.grpc.removeprefix("grpc://")
    before = own_bytes(daemon)
    with contextlib.ExitStack() as stack:
        for packed in floods().values():
            connection = stack.enter_context(Http2Socket(address, ANSWER_LIMIT_S))
            with contextlib.suppress(TimeoutError):
                connection.send(h2.conversation(packed))
        for _ in range(50):
            stack.enter_context(Http2Socket(address, ANSWER_LIMIT_S)).send(h2.PREFACE)
        # The call of anybody may be refused while so many wait; the next one is not.
        until(lambda: is_answered(daemon, GOOD, 1, ANSWER_LIMIT_S), "a good request is answered")
        grown = own_bytes(daemon) - before
        assert grown < GROWTH_LIMIT_BYTES, grown
    until(lambda: is_answered(daemon, GOOD, 1, ANSWER_LIMIT_S), "and so is one after them")


def test_a_path_that_is_no_text_stops_the_port_for_a_moment_only(ground):
    """At such a request, from anybody, gRPC ends by itself. Sessions and blocks live on; clients return."""
    daemon, _ = ground
    bad = h2.conversation(h2.request(1, h2.headers_of(b"/\xff\xfe"), h2.message(b"")))
    with opened(daemon.grpc, salt=b"before", call_timeout_s=ANSWER_LIMIT_S) as (client, namespace):
        namespace.put(keys(range(4)), content(range(4)))
        before = client.attachment
        for _ in range(2):
            with Http2Socket(daemon.grpc.removeprefix("grpc://"), ANSWER_LIMIT_S) as connection:
                connection.send(bad)
                assert connection.wait_for(1) is None
            assert namespace.lookup(keys(range(4))).prefix_count == 4
        check_stored(namespace, range(4))
        assert client.attachment.session_id == before.session_id
        assert client.attachment.epoch == 1
    assert len(complaints(daemon)) == 2


@pytest.mark.parametrize(
    "rpc", ["SessionService/Stream", "EventService/WatchEvents", "SessionService/Heartbeat"]
)
def test_a_message_that_cannot_be_parsed_is_malformed_on_every_kind_of_call(shared_daemon, rpc):
    """Also on those that stream: gRPC's own parsing would end them with no reason that a client knows."""
    with (
        opened(shared_daemon.grpc) as (client, _),
        grpc.insecure_channel(shared_daemon.grpc.removeprefix("grpc://")) as channel,
    ):
        call = channel.stream_stream(f"/kv.v1.{rpc}")(
            iter([b"\x0a\xff"]),
            metadata=(("kv-session-bin", client.attachment.session_token),),
            timeout=ANSWER_LIMIT_S,
        )
        with pytest.raises(grpc.RpcError) as caught:
            next(call)
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        details = dict(caught.value.trailing_metadata())["grpc-status-details-bin"]
        assert isinstance(decode_error(details), MalformedError)
        assert client.list_tiers().tiers
    assert not complaints(shared_daemon)
