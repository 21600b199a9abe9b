"""A pool with a disk whose blocks a codec makes smaller, or refuses: then they are stored as they are."""

from dataclasses import replace
from functools import partial

import ml_dtypes
import numpy as np
import pytest

import kvstore.copies
import kvstore.movement
from kvstore.errors import TooLargeError
from kvstore.namespace import KVLayout, Namespace
from kvstore.offload import TRIES
from kvstore.planner import Planner
from kvstore.testing import FakeClock, ManualMover, small_pool
from kvstore.tiers.disk import DiskOptions, DiskStore, slot_bytes_of, slots
from kvstore.tiers.disk.manifest import LOG_BYTES
from kvstore.tiers.mover import Lanes, ThreadMover
from kvstore.tiers.moves import Origin, Prompt
from kvstore.tiers.rules import DiskRules, WriteBudget

WIDTH = 32
SPACE = Namespace(b"weights", KVLayout(2, 2, 64, "bfloat16", WIDTH), codec="lz4")
"""Blocks of 8 pages: on disk 7, or 8 plain, behind a header."""
PAGES = 8
CODED, PLAIN = slot_bytes_of(SPACE), slot_bytes_of(SPACE, plain=True)
NOISE = {1, 4}


def room(pages):
    """Options of a disk with slots of so many pages."""
    budget = (pages + 1) * 4096 + (1 << 20) + LOG_BYTES
    return DiskOptions(budget, budget, reserve_bytes=0, manifest_bytes=1 << 20, threads=2)


def opened(
    path,
    *,
    blocks=40,
    disk_pages=1000,
    admission="always",
    bytes_per_s=0,
    load="always",
    **more,
):
    clock = FakeClock()
    rules = DiskRules(admission, WriteBudget(clock, bytes_per_s), Planner(clock, mode=load))
    disk = DiskStore(path, room(disk_pages), clock)
    return small_pool(blocks * PAGES, clock=clock, disk=disk, rules=rules, **more)


def prompt(number, num_blocks):
    return np.arange(num_blocks * WIDTH + 1, dtype=np.int32) + 1000 * number


def content(number, place, noise):
    """Floats of one sign and exponent, or bytes without a pattern."""
    rng = np.random.default_rng([number, place])
    if place in noise:
        return rng.integers(0, 256, SPACE.layout.block_bytes, np.uint8)
    numbers = rng.uniform(1, 2, SPACE.layout.block_bytes // 2)
    return numbers.astype(ml_dtypes.bfloat16).view(np.uint8)


def put(pool, number, num_blocks, noise=NOISE, space=SPACE):
    with pool.reserve(space, prompt(number, num_blocks)) as reservation:
        for place, slot in zip(reservation.indices.tolist(), reservation.slots(), strict=True):
            slot[:] = content(number, place, noise)


def get(pool, number, num_blocks, noise=NOISE, space=SPACE):
    """Load a prompt, and compare every block with what was stored; return how many there are."""
    with pool.acquire(space, prompt(number, num_blocks)) as lease:
        for place, slot in enumerate(lease.slots()):
            assert np.array_equal(slot, content(number, place, noise)), f"block {place}"
        assert pool.verify(lease) == lease.num_blocks
        return lease.num_blocks


def on_disk(pool):
    tier = pool.stats().tiers[-1]
    return tier.num_blocks, tier.used_bytes


def uncoded(pool):
    return pool._residency.tiers[-1].disk.counts["uncoded_blocks",]


class TestBothForms:
    def test_a_prompt_with_both_comes_back_to_the_bit_also_after_a_restart(self, path):
        with opened(path) as pool:
            put(pool, 0, 6)
            assert on_disk(pool) == (6, 4 * CODED + 2 * PLAIN)
            assert pool.demote(SPACE, prompt(0, 6), "dram") == 6
            assert get(pool, 0, 6) == 6
            pool.check_invariants()
            counts = pool.stats().counts
            assert counts["moved_blocks", "dram", "disk"] == 6
            assert counts["failed_moves", "dram", "disk"] == 0
            assert counts["corrupt_blocks",] == 0
        with opened(path) as pool:
            assert on_disk(pool) == (6, 4 * CODED + 2 * PLAIN)
            pool.check_invariants()
            assert get(pool, 0, 6) == 6
            pool.check_invariants()
            pool.clear()
            assert on_disk(pool) == (0, 0)
            pool.check_invariants()

    def test_what_was_refused_once_is_stored_plain_at_once_the_next_time(self, path):
        with opened(path) as pool:
            put(pool, 0, 6)
            assert uncoded(pool) == 2
            residency = pool._residency
            ids = residency.find(SPACE, prompt(0, 6).astype("<i4").tobytes()).ids
            residency.copies.drop(1, ids)
            assert on_disk(pool) == (0, 0)
            assert get(pool, 0, 6) == 6
            assert on_disk(pool) == (6, 4 * CODED + 2 * PLAIN)
            assert uncoded(pool) == 2, "not tried again"
            pool.check_invariants()
        with opened(path) as pool:
            assert get(pool, 0, 6) == 6

    def test_what_is_there_from_before_is_loaded_and_joined_by_new_blocks(self, path):
        with opened(path) as pool:
            put(pool, 0, 3)
        with opened(path) as pool:
            put(pool, 0, 6)
            assert on_disk(pool) == (6, 4 * CODED + 2 * PLAIN)
            assert get(pool, 0, 6) == 6
            pool.check_invariants()
        with opened(path) as pool:
            assert get(pool, 0, 6) == 6

    def test_pools_that_close_have_written_both(self, path):
        """Also where all is written at the very end, by real threads."""
        mover = Lanes(*(ThreadMover(2, name) for name in ("memory", "loads", "stores")))
        with opened(path, admission="value", mover=mover) as pool:
            for number in range(4):
                put(pool, number, 6)
            assert on_disk(pool) == (0, 0)
        with opened(path) as pool:
            assert on_disk(pool) == (24, 16 * CODED + 8 * PLAIN)
            assert [get(pool, number, 6) for number in range(4)] == [6] * 4

    def test_invariants_hold_while_refused_blocks_are_written_again(self, path, monkeypatch):
        original, sizes = kvstore.movement.copy_blocks, []

        def copied(move, tiers):
            sizes.append((len(move.ids), pool.stats().tiers[-1].used_bytes))
            pool.check_invariants()
            return original(move, tiers)

        monkeypatch.setattr(kvstore.movement, "copy_blocks", copied)
        mover = ManualMover()
        with opened(path, mover=mover) as pool:
            put(pool, 0, 6)
            mover.drain()
            assert sizes == [(6, 6 * CODED), (2, 4 * CODED + 2 * PLAIN)]
            pool.check_invariants()

    def test_blocks_that_leave_while_they_are_refused_leave_nothing_behind(self, path, monkeypatch):
        original, sizes = kvstore.movement.copy_blocks, []

        def copied(move, tiers):
            sizes.append(len(move.ids))
            outcome = original(move, tiers)
            if outcome.refused.any():
                pool.clear()
            return outcome

        monkeypatch.setattr(kvstore.movement, "copy_blocks", copied)
        with opened(path) as pool:
            put(pool, 0, 6)
            pool.check_invariants()
            assert sizes == [6], "nothing is written for nobody"
            assert on_disk(pool) == (0, 0)
            assert not pool._residency.movement.moves
            assert pool._residency.table.num_blocks == 0

    def test_loads_of_both_are_one_and_count_what_each_block_has(self, path):
        with opened(path) as pool:
            put(pool, 0, 6)
        mover = ManualMover()
        with opened(path, mover=mover) as pool:
            lease = pool.acquire(SPACE, prompt(0, 6), may_wait=True)
            assert lease.coming_blocks == 6
            movement = pool._residency.movement
            assert [len(move.ids) for move in movement.moves] == [6]
            assert movement.queue(1) == (1, 4 * CODED + 2 * PLAIN)
            pool.check_invariants()
            mover.drain()
            assert movement.queue(1) == (0, 0)
            assert get(pool, 0, 6) == 6

    def test_pieces_have_about_so_many_bytes_whatever_the_forms(self, path, monkeypatch):
        monkeypatch.setattr(kvstore.movement, "PIECE_BYTES", 3 * PAGES * 4096)
        with opened(path) as pool:
            put(pool, 0, 8)
        mover = ManualMover()
        with opened(path, mover=mover) as pool:
            pool.acquire(SPACE, prompt(0, 8), may_wait=True)
            sizes = sorted(len(move.ids) for move in pool._residency.movement.moves)
            assert sizes == [2, 3, 3]
            mover.drain()
            assert get(pool, 0, 8) == 8

    def test_what_a_load_costs_is_what_its_blocks_have(self, path):
        with opened(path) as pool:
            put(pool, 0, 6)
        mover = ManualMover()
        with opened(path, mover=mover) as pool:
            planner, asked = pool._residency.offload.rules.planner, []
            plan = planner.plan

            def noted(*given, **more):
                asked.append([given[3].tolist(), *given[4:]])
                return plan(*given, **more)

            planner.plan = noted
            pool.acquire(SPACE, prompt(0, 3), may_wait=True)
            pool.acquire(SPACE, prompt(0, 6), may_wait=True)
            assert asked == [
                [[CODED, PLAIN, CODED], "disk", 3, (0, 0)],
                [[0, 0, 0, CODED, PLAIN, CODED], "disk", 6, (1, 2 * CODED + PLAIN)],
            ]
            mover.drain()

    def test_a_disk_is_measured_by_slots_of_one_size(self, path):
        with opened(path) as pool:
            put(pool, 0, 6, noise={0, 1})
        mover, tried = ManualMover(), []
        with opened(path, mover=mover, load="auto") as pool:
            disk = pool._residency.tiers[-1].disk
            read = disk.try_reading
            disk.try_reading = lambda offset, size: tried.append(size) or read(offset, size)
            mover.drain()
            assert tried == [4096] * TRIES + [2 * PLAIN] * TRIES


class TestRoom:
    def test_a_plain_slot_that_the_disk_does_not_have(self, path):
        with opened(path, disk_pages=CODED // 4096) as pool:
            put(pool, 0, 1, noise={0})
            assert on_disk(pool) == (0, 0)
            assert pool.stats().counts["unstored_blocks", "disk", "busy"] == 1
            pool.check_invariants()
            assert get(pool, 0, 1, noise={0}) == 1
            assert on_disk(pool) == (0, 0)
            put(pool, 1, 1, noise=set())
            assert on_disk(pool) == (1, CODED)
            pool.check_invariants()

    def test_one_form_makes_room_for_the_other(self, path):
        """Any share of both is in use at some time, and what was used last is there."""
        rng = np.random.default_rng(0)
        with opened(path, disk_pages=300, blocks=60) as pool:
            for number in range(60):
                share = abs(number % 20 - 10) / 10
                noise = set(np.flatnonzero(rng.random(8) < share).tolist())
                put(pool, number, 8, noise)
                pool.check_invariants()
                assert pool.demote(SPACE, prompt(number, 8), "dram") == 8
                assert get(pool, number, 8, noise) == 8
            blocks, used = on_disk(pool)
            assert blocks * CODED <= used <= min(blocks * PLAIN, 300 * 4096)
            assert blocks >= 24

    def test_a_plain_block_takes_the_place_of_one_that_was_used_longest_ago(
        self, path, monkeypatch
    ):
        """A whole slab is let go of only where no block of the victim has the size that is wanted."""
        monkeypatch.setattr(slots, "_Layout", partial(slots._Layout, max_slabs=4))
        pages = 4 * 30 * PLAIN // 4096  # three slabs of 33 coded ones, 32 plain ones
        with opened(path, disk_pages=pages, blocks=20) as pool:
            for number in range(15):
                put(pool, number, 8)
            assert on_disk(pool)[0] == 15 * 8
            assert get(pool, 0, 8) == 8
            for number in range(15, 19):
                put(pool, number, 8)
                pool.check_invariants()
                found = [pool.lookup(SPACE, prompt(n, 8)) // WIDTH for n in range(number)]
                incomplete = [n for n, left in enumerate(found) if left < 8]
                assert incomplete == [*range(1, number - 14)], "what was used longest ago"

    def test_what_is_written_again_is_paid_for_by_its_size(self, path):
        with opened(path, bytes_per_s=PLAIN) as pool:  # ten of them at once
            put(pool, 0, 8, noise=set(range(8)))
            assert on_disk(pool) == (8, 8 * PLAIN)
            put(pool, 1, 8, noise=set())
            assert on_disk(pool) == (8 + 2 * PLAIN // CODED, 8 * PLAIN + 2 * PLAIN // CODED * CODED)
            pool.check_invariants()

    def test_what_is_written_of_both_forms_is_paid_for_by_the_size_of_each(self, path):
        with opened(path, bytes_per_s=(6 * CODED + 2 * PLAIN) / 10) as pool:
            put(pool, 0, 4, noise={0})
            residency = pool._residency
            ids = residency.find(SPACE, prompt(0, 4).astype("<i4").tobytes()).ids
            residency.copies.drop(1, ids)
            assert get(pool, 0, 4, noise={0}) == 4
            assert on_disk(pool) == (4, 3 * CODED + PLAIN)

    def test_sizes_that_cannot_be_told_apart_any_more(self, path, monkeypatch):
        monkeypatch.setattr(kvstore.copies, "MAX_SIZE_CLASSES", 1)
        with opened(path, bytes_per_s=CODED) as pool:
            put(pool, 0, 6)
            assert on_disk(pool) == (4, 4 * CODED)
            assert pool.stats().counts["unstored_blocks", "disk", "busy"] == 2
            pool.check_invariants()
            put(pool, 1, 6, noise=set())
            assert on_disk(pool) == (10, 10 * CODED), "what was not written is not paid for"
            assert get(pool, 0, 6) == 6


def test_a_budget_counts_the_bytes_of_each_block():
    clock = FakeClock()
    budget = WriteBudget(clock, 10)  # a hundred at once
    assert budget.take(np.array([60, 30, 20, 5])) == 2
    assert budget.take(np.array([11])) == 0
    assert budget.take(np.array([10])) == 1
    budget.give_back(-20)
    clock.advance(2.5)
    assert budget.take(np.array([1] * 9)) == 5
    budget.give_back(3)
    assert budget.take(np.array([1] * 9)) == 3


def test_a_refused_block_takes_no_number_that_a_new_one_may_be_about_to_get(monkeypatch):
    monkeypatch.setattr(kvstore.copies, "MAX_SIZE_CLASSES", 1)
    with small_pool(PAGES) as pool:
        copies, other = pool._residency.copies, replace(SPACE, layout=KVLayout(1, 1, 1, "int8"))
        assert copies.size_class(SPACE) == copies.size_class(other) == copies.size_class(SPACE)
        with pytest.raises(TooLargeError):
            copies.size_class(SPACE, plain=True)


def test_which_blocks_come_back_to_the_bit():
    plain = np.array([False, True])
    for codec, exact in (("int8", [False, True]), ("lz4", [True, True]), (None, [True, True])):
        prompt_of = Prompt(replace(SPACE, codec=codec), prompt(0, 2).tobytes())
        assert Origin(prompt_of, np.arange(2), plain).is_exact.tolist() == exact


class TestLossy:
    lossy = replace(SPACE, codec="int8")

    def test_a_block_that_cannot_be_bounded_is_exact_among_others_that_are_not(self, path):
        def fill(pool):
            with pool.reserve(self.lossy, prompt(0, 6)) as reservation:
                for place, slot in enumerate(reservation.slots()):
                    slot[:] = content(0, place, set())
                    if place in NOISE:
                        slot.view(ml_dtypes.bfloat16)[7] = np.inf

        def load(pool):
            with pool.acquire(self.lossy, prompt(0, 6)) as lease:
                assert pool.verify(lease) == 6
                return [slot.copy() for slot in lease.slots()]

        coded, plain = slot_bytes_of(self.lossy), slot_bytes_of(self.lossy, plain=True)
        with opened(path) as pool:
            fill(pool)
            stored = load(pool)
            assert on_disk(pool) == (6, 4 * coded + 2 * plain)
            assert pool.demote(self.lossy, prompt(0, 6), "dram") == 6
            back = load(pool)
            same = [np.array_equal(a, b) for a, b in zip(stored, back, strict=True)]
            assert same == [place in NOISE for place in range(6)]
            pool.check_invariants()
        with opened(path) as pool:
            assert all(map(np.array_equal, load(pool), back))
            assert pool.stats().counts["corrupt_blocks",] == 0

    def test_what_is_stored_with_a_loss_is_nobody_elses(self, path):
        with opened(path, blocks=80) as pool:
            put(pool, 0, 6, space=self.lossy, noise=set())
            for space in (SPACE, replace(SPACE, codec=None), replace(SPACE, codec="fp8")):
                assert pool.lookup(space, prompt(0, 6)) == 0
                put(pool, 0, 6, space=space, noise=set())
            pool.demote(SPACE, prompt(0, 6), "dram")
            assert get(pool, 0, 6, noise=set()) == 6

    @pytest.mark.parametrize("place", [1, 2])
    def test_damage_to_either_form_is_a_counted_miss(self, path, place):
        with opened(path) as pool:
            put(pool, 0, 6)
            pool.demote(SPACE, prompt(0, 6), "dram")
            residency = pool._residency
            ids = residency.find(SPACE, prompt(0, 6).astype("<i4").tobytes()).ids
            offset = int(residency.copies.offsets(1, ids[[place]])[0])
            with min(path.glob("*.kv")).open("r+b") as file:
                file.seek(offset + 4096 + 100)
                file.write(bytes(64))
            assert get(pool, 0, 6) == place
            assert pool.stats().counts["corrupt_blocks",] == 1
            pool.check_invariants()
