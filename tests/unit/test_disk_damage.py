"""Files of the disk tier that were changed by others: a miss is all that this can cause."""

import os
import sqlite3
from contextlib import suppress

import numpy as np
import pytest

from kvstore.errors import ConfigError
from kvstore.tiers.disk import slot_bytes_of
from tests.unit.disk_blocks import (
    LARGE,
    OPTIONS,
    SMALL,
    everything,
    get,
    let_go,
    opened,
    prompt,
    put,
)


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
