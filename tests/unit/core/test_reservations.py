"""Reserve, commit, abort, expire: one writer for each block, and nothing visible before its commit."""

import numpy as np
import pytest

from kvservice.core.errors import (
    BatchSizeError,
    ChecksumMismatchError,
    DrainingError,
    DuplicateKeyError,
    InvalidFieldError,
    LimitReachedError,
    NotOwnerError,
    RequestIdReusedError,
    ReservationAbortedError,
    ReservationExpiredError,
    ReservationUnknownError,
    SessionUnknownError,
    SpaceNotOpenError,
    StaleIncarnationError,
)
from kvservice.core.events import Drain
from kvservice.core.limits import ENDED_LIMIT, RETRY_AFTER_MS
from kvservice.core.outcomes import ItemOutcome
from kvservice.core.slot_pool import SlotState
from tests.core_world import LARGE_BYTES, OTHER_ENGINE, SECOND_NS, SMALL_BYTES, World, key, places_of

HIT, MISS, PENDING = ItemOutcome.HIT, ItemOutcome.MISS, ItemOutcome.PENDING
GRANTED, ALREADY_COMMITTED = ItemOutcome.GRANTED, ItemOutcome.ALREADY_COMMITTED


@pytest.fixture
def world():
    """Give a world with four segments."""
    return World()


@pytest.fixture
def client(world):
    """Give a local process of an engine."""
    return world.attach()


@pytest.fixture
def peer(world, client):
    """Give another process of the same engine."""
    return world.attach()


@pytest.fixture
def stranger(world):
    """Give a process of another engine of the same tenant."""
    return world.attach(engine=OTHER_ENGINE)


@pytest.fixture
def spaces(client, peer, stranger):
    """Give the one space that all three have open."""
    opened = {each.open() for each in (client, peer, stranger)}
    assert len(opened) == 1
    return opened.pop()


@pytest.fixture
def two_parts(client):
    """Give the two spaces of a block of two parts."""
    return client.open(SMALL_BYTES, LARGE_BYTES)


def test_a_block_is_visible_only_after_its_commit(client, spaces):
    """Until then it is pending, for the writer too."""
    reservation = client.reserve(spaces, range(3))
    assert reservation.outcomes.tolist() == [GRANTED] * 3
    assert reservation.remaining_ns == 10 * SECOND_NS
    assert client.outcomes(spaces, range(4)) == [PENDING] * 3 + [MISS]
    done = client.commit(reservation)
    assert (done.outcome, done.keys_count) == (ItemOutcome.DONE, 3)
    assert client.outcomes(spaces, range(4)) == [HIT] * 3 + [MISS]


def test_slots_come_with_their_generations(world, client, spaces):
    """A writer proves by them that a slot is still its own."""
    slots = client.reserve(spaces, range(3)).slots
    assert len(set(places_of(slots))) == 3
    assert slots.checksums is None
    assert not world.is_moved(slots)


def test_the_second_writer_of_a_key_waits_for_the_first(client, stranger, spaces):
    """Two writers never share a block; after an abort the second can have it."""
    first = client.reserve(spaces, [1])
    second = stranger.reserve(spaces, [1, 2])
    assert second.outcomes.tolist() == [PENDING, GRANTED]
    assert len(second.slots) == 1
    client.abort(first.reservation_id)
    assert stranger.reserve(spaces, [1]).outcomes.tolist() == [GRANTED]


def test_what_is_committed_need_not_be_written(client, spaces):
    """A batch without a granted key is answered without a reservation."""
    client.put(spaces, [1, 2])
    answer = client.reserve(spaces, [1, 2])
    assert answer.outcomes.tolist() == [ALREADY_COMMITTED] * 2
    assert (answer.reservation_id, len(answer.slots), answer.remaining_ns) == (0, 0, 0)
    assert client.reserve(spaces, [2, 3]).outcomes.tolist() == [ALREADY_COMMITTED, GRANTED]


def test_a_request_id_finds_its_reservation_again(world, client, peer, spaces):
    """A retry after a lost answer gets the same slots, from any process of the engine."""
    request_id = world.fresh()
    first = client.reserve(spaces, range(3), request_id=request_id)
    world.advance(4)
    again = peer.reserve(spaces, range(3), request_id=request_id)
    assert again.reservation_id == first.reservation_id
    assert again.outcomes.tolist() == first.outcomes.tolist()
    assert again.slots.granules.tolist() == first.slots.granules.tolist()
    assert again.remaining_ns == 6 * SECOND_NS
    assert world.states_count(SlotState.RESERVED) == 3


def test_a_request_id_stands_for_one_request(world, client, two_parts):
    """Other keys, other spaces or another order under the same id are a bug of the caller."""
    request_id = world.fresh()
    client.reserve(two_parts, [1, 2], request_id=request_id)
    for spaces, numbers in ((two_parts, [1, 3]), (two_parts[:1], [1, 2]), (two_parts[::-1], [1, 2])):
        with pytest.raises(RequestIdReusedError):
            client.reserve(spaces, numbers, request_id=request_id)
    assert client.reserve(two_parts, [1, 2], request_id=request_id).reservation_id


def test_request_ids_of_two_engines_do_not_meet(world, client, stranger, spaces):
    """Each engine draws its own."""
    request_id = world.fresh()
    first = client.reserve(spaces, [1], request_id=request_id)
    second = stranger.reserve(spaces, [2], request_id=request_id)
    assert first.reservation_id != second.reservation_id


def test_a_request_id_is_free_again_after_the_end(world, client, spaces):
    """The same request after an abort is a fresh reservation, after a commit it finds the blocks."""
    request_id = world.fresh()
    first = client.reserve(spaces, [1], request_id=request_id)
    client.abort(first.reservation_id)
    second = client.reserve(spaces, [1], request_id=request_id)
    assert second.reservation_id != first.reservation_id
    client.commit(second)
    assert client.reserve(spaces, [1], request_id=request_id).outcomes.tolist() == [ALREADY_COMMITTED]


@pytest.mark.parametrize("length", [0, 15, 17])
def test_a_request_id_has_16_bytes(client, spaces, length):
    """Fewer random bytes would meet by chance."""
    with pytest.raises(InvalidFieldError, match=f"request_id has {length} bytes"):
        client.reserve(spaces, [1], request_id=bytes(length))


def test_a_key_stands_once_in_a_batch(client, spaces):
    """Two slots for one key would lose one of them; the message says where."""
    with pytest.raises(DuplicateKeyError, match=r"keys\[3\] is the same as keys\[1\]"):
        client.reserve(spaces, [5, 6, 7, 6])
    assert client.outcomes(spaces, [5]) == [MISS]


def test_a_batch_has_at_least_one_key_and_at_most_the_limit():
    """A batch is bounded, and the message says how."""
    client = World(max_batch_keys=4).attach()
    spaces = client.open()
    client.put(spaces, range(4))
    for numbers in ([], range(5)):
        with pytest.raises(BatchSizeError, match="1 to 4 are allowed"):
            client.reserve(spaces, numbers)


def test_keys_are_packed_by_32_bytes(client, spaces):
    """A torn key is no key."""
    with pytest.raises(InvalidFieldError, match="keys has 33 bytes"):
        client.reserve(spaces, key(1) + b"x")


def test_spaces_of_a_batch_are_open_and_named_once(client, spaces):
    """A part named twice would be written twice; an unknown one belongs to somebody else."""
    with pytest.raises(InvalidFieldError, match="names a space twice"):
        client.reserve(spaces * 2, [1])
    with pytest.raises(InvalidFieldError, match="space_ids has 0 entries"):
        client.reserve((), [1])
    with pytest.raises(InvalidFieldError, match="space_ids has 257 entries"):
        client.reserve(range(1, 258), [1])
    with pytest.raises(SpaceNotOpenError, match="99"):
        client.reserve((99,), [1])


def test_a_life_is_bounded(world, client, spaces):
    """Zero asks for the default, more than the longest gets the longest, and negative is refused."""
    assert client.reserve(spaces, [1], ttl_s=2).remaining_ns == 2 * SECOND_NS
    assert client.reserve(spaces, [2], ttl_s=1000).remaining_ns == world.limits.max_ttl_ns
    with pytest.raises(InvalidFieldError, match="ttl is -1000000000 ns"):
        client.reserve(spaces, [3], ttl_s=-1)


def test_a_session_holds_a_bounded_number_of_reservations():
    """A client that leaks them is told, and can go on after an end."""
    client = World(max_reservations=2).attach()
    spaces = client.open()
    first = client.reserve(spaces, [1])
    client.reserve(spaces, [2])
    with pytest.raises(LimitReachedError) as caught:
        client.reserve(spaces, [3])
    assert caught.value.retry_after_ms == RETRY_AFTER_MS
    client.abort(first.reservation_id)
    assert client.reserve(spaces, [3]).reservation_id


def test_a_draining_daemon_takes_no_new_writes(world, client, spaces):
    """What is open may still be found again and committed."""
    request_id = world.fresh()
    reservation = client.reserve(spaces, [1], request_id=request_id)
    world.handle(Drain())
    with pytest.raises(DrainingError) as caught:
        client.reserve(spaces, [2])
    assert caught.value.retry_after_ms
    again = client.reserve(spaces, [1], request_id=request_id)
    assert again.reservation_id == reservation.reservation_id
    client.commit(reservation)
    assert client.lookup(spaces, [1], ttl_s=0).lease is not None


def test_any_process_of_the_engine_may_commit(client, peer, spaces):
    """A scheduler reserves, a worker writes and commits."""
    peer.commit(client.reserve(spaces, [1]))
    assert client.outcomes(spaces, [1]) == [HIT]


def test_a_stranger_may_not_end_a_reservation(client, stranger, spaces):
    """Only the engine that reserved knows whether the bytes are there."""
    reservation = client.reserve(spaces, [1])
    with pytest.raises(NotOwnerError):
        stranger.commit(reservation)
    with pytest.raises(NotOwnerError):
        stranger.abort(reservation.reservation_id)
    client.commit(reservation)
    with pytest.raises(NotOwnerError):
        stranger.commit(reservation)
    assert stranger.abort(reservation.reservation_id) is ItemOutcome.UNKNOWN


@pytest.mark.parametrize("count", [1, 3])
def test_a_commit_brings_a_checksum_for_each_slot(client, spaces, count):
    """None is missing and none is left over; the reservation stays open."""
    reservation = client.reserve(spaces, [1, 2])
    with pytest.raises(InvalidFieldError, match=f"checksums has {count} entries for 2"):
        client.commit(reservation, range(count))
    client.commit(reservation)


def test_a_block_may_be_stored_without_a_checksum(client, spaces):
    """A reader can tell "none" (0) from a block whose CRC32C is 0 (all ones)."""
    client.commit(client.reserve(spaces, [1]), [])
    client.commit(client.reserve(spaces, [2]), [0])
    assert client.acquire(spaces, [1, 2]).slots.checksums.tolist() == [0, 2**32 - 1]


def test_readers_get_the_checksums_that_were_committed(client, two_parts):
    """Key-major, as every array of slots."""
    client.commit(client.reserve(two_parts, [1, 2]), [10, 11, 20, 21])
    assert client.acquire(two_parts, [1, 2]).slots.checksums.tolist() == [10, 11, 20, 21]
    assert client.acquire(two_parts[1:], [1, 2]).slots.checksums.tolist() == [11, 21]


def test_a_second_commit_answers_the_same(world, client, peer, spaces):
    """A retry after a lost answer changes nothing, and is counted."""
    reservation = client.reserve(spaces, range(3))
    client.commit(reservation)
    before = world.facts()
    done = peer.commit_id(reservation.reservation_id)
    assert (done.outcome, done.keys_count) == (ItemOutcome.DONE, 3)
    assert world.facts() == before
    assert world.books.late_ends_count == 1


def test_an_abort_leaves_nothing(world, client, spaces):
    """The keys are free for others, the slots for anybody, and a late writer can tell."""
    reservation = client.reserve(spaces, range(3))
    assert client.abort(reservation.reservation_id) is ItemOutcome.DONE
    assert client.outcomes(spaces, range(3)) == [MISS] * 3
    assert world.states_count(SlotState.FREE) == len(world.pool().state)
    assert world.is_moved(reservation.slots)


def test_a_late_abort_says_what_became_of_it(world, client, spaces):
    """An end that comes twice is data: it changes nothing and is counted."""
    aborted, committed = client.reserve(spaces, [1]), client.reserve(spaces, [2])
    expired = client.reserve(spaces, [3], ttl_s=1)
    client.abort(aborted.reservation_id)
    client.commit(committed)
    world.advance(1)
    assert client.abort(aborted.reservation_id) is ItemOutcome.ALREADY_ABORTED
    assert client.abort(committed.reservation_id) is ItemOutcome.ALREADY_COMMITTED
    assert client.abort(expired.reservation_id) is ItemOutcome.ALREADY_EXPIRED
    assert client.abort(committed.reservation_id + 1000) is ItemOutcome.UNKNOWN
    assert world.books.late_ends_count == 4
    assert client.outcomes(spaces, [2]) == [HIT]


def test_a_commit_after_the_end_publishes_nothing(world, client, spaces):
    """The error says how it ended, so the writer knows whether it came late or was told to stop."""
    aborted, expired = client.reserve(spaces, [1]), client.reserve(spaces, [2], ttl_s=1)
    client.abort(aborted.reservation_id)
    with pytest.raises(ReservationAbortedError):
        client.commit(aborted)
    world.advance(1)
    with pytest.raises(ReservationExpiredError):
        client.commit(expired)
    with pytest.raises(ReservationUnknownError):
        client.commit_id(expired.reservation_id + 1000)
    assert client.outcomes(spaces, [1, 2]) == [MISS, MISS]
    assert world.books.late_ends_count == 3


def test_a_reservation_lives_until_its_deadline_and_not_longer(world, client, spaces):
    """What is due has expired before an event of the same moment is looked at."""
    late, timely = client.reserve(spaces, [1], ttl_s=1), client.reserve(spaces, [2], ttl_s=1)
    world.now_ns += SECOND_NS - 1
    client.commit(timely)
    world.now_ns += 1
    with pytest.raises(ReservationExpiredError):
        client.commit(late)


def test_an_id_of_another_life_is_stale(client, spaces):
    """A restarted daemon knows nothing of it, and must not take it for one of its own."""
    reservation = client.reserve(spaces, [1])
    later = World(life=8).attach()
    with pytest.raises(StaleIncarnationError):
        later.commit_id(reservation.reservation_id)
    with pytest.raises(StaleIncarnationError):
        later.abort(reservation.reservation_id)
    assert World().attach().abort(reservation.reservation_id) is ItemOutcome.UNKNOWN


def test_a_token_names_a_living_session(world, client, spaces):
    """A stranger without a session, or with one that ended, gets nothing."""
    client.leave()
    with pytest.raises(SessionUnknownError):
        client.reserve(spaces, [1])


def test_a_hit_needs_every_part(client, two_parts):
    """A block is there when all of its parts are."""
    client.put(two_parts[:1], [1, 2])
    client.put(two_parts[1:], [2])
    assert client.outcomes(two_parts, [1, 2]) == [MISS, HIT]
    assert client.outcomes(two_parts[:1], [1, 2]) == [HIT, HIT]


def test_a_key_is_granted_whole_when_any_part_is_missing(client, two_parts):
    """The writer writes all parts; until its commit the old one is read."""
    client.commit(client.reserve(two_parts[:1], [1]), [10])
    reservation = client.reserve(two_parts, [1])
    assert reservation.outcomes.tolist() == [GRANTED]
    assert len(reservation.slots) == 2
    assert client.acquire(two_parts[:1], [1]).slots.checksums.tolist() == [10]
    assert client.reserve(two_parts[:1], [1]).outcomes.tolist() == [ALREADY_COMMITTED]
    client.commit(reservation, [20, 21])
    assert client.acquire(two_parts, [1]).slots.checksums.tolist() == [20, 21]


def test_a_replaced_part_lives_for_its_readers(world, client, two_parts):
    """A lease on the old slot is good until it ends; then the slot is free."""
    client.put(two_parts[:1], [1])
    lease = client.acquire(two_parts[:1], [1])
    client.put(two_parts, [1])
    assert world.states_count(SlotState.EVICTING) == 1
    assert not world.is_moved(lease.slots)
    client.release(lease.lease_id)
    assert world.states_count(SlotState.EVICTING) == 0
    assert world.is_moved(lease.slots)
    assert client.outcomes(two_parts, [1]) == [HIT]


def test_a_key_is_pending_while_any_part_is_reserved(client, stranger, two_parts):
    """Two writers of overlapping parts would both believe that they replace."""
    stranger.open(SMALL_BYTES, LARGE_BYTES)
    client.reserve(two_parts[1:], [1])
    assert stranger.reserve(two_parts, [1]).outcomes.tolist() == [PENDING]
    assert stranger.outcomes(two_parts, [1]) == [PENDING]
    assert stranger.outcomes(two_parts[:1], [1]) == [MISS]


def test_an_abort_of_several_parts_leaves_the_old_ones(client, two_parts):
    """A commit is all or nothing, and so is its failure."""
    client.put(two_parts[:1], [1])
    client.abort(client.reserve(two_parts, [1, 2]).reservation_id)
    assert client.outcomes(two_parts[:1], [1, 2]) == [HIT, MISS]
    assert client.outcomes(two_parts[1:], [1, 2]) == [MISS, MISS]


def test_parts_of_one_size_share_a_pool(client, world):
    """Slots are of a size, not of a part; the parts of a key still get a slot each."""
    spaces = client.open(SMALL_BYTES, SMALL_BYTES - 1)
    client.commit(client.reserve(spaces, range(3)), range(1, 7))
    assert list(world.books.tenant("acme").pools) == [SMALL_BYTES]
    assert client.acquire(spaces, range(3)).slots.checksums.tolist() == list(range(1, 7))


def test_a_commit_is_held_to_what_arrived_over_a_wire(world, client, spaces):
    """The daemon saw the bytes: a commit that says otherwise would publish garbage."""
    reservation = client.reserve(spaces, [1, 2])
    transfer = client.begin(reservation.reservation_id, [1], is_write=True)
    world.end_transfer(transfer.transfer_id, [77])
    with pytest.raises(ChecksumMismatchError, match=r"slot 1 .* arrived with CRC32C 0x0000004d"):
        client.commit(reservation, [5, 78])
    assert client.outcomes(spaces, [1, 2]) == [PENDING, PENDING]
    client.commit(reservation, [5, 77])
    assert client.acquire(spaces, [1, 2]).slots.checksums.tolist() == [5, 77]


def test_the_last_write_of_a_slot_counts(world, client, spaces):
    """A writer may send a slot again."""
    reservation = client.reserve(spaces, [1])
    for checksum in (77, 78):
        transfer = client.begin(reservation.reservation_id, [0], is_write=True)
        world.end_transfer(transfer.transfer_id, [checksum])
    client.commit(reservation, [78])
    assert client.acquire(spaces, [1]).slots.checksums.tolist() == [78]


def test_ends_are_remembered_for_a_while(world, client, spaces):
    """The memory of ends is bounded: the oldest is forgotten, and answers UNKNOWN then."""
    reservation = client.reserve(spaces, [1])
    client.commit(reservation)
    lease = client.acquire(spaces, [1])
    client.release(lease.lease_id)
    oldest = world.books.ended.pop(reservation.reservation_id)
    ended = dict.fromkeys(range(ENDED_LIMIT - 1), oldest)
    world.books.ended.clear()
    world.books.ended.update({reservation.reservation_id: oldest, **ended})
    assert client.abort(reservation.reservation_id) is ItemOutcome.ALREADY_COMMITTED
    client.abort(client.reserve(spaces, [2]).reservation_id)
    assert client.abort(reservation.reservation_id) is ItemOutcome.UNKNOWN
    assert len(world.books.ended) == ENDED_LIMIT


def test_the_answer_to_a_reserve_cannot_be_changed(client, spaces):
    """A retry must find what the first answer said."""
    outcomes = client.reserve(spaces, [1]).outcomes
    assert outcomes.dtype == np.uint8
    assert not outcomes.flags.writeable
