"""What both lanes share: how much to receive at once, and descriptors."""

from __future__ import annotations

import array
import os
import socket
from collections.abc import Iterable
from typing import TypeVar

from google.protobuf.message import DecodeError, Message

from kvservice.core.errors import MalformedError, PeerUnavailableError

Answer = TypeVar("Answer", bound=Message)

RECEIVE_BYTES = 64 << 10
"""Asked for in one receive: the answer to a batch of a thousand keys comes whole."""

POSTED_LIMIT = 64
"""Posted requests whose answers nobody has read yet; then they are collected. Few
enough that they never fill the daemon's side of the socket."""

STREAM_QUEUE_LIMIT = 1024
"""Messages of one event stream that wait for their reader; more end the stream."""

CONTROL_BYTES = socket.CMSG_SPACE(253 * array.array("i").itemsize)
"""Room for as many descriptors as Linux passes in one message (SCM_MAX_FD)."""


def unreachable(path: str, error: OSError) -> PeerUnavailableError:
    """Return the error of a connect that failed; it says what to do."""
    if isinstance(error, PermissionError):
        return PeerUnavailableError(
            f"this user may not connect to {path}: {error}; be in the group of that socket"
        )
    return PeerUnavailableError(f"no daemon listens at {path}: {error}; start kvservice serve")


def receive_with_descriptors(source: socket.socket, descriptors: list[int], flags: int = 0) -> bytes:
    """Receive bytes; descriptors that come along are appended, and owned by the caller."""
    received, control, _, _ = source.recvmsg(RECEIVE_BYTES, CONTROL_BYTES, flags | socket.MSG_CMSG_CLOEXEC)
    for level, kind, content in control:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            numbers = array.array("i")
            numbers.frombytes(content[: len(content) - len(content) % numbers.itemsize])
            descriptors.extend(numbers)
    return received


def parsed(response_type: type[Answer], body: bytes) -> Answer:
    """Return the message of a frame. Raises MalformedError if it is none."""
    try:
        return response_type.FromString(body)
    except DecodeError as error:
        raise MalformedError(f"the daemon's answer is no {response_type.DESCRIPTOR.name}: {error}") from error


def parsed_with(descriptors: Iterable[int], response_type: type[Answer], body: bytes) -> Answer:
    """Like `parsed`; closes the descriptors that came along if it fails."""
    try:
        return parsed(response_type, body)
    except MalformedError:
        close_all(descriptors)
        raise


def close_all(descriptors: Iterable[int]) -> None:
    """Close descriptors that nobody took."""
    for descriptor in descriptors:
        os.close(descriptor)
