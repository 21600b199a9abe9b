"""Blocks that several writers fill, each with the bytes of some KV heads.

With tensor parallelism every rank of an engine holds some KV heads, and writes those into blocks that all
ranks share. Such a block stays RESERVED until each of its heads has been committed. Meanwhile a record says
which heads somebody is writing now (*claimed*), and which nobody has committed yet (*missing*). What is
claimed is missing too, also when it was committed before: a rewrite that is half done counts for nothing.

When all writers of a block have ended and heads are missing still, nobody refers to it. It stays, invisible,
for whoever brings the rest, and leaves like any block that is not used.

Sets of heads are masks: bit ``h`` stands for head ``h`` of the layout. Bookkeeping only: the pool adds and
drops the references, and holds its lock around every call.
"""

from __future__ import annotations

from dataclasses import dataclass
from operator import index
from typing import TYPE_CHECKING

import numpy as np

from kvstore.errors import UsageError

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from kvstore.blocks import Ids
    from kvstore.namespace import KVLayout

MAX_PART_HEADS = 64
"""Heads of a layout whose blocks may be written in parts."""


def part_of(layout: KVLayout, heads: tuple[int, int] | None) -> tuple[int, int] | None:
    """Return ``heads``, a range ``[start, stop)`` of KV heads; or None if that is the whole block.

    Raises:
        UsageError: it is no range of the layout's heads, or the layout has too many for parts.
    """
    if heads is None:
        return None
    count = layout.num_kv_heads
    try:
        start, stop = map(index, heads)
    except (TypeError, ValueError):
        raise UsageError(f"heads must be a range (start, stop), got {heads!r}") from None
    if not 0 <= start < stop <= count:
        raise UsageError(f"heads [{start}, {stop}) is no range of the {count} KV heads of a block")
    if stop - start == count:
        return None
    if count > MAX_PART_HEADS:
        raise UsageError(
            f"blocks of {count} KV heads cannot be written in parts, at most {MAX_PART_HEADS} can"
        )
    return start, stop


def mask_of(layout: KVLayout, part: tuple[int, int] | None) -> int:
    """Return the mask of what :func:`part_of` returned."""
    start, stop = part or (0, layout.num_kv_heads)
    return (1 << stop) - (1 << start)


@dataclass(slots=True)
class Unfinished:
    """What is known of one block. ``claimed`` is part of ``missing``, which is never empty."""

    claimed: int
    """Heads that somebody is writing now; of two writers never the same one."""
    missing: int
    """Heads that nobody has committed."""


class Parts:
    """The blocks that are written in parts, by id. Single-owner: the pool serialises access."""

    def __init__(self) -> None:
        """Start with none."""
        self.records: dict[int, Unfinished] = {}

    def __len__(self) -> int:
        """Number of blocks that are written in parts."""
        return len(self.records)

    def begin(self, ids: Ids, mine: int, every: int) -> None:
        """Note that a writer of heads ``mine`` made the blocks ``ids``, which have heads ``every``."""
        for block in ids.tolist():
            self.records[block] = Unfinished(mine, every)

    def joinable(self, ids: Ids, mine: int) -> NDArray[np.bool_]:
        """Say of which of ``ids`` a writer may write heads ``mine``: nobody else does, and some are missing."""
        found = map(self.records.get, ids.tolist())
        free = (part and not part.claimed & mine and part.missing & mine for part in found)
        return np.fromiter(free, bool, len(ids))

    def join(self, ids: Ids, mine: int) -> None:
        """Note that a writer of heads ``mine`` was given the joinable blocks ``ids``."""
        for block in ids.tolist():
            part = self.records[block]
            part.claimed |= mine
            part.missing |= mine

    def commit(self, ids: Ids, mine: int) -> Ids:
        """Note that heads ``mine`` of ``ids`` are written; return the blocks of which no head is missing.

        The records of those must be forgotten. Blocks that left the index meanwhile are passed over.
        """
        whole = []
        for block in ids.tolist():
            part = self.records.get(block)
            if part is not None:
                part.claimed &= ~mine
                part.missing &= ~mine
                if not part.missing:
                    whole.append(block)
        return np.array(whole, np.int32)

    def abort(self, ids: Ids, mine: int, every: int) -> Ids:
        """Note that heads ``mine`` of ``ids`` are written no more; return the blocks that nobody needs.

        Those are not being written by others, and none of their heads ``every`` was committed.
        """
        empty = []
        for block in ids.tolist():
            part = self.records.get(block)
            if part is not None:
                part.claimed &= ~mine
                if not part.claimed and part.missing == every:
                    empty.append(block)
        return np.array(empty, np.int32)

    def forget(self, ids: Ids) -> None:
        """Drop the records of ``ids``, where there are any: they are whole, or left the index."""
        if self.records:
            for block in ids.tolist():
                self.records.pop(block, None)
