"""From settings to objects: the only place that builds a store."""

from __future__ import annotations

import logging
import os
import random
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypedDict, Unpack

from kvstore.config import DAY_S, Settings, load_settings
from kvstore.errors import ConfigError
from kvstore.host import memory_limit
from kvstore.metrics import register, register_client
from kvstore.planner import Planner
from kvstore.pool import Pool
from kvstore.quotas import Quota, Quotas, ordered_by
from kvstore.sizes import typed_size
from kvstore.tiers.arena import ALIGNMENT
from kvstore.tiers.disk import DiskOptions, DiskStore
from kvstore.tiers.dram import DramStore
from kvstore.tiers.memory import cuda_is_present
from kvstore.tiers.mover import Lanes, ThreadMover
from kvstore.tiers.rules import DiskRules, WriteBudget
from kvstore.tiers.shared import SharedDramStore
from kvstore.tiers.tier import Tier
from radix import ARC, LFU, LRU, S3FIFO, SLRU, CostAware, EvictionOrder

if TYPE_CHECKING:
    from collections.abc import Callable

    from prometheus_client import CollectorRegistry

    from kvstore.client.aio import AsyncClient
    from kvstore.client.blocking import Client
    from kvstore.tiers.store import Store

logger = logging.getLogger(__name__)

GIB = 1 << 30

POLICIES: dict[str, Callable[[], EvictionOrder]] = {
    "lru": LRU,
    "slru": SLRU,
    "s3fifo": S3FIFO,
    "arc": ARC,
    "lfu": LFU,
    "cost": CostAware,
}
"""Eviction policies by the name that settings give them; each ranks the blocks of one priority."""


def open(  # noqa: A001  (kvstore.open reads as it should)
    *,
    config: str | Path | None = None,
    registry: CollectorRegistry | None = None,
    **settings: Any,
) -> Pool:
    """Open a store inside this process.

    All memory is taken at once, which can take a second or two for each 2 GiB; ``prefault=False``
    takes it when blocks are first written.

    Args:
        config: TOML file with settings; the environment (``KVSTORE_*``) and arguments override it.
        registry: where to register metrics; none are exported without one.
        **settings: fields of :class:`kvstore.Settings`, for example ``dram="8GiB", gpu="1GiB"``.

    Raises:
        ConfigError: a setting is unknown, impossible, or more than this process may use; or the
            registry exports another open store.
    """
    return build(load_settings(settings, file=Path(config) if config else None), registry)


def build(settings: Settings, registry: CollectorRegistry | None = None) -> Pool:
    """Build the store that ``settings`` describe; arguments and errors as for :func:`open`."""
    _check_together(settings)
    device = _device(settings) if settings.gpu else "none"
    _check_memory(settings.dram + (settings.gpu if device == "cpu" else 0))
    with ExitStack() as undo:
        disk = _disk_tier(settings, undo)
        tiers = []
        if settings.gpu:
            tiers.append(_opened(_gpu_tier(settings, device), undo))
        if settings.dram:
            capacity = _capacity("dram", settings.dram)
            store = DramStore(capacity, prefault=settings.prefault, pin=cuda_is_present())
            tiers.append(_opened(_tier("dram", store, settings), undo))
        return _pool([*tiers, *disk], undo, settings, registry)


def _check_together(settings: Settings) -> None:
    """Refuse settings that do not fit each other, before memory is taken, which can need minutes.

    Raises:
        ConfigError: no memory, a disk tier that cannot be, or floors of tenants beyond what is there.
    """
    last = settings.dram or settings.gpu
    if not last:
        raise ConfigError(
            "both dram and gpu are 0: give at least one of them a size, such as dram='8GiB'"
        )
    disk_options(settings)
    Quotas(_quotas(settings), last)


def disk_options(settings: Settings) -> DiskOptions | None:
    """Return what the disk tier of ``settings`` may take; None without one.

    Raises:
        ConfigError: it has no size, no directory or no dram, or is too small or too large.
    """
    if not settings.disk:
        if settings.disk_path is not None:
            raise ConfigError(
                "disk_path is set and disk is 0: set disk, such as 200GiB, or leave both out"
            )
        return None
    disk = f"disk={typed_size(settings.disk)}"
    if not settings.dram:
        raise ConfigError(
            f"{disk} needs dram, through which its blocks pass: give dram a size, such as '8GiB'"
        )
    if settings.disk_path is None:
        raise ConfigError(
            f"{disk} has no place: set disk_path to a directory, such as /var/lib/kvstore"
        )
    return DiskOptions(
        settings.disk, reserve_bytes=settings.disk_reserve, threads=settings.disk_threads
    )


def _opened(tier: Tier, undo: ExitStack) -> Tier:
    """Return ``tier``, which ``undo`` closes until there is a pool that does."""
    undo.callback(tier.store.close)
    return tier


def _disk_tier(settings: Settings, undo: ExitStack) -> list[Tier]:
    """Open the directory of the disk tier, if there is to be one: before memory, as it can be refused."""
    options = disk_options(settings)
    if options is None or settings.disk_path is None:
        return []
    clock = time.monotonic  # noqa: TID251  (the one place that picks the clock)
    budget = WriteBudget(clock, settings.disk_bytes_per_s)
    rules = DiskRules(settings.disk_admission, budget, Planner(clock, mode=settings.load))
    store = DiskStore(settings.disk_path, options, clock)
    tier = Tier("disk", store, ordered_by(POLICIES[settings.policy], {}), rules=rules)
    return [_opened(tier, undo)]


def build_shared(
    settings: Settings,
    registry: CollectorRegistry | None = None,
    on_progress: Callable[[int], None] | None = None,
) -> tuple[Pool, SharedDramStore]:
    """Build the store of a daemon: ``dram``, in memory that its clients can map, and ``disk``.

    Args:
        settings: what to build.
        registry: where to register metrics; none are exported without one.
        on_progress: called while memory is being provided, with the bytes so far, every 64 MiB.

    Returns:
        The pool, and the store of its first tier, which is closed with the pool.

    Raises:
        ConfigError: a setting is impossible, or more than this process may use.
    """
    if settings.gpu:
        raise ConfigError(
            f"gpu={settings.gpu}: a daemon has no gpu tier, which lives in the engine's process: set gpu=0"
        )
    if not settings.dram:
        raise ConfigError("dram is 0: a daemon needs host memory for blocks, such as dram='8GiB'")
    _check_together(settings)
    if settings.huge_pages != "reserved":  # those were set aside before: the store counts them
        _check_memory(settings.dram)
    with ExitStack() as undo:
        disk = _disk_tier(settings, undo)
        store = SharedDramStore(
            _capacity("dram", settings.dram),
            time.monotonic,  # noqa: TID251  (the one place that picks the clock)
            huge_pages=settings.huge_pages,
            prefault=settings.prefault,
            on_progress=on_progress,
        )
        dram = _opened(_tier("dram", store, settings), undo)
        return _pool([dram, *disk], undo, settings, registry), store


def _pool(
    tiers: list[Tier], undo: ExitStack, settings: Settings, registry: CollectorRegistry | None
) -> Pool:
    """Make the pool of ``tiers``, which closes them from then on, and not ``undo``."""
    clock = time.monotonic  # noqa: TID251  (the one place that picks the clock)
    began = clock()
    memory = ThreadMover(settings.max_moves)
    lanes = Lanes(memory, memory, memory)
    disk = tiers[-1].disk
    if disk is not None:
        loads = ThreadMover(settings.max_moves, "loads")
        lanes = Lanes(memory, loads, ThreadMover(settings.max_moves, "stores"))
    try:
        pool = Pool(
            tiers,
            lanes,
            clock,
            block_tokens=settings.block_tokens,
            lease_timeout_s=settings.lease_timeout_s,
            max_leases=settings.max_leases,
            max_event_bytes=settings.max_event_bytes,
            quotas=_quotas(settings),
        )
    except ConfigError:
        lanes.close()
        raise
    undo.pop_all()
    if disk is not None:
        found, found_s = pool.stats().tiers[-1].num_blocks, disk.open_s + clock() - began
        logger.info("disk tier %s: %d blocks found in %.2f s", settings.disk_path, found, found_s)
    if registry is not None:
        try:
            register(pool, registry)
        except ConfigError:
            pool.close()
            raise
    return pool


def connect(url: str | None = None, **options: Unpack[ClientOptions]) -> Client:
    """Use the store of a daemon of this host (``kvstore serve``).

    The daemon need not be there yet, and may be restarted at any time.

    Args:
        url: ``unix:///path/to.sock``, or ``tcp://127.0.0.1:PORT``; by default the setting ``socket``.
        **options: see :class:`ClientOptions`.

    Raises:
        ConfigError: ``url`` is no address of this host, or the registry exports another open client.
    """
    from kvstore.client.blocking import Client

    client = Client(**_client_parts(url, options))
    if registry := options.get("registry"):
        try:
            register_client(client, registry)
        except ConfigError:
            client.close()
            raise
    return client


def connect_async(url: str | None = None, **options: Unpack[ClientOptions]) -> AsyncClient:
    """Use the store of a daemon from an event loop; arguments and errors as for :func:`connect`."""
    from kvstore.client.aio import AsyncClient

    client = AsyncClient(**_client_parts(url, options))
    if registry := options.get("registry"):
        register_client(client, registry)
    return client


class ClientOptions(TypedDict, total=False):
    """Options of a client of a daemon."""

    access: Literal["read", "write"]
    """``read`` maps the daemon's memory read-only, and cannot reserve; by default ``write``."""
    on_failure: Literal["miss", "raise"]
    """What a call does that the daemon does not answer; by default ``miss``, which is counted."""
    deadline_s: float | None
    """Longest that a call may take. By default what computing its tokens would take, at least 0.1 s
    and at most 5 s."""
    prefill_tokens_per_s: float
    """How fast the engine computes tokens, for that default; 10,000 when nothing is said."""
    token: str | None
    """The daemon's secret, which it wants over TCP; by default the setting ``token``."""
    registry: CollectorRegistry | None
    """Where to register the client's metrics; none are exported without one."""


def _client_parts(url: str | None, options: ClientOptions) -> dict[str, Any]:
    from kvstore.client.rules import Breaker, Deadlines, parse_url
    from kvstore.protocol import OLDEST_VERSION, VERSION, Hello

    _check_options(dict(options))
    address = parse_url(url or f"unix://{load_settings({}).socket}")
    token = options.get("token")
    if token is None and address.path is None and (secret := load_settings({}).token):
        token = secret.get_secret_value()
    clock = time.monotonic  # noqa: TID251
    program = Path(sys.argv[0]).name if sys.argv else ""

    def hello() -> Hello:
        """Say who connects, as it is at that moment: torch may come later, and a fork has another id."""
        return Hello(
            OLDEST_VERSION,
            VERSION,
            f"{program or 'python'}:{os.getpid()}"[:255],
            options.get("access", "write"),
            cuda_is_present(),
            token,
        )

    return {
        "address": address,
        "hello": hello,
        "on_failure": options.get("on_failure", "miss"),
        "deadlines": Deadlines(
            options.get("deadline_s"), options.get("prefill_tokens_per_s", 10_000.0)
        ),
        "breaker": Breaker(clock, random.random),
        "clock": clock,
    }


def _check_options(options: dict[str, Any]) -> None:
    for name, allowed in (("access", ("read", "write")), ("on_failure", ("miss", "raise"))):
        if options.get(name, allowed[0]) not in allowed:
            raise ConfigError(f"{name}={options[name]!r}: give {' or '.join(map(repr, allowed))}")
    for name, most in (("deadline_s", DAY_S), ("prefill_tokens_per_s", 1e9)):
        if (number := options.get(name)) is not None and not 0 < number <= most:
            raise ConfigError(f"{name}={number!r}: give a number above 0, at most {most:.0f}")


def _tier(name: str, store: Store, settings: Settings) -> Tier:
    return Tier(name, store, ordered_by(POLICIES[settings.policy], _quotas(settings)))


def _quotas(settings: Settings) -> dict[str, Quota]:
    return {
        name: Quota(None if tenant.ceiling is None else int(tenant.ceiling), int(tenant.floor))
        for name, tenant in settings.tenants.items()
    }


def _gpu_tier(settings: Settings, device: str) -> Tier:
    from kvstore.tiers.gpu import GpuStore

    capacity = _capacity("gpu", settings.gpu)
    try:
        store = GpuStore(capacity, device)
    except RuntimeError as error:
        raise ConfigError(f"gpu={capacity} bytes cannot be had on {device}: {error}") from None
    return _tier("gpu", store, settings)


def _device(settings: Settings) -> str:
    try:
        import torch
    except ImportError:
        raise ConfigError(
            "gpu needs torch: pip install 'kvstore-llm[transformers]', or set gpu=0"
        ) from None
    if settings.device == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        torch.empty(0, device=settings.device)
    except (RuntimeError, AssertionError) as error:
        raise ConfigError(f"device={settings.device!r} cannot be used here: {error}") from None
    return settings.device


def _capacity(name: str, size: int) -> int:
    if size < ALIGNMENT:
        raise ConfigError(
            f"{name}={size} is smaller than one page ({ALIGNMENT} bytes); write sizes as '512MiB'"
        )
    return size // ALIGNMENT * ALIGNMENT


def _check_memory(wanted: int) -> None:
    limit = memory_limit(Path("/"))
    if limit is not None and wanted > limit.available_bytes:
        raise ConfigError(
            f"{wanted / GIB:.1f} GiB of host memory for blocks are more than the "
            f"{limit.available_bytes / GIB:.1f} GiB that this process may use now: {limit.source} has "
            f"{limit.limit_bytes / GIB:.1f} GiB, and the rest is in use; give dram (and gpu, without CUDA) "
            "less, or free memory; see `kvstore doctor`"
        )
