"""The other process of the doctor: lends memory until its stdin ends.

`python -m kvservice.cli.lend_memory BYTES TRANSPORT LIBRARY TRANSPORTS DEVICES`
"""

from __future__ import annotations

import json
import sys

import numpy as np

from kvservice.core.engine_memory import MemoryKind
from kvservice.transports.one_sided import EndpointSettings, make_endpoint


def main() -> int:
    """Lend, say where it is, and wait."""
    size_bytes = int(sys.argv[1])
    transport, library, transports, devices = sys.argv[2:6]
    settings = EndpointSettings(transport=transport, library=library, transports=transports, devices=devices)
    endpoint = make_endpoint(settings)
    if endpoint is None:
        return 2
    memory = np.ones(size_bytes, np.uint8)
    address = int(memory.__array_interface__["data"][0])
    lent = endpoint.lend(address, size_bytes, MemoryKind.HOST)
    ways = [[way.transport, way.address.hex(), way.key.hex()] for way in lent.ways]
    sys.stdout.write(json.dumps({"address": address, "size_bytes": size_bytes, "ways": ways}) + "\n")
    sys.stdout.flush()
    sys.stdin.read()
    endpoint.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
