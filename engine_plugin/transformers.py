"""Hugging Face Transformers with a prefix cache.

    model = CachedModel(AutoModelForCausalLM.from_pretrained(...).eval(), kvstore.open(...))
    model.generate(**tokenizer(prompt, return_tensors="pt"), max_new_tokens=64)

A request: look up the prompt, copy the known blocks into a fresh cache, let the model compute what
is missing and decode, copy the new blocks out. Decoding is ``model.generate`` itself, given all
tokens, the full mask and the filled cache, so every position is an absolute one. In a batch each
prompt is looked up and computed on its own, without padding, in its row of one left-padded cache;
then all rows are decoded together.

What cannot be cached (:mod:`engine_plugin.adapter`, :mod:`engine_plugin.request`) goes to the model
unchanged, and what fails in the store is a counted miss (:mod:`engine_plugin.prefix`). One lock
serialises the model; nothing outlives a request but counters and one spare buffer.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal
from weakref import WeakKeyDictionary

import numpy as np
import torch

from engine_plugin.adapter import ModelAdapter
from engine_plugin.prefix import PrefixStore, RequestStats
from engine_plugin.request import Prompts, Settings, Watch, find_prompts
from kvstore.errors import UsageError
from kvstore.namespace import check_codec
from kvstore.retention import NORMAL_PRIORITY
from radix import TokenError, token_bytes

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray
    from transformers import GenerationConfig, PreTrainedModel

    from engine_plugin.cache import BufferCache
    from kvstore.interface import KVStore
    from kvstore.namespace import KVLayout, Namespace

logger = logging.getLogger(__name__)

_LOCKS: WeakKeyDictionary[PreTrainedModel, threading.RLock] = WeakKeyDictionary()
"""One lock for each model, shared by those who wrap it for several tenants."""

HEADROOM_TOKENS = 1024
"""Most new tokens that memory is taken for at once; for longer answers the cache grows."""

MOST_SLACK = 2
"""How much larger than needed the memory of a cache may be that the caller gets."""


@dataclass(frozen=True, slots=True)
class Prefilled:
    """A computed prompt. The cache covers all of its tokens and belongs to the caller."""

    cache: BufferCache
    logits: torch.Tensor
    """``[1, vocab]``: of the last token."""
    stats: RequestStats


class CachedModel:
    """A causal language model of Transformers whose prompts share prefixes through a store.

    Thread-safe, also with others that wrap the same model. The store stays the caller's. Cached
    requests compute with :mod:`engine_plugin.attention` where the model would use ``"sdpa"``; between
    requests it is itself. During one, do not call it from other threads.
    """

    def __init__(  # noqa: PLR0913 - one setting each
        self,
        model: PreTrainedModel,
        store: KVStore,
        *,
        tenant: str | None = None,
        salt: str | None = None,
        codec: Literal["lz4", "int8", "fp8"] | None = None,
        priority: int = NORMAL_PRIORITY,
        ttl_s: float | None = None,
        chunk_tokens: int = 2048,
        verify: Literal["never", "always"] = "never",
        on_failure: Literal["recompute", "raise"] = "recompute",
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """Probe the model and hash its weights; a model that cannot be cached runs as it is.

        Args:
            model: in evaluation mode. For PEFT, ``peft_model.get_base_model()``.
            store: where blocks are kept: what :func:`kvstore.open` or :func:`kvstore.connect` return.
            tenant: whose blocks these are; nobody else hits them.
            salt: any further distinction, as of state that no fingerprint sees.
            codec: has the disk store blocks in fewer bytes: ``lz4`` without loss, in some 6 to 12 % fewer;
                ``int8`` and ``fp8`` with a bounded loss, in half of them or fewer: answers then may differ from
                the model's own. By default every bit comes back.
            priority: 0 to 100: what is stored with a lower one is evicted first.
            ttl_s: seconds after which what was stored expires; None: never.
            chunk_tokens: most prompt tokens of one forward pass.
            verify: whether to compare loaded blocks with their checksums.
            on_failure: ``"raise"`` lets through what the store raises.
            clock: monotonic seconds.

        Raises:
            UsageError: ``codec``, ``priority`` or ``ttl_s`` is impossible.
        """
        check_codec(codec)
        self._model, self._clock, self._chunk_tokens = model, clock, chunk_tokens
        self._prefixes = PrefixStore(
            store,
            verify=verify,
            on_failure=on_failure,
            clock=clock,
            priority=priority,
            ttl_s=ttl_s,
        )
        self._lock = _LOCKS.setdefault(model, threading.RLock())
        self._of_thread = threading.local()
        self._adapter: ModelAdapter | None = None
        self._uncached = "model"
        """Why there is no adapter."""
        try:
            with self._lock:
                self._adapter = ModelAdapter(
                    model, store.block_tokens, tenant=tenant, salt=salt, codec=codec
                )
        except Exception as error:  # noqa: BLE001 - whatever the probe hits, the model still runs
            logger.warning("%s runs without a prefix cache: %s", type(model).__name__, error)

    def close(self) -> None:
        """Give up memory; from now on, requests go to the model. The store stays open."""
        with self._lock:
            self._adapter, self._uncached = None, "closed"

    def __enter__(self) -> CachedModel:
        """Return this."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close."""
        self.close()

    @property
    def layout(self) -> KVLayout | None:
        """Layout of the blocks; None when the model is not cached."""
        return self._adapter.layout if self._adapter is not None else None

    @property
    def last(self) -> RequestStats:
        """What is known about the calling thread's last request."""
        stats: RequestStats = getattr(self._of_thread, "stats", RequestStats())
        return stats

    def stats(self) -> dict[str, int]:
        """Return counters since the start: prompts, tokens, hits; misses and bypasses by reason."""
        return dict(self._prefixes.counts)  # without the lock, which a request holds for long

    def namespace(self) -> Namespace | None:
        """Return the namespace of the model as it is now, or None if it cannot be cached now."""
        with self._lock:
            found = self._find_namespace(RequestStats())
            return None if isinstance(found, str) else found[1]

    def refresh(self) -> None:
        """Hash the weights again: for writes of a few elements through ``.data``.

        It does not help with what no digest covers (:mod:`engine_plugin.fingerprint`).
        """
        with self._lock:
            if self._adapter is not None:
                self._adapter.fingerprint.refresh()

    @torch.no_grad()
    def prefill(self, tokens: object) -> Prefilled:
        """Compute a prompt, reusing stored blocks and offloading new ones.

        Args:
            tokens: token ids, a one-dimensional tensor, array or sequence; at least one.

        Raises:
            UsageError: no token ids, or the model or its present state cannot be cached.
        """
        try:
            ids = np.frombuffer(token_bytes(tokens), np.int32).copy()
        except TokenError as error:
            raise UsageError(str(error)) from error
        if not len(ids):
            raise UsageError("prefill needs at least one token")
        called = self._clock()
        with self._lock:
            stats = self._start(called, len(ids))
            found = self._find_namespace(stats)
            if isinstance(found, str):
                raise UsageError(f"the model cannot be cached now: {found}")
            adapter, namespace = found
            cache = adapter.new_cache(1, len(ids), MOST_SLACK)
            known = self._prefixes.load(namespace, ids, cache.kv[:, :, 0], stats)
            cache.show(known)
            with adapter.our_attention():
                logits = adapter.compute(cache, ids, known, self._chunk_tokens)
            adapter.synchronise()
            stats.prefill_s = self._clock() - called - stats.queue_s
            self._report(namespace, known, len(ids), stats)
            self._prefixes.save(namespace, ids, cache.kv[:, :, 0], stats)
            return Prefilled(cache, logits, stats)

    @torch.no_grad()
    def generate(
        self,
        inputs: torch.Tensor | None = None,
        generation_config: GenerationConfig | None = None,
        *,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        **arguments: Any,
    ) -> Any:  # noqa: ANN401 - as model.generate
        """Do what ``model.generate`` does, computing only what is not stored.

        ``inputs`` (or ``input_ids``) and ``attention_mask`` are ``[batch, width]``, padded on
        either side; the result is what ``model.generate`` returns. New whole blocks of prompts and
        answers are offloaded afterwards; in a batch, prompts already when they are computed. When
        the model raises, nothing else is offloaded and the exception goes on.
        """
        called = self._clock()
        if inputs is None:
            inputs = input_ids
        elif input_ids is not None:
            arguments["input_ids"] = input_ids  # for the model to refuse
        if generation_config is not None:
            arguments["generation_config"] = generation_config
        settings = Settings(self._model, arguments)
        prompts = settings.bypass_reason() or find_prompts(inputs, attention_mask, settings)
        with self._lock:
            if isinstance(prompts, Prompts):
                stats = self._start(called, sum(prompts.lengths))
                found = self._find_namespace(stats)
                if not isinstance(found, str):
                    with found[0].our_attention():
                        return self._generate(*found, prompts, settings, called)
                reason = found
            else:
                stats, reason = self._start(called, 0), prompts
            stats.miss = f"bypass.{reason}"
            self._prefixes.counts[stats.miss] += 1
            with self._adapter.own_attention() if self._adapter else nullcontext():
                return self._model.generate(inputs, attention_mask=attention_mask, **arguments)

    def _start(self, called: float, prompt_tokens: int) -> RequestStats:
        stats = RequestStats(prompt_tokens=prompt_tokens, queue_s=self._clock() - called)
        self._of_thread.stats = stats
        return stats

    def _find_namespace(self, stats: RequestStats) -> tuple[ModelAdapter, Namespace] | str:
        """Return the model's adapter and its namespace now, or why it cannot be cached."""
        adapter, started = self._adapter, self._clock()
        if adapter is None:
            return self._uncached
        with self._prefixes.tolerate("fingerprint") as failed:
            found = adapter.namespace()
        stats.lookup_s += self._clock() - started
        if failed:
            return "fingerprint"
        return found if isinstance(found, str) else (adapter, found)

    def _generate(
        self,
        adapter: ModelAdapter,
        namespace: Namespace,
        prompts: Prompts,
        settings: Settings,
        called: float,
    ) -> Any:  # noqa: ANN401
        width, stats, tokens = prompts.ids.shape[1], self.last, prompts.tokens()
        room = min(settings.new_tokens(width), HEADROOM_TOKENS)
        slack = MOST_SLACK if settings.get("return_dict_in_generate") else math.inf
        cache = adapter.new_cache(len(tokens), width + room, slack)
        known = self._fill(adapter, namespace, cache, tokens, width)
        watch = Watch(self._clock, adapter.synchronise)
        arguments = settings.arguments | {
            adapter.keyword: cache,
            "attention_mask": prompts.mask,
            "logits_processor": watch.processors(settings.arguments.get("logits_processor")),
            "stopping_criteria": watch.criteria(settings.arguments.get("stopping_criteria")),
        }
        output = self._model.generate(prompts.ids, **arguments)
        stats.prefill_s = watch.computed_at - called - stats.queue_s
        stats.sample_s = watch.sampled_at - watch.computed_at
        if len(tokens) == 1:
            self._report(namespace, known, len(tokens[0]), stats)
        if cache.in_buffer:
            self._save_answers(namespace, cache, tokens, watch.tokens(), width)
        sequences = output if isinstance(output, torch.Tensor) else output.sequences
        if prompts.given is not prompts.ids:
            sequences[:, :width] = prompts.given
        if sequences is output:  # otherwise the caller sees the cache
            adapter.recycle(cache)
        return output

    def _fill(
        self,
        adapter: ModelAdapter,
        namespace: Namespace,
        cache: BufferCache,
        prompts: list[NDArray[np.int32]],
        width: int,
    ) -> int:
        """Load the prompts, and compute what ``generate`` is not to compute at once.

        Of a prompt alone it gets the last chunk; of a batch, the last token of every row. Returns how many
        tokens of the last prompt were loaded.
        """
        alone, shown, known = len(prompts) == 1, 0, 0
        for index, ids in enumerate(prompts):
            pad = width - len(ids)
            cache.kv[:, :, index, :, :pad].zero_()  # masked, but NaN would spread all the same
            row = cache.row(index, pad)
            known = self._prefixes.load(namespace, ids, row.kv[:, :, 0], self.last)
            chunks = (len(ids) - 1 - known) // self._chunk_tokens
            ready = known + chunks * self._chunk_tokens if alone else len(ids) - 1
            if known < ready:
                row.show(known)
                adapter.compute(row, ids[:ready], known, self._chunk_tokens)
                if not alone:
                    self._prefixes.save(namespace, ids[:ready], row.kv[:, :, 0], self.last)
            shown = pad + ready if ready else shown
        cache.show(shown)
        return known

    def _report(self, namespace: Namespace, start: int, stop: int, stats: RequestStats) -> None:
        """Tell the store how long tokens ``[start, stop)`` of a prompt alone took."""
        seconds = stats.prefill_s - stats.load_s - stats.lookup_s
        self._prefixes.computed(namespace, start, stop, seconds)

    def _save_answers(
        self,
        namespace: Namespace,
        cache: BufferCache,
        prompts: list[NDArray[np.int32]],
        answers: NDArray[np.int32],
        width: int,
    ) -> None:
        written = cache.get_seq_length()  # the last token was never computed
        for index, prompt in enumerate(prompts):
            pad = width - len(prompt)
            ids = np.concatenate([prompt, answers[index]])[: written - pad]
            if len(prompts) > 1:  # an answer that ended before others goes on with pad tokens
                others = np.flatnonzero(ids != ids[-1])
                ids = ids[: others[-1] + 2] if len(others) else ids[:1]
            self._prefixes.save(namespace, ids, cache.kv[:, :, index, :, pad:], self.last)
