"""A Transformers model as a prefix cache needs it: probed, fingerprinted, with our attention.

A model is judged by what it does, not by its name: a few tokens are computed, the cache that comes
out is looked at, and a prompt computed in two parts must give the logits of the whole. What is not
plain full-attention KV of every token is refused, with the reason.
"""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING

import torch
from transformers import AttentionInterface, DynamicCache
from transformers.cache_utils import DynamicLayer

from engine_plugin import attention
from engine_plugin.cache import BufferCache, Workspace
from engine_plugin.fingerprint import Fingerprint, settings_digest
from engine_plugin.layout import layout_of, torch_dtype
from kvstore.errors import UsageError
from kvstore.namespace import Namespace

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from transformers import PreTrainedModel

    from kvstore.namespace import KVLayout

PROBE_TOKENS, PROBE_PREFIX = 12, 7
OWN_ATTENTION = "sdpa"
"""The implementation that ours takes the place of; who chose another one keeps it."""

LENGTH_DEPENDENT_ROPE = frozenset({"dynamic", "longrope", "su"})
"""RoPE variants whose keys depend on how long the whole prompt is."""


class ModelAdapter:
    """One model that can be cached. Not thread-safe.

    Cached requests compute with :mod:`engine_plugin.attention` where the model used ``"sdpa"``.
    """

    @torch.no_grad()
    def __init__(
        self, model: PreTrainedModel, block_tokens: int, *, tenant: str | None, salt: str | None
    ) -> None:
        """Probe ``model``; :class:`UsageError` says why it cannot be cached."""
        self._model, self._tenant, self._salt = model, tenant, salt
        self._workspace = Workspace()
        self._replaceable = True
        check_config(model)
        self.keyword = cache_keyword(model)
        """Name of the argument by which ``forward`` and ``generate`` take a cache."""
        self.layout, logits = probe_layout(model, block_tokens)
        self.fingerprint = Fingerprint(model)
        self._settings = settings_digest(model.config.to_dict())
        self._parameters = inspect.signature(model.forward).parameters.keys()
        before = self.fingerprint.digest()
        try:
            self._choose_attention(logits)
            self._check_unchanged(before)
        except Exception:
            self.close()
            raise

    def _check_unchanged(self, digest: bytes) -> None:
        if self.fingerprint.digest() != digest:
            raise UsageError("its buffers change when it runs")

    def _choose_attention(self, logits: torch.Tensor) -> None:
        """Take ours if that, or else the model's own, continues a cached prefix rightly."""
        if attention.IMPLEMENTATION not in AttentionInterface():
            attention.register()
        self.use_attention(attention.IMPLEMENTATION)
        if self._attention == attention.IMPLEMENTATION:
            try:
                return probe_split(self._model, logits)
            except Exception:  # noqa: BLE001 - the model's own may still do
                self.use_attention(OWN_ATTENTION)
                self._replaceable = False
        return probe_split(self._model, logits)

    def use_attention(self, name: str) -> None:
        """Make the model compute with ours or with its own, unless it has a third one."""
        if self._replaceable and self._attention in {OWN_ATTENTION, attention.IMPLEMENTATION} - {
            name
        }:
            self._model.set_attn_implementation(name)

    @property
    def _attention(self) -> str | None:
        name: str | None = self._model.config._attn_implementation  # noqa: SLF001 - no public way
        return name

    def close(self) -> None:
        """Give the model its own attention back, and the spare buffer to the system."""
        self.use_attention(OWN_ATTENTION)
        self._workspace = Workspace()

    def obstacle(self) -> str | None:
        """Return why the model cannot be cached in its present state, or None."""
        if self._model.training:
            return "training"
        if torch.is_autocast_enabled(self._model.device.type):
            return "autocast"
        return "hooks" if self.fingerprint.has_hooks() else None

    def namespace(self) -> Namespace:
        """Return the namespace of the model as it is now; looks for changed weights."""
        return Namespace(
            model=self.fingerprint.digest(),
            layout=self.layout,
            settings=self._settings,
            tenant=self._tenant,
            salt=self._salt,
        )

    def new_cache(self, batch: int, tokens: int) -> BufferCache:
        """Return an empty cache with room for ``tokens``; its memory holds anything."""
        layers, two, heads, _, dim = self.layout.shape
        shape = (layers, two, batch, heads, tokens, dim)
        kv = self._workspace.take(shape, torch_dtype(self.layout), self._model.device)
        return BufferCache(kv)

    def recycle(self, cache: BufferCache) -> None:
        """Take the memory of a cache that nobody else can see."""
        self._workspace.give_back(cache.kv)

    def compute(
        self, cache: BufferCache, ids: NDArray[np.int32], start: int, chunk_tokens: int
    ) -> torch.Tensor:
        """Run ``ids[start:]`` behind the ``start`` tokens of ``cache``; return the last logits.

        The logits are ``[1, vocab]``. At least one token must be left to run; no more than
        ``chunk_tokens`` go into one forward pass.
        """
        device, logits = self._model.device, torch.empty(0)
        for at in range(start, len(ids), chunk_tokens):
            part = torch.as_tensor(ids[at : at + chunk_tokens], dtype=torch.int64, device=device)
            arguments = {
                "position_ids": torch.arange(at, at + len(part), device=device)[None],
                "logits_to_keep": 1,
            }
            output = self._model(
                input_ids=part[None],
                use_cache=True,
                **{self.keyword: cache},
                **{name: arguments[name] for name in arguments.keys() & self._parameters},
            )
            logits = output.logits[:, -1]
        return logits

    def synchronise(self) -> None:
        """Wait until the device has done what it was told."""
        if self._model.device.type == "cuda":
            torch.cuda.synchronize(self._model.device)


def cache_keyword(model: PreTrainedModel) -> str:
    """Return the argument by which ``forward`` takes a cache (renamed after Transformers 5.22)."""
    parameters = inspect.signature(model.forward).parameters
    for name in ("cache", "past_key_values"):
        if name in parameters:
            return name
    raise UsageError("its forward takes neither cache nor past_key_values")


def check_config(model: PreTrainedModel) -> None:
    """Raise :class:`UsageError` if the configuration alone says that KV cannot be reused."""
    if model.training:
        raise UsageError("it is in training mode; call model.eval() before wrapping it")
    if model.config.is_encoder_decoder:
        raise UsageError("encoder-decoder models attend to more than the tokens before")
    kinds = _values_of(model.config.to_dict(), {"rope_type", "type"}) & LENGTH_DEPENDENT_ROPE
    if kinds:
        raise UsageError(f"keys of {min(kinds)!r} RoPE depend on the length of the whole prompt")


def probe_layout(model: PreTrainedModel, block_tokens: int) -> tuple[KVLayout, torch.Tensor]:
    """Run a few tokens at once; return the KV layout and the last token's logits ``[1, vocab]``.

    Raises :class:`UsageError` unless every layer keeps plain keys and values of every token.
    """
    cache = DynamicCache(config=model.config)
    tokens = _probe_tokens(model)
    output = model(input_ids=tokens, use_cache=True, **{cache_keyword(model): cache})
    for index, layer in enumerate(cache.layers):
        if type(layer) is not DynamicLayer or not layer.is_initialized:
            raise UsageError(f"layer {index} is not full attention ({type(layer).__name__})")
        if layer.get_seq_length() != PROBE_TOKENS:
            raise UsageError(f"layer {index} does not keep every token")
    layout = layout_of([(layer.keys, layer.values) for layer in cache.layers], block_tokens)
    return layout, output.logits[:, -1]


def probe_split(model: PreTrainedModel, expected: torch.Tensor) -> None:
    """Compute the probe in two parts; :class:`UsageError` unless the logits are ``expected``."""
    cache = {cache_keyword(model): DynamicCache(config=model.config)}
    prefix, suffix = _probe_tokens(model).tensor_split((PROBE_PREFIX,), dim=1)
    model(input_ids=prefix, use_cache=True, **cache)
    found = model(input_ids=suffix, use_cache=True, **cache).logits[:, -1]
    tolerance = 1e-3 if torch.finfo(found.dtype).bits >= 32 else 5e-2
    difference = (found.float() - expected.float()).abs().max().item()
    scale = expected.float().abs().max().item()
    if not difference <= tolerance * scale:
        raise UsageError(
            f"a prompt in two parts gives other logits than at once, by {difference:.2g} "
            f"of {scale:.2g}"
        )


def _probe_tokens(model: PreTrainedModel) -> torch.Tensor:
    vocabulary: int = model.config.get_text_config(decoder=True).vocab_size
    tokens = torch.arange(1, PROBE_TOKENS + 1, device=model.device)
    return tokens.remainder(vocabulary)[None]


def _values_of(config: object, keys: set[str]) -> set[str]:
    if not isinstance(config, dict):
        return set()
    here = {value for key, value in config.items() if key in keys and isinstance(value, str)}
    return here.union(*(_values_of(value, keys) for value in config.values()))
