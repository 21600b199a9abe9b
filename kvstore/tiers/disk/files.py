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
import re
from contextlib import suppress
from typing import TYPE_CHECKING

import numpy as np

from kvstore.tiers.arena import ALIGNMENT
from kvstore.tiers.disk.format import aligned

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from numpy.typing import NDArray

    from kvstore.tiers.disk.system import System

    Pages = NDArray[np.uint8]

logger = logging.getLogger(__name__)

TRIAL_NAME = "trial"
MAX_VECTORS = 1024
"""Buffers of one call (``IOV_MAX``)."""
MAX_STALLS = 8
"""Calls in a row that move less than a page."""
FILL_BYTES = 1 << 20


class EndOfFileError(OSError):
    """A file is shorter than it has to be."""


def segment_name(index: int) -> str:
    """Return the name of a segment's file."""
    return f"segment-{index:05}.kv"


def index_of(name: str) -> int | None:
    """Return the number of the segment whose file is called ``name``; None: it is not a segment's."""
    found = re.fullmatch(r"segment-(\d+)\.kv", name)
    index = int(found[1]) if found else -1
    return index if name == segment_name(index) else None


def try_page(directory: Path, system: System, flags: int = 0) -> bool:
    """Say whether a page that is written to a file of its own in ``directory`` is read back.

    Raises:
        OSError: the file system refuses, perhaps only with ``flags``.
    """
    path = directory / TRIAL_NAME
    page, back = aligned(ALIGNMENT), aligned(ALIGNMENT)
    page[:], back[:] = np.arange(ALIGNMENT) % 251, 0
    descriptor = -1
    try:
        descriptor = system.open(path, os.O_RDWR | os.O_CREAT | flags)
        written = system.write(descriptor, [page], 0)
        system.sync(descriptor)
        read = system.read(descriptor, [back], 0)
        return written == read == ALIGNMENT and bool((page == back).all())
    finally:
        if descriptor >= 0:
            system.close(descriptor)
        with suppress(OSError):
            system.remove(path)


def direct_io_works(directory: Path, system: System) -> bool:
    """Say whether files in ``directory`` can be used with ``O_DIRECT``.

    Raises:
        OSError: the file system refuses more than direct I/O.
    """
    try:
        return try_page(directory, system, os.O_DIRECT)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
            raise
        return False


def try_reading(directory: Path, system: System) -> None:
    """Open the first segment at ``directory`` anew, and read its first page. Raises OSError."""
    descriptor = system.open(directory / segment_name(0), os.O_RDONLY)
    try:
        system.read(descriptor, [aligned(ALIGNMENT)], 0)
    finally:
        system.close(descriptor)


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
        count = -(-capacity_bytes // segment_bytes)
        try:
            for path in directory.iterdir():
                if (index_of(path.name) or 0) >= count:
                    system.remove(path)
            for index in range(count):
                length = min(segment_bytes, capacity_bytes - index * segment_bytes)
                self._add(directory / segment_name(index), length)
        except BaseException:
            self.close()
            raise

    def _add(self, path: Path, length: int) -> None:
        """Open one more file, and give it its length."""
        flags = os.O_RDWR | os.O_CREAT | (os.O_DIRECT if self.direct else 0)
        descriptor = self._system.open(path, flags)
        self._descriptors.append(descriptor)
        before = self._system.stat(path).st_size
        if before > length:
            self._system.truncate(descriptor, length)
        try:
            self._system.allocate(descriptor, length)
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
                raise
            self._fill(descriptor, before, length)

    def _fill(self, descriptor: int, start: int, stop: int) -> None:
        """Write zeros from ``start`` on, where space cannot be had in any other way."""
        zeros = aligned(FILL_BYTES)
        zeros[:] = 0
        offset = start // ALIGNMENT * ALIGNMENT
        while offset < stop:
            pages = zeros[: min(len(zeros), stop - offset)]
            moved = self._system.write(descriptor, [pages], offset) // ALIGNMENT * ALIGNMENT
            if not moved:
                raise OSError(errno.ENOSPC, "a segment cannot be made any longer")
            offset += moved

    def read(self, offset: int, buffers: Sequence[Pages]) -> None:
        """Fill ``buffers`` (whole, aligned pages) from ``offset`` on.

        Raises:
            OSError: the device failed.
            EndOfFileError: the file ends before.
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

    def probe(self) -> None:
        """Read the first page of all, or else the last one. Raises OSError: none of them can be read."""
        page = [aligned(ALIGNMENT)]
        try:
            self.read(0, page)
        except OSError:
            self.read(self.capacity_bytes - ALIGNMENT, page)

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
                    raise EndOfFileError(errno.ENODATA, "the file ends before the block does")
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
