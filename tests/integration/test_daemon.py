"""A daemon and raw sockets: handshake, order, fairness, and what is left of clients that go."""

from __future__ import annotations

import mmap
import os
import pickle
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from kvstore.daemon.connection import MAX_WORKS, TURN_FRAMES, WRITE_BUFFER_BYTES
from kvstore.daemon.server import WORKERS
from kvstore.namespace import KVLayout, Namespace
from kvstore.protocol import (
    MAX_FRAME_BYTES,
    OLDEST_VERSION,
    VERSION,
    Abort,
    Acquire,
    Commit,
    Failed,
    FrameReader,
    Hello,
    Lookup,
    Number,
    Release,
    Reserve,
    Status,
    Told,
    Verify,
    Welcome,
    decode_reply,
    encode,
    encode_namespace,
)
from kvstore.testing.daemon import DaemonThread
from radix import token_bytes

PAGE = 4096
NUM_BLOCKS = 64
LAYOUT = KVLayout(1, 1, 8, "float32", block_tokens=4)
ENCODED = encode_namespace(Namespace(b"w", LAYOUT))
TOKEN = "0123456789abcdef"
PATIENCE_S = 20.0


def key(tokens):
    return token_bytes(list(tokens))


def hello(**changes):
    fields = {
        "oldest_version": 1,
        "version": VERSION,
        "client": "test",
        "access": "write",
        "dma": False,
        "token": None,
    }
    return Hello(**(fields | changes))


def framed(body):
    return struct.pack("<I", len(body)) + body


def until(condition):
    """Wait for what other threads or processes bring about."""
    stop = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < stop, "it does not happen"
        time.sleep(0.002)


class Raw:
    """A client that does what a test says, and nothing else."""

    def __init__(self, address):
        family = socket.AF_INET if isinstance(address, tuple) else socket.AF_UNIX
        self.socket = socket.socket(family)
        self.socket.settimeout(PATIENCE_S)
        self.socket.connect(address if isinstance(address, tuple) else str(address))
        self.reader = FrameReader(MAX_FRAME_BYTES)
        self.descriptors = []

    def send(self, *messages):
        self.socket.sendall(b"".join(map(encode, messages)))

    def receive(self):
        """Return the next message, or None at the end of the stream, read out or not by the daemon."""
        while (body := self.reader.next_frame()) is None:
            try:
                data, descriptors, _, _ = socket.recv_fds(self.socket, 1 << 16, 4)
            except ConnectionResetError:
                return None
            self.descriptors += descriptors
            if not data:
                return None
            while data:
                free = self.reader.buffer()
                part = data[: len(free)]
                free[: len(part)] = part
                self.reader.received(len(part))
                data = data[len(part) :]
        return decode_reply(body)

    def ask(self, message):
        self.send(message)
        return self.receive()

    def put(self, tokens):
        held = self.ask(Reserve(1, ENCODED, key(tokens)))
        return self.ask(Commit(2, held.held)).value

    def close(self):
        for descriptor in self.descriptors:
            os.close(descriptor)
        self.descriptors.clear()
        self.socket.close()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()


class Served:
    """A daemon on a thread, and the clients of one test."""

    def __init__(self, path):
        self.path = path / "kv.sock"
        self.clients = []
        self.daemon = None

    def start(self, **terms):
        self.daemon = DaemonThread(self.path, NUM_BLOCKS * PAGE, block_tokens=4, **terms)
        return self.daemon

    def raw(self, address=None):
        client = Raw(address or self.path)
        self.clients.append(client)
        return client

    def client(self, **changes):
        """Return a client that has shaken hands."""
        client = self.raw()
        welcome = client.ask(hello(**changes))
        assert isinstance(welcome, Welcome)
        return client

    @property
    def pool(self):
        return self.daemon.pool.stats()

    @property
    def counts(self):
        return self.daemon.server.counts

    def num_clients(self):
        return self.daemon.server.status().num_clients

    def close(self):
        for client in self.clients:
            client.close()
        if self.daemon is None:
            return
        try:
            until(lambda: self.num_clients() == 0)
            self.daemon.pool.drain()
            self.daemon.pool.check_invariants()
            assert self.daemon.pool.stats().held_blocks == 0
        finally:
            self.daemon.close()


@pytest.fixture
def served(tmp_path):
    served = Served(tmp_path)
    yield served
    served.close()


class TestHandshake:
    @pytest.mark.parametrize(
        ("oldest", "newest"), [(VERSION, VERSION), (0, VERSION), (VERSION, 999)]
    )
    def test_the_highest_common_version_is_spoken(self, served, oldest, newest):
        served.start()
        welcome = served.raw().ask(hello(oldest_version=oldest, version=newest))
        assert isinstance(welcome, Welcome)
        assert welcome.version == VERSION

    @pytest.mark.parametrize(
        ("oldest", "newest"),
        [(VERSION + 1, VERSION + 1), (0, OLDEST_VERSION - 1), (999, 999), (-1, 0)],
    )
    def test_without_one_both_ranges_are_told(self, served, oldest, newest):
        served.start()
        client = served.raw()
        answer = client.ask(hello(oldest_version=oldest, version=newest))
        assert (answer.id, answer.error) == (0, "refused")
        assert f"versions {OLDEST_VERSION} to {VERSION}" in answer.message
        assert f"{oldest} to {newest}" in answer.message
        assert client.receive() is None
        assert served.counts["refused_clients"] == 1

    def test_the_welcome_says_what_a_client_needs(self, served):
        daemon = served.start(lease_timeout_s=7.5)
        client = served.raw()
        welcome = client.ask(hello())
        assert welcome.capacity_bytes == NUM_BLOCKS * PAGE
        assert (welcome.node, welcome.tier, welcome.block_tokens) == ("test", "dram", 4)
        assert (welcome.lease_timeout_s, welcome.pid) == (7.5, os.getpid())
        assert len(welcome.epoch) == 8
        assert welcome.arena == daemon.store.identity
        status = os.fstat(client.descriptors[0])
        assert (status.st_dev, status.st_ino) == welcome.arena[1:]

    def test_the_descriptor_is_the_arena(self, served):
        daemon = served.start()
        client = served.client()
        (descriptor,) = client.descriptors
        with mmap.mmap(descriptor, NUM_BLOCKS * PAGE) as memory:
            memory[PAGE : PAGE + 5] = b"hello"
            assert daemon.pool.buffer("dram")[PAGE : PAGE + 5].tobytes() == b"hello"

    def test_readers_get_a_descriptor_that_cannot_write(self, served):
        served.start()
        (descriptor,) = served.client(access="read").descriptors
        with pytest.raises(PermissionError):
            mmap.mmap(descriptor, NUM_BLOCKS * PAGE)
        mmap.mmap(descriptor, NUM_BLOCKS * PAGE, prot=mmap.PROT_READ).close()

    def test_requests_may_come_behind_the_hello(self, served):
        served.start()
        client = served.raw()
        client.send(hello(), *(Lookup(number, ENCODED, key(range(9))) for number in range(1, 50)))
        assert isinstance(client.receive(), Welcome)
        assert [client.receive().id for _ in range(1, 50)] == list(range(1, 50))

    def test_a_hello_may_come_in_pieces(self, served):
        served.start()
        client = served.raw()
        for byte in encode(hello()):
            client.socket.send(bytes([byte]))
        assert isinstance(client.receive(), Welcome)

    @pytest.mark.parametrize("sent", [b"", encode(hello())[:9]])
    def test_silence_ends_it(self, served, sent):
        served.start(hello_timeout_s=0.05)
        client = served.raw()
        client.socket.sendall(sent)
        assert client.receive() is None
        until(lambda: served.counts["refused_clients"] == 1)

    def test_more_clients_than_allowed_are_told(self, served):
        served.start(max_clients=2)
        first, _ = served.client(), served.client()
        refused = served.raw()
        answer = refused.ask(hello())
        assert (answer.error, answer.message) == (
            "refused",
            "too many clients: 2 are connected",
        )
        assert refused.receive() is None
        first.close()
        until(lambda: served.num_clients() == 1)
        served.client()

    def test_tcp_needs_the_token(self, served):
        daemon = served.start(tcp_token=TOKEN)
        address = ("127.0.0.1", daemon.port)
        for token in (None, "", "wrong", TOKEN + "x", "é" * 16):
            answer = served.raw(address).ask(hello(token=token))
            assert (answer.error, TOKEN in answer.message) == ("refused", False)
        client = served.raw(address)
        welcome = client.ask(hello(token=TOKEN))
        assert isinstance(welcome, Welcome)
        assert client.descriptors == []
        number, device, inode = welcome.arena
        status = Path(f"/proc/{welcome.pid}/fd/{number}").stat()
        assert (status.st_dev, status.st_ino) == (device, inode)
        assert client.ask(Lookup(1, ENCODED, key(range(9)))) == Number(1, 0)

    def test_a_unix_socket_needs_none(self, served):
        served.start(tcp_token=TOKEN)
        served.client()

    def test_but_only_root_and_the_daemons_user_may_use_it(self, served, monkeypatch):
        served.start()
        user = 0
        credentials = SimpleNamespace(size=12, unpack=lambda _: (1, user, 1000))
        monkeypatch.setattr("kvstore.daemon.handshake._CREDENTIALS", credentials)
        monkeypatch.setattr(os, "geteuid", lambda: 1000)
        served.client()
        user = 1000
        served.client()
        user = 1001
        refused = served.raw()
        answer = refused.ask(hello())
        assert (answer.id, answer.error) == (0, "refused")
        assert "user 1001 may not use the daemon of user 1000" in answer.message
        assert refused.receive() is None
        assert refused.descriptors == []
        assert served.counts["refused_clients"] == 1


BOMBS = {
    "zeros": b"\0" * (10 << 20),
    "http": b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n",
    "length of 2 GiB": struct.pack("<I", 1 << 31) + b"\0" * 1000,
    "length of 4 GiB": b"\xff" * 1000,
    "pickle": framed(pickle.dumps({"a": [1, 2, 3]})),
    "nested arrays": framed(b"\x91" * 60_000),
    "array of 4 billion": framed(b"\xdd\xff\xff\xff\xff"),
    "map of 4 billion": framed(b"\x92\x01\xdf\xff\xff\xff\xff"),
    "bytes of 4 GiB": framed(b"\x94\x01\x01\xc6\xff\xff\xff\xff" + b"x" * 100),
    "unknown message": framed(b"\x91\x7f"),
    "too few fields": framed(b"\x91\x01"),
    "wrong types": framed(b"\x94\x01\xa1x\xc0\xc0"),
    "number beyond 64 bits": framed(b"\x92\x04\xd9\x40" + b"9" * 64),
}


class TestRubbish:
    @pytest.mark.parametrize("what", BOMBS)
    def test_instead_of_a_hello(self, served, what):
        served.start()
        other = served.client()
        client = served.raw()
        send_all_or_reset(client, BOMBS[what])
        assert_refused(client)
        assert served.counts["refused_clients"] == 1
        assert served.counts["protocol_errors"] == 1
        assert isinstance(other.ask(Status(1)), Told)

    @pytest.mark.parametrize("what", BOMBS)
    def test_after_the_handshake(self, served, what):
        served.start()
        other = served.client()
        client = served.client()
        send_all_or_reset(client, BOMBS[what])
        assert_refused(client)
        assert served.counts["protocol_errors"] == 1
        assert served.counts["dropped_clients"] == 1
        assert isinstance(other.ask(Status(1)), Told)

    def test_what_was_asked_before_is_answered(self, served):
        served.start()
        client = served.client()
        requests = [encode(Lookup(number, ENCODED, key(range(9)))) for number in (1, 2, 3)]
        client.socket.sendall(b"".join(requests) + framed(b"\x91\x7f"))
        assert [client.receive().id for _ in range(4)] == [1, 2, 3, 0]
        assert client.receive() is None

    def test_memory_stays_flat(self, served):
        served.start()

        def throw_all():
            for rubbish in BOMBS.values():
                for greeted in (False, True):
                    with Raw(served.path) as client:
                        if greeted:
                            client.ask(hello())
                        send_all_or_reset(client, rubbish)
                        while client.receive() is not None:
                            pass

        throw_all()
        before = resident_bytes()
        for _ in range(10):
            throw_all()
        assert resident_bytes() - before < 16 << 20

    def test_descriptors_that_a_client_sends_are_not_kept(self, served):
        served.start()
        before = num_descriptors()
        client = served.raw()
        with Path(os.devnull).open() as null:
            socket.send_fds(client.socket, [encode(hello())], [null.fileno()])
            assert isinstance(client.receive(), Welcome)
            socket.send_fds(client.socket, [encode(Status(1))], [null.fileno()] * 3)
            assert isinstance(client.receive(), Told)
        # two sockets and the descriptor that came with the welcome
        assert num_descriptors() - before == 3

    def test_rubbish_as_namespace_is_an_error_of_the_request(self, served):
        served.start()
        client = served.client()
        for rubbish in (b"", b"\x91" * 10_000, b"\xdd\xff\xff\xff\xff", pickle.dumps({})):
            answer = client.ask(Lookup(1, rubbish, key(range(9))))
            assert (answer.id, answer.error) == (1, "usage")
        assert client.ask(Lookup(2, ENCODED, key(range(9)))) == Number(2, 0)


def send_all_or_reset(client, data):
    with suppress(ConnectionError):  # it may stop listening before the end
        client.socket.sendall(data)


def assert_refused(client):
    answer = client.receive()
    assert isinstance(answer, Failed)
    assert (answer.id, answer.error) == (0, "refused")
    assert client.receive() is None


def resident_bytes():
    return int(Path("/proc/self/statm").read_text().split()[1]) * PAGE


def num_descriptors():
    return len(list(Path("/proc/self/fd").iterdir()))


class TestRequests:
    def test_a_thousand_at_once_are_answered_in_order(self, served):
        served.start()
        client = served.client()
        client.put(range(8))
        client.send(*(Lookup(number, ENCODED, key(range(9))) for number in range(1, 1001)))
        answers = [client.receive() for _ in range(1000)]
        assert answers == [Number(number, 8) for number in range(1, 1001)]

    def test_the_bytes_of_one_client_reach_another(self, served):
        served.start()
        writer, reader = served.client(), served.client(access="read")
        held = writer.ask(Reserve(1, ENCODED, key(range(8))))
        with mmap.mmap(writer.descriptors[0], NUM_BLOCKS * PAGE) as memory:
            for offset in np.frombuffer(held.offsets, "<i8").tolist():
                memory[offset : offset + LAYOUT.block_bytes] = b"k" * LAYOUT.block_bytes
        assert reader.ask(Acquire(1, ENCODED, key(range(9)))).held == 0
        assert writer.ask(Commit(2, held.held)) == Number(2, 2)
        lease = reader.ask(Acquire(2, ENCODED, key(range(9))))
        assert lease.offsets == held.offsets
        size = NUM_BLOCKS * PAGE
        with mmap.mmap(reader.descriptors[0], size, prot=mmap.PROT_READ) as memory:
            for offset in np.frombuffer(lease.offsets, "<i8").tolist():
                expected = b"k" * LAYOUT.block_bytes
                assert memory[offset : offset + LAYOUT.block_bytes] == expected
        assert reader.ask(Verify(3, lease.held)) == Number(3, 2)
        reader.send(Release(lease.held))
        until(lambda: served.pool.num_leases == 0)

    def test_the_largest_frame_passes_and_a_larger_one_does_not(self, served):
        served.start()
        client = served.client()
        overhead = len(encode(Lookup(1, ENCODED, b""))) + 3  # a longer length field
        tokens = bytes((MAX_FRAME_BYTES - overhead) // 4 * 4)
        assert client.ask(Lookup(1, ENCODED, tokens)) == Number(1, 0)
        client.socket.sendall(struct.pack("<I", MAX_FRAME_BYTES + 1))
        assert_refused(client)

    def test_a_failure_of_ours_ends_neither_client_nor_daemon(self, served, monkeypatch):
        daemon = served.start()
        client = served.client()

        def broken(*_):
            raise RuntimeError

        with monkeypatch.context() as patch:
            patch.setattr(daemon.pool, "lookup", broken)
            assert client.ask(Lookup(1, ENCODED, key(range(9)))).error == "internal"
        assert client.ask(Lookup(2, ENCODED, key(range(9)))) == Number(2, 0)
        assert served.counts["internal_errors"] == 1
        assert served.counts["failed_requests"] == 1

    def test_a_failure_in_a_connection_ends_only_that_one(self, served, monkeypatch):
        served.start()
        client, other = served.client(), served.client()
        lease = hold(client)

        def broken(*_):
            raise RuntimeError

        with monkeypatch.context() as patch:
            patch.setattr("kvstore.daemon.connection.decode_request", broken)
            assert client.ask(Status(1)) is None
        assert lease.held
        assert isinstance(other.ask(Status(1)), Told)
        assert served.counts["internal_errors"] == 1

    def test_many_works_of_one_client_wait_and_are_all_done(self, served):
        served.start()
        client = served.client()
        client.put(range(8))
        lease = client.ask(Acquire(1, ENCODED, key(range(9))))
        client.send(*(Verify(number, lease.held) for number in range(1, 201)))
        assert {client.receive().id for _ in range(200)} == set(range(1, 201))
        client.send(Release(lease.held))

    def test_one_client_cannot_fill_the_queue_of_the_worker(self, served):
        daemon = served.start()
        client, other = served.client(), served.client()
        client.put(range(8))
        lease = client.ask(Acquire(1, ENCODED, key(range(9))))
        go = threading.Event()
        for _ in range(WORKERS):
            daemon.server._worker.submit(go.wait, PATIENCE_S)
        before = served.counts["requests"]
        client.send(*(Verify(number, lease.held) for number in range(1, 201)))
        until(lambda: served.counts["requests"] >= before + MAX_WORKS)
        for number in range(50):
            assert isinstance(other.ask(Status(number)), Told)
        assert served.counts["requests"] == before + MAX_WORKS + 50
        go.set()
        assert [client.receive().id for _ in range(200)] == list(range(1, 201))
        client.send(Release(lease.held))

    def test_releasing_twice_is_counted(self, served):
        served.start()
        client = served.client()
        client.put(range(8))
        lease = client.ask(Acquire(1, ENCODED, key(range(9))))
        client.send(Release(lease.held), Release(lease.held))
        assert client.ask(Status(2)).status.pool.counts["refused_releases",] == 1

    def test_leases_run_out_without_anybody_asking(self, served):
        served.start(lease_timeout_s=0.05)
        client = served.client()
        client.put(range(8))
        client.ask(Acquire(1, ENCODED, key(range(9))))
        until(lambda: served.pool.num_leases == 0)
        assert served.pool.counts["expired_leases",] == 1

    def test_the_status_counts(self, served):
        served.start()
        client = served.client()
        client.put(range(8))
        status = client.ask(Status(3)).status
        assert (status.state, status.num_clients, status.pid) == ("ready", 1, os.getpid())
        assert status.counts["requests"] == 3
        assert status.counts["accepted_clients"] == 1
        assert status.pool.num_blocks == 2
        assert status.arena.capacity_bytes == NUM_BLOCKS * PAGE


def hold(client, start=0):
    """Take a lease on blocks of ``start …`` and a reservation behind them; return the lease."""
    client.put(range(start, start + 8))
    held = client.ask(Reserve(1, ENCODED, key(range(start, start + 16))))
    assert held.held
    lease = client.ask(Acquire(2, ENCODED, key(range(start, start + 9))))
    assert lease.held
    return lease


class Halted:
    """Keeps the daemon's event loop from running, so that requests of several clients are there at once."""

    def __init__(self, daemon):
        self._loop = daemon._loop
        self._go = threading.Event()

    def __enter__(self):
        halted = threading.Event()

        def wait():
            halted.set()
            self._go.wait(PATIENCE_S)

        self._loop.call_soon_threadsafe(wait)
        assert halted.wait(PATIENCE_S)

    def __exit__(self, *_):
        self._go.set()


class TestFairness:
    @pytest.mark.parametrize(("num_tokens", "num_requests"), [(16, 10_000), (131_072, 300)])
    def test_one_clients_queue_does_not_keep_another_waiting(
        self, served, num_tokens, num_requests
    ):
        daemon = served.start()
        busy, other = served.client(), served.client()
        frames = encode(Lookup(1, ENCODED, bytes(4 * num_tokens))) * 10
        sender = threading.Thread(
            target=lambda: [busy.socket.sendall(frames) for _ in range(num_requests // 10)]
        )
        sender.start()
        until(lambda: served.counts["requests"] >= 50)
        with Halted(daemon):
            before = served.counts["requests"]
            other.send(Status(1))
        answer = other.receive()
        assert answer.status.counts["requests"] - before <= 2 * TURN_FRAMES + 1
        for _ in range(num_requests):
            assert busy.receive() == Number(1, 0)
        sender.join()

    def test_who_does_not_read_is_not_served_and_then_dropped(self, served):
        served.start(slow_client_s=0.3)
        slow, other = served.client(), served.client()
        hold(slow)
        slow.socket.setblocking(False)
        sent = 0
        with suppress(BlockingIOError):
            while True:
                sent += slow.socket.send(encode(Status(1)) * 100)
        assert isinstance(other.ask(Status(1)), Told)
        until(lambda: served.counts["slow_clients"] == 1)
        assert served.counts["dropped_clients"] == 1
        assert served.counts["requests"] < sent // len(encode(Status(1)))
        assert isinstance(other.ask(Status(2)), Told)
        slow.socket.settimeout(PATIENCE_S)
        while slow.receive() is not None:
            pass  # what was answered before it was dropped; then the end

    def test_who_reads_late_but_reads_is_kept(self, served):
        daemon = served.start(slow_client_s=60.0)
        late = served.client()
        (connection,) = daemon.server._shared.open
        other = served.client()
        num_requests = 5000
        late.send(*(Status(number) for number in range(num_requests)))
        until(lambda: connection._paused)
        for number in range(100):  # so many turns pass
            assert isinstance(other.ask(Status(number)), Told)
        waiting = connection._transport.get_write_buffer_size()
        assert waiting < WRITE_BUFFER_BYTES + TURN_FRAMES * 4096
        ids = [late.receive().id for _ in range(num_requests)]
        assert ids == list(range(num_requests))
        assert served.counts["dropped_clients"] == 0


class TestTheEnd:
    def test_of_a_client_frees_what_it_held(self, served):
        served.start()
        client = served.client()
        hold(client)
        assert (served.pool.num_leases, served.pool.num_reservations) == (1, 1)
        client.close()
        until(lambda: served.num_clients() == 0)
        assert served.pool.held_blocks == 0
        assert served.counts["abandoned_leases"] == 1
        assert served.counts["abandoned_reservations"] == 1

    def test_what_was_sent_before_the_end_counts(self, served):
        served.start()
        client, other = served.client(), served.client()
        held = client.ask(Reserve(1, ENCODED, key(range(8))))
        lookups = [Lookup(number, ENCODED, key(range(9))) for number in range(100)]
        client.send(*lookups, Commit(2, held.held))
        client.socket.shutdown(socket.SHUT_WR)
        for number in range(100):
            assert client.receive().id == number
        assert client.receive() == Number(2, 2)
        assert client.receive() is None
        assert other.ask(Lookup(1, ENCODED, key(range(9)))) == Number(1, 8)

    def test_by_a_kill_frees_what_it_held(self, served):
        served.start()
        code = (
            f"import sys; sys.path[:0] = {sys.path!r}\n"
            "import importlib.util\n"
            f"spec = importlib.util.spec_from_file_location('d', {__file__!r})\n"
            "d = importlib.util.module_from_spec(spec); spec.loader.exec_module(d)\n"
            f"client = d.Raw({str(served.path)!r}); client.ask(d.hello()); d.hold(client)\n"
            "print('held', flush=True); sys.stdin.read()\n"
        )
        process = subprocess.Popen(
            [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        with process:
            assert process.stdout.readline() == b"held\n"
            assert (served.pool.num_leases, served.pool.num_reservations) == (1, 1)
            process.send_signal(signal.SIGKILL)
        until(lambda: served.num_clients() == 0)
        assert served.pool.held_blocks == 0

    def test_a_device_may_write_for_a_moment_longer(self, served):
        served.start(dma_grace_s=60.0)
        client = served.client(dma=True)
        hold(client)
        client.close()
        until(lambda: served.pool.num_leases == 0)
        assert served.pool.num_reservations == 1
        served.daemon.close()
        assert served.daemon.server.status().num_clients == 0
        served.daemon = None

    def test_and_then_its_slots_come_back(self, served):
        served.start(dma_grace_s=0.05)
        client = served.client(dma=True)
        hold(client)
        client.close()
        until(lambda: served.num_clients() == 0)
        assert served.pool.num_reservations == 0

    @pytest.mark.parametrize("why", ["rubbish", "slow"])
    def test_a_dropped_client_keeps_its_slots_until_it_closes(self, served, why):
        """It may not have noticed yet, and be copying."""
        served.start(slow_client_s=0.05)
        client, other = served.client(), served.client()
        hold(client)
        if why == "rubbish":
            client.socket.sendall(framed(b"\x91\x7f"))
        else:
            client.socket.setblocking(False)
            with suppress(BlockingIOError):
                while True:
                    client.socket.send(encode(Status(1)) * 100)
            client.socket.settimeout(PATIENCE_S)
        until(lambda: served.counts["dropped_clients"] == 1)
        while client.receive() is not None:
            pass
        client.send(Abort(1, 1), Status(2))  # nobody listens any more
        assert isinstance(other.ask(Status(1)), Told)
        assert (served.pool.num_leases, served.pool.num_reservations) == (1, 1)
        assert other.ask(Reserve(2, ENCODED, key(range(16)))).held == 0
        client.close()
        until(lambda: served.num_clients() == 1)
        assert served.pool.held_blocks == 0

    def test_a_dropped_client_that_holds_nothing_is_closed_at_once(self, served, monkeypatch):
        monkeypatch.setattr("kvstore.daemon.server.TICK_S", 3600.0)  # not when somebody looks
        served.start()
        before = num_descriptors()
        clients = [served.raw() for _ in range(20)]
        for client in clients:
            client.socket.sendall(encode(hello(access="read")) + framed(b"\x91\x7f"))
            while client.receive() is not None:
                pass
        until(lambda: served.num_clients() == 0)
        received = sum(len(client.descriptors) for client in clients)
        until(lambda: num_descriptors() == before + len(clients) + received)

    def test_and_one_whose_leases_run_out_is_closed_then(self, served):
        served.start(lease_timeout_s=0.05)
        client, other = served.client(), served.client()
        client.put(range(8))
        assert client.ask(Acquire(1, ENCODED, key(range(9)))).held
        client.socket.sendall(framed(b"\x91\x7f"))
        while client.receive() is not None:
            pass
        until(lambda: served.num_clients() == 1)
        with pytest.raises(BrokenPipeError):
            client.send(Status(2))
        assert isinstance(other.ask(Status(1)), Told)

    def test_a_dropped_client_ends_with_the_daemon_at_last(self, served):
        served.start()
        client = served.client()
        hold(client)
        client.socket.sendall(framed(b"\x91\x7f"))
        while client.receive() is not None:
            pass
        client.send(Status(1))  # it is read, and not answered
        assert served.num_clients() == 1
        served.daemon.close()
        served.daemon = None
        with pytest.raises(BrokenPipeError):
            client.send(Status(2))

    def test_who_has_said_all_and_reads_nothing_is_not_waited_for(self, served):
        served.start(slow_client_s=0.2)
        client = served.client()
        hold(client)
        answer_bytes = len(encode(client.ask(Status(1))))
        number = WRITE_BUFFER_BYTES * 2 // 3 // answer_bytes  # more than fits into the socket
        client.send(*[Status(1)] * number)
        client.socket.shutdown(socket.SHUT_WR)
        until(lambda: served.pool.held_blocks == 0)
        until(lambda: served.num_clients() == 0)
        assert served.counts["slow_clients"] == 0

    def test_of_the_daemon_ends_the_stream_of_everybody(self, served):
        served.start()
        client = served.client()
        hold(client)
        silent = served.raw()
        served.daemon.close()
        served.daemon = None
        assert client.receive() is None
        assert silent.receive() is None
        with pytest.raises(BrokenPipeError):
            client.send(Release(1))

    def test_a_thousand_clients_leave_no_descriptor(self, served):
        served.start()
        served.client().close()
        until(lambda: served.num_clients() == 0)
        before = num_descriptors()
        for number in range(1000):
            with Raw(served.path) as client:
                if number % 3:
                    client.ask(hello(access="read" if number % 2 else "write"))
                if number % 3 == 2:
                    client.socket.sendall(framed(b"\x91\x7f"))
        until(lambda: served.num_clients() == 0)
        until(lambda: num_descriptors() <= before)
