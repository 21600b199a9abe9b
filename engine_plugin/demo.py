"""``kvstore demo``: a real model answers questions about one long document, cold and from the store.

For each length of the document, one question is asked with an empty store (cold), another one when
the document's blocks are in the gpu tier, and a third one when they are in the dram tier only. Every
answer is compared with the one of the model alone, ``model.generate`` without kvstore.
"""

from __future__ import annotations

import sys
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import torch

import kvstore
from engine_plugin.models import load_model
from engine_plugin.transformers import CachedModel
from kvstore.cli.table import output_option, print_json, render

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from kvstore import Pool

PATHS = ("cold", "gpu", "dram")
QUESTIONS = (
    "Which good does the warehouse in Norden keep?",
    "Who is the keeper of the warehouse in Lindau?",
    "How many crates are stored in Fehmarn?",
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


def measure(demo: Demo, cached: CachedModel, store: Pool, num_tokens: int) -> Iterator[DemoRow]:
    """Ask about a document of ``num_tokens`` on every path."""
    document = demo.document(num_tokens)
    store.clear()
    for path, question in zip(PATHS, QUESTIONS, strict=True):
        prompt = demo.prompt(document, question)
        store.drain()
        if path == "dram" and (namespace := cached.namespace()) is not None:
            store.demote(namespace, prompt[0], "gpu")
        answer = demo.answer(cached.generate, prompt)
        stats = cached.last
        alone = demo.answer(demo.model.generate, prompt)
        yield DemoRow(
            path=path,
            prompt_tokens=stats.prompt_tokens,
            hit_tokens=stats.hit_tokens,
            ttft_ms=stats.ttft_s * 1e3,
            queue_ms=stats.queue_s * 1e3,
            network_ms=stats.network_s * 1e3,
            prefill_ms=stats.prefill_s * 1e3,
            sample_ms=stats.sample_s * 1e3,
            same_text=answer == alone,
            lookup_ms=stats.lookup_s * 1e3,
            load_ms=stats.load_s * 1e3,
            question=question,
            answer=answer,
        )


def table(rows: Sequence[DemoRow]) -> str:
    """Return the rows for people, and what was asked and answered."""
    headers = [
        "path",
        "prompt",
        "hit",
        "TTFT ms",
        "queue",
        "network",
        "prefill",
        "(load)",
        "sample",
    ]
    lines: list[list[str | int]] = []
    base = 0.0
    for row in rows:
        base = row.ttft_ms if row.path == "cold" else base
        parts = (
            row.ttft_ms,
            row.queue_ms,
            row.network_ms,
            row.prefill_ms,
            row.load_ms,
            row.sample_ms,
        )
        numbers = [f"{part:.1f}" for part in parts]
        same = "yes" if row.same_text else "NO"
        lines.append(
            [
                row.path,
                row.prompt_tokens,
                row.hit_tokens,
                *numbers,
                f"{base / row.ttft_ms:.1f}x",
                same,
            ]
        )
    text = render([*headers, "faster", "same text"], lines)
    answers = [f"  {row.question}\n    {row.answer}" for row in rows[-len(PATHS) :]]
    return "\n".join([text, "", "Asked about the longest document:", *answers])


@contextmanager
def progress(length: int, label: str) -> Iterator[Callable[[str], None]]:
    """Show a bar on a terminal and a line a step elsewhere, on standard error.

    Yields a function that is told what comes next; every call but the first ends a step.
    """
    if not sys.stderr.isatty():
        yield lambda text: click.echo(text, err=True)
        return
    bar: Any
    with click.progressbar(
        length=length, label=label, file=sys.stderr, item_show_func=lambda text: str(text or "")
    ) as bar:
        yield lambda text: bar.update(1, text)


@click.command()
@click.option(
    "--model", "path", help="A model directory or GGUF file; by default SmolLM2-135M-Instruct."
)
@click.option("--tokens", default="1024,4096", show_default=True, help="Lengths of the prompts.")
@click.option("--answer-tokens", default=24, show_default=True, help="Most tokens of an answer.")
@click.option(
    "--dtype", type=click.Choice(["float32", "bfloat16"]), default="float32", show_default=True
)
@output_option
def demo(path: str | None, tokens: str, answer_tokens: int, dtype: str, output: str) -> None:
    """Show what a hit saves: one long document, several questions, on a real model."""
    lengths = parse_lengths(tokens)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    with progress(2 + len(PATHS) * len(lengths), "kvstore demo") as step:
        model, tokenizer, real = load_model(path, getattr(torch, dtype), on_progress=step)
        model.to(device)
        runner = Demo(model, tokenizer, answer_tokens)
        longest = longest_bytes(model, max(lengths) + answer_tokens)
        step(f"providing {2 * longest >> 20} MiB for blocks")
        rows: list[DemoRow] = []
        with (
            kvstore.open(dram=longest, gpu=longest) as store,
            CachedModel(model, store) as cached,
        ):
            for length in lengths:
                step(f"prompts of {length} tokens")
                for row in measure(runner, cached, store, length):
                    rows.append(row)
                    step(f"{row.path}: first token after {row.ttft_ms:.0f} ms")
    if output == "json":
        print_json(document(model, rows, real=real))
        return
    if not real:
        click.echo("This is a random model: its answers mean nothing, its times do.\n")
    click.echo(table(rows))


def parse_lengths(text: str) -> list[int]:
    """Return the prompt lengths of ``--tokens``, ascending."""
    try:
        lengths = sorted({int(part) for part in text.split(",")})
    except ValueError:
        raise click.BadParameter(f"{text!r} is not a list of numbers such as 1024,4096") from None
    if lengths[0] < 256:
        raise click.BadParameter(f"{lengths[0]} tokens are too few: give at least 256")
    return lengths


def longest_bytes(model: PreTrainedModel, num_tokens: int) -> int:
    """Return room for the KV of a document of ``num_tokens`` with three questions and answers."""
    config: Any = model.config
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    token_bytes = config.num_hidden_layers * 2 * heads * width * model.dtype.itemsize
    return int((num_tokens + 1024) * token_bytes)


def document(model: PreTrainedModel, rows: Sequence[DemoRow], *, real: bool) -> dict[str, Any]:
    """Return what ``--output json`` prints."""
    return {
        "model": Path(model.config.name_or_path).name if real else "random",
        "real_model": real,
        "device": str(model.device),
        "dtype": str(model.dtype).removeprefix("torch."),
        "rows": [asdict(row) for row in rows],
    }
