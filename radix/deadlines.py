"""When nodes are to be looked at again: a priority queue that follows the splits and joins of a tree."""

from __future__ import annotations

import heapq
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from radix.tree import Node

SLACK = 64
"""Entries that the heap may have beyond twice the nodes."""


class Deadlines:
    """Nodes by the time at which each is to be looked at, the earliest first.

    No clock: times are numbers that the owner compares with its own. A node is there until it is due, or
    left its tree; of what is split or joined no part is looked at later than it was to be. O(log n) each.
    Heap entries that no longer hold stay until they come up, or are more than half of the heap, which
    is then rebuilt.
    """

    def __init__(self) -> None:
        """Start with no node."""
        self._times: dict[Node, float] = {}
        self._heap: list[tuple[float, int, Node]] = []
        self._serial = 0

    def __len__(self) -> int:
        """Number of nodes."""
        return len(self._times)

    def time_of(self, node: Node) -> float:
        """Return when ``node`` is to be looked at; infinity if it need not be."""
        return self._times.get(node, float("inf"))

    def add(self, node: Node, time: float) -> None:
        """Have ``node`` looked at by ``time``, or earlier if that was said before."""
        if time >= self.time_of(node):
            return
        self._times[node] = time
        self._serial += 1
        heapq.heappush(self._heap, (time, self._serial, node))
        if len(self._heap) > 2 * len(self._times) + SLACK:
            self._heap = [item for item in self._heap if self._times.get(item[2]) == item[0]]
            heapq.heapify(self._heap)

    def split(self, upper: Node, lower: Node) -> None:
        """Note that ``lower`` lost its head to the new node ``upper``."""
        self.add(upper, self.time_of(lower))

    def join(self, upper: Node, lower: Node) -> None:
        """Note that ``lower`` took over the blocks of its parent ``upper``, which is gone."""
        self.add(lower, self._times.pop(upper, float("inf")))

    def remove(self, node: Node) -> None:
        """Forget ``node``; one that is not known is ignored."""
        self._times.pop(node, None)

    def pop(self, now: float) -> Node | None:
        """Forget the earliest node and return it, if its time has come; else return None."""
        while self._heap and self._heap[0][0] <= now:
            time, _, node = heapq.heappop(self._heap)
            if self._times.get(node) == time:
                del self._times[node]
                return node
        return None
