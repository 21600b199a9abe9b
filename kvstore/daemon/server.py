"""Accepts clients and shakes hands with them; keeps their connections, and the daemon's state.

The handshake is done on the bare socket, because the arena's descriptor goes with the welcome. The
rest is :class:`kvstore.daemon.connection.Connection`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from kvstore.daemon.connection import Connection, Shared
from kvstore.daemon.handshake import RefusedError, Terms, check, receive_hello, send
from kvstore.daemon.session import Session
from kvstore.metrics import DAEMON_COUNTERS
from kvstore.protocol import (
    MAX_FRAME_BYTES,
    MAX_HELLO_BYTES,
    Failed,
    FrameReader,
    ProtocolError,
    Welcome,
)
from kvstore.stats import DaemonStatus

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvstore.daemon.handshake import ArenaMemory
    from kvstore.pool import Pool
    from kvstore.protocol import Hello

logger = logging.getLogger(__name__)

MAX_GREETINGS = 256
"""Connections of one family that may be shaking hands at once; more are closed unheard. Families are
counted apart: whom TCP brings must not keep out the owner of the unix socket."""
ACCEPTED_A_TURN = 16
WORKERS = 4
"""Threads for requests that read many bytes or wait; each client has one of them at a time."""
TICK_S = 1.0
DRAIN_STEP_S = 0.02


class Server:
    """The daemon's connections. To be made, used and closed on one event loop.

    :meth:`status` may be called from any thread.
    """

    def __init__(
        self, pool: Pool, store: ArenaMemory, terms: Terms, clock: Callable[[], float]
    ) -> None:
        """Serve nobody yet.

        Args:
            pool: borrowed; its first tier lies in ``store``.
            store: the arena; borrowed.
            terms: name, limits and timeouts.
            clock: monotonic seconds, the pool's own.
        """
        self.state = "starting"
        self.counts: Counter[str] = Counter(dict.fromkeys(DAEMON_COUNTERS, 0))
        self._pool = pool
        self._store = store
        self._terms = terms
        self._clock = clock
        self._arena = store.arena_stats()
        self._started = clock()
        self._worker = ThreadPoolExecutor(WORKERS, "kvstore-daemon")
        self._shared = Shared(
            clock, self.counts, self._worker, terms.slow_client_s, terms.dma_grace_s
        )
        self._listeners: list[socket.socket] = []
        self._greetings: dict[asyncio.Task[None], socket.socket] = {}
        self._loop = asyncio.get_running_loop()
        self._ticking = self._loop.call_later(TICK_S, self._tick)

    # -- what it does ---------------------------------------------------------------------------

    def listen(self, listener: socket.socket) -> None:
        """Accept clients from ``listener``, a bound unix or TCP socket; owned from here on."""
        listener.setblocking(False)  # noqa: FBT003
        listener.listen(1024)
        self._listeners.append(listener)
        self.state = "ready"
        self._loop.add_reader(listener, self._accept, listener)

    def status(self) -> DaemonStatus:
        """Return what clients, REST and the command line show."""
        return DaemonStatus(
            version=self._terms.release,
            node=self._terms.node,
            epoch=self._terms.epoch.hex(),
            pid=os.getpid(),
            uptime_s=self._clock() - self._started,
            state=self.state,
            socket=self._terms.socket,
            num_clients=len(self._shared.open),
            counts=dict(self.counts),
            arena=self._arena,
            pool=self._pool.stats(),
        )

    def num_held(self) -> int:
        """Leases and reservations of all clients."""
        return sum(connection.session.num_held for connection in self._shared.open)

    async def drain(self, timeout_s: float) -> None:
        """Accept nobody, lend nothing new; wait until nothing is held, but not longer than that."""
        self.state = "draining"
        self._stop_listening()
        stop = self._clock() + timeout_s
        for connection in self._shared.open:
            connection.session.draining = True
        while self._clock() < stop and self.num_held():  # noqa: ASYNC110  (leases also run out)
            await asyncio.sleep(DRAIN_STEP_S)

    async def close(self) -> None:
        """End all connections. The pool and its memory are still there, and the caller's."""
        self._ticking.cancel()
        self._stop_listening()
        for greeting in self._greetings:
            greeting.cancel()
        await asyncio.gather(*self._greetings, return_exceptions=True)
        for connection in list(self._shared.open):
            connection.close()
        self._worker.shutdown(wait=True, cancel_futures=True)
        await asyncio.sleep(0)  # the transports close their sockets

    # -- inner ----------------------------------------------------------------------------------

    def _stop_listening(self) -> None:
        for listener in self._listeners:
            self._loop.remove_reader(listener)
            listener.close()
        self._listeners.clear()

    def _tick(self) -> None:
        self._ticking = self._loop.call_later(TICK_S, self._tick)
        self._pool.reap()
        now = self._clock()
        for connection in list(self._shared.open):
            connection.settle(now)

    def _accept(self, listener: socket.socket) -> None:
        for _ in range(ACCEPTED_A_TURN):
            try:
                client, _ = listener.accept()
            except (BlockingIOError, ConnectionError):
                return
            except OSError as error:  # out of descriptors: try again when some may be free
                logger.warning("cannot accept clients: %s", error)
                self._loop.remove_reader(listener)
                self._loop.call_later(TICK_S, self._accept_again, listener)
                return
            greeted = sum(peer.family == client.family for peer in self._greetings.values())
            if greeted >= MAX_GREETINGS:
                self.counts["refused_clients"] += 1
                client.close()
                continue
            client.setblocking(False)  # noqa: FBT003
            greeting = self._loop.create_task(self._greet(client))
            self._greetings[greeting] = client
            greeting.add_done_callback(self._greeted)

    def _accept_again(self, listener: socket.socket) -> None:
        if listener in self._listeners:
            self._loop.add_reader(listener, self._accept, listener)

    def _greeted(self, greeting: asyncio.Task[None]) -> None:
        client = self._greetings.pop(greeting)
        if greeting.cancelled():  # perhaps before it began
            client.close()

    async def _greet(self, peer: socket.socket) -> None:
        """Shake hands; the socket ends up with a connection, or closed."""
        with contextlib.ExitStack() as undo:
            undo.callback(peer.close)
            reader = FrameReader(MAX_HELLO_BYTES)
            try:
                async with asyncio.timeout(self._terms.hello_timeout_s):
                    hello = await receive_hello(peer, reader)
                version = check(peer, hello, self._terms)
                self._check_room()
                connection = self._new_connection(peer, reader, hello)
                undo.callback(connection.close)
                self._welcome(peer, hello, version)
            except (RefusedError, ProtocolError, OSError) as error:
                self._refuse(peer, error)
                return
            self.counts["accepted_clients"] += 1
            reader.max_frame_bytes = MAX_FRAME_BYTES
            await self._loop.connect_accepted_socket(lambda: connection, peer)
            undo.pop_all()

    def _check_room(self) -> None:
        if len(self._shared.open) >= self._terms.max_clients:
            raise RefusedError(f"too many clients: {self._terms.max_clients} are connected")

    def _refuse(self, peer: socket.socket, error: Exception) -> None:
        self.counts["refused_clients"] += 1
        self.counts["protocol_errors"] += isinstance(error, ProtocolError)
        if isinstance(error, OSError):  # it went away, or kept silent
            return
        logger.warning("client refused: %s", error)
        with contextlib.suppress(OSError):
            send(peer, Failed(0, "refused", str(error)))

    def _welcome(self, peer: socket.socket, hello: Hello, version: int) -> None:
        """Send the welcome and, over a unix socket, the arena's descriptor."""
        welcome = Welcome(
            version=version,
            node=self._terms.node,
            epoch=self._terms.epoch,
            tier=self._pool.tier_names[0],
            capacity_bytes=self._store.capacity_bytes,
            block_tokens=self._pool.block_tokens,
            lease_timeout_s=self._terms.lease_timeout_s,
            pid=os.getpid(),
            arena=self._store.identity,
        )
        if peer.family != socket.AF_UNIX:
            send(peer, welcome)
        elif hello.access == "write":
            send(peer, welcome, self._store.descriptor)
        else:
            descriptor = self._store.open_read_only()
            try:
                send(peer, welcome, descriptor)
            finally:
                os.close(descriptor)

    def _new_connection(self, peer: socket.socket, reader: FrameReader, hello: Hello) -> Connection:
        session = Session(
            self._pool,
            self.status,
            access=hello.access,
            max_reserved_bytes=self._terms.max_session_bytes or self._store.capacity_bytes // 2,
            counts=self.counts,
        )
        session.draining = self.state == "draining"
        return Connection(session, peer, reader, self._shared, client=hello.client, dma=hello.dma)
