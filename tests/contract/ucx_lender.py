"""A process that lends memory over UCX until its stdin ends: `ucx_lender.py SEED DEVICES CHUNK_BYTES`.

It says where the memory is; each line of its stdin is the index of a segment that it takes back.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from kvservice.core.engine_memory import MemoryKind
from kvservice.transports.one_sided import EndpointSettings
from kvservice.transports.ucx import UcxEndpoint
from tests.contract.one_sided_memory import SEGMENT_SIZES_BYTES, content


def main() -> None:
    """Lend, and do as told."""
    seed, devices, chunk_bytes = int(sys.argv[1]), sys.argv[2], int(sys.argv[3])
    endpoint = UcxEndpoint(EndpointSettings(devices=devices, registration_bytes=chunk_bytes))
    memory = [content(seed, index) for index in range(len(SEGMENT_SIZES_BYTES))]
    lent = [endpoint.lend(each.ctypes.data, each.nbytes, MemoryKind.HOST) for each in memory]
    said = [
        [each.ctypes.data, each.nbytes, [[w.transport, w.address.hex(), w.key.hex()] for w in how.ways]]
        for each, how in zip(memory, lent, strict=True)
    ]
    say(json.dumps(said))
    for line in sys.stdin:
        lent[int(line)].close()
        say("taken back")
    endpoint.close()


def say(line: str) -> None:
    """Tell the parent."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
