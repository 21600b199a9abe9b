"""What a store tells about itself: sizes and counters at one moment."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections import Counter


@dataclass(frozen=True)
class TierStats:
    """Sizes of one tier, in bytes, and its blocks."""

    name: str
    capacity_bytes: int
    used_bytes: int
    num_blocks: int


@dataclass(frozen=True)
class PoolStats:
    """A consistent snapshot. ``counts`` only ever grow; their names are in :mod:`kvstore.metrics`."""

    tiers: tuple[TierStats, ...]
    num_blocks: int
    held_blocks: int
    num_leases: int
    num_reservations: int
    num_namespaces: int
    num_nodes: int
    index_bytes: int
    counts: Counter[tuple[str, ...]]
