"""Which blocks have expired: those that were stored with a time to live.

A block's time begins with its commit. It is invisible from the moment it is over, and leaves the index soon
after, with all that follows it. Storing a prompt again, known or not, gives its blocks the longest time that
anybody asked for. So along a prompt no block outlives one before it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from kvstore.blocks import BlockState
from kvstore.retention import FOREVER
from radix.deadlines import Deadlines

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from numpy.typing import NDArray

    from kvstore.blocks import BlockTable, Ids
    from radix import Node


class Lifetimes:
    """When each block expires. Single-owner: the pool serialises access.

    Invariants (:meth:`check_invariants`, in this order):

    1. along a prompt no READY block outlives one before it;
    2. a node with READY blocks that will expire is in ``deadlines``, no later than the first of them.
    """

    def __init__(self, table: BlockTable, clock: Callable[[], float]) -> None:
        """Watch over the blocks of ``table`` by ``clock``, monotonic seconds."""
        self.deadlines = Deadlines()
        """Told of splits, joins and removals by the trees."""
        self._table = table
        self._clock = clock
        self._times = np.empty(0, np.float64)
        """Seconds ``[capacity of the table]`` at which a READY block expires, or for which a RESERVED one will
        live from its commit. Empty as long as nothing was to expire."""

    @property
    def nbytes(self) -> int:
        """Memory for the times, in bytes."""
        return self._times.nbytes

    def lasting(self, ids: Ids) -> NDArray[np.bool_]:
        """Which of ``ids`` never expire."""
        if not len(self._times):
            return np.ones(len(ids), bool)
        forever: NDArray[np.bool_] = self._times[ids] == FOREVER
        return forever

    def expired(self, ids: Ids) -> NDArray[np.bool_]:
        """Which of ``ids`` are READY and have expired; none where there are no ``deadlines``."""
        if not len(self._times):
            return np.zeros(len(ids), bool)
        ready = self._table.states[ids] == BlockState.READY
        over: NDArray[np.bool_] = ready & (self._times[ids] <= self._clock())
        return over

    def reserved(self, fresh: Ids, known: Ids, lifetime_s: float) -> None:
        """Note that ``fresh``, new blocks, and ``known`` ones of the same prompt are to live so long.

        That begins with their commit, or now for those that are READY.
        """
        if lifetime_s == FOREVER and not len(self._times):
            return
        missing = len(self._table.states) - len(self._times)
        self._times = np.concatenate([self._times, np.full(missing, FOREVER)])
        self._times[fresh] = lifetime_s
        reserved = self._table.states[known] == BlockState.RESERVED
        until = np.where(reserved, lifetime_s, lifetime_s + self._clock())
        self._times[known] = np.maximum(self._times[known], until)

    def committed(self, ids: Ids, before: Ids) -> bool:
        """Note that ``ids`` became READY behind ``before``; say whether any of them will expire."""
        if not len(ids) or not len(self._times):
            return False
        self._times[ids] += self._clock()
        times = self._times[ids]
        before = before[self._table.states[before] == BlockState.READY]
        self._times[before] = np.maximum(self._times[before], times.max())
        return bool((times < FOREVER).any())

    def watch(self, nodes: Iterable[Node]) -> None:
        """Have ``nodes`` looked at when the first block of each expires."""
        for node in nodes:
            self.deadlines.add(node, self._soonest(node))

    def _soonest(self, node: Node) -> float:
        ready = node.blocks[self._table.states[node.blocks] == BlockState.READY]
        return float(self._times[ready].min(initial=FOREVER))

    def check_invariants(self, nodes: Iterable[Node]) -> None:
        """Raise AssertionError naming the first broken invariant. ``nodes``: all that have blocks."""
        for node in nodes if len(self._times) else ():
            path = np.concatenate([step.blocks for step in node.path()])
            times = self._times[path[self._table.states[path] == BlockState.READY]]
            assert (times[1:] <= times[:-1]).all(), "1: no block outlives one before it"
            assert self.deadlines.time_of(node) <= self._soonest(node), (
                "2: what will expire is watched"
            )
