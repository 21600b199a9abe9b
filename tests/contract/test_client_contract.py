"""The contract of a store, run by clients of a real daemon over real sockets and shared memory."""

from __future__ import annotations

import asyncio

import pytest

import kvstore
from kvstore.testing.contracts import PAGE, ClientContract
from kvstore.testing.daemon import DaemonThread


def closing(client, daemon):
    """Have ``client.close`` stop the daemon too, and look at what it left there."""
    close = client.close

    def close_both():
        close()
        daemon.close()

    client.close = close_both
    return client


class TestClient(ClientContract):
    @pytest.fixture(autouse=True)
    def _path(self, tmp_path):
        self.path = tmp_path / "kvstore.sock"

    def make_store(self, num_blocks):
        daemon = DaemonThread(self.path, num_blocks * PAGE, max_session_bytes=4 * num_blocks * PAGE)
        return closing(kvstore.connect(daemon.url, on_failure="raise", deadline_s=10), daemon)


class TestTcpClient(TestClient):
    def make_store(self, num_blocks):
        daemon = DaemonThread(
            self.path,
            num_blocks * PAGE,
            max_session_bytes=4 * num_blocks * PAGE,
            tcp_token="secret",
        )
        client = kvstore.connect(daemon.tcp_url, on_failure="raise", deadline_s=10, token="secret")
        return closing(client, daemon)


class Blocking:
    """An asyncio client with the blocking face, so that the same suite runs against it."""

    def __init__(self, daemon):
        self._daemon = daemon
        self._loop = asyncio.new_event_loop()
        self._client = self._run(self._open(daemon.url))
        self.block_tokens, self.tier_names = 16, ("dram",)

    async def _open(self, url):
        return kvstore.connect_async(url, on_failure="raise", deadline_s=10)

    def _run(self, coroutine):
        return self._loop.run_until_complete(coroutine)

    def __getattr__(self, name):
        method = getattr(self._client, name)

        def call(*arguments, **options):
            result = method(*arguments, **options)
            return self._run(result) if asyncio.iscoroutine(result) else result

        return call

    def close(self):
        self._run(self._client.close())
        self._loop.run_until_complete(self._loop.shutdown_default_executor())
        self._loop.close()
        self._daemon.close()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()


class TestAsyncClient(ClientContract):
    @pytest.fixture(autouse=True)
    def _path(self, tmp_path):
        self.path = tmp_path / "kvstore.sock"

    def make_store(self, num_blocks):
        return Blocking(
            DaemonThread(self.path, num_blocks * PAGE, max_session_bytes=4 * num_blocks * PAGE)
        )

    test_threads = test_threads_of_ranks = None  # an event loop has one thread
