"""The prefix of a prompt, between a store and an engine's KV tensor: load it, save it, never fail.

This is the one place where a failure of the store becomes a counted miss. A load counts only after
its lease was released in time: until then the bytes may have been overwritten. A save is committed
only after the bytes are in the slots.
"""

from __future__ import annotations

import logging
from collections import Counter
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from threading import Event
from typing import TYPE_CHECKING, Literal

from engine_plugin.layout import load_blocks, save_blocks
from kvstore.errors import KVStoreError, LeaseError, LeaseExpiredError, UnavailableError
from kvstore.retention import NORMAL_PRIORITY, check_priority, lifetime_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import numpy as np
    import torch
    from numpy.typing import NDArray

    from kvstore.interface import KVStore
    from kvstore.lease import Lease
    from kvstore.namespace import Namespace

logger = logging.getLogger(__name__)

POLL_S = 0.002
"""How long at least before the store is asked again for blocks that are being loaded."""
LEAST_MEASURED_TOKENS = 32
"""Fewer tokens computed say little about the rate of prefill."""


@dataclass(slots=True)
class RequestStats:
    """Where the tokens and the time to first token of one request went (summed over a batch).

    ``prefill_s`` includes ``lookup_s`` (fingerprint and index) and ``load_s``; the rest of it is
    the forward pass. A request that went past the cache has no times but ``queue_s``.
    """

    prompt_tokens: int = 0
    hit_tokens: int = 0
    hit_tokens_by_tier: Counter[str] = field(default_factory=Counter)
    miss: str | None = None
    """Why less was loaded than could have been: ``too_short``, ``not_stored`` (or on disk, and not worth
    loading), ``not_loaded`` (on disk, and not in memory in time), ``corrupt``,
    ``expired``, ``failed``, ``bypass.`` and a reason, or, of a daemon that gave no answer, the
    ``reason`` of :class:`kvstore.errors.UnavailableError`: ``unreachable``, ``timeout``, ``lost``,
    ``breaker``, ``refused``, ``protocol``, ``closed``."""
    queue_s: float = 0.0
    network_s: float = 0.0
    lookup_s: float = 0.0
    load_s: float = 0.0
    prefill_s: float = 0.0
    sample_s: float = 0.0
    offload_s: float = 0.0
    offloaded_blocks: int = 0

    @property
    def ttft_s(self) -> float:
        """Seconds from the call to the first token."""
        return self.queue_s + self.network_s + self.prefill_s + self.sample_s


class PrefixStore:
    """A store as an engine wants it: by prompts, and fail-open. Not thread-safe by itself."""

    def __init__(
        self,
        store: KVStore,
        *,
        verify: Literal["never", "always"],
        on_failure: Literal["recompute", "raise"],
        clock: Callable[[], float],
        priority: int = NORMAL_PRIORITY,
        ttl_s: float | None = None,
    ) -> None:
        """Use ``store``, which stays the caller's; ``priority`` and ``ttl_s`` are of what is stored.

        Raises:
            UsageError: ``priority`` or ``ttl_s`` is impossible.
        """
        check_priority(priority)
        lifetime_of(ttl_s)
        self._priority, self._ttl_s = priority, ttl_s
        self._store, self._clock = store, clock
        self._verify, self._on_failure = verify, on_failure
        self.counts: Counter[str] = Counter()
        self._pause = Event()

    @contextmanager
    def tolerate(self, what: str) -> Iterator[list[str]]:
        """Turn a failure inside into a counted reason, unless ``on_failure`` is ``"raise"``.

        Yields a list that is empty while nothing failed.
        """
        reasons: list[str] = []
        try:
            yield reasons
        except Exception as error:
            reason = _reason(error)
            reasons.append(reason)
            count = self.counts[f"{what}.{reason}"] = self.counts[f"{what}.{reason}"] + 1
            level = logging.DEBUG if count > 1 else logging.WARNING
            logger.log(level, "%s %s, going on without: %r", what, reason, error)
            if self._on_failure == "raise":
                raise

    def load(
        self,
        namespace: Namespace,
        tokens: NDArray[np.int32],
        destination: torch.Tensor,
        stats: RequestStats,
    ) -> int:
        """Copy the known blocks of a prompt to the head of ``destination``.

        ``destination`` is ``[num_layers, 2, num_kv_heads, capacity, head_dim]``, the caller's.
        Returns how many leading tokens of it are valid now: whole blocks, fewer than all tokens,
        and 0 after any failure.
        """
        layout = namespace.layout
        possible = (len(tokens) - 1) // layout.block_tokens  # the last token must be computed
        reason = "too_short" if possible == 0 else "not_stored"
        tiers: Counter[str] = Counter()
        lease: Lease | None = None
        started = looked_up = self._clock()
        with self.tolerate("load") as failed:
            lease = self._store.acquire(namespace, tokens, may_wait=True)
            looked_up, coming = self._clock(), lease.coming_blocks
            lease = self._wait_for(lease, namespace, tokens)
            try:
                blocks = lease.num_blocks
                if coming and not blocks:
                    reason = "not_loaded"
                if self._verify == "always" and blocks:
                    blocks = self._store.verify(lease)
                    reason = "corrupt" if blocks < lease.num_blocks else reason
                blocks = min(blocks, possible)
                load_blocks(lease, destination, blocks)
            except BaseException:  # what happened first is what counts, above all an interrupt
                with suppress(LeaseError):
                    self._store.release(lease)
                raise
            self._store.release(lease)
            in_memory = max(0, lease.num_blocks - coming)
            if blocks > in_memory:
                tiers["disk"] = (blocks - in_memory) * layout.block_tokens
            for tier in lease.tiers[: min(blocks, in_memory)].tolist():
                tiers[self._store.tier_names[tier]] += layout.block_tokens
        stats.lookup_s += looked_up - started
        stats.load_s += self._clock() - looked_up
        if failed:
            reason = failed[0]
        if lease is not None and lease.failure:
            reason = lease.failure
        self._count(len(tokens), tiers, reason, stats)
        return tiers.total()

    def _wait_for(self, lease: Lease, namespace: Namespace, tokens: NDArray[np.int32]) -> Lease:
        """Return ``lease``, or another one after what it asks to wait for has come from a slower tier.

        Waits for ``patience_s``: then what has come by then is taken.
        """
        give_up_at = self._clock() + lease.patience_s
        while lease.coming_blocks and not lease.num_blocks:
            left_s = give_up_at - self._clock()
            if left_s <= 0:
                self.counts["late"] += 1
                return self._store.acquire(namespace, tokens)
            self._pause.wait(min(left_s, max(lease.ready_in_s, POLL_S)))
            lease = self._store.acquire(namespace, tokens, may_wait=True)
        return lease

    def computed(self, namespace: Namespace, start: int, stop: int, seconds: float) -> None:
        """Tell the store how long the model took for tokens ``[start, stop)`` of a prompt."""
        if stop - start >= LEAST_MEASURED_TOKENS:
            with self.tolerate("report"):
                self._store.prefilled(namespace, start, stop, seconds)

    def _count(
        self, prompt_tokens: int, tiers: Counter[str], reason: str, stats: RequestStats
    ) -> None:
        hit_tokens = tiers.total()
        stats.hit_tokens += hit_tokens
        stats.hit_tokens_by_tier.update(tiers)
        if not hit_tokens or reason == "corrupt":
            stats.miss = reason
        self.counts["prompts"] += 1
        self.counts["prompt_tokens"] += prompt_tokens
        self.counts["hit_tokens"] += hit_tokens
        self.counts["hit" if hit_tokens else f"miss.{reason}"] += 1

    def save(
        self,
        namespace: Namespace,
        tokens: NDArray[np.int32],
        source: torch.Tensor,
        stats: RequestStats,
    ) -> None:
        """Offload the blocks of ``tokens`` that the store lacks.

        ``source`` is ``[num_layers, 2, num_kv_heads, capacity, head_dim]`` and holds the KV of all
        ``tokens``; a last part that fills no block is not stored.
        """
        started = self._clock()
        with self.tolerate("offload"):
            reservation = self._store.reserve(
                namespace, tokens, priority=self._priority, ttl_s=self._ttl_s
            )
            try:
                save_blocks(reservation, source)
                stats.offloaded_blocks += self._store.commit(reservation)
            except BaseException:
                with suppress(KVStoreError):  # a commit that failed may have ended it
                    self._store.abort(reservation)
                raise
            self.counts["offload.refused_blocks"] += reservation.refused
            if reservation.failure:
                self.counts[f"offload.{reservation.failure}"] += 1
        stats.offload_s += self._clock() - started


def _reason(error: Exception) -> str:
    """Return the word under which a failure is counted."""
    if isinstance(error, UnavailableError):
        return error.reason
    return "expired" if isinstance(error, LeaseExpiredError) else "failed"
