"""Rubbish for a daemon: it neither ends nor grows, and nobody else notices.

``FUZZ_SEED`` and ``FUZZ_FRAMES`` choose which and how much. A failure names the connection: its seed and
number are all that its frames depend on, but for the ids that the daemon gave out.
"""

from __future__ import annotations

import os
import pickle
import random
import re
import socket
import threading
import time
from collections import deque
from itertools import count, cycle
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import kvstore
from kvstore.daemon.answers import MAX_NAMESPACE_BYTES
from kvstore.namespace import KVLayout, Namespace
from kvstore.protocol import (
    MAX_FRAME_BYTES,
    Abort,
    Acquire,
    Clear,
    Commit,
    Drain,
    Evict,
    Explain,
    ExplainAll,
    Failed,
    FrameReader,
    Held,
    Lookup,
    Number,
    Prefetch,
    ProtocolError,
    Release,
    Reserve,
    Status,
    Verify,
    Welcome,
    decode_reply,
    decode_request,
    encode,
    encode_namespace,
)
from kvstore.testing import pattern
from tests.integration.test_daemon import Raw, framed, hello, until
from tests.integration.test_serve import Process
from tests.unit.test_daemon_session import World

SEED = int(os.environ.get("FUZZ_SEED", "1"))
FRAMES = int(os.environ.get("FUZZ_FRAMES", "100000"))
FUZZERS = 3
LINGERING = 6
"""Connections that a fuzzer leaves open behind it, with what they hold."""
DROPPED = re.compile(r"WARNING kvstore\.daemon\.\w+: client ('fuzz' dropped|refused): ")
"""What the daemon says about nearly every connection here."""
GROWTH_BYTES = 64 << 20
PATIENCE_S = 20.0

PAGE_LAYOUT = KVLayout(1, 1, 8, "float32", block_tokens=4)
FUZZED = (
    Namespace(b"fuzzed", PAGE_LAYOUT),
    Namespace(b"fuzzed", PAGE_LAYOUT, adapter=b"a", settings=b"s", tenant="t", salt=""),
    Namespace(b"fuzzed", KVLayout(2, 4, 64, "bfloat16", block_tokens=4)),
    Namespace(b"fuzzed", KVLayout(2, 1, 64, "float16", block_tokens=16, attention="mla")),
    Namespace(b"fuzzed", PAGE_LAYOUT, keys="hash"),
)
GOOD = Namespace(b"good", PAGE_LAYOUT)
NUMBERS = (0, 1, -1, 127, 128, 2**31 - 1, 2**32, 2**63 - 1, -(2**63), 2**64 - 1)
LENGTHS = (0, 1, 3, 4, 15, 16, 17, 31, 32, 64, 65, 128, 1000, 1024, 5000)
MARKERS = (
    b"\x00\x7f\x80\x8f\x90\x9f\xa0\xc0\xc1\xc4\xc6\xca\xcf\xd3\xd9\xdb\xdc\xdd\xde\xdf\xe0\xff"
)
BOMBS = (
    b"\x91" * 10_000 + b"\xc0",  # arrays in arrays
    b"\x94\x01\x01" + b"\x91" * 10_000 + b"\xc0",  # as a field of a look-up
    b"\x81\xa1a" * 10_000 + b"\xc0",
    b"\xdd\xff\xff\xff\xff",  # an array of 4 billion items
    b"\xdf\xff\xff\xff\xff",
    b"\x94\x01\x01\xc6\xff\xff\xff\xff",  # bytes, 4 GiB of them
    b"\x94\x01\x01\xc4\x05namesp\xc6\x7f\xff\xff\xff",
    b"\xdb\xff\xff\xff\xffx",
    b"\xc9\xff\xff\xff\xff\x05",  # an extension
    b"\xd6\xff\x00\x00\x00\x00",  # a time
)
PICKLES = (pickle.dumps(os.getpid), pickle.dumps({"lookup": [1, 2]}), b"cos\nsystem\n(S'id'\ntR.")


class Made:
    """The frames of one connection, drawn from its random numbers and the ids that it was given."""

    def __init__(self, draw):
        self.draw = draw
        self.held = [0]

    def key(self):
        """Key bytes that are often a beginning of one another."""
        length = self.draw.choice(LENGTHS)
        if self.draw.random() < 0.1:
            return self.draw.randbytes(length)
        return (bytes([self.draw.randrange(4)]) + bytes(3)) * (length // 4) + bytes(length % 4)

    def message(self):
        """Return any message that makes sense, perhaps with an id that does not."""
        draw = self.draw
        kind = draw.choice((Lookup, Prefetch, Acquire, Reserve, Reserve, Explain, Evict, Release,
                            Verify, Commit, Commit, Abort, Drain, Status, ExplainAll, Acquire))  # fmt: skip
        number = draw.choice(NUMBERS) if draw.random() < 0.1 else draw.randrange(1, 1000)
        held = draw.choice(self.held) + (draw.choice(NUMBERS) if draw.random() < 0.2 else 0)
        held = max(-(2**63), min(held, 2**64 - 1))
        if draw.random() < 0.01:
            kind = Clear
        if kind in (Drain, Status, Clear):
            return kind(number)
        if kind is Release:
            return Release(held)
        if kind in (Verify, Commit, Abort):
            return kind(number, held)
        if kind is ExplainAll:
            digest = draw.choice((None, "", "00", "zz", FUZZED[0].digest.hex(), "f" * 64))
            return ExplainAll(number, digest, self.key())
        return kind(number, self.namespace(), self.key())

    def namespace(self):
        encoded = encode_namespace(self.draw.choice(FUZZED))
        return flipped(self.draw, encoded) if self.draw.random() < 0.05 else encoded

    def body(self):
        """Return the body of a frame, mutated more often than not."""
        draw, body = self.draw, encode(self.message())[4:]
        for _ in range(draw.choice((0, 1, 1, 1, 2))):
            body = draw.choice((flipped, flipped, cut, grown, marked))(draw, body or b"\x90")
        return body

    def rubbish(self):
        """Return what must end a connection, or leave it waiting for more."""
        draw = self.draw
        chance = draw.random()
        if chance < 0.15:
            return framed(draw.choice(BOMBS))
        if chance < 0.25:
            return framed(draw.choice(PICKLES))
        if chance < 0.35:
            return draw.randbytes(draw.choice((1, 3, 4, 5, 100, 10_000)))
        body = self.body() or b"\x90"
        if chance < 0.7:
            lengths = (0, 1, len(body) - 1, len(body) + 1, MAX_FRAME_BYTES, MAX_FRAME_BYTES + 1)
            length = draw.choice((*lengths, 2**31 - 1, 2**31, 2**32 - 1, draw.getrandbits(32)))
            return length.to_bytes(4, "little") + body
        if chance < 0.72:
            return framed(draw.randbytes(1 << 20))
        return framed(draw.randbytes(draw.randrange(1, 200)))

    def hello(self):
        """Return the frame of a first message, mostly wrong."""
        draw = self.draw
        message = hello(
            oldest_version=draw.choice(NUMBERS),
            version=draw.choice(NUMBERS),
            client=draw.choice(("", "x" * 255, "x" * 256, "\n\x00", "é" * 127)),
            access=draw.choice(("read", "write", "execute", "")),
            dma=draw.choice((True, False)),
            token=draw.choice((None, "", "secret" * 10, "x" * 300)),
        )
        body = encode(message)[4:]
        if draw.random() < 0.5:
            body = draw.choice((flipped, cut, grown, marked))(draw, body)
        return self.rubbish() if draw.random() < 0.3 else framed(body)

    def frames(self, most):
        """Return frames up to one that ends the connection, and some behind it."""
        frames = []
        while len(frames) < most and self.draw.random() < 0.97:
            body = self.body()
            if decodes(body) or self.draw.random() < 0.05:
                frames.append(framed(body))
        if self.draw.random() < 0.1:
            self.draw.shuffle(frames)
        if self.draw.random() < 0.1:
            frames += frames[: self.draw.randrange(10)]
        return [*frames, self.rubbish(), framed(self.body()), encode(self.message())][:most]


def decodes(body):
    try:
        decode_request(body)
    except ProtocolError:
        return False
    return True


def flipped(draw, body):
    changed = bytearray(body)
    for _ in range(draw.choice((1, 1, 2, 8))):
        changed[draw.randrange(len(changed))] ^= 1 << draw.randrange(8)
    return bytes(changed)


def cut(draw, body):
    start = draw.randrange(len(body))
    return (
        body[:start] + body[start + draw.randrange(1, 9) :]
        if draw.random() < 0.5
        else body[: start + 1]
    )


def grown(draw, body):
    start = draw.randrange(len(body) + 1)
    added = draw.randbytes(draw.randrange(1, 9)) if draw.random() < 0.5 else body[start:][:50]
    return body[:start] + (added or b"\xc0") + body[start:]


def marked(draw, body):
    changed = bytearray(body)
    changed[draw.randrange(len(changed))] = draw.choice(MARKERS)
    return bytes(changed)


class Fuzzer:
    """One connection after the other, each with rubbish of its own."""

    def __init__(self, path, numbers, budget):
        self.path, self.numbers, self.budget = path, numbers, budget
        self.num_sent = 0
        self.failure = None
        self.lingering = deque()
        self.thread = threading.Thread(target=self.run)

    def run(self):
        number = None
        try:
            while self.num_sent < self.budget:
                number = next(self.numbers)
                self.converse(Made(random.Random(f"{SEED}-{number}")))
                while len(self.lingering) > LINGERING:
                    self.lingering.popleft().close()
        except BaseException as error:  # noqa: BLE001  (told by the main thread)
            error.add_note(f"seed {SEED}, connection {number}")
            self.failure = error

    def close(self):
        while self.lingering:
            self.lingering.popleft().close()

    def converse(self, made):
        client = Raw(self.path)
        self.lingering.append(client)
        if made.draw.random() < 0.05:
            self.send(client, [made.hello(), framed(made.body())], made.draw)
            return
        access = made.draw.choice(("write", "write", "write", "read"))
        welcome = client.ask(hello(client="fuzz", access=access))
        assert isinstance(welcome, Welcome)
        for kind in made.draw.choices((Reserve, Acquire), k=made.draw.randrange(6)):
            reply = client.ask(kind(1, made.namespace(), made.key()))
            if not isinstance(reply, Held) or not reply.held:
                continue
            if kind is Acquire or made.draw.random() < 0.3:
                made.held.append(reply.held)
            else:
                client.ask(Commit(2, reply.held))
        self.send(client, made.frames(made.draw.choice((5, 40, 80))), made.draw)

    def send(self, client, frames, draw):
        """Send, in pieces that end anywhere, and read what comes; often read up to the end."""
        data = memoryview(b"".join(frames))
        self.num_sent += len(frames)
        end = client.socket
        end.setblocking(False)
        sizes = (1 << 20,) if draw.random() < 0.7 else (1, 2, 3, 5, 100, 1000)
        give_up = time.monotonic() + PATIENCE_S
        try:
            while data:
                try:
                    data = data[
                        end.send(data[: draw.choice(sizes) if len(data) < 20_000 else 4096]) :
                    ]
                except BlockingIOError:
                    assert time.monotonic() < give_up, "nothing more is read"
                receive(client)
            if draw.random() < 0.9:
                end.shutdown(socket.SHUT_WR)
                end.setblocking(True)
                end.settimeout(PATIENCE_S)
                while receive(client):
                    pass
        except (BrokenPipeError, ConnectionResetError):
            pass  # dropped


def receive(client):
    """Take what there is; False at the end of the stream. Every answer is one, and none is "internal"."""
    try:
        data, descriptors, _, _ = socket.recv_fds(client.socket, 1 << 16, 4)
    except BlockingIOError:
        return True
    client.descriptors += descriptors
    rest = memoryview(data)
    while rest:
        free = client.reader.buffer()
        part = rest[: len(free)]
        free[: len(part)] = part
        client.reader.received(len(part))
        rest = rest[len(part) :]
        while (body := client.reader.next_frame()) is not None:
            reply = decode_reply(body)
            assert not (isinstance(reply, Failed) and reply.error == "internal"), reply
    return bool(data)


class Good:
    """A client of the better sort, at the same time."""

    def __init__(self, url):
        self.store = kvstore.connect(url, on_failure="raise", deadline_s=PATIENCE_S)
        self.num_loaded = self.num_stored = 0
        self.failure = None
        self.done = threading.Event()
        self.thread = threading.Thread(target=self.run)

    def run(self):
        draw = random.Random(SEED)
        try:
            while not self.done.is_set():
                tokens = [draw.randrange(8)] * (4 * draw.randrange(1, 9))
                self.save(tokens)
                self.load([*tokens, 0])
        except BaseException as error:  # noqa: BLE001  (told by the main thread)
            self.failure = error

    def save(self, tokens):
        reservation = self.store.reserve(GOOD, tokens)
        for index, slot in zip(reservation.indices.tolist(), reservation.slots(), strict=True):
            slot[:] = right(tokens, index)
        self.num_stored += self.store.commit(reservation)

    def load(self, tokens):
        known = self.store.lookup(GOOD, tokens)
        assert known % 4 == 0
        assert known < len(tokens)
        with self.store.acquire(GOOD, tokens) as lease:
            for index, slot in enumerate(lease.slots()):
                np.testing.assert_array_equal(slot, right(tokens, index))
            assert self.store.verify(lease) == lease.num_blocks
        self.num_loaded += lease.num_blocks


def right(tokens, index):
    return pattern(GOOD, np.array(tokens[: 4 * (index + 1)], "<i4").tobytes())


def memory_bytes(pid):
    """Memory of the process that is its own, the arena not counted."""
    status = Path(f"/proc/{pid}/status").read_text()
    return int(re.search(r"RssAnon:\s*(\d+) kB", status)[1]) << 10


@pytest.fixture
def daemon(tmp_path):
    process = Process(tmp_path / "kv.sock", "--block-tokens=4", "--dram=8MiB")
    process.wait_ready()
    yield process
    process.close()


@pytest.fixture
def good(daemon):
    good = Good(f"unix://{daemon.path}")
    yield good
    good.store.close()


@pytest.fixture
def fuzzers(daemon):
    numbers = count()
    fuzzers = [Fuzzer(daemon.path, numbers, FRAMES // FUZZERS + 1) for _ in range(FUZZERS)]
    yield fuzzers
    for fuzzer in fuzzers:
        fuzzer.close()


@pytest.mark.timeout(300)
def test_mutated_frames(daemon, good, fuzzers):
    good.save([1] * 32)
    num_descriptors, num_bytes = daemon.num_descriptors(), memory_bytes(daemon.pid)
    for runner in (good, *fuzzers):
        runner.thread.start()
    for fuzzer in fuzzers:
        fuzzer.thread.join()
        fuzzer.close()
    good.done.set()
    good.thread.join()
    log = "\n".join(line for line in daemon.lines if not DROPPED.search(line))
    for runner in (good, *fuzzers):
        if runner.failure is not None:
            runner.failure.add_note(f"the daemon: {log[-5000:]}")
            raise runner.failure
    until(lambda: good.store.status().num_clients == 1)
    good.save([1] * 32)
    good.load([1] * 33)
    good.store.drain()
    status = good.store.status()
    grown_bytes = memory_bytes(daemon.pid) - num_bytes
    num_sent = sum(fuzzer.num_sent for fuzzer in fuzzers)
    print({"seed": SEED, "sent": num_sent, "grown_bytes": grown_bytes, **status.counts})
    print({"loaded": good.num_loaded, "stored": good.num_stored, **status.pool.counts})
    assert not re.search(r"Traceback|ERROR|internal|Exception|never awaited", log), log[-5000:]
    assert num_sent >= FRAMES
    assert status.counts["requests"] > num_sent // 2, "most frames came behind one that was the end"
    assert status.counts["protocol_errors"] > num_sent // 200, "hardly anything was refused"
    assert status.counts["internal_errors"] == 0
    assert status.pid == daemon.pid
    assert daemon.running
    assert grown_bytes < GROWTH_BYTES
    pool = status.pool
    assert (pool.held_blocks, pool.num_leases, pool.num_reservations) == (0, 0, 0)
    assert good.num_loaded > 100
    assert good.num_stored > 100
    assert daemon.num_descriptors() == num_descriptors


def test_the_longest_namespaces_take_little_memory(daemon):
    """Though they are kept, decoded, for those who come again."""
    num_bytes = memory_bytes(daemon.pid)
    with Raw(daemon.path) as client:
        client.ask(hello())
        for number in range(8192):
            long = Namespace(
                b"long", PAGE_LAYOUT, salt=str(number).zfill(MAX_NAMESPACE_BYTES - 200)
            )
            assert client.ask(Lookup(1, encode_namespace(long), b"")) == Number(1, 0)
    grown_bytes = memory_bytes(daemon.pid) - num_bytes
    print({"grown_bytes": grown_bytes})
    assert grown_bytes < GROWTH_BYTES


# -- without sockets ---------------------------------------------------------------------------------

NAMESPACE_BYTES = st.sampled_from([encode_namespace(namespace) for namespace in FUZZED])
KEYS = st.one_of(
    st.binary(max_size=40),
    st.builds(lambda length, token: bytes([token, 0, 0, 0]) * length, st.integers(0, 40), st.integers(0, 1)),
)  # fmt: skip
IDS = st.one_of(st.integers(0, 12), st.sampled_from(NUMBERS))
MESSAGES = st.one_of(
    *(st.builds(kind, IDS, NAMESPACE_BYTES, KEYS) for kind in (Lookup, Prefetch, Explain, Evict)),
    *(st.builds(kind, IDS, NAMESPACE_BYTES, KEYS) for kind in (Acquire, Reserve)),
    *(st.builds(kind, IDS, IDS) for kind in (Verify, Commit, Abort)),
    *(st.builds(kind, IDS) for kind in (Status, Drain, Clear, Release)),
    st.builds(ExplainAll, IDS, st.none() | st.text(max_size=8), KEYS),
)


@st.composite
def bodies(draw):
    body = bytearray(encode(draw(MESSAGES))[4:])
    for _ in range(draw(st.integers(0, 2))):
        body[draw(st.integers(0, len(body) - 1))] = draw(st.integers(0, 255))
    return bytes(body[: draw(st.just(len(body)) | st.integers(0, len(body)))])


class TestSession:
    @settings(max_examples=200)
    @given(st.lists(st.tuples(st.booleans(), bodies()), max_size=30))
    def test_every_message_has_its_answer_and_nothing_stays_held(self, said):
        world = World(12)
        sessions = {True: world.session(), False: world.session("read", 1 << 14)}
        for which, body in said:
            try:
                request = decode_request(body)
            except ProtocolError:
                continue
            answer = sessions[which].handle(request)
            answer = answer() if callable(answer) else answer
            if isinstance(request, Release):
                assert answer is None
                continue
            told = decode_reply(encode(answer)[4:])
            assert told == answer
            assert told.id == request.id
            assert getattr(told, "error", None) != "internal"
            if isinstance(told, Held) and not told.held:
                assert told.offsets == b""
        world.pool.check_invariants()
        for session in sessions.values():
            session.end_leases()
            session.end_reservations()
            assert session.num_held == session.reserved_bytes == 0
        stats = world.pool.stats()
        assert (stats.held_blocks, stats.num_leases, stats.num_reservations) == (0, 0, 0)
        world.close()


def test_blocks_of_many_sizes_can_be_stored_one_after_the_other():
    world = World(20)
    session = world.session()
    for size in range(1, 3000):
        other = encode_namespace(Namespace(b"w", KVLayout(1, 1, size, "uint8", block_tokens=1)))
        held = session.handle(Reserve(1, other, bytes(4)))
        assert isinstance(held, Held), held
        assert session.handle(Commit(1, held.held)) == Number(1, 1)
    world.pool.check_invariants()
    world.close()


def cut_up(stream, most):
    """Return the bodies in ``stream``, and whether one of more than ``most`` bytes ends it."""
    bodies = []
    while len(stream) >= 4:
        length = int.from_bytes(stream[:4], "little")
        if length > most:
            return bodies, True
        if len(stream) < 4 + length:
            break
        bodies.append(stream[4 : 4 + length])
        stream = stream[4 + length :]
    return bodies, False


class TestFrameReader:
    @given(
        st.lists(st.binary(max_size=300) | st.just(bytes(70_000)), max_size=8),
        st.binary(max_size=10) | st.just(b"\0\0\0\0\1\0\x10\0"),
        st.lists(st.integers(1, 100_000), min_size=1, max_size=8),
    )
    def test_however_a_stream_is_cut_its_frames_are_the_same(self, sent, rest, sizes):
        """And one that is too long is refused, whatever is there of it."""
        stream = b"".join(map(framed, sent)) + rest
        expected, refused = cut_up(stream, 1 << 20)
        reader, got, position, told = FrameReader(1 << 20), [], 0, False
        try:
            for size in cycle(sizes):
                free = reader.buffer()
                part = stream[position:][: min(len(free), max(size, len(stream) // 100))]
                free[: len(part)] = part
                reader.received(len(part))
                position += len(part)
                while (body := reader.next_frame()) is not None:
                    got.append(bytes(body))
                if position == len(stream):
                    break
        except ProtocolError:
            told = True
        assert got == expected
        assert told == refused

    def test_a_promised_length_takes_no_memory(self):
        reader = FrameReader(MAX_FRAME_BYTES)
        reader.buffer()[:5] = MAX_FRAME_BYTES.to_bytes(4, "little") + b"x"
        reader.received(5)
        assert reader.next_frame() is None
        assert len(reader.buffer()) <= 1 << 17
