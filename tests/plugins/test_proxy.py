"""The demonstration's proxy between servers that do as they are told: what goes where, what a failure costs.

It runs in vLLM's environment, which has the HTTP library that it is written for.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack, closing
from http.client import HTTPConnection
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
from processes import ROOT
from servers import Server, proxy_server

pytestmark = pytest.mark.vllm

PYTHON = ROOT / ".venv-vllm" / "bin" / "python"
HEADERS = {"Content-Type": "application/json", "X-Request-Id": "r-1", "Authorization": "Bearer me"}
TICKET = {"do_remote_prefill": True, "kvservice_handoff_ids": ["7", "8"]}


class Stub(ThreadingHTTPServer):
    """A server that answers what a test wants, and remembers what it was asked."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.asked: list[tuple[str, dict[str, Any]]] = []
        self.headers: list[Any] = []
        self.status = 200
        self.answer: list[bytes] = [b"{}"]
        self.content_type = "application/json"
        Thread(target=self.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()

    @property
    def url(self) -> str:
        """Where it listens."""
        return f"http://127.0.0.1:{self.server_address[1]}"

    def close(self) -> None:
        """End it."""
        self.shutdown()
        self.server_close()

    def will_say(self, body: Any, status: int = 200) -> None:
        """Answer with this from now on."""
        self.status, self.answer = status, [json.dumps(body).encode()]


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Stub

    def do_GET(self) -> None:
        self._reply(200, [b"{}"], "application/json")

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.headers.append(self.headers)
        self.server.asked.append((self.path, json.loads(body)))
        self._reply(self.server.status, self.server.answer, self.server.content_type)

    def _reply(self, status: int, pieces: list[bytes], content_type: str) -> None:
        self.send_response(status)
        self.send_header("Content-Type", content_type)
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        for piece in [*pieces, b""]:
            self.wfile.write(b"%x\r\n%s\r\n" % (len(piece), piece))
            self.wfile.flush()

    def log_message(self, *_: object) -> None:
        """Say nothing."""


class Pair:
    """Two stubs, and the proxy in front of them."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self.prefill, self.decode = Stub(), Stub()
        stack.callback(self.prefill.close)
        stack.callback(self.decode.close)
        self.proxy: Server = stack.enter_context(
            proxy_server(PYTHON, folder, prefill=self.prefill, decode=self.decode)  # type: ignore[arg-type]
        )

    def post(self, body: Any, path: str = "/v1/completions") -> tuple[int, bytes, dict[str, str]]:
        """Ask the proxy; return status, body and headers."""
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        connection = HTTPConnection(self.proxy.url.removeprefix("http://"), timeout=20)
        with closing(connection):
            connection.request("POST", path, data, HEADERS)
            reply = connection.getresponse()
            return reply.status, reply.read(), {name.lower(): value for name, value in reply.headers.items()}


@pytest.fixture(scope="module")
def processes_of_all(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    """Start the proxy once."""
    with ExitStack() as stack:
        yield Pair(tmp_path_factory.mktemp("proxy"), stack)


@pytest.fixture
def pair(processes_of_all: Pair) -> Pair:
    """Begin with stubs that have been asked nothing, and work."""
    found = processes_of_all
    for stub in (found.prefill, found.decode):
        stub.asked.clear()
        stub.content_type = "application/json"
    found.prefill.will_say({"kv_transfer_params": TICKET})
    found.decode.will_say({"choices": []})
    return found


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_prefill_is_asked_for_a_token_and_decode_gets_the_ticket(pair: Pair, path: str) -> None:
    """The one request becomes two, and nothing else of it changes."""
    body = {"prompt": "x", "max_tokens": 50, "n": 2, "min_tokens": 9, "stream_options": {}, "temperature": 0}
    status, answer, headers = pair.post(body, path)
    assert (status, json.loads(answer)) == (200, {"choices": []})
    asks = {"do_remote_decode": True}
    expected = {"prompt": "x", "max_tokens": 1, "n": 1, "temperature": 0, "stream": False}
    assert pair.prefill.asked == [(path, expected | {"kv_transfer_params": asks})]
    assert pair.decode.asked == [(path, body | {"kv_transfer_params": TICKET})]
    assert headers["x-kv-handoffs"] == "7,8"


def test_the_limit_of_chats_has_another_name(pair: Pair) -> None:
    """A prefill server that generates thousands of tokens would hold up everybody."""
    pair.post({"messages": [], "max_completion_tokens": 50}, "/v1/chat/completions")
    ((_, asked),) = pair.prefill.asked
    assert asked["max_completion_tokens"] == 1
    assert "max_tokens" not in asked


@pytest.mark.parametrize(
    ("said", "status"),
    [
        ({"error": "full"}, 503),
        ({"kv_transfer_params": None}, 200),
        ({}, 200),
        (["no object"], 200),
        ("text", 200),
    ],
)
def test_without_a_ticket_decode_computes(pair: Pair, said: Any, status: int) -> None:
    """A prefill server that fails, or has nothing to hand over, costs the passage alone."""
    pair.prefill.will_say(said, status)
    assert pair.post({"prompt": "x"})[0] == 200
    assert pair.decode.asked == [("/v1/completions", {"prompt": "x"})]


def test_a_client_brings_no_ticket_of_its_own(pair: Pair) -> None:
    """It is the proxy that pairs; whatever a client says of it does not reach an engine."""
    pair.prefill.will_say({})
    pair.post({"prompt": "x", "kv_transfer_params": {"do_remote_prefill": True}})
    assert pair.decode.asked == [("/v1/completions", {"prompt": "x"})]


def test_a_prefill_server_that_is_gone_costs_nothing_else(tmp_path: Path) -> None:
    """Nobody listens there, and decode answers."""
    with ExitStack() as stack:
        pair = Pair(tmp_path, stack)
        pair.prefill.close()
        pair.decode.will_say({"choices": [1]})
        assert json.loads(pair.post({"prompt": "x"})[1]) == {"choices": [1]}


def test_what_decode_refuses_the_client_is_told(pair: Pair) -> None:
    """Status and body are decode's."""
    pair.decode.will_say({"error": "too long"}, 400)
    assert pair.post({"prompt": "x"})[:2] == (400, b'{"error": "too long"}')


def test_a_body_that_is_no_request_is_refused(pair: Pair) -> None:
    """It goes to neither server."""
    assert pair.post(b"[1]")[0] == 400
    assert pair.post(b"{")[0] == 400
    assert pair.prefill.asked == pair.decode.asked == []


def test_a_stream_is_passed_on_piece_by_piece(pair: Pair) -> None:
    """The first token must not wait for the last."""
    pieces = [b"data: %d\n\n" % number for number in range(5)]
    pair.decode.answer, pair.decode.content_type = pieces, "text/event-stream"
    status, body, headers = pair.post({"prompt": "x", "stream": True})
    assert (status, body, headers["content-type"]) == (200, b"".join(pieces), "text/event-stream")
    ((_, asked),) = pair.prefill.asked
    assert asked["stream"] is False


def test_who_asks_and_by_which_name_reaches_both_servers(pair: Pair) -> None:
    """Whoever looks for a request in the logs finds it in both."""
    pair.post({"prompt": "x"})
    for stub in (pair.prefill, pair.decode):
        assert {name: stub.headers[-1].get(name) for name in HEADERS} == HEADERS
