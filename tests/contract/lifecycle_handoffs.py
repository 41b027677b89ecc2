"""The part of the lifecycle contract about handoffs: segments, offers, claims."""

from __future__ import annotations

import pytest

from kvservice.ports.methods import Method
from tests.contract.handoff_peers import (
    ABORTED,
    ANY_POLICY,
    BASE,
    CLAIMED,
    DIRECT,
    DIRECT_POLICY,
    HOLD_S,
    OFFERED,
    OPERATION_BOUND_S,
    POOL_BLOCKS,
    POOL_BYTES,
    STAGED,
    STAGED_POLICY,
    WIRE,
    Peer,
    layout,
    packed,
    segment,
)
from tests.contract.lifecycle_contract import (
    BATCH_SIZE,
    BLOCK_SIZE,
    DONE,
    DUPLICATE_KEY,
    INVALID_FIELD,
    LIMIT_REACHED,
    MAX_BATCH_KEYS,
    SESSION_UNKNOWN,
    SPACE_NOT_OPEN,
    STALE_INCARNATION,
    TTL_S,
    check_refused,
    refused,
)
from tests.contract.lifecycle_edges import BLOCK_BYTES, Unpacked, key, keys

SEGMENT_UNKNOWN = ("NOT_FOUND", "SEGMENT_UNKNOWN")
SEGMENT_IN_USE = ("FAILED_PRECONDITION", "SEGMENT_IN_USE")
HANDOFF_UNKNOWN = ("NOT_FOUND", "HANDOFF_UNKNOWN")
HANDOFF_CLAIMED = ("FAILED_PRECONDITION", "HANDOFF_CLAIMED")
HANDOFF_ENDED = ("FAILED_PRECONDITION", "HANDOFF_ENDED")
NO_WAY = ("FAILED_PRECONDITION", "NO_WAY")
MISMATCH = ("FAILED_PRECONDITION", "REPRESENTATION_MISMATCH")
REQUEST_ID_REUSED = ("INVALID_ARGUMENT", "REQUEST_ID_REUSED")

HUGE = 2**64 - 1
WAY = {"transport": WIRE, "address": b"", "key": b""}


class SegmentContract:
    """RegisterSegments, UnregisterSegments."""

    def test_memory_is_known_by_numbers(self, peer):
        """Each segment and layout has a number of its own, and each call makes others."""
        engine = Peer(peer)
        first = engine.lend([segment(), segment(memory_kind=2)], [layout(), layout((1, 0, 8, 8))])
        again = engine.lend([segment(), segment()], [])
        numbers = [*first.segment_ids, *first.layout_ids, *again.segment_ids, *again.layout_ids]
        assert (len(first.segment_ids), len(first.layout_ids), len(numbers)) == (2, 2, 6)
        assert len(set(numbers) - {0}) == 6

    @pytest.mark.parametrize(
        ("segments", "layouts", "says"),
        [
            ([], [], "segments has 0"),
            ([segment()] * 257, [], "segments has 257"),
            ([segment()], [layout()] * 257, "layouts has 257"),
            ([segment(size_bytes=0)], [], "segments: 0 bytes"),
            ([segment(base_address=0)], [], "at 0x0"),
            ([segment(size_bytes=HUGE)], [], "segments: 18446744073709551615 bytes"),
            ([segment(base_address=HUGE)], [], "at 0xffffffffffffffff"),
            ([segment(memory_kind=0)], [], "segments.memory_kind is 0"),
            ([segment(memory_kind=77)], [], "segments.memory_kind is 77"),
            ([segment(ways=[])], [], "segments.ways has 0"),
            ([segment(ways=[WAY] * 9)], [], "segments.ways has 9"),
            ([segment(ways=[WAY | {"transport": ""}])], [], "ways.transport is empty"),
            ([segment(ways=[WAY | {"address": bytes(8193)}])], [], "ways.address has 8193"),
            ([segment(ways=[WAY | {"key": bytes(8193)}])], [], "ways.key has 8193"),
            ([segment()], [layout(piece_segments=bytes(3))], "layouts[0].piece_segments has 3 bytes"),
            (
                [segment()],
                [layout(), layout(piece_offsets_bytes=bytes(7))],
                "layouts[1].piece_offsets_bytes has 7",
            ),
            (
                [segment()],
                [layout(piece_strides_bytes=bytes(9))],
                "layouts[0].piece_strides_bytes has 9 bytes",
            ),
            (
                [segment()],
                [layout(piece_lengths_bytes=bytes(1))],
                "layouts[0].piece_lengths_bytes has 1 bytes",
            ),
            ([segment()], [layout(piece_segments=b"")], "number of pieces = 0"),
            ([segment()], [layout(*[(0, 0, 1, 1)] * 4097)], "number of pieces = 4097"),
            ([segment()], [layout(piece_offsets_bytes=bytes(16))], "1 segments, 2 offsets"),
            ([segment()], [layout(piece_lengths_bytes=b"")], "and 0 lengths"),
            ([segment()], [layout(blocks_count=0)], "blocks_count = 0"),
            ([segment()], [layout((1, 0, 8, 8))], "segments[0] = 1"),
            ([segment()], [layout((0, 0, 8, 0))], "lengths[0] = 0"),
            ([segment()], [layout((0, 0, 7, 8))], "strides[0] = 7"),
            ([segment()], [layout((0, 1, BLOCK_BYTES, BLOCK_BYTES))], f"ends at byte {POOL_BYTES + 1}"),
            ([segment()], [layout(blocks_count=POOL_BLOCKS + 1)], "ends at byte"),
            ([segment()], [layout(blocks_count=2**32 - 1)], "ends at byte"),
            # Sums that would be small again in 64 bits.
            ([segment()], [layout((0, HUGE, 8, 8), blocks_count=1)], "ends at byte"),
            ([segment()], [layout((0, 0, 2**63, 8), blocks_count=3)], "ends at byte"),
            ([segment()], [layout((0, 0, HUGE, HUGE), blocks_count=1)], "lengths[0] = 18446744073709551615"),
            ([segment(size_bytes=2**63)] * 3, [layout()], "sum of segment_sizes_bytes"),
            # A block of which two pieces are one.
            ([segment()], [layout((0, 0, 64, 8), (0, 4, 64, 8))], "layouts[0]"),
        ],
    )
    def test_memory_that_cannot_be_is_refused(self, peer, segments, layouts, says):
        """A daemon that let it pass would send others to read where nothing is; the field is named."""
        engine = Peer(peer)
        check_refused(INVALID_FIELD, engine.lend, segments, layouts, says=says)

    def test_a_refused_registration_registers_nothing(self, make_house, connect):
        """One bad layout, and none of the segments beside it counts."""
        engine = Peer(connect(make_house(KVSERVICE_LIMITS__MAX_SEGMENTS_PER_SESSION="2")))
        for _ in range(3):
            check_refused(INVALID_FIELD, engine.lend, [segment()] * 2, [layout(blocks_count=0)])
        assert len(engine.lend([segment()] * 2, [layout()] * 2).segment_ids) == 2
        refusal = refused(engine.lend)
        assert refusal.kind == LIMIT_REACHED
        assert "3 segments (limits.max_" in refusal.message
        engine.take_back(engine.segments[0])
        assert len(engine.lend().segment_ids) == 1

    def test_what_is_taken_back_is_known_no_more(self, house, connect):
        """Only the caller's own counts; what is gone, or was never there, is passed over."""
        engine, other = Peer(connect(house)), Peer(connect(house))
        engine.lend([segment()] * 3, [layout(), layout((2, 0, BLOCK_BYTES, BLOCK_BYTES))])
        assert other.take_back(*engine.segments) == 0
        assert engine.take_back() == 0
        assert engine.take_back(engine.segments[0], engine.segments[0], 1, HUGE) == 1
        assert engine.take_back(*engine.segments[:2]) == 1
        first, second = engine.layouts
        check_refused(
            SEGMENT_UNKNOWN, engine.offer, layout_ids=[first], blocks=packed([0, 1]), says=str(first)
        )
        assert engine.offer(layout_ids=[second], blocks=packed([0, 1])).handoff_id

    def test_taking_memory_back_aborts_what_is_offered_out_of_it(self, peer):
        """Nobody has claimed it, so it is released at once."""
        engine = Peer(peer)
        engine.lend()
        handoff_id = engine.offer().handoff_id
        engine.peer.listen()
        assert engine.take_back(*engine.segments) == 1
        assert engine.told() == (handoff_id, ABORTED, True)
        assert engine.look(handoff_id).reason == "its segments are gone"

    def test_memory_that_is_being_read_is_not_taken_back(self, house, connect):
        """It stays known until the reader has said that it reads no more."""
        giver, taker = Peer(connect(house)), Peer(connect(house))
        giver.lend()
        handoff_id = giver.offer().handoff_id
        taker.claim(handoff_id)
        check_refused(SEGMENT_IN_USE, giver.take_back, *giver.segments, says=str(handoff_id))
        giver.give_up(handoff_id)
        check_refused(SEGMENT_IN_USE, giver.take_back, *giver.segments, says=str(handoff_id))
        taker.beat(acknowledged_ids=[handoff_id])
        assert giver.take_back(*giver.segments) == 1


class OfferContract:
    """OfferHandoff."""

    @pytest.fixture
    def giver(self, peer):
        """An engine that lends a pool of one part."""
        engine = Peer(peer)
        engine.lend()
        return engine

    def test_an_offer_waits_to_be_claimed(self, giver):
        """The answer says for how long, and when the memory is free in any case."""
        answer = giver.offer()
        assert answer.remaining.seconds == TTL_S
        assert answer.hold.seconds == HOLD_S + OPERATION_BOUND_S
        record = giver.look(answer.handoff_id)
        assert (record.state, record.is_released, record.keys_count) == (OFFERED, False, 2)
        assert giver.offer(ttl={"seconds": 2}).remaining.seconds == 2
        assert giver.offer(ttl={"seconds": 3600}).remaining.seconds == 60

    def test_an_offer_is_found_again_by_its_request_id(self, house, giver):
        """A retry offers nothing twice; the same id with anything else is a mistake that is named."""
        fields = giver.offering()
        first = giver.offer(**fields)
        house.time.advance(1)
        again = giver.offer(**fields)
        assert again.handoff_id == first.handoff_id
        assert (again.remaining.seconds, again.hold.seconds) == (TTL_S - 1, HOLD_S + OPERATION_BOUND_S - 1)
        for changed in (
            {"keys": keys([1, 3])},
            {"blocks": packed([0, 2])},
            {"checksums": packed([1, 2])},
            {"policy": DIRECT_POLICY},
        ):
            check_refused(
                REQUEST_ID_REUSED, giver.offer, says=fields["request_id"].hex(), **(fields | changed)
            )

    @pytest.mark.parametrize(
        ("fields", "kind", "says"),
        [
            ({"request_id": b""}, INVALID_FIELD, "request_id has 0"),
            ({"request_id": bytes(17)}, INVALID_FIELD, "request_id has 17"),
            ({"space_ids": []}, INVALID_FIELD, "space_ids has 0"),
            ({"space_ids": list(range(257))}, INVALID_FIELD, "space_ids has 257"),
            ({"space_ids": [4711]}, SPACE_NOT_OPEN, "4711"),
            ({"keys": b""}, BATCH_SIZE, "keys has 0"),
            ({"keys": bytes(33)}, INVALID_FIELD, "keys has 33 bytes"),
            ({"keys": keys([7, 7])}, DUPLICATE_KEY, "keys"),
            ({"keys": keys(range(MAX_BATCH_KEYS + 1))}, BATCH_SIZE, f"keys has {MAX_BATCH_KEYS + 1}"),
            ({"layout_ids": [1]}, SEGMENT_UNKNOWN, "layout_ids names 1"),
            ({"layout_ids": [HUGE]}, SEGMENT_UNKNOWN, f"layout_ids names {HUGE}"),
            ({"layout_ids": [1, 2]}, INVALID_FIELD, "layout_ids has 2"),
            ({"layout_ids": [1] * 100_000}, INVALID_FIELD, "layout_ids has 100000"),
            ({"layout_ids": []}, INVALID_FIELD, "blocks has 2"),
            ({"blocks": b""}, INVALID_FIELD, "blocks has 0"),
            ({"blocks": bytes(7)}, INVALID_FIELD, "blocks has 7 bytes"),
            ({"blocks": packed([0])}, INVALID_FIELD, "blocks has 1"),
            ({"blocks": packed([0, POOL_BLOCKS])}, INVALID_FIELD, f"blocks names block {POOL_BLOCKS}"),
            ({"blocks": packed([0, 2**32 - 1])}, INVALID_FIELD, f"blocks names block {2**32 - 1}"),
            ({"checksums": bytes(5)}, INVALID_FIELD, "checksums has 5 bytes"),
            ({"checksums": packed([1])}, INVALID_FIELD, "checksums has 1"),
            ({"checksums": packed([1, 2, 3])}, INVALID_FIELD, "checksums has 3"),
            ({"ttl": {"seconds": 0}}, INVALID_FIELD, "ttl is 0"),
            ({"ttl": {"seconds": -5}}, INVALID_FIELD, "ttl is -5000000000"),
            ({"policy": 3}, INVALID_FIELD, "policy is 3"),
            ({"policy": -1}, INVALID_FIELD, "policy is -1"),
            ({"policy": STAGED_POLICY}, NO_WAY, "not in the arena"),
            ({"layout_ids": [], "blocks": b""}, NO_WAY, "nor in the arena"),
            ({"layout_ids": [], "blocks": b"", "policy": DIRECT_POLICY}, NO_WAY, "engine's memory"),
        ],
    )
    def test_a_bad_offer_is_refused_and_offers_nothing(self, giver, fields, kind, says):
        """Field, value and way out are named, and the request id is still free."""
        fields = giver.offering() | fields
        check_refused(kind, giver.offer, says=says, **fields)
        if len(fields["request_id"]) == 16:
            assert giver.offer(request_id=fields["request_id"]).handoff_id

    def test_the_blocks_of_a_layout_are_as_long_as_the_space_s(self, giver):
        """Who receives them would read the wrong bytes."""
        short = giver.lend([segment()], [layout((0, 0, BLOCK_BYTES, BLOCK_BYTES - 1))]).layout_ids[0]
        says = f"layout {short} has {BLOCK_BYTES - 1} bytes"
        check_refused(BLOCK_SIZE, giver.offer, says=says)

    def test_a_layout_is_its_engine_s(self, house, connect, giver):
        """Any process of the engine may offer out of it; nobody else may."""
        worker = Peer(connect(house), incarnation=giver.incarnation)
        stranger = Peer(connect(house))
        worker.layouts = stranger.layouts = giver.layouts
        assert worker.offer().handoff_id
        check_refused(SEGMENT_UNKNOWN, stranger.offer, says=str(giver.layouts[0]))

    def test_offers_of_a_session_are_bounded(self, make_house, connect):
        """The refusal counts what is on offer; the end of one makes room."""
        engine = Peer(connect(make_house(KVSERVICE_LIMITS__MAX_HANDOFFS_PER_SESSION="1")))
        engine.lend()
        handoff_id = engine.offer().handoff_id
        check_refused(LIMIT_REACHED, engine.offer, says="1 handoffs")
        engine.give_up(handoff_id)
        assert engine.offer().handoff_id

    def test_blocks_of_the_arena_need_no_memory_of_the_engine(self, giver):
        """What was committed can be handed over; while it is on offer nothing evicts it."""
        giver.put([1, 2])
        answer = giver.offer(layout_ids=[], blocks=b"", policy=STAGED_POLICY)
        giver.peer.call(Method.PURGE_NAMESPACE, namespace_id=giver.namespace_id)
        claim = giver.claim(answer.handoff_id, transports=[])
        assert (claim.choice, claim.lease.keys_count) == (STAGED, 2)
        assert not claim.HasField("direct")


class ClaimContract:
    """ClaimHandoff, GetHandoff."""

    @pytest.fixture
    def pair(self, house, connect):
        """An engine that lends a pool of one part, and one that takes."""
        giver, taker = Peer(connect(house)), Peer(connect(house))
        giver.lend()
        return giver, taker

    def test_a_claim_says_where_the_blocks_are(self, house, connect):
        """Segments that the layouts use, each once, with their ways; the rest is the offer's own."""
        giver, taker = (Peer(connect(house), BLOCK_BYTES, 512) for _ in range(2))
        places = [segment(base_address=BASE + index * POOL_BYTES) for index in range(3)]
        places[2]["ways"] = [WAY | {"address": bytes([lane])} for lane in range(8)]
        halves = [(2, 0, BLOCK_BYTES, BLOCK_BYTES // 2), (0, 8, BLOCK_BYTES // 2, BLOCK_BYTES // 2)]
        giver.lend(places, [layout(*halves, blocks_count=8), layout((2, BLOCK_BYTES // 2, 4096, 512))])
        blocks, sums = packed([3, 1, 0, 15]), packed([1, 2, 3, 4])
        handoff_id = giver.offer(blocks=blocks, checksums=sums).handoff_id
        claim = taker.claim(handoff_id)
        assert (claim.choice, claim.keys, claim.remaining.seconds) == (DIRECT, keys([1, 2]), TTL_S)
        assert claim.reason
        assert not claim.HasField("lease")
        source = claim.direct
        assert source.engine_incarnation == giver.incarnation
        assert (source.blocks, source.checksums) == (blocks, sums)
        assert list(source.segment_ids) == [giver.segments[0], giver.segments[2]]
        assert [one.base_address for one in source.segments] == [BASE, BASE + 2 * POOL_BYTES]
        assert [one.size_bytes for one in source.segments] == [POOL_BYTES] * 2
        assert [way.address for way in source.segments[1].ways] == [bytes([lane]) for lane in range(8)]
        first, second = source.layouts
        assert first.piece_segments == packed([1, 0])
        assert second.piece_segments == packed([1])
        assert (first.blocks_count, second.blocks_count) == (8, POOL_BLOCKS)
        expected = layout(*halves)
        assert first.piece_offsets_bytes == expected["piece_offsets_bytes"]
        assert first.piece_strides_bytes == expected["piece_strides_bytes"]
        assert first.piece_lengths_bytes == expected["piece_lengths_bytes"]

    def test_a_claim_succeeds_once(self, house, connect, pair):
        """The claimer gets its answer again; others are told, its own engine's processes too."""
        giver, taker = pair
        handoff_id = giver.offer().handoff_id
        first = taker.claim(handoff_id)
        house.time.advance(1)
        again = taker.claim(handoff_id)
        assert again.remaining.seconds == TTL_S - 1
        again.remaining.CopyFrom(first.remaining)
        assert again == first
        mate = Peer(connect(house), incarnation=taker.incarnation)
        for other in (giver, mate):
            check_refused(HANDOFF_CLAIMED, other.claim, handoff_id, says=str(handoff_id))
        record = giver.look(handoff_id)
        assert (record.state, record.is_released, record.choice) == (CLAIMED, False, DIRECT)
        assert record.reason == first.reason

    def test_what_is_not_to_be_had_is_refused(self, pair):
        """Never offered, of another life, or ended: three reasons, each with the number."""
        giver, taker = pair
        handoff_id = giver.offer().handoff_id
        for call in (taker.claim, taker.look):
            check_refused(HANDOFF_UNKNOWN, call, handoff_id + 1000, says=str(handoff_id + 1000))
            stale = handoff_id ^ (1 << 63)
            check_refused(STALE_INCARNATION, call, stale, says=str(stale))
        giver.give_up(handoff_id)
        check_refused(HANDOFF_ENDED, taker.claim, handoff_id, says="ABORTED")

    def test_a_claim_is_of_the_same_representation(self, house, connect, pair):
        """The claimer's spaces must be those offered, all of them, in that order; it stays on offer."""
        giver = Peer(connect(house), BLOCK_BYTES, 512)
        giver.lend([segment()], [layout(), layout((0, 0, 512, 512))])
        handoff_id = giver.offer([1]).handoff_id
        taker = Peer(connect(house), BLOCK_BYTES, 512)
        for spaces in (taker.spaces[::-1], taker.spaces[:1]):
            check_refused(MISMATCH, taker.claim, handoff_id, space_ids=spaces, says="space_ids")
        stranger = Peer(connect(house), BLOCK_BYTES, 512, salt=b"other")
        check_refused(MISMATCH, stranger.claim, handoff_id, says=str(handoff_id))
        for spaces, kind in (([], INVALID_FIELD), ([4711, 4712], SPACE_NOT_OPEN)):
            check_refused(kind, taker.claim, handoff_id, space_ids=spaces)
        assert taker.claim(handoff_id).choice == DIRECT

    @pytest.mark.parametrize("transports", [[], [""], ["other"], ["x" * 10_000], ["other"] * 10_000])
    def test_without_a_transport_in_common_there_is_no_way(self, pair, transports):
        """The refusal leaves the handoff on offer, for one who has a way."""
        giver, taker = pair
        handoff_id = giver.offer().handoff_id
        check_refused(NO_WAY, taker.claim, handoff_id, transports=transports, says="no transport")
        assert taker.look(handoff_id).state == OFFERED
        assert taker.claim(handoff_id).choice == DIRECT

    def test_the_way_is_picked_by_policy_and_cost(self, pair):
        """A wire that nobody knows is dearer than the arena; the policy of the offer goes before."""
        giver, taker = pair
        giver.put([1, 2])
        for policy, choice in ((ANY_POLICY, STAGED), (DIRECT_POLICY, DIRECT), (STAGED_POLICY, STAGED)):
            handoff_id = giver.offer(policy=policy).handoff_id
            claim = taker.claim(handoff_id)
            assert claim.choice == choice, policy
            assert giver.look(handoff_id).choice == choice
        assert claim.reason == "staged: the policy of the offer"

    def test_a_staged_claim_brings_a_lease(self, pair):
        """It names the committed slots, key by key, and ends with the handoff."""
        giver, taker = pair
        giver.commit(giver.reserve([1, 2]), [11, 22])
        handoff_id = giver.offer(policy=STAGED_POLICY).handoff_id
        lease = taker.claim(handoff_id).lease
        assert (lease.keys_count, lease.remaining.seconds) == (2, TTL_S)
        assert Unpacked.of(lease.slots).checksums == [11, 22]
        assert taker.claim(handoff_id).lease == lease
        assert list(taker.renew(lease_ids=[lease.lease_id]).lease_outcomes) == [DONE]
        taker.complete(handoff_id)
        assert list(taker.renew(lease_ids=[lease.lease_id]).lease_outcomes) != [DONE]

    def test_a_batch_goes_in_one_message(self, pair):
        """As many keys as a call may name, with their blocks and checksums."""
        giver, taker = pair
        numbers = range(MAX_BATCH_KEYS)
        giver.lend([segment(size_bytes=MAX_BATCH_KEYS * BLOCK_BYTES)], [layout(blocks_count=MAX_BATCH_KEYS)])
        blocks, sums = packed(reversed(numbers)), packed(range(1, MAX_BATCH_KEYS + 1))
        claim = taker.claim(giver.offer(numbers, blocks=blocks, checksums=sums).handoff_id)
        assert claim.keys == keys(numbers)
        assert (claim.direct.blocks, claim.direct.checksums) == (blocks, sums)

    def test_requests_of_nothing_do_nothing(self, peer):
        """A message without a field set is a message: refused by name, or answered as data."""
        engine = Peer(peer)
        for method, says in (
            (Method.REGISTER_SEGMENTS, "segments has 0"),
            (Method.OFFER_HANDOFF, "request_id has 0"),
            (Method.CLAIM_HANDOFF, "space_ids has 0"),
        ):
            check_refused(INVALID_FIELD, peer.call, method, says=says)
        for method in (
            Method.COMPLETE_HANDOFF,
            Method.REJECT_HANDOFF,
            Method.ABORT_HANDOFF,
            Method.GET_HANDOFF,
        ):
            check_refused(STALE_INCARNATION, peer.call, method, says="handoff 0")
        assert peer.call(Method.UNREGISTER_SEGMENTS).segments_count == 0
        check_refused(INVALID_FIELD, engine.lend, [{}], says="segments")
        check_refused(INVALID_FIELD, engine.lend, [segment()], [{}], says="layouts[0]")

    @pytest.mark.parametrize(
        ("method", "fields"),
        [
            (Method.REGISTER_SEGMENTS, {"segments": [segment()]}),
            (Method.UNREGISTER_SEGMENTS, {"segment_ids": [1]}),
            (Method.OFFER_HANDOFF, {"request_id": bytes(16), "space_ids": [1], "keys": key(1)}),
            (Method.CLAIM_HANDOFF, {"handoff_id": 1, "space_ids": [1]}),
            (Method.COMPLETE_HANDOFF, {"handoff_id": 1}),
            (Method.REJECT_HANDOFF, {"handoff_id": 1}),
            (Method.ABORT_HANDOFF, {"handoff_id": 1}),
            (Method.GET_HANDOFF, {"handoff_id": 1}),
        ],
    )
    def test_a_call_about_handoffs_needs_a_living_session(self, house, connect, method, fields):
        """Without a session, and after its end, nothing is done and the reason says so."""
        check_refused(SESSION_UNKNOWN, connect(house).call, method, **fields)
        engine = Peer(connect(house))
        engine.peer.call(Method.DETACH)
        check_refused(SESSION_UNKNOWN, engine.peer.call, method, **fields)
