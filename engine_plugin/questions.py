"""Questions about a long document, asked with and without kvstore: what the demos show."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from engine_plugin.transformers import CachedModel

    Tell = Callable[[str], None]
    """Hears what is done next."""

QUESTIONS = (
    "Which good does the warehouse in Norden keep?",
    "Who is the keeper of the warehouse in Lindau?",
    "How many crates are stored in Fehmarn?",
    "Who is the keeper of the warehouse in Husum?",
)
PLACES = ("Norden", "Lindau", "Fehmarn", "Aurich", "Husum", "Meldorf", "Plau", "Templin", "Zeitz")
KEEPERS = (
    "Ada",
    "Bruno",
    "Clara",
    "Dora",
    "Emil",
    "Frieda",
    "Georg",
    "Hanna",
    "Ida",
    "Jakob",
    "Karl",
)
GOODS = ("barley", "copper wire", "dried pears", "glass beads", "linen", "paper", "salt", "walnuts")


@dataclass(frozen=True)
class DemoRow:
    """One answer, with the parts of its time to first token.

    ``prefill_ms`` includes ``lookup_ms`` and ``load_ms``. ``network_ms`` is zero in one process.
    """

    path: str
    prompt_tokens: int
    hit_tokens: int
    ttft_ms: float
    queue_ms: float
    network_ms: float
    prefill_ms: float
    sample_ms: float
    same_text: bool
    lookup_ms: float
    load_ms: float
    question: str
    answer: str


@dataclass(frozen=True)
class Demo:
    """Model, tokenizer and the questions to ask about documents of some length."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    answer_tokens: int

    def prompt(self, document: str, question: str) -> torch.Tensor:
        """Token ids ``[1, tokens]`` of a chat about ``document``."""
        messages = [
            {"role": "system", "content": f"Answer from this list.\n{document}"},
            {"role": "user", "content": question},
        ]
        text = self.tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=True
        )
        ids: torch.Tensor = self.tokenizer(text, return_tensors="pt").input_ids
        return ids.to(self.model.device)

    def document(self, num_tokens: int) -> str:
        """Lines of a stock list such that the longest prompt has at most ``num_tokens``."""
        entries = [entry(number) for number in range(num_tokens // 8)]
        low, high = 1, len(entries)
        while low < high:
            middle = (low + high + 1) // 2
            text = "\n".join(entries[:middle])
            fits = max(self.prompt(text, question).shape[1] for question in QUESTIONS) <= num_tokens
            low, high = (middle, high) if fits else (low, middle - 1)
        return "\n".join(entries[:low])

    def answer(self, generate: Callable[..., torch.Tensor], prompt: torch.Tensor) -> str:
        """Greedy answer of ``generate`` to ``prompt``."""
        output = generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=self.answer_tokens,
            do_sample=False,
            pad_token_id=self.tokenizer.eos_token_id,
        )
        text: str = self.tokenizer.decode(output[0, prompt.shape[1] :], skip_special_tokens=True)
        return text.strip()


def entry(number: int) -> str:
    """One line of the stock list: all of them differ."""
    place = PLACES[number % len(PLACES)] + (
        f" {number // len(PLACES)}" if number >= len(PLACES) else ""
    )
    good, keeper = GOODS[number * 5 % len(GOODS)], KEEPERS[number * 7 % len(KEEPERS)]
    return f"{place}: {17 + number * 37 % 419} crates of {good}, keeper {keeper}."


def ask(demo: Demo, cached: CachedModel, document: str, question: str, tell: Tell) -> DemoRow:
    """Ask ``question`` about ``document``, and ask the model alone as well."""
    prompt = demo.prompt(document, question)
    tell(f"{prompt.shape[1]} tokens, with kvstore")
    answer = demo.answer(cached.generate, prompt)
    stats = cached.last
    tell(f"{prompt.shape[1]} tokens, the model alone")
    alone = demo.answer(demo.model.generate, prompt)
    return DemoRow(
        path=served_by(stats.hit_tokens_by_tier),
        prompt_tokens=stats.prompt_tokens,
        hit_tokens=stats.hit_tokens,
        ttft_ms=milliseconds(stats.ttft_s),
        queue_ms=milliseconds(stats.queue_s),
        network_ms=milliseconds(stats.network_s),
        prefill_ms=milliseconds(stats.prefill_s),
        sample_ms=milliseconds(stats.sample_s),
        same_text=answer == alone,
        lookup_ms=milliseconds(stats.lookup_s),
        load_ms=milliseconds(stats.load_s),
        question=question,
        answer=answer,
    )


def served_by(hit_tokens_by_tier: Mapping[str, int]) -> str:
    """Name of the tier that most tokens came from; ``cold`` when none did."""
    return max(hit_tokens_by_tier, key=lambda tier: hit_tokens_by_tier[tier], default="cold")


def milliseconds(seconds: float) -> float:
    """Return milliseconds to three decimals."""
    return round(seconds * 1e3, 3)
