"""Daemons with a disk tier that end, are killed and start again: nothing lost, nothing wrong, nothing leaked.

``DISK_ROUNDS`` and ``DISK_SEED`` choose how many kills and which; a failure names both. The daemons are
forked from a process that has imported everything (:func:`nursery`), so that a round takes no longer than
the daemon itself.
"""

import json
import os
import random
import signal
import sqlite3
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from contextlib import closing, suppress
from importlib import import_module
from pathlib import Path

import numpy as np
import pytest

import kvstore
from kvstore.cli.main import build
from kvstore.errors import KVStoreError, LeaseExpiredError
from kvstore.namespace import KVLayout, Namespace
from kvstore.testing import pattern
from kvstore.tiers.disk import slot_bytes_of

ROUNDS = int(os.environ.get("DISK_ROUNDS", "50"))
SEED = int(os.environ.get("DISK_SEED", "1"))
CLIENTS = 2
LAYOUT = KVLayout(num_layers=8, num_kv_heads=2, head_dim=64, dtype="float32", block_tokens=4)
"""Blocks of 32 KiB."""
SPACES = tuple(Namespace(b"weights", LAYOUT, salt=salt) for salt in ("one", "two"))
SLOT = slot_bytes_of(SPACES[0])
SHARED_BLOCKS = 2
CONVERSATIONS = 16
MOST_BLOCKS = 24
AMPLE, TIGHT = 64 << 20, 16 << 20
"""Disks that hold all conversations, and a part of them; memory holds less than either."""
DRAM_BYTES = 6 << 20


def nursery():
    """Fork a ``kvstore`` for each line (JSON: settings, arguments); say its process id, and how it ended."""
    import_module("kvstore.cli.serve")  # so that no child needs to
    for line in sys.stdin:
        settings, arguments = json.loads(line)
        child = os.fork()
        if not child:
            os.dup2(1, 2)
            os.environ |= settings
            sys.argv = ["kvstore", *arguments]
            build([])(prog_name="kvstore")
        os.write(1, f"pid {child}\n".encode())
        _, status = os.waitpid(child, 0)
        os.write(1, f"ended {os.waitstatus_to_exitcode(status)}\n".encode())


class Nursery:
    """Daemons, one after the other."""

    def __init__(self, directory):
        self.directory = directory
        self.tier = directory / "tier"
        self.url = f"unix://{directory / 's'}"
        settings = {
            "KVSTORE_DISK_RESERVE": "0",
            "KVSTORE_DISK_BYTES_PER_S": "0",
            "KVSTORE_LOAD": "always",
            "KVSTORE_MAX_MOVES": "500",
            "KVSTORE_PREFAULT": "false",
        }
        self.process = subprocess.Popen(
            [sys.executable, __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | settings | {"PYTHONPATH": str(Path(__file__).parents[2])},
        )
        self.pid, self.lines = 0, []

    def start(self, disk_bytes, admission="always"):
        """Run a daemon until it is ready; returns what it has said."""
        arguments = ["serve", "--socket", str(self.directory / "s"), "--dram", str(DRAM_BYTES)]
        arguments += [
            "--disk",
            str(disk_bytes),
            "--disk-path",
            str(self.tier),
            "--block-tokens",
            "4",
        ]
        settings = {"KVSTORE_DISK_ADMISSION": admission}
        self.process.stdin.write(json.dumps([settings, arguments]) + "\n")
        self.process.stdin.flush()
        self.lines = []
        while not self.lines or not self.lines[-1].startswith(("ready", "ended")):
            self.lines.append(self.process.stdout.readline())
            if self.lines[-1].startswith("pid "):
                self.pid = int(self.lines[-1].split()[1])
        assert self.lines[-1].startswith("ready"), self.lines
        return self.lines

    def end(self, number=signal.SIGTERM):
        """Send a signal, and return how the daemon ended."""
        os.kill(self.pid, number)
        while not self.lines[-1].startswith("ended"):
            self.lines.append(self.process.stdout.readline())
        self.pid = 0
        return int(self.lines[-1].split()[1])

    def num_bytes(self):
        """What the directory takes on the device."""
        total = 0
        for file in self.tier.iterdir():
            with suppress(FileNotFoundError):  # the trial of direct I/O is there for a moment only
                total += file.stat().st_blocks * 512
        return total

    def close(self):
        if self.pid:
            self.end(signal.SIGKILL)
        self.process.stdin.close()
        self.process.stdout.close()
        self.process.wait(10)


@pytest.fixture
def daemons():
    with tempfile.TemporaryDirectory(prefix="kvstore-restart-", dir="/var/tmp") as directory:
        nursery = Nursery(Path(directory))
        yield nursery
        nursery.close()


def tokens_of(conversation, num_blocks):
    """Tokens of the first blocks of a conversation, and one more; all begin alike."""
    own = [10 + conversation] * (4 * (num_blocks - SHARED_BLOCKS))
    return np.array([7] * (4 * SHARED_BLOCKS) + own + [3], np.int32)


def save(store, space, tokens):
    """Store what is missing of a prompt; return how many of its blocks are known then."""
    key = tokens.astype("<i4").tobytes()
    with store.reserve(space, tokens) as reservation:
        for index, slot in zip(reservation.indices.tolist(), reservation.slots(), strict=True):
            slot[:] = pattern(space, key[: (index + 1) * space.key_bytes])
    return store.lookup(space, tokens) // 4


def load(store, space, tokens, *, may_wait=False):
    """Copy what memory has of a prompt and compare it; return numbers of right and of wrong blocks."""
    lease = store.acquire(space, tokens, may_wait=may_wait)
    copies = [np.array(slot) for slot in lease.slots()]
    try:
        store.release(lease)
    except LeaseExpiredError:
        return 0, 0
    key = tokens.astype("<i4").tobytes()
    right = [
        np.array_equal(copy, pattern(space, key[: (index + 1) * space.key_bytes]))
        for index, copy in enumerate(copies)
    ]
    return sum(right), len(right) - sum(right)


def load_all(store, space, tokens):
    """As :func:`load`, once all of it that is on disk has come."""
    load(store, space, tokens, may_wait=True)
    store.drain()
    return load(store, space, tokens)


def everything(store):
    """Blocks of each conversation that the store offers, by space and conversation."""
    return {
        (space, conversation): store.lookup(SPACES[space], tokens_of(conversation, MOST_BLOCKS))
        // 4
        for space in range(len(SPACES))
        for conversation in range(CONVERSATIONS)
    }


def num_distinct(offered):
    """Blocks that ``offered`` has, those that all conversations of a space share counted once."""
    shared = [0] * len(SPACES)
    for (space, _), blocks in offered.items():
        shared[space] = max(shared[space], min(blocks, SHARED_BLOCKS))
    return sum(shared) + sum(max(0, blocks - SHARED_BLOCKS) for blocks in offered.values())


class Worker(threading.Thread):
    """A client that stores, loads and compares until its daemon is gone."""

    def __init__(self, url, seed, *, evicts):
        super().__init__(name=f"client {seed}")
        self.url, self.evicts = url, evicts
        self.random = random.Random(seed)
        self.counts, self.durable = Counter(), {}
        self.start()

    def run(self):
        with kvstore.connect(self.url, deadline_s=5) as store, suppress(KVStoreError):
            while True:
                self.step(store)
                counts = store.stats().counts  # raises once the daemon is gone
                self.counts["gone"] = counts.get(("evicted_blocks", "disk", "capacity"), 0)

    def step(self, store):
        """Store or load a prompt; now and then make sure that one is on disk, or forget one."""
        space, conversation = (
            self.random.randrange(len(SPACES)),
            self.random.randrange(CONVERSATIONS),
        )
        tokens = tokens_of(conversation, self.random.randint(SHARED_BLOCKS + 1, MOST_BLOCKS))
        chance = self.random.random()
        if chance < 0.5:
            known = save(store, SPACES[space], tokens)
            self.counts["saved"] += 1
            if chance < 0.15:
                self.note_durable(store, (space, conversation), known)
        elif chance < 0.505 and self.evicts:  # and all of its space, as all begin alike
            store.evict(SPACES[space], tokens)
        else:
            loads = load_all if chance < 0.75 else load
            right, wrong = loads(store, SPACES[space], tokens)
            self.counts["right"] += right
            self.counts["wrong"] += wrong

    def note_durable(self, store, what, known):
        """Note ``known`` blocks as durable, if the daemon says that every block went to disk."""
        store.drain()
        counts = store.stats().counts
        missed = [key for key in counts if key[0] == "unstored_blocks"]
        missed.append(("failed_moves", "dram", "disk"))
        if not sum(counts.get(key, 0) for key in missed):
            self.durable[what] = max(known, self.durable.get(what, 0))


class TestKills:
    """What a daemon leaves when it is killed at a random moment, again and again."""

    @pytest.mark.timeout(300)
    @pytest.mark.parametrize(
        ("disk_bytes", "admission", "share"),
        [(AMPLE, "always", 0.6), (TIGHT, "always", 0.2), (TIGHT, "value", 0.2)],
    )
    def test_kills(self, daemons, disk_bytes, admission, share):
        seeds, durable, counts = random.Random(SEED), {}, Counter()
        for number in range(round(ROUNDS * share)):
            daemons.start(disk_bytes, admission)
            offered = self.examine(daemons.url, seeds, f"seed {SEED}, round {number}")
            lost = {
                what: blocks for what, blocks in durable.items() if offered.get(what, 0) < blocks
            }
            assert not lost, f"seed {SEED}, round {number}"
            if disk_bytes == AMPLE and seeds.random() < 0.5:
                self.forget(daemons.url, space := seeds.randrange(len(SPACES)))
                durable = {what: blocks for what, blocks in durable.items() if what[0] != space}
            workers = [
                Worker(daemons.url, seeds.getrandbits(32), evicts=disk_bytes == TIGHT)
                for _ in range(CLIENTS)
            ]
            until = time.monotonic() + seeds.uniform(0.02, 0.5)
            while time.monotonic() < until:
                assert daemons.num_bytes() <= disk_bytes
                time.sleep(0.01)
            assert daemons.end(signal.SIGKILL) == -signal.SIGKILL
            for worker in workers:
                worker.join(20)
                assert not worker.is_alive()
                counts.update(worker.counts)
                for what, blocks in worker.durable.items() if disk_bytes == AMPLE else ():
                    durable[what] = max(blocks, durable.get(what, 0))
                    counts["durable"] += blocks
            assert daemons.num_bytes() <= disk_bytes
        print({"seed": SEED, **counts})
        assert counts["wrong"] == 0
        assert counts["right"] > 20 * share * ROUNDS, "hardly anything was loaded"
        assert counts["saved"] > share * ROUNDS, "hardly anything was stored"
        pressed = "gone" if disk_bytes == TIGHT else "durable"
        assert admission == "value" or counts[pressed] > 10 * share * ROUNDS
        daemons.start(disk_bytes)
        self.examine(daemons.url, seeds, "the end")
        assert daemons.end() == 0

    def forget(self, url, space):
        """Make room for new writes: all of a space goes, as its prompts begin alike."""
        with kvstore.connect(url, deadline_s=10, on_failure="raise") as store:
            store.evict(SPACES[space], tokens_of(0, MOST_BLOCKS))
            store.drain()

    def examine(self, url, seeds, when):
        """Compare what a fresh daemon offers with what it says of its disk; load one conversation."""
        with kvstore.connect(url, deadline_s=10, on_failure="raise") as store:
            offered = everything(store)
            stats = store.stats()
            distinct = num_distinct(offered)
            assert stats.num_blocks == stats.tiers[1].num_blocks == distinct, when
            assert stats.tiers[1].used_bytes == distinct * SLOT, when
            space, conversation = what = seeds.choice([*offered])
            tokens = tokens_of(conversation, MOST_BLOCKS)
            assert load_all(store, SPACES[space], tokens) == (offered[what], 0), when
        return offered


class TestRestart:
    @pytest.mark.parametrize(
        ("number", "admission"),
        [(signal.SIGTERM, "always"), (signal.SIGTERM, "value"), (signal.SIGKILL, "always")],
    )
    def test_the_same_hits_and_the_right_bytes(self, daemons, number, admission):
        first = daemons.start(AMPLE, admission)
        assert any("0 blocks found" in line for line in first)
        with kvstore.connect(daemons.url, deadline_s=10, on_failure="raise") as store:
            for conversation in range(6):
                assert save(store, SPACES[0], tokens_of(conversation, MOST_BLOCKS)) == MOST_BLOCKS
            before = everything(store)
            if number == signal.SIGKILL:
                store.drain()
                moved = store.stats().counts["moved_blocks", "dram", "disk"]
                assert moved == num_distinct(before)
        assert daemons.end(number) == (0 if number == signal.SIGTERM else -number)
        second = daemons.start(AMPLE)
        assert any(f"{num_distinct(before)} blocks found" in line for line in second)
        with kvstore.connect(daemons.url, deadline_s=10, on_failure="raise") as store:
            assert everything(store) == before
            for conversation in range(6):
                tokens = tokens_of(conversation, MOST_BLOCKS)
                assert load_all(store, SPACES[0], tokens) == (MOST_BLOCKS, 0)

    def test_a_second_daemon_is_refused_the_directory(self, daemons):
        daemons.start(AMPLE)
        command = [sys.executable, "-m", "kvstore", "serve", "--dram=1MiB", "--disk=64MiB"]
        command += [f"--socket={daemons.directory / 'other'}", f"--disk-path={daemons.tier}"]
        done = subprocess.run(command, stderr=subprocess.PIPE, text=True, check=False)
        assert done.returncode == 3
        assert "is used by another kvstore" in done.stderr

    @pytest.mark.parametrize(
        "other",
        [
            Namespace(b"new weights", LAYOUT, salt="one"),
            Namespace(b"weights", KVLayout(16, 2, 64, "float16", 4), salt="one"),
            Namespace(b"weights", LAYOUT, tenant="else", salt="one"),
        ],
    )
    def test_another_model_is_offered_nothing_and_takes_the_room(self, daemons, other):
        daemons.start(TIGHT)
        with kvstore.connect(daemons.url, deadline_s=10, on_failure="raise") as store:
            for conversation in range(4):
                save(store, SPACES[0], tokens_of(conversation, MOST_BLOCKS))
        daemons.end()
        daemons.start(TIGHT)
        with kvstore.connect(daemons.url, deadline_s=10, on_failure="raise") as store:
            old = tokens_of(0, MOST_BLOCKS)
            assert store.lookup(SPACES[0], old) == 4 * MOST_BLOCKS
            assert store.lookup(other, old) == 0
            for conversation in range(CONVERSATIONS):
                save(store, other, tokens_of(conversation, MOST_BLOCKS))
                store.drain()
            assert store.lookup(SPACES[0], old) == 0, "the least recently used ones go first"
            assert store.stats().tiers[1].used_bytes <= store.stats().tiers[1].capacity_bytes
            newest = tokens_of(CONVERSATIONS - 1, MOST_BLOCKS)
            key = newest.astype("<i4").tobytes()
            with store.acquire(other, newest) as lease:
                assert lease.num_blocks == MOST_BLOCKS
                for index, slot in enumerate(lease.slots()):
                    right = pattern(other, key[: (index + 1) * other.key_bytes])
                    assert np.array_equal(slot, right)

    def test_another_format_starts_empty_and_takes_the_room(self, daemons):
        daemons.start(TIGHT)
        with kvstore.connect(daemons.url, deadline_s=10, on_failure="raise") as store:
            save(store, SPACES[0], tokens_of(0, MOST_BLOCKS))
        daemons.end()
        with closing(sqlite3.connect(daemons.tier / "manifest.db")) as manifest, manifest:
            manifest.execute("UPDATE facts SET value = value + 1 WHERE name = 'version'")
        said = daemons.start(TIGHT)
        assert any("starting empty" in line for line in said)
        with kvstore.connect(daemons.url, deadline_s=10, on_failure="raise") as store:
            assert store.stats().tiers[1].used_bytes == 0
            assert store.lookup(SPACES[0], tokens_of(0, MOST_BLOCKS)) == 0
            assert save(store, SPACES[0], tokens_of(1, MOST_BLOCKS)) == MOST_BLOCKS
            store.drain()
            assert store.stats().tiers[1].num_blocks == MOST_BLOCKS
        assert daemons.num_bytes() <= TIGHT


if __name__ == "__main__":
    nursery()
