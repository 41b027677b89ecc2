"""The lives of handoffs: an end that both sides learn, and memory that is held while somebody may read it."""

import pytest

from kvservice.core.effects import Revoke, Tell
from kvservice.core.errors import HandoffEndedError, HandoffUnknownError, NotOwnerError
from kvservice.core.handoff_choice import HandoffChoice
from kvservice.core.limits import ENDED_LIMIT
from kvservice.core.outcomes import ItemOutcome
from kvservice.core.records import HandoffState
from tests.core_world import OTHER_ENGINE, SECOND_NS, World

DONE = ItemOutcome.DONE
OFFERED, CLAIMED, COMPLETED, REJECTED, ABORTED, EXPIRED = HandoffState
LATE = {
    COMPLETED: ItemOutcome.ALREADY_COMPLETED,
    REJECTED: ItemOutcome.ALREADY_REJECTED,
    ABORTED: ItemOutcome.ALREADY_ABORTED,
    EXPIRED: ItemOutcome.ALREADY_EXPIRED,
}
TTL_S, HOLD_S, BOUND_S = 10, 30, 5
KEYS = range(4)


@pytest.fixture
def world():
    """Give a world in which handoffs are held for half a minute."""
    return World(
        handoff_hold_ns=HOLD_S * SECOND_NS,
        operation_bound_ns=BOUND_S * SECOND_NS,
        heartbeat_timeout_ns=TTL_S * SECOND_NS,
    )


@pytest.fixture
def owner(world):
    """Give a local process of an engine that computes blocks."""
    return world.attach()


@pytest.fixture
def spaces(owner):
    """Give its space."""
    return owner.open()


@pytest.fixture
def layouts(owner):
    """Give the layout of a pool of 16 blocks in its memory."""
    return owner.register_pools().layout_ids


@pytest.fixture
def claimer(world):
    """Give a local process of an engine that needs blocks."""
    return needy(world)


@pytest.fixture
def claimed(owner, claimer, spaces, layouts):
    """Give the number of a handoff that is claimed, to be read out of the owner's memory."""
    return hand(owner, claimer, spaces, layouts=layouts)


def needy(world, *, engine: bytes = OTHER_ENGINE, is_local: bool = True):
    """Attach a process of an engine that needs blocks."""
    client = world.attach(engine=engine, is_local=is_local)
    client.open()
    return client


def hand(owner, claimer, spaces, **offer) -> int:
    """Offer blocks of the owner's memory and have them claimed; return the number of the handoff."""
    handoff_id = owner.offer(spaces, KEYS, **offer).handoff_id
    assert claimer.claim(handoff_id, spaces).decision.choice is HandoffChoice.DIRECT
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


# ---- ends by a word


def test_a_completed_claim_is_done_and_released_at_once(world, claimed, owner, claimer):
    """By this word the bytes are good, and nobody of the claimer's engine reads any more."""
    world.advance(2)
    assert claimer.complete(claimed) == DONE
    assert told(world) == [(claimed, COMPLETED, True)]
    answer = owner.look(claimed)
    assert (answer.state, answer.is_released, answer.keys_count) == (COMPLETED, True, len(KEYS))
    assert (answer.choice, world.books.holds) == (HandoffChoice.DIRECT, {})
    assert claimer.beat().revoked_ids.tolist() == []


def test_any_process_of_the_claimers_engine_speaks_for_it(world, claimed):
    """The scheduler claims, a worker reads, and either says that it is over."""
    worker = needy(world)
    assert worker.complete(claimed) == DONE
    assert told(world) == [(claimed, COMPLETED, True)]


@pytest.mark.parametrize("how", [COMPLETED, REJECTED, ABORTED])
def test_a_second_end_is_data_and_changes_nothing(world, claimed, owner, claimer, how):
    """Whoever says it, and whatever it says: the first end stands."""
    assert claimer.end_handoff(claimed, how) == DONE
    late_count = world.books.late_ends_count
    for again in (COMPLETED, REJECTED, ABORTED):
        for client in (claimer, owner):
            assert client.end_handoff(claimed, again) == LATE[how]
            assert told(world) == []
    assert world.books.late_ends_count == late_count + 6
    assert notices(owner) == [(claimed, how, True)]


def test_each_side_ends_what_is_its_own_to_end(world, owner, claimer, spaces, layouts):
    """Completing is the claimer's; rejecting too, once there is one; aborting is of both sides."""
    offered = owner.offer(spaces, [1], layouts=layouts).handoff_id
    claimed = hand(owner, claimer, spaces, layouts=layouts)
    stranger = needy(world, engine=b"engine three....")
    refused = [
        (owner, offered, COMPLETED),
        (claimer, offered, COMPLETED),
        (claimer, offered, ABORTED),
        (owner, claimed, COMPLETED),
        (owner, claimed, REJECTED),
        *((stranger, claimed, how) for how in (COMPLETED, REJECTED, ABORTED)),
        *((claimer, claimed, how) for how in (OFFERED, CLAIMED, EXPIRED)),
    ]
    for client, handoff_id, how in refused:
        with pytest.raises(NotOwnerError, match=f"not this session's to end as {how.name}"):
            client.end_handoff(handoff_id, how)
    assert (owner.look(offered).state, owner.look(claimed).state) == (OFFERED, CLAIMED)
    assert stranger.reject(offered, "unknown model") == DONE
    assert owner.look(offered).reason == "unknown model"


def test_an_offer_that_is_taken_back_is_released_at_once(world, owner, claimer, spaces, layouts):
    """Nobody had it, so nobody reads it; nobody gets it any more either."""
    handoff_id = owner.offer(spaces, [1], layouts=layouts).handoff_id
    assert owner.abort_handoff(handoff_id) == DONE
    assert told(world) == [(handoff_id, ABORTED, True)]
    with pytest.raises(HandoffEndedError, match="has ended as ABORTED"):
        claimer.claim(handoff_id, spaces)


def test_the_claimer_of_an_ended_handoff_claims_it_no_more(claimed, owner, claimer, spaces):
    """A late retry of the claim must not read what is released."""
    claimer.reject(claimed, "no room")
    with pytest.raises(HandoffEndedError, match=r"has ended as REJECTED \(no room\)"):
        claimer.claim(claimed, spaces)


# ---- what is held


def test_a_claim_that_its_owner_aborts_is_held_until_every_reader_has_let_go(world, claimed, owner, claimer):
    """Every process of the claimer's engine is asked, and the word of each counts for itself."""
    worker, bystander = needy(world), needy(world, engine=b"engine three....")
    owner.abort_handoff(claimed)
    assert told(world) == [(claimed, ABORTED, False)]
    assert asked(world) == {(claimer.token, claimed), (worker.token, claimed)}
    assert owner.look(claimed).is_released is False
    assert claimer.beat(acknowledged=[claimed]).revoked_ids.tolist() == []
    bystander.beat(acknowledged=[claimed])
    assert worker.beat().revoked_ids.tolist() == [claimed]
    assert notices(owner) == [(claimed, ABORTED, False)]
    worker.beat(acknowledged=[claimed])
    assert told(world) == [(claimed, ABORTED, True)]
    assert owner.look(claimed).is_released is True


def test_processes_on_other_hosts_are_asked_too(world, owner, spaces, layouts):
    """They map nothing of the arena, but read the memory of engines as well as any other."""
    scheduler, worker = needy(world, is_local=False), needy(world, is_local=False)
    handoff_id = hand(owner, scheduler, spaces, layouts=layouts)
    owner.abort_handoff(handoff_id)
    assert asked(world) == {(scheduler.token, handoff_id), (worker.token, handoff_id)}
    scheduler.beat(acknowledged=[handoff_id])
    assert notices(owner) == [(handoff_id, ABORTED, False)]
    assert worker.beat(acknowledged=[handoff_id]).revoked_ids.tolist() == []
    assert notices(owner) == [(handoff_id, ABORTED, True)]


def test_a_late_complete_lets_go_too(world, claimed, owner, claimer):
    """What it read is not good, and it reads no more: that is all that the owner waits for."""
    worker = needy(world)
    owner.abort_handoff(claimed)
    assert claimer.complete(claimed) == LATE[ABORTED]
    assert told(world) == []
    assert claimer.beat().revoked_ids.tolist() == []
    assert worker.complete(claimed) == LATE[ABORTED]
    assert told(world) == [(claimed, ABORTED, True)]


def test_who_never_answers_is_waited_for_no_longer_than_it_can_be_reading(world, claimed, owner, claimer):
    """It posts nothing after the deadline that it knows of, and no operation is longer than its bound."""
    world.advance(4)
    claimer.beat(handoffs=[claimed])
    owner.abort_handoff(claimed)
    world.advance(TTL_S + BOUND_S - 0.001)
    assert notices(owner) == [(claimed, ABORTED, False)]
    world.advance(0.001)
    assert told(world) == [(claimed, ABORTED, True)]
    assert claimer.beat().revoked_ids.tolist() == []
    assert claimer.complete(claimed) == LATE[ABORTED]


def test_an_expired_claim_is_held_for_one_operation(world, claimed, owner, claimer):
    """Complete comes too late: the bytes are to be discarded, whatever they are."""
    world.advance(TTL_S)
    assert told(world) == [(claimed, EXPIRED, False)]
    assert asked(world) == {(claimer.token, claimed)}
    assert owner.look(claimed).reason == "its claimer did not renew it"
    worker = needy(world)
    assert worker.complete(claimed) == LATE[EXPIRED]
    assert notices(owner) == [(claimed, EXPIRED, False)]
    world.advance(BOUND_S)
    assert told(world) == [(claimed, EXPIRED, True)]


def test_a_claim_that_expired_long_ago_is_held_for_one_operation_from_then_on(world, claimed, owner):
    """The daemon looks late; the first that it says is not that the memory is free."""
    world.advance(HOLD_S)
    assert told(world) == [(claimed, EXPIRED, False)]
    world.advance(BOUND_S)
    assert told(world) == [(claimed, EXPIRED, True)]


def test_what_nobody_claims_expires_and_is_released_at_once(world, owner, spaces, layouts):
    """After the time that was asked for, the server's default, or what it grants at most."""
    for ttl_s, expected_s in ((3, 3), (0, TTL_S), (3600, HOLD_S)):
        offered = owner.offer(spaces, [1], layouts=layouts, ttl_s=ttl_s)
        assert offered.remaining_ns == expected_s * SECOND_NS
        world.advance(expected_s - 0.001)
        assert owner.look(offered.handoff_id).state is OFFERED
        world.advance(0.001)
        assert told(world) == [(offered.handoff_id, EXPIRED, True)]
        answer = owner.look(offered.handoff_id)
        assert (answer.reason, answer.choice) == ("nobody claimed it in time", HandoffChoice.UNDECIDED)


# ---- renewals


def test_a_renewal_never_shortens(world, owner, claimer, spaces, layouts):
    """A claim lives as long as its offer would have, and longer with each beat."""
    handoff_id = hand(owner, claimer, spaces, layouts=layouts, ttl_s=25)
    world.advance(2)
    assert claimer.claim(handoff_id, spaces).remaining_ns == 23 * SECOND_NS
    beat = claimer.beat(handoffs=[handoff_id])
    assert beat.handoff_outcomes.tolist() == [DONE]
    assert claimer.claim(handoff_id, spaces).remaining_ns == 23 * SECOND_NS
    world.advance(18)
    assert claimer.beat(handoffs=[handoff_id]).renewal.remaining_ns == TTL_S * SECOND_NS


def test_no_renewal_goes_beyond_the_hold(world, claimed, owner, claimer):
    """The owner frees its memory then, even if no daemon is there any more to say so."""
    for _ in range(5):
        world.advance(5)
        claimer.beat(handoffs=[claimed])
    beat = claimer.beat(handoffs=[claimed])
    assert beat.handoff_outcomes.tolist() == [DONE]
    assert beat.renewal.remaining_ns == (HOLD_S - 25) * SECOND_NS
    world.advance(HOLD_S - 25)
    assert told(world) == [(claimed, EXPIRED, False)]
    assert claimer.beat(handoffs=[claimed]).handoff_outcomes.tolist() == [LATE[EXPIRED]]


def test_the_hold_that_is_answered_has_room_for_the_last_operation(world, owner, claimer, spaces, layouts):
    """A claimer that was renewed to the end posts until then, and may be reading for one more bound."""
    offered = owner.offer(spaces, KEYS, layouts=layouts)
    assert offered.hold_ns == (HOLD_S + BOUND_S) * SECOND_NS
    claimer.claim(offered.handoff_id, spaces)
    freed_at_ns = world.now_ns + offered.hold_ns
    while claimer.beat(handoffs=[offered.handoff_id]).handoff_outcomes.tolist() == [DONE]:
        world.advance(2.5)
    while not owner.look(offered.handoff_id).is_released:
        world.advance(0.5)
    assert world.now_ns == freed_at_ns


def test_a_beat_says_how_each_handoff_is(world, owner, claimer, spaces, layouts):
    """One outcome each, in order; the shortest life that was renewed is the answer's."""
    ended = {}
    for how in (COMPLETED, REJECTED, ABORTED):
        ended[hand(owner, claimer, spaces, layouts=layouts)] = LATE[how]
        claimer.end_handoff(list(ended)[-1], how)
    world.advance(HOLD_S - TTL_S - 2)
    live = hand(owner, claimer, spaces, layouts=layouts)
    unclaimed = owner.offer(spaces, [9], layouts=layouts).handoff_id
    beat = claimer.beat(handoffs=[*ended, live, unclaimed, 12345])
    assert beat.handoff_outcomes.tolist() == [*ended.values(), DONE, ItemOutcome.UNKNOWN, ItemOutcome.UNKNOWN]
    assert owner.beat(handoffs=[live]).handoff_outcomes.tolist() == [ItemOutcome.UNKNOWN]
    assert needy(world).beat(handoffs=[live]).handoff_outcomes.tolist() == [DONE]


# ---- deaths


def test_the_death_of_the_owner_ends_what_it_offered(world, claimed, owner, claimer, spaces, layouts):
    """Its readers are asked all the same, and learn that what they read is not good; nobody is told of it."""
    waiting = owner.offer(spaces, [9], layouts=layouts).handoff_id
    peer = world.attach()
    owner.leave()
    assert told(world) == []
    assert asked(world) == {(claimer.token, claimed)}
    assert [peer.look(each).state for each in (claimed, waiting)] == [ABORTED, ABORTED]
    assert [peer.look(each).is_released for each in (claimed, waiting)] == [False, True]
    assert claimer.complete(claimed) == LATE[ABORTED]
    assert peer.look(claimed).is_released is True
    assert world.books.holds == {}


def test_the_death_of_the_claimer_releases_with_its_last_process(world, claimed, owner, claimer):
    """A process that was seen to die reads no more; the others of its engine may."""
    worker = needy(world)
    claimer.leave()
    assert told(world) == [(claimed, ABORTED, False)]
    assert asked(world) == {(worker.token, claimed)}
    worker.leave()
    assert told(world) == [(claimed, ABORTED, True)]


def test_the_death_of_the_only_process_of_the_claimer_releases_at_once(world, claimed, owner, claimer):
    """There is nobody left to wait for."""
    claimer.leave()
    assert told(world) == [(claimed, ABORTED, True)]
    assert owner.look(claimed).reason == "the engine that claimed it is gone"


def test_a_reader_that_dies_is_waited_for_no_more(world, claimed, owner, claimer):
    """Dying is as good as letting go, for what had ended before as well."""
    owner.abort_handoff(claimed)
    claimer.leave()
    assert told(world) == [(claimed, ABORTED, True)]


def test_a_claimer_on_another_host_is_waited_for_until_it_can_read_no_more(world, owner, spaces, layouts):
    """Nobody has seen it die: a lost connection stops no read from one engine to another."""
    remote = needy(world, is_local=False)
    handoff_id = hand(owner, remote, spaces, layouts=layouts)
    world.advance(3)
    remote.beat(handoffs=[handoff_id])
    world.advance(TTL_S)
    assert remote.token not in world.books.sessions
    assert [each[0::2] for each in told(world)] == [(handoff_id, False)]
    world.advance(BOUND_S - 0.001)
    assert owner.look(handoff_id).is_released is False
    world.advance(0.001)
    assert owner.look(handoff_id).is_released is True


def test_a_process_on_another_host_may_say_goodbye(world, owner, spaces, layouts):
    """By that it reads no more: only silence says nothing."""
    scheduler, worker = needy(world, is_local=False), needy(world, is_local=False)
    handoff_id = hand(owner, scheduler, spaces, layouts=layouts)
    scheduler.leave()
    assert told(world) == [(handoff_id, ABORTED, False)]
    assert asked(world) == {(worker.token, handoff_id)}
    worker.leave()
    assert told(world) == [(handoff_id, ABORTED, True)]


def test_a_reader_that_falls_silent_after_the_end_has_not_let_go(world, owner, spaces, layouts):
    """The bound ends the wait, not the end of a session that nobody has seen die."""
    remote = needy(world, is_local=False)
    handoff_id = hand(owner, remote, spaces, layouts=layouts, ttl_s=25)
    owner.abort_handoff(handoff_id)
    world.advance(TTL_S)
    assert remote.token not in world.books.sessions
    world.advance(25 - TTL_S + BOUND_S - 0.001)
    assert owner.look(handoff_id).is_released is False
    world.advance(0.001)
    assert owner.look(handoff_id).is_released is True


def test_a_reader_that_falls_silent_before_the_end_has_not_let_go(world, owner, spaces, layouts):
    """A worker of the claimer's engine that is cut off from the daemon may go on reading from its peer."""
    scheduler, worker = needy(world, is_local=False), needy(world, is_local=False)
    handoff_id = hand(owner, scheduler, spaces, layouts=layouts, ttl_s=25)
    for _ in range(4):
        world.advance(3)
        scheduler.beat()
    assert worker.token not in world.books.sessions
    owner.abort_handoff(handoff_id)
    assert asked(world) == {(scheduler.token, handoff_id)}
    scheduler.beat(acknowledged=[handoff_id])
    assert notices(owner) == [(handoff_id, ABORTED, False)]
    world.advance(25 - 12 + BOUND_S)
    assert notices(owner) == [(handoff_id, ABORTED, True)]


def test_a_silent_process_holds_nothing_that_its_engine_has_ended(world, owner, spaces, layouts):
    """The word that nobody of the engine reads any more is about all of its processes."""
    scheduler, worker = needy(world, is_local=False), needy(world, is_local=False)
    other_id = owner.offer(spaces, [9], layouts=layouts, ttl_s=25).handoff_id
    handoff_id = hand(owner, scheduler, spaces, layouts=layouts, ttl_s=25)
    for _ in range(4):
        world.advance(3)
        scheduler.beat()
    assert worker.token not in world.books.sessions
    assert scheduler.complete(handoff_id) == DONE
    assert told(world) == [(handoff_id, COMPLETED, True)]
    scheduler.claim(other_id, spaces)
    owner.abort_handoff(other_id)
    scheduler.beat(acknowledged=[other_id])
    assert owner.look(other_id).is_released is True


def test_the_death_of_the_process_with_the_memory_ends_the_handoff(world, owner, claimer, spaces):
    """A worker had registered it, the scheduler had offered it: the scheduler is told, and once more."""
    worker = world.attach()
    layouts = worker.register_pools().layout_ids
    handoff_id = hand(owner, claimer, spaces, layouts=layouts)
    worker.leave()
    assert told(world) == [(handoff_id, ABORTED, False)]
    assert owner.look(handoff_id).reason == "its segments are gone"
    claimer.beat(acknowledged=[handoff_id])
    assert told(world) == [(handoff_id, ABORTED, True)]


# ---- notices


def test_a_notice_is_repeated_until_it_is_noticed(world, claimed, owner, claimer):
    """The stream that carried it may have been lost; the beats carry it again."""
    assert notices(owner) == notices(owner) == [(claimed, CLAIMED, False)]
    claimer.complete(claimed)
    assert notices(owner) == notices(owner) == [(claimed, COMPLETED, True)]
    assert notices(owner, noticed=[claimed, 12345]) == []
    assert notices(owner) == []


def test_an_early_word_does_not_lose_the_release(world, claimed, owner, claimer):
    """Who has seen the claim, or the end, still waits for its memory."""
    assert notices(owner, noticed=[claimed]) == [(claimed, CLAIMED, False)]
    owner.abort_handoff(claimed)
    assert notices(owner, noticed=[claimed]) == [(claimed, ABORTED, False)]
    claimer.beat(acknowledged=[claimed])
    assert notices(owner) == [(claimed, ABORTED, True)]
    assert notices(owner, noticed=[claimed]) == []


def test_notices_go_to_the_session_that_offered(world, claimed, owner, claimer):
    """Its peers have nothing to free; they can ask."""
    peer = world.attach()
    claimer.complete(claimed)
    assert notices(peer, noticed=[claimed]) == notices(claimer, noticed=[claimed]) == []
    assert notices(owner) == [(claimed, COMPLETED, True)]
    assert peer.look(claimed).state is COMPLETED


def test_who_never_takes_notice_keeps_the_latest():
    """So many are kept; what was not told any more can be asked for."""
    world = World(max_handoffs=2)
    owner = world.attach()
    spaces, layouts = owner.open(), owner.register_pools().layout_ids
    numbers = [owner.offer(spaces, [n], layouts=layouts).handoff_id for n in range(2)]
    for number in range(2, 6):
        owner.abort_handoff(numbers[-2])
        numbers.append(owner.offer(spaces, [number], layouts=layouts).handoff_id)
    owner.abort_handoff(numbers[-2])
    assert [each[0] for each in notices(owner)] == numbers[1:5]
    assert owner.look(numbers[0]).is_released is True


# ---- memory of the past


def test_so_many_ends_are_remembered(world, owner, spaces, layouts, monkeypatch):
    """The oldest is forgotten first, and then as unknown as one that never was."""
    assert ENDED_LIMIT >= 1 << 16
    monkeypatch.setattr("kvservice.core.books.ENDED_LIMIT", 2)
    numbers = [owner.offer(spaces, [n], layouts=layouts).handoff_id for n in range(3)]
    for handoff_id in numbers:
        owner.abort_handoff(handoff_id)
    assert owner.abort_handoff(numbers[0]) == ItemOutcome.UNKNOWN
    with pytest.raises(HandoffUnknownError):
        owner.look(numbers[0])
    assert [owner.look(each).state for each in numbers[1:]] == [ABORTED, ABORTED]
