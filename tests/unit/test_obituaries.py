"""What is remembered of lost blocks: how much, for how long, and by whom it is found."""

from __future__ import annotations

import numpy as np
import pytest

from kvstore.explain import MAX_POSITIONS, Loss, Obituaries
from kvstore.testing import FakeClock
from radix import RadixTree


def tree_of(tokens, stride=4):
    tree = RadixTree(stride)
    key = np.array(list(tokens), "<i4").tobytes()
    tree.insert(key, np.arange(len(key) // stride, dtype=np.int32))
    (node,) = tree.walk()
    return tree, node, key


def test_obituaries_are_bounded_and_the_oldest_go():
    clock = FakeClock()
    obituaries = Obituaries(clock, max_entries=10)
    _, node, key = tree_of(range(100))
    for position in range(50):
        obituaries.add(b"d", node, position, "capacity")
        obituaries.add_cleared(position.to_bytes(2, "little"))
        clock.advance(1)
    assert len(obituaries) == 20
    found = [obituaries.find(b"d", key, 4, position) for position in range(50)]
    assert [entry is not None for entry in found] == [False] * 40 + [True] * 10
    assert found[-1] == Loss("capacity", 1, 49)
    assert [
        obituaries.find(position.to_bytes(2, "little"), key, 4, 99) is None
        for position in range(50)
    ] == [True] * 40 + [False] * 10


def test_what_is_lost_again_is_remembered_as_new():
    clock = FakeClock()
    obituaries = Obituaries(clock, max_entries=2)
    _, node, key = tree_of(range(10))
    for position, reason in ((1, "capacity"), (2, "capacity"), (1, "corrupt"), (3, "aborted")):
        obituaries.add(b"d", node, position, reason)
        clock.advance(1)
    found = [obituaries.find(b"d", key, 4, position) for position in (0, 1, 2, 3, 9, 10)]
    corrupt, aborted = Loss("corrupt", 2, 1), Loss("aborted", 1, 3)
    assert found == [None, corrupt, corrupt, aborted, aborted, None]


def test_an_obituary_is_found_by_namespace_position_and_the_last_blocks():
    obituaries = Obituaries(FakeClock())
    _, node, key = tree_of([7] * 2000)
    obituaries.add(b"d", node, 1500, "capacity")
    lost = Loss("capacity", 0, 1500)
    for position in (1500, 1501, 1999):
        assert obituaries.find(b"d", key, 4, position) == lost
    assert obituaries.find(b"e", key, 4, 1500) is None
    assert obituaries.find(b"d", key, 4, 1499) is None, "repetitions are told apart"
    far, near = bytearray(key), bytearray(key)
    far[0] ^= 1
    near[1499 * 4] ^= 1
    assert obituaries.find(b"d", bytes(far), 4, 1500) == lost, "only the last 2 KiB"
    assert obituaries.find(b"d", bytes(near), 4, 1500) is None


def test_a_loss_reaches_down_to_the_deepest_block_that_went_and_so_far_is_looked_back():
    tree, _, key = tree_of(range(2000))
    tree.insert(key[:400] + b"x" * 400, np.arange(3000, 3100, dtype=np.int32))
    obituaries = Obituaries(FakeClock())
    (root,) = tree.root.children.values()
    obituaries.add(b"d", root, 50, "capacity")
    branch = key[:400] + b"x" * 8000
    for position, found in ((50, True), (1000, True), (50 + MAX_POSITIONS, False)):
        assert (obituaries.find(b"d", key, 4, position) is not None) == found, position
        assert (obituaries.find(b"d", branch, 4, position) is not None) == found, position
    assert obituaries.find(b"d", key, 4, 49 + MAX_POSITIONS) == Loss("capacity", 0, 50)
    tree.trim(root, 0)
    tree.insert(key[:240], np.arange(60, dtype=np.int32))
    (root,) = tree.root.children.values()
    obituaries.add(b"d", root, 50, "evicted")
    assert obituaries.find(b"d", key, 4, 60) == Loss("evicted", 0, 50), "what else went is not back"
    obituaries.add(b"e", root, 50, "evicted")
    assert obituaries.find(b"e", key, 4, 59) == Loss("evicted", 0, 50)
    assert obituaries.find(b"e", key, 4, 60) is None


@pytest.mark.parametrize("cuts", [[3], [1, 2, 3], list(range(1, 40)), [600], [511, 512, 513]])
def test_it_does_not_matter_how_the_tree_is_cut_into_nodes(cuts):
    tree, _, key = tree_of(range(700))
    for cut in cuts:  # branches off after so many blocks
        branch = key[: cut * 4] + b"\xff" * 4
        tree.insert(branch, np.array([10_000 + cut], np.int32))
    path = tree.match(key).nodes
    above = 0
    for node in path:
        for keep in {0, len(node.blocks) - 1}:
            obituaries = Obituaries(FakeClock())
            obituaries.add(b"d", node, keep, "capacity")
            lost = Loss("capacity", 0, above + keep)
            assert obituaries.find(b"d", key, 4, above + keep) == lost
            assert obituaries.find(b"d", key, 4, 699) == lost, "the last one went with it"
        above += len(node.blocks)
    assert above == 700


def test_a_block_longer_than_the_context_is_its_own_context():
    obituaries = Obituaries(FakeClock())
    _, node, key = tree_of(range(4096), stride=4096)
    obituaries.add(b"d", node, 2, "capacity")
    lost = Loss("capacity", 0, 2)
    assert obituaries.find(b"d", key, 4096, 2) == lost
    assert obituaries.find(b"d", b"x" + key[1:], 4096, 2) == lost
    assert obituaries.find(b"d", key[:-4097] + b"x" + key[-4096:], 4096, 3) is None
