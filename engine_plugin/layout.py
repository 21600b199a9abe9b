"""Engine tensors and canonical block bytes.

The engine keeps the KV of one prompt as ``kv[num_layers, 2, num_kv_heads, capacity, head_dim]``:
the canonical block (:attr:`kvstore.namespace.KVLayout.shape`) with a longer token axis. So a block
is a slice of that tensor, and ``n`` blocks that follow one another in a tier and in the prompt are
one strided copy of ``[n, layer, K|V, head, token, dim]``: no Python per token, layer or head.
Between devices, whole blocks cross the bus (towards an accelerator asynchronously, from pinned
memory) and the permutation runs on the accelerator.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from kvstore.errors import UsageError
from kvstore.namespace import KVLayout

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

    from kvstore.lease import Lease, Reservation

STAGING_BYTES = 64 << 20
"""Most bytes of one copy, and so of the staging tensor when the copy crosses devices."""


def layout_of(layers: Sequence[tuple[torch.Tensor, torch.Tensor]], block_tokens: int) -> KVLayout:
    """Return the layout of the ``(keys, values)`` that an engine holds for one prompt.

    Each tensor is ``[1, num_kv_heads, tokens, head_dim]``. Raises :class:`UsageError`, saying what
    differs, unless keys and values of all layers agree in shape, dtype and device.
    """
    if not layers:
        raise UsageError("the model keeps no keys and values")
    first = layers[0][0]
    for index, pair in enumerate(layers):
        for what, tensor in zip(("keys", "values"), pair, strict=True):
            found, expected = (
                (tuple(x.shape), str(x.dtype), str(x.device)) for x in (tensor, first)
            )
            if found != expected:
                raise UsageError(
                    f"{what} of layer {index} are {found}, not {expected} as in layer 0"
                )
    if first.ndim != 4 or first.shape[0] != 1:
        raise UsageError(f"keys of shape {tuple(first.shape)} are not [1, heads, tokens, head_dim]")
    return KVLayout(
        num_layers=len(layers),
        num_kv_heads=first.shape[1],
        head_dim=first.shape[3],
        dtype=str(first.dtype).removeprefix("torch."),
        block_tokens=block_tokens,
    )


def torch_dtype(layout: KVLayout) -> torch.dtype:
    """Return the torch dtype of the layout's elements."""
    dtype = getattr(torch, layout.dtype)
    assert isinstance(dtype, torch.dtype)
    return dtype


def load_blocks(lease: Lease, destination: torch.Tensor, num_blocks: int) -> None:
    """Copy the first ``num_blocks`` blocks of ``lease`` to the head of ``destination``.

    ``destination`` is ``[num_layers, 2, num_kv_heads, capacity, head_dim]`` of the layout's dtype,
    of any strides, on any device; tokens from ``num_blocks * block_tokens`` on are left as they
    are. On return the bytes are there, so the lease may be released, and after an exception no copy
    runs on. Raises :class:`UsageError` when the destination has another geometry or is too short.
    """
    layout = lease.namespace.layout
    positions = np.arange(num_blocks, dtype=np.int64)
    _check(layout, destination, num_blocks)
    devices = {destination.device}
    try:
        for blocks, tokens in _runs(lease, positions, destination):
            devices.add(blocks.device)
            towards_cuda = tokens.is_cuda
            arrived = blocks.to(tokens.device, non_blocking=towards_cuda)
            tokens.copy_(arrived, non_blocking=towards_cuda)
    finally:
        _finish(devices)


def save_blocks(reservation: Reservation, source: torch.Tensor) -> None:
    """Copy the blocks that ``reservation`` asks for out of ``source``.

    ``source`` is the KV of the prompt from its first token, shaped as in :func:`load_blocks`. On
    return the bytes are in the reserved slots, so the reservation may be committed; after an
    exception no copy runs on, so it may be aborted. Raises :class:`UsageError` when the source has
    another geometry or does not reach far enough.
    """
    layout = reservation.namespace.layout
    positions = np.asarray(reservation.indices, dtype=np.int64)
    _check(layout, source, int(positions.max(initial=-1)) + 1)
    devices = {source.device}
    try:
        for blocks, tokens in _runs(reservation, positions, source):
            devices.add(blocks.device)
            crossing = blocks.device != tokens.device
            blocks.copy_(tokens.contiguous() if crossing else tokens, non_blocking=blocks.is_cuda)
    finally:
        _finish(devices)


def _check(layout: KVLayout, kv: torch.Tensor, num_blocks: int) -> None:
    expected = (layout.num_layers, 2, layout.num_kv_heads, layout.head_dim)
    found = (*kv.shape[:3], *kv.shape[4:])
    if found != expected or kv.dtype != torch_dtype(layout):
        raise UsageError(f"KV tensor {tuple(kv.shape)} of {kv.dtype} does not fit {layout}")
    if num_blocks * layout.block_tokens > kv.shape[3]:
        raise UsageError(f"{num_blocks} blocks do not fit into {kv.shape[3]} tokens")


def _runs(
    held: Lease | Reservation, positions: NDArray[np.int64], kv: torch.Tensor
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield pairs of equal views ``[n, layer, K|V, head, token, dim]``: of a tier, and of ``kv``.

    A run is cut where the tier, the slot or the position in the prompt does not continue.
    """
    layout, count = held.namespace.layout, len(positions)
    if not count:
        return
    tiers, offsets = held.tiers[:count], np.asarray(held.offsets[:count], dtype=np.int64)
    steps = np.diff(offsets)
    slot_bytes = int(steps[steps >= layout.block_bytes].min(initial=1 << 62))
    continues = (np.diff(tiers) == 0) & (steps == slot_bytes) & (np.diff(positions) == 1)
    starts = [0, *(np.flatnonzero(~continues) + 1).tolist()]
    most = max(1, STAGING_BYTES // layout.block_bytes)
    buffers = [as_tensor(buffer) for buffer in held.buffers]
    for start, stop in zip(starts, [*starts[1:], count], strict=True):
        for first in range(start, stop, most):
            length = min(most, stop - first)
            at, position = int(offsets[first]), int(positions[first])
            stride = slot_bytes if length > 1 else layout.block_bytes
            slots = buffers[tiers[first]][at : at + (length - 1) * stride + layout.block_bytes]
            yield (
                _as_blocks(slots.view(kv.dtype), layout, length, stride // kv.element_size()),
                kv.narrow(3, position * layout.block_tokens, length * layout.block_tokens)
                .unflatten(3, (length, layout.block_tokens))
                .permute(3, 0, 1, 2, 4, 5),
            )


def _as_blocks(elements: torch.Tensor, layout: KVLayout, count: int, stride: int) -> torch.Tensor:
    size = (count, layout.block_bytes // elements.element_size())
    rows = elements.as_strided(size, (stride, 1), elements.storage_offset())
    return rows.view(count, *layout.shape)


class _Unprotected:
    """What makes numpy take a read-only array for a writeable one; keeps the array alive."""

    def __init__(self, array: NDArray[np.uint8]) -> None:
        self._array = array

    @property
    def __array_interface__(self) -> dict[str, Any]:
        return self._array.__array_interface__ | {"data": (self._array.ctypes.data, False)}


def as_tensor(buffer: torch.Tensor | NDArray[np.uint8]) -> torch.Tensor:
    """Return a tensor that shares the buffer's memory; of a read-only one, only to be read.

    torch has no read-only tensors, and warns of each read-only array that it is given.
    """
    if isinstance(buffer, torch.Tensor):
        return buffer
    return torch.from_numpy(buffer if buffer.flags.writeable else np.asarray(_Unprotected(buffer)))


def _finish(devices: set[torch.device]) -> None:
    """Wait for the copies, also when one of them failed: nothing may run on in a freed slot."""
    for device in devices:
        if device.type == "cuda":
            torch.cuda.current_stream(device).synchronize()
