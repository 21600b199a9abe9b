"""A clock and a mover that do what a test says, and bytes that say whose they are."""

from __future__ import annotations

import hashlib
from collections import deque
from typing import TYPE_CHECKING

import numpy as np

from kvstore.planner import Planner
from kvstore.pool import Pool
from kvstore.quotas import ordered_by
from kvstore.tiers.arena import MAX_SLABS
from kvstore.tiers.dram import DramStore
from kvstore.tiers.mover import InlineMover, Mover
from kvstore.tiers.rules import DiskRules, WriteBudget
from kvstore.tiers.tier import Tier
from radix import LRU

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from numpy.typing import NDArray

    from kvstore.namespace import Namespace
    from kvstore.quotas import Quota
    from kvstore.tiers.disk import DiskStore
    from radix import EvictionOrder


class FakeClock:
    """Monotonic seconds that pass only when told."""

    def __init__(self) -> None:
        """Start at zero."""
        self.now_s = 0.0

    def __call__(self) -> float:
        """Return the time."""
        return self.now_s

    def advance(self, seconds: float) -> None:
        """Let ``seconds`` pass."""
        self.now_s += seconds


class ManualMover(Mover):
    """Keeps jobs until the test runs them: every interleaving of moves can be played."""

    def __init__(self, max_waiting: int = 1000) -> None:
        """Start with no job; more than ``max_waiting`` are refused."""
        self.jobs: deque[Callable[[], object]] = deque()
        self._max_waiting = max_waiting

    def has_room(self) -> bool:
        """Whether fewer than ``max_waiting`` jobs are kept."""
        return len(self.jobs) < self._max_waiting

    def room(self) -> int:
        """How many more are kept."""
        return max(0, self._max_waiting - len(self.jobs))

    def submit(self, job: Callable[[], object]) -> bool:
        """Keep ``job``."""
        if not self.has_room():
            return False
        self.jobs.append(job)
        return True

    def run_one(self) -> None:
        """Run the oldest job."""
        self.jobs.popleft()()

    def drain(self) -> None:
        """Run all."""
        while self.jobs:
            self.run_one()

    def close(self) -> None:
        """Run all."""
        self.drain()


def pattern(namespace: Namespace, prefix: bytes) -> NDArray[np.uint8]:
    """Bytes for the block that ends ``prefix`` (key bytes) in ``namespace``: nobody else's, repeatable."""
    seed = hashlib.blake2b(namespace.digest + prefix, digest_size=8).digest()
    size = namespace.layout.block_bytes
    return np.frombuffer((seed * (size // len(seed) + 1))[:size], np.uint8)


def small_pool(  # noqa: PLR0913 - one setting each
    *pages: int,
    mover: Mover | None = None,
    clock: Callable[[], float] | None = None,
    lease_timeout_s: float = 60.0,
    max_slabs: int = MAX_SLABS,
    policy: Callable[[], EvictionOrder] = LRU,
    disk: DiskStore | None = None,
    rules: DiskRules | None = None,
    quotas: Mapping[str, Quota] | None = None,
) -> Pool:
    """Make a pool whose tiers have so many pages (4 KiB each), all in host memory; ``gpu`` before ``dram``.

    With ``disk`` there is that tier behind them, which is then the pool's; by default everything that is
    committed is written there.
    """
    names = ("gpu", "dram")[-len(pages) :]
    tiers = [
        Tier(name, DramStore(count << 12), ordered_by(policy, quotas or {}), max_slabs)
        for name, count in zip(names, pages, strict=True)
    ]
    clock = clock or FakeClock()
    if disk is not None:
        rules = rules or DiskRules("always", WriteBudget(clock, 0), Planner(clock, mode="always"))
        tiers.append(Tier("disk", disk, ordered_by(policy, {}), rules=rules))
    return Pool(
        tiers, mover or InlineMover(), clock, lease_timeout_s=lease_timeout_s, quotas=quotas
    )
