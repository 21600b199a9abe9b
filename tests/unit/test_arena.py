"""Slots of several sizes in one buffer."""

from __future__ import annotations

import numpy as np
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kvstore.tiers.arena import ALIGNMENT, Arena, slot_bytes

PAGE = ALIGNMENT


def test_one_class_uses_the_whole_buffer():
    for pages in (1, 7, 64, 1000, 1001):
        for slot in (1, 3, 7):
            arena = Arena(pages * PAGE)
            offsets = arena.allocate(slot * PAGE, 10**6)
            assert len(offsets) == pages // slot == arena.capacity_slots(slot * PAGE)
            assert arena.used_bytes == len(offsets) * slot * PAGE
            arena.check_invariants()


def test_slots_come_in_ascending_runs():
    arena = Arena(1000 * PAGE)
    assert arena.allocate(PAGE, 100).tolist() == list(range(0, 100 * PAGE, PAGE))


def test_too_small_a_buffer_has_no_slot():
    assert len(Arena(10).allocate(PAGE, 1)) == 0
    assert len(Arena(3 * PAGE).allocate(4 * PAGE, 1)) == 0


def test_an_empty_slab_serves_another_class():
    arena = Arena(64 * PAGE)
    small = arena.allocate(PAGE, 64)
    assert len(arena.allocate(8 * PAGE, 1)) == 0
    arena.release(PAGE, small[8:16])
    large = arena.allocate(8 * PAGE, 5)
    assert large.tolist() == [8 * PAGE]
    arena.check_invariants()
    arena.release(8 * PAGE, large)
    assert len(arena.allocate(PAGE, 100)) == 8
    arena.check_invariants()


def test_slot_bytes():
    assert [slot_bytes(size) for size in (1, 4096, 4097)] == [4096, 4096, 8192]


class ArenaMachine(RuleBasedStateMachine):
    """Whatever is asked for, slots never overlap and always come back."""

    def __init__(self):
        super().__init__()
        self.arena = Arena(40 * PAGE)
        self.held: list[tuple[int, int]] = []

    @rule(size=st.sampled_from([1, 2, 3, 7]), count=st.integers(0, 12))
    def allocate(self, size, count):
        offsets = self.arena.allocate(size * PAGE, count)
        assert len(offsets) <= count
        self.held += [(int(offset), size * PAGE) for offset in offsets]

    @rule(data=st.data())
    def release(self, data):
        for size in (1, 2, 3, 7):
            mine = [slot for slot in self.held if slot[1] == size * PAGE]
            freed = data.draw(st.lists(st.sampled_from(mine), unique=True)) if mine else []
            self.arena.release(
                size * PAGE, np.array([offset for offset, _ in freed], np.int64)
            ) if freed else None
            self.held = [slot for slot in self.held if slot not in freed]

    @invariant()
    def disjoint(self):
        self.arena.check_invariants()
        end = 0
        for offset, size in sorted(self.held):
            assert offset >= end
            end = offset + size
        assert end <= 40 * PAGE
        assert self.arena.used_bytes == sum(size for _, size in self.held)


TestArena = ArenaMachine.TestCase


def test_sizes_that_found_no_room_or_left_are_forgotten():
    arena = Arena(4 * ALIGNMENT)
    held = arena.allocate(ALIGNMENT, 4)
    for pages in range(2, 200):
        assert not len(arena.allocate(pages * ALIGNMENT, 1))
    assert set(arena._free) == {ALIGNMENT}
    arena.release(ALIGNMENT, held)
    for pages in (2, 3, 4):
        arena.release(pages * ALIGNMENT, arena.allocate(pages * ALIGNMENT, 1))
    assert len(arena._free) <= 2
    arena.check_invariants()
