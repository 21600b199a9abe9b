"""``kvstore demo``: a real model answers questions about one long document, cold and from the store.

For each length of the document, one question is asked with an empty store (cold), another one when
the document's blocks are in the gpu tier, a third one when they are in the dram tier, and a fourth one when
they are on disk only; with ``--daemon``, the second one is asked by another process
(:mod:`engine_plugin.demo_daemon`). Every answer is compared with the one of the model alone,
``model.generate`` without kvstore.
"""

from __future__ import annotations

import sys
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import click
import torch

import kvstore
from engine_plugin import demo_daemon
from engine_plugin.models import load_model
from engine_plugin.questions import QUESTIONS, Demo, ask
from engine_plugin.transformers import CachedModel
from kvstore.cli.table import output_option, print_json, render

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from transformers import PreTrainedModel

    from engine_plugin.questions import DemoRow, Tell

PATHS = {"cold": (), "gpu": (), "dram": ("gpu",), "disk": ("gpu", "dram")}
"""Where the document comes from, and the tiers that let go of it before."""
SCRATCH = "/var/tmp"
"""On a disk, where ``/tmp`` often is memory."""
SHORTEST = 256
DISK_LEAST_BYTES = 64 << 20
"""What a disk tier takes beside blocks, and some."""


def measure(
    demo: Demo, capacity_bytes: int, lengths: Sequence[int], tell: Tell
) -> Iterator[DemoRow]:
    """Ask about a document of each length on every path; ``tell`` hears what is done next."""
    tell(f"providing {2 * capacity_bytes >> 20} MiB of memory for blocks, and as much of a disk")
    with (
        TemporaryDirectory(prefix="kvstore-demo-", dir=SCRATCH) as directory,
        kvstore.open(
            gpu=capacity_bytes,
            dram=capacity_bytes,
            disk=2 * capacity_bytes + DISK_LEAST_BYTES,
            disk_path=directory,
            disk_reserve=0,
            disk_admission="always",
            disk_bytes_per_s=0,
        ) as store,
        CachedModel(demo.model, store) as cached,
    ):
        demo.answer(cached.generate, demo.prompt("", QUESTIONS[0]))  # warm up
        for length in lengths:
            document = demo.document(length)
            store.clear()
            for left, question in zip(PATHS.values(), QUESTIONS, strict=True):
                store.drain()
                for tier in left:
                    if (namespace := cached.namespace()) is not None:
                        store.demote(namespace, demo.prompt(document, question)[0], tier)
                yield ask(demo, cached, document, question, tell)


def table(rows: Sequence[DemoRow], of_a_length: int) -> str:
    """Return the rows for people, and what was asked and answered in the last ``of_a_length``."""
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
        f"  {row.question}\n    {' '.join(row.answer.split())} …" for row in rows[-of_a_length:]
    ]
    return "\n".join([render(headers, lines), LEGEND, *answers])


LEGEND = """
path: where the tokens of the document came from; hit: tokens that were not computed;
TTFT: time to first token, of which load copies known blocks and compute is all the rest;
same text: the answer equals the one of the model without kvstore.

Asked about the longest document (a small model is often wrong; what counts is the same text):"""


@contextmanager
def progress(length: int, label: str) -> Iterator[Tell]:
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
@click.option("--daemon", is_flag=True, help="Two processes that share a daemon, started for them.")
@click.option(
    "--socket",
    type=click.Path(path_type=Path),
    help="With --daemon: use the daemon that listens here, instead of starting one.",
)
@output_option
def demo(
    path: str | None,
    lengths: list[int],
    answer_tokens: int,
    dtype: str,
    socket: Path | None,
    output: str,
    *,
    daemon: bool,
) -> None:
    """Show what a hit saves: one long document, several questions, on a real model."""
    if socket is not None and not daemon:
        raise click.UsageError("--socket names a daemon: give --daemon as well")
    with progress(5 + 2 * len(PATHS) * len(lengths), "kvstore demo") as step:
        model, tokenizer, real = load_model(path, getattr(torch, dtype), on_progress=step)
        check_context(model, lengths[-1] + answer_tokens)
        model.to("cuda" if torch.cuda.is_available() else "cpu")
        runner = Demo(model, tokenizer, answer_tokens)
        longest = longest_bytes(model, lengths[-1] + answer_tokens)
        if daemon:
            given = {"path": path, "dtype": dtype}
            rows = list(demo_daemon.measure(runner, longest, lengths, step, socket, given))
        else:
            rows = list(measure(runner, longest, lengths, step))
    facts = document(model, rows) | {"real_model": real}
    if output == "json":
        print_json(facts)
        return
    click.echo(f"{facts['model']}, {facts['dtype']}, on {facts['device']}")
    if daemon:
        click.echo(
            "One process has stored the document in a daemon (cold), another one found it (dram)."
        )
    elif model.device.type == "cpu":
        click.echo("Without CUDA the gpu tier is host memory too: expect gpu and dram to be alike.")
        click.echo(
            "What was just written to disk is read past the page cache where direct I/O works."
        )
    click.echo("" if real else "A random model: its answers mean nothing, its times do.\n")
    click.echo(table(rows, len(rows) // len(lengths)))


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
