"""From start to end: one daemon for a socket, the socket itself, signals, and an orderly stop."""

from __future__ import annotations

import asyncio
import fcntl
import gc
import logging
import os
import selectors
import signal
import socket
import stat
import sys
from contextlib import suppress
from typing import TYPE_CHECKING, Self

from kvstore.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from pathlib import Path

    from kvstore.daemon.server import Server

logger = logging.getLogger(__name__)

MAX_PATH_BYTES = 107
"""Longest path of a unix socket on Linux."""

SWITCH_INTERVAL_S = 5e-4
"""Python's own is 5 ms: for so long the admin or mover thread could keep the event loop, and with it
every client, waiting."""


class SocketPlace:
    """The path of a daemon's unix socket, held by one process at a time.

    The lock file beside it stays when the daemon has ended; the lock ends with the process, however
    that ends.
    """

    def __init__(self, path: Path) -> None:
        """Lock ``path``.

        Raises:
            ConfigError: another daemon serves it, or no socket can be made there.
        """
        if len(os.fsencode(path)) > MAX_PATH_BYTES:
            raise ConfigError(
                f"socket={path} has {len(os.fsencode(path))} bytes, and at most {MAX_PATH_BYTES} are "
                "possible: choose a shorter path"
            )
        if not path.parent.is_dir():
            raise ConfigError(
                f"socket={path}: the directory is missing: mkdir -p -m 700 {path.parent}"
            )
        self.path = path
        self._ours: tuple[int, int] | None = None
        self._lock = _lock(path)

    def listen(self) -> socket.socket:
        """Return a socket bound to the path, which only this user can connect to; the caller's.

        Raises:
            ConfigError: something else than an old socket of this user is there.
        """
        self._clear()
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        before = os.umask(0o177)
        try:
            listener.bind(os.fspath(self.path))
        except OSError as error:
            listener.close()
            raise ConfigError(f"socket={self.path} cannot be made: {error.strerror}") from None
        finally:
            os.umask(before)
        status = os.lstat(self.path)
        self._ours = status.st_dev, status.st_ino
        return listener

    def close(self) -> None:
        """Remove the socket if it is still the one that was made here, then let go of the path."""
        with suppress(OSError):
            status = os.lstat(self.path)
            if (status.st_dev, status.st_ino) == self._ours:
                self.path.unlink()
        os.close(self._lock)

    def __enter__(self) -> Self:
        """Return itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close."""
        self.close()

    def _clear(self) -> None:
        """Remove the socket of a daemon that ended without doing so."""
        try:
            status = os.lstat(self.path)
        except FileNotFoundError:
            return
        if not stat.S_ISSOCK(status.st_mode) or status.st_uid != os.geteuid():
            raise ConfigError(
                f"socket={self.path}: what is there is no socket of this user: remove it, or choose "
                "another path"
            )
        if _answers(self.path):  # its lock file was removed
            raise ConfigError(
                f"socket={self.path}: a daemon that nobody locked out serves there: stop it, or choose "
                "another path"
            )
        self.path.unlink()


def _answers(path: Path) -> bool:
    """Whether somebody accepts connections at ``path``."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as caller:
        caller.setblocking(False)  # noqa: FBT003
        try:
            caller.connect(os.fspath(path))
        except BlockingIOError:  # its queue is full
            return True
        except OSError:
            return False
    return True


def _lock(path: Path) -> int:
    """Return the open, locked lock file of ``path``."""
    name = f"{path}.lock"
    try:
        lock = os.open(name, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except OSError as error:
        raise ConfigError(f"socket={path}: cannot open {name}: {error.strerror}") from None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        holder = os.pread(lock, 20, 0).decode(errors="replace").strip() or "unknown"
        os.close(lock)
        raise ConfigError(
            f"another kvstore daemon (pid {holder}) serves {path}: stop it, or choose another socket"
        ) from None
    os.ftruncate(lock, 0)
    os.pwrite(lock, b"%d\n" % os.getpid(), 0)
    return lock


class BusyPoll(selectors.EpollSelector):
    """Looks for the next event for a moment before it sleeps.

    A client that got its answer soon asks again, and on a virtual machine waking up can take longer
    than answering.
    """

    def __init__(self, poll_s: float, clock: Callable[[], float]) -> None:
        """Look for ``poll_s`` seconds by ``clock``."""
        super().__init__()
        self._poll_s, self._clock = poll_s, clock

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        """Return the events that are there, or wait for them."""
        if timeout is None or timeout > self._poll_s:
            stop = self._clock() + self._poll_s
            while self._clock() < stop:
                if events := super().select(0):
                    return events
        return super().select(timeout)


def run(
    selector: selectors.BaseSelector,
    make_server: Callable[[], Server],
    listeners: Callable[[], Iterable[socket.socket]],
    on_ready: Callable[[], None],
    drain_timeout_s: float,
) -> None:
    """Serve until SIGTERM or SIGINT, on the main thread. A second signal ends the wait for clients.

    Args:
        selector: what the event loop waits with.
        make_server: called on the event loop.
        listeners: bound sockets, made when everything else is there; the server's from then on.
        on_ready: called when clients can connect.
        drain_timeout_s: seconds that clients get to end what they hold.
    """
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    with asyncio.Runner(loop_factory=lambda: asyncio.SelectorEventLoop(selector)) as runner:
        runner.run(_run(make_server, listeners, on_ready, drain_timeout_s))


async def _run(
    make_server: Callable[[], Server],
    listeners: Callable[[], Iterable[socket.socket]],
    on_ready: Callable[[], None],
    drain_timeout_s: float,
) -> None:
    loop = asyncio.get_running_loop()
    stop, at_once = asyncio.Event(), asyncio.Event()

    def on_signal() -> None:
        (at_once if stop.is_set() else stop).set()

    server = make_server()
    try:
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, on_signal)
        for listener in listeners():
            server.listen(listener)
        gc.collect()
        gc.freeze()  # what is there now stays: no collection needs to look at it again
        on_ready()
        await stop.wait()
        logger.info("stopping: clients get %g s to end what they hold", drain_timeout_s)
        drain = loop.create_task(server.drain(drain_timeout_s))
        cut_short = loop.create_task(at_once.wait())
        await asyncio.wait({drain, cut_short}, return_when=asyncio.FIRST_COMPLETED)
        for task in (drain, cut_short):
            task.cancel()
        if held := server.num_held():
            logger.warning("clients still held %d leases and reservations: they are void", held)
    finally:
        await server.close()
        logger.info("stopped")
