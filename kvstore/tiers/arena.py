"""Slots of several sizes in one buffer of fixed length.

The buffer is cut into slabs; a slab holds slots of one size class and has at most a 64th of the
buffer (at least one slot). A class with no free slot takes a new slab from the unassigned gaps; an
empty slab goes back there as soon as another class needs it. One class alone therefore uses the whole
buffer without waste. (Slab allocation: J. Bonwick, "The Slab Allocator", USENIX 1994.)
"""

from __future__ import annotations

from bisect import insort
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Offsets = NDArray[np.int64]

ALIGNMENT = 4096
"""Slot offsets and sizes are multiples of this: a page, for direct I/O and memory registration."""

MAX_TIER_BYTES = (2**31 - 1) * ALIGNMENT
"""Slots are numbered by page in 32 bits: 8 TiB."""

MAX_SLABS = 64


def slot_bytes(block_bytes: int) -> int:
    """Return the size of a slot that holds ``block_bytes``."""
    return -(-block_bytes // ALIGNMENT) * ALIGNMENT


class Arena:
    """Hands out byte offsets into a buffer of ``capacity_bytes``; knows nothing of what is there.

    Single-owner. Invariants (:meth:`check_invariants`, in this order):

    1. slabs and gaps tile the capacity, without overlap;
    2. no two gaps touch;
    3. every free slot lies in a slab of its own class, aligned to it, once;
    4. the used slots of a slab and its free ones together fill it.
    """

    def __init__(self, capacity_bytes: int, max_slabs: int = MAX_SLABS) -> None:
        """Start with one gap of ``capacity_bytes`` (rounded down to whole pages).

        Args:
            capacity_bytes: length of the buffer.
            max_slabs: a slab takes at most one part in so many of it, but at least one slot.
        """
        self._max_slabs = max_slabs
        self.capacity_bytes = capacity_bytes // ALIGNMENT * ALIGNMENT
        self._gaps = [(0, self.capacity_bytes)] if self.capacity_bytes else []
        self._free: dict[int, Offsets] = {}
        self._starts = np.empty(0, np.int64)
        self._sizes = np.empty(0, np.int64)
        self._slot_sizes = np.empty(0, np.int64)
        self._used = np.empty(0, np.int64)

    @property
    def used_bytes(self) -> int:
        """Bytes of all slots that are handed out."""
        return int(self._used @ self._slot_sizes)

    def capacity_slots(self, slot_size: int) -> int:
        """How many slots of ``slot_size`` bytes the empty arena would hold."""
        return self.capacity_bytes // slot_size

    def slab_slots(self, slot_size: int) -> int:
        """How many slots of ``slot_size`` bytes a slab has (the last one may have fewer)."""
        return max(1, self.capacity_bytes // self._max_slabs // slot_size)

    def allocate(self, slot_size: int, count: int) -> Offsets:
        """Hand out up to ``count`` slots of ``slot_size`` bytes (a multiple of ``ALIGNMENT``).

        Returns:
            int64 offsets, ascending; fewer than ``count`` when there is no more room.
        """
        free = self._free.get(slot_size, np.empty(0, np.int64))
        while len(free) < count and (fresh := self._add_slab(slot_size)) is not None:
            free = np.concatenate([fresh, free])
        keep = max(0, len(free) - count)
        offsets = np.sort(free[keep:])
        if len(free) or slot_size in self._free:
            self._free[slot_size] = free[:keep]
        self._used += self._per_slab(offsets)
        return offsets

    def release(self, slot_size: int, offsets: Offsets) -> None:
        """Take back slots handed out by :meth:`allocate` for the same ``slot_size``."""
        self._used -= self._per_slab(offsets)
        self._free[slot_size] = np.concatenate([self._free[slot_size], offsets[::-1]])

    def slabs(self, slot_size: int) -> list[tuple[int, int]]:
        """Byte ranges ``[start, stop)`` of the slabs of a class.

        First those that would extend a gap, then those with the fewest used slots.
        """
        stops = self._starts + self._sizes
        edges = [edge for start, size in self._gaps for edge in (start, start + size)]
        apart = ~(np.isin(self._starts, edges) | np.isin(stops, edges))
        order = np.lexsort((self._used, apart))
        order = order[self._slot_sizes[order] == slot_size]
        return list(zip(self._starts[order].tolist(), stops[order].tolist(), strict=True))

    def allocate_outside(
        self, slot_size: int, count: int, start: int, stop: int
    ) -> tuple[Offsets, int]:
        """Hand out ``count`` slots that exist and do not lie in ``[start, stop)``: all, or none.

        Returns:
            The offsets, and how many slots are missing.
        """
        free = self._free[slot_size]
        outside = np.flatnonzero((free < start) | (free >= stop))
        if len(outside) < count:
            return free[:0], count - len(outside)
        taken = outside[len(outside) - count :]
        offsets = np.sort(free[taken])
        self._free[slot_size] = np.delete(free, taken)
        self._used += self._per_slab(offsets)
        return offsets, 0

    def _slabs_of(self, offsets: Offsets) -> NDArray[np.intp]:
        return np.searchsorted(self._starts, offsets, side="right") - 1

    def _per_slab(self, offsets: Offsets) -> NDArray[np.intp]:
        return np.bincount(self._slabs_of(offsets), minlength=len(self._used))

    def _add_slab(self, slot_size: int) -> Offsets | None:
        """Assign a slab to ``slot_size``; return its slots, or None when no gap is large enough."""
        gap = next((gap for gap in self._gaps if gap[1] >= slot_size), None)
        if gap is None and self._reclaim(slot_size):
            gap = next((gap for gap in self._gaps if gap[1] >= slot_size), None)
        if gap is None:
            return None
        start, size = gap
        slots = min(size // slot_size, self.slab_slots(slot_size))
        taken = slots * slot_size
        self._gaps.remove(gap)
        if size > taken:
            insort(self._gaps, (start + taken, size - taken))
        place = int(np.searchsorted(self._starts, start))
        self._starts = np.insert(self._starts, place, start)
        self._sizes = np.insert(self._sizes, place, taken)
        self._slot_sizes = np.insert(self._slot_sizes, place, slot_size)
        self._used = np.insert(self._used, place, 0)
        return np.arange(start + taken - slot_size, start - 1, -slot_size, dtype=np.int64)

    def _reclaim(self, slot_size: int) -> bool:
        """Turn the empty slabs of other classes into gaps; say whether there were any."""
        empty = (self._used == 0) & (self._slot_sizes != slot_size)
        if not empty.any():
            return False
        for size in np.unique(self._slot_sizes[empty]).tolist():
            free = self._free[size]
            self._free[size] = free[~empty[self._slabs_of(free)]]
        gaps = sorted(
            self._gaps
            + list(zip(self._starts[empty].tolist(), self._sizes[empty].tolist(), strict=True))
        )
        self._gaps = []
        for start, size in gaps:
            if self._gaps and sum(self._gaps[-1]) == start:
                before, length = self._gaps.pop()
                self._gaps.append((before, length + size))
            else:
                self._gaps.append((start, size))
        for name in ("_starts", "_sizes", "_slot_sizes", "_used"):
            setattr(self, name, getattr(self, name)[~empty])
        left = set(self._slot_sizes.tolist()) | {slot_size}
        self._free = {size: free for size, free in self._free.items() if size in left}
        return True

    def check_invariants(self) -> None:
        """Raise AssertionError naming the first broken invariant."""
        slabs = list(zip(self._starts.tolist(), self._sizes.tolist(), strict=True))
        end = 0
        for start, size in sorted(slabs + self._gaps):
            assert start == end, "1: slabs and gaps tile the capacity"
            assert size > 0, "1: nothing is empty"
            end = start + size
        assert end == self.capacity_bytes, "1: slabs and gaps tile the capacity"
        for before, after in zip(self._gaps, self._gaps[1:], strict=False):
            assert sum(before) < after[0], "2: no two gaps touch"
        free_slots = np.zeros(len(slabs), np.int64)
        for slot_size, offsets in self._free.items():
            assert len(np.unique(offsets)) == len(offsets), "3: a free slot is listed once"
            owners = self._slabs_of(offsets)
            assert (self._slot_sizes[owners] == slot_size).all(), "3: in a slab of its class"
            assert ((offsets - self._starts[owners]) % slot_size == 0).all(), (
                "3: aligned to its class"
            )
            np.add.at(free_slots, owners, 1)
        assert ((free_slots + self._used) * self._slot_sizes == self._sizes).all(), (
            "4: used + free fill a slab"
        )
