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
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from kvstore import Pool

PATHS = ("cold", "gpu", "dram")
SHORTEST = 256
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


def measure(
    demo: Demo, cached: CachedModel, store: Pool, num_tokens: int, tell: Callable[[str], None]
) -> Iterator[DemoRow]:
    """Ask about a document of ``num_tokens`` on every path; ``tell`` hears what is done next."""
    text = demo.document(num_tokens)
    store.clear()
    for path, question in zip(PATHS, QUESTIONS, strict=True):
        prompt = demo.prompt(text, question)
        store.drain()
        if path == "dram" and (namespace := cached.namespace()) is not None:
            store.demote(namespace, prompt[0], "gpu")
        tell(f"{prompt.shape[1]} tokens, {path}")
        answer = demo.answer(cached.generate, prompt)
        stats = cached.last
        tell(f"{prompt.shape[1]} tokens, the model alone")
        alone = demo.answer(demo.model.generate, prompt)
        yield DemoRow(
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


def table(rows: Sequence[DemoRow]) -> str:
    """Return the rows for people, and what was asked and answered."""
    headers = ["path", "prompt", "hit", "TTFT", "load", "compute", "than cold", "same text"]
    lines: list[list[str | int]] = []
    base = 0.0
    for row in rows:
        base = row.ttft_ms if row.path == "cold" else base
        times = (row.ttft_ms, row.load_ms, row.ttft_ms - row.load_ms)
        lines.append(
            [
                row.path,
                row.prompt_tokens,
                row.hit_tokens,
                *(f"{time:.1f} ms" for time in times),
                "" if row.path == "cold" else f"{base / row.ttft_ms:.1f}x faster",
                "yes" if row.same_text else "NO",
            ]
        )
    answers = [
        f"  {row.question}\n    {' '.join(row.answer.split())} …" for row in rows[-len(PATHS) :]
    ]
    return "\n".join([render(headers, lines), LEGEND, *answers])


LEGEND = """
path: where the tokens of the document came from; hit: tokens that were not computed;
TTFT: time to first token, of which load copies known blocks and compute is all the rest;
same text: the answer equals the one of the model without kvstore.

Asked about the longest document (a small model is often wrong; what counts is the same text):"""


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


def parse_lengths(context: click.Context, parameter: click.Parameter, text: str) -> list[int]:
    """Return the prompt lengths of ``--tokens``, ascending."""
    del context, parameter
    try:
        lengths = sorted({int(part) for part in text.split(",")})
    except ValueError:
        raise click.BadParameter(f"{text!r} is not a list of numbers such as 1024,4096") from None
    if lengths[0] < SHORTEST:
        raise click.BadParameter(f"{lengths[0]} tokens are too few: give at least {SHORTEST}")
    return lengths


@click.command()
@click.option(
    "--model",
    "path",
    type=click.Path(exists=True),
    help="A model directory or GGUF file; by default SmolLM2-135M-Instruct.",
)
@click.option(
    "--tokens",
    "lengths",
    default="1024,4096",
    show_default=True,
    callback=parse_lengths,
    help=f"Longest prompts, comma-separated, each at least {SHORTEST} tokens.",
)
@click.option(
    "--answer-tokens",
    type=click.IntRange(min=1),
    default=24,
    show_default=True,
    help="Most tokens of an answer.",
)
@click.option(
    "--dtype", type=click.Choice(["float32", "bfloat16"]), default="float32", show_default=True
)
@output_option
def demo(path: str | None, lengths: list[int], answer_tokens: int, dtype: str, output: str) -> None:
    """Show what a hit saves: one long document, several questions, on a real model."""
    with progress(3 + 2 * len(PATHS) * len(lengths), "kvstore demo") as step:
        model, tokenizer, real = load_model(path, getattr(torch, dtype), on_progress=step)
        check_context(model, lengths[-1] + answer_tokens)
        model.to("cuda" if torch.cuda.is_available() else "cpu")
        runner = Demo(model, tokenizer, answer_tokens)
        longest = longest_bytes(model, lengths[-1] + answer_tokens)
        step(f"providing {2 * longest >> 20} MiB for blocks")
        with (
            kvstore.open(dram=longest, gpu=longest) as store,
            CachedModel(model, store) as cached,
        ):
            runner.answer(cached.generate, runner.prompt("", QUESTIONS[0]))  # warm up
            rows = [
                row for length in lengths for row in measure(runner, cached, store, length, step)
            ]
    if output == "json":
        print_json(document(model, rows) | {"real_model": real})
        return
    facts = document(model, rows)
    click.echo(f"{facts['model']}, {facts['dtype']}, on {facts['device']}")
    if model.device.type == "cpu":
        click.echo("Without CUDA the gpu tier is host memory too: expect gpu and dram to be alike.")
    click.echo("" if real else "A random model: its answers mean nothing, its times do.\n")
    click.echo(table(rows))


def check_context(model: PreTrainedModel, num_tokens: int) -> None:
    """Refuse prompts that the model was not made for, before memory is taken for them."""
    longest = getattr(model.config, "max_position_embeddings", None)
    if longest is not None and num_tokens > longest:
        raise click.BadParameter(
            f"{num_tokens} tokens with the answer are more than the {longest} of the model",
            param_hint="--tokens",
        )


def longest_bytes(model: PreTrainedModel, num_tokens: int) -> int:
    """Return room for the KV of a document of ``num_tokens`` with three questions and answers."""
    config: Any = model.config
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    token_bytes = config.num_hidden_layers * 2 * heads * width * model.dtype.itemsize
    return int((num_tokens + 1024) * token_bytes)


def document(model: PreTrainedModel, rows: Sequence[DemoRow]) -> dict[str, Any]:
    """Return what ``--output json`` prints."""
    name = Path(model.config.name_or_path).name.partition(".")[0]
    return {
        "model": name or "random",
        "real_model": bool(name),
        "device": str(model.device),
        "dtype": str(model.dtype).removeprefix("torch."),
        "rows": [asdict(row) for row in rows],
    }
