"""Does the cache ever change what a model says? Random conversations, with and without it.

Conversations share heads, branch, come back, and some are asked as a batch, over a pool of a few
blocks (everything is evicted and moved all the time) and over one that holds them all. In float32 every
greedy token must be equal. In bfloat16 equality is not to be had, since the model alone gives other logits
when the same prompt is computed in pieces; so the difference that a hit makes is compared with that one.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import click
import numpy as np
import torch

import kvstore
from bench.report import Row, load, model_options, report, row, torch_facts
from engine_plugin.transformers import CachedModel
from kvstore.cli.table import output_option

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from kvstore import Pool

HEADS = 5
TURNS = 3
ANSWER_TOKENS = 6
LONGEST = 300
BRANCH = 0.3
BATCH = 0.15
NEW_TOKENS = 40
NOISE_BOUND = 2.0
"""A hit may change logits by at most this much of what computing in pieces changes."""

MUST_BE_ZERO = ("answers that differ", "other argmax in spite of a clear lead")


@dataclass
class Tally:
    """What was seen."""

    conversations: int = 0
    turns: int = 0
    different: int = 0
    prompt_tokens: int = 0
    hit_tokens: int = 0
    evicted_blocks: int = 0


def generate(model: Any, prompts: list[list[int]]) -> list[list[int]]:
    """Greedy answers of ``model`` (cached or not) to ``prompts``, as one left-padded batch."""
    width = max(map(len, prompts))
    ids = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    output = model.generate(
        ids.to(model.device),
        attention_mask=mask.to(model.device),
        max_new_tokens=ANSWER_TOKENS,
        min_new_tokens=ANSWER_TOKENS,
        do_sample=False,
        pad_token_id=0,
    )
    return [line[width:] for line in output.tolist()]


class Cached:
    """A cached model with the attributes that :func:`generate` needs."""

    def __init__(self, model: Any, store: Pool) -> None:
        """Wrap ``model`` over ``store``."""
        self.cached = CachedModel(model, store, on_failure="raise", verify="always")
        self.device = model.device

    def generate(self, ids: torch.Tensor, **arguments: Any) -> torch.Tensor:
        """Generate through the cache."""
        output: torch.Tensor = self.cached.generate(ids, **arguments)
        return output


def converse(model: Any, store: Pool, conversations: int, seed: int) -> Tally:
    """Hold random conversations; count answers that differ from the model's own."""
    rng = np.random.default_rng(seed)
    vocabulary = model.config.vocab_size
    heads = [words(rng, vocabulary, 16, 100) for _ in range(HEADS)]
    tally, history = Tally(), list(heads)
    cached = Cached(model, store)
    for _ in range(conversations):
        tally.conversations += 1
        said = heads[rng.integers(HEADS)]
        for _ in range(TURNS):
            if rng.random() < BRANCH:
                said = history[rng.integers(len(history))]
            asked = [(said + words(rng, vocabulary, 1, 40))[:LONGEST]]
            if rng.random() < BATCH:
                other = heads[rng.integers(HEADS)]
                asked.append(other + words(rng, vocabulary, 1, 60))
            answers = generate(cached, asked)
            seen = cached.cached.last
            tally.prompt_tokens += seen.prompt_tokens
            tally.hit_tokens += seen.hit_tokens
            tally.turns += len(asked)
            for prompt, answer in zip(asked, answers, strict=True):
                tally.different += answer != generate(model, [prompt])[0]
            said = asked[0] + answers[0]
            history.append(said)
            del history[: len(history) - 60]
    store.drain()
    counts = store.stats().counts
    tally.evicted_blocks = sum(
        value
        for key, value in counts.items()
        if key[0] == "evicted_blocks" and key[2] == "capacity"
    )
    return tally


def words(rng: np.random.Generator, vocabulary: int, least: int, most: int) -> list[int]:
    """Random tokens."""
    return rng.integers(1, vocabulary, int(rng.integers(least, most))).tolist()  # type: ignore[no-any-return]


POOLS = {"tiny": (8, 20), "roomy": (64, 2600)}
"""Blocks of the gpu and dram tier: a pool that evicts all the time, and one that holds everything."""


def open_pool(name: str, layout: Any, device: str) -> Pool:
    """Open one of :data:`POOLS` for blocks of ``layout``."""
    block = -(-layout.block_bytes // 4096) * 4096
    gpu, dram = POOLS[name]
    return kvstore.open(gpu=gpu * block, dram=dram * block, device=device)


def same_tokens(model: Any, conversations: int, names: Sequence[str], seed: int) -> Iterator[Row]:
    """Greedy answers that differ, in the pools of these names."""
    with kvstore.open(dram="1MiB") as probe, CachedModel(model, probe) as cached:
        layout = cached.layout
    for name in names:
        with open_pool(name, layout, model.device.type) as store:
            tally = converse(model, store, conversations, seed)
        yield Row(f"conversations_{name}", "held", tally.conversations, "conversations")
        yield Row(f"conversations_{name}", "answers", tally.turns, "answers")
        yield Row(f"conversations_{name}", "answers that differ", tally.different, "answers")
        share = tally.hit_tokens / tally.prompt_tokens
        yield Row(f"conversations_{name}", "tokens from the cache", share, "of 1")
        yield Row(f"conversations_{name}", "blocks evicted", tally.evicted_blocks, "blocks")


def logit_noise(model: Any, prompts: int) -> Iterator[Row]:
    """Largest difference of last-token logits: hit against cold; beside pieces against one piece."""
    rng = np.random.default_rng(2)
    hits, pieces, wrong = [], [], 0
    with kvstore.open(dram="512MiB") as store:
        for _ in range(prompts):
            tokens = words(rng, model.config.vocab_size, 100, 700)
            with CachedModel(model, store) as cached:
                store.clear()
                cold = cached.prefill(tokens).logits.float()
                store.clear()
                cached.prefill(tokens[:-NEW_TOKENS])
                hit = cached.prefill(tokens).logits.float()
                assert 0 < cached.last.hit_tokens <= len(tokens) - NEW_TOKENS
                store.clear()
            with CachedModel(model, store, chunk_tokens=64) as chunked:
                piecewise = chunked.prefill(tokens).logits.float()
                store.clear()
            hits.append((hit - cold).abs().max().item())
            pieces.append((piecewise - cold).abs().max().item())
            best = cold.topk(2).values[0]
            clear_lead = (best[0] - best[1]).item() > 2 * pieces[-1]
            wrong += bool(clear_lead and hit.argmax() != cold.argmax())
    yield row("logits", "largest difference, hit and cold", max(hits), "logit", max(pieces))
    yield row(
        "logits",
        "median difference, hit and cold",
        statistics.median(hits),
        "logit",
        statistics.median(pieces),
    )
    yield Row("logits", "other argmax in spite of a clear lead", wrong, "prompts")


@click.command()
@model_options
@click.option(
    "--conversations", default=200, show_default=True, help="Conversations of three turns."
)
@click.option("--pool", multiple=True, type=click.Choice(list(POOLS)), help="By default both.")
@click.option("--seed", default=1, show_default=True, help="Which conversations.")
@click.option("--prompts", default=20, show_default=True, help="Prompts whose logits are compared.")
@output_option
def main(
    path: str | None,
    dtype: str,
    conversations: int,
    prompts: int,
    pool: tuple[str, ...],
    seed: int,
    output: str,
) -> None:
    """Compare a model's answers with and without the cache."""
    model = load(path, dtype)
    rows = list(logit_noise(model, prompts))
    if dtype == "float32":
        rows += same_tokens(model, conversations, pool or list(POOLS), seed)
    report("conformance", rows, output, **torch_facts(model))
    if broken := [row for row in rows if row.metric in MUST_BE_ZERO and row.value]:
        raise click.ClickException(f"the cache changes what the model says: {broken}")
    if (noise := rows[0]).value > max(NOISE_BOUND * (noise.limit or 0), 1e-3):
        raise click.ClickException(f"a hit changes logits more than computing in pieces: {noise}")


if __name__ == "__main__":
    main()
