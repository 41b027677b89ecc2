"""The limits: what the machine does at best, by the plainest means, in this process and run."""

from __future__ import annotations

import contextlib
import mmap
import os
import socket
import subprocess
import sys
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from kvservice import native
from kvservice.core.slots import U8, U64
from tests.bench.daemons import ROOT
from tests.bench.peers import ECHO_HEADER, STREAM_ORDER, receive_pieces, send_pieces

STREAMING = 0
"""Threshold from which every piece is copied past the cache."""
THROUGH_CACHE = 2**64 - 1
"""Threshold that no piece reaches: plain memcpy."""

_PEER_STOP_S = 10.0


def touched(size_bytes: int, seed: int = 1) -> U8:
    """Return private memory of this process, of random bytes, all pages touched."""
    words = np.random.default_rng(seed).integers(0, 2**63, size_bytes // 8, np.uint64)
    return words.view(np.uint8)


def address(memory: npt.NDArray[np.uint8]) -> int:
    """Return the address of an array's first byte."""
    return int(memory.__array_interface__["data"][0])


class CopyLimit:
    """Copies between private memory and a mapped memfd, batch after batch through both.

    private: the caller's memory, the same that the service is measured with.
    size_bytes: of the memfd; that of the arena, so that caches are as cold.
    """

    def __init__(self, private: U8, *, size_bytes: int, block_bytes: int, blocks_count: int) -> None:
        descriptor = os.memfd_create("bench-limit")
        try:
            os.ftruncate(descriptor, size_bytes)
            self._mapping = mmap.mmap(descriptor, size_bytes)
        finally:
            os.close(descriptor)
        self._shared: U8 = np.frombuffer(self._mapping, np.uint8)
        self._shared[:: mmap.PAGESIZE] = 1
        self._private = private
        self._lengths: U64 = np.full(blocks_count, block_bytes, np.uint64)
        self._offsets: U64 = np.arange(blocks_count, dtype=np.uint64) * np.uint64(block_bytes)
        self._batch_bytes = block_bytes * blocks_count
        self._turn = 0

    def copy(self, batches_count: int, threshold: int, *, is_put: bool) -> None:
        """Copy so many batches: into the memfd, or out of it."""
        for _ in range(batches_count):
            turn, self._turn = self._turn, self._turn + 1
            here = self._part(self._private, turn)
            there = self._part(self._shared, turn)
            targets, sources = (there, here) if is_put else (here, there)
            native.copy_blocks(targets, sources, self._lengths, None, None, threshold)

    def _part(self, memory: U8, turn: int) -> U64:
        start = turn * self._batch_bytes % (len(memory) // self._batch_bytes * self._batch_bytes)
        return self._offsets + np.uint64(address(memory) + start)


class EchoLimit:
    """One round trip over a Unix socket to a process that does nothing but answer."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection

    def request(self, request_bytes: int, answer_bytes: int) -> bytes:
        """Return a request of so many bytes that asks for an answer of so many."""
        return ECHO_HEADER.pack(request_bytes, answer_bytes).ljust(request_bytes, b"\0")

    def exchange(self, request: bytes, answer_bytes: int) -> None:
        """Send a request and take its answer."""
        self._connection.sendall(request)
        while answer_bytes > 0:
            answer_bytes -= len(self._connection.recv(1 << 18))


@contextlib.contextmanager
def echo_limit() -> Iterator[EchoLimit]:
    """Run the echoing process for the time of the block."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    with ours, _peer("echo", str(theirs.fileno()), descriptors=(theirs.fileno(),)):
        theirs.close()
        limit = EchoLimit(ours)
        limit.exchange(limit.request(64, 64), 64)
        yield limit
        ours.shutdown(socket.SHUT_RDWR)


class StreamLimit:
    """A plain pipelined transfer over tcp to another process, and back.

    piece_bytes: of one `sendall` and one `recv_into`; the service's block size.
    """

    def __init__(self, connection: socket.socket, piece_bytes: int) -> None:
        self._connection = connection
        self._piece_bytes = piece_bytes

    def put(self, source: U8) -> None:
        """Send the memory, and wait until the other side has all of it."""
        self._connection.sendall(STREAM_ORDER.pack(b"P", len(source), self._piece_bytes))
        send_pieces(self._connection, memoryview(source), self._piece_bytes)
        if self._connection.recv(1) != b".":
            raise OSError("the other end of the reference transfer hung up")

    def get(self, target: U8) -> None:
        """Fill the memory with what the other side sends."""
        self._connection.sendall(STREAM_ORDER.pack(b"G", len(target), self._piece_bytes))
        receive_pieces(self._connection, memoryview(target), self._piece_bytes)


@contextlib.contextmanager
def stream_limit(size_bytes: int, piece_bytes: int) -> Iterator[StreamLimit]:
    """Run the other end, which has `size_bytes` of memory, for the time of the block."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        with _peer("stream", str(port), str(size_bytes)):
            listener.settimeout(_PEER_STOP_S)
            connection, _ = listener.accept()
            with connection:
                connection.settimeout(None)
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                yield StreamLimit(connection, piece_bytes)
                connection.shutdown(socket.SHUT_RDWR)


class GatherLimit:
    """One word out of each of some random rows of 64 bytes: what a look at a table costs at least."""

    def __init__(self, rows_count: int) -> None:
        self._words: U64 = np.ones(rows_count * 8, np.uint64)
        self._rows_count = rows_count

    def places(self, count: int, seed: int) -> npt.NDArray[np.int64]:
        """Return the places of the words of `count` random rows."""
        return np.random.default_rng(seed).integers(0, self._rows_count, count) * 8

    def gather(self, places: npt.NDArray[np.int64]) -> U64:
        """Fetch them."""
        return self._words.take(places)


@contextlib.contextmanager
def _peer(*arguments: str, descriptors: tuple[int, ...] = ()) -> Iterator[None]:
    command = [sys.executable, "-m", "tests.bench.peers", *arguments]
    with subprocess.Popen(command, cwd=ROOT, pass_fds=descriptors) as process:
        try:
            yield
        finally:
            try:
                process.wait(0.5 if sys.exc_info()[0] else _PEER_STOP_S)
            except subprocess.TimeoutExpired:
                process.kill()
