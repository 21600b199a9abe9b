"""One request to ``generate``: may it be cached, what are its prompts, when is the first token.

A request is judged by its arguments: whatever changes what the KV means, or asks for outputs of
tokens that a hit would not compute, goes past the cache.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from transformers import (
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    StoppingCriteria,
    StoppingCriteriaList,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy as np
    from numpy.typing import NDArray
    from transformers import PreTrainedModel

BYPASSING = {
    "cache": "own_cache",
    "past_key_values": "own_cache",
    "cache_implementation": "own_cache",
    "assistant_model": "assisted",
    "assistant_early_exit": "assisted",
    "prompt_lookup_num_tokens": "assisted",
    "use_mtp": "assisted",
    "output_attentions": "token_outputs",
    "output_hidden_states": "token_outputs",
    "custom_generate": "decoding",
    "prefill_chunk_size": "decoding",  # older versions start it anew behind a filled cache
    "token_healing": "decoding",
    "penalty_alpha": "decoding",
    "dola_layers": "decoding",
    "constraints": "decoding",
    "force_words_ids": "decoding",
}
"""Arguments of ``generate`` that go past the cache when they are set, and the reason to count."""

HARMLESS = frozenset(vars(GenerationConfig())) | {
    "generation_config",
    "logits_processor",
    "stopping_criteria",
    "prefix_allowed_tokens_fn",
    "streamer",
    "synced_gpus",
    "tokenizer",
    "negative_prompt_ids",
    "negative_prompt_attention_mask",
    "trust_remote_code",
}
"""Arguments that do not reach the model's ``forward``."""


class Settings:
    """The generation settings of one request, without preparing it: argument, then both configs."""

    def __init__(self, model: PreTrainedModel, arguments: dict[str, Any]) -> None:
        """Read from ``arguments`` of ``generate``; nothing is copied or changed."""
        self.arguments = arguments
        self._configs = (
            arguments.get("generation_config"),
            getattr(model, "generation_config", None),
        )

    def get(self, name: str) -> Any:  # noqa: ANN401 - whatever the user set
        """Return the first value of ``name`` that is not None."""
        value = self.arguments.get(name)
        for config in self._configs:
            value = getattr(config, name, None) if value is None else value
        return value

    def bypass_reason(self) -> str | None:
        """Return why such a request cannot use the cache, or None."""
        for name, reason in BYPASSING.items():
            if self.get(name):
                return reason
        if self.get("use_cache") is False:
            return "own_cache"
        if (self.get("num_beams") or 1) > 1 or (self.get("num_return_sequences") or 1) > 1:
            return "beams"
        given = {name for name, value in self.arguments.items() if value is not None}
        return "model_inputs" if given - HARMLESS else None

    def new_tokens(self, prompt_tokens: int) -> int:
        """Return how many tokens may be generated."""
        new, total = self.get("max_new_tokens"), self.get("max_length")
        return max(1, new if new is not None else (total or prompt_tokens + 20) - prompt_tokens)


@dataclass(frozen=True, slots=True)
class Prompts:
    """The prompts of one request, moved to the right end of their rows."""

    given: torch.Tensor
    """int ``[batch, width]``: as the caller padded them."""
    ids: torch.Tensor
    """int ``[batch, width]``: padded on the left; ``given`` itself if it was so."""
    mask: torch.Tensor
    """int64 ``[batch, width]``: 1 where ``ids`` is a token of the prompt."""
    lengths: tuple[int, ...]
    """Tokens of each prompt: the last ones of its row."""

    def tokens(self) -> list[NDArray[np.int32]]:
        """Return each prompt without padding, as copies: ``generate`` lets others edit ``ids``."""
        rows = self.ids.to("cpu", torch.int32, copy=True).numpy()
        return [row[-length:] for row, length in zip(rows, self.lengths, strict=True)]


def find_prompts(ids: object, mask: object, settings: Settings) -> Prompts | str:
    """Return the prompts of a request, or why they cannot be told from ``ids`` and ``mask``.

    Without a mask, padding is recognised as ``generate`` does: by a pad token that ends nothing.
    """
    if not isinstance(ids, torch.Tensor) or ids.ndim != 2 or ids.is_floating_point():
        return "no_input_ids"
    if mask is None:
        mask = _infer_mask(ids, settings)
    if not isinstance(mask, torch.Tensor) or mask.shape != ids.shape:
        return "mask"
    kept, columns = mask.to("cpu", torch.int64), torch.arange(ids.shape[1])
    lengths = kept.sum(dim=1, keepdim=True)
    if not ids.numel() or not bool((lengths > 0).all()):
        return "no_input_ids"
    stops = kept.argmax(dim=1, keepdim=True) + lengths
    if not torch.equal(kept.bool(), (columns >= stops - lengths) & (columns < stops)):
        return "mask"
    moved, padded = ids, ids.shape[1] - stops
    if bool(padded.any()):  # roll every row to the right by the padding behind it
        moved = ids.gather(1, ((columns - padded) % ids.shape[1]).to(ids.device))
    kept = (columns >= ids.shape[1] - lengths).long()
    return Prompts(ids, moved, kept.to(ids.device), tuple(lengths[:, 0].tolist()))


def _infer_mask(ids: torch.Tensor, settings: Settings) -> torch.Tensor:
    pad, eos = settings.get("pad_token_id"), settings.get("eos_token_id")
    ends = eos if isinstance(eos, (list, tuple)) else [eos]
    return torch.ones_like(ids) if pad is None or pad in ends else ids.ne(pad).long()


class Watch:
    """Sees when the prompt is computed, when the first token is chosen, and which tokens are.

    ``generate`` calls the processors between the two, and the criteria after both: with the token
    that the next forward pass gets, while processors may edit older ones in place.
    """

    def __init__(self, clock: Callable[[], float], synchronise: Callable[[], None]) -> None:
        """Read ``clock`` after ``synchronise``: twice a request."""
        self._clock, self._synchronise = clock, synchronise
        self.computed_at = self.sampled_at = 0.0
        self._chosen: list[torch.Tensor] = []

    def note(self, tokens: torch.Tensor) -> None:
        """Keep one token of each row."""
        self._chosen.append(tokens.clone())

    def tokens(self) -> NDArray[np.int32]:
        """Return what was generated, ``[batch, tokens]``; at least one token must have been."""
        return torch.stack(self._chosen, dim=1).to("cpu", torch.int32).numpy()

    def now(self) -> float:
        """Return the time when the device has done all that it was told."""
        self._synchronise()
        return self._clock()

    def processors(self, others: list[LogitsProcessor] | None) -> LogitsProcessorList:
        """Return ``others`` and one that notes the first call."""
        return LogitsProcessorList([*(others or ()), _NoteComputed(self)])

    def criteria(self, others: list[StoppingCriteria] | None) -> StoppingCriteriaList:
        """Return ``others`` and one that notes every call and never stops."""
        return StoppingCriteriaList([*(others or ()), _NoteSampled(self)])


class _NoteComputed(LogitsProcessor):  # type: ignore[misc]
    def __init__(self, watch: Watch) -> None:
        self._watch = watch

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:  # noqa: ARG002
        self._watch.computed_at = self._watch.computed_at or self._watch.now()
        return scores


class _NoteSampled(StoppingCriteria):  # type: ignore[misc]
    def __init__(self, watch: Watch) -> None:
        self._watch = watch

    def __call__(self, input_ids: torch.Tensor, scores: object, **_: object) -> torch.Tensor:  # noqa: ARG002
        self._watch.sampled_at = self._watch.sampled_at or self._watch.now()
        self._watch.note(input_ids[:, -1])
        return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)
