"""The beginning of a connection: who may connect, and in which version of the protocol.

Done on the bare socket, because the arena's descriptor goes with the first answer.
"""

from __future__ import annotations

import asyncio
import hmac
import os
import socket
import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from kvstore.protocol import OLDEST_VERSION, VERSION, decode_hello, encode

if TYPE_CHECKING:
    from kvstore.protocol import Failed, FrameReader, Hello, Welcome
    from kvstore.stats import ArenaStats

_CREDENTIALS = struct.Struct("3i")
"""What ``SO_PEERCRED`` gives: process, user and group."""


class ArenaMemory(Protocol):
    """Memory that is shared with clients, as :class:`kvstore.tiers.shared.SharedDramStore` has it."""

    capacity_bytes: int

    @property
    def descriptor(self) -> int: ...  # noqa: D102
    @property
    def identity(self) -> tuple[int, int, int]: ...  # noqa: D102
    def open_read_only(self) -> int: ...  # noqa: D102
    def arena_stats(self) -> ArenaStats: ...  # noqa: D102


@dataclass(frozen=True)
class Terms:
    """Who the daemon is, and what it grants."""

    node: str
    epoch: bytes
    """Drawn at each start."""
    socket: str
    """Path of the unix socket, for people."""
    lease_timeout_s: float
    release: str = "unknown"
    """Version of the package, for people."""
    max_clients: int = 256
    max_session_bytes: int = 0
    """Bytes that one client may have reserved and not committed; 0 for half of the arena."""
    token: str | None = None
    """Secret that TCP clients must show; without one there are none."""
    hello_timeout_s: float = 10.0
    slow_client_s: float = 30.0
    dma_grace_s: float = 1.0


class RefusedError(Exception):
    """This client is not served; the message tells it why."""


async def receive_hello(peer: socket.socket, reader: FrameReader) -> Hello:
    """Receive the first message; what comes behind it stays in ``reader``.

    Raises:
        ProtocolError: it is no hello.
        OSError: the client went away.
    """
    while (body := reader.next_frame()) is None:
        received = await asyncio.get_running_loop().sock_recv_into(peer, reader.buffer())
        if not received:
            raise ConnectionResetError
        reader.received(received)
    return decode_hello(body)


def check(peer: socket.socket, hello: Hello, terms: Terms) -> int:
    """Return the version of the protocol to speak. Raises :class:`RefusedError`."""
    version = min(VERSION, hello.version)
    if version < max(OLDEST_VERSION, hello.oldest_version):
        raise RefusedError(
            f"this daemon speaks versions {OLDEST_VERSION} to {VERSION} of the protocol, the client "
            f"{hello.oldest_version} to {hello.version}: update the older of the two"
        )
    if peer.family == socket.AF_UNIX:
        _check_user(peer)
    elif not _same(hello.token, terms.token):
        raise RefusedError("wrong token: over TCP, a client must show the daemon's")
    return version


def send(peer: socket.socket, message: Failed | Welcome, *descriptors: int) -> None:
    """Send the first answer, which fits into any socket's buffer. Raises OSError if it does not."""
    frame = encode(message)
    sent = socket.send_fds(peer, [frame], descriptors) if descriptors else peer.send(frame)
    if sent != len(frame):
        raise ConnectionAbortedError


def _check_user(peer: socket.socket) -> None:
    credentials = peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    _, user, _ = _CREDENTIALS.unpack(credentials)
    if user not in (0, os.geteuid()):
        raise RefusedError(f"user {user} may not use the daemon of user {os.geteuid()}")


def _same(shown: str | None, secret: str | None) -> bool:
    if shown is None or secret is None:
        return False
    return hmac.compare_digest(shown.encode(), secret.encode())
