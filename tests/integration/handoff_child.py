"""An engine in a process of its own, which the tests kill, stop and outlive: `handoff_child.py ENDPOINT`.

It lends a pool of blocks over UCX, does what the lines of its stdin say, and answers each with a line.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from kvclient import BlockPool, ClientSettings, KvError, LentPool
from kvclient.sync import KvClient, Namespace
from kvservice.transports.one_sided import EndpointSettings
from tests.integration.daemon_process import BLOCK_BYTES, content, keys, open_namespace

BLOCKS = 64
ON_LOOPBACK = EndpointSettings(devices="lo")


class Engine:
    """The engine; each method is a verb of the parent's."""

    def __init__(self, endpoint: str, transports: str, ttl_s: float) -> None:
        settings = ClientSettings(
            endpoint,
            engine_incarnation=os.urandom(16),
            one_sided=EndpointSettings(devices="lo", transports=transports, by_messages=bool(transports)),
        )
        self._client = KvClient.connect(settings)
        self._ttl_s = ttl_s
        self._namespace: Namespace = open_namespace(self._client)
        self._memory = np.zeros((BLOCKS, BLOCK_BYTES), np.uint8)
        self._pool = BlockPool.of([self._memory])
        self._lent: list[LentPool] = []

    def lend(self) -> str:
        """Lend the pool."""
        self._lent = self._client.handoffs.lend([self._pool])
        return "lent"

    def offer(self, count: str) -> str:
        """Offer the first blocks."""
        numbers = range(int(count))
        self._memory[: int(count)] = content(numbers)
        offer = self._client.handoffs.offer(
            self._namespace, keys(numbers), self._lent, numbers, ttl_s=self._ttl_s
        )
        return str(offer.handoff_id)

    def claim(self, handoff_id: str) -> str:
        """Claim, and read nothing."""
        return self._client.handoffs.claim(self._namespace, int(handoff_id)).choice.name

    def receive(self, handoff_id: str, count: str) -> str:
        """Receive everything, and say whether it is right."""
        numbers = range(int(count))
        self._client.handoffs.receive(self._namespace, int(handoff_id), [self._pool], numbers)
        return "right" if (self._memory[: int(count)] == content(numbers)).all() else "WRONG"

    def hog(self, seconds: str) -> str:
        """Keep the interpreter busy, so that no thread of Python's gets a turn."""
        sys.stdout.write("hogging\n")
        sys.stdout.flush()
        sys.setswitchinterval(1e6)
        end_s = time.monotonic() + float(seconds)
        while time.monotonic() < end_s:
            pass
        sys.setswitchinterval(0.005)
        return "done"

    def quit(self) -> str:
        """Close in order."""
        self._client.close()
        return "closed"


def main() -> None:
    """Do what the parent says until its end of the pipe is closed."""
    engine = Engine(sys.argv[1], sys.argv[2], float(sys.argv[3]))
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    for line in sys.stdin:
        verb, *arguments = line.split()
        try:
            answer = getattr(engine, verb)(*arguments)
        except KvError as error:
            answer = f"{type(error).__name__}: {error}"
        sys.stdout.write(answer.replace("\n", " ") + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
