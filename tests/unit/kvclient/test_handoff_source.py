"""What a claim says is held to itself, and block numbers to the pools that they are of."""

import time

import numpy as np
import pytest

from kvclient import BlockPool, BlockSizeError, ChecksumMismatchError, InvalidFieldError, MalformedError
from kvclient.handoff_messages import KnownMemory, claim, lent_pools, outcome, register_request
from kvclient.handoff_source import (
    Planners,
    block_checksums,
    check_checksums,
    check_targets,
    named_blocks,
    named_checksums,
    plan_parts,
    pool_buffers,
)
from kvproto.kv.v1 import block_pb2, handoff_service_pb2, lifecycle_service_pb2, segment_service_pb2
from kvservice import native
from kvservice.core.engine_memory import MemoryKind, SegmentWay
from kvservice.core.outcomes import ItemOutcome

KEYS = 3
SEGMENT_BYTES = 10 * 64
WAY = {"transport": "wire", "address": b"a", "key": b"k"}
LIFE = b"l" * 16


def pool_of(blocks=10, block_bytes=64, *, kind=MemoryKind.HOST, is_writable=True):
    """Return a pool of whole blocks with memory of its own, said to be of some kind."""
    memory = np.arange(blocks * block_bytes, dtype=np.uint32).astype(np.uint8).reshape(blocks, block_bytes)
    plain = BlockPool.of([memory])
    return BlockPool(plain.addresses, plain.geometry, kind, memory, is_writable=is_writable)


def u32(*numbers):
    """Return packed u32."""
    return np.array(numbers, np.uint32).tobytes()


def u64(*numbers):
    """Return packed u64."""
    return np.array(numbers, np.uint64).tobytes()


def layout(**changes):
    """Return a layout of ten blocks of 64 bytes over the first segment."""
    fields = {
        "piece_segments": u32(0),
        "piece_offsets_bytes": u64(0),
        "piece_strides_bytes": u64(64),
        "piece_lengths_bytes": u64(64),
        "blocks_count": 10,
    }
    return segment_service_pb2.BlockLayout(**(fields | changes))


def segment(**changes):
    """Return a segment of ten blocks."""
    fields = {"base_address": 1 << 20, "size_bytes": SEGMENT_BYTES, "memory_kind": 1, "ways": [WAY]}
    return segment_service_pb2.EngineSegment(**(fields | changes))


def answer_of(*, lease=None, choice=1, keys=bytes(range(96)), has_direct=True, **changes):
    """Return the answer to a claim of three keys, direct unless told."""
    fields = {
        "segments": [segment()],
        "layouts": [layout()],
        "layout_ids": [5],
        "blocks": u32(9, 0, 4),
        "checksums": u32(1, 2, 3),
    }
    answer = handoff_service_pb2.ClaimHandoffResponse(choice=choice, reason="why", keys=keys, lease=lease)
    answer.remaining.FromSeconds(10)
    if has_direct:
        answer.direct.CopyFrom(handoff_service_pb2.DirectSource(**(fields | changes)))
    return answer


def claim_of(answer, known=None, incarnation=LIFE):
    """Return what a client makes of an answer."""
    return claim(7, answer, 100.0, incarnation, KnownMemory() if known is None else known)


# ---- block numbers


@pytest.mark.parametrize(
    ("blocks", "parts", "expected"),
    [
        ([3, 1], 1, [[3], [1]]),
        ([3, 1], 2, [[3, 3], [1, 1]]),
        ([[3, 1], [0, 2**32 - 1]], 2, [[3, 1], [0, 2**32 - 1]]),
        ((), 3, np.empty((0, 3))),
        (np.empty((0, 2), np.int32), 2, np.empty((0, 2))),
        (np.array([5], np.uint64), 1, [[5]]),
        (range(3), 1, [[0], [1], [2]]),
    ],
)
def test_a_number_is_given_for_each_key_or_for_each_of_its_parts(blocks, parts, expected):
    """In whatever integers, and never more than the wire can say."""
    named = named_blocks(blocks, None, parts)
    assert named.dtype == np.uint32
    assert named.flags.c_contiguous
    assert np.array_equal(named, expected)


@pytest.mark.parametrize(
    ("blocks", "parts", "count", "says"),
    [
        ([1, 2], 1, 3, "blocks names 2 keys; 3 were given"),
        ((), 1, 1, "blocks names 0 keys"),
        ([[1, 2]], 3, 1, "blocks has shape"),
        ([[[1]]], 1, 1, "blocks has shape"),
        (7, 1, 1, "blocks has shape"),
        ([1.0], 1, 1, "blocks has dtype float64"),
        ([True], 1, 1, "blocks has dtype bool"),
        (["1"], 1, 1, "blocks has dtype"),
        ([None], 1, 1, "blocks has dtype object"),
        ([[1, 2], [3]], 2, 2, "blocks is no array"),
        ([-1], 1, 1, "blocks goes from -1"),
        ([2**32], 1, 1, "blocks goes from 4294967296"),
        (np.array([2**64 - 1], np.uint64), 1, 1, "blocks goes from 18446744073709551615"),
    ],
)
def test_what_are_no_block_numbers_is_refused(blocks, parts, count, says):
    """By field and value; nothing is cut down to 32 bits in silence."""
    with pytest.raises(InvalidFieldError, match=says):
        named_blocks(blocks, count, parts)


def test_checksums_of_a_caller_are_one_for_each_block():
    """Sums of another width, or of another number of blocks, would be other sums."""
    given = np.arange(6, dtype=np.uint32)
    assert named_checksums(given, 3, 2).tolist() == [[0, 1], [2, 3], [4, 5]]
    columns = np.asfortranarray(given.reshape(3, 2))
    assert named_checksums(columns, 3, 2).tobytes() == given.tobytes()
    for wrong in (given[:5], given.astype(np.int64), given.astype(">u4"), given.astype(float), [1, 2, 3], []):
        with pytest.raises(InvalidFieldError, match=r"checksums is an array .* \(3, 2\)"):
            named_checksums(wrong, 3, 2)


def test_targets_are_held_to_their_pools():
    """Before anything moves: a block that is not there, one for two keys, memory that cannot be written."""
    pools = [pool_of(4), pool_of(8)]
    check_targets(pools, named_blocks([[3, 7], [0, 0]], 2, 2))
    check_targets(pools, named_blocks((), 0, 2))
    for blocks, says in (
        ([[4, 0]], "block 4 of part 0; the pool has blocks 0 to 3"),
        ([[0, 2**32 - 1]], "block 4294967295 of part 1"),
        ([[1, 5], [2, 6], [3, 5]], "block 5 of part 1 for two keys"),
    ):
        with pytest.raises(InvalidFieldError, match=f"blocks names {says}"):
            check_targets(pools, named_blocks(blocks, None, 2))
    with pytest.raises(InvalidFieldError, match=r"into\[1\] is read-only"):
        check_targets([pools[0], pool_of(is_writable=False)], named_blocks([1], 1, 2))


# ---- checksums and buffers


def test_checksums_are_those_of_the_blocks_named():
    """Of each part's own pool, in the order of the keys."""
    memory = np.arange(10 * 64, dtype=np.uint32).astype(np.uint8).reshape(10, 64)
    halves = [np.ascontiguousarray(memory[:, :32]), np.ascontiguousarray(memory[:, 32:])]
    named = named_blocks([[9, 0], [3, 3]], 2, 2)
    sums = block_checksums([BlockPool.of([memory]), BlockPool.of(halves)], named)
    expected = np.zeros(10, np.uint32)
    pieces = BlockPool.of([memory]).pieces(np.arange(10))
    native.checksum_blocks(pieces.addresses, pieces.lengths, None, expected)
    assert sums.tolist() == [[expected[9], expected[0]], [expected[3], expected[3]]]
    check_checksums([BlockPool.of([memory]), BlockPool.of(halves)], named, sums)
    check_checksums([BlockPool.of([memory])], named[:, :1], np.zeros((2, 1), np.uint32))
    sums[1, 0] ^= 1
    with pytest.raises(ChecksumMismatchError, match=r"1 of 4 .* the first is block 2"):
        check_checksums([BlockPool.of([memory]), BlockPool.of(halves)], named, sums)


def test_memory_of_a_device_is_not_looked_at():
    """No checksum is made of it, and staged blocks go through memory of the host."""
    device = BlockPool([1 << 20], pool_of().geometry, MemoryKind.CUDA, None)
    named = named_blocks([1, 2], 2, 2)
    assert block_checksums([pool_of(), device], named) is None
    check_checksums([pool_of(), device], named, np.full((2, 2), 7, np.uint32))
    with pytest.raises(InvalidFieldError, match="into is device memory"):
        pool_buffers([pool_of(), device], named)


def test_buffers_are_key_major_over_the_parts():
    """As the slots of a lease are: key 0 part 0, key 0 part 1, and in each its pieces."""
    layers = [np.zeros((10, 8), np.uint8) for _ in range(2)]
    pools = [pool_of(), BlockPool.of(layers)]
    buffers = pool_buffers(pools, named_blocks([[1, 2], [3, 4]], 2, 2))
    first, (second, third) = int(pools[0].addresses[0]), pools[1].addresses.tolist()
    assert buffers.pieces.addresses.tolist() == [
        *(first + 64, second + 16, third + 16),
        *(first + 192, second + 32, third + 32),
    ]
    assert buffers.pieces.counts.tolist() == [1, 2, 1, 2]
    assert buffers.lengths.tolist() == [64, 16, 64, 16]


# ---- claims


def test_a_claim_is_understood():
    """Deadlines err to the short side; blocks and sums are by key and part."""
    found = claim_of(answer_of())
    assert (found.handoff_id, found.reason, found.deadline_s) == (7, "why", 110.0)
    assert found.source.blocks.tolist() == [[9], [0], [4]]
    assert found.source.checksums.tolist() == [[1], [2], [3]]
    assert found.source.geometries[0].blocks_count == 10
    assert found.source.segments[0].ways == (SegmentWay("wire", b"a", b"k"),)
    assert found.lease is None
    assert claim_of(answer_of(checksums=b"")).source.checksums is None


@pytest.mark.parametrize(
    "changes",
    [
        {"choice": 7},
        {"keys": bytes(95)},
        {"keys": bytes(64)},
        {"keys": b""},
        {"blocks": u32(1, 2)},
        {"blocks": bytes(11)},
        {"blocks": b""},
        {"checksums": u32(1)},
        {"checksums": bytes(3)},
        {"layouts": []},
        {"segments": []},
        {"segments": [segment(memory_kind=0)]},
        {"segments": [segment(memory_kind=9)]},
        {"segments": [segment(size_bytes=0)]},
        {"segments": [segment(base_address=2**64 - 1)]},
        {"segments": [segment(ways=[])]},
        {"segments": [segment(ways=[{"transport": ""}])]},
        {"segments": [segment(size_bytes=SEGMENT_BYTES - 1)]},
        {"segments": [segment(size_bytes=2**63)] * 2},
        {"layouts": [layout(piece_segments=bytes(3))]},
        {"layouts": [layout(piece_offsets_bytes=bytes(7))]},
        {"layouts": [layout(piece_strides_bytes=b"")]},
        {"layouts": [layout(piece_lengths_bytes=u64(64, 64))]},
        {"layouts": [layout(piece_segments=u32(1))]},
        {"layouts": [layout(piece_offsets_bytes=u64(2**64 - 64))]},
        {"layouts": [layout(blocks_count=0)]},
        {"layouts": [layout(blocks_count=11)]},
        {"layouts": [layout(), layout()]},
        {"lease": lifecycle_service_pb2.Lease(lease_id=1, keys_count=2)},
        {"lease": lifecycle_service_pb2.Lease(keys_count=3, slots=block_pb2.SlotArrays(segments=b"x"))},
    ],
)
def test_a_claim_that_contradicts_itself_is_malformed(changes):
    """It is the daemon's mistake, never read by, and never a ValueError of some library."""
    with pytest.raises(MalformedError, match=r"claim of handoff 7|a claim's"):
        claim_of(answer_of(**changes))


def test_memory_is_understood_once_for_each_name():
    """What layouts of one name mean never changes in one life of the daemon."""
    known = KnownMemory()
    first = claim_of(answer_of(), known).source
    again = claim_of(answer_of(blocks=u32(1, 2, 3)), known).source
    assert again.geometries[0] is first.geometries[0]
    assert again.blocks.tolist() == [[1], [2], [3]]
    moved = [segment(base_address=1 << 30)]
    for answer, incarnation in (
        (answer_of(layout_ids=[6], segments=moved), LIFE),
        (answer_of(segments=moved), b"m" * 16),
    ):
        assert claim_of(answer, known, incarnation).source.segments[0].base_address == 1 << 30


def test_memory_without_a_name_is_understood_each_time():
    """A daemon that names no layouts must not have one engine's memory taken for another's."""
    known = KnownMemory()
    for base_address in (1 << 20, 1 << 30):
        answer = answer_of(layout_ids=[], segments=[segment(base_address=base_address)])
        assert claim_of(answer, known).source.segments[0].base_address == base_address


def test_an_outcome_that_is_not_known_is_malformed():
    """Whether bytes are good is never guessed."""
    assert outcome(6) is ItemOutcome.DONE
    with pytest.raises(MalformedError, match="outcome 77"):
        outcome(77)


# ---- operations


def test_each_part_is_read_for_as_long_as_is_left():
    """The time is asked for anew, since the parts before have used some of it."""
    source = claim_of(
        answer_of(layouts=[layout()] * 2, layout_ids=[1, 2], blocks=u32(*range(6)), checksums=b"")
    ).source
    left_s = iter([5.0, 3.0])
    into, named = [pool_of(), pool_of()], named_blocks([4, 5, 6], 3, 2)
    reads = list(plan_parts(Planners(), source, into, source.blocks, named, left_s=lambda: next(left_s)))
    assert [read.timeout_s for read in reads] == [5.0, 3.0]
    for part, read in enumerate(reads):
        pairs = sorted(zip(read.offsets.tolist(), read.addresses.tolist(), strict=True))
        base = int(into[part].addresses[0])
        assert pairs == [((2 * key + part) * 64, base + (4 + key) * 64) for key in range(3)]
        assert read.lengths.tolist() == [64] * 3


def test_blocks_of_other_lengths_or_parts_are_not_planned():
    """Said as what it is, before an operation is made."""
    source = claim_of(answer_of()).source
    named = named_blocks([0, 1, 2], 3, 1)
    with pytest.raises(BlockSizeError, match="part 0 has 64 bytes where it is offered, and 128"):
        list(
            plan_parts(Planners(), source, [pool_of(block_bytes=128)], source.blocks, named, left_s=time.time)
        )
    with pytest.raises(MalformedError, match="1 parts are; they are 2"):
        list(plan_parts(Planners(), source, [pool_of()] * 2, source.blocks, named, left_s=time.time))


# ---- registration


def test_pools_are_registered_segment_after_segment():
    """Layouts name segments by their place in the one list that all pools share."""
    whole = np.zeros((2, 10, 64), np.uint8)
    pools = [BlockPool.of([np.zeros((10, 8), np.uint8) for _ in range(2)]), BlockPool.of([whole[1]])]
    ways = [(SegmentWay("wire", bytes([number]), b"k"),) for number in range(3)]
    request = register_request(pools, ways)
    assert [one.base_address for one in request.segments] == [
        *pools[0].addresses.tolist(),
        *pools[1].addresses.tolist(),
    ]
    assert [one.ways[0].address for one in request.segments] == [b"\0", b"\1", b"\2"]
    assert [one.piece_segments for one in request.layouts] == [u32(0, 1), u32(2)]
    assert request.layouts[1].piece_offsets_bytes == u64(640)
    answer = segment_service_pb2.RegisterSegmentsResponse(segment_ids=[11, 12, 13], layout_ids=[21, 22])
    lent = lent_pools(answer, pools, 4)
    assert [(one.layout_id, one.segment_ids, one.epoch) for one in lent] == [
        (21, (11, 12), 4),
        (22, (13,), 4),
    ]
    for segment_ids, layout_ids in (([11, 12, 13], [21]), ([11, 12], [21, 22]), ([11] * 4, [21, 22])):
        short = segment_service_pb2.RegisterSegmentsResponse(segment_ids=segment_ids, layout_ids=layout_ids)
        with pytest.raises(MalformedError, match="2 pools of 3 segments"):
            lent_pools(short, pools, 4)
