import ctypes

import numpy as np
import pytest

from kvservice import native
from kvservice.native import ucx
from tests.integration.ucx.peers import MIB, TCP, Batch, Lane, Server

SIZES = (0, 1, 7, 512, 4095, 4096, 4097, 65536 + 1)
NOT_A_STATUS = 99


def scattered(rng, lane, count):
    """Draw ranges of all sizes that overlap in neither memory, in an order of their own in each."""
    lengths = np.array([rng.choice(SIZES) for _ in range(count)], dtype=np.uint64)
    room = MIB // 8
    places = [np.array(rng.sample(range(lane.peer.length // room), count)) for _ in range(2)]
    shifts = [np.array([rng.randrange(room - 65537) for _ in range(count)]) for _ in range(2)]
    local, remote = (
        (place * room + shift).astype(np.uint64) for place, shift in zip(places, shifts, strict=True)
    )
    return local, remote, lengths


def pattern(lane):
    """Tell what the peer's memory holds at first."""
    return np.arange(lane.peer.length // 8, dtype=np.uint64).view(np.uint8)


@pytest.mark.parametrize("window", [1, 3, 64])
@pytest.mark.parametrize("with_memory", [True, False])
def test_a_get_brings_the_bytes_and_touches_no_others(lane, rng, window, with_memory):
    """Scattered ranges of every size arrive where they belong; all other local bytes stay."""
    local, remote, lengths = scattered(rng, lane, 24)
    lane.memory[:] = 0xEE
    expected = lane.memory.copy()
    source = pattern(lane)
    for to, start, length in zip(local.tolist(), remote.tolist(), lengths.tolist(), strict=True):
        expected[to : to + length] = source[start : start + length]
    batch = Batch(
        lane.segment,
        local + np.uint64(lane.memory.ctypes.data),
        remote + np.uint64(lane.peer.base),
        lengths,
    )
    memory = lane.worker.register(lane.memory.ctypes.data, lane.memory.size) if with_memory else None
    outcome = batch.run(lane.worker, is_put=False, window=window, local_memory=memory)
    assert outcome is ucx.Outcome.DONE
    assert not batch.statuses.any()
    assert np.array_equal(lane.memory, expected)


@pytest.mark.parametrize("window", [1, 3, 64])
def test_a_put_is_in_the_peers_memory_when_it_returns(lane, rng, window):
    """Scattered ranges of every size are where they belong, without a word to the peer in between."""
    local, remote, lengths = scattered(rng, lane, 24)
    lane.memory[:] = np.frombuffer(rng.randbytes(lane.memory.size), dtype=np.uint8)
    expected = pattern(lane).copy()
    for start, to, length in zip(local.tolist(), remote.tolist(), lengths.tolist(), strict=True):
        expected[to : to + length] = lane.memory[start : start + length]
    batch = Batch(
        lane.segment,
        local + np.uint64(lane.memory.ctypes.data),
        remote + np.uint64(lane.peer.base),
        lengths,
    )
    assert batch.run(lane.worker, is_put=True, window=window) is ucx.Outcome.DONE
    assert not batch.statuses.any()
    assert lane.peer.ask("digest", 0, lane.peer.length) == native.crc32c(expected)


def test_large_blocks_go_both_ways(lane):
    """2 MiB at once, and back."""
    batch = Batch.of_blocks(lane.segment, lane.memory, 2 * MIB, 2)
    assert batch.run(lane.worker, is_put=False) is ucx.Outcome.DONE
    assert np.array_equal(lane.memory, pattern(lane))
    lane.memory[:] = lane.memory[::-1].copy()
    assert batch.run(lane.worker, is_put=True) is ucx.Outcome.DONE
    assert lane.peer.ask("digest", 0, 4 * MIB) == native.crc32c(lane.memory)


def test_nothing_to_do_is_done(lane):
    """A batch without operations, and operations without bytes, succeed without a peer."""
    assert Batch(lane.segment, [], [], []).run(lane.worker, is_put=True) is ucx.Outcome.DONE
    end = lane.segment.base + lane.segment.length
    empty = Batch(lane.segment, [0, 0], [lane.segment.base, end], [0, 0])
    lane.peer.stop()
    try:
        assert empty.run(lane.worker, is_put=False, seconds=0.0) is ucx.Outcome.DONE
    finally:
        lane.peer.resume()
    assert empty.statuses.tolist() == [0, 0]


def test_several_segments_on_several_endpoints_share_a_batch(lane):
    """A batch may name segments of one peer over both kinds of endpoint."""
    other = lane.worker.connect(lane.peer.address, is_watched=not lane.endpoint.is_watched)
    halves = [
        lane.endpoint.attach(lane.peer.rkey, lane.peer.base, 2 * MIB),
        other.attach(lane.peer.rkey, lane.peer.base + 2 * MIB, 2 * MIB),
    ]
    batch = lane.batch(64 << 10, 64)
    batch.segments = halves
    batch.indexes = np.repeat(np.array([0, 1], dtype=np.uint32), 32)
    assert batch.run(lane.worker, is_put=False) is ucx.Outcome.DONE
    assert np.array_equal(lane.memory, pattern(lane))


@pytest.mark.parametrize("is_put", [True, False])
def test_an_operation_outside_its_segment_is_never_posted(lane, is_put):
    """Each kind of wild range gets its own status and moves no byte; the others go on."""
    base, length = lane.peer.base + 4096, 8192
    segment = lane.endpoint.attach(lane.peer.rkey, base, length)
    wild = [
        (base - 1, 1),
        (base - 4096, 8),
        (base, length + 1),
        (base + length, 1),
        (base + length - 1, 2),
        (base + 1, 2**64 - 1),
        (base - 1, 2**64 - 1),
        (2**64 - 1, 2),
        (0, 1),
        (base + length + 1, 0),
    ]
    good = [(base, 16), (base + length - 16, 16), (base + 64, 0)]
    before = lane.peer.ask("digest", 0, lane.peer.length)
    lane.memory[:] = 0xEE
    # What the peer has at the good places, so that a put of it changes nothing.
    lane.memory[:16] = pattern(lane)[4096 : 4096 + 16]
    lane.memory[16:32] = pattern(lane)[4096 + 8192 - 16 : 4096 + 8192]
    remote, lengths = zip(*(wild + good), strict=True)
    addresses = [lane.memory.ctypes.data + 64] * len(wild)
    addresses += [lane.memory.ctypes.data, lane.memory.ctypes.data + 16, 0]
    batch = Batch(segment, addresses, remote, lengths)
    assert batch.run(lane.worker, is_put=is_put) is ucx.Outcome.FAILED
    assert batch.statuses.tolist() == [ucx.STATUS_OUTSIDE] * len(wild) + [0] * len(good)
    assert (lane.memory[32:] == 0xEE).all()
    assert lane.peer.ask("digest", 0, lane.peer.length) == before
    assert lane.endpoint.failure is None


def test_a_segment_lies_within_what_the_peer_registered(lane):
    """Bounds beyond the registration that the key opens are refused when the key is attached."""
    base, length = lane.peer.base, lane.peer.length
    for start, size in ((base - 1, 2), (base, length + 1), (base + length, 1), (base + 1, 2**64 - 1)):
        with pytest.raises(ValueError, match="registration"):
            lane.endpoint.attach(lane.peer.rkey, start, size)


def test_the_callers_arrays_are_checked(lane):
    """Each wrong argument is named, and nothing is posted."""
    batch = lane.batch()
    wrong = [
        ("indexes", np.full(16, 1, dtype=np.uint32), "segment index"),
        ("indexes", np.zeros(16, dtype=np.uint64), "segment_indexes"),
        ("local", np.zeros(15, dtype=np.uint64), "local"),
        ("remote", np.zeros(32, dtype=np.uint64)[::2], "remote"),
        ("lengths", np.zeros(16, dtype=np.int64), "lengths"),
        ("statuses", np.zeros(16, dtype=np.uint32), "statuses"),
        ("statuses", np.zeros(17, dtype=np.int32), "statuses"),
    ]
    for name, value, words in wrong:
        right = getattr(batch, name)
        setattr(batch, name, value)
        with pytest.raises(ValueError, match=words):
            batch.run(lane.worker, is_put=False)
        setattr(batch, name, right)
    for window in (0, ucx.WINDOW_MAX + 1, -1):
        with pytest.raises(ValueError, match="window"):
            batch.run(lane.worker, is_put=False, window=window)
    with pytest.raises(TypeError, match="watched"):
        batch.run(lane.worker, is_put=False, watched=lane.segment)
    batch.segments = [None]
    with pytest.raises(TypeError, match="RemoteSegment"):
        batch.run(lane.worker, is_put=False)
    assert not lane.memory.any()
    assert (batch.statuses == NOT_A_STATUS).all()


def test_local_memory_holds_every_local_range(lane):
    """What UCX is told about local memory is true, or nothing is posted."""
    half = lane.worker.register(lane.memory.ctypes.data, 2 * MIB)
    inside, beyond = lane.batch(64 << 10, 32), lane.batch(64 << 10, 33)
    assert inside.run(lane.worker, is_put=False, local_memory=half) is ucx.Outcome.DONE
    with pytest.raises(ValueError, match="operation 32"):
        beyond.run(lane.worker, is_put=False, local_memory=half)
    assert not lane.memory[2 * MIB :].any()


def test_things_of_another_worker_are_refused(lane, open_worker):
    """A worker does not touch what another one holds: its lock would not cover it."""
    other = open_worker({"TLS": "tcp,self", "NET_DEVICES": "lo"})
    foreign = [
        {"watched": other.connect(lane.peer.address, is_watched=True)},
        {"local_memory": other.register(lane.memory.ctypes.data, lane.memory.size)},
    ]
    for more in foreign:
        with pytest.raises(ucx.UcxError, match="another worker"):
            lane.batch().run(lane.worker, is_put=False, **more)
    with pytest.raises(ucx.UcxError, match="another worker"):
        lane.batch().run(other, is_put=False)


def test_a_worker_can_reach_itself(open_worker, serve):
    """Source and target may be one process: the address is like any other, and served like any other."""
    worker = open_worker(TCP)
    serve(worker)
    source = np.arange(4096, dtype=np.uint8)
    registration = worker.register(source.ctypes.data, source.size)
    assert (registration.address, registration.length) == (source.ctypes.data, 4096)
    segment = worker.connect(worker.address, is_watched=True).attach(
        registration.rkey, source.ctypes.data, 4096
    )
    assert (segment.base, segment.length) == (source.ctypes.data, 4096)
    target = ctypes.create_string_buffer(4096)
    batch = Batch(segment, [ctypes.addressof(target)], [segment.base], [4096])
    assert batch.run(worker, is_put=False) is ucx.Outcome.DONE
    assert target.raw == source.tobytes()


def test_two_workers_reach_each_other_in_every_way(lane, open_worker):
    """What one side connects never meets what the other does: UCX would make one connection of both."""
    own = np.arange(4096, dtype=np.uint8)
    registration = lane.worker.register(own.ctypes.data, own.size)
    ours = lane.worker.address.hex(), registration.rkey.hex(), own.ctypes.data, own.size
    with Server(lane.worker):
        for _ in range(3):
            for is_watched in (True, False):
                assert lane.peer.ask("read_back", *ours, is_watched) == [0, native.crc32c(own)]
                other = Lane(lane.worker, lane.peer, is_watched=is_watched)
                assert other.batch().run(lane.worker, is_put=False) is ucx.Outcome.DONE
            assert lane.batch().run(lane.worker, is_put=True) is ucx.Outcome.DONE
    assert lane.endpoint.failure is None
