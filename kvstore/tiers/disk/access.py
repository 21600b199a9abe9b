"""Who may use the open directory: lends it out, closes it after trouble, opens it anew after a pause."""

from __future__ import annotations

import sqlite3
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING

from kvstore.errors import ConfigError
from kvstore.tiers.disk.directory import Directory, DiskOptions
from kvstore.tiers.disk.health import Health, reason_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from kvstore.tiers.disk.system import System

SECONDS_PER_BYTE = 0.1 / (1 << 20)
"""Slower than this is too slow, whatever the size of a batch."""
REOPEN_REASONS = ("vanished", "manifest", "not_ours")
"""Troubles in writing that go away with other files; those that do not leave the files open for reading."""


class Access:
    """The directory of a store, open or closed, and whether reading and writing are on.

    *Threads.* Users hold the directory open with :meth:`shared`. Whoever writes holds :attr:`lock`, which
    comes before. The directory is closed and opened under ``lock``, when no user is left.
    """

    def __init__(
        self, path: Path, options: DiskOptions, clock: Callable[[], float], system: System
    ) -> None:
        """Open ``path``, which is made if it is missing, and find what it holds: ``found``.

        Raises:
            ConfigError: the directory belongs to others.
            OSError, sqlite3.Error: the file system refuses.
        """
        self.reading = Health("reading from the disk tier", clock)
        self.writing = Health("writing to the disk tier", clock)
        self.lock = threading.RLock()
        self._path, self._options, self._system = path, options, system
        self._gate = threading.Condition()
        self._users = 0
        self._broken = self._closed = False
        system.make_directory(path)
        directory = Directory(path, options, system)
        try:
            self.found = directory.recover()
        except BaseException:
            directory.close()
            raise
        self.generation = directory.generation
        """From which the numbers of writes go on."""
        self.directory: Directory | None = directory

    @contextmanager
    def shared(self) -> Iterator[Directory | None]:
        """Keep the directory open meanwhile; None when it is closed."""
        with self._gate:
            directory = self.directory
            self._users += 1
        try:
            yield directory
        finally:
            with self._gate:
                self._users -= 1
                self._gate.notify_all()

    def may_try(self, side: Health) -> bool:
        """Whether :meth:`ready` would let ``side`` try, as far as that is known without I/O."""
        opened = self.directory is not None or self.writing.may_try()
        return not self._closed and opened and side.may_try()

    def ready(self, side: Health, resume: Callable[[Directory], None]) -> bool:
        """Whether ``side`` may do I/O now.

        After trouble, and a pause, the directory is opened anew and given to ``resume``, which may raise
        as its methods do: that is trouble again.
        """
        if self._closed or not side.may_try():
            return False
        if self._broken and (side.reason or self.directory is None):
            with self.lock:
                return self._reopen(resume)
        return True

    def trouble(self, side: Health, error: Exception) -> None:
        """Turn ``side`` off; where that may help, the directory is opened anew before it is tried again."""
        reason = reason_of(error)
        side.trouble(reason, error)
        self._broken |= side is self.reading or reason in REOPEN_REASONS

    def ended(self, side: Health, seconds: float, num_bytes: int) -> None:
        """Judge how long a batch took that went well."""
        if seconds > self._options.slow_s + num_bytes * SECONDS_PER_BYTE:
            side.trouble("slow", f"{num_bytes} bytes took {seconds:.1f} s")
        elif side.reason:
            side.fine()

    def close(self) -> None:
        """Close the directory for good, when the last user has left it."""
        with self.lock:
            self._closed = True
            self._shut()

    def _reopen(self, resume: Callable[[Directory], None]) -> bool:
        if not self._broken:  # another thread was faster
            return True
        if self._closed or not self.writing.may_try():
            return False
        self._shut()
        directory = None
        try:
            directory = Directory(self._path, self._options, self._system)
            resume(directory)
        except (OSError, sqlite3.Error, ConfigError) as error:
            if directory is not None:
                directory.close()
            self.writing.trouble(reason_of(error), error)
            return False
        self.directory, self._broken = directory, False
        return True

    def _shut(self) -> None:
        with self._gate:
            directory, self.directory = self.directory, None
            self._gate.wait_for(lambda: not self._users)
        if directory is not None:
            directory.close()
