"""The radix tree, case by case. tests/stateful has the model-based test."""

from __future__ import annotations

import os
import subprocess
import sys
import tracemalloc

import numpy as np
import pytest

from radix import LRU, RadixTree, check_invariants, token_bytes

BLOCK = 4


def make(*prompts):
    """A tree of blocks of four tokens, each prompt inserted with fresh ids."""
    tree = RadixTree(4 * BLOCK)
    for prompt in prompts:
        put(tree, prompt)
    return tree


def put(tree, prompt):
    total = len(prompt) // BLOCK
    found = tree.match(prompt)
    first = next_id(tree)
    tree.insert(prompt, np.arange(first, first + total - found.num_blocks, dtype=np.int32), found)
    check_invariants(tree)


def next_id(tree):
    return max((int(node.blocks.max()) + 1 for node in tree.walk()), default=0)


def hit(tree, prompt):
    return tree.match(prompt).num_blocks


def ids(tree, prompt):
    return tree.match(prompt).block_ids().tolist()


A = list(range(100, 116))


def test_empty_and_short_prompts():
    tree = make()
    for prompt in ([], [1], [1, 2, 3]):
        put(tree, prompt)
        assert hit(tree, prompt) == 0
    assert tree.num_nodes == 0


def test_match_ends_at_the_first_different_token_of_each_position():
    tree = make(A)
    for position in range(16):
        changed = list(A)
        changed[position] += 1
        assert hit(tree, changed) == position // BLOCK


def test_a_lookup_never_reduces_a_later_one():
    tree = make(A)
    for length in [*range(18), *range(17, -1, -1)] * 2:
        assert hit(tree, (A + A)[:length]) == min(length, 16) // BLOCK
    assert tree.num_nodes == 1


def test_splits_at_block_boundaries_only():
    """[a,b,c,d] and [a,b,x,…] share tokens but no block."""
    tree = make([1, 2, 3, 4], [1, 2, 9, 9])
    assert tree.num_nodes == 2
    assert ids(tree, [1, 2, 3, 4]) == [0]
    assert ids(tree, [1, 2, 9, 9]) == [1]
    tree.evict(1)
    check_invariants(tree)
    assert hit(tree, [1, 2, 9, 9]) == 1


def test_split_keeps_every_id():
    tree = make(A, [*A[:8], 1, 1, 1, 1])
    assert tree.num_nodes == 3
    assert ids(tree, A) == [0, 1, 2, 3]
    assert ids(tree, [*A[:8], 1, 1, 1, 1]) == [0, 1, 4]


def test_second_insert_keeps_the_first_ids():
    tree = make(A)
    assert tree.insert(A, np.arange(50, 54, dtype=np.int32)) == 4
    assert ids(tree, A) == [0, 1, 2, 3]
    longer = A + [1] * 8
    assert tree.insert(longer, np.arange(60, 66, dtype=np.int32)) == 4
    assert ids(tree, longer) == [0, 1, 2, 3, 64, 65]


def test_ids_that_leave_a_gap_are_refused():
    tree = make(A)
    longer = A + [1] * 8
    for count in (1, 7):
        with pytest.raises(ValueError, match="6 blocks, of which 4 are known"):
            tree.insert(longer, np.arange(count, dtype=np.int32))
    check_invariants(tree)
    assert hit(tree, longer) == 4


def test_match_never_changes_the_tree():
    tree = make(A, [*A[:8], 1, 1, 1, 1], [7] * 8)
    before = [(node, node.key, node.blocks.tolist()) for node in tree.walk()]
    order = list(tree.order)
    for prompt in (A, A[:9], A[:12] + [1] * 8, [7] * 20, []):
        tree.match(prompt)
    assert [(node, node.key, node.blocks.tolist()) for node in tree.walk()] == before
    assert list(tree.order) == order


def test_growing_by_one_block_stays_one_node():
    tree = make()
    for length in range(4, 400, 4):
        put(tree, list(range(length)))
        assert tree.num_nodes == 1
    assert ids(tree, range(396)) == list(range(99))


def test_a_trunk_becomes_one_node_again_when_its_branches_are_gone():
    trunk = list(range(64))
    tree = make(trunk, *[trunk[:cut] + [999] * 4 for cut in range(4, 64, 4)])
    assert tree.num_nodes == 31
    for cut in range(4, 64, 4):
        branch = tree.match(trunk[:cut] + [999] * 4).nodes[-1]
        tree.trim(branch, 0)
    tree.touch(tree.match(trunk))
    check_invariants(tree)
    assert tree.num_nodes == 1
    assert ids(tree, trunk) == list(range(16))


def test_least_recently_used_leaf_goes_first_from_its_tail():
    shared = [5] * 8
    old, new = shared + [1] * 8, shared + [2] * 8
    tree = make(old, new)
    assert tree.evict(1).tolist() == [3]
    assert hit(tree, old) == 3
    tree.touch(tree.match(old))
    assert tree.evict(3).tolist() == [4, 5, 2]
    assert (hit(tree, old), hit(tree, new)) == (2, 2)
    assert sorted(tree.evict(100).tolist()) == [0, 1]
    assert tree.num_blocks == tree.num_nodes == len(tree.order) == 0


def test_a_short_use_of_a_long_prompt_keeps_only_what_it_used():
    tree = make([1] * 16, [2] * 16)
    tree.touch(tree.match([1] * 4))
    check_invariants(tree)
    assert set(tree.evict(3).tolist()) == {1, 2, 3}
    assert set(tree.evict(4).tolist()) == {4, 5, 6, 7}
    assert hit(tree, [1] * 16) == 1


def test_clear():
    tree = make(A, [*A[:8], 1, 1, 1, 1], [7] * 8)
    assert sorted(tree.clear().tolist()) == list(range(7))
    check_invariants(tree)
    assert (tree.num_nodes, tree.num_blocks, len(tree.order), hit(tree, A)) == (0, 0, 0, 0)


def test_trim_takes_everything_below():
    tree = make(A, [*A[:8], 1, 1, 1, 1])
    upper = tree.match(A[:8]).nodes[0]
    assert sorted(tree.trim(upper, 1).tolist()) == [1, 2, 3, 4]
    check_invariants(tree)
    assert hit(tree, A) == 1
    with pytest.raises(ValueError, match="root"):
        tree.trim(tree.root, 0)


def test_trees_that_share_an_order_are_evicted_together():
    order = LRU()
    first, second = RadixTree(16, order), RadixTree(16, order)
    first.insert([1] * 8, np.array([0, 1], np.int32))
    second.insert([1] * 8, np.array([2, 3], np.int32))
    first.touch(first.match([1] * 8))
    victim = order.victim()
    assert victim is not None
    assert victim.tree is second


def test_long_prompt():
    prompt = np.arange(1_000_000, dtype=np.int32)
    tree = RadixTree(64)
    tree.insert(prompt, np.arange(62_500, dtype=np.int32))
    assert tree.match(prompt).num_blocks == 62_500
    prompt[999_999] += 1
    assert tree.match(prompt).num_blocks == 62_499
    assert len(tree.evict(62_000)) == 62_000
    check_invariants(tree)


def test_a_hundred_thousand_children_of_the_root():
    tree = RadixTree(16)
    for number in range(100_000):
        tree.insert(token_bytes([number] * 4), np.array([number], np.int32))
    check_invariants(tree)
    assert ids(tree, [77_777] * 4) == [77_777]
    assert sorted(tree.evict(100_000).tolist()) == list(range(100_000))


def test_depth_ten_thousand_without_recursion():
    """Each block of the trunk has a branch, so the path is 10,000 nodes deep."""
    depth = 10_000
    trunk = np.repeat(np.arange(depth, dtype=np.int32), BLOCK)
    tree = RadixTree(4 * BLOCK)
    tree.insert(trunk, np.arange(depth, dtype=np.int32))
    key = token_bytes(trunk)
    for cut in reversed(range(1, depth)):  # from the deepest: each split is near the root
        branch = key[: cut * 16] + token_bytes([2**30] * 4)
        tree.insert(branch, np.array([depth + cut], np.int32))
    assert len(tree.match(trunk).nodes) == depth
    check_invariants(tree)
    tree.touch(tree.match(trunk))
    top = tree.match(trunk[:BLOCK]).nodes[0]
    assert len(tree.trim(top, 0)) == 2 * depth - 1
    assert tree.num_nodes == 0


def test_memory_of_trimmed_tails_comes_back():
    """Nodes own their bytes: no view keeps a longer buffer alive."""
    rng = np.random.default_rng(0)
    tracemalloc.start()
    try:
        tree = RadixTree(64)
        for number in range(50):
            prompt = rng.integers(0, 1000, 16 * 1000, dtype=np.int32)
            tree.insert(prompt, np.arange(number * 1000, (number + 1) * 1000, dtype=np.int32))
        full, _ = tracemalloc.get_traced_memory()
        for node in list(tree.walk()):
            tree.trim(node, 10)
        kept, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert tree.num_blocks == 500
    assert kept < full / 20


def test_nodes_are_bounded_by_blocks():
    """Two million tokens of distinct prompts through a thousand blocks leave no trace."""
    tree = RadixTree(16)
    rng = np.random.default_rng(0)
    for number in range(20_000):
        free = 1000 - tree.num_blocks
        if free < 8:
            tree.evict(8 - free)
        prompt = rng.integers(0, 3, 32, dtype=np.int32)
        found = tree.match(prompt)
        fresh = np.arange(number * 8, number * 8 + 8 - found.num_blocks, dtype=np.int32)
        tree.insert(prompt, fresh, found)
        assert tree.num_blocks <= 1000
        assert tree.num_nodes <= tree.num_blocks
        assert len(tree.order) == tree.num_nodes
    check_invariants(tree)


def test_a_wrong_tree_is_noticed():
    """The checker finds each kind of damage."""

    def damage(change, says):
        tree = make(A, [*A[:8], 1, 1, 1, 1])
        upper = tree.match(A[:8]).nodes[0]
        change(tree, upper)
        with pytest.raises(AssertionError, match=says):
            check_invariants(tree)

    def swap_child(tree, upper):
        upper.children[b"x" * 16] = upper.children.pop(next(iter(upper.children)))

    def same_id(tree, upper):
        upper.blocks[0] = upper.blocks[1]

    damage(swap_child, "3:")
    damage(same_id, "4:")
    damage(lambda tree, upper: setattr(upper, "key", upper.key[:-1]), "2:")
    damage(lambda tree, upper: setattr(tree, "num_blocks", 99), "5:")
    damage(lambda tree, upper: setattr(tree, "num_nodes", 99), "5:")
    damage(lambda tree, upper: setattr(tree.root, "key", b"x"), "1:")
    damage(lambda tree, upper: tree.order.remove(upper), "LRU")


def test_matching_does_not_depend_on_the_hash_seed():
    program = (
        "import numpy as np; from radix import RadixTree; t = RadixTree(8);"
        "t.insert([1, 2, 3, 4], np.array([5, 6], np.int32)); print(t.match([1, 2, 3, 4, 5]).block_ids())"
    )
    outputs = {
        subprocess.run(
            [sys.executable, "-c", program],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("0", "1", "77")
    }
    assert outputs == {"[5 6]\n"}
