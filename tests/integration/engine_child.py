"""One process of an engine of several: `engine_child.py VERB ENDPOINT INCARNATION`, the last in hex.

Each is a session of its own and maps the memory of its tenant. It says so when it holds what it is to hold,
and leaves in order when its stdin says anything.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from kvclient.sync import KvClient, Namespace
from tests.integration.daemon_process import content, keys, open_namespace, settings_of
from tests.integration.scripted_child import say

WRITTEN = range(8)
READ = range(100, 108)


def hold(namespace: Namespace) -> None:
    """Hold a reservation of eight blocks, and a lease of eight others."""
    reservation = namespace.reserve(keys(WRITTEN))
    namespace.write(reservation, content(WRITTEN))
    lease = namespace.acquire(keys(READ))
    assert lease is not None
    assert lease.keys_count == len(READ)


def attend(namespace: Namespace) -> None:
    """Hold nothing: another process of the engine asks, and this one may touch the memory."""
    assert namespace.get(keys([999]), content([999])).prefix_count == 0


VERBS = {"hold": hold, "attend": attend}


def main(verb: str, endpoint: str, incarnation: str) -> None:
    """Be a process of the engine until told to leave."""
    settings = settings_of(endpoint, engine_incarnation=bytes.fromhex(incarnation), client_name=verb)
    with KvClient.connect(settings) as client:
        VERBS[verb](open_namespace(client))
        say(verb)
        sys.stdin.readline()
    say("left")


if __name__ == "__main__":
    main(*sys.argv[1:])
