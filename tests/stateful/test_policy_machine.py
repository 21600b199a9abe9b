"""Random use of trees that share an eviction policy, as a pool uses them, for every policy.

After every step the victim is a leaf, and the one that a search through all known nodes finds.
"""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

import radix.groups
import radix.leaves
import radix.priority
from radix import (
    ARC,
    LFU,
    LRU,
    S3FIFO,
    SLRU,
    CostAware,
    GroupedOrder,
    LeafOrder,
    PriorityOrder,
    RadixTree,
    check_invariants,
)

TOKENS = st.lists(st.integers(0, 1), max_size=10)


class PolicyMachine(RuleBasedStateMachine):
    """Two trees of one-token blocks, two tokens."""

    make = LRU
    patch = pytest.MonkeyPatch()

    @initialize()
    def start(self):
        self.patch.setattr(radix.leaves, "POSTPONED", 3)
        self.patch.setattr(radix.priority, "PASSED", 3)
        self.patch.setattr(radix.groups, "PASSED", 3)
        self.order = type(self).make()
        self.trees = [RadixTree(4, self.order) for _ in range(2)]
        self.next_id = 0

    def fresh(self, count):
        self.next_id += count
        return np.arange(self.next_id - count, self.next_id, dtype=np.int32)

    levels = st.just(0)

    @rule(which=st.integers(0, 1), tokens=TOKENS, data=st.data())
    def insert(self, which, tokens, data):
        tree = self.trees[which]
        found, level = tree.match(tokens), data.draw(self.levels)
        tree.insert(tokens, self.fresh(len(tokens) - found.num_blocks), found, level)

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


class PriorityMachine(PolicyMachine):
    """The same with levels, of which the lowest with a node to give goes first."""

    inner = LRU
    levels = st.integers(0, 2)

    @classmethod
    def make(cls):
        return PriorityOrder(cls.inner)

    @rule(which=st.integers(0, 1), tokens=TOKENS, level=st.integers(0, 2))
    def raise_level(self, which, tokens, level):
        tree = self.trees[which]
        found = tree.match(tokens)
        tree.touch(found, level)
        assert all(node.level >= level for node in tree.match(tokens).nodes)

    @rule()
    def give_way(self):
        """Nodes in use are passed over as long as any other can go, of whatever level."""
        nodes = [node for tree in self.trees for node in tree.walk()]
        used = {step for node in nodes[::2] for step in node.path()}
        for _ in range(len(nodes)):
            if (node := self.order.victim()) in used:
                self.order.postpone(node)
        assert self.order.victim() not in used or len(used) == len(nodes)

    @invariant()
    def the_lowest_level_goes_first(self):
        if not hasattr(self, "trees"):
            return
        passed = {node for level in self.order._levels.values() for node in level.passed}
        nodes = [node for tree in self.trees for node in tree.walk() if node not in passed]
        if nodes:
            assert self.order.victim().level == min(node.level for node in nodes)


class PriorityS3FIFOMachine(PriorityMachine):
    inner = S3FIFOMachine.make


class PriorityARCMachine(PriorityMachine):
    inner = ARCMachine.make


class PriorityCostAwareMachine(PriorityMachine):
    inner = CostAwareMachine.make


class GroupedMachine(PriorityMachine):
    """Each tree is a group."""

    @classmethod
    def make(cls):
        return GroupedOrder(lambda: PriorityOrder(cls.inner), lambda tree: str(id(tree)))

    @invariant()
    def the_lowest_level_goes_first(self):
        """Of what is not in use."""
        if not hasattr(self, "trees") or self.order._passed:
            return
        levels = [
            level for order in self.order._orders.values() for level in order._levels.values()
        ]
        if not any(level.passed for level in levels):
            nodes = [node.level for tree in self.trees for node in tree.walk()]
            victim = self.order.victim()
            assert victim is None or victim.level == min(nodes)


TestGrouped = GroupedMachine.TestCase
TestPriority = PriorityMachine.TestCase
TestPriorityS3FIFO = PriorityS3FIFOMachine.TestCase
TestPriorityARC = PriorityARCMachine.TestCase
TestPriorityCostAware = PriorityCostAwareMachine.TestCase
TestLRU = PolicyMachine.TestCase
TestSLRU = SLRUMachine.TestCase
TestS3FIFO = S3FIFOMachine.TestCase
TestARC = ARCMachine.TestCase
TestLFU = LFUMachine.TestCase
TestCostAware = CostAwareMachine.TestCase
