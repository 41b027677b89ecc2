"""Sessions and what ends with them, quarantine, namespaces, purge, drain."""

import pytest

from kvservice.core.effects import EndSession, Revoke
from kvservice.core.errors import (
    BlockSizeError,
    DrainingError,
    InvalidFieldError,
    LimitReachedError,
    QuotaExceededError,
    ReservationAbortedError,
    SessionUnknownError,
    SpaceNotOpenError,
)
from kvservice.core.events import Attach, Drain, OpenNamespace, SessionEnded
from kvservice.core.limits import CLIENT_NAME_LIMIT, RETRY_AFTER_MS
from kvservice.core.namespace import Spaces
from kvservice.core.outcomes import ItemOutcome
from kvservice.core.slot_pool import SlotState
from tests.core_world import (
    LARGE_BYTES,
    OTHER_ENGINE,
    SECOND_NS,
    SEGMENT_BYTES,
    SMALL_BYTES,
    World,
    identity,
    part,
    places_of,
)

HIT, MISS, PENDING = ItemOutcome.HIT, ItemOutcome.MISS, ItemOutcome.PENDING


@pytest.fixture
def world():
    """Give a world with four segments."""
    return World()


def revoked(world):
    """Return who was told last to let go of what."""
    return [(told.token, told.capability_id) for told in world.last_effects if isinstance(told, Revoke)]


# ---- liveness


def test_each_attach_opens_a_session(world):
    """Two processes of one engine are two sessions."""
    one, two = world.attach(), world.attach()
    assert one.session_id != two.session_id
    assert one.token != two.token
    assert not one.is_resumed


def test_a_lost_connection_is_not_a_lost_session(world):
    """A client comes back with its token and finds what it held."""
    client = world.attach()
    spaces = client.open()
    reservation = client.reserve(spaces, [1])
    again = world.attach(resume=client.token)
    assert again.is_resumed
    assert (again.token, again.session_id) == (client.token, client.session_id)
    again.commit(reservation)


def test_a_token_resumes_only_its_own_kind_of_session(world):
    """Another tenant, engine or edge gets a fresh session, and the old one stays."""
    client = world.attach(is_local=True)
    for stranger in (
        world.attach("bolt", resume=client.token),
        world.attach(engine=OTHER_ENGINE, resume=client.token),
        world.attach(is_local=False, resume=client.token),
        world.attach(resume=b"of another life."),
    ):
        assert not stranger.is_resumed
        assert stranger.token != client.token
    assert world.attach(resume=client.token).is_resumed


def test_a_remote_session_dies_of_silence(world):
    """Its process cannot be watched, so its heartbeat is all that is known of it."""
    client = world.attach(is_local=False)
    spaces = client.open()
    reservation = client.reserve(spaces, [1], ttl_s=60)
    world.advance(9.9)
    client.beat()
    world.advance(9.9)
    assert client.outcomes(spaces, [1]) == [PENDING]
    world.advance(10)
    assert EndSession(client.token) in world.last_effects
    with pytest.raises(SessionUnknownError):
        client.outcomes(spaces, [1])
    other = world.attach()
    assert other.outcomes(other.open(), [1]) == [MISS]
    with pytest.raises(ReservationAbortedError):
        other.commit(reservation)


def test_any_call_keeps_a_remote_session_alive(world):
    """Silence is the absence of every call, not of heartbeats."""
    client = world.attach(is_local=False)
    spaces = client.open()
    for _ in range(5):
        world.advance(8)
        client.outcomes(spaces, [1])
    world.advance(8)
    assert world.attach(is_local=False, resume=client.token).is_resumed
    world.advance(8)
    client.beat()


def test_a_local_session_never_dies_of_silence(world):
    """Engines hold the interpreter for seconds while they compile; a process is dead when it is dead."""
    client = world.attach(is_local=True)
    spaces = client.open()
    world.advance(3600)
    assert client.outcomes(spaces, [1]) == [MISS]


def test_the_end_of_a_session_aborts_and_releases(world):
    """Every reservation and lease belongs to a session and ends with it."""
    client, other = world.attach(), world.attach(engine=OTHER_ENGINE)
    spaces = client.open()
    other.open()
    client.put(spaces, range(3))
    lease = client.acquire(spaces, range(3))
    reservation = client.reserve(spaces, [10])
    client.leave()
    assert other.outcomes(spaces, [0, 10]) == [HIT, MISS]
    assert world.books.leases == world.books.reservations == world.books.requests == {}
    assert not world.pool().pins.any()
    assert world.is_moved(reservation.slots)
    late = world.attach()
    assert late.release(lease.lease_id) == [ItemOutcome.ALREADY_EXPIRED]
    assert late.abort(reservation.reservation_id) is ItemOutcome.ALREADY_ABORTED


def test_a_second_end_changes_nothing(world):
    """A good-bye may meet the death of the process."""
    client = world.attach()
    client.leave()
    assert world.last_effects == (EndSession(client.token),)
    client.leave()
    assert world.last_effects == ()
    world.handle(SessionEnded(b"nobody's token.."))


def test_sessions_are_bounded():
    """More processes than any host runs are a fault; a resumed one is not one more."""
    world = World(max_sessions=2)
    one, _ = world.attach(), world.attach()
    with pytest.raises(LimitReachedError, match="2 sessions live") as caught:
        world.attach()
    assert caught.value.retry_after_ms == RETRY_AFTER_MS
    assert world.attach(resume=one.token).is_resumed
    one.leave()
    world.attach()


def test_a_draining_daemon_opens_no_session(world):
    """Those who are there may come back and finish."""
    client = world.attach()
    world.handle(Drain())
    with pytest.raises(DrainingError):
        world.attach()
    assert world.attach(resume=client.token).is_resumed


def test_what_names_a_process_is_checked(world):
    """An incarnation has 16 bytes, a name is short."""
    with pytest.raises(InvalidFieldError, match="engine_incarnation has 3 bytes"):
        world.attach(engine=b"abc")
    with pytest.raises(InvalidFieldError, match="client_name has 129 characters"):
        world.attach(name="x" * (CLIENT_NAME_LIMIT + 1))
    world.handle(Attach("acme", bytes(16), "x" * CLIENT_NAME_LIMIT, bytes(16), b"", is_local=True))


# ---- quarantine


def test_an_expired_reservation_waits_for_every_local_process_of_its_engine(world):
    """A process that maps the memory may be in the middle of a copy; no time-out stops it."""
    client, peer = world.attach(), world.attach()
    reservation = client.reserve(client.open(), range(4), ttl_s=1)
    world.advance(1)
    assert sorted(revoked(world)) == sorted(
        (token, reservation.reservation_id) for token in (client.token, peer.token)
    )
    assert world.is_moved(reservation.slots)
    world.advance(3600)
    assert world.states_count(SlotState.QUARANTINED) == 4
    assert client.beat().revoked_ids.tolist() == [reservation.reservation_id]
    assert client.beat(acknowledged=[reservation.reservation_id]).revoked_ids.tolist() == []
    assert world.states_count(SlotState.QUARANTINED) == 4
    peer.leave()
    assert world.states_count(SlotState.QUARANTINED) == 0


def test_quarantined_slots_stay_charged_and_are_not_given_away():
    """The memory is not free, whatever the deadline says."""
    world = World(segments_count=1, quotas_bytes=(("acme", 4 * SMALL_BYTES),))
    client = world.attach()
    spaces = client.open()
    reservation = client.reserve(spaces, range(4), ttl_s=1)
    world.advance(1)
    assert world.books.tenant("acme").charged_bytes() == 4 * SMALL_BYTES
    with pytest.raises(QuotaExceededError):
        client.reserve(spaces, [1])
    client.beat(acknowledged=[reservation.reservation_id])
    assert world.books.tenant("acme").charged_bytes() == 0
    client.put(spaces, [1])


def test_the_keys_of_an_expired_reservation_are_free_at_once(world):
    """Only the memory waits; another writer gets other slots."""
    client = world.attach()
    spaces = client.open()
    old = client.reserve(spaces, range(4), ttl_s=1)
    world.advance(1)
    new = client.reserve(spaces, range(4))
    assert not set(places_of(old.slots)) & set(places_of(new.slots))


def test_other_engines_are_not_asked(world):
    """Neither another engine of the tenant nor the same incarnation of another tenant may use it."""
    client = world.attach()
    others = [world.attach(engine=OTHER_ENGINE), world.attach("bolt"), world.attach(is_local=False)]
    client.reserve(client.open(), [1], ttl_s=1)
    world.advance(1)
    assert {token for token, _ in revoked(world)} == {client.token}
    for other in others:
        assert other.beat().revoked_ids.tolist() == []


def test_without_a_local_process_nobody_maps_the_memory(world):
    """A remote engine's bytes pass through the daemon, so its slots are free at once."""
    client = world.attach(is_local=False)
    reservation = client.reserve(client.open(), [1], ttl_s=1)
    world.advance(1)
    assert revoked(world) == []
    assert world.states_count(SlotState.QUARANTINED) == 0
    assert world.is_moved(reservation.slots)


def test_the_death_of_a_scheduler_asks_its_workers(world):
    """What a session asked for ends with it, while another process of the engine may use it."""
    scheduler, worker = world.attach(), world.attach()
    spaces = scheduler.open()
    scheduler.put(spaces, [1])
    lease, reservation = scheduler.acquire(spaces, [1]), scheduler.reserve(spaces, [2])
    scheduler.leave()
    owed = [lease.lease_id, reservation.reservation_id]
    assert sorted(revoked(world)) == sorted((worker.token, each) for each in owed)
    assert int(world.pool().pins.sum()) == 2
    worker.beat(acknowledged=owed)
    assert int(world.pool().pins.sum()) == 0


def test_an_end_by_the_engines_word_asks_nobody(world):
    """Commit, abort and release say that no process of the engine touches the memory any more."""
    client, _ = world.attach(), world.attach()
    spaces = client.open()
    client.abort(client.reserve(spaces, [1]).reservation_id)
    assert revoked(world) == []
    client.put(spaces, [1])
    client.release(client.acquire(spaces, [1]).lease_id)
    assert revoked(world) == []
    assert world.books.quarantines == {}


def test_an_acknowledgement_of_anything_else_changes_nothing(world):
    """It may come late, twice, or from somebody who was not asked."""
    client, stranger = world.attach(), world.attach(engine=OTHER_ENGINE)
    reservation = client.reserve(client.open(), [1], ttl_s=1)
    world.advance(1)
    stranger.beat(acknowledged=[reservation.reservation_id, 5])
    assert world.states_count(SlotState.QUARANTINED) == 1
    client.beat(acknowledged=[reservation.reservation_id] * 2)
    client.beat(acknowledged=[reservation.reservation_id])
    assert world.states_count(SlotState.QUARANTINED) == 0


def test_a_process_that_attached_later_is_not_waited_for(world):
    """It has never seen the capability."""
    client = world.attach()
    reservation = client.reserve(client.open(), [1], ttl_s=1)
    world.advance(1)
    world.attach()
    client.beat(acknowledged=[reservation.reservation_id])
    assert world.states_count(SlotState.QUARANTINED) == 0


# ---- namespaces


def test_opening_a_namespace_again_gives_the_same_handles(world):
    """For every session of the tenant, whatever its engine."""
    one, two = world.attach(), world.attach(engine=OTHER_ENGINE)
    opened = one.open_answer(SMALL_BYTES, LARGE_BYTES)
    assert one.open_answer(SMALL_BYTES, LARGE_BYTES) == opened
    assert two.open_answer(SMALL_BYTES, LARGE_BYTES) == opened
    assert one.open_answer(SMALL_BYTES).space_ids == opened.space_ids[:1]
    assert len(opened.identity_digest) == len(opened.namespace_id) == 32
    assert [len(digest) for digest in opened.shape_digests] == [32, 32]


def test_spaces_never_meet(world):
    """Another tenant, salt, model, part or shape is another space: the same keys are other blocks."""
    acme, bolt = world.attach("acme"), world.attach("bolt")
    shape = {"dtype": "float16"}
    opened = [
        (acme, acme.open()),
        (bolt, bolt.open()),
        (acme, acme.open(salt=b"customer")),
        (acme, acme.open(model="other")),
        (acme, acme.open(part(group=7))),
        (acme, acme.open(part(group=SMALL_BYTES, **shape))),
    ]
    assert len({spaces for _, spaces in opened}) == len(opened)
    for client, spaces in opened:
        assert client.outcomes(spaces, [1]) == [MISS]
        client.put(spaces, [1])
    assert len(world.facts("acme")) == len(opened) - 1


def test_a_space_is_open_in_the_session_that_opened_it(world):
    """A guessed number of another tenant, or of a process of the same engine, opens nothing."""
    client, peer, bolt = world.attach(), world.attach(), world.attach("bolt")
    spaces = client.open()
    client.put(spaces, [1])
    for other in (peer, bolt):
        for call in (other.outcomes, other.acquire, other.reserve):
            with pytest.raises(SpaceNotOpenError):
                call(spaces, [1])


def test_what_opens_a_namespace_is_checked(world):
    """Parts are 1 to 256, a salt is short, a block fits a segment."""
    client = world.attach()
    with pytest.raises(InvalidFieldError, match="parts has 257 entries"):
        client.open(*range(1, 258))
    with pytest.raises(InvalidFieldError, match="salt has 257 bytes"):
        client.open(salt=bytes(257))
    with pytest.raises(BlockSizeError):
        client.open(SEGMENT_BYTES + 1)
    assert len(client.open(*([512] * 256), salt=bytes(256))) == 256


def test_at_least_one_part_is_opened(world):
    """A namespace without a part could hold nothing."""
    client = world.attach()
    with pytest.raises(InvalidFieldError, match="parts has 0 entries"):
        world.handle(OpenNamespace(client.token, identity(), b"", ()))


def test_a_block_larger_than_the_quota_is_refused_early():
    """No such block could ever be stored, and the engine is told at start."""
    client = World(quotas_bytes=(("acme", SMALL_BYTES),)).attach()
    with pytest.raises(BlockSizeError, match="more than the quota of tenant 'acme'"):
        client.open(LARGE_BYTES)
    client.open(SMALL_BYTES)


def test_unused_spaces_make_room_for_others(world):
    """A space is in use while a session has it open or a slot is of it."""
    world.books.spaces = Spaces(3)
    keeper, visitor = world.attach(), world.attach()
    kept = keeper.open(salt=b"kept")
    stored = visitor.open(salt=b"stored")
    visitor.put(stored, [1])
    idle = visitor.open(salt=b"idle")
    with pytest.raises(LimitReachedError):
        visitor.open(salt=b"one more")
    visitor.leave()
    fresh = keeper.open(salt=b"one more")
    assert fresh[0] > max(kept + stored + idle)
    assert keeper.open(salt=b"stored") == stored
    assert keeper.outcomes(stored, [1]) == [HIT]
    assert keeper.outcomes(kept, [1]) == [MISS]


# ---- purge


def test_a_purge_makes_every_block_invisible(world):
    """All parts of the namespace, and nothing else of the tenant."""
    client = world.attach()
    opened, other = client.open_answer(SMALL_BYTES, LARGE_BYTES), client.open(salt=b"other")
    client.put(opened.space_ids, range(3))
    client.put(other, range(3))
    assert client.purge(opened.namespace_id) == 6
    assert client.outcomes(opened.space_ids, range(3)) == [MISS] * 3
    assert client.outcomes(other, range(3)) == [HIT] * 3
    assert client.purge(opened.namespace_id) == 0


def test_a_purged_block_lives_for_its_readers(world):
    """Leased ones are invisible at once and free after the last release, when stale readers can tell."""
    client = world.attach()
    opened = client.open_answer()
    spaces = opened.space_ids
    client.put(spaces, range(3))
    one, two = client.acquire(spaces, range(2)), client.acquire(spaces, range(1))
    assert client.purge(opened.namespace_id) == 3
    assert client.outcomes(spaces, range(3)) == [MISS] * 3
    assert world.states_count(SlotState.EVICTING) == 2
    assert not world.is_moved(one.slots)
    client.release(one.lease_id)
    assert world.states_count(SlotState.EVICTING) == 1
    client.release(two.lease_id)
    assert world.states_count(SlotState.EVICTING) == 0
    assert world.is_moved(one.slots)


def test_a_purged_key_can_be_written_again_at_once(world):
    """The old block drains while the new one is there."""
    client = world.attach()
    opened = client.open_answer()
    client.put(opened.space_ids, [1])
    lease = client.acquire(opened.space_ids, [1])
    client.purge(opened.namespace_id)
    client.put(opened.space_ids, [1])
    assert client.outcomes(opened.space_ids, [1]) == [HIT]
    client.release(lease.lease_id)
    assert client.outcomes(opened.space_ids, [1]) == [HIT]


def test_a_tenant_purges_only_its_own(world):
    """Another tenant's namespace, even if its id is known, is nothing to purge; an id has 32 bytes."""
    acme, bolt = world.attach("acme"), world.attach("bolt")
    opened = acme.open_answer()
    acme.put(opened.space_ids, [1])
    assert bolt.purge(opened.namespace_id) == 0
    assert bolt.purge(bytes(32)) == 0
    assert acme.outcomes(opened.space_ids, [1]) == [HIT]
    with pytest.raises(InvalidFieldError, match="namespace_id has 31 bytes"):
        acme.purge(bytes(31))


def test_a_silent_session_is_seen_at_its_deadline(world):
    """The next deadline is when the world must look again."""
    assert world.advance(0) is None
    client = world.attach(is_local=False)
    assert world.advance(0) == world.now_ns + 10 * SECOND_NS
    client.leave()
    world.advance(10)
    assert world.advance(0) is None
