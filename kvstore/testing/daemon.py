"""A daemon inside this process, for tests of its clients: real sockets, real shared memory."""

from __future__ import annotations

import asyncio
import os
import socket
import threading
import time
from concurrent.futures import Future
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from kvstore.daemon.handshake import Terms
from kvstore.daemon.server import Server
from kvstore.pool import Pool
from kvstore.tiers.mover import ThreadMover
from kvstore.tiers.shared import SharedDramStore
from kvstore.tiers.tier import Tier
from radix import LRU, PriorityOrder

if TYPE_CHECKING:
    from pathlib import Path


class DaemonThread:
    """A server on a thread of its own, with ``capacity_bytes`` of shared memory."""

    def __init__(
        self,
        path: Path,
        capacity_bytes: int,
        *,
        lease_timeout_s: float = 60.0,
        block_tokens: int = 16,
        tcp_token: str | None = None,
        **terms: Any,
    ) -> None:
        """Serve at ``path``, and with ``tcp_token`` at a port of 127.0.0.1 as well.

        Args:
            path: of the unix socket.
            capacity_bytes: size of the arena.
            lease_timeout_s: as for the pool.
            block_tokens: as for the pool.
            tcp_token: secret of TCP clients.
            **terms: further fields of :class:`kvstore.daemon.server.Terms`.
        """
        self.path = path
        self.store = SharedDramStore(capacity_bytes, time.monotonic)  # noqa: TID251
        self.pool = Pool(
            [Tier("dram", self.store, PriorityOrder(LRU))],
            ThreadMover(64),
            time.monotonic,  # noqa: TID251
            block_tokens=block_tokens,
            lease_timeout_s=lease_timeout_s,
        )
        self._terms = Terms(
            node="test",
            epoch=os.urandom(8),
            socket=str(path),
            lease_timeout_s=lease_timeout_s,
            token=tcp_token,
            **terms,
        )
        self._tcp = tcp_token is not None
        self._ready: Future[tuple[Server, int]] = Future()
        self._loop = asyncio.new_event_loop()
        self._stop = asyncio.Event()
        self._thread = threading.Thread(target=self._run, name="kvstore-test-daemon")
        self._thread.start()
        self.server, self.port = self._ready.result(10)

    @property
    def url(self) -> str:
        """Where its clients connect."""
        return f"unix://{self.path}"

    @property
    def tcp_url(self) -> str:
        """Where its TCP clients connect."""
        return f"tcp://127.0.0.1:{self.port}"

    def close(self) -> None:
        """End all connections, and give the memory back."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join()
        self.pool.close()
        with suppress(FileNotFoundError):
            self.path.unlink()

    def __enter__(self) -> DaemonThread:
        """Return itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close."""
        self.close()

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._serve())

    async def _serve(self) -> None:
        server = Server(self.pool, self.store, self._terms, time.monotonic)  # noqa: TID251
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(str(self.path))
        server.listen(listener)
        port = 0
        if self._tcp:
            tcp = socket.create_server(("127.0.0.1", 0))
            port = tcp.getsockname()[1]
            server.listen(tcp)
        self._ready.set_result((server, port))
        await self._stop.wait()
        await server.close()
