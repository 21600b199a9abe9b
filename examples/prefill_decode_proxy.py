r"""A proxy for prefill/decode separation: some vLLM engines compute prompts, others write the answers.

All of them share one kvstore daemon. A request goes to a prefill engine (``kv_role`` "kv_producer") first,
for one token: the engine stores the prompt's blocks, and the ``kv_transfer_params`` of its answer say how
many tokens they hold. With those the request goes to a decode engine ("kv_consumer"), which waits a moment
for blocks that are still being stored, loads them, and writes the answer. Where the prefill engine fails,
the decode engine computes the prompt itself: the answer is the same, and comes later.

    python examples/prefill_decode_proxy.py --port 8000 \
        --prefill http://127.0.0.1:8100 --decode http://127.0.0.1:8101

It needs fastapi, httpx and uvicorn, which vLLM's environment has. It knows nothing of its engines' load, and
keeps asking those that are down, and has no other paths than the two that generate: a router for
production does better.
"""

from __future__ import annotations

import logging
from contextlib import asynccontextmanager
from itertools import cycle
from typing import TYPE_CHECKING, Any

import click
import httpx
import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

logger = logging.getLogger("uvicorn.error")

PATHS = ("/v1/completions", "/v1/chat/completions")
PASSED_HEADERS = ("authorization", "x-request-id")
ANSWER_ONLY = frozenset(
    {
        "stream",
        "stream_options",
        "n",
        "min_tokens",
        "echo",
        "logprobs",
        "top_logprobs",
        "prompt_logprobs",
    }
)
"""Fields of a request that say how the answer is to be, and nothing about the prompt."""


def prompt_only(body: dict[str, Any]) -> dict[str, Any]:
    """Return the request that has an engine compute the prompt of ``body`` and one token."""
    short = {name: value for name, value in body.items() if name not in ANSWER_ONLY}
    short["max_tokens"] = 1
    if "max_completion_tokens" in body:
        short["max_completion_tokens"] = 1
    return short


class Proxy:
    """Sends each request to the next prefill engine, and then to the next decode engine."""

    def __init__(
        self,
        prefill: Sequence[str],
        decode: Sequence[str],
        client: httpx.AsyncClient,
        prefill_timeout_s: float,
    ) -> None:
        """Take turns among the engines at these URLs; ``client`` stays the caller's."""
        self._prefill, self._decode = cycle(prefill), cycle(decode)
        self._client = client
        self._prefill_timeout_s = prefill_timeout_s
        self._said_nothing: set[str] = set()

    async def answer(self, request: Request, body: dict[str, Any]) -> Response:
        """Answer a request as the decode engine does: its status, its body, streamed if it streams."""
        path = request.url.path
        headers = {
            name: request.headers[name] for name in PASSED_HEADERS if name in request.headers
        }
        if stored := await self._compute_prompt(path, body, headers):
            body["kv_transfer_params"] = (body.get("kv_transfer_params") or {}) | stored
        engine = next(self._decode)
        outgoing = self._client.build_request("POST", engine + path, json=body, headers=headers)
        try:
            reply = await self._client.send(outgoing, stream=True)
        except httpx.TransportError as error:
            logger.warning("decode engine %s: %r", engine, error)
            problem = {"message": "the decode engine does not answer", "type": "BadGateway"}
            return JSONResponse({"error": problem | {"code": 502}}, 502)
        kind = reply.headers.get("content-type")
        return StreamingResponse(_pieces(reply), reply.status_code, media_type=kind)

    async def _compute_prompt(
        self, path: str, body: dict[str, Any], headers: dict[str, str]
    ) -> dict[str, Any]:
        """Have a prefill engine store the prompt; return what a decode engine is to know of it."""
        engine = next(self._prefill)
        try:
            reply = await self._client.post(
                engine + path,
                json=prompt_only(body),
                headers=headers,
                timeout=self._prefill_timeout_s,
            )
            reply.raise_for_status()
            stored: dict[str, Any] = reply.json().get("kv_transfer_params") or {}
        except (httpx.HTTPError, ValueError) as error:
            logger.warning("prefill engine %s: %r; the prompt is computed later", engine, error)
            return {}
        if not stored and engine not in self._said_nothing:
            self._said_nothing.add(engine)
            logger.warning(
                "prefill engine %s says nothing of stored tokens: is its kv_role kv_producer, does its "
                "daemon run, is the prompt longer than a block? (Said once.)",
                engine,
            )
        return stored


async def _pieces(reply: httpx.Response) -> AsyncIterator[bytes]:
    """Pass an answer on as it comes; one that nobody reads any more is cancelled."""
    try:
        async for piece in reply.aiter_bytes():
            yield piece
    finally:
        await reply.aclose()


def make_app(
    prefill: Sequence[str],
    decode: Sequence[str],
    prefill_timeout_s: float = 60.0,
    transport: httpx.AsyncBaseTransport | None = None,
) -> FastAPI:
    """Return the proxy's application; ``transport`` replaces the network."""
    client = httpx.AsyncClient(
        transport=transport,
        timeout=httpx.Timeout(None, connect=5.0),
        # vLLM closes connections that were idle for 5 s: let go of them before that.
        limits=httpx.Limits(max_connections=None, keepalive_expiry=2.0),
        trust_env=False,
    )

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        async with client:
            yield

    app = FastAPI(title="prefill/decode proxy", lifespan=lifespan)
    proxy = Proxy(prefill, decode, client, prefill_timeout_s)
    for path in PATHS:
        app.add_api_route(path, proxy.answer, methods=["POST"], response_model=None)
    return app


def _urls(_: click.Context, __: click.Parameter, given: tuple[str, ...]) -> tuple[str, ...]:
    for url in given:
        if not url.startswith(("http://", "https://")):
            raise click.BadParameter(f"{url!r} is no URL: write http://HOST:PORT")
    return tuple(url.rstrip("/") for url in given)


@click.command()
@click.option(
    "--prefill",
    multiple=True,
    required=True,
    callback=_urls,
    help="URL of a prefill engine; repeat.",
)
@click.option(
    "--decode", multiple=True, required=True, callback=_urls, help="URL of a decode engine; repeat."
)
@click.option("--host", default="127.0.0.1", show_default=True)
@click.option("--port", default=8000, show_default=True)
@click.option("--prefill-timeout-s", default=60.0, show_default=True, help="Then decode alone.")
def main(
    prefill: tuple[str, ...],
    decode: tuple[str, ...],
    host: str,
    port: int,
    prefill_timeout_s: float,
) -> None:
    """Serve /v1/completions and /v1/chat/completions."""
    uvicorn.run(make_app(prefill, decode, prefill_timeout_s), host=host, port=port)


if __name__ == "__main__":
    main()
