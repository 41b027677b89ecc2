"""The processes of a demonstration: a daemon, and engines that answer JSON lines. Every wait has a
deadline.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

ROOT = Path(__file__).resolve().parents[2]
HERE = Path(__file__).resolve().parent
# What an installation of the project would put on Python's path.
SOURCE_FOLDERS = [ROOT, ROOT / "client", ROOT / "engine_plugins", ROOT / "protos"]

START_TIMEOUT_S = 180.0  # vLLM's import alone takes a minute when several processes share two cores
ANSWER_TIMEOUT_S = 120.0
STOP_TIMEOUT_S = 30.0
DAEMON_START_TIMEOUT_S = 30.0
POLL_S = 0.02
LOG_TAIL_CHARACTERS = 8000  # a traceback through vLLM's processes, with the one that caused it

# What vLLM reads when it is imported. One process: the driver watches one, and it starts in a third of the
# time. The last would override the few MiB of KV that a demonstration asks for; it takes whole GiB.
VLLM_ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
}
VLLM_UNSET = "VLLM_CPU_KVCACHE_SPACE"


class ProcessFailed(Exception):
    """A process ended, or did not answer; the message holds the end of its log."""


class LoggedProcess:
    """A child process whose output goes to a file; killed, at the latest, when its `with` block ends."""

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        log_folder: Path,
        *,
        pass_fds: Sequence[int] = (),
        variables: Mapping[str, str] | None = None,
    ) -> None:
        """Start it. variables: of its environment, beside those that all have."""
        self.name = name
        self.log_path = log_folder / f"{name}.log"
        environment = os.environ | VLLM_ENVIRONMENT | dict(variables or {})
        environment |= {"PYTHONPATH": os.pathsep.join(map(str, SOURCE_FOLDERS)), "PYTHONUNBUFFERED": "1"}
        environment.pop(VLLM_UNSET, None)
        with self.log_path.open("ab") as log:
            self.process = subprocess.Popen(
                list(command),
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                pass_fds=pass_fds,
                env=environment,
                cwd=log_folder,
            )

    def failed(self, what: str) -> ProcessFailed:
        """Return what to raise, with the end of the log."""
        tail = self.log_path.read_text(errors="replace")[-LOG_TAIL_CHARACTERS:]
        return ProcessFailed(f"{self.name} {what}; the end of {self.log_path}:\n{tail}")

    def stop(self) -> None:
        """Ask it to end, and insist. Idempotent."""
        self.process.terminate()
        try:
            self.process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self.kill()
        self._close_input()

    def kill(self) -> None:
        """End it at once, and wait until it has ended. Idempotent."""
        self.process.kill()
        self.process.wait(STOP_TIMEOUT_S)
        self._close_input()

    def _close_input(self) -> None:
        if self.process.stdin is not None:
            with contextlib.suppress(BrokenPipeError):
                self.process.stdin.close()

    def signal(self, number: signal.Signals) -> None:
        """Send a signal, for example to stop and continue it."""
        self.process.send_signal(number)


class Daemon(LoggedProcess):
    """One `kvservice serve` that listens on a Unix socket."""

    def __init__(
        self, socket_path: Path, log_folder: Path, *, capacity_bytes: int, segment_bytes: int
    ) -> None:
        self.socket_path = socket_path
        command = [sys.executable, "-m", "kvservice", "serve"]
        command += ["--socket-path", str(socket_path), "--grpc-listen", "", "--tcp-listen", ""]
        command += ["--capacity-bytes", str(capacity_bytes), "--segment-bytes", str(segment_bytes)]
        super().__init__("daemon", command, log_folder)

    @property
    def endpoint(self) -> str:
        """Where clients find it."""
        return f"unix:{self.socket_path}"

    def __enter__(self) -> Self:
        """Wait until it listens."""
        until = time.monotonic() + DAEMON_START_TIMEOUT_S
        while not self._is_listening():
            if self.process.poll() is not None:
                raise self.failed(f"ended with status {self.process.returncode}")
            if time.monotonic() > until:
                self.kill()
                raise self.failed(f"did not listen within {DAEMON_START_TIMEOUT_S:.0f} s")
            time.sleep(POLL_S)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Ask it to end, and insist."""
        self.stop()

    def _is_listening(self) -> bool:
        """Whether somebody accepts connections; the file of an earlier life may still lie there."""
        with socket.socket(socket.AF_UNIX) as probe:
            try:
                probe.connect(str(self.socket_path))
            except (FileNotFoundError, ConnectionRefusedError):
                return False
        return True


class Engine(LoggedProcess):
    """One engine process (`engine_process.py`)."""

    def __init__(self, name: str, command: Sequence[str], log_folder: Path) -> None:
        self._answers, theirs = os.pipe()
        self._buffer = b""
        super().__init__(name, [*command, "--answers", str(theirs)], log_folder, pass_fds=[theirs])
        os.close(theirs)

    def __enter__(self) -> Self:
        """Wait until it is ready."""
        try:
            self.ready = self._answer(START_TIMEOUT_S)
        except BaseException:
            self.kill()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Ask it to end, and insist."""
        try:
            if error is None and self.process.poll() is None:
                self.ask({"op": "quit"}, timeout_s=STOP_TIMEOUT_S)
        finally:
            self.kill()
            os.close(self._answers)

    def ask(self, command: dict[str, Any], *, timeout_s: float = ANSWER_TIMEOUT_S) -> dict[str, Any]:
        """Send a command and return the answer."""
        self.send(command)
        return self._answer(timeout_s)

    def send(self, command: dict[str, Any]) -> None:
        """Send a command; `receive` returns its answer."""
        assert self.process.stdin is not None  # noqa: S101 - it was made with a pipe
        try:
            self.process.stdin.write(json.dumps(command).encode() + b"\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            raise self.failed("has ended") from None

    def receive(self, *, timeout_s: float = ANSWER_TIMEOUT_S) -> dict[str, Any]:
        """Return the answer to the oldest command that was sent."""
        return self._answer(timeout_s)

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        max_tokens: int,
        *,
        salt: str = "",
        transfer: Sequence[dict[str, Any] | None] = (),
    ) -> dict[str, Any]:
        """Answer prompts. transfer: kv_transfer_params of each, if any has some."""
        command = {"op": "generate", "prompts": list(prompts), "max_tokens": max_tokens, "salt": salt}
        return self.ask(command | {"transfer": list(transfer)})

    def settle(self, timeout_s: float) -> int:
        """Let the engine make steps until it holds no request's blocks; return how many requests are left."""
        left: int = self.ask({"op": "settle", "timeout_s": timeout_s})["left"]
        return left

    def reset(self) -> None:
        """Forget the engine's own prefix cache.

        Raises:
            ProcessFailed: it could not: some request still holds blocks.
        """
        if not self.ask({"op": "reset"})["reset"]:
            raise self.failed("could not forget its prefix cache")

    def _answer(self, timeout_s: float) -> dict[str, Any]:
        until = time.monotonic() + timeout_s
        while b"\n" not in self._buffer:
            left_s = max(0.0, until - time.monotonic())
            if not select.select([self._answers], [], [], left_s)[0]:
                raise self.failed(f"did not answer within {timeout_s:.0f} s")
            received = os.read(self._answers, 1 << 16)
            if not received:
                raise self.failed("has ended")
            self._buffer += received
        line, _, self._buffer = self._buffer.partition(b"\n")
        answer: dict[str, Any] = json.loads(line)
        return answer


def vllm_engine(
    name: str,
    python: Path,
    model: Path,
    log_folder: Path,
    *,
    transfer: dict[str, Any] | None = None,
    more: Sequence[str] = (),
) -> Engine:
    """Start a vLLM engine.

    transfer: vLLM's kv-transfer-config; None runs without a connector.
    more: further arguments of `engine_process.py`.
    """
    command = [str(python), str(HERE / "engine_process.py"), "--model", str(model), *more]
    if transfer is not None:
        command += ["--transfer", json.dumps(transfer)]
    return Engine(name, command, log_folder)


def transfer_config(role: str, endpoint: str, **extra: object) -> dict[str, Any]:
    """Return a kv-transfer-config for the connector.

    role: vLLM's kv_role.
    extra: settings of the connector (`kvplugins.vllm.settings`).
    """
    return {
        "kv_connector": "KvServiceConnector",
        # By module too: it then works where the project is on the path but not installed.
        "kv_connector_module_path": "kvplugins.vllm.connector",
        "kv_role": role,
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"endpoint": endpoint, **extra},
    }
