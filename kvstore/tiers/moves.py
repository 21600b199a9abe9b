"""What moves between tiers, and the copying and hashing itself: bytes only, no lock, no metadata."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import xxhash

from kvstore.blocks import FIRST_CHECKSUM, NO_CHECKSUM
from kvstore.tiers.dram import DramStore

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from kvstore.blocks import Ids
    from kvstore.tiers.store import HostBlocks
    from kvstore.tiers.tier import Tier


@dataclass(eq=False)
class Move:
    """Blocks on their way to slots of another tier, or to other slots of the same one.

    Each holds a reference until the move ends.
    """

    ids: Ids
    source: int
    source_offsets: NDArray[np.int64]
    target: int
    target_offsets: NDArray[np.int64]
    size_class: int
    drop_source: bool


def copy_blocks(move: Move, tiers: Sequence[Tier], block_bytes: int) -> NDArray[np.uint64]:
    """Copy the bytes of ``move``, and return the checksums of what passed through host memory.

    Raises:
        Exception: whatever the memory or a driver raises; the target then holds garbage.
    """
    source, target = tiers[move.source].store, tiers[move.target].store
    if move.source == move.target:
        source.relocate(move.source_offsets, move.target_offsets, block_bytes)
        if not isinstance(target, DramStore):
            return np.full(len(move.ids), NO_CHECKSUM, np.uint64)
        return _checksums(target.blocks(move.target_offsets, block_bytes))
    if isinstance(target, DramStore):
        source.read_into(move.source_offsets, target.blocks(move.target_offsets, block_bytes))
        return _checksums(target.blocks(move.target_offsets, block_bytes))
    if not isinstance(source, DramStore):
        raise TypeError("one side of a move must be host memory")
    target.write_from(move.target_offsets, source.blocks(move.source_offsets, block_bytes))
    return _checksums(source.blocks(move.source_offsets, block_bytes))


def on_host(tiers: Sequence[Tier]) -> NDArray[np.bool_]:
    """Say of each tier whether its bytes lie in host memory, where they can be hashed."""
    return np.array([isinstance(tier.store, DramStore) for tier in tiers])


def checksums(
    tiers: Sequence[Tier],
    indices: NDArray[np.int8],
    offsets: NDArray[np.int64],
    block_bytes: int,
) -> NDArray[np.uint64]:
    """Checksums of the blocks at ``offsets`` of the tiers ``indices``; ``NO_CHECKSUM`` off the host."""
    sums = np.full(len(indices), NO_CHECKSUM, np.uint64)
    for index, tier in enumerate(tiers):
        here = np.flatnonzero(indices == index)
        if len(here) and isinstance(tier.store, DramStore):
            sums[here] = _checksums(tier.store.blocks(offsets[here], block_bytes))
    return sums


def _checksums(blocks: HostBlocks) -> NDArray[np.uint64]:
    """xxh3-64 of each block, at least ``FIRST_CHECKSUM``."""
    sums = [xxhash.xxh3_64_intdigest(block.data) for block in blocks]
    return np.maximum(np.array(sums, np.uint64), np.uint64(FIRST_CHECKSUM))
