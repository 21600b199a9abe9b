"""The shortest and the longest of everything, through each face of a daemon: threads, asyncio, REST."""

from __future__ import annotations

import asyncio
import base64
import http.client
import json
import signal
import threading
import time
from itertools import count
from pathlib import Path

import numpy as np
import pytest

import kvstore
from kvstore.errors import LeaseNotHeldError, TooLargeError, UsageError
from kvstore.namespace import KVLayout, Namespace
from kvstore.protocol import MAX_FRAME_BYTES
from kvstore.testing import pattern, small_pool
from kvstore.tiers.mover import InlineMover
from radix import token_bytes
from tests.integration.test_daemon import until
from tests.integration.test_serve import Process

pytestmark = pytest.mark.xdist_group("edges")

PAGE = 4096
BLOCK = 16
LAYOUT = KVLayout(num_layers=1, num_kv_heads=1, head_dim=8, dtype="float32", block_tokens=BLOCK)
MILLION = 1_000_000
DRAM_BLOCKS = 81_920
PATIENCE_S = 20.0
SOON_S = 0.5
FACES = ("threads", "asyncio", "rest")

numbers = count(1)


def namespace():
    """Return a namespace that no other test uses."""
    return Namespace(b"edges", LAYOUT, salt=f"{next(numbers)}")


def prompt(num_tokens, seed=0):
    return np.random.default_rng(seed).integers(0, 50_000, num_tokens, dtype=np.int32)


def write(reservation, mark=0):
    """Write into each block its position, and ``mark``."""
    pages = reservation.buffers[0].reshape(-1, PAGE)
    stamps = np.stack([reservation.indices, np.full_like(reservation.indices, mark)], axis=1)
    pages[reservation.offsets // PAGE, :8] = stamps.view(np.uint8)


def check(lease, mark=0):
    """Assert that each block has its position and ``mark``."""
    pages = lease.buffers[0].reshape(-1, PAGE)
    stamps = pages[lease.offsets // PAGE, :8].view(np.int32)
    np.testing.assert_array_equal(stamps[:, 0], np.arange(lease.num_blocks))
    assert (stamps[:, 1] == mark).all()


def put(store, where, tokens, mark=0):
    """Store what is missing, in parts where one would be more than a client may reserve."""
    stored = 0
    while True:
        with store.reserve(where, tokens) as reservation:
            write(reservation, mark)
        stored += reservation.num_blocks
        if not reservation.num_blocks or not reservation.refused:
            return stored


class Threads:
    """The client for threads."""

    def __init__(self, daemon):
        self.store = kvstore.connect(daemon.url, on_failure="raise", deadline_s=PATIENCE_S)
        self.close = self.store.close

    def lookup(self, where, tokens):
        return self.store.lookup(where, tokens)

    def hit(self, where, tokens):
        with self.store.acquire(where, tokens) as lease:
            check(lease)
            return lease.hit_tokens

    def explain(self, where, tokens):
        told = self.store.explain(where, tokens)
        return told.hit_tokens, [(part.start, part.stop, part.cause) for part in told.segments]

    def evict(self, where, tokens):
        return self.store.evict(where, tokens)

    def put(self, where, tokens):
        with self.store.reserve(where, tokens) as reservation:
            write(reservation)
        return reservation.num_blocks


class Asyncio:
    """The client for asyncio."""

    def __init__(self, daemon):
        self.runner = asyncio.Runner()
        self.store = kvstore.connect_async(
            daemon.url, on_failure="raise", deadline_s=PATIENCE_S
        )  # fmt: skip

    def close(self):
        self.runner.run(self.store.close())
        self.runner.close()

    def lookup(self, where, tokens):
        return self.runner.run(self.store.lookup(where, tokens))

    def hit(self, where, tokens):
        with self.runner.run(self.store.acquire(where, tokens)) as lease:
            check(lease)
            return lease.hit_tokens

    def explain(self, where, tokens):
        told = self.runner.run(self.store.explain(where, tokens))
        return told.hit_tokens, [(part.start, part.stop, part.cause) for part in told.segments]

    def evict(self, where, tokens):
        return self.runner.run(self.store.evict(where, tokens))

    def put(self, where, tokens):
        reservation = self.runner.run(self.store.reserve(where, tokens))
        write(reservation)
        assert self.runner.run(self.store.commit(reservation)) == reservation.num_blocks
        return reservation.num_blocks


class Rest:
    """REST, which moves no bytes."""

    def __init__(self, daemon):
        self.connection = http.client.HTTPConnection(*daemon.admin, timeout=PATIENCE_S)
        self.close = self.connection.close

    def ask(self, verb, where, tokens):
        key = np.asarray(tokens, "<i4")
        named = (
            {"tokens": key.tolist()}
            if len(key) < 1000
            else {"token_bytes": base64.b64encode(key.tobytes()).decode()}
        )
        body = json.dumps({"namespace": where.digest.hex(), **named})
        self.connection.request(
            "POST", f"/v1/prefixes:{verb}", body, {"Content-Type": "application/json"}
        )
        answer = self.connection.getresponse()
        document = json.loads(answer.read())
        assert answer.status == 200, document
        return document

    def lookup(self, where, tokens):
        document = self.ask("match", where, tokens)
        assert document["prompt_tokens"] == len(tokens)
        return document["hit_tokens"]

    hit = lookup

    def explain(self, where, tokens):
        told = self.ask("explain", where, tokens)
        assert told["prompt_tokens"] == len(tokens)
        return told["hit_tokens"], [
            (part["start"], part["stop"], part["cause"]) for part in told["segments"]
        ]

    def evict(self, where, tokens):
        return self.ask("evict", where, tokens)["num_blocks"]


class Daemon:
    """``kvstore serve`` with so many blocks."""

    def __init__(self, directory, num_blocks, *flags, **environment):
        path = directory / "kv.sock"
        self.process = Process(path, f"--dram={num_blocks * PAGE}", *flags, **environment)
        self.url = f"unix://{path}"
        ready = self.process.wait_ready()
        self.admin = (ready[5], int(ready[6])) if ready[4] else None

    def close(self):
        self.process.close()


@pytest.fixture(scope="module")
def daemon(tmp_path_factory):
    daemon = Daemon(tmp_path_factory.mktemp("edges"), DRAM_BLOCKS, "--admin-port=0")
    yield daemon
    daemon.close()


@pytest.fixture
def start(tmp_path):
    started = []

    def start(num_blocks, *flags, **environment):
        directory = tmp_path / str(len(started))
        directory.mkdir()
        started.append(Daemon(directory, num_blocks, *flags, **environment))
        return started[-1]

    yield start
    for daemon in started:
        daemon.close()


@pytest.fixture
def store(daemon):
    with kvstore.connect(daemon.url, on_failure="raise", deadline_s=PATIENCE_S) as store:
        yield store


@pytest.fixture(params=FACES)
def face(request, daemon):
    kind = {"threads": Threads, "asyncio": Asyncio, "rest": Rest}[request.param]
    face = kind(daemon)
    yield face
    face.close()


@pytest.fixture(params=[Threads, Asyncio], ids=FACES[:2])
def writer(request, daemon):
    face = request.param(daemon)
    yield face
    face.close()


class TestLengths:
    def test_of_what_is_asked(self, face, store):
        """Nothing, less than a block, one block, all of it, and more: whole blocks, never the last token."""
        where, tokens = namespace(), prompt(81)
        put(store, where, tokens[:80])
        for length in range(82):
            expected = min(80, max(0, length - 1) // BLOCK * BLOCK)
            asked = tokens[:length]
            assert face.lookup(where, asked) == expected, length
            assert face.hit(where, asked) == expected, length
            hits, segments = face.explain(where, asked)
            assert hits == expected
            edges = [0, *(stop for _, stop, _ in segments)]
            assert [start for start, _, _ in segments] == edges[:-1]
            assert edges[-1] == length
            causes = [cause for _, _, cause in segments]
            rest = "last_token" if length % BLOCK == 0 else "incomplete_block"
            assert causes == ["hit"] * (expected > 0) + [rest] * (length > expected)

    def test_of_what_is_stored(self, writer, store):
        for length in range(1, 66):
            where, tokens = namespace(), prompt(length)
            assert writer.put(where, tokens) == length // BLOCK
            assert writer.put(where, tokens) == 0
            assert store.lookup(where, [*tokens.tolist(), 1]) == length // BLOCK * BLOCK
            assert writer.hit(where, tokens) == (length - 1) // BLOCK * BLOCK
        assert store.stats().num_reservations == 0

    def test_of_what_is_evicted(self, face, store):
        where, tokens = namespace(), prompt(64)
        put(store, where, prompt(16, seed=1))
        put(store, where, tokens)
        assert face.evict(where, tokens[:0]) == 0
        assert face.evict(where, tokens[:15]) == 0
        assert store.lookup(where, tokens) == 48
        assert face.evict(where, tokens[:16]) == 1
        assert store.lookup(where, tokens) == 0
        assert store.lookup(where, [*prompt(16, seed=1), 0]) == 16

    def test_nothing_at_all(self, writer):
        where = namespace()
        assert writer.lookup(where, []) == 0
        assert writer.hit(where, []) == 0
        assert writer.put(where, []) == 0
        assert writer.evict(where, []) == 0
        assert writer.explain(where, []) == (0, [])


@pytest.fixture
def million(store):
    """A prompt of a million tokens, stored; its namespace and tokens."""
    where, tokens = Namespace(b"edges", LAYOUT, salt="million"), prompt(MILLION)
    put(store, where, tokens)
    return where, tokens


class TestAMillionTokens:
    def test_all_are_found_soon(self, face, million):
        where, tokens = million
        expected = (MILLION - 1) // BLOCK * BLOCK
        seconds = []
        for _ in range(3):
            start = time.monotonic()
            assert face.lookup(where, tokens) == expected
            seconds.append(time.monotonic() - start)
        print({"lookup_s": seconds})
        assert min(seconds) < SOON_S
        assert face.hit(where, tokens) == expected
        hits, segments = face.explain(where, tokens)
        assert hits == expected
        assert segments == [(0, expected, "hit"), (expected, MILLION, "last_token")]
        different = tokens.copy()
        different[MILLION // 2] += 1
        assert face.lookup(where, different) == MILLION // 2 // BLOCK * BLOCK

    def test_sixteen_more_are_one_block(self, writer, million, store):
        where, tokens = million
        more = np.concatenate([tokens, prompt(BLOCK, seed=2)])
        for _ in range(2):
            start = time.monotonic()
            assert writer.put(where, more) == 1
            seconds = time.monotonic() - start
            print({"extend_s": seconds})
            assert seconds < 2 * SOON_S
            assert store.lookup(where, [*more.tolist(), 0]) == MILLION + BLOCK
            store.evict(where, more)
            assert put(store, where, tokens) == MILLION // BLOCK

    def test_all_are_forgotten(self, face, million, store):
        where, tokens = million
        put(store, where, prompt(BLOCK, seed=3))  # for the namespace to stay
        assert face.evict(where, tokens) == MILLION // BLOCK
        assert face.lookup(where, tokens) == 0
        _, ((start, stop, cause), _) = face.explain(where, tokens)
        assert (start, stop, cause) == (0, (MILLION - 1) // BLOCK * BLOCK, "evicted")


def test_rest_answers_at_once_on_a_connection_that_is_kept(daemon):
    face, seconds = Rest(daemon), []
    for _ in range(11):
        start = time.monotonic()
        face.connection.request("GET", "/healthz")
        assert face.connection.getresponse().read()
        seconds.append(time.monotonic() - start)
    face.close()
    assert sorted(seconds)[5] < 0.02


class TestTooLong:
    def test_for_the_store(self, writer, store):
        """It is refused with both numbers, and what is there stays."""
        where, tokens = namespace(), prompt(640, seed=1)
        put(store, where, tokens)
        before = store.stats()
        long = prompt((DRAM_BLOCKS + 1) * BLOCK)
        for _ in range(2):
            with pytest.raises(
                TooLargeError, match=f"{DRAM_BLOCKS + 1} blocks.*holds {DRAM_BLOCKS}"
            ):
                writer.put(where, long)
        assert writer.lookup(where, long) == 0
        assert writer.hit(where, [*tokens.tolist(), 1]) == 640
        after = store.stats()
        assert (after.num_blocks, after.held_blocks) == (before.num_blocks, before.held_blocks)

    def test_for_a_frame(self, writer):
        where = namespace()
        longest = np.zeros((MAX_FRAME_BYTES - (64 << 10)) // 4, np.int32)
        assert writer.lookup(where, longest) == 0
        for call in (writer.lookup, writer.hit, writer.explain, writer.put, writer.evict):
            with pytest.raises(TooLargeError, match="at most"):
                call(where, np.zeros(len(longest) + 1, np.int32))
        assert writer.lookup(where, longest[:100]) == 0
        assert writer.store.counters()["connects",] == 1

    def test_for_rest(self, daemon, store):
        where = namespace()
        put(store, where, prompt(64))
        connection = http.client.HTTPConnection(*daemon.admin, timeout=PATIENCE_S)
        connection.putrequest("POST", "/v1/prefixes:match")
        connection.putheader("Content-Type", "application/json")
        connection.putheader("Content-Length", str(MAX_FRAME_BYTES + 1))
        connection.endheaders()
        answer = connection.getresponse()
        assert answer.status == 413
        assert "at most" in json.loads(answer.read())["detail"]
        connection.close()
        face = Rest(daemon)
        assert face.lookup(where, prompt(65)) == 64
        face.close()

    @pytest.mark.parametrize("num_blocks", [65, 10_000])
    def test_beside_small_ones(self, start, num_blocks):
        """Ten clients with a few blocks each keep them, whatever a large one tries."""
        daemon = start(64)
        where, failures = namespace(), []
        stored, tried = threading.Barrier(11), threading.Barrier(11)

        def small(number):
            try:
                with kvstore.connect(
                    daemon.url, on_failure="raise", deadline_s=PATIENCE_S
                ) as store:
                    tokens = prompt(6 * BLOCK + 1, seed=number)
                    assert put(store, where, tokens, number) == 6
                    stored.wait(PATIENCE_S)
                    for _ in range(50):
                        with store.acquire(where, tokens) as lease:
                            assert lease.num_blocks == 6
                            check(lease, number)
                    tried.wait(PATIENCE_S)
                    assert store.lookup(where, tokens) == 6 * BLOCK
            except BaseException as error:  # noqa: BLE001  (told by the main thread)
                failures.append(error)

        threads = [threading.Thread(target=small, args=(number,)) for number in range(1, 11)]
        for thread in threads:
            thread.start()
        with kvstore.connect(daemon.url, on_failure="raise", deadline_s=PATIENCE_S) as store:
            stored.wait(PATIENCE_S)
            for _ in range(50):
                with pytest.raises(TooLargeError, match=f"{num_blocks} blocks"):
                    store.reserve(where, prompt(num_blocks * BLOCK))
                assert store.lookup(where, prompt(num_blocks * BLOCK)) == 0
            tried.wait(PATIENCE_S)
            for thread in threads:
                thread.join()
            assert not failures, failures[0]
            until(lambda: store.status().num_clients == 1)
            stats = store.stats()
            assert (stats.num_blocks, stats.held_blocks) == (60, 0)


def test_4096_blocks_at_once(writer, store):
    where, tokens = namespace(), prompt(4096 * BLOCK + 1)
    assert writer.put(where, tokens) == 4096
    assert writer.hit(where, tokens) == 4096 * BLOCK
    assert store.evict(where, tokens) == 4096
    store.drain()
    assert store.stats().held_blocks == 0


class TestOneBlock:
    @pytest.fixture
    def tiny(self, start):
        daemon = start(1, KVSTORE_MAX_SESSION_BYTES=f"{PAGE}")
        with kvstore.connect(daemon.url, on_failure="raise", deadline_s=PATIENCE_S) as store:
            yield daemon, store

    def test_is_lent_kept_and_replaced(self, tiny):
        _, store = tiny
        where = namespace()
        for number in range(20):
            assert put(store, where, prompt(17, number), number) == 1
            with store.acquire(where, prompt(17, number)) as lease:
                assert lease.num_blocks == 1
                check(lease, number)
                other = store.reserve(where, prompt(17, 99))
                assert (other.num_blocks, other.refused) == (0, 1)
                store.commit(other)
        with pytest.raises(TooLargeError, match=r"2 blocks.*holds 1"):
            store.reserve(where, prompt(32))

    def test_many_at_once_skip_and_count(self, tiny):
        """Puts and gets of four blocks, and of one, where there is one: nobody fails, nothing spins."""
        daemon, store = tiny
        where, failures = namespace(), []

        def work(number):
            try:
                for turn in range(10):
                    tokens = prompt(17, number * 10 + turn)
                    put(store, where, tokens, number)
                    with store.acquire(where, tokens) as lease:
                        check(lease, number)
                    with pytest.raises(TooLargeError):
                        store.reserve(where, prompt(64, 1000))
                    assert store.lookup(where, prompt(64, 1000)) == 0
            except BaseException as error:  # noqa: BLE001  (told by the main thread)
                failures.append(error)

        threads = [threading.Thread(target=work, args=(number,)) for number in range(10)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not failures, failures[0]
        stats = store.stats()
        assert stats.held_blocks == 0
        assert stats.counts["refused_blocks",] >= 400
        assert stats.counts["stored_blocks",] >= 10
        idle_s = cpu_s(daemon.process.pid)
        time.sleep(0.5)
        assert cpu_s(daemon.process.pid) - idle_s < 0.1

    def test_can_be_stored_with_default_settings(self, start):
        daemon = start(1)
        with kvstore.connect(daemon.url, on_failure="raise", deadline_s=PATIENCE_S) as store:
            assert put(store, namespace(), prompt(17)) == 1


def cpu_s(pid):
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / 100


def own_memory_bytes():
    text = Path("/proc/self/status").read_text()
    return int(text.partition("RssAnon:")[2].split()[0]) << 10


def test_ten_clients_in_one_process_and_two_daemons(start):
    """Each reads the bytes of its own daemon, and none can end what another holds."""
    daemons, where, failures = [start(256), start(256)], namespace(), []
    stores = [
        kvstore.connect(daemons[number % 2].url, on_failure="raise", deadline_s=PATIENCE_S)
        for number in range(10)
    ]
    before_bytes, refused = own_memory_bytes(), []

    def work(number):
        try:
            store, mark = stores[number], number % 2
            for turn in range(30):
                tokens = prompt(4 * BLOCK + 1, turn)
                put(store, where, tokens, mark)
                with store.acquire(where, tokens) as lease:
                    check(lease, mark)
                stranger = stores[(number + 1) % 10]
                lease = store.acquire(where, tokens)
                if lease.num_blocks:  # else another client is still writing
                    with pytest.raises(LeaseNotHeldError):
                        stranger.release(lease)
                    refused.append(number)
                store.release(lease)
        except BaseException as error:  # noqa: BLE001  (told by the main thread)
            failures.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(10)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    try:
        assert not failures, failures[0]
        assert len(refused) > 100
        assert Path("/proc/self/maps").read_text().count("memfd:kvstore-dram") == 10
        for store in stores[:2]:
            status = store.status()
            assert status.num_clients == 5
            assert status.pool.held_blocks == 0
            assert status.pool.counts["stored_blocks",] >= 100
        assert own_memory_bytes() - before_bytes < 50 << 20
    finally:
        for store in stores:
            store.close()
    assert "memfd:kvstore-dram" not in Path("/proc/self/maps").read_text()


class FullMover(InlineMover):
    """Takes no jobs while it is said to be full."""

    full = False

    def has_room(self):
        return not self.full

    def submit(self, job):
        return not self.full and super().submit(job)


class TooSlowError(BaseException):
    """Not to be caught by anybody."""


@pytest.fixture
def at_most_two_seconds():
    def stop(number, frame):
        raise TooSlowError

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, 2.0, 0.2)
    yield
    signal.setitimer(signal.ITIMER_REAL, 0.0)
    signal.signal(signal.SIGALRM, before)


class TestLayoutsWhoseSlotsHaveOneSize:
    """Blocks of 256 and of 4096 bytes both take a page, blocks of 8192 bytes take two."""

    small, whole, large = (
        Namespace(b"edges", KVLayout(1, 1, head_dim, "float32", block_tokens=4))
        for head_dim in (8, 128, 256)
    )

    def put(self, pool, where, num_blocks, token=0):
        tokens = [token] * 4 * num_blocks
        with pool.reserve(where, tokens) as reservation:
            for index, slot in zip(reservation.indices.tolist(), reservation.slots(), strict=True):
                slot[:] = pattern(where, token_bytes(tokens[: 4 * (index + 1)]))

    @pytest.mark.usefixtures("at_most_two_seconds")
    def test_one_makes_room_for_the_other(self):
        with small_pool(8, max_slabs=2, mover=InlineMover()) as pool:
            self.put(pool, self.whole, 4)
            self.put(pool, self.small, 1)
            self.put(pool, self.whole, 8, token=1)
            pool.check_invariants()
            assert pool.lookup(self.whole, [1] * 33) == 32

    @pytest.mark.parametrize("sealed", [True, False])
    @pytest.mark.usefixtures("at_most_two_seconds")
    def test_both_stay_whole_when_a_third_needs_their_slab(self, sealed):
        mover = FullMover()
        with small_pool(8, max_slabs=2, mover=mover) as pool:
            mover.full = not sealed
            self.put(pool, self.small, 3)
            self.put(pool, self.whole, 3)
            mover.full = False
            self.put(pool, self.large, 1)
            pool.check_invariants()
            assert pool.lookup(self.large, [0] * 5) == 4
            for where in (self.small, self.whole):
                with pool.acquire(where, [0] * 13) as lease:
                    for index, slot in enumerate(lease.slots()):
                        np.testing.assert_array_equal(slot, pattern(where, bytes(16 * (index + 1))))
            stats = pool.stats()
            assert stats.counts["moved_blocks", "dram", "dram"] > 0
            assert stats.counts.get(("corrupt_blocks",), 0) == 0


def test_what_is_no_token_is_refused_alike(writer):
    for tokens in ([0.5], [-1], [2**31], [[1, 2]], "text", [True]):
        for call in (writer.lookup, writer.hit, writer.put, writer.explain, writer.evict):
            with pytest.raises(UsageError):
                call(namespace(), tokens)
