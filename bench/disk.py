"""The disk tier beside plain calls: the same threads, alignment, file system and bytes, in one run.

The limit of a read or write is a loop of ``preadv`` or ``pwritev`` past the page cache, one call a block,
on as many threads, into a file allocated in the same directory; writes end with ``fdatasync`` on both
sides. The store adds headers, checksums, the check of both, and the rows of its manifest.
"""

from __future__ import annotations

import os
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import click
import numpy as np

from bench.report import Row, report, row
from kvstore.cli.table import output_option
from kvstore.namespace import KVLayout, Namespace
from kvstore.tiers.disk import DiskOptions, DiskStore, identities, slot_bytes_of
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
MEMORY_FILE_SYSTEMS = ("tmpfs", "ramfs", "devtmpfs")


def file_system(path: Path) -> str:
    """Type of the file system that ``path`` is on."""
    best, kind = "", "unknown"
    for line in Path("/proc/mounts").read_text().splitlines():
        _, place, found, *_ = line.split()
        inside = path.resolve().is_relative_to(place)
        if inside and len(place) >= len(best):
            best, kind = place, found
    return kind


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
        self.blocks[place] = list(identities(self.namespace, tokens.tobytes()))
        self.offsets[place] = self.store.allocate(self.slot_size, self.count)
        assert self.store.write(self.offsets[place], self.blocks[place], self.memory).all()

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


def restart(directory: Path, rounds: int) -> Iterator[Row]:
    """Open a directory with 100,000 blocks of 4 KiB, until the paths of its prompts are known."""
    namespace = Namespace(b"bench restart", KVLayout(1, 1, 64, "bfloat16", BLOCK_TOKENS))
    size = slot_bytes_of(namespace)
    options = DiskOptions(
        RESTART_BLOCKS * size + 64 * MIB, reserve_bytes=0, manifest_bytes=40 * MIB, threads=2
    )
    path = directory / "restart"
    store = DiskStore(path, options, time.monotonic)
    payload = Region(namespace.layout.block_bytes).array()
    rng = np.random.default_rng(1)
    for _ in range(RESTART_BLOCKS // PROMPT_BLOCKS // 2):
        blocks: list[BlockIdentity] = []
        for _ in range(2):
            tokens = rng.integers(0, 50_000, PROMPT_BLOCKS * BLOCK_TOKENS, dtype=np.int32)
            blocks += identities(namespace, tokens.tobytes())
        offsets = store.allocate(size, len(blocks))
        assert store.write(offsets, blocks, [payload] * len(blocks)).all()
    store.close()
    opened, linked = [], []
    for _ in range(rounds):
        start = time.perf_counter()
        store = DiskStore(path, options, time.monotonic)
        found = store.recover()
        opened.append(time.perf_counter() - start)
        assert sum(len(list(each.prompts())) for each in found) == RESTART_BLOCKS // PROMPT_BLOCKS
        linked.append(time.perf_counter() - start)
        assert sum(map(len, found)) == RESTART_BLOCKS
        store.close()
    yield row("restart_100k_blocks", "open", float(np.median(opened)), "s")
    yield row("restart_100k_blocks", "prompts_known", float(np.median(linked)), "s")


@click.command()
@click.option(
    "--directory",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    default="/var/tmp",
    show_default=True,
    help="On the file system to measure; 2 GiB are used there for a while.",
)
@click.option("--rounds", default=24, show_default=True, help="Batches of 64 MiB of each side.")
@output_option
def main(directory: Path, rounds: int, output: str) -> None:
    """Measure the disk tier."""
    kind = file_system(directory)
    if kind in MEMORY_FILE_SYSTEMS:
        raise click.UsageError(f"{directory} is on {kind}: give --directory on a real disk")
    with tempfile.TemporaryDirectory(prefix="kvstore-bench-", dir=directory) as scratch:
        rows = [*moves(Path(scratch), rounds), *restart(Path(scratch), max(3, rounds // 8))]
    report("disk", rows, output, file_system=kind, rounds=rounds)


if __name__ == "__main__":
    main()
