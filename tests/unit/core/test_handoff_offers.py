"""Offers and claims: what is offered is given to one, and what is refused has changed nothing."""

import pytest

from kvservice.core.errors import (
    BatchSizeError,
    BlockSizeError,
    DrainingError,
    DuplicateKeyError,
    HandoffClaimedError,
    HandoffUnknownError,
    InvalidFieldError,
    LimitReachedError,
    NoWayError,
    RepresentationMismatchError,
    RequestIdReusedError,
    SegmentUnknownError,
    SessionUnknownError,
    SpaceNotOpenError,
    StaleIncarnationError,
)
from kvservice.core.events import Drain
from kvservice.core.handoff_choice import HandoffChoice, HandoffPolicy
from kvservice.core.limits import REASON_CHARACTERS_LIMIT
from kvservice.core.outcomes import ItemOutcome
from kvservice.core.records import HandoffState
from tests.core_world import ENGINE, LARGE_BYTES, OTHER_ENGINE, SECOND_NS, SMALL_BYTES, World, keys

DONE, UNKNOWN = ItemOutcome.DONE, ItemOutcome.UNKNOWN
COMPLETED, REJECTED, ABORTED = HandoffState.COMPLETED, HandoffState.REJECTED, HandoffState.ABORTED
TTL_S = 10


@pytest.fixture
def world():
    """Give a world with four segments."""
    return World()


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
    client = world.attach(engine=OTHER_ENGINE)
    client.open()
    return client


@pytest.fixture
def claimed(owner, claimer, spaces, layouts):
    """Give the number of a handoff that is claimed, to be read out of the owner's memory."""
    handoff_id = owner.offer(spaces, [1, 2], layouts=layouts).handoff_id
    assert claimer.claim(handoff_id, spaces).decision.choice is HandoffChoice.DIRECT
    return handoff_id


def snapshot(world) -> tuple:
    """Return everything that a refused event must leave as it is."""
    books = world.books
    return (
        {h.handoff_id: (h.deadline_ns, h.claimer, h.decision, h.staged) for h in books.handoffs.values()},
        dict(books.handoff_requests),
        {hold.handoff_id: set(hold.waiting) for hold in books.holds.values()},
        list(books.ended_handoffs),
        [(set(s.offered), set(s.claimed), dict(s.notices), set(s.leases)) for s in books.sessions.values()],
        (sorted(books.leases), sorted(books.quarantines), sorted(books.layouts)),
        [p.pins.tolist() for t in books.tenants.values() for p in t.pools.values()],
        sorted(books.deadlines),
    )


def pins(world) -> int:
    """Count what holds the tenant's small slots."""
    return int(world.pool().pins.sum())


# ---- offers and claims


def test_a_claim_gets_what_was_offered(owner, claimer, spaces, layouts):
    """Keys, places and checksums, in the order of the offer, and the life of the engine that has them."""
    offered = owner.offer(spaces, [5, 3], layouts=layouts, blocks=[9, 2], checksums=[70, 71])
    claim = claimer.claim(offered.handoff_id, spaces)
    assert (claim.keys, claim.blocks.tolist(), claim.checksums.tolist()) == (keys([5, 3]), [9, 2], [70, 71])
    assert [layout.layout_id for layout in claim.layouts] == list(layouts)
    assert (claim.engine_incarnation, claim.lease) == (ENGINE, None)
    assert claim.decision.reason == "direct: the only way that both sides have"


def test_a_claim_succeeds_once(world, claimed, claimer, spaces):
    """Neither another engine gets it, nor another process of the same engine, nor the owner."""
    others = [world.attach(engine=engine) for engine in (OTHER_ENGINE, b"engine three....", ENGINE)]
    for other in others:
        other.open()
        before = snapshot(world)
        with pytest.raises(HandoffClaimedError, match=str(claimed)):
            other.claim(claimed, spaces)
        assert snapshot(world) == before
    assert claimer.complete(claimed) == DONE


def test_the_claimer_gets_the_same_answer_again(world, owner, claimer, spaces, layouts):
    """Its first answer may be lost; asking again neither renews nor chooses anew."""
    handoff_id = owner.offer(spaces, [1], layouts=layouts).handoff_id
    first = claimer.claim(handoff_id, spaces, transports=("ucx", "tcp"))
    world.advance(3)
    before = snapshot(world)
    again = claimer.claim(handoff_id, spaces, transports=("carrier pigeon",))
    assert (again.decision, again.layouts, again.keys) == (first.decision, first.layouts, first.keys)
    assert again.remaining_ns == first.remaining_ns - 3 * SECOND_NS
    assert snapshot(world) == before


def test_a_staged_claim_gets_the_same_lease_again(world, owner, claimer, spaces):
    """Not another one: the slots are pinned once."""
    owner.put(spaces, [1, 2])
    handoff_id = owner.offer(spaces, [1, 2]).handoff_id
    first = claimer.claim(handoff_id, spaces)
    again = claimer.claim(handoff_id, spaces)
    assert again.lease.lease_id == first.lease.lease_id
    assert again.lease.slots.granules.tolist() == first.lease.slots.granules.tolist()
    assert pins(world) == 2


def test_an_engine_may_claim_its_own_offer(world, owner, spaces, layouts):
    """Prefill and decode may be two processes of one engine; its word then is both sides'."""
    handoff_id = owner.offer(spaces, [1], layouts=layouts).handoff_id
    peer = world.attach()
    peer.open()
    peer.claim(handoff_id, spaces)
    assert owner.abort_handoff(handoff_id) == DONE
    (notice,) = owner.beat().notices
    assert (notice.state, notice.is_released) == (ABORTED, True)


def test_the_same_request_finds_the_same_handoff(world, owner, claimer, spaces, layouts):
    """By any process of the engine, claimed or not, and even while the daemon stops."""
    request = world.fresh()
    offered = owner.offer(spaces, [1], layouts=layouts, request_id=request)
    peer = world.attach()
    peer.open()
    world.advance(2)
    again = peer.offer(spaces, [1], layouts=layouts, request_id=request)
    assert again.handoff_id == offered.handoff_id
    assert again.remaining_ns == offered.remaining_ns - 2 * SECOND_NS
    assert again.hold_ns == offered.hold_ns - 2 * SECOND_NS
    claimer.claim(offered.handoff_id, spaces)
    world.handle(Drain())
    assert owner.offer(spaces, [1], layouts=layouts, request_id=request).remaining_ns == TTL_S * SECOND_NS


def test_a_request_id_is_of_one_engine(world, owner, spaces, layouts):
    """Two engines that draw the same have two handoffs."""
    request = world.fresh()
    other = world.attach(engine=OTHER_ENGINE)
    other.open()
    others_layouts = other.register_pools().layout_ids
    first = owner.offer(spaces, [1], layouts=layouts, request_id=request)
    second = other.offer(spaces, [1], layouts=others_layouts, request_id=request)
    assert first.handoff_id != second.handoff_id


def test_a_request_id_is_not_used_for_something_else(world, owner, spaces, layouts):
    """Whoever takes the answer for that of its own offer would let others read the wrong blocks."""
    owner.put(spaces, [1, 2])
    request = world.fresh()
    offered = owner.offer(spaces, [1, 2], layouts=layouts, checksums=[7, 8], request_id=request)
    other_layouts = owner.register_pools().layout_ids
    same = {"numbers": [1, 2], "layouts": layouts, "checksums": [7, 8]}
    changes = [
        {"numbers": [2, 1]},
        {"numbers": [1]},
        {"layouts": other_layouts},
        {"layouts": ()},
        {"blocks": [0, 2]},
        {"checksums": [7, 9]},
        {"checksums": ()},
        {"policy": HandoffPolicy.DIRECT},
    ]
    before = snapshot(world)
    for change in changes:
        with pytest.raises(RequestIdReusedError, match=request.hex()):
            owner.offer(spaces, request_id=request, **(same | change))
    assert snapshot(world) == before
    again = owner.offer(spaces, request_id=request, **same)
    assert again.handoff_id == offered.handoff_id


def test_a_request_id_is_free_after_the_end(world, owner, spaces, layouts):
    """The handoff that it named is no more; a retry that late offers anew."""
    request = world.fresh()
    first = owner.offer(spaces, [1], layouts=layouts, request_id=request)
    owner.abort_handoff(first.handoff_id)
    assert owner.offer(spaces, [2], layouts=layouts, request_id=request).handoff_id != first.handoff_id


def test_the_claimers_spaces_must_be_those_offered(world, owner, claimer, layouts):
    """Another salt, another shape, another order: it could not read the bytes, or would misread them."""
    pair = owner.open(SMALL_BYTES, LARGE_BYTES)
    both = owner.register_pools(SMALL_BYTES, LARGE_BYTES).layout_ids
    handoff_id = owner.offer(pair, [1], layouts=both).handoff_id
    assert claimer.open(SMALL_BYTES, LARGE_BYTES) == pair
    for mine in (pair[:1], pair[::-1], claimer.open(SMALL_BYTES, LARGE_BYTES, salt=b"salt")):
        before = snapshot(world)
        with pytest.raises(RepresentationMismatchError, match="must be equal, in the same order"):
            claimer.claim(handoff_id, mine)
        assert snapshot(world) == before
    with pytest.raises(SpaceNotOpenError):
        claimer.claim(handoff_id, (999,))
    claimer.claim(handoff_id, pair)
    with pytest.raises(RepresentationMismatchError):
        claimer.claim(handoff_id, pair[::-1])


def test_blocks_of_several_parts_are_offered_key_by_key(owner, claimer):
    """Each part has a layout of its own, which must have the block."""
    pair = owner.open(SMALL_BYTES, LARGE_BYTES)
    both = owner.register_pools(SMALL_BYTES, LARGE_BYTES, blocks_count=4).layout_ids
    with pytest.raises(InvalidFieldError, match=f"block 4 of layout {both[1]}, which has 4"):
        owner.offer(pair, [1, 2], layouts=both, blocks=[3, 0, 0, 4])
    offered = owner.offer(pair, [1, 2], layouts=both, blocks=[3, 0, 0, 3])
    claimer.open(SMALL_BYTES, LARGE_BYTES)
    assert len(claimer.claim(offered.handoff_id, pair).layouts) == 2


def test_without_a_way_nothing_is_claimed(world, owner, claimer, spaces, layouts):
    """The offer waits for somebody who has a transport."""
    handoff_id = owner.offer(spaces, [1], layouts=layouts).handoff_id
    before = snapshot(world)
    with pytest.raises(NoWayError):
        claimer.claim(handoff_id, spaces, transports=())
    assert snapshot(world) == before
    assert claimer.claim(handoff_id, spaces).layouts


def test_a_stopping_daemon_lets_handoffs_end(world, owner, claimer, spaces, layouts):
    """No new offers; what is offered can still be claimed and completed."""
    handoff_id = owner.offer(spaces, [1], layouts=layouts).handoff_id
    world.handle(Drain())
    with pytest.raises(DrainingError) as refused:
        owner.offer(spaces, [2], layouts=layouts)
    assert refused.value.retry_after_ms
    claimer.claim(handoff_id, spaces)
    assert claimer.complete(handoff_id) == DONE


# ---- what is refused


@pytest.mark.parametrize(
    ("changes", "error", "named"),
    [
        ({"request_id": b"short"}, InvalidFieldError, "request_id has 5 bytes"),
        ({"numbers": b""}, BatchSizeError, "keys has 0 items"),
        ({"numbers": bytes(33)}, InvalidFieldError, "keys has 33 bytes"),
        ({"numbers": [1, 2, 1]}, DuplicateKeyError, "keys names 1 keys twice"),
        ({"numbers": range(9)}, BatchSizeError, "keys has 9 items"),
        ({"spaces": ()}, InvalidFieldError, "space_ids has 0 entries"),
        ({"spaces": (999,)}, SpaceNotOpenError, "space_ids names 999"),
        ({"ttl_s": -1}, InvalidFieldError, "ttl is -1000000000 ns"),
        ({"blocks": [0]}, InvalidFieldError, "blocks has 1 entries; 2 keys in 1 spaces take 2"),
        ({"blocks": [0, 16]}, InvalidFieldError, "blocks names block 16 of layout"),
        ({"checksums": [1]}, InvalidFieldError, "checksums has 1 entries; 2 keys in 1 spaces take 2"),
        ({"layouts": (999,)}, SegmentUnknownError, "layout_ids names 999"),
        ({"layouts": (999, 999)}, InvalidFieldError, "layout_ids has 2 entries for 1 spaces"),
        ({"layouts": (), "blocks": [0, 1]}, InvalidFieldError, "blocks has 2 entries; .* take 0"),
        ({"layouts": ()}, NoWayError, "neither in memory"),
        ({"layouts": (), "policy": HandoffPolicy.DIRECT}, NoWayError, "not in an engine's memory"),
        ({"policy": HandoffPolicy.STAGED}, NoWayError, "not in the arena"),
    ],
)
def test_a_bad_offer_says_what_is_wrong_and_leaves_nothing(changes, error, named):
    """The message names the field; nothing is recorded, pinned or due."""
    world = World(max_batch_keys=8)
    owner = world.attach()
    fields = {"spaces": owner.open(), "numbers": [1, 2], "layouts": owner.register_pools().layout_ids}
    owner.put(fields["spaces"], [1])
    before = snapshot(world)
    with pytest.raises(error, match=named):
        owner.offer(**(fields | changes))
    assert snapshot(world) == before
    assert owner.offer(**fields).handoff_id


def test_a_layout_is_of_blocks_as_long_as_the_spaces(world, owner, spaces):
    """Else the bytes would be those of a part of the block, or of more than it."""
    larger = owner.register_pools(LARGE_BYTES).layout_ids
    with pytest.raises(BlockSizeError, match=f"has {LARGE_BYTES} bytes, one of space .* has {SMALL_BYTES}"):
        owner.offer(spaces, [1], layouts=larger)
    assert world.books.handoffs == {}


def test_segments_without_a_common_transport_are_no_way(owner):
    """Half a block is none: what leads to one part only leads nowhere."""
    pair = owner.open(SMALL_BYTES, LARGE_BYTES)
    small = owner.register_pools(SMALL_BYTES, transports=("ucx",)).layout_ids
    large = owner.register_pools(LARGE_BYTES, transports=("tcp",)).layout_ids
    with pytest.raises(NoWayError):
        owner.offer(pair, [1], layouts=(*small, *large))


def test_a_session_has_so_many_handoffs_on_offer():
    """Full is an error with a hint; an end makes room, and another session has its own."""
    world = World(max_handoffs=2)
    owner = world.attach()
    spaces, layouts = owner.open(), owner.register_pools().layout_ids
    first = owner.offer(spaces, [1], layouts=layouts)
    owner.offer(spaces, [2], layouts=layouts)
    with pytest.raises(LimitReachedError, match=r"2 handoffs on offer.*max_handoffs") as refused:
        owner.offer(spaces, [3], layouts=layouts)
    assert refused.value.retry_after_ms
    peer = world.attach()
    peer.open()
    peer.offer(spaces, [3], layouts=layouts)
    owner.abort_handoff(first.handoff_id)
    assert owner.offer(spaces, [3], layouts=layouts).handoff_id


def test_a_claimer_without_room_for_a_lease_leaves_the_handoff_to_others():
    """The claim is refused as a whole, and the blocks stay pinned for the next."""
    world = World(max_leases=1)
    owner, claimer = world.attach(), world.attach(engine=OTHER_ENGINE)
    spaces = owner.open()
    claimer.open()
    owner.put(spaces, [1, 2])
    claimer.acquire(spaces, [2])
    handoff_id = owner.offer(spaces, [1]).handoff_id
    before = snapshot(world)
    with pytest.raises(LimitReachedError):
        claimer.claim(handoff_id, spaces)
    assert snapshot(world) == before
    assert world.attach().open() == spaces
    assert owner.claim(handoff_id, spaces).lease is not None


def test_tenants_never_see_each_others_handoffs(world, claimed, owner):
    """Not while they live, not after their end, by no verb; nor does asking change anything."""
    stranger = world.attach("bolt", engine=OTHER_ENGINE)
    theirs = stranger.open()
    for _ in range(2):
        before = snapshot(world)
        with pytest.raises(HandoffUnknownError):
            stranger.claim(claimed, theirs)
        with pytest.raises(HandoffUnknownError):
            stranger.look(claimed)
        for how in (COMPLETED, REJECTED, ABORTED):
            assert stranger.end_handoff(claimed, how) == UNKNOWN
        beat = stranger.beat(handoffs=[claimed], acknowledged=[claimed], noticed=[claimed])
        assert (beat.handoff_outcomes.tolist(), beat.notices) == ([UNKNOWN], ())
        assert snapshot(world) == before
        owner.abort_handoff(claimed)


def test_what_was_never_offered_is_unknown(world, claimed, claimer, spaces):
    """By every verb; a late word about it is counted and changes nothing."""
    unknown = claimed + 1000
    with pytest.raises(HandoffUnknownError):
        claimer.claim(unknown, spaces)
    with pytest.raises(HandoffUnknownError):
        claimer.look(unknown)
    late_count = world.books.late_ends_count
    assert claimer.complete(unknown) == UNKNOWN
    assert world.books.late_ends_count == late_count + 1
    assert claimer.beat(handoffs=[unknown]).handoff_outcomes.tolist() == [UNKNOWN]


def test_an_id_of_another_life_is_stale(claimed):
    """The daemon that gave it is gone, and with it all that it knew."""
    other = World(life=8).attach()
    spaces = other.open()
    verbs = [
        lambda: other.claim(claimed, spaces),
        lambda: other.look(claimed),
        lambda: other.complete(claimed),
        lambda: other.reject(claimed),
        lambda: other.abort_handoff(claimed),
    ]
    for verb in verbs:
        with pytest.raises(StaleIncarnationError, match="handoff"):
            verb()
    assert other.beat(handoffs=[claimed]).handoff_outcomes.tolist() == [UNKNOWN]


def test_a_reason_is_short(world, claimed, claimer):
    """It is for the log of the other side, not a letter."""
    before = snapshot(world)
    with pytest.raises(InvalidFieldError, match="reason has 257 characters"):
        claimer.reject(claimed, "x" * (REASON_CHARACTERS_LIMIT + 1))
    assert snapshot(world) == before
    assert claimer.reject(claimed, "x" * REASON_CHARACTERS_LIMIT) == DONE


def test_a_beat_names_so_many_handoffs():
    """As many as any batch, and what is refused renews nothing."""
    world = World(max_batch_keys=4)
    client = world.attach()
    for name in ("handoffs", "noticed"):
        with pytest.raises(BatchSizeError, match="handoff_ids has 5 items"):
            client.beat(**{name: range(5)})


def test_the_dead_hand_nothing_over(world, owner, spaces, layouts):
    """A token without a session has no verbs."""
    handoff_id = owner.offer(spaces, [1], layouts=layouts).handoff_id
    owner.leave()
    verbs = [
        lambda: owner.offer(spaces, [1], layouts=layouts),
        lambda: owner.claim(handoff_id, spaces),
        lambda: owner.complete(handoff_id),
        lambda: owner.look(handoff_id),
    ]
    for verb in verbs:
        with pytest.raises(SessionUnknownError):
            verb()
    assert world.books.handoffs == {}
