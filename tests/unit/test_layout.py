"""Blocks go into an engine's tensor and out of it bit for bit, wherever their slots lie."""

from __future__ import annotations

import gc
import mmap
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine_plugin import layout as plugin
from engine_plugin.layout import layout_of, load_blocks, save_blocks, torch_dtype
from kvstore.errors import UsageError
from kvstore.lease import Lease, Reservation
from kvstore.namespace import KVLayout, Namespace

GUARD = 0xA5


@dataclass
class Slots:
    """Two tiers whose slots the test places itself; what lies between slots are guard bytes."""

    layout: KVLayout
    num_slots: int
    gap: int
    device: str = "cpu"
    buffers: list = field(init=False)

    def __post_init__(self):
        self.stride = self.layout.block_bytes + self.gap
        length = self.gap + self.num_slots * self.stride
        self.buffers = [
            torch.full((length,), GUARD, dtype=torch.uint8, device=self.device),
            np.full(length, GUARD, np.uint8),
        ]

    def held(self, kind, places, **more):
        tiers, slots = (np.array(column, np.int64) for column in zip(*places, strict=True))
        namespace = Namespace(model=b"m", layout=self.layout)
        offsets, buffers = self.gap + slots * self.stride, tuple(self.buffers)
        return kind(self, namespace, tiers.astype(np.int8), offsets, 0.0, buffers=buffers, **more)

    def slot(self, tier, slot):
        start = self.gap + slot * self.stride
        return np.asarray(_on_cpu(self.buffers[tier]))[start : start + self.layout.block_bytes]

    def guards(self):
        """Bytes outside the slots, of both tiers."""
        mask = np.ones(len(self.buffers[1]), bool)
        for slot in range(self.num_slots):
            start = self.gap + slot * self.stride
            mask[start : start + self.layout.block_bytes] = False
        return np.concatenate([np.asarray(_on_cpu(buffer))[mask] for buffer in self.buffers])


def _on_cpu(buffer):
    return buffer.cpu() if isinstance(buffer, torch.Tensor) else buffer


def random_kv(layout: KVLayout, tokens: int, seed: int = 0) -> torch.Tensor:
    """Random bits, so also NaNs of every kind, as the tensor of one prompt."""
    layers, two, heads, _, dim = layout.shape
    count = layers * two * heads * tokens * dim * torch_dtype(layout).itemsize
    bits = np.random.default_rng(seed).integers(0, 256, count, np.uint8)
    return torch.from_numpy(bits).view(torch_dtype(layout)).view(layers, two, heads, tokens, dim)


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()


def block_bits(kv: torch.Tensor, layout: KVLayout, index: int) -> bytes:
    first = index * layout.block_tokens
    return bits(kv[:, :, :, first : first + layout.block_tokens])


LAYOUTS = st.builds(
    KVLayout,
    num_layers=st.integers(1, 5),
    num_kv_heads=st.integers(1, 5),
    head_dim=st.sampled_from([1, 3, 8, 17]),
    dtype=st.sampled_from(["float32", "bfloat16", "float16", "float8_e4m3fn"]),
    block_tokens=st.sampled_from([1, 3, 16]),
)


@st.composite
def placements(draw):
    """A layout, and slots in either tier for some blocks: in runs, shuffled or both."""
    layout = draw(LAYOUTS)
    count = draw(st.integers(1, 9))
    tiers = draw(st.lists(st.integers(0, 1), min_size=count, max_size=count))
    slots = [[*range(count)], [*range(count)]]
    if draw(st.booleans()):
        slots = [draw(st.permutations(some)) for some in slots]
    places = [(tier, slots[tier].pop(0)) for tier in tiers]
    gap = draw(st.sampled_from([0, 1, 5])) * 8
    return Slots(layout, count, gap), places


@settings(max_examples=60, deadline=None)
@given(placements(), st.integers(0, 3), st.booleans())
def test_save_then_load_is_exact_and_touches_nothing_else(placement, spare, transposed):
    slots, places = placement
    layout, count = slots.layout, len(places)
    tokens = count * layout.block_tokens + spare
    source = random_kv(layout, tokens)
    given_source = source.transpose(3, 4).contiguous().transpose(3, 4) if transposed else source
    indices = np.arange(count, dtype=np.int32)
    save_blocks(slots.held(Reservation, places, indices=indices), given_source)
    for index, place in enumerate(places):
        assert slots.slot(*place).tobytes() == block_bits(source, layout, index)
    assert (slots.guards() == GUARD).all()

    destination = random_kv(layout, tokens, seed=1)
    rest = bits(destination[:, :, :, count * layout.block_tokens :])
    load_blocks(slots.held(Lease, places), destination, count)
    for index in range(count):
        assert block_bits(destination, layout, index) == block_bits(source, layout, index)
    assert bits(destination[:, :, :, count * layout.block_tokens :]) == rest


@settings(max_examples=30, deadline=None)
@given(placements(), st.data())
def test_only_the_blocks_that_were_asked_for_move(placement, data):
    slots, places = placement
    layout = slots.layout
    total = len(places) + 4
    source = random_kv(layout, total * layout.block_tokens)
    wanted = data.draw(
        st.sets(st.integers(0, total - 1), min_size=len(places), max_size=len(places))
    )
    indices = np.array(sorted(wanted), np.int32)
    save_blocks(slots.held(Reservation, places, indices=indices), source)
    for index, place in zip(indices, places, strict=True):
        assert slots.slot(*place).tobytes() == block_bits(source, layout, index)

    leading = data.draw(st.integers(0, len(places)))
    destination = random_kv(layout, total * layout.block_tokens, seed=1)
    before = destination.clone()
    load_blocks(slots.held(Lease, places), destination, leading)
    for block in range(total):
        expected = source if block < leading else before
        at = indices[block] if block < leading else block
        assert block_bits(destination, layout, block) == block_bits(expected, layout, at)


CROSSINGS = [("cpu", "cpu"), ("cpu", "cuda"), ("cuda", "cpu"), ("cuda", "cuda")]


@pytest.mark.parametrize("gap", [0, 64])
@pytest.mark.parametrize(
    ("tier", "engine"),
    [pytest.param(*both, marks=[pytest.mark.gpu] if "cuda" in both else []) for both in CROSSINGS],
)
def test_bytes_have_arrived_on_return_whatever_devices_they_cross(tier, engine, gap):
    layout = KVLayout(8, 4, 64, "bfloat16")
    count = 80  # 10 MiB
    slots = Slots(layout, count, gap, device=tier)
    places = [(0, i) for i in range(count // 2)] + [(1, i) for i in range(count // 2)]
    source = random_kv(layout, count * 16)
    indices = np.arange(count, dtype=np.int32)
    save_blocks(slots.held(Reservation, places, indices=indices), source.to(engine))
    for index, place in enumerate(places):
        assert slots.slot(*place).tobytes() == block_bits(source, layout, index)
    assert (slots.guards() == GUARD).all()
    destination = torch.zeros_like(source, device=engine)
    load_blocks(slots.held(Lease, places), destination, count)
    assert bits(destination.cpu()) == bits(source)


def test_memory_that_may_only_be_read_is_loaded_without_a_copy():
    layout, count = KVLayout(2, 2, 4, "float32"), 3
    slots, source = Slots(layout, count, 0), random_kv(KVLayout(2, 2, 4, "float32"), 48)
    places = [(1, i) for i in range(count)]
    indices = np.arange(count, dtype=np.int32)
    save_blocks(slots.held(Reservation, places, indices=indices), source)
    mapped = mmap.mmap(-1, len(slots.buffers[1]))
    mapped.write(slots.buffers[1].tobytes())
    array = np.frombuffer(mapped, np.uint8)
    array.flags.writeable = False
    slots.buffers[1] = array
    destination = torch.zeros_like(source)
    load_blocks(slots.held(Lease, places), destination, count)
    assert bits(destination) == bits(source)

    tensor, address = plugin.as_tensor(array), array.ctypes.data
    assert tensor.data_ptr() == address
    del array, slots.buffers[1]
    gc.collect()
    with pytest.raises(BufferError):  # the tensor keeps the memory
        mapped.close()
    assert tensor.numpy().tobytes() == mapped[:]
    del tensor
    mapped.close()


@pytest.mark.parametrize("kind", [Lease, Reservation])
def test_copies_are_awaited_before_the_slots_go_back(kind, monkeypatch):
    layout = KVLayout(2, 2, 4, "float32")
    slots, kv = Slots(layout, 3, 0), random_kv(KVLayout(2, 2, 4, "float32"), 48)
    places, events, copy = [(0, 0), (0, 2), (1, 0)], [], torch.Tensor.copy_

    def copy_(self, other, non_blocking=False):
        events.append(non_blocking)
        if len(events) == 2:
            raise RuntimeError("the device is gone")
        return copy(self, other, non_blocking)

    monkeypatch.setattr(torch.Tensor, "copy_", copy_)
    monkeypatch.setattr(plugin, "_finish", events.append)
    if kind is Lease:
        transfer = partial(load_blocks, slots.held(Lease, places), kv, 3)
    else:
        indices = np.arange(3, dtype=np.int32)
        transfer = partial(save_blocks, slots.held(Reservation, places, indices=indices), kv)
    with pytest.raises(RuntimeError, match="is gone"):
        transfer()
    assert events == [False, False, {torch.device("cpu")}]  # only a GPU is waited for


def test_the_canonical_order_is_layer_kind_head_token_dim():
    layout = KVLayout(2, 2, 4, "float32", block_tokens=2)  # heads, tokens and kinds all alike: 2
    slots = Slots(layout, 1, 0)
    axes = torch.meshgrid(*(torch.arange(n) for n in layout.shape), indexing="ij")
    kv = sum(axis * 10**power for axis, power in zip(axes, (4, 3, 2, 1, 0), strict=True)).float()
    save_blocks(slots.held(Reservation, [(1, 0)], indices=np.array([0], np.int32)), kv)
    stored = slots.slot(1, 0).view(np.float32)
    assert stored[:10].tolist() == [0, 1, 2, 3, 10, 11, 12, 13, 100, 101]
    assert stored[16:18].tolist() == [1000, 1001]
    assert stored[32:34].tolist() == [10000, 10001]


@pytest.mark.parametrize("gap", [0, 64])
def test_blocks_in_a_row_are_one_copy(gap):
    layout = KVLayout(2, 2, 4, "float32")
    slots = Slots(layout, 40, gap)
    kv = random_kv(layout, 40 * 16)
    lease = slots.held(Lease, [(0, i) for i in range(20)] + [(1, i + 7) for i in range(20)])
    assert len(list(plugin._runs(lease, np.arange(40), kv))) == 2


def test_another_geometry_is_refused_not_reinterpreted():
    layout = KVLayout(2, 2, 4, "bfloat16")
    slots = Slots(layout, 1, 0)
    lease = slots.held(Lease, [(0, 0)])
    kv = random_kv(layout, 16)
    for wrong in (kv.view(torch.float16), kv.float(), kv[:1], kv[:, :, :1], kv[..., :3]):
        with pytest.raises(UsageError, match="does not fit"):
            load_blocks(lease, wrong.contiguous(), 1)
    with pytest.raises(UsageError, match="15 tokens"):
        load_blocks(lease, kv[:, :, :, :15], 1)
    with pytest.raises(UsageError, match="3 blocks"):
        save_blocks(slots.held(Reservation, [(0, 0)], indices=np.array([2], np.int32)), kv)


def test_layout_of_an_engines_tensors():
    keys = torch.zeros(1, 3, 5, 8, dtype=torch.bfloat16)
    assert layout_of([(keys, keys)] * 4, 32) == KVLayout(4, 3, 8, "bfloat16", block_tokens=32)


@pytest.mark.parametrize(
    ("layers", "what"),
    [
        ([], "no keys"),
        ([(torch.zeros(1, 2, 5, 8), torch.zeros(1, 2, 5, 4))], "values of layer 0"),
        ([(torch.zeros(1, 2, 5, 8),) * 2, (torch.zeros(1, 1, 5, 8),) * 2], "keys of layer 1"),
        ([(torch.zeros(1, 2, 5, 8), torch.zeros(1, 2, 5, 8).half())], "values of layer 0"),
        ([(torch.zeros(2, 2, 5, 8),) * 2], r"not \[1, heads"),
        ([(torch.zeros(1, 5, 8),) * 2], r"not \[1, heads"),
    ],
)
def test_what_has_no_layout_is_refused_with_the_difference(layers, what):
    with pytest.raises(UsageError, match=what):
        layout_of(layers, 16)
