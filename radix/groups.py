"""Eviction by group: an order for each group of trees, so that one group can give way and another be spared.

Every tree belongs to one group for good. The victim among some groups is the one of their victims that has
the lowest level, and of those the one that was told of longest ago. With LRU in each group that is what one
LRU over all of them would choose. A group whose victim is in use comes after the others, for :data:`PASSED`
touches.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from typing import TYPE_CHECKING, Any

from radix.leaves import LeafOrder
from radix.order import EvictionOrder
from radix.priority import PASSED, PriorityOrder

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Sequence

    from radix.tree import Node


class GroupedOrder(EvictionOrder):
    """One order for each group; O(1) more a node than theirs."""

    def __init__(self, make: Callable[[], EvictionOrder], group_of: Callable[[Any], str]) -> None:
        """Start with no node.

        Args:
            make: makes the order of a group, when it has its first node.
            group_of: says to which group a tree belongs.
        """
        self._make, self._group_of = make, group_of
        self._orders: dict[str, EvictionOrder] = {}
        self._told: dict[Node, int] = {}
        """When each node was told of: a number that grows."""
        self._last = 0
        self._passed: OrderedDict[Node, int] = OrderedDict()
        """Victims in use, by the touch that ends it, the earliest first."""
        self._touches = 0

    @property
    def name(self) -> str:
        """That of the orders of its groups."""
        order = next(iter(self._orders.values()), None)
        return (order or self._make()).name

    def _order(self, node: Node) -> EvictionOrder:
        group = self._group_of(node.tree)
        order = self._orders.get(group)
        if order is None:
            order = self._orders[group] = self._make()
        return order

    def _note(self, nodes: Sequence[Node]) -> None:
        for node in reversed(nodes):
            self._last += 1
            self._told[node] = self._last

    def touch(self, path: Sequence[Node]) -> None:
        """Tell the order of the path's group; all of them of a path that is empty, a miss."""
        self._note(path)
        self._touches += 1
        while self._passed and next(iter(self._passed.values())) <= self._touches:
            self._passed.popitem(last=False)
        for order in (self._order(path[0]),) if path else self._orders.values():
            order.touch(path)

    def arrive(self, path: Sequence[Node]) -> None:
        """Tell the order of the path's group."""
        self._note(path)
        if path:
            self._order(path[0]).arrive(path)

    def split(self, upper: Node, lower: Node) -> None:
        """Tell the order of the nodes' group."""
        if lower in self._told:
            self._told[upper] = self._told[lower]
        self._order(lower).split(upper, lower)

    def join(self, upper: Node, lower: Node) -> None:
        """Tell the order of the nodes' group."""
        self._passed.pop(upper, None)
        told = self._told.pop(upper, None)
        if told is not None:
            self._told.setdefault(lower, told)
        self._order(lower).join(upper, lower)

    def remove(self, node: Node) -> None:
        """Tell the order of the node's group."""
        self._passed.pop(node, None)
        self._told.pop(node, None)
        self._order(node).remove(node)

    def postpone(self, node: Node) -> None:
        """Tell the order of the node's group; the others' victims come first."""
        if node not in self:
            return
        self._passed[node] = self._touches + PASSED
        self._passed.move_to_end(node)
        self._note([step for step in node.path() if step in self])
        self._order(node).postpone(node)

    def alike(self, upper: Node, lower: Node) -> bool:
        """Whether their group's order ranks them alike."""
        return self._order(lower).alike(upper, lower)

    def victim(self) -> Node | None:
        """Return the victim among all groups."""
        return self.victim_among(self._orders)

    def victim_among(self, groups: Collection[str]) -> Node | None:
        """Return the victim among ``groups``."""
        victims = (self._orders[group].victim() for group in groups if group in self._orders)
        return min((node for node in victims if node), key=self._rank, default=None)

    def _rank(self, node: Node) -> tuple[bool, int, int]:
        passed = node in self._passed
        return passed, 0 if passed else node.level, self._told[node]

    def __len__(self) -> int:
        """Number of known nodes."""
        return sum(map(len, self._orders.values()))

    def __contains__(self, node: object) -> bool:
        """Whether ``node`` is known."""
        return any(node in order for order in self._orders.values())

    def __iter__(self) -> Iterator[Node]:
        """Nodes in the order in which they would leave."""
        return heapq.merge(*self._orders.values(), key=self._rank)

    def check_invariants(self) -> None:
        """Raise AssertionError naming the first broken invariant of the groups' orders."""
        assert set(self) == set(self._told), "what is known was told of"
        for order in self._orders.values():
            if isinstance(order, LeafOrder | PriorityOrder):
                order.check_invariants()
