"""Who may ask: the outermost layer of the application, in front of routing.

Denied unless allowed, also for paths that do not exist. With a token, every request but those for
:data:`OPEN_PATHS` carries it. Without one only this machine is listened to, and a page in a browser
must not reach it through a host name that its author points here (DNS rebinding): the ``Host`` must
be a usual name of this machine, or the address that the request came to. A request that a page of
another origin makes is refused in both cases.

Also here, because nothing is further out: at most :data:`MAX_REQUESTS` at once, and failures of the
application become a problem without details.
"""

from __future__ import annotations

import hmac
import logging
from asyncio import CancelledError
from typing import TYPE_CHECKING

from starlette.requests import ClientDisconnect

from kvstore.admin.problems import ProblemError

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

OPEN_PATHS = frozenset({"/healthz", "/readyz"})
"""Paths that need no token, for those who watch whether the daemon runs."""

MAX_REQUESTS = 64
"""Requests answered at once, those for ``OPEN_PATHS`` not counted."""

LOCAL_NAMES = frozenset({b"localhost", b"127.0.0.1", b"[::1]"})

_log = logging.getLogger(__name__)


class Guard:
    """ASGI application that lets requests through to ``app``, or refuses them."""

    def __init__(self, app: ASGIApp, token: str | None) -> None:
        """Guard ``app`` with ``token``; None: this machine only."""
        self._app = app
        self._token = None if token is None else token.encode()
        self._num_active = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] != "http":
            if scope["type"] == "lifespan":
                await self._app(scope, receive, send)
            return
        is_open = scope["path"] in OPEN_PATHS
        problem = self._refusal(scope, needs_token=not is_open)
        if problem is None and not is_open and self._num_active >= MAX_REQUESTS:
            problem = ProblemError(
                503,
                "overloaded",
                f"{MAX_REQUESTS} requests are being answered: try again",
                headers={"Retry-After": "1"},
            )
        if problem is not None:
            await problem.response()(scope, receive, send)
            return
        self._num_active += not is_open
        try:
            await self._answer(scope, receive, send)
        finally:
            self._num_active -= not is_open

    def _refusal(self, scope: Scope, *, needs_token: bool) -> ProblemError | None:
        headers: list[tuple[bytes, bytes]] = scope["headers"]
        hosts = [value.lower() for name, value in headers if name == b"host"]
        local = _local_names(scope)
        if self._token is None and not (len(hosts) == 1 and _is_one_of(local, hosts[0])):
            names = b", ".join(sorted(local)).decode()
            return ProblemError(
                403,
                "foreign-host",
                f"without a token only requests to these hosts are answered: {names}; use one of them, or "
                "set a token",
            )
        origins = [value.lower() for name, value in headers if name == b"origin"]
        if any(origin.partition(b"://")[2] not in hosts for origin in origins):
            return ProblemError(
                403, "foreign-origin", "pages of other sites must not use this interface"
            )
        if needs_token and self._token is not None and not _shows(self._token, headers):
            return ProblemError(
                401,
                "unauthorized",
                "send the daemon's token: Authorization: Bearer TOKEN",
                headers={"WWW-Authenticate": "Bearer"},
            )
        return None

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        started = False

        async def watched_send(message: Message) -> None:
            nonlocal started
            started = True
            await send(message)

        try:
            await self._app(scope, receive, watched_send)
        except ClientDisconnect:
            return
        except CancelledError:  # only when the server closes; raised on, it would be a failure
            problem = ProblemError(503, "not-ready", "the daemon ends")
        except Exception:
            _log.exception("%s %r failed", scope["method"], scope["path"])
            if started:
                raise  # too late for an answer: the connection has to end
            problem = ProblemError(500, None, "the daemon's log says what happened")
        else:
            return
        if not started:
            await problem.response()(scope, receive, send)


def _local_names(scope: Scope) -> frozenset[bytes]:
    """Names of this machine: the usual ones, and the address that this request came to."""
    address = str((scope.get("server") or ("127.0.0.1", None))[0])
    return LOCAL_NAMES | {(f"[{address}]" if ":" in address else address).encode()}


def _is_one_of(names: frozenset[bytes], host: bytes) -> bool:
    """Whether a ``Host`` header, with any port, has one of ``names``."""
    name, colon, port = host.rpartition(b":")
    return host in names or bool(colon and port.isdigit() and name in names)


def _shows(token: bytes, headers: list[tuple[bytes, bytes]]) -> bool:
    """Whether there is one ``Authorization`` header and it carries ``token``."""
    given = [value for name, value in headers if name == b"authorization"]
    if len(given) != 1:
        return False
    scheme, _, secret = given[0].partition(b" ")
    return hmac.compare_digest(secret.strip(), token) and scheme.lower() == b"bearer"
