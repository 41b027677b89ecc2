"""The bytes of v1 on the wire, written out: what an older or a foreign client sends must go on being read."""

from __future__ import annotations

import pytest
from google.rpc import error_details_pb2, status_pb2

from kvproto.kv.v1 import (
    block_pb2,
    capabilities_service_pb2,
    error_reason_pb2,
    event_service_pb2,
    lifecycle_service_pb2,
    local_lane_pb2,
    representation_pb2,
    session_service_pb2,
    tier_service_pb2,
)
from kvservice.core.errors import ArenaFullError
from kvservice.ports.methods import Method
from kvservice.transports.frames import FrameKind, FrameReader, decode_error, encode, encode_error

KEY = bytes(range(32))

GOLDEN = {
    "AttachRequest": (
        session_service_pb2.AttachRequest(
            engine_incarnation=b"0123456789abcdef", client_name="name", resume_token=b"tok"
        ),
        "0a10" + b"0123456789abcdef".hex() + "12046e616d65" + "1a03746f6b",
    ),
    "LookupRequest": (
        lifecycle_service_pb2.LookupRequest(
            space_ids=[1, 300], keys=KEY, acquire=True, lease_ttl={"seconds": 5}
        ),
        "0a0301ac02" + "1220" + KEY.hex() + "1801" + "22020805",
    ),
    "ReserveRequest": (
        lifecycle_service_pb2.ReserveRequest(request_id=b"r" * 16, space_ids=[7], keys=KEY),
        "0a10" + "72" * 16 + "120107" + "1a20" + KEY.hex(),
    ),
    "ReserveResponse": (
        lifecycle_service_pb2.ReserveResponse(
            reservation_id=1 << 40,
            outcomes=bytes([4, 5, 3]),
            slots=block_pb2.SlotArrays(
                segments=b"\2\0\0\0", granules=b"\1\0\0\0", generations=b"\x09" + bytes(7)
            ),
            remaining={"seconds": 10},
        ),
        "0880808080802012030405031a160a04020000001204010000001a0809000000000000002202080a",
    ),
    "CommitRequest": (
        lifecycle_service_pb2.CommitRequest(
            reservation_id=3, checksums=bytes.fromhex("04030201" + "ffffffff")
        ),
        "0803" + "1208" + "04030201" + "ffffffff",
    ),
    "SlotArrays": (
        block_pb2.SlotArrays(segments=b"s", granules=b"g", generations=b"n", checksums=b"c"),
        "0a0173" + "120167" + "1a016e" + "220163",
    ),
    "HeartbeatRequest": (
        session_service_pb2.HeartbeatRequest(
            lease_ids=[1],
            reservation_ids=[2],
            acknowledged_ids=[3],
            touched_segments=[4],
            touched_granules=[5],
        ),
        "0a0101" + "120102" + "1a0103" + "220104" + "2a0105",
    ),
    "StreamResponse": (
        session_service_pb2.StreamResponse(revoked_ids=[1, 2], draining=True),
        "12020102" + "1801",
    ),
    "BlockEvent": (
        event_service_pb2.BlockEvent(
            sequence=1, kind=event_service_pb2.BlockEvent.KIND_REMOVED, space_id=3, keys=KEY
        ),
        "0801" + "1002" + "2003" + "2a20" + KEY.hex(),
    ),
    "WatchEventsRequest": (event_service_pb2.WatchEventsRequest(after_sequence=0), "1000"),
    "Part": (
        representation_pb2.Part(
            kv_group=1, layers_count=2, heads_count=3, shape={"dtype": "float32"}, block_bytes=4096
        ),
        "0801" + "1802" + "2803" + "32090a07" + b"float32".hex() + "388020",
    ),
    "TransferRequest": (
        local_lane_pb2.TransferRequest(session_token=b"t", capability_id=1, slot_indexes=[0, 1]),
        "0a0174" + "1001" + "1a020001",
    ),
    "MapSegmentsRequest": (
        local_lane_pb2.MapSegmentsRequest(segments=[1], directory=True),
        "0a0101" + "1001",
    ),
    "PurgeNamespaceRequest": (tier_service_pb2.PurgeNamespaceRequest(namespace_id=KEY), "0a20" + KEY.hex()),
    "Limits": (
        capabilities_service_pb2.Limits(max_batch_keys=1, max_block_bytes=2, segment_bytes=8),
        "0801" + "1002" + "4008",
    ),
}


@pytest.mark.parametrize("name", GOLDEN)
def test_a_message_has_its_bytes(name):
    """Field numbers and types never change within v1; packed arrays stay packed."""
    message, golden = GOLDEN[name]
    assert message.SerializeToString(deterministic=True).hex() == golden
    assert type(message).FromString(bytes.fromhex(golden)) == message


def test_a_field_that_is_not_known_is_passed_over():
    """A newer client may say more: unknown fields do no harm."""
    packed = bytes.fromhex("0803") + bytes.fromhex("ba1f036e6577")
    assert lifecycle_service_pb2.AbortRequest.FromString(packed).reservation_id == 3


def test_a_frame_has_its_bytes():
    """Length, kind, method, call id and deadline, little endian, then the message."""
    body = session_service_pb2.StreamResponse(draining=True).SerializeToString()
    golden = bytes.fromhex("11000000" + "01" + "0b00" + "0807060504030201" + "e8030000" + "1801")
    assert encode(FrameKind.REQUEST, Method.RESERVE, 0x0102030405060708, 1000, body) == golden
    (frame,) = FrameReader().feed(golden)
    assert (frame.kind, frame.method, frame.call_id) == (
        FrameKind.REQUEST,
        Method.RESERVE,
        0x0102030405060708,
    )
    assert (frame.deadline_ms, frame.body) == (1000, body)


def test_an_error_has_its_bytes():
    """An error is a google.rpc.Status with an ErrorInfo and a RetryInfo, as any gRPC client reads them."""
    packed = encode_error(ArenaFullError("full", retry_after_ms=50))
    info = bytes.fromhex("0a0a") + b"ARENA_FULL" + bytes.fromhex("1209") + b"kvservice"
    retry = bytes.fromhex("0a05" + "1080e1eb17")
    assert info == error_details_pb2.ErrorInfo(reason="ARENA_FULL", domain="kvservice").SerializeToString()
    golden = b"\x08\x08\x12\x04full"
    for name, value in (("ErrorInfo", info), ("RetryInfo", retry)):
        url = f"type.googleapis.com/google.rpc.{name}".encode()
        detail = b"\x0a" + bytes([len(url)]) + url + b"\x12" + bytes([len(value)]) + value
        golden += b"\x1a" + bytes([len(detail)]) + detail
    assert packed == golden
    assert status_pb2.Status.FromString(packed).code == 8
    error = decode_error(golden)
    assert (type(error), error.message, error.retry_after_ms) == (ArenaFullError, "full", 50)


def test_the_numbers_of_the_enums_stay():
    """Numbers are never reused: outcomes and reasons travel as numbers and names."""
    outcomes = dict(block_pb2.ItemOutcome.items())
    assert [outcomes[f"ITEM_OUTCOME_{name}"] for name in ("HIT", "MISS", "PENDING", "GRANTED")] == [
        1,
        2,
        3,
        4,
    ]
    assert outcomes["ITEM_OUTCOME_UNKNOWN"] == 10
    reasons = dict(error_reason_pb2.ErrorReason.items())
    assert reasons["ERROR_REASON_INVALID_FIELD"] == 1
    assert reasons["ERROR_REASON_STALE_INCARNATION"] == 14
    assert reasons["ERROR_REASON_ARENA_FULL"] == 17
    assert reasons["ERROR_REASON_INCOMPLETE_BLOCK"] == 28
    assert reasons["ERROR_REASON_SEGMENT_IN_USE"] == 35
    methods = [1, 2, 3, 4, 5, *range(10, 18), 20, 21, 30, 40, *range(50, 53), 60, 61, *range(70, 76), 80, 81]
    assert [int(one) for one in Method] == methods
