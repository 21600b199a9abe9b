"""When blocks go to a durable tier, and come from there."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    from kvstore.planner import Planner

BURST_S = 10.0

Admission = Literal["always", "second_use", "value"]
"""What is written: every block when it is committed; blocks that are used again; or those, and what is about
to be evicted from memory, or only there when the pool is closed (write-back)."""


class WriteBudget:
    """Bytes that may be written to the disk: so many a second on average, ``BURST_S`` seconds of it at once."""

    def __init__(self, clock: Callable[[], float], bytes_per_s: int) -> None:
        """Start full. ``bytes_per_s`` of 0 is no limit."""
        self._clock = clock
        self._bytes_per_s = bytes_per_s
        self._left = BURST_S * bytes_per_s
        self._at_s = clock()

    def take(self, sizes: NDArray[np.int64]) -> int:
        """Take the bytes of leading blocks that have ``sizes``; return for how many there were enough."""
        if not self._bytes_per_s:
            return len(sizes)
        now = self._clock()
        grown = self._left + (now - self._at_s) * self._bytes_per_s
        self._left, self._at_s = min(grown, BURST_S * self._bytes_per_s), now
        totals = np.cumsum(sizes)
        taken = int(np.searchsorted(totals, self._left, side="right"))
        self._left -= int(totals[taken - 1]) if taken else 0
        return taken

    def give_back(self, num_bytes: int) -> None:
        """Return bytes that were not written after all, or take more than that were if it is negative."""
        if self._bytes_per_s:
            self._left += num_bytes


class DiskRules(NamedTuple):
    """What a durable tier takes and gives."""

    admission: Admission
    budget: WriteBudget
    planner: Planner
    """Says what is worth loading; what is not, is not written either."""
