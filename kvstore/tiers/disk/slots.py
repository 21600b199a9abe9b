"""Which slots of the disk are in use, and for what: metadata in memory, no I/O.

To those who take slots it looks like an :class:`Arena`; in addition it knows what is in them.

Life of a slot::

    free ──allocate──▶ empty ──stored──▶ live ──release──▶ free
                         └─────release─────────────────────▶ free
    empty, live ──quarantine──▶ bad; taken back at the next start only

*Threads.* Every method may be called from any thread; each takes microseconds, so that a pool may call
it under its own lock.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import numpy as np

from kvstore.tiers.arena import Arena

if TYPE_CHECKING:
    from collections.abc import Iterable

    from numpy.typing import NDArray

    Offsets = NDArray[np.int64]

EMPTY = 0
"""Stands for the generation of a slot that holds nothing yet."""
LOST = -1
"""Stands for the generation of a slot whose block is not there any more, though nobody released it."""


class _Layout(Arena):
    """An arena that can start with slots in use."""

    def occupy(self, offsets: Offsets, slot_sizes: Offsets) -> None:
        """Put slots (ascending, disjoint, within the capacity) into the empty arena.

        Neighbours of one size, whose distance is a multiple of it, make slabs of the usual length; the slots
        between them are free.
        """
        if not len(offsets):
            return
        apart = np.diff(offsets)
        breaks = (np.diff(slot_sizes) != 0) | (apart % slot_sizes[:-1] != 0)
        begins = np.concatenate([[True], breaks])
        from_first = offsets - offsets[np.flatnonzero(begins)][np.cumsum(begins) - 1]
        usual = np.maximum(1, self.capacity_bytes // self._max_slabs // slot_sizes) * slot_sizes
        begins[1:] |= np.diff(from_first // usual) != 0
        firsts = np.flatnonzero(begins)
        lasts = np.concatenate([firsts[1:], [len(offsets)]]) - 1
        self._starts = offsets[firsts]
        self._slot_sizes = slot_sizes[firsts]
        self._sizes = offsets[lasts] + self._slot_sizes - self._starts
        self._used = lasts - firsts + 1
        stops = self._starts + self._sizes
        edges = np.concatenate([[0], stops]), np.append(self._starts, self.capacity_bytes)
        gaps = zip(edges[0].tolist(), (edges[1] - edges[0]).tolist(), strict=True)
        self._gaps = [(start, size) for start, size in gaps if size]
        for size in np.unique(self._slot_sizes).tolist():
            mine = self._slot_sizes == size
            slots = [
                np.arange(start, stop, size, dtype=np.int64)
                for start, stop in zip(
                    self._starts[mine].tolist(), stops[mine].tolist(), strict=True
                )
            ]
            free = np.setdiff1d(np.concatenate(slots), offsets, assume_unique=True)
            self._free[size] = free[::-1].copy()

    def sizes_of(self, offsets: Offsets) -> Offsets:
        """Length of the slots at ``offsets``."""
        return self._slot_sizes[self._slabs_of(offsets)]


class Slots:
    """The slots of a disk of ``capacity_bytes``; some 150 bytes of memory for each that is in use.

    Invariants (:meth:`check_invariants`, in this order):

    1. the arena keeps its own;
    2. its used bytes are those of the slots that are held or bad: none is lost;
    3. no bad slot is in use.
    """

    def __init__(self, capacity_bytes: int) -> None:
        """Start with every slot free."""
        self._arena = _Layout(capacity_bytes)
        self._lock = threading.Lock()
        self._generations: dict[int, int] = {}
        self._bad: set[int] = set()
        self._stale: set[int] = set()
        self._kept_back_bytes = 0
        """Bytes of bad slots that nobody holds."""
        self.capacity_bytes = self._arena.capacity_bytes
        self.bad_bytes = 0
        """Bytes of all bad slots, held or not."""

    @property
    def used_bytes(self) -> int:
        """Bytes of all slots that somebody holds: allocated and not released."""
        with self._lock:
            return self._arena.used_bytes - self._kept_back_bytes

    @property
    def num_live(self) -> int:
        """Slots that hold a block."""
        with self._lock:
            return sum(generation > EMPTY for generation in self._generations.values())

    def occupy(self, offsets: Offsets, slot_sizes: Offsets, generations: Offsets) -> None:
        """Start with these slots live; offsets ascending."""
        with self._lock:
            self._arena.occupy(offsets, slot_sizes)
            listed = offsets.tolist()
            self._generations = dict(zip(listed, generations.tolist(), strict=True))

    def capacity_slots(self, slot_size: int) -> int:
        """How many slots of ``slot_size`` bytes the empty disk would hold."""
        return self._arena.capacity_slots(slot_size)

    def slabs(self, slot_size: int) -> list[tuple[int, int]]:
        """Byte ranges ``[start, stop)`` of the slabs with slots of ``slot_size``, the emptiest first.

        Slots of another size can be had where all slots of one of them are released. Slabs with a bad slot
        are left out: they cannot be emptied.
        """
        with self._lock:
            return [
                (start, stop)
                for start, stop in self._arena.slabs(slot_size)
                if not any(start <= bad < stop for bad in self._bad)
            ]

    def allocate(self, slot_size: int, count: int) -> Offsets:
        """Take up to ``count`` free slots of ``slot_size`` bytes; ascending, fewer when the disk is full."""
        with self._lock:
            offsets = self._arena.allocate(slot_size, count)
            self._generations |= dict.fromkeys(offsets.tolist(), EMPTY)
        return offsets

    def allocate_outside(
        self, slot_size: int, count: int, start: int, stop: int
    ) -> tuple[Offsets, int]:
        """Take free slots that are not in ``[start, stop)``; see :meth:`Arena.allocate_outside`."""
        with self._lock:
            offsets, missing = self._arena.allocate_outside(slot_size, count, start, stop)
            self._generations |= dict.fromkeys(offsets.tolist(), EMPTY)
        return offsets, missing

    def release(self, slot_size: int, offsets: Offsets) -> None:
        """Give slots of ``slot_size`` bytes back, live or empty. The rows of live ones become stale.

        Bad ones stay out of use.
        """
        with self._lock:
            listed = offsets.tolist()
            written = [offset for offset in listed if self._generations.pop(offset) != EMPTY]
            self._stale.update(written)
            good = offsets[[offset not in self._bad for offset in listed]]
            self._kept_back_bytes += slot_size * (len(offsets) - len(good))
            if len(good):
                self._arena.release(slot_size, good)

    def quarantine(self, offset: int, generation: int) -> bool:
        """Keep the slot out of use for good, if it still holds what ``generation`` wrote; say whether.

        ``EMPTY`` stands for a slot that could not be written.
        """
        with self._lock:
            if self._generations.get(offset) != generation or offset in self._bad:
                return False
            self._bad.add(offset)
            self._generations[offset] = LOST
            self._stale.add(offset)
            self.bad_bytes += int(self._arena.sizes_of(np.array([offset]))[0])
            return True

    def generations(self, offsets: Offsets) -> list[int]:
        """Generation of each slot, ``EMPTY`` or ``LOST``; slots that nobody has are ``EMPTY``."""
        with self._lock:
            return [self._generations.get(offset, EMPTY) for offset in offsets.tolist()]

    def stored(self, offsets: Iterable[int], generations: Iterable[int]) -> None:
        """Say that blocks were written into slots."""
        with self._lock:
            for offset, generation in zip(offsets, generations, strict=True):
                if offset in self._generations and offset not in self._bad:
                    self._generations[offset] = generation

    @property
    def num_stale(self) -> int:
        """Slots whose rows are to be deleted."""
        with self._lock:
            return len(self._stale)

    def stale(self) -> list[int]:
        """Return the slots whose rows are to be deleted before any slot is written again."""
        with self._lock:
            return sorted(self._stale)

    def doubt(self, offsets: Offsets) -> None:
        """Say that empty slots may have got rows all the same."""
        with self._lock:
            self._stale.update(offsets.tolist())

    def deleted(self, offsets: Iterable[int]) -> None:
        """Say that the rows of stale slots are gone."""
        with self._lock:
            self._stale.difference_update(offsets)

    def keep_only(self, rows: dict[int, int]) -> None:
        """Compare with the ``rows`` (offset → generation) of a directory that came back.

        Blocks without their row are lost; rows without their block become stale.
        """
        with self._lock:
            for offset, generation in self._generations.items():
                if generation > EMPTY and rows.get(offset) != generation:
                    self._generations[offset] = LOST
            live = self._generations
            self._stale.update(offset for offset in rows if live.get(offset) != rows[offset])

    def check_invariants(self) -> None:
        """Raise AssertionError naming the first broken invariant."""
        with self._lock:
            self._arena.check_invariants()
            known = np.array([*(self._generations.keys() | self._bad)], np.int64)
            used_bytes = int(self._arena.sizes_of(known).sum())
            assert self._arena.used_bytes == used_bytes, "2: no slot is lost"
            kept_back = np.array([*(self._bad - self._generations.keys())], np.int64)
            assert self._kept_back_bytes == self._arena.sizes_of(kept_back).sum(), (
                "2: no slot is lost"
            )
            assert all(self._generations.get(bad, LOST) == LOST for bad in self._bad), (
                "3: no bad slot is in use"
            )
