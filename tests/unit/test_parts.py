"""Blocks written in parts, inside the pool: tiers, slabs, events, limits. What every client sees is in the
contract suite."""

from __future__ import annotations

import numpy as np
import pytest

from kvstore.blocks import BlockState
from kvstore.events import BlockStored
from kvstore.namespace import KVLayout, Namespace
from kvstore.parts import Parts, mask_of, part_of
from kvstore.testing import ManualMover, pattern, small_pool
from kvstore.testing.contracts import ClientContract

RANKS = Namespace(b"w", KVLayout(1, 4, 8, "float32", block_tokens=4))
LARGE = Namespace(b"w", KVLayout(3, 4, 32, "float32", block_tokens=4))  # three pages a block
LEFT, RIGHT = (0, 2), (2, 4)


class Client(ClientContract):
    ranks = RANKS

    def make_store(self, num_blocks):
        return small_pool(num_blocks)


CLIENT = Client()


def put(pool, tokens, namespace=RANKS):
    return CLIENT.put(pool, tokens, namespace)


def put_part(pool, tokens, heads):
    committed = CLIENT.put_part(pool, tokens, heads)
    pool.check_invariants()
    return committed


def reserve(pool, tokens, heads, **options):
    reservation = pool.reserve(RANKS, tokens, heads=heads, **options)
    pool.check_invariants()
    return reservation


def commit(pool, reservation, tokens, heads):
    CLIENT.fill_part(reservation, tokens, heads)
    committed = pool.commit(reservation)
    pool.check_invariants()
    return committed


def hits(pool, tokens):
    """Blocks of a lease whose bytes are right."""
    with pool.acquire(RANKS, [*tokens, 0]) as lease:
        CLIENT.check(lease, tokens)
        return lease.num_blocks


def unfinished(pool):
    return len(pool._residency.parts)


class TestWhatIsHandedOut:
    def test_joined_blocks_come_before_new_ones_and_count_against_the_limit(self):
        with small_pool(16) as pool:
            put_part(pool, range(16), LEFT)
            some = reserve(pool, range(24), RIGHT, max_blocks=3)
            assert (some.indices.tolist(), some.refused) == ([0, 1, 2], 3)
            more = reserve(pool, range(24), RIGHT, max_blocks=2)
            assert (more.indices.tolist(), more.refused) == ([3, 4], 1)
            none = reserve(pool, range(24), RIGHT, max_blocks=0)
            assert (none.num_blocks, none.refused) == (0, 1)
            assert commit(pool, some, range(24), RIGHT) == 3
            assert commit(pool, more, range(24), RIGHT) == 1
            assert hits(pool, range(16)) == 4
            assert unfinished(pool) == 1

    def test_a_full_table_of_holders_gives_nothing_and_claims_nothing(self):
        with small_pool(8) as pool:
            put_part(pool, range(8), LEFT)
            other = pool.reserve(RANKS, range(100, 104))
            pool._holds.max_held = 1
            refused = reserve(pool, range(16), RIGHT)
            assert (refused.num_blocks, refused.refused) == (0, 4)
            pool.abort(other)
            assert reserve(pool, range(8), RIGHT).num_blocks == 2
            assert pool.stats().counts["refused_leases",] == 1

    def test_without_room_for_new_ones_those_that_are_there_are_still_completed(self):
        with small_pool(4) as pool:
            put_part(pool, range(8), LEFT)
            lease = pool.reserve(RANKS, range(100, 108))
            joined = reserve(pool, range(16), RIGHT)
            assert (joined.indices.tolist(), joined.refused) == ([0, 1], 2)
            assert commit(pool, joined, range(16), RIGHT) == 2
            pool.abort(lease)
            assert hits(pool, range(8)) == 2

    def test_the_known_blocks_before_are_held_and_those_behind_are_not(self):
        with small_pool(8) as pool:
            put(pool, range(4))
            put_part(pool, range(8), LEFT)
            put(pool, range(12))  # completes the second, adds a third
            put_part(pool, range(16), LEFT)
            fourth = reserve(pool, range(16), RIGHT)
            assert fourth.indices.tolist() == [3]
            assert pool.stats().held_blocks == 4
            put_part(pool, range(20), LEFT)
            again = reserve(pool, range(20), RIGHT, max_blocks=0)
            assert again.num_blocks == 0
            pool.abort(fourth)
            assert pool.stats().held_blocks == 0
            first = reserve(pool, range(20), RIGHT, max_blocks=1)
            assert first.indices.tolist() == [3]
            assert pool.stats().held_blocks == 4, "not the fifth"

    def test_keys_that_are_hashes_and_latent_attention(self):
        for layout, keys in (
            (KVLayout(1, 4, 8, "float32", block_tokens=4), "hash"),
            (KVLayout(1, 4, 8, "float32", block_tokens=4, attention="mla"), "tokens"),
        ):
            namespace = Namespace(b"w", layout, keys=keys)
            key = bytes(range(2 * namespace.key_bytes // 2)) * 2
            tokens = key if keys == "hash" else range(8)
            with small_pool(4) as pool:
                first = pool.reserve(namespace, tokens, heads=(0, 3))
                second = pool.reserve(namespace, tokens, heads=(3, 4))
                assert first.num_blocks == second.num_blocks == 2
                assert (pool.commit(first), pool.commit(second)) == (0, 2)
                pool.check_invariants()


def test_each_run_of_blocks_that_became_visible_is_told():
    with small_pool(16) as pool:
        pool.events.read(0)
        put_part(pool, range(24), LEFT)
        zeroth = reserve(pool, range(24), RIGHT, max_blocks=1)
        first = reserve(pool, range(24), RIGHT, max_blocks=1)
        assert commit(pool, first, range(24), RIGHT) == 1
        pool.abort(zeroth)
        rest = reserve(pool, range(28), RIGHT)
        assert rest.indices.tolist() == [0, 2, 3, 4, 5, 6]
        assert commit(pool, rest, range(28), RIGHT) == 5
        told = [event for event in pool.events.read(0)[0] if isinstance(event, BlockStored)]
        assert [(event.start, event.stop) for event in told] == [(1, 2), (0, 1), (2, 6)]
        for event in told:
            assert event.prefix == np.arange(4 * event.stop, dtype="<i4").tobytes()
        assert hits(pool, range(24)) == 6


def test_only_what_became_visible_is_told():
    """Of the blocks of one commit others may write the first one still."""
    with small_pool(16) as pool:
        pool.events.read(0)
        put_part(pool, range(8), LEFT)
        zeroth, first = (reserve(pool, range(8), (2, 3), max_blocks=1) for _ in range(2))
        assert commit(pool, first, range(8), (2, 3)) == 0
        assert put_part(pool, range(8), (3, 4)) == 1
        assert commit(pool, zeroth, range(8), (2, 3)) == 1
        assert [(told.start, told.stop) for told in pool.events.read(0)[0]] == [(1, 2), (0, 1)]
        assert hits(pool, range(8)) == 2


def test_nothing_is_told_of_an_orphan_that_leaves():
    with small_pool(4) as pool:
        pool.events.read(0)
        put_part(pool, range(16), LEFT)
        put(pool, range(100, 116))
        assert [event.start for event in pool.events.read(0)[0]] == [0]
        assert unfinished(pool) == 0


class TestOtherTiers:
    def test_an_orphan_is_not_moved_down_but_dropped_with_what_is_behind_it(self):
        mover = ManualMover()
        with small_pool(4, 16, mover=mover) as pool:
            put(pool, range(4))
            put_part(pool, range(8), LEFT)
            put(pool, range(12))
            mover.drain()
            assert pool.evict(RANKS, range(12)) == 3
            put_part(pool, range(8), LEFT)
            blocker = reserve(pool, range(4), RIGHT)  # the first block only
            behind = pool.reserve(RANKS, range(16))
            assert behind.indices.tolist() == [1, 2, 3]
            pool.abort(blocker)
            CLIENT.fill(behind, range(16))
            assert pool.commit(behind) == 3
            mover.drain()
            assert [tier.num_blocks for tier in pool.stats().tiers] == [4, 3]
            assert put(pool, range(100, 116)) == 4
            mover.drain()
            pool.check_invariants()
            assert unfinished(pool) == 0
            assert pool.stats().counts["failed_moves", "gpu", "dram"] == 0
            assert hits(pool, range(100, 116)) == 4

    def test_ready_blocks_before_an_orphan_are_moved_down(self):
        mover = ManualMover(max_waiting=0)
        with small_pool(3, 16, mover=mover) as pool:
            put(pool, range(8))  # not written through: the mover is busy
            put_part(pool, range(12), LEFT)
            mover._max_waiting = 10
            assert put(pool, range(100, 112)) == 3
            mover.drain()
            pool.check_invariants()
            assert unfinished(pool) == 0
            assert hits(pool, range(8)) == 2
            assert hits(pool, range(100, 112)) == 3

    def test_a_finished_block_is_written_through_and_verified(self):
        mover = ManualMover()
        with small_pool(4, 8, mover=mover) as pool:
            put_part(pool, range(16), LEFT)
            assert not mover.jobs
            assert put_part(pool, range(16), RIGHT) == 4
            mover.drain()
            assert [tier.num_blocks for tier in pool.stats().tiers] == [4, 4]
            with pool.acquire(RANKS, range(17)) as lease:
                assert pool.verify(lease) == 4
            assert pool.demote(RANKS, range(16), "gpu") == 4
            assert hits(pool, range(16)) == 4


def test_the_rest_of_a_slab_is_not_moved_with_an_orphan_in_it():
    """Another size needs a slab, and every slab has an orphan: they go, and nothing else is mixed up."""
    mover = ManualMover()
    with small_pool(64, mover=mover, max_slabs=4) as pool:
        for start in range(0, 6400, 100):
            if start % 800:
                put(pool, range(start, start + 4))
            else:
                put_part(pool, range(start, start + 4), LEFT)
        mover.drain()
        assert unfinished(pool) == 8
        for start in range(0, 6400, 800):  # the orphans are recent
            with pool.acquire(RANKS, range(start, start + 5)) as lease:
                assert not lease.num_blocks
        stored = 0
        for number in range(20):
            stored += put(pool, range(10**6 + number * 100, 10**6 + number * 100 + 4), LARGE)
            for heads in (LEFT, RIGHT):  # meanwhile some orphans are completed
                put_part(pool, range(number * 800, number * 800 + 4), heads)
            mover.run_one()
            pool.check_invariants()
        mover.drain()
        assert stored > 5
        for start in range(0, 17000, 100):
            hits(pool, range(start, start + 4))
        for number in range(20):
            with pool.acquire(
                LARGE, range(10**6 + number * 100, 10**6 + number * 100 + 5)
            ) as lease:
                CLIENT.check(lease, range(10**6 + number * 100, 10**6 + number * 100 + 4))


def test_slabs_full_of_orphans_give_way_to_another_size():
    with small_pool(64, max_slabs=4) as pool:
        for start in range(0, 6400, 100):
            put_part(pool, range(start, start + 4), LEFT)
        assert put(pool, range(20), LARGE) == 5
        pool.check_invariants()
        assert 30 < unfinished(pool) < 60, "a slab or two of them"


class TestEnds:
    def test_pressure_leaves_no_record_behind(self):
        with small_pool(16) as pool:
            for start in range(0, 10_000, 100):
                put_part(pool, range(start, start + 12), LEFT if start % 200 else RIGHT)
            assert unfinished(pool) == pool.stats().num_blocks == 16
            pool.clear()
            assert unfinished(pool) == pool.stats().num_blocks == 0

    def test_what_others_put_behind_goes_with_what_was_given_up(self):
        with small_pool(8) as pool:
            mine = reserve(pool, range(8), LEFT)
            behind = reserve(pool, range(16), RIGHT, max_blocks=0)
            whole = pool.reserve(RANKS, range(16))
            assert (behind.num_blocks, whole.indices.tolist()) == (0, [2, 3])
            pool.abort(mine)
            pool.check_invariants()
            assert pool.commit(whole) == 0
            assert pool.stats().num_blocks == 0

    def test_a_part_behind_one_that_was_given_up_counts_for_nothing(self):
        with small_pool(8) as pool:
            whole = pool.reserve(RANKS, range(8))
            behind = reserve(pool, range(16), LEFT)
            other = reserve(pool, range(16), RIGHT)
            assert behind.indices.tolist() == other.indices.tolist() == [2, 3]
            assert commit(pool, behind, range(16), LEFT) == 0
            pool.abort(whole)
            pool.check_invariants()
            assert unfinished(pool) == 0
            assert commit(pool, other, range(16), RIGHT) == 0
            assert pool.stats().num_blocks == 0

    @pytest.mark.parametrize("committed", [False, True])
    def test_a_writer_of_whole_blocks_that_joined_and_gives_up(self, committed):
        with small_pool(8) as pool:
            put_part(pool, range(8), LEFT)
            whole = pool.reserve(RANKS, range(12))
            assert whole.indices.tolist() == [0, 1, 2]
            assert not reserve(pool, range(12), LEFT).num_blocks
            if committed:
                CLIENT.fill(whole, range(12))
                assert pool.commit(whole) == 3
            else:
                pool.abort(whole)
                assert pool.stats().num_blocks == 0, "its bytes are half overwritten"
            pool.check_invariants()
            assert unfinished(pool) == 0

    def test_closing_ends_parts_too(self):
        pool = small_pool(8)
        put_part(pool, range(8), LEFT)
        reserve(pool, range(12), RIGHT)
        reserve(pool, range(100, 108), LEFT)
        pool.close()
        stats = pool.stats()
        assert (stats.num_blocks, stats.held_blocks, unfinished(pool)) == (0, 0, 0)
        assert not pool.reserve(RANKS, range(8), heads=LEFT).num_blocks

    def test_a_part_counts_as_stored_once_and_as_given_up_by_each(self):
        with small_pool(8) as pool:
            held = [reserve(pool, range(8), (rank, rank + 1)) for rank in range(4)]
            for reservation in held:
                pool.abort(reservation)
            for rank in range(4):
                put_part(pool, range(8), (rank, rank + 1))
            counts = pool.stats().counts
            assert (counts["aborted_blocks",], counts["stored_blocks",]) == (8, 2)


def test_an_orphan_shows_as_nothing_to_pins_demotion_and_prefetch():
    with small_pool(4, 8) as pool:
        put_part(pool, range(8), LEFT)
        assert pool.pin("a", RANKS, range(8)) == 0
        assert pool.demote(RANKS, range(8), "gpu") == 0
        assert pool.prefetch(RANKS, range(9)) == 0
        assert [stats.num_blocks for stats in pool.namespaces()] == [2]
        assert pool.stats().held_blocks == 0
        pool.check_invariants()


class TestInvariants:
    """Each of them notices what it is there for."""

    def broken(self, pool, match):
        with pytest.raises(AssertionError, match=match):
            pool.check_invariants()

    def test_of_orphans(self):
        with small_pool(8) as pool:
            put_part(pool, range(4), LEFT)
            parts, table = pool._residency.parts, pool._residency.table
            (block,) = parts.records
            record = parts.records.pop(block)
            self.broken(pool, "5: a RESERVED row without a reference")
            parts.records[block] = record
            for field, value, match in (
                ("claimed", 0b0100, "5: a RESERVED row without a reference"),
                ("claimed", 0b0001, "5: what is claimed is missing"),
                ("missing", 0, "5: something is missing"),
                ("missing", 0b10000, "5: what is missing are heads"),
                ("missing", 0b1111, "5: something is there"),
            ):
                before = getattr(record, field)
                setattr(record, field, value)
                self.broken(pool, match)
                setattr(record, field, before)
            table.states[block] = BlockState.READY
            self.broken(pool, "5: RESERVED rows have records")
            table.states[block] = BlockState.RESERVED
            pool.check_invariants()

    def test_of_writers(self):
        with small_pool(8) as pool:
            left = reserve(pool, range(4), LEFT)
            right = reserve(pool, range(4), RIGHT)
            pool._holds.reservations[right.held_id].heads = 0b0110
            self.broken(pool, "3: no head has two writers")
            pool._holds.reservations[right.held_id].heads = 0b1000
            self.broken(pool, "3: what is claimed is written")
            pool._holds.reservations[right.held_id].heads = 0b1100
            pool.abort(left)
            pool.abort(right)


class TestHeads:
    LAYOUT = KVLayout(1, 64, 1, "uint8")

    def test_masks(self):
        assert mask_of(RANKS.layout, None) == 0b1111
        assert mask_of(RANKS.layout, (1, 3)) == 0b0110
        assert mask_of(self.LAYOUT, (63, 64)) == 1 << 63

    def test_all_heads_are_the_whole_block(self):
        assert part_of(RANKS.layout, (0, 4)) is None
        assert part_of(RANKS.layout, None) is None
        assert part_of(RANKS.layout, [np.int64(1), 2]) == (1, 2)
        assert part_of(self.LAYOUT, (0, 63)) == (0, 63)

    def test_joinable_is_what_nobody_writes_and_somebody_must(self):
        parts = Parts()
        ids = np.array([3, 7], np.int32)
        parts.begin(ids, 0b0011, 0b1111)
        assert parts.joinable(np.array([3, 5, 7], np.int32), 0b1100).tolist() == [True, False, True]
        assert not parts.joinable(ids, 0b0110).any()
        assert not parts.commit(ids, 0b0011).size
        assert not parts.joinable(ids, 0b0011).any(), "they are there"
        assert parts.joinable(ids, 0b0110).all()
        parts.forget(ids[:1])
        assert parts.joinable(ids, 0b1100).tolist() == [False, True]


def test_heads_lie_where_the_layout_says():
    """Two ranks fill a block by its shape; who reads it as a whole finds each head's bytes."""
    layout = KVLayout(2, 4, 8, "float32", block_tokens=4)
    namespace = Namespace(b"w", layout)
    expected = pattern(namespace, b"whole").view(np.float32).reshape(layout.shape)
    with small_pool(4) as pool:
        held = [pool.reserve(namespace, range(4), heads=heads) for heads in (LEFT, RIGHT)]
        for reservation, (start, stop) in zip(held, (LEFT, RIGHT), strict=True):
            (slot,) = reservation.slots()
            view = slot.view(np.float32).reshape(layout.shape)
            view[:, :, start:stop] = expected[:, :, start:stop]
            pool.commit(reservation)
        with pool.acquire(namespace, range(5)) as lease:
            (slot,) = lease.slots()
            assert slot.tobytes() == expected.tobytes()
