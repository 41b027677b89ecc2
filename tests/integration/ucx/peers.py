"""Peers in processes of their own, memory, and batches for the tests of the UCX binding."""

import json
import mmap
import os
import select
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import numpy as np

from kvservice.native import ucx

MIB = 1 << 20
LONG_S = 30.0

CMA = {"TLS": "cma,tcp,self", "NET_DEVICES": "lo", **ucx.CMA_SETTINGS}
TCP = {"TLS": "tcp,self", "NET_DEVICES": "lo"}
# Which transports, and whether the endpoint is watched: the two kinds that matter on one host.
LANES = {"cma": (CMA, False), "tcp": (TCP, True)}


def deadline_ns(seconds=LONG_S):
    """Give a deadline for UCX."""
    return time.monotonic_ns() + int(seconds * 1e9)


def anonymous_memory(size_bytes):
    """Map pages of our own."""
    mapping = mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return np.frombuffer(mapping, dtype=np.uint8)


def run_python(code):
    """Run code in a fresh interpreter; return what it wrote to stderr and stdout, and its exit status."""
    ended = subprocess.run(
        [sys.executable, "-X", "dev", "-c", textwrap.dedent(code)],
        capture_output=True,
        text=True,
        timeout=LONG_S,
        check=False,
    )
    return ended.stderr, ended.stdout, ended.returncode


class RemotePeer:
    """A process that runs peer.py, and what it said of itself."""

    def __init__(self, settings, size_bytes=4 * MIB, *, is_serving=True, library="auto"):
        order = {
            "settings": settings,
            "size_bytes": size_bytes,
            "is_serving": is_serving,
            "library": library,
        }
        self.process = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("peer.py")), json.dumps(order)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        introduction = self.hear()
        self.address = bytes.fromhex(introduction["address"])
        self.rkey = bytes.fromhex(introduction["rkey"])
        self.base, self.length = introduction["base"], introduction["length"]

    def hear(self):
        """Take the next line that it says."""
        assert self.is_speaking(LONG_S), "the peer says nothing"
        line = self.process.stdout.readline()
        assert line, f"the peer ended with {self.process.wait(LONG_S)}"
        return json.loads(line)

    def is_speaking(self, seconds):
        """Wait for a line, and tell whether there is one."""
        return bool(select.select([self.process.stdout], [], [], seconds)[0])

    def tell(self, *order):
        """Send an order without waiting for the answer."""
        self.process.stdin.write(json.dumps(order) + "\n")
        self.process.stdin.flush()

    def ask(self, *order):
        """Send an order and return the answer."""
        self.tell(*order)
        return self.hear()

    def attach(self, endpoint, length=None):
        """Attach its memory to an endpoint."""
        return endpoint.attach(self.rkey, self.base, self.length if length is None else length)

    def kill(self):
        """End it at once, and see it ended."""
        self.process.kill()
        self.process.wait(LONG_S)

    def end(self):
        """End it, and close what led to it."""
        self.kill()
        self.process.stdin.close()
        self.process.stdout.close()

    def stop(self):
        """Stop it where it is, and see it stopped."""
        self.process.send_signal(signal.SIGSTOP)
        stat = Path(f"/proc/{self.process.pid}/stat")
        end = time.monotonic() + LONG_S
        while stat.read_text().rpartition(")")[2].split()[0] != "T":
            assert time.monotonic() < end

    def resume(self):
        """Let it go on."""
        self.process.send_signal(signal.SIGCONT)


class Batch:
    """The arrays of one transfer between local memory and one segment."""

    def __init__(self, segment, local, remote, lengths):
        self.segments = [segment]
        self.indexes = np.zeros(len(lengths), dtype=np.uint32)
        self.local = np.asarray(local, dtype=np.uint64)
        self.remote = np.asarray(remote, dtype=np.uint64)
        self.lengths = np.asarray(lengths, dtype=np.uint64)
        self.statuses = np.full(len(lengths), 99, dtype=np.int32)

    @classmethod
    def of_blocks(cls, segment, memory, block_bytes, count):
        """Pair blocks that follow one another, in both memories."""
        offsets = np.arange(count, dtype=np.uint64) * np.uint64(block_bytes)
        return cls(
            segment,
            offsets + np.uint64(memory.ctypes.data),
            offsets + np.uint64(segment.base),
            np.full(count, block_bytes, dtype=np.uint64),
        )

    def run(self, worker, *, is_put, window=16, seconds=LONG_S, **more):
        """Transfer, and return the outcome."""
        return ucx.Outcome(
            worker.transfer(
                is_put=is_put,
                segments=self.segments,
                segment_indexes=self.indexes,
                local=self.local,
                remote=self.remote,
                lengths=self.lengths,
                statuses=self.statuses,
                window=window,
                deadline_ns=deadline_ns(seconds),
                **more,
            )
        )


class Lane:
    """A worker, a peer, an endpoint between them, and the peer's memory attached to it."""

    def __init__(self, worker, peer, *, is_watched):
        self.worker, self.peer = worker, peer
        self.endpoint = worker.connect(peer.address, is_watched=is_watched)
        assert self.endpoint.wire(deadline_ns())
        self.segment = peer.attach(self.endpoint)
        self.memory = anonymous_memory(peer.length)

    def batch(self, block_bytes=64 << 10, count=16):
        """Pair the first blocks of both memories."""
        return Batch.of_blocks(self.segment, self.memory, block_bytes, count)


class Server:
    """A thread that serves a worker of this process."""

    def __init__(self, worker):
        self.stop_fd, self.stop_end_fd = os.pipe()
        self.failures = []
        self.thread = threading.Thread(target=self._serve, args=(worker,))
        self.thread.start()

    def _serve(self, worker):
        try:
            worker.serve(self.stop_fd)
        except ucx.UcxError as failure:
            self.failures.append(failure)

    def stop(self):
        """Stop it, and see it stopped."""
        os.write(self.stop_end_fd, b"x")
        self.thread.join(LONG_S)
        assert not self.thread.is_alive()
        os.close(self.stop_fd)
        os.close(self.stop_end_fd)

    def __enter__(self):
        """Serve until the end of the block."""
        return self

    def __exit__(self, *_):
        """Stop."""
        self.stop()
