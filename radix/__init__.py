"""The prefix index: a path-compressed radix tree over token blocks.

A pure data structure (standard library and numpy): no I/O, no clock, no threads. See
:mod:`radix.tree` for the algorithm.
"""

from radix.check import check_invariants
from radix.groups import GroupedOrder
from radix.leaves import LeafOrder
from radix.order import LRU, EvictionOrder
from radix.policies import ARC, LFU, S3FIFO, SLRU, CostAware
from radix.priority import PriorityOrder
from radix.tokens import TokenError, token_bytes
from radix.tree import Match, Node, RadixTree

__all__ = [
    "ARC",
    "LFU",
    "LRU",
    "S3FIFO",
    "SLRU",
    "CostAware",
    "EvictionOrder",
    "GroupedOrder",
    "LeafOrder",
    "Match",
    "Node",
    "PriorityOrder",
    "RadixTree",
    "TokenError",
    "check_invariants",
    "token_bytes",
]
