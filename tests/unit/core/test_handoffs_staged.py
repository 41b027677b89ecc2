"""Handoffs through the arena: what is offered stays there, under a lease that ends with the handoff."""

import pytest

from kvservice.core.effects import Revoke, Tell
from kvservice.core.errors import ArenaFullError, HandoffEndedError
from kvservice.core.handoff_choice import HandoffChoice, HandoffPolicy
from kvservice.core.outcomes import ItemOutcome
from kvservice.core.records import HandoffState
from kvservice.core.slot_pool import SlotState
from tests.core_world import ENGINE, OTHER_ENGINE, SECOND_NS, World

DONE, MISS, ALREADY_EXPIRED = ItemOutcome.DONE, ItemOutcome.MISS, ItemOutcome.ALREADY_EXPIRED
OFFERED, CLAIMED, COMPLETED, REJECTED, ABORTED, EXPIRED = HandoffState
LATE = {
    REJECTED: ItemOutcome.ALREADY_REJECTED,
    ABORTED: ItemOutcome.ALREADY_ABORTED,
    EXPIRED: ALREADY_EXPIRED,
}
STAGED, DIRECT_ONLY = HandoffChoice.STAGED, HandoffPolicy.DIRECT
TTL_S = 10
KEYS = range(4)


@pytest.fixture
def world():
    """Give a world of one segment, so that eviction is never far."""
    return World(segments_count=1)


@pytest.fixture
def owner(world):
    """Give a local process of an engine that computes blocks."""
    return world.attach()


@pytest.fixture
def spaces(owner):
    """Give its space, with the blocks in the arena."""
    opened = owner.open()
    owner.put(opened, KEYS)
    return opened


@pytest.fixture
def layouts(owner):
    """Give the layout of a pool of 16 blocks in its memory."""
    return owner.register_pools().layout_ids


@pytest.fixture
def claimer(world):
    """Give a local process of an engine that needs blocks."""
    return needy(world)


@pytest.fixture
def staged(owner, claimer, spaces):
    """Give the number of a handoff that is claimed, to be read out of the arena."""
    return hand(owner, claimer, spaces)


def needy(world, *, is_local: bool = True):
    """Attach a process of an engine that needs blocks."""
    client = world.attach(engine=OTHER_ENGINE, is_local=is_local)
    client.open()
    return client


def hand(owner, claimer, spaces, **offer) -> int:
    """Offer blocks and have them claimed; return the number of the handoff."""
    handoff_id = owner.offer(spaces, KEYS, **offer).handoff_id
    assert claimer.claim(handoff_id, spaces).decision.choice is HandoffChoice.STAGED
    return handoff_id


def told(world) -> list[tuple]:
    """Return what the last event told the owners of handoffs."""
    notices = [effect.notice for effect in world.last_effects if isinstance(effect, Tell)]
    return [(notice.handoff_id, notice.state, notice.is_released) for notice in notices]


def asked(world) -> set[tuple[bytes, int]]:
    """Return whom the last event asked to let go of what."""
    return {(e.token, e.capability_id) for e in world.last_effects if isinstance(e, Revoke)}


def notices(client, **beat) -> list[tuple]:
    """Return what a beat tells an owner."""
    return [(notice.handoff_id, notice.state, notice.is_released) for notice in client.beat(**beat).notices]


def pins(world) -> int:
    """Count what holds the tenant's slots."""
    return int(world.pool().pins.sum())


def assert_nothing_is_held(world) -> None:
    """Hold the books to what they are after the end of all handoffs and leases."""
    books = world.books
    assert (books.handoffs, books.handoff_requests, books.holds) == ({}, {}, {})
    assert (books.leases, books.quarantines, pins(world)) == ({}, {}, 0)
    assert not any(session.offered or session.claimed for session in books.sessions.values())


def test_an_early_word_does_not_lose_the_end(world, staged, owner, claimer):
    """A claim that goes through the arena releases the memory, but it is not the last that is told of it."""
    assert notices(owner, noticed=[staged]) == [(staged, CLAIMED, True)]
    claimer.complete(staged)
    assert notices(owner) == [(staged, COMPLETED, True)]


def test_offered_blocks_stay_in_the_arena(world, owner, claimer, spaces):
    """From the offer to the claim, and under its lease to the end: whoever needs room must wait."""
    owner.put(spaces, range(16))
    handoff_id = owner.offer(spaces, range(16)).handoff_id
    other = world.attach("bolt")
    others = other.open()
    for verb in (lambda: claimer.claim(handoff_id, spaces), lambda: claimer.complete(handoff_id)):
        with pytest.raises(ArenaFullError):
            owner.reserve(spaces, [99])
        with pytest.raises(ArenaFullError):
            other.reserve(others, [1])
        assert verb()
    assert owner.reserve(spaces, [99]).reservation_id


@pytest.mark.parametrize("how", [REJECTED, ABORTED, EXPIRED])
def test_blocks_that_nobody_claims_are_pinned_no_longer(world, owner, spaces, how):
    """However the offer ends."""
    handoff_id = owner.offer(spaces, KEYS).handoff_id
    assert pins(world) == len(KEYS)
    if how is EXPIRED:
        world.advance(TTL_S)
    else:
        owner.end_handoff(handoff_id, how)
    assert (owner.look(handoff_id).state, pins(world)) == (how, 0)


def test_what_the_policy_forbids_to_read_is_not_pinned(world, owner, claimer, spaces, layouts):
    """Blocks that go out of the engine's memory need no room in the arena."""
    handoff_id = owner.offer(spaces, KEYS, layouts=layouts, policy=DIRECT_ONLY).handoff_id
    assert pins(world) == 0
    assert claimer.claim(handoff_id, spaces).decision.choice is HandoffChoice.DIRECT


def test_a_claim_through_the_arena_releases_the_memory(world, owner, claimer, spaces, layouts):
    """Nobody will read it: the engine that offered need not wait for the end."""
    handoff_id = owner.offer(spaces, KEYS, layouts=layouts).handoff_id
    claim = claimer.claim(handoff_id, spaces)
    assert (claim.decision.choice, claim.layouts) == (HandoffChoice.STAGED, ())
    assert told(world) == [(handoff_id, CLAIMED, True)]
    answer = owner.look(handoff_id)
    assert (answer.state, answer.is_released, answer.choice) == (CLAIMED, True, HandoffChoice.STAGED)


def test_a_direct_claim_pins_nothing_in_the_arena(world, owner, spaces, layouts):
    """From another host, one-sided reads of the engine's memory are faster."""
    remote = needy(world, is_local=False)
    handoff_id = owner.offer(spaces, KEYS, layouts=layouts).handoff_id
    assert pins(world) == len(KEYS)
    assert remote.claim(handoff_id, spaces).lease is None
    assert pins(world) == 0
    answer = owner.look(handoff_id)
    assert (answer.state, answer.is_released, answer.choice) == (CLAIMED, False, HandoffChoice.DIRECT)


def test_the_lease_of_a_claim_lives_as_long_as_it_does(world, owner, claimer, spaces):
    """Not only at first: the blocks must stay for as long as Complete may answer DONE."""
    handoff_id = owner.offer(spaces, KEYS, ttl_s=25).handoff_id
    claim = claimer.claim(handoff_id, spaces)
    assert claim.lease.remaining_ns == claim.remaining_ns == 25 * SECOND_NS
    world.advance(20)
    claimer.beat(handoffs=[handoff_id])
    again = claimer.claim(handoff_id, spaces)
    assert again.lease.remaining_ns == again.remaining_ns == TTL_S * SECOND_NS
    world.advance(TTL_S - 0.001)
    assert pins(world) == len(KEYS)
    assert claimer.complete(handoff_id) == DONE
    assert claimer.release(claim.lease.lease_id) == [ItemOutcome.ALREADY_RELEASED]
    assert pins(world) == 0


def test_a_claim_out_of_the_arena_ends_with_its_readers(world, staged, owner, claimer):
    """They are asked by the lease, and the slots wait for them as for those of any lease: without a bound."""
    worker = needy(world)
    owner.abort_handoff(staged)
    assert told(world) == [(staged, ABORTED, True)]
    (lease_id,) = {capability_id for _, capability_id in asked(world)}
    assert {token for token, _ in asked(world)} == {claimer.token, worker.token}
    world.advance(3600)
    assert pins(world) == len(KEYS)
    claimer.beat(acknowledged=[lease_id])
    worker.leave()
    assert pins(world) == 0


def test_an_expired_claim_out_of_the_arena_is_revoked(world, staged, owner, claimer):
    """The lease ends with the handoff, whichever of the two is looked at first."""
    world.advance(TTL_S)
    assert told(world) == [(staged, EXPIRED, True)]
    assert len(asked(world)) == 1
    assert world.books.leases == {}
    assert claimer.complete(staged) == ALREADY_EXPIRED
    claimer.leave()
    assert pins(world) == 0


def test_over_a_wire_the_daemon_itself_lets_go(world, owner, spaces):
    """A claimer on another host maps nothing: with the handoff its lease is over, and no transfer begins."""
    remote = needy(world, is_local=False)
    hand(owner, remote, spaces)
    world.advance(TTL_S)
    assert remote.token not in world.books.sessions
    assert (pins(world), world.books.quarantines) == (0, {})


def test_what_is_purged_can_still_be_handed_over(world, owner, claimer):
    """Offered is offered: the blocks are invisible to others, and go when the handoff is over."""
    opened = owner.open_answer()
    spaces = opened.space_ids
    owner.put(spaces, KEYS)
    handoff_id = owner.offer(spaces, KEYS).handoff_id
    assert owner.purge(opened.namespace_id) == len(KEYS)
    assert owner.outcomes(spaces, KEYS) == [MISS] * len(KEYS)
    lease = claimer.claim(handoff_id, spaces).lease
    assert not world.is_moved(lease.slots)
    assert world.states_count(SlotState.EVICTING) == len(KEYS)
    assert claimer.complete(handoff_id) == DONE
    assert world.states_count(SlotState.EVICTING) == 0
    assert world.is_moved(lease.slots)


def test_a_purged_offer_that_ends_unclaimed_frees_its_slots(world, owner):
    """Nothing else holds them."""
    opened = owner.open_answer()
    owner.put(opened.space_ids, KEYS)
    handoff_id = owner.offer(opened.space_ids, KEYS).handoff_id
    owner.purge(opened.namespace_id)
    owner.abort_handoff(handoff_id)
    assert world.states_count(SlotState.EVICTING) == 0


# ---- who offered it is gone


@pytest.mark.parametrize("is_local", [True, False])
def test_staged_blocks_outlive_the_engine_that_computed_them(world, owner, spaces, layouts, is_local):
    """They are claimed and completed as any others, by the one way that is left; nobody is told of it."""
    handoff_id = owner.offer(spaces, KEYS, layouts=layouts).handoff_id
    peer, decode = world.attach(), needy(world, is_local=is_local)
    session = world.books.sessions[owner.token]
    owner.leave()
    assert session.offered == set()
    answer = peer.look(handoff_id)
    assert (answer.state, answer.is_released, pins(world)) == (OFFERED, True, len(KEYS))
    claim = decode.claim(handoff_id, spaces)
    assert (claim.decision.choice, claim.layouts, claim.engine_incarnation) == (STAGED, (), ENGINE)
    assert (told(world), len(claim.lease.slots)) == ([], len(KEYS))
    assert decode.complete(handoff_id) == DONE
    assert (told(world), peer.look(handoff_id).state) == ([], COMPLETED)
    assert_nothing_is_held(world)


def test_a_claim_out_of_the_arena_outlives_the_engine_that_offered_it(world, staged, owner, claimer, spaces):
    """Its blocks are there, under the claimer's lease, and stay for as long as it renews."""
    owner.leave()
    assert (told(world), asked(world)) == ([], set())
    world.advance(TTL_S - 1)
    assert claimer.beat(handoffs=[staged]).handoff_outcomes.tolist() == [DONE]
    world.advance(TTL_S - 1)
    assert claimer.claim(staged, spaces).lease.keys_count == len(KEYS)
    assert claimer.complete(staged) == DONE
    assert_nothing_is_held(world)


def test_only_what_is_in_the_arena_outlives_the_engine(world, owner, spaces, layouts):
    """What is to be read out of the engine's memory ends with it, whatever else is stored."""
    remote = needy(world, is_local=False)
    direct = owner.offer(spaces, KEYS, layouts=layouts, policy=DIRECT_ONLY).handoff_id
    claimed = owner.offer(spaces, KEYS, layouts=layouts).handoff_id
    assert remote.claim(claimed, spaces).decision.choice is HandoffChoice.DIRECT
    nowhere = owner.offer(spaces, [99], layouts=layouts).handoff_id
    owner.leave()
    for handoff_id in (direct, claimed, nowhere):
        answer = remote.look(handoff_id)
        assert (answer.state, answer.reason) == (ABORTED, "the engine that offered it is gone")
    remote.beat(acknowledged=[claimed])
    assert_nothing_is_held(world)


def test_an_engine_that_falls_silent_leaves_what_is_staged(world, claimer):
    """Nobody has seen it die; for the blocks in the arena that is all the same."""
    remote = world.attach(is_local=False)
    spaces = remote.open()
    remote.put(spaces, KEYS)
    handoff_id = remote.offer(spaces, KEYS, ttl_s=25).handoff_id
    world.advance(TTL_S)
    assert remote.token not in world.books.sessions
    assert claimer.claim(handoff_id, spaces).remaining_ns == 15 * SECOND_NS
    assert claimer.complete(handoff_id) == DONE
    assert_nothing_is_held(world)


@pytest.mark.parametrize("how", [REJECTED, ABORTED, EXPIRED, None])
def test_what_outlived_its_engine_ends_like_any_other(world, owner, claimer, how):
    """Rejected by the one it was for, aborted by the engine's next process, at its time, or by a death."""
    opened = owner.open_answer()
    spaces = opened.space_ids
    owner.put(spaces, KEYS)
    handoff_id = owner.offer(spaces, KEYS).handoff_id
    owner.leave()
    claimer.purge(opened.namespace_id)
    assert (world.states_count(SlotState.EVICTING), pins(world)) == (len(KEYS), len(KEYS))
    if how is None:
        claimer.claim(handoff_id, spaces)
        claimer.leave()
    elif how is EXPIRED:
        world.advance(TTL_S)
    else:
        ender = claimer if how is REJECTED else world.attach()
        assert ender.end_handoff(handoff_id, how) == DONE
    assert told(world) == []
    assert world.attach().look(handoff_id).state is (how or ABORTED)
    assert world.states_count(SlotState.EVICTING) == 0
    assert_nothing_is_held(world)


def test_a_claimer_that_dies_ends_even_what_it_offered_itself(world, owner, spaces):
    """The two sides may be one session, and then both are gone."""
    handoff_id = hand(owner, owner, spaces)
    owner.leave()
    assert world.attach().look(handoff_id).reason == "the engine that claimed it is gone"
    assert_nothing_is_held(world)


def test_the_request_of_the_dead_is_free_again(world, owner, claimer, spaces, layouts):
    """Who comes back offers anew, and is told of that offer; the end of the old one is nothing to it."""
    request = world.fresh()
    old = owner.offer(spaces, KEYS, layouts=layouts, request_id=request).handoff_id
    owner.leave()
    back = world.attach()
    assert back.open() == spaces
    pools = back.register_pools().layout_ids
    offer = {"layouts": pools, "request_id": request}
    fresh = back.offer(spaces, KEYS, **offer).handoff_id
    assert fresh != old
    assert claimer.claim(old, spaces).decision.choice is STAGED
    assert claimer.complete(old) == DONE
    assert told(world) == []
    assert back.offer(spaces, KEYS, **offer).handoff_id == fresh
    assert claimer.reject(fresh) == DONE
    assert told(world) == [(fresh, REJECTED, True)]
    assert_nothing_is_held(world)


# ---- its memory is gone


@pytest.mark.parametrize("is_death", [True, False])
def test_what_is_staged_outlives_the_memory_it_was_offered_from(world, owner, spaces, is_death):
    """An engine's processes die in any order; its scheduler learns that the memory is nobody's any more."""
    worker, remote = world.attach(), needy(world, is_local=False)
    pools = worker.register_pools()
    handoff_id = owner.offer(spaces, KEYS, layouts=pools.layout_ids).handoff_id
    if is_death:
        worker.leave()
    else:
        assert worker.unregister(*pools.segment_ids) == 1
    assert told(world) == [(handoff_id, OFFERED, True)]
    answer = owner.look(handoff_id)
    assert (answer.state, answer.is_released) == (OFFERED, True)
    # The word that this was noticed does not lose what is yet to come.
    assert notices(owner, noticed=[handoff_id]) == [(handoff_id, OFFERED, True)]
    assert remote.claim(handoff_id, spaces).decision.choice is STAGED
    assert told(world) == [(handoff_id, CLAIMED, True)]
    owner.leave()
    assert remote.complete(handoff_id) == DONE
    assert_nothing_is_held(world)


def test_a_handoff_whose_memory_is_gone_is_still_found_by_its_request(world, owner, claimer, spaces, layouts):
    """It goes through the arena, and a late retry of the offer must not make another."""
    request = world.fresh()
    handoff_id = hand(owner, claimer, spaces, layouts=layouts, request_id=request)
    worker = world.attach()
    worker.open()
    assert owner.unregister(*world.books.engine_segments) == 1
    assert told(world) == []  # That nobody reads it was said at the claim.
    for client in (owner, worker):
        again = client.offer(spaces, KEYS, layouts=layouts, request_id=request)
        assert again.handoff_id == handoff_id


# ---- the lease is released


@pytest.mark.parametrize("is_worker", [True, False])
def test_a_claim_whose_lease_is_released_is_complete_when_its_engine_says_so(
    world, owner, claimer, spaces, is_worker
):
    """By the release it had read what it needs. Nothing is left to claim again, but the handoff lives."""
    handoff_id = owner.offer(spaces, KEYS).handoff_id
    lease = claimer.claim(handoff_id, spaces).lease
    releaser = needy(world) if is_worker else claimer
    assert releaser.release(lease.lease_id) == [DONE]
    assert (told(world), asked(world), pins(world)) == ([], set(), 0)
    with pytest.raises(HandoffEndedError, match=f"lease of handoff {handoff_id} was released by its claimer"):
        claimer.claim(handoff_id, spaces)
    assert claimer.look(handoff_id).state is CLAIMED
    assert claimer.beat(handoffs=[handoff_id]).handoff_outcomes.tolist() == [DONE]
    # The slots are anybody's now, and DONE is no word about them.
    owner.put(spaces, range(20, 36))
    assert world.is_moved(lease.slots)
    assert claimer.complete(handoff_id) == DONE
    assert told(world) == [(handoff_id, COMPLETED, True)]
    assert claimer.release(lease.lease_id) == [ItemOutcome.ALREADY_RELEASED]
    assert_nothing_is_held(world)


@pytest.mark.parametrize("how", [REJECTED, ABORTED, EXPIRED])
def test_a_claim_whose_lease_is_released_ends_in_any_way(world, staged, owner, claimer, how):
    """There is nothing to revoke any more, whoever ends it."""
    (lease_id,) = world.books.leases
    claimer.release(lease_id)
    if how is EXPIRED:
        world.advance(TTL_S)
    else:
        ender = owner if how is ABORTED else claimer
        assert ender.end_handoff(staged, how) == DONE
    assert told(world) == [(staged, how, True)]
    assert asked(world) == set()
    assert claimer.complete(staged) == LATE[how]
    assert_nothing_is_held(world)


def test_only_the_claimers_engine_releases_its_lease(world, staged, owner, claimer, spaces):
    """To others it is unknown, and the claim stays what it was."""
    (lease_id,) = world.books.leases
    assert owner.release(lease_id) == [ItemOutcome.UNKNOWN]
    assert claimer.claim(staged, spaces).lease.lease_id == lease_id


def test_renewing_the_lease_alone_does_not_keep_the_claim(world, staged, claimer):
    """What is read after the claim has expired is not good, however long its lease was to be."""
    (lease_id,) = world.books.leases
    claimer.renew(leases=[lease_id], ttl_s=50)
    world.advance(TTL_S)
    assert asked(world) == {(claimer.token, lease_id)}
    assert claimer.complete(staged) == ALREADY_EXPIRED
    assert claimer.release(lease_id) == [ALREADY_EXPIRED]
    claimer.beat(acknowledged=[lease_id])
    assert_nothing_is_held(world)
