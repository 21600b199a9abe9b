"""An open directory of a disk tier: lock, segments and manifest together, within one budget of bytes.

The budget covers everything that lies in the directory: of ``budget_bytes`` the manifest may take
``manifest_bytes`` (a 64th and 1 MiB by default) and its log ``LOG_BYTES``, the lock and the trial of direct
I/O get a page, and the rest, in whole pages, are the segments: headers and payloads.
"""

from __future__ import annotations

import errno
import logging
import sqlite3
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np

from kvstore.errors import ConfigError
from kvstore.sizes import size, typed_size
from kvstore.tiers.arena import ALIGNMENT, MAX_TIER_BYTES
from kvstore.tiers.disk import manifest as manifests
from kvstore.tiers.disk.files import Segments, index_of, try_page
from kvstore.tiers.disk.lock import LOCK_NAME, lock_directory
from kvstore.tiers.disk.manifest import LOG_BYTES, MAX_BATCH_ROWS, Manifest
from kvstore.tiers.disk.recovery import recover

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from kvstore.tiers.disk.recovery import RecoveredNamespace
    from kvstore.tiers.disk.system import System

logger = logging.getLogger(__name__)

MIB = 1 << 20
GIB = 1 << 30
MAX_BUDGET_BYTES: Final = MAX_TIER_BYTES + ALIGNMENT
"""8 TiB, of which lists and logs always take more than a page."""
MAX_SEGMENTS: Final = 256
"""Every file has a descriptor, and a process often has 1,024."""
_USELESS: Final = (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_ERROR, None)
"""Codes of a manifest that is damaged or not ours (None: we found it); others are the device's fault."""


@dataclass(frozen=True)
class DiskOptions:
    """What a disk tier may take, and how it works."""

    budget_bytes: int
    """All files of the directory together."""
    segment_bytes: int = GIB
    """Length of a file; of 2, 4, … times as much where there would be more than ``MAX_SEGMENTS``."""
    reserve_bytes: int = GIB
    """What must stay free on the file system when the budget is used up."""
    manifest_bytes: int = 0
    """What the manifest's main file may take; 0: a 64th of the budget and 1 MiB."""
    threads: int = 4
    """Calls to the device at the same time."""
    slow_s: float = 30.0
    """A batch that takes longer than this, and 0.1 s for each MiB, turns the disk off."""

    def __post_init__(self) -> None:
        """Refuse what leaves no room for blocks, and what the index cannot number."""
        if self.segment_bytes < ALIGNMENT or self.segment_bytes % ALIGNMENT:
            raise ConfigError(
                f"segment_bytes={self.segment_bytes} must be a positive multiple of {ALIGNMENT}"
            )
        if self.threads < 1:
            raise ConfigError(f"threads={self.threads}: at least one is needed")
        if self.capacity_bytes < ALIGNMENT:
            raise ConfigError(
                f"disk={typed_size(self.budget_bytes)} leaves nothing for blocks: the list of blocks alone "
                f"takes {size(self.budget_bytes - self.capacity_bytes)}; give it 6MiB or more"
            )
        if self.budget_bytes > MAX_BUDGET_BYTES:
            raise ConfigError(
                f"disk={typed_size(self.budget_bytes)}: at most {typed_size(MAX_BUDGET_BYTES)}"
            )

    @property
    def list_bytes(self) -> int:
        """What the manifest's main file may take."""
        return self.manifest_bytes or self.budget_bytes // 64 + MIB

    @property
    def file_bytes(self) -> int:
        """Length of the files with slots."""
        num_bytes = self.segment_bytes
        while num_bytes * MAX_SEGMENTS < self.capacity_bytes:
            num_bytes *= 2
        return num_bytes

    @property
    def capacity_bytes(self) -> int:
        """What is left for slots: whole pages."""
        return (
            (self.budget_bytes - self.list_bytes - LOG_BYTES - ALIGNMENT) // ALIGNMENT * ALIGNMENT
        )


class Directory:
    """Everything that is open. Not thread-safe, but for ``segments``.

    ``manifest`` may be closed after :meth:`reopen_manifest` has failed: every call of it fails then.
    """

    def __init__(self, path: Path, options: DiskOptions, system: System) -> None:
        """Lock, and make or open the files; the directory itself must exist.

        A manifest that is missing, damaged, or made for other files is replaced by an empty one: what the
        segments hold is forgotten then.

        Raises:
            ConfigError: it belongs to another instance or user, or is not ours.
            OSError, sqlite3.Error: the file system refuses; nothing stays open.
        """
        self.path = path
        self._system = system
        self._options = options
        self._lock = lock_directory(path, system)
        with ExitStack() as closing:
            closing.callback(self._unlock)
            self._lock_identity = self._identity(LOCK_NAME)
            self._check_room()
            self._open_manifest()  # first: one that is too large leaves before the segments grow
            closing.callback(self._close_manifest)
            self.segments = Segments(path, options.capacity_bytes, options.file_bytes, system)
            closing.callback(self.segments.close)
            system.sync_directory(path)
            self._closing = closing.pop_all()

    def check_place(self) -> None:
        """Raise OSError (``ENOENT``) when the files are no longer those at the path."""
        here = self._identity(LOCK_NAME), self._identity(manifests.NAME)
        if here != (self._lock_identity, self._manifest_identity):
            raise FileNotFoundError(errno.ENOENT, "another directory has taken its place")

    def is_here(self) -> bool:
        """Whether the path still leads to it, and not to another directory that may be used instead.

        Raises:
            OSError: the path leads nowhere (``ENOENT``), also when it leads to an empty place on another
                device: a mount is missing.
        """
        place = self._system.stat(self.path)
        try:
            return self._identity(LOCK_NAME) == self._lock_identity
        except FileNotFoundError:
            if place.st_dev != self._lock_identity[0]:
                raise
            return False

    def is_deleted(self) -> bool:
        """Whether its lock has no name any more. Raises OSError."""
        return not self._system.num_links(self._lock)

    def can_write(self) -> bool:
        """Whether a page can be written to a file of its own."""
        with suppress(OSError):
            return try_page(self.path, self._system)
        return False

    def reopen_manifest(self) -> None:
        """Open the manifest anew, or make it. Raises OSError, ``sqlite3.Error``: it is closed now."""
        self._close_manifest()
        self._open_manifest()

    def recover(self) -> list[RecoveredNamespace]:
        """Return the blocks of the manifest, and delete those of its rows that are of no use.

        Raises:
            OSError, sqlite3.Error: it failed; nothing changes for the next try.
        """
        rows, namespaces = self.manifest.rows(), self.manifest.namespaces()
        found = recover(rows, namespaces, self._options.capacity_bytes)
        kept = [block.offsets for block in found]
        slots = np.fromiter((row[0] for row in rows), np.int64, len(rows)) * ALIGNMENT
        useless = np.setdiff1d(slots, np.concatenate(kept) if kept else slots[:0])
        if len(useless):
            logger.warning("disk tier %s: %d rows are of no use", self.path, len(useless))
            self.delete(useless.tolist(), lasting=True)
        used = {block.namespace.digest for block in found}
        unused = [number for number, (digest, _) in namespaces.items() if digest not in used]
        self.manifest.forget_namespaces(unused)
        return found

    def generations(self) -> dict[int, int]:
        """Return the offset and generation of every row. Raises ``sqlite3.Error``."""
        return {row[0] * ALIGNMENT: row[9] for row in self.manifest.rows()}

    def delete(self, offsets: Iterable[int], *, lasting: bool) -> None:
        """Delete the rows of the slots at ``offsets``; see :meth:`Manifest.delete`."""
        pages = [manifests.page_of(offset) for offset in offsets]
        for start in range(0, len(pages), MAX_BATCH_ROWS):
            self.manifest.delete(pages[start : start + MAX_BATCH_ROWS], lasting=lasting)
        if lasting:
            self.manifest.settle()

    def close(self) -> None:
        """Close everything; the lock last."""
        self._closing.close()

    def _close_manifest(self) -> None:
        self.manifest.close()

    def _unlock(self) -> None:
        with suppress(OSError):
            self._system.close(self._lock)

    def _identity(self, name: str) -> tuple[int, int]:
        status = self._system.stat(self.path / name)
        return status.st_dev, status.st_ino

    def _check_room(self) -> None:
        there = sum(
            self._system.stat(file).st_blocks * 512
            for file in self.path.iterdir()
            if index_of(file.name) is not None or file.name.startswith(manifests.NAME)
        )
        needed = self._options.budget_bytes - there + self._options.reserve_bytes
        free = self._system.free_bytes(self.path)
        if needed > free:
            raise OSError(
                errno.ENOSPC,
                f"{size(free)} are free, {size(needed)} are needed (disk {size(self._options.budget_bytes)}, "
                f"{size(there)} of them there, disk_reserve {size(self._options.reserve_bytes)}): "
                "lower disk or disk_reserve",
            )

    def _open_manifest(self) -> None:
        manifest = self._usable_manifest()
        try:
            self.generation = manifest.next_epoch() << 32
            self._manifest_identity = self._identity(manifests.NAME)
        except BaseException:
            manifest.close()
            raise
        self.manifest = manifest

    def _usable_manifest(self) -> Manifest:
        arguments = (
            self.path,
            self._options.file_bytes,
            self._options.list_bytes,
            self._system,
        )
        try:
            return Manifest(*arguments)
        except sqlite3.DatabaseError as error:
            code = getattr(error, "sqlite_errorcode", None)
            if code is not None and code & 0xFF not in _USELESS:
                raise
            logger.error(  # noqa: TRY400  (the message says it all)
                "disk tier %s: starting empty, since the list of its blocks cannot be used: %s",
                self.path,
                error,
            )
        manifests.remove(self.path, self._system)
        return Manifest(*arguments)
