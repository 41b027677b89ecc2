"""The frame codec: layout, cutting a stream, and the error bodies."""

from __future__ import annotations

import contextlib
import re
from pathlib import Path

import pytest
from google.rpc import code_pb2, error_details_pb2, status_pb2
from hypothesis import given, settings
from hypothesis import strategies as st

from kvproto.kv.v1 import error_reason_pb2
from kvservice.core.errors import ERROR_BY_REASON, KvError, MalformedError, Reason
from kvservice.transports.frames import (
    HEADER_BYTES,
    MAX_FRAME_BYTES,
    Frame,
    FrameKind,
    FrameReader,
    decode_error,
    decode_header,
    encode,
    encode_error,
    status_of,
)
from kvservice.transports.status_codes import STATUS_BY_REASON, StatusCode

ROOT = Path(__file__).parents[3]
VALUE = re.compile(r"((?:^  //.*\n)+)  ERROR_REASON_(\w+) =", re.MULTILINE)

frames = st.builds(
    Frame,
    kind=st.sampled_from(FrameKind),
    method=st.integers(0, 0xFFFF),
    call_id=st.integers(0, 2**64 - 1),
    deadline_ms=st.integers(0, 2**32 - 1),
    body=st.binary(max_size=200),
)


def encoded(frame: Frame) -> bytes:
    """Return the bytes of a frame."""
    return encode(frame.kind, frame.method, frame.call_id, frame.deadline_ms, frame.body)


def test_a_frame_has_exactly_these_bytes():
    """The layout is fixed: other languages pack it by hand."""
    golden = bytes.fromhex("11000000010a000807060504030201e80300000801")
    body = b"\x08\x01"
    assert encode(FrameKind.REQUEST, 10, 0x0102030405060708, 1000, body) == golden
    assert FrameReader().feed(golden) == [Frame(FrameKind.REQUEST, 10, 0x0102030405060708, 1000, body)]


def test_a_long_deadline_is_cut_to_what_the_field_holds():
    """A deadline past the field's range travels as the longest one, not modulo."""
    frame, body_bytes = decode_header(encode(FrameKind.REQUEST, 1, 1, 2**40, b"xy"))
    assert (frame.deadline_ms, body_bytes) == (2**32 - 1, 2)


@settings(max_examples=50)
@given(st.lists(frames, max_size=4))
def test_any_frames_survive_the_round_trip_in_one_piece(sent):
    """What was encoded is what is read, in order, with nothing left over."""
    reader = FrameReader()
    assert reader.feed(b"".join(encoded(frame) for frame in sent)) == sent
    assert reader.is_empty


@settings(max_examples=20)
@given(frames, frames)
def test_a_stream_may_be_split_anywhere(first, second):
    """Frames come out once their last byte has come, wherever the stream is cut."""
    stream = encoded(first) + encoded(second)
    border = len(encoded(first))
    for cut in range(len(stream) + 1):
        reader = FrameReader()
        early = reader.feed(stream[:cut])
        assert early == [first, second][: (cut >= border) + (cut == len(stream))]
        assert early + reader.feed(stream[cut:]) == [first, second]


def test_a_stream_may_come_byte_by_byte():
    """The reader needs no more than one byte at a time."""
    sent = [Frame(FrameKind.STREAM, 5, 0, 0, b""), Frame(FrameKind.ERROR, 10, 3, 0, b"why")]
    reader = FrameReader()
    read = []
    for byte in b"".join(encoded(frame) for frame in sent):
        read += reader.feed(bytes([byte]))
    assert read == sent


def test_the_largest_frame_passes_and_a_larger_one_does_not():
    """The bound holds at both ends, to the byte."""
    room = MAX_FRAME_BYTES - (HEADER_BYTES - 4)
    largest = encode(FrameKind.RESPONSE, 1, 1, 0, bytes(room))
    reader = FrameReader()
    step = 1 << 20
    read = [frame for at in range(0, len(largest), step) for frame in reader.feed(largest[at : at + step])]
    assert [len(frame.body) for frame in read] == [room]
    with pytest.raises(MalformedError):
        encode(FrameKind.RESPONSE, 1, 1, 0, bytes(room + 1))


@pytest.mark.parametrize(
    "stream",
    [
        b"\x0e\x00\x00\x00",
        b"\x00\x00\x00\x00" + bytes(40),
        (MAX_FRAME_BYTES + 1).to_bytes(4, "little"),
        b"\xff\xff\xff\xff",
        b"\x0f\x00\x00\x00\x00",
        b"\x0f\x00\x00\x00\x05" + bytes(14),
    ],
    ids=["short", "zero", "long", "longest", "kind 0", "kind 5"],
)
def test_what_is_no_frame_is_malformed_at_once(stream):
    """A wrong length or kind is told as soon as it is there, and is never waited for."""
    with pytest.raises(MalformedError):
        FrameReader().feed(stream)
    reader = FrameReader()
    with pytest.raises(MalformedError):
        list(map(reader.feed, (bytes([byte]) for byte in stream)))


@given(st.lists(st.binary(max_size=40), max_size=6))
def test_random_bytes_wait_or_are_malformed(received):
    """Garbage gives frames, a wait for more, or MalformedError: nothing else."""
    reader = FrameReader()
    with contextlib.suppress(MalformedError):
        for part in received:
            for frame in reader.feed(part):
                assert frame.kind in FrameKind


@given(frames, st.integers(0, 300))
def test_a_truncated_frame_waits(frame, size):
    """The beginning of a frame is no error and no frame."""
    whole = encoded(frame)
    reader = FrameReader()
    part = whole[: min(size, len(whole) - 1)]
    assert reader.feed(part) == []
    assert reader.is_empty == (not part)


@pytest.mark.parametrize("reason", Reason)
def test_every_reason_survives_the_round_trip(reason):
    """An error comes back as the same class, with its message and its retry hint."""
    error_type = ERROR_BY_REASON.get(reason, KvError)
    for retry_after_ms in (None, 0, 1500):
        sent = error_type("what is wrong, and what to do", retry_after_ms=retry_after_ms)
        received = decode_error(encode_error(sent))
        assert type(received) is error_type
        assert (received.message, received.retry_after_ms) == (sent.message, retry_after_ms)


@pytest.mark.parametrize("reason", Reason)
def test_every_reason_has_the_code_that_the_protocol_states(reason):
    """The table agrees with the comments of error_reason.proto and with google.rpc.Code."""
    code = STATUS_BY_REASON[reason]
    assert code_pb2.Code.Value(code.name) == code
    assert error_reason_pb2.ErrorReason.Value(f"ERROR_REASON_{reason.name}") == reason
    assert status_of(ERROR_BY_REASON.get(reason, KvError)("why")).code == code


def test_the_table_is_the_one_in_the_proto():
    """Each code written beside a reason in the .proto is the one that is sent."""
    source = (ROOT / "protos/kv/v1/error_reason.proto").read_text()
    stated = {}
    for comment, name in VALUE.findall(source):
        codes = [code for code in StatusCode if f"({code.name}" in comment]
        stated[name] = codes[0] if codes else StatusCode.UNKNOWN
    assert stated == {reason.name: code for reason, code in STATUS_BY_REASON.items()}


def test_a_reason_of_a_later_version_is_a_plain_error():
    """An unknown reason, or one of another domain, keeps its message and loses its class."""
    for info in (
        error_details_pb2.ErrorInfo(domain="kvservice", reason="OF_NEXT_YEAR"),
        error_details_pb2.ErrorInfo(domain="example.org", reason="MALFORMED"),
    ):
        status = status_pb2.Status(code=9, message="later")
        status.details.add().Pack(info)
        received = decode_error(status.SerializeToString())
        assert type(received) is KvError
        assert received.message == "later"


@given(st.binary(max_size=300), st.integers(0, 299))
def test_no_error_body_makes_the_reader_fail(garbage, at):
    """decode_error returns a KvError whatever it is given."""
    assert isinstance(decode_error(garbage), KvError)
    body = bytearray(encode_error(ERROR_BY_REASON[Reason.ARENA_FULL]("full", retry_after_ms=9)))
    body[at % len(body)] ^= 1 + at % 255
    assert isinstance(decode_error(bytes(body)), KvError)
