"""``bench.store --tier disk``: reads and writes beside plain calls, and restarts of a pool.

The limit of a read or write is, in the same run, a loop of ``preadv`` or ``pwritev`` past the page cache, one
call a block, on as many threads, into a file allocated in the same directory; writes end with ``fdatasync``
on both sides. The store adds headers, checksums, the check of both, and the rows of its manifest.

A restart is measured from before the pool is opened until it has lent the blocks of a prompt, which it had
to load. Then every block must be known, and those of a sample must have the right bytes.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import click
import numpy as np

import kvstore
from bench.report import Row, row
from kvstore.host import file_system
from kvstore.namespace import KVLayout, Namespace
from kvstore.testing.disk import identities
from kvstore.tiers.disk import DiskOptions, DiskStore, slot_bytes_of
from kvstore.tiers.memory import Region

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from numpy.typing import NDArray

    from kvstore.tiers.disk import BlockIdentity

MIB = 1 << 20
BLOCK_TOKENS = 16
LAYERS = {"256k": (8, 4, 128), "1m": (16, 8, 128), "2m": (32, 8, 128), "4m": (64, 8, 128)}
"""Layers, KV heads and head dimension of a bfloat16 block of 16 tokens."""
BATCH_BYTES = 64 * MIB
BATCHES = 8
"""Places on disk that are used in turn, on both sides."""
RESTART_BLOCKS = 100_000
PROMPT_BLOCKS = 100
RESTARTED = Namespace(b"bench restart", KVLayout(1, 1, 64, "bfloat16", BLOCK_TOKENS))
"""Blocks of 4 KiB."""
SAMPLE = 20
MEMORY_FILE_SYSTEMS = ("tmpfs", "ramfs", "devtmpfs")


@contextmanager
def plain_file(path: Path, num_bytes: int, *, direct: bool) -> Iterator[int]:
    """Descriptor of a file of ``num_bytes``, all of which have been allocated."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | (os.O_DIRECT if direct else 0), 0o600)
    try:
        os.posix_fallocate(descriptor, 0, num_bytes)
        yield descriptor
    finally:
        os.close(descriptor)
        path.unlink()


def timed(rounds: int, *sides: Callable[[int], object]) -> list[NDArray[np.float64]]:
    """Seconds of each round of every side, run in turn; a side is told the number of the round."""
    times = np.zeros((len(sides), rounds))
    for number in range(rounds):
        for index, side in enumerate(sides):
            start = time.perf_counter()
            side(number)
            times[index, number] = time.perf_counter() - start
    return list(times)


def rows_of(
    case: str, num_bytes: int, mine: NDArray[np.float64], plain: NDArray[np.float64]
) -> Iterator[Row]:
    """Median rate, and the times of batches of ``num_bytes``."""
    rates = [num_bytes / 1e9 / float(np.median(times)) for times in (mine, plain)]
    yield Row(case, "rate", rates[0], "GB/s", rates[1], rates[1] / rates[0])
    for name, share in (("median", 50), ("p99", 99)):
        values = [float(np.percentile(times, share)) * 1e3 for times in (mine, plain)]
        yield row(case, name, values[0], "ms", values[1])


class Sides:
    """One size of blocks, in the store and in a plain file."""

    def __init__(self, store: DiskStore, descriptor: int, size: str) -> None:
        layout = KVLayout(*LAYERS[size], "bfloat16", BLOCK_TOKENS)
        self.namespace = Namespace(b"bench " + size.encode(), layout)
        self.block_bytes = layout.block_bytes
        self.count = BATCH_BYTES // layout.block_bytes
        self.slot_size = slot_bytes_of(self.namespace)
        self.store, self._descriptor = store, descriptor
        self._threads = ThreadPoolExecutor(store.options.threads, "bench-disk")
        memory = Region(BATCH_BYTES).array()
        memory[:] = np.random.default_rng(1).integers(0, 256, BATCH_BYTES, dtype=np.uint8)
        self.memory = [
            memory[start : start + self.block_bytes]
            for start in range(0, BATCH_BYTES, self.block_bytes)
        ]
        self.offsets: list[NDArray[np.int64]] = [np.empty(0, np.int64)] * BATCHES
        self.blocks: list[list[BlockIdentity]] = [[]] * BATCHES
        self._prompts = 0

    def write(self, number: int) -> None:
        """Give a batch back, and write a new one into its slots."""
        place = number % BATCHES
        self.store.release(self.slot_size, self.offsets[place])
        self._prompts += 1
        tokens = np.arange(self.count * BLOCK_TOKENS, dtype=np.int32)
        tokens[0] = self._prompts
        self.blocks[place] = identities(self.namespace, tokens.tobytes())
        self.offsets[place] = self.store.allocate(self.slot_size, self.count)
        assert self.store.write(self.offsets[place], self.blocks[place], self.memory).stored.all()

    def read(self, number: int) -> None:
        """Read a batch."""
        place = number % BATCHES
        verdicts = self.store.read(self.offsets[place], self.blocks[place], self.memory)
        assert set(verdicts) == {"good"}

    def plain_write(self, number: int) -> None:
        """Write a batch with one call a block."""
        self._plain(os.pwritev, number)
        os.fdatasync(self._descriptor)

    def plain_read(self, number: int) -> None:
        """Read a batch with one call a block."""
        self._plain(os.preadv, number)

    def read_one(self, number: int) -> None:
        """Read one block."""
        place, index = number % BATCHES, number // BATCHES % self.count
        one = slice(index, index + 1)
        verdicts = self.store.read(
            self.offsets[place][one], self.blocks[place][one], self.memory[one]
        )
        assert verdicts == ["good"]

    def plain_read_one(self, number: int) -> None:
        """Read one block with one call."""
        place, index = number % BATCHES, number // BATCHES % self.count
        start = (place * self.count + index) * self.slot_size
        assert os.preadv(self._descriptor, [self.memory[index].data], start) == self.block_bytes

    def _plain(self, call: Callable[[int, list[memoryview], int], int], number: int) -> None:
        first = number % BATCHES * self.count

        def move(index: int) -> None:
            start = (first + index) * self.slot_size
            assert call(self._descriptor, [self.memory[index].data], start) == self.block_bytes

        list(self._threads.map(move, range(self.count)))

    def close(self) -> None:
        """Give the slots back."""
        for offsets in self.offsets:
            self.store.release(self.slot_size, offsets)
        self._threads.shutdown()


def moves(directory: Path, rounds: int) -> Iterator[Row]:
    """Reads and writes of every size."""
    room = BATCHES * BATCH_BYTES * 17 // 16  # payloads and headers
    options = DiskOptions(room + 64 * MIB, segment_bytes=256 * MIB, reserve_bytes=0)
    store = DiskStore(directory / "store", options, time.monotonic)
    try:
        with plain_file(directory / "plain", room, direct=store.is_direct) as descriptor:
            for size in LAYERS:
                sides = Sides(store, descriptor, size)
                timed(
                    BATCHES, sides.write, sides.plain_write
                )  # the first write to a place costs more
                times = timed(rounds, sides.write, sides.plain_write)
                yield from rows_of(f"disk_write_{size}", BATCH_BYTES, *times)
                times = timed(rounds, sides.read, sides.plain_read)
                yield from rows_of(f"disk_read_{size}", BATCH_BYTES, *times)
                times = timed(10 * rounds, sides.read_one, sides.plain_read_one)
                yield from rows_of(f"disk_read_one_{size}", sides.block_bytes, *times)
                sides.close()
    finally:
        store.close()


def open_pool(path: Path) -> kvstore.Pool:
    """Open a pool over ``path`` that writes every block, with room for twice those of a restart."""
    disk_bytes = 2 * RESTART_BLOCKS * slot_bytes_of(RESTARTED) + 128 * MIB
    return kvstore.open(
        dram=16 * MIB,
        disk=disk_bytes,
        disk_path=path,
        disk_reserve=0,
        disk_admission="always",
        disk_bytes_per_s=0,
        load="always",
    )


def prompt(number: int) -> NDArray[np.int32]:
    """Tokens of a prompt that shares no block with others, and one more."""
    tokens = np.arange(PROMPT_BLOCKS * BLOCK_TOKENS + 1, dtype=np.int32)
    tokens[0] = 1_000_000 + number
    return tokens


def write(pool: kvstore.Pool, number: int) -> None:
    """Store a prompt whose blocks have its number and theirs for bytes."""
    with pool.reserve(RESTARTED, prompt(number)) as reservation:
        for index, slot in zip(reservation.indices.tolist(), reservation.slots(), strict=True):
            slot.view(np.int64)[:] = number * PROMPT_BLOCKS + index
    pool.drain()


def read(pool: kvstore.Pool, number: int) -> None:
    """Have a prompt loaded, and compare its bytes."""
    with pool.acquire(RESTARTED, prompt(number), may_wait=True):
        pass
    pool.drain()
    with pool.acquire(RESTARTED, prompt(number)) as lease:
        assert lease.num_blocks == PROMPT_BLOCKS
        for index, slot in enumerate(lease.slots()):
            assert (slot.view(np.int64) == number * PROMPT_BLOCKS + index).all()


def keep_writing(path: str) -> None:
    """Write and forget prompts beside those that are there, until killed."""
    pool = open_pool(Path(path))
    print("ready", flush=True)
    first = number = RESTART_BLOCKS // PROMPT_BLOCKS
    while True:
        write(pool, number)
        if number % 50 == 49:
            for old in range(first, number):
                pool.evict(RESTARTED, prompt(old))
            first = number
        number += 1


def kill_a_writer(path: Path) -> None:
    """Have another process write to ``path``, and kill it while it does."""
    command = [
        sys.executable,
        "-c",
        f"from bench.disk import keep_writing; keep_writing({str(path)!r})",
    ]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as writer:
        assert writer.stdout is not None
        assert writer.stdout.readline() == b"ready\n"
        time.sleep(0.5)
        assert writer.poll() is None
        writer.kill()


def reopen(path: Path) -> float:
    """Seconds from before opening until the first hit; then look for every block."""
    prompts = RESTART_BLOCKS // PROMPT_BLOCKS
    start = time.perf_counter()
    with open_pool(path) as pool:
        read(pool, 0)
        seconds = time.perf_counter() - start
        width = RESTARTED.layout.block_tokens
        known = sum(pool.lookup(RESTARTED, prompt(number)) for number in range(prompts))
        assert known == RESTART_BLOCKS * width, f"{RESTART_BLOCKS - known // width} blocks are lost"
        for number in range(0, prompts, max(1, prompts // SAMPLE)):
            read(pool, number)
    return seconds


def restarts(directory: Path, rounds: int) -> Iterator[Row]:
    """Open a directory of 100,000 blocks again: after an orderly end, and after a kill."""
    path = directory / "restart"
    with open_pool(path) as pool:
        for number in range(RESTART_BLOCKS // PROMPT_BLOCKS):
            write(pool, number)
    orderly = [reopen(path) for _ in range(rounds)]
    killed = []
    for _ in range(rounds):
        kill_a_writer(path)
        killed.append(reopen(path))
    for case, times in (
        ("restart_100k_blocks", orderly),
        ("restart_100k_blocks_after_kill", killed),
    ):
        yield row(case, "first hit", float(np.median(times)), "s")
        yield row(case, "longest", max(times), "s")


def disk_rows(place: Path, rounds: int) -> tuple[list[Row], dict[str, object]]:
    """Measure the tier in ``place``; return the rows, and facts about the run."""
    kind = file_system(Path("/"), place)
    if kind in MEMORY_FILE_SYSTEMS:
        raise click.UsageError(f"{place} is on {kind}: give --directory on a real disk")
    with tempfile.TemporaryDirectory(prefix="kvstore-bench-", dir=place) as scratch:
        rows = [*moves(Path(scratch), rounds), *restarts(Path(scratch), max(3, rounds // 8))]
    return rows, {"tier": "disk", "file_system": kind, "rounds": rounds}
