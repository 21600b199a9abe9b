"""Real vLLM engines, alone and with kvstore: time to first token, and requests per second.

Needs the environment with vLLM; makes all else itself: a Llama with random weights, a ``kvstore serve``,
and engines in processes of their own, which live all the time and have their turns alternately.

``external_hit_N`` and ``engine_cache_hit_N``: the same prompt again, from the store after vLLM's own cache
was emptied, then from that cache; the limit is the same prompt cold, in the same engine and round.
``overhead_0_hit``: whole requests that never hit, beside an engine without a connector. ``multi_turn_…``:
conversations that together are more than vLLM's own cache holds, turn by turn on every engine; on a GPU
also beside vLLM's own ``OffloadingConnector``, which refuses to run on CPUs.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import click
import numpy as np
from msgspec import structs

from bench.engine import Engine, Settings, make_checkpoint
from bench.report import Row, report, row
from bench.store import daemon
from kvstore.cli.table import output_option

if TYPE_CHECKING:
    from collections.abc import Iterator

    from bench.engine import Served

NONE, OURS, OFFLOADING = "none", "kvstore", "offloading"
FIRST_TOKEN_ID, LAST_TOKEN_ID = 10, 30_000
MIN_ROUNDS = 3
OVERHEAD_TOKENS = 1000
ANSWER_TOKENS = 16
BATCH = 4
"""Requests of one round without a hit, given to the engine at once."""
MILLI = 1e3
OPTIONS: dict[str, str | float] = {"model_digest": "0" * 16}
"""Of the connector. All engines have the same weights, and the store has no other ones."""


@dataclass
class MultiTurn:
    """A load of conversations. Every turn comes when the turns of all others were answered."""

    conversations: int = 24
    turns: int = 4
    first_tokens: int = 512
    turn_tokens: int = 256
    """What a user adds to the prompt and answer before."""
    concurrency: int = 8

    @property
    def longest(self) -> int:
        """Tokens of a conversation at its end."""
        return self.first_tokens + (self.turns - 1) * self.turn_tokens + self.turns * ANSWER_TOKENS


@dataclass
class _Side:
    """What one engine did of a load."""

    prompts: list[list[int]]
    seconds: float = 0.0
    ttfts_ms: list[float] = field(default_factory=list)
    num_tokens: int = 0
    num_cached: int = 0

    def add(self, served: Served, order: list[int]) -> None:
        """Count the answers to the prompts ``order``, and append them to these."""
        self.seconds += served.seconds
        for index, answer in zip(order, served.answers, strict=True):
            self.ttfts_ms.append(answer.ttft_s * MILLI)
            self.num_tokens += len(self.prompts[index])
            self.num_cached += answer.cached_tokens
            self.prompts[index] = self.prompts[index] + answer.tokens

    @property
    def rate(self) -> float:
        """Requests per second."""
        return len(self.ttfts_ms) / self.seconds


class Bench:
    """Engines side by side: with kvstore, without a connector, on a GPU with vLLM's own."""

    def __init__(self, engines: dict[str, Engine], block_tokens: int, seconds: float) -> None:
        """Measure each case for so many seconds, but at least three rounds."""
        self.engines, self.block_tokens, self.seconds = engines, block_tokens, seconds
        self._rng = np.random.default_rng(0)

    def prompt(self, num_tokens: int) -> list[int]:
        """Random token ids that nobody has seen."""
        found: list[int] = self._rng.integers(FIRST_TOKEN_ID, LAST_TOKEN_ID, num_tokens).tolist()
        return found

    def rounds(self, seconds: float) -> Iterator[int]:
        """Number the rounds until the time is over."""
        stop, number = time.perf_counter() + seconds, 0
        while number < MIN_ROUNDS or time.perf_counter() < stop:
            yield number
            number += 1

    def first_token_s(self, prompt: list[int], *, cached: bool) -> float:
        """Seconds to the first token; all blocks that can hit must, or none."""
        (answer,) = self.engines[OURS].ask([prompt]).answers
        expected = (len(prompt) - 1) // self.block_tokens * self.block_tokens if cached else 0
        if answer.cached_tokens != expected:
            raise click.ClickException(
                f"{answer.cached_tokens} tokens of {len(prompt)} were cached instead of {expected}"
            )
        return answer.ttft_s

    def hits(self, num_tokens: int) -> Iterator[Row]:
        """One length: cold, from the store, from vLLM's own cache; in this order every round."""
        times: list[tuple[float, float, float]] = []
        for _ in self.rounds(self.seconds):
            prompt = self.prompt(num_tokens)
            cold = self.first_token_s(prompt, cached=False)
            self.engines[OURS].forget()
            external = self.first_token_s(prompt, cached=True)
            times.append((cold, external, self.first_token_s(prompt, cached=True)))
        cold, external, own = (statistics.median(side) * MILLI for side in zip(*times, strict=True))
        name = length_name(num_tokens)
        yield row(f"external_hit_{name}", "ttft", external, "ms", cold)
        yield row(f"external_hit_{name}", "speedup", cold / external, "x")
        yield row(f"external_hit_{name}", "ttft, beside engine_cache_hit", external, "ms", own)
        yield row(f"engine_cache_hit_{name}", "ttft", own, "ms", cold)

    def overhead(self) -> Iterator[Row]:
        """Batches of requests that never hit, on both engines, which begin by turns.

        A batch's time ends with its last answer; the other engine begins when all is stored.
        """
        pairs: list[dict[str, float]] = []
        for number in self.rounds(3 * self.seconds):
            prompts = [self.prompt(OVERHEAD_TOKENS) for _ in range(BATCH)]
            names = (OURS, NONE) if number % 2 else (NONE, OURS)
            pairs.append({name: self._batch_s(name, prompts) for name in names})
        ours, none = (statistics.median(pair[name] for pair in pairs) for name in (OURS, NONE))
        ratio = statistics.median(pair[OURS] / pair[NONE] for pair in pairs)
        per_request = MILLI / BATCH
        yield Row("overhead_0_hit", "request", ours * per_request, "ms", none * per_request, ratio)

    def _batch_s(self, name: str, prompts: list[list[int]]) -> float:
        served = self.engines[name].ask(
            prompts, answer_tokens=ANSWER_TOKENS, concurrency=len(prompts)
        )
        if any(answer.cached_tokens for answer in served.answers):
            raise click.ClickException(f"prompts that nobody had seen were cached in {name!r}")
        return served.seconds

    def multi_turn(self, load: MultiTurn) -> Iterator[Row]:
        """Every engine gets the same conversations, a turn of all of them at a time."""
        openings = [self.prompt(load.first_tokens) for _ in range(load.conversations)]
        sides = {name: _Side(list(openings)) for name in self.engines}
        for engine in self.engines.values():
            engine.forget()
        for turn in range(load.turns):
            order: list[int] = self._rng.permutation(load.conversations).tolist()
            for name in list(sides)[:: -1 if turn % 2 else 1]:
                prompts = [sides[name].prompts[index] for index in order]
                sides[name].add(
                    self.engines[name].ask(
                        prompts, answer_tokens=ANSWER_TOKENS, concurrency=load.concurrency
                    ),
                    order,
                )
            for index in range(load.conversations):
                added = self.prompt(load.turn_tokens)
                for side in sides.values():
                    side.prompts[index] = side.prompts[index] + added
        for name in (NONE, OFFLOADING, OURS):
            if name in sides:
                yield from _side_rows(name, sides)

    def rows(self, lengths: list[int], load: MultiTurn) -> Iterator[Row]:
        """All cases, after a warm-up."""
        for name in self.engines:
            self._batch_s(name, [self.prompt(lengths[0])])
        for num_tokens in lengths:
            click.echo(f"prompts of {num_tokens} tokens", err=True)
            yield from self.hits(num_tokens)
        click.echo("requests that never hit", err=True)
        yield from self.overhead()
        click.echo(f"conversations, on {', '.join(self.engines)}", err=True)
        yield from self.multi_turn(load)


def _side_rows(name: str, sides: dict[str, _Side]) -> Iterator[Row]:
    """One engine's rows of the conversations; the limit is the engine without a connector."""
    case, side, none = f"multi_turn_{name}", sides[name], sides[NONE]
    limit = None if side is none else none.rate
    yield Row(case, "rate", side.rate, "requests/s", limit, limit and limit / side.rate)
    for other in (NONE, OFFLOADING):
        if name == OURS and other in sides:
            yield Row(case, f"times {other}", side.rate / sides[other].rate, "x")
    for percent in (50, 99):
        value, beside = (float(np.percentile(s.ttfts_ms, percent)) for s in (side, none))
        yield row(case, f"ttft p{percent}", value, "ms", None if side is none else beside)
    yield Row(case, "cached part of prompts", side.num_cached / side.num_tokens, "")


def length_name(num_tokens: int) -> str:
    """``8k`` for 8000 tokens; the number itself below 1000."""
    return f"{num_tokens // 1000}k" if num_tokens >= 1000 else str(num_tokens)


def choose(settings: Settings, url: str, store_bytes: int) -> dict[str, Settings]:
    """Return what each engine is made of: ``settings`` and its connector."""
    import torch

    connectors: dict[str, tuple[str, dict[str, str | float]]] = {
        NONE: ("", {}),
        OURS: ("KVStoreConnector", {"url": url, **OPTIONS}),
    }
    if torch.cuda.is_available():
        connectors[OFFLOADING] = ("OffloadingConnector", {"cpu_bytes_to_use": store_bytes})
    else:
        click.echo("OffloadingConnector is left out: it refuses to run on CPUs", err=True)
    part = 0.9 / len(connectors)
    return {
        name: structs.replace(settings, connector=connector, options=options, memory_part=part)
        for name, (connector, options) in connectors.items()
    }


def _lengths(_context: click.Context, _parameter: click.Parameter, text: str) -> list[int]:
    try:
        return sorted(int(part) for part in text.split(","))
    except ValueError:
        raise click.BadParameter(f"{text!r} is not a list of numbers such as 1000,3000") from None


@click.command()
@click.option(
    "--tokens",
    "lengths",
    default="1000,3000,8000",
    show_default=True,
    callback=_lengths,
    help="Lengths of the prompts that hit.",
)
@click.option(
    "--seconds",
    default=20.0,
    show_default=True,
    help="For each length, and thrice that for requests without a hit; three rounds at least.",
)
@click.option("--conversations", default=24, show_default=True, help="Conversations at once.")
@click.option("--model", help="A model's directory; by default a random one is made.")
@click.option("--layers", default=8, show_default=True, help="Layers of the random model.")
@click.option("--dram-gib", default=3, show_default=True, help="Memory of the store.")
@output_option
def main(
    lengths: list[int],
    seconds: float,
    conversations: int,
    model: str | None,
    layers: int,
    dram_gib: int,
    output: str,
) -> None:
    """Measure vLLM with kvstore beside vLLM alone."""
    load = MultiTurn(conversations)
    max_tokens = max(lengths[-1], load.longest, OVERHEAD_TOKENS) + ANSWER_TOKENS
    cache_tokens = max(max_tokens, load.concurrency * load.longest)
    with ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvstore-vllm-")))
        model = model or make_checkpoint(directory / f"random-{layers}-layers", layers)
        url = stack.enter_context(daemon(directory, dram_gib << 30))
        chosen = choose(Settings(model, max_tokens, cache_tokens), url, dram_gib << 30)
        click.echo(f"starting {len(chosen)} engines", err=True)
        engines = {name: stack.enter_context(closing(Engine(s))) for name, s in chosen.items()}
        ready = [engine.wait() for engine in engines.values()]
        bench = Bench(engines, ready[0].block_tokens, seconds)
        rows = list(bench.rows(lengths, load))
    facts = {"model": Path(model).name, "engine_cache_tokens": cache_tokens}
    report("vllm", rows, output, **facts, **structs.asdict(ready[0]))


if __name__ == "__main__":
    main()
