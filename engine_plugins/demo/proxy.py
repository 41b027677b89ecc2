"""A proxy that pairs prefill and decode: `proxy.py --port 8000 --prefill URL --decode URL`.

It speaks the OpenAI protocol and stands in front of two vLLM servers with the KvServiceConnector. A prompt
goes to the prefill server for one token, with `do_remote_decode`; what comes back as `kv_transfer_params` (a
ticket, see `kvplugins.vllm.ticket`) goes to the decode server with the request as it came, and that one's
answer is passed on as it arrives. A prefill server that fails, is slow or refuses costs the passage and
nothing else: decode computes.

The header `x-kv-handoffs` of an answer names the handoffs that the ticket was for, for those who look them
up. Runs in vLLM's environment, which has aiohttp. For a demonstration: one server of each kind, and no
authentication.
"""

from __future__ import annotations

import argparse
import logging
from collections.abc import Mapping
from typing import Any

import aiohttp
from aiohttp import web

logger = logging.getLogger("proxy")

PAIRED_PATHS = ("/v1/completions", "/v1/chat/completions")
PASSED_PATHS = ("/v1/models", "/health", "/version")
TRANSFER = "kv_transfer_params"
HANDOFF_IDS = "kvservice_handoff_ids"
HANDOFFS_HEADER = "x-kv-handoffs"

# What an answer for one token has no use for, or would refuse.
UNWANTED_IN_PREFILL = ("stream_options", "min_tokens", "best_of", "use_beam_search")
# Names of the limit on generated tokens; chats have the second.
LIMITS = ("max_tokens", "max_completion_tokens")

BODY_BYTES_MAX = 64 << 20
CHUNK_BYTES = 1 << 16
PREFILL_TIMEOUT_S = 120.0
CONNECT_TIMEOUT_S = 5.0


class Proxy:
    """Handles the requests of one pair of servers."""

    def __init__(self, session: aiohttp.ClientSession, prefill: str, decode: str) -> None:
        self._session = session
        self._prefill = prefill.rstrip("/")
        self._decode = decode.rstrip("/")

    async def pair(self, request: web.Request) -> web.StreamResponse:
        """Prefill in one server, and pass on what the other one decodes."""
        body = await _object_of(request)
        # Tickets are made by prefill servers; one that a client brings is for nobody here.
        body.pop(TRANSFER, None)
        ticket = await self._prefilled(request, body)
        if ticket:
            body[TRANSFER] = ticket
        return await self._passed_on(request, body, ticket)

    async def passed(self, request: web.Request) -> web.StreamResponse:
        """Pass a question about the model or the server on to decode."""
        return await self._passed_on(request, None, {})

    async def _prefilled(self, request: web.Request, body: Mapping[str, Any]) -> dict[str, Any]:
        """Return the ticket for a prompt's blocks; empty where decode has to compute them."""
        timeout = aiohttp.ClientTimeout(total=PREFILL_TIMEOUT_S, sock_connect=CONNECT_TIMEOUT_S)
        url = self._prefill + request.path
        try:
            async with self._session.post(
                url, json=for_prefill(body), headers=passed_headers(request), timeout=timeout
            ) as answer:
                if answer.status != web.HTTPOk.status_code:
                    # Whatever is wrong with the request, decode says so to the client.
                    logger.warning("prefill answered %d; decode computes", answer.status)
                    return {}
                said = await answer.json()
        except (aiohttp.ClientError, TimeoutError, ValueError) as error:
            logger.warning("prefill failed (%r); decode computes", error)
            return {}
        found = said.get(TRANSFER) if isinstance(said, dict) else None
        return found if isinstance(found, dict) else {}

    async def _passed_on(
        self, request: web.Request, body: Mapping[str, Any] | None, ticket: Mapping[str, Any]
    ) -> web.StreamResponse:
        """Send the request to decode, and pass its answer on as it comes."""
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_TIMEOUT_S)
        url = self._decode + request.path
        try:
            async with self._session.request(
                request.method, url, json=body, headers=passed_headers(request), timeout=timeout
            ) as answer:
                response = web.StreamResponse(status=answer.status)
                response.content_type = answer.content_type
                if ids := handoff_ids(ticket):
                    response.headers[HANDOFFS_HEADER] = ",".join(ids)
                await response.prepare(request)
                async for chunk in answer.content.iter_chunked(CHUNK_BYTES):
                    await response.write(chunk)
                await response.write_eof()
                return response
        except aiohttp.ClientConnectorError as error:
            raise web.HTTPBadGateway(text=f"the decode server is out of reach: {error}") from error


async def _object_of(request: web.Request) -> dict[str, Any]:
    try:
        body = await request.json()
    except ValueError as error:
        raise web.HTTPBadRequest(text=f"the body is no JSON: {error}") from error
    if not isinstance(body, dict):
        raise web.HTTPBadRequest(text="the body must be a JSON object")
    return body


def handoff_ids(ticket: Mapping[str, Any]) -> list[str]:
    """Return the numbers of the handoffs that a ticket is for."""
    ids = ticket.get(HANDOFF_IDS)
    return [text for text in map(str, ids) if text.isdecimal()] if isinstance(ids, list) else []


def for_prefill(body: Mapping[str, Any]) -> dict[str, Any]:
    """Return the request that computes a prompt's KV, to be decoded elsewhere."""
    made = {name: value for name, value in body.items() if name not in UNWANTED_IN_PREFILL}
    limits = {name: 1 for name in LIMITS if name in made} or {LIMITS[0]: 1}
    return made | limits | {"n": 1, "stream": False, TRANSFER: {"do_remote_decode": True}}


def passed_headers(request: web.Request) -> dict[str, str]:
    """Return the headers that both servers get as they came: who asks, and by which name."""
    return {
        name: request.headers[name] for name in ("Authorization", "X-Request-Id") if name in request.headers
    }


async def application(prefill: str, decode: str) -> web.Application:
    """Return the proxy as an application."""
    made = web.Application(client_max_size=BODY_BYTES_MAX)
    # As many connections as there are requests: a limit would queue decode behind prefill.
    session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0))

    async def close(_: web.Application) -> None:
        await session.close()

    made.on_cleanup.append(close)
    proxy = Proxy(session, prefill, decode)
    for path in PAIRED_PATHS:
        made.router.add_post(path, proxy.pair)
    for path in PASSED_PATHS:
        made.router.add_get(path, proxy.passed)
    return made


def main() -> None:
    """Serve until interrupted."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--prefill", required=True, help="for example http://127.0.0.1:8100")
    parser.add_argument("--decode", required=True, help="for example http://127.0.0.1:8200")
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    web.run_app(
        application(arguments.prefill, arguments.decode),
        host=arguments.host,
        port=arguments.port,
        access_log=None,
        # A client that goes away takes its request with it: decode aborts, and gives the ticket back.
        handler_cancellation=True,
    )


if __name__ == "__main__":
    main()
