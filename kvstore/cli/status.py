"""``kvstore status``: what a daemon is doing, once or again and again, and what that looks like."""

from __future__ import annotations

import json
from dataclasses import dataclass
from threading import Event
from typing import TYPE_CHECKING

import click

from kvstore import errors
from kvstore.cli.daemon import connected, daemon_options
from kvstore.cli.table import output_option, print_json, render
from kvstore.sizes import size
from kvstore.stats import status_document

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from kvstore.cli.table import Cell
    from kvstore.client.blocking import Client
    from kvstore.stats import DaemonStatus, DiskStats, PoolStats, TenantStats, TierStats

SHORTEST_S, LONGEST_S = 0.05, 3600.0
HEADER_EVERY = 20
"""Lines after which the header is repeated."""

COLUMNS = {
    "lookups/s": 9,
    "hit tok/s": 9,
    "hit %": 5,
    "GB/s out": 8,
    "stored/s": 8,
    "GB/s in": 7,
    "evicted/s": 9,
    "leases": 6,
    "clients": 7,
    "mem %": 5,
    "disk %": 6,
}
"""Columns of a line, and their widths. Bytes are blocks times the mean size of a block in memory."""


def interval_option(command: Callable[..., object]) -> Callable[..., object]:
    """Add ``--interval`` (argument ``interval``, seconds) to a click command."""
    return click.option(
        "--interval",
        type=click.FloatRange(SHORTEST_S, LONGEST_S),
        default=1.0,
        show_default=True,
        help="Seconds between two looks.",
    )(command)


@click.command()
@daemon_options
@click.option(
    "--watch", is_flag=True, help="Go on until Ctrl-C: a line each time, or a JSON object."
)
@interval_option
@output_option
def status(
    *, socket: Path | None, url: str | None, watch: bool, interval: float, output: str
) -> None:
    """Show what a daemon is doing."""
    with connected(socket, url) as client:
        if watch:
            try:
                print_lines(client, interval, output)
            except KeyboardInterrupt:
                return
        elif output == "json":
            print_json(status_document(client.status()))
        else:
            click.echo(overview(client.status()))


def print_lines(
    client: Client, interval_s: float, output: str, wait: Callable[[float], object] | None = None
) -> None:
    """Print a line each ``interval_s`` until interrupted, or as ``wait`` returns true."""
    num_lines = 0
    for last, now in looks(client, interval_s, wait or Event().wait):
        if isinstance(now, str):
            click.echo(now, err=True)
        elif output == "json":
            click.echo(json.dumps(status_document(now)))
        elif last is not None:
            if num_lines % HEADER_EVERY == 0:
                click.echo(header())
            click.echo(line(last, now, client.block_tokens))
            num_lines += 1


def looks(
    client: Client, interval_s: float, wait: Callable[[float], object]
) -> Iterator[tuple[DaemonStatus | None, DaemonStatus | str]]:
    """Ask the daemon again and again; yield its last status, if it is of the same start, and the new one.

    In place of the new one comes the reason when a daemon that answered before does not. Ends when
    ``wait``, called between two looks with the seconds, returns true.

    Raises:
        UnavailableError: the first look failed.
    """
    last: DaemonStatus | None = None
    now = client.status()
    yield None, now
    while not wait(interval_s):
        last = now
        try:
            now = client.status()
        except errors.UnavailableError as error:
            yield None, str(error)
        else:
            yield (last if last.epoch == now.epoch else None), now


@dataclass(frozen=True)
class Rates:
    """What happened per second between two looks, by the daemon's clock."""

    lookups: float
    hit_tokens: float
    missed_tokens: float
    lent_bytes: float
    stored_blocks: float
    stored_bytes: float
    evicted_blocks: float


def rates(last: DaemonStatus, now: DaemonStatus, block_tokens: int) -> Rates:
    """Return the rates between two statuses of one start of a daemon.

    Engines copy the bytes themselves, so bytes are blocks times the mean size of a block in memory.
    """
    seconds = max(now.uptime_s - last.uptime_s, 1e-9)

    def rate(name: str, *, misses: bool = False) -> float:
        grown = count(now.pool, name, misses=misses) - count(last.pool, name, misses=misses)
        return grown / seconds

    memory, _ = memory_and_disk(now.pool)
    used_bytes = sum(tier.used_bytes for tier in memory)
    block_bytes = used_bytes / max(1, sum(tier.num_blocks for tier in memory))
    hit_tokens, stored_blocks = rate("lookup_tokens"), rate("stored_blocks")
    return Rates(
        lookups=rate("lookups"),
        hit_tokens=hit_tokens,
        missed_tokens=rate("lookup_tokens", misses=True),
        lent_bytes=hit_tokens / block_tokens * block_bytes,
        stored_blocks=stored_blocks,
        stored_bytes=stored_blocks * block_bytes,
        evicted_blocks=rate("evicted_blocks"),
    )


def count(pool: PoolStats, name: str, *, misses: bool = False) -> int:
    """Return the counter ``name``, all labels together but ``miss``; or that one alone."""
    return sum(
        value
        for (counter, *labels), value in pool.counts.items()
        if counter == name and ("miss" in labels) == misses
    )


def memory_and_disk(pool: PoolStats) -> tuple[tuple[TierStats, ...], tuple[TierStats, ...]]:
    """Return the tiers in memory, and those on disk."""
    num_memory = len(pool.tiers) - (pool.disk is not None)
    return pool.tiers[:num_memory], pool.tiers[num_memory:]


def fullest(tiers: tuple[TierStats, ...]) -> str:
    """Return how full the fullest of ``tiers`` is, in percent; ``-`` of none."""
    shares = [tier.used_bytes / max(1, tier.capacity_bytes) for tier in tiers]
    return percent(max(shares), 1) if shares else "-"


def header() -> str:
    """Return the titles of the columns of :func:`line`."""
    return "  ".join(name.rjust(width) for name, width in COLUMNS.items())


def line(last: DaemonStatus, now: DaemonStatus, block_tokens: int) -> str:
    """Return what happened between two looks as one line below :data:`COLUMNS`."""
    rate = rates(last, now, block_tokens)
    cells = (
        f"{rate.lookups:.0f}",
        f"{rate.hit_tokens:.0f}",
        percent(rate.hit_tokens, rate.hit_tokens + rate.missed_tokens),
        f"{rate.lent_bytes / 1e9:.2f}",
        f"{rate.stored_blocks:.0f}",
        f"{rate.stored_bytes / 1e9:.2f}",
        f"{rate.evicted_blocks:.0f}",
        str(now.pool.num_leases),
        str(now.num_clients),
        *map(fullest, memory_and_disk(now.pool)),
    )
    return "  ".join(cell.rjust(width) for cell, width in zip(cells, COLUMNS.values(), strict=True))


def overview(now: DaemonStatus) -> str:
    """Return a status for people: what it is, its tiers, tenants, and counters that are not 0."""
    counts = {(name,): value for name, value in now.counts.items()} | now.pool.counts
    counters: list[list[Cell]] = [
        [" ".join(key), value] for key, value in sorted(counts.items()) if value
    ]
    tables = [
        (["daemon", ""], _facts(now)),
        (["tier", "capacity", "used", "full", "blocks"], [*map(_of_tier, now.pool.tiers)]),
        (["tenant", "used", "floor", "ceiling"], [*map(_of_tenant, now.pool.tenants)]),
        (["counter", "value"], counters),
    ]
    return "\n\n".join(render(headers, rows) for headers, rows in tables if rows)


def _facts(now: DaemonStatus) -> list[list[Cell]]:
    pool, arena = now.pool, now.arena
    hits, misses = count(pool, "lookup_tokens"), count(pool, "lookup_tokens", misses=True)
    facts: list[list[Cell]] = [
        ["node", f"{now.node}, kvstore {now.version}, process {now.pid}"],
        ["state", f"{now.state}, for {duration(now.uptime_s)} (epoch {now.epoch})"],
        ["socket", now.socket],
        ["clients", now.num_clients],
        ["memory", size(arena.capacity_bytes)],
        ["huge pages", size(arena.huge_page_bytes)],
        ["provided in", f"{arena.prefault_s:.1f} s"],
        [
            "blocks",
            f"{pool.num_blocks} in {pool.num_namespaces} namespaces, {pool.held_blocks} held",
        ],
        [
            "held by",
            f"{pool.num_leases} leases, {pool.num_reservations} reservations, {pool.num_pins} pins",
        ],
        ["index", size(pool.index_bytes)],
        [
            "hits",
            f"{percent(hits, hits + misses)} % of {hits + misses} tokens" if hits + misses else "-",
        ],
    ]
    if pool.disk is not None:
        facts.append(["disk", _of_disk(pool.disk)])
    return facts


def _of_tier(tier: TierStats) -> list[Cell]:
    full = percent(tier.used_bytes, tier.capacity_bytes) + " %"
    return [tier.name, size(tier.capacity_bytes), size(tier.used_bytes), full, tier.num_blocks]


def _of_tenant(tenant: TenantStats) -> list[Cell]:
    ceiling = None if tenant.ceiling_bytes is None else size(tenant.ceiling_bytes)
    name = tenant.tenant or "(all others)"
    return [name, size(tenant.used_bytes), size(tenant.floor_bytes), ceiling]


def _of_disk(disk: DiskStats) -> str:
    """Say how the disk does."""
    off = [
        f"{what} is off: {reason}"
        for what, reason in (("reading", disk.reading_off), ("writing", disk.writing_off))
        if reason
    ]
    if disk.bad_bytes:
        off.append(f"{size(disk.bad_bytes)} set aside as bad")
    return "; ".join([*off, f"loads are expected to give {size(disk.load_bytes_per_s)}/s"])


def percent(part: float, whole: float) -> str:
    """Return ``part`` of ``whole`` in percent; ``-`` of nothing."""
    return f"{100 * part / whole:.1f}" if whole else "-"


def duration(seconds: float) -> str:
    """Return a duration for people, in its two largest units."""
    minutes, hours, days = int(seconds) // 60, int(seconds) // 3600, int(seconds) // 86400
    if days:
        return f"{days} d {hours % 24} h"
    if hours:
        return f"{hours} h {minutes % 60} min"
    return f"{minutes} min {int(seconds) % 60} s" if minutes else f"{seconds:.1f} s"
