"""Processes killed at random, seeded: no wrong byte, no call beyond its deadline, no slot lost.

``CHAOS_ROUNDS`` and ``CHAOS_SEED`` choose how long and which; a failure names both.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest

import kvstore
from kvstore.errors import UnavailableError
from kvstore.testing.worker import FIELDS, new_tally, read_tally, work

ROUNDS = int(os.environ.get("CHAOS_ROUNDS", "200"))
SEED = int(os.environ.get("CHAOS_SEED", "1"))
CLIENTS = 3
DRAM_BYTES = 16 << 20
DEADLINE_S = 1.0
KILL_RATE = 2e-4
"""At each point where a client may kill itself: one in some seconds does."""


def run_client(url, tally, seed):
    parent = os.getppid()
    work(
        url,
        tally,
        seed,
        stop=lambda: os.getppid() != parent,
        kill_rate=KILL_RATE,
        dawdle_rate=0.05,
        deadline_s=DEADLINE_S,
    )


class Daemon:
    """A ``kvstore serve`` that is started again after each kill."""

    def __init__(self, directory):
        self.path = directory / "kvstore.sock"
        self.url = f"unix://{self.path}"
        self.log = (directory / "daemon.log").open("wb")
        self.start()

    def start(self):
        self.process = subprocess.Popen(
            [sys.executable, "-m", "kvstore", "serve", "--socket", str(self.path),
             "--dram", str(DRAM_BYTES), "--lease-timeout", "5"],
            stderr=self.log,
        )  # fmt: skip

    def kill(self):
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()

    def stop(self):
        self.process.terminate()
        code = self.process.wait(20)
        self.log.close()
        return code


class Clients:
    """Processes that work until they are killed, by others or by themselves."""

    def __init__(self, url, directory):
        self.url, self.directory = url, directory
        self.context = multiprocessing.get_context("forkserver")
        self.context.set_forkserver_preload(["kvstore.testing.worker", "kvstore.client.blocking"])
        self.tallies, self.processes, self.own_kills = [], [], 0

    def start(self, index, seed):
        tally = self.directory / f"tally-{len(self.tallies)}"
        new_tally(tally)
        self.tallies.append(tally)
        process = self.context.Process(target=run_client, args=(self.url, tally, seed))
        process.start()
        if index == len(self.processes):
            self.processes.append(process)
        else:
            self.processes[index] = process

    def kill(self, index):
        self.processes[index].kill()
        self.processes[index].join()
        self.processes[index].close()

    def end(self):
        """Kill them all, for good."""
        for index in range(len(self.processes)):
            self.kill(index)
        self.processes.clear()

    def revive(self, seeds):
        """Start those again that killed themselves; any other end is a failure."""
        for index, process in enumerate(self.processes):
            if process.exitcode is not None:
                assert process.exitcode == -signal.SIGKILL, f"a client ended: {process.exitcode}"
                process.close()
                self.own_kills += 1
                self.start(index, seeds.getrandbits(32))

    def totals(self):
        total = Counter()
        for tally in self.tallies:
            total.update(read_tally(tally))
        return {field: total[field] for field in FIELDS}


@pytest.fixture
def model_process(tmp_path):
    """A Transformers process whose requests must all give the right text."""
    pytest.importorskip("transformers")
    report = tmp_path / "model.json"
    script = Path(__file__).parent / "chaos_model.py"
    process = subprocess.Popen(
        [sys.executable, str(script), f"unix://{tmp_path / 'kvstore.sock'}", str(report)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert process.stdout.readline() == b"ready\n"
    yield process, report
    if process.poll() is None:
        process.kill()
    process.wait()
    process.stdin.close()
    process.stdout.close()


@pytest.mark.timeout(900)
def test_kills(tmp_path, model_process):
    seeds = random.Random(SEED)
    daemon = Daemon(tmp_path)
    clients = Clients(daemon.url, tmp_path)
    kills = Counter()
    for index in range(CLIENTS):
        clients.start(index, seeds.getrandbits(32))
    try:
        with kvstore.connect(daemon.url, deadline_s=10) as watching:
            for _ in range(ROUNDS):
                time.sleep(seeds.uniform(0.05, 0.6))
                if seeds.random() < 0.25:
                    daemon.kill()
                    daemon.start()
                    kills["daemon"] += 1
                else:
                    index = seeds.randrange(CLIENTS)
                    clients.kill(index)
                    clients.start(index, seeds.getrandbits(32))
                    kills["client"] += 1
                clients.revive(seeds)
            model, report = model_process
            model.communicate(b"stop\n", timeout=120)
            clients.end()
            stats = settled(watching)
            watching.clear()
            empty = watching.stats()
        told = json.loads(report.read_text())
        totals = clients.totals()
        print({"seed": SEED, **kills, "own_kills": clients.own_kills, **totals, "model": told})
        assert totals["wrong_blocks"] == 0
        assert totals["late_calls"] == 0
        assert totals["loaded_blocks"] > ROUNDS, "hardly anything was loaded"
        assert totals["stored_blocks"] > ROUNDS, "hardly anything was stored"
        assert kills["daemon"] > ROUNDS // 10
        assert kills["client"] > ROUNDS // 2
        assert (stats.held_blocks, stats.num_leases, stats.num_reservations) == (0, 0, 0)
        assert (empty.num_blocks, empty.tiers[0].used_bytes) == (0, 0), "no slot is lost"
        assert told["failed"] == 0
        assert told["different"] == 0
        assert told["requests"] > 10
        assert told["hits"] > 0
    finally:
        clients.end()
        code = daemon.stop()
    assert code == 0


def settled(store):
    """Return the daemon's statistics once nothing is held any more."""
    deadline = time.monotonic() + 20
    while True:
        try:
            stats = store.stats()
            if stats.held_blocks == 0 or time.monotonic() > deadline:
                return stats
        except UnavailableError:
            assert time.monotonic() < deadline
        time.sleep(0.05)
