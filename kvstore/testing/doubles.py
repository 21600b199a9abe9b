"""A clock and a mover that do what a test says, and bytes that say whose they are."""

from __future__ import annotations

import hashlib
from collections import deque
from typing import TYPE_CHECKING

import numpy as np

from kvstore.pool import Pool
from kvstore.tiers.arena import MAX_SLABS
from kvstore.tiers.dram import DramStore
from kvstore.tiers.mover import InlineMover, Mover
from kvstore.tiers.tier import Tier
from radix import LRU

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    from kvstore.namespace import Namespace
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
        self.jobs: deque[Callable[[], None]] = deque()
        self._max_waiting = max_waiting

    def has_room(self) -> bool:
        """Whether fewer than ``max_waiting`` jobs are kept."""
        return len(self.jobs) < self._max_waiting

    def submit(self, job: Callable[[], None]) -> bool:
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


def small_pool(
    *pages: int,
    mover: Mover | None = None,
    clock: Callable[[], float] | None = None,
    lease_timeout_s: float = 60.0,
    max_slabs: int = MAX_SLABS,
    policy: Callable[[], EvictionOrder] = LRU,
) -> Pool:
    """Make a pool whose tiers have so many pages (4 KiB each), all in host memory; ``gpu`` before ``dram``."""
    names = ("gpu", "dram")[-len(pages) :]
    tiers = [
        Tier(name, DramStore(count << 12), policy(), max_slabs)
        for name, count in zip(names, pages, strict=True)
    ]
    return Pool(
        tiers, mover or InlineMover(), clock or FakeClock(), lease_timeout_s=lease_timeout_s
    )
