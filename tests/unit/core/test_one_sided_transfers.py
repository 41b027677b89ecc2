"""One-sided transfers: the slots are pinned for as long as somebody else may touch them, and no longer."""

import random

import numpy as np
import pytest

from kvservice.core import events
from kvservice.core.errors import (
    IncompleteBlockError,
    InvalidFieldError,
    KvError,
    LeaseExpiredError,
    LimitReachedError,
    NotOwnerError,
    NoWayError,
    ReservationAbortedError,
    SessionUnknownError,
    StaleIncarnationError,
)
from kvservice.core.one_sided_desk import TRANSFERS_LIMIT, uncut_transfers
from kvservice.core.slot_pool import SlotState
from tests.core_world import OTHER_ENGINE, SECOND_NS, World

TTL_S = 10
BOUND_S = 5
SILENCE_S = 10


@pytest.fixture
def world():
    """Give a world with four segments, and a bound of five seconds for one operation."""
    world = World()
    assert world.limits.operation_bound_ns == BOUND_S * SECOND_NS
    assert world.limits.heartbeat_timeout_ns == SILENCE_S * SECOND_NS
    return world


@pytest.fixture
def local(world):
    """Give a process whose death is seen."""
    return world.attach()


@pytest.fixture
def remote(world):
    """Give a process that dies by its silence."""
    return world.attach(is_local=False)


def begin(client, capability_id: int, indexes=(0,), *, is_write=False, ttl_s: float = 0):
    """Begin a one-sided transfer."""
    slots = np.array(list(indexes), dtype=np.int64)
    event = events.BeginOneSided(client.token, capability_id, slots, is_write, round(ttl_s * SECOND_NS))
    return client.world.handle(event)


def end(client, transfer_id: int, checksums=None, *, is_settled=True) -> None:
    """End it."""
    sums = None if checksums is None else np.array(list(checksums), dtype=np.uint32)
    client.world.handle(events.EndOneSided(client.token, transfer_id, sums, is_settled))


def cut(world) -> tuple[int, ...]:
    """Do what the daemon does when writers have to be cut off; return the transfers concerned."""
    waiting = uncut_transfers(world.books)
    world.handle(events.WritersCut(waiting))
    return waiting


def leased(client, *, ttl_s: float = 0):
    """Store a block and lease it."""
    spaces = client.open()
    client.put(spaces, [1])
    return client.acquire(spaces, [1], ttl_s=ttl_s)


def pins(world) -> int:
    """Count the pins of the small slots."""
    return int(world.pool().pins.sum())


def test_a_read_is_pinned_until_its_end(world, remote):
    """It gets the slots as a wire of the daemon's own does, and the time that it may take."""
    lease = leased(remote)
    answer = begin(remote, lease.lease_id, ttl_s=3)
    assert answer.slots.granules.tolist() == lease.slots.granules.tolist()
    assert answer.slots.checksums.tolist() == lease.slots.checksums.tolist()
    assert answer.remaining_ns == 3 * SECOND_NS
    assert pins(world) == 2
    end(remote, answer.transfer_id)
    assert pins(world) == 1
    assert not world.books.transfers


def test_an_end_that_is_sent_again_is_answered_as_the_first(world, remote):
    """The first answer may have been lost with its connection; nothing is unpinned twice."""
    lease = leased(remote)
    good, bad = begin(remote, lease.lease_id), begin(remote, lease.lease_id)
    end(remote, good.transfer_id)
    end(remote, good.transfer_id)
    remote.release(lease.lease_id)
    for _ in range(3):
        with pytest.raises(LeaseExpiredError, match="discard the bytes"):
            end(remote, bad.transfer_id)
    end(remote, good.transfer_id)
    assert pins(world) == 0


def test_a_transfer_is_ended_by_its_own_session(world, remote):
    """Another session, of the same engine or not, cannot say what this process touches."""
    transfer = begin(remote, leased(remote).lease_id)
    for other in (world.attach(is_local=False), world.attach(engine=OTHER_ENGINE)):
        with pytest.raises(NotOwnerError):
            end(other, transfer.transfer_id)
    end(remote, transfer.transfer_id)
    with pytest.raises(InvalidFieldError, match="no transfer of this session"):
        end(world.attach(), transfer.transfer_id)


def test_the_two_kinds_of_transfer_are_not_confused(world, local):
    """A client does not end what the daemon moves, nor the daemon's wire what a client moves."""
    lease = leased(local)
    own = local.begin(lease.lease_id, [0], is_write=False)
    with pytest.raises(NotOwnerError):
        end(local, own.transfer_id)
    theirs = begin(local, lease.lease_id)
    with pytest.raises(InvalidFieldError, match="names no running transfer"):
        world.end_transfer(theirs.transfer_id)
    world.end_transfer(own.transfer_id)
    end(local, theirs.transfer_id)
    assert pins(world) == 1


def test_an_end_of_an_unknown_transfer_is_refused(local):
    """One that was never begun is told from one of another life of the daemon."""
    with pytest.raises(InvalidFieldError, match="no transfer of this session"):
        end(local, leased(local).lease_id + 1000)
    with pytest.raises(StaleIncarnationError):
        end(local, 77)


def test_a_session_that_said_good_bye_has_no_transfers(world, remote):
    """It was its word that it touches nothing any more."""
    begin(remote, leased(remote).lease_id)
    remote.leave()
    assert pins(world) == 0
    assert not world.books.transfers


def test_a_local_session_that_dies_has_no_reads(world, local):
    """What a dead process reads, nobody uses."""
    begin(local, leased(local).lease_id)
    local.leave()
    assert pins(world) == 0


def test_a_silent_session_pins_what_it_reads_until_it_cannot_be_reading(world, remote):
    """It may be stopped in the middle: its own deadline and the bound of one operation are waited for."""
    lease = leased(remote, ttl_s=2)
    transfer = begin(remote, lease.lease_id, ttl_s=30)
    world.advance(SILENCE_S)
    assert not world.books.sessions
    assert pins(world) == 1
    world.advance(30 + BOUND_S - SILENCE_S - 0.001)
    assert pins(world) == 1
    world.advance(0.001)
    assert pins(world) == 0
    with pytest.raises(SessionUnknownError):
        end(remote, transfer.transfer_id)


def test_a_read_that_is_not_ended_in_time_ends_by_itself(world, local):
    """However long its session lives: pins that nobody takes back would hold the memory for ever."""
    lease = leased(local, ttl_s=60)
    transfer = begin(local, lease.lease_id, ttl_s=1)
    world.advance(1 + BOUND_S - 0.001)
    assert pins(world) == 2
    world.advance(0.001)
    assert pins(world) == 1
    with pytest.raises(LeaseExpiredError, match="outlived its deadline"):
        end(local, transfer.transfer_id)
    assert not world.books.sessions[local.token].transfers


def test_the_time_of_a_transfer_is_bounded(world, local):
    """Whoever asks for more than the longest lease gets that; who asks for none gets the usual life."""
    lease = leased(local)
    assert begin(local, lease.lease_id).remaining_ns == world.limits.default_ttl_ns
    assert begin(local, lease.lease_id, ttl_s=10**6).remaining_ns == world.limits.max_ttl_ns


def test_one_sided_writes_are_for_those_whose_death_is_seen(world, remote, local):
    """Another host's process cannot be cut off, and its bytes could come when the slot is another's."""
    spaces = remote.open()
    reservation = remote.reserve(spaces, [1])
    with pytest.raises(NoWayError, match="write over tcp"):
        begin(remote, reservation.reservation_id, is_write=True)
    assert pins(world) == 0
    begin(local, reservation.reservation_id, is_write=True)
    assert pins(world) == 1


def test_a_write_is_held_to_its_checksums(world, local):
    """As over a wire: the commit has to say what arrived, and comes after it."""
    reservation = local.reserve(local.open(), [1])
    transfer = begin(local, reservation.reservation_id, is_write=True)
    with pytest.raises(IncompleteBlockError):
        local.commit(reservation, [7])
    with pytest.raises(InvalidFieldError, match="2 entries for 1 slots"):
        end(local, transfer.transfer_id, [7, 8])
    end(local, transfer.transfer_id, [7])
    local.commit(reservation, [7])
    assert pins(world) == 0


def test_a_living_writer_is_not_hurried(world, local):
    """Its memory is never freed for a time that is a guess."""
    reservation = local.reserve(local.open(), [1], ttl_s=1)
    transfer = begin(local, reservation.reservation_id, is_write=True, ttl_s=1)
    local.beat(acknowledged=[reservation.reservation_id])
    world.advance(3600)
    local.beat(acknowledged=[reservation.reservation_id])
    assert world.states_count(SlotState.QUARANTINED) == 1
    with pytest.raises(KvError, match="expired"):
        end(local, transfer.transfer_id, [7])
    assert world.states_count(SlotState.QUARANTINED) == 0


@pytest.mark.parametrize("is_dead", [True, False])
def test_a_write_that_failed_keeps_its_slots_until_it_is_cut_off(world, local, is_dead):
    """Bytes of it may be on their way: nobody gets the slots before they can arrive no more."""
    reservation = local.reserve(local.open(), [1, 2])
    transfer = begin(local, reservation.reservation_id, [0, 1], is_write=True)
    if is_dead:
        local.leave()
    else:
        end(local, transfer.transfer_id, is_settled=False)
        end(local, transfer.transfer_id, is_settled=False)
        with pytest.raises(IncompleteBlockError):
            local.commit(reservation)
        local.abort(reservation.reservation_id)
    world.advance(3600)
    assert world.states_count(SlotState.QUARANTINED) == 2
    assert cut(world) == (transfer.transfer_id,)
    assert world.states_count(SlotState.QUARANTINED) == 0
    assert cut(world) == ()


def test_a_reservation_goes_on_after_a_failed_write_was_cut_off(world, local):
    """The writer may use another way; and what never left it needs no cut."""
    reservation = local.reserve(local.open(), [1])
    failed = begin(local, reservation.reservation_id, is_write=True)
    end(local, failed.transfer_id, is_settled=False)
    assert cut(world) == (failed.transfer_id,)
    unsent = begin(local, reservation.reservation_id, is_write=True)
    end(local, unsent.transfer_id, is_settled=True)
    assert cut(world) == ()
    local.commit(reservation, [7])
    assert pins(world) == 0


def test_an_aborted_write_is_told_so(world, local):
    """The bytes are there, and nobody will see them."""
    reservation = local.reserve(local.open(), [1])
    transfer = begin(local, reservation.reservation_id, is_write=True)
    local.abort(reservation.reservation_id)
    assert world.states_count(SlotState.QUARANTINED) == 1
    with pytest.raises(ReservationAbortedError):
        end(local, transfer.transfer_id, [7])
    assert world.states_count(SlotState.QUARANTINED) == 0


def test_the_transfers_of_a_session_are_bounded(world, local):
    """Pins that nobody counts are memory that nobody gets back."""
    world = World(check_every=0)
    client = world.attach()
    lease = leased(client)
    first = begin(client, lease.lease_id)
    for _ in range(TRANSFERS_LIMIT - 1):
        begin(client, lease.lease_id)
    with pytest.raises(LimitReachedError) as caught:
        begin(client, lease.lease_id)
    assert caught.value.retry_after_ms
    end(client, first.transfer_id)
    begin(client, lease.lease_id)


def test_whatever_happens_every_pin_is_accounted_for(seed):
    """Random sessions, transfers, ends, deaths, silences and cuts, with the invariants after each."""
    world, random_ = World(), random.Random(seed)
    clients, transfers = [], []
    done = dict.fromkeys(("reads", "writes", "refusals", "cuts"), 0)
    for _ in range(1500):
        if len(clients) < 3:
            clients.append(world.attach(is_local=random_.random() < 0.5))
        client = random_.choice(clients)
        try:
            step(world, client, transfers, done, random_)
        except KvError:
            done["refusals"] += 1
        clients = [each for each in clients if each.token in world.books.sessions]
    for token in list(world.books.sessions):
        world.handle(events.SessionEnded(token))
    world.advance(3600)
    cut(world)
    assert not world.books.transfers
    assert pins(world) == 0
    assert all(done.values()), done


def step(world, client, transfers, done, random_) -> None:
    """Do one thing."""
    draw = random_.random()
    if draw < 0.35:
        spaces = client.open()
        # Out of many: one that is stored already is not granted, and a few would soon all be stored.
        number = random_.randrange(1, 1_000_000)
        is_write = random_.random() < 0.5
        if is_write:
            capability = client.reserve(spaces, [number], ttl_s=random_.uniform(0.5, 5)).reservation_id
        else:
            client.put(spaces, [number])
            lease = client.acquire(spaces, [number], ttl_s=random_.uniform(0.5, 5))
            capability = lease.lease_id if lease else 0
        answer = begin(client, capability, is_write=is_write, ttl_s=random_.uniform(0.5, 8))
        transfers.append((client, answer.transfer_id, is_write))
        done["writes" if is_write else "reads"] += 1
    elif draw < 0.75 and transfers:
        owner, transfer_id, is_write = transfers.pop(random_.randrange(len(transfers)))
        is_good = is_write and random_.random() < 0.5
        end(owner, transfer_id, [1] if is_good else None, is_settled=random_.random() < 0.5)
    elif draw < 0.8:
        client.leave()
    elif draw < 0.85:
        done["cuts"] += len(cut(world))
    else:
        world.advance(random_.uniform(0, 6))
        for other in {client.token for client, _, _ in transfers} & world.books.sessions.keys():
            session = world.books.sessions[other]
            if session.is_local:
                owed = np.array(sorted(session.revoked), dtype=np.uint64)
                none, empty = events.NO_IDS, events.NO_U32
                world.handle(events.Beat(other, none, none, owed, empty, empty))
