"""Which node to evict next: the policy interface, and least-recently-used.

An order chooses and never acts. It is told of every use, split and removal of nodes, and is asked
for a victim; the owner of the trees then trims it. One order may serve many trees.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import OrderedDict
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from radix.tree import Node


class EvictionOrder(ABC):
    """Contract of an eviction policy.

    Single-owner, no threads, no clock: recency is the order of the calls. A node that was never
    touched, or was removed, is not known. Implementations keep O(1) state per known node.
    """

    @property
    def name(self) -> str:
        """What settings call it."""
        return type(self).__name__.lower()

    @abstractmethod
    def touch(self, path: Sequence[Node]) -> None:
        """Note that the nodes of ``path`` were used just now.

        They follow one another, root side first; what is above them is known, or left to another order.
        """

    @abstractmethod
    def split(self, upper: Node, lower: Node) -> None:
        """Note that the known node ``lower`` lost its head to the new node ``upper``."""

    @abstractmethod
    def remove(self, node: Node) -> None:
        """Forget ``node``; one that is not known is ignored."""

    @abstractmethod
    def victim(self) -> Node | None:
        """Return the node whose tail should go first, or None when no node is known.

        It has no known child. Changes nothing: asked again, it returns the same node until the order
        is told of something.
        """

    @abstractmethod
    def __len__(self) -> int:
        """Number of known nodes."""

    @abstractmethod
    def __contains__(self, node: object) -> bool:
        """Whether ``node`` is known."""

    @abstractmethod
    def __iter__(self) -> Iterator[Node]:
        """Known nodes, the next victim first."""

    def arrive(self, path: Sequence[Node]) -> None:
        """Note that blocks of ``path`` were stored, or come to the tier whose order this is.

        That is no use of those that were known, though it makes them recent. By default it is a use.
        """
        self.touch(path)

    def postpone(self, node: Node) -> None:
        """Note that ``node``, the victim, cannot go now: somebody uses it. Others come first.

        This is no use of the node. By default it becomes recent, as do its ancestors that are known.
        """
        self.touch([step for step in node.path() if step in self])

    def alike(self, upper: Node, lower: Node) -> bool:
        """Whether ``upper`` and its only child ``lower`` may become one node, which has one rank.

        Both were used just now; ``lower`` may be new, and not known yet.
        """
        del upper, lower
        return True

    def join(self, upper: Node, lower: Node) -> None:
        """Note that ``lower`` took over the blocks of its parent ``upper``, which is gone."""
        del lower
        self.remove(upper)


class LRU(EvictionOrder):
    """Least recently used first, leaves before their ancestors.

    A path is touched deepest-first, so a parent is always more recent than its children and the
    oldest node is a leaf: O(1) per node, no heap.

    Invariant: if a node and its parent are both known, the parent is the more recent one.
    """

    def __init__(self) -> None:
        """Start with no node."""
        self._nodes: OrderedDict[Node, None] = OrderedDict()

    def touch(self, path: Sequence[Node]) -> None:
        """Move ``path`` to the recent end, deepest node first."""
        nodes = self._nodes
        for node in reversed(path):
            nodes[node] = None
            nodes.move_to_end(node)

    def split(self, upper: Node, lower: Node) -> None:
        """Do nothing: whoever splits touches ``upper`` next."""

    def remove(self, node: Node) -> None:
        """Forget ``node``."""
        self._nodes.pop(node, None)

    def victim(self) -> Node | None:
        """Return the least recently used node."""
        return next(iter(self._nodes), None)

    def __len__(self) -> int:
        """Number of known nodes."""
        return len(self._nodes)

    def __contains__(self, node: object) -> bool:
        """Whether ``node`` is known."""
        return node in self._nodes

    def __iter__(self) -> Iterator[Node]:
        """Oldest first."""
        return iter(self._nodes)
