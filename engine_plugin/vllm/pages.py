"""vLLM's paged KV memory, seen as blocks: how its bytes lie, found out by writing with vLLM's own kernel.

vLLM gives one tensor ``[num_blocks, heads, block_tokens, content]`` for each layer. What the content of
a page means is the attention back end's own business: it may tile keys and values for an
instruction set. So the layout is *probed*: the back end itself writes known keys and values to a block,
and then

1. nothing but that block's page may have changed, and all of it must have;
2. where the page read as ``[heads, tokens, (K, V), dim]`` is what was written, blocks are stored in
   canonical order (:attr:`kvstore.namespace.KVLayout.shape`), for engines of every kind to read;
3. otherwise they are stored as they are (*opaque*), under a name that says who wrote them (back end,
   instruction set, order of axes, version of vLLM); each head must lie by itself in the page, so that
   ranks of tensor parallelism can each write theirs;
4. a block copied out and into another page must read back the same.

What fails a probe is refused with a reason (:class:`kvstore.errors.UsageError`), and runs uncached.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from engine_plugin.layout import as_tensor
from kvstore.errors import UsageError
from kvstore.namespace import DTYPE_BYTES, KVLayout

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

T = TypeVar("T", torch.Tensor, NDArray[Any])

STAGED_BYTES = 64 << 20
"""Memory of a device that copies may take for slots on their way."""

PROBE_BLOCKS = (1, 2)
"""Block 0 is vLLM's placeholder for no block."""


@dataclass(frozen=True)
class Rank:
    """Which KV heads of the model this rank of tensor parallelism has, and whether it stores them.

    Where there are more ranks than heads, several have the same one, and the first stores it.
    """

    num_heads: int
    """Of the model."""
    start: int
    stop: int
    stores: bool

    @property
    def heads(self) -> dict[str, tuple[int, int]]:
        """What to tell ``reserve`` of this rank: nothing where it has all heads."""
        whole = self.stop - self.start == self.num_heads
        return {} if whole else {"heads": (self.start, self.stop)}

    @classmethod
    def of(cls, rank: int, num_ranks: int, local_heads: int, total_heads: int) -> Rank:
        """Return what ``rank`` has. Raises :class:`UsageError` when heads and ranks do not add up."""
        copies, rest = divmod(num_ranks * local_heads, total_heads)
        if rest or copies < 1 or (copies > 1 and local_heads > 1):
            raise UsageError(
                f"{num_ranks} ranks with {local_heads} KV heads each do not share {total_heads} evenly"
            )
        start = rank // copies * local_heads
        return cls(total_heads, start, start + local_heads, rank % copies == 0)


class Pages:
    """The blocks of one worker's KV memory, to be copied from and to slots of the store.

    Copies of one block do not run at the same time; those of different ones may, on any threads.
    """

    def __init__(self, layers: Sequence[torch.Tensor], layout: KVLayout, rank: Rank) -> None:
        """Look at ``layers`` (each ``[num_blocks, heads, block_tokens, content]``) as ``layout`` says."""
        self.layout, self.rank = layout, rank
        self.num_layers = len(layers)
        heads = rank.stop - rank.start
        if layout.opaque is None:
            dim = layout.head_dim
            pages = [layer.unflatten(3, (2, dim)).permute(0, 3, 1, 2, 4) for layer in layers]
            self._unit: tuple[int, ...] = (2, rank.num_heads, layout.block_tokens, dim)
            self._part: tuple[slice, ...] = (slice(None), slice(rank.start, rank.stop))
        else:
            pages = [_bytes_of(layer).unflatten(1, (heads, -1)) for layer in layers]
            self._unit = (rank.num_heads, pages[0].shape[2])
            self._part = (slice(rank.start, rank.stop),)
        self.on_host = layers[0].device.type == "cpu"
        self._pages = _join(pages)
        self._arrays = [_as_array(page) for page in self._pages] if self.on_host else []

    @property
    def block_bytes(self) -> int:
        """Bytes that this rank reads or writes of each block."""
        return self.layout.block_bytes * (self.rank.stop - self.rank.start) // self.rank.num_heads

    def load(
        self, buffer: Any, offsets: NDArray[np.int64], blocks: Sequence[int], layers: slice
    ) -> None:
        """Copy ``layers`` of slots of the store into the engine's ``blocks``.

        Args:
            buffer: memory of the tier, uint8 ``[capacity_bytes]``.
            offsets: int64 ``[n]``: where the slots begin.
            blocks: ``n`` numbers of engine blocks; 0 stands for none, and is skipped.
            layers: which of them.
        """
        self._copy(buffer, offsets, blocks, layers, into_engine=True)

    def save(self, buffer: Any, offsets: NDArray[np.int64], blocks: Sequence[int]) -> None:
        """Copy the engine's ``blocks`` into slots of the store; arguments as for :meth:`load`."""
        self._copy(buffer, offsets, blocks, slice(None), into_engine=False)

    def _copy(
        self,
        buffer: Any,
        offsets: NDArray[np.int64],
        blocks: Sequence[int],
        layers: slice,
        *,
        into_engine: bool,
    ) -> None:
        pairs = [pair for pair in zip(offsets.tolist(), blocks, strict=True) if pair[1]]
        copy = self._copy_host if self.on_host else self._copy_device
        copy(buffer, pairs, layers, into_engine=into_engine)

    def _copy_host(
        self, buffer: Any, pairs: list[tuple[int, int]], layers: slice, *, into_engine: bool
    ) -> None:
        """In as few calls as can be: a thread that copies waits for Python's lock after each."""
        dtype, shape = self._arrays[0].dtype, (self.num_layers, *self._unit)
        for run, distance, step in _runs(pairs):
            (offset, first), (_, last) = run[0], run[-1]
            one = np.ndarray(shape, dtype, buffer, offset)
            slots = np.ndarray((len(run), *shape), dtype, buffer, offset, (distance, *one.strides))
            blocks = slice(first, last + (1 if step > 0 else -1), step)
            mine = slots[:, layers][(slice(None), slice(None), *self._part)]
            for array, some in _of_layers(self._arrays, layers):
                pages, parts = array[blocks], mine[:, some]
                np.copyto(*((pages, parts) if into_engine else (parts, pages)))

    def _copy_device(
        self, buffer: Any, pairs: list[tuple[int, int]], layers: slice, *, into_engine: bool
    ) -> None:
        """On the current stream: slots cross the bus whole, and many are taken apart by one kernel."""
        memory, like = as_tensor(buffer), self._pages[0]
        size, shape = self.layout.block_bytes, (self.num_layers, *self._unit)
        at_once = max(1, STAGED_BYTES // size)
        for start in range(0, len(pairs), at_once):
            some = pairs[start : start + at_once]
            slots = [memory[o : o + size].view(like.dtype).view(shape)[layers] for o, _ in some]
            blocks = torch.tensor([block for _, block in some], device=like.device)
            scatter = self._scatter if into_engine else self._gather
            scatter(slots, blocks, layers)

    def _scatter(self, slots: list[torch.Tensor], blocks: torch.Tensor, layers: slice) -> None:
        """Copy ``slots`` to the device, and from there into the engine's ``blocks``."""
        shape = (len(slots), *slots[0].shape)
        staged = torch.empty(shape, dtype=slots[0].dtype, device=blocks.device)
        for target, slot in zip(staged, slots, strict=True):
            target.copy_(slot, non_blocking=True)
        mine = staged[(slice(None), slice(None), *self._part)]
        for pages, some in _of_layers(self._pages, layers):
            pages.index_copy_(0, blocks, mine[:, some])

    def _gather(self, slots: list[torch.Tensor], blocks: torch.Tensor, layers: slice) -> None:
        """Collect the engine's ``blocks`` on the device, and copy each to its slot."""
        found = [pages.index_select(0, blocks) for pages, _ in _of_layers(self._pages, layers)]
        for parts, slot in zip(torch.cat(found, dim=1), slots, strict=True):
            mine = slot[(slice(None), *self._part)]
            mine.copy_(parts, non_blocking=mine.is_contiguous())


def find_layout(
    layers: Sequence[torch.Tensor],
    writers: Sequence[Any],
    rank: Rank,
    head_dims: tuple[int, int],
    order: str,
) -> Pages:
    """Probe ``layers`` and return how to copy their blocks.

    Overwrites blocks 1 and 2, which must be unused, and leaves them zero.

    Args:
        layers: the KV tensors, in the order of the model.
        writers: the attention layers, with vLLM's ``impl``, in the same order.
        rank: what this rank has.
        head_dims: of keys and of values.
        order: of opaque bytes: back end, instruction set and version.

    Raises:
        UsageError: these bytes cannot be stored; says why.
    """
    _check(layers, rank)
    key_dim, value_dim = head_dims
    canonical = key_dim == value_dim
    for tensor, writer in zip(layers, writers, strict=True):
        canonical = _probe(tensor, writer, head_dims) and canonical
    first = layers[0]
    dtype = str(first.dtype).removeprefix("torch.")
    if canonical and dtype in DTYPE_BYTES:
        layout = KVLayout(len(layers), rank.num_heads, key_dim, dtype, first.shape[2])
    else:
        layout = _opaque(layers, rank, order)
        if rank.num_heads > rank.stop - rank.start:
            for tensor, writer in zip(layers, writers, strict=True):
                _probe_heads(tensor, writer, head_dims)
    pages = Pages(layers, layout, rank)
    _probe_copy(pages, layers)
    return pages


def _check(layers: Sequence[torch.Tensor], rank: Rank) -> None:
    first = layers[0]
    for index, tensor in enumerate(layers):
        found = (tuple(tensor.shape), tensor.dtype, tensor.device, tensor.stride())
        expected = (tuple(first.shape), first.dtype, first.device, first.stride())
        if found != expected:
            raise UsageError(f"KV memory of layer {index} is {found}, not {expected} as in layer 0")
    if first.ndim != 4 or first.shape[1] != rank.stop - rank.start:
        raise UsageError(
            f"KV memory of shape {tuple(first.shape)} is not [blocks, {rank.stop - rank.start} heads, "
            "tokens, content]"
        )
    if first.shape[0] <= max(PROBE_BLOCKS):
        raise UsageError(f"{first.shape[0]} KV blocks are too few to be probed")


def _opaque(layers: Sequence[torch.Tensor], rank: Rank, order: str) -> KVLayout:
    first = layers[0]
    if not first[0].is_contiguous():
        raise UsageError(f"a page of strides {first.stride()} does not lie in one piece")
    tokens = first.shape[2]
    cell = first.shape[3] * first.element_size()
    whole = cell % 2 == 0
    return KVLayout(
        len(layers),
        rank.num_heads,
        cell // 2 if whole else cell * rank.num_heads,
        "uint8",
        tokens,
        attention="mha" if whole else "mla",
        opaque=f"{order}:{first.dtype}",
    )


def _probe(tensor: torch.Tensor, writer: Any, head_dims: tuple[int, int]) -> bool:
    """Write a block; check where it landed; say whether it is in canonical order."""
    keys, values = _known(tensor, writer, head_dims)
    block, other = PROBE_BLOCKS
    before = tensor[other].clone()
    _write(tensor, writer, keys, values, block)
    page = tensor[block]
    if not torch.equal(_raw(tensor[other]), _raw(before)):
        raise UsageError("what is written to one KV block changes another")
    if not _raw(page).any():
        raise UsageError("what is written to a KV block is not in its page")
    canonical = False
    if page.dtype == keys.dtype:
        content = page.transpose(0, 1)  # [tokens, heads, content]
        canonical = torch.equal(content, torch.cat([keys, values], dim=2))
    _write(tensor, writer, keys, values, other)
    same = torch.equal(_raw(page), _raw(tensor[other]))
    tensor[list(PROBE_BLOCKS)] = 0
    if not same:
        raise UsageError("the same keys and values look different in another KV block")
    return canonical


def _probe_heads(tensor: torch.Tensor, writer: Any, head_dims: tuple[int, int]) -> None:
    """Check that each head of a page lies by itself, in order."""
    keys, values = _known(tensor, writer, head_dims)
    block = PROBE_BLOCKS[0]
    for head in range(tensor.shape[1]):
        only = torch.zeros_like(keys), torch.zeros_like(values)
        only[0][:, head], only[1][:, head] = keys[:, head], values[:, head]
        _write(tensor, writer, *only, block)
        rows = _bytes_of(tensor)[block].unflatten(0, (tensor.shape[1], -1))
        if rows.any(dim=1).nonzero().flatten().tolist() != [head]:
            tensor[block] = 0
            raise UsageError("the heads of a KV page do not lie one after the other")
    tensor[block] = 0


def _probe_copy(pages: Pages, layers: Sequence[torch.Tensor]) -> None:
    """Copy a block out and into another page; they must be equal."""
    block, other = PROBE_BLOCKS
    rng = np.random.default_rng(1)
    for tensor in layers:
        row = _raw(tensor[block])
        noise = rng.integers(0, 100, row.numel(), dtype=np.uint8)  # no byte of a NaN
        _set_raw(tensor[block], torch.from_numpy(noise))
    buffer = np.zeros(pages.layout.block_bytes, np.uint8)
    offsets = np.zeros(1, np.int64)
    pages.save(buffer, offsets, [block])
    pages.load(buffer, offsets, [other], slice(None))
    same = all(torch.equal(_raw(t[block]), _raw(t[other])) for t in layers)
    for tensor in layers:
        tensor[list(PROBE_BLOCKS)] = 0
    if not same:
        raise UsageError("a KV block that is copied out and in again is not the same")


def _known(
    tensor: torch.Tensor, writer: Any, head_dims: tuple[int, int]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Small whole numbers, exact in every dtype: keys and values ``[tokens, heads, dim]``."""
    _, heads, tokens, _ = tensor.shape
    generator = torch.Generator().manual_seed(1)
    dtype = getattr(writer, "dtype", None) or tensor.dtype
    if not dtype.is_floating_point or dtype.itemsize < 2:
        dtype = torch.get_default_dtype()
    keys, values = (
        torch.randint(1, 8, (tokens, heads, dim), generator=generator).to(tensor.device, dtype)
        for dim in head_dims
    )
    return keys, values


def _write(
    tensor: torch.Tensor, writer: Any, keys: torch.Tensor, values: torch.Tensor, block: int
) -> None:
    """Have the back end write a block, as it does in a forward pass."""
    tokens = keys.shape[0]
    slots = torch.arange(block * tokens, (block + 1) * tokens, device=tensor.device)
    try:
        writer.impl.do_kv_cache_update(writer, keys, values, writer.kv_cache, slots)
    except (AttributeError, NotImplementedError, RuntimeError, TypeError) as error:
        raise UsageError(f"the attention back end does not write as expected: {error}") from None
    if tensor.is_cuda:
        torch.cuda.synchronize(tensor.device)


def _raw(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)


def _set_raw(tensor: torch.Tensor, values: torch.Tensor) -> None:
    tensor.copy_(values.to(tensor.device).view(tensor.dtype).view(tensor.shape))


def _bytes_of(layer: torch.Tensor) -> torch.Tensor:
    """Return the pages as bytes ``[num_blocks, page_bytes]``, sharing their memory."""
    size = layer[0].numel()
    rows = layer.as_strided((layer.shape[0], size), (layer.stride(0), 1))
    return rows.view(torch.uint8)


def _join(pages: list[torch.Tensor]) -> list[torch.Tensor]:
    """Return pages of all layers as one ``[num_blocks, layers, ...]``, or, if they cannot be, one each."""
    first = pages[0]
    memory = {page.untyped_storage().data_ptr() for page in pages}
    starts = [int(page.storage_offset()) for page in pages]
    steps = {after - start for start, after in itertools.pairwise(starts)}
    if len(memory) > 1 or len(steps) > 1 or min(steps, default=0) < 0:
        return [page.unsqueeze(1) for page in pages]
    size, stride = list(first.shape), list(first.stride())
    size.insert(1, len(pages))
    stride.insert(1, steps.pop() if steps else 0)
    return [first.as_strided(size, stride)]


def _of_layers(pages: Sequence[T], layers: slice) -> Iterator[tuple[T, slice]]:
    """Yield ``[num_blocks, n, ...]`` that together have ``layers``, each with where it is among them."""
    if len(pages) == 1:
        yield pages[0][:, layers], slice(None)
        return
    for index, page in enumerate(pages[layers]):
        yield page, slice(index, index + 1)


def _runs(pairs: list[tuple[int, int]]) -> Iterator[tuple[list[tuple[int, int]], int, int]]:
    """Cut pairs of offset and block into runs, each with one distance between offsets and blocks.

    Yields the run and both distances.
    """
    steps = [(o - offset, b - block) for (offset, block), (o, b) in itertools.pairwise(pairs)]
    start = 0
    while start < len(pairs):
        stop, step = start + 1, (0, 1)
        if start < len(steps):
            step = steps[start]
        while stop < len(pairs) and steps[stop - 1] == step:
            stop += 1
        yield pairs[start:stop], *step
        start = stop


def _as_array(pages: torch.Tensor) -> NDArray[Any]:
    """Return ``pages`` as an array of whole numbers of the same width, sharing the memory."""
    widths = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    array: NDArray[Any] = pages.view(widths[pages.element_size()]).numpy()
    return array
