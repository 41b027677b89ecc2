"""What the values of settings look like: sizes, addresses, digests, and their ranges.

A rule reads one kind of value, as TOML types it or as the text of a variable or flag,
and says in words what it allows. Rules raise ValueError, which says only what is wrong;
`kvservice.daemon.config` adds the key, the value and where it came from.
"""

from __future__ import annotations

import ipaddress
import os
import re
from collections.abc import Callable
from dataclasses import dataclass

UNITS = {"B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
"""Binary units only: whether "1GB" is 10^9 or 2^30 bytes is a question better not asked."""

MAX_SIZE_BYTES = 2**63 - 1
"""What the kernel takes as a file size."""

MAX_SOCKET_PATH_BYTES = 107
"""sockaddr_un holds 108, one of them the end."""

PORT_MAX = 65535

UID_MAX = 2**32 - 2
"""The largest user id; one more is what the kernel calls "no user"."""

MAX_UIDS = 1024

MAX_NAMES_CHARACTERS = 1024
"""A way to a segment of memory, which names devices, travels in so many bytes."""

_SIZE = re.compile(r"([0-9]{1,19}) ?([A-Za-z]*)", re.ASCII)
_INTEGER = re.compile(r"[+-]?[0-9]{1,19}", re.ASCII)
_HOST_NAME = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]{0,252})", re.ASCII)
_SHA256_HEX = re.compile(r"[0-9a-f]{64}", re.ASCII)


def parse_size(text: str) -> int:
    """Return the bytes that "1GiB", "256 MiB" or "4096" stands for; raises ValueError."""
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise ValueError('a size is a whole number with or without a unit, as in "256MiB"')
    unit = match[2] or "B"
    if unit not in UNITS:
        raise ValueError(f"the unit {unit!r} is unknown; there are {', '.join(UNITS)}")
    size_bytes = int(match[1]) * UNITS[unit]
    if size_bytes > MAX_SIZE_BYTES:
        raise ValueError(f"it is more than {MAX_SIZE_BYTES} bytes")
    return size_bytes


def format_size(size_bytes: int) -> str:
    """Write a size exactly, in the largest unit that divides it."""
    for unit, unit_bytes in reversed(UNITS.items()):
        if size_bytes and unit != "B" and size_bytes % unit_bytes == 0:
            return f"{size_bytes // unit_bytes}{unit}"
    return str(size_bytes)


@dataclass(frozen=True, slots=True)
class Address:
    """Where to listen. Port 0 lets the kernel choose; an IPv6 host has no brackets here."""

    host: str
    port: int


def parse_address(text: str) -> Address:
    """Return the host and port of "host:port" or "[ipv6]:port"; raises ValueError."""
    host, colon, port = text.rpartition(":")
    if not colon or not re.fullmatch(r"[0-9]{1,5}", port, re.ASCII) or int(port) > PORT_MAX:
        raise ValueError(f"it does not end in a port, :0 to :{PORT_MAX}")
    if host.startswith("[") and host.endswith("]"):
        host = str(ipaddress.IPv6Address(host[1:-1]))
    elif ":" in host:
        raise ValueError("an IPv6 address stands in brackets, as in [::1]:7400")
    elif not _HOST_NAME.fullmatch(host):
        raise ValueError('the host is missing or malformed; every address is "0.0.0.0" or "[::]"')
    return Address(host, int(port))


@dataclass(frozen=True, slots=True)
class Rule:
    """One kind of value.

    `type_name` and `allowed` are words for people. `read` checks a value as TOML types
    it, `read_text` the text of a variable or flag; both return the value in its one
    form or raise ValueError.
    """

    type_name: str
    allowed: str
    read: Callable[[object], object]
    read_text: Callable[[str], object]


def integers(low: int, high: int) -> Rule:
    """Allow whole numbers, bounds inclusive."""

    def read(value: object) -> int:
        return _in_range(value, low, high)

    def read_text(text: str) -> int:
        return _in_range(_parse_integer(text), low, high)

    return Rule("integer", f"{low}..{high}", read, read_text)


def sizes(low: int, high: int) -> Rule:
    """Allow numbers of bytes, plain or with a unit; bounds inclusive."""

    def read(value: object) -> int:
        return _in_range(parse_size(value) if isinstance(value, str) else value, low, high)

    return Rule("size", f"{format_size(low)}..{format_size(high)}", read, read)


def powers_of_two(low: int, high: int) -> Rule:
    """Allow sizes that are powers of two; bounds inclusive."""
    any_size = sizes(low, high)

    def read(value: object) -> object:
        size_bytes = any_size.read(value)
        if isinstance(size_bytes, int) and size_bytes.bit_count() != 1:
            raise ValueError("it is not a power of two")
        return size_bytes

    return Rule("size", f"a power of two, {any_size.allowed}", read, read)


def switches() -> Rule:
    """Allow the two words that TOML has, and no other spelling of yes and no."""

    def read(value: object) -> bool:
        if not isinstance(value, bool):
            raise ValueError("it is not a boolean")  # noqa: TRY004 - rules raise ValueError
        return value

    def read_text(text: str) -> bool:
        return read({"true": True, "false": False}.get(text.strip()))

    return Rule("boolean", "true or false", read, read_text)


def texts(allowed: str, check: Callable[[str], str]) -> Rule:
    """Allow texts that `check` returns; it raises ValueError for others."""

    def read(value: object) -> str:
        if not isinstance(value, str):
            raise ValueError("it is not a text")  # noqa: TRY004 - rules raise ValueError
        return check(value)

    return Rule("text", allowed, read, read)


def choices(*words: str) -> Rule:
    """Allow a few words, as they are written."""

    def check(text: str) -> str:
        if text not in words:
            raise ValueError("it is not one of these")
        return text

    return texts(", ".join(words), check)


def addresses() -> Rule:
    """Allow "host:port", or nothing."""

    def check(text: str) -> str:
        if text:
            parse_address(text)
        return text

    return texts('host:port with port 0..65535, or "" for none', check)


def paths(max_bytes: int) -> Rule:
    """Allow a path of so many bytes, counted as the kernel does, or nothing."""

    def check(text: str) -> str:
        length_bytes = len(os.fsencode(text))
        if "\0" in text or length_bytes > max_bytes:
            raise ValueError("it has a NUL character" if "\0" in text else f"it has {length_bytes} bytes")
        return text

    return texts(f'a path of at most {max_bytes} bytes, or ""', check)


def names() -> Rule:
    """Allow a list of names in whatever form another program takes it, or nothing."""

    def check(text: str) -> str:
        if not text.isprintable() or len(text) > MAX_NAMES_CHARACTERS:
            raise ValueError("it has characters that cannot be printed, or too many")
        return text

    return texts(f"printable text of at most {MAX_NAMES_CHARACTERS} characters", check)


def sha256_digests() -> Rule:
    """Allow a SHA-256 in hex, or nothing; its one form is in small letters."""

    def check(text: str) -> str:
        if text and not _SHA256_HEX.fullmatch(text.lower()):
            raise ValueError("it is not 64 hex digits")
        return text.lower()

    return texts('64 hex digits (`printf %s TOKEN | sha256sum`), or "" for none', check)


def user_ids() -> Rule:
    """Allow an array of user ids, or "1000,1001" as the text of a variable or flag."""

    def read(value: object) -> tuple[int, ...]:
        if not isinstance(value, list | tuple):
            raise ValueError("it is not an array")  # noqa: TRY004 - rules raise ValueError
        uids = tuple(_in_range(uid, 0, UID_MAX) for uid in value)
        if len(set(uids)) != len(uids) or len(uids) > MAX_UIDS:
            raise ValueError("an entry stands twice, or there are too many")
        return uids

    def read_text(text: str) -> tuple[int, ...]:
        return read([_parse_integer(uid) for uid in text.split(",")] if text.strip() else [])

    return Rule("array of integers", f"at most {MAX_UIDS} different ids, each 0..{UID_MAX}", read, read_text)


def _parse_integer(text: str) -> int:
    if not _INTEGER.fullmatch(text.strip()):
        raise ValueError("it is not a whole number of at most 19 digits")
    return int(text)


def _in_range(value: object, low: int, high: int) -> int:
    # By exact type: true is not 1 here, and 1.0 may be somebody's 1.9 tomorrow.
    if type(value) is not int:
        raise ValueError("it is not a whole number")
    if not low <= value <= high:
        raise ValueError("it is out of range")
    return value
