"""Random use of trees that share an eviction policy, as a pool uses them, for every policy.

After every step the victim is a leaf, and the one that a search through all known nodes finds.
"""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

import radix.leaves
from radix import ARC, LFU, LRU, S3FIFO, SLRU, CostAware, LeafOrder, RadixTree, check_invariants

TOKENS = st.lists(st.integers(0, 1), max_size=10)


class PolicyMachine(RuleBasedStateMachine):
    """Two trees of one-token blocks, two tokens."""

    make = LRU
    patch = pytest.MonkeyPatch()

    @initialize()
    def start(self):
        self.patch.setattr(radix.leaves, "POSTPONED", 3)
        self.order = type(self).make()
        self.trees = [RadixTree(4, self.order) for _ in range(2)]
        self.next_id = 0

    def fresh(self, count):
        self.next_id += count
        return np.arange(self.next_id - count, self.next_id, dtype=np.int32)

    @rule(which=st.integers(0, 1), tokens=TOKENS)
    def insert(self, which, tokens):
        tree = self.trees[which]
        found = tree.match(tokens)
        tree.insert(tokens, self.fresh(len(tokens) - found.num_blocks), found)

    @rule(which=st.integers(0, 1), tokens=TOKENS, times=st.integers(1, 3))
    def touch(self, which, tokens, times):
        tree = self.trees[which]
        for _ in range(times):
            tree.touch(tree.match(tokens))

    @rule(count=st.integers(1, 6))
    def evict(self, count):
        before = sum(tree.num_blocks for tree in self.trees)
        missing = count
        while missing and (node := self.order.victim()) is not None:
            assert not node.children, "a leaf, as all nodes are known"
            missing -= len(node.tree.trim(node, max(0, len(node.blocks) - missing)))
        assert sum(tree.num_blocks for tree in self.trees) == max(0, before - count)

    @rule(times=st.integers(1, 5))
    def postpone(self, times):
        """Asking and postponing comes to every leaf before it comes to one again."""
        seen = []
        for _ in range(times):
            if (node := self.order.victim()) is None:
                return
            if isinstance(self.order, LeafOrder):
                leaves = sum(not n.children for tree in self.trees for n in tree.walk())
                assert node not in seen[-leaves + 1 :] or leaves == 1
            seen.append(node)
            self.order.postpone(node)

    @rule(times=st.integers(1, 8))
    def use_victim(self, times):
        """Whether it was postponed or not."""
        for _ in range(times):
            if (node := self.order.victim()) is not None:
                self.order.touch(node.path())

    @rule(which=st.integers(0, 1), tokens=TOKENS, keep=st.integers(0, 2))
    def trim(self, which, tokens, keep):
        tree = self.trees[which]
        found = tree.match(tokens)
        if found.nodes:
            node = found.nodes[-1]
            tree.trim(node, min(keep, len(node.blocks) - 1))

    @rule()
    def forget_victim(self):
        """A tier's policy forgets what has no blocks there, and learns of it again at the next use."""
        if (node := self.order.victim()) is not None:
            path = node.path()
            self.order.remove(node)
            assert self.order.victim() is not node
            self.order.arrive(path)

    @rule(which=st.integers(0, 1))
    def clear(self, which):
        self.trees[which].clear()

    @rule()
    def drain_a_twin(self):
        """The order of iteration is one in which everything could leave."""
        known = set(self.order)
        for node in self.order:
            known.remove(node)
            assert node.parent not in (set(self.order) - known)
        assert not known

    @invariant()
    def the_order_knows_the_trees(self):
        if not hasattr(self, "trees"):
            return
        for tree in self.trees:
            check_invariants(tree)
        nodes = [node for tree in self.trees for node in tree.walk()]
        listed = list(self.order)
        assert len(self.order) == len(listed) == len(nodes)
        assert set(listed) == set(nodes)
        victim = self.order.victim()
        assert victim is (listed[0] if listed else None)
        assert self.order.victim() is victim
        if isinstance(self.order, LeafOrder):
            assert victim is self.naive_victim()

    def naive_victim(self):
        order = self.order
        postponed = list(order._postponed)
        leaves = [entry for entry in order._entries.values() if not entry.node.children]
        for queue in order._preferred():
            ranks = [
                (entry.key, entry.serial, entry.node)
                for entry in leaves
                if entry.queue == queue and entry not in postponed
            ]
            if ranks:
                return min(ranks, key=lambda rank: rank[:2])[2]
        return postponed[0].node if postponed else None

    def teardown(self):
        self.patch.undo()
        if not hasattr(self, "trees"):
            return
        total = sum(tree.num_blocks for tree in self.trees)
        for _ in range(total):
            node = self.order.victim()
            node.tree.trim(node, len(node.blocks) - 1)
        assert len(self.order) == 0
        assert self.order.victim() is None
        self.the_order_knows_the_trees()


class SLRUMachine(PolicyMachine):
    make = partial(SLRU, 0.5, correlated=1)


class S3FIFOMachine(PolicyMachine):
    make = partial(S3FIFO, 0.2, promote_after=1, correlated=0)


class ARCMachine(PolicyMachine):
    make = partial(ARC, correlated=0)


class LFUMachine(PolicyMachine):
    make = partial(LFU, correlated=1)


class CostAwareMachine(PolicyMachine):
    make = partial(CostAware, 2, correlated=0)


TestLRU = PolicyMachine.TestCase
TestSLRU = SLRUMachine.TestCase
TestS3FIFO = S3FIFOMachine.TestCase
TestARC = ARCMachine.TestCase
TestLFU = LFUMachine.TestCase
TestCostAware = CostAwareMachine.TestCase
