"""Clients when something fails at a bad moment: nobody takes zeros for bytes, and nothing hangs or stays."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import socket
import threading
import weakref
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest

import kvstore
from kvstore.client import aio, blocking, dial
from kvstore.client.core import Connection
from kvstore.client.rules import Deadlines
from kvstore.errors import LeaseExpiredError, UnavailableError, UsageError
from kvstore.testing import FakeClock
from kvstore.testing.daemon import DaemonThread
from kvstore.tiers import shared
from kvstore.tiers.memory import Region
from tests.integration.test_client import NAMESPACE, PAGE, Silent, hit, put, wait_until
from tests.integration.test_daemon import WORKERS, Halted

GATE_S = 10.0
"""Longest that anything is held back, so that a test which fails still ends."""
SOON_S = 4.0
DEADLINE_S = 0.3
HEAD_START_S = 0.05
"""Who could close a socket too early gets so long to do it."""
LEASE_S = 60.0


@pytest.fixture
def path(tmp_path):
    return tmp_path / "kvstore.sock"


@pytest.fixture
def daemon(path):
    with DaemonThread(path, 64 * PAGE, lease_timeout_s=LEASE_S) as daemon:
        yield daemon


@pytest.fixture
def order(monkeypatch):
    """What happened to connections of clients so far: ``failed``, ``zeros``, ``closed``."""
    log, closed = [], threading.Event()
    fail, replace = Connection.fail, Region.replace_by_zeros

    class Watched(socket.socket):
        def shutdown(self, how):
            log.append("closed")
            closed.set()
            super().shutdown(how)

        def close(self):
            log.append("closed")
            closed.set()
            super().close()

    def failing(connection, failure):
        first = fail(connection, failure)
        if first:
            log.append("failed")
        return first

    def replacing(region):
        closed.wait(HEAD_START_S)
        replace(region)
        log.append("zeros")

    monkeypatch.setattr(Connection, "fail", failing)
    monkeypatch.setattr(Region, "replace_by_zeros", replacing)
    monkeypatch.setattr(dial, "socket", SimpleNamespace(**vars(socket) | {"socket": Watched}))
    return log


class Gate:
    """Holds a function back, before or after it has done its work, until the test opens the gate."""

    def __init__(self):
        self.came, self._go = threading.Event(), threading.Event()
        self.open = self._go.set
        self.gave_up = False
        """Whether nobody opened it: what should have done that waited for what was held back."""

    def wait(self):
        self.came.set()
        self.gave_up |= not self._go.wait(GATE_S)

    def before(self, function):
        def held(*arguments):
            self.wait()
            return function(*arguments)

        return held

    def after(self, function):
        def held(*arguments):
            result = function(*arguments)
            self.wait()
            return result

        return held


@pytest.fixture
def gate():
    gate = Gate()
    yield gate
    gate.open()
    assert not gate.gave_up


def steps(order):
    """The first time that each thing happened."""
    return list(dict.fromkeys(order))


def soon(function, *arguments):
    """Return what ``function`` returns; fail when that takes long."""
    results = []
    thread = threading.Thread(target=lambda: results.append(function(*arguments)), daemon=True)
    thread.start()
    thread.join(SOON_S)
    assert results, "it still waits, or raised"
    return results[0]


def failures(store):
    """Number of failures by reason."""
    return {key[2]: count for key, count in store.counters().items() if key[0] == "failures"}


def num_clients(daemon):
    return daemon.server.status().num_clients


def hurry(store):
    """Give calls a short deadline, now that the connection stands."""
    store._deadlines = Deadlines(fixed_s=DEADLINE_S)


async def put_async(store, tokens):
    return await store.commit(await store.reserve(NAMESPACE, tokens))


class TestTheOrderOfAnEnd:
    """Marked as failed, then zeros in place, then the socket closed."""

    @pytest.mark.parametrize("cause", ["close", "silence", "end of the daemon", "nobody uses it"])
    def test_for_threads(self, daemon, order, cause):
        store = kvstore.connect(daemon.url, deadline_s=GATE_S)
        line = store._line
        if cause == "close":
            store.close()
        elif cause == "silence":
            hurry(store)
            with Halted(daemon):
                assert store.lookup(NAMESPACE, range(9)) == 0
        elif cause == "end of the daemon":
            daemon.close()
        else:
            del store
            gc.collect()
        soon(line.join)
        assert steps(order) == ["failed", "zeros", "closed"]

    @pytest.mark.parametrize("cause", ["close", "silence", "end of the daemon"])
    def test_for_asyncio(self, daemon, order, cause):
        async def main():
            store = kvstore.connect_async(daemon.url, deadline_s=GATE_S)
            await store.lookup(NAMESPACE, range(9))
            line = store._line
            if cause == "silence":
                hurry(store)
                with Halted(daemon):
                    assert await store.lookup(NAMESPACE, range(9)) == 0
            elif cause == "end of the daemon":
                await asyncio.to_thread(daemon.close)
            else:
                await store.close()
            await line.join()
            await store.close()

        asyncio.run(main())
        assert steps(order) == ["failed", "zeros", "closed"]

    def test_for_asyncio_when_the_daemon_resets_the_connection(self, path, order):
        """The transport closes its socket by itself then."""

        async def main():
            async with kvstore.connect_async(f"unix://{path}", deadline_s=GATE_S) as store:
                asking = asyncio.ensure_future(store.lookup(NAMESPACE, range(9)))
                while store._line is None:  # noqa: ASYNC110
                    await asyncio.sleep(0)
                silent.peers[0].close()  # with what it has not read
                assert await asking == 0
                assert failures(store) == {"lost": 1}

        with Silent(path, welcome=True) as silent:
            asyncio.run(main())
        assert steps(order) == ["failed", "zeros", "closed"]

    def test_a_connection_that_nobody_has_used(self, daemon, order, gate, monkeypatch):
        monkeypatch.setattr(aio, "dial", gate.after(dial.dial))

        async def main():
            async with kvstore.connect_async(daemon.url, deadline_s=GATE_S) as store:
                asking = asyncio.ensure_future(store.lookup(NAMESPACE, range(9)))
                await asyncio.to_thread(gate.came.wait, GATE_S)
                asking.cancel()
                gate.open()
                await asyncio.gather(asking, return_exceptions=True)

        asyncio.run(main())
        assert steps(order) == ["failed", "zeros", "closed"]
        wait_until(lambda: num_clients(daemon) == 0)

    def test_slots_stay_reserved_until_their_mapping_is_gone(
        self, daemon, order, gate, monkeypatch
    ):
        """A thread may be writing to them while others have noticed the end, however many."""
        monkeypatch.setattr(Region, "replace_by_zeros", gate.before(Region.replace_by_zeros))
        working = threading.Event()
        for _ in range(WORKERS):
            daemon.server._worker.submit(working.wait, GATE_S)
        with (
            kvstore.connect(daemon.url, deadline_s=GATE_S) as store,
            kvstore.connect(daemon.url, deadline_s=GATE_S) as other,
        ):
            assert store.reserve(NAMESPACE, range(17)).num_blocks == 4
            asking = threading.Thread(target=store.explain, args=(NAMESPACE, range(9)))
            asking.start()
            wait_until(lambda: store._line._has_receiver)
            store._line._peer.sendall(b"\xff\xff\xff\xff")  # no frame: the daemon drops the client
            assert gate.came.wait(GATE_S)
            asking.join(SOON_S)
            assert not asking.is_alive()
            assert order == ["failed"]
            assert other.stats().num_reservations == 1
            gate.open()
            wait_until(lambda: other.stats().num_reservations == 0)
            working.set()
        assert steps(order) == ["failed", "zeros", "closed"]


class TestRelease:
    def test_of_zeros_fails_while_the_socket_is_still_open(self, daemon, gate, monkeypatch):
        with kvstore.connect(daemon.url, deadline_s=GATE_S) as store:
            put(store, range(17))
            lease = store.acquire(NAMESPACE, range(17))
            monkeypatch.setattr(Region, "replace_by_zeros", gate.after(Region.replace_by_zeros))
            hurry(store)
            with Halted(daemon):
                assert store.lookup(NAMESPACE, range(9)) == 0
            assert gate.came.wait(GATE_S)
            assert not any(slot.any() for slot in lease.slots())
            with pytest.raises(LeaseExpiredError):
                store.release(lease)
            gate.open()

    @pytest.mark.parametrize("cause", ["silence", "end of the daemon"])
    def test_of_zeros_fails_with_asyncio_too(self, daemon, gate, monkeypatch, cause):
        """And the loop goes on while they are put in place."""

        async def main():
            async with kvstore.connect_async(daemon.url, deadline_s=GATE_S) as store:
                await put_async(store, range(17))
                lease = await store.acquire(NAMESPACE, range(17))
                replace = gate.after(Region.replace_by_zeros)
                monkeypatch.setattr(Region, "replace_by_zeros", replace)
                if cause == "silence":
                    hurry(store)
                    with Halted(daemon):
                        assert await store.lookup(NAMESPACE, range(9)) == 0
                else:
                    await asyncio.to_thread(daemon.close)
                assert await asyncio.to_thread(gate.came.wait, GATE_S)
                with pytest.raises(LeaseExpiredError):
                    store.release(lease)
                gate.open()

        asyncio.run(main())

    def test_a_lease_counts_from_before_it_was_asked_for(self, daemon, monkeypatch):
        clock = FakeClock()
        late(daemon, monkeypatch, clock)
        with kvstore.connect(daemon.url, deadline_s=GATE_S) as store:
            put(store, range(17))
            store._clock = clock
            with store.acquire(NAMESPACE, range(17)) as lease:
                assert (clock.now_s, lease.expires_at) == (5.0, LEASE_S)

    def test_and_so_it_does_with_asyncio(self, daemon, monkeypatch):
        clock = FakeClock()
        late(daemon, monkeypatch, clock)

        async def main():
            async with kvstore.connect_async(daemon.url, deadline_s=GATE_S) as store:
                await put_async(store, range(17))
                store._clock = clock
                with await store.acquire(NAMESPACE, range(17)) as lease:
                    assert (clock.now_s, lease.expires_at) == (5.0, LEASE_S)

        asyncio.run(main())

    def test_with_asyncio_of_one_that_ran_out_is_told(self, daemon):
        clock = FakeClock()

        async def main():
            async with kvstore.connect_async(daemon.url, deadline_s=GATE_S) as store:
                await put_async(store, range(17))
                store._clock = clock
                lease = await store.acquire(NAMESPACE, range(17))
                clock.advance(LEASE_S)
                with pytest.raises(LeaseExpiredError, match="ran out"):
                    store.release(lease)
                assert store.counters()["expired_leases",] == 1

        asyncio.run(main())

    def test_over_tcp_asks_whether_the_daemon_is_there(self, path, gate, monkeypatch):
        """What is sent to a closed port is accepted by the kernel, once."""
        monkeypatch.setattr(blocking.Line, "_last_words", gate.before(blocking.Line._last_words))
        with DaemonThread(path, 64 * PAGE, tcp_token="secret") as daemon:
            store = kvstore.connect(daemon.tcp_url, token="secret", deadline_s=GATE_S)
            put(store, range(17))
            lease = store.acquire(NAMESPACE, range(17))
        assert store._line.connection.failure is None  # nobody has noticed it so far
        with pytest.raises(LeaseExpiredError):
            store.release(lease)
        gate.open()
        store.close()


def late(daemon, monkeypatch, clock):
    """Let five seconds pass between the question for a lease and its answer."""
    acquire = daemon.pool.acquire

    def acquire_late(*arguments, **options):
        clock.advance(5.0)
        return acquire(*arguments, **options)

    monkeypatch.setattr(daemon.pool, "acquire", acquire_late)


class TestInterruptions:
    def test_an_interrupted_reserve_holds_nothing(self, daemon, monkeypatch):
        reserve, main = daemon.pool.reserve, threading.main_thread().ident

        def reserve_and_interrupt(*arguments, **options):
            reservation = reserve(*arguments, **options)
            signal.pthread_kill(main, signal.SIGINT)
            return reservation

        with kvstore.connect(daemon.url, deadline_s=GATE_S) as store:
            with monkeypatch.context() as patch:
                patch.setattr(daemon.pool, "reserve", reserve_and_interrupt)
                with pytest.raises(KeyboardInterrupt):
                    store.reserve(NAMESPACE, range(17))
            wait_until(lambda: daemon.pool.stats().num_reservations == 0)
            wait_until(lambda: put(store, range(17)) == 4)
            assert store.counters()["connects",] == 2

    @pytest.mark.parametrize("name", ["acquire", "reserve"])
    def test_cancelled_in_the_turn_in_which_the_answer_came(self, daemon, monkeypatch, name):
        updated = aio._AsyncLine.buffer_updated

        async def main():
            async with kvstore.connect_async(
                daemon.url, on_failure="raise", deadline_s=GATE_S
            ) as store:
                await put_async(store, range(17))
                asking = asyncio.ensure_future(getattr(store, name)(NAMESPACE, range(33)))

                def updated_and_cancelled(line, nbytes):
                    updated(line, nbytes)
                    asking.cancel()

                with monkeypatch.context() as patch:
                    patch.setattr(aio._AsyncLine, "buffer_updated", updated_and_cancelled)
                    with pytest.raises(asyncio.CancelledError):
                        await asking
                stats = await store.stats()
                assert (stats.num_leases, stats.num_reservations) == (0, 0)
                assert store.counters()["connects",] == 1

        asyncio.run(main())

    def test_closed_while_it_connects(self, daemon, gate, monkeypatch, caplog):
        monkeypatch.setattr(blocking, "dial", refuse)
        store = kvstore.connect(daemon.url, deadline_s=GATE_S)
        store._breaker.succeeded()
        monkeypatch.setattr(blocking, "dial", gate.after(dial.dial))
        asking = threading.Thread(target=store.lookup, args=(NAMESPACE, range(9)))
        asking.start()
        assert gate.came.wait(GATE_S)
        store.close()
        gate.open()
        asking.join()
        assert failures(store) == {"unreachable": 1, "closed": 1}
        assert store.counters()["connects",] == 0
        assert [record.message[:16] for record in caplog.records] == ["kvstore: not yet"]
        wait_until(lambda: num_clients(daemon) == 0)

    def test_closed_while_it_connects_with_asyncio(self, daemon, gate, monkeypatch):
        monkeypatch.setattr(aio, "dial", gate.after(dial.dial))

        async def main():
            store = kvstore.connect_async(daemon.url, deadline_s=GATE_S)
            asking = asyncio.ensure_future(store.lookup(NAMESPACE, range(9)))
            assert await asyncio.to_thread(gate.came.wait, GATE_S)
            await store.close()
            gate.open()
            assert await asking == 0
            counts = store.counters()
            await store.close()
            return counts

        counts = asyncio.run(main())
        assert counts["failures", "lookup", "closed"] == 1
        assert counts["connects",] == 0
        wait_until(lambda: num_clients(daemon) == 0)


def refuse(*_):
    raise UnavailableError("unreachable", "not yet")


class TestWithoutMeans:
    def test_memory_that_is_being_pinned_is_not_waited_for(self, daemon, gate, monkeypatch):
        monkeypatch.setattr(shared, "cuda_is_present", lambda: True)
        monkeypatch.setattr(shared, "cuda_register", gate.before(lambda *_: True))
        monkeypatch.setattr(shared, "cuda_unregister", lambda _: None)
        with kvstore.connect(daemon.url, deadline_s=GATE_S) as store:
            assert gate.came.wait(GATE_S)
            hurry(store)
            with Halted(daemon):
                assert soon(store.lookup, NAMESPACE, range(9)) == 0
            store._breaker.succeeded()
            assert soon(store.lookup, NAMESPACE, range(9)) == 0
            assert failures(store) == {"timeout": 2}
            gate.open()
            wait_until(lambda: put(store, range(17)) == 4)

    def test_nor_by_a_task(self, daemon, gate, monkeypatch):
        monkeypatch.setattr(shared, "cuda_is_present", lambda: True)
        monkeypatch.setattr(shared, "cuda_register", gate.before(lambda *_: True))
        monkeypatch.setattr(shared, "cuda_unregister", lambda _: None)

        async def run():
            async with kvstore.connect_async(daemon.url, deadline_s=DEADLINE_S) as store:
                await store.lookup(NAMESPACE, range(9))
                assert await asyncio.to_thread(gate.came.wait, GATE_S)
                store._lose(store._line, UnavailableError("lost", "the test says so"))
                store._breaker.succeeded()
                async with asyncio.timeout(SOON_S):
                    assert await store.lookup(NAMESPACE, range(9)) == 0
                assert store.counters()["failures", "lookup", "timeout"] == 1
                gate.open()

        asyncio.run(run())

    def test_without_a_thread_it_misses_and_leaves_nothing(self, daemon, monkeypatch):
        before = mapped()
        with monkeypatch.context() as patch:
            no_more_threads(patch, "kvstore-client")
            store = kvstore.connect(daemon.url, deadline_s=GATE_S)
        with store:
            assert failures(store) == {"refused": 1}
            wait_until(lambda: num_clients(daemon) == 0)
            assert mapped() == before
            wait_until(lambda: put(store, range(17)) == 4)

    def test_without_a_thread_to_map_ahead_it_works(self, path, monkeypatch):
        provided = partial(shared.SharedDramStore, prefault=True)
        monkeypatch.setattr("kvstore.testing.daemon.SharedDramStore", provided)
        refused = no_more_threads(monkeypatch, "kvstore-prefault")
        with (
            DaemonThread(path, 64 * PAGE) as daemon,
            kvstore.connect(daemon.url, deadline_s=GATE_S) as store,
        ):
            wait_until(lambda: refused)
            assert put(store, range(17)) == 4
            line = store._line
            store.close()
            assert not is_open(line._peer.fileno())
            wait_until(lambda: num_clients(daemon) == 0)

    def test_with_asyncio_a_silent_daemon_is_not_asked_again_at_once(self, path):
        async def main():
            async with kvstore.connect_async(f"unix://{path}", deadline_s=DEADLINE_S) as store:
                store._breaker._clock = FakeClock()
                for _ in range(5):
                    assert await store.lookup(NAMESPACE, range(9)) == 0
                assert failures(store) == {"timeout": 1, "breaker": 4}

        with Silent(path, welcome=False):
            asyncio.run(main())

    def test_an_asyncio_client_of_another_loop_is_refused(self, daemon):
        store = kvstore.connect_async(daemon.url, deadline_s=GATE_S)
        with asyncio.Runner() as first, asyncio.Runner() as second:
            first.run(store.lookup(NAMESPACE, range(9)))
            with pytest.raises(UsageError, match="loop"):
                second.run(asyncio.wait_for(store.lookup(NAMESPACE, range(9)), SOON_S))
            assert first.run(put_async(store, range(17))) == 4
            first.run(store.close())

    def test_a_client_that_nobody_closed_is_given_back(self, daemon):
        store = kvstore.connect(daemon.url, deadline_s=GATE_S)
        line, forgotten = store._line, weakref.ref(store)
        del store
        gc.collect()
        assert forgotten() is None
        soon(line.join)
        wait_until(lambda: num_clients(daemon) == 0)


def no_more_threads(patch, name):
    """Refuse threads of that ``name``; return those that were refused."""
    start, refused = threading.Thread.start, []

    def refuse_some(thread):
        if thread.name == name:
            refused.append(thread)
            raise RuntimeError("can't start new thread")
        start(thread)

    patch.setattr(threading.Thread, "start", refuse_some)
    return refused


class TestTheHandshake:
    def test_the_descriptor_is_not_inherited_at_any_time(self, daemon, monkeypatch):
        inheritable, make = [], dial.ClientMapping

        def look(descriptor, *arguments):
            inheritable.append(os.get_inheritable(descriptor))
            return make(descriptor, *arguments)

        monkeypatch.setattr(dial, "ClientMapping", look)
        kvstore.connect(daemon.url, deadline_s=GATE_S).close()
        assert inheritable == [False]

    def test_what_a_client_says_is_true_when_it_connects(self, path, monkeypatch):
        """A device may come later, and a child has another number."""
        with kvstore.connect(f"unix://{path}", deadline_s=GATE_S) as store:
            for present in (False, True):
                monkeypatch.setattr("kvstore.assembly.cuda_is_present", partial(bool, present))
                with DaemonThread(path, 64 * PAGE, dma_grace_s=0.0) as daemon:
                    wait_until(lambda: put(store, range(17)) == 4)
                    assert [client._dma for client in daemon.server._shared.open] == [present]
            with DaemonThread(path, 64 * PAGE) as daemon:
                wait_until(lambda: put(store, range(17)) == 4)
                go_on, let_go = os.pipe()
                child = forked(lambda: hit(store, range(17)) == 16 and os.read(go_on, 1))
                names = {f":{os.getpid()}", f":{child}"}
                wait_until(lambda: {tail(client) for client in daemon.server._shared.open} == names)
                os.write(let_go, b"x")
                assert exit_code(child) == 0
                os.close(go_on)
                os.close(let_go)


def tail(client):
    """The end of a client's name."""
    return client.client[client.client.rindex(":") :]


class TestFork:
    def test_the_child_has_nothing_of_the_daemons_memory(self, daemon):
        before = mapped()
        with kvstore.connect(daemon.url, deadline_s=GATE_S) as store:
            put(store, range(17))
            with store.acquire(NAMESPACE, range(17)) as lease:
                views = list(lease.slots())
                assert mapped() == before + 1
                child = forked(lambda: mapped() == before and not any(v.any() for v in views))
                assert exit_code(child) == 0
                assert all(view.any() for view in views)

    def test_nor_its_parents_connection_that_is_just_being_made(self, daemon, gate, monkeypatch):
        peers, stores, before = [], [], mapped()

        def dial_and_note(*arguments):
            peer, connection = dial.dial(*arguments)
            peers.append(peer.fileno())
            return peer, connection

        monkeypatch.setattr(blocking, "dial", gate.after(dial_and_note))
        opening = threading.Thread(
            target=lambda: stores.append(kvstore.connect(daemon.url, deadline_s=GATE_S))
        )
        opening.start()
        assert gate.came.wait(GATE_S)
        assert mapped() == before + 1
        child = forked(lambda: mapped() == before and not is_open(peers[0]))
        assert exit_code(child) == 0
        gate.open()
        opening.join()
        with stores[0] as store:
            assert put(store, range(17)) == 4

    def test_an_asyncio_client_does_not_survive_in_the_child(self, daemon):
        before = mapped()

        async def main():
            async with kvstore.connect_async(
                daemon.url, on_failure="raise", deadline_s=GATE_S
            ) as store:
                await put_async(store, range(17))
                with await store.acquire(NAMESPACE, range(17)) as lease:
                    peer = store._line._transport.get_extra_info("socket").fileno()

                    def use():
                        loop = asyncio.new_event_loop()
                        with pytest.raises(UsageError, match="fork"):
                            loop.run_until_complete(store.lookup(NAMESPACE, range(17)))
                        with pytest.raises(UsageError, match="fork"):
                            store.release(lease)
                        loop.close()
                        return mapped() == before and not is_open(peer)

                    assert exit_code(forked(use)) == 0
                assert await store.lookup(NAMESPACE, range(17)) == 16

        asyncio.run(main())


def forked(check):
    """Run ``check`` in a child, which ends with 0 if it is true; return its number."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            code = 0 if check() else 2
        finally:
            os._exit(code)
    return child


def exit_code(child):
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def mapped():
    """Mappings that this process has of memory of daemons."""
    return Path("/proc/self/maps").read_text().count("memfd:kvstore-dram")


def is_open(descriptor):
    try:
        os.fstat(descriptor)
    except OSError:
        return False
    return True
