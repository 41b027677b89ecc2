"""The other process of a UCX test: opens a worker over memory of its own, and does as it is told.

It says what a peer must know in its first line, then answers each line of its standard input with one
line. It ends when its input does.
"""

import json
import mmap
import os
import sys
import threading
import time
from pathlib import Path

import numpy as np

from kvservice import native
from kvservice.native import ucx

LONG_S = 30


def deadline_ns(seconds=LONG_S):
    """Give a deadline for UCX."""
    return time.monotonic_ns() + int(seconds * 1e9)


class Peer:
    """A worker, its registered memory, and the thread that serves."""

    def __init__(self, settings, size_bytes):
        self.worker = ucx.Worker(settings)
        self.mapping = mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self.memory = np.frombuffer(self.mapping, dtype=np.uint8)
        self.reset()
        self.registration = self.worker.register(self.memory.ctypes.data, size_bytes)
        self.stop_fd, self.stop_end_fd = os.pipe()
        self.server = threading.Thread(target=self.worker.serve, args=(self.stop_fd,), daemon=True)

    def introduction(self):
        """Say what a peer must know."""
        return {
            "address": self.worker.address.hex(),
            "rkey": self.registration.rkey.hex(),
            "base": self.registration.address,
            "length": self.registration.length,
            "thread": self.server.native_id,
        }

    def reset(self):
        """Fill the memory with what it has at first."""
        self.memory.view(np.uint64)[:] = np.arange(self.memory.size // 8, dtype=np.uint64)

    def digest(self, offset, length):
        """Sum a part of the memory."""
        return native.crc32c(self.memory[offset : offset + length])

    def cpu_ns(self):
        """Tell how long this process has been computing."""
        return time.process_time_ns()

    def descriptors(self):
        """Count the open descriptors."""
        return sum(1 for _ in Path("/proc/self/fd").iterdir())

    def hold_gil(self):
        """Compute in Python, and let no other thread of it run, until a peer sets our first byte to 255."""
        sys.setswitchinterval(LONG_S)
        end = time.monotonic() + LONG_S
        say("holding")
        while self.memory[0] != 255 and time.monotonic() < end:
            pass
        sys.setswitchinterval(0.005)
        return int(self.memory[0])

    def read_back(self, address, rkey, base, length, is_watched=True):
        """Get a peer's memory over a connection of our own, and sum it."""
        target = np.zeros(length, dtype=np.uint8)
        statuses = np.zeros(1, dtype=np.int32)
        with self.worker.connect(bytes.fromhex(address), is_watched=is_watched) as endpoint:
            segment = endpoint.attach(bytes.fromhex(rkey), base, length)
            outcome = self.worker.transfer(
                is_put=False,
                segments=[segment],
                segment_indexes=np.zeros(1, dtype=np.uint32),
                local=np.array([target.ctypes.data], dtype=np.uint64),
                remote=np.array([base], dtype=np.uint64),
                lengths=np.array([length], dtype=np.uint64),
                statuses=statuses,
                window=1,
                deadline_ns=deadline_ns(),
            )
        return [int(outcome), native.crc32c(target)]

    def close(self):
        """Stop serving, and close."""
        os.write(self.stop_end_fd, b"x")
        if self.server.ident is not None:
            self.server.join()
        self.worker.close()


def say(answer):
    """Write one line."""
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()


def main():
    """Serve until standard input ends."""
    order = json.loads(sys.argv[1])
    ucx.load(order["library"])
    peer = Peer(order["settings"], order["size_bytes"])
    if order["is_serving"]:
        peer.server.start()
    say(peer.introduction())
    for line in sys.stdin:
        name, *arguments = json.loads(line)
        say(getattr(peer, name)(*arguments))
    peer.close()


if __name__ == "__main__":
    main()
