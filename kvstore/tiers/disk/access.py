"""Who may use the open directory: lends it out, closes it after trouble, opens it anew after a pause."""

from __future__ import annotations

import sqlite3
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING

from kvstore.errors import ConfigError
from kvstore.tiers.disk.directory import Directory, DiskOptions
from kvstore.tiers.disk.files import try_reading
from kvstore.tiers.disk.health import Health, reason_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from kvstore.tiers.disk.system import System

SECONDS_PER_BYTE = 0.1 / (1 << 20)
"""Slower than this is too slow, whatever the size of a batch."""
REOPEN_REASONS = ("vanished", "manifest", "not_ours")
"""Troubles in writing that may go away when files are opened anew."""


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
        self._closed = False
        self._doubts: set[Health] = set()
        """Sides whose files may have to be opened anew."""
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
        return not self._closed and side.may_try()

    def ready(self, side: Health, resume: Callable[[Directory], None]) -> bool:
        """Whether ``side`` may do I/O now.

        After trouble, and a pause, what may be broken is opened anew and given to ``resume``, which may raise
        as its methods do: that is trouble again. What is open for reading stays open while nothing can take
        its place.
        """
        if not self.may_try(side):
            return False
        if self.directory is None or (side.reason and side in self._doubts):
            with self.lock:
                return self._renew(side, resume)
        return True

    def trouble(self, side: Health, error: Exception) -> None:
        """Turn ``side`` off; where that may help, files are opened anew before it is tried again."""
        reason = reason_of(error)
        side.trouble(reason, error)
        if side is self.reading or reason in REOPEN_REASONS:
            self._doubts.add(side)

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

    def _renew(self, side: Health, resume: Callable[[Directory], None]) -> bool:
        if not self.may_try(side):  # another thread has found out
            return False
        try:
            if self.directory is None:
                self._open(resume)
            elif side in self._doubts:  # or else another thread was faster
                renew = self._renew_reading if side is self.reading else self._renew_writing
                renew(self.directory, resume)
        except (OSError, sqlite3.Error, ConfigError) as error:
            side.trouble(reason_of(error), error)
            return False
        self._doubts.discard(side)
        return True

    def _renew_reading(self, directory: Directory, resume: Callable[[Directory], None]) -> None:
        try:
            directory.segments.probe()
        except OSError:
            try_reading(self._path, self._system)
            self._shut()  # the files at the path are better than those that are open
            self._open(resume)

    def _renew_writing(self, directory: Directory, resume: Callable[[Directory], None]) -> None:
        if directory.is_deleted():
            self._shut()  # gives the space back
            self._open(resume)
        elif directory.is_here():
            directory.reopen_manifest()
            resume(directory)
        else:
            self._open(resume)

    def _open(self, resume: Callable[[Directory], None]) -> None:
        """Open what lies at the path; what is open already stays so until that has worked."""
        directory = Directory(self._path, self._options, self._system)
        try:
            resume(directory)
        except BaseException:
            directory.close()
            raise
        self._shut()
        self.directory = directory
        self._doubts.clear()

    def _shut(self) -> None:
        with self._gate:
            directory, self.directory = self.directory, None
            self._gate.wait_for(lambda: not self._users)
        if directory is not None:
            directory.close()
