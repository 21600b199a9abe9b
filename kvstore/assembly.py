"""From settings to objects: the only place that builds a store."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvstore.config import Settings, load_settings
from kvstore.errors import ConfigError
from kvstore.host import usable_memory_bytes
from kvstore.metrics import register
from kvstore.pool import Pool
from kvstore.tiers.arena import ALIGNMENT
from kvstore.tiers.dram import DramStore
from kvstore.tiers.mover import ThreadMover
from kvstore.tiers.tier import Tier
from radix import LRU, EvictionOrder

if TYPE_CHECKING:
    from collections.abc import Callable

    from prometheus_client import CollectorRegistry

GIB = 1 << 30

POLICIES: dict[str, Callable[[], EvictionOrder]] = {"lru": LRU}
"""Eviction policies by the name that settings give them."""


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
        ConfigError: a setting is unknown, impossible, or more than this process may use.
    """
    return build(load_settings(settings, file=Path(config) if config else None), registry)


def build(settings: Settings, registry: CollectorRegistry | None = None) -> Pool:
    """Build the store that ``settings`` describe; arguments and errors as for :func:`open`."""
    device = _device(settings) if settings.gpu else "none"
    _check_memory(settings.dram + (settings.gpu if device == "cpu" else 0))
    tiers = []
    if settings.gpu:
        tiers.append(_gpu_tier(settings, device))
    if settings.dram:
        capacity = _capacity("dram", settings.dram)
        store = DramStore(capacity, prefault=settings.prefault, pin=_cuda_is_present())
        tiers.append(Tier("dram", store, POLICIES[settings.policy]()))
    if not tiers:
        raise ConfigError(
            "both dram and gpu are 0: give at least one of them a size, such as dram='8GiB'"
        )
    pool = Pool(
        tiers,
        ThreadMover(settings.max_moves),
        time.monotonic,  # noqa: TID251  (the one place that picks the clock)
        block_tokens=settings.block_tokens,
        lease_timeout_s=settings.lease_timeout_s,
        max_leases=settings.max_leases,
        max_event_bytes=settings.max_event_bytes,
    )
    if registry is not None:
        register(pool, registry)
    return pool


def _gpu_tier(settings: Settings, device: str) -> Tier:
    from kvstore.tiers.gpu import GpuStore

    capacity = _capacity("gpu", settings.gpu)
    try:
        store = GpuStore(capacity, device)
    except RuntimeError as error:
        raise ConfigError(f"gpu={capacity} bytes cannot be had on {device}: {error}") from None
    return Tier("gpu", store, POLICIES[settings.policy]())


def _cuda_is_present() -> bool:
    """Whether this process uses torch and has a CUDA device, which copies faster from pinned memory."""
    torch = sys.modules.get("torch")
    return torch is not None and bool(torch.cuda.is_available())


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
    usable = usable_memory_bytes(Path("/"))
    if usable is not None and wanted > usable:
        raise ConfigError(
            f"{wanted / GIB:.1f} GiB of host memory for blocks are more than the {usable / GIB:.1f} GiB "
            "that this process may use: give dram (and gpu, without CUDA) less; see `kvstore doctor`"
        )
