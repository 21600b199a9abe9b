"""Time to first token on a real model: cold against hits, and what a request without a hit pays.

``hit_N``: a prompt of N tokens whose last 32 are new, its blocks in dram; the limit is the same prompt
cold, in the same round, through the same engine code. ``cold_N``: that cold time beside the model alone
(plain ``model.generate``). ``overhead_0_hit``: whole requests (prompt, answer, offload) that never hit,
beside the same engine code with a store that holds nothing, and beside the model alone. The model alone
attends with its own implementation, which may be slower than ours: so both comparisons are printed.
"""

from __future__ import annotations

import statistics
import time
from typing import TYPE_CHECKING, Any, cast

import click
import numpy as np
import torch
from transformers import StoppingCriteria, StoppingCriteriaList

import kvstore
from bench.report import Row, load, model_options, report, row, torch_facts
from engine_plugin.transformers import CachedModel
from kvstore.cli.table import output_option

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from kvstore import Namespace

LENGTHS = (512, 1024, 2048, 4096, 8192)
NEW_TOKENS = 32
ANSWER_TOKENS = 16
OVERHEAD_TOKENS = 1024
LONG = 2048
MILLI = 1e3


class NoStore:
    """A store that holds nothing: what is left is the engine plug-in itself."""

    tier_names = ("dram",)
    block_tokens = 16

    def __init__(self) -> None:
        """Make the records that every call returns."""
        none = np.empty(0, np.int64)
        self._tiers, self._offsets = none.astype(np.int8), none

    def acquire(self, namespace: Namespace, tokens: object, *, may_wait: bool = False) -> Any:
        """Miss."""
        from kvstore.lease import Lease

        del tokens, may_wait
        return Lease(self, namespace, self._tiers, self._offsets, 0.0)  # type: ignore[arg-type]

    def reserve(self, namespace: Namespace, tokens: object, **_: object) -> Any:
        """Nothing to write."""
        from kvstore.lease import Reservation

        del tokens
        none = self._offsets
        return Reservation(self, namespace, self._tiers, none, 0.0, indices=none)  # type: ignore[arg-type]

    def verify(self, lease: object) -> int:
        """Nothing to verify."""
        del lease
        return 0

    def release(self, lease: object) -> None:
        """Nothing to end."""

    def prefilled(self, *_: object) -> None:
        """Nobody wants to know."""

    def commit(self, reservation: object) -> int:
        """Nothing to show."""
        del reservation
        return 0

    abort = release


class FirstToken(StoppingCriteria):  # type: ignore[misc]
    """Notes when the first token was chosen; never stops."""

    def __init__(self) -> None:
        """Wait for it."""
        self.at = 0.0

    def __call__(self, input_ids: torch.Tensor, scores: object, **_: object) -> torch.Tensor:
        """Take the time once."""
        del scores
        if not self.at:
            if input_ids.is_cuda:
                torch.cuda.synchronize()
            self.at = time.perf_counter()
        return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)


def ask(
    generate: Callable[..., torch.Tensor], prompt: torch.Tensor, answer_tokens: int = 1
) -> tuple[float, float]:
    """Generate greedily; return the seconds to the first token, and of the whole request."""
    first = FirstToken()
    start = time.perf_counter()
    generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        max_new_tokens=answer_tokens,
        min_new_tokens=answer_tokens,
        do_sample=False,
        pad_token_id=0,
        stopping_criteria=StoppingCriteriaList([first]),
    )
    return first.at - start, time.perf_counter() - start


class Bench:
    """One model three ways: through a store, through a store that holds nothing, and alone."""

    def __init__(self, model: Any, store: kvstore.Pool) -> None:
        """Wrap ``model``; every way is timed by the same hook."""
        self.model, self.store = model, store
        self.cached = CachedModel(model, store)
        self.empty = CachedModel(model, cast("kvstore.KVStore", NoStore()))
        self._rng = np.random.default_rng(0)

    def prompt(self, num_tokens: int) -> torch.Tensor:
        """Random token ids, ``[1, num_tokens]``, that nobody has seen."""
        ids = self._rng.integers(0, self.model.config.vocab_size, (1, num_tokens))
        return torch.from_numpy(ids).to(self.model.device)

    def cold_and_hit(self, prompt: torch.Tensor) -> tuple[float, float]:
        """Seconds to the first token of ``prompt``, then with its last tokens changed."""
        self.store.clear()
        cold, _ = ask(self.cached.generate, prompt)
        assert self.cached.last.hit_tokens == 0, self.cached.last
        changed = prompt.clone()
        changed[:, -NEW_TOKENS:] = self.prompt(NEW_TOKENS)
        self.store.drain()
        hit, _ = ask(self.cached.generate, changed)
        expected = (
            (prompt.shape[1] - NEW_TOKENS) // self.store.block_tokens * self.store.block_tokens
        )
        assert self.cached.last.hit_tokens == expected, self.cached.last
        return cold, hit

    def hits(self, num_tokens: int, rounds: int) -> Iterator[Row]:
        """Cold, hit, and the model alone, of one length, alternately."""
        colds, hits, plains = [], [], []
        for number in range(rounds):
            prompt = self.prompt(num_tokens)
            for side in ("store", "plain") if number % 2 else ("plain", "store"):
                if side == "plain":
                    plains.append(ask(self.model.generate, prompt)[0])
                else:
                    cold, hit = self.cold_and_hit(prompt)
                    colds.append(cold)
                    hits.append(hit)
        hit_s, cold_s, plain_s = map(statistics.median, (hits, colds, plains))
        yield row(f"hit_{num_tokens}", "time to first token", hit_s * MILLI, "ms", cold_s * MILLI)
        yield Row(f"hit_{num_tokens}", "speedup", cold_s / hit_s, "x")
        yield Row(f"hit_{num_tokens}", "speedup over plain transformers", plain_s / hit_s, "x")
        yield row(
            f"cold_{num_tokens}", "time to first token", cold_s * MILLI, "ms", plain_s * MILLI
        )

    def overhead(self, num_tokens: int, rounds: int) -> Iterator[Row]:
        """Whole requests that never hit, in rotating order."""
        sides = [self.cached.generate, self.empty.generate, self.model.generate]
        times: list[list[float]] = [[], [], []]
        for number in range(rounds):
            prompt = self.prompt(num_tokens)
            for index in np.roll(range(3), number).tolist():
                times[index].append(ask(sides[index], prompt, ANSWER_TOKENS)[1])
        ours = statistics.median(times[0])
        for index, metric in ((1, "request"), (2, "request, beside plain transformers")):
            ratio = statistics.median(a / b for a, b in zip(times[0], times[index], strict=True))
            limit = statistics.median(times[index])
            yield Row("overhead_0_hit", metric, ours * MILLI, "ms", limit * MILLI, ratio)

    def rows(self, lengths: list[int], rounds: int, pairs: int) -> Iterator[Row]:
        """All cases, shortest first, after a warm-up."""
        for side in (self.cached, self.empty, self.model):
            ask(side.generate, self.prompt(lengths[0]), 2)
        for num_tokens in lengths:
            yield from self.hits(num_tokens, rounds if num_tokens <= LONG else max(3, rounds // 2))
        yield from self.overhead(OVERHEAD_TOKENS, pairs)


@click.command()
@model_options
@click.option(
    "--rounds",
    default=5,
    show_default=True,
    help="Rounds up to 2048 tokens; half as many, but at least 3, for longer ones.",
)
@click.option("--pairs", default=15, show_default=True, help="Rounds of requests without a hit.")
@click.option(
    "--threads",
    default=0,
    help="Threads of torch; all cores by default. One disturbs least on a busy machine.",
)
@click.option("--longest", default=LENGTHS[-1], show_default=True, help="Longest prompt.")
@output_option
def main(
    path: str | None, dtype: str, rounds: int, pairs: int, threads: int, longest: int, output: str
) -> None:
    """Measure time to first token."""
    torch.set_num_threads(threads or torch.get_num_threads())
    model = load(path, dtype)
    lengths = [length for length in LENGTHS if length <= longest]
    with kvstore.open(dram="1536MiB") as store:
        bench = Bench(model, store)
        report("ttft", bench.rows(lengths, rounds, pairs), output, **torch_facts(model))


if __name__ == "__main__":
    main()
