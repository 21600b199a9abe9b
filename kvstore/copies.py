"""Which tier has a copy of which block: rows, slots and how large they are.

The bottom of what a pool knows. Nothing here decides anything: who gets room, and what leaves, says
:class:`kvstore.residency.Residency`; what is copied, :class:`kvstore.movement.Movement`.

Every block that somebody reads, writes or moves has references; with the last one the slots of a block that
left the index come free. All methods are called with the pool's lock held.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from kvstore.blocks import NO_SLOT, BlockState, BlockTable
from kvstore.errors import TooLargeError
from kvstore.lifetimes import Lifetimes
from kvstore.tiers.arena import ALIGNMENT
from kvstore.tiers.moves import on_host

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    from kvstore.blocks import Ids
    from kvstore.namespace import Namespace
    from kvstore.quotas import Quotas
    from kvstore.tiers.tier import Tier

MAX_SIZE_CLASSES = 1024
"""Block sizes that may be stored at the same time."""


class SizeClass(NamedTuple):
    """What blocks of one kind take, and from whom."""

    block_bytes: int
    slot_bytes: tuple[int, ...]
    """Of a block's slot in each tier."""
    group: str
    """Of tenants (:mod:`kvstore.quotas`)."""
    plain: bool
    """Whether the disk stores them as they are, since the codec of their namespace refuses them."""


@dataclass(eq=False)
class Refill:
    """Slots in a memory tier for blocks that only the disk has."""

    ids: Ids
    positions: NDArray[np.intp]
    """Places in the prompt, in blocks."""
    tier: int
    offsets: NDArray[np.int64]


NO_REFILL = Refill(np.empty(0, np.int32), np.empty(0, np.intp), 0, np.empty(0, np.int64))


class Copies:
    """Rows and slots of the blocks of all tiers."""

    def __init__(self, tiers: Sequence[Tier], quotas: Quotas, clock: Callable[[], float]) -> None:
        """Start without blocks. ``tiers``: all memory, then one disk at most."""
        self.tiers = tuple(tiers)
        self.num_memory = sum(tier.disk is None for tier in self.tiers)
        """Memory tiers, which come first."""
        assert all(tier.disk is None for tier in self.tiers[: self.num_memory])
        assert 0 < self.num_memory >= len(self.tiers) - 1, "memory first, and one disk at most"
        self.table = BlockTable(len(self.tiers))
        self.lifetimes = Lifetimes(self.table, clock)
        self.quotas = quotas
        self.counts: Counter[tuple[str, ...]] = Counter()
        """Of the whole pool, by the names of :data:`kvstore.metrics.COUNTERS`."""
        self.on_host = on_host(self.tiers)
        self._size_classes: list[SizeClass] = []

    # -- sizes ----------------------------------------------------------------------------------

    def size_class(self, namespace: Namespace, *, plain: bool = False) -> int:
        """Number that stands for sizes and group of a block; those of no block are used again.

        Args:
            namespace: of the block.
            plain: whether its codec has refused the block. In memory that makes no difference.

        Raises:
            TooLargeError: blocks of too many sizes are there.
        """
        sizes, group = self._size_classes, self.quotas.group_of(namespace.tenant)
        slot_sizes = tuple(tier.slot_bytes(namespace, plain=plain) for tier in self.tiers)
        size = SizeClass(namespace.layout.block_bytes, slot_sizes, group, plain)
        if size in sizes:
            return sizes.index(size)
        if len(sizes) < MAX_SIZE_CLASSES:
            sizes.append(size)
            return len(sizes) - 1
        used = self.table.size_classes[self.table.states != BlockState.FREE]
        unused = np.setdiff1d(np.arange(MAX_SIZE_CLASSES), used)
        if plain or not len(unused):  # a new block may be about to get it
            raise TooLargeError(
                f"blocks of {MAX_SIZE_CLASSES} sizes are stored: no other size fits before some leave"
            )
        sizes[int(unused[0])] = size
        return int(unused[0])

    def class_of(self, block: int) -> int:
        """Return the number of the size class of one block."""
        return int(self.table.size_classes[block])

    def size(self, size_class: int) -> SizeClass:
        """Return what blocks of ``size_class`` take."""
        return self._size_classes[size_class]

    def slot_size(self, index: int, size_class: int) -> int:
        """Bytes of a slot in tier ``index``."""
        return self._size_classes[size_class].slot_bytes[index]

    def largest_slot(self, index: int) -> int:
        """Bytes of the largest slot in tier ``index`` of any size class."""
        return max(size.slot_bytes[index] for size in self._size_classes)

    def slot_sizes(self, index: int, ids: Ids) -> NDArray[np.int64]:
        """Bytes of a slot in tier ``index`` for each of ``ids``."""
        numbers, which = np.unique(self.table.size_classes[ids], return_inverse=True)
        return np.array([self.slot_size(index, n) for n in numbers.tolist()], np.int64)[which]

    def are_plain(self, ids: Ids) -> NDArray[np.bool_]:
        """Which of ``ids`` the disk stores as they are, though their namespace has a codec."""
        numbers, which = np.unique(self.table.size_classes[ids], return_inverse=True)
        return np.array([self.size(n).plain for n in numbers.tolist()], np.bool_)[which]

    def bytes_of(self, index: int, ids: Ids) -> int:
        """Bytes of one slot in tier ``index`` for each of ``ids``."""
        classes = np.bincount(self.table.size_classes[ids]).tolist()
        return sum(
            count * self.slot_size(index, number) for number, count in enumerate(classes) if count
        )

    def held_bytes(self, index: int, ids: Ids) -> int:
        """Bytes of the slots that ``ids`` have in tier ``index``."""
        return self.bytes_of(index, ids[self.table.slots[index, ids] != NO_SLOT])

    # -- blocks ---------------------------------------------------------------------------------

    def pin(self, ids: Ids) -> None:
        """Add a reference to each of ``ids`` (distinct)."""
        self.table.refs[ids] += 1

    def unpin(self, ids: Ids) -> None:
        """Drop a reference from each of ``ids``; free those that are GONE and unused."""
        self.table.refs[ids] -= 1
        unused = ids[(self.table.refs[ids] == 0) & (self.table.states[ids] == BlockState.GONE)]
        if len(unused):
            self.free(unused)

    def free(self, ids: Ids) -> None:
        """Give rows and slots of ``ids``, which nobody uses, back."""
        for index in range(len(self.tiers)):
            here = ids[self.have(index, ids)]
            self.give_back(index, here, self.offsets(index, here))
        self.table.free(ids)

    def leading_ready(self, ids: Ids) -> Ids:
        """Return ``ids`` up to the first one that is not visible."""
        hidden = self.table.states[ids] != BlockState.READY
        if self.lifetimes.deadlines:
            hidden |= self.lifetimes.expired(ids)
        return ids[: int(hidden.argmax())] if hidden.any() else ids

    # -- where they are -------------------------------------------------------------------------

    def where(self, ids: Ids) -> tuple[NDArray[np.int8], NDArray[np.int64]]:
        """Fastest tier (int8) and byte offset there (int64) of each block."""
        slots = self.table.slots[:, ids]
        tiers = (slots != NO_SLOT).argmax(axis=0)
        return tiers.astype(np.int8), slots[tiers, np.arange(len(ids))].astype(np.int64) * ALIGNMENT

    def offsets(self, index: int, ids: Ids) -> NDArray[np.int64]:
        """Byte offsets in tier ``index`` of blocks that have a copy there; negative for others."""
        offsets: NDArray[np.int64] = self.table.slots[index, ids].astype(np.int64) * ALIGNMENT
        return offsets

    def have(self, index: int, ids: Ids) -> NDArray[np.bool_]:
        """Which of ``ids`` have a copy in tier ``index``."""
        there: NDArray[np.bool_] = self.table.slots[index, ids] != NO_SLOT
        return there

    def in_memory(self, ids: Ids) -> NDArray[np.bool_]:
        """Which of ``ids`` have a copy in memory."""
        there: NDArray[np.bool_] = (self.table.slots[: self.num_memory, ids] != NO_SLOT).any(axis=0)
        return there

    def num_in_memory(self, ids: Ids) -> int:
        """How many of ``ids`` from the first one on have a copy in memory."""
        if self.num_memory == len(self.tiers):
            return len(ids)
        there = self.in_memory(ids)
        return len(ids) if there.all() else int(there.argmin())

    def spare(self, ids: Ids) -> NDArray[np.bool_]:
        """Which of ``ids`` have more than one copy."""
        more: NDArray[np.bool_] = (self.table.slots[:, ids] != NO_SLOT).sum(axis=0) > 1
        return more

    def put(self, index: int, ids: Ids, offsets: NDArray[np.int64]) -> None:
        """Say that ``ids`` have copies at ``offsets`` of tier ``index``."""
        self.table.slots[index, ids] = offsets // ALIGNMENT

    def drop(self, index: int, ids: Ids) -> None:
        """Free the slots that ``ids`` have in tier ``index``; each must have a copy elsewhere."""
        self.give_back(index, ids, self.offsets(index, ids))
        self.table.slots[index, ids] = NO_SLOT

    # -- slots ----------------------------------------------------------------------------------

    def take(self, index: int, size_class: int, count: int) -> NDArray[np.int64]:
        """Take up to ``count`` slots of tier ``index`` that are free; return their byte offsets."""
        offsets = self.tiers[index].arena.allocate(self.slot_size(index, size_class), count)
        self.count_use(index, size_class, len(offsets))
        return offsets

    def give_back(self, index: int, ids: Ids, offsets: NDArray[np.int64]) -> None:
        """Free slots of tier ``index`` that were taken for ``ids``, one for each."""
        classes = self.table.size_classes[ids]
        for size_class in set(classes.tolist()):
            mine = offsets[classes == size_class]
            self.tiers[index].arena.release(self.slot_size(index, size_class), mine)
            self.count_use(index, size_class, -len(mine))

    def count_use(self, index: int, size_class: int, count: int) -> None:
        """Note that ``count`` slots of tier ``index`` were taken, or given back if that is negative."""
        if index + 1 == self.num_memory:
            size = self._size_classes[size_class]
            self.quotas.used_bytes[size.group] += count * size.slot_bytes[index]
