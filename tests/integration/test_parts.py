"""Ranks in processes of their own write their heads into the blocks of one daemon, and one of them dies."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time

import pytest

import kvstore
from kvstore.errors import UsageError
from kvstore.namespace import KVLayout, Namespace
from kvstore.protocol import Reserve, decode_request, encode
from kvstore.testing.contracts import PAGE, ClientContract
from kvstore.testing.daemon import DaemonThread

LAYOUT = KVLayout(2, 4, 8, "float32", block_tokens=4)
NAMESPACE = Namespace(b"weights", LAYOUT)
LEFT, RIGHT = (0, 2), (2, 4)
NUM_BLOCKS = 8


class Contract(ClientContract):
    def make_store(self, num_blocks):
        raise NotImplementedError


CONTRACT = Contract()

RANK = """
import sys
import kvstore
from kvstore.namespace import KVLayout, Namespace

url, start, stop = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
namespace = Namespace(b"weights", KVLayout(2, 4, 8, "float32", block_tokens=4))
with kvstore.connect(url, on_failure="raise", deadline_s=20) as store:
    held = store.reserve(namespace, range(16), heads=(start, stop))
    for slot in held.slots():  # half of it
        slot.reshape(2, 2, 4, -1)[0, :, start:stop] = 0xAB
    print(held.num_blocks, flush=True)
    sys.stdin.read()
    store.commit(held)
"""


@pytest.fixture
def daemon(tmp_path):
    size = NUM_BLOCKS * PAGE
    with DaemonThread(tmp_path / "kvstore.sock", size, max_session_bytes=size) as daemon:
        yield daemon
        daemon.pool.check_invariants()


@pytest.fixture
def connect(daemon):
    clients = []

    def connect():
        clients.append(kvstore.connect(daemon.url, on_failure="raise", deadline_s=10))
        return clients[-1]

    yield connect
    for client in clients:
        client.close()


@pytest.fixture
def rank(daemon):
    """Start a process that holds a part of four blocks."""
    processes = []

    def start(heads):
        process = subprocess.Popen(
            [sys.executable, "-c", RANK, daemon.url, *map(str, heads)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        )
        processes.append(process)
        assert process.stdout.readline() == b"4\n"
        return process

    yield start
    for process in processes:
        process.kill()
        with process:
            pass


def until(condition):
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.005)


def hits(store, tokens):
    with store.acquire(NAMESPACE, [*tokens, 0]) as lease:
        CONTRACT.check(lease, tokens)
        return lease.num_blocks


def die(process, daemon):
    before = daemon.server.status().num_clients
    process.send_signal(signal.SIGKILL)
    process.wait()
    until(lambda: daemon.server.status().num_clients == before - 1)


def test_a_rank_that_is_killed_costs_its_own_heads_only(daemon, connect, rank):
    """The slots stay the other's while it writes, and a fresh client brings what is missing."""
    other, stranger = connect(), connect()
    dying = rank(LEFT)
    mine = other.reserve(NAMESPACE, range(16), heads=RIGHT)
    assert mine.num_blocks == 4
    die(dying, daemon)
    assert daemon.pool.stats().num_reservations == 1
    for start in range(100, 1000, 100):  # whoever wants room finds it elsewhere
        written = stranger.reserve(NAMESPACE, range(start, start + 16))
        assert written.num_blocks == 4
        assert set(written.offsets.tolist()).isdisjoint(mine.offsets.tolist())
        for slot in written.slots():
            slot[:] = 0xFF
        stranger.commit(written)
    CONTRACT.fill_part(mine, range(16), RIGHT)
    assert other.commit(mine) == 0
    assert other.lookup(NAMESPACE, range(17)) == 0
    fresh = connect()
    rest = fresh.reserve(NAMESPACE, range(16), heads=LEFT)
    assert rest.offsets.tolist() == mine.offsets.tolist()
    CONTRACT.fill_part(rest, range(16), LEFT)
    assert fresh.commit(rest) == 4
    assert hits(stranger, range(16)) == 4


def test_a_part_is_nobody_elses_while_its_writer_lives(daemon, connect, rank):
    """Not even after the blocks were forgotten: its slots come back when it has ended."""
    store = connect()
    holder = rank(LEFT)
    assert not store.reserve(NAMESPACE, range(16), heads=LEFT).num_blocks
    assert not store.reserve(NAMESPACE, range(16)).num_blocks
    store.clear()
    assert store.reserve(NAMESPACE, range(32)).num_blocks == 4, "the others are still written to"
    die(holder, daemon)
    until(lambda: store.stats().num_blocks == 4)
    assert store.reserve(NAMESPACE, range(100, 116)).num_blocks == 4


def test_when_both_are_killed_the_room_comes_back(daemon, connect, rank):
    left, right = rank(LEFT), rank(RIGHT)
    assert daemon.pool.stats().num_blocks == 4
    die(left, daemon)
    assert daemon.pool.stats().num_blocks == 4
    die(right, daemon)
    until(lambda: daemon.pool.stats().num_blocks == 0)
    store = connect()
    assert CONTRACT.put(store, range(32), NAMESPACE) == 8
    assert hits(store, range(32)) == 8


def test_an_engine_without_ranks_completes_what_a_dead_one_left(daemon, connect, rank):
    store = connect()
    dying = rank(LEFT)
    assert CONTRACT.put_part(store, range(16), RIGHT) == 0
    die(dying, daemon)
    whole = store.reserve(NAMESPACE, range(20))
    assert whole.indices.tolist() == [0, 1, 2, 3, 4]
    CONTRACT.fill(whole, range(20))
    assert store.commit(whole) == 5
    assert hits(store, range(20)) == 5


def test_ranks_and_readers_of_all_faces(daemon, connect):
    """A blocking and an asyncio rank write, an engine without ranks reads."""

    async def right():
        async with kvstore.connect_async(daemon.url, on_failure="raise", deadline_s=10) as store:
            held = await store.reserve(NAMESPACE, range(16), heads=RIGHT)
            CONTRACT.fill_part(held, range(16), RIGHT)
            return await store.commit(held)

    assert CONTRACT.put_part(connect(), range(16), LEFT) == 0
    assert asyncio.run(right()) == 4
    assert hits(connect(), range(16)) == 4


def test_wrong_heads_are_refused_also_without_a_daemon(tmp_path):
    with kvstore.connect(f"unix://{tmp_path / 'nobody'}") as store:
        with pytest.raises(UsageError, match="no range of the 4 KV heads"):
            store.reserve(NAMESPACE, range(16), heads=(3, 5))
        assert store.reserve(NAMESPACE, range(16), heads=LEFT).failure in ("unreachable", "breaker")
    with kvstore.connect(f"unix://{tmp_path / 'nobody'}", access="read") as store:
        assert store.reserve(NAMESPACE, range(16), heads=LEFT).failure == "read_only"


def test_heads_on_the_wire():
    for heads in (None, (1, 3)):
        request = decode_request(encode(Reserve(1, b"n", b"k", heads))[4:])
        assert request == Reserve(1, b"n", b"k", heads)
