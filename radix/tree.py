"""A path-compressed radix tree from token prefixes to block ids.

Keys are the concatenated keys of consecutive blocks, ``key_bytes`` bytes each (int32 tokens, or one
hash a block). An edge is the key bytes of as many blocks as are unbranched, and its node carries one
block id for each of them. The tree compares the keys themselves, so a collision cannot exist.

* ``match`` walks down: children are found by the key of their first block, a whole edge is compared
  with one ``bytes.startswith`` (memcmp, no copy), and only the last, partly equal edge is searched
  for the first difference with numpy. It never changes the tree.
* ``insert`` attaches what is missing, and splits an edge at a block boundary when the new key leaves it
  in the middle.
* ``touch`` makes what a match found the most recent: it splits off the tail of an edge that is used
  in part, and merges nodes of the path that have a single child, since all their blocks now have the
  same age (an order that counts uses may keep them apart). So a prompt that grows block by block stays
  one node, and a trunk whose branches were evicted becomes one node again.
* ``trim`` removes the tail of a node and everything below it, ``evict`` trims oldest-first.

All loops are iterative: depth is limited by memory only. The design follows SGLang's RadixAttention
(L. Zheng et al., "SGLang: Efficient Execution of Structured Language Model Programs", 2024) with
byte-string edges after D. R. Morrison, "PATRICIA", 1968.
"""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from radix.order import LRU, EvictionOrder
from radix.tokens import token_bytes

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

NO_BLOCKS: NDArray[np.int32] = np.empty(0, np.int32)


class Node:
    """One edge of a tree and its blocks. Owned by the tree: read it, never change it."""

    __slots__ = ("blocks", "children", "key", "level", "parent", "tree")

    def __init__(
        self, tree: RadixTree, parent: Node | None, key: bytes, blocks: NDArray[np.int32]
    ) -> None:
        """Make a node without children."""
        self.tree = tree
        self.parent = parent
        self.key = key
        self.blocks = blocks
        self.children: dict[bytes, Node] = {}
        self.level = 0
        """How much the blocks matter, as :mod:`radix.priority` has it."""

    def path(self) -> list[Node]:
        """Nodes from below the root down to this one."""
        nodes: list[Node] = []
        node = self
        while node.parent is not None:
            nodes.append(node)
            node = node.parent
        nodes.reverse()
        return nodes


class Match(NamedTuple):
    """The longest known prefix of a key; valid until the tree changes."""

    nodes: list[Node]
    """Nodes walked, root side first; every one but the last is matched as a whole."""
    num_blocks: int
    """Blocks matched in all nodes together."""
    last_blocks: int
    """Blocks matched in the last node (0 when no node was)."""

    def block_ids(self) -> NDArray[np.int32]:
        """Ids of the matched blocks, int32 ``[num_blocks]``, a copy."""
        if not self.nodes:
            return NO_BLOCKS.copy()
        parts = [node.blocks for node in self.nodes]
        parts[-1] = parts[-1][: self.last_blocks]
        return np.concatenate(parts)


class RadixTree:
    """Longest-prefix index over blocks. Single-owner: callers serialise access.

    Invariants (checked by :func:`radix.check_invariants`, in this order):

    1. the root has no key, no blocks and no parent;
    2. every other node has at least one block and exactly ``key_bytes`` of key for each;
    3. a node is its parent's child under the key of its first block, and belongs to this tree;
    4. no block id occurs twice;
    5. ``num_nodes`` and ``num_blocks`` count what is there;
    6. no node has a higher level than its parent.
    """

    def __init__(self, key_bytes: int = 64, order: EvictionOrder | None = None) -> None:
        """Make an empty tree.

        Args:
            key_bytes: bytes of one block's key (4 * block_tokens, or the width of a hash).
            order: the eviction policy to tell; trees may share one. An own LRU by default.
        """
        if key_bytes < 1:
            raise ValueError(f"key_bytes must be positive, got {key_bytes}")
        self.key_bytes = key_bytes
        self.order: EvictionOrder = LRU() if order is None else order
        self.root = Node(self, None, b"", NO_BLOCKS)
        self.num_nodes = 0
        self.num_blocks = 0

    def match(self, tokens: object) -> Match:
        """Find the longest known prefix of ``tokens``, in whole blocks. Changes nothing.

        Args:
            tokens: anything :func:`radix.token_bytes` accepts; a trailing partial block is ignored.
        """
        key = token_bytes(tokens)
        stride = self.key_bytes
        node, offset = self.root, 0
        nodes: list[Node] = []
        while child := node.children.get(key[offset : offset + stride]):
            nodes.append(child)
            if not key.startswith(child.key, offset):
                shared = _shared_blocks(child.key, key, offset, stride)
                return Match(nodes, offset // stride + shared, shared)
            offset += len(child.key)
            node = child
        return Match(nodes, offset // stride, len(node.blocks))

    def insert(
        self,
        tokens: object,
        block_ids: NDArray[np.int32],
        found: Match | None = None,
        level: int = 0,
    ) -> int:
        """Add the blocks of ``tokens`` that are not known yet, and tell the order of the whole path.

        Args:
            tokens: as for :meth:`match`; whole blocks only are inserted.
            block_ids: int32 ids of the *last* ``len(block_ids)`` blocks of ``tokens``; blocks before
                them must be known.
            found: a fresh ``match`` of the same tokens, to save finding it again.
            level: of the new blocks, and the least that the known ones are to have from now on.

        Returns:
            How many leading blocks of ``tokens`` were known before. They keep their ids: the
            caller's ids for them were not used.

        Raises:
            ValueError: the ids leave a gap behind the known prefix, or are more than the blocks.
        """
        key = token_bytes(tokens)
        if found is None:
            found = self.match(key)
        total, known = len(key) // self.key_bytes, found.num_blocks
        first = total - len(block_ids)
        if first < 0 or first > known:
            raise ValueError(f"{len(block_ids)} ids for {total} blocks, of which {known} are known")
        nodes = self._used(found)
        if known < total:
            nodes = [
                *nodes,
                self._attach(
                    nodes[-1] if nodes else self.root, key, known, block_ids[known - first :]
                ),
            ]
        self.order.arrive(self._merged(_raised(nodes, level)))
        return known

    def touch(self, found: Match, level: int = 0) -> None:
        """Make the blocks of ``found`` (a fresh match) the most recent ones, and no others.

        ``level`` is the least that they are to have from now on.
        """
        self.order.touch(self._merged(_raised(self._used(found), level)))

    def _used(self, found: Match) -> list[Node]:
        """Nodes of ``found``, after splitting off what it does not cover."""
        nodes = found.nodes
        if nodes and found.last_blocks < len(nodes[-1].blocks):
            return [*nodes[:-1], self._split(nodes[-1], found.last_blocks)]
        return nodes

    def _merged(self, nodes: list[Node]) -> list[Node]:
        """Merge unbranched runs of the path ``nodes`` (root side first); return what is left of it."""
        merged: list[Node] = []
        start = 0
        for index, node in enumerate(nodes):
            below = nodes[index + 1] if index + 1 < len(nodes) else None
            if (
                below is None
                or len(node.children) != 1
                or node.level != below.level
                or not self.order.alike(node, below)
            ):
                merged.append(node if start == index else self._merge(nodes[start : index + 1]))
                start = index + 1
        return merged

    def trim(self, node: Node, keep: int) -> NDArray[np.int32]:
        """Remove the blocks of ``node`` from position ``keep`` on, and every node below it.

        Returns:
            Ids of the removed blocks, parents before children.
        """
        removed = [node.blocks[keep:]]
        below = list(node.children.values())
        while below:
            gone = below.pop()
            removed.append(gone.blocks)
            below.extend(gone.children.values())
            self._forget(gone)
        node.children = {}
        if keep:
            node.key = node.key[: keep * self.key_bytes]
            node.blocks = node.blocks[:keep].copy()
        else:
            parent = node.parent
            if parent is None:
                raise ValueError("the root has no blocks to trim")
            del parent.children[node.key[: self.key_bytes]]
            self._forget(node)
        ids = removed[0] if len(removed) == 1 else np.concatenate(removed)
        self.num_blocks -= len(ids)
        return ids

    def clear(self) -> NDArray[np.int32]:
        """Remove everything; return the ids of all blocks."""
        nodes = list(self.walk())
        ids = np.concatenate([node.blocks for node in nodes]) if nodes else NO_BLOCKS.copy()
        for node in nodes:
            self._forget(node)
        self.root.children = {}
        self.num_blocks = 0
        return ids

    def evict(self, num_blocks: int) -> NDArray[np.int32]:
        """Trim the tree's victims until ``num_blocks`` are gone or nothing is left.

        For a tree with an order of its own; with a shared order, the owner of the trees trims.

        Returns:
            Ids of the removed blocks.
        """
        removed: list[NDArray[np.int32]] = []
        missing = num_blocks
        while missing > 0 and (node := self.order.victim()) is not None:
            ids = self.trim(node, max(0, len(node.blocks) - missing))
            missing -= len(ids)
            removed.append(ids)
        return np.concatenate(removed) if removed else NO_BLOCKS.copy()

    def walk(self) -> Iterator[Node]:
        """Every node but the root, parents before children."""
        nodes = list(self.root.children.values())
        while nodes:
            node = nodes.pop()
            yield node
            nodes.extend(node.children.values())

    def prefix(self, node: Node) -> bytes:
        """Key bytes from the root to the end of ``node``."""
        return b"".join(step.key for step in node.path())

    def _attach(self, parent: Node, key: bytes, known: int, block_ids: NDArray[np.int32]) -> Node:
        stride = self.key_bytes
        start, stop = known * stride, len(key) // stride * stride
        tail = key if start == 0 and stop == len(key) else key[start:stop]
        node = Node(self, parent, tail, np.array(block_ids, np.int32))
        parent.children[tail[:stride]] = node
        self.num_nodes += 1
        self.num_blocks += len(block_ids)
        return node

    def _split(self, lower: Node, blocks: int) -> Node:
        """Cut ``lower`` after its first ``blocks`` blocks; return the new node that holds them.

        ``lower`` stays the same object, so that it keeps its place in the eviction order.
        """
        cut, parent = blocks * self.key_bytes, lower.parent
        assert parent is not None
        upper = Node(self, parent, lower.key[:cut], lower.blocks[:blocks].copy())
        upper.level = lower.level
        parent.children[upper.key[: self.key_bytes]] = upper
        lower.parent, lower.key, lower.blocks = upper, lower.key[cut:], lower.blocks[blocks:].copy()
        upper.children[lower.key[: self.key_bytes]] = lower
        self.num_nodes += 1
        self.order.split(upper, lower)
        return upper

    def _merge(self, chain: list[Node]) -> Node:
        """Make one node of a parent-to-child ``chain``; the last node stays, the others go."""
        last, parent = chain[-1], chain[0].parent
        assert parent is not None
        last.key = b"".join(node.key for node in chain)
        last.blocks = np.concatenate([node.blocks for node in chain])
        last.parent = parent
        parent.children[last.key[: self.key_bytes]] = last
        for upper, lower in pairwise(chain):
            self.num_nodes -= 1
            upper.parent = None
            self.order.join(upper, lower)
        return last

    def _forget(self, node: Node) -> None:
        self.num_nodes -= 1
        node.parent = None
        self.order.remove(node)


def _raised(nodes: list[Node], level: int) -> list[Node]:
    """Have the path ``nodes`` on ``level`` at least."""
    for node in nodes:
        node.level = max(node.level, level)
    return nodes


def _shared_blocks(edge: bytes, key: bytes, offset: int, stride: int) -> int:
    """Number of whole blocks that ``edge`` and ``key[offset:]`` have in common at their start."""
    size = min(len(edge), (len(key) - offset) // stride * stride)
    left = np.frombuffer(edge, np.uint8, size)
    right = np.frombuffer(key, np.uint8, size, offset)
    if stride % 8 == 0 and offset % 8 == 0:
        left, right = left.view(np.uint64), right.view(np.uint64)
    differs = left != right
    first = int(differs.argmax())
    return (first * left.itemsize if differs[first] else size) // stride
