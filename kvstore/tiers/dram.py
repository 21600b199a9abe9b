"""Host memory: one anonymous mapping, page-locked when CUDA will read it."""

from __future__ import annotations

import mmap
from typing import TYPE_CHECKING

import numpy as np

from kvstore.tiers.store import Store

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from kvstore.tiers.store import HostBlocks


MADV_POPULATE_WRITE = 23
"""Linux 5.14; not named by Python 3.11."""


class DramStore(Store):
    """``capacity_bytes`` of private memory, with transparent huge pages where the kernel has them."""

    def __init__(self, capacity_bytes: int, *, prefault: bool = False, pin: bool = False) -> None:
        """Map the memory.

        Args:
            capacity_bytes: size of the mapping.
            prefault: have the kernel provide every page now, not when it is first written.
            pin: page-lock it for CUDA (``cudaHostRegister``), so that copies can run asynchronously.
        """
        self.capacity_bytes = capacity_bytes
        self._map = mmap.mmap(-1, capacity_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            self._map.madvise(mmap.MADV_HUGEPAGE)
        self._buffer: NDArray[np.uint8] = np.frombuffer(self._map, np.uint8)
        if prefault:
            self._prefault()
        self._pinned = pin
        if pin:
            _cuda_check("cudaHostRegister", self._buffer.ctypes.data, capacity_bytes, 0)

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
            _cuda_check("cudaHostUnregister", self._buffer.ctypes.data)
            self._pinned = False
        self._buffer = np.empty(0, np.uint8)

    def _prefault(self) -> None:
        try:
            self._map.madvise(MADV_POPULATE_WRITE)
        except OSError:  # an older kernel
            self._buffer[:: mmap.PAGESIZE] = 0


def _cuda_check(function: str, *arguments: int) -> None:
    import torch

    runtime = torch.cuda.cudart()
    torch.cuda.check_error(int(getattr(runtime, function)(*arguments)))
