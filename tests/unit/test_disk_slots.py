"""Slots of the disk: none is lost, bad ones stay out of use, and a restart finds the same ones in use."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from kvstore.tiers.disk.slots import EMPTY, LOST, Slots

PAGE = 4096


def let_go(slots, sizes):
    """Release slots of several sizes: offset → size."""
    for size in set(sizes.values()):
        mine = [offset for offset in sizes if sizes[offset] == size]
        slots.release(size, np.array(mine, np.int64))


def test_a_released_slot_can_be_had_again_and_its_row_is_stale():
    slots = Slots(8 * PAGE)
    offsets = slots.allocate(2 * PAGE, 9)
    assert offsets.tolist() == [0, 2 * PAGE, 4 * PAGE, 6 * PAGE]
    slots.stored([0], [5])
    slots.release(2 * PAGE, offsets[:2])
    assert slots.stale() == [0], "the second one was never written"
    assert slots.allocate(2 * PAGE, 9).tolist() == [0, 2 * PAGE]
    slots.check_invariants()


def test_a_slab_that_is_emptied_serves_slots_of_another_size():
    slots = Slots(128 * PAGE)
    assert slots.capacity_slots(PAGE) == 128
    small = slots.allocate(PAGE, 128)
    assert not len(slots.allocate(2 * PAGE, 1))
    start, stop = slots.slabs(PAGE)[0]
    slots.release(PAGE, small[(small >= start) & (small < stop)])
    assert slots.allocate(2 * PAGE, 9).tolist() == [start]
    slots.check_invariants()


def test_a_bad_slot_stays_out_of_use():
    slots = Slots(4 * PAGE)
    offsets = slots.allocate(2 * PAGE, 2)
    slots.stored(offsets.tolist(), [1, 2])
    assert not slots.quarantine(0, 7), "another block is there by now"
    assert slots.quarantine(0, 1)
    assert not slots.quarantine(0, 1)
    assert slots.generations(offsets) == [LOST, 2]
    slots.stored([0], [9])
    assert slots.generations(offsets) == [LOST, 2]
    assert slots.used_bytes == 4 * PAGE, "bad, but held"
    slots.release(2 * PAGE, offsets)
    assert slots.used_bytes == 0
    slots.check_invariants()
    assert slots.stale() == [0, 2 * PAGE]
    assert slots.allocate(2 * PAGE, 9).tolist() == [2 * PAGE]
    assert slots.bad_bytes == slots.used_bytes == 2 * PAGE
    slots.release(PAGE, slots.allocate(PAGE, 1))
    slots.check_invariants()


def test_a_slab_with_a_bad_slot_is_not_offered_for_emptying():
    slots = Slots(128 * PAGE)
    offsets = slots.allocate(PAGE, 128)
    (first, *_), bad = slots.slabs(PAGE), int(offsets[1])
    slots.stored([bad], [1])
    assert slots.quarantine(bad, 1)
    slots.release(PAGE, offsets)
    assert first not in slots.slabs(PAGE)
    assert len(slots.slabs(PAGE)) == 63
    taken, missing = slots.allocate_outside(PAGE, 2, 0, 120 * PAGE)
    assert not missing
    assert (taken >= 120 * PAGE).all()
    assert slots.generations(taken) == [EMPTY, EMPTY]
    assert slots.used_bytes == 2 * PAGE
    slots.check_invariants()


def test_a_directory_that_came_back_without_some_rows():
    slots = Slots(8 * PAGE)
    offsets = slots.allocate(2 * PAGE, 3)
    slots.stored(offsets.tolist(), [1, 2, 3])
    slots.keep_only({0: 1, 2 * PAGE: 9, 6 * PAGE: 4})
    assert slots.generations(offsets) == [1, LOST, LOST]
    assert slots.generations(np.array([6 * PAGE])) == [EMPTY]
    assert slots.stale() == [2 * PAGE, 6 * PAGE]
    slots.deleted([2 * PAGE, 6 * PAGE])
    slots.release(2 * PAGE, offsets)
    slots.check_invariants()


@given(
    st.lists(
        st.tuples(st.integers(1, 5), st.integers(1, 40), st.floats(0, 1)), min_size=1, max_size=12
    ),
    st.integers(0, 2**32 - 1),
)
def test_a_restart_finds_the_same_slots_in_use(steps, seed):
    rng = np.random.default_rng(seed)
    slots, sizes = Slots(300 * PAGE), {}
    for pages, count, keep in steps:
        for offset in slots.allocate(pages * PAGE, count).tolist():
            sizes[offset] = pages * PAGE
        gone = [offset for offset in sizes if rng.random() > keep]
        let_go(slots, {offset: sizes[offset] for offset in gone})
        sizes = {offset: size for offset, size in sizes.items() if offset not in gone}
    slots.check_invariants()
    again = Slots(300 * PAGE)
    offsets = np.array(sorted(sizes), np.int64)
    again.occupy(offsets, np.array([sizes[at] for at in offsets.tolist()], np.int64), offsets + 1)
    again.check_invariants()
    assert again.used_bytes == slots.used_bytes
    assert again.num_live == len(sizes)
    let_go(again, sizes)
    again.check_invariants()
    assert len(again.allocate(PAGE, 300)) == 300, "when all is free again, all can be had"
    again.check_invariants()


def test_after_a_restart_slabs_have_their_usual_length():
    slots = Slots(128 * PAGE)
    offsets = np.delete(np.arange(0, 128 * PAGE, PAGE), [40, 41, 42, 43])
    slots.occupy(offsets, np.full(124, PAGE), offsets + 1)
    slots.check_invariants()
    assert {stop - start for start, stop in slots.slabs(PAGE)} == {2 * PAGE}
    assert slots.allocate(2 * PAGE, 2).tolist() == [40 * PAGE, 42 * PAGE], (
        "slabs with no slot in use"
    )
    slots.release(PAGE, offsets[10:12])
    assert slots.allocate(2 * PAGE, 9).tolist() == [10 * PAGE]
    slots.check_invariants()
