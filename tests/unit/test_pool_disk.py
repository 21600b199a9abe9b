"""A pool with a disk tier: what goes there, what comes back, and what is found after a restart."""

import errno
import shutil
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import pytest

from kvstore.assembly import POLICIES
from kvstore.errors import UsageError
from kvstore.namespace import KVLayout, Namespace
from kvstore.offload import MAX_ROW, WRITE_BACK_FROM, engine_of
from kvstore.planner import Plan, Planner
from kvstore.quotas import Quota
from kvstore.testing import FakeClock, ManualMover, pattern, small_pool
from kvstore.testing.disk import FaultySystem, fails_at
from kvstore.tiers.disk import DiskOptions, DiskStore, slot_bytes_of
from kvstore.tiers.mover import InlineMover, Lanes
from kvstore.tiers.rules import DiskRules, WriteBudget

WIDTH = 4
SPACE = Namespace(b"weights", KVLayout(1, 1, 256, "float32", WIDTH))
"""Blocks of 8 KiB: two pages in memory, three on disk."""
OPTIONS = DiskOptions(
    8 << 20, segment_bytes=1 << 20, reserve_bytes=0, manifest_bytes=1 << 20, threads=2
)
TIGHT = replace(OPTIONS, budget_bytes=(5 << 20) + (1 << 18))
"""Room for 21 blocks."""


def opened(
    path,
    *,
    pages=64,
    options=OPTIONS,
    system=None,
    clock=None,
    admission="value",
    bytes_per_s=0,
    load="always",
    **more,
):
    clock = clock or FakeClock()
    rules = DiskRules(admission, WriteBudget(clock, bytes_per_s), Planner(clock, mode=load))
    return small_pool(
        pages, clock=clock, disk=DiskStore(path, options, clock, system), rules=rules, **more
    )


def prompt(number, num_blocks, shared=0):
    """Tokens of a prompt; those with one ``number``, and ``shared`` blocks of all, begin alike."""
    tokens = np.arange(num_blocks * WIDTH + 1, dtype=np.int32)
    tokens[shared * WIDTH :] += 1000 * (number + 1)
    return tokens


def put(pool, tokens, space=SPACE):
    key = tokens.astype("<i4").tobytes()
    with pool.reserve(space, tokens) as reservation:
        for index, slot in zip(reservation.indices.tolist(), reservation.slots(), strict=True):
            slot[:] = pattern(space, key[: (index + 1) * space.key_bytes])
    return reservation


def check(pool, tokens, lease, space=SPACE):
    """Compare what ``lease`` shows with what was stored; return the number of blocks."""
    key = tokens.astype("<i4").tobytes()
    for index, slot in enumerate(lease.slots()):
        assert np.array_equal(slot, pattern(space, key[: (index + 1) * space.key_bytes]))
    return lease.num_blocks


def get(pool, tokens, space=SPACE, **more):
    with pool.acquire(space, tokens, **more) as lease:
        return check(pool, tokens, lease, space)


def on_disk(pool):
    return pool.stats().tiers[-1].num_blocks


def in_memory(pool):
    return pool.stats().tiers[0].num_blocks


class TestAdmission:
    def test_every_block_is_written_when_it_is_committed(self, path):
        with opened(path, admission="always") as pool:
            put(pool, prompt(0, 5))
            assert on_disk(pool) == 5
            pool.check_invariants()

    def test_blocks_that_are_used_again_are_written(self, path):
        with opened(path, admission="second_use") as pool:
            put(pool, prompt(0, 5))
            put(pool, prompt(1, 3))
            assert on_disk(pool) == 0
            assert get(pool, prompt(0, 5)) == 5
            assert on_disk(pool) == 5
            pool.check_invariants()

    def test_what_is_about_to_be_evicted_is_written(self, path):
        clock = FakeClock()
        with opened(path, pages=40, clock=clock) as pool:
            for number in range(8):  # of at most 20 blocks in memory
                clock.advance(1.0)
                put(pool, prompt(number, 5))
                pool.check_invariants()
            assert in_memory(pool) <= 20
            assert on_disk(pool) >= 10
            assert get(pool, prompt(3, 5)) == 5, "evicted from memory, and back from disk"

    def test_second_use_alone_writes_nothing_back(self, path):
        clock = FakeClock()
        with opened(path, pages=40, clock=clock, admission="second_use") as pool:
            for number in range(8):
                clock.advance(1.0)
                put(pool, prompt(number, 5))
            assert on_disk(pool) == 0

    def test_what_is_never_loaded_is_not_written(self, path):
        with opened(path, admission="always", load="never") as pool:
            put(pool, prompt(0, 5))
            assert on_disk(pool) == 0
            assert pool.stats().counts["unstored_blocks", "disk", "not_worth_loading"] == 5

    def test_no_more_is_written_than_the_budget_allows(self, path):
        clock = FakeClock()
        slot = slot_bytes_of(SPACE)
        with opened(path, pages=400, clock=clock, admission="always", bytes_per_s=slot) as pool:
            put(pool, prompt(0, 25))
            assert on_disk(pool) == 10, "ten seconds' worth at once"
            assert pool.stats().counts["unstored_blocks", "disk", "budget"] == 15
            clock.advance(3.0)
            assert get(pool, prompt(0, 25)) == 25
            assert on_disk(pool) == 13
            pool.check_invariants()


class TestTheEnd:
    """What only memory has when the pool is closed."""

    def kept(self, path, count, **more):
        """Close a pool with ``count`` prompts of 4 blocks; return what is on disk of each."""
        with opened(path, pages=200, **more) as pool:
            for number in range(count):
                put(pool, prompt(number, 4, shared=1))
            assert on_disk(pool) == 0
        with opened(path) as pool:
            pool.check_invariants()
            loaded = [get(pool, prompt(number, 4, shared=1)) for number in range(count)]
            assert sum(loaded) - (len(list(filter(None, loaded))) - 1) == on_disk(pool) or not any(
                loaded
            )
            return loaded

    def test_is_written(self, path):
        assert self.kept(path, 6) == [4] * 6

    def test_is_written_by_few_moves_at_a_time(self, path):
        assert self.kept(path, 6, mover=ManualMover(2)) == [4] * 6

    def test_is_not_written_where_a_second_use_is_asked_for(self, path):
        assert self.kept(path, 6, admission="second_use") == [0] * 6

    def test_is_written_within_the_budget_the_newest_first(self, path):
        slot = slot_bytes_of(SPACE)
        assert self.kept(path, 6, bytes_per_s=slot) == [1, 1, 1, 4, 4, 4]

    def test_is_left_out_where_it_is_not_worth_loading(self, path):
        other = Namespace(b"other weights", SPACE.layout)
        with opened(path) as pool:
            put(pool, prompt(0, 4))
            put(pool, prompt(0, 4), other)
            pool._residency.offload.rules.planner.plan = lambda digest, *_, **__: Plan(
                4 * (digest == engine_of(SPACE)), 0.0, 1.0
            )
        with opened(path) as pool:
            assert get(pool, prompt(0, 4)) == 4
            assert get(pool, prompt(0, 4), other) == 0

    def test_is_written_with_what_only_faster_memory_had(self, path):
        def opened_with_gpu():
            clock = FakeClock()
            rules = DiskRules("value", WriteBudget(clock, 0), Planner(clock, mode="always"))
            disk = DiskStore(path, OPTIONS, clock)
            return small_pool(80, 40, disk=disk, rules=rules, clock=clock)

        def known(pool):
            return [pool.lookup(SPACE, prompt(number, 6, shared=1)) for number in range(6)]

        with opened_with_gpu() as pool:
            for number in range(6):
                put(pool, prompt(number, 6, shared=1))
            assert (pool._residency.table.slots[1:] < 0).all(axis=0).any(), "gpu alone has some"
            before = known(pool)
        with opened_with_gpu() as pool:
            assert known(pool) == before

    def test_is_not_written_for_ever(self, path):
        clock, system = FakeClock(), FaultySystem()
        system.fault = lambda name, number: clock.advance(4.0 * (name == "write"))
        loaded = self.kept(path, 8, clock=clock, system=system)
        assert loaded[0] <= 1
        assert loaded[-1] == 4


class TestLoading:
    def evicted(self, path, **more):
        """A pool whose memory has none of the prompt 0, which is on disk."""
        pool = opened(path, pages=40, admission="always", **more)
        put(pool, prompt(0, 5))
        pool.drain()
        assert pool.demote(SPACE, prompt(0, 5), "dram") == 5
        return pool

    def test_comes_back_from_disk(self, path):
        with self.evicted(path) as pool:
            assert pool.lookup(SPACE, prompt(0, 5)) == 5 * WIDTH
            assert get(pool, prompt(0, 5)) == 5
            counts = pool.stats().counts
            assert counts["lookup_tokens", "disk"] == 5 * WIDTH
            assert get(pool, prompt(0, 5)) == 5
            counts = pool.stats().counts
            assert counts["lookup_tokens", "disk"] == 5 * WIDTH
            assert counts["lookup_tokens", "dram"] == 5 * WIDTH
            assert counts["moved_blocks", "disk", "dram"] == 5
            pool.check_invariants()

    def test_what_a_lease_shows_is_memory(self, path):
        with self.evicted(path) as pool, pool.acquire(SPACE, prompt(0, 5)) as lease:
            assert [buffer.nbytes for buffer in lease.buffers] == [40 << 12]

    def test_who_can_wait_is_told_how_long(self, path):
        mover = ManualMover()
        with self.evicted(path, mover=mover) as pool:
            lease = pool.acquire(SPACE, prompt(0, 5), may_wait=True)
            assert (lease.num_blocks, lease.coming_blocks) == (0, 5)
            assert lease.ready_in_s > 0
            pool.release(lease)
            again = pool.acquire(SPACE, prompt(0, 5), may_wait=True)
            assert again.coming_blocks == 5
            assert len(mover.jobs) == 1, "one load for all who want it"
            mover.drain()
            assert get(pool, prompt(0, 5), may_wait=True) == 5
            counts = pool.stats().counts
            assert (counts["lookups",], counts["deferred_lookups",]) == (1, 2)

    def test_who_cannot_wait_gets_what_is_in_memory(self, path):
        mover = ManualMover()
        with self.evicted(path, mover=mover) as pool:
            assert get(pool, prompt(0, 5)) == 0
            mover.drain()
            assert get(pool, prompt(0, 5)) == 5

    def test_who_computed_what_only_the_disk_has_brings_it_back_to_memory(self, path):
        clock, system = FakeClock(), FaultySystem()
        with self.evicted(path, system=system, clock=clock) as pool:
            system.fault = fails_at(1, errno.EIO, 1 << 30)
            assert get(pool, prompt(0, 5)) == 0, "it cannot be read"
            reservation = put(pool, prompt(0, 8))
            assert reservation.indices.tolist() == [*range(8)]
            pool.check_invariants()
            assert get(pool, prompt(0, 8)) == 8
            assert pool.stats().counts["refilled_blocks",] == 5
            assert on_disk(pool) == 5, "a kill loses nothing"
            pool.check_invariants()

    def test_two_copies_need_not_be_alike(self, path):
        """KV that was computed again may differ in its last bits: each copy is right by itself."""
        clock, system = FakeClock(), FaultySystem()
        with self.evicted(path, system=system, clock=clock) as pool:
            system.fault = fails_at(1, errno.EIO, 1 << 30)
            assert get(pool, prompt(0, 5)) == 0
            with pool.reserve(SPACE, prompt(0, 5)) as reservation:
                for number, slot in enumerate(reservation.slots()):
                    slot[:] = number
            pool.drain()
            with pool.acquire(SPACE, prompt(0, 5)) as lease:
                assert pool.verify(lease) == 5
                assert [int(slot[0]) for slot in lease.slots()] == [*range(5)]
            system.fault = None
            clock.advance(1000.0)
            assert pool.demote(SPACE, prompt(0, 5), "dram") == 5
            pool.check_invariants()
            assert get(pool, prompt(0, 5)) == 5, "what the disk has had all along"
            with pool.acquire(SPACE, prompt(0, 5)) as lease:
                assert pool.verify(lease) == 5
            assert pool.stats().counts["corrupt_blocks",] == 0
            pool.check_invariants()

    def test_what_is_brought_back_and_given_up_stays_on_disk(self, path):
        with self.evicted(path) as pool:
            used = pool.stats().tiers[0].used_bytes
            reservation = pool.reserve(SPACE, prompt(0, 7))
            assert reservation.num_blocks == 7
            pool.check_invariants()
            pool.abort(reservation)
            assert pool.stats().tiers[0].used_bytes == used
            pool.check_invariants()
            assert get(pool, prompt(0, 5)) == 5

    def test_a_load_that_comes_first_wins(self, path):
        mover = ManualMover()
        with self.evicted(path, mover=mover) as pool:
            reservation = pool.reserve(SPACE, prompt(0, 5))
            assert get(pool, prompt(0, 5)) == 0
            mover.drain()
            for slot in reservation.slots():
                slot[:] = 0
            pool.commit(reservation)
            pool.check_invariants()
            assert get(pool, prompt(0, 5)) == 5, "the bytes of the disk"
            assert pool.stats().counts["refilled_blocks",] == 0

    def test_prefetch_loads(self, path):
        with self.evicted(path) as pool:
            assert pool.prefetch(SPACE, prompt(0, 5)) == 5 * WIDTH
            assert in_memory(pool) == 5
            pool.check_invariants()

    def test_only_what_is_worth_it_is_loaded(self, path):
        with self.evicted(path) as pool:
            pool._residency.offload.rules.planner.plan = lambda *_, **__: Plan(0, 0.0, 1.0)
            assert get(pool, prompt(0, 5)) == 0
            assert in_memory(pool) == 0
            assert pool.stats().counts["unloaded_blocks", "disk", "not_worth_loading"] == 5

    def test_wrong_bytes_on_disk_are_a_counted_miss(self, path):
        with self.evicted(path) as pool:
            for segment in path.glob("*.kv"):
                data = bytearray(segment.read_bytes())
                data[8192 + 4096 + 100] ^= 1  # in the payload of the first block, or of the second
                segment.write_bytes(data)
            assert get(pool, prompt(0, 5)) < 5
            counts = pool.stats().counts
            assert counts["corrupt_blocks",] == 1
            pool.check_invariants()

    def test_a_disk_that_cannot_be_read_is_a_miss_and_loses_nothing(self, path):
        clock, system = FakeClock(), FaultySystem()
        with self.evicted(path, system=system, clock=clock) as pool:
            system.fault = fails_at(1, errno.EIO, 1 << 30)
            assert get(pool, prompt(0, 5)) == 0
            assert get(pool, prompt(0, 5)) == 0
            assert on_disk(pool) == 5, "they are not forgotten"
            assert pool.lookup(SPACE, prompt(0, 5)) == 0
            system.fault = None
            clock.advance(1000.0)
            assert pool.lookup(SPACE, prompt(0, 5)) == 5 * WIDTH
            assert get(pool, prompt(0, 5)) == 5
            pool.check_invariants()

    def test_memory_that_is_all_in_use_is_a_miss(self, path):
        with self.evicted(path) as pool:
            put(pool, prompt(1, 20))
            lease = pool.acquire(SPACE, prompt(1, 20))
            assert lease.num_blocks == 20
            assert get(pool, prompt(0, 5), may_wait=True) == 0
            assert pool.stats().counts["unloaded_blocks", "disk", "no_room"] == 5
            pool.release(lease)
            assert get(pool, prompt(0, 5)) == 5
            pool.check_invariants()

    def test_no_more_is_promised_than_memory_holds(self, path):
        with opened(path, pages=100, admission="always") as pool:
            put(pool, prompt(0, 30))
        with opened(path, pages=40) as pool:
            assert on_disk(pool) == 30
            assert pool.lookup(SPACE, prompt(0, 30)) == 20 * WIDTH
            last = pool.explain(SPACE, prompt(0, 30)).segments[-2]
            assert (last.start, last.cause) == (20 * WIDTH, "no_room")
            assert pool.prefetch(SPACE, prompt(0, 30)) == 20 * WIDTH
            assert get(pool, prompt(0, 30)) == 20
            assert pool.stats().counts["unloaded_blocks", "disk", "no_room"] == 10
            pool.check_invariants()

    def test_loads_push_nothing_out_that_somebody_waits_for(self, path):
        mover, clock = ManualMover(), FakeClock()
        with opened(path, pages=40, admission="always", mover=mover, clock=clock) as pool:
            for number in range(3):
                put(pool, prompt(number, 9))
                pool.drain()
                assert pool.demote(SPACE, prompt(number, 9), "dram") == 9
            lease = pool.acquire(SPACE, prompt(0, 9), may_wait=True)
            assert lease.coming_blocks == 9
            mover.drain()
            for number in range(1, 3):
                pool.acquire(SPACE, prompt(number, 9), may_wait=True)
                mover.drain()
                pool.check_invariants()
            assert pool.lookup(SPACE, prompt(0, 9)) == 9 * WIDTH
            assert get(pool, prompt(0, 9), may_wait=True) == 9
            clock.advance(60.0)
            assert len(put(pool, prompt(4, 20)).indices) == 20, (
                "nothing is kept for who did not come"
            )
            pool.check_invariants()

    def test_all_who_want_the_same_blocks_get_them(self, path):
        mover = ManualMover()
        with self.evicted(path, mover=mover) as pool:
            for _ in range(30):
                assert pool.acquire(SPACE, prompt(0, 5), may_wait=True).coming_blocks == 5
                assert pool.acquire(SPACE, prompt(0, 4), may_wait=True).coming_blocks == 4
            mover.drain()
            assert get(pool, prompt(0, 4), may_wait=True) == 4
            assert get(pool, prompt(0, 5), may_wait=True) == 5

    def test_what_waits_for_others_takes_half_of_the_memory_at_most(self, path):
        mover = ManualMover()
        with opened(path, pages=100, admission="always") as pool:
            for number in range(3):
                put(pool, prompt(number, 6))
        with opened(path, pages=40, mover=mover) as pool:
            assert pool.acquire(SPACE, prompt(0, 6), may_wait=True).coming_blocks == 6
            assert pool.acquire(SPACE, prompt(1, 6), may_wait=True).coming_blocks == 4
            assert pool.acquire(SPACE, prompt(2, 6), may_wait=True).coming_blocks == 0
            assert get(pool, prompt(2, 6)) == 0
            assert pool.stats().counts["unloaded_blocks", "disk", "busy"] == 12
            put(pool, prompt(3, 10))
            assert get(pool, prompt(3, 10)) == 10, "a disk that hangs leaves room"
            mover.drain()

    def test_who_comes_late_is_not_told_to_wait_longer_than_computing_takes(self, path):
        mover = ManualMover()
        with opened(path, pages=1000, admission="always") as pool:
            put(pool, prompt(0, 200))
        with opened(path, pages=800, mover=mover, load="auto") as pool:
            mover.drain()
            planner = pool._residency.offload.rules.planner
            pool.prefilled(SPACE, 0, 800, 800 * 0.0005)
            assert pool.acquire(SPACE, prompt(0, 200), may_wait=True).coming_blocks == 200
            for _ in range(30):
                planner.loaded("disk", 200 * 12288, 60.0)
            lease = pool.acquire(SPACE, prompt(0, 200), may_wait=True)
            assert (lease.coming_blocks, lease.ready_in_s) == (0, 0.0)
            mover.drain()
            assert get(pool, prompt(0, 200)) == 200

    def slow_start(self, path, mover):
        """A pool of 1000 blocks of memory with prompts of 200 blocks on disk, at 20 MB/s; and its planner."""
        options = replace(OPTIONS, budget_bytes=32 << 20)
        with opened(path, options=options, pages=3000, admission="always") as pool:
            for number in range(3):
                put(pool, prompt(number, 200, shared=2 if number == 1 else 0))
            put(pool, prompt(0, 200, shared=2))
        pool = opened(path, options=options, pages=4000, mover=mover, load="auto")
        mover.drain()
        planner = pool._residency.offload.rules.planner
        for _ in range(60):
            planner.loaded("disk", 20 * 12288, 20 * 12288 / 20e6)
        pool.prefilled(SPACE, 0, 1024, 1024 * 0.0005)
        return pool

    def test_what_is_coming_is_judged_with_what_would_be_loaded_behind_it(self, path):
        """A head that computing would have sooner, by itself, is no reason to load nothing."""
        mover = ManualMover()
        with self.slow_start(path, mover) as pool:
            assert pool.acquire(SPACE, prompt(2, 200), may_wait=True).coming_blocks == 200
            pool.prefetch(SPACE, prompt(0, 200, shared=2))
            assert pool.acquire(SPACE, prompt(1, 2, shared=2), may_wait=True).coming_blocks == 0
            lease = pool.acquire(SPACE, prompt(1, 200, shared=2), may_wait=True)
            assert lease.coming_blocks == 200
            mover.drain()

    def test_what_is_loaded_in_parts_is_not_given_up_between_them(self, path, monkeypatch):
        monkeypatch.setattr("kvstore.offload.MAX_LOAD_BLOCKS", 40)
        mover = ManualMover()
        with self.slow_start(path, mover) as pool:
            for ready in range(0, 200, 40):
                for _ in range(2):
                    lease = pool.acquire(SPACE, prompt(0, 200), may_wait=True)
                    assert (lease.ready_blocks, lease.coming_blocks) == (ready, 40)
                mover.drain()
            assert get(pool, prompt(0, 200), may_wait=True) == 200

    def test_a_load_in_pieces_is_expected_to_take_a_latency_for_each(self, path, monkeypatch):
        monkeypatch.setattr("kvstore.offload.PIECE_BYTES", 20 * 12288)
        monkeypatch.setattr("kvstore.movement.PIECE_BYTES", 20 * 12288)
        mover = ManualMover()
        with self.slow_start(path, mover) as pool:
            planner = pool._residency.offload.rules.planner
            for _ in range(60):
                planner.loaded("disk", 4096, 0.05)
                planner.loaded("disk", 20 * 12288, 0.05 + 20 * 12288 / 200e6)
            assert planner.load_s("disk", 200 * 12288) < 800 * 0.0005
            assert pool.acquire(SPACE, prompt(0, 200), may_wait=True).coming_blocks == 0

    def test_a_trial_refuses_nothing_that_is_known_or_under_way(self, path):
        mover = ManualMover()
        lanes = Lanes(InlineMover(), mover, InlineMover())
        with opened(path, pages=1000, admission="always") as pool:
            put(pool, prompt(0, 60))
        with opened(path, pages=800, mover=lanes, load="auto", admission="always") as pool:
            if not pool._residency.tiers[-1].disk.is_direct:
                pytest.skip("no trial is made here")
            pool.prefilled(SPACE, 0, 1024, 1.0)
            assert len(mover.jobs) == 1, "the trial"
            assert pool.acquire(SPACE, prompt(0, 60), may_wait=True).coming_blocks == 0
            pool._residency.offload.rules.planner.loaded("disk", 1 << 20, 1e-3)
            assert pool.acquire(SPACE, prompt(0, 60), may_wait=True).coming_blocks == 60
            mover.run_one()
            assert len(mover.jobs) == 1, "the load"
            put(pool, prompt(1, 1))
            assert len(mover.jobs) == 1, "there is no other trial beside it"
            assert pool.acquire(SPACE, prompt(0, 60), may_wait=True).coming_blocks == 60
            mover.drain()

    def test_the_planner_is_told_of_loads_though_others_always_wait(self, path):
        mover, clock = ManualMover(), FakeClock()
        system = FaultySystem(lambda call, _: clock.advance(1e-3 if call == "read" else 0.0))
        with opened(path, pages=200, admission="always") as pool:
            for number in range(MAX_ROW + 1):
                put(pool, prompt(number, 1))
        with opened(path, pages=200, mover=mover, clock=clock, system=system) as pool:
            for number in range(MAX_ROW + 1):
                pool.acquire(SPACE, prompt(number, 1), may_wait=True)
            for _ in range(MAX_ROW):
                assert not pool._residency.offload.rules.planner.is_measured("disk")
                mover.run_one()
            assert mover.jobs
            assert pool._residency.offload.rules.planner.is_measured("disk")
            mover.drain()

    def test_who_waits_keeps_its_blocks_though_others_wait_for_the_same_and_are_served(self, path):
        mover = ManualMover()
        with opened(path, pages=80, admission="always", mover=mover) as pool:
            put(pool, prompt(0, 15))
            mover.drain()
            assert pool.demote(SPACE, prompt(0, 15), "dram") == 15
            for _ in range(2):
                assert pool.acquire(SPACE, prompt(0, 15), may_wait=True).coming_blocks == 15
            mover.drain()
            assert get(pool, prompt(0, 15), may_wait=True) == 15
            put(pool, prompt(1, 40))
            assert get(pool, prompt(0, 15), may_wait=True) == 15
            pool.check_invariants()
            mover.drain()
            pool.clear()
            assert pool.stats().tiers[0].used_bytes == 0, "nor is anything kept that is forgotten"

    def test_what_many_wait_for_is_kept_once(self, path):
        mover = ManualMover()
        with opened(path, pages=100, admission="always", mover=mover) as pool:
            for number in range(4):
                put(pool, prompt(number, 22, shared=20))
            mover.drain()
            pool.demote(SPACE, prompt(0, 22, shared=20), "dram")
            for number in range(1, 4):
                pool.demote(SPACE, prompt(number, 22, shared=20), "dram")
            for number in range(3):
                pool.acquire(SPACE, prompt(number, 22, shared=20), may_wait=True)
            mover.drain()
            put(pool, prompt(9, 40))
            known = [pool.lookup(SPACE, prompt(number, 22, shared=20)) for number in range(3)]
            there = pool._residency.copies.in_memory
            ids = [
                pool._residency.find(SPACE, prompt(number, 22, shared=20).tobytes()).usable
                for number in range(3)
            ]
            assert [int(there(some).sum()) for some in ids] == [22, 22, 21], known
            pool.check_invariants()

    @contextmanager
    def computed_during_a_load(self, path):
        """A pool to which blocks of sevens came before the load of the same ones ended, and its loads."""
        mover = ManualMover()
        with self.evicted(path, mover=Lanes(InlineMover(), mover, InlineMover())) as pool:
            reservation = pool.reserve(SPACE, prompt(0, 5))
            for slot in reservation.slots():
                slot[:] = 7
            assert pool.acquire(SPACE, prompt(0, 5), may_wait=True).coming_blocks == 5
            pool.commit(reservation)
            yield pool, mover

    def test_room_that_never_comes_is_not_waited_for(self, path, monkeypatch):
        with opened(path, pages=40) as pool:
            put(pool, prompt(0, 20))
            monkeypatch.setattr(pool._residency, "_evict", lambda *_: True)
            assert not len(put(pool, prompt(1, 5)).indices)

    def test_what_is_brought_back_during_a_load_gets_its_checksum(self, path):
        with self.computed_during_a_load(path) as (pool, mover):
            mover.drain()
            with pool.acquire(SPACE, prompt(0, 5)) as lease:
                next(lease.slots())[0] = 8
                assert pool.verify(lease) == 0

    def test_a_disk_that_seemed_too_slow_is_tried_again_though_nothing_is_written(self, path):
        clock, system = FakeClock(), FaultySystem()

        def slow(call, _):
            clock.advance(5.0 if call == "read" else 0.0)

        system.fault = slow
        options = {"admission": "always", "load": "auto", "clock": clock, "system": system}
        with opened(path, **options) as pool:
            if not pool._residency.tiers[-1].disk.is_direct:
                pytest.skip("what was just written is read from memory here")
            pool.prefilled(SPACE, 0, 1024, 1.0)
            put(pool, prompt(0, 5))
            written = on_disk(pool)
            assert written > 0, "the first block shows it"
            put(pool, prompt(1, 5))
            assert on_disk(pool) == written
            system.fault = lambda call, _: clock.advance(1e-4 if call == "read" else 0.0)
            for number in range(2, 40):
                clock.advance(3.0)
                put(pool, prompt(number, 5))
            assert on_disk(pool) > written

    def test_no_more_is_promised_than_a_tenant_may_have(self, path):
        space = replace(SPACE, tenant="acme")
        with opened(path, pages=100, admission="always") as pool:
            put(pool, prompt(0, 10), space)
        quotas = {"acme": Quota(ceiling_bytes=5 * 8192)}
        with opened(path, pages=40, quotas=quotas) as pool:
            assert pool.lookup(space, prompt(0, 10)) == 5 * WIDTH
            assert get(pool, prompt(0, 10), space) == 5

    def test_a_pinned_block_that_is_computed_again_comes_back_to_memory(self, path):
        with self.evicted(path) as pool:
            pool._residency.offload.rules.planner.mode = "never"
            assert pool.pin("mine", SPACE, prompt(0, 5)) == 5 * WIDTH
            assert len(put(pool, prompt(0, 5)).indices) == 5
            assert get(pool, prompt(0, 5)) == 5
            pool.check_invariants()

    def test_a_load_that_comes_after_the_writer_changes_nothing(self, path):
        with self.computed_during_a_load(path) as (pool, mover):
            mover.drain()
            pool.check_invariants()
            with pool.acquire(SPACE, prompt(0, 5)) as lease:
                assert [int(slot[0]) for slot in lease.slots()] == [7] * 5
                assert pool.verify(lease) == 5
            assert pool.stats().counts["corrupt_blocks",] == 0

    def test_another_size_finds_no_room_where_blocks_are_being_written_again(self, path):
        large = Namespace(b"other", KVLayout(1, 1, 2048, "float32", WIDTH))
        with opened(path, pages=40, admission="always") as pool:
            put(pool, prompt(0, 20))
            pool.demote(SPACE, prompt(0, 20), "dram")
            reservation = pool.reserve(SPACE, prompt(0, 20))
            assert len(reservation.indices) == 20
            assert not list(pool._residency._idle_slabs(0, 8192)), "no slab is without users"
            assert not len(put(pool, prompt(1, 2), large).indices)
            pool.check_invariants()
            pool.abort(reservation)
            assert len(put(pool, prompt(1, 2), large).indices) == 2

    def test_nobody_waits_for_a_slow_disk_to_find_out(self, path):
        clock = FakeClock()

        def slow(call, _):
            clock.advance(5.0 if call == "read" else 0.0)

        with opened(path, admission="always", load="auto", clock=clock) as pool:
            if not pool._residency.tiers[-1].disk.is_direct:
                pytest.skip("what was just written is read from memory here")
        system = FaultySystem(slow)
        for start in ("new", "again"):
            with opened(path, admission="always", load="auto", clock=clock, system=system) as pool:
                if start == "new":
                    put(pool, prompt(0, 5))
                    pool.demote(SPACE, prompt(0, 5), "dram")
                assert on_disk(pool) == 5
                assert pool.lookup(SPACE, prompt(0, 5)) == 0
                assert get(pool, prompt(0, 5)) == 0
                assert pool.stats().counts["moved_blocks", "disk", "dram"] == 0


class TestRestart:
    def test_finds_every_block_again(self, path):
        with opened(path, admission="always") as pool:
            for number in range(6):
                put(pool, prompt(number, 7, shared=3))
            before = on_disk(pool), pool.stats().tiers[-1].used_bytes
            assert before[0] == 3 + 6 * 4
        with opened(path) as pool:
            pool.check_invariants()
            assert (on_disk(pool), pool.stats().tiers[-1].used_bytes) == before
            for number in range(6):
                assert get(pool, prompt(number, 7, shared=3)) == 7
            pool.check_invariants()

    def test_the_oldest_goes_first_afterwards(self, path):
        with opened(path, admission="always") as pool:
            for number in range(3):
                put(pool, prompt(number, 5))
        with opened(path) as pool:
            tree = pool._residency.trees[SPACE.digest]
            first = next(iter(pool._residency.tiers[-1].policy))
            assert tree.prefix(first) == prompt(0, 5)[:-1].astype("<i4").tobytes()

    def test_prompts_of_two_namespaces_go_in_the_order_in_which_they_were_written(self, path):
        other = Namespace(b"other weights", SPACE.layout)
        with opened(path, admission="always") as pool:
            for number in range(4):
                put(pool, prompt(number, 4, shared=2), (SPACE, other)[number % 2])
        with opened(path) as pool:
            nodes = [node for node in pool._residency.tiers[-1].policy if not node.children]
            names = [(node.tree.namespace, node.tree.prefix(node)) for node in nodes]
            assert names == [
                (
                    (SPACE, other)[number % 2],
                    prompt(number, 4, shared=2)[:-1].astype("<i4").tobytes(),
                )
                for number in range(4)
            ]

    @pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
    def test_every_policy_goes_on_with_what_is_found(self, path, policy):
        small = replace(OPTIONS, budget_bytes=(5 << 20) + (3 << 18))
        for start in range(0, 24, 8):
            clock = FakeClock()
            with opened(
                path, pages=40, clock=clock, options=small, admission="always", policy=policy
            ) as pool:
                for number in range(start, start + 8):
                    clock.advance(1.0)
                    get(pool, prompt(max(0, number - 3), 8, shared=number % 3))
                    pool.check_invariants()
                    put(pool, prompt(number, 8, shared=number % 3))
                    pool.check_invariants()
                assert get(pool, prompt(number, 8, shared=number % 3)) == 8
            assert start == 0 or pool.stats().counts["evicted_blocks", "disk", "capacity"] > 0

    def test_memory_need_not_pass_what_only_the_disk_has(self, path):
        clock = FakeClock()
        with opened(path, admission="always", pages=100) as pool:
            for number in range(40):
                put(pool, prompt(number, 1))
        with opened(path, pages=40, clock=clock) as pool:
            assert not list(pool._residency.tiers[0].policy)
            for number in range(40, 44):  # 20 blocks: memory is full, and written back
                clock.advance(1.0)
                put(pool, prompt(number, 5))
            assert on_disk(pool) > 40
            pool.check_invariants()

    def test_what_was_forgotten_does_not_come_back(self, path):
        with opened(path, admission="always") as pool:
            put(pool, prompt(0, 5))
            put(pool, prompt(1, 5))
            assert pool.evict(SPACE, prompt(0, 5)) == 5
        with opened(path) as pool:
            assert on_disk(pool) == 5
            assert get(pool, prompt(0, 5)) == 0

    def test_a_smaller_budget_keeps_what_fits(self, path):
        with opened(path, admission="always") as pool:
            put(pool, prompt(0, 30))
        with opened(path, options=TIGHT) as pool:
            pool.check_invariants()
            left = on_disk(pool)
            assert left * slot_bytes_of(SPACE) <= TIGHT.capacity_bytes
            assert get(pool, prompt(0, 30)) == left


class TestPressure:
    def test_the_disk_evicts_leaves_first_and_keeps_to_its_budget(self, path):
        clock = FakeClock()
        with opened(path, pages=40, clock=clock, options=TIGHT, admission="always") as pool:
            for number in range(30):
                put(pool, prompt(number, 8, shared=2))
                pool.check_invariants()
                tier = pool.stats().tiers[-1]
                assert tier.used_bytes <= tier.capacity_bytes
                files = sum(file.stat().st_blocks * 512 for file in path.iterdir())
                assert files <= TIGHT.budget_bytes
            assert get(pool, prompt(29, 8, shared=2)) == 8
            assert pool.stats().counts["evicted_blocks", "disk", "capacity"] > 0

    def test_another_size_gets_room_on_a_full_disk(self, path):
        other = Namespace(b"other weights", KVLayout(3, 1, 256, "float32", WIDTH))
        with opened(path, pages=64, options=TIGHT, admission="always") as pool:
            for number in range(12):
                put(pool, prompt(number, 8))
            for number in range(4):
                put(pool, prompt(number, 2), other)
                pool.check_invariants()
            assert get(pool, prompt(3, 2), other) == 2
            assert pool._residency.trees[other.digest].num_blocks >= 2

    def test_what_is_on_disk_stays_a_prefix_when_another_size_gets_room(self, path):
        small = Namespace(b"small", KVLayout(1, 1, 8, "float32", WIDTH))
        with opened(path, pages=400, options=TIGHT, admission="always") as pool:
            put(pool, prompt(0, 21))
            assert on_disk(pool) == 21
            put(pool, prompt(0, 30), small)
            for space, count in ((SPACE, 21), (small, 30)):
                ids = pool._residency.find(space, prompt(0, count).astype("<i4").tobytes()).ids
                there = pool._residency.copies.have(1, ids)
                assert (np.diff(there.astype(int)) <= 0).all(), "leading blocks"
            pool.check_invariants()
        with opened(path, pages=400, options=TIGHT) as pool:
            disk = pool.stats().tiers[-1]
            known = pool.lookup(SPACE, prompt(0, 21)) + pool.lookup(small, prompt(0, 30))
            assert known == disk.num_blocks * WIDTH, "nothing on disk is of no use"


class TestExplain:
    def test_what_is_on_disk_is_a_hit_there_unless_it_is_not_loaded(self, path):
        clock, system = FakeClock(), FaultySystem()
        with opened(path, pages=40, admission="always", clock=clock, system=system) as pool:
            put(pool, prompt(0, 5))
            assert pool.demote(SPACE, prompt(0, 5), "dram") == 5
            told = pool.explain(SPACE, prompt(0, 5))
            assert (told.hit_tokens, told.segments[0].tier) == (5 * WIDTH, "disk")
            system.fault = fails_at(1, errno.EIO, 1 << 30)
            assert get(pool, prompt(0, 5)) == 0
            told = pool.explain(SPACE, prompt(0, 5))
            assert told.hit_tokens == pool.lookup(SPACE, prompt(0, 5)) == 0
            assert told.segments[0].cause == "off"
            pool._residency.offload.rules.planner.plan = lambda *_, **__: Plan(0, 0.0, 1.0)
            system.fault = None
            clock.advance(100.0)
            told = pool.explain(SPACE, prompt(0, 5))
            assert told.hit_tokens == pool.lookup(SPACE, prompt(0, 5)) == 0
            assert told.segments[0].cause == "not_worth_loading"

    def test_it_says_from_where_something_was_evicted_and_for_how_much(self, path):
        with opened(path, pages=16, admission="second_use") as pool:
            put(pool, prompt(0, 5))
            put(pool, prompt(1, 8))
            detail = pool.explain(SPACE, prompt(0, 5)).segments[0].detail
            assert "dram" in detail
            assert "as lru chose" in detail
            assert "blocks" in detail


class TestLossyCodecs:
    exact = Namespace(b"weights", KVLayout(2, 2, 64, "float32", WIDTH))
    """Blocks of 8 KiB: on disk two pages, or one with a codec, behind a header."""

    def space(self, codec):
        return replace(self.exact, codec=codec)

    def fill(self, pool, space, seed=0):
        """Store random blocks; return them."""
        kv = np.random.default_rng(seed).normal(size=(5, *space.layout.shape)).astype(np.float32)
        with pool.reserve(space, prompt(0, 5)) as reservation:
            for index, slot in zip(reservation.indices.tolist(), reservation.slots(), strict=True):
                slot[:] = kv[index].reshape(-1).view(np.uint8)
        return kv

    def load(self, pool, space):
        with pool.acquire(space, prompt(0, 5)) as lease:
            shape = space.layout.shape
            return np.array([slot.copy().view(np.float32).reshape(shape) for slot in lease.slots()])

    @pytest.mark.parametrize(("codec", "bound"), [("int8", 1 / 254), ("fp8", 1 / 16)])
    def test_blocks_come_back_within_the_bound_and_take_less_room(self, path, codec, bound):
        space = self.space(codec)
        with opened(path, pages=40, admission="always") as pool:
            kv = self.fill(pool, space)
            used = pool.stats().tiers[-1].used_bytes
            assert used == 5 * slot_bytes_of(space) < 5 * slot_bytes_of(self.exact)
            np.testing.assert_array_equal(self.load(pool, space), kv)
            assert pool.demote(space, prompt(0, 5), "dram") == 5
            back = self.load(pool, space)
            largest = np.abs(kv).max(axis=(-2, -1), keepdims=True)
            assert not np.array_equal(back, kv)
            assert (np.abs(back - kv) <= bound * largest * 1.01).all()
            with pool.acquire(space, prompt(0, 5)) as lease:
                assert pool.verify(lease) == 5, "of what came back"
            pool.check_invariants()
        with opened(path, pages=40) as pool:
            np.testing.assert_array_equal(self.load(pool, space), back)
            assert pool.stats().counts["corrupt_blocks",] == 0

    def test_exact_blocks_are_of_another_namespace(self, path):
        with opened(path, pages=80, admission="always") as pool:
            kv = self.fill(pool, self.exact)
            self.fill(pool, self.space("int8"), seed=1)
            for space in (self.exact, self.space("int8")):
                pool.demote(space, prompt(0, 5), "dram")
            assert self.load(pool, self.space("fp8")).size == 0
            np.testing.assert_array_equal(self.load(pool, self.exact), kv)

    def test_a_block_that_cannot_be_bounded_is_written_as_it_is(self, path):
        with opened(path, pages=80, admission="always") as pool:
            space = self.space("int8")
            with pool.reserve(space, prompt(0, 5)) as reservation:
                for index, slot in enumerate(reservation.slots()):
                    slot.view(np.float32)[:] = np.inf if index == 2 else 1.0
            assert on_disk(pool) == 5
            pool.check_invariants()
        with opened(path) as pool:
            assert np.isinf(self.load(pool, space)[2]).all()
            assert pool.stats().counts["corrupt_blocks",] == 0

    def test_wrong_bytes_are_found(self, path):
        with opened(path, pages=40, admission="always") as pool:
            self.fill(pool, self.space("int8"))
            pool.demote(self.space("int8"), prompt(0, 5), "dram")
            segment = min(path.glob("*.kv"))
            data = bytearray(segment.read_bytes())
            data[4096 + 500] ^= 1
            segment.write_bytes(data)
            assert len(self.load(pool, self.space("int8"))) == 0
            assert pool.stats().counts["corrupt_blocks",] == 1


def test_what_will_expire_is_not_written(path):
    """After a restart it would be there for ever."""
    clock, tokens = FakeClock(), prompt(0, 4)
    pool = opened(path, admission="always", clock=clock)
    pool.commit(pool.reserve(SPACE, tokens[: 2 * WIDTH]))
    pool.commit(pool.reserve(SPACE, tokens, ttl_s=10))
    pool.drain()
    pool.release(pool.acquire(SPACE, tokens))
    pool.drain()
    assert on_disk(pool) == 2
    pool.close()
    with opened(path, clock=clock) as again:
        assert again.lookup(SPACE, tokens) == 2 * WIDTH


def test_a_store_that_is_closed_says_how_many_blocks_the_disk_has(path, caplog):
    caplog.set_level("INFO", "kvstore.pool")
    pool = opened(path)
    pool.commit(pool.reserve(SPACE, prompt(0, 4)))
    pool.commit(pool.reserve(SPACE, prompt(1, 3), ttl_s=10))
    pool.close()
    assert caplog.messages == ["closed: 4 blocks on disk, 3 not"]
    caplog.clear()
    small_pool(8).close()
    assert caplog.messages == []


def test_what_was_to_expire_is_written_once_it_is_for_ever(path):
    pool, tokens = opened(path, admission="always"), prompt(0, 4)
    pool.commit(pool.reserve(SPACE, tokens, ttl_s=10))
    pool.reserve(SPACE, tokens)
    pool.release(pool.acquire(SPACE, tokens))
    pool.drain()
    assert on_disk(pool) == 4
    pool.close()


class TestWriteBack:
    def tight(self, path, **more):
        """A disk of 21 blocks behind a memory of 40."""
        return opened(path, pages=80, options=TIGHT, **more)

    def test_no_block_is_written_without_those_before_it(self, path):
        clock = FakeClock()
        pool = opened(path, pages=200, clock=clock)
        for number in range(14):  # of 100 blocks in memory: the trunk was used last
            clock.advance(1.0)
            put(pool, prompt(number, 20, shared=12))
        written = pool.stats().counts["moved_blocks", "dram", "disk"]
        assert written > 12
        copy = path.with_name("copy")
        shutil.copytree(path, copy)  # as after a kill
        pool.close()
        with opened(copy) as again:
            assert on_disk(again) == written

    def test_nodes_that_leave_meanwhile_are_passed_over(self, path):
        clock = FakeClock()
        with self.tight(path, clock=clock) as pool:
            for number in range(60):
                clock.advance(1.0)
                put(pool, prompt(number % 23, 4 + number % 3, shared=number % 4))
                pool.demote(SPACE, prompt(number % 7, 6), "dram")
                get(pool, prompt(number % 11, 6))
                pool.check_invariants()

    def full(self, pool, drain=lambda: None):
        """Fill the disk: with the start of a prompt whose end is not there, and with others, which are leased.

        Returns the prompt. The disk alone has its start, which is all that could leave there.
        """
        tokens = prompt(0, 7)
        head = tokens[: 5 * WIDTH + 1]
        put(pool, head)
        drain()
        assert get(pool, head) == 5
        put(pool, tokens)
        for number in range(1, 5):
            put(pool, prompt(number, 4))
            drain()
            assert get(pool, prompt(number, 4)) == 4
            pool.acquire(SPACE, prompt(number, 4))
        for tier in pool.tier_names[:-1]:
            assert pool.demote(SPACE, head, tier) == 5
        disk = pool.stats().tiers[-1]
        assert disk.num_blocks == 21
        assert disk.used_bytes == disk.capacity_bytes
        return tokens

    def test_what_leads_to_a_block_is_not_let_go_of_to_write_it(self, path):
        with self.tight(path) as pool:
            tokens = self.full(pool)
            put(pool, prompt(10, 18))
            assert pool.lookup(SPACE, tokens) == 7 * WIDTH
            memory = pool.stats().tiers[0]
            assert memory.used_bytes >= WRITE_BACK_FROM * memory.capacity_bytes, "it was tried"
            pool.check_invariants()

    def test_a_block_is_written_as_what_it_is_though_room_is_made_by_those_before_it(self, path):
        clock, memory = FakeClock(), ManualMover()
        lanes = Lanes(memory, InlineMover(), InlineMover())
        late = []

        def drain():
            """Run all moves within memory but those of the prompt's end."""
            if on_disk(pool) == 5 and not late:
                late.append(memory.jobs.popleft())
            memory.drain()

        rules = DiskRules("always", WriteBudget(clock, 0), Planner(clock, mode="always"))
        disk = DiskStore(path, TIGHT, clock)
        with small_pool(80, 80, disk=disk, rules=rules, clock=clock, mover=lanes) as pool:
            tokens = self.full(pool, drain)
            assert pool.stats().tiers[1].num_blocks == 16, "of the others"
            late.pop()()
            pool.check_invariants()
            copy = path.with_name("copy")
            shutil.copytree(path, copy)
            kept = on_disk(pool)
        with opened(copy) as again:
            assert on_disk(again) == kept
            get(again, tokens)
            for number in range(1, 5):
                assert get(again, prompt(number, 4)) == 4

    def test_what_a_load_would_push_out_is_written_before(self, path):
        with opened(path, pages=40) as pool:  # 20 blocks of memory
            for number, count in ((0, 3), (1, 2)):
                put(pool, prompt(number, count))
                assert get(pool, prompt(number, count)) == count
                assert pool.demote(SPACE, prompt(number, count), "dram") == count
            for number in range(10, 27):
                put(pool, prompt(number, 1))
            assert get(pool, prompt(0, 3)) == 3
            assert (in_memory(pool), on_disk(pool)) == (20, 5), "memory is full by that load"
            assert get(pool, prompt(1, 2)) == 2
            assert pool.stats().counts["evicted_blocks", "dram", "copy_elsewhere"] == 2
            assert [get(pool, prompt(number, 1)) for number in (10, 11)] == [1, 1]


class TestRealMovers:
    @pytest.mark.parametrize("admission", ["always", "second_use", "value"])
    def test_behind_a_gpu_tier_blocks_reach_the_disk(self, path, admission):
        mover = ManualMover()
        clock = FakeClock()
        rules = DiskRules(admission, WriteBudget(clock, 0), Planner(clock, mode="always"))
        disk = DiskStore(path, OPTIONS, clock)
        with small_pool(20, 40, disk=disk, rules=rules, clock=clock, mover=mover) as pool:
            put(pool, prompt(0, 5))
            for _ in range(3):
                mover.drain()
                assert get(pool, prompt(0, 5)) == 5
            mover.drain()
            assert [tier.num_blocks for tier in pool.stats().tiers] == [5, 5, 5]
            pool.check_invariants()

    def test_what_is_not_written_is_not_paid_for(self, path):
        mover, clock = ManualMover(max_waiting=0), FakeClock()
        with opened(
            path,
            clock=clock,
            mover=mover,
            admission="always",
            bytes_per_s=slot_bytes_of(SPACE),
        ) as pool:
            put(pool, prompt(0, 10))
            assert pool.stats().counts["unstored_blocks", "disk", "busy"] == 10
            mover._max_waiting = 10
            assert get(pool, prompt(0, 10)) == 10
            mover.drain()
            assert on_disk(pool) == 10

    def test_a_load_is_not_given_up_for_what_queues_behind_it(self, path):
        with opened(path, pages=1000, admission="always") as pool:
            put(pool, prompt(0, 20))
            put(pool, prompt(1, 200))
        mover, clock = ManualMover(), FakeClock()
        with opened(path, pages=1000, mover=mover, clock=clock, load="auto") as pool:
            mover.drain()
            planner = pool._residency.offload.rules.planner
            for _ in range(60):
                planner.loaded("disk", 20 * 12288, 20 * 12288 / 20e6)
            for _ in range(20):
                pool.prefilled(SPACE, 0, 1024, 1024 * 0.0005)
            for number, count in ((0, 20), (1, 200), (0, 20)):
                lease = pool.acquire(SPACE, prompt(number, count), may_wait=True)
                assert lease.coming_blocks == count

    def test_a_disk_that_hangs_is_not_waited_for(self, path):
        with opened(path, admission="always") as pool:
            put(pool, prompt(0, 5))
            put(pool, prompt(1, 5))
        mover, clock = ManualMover(), FakeClock()
        with opened(path, mover=mover, clock=clock) as pool:
            assert pool.acquire(SPACE, prompt(0, 5), may_wait=True).coming_blocks == 5
            clock.advance(10.0)
            lease = pool.acquire(SPACE, prompt(1, 5), may_wait=True)
            assert lease.coming_blocks == 0
            assert pool.stats().counts["unloaded_blocks", "disk", "off"] == 5
            mover.drain()
            assert get(pool, prompt(0, 5)) == 5
            assert pool.acquire(SPACE, prompt(1, 5), may_wait=True).coming_blocks == 5


def test_pins_hold_at_most_half_of_the_memory_that_they_may_come_to(path):
    with opened(path, pages=40, admission="always") as pool:
        for number in range(4):
            put(pool, prompt(number, 5))
            pool.demote(SPACE, prompt(number, 5), "dram")
        assert pool.pin("a", SPACE, prompt(0, 5)) == 5 * WIDTH
        assert pool.pin("b", SPACE, prompt(1, 5)) == 5 * WIDTH
        with pytest.raises(UsageError, match="half of tier dram"):
            pool.pin("c", SPACE, prompt(2, 5))
