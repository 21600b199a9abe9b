"""A batch whose rows take several transactions: one flush of its bytes, one of the log, and all or nothing."""

import errno
import os
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest

from kvstore.testing import FakeClock
from kvstore.testing.disk import Crash, FaultySystem, crashes_at, identities
from kvstore.tiers.disk import DiskOptions
from kvstore.tiers.disk.manifest import MAX_BATCH_ROWS
from tests.unit.disk_blocks import SMALL, SMALL_SLOT, contents, everything, opened, prompt, put

OPTIONS = DiskOptions(10 << 20, reserve_bytes=0, manifest_bytes=1 << 20, threads=2)
COUNT = 2 * MAX_BATCH_ROWS + 44
"""Blocks of a prompt: three transactions."""
NORMAL, FULL = 1, 2


@pytest.fixture
def path():
    """A directory that does not exist yet, on a real file system."""
    with tempfile.TemporaryDirectory(prefix="kvstore-disk-", dir="/var/tmp") as directory:
        yield Path(directory) / "tier"


class Committing(FaultySystem):
    """Knows what is flushed, and fails at the commit that a test names."""

    def __init__(self):
        super().__init__()
        self.steps = []
        """``sync`` for a flush of bytes, ``NORMAL`` or ``FULL`` for a commit."""
        self.failure = None
        """Number of a commit in ``steps``, ``before`` or ``after`` it is done, and what to raise then."""

    def sync(self, descriptor):
        super().sync(descriptor)
        self.steps.append("sync")

    def commit(self, connection):
        number = len(self.steps) - self.steps.count("sync")
        self.steps.append(connection.execute("PRAGMA synchronous").fetchone()[0])
        self._fail_at(number, "before")
        super().commit(connection)
        self._fail_at(number, "after")

    def _fail_at(self, number, moment):
        if self.failure and self.failure[:2] == (number, moment):
            raise self.failure[2]


class Prompts:
    """Prompts of ``COUNT`` blocks, by number."""

    def __init__(self):
        self._contents = {}
        """Of every block, by digest."""

    def put(self, store, first):
        """Write one; return offsets and which blocks were stored."""
        self.digests(first)
        offsets, _, stored = put(store, SMALL, prompt(SMALL, first, COUNT))
        return offsets, stored

    def digests(self, first):
        """Names of the blocks of one."""
        key = prompt(SMALL, first, COUNT)
        digests = [block.digest for block in identities(SMALL, key)]
        self._contents |= zip(digests, contents(SMALL, key), strict=True)
        return digests

    def found(self, path):
        """Digests of what is found at ``path``, all of which has the right bytes; no slot is lost."""
        store = opened(path, options=OPTIONS)
        store.check_invariants()
        offsets, blocks = everything(store)
        assert store.slots.used_bytes == len(blocks) * SMALL_SLOT
        targets = [np.zeros(block.block_bytes, np.uint8) for block in blocks]
        assert set(store.read(offsets, blocks, targets)) <= {"good"}
        for block, target in zip(blocks, targets, strict=True):
            assert target.tobytes() == self._contents[block.digest].tobytes()
        store.release(SMALL_SLOT, offsets)
        store.check_invariants()
        assert store.slots.used_bytes == 0
        store.close()
        return {block.digest for block in blocks}


def test_one_flush_of_the_bytes_and_one_of_the_log(path):
    system, prompts = Committing(), Prompts()
    store = opened(path, system, options=OPTIONS)
    system.steps.clear()
    assert prompts.put(store, 0)[1].all()
    assert system.steps == [NORMAL, "sync", NORMAL, NORMAL, FULL], (
        "first a number for the namespace"
    )
    system.steps.clear()
    offsets, stored = prompts.put(store, 1)
    assert stored.all()
    assert system.steps == ["sync", NORMAL, NORMAL, FULL]
    store.release(SMALL_SLOT, offsets)
    system.steps.clear()
    assert prompts.put(store, 2)[1].all()
    assert system.steps == [NORMAL, NORMAL, NORMAL, "sync", NORMAL, NORMAL, FULL]
    store.close()


@pytest.mark.parametrize("number", range(3))
@pytest.mark.parametrize("moment", ["before", "after"])
def test_a_transaction_that_fails_leaves_nothing_of_the_batch(path, number, moment):
    clock, system, prompts = FakeClock(), Committing(), Prompts()
    store = opened(path, system, clock, OPTIONS)
    prompts.put(store, 0)
    system.steps.clear()
    system.failure = number, moment, OSError(errno.ENOSPC, "full")
    offsets, stored = prompts.put(store, 1)
    assert not stored.any()
    assert system.steps == ["sync", NORMAL, NORMAL, FULL][: number + 2]
    assert store.off["write"] == "no_space"
    store.release(SMALL_SLOT, offsets)
    store.check_invariants()
    system.failure = None
    clock.advance(2.0)
    again, stored = prompts.put(store, 2)
    assert stored.all()
    assert set(again.tolist()) == set(offsets.tolist())
    store.close()
    assert prompts.found(path) == {*prompts.digests(0), *prompts.digests(2)}


@pytest.mark.parametrize("number", range(3))
@pytest.mark.parametrize("moment", ["before", "after"])
def test_a_transaction_that_fails_leaves_nothing_after_flush(path, number, moment):
    """Also when nothing is written any more."""
    system, prompts = Committing(), Prompts()
    store = opened(path, system, options=OPTIONS)
    prompts.put(store, 0)
    system.steps.clear()
    system.failure = number, moment, OSError(errno.ENOSPC, "full")
    prompts.put(store, 1)
    system.failure = None
    store.close()
    assert prompts.found(path) == set(prompts.digests(0))


@pytest.mark.parametrize("number", range(3))
@pytest.mark.parametrize("moment", ["before", "after"])
@pytest.mark.parametrize("deletions", [0, 3])
def test_death_at_a_transaction(path, number, moment, deletions):
    """What was listed until then is found, and right, whether or not the slots held something before."""
    system, prompts = Committing(), Prompts()
    store = opened(path, system, options=OPTIONS)
    prompts.put(store, 0)
    if deletions:
        store.release(SMALL_SLOT, prompts.put(store, 1)[0])
    system.steps.clear()
    system.failure = deletions + number, moment, Crash("commit")
    with pytest.raises(Crash):
        prompts.put(store, 2)
    system.fault = crashes_at(1)
    with suppress(Crash):
        store.close()
    listed = (number + (moment == "after")) * MAX_BATCH_ROWS
    assert prompts.found(path) == {*prompts.digests(0), *prompts.digests(2)[:listed]}


def test_loss_of_power_takes_transactions_from_the_end(path):
    """The log, cut anywhere, holds a beginning of a batch that was not reported yet."""
    prompts, copy = Prompts(), path.parent / "copy"
    store = opened(path, options=OPTIONS)
    prompts.put(store, 0)
    before = (path / "manifest.db-wal").stat().st_size
    assert prompts.put(store, 1)[1].all()
    after = (path / "manifest.db-wal").stat().st_size
    assert after > before, "the log was not written back meanwhile"
    found = []
    for length in np.linspace(before, after, 9, dtype=int).tolist():
        shutil.copytree(path, copy)
        os.truncate(copy / "manifest.db-wal", length)
        digests = prompts.found(copy) - set(prompts.digests(0))
        found.append(len(digests))
        assert digests == set(prompts.digests(1)[: found[-1]])
        shutil.rmtree(copy)
    store.close()
    assert set(found) == {0, MAX_BATCH_ROWS, 2 * MAX_BATCH_ROWS, COUNT}
    assert found == sorted(found)
