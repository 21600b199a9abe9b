"""Devices in trouble: the disk tier goes on with what still works, and no error reaches the caller."""

import errno
import os
import shutil
import sqlite3
from contextlib import suppress
from pathlib import Path

import numpy as np

from kvstore.testing import FakeClock
from kvstore.testing.disk import FaultySystem, identities
from kvstore.tiers.disk import slot_bytes_of
from kvstore.tiers.disk.files import index_of
from tests.unit.disk_blocks import (
    BUDGET,
    LARGE,
    OPTIONS,
    SMALL,
    SMALL_SLOT,
    contents,
    everything,
    get,
    let_go,
    opened,
    prompt,
    put,
)


def open_files():
    links = []
    for descriptor in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):
            links.append(str(descriptor.readlink()))
    return links


def put_in_vain(store, first):
    """Write a prompt of which nothing is stored."""
    offsets, _, stored = put(store, SMALL, prompt(SMALL, first, 12))
    assert not stored.any()
    store.release(SMALL_SLOT, offsets)


class TestTrouble:
    def test_writing_pauses_longer_and_longer_and_reading_goes_on(self, path):
        clock, system = FakeClock(), FaultySystem()
        store = opened(path, system, clock)
        known = put(store, SMALL, prompt(SMALL, 0, 12))

        def full(name, number):
            if name == "write":
                raise OSError(errno.ENOSPC, "full")

        system.fault = full
        tries = []
        for _ in range(400):
            calls = system.calls.count("write")
            put_in_vain(store, 1)
            if system.calls.count("write") > calls:
                tries.append(clock.now_s)
            clock.advance(0.5)
        pauses = np.diff(tries)
        assert (np.diff(pauses) >= 0).all()
        assert pauses.max() >= 32.0
        assert store.off == {"read": "", "write": "no_space"}
        assert get(store, *known[:2]) == ["good"] * 12
        system.fault = None
        clock.advance(60.0)
        assert put(store, SMALL, prompt(SMALL, 1, 12))[2].all()
        assert store.off == {"read": "", "write": ""}
        store.close()

    def test_a_bad_spot_is_set_aside_and_a_dead_device_turned_off(self, path):
        clock, system = FakeClock(), FaultySystem()
        store = opened(path, system, clock)
        offsets, blocks, _ = put(store, LARGE, prompt(LARGE, 0, 12))
        bad = int(offsets[2])
        real = system.read

        def read(descriptor, buffers, offset):
            stop = offset + sum(map(len, buffers))
            if offset <= bad < stop:
                raise OSError(errno.EIO, "bad sector")
            return real(descriptor, buffers, offset)

        system.read = read
        assert get(store, offsets, blocks) == ["good"] * 2 + ["unreadable"] + ["good"] * 9
        assert store.slots.bad_bytes == slot_bytes_of(LARGE)
        system.read = real
        system.fault = lambda name, number: (_ for _ in ()).throw(OSError(errno.EIO, "dead"))
        assert get(store, offsets[3:], blocks[3:]) == ["off"] * 9
        assert get(store, offsets[3:], blocks[3:]) == ["off"] * 9
        system.fault = None
        assert get(store, offsets[3:], blocks[3:]) == ["off"] * 9, "not before the pause is over"
        clock.advance(2.0)
        assert get(store, offsets[3:], blocks[3:]) == ["good"] * 9
        store.close()

    def test_a_directory_that_vanishes_and_comes_back(self, path):
        clock = FakeClock()
        store = opened(path, clock=clock)
        offsets, blocks, _ = put(store, SMALL, prompt(SMALL, 0, 12))
        path.rename(path.with_name("away"))
        put_in_vain(store, 1)
        clock.advance(2.0)
        put_in_vain(store, 1)
        assert store.troubles["write", "vanished"] == 2
        assert not path.exists(), "never made anew: a mount may be missing"
        assert get(store, offsets, blocks) == ["good"] * 12, "the files are still open"
        path.with_name("away").rename(path)
        clock.advance(2.0)
        assert get(store, offsets, blocks) == ["good"] * 12
        fresh, _, stored = put(store, SMALL, prompt(SMALL, 1, 12))
        assert stored.all()
        shutil.rmtree(path)
        path.mkdir()
        put_in_vain(store, 2)
        before = max(store.slots.generations(fresh))
        clock.advance(2.0)
        newest, _, stored = put(store, SMALL, prompt(SMALL, 3, 12))
        assert stored.all()
        assert min(store.slots.generations(newest)) > before, "no generation is given twice"
        assert get(store, offsets, blocks) == ["missing"] * 12
        store.check_invariants()
        store.close()
        store = opened(path)
        assert get(store, *everything(store)) == ["good"] * 12
        store.close()

    def test_too_slow(self, path):
        clock, system = FakeClock(), FaultySystem()
        store = opened(path, system, clock)

        def slow(name, number):
            if name == "write":
                clock.advance(31.0)

        system.fault = slow
        offsets, blocks, stored = put(store, SMALL, prompt(SMALL, 0, 12))
        assert stored.all(), "late, but there"
        assert store.off["write"] == "slow"
        assert not put(store, SMALL, prompt(SMALL, 1, 12))[2].any()
        assert get(store, offsets, blocks) == ["good"] * 12
        store.close()

    def test_closed(self, path):
        store = opened(path)
        offsets, blocks, _ = put(store, SMALL, prompt(SMALL, 0, 12))
        store.close()
        store.close()
        assert not store.readable
        assert not store.writable
        assert get(store, offsets, blocks) == ["off"] * 12
        fresh, _, stored = put(store, SMALL, prompt(SMALL, 1, 12))
        assert not stored.any()
        assert not store.flush()
        for slots in (fresh, offsets):
            store.release(SMALL_SLOT, slots)
        assert store.slots.used_bytes == 0
        store.close()
        store = opened(path)
        assert get(store, *everything(store)) == ["good"] * 12, (
            "let go of after closing: still there"
        )
        store.close()

    def test_readable_and_writable_say_what_would_be_tried(self, path):
        clock, system = FakeClock(), FaultySystem()
        store = opened(path, system, clock)
        offsets, blocks, _ = put(store, SMALL, prompt(SMALL, 0, 12))
        assert store.readable
        assert store.writable
        system.fault = lambda name, number: (_ for _ in ()).throw(OSError(errno.EIO, "dead"))
        assert get(store, offsets, blocks) == ["off"] * 12
        assert not store.readable
        assert not put(store, SMALL, prompt(SMALL, 1, 12))[2].any()
        assert not store.writable
        clock.advance(2.0)
        assert store.readable, "the pause is over: it may be tried"
        assert store.writable
        system.fault = None
        store.close()

    def test_an_empty_place_where_a_mount_is_missing_is_left_alone(self, path):
        class Mounts(FaultySystem):
            missing = False

            def stat(self, path):
                fields = list(super().stat(path))
                fields[2] += self.missing
                return os.stat_result(fields)

        clock, system = FakeClock(), Mounts()
        store = opened(path, system, clock)
        offsets, blocks, _ = put(store, SMALL, prompt(SMALL, 0, 12))
        path.rename(path.with_name("away"))
        path.mkdir()
        system.missing = True
        for first in range(1, 4):
            put_in_vain(store, first)
            clock.advance(61.0)
        assert not list(path.iterdir()), "it may be on a disk that has no room"
        assert get(store, offsets, blocks) == ["good"] * 12
        store.close()

    def test_a_directory_of_somebody_else_in_its_place_is_left_alone(self, path):
        clock = FakeClock()
        store = opened(path, clock=clock)
        offsets, blocks, _ = put(store, SMALL, prompt(SMALL, 0, 12))
        path.rename(path.with_name("away"))
        path.mkdir()
        (path / "thesis.tex").write_text("mine")
        for first in range(1, 4):
            put_in_vain(store, first)
            assert get(store, offsets, blocks) == ["good"] * 12
            clock.advance(61.0)
        assert store.troubles["write", "not_ours"] == 2
        shutil.rmtree(path)
        path.mkdir()
        assert put(store, SMALL, prompt(SMALL, 4, 12))[2].all()
        assert get(store, offsets, blocks) == ["missing"] * 12
        assert not [link for link in open_files() if link.startswith(str(path.with_name("away")))]
        store.close()

    def test_a_deleted_directory_gives_its_space_back(self, path):
        clock = FakeClock()
        store = opened(path, clock=clock)
        offsets, blocks, _ = put(store, SMALL, prompt(SMALL, 0, 12))
        shutil.rmtree(path)
        for first in (1, 2):
            put_in_vain(store, first)
            clock.advance(2.0)
        assert not [link for link in open_files() if link.startswith(str(path))]
        assert get(store, offsets, blocks) == ["off"] * 12
        assert store.off == {"read": "vanished", "write": "vanished"}
        path.mkdir()
        clock.advance(60.0)
        assert put(store, SMALL, prompt(SMALL, 3, 12))[2].all()
        assert get(store, offsets, blocks) == ["missing"] * 12
        store.close()


class TestReadingGoesOn:
    """Whatever happens to writing."""

    def test_on_a_file_system_that_became_read_only(self, path):
        class ReadOnly(FaultySystem):
            def open(self, path, flags):
                if self.fault and flags & os.O_ACCMODE != os.O_RDONLY:
                    raise OSError(errno.EROFS, "read-only")
                return super().open(path, flags)

        def fault(name, number):
            if name == "commit":
                raise sqlite3.OperationalError("attempt to write a readonly database")
            if name in ("write", "allocate", "truncate", "remove", "make_private"):
                raise OSError(errno.EROFS, "read-only")

        clock, system = FakeClock(), ReadOnly()
        store = opened(path, system, clock)
        known = put(store, LARGE, prompt(LARGE, 0, 12))
        system.fault = fault
        for _ in range(10):
            put_in_vain(store, 1)
            assert get(store, *known[:2]) == ["good"] * 12
            assert store.readable
            clock.advance(61.0)
        assert store.troubles["write", "manifest"] == 1
        assert store.troubles["write", "read_only"] == 9, "when the list of blocks is opened anew"
        assert not store.flush()
        system.fault = None
        clock.advance(61.0)
        assert put(store, SMALL, prompt(SMALL, 1, 12))[2].all()
        assert get(store, *known[:2]) == ["good"] * 12
        store.close()

    def test_on_a_file_system_that_others_have_filled(self, path):
        class Full(FaultySystem):
            def free_bytes(self, path):
                return 0 if self.fault else super().free_bytes(path)

        failures = [sqlite3.OperationalError("disk I/O error")]

        def fault(name, number):
            if name == "commit" and failures:
                raise failures.pop()

        clock, system = FakeClock(), Full()
        store = opened(path, system, clock)
        known = put(store, LARGE, prompt(LARGE, 0, 12))
        system.fault = fault
        put_in_vain(store, 1)
        clock.advance(2.0)
        assert put(store, SMALL, prompt(SMALL, 2, 12))[2].all(), "all its files are there already"
        assert get(store, *known[:2]) == ["good"] * 12
        store.close()

    def test_files_are_opened_anew_only_where_that_helps(self, path):
        class Dead(FaultySystem):
            dead, gone = set(), False

            def open(self, path, flags):
                descriptor = super().open(path, flags)
                self.dead.discard(descriptor)
                return descriptor

            def read(self, descriptor, buffers, offset):
                if self.gone or descriptor in self.dead:
                    raise OSError(errno.EIO, "the device was pulled")
                return super().read(descriptor, buffers, offset)

        clock, system = FakeClock(), Dead()
        store = opened(path, system, clock)
        offsets, blocks, _ = put(store, LARGE, prompt(LARGE, 0, 12))
        system.gone = True
        assert get(store, offsets, blocks) == ["off"] * 12
        clock.advance(2.0)
        system.calls.clear()
        assert get(store, offsets, blocks) == ["off"] * 12
        assert "lock" not in system.calls, "what is open stays open"
        assert store.troubles["read", "io_error"] == 2
        system.gone = False
        clock.advance(5.0)
        assert get(store, offsets, blocks) == ["good"] * 12
        assert "lock" not in system.calls, "what is open works again"
        system.dead.update(range(1000))
        assert get(store, offsets, blocks) == ["off"] * 12
        clock.advance(5.0)
        assert get(store, offsets, blocks) == ["good"] * 12
        store.close()


class TestBadSpots:
    """A device of which some bytes cannot be read or written."""

    def opened(self, path):
        self.clock, self.system = FakeClock(), Spots()
        self.store = opened(path, self.system, self.clock)

    def test_the_neighbours_of_an_unwritable_slot_are_stored(self, path):
        self.opened(path)
        store, size = self.store, slot_bytes_of(LARGE)
        self.system.bad_for("write", [2 * size, 5 * size + 4096])
        offsets, blocks, stored = put(store, LARGE, prompt(LARGE, 0, 12))
        assert np.flatnonzero(~stored).tolist() == [2, 5]
        assert store.off == {"read": "", "write": ""}
        assert store.slots.bad_bytes == 2 * size
        self.system.bad_for("write", [])
        again = store.write(offsets[[2]], blocks[2:3], contents(LARGE, prompt(LARGE, 0, 3))[2:])
        assert not again.stored.any(), "it is not trusted any more"
        let_go(store, offsets, blocks, ~stored)
        again, _, stored = put(store, LARGE, prompt(LARGE, 0, 12), 10)
        assert stored.all()
        assert not set(again.tolist()) & set(offsets[[2, 5]].tolist())
        store.check_invariants()
        store.close()
        store = opened(path)
        assert len(everything(store)[1]) == 2, (
            "the first two; nothing hangs from a block that is not there"
        )
        store.close()

    def test_one_unwritable_slot_is_not_the_whole_device(self, path):
        self.opened(path)
        self.system.bad_for("write", [0])
        offsets, _, stored = put(self.store, LARGE, prompt(LARGE, 0, 1))
        assert not stored.any()
        assert self.store.writable
        self.store.release(slot_bytes_of(LARGE), offsets)
        assert put(self.store, LARGE, prompt(LARGE, 0, 1))[2].all(), "another slot"
        self.store.close()

    def test_a_device_that_cannot_be_written_loses_no_slot(self, path):
        self.opened(path)
        self.system.bad_for("write", [*range(0, BUDGET, 4096), ELSEWHERE])
        self.system.calls.clear()
        assert not put(self.store, SMALL, prompt(SMALL, 0, 12))[2].any()
        assert self.store.off["write"] == "io_error"
        assert self.store.slots.bad_bytes == 0
        assert self.system.calls.count("write") == 5, (
            "not every slot was tried; one in another file was"
        )
        self.store.close()

    def test_one_unreadable_block_is_not_the_whole_device(self, path):
        self.opened(path)
        offsets, blocks, _ = put(self.store, LARGE, prompt(LARGE, 0, 3))
        for bad in (0, 2):
            self.system.bad_for("read", [int(offsets[bad])])
            assert get(self.store, offsets[[bad]], [blocks[bad]]) == ["unreadable"]
            assert self.store.off["read"] == ""
        assert get(self.store, offsets, blocks) == ["missing", "good", "missing"]
        assert self.store.slots.bad_bytes == 2 * slot_bytes_of(LARGE)
        self.store.close()

    def test_a_call_that_fails_once_costs_nothing(self, path):
        self.opened(path)
        failures = {"write": 1, "read": 1}

        def fault(name, number):
            if failures.get(name):
                failures[name] -= 1
                raise OSError(errno.EIO, "once")

        self.system.fault = fault
        offsets, blocks, stored = put(self.store, LARGE, prompt(LARGE, 0, 1))
        assert stored.all()
        assert get(self.store, offsets, blocks) == ["good"]
        assert failures == {"write": 0, "read": 0}
        assert self.store.slots.bad_bytes == 0
        self.store.close()

    def test_a_dead_device_is_not_tried_block_by_block(self, path):
        self.opened(path)
        offsets = self.store.allocate(SMALL_SLOT, 120)[::2]  # a call for each
        blocks = [block for n in range(60) for block in identities(SMALL, prompt(SMALL, n, 1))]
        payloads = [np.zeros(256, np.uint8)] * 60
        assert self.store.write(offsets, blocks, payloads).stored.all()
        self.system.bad_for("read", range(0, BUDGET, 4096))
        self.system.calls.clear()
        assert self.store.read(offsets, blocks, payloads) == ["off"] * 60
        assert self.system.calls.count("read") < 2 * 60
        assert self.store.off["read"] == "io_error"
        assert self.store.slots.bad_bytes == 0
        self.store.close()

    def test_neighbours_of_many_unreadable_slots_are_not_all_tried(self, path):
        self.opened(path)
        store = self.store
        offsets = store.allocate(SMALL_SLOT, 100)
        blocks = [block for n in range(100) for block in identities(SMALL, prompt(SMALL, n, 1))]
        assert store.write(offsets, blocks, [np.zeros(256, np.uint8)] * 100).stored.all()
        self.system.bad_for("read", range(int(offsets[10]), BUDGET, 4096))
        self.system.calls.clear()
        targets = [np.zeros(256, np.uint8)] * 100
        verdicts = store.read(offsets, blocks, targets)
        assert verdicts == ["good"] * 10 + ["unreadable"] * 3 + ["off"] * 87
        assert self.system.calls.count("read") < 20
        assert store.slots.bad_bytes == 3 * SMALL_SLOT, "only what was really tried"
        assert store.off["read"] == ""
        store.close()


ELSEWHERE = 1 << 40
"""Stands for what lies in other files than the segments."""


class Spots(FaultySystem):
    """Calls that touch one of some pages fail."""

    def __init__(self):
        super().__init__()
        self._bad = {"read": (), "write": ()}
        self._starts = {}

    def bad_for(self, name, offsets):
        """Let pages at ``offsets`` of the address space be bad."""
        self._bad[name] = np.array(offsets, np.int64)

    def open(self, path, flags):
        descriptor = super().open(path, flags)
        index = index_of(path.name)
        self._starts[descriptor] = ELSEWHERE if index is None else index * OPTIONS.segment_bytes
        return descriptor

    def _check(self, name, descriptor, buffers, offset):
        start = self._starts[descriptor] + offset
        stop = start + sum(map(len, buffers))
        bad = np.array(self._bad[name], np.int64)
        if ((start - 4096 < bad) & (bad < stop)).any():
            self.calls.append(name)
            raise OSError(errno.EIO, "bad sector")

    def read(self, descriptor, buffers, offset):
        self._check("read", descriptor, buffers, offset)
        return super().read(descriptor, buffers, offset)

    def write(self, descriptor, buffers, offset):
        self._check("write", descriptor, buffers, offset)
        return super().write(descriptor, buffers, offset)
