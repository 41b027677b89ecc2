import os
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from kvservice.native import ucx
from tests.integration.ucx.peers import (
    CMA,
    LONG_S,
    MIB,
    TCP,
    Batch,
    Lane,
    anonymous_memory,
    deadline_ns,
)

CANCELED = -16
CONNECTION_RESET = -25
INPUT_OUTPUT_ERROR = -3
SOON_S = 0.3
NOT_WATCHED_TCP = (TCP, False)
SHARED_MEMORY = {"TLS": "posix,sysv,self", "NET_DEVICES": "lo"}


@pytest.fixture
def make_lane(open_worker, start_peer):
    """Make a wired lane with given settings."""

    def make(settings, is_watched):
        return Lane(open_worker(settings), start_peer(settings), is_watched=is_watched)

    return make


def wait_until_asleep(thread):
    """See a thread asleep, most likely in the call that it was started for."""
    stat = Path(f"/proc/self/task/{thread.native_id}/stat")
    end = time.monotonic() + LONG_S
    while stat.read_text().rpartition(")")[2].split()[0] != "S":
        assert time.monotonic() < end
        os.sched_yield()


@pytest.mark.parametrize("is_put", [True, False])
def test_a_peer_that_died_before_the_transfer_is_told(mortal_lane, is_put):
    """Both lanes answer at once, with a status for each operation and words on the endpoint."""
    mortal_lane.peer.kill()
    batch = mortal_lane.batch()
    assert batch.run(mortal_lane.worker, is_put=is_put) in {ucx.Outcome.LOST, ucx.Outcome.FAILED}
    assert set(batch.statuses.tolist()) <= {
        CONNECTION_RESET,
        INPUT_OUTPUT_ERROR,
        CANCELED,
        ucx.STATUS_NOT_POSTED,
    }
    assert "(status -25)" in mortal_lane.endpoint.failure
    again = mortal_lane.batch()
    assert again.run(mortal_lane.worker, is_put=is_put) is ucx.Outcome.LOST
    assert set(again.statuses.tolist()) == {CONNECTION_RESET}


@pytest.mark.parametrize("is_put", [True, False])
def test_a_peer_that_dies_in_the_middle_is_told(mortal_lane, is_put):
    """The operations until then are done, the others have a failure, and the call comes back."""
    count = 1 << 15  # some seconds' worth; it ends when the peer does
    batch = Batch(
        mortal_lane.segment,
        np.full(count, mortal_lane.memory.ctypes.data, dtype=np.uint64),
        np.full(count, mortal_lane.segment.base, dtype=np.uint64),
        np.full(count, 1 << 18, dtype=np.uint64),
    )
    outcomes = []
    thread = threading.Thread(
        target=lambda: outcomes.append(batch.run(mortal_lane.worker, is_put=is_put, window=4))
    )
    thread.start()
    end = time.monotonic() + LONG_S
    while (batch.statuses != ucx.STATUS_NOT_POSTED)[:64].sum() < 64:
        assert time.monotonic() < end
        os.sched_yield()
    mortal_lane.peer.kill()
    thread.join(LONG_S)
    assert outcomes in ([ucx.Outcome.LOST], [ucx.Outcome.FAILED])
    kinds = set(batch.statuses.tolist())
    assert kinds <= {0, CONNECTION_RESET, INPUT_OUTPUT_ERROR, CANCELED}
    assert kinds & {CONNECTION_RESET, INPUT_OUTPUT_ERROR}
    assert "(status -25)" in mortal_lane.endpoint.failure


def test_a_death_is_told_by_progress_alone(make_lane):
    """A watched endpoint learns of it while nothing is transferred."""
    lane = make_lane(TCP, is_watched=True)
    assert lane.endpoint.failure is None
    lane.peer.kill()
    end = time.monotonic() + LONG_S
    while lane.endpoint.failure is None:
        lane.worker.progress()
        assert time.monotonic() < end
    assert "Connection reset" in lane.endpoint.failure


def test_a_watched_endpoint_stops_a_batch_on_its_partner(make_lane):
    """CMA reaches a process by number: once the watched partner has failed, nothing more is posted."""
    lane = make_lane(CMA, is_watched=False)
    watched = lane.worker.connect(lane.peer.address, is_watched=True)
    assert watched.wire(deadline_ns())
    assert lane.batch().run(lane.worker, is_put=False, watched=watched) is ucx.Outcome.DONE
    lane.peer.kill()
    end = time.monotonic() + LONG_S
    while watched.failure is None:
        lane.worker.progress()
        assert time.monotonic() < end
    batch = lane.batch()
    assert batch.run(lane.worker, is_put=False, watched=watched) is ucx.Outcome.LOST
    assert not (batch.statuses == 0).any()


def test_a_connection_made_again_learns_of_a_death_too(mortal_lane):
    """UCX may hand out the connection of a closed endpoint again; the next one must be told all the same."""
    mortal_lane.endpoint.close()
    second = Lane(mortal_lane.worker, mortal_lane.peer, is_watched=mortal_lane.endpoint.is_watched)
    assert second.batch().run(mortal_lane.worker, is_put=False) is ucx.Outcome.DONE
    mortal_lane.peer.kill()
    assert second.batch().run(mortal_lane.worker, is_put=True) in {ucx.Outcome.LOST, ucx.Outcome.FAILED}
    assert second.endpoint.failure is not None


def test_a_connection_to_a_dead_peer_fails_in_time(open_worker, start_peer):
    """An address may outlive its process: UCX says so at once, or when the endpoint is wired."""
    peer = start_peer(TCP)
    peer.kill()
    failure = None
    try:
        watched = open_worker(TCP).connect(peer.address, is_watched=True)
        assert not watched.wire(deadline_ns())
        failure = watched.failure
    except ucx.UcxError as refusal:
        failure = str(refusal)
    assert failure is not None
    assert "(status -" in failure


@pytest.mark.parametrize("is_put", [True, False])
def test_cma_needs_nothing_of_a_stopped_peer(make_lane, is_put):
    """Once wired, bytes go to and from a process that does not run."""
    lane = make_lane(CMA, is_watched=False)
    lane.peer.stop()
    lane.memory[:] = 0xA5
    batch = lane.batch(1 << 18, 16)
    assert batch.run(lane.worker, is_put=is_put) is ucx.Outcome.DONE
    lane.peer.resume()
    expected = lane.peer.ask("digest", 0, lane.peer.length)
    lane.memory[:] = 0
    assert batch.run(lane.worker, is_put=False) is ucx.Outcome.DONE
    assert (lane.memory == 0xA5).all() == is_put
    assert expected == lane.peer.ask("digest", 0, lane.peer.length)


@pytest.mark.parametrize("is_put", [True, False])
def test_a_silent_peer_is_cut_off_at_the_deadline(make_lane, is_put):
    """Over tcp nothing else ends the operations; afterwards no late answer may touch local memory."""
    lane = make_lane(TCP, is_watched=True)
    lane.peer.stop()
    batch = lane.batch(1 << 18, 16)
    start = time.monotonic()
    assert batch.run(lane.worker, is_put=is_put, window=4, seconds=SOON_S) is ucx.Outcome.DEADLINE
    assert SOON_S <= time.monotonic() - start < LONG_S
    kinds = set(batch.statuses.tolist())
    assert CANCELED in kinds
    assert kinds <= {CANCELED, ucx.STATUS_NOT_POSTED, ucx.STATUS_UNCONFIRMED}
    assert "Cut off" in lane.endpoint.failure
    assert not lane.worker.is_poisoned

    lane.memory[:] = 0x5A
    lane.peer.resume()
    lane.peer.ask("digest", 0, 1)  # it runs again, and has what was sent to it
    other = Lane(lane.worker, lane.peer, is_watched=True)
    assert other.batch().run(lane.worker, is_put=False) is ucx.Outcome.DONE
    assert (lane.memory == 0x5A).all()
    assert lane.batch().run(lane.worker, is_put=is_put) is ucx.Outcome.LOST


@pytest.mark.parametrize("settings", [CMA, TCP], ids=["cma", "tcp"])
@pytest.mark.parametrize("is_watched", [True, False])
def test_the_deadline_covers_the_first_contact(open_worker, start_peer, settings, is_watched):
    """A peer that stopped before it answered once costs the deadline, and poisons nothing."""
    worker, peer = open_worker(settings), start_peer(settings)
    peer.stop()
    endpoint = worker.connect(peer.address, is_watched=is_watched)
    memory = anonymous_memory(MIB)
    batch = Batch.of_blocks(peer.attach(endpoint), memory, 1 << 16, 16)
    start = time.monotonic()
    assert batch.run(worker, is_put=False, seconds=SOON_S) is ucx.Outcome.DEADLINE
    assert SOON_S <= time.monotonic() - start < LONG_S
    assert set(batch.statuses.tolist()) <= {ucx.STATUS_NOT_POSTED, CANCELED}
    assert not worker.is_poisoned
    peer.resume()
    if endpoint.failure is None:  # it waited to be wired, and is as good as before
        assert batch.run(worker, is_put=False) is ucx.Outcome.DONE


@pytest.mark.parametrize("is_put", [True, False])
def test_what_cannot_be_cut_off_poisons_the_worker(make_lane, is_put):
    """An endpoint that is not watched cannot be ended: the call says so instead of pretending."""
    lane = make_lane(*NOT_WATCHED_TCP)
    lane.peer.stop()
    batch = lane.batch(1 << 18, 16)
    with pytest.raises(ucx.UnsettledError, match="keep it until") as raised:
        batch.run(lane.worker, is_put=is_put, window=4, seconds=SOON_S, grace_ns=10**8)
    assert raised.value.status == ucx.STATUS_UNSETTLED
    assert (batch.statuses == ucx.STATUS_UNSETTLED).sum() > 0
    assert lane.worker.is_poisoned
    before = batch.statuses.copy()
    lane.peer.resume()
    lane.peer.ask("digest", 0, 1)
    with pytest.raises(ucx.UnsettledError, match="close the worker"):
        lane.batch().run(lane.worker, is_put=is_put)
    lane.segment.close()
    lane.worker.close()
    lane.memory[:] = 0x5A
    lane.peer.ask("digest", 0, 1)
    assert (lane.memory == 0x5A).all()
    assert np.array_equal(batch.statuses, before)  # nothing writes there after the call


def test_a_put_that_is_not_known_to_have_arrived_says_so(make_lane):
    """A put is copied on its way: where the peer is silent its arrival stays unknown, and memory is free."""
    lane = make_lane(SHARED_MEMORY, is_watched=False)
    batch = lane.batch(8, 1)
    assert batch.run(lane.worker, is_put=False) is ucx.Outcome.DONE
    lane.peer.stop()
    assert batch.run(lane.worker, is_put=True, seconds=SOON_S, grace_ns=10**7) is ucx.Outcome.DEADLINE
    assert batch.statuses.tolist() == [ucx.STATUS_UNCONFIRMED]
    assert not lane.worker.is_poisoned
    assert ucx.status_text(ucx.STATUS_UNCONFIRMED) == "Not known to have arrived"


@pytest.mark.parametrize("closes_worker", [True, False])
def test_closing_ends_the_wait_for_a_first_contact(open_worker, start_peer, closes_worker):
    """Whoever waits for a connection is let go before its endpoint or worker goes away."""
    worker, peer = open_worker(CMA), start_peer(CMA)
    peer.stop()
    endpoint = worker.connect(peer.address, is_watched=False)
    answers = []

    def wait():
        try:
            answers.append(endpoint.wire(deadline_ns()))
        except ucx.UcxError as refusal:  # it came too late to wait at all
            answers.append("closed" in str(refusal) and "late")

    thread = threading.Thread(target=wait)
    thread.start()
    wait_until_asleep(thread)
    start = time.monotonic()
    (worker if closes_worker else endpoint).close()
    thread.join(LONG_S)
    assert time.monotonic() - start < LONG_S / 2
    assert answers in ([False], ["late"])


@pytest.mark.parametrize("closes_worker", [True, False])
def test_closing_stops_a_transfer_of_another_thread(make_lane, closes_worker):
    """The transfer returns, cut off, before its endpoint or worker goes away."""
    lane = make_lane(TCP, is_watched=True)
    lane.peer.stop()
    batch = lane.batch(1 << 18, 16)
    outcomes = []
    thread = threading.Thread(target=lambda: outcomes.append(batch.run(lane.worker, is_put=False, window=4)))
    thread.start()
    end = time.monotonic() + LONG_S
    while not (batch.statuses == 1).any():  # 1: under way
        assert time.monotonic() < end
        os.sched_yield()
    (lane.worker if closes_worker else lane.endpoint).close()
    thread.join(LONG_S)
    assert outcomes == [ucx.Outcome.CLOSED]
    assert set(batch.statuses.tolist()) <= {CANCELED, ucx.STATUS_NOT_POSTED}
