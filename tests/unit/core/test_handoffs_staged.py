"""Handoffs through the arena: what is offered stays there, under a lease that ends with the handoff."""

import pytest

from kvservice.core.effects import Revoke, Tell
from kvservice.core.errors import ArenaFullError, HandoffEndedError
from kvservice.core.handoff_choice import HandoffChoice, HandoffPolicy
from kvservice.core.outcomes import ItemOutcome
from kvservice.core.records import HandoffState
from kvservice.core.slot_pool import SlotState
from tests.core_world import OTHER_ENGINE, SECOND_NS, World

DONE, MISS, ALREADY_EXPIRED = ItemOutcome.DONE, ItemOutcome.MISS, ItemOutcome.ALREADY_EXPIRED
CLAIMED, COMPLETED, REJECTED, ABORTED, EXPIRED = list(HandoffState)[1:]
DIRECT_ONLY = HandoffPolicy.DIRECT
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


def test_staged_blocks_outlive_the_engine_that_computed_them(world, owner, claimer, spaces):
    """The handoff ends with it, and whoever needs the blocks looks them up."""
    handoff_id = owner.offer(spaces, KEYS).handoff_id
    owner.leave()
    with pytest.raises(HandoffEndedError, match=r"the engine that offered it is gone.*look the blocks up"):
        claimer.claim(handoff_id, spaces)
    assert claimer.acquire(spaces, KEYS).keys_count == len(KEYS)


def test_a_handoff_whose_memory_is_gone_is_still_found_by_its_request(world, owner, claimer, spaces, layouts):
    """It goes through the arena, and a late retry of the offer must not make another."""
    request = world.fresh()
    handoff_id = hand(owner, claimer, spaces, layouts=layouts, request_id=request)
    worker = world.attach()
    worker.open()
    assert owner.unregister(*world.books.engine_segments) == 1
    for client in (owner, worker):
        again = client.offer(spaces, KEYS, layouts=layouts, request_id=request)
        assert again.handoff_id == handoff_id
