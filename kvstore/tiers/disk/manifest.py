"""The list of what a disk directory holds: SQLite, one row a block. Read once, when the store opens.

The header of a block on disk decides what it is; the manifest only saves reading all headers at the
start. A row is written after its block is on the device, and deleted before its slot is written again.

SQLite runs in WAL mode. A transaction that lasts is committed with ``synchronous=FULL``, which flushes the
log, and with it all transactions before. Of those that list the blocks of one batch only the last one does:
when a block is reported as stored, its row has reached the device. The others, and those that delete rows or
number namespaces, are committed with ``NORMAL``: the death of the process cannot undo them, but loss of power
can, from some transaction on. Then rows may be left for slots that hold something else by now. The header
tells when such a block is read, by its generation, which nobody can guess.

Not thread-safe: the store calls it under a lock of its own.
"""

from __future__ import annotations

import os
import sqlite3
from contextlib import closing, contextmanager, suppress
from typing import TYPE_CHECKING, NamedTuple

from kvstore.tiers.arena import ALIGNMENT

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence
    from pathlib import Path

    from kvstore.tiers.disk.system import System

NAME = "manifest.db"
_READ_WRITE_CREATE = os.O_RDWR | os.O_CREAT
VERSION = 1
PAGE_BYTES = 4096
LAST_EPOCH = 2**31 - 1
WAL_PAGES = 128
"""Pages of the log after which it is written back."""
MAX_BATCH_ROWS = 128
MAX_BATCH_BYTES = 256 << 10
"""Of one transaction: keys, and encoded namespaces, each of which counts as ``PAGE_BYTES`` at least."""
MAX_NAMESPACE_BYTES = 64 << 10
LOG_BYTES = 4 << 20
"""Enough for the log, which has 1,018 frames of a page and 24 bytes: ``WAL_PAGES``, and one transaction.

A row changes up to five pages of its tree (three neighbours are balanced, and become four or five). What does
not fit there has pages of its own: fewer than 128, of ``MAX_BATCH_BYTES``. All that makes less than 900.
"""

_SCHEMA = """
CREATE TABLE facts (name TEXT PRIMARY KEY, value INTEGER NOT NULL) STRICT, WITHOUT ROWID;
CREATE TABLE namespaces (id INTEGER PRIMARY KEY, digest BLOB NOT NULL UNIQUE, encoded BLOB NOT NULL) STRICT;
CREATE TABLE blocks (
    slot INTEGER PRIMARY KEY,
    namespace INTEGER NOT NULL,
    position INTEGER NOT NULL,
    parent BLOB NOT NULL,
    digest BLOB NOT NULL,
    key BLOB NOT NULL,
    checksum INTEGER NOT NULL,
    payload_bytes INTEGER NOT NULL,
    stored_bytes INTEGER NOT NULL,
    generation INTEGER NOT NULL
) STRICT;
"""
_SIGN = 1 << 63


class Row(NamedTuple):
    """One block. ``slot`` is its page number, ``namespace`` the number that :meth:`Manifest.names` gave."""

    slot: int
    namespace: int
    position: int
    parent: bytes
    digest: bytes
    key: bytes
    checksum: int
    """As a signed number, which SQLite has: see :func:`signed`."""
    payload_bytes: int
    stored_bytes: int
    generation: int


def signed(checksum: int) -> int:
    """Return 64 bits without a sign as the signed number that SQLite keeps."""
    return checksum - 2 * _SIGN if checksum >= _SIGN else checksum


def page_of(offset: int) -> int:
    """Return the number under which the slot at ``offset`` is listed."""
    return offset // ALIGNMENT


def remove(directory: Path, system: System) -> None:
    """Remove the files of the manifest, so that the next one starts empty. Raises OSError."""
    for suffix in ("", "-wal", "-shm", "-journal"):
        system.remove(directory / (NAME + suffix))


class Manifest:
    """An open manifest. Every method raises ``sqlite3.Error`` or OSError when it cannot be done.

    One that holds what cannot be there raises ``sqlite3.DatabaseError`` without a code.
    """

    def __init__(self, directory: Path, segment_bytes: int, max_bytes: int, system: System) -> None:
        """Open, or make, the one in ``directory``.

        Args:
            directory: where it lies.
            segment_bytes: length of the segments; a manifest made for another one is of no use.
            max_bytes: what its main file may take; beside it lies a log of at most ``LOG_BYTES``.
            system: how to commit.

        Raises:
            sqlite3.DatabaseError: it is damaged, too large, or made for other segments or another version.
        """
        self._system = system
        self._unsettled = False
        """Whether loss of power could undo a change."""
        path = directory / NAME
        system.close(system.open(path, _READ_WRITE_CREATE))  # with our mode, not SQLite's
        self._connection = sqlite3.connect(
            path, isolation_level=None, check_same_thread=False, timeout=0
        )
        try:
            self._prepare(segment_bytes, max_bytes)
        except BaseException:
            self.close()
            raise

    def _prepare(self, segment_bytes: int, max_bytes: int) -> None:
        for pragma in (
            f"page_size={PAGE_BYTES}",
            "locking_mode=EXCLUSIVE",  # no shared-memory file either
            "journal_mode=WAL",
            "synchronous=FULL",
            f"wal_autocheckpoint={WAL_PAGES}",
            f"journal_size_limit={LOG_BYTES}",
            f"max_page_count={max_bytes // PAGE_BYTES}",
            "secure_delete=OFF",  # as with the blocks themselves: what is released is overwritten later
            "cell_size_check=ON",
            "trusted_schema=OFF",
        ):
            self._fetch(f"PRAGMA {pragma}")
        tables = self._fetch("SELECT count(*) FROM sqlite_schema")[0][0]
        if not tables:
            with self._transaction():
                for statement in filter(str.strip, _SCHEMA.split(";")):
                    self._connection.execute(statement)
                self._connection.executemany(
                    "INSERT INTO facts VALUES (?, ?)",
                    [
                        ("version", VERSION),
                        ("segment_bytes", segment_bytes),
                        ("epoch", int.from_bytes(os.urandom(4), "little") >> 2),
                    ],
                )
        (verdict,) = self._fetch("PRAGMA quick_check(1)")[0]
        if verdict != "ok":
            raise sqlite3.DatabaseError(f"the manifest is damaged: {verdict}")
        facts = dict(self._fetch("SELECT name, value FROM facts"))
        if (facts.get("version"), facts.get("segment_bytes")) != (VERSION, segment_bytes):
            raise sqlite3.DatabaseError(f"the manifest is for other files: {facts}")
        epoch = facts.get("epoch")
        if not isinstance(epoch, int) or not 0 <= epoch < LAST_EPOCH:
            raise sqlite3.DatabaseError(f"the manifest has no number for its next opening: {facts}")
        if self._fetch("PRAGMA page_count")[0][0] * PAGE_BYTES > max_bytes:
            raise sqlite3.DatabaseError(f"the manifest has more than {max_bytes} bytes")

    def next_epoch(self) -> int:
        """Return a number below 2³¹ that is larger with every call; the first one is random."""
        with self._transaction():
            self._connection.execute("UPDATE facts SET value = value + 1 WHERE name = 'epoch'")
        return int(self._fetch("SELECT value FROM facts WHERE name = 'epoch'")[0][0])

    def names(self, namespaces: dict[bytes, bytes]) -> dict[bytes, int]:
        """Return the number of each namespace, digest → encoded, given to it now if need be.

        Together they have at most ``MAX_BATCH_BYTES``. New numbers last as soon as rows do that have them.
        """
        with self._transaction(lasting=False):
            self._connection.executemany(
                "INSERT OR IGNORE INTO namespaces (digest, encoded) VALUES (?, ?)",
                namespaces.items(),
            )
        query = "SELECT id FROM namespaces WHERE digest = ?"
        return {digest: self._fetch(query, digest)[0][0] for digest in namespaces}

    def insert(self, rows: Sequence[Row], *, lasting: bool) -> None:
        """Add ``rows``, all or none.

        Args:
            rows: at most ``MAX_BATCH_ROWS``, not none; their keys have at most ``MAX_BATCH_BYTES``.
            lasting: whether loss of power must not undo it, nor any change before.
        """
        places = ", ".join("?" * len(Row._fields))
        with self._transaction(lasting=lasting):
            self._connection.executemany(f"INSERT OR REPLACE INTO blocks VALUES ({places})", rows)  # noqa: S608
        self._unsettled = not lasting

    def delete(self, slots: Iterable[int], *, lasting: bool) -> None:
        """Remove the rows of ``slots``, at most ``MAX_BATCH_ROWS``, all or none.

        Args:
            slots: page numbers.
            lasting: whether loss of power must not bring them back.
        """
        with self._transaction(lasting=lasting):
            self._connection.executemany(
                "DELETE FROM blocks WHERE slot = ?", [(slot,) for slot in slots]
            )

    def settle(self) -> None:
        """Wait until every change lasts: on return loss of power cannot undo it."""
        if self._unsettled:
            busy = self._fetch("PRAGMA wal_checkpoint(FULL)")[0][0]
            if busy:
                raise sqlite3.OperationalError("the log of the manifest cannot be written back")
            self._unsettled = False

    def rows(self) -> list[tuple[int, int, int, bytes, bytes, bytes, int, int, int, int]]:
        """Return every row, in the order of slots; see :class:`Row`."""
        return self._fetch("SELECT * FROM blocks ORDER BY slot")

    def namespaces(self) -> dict[int, tuple[bytes, bytes]]:
        """Return digest and encoding of every namespace by number."""
        listed = self._fetch("SELECT id, digest, encoded FROM namespaces")
        return {number: (digest, encoded) for number, digest, encoded in listed}

    def unused_namespaces(self) -> list[int]:
        """Return the numbers of the namespaces that have no row."""
        query = "SELECT id FROM namespaces WHERE id NOT IN (SELECT namespace FROM blocks)"
        return [number for (number,) in self._fetch(query)]

    def forget_namespaces(self, numbers: Sequence[int]) -> None:
        """Remove namespaces that have no row left."""
        step = MAX_BATCH_ROWS // 2  # each is in two trees
        for start in range(0, len(numbers), step):
            with self._transaction():
                self._connection.executemany(
                    "DELETE FROM namespaces WHERE id = ?",
                    [(number,) for number in numbers[start : start + step]],
                )

    def close(self) -> None:
        """Close it; what was committed lasts in any case."""
        with suppress(sqlite3.Error):
            self._connection.close()

    def _fetch(self, query: str, *values: bytes) -> list[tuple]:  # type: ignore[type-arg]
        try:
            with closing(self._connection.execute(query, values)) as cursor:
                return cursor.fetchall()
        except (UnicodeDecodeError, OverflowError) as error:
            raise sqlite3.DatabaseError(f"the manifest is damaged: {error}") from error

    @contextmanager
    def _transaction(self, *, lasting: bool = True) -> Iterator[None]:
        if not lasting:
            self._unsettled = True
            self._fetch("PRAGMA synchronous=NORMAL")
        try:
            self._connection.execute("BEGIN IMMEDIATE")
            try:
                yield
                self._system.commit(self._connection)
            except BaseException:
                with suppress(sqlite3.Error):
                    self._connection.execute("ROLLBACK")
                raise
        finally:
            if not lasting:
                self._fetch("PRAGMA synchronous=FULL")
