"""Where slots come from: free ones, fresh segments, old blocks, segments of other pools; quotas."""

import pytest

from kvservice.core.effects import LendSegment
from kvservice.core.errors import ArenaFullError, QuotaExceededError
from kvservice.core.limits import RETRY_AFTER_MS, Limits
from kvservice.core.outcomes import ItemOutcome
from kvservice.core.slot_pool import SlotState
from tests.core_world import LARGE_BYTES, SEGMENT_BYTES, SMALL_BYTES, World

HIT, MISS = ItemOutcome.HIT, ItemOutcome.MISS
SMALL_PER_SEGMENT = SEGMENT_BYTES // SMALL_BYTES


def test_nothing_is_evicted_while_there_is_an_unused_segment():
    """Each segment is lent once before a block has to go."""
    world = World()
    client = world.attach()
    spaces = client.open()
    client.put(spaces, range(SMALL_PER_SEGMENT * 4))
    assert world.books.evicted_count == 0
    assert sorted(loan.segment for loan in world.lent()) == [0, 1, 2, 3]
    client.put(spaces, [1000])
    assert world.books.evicted_count > 0


def test_a_segment_is_lent_ahead_of_its_need():
    """Making a segment ready takes a while, so a pool gets an unused one early; others may still have it."""
    world = World(segments_count=2)
    acme, bolt = world.attach("acme"), world.attach("bolt")
    acme.put(acme.open(), [0])
    assert {loan.tenant for loan in world.lent()} == {"acme"}
    assert len(world.lent()) == 2
    bolt.put(bolt.open(), range(SMALL_PER_SEGMENT))
    assert world.books.evicted_count == 0
    assert world.lent()[-1].tenant == "bolt"


def test_a_segment_is_lent_before_an_answer_names_it():
    """The loan comes with the answer or before it, so the world can make the segment ready first."""
    world = World()
    client = world.attach()
    spaces = client.open(SMALL_BYTES, LARGE_BYTES)
    for first in (0, 4):
        answer = client.reserve(spaces, range(first, first + 4))
        lent = {loan.segment for loan in world.effects if isinstance(loan, LendSegment)}
        assert set(answer.slots.segments.tolist()) <= lent


def test_a_batch_larger_than_the_arena_is_refused_with_a_hint():
    """It says what is asked for, what there is, and when to come back."""
    world = World(segments_count=2)
    client = world.attach()
    spaces = client.open(LARGE_BYTES - 512)
    with pytest.raises(ArenaFullError, match=r"11 slots of 11776 .* an arena of 131072") as caught:
        client.reserve(spaces, range(11))
    assert caught.value.retry_after_ms == RETRY_AFTER_MS
    client.put(spaces, range(10))


def test_a_full_arena_is_a_refusal_that_evicts_nothing():
    """What is leased or reserved is nobody's to take, and a failed call costs nobody a block."""
    world = World(segments_count=2)
    client, other = world.attach(), world.attach("bolt")
    spaces, others = client.open(), other.open()
    client.put(spaces, range(12))
    client.acquire(spaces, range(10))
    other.reserve(others, range(SMALL_PER_SEGMENT))
    facts = len(world.facts())
    with pytest.raises(ArenaFullError):
        client.reserve(spaces, range(100, 107))
    assert len(world.facts()) == facts
    assert client.outcomes(spaces, range(12)) == [HIT] * 12
    client.put(spaces, range(100, 106))
    assert client.outcomes(spaces, range(12)) == [HIT] * 10 + [MISS] * 2


def test_a_refused_reserve_can_be_tried_again():
    """It left nothing behind: neither pending keys nor a remembered request id."""
    world = World(segments_count=1)
    client, other = world.attach(), world.attach("bolt")
    spaces = client.open()
    hindrance = other.reserve(other.open(), range(SMALL_PER_SEGMENT))
    request_id = world.fresh()
    with pytest.raises(ArenaFullError):
        client.reserve(spaces, [1], request_id=request_id)
    assert client.outcomes(spaces, [1]) == [MISS]
    other.abort(hindrance.reservation_id)
    assert client.reserve(spaces, [1], request_id=request_id).reservation_id


def test_a_second_part_without_room_refuses_the_whole_batch():
    """All or nothing: the slots of the first part go back, and no key is pending."""
    world = World(segments_count=2)
    client, other = world.attach(), world.attach("bolt")
    spaces = client.open(SMALL_BYTES, LARGE_BYTES)
    other.reserve(other.open(), range(SMALL_PER_SEGMENT))
    with pytest.raises(ArenaFullError):
        client.reserve(spaces, range(3))
    assert client.outcomes(spaces, range(3)) == [MISS] * 3
    assert world.states_count(SlotState.RESERVED) == 0


def test_an_idle_segment_moves_to_the_pool_that_needs_it():
    """A size that was busy yesterday does not hold its memory for ever."""
    world = World(segments_count=1)
    client = world.attach()
    small, large = client.open(SMALL_BYTES), client.open(LARGE_BYTES)
    before = client.put(small, range(4))
    after = client.put(large, range(2))
    assert client.outcomes(small, range(4)) == [MISS] * 4
    assert client.outcomes(large, range(2)) == [HIT] * 2
    assert world.lent()[1:] == [LendSegment(0, "acme", is_fresh=False)]
    assert world.is_moved(before.slots)
    assert (after.slots.generations > 0).all()


def test_every_generation_moves_when_a_segment_moves():
    """The slots of the next pool begin elsewhere: a reader finds its own granule moved, wherever it is."""
    world = World(segments_count=1)
    client = world.attach()
    client.put(client.open(SMALL_BYTES), range(4))
    before = world.memory.pages[0].copy()
    client.put(client.open(LARGE_BYTES), range(2))
    assert (world.memory.pages[0] > before).all()


def test_a_segment_that_changes_its_tenant_is_another_one():
    """Whoever mapped the old memory may read it for ever, so neither it nor its number serve anybody else."""
    world = World(segments_count=1)
    acme, bolt = world.attach("acme"), world.attach("bolt")
    before = acme.put(acme.open(SMALL_BYTES), [1])
    acme.put(acme.open(LARGE_BYTES), [1])
    bolt.put(bolt.open(), [1])
    acme.put(acme.open(), [2])
    assert world.effects.count(LendSegment(0, "acme", is_fresh=False)) == 2
    assert world.lent()[2:] == [
        LendSegment(1, "bolt", is_fresh=True),
        LendSegment(2, "acme", is_fresh=True),
    ]
    assert world.memory.gone == {0, 1}
    assert world.is_moved(before.slots)


def test_without_memory_for_a_fresh_segment_the_call_fails():
    """The segment stays unused, and serves the first tenant for whom the machine has memory again."""
    world = World(segments_count=1)
    acme, bolt = world.attach("acme"), world.attach("bolt")
    acme.put(acme.open(), [1])
    spaces = bolt.open()
    world.memory.is_exhausted = True
    for _ in range(2):
        with pytest.raises(ArenaFullError):
            bolt.reserve(spaces, [1])
    world.memory.is_exhausted = False
    bolt.put(spaces, [1])
    assert bolt.outcomes(spaces, [1]) == [HIT]


def test_a_segment_with_a_held_slot_stays():
    """A lease, a reservation or a quarantine in it keeps the whole segment where it is."""
    world = World(segments_count=1)
    client, other = world.attach(), world.attach("bolt")
    spaces = client.open()
    client.put(spaces, range(4))
    lease = client.acquire(spaces, [0])
    others = other.open()
    with pytest.raises(ArenaFullError):
        other.reserve(others, [0])
    client.release(lease.lease_id)
    assert other.reserve(others, [0]).reservation_id


def test_a_pool_gives_its_own_blocks_before_a_segment_that_was_used_later():
    """Between sizes the age of the use decides, as it does between blocks."""
    world = World(segments_count=2)
    client = world.attach()
    small, large = client.open(SMALL_BYTES), client.open(LARGE_BYTES)
    client.put(small, range(SMALL_PER_SEGMENT))
    client.put(large, range(5))
    client.put(small, [100])
    assert client.outcomes(small, [0, SMALL_PER_SEGMENT - 1]) == [HIT, MISS]
    assert client.outcomes(large, range(5)) == [HIT] * 5
    client.acquire(small, range(SMALL_PER_SEGMENT - 1))
    client.put(small, [200, 201])
    assert client.outcomes(large, range(5)) == [MISS] * 5


def test_the_idlest_segment_of_others_goes_first():
    """Of several segments that could move, the one whose newest use is oldest moves."""
    world = World(segments_count=3)
    acme, bolt = world.attach("acme"), world.attach("bolt")
    one, two, mine = acme.open(SMALL_BYTES), acme.open(LARGE_BYTES), bolt.open()
    acme.put(one, range(4))
    acme.put(two, range(4))
    bolt.put(mine, range(SMALL_PER_SEGMENT))
    acme.lookup(one, range(4), ttl_s=1)
    world.advance(2)
    acme.beat(acknowledged=acme.beat().revoked_ids.tolist())
    bolt.acquire(mine, range(SMALL_PER_SEGMENT))
    bolt.put(mine, [100])
    assert acme.outcomes(one, range(4)) == [HIT] * 4
    assert acme.outcomes(two, range(4)) == [MISS] * 4


def test_a_tenant_at_its_quota_evicts_its_own_blocks():
    """A quota bounds what a tenant holds, and never costs another tenant a block."""
    world = World(quotas_bytes=(("acme", 8 * SMALL_BYTES),))
    acme, bolt = world.attach("acme"), world.attach("bolt")
    mine, theirs = acme.open(), bolt.open()
    bolt.put(theirs, range(8))
    acme.put(mine, range(8))
    acme.put(mine, range(100, 103))
    assert acme.outcomes(mine, range(8)) == [HIT] * 5 + [MISS] * 3
    assert bolt.outcomes(theirs, range(8)) == [HIT] * 8
    assert world.books.tenant("acme").charged_bytes() == 8 * SMALL_BYTES


def test_a_quota_counts_every_size():
    """Blocks of another size are given up when those of the asked one do not suffice."""
    world = World(quotas_bytes=(("acme", 8 * SMALL_BYTES),))
    client = world.attach()
    small, large = client.open(SMALL_BYTES), client.open(LARGE_BYTES)
    client.put(small, range(6))
    client.put(large, range(2))
    assert client.outcomes(small, range(6)) == [HIT] * 2 + [MISS] * 4
    assert client.outcomes(large, range(2)) == [HIT] * 2


def test_a_quota_used_up_by_held_blocks_is_a_refusal_that_evicts_nothing():
    """Leases and reservations cannot be evicted; the free memory of the arena does not help."""
    world = World(quotas_bytes=(("acme", 8 * SMALL_BYTES),))
    client = world.attach()
    spaces = client.open()
    client.put(spaces, range(8))
    client.acquire(spaces, range(6))
    facts = len(world.facts())
    with pytest.raises(QuotaExceededError, match="its quota is 32768 bytes") as caught:
        client.reserve(spaces, range(100, 103))
    assert caught.value.retry_after_ms == RETRY_AFTER_MS
    assert len(world.facts()) == facts
    assert client.put(spaces, range(100, 102)).reservation_id


def test_a_refusal_for_want_of_memory_takes_nothing_for_the_quota():
    """Quota and memory are both looked at before a block is given up for either."""
    world = World(segments_count=2, quotas_bytes=(("acme", 10 * SMALL_BYTES),))
    acme, bolt = world.attach("acme"), world.attach("bolt")
    small, large = acme.open(SMALL_BYTES), acme.open(LARGE_BYTES)
    acme.put(small, range(9))
    acme.acquire(small, [0])
    bolt.reserve(bolt.open(), range(SMALL_PER_SEGMENT))
    with pytest.raises(ArenaFullError):
        acme.reserve(large, [0])
    assert acme.outcomes(small, range(9)) == [HIT] * 9


def test_a_tenant_without_a_quota_may_use_the_arena():
    """The limits say what a tenant may hold, in bytes."""
    limits = Limits(segment_bytes=SEGMENT_BYTES, segments_count=3, quotas_bytes=(("acme", 5),))
    assert limits.arena_bytes == 3 * SEGMENT_BYTES
    assert limits.quota_of("acme") == 5
    assert limits.quota_of("bolt") == limits.arena_bytes
