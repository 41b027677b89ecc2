"""Engines' own memory: what may be registered, who keeps it, and when it may go."""

import dataclasses

import pytest

from kvservice.core.block_geometry import POSITION_LIMIT, BlockGeometry
from kvservice.core.engine_memory import (
    ADDRESS_LIMIT,
    EngineSegment,
    KnownLayout,
    KnownSegment,
    MemoryKind,
    SegmentWay,
    shared_transports,
)
from kvservice.core.errors import (
    DrainingError,
    InvalidFieldError,
    KvError,
    LimitReachedError,
    SegmentInUseError,
    SegmentUnknownError,
    SessionUnknownError,
)
from kvservice.core.events import Drain
from kvservice.core.limits import (
    LAYOUTS_PER_CALL_LIMIT,
    SEGMENTS_PER_CALL_LIMIT,
    WAY_BYTES_LIMIT,
    WAYS_LIMIT,
)
from kvservice.core.records import HandoffState
from tests.core_world import OTHER_ENGINE, SMALL_BYTES, World, block_layout

SEGMENT_BYTES = 64 << 10
WAY = SegmentWay("ucx", b"address", b"key")


def segment(size_bytes: int = SEGMENT_BYTES, *, base_address: int = 0x1000, ways=(WAY,)) -> EngineSegment:
    """Return memory of the host."""
    return EngineSegment(base_address, size_bytes, MemoryKind.HOST, tuple(ways))


def layout(*pieces: tuple[int, int, int, int], sizes=(SEGMENT_BYTES,)) -> BlockGeometry:
    """Return a layout of two blocks, over one segment unless told, with pieces of its own."""
    return block_layout(*(pieces or [(0, 0, 64, 64)]), sizes=sizes)


def known(*transports: tuple[str, ...], used=None) -> KnownLayout:
    """Return a layout with one segment for each tuple of transports, all in use unless told."""
    segments = tuple(
        KnownSegment(100 + index, segment(ways=[SegmentWay(name, b"", b"") for name in names]), b"token")
        for index, names in enumerate(transports)
    )
    pieces = [(index, 0, 64, 64) for index in (range(len(transports)) if used is None else used)]
    sizes = [each.segment.size_bytes for each in segments]
    return KnownLayout(1, layout(*pieces, sizes=sizes), segments, b"token")


# ---- values


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"transport": ""}, "ways.transport is empty"),
        ({"address": bytes(WAY_BYTES_LIMIT + 1)}, f"ways.address has {WAY_BYTES_LIMIT + 1} bytes"),
        ({"key": bytes(WAY_BYTES_LIMIT + 1)}, f"ways.key has {WAY_BYTES_LIMIT + 1} bytes"),
    ],
)
def test_a_way_holds_to_its_limits(fields, named):
    """An address that does not fit is refused where it enters, not where it is used."""
    with pytest.raises(InvalidFieldError, match=named):
        dataclasses.replace(WAY, **fields)
    at_most = dataclasses.replace(WAY, address=bytes(WAY_BYTES_LIMIT), key=bytes(WAY_BYTES_LIMIT))
    assert len(at_most.key) == WAY_BYTES_LIMIT


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"size_bytes": 0}, "is no memory"),
        ({"size_bytes": ADDRESS_LIMIT + 1}, "is no memory"),
        ({"base_address": 0}, "is no memory"),
        ({"base_address": ADDRESS_LIMIT + 1}, "is no memory"),
        ({"ways": ()}, "segments.ways has 0 entries"),
        ({"ways": (WAY,) * (WAYS_LIMIT + 1)}, "segments.ways has 9 entries"),
    ],
)
def test_a_segment_is_memory_that_can_be_reached(changes, named):
    """It has an address, a size and a way; sums of address and size never wrap."""
    with pytest.raises(InvalidFieldError, match=named):
        segment(**changes)
    assert segment(ADDRESS_LIMIT, base_address=ADDRESS_LIMIT, ways=(WAY,) * WAYS_LIMIT)


def test_a_segment_knows_its_transports_once():
    """Two ways of one transport are lanes of it."""
    lanes = (WAY, dataclasses.replace(WAY, address=b"other"), SegmentWay("tcp", b"", b""))
    assert segment(ways=lanes).transports == {"ucx", "tcp"}


def test_the_bytes_of_a_block_do_not_wrap():
    """Lengths that add up to 2**64 and 4,096 are no block of 4,096 bytes: there is no room for them."""
    most, quarter = POSITION_LIMIT - 2, POSITION_LIMIT // 4
    assert block_layout((0, 0, most, most), blocks_count=1, sizes=[most]).block_bytes == most
    pieces = [(0, (index % 3) * quarter, quarter, quarter) for index in range(16)]
    with pytest.raises(InvalidFieldError, match="shares bytes with piece"):
        block_layout(*pieces, (0, most - 4096, 4096, 4096), blocks_count=1, sizes=[most])
    with pytest.raises(InvalidFieldError, match="sum of segment_sizes_bytes"):
        block_layout((0, 0, most, most), (1, 0, most, most), blocks_count=1, sizes=[most, most])


def test_a_layout_is_reached_by_what_leads_to_all_of_its_segments():
    """Half a block is none; a segment that it does not use has no say."""
    assert known(("ucx", "tcp"), ("tcp", "shm")).transports == {"tcp"}
    assert known(("ucx",), ("tcp",)).transports == frozenset()
    assert known(("ucx",), ("tcp",), used=[1]).transports == {"tcp"}


def test_layouts_are_reached_by_what_leads_to_all_of_them():
    """Without a layout there is no memory, and no way to it."""
    layouts = (known(("ucx", "tcp")), known(("tcp", "shm"), ("tcp",)))
    assert shared_transports(layouts) == {"tcp"}
    assert shared_transports(layouts[:1]) == {"ucx", "tcp"}
    assert shared_transports(()) == frozenset()


# ---- registering


@pytest.fixture
def world():
    """Give a world whose sessions may register little."""
    return World(max_engine_segments=4, max_layouts=3)


@pytest.fixture
def client(world):
    """Give a local process of an engine."""
    return world.attach()


def memory_of(world) -> tuple:
    """Return what the books know of engines' memory and of handoffs from it."""
    books = world.books
    return (
        sorted(books.engine_segments),
        sorted(books.layouts),
        sorted(books.handoffs),
        [(sorted(s.segments), sorted(s.layouts)) for s in books.sessions.values()],
    )


def test_what_is_registered_gets_numbers_in_order(world, client):
    """Each call makes another set; numbers are never used again."""
    over = [layout((at, 0, 64, 64), sizes=[128, 256]) for at in (1, 0)]
    first = client.register([segment(128), segment(256)], over)
    assert (len(first.segment_ids), len(first.layout_ids)) == (2, 2)
    books = world.books
    assert [books.engine_segments[i].segment.size_bytes for i in first.segment_ids] == [128, 256]
    assert [books.layouts[i].layout.segments.tolist() for i in first.layout_ids] == [[1], [0]]
    assert {books.layouts[i].segments[1].segment_id for i in first.layout_ids} == {first.segment_ids[1]}
    again = client.register([segment(128)], [])
    assert not set(again.segment_ids) & set(first.segment_ids)
    assert again.layout_ids == ()


@pytest.mark.parametrize(
    ("segments_count", "layouts_count", "error", "named"),
    [
        (0, 0, InvalidFieldError, "segments has 0 entries"),
        (SEGMENTS_PER_CALL_LIMIT + 1, 0, InvalidFieldError, "segments has 257 entries"),
        (1, LAYOUTS_PER_CALL_LIMIT + 1, InvalidFieldError, "layouts has 257 entries"),
        (4, 0, LimitReachedError, "would have 5 segments .*max_engine_segments"),
        (1, 3, LimitReachedError, "would have 4 layouts .*max_layouts"),
    ],
)
def test_a_session_registers_so_much_and_no_more(world, client, segments_count, layouts_count, error, named):
    """Of one call and of one session; what is refused leaves nothing behind."""
    client.register([segment()], [layout()])
    before = memory_of(world)
    with pytest.raises(error, match=named):
        client.register([segment()] * segments_count, [layout()] * layouts_count)
    assert memory_of(world) == before
    assert client.register([segment()] * 3, [layout(sizes=[SEGMENT_BYTES] * 3)] * 2).layout_ids


@pytest.mark.parametrize("sizes", [(SEGMENT_BYTES + 1,), (SEGMENT_BYTES, 64), (SEGMENT_BYTES - 1,)])
def test_one_layout_over_other_segments_registers_nothing(world, client, sizes):
    """It was held to the bounds of other memory, and its blocks may lie outside this. All or nothing."""
    before = memory_of(world)
    with pytest.raises(InvalidFieldError, match=r"layouts\[1\] is over .* those of the call have \[65536\]"):
        client.register([segment()], [layout(), layout(sizes=sizes)])
    assert memory_of(world) == before
    assert len(client.register([segment()], [layout(), layout()]).layout_ids) == 2


def test_a_stopping_daemon_takes_no_segments(world, client):
    """What it has, it can still forget."""
    known_before = client.register([segment()], [])
    world.handle(Drain())
    with pytest.raises(DrainingError) as refused:
        client.register([segment()], [])
    assert refused.value.retry_after_ms
    assert client.unregister(*known_before.segment_ids) == 1


def test_the_dead_register_nothing(client):
    """Nor do they forget anything: a token without a session has no memory."""
    client.leave()
    for verb in (lambda: client.register([segment()], []), lambda: client.unregister(1)):
        with pytest.raises(SessionUnknownError):
            verb()


# ---- forgetting


def test_unregistering_is_idempotent_and_ones_own_affair(world, client):
    """What is not there, or is another session's, is passed over; layouts go with their segments."""
    both = layout((0, 0, 64, 64), (1, 0, 64, 64), sizes=[SEGMENT_BYTES] * 2)
    mine = client.register([segment(), segment()], [both])
    peer, stranger = world.attach(), world.attach("bolt", engine=OTHER_ENGINE)
    for other in (peer, stranger):
        assert other.unregister(*mine.segment_ids) == 0
    assert client.unregister(mine.segment_ids[0], mine.segment_ids[0], 12345) == 1
    assert memory_of(world)[:2] == ([mine.segment_ids[1]], [])
    assert client.unregister(*mine.segment_ids) == 1
    assert client.unregister(*mine.segment_ids) == 0


def test_a_layout_of_other_segments_stays(world, client):
    """Forgetting one of the segments that were registered together is nothing to the rest."""
    spaces = client.open()
    sizes = [SEGMENT_BYTES] * 2
    over = [layout((0, 0, SMALL_BYTES, SMALL_BYTES), sizes=sizes), layout((1, 0, 64, 64), sizes=sizes)]
    mine = client.register([segment(), segment()], over)
    offered = client.offer(spaces, [1], layouts=mine.layout_ids[:1])
    claimer = world.attach(engine=OTHER_ENGINE)
    claimer.claim(offered.handoff_id, claimer.open())
    assert client.unregister(mine.segment_ids[1]) == 1
    assert memory_of(world)[:2] == ([mine.segment_ids[0]], [mine.layout_ids[0]])
    with pytest.raises(SegmentInUseError):
        client.unregister(mine.segment_ids[0])


def test_what_is_offered_but_not_claimed_goes_with_its_segments(world, client):
    """Nobody can be reading it, so there is nothing to wait for; the one who offered is told."""
    spaces, pools = client.open(), client.register_pools()
    offered = client.offer(spaces, [1], layouts=pools.layout_ids)
    assert client.unregister(*pools.segment_ids) == 1
    (notice,) = client.beat().notices
    assert (notice.handoff_id, notice.state, notice.is_released, notice.reason) == (
        offered.handoff_id,
        HandoffState.ABORTED,
        True,
        "its segments are gone",
    )
    with pytest.raises(SegmentUnknownError):
        client.offer(spaces, [1], layouts=pools.layout_ids)


def test_memory_that_somebody_may_read_is_kept(world, client):
    """While it is claimed, and after its end until the readers have let go: only then it may be unmapped."""
    spaces, pools = client.open(), client.register_pools()
    claimer = world.attach(engine=OTHER_ENGINE)
    offered = client.offer(spaces, [1], layouts=pools.layout_ids)
    claimer.claim(offered.handoff_id, claimer.open())
    waiting = client.offer(spaces, [2], layouts=pools.layout_ids)
    before = memory_of(world)
    with pytest.raises(SegmentInUseError, match=f"handoffs .{offered.handoff_id}. may be reading"):
        client.unregister(*pools.segment_ids)
    assert memory_of(world) == before
    client.abort_handoff(offered.handoff_id)
    with pytest.raises(SegmentInUseError):
        client.unregister(*pools.segment_ids)
    assert client.look(waiting.handoff_id).state is HandoffState.OFFERED
    claimer.beat(acknowledged=[offered.handoff_id])
    assert client.unregister(*pools.segment_ids) == 1
    assert client.look(waiting.handoff_id).state is HandoffState.ABORTED


def test_memory_that_nobody_reads_may_go_while_the_arena_is_read(world, client):
    """A claim that goes through the arena has released it, and is none of its owner's segments' affair."""
    spaces, pools = client.open(), client.register_pools()
    client.put(spaces, [1])
    claimer = world.attach(engine=OTHER_ENGINE)
    offered = client.offer(spaces, [1], layouts=pools.layout_ids)
    claim = claimer.claim(offered.handoff_id, claimer.open())
    assert claim.lease is not None
    assert client.unregister(*pools.segment_ids) == 1
    assert claimer.complete(offered.handoff_id).name == "DONE"


def test_the_memory_of_a_dead_process_is_forgotten(world, client):
    """With everything that was offered from it, by whichever process of its engine."""
    worker = world.attach()
    pools = worker.register_pools()
    offered = client.offer(client.open(), [1], layouts=pools.layout_ids)
    worker.leave()
    assert memory_of(world)[:3] == ([], [], [])
    (notice,) = client.beat().notices
    assert (notice.handoff_id, notice.state, notice.is_released) == (
        offered.handoff_id,
        HandoffState.ABORTED,
        True,
    )


def test_an_engine_offers_its_own_memory_only(world, client):
    """The memory of another engine, or of another tenant's engine of the same name, is not there."""
    spaces = client.open()
    layouts = [
        world.attach(engine=OTHER_ENGINE).register_pools().layout_ids,
        world.attach("bolt").register_pools().layout_ids,
        (999_999,),
    ]
    for layout_ids in layouts:
        with pytest.raises(SegmentUnknownError, match=str(layout_ids[0])):
            client.offer(spaces, [1], layouts=layout_ids)
    assert issubclass(SegmentUnknownError, KvError)
    peer = world.attach().register_pools()
    assert client.offer(spaces, [1], layouts=peer.layout_ids).handoff_id
