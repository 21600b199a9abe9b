"""Every system call of the disk tier fails or is the last one: no block is lost, none is wrong."""

import errno
import shutil
from contextlib import suppress

import numpy as np
import pytest

from kvstore.errors import ConfigError
from kvstore.testing import FakeClock
from kvstore.testing.disk import Crash, FaultySystem, crashes_at, fails_at
from tests.unit.disk_blocks import (
    LARGE,
    SMALL,
    SMALL_SLOT,
    everything,
    get,
    let_go,
    opened,
    prompt,
    put,
)


class TestFailingCalls:
    def calls_of(self, path, what):
        system = FaultySystem()
        store = opened(path, system)
        before = len(system.calls)
        what(store)
        after = len(system.calls)
        store.close()
        shutil.rmtree(path)
        return before, after

    @staticmethod
    def work(store, kept=None):
        """Write two prompts, forget one, write a third and read what is there; ``kept`` is what must last."""
        kept = {} if kept is None else kept
        forgotten = put(store, LARGE, prompt(LARGE, 0, 12))
        for namespace, first in ((SMALL, 1), (LARGE, 2)):
            offsets, blocks, stored = put(store, namespace, prompt(namespace, first, 12))
            kept |= {
                block.digest: block
                for block, is_stored in zip(blocks, stored, strict=True)
                if is_stored
            }
            verdicts = get(store, offsets, blocks)
            assert not any(verdict == "good" for verdict in np.array(verdicts)[~stored])
            let_go(store, offsets, blocks, ~stored)
            if namespace == SMALL:
                let_go(store, *forgotten[:2])
        return kept

    @pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC, errno.EROFS])
    def test_every_call_fails_once(self, path, code):
        before, after = self.calls_of(path, self.work)
        assert after - before > 15
        for number in range(before + 1, after + 1):
            clock = FakeClock()
            store = opened(path, FaultySystem(fails_at(number, code)), clock)
            kept = self.work(store)
            store.check_invariants()
            clock.advance(2.0)
            offsets, _, stored = put(store, SMALL, prompt(SMALL, 7, 12))
            assert stored.all(), f"works again after call {number} failed"
            store.release(SMALL_SLOT, offsets)
            store.check_invariants()
            store.close()
            store = opened(path)
            store.check_invariants()
            offsets, blocks = everything(store)
            assert {block.digest for block in blocks} == kept.keys()
            assert set(get(store, offsets, blocks)) <= {"good"}
            store.close()
            shutil.rmtree(path)

    def test_every_call_dies(self, path):
        before, after = self.calls_of(path, self.work)
        for number in range(before + 1, after + 1):
            system = FaultySystem(crashes_at(number))
            store = opened(path, system)
            kept = {}
            with pytest.raises(Crash):
                self.work(store, kept)
            with suppress(Crash):
                store.close()
            store = opened(path)
            store.check_invariants()
            offsets, blocks = everything(store)
            assert set(get(store, offsets, blocks)) <= {"good"}, f"after death at call {number}"
            assert kept.keys() <= {block.digest for block in blocks}
            let_go(store, offsets, blocks)
            assert store.slots.used_bytes == 0
            store.close()
            shutil.rmtree(path)

    def test_every_call_of_the_first_opening_dies(self, path):
        system = FaultySystem()
        opened(path, system).close()
        for number in range(1, len(system.calls) + 1):
            shutil.rmtree(path)
            with pytest.raises(Crash):
                opened(path, FaultySystem(crashes_at(number)))
            store = opened(path)
            assert put(store, SMALL, prompt(SMALL, 0, 12))[2].all(), f"after death at call {number}"
            store.close()

    def test_a_row_that_was_written_although_it_seemed_to_fail(self, path):
        system = FaultySystem()
        clock = FakeClock()
        store = opened(path, system, clock)
        put(store, SMALL, prompt(SMALL, 0, 12))
        real = system.commit

        def commit(connection):
            real(connection)
            raise OSError(errno.ENOSPC, "full, but done")

        system.commit = commit
        offsets, _, stored = put(store, SMALL, prompt(SMALL, 1, 12))
        assert not stored.any()
        store.release(SMALL_SLOT, offsets)
        system.commit = real
        clock.advance(2.0)
        put(store, LARGE, prompt(LARGE, 2, 12))
        store.close()
        store = opened(path)
        offsets, blocks = everything(store)
        firsts = {np.frombuffer(block.key, "<i4")[0] for block in blocks if not block.position}
        assert firsts == {1_000_000, 1_000_002}
        assert get(store, offsets, blocks) == ["good"] * 24
        store.close()

    def test_every_call_of_opening_fails(self, path):
        store = opened(path)
        put(store, LARGE, prompt(LARGE, 0, 12))
        store.close()
        system = FaultySystem()
        opened(path, system).close()
        for number in range(1, len(system.calls) + 1):
            for fault in (fails_at(number, errno.EIO), crashes_at(number)):
                try:
                    opened(path, FaultySystem(fault)).close()
                except (ConfigError, Crash):
                    continue
            store = opened(path)
            assert len(everything(store)[1]) == 12, f"after call {number}"
            store.close()

    @pytest.mark.parametrize("seed", range(6))
    def test_no_space_now_and_then(self, path, seed):
        rng = np.random.default_rng(seed)

        def fault(name, number):
            if name in ("write", "sync", "commit", "allocate") and rng.random() < 0.1:
                raise OSError(errno.ENOSPC, "full")

        clock, system = FakeClock(), FaultySystem()
        store = opened(path, system, clock)
        system.fault = fault
        kept = {}
        for first in range(30):
            namespace = (SMALL, LARGE)[first % 2]
            offsets, blocks, stored = put(store, namespace, prompt(namespace, first, 12))
            let_go(store, offsets, blocks, ~stored)
            kept |= {
                block.digest: (offset, block)
                for offset, block, is_stored in zip(offsets.tolist(), blocks, stored, strict=True)
                if is_stored
            }
            for digest in [digest for digest in kept if rng.random() < 0.2]:
                offset, block = kept.pop(digest)
                let_go(store, np.array([offset]), [block])
            store.check_invariants()
            clock.advance(float(rng.random() * 40))
        assert store.troubles["write", "no_space"]
        system.fault = None
        clock.advance(100.0)
        offsets, blocks, stored = put(store, SMALL, prompt(SMALL, 30, 12))
        assert stored.all()
        kept |= zip(
            (block.digest for block in blocks),
            zip(offsets.tolist(), blocks, strict=True),
            strict=True,
        )
        offsets = np.array([offset for offset, _ in kept.values()], np.int64)
        assert set(get(store, offsets, [block for _, block in kept.values()])) == {"good"}
        store.close()
        store = opened(path)
        store.check_invariants()
        _, blocks = everything(store)
        reachable = {block.digest for block in blocks}
        assert reachable <= kept.keys()
        parents = {block.digest: block.parent for _, block in kept.values()}
        for digest, parent in parents.items():
            root = parent in (SMALL.digest[:16], LARGE.digest[:16])
            if root or parent in reachable:
                assert digest in reachable, "stored, and everything before it is there"
        store.close()
