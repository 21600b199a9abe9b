"""Host memory: one mapping of this process, page-locked when CUDA will read it."""

from __future__ import annotations

import mmap
from contextlib import suppress
from typing import TYPE_CHECKING

import numpy as np

from kvstore.errors import ConfigError
from kvstore.tiers.memory import Region, cuda_register, cuda_unregister
from kvstore.tiers.store import Store

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    from kvstore.tiers.store import HostBlocks


class DramStore(Store):
    """``capacity_bytes`` of private memory, with transparent huge pages where the kernel has them."""

    def __init__(self, capacity_bytes: int, *, prefault: bool = False, pin: bool = False) -> None:
        """Map the memory.

        Args:
            capacity_bytes: size of the mapping, in whole pages.
            prefault: have the kernel provide every page now, not when it is first written.
            pin: page-lock it for CUDA (``cudaHostRegister``), so that copies can run asynchronously.

        Raises:
            ConfigError: the system does not have as much.
        """
        try:
            region = Region(capacity_bytes)
        except OSError as error:
            raise refused(capacity_bytes, error) from None
        ask_for_huge_pages(region)
        if prefault:
            provide(region)
        self._pinned = pin and cuda_register(region.address, capacity_bytes, 0)
        self._use(region)

    def _use(self, region: Region) -> None:
        self.capacity_bytes = region.num_bytes
        self._region: Region | None = region
        self._buffer = region.array()

    @property
    def buffer(self) -> NDArray[np.uint8]:
        """The mapping, uint8 ``[capacity_bytes]``."""
        return self._buffer

    def blocks(self, offsets: NDArray[np.int64], block_bytes: int) -> HostBlocks:
        """Views of the blocks at ``offsets``, uint8 ``[block_bytes]`` each."""
        buffer = self._buffer
        return (buffer[start : start + block_bytes] for start in offsets.tolist())

    def read_into(self, offsets: NDArray[np.int64], targets: HostBlocks) -> None:
        """Copy blocks out."""
        for start, target in zip(offsets.tolist(), targets, strict=True):
            target[:] = self._buffer[start : start + len(target)]

    def write_from(self, offsets: NDArray[np.int64], sources: HostBlocks) -> None:
        """Copy blocks in."""
        for start, source in zip(offsets.tolist(), sources, strict=True):
            self._buffer[start : start + len(source)] = source

    def relocate(
        self, sources: NDArray[np.int64], targets: NDArray[np.int64], block_bytes: int
    ) -> None:
        """Copy blocks within the mapping."""
        self.write_from(targets, self.blocks(sources, block_bytes))

    def close(self) -> None:
        """Unpin and drop the mapping; it is unmapped when the last view of it is gone."""
        if self._pinned:
            cuda_unregister(self._buffer.ctypes.data)
            self._pinned = False
        self._region = None
        self._buffer = np.empty(0, np.uint8)


def ask_for_huge_pages(region: Region) -> None:
    """Ask for transparent huge pages; a kernel without them, or told not to, just gives small ones."""
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):
            region.advise(mmap.MADV_HUGEPAGE)


def provide(region: Region, on_progress: Callable[[int], None] | None = None) -> None:
    """Have the kernel provide every page, calling ``on_progress(done_bytes)`` between pieces.

    Raises:
        ConfigError: there is not as much memory.
    """
    pieces, done_bytes = region.populate(), 0
    while done_bytes < region.num_bytes:
        try:
            done_bytes = next(pieces)
        except OSError as error:
            raise refused(region.num_bytes, error, done_bytes) from None
        if on_progress:
            on_progress(done_bytes)


def refused(wanted_bytes: int, error: OSError, done_bytes: int = 0) -> ConfigError:
    """Return the error for memory that the system does not give."""
    return ConfigError(
        f"dram={wanted_bytes} bytes cannot be had: the system refused after {done_bytes} bytes "
        f"({error.strerror}); give dram less, or this process more (`ulimit -v`, `ulimit -f`, the "
        "container's limit); see `kvstore doctor`"
    )
