"""The invariants of :class:`radix.RadixTree`, as code."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from radix.groups import GroupedOrder
from radix.leaves import LeafOrder
from radix.order import LRU
from radix.priority import PriorityOrder

if TYPE_CHECKING:
    from radix.tree import RadixTree


def check_invariants(tree: RadixTree) -> None:
    """Raise AssertionError naming the first broken invariant of ``tree``, in their documented order."""
    root, stride = tree.root, tree.key_bytes
    _require(not root.key and not len(root.blocks) and root.parent is None, "1: the root is empty")
    nodes = list(tree.walk())
    for node in nodes:
        _require(len(node.blocks) > 0, "2: a node has blocks")
        _require(len(node.key) == stride * len(node.blocks), "2: one key for each block")
        siblings = node.parent.children if node.parent else {}
        _require(siblings.get(node.key[:stride]) is node, "3: a node is its parent's child")
        _require(node.tree is tree, "3: a node belongs to this tree")
    ids = np.concatenate([node.blocks for node in nodes]) if nodes else np.empty(0, np.int32)
    _require(len(np.unique(ids)) == len(ids), "4: no block id occurs twice")
    _require(tree.num_nodes == len(nodes), f"5: num_nodes {tree.num_nodes} is {len(nodes)}")
    _require(tree.num_blocks == len(ids), f"5: num_blocks {tree.num_blocks} is {len(ids)}")
    for node in nodes:
        above = node.parent.level if node.parent and node.parent is not root else node.level
        _require(above >= node.level, "6: no node has a higher level than its parent")
    if isinstance(tree.order, LeafOrder | PriorityOrder | GroupedOrder):
        tree.order.check_invariants()
    if isinstance(tree.order, LRU):
        age = {node: position for position, node in enumerate(tree.order)}
        for node in nodes:
            _require(node in age, "LRU: every node is known")
            if node.parent is not None and node.parent is not root:
                newer = age[node] < age[node.parent]
                _require(newer, "LRU: a parent is more recent than its children")


def _require(condition: object, invariant: str) -> None:
    if not condition:
        raise AssertionError(invariant)
