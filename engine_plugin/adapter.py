"""A Transformers model as a prefix cache needs it: probed, fingerprinted, with our attention.

A model is judged by what it does, not by its name: a few tokens are computed, the cache that comes
out is looked at, and a prompt computed in two parts must give the logits of the whole. What is not
plain full-attention KV of every token is refused, with the reason.
"""

from __future__ import annotations

import inspect
import logging
from contextlib import contextmanager
from typing import TYPE_CHECKING, Literal

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
    from collections.abc import Iterator

    import numpy as np
    from numpy.typing import NDArray
    from transformers import PreTrainedModel

    from kvstore.namespace import KVLayout

logger = logging.getLogger(__name__)

PROBE_TOKENS, PROBE_PREFIX = 12, 7
OWN_ATTENTION = "sdpa"
"""The implementation that ours takes the place of; who chose another one keeps it."""

LENGTH_DEPENDENT_ROPE = frozenset({"dynamic", "longrope", "su"})
"""RoPE variants whose keys depend on how long the whole prompt is."""


class ModelAdapter:
    """One model that can be cached, probed again when it has changed. Not thread-safe.

    Cached requests compute with :mod:`engine_plugin.attention` where the model uses ``"sdpa"``;
    between requests the model has its own.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        block_tokens: int,
        *,
        tenant: str | None,
        salt: str | None,
        codec: Literal["lz4", "int8", "fp8"] | None = None,
    ) -> None:
        """Probe ``model``; :class:`UsageError` says why it cannot be cached."""
        self._model, self._tenant, self._salt, self._codec = model, tenant, salt, codec
        self._block_tokens = block_tokens
        self._workspace = Workspace()
        self._probe()
        self._probed: object = self._state()
        self._fits = True

    @torch.no_grad()
    def _probe(self) -> None:
        check_config(self._model)
        self.keyword = cache_keyword(self._model)
        """Name of the argument by which ``forward`` and ``generate`` take a cache."""
        self.layout, logits = probe_layout(self._model, self._block_tokens)
        self.fingerprint = Fingerprint(self._model)
        self._parameters = inspect.signature(self._model.forward).parameters.keys()
        before = self.fingerprint.digest()
        self._choose_attention(logits)
        if self.fingerprint.digest() != before:
            raise UsageError("its buffers or attributes change when it runs")

    def _choose_attention(self, logits: torch.Tensor) -> None:
        """Take ours if that, or else the model's own, continues a cached prefix rightly."""
        if attention.IMPLEMENTATION not in AttentionInterface():
            attention.register()
        self._replaceable = self._attention == OWN_ATTENTION
        try:
            with self.our_attention():
                self._replaceable &= self._attention == attention.IMPLEMENTATION
                return probe_split(self._model, logits)
        except Exception:
            if not self._replaceable:
                raise
            self._replaceable = False  # the model's own may still do
        return probe_split(self._model, logits)

    @contextmanager
    def our_attention(self) -> Iterator[None]:
        """Let the model compute with ours in here, unless it has a third one."""
        with self._attention_instead(OWN_ATTENTION, attention.IMPLEMENTATION):
            yield

    @contextmanager
    def own_attention(self) -> Iterator[None]:
        """Let the model compute with its own in here, also inside :meth:`our_attention`."""
        with self._attention_instead(attention.IMPLEMENTATION, OWN_ATTENTION):
            yield

    @contextmanager
    def _attention_instead(self, before: str, name: str) -> Iterator[None]:
        switch = self._replaceable and self._attention == before
        try:
            if switch:
                self._model.set_attn_implementation(name)
            yield
        finally:
            if switch:
                self._model.set_attn_implementation(before)

    @property
    def _attention(self) -> str | None:
        name: str | None = self._model.config._attn_implementation  # noqa: SLF001 - no public way
        return name

    def namespace(self) -> Namespace | str:
        """Return the namespace of the model as it is now, or why it cannot be cached now.

        Looks for changes: other weights get another namespace, another structure is probed first.
        """
        if self._model.training:
            return "training"
        if torch.is_autocast_enabled(self._model.device.type):
            return "autocast"
        digest = self.fingerprint.digest()
        if self.fingerprint.has_hooks():
            return "hooks"
        state = self._state()
        if state != self._probed:
            self._probed, self._fits = state, False
            try:
                self._probe()
            except Exception as error:  # noqa: BLE001 - whatever the probe hits, the model still runs
                logger.warning("the model has changed, and runs without prefix cache: %s", error)
            else:
                digest, self._fits = self.fingerprint.digest(), True
                self._probed = state = self._state()
        if not self._fits:
            return "changed"
        return Namespace(
            model=digest,
            layout=self.layout,
            settings=state[1],
            tenant=self._tenant,
            salt=self._salt,
            codec=self._codec,
        )

    def _state(self) -> tuple[list[str], bytes]:
        """Return what decides whether and how the model can be cached."""
        return self.fingerprint.structure, settings_digest(self._model.config.to_dict())

    def new_cache(self, batch: int, tokens: int, most_slack: float) -> BufferCache:
        """Return an empty cache with room for ``tokens``; its memory holds anything.

        ``most_slack`` is as for :meth:`engine_plugin.cache.Workspace.take`.
        """
        layers, two, heads, _, dim = self.layout.shape
        shape = (layers, two, batch, heads, tokens, dim)
        kv = self._workspace.take(shape, torch_dtype(self.layout), self._model.device, most_slack)
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
    if hasattr(model, "_orig_mod"):
        raise UsageError("it is the wrapper of torch.compile; wrap the uncompiled model")
    if any(hasattr(module, "rope_deltas") for module in model.modules()):
        raise UsageError("it keeps positions between requests (rope_deltas)")
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
