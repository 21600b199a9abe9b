"""The directory of the disk tier: what it may take, and whose it is."""

import errno
import os
import tempfile
from pathlib import Path

import numpy as np
import pytest

from kvstore.errors import ConfigError
from kvstore.namespace import KVLayout, Namespace
from kvstore.testing import FakeClock
from kvstore.testing.disk import FaultySystem, identities
from kvstore.tiers.disk import DiskOptions, slot_bytes_of
from kvstore.tiers.disk.manifest import LOG_BYTES
from tests.unit.disk_blocks import (
    BUDGET,
    LARGE,
    OPTIONS,
    SMALL,
    SMALL_SLOT,
    everything,
    files,
    get,
    opened,
    prompt,
    put,
)


class TestBudget:
    def test_everything_in_the_directory_counts(self, path):
        store = opened(path)
        taken = []
        while len(offsets := store.allocate(slot_bytes_of(SMALL), 12)) == 12:
            blocks = identities(SMALL, prompt(SMALL, 1000 + len(taken), 12))
            assert store.write(offsets, blocks, [np.zeros(256, np.uint8)] * 12).stored.all()
            taken.append(offsets)
            listed = files(path)
            assert (
                sum(max(file.st_size, file.st_blocks * 512) for file in listed.values()) <= BUDGET
            )
        assert len(taken) > 20
        assert {name for name in listed if not name.startswith("segment")} == {
            *("kvstore.lock", "manifest.db", "manifest.db-wal")
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
            blocks = identities(namespace, key)
            offsets = rng.permutation(store.allocate(slot_bytes_of(namespace), 600))
            payloads = [np.zeros(layout.block_bytes, np.uint8)] * 600
            assert store.write(offsets, blocks, payloads).stored.all()
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

    def test_segments_grow_only_when_the_list_has_shrunk(self, path):
        class Watching(FaultySystem):
            most = 0

            def _step(self, name):
                sizes = [max(file.st_size, file.st_blocks * 512) for file in files(path).values()]
                self.most = max(self.most, sum(sizes))
                return super()._step(name)

        budget = 32 << 20
        store = opened(path, options=DiskOptions(budget, reserve_bytes=0, manifest_bytes=16 << 20))
        namespace = Namespace(b"keys", KVLayout(1, 1, 1, "int8", 4096))
        key = np.arange(4096 * 400, dtype="<i4").tobytes()
        blocks, size = identities(namespace, key), slot_bytes_of(namespace)
        payloads = [np.zeros(namespace.layout.block_bytes, np.uint8)] * 400
        assert store.write(store.allocate(size, 400), blocks, payloads).stored.all()
        store.close()
        system = Watching()
        store = opened(
            path, system, options=DiskOptions(budget, reserve_bytes=0, manifest_bytes=1 << 20)
        )
        assert everything(store)[1] == [], "the list is too long for its new place"
        store.close()
        assert budget - (5 << 20) < system.most <= budget

    def test_a_reserve_is_left_to_others(self, path):
        with pytest.raises(ConfigError, match=r"disk_reserve .*: lower disk"):
            opened(path, options=DiskOptions(BUDGET, reserve_bytes=1 << 60))

    def test_only_its_own_files_count_as_there(self, path):
        class Small(FaultySystem):
            def free_bytes(self, path):
                return BUDGET - 4096

        opened(path).close()
        opened(path, Small()).close()
        for file in path.iterdir():
            if file.name != "kvstore.lock":
                file.unlink()
        (path / "stray").write_bytes(bytes(1 << 20))
        with pytest.raises(ConfigError, match=r"disk_reserve .*: lower disk"):
            opened(path, Small())

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

    def test_a_directory_with_other_things_is_refused_and_left_as_it_is(self, path):
        path.mkdir()
        path.chmod(0o755)
        (path / "thesis.tex").write_text("mine")
        with pytest.raises(ConfigError, match="not made by kvstore"):
            opened(path)
        assert (path / "thesis.tex").read_text() == "mine"
        assert path.stat().st_mode & 0o777 == 0o755

    def test_the_root_of_a_file_system_may_be_used(self, path):
        (path / "lost+found").mkdir(parents=True)
        opened(path).close()
        opened(path).close()

    def test_a_file_in_its_place_is_refused(self, path):
        path.write_text("mine")
        with pytest.raises(ConfigError, match="tier is a file: give a directory"):
            opened(path)
        with pytest.raises(ConfigError, match="used: Not a directory: choose another disk_path"):
            opened(path / "below")

    def test_one_that_cannot_be_is_refused_with_a_remedy(self, path):
        path.symlink_to(path.parent / "nowhere")
        with pytest.raises(ConfigError, match=r"tier cannot be used: .*: choose another disk_path"):
            opened(path)

    def test_a_read_only_file_system_is_refused_with_a_remedy(self, path):
        class ReadOnly(FaultySystem):
            def make_directory(self, path):
                raise OSError(errno.EROFS, "Read-only file system")

        with pytest.raises(ConfigError, match="used: Read-only file system: choose another"):
            opened(path, ReadOnly())

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

    def test_one_that_others_may_change_is_refused(self, path):
        for mode in (0o770, 0o707, 0o777):
            path.mkdir(exist_ok=True)
            path.chmod(mode)
            with pytest.raises(ConfigError, match="run chmod 700"):
                opened(path)
            assert not list(path.iterdir())

    def test_one_of_another_user_is_refused(self, path):
        class Foreign(FaultySystem):
            def stat(self, path):
                fields = list(super().stat(path))
                fields[4] += 1
                return os.stat_result(fields)

        path.mkdir()
        with pytest.raises(ConfigError, match=f"belongs to user {os.geteuid() + 1}.*run chown"):
            opened(path, Foreign())
        assert not list(path.iterdir())

    def test_one_that_others_may_read_is_hidden_from_them(self, path):
        path.mkdir()
        path.chmod(0o755)
        opened(path).close()
        for file in path.iterdir():
            file.chmod(0o644)
        path.chmod(0o755)
        store = opened(path)
        put(store, SMALL, prompt(SMALL, 0, 12))
        assert path.stat().st_mode & 0o777 == 0o700
        assert {file.st_mode & 0o777 for file in files(path).values()} == {0o600}
        store.close()

    def test_a_lock_of_somebody_else_does_not_make_it_ours(self, path):
        path.mkdir()
        (path / "lock").touch()
        with pytest.raises(ConfigError, match="not made by kvstore"):
            opened(path)

    def test_files_with_like_names_are_left_alone(self, path):
        opened(path).close()
        strays = ["segment-1.kv", "segment-00099.kv.old", "segment-copy.kv", "segment-000099.kv"]
        for name in strays:
            (path / name).touch()
        (path / "segment-00099.kv").touch()
        opened(path).close()
        assert set(strays) < files(path).keys()
        assert "segment-00099.kv" not in files(path), "of a larger budget"

    def test_its_name_lasts(self, path):
        class Watching(FaultySystem):
            synced = ()

            def sync_directory(self, path):
                super().sync_directory(path)
                self.synced += ((path, tuple(sorted(files(path)))),)

        system = Watching()
        place = path / "below" / "tier"
        store = opened(place, system)
        assert [synced for synced, _ in system.synced] == [
            *(path / "below", path, path.parent, place)
        ]
        assert {"kvstore.lock", "manifest.db", "segment-00000.kv"} <= set(system.synced[-1][1])
        store.close()

    def test_a_file_system_that_cannot_allocate_gets_zeros(self, path):
        class Old(FaultySystem):
            def allocate(self, descriptor, num_bytes):
                raise OSError(errno.EINVAL, "as posix_fallocate does with direct I/O")

        store = opened(path, Old())
        listed = files(path)
        segments = [file for name, file in listed.items() if name.startswith("segment")]
        assert sum(file.st_size for file in segments) == OPTIONS.capacity_bytes
        assert sum(file.st_blocks * 512 for file in segments) >= OPTIONS.capacity_bytes
        assert put(store, LARGE, prompt(LARGE, 0, 12))[2].all()
        store.close()
        store = opened(path, Old())
        assert get(store, *everything(store)) == ["good"] * 12, "filled once"
        store.close()

    def test_a_manifest_that_was_exchanged_is_noticed(self, path):
        clock = FakeClock()
        store = opened(path, clock=clock)
        offsets, blocks, _ = put(store, SMALL, prompt(SMALL, 0, 12))
        (path / "manifest.db").unlink()
        fresh, _, stored = put(store, SMALL, prompt(SMALL, 1, 12))
        assert not stored.any(), "nobody would find them again"
        store.release(SMALL_SLOT, fresh)
        assert get(store, offsets, blocks) == ["good"] * 12
        clock.advance(2.0)
        assert put(store, SMALL, prompt(SMALL, 2, 12))[2].all()
        store.close()
        store = opened(path)
        firsts = {np.frombuffer(block.key, "<i4")[0] for block in everything(store)[1]}
        assert 1_000_002 in firsts
        store.close()

    @pytest.mark.parametrize("gib", [1, 256, 300, 1024, 8000])
    def test_a_large_one_has_few_files(self, gib):
        options = DiskOptions(gib << 30)
        assert -(-options.capacity_bytes // options.file_bytes) <= 256
        assert options.file_bytes % (1 << 30) == 0
