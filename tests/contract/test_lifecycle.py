"""The lifecycle contract over gRPC and over the local lane, and what only one of them has."""

from __future__ import annotations

import hashlib
import os

import grpc
import pytest
from google.protobuf import descriptor_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from kvproto.kv.v1 import session_service_pb2
from kvservice.ports.methods import Method
from kvservice.transports.frames import FrameKind, encode
from tests.contract.lifecycle_contract import (
    DONE,
    HIT,
    SESSION_UNKNOWN,
    TTL_S,
    SessionContract,
    WriteContract,
    check_refused,
)
from tests.contract.lifecycle_edges import (
    SERVICES,
    WAIT_S,
    Engine,
    GrpcPeer,
    House,
    LanePeer,
    Refusal,
    key,
    refusal_of,
)
from tests.contract.lifecycle_facts import EventContract, ExpiryContract, FactsContract
from tests.contract.lifecycle_handoff_ends import (
    GrpcHandoffContract,
    HandoffEndContract,
    HandoffNewsContract,
)
from tests.contract.lifecycle_handoffs import ClaimContract, OfferContract, SegmentContract
from tests.contract.lifecycle_reads import ReadContract

REMOTE_PATIENCE = {"KVSERVICE_LEASE__HEARTBEAT_TIMEOUT_MS": "600000"}
"""The clock jumps by whole leases here; a remote session shall live through that."""


@pytest.fixture
def make_house(tmp_path, monkeypatch):
    """Return a way to start daemons, which stop with the test."""
    houses = []

    def make(*, config: str = "", **environ: str) -> House:
        houses.append(House(monkeypatch, tmp_path, config=config, **(REMOTE_PATIENCE | environ)))
        return houses[-1]

    yield make
    for house in houses:
        house.close()


@pytest.fixture
def house(make_house):
    """A daemon with its defaults."""
    return make_house()


@pytest.fixture
def dial(make_house):
    """Return a way to connect a peer of a given kind; it depends on the daemons, so it hangs up first."""
    peers = []

    def make(kind, house: House, token: str = ""):
        peers.append(kind(house, token))
        return peers[-1]

    yield make
    for peer in peers:
        peer.close()


@pytest.fixture
def connect(dial, request):
    """Return a way to connect over the edge of the test's class."""
    kind = request.cls.edge
    return lambda house, token="": dial(kind, house, token)


@pytest.fixture
def peer(connect, house):
    """A connection that has no session yet."""
    return connect(house)


class Contract(
    SessionContract,
    WriteContract,
    ReadContract,
    FactsContract,
    EventContract,
    ExpiryContract,
    SegmentContract,
    OfferContract,
    ClaimContract,
    HandoffEndContract,
    HandoffNewsContract,
):
    """All of it."""


class TestGrpc(Contract):
    """gRPC, with the generated stubs."""

    edge = GrpcPeer


class TestLane(Contract):
    """The local lane, frame by frame."""

    edge = LanePeer


class TestGrpcAlone(GrpcHandoffContract):
    """What only gRPC has."""

    edge = GrpcPeer

    def test_the_stream_answers_beats(self, house, peer):
        """The stream does what Heartbeat does, answer for beat, in order."""
        engine = Engine(peer)
        engine.open()
        peer.listen()
        reservation = engine.reserve([1]).reservation_id
        house.time.advance(TTL_S - 1)
        assert list(peer.beat(reservation_ids=[reservation]).reservation_outcomes) == [DONE]
        house.time.advance(TTL_S - 1)
        assert list(peer.beat(reservation_ids=[reservation, 5]).reservation_outcomes) == [DONE, 10]

    def test_the_stream_refuses_a_bad_beat(self, peer):
        """A beat that would be refused as a call ends the stream with the same reason."""
        Engine(peer)
        peer.listen()
        check_refused(("INVALID_ARGUMENT", "INVALID_FIELD"), peer.beat, touched_segments=[1])

    def test_the_stream_needs_a_session(self, peer):
        """Without a session, and with the token of one that ended, the stream is refused."""
        check_refused(SESSION_UNKNOWN, peer.listen)
        Engine(peer)
        peer.call(Method.DETACH)
        check_refused(SESSION_UNKNOWN, peer.listen)

    def test_the_stream_ends_with_its_session(self, house, dial):
        """The session's end is told unasked, with a reason, so that the client attaches anew."""
        peer, other = dial(GrpcPeer, house), dial(GrpcPeer, house)
        Engine(peer)
        peer.listen()
        other.session_token = peer.session_token
        other.call(Method.DETACH)
        check_refused(SESSION_UNKNOWN, peer.notice, says="attach again")

    def test_a_grpc_stream_of_a_local_session_hears_revocations(self, house, dial):
        """GRPC calls join a session by its token; what is revoked is told on its stream unasked."""
        lane, remote = dial(LanePeer, house), dial(GrpcPeer, house)
        engine = Engine(lane)
        engine.open()
        remote.session_token = lane.session_token
        remote.listen()
        reservation = engine.reserve([1]).reservation_id
        house.time.advance(TTL_S)
        engine.outcomes([1])
        assert list(remote.notice().revoked_ids) == [reservation]
        assert list(lane.notice().revoked_ids) == [reservation]
        assert not remote.beat(acknowledged_ids=[reservation]).revoked_ids
        assert engine.tier().slots_quarantined_count == 0

    def test_a_silent_remote_session_ends(self, make_house, dial):
        """A remote session that is not heard of for heartbeat_timeout is dead, and its slots are free."""
        house = make_house(KVSERVICE_LEASE__HEARTBEAT_TIMEOUT_MS="10000")
        quiet, loud = dial(GrpcPeer, house), dial(GrpcPeer, house)
        engine, watcher = Engine(quiet), Engine(loud)
        engine.open()
        engine.reserve([1])
        for _ in range(4):
            house.time.advance(3)
            watcher.beat()
        check_refused(SESSION_UNKNOWN, engine.beat)
        assert [owner.session_id for owner in loud.call(Method.LIST_TIERS).owners] == [
            watcher.attached.session_id
        ]
        assert watcher.tier().used_bytes == 0

    def test_tenants_come_from_bearer_tokens(self, make_house, dial):
        """A token names one tenant; a wrong one names nobody; blocks of two tenants never meet."""
        digest = {name: hashlib.sha256(name.encode()).hexdigest() for name in ("red", "blue")}
        config = "".join(f'[tenants.{name}]\ntoken_sha256 = "{digest[name]}"\n' for name in digest)
        house = make_house(config=config)
        red, blue = (Engine(dial(GrpcPeer, house, name)) for name in ("red", "blue"))
        assert (red.attached.tenant, blue.attached.tenant) == ("red", "blue")
        assert red.open().namespace_id != blue.open().namespace_id
        red.put([1])
        assert (red.outcomes([1]), blue.outcomes([1])) == ([1], [2])
        purged = blue.peer.call(Method.PURGE_NAMESPACE, namespace_id=red.namespace_id)
        assert purged.blocks_count == 0
        assert red.outcomes([1]) == [1]
        blue.put([2])
        assert blue.peer.watch(after_sequence=0).next().events[0].sequence == 1
        stranger = dial(GrpcPeer, house, "green")
        check_refused(("UNAUTHENTICATED", "TENANT_UNKNOWN"), Engine, stranger)

    def test_a_session_token_is_of_no_use_to_another_tenant(self, make_house, dial):
        """Whoever got hold of it needs the tenant's bearer token too; the session goes on unhurt."""
        digest = {name: hashlib.sha256(name.encode()).hexdigest() for name in ("red", "blue")}
        config = "".join(f'[tenants.{name}]\ntoken_sha256 = "{digest[name]}"\n' for name in digest)
        house = make_house(config=config)
        red, thief = Engine(dial(GrpcPeer, house, "red")), dial(GrpcPeer, house, "blue")
        red.open()
        red.put([1])
        thief.session_token = red.peer.session_token
        fields = {"space_ids": red.spaces, "keys": key(1)}
        check_refused(SESSION_UNKNOWN, thief.call, Method.LOOKUP, says="this tenant", **fields)
        check_refused(SESSION_UNKNOWN, thief.call, Method.PURGE_NAMESPACE, namespace_id=red.namespace_id)
        check_refused(SESSION_UNKNOWN, thief.call, Method.DETACH)
        assert red.outcomes([1]) == [HIT]

    def test_a_default_tenant_with_a_token_is_closed(self, make_house, dial):
        """Once the tenant `default` has a token, whoever shows none is nobody."""
        digest = hashlib.sha256(b"secret").hexdigest()
        house = make_house(config=f'[tenants.default]\ntoken_sha256 = "{digest}"\n')
        check_refused(("UNAUTHENTICATED", "TENANT_UNKNOWN"), Engine, dial(GrpcPeer, house), says="token")
        assert Engine(dial(GrpcPeer, house, "secret")).attached.tenant == "default"

    def test_health_answers(self, make_house, dial):
        """The standard health service says SERVING, and NOT_SERVING once the daemon drains."""
        house = make_house(KVSERVICE_SERVER__DRAIN_TIMEOUT_MS="9000")
        peer = dial(GrpcPeer, house)
        engine = Engine(peer)
        engine.open()
        reservation = engine.reserve([1])
        stub = health_pb2_grpc.HealthStub(peer.channel)
        watch = stub.Watch(health_pb2.HealthCheckRequest(), timeout=WAIT_S)
        assert next(watch).status == health_pb2.HealthCheckResponse.SERVING
        house.begin_stop()
        assert next(watch).status == health_pb2.HealthCheckResponse.NOT_SERVING
        watch.cancel()
        assert engine.commit(reservation).outcome == DONE

    def test_reflection_describes_every_service(self, peer):
        """A client without our protos can ask for them."""
        stub = reflection_pb2_grpc.ServerReflectionStub(peer.channel)
        wanted = [f"kv.v1.{service}" for service in SERVICES]
        asked = [reflection_pb2.ServerReflectionRequest(list_services="")]
        asked += [reflection_pb2.ServerReflectionRequest(file_containing_symbol=name) for name in wanted]
        answers = list(stub.ServerReflectionInfo(iter(asked), timeout=WAIT_S))
        listed = {service.name for service in answers[0].list_services_response.service}
        assert listed >= {*wanted, "grpc.health.v1.Health"}
        for answer, name in zip(answers[1:], wanted, strict=True):
            files = [
                descriptor_pb2.FileDescriptorProto.FromString(packed)
                for packed in answer.file_descriptor_response.file_descriptor_proto
            ]
            assert any(f"{one.package}.{service.name}" == name for one in files for service in one.service)

    def test_a_method_that_does_not_exist_is_unimplemented(self, peer):
        """GRPC's own word for it."""
        call = peer.channel.unary_unary("/kv.v1.LifecycleService/Conjure")
        with pytest.raises(grpc.RpcError) as caught:
            call(b"", timeout=WAIT_S)
        assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED

    def test_a_message_that_cannot_be_parsed_is_malformed(self, peer):
        """One reason on both edges: INVALID_ARGUMENT MALFORMED (error_reason.proto)."""
        Engine(peer)
        call = peer.channel.unary_unary("/kv.v1.LifecycleService/Lookup")
        with pytest.raises(grpc.RpcError) as caught:
            call(b"\xff\xff\xff", timeout=WAIT_S, metadata=peer.metadata)
        assert refusal_of(caught.value).kind == ("INVALID_ARGUMENT", "MALFORMED")


class TestLaneAlone:
    """What only the local lane has."""

    edge = LanePeer

    @pytest.mark.parametrize("method", [999, Method.READ_SLOTS, Method.WRITE_SLOTS, Method.STREAM])
    def test_a_method_of_another_edge_is_unknown(self, house, peer, method):
        """It is answered, with or without a session, and the connection goes on."""
        check_refused(("UNIMPLEMENTED", "UNKNOWN_METHOD"), peer.call_raw, method, b"", says=str(int(method)))
        Engine(peer)
        check_refused(("UNIMPLEMENTED", "UNKNOWN_METHOD"), peer.call_raw, method, b"", says=str(int(method)))
        assert peer.call(Method.LIST_TIERS).owners

    @pytest.mark.parametrize("method", [Method.LOOKUP, Method.WATCH_EVENTS, Method.MAP_SEGMENTS])
    def test_a_message_that_cannot_be_parsed_closes_the_connection(self, house, dial, method):
        """MALFORMED is answered, then the connection ends; the session does not."""
        peer = dial(LanePeer, house)
        engine = Engine(peer)
        check_refused(("INVALID_ARGUMENT", "MALFORMED"), peer.call_raw, method, b"\xff\xff\xff")
        assert peer.is_closed_by_daemon()
        again = Engine(dial(LanePeer, house), incarnation=engine.incarnation, resume=peer.session_token)
        assert again.attached.resumed

    @pytest.mark.parametrize(
        "packed",
        [
            bytes(64),
            b"\xff" * 64,
            b"GET / HTTP/1.1\r\nHost: here\r\n\r\n",
            encode(FrameKind.RESPONSE, Method.LOOKUP, 1, 0, b""),
            encode(FrameKind.STREAM, Method.STREAM, 0, 0, b""),
        ],
    )
    def test_what_is_no_request_gets_an_error_and_the_end(self, house, dial, packed):
        """A peer that does not speak the protocol is told once, and hung up on."""
        peer = dial(LanePeer, house)
        peer.socket.sendall(packed)
        frame = peer.frame(lambda one: one.kind is FrameKind.ERROR)
        assert Refusal.of(frame.body).kind == ("INVALID_ARGUMENT", "MALFORMED")
        assert peer.is_closed_by_daemon()
        assert dial(LanePeer, house).call(Method.LIST_TIERS).tiers

    def test_a_frame_may_come_byte_by_byte(self, peer):
        """A stream socket has no packets: frames are cut by their length alone."""
        body = session_service_pb2.AttachRequest(engine_incarnation=bytes(16)).SerializeToString()
        for byte in encode(FrameKind.REQUEST, Method.ATTACH, 7, 0, body):
            peer.socket.sendall(bytes([byte]))
        answer = peer.frame(lambda one: one.call_id == 7)
        assert answer.kind is FrameKind.RESPONSE
        assert len(session_service_pb2.AttachResponse.FromString(answer.body).session_token) == 16

    def test_many_requests_at_once_are_answered_in_order(self, peer):
        """Requests may be sent without waiting; answers bear their call ids."""
        Engine(peer)
        sent = [peer.send(Method.HEARTBEAT, b"") for _ in range(100)]
        assert [peer.frame(lambda _: True).call_id for _ in sent] == sent

    def test_a_user_of_no_tenant_is_told_and_hung_up_on(self, make_house, dial):
        """Where `default` is closed, a local user that no tenant lists is refused with the reason."""
        digest = hashlib.sha256(b"secret").hexdigest()
        house = make_house(config=f'[tenants.default]\ntoken_sha256 = "{digest}"\n')
        peer = dial(LanePeer, house)
        frame = peer.frame(lambda one: one.call_id == 0)
        refusal = Refusal.of(frame.body)
        assert refusal.kind == ("UNAUTHENTICATED", "TENANT_UNKNOWN")
        assert str(os.getuid()) in refusal.message
        assert peer.is_closed_by_daemon()

    def test_a_local_user_is_its_tenant(self, make_house, dial):
        """`tenants.NAME.uids` makes a user of this host that tenant."""
        digest = hashlib.sha256(b"secret").hexdigest()
        config = f'[tenants.ours]\ntoken_sha256 = "{digest}"\nuids = [{os.getuid()}]\n'
        assert Engine(dial(LanePeer, make_house(config=config))).attached.tenant == "ours"
