"""Whether a directory can be a disk tier, as rows for ``kvstore doctor``."""

from __future__ import annotations

import os
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from kvstore.assembly import disk_options
from kvstore.cli.host import Check
from kvstore.config import load_settings
from kvstore.errors import ConfigError
from kvstore.host import file_system
from kvstore.sizes import size
from kvstore.tiers.disk.files import direct_io_works
from kvstore.tiers.disk.lock import check_directory, is_in_use
from kvstore.tiers.disk.system import System

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kvstore.config import Settings

MEMORY_FILE_SYSTEMS = ("tmpfs", "ramfs", "devtmpfs")
REMOTE_FILE_SYSTEMS = ("nfs", "nfs4", "cifs", "smb3", "9p", "ceph", "fuse.sshfs")


def disk_checks(root: Path, arguments: Mapping[str, object]) -> list[Check]:
    """Return the checks of the disk tier that ``arguments``, environment and settings file ask for.

    Args:
        root: where the list of mounts is read, normally ``/``.
        arguments: settings by name; those that are None count as not given.
    """
    try:
        settings = load_settings(arguments)
        disk_options(settings)
    except ConfigError as error:
        return [Check("settings", "fail", str(error))]
    if settings.disk_path is None:
        return [Check("disk", "ok", "no disk tier: disk and disk_path are not set")]
    place = _existing(settings.disk_path)
    if not place.is_dir():
        return [Check("disk", "fail", f"{place} is no directory: choose another disk_path")]
    return [
        directory(settings.disk_path, place) or space(settings, place),
        file_system_row(settings.disk_path, file_system(root, place)),
        direct_io(place),
    ]


def directory(path: Path, place: Path) -> Check | None:
    """Say why a store would refuse ``path``; None where it would not. ``place`` is it, or what is above it."""
    try:
        if place == path:
            check_directory(path, System())
            if is_in_use(path):
                detail = f"a running kvstore uses {path}: another one needs a directory of its own"
                return Check("disk", "warn", detail)
        if not os.access(place, os.W_OK | os.X_OK):
            return Check("disk", "fail", f"{place} cannot be written to: choose another disk_path")
    except (ConfigError, OSError) as error:
        return Check("disk", "fail", str(error))
    return None


def space(settings: Settings, place: Path) -> Check:
    """Compare what the tier will take with what is free; ``place`` is the directory or one above it."""
    figures = os.statvfs(place)
    free = figures.f_bavail * figures.f_frsize
    path = settings.disk_path
    there = _bytes_there(path) if path is not None and place == path else 0
    needed = max(0, settings.disk - there) + settings.disk_reserve
    detail = f"{path}: {size(settings.disk)}, {size(there)} of them there, {size(free)} free"
    if needed > free:
        return Check(
            "disk", "fail", f"{detail}; {size(needed)} are needed: lower disk or disk_reserve"
        )
    return Check("disk", "ok", detail)


def file_system_row(path: Path, kind: str) -> Check:
    """Report the file system of the tier: one in memory keeps nothing, a remote one can hang."""
    name = "disk file system"
    if kind in MEMORY_FILE_SYSTEMS:
        return Check(name, "warn", f"{kind}: that is memory; choose a disk_path on a disk")
    if kind in REMOTE_FILE_SYSTEMS:
        return Check(
            name, "warn", f"{kind}: calls can hang with the network; use a local disk for {path}"
        )
    return Check(name, "ok", kind)


def direct_io(place: Path) -> Check:
    """Try direct I/O with a page in a directory that is made in ``place`` for a moment."""
    name = "disk direct I/O"
    try:
        with TemporaryDirectory(prefix="kvstore-doctor-", dir=place) as trial:
            works = direct_io_works(Path(trial), System())
    except OSError as error:
        return Check(name, "fail", f"{place} cannot be written to: {error.strerror or error}")
    if works:
        return Check(name, "ok", "works")
    detail = "does not work here: blocks also take memory in the page cache, and cost one more copy"
    return Check(name, "warn", detail)


def _existing(path: Path) -> Path:
    """Return ``path``, or the nearest directory above it that exists."""
    return next(place for place in (path, *path.parents) if place.exists())


def _bytes_there(path: Path) -> int:
    return sum(file.stat().st_blocks * 512 for file in path.iterdir() if file.is_file())
