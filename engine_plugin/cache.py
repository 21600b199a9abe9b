"""A Transformers cache whose layers are slices of one preallocated tensor.

``kv[num_layers, 2, batch, num_kv_heads, capacity, head_dim]`` holds everything. Stored blocks are
copied straight into it, ``update`` writes new tokens behind them and returns views, and new blocks
are copied straight out of it: nothing is concatenated per token. When the capacity is exceeded the
tensor doubles. Whatever replaces a layer's ``keys`` or ``values`` by other tensors (beam
reordering, batch repetition, ...) makes it an ordinary :class:`transformers.DynamicLayer`.

A cache belongs to one request. Nothing that a store handed out aliases it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer

if TYPE_CHECKING:
    from collections.abc import Sequence

GRANULE_TOKENS = 256
"""Capacities are multiples of this, so that one workspace serves prompts of similar length."""


class _Storage:
    """The tensor that the layers of one cache share; replaced by a larger one when it is full."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor

    def reserve(self, tokens: int) -> torch.Tensor:
        """Return the tensor, grown so that ``tokens`` fit."""
        capacity = self.tensor.shape[-2]
        if tokens > capacity:
            shape = list(self.tensor.shape)
            shape[-2] = max(tokens, 2 * capacity)
            grown = self.tensor.new_empty(shape)
            grown.narrow(-2, 0, capacity).copy_(self.tensor)
            self.tensor = grown
        return self.tensor


class BufferLayer(DynamicLayer):  # type: ignore[misc]
    """One layer: ``keys`` and ``values`` are views of the first tokens of the shared tensor."""

    def __init__(self, storage: _Storage, index: int) -> None:
        """Start empty, on layer ``index`` of ``storage``."""
        super().__init__()
        self._storage = storage
        self._index = index
        self.dtype, self.device = storage.tensor.dtype, storage.tensor.device
        self.is_initialized = True
        self.show(0)

    @property
    def in_buffer(self) -> bool:
        """Whether the layer still is what the shared tensor holds."""
        return self.keys is self._keys and self.values is self._values

    def show(self, tokens: int) -> None:
        """Make the first ``tokens`` tokens of the shared tensor the layer's content."""
        planes = self._storage.tensor[self._index].narrow(-2, 0, tokens)
        self.keys, self.values = self._keys, self._values = planes.unbind(0)

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: object, **kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append states ``[batch, heads, new_tokens, dim]``; return views of all, old and new."""
        if not self.in_buffer:
            keys, values = super().update(key_states, value_states, *args, **kwargs)
            return keys, values
        start = self._keys.shape[-2]
        stop = start + key_states.shape[-2]
        keys, values = self._storage.reserve(stop)[self._index].unbind(0)
        keys[..., start:stop, :] = key_states
        values[..., start:stop, :] = value_states
        self.show(stop)
        return self.keys, self.values

    def crop(self, tokens_to_remove: int) -> None:
        """Drop the newest tokens, as :meth:`transformers.DynamicLayer.crop` defines it."""
        in_buffer = self.in_buffer
        super().crop(tokens_to_remove)
        if in_buffer:
            self.show(self.keys.shape[-2])

    def reset(self) -> None:
        """Forget all tokens."""
        self.is_initialized = True
        self.show(0)


class BufferCache(DynamicCache):  # type: ignore[misc]
    """The cache of one request, over ``kv[layers, 2, batch, heads, capacity, dim]``.

    The cache owns the tensor until it is given up.
    """

    def __init__(self, kv: torch.Tensor) -> None:
        """Build empty layers over ``kv``."""
        storage = _Storage(kv)
        layers: Sequence[BufferLayer] = [BufferLayer(storage, i) for i in range(kv.shape[0])]
        Cache.__init__(self, layers=list(layers))
        self._storage = storage

    @property
    def kv(self) -> torch.Tensor:
        """The shared tensor; another one after it has grown."""
        return self._storage.tensor

    @property
    def in_buffer(self) -> bool:
        """Whether :attr:`kv` is what the model sees in all layers."""
        return all(isinstance(layer, BufferLayer) and layer.in_buffer for layer in self.layers)

    def show(self, tokens: int) -> None:
        """Make the first ``tokens`` tokens of :attr:`kv` the content of every layer."""
        for layer in self.layers:
            layer.show(tokens)

    def row(self, index: int, start: int) -> BufferCache:
        """Return an empty cache of batch 1 that writes row ``index`` from token ``start`` on.

        It shares memory with this cache and must not be filled beyond its capacity.
        """
        return BufferCache(self.kv[:, :, index : index + 1, :, start:])


class Workspace:
    """Keeps the memory of one finished request for the next: fresh pages cost more than a copy.

    Memory is lent to one request at a time; while it is out, others get fresh memory. Only memory
    that nobody else can see may come back.
    """

    def __init__(self) -> None:
        """Start without memory."""
        self._spare: torch.Tensor | None = None

    def take(
        self,
        shape: tuple[int, int, int, int, int, int],
        dtype: torch.dtype,
        device: torch.device,
        most_slack: float,
    ) -> torch.Tensor:
        """Return an uninitialised tensor of ``shape``, its capacity (axis 4) rounded up.

        Spare memory more than ``most_slack`` times as large is kept for others: a finite number for
        memory that will not come back.
        """
        layers, two, batch, heads, capacity, dim = shape
        capacity = -(-capacity // GRANULE_TOKENS) * GRANULE_TOKENS
        count = layers * two * batch * heads * capacity * dim
        if self._spare is None or self._spare.numel() <= most_slack * count:
            spare, self._spare = self._spare, None
        else:
            spare = None
        if spare is None or spare.numel() < count or (spare.dtype, spare.device) != (dtype, device):
            with torch.inference_mode(mode=False):  # else later requests could not write to it
                spare = torch.empty(count, dtype=dtype, device=device)
        return spare[:count].view(layers, two, batch, heads, capacity, dim)

    def give_back(self, kv: torch.Tensor) -> None:
        """Keep the memory of ``kv``, a tensor that :meth:`take` returned or that grew from one."""
        with torch.inference_mode(mode=False):
            empty = torch.empty(0, dtype=kv.dtype, device=kv.device)
            self._spare = empty.set_(kv.untyped_storage())
