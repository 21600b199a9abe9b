"""The cache over one preallocated tensor behaves as Transformers' own."""

from __future__ import annotations

import copy
import math

import pytest
import torch
import transformers as hf

from engine_plugin.cache import BufferCache, Workspace


def buffers(batch=2, capacity=8):
    return torch.randn(3, 2, batch, 2, capacity, 4)


def append(cache, tokens, batch=2, seed=0):
    generator = torch.Generator().manual_seed(seed)
    for layer in range(3):
        states = torch.randn(2, batch, 2, tokens, 4, generator=generator)
        yield cache.update(states[0], states[1], layer)


OPERATIONS = {
    "crop": lambda cache: cache.crop(-2),
    "crop all": lambda cache: cache.crop(-50),
    "crop none": lambda cache: cache.crop(0),
    "reorder": lambda cache: cache.reorder_cache(torch.tensor([1, 0])),
    "select": lambda cache: cache.batch_select_indices(torch.tensor([1, 1])),
    "reset": lambda cache: cache.reset(),
    "nothing": lambda cache: None,
}


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("capacity", [4, 7, 8, 64])
def test_the_cache_behaves_as_a_dynamic_cache(operation, capacity):
    ours, theirs = BufferCache(buffers(capacity=capacity)), hf.DynamicCache()
    for count, seed in ((5, 1), (1, 2), (1, 3)):
        for pairs in zip(
            append(ours, count, seed=seed), append(theirs, count, seed=seed), strict=True
        ):
            assert all(torch.equal(a, b) for a, b in zip(*pairs, strict=True))
    for cache in (ours, theirs):
        OPERATIONS[operation](cache)
    assert ours.get_seq_length() == theirs.get_seq_length()
    ours = copy.deepcopy(ours)
    for count, seed in ((1, 4), (6, 5)):
        for pairs in zip(
            append(ours, count, seed=seed), append(theirs, count, seed=seed), strict=True
        ):
            assert all(torch.equal(a, b) for a, b in zip(*pairs, strict=True))
    assert ours.get_mask_sizes(3, 0) == theirs.get_mask_sizes(3, 0)
    assert ours.in_buffer == (operation not in ("reorder", "select"))
    if ours.in_buffer:
        shown = ours.kv[:, :, :, :, : ours.get_seq_length()]
        for layer, planes in zip(ours.layers, shown, strict=True):
            assert torch.equal(layer.keys, planes[0])
            assert torch.equal(layer.values, planes[1])


def test_repeating_the_batch_leaves_the_buffer():
    ours, theirs = BufferCache(buffers(batch=1)), hf.DynamicCache()
    for cache in (ours, theirs):
        list(append(cache, 3, batch=1))
        cache.batch_repeat_interleave(2)
    for mine, other in zip(append(ours, 2), append(theirs, 2), strict=True):
        assert torch.equal(mine[0], other[0])
    assert not ours.in_buffer


def test_a_row_writes_into_the_whole():
    kv = torch.zeros(3, 2, 2, 2, 8, 4)
    whole = BufferCache(kv)
    row = whole.row(1, 3)
    written = list(append(row, 2, batch=1))
    whole.show(5)
    assert torch.equal(whole.layers[2].keys[1, :, 3:5], written[2][0][0])
    assert not whole.layers[2].keys[0].any()
    assert row.get_seq_length() == 2


def test_a_workspace_lends_its_memory_once():
    workspace, shape = Workspace(), (3, 2, 1, 2, 300, 4)
    cpu = torch.device("cpu")
    first = workspace.take(shape, torch.float32, cpu, math.inf)
    assert first.shape == (3, 2, 1, 2, 512, 4)
    workspace.give_back(first)
    second = workspace.take((3, 2, 1, 2, 10, 4), torch.float32, cpu, math.inf)
    third = workspace.take(shape, torch.float32, cpu, math.inf)
    pointers = [each.untyped_storage().data_ptr() for each in (first, second, third)]
    assert pointers[0] == pointers[1] != pointers[2]
    workspace.give_back(second)  # all of its memory, not only what was used
    assert workspace.take(shape, torch.float32, cpu, math.inf).data_ptr() == pointers[0]
    workspace.give_back(third)
    assert workspace.take(shape, torch.bfloat16, cpu, math.inf).data_ptr() != pointers[2]


def test_memory_that_will_not_come_back_is_not_much_more_than_needed():
    workspace, cpu = Workspace(), torch.device("cpu")
    large = workspace.take((3, 2, 1, 2, 1000, 4), torch.float32, cpu, 2)
    workspace.give_back(large)
    small = workspace.take((3, 2, 1, 2, 256, 4), torch.float32, cpu, 2)
    assert small.untyped_storage().nbytes() == small.nbytes
    half = workspace.take((3, 2, 1, 2, 512, 4), torch.float32, cpu, 2)
    assert half.data_ptr() == large.data_ptr()  # the small one left it here
