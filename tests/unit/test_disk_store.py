"""The disk tier: what is called stored is found again, what is called good is right, trouble is no error."""

import errno
import os
import shutil
import sqlite3
import tempfile
import threading
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest

from kvstore.blocks import FIRST_CHECKSUM
from kvstore.errors import ConfigError
from kvstore.namespace import KVLayout, Namespace
from kvstore.testing import FakeClock, pattern
from kvstore.testing.disk import Crash, FaultySystem, crashes_at, fails_at, is_short
from kvstore.tiers.disk import DiskOptions, DiskStore, identities, slot_bytes_of
from kvstore.tiers.disk.manifest import LOG_BYTES

BUDGET = 8 << 20
OPTIONS = DiskOptions(
    BUDGET, segment_bytes=(1 << 20) + 4096, reserve_bytes=0, manifest_bytes=1 << 20, threads=2
)
SMALL = Namespace(b"small", KVLayout(1, 1, 8, "float16", 4))
LARGE = Namespace(b"large", KVLayout(3, 5, 33, "float32", 16), tenant="t", salt="s")
SMALL_SLOT = slot_bytes_of(SMALL)


@pytest.fixture
def path():
    """A directory that does not exist yet, on a real file system."""
    with tempfile.TemporaryDirectory(prefix="kvstore-disk-", dir="/var/tmp") as directory:
        yield Path(directory) / "tier"


def opened(path, system=None, clock=None, options=OPTIONS):
    return DiskStore(path, options, clock or FakeClock(), system)


def prompt(namespace, first, num_blocks):
    """Key bytes of a prompt that no other ``first`` has a block in common with."""
    count = num_blocks * namespace.layout.block_tokens
    tokens = np.arange(count, dtype="<i4")
    tokens[0] = 1_000_000 + first
    return tokens.tobytes()


def contents(namespace, key):
    """What each block of ``key`` holds."""
    stride = namespace.key_bytes
    return [pattern(namespace, key[: stop + stride]).copy() for stop in range(0, len(key), stride)]


def put(store, namespace, key, start=0):
    """Write the blocks of ``key``; return offsets, identities and which were stored."""
    blocks = list(identities(namespace, key, start))
    offsets = store.allocate(slot_bytes_of(namespace), len(blocks))
    assert len(offsets) == len(blocks)
    stored = store.write(offsets, blocks, contents(namespace, key)[start:])
    return offsets, blocks, stored


def get(store, offsets, blocks):
    """Read blocks; check every one that is said to be good."""
    targets = [np.full(block.block_bytes, 170, np.uint8) for block in blocks]
    verdicts = store.read(offsets, blocks, targets)
    for verdict, block, target in zip(verdicts, blocks, targets, strict=True):
        if verdict == "good":
            assert block.namespace in (SMALL, LARGE)
            assert target.tobytes() in expected(block), "good, but not what was written"
    return verdicts


def expected(block):
    """Every content that a test may have written for ``block``: that of one of its prompts."""
    found = []
    for first in range(40):
        key = prompt(block.namespace, first, 12)
        blocks = list(identities(block.namespace, key))
        if block.position < len(blocks) and blocks[block.position].digest == block.digest:
            found.append(contents(block.namespace, key)[block.position].tobytes())
    return found


def let_go(store, offsets, blocks, which=slice(None)):
    """Release the slots of ``which`` blocks."""
    sizes = np.array([slot_bytes_of(block.namespace) for block in blocks], np.int64)[which]
    for size in set(sizes.tolist()):
        store.release(size, offsets[which][sizes == size])


def everything(store):
    """Offsets and identities of all that a store found when it was opened."""
    offsets, blocks = [], []
    for found in store.recover():
        offsets += found.offsets.tolist()
        blocks += [found.identity(index) for index in range(len(found))]
    return np.array(offsets, np.int64), blocks


def files(path):
    return {file.name: file.stat() for file in path.iterdir()}


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
        assert store.write(offsets, [block], [payload]).all()
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


class TestBudget:
    def test_everything_in_the_directory_counts(self, path):
        store = opened(path)
        taken = []
        while len(offsets := store.allocate(slot_bytes_of(SMALL), 12)) == 12:
            blocks = list(identities(SMALL, prompt(SMALL, 1000 + len(taken), 12)))
            assert store.write(offsets, blocks, [np.zeros(256, np.uint8)] * 12).all()
            taken.append(offsets)
            listed = files(path)
            assert (
                sum(max(file.st_size, file.st_blocks * 512) for file in listed.values()) <= BUDGET
            )
        assert len(taken) > 20
        assert {name for name in listed if not name.startswith("segment")} == {
            *("lock", "manifest.db", "manifest.db-wal")
        }
        store.close()
        assert all(file.st_mode & 0o077 == 0 for file in listed.values())
        assert path.stat().st_mode & 0o077 == 0

    def test_the_list_of_blocks_and_its_log_have_limits(self, path):
        class Watching(FaultySystem):
            log_bytes = 0

            def commit(self, connection):
                super().commit(connection)
                self.log_bytes = max(self.log_bytes, files(path)["manifest.db-wal"].st_size)

        system = Watching()
        options = DiskOptions(64 << 20, reserve_bytes=0, manifest_bytes=16 << 20)
        store = opened(path, system, options=options)
        rng = np.random.default_rng(1)
        for layout in (KVLayout(1, 1, 1, "int8", 4096), KVLayout(1, 1, 1, "int8", 1)):
            namespace = Namespace(b"keys", layout)
            key = rng.integers(0, 1 << 30, 600 * layout.block_tokens, dtype=np.int32).tobytes()
            blocks = list(identities(namespace, key))
            offsets = rng.permutation(store.allocate(slot_bytes_of(namespace), 600))
            payloads = [np.zeros(layout.block_bytes, np.uint8)] * 600
            assert store.write(offsets, blocks, payloads).all()
            store.release(slot_bytes_of(namespace), offsets[::2])
            assert store.flush()
        assert (1 << 19) < system.log_bytes <= LOG_BYTES
        assert files(path)["manifest.db"].st_size <= options.list_bytes
        store.close()

    def test_a_smaller_budget_drops_what_lies_behind_it(self, path):
        store = opened(path)
        for first in range(3):
            put(store, LARGE, prompt(LARGE, first, 12))
        store.close()
        smaller = DiskOptions(
            6 << 20, OPTIONS.segment_bytes, reserve_bytes=0, manifest_bytes=1 << 20
        )
        store = opened(path, options=smaller)
        offsets, blocks = everything(store)
        assert 0 < len(blocks) < 36
        assert set(get(store, offsets, blocks)) == {"good"}
        listed = {name: file.st_size for name, file in files(path).items()}
        assert sum(listed.values()) <= smaller.budget_bytes
        segments = [size for name, size in listed.items() if name.startswith("segment")]
        assert sum(segments) == smaller.capacity_bytes
        store.close()
        store = opened(path)
        store.check_invariants()
        assert len(everything(store)[1]) == len(blocks)
        store.close()

    def test_a_reserve_is_left_to_others(self, path):
        with pytest.raises(ConfigError, match="bytes are free"):
            opened(path, options=DiskOptions(BUDGET, reserve_bytes=1 << 60))

    def test_no_room_for_blocks(self):
        with pytest.raises(ConfigError, match="nothing for blocks"):
            DiskOptions(1 << 20)

    def test_a_full_list_of_blocks_is_no_error(self, path):
        tight = DiskOptions(BUDGET, reserve_bytes=0, manifest_bytes=40_000)
        store = opened(path, options=tight)
        results = [put(store, SMALL, prompt(SMALL, first, 12)) for first in range(30)]
        stored = [result for result in results if result[2].all()]
        assert 0 < len(stored) < 30
        assert store.off["write"] == "manifest_full"
        for offsets, blocks, _ in stored:
            assert get(store, offsets, blocks) == ["good"] * 12
        store.close()


class TestDirectory:
    def test_one_instance_at_a_time(self, path):
        store = opened(path)
        with pytest.raises(ConfigError, match="used by another kvstore"):
            opened(path)
        offsets, blocks, stored = put(store, SMALL, prompt(SMALL, 0, 12))
        assert stored.all()
        assert get(store, offsets, blocks) == ["good"] * 12
        store.close()
        opened(path).close()

    def test_a_directory_with_other_things_is_refused(self, path):
        path.mkdir()
        (path / "thesis.tex").write_text("mine")
        with pytest.raises(ConfigError, match="not made by kvstore"):
            opened(path)
        assert (path / "thesis.tex").read_text() == "mine"

    def test_the_root_of_a_file_system_may_be_used(self, path):
        (path / "lost+found").mkdir(parents=True)
        opened(path).close()
        opened(path).close()

    def test_a_file_in_its_place_is_refused(self, path):
        path.write_text("mine")
        with pytest.raises(ConfigError, match="cannot be used"):
            opened(path)

    def test_without_direct_io(self, path, caplog):
        class Buffered(FaultySystem):
            def open(self, path, flags):
                if flags & os.O_DIRECT:
                    raise OSError(errno.EINVAL, "no direct I/O here")
                return super().open(path, flags)

        store = opened(path, Buffered())
        assert not store.is_direct
        assert "no direct I/O" in caplog.text
        offsets, blocks, stored = put(store, LARGE, prompt(LARGE, 0, 12))
        assert stored.all()
        assert get(store, offsets, blocks) == ["good"] * 12
        store.close()
        store = opened(path)
        assert set(get(store, *everything(store))) == {"good"}
        store.close()

    def test_on_tmpfs(self):
        with tempfile.TemporaryDirectory(prefix="kvstore-disk-", dir="/dev/shm") as directory:
            store = opened(Path(directory) / "tier")
            offsets, blocks, stored = put(store, LARGE, prompt(LARGE, 0, 12))
            assert stored.all()
            assert get(store, offsets, blocks) == ["good"] * 12
            store.close()


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


class TestDamage:
    def filled(self, path):
        store = opened(path)
        put(store, LARGE, prompt(LARGE, 0, 12))
        put(store, SMALL, prompt(SMALL, 1, 12))
        store.close()

    def flip(self, path, offset, mask=1):
        name, place = divmod(offset, OPTIONS.segment_bytes)
        with (path / f"segment-{name:05}.kv").open("r+b") as file:
            file.seek(place)
            byte = file.read(1)[0]
            file.seek(place)
            file.write(bytes([byte ^ mask]))

    @pytest.mark.parametrize(
        ("place", "reason"),
        [(0, "magic"), (8, "version"), (20, "header"), (2000, "header"), (4096, "payload")],
    )
    def test_flipped_bytes(self, path, place, reason):
        self.filled(path)
        store = opened(path)
        offsets, blocks = everything(store)
        self.flip(path, int(offsets[3]) + place)
        verdicts = get(store, offsets, blocks)
        assert verdicts == ["good"] * 3 + [reason] + ["good"] * 20
        assert store.counts["read_blocks", reason] == 1
        assert not any(store.off.values()), "one bad block is no reason to turn the disk off"
        let_go(store, offsets, blocks)
        store.check_invariants()
        assert store.slots.used_bytes == 0
        assert store.slots.bad_bytes == slot_bytes_of(blocks[3].namespace), "set aside"
        store.close()
        store = opened(path)
        assert store.slots.bad_bytes == store.slots.used_bytes == 0
        store.close()

    def test_a_block_in_the_wrong_place(self, path):
        self.filled(path)
        store = opened(path)
        offsets, blocks = everything(store)
        size = slot_bytes_of(LARGE)
        first = path / "segment-00000.kv"
        data = bytearray(first.read_bytes())
        assert blocks[1].namespace == blocks[2].namespace == LARGE
        one, two = int(offsets[1]), int(offsets[2])
        data[one : one + size], data[two : two + size] = (
            data[two : two + size],
            data[one : one + size],
        )
        first.write_bytes(data)
        assert get(store, offsets, blocks)[:4] == ["good", "identity", "identity", "good"]
        store.close()

    @pytest.mark.parametrize("length", [0, 1, 4095, 4096, 50_000])
    def test_cut_files(self, path, length):
        self.filled(path)
        store = opened(path)
        offsets, blocks = everything(store)
        os.truncate(path / "segment-00000.kv", length)
        verdicts = get(store, offsets, blocks)
        assert len(verdicts) == 24
        ends = offsets + [slot_bytes_of(block.namespace) for block in blocks]
        for verdict, offset, end in zip(verdicts, offsets.tolist(), ends.tolist(), strict=True):
            if end <= length or offset >= OPTIONS.segment_bytes:
                assert verdict == "good"
            else:
                assert verdict in ("truncated", "payload")
        store.close()
        store = opened(path)
        assert set(get(store, *everything(store))) <= {"good", "magic", "payload"}
        _, _, stored = put(store, LARGE, prompt(LARGE, 5, 12))
        assert stored.all()
        store.close()

    def test_deleted_files(self, path):
        self.filled(path)
        (path / "segment-00000.kv").unlink()
        store = opened(path)
        offsets, blocks = everything(store)
        verdicts = get(store, offsets, blocks)
        assert "magic" in verdicts
        assert all(
            (verdict == "good") == (offset >= OPTIONS.segment_bytes)
            or offset + slot_bytes_of(block.namespace) > OPTIONS.segment_bytes
            for verdict, offset, block in zip(verdicts, offsets.tolist(), blocks, strict=True)
        )
        store.close()

    @pytest.mark.parametrize("epoch", ["DELETE", -3, 2**31 - 1, 2**63 - 1, 0.5, "'none'"])
    def test_a_manifest_without_a_number_of_openings_means_a_fresh_start(self, path, epoch):
        self.filled(path)
        with sqlite3.connect(path / "manifest.db") as connection:
            connection.execute("DELETE FROM facts WHERE name = 'epoch'")
            if epoch != "DELETE":
                with suppress(sqlite3.IntegrityError):
                    connection.execute(f"INSERT INTO facts VALUES ('epoch', {epoch})")
        connection.close()
        store = opened(path)
        assert everything(store)[1] == []
        offsets, blocks, stored = put(store, LARGE, prompt(LARGE, 3, 12))
        assert stored.all()
        assert get(store, offsets, blocks) == ["good"] * 12
        store.close()

    @pytest.mark.parametrize("kind", ["missing", "empty", "garbage", "half", "other"])
    def test_a_manifest_that_is_of_no_use_means_a_fresh_start(self, path, kind, caplog):
        self.filled(path)
        manifest = path / "manifest.db"
        if kind == "missing":
            manifest.unlink()
        elif kind == "other":
            manifest.unlink()
            with sqlite3.connect(manifest) as connection:
                connection.execute("CREATE TABLE thesis (page)")
            connection.close()
        else:
            data = manifest.read_bytes()
            manifest.write_bytes({"empty": b"", "garbage": b"x" * 9000}.get(kind, data[:5000]))
        store = opened(path)
        assert everything(store)[1] == []
        assert store.slots.used_bytes == 0
        assert kind in ("missing", "empty") or "starting empty" in caplog.text
        offsets, blocks, stored = put(store, LARGE, prompt(LARGE, 3, 12))
        assert stored.all()
        assert get(store, offsets, blocks) == ["good"] * 12
        store.close()
        store = opened(path)
        assert len(everything(store)[1]) == 12
        store.close()

    def test_flipped_bytes_of_the_manifest_never_give_wrong_blocks(self, path):
        self.filled(path)
        manifest = path / "manifest.db"
        data = manifest.read_bytes()
        rng = np.random.default_rng(3)
        used = np.flatnonzero(np.frombuffer(data, np.uint8))
        outcomes = set()
        for place in rng.choice(used, 60, replace=False).tolist():
            damaged = bytearray(data)
            damaged[place] ^= 1 << int(rng.integers(8))
            manifest.write_bytes(damaged)
            try:
                store = opened(path)
            except ConfigError:
                manifest.write_bytes(data)
                continue
            store.check_invariants()
            offsets, blocks = everything(store)
            outcomes |= set(get(store, offsets, blocks)) | {len(blocks)}
            store.close()
        assert {"good", 24} <= outcomes

    def test_a_block_that_is_listed_twice_is_there_once(self, path):
        store = opened(path)
        put(store, SMALL, prompt(SMALL, 0, 12))
        store.close()
        with sqlite3.connect(path / "manifest.db") as connection:
            connection.execute(
                "INSERT INTO blocks SELECT slot + 100, namespace, position, parent, digest, key, checksum, "
                "payload_bytes, stored_bytes, generation - 50 FROM blocks"
            )
        connection.close()
        store = opened(path)
        offsets, blocks = everything(store)
        assert get(store, offsets, blocks) == ["good"] * 12, "the newer one"
        assert store.slots.used_bytes == 12 * slot_bytes_of(SMALL)
        store.close()

    def test_rows_that_lie(self, path):
        self.filled(path)
        for change, left in [
            ("key = zeroblob(16) WHERE position = 5", {5, 12}),
            ("parent = zeroblob(16) WHERE position = 0", set()),
            ("slot = slot + 1 WHERE position = 11", None),
            ("payload_bytes = 7", set()),
            ("position = -1 WHERE position = 0", set()),
            ("namespace = 99", set()),
        ]:
            kept = (path / "manifest.db").read_bytes()
            with sqlite3.connect(path / "manifest.db") as connection:
                connection.execute(f"UPDATE blocks SET {change}")
            connection.close()
            store = opened(path)
            store.check_invariants()
            offsets, blocks = everything(store)
            verdicts = get(store, offsets, blocks)
            if left is None:
                assert "good" in verdicts
            else:
                assert len(blocks) == sum(left) or len(blocks) <= 24 // 2
                assert set(verdicts) <= {"good"}
            store.close()
            (path / "manifest.db").write_bytes(kept)


def test_numbers_that_stand_for_no_checksum_are_not_taken_for_one(path):
    store = opened(path)
    key = prompt(SMALL, 0, 3)
    blocks = list(identities(SMALL, key, checksums=[0, 5, FIRST_CHECKSUM - 1]))
    offsets = store.allocate(slot_bytes_of(SMALL), 3)
    assert store.write(offsets, blocks, contents(SMALL, key)).all()
    assert get(store, offsets, blocks) == ["good"] * 3
    assert get(store, offsets, list(identities(SMALL, key))) == ["good"] * 3
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


class TestTrouble:
    def test_writing_pauses_longer_and_longer_and_reading_goes_on(self, path):
        clock, system = FakeClock(), FaultySystem()
        store = opened(path, system, clock)
        known = put(store, SMALL, prompt(SMALL, 0, 12))

        def full(name, number):
            if name == "write":
                raise OSError(errno.ENOSPC, "full")

        system.fault = full
        tries = []
        for _ in range(400):
            calls = system.calls.count("write")
            offsets, _, stored = put(store, SMALL, prompt(SMALL, 1, 12))
            assert not stored.any()
            store.release(SMALL_SLOT, offsets)
            if system.calls.count("write") > calls:
                tries.append(clock.now_s)
            clock.advance(0.5)
        pauses = np.diff(tries)
        assert (np.diff(pauses) >= 0).all()
        assert pauses.max() >= 32.0
        assert store.off == {"read": "", "write": "no_space"}
        assert get(store, *known[:2]) == ["good"] * 12
        system.fault = None
        clock.advance(60.0)
        assert put(store, SMALL, prompt(SMALL, 1, 12))[2].all()
        assert store.off == {"read": "", "write": ""}
        store.close()

    def test_a_bad_spot_is_set_aside_and_a_dead_device_turned_off(self, path):
        clock, system = FakeClock(), FaultySystem()
        store = opened(path, system, clock)
        offsets, blocks, _ = put(store, LARGE, prompt(LARGE, 0, 12))
        bad = int(offsets[2])
        real = system.read

        def read(descriptor, buffers, offset):
            stop = offset + sum(map(len, buffers))
            if offset <= bad < stop:
                raise OSError(errno.EIO, "bad sector")
            return real(descriptor, buffers, offset)

        system.read = read
        assert get(store, offsets, blocks) == ["good"] * 2 + ["unreadable"] + ["good"] * 9
        assert store.slots.bad_bytes == slot_bytes_of(LARGE)
        system.read = real
        system.fault = lambda name, number: (_ for _ in ()).throw(OSError(errno.EIO, "dead"))
        assert get(store, offsets[3:], blocks[3:]) == ["unreadable"] * 9
        assert get(store, offsets[3:], blocks[3:]) == ["off"] * 9
        system.fault = None
        assert get(store, offsets[3:], blocks[3:]) == ["off"] * 9, "not before the pause is over"
        clock.advance(2.0)
        assert get(store, offsets[3:], blocks[3:]) == ["good"] * 9
        store.close()

    def test_a_directory_that_vanishes_and_comes_back(self, path):
        clock = FakeClock()
        store = opened(path, clock=clock)
        offsets, blocks, _ = put(store, SMALL, prompt(SMALL, 0, 12))
        path.rename(path.with_name("away"))
        fresh, _, stored = put(store, SMALL, prompt(SMALL, 1, 12))
        assert not stored.any()
        store.release(SMALL_SLOT, fresh)
        clock.advance(2.0)
        fresh, _, stored = put(store, SMALL, prompt(SMALL, 1, 12))
        assert not stored.any()
        store.release(SMALL_SLOT, fresh)
        assert store.troubles["write", "vanished"] == 2
        assert not path.exists(), "never made anew: a mount may be missing"
        assert get(store, offsets, blocks) == ["off"] * 12
        path.with_name("away").rename(path)
        clock.advance(2.0)
        assert get(store, offsets, blocks) == ["good"] * 12
        fresh, _, stored = put(store, SMALL, prompt(SMALL, 1, 12))
        assert stored.all()
        shutil.rmtree(path)
        path.mkdir()
        offset, _, stored = put(store, SMALL, prompt(SMALL, 2, 12))
        assert not stored.any()
        store.release(SMALL_SLOT, offset)
        before = max(store.slots.generations(fresh))
        clock.advance(2.0)
        newest, _, stored = put(store, SMALL, prompt(SMALL, 3, 12))
        assert stored.all()
        assert min(store.slots.generations(newest)) > before, "no generation is given twice"
        assert get(store, offsets, blocks) == ["missing"] * 12
        store.check_invariants()
        store.close()
        store = opened(path)
        assert get(store, *everything(store)) == ["good"] * 12
        store.close()

    def test_too_slow(self, path):
        clock, system = FakeClock(), FaultySystem()
        store = opened(path, system, clock)

        def slow(name, number):
            if name == "write":
                clock.advance(31.0)

        system.fault = slow
        offsets, blocks, stored = put(store, SMALL, prompt(SMALL, 0, 12))
        assert stored.all(), "late, but there"
        assert store.off["write"] == "slow"
        assert not put(store, SMALL, prompt(SMALL, 1, 12))[2].any()
        assert get(store, offsets, blocks) == ["good"] * 12
        store.close()

    def test_closed(self, path):
        store = opened(path)
        offsets, blocks, _ = put(store, SMALL, prompt(SMALL, 0, 12))
        store.close()
        store.close()
        assert not store.readable
        assert not store.writable
        assert get(store, offsets, blocks) == ["off"] * 12
        fresh, _, stored = put(store, SMALL, prompt(SMALL, 1, 12))
        assert not stored.any()
        assert not store.flush()
        for slots in (fresh, offsets):
            store.release(SMALL_SLOT, slots)
        assert store.slots.used_bytes == 0
        store.close()
        store = opened(path)
        assert get(store, *everything(store)) == ["good"] * 12, (
            "let go of after closing: still there"
        )
        store.close()

    def test_readable_and_writable_say_what_would_be_tried(self, path):
        clock, system = FakeClock(), FaultySystem()
        store = opened(path, system, clock)
        offsets, blocks, _ = put(store, SMALL, prompt(SMALL, 0, 12))
        assert store.readable
        assert store.writable
        system.fault = lambda name, number: (_ for _ in ()).throw(OSError(errno.EIO, "dead"))
        assert get(store, offsets, blocks) == ["unreadable"] * 12
        assert not store.readable
        assert not put(store, SMALL, prompt(SMALL, 1, 12))[2].any()
        assert not store.writable
        clock.advance(2.0)
        assert store.readable, "the pause is over: it may be tried"
        assert store.writable
        system.fault = None
        store.close()
