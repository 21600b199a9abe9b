"""A daemon under many clients for a while: is it right, is it fair, and does anything stay behind.

A real ``kvstore serve``, so small that blocks are evicted all the time; client processes that store,
load and compare at random (:mod:`kvstore.testing.worker`). Ends with 1 when a byte was wrong, or when
something is left of the clients once they are gone.
"""

from __future__ import annotations

import multiprocessing
import os
import re
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import click
import numpy as np

import kvstore
from bench.report import Row, report, row
from bench.store import daemon
from kvstore.cli.table import output_option
from kvstore.testing.worker import FIELDS, LAYOUT, new_tally, read_tally, work
from kvstore.tiers.arena import slot_bytes

if TYPE_CHECKING:
    from collections.abc import Iterator
    from multiprocessing.connection import Connection
    from multiprocessing.process import BaseProcess

    from numpy.typing import NDArray

    from kvstore.client.blocking import Client

DRAM_BYTES = 8 << 20
"""A fifth of what the clients would store."""
DEADLINE_S = 5.0
PATIENCE_S = 30.0
WARM_UP = 0.25
"""Part of the time after which the daemon's memory should grow no more."""
GROWTH_BYTES = 32 << 20
LEAKS = {
    "held_blocks": "blocks",
    "leases": "leases",
    "reservations": "reservations",
    "slots": "slots",
    "clients": "clients",
    "descriptors": "descriptors",
    "mappings": "processes",
    "grown_bytes": "bytes",
}
"""What may be left when the clients have gone, and in which unit."""

Latencies = dict[str, "NDArray[np.float64]"]
"""Seconds of each call, by its name."""


@dataclass(frozen=True)
class Soaked:
    """What came of a run."""

    tallies: list[dict[str, int]]
    """Counts of each client, by the names of :data:`kvstore.testing.worker.FIELDS`."""
    latencies_s: list[Latencies]
    """Of each client."""
    leaks: dict[str, int]
    """What is left, by the names of ``LEAKS``; of the memory, what is beyond ``GROWTH_BYTES``."""
    grown_bytes: int
    """Memory of the daemon's own, without the arena, that it took after the warm-up."""
    evicted_blocks: int

    @property
    def is_good(self) -> bool:
        """Whether every byte was right, and nothing is left."""
        return not any(tally["wrong_blocks"] for tally in self.tallies) and not any(
            self.leaks.values()
        )


def soak(directory: Path, seconds: float, num_clients: int, seed: int) -> Soaked:
    """Run ``num_clients`` processes against a daemon for so long; files go to ``directory``."""
    with (
        daemon(directory, DRAM_BYTES) as url,
        kvstore.connect(url, on_failure="raise", deadline_s=PATIENCE_S) as store,
    ):
        pid = store.status().pid
        num_descriptors = _num_descriptors(pid)
        clients = [_Client(url, directory / f"client-{n}", seed + n) for n in range(num_clients)]
        try:
            _wait_until_all_work(clients)
            time.sleep(WARM_UP * seconds)
            warm_bytes = _memory_bytes(pid)
            time.sleep((1 - WARM_UP) * seconds)
            latencies_s = [client.end() for client in clients]
        finally:
            for client in clients:
                client.kill()
        leaks = _leaks(store, pid)
        leaks["descriptors"] = _num_descriptors(pid) - num_descriptors
        grown_bytes = _memory_bytes(pid) - warm_bytes
        leaks["grown_bytes"] = max(0, grown_bytes - GROWTH_BYTES)
        evicted = store.stats().counts["evicted_blocks", "dram", "capacity"]
    return Soaked(
        [read_tally(client.tally) for client in clients],
        latencies_s,
        leaks,
        grown_bytes,
        evicted,
    )


def rows(soaked: Soaked) -> Iterator[Row]:
    """Yield the latencies of each call, how far clients are apart, and what is left."""
    for name in sorted({name for latencies in soaked.latencies_s for name in latencies}):
        each = [latencies[name] for latencies in soaked.latencies_s if name in latencies]
        together = np.concatenate(each)
        p99 = [float(np.quantile(seconds, 0.99)) for seconds in each]
        yield row(name, "p50", float(np.quantile(together, 0.5)) * 1e3, "ms")
        yield row(name, "p99", float(np.quantile(together, 0.99)) * 1e3, "ms")
        yield row(name, "max", float(together.max()) * 1e3, "ms")
        yield row(name, "p99_spread", max(p99) / min(p99), "x")
    calls = [tally["calls"] for tally in soaked.tallies]
    yield row("clients", "least_share", min(calls) / float(np.median(calls)), "x")
    for field in FIELDS:
        yield row("total", field, sum(tally[field] for tally in soaked.tallies), "")
    yield row("total", "evicted_blocks", soaked.evicted_blocks, "")
    yield row("daemon", "grown_bytes", soaked.grown_bytes, "bytes")
    for name, unit in LEAKS.items():
        yield row("leak", name, soaked.leaks[name], unit)


class _Client:
    """A process that works until it is told to end."""

    def __init__(self, url: str, path: Path, seed: int) -> None:
        self.tally = path.with_suffix(".tally")
        self._latencies = path.with_suffix(".npz")
        new_tally(self.tally)
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["kvstore.testing.worker", "kvstore.client.blocking"])
        self._pipe, there = context.Pipe()
        self._process: BaseProcess = context.Process(
            target=_run, args=(there, url, self.tally, self._latencies, seed)
        )
        self._process.start()
        there.close()

    def end(self) -> Latencies:
        """Tell it to end, and wait for that; return what its calls took."""
        self._pipe.close()
        self._process.join(PATIENCE_S)
        if self._process.exitcode != 0:
            raise click.ClickException(f"a client ended with {self._process.exitcode}")
        with np.load(self._latencies, allow_pickle=False) as file:
            return {name: file[name] for name in file.files}

    def kill(self) -> None:
        """End it whatever it does."""
        self._pipe.close()
        self._process.kill()
        self._process.join()


def _run(pipe: Connection, url: str, tally: Path, latencies: Path, seed: int) -> None:
    """Be a client until the other end of ``pipe`` is closed."""
    seconds: dict[str, list[float]] = {}
    work(url, tally, seed, stop=pipe.poll, deadline_s=DEADLINE_S, latencies_s=seconds)
    np.savez(latencies, allow_pickle=False, **{name: np.array(s) for name, s in seconds.items()})


def _wait_until_all_work(clients: list[_Client]) -> None:
    stop = time.monotonic() + PATIENCE_S
    while not all(read_tally(client.tally)["calls"] for client in clients):
        if time.monotonic() > stop:
            raise click.ClickException("the clients did not begin to work")
        time.sleep(0.02)


def _leaks(store: Client, pid: int) -> dict[str, int]:
    """What is left once the daemon has noticed that the others have gone."""
    stop = time.monotonic() + PATIENCE_S
    while (status := store.status()).num_clients > 1 and time.monotonic() < stop:
        time.sleep(0.02)
    store.drain()
    pool = store.stats()
    used_slots = pool.tiers[0].used_bytes // slot_bytes(LAYOUT.block_bytes)
    return {
        "clients": status.num_clients - 1,
        "held_blocks": pool.held_blocks,
        "leases": pool.num_leases,
        "reservations": pool.num_reservations,
        "slots": used_slots - pool.num_blocks,
        "mappings": len(_mapping(pid) - {pid, os.getpid()}),
    }


def _mapping(pid: int) -> set[int]:
    """Return the processes that map the arena of the daemon ``pid``."""
    name = r"(\S+ \d+) +/memfd:kvstore-dram"
    arena = re.search(name, Path(f"/proc/{pid}/maps").read_text())
    assert arena is not None, "the daemon maps its arena"
    found = set()
    for maps in Path("/proc").glob("[0-9]*/maps"):
        try:
            if arena[1] in re.findall(name, maps.read_text()):
                found.add(int(maps.parent.name))
        except OSError:  # it has ended
            continue
    return found


def _num_descriptors(pid: int) -> int:
    return len(list(Path(f"/proc/{pid}/fd").iterdir()))


def _memory_bytes(pid: int) -> int:
    """Memory of a process that is its own."""
    own = re.search(r"RssAnon:\s*(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    assert own is not None
    return int(own[1]) << 10


@click.command()
@click.option("--seconds", default=60.0, show_default=True, help="For how long the clients work.")
@click.option("--clients", default=8, show_default=True, help="Client processes.")
@click.option("--seed", default=1, show_default=True, help="Decides what they do.")
@output_option
def main(seconds: float, clients: int, seed: int, output: str) -> None:
    """Put a real daemon under load; ends with 1 on a wrong byte or a leak."""
    with tempfile.TemporaryDirectory(prefix="kvstore-soak-") as directory:
        soaked = soak(Path(directory), seconds, clients, seed)
    report("soak", rows(soaked), output, seconds=seconds, clients=clients, dram_bytes=DRAM_BYTES)
    if not soaked.is_good:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
