"""A pool over a disk that fails, dies, cuts short, or whose files are damaged: misses and counters, no more."""

import errno
import os
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest

from kvstore.blocks import NO_SLOT
from kvstore.namespace import KVLayout, Namespace
from kvstore.planner import Planner
from kvstore.testing import FakeClock, pattern, small_pool
from kvstore.testing.disk import Crash, FaultySystem, crashes_at, is_short
from kvstore.tiers.disk import DiskOptions, DiskStore, slot_bytes_of
from kvstore.tiers.rules import DiskRules, WriteBudget

WIDTH = 4
SPACE = Namespace(b"weights", KVLayout(1, 1, 256, "float32", WIDTH))
"""Blocks of 8 KiB: two pages in memory, three on disk."""
OPTIONS = DiskOptions(
    (5 << 20) + (3 << 18),
    segment_bytes=(1 << 18) + 4096,
    reserve_bytes=0,
    manifest_bytes=1 << 20,
    threads=2,
)
"""Room for some 60 blocks; some slots lie across two segments."""
MEMORY_PAGES = 40
PROMPTS, BLOCKS, SHARED = 14, 8, 2
ALONE = 4
"""The prompt that does not begin as the others do."""


@pytest.fixture
def path():
    """A directory that does not exist yet, on a real file system."""
    with tempfile.TemporaryDirectory(prefix="kvstore-faults-", dir="/var/tmp") as directory:
        yield Path(directory) / "tier"


def opened(path, system=None, clock=None):
    clock = clock or FakeClock()
    rules = DiskRules("always", WriteBudget(clock, 0), Planner(clock, mode="always"))
    disk = DiskStore(path, OPTIONS, clock, system)
    return small_pool(MEMORY_PAGES, clock=clock, disk=disk, rules=rules)


def num_shared(number):
    return 0 if number == ALONE else SHARED


def prompt(number):
    tokens = np.arange(BLOCKS * WIDTH + 1, dtype=np.int32)
    tokens[num_shared(number) * WIDTH :] += 1000 * (number + 1)
    return tokens


def put(pool, number):
    key = prompt(number).astype("<i4").tobytes()
    with pool.reserve(SPACE, prompt(number)) as reservation:
        for index, slot in zip(reservation.indices.tolist(), reservation.slots(), strict=True):
            slot[:] = pattern(SPACE, key[: (index + 1) * SPACE.key_bytes])


def get(pool, number):
    """Load what there is of a prompt; return how many blocks, all of which are right."""
    key = prompt(number).astype("<i4").tobytes()
    with pool.acquire(SPACE, prompt(number)) as lease:
        for index, slot in enumerate(lease.slots()):
            assert np.array_equal(slot, pattern(SPACE, key[: (index + 1) * SPACE.key_bytes]))
    return lease.num_blocks


def work(pool, clock=None):
    """Fill memory and disk more than once, load old prompts, forget one."""
    for number in range(PROMPTS):
        if clock is not None:
            clock.advance(3.0)
        put(pool, number)
        get(pool, number // 2)
        if number == PROMPTS // 2:
            pool.evict(SPACE, prompt(ALONE))
        pool.check_invariants()


def on_disk(pool, number):
    """Leading blocks of a prompt that the pool has on disk."""
    ids = pool._residency.find(SPACE, prompt(number).astype("<i4").tobytes()).usable
    there = pool._residency.table.slots[-1, ids] != NO_SLOT
    return len(ids) if there.all() else int(there.argmin())


def examine(path):
    """Open what is left; return the blocks of each prompt that are found again, all of which are right."""
    with opened(path) as pool:
        pool.check_invariants()
        tier = pool.stats().tiers[-1]
        assert pool.stats().num_blocks == tier.num_blocks
        assert tier.used_bytes == tier.num_blocks * slot_bytes_of(SPACE), "no slot is lost"
        found = [on_disk(pool, number) for number in range(PROMPTS + 1)]
        distinct = max(min(num_shared(at), blocks) for at, blocks in enumerate(found)) + sum(
            max(0, blocks - num_shared(at)) for at, blocks in enumerate(found)
        )
        assert tier.num_blocks == distinct, "nothing is held that is not offered"
        loaded = [get(pool, number) for number in range(PROMPTS + 1)]
        pool.check_invariants()
        assert sum(file.stat().st_blocks * 512 for file in path.iterdir()) <= OPTIONS.budget_bytes
    return found, loaded


def goes_on(path):
    """Whether a pool over ``path`` stores and finds blocks as if nothing had been."""
    with opened(path) as pool:
        put(pool, PROMPTS)
        pool.demote(SPACE, prompt(PROMPTS), "dram")
        return on_disk(pool, PROMPTS) == get(pool, PROMPTS) == BLOCKS


def test_without_faults(path):
    system, clock = FaultySystem(), FakeClock()
    with opened(path, system, clock) as pool:
        work(pool, clock)
        counts = pool.stats().counts
        assert counts["evicted_blocks", "disk", "capacity"] > 0
        assert counts["moved_blocks", "disk", "dram"] > 0
        assert {"read", "write", "sync", "commit", "stat"} <= set(system.calls)
    found, loaded = examine(path)
    assert found == loaded
    assert found[PROMPTS - 1] == BLOCKS
    assert goes_on(path)


def test_death_at_every_call(path):
    system = FaultySystem()
    with opened(path, system) as pool:
        first = len(system.calls) + 1
        work(pool)
        last = len(system.calls)
    assert last - first > 50
    for number in range(first, last + 1):
        shutil.rmtree(path)
        pool = opened(path, FaultySystem(crashes_at(number)))
        with pytest.raises(Crash):
            work(pool)
        kept = [on_disk(pool, number) for number in range(PROMPTS)]
        with suppress(Crash):
            pool.close()
        found, loaded = examine(path)
        assert loaded == found, f"after death at call {number}"
        assert all(np.array(found[:PROMPTS]) >= kept), f"after death at call {number}"
    assert goes_on(path)


@pytest.mark.parametrize("num_bytes", [4096, 12288])
def test_short_reads_and_writes(path, num_bytes):
    clock = FakeClock()
    with opened(path, FaultySystem(is_short(num_bytes)), clock) as pool:
        work(pool, clock)
        assert not pool.stats().counts["failed_moves", "dram", "disk"]
        assert not pool.stats().counts["corrupt_blocks",]
    found, loaded = examine(path)
    assert found == loaded
    assert found[PROMPTS - 1] == BLOCKS


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO, errno.EROFS])
@pytest.mark.parametrize("seed", range(3))
def test_errors_now_and_then(path, code, seed):
    rng = np.random.default_rng(seed)
    writes = "write", "sync", "commit", "allocate"
    names = writes if code in (errno.ENOSPC, errno.EROFS) else (*writes, "read", "stat", "open")

    def fault(name, number):
        if name in names and rng.random() < 0.08:
            raise OSError(code, "as the test wants")

    clock, system = FakeClock(), FaultySystem()
    with opened(path, system, clock) as pool:
        system.fault = fault
        work(pool, clock)
        work(pool, clock)
        counts = pool.stats().counts
        missed = [
            counts[name]
            for name in (("failed_moves", "dram", "disk"), ("unstored_blocks", "disk", "off"))
        ]
        assert sum(missed) > 0
        system.fault = None
        clock.advance(1000.0)
        put(pool, PROMPTS)
        assert on_disk(pool, PROMPTS) == BLOCKS, "it goes on by itself"
        pool.demote(SPACE, prompt(PROMPTS), "dram")
        assert get(pool, PROMPTS) == BLOCKS
        pool.check_invariants()
    examine(path)
    assert goes_on(path)


def flip(file, rng, starts, length):
    """Change one bit at ``length`` bytes or less behind each of ``starts``."""
    data = bytearray(file.read_bytes())
    for start in starts:
        at = start + int(rng.integers(length))
        if at < len(data):
            data[at] ^= 1 << int(rng.integers(8))
    file.write_bytes(data)


def damage(path, kind, rng):
    """Do to the files of a tier what disks and people do."""
    segments, manifest = sorted(path.glob("*.kv")), path / "manifest.db"
    if kind == "headers":
        flip_slots(segments, rng, 0, 200)
    elif kind == "payloads":
        flip_slots(segments, rng, 4096, SPACE.layout.block_bytes)
    elif kind == "manifest":
        size = manifest.stat().st_size
        flip(manifest, rng, rng.integers(0, size, int(rng.integers(1, 30))).tolist(), 1)
    elif kind == "rubbish":
        for file in (*segments, manifest):
            file.write_bytes(rng.bytes(int(rng.integers(1, 20_000))))
    elif kind.startswith("cut"):
        for file in [manifest] if kind == "cut_manifest" else segments:
            os.truncate(file, int(rng.integers(file.stat().st_size)))
    else:
        gone = {"no_manifest": [manifest], "no_segments": segments}
        for file in gone.get(kind, [segments[int(rng.integers(len(segments)))]]):
            file.unlink()


def flip_slots(segments, rng, start, length):
    """Change one bit in some of the slots, between ``start`` and ``start + length``."""
    size = slot_bytes_of(SPACE)
    for index, segment in enumerate(segments):
        first = index * OPTIONS.segment_bytes
        slots = range(0, OPTIONS.capacity_bytes, size * int(rng.integers(1, 4)))
        flip(segment, rng, [at + start - first for at in slots if at + start >= first], length)


KINDS = (
    *("headers", "payloads", "manifest", "cut_manifest", "no_manifest"),
    *("cut_segments", "one_segment", "no_segments", "rubbish"),
)


class TestDamage:
    @pytest.mark.parametrize("kind", KINDS)
    @pytest.mark.parametrize("seed", range(3))
    def test_while_closed(self, path, kind, seed):
        with opened(path) as pool:
            work(pool)
            before = [on_disk(pool, number) for number in range(PROMPTS)]
        damage(path, kind, np.random.default_rng(seed))
        with opened(path) as pool:
            pool.check_invariants()
            known = [pool.lookup(SPACE, prompt(number)) // WIDTH for number in range(PROMPTS)]
            loaded = [get(pool, number) for number in range(PROMPTS)]
            pool.check_invariants()
            lost = sum(before) - sum(loaded)
            assert all(np.array(loaded) <= before)
            assert lost or kind == "manifest", "a bit that nobody reads may flip there"
            counts = pool.stats().counts
            assert counts["corrupt_blocks",] or known == loaded
            again = [get(pool, number) for number in range(PROMPTS)]
            assert all(np.array(again) <= loaded)
            work(pool)
        examine(path)
        assert goes_on(path)

    @pytest.mark.parametrize("kind", KINDS)
    def test_while_open(self, path, kind):
        clock = FakeClock()
        with opened(path, clock=clock) as pool:
            work(pool, clock)
            damage(path, kind, np.random.default_rng(1))
            for _ in range(3):
                clock.advance(100.0)
                for number in range(PROMPTS):
                    pool.demote(SPACE, prompt(number), "dram")
                    get(pool, number)
                    pool.check_invariants()
                work(pool, clock)
        with suppress(OSError):
            examine(path)
        assert goes_on(path)

    def test_the_directory_is_gone_and_comes_back(self, path):
        clock = FakeClock()
        with opened(path, clock=clock) as pool:
            work(pool, clock)
            path.rename(path.with_name("away"))
            work(pool, clock)
            assert not path.exists(), "nothing is made where a mount may be missing"
            path.with_name("away").rename(path)
            clock.advance(1000.0)
            put(pool, PROMPTS)
            assert on_disk(pool, PROMPTS) == BLOCKS
            pool.check_invariants()
        examine(path)
