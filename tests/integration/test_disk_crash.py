"""A process that writes to the disk tier is killed at any moment; what it reported as stored is there."""

import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np

from kvstore.namespace import KVLayout, Namespace
from kvstore.testing import FakeClock, pattern
from kvstore.testing.disk import identities
from kvstore.tiers.disk import DiskOptions, DiskStore, slot_bytes_of

ROUNDS = 60
OPTIONS = DiskOptions(
    8 << 20, segment_bytes=(1 << 20) + 4096, reserve_bytes=0, manifest_bytes=1 << 20, threads=2
)
NAMESPACES = (
    Namespace(b"small", KVLayout(1, 1, 8, "float16", 4)),
    Namespace(b"large", KVLayout(3, 5, 33, "float32", 16), tenant="t"),
)


def say(word, blocks):
    """Tell the test about blocks, in one piece."""
    os.write(1, " ".join([word, *(block.digest.hex() for block in blocks)]).encode() + b"\n")


def work(path, seed):
    """Write new prompts for ever; when there is no more room, release blocks from the ends of old ones."""
    rng = np.random.default_rng(seed)
    store = DiskStore(Path(path), OPTIONS, time.monotonic)
    held = [
        ([found.identity(at) for at in fresh.tolist()], found.offsets[fresh])
        for found in store.recover()
        for _, fresh in found.prompts()
    ]
    os.write(1, b"ready\n")
    while True:
        namespace = NAMESPACES[int(rng.integers(2))]
        tokens = rng.integers(
            0, 1 << 30, int(rng.integers(1, 13)) * namespace.layout.block_tokens, dtype=np.int32
        )
        key = tokens.tobytes()
        blocks, stride = identities(namespace, key), namespace.key_bytes
        offsets = store.allocate(slot_bytes_of(namespace), len(blocks))
        while len(offsets) < len(blocks) or rng.random() < 0.1:
            if not held:
                break
            old, places = held.pop(int(rng.integers(len(held))))
            keep = int(rng.integers(len(old)))
            say("-", old[keep:])
            store.release(slot_bytes_of(old[0].namespace), places[keep:])
            if keep:
                held.append((old[:keep], places[:keep]))
            more = store.allocate(slot_bytes_of(namespace), len(blocks) - len(offsets))
            offsets = np.concatenate([offsets, more])
        blocks = blocks[: len(offsets)]
        payloads = [
            pattern(namespace, key[: (at + 1) * stride]).copy() for at in range(len(blocks))
        ]
        stored, _ = store.write(offsets, blocks, payloads)
        assert stored.all(), store.off
        say("+", blocks)
        held.append((blocks, offsets))


def nursery():
    """Fork a worker for each line ``PATH SEED``, and say when it has ended."""
    for line in sys.stdin:
        path, seed = line.split()
        worker = os.fork()
        if not worker:
            work(path, int(seed))
        os.write(1, f"pid {worker}\n".encode())
        os.waitpid(worker, 0)
        os.write(1, b"ended\n")


class Victim:
    """Workers in processes of their own, one after the other."""

    def __init__(self):
        command = [sys.executable, __file__]
        environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment
        )
        self._left = b""

    def lines(self):
        """What the worker says, until it has ended."""
        while True:
            *lines, self._left = (self._left + os.read(self.process.stdout.fileno(), 65536)).split(
                b"\n"
            )
            for line in lines:
                if line == b"ended":
                    return
                yield line.decode().split()

    def run(self, path, seed):
        """Run one worker, and kill it at a moment that ``seed`` decides; return what it said."""
        rng = np.random.default_rng(seed)
        self.process.stdin.write(f"{path} {seed}\n".encode())
        self.process.stdin.flush()
        left, pid, said = int(rng.integers(0, 25)), 0, []
        for words in self.lines():
            if words[0] == "pid":
                pid = int(words[1])
            elif words[0] in "+-":
                said.append(words)
                left -= 1
            if left <= 0 and pid > 0 and (said or words[0] == "ready"):
                select.select([], [], [], float(rng.random() * 0.004))
                os.kill(pid, signal.SIGKILL)
                pid = -1
        return said

    def close(self):
        self.process.stdin.close()
        self.process.stdout.close()
        self.process.wait(10)


def examine(path):
    """Open what a killed worker left; return the digests of its blocks, all of which are right."""
    store = DiskStore(path, OPTIONS, FakeClock())
    try:
        store.check_invariants()
        digests = set()
        num_bytes = 0
        for found in store.recover():
            targets = [np.zeros(found.namespace.layout.block_bytes, np.uint8) for _ in found.keys]
            names = [found.identity(index) for index in range(len(found))]
            assert set(store.read(found.offsets, names, targets)) == {"good"}
            for key, fresh in found.prompts():
                assert len(fresh) * found.namespace.key_bytes == len(key), "prompts share no block"
                for index in fresh.tolist():
                    prefix = key[: (int(found.positions[index]) + 1) * found.namespace.key_bytes]
                    assert (targets[index] == pattern(found.namespace, prefix)).all()
            digests |= set(found.digests)
            num_bytes += int(found.slot_sizes.sum())
        assert store.slots.used_bytes == num_bytes, "no slot is lost"
        return digests
    finally:
        store.close()


def test_what_was_stored_survives_a_kill_at_any_moment(path):
    victim, lasting, rewritten = Victim(), set(), 0
    try:
        for seed in range(ROUNDS):
            released = set()
            for word, *digests in victim.run(path, seed):
                names = {bytes.fromhex(digest) for digest in digests}
                if word == "+":
                    lasting |= names
                else:
                    released |= names
                    lasting -= names
            found = examine(path)
            assert lasting <= found, f"lost in round {seed}"
            rewritten += bool(released)
            lasting = found
    finally:
        victim.close()
    assert rewritten > ROUNDS / 3, "slots were used again"


if __name__ == "__main__":
    nursery()
