"""Processes that stand still: a daemon that is stopped costs misses, a client that is stopped costs nobody."""

from __future__ import annotations

import asyncio
import gc
import multiprocessing
import os
import signal
import threading
import time
import warnings
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np
import pytest

import kvstore
from kvstore.errors import LeaseExpiredError
from kvstore.namespace import KVLayout, Namespace
from kvstore.testing import pattern
from kvstore.testing.worker import FIELDS, new_tally, read_tally, work
from tests.integration.test_daemon import until
from tests.integration.test_serve import Process

LAYOUT = KVLayout(num_layers=1, num_kv_heads=1, head_dim=8, dtype="float32", block_tokens=4)
NAMESPACE = Namespace(b"weights", LAYOUT)
NUM_BLOCKS = 64
PROMPTS = [[prompt] * 16 for prompt in range(4)]
DEADLINE_S = 0.3
SLACK_S = 0.7
"""For a busy machine: a call that waits twice for its deadline is later than this."""
STOPPED_S = 1.2
BACK_S = 2.0
PATIENCE_S = 20.0


def right(tokens, index):
    return pattern(NAMESPACE, np.array(tokens[: 4 * (index + 1)], "<i4").tobytes())


def put(store, tokens):
    reservation = store.reserve(NAMESPACE, tokens)
    for index, slot in zip(reservation.indices.tolist(), reservation.slots(), strict=True):
        slot[:] = right(tokens, index)
    return store.commit(reservation)


def fill(store):
    """Store so much that whatever is not in use has to go."""
    for prompt in range(100, 100 + NUM_BLOCKS // 2):
        put(store, [prompt] * 16)


@pytest.fixture
def serve(tmp_path):
    opened = []

    def start(*flags):
        dram = f"--dram={NUM_BLOCKS * 4096}"
        process = Process(tmp_path / "kv.sock", "--block-tokens=4", dram, *flags)
        opened.append(process)
        process.wait_ready()
        return process, f"unix://{process.path}"

    yield start
    for process in opened:
        process.signal(signal.SIGCONT)
        process.close()


@contextmanager
def halted(pid):
    """Stop a process; let it go on at the end."""
    os.kill(pid, signal.SIGSTOP)
    try:
        until(lambda: Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T")
        yield
    finally:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)


class Record:
    """What calls took, and what they came to."""

    def __init__(self):
        self.seconds = {}
        self.hits = []
        """Moments when right bytes were read, and whose call it was."""
        self.failures = []

    def took(self, name, start):
        self.seconds[name] = max(self.seconds.get(name, 0.0), time.monotonic() - start)

    def hit(self, who):
        self.hits.append((time.monotonic(), who))

    def num_hits(self, start, stop):
        return sum(start < at < stop for at, _ in self.hits)

    def back(self, continued_at):
        """When everybody first read right bytes after that."""
        return {who: at for at, who in reversed(self.hits) if at > continued_at}

    def check(self, stopped_at, continued_at):
        assert not self.failures, self.failures
        assert max(self.seconds.values()) < DEADLINE_S + SLACK_S, self.seconds
        assert self.num_hits(0.0, stopped_at) > 0
        assert self.num_hits(stopped_at + 0.1, continued_at) == 0
        back = self.back(continued_at)
        assert len(back) == 4, "not everybody reads again"
        assert max(back.values()) - continued_at < BACK_S, back


def work_until(done, store, who, record):
    """Store, load and look up; a miss, or a lease that is void, is an answer like any other."""
    tokens = PROMPTS[who]
    while not done.wait(0.002):
        start = time.monotonic()
        reservation = store.reserve(NAMESPACE, tokens)
        record.took("reserve", start)
        for index, slot in zip(reservation.indices.tolist(), reservation.slots(), strict=True):
            slot[:] = right(tokens, index)
        start = time.monotonic()
        store.commit(reservation)
        record.took("commit", start)
        start = time.monotonic()
        store.lookup(NAMESPACE, tokens)
        record.took("lookup", start)
        start = time.monotonic()
        lease = store.acquire(NAMESPACE, [*tokens, 0])
        record.took("acquire", start)
        copies = [np.array(slot) for slot in lease.slots()]
        start = time.monotonic()
        try:
            store.release(lease)
        except LeaseExpiredError:
            continue
        finally:
            record.took("release", start)
        for index, copy in enumerate(copies):
            np.testing.assert_array_equal(copy, right(tokens, index))
        if copies:
            record.hit(who)


async def work_until_async(done, store, who, record):
    """The same on an event loop."""
    tokens = PROMPTS[who]
    while not done.is_set():
        await asyncio.sleep(0.002)
        start = time.monotonic()
        reservation = await store.reserve(NAMESPACE, tokens)
        record.took("reserve", start)
        for index, slot in zip(reservation.indices.tolist(), reservation.slots(), strict=True):
            slot[:] = right(tokens, index)
        start = time.monotonic()
        await store.commit(reservation)
        record.took("commit", start)
        start = time.monotonic()
        lease = await store.acquire(NAMESPACE, [*tokens, 0])
        record.took("acquire", start)
        copies = [np.array(slot) for slot in lease.slots()]
        try:
            store.release(lease)
        except LeaseExpiredError:
            continue
        for index, copy in enumerate(copies):
            np.testing.assert_array_equal(copy, right(tokens, index))
        if copies:
            record.hit(who)


async def until_async(condition):
    async with asyncio.timeout(PATIENCE_S):
        while not condition():  # noqa: ASYNC110  (other processes bring it about)
            await asyncio.sleep(0.01)


class TestADaemonThatIsStopped:
    def test_threads_get_misses_in_time_and_go_on_afterwards(self, serve):
        daemon, url = serve()
        record, done = Record(), threading.Event()

        def run(who):
            try:
                work_until(done, store, who, record)
            except BaseException as error:  # noqa: BLE001  (told by the main thread)
                record.failures.append(error)

        with kvstore.connect(url, deadline_s=PATIENCE_S) as watching:
            watching.stats()
            num_descriptors = daemon.num_descriptors()
            with kvstore.connect(url, deadline_s=DEADLINE_S) as store:
                threads = [threading.Thread(target=run, args=(who,)) for who in range(4)]
                for thread in threads:
                    thread.start()
                until(lambda: len(record.hits) > 20)
                with halted(daemon.pid):
                    stopped_at = time.monotonic()
                    time.sleep(STOPPED_S)
                    continued_at = time.monotonic()
                until(lambda: record.failures or len(record.back(continued_at)) == 4)
                done.set()
                for thread in threads:
                    thread.join()
            print(record.seconds, store.counters())
            record.check(stopped_at, continued_at)
            self.check_nothing_leaked(watching, daemon, num_descriptors)

    def test_tasks_get_misses_in_time_and_go_on_afterwards(self, serve):
        daemon, url = serve()
        record = Record()

        async def run():
            done = asyncio.Event()
            async with kvstore.connect_async(url, deadline_s=DEADLINE_S) as store:
                tasks = [
                    asyncio.create_task(work_until_async(done, store, who, record))
                    for who in range(4)
                ]
                await until_async(lambda: len(record.hits) >= 20)
                with halted(daemon.pid):
                    stopped_at = time.monotonic()
                    await asyncio.sleep(STOPPED_S)
                    continued_at = time.monotonic()
                await until_async(lambda: len(record.back(continued_at)) == 4)
                done.set()
                await asyncio.gather(*tasks)
                print(record.seconds, store.counters())
            return stopped_at, continued_at

        with kvstore.connect(url, deadline_s=PATIENCE_S) as watching:
            watching.stats()
            num_descriptors = daemon.num_descriptors()
            record.check(*asyncio.run(run()))
            self.check_nothing_leaked(watching, daemon, num_descriptors)

    def test_a_call_that_may_take_long_does_not_keep_the_others_waiting(self, serve):
        daemon, url = serve()

        async def run():
            async with kvstore.connect_async(url, deadline_s=DEADLINE_S) as store:
                with halted(daemon.pid):
                    draining = asyncio.create_task(store.drain())
                    await asyncio.sleep(0.01)
                    asking = asyncio.create_task(store.lookup(NAMESPACE, PROMPTS[0]))
                    done, _ = await asyncio.wait({asking}, timeout=DEADLINE_S + SLACK_S)
                await asyncio.gather(draining, asking, return_exceptions=True)
            return done

        assert asyncio.run(run()), "it takes longer than its deadline"

    def test_a_task_that_is_cancelled_while_it_connects_leaves_no_socket(self, serve):
        daemon, url = serve()

        async def run():
            async with kvstore.connect_async(url, deadline_s=PATIENCE_S) as store:
                with halted(daemon.pid), pytest.raises(TimeoutError):
                    await asyncio.wait_for(store.lookup(NAMESPACE, PROMPTS[0]), 0.1)
                await asyncio.sleep(0.2)

        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            asyncio.run(run())
            gc.collect()
        assert not [str(warning.message) for warning in warned]

    def check_nothing_leaked(self, watching, daemon, num_descriptors):
        until(lambda: watching.status().num_clients == 1)
        stats = watching.stats()
        assert (stats.held_blocks, stats.num_leases, stats.num_reservations) == (0, 0, 0)
        assert stats.tiers[0].used_bytes == 4096 * stats.num_blocks
        assert daemon.num_descriptors() == num_descriptors


@pytest.fixture
def child():
    """Start functions as processes; return each one, and a pipe to it."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["kvstore.testing.worker", "kvstore.client.blocking"])
    started = []

    def start(function, *arguments):
        here, there = context.Pipe()
        process = context.Process(target=function, args=(there, *arguments))
        process.start()
        there.close()
        started.append((process, here))
        return process, here

    yield start
    for process, pipe in started:
        process.kill()
        process.join()
        process.close()
        pipe.close()


def told(pipe):
    assert pipe.poll(PATIENCE_S), "the process says nothing"
    return pipe.recv()


def read_slowly(pipe, url, tokens):
    """Copy one half of a hit when told to, then the other; tell what the store and the bytes say."""
    with kvstore.connect(url, deadline_s=PATIENCE_S) as store:
        lease = store.acquire(NAMESPACE, [*tokens, 0])
        slots = list(lease.slots())
        copies = [np.array(slot) for slot in slots[:2]]
        pipe.send(len(slots))
        pipe.recv()
        copies += [np.array(slot) for slot in slots[2:]]
        try:
            store.release(lease)
            verdict = "good"
        except LeaseExpiredError:
            verdict = "expired"
        wrong = sum(
            not np.array_equal(copy, right(tokens, index)) for index, copy in enumerate(copies)
        )
        pipe.send((verdict, wrong, store.lookup(NAMESPACE, tokens)))
        pipe.recv()


def write_slowly(pipe, url, tokens):
    """Write one half of a prompt when told to, then the other; tell how many blocks are visible."""
    with kvstore.connect(url, deadline_s=PATIENCE_S) as store:
        reservation = store.reserve(NAMESPACE, tokens)
        slots = list(reservation.slots())
        for index, slot in enumerate(slots[:2]):
            slot[:] = right(tokens, index)
        pipe.send(len(slots))
        pipe.recv()
        for index, slot in enumerate(slots[2:], 2):
            slot[:] = right(tokens, index)
        pipe.send(store.commit(reservation))
        pipe.recv()


def work_and_tell(pipe, url, tally, seed):
    latencies_s = {}
    work(url, tally, seed, stop=pipe.poll, latencies_s=latencies_s)
    pipe.send([value for values in latencies_s.values() for value in values])


class TestAClientThatIsStopped:
    def test_what_it_reads_may_go_and_then_it_is_told_so(self, serve, child):
        _, url = serve("--lease-timeout=1")
        with kvstore.connect(url, deadline_s=PATIENCE_S) as other:
            assert put(other, PROMPTS[0]) == 4
            process, pipe = child(read_slowly, url, PROMPTS[0])
            assert told(pipe) == 4
            with halted(process.pid):
                until(lambda: other.stats().num_leases == 0)
                fill(other)
                assert other.lookup(NAMESPACE, PROMPTS[0]) == 0
            pipe.send("go on")
            verdict, wrong, hit_tokens = told(pipe)
            assert verdict == "expired"
            assert wrong == 2, "nothing was overwritten: the test shows nothing"
            assert hit_tokens == 0
            pipe.send("end")

    def test_what_it_reads_stays_as_long_as_its_lease(self, serve, child):
        _, url = serve("--lease-timeout=60")
        with kvstore.connect(url, deadline_s=PATIENCE_S) as other:
            put(other, PROMPTS[0])
            process, pipe = child(read_slowly, url, PROMPTS[0])
            assert told(pipe) == 4
            with halted(process.pid):
                fill(other)
            pipe.send("go on")
            assert told(pipe) == ("good", 0, 12)
            pipe.send("end")
            until(lambda: other.stats().held_blocks == 0)

    def test_nobody_else_writes_where_it_writes(self, serve, child):
        _, url = serve("--lease-timeout=1")
        with kvstore.connect(url, deadline_s=PATIENCE_S) as other:
            process, pipe = child(write_slowly, url, PROMPTS[0])
            assert told(pipe) == 4
            with halted(process.pid):
                fill(other)
                assert other.stats().num_reservations == 1
                assert other.lookup(NAMESPACE, PROMPTS[0]) == 0
            pipe.send("go on")
            assert told(pipe) == 4
            with other.acquire(NAMESPACE, [*PROMPTS[0], 0]) as lease:
                slots = list(lease.slots())
                assert len(slots) == 4
                for index, slot in enumerate(slots):
                    np.testing.assert_array_equal(slot, right(PROMPTS[0], index))
            pipe.send("end")
            until(lambda: other.stats().held_blocks == 0)

    def test_one_that_dies_while_stopped_gives_all_back(self, serve, child):
        _, url = serve()
        with kvstore.connect(url, deadline_s=PATIENCE_S) as other:
            process, pipe = child(write_slowly, url, PROMPTS[0])
            assert told(pipe) == 4
            with halted(process.pid):
                assert other.stats().held_blocks == 4
                process.kill()
                until(lambda: other.stats().held_blocks == 0)

    def test_the_others_do_not_wait_for_it(self, serve, child, tmp_path):
        _, url = serve("--dram=4MiB", "--lease-timeout=1")
        tallies = [tmp_path / f"tally-{number}" for number in range(3)]
        workers = []
        for number, tally in enumerate(tallies):
            new_tally(tally)
            workers.append(child(work_and_tell, url, tally, number))
        until(lambda: all(read_tally(tally)["calls"] > 50 for tally in tallies))
        before = [read_tally(tally)["calls"] for tally in tallies]
        for _ in range(4):  # at moments that nobody chose
            with halted(workers[0][0].pid):
                time.sleep(0.4)
            time.sleep(0.05)
        for _, pipe in workers:
            pipe.send("end")
        seconds = [told(pipe) for _, pipe in workers]
        after = [read_tally(tally) for tally in tallies]
        p99 = [sorted(values)[len(values) * 99 // 100] for values in seconds]
        print({"p99": p99, "calls": [counts["calls"] for counts in after]})
        assert max(p99[1:]) < 0.5
        for counts, calls in zip(after[1:], before[1:], strict=True):
            assert counts["calls"] > calls + 100
        totals = {field: sum(counts[field] for counts in after) for field in FIELDS}
        assert totals["wrong_blocks"] == 0
        assert totals["loaded_blocks"] > 100
