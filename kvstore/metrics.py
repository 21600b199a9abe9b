"""Every metric, in one table. Counters live in the pool as plain integers; they are read on scrape.

A registry exports one open store, one client and one daemon. It keeps none of them alive, and exports
nothing of those that are closed.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, NamedTuple, Protocol

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily
from prometheus_client.registry import Collector

from kvstore.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from prometheus_client import CollectorRegistry
    from prometheus_client.core import Metric

    from kvstore.pool import Pool
    from kvstore.stats import DaemonStatus, PoolStats


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
    "evicted_blocks": CounterSpec(
        ("tier", "reason"),
        "Blocks that left the store, by the fastest tier that had them; with reason copy_elsewhere, copies "
        "that made room in a tier while another one has the block.",
    ),
    "moved_blocks": CounterSpec(("source", "target"), "Blocks copied between tiers."),
    "failed_moves": CounterSpec(
        ("source", "target"), "Blocks whose copy between tiers did not count."
    ),
    "deferred_lookups": CounterSpec(
        (), "Leases not given yet, because blocks were being loaded and the caller could wait."
    ),
    "unloaded_blocks": CounterSpec(
        ("tier", "reason"),
        "Blocks wanted from a slow tier and not loaded: off, not_worth_loading, no_room, busy.",
    ),
    "unstored_blocks": CounterSpec(
        ("tier", "reason"),
        "Blocks not written to a durable tier that were to be: off, not_worth_loading, budget, busy.",
    ),
    "disk_reads": CounterSpec(
        ("verdict",), "Blocks read from disk: good, off, or what was wrong with them."
    ),
    "disk_troubles": CounterSpec(
        ("side", "reason"), "How often reading from the disk, or writing to it, was turned off."
    ),
    "refilled_blocks": CounterSpec(
        (), "Blocks that only the disk had, and that an engine brought back to memory."
    ),
    "unsealed_blocks": CounterSpec(
        (), "Blocks stored without a checksum, because too many moves waited."
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
"""Counters of a pool by name, without the ``kvstore_`` prefix and ``_total`` suffix they are exported with."""

DAEMON_COUNTERS = {
    "accepted_clients": CounterSpec((), "Connections whose handshake succeeded."),
    "refused_clients": CounterSpec((), "Connections whose handshake failed."),
    "dropped_clients": CounterSpec((), "Clients dropped by the daemon, for whatever reason."),
    "slow_clients": CounterSpec((), "Clients dropped because they did not read their answers."),
    "protocol_errors": CounterSpec(
        (), "Clients refused or dropped because they sent what is no message."
    ),
    "requests": CounterSpec((), "Requests handled, releases among them."),
    "failed_requests": CounterSpec((), "Requests answered with an error."),
    "internal_errors": CounterSpec(
        (), "Requests or clients that the daemon failed to serve; its log says why."
    ),
    "refused_session_budget": CounterSpec(
        (), "Reservations cut short because their client has too much reserved."
    ),
    "abandoned_leases": CounterSpec((), "Leases that ended with their client."),
    "abandoned_reservations": CounterSpec((), "Reservations that ended with their client."),
}
"""Counters of a daemon's connections, exported as ``kvstore_daemon_…_total``."""

CLIENT_COUNTERS = {
    "calls": CounterSpec(("call",), "Calls made."),
    "failures": CounterSpec(("call", "reason"), "Calls that the daemon did not answer, and why."),
    "connects": CounterSpec((), "Connections made."),
    "expired_leases": CounterSpec((), "Leases that ran out before they were released."),
    "refused_releases": CounterSpec(
        (), "Second releases, commits or aborts, and those of strangers."
    ),
}
"""Counters of a client, exported from its process as ``kvstore_client_…_total``."""

Counts = Mapping[tuple[str, ...], int]
"""Numbers by name and labels."""


class Counting(Protocol):
    """A client of a daemon."""

    @property
    def closed(self) -> bool: ...  # noqa: D102

    def counters(self) -> Counts: ...  # noqa: D102


def register(pool: Pool, registry: CollectorRegistry) -> None:
    """Export the metrics of ``pool`` from ``registry`` until it is closed.

    Raises:
        ConfigError: ``registry`` exports another open pool.
    """
    _register(_PoolCollector(pool), registry, "kvstore_lookups_total")


def register_daemon(status: Callable[[], DaemonStatus], registry: CollectorRegistry) -> None:
    """Export what a daemon tells about itself, without its pool.

    Raises:
        ConfigError: ``registry`` exports another daemon.
    """
    _register(_DaemonCollector(status), registry, "kvstore_daemon_requests_total")


def register_client(client: Counting, registry: CollectorRegistry) -> None:
    """Export the counters of ``client`` from ``registry`` until it is closed.

    Raises:
        ConfigError: ``registry`` exports another open client.
    """
    _register(_ClientCollector(client), registry, "kvstore_client_connects_total")


def _register(collector: Collector, registry: CollectorRegistry, sample: str) -> None:
    """Register ``collector``, which always has ``sample`` while it exports anything."""
    if registry.get_sample_value(sample) is not None:
        raise ConfigError(
            f"the registry exports {sample} of another open store or client: give each its own registry"
        )
    registry.register(collector)


class _Collector(Collector):
    """Its names are free for the next one when there is nothing to export any more."""

    def describe(self) -> Iterable[Metric]:
        return ()


class _PoolCollector(_Collector):
    def __init__(self, pool: Pool) -> None:
        self._pool = weakref.ref(pool)

    def collect(self) -> Iterator[Metric]:
        pool = self._pool()
        if pool is None or pool.closed:
            return
        stats = pool.stats()
        yield from _counters("kvstore_", COUNTERS, stats.counts)
        yield from _gauges(stats)


class _DaemonCollector(_Collector):
    def __init__(self, status: Callable[[], DaemonStatus]) -> None:
        self._status = status

    def collect(self) -> Iterator[Metric]:
        status = self._status()
        counts: Counts = {(name,): value for name, value in status.counts.items()}
        yield from _counters("kvstore_daemon_", DAEMON_COUNTERS, counts)
        who = {"version": status.version, "node": status.node, "epoch": status.epoch}
        yield InfoMetricFamily("kvstore_daemon", "Who the daemon is.", value=who)
        for name, text, value in (
            ("daemon_clients", "Clients connected.", status.num_clients),
            ("daemon_uptime_seconds", "Time since the daemon was started.", status.uptime_s),
            ("daemon_draining", "1 while the daemon is about to stop.", status.state == "draining"),
            ("arena_huge_page_bytes", "Shared memory on huge pages.", status.arena.huge_page_bytes),
        ):
            yield GaugeMetricFamily(f"kvstore_{name}", text, value=float(value))


class _ClientCollector(_Collector):
    def __init__(self, client: Counting) -> None:
        self._client = weakref.ref(client)

    def collect(self) -> Iterator[Metric]:
        client = self._client()
        if client is None or client.closed:
            return
        yield from _counters("kvstore_client_", CLIENT_COUNTERS, client.counters())


def _counters(prefix: str, specs: Mapping[str, CounterSpec], counts: Counts) -> Iterator[Metric]:
    for name, spec in specs.items():
        counter = CounterMetricFamily(f"{prefix}{name}", spec.help, labels=spec.labels)
        for key, value in counts.items():
            if key[0] == name:
                counter.add_metric(key[1:], value)
        if not spec.labels and not counter.samples:
            counter.add_metric((), 0)
        yield counter


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
    if stats.disk is not None:
        for name, text, value in (
            ("reading_off", "1 while nothing is read from disk.", bool(stats.disk.reading_off)),
            ("writing_off", "1 while nothing is written there.", bool(stats.disk.writing_off)),
            ("load_latency_seconds", "Expected before a load's bytes.", stats.disk.load_latency_s),
            ("load_bytes_per_second", "Expected of loads.", stats.disk.load_bytes_per_s),
            ("bad_bytes", "Slots set aside until the next start.", stats.disk.bad_bytes),
        ):
            yield GaugeMetricFamily(f"kvstore_disk_{name}", text, value=float(value))
    for field, text in (
        ("num_blocks", "Blocks known."),
        ("held_blocks", "Blocks that somebody reads, writes or pinned."),
        ("num_leases", "Leases held."),
        ("num_reservations", "Reservations held."),
        ("num_pins", "Pins held."),
        ("num_namespaces", "Namespaces with blocks."),
        ("num_nodes", "Nodes of all radix trees."),
        ("index_bytes", "Memory of keys, block ids and block table."),
    ):
        yield GaugeMetricFamily(
            f"kvstore_{field.removeprefix('num_')}", text, value=getattr(stats, field)
        )
