"""Prefixes between a store that misbehaves and an engine: what happened first is what counts."""

from __future__ import annotations

import time
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from engine_plugin.prefix import PrefixStore, RequestStats  # noqa: E402
from kvstore.errors import (  # noqa: E402
    LeaseExpiredError,
    LeaseNotHeldError,
    UnavailableError,
    UsageError,
)
from kvstore.lease import LEAST_PATIENCE_S, PATIENCE  # noqa: E402
from kvstore.namespace import KVLayout, Namespace  # noqa: E402
from kvstore.testing import FakeClock, small_pool  # noqa: E402

NAMESPACE = Namespace(b"w", KVLayout(1, 1, 8, "float32", block_tokens=4))
TOKENS = np.arange(9, dtype=np.int32)
KV = torch.arange(2 * 12 * 8, dtype=torch.float32).reshape(1, 2, 1, 12, 8)


def prefixes(store, **options):
    given = {"verify": "never", "on_failure": "recompute", "clock": time.perf_counter}
    return PrefixStore(store, **given | options)


def raising(error):
    def call(*arguments):
        raise error

    return call


def test_an_interrupt_is_not_swallowed_by_a_lease_that_ends_with_it():
    with small_pool(4) as pool:
        wrapped = prefixes(pool, verify="always")
        wrapped.save(NAMESPACE, TOKENS, KV, RequestStats())
        pool.verify = raising(KeyboardInterrupt())
        pool.release = raising(LeaseExpiredError("it ended with its connection"))
        with pytest.raises(KeyboardInterrupt):
            wrapped.load(NAMESPACE, TOKENS, KV.clone(), RequestStats())


def test_a_commit_that_fails_is_counted_as_what_it_was():
    with small_pool(4) as pool:
        wrapped = prefixes(pool)
        commit = pool.commit

        def fail(reservation):
            commit(reservation)
            raise OSError("no answer")

        pool.commit = fail
        wrapped.save(NAMESPACE, TOKENS, KV, RequestStats())
        assert wrapped.counts["offload.failed"] == 1
        pool.commit = raising(LeaseNotHeldError("ended before"))
        wrapped.save(NAMESPACE, np.arange(100, 109, dtype=np.int32), KV, RequestStats())
        assert wrapped.counts["offload.failed"] == 2
        assert pool.stats().num_reservations == 0


def test_the_reason_of_a_commit_that_ended_the_reservation_is_the_one_that_counts():
    """Aborting what has ended is refused: that says nothing about why it failed."""
    with small_pool(4) as pool:
        wrapped = prefixes(pool)
        commit = pool.commit

        def lose(reservation):
            commit(reservation)
            raise UnavailableError("lost", "the daemon is gone")

        pool.commit = lose
        wrapped.save(NAMESPACE, TOKENS, KV, RequestStats())
        assert wrapped.counts == {"offload.lost": 1}
        wrapped = prefixes(pool, on_failure="raise")
        with pytest.raises(UnavailableError):
            wrapped.save(NAMESPACE, np.arange(100, 109, dtype=np.int32), KV, RequestStats())
        assert pool.stats().num_reservations == 0


@pytest.mark.parametrize(("comes_after_s", "hit_tokens"), [(2.0, 8), (2.9, 8), (3.1, 0)])
def test_a_load_is_waited_for_a_little_longer_than_expected(comes_after_s, hit_tokens):
    clock = FakeClock()
    with small_pool(4, clock=clock) as pool:
        wrapped = prefixes(pool, clock=clock)
        wrapped.save(NAMESPACE, TOKENS, KV, RequestStats())
        acquire = pool.acquire

        def load(namespace, tokens, *, may_wait=False):
            if clock() >= comes_after_s:
                return acquire(namespace, tokens)
            nothing = acquire(namespace, TOKENS[:1])
            return replace(nothing, coming_blocks=2, ready_in_s=2.0) if may_wait else nothing

        pool.acquire = load
        wrapped._pause = SimpleNamespace(wait=clock.advance)
        stats = RequestStats()
        assert wrapped.load(NAMESPACE, TOKENS, KV.clone(), stats) == hit_tokens
        assert stats.miss == (None if hit_tokens else "not_loaded")
        assert clock() <= PATIENCE * 2.0 + LEAST_PATIENCE_S + 1e-9
        assert wrapped.counts["late"] == (not hit_tokens)


def test_what_is_stored_has_its_priority_and_its_time():
    clock = FakeClock()
    with small_pool(4, clock=clock) as pool:
        prefixes(pool, priority=90, ttl_s=10).save(NAMESPACE, TOKENS, KV, RequestStats())
        assert next(pool._residency.trees[NAMESPACE.digest].walk()).level == 90
        assert pool.lookup(NAMESPACE, TOKENS) == 8
        clock.advance(10)
        assert pool.lookup(NAMESPACE, TOKENS) == 0


@pytest.mark.parametrize("options", [{"priority": 101}, {"ttl_s": 0}])
def test_impossible_retention_is_refused_before_any_request(options):
    with pytest.raises(UsageError), small_pool(4) as pool:
        prefixes(pool, **options)
