"""Real daemons and real clients as processes, and waits that end with a fact or a deadline."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from kvclient import ClientSettings, Identity, Part, Shape
from kvclient.sync import KvClient, Namespace

ROOT = Path(__file__).resolve().parents[2]
START_LIMIT_S = 20.0
WAIT_LIMIT_S = 20.0
POLL_S = 0.005
BLOCK_BYTES = 64 << 10


class DaemonProcess:
    """`kvservice serve` in a folder of its own; started when made."""

    def __init__(
        self,
        folder: Path,
        *,
        capacity: str = "16MiB",
        segment: str = "1MiB",
        settings: dict[str, object] | None = None,
        config: str = "",
        grpc_listen: str = "127.0.0.1:0",
        tcp_listen: str = "127.0.0.1:0",
    ) -> None:
        self.socket_path = str(folder / "lane.sock")
        command = [sys.executable, "-m", "kvservice", "serve", "--socket-path", self.socket_path]
        command += ["--grpc-listen", grpc_listen, "--tcp-listen", tcp_listen]
        command += ["--capacity-bytes", capacity, "--segment-bytes", segment, "--log-level", "warning"]
        if config:
            (folder / "kvservice.toml").write_text(config)
            command += ["--config", str(folder / "kvservice.toml")]
        self._errors = (folder / "stderr").open("w+")
        self._process = subprocess.Popen(
            command, cwd=ROOT, env=plain_environment(settings), stdout=subprocess.DEVNULL, stderr=self._errors
        )
        self.pid = self._process.pid
        until(self._has_said_something, "the daemon says where it serves", START_LIMIT_S)
        line = self.said().splitlines()[0]
        assert line.startswith("kvservice: serving at unix:"), self.said()
        words = line.replace(",", " ").split()
        self.lane = next(word for word in words if word.startswith("unix:"))
        self.grpc = next(word for word in words if word.startswith("grpc://"))
        self.tcp_address = next(word for word in words if word.startswith("tcp://")).removeprefix("tcp://")

    def said(self) -> str:
        """Return what the daemon wrote on stderr so far."""
        self._errors.flush()
        return Path(self._errors.name).read_text()

    def signal(self, number: int) -> None:
        """Send a signal."""
        self._process.send_signal(number)

    def wait(self, limit_s: float = WAIT_LIMIT_S) -> int:
        """Wait for the end and return the exit code."""
        code = self._process.wait(limit_s)
        self._errors.close()
        return code

    def stop(self) -> int:
        """End it in order; return the exit code."""
        self.signal(signal.SIGTERM)
        return self.wait()

    def kill(self) -> None:
        """End it without warning. Idempotent."""
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait(WAIT_LIMIT_S)
        self._errors.close()

    def descriptors_count(self) -> int:
        """Return how many files it has open."""
        return len(list(Path(f"/proc/{self.pid}/fd").iterdir()))

    def _has_said_something(self) -> bool:
        assert self._process.poll() is None, f"the daemon ended: {self.said()}"
        return "\n" in self.said()


class ChildClient:
    """`tests/integration/child_client.py` as a process; it says a word when it got somewhere."""

    def __init__(self, *arguments: str) -> None:
        command = [sys.executable, str(ROOT / "tests/integration/child_client.py"), *arguments]
        self._process = subprocess.Popen(
            command,
            cwd=ROOT,
            env=plain_environment(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.pid = self._process.pid

    def hear(self) -> str:
        """Return the next line that the child writes."""
        assert self._process.stdout is not None
        ready, _, _ = select.select([self._process.stdout], [], [], WAIT_LIMIT_S)
        assert ready, "the child said nothing"
        return self._process.stdout.readline().strip()

    def signal(self, number: int) -> None:
        """Send a signal."""
        self._process.send_signal(number)

    def kill(self) -> None:
        """End it without warning, and wait until it is gone. Idempotent."""
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait(WAIT_LIMIT_S)
        for stream in (self._process.stdin, self._process.stdout):
            assert stream is not None
            with contextlib.suppress(BrokenPipeError):
                stream.close()

    def finish(self) -> int:
        """Let it end by itself: its stdin ends."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        assert self._process.stdout is not None
        code = self._process.wait(WAIT_LIMIT_S)
        self._process.stdout.close()
        return code


def plain_environment(settings: dict[str, object] | None = None) -> dict[str, str]:
    """Return this environment without settings of kvservice but those given, as in {"lease.ttl_ms": 500}."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("KVSERVICE_")}
    for key, value in (settings or {}).items():
        environment["KVSERVICE_" + key.upper().replace(".", "__")] = str(value)
    return environment


def until(is_so: Callable[[], object], what: str, limit_s: float = WAIT_LIMIT_S) -> None:
    """Look again and again until something is so; fail with its description after the limit."""
    end_s = time.monotonic() + limit_s
    while not is_so():
        assert time.monotonic() < end_s, f"not within {limit_s} s: {what}"
        select.select([], [], [], POLL_S)


def until_passed(seconds: float) -> None:
    """Let time pass that is itself the subject of a test, as the life of a lease is."""
    end_s = time.monotonic() + seconds
    until(lambda: time.monotonic() >= end_s, "time passes", seconds + WAIT_LIMIT_S)


def settings_of(endpoint: str, **fields) -> ClientSettings:
    """Return client settings."""
    return ClientSettings(endpoint=endpoint, **fields)


@contextlib.contextmanager
def opened(
    endpoint: str, *block_bytes: int, salt: bytes = b"", **fields
) -> Iterator[tuple[KvClient, Namespace]]:
    """Connect, and open a namespace with a part for each size."""
    with KvClient.connect(settings_of(endpoint, **fields)) as client:
        yield client, open_namespace(client, *block_bytes, salt=salt)


def open_namespace(client: KvClient, *block_bytes: int, salt: bytes = b"") -> Namespace:
    """Open a namespace with a part for each size."""
    return client.open_namespace(identity(), parts(*block_bytes), salt=salt)


def identity() -> Identity:
    """Return the identity of a model that is large enough for any part here."""
    return Identity(
        model_id="integration",
        weights_revision="1",
        layers_count=64,
        kv_heads_count=8,
        k_head_dim=128,
        hash_tokens=16,
    )


def parts(*block_bytes: int) -> list[Part]:
    """Return a part for each size, in groups of their own."""
    shape = Shape(dtype="bfloat16", kv_packing="packed", block_tokens=16)
    sizes = block_bytes or (BLOCK_BYTES,)
    return [
        Part(kv_group=group, layers_count=1, heads_count=1, shape=shape, block_bytes=size)
        for group, size in enumerate(sizes)
    ]


def key(number: int) -> bytes:
    """Return the block key of a number."""
    return number.to_bytes(8, "little") * 4


def keys(numbers) -> list[bytes]:
    """Return the block keys of some numbers."""
    return [key(number) for number in numbers]


def content(numbers, block_bytes: int = BLOCK_BYTES) -> np.ndarray:
    """Return (numbers, block_bytes) uint8 that only these numbers have, in any order of bytes."""
    words = np.arange(-(-block_bytes // 8), dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    chosen = (np.array(list(numbers), dtype=np.uint64) + np.uint64(1)) * np.uint64(0xD6E8FEB86659FD93)
    filled = words[None, :] ^ chosen[:, None]
    return np.ascontiguousarray(filled.view(np.uint8)[:, :block_bytes])


def check_stored(namespace: Namespace, numbers, block_bytes: int = BLOCK_BYTES) -> None:
    """Hold the stored blocks of some numbers to their bytes."""
    numbers = list(numbers)
    into = np.zeros((len(numbers), block_bytes), np.uint8)
    result = namespace.get(keys(numbers), into)
    assert result.prefix_count == len(numbers), result.outcomes
    assert np.array_equal(into, content(numbers, block_bytes))


def tier(client: KvClient):
    """Return the tier's counts."""
    return client.list_tiers().tiers[0]
