"""Every metric, in one table. Counters live in the pool as plain integers; they are read on scrape."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

if TYPE_CHECKING:
    from collections.abc import Iterator

    from prometheus_client import CollectorRegistry
    from prometheus_client.core import Metric

    from kvstore.pool import Pool
    from kvstore.stats import PoolStats


class CounterSpec(NamedTuple):
    """A counter: its labels, and what it counts."""

    labels: tuple[str, ...]
    help: str


COUNTERS = {
    "lookups": CounterSpec((), "Leases asked for."),
    "lookup_tokens": CounterSpec(
        ("source",), "Tokens of those prompts, by the tier that had them, or miss."
    ),
    "stored_blocks": CounterSpec((), "Blocks committed."),
    "aborted_blocks": CounterSpec((), "Blocks reserved and aborted."),
    "refused_blocks": CounterSpec((), "Blocks that found no room."),
    "evicted_blocks": CounterSpec(("tier", "reason"), "Blocks, or copies, that left a tier."),
    "moved_blocks": CounterSpec(("source", "target"), "Blocks copied between tiers."),
    "failed_moves": CounterSpec(
        ("source", "target"), "Blocks whose copy between tiers did not count."
    ),
    "corrupt_blocks": CounterSpec((), "Blocks dropped because their checksum was wrong."),
    "expired_leases": CounterSpec((), "Leases that ran out."),
    "refused_leases": CounterSpec(
        (), "Leases and reservations refused because too many were held."
    ),
    "refused_releases": CounterSpec(
        (), "Second releases, commits or aborts, and those of strangers."
    ),
}
"""Counters by name, without the ``kvstore_`` prefix and ``_total`` suffix of the exported name."""


def register(pool: Pool, registry: CollectorRegistry) -> None:
    """Export the metrics of ``pool`` from ``registry``."""
    registry.register(_PoolCollector(pool))


class _PoolCollector(Collector):
    def __init__(self, pool: Pool) -> None:
        self._pool = pool

    def collect(self) -> Iterator[Metric]:
        stats = self._pool.stats()
        for name, spec in COUNTERS.items():
            counter = CounterMetricFamily(f"kvstore_{name}", spec.help, labels=spec.labels)
            for key, value in stats.counts.items():
                if key[0] == name:
                    counter.add_metric(key[1:], value)
            if not spec.labels and not counter.samples:
                counter.add_metric((), 0)
            yield counter
        yield from _gauges(stats)


def _gauges(stats: PoolStats) -> Iterator[Metric]:
    for field, text in (
        ("capacity_bytes", "Size of a tier."),
        ("used_bytes", "Bytes of a tier's slots in use."),
        ("num_blocks", "Blocks with a copy in a tier."),
    ):
        name = f"kvstore_tier_{field.removeprefix('num_')}"
        gauge = GaugeMetricFamily(name, text, labels=("tier",))
        for tier in stats.tiers:
            gauge.add_metric((tier.name,), getattr(tier, field))
        yield gauge
    for field, text in (
        ("num_blocks", "Blocks known."),
        ("held_blocks", "Blocks that somebody reads or writes."),
        ("num_leases", "Leases held."),
        ("num_reservations", "Reservations held."),
        ("num_namespaces", "Namespaces with blocks."),
        ("num_nodes", "Nodes of all radix trees."),
        ("index_bytes", "Memory of keys, block ids and block table."),
    ):
        yield GaugeMetricFamily(
            f"kvstore_{field.removeprefix('num_')}", text, value=getattr(stats, field)
        )
