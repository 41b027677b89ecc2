"""Messages of engines' memory to events: what cannot be is refused by the name of its field."""

import numpy as np
import pytest

from kvproto.kv.v1 import segment_service_pb2
from kvservice.core.errors import InvalidFieldError
from kvservice.core.limits import LAYOUTS_PER_CALL_LIMIT, SEGMENTS_PER_CALL_LIMIT
from kvservice.service.handoff_mapping import register_event

TOKEN = b"token"
SIZE_BYTES = 256


def segment() -> segment_service_pb2.EngineSegment:
    """Return memory of the host."""
    way = segment_service_pb2.SegmentWay(transport="ucx")
    return segment_service_pb2.EngineSegment(
        base_address=0x1000,
        size_bytes=SIZE_BYTES,
        memory_kind=segment_service_pb2.MEMORY_KIND_HOST,
        ways=[way],
    )


def layout(**changes) -> segment_service_pb2.BlockLayout:
    """Return two blocks of 64 bytes in the last of two segments."""
    fields = {
        "piece_segments": np.array([1], "<u4").tobytes(),
        "piece_offsets_bytes": np.array([128], "<u8").tobytes(),
        "piece_strides_bytes": np.array([64], "<u8").tobytes(),
        "piece_lengths_bytes": np.array([64], "<u8").tobytes(),
        "blocks_count": 2,
    }
    return segment_service_pb2.BlockLayout(**(fields | changes))


def registered(segments, layouts):
    """Return the event of a request."""
    request = segment_service_pb2.RegisterSegmentsRequest(segments=segments, layouts=layouts)
    return register_event(TOKEN, request)


def test_a_layout_is_a_geometry_over_all_segments_of_its_request():
    """Its numbers are those of the message, and its bounds are those of the memory beside it."""
    event = registered([segment(), segment()], [layout()])
    (geometry,) = event.layouts
    assert (event.token, len(event.segments)) == (TOKEN, 2)
    assert geometry.segment_sizes_bytes.tolist() == [SIZE_BYTES, SIZE_BYTES]
    columns = (geometry.segments, geometry.offsets, geometry.strides, geometry.lengths)
    assert [column.tolist() for column in columns] == [[1], [128], [64], [64]]
    assert (geometry.blocks_count, geometry.block_bytes) == (2, 64)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"blocks_count": 3}, r"layouts\[1\]: geometry\.offsets\[0\] = 128: .* ends at byte 320"),
        ({"blocks_count": 0}, r"layouts\[1\]: geometry\.blocks_count = 0"),
        ({"piece_lengths_bytes": b""}, r"layouts\[1\]: geometry has 1 segments, .* and 0 lengths"),
        ({"piece_segments": bytes(3)}, r"layouts\[1\]\.piece_segments has 3 bytes"),
        ({"piece_offsets_bytes": bytes(7)}, r"layouts\[1\]\.piece_offsets_bytes has 7 bytes"),
        ({"piece_strides_bytes": bytes(9)}, r"layouts\[1\]\.piece_strides_bytes has 9 bytes"),
        ({"piece_lengths_bytes": bytes(1)}, r"layouts\[1\]\.piece_lengths_bytes has 1 bytes"),
    ],
)
def test_a_layout_that_cannot_be_is_named(changes, named):
    """By its place in the request, and by what of it is wrong: a client may register hundreds."""
    with pytest.raises(InvalidFieldError, match=named):
        registered([segment(), segment()], [layout(), layout(**changes)])


@pytest.mark.parametrize(
    ("segments_count", "layouts_count", "named"),
    [
        (0, 1, "segments has 0 entries"),
        (SEGMENTS_PER_CALL_LIMIT + 1, 1, "segments has 257 entries"),
        (2, LAYOUTS_PER_CALL_LIMIT + 1, "layouts has 257 entries"),
    ],
)
def test_too_much_is_refused_before_it_is_looked_at(segments_count, layouts_count, named):
    """The work grows with what one message may hold, so the bounds come first: each layout here is wrong."""
    wrong = layout(blocks_count=0)
    with pytest.raises(InvalidFieldError, match=named):
        registered([segment()] * segments_count, [wrong] * layouts_count)
