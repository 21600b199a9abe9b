"""Eviction by level and by group: what goes first, what is raised, and that one of them is the order itself."""

import random

import numpy as np
import pytest

from radix import (
    ARC,
    LFU,
    LRU,
    S3FIFO,
    SLRU,
    CostAware,
    GroupedOrder,
    PriorityOrder,
    RadixTree,
    check_invariants,
)
from radix.priority import PASSED

POLICIES = [LRU, SLRU, S3FIFO, ARC, LFU, CostAware]


class Blocks:
    """A tree of one-token blocks that gives out ids."""

    def __init__(self, order):
        self.order = order
        self.tree = RadixTree(4, order)
        self.next_id = 0

    def put(self, tokens, level=0):
        found = self.tree.match(tokens)
        fresh = np.arange(
            self.next_id, self.next_id + len(tokens) - found.num_blocks, dtype=np.int32
        )
        self.next_id += len(fresh)
        self.tree.insert(tokens, fresh, found, level)

    def use(self, tokens):
        self.tree.touch(self.tree.match(tokens))

    def evict(self):
        """Evict one block; return the prompt that ended with it."""
        node = self.order.victim()
        gone = np.frombuffer(node.tree.prefix(node), "<i4").tolist()
        node.tree.trim(node, len(node.blocks) - 1)
        check_invariants(self.tree)
        return gone


@pytest.fixture(params=POLICIES)
def blocks(request):
    return Blocks(PriorityOrder(request.param))


@pytest.mark.parametrize("make", POLICIES)
@pytest.mark.parametrize("seed", range(3))
def test_one_level_is_exactly_the_inner_order(make, seed):
    draw = random.Random(seed)
    plain, levelled = Blocks(make()), Blocks(PriorityOrder(make))
    for _ in range(400):
        tokens = [draw.randrange(3) for _ in range(draw.randrange(1, 7))]
        action = draw.choice(["put", "put", "use", "evict", "postpone"])
        for blocks in (plain, levelled):
            if action == "put":
                blocks.put(tokens, 7)
            elif action == "use":
                blocks.use(tokens)
            elif action == "postpone" and blocks.order.victim():
                blocks.order.postpone(blocks.order.victim())
        if action == "evict" and len(plain.order):
            assert plain.evict() == levelled.evict()
        prefixes = [
            [blocks.tree.prefix(node) for node in blocks.order] for blocks in (plain, levelled)
        ]
        assert prefixes[0] == prefixes[1]


def test_lower_levels_go_first_whatever_was_used(blocks):
    for level in (80, 0, 50):
        blocks.put([level], level)
    for _ in range(40):
        blocks.use([0])
    assert [blocks.evict() for _ in range(3)] == [[0], [50], [80]]


def test_what_an_important_prompt_begins_with_is_as_important(blocks):
    blocks.put([1, 2], 10)
    blocks.put([1, 3], 90)
    blocks.put([4], 50)
    assert [blocks.evict() for _ in range(4)] == [[1, 2], [4], [1, 3], [1]]


def test_storing_again_raises_and_never_lowers(blocks):
    blocks.put([1, 2], 10)
    blocks.put([3], 50)
    blocks.put([1], 90)
    blocks.put([1], 0)
    assert [blocks.evict() for _ in range(3)] == [[1, 2], [3], [1]]


def test_a_use_changes_no_level(blocks):
    blocks.put([1], 10)
    blocks.put([2], 90)
    blocks.use([1])
    assert blocks.evict() == [1]


def test_nodes_of_two_levels_are_not_merged_and_those_of_one_are(blocks):
    blocks.put([1], 90)
    blocks.put([1, 2], 10)
    assert blocks.tree.num_nodes == 2
    blocks.put([1, 2], 90)
    assert blocks.tree.num_nodes == 1
    assert len(blocks.order) == 1
    check_invariants(blocks.tree)


def test_what_is_in_use_gives_way_to_the_next_level(blocks):
    """And no ancestor of it goes in its place."""
    blocks.put([1], 50)
    blocks.put([1, 2], 10)
    blocks.put([3], 50)
    blocks.put([4], 90)
    in_use = blocks.tree.match([1, 2]).nodes
    seen = []
    while (node := blocks.order.victim()) in in_use:
        seen.append(node)
        blocks.order.postpone(node)
    assert seen == in_use[1:]
    assert [blocks.evict(), blocks.evict()] == [[3], [4]]
    assert blocks.evict() == [1, 2], "nothing else is left"


def test_what_was_in_use_is_a_victim_again_after_a_while(blocks):
    blocks.put([1], 10)
    blocks.put([2], 50)
    blocks.order.postpone(blocks.order.victim())
    assert blocks.order.victim().level == 50
    for _ in range(PASSED):
        blocks.use([2])
    assert blocks.order.victim().level == 10


def test_everything_in_use_comes_up_again(blocks):
    for number in range(4):
        blocks.put([number], 10 * number)
    seen = []
    for _ in range(10):
        seen.append(blocks.order.victim())
        blocks.order.postpone(seen[-1])
    assert len(set(seen[:4])) == len(set(seen[4:])) == 4


# -- groups


@pytest.mark.parametrize("seed", range(3))
def test_lru_by_group_is_lru_of_all(seed):
    """Two trees each, whose nodes have levels."""
    draw = random.Random(seed)
    sides = []
    for order in (PriorityOrder(LRU), GroupedOrder(lambda: PriorityOrder(LRU), lambda t: t.name)):
        sides.append([Blocks(order) for _ in range(2)])
        for name, blocks in zip("ab", sides[-1], strict=True):
            blocks.tree.name = name
    for _ in range(400):
        tokens = [draw.randrange(3) for _ in range(draw.randrange(1, 7))]
        which, level = draw.randrange(2), draw.choice([0, 0, 50])
        action = draw.choice(["put", "put", "use", "evict"])
        for side in sides:
            if action == "put":
                side[which].put(tokens, level)
            elif action == "use":
                side[which].use(tokens)
        if action == "evict" and len(sides[0][0].order):
            assert sides[0][0].evict() == sides[1][0].evict()
        sides[1][0].order.check_invariants()


def test_the_victim_is_of_the_groups_that_are_asked():
    order = GroupedOrder(LRU, lambda tree: tree.name)
    first, second = Blocks(order), Blocks(order)
    first.tree.name, second.tree.name = "a", "b"
    first.put([1])
    second.put([2])
    assert order.victim().tree is first.tree
    assert order.victim_among(["b"]).tree is second.tree
    assert order.victim_among([]) is order.victim_among(["c"]) is None
    order.postpone(order.victim())
    assert order.victim().tree is second.tree
