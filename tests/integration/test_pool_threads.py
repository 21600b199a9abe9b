"""Threads do everything to one pool with a disk at once: every byte is right, and nothing stays held."""

import errno
import random
import time
import zlib
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import cache

import ml_dtypes
import numpy as np
import pytest

from kvstore.claims import SHARE
from kvstore.errors import LeaseExpiredError, LeaseNotHeldError, UsageError
from kvstore.namespace import KVLayout, Namespace
from kvstore.planner import Planner
from kvstore.quotas import Quota
from kvstore.testing import small_pool
from kvstore.testing.disk import FaultySystem
from kvstore.tiers.disk import health
from kvstore.tiers.mover import Lanes, ThreadMover
from kvstore.tiers.rules import DiskRules, WriteBudget
from tests.unit.disk_blocks import opened as opened_disk

WIDTH, DRAM_PAGES, CEILING_BYTES = 8, 160, 60 << 12
USERS, STEPS = 4, 300
LARGE = KVLayout(2, 2, 256, "bfloat16", WIDTH)  # blocks of 8 pages
SMALL = KVLayout(1, 2, 128, "float32", WIDTH)  # and of 4
SPACES = (
    Namespace(b"weights", LARGE, codec="lz4"),
    Namespace(b"weights", SMALL, codec="int8"),
    Namespace(b"weights", SMALL, tenant="t"),
    Namespace(b"weights", LARGE, codec="lz4", tenant="t"),
)


@cache
def content(namespace, key):
    """The block that ends ``key``, uint8, and whether its codec refuses it: noise, or a number not finite."""
    rng = np.random.default_rng(zlib.crc32(namespace.digest + key))
    num_bytes, odd = namespace.layout.block_bytes, rng.random() < 0.3
    if namespace.codec == "int8":
        block = rng.standard_normal(num_bytes // 4).astype(np.float32)
        block[rng.integers(len(block))] *= np.inf if odd else 1
    elif namespace.codec == "lz4" and not odd:
        block = rng.uniform(1, 2, num_bytes // 2).astype(ml_dtypes.bfloat16)
    else:
        block = rng.integers(0, 256, num_bytes, np.uint8)
    return block.view(np.uint8), odd


def check(namespace, key, found):
    """Compare a block with what was written, of which int8 keeps each number to half a step of its head."""
    wanted, odd = content(namespace, key)
    if namespace.codec == "int8" and not odd:
        wanted, found = (each.view(np.float32).reshape(SMALL.shape) for each in (wanted, found))
        bound = np.abs(wanted).max((-1, -2), keepdims=True) / 254 * 1.001
        wanted = np.where(np.abs(found - wanted) <= bound, found, wanted)
    assert np.array_equal(found, wanted), "not what was written"


class User:
    """Does what chance says to a pool and to prompts that all users share."""

    def __init__(self, pool, number, case):
        self.pool, self.number, self.case, self.counts = pool, number, case, Counter()
        self.random, self.written = random.Random(f"{case} {number}"), []

    def work(self):
        """Do a number of things; one user closes the pool, if that is the case. Return what was counted."""
        pool, pick = self.pool, self.random.choice
        chances = {
            self.read: 50, self.write: 22, self.look: 1, self.pin: 2, pool.prefetch: 8, pool.evict: 1,
            (lambda *what: pool.demote(*what, pick(pool.tier_names[:-1]))): 13,
            (lambda *_: pool.unpin(pick("abc"))): 1,
            (lambda *_: pool.clear()): 0.1 * (self.case != "closed"),
        }  # fmt: skip
        for step in range(STEPS):
            if (self.case, self.number, step) == ("closed", 0, STEPS // 2):
                pool.close()
            tokens = np.arange(self.random.randint(1, 7) * WIDTH + 1, dtype=np.int32)
            tokens[self.random.randrange(3) * WIDTH :] += 1000 * self.random.randint(1, 4)
            [operation] = self.random.choices([*chances], [*chances.values()])
            operation(pick(SPACES), tokens)
        for reservation in self.written:
            self.end(reservation)
        return self.counts

    def read(self, namespace, tokens):
        may_wait = self.random.random() < 0.6
        lease = self.pool.acquire(namespace, tokens, may_wait=may_wait)
        while may_wait and lease.coming_blocks and self.random.random() < 0.8:
            assert not lease.num_blocks
            self.counts["waits"] += 1
            time.sleep(min(lease.patience_s, 0.02))
            may_wait = self.random.random() < 0.7
            lease = self.pool.acquire(namespace, tokens, may_wait=may_wait)
        if self.case == "failing" and self.random.random() < 0.3:
            self.pool.verify(lease)
        found = [slot.copy() for slot in lease.slots()]
        try:
            self.pool.release(lease)
        except LeaseExpiredError:
            self.counts["expired"] += 1
        except LeaseNotHeldError:
            assert self.pool.closed
        else:
            self.counts["blocks"] += len(found)
            for index, block in enumerate(found):
                check(namespace, tokens[: (index + 1) * WIDTH].tobytes(), block)

    def write(self, namespace, tokens):
        most, ttl_s = self.random.choice([None, None, 2]), self.random.choice([None, None, 0.05])
        more = {"priority": self.random.choice([0, 50, 80]), "ttl_s": ttl_s}
        reservation = self.pool.reserve(namespace, tokens, max_blocks=most, **more)
        for index, slot in zip(reservation.indices.tolist(), reservation.slots(), strict=True):
            slot[:] = content(namespace, tokens[: (index + 1) * WIDTH].tobytes())[0]
        self.written.append(reservation)
        while len(self.written) > 3 or (self.written and self.random.random() < 0.7):
            self.end(self.written.pop(0))

    def end(self, reservation):
        try:
            (self.pool.commit if self.random.random() < 0.85 else self.pool.abort)(reservation)
        except LeaseNotHeldError:
            assert self.pool.closed

    def pin(self, namespace, tokens):
        with suppress(UsageError):  # more than half of a tier
            self.pool.pin(self.random.choice("abc"), namespace, tokens)

    def look(self, namespace, tokens):
        self.pool.reap()
        with self.pool._lock:
            assert self.pool.explain(namespace, tokens).hit_tokens < len(tokens)
            assert self.pool.tenants()[0].used_bytes <= CEILING_BYTES
            assert self.pool._claims._num_bytes <= SHARE * (DRAM_PAGES << 12)
            if self.case != "failing":  # where verify has references of its own for a moment
                self.pool.check_invariants()


def opened(path, case):
    clock, gpu, chance = time.monotonic, case == "gpu", random.Random(case)

    def trouble(name, number):
        draw = chance.random() if case == "failing" else 1.0
        if name in ("read", "write"):
            time.sleep(chance.random() * 0.001)
        if draw < 0.012 and name in ("read", "write", "sync", "commit"):
            raise OSError(errno.ENOSPC if name == "write" and draw < 0.004 else errno.EIO, "chance")
        return 4096 if draw < 0.08 else None

    admission = {"gpu": "second_use", "failing": "value"}.get(case, "always")
    more = {
        "mover": Lanes(*(ThreadMover(8, name) for name in ("memory", "loads", "stores"))),
        "disk": opened_disk(path, system := FaultySystem(), clock),
        "rules": DiskRules(admission, WriteBudget(clock, 0), Planner(clock, mode="always")),
        "quotas": {"t": Quota(CEILING_BYTES, floor_bytes=8 << 12)},
        "lease_timeout_s": 0.01 if gpu else 60.0,
    }
    system.fault = trouble
    return small_pool(*[DRAM_PAGES // 2] * gpu, DRAM_PAGES, clock=clock, **more)


def check_quiet(pool):
    pool.drain()
    pool.check_invariants()
    pool._residency.tiers[-1].disk.check_invariants()


@pytest.mark.parametrize("case", ["memory", "gpu", "failing", "closed"])
def test_everybody_gets_the_right_bytes(path, caplog, monkeypatch, case):
    monkeypatch.setattr(health, "FIRST_PAUSE_S", 0.02)
    counts, pool = Counter(), opened(path, case)
    try:
        for first in (0, USERS):
            with ThreadPoolExecutor(USERS, "kvstore-user") as threads:
                jobs = [threads.submit(User(pool, first + n, case).work) for n in range(USERS)]
            counts += sum((job.result() for job in jobs), Counter())
            if pool.closed:
                pool = opened(path, case)
                assert pool.stats().num_blocks, "the disk has kept nothing"
            check_quiet(pool)
        counts += pool.stats().counts
        pool.clear()
        pool._reap(time.monotonic() + 1000)  # claims end by time
        check_quiet(pool)
        end = pool.stats()
    finally:
        pool.close()
    held = end.held_blocks, end.num_pins, end.num_leases, end.num_reservations
    assert not any([*held, end.num_blocks, *(tier.used_bytes for tier in end.tiers)])
    assert counts["blocks"] > 300
    assert min(counts["waits"], counts["moved_blocks", "disk", "dram"]) > 0
    assert bool(counts["expired"]) == (case == "gpu")
    assert not any(record.exc_info for record in caplog.records), "a job has failed"
    assert (case == "failing") == any(record.levelname == "ERROR" for record in caplog.records)
