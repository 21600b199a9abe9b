"""What a store tells about itself: sizes and counters at one moment."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from collections.abc import Mapping


@dataclass(frozen=True)
class TierStats:
    """Sizes of one tier, in bytes, and its blocks."""

    name: str
    capacity_bytes: int
    used_bytes: int
    num_blocks: int


@dataclass(frozen=True)
class DiskStats:
    """How a durable tier does, and what the planner expects of it."""

    reading_off: str
    """Why nothing is read now; empty when something is."""
    writing_off: str
    """Why nothing is written now."""
    load_latency_s: float
    """Expected seconds until a load begins to give bytes; as is the next one, measured or assumed."""
    load_bytes_per_s: float
    bad_bytes: int
    """Slots that are set aside until the next start."""


@dataclass(frozen=True)
class TenantStats:
    """What a tenant has of the last memory tier, and may have."""

    tenant: str
    """Empty: all tenants of whom nothing is said, and what belongs to none."""
    used_bytes: int
    ceiling_bytes: int | None
    """None: all."""
    floor_bytes: int
    """What others cannot take from it."""


@dataclass(frozen=True)
class PoolStats:
    """A consistent snapshot. ``counts`` only ever grow; their names are in :mod:`kvstore.metrics`."""

    tiers: tuple[TierStats, ...]
    num_blocks: int
    held_blocks: int
    num_leases: int
    num_reservations: int
    num_pins: int
    num_namespaces: int
    num_nodes: int
    index_bytes: int
    counts: dict[tuple[str, ...], int]
    disk: DiskStats | None = None
    """Of the last tier, if that is durable."""
    tenants: tuple[TenantStats, ...] = ()
    """Those with a ceiling or floor, then the rest together; none where nothing is said of any."""


@dataclass(frozen=True)
class NamespaceStats:
    """One namespace that has blocks."""

    digest: str
    """Hex."""
    block_tokens: int
    block_bytes: int
    keys: str
    num_blocks: int
    tenant: str | None = None
    """Whose blocks these are; None: nobody's in particular."""
    codec: str | None = None
    """In which the disk keeps them; None: as they are."""


@dataclass(frozen=True)
class PinStats:
    """A prefix that is kept until it is unpinned."""

    name: str
    namespace: str
    """Digest, hex."""
    tokens: int
    num_blocks: int


@dataclass(frozen=True)
class LeaseStats:
    """A lease or reservation that is held."""

    id: int
    namespace: str
    """Digest, hex."""
    num_blocks: int
    """Blocks leased, or being written."""
    kind: Literal["lease", "reservation"]
    expires_in_s: float | None
    """None: it is held until somebody ends it."""


@dataclass(frozen=True)
class ArenaStats:
    """The shared memory of a daemon."""

    capacity_bytes: int
    prefault_s: float
    """Seconds that it took to have every page provided; 0 when that was not asked for."""
    huge_page_bytes: int
    """How much of it is on huge pages."""


@dataclass(frozen=True)
class DaemonStatus:
    """What a daemon tells about itself. Clients, REST and command line show the same."""

    version: str
    node: str
    epoch: str
    """Hex: drawn at each start."""
    pid: int
    uptime_s: float
    state: str
    """``starting``, ``ready`` or ``draining``."""
    socket: str
    num_clients: int
    counts: dict[str, int]
    """Counters of the daemon's connections, by the names of :data:`kvstore.metrics.DAEMON_COUNTERS`."""
    arena: ArenaStats
    pool: PoolStats


def status_document(status: DaemonStatus) -> dict[str, Any]:
    """Return ``status`` ready for JSON, for REST and command line alike.

    Fields keep their names. Both ``counts`` become lists of ``{"name", "labels", "value"}``, sorted,
    whose labels are values in the order of :data:`kvstore.metrics.COUNTERS`.
    """
    document = asdict(status)
    document["counts"] = _counts({(name,): value for name, value in status.counts.items()})
    document["pool"] |= {
        "tiers": [asdict(tier) for tier in status.pool.tiers],
        "tenants": [asdict(tenant) for tenant in status.pool.tenants],
        "counts": _counts(status.pool.counts),
    }
    return document


def _counts(counts: Mapping[tuple[str, ...], int]) -> list[dict[str, Any]]:
    return [
        {"name": name, "labels": list(labels), "value": value}
        for (name, *labels), value in sorted(counts.items())
    ]
