"""What every lifecycle call does, on whichever edge it comes; `test_lifecycle.py` names the edges."""

from __future__ import annotations

import pytest

from kvproto.kv.v1 import block_pb2, event_service_pb2
from kvservice.ports.methods import Method
from tests.contract.lifecycle_edges import (
    BLOCK_BYTES,
    CAPACITY_BYTES,
    SEGMENT_BYTES,
    Engine,
    Refusal,
    RefusedError,
    Unpacked,
    key,
    keys,
    open_fields,
)

HIT = block_pb2.ITEM_OUTCOME_HIT
MISS = block_pb2.ITEM_OUTCOME_MISS
PENDING = block_pb2.ITEM_OUTCOME_PENDING
GRANTED = block_pb2.ITEM_OUTCOME_GRANTED
ALREADY_COMMITTED = block_pb2.ITEM_OUTCOME_ALREADY_COMMITTED
DONE = block_pb2.ITEM_OUTCOME_DONE
ALREADY_RELEASED = block_pb2.ITEM_OUTCOME_ALREADY_RELEASED
ALREADY_EXPIRED = block_pb2.ITEM_OUTCOME_ALREADY_EXPIRED
ALREADY_ABORTED = block_pb2.ITEM_OUTCOME_ALREADY_ABORTED
UNKNOWN = block_pb2.ITEM_OUTCOME_UNKNOWN

INVALID_FIELD = ("INVALID_ARGUMENT", "INVALID_FIELD")
BATCH_SIZE = ("INVALID_ARGUMENT", "BATCH_SIZE")
BLOCK_SIZE = ("INVALID_ARGUMENT", "BLOCK_SIZE")
DUPLICATE_KEY = ("INVALID_ARGUMENT", "DUPLICATE_KEY")
SESSION_UNKNOWN = ("UNAUTHENTICATED", "SESSION_UNKNOWN")
SPACE_NOT_OPEN = ("PERMISSION_DENIED", "SPACE_NOT_OPEN")
NOT_OWNER = ("PERMISSION_DENIED", "NOT_OWNER")
STALE_INCARNATION = ("ABORTED", "STALE_INCARNATION")
LIMIT_REACHED = ("RESOURCE_EXHAUSTED", "LIMIT_REACHED")
EVENTS_LOST = ("OUT_OF_RANGE", "EVENTS_LOST")

MAX_BATCH_KEYS = 16_384
TTL_S = 10
SLOTS_PER_SEGMENT = SEGMENT_BYTES // BLOCK_BYTES
SLOTS_COUNT = CAPACITY_BYTES // BLOCK_BYTES
NO_REQUEST = "00" * 16
COMMITTED = event_service_pb2.BlockEvent.KIND_COMMITTED
REMOVED = event_service_pb2.BlockEvent.KIND_REMOVED
PURGED = event_service_pb2.BlockEvent.KIND_PURGED


def refused(call, *arguments, **fields) -> Refusal:
    """Return how a call is refused."""
    with pytest.raises(RefusedError) as caught:
        call(*arguments, **fields)
    return caught.value.refusal


def check_refused(kind, call, *arguments, says: str = "", **fields) -> Refusal:
    """Hold a refusal to its code and reason, and its words to what they must name."""
    refusal = refused(call, *arguments, **fields)
    assert refusal.kind == kind, refusal
    assert says in refusal.message, refusal
    assert (refusal.retry_ms is not None) == (kind[0] in {"RESOURCE_EXHAUSTED", "UNAVAILABLE"}), refusal
    return refusal


class SessionContract:
    """Attach, resume, detach, namespaces, heartbeats."""

    def test_attach_answers_the_session_and_its_bounds(self, house, peer):
        """What a client needs to know of its session comes with the session."""
        answer = Engine(peer).attached
        assert len(answer.session_token) == 16
        assert answer.session_id > 0
        assert len(answer.daemon_incarnation) == 16
        assert not answer.resumed
        assert answer.tenant == "default"
        assert answer.lease_ttl.ToMilliseconds() == TTL_S * 1000
        assert answer.renew_interval.ToMilliseconds() == 3000
        assert answer.HasField("heartbeat_timeout") == (not peer.is_local)
        assert answer.tcp_address == house.endpoints.tcp_address
        assert answer.limits.max_batch_keys == MAX_BATCH_KEYS
        assert (answer.limits.arena_bytes, answer.limits.segment_bytes) == (CAPACITY_BYTES, SEGMENT_BYTES)

    def test_attach_refuses_what_is_malformed(self, peer):
        """A bad field is named with its value, and no session is made of it."""
        check_refused(
            INVALID_FIELD, peer.call, Method.ATTACH, engine_incarnation=b"x", says="engine_incarnation has 1"
        )
        check_refused(
            INVALID_FIELD,
            peer.call,
            Method.ATTACH,
            engine_incarnation=bytes(16),
            client_name="n" * 129,
            says="client_name has 129",
        )
        assert not peer.call(Method.LIST_TIERS).owners

    def test_attach_refuses_more_sessions_than_the_limit(self, make_house, connect):
        """Sessions are bounded, and the refusal says when to try again."""
        house = make_house(KVSERVICE_LIMITS__MAX_SESSIONS="1")
        first = Engine(connect(house))
        check_refused(LIMIT_REACHED, Engine, connect(house), says="limits.max_sessions")
        first.peer.call(Method.DETACH)
        assert Engine(connect(house)).attached.session_id > 0

    def test_a_session_is_resumed_by_its_token(self, house, connect):
        """A lost connection is not a lost session: spaces, leases and reservations are still there."""
        engine = Engine(connect(house))
        engine.open()
        reservation = engine.reserve([1])
        engine.peer.close()
        again = Engine(connect(house), incarnation=engine.incarnation, resume=engine.attached.session_token)
        assert again.attached.resumed
        assert again.attached.session_id == engine.attached.session_id
        again.spaces = engine.spaces
        assert again.commit(reservation).outcome == DONE
        assert again.outcomes([1]) == [HIT]

    @pytest.mark.parametrize("whose", ["ended", "unknown", "another engine's"])
    def test_a_token_that_cannot_be_resumed_opens_another_session(self, house, connect, whose):
        """A stale token gives a new session, never someone else's."""
        old = Engine(connect(house))
        incarnation, token = old.incarnation, old.attached.session_token
        if whose == "ended":
            old.peer.call(Method.DETACH)
        elif whose == "unknown":
            token = b"?" * 16
        else:
            incarnation = Engine.fresh()
        fresh = Engine(connect(house), incarnation=incarnation, resume=token)
        assert not fresh.attached.resumed
        assert fresh.attached.session_token != old.attached.session_token

    def test_detach_ends_everything_of_the_session(self, house, connect):
        """What a session asked for ends with it, at once."""
        watcher = Engine(connect(house))
        watcher.open()
        engine = Engine(connect(house))
        engine.open()
        engine.put([1])
        engine.acquire([1])
        engine.reserve([2, 3])
        assert watcher.outcomes([1, 2]) == [HIT, PENDING]
        engine.peer.call(Method.DETACH)
        assert watcher.outcomes([1, 2]) == [HIT, MISS]
        tier = watcher.tier()
        assert (tier.slots_reserved_count, tier.slots_quarantined_count) == (0, 0)
        assert len(watcher.peer.call(Method.LIST_TIERS).owners) == 1

    def test_detach_twice_answers_the_same(self, peer):
        """Detach is idempotent: a session that has ended answers the same (session_service.proto)."""
        Engine(peer)
        first = peer.call(Method.DETACH)
        assert peer.call(Method.DETACH) == first

    @pytest.mark.parametrize(
        ("method", "fields"),
        [
            (Method.OPEN_NAMESPACE, open_fields(BLOCK_BYTES)),
            (Method.HEARTBEAT, {}),
            (Method.LOOKUP, {"space_ids": [1], "keys": key(1)}),
            (Method.RESERVE, {"request_id": bytes(16), "space_ids": [1], "keys": key(1)}),
            (Method.COMMIT, {"reservation_id": 1}),
            (Method.ABORT, {"reservation_id": 1}),
            (Method.ACQUIRE, {"space_ids": [1], "keys": key(1)}),
            (Method.RENEW, {"lease_ids": [1]}),
            (Method.RELEASE, {"lease_ids": [1]}),
            (Method.VERIFY, {"space_ids": [1], "keys": key(1)}),
            (Method.PURGE_NAMESPACE, {"namespace_id": bytes(32)}),
        ],
    )
    def test_a_call_needs_a_living_session(self, house, connect, method, fields):
        """Without a session, and after its end, nothing is done and the reason says so."""
        stranger = connect(house)
        check_refused(SESSION_UNKNOWN, stranger.call, method, **fields)
        engine = Engine(connect(house))
        engine.peer.call(Method.DETACH)
        check_refused(SESSION_UNKNOWN, engine.peer.call, method, **fields)

    def test_watching_events_needs_a_living_session(self, house, connect):
        """A watcher without a session is refused (event_service.proto), like every other call."""
        check_refused(SESSION_UNKNOWN, connect(house).watch(after_sequence=0).next)

    def test_a_namespace_is_the_same_for_all_who_open_it(self, house, connect):
        """OpenNamespace is idempotent, across sessions too; salt and model keep apart."""
        one, two = Engine(connect(house)), Engine(connect(house))
        first = one.open(BLOCK_BYTES, 512)
        assert (len(first.namespace_id), len(set(first.space_ids)), len(first.identity_digest)) == (32, 2, 32)
        assert [len(digest) for digest in first.shape_digests] == [32, 32]
        assert one.open(BLOCK_BYTES, 512) == first
        assert two.open(BLOCK_BYTES, 512) == first
        others = [two.open(BLOCK_BYTES, 512, salt=b"s"), two.open(BLOCK_BYTES, 512, model_id="other")]
        assert len({first.namespace_id, *(other.namespace_id for other in others)}) == 3
        assert not set(first.space_ids) & {space for other in others for space in other.space_ids}

    @pytest.mark.parametrize(
        ("fields", "kind", "says"),
        [
            (open_fields(BLOCK_BYTES, model_id=""), INVALID_FIELD, "model_id"),
            (open_fields(BLOCK_BYTES, weights_revision=""), INVALID_FIELD, "weights_revision"),
            (open_fields(BLOCK_BYTES, salt=bytes(257)), INVALID_FIELD, "salt"),
            (open_fields(), INVALID_FIELD, "parts has 0"),
            (open_fields(*[BLOCK_BYTES] * 257), INVALID_FIELD, "parts has 257"),
            (open_fields(BLOCK_BYTES, hash_tokens=32), INVALID_FIELD, "block_tokens"),
            (open_fields(BLOCK_BYTES, layers_count=0), INVALID_FIELD, "layers"),
            (open_fields(0), BLOCK_SIZE, "block_bytes = 0"),
            (open_fields(SEGMENT_BYTES + 1), BLOCK_SIZE, f"block_bytes = {SEGMENT_BYTES + 1}"),
        ],
    )
    def test_a_namespace_that_cannot_be_is_refused(self, peer, fields, kind, says):
        """A bad representation is named by field and value before any block is asked for."""
        Engine(peer)
        check_refused(kind, peer.call, Method.OPEN_NAMESPACE, says=says, **fields)

    def test_one_shape_has_one_block_size(self, peer):
        """Two sizes under one shape would read each other's bytes wrongly."""
        engine = Engine(peer)
        engine.open(BLOCK_BYTES)
        check_refused(BLOCK_SIZE, engine.open, 2 * BLOCK_BYTES, says=str(2 * BLOCK_BYTES))

    def test_a_heartbeat_renews_and_says_what_has_ended(self, house, peer):
        """One message prolongs everything that a session holds, and answers for each."""
        engine = Engine(peer)
        engine.open()
        engine.put([1])
        lease, reservation = engine.acquire([1]).lease.lease_id, engine.reserve([2]).reservation_id
        house.time.advance(TTL_S - 1)
        beat = engine.beat(lease_ids=[lease, 1], reservation_ids=[reservation, 1])
        assert list(beat.lease_outcomes) == [DONE, UNKNOWN]
        assert list(beat.reservation_outcomes) == [DONE, UNKNOWN]
        assert beat.remaining.ToMilliseconds() == TTL_S * 1000
        house.time.advance(TTL_S - 1)
        assert engine.release(lease) == [DONE]
        assert engine.abort(reservation) == DONE
        beat = engine.beat(lease_ids=[lease], reservation_ids=[reservation])
        assert [*beat.lease_outcomes, *beat.reservation_outcomes] == [ALREADY_RELEASED, ALREADY_ABORTED]

    def test_a_heartbeat_is_bounded_and_consistent(self, peer):
        """A beat of too many items, or with arrays that do not match, changes nothing."""
        engine = Engine(peer)
        check_refused(INVALID_FIELD, engine.beat, touched_segments=[1], says="touched_granules has 0")
        many = list(range(MAX_BATCH_KEYS + 1))
        for name in ("lease_ids", "reservation_ids", "acknowledged_ids"):
            check_refused(BATCH_SIZE, engine.beat, says=f"{name} has {len(many)}", **{name: many})
        check_refused(
            BATCH_SIZE, engine.beat, touched_segments=many, touched_granules=many, says="touched_segments"
        )

    def test_a_touch_is_a_hint_and_nothing_more(self, peer):
        """Recency of blocks that do not exist changes nothing; that of real ones saves them from eviction."""
        engine = Engine(peer)
        engine.open()
        first = engine.put([1])
        engine.put(range(2, SLOTS_COUNT + 1))
        (segment,), (granule,) = Unpacked.of(first.slots).segments, Unpacked.of(first.slots).granules
        engine.beat(touched_segments=[segment, 3, 999], touched_granules=[granule, 1, 2**32 - 1])
        engine.put([10_001])
        assert engine.outcomes([1, 10_001]) == [HIT, HIT]


class WriteContract:
    """Reserve, commit, abort."""

    def test_reserved_keys_are_pending_and_committed_keys_are_hits(self, house, connect):
        """A block is visible only after its commit, for everybody at once."""
        writer, reader = Engine(connect(house)), Engine(connect(house))
        writer.open()
        reader.open()
        reservation = writer.reserve([1, 2])
        assert list(reservation.outcomes) == [GRANTED, GRANTED]
        slots = Unpacked.of(reservation.slots)
        assert len(set(slots.places)) == len(slots.generations) == 2
        assert not slots.checksums
        assert reservation.remaining.ToMilliseconds() == TTL_S * 1000
        assert reader.outcomes([1, 2, 3]) == [PENDING, PENDING, MISS]
        committed = writer.commit(reservation, [11, 22])
        assert (committed.outcome, committed.keys_count) == (DONE, 2)
        assert reader.outcomes([1, 2, 3]) == [HIT, HIT, MISS]
        assert Unpacked.of(reader.acquire([1, 2]).lease.slots).checksums == [11, 22]

    def test_keys_that_others_hold_are_outcomes(self, house, connect):
        """Two writers of one key: one is granted it, the other is told, and none is failed."""
        one, two = Engine(connect(house)), Engine(connect(house))
        one.open()
        two.open()
        one.put([1])
        one.reserve([2])
        answer = two.reserve([1, 2, 3])
        assert list(answer.outcomes) == [ALREADY_COMMITTED, PENDING, GRANTED]
        assert len(Unpacked.of(answer.slots).places) == 1
        nothing = two.reserve([1, 2])
        assert nothing.reservation_id == 0
        assert not nothing.slots.segments

    def test_the_slots_of_several_parts_are_key_major(self, peer):
        """Per-slot arrays go key by key, part by part, and a key is there only with all of its parts."""
        engine = Engine(peer)
        engine.open(BLOCK_BYTES, 512)
        reservation = engine.reserve([1, 2])
        segments = Unpacked.of(reservation.slots).segments
        assert len(segments) == 4
        assert not set(segments[::2]) & set(segments[1::2])
        engine.commit(reservation, [1, 2, 3, 4])
        assert Unpacked.of(engine.acquire([1, 2]).lease.slots).checksums == [1, 2, 3, 4]

    def test_reserve_is_found_again_by_its_request_id(self, house, peer):
        """A retry gets the same slots; the same id with other keys is a mistake that is named."""
        engine = Engine(peer)
        engine.open()
        request_id = Engine.fresh()
        first = engine.reserve([1, 2], request_id=request_id)
        house.time.advance(1)
        again = engine.reserve([1, 2], request_id=request_id)
        assert again.remaining.ToMilliseconds() == (TTL_S - 1) * 1000
        again.remaining.CopyFrom(first.remaining)
        assert again == first
        kind = ("INVALID_ARGUMENT", "REQUEST_ID_REUSED")
        check_refused(kind, engine.reserve, [1, 3], request_id=request_id, says=request_id.hex())
        assert engine.tier().slots_reserved_count == 2

    @pytest.mark.parametrize(
        ("fields", "kind", "says"),
        [
            ({"request_id": b"short"}, INVALID_FIELD, "request_id has 5"),
            ({"keys": b"k" * 31}, INVALID_FIELD, "keys has 31 bytes"),
            ({"keys": b""}, BATCH_SIZE, "keys has 0 items"),
            ({"keys": keys(range(MAX_BATCH_KEYS + 1))}, BATCH_SIZE, f"keys has {MAX_BATCH_KEYS + 1}"),
            ({"keys": keys([7, 8, 7])}, DUPLICATE_KEY, "keys[2] is the same as keys[0]"),
            ({"space_ids": []}, INVALID_FIELD, "space_ids has 0"),
            ({"space_ids": list(range(257))}, INVALID_FIELD, "space_ids has 257"),
            ({"space_ids": [1, 1]}, INVALID_FIELD, "twice"),
            ({"space_ids": [4711]}, SPACE_NOT_OPEN, "4711"),
            ({"ttl": {"seconds": -1}}, INVALID_FIELD, "ttl is -1000000000"),
            ({"ttl": {"nanos": 0}}, INVALID_FIELD, "ttl is 0"),
        ],
    )
    def test_a_bad_reserve_is_refused_and_reserves_nothing(self, peer, fields, kind, says):
        """Field, value and way out are named; nothing is held afterwards."""
        engine = Engine(peer)
        engine.open()
        engine.put([7])
        fields = {"request_id": Engine.fresh(), "space_ids": engine.spaces, "keys": key(1)} | fields
        check_refused(kind, peer.call, Method.RESERVE, says=says, **fields)
        assert engine.tier().slots_reserved_count == 0
        assert engine.outcomes([7]) == [HIT]

    def test_a_space_that_another_session_opened_is_not_open_here(self, house, connect):
        """A space id is a handle of one session, not a right."""
        one, two = Engine(connect(house)), Engine(connect(house))
        one.open()
        two.spaces = one.spaces
        check_refused(SPACE_NOT_OPEN, two.reserve, [1], says=str(one.spaces[0]))
        check_refused(SPACE_NOT_OPEN, two.lookup, [1])
        check_refused(SPACE_NOT_OPEN, two.acquire, [1])

    def test_reservations_of_a_session_are_bounded(self, make_house, connect):
        """The refusal counts what is open; committing one makes room."""
        engine = Engine(connect(make_house(KVSERVICE_LIMITS__MAX_RESERVATIONS_PER_SESSION="1")))
        engine.open()
        reservation = engine.reserve([1])
        check_refused(LIMIT_REACHED, engine.reserve, [2], says="holds 1 reservations")
        engine.commit(reservation)
        assert list(engine.reserve([2]).outcomes) == [GRANTED]

    def test_a_full_arena_refuses_whole_and_loses_nothing(self, peer):
        """All or nothing: what cannot be granted in full costs nobody a block."""
        engine = Engine(peer)
        engine.open()
        everything = list(range(SLOTS_COUNT))
        engine.put(everything)
        lease = engine.acquire(everything).lease
        assert lease.keys_count == SLOTS_COUNT
        check_refused(("RESOURCE_EXHAUSTED", "ARENA_FULL"), engine.reserve, [9001])
        assert engine.outcomes(everything) == [HIT] * SLOTS_COUNT
        engine.release(lease.lease_id)
        assert list(engine.reserve([9001]).outcomes) == [GRANTED]

    def test_a_quota_is_kept(self, make_house, connect):
        """A tenant whose quota is held by leases is told so; unleased blocks of its own make room."""
        quota = f"[tenants.default]\nquota_bytes = {2 * BLOCK_BYTES}\n"
        engine = Engine(connect(make_house(config=quota)))
        engine.open()
        engine.put([1, 2])
        lease = engine.acquire([1, 2]).lease
        check_refused(("RESOURCE_EXHAUSTED", "QUOTA_EXCEEDED"), engine.reserve, [3], says="quota")
        assert engine.outcomes([1, 2]) == [HIT, HIT]
        engine.release(lease.lease_id)
        engine.put([3])
        assert engine.outcomes([3]) == [HIT]
        assert engine.tier().used_bytes <= 2 * BLOCK_BYTES
        check_refused(BLOCK_SIZE, engine.open, 3 * BLOCK_BYTES, model_id="large", says="quota")

    def test_a_second_commit_answers_done_again(self, peer):
        """A retry of a commit is told the same, and changes nothing."""
        engine = Engine(peer)
        engine.open()
        reservation = engine.reserve([1, 2])
        assert engine.commit(reservation) == engine.commit(reservation)
        assert engine.abort(reservation.reservation_id) == ALREADY_COMMITTED
        assert engine.outcomes([1, 2]) == [HIT, HIT]

    def test_a_commit_needs_a_checksum_for_each_slot(self, peer):
        """A refused commit leaves the reservation open, so that it can be done right."""
        engine = Engine(peer)
        engine.open()
        reservation = engine.reserve([1, 2])
        check_refused(INVALID_FIELD, engine.commit, reservation, [1], says="checksums has 1 entries for 2")
        fields = {"reservation_id": reservation.reservation_id, "checksums": bytes(7)}
        check_refused(INVALID_FIELD, peer.call, Method.COMMIT, says="checksums has 7 bytes", **fields)
        assert engine.outcomes([1, 2]) == [PENDING, PENDING]
        assert engine.commit(reservation, [1, 2]).outcome == DONE

    def test_a_block_may_be_stored_without_a_checksum(self, peer):
        """None is 0; a sum that is 0 is stored as all ones, so that the two are told apart."""
        engine = Engine(peer)
        engine.open()
        engine.commit(engine.reserve([1, 2]))
        engine.commit(engine.reserve([3, 4]), [0, 7])
        lease = engine.acquire([1, 2, 3, 4]).lease
        assert Unpacked.of(lease.slots).checksums == [0, 0, 0xFFFFFFFF, 7]

    def test_a_stranger_may_neither_commit_nor_abort(self, house, connect):
        """Only processes of the engine that reserved may end a reservation."""
        owner, stranger = Engine(connect(house)), Engine(connect(house))
        owner.open()
        reservation = owner.reserve([1])
        says = str(reservation.reservation_id)
        check_refused(NOT_OWNER, stranger.commit, reservation, says=says)
        check_refused(NOT_OWNER, stranger.abort, reservation.reservation_id, says=says)
        assert owner.commit(reservation).outcome == DONE
        check_refused(NOT_OWNER, stranger.commit, reservation, says=says)
        assert stranger.abort(reservation.reservation_id) == UNKNOWN

    def test_another_process_of_the_engine_may_commit(self, house, connect):
        """A scheduler reserves, a worker commits: capabilities are the engine's."""
        scheduler = Engine(connect(house))
        worker = Engine(connect(house), incarnation=scheduler.incarnation)
        scheduler.open()
        reservation = scheduler.reserve([1])
        assert worker.commit(reservation).outcome == DONE
        assert scheduler.outcomes([1]) == [HIT]

    def test_a_commit_after_expiry_is_refused_and_shows_nothing(self, house, peer):
        """Expired means that nothing became visible; the way out is to reserve again."""
        engine = Engine(peer)
        engine.open()
        reservation = engine.reserve([1])
        house.time.advance(TTL_S)
        kind = ("FAILED_PRECONDITION", "RESERVATION_EXPIRED")
        check_refused(kind, engine.commit, reservation, says="reserve again")
        assert engine.outcomes([1]) == [MISS]
        assert engine.abort(reservation.reservation_id) == ALREADY_EXPIRED
        again = engine.reserve([1])
        assert list(again.outcomes) == [GRANTED]
        assert again.reservation_id != reservation.reservation_id

    def test_a_commit_after_an_abort_is_refused(self, peer):
        """Aborted is final; a second abort says so and changes nothing."""
        engine = Engine(peer)
        engine.open()
        reservation = engine.reserve([1])
        assert engine.abort(reservation.reservation_id) == DONE
        assert engine.abort(reservation.reservation_id) == ALREADY_ABORTED
        check_refused(("FAILED_PRECONDITION", "RESERVATION_ABORTED"), engine.commit, reservation)
        assert engine.outcomes([1]) == [MISS]
        assert engine.tier().used_bytes == 0

    def test_an_id_that_was_never_granted_is_unknown(self, peer):
        """Of this life but never granted is UNKNOWN; of another life is STALE."""
        engine = Engine(peer)
        engine.open()
        reservation = engine.reserve([1])
        never = reservation.reservation_id + 1000
        kind = ("NOT_FOUND", "RESERVATION_UNKNOWN")
        check_refused(kind, peer.call, Method.COMMIT, reservation_id=never, says=str(never))
        assert engine.abort(never) == UNKNOWN
        stale = reservation.reservation_id ^ (1 << 63)
        check_refused(STALE_INCARNATION, peer.call, Method.COMMIT, reservation_id=stale, says=str(stale))
        check_refused(STALE_INCARNATION, engine.abort, stale)

    def test_a_ttl_is_granted_up_to_the_longest(self, house, peer):
        """A shorter life is granted as asked, a longer one is cut at limits.max_ttl_ms."""
        engine = Engine(peer)
        engine.open()
        assert engine.reserve([1], ttl={"seconds": 2}).remaining.seconds == 2
        assert engine.reserve([2], ttl={"seconds": 3600}).remaining.ToMilliseconds() == 60_000
        house.time.advance(2)
        assert engine.outcomes([1, 2]) == [MISS, PENDING]

    def test_a_slot_that_changes_its_owner_changes_its_generation(self, peer):
        """A stale capability can be told, even where the slot is the same."""
        engine = Engine(peer)
        engine.open()
        everything = list(range(SLOTS_COUNT))
        first = engine.reserve(everything)
        engine.abort(first.reservation_id)
        second = engine.reserve(everything)
        before, after = Unpacked.of(first.slots), Unpacked.of(second.slots)
        now = dict(zip(after.places, after.generations, strict=True))
        assert set(now) == set(before.places)
        assert all(now[place] > then for place, then in zip(before.places, before.generations, strict=True))
