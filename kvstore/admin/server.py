"""Listens for HTTP and serves the application from a thread of its own.

Bounds what a client can take: connections, bytes of a request's head, and seconds of a request from
the first byte of the connection (or the end of the request before) to the last byte of its answer.
"""

from __future__ import annotations

import ipaddress
import logging
import socket
import sys
from threading import Thread
from typing import TYPE_CHECKING, Any

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from kvstore.admin.problems import MEDIA_TYPE, ProblemError
from kvstore.errors import ConfigError

if TYPE_CHECKING:
    import asyncio

    from fastapi import FastAPI

MAX_CONNECTIONS = 256
"""Beyond it new ones are closed at once."""
MAX_HEAD_BYTES = 64 << 10
"""Longest request line and headers."""
REQUEST_TIMEOUT_S = 30.0
KEEP_ALIVE_S = 5
LINGER_S = 2.0
"""Seconds for which the rest of a malformed request is thrown away, so that its client reads why."""
GRACE_S = 1
"""Seconds that running requests get when the server closes."""
CLOSE_TIMEOUT_S = 2.0

_log = logging.getLogger(__name__)


class AdminServer:
    """An application behind one listening socket. Listens from construction until :meth:`close`."""

    def __init__(self, app: FastAPI, host: str, port: int) -> None:
        """Listen on ``host`` (an address or ``localhost``) and ``port`` (0: any free one), and serve ``app``.

        Raises:
            ConfigError: the port cannot be had, or ``host`` is reachable from other machines while
                ``app`` asks for no token.
        """
        if not (app.state.needs_token or _is_loopback(host)):
            raise ConfigError(
                f"admin_host={host!r} can be reached from other machines: set a token, or use 127.0.0.1"
            )
        self._socket = _listen(host, port)
        name = self._socket.getsockname()
        self.address: tuple[str, int] = (name[0], name[1])
        self._server = _Server(
            uvicorn.Config(
                app,
                loop="asyncio",
                http=_Connection,
                ws="none",
                lifespan="on",
                interface="asgi3",
                log_config=None,
                access_log=False,
                proxy_headers=False,
                server_header=False,
                h11_max_incomplete_event_size=MAX_HEAD_BYTES,
                timeout_keep_alive=KEEP_ALIVE_S,
                timeout_graceful_shutdown=GRACE_S,
            )
        )
        self._thread = Thread(target=self._run, name="kvstore-admin", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop listening, give running requests a second, and end the thread. Idempotent."""
        self._server.should_exit = True
        self._thread.join(CLOSE_TIMEOUT_S)
        if self._thread.is_alive():
            _log.warning("a request of the admin interface does not end: left behind")

    def _run(self) -> None:
        try:
            self._server.run([self._socket])
        finally:
            self._socket.close()


class _Server(uvicorn.Server):
    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Also end the connections that did not end in time."""
        await super().shutdown(sockets)
        for connection in list(self.server_state.connections):
            connection.transport.abort()


class _Connection(H11Protocol):
    """One connection: limited in time, and malformed requests are answered with a problem."""

    _deadline: asyncio.TimerHandle | None = None
    _refused = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > MAX_CONNECTIONS:
            transport.abort()
        else:
            self._end_in(REQUEST_TIMEOUT_S)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
        super().connection_lost(exc)

    def on_response_complete(self) -> None:
        self._end_in(REQUEST_TIMEOUT_S)
        super().on_response_complete()

    def data_received(self, data: bytes) -> None:
        if not self._refused:
            super().data_received(data)

    def send_400_response(self, msg: str) -> None:  # noqa: ARG002  (ours says more)
        """Answer a malformed request and read on for a moment; called while h11's error is handled."""
        if self.conn.our_state not in (h11.IDLE, h11.SEND_RESPONSE):
            self.transport.abort()  # in the middle of an answer
            return
        error: Any = sys.exception()
        status = getattr(error, "error_status_hint", 400)
        problem = ProblemError(status, None, "this is no HTTP/1.1 request that can be answered")
        headers = [("content-type", MEDIA_TYPE), ("connection", "close")]
        for event in (
            h11.Response(status_code=status, headers=headers),
            h11.Data(data=problem.body()),
            h11.EndOfMessage(),
        ):
            self.transport.write(self.conn.send(event) or b"")
        self._refused = True
        self.transport.write_eof()
        self._end_in(LINGER_S)

    def _end_in(self, seconds: float) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
        self._deadline = self.loop.call_later(seconds, self.transport.abort)


def _is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _listen(host: str, port: int) -> socket.socket:
    address = "127.0.0.1" if host == "localhost" else host
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        listener = socket.create_server((address, port), family=family, backlog=128)
    except OSError as error:
        raise ConfigError(
            f"admin_port={port}: cannot listen on {host}: {error}; choose another port (0 for any free one), "
            "or stop what uses it"
        ) from None
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # those it accepts have it too
    return listener
