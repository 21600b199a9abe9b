"""The block table: one row a block, columns as numpy arrays.

Life of a row::

    FREE ──reserve──▶ RESERVED ──commit──▶ READY ──evict──▶ FREE
                          └──────abort, evict while held──▶ GONE ──last reference──▶ FREE

``RESERVED`` and ``READY`` rows are in the radix tree, only ``READY`` ones are visible. A ``RESERVED`` row
without a reference was written in part (:mod:`kvstore.parts`), and waits for the rest. A ``GONE`` row is
out of the tree, but somebody still reads or writes its bytes; the slots come back with the last reference.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Ids = NDArray[np.int32]

NO_SLOT = -1
NO_CHECKSUM = 0
FIRST_CHECKSUM = 1 << 32
"""Smaller numbers stand for a checksum that is not known: ``NO_CHECKSUM``, or that of the seal to come."""


class BlockState:
    """States of a row: plain numbers, which numpy compares with faster than with those of an enum."""

    FREE: Final = 0
    RESERVED: Final = 1
    READY: Final = 2
    GONE: Final = 3


class BlockTable:
    """Rows of blocks, grown by doubling. Single-owner: the pool serialises access.

    Invariants (:meth:`check_invariants`, in this order):

    1. a row is on the free list exactly when it is ``FREE``;
    2. a ``FREE`` row has no slot, no reference and no checksum;
    3. no reference count is negative, and a ``GONE`` row has at least one; which ``RESERVED`` rows have
       none, :func:`kvstore.invariants.check_residency` says;
    4. every row that is not ``FREE`` has a slot in some tier.
    """

    def __init__(self, num_tiers: int) -> None:
        """Make an empty table for ``num_tiers`` tiers."""
        self.slots = np.empty((num_tiers, 0), np.int32)
        """int32 ``[num_tiers, capacity]``: slot of the block in each tier, or ``NO_SLOT``."""
        self.states = np.empty(0, np.uint8)
        self.refs = np.empty(0, np.int16)
        """int16 ``[capacity]``: leases, reservations, pins and moves that need the bytes where they are."""
        self.size_classes = np.empty(0, np.int16)
        self.checksums = np.empty(0, np.uint64)
        """uint64 ``[capacity]``: xxh3-64 of the canonical bytes, or a number below ``FIRST_CHECKSUM``."""
        self.loaded = np.empty(0, np.bool_)
        """bool ``[capacity]``: came from a durable tier, and was not leased since."""
        self.differs = np.empty(0, np.bool_)
        """bool ``[capacity]``: the durable tier's bytes are other ones than those of this checksum, as good."""
        self._free = np.empty(0, np.int32)
        self._num_free = 0

    @property
    def num_blocks(self) -> int:
        """Rows in use."""
        return len(self.states) - self._num_free

    @property
    def nbytes(self) -> int:
        """Memory of all columns, in bytes."""
        columns = (
            self.slots,
            self.states,
            self.refs,
            self.size_classes,
            self.checksums,
            self.loaded,
            self.differs,
            self._free,
        )
        return sum(column.nbytes for column in columns)

    def allocate(self, count: int, size_class: int) -> Ids:
        """Take ``count`` free rows, RESERVED with one reference, without slots."""
        if count > self._num_free:
            self._grow(count - self._num_free)
        self._num_free -= count
        ids = self._free[self._num_free : self._num_free + count].copy()
        self.states[ids] = BlockState.RESERVED
        self.refs[ids] = 1
        self.size_classes[ids] = size_class
        return ids

    def free(self, ids: Ids) -> None:
        """Give rows back. Their slots must have been freed by the caller."""
        self.states[ids] = BlockState.FREE
        self.slots[:, ids] = NO_SLOT
        self.refs[ids] = 0
        self.checksums[ids] = NO_CHECKSUM
        self.loaded[ids] = False
        self.differs[ids] = False
        self._free[self._num_free : self._num_free + len(ids)] = ids
        self._num_free += len(ids)

    def _grow(self, at_least: int) -> None:
        old = len(self.states)
        new = max(2 * old, old + at_least, 64)
        slots = np.full((len(self.slots), new), NO_SLOT, np.int32)
        slots[:, :old] = self.slots
        self.slots = slots
        for name in ("states", "refs", "size_classes", "checksums", "loaded", "differs", "_free"):
            column = getattr(self, name)
            grown = np.zeros(new, column.dtype)
            grown[:old] = column
            setattr(self, name, grown)
        self._free[self._num_free : self._num_free + new - old] = np.arange(
            new - 1, old - 1, -1, dtype=np.int32
        )
        self._num_free += new - old

    def check_invariants(self) -> None:
        """Raise AssertionError naming the first broken invariant."""
        free = self.states == BlockState.FREE
        listed = np.sort(self._free[: self._num_free])
        assert np.array_equal(listed, np.flatnonzero(free)), "1: free list = FREE rows"
        assert (self.slots[:, free] == NO_SLOT).all(), "2: a FREE row has no slot"
        assert not self.refs[free].any(), "2: a FREE row has no reference"
        assert not self.checksums[free].any(), "2: a FREE row has no checksum"
        assert (self.refs >= 0).all(), "3: no negative reference count"
        gone = self.states == BlockState.GONE
        assert (self.refs[gone] > 0).all(), "3: a GONE row is held"
        assert (self.slots[:, ~free] != NO_SLOT).any(axis=0).all(), "4: a used row has a slot"
