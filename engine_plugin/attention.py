"""Attention of new tokens over [cached prefix + new tokens].

:func:`attend` masks causally, aligned at the bottom right: query ``i`` of ``q`` sees the keys
``0 .. kv - q + i``. (PyTorch's ``is_causal=True`` aligns at the top left, the same only where
``q == kv``.) It uses the first of :data:`BACKENDS` that serves the device and passes a trial:

    flash_attn    CUDA  the package of that name (FlashAttention-2), where installed
    varlen_attn   CUDA  the FlashAttention inside PyTorch
    prefix_split  CPU   the prefix without a mask and the new tokens with is_causal, merged
    lower_right   any   PyTorch's bias for this mask; CUDA: flash or memory-efficient kernel
    masked        any   scaled dot product attention with a mask in memory

The trial computes a small case with grouped heads and strided keys and compares it with plain
arithmetic, once per back end, device type, dtype and head size. What raises, or aligns elsewhere,
is passed over; :func:`describe` tells why. Under autograd ``masked`` is used.

:func:`register` makes it ``attn_implementation="kvstore"`` of Hugging Face Transformers.
"""

from __future__ import annotations

from functools import cache, lru_cache, partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.nn.functional import scaled_dot_product_attention

from kvstore.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import Tensor

    Kernel = Callable[[Tensor, Tensor, Tensor, float], Tensor]

IMPLEMENTATION = "kvstore"
"""The name to give as ``attn_implementation``."""

REFUSED = ("softcap", "s_aux", "position_bias")
"""Arguments of Transformers' attention functions that change the result and are not supported."""


class Backend(NamedTuple):
    """A way to compute :func:`attend`; ``run(query, key, value, scale)`` gets checked arguments."""

    name: str
    device_type: str | None  # the only one it serves; None: any
    run: Kernel


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    scale: float | None = None,
    backend: str | None = None,
) -> Tensor:
    """Return the causal attention ``[B, Hq, q, D]`` of the last ``q`` of ``kv`` tokens.

    Args:
        query: ``[B, Hq, q, D]``, ``1 <= q <= kv``, of any floating dtype.
        key: ``[B, Hkv, kv, D]``, ``Hq`` a multiple of ``Hkv``; may be a view, and is only read.
        value: As ``key``.
        scale: Factor on the scores, ``D ** -0.5`` by default.
        backend: Name of the back end to use instead of the first that can be used.

    Raises:
        UsageError: On other shapes, on a mixture of dtypes or devices, or as :func:`choose` does.
    """
    _check(query, key, value)
    query, key, value = (x if x.stride(-1) == 1 else x.contiguous() for x in (query, key, value))
    chosen = choose(query.device.type, query.dtype, query.shape[-1], backend)
    if torch.is_grad_enabled() and any(x.requires_grad for x in (query, key, value)):
        chosen = BACKENDS["masked"]
    return chosen.run(query, key, value, query.shape[-1] ** -0.5 if scale is None else scale)


def _check(query: Tensor, key: Tensor, value: Tensor) -> None:
    fits = (
        query.dim() == key.dim() == 4
        and key.shape == value.shape
        and query.shape[::3] == key.shape[::3]  # B and D
        and key.shape[1] > 0
        and query.shape[1] % key.shape[1] == 0
        and 1 <= query.shape[2] <= key.shape[2]
        and query.dtype == key.dtype == value.dtype
        and query.device == key.device == value.device
    )
    if not fits:
        given = ", ".join(f"{tuple(x.shape)} {x.dtype} {x.device}" for x in (query, key, value))
        raise UsageError(
            f"query, key, value are {given}: [B, Hq, q, D] and twice [B, Hkv, kv, D] of one dtype "
            "and device are needed, with Hq a multiple of Hkv and 1 <= q <= kv"
        )


# ------------------------------------------------------------------------------- back ends


def _flash_attn(query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
    from flash_attn import flash_attn_func

    states = (x.transpose(1, 2) for x in (query, key, value))
    output: Tensor = flash_attn_func(*states, softmax_scale=scale, causal=True)
    return output.transpose(1, 2)


def _varlen_attn(query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
    from torch.nn.attention.varlen import varlen_attn

    (batch, _, new, _), total = query.shape, key.shape[2]
    starts, kv_starts = (_starts(batch, length, query.device) for length in (new, total))
    query, key, value = (x.transpose(1, 2).flatten(0, 1) for x in (query, key, value))
    settings: dict[str, Any] = {"scale": scale, "window_size": (-1, 0), "enable_gqa": True}
    output = varlen_attn(query, key, value, starts, kv_starts, new, total, **settings)
    assert isinstance(output, torch.Tensor)  # a tuple only on request
    return output.view(batch, new, *query.shape[1:]).transpose(1, 2)


@lru_cache(maxsize=4)
def _starts(batch: int, length: int, device: torch.device) -> Tensor:
    """Return where sequences of one length begin when concatenated; shared by all layers."""
    return torch.arange(batch + 1, dtype=torch.int32, device=device) * length


def _prefix_split(query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
    """Attend to the prefix and to the new tokens apart, then average, weighted.

    No mask is read, and one pass over the prefix serves all heads that share it. The weights follow
    from the log-sum-exp of the scores of each part: M. Milakov, N. Gimelshein, "Online normalizer
    calculation for softmax", 2018.
    """
    new, old = query.shape[2], key.shape[2] - query.shape[2]
    if new == 1 or old == 0:
        return _masked(query, key, value, scale)  # which then has no mask
    flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu  # noqa: SLF001 - has the LSE
    far, far_lse = flash(_fold(query, key), key[:, :, :old], value[:, :, :old], scale=scale)
    near, near_lse = flash(query, key[:, :, old:], value[:, :, old:], is_causal=True, scale=scale)
    weight = torch.sigmoid(far_lse.reshape(near_lse.shape) - near_lse).unsqueeze(-1)
    far = far.reshape(query.shape)
    return torch.lerp(near.to(weight.dtype), far.to(weight.dtype), weight).to(query.dtype)


def _lower_right(query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
    from torch.nn.attention.bias import causal_lower_right

    return _sdpa(query, key, value, scale, causal_lower_right(query.shape[2], key.shape[2]))


def _masked(query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
    new, total = query.shape[2], key.shape[2]
    mask = None if new in {1, total} else _bias(new, total, query.dtype, query.device)
    return _sdpa(query, key, value, scale, mask, is_causal=new == total > 1)


@lru_cache(maxsize=1)
def _bias(new: int, total: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return ``[new, total]``: 0 where visible, else -inf. Kept, so that all layers share it."""
    with torch.inference_mode(mode=False):  # else autograd could not use it later
        hidden = torch.full((new, total), -torch.inf, dtype=dtype, device=device)
        return hidden.triu(total - new + 1)


def _fold(query: Tensor, key: Tensor) -> Tensor:
    """Return ``[B, Hkv, Hq / Hkv * q, D]``: heads that share keys as more rows of one head."""
    return query.reshape(query.shape[0], key.shape[1], -1, query.shape[3])


def _sdpa(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scale: float | None,
    mask: Tensor | None = None,
    *,
    is_causal: bool = False,
) -> Tensor:
    """PyTorch's attention, with grouped heads arranged as its fast kernels take them."""
    shape, group = query.shape, query.shape[1] // key.shape[1]
    if not is_causal and (mask is None or mask.shape[1:3] == (1, 1)):
        query = _fold(query, key)  # all heads and rows see the same
    elif group > 1 and query.device.type != "cpu":
        key, value = (x.repeat_interleave(group, dim=1) for x in (key, value))
    grouped = query.shape[1] != key.shape[1]
    output = scaled_dot_product_attention(
        query, key, value, mask, is_causal=is_causal, scale=scale, enable_gqa=grouped
    )
    return output.reshape(*shape[:3], -1)


# ---------------------------------------------------------------------------------- choice

_ORDER = (
    Backend("flash_attn", "cuda", _flash_attn),
    Backend("varlen_attn", "cuda", _varlen_attn),
    Backend("prefix_split", "cpu", _prefix_split),
    Backend("lower_right", None, _lower_right),
    Backend("masked", None, _masked),
)
BACKENDS = {backend.name: backend for backend in _ORDER}
"""All back ends by name, in order of preference."""


@cache
def choose(
    device_type: str, dtype: torch.dtype, head_dim: int, backend: str | None = None
) -> Backend:
    """Return the first back end that can be used, or the one named.

    Raises:
        UsageError: If there is none, or the named one does not exist or cannot be used.
    """
    reasons = {name: _try(name, device_type, dtype, head_dim) for name in _candidates(backend)}
    for name, reason in reasons.items():
        if not reason:
            return BACKENDS[name]
    tried = "; ".join(f"{name}: {reason}" for name, reason in reasons.items())
    raise UsageError(f"no attention for {dtype} heads of {head_dim} on {device_type} ({tried})")


def _candidates(backend: str | None) -> list[str]:
    if backend not in {None, *BACKENDS}:
        raise UsageError(f"no attention back end {backend!r}: choose one of {', '.join(BACKENDS)}")
    return list(BACKENDS) if backend is None else [backend]


def describe(
    device_type: str, dtype: torch.dtype, head_dim: int = 64
) -> list[tuple[str, bool, str]]:
    """Return ``(name, available, reason if not)`` per back end, in order of preference."""
    reasons = [(name, _try(name, device_type, dtype, head_dim)) for name in BACKENDS]
    return [(name, not reason, reason) for name, reason in reasons]


def doctor_rows() -> Iterator[tuple[str, str, str]]:
    """Yield ``(check, status, detail)`` for ``kvstore doctor``: what is used, what is missing."""
    for device_type in ("cuda", "cpu") if torch.cuda.is_available() else ("cpu",):
        rows = describe(device_type, torch.bfloat16)
        made_for_it = [row for row in rows if BACKENDS[row[0]].device_type == device_type]
        missing = [f"no {name}: {reason}" for name, available, reason in made_for_it if reason]
        status = "ok" if len(missing) < len(made_for_it) else "warn"
        chosen = choose(device_type, torch.bfloat16, 64).name
        yield f"attention on {device_type}", status, "; ".join([chosen, *missing])


@cache
def _try(name: str, device_type: str, dtype: torch.dtype, head_dim: int) -> str:
    """Return why a back end cannot be used, or an empty string."""
    _, only, run = BACKENDS[name]
    if only not in {None, device_type}:
        return f"serves {only} only"
    try:
        with torch.device("cpu"), torch.inference_mode():  # not the caller's default device
            error = _trial_error(run, device_type, dtype, head_dim)
    except Exception as failure:  # noqa: BLE001 - whatever it is, the next one is tried
        return f"{type(failure).__name__}: {failure}".partition("\n")[0]
    return "" if error < 0.05 else f"wrong result, by up to {error:.2g}"


def _trial_error(run: Kernel, device_type: str, dtype: torch.dtype, head_dim: int) -> float:
    """Return the largest error in a small case: rounding makes 0.01, a wrong mask about 1."""
    generator = torch.Generator().manual_seed(0)
    states = torch.randn(2, 8, 12, head_dim, generator=generator, dtype=torch.float32)
    output = run(*_trial_parts(states.to(device_type, dtype)), head_dim**-0.5)
    query, key, value = _trial_parts(states)
    key, value = (x.repeat_interleave(2, dim=1) for x in (key, value))
    hidden = torch.ones(5, 9, dtype=torch.bool).triu(5)
    scores = (query @ key.mT * head_dim**-0.5).masked_fill(hidden, -torch.inf)
    return float((output.float().cpu() - scores.softmax(-1) @ value).abs().max())


def _trial_parts(states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return states[:, :4, :5], states[:, 4:6, :9], states[:, 6:, :9]


# ---------------------------------------------------------------------------- Transformers


def register(*, backend: str | None = None) -> None:
    """Make ``attn_implementation="kvstore"`` known; the last call decides for the whole process.

    Raises:
        UsageError: If there is no back end named ``backend``.
    """
    from transformers import AttentionInterface, AttentionMaskInterface

    _candidates(backend)
    AttentionInterface.register(IMPLEMENTATION, partial(transformers_attention, backend=backend))
    AttentionMaskInterface.register(IMPLEMENTATION, transformers_mask)


def transformers_mask(**arguments: Any) -> Tensor | None:
    """Return ``None`` for exactly the mask of :func:`attend`, else ``[B, 1, q, kv]`` of bool.

    Takes what ``transformers.masking_utils.sdpa_mask`` takes. That function also returns ``None``
    for other masks: for one aligned at the top left, while a static cache is filled.
    """
    from transformers.masking_utils import causal_mask_function, sdpa_mask

    if arguments["mask_function"] is causal_mask_function and _is_plain(**arguments):
        return None
    arguments |= {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
    mask: Tensor | None = sdpa_mask(**arguments)
    return mask


def _is_plain(
    *,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor,
    kv_offset: int,
    attention_mask: Tensor | None,
    allow_is_causal_skip: bool,
    **_: object,
) -> bool:
    """Whether a mask may be left out, the new tokens are the last, and nothing is padding.

    ``q_offset`` is a tensor with a static cache, whose length is not that of its content.
    """
    if not allow_is_causal_skip or isinstance(q_offset, torch.Tensor):
        return False
    if kv_offset != 0 or q_offset + q_length != kv_length:
        return False
    if attention_mask is None:
        return True
    if attention_mask.shape[-1] < kv_length or torch.compiler.is_compiling():
        return False
    return bool(attention_mask[:, :kv_length].all())


def transformers_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **others: Any,
) -> tuple[Tensor, None]:
    """Return ``[B, q, Hq, D]``, contiguous, and no attention weights.

    Shapes are as for :func:`attend`. ``attention_mask`` is ``[B, 1, q, kv]``, true or 0 where
    visible, or ``None`` as :func:`transformers_mask` means it; a layer that is not causal then
    sees everything.

    Raises:
        UsageError: If the model needs what is not supported here.
    """
    refused = [name for name in REFUSED if others.get(name) is not None]
    refused += ["dropout"] if dropout else []
    window = others.get("sliding_window")
    if attention_mask is None and window is not None and window < key.shape[2]:
        refused.append("sliding_window without a mask")
    if refused:
        raise UsageError(
            f"attn_implementation={IMPLEMENTATION!r} does not support {', '.join(refused)}: "
            "load the model with attn_implementation='eager'"
        )
    is_causal = others.get("is_causal")
    if is_causal is None:
        is_causal = getattr(module, "is_causal", True)
    if attention_mask is not None:
        output = _sdpa(query, key, value, scaling, attention_mask)
    elif is_causal:
        output = attend(query, key, value, scale=scaling, backend=others.get("backend"))
    else:
        output = _sdpa(query, key, value, scaling)
    return output.transpose(1, 2).contiguous(), None
