"""Finding out how an engine's KV pages lie, with back ends that write in known ways."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from engine_plugin.vllm.pages import Pages, Rank, find_layout
from kvstore.errors import UsageError

LAYERS, BLOCKS, HEADS, TOKENS, DIM = 3, 6, 4, 8, 16


class Backend:
    """Writes ``[K, V]`` of each token and head, one behind the other."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.kv_cache, self.impl, self.dtype = tensor, self, torch.float32

    def do_kv_cache_update(self, layer, keys, values, cache, slots):
        for index, slot in enumerate(slots.tolist()):
            block, token = divmod(slot, cache.shape[2])
            self.put(cache, block, token, keys[index], values[index])

    def put(self, cache, block, token, key, value):
        cache[block, :, token] = torch.cat([key, value], dim=1)


class Transposed(Backend):
    """Tiles: per head a region of keys, token by token in columns, then one of values."""

    def put(self, cache, block, token, key, value):
        page = cache[block].reshape(cache.shape[1], 2, -1)
        page[:, 0].view(-1, DIM, TOKENS)[:, :, token] = key
        page[:, 1].view(-1, TOKENS, DIM)[:, token] = value


class HeadsInside(Backend):
    """Heads of one token beside one another, in an order of its own."""

    def put(self, cache, block, token, key, value):
        page = cache[block].reshape(2, TOKENS, DIM, -1)
        page[0, token], page[1, token] = key.T, value.T


class Astray(Backend):
    def put(self, cache, block, token, key, value):
        super().put(cache, block, token, key, value)
        super().put(cache, 0 if block != 1 else 2, token, key, value)


class Nothing(Backend):
    def put(self, cache, block, token, key, value):
        pass


class DependsOnBlock(Backend):
    def put(self, cache, block, token, key, value):
        super().put(cache, block, token, key + block, value)


class CannotWrite(Backend):
    def do_kv_cache_update(self, *arguments):
        raise NotImplementedError("not this one")


def memory(heads: int = HEADS, order: str = "LBHNC") -> list[torch.Tensor]:
    """KV tensors ``[blocks, heads, tokens, 2 * dim]`` whose bytes lie in ``order``."""
    if order == "LBNHC":
        return list(torch.zeros(LAYERS, BLOCKS, TOKENS, heads, 2 * DIM).transpose(2, 3))
    if order == "apart":
        return [torch.zeros(BLOCKS, heads, TOKENS, 2 * DIM) for _ in range(LAYERS)]
    if order == "backwards":
        return list(torch.zeros(LAYERS, BLOCKS, heads, TOKENS, 2 * DIM))[::-1]
    if order == "BLHNC":
        return list(torch.zeros(BLOCKS, LAYERS, heads, TOKENS, 2 * DIM).transpose(0, 1))
    return list(torch.zeros(LAYERS, BLOCKS, heads, TOKENS, 2 * DIM))


def find(backend: type[Backend], layers: list[torch.Tensor], rank: Rank | None = None) -> Pages:
    heads = layers[0].shape[1]
    rank = rank or Rank(heads, 0, heads, stores=True)
    return find_layout(layers, [backend(t) for t in layers], rank, (DIM, DIM), backend.__name__)


@pytest.fixture(params=["host", "device"])
def find_here(request, monkeypatch):
    """Find layouts; copies are done as on the host, or as on a device, in stages of two blocks."""

    def find_as_on_a_device(*arguments):
        pages = find(*arguments)
        pages.on_host = False
        monkeypatch.setattr("engine_plugin.vllm.pages.STAGED_BYTES", 2 * pages.layout.block_bytes)
        return pages

    return find if request.param == "host" else find_as_on_a_device


def write_random(backend: type[Backend], layers: list[torch.Tensor], kv: torch.Tensor, block: int):
    """Have the back end write ``kv[layer, K|V, head, token, dim]`` to a block."""
    slots = torch.arange(block * TOKENS, (block + 1) * TOKENS)
    for tensor, (keys, values) in zip(layers, kv, strict=True):
        backend(tensor).do_kv_cache_update(
            None, keys.transpose(0, 1), values.transpose(0, 1), tensor, slots
        )


@pytest.mark.parametrize("order", ["LBHNC", "LBNHC", "BLHNC", "apart", "backwards"])
def test_packed_content_is_stored_in_canonical_order(find_here, order):
    layers = memory(order=order)
    pages = find_here(Backend, layers)
    assert pages.layout.opaque is None
    assert pages.layout.shape == (LAYERS, 2, HEADS, TOKENS, DIM)
    kv = torch.randn(pages.layout.shape)
    write_random(Backend, layers, kv, 4)
    buffer = np.zeros(2 * pages.layout.block_bytes, np.uint8)
    pages.save(buffer, np.array([pages.layout.block_bytes]), [4])
    assert not buffer[: pages.layout.block_bytes].any()
    stored = buffer[pages.layout.block_bytes :].view(np.float32).reshape(kv.shape)
    np.testing.assert_array_equal(stored, kv.numpy())


def test_tiles_are_stored_as_they_are_under_the_writers_name():
    pages = find(Transposed, memory())
    assert pages.layout.opaque == "Transposed:torch.float32"
    assert pages.layout.block_bytes == LAYERS * HEADS * TOKENS * 2 * DIM * 4


@pytest.mark.parametrize("backend", [Backend, Transposed])
@pytest.mark.parametrize("order", ["LBHNC", "BLHNC", "apart", "backwards"])
def test_what_was_saved_can_be_loaded_by_layers_and_into_other_blocks(find_here, backend, order):
    layers = memory(order=order)
    pages = find_here(backend, layers)
    kv = torch.randn(2, LAYERS, 2, HEADS, TOKENS, DIM)
    write_random(backend, layers, kv[0], 1)
    write_random(backend, layers, kv[1], 5)
    expected = [layer[[5, 1]].clone() for layer in layers]
    buffer = np.zeros(3 * pages.layout.block_bytes, np.uint8)
    offsets = np.array([2, 0]) * pages.layout.block_bytes
    pages.save(buffer, offsets, [5, 1])
    for layer in layers:
        layer.zero_()
    read_only = buffer.copy()
    read_only.flags.writeable = False
    for index in range(LAYERS):
        pages.load(read_only, offsets, [2, 3], slice(index, index + 1))
        assert all(bool(layer.any()) == (i <= index) for i, layer in enumerate(layers))
    for layer, wanted in zip(layers, expected, strict=True):
        assert torch.equal(layer[[2, 3]], wanted)
        assert not layer[[0, 1, 4, 5]].any()


@pytest.mark.parametrize("order", ["LBHNC", "BLHNC", "apart", "backwards"])
@pytest.mark.parametrize(
    ("blocks", "slots"),
    [
        ([1, 2, 3, 4, 5], [0, 1, 2, 3, 4]),
        ([5, 4, 3, 2, 1], [0, 1, 2, 3, 4]),
        ([5, 3, 1], [4, 2, 0]),
        ([1, 2, 4, 5, 3], [6, 5, 0, 1, 3]),
        ([2, 0, 4, 0, 1], [0, 1, 2, 3, 4]),
        ([3], [5]),
        ([0, 0], [1, 2]),
        ([], []),
    ],
)
def test_blocks_and_slots_in_any_order(find_here, order, blocks, slots):
    layers = memory(order=order)
    pages = find_here(Transposed, layers)
    for layer in layers:
        layer.copy_(torch.randn(layer.shape))
    before = [layer.clone() for layer in layers]
    size = pages.layout.block_bytes
    buffer = np.zeros(8 * size, np.uint8)
    pages.save(buffer, np.array(slots, np.int64) * size, blocks)
    used = {slot: block for slot, block in zip(slots, blocks, strict=True) if block}
    for slot in range(8):
        stored = torch.from_numpy(buffer[slot * size : (slot + 1) * size]).view(LAYERS, -1)
        if slot not in used:
            assert not stored.any()
            continue
        for layer, part in zip(layers, stored, strict=True):
            assert torch.equal(layer[used[slot]].reshape(-1).view(torch.uint8), part)
    for layer in layers:
        layer.zero_()
    pages.load(buffer, np.array(slots, np.int64) * size, blocks, slice(None))
    for layer, old in zip(layers, before, strict=True):
        for block in range(BLOCKS):
            wanted = old[block] if block in used.values() else torch.zeros_like(old[block])
            assert torch.equal(layer[block], wanted)


def test_no_block_is_skipped(find_here):
    layers = memory()
    pages = find_here(Backend, layers)
    buffer = np.ones(pages.layout.block_bytes, np.uint8)
    pages.load(buffer, np.zeros(1, np.int64), [0], slice(None))
    assert not any(layer.any() for layer in layers)


@pytest.mark.parametrize("backend", [Backend, Transposed])
@pytest.mark.parametrize("num_ranks", [2, 4])
def test_ranks_write_what_one_engine_reads(find_here, backend, num_ranks):
    kv = torch.randn(LAYERS, 2, HEADS, TOKENS, DIM)
    local = HEADS // num_ranks
    buffer = None
    for number in range(num_ranks):
        layers = memory(local)
        rank = Rank.of(number, num_ranks, local, HEADS)
        pages = find_here(backend, layers, rank)
        write_random(backend, layers, kv[:, :, rank.start : rank.stop], 3)
        if buffer is None:
            buffer = np.zeros(pages.layout.block_bytes, np.uint8)
        assert pages.block_bytes * num_ranks == pages.layout.block_bytes
        pages.save(buffer, np.zeros(1, np.int64), [3])
    whole, reference = memory(), memory()
    reader = find_here(backend, whole)
    assert reader.layout == pages.layout
    reader.load(buffer, np.zeros(1, np.int64), [2], slice(None))
    write_random(backend, reference, kv, 2)
    assert all(torch.equal(a, b) for a, b in zip(whole, reference, strict=True))


@pytest.mark.parametrize(
    ("backend", "reason"),
    [
        (Astray, "changes another"),
        (Nothing, "not in its page"),
        (DependsOnBlock, "look different in another"),
        (CannotWrite, "does not write as expected"),
    ],
)
def test_unknown_ways_are_refused_with_a_reason(backend, reason):
    with pytest.raises(UsageError, match=reason):
        find(backend, memory())


def test_ranks_cannot_share_pages_whose_heads_are_mixed():
    assert find(HeadsInside, memory()).layout.opaque
    with pytest.raises(UsageError, match="heads of a KV page do not lie"):
        find(HeadsInside, memory(2), Rank.of(0, 2, 2, HEADS))


def test_the_probe_leaves_zeros():
    layers = memory()
    find(Transposed, layers)
    assert not any(layer.any() for layer in layers)


def test_layers_must_be_alike():
    layers = memory()
    layers[1] = torch.zeros(BLOCKS, HEADS, TOKENS, 4 * DIM)
    with pytest.raises(UsageError, match="layer 1"):
        find(Backend, layers)


def test_too_few_blocks_are_refused():
    with pytest.raises(UsageError, match="too few"):
        find(Backend, [layer[:2] for layer in memory()])


@pytest.mark.parametrize(
    ("ranks", "local", "total", "expected"),
    [
        (1, 8, 8, [(0, 8, True)]),
        (2, 4, 8, [(0, 4, True), (4, 8, True)]),
        (4, 1, 2, [(0, 1, True), (0, 1, False), (1, 2, True), (1, 2, False)]),
        (2, 1, 1, [(0, 1, True), (0, 1, False)]),
    ],
)
def test_heads_of_the_ranks(ranks, local, total, expected):
    found = [Rank.of(number, ranks, local, total) for number in range(ranks)]
    assert [(rank.start, rank.stop, rank.stores) for rank in found] == expected
    assert all(bool(rank.heads) == (local < total) for rank in found)


@pytest.mark.parametrize(("ranks", "local", "total"), [(2, 3, 8), (3, 1, 2), (4, 2, 4), (1, 4, 8)])
def test_heads_that_do_not_add_up(ranks, local, total):
    with pytest.raises(UsageError, match="evenly"):
        Rank.of(0, ranks, local, total)


def test_a_layer_without_a_writer_is_refused():
    layers = memory()
    writers = [SimpleNamespace(impl=object(), kv_cache=layer) for layer in layers]
    with pytest.raises(UsageError, match="does not write as expected"):
        find_layout(layers, writers, Rank(HEADS, 0, HEADS, stores=True), (DIM, DIM), "x")
