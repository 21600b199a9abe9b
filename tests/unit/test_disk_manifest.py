"""The list of the blocks on disk: its bounds, whatever is put on it, and what lasts."""

import errno
import shutil
import sqlite3

import numpy as np
import pytest

from kvstore.namespace import KVLayout, Namespace
from kvstore.testing import FakeClock
from kvstore.testing.disk import FaultySystem, identities
from kvstore.tiers.disk import DiskOptions, slot_bytes_of
from kvstore.tiers.disk.listing import MAX_PART_BLOCKS, batches
from kvstore.tiers.disk.manifest import LOG_BYTES, MAX_BATCH_BYTES, MAX_BATCH_ROWS, Manifest, Row
from tests.unit.disk_blocks import BUDGET, SMALL, SMALL_SLOT, everything, opened, prompt, put

LAYOUT = KVLayout(1, 1, 8, "float16", 4)
KEY = np.arange(4, dtype="<i4").tobytes()


class Watching(FaultySystem):
    """Knows how long the log ever was."""

    log_bytes = 0

    def __init__(self, path):
        super().__init__()
        self._log = path / "manifest.db-wal"

    def commit(self, connection):
        super().commit(connection)
        self.log_bytes = max(self.log_bytes, self._log.stat().st_size)


def write_one(store, namespace):
    """Write a block of ``namespace``; return its slot, and whether it was stored."""
    offsets = store.allocate(SMALL_SLOT, 1)
    payload = np.zeros(LAYOUT.block_bytes, np.uint8)
    ((stored,), _) = store.write(offsets, identities(namespace, KEY), [payload])
    return offsets, bool(stored)


class TestLog:
    @pytest.mark.parametrize("key_bytes", [64, 200, 1024, 4062])
    def test_rows_that_each_split_a_leaf_of_their_own(self, path, key_bytes):
        path.mkdir()
        system = Watching(path)
        manifest = Manifest(path, 4096, 1 << 28, system)
        count = min(MAX_BATCH_ROWS, MAX_BATCH_BYTES // key_bytes)
        gap = 4 * max(6, 4000 // (key_bytes + 90))  # slots of four full leaves

        def rows(slots):
            return [
                Row(slot, 1, 0, *[bytes(16)] * 2, bytes(key_bytes), 1, 1, 1, 1) for slot in slots
            ]

        for start in range(0, 2 * gap * count, count):  # in order: the leaves are full
            manifest.insert(rows(range(2 * start, 2 * (start + count), 2)), lasting=True)
        for place in range(4):  # the parts of a batch
            first = gap + 1 + 2 * place * (gap // 4)
            manifest.insert(rows(range(first, 2 * gap * count, 2 * gap)), lasting=place == 3)
        assert 2 * count * 4096 < system.log_bytes <= LOG_BYTES
        manifest.close()

    def test_many_long_namespaces(self, path):
        system = Watching(path)
        options = DiskOptions(64 << 20, reserve_bytes=0, manifest_bytes=32 << 20)
        store = opened(path, system, options=options)
        names = [Namespace(b"long", LAYOUT, salt=f"{n:03}" + "s" * 60_000) for n in range(100)]
        blocks = [block for name in names for block in identities(name, KEY)]
        offsets = store.allocate(SMALL_SLOT, 100)
        assert store.write(
            offsets, blocks, [np.zeros(LAYOUT.block_bytes, np.uint8)] * 100
        ).stored.all()
        store.release(SMALL_SLOT, offsets)
        store.close()
        store = opened(path, system, options=options)
        assert (1 << 18) < system.log_bytes <= LOG_BYTES
        store.close()

    def test_parts_have_a_limit_of_rows_and_bytes(self):
        rng = np.random.default_rng(1)
        names = [
            Namespace(b"n", LAYOUT, salt="s" * int(length))
            for length in rng.integers(0, 60_000, 20)
        ]
        blocks = [identities(names[at], KEY)[0] for at in rng.integers(0, 20, 2000)]
        blocks += [identities(names[0], KEY)[0]] * 1000
        parts = list(batches(blocks, range(3000)))
        assert [index for part in parts for index in part] == list(range(3000))
        assert max(map(len, parts)) == MAX_PART_BLOCKS
        for part in parts:
            salts = {len(blocks[index].namespace.salt) for index in part}
            assert sum(salts) + len(part) * len(KEY) <= MAX_BATCH_BYTES


class TestNamespaces:
    def test_those_that_nobody_uses_make_room(self, path):
        options = DiskOptions(BUDGET, reserve_bytes=0, manifest_bytes=64 << 10)
        store = opened(path, options=options)
        kept = Namespace(b"kept", LAYOUT)
        _, stored = write_one(store, kept)
        assert stored
        for number in range(60):
            offsets, stored = write_one(
                store, Namespace(b"m", LAYOUT, salt=f"{number}" + "s" * 3000)
            )
            assert stored, f"salt {number}"
            store.release(SMALL_SLOT, offsets)
        store.close()
        store = opened(path, options=options)
        assert [found.namespace for found in store.recover()] == [kept]
        store.close()

    def test_rows_find_room_where_namespaces_were(self, path):
        options = DiskOptions(BUDGET, reserve_bytes=0, manifest_bytes=64 << 10)
        store = opened(path, options=options)
        for number in range(9):
            offsets, stored = write_one(
                store, Namespace(b"m", LAYOUT, salt=f"{number}" + "s" * 3000)
            )
            assert stored
            store.release(SMALL_SLOT, offsets)
        written = [put(store, SMALL, prompt(SMALL, first, 12))[2].all() for first in range(12)]
        assert all(written)
        store.close()
        store = opened(path, options=options)
        assert len(everything(store)[1]) == 12 * 12
        store.close()

    @pytest.mark.parametrize("max_rows", [1, MAX_BATCH_ROWS])
    @pytest.mark.parametrize("unused", range(3, 11))
    def test_those_of_the_batch_itself_stay(self, path, unused, max_rows, monkeypatch):
        """Whether the list is full before or after they got their numbers, in whatever transaction."""
        monkeypatch.setattr("kvstore.tiers.disk.listing.MAX_BATCH_ROWS", max_rows)
        options = DiskOptions(BUDGET, reserve_bytes=0, manifest_bytes=64 << 10)
        store = opened(path, options=options)
        mine = Namespace(b"mine", KVLayout(1, 1, 1, "int8", 1000))
        size = slot_bytes_of(mine)
        offsets = store.allocate(size, 1)
        key = np.arange(1000, dtype="<i4").tobytes()
        assert store.write(offsets, identities(mine, key), [np.zeros(2000, np.uint8)]).stored.all()
        store.release(size, offsets)
        for number in range(unused):
            offsets, stored = write_one(
                store, Namespace(b"m", LAYOUT, salt=f"{number}" + "s" * 3000)
            )
            assert stored
            store.release(SMALL_SLOT, offsets)
        other = Namespace(b"other", mine.layout, salt="s" * 3000)
        blocks = [*identities(mine, key * 3), *identities(other, key * 2)]
        offsets = store.allocate(size, 5)
        assert store.write(offsets, blocks, [np.zeros(2000, np.uint8)] * 5).stored.all()
        store.close()
        store = opened(path, options=options)
        assert {found.namespace: len(found) for found in store.recover()} == {mine: 3, other: 2}
        store.close()

    def test_a_namespace_that_is_too_long_is_refused(self, path):
        store = opened(path)
        offsets, stored = write_one(store, Namespace(b"huge", LAYOUT, salt="s" * 66_000))
        assert not stored
        assert store.writable, "nothing is wrong with the disk"
        assert store.counts["refused_blocks",] == store.counts["unwritten_blocks",] == 1
        store.release(SMALL_SLOT, offsets)
        assert write_one(store, Namespace(b"long", LAYOUT, salt="s" * 65_000))[1]
        store.close()


class TestLasting:
    def test_flush_also_settles_what_was_deleted_before(self, path):
        clock, system = FakeClock(), FaultySystem()
        store = opened(path, system, clock)
        offsets, _, _ = put(store, SMALL, prompt(SMALL, 0, 12))
        store.release(SMALL_SLOT, offsets)

        def fault(name, number):
            if name == "write":
                raise OSError(errno.ENOSPC, "full")

        system.fault = fault
        assert not put(store, SMALL, prompt(SMALL, 1, 12))[2].any(), "but the rows are deleted"
        assert store.flush()
        copy = path.parent / "copy.db"
        shutil.copy(
            path / "manifest.db", copy
        )  # without the log, which may have been in memory only
        connection = sqlite3.connect(copy)
        assert connection.execute("SELECT count(*) FROM blocks").fetchone() == (0,)
        connection.close()
        store.close()
