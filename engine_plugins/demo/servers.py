"""Servers that speak HTTP: vLLM's own, and the proxy in front of two of them. Every wait has a deadline."""

from __future__ import annotations

import json
import re
import socket
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from processes import HERE, POLL_S, START_TIMEOUT_S, LoggedProcess

REQUEST_TIMEOUT_S = 120.0
PROBE_TIMEOUT_S = 2.0
MODEL_NAME = "tiny"
BLOCK_TOKENS = 32
# A server's engine runs in processes of its own; it does not start otherwise.
SERVER_VARIABLES = {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
METRIC = re.compile(r"^(?P<name>[\w:]+)(?:\{(?P<labels>[^}]*)\})? (?P<value>\S+)$", re.MULTILINE)


@dataclass(frozen=True)
class Answer:
    """What a server answered, its headers, and how long it took."""

    body: dict[str, Any]
    headers: dict[str, str]
    seconds: float

    @property
    def tokens(self) -> list[int]:
        """The generated tokens."""
        return list(self.body["choices"][0]["token_ids"])

    @property
    def text(self) -> str:
        """The generated text."""
        return str(self.body["choices"][0]["text"])


class Server(LoggedProcess):
    """A process that answers /health once it is ready."""

    def __init__(self, name: str, command: Sequence[str], log_folder: Path, port: int) -> None:
        self.url = f"http://127.0.0.1:{port}"
        super().__init__(name, [*command, "--port", str(port)], log_folder, variables=SERVER_VARIABLES)

    def __enter__(self) -> Self:
        """Wait until it is ready."""
        try:
            self._wait_until_healthy()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Ask it to end, and insist."""
        self.stop()

    def complete(self, prompt: Sequence[int], max_tokens: int, **more: object) -> Answer:
        """Answer a prompt greedily."""
        begin = time.monotonic()
        with urllib.request.urlopen(
            self._completion(prompt, max_tokens, **more), timeout=REQUEST_TIMEOUT_S
        ) as reply:
            body, headers = json.load(reply), {name.lower(): value for name, value in reply.headers.items()}
        return Answer(body, headers, time.monotonic() - begin)

    def stream(self, prompt: Sequence[int], max_tokens: int) -> tuple[str, int]:
        """Answer a prompt piece by piece; return the text, and in how many pieces it came."""
        pieces = []
        request = self._completion(prompt, max_tokens, stream=True)
        with urllib.request.urlopen(request, timeout=REQUEST_TIMEOUT_S) as reply:
            for line in reply:
                event = line.decode().removeprefix("data: ").strip()
                if event and event != "[DONE]":
                    pieces += [choice["text"] for choice in json.loads(event)["choices"]]
        return "".join(pieces), len(pieces)

    def metrics(self) -> dict[str, float]:
        """Return vLLM's metrics, by name, and by name and source for prompt tokens."""
        with urllib.request.urlopen(f"{self.url}/metrics", timeout=REQUEST_TIMEOUT_S) as reply:
            text = reply.read().decode()
        found: dict[str, float] = {}
        for match in METRIC.finditer(text):
            source = re.search(r'source="(\w+)"', match["labels"] or "")
            name = match["name"] + (f":{source[1]}" if source else "")
            found[name] = found.get(name, 0.0) + float(match["value"])
        return found

    def _completion(self, prompt: Sequence[int], max_tokens: int, **more: object) -> urllib.request.Request:
        body = {
            "model": MODEL_NAME,
            "prompt": list(prompt),
            "max_tokens": max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
        }
        return urllib.request.Request(
            f"{self.url}/v1/completions",
            json.dumps(body | more).encode(),
            {"Content-Type": "application/json"},
        )

    def _wait_until_healthy(self) -> None:
        until = time.monotonic() + START_TIMEOUT_S
        while not self._is_healthy():
            if self.process.poll() is not None:
                raise self.failed(f"ended with status {self.process.returncode}")
            if time.monotonic() > until:
                raise self.failed(f"was not ready within {START_TIMEOUT_S:.0f} s")
            time.sleep(POLL_S)

    def _is_healthy(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.url}/health", timeout=PROBE_TIMEOUT_S):
                return True
        except (urllib.error.URLError, HTTPException, OSError):
            return False


def vllm_server(
    name: str, python: Path, model: Path, log_folder: Path, *, transfer: dict[str, Any]
) -> Server:
    """Start a vLLM server. transfer: vLLM's kv-transfer-config."""
    command = [str(python), "-m", "vllm.entrypoints.openai.api_server", "--host", "127.0.0.1"]
    command += ["--model", str(model), "--served-model-name", MODEL_NAME, "--dtype", "float32"]
    command += ["--block-size", str(BLOCK_TOKENS), "--max-model-len", "2048", "--enforce-eager"]
    command += ["--max-num-seqs", "8", "--kv-cache-memory-bytes", "64M", "--seed", "0"]
    command += ["--kv-transfer-config", json.dumps(transfer)]
    return Server(name, command, log_folder, free_port())


def proxy_server(python: Path, log_folder: Path, *, prefill: Server, decode: Server) -> Server:
    """Start the proxy in front of two servers."""
    command = [str(python), str(HERE / "proxy.py"), "--prefill", prefill.url, "--decode", decode.url]
    return Server("proxy", command, log_folder, free_port())


def free_port() -> int:
    """Return a port of the loopback that nobody had a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
