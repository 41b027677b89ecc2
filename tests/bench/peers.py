"""The other process of a limit: `python -m tests.bench.peers echo FD | stream PORT BYTES`.

echo: each request is a header (bytes of the request, bytes of the answer; u32 each),
and is answered by so many bytes of nothing. It does what any server must: take all, answer.

stream: plain bulk transfer over tcp. Each order is one byte: P takes `chunk` bytes into
this process's memory and acknowledges with a byte, G sends them. The memory is walked
through in turn, as an arena is.
"""

from __future__ import annotations

import mmap
import socket
import struct
import sys

ECHO_HEADER = struct.Struct("<II")
STREAM_ORDER = struct.Struct("<cQQ")
"""Letter, bytes of the transfer, bytes of a piece."""


def echo(connection: socket.socket) -> None:
    """Answer until the other side hangs up."""
    received = bytearray(1 << 20)
    view = memoryview(received)
    filled = 0
    while True:
        count = connection.recv_into(view[filled:])
        if not count:
            return
        filled += count
        if filled < ECHO_HEADER.size:
            continue
        request_bytes, answer_bytes = ECHO_HEADER.unpack_from(received)
        if filled == request_bytes:
            connection.sendall(view[:answer_bytes])
            filled = 0


def stream(connection: socket.socket, size_bytes: int) -> None:
    """Take and send until the other side hangs up."""
    memory = mmap.mmap(-1, size_bytes)
    for page in range(0, size_bytes, mmap.PAGESIZE):
        memory[page] = 1
    place = 0
    whole = memoryview(memory)
    order = bytearray(STREAM_ORDER.size)
    while connection.recv_into(order, 0, socket.MSG_WAITALL):
        letter, transfer_bytes, piece_bytes = STREAM_ORDER.unpack(order)
        if place + transfer_bytes > size_bytes:
            place = 0
        part = whole[place : place + transfer_bytes]
        place += transfer_bytes
        if letter == b"P":
            receive_pieces(connection, part, piece_bytes)
            connection.sendall(b".")
        else:
            send_pieces(connection, part, piece_bytes)


def send_pieces(connection: socket.socket, memory: memoryview, piece_bytes: int) -> None:
    """Send memory piece by piece; the kernel's buffers are the pipeline."""
    for start in range(0, len(memory), piece_bytes):
        connection.sendall(memory[start : start + piece_bytes])


def receive_pieces(connection: socket.socket, memory: memoryview, piece_bytes: int) -> None:
    """Fill memory piece by piece. Raises OSError when the other side hangs up."""
    for start in range(0, len(memory), piece_bytes):
        piece = memory[start : start + piece_bytes]
        while len(piece):
            count = connection.recv_into(piece, 0, socket.MSG_WAITALL)
            if not count:
                raise OSError("the other end of the reference transfer hung up")
            piece = piece[count:]


def main(arguments: list[str]) -> None:
    """Be the peer that the arguments name."""
    if arguments[0] == "echo":
        with socket.socket(fileno=int(arguments[1])) as connection:
            echo(connection)
        return
    with socket.create_connection(("127.0.0.1", int(arguments[1]))) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        stream(connection, int(arguments[2]))


if __name__ == "__main__":
    main(sys.argv[1:])
