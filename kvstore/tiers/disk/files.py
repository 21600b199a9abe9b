"""The files of a disk tier: one address space of ``capacity_bytes`` over segment files of one length.

All segments are allocated when the directory is opened, so that writing a block never makes a file
longer. A slot may lie across two segments; it is then moved with two calls.

*Direct I/O.* Segments are opened with ``O_DIRECT`` where a trial shows that this file system writes and
reads back with it. Addresses, offsets and lengths are whole pages in any case.

*Threads.* Calls for disjoint ranges may run at the same time, but not with :meth:`Segments.close`.
"""

from __future__ import annotations

import errno
import logging
import os
from contextlib import suppress
from typing import TYPE_CHECKING

import numpy as np

from kvstore.errors import ConfigError
from kvstore.tiers.arena import ALIGNMENT
from kvstore.tiers.disk.format import aligned

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from numpy.typing import NDArray

    from kvstore.tiers.disk.system import System

    Pages = NDArray[np.uint8]

logger = logging.getLogger(__name__)

LOCK_NAME = "lock"
FOREIGN_NAMES = frozenset({"lost+found"})
"""What a directory may hold besides: the root of a file system has it."""
TRIAL_NAME = "trial"
MAX_VECTORS = 1024
"""Buffers of one call (``IOV_MAX``)."""
MAX_STALLS = 8
"""Calls in a row that move less than a page."""


def segment_name(index: int) -> str:
    """Return the name of a segment's file."""
    return f"segment-{index:05}.kv"


def lock_directory(directory: Path, system: System) -> int:
    """Return the descriptor that keeps every other instance out of ``directory`` while it is open.

    Raises:
        ConfigError: another instance has it, or the directory holds other things.
        OSError: the file system refuses.
    """
    path = directory / LOCK_NAME
    if not path.exists() and any(other.name not in FOREIGN_NAMES for other in directory.iterdir()):
        raise ConfigError(
            f"disk directory {directory} is not empty and was not made by kvstore: give it one of its own"
        )
    descriptor = system.open(path, os.O_RDWR | os.O_CREAT)
    try:
        system.lock(descriptor)
    except BlockingIOError:
        system.close(descriptor)
        raise ConfigError(
            f"disk directory {directory} is used by another kvstore: give each instance its own"
        ) from None
    except BaseException:
        system.close(descriptor)
        raise
    return descriptor


def direct_io_works(directory: Path, system: System) -> bool:
    """Try whether a page written with ``O_DIRECT`` to a file in ``directory`` is read back.

    Raises:
        OSError: the file system refuses more than direct I/O.
    """
    path = directory / TRIAL_NAME
    page, back = aligned(ALIGNMENT), aligned(ALIGNMENT)
    page[:], back[:] = np.arange(ALIGNMENT) % 251, 0
    descriptor = -1
    try:
        descriptor = system.open(path, os.O_RDWR | os.O_CREAT | os.O_DIRECT)
        written = system.write(descriptor, [page], 0)
        read = system.read(descriptor, [back], 0)
        return written == read == ALIGNMENT and bool((page == back).all())
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
            raise
        return False
    finally:
        if descriptor >= 0:
            system.close(descriptor)
        with suppress(OSError):
            system.remove(path)


class Segments:
    """Reads and writes pages by their offset in the address space."""

    def __init__(
        self, directory: Path, capacity_bytes: int, segment_bytes: int, system: System
    ) -> None:
        """Open, make, lengthen and cut the files, so that they hold exactly ``capacity_bytes``.

        Raises:
            OSError: the file system refuses; nothing stays open.
        """
        self.segment_bytes = segment_bytes
        self.capacity_bytes = capacity_bytes
        self.direct = direct_io_works(directory, system)
        self._system = system
        self._descriptors: list[int] = []
        if not self.direct:
            logger.warning(
                "disk tier %s: this file system has no direct I/O; blocks also take memory in the page "
                "cache, and reads and writes pay for one more copy",
                directory,
            )
        flags = os.O_RDWR | os.O_CREAT | (os.O_DIRECT if self.direct else 0)
        count = -(-capacity_bytes // segment_bytes)
        try:
            for path in sorted(directory.glob("segment-*.kv"))[count:]:
                system.remove(path)
            for index in range(count):
                path = directory / segment_name(index)
                self._descriptors.append(system.open(path, flags))
                length = min(segment_bytes, capacity_bytes - index * segment_bytes)
                if system.stat(path).st_size > length:
                    system.truncate(self._descriptors[-1], length)
                system.allocate(self._descriptors[-1], length)
        except BaseException:
            self.close()
            raise

    def read(self, offset: int, buffers: Sequence[Pages]) -> None:
        """Fill ``buffers`` (whole, aligned pages) from ``offset`` on.

        Raises:
            OSError: the device failed, or the file ends before (``ENODATA``).
        """
        self._move(self._system.read, offset, buffers)

    def write(self, offset: int, buffers: Sequence[Pages]) -> None:
        """Write ``buffers`` (whole, aligned pages) from ``offset`` on; lasting after :meth:`sync`.

        Raises:
            OSError: the device failed; the range holds garbage.
        """
        self._move(self._system.write, offset, buffers)

    def sync(self, offsets: NDArray[np.int64], num_bytes: NDArray[np.int64]) -> None:
        """Wait until the ranges are on the device.

        Raises:
            OSError: it failed; what was written before may or may not be there, even if a later call succeeds.
        """
        first = offsets // self.segment_bytes
        last = (offsets + num_bytes - 1) // self.segment_bytes
        for index in np.unique(np.concatenate([first, last])).tolist():
            self._system.sync(self._descriptors[index])

    def close(self) -> None:
        """Close the files. Nothing may be under way."""
        for descriptor in self._descriptors:
            with suppress(OSError):
                self._system.close(descriptor)
        self._descriptors.clear()

    def _move(
        self,
        call: Callable[[int, Sequence[Pages], int], int],
        offset: int,
        buffers: Sequence[Pages],
    ) -> None:
        """Go on after short calls, from the last whole page."""
        for descriptor, start, pages in self._parts(offset, buffers):
            place, left, stalls = start, pages, 0
            while left:
                moved = call(descriptor, left[:MAX_VECTORS], place)
                whole = moved // ALIGNMENT * ALIGNMENT
                stalls = 0 if whole else stalls + 1
                if not moved or stalls > MAX_STALLS:
                    raise OSError(errno.ENODATA, "the file ends before the block does")
                place += whole
                left = _without(left, whole)

    def _parts(
        self, offset: int, buffers: Sequence[Pages]
    ) -> Iterator[tuple[int, int, list[Pages]]]:
        """Cut a range at the ends of segments: descriptor, offset in its file, buffers."""
        left = list(buffers)
        while left:
            index, start = divmod(offset, self.segment_bytes)
            room = self.segment_bytes - start
            total = sum(len(buffer) for buffer in left)
            yield self._descriptors[index], start, left if total <= room else _head(left, room)
            left = _without(left, min(total, room))
            offset += room


def _without(buffers: list[Pages], num_bytes: int) -> list[Pages]:
    """``buffers`` but for their first ``num_bytes``."""
    for index, buffer in enumerate(buffers):
        if num_bytes < len(buffer):
            return [buffer[num_bytes:], *buffers[index + 1 :]]
        num_bytes -= len(buffer)
    return []


def _head(buffers: list[Pages], num_bytes: int) -> list[Pages]:
    """The first ``num_bytes`` of ``buffers``."""
    head: list[Pages] = []
    for buffer in buffers:
        if not num_bytes:
            break
        head.append(buffer[:num_bytes])
        num_bytes -= len(head[-1])
    return head
