"""The part of the lifecycle contract about how handoffs end, and who is told of it when."""

from __future__ import annotations

import hashlib

import pytest

from kvservice.ports.methods import Method
from tests.contract.handoff_peers import (
    ABORTED,
    CLAIMED,
    COMPLETED,
    EXPIRED,
    HOLD_S,
    OPERATION_BOUND_S,
    REJECTED,
    STAGED_POLICY,
    Peer,
    packed,
    segment,
)
from tests.contract.lifecycle_contract import (
    ALREADY_ABORTED,
    ALREADY_EXPIRED,
    BATCH_SIZE,
    DONE,
    INVALID_FIELD,
    MAX_BATCH_KEYS,
    NOT_OWNER,
    STALE_INCARNATION,
    TTL_S,
    UNKNOWN,
    check_refused,
)
from tests.contract.lifecycle_edges import GrpcPeer, LanePeer
from tests.contract.lifecycle_handoffs import HANDOFF_ENDED, HANDOFF_UNKNOWN, SEGMENT_UNKNOWN

ALREADY_COMPLETED, ALREADY_REJECTED = 11, 12
ENDS = {
    "complete": (COMPLETED, ALREADY_COMPLETED),
    "reject": (REJECTED, ALREADY_REJECTED),
    "give_up": (ABORTED, ALREADY_ABORTED),
}


def pair_of(house, connect) -> tuple[Peer, Peer]:
    """Return an engine that lends a pool and listens, and one that takes and listens."""
    giver, taker = Peer(connect(house)), Peer(connect(house))
    giver.lend()
    for engine in (giver, taker):
        engine.peer.listen()
    return giver, taker


def claimed_by(giver: Peer, taker: Peer) -> int:
    """Let one engine claim what the other offers, and the giver hear of it."""
    handoff_id = giver.offer().handoff_id
    taker.claim(handoff_id)
    assert giver.told() == (handoff_id, CLAIMED, False)
    return handoff_id


class HandoffEndContract:
    """CompleteHandoff, RejectHandoff, AbortHandoff: who may, how often, and what each side hears."""

    @pytest.fixture
    def ends(self, house, connect):
        """Two engines that listen, and a handoff that one has claimed from the other."""
        giver, taker = pair_of(house, connect)
        return giver, taker, claimed_by(giver, taker)

    @pytest.mark.parametrize("end", ENDS)
    def test_an_end_by_the_claimer_releases_the_memory_at_once(self, ends, end):
        """By its own word it reads no more; the giver is told without a beat."""
        giver, taker, handoff_id = ends
        state, _ = ENDS[end]
        assert getattr(taker, end)(handoff_id) == DONE
        assert giver.told() == (handoff_id, state, True)
        record = taker.look(handoff_id)
        assert (record.state, record.is_released, record.keys_count) == (state, True, 2)
        check_refused(HANDOFF_ENDED, taker.claim, handoff_id, says=str(handoff_id))

    @pytest.mark.parametrize("end", ENDS)
    def test_an_end_that_comes_late_or_twice_is_data(self, ends, end):
        """It answers how the handoff ended first, and changes nothing."""
        giver, taker, handoff_id = ends
        state, already = ENDS[end]
        getattr(taker, end)(handoff_id)
        for late in ENDS:
            assert getattr(taker, late)(handoff_id) == already
            assert getattr(giver, late)(handoff_id) == already
        assert giver.look(handoff_id).state == state

    def test_the_reason_of_a_rejection_reaches_the_giver(self, ends):
        """Up to its longest, in characters; a longer one is refused, and the claim lives on."""
        giver, taker, handoff_id = ends
        check_refused(INVALID_FIELD, taker.reject, handoff_id, "é" * 257, says="reason has 257")
        assert taker.look(handoff_id).state == CLAIMED
        assert taker.reject(handoff_id, "é" * 256) == DONE
        (notice,) = giver.peer.notice().notices
        assert notice.reason == giver.look(handoff_id).reason == "é" * 256

    def test_memory_is_held_until_the_claimer_has_let_go(self, ends):
        """The giver aborts; the claimer is told at once, and its answer releases the memory."""
        giver, taker, handoff_id = ends
        assert giver.give_up(handoff_id) == DONE
        assert giver.told() == (handoff_id, ABORTED, False)
        assert not giver.look(handoff_id).is_released
        assert taker.revoked() == [handoff_id]
        assert taker.complete(handoff_id) == ALREADY_ABORTED
        assert giver.told() == (handoff_id, ABORTED, True)
        assert giver.look(handoff_id).is_released

    def test_every_process_of_the_claimer_is_asked(self, house, connect, ends):
        """A worker may read under the claim of its scheduler; any of them may complete."""
        giver, taker, handoff_id = ends
        worker = Peer(connect(house), incarnation=taker.incarnation)
        worker.peer.listen()
        giver.give_up(handoff_id)
        assert giver.told() == (handoff_id, ABORTED, False)
        assert taker.revoked() == worker.revoked() == [handoff_id]
        assert list(taker.beat(acknowledged_ids=[handoff_id]).revoked_ids) == []
        assert not giver.look(handoff_id).is_released
        assert list(worker.beat().revoked_ids) == [handoff_id]
        worker.beat(acknowledged_ids=[handoff_id])
        assert giver.told() == (handoff_id, ABORTED, True)
        handoff_id = claimed_by(giver, taker)
        assert worker.complete(handoff_id) == DONE

    def test_a_claimer_that_never_answers_holds_the_memory_for_a_bound(self, house, ends):
        """It posts nothing after its deadline, and no operation takes longer than the bound."""
        giver, _, handoff_id = ends
        giver.give_up(handoff_id)
        assert giver.told() == (handoff_id, ABORTED, False)
        house.time.advance(TTL_S + OPERATION_BOUND_S - 1)
        assert not giver.look(handoff_id).is_released
        house.time.advance(1)
        giver.beat()
        assert giver.told() == (handoff_id, ABORTED, True)

    def test_only_the_two_sides_may_end_a_handoff(self, house, connect):
        """Before a claim whoever was meant may reject; after it each side has its own words."""
        giver, taker = pair_of(house, connect)
        stranger = Peer(connect(house))
        handoff_id = giver.offer().handoff_id
        for refused in (giver.complete, taker.complete, stranger.give_up):
            check_refused(NOT_OWNER, refused, handoff_id, says=str(handoff_id))
        assert taker.reject(handoff_id, "another dtype") == DONE
        assert giver.told() == (handoff_id, REJECTED, True)
        handoff_id = claimed_by(giver, taker)
        for refused in (giver.complete, giver.reject, *(getattr(stranger, end) for end in ENDS)):
            check_refused(NOT_OWNER, refused, handoff_id, says=str(handoff_id))
        assert giver.look(handoff_id).state == CLAIMED

    def test_an_end_of_what_never_was_is_unknown(self, ends):
        """As data in this life; what is of another life is refused as stale."""
        _, taker, handoff_id = ends
        stale = handoff_id ^ (1 << 63)
        for end in ENDS:
            assert getattr(taker, end)(handoff_id + 1000) == UNKNOWN
            check_refused(STALE_INCARNATION, getattr(taker, end), stale, says=str(stale))

    def test_a_session_that_ends_lets_go_of_what_it_claimed(self, ends):
        """The giver is told at once: a dead process reads nothing."""
        giver, taker, handoff_id = ends
        taker.peer.call(Method.DETACH)
        assert giver.told() == (handoff_id, ABORTED, True)
        assert giver.look(handoff_id).reason == "the engine that claimed it is gone"

    def test_a_session_that_ends_takes_what_it_offered_along(self, house, connect, ends):
        """The claimer is told at once, and its bytes are not good; nobody can claim what waits."""
        giver, taker, handoff_id = ends
        waiting = giver.offer().handoff_id
        giver.peer.call(Method.DETACH)
        assert taker.revoked() == [handoff_id]
        assert taker.complete(handoff_id) == ALREADY_ABORTED
        check_refused(HANDOFF_ENDED, taker.claim, waiting, says="gone")
        successor = Peer(connect(house), incarnation=giver.incarnation)
        fields = {"layout_ids": giver.layouts, "blocks": packed([0, 1])}
        check_refused(SEGMENT_UNKNOWN, successor.offer, says=str(giver.layouts[0]), **fields)

    def test_a_staged_handoff_releases_the_memory_with_the_claim(self, house, connect):
        """The claimer reads the arena; the end is told all the same, and a lease ends with it."""
        giver, taker = pair_of(house, connect)
        giver.put([1, 2])
        for end, (state, _) in ENDS.items():
            handoff_id = giver.offer(policy=STAGED_POLICY).handoff_id
            lease_id = taker.claim(handoff_id).lease.lease_id
            assert giver.told() == (handoff_id, CLAIMED, True)
            assert giver.look(handoff_id).is_released
            assert getattr(taker, end)(handoff_id) == DONE
            assert giver.told() == (handoff_id, state, True)
            assert list(taker.renew(lease_ids=[lease_id]).lease_outcomes) != [DONE]
        handoff_id = giver.offer(policy=STAGED_POLICY).handoff_id
        taker.claim(handoff_id)
        giver.give_up(handoff_id)
        assert taker.complete(handoff_id) == ALREADY_ABORTED


class HandoffNewsContract:
    """What beats carry of handoffs, and what time does to them."""

    @pytest.fixture
    def listening(self, house, connect):
        """An engine that lends a pool of one part and listens, and one that takes and listens."""
        return pair_of(house, connect)

    def test_news_is_told_again_until_it_is_noticed(self, listening):
        """A notice that was lost on its way comes with the next beat."""
        giver, taker = listening
        handoff_id = giver.offer().handoff_id
        assert not giver.beat().notices
        taker.claim(handoff_id)
        (notice,) = giver.beat().notices
        assert (notice.handoff_id, notice.state, notice.is_released) == (handoff_id, CLAIMED, False)
        # What is yet to come is not forgotten for a word that is too early.
        (notice,) = giver.beat(noticed_handoff_ids=[handoff_id]).notices
        assert notice.state == CLAIMED
        taker.complete(handoff_id)
        for _ in range(2):
            (notice,) = giver.beat().notices
            assert (notice.state, notice.is_released) == (COMPLETED, True)
        taker.beat(noticed_handoff_ids=[handoff_id])
        assert len(giver.beat().notices) == 1
        assert not giver.beat(noticed_handoff_ids=[handoff_id, 7, 2**64 - 1]).notices
        assert not giver.beat().notices

    def test_the_end_of_a_staged_handoff_is_not_forgotten_for_its_release(self, listening):
        """It is released when it is claimed; that this was noticed does not mean that its end was."""
        giver, taker = listening
        giver.put([1, 2])
        handoff_id = giver.offer(policy=STAGED_POLICY).handoff_id
        taker.claim(handoff_id)
        (notice,) = giver.beat(noticed_handoff_ids=[handoff_id]).notices
        assert (notice.state, notice.is_released) == (CLAIMED, True)
        taker.reject(handoff_id, "why")
        (notice,) = giver.beat().notices
        assert (notice.state, notice.is_released, notice.reason) == (REJECTED, True, "why")

    def test_beats_renew_a_claim_up_to_its_hold(self, house, listening):
        """Only the claimer's; however often it is renewed, the giver gets its memory back in the end."""
        giver, taker = listening
        handoff_id = claimed_by(giver, taker)
        passed_s = 0
        while passed_s < HOLD_S - TTL_S:
            house.time.advance(TTL_S - 1)
            passed_s += TTL_S - 1
            assert list(giver.beat(handoff_ids=[handoff_id]).handoff_outcomes) == [UNKNOWN]
            beat = taker.beat(handoff_ids=[handoff_id, 7])
            assert list(beat.handoff_outcomes) == [DONE, UNKNOWN]
            assert beat.remaining.seconds == min(TTL_S, HOLD_S - passed_s)
        house.time.advance(HOLD_S - passed_s)
        assert list(taker.beat(handoff_ids=[handoff_id]).handoff_outcomes) == [ALREADY_EXPIRED]
        assert giver.told() == (handoff_id, EXPIRED, False)
        assert taker.complete(handoff_id) == ALREADY_EXPIRED
        assert giver.told() == (handoff_id, EXPIRED, True)

    def test_a_beat_s_handoffs_are_bounded(self, peer):
        """A beat of too many items changes nothing, and the field is named."""
        engine = Peer(peer)
        many = list(range(MAX_BATCH_KEYS + 1))
        for name in ("handoff_ids", "noticed_handoff_ids"):
            check_refused(BATCH_SIZE, engine.beat, says=f"{name} has {len(many)}", **{name: many})
        outcomes = engine.beat(handoff_ids=many[1:], noticed_handoff_ids=many[1:]).handoff_outcomes
        assert outcomes == bytes([UNKNOWN]) * MAX_BATCH_KEYS

    def test_an_offer_that_nobody_claims_expires(self, house, listening):
        """Its memory is released with it: nobody has ever read it."""
        giver, taker = listening
        handoff_id = giver.offer().handoff_id
        house.time.advance(TTL_S)
        taker.beat()
        assert giver.told() == (handoff_id, EXPIRED, True)
        assert giver.look(handoff_id).reason == "nobody claimed it in time"
        check_refused(HANDOFF_ENDED, taker.claim, handoff_id, says="EXPIRED")

    def test_a_claim_that_is_not_renewed_expires(self, house, listening):
        """Both sides are told; the memory is released when the reader has answered."""
        giver, taker = listening
        handoff_id = claimed_by(giver, taker)
        house.time.advance(TTL_S)
        giver.beat()
        assert giver.told() == (handoff_id, EXPIRED, False)
        assert taker.revoked() == [handoff_id]
        taker.beat(acknowledged_ids=[handoff_id])
        assert giver.told() == (handoff_id, EXPIRED, True)

    def test_a_draining_daemon_lets_a_passage_end(self, make_house, connect):
        """It takes no memory and no offer; what was offered can still be claimed and completed."""
        house = make_house(KVSERVICE_SERVER__DRAIN_TIMEOUT_MS="9000")
        giver, taker = pair_of(house, connect)
        offered, handoff_id = giver.offer().handoff_id, claimed_by(giver, taker)
        house.begin_stop()
        assert giver.peer.notice().draining
        draining = ("UNAVAILABLE", "DRAINING")
        check_refused(draining, giver.offer)
        check_refused(draining, giver.lend, [segment()])
        taker.claim(offered)
        assert taker.complete(handoff_id) == DONE
        assert house.is_running
        assert taker.complete(offered) == DONE
        house.close()
        assert not house.is_running


class GrpcHandoffContract:
    """What takes another tenant, or a stream beside the session's own connection."""

    def test_another_tenant_s_handoffs_do_not_exist(self, make_house, dial):
        """Whoever guesses a number learns nothing and ends nothing."""
        digest = {name: hashlib.sha256(name.encode()).hexdigest() for name in ("red", "blue")}
        config = "".join(f'[tenants.{name}]\ntoken_sha256 = "{digest[name]}"\n' for name in digest)
        house = make_house(config=config)
        giver, thief = Peer(dial(GrpcPeer, house, "red")), Peer(dial(GrpcPeer, house, "blue"))
        giver.lend()
        handoff_id = giver.offer().handoff_id
        for call in (thief.claim, thief.look):
            check_refused(HANDOFF_UNKNOWN, call, handoff_id, says=str(handoff_id))
        for end in ENDS:
            assert getattr(thief, end)(handoff_id) == UNKNOWN
        assert thief.take_back(*giver.segments) == 0
        thief.layouts = giver.layouts
        check_refused(SEGMENT_UNKNOWN, thief.offer, says=str(giver.layouts[0]))
        assert giver.claim(handoff_id).keys

    def test_the_stream_of_a_local_session_hears_of_handoffs_too(self, house, dial):
        """GRPC calls join a session by its token, and so does its news, on both ways."""
        lane, remote = dial(LanePeer, house), dial(GrpcPeer, house)
        giver, taker = Peer(lane), Peer(dial(LanePeer, house))
        giver.lend()
        remote.session_token = lane.session_token
        remote.listen()
        handoff_id = giver.offer().handoff_id
        taker.claim(handoff_id)
        for peer in (remote, lane):
            (notice,) = peer.notice().notices
            assert (notice.handoff_id, notice.state) == (handoff_id, CLAIMED)
        taker.complete(handoff_id)
        (notice,) = remote.notice().notices
        assert notice.is_released
        (repeated,) = remote.beat(noticed_handoff_ids=[]).notices
        assert repeated == notice
        assert not remote.beat(noticed_handoff_ids=[handoff_id]).notices


__all__ = ["GrpcHandoffContract", "HandoffEndContract", "HandoffNewsContract"]
