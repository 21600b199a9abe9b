"""Clients and what may happen to their daemon: down, silent, restarted, stopped, forked beside."""

from __future__ import annotations

import asyncio
import os
import socket
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from prometheus_client import CollectorRegistry, generate_latest

import kvstore
from kvstore.client.blocking import Client
from kvstore.errors import (
    ConfigError,
    LeaseExpiredError,
    LeaseNotHeldError,
    UnavailableError,
    UsageError,
)
from kvstore.metrics import CLIENT_COUNTERS
from kvstore.namespace import KVLayout, Namespace
from kvstore.protocol import FrameReader, Held, Welcome, encode
from kvstore.testing import pattern
from kvstore.testing.daemon import DaemonThread

LAYOUT = KVLayout(num_layers=1, num_kv_heads=1, head_dim=8, dtype="float32", block_tokens=4)
NAMESPACE = Namespace(b"weights", LAYOUT)
PAGE = 4096


@pytest.fixture
def path(tmp_path):
    return tmp_path / "kvstore.sock"


@pytest.fixture
def daemon(path):
    with DaemonThread(path, 64 * PAGE) as daemon:
        yield daemon


def put(store, tokens):
    reservation = store.reserve(NAMESPACE, tokens)
    for index, slot in zip(reservation.indices.tolist(), reservation.slots(), strict=True):
        slot[:] = pattern(NAMESPACE, prefix(tokens, index + 1))
    return store.commit(reservation)


def prefix(tokens, num_blocks):
    return np.array(list(tokens)[: num_blocks * 4], "<i4").tobytes()


def hit(store, tokens):
    """Tokens of a lease whose bytes are right, or 0."""
    try:
        with store.acquire(NAMESPACE, tokens) as lease:
            for index, slot in enumerate(lease.slots()):
                np.testing.assert_array_equal(slot, pattern(NAMESPACE, prefix(tokens, index + 1)))
            return lease.hit_tokens
    except LeaseExpiredError:
        return 0


def wait_until(condition, timeout_s=10.0):
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.005)


class Silent:
    """A daemon that shakes hands when told to, and then says nothing."""

    def __init__(self, path, *, welcome):
        self.listener = socket.socket(socket.AF_UNIX)
        self.listener.bind(str(path))
        self.listener.listen(8)
        self.welcome, self.peers = welcome, []
        self.thread = threading.Thread(target=self.run, name="kvstore-silent")
        self.thread.start()

    def run(self):
        while True:
            try:
                peer, _ = self.listener.accept()
            except OSError:
                return
            self.peers.append(peer)
            if self.welcome:
                memory = os.memfd_create("kvstore-test", os.MFD_ALLOW_SEALING)
                os.ftruncate(memory, PAGE)
                import fcntl

                fcntl.fcntl(memory, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
                frame = encode(Welcome(1, "n", b"e", "dram", PAGE, 16, 60.0, 1, (0, 0, 0)))
                socket.send_fds(peer, [frame], [memory])
                os.close(memory)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.listener.shutdown(socket.SHUT_RDWR)
        self.listener.close()
        self.thread.join()
        for peer in self.peers:
            peer.close()


class TestADaemonThatIsNotThere:
    def test_everything_misses_and_is_counted(self, path):
        with kvstore.connect(f"unix://{path}") as store:
            assert store.lookup(NAMESPACE, range(9)) == 0
            lease = store.acquire(NAMESPACE, range(9))
            assert lease.num_blocks == 0
            assert lease.failure in ("unreachable", "breaker")
            store.release(lease)
            reservation = store.reserve(NAMESPACE, range(9))
            assert (reservation.num_blocks, reservation.refused) == (0, 0)
            assert store.commit(reservation) == 0
            assert store.explain(NAMESPACE, range(9)).hit_tokens == 0
            counts = store.counters()
            failures = {key[1]: value for key, value in counts.items() if key[0] == "failures"}
            assert failures == {
                "connect": 1, "lookup": 1, "acquire": 1, "reserve": 1, "explain": 1,
            }  # fmt: skip
            with pytest.raises(UnavailableError):
                store.stats()

    def test_on_failure_raise_says_what_to_do(self, path):
        with pytest.raises(UnavailableError, match=r"no daemon at .*kvstore serve"):
            kvstore.connect(f"unix://{path}", on_failure="raise")

    def test_it_is_not_asked_at_every_call(self, path):
        with kvstore.connect(f"unix://{path}") as store:
            for _ in range(200):
                store.lookup(NAMESPACE, range(9))
            counts = store.counters()
            assert counts["failures", "lookup", "breaker"] >= 190

    def test_it_is_found_when_it_comes(self, path):
        with kvstore.connect(f"unix://{path}") as store:
            assert hit(store, range(9)) == 0
            with DaemonThread(path, 64 * PAGE, block_tokens=32):
                wait_until(lambda: put(store, range(9)) == 2)
                assert hit(store, range(9)) == 8


class TestADaemonThatSaysNothing:
    @pytest.mark.parametrize("welcome", [False, True])
    def test_calls_end_at_their_deadline(self, path, welcome):
        with (
            Silent(path, welcome=welcome),
            kvstore.connect(f"unix://{path}", deadline_s=0.2) as store,
        ):
            wait_until(lambda: store.counters()["failures", "lookup", "breaker"] == 0)
            worst = 0.0
            for _ in range(20):
                start = time.monotonic()
                assert store.lookup(NAMESPACE, range(9)) == 0
                worst = max(worst, time.monotonic() - start)
                time.sleep(0.02)
            assert worst < 0.2 + 0.3
            reasons = {key[2] for key in store.counters() if key[0] == "failures"}
            assert reasons <= {"timeout", "breaker"}
            assert "timeout" in reasons

    def test_threads_that_wait_all_end(self, path):
        with (
            Silent(path, welcome=True),
            kvstore.connect(f"unix://{path}", deadline_s=0.2) as store,
        ):
            start = time.monotonic()
            threads = [
                threading.Thread(target=store.lookup, args=(NAMESPACE, range(9))) for _ in range(8)
            ]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            assert time.monotonic() - start < 0.2 + 0.5


class TestADaemonThatEnds:
    def test_what_was_held_is_void(self, path):
        daemon = DaemonThread(path, 64 * PAGE)
        with kvstore.connect(daemon.url) as store:
            put(store, range(17))
            lease = store.acquire(NAMESPACE, range(17))
            slots = list(lease.slots())
            assert slots[0].any()
            reservation = store.reserve(NAMESPACE, range(100, 117))
            daemon.close()
            wait_until(
                lambda: not slots[0].any()
            )  # zeros: the memory is not this daemon's any more
            for slot in reservation.slots():
                slot[:] = 255  # hurts nobody
            with pytest.raises(LeaseExpiredError):
                store.release(lease)
            assert store.commit(reservation) == 0
            with pytest.raises(LeaseNotHeldError):
                store.release(lease)

    def test_another_one_takes_its_place(self, path):
        with kvstore.connect(f"unix://{path}") as store:
            for capacity in (64, 32, 128):
                with DaemonThread(path, capacity * PAGE):
                    wait_until(lambda: put(store, range(17)) == 4)
                    assert hit(store, range(17)) == 16
            assert store.counters()["connects",] == 3

    def test_an_old_lease_says_nothing_about_the_new_daemon(self, path):
        with kvstore.connect(f"unix://{path}") as store:
            with DaemonThread(path, 64 * PAGE):
                wait_until(lambda: put(store, range(17)) == 4)
                old = store.acquire(NAMESPACE, range(17))
                writing = store.reserve(NAMESPACE, range(100, 117))
            with DaemonThread(path, 64 * PAGE) as second:
                wait_until(lambda: put(store, range(17)) == 4)
                for slot in writing.slots():
                    slot[:] = 255
                assert hit(store, range(17)) == 16
                assert store.commit(writing) == 0
                assert store.lookup(NAMESPACE, range(100, 117)) == 0
                with pytest.raises(LeaseExpiredError):
                    store.release(old)
                with store.acquire(NAMESPACE, range(17)) as lease:
                    assert lease.num_blocks == 4
                    assert second.pool.stats().num_leases == 1

    def test_its_memory_is_free_although_views_live_on(self, path):
        daemon = DaemonThread(path, 64 * PAGE)
        with kvstore.connect(daemon.url) as store:
            put(store, range(17))
            lease = store.acquire(NAMESPACE, range(17))
            views = list(lease.slots())
            daemon.close()
            wait_until(lambda: "memfd:kvstore-dram" not in Path("/proc/self/maps").read_text())
            assert not any(view.any() for view in views)


class TestLeases:
    def test_one_that_ran_out_is_told(self, path):
        with (
            DaemonThread(path, 64 * PAGE, lease_timeout_s=0.05) as daemon,
            kvstore.connect(daemon.url) as store,
        ):
            put(store, range(17))
            lease = store.acquire(NAMESPACE, range(17))
            time.sleep(0.1)
            with pytest.raises(LeaseExpiredError):
                store.release(lease)

    def test_they_end_with_the_client(self, daemon):
        with kvstore.connect(daemon.url) as other:
            store = kvstore.connect(daemon.url)
            put(store, range(17))
            store.acquire(NAMESPACE, range(17))
            store.reserve(NAMESPACE, range(100, 117))
            assert other.stats().held_blocks == 8
            store.close()
            wait_until(lambda: other.stats().held_blocks == 0)
            assert other.stats().num_blocks == 4

    def test_two_clients_share(self, daemon):
        with kvstore.connect(daemon.url) as one, kvstore.connect(daemon.url) as two:
            assert put(one, range(17)) == 4
            assert hit(two, range(17)) == 16

    def test_a_closed_client_misses(self, daemon):
        store = kvstore.connect(daemon.url)
        put(store, range(17))
        store.close()
        assert hit(store, range(17)) == 0
        assert store.counters()["failures", "acquire", "closed"] == 1
        store.close()


class TestReadOnly:
    def test_it_reads_and_cannot_write(self, daemon):
        with (
            kvstore.connect(daemon.url) as writer,
            kvstore.connect(daemon.url, access="read") as reader,
        ):
            put(writer, range(17))
            assert hit(reader, range(17)) == 16
            reservation = reader.reserve(NAMESPACE, range(100, 117))
            assert (reservation.num_blocks, reservation.failure) == (0, "read_only")
            assert reader.commit(reservation) == 0
            with pytest.raises(UsageError, match="reading"):
                reader.evict(NAMESPACE, range(100, 117))
            with pytest.raises(UsageError, match="reading"):
                reader.clear()
            with reader.acquire(NAMESPACE, range(17)) as lease:
                slot = next(lease.slots())
                with pytest.raises(ValueError, match="read-only"):
                    slot[:] = 0


class TestThreads:
    def test_they_share_a_connection_and_get_their_own_answers(self, daemon):
        with kvstore.connect(daemon.url, on_failure="raise", deadline_s=20) as store:
            for length in range(1, 9):
                put(store, [length] * (4 * length))
            wrong = []

            def ask(length):
                tokens = [length] * (4 * length + 1)
                answers = {store.lookup(NAMESPACE, tokens) for _ in range(300)}
                wrong.extend(answers - {4 * length})

            threads = [threading.Thread(target=ask, args=(length,)) for length in range(1, 9)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            assert not wrong
            assert store.counters()["connects",] == 1

    def test_a_large_question_and_small_ones(self, daemon):
        with kvstore.connect(daemon.url, on_failure="raise", deadline_s=20) as store:
            large = np.zeros(2_000_000, np.int32)
            threads = [
                threading.Thread(target=store.lookup, args=(NAMESPACE, large)) for _ in range(4)
            ]
            for thread in threads:
                thread.start()
            for _ in range(100):
                store.lookup(NAMESPACE, range(9))
            for thread in threads:
                thread.join()


class TestFork:
    def test_the_child_has_a_connection_of_its_own(self, daemon):
        with kvstore.connect(daemon.url, on_failure="raise") as store:
            put(store, range(17))
            lease = store.acquire(NAMESPACE, range(17))
            child = os.fork()
            if child == 0:
                code = 1
                try:
                    try:
                        store.release(lease)
                    except LeaseNotHeldError:
                        code = 0 if hit(store, range(17)) == 16 else 2
                finally:
                    os._exit(code)
            _, status = os.waitpid(child, 0)
            assert os.waitstatus_to_exitcode(status) == 0
            store.release(lease)
            assert hit(store, range(17)) == 16
            wait_until(lambda: store.status().num_clients == 1)

    def test_a_child_does_not_hide_the_end_of_its_parent(self, daemon):
        """The daemon sees that a client is gone although a child of it lives on."""
        with kvstore.connect(daemon.url) as other:
            reading, writing = os.pipe()
            parent = os.fork()
            if parent == 0:
                store = kvstore.connect(daemon.url)
                store.reserve(NAMESPACE, range(17))
                if os.fork() == 0:
                    os.close(writing)
                    os.read(reading, 1)
                    os._exit(0)
                os.kill(os.getpid(), 9)
            os.waitpid(parent, 0)
            os.close(reading)
            wait_until(lambda: other.stats().num_reservations == 0)
            os.close(writing)


class TestAsync:
    def test_many_at_once(self, daemon):
        async def main():
            async with kvstore.connect_async(daemon.url, on_failure="raise") as store:
                reservation = await store.reserve(NAMESPACE, range(17))
                for index, slot in zip(reservation.indices, reservation.slots(), strict=True):
                    slot[:] = pattern(NAMESPACE, prefix(range(17), int(index) + 1))
                await store.commit(reservation)
                answers = await asyncio.gather(
                    *(store.lookup(NAMESPACE, range(length)) for length in range(200))
                )
                assert answers == [min(16, max(0, n - 1) // 4 * 4) for n in range(200)]
                with await store.acquire(NAMESPACE, range(17)) as lease:
                    for index, slot in enumerate(lease.slots()):
                        expected = pattern(NAMESPACE, prefix(range(17), index + 1))
                        np.testing.assert_array_equal(slot, expected)

        asyncio.run(main())

    def test_a_cancelled_call_holds_nothing(self, daemon):
        async def main():
            async with kvstore.connect_async(daemon.url, on_failure="raise") as store:
                reservation = await store.reserve(NAMESPACE, range(17))
                await store.commit(reservation)
                for _ in range(20):
                    tasks = [
                        asyncio.ensure_future(store.acquire(NAMESPACE, range(17))),
                        asyncio.ensure_future(store.reserve(NAMESPACE, range(1000, 1017))),
                    ]
                    await asyncio.sleep(0)
                    await asyncio.sleep(0)
                    for task in tasks:
                        task.cancel()
                    await asyncio.gather(*tasks, return_exceptions=True)
                await store.lookup(NAMESPACE, range(9))
                stats = await store.stats()
                assert (stats.num_leases, stats.num_reservations) == (0, 0)
                assert stats.held_blocks == 0

        asyncio.run(main())

    def test_a_daemon_that_ends_and_comes_back(self, path):
        async def main():
            async with kvstore.connect_async(f"unix://{path}") as store:
                assert (await store.acquire(NAMESPACE, range(9))).failure == "unreachable"
                with DaemonThread(path, 64 * PAGE):
                    while not (await store.reserve(NAMESPACE, range(17))).num_blocks:  # noqa: ASYNC110
                        await asyncio.sleep(0.01)
                    lease = await store.acquire(NAMESPACE, range(9))
                    assert lease.failure is None
                while (await store.acquire(NAMESPACE, range(9))).failure is None:  # noqa: ASYNC110
                    await asyncio.sleep(0.01)

        asyncio.run(main())

    def test_deadlines(self, path):
        async def main():
            async with kvstore.connect_async(f"unix://{path}", deadline_s=0.2) as store:
                start = time.monotonic()
                assert (await store.acquire(NAMESPACE, range(9))).failure == "timeout"
                assert time.monotonic() - start < 0.2 + 0.5

        with Silent(path, welcome=True):
            asyncio.run(main())


class TestWhoIsThere:
    def test_a_wrong_token_is_refused(self, path):
        with DaemonThread(path, 64 * PAGE, tcp_token="right") as daemon:
            for token in (None, "wrong"):
                with pytest.raises(UnavailableError, match="wrong token"):
                    kvstore.connect(daemon.tcp_url, on_failure="raise", token=token)
                with kvstore.connect(daemon.tcp_url, token=token) as store:
                    assert hit(store, range(9)) == 0
                    reasons = {key[2] for key in store.counters() if key[0] == "failures"}
                    assert reasons == {"refused", "breaker"}

    @pytest.mark.parametrize(("user", "served"), [(0, True), (1000, True), (1001, False)])
    def test_a_daemon_of_another_user_is_refused(self, daemon, monkeypatch, user, served):
        """Whatever it says: anybody can make a socket below a directory such as /tmp."""
        credentials = SimpleNamespace(size=12, unpack=lambda _: (1, user, 1000))
        monkeypatch.setattr("kvstore.client.dial.PEER", credentials)
        monkeypatch.setattr(os, "getuid", lambda: 1000)
        with kvstore.connect(daemon.url) as store:
            assert put(store, range(17)) == (4 if served else 0)
            assert store.counters()["failures", "connect", "refused"] == (not served)
        if not served:
            with pytest.raises(UnavailableError, match="belongs to user 1001"):
                kvstore.connect(daemon.url, on_failure="raise")

    @pytest.mark.parametrize("field", [1, 2], ids=["device", "inode"])
    def test_memory_over_tcp_that_is_not_the_daemons_is_refused(self, path, field):
        with DaemonThread(path, 64 * PAGE, tcp_token="right") as daemon:
            kvstore.connect(daemon.tcp_url, on_failure="raise", token="right").close()
            identity = list(daemon.store.identity)
            identity[field] += 1
            daemon.store.identity = tuple(identity)
            with pytest.raises(UnavailableError, match="is not the daemon"):
                kvstore.connect(daemon.tcp_url, on_failure="raise", token="right")

    def test_offsets_outside_of_the_memory_are_not_believed(self, path):
        with Silent(path, welcome=True) as silent:
            store = kvstore.connect(f"unix://{path}", deadline_s=2)
            wait_until(lambda: silent.peers)

            def answer():
                reader, asked = FrameReader(1 << 20), 0
                while asked < 2:  # hello, and what is to be acquired
                    reader.received(silent.peers[0].recv_into(reader.buffer()))
                    while reader.next_frame() is not None:
                        asked += 1
                offsets = np.array([PAGE], "<i8").tobytes()
                silent.peers[0].sendall(encode(Held(1, 5, offsets, b"", 0)))

            thread = threading.Thread(target=answer)
            thread.start()
            with store:
                assert store.acquire(NAMESPACE, range(9)).failure == "protocol"
                thread.join()


def test_a_long_wait_of_one_client_does_not_keep_others_from_verifying(daemon):
    """Each client has one request with the daemon's threads at a time."""
    started, go = threading.Event(), threading.Event()
    drain = daemon.pool.drain

    def slow():
        started.set()
        go.wait(20)
        drain()

    daemon.pool.drain = slow
    with kvstore.connect(daemon.url) as one, kvstore.connect(daemon.url) as two:
        put(two, range(17))
        threads = [threading.Thread(target=one.drain) for _ in range(4)]
        for thread in threads:
            thread.start()
        started.wait(10)
        with two.acquire(NAMESPACE, range(17)) as lease:
            assert two.verify(lease) == 4
        go.set()
        for thread in threads:
            thread.join()


def test_counters_are_exported(daemon, monkeypatch):
    closed, close = [], Client.close
    monkeypatch.setattr(Client, "close", lambda client: [closed.append(client), close(client)])
    registry = CollectorRegistry()
    with kvstore.connect(daemon.url, registry=registry) as store:
        hit(store, range(9))
        lease = store.acquire(NAMESPACE, range(9))
        store.release(lease)
        labels = {"call": "acquire"}
        assert registry.get_sample_value("kvstore_client_calls_total", labels) == 2
        assert registry.get_sample_value("kvstore_client_connects_total") == 1
        with pytest.raises(ConfigError, match="give each its own registry"):
            kvstore.connect(daemon.url, registry=registry)
        assert len(closed) == 1
        assert store not in closed
    assert store.acquire(NAMESPACE, range(9)).failure == "closed"
    assert store.counters()["failures", "acquire", "closed"] == 1
    assert {key[0] for key in store.counters()} <= set(CLIENT_COUNTERS)
    assert "kvstore" not in generate_latest(registry).decode()
    with kvstore.connect(daemon.url, registry=registry):
        assert registry.get_sample_value("kvstore_client_connects_total") == 1


def test_counters_of_an_asyncio_client_are_exported_until_it_is_closed(daemon):
    registry = CollectorRegistry()

    async def use():
        async with kvstore.connect_async(daemon.url, registry=registry) as store:
            await store.lookup(NAMESPACE, range(9))
            assert registry.get_sample_value("kvstore_client_connects_total") == 1
            with pytest.raises(ConfigError, match="give each its own registry"):
                kvstore.connect_async(daemon.url, registry=registry)
        assert registry.get_sample_value("kvstore_client_connects_total") is None

    asyncio.run(use())
