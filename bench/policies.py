"""Hit rates of the eviction policies on recorded traffic (:mod:`bench.traces`), beside an infinite cache.

The requests go through the radix tree and the policies of the product, with a number for each block in
place of its bytes. Each looks up its prompt, then makes room and stores it, as with a pool; what it hit
is in use meanwhile. Requests do not overlap in time. A hit of all tokens of a prompt counts whole, though
an engine computes the last one again.

* ``hit_tokens``: of all prompt tokens, those that were there.
* ``saved_prefill``: of all computing of prompts, what hits saved, if attention doubles the cost of a token
  24K tokens into a prompt.
* ``times_lru``: hit tokens, relative to LRU in the same cache.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from functools import partial as partial_of
from pathlib import Path
from typing import TYPE_CHECKING

import click
import numpy as np

from bench.report import Row, report
from bench.traces import Request, Trace, read_traces
from kvstore.assembly import POLICIES
from kvstore.cli.table import output_option
from radix import CostAware, EvictionOrder, Node, RadixTree

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

ID_BYTES = 8
NO_LIMIT = 1 << 62
DOUBLING_TOKENS = 24576


class Cache:
    """A tree with at most ``capacity`` blocks, which leave as ``order`` says."""

    def __init__(self, order: EvictionOrder, capacity: int) -> None:
        """Start empty."""
        self.tree = RadixTree(ID_BYTES, order)
        self._capacity = capacity
        self._next_id = 0

    def use(self, request: Request) -> int:
        """Look up ``request`` and store what is missing; return the blocks that were there."""
        tree, key = self.tree, request.ids.tobytes()
        tree.touch(tree.match(key))
        found = tree.match(key)
        known = found.num_blocks
        room = self._make_room(len(request.ids) - known, found.nodes)
        ids = np.arange(self._next_id, self._next_id + room, dtype=np.int32)
        self._next_id += room
        tree.insert(key[: (known + room) * ID_BYTES], ids, found)
        return known

    def _make_room(self, wanted: int, in_use: Sequence[Node]) -> int:
        """Evict until ``wanted`` blocks fit, or only what is ``in_use`` is left; return how many fit."""
        tree, order = self.tree, self.tree.order
        most = max(0, self._capacity - wanted)
        skipped = 0
        while tree.num_blocks > most and skipped <= len(in_use):
            victim = order.victim()
            assert victim is not None
            if victim in in_use:
                order.postpone(victim)
                skipped += 1
            else:
                tree.trim(victim, max(0, len(victim.blocks) - (tree.num_blocks - most)))
        return min(wanted, self._capacity - tree.num_blocks)


@dataclass
class Tally:
    """What a replay hit."""

    blocks: int = 0
    tokens: int = 0
    hit_blocks: int = 0
    hit_tokens: int = 0
    cost: float = 0.0
    """Of computing all tokens, where a prompt's first one costs 1."""
    saved_cost: float = 0.0

    def rates(self) -> dict[str, float]:
        """Metrics in percent."""
        return {
            "hit_tokens": 100 * self.hit_tokens / self.tokens,
            "saved_prefill": 100 * self.saved_cost / self.cost,
        }


def replay(trace: Trace, order: EvictionOrder, capacity: int = NO_LIMIT) -> Tally:
    """Send ``trace`` through a cache of ``capacity`` blocks."""
    cache, tally = Cache(order, capacity), Tally()
    for request in trace.requests:
        hits = cache.use(request)
        hit_tokens = min(hits * trace.block_tokens, request.num_tokens)
        tally.blocks += len(request.ids)
        tally.tokens += request.num_tokens
        tally.hit_blocks += hits
        tally.hit_tokens += hit_tokens
        tally.cost += prefill_cost(request.num_tokens)
        tally.saved_cost += prefill_cost(hit_tokens)
    return tally


def prefill_cost(num_tokens: int) -> float:
    """Cost of the first ``num_tokens`` tokens of a prompt."""
    return num_tokens + num_tokens**2 / (2 * DOUBLING_TOKENS)


def make_policy(name: str, block_tokens: int) -> EvictionOrder:
    """Make the policy ``name`` as settings do; the one that cares is told how long blocks are here."""
    if POLICIES[name] is CostAware:
        return CostAware(DOUBLING_TOKENS / block_tokens)
    return POLICIES[name]()


def measure(
    trace: Trace, shares: Sequence[float], on_progress: Callable[[], None]
) -> Iterator[Row]:
    """Replay ``trace`` with every policy; capacities are ``shares`` in percent of its different blocks."""
    unique = len(np.unique(np.concatenate([request.ids for request in trace.requests])))
    yield Row(trace.name, "requests", len(trace.requests), "")
    yield Row(trace.name, "different_blocks", unique, "")
    limits = replay(trace, POLICIES["lru"]()).rates()
    for metric, value in limits.items():
        yield Row(f"{trace.name}_infinite", metric, value, "%")
    for share in shares:
        lru = 0.0
        for policy in POLICIES:
            order = make_policy(policy, trace.block_tokens)
            rates = replay(trace, order, max(1, round(unique * share / 100))).rates()
            case = f"{trace.name}_{share:g}pct_{policy}"
            for metric, value in rates.items():
                ratio = limits[metric] / value if value else None
                yield Row(case, metric, value, "%", limits[metric], ratio)
            lru = lru or rates["hit_tokens"]
            if policy != "lru" and lru:
                yield Row(case, "times_lru", rates["hit_tokens"] / lru, "x")
            on_progress()


@click.command()
@click.option(
    "--traces",
    "folder",
    envvar="KVSTORE_TRACES",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    required=True,
    help="Folder with recorded traffic; bench/traces.py says which.",
)
@click.option(
    "--share", "shares", type=click.FloatRange(0, 100, min_open=True), multiple=True,
    default=(1.0, 5.0, 20.0), show_default=True, help="Capacity in percent of the different blocks.",
)  # fmt: skip
@click.option("--partial", is_flag=True, help="Count ids that stand for a part of a block.")
@output_option
def main(folder: Path, shares: tuple[float, ...], partial: bool, output: str) -> None:  # noqa: FBT001
    """Compare the eviction policies on recorded traffic."""
    rows: list[Row] = []
    for trace in read_traces(folder, partial=partial):
        steps = len(shares) * len(POLICIES)
        with click.progressbar(
            length=steps, label=trace.name, file=sys.stderr, hidden=not sys.stderr.isatty()
        ) as bar:
            rows += measure(trace, shares, partial_of(bar.update, 1))
    report("policies", rows, output)


if __name__ == "__main__":
    main()
