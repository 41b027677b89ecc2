"""Rewrites a tiny arena without end: `rewriter_child.py ENDPOINT BLOCK_BYTES KEYS_COUNT SEED`."""

from __future__ import annotations

import random
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from kvclient import ArenaFullError, QuotaExceededError
from tests.integration.daemon_process import content, keys, opened

BATCH_COUNT = 16


def main(endpoint: str, block_bytes: int, keys_count: int, seed: int) -> None:
    """Put batches of random keys; each put evicts what was there."""
    blocks = content(range(keys_count), block_bytes)
    rng = random.Random(seed)
    with opened(endpoint, block_bytes) as (client, namespace):
        is_first = True
        rounds = 0
        while True:
            numbers = rng.sample(range(keys_count), BATCH_COUNT)
            try:
                namespace.put(keys(numbers), [blocks[number] for number in numbers])
            except (ArenaFullError, QuotaExceededError):
                continue  # The readers hold leases of nearly all of it: their blocks stay.
            rounds += 1
            if rounds % 500 == 0:
                client.purge(namespace)
            if is_first:
                sys.stdout.write("rewriting\n")
                sys.stdout.flush()
                is_first = False


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]))
