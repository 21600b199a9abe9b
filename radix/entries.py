"""What a policy knows of a node that is there, and of one that is gone."""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from radix.tree import Node


class Entry:
    """What an order knows of a node."""

    __slots__ = (
        "children",
        "counted",
        "key",
        "name",
        "node",
        "num_blocks",
        "parent",
        "queue",
        "serial",
        "start",
        "uses",
    )

    def __init__(self, node: Node) -> None:
        """Describe a node that was not used yet."""
        self.node = node
        self.parent: Entry | None = None
        self.children = 0
        """Known children."""
        self.num_blocks = 0
        self.start = -1
        """Blocks before the node's first one."""
        self.name = b""
        """Under which the policy would remember the node, if it does remember."""
        self.counted = -1
        """Touch that last counted as a use."""
        self.uses = 0
        self.queue = 0
        self.key = 0.0
        self.serial = 0
        """Equal keys: the smaller one goes first. -1 when the node is forgotten."""


class Ghosts:
    """Names of evicted nodes and how many blocks they had, oldest first."""

    def __init__(self) -> None:
        """Remember nothing."""
        self._sizes: OrderedDict[bytes, int] = OrderedDict()
        self.num_blocks = 0

    def __len__(self) -> int:
        """Number of names."""
        return len(self._sizes)

    def add(self, entry: Entry) -> None:
        """Remember ``entry``."""
        self.pop(entry.name)
        self._sizes[entry.name] = entry.num_blocks
        self.num_blocks += entry.num_blocks

    def pop(self, name: bytes) -> int:
        """Forget ``name``; return its blocks, 0 when it is not remembered."""
        size = self._sizes.pop(name, 0)
        self.num_blocks -= size
        return size

    def limit(self, num_blocks: int, num_names: int) -> None:
        """Forget the oldest until no more are left than that."""
        while self._sizes and (self.num_blocks > num_blocks or len(self._sizes) > num_names):
            self.num_blocks -= self._sizes.popitem(last=False)[1]
