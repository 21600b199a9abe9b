"""The benchmark of the disk tier: the rows it promises, and nothing left behind."""

import json

from click.testing import CliRunner

import bench.disk
import bench.store


def test_rows_and_nothing_left_behind(tmp_path, monkeypatch):
    monkeypatch.setattr(bench.disk, "BATCH_BYTES", 8 << 20)
    monkeypatch.setattr(bench.disk, "BATCHES", 1)
    monkeypatch.setattr(bench.disk, "RESTART_BLOCKS", 1000)
    monkeypatch.setattr(bench.disk, "MEMORY_FILE_SYSTEMS", ())
    place = ["--tier", "disk", "--directory", str(tmp_path)]
    arguments = [*place, "--rounds", "1", "--output", "json"]
    result = CliRunner().invoke(bench.store.main, arguments, catch_exceptions=False)
    assert result.exit_code == 0
    document = json.loads(result.stdout)
    cases = {(row["case"], row["metric"]) for row in document["rows"]}
    assert cases >= {
        ("disk_read_256k", "rate"),
        ("disk_read_one_1m", "median"),
        ("disk_write_4m", "p99"),
    }
    assert ("restart_100k_blocks", "first hit") in cases
    assert ("restart_100k_blocks_after_kill", "first hit") in cases
    assert document["bench"] == "store"
    assert document["machine"]["tier"] == "disk"
    assert all(row["value"] > 0 for row in document["rows"])
    assert not list(tmp_path.iterdir())


def test_memory_is_no_disk(tmp_path, monkeypatch):
    monkeypatch.setattr(bench.disk, "file_system", lambda root, path: "tmpfs")
    arguments = ["--tier", "disk", "--directory", str(tmp_path)]
    result = CliRunner().invoke(bench.store.main, arguments)
    assert result.exit_code == 2
    assert "give --directory" in result.stderr
