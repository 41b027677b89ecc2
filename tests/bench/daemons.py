"""Daemons of the bench's own: started, watched by process id, stopped."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from kvclient import ClientSettings, Identity, Part, Shape
from kvclient.sync import KvClient, Namespace

ROOT = Path(__file__).resolve().parents[2]
START_TIMEOUT_S = 30.0
STOP_TIMEOUT_S = 30.0
KIB, MIB, GIB = 2**10, 2**20, 2**30

_POLL_S = 0.002
_SETTLE_S = 10.0
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True)
class RunningDaemon:
    """A daemon that serves; endpoints are empty where it does not listen."""

    pid: int
    lane: str
    grpc: str

    def cpu_s(self) -> float:
        """CPU time of all its threads since it started, in steps of one kernel tick."""
        fields = Path(f"/proc/{self.pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / _TICKS_PER_S

    def resident_bytes(self) -> int:
        """Private and shared memory that it has mapped and touched, without files."""
        status = Path(f"/proc/{self.pid}/status").read_text(encoding="ascii")
        return sum(int(kib) * KIB for kib in re.findall(r"Rss(?:Anon|Shmem):\s+(\d+) kB", status))

    def wait_until_settled(self) -> None:
        """Wait until its memory grows no more: the arena is touched."""
        end_s = time.monotonic() + _SETTLE_S
        before = -1
        while time.monotonic() < end_s:
            now = self.resident_bytes()
            if now == before:
                return
            before = now
            time.sleep(0.1)


@contextlib.contextmanager
def daemon(
    capacity_bytes: int, *, segment_bytes: int | None = None, has_grpc: bool = False
) -> Iterator[RunningDaemon]:
    """Run a daemon for the time of the block. Raises OSError when it does not start."""
    with tempfile.TemporaryDirectory(prefix="kvbench-") as folder:
        command = [sys.executable, "-m", "kvservice", "serve", "--socket-path", f"{folder}/lane.sock"]
        command += ["--grpc-listen", "127.0.0.1:0" if has_grpc else ""]
        command += ["--tcp-listen", "127.0.0.1:0" if has_grpc else "", "--log-level", "error"]
        command += ["--capacity-bytes", str(capacity_bytes)]
        if segment_bytes is not None:
            command += ["--segment-bytes", str(segment_bytes)]
        log = Path(folder) / "log"
        with log.open("wb") as stderr, subprocess.Popen(command, stderr=stderr, cwd=ROOT) as process:
            try:
                said = _announcement(process, log)
                yield RunningDaemon(process.pid, _place(said, "unix:"), _place(said, "grpc://"))
            finally:
                process.terminate()
                try:
                    process.wait(STOP_TIMEOUT_S)
                except subprocess.TimeoutExpired:
                    process.kill()


@contextlib.contextmanager
def client(endpoint: str, *, is_checked: bool = True) -> Iterator[KvClient]:
    """Connect a client; unchecked means that neither puts nor gets sum anything."""
    settings = ClientSettings(
        endpoint=endpoint, client_name="bench", checksums=is_checked, verify=is_checked, call_timeout_s=20.0
    )
    with KvClient.connect(settings) as connected:
        yield connected


def open_namespace(connected: KvClient, block_bytes: int) -> Namespace:
    """Open a namespace of one part whose blocks have this size and mean nothing."""
    identity = Identity(
        model_id="kvservice-bench",
        weights_revision="1",
        attention_kind="none",
        layers_count=1,
        kv_heads_count=1,
        k_head_dim=1,
        v_head_dim=1,
        hash_algorithm="sha256",
        hash_tokens=16,
    )
    shape = Shape(dtype="uint8", kv_packing="opaque", block_tokens=16)
    part = Part(layers_count=1, heads_count=1, shape=shape, block_bytes=block_bytes)
    return connected.open_namespace(identity, [part], salt=str(block_bytes).encode())


def _announcement(process: subprocess.Popen[bytes], log: Path) -> str:
    end_s = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < end_s:
        said = log.read_text(encoding="utf-8")
        if "serving at" in said and said.endswith("\n"):
            return said
        if process.poll() is not None:
            break
        time.sleep(_POLL_S)
    raise OSError(f"the daemon did not start: {log.read_text(encoding='utf-8').strip()}")


def _place(said: str, scheme: str) -> str:
    found = re.search(rf"{scheme}[^ ,]+", said)
    return found[0] if found else ""
