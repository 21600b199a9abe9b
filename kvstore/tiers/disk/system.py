"""The system calls of the disk tier, in one place: tests put one there that fails, is short or crashes."""

from __future__ import annotations

import fcntl
import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import sqlite3
    from collections.abc import Sequence
    from pathlib import Path

    import numpy as np
    from numpy.typing import NDArray

    Buffers = Sequence[NDArray[np.uint8]]

FILE_MODE = 0o600
DIRECTORY_MODE = 0o700


class System:
    """The real one. Every method raises OSError as the system call of its name does."""

    def make_directory(self, path: Path) -> None:
        """Make ``path`` and what is missing above it, for this user only."""
        path.mkdir(DIRECTORY_MODE, parents=True, exist_ok=True)

    def open(self, path: Path, flags: int) -> int:
        """Return a descriptor of ``path``, which is created if ``flags`` say so."""
        return os.open(path, flags | os.O_CLOEXEC | os.O_NOFOLLOW, FILE_MODE)

    def close(self, descriptor: int) -> None:
        """Close ``descriptor``."""
        os.close(descriptor)

    def lock(self, descriptor: int) -> None:
        """Lock the open file for this process alone; BlockingIOError: another one has it."""
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def allocate(self, descriptor: int, num_bytes: int) -> None:
        """Have the file system set aside the first ``num_bytes`` of the file."""
        os.posix_fallocate(descriptor, 0, num_bytes)

    def truncate(self, descriptor: int, num_bytes: int) -> None:
        """Cut the file."""
        os.ftruncate(descriptor, num_bytes)

    def read(self, descriptor: int, buffers: Buffers, offset: int) -> int:
        """Read into ``buffers``; return how many bytes."""
        return os.preadv(descriptor, [buffer.data for buffer in buffers], offset)

    def write(self, descriptor: int, buffers: Buffers, offset: int) -> int:
        """Write ``buffers``; return how many bytes."""
        return os.pwritev(descriptor, [buffer.data for buffer in buffers], offset)

    def sync(self, descriptor: int) -> None:
        """Wait until what was written is on the device."""
        os.fdatasync(descriptor)

    def remove(self, path: Path) -> None:
        """Remove a file; one that is not there is no error."""
        path.unlink(missing_ok=True)

    def stat(self, path: Path) -> os.stat_result:
        """Return what the file system says of ``path``."""
        return path.stat()

    def free_bytes(self, path: Path) -> int:
        """Return how much this user may still write to the file system of ``path``."""
        figures = os.statvfs(path)
        return figures.f_bavail * figures.f_frsize

    def commit(self, connection: sqlite3.Connection) -> None:
        """End the transaction of the manifest."""
        connection.execute("COMMIT")
