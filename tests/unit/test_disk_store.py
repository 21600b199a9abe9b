"""The disk tier: what is called stored is found again, what is called good is right."""

import threading

import numpy as np
import pytest

from kvstore.blocks import FIRST_CHECKSUM
from kvstore.errors import ConfigError
from kvstore.namespace import KVLayout, Namespace
from kvstore.testing.disk import FaultySystem, identities, is_short
from kvstore.tiers.disk import slot_bytes_of
from tests.unit.disk_blocks import (
    LARGE,
    OPTIONS,
    SMALL,
    SMALL_SLOT,
    contents,
    everything,
    get,
    opened,
    prompt,
    put,
)


class TestWritingAndReading:
    def test_blocks_come_back_now_and_after_a_restart(self, path):
        store = opened(path)
        written = {}
        for namespace in (SMALL, LARGE):
            for first in range(3):
                offsets, blocks, stored = put(store, namespace, prompt(namespace, first, 12))
                assert stored.all()
                assert get(store, offsets, blocks) == ["good"] * 12
                written |= {block.digest: block for block in blocks}
        store.check_invariants()
        used = store.slots.used_bytes
        store.close()
        with_all = opened(path)
        with_all.check_invariants()
        assert with_all.slots.used_bytes == used
        offsets, blocks = everything(with_all)
        assert {block.digest for block in blocks} == written.keys()
        assert get(with_all, offsets, blocks) == ["good"] * len(blocks)
        assert everything(with_all)[1] == [], "handed over once"
        with_all.close()

    def test_recovered_blocks_make_up_their_prompts(self, path):
        store = opened(path)
        long, short = prompt(SMALL, 1, 12), prompt(SMALL, 1, 12)[: 5 * 16] + prompt(SMALL, 2, 2)
        put(store, SMALL, long)
        put(store, SMALL, short, 5)
        store.close()
        store = opened(path)
        (found,) = store.recover()
        assert found.namespace == SMALL
        assert (found.parents < np.arange(len(found))).all(), "parents first"
        prompts = {key: len(fresh) for key, fresh in found.prompts()}
        assert set(prompts) == {long, short}
        assert sum(prompts.values()) == len(found) == 14
        store.close()

    @pytest.mark.parametrize("size", [1, 511, 512, 513, 4095, 4096, 4097, 1_000_003])
    @pytest.mark.parametrize("padded", [0, 1])
    def test_payloads_of_any_length(self, path, size, padded):
        namespace = Namespace(b"odd", KVLayout(1, 1, size, "int8", 1, attention="mla"))
        store = opened(path)
        (block,) = identities(namespace, np.arange(1, dtype="<i4").tobytes())
        memory = np.random.default_rng(size).integers(0, 256, size + 8192, dtype=np.uint8)
        start = -memory.ctypes.data % 4096
        stop = start + (-(-size // 4096) * 4096 if padded else size)
        payload = memory[start:stop] if padded else memory[start + 1 : stop + 1]
        offsets = store.allocate(slot_bytes_of(namespace), 1)
        assert store.write(offsets, [block], [payload]).stored.all()
        target = np.zeros_like(payload)
        assert store.read(offsets, [block], [target]) == ["good"]
        assert (target[:size] == payload[:size]).all()
        store.close()

    @pytest.mark.parametrize("num_bytes", [512, 3584, 4096, 4608, 99_840])
    def test_short_reads_and_writes_are_gone_on_with(self, path, num_bytes):
        system = FaultySystem()
        store = opened(path, system)
        system.fault = is_short(num_bytes)
        offsets, blocks, stored = put(store, LARGE, prompt(LARGE, 0, 12))
        if num_bytes < 4096:  # no progress: an error like any other
            assert not stored.any()
            assert store.off["write"]
        else:
            assert stored.all()
            assert get(store, offsets, blocks) == ["good"] * 12
        store.close()

    def test_neighbours_go_with_one_call(self, path):
        system = FaultySystem()
        store = opened(path, system)
        system.calls.clear()
        offsets, blocks, _ = put(store, SMALL, prompt(SMALL, 0, 12))
        assert system.calls.count("write") == 1
        get(store, offsets[::-1], blocks[::-1])
        assert system.calls.count("read") == 1
        store.close()

    def test_a_released_block_is_forgotten_before_its_slot_is_written(self, path):
        system = FaultySystem()
        store = opened(path, system)
        offsets, blocks, _ = put(store, SMALL, prompt(SMALL, 0, 12))
        store.release(SMALL_SLOT, offsets)
        assert get(store, offsets, blocks) == ["missing"] * 12
        system.calls.clear()
        put(store, SMALL, prompt(SMALL, 1, 12))
        assert system.calls.index("commit") < system.calls.index("write")
        store.release(4096, store.allocate(4096, 1))
        store.close()
        store = opened(path)
        assert {block.key for block in everything(store)[1]} == {
            block.key for block in identities(SMALL, prompt(SMALL, 1, 12))
        }
        store.close()

    def test_rows_are_on_the_device_before_a_block_is_reported(self, path):
        class Watching(FaultySystem):
            levels = ()

            def commit(self, connection):
                (level,) = connection.execute("PRAGMA synchronous").fetchone()
                self.levels += (("normal", "full")[level - 1],)
                super().commit(connection)

        system = Watching()
        store = opened(path, system)
        put(store, SMALL, prompt(SMALL, 0, 12))
        offsets, _, _ = put(store, SMALL, prompt(SMALL, 1, 12))
        store.release(SMALL_SLOT, offsets)
        system.levels, system.calls = (), []
        put(store, SMALL, prompt(SMALL, 2, 12))
        assert system.levels == ("normal", "full")
        steps = [name for name in system.calls if name in ("commit", "write", "sync")]
        assert steps == ["commit", "write", "sync", "commit"]
        store.close()

    def test_a_full_disk_gives_fewer_slots(self, path):
        store = opened(path)
        size = slot_bytes_of(LARGE)
        offsets = store.allocate(size, 10_000)
        assert len(offsets) == store.capacity_bytes // size
        assert not len(store.allocate(size, 1))
        store.release(size, offsets)
        store.check_invariants()
        store.close()


def test_numbers_that_stand_for_no_checksum_are_not_taken_for_one(path):
    store = opened(path)
    key = prompt(SMALL, 0, 3)
    blocks = identities(SMALL, key, checksums=[0, 5, FIRST_CHECKSUM - 1])
    offsets = store.allocate(slot_bytes_of(SMALL), 3)
    assert store.write(offsets, blocks, contents(SMALL, key)).stored.all()
    assert get(store, offsets, blocks) == ["good"] * 3
    assert get(store, offsets, identities(SMALL, key)) == ["good"] * 3
    store.close()


def test_a_store_that_cannot_have_its_threads_does_not_open(path, monkeypatch):
    """It must not find out in the middle of a batch, when some calls are under way."""
    start, started = threading.Thread.start, []

    def refuse_the_second(thread):
        if thread.name.startswith("kvstore-disk"):
            started.append(thread)
            if len(started) == 2:
                raise RuntimeError("can't start new thread")
        start(thread)

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse_the_second)
        with pytest.raises(ConfigError, match="can't start new thread"):
            opened(path)
    store = opened(path)  # the lock is free again
    names = [t.name for t in threading.enumerate() if t.name.startswith("kvstore-disk")]
    assert len(names) == OPTIONS.threads
    store.close()
