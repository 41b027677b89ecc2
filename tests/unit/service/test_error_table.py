"""One table of errors for every edge: proto, core and codes say the same."""

import re
from pathlib import Path

import pytest

from kvproto.kv.v1 import error_reason_pb2
from kvservice.core.errors import ERROR_BY_REASON, KvError, Reason
from kvservice.transports.frames import decode_error, encode_error, status_of
from kvservice.transports.status_codes import STATUS_BY_REASON, StatusCode

PROTO = Path(__file__).resolve().parents[3] / "protos/kv/v1/error_reason.proto"
PREFIX = "ERROR_REASON_"
REASONS = [reason for reason in Reason if reason is not Reason.UNSPECIFIED]


def documented():
    """Return the code, and whether a retry hint is promised, that the comment of each reason states."""
    text = PROTO.read_text()
    found = {}
    for comment, name in re.findall(r"((?:  //[^\n]*\n)+)  ERROR_REASON_(\w+) = \d+;", text):
        words = " ".join(line.strip().removeprefix("//").strip() for line in comment.splitlines())
        code = re.search(r"\(([A-Z_]{5,})([^)]*)\)", words)
        if code is not None:
            found[name] = (code[1], "RetryInfo" in code[2])
    return found


def test_core_and_proto_have_the_same_numbers():
    """The core cannot import the proto, so this holds the two together."""
    assert {reason.name: int(reason) for reason in Reason} == {
        name.removeprefix(PREFIX): number for name, number in error_reason_pb2.ErrorReason.items()
    }


def test_every_reason_has_one_class_and_one_code():
    """No failure is without a name, and none has two."""
    assert set(ERROR_BY_REASON) == set(REASONS)
    assert set(STATUS_BY_REASON) == set(Reason)
    assert all(ERROR_BY_REASON[reason].reason is reason for reason in REASONS)


@pytest.mark.parametrize("reason", REASONS, ids=lambda reason: reason.name)
def test_the_code_is_the_documented_one(reason):
    """What error_reason.proto promises is what goes out."""
    code, _ = documented()[reason.name]
    assert STATUS_BY_REASON[reason] is StatusCode[code]


@pytest.mark.parametrize("reason", REASONS, ids=lambda reason: reason.name)
def test_an_error_survives_the_wire(reason):
    """Class, words and hint come out as they went in."""
    for hint in (None, 0, 50):
        error = ERROR_BY_REASON[reason](f"what of {reason.name}", retry_after_ms=hint)
        again = decode_error(encode_error(error))
        assert type(again) is type(error)
        assert (again.message, again.retry_after_ms) == (error.message, hint)
        assert status_of(error).code == STATUS_BY_REASON[reason]


def test_an_error_of_the_future_is_still_an_error():
    """A reason that this version does not know gives a plain KvError, with its words."""
    status = status_of(KvError("words"))
    packed = status.SerializeToString().replace(b"UNSPECIFIED", b"FROM_FUTURE")
    assert b"FROM_FUTURE" in packed
    again = decode_error(packed)
    assert type(again) is KvError
    assert again.message == "words"
    assert type(decode_error(b"\xff\xff")) is KvError
