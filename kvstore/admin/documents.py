"""What the routes answer, where the dataclasses of :mod:`kvstore.stats` do not say it."""

from typing import Any, Generic, TypeVar

from pydantic import BaseModel, ConfigDict

from kvstore.stats import ArenaStats, DiskStats, TenantStats, TierStats

Item = TypeVar("Item")


class Document(BaseModel):
    """Base of all answers: says exactly what it declares."""

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)


class Page(Document, Generic[Item]):
    """A part of a list."""

    items: list[Item]
    next: str | None
    """Value of ``after`` for the next page; null at the end."""


class State(Document):
    """Where in its life the daemon is."""

    state: str


class Count(Document):
    """A counter: it only ever grows."""

    name: str
    labels: list[str]
    value: int


class PoolDocument(Document):
    """Sizes and counters of the pool, at one moment."""

    tiers: list[TierStats]
    num_blocks: int
    held_blocks: int
    num_leases: int
    num_reservations: int
    num_pins: int
    num_namespaces: int
    num_nodes: int
    index_bytes: int
    counts: list[Count]
    disk: DiskStats | None = None
    """Of the last tier, if that is durable."""
    tenants: list[TenantStats] = []
    """Those with a ceiling or floor, then the rest together; none where nothing is said of any."""


class StatusDocument(Document):
    """What the daemon is doing."""

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
    counts: list[Count]
    """Counters of the daemon's connections."""
    arena: ArenaStats
    pool: PoolDocument


class Setting(Document):
    """One setting; secrets are redacted."""

    value: bool | int | float | str | dict[str, Any] | None
    origin: str
    """``default``, ``file PATH``, ``environment NAME`` or ``argument``."""


class Known(Document):
    """How much of a prefix is stored."""

    prompt_tokens: int
    hit_tokens: int
    """Leading tokens that need not be computed; the last token always must be."""


class Evicted(Document):
    """What was forgotten."""

    num_blocks: int
    """Blocks of the prefix that were known; what followed them is forgotten as well."""


class Retained(Document):
    """What is kept as was asked."""

    tokens: int
    """Leading tokens that are stored."""


class Pinned(Document):
    """What a pin holds."""

    name: str
    tokens: int
    """Leading tokens held against eviction."""
