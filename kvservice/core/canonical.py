"""The one canonical binary encoding, of which digests are taken.

Little endian, no padding; golden bytes are fixed in tests/unit/core:

    version  u8     1
    then for each field, tags ascending:
    tag      u16    what the value is (see below)
    type     u8     1 number, 2 text, 3 bytes, 4 list of numbers
    length   u32    of the payload, in bytes
    payload         number: u64; text: its exact UTF-8; bytes: as they are; list: u64 after u64

Every field is written, also when it is empty or zero, so that nothing depends on a
default. Text is not normalised: two spellings of a name are two names, which costs a
miss, where folding them together could serve the wrong KV. Type and length stand
before each payload, so the encoding can be decoded, and no two values share one.

Tags are unique over everything that is encoded: the family in the high byte, the field
number of the .proto file in the low byte. So bytes of one family are never those of
another, and a digest says which family it is of.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from enum import IntEnum

from kvservice.core.errors import InvalidFieldError, invariant

VERSION = 1
"""First byte of every encoding; `GetCapabilitiesResponse.representation_versions`."""

DIGEST_BYTES = 32

MAX_PAYLOAD_BYTES = 2**20
"""Bound of one payload. The fields that are encoded have bounds of their own, far below."""

U32_MAX = 2**32 - 1
U64_MAX = 2**64 - 1

_HEADER = struct.Struct("<HBI")


class Family(IntEnum):
    """High byte of the tags: what kind of thing is encoded. Numbers are never reused."""

    IDENTITY = 1
    SHAPE = 2
    PART = 3
    NAMESPACE = 4


@dataclass(frozen=True, slots=True)
class Field:
    """One field: its number in its family (1..255) and its value."""

    number: int
    value: int | str | bytes | tuple[int, ...]


def encode(family: Family, fields: Iterable[Field]) -> bytes:
    """Encode fields, which come with their numbers ascending.

    Raises:
        InvalidFieldError: a number outside u64, text with a lone surrogate, a payload above 1 MiB.
        InvariantError: the declaration itself is wrong (numbers, order or types).

    """
    encoded = bytearray((VERSION,))
    last_number = 0
    for field in fields:
        invariant(last_number < field.number <= 255, f"field number {field.number} after {last_number}")  # noqa: PLR2004
        last_number = field.number
        kind, payload = _payload(field.value)
        if len(payload) > MAX_PAYLOAD_BYTES:
            raise InvalidFieldError(f"a field of {len(payload)} bytes: allowed is 0..{MAX_PAYLOAD_BYTES}")
        encoded += _HEADER.pack(family << 8 | field.number, kind, len(payload))
        encoded += payload
    return bytes(encoded)


def digest(encoding: bytes) -> bytes:
    """Return the 32-byte SHA-256 of an encoding."""
    return hashlib.sha256(encoding).digest()


def _payload(value: int | str | bytes | tuple[int, ...]) -> tuple[int, bytes]:
    """Return type code and payload."""
    if isinstance(value, int):
        return 1, _numbers((value,))
    if isinstance(value, bytes):
        return 3, value
    if isinstance(value, tuple):
        return 4, _numbers(value)
    try:
        return 2, value.encode("utf-8")
    except UnicodeEncodeError as error:
        raise InvalidFieldError(f"text {value!r} has a lone surrogate: send valid Unicode") from error


def _numbers(values: tuple[int, ...]) -> bytes:
    for value in values:
        # By exact type: True would be encoded as 1, and two values would share an encoding.
        if type(value) is not int or not 0 <= value <= U64_MAX:
            raise InvalidFieldError(f"number {value!r}: allowed is 0..{U64_MAX}")
    return struct.pack(f"<{len(values)}Q", *values)
