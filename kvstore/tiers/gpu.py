"""Device memory: one torch tensor. On a machine without CUDA the same code runs on the CPU device."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from kvstore.tiers.store import Store

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from kvstore.tiers.store import HostBlocks


class GpuStore(Store):
    """``capacity_bytes`` of the memory of a torch device.

    Moves run on a stream of their own and are complete on return. A block may be moved only after
    the engine's stream is done with it: committing a reservation or releasing a lease says so.
    """

    def __init__(self, capacity_bytes: int, device: str) -> None:
        """Allocate and touch the tensor on ``device`` (``"cuda"``, ``"cuda:1"``, ``"cpu"``)."""
        self.capacity_bytes = capacity_bytes
        self._buffer = torch.zeros(capacity_bytes, dtype=torch.uint8, device=device)
        self._stream = torch.cuda.Stream(self._buffer.device) if self._buffer.is_cuda else None

    @property
    def buffer(self) -> torch.Tensor:
        """The tensor, uint8 ``[capacity_bytes]``."""
        return self._buffer

    def read_into(self, offsets: NDArray[np.int64], targets: HostBlocks) -> None:
        """Copy blocks to the host."""
        with torch.cuda.stream(self._stream):
            for start, target in zip(offsets.tolist(), targets, strict=True):
                host = torch.from_numpy(target)
                host.copy_(self._buffer[start : start + len(target)], non_blocking=True)
        self._wait()

    def write_from(self, offsets: NDArray[np.int64], sources: HostBlocks) -> None:
        """Copy blocks from the host."""
        with torch.cuda.stream(self._stream):
            for start, source in zip(offsets.tolist(), sources, strict=True):
                host = torch.from_numpy(source)
                self._buffer[start : start + len(source)].copy_(host, non_blocking=True)
        self._wait()

    def relocate(
        self, sources: NDArray[np.int64], targets: NDArray[np.int64], block_bytes: int
    ) -> None:
        """Copy blocks within the tensor."""
        with torch.cuda.stream(self._stream):
            for source, target in zip(sources.tolist(), targets.tolist(), strict=True):
                block = self._buffer[source : source + block_bytes]
                self._buffer[target : target + block_bytes].copy_(block, non_blocking=True)
        self._wait()

    def close(self) -> None:
        """Drop the tensor."""
        self._buffer = torch.empty(0, dtype=torch.uint8)

    def _wait(self) -> None:
        if self._stream is not None:
            self._stream.synchronize()
