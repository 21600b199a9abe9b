"""The system calls of the disk tier, in one place: tests put one there that fails, is short or crashes."""

from __future__ import annotations

import errno
import fcntl
import os
import stat
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
        """Make ``path``, for this user only, and what is missing above it; lasting on return."""
        missing = [place for place in (path, *path.parents) if not place.exists()]
        path.mkdir(DIRECTORY_MODE, parents=True, exist_ok=True)
        for place in missing:
            self.sync_directory(place.parent)

    def make_private(self, path: Path) -> None:
        """Let only its owner use the directory ``path``."""
        path.chmod(DIRECTORY_MODE)

    def sync_directory(self, path: Path) -> None:
        """Wait until the names in the directory ``path`` are on the device, if the file system can."""
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
                raise
        finally:
            os.close(descriptor)

    def open(self, path: Path, flags: int) -> int:
        """Return a descriptor of ``path``; if ``flags`` say so it is created, and for its owner only."""
        descriptor = os.open(path, flags | os.O_CLOEXEC | os.O_NOFOLLOW, FILE_MODE)
        try:
            if flags & os.O_CREAT and stat.S_IMODE(os.fstat(descriptor).st_mode) != FILE_MODE:
                os.fchmod(descriptor, FILE_MODE)
        except BaseException:
            os.close(descriptor)
            raise
        return descriptor

    def close(self, descriptor: int) -> None:
        """Close ``descriptor``."""
        os.close(descriptor)

    def lock(self, descriptor: int) -> None:
        """Lock the open file for this process alone; BlockingIOError: another one has it."""
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def allocate(self, descriptor: int, num_bytes: int) -> None:
        """Have the file system set aside the first ``num_bytes`` of the file.

        ``EOPNOTSUPP``, or ``EINVAL`` with direct I/O, say that it cannot.
        """
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

    def num_links(self, descriptor: int) -> int:
        """Return how many names the open file has: 0 when it was deleted."""
        return os.fstat(descriptor).st_nlink

    def free_bytes(self, path: Path) -> int:
        """Return how much this user may still write to the file system of ``path``."""
        figures = os.statvfs(path)
        return figures.f_bavail * figures.f_frsize

    def commit(self, connection: sqlite3.Connection) -> None:
        """End the transaction of the manifest."""
        connection.execute("COMMIT")
