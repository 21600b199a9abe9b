"""Opens a connection: connect, shake hands, map the arena. Blocking; both faces use it."""

from __future__ import annotations

import array
import errno
import os
import socket
import struct
import weakref
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvstore.client.core import Connection
from kvstore.errors import UnavailableError, UsageError
from kvstore.protocol import (
    MAX_FRAME_BYTES,
    VERSION,
    Failed,
    FrameReader,
    ProtocolError,
    Welcome,
    decode_reply,
    encode,
)
from kvstore.tiers.shared import ClientMapping

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvstore.client.rules import Address
    from kvstore.protocol import Hello

PEERS: weakref.WeakSet[socket.socket] = weakref.WeakSet()
"""Sockets of this process that lead, or may lead, to a daemon."""

PEER = struct.Struct("3i")
"""What ``SO_PEERCRED`` gives: process, user and group."""


@dataclass(frozen=True)
class Deadline:
    """A moment, by a clock of monotonic seconds."""

    at: float
    clock: Callable[[], float]

    def left_s(self) -> float:
        """Return the seconds until then. Raises :class:`UnavailableError` when it has passed."""
        left = self.at - self.clock()
        if left <= 0:
            raise UnavailableError("timeout", "the daemon did not answer within the deadline")
        return left


def dial(address: Address, hello: Hello, deadline: Deadline) -> tuple[socket.socket, Connection]:
    """Connect to a daemon and map its arena.

    Returns:
        A non-blocking socket, and the connection. Both are the caller's; nothing stays open after
        an exception.

    Raises:
        UnavailableError: nobody listens, it is not this user's daemon, it refuses, or it takes too
            long.
    """
    with ExitStack() as undo:
        peer = undo.enter_context(_connect(address, deadline))
        welcome, descriptor = _shake_hands(peer, address, hello, deadline)
        if address.path is None:
            descriptor = _open_arena(welcome, hello)
        if descriptor is None:
            raise UnavailableError("protocol", f"{address} sent no descriptor of its memory")
        try:
            mapping = ClientMapping(descriptor, welcome.capacity_bytes, hello.access)
        except (OSError, UsageError) as error:
            raise UnavailableError(
                "refused", f"cannot map the memory of {address}: {error}"
            ) from None
        peer.setblocking(False)  # noqa: FBT003
        undo.pop_all()
    return peer, Connection(address, welcome, mapping)


def hang_up(peer: socket.socket, connection: Connection) -> None:
    """End a connection that nobody has used, in the order that matters."""
    connection.fail(UnavailableError("closed", "nobody uses the connection"))
    connection.mapping.detach()
    peer.close()


def _connect(address: Address, deadline: Deadline) -> socket.socket:
    family = (
        socket.AF_UNIX
        if address.path
        else socket.AF_INET6
        if ":" in address.host
        else socket.AF_INET
    )
    peer = socket.socket(family, socket.SOCK_STREAM)
    PEERS.add(peer)
    try:
        peer.settimeout(deadline.left_s())
        peer.connect(address.path or (address.host, address.port))
        if address.path:
            _check_owner(peer, address)
        else:
            peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    except TimeoutError:
        peer.close()
        raise UnavailableError("timeout", f"{address} does not accept connections") from None
    except OSError as error:
        peer.close()
        raise UnavailableError(
            "unreachable",
            f"no daemon at {address} ({error.strerror or error}); start it with `kvstore serve`",
        ) from None
    except BaseException:
        peer.close()
        raise
    return peer


def _check_owner(peer: socket.socket, address: Address) -> None:
    """Refuse a daemon of another user: anyone can make a socket below a directory such as /tmp."""
    _, user, _ = PEER.unpack(peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, PEER.size))
    if user not in (0, os.getuid()):
        raise UnavailableError(
            "refused", f"the daemon at {address} belongs to user {user}, not to you or root"
        )


def _shake_hands(
    peer: socket.socket, address: Address, hello: Hello, deadline: Deadline
) -> tuple[Welcome, int | None]:
    reader = FrameReader(MAX_FRAME_BYTES)
    descriptors: list[int] = []
    try:
        peer.sendall(encode(hello))
        while (body := reader.next_frame()) is None:
            peer.settimeout(deadline.left_s())
            _receive(peer, reader, descriptors)
        reply = decode_reply(body)
    except TimeoutError:
        reason = UnavailableError("timeout", f"{address} does not answer")
    except OSError as error:
        reason = UnavailableError("lost", f"{address} ended the connection: {error.strerror}")
    except ProtocolError as error:
        reason = UnavailableError("protocol", f"{address} is no kvstore daemon: {error}")
    except UnavailableError as error:
        reason = error
    else:
        if isinstance(reply, Welcome) and reply.version <= VERSION and len(descriptors) <= 1:
            return reply, descriptors[0] if descriptors else None
        message = reply.message if isinstance(reply, Failed) else "it does not shake hands"
        reason = UnavailableError("refused", f"the daemon at {address} refuses: {message}")
    for descriptor in descriptors:
        os.close(descriptor)
    raise reason


def _receive(peer: socket.socket, reader: FrameReader, descriptors: list[int]) -> None:
    """Receive bytes, and descriptors that come with them."""
    size = array.array("i").itemsize
    number, messages, _, _ = peer.recvmsg_into(
        [reader.buffer()], socket.CMSG_SPACE(4 * size), socket.MSG_CMSG_CLOEXEC
    )
    for level, kind, data in messages:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            whole = len(data) // size * size
            descriptors += array.array("i", data[:whole]).tolist()
    if number == 0:
        raise ConnectionResetError(errno.ECONNRESET, "it hung up")
    reader.received(number)


def _open_arena(welcome: Welcome, hello: Hello) -> int:
    """Open the memory of a daemon of this host that was reached over TCP."""
    number, *identity = welcome.arena
    flags = os.O_RDWR if hello.access == "write" else os.O_RDONLY
    try:
        descriptor = os.open(f"/proc/{welcome.pid}/fd/{number}", flags | os.O_CLOEXEC)
    except OSError as error:
        raise UnavailableError(
            "refused",
            f"cannot open the memory of process {welcome.pid} ({error.strerror}): over TCP the daemon must "
            "run on this host, as this user, in this PID namespace; use its unix socket otherwise",
        ) from None
    status = os.fstat(descriptor)
    if [status.st_dev, status.st_ino] != identity:
        os.close(descriptor)
        raise UnavailableError(
            "refused", f"process {welcome.pid} of this host is not the daemon; use its unix socket"
        )
    return descriptor


def _after_fork() -> None:
    """In the child of a fork: an inherited socket would hide from the daemon that the parent has ended."""
    for peer in list(PEERS):
        with suppress(OSError):
            os.close(peer.detach())


os.register_at_fork(after_in_child=_after_fork)
