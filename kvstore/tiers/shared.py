"""Host memory that the processes of one machine share: the daemon's side and its clients'.

The memory is an anonymous file (memfd): it has no name, does not count against ``/dev/shm``, and is
gone when no process has it open or mapped. Its size is sealed, so that no mapping can reach beyond its
end. Who may read or write which block of it, and until when, leases and reservations say.
"""

from __future__ import annotations

import fcntl
import logging
import os
import re
import weakref
from pathlib import Path
from threading import Event, Lock, Thread
from typing import TYPE_CHECKING, Literal

from kvstore.errors import ConfigError, UsageError
from kvstore.host import read_text, reserved_huge_pages
from kvstore.stats import ArenaStats
from kvstore.tiers.dram import DramStore, ask_for_huge_pages, provide, refused
from kvstore.tiers.memory import (
    HUGE_PAGE_BYTES,
    Access,
    Region,
    cuda_is_present,
    cuda_register,
    cuda_unregister,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy as np
    from numpy.typing import NDArray

logger = logging.getLogger(__name__)

HugePages = Literal["off", "transparent", "reserved"]

CUDA_READ_ONLY = 0x08
"""``cudaHostRegisterReadOnly``"""

_ROOT = Path("/")
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
_MAPPING = re.compile(r"([0-9a-f]+)-[0-9a-f]+ ")
_ON_HUGE_PAGES = re.compile(r"(?:ShmemPmdMapped|Shared_Hugetlb|Private_Hugetlb): +(\d+) kB")


class SharedDramStore(DramStore):
    """``capacity_bytes`` of a memfd, mapped for reading and writing."""

    descriptor: int
    """The memfd, open for reading and writing until :meth:`close`; the store's own."""
    identity: tuple[int, int, int]
    """Number of the descriptor in this process, device and inode: other processes that open it through
    ``/proc`` compare them."""

    def __init__(
        self,
        capacity_bytes: int,
        clock: Callable[[], float],
        *,
        huge_pages: HugePages = "off",
        prefault: bool = False,
        on_progress: Callable[[int], None] | None = None,
    ) -> None:
        """Make the memory.

        Args:
            capacity_bytes: size, in whole pages; of reserved huge pages it takes as many as fit into it.
            clock: seconds, to tell how long ``prefault`` took.
            huge_pages: none; transparent ones, which the kernel gives only where ``shmem_enabled`` lets
                it (:meth:`arena_stats` tells); or those that ``vm.nr_hugepages`` has reserved.
            prefault: have the kernel provide every page now. Without it, a machine that runs out of
                memory ends the process that writes.
            on_progress: called with the bytes provided so far, every 64 MiB.

        Raises:
            ConfigError: the system does not have as much memory, or as many huge pages.
        """
        flags, page_bytes = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING, HUGE_PAGE_BYTES
        if huge_pages == "reserved":
            flags, page_bytes = flags | os.MFD_HUGETLB, _reserved_page_bytes(capacity_bytes)
            capacity_bytes = capacity_bytes // page_bytes * page_bytes
        self._pinned = False
        self._prefault_s = 0.0
        try:
            self.descriptor, region = _create(flags, capacity_bytes, page_bytes)
        except OSError as error:
            raise refused(capacity_bytes, error) from None
        try:
            if huge_pages == "transparent":
                ask_for_huge_pages(region)
            if prefault:
                start = clock()
                provide(region, on_progress)
                self._prefault_s = clock() - start
                self._huge_page_bytes = _measure_huge_pages(region)
        except BaseException:
            self._close_descriptor()
            raise
        stat = os.fstat(self.descriptor)
        self.identity = (self.descriptor, stat.st_dev, stat.st_ino)
        self._use(region)

    def open_read_only(self) -> int:
        """Return a new descriptor of the memory that can be mapped for reading only; the caller closes it."""
        return os.open(f"/proc/self/fd/{self.descriptor}", os.O_RDONLY | os.O_CLOEXEC)

    def arena_stats(self) -> ArenaStats:
        """Return how the memory was provided, and how much of it is on huge pages.

        That is measured when everything has been provided; without ``prefault`` by each call, which walks
        the page table: some 10 ms for each GiB in use.
        """
        if not self._prefault_s:
            self._huge_page_bytes = _measure_huge_pages(self._region)
        return ArenaStats(self.capacity_bytes, self._prefault_s, self._huge_page_bytes)

    def close(self) -> None:
        """Close the descriptor and drop the mapping; it is unmapped when the last view of it is gone."""
        super().close()
        self._close_descriptor()

    def _close_descriptor(self) -> None:
        descriptor, self.descriptor = self.descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)


class ClientMapping:
    """A daemon's memory, in the process of one of its clients. Thread-safe.

    The arrays handed out stay valid whatever happens to the daemon. After :meth:`detach` they show
    zeros, and what is written to them is lost.
    """

    def __init__(self, descriptor: int, capacity_bytes: int, access: Access) -> None:
        """Map ``descriptor``, and close it.

        Args:
            descriptor: a sealed memfd; closed in any case.
            capacity_bytes: the size that it must have.
            access: what it is mapped for; ``read`` works with a read-only descriptor too.

        Raises:
            UsageError: it has another size, or one that may change.
            OSError: it cannot be mapped for ``access``.
        """
        try:
            self._resident = _check_descriptor(descriptor, capacity_bytes)
            alignment = max(HUGE_PAGE_BYTES, os.fstat(descriptor).st_blksize)
            self._region = Region(
                capacity_bytes, descriptor=descriptor, access=access, alignment=alignment
            )
        finally:
            os.close(descriptor)
        self.capacity_bytes = capacity_bytes
        self.access = access
        self._buffer = self._region.array()
        self._lock = Lock()
        self._stop = Event()
        self._prefaulting: Thread | None = None
        self._pinned = False
        _MAPPINGS.add(self)

    @property
    def buffer(self) -> NDArray[np.uint8]:
        """The memory, uint8 ``[capacity_bytes]``; writeable if mapped for that."""
        return self._buffer

    def prefault(self) -> None:
        """Begin to map every page that the daemon has provided, on a thread of its own.

        Pages that the daemon itself has not yet got are left alone: they would count as this process's.
        """
        with self._lock:
            if self._prefaulting or not self._resident or self._stop.is_set():
                return
            thread = Thread(target=self._prefault, name="kvstore-prefault", daemon=True)
            thread.start()
            self._prefaulting = thread

    def pin(self) -> bool:
        """Page-lock the memory for CUDA, where this process uses it; waits until that is done.

        Returns:
            Whether it is page-locked. Without, everything works, but copies to a device do not overlap.
        """
        if not cuda_is_present():
            return False
        with self._lock:
            if not self._pinned and not self._stop.is_set():
                flags = CUDA_READ_ONLY if self.access == "read" else 0
                self._pinned = cuda_register(self._region.address, self.capacity_bytes, flags)
            return self._pinned

    def detach(self) -> None:
        """Give the daemon's memory back, and put zeros in its place; waits for :meth:`pin`.

        Whoever still reads sees zeros from now on, whoever still writes hurts nobody. The address space
        is given back when this object and the last array over it are gone.

        Raises:
            OSError: not even address space is left.
        """
        with self._lock:
            if not self._stop.is_set():
                self._stop.set()
                if self._pinned:
                    try:
                        cuda_unregister(self._region.address)
                    except RuntimeError:  # after any earlier error of the device
                        logger.exception("CUDA did not let go of the daemon's memory")
                    self._pinned = False
                self._region.replace_by_zeros()
        if self._prefaulting:
            self._prefaulting.join()

    def forked(self) -> None:
        """In the child of a fork: put zeros in place, whatever the parent's threads were doing.

        A child would keep the memory of a daemon that has ended, and write where others write.
        """
        self._lock = Lock()
        self._stop.set()
        self._region.replace_by_zeros()

    def _prefault(self) -> None:
        try:
            for _ in self._region.populate():
                if self._stop.is_set():
                    return
        except OSError as error:  # the pages come when they are first used
            logger.warning("the daemon's memory could not be mapped ahead: %s", error)


_MAPPINGS: weakref.WeakSet[ClientMapping] = weakref.WeakSet()


def _after_fork() -> None:
    for mapping in list(_MAPPINGS):
        mapping.forked()


os.register_at_fork(after_in_child=_after_fork)


def huge_page_bytes(smaps: str, start: int, num_bytes: int) -> int:
    """Return how much of the addresses ``[start, start + num_bytes)`` is on huge pages.

    Args:
        smaps: text of ``/proc/self/smaps``.
        start: address of a mapping of shared memory.
        num_bytes: its size.
    """
    total, inside = 0, False
    for line in smaps.splitlines():
        if mapping := _MAPPING.match(line):
            inside = start <= int(mapping[1], 16) < start + num_bytes
        elif inside and (size := _ON_HUGE_PAGES.match(line)):
            total += int(size[1]) << 10
    return total


def _measure_huge_pages(region: Region | None) -> int:
    if region is None:
        return 0
    smaps = read_text(_ROOT / "proc/self/smaps")
    return huge_page_bytes(smaps, region.address, region.num_bytes)


def _create(flags: int, capacity_bytes: int, alignment: int) -> tuple[int, Region]:
    """Make a memfd of that size, for good; return its descriptor, and map it."""
    descriptor = os.memfd_create("kvstore-dram", flags)
    try:
        os.fchmod(descriptor, 0o600)
        os.ftruncate(descriptor, capacity_bytes)
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _SEALS)
        return descriptor, Region(capacity_bytes, descriptor=descriptor, alignment=alignment)
    except OSError:
        os.close(descriptor)
        raise


def _check_descriptor(descriptor: int, capacity_bytes: int) -> bool:
    """Refuse memory of another size, or of one that may change; say whether all of it is there."""
    stat = os.fstat(descriptor)
    if stat.st_size != capacity_bytes:
        raise UsageError(
            f"the daemon's memory has {stat.st_size} bytes, and it said {capacity_bytes}: "
            "do client and daemon have the same version of kvstore?"
        )
    try:
        seals = fcntl.fcntl(descriptor, fcntl.F_GET_SEALS)
    except OSError:  # no memfd
        seals = 0
    if not seals & fcntl.F_SEAL_SHRINK:
        raise UsageError(
            "the daemon's memory is no memfd whose size is sealed: it could be cut off"
        )
    return stat.st_blocks * 512 >= capacity_bytes


def _reserved_page_bytes(capacity_bytes: int) -> int:
    """Return the size of a reserved huge page, when there are enough of them for ``capacity_bytes``."""
    page_bytes, free = reserved_huge_pages(_ROOT)
    if not page_bytes:
        raise ConfigError(
            "huge_pages='reserved': this kernel has none; use huge_pages='transparent'"
        )
    needed = capacity_bytes // page_bytes
    if not needed:
        raise ConfigError(
            f"huge_pages='reserved': dram={capacity_bytes} is less than one huge page of "
            f"{page_bytes} bytes; give dram more, or use huge_pages='transparent'"
        )
    if needed > free:
        raise ConfigError(
            f"huge_pages='reserved': dram={capacity_bytes} needs {needed} huge pages of {page_bytes} "
            f"bytes, and {free} are free: reserve more with `sysctl vm.nr_hugepages=N` (at best when the "
            "machine starts), give dram less, or use huge_pages='transparent'"
        )
    return page_bytes
