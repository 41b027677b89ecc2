"""The other engine of the one-sided figures: `python -m tests.bench.lender BYTES BLOCK_BYTES LANE`.

It lends memory over UCX and, on each line of its stdin, offers so many blocks, one a handoff.
"""

from __future__ import annotations

import json
import mmap
import os
import sys

import numpy as np

from kvclient import BlockPool, ClientSettings
from kvclient.sync import KvClient
from kvservice.core.engine_memory import MemoryKind
from kvservice.transports.one_sided import EndpointSettings
from kvservice.transports.ucx import UcxEndpoint
from tests.bench.daemons import open_namespace
from tests.bench.workload import KEY_BYTES

LOOPBACK = EndpointSettings(devices="lo")


def main() -> None:
    """Lend and offer until stdin ends."""
    size_bytes, block_bytes, lane = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    memory = np.frombuffer(mmap.mmap(-1, size_bytes), np.uint8)
    memory[:: mmap.PAGESIZE] = 1
    endpoint = UcxEndpoint(LOOPBACK)
    lent = endpoint.lend(memory.ctypes.data, memory.nbytes, MemoryKind.HOST)
    way = lent.ways[0]
    _say({"address": memory.ctypes.data, "way": [way.transport, way.address.hex(), way.key.hex()]})
    settings = ClientSettings(lane, engine_incarnation=os.urandom(16), checksums=False)
    with KvClient.connect(settings, endpoint=endpoint) as client:
        namespace = open_namespace(client, block_bytes)
        pools = client.handoffs.lend([BlockPool.of([memory.reshape(-1, block_bytes)])])
        for line in sys.stdin:
            offers = [
                client.handoffs.offer(namespace, os.urandom(KEY_BYTES), pools, [index], ttl_s=60.0)
                for index in range(int(line))
            ]
            _say([offer.handoff_id for offer in offers])


def _say(words: object) -> None:
    sys.stdout.write(json.dumps(words) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
