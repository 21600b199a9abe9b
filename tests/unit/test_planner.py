"""The planner: what it learns from loads and prefills, what it chooses, and that nonsense changes nothing."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.planner import (
    DEFAULT_TOKENS_PER_S,
    MARGIN,
    MARGIN_S,
    MAX_NAMESPACES,
    PROBE_S,
    Plan,
    Planner,
    Queue,
)
from kvstore.testing import FakeClock

MIB = 1 << 20
TOKENS = 16
BLOCK = 2 * MIB
DISK_BLOCK_S = BLOCK / 1e9
NAMESPACE = b"n"
SIZES = [BLOCK * count for count in (1, 3, 10, 40, 160)]


def planner(**options):
    return Planner(FakeClock(), **options)


def plan(planner, num_blocks=100, **changes):
    asked = {"digest": NAMESPACE, "block_tokens": TOKENS, "start": 0, "block_bytes": BLOCK}
    return planner.plan(**asked | {"tier": "disk", "num_blocks": num_blocks} | changes)


def measure_tier(planner, latency_s, byte_s, *, tier="disk", sizes=SIZES, rounds=30):
    for _ in range(rounds):
        for size in sizes:
            planner.loaded(tier, size, latency_s + byte_s * size)


def measure_prefill(planner, cost_s, *, stop=4096, step=256, digest=NAMESPACE):
    """Compute a prompt in chunks; ``cost_s(n)`` are the seconds for its first n tokens."""
    for start in range(0, stop, step):
        planner.prefilled(digest, start, start + step, cost_s(start + step) - cost_s(start))


def linear(tokens_per_s):
    return lambda tokens: tokens / tokens_per_s


def knows_nothing(planner):
    fresh = Planner(FakeClock())
    return (
        not planner.is_measured("disk")
        and planner.expected("disk") == fresh.expected("disk")
        and planner.prefill_s(NAMESPACE, 0, 1 << 31) == fresh.prefill_s(NAMESPACE, 0, 1 << 31)
    )


class TestTiers:
    def test_defaults(self):
        fresh = planner()
        assert fresh.load_s("disk", 10**9) == pytest.approx(1.001)
        assert fresh.load_s("remote", 10**9) == pytest.approx(2.005)
        assert fresh.load_s("tape", 10**9) == fresh.load_s("remote", 10**9)

    @pytest.mark.parametrize("tier", ["disk", "remote"])
    @pytest.mark.parametrize(
        ("latency_s", "byte_s"), [(1e-4, 2e-10), (1e-2, 8e-9), (2e-2, 1e-10), (1e-3, 1e-9)]
    )
    def test_latency_and_bandwidth_are_told_apart(self, tier, latency_s, byte_s):
        measured = planner()
        measure_tier(measured, latency_s, byte_s, tier=tier)
        for size in SIZES:
            found_s = measured.load_s(tier, size)
            assert found_s == pytest.approx(latency_s + byte_s * size, rel=0.1, abs=2e-4)
        found_latency_s, bytes_per_s = measured.expected(tier)
        assert found_latency_s == pytest.approx(latency_s, rel=0.2, abs=2e-4)
        assert bytes_per_s == pytest.approx(1 / byte_s, rel=0.2)
        assert measured.is_measured(tier)

    def test_noise_does_not_carry_the_estimate_away(self):
        measured, random = planner(), np.random.default_rng(1)
        ratios = []
        for size in random.choice(SIZES, 400).tolist():
            true_s = 2e-4 + 2.5e-10 * size
            ratios.append(measured.load_s("disk", size) / true_s)
            measured.loaded("disk", size, true_s * random.lognormal(-0.02, 0.2))
        assert 0.7 < min(ratios[50:]) < 0.95 < np.median(ratios[50:]) < 1.1 < max(ratios[50:]) < 2

    def test_loads_of_one_size_are_predicted_well_whatever_they_consist_of(self):
        measured = planner()
        measure_tier(measured, 0.02, 1e-10, sizes=[MIB])
        assert measured.load_s("disk", MIB) == pytest.approx(0.02, rel=0.02)

    def test_small_loads_give_no_absurd_bandwidth(self):
        measured = planner()
        measure_tier(measured, 5e-5, 1e-13, sizes=[4096, 8192, 16384])
        assert measured.load_s("disk", 16384) < 1e-4
        assert measured.load_s("disk", 10**9) > 0.9
        assert measured.expected("disk")[1] <= 64e9

    @pytest.mark.parametrize("size", [MIB, 10**9])
    def test_what_is_read_from_a_cache_gives_no_absurd_numbers(self, size):
        measured = planner()
        measure_tier(measured, 0.0, 1e-14, sizes=[size], rounds=100)
        latency_s, bytes_per_s = measured.expected("disk")
        assert latency_s >= 0
        assert 0 < bytes_per_s <= 64e9
        assert 0 < measured.load_s("disk", size) < 0.02

    def test_bandwidth_is_trusted_a_little_beyond_what_was_loaded(self):
        measured = planner()
        measure_tier(measured, 1e-4, 1e-10)
        largest = max(SIZES)
        assert measured.load_s("disk", 2 * largest) == pytest.approx(2e-10 * largest, rel=0.2)
        beyond_s = measured.load_s("disk", 3 * largest) - measured.load_s("disk", 2 * largest)
        assert beyond_s == pytest.approx(1e-9 * largest, rel=0.01)

    def test_a_slow_tier_is_not_expected_faster_beyond(self):
        measured = planner()
        measure_tier(measured, 1e-3, 1e-8, sizes=[MIB, 2 * MIB])
        assert measured.load_s("disk", 100 * MIB) == pytest.approx(1e-8 * 100 * MIB, rel=0.25)

    @pytest.mark.parametrize("size", SIZES)
    def test_one_load_shows_a_slow_down_and_many_a_recovery(self, size):
        measured = planner()
        measure_tier(measured, 1e-3, 1e-9)
        usual_s = measured.load_s("disk", size)
        measured.loaded("disk", size, 100 * usual_s)
        assert measured.load_s("disk", size) == pytest.approx(100 * usual_s)
        measured.loaded("disk", size, usual_s)
        assert measured.load_s("disk", size) > 50 * usual_s
        for _ in range(15):
            measured.loaded("disk", size, usual_s)
        assert measured.load_s("disk", size) < 2 * usual_s

    def test_tiers_are_apart(self):
        measured = planner()
        measure_tier(measured, 1.0, 1e-7)
        assert measured.load_s("remote", MIB) == planner().load_s("remote", MIB)

    @pytest.mark.parametrize("seconds", [0.0, -1.0, math.nan, math.inf, -math.inf, 1e300])
    def test_seconds_that_cannot_be_are_ignored(self, seconds):
        measured = planner()
        measured.loaded("disk", MIB, seconds)
        measured.prefilled(NAMESPACE, 0, 256, seconds)
        assert knows_nothing(measured)

    @pytest.mark.parametrize("num_bytes", [0, -1, 10**30])
    def test_bytes_that_cannot_be_are_ignored(self, num_bytes):
        measured = planner()
        measured.loaded("disk", num_bytes, 1.0)
        assert knows_nothing(measured)


class TestPrefill:
    def test_default(self):
        assert planner().prefill_s(NAMESPACE, 100, 1100) == pytest.approx(
            1000 / DEFAULT_TOKENS_PER_S
        )

    def test_a_constant_rate(self):
        measured = planner()
        measure_prefill(measured, linear(2000))
        assert measured.prefill_s(NAMESPACE, 0, 3000) == pytest.approx(1.5)
        assert measured.prefill_s(NAMESPACE, 100, 101) == pytest.approx(1 / 2000)
        assert measured.prefill_s(b"other", 0, 3000) == pytest.approx(3000 / DEFAULT_TOKENS_PER_S)

    def test_attention_makes_later_tokens_dearer(self):
        def cost_s(tokens):
            return tokens * 1e-4 + tokens**2 * 5e-8

        measured = planner()
        for _ in range(4):
            measure_prefill(measured, cost_s, stop=8192)
        for start, stop in [(0, 256), (256, 1024), (0, 4096), (4096, 8192), (0, 8192)]:
            assert measured.prefill_s(NAMESPACE, start, stop) == pytest.approx(
                cost_s(stop) - cost_s(start), rel=0.15
            )

    def test_a_bucket_without_samples_is_as_fast_as_the_nearest_one(self):
        measured = planner()
        measured.prefilled(NAMESPACE, 256, 512, 256 / 4000)
        measured.prefilled(NAMESPACE, 2048, 4096, 2048 / 1000)
        rates = {256: 4000, 512: 4000, 1024: 1000, 2048: 1000, 1 << 20: 1000, 0: 4000}
        for position, tokens_per_s in rates.items():
            found_s = measured.prefill_s(NAMESPACE, position, position + 200)
            assert found_s == pytest.approx(200 / tokens_per_s)

    def test_of_two_nearest_buckets_the_earlier_one_counts(self):
        measured = planner()
        measured.prefilled(NAMESPACE, 0, 256, 256 / 4000)
        measured.prefilled(NAMESPACE, 512, 1024, 512 / 1000)
        assert measured.prefill_s(NAMESPACE, 256, 512) == pytest.approx(256 / 4000)

    def test_a_chunk_of_several_buckets_is_split(self):
        measured = planner()
        measured.prefilled(NAMESPACE, 0, 256, 256 / 2000)
        measured.prefilled(NAMESPACE, 256, 512, 256 / 1000)
        for _ in range(100):
            measured.prefilled(NAMESPACE, 0, 512, 512 / 1000)  # 4/3 of 2/3 of that
        assert measured.prefill_s(NAMESPACE, 0, 512) == pytest.approx(0.512, rel=0.02)
        assert measured.prefill_s(NAMESPACE, 0, 256) == pytest.approx(
            measured.prefill_s(NAMESPACE, 256, 512) / 2, rel=0.02
        )

    def test_short_chunks_do_not_count(self):
        measured = planner()
        measured.prefilled(NAMESPACE, 0, 16, 0.05)
        assert knows_nothing(measured)
        measure_prefill(measured, linear(20_000))
        for start in range(1000):
            measured.prefilled(NAMESPACE, start, start + 1, 0.01)
        assert measured.prefill_s(NAMESPACE, 0, 4096) == pytest.approx(4096 / 20_000)

    def test_an_engine_that_is_faster_is_believed_at_once(self):
        measured = planner()
        for _ in range(20):
            measure_prefill(measured, linear(100))  # the first ones compile kernels
        measure_prefill(measured, linear(20_000))
        assert measured.prefill_s(NAMESPACE, 0, 4096) == pytest.approx(4096 / 20_000)

    def test_one_chunk_that_looked_too_fast_is_soon_corrected(self):
        measured = planner()
        for _ in range(20):
            measure_prefill(measured, linear(2000))
        measured.prefilled(NAMESPACE, 0, 256, 256 / 8000)
        for _ in range(5):
            measured.prefilled(NAMESPACE, 0, 256, 256 / 2000)
        assert measured.prefill_s(NAMESPACE, 0, 256) > 0.7 * 256 / 2000

    def test_a_stall_of_an_engine_counts_little_and_a_slower_one_in_the_end(self):
        measured = planner()
        for _ in range(20):
            measure_prefill(measured, linear(20_000))
        measured.prefilled(NAMESPACE, 0, 64, 60.0)
        assert measured.prefill_s(NAMESPACE, 0, 256) < 256 / 20_000 * 1.1
        for _ in range(100):
            measure_prefill(measured, linear(2000))
        assert measured.prefill_s(NAMESPACE, 0, 256) == pytest.approx(256 / 2000, rel=0.1)

    @pytest.mark.parametrize(
        ("start", "stop"), [(100, 100), (200, 100), (-256, 256), (0, 1 << 40), (1 << 40, 1 << 41)]
    )
    def test_chunks_that_cannot_be_are_ignored(self, start, stop):
        measured = planner()
        measured.prefilled(NAMESPACE, start, stop, 1.0)
        assert knows_nothing(measured)

    def test_only_so_many_namespaces_are_known_the_last_used_ones(self):
        measured = planner()
        for number in range(MAX_NAMESPACES + 50):
            measured.prefilled(b"%d" % number, 0, 256, 1.0)
            measured.prefill_s(b"0", 0, 1)
            plan(measured, digest=b"1")
            measured.prefill_s(b"never seen", 0, 1)
        costs_s = [measured.prefill_s(b"%d" % number, 0, 256) for number in range(number + 1)]
        known = {number for number, cost_s in enumerate(costs_s) if cost_s == pytest.approx(1.0)}
        assert len(known) == MAX_NAMESPACES
        assert {0, 1, MAX_NAMESPACES + 49} <= known
        assert not {2, 51} & known


class TestChoice:
    def test_all_of_what_is_faster_to_load(self):
        measured = planner()
        measure_prefill(measured, linear(2000))
        assert plan(measured) == (
            100,
            pytest.approx(1e-3 + 100 * DISK_BLOCK_S),
            pytest.approx(1600 / 2000),
        )

    def test_none_of_what_is_faster_to_compute(self):
        measured = planner()
        measure_prefill(measured, linear(50_000))
        assert plan(measured) == (0, 0.0, pytest.approx(1600 / 50_000))

    def test_a_load_must_save_more_than_the_margin(self):
        tokens, load_s = 100 * TOKENS, 1e-3 + 100 * DISK_BLOCK_S
        for spare, num_blocks in [(0.99, 0), (1.01, 100)]:
            measured = planner()
            measure_prefill(measured, linear(tokens / (load_s * (1 + MARGIN) + spare * MARGIN_S)))
            assert plan(measured).num_blocks == num_blocks
        load_s = 1e-3 + DISK_BLOCK_S
        for spare, num_blocks in [(0.98, 0), (1.02, 1)]:
            measured = planner()
            cost_s = load_s * (1 + MARGIN) + spare * MARGIN_S
            measure_prefill(measured, linear(TOKENS / cost_s))
            assert plan(measured, num_blocks=1).num_blocks == num_blocks

    def test_with_attention_it_is_all_or_none_by_length(self):
        def cost_s(tokens):
            return tokens / 20_000 + tokens**2 / 1e8

        measured = planner()
        for _ in range(20):
            measure_prefill(measured, cost_s, stop=16384)
        chosen = [plan(measured, count).num_blocks for count in range(1, 1000)]
        shortest = next(count for count, found in enumerate(chosen, 1) if found)
        assert chosen == [0] * (shortest - 1) + list(range(shortest, 1000))
        gains = [cost_s(TOKENS * count) - DISK_BLOCK_S * count * 1.05 for count in range(1, 1000)]
        truly = next(count for count, gain in enumerate(gains, 1) if gain > 2e-3)
        assert shortest == pytest.approx(truly, rel=0.1)
        assert plan(measured, 10).num_blocks == 0
        assert plan(measured, 10, start=16384).num_blocks == 10

    @pytest.mark.parametrize("start", [0, 128])
    def test_a_part_when_later_tokens_are_cheaper(self, start):
        measured = planner()
        measured.prefilled(NAMESPACE, 0, 256, 256 / 2000)
        measured.prefilled(NAMESPACE, 256, 4096, 3840 / 50_000)
        assert plan(measured, start=start) == (
            (256 - start) // TOKENS,
            pytest.approx(1e-3 + (256 - start) // TOKENS * DISK_BLOCK_S),
            pytest.approx((256 - start) / 2000 + (1344 + start) / 50_000),
        )

    def test_a_part_when_a_load_would_be_much_larger_than_any_before_and_it_grows(self):
        measured = planner()
        measure_prefill(measured, linear(20_000))  # 2.6 GB/s, the disk has 10 and the default is 1
        measure_tier(measured, 1e-4, 1e-10, sizes=[BLOCK, 20 * BLOCK])
        sizes = []
        while not sizes or sizes[-1] < 200:
            sizes.append(plan(measured, 200).num_blocks)
            measured.loaded("disk", sizes[-1] * BLOCK, 1e-4 + 1e-10 * sizes[-1] * BLOCK)
        assert sizes == [40, 80, 160, 200]

    def test_the_queue_counts(self):
        measured = planner()
        measure_prefill(measured, linear(2000))
        measure_tier(measured, 1e-3, 1e-9)
        free = plan(measured)
        queued = plan(measured, queue=Queue(1, 10**8))
        assert queued.num_blocks == 100
        assert 0.1 < queued.load_s - free.load_s < 0.11
        assert plan(measured, queue=Queue(1, 10**9)).num_blocks == 0

    def test_every_load_in_the_queue_costs_its_latency_however_small_those_before_were(self):
        measured = planner()
        measure_prefill(measured, linear(100))
        measure_tier(measured, 0.02, 1e-10, sizes=[10 * MIB, MIB, 4096])
        latency_s, bytes_per_s = measured.expected("disk")
        for loads in (1, 100):
            queue = Queue(loads, 100 * MIB)
            extra_s = plan(measured, queue=queue).load_s - plan(measured).load_s
            assert extra_s == pytest.approx(loads * latency_s + 100 * MIB / bytes_per_s)
            assert measured.wait_s("disk", queue) >= extra_s

    def test_no_blocks(self):
        for mode in ("auto", "always", "never"):
            for num_blocks in (0, -1):
                assert plan(planner(mode=mode), num_blocks) == Plan(0, 0.0, 0.0)

    def test_always_and_never(self):
        for tokens_per_s in (10, 1_000_000):
            always, never = planner(mode="always"), planner(mode="never")
            for measured in (always, never):
                measure_prefill(measured, linear(tokens_per_s))
            cost_s = pytest.approx(1600 / tokens_per_s)
            assert plan(always) == (100, pytest.approx(1e-3 + 100 * DISK_BLOCK_S), cost_s)
            assert plan(never) == (0, 0.0, cost_s)
            assert not always.probe("disk")
            assert not never.probe("disk")


class TestProbes:
    def test_a_disk_that_breaks_down_is_given_up_after_one_load_and_comes_back_by_probes(self):
        clock = FakeClock()
        measured = Planner(clock)
        measure_prefill(measured, linear(2000))
        measure_tier(measured, 1e-3, 1e-9)
        healthy = plan(measured)
        assert healthy.num_blocks == 100
        assert not measured.probe("disk")
        measured.loaded("disk", 100 * BLOCK, 100 * healthy.load_s)
        assert plan(measured).num_blocks == 0
        for _ in range(20):  # it stays broken
            clock.advance(PROBE_S)
            assert measured.probe("disk")
            measured.loaded("disk", 4 * BLOCK, 0.1 + 4 * BLOCK * 1e-7)
            assert plan(measured).num_blocks == 0
        probes = 0
        while plan(measured).num_blocks == 0:
            clock.advance(PROBE_S)
            assert measured.probe("disk")
            measured.loaded("disk", 4 * BLOCK, 1e-3 + 4 * BLOCK * 1e-9)
            probes += 1
        assert 3 < probes < 15
        assert plan(measured).num_blocks == 100
        clock.advance(PROBE_S)
        assert not measured.probe("disk")

    def test_probes_keep_their_distance_from_loads_and_each_other(self):
        clock = FakeClock()
        measured = Planner(clock)
        assert not measured.probe("disk")
        assert plan(measured).num_blocks == 0  # 1 GB/s and 10,000 tokens/s
        assert not measured.probe("remote")
        assert [measured.probe("disk") for _ in range(3)] == [True, False, False]
        clock.advance(PROBE_S / 2)
        assert not measured.probe("disk")
        measured.loaded("disk", MIB, 0.01)
        clock.advance(PROBE_S / 2)
        assert not measured.probe("disk")
        clock.advance(PROBE_S / 2)
        assert [measured.probe("disk") for _ in range(2)] == [True, False]

    def test_a_tier_that_is_used_again_is_not_probed(self):
        clock = FakeClock()
        measured = Planner(clock)
        measure_prefill(measured, linear(2000))
        assert plan(measured, 1, queue=Queue(1, 10**10)).num_blocks == 0
        assert plan(measured).num_blocks == 100
        assert not measured.probe("disk")


def test_a_request_is_slower_than_computing_only_when_the_disk_broke_down_since_the_last_load():
    clock, random = FakeClock(), np.random.default_rng(2)
    measured = Planner(clock)
    slower, saved_s = [], 0.0
    measure_prefill(measured, linear(5000), stop=8192)
    for request in range(900):
        factor = 100 if 300 <= request < 600 else 1
        count = int(random.choice([1, 2, 5, 20, 100, 400]))
        num_blocks, *_ = plan(measured, count)
        if num_blocks:
            load_s = factor * (2e-4 + num_blocks * BLOCK * 3e-10) * random.uniform(0.8, 1.2)
            measured.loaded("disk", num_blocks * BLOCK, load_s)
            saved_s += num_blocks * TOKENS / 5000 - load_s
            if load_s > num_blocks * TOKENS / 5000:
                slower.append(request)
        elif measured.probe("disk"):
            probed = min(count, 8)
            measured.loaded("disk", probed * BLOCK, factor * (2e-4 + probed * BLOCK * 3e-10))
        clock.advance(1.0)
    assert len(slower) == 1
    assert 300 <= slower[0] < 310
    assert saved_s > 50  # of about 150 s to compute what was asked for while the disk was well


amounts = st.integers(-(10**12), 10**12) | st.integers(1, 10**9)
times = st.floats() | st.floats(1e-6, 10)
events = st.one_of(
    st.tuples(st.just("loaded"), st.just("disk"), amounts, times),
    st.tuples(st.just("prefilled"), st.just(NAMESPACE), amounts, amounts, times),
    st.tuples(
        st.just("prefilled"),
        st.just(NAMESPACE),
        st.integers(0, 5000),
        st.integers(5064, 9000),
        times,
    ),
)


@given(
    history=st.lists(events, max_size=30),
    start=st.integers(0, 10_000),
    num_blocks=st.integers(1, 300),
    block_bytes=st.integers(1, 10**8),
    queue=st.builds(Queue, st.integers(0, 100), st.integers(0, 10**9)),
)
def test_whatever_was_measured_a_plan_is_the_best_by_the_model_and_never_worse_than_none(
    history, start, num_blocks, block_bytes, queue
):
    measured = planner()
    for name, *arguments in history:
        getattr(measured, name)(*arguments)
    found = plan(measured, num_blocks, start=start, block_bytes=block_bytes, queue=queue)
    loads_s = [measured.load_s("disk", block_bytes * count) for count in range(num_blocks + 1)]
    costs_s = [
        measured.prefill_s(NAMESPACE, start, start + TOKENS * count)
        for count in range(num_blocks + 1)
    ]
    assert all(map(math.isfinite, [*found, *loads_s, *costs_s]))
    assert min(loads_s) >= 0
    assert costs_s[1] > 0
    assert sorted(loads_s) == loads_s
    assert sorted(costs_s) == costs_s
    assert found.prefill_s == pytest.approx(costs_s[-1])
    everything = Planner(FakeClock(), mode="always")
    for name, *arguments in history:
        getattr(everything, name)(*arguments)
    queue_s = plan(everything, 1, block_bytes=block_bytes, queue=queue).load_s
    queue_s -= loads_s[1]
    assert queue_s >= -1e-9
    gains_s = [cost - load - queue_s for cost, load in zip(costs_s, loads_s, strict=True)][1:]
    best = int(np.argmax(gains_s))
    tiny_s = 1e-9 * (1 + costs_s[-1] + loads_s[-1] + queue_s)
    if found.num_blocks:
        assert found.load_s == pytest.approx(loads_s[found.num_blocks] + queue_s)
        gain_s = gains_s[found.num_blocks - 1]
        assert gain_s > MARGIN * found.load_s + MARGIN_S - tiny_s
        assert gain_s >= gains_s[best] - tiny_s
    else:
        assert found.load_s == 0.0
        assert gains_s[best] <= MARGIN * (loads_s[best + 1] + queue_s) + MARGIN_S + tiny_s
    assert all(map(math.isfinite, measured.expected("disk")))


@given(history=st.lists(events, max_size=60))
def test_no_measurement_leaves_a_planner_that_cannot_recover(history):
    measured = planner()
    for name, *arguments in history:
        getattr(measured, name)(*arguments)
    measure_tier(measured, 1e-3, 1e-9, rounds=40)
    for _ in range(250):
        measured.prefilled(NAMESPACE, 0, 256, 256 / 2000)
    assert measured.load_s("disk", 40 * BLOCK) == pytest.approx(1e-3 + 40 * DISK_BLOCK_S, rel=0.2)
    assert measured.prefill_s(NAMESPACE, 0, 256) == pytest.approx(256 / 2000, rel=0.2)
