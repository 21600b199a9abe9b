"""Rows of ``kvstore doctor`` about the disk tier."""

import os
import stat
import tempfile
from pathlib import Path

import pytest

import kvstore
from kvstore.cli import disk
from kvstore.cli.disk import disk_checks
from kvstore.host import file_system


@pytest.fixture
def place():
    with tempfile.TemporaryDirectory(prefix="kvstore-doctor-test-", dir="/var/tmp") as directory:
        yield Path(directory)


@pytest.fixture
def mounts(tmp_path):
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/mounts").write_text(
        "none / overlay rw 0 0\n/dev/a /var/lib ext4 rw 0 0\nb /var/lib/a\\040b tmpfs rw 0 0\n"
        "c /srv nfs4 rw 0 0\n"
    )
    return tmp_path


def rows(place, **settings):
    given = {"disk": "64MiB", "disk_path": str(place), "disk_reserve": "1MiB"} | settings
    return {row.check: row for row in disk_checks(Path("/"), given)}


def test_no_disk_tier_is_fine():
    (row,) = disk_checks(Path("/"), {})
    assert (row.check, row.status) == ("disk", "ok")


def test_a_directory_that_does_not_exist_yet_is_fine_and_is_not_made(place):
    told = rows(place / "new" / "tier")
    assert told["disk"].status == "ok"
    assert "64 MiB, 0 B of them there" in told["disk"].detail
    assert not list(place.iterdir())


def test_too_little_room_is_a_failure(place):
    told = rows(place, disk="7TiB")
    assert told["disk"].status == "fail"
    assert "lower disk or disk_reserve" in told["disk"].detail


def test_files_of_others_are_a_failure(place):
    (place / "letter.txt").touch()
    assert rows(place)["disk"].status == "fail"
    assert "was not made by kvstore" in rows(place)["disk"].detail
    (place / "kvstore.lock").touch()
    assert rows(place)["disk"].status == "ok"


@pytest.mark.parametrize("mode", [0o777, 0o1777, 0o770])
def test_a_directory_that_others_may_change_is_a_failure(place, mode):
    place.chmod(mode)
    row = rows(place)["disk"]
    assert row.status == "fail"
    assert f"mode {mode:04o}, so that other users may change the blocks" in row.detail
    assert "run chmod 700" in row.detail
    assert stat.S_IMODE(place.stat().st_mode) == mode


def test_one_that_others_may_read_is_fine_and_stays_as_it_is(place):
    place.chmod(0o755)
    assert rows(place)["disk"].status == "ok"
    assert stat.S_IMODE(place.stat().st_mode) == 0o755


def test_one_that_a_store_uses_is_warned_of(place):
    settings = {"disk": "64MiB", "disk_path": place, "disk_reserve": "1MiB"}
    with kvstore.open(dram="1MiB", **settings):
        row = rows(place)["disk"]
        assert (row.status, "a running kvstore uses" in row.detail) == ("warn", True)
    assert rows(place)["disk"].status == "ok"


@pytest.mark.parametrize("below", [".", "new/tier"])
def test_one_that_cannot_be_written_is_a_failure(place, monkeypatch, below):
    monkeypatch.setattr(os, "access", lambda path, mode: path != place or not mode & os.W_OK)
    row = rows(place / below)["disk"]
    assert (row.status, f"{place} cannot be written to" in row.detail) == ("fail", True)


def test_what_is_there_need_not_be_free(place):
    (place / "kvstore.lock").touch()
    (place / "segment-00000.kv").write_bytes(bytes(1 << 20))
    assert "1 MiB of them there" in rows(place)["disk"].detail


def test_a_file_is_no_directory(place):
    (place / "tier").touch()
    assert rows(place / "tier")["disk"].status == "fail"


@pytest.mark.parametrize(("works", "status"), [(True, "ok"), (False, "warn")])
def test_direct_io_is_tried(place, monkeypatch, works, status):
    monkeypatch.setattr(disk, "direct_io_works", lambda *_: works)
    assert rows(place)["disk direct I/O"].status == status


def test_what_cannot_be_written_is_a_failure(place, monkeypatch):
    def refuse(*_):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(disk, "direct_io_works", refuse)
    row = rows(place)["disk direct I/O"]
    assert (row.status, "Permission denied" in row.detail) == ("fail", True)


@pytest.mark.parametrize(
    ("settings", "word"),
    [
        ({"disk_path": "relative"}, "absolute"),
        ({"disk_path": None}, "has no place: set disk_path"),
        ({"disk": None}, "disk_path is set and disk is 0"),
        ({"disk": "1MiB"}, "leaves nothing for blocks"),
    ],
)
def test_settings_that_cannot_be_used_are_a_failure(place, settings, word):
    (row,) = rows(place, **settings).values()
    assert row.status == "fail"
    assert word in row.detail


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("/srv/x/y", "nfs4"),
        ("/var/lib/kvstore", "ext4"),
        ("/var/lib/a b/c", "tmpfs"),
        ("/var/library", "overlay"),
    ],
)
def test_the_file_system_is_that_of_the_longest_mount(mounts, path, kind):
    assert file_system(mounts, Path(path)) == kind


@pytest.mark.parametrize(("kind", "status"), [("tmpfs", "warn"), ("nfs4", "warn"), ("xfs", "ok")])
def test_memory_and_remote_file_systems_are_warned_of(kind, status):
    assert disk.file_system_row(Path("/x"), kind).status == status
