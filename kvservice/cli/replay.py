"""`kvservice replay`: a request trace against a daemon, with every byte checked."""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from kvclient import ArenaFullError, ClientSettings, Identity, KvError, Part, QuotaExceededError, Shape
from kvclient.sync import KvClient, Namespace
from kvservice.cli.trace import TraceError, TraceRequest, read_trace
from kvservice.daemon.units import parse_size

EXIT_WRONG_BLOCKS = 1
EXIT_BAD_INPUT = 2
SERVER_START_TIMEOUT_S = 30.0
SLICE_KEYS = 256
"""Blocks moved by one put or get: bounds the buffers of the replay itself."""

HIT = 1
_STEP = 0x9E3779B97F4A7C15


@dataclass(slots=True)
class Tally:
    """What a replay counted and timed."""

    requests: int = 0
    blocks: int = 0
    hits: int = 0
    bytes_put: int = 0
    bytes_got: int = 0
    wrong_blocks: int = 0
    blocks_not_stored: int = 0
    get_s: float = 0.0
    put_s: float = 0.0
    lookup_us: list[float] = field(default_factory=list)

    def report(self) -> dict[str, Any]:
        """Return the figures by name."""
        lookups = np.array(self.lookup_us or [0.0])
        return {
            "requests": self.requests,
            "blocks": self.blocks,
            "hits": self.hits,
            "hit_rate": round(self.hits / self.blocks, 6) if self.blocks else 0.0,
            "bytes_put": self.bytes_put,
            "bytes_got": self.bytes_got,
            "wrong_blocks": self.wrong_blocks,
            "blocks_not_stored": self.blocks_not_stored,
            "get_gbps": round(self.bytes_got / self.get_s / 1e9, 3) if self.get_s else 0.0,
            "put_gbps": round(self.bytes_put / self.put_s / 1e9, 3) if self.put_s else 0.0,
            "lookup_p50_us": round(float(np.percentile(lookups, 50)), 1),
            "lookup_p99_us": round(float(np.percentile(lookups, 99)), 1),
        }


def add_command(commands: Any) -> None:
    """Add the command to the parser's commands."""
    parser = commands.add_parser("replay", help="run a request trace against a daemon and check every byte")
    parser.add_argument("trace", type=Path, help="JSON lines with hash_ids")
    parser.add_argument("--endpoint", help="daemon to use (default: one of its own)")
    parser.add_argument("--requests", type=_positive, metavar="N", help="stop after N requests")
    parser.add_argument("--block-bytes", type=_size, default=65536, metavar="B", help="bytes of one block")
    parser.add_argument(
        "--capacity-bytes", type=_size, default=1 << 30, metavar="C", help="arena of its own daemon"
    )
    parser.add_argument("--json", action="store_true", help="one JSON object instead of a table")
    parser.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> int:
    tally = Tally()
    try:
        with contextlib.ExitStack() as stack:
            endpoint = options.endpoint or stack.enter_context(own_daemon(options.capacity_bytes))
            settings = ClientSettings(endpoint=endpoint, client_name="kvservice replay")
            client = stack.enter_context(KvClient.connect(settings))
            requests = list(read_trace(options.trace, limit_count=options.requests))
            replay = Replay(client, block_bytes=options.block_bytes, tally=tally)
            for request in _with_progress(requests):
                replay.play(request)
    except (KvError, TraceError) as error:
        sys.stderr.write(f"kvservice: {error}\n")
        return EXIT_BAD_INPUT
    report = tally.report()
    if options.json:
        sys.stdout.write(json.dumps(report) + "\n")
    else:
        for name, value in report.items():
            sys.stdout.write(f"{name:18} {value}\n")
    return EXIT_WRONG_BLOCKS if tally.wrong_blocks else 0


class Replay:
    """Plays requests: look the chain up, get what is there, put the rest."""

    def __init__(self, client: KvClient, *, block_bytes: int, tally: Tally) -> None:
        self._namespace = _open(client, block_bytes)
        self._tally = tally
        words = -(-block_bytes // 8)
        self._pattern = np.arange(words, dtype=np.uint64) * np.uint64(0xD6E8FEB86659FD93)
        self._block_bytes = block_bytes
        self._buffer: npt.NDArray[np.uint8] = np.empty((SLICE_KEYS, block_bytes), dtype=np.uint8)

    def play(self, request: TraceRequest) -> None:
        """Run one request."""
        tally, ids = self._tally, request.hash_ids
        tally.requests += 1
        tally.blocks += len(ids)
        if not ids:
            return
        keys = [_key(hash_id) for hash_id in ids]
        started = time.perf_counter()
        found = self._namespace.lookup(keys).prefix_count
        tally.lookup_us.append((time.perf_counter() - started) * 1e6)
        got = 0
        for start in range(0, found, SLICE_KEYS):
            got += self._get(ids[start : min(start + SLICE_KEYS, found)])
        tally.hits += got
        for start in range(found, len(ids), SLICE_KEYS):
            self._put(ids[start : start + SLICE_KEYS])

    def _get(self, ids: tuple[int, ...]) -> int:
        target = self._buffer[: len(ids)]
        started = time.perf_counter()
        result = self._namespace.get([_key(i) for i in ids], target)
        self._tally.get_s += time.perf_counter() - started
        self._tally.bytes_got += result.bytes_moved
        for index in np.flatnonzero(result.outcomes == HIT).tolist():
            if not np.array_equal(target[index], self._content(ids[index])):
                self._tally.wrong_blocks += 1
        return result.prefix_count

    def _put(self, ids: tuple[int, ...]) -> None:
        source = self._buffer[: len(ids)]
        for index, hash_id in enumerate(ids):
            source[index] = self._content(hash_id)
        started = time.perf_counter()
        try:
            result = self._namespace.put([_key(i) for i in ids], source)
        except (ArenaFullError, QuotaExceededError):
            # The trace asks for more at once than the arena holds; a miss later.
            self._tally.blocks_not_stored += len(ids)
            return
        self._tally.put_s += time.perf_counter() - started
        self._tally.bytes_put += result.bytes_moved

    def _content(self, hash_id: int) -> npt.NDArray[np.uint8]:
        """(block_bytes,) uint8 that only this id has."""
        words = self._pattern ^ np.uint64((hash_id + 1) * _STEP % 2**64)
        return words.view(np.uint8)[: self._block_bytes]


@contextlib.contextmanager
def own_daemon(capacity_bytes: int) -> Iterator[str]:
    """Run a daemon for the time of the block, and yield its endpoint."""
    with tempfile.TemporaryDirectory(prefix="kvservice-") as folder:
        path = f"{folder}/lane.sock"
        command = [sys.executable, "-m", "kvservice", "serve", "--socket-path", path]
        command += ["--grpc-listen", "", "--tcp-listen", "", "--capacity-bytes", str(capacity_bytes)]
        with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as daemon:
            try:
                line = daemon.stderr.readline() if daemon.stderr else ""
                if "serving at" not in line:
                    raise TraceError(f"the daemon did not start: {line.strip()}")
                yield f"unix:{path}"
            finally:
                daemon.terminate()
                daemon.wait(SERVER_START_TIMEOUT_S)


def _open(client: KvClient, block_bytes: int) -> Namespace:
    """Open a namespace whose parts are as large as asked and mean nothing."""
    identity = Identity(
        model_id="kvservice-replay",
        weights_revision="1",
        attention_kind="none",
        layers_count=1,
        kv_heads_count=1,
        k_head_dim=1,
        v_head_dim=1,
        hash_algorithm="sha256",
        hash_tokens=512,
    )
    shape = Shape(dtype="uint8", kv_packing="opaque", block_tokens=512)
    part = Part(layers_count=1, heads_count=1, shape=shape, block_bytes=block_bytes)
    return client.open_namespace(identity, [part], salt=str(block_bytes).encode())


def _key(hash_id: int) -> bytes:
    return hashlib.sha256(hash_id.to_bytes(8, "little")).digest()


def _with_progress(requests: list[TraceRequest]) -> Iterator[TraceRequest]:
    """Yield the requests, with a bar on stderr where that is a terminal."""
    show = sys.stderr.isatty()
    for index, request in enumerate(requests):
        if show and index % 32 == 0:
            share = index / len(requests)
            sys.stderr.write(f"\r[{'#' * int(share * 40):40}] {index}/{len(requests)} requests")
            sys.stderr.flush()
        yield request
    if show:
        sys.stderr.write(f"\r[{'#' * 40}] {len(requests)}/{len(requests)} requests\n")


def _positive(text: str) -> int:
    value = int(text) if text.isdigit() else 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: give a whole number from 1 on")
    return value


def _size(text: str) -> int:
    try:
        value = parse_size(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: give at least one byte")
    return value
