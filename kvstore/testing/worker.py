"""A client process that stores, loads and compares, at random but repeatably, and may kill itself.

Every block has bytes that say whose it is (:func:`kvstore.testing.doubles.pattern`), so that a wrong
one is known wherever it comes from. What a worker has done is counted in a file that it maps: a worker
that is killed in the middle of a copy leaves its counts behind.
"""

from __future__ import annotations

import os
import random
import signal
import time
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

import kvstore
from kvstore.errors import LeaseExpiredError
from kvstore.namespace import KVLayout, Namespace
from kvstore.testing.doubles import pattern

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from numpy.typing import NDArray

LAYOUT = KVLayout(num_layers=8, num_kv_heads=2, head_dim=64, dtype="float32", block_tokens=4)
"""Blocks of 32 KiB."""
NAMESPACES = tuple(Namespace(b"weights", LAYOUT, salt=salt) for salt in ("one", "two"))
CONVERSATIONS = 24
MOST_BLOCKS = 24
DAWDLE_S = 0.01
PATIENCE_S = 2.0
"""A call that ends so long after its deadline counts as late: the machine may be busy."""

FIELDS = (
    "calls",
    "hits",
    "loaded_blocks",
    "void_loads",
    "stored_blocks",
    "failed_calls",
    "wrong_blocks",
    "late_calls",
)


def new_tally(path: Path) -> NDArray[np.int64]:
    """Make a file of counts, int64 ``[len(FIELDS)]`` in the order of ``FIELDS``."""
    return np.memmap(path, np.int64, "w+", shape=(len(FIELDS),))


def read_tally(path: Path) -> dict[str, int]:
    """Return the counts of a worker, alive or not."""
    counts = np.fromfile(path, np.int64)
    return dict(zip(FIELDS, counts.tolist(), strict=True))


@dataclass
class Worker:
    """One client and what it does."""

    store: kvstore.KVStore
    random: random.Random
    tally: NDArray[np.int64]
    deadline_s: float
    kill_rate: float = 0.0
    """Probability to kill itself at each of the points where that hurts most."""
    dawdle_rate: float = 0.0
    """Probability to do nothing for a moment there."""
    latencies_s: dict[str, list[float]] | None = None
    """Seconds of each call by its name, where somebody wants to know."""

    def step(self) -> None:
        """Store or load a prompt, or forget one."""
        namespace = self.random.choice(NAMESPACES)
        conversation = self.random.randrange(CONVERSATIONS)
        blocks = self.random.randint(1, MOST_BLOCKS)
        tokens = [7] * 8 + [conversation] * (4 * blocks)
        chance = self.random.random()
        if chance < 0.45:
            self.load(namespace, [*tokens, 0])
        elif chance < 0.85:
            self.save(namespace, tokens)
        elif chance < 0.98:
            self.call("lookup", self.store.lookup, namespace, tokens)
        else:
            with suppress(kvstore.KVStoreError):
                self.call("evict", self.store.evict, namespace, tokens)

    def save(self, namespace: Namespace, tokens: list[int]) -> None:
        """Store what is missing of a prompt."""
        reservation = self.call("reserve", self.store.reserve, namespace, tokens)
        self.point()
        key = np.array(tokens, "<i4").tobytes()
        for index, slot in zip(reservation.indices.tolist(), reservation.slots(), strict=True):
            bytes_ = pattern(namespace, key[: (index + 1) * namespace.key_bytes])
            half = len(bytes_) // 2
            slot[:half] = bytes_[:half]
            self.point()
            slot[half:] = bytes_[half:]
        if self.random.random() < 0.05:
            self.call("abort", self.store.abort, reservation)
            return
        self.point()
        self.count("stored_blocks", self.call("commit", self.store.commit, reservation))
        self.point()

    def load(self, namespace: Namespace, tokens: list[int]) -> None:
        """Copy what is known of a prompt, and compare it once the lease says that it counts."""
        lease = self.call("acquire", self.store.acquire, namespace, tokens)
        self.count("failed_calls", lease.failure is not None)
        copies = []
        for slot in lease.slots():
            copies.append(np.array(slot))
            self.point()
        try:
            self.call("release", self.store.release, lease)
        except LeaseExpiredError:
            self.count("void_loads", 1)
            return
        key = np.array(tokens, "<i4").tobytes()
        for index, copy in enumerate(copies):
            right = pattern(namespace, key[: (index + 1) * namespace.key_bytes])
            self.count("wrong_blocks", not np.array_equal(copy, right))
        self.count("hits", bool(copies))
        self.count("loaded_blocks", len(copies))

    def call(self, name: str, function: Callable[..., Any], *arguments: object) -> Any:  # noqa: ANN401
        """Call the store, and see how long it takes."""
        start = time.monotonic()  # noqa: TID251
        try:
            return function(*arguments)
        finally:
            seconds = time.monotonic() - start  # noqa: TID251
            self.count("calls", 1)
            self.count("late_calls", seconds > self.deadline_s + PATIENCE_S)
            if self.latencies_s is not None:
                self.latencies_s.setdefault(name, []).append(seconds)

    def point(self) -> None:
        """Die here, perhaps, or dawdle: in the middle of a copy, or between two calls."""
        chance = self.random.random()
        if chance < self.kill_rate:
            os.kill(os.getpid(), signal.SIGKILL)
        if chance > 1 - self.dawdle_rate:
            time.sleep(DAWDLE_S)  # noqa: TID251

    def count(self, field: str, number: int) -> None:
        """Add to the tally."""
        self.tally[FIELDS.index(field)] += number


def work(  # noqa: PLR0913 - one habit each
    url: str,
    tally_path: Path,
    seed: int,
    *,
    stop: Callable[[], bool],
    kill_rate: float = 0.0,
    dawdle_rate: float = 0.0,
    deadline_s: float = 1.0,
    latencies_s: dict[str, list[float]] | None = None,
) -> None:
    """Be a client of the daemon at ``url`` until ``stop()``; ``seed`` decides what is done."""
    tally = np.memmap(tally_path, np.int64, "r+")
    with kvstore.connect(url, deadline_s=deadline_s) as store:
        worker = Worker(
            store,
            random.Random(seed),  # noqa: S311
            tally,
            deadline_s,
            kill_rate,
            dawdle_rate,
            latencies_s,
        )
        while not stop():
            worker.step()
