"""Blocks that are kept for those who wait until the last of a prompt's blocks are loaded.

A claim is a reference for a time. It ends by time alone, since several may wait for the same prompt; and all
claims together keep no more than their share of memory. All methods are called with the pool's lock held.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from kvstore.blocks import BlockState

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvstore.blocks import Ids
    from kvstore.copies import Copies

MAX_CLAIMS = 200

SHARE = 0.5
"""Of the memory that is not pinned, and of a tenant's ceiling."""


class Claim(NamedTuple):
    """What is kept of one prompt, and until when."""

    ids: Ids
    until_s: float


class Claims:
    """All claims, by what names the prompt."""

    def __init__(self, copies: Copies) -> None:
        """Start without claims."""
        self._copies = copies
        self._claims: dict[tuple[bytes, bytes], Claim] = {}
        self._counts = np.empty(0, np.int16)
        """int16 ``[capacity of the table]``: claims on each block."""
        self._num_bytes = 0

    def references(self) -> Iterator[Ids]:
        """Blocks of every claim."""
        for claim in self._claims.values():
            yield claim.ids

    def keep(self, what: tuple[bytes, bytes], ids: Ids, until_s: float, pinned_bytes: int) -> None:
        """Keep ``ids``, leading blocks of the prompt ``what``, as far as there is room for that.

        Args:
            what: digest of the namespace, and key.
            ids: of one tenant.
            until_s: when that ends, or later if it was kept longer before.
            pinned_bytes: what cannot be had of the memory at all.
        """
        before = self._claims.pop(what, None)
        if len(ids) and len(self._claims) < MAX_CLAIMS:
            self._counts.resize(len(self._copies.table.states), refcheck=False)
            fresh = self._counts[ids] == 0
            sizes = self._copies.slot_sizes(self._copies.num_memory - 1, ids) * fresh
            ids = ids[np.cumsum(sizes) <= self._room(ids, pinned_bytes)]
            self._count(ids, 1)
            until_s = max(until_s, before.until_s if before else until_s)
            self._claims[what] = Claim(ids, until_s)
        if before is not None:
            self._count(before.ids, -1)

    def _room(self, ids: Ids, pinned_bytes: int) -> float:
        memory, copies = self._copies.num_memory - 1, self._copies
        room = SHARE * (copies.tiers[memory].arena.capacity_bytes - pinned_bytes) - self._num_bytes
        group = copies.size(copies.class_of(ids[0])).group
        ceiling_bytes = copies.quotas.ceiling_bytes(group)
        return max(0.0, room if ceiling_bytes is None else min(room, SHARE * ceiling_bytes))

    def end(self, now: float) -> None:
        """Let go of what was kept until ``now``."""
        for what in [what for what, claim in self._claims.items() if claim.until_s <= now]:
            self._count(self._claims.pop(what).ids, -1)

    def forget_gone(self) -> None:
        """Let go of blocks that left the index."""
        states = self._copies.table.states
        for what, (ids, until_s) in list(self._claims.items()):
            gone = states[ids] == BlockState.GONE
            if gone.any():
                self._claims[what] = Claim(ids[~gone], until_s)
                self._count(ids[gone], -1)

    def clear(self) -> None:
        """End all claims."""
        self.end(float("inf"))

    def _count(self, ids: Ids, change: int) -> None:
        """Add ``change``, 1 or -1, to the claims on each of ``ids``, and to their references."""
        if change > 0:
            self._copies.pin(ids)
        counts = self._counts[ids] + np.int16(change)
        self._counts[ids] = counts
        edge = ids[
            counts == max(change, 0)
        ]  # the first claim on a block, or the last one that ends
        self._num_bytes += change * self._copies.bytes_of(self._copies.num_memory - 1, edge)
        if change < 0:
            self._copies.unpin(ids)
