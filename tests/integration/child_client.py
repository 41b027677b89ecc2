"""A client process that the tests kill, stop and outlive: `child_client.py VERB ENDPOINT ...`.

It writes a line when it got somewhere, then waits for the end of its stdin, or goes on until it is killed.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from kvclient.sync import KvClient
from tests.integration.daemon_process import (
    BLOCK_BYTES,
    content,
    keys,
    opened,
    settings_of,
)


def say(line: str) -> None:
    """Tell the parent."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def wait_for_the_end() -> None:
    """Return when the parent closes our stdin."""
    sys.stdin.read()


def reserve(endpoint: str) -> None:
    """Hold a reservation of eight blocks, half of them written."""
    with opened(endpoint) as (_, namespace):
        reservation = namespace.reserve(keys(range(8)))
        namespace.write(reservation, content(range(8)))
        say("reserved")
        wait_for_the_end()


def lease(endpoint: str) -> None:
    """Look at the blocks 0 to 7."""
    with opened(endpoint) as (_, namespace), namespace.lease(keys(range(8))) as view:
        say(f"leased {view.prefix_count}")
        wait_for_the_end()


def put_on(endpoint: str) -> None:
    """Put blocks without end, 32 at once."""
    with opened(endpoint) as (_, namespace):
        first = 1_000_000
        while True:
            numbers = range(first, first + 32)
            namespace.put(keys(numbers), content(numbers))
            if first == 1_000_000:
                say("putting")
            first += 32


def get_on(endpoint: str) -> None:
    """Lease and read the blocks 0 to 7 without end."""
    with opened(endpoint) as (_, namespace):
        into = np.empty((8, BLOCK_BYTES), np.uint8)
        is_first = True
        while True:
            held = namespace.acquire(keys(range(8)))
            assert held is not None
            namespace.read(held, into)
            if is_first:
                say("getting")
                is_first = False


def put_and_leave(endpoint: str) -> None:
    """Put and get eight blocks, and leave in order."""
    with opened(endpoint) as (_, namespace):
        namespace.put(keys(range(8)), content(range(8)))
        into = np.empty((8, BLOCK_BYTES), np.uint8)
        assert namespace.get(keys(range(8)), into).prefix_count == 8
    say("left")


def attach(endpoint: str) -> None:
    """Be there."""
    with KvClient.connect(settings_of(endpoint)):
        say("attached")
        wait_for_the_end()


VERBS = {
    "reserve": reserve,
    "lease": lease,
    "put-on": put_on,
    "get-on": get_on,
    "put-and-leave": put_and_leave,
    "attach": attach,
}

if __name__ == "__main__":
    VERBS[sys.argv[1]](*sys.argv[2:])
