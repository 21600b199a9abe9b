"""The memory of a tier: moves bytes by offset, in batches; knows nothing of leases or policies.

*Memory model.* A store owns one buffer of ``capacity_bytes``. Which ranges of it are in use, and by
whom, is decided elsewhere (:mod:`kvstore.tiers.arena`, :mod:`kvstore.pool`); callers never overlap a
write with another access of the same range. Host memory (``dram``) is where all moves pass: every
other store reads into and writes from host arrays.

*Threads.* Calls for disjoint ranges may run at the same time.

*Errors.* A failed move raises; the target range then holds garbage and the caller drops it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable

    import numpy as np
    from numpy.typing import NDArray

    HostBlocks = Iterable[NDArray[np.uint8]]
    """Host arrays, uint8 ``[block_bytes]`` each."""


class Store(ABC):
    """Bytes of one tier."""

    capacity_bytes: int

    @property
    @abstractmethod
    def buffer(self) -> Any:  # noqa: ANN401  (numpy array or torch tensor; torch is optional)
        """The whole memory, uint8 ``[capacity_bytes]``: a numpy array (host) or a torch tensor (device)."""

    @abstractmethod
    def read_into(self, offsets: NDArray[np.int64], targets: HostBlocks) -> None:
        """Copy the blocks at ``offsets`` into ``targets``; complete on return."""

    @abstractmethod
    def write_from(self, offsets: NDArray[np.int64], sources: HostBlocks) -> None:
        """Copy ``sources`` to ``offsets``; complete on return."""

    @abstractmethod
    def relocate(
        self, sources: NDArray[np.int64], targets: NDArray[np.int64], block_bytes: int
    ) -> None:
        """Copy blocks within the store, from ``sources`` to ``targets`` (disjoint); complete on return."""

    @abstractmethod
    def close(self) -> None:
        """Give the memory back. Views handed out must not be used any more."""
