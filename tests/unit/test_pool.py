"""The pool's own behaviour: tiers, moves, sizes, deadlines. What every client sees is in the contract suite."""

from __future__ import annotations

import numpy as np
import pytest

import kvstore.movement
import kvstore.tiers.moves
from kvstore.errors import LeaseExpiredError, LeaseNotHeldError, UsageError
from kvstore.holds import MAX_PINS
from kvstore.namespace import KVLayout, Namespace
from kvstore.testing import FakeClock, ManualMover, pattern, small_pool
from kvstore.testing.contracts import ClientContract

LAYOUT = KVLayout(1, 1, 8, "float32", block_tokens=4)
NAMESPACE = Namespace(b"w", LAYOUT)
LARGE = Namespace(b"w", KVLayout(3, 1, 128, "float32", block_tokens=4))  # three pages a block


class Client(ClientContract):
    def make_store(self, num_blocks):
        return small_pool(num_blocks)


CLIENT = Client()


def put(pool, tokens, namespace=NAMESPACE):
    return CLIENT.put(pool, tokens, namespace)


def tiers_of(pool, tokens, namespace=NAMESPACE):
    lease = pool.acquire(namespace, tokens)
    CLIENT.check(lease, tokens)
    pool._residency.copies.unpin(
        pool._holds.leases.pop(lease.held_id).known
    )  # released without promotion
    return [pool.tier_names[tier] for tier in lease.tiers.tolist()]


def one(tokens):
    return [*tokens, 0]


def test_new_blocks_go_to_the_gpu_tier_and_are_written_through():
    pool = small_pool(4, 8)
    put(pool, range(8))
    assert tiers_of(pool, one(range(8))) == ["gpu", "gpu"]
    assert [tier.num_blocks for tier in pool.stats().tiers] == [2, 2]
    pool.close()


def test_hits_in_dram_are_promoted_after_the_release():
    pool = small_pool(4, 8)
    put(pool, range(16))
    assert pool.demote(NAMESPACE, range(16), "gpu") == 4
    with pool.acquire(NAMESPACE, one(range(16))) as lease:
        assert lease.tiers.tolist() == [1] * 4
        CLIENT.check(lease, range(16))
    assert tiers_of(pool, one(range(16))) == ["gpu"] * 4
    pool.check_invariants()
    pool.close()


@pytest.mark.parametrize("holder", ["lease", "pin"])
def test_what_somebody_holds_is_not_demoted(holder):
    pool = small_pool(4, 8)
    put(pool, range(16))
    lease = pool.acquire(NAMESPACE, one(range(8))) if holder == "lease" else None
    if lease is None:
        pool.pin("a", NAMESPACE, range(8))
    assert pool.demote(NAMESPACE, range(16), "gpu") == 2, "those behind it"
    put(pool, range(100, 116))  # whoever wants room finds it elsewhere
    if lease is not None:
        CLIENT.check(lease, range(8))
        pool.release(lease)
    pool.unpin("a")
    pool.check_invariants()
    assert tiers_of(pool, one(range(16)))[:2] == ["gpu", "gpu"]
    assert pool.demote(NAMESPACE, range(8), "gpu") == 2
    pool.close()


def test_what_does_not_fit_above_is_used_where_it_is():
    pool = small_pool(2, 8)
    put(pool, range(16))
    assert tiers_of(pool, one(range(16))) == ["gpu", "gpu", "dram", "dram"]
    pool.close()


def test_demotion_keeps_the_only_copy():
    """With write-through not done yet, demote drops nothing; eviction moves the block down instead."""
    mover = ManualMover()
    pool = small_pool(2, 8, mover=mover)
    put(pool, range(8))
    assert pool.demote(NAMESPACE, range(8), "gpu") == 0
    assert [tier.num_blocks for tier in pool.stats().tiers] == [2, 0]
    put(pool, range(100, 108))  # the gpu tier is full of blocks in use: straight to dram
    assert [tier.num_blocks for tier in pool.stats().tiers] == [2, 2]
    pool.drain()
    assert [tier.num_blocks for tier in pool.stats().tiers] == [2, 4]
    put(pool, range(200, 208))
    assert tiers_of(pool, one(range(8))) == ["dram", "dram"]
    pool.check_invariants()
    pool.close()


def test_a_busy_mover_loses_nothing():
    """What cannot be moved now stays where it was written; new blocks go to the next tier."""
    pool = small_pool(2, 4, mover=ManualMover(max_waiting=0))
    put(pool, range(8))
    put(pool, range(100, 108))
    assert tiers_of(pool, one(range(8))) == ["gpu", "gpu"]
    assert tiers_of(pool, one(range(100, 108))) == ["dram", "dram"]
    pool.check_invariants()
    assert pool.stats().held_blocks == 0
    pool.close()


def test_a_lease_taken_during_a_move_keeps_the_source():
    mover = ManualMover(max_waiting=0)
    pool = small_pool(2, 4, mover=mover)
    put(pool, range(8))
    mover._max_waiting = 10
    reservation = pool.reserve(NAMESPACE, range(100, 108))  # starts demoting the first prompt
    assert mover.jobs
    lease = pool.acquire(NAMESPACE, one(range(8)))
    assert lease.tiers.tolist() == [0, 0]
    pool.drain()
    CLIENT.check(lease, range(8))
    pool.abort(reservation)
    put(pool, range(200, 208))
    CLIENT.check(lease, range(8))
    pool.release(lease)
    pool.check_invariants()
    pool.close()


def test_eviction_during_a_move_frees_everything_once():
    mover = ManualMover()
    pool = small_pool(2, 4, mover=mover)
    put(pool, range(8))
    assert pool.evict(NAMESPACE, range(8)) == 2
    assert pool.lookup(NAMESPACE, one(range(8))) == 0
    pool.check_invariants()
    pool.drain()
    pool.check_invariants()
    assert [tier.used_bytes for tier in pool.stats().tiers] == [0, 0]
    pool.close()


def test_a_read_of_an_evicted_block_stays_right_until_released():
    pool = small_pool(4)
    put(pool, range(8))
    lease = pool.acquire(NAMESPACE, one(range(8)))
    pool.clear()
    put(pool, range(100, 108))
    CLIENT.check(lease, range(8))
    assert pool.stats().num_blocks == 4
    pool.release(lease)
    assert pool.stats().num_blocks == 2
    pool.close()


def test_an_expired_lease_protects_nothing_and_says_so():
    clock = FakeClock()
    pool = small_pool(2, clock=clock, lease_timeout_s=5)
    put(pool, range(8))
    lease = pool.acquire(NAMESPACE, one(range(8)))
    clock.advance(4.9)
    put(pool, range(100, 108))
    CLIENT.check(lease, range(8))
    clock.advance(0.1)
    assert put(pool, range(100, 108)) == 2
    with pytest.raises(LeaseExpiredError):
        pool.release(lease)
    assert pool.stats().counts["expired_leases",] == 1
    pool.check_invariants()
    pool.close()


def test_a_release_past_the_deadline_raises_also_when_nobody_else_came():
    clock = FakeClock()
    pool = small_pool(2, clock=clock, lease_timeout_s=5)
    put(pool, range(8))
    first, second = (pool.acquire(NAMESPACE, one(range(8))) for _ in range(2))
    clock.advance(4.9)
    pool.release(first)
    clock.advance(0.1)
    with pytest.raises(LeaseExpiredError):
        pool.release(second)
    stats = pool.stats()
    assert (stats.counts["expired_leases",], stats.held_blocks, stats.num_leases) == (1, 0, 0)
    pool.close()


def test_leases_of_another_pool_are_refused():
    first, second = small_pool(2), small_pool(2)
    put(first, range(8))
    put(second, range(8))
    lease = first.acquire(NAMESPACE, range(9))
    second.acquire(NAMESPACE, range(9))
    with pytest.raises(LeaseNotHeldError):
        second.release(lease)
    first.release(lease)
    assert second.stats().num_leases == 1
    first.close()
    second.close()


def test_the_number_of_leases_is_bounded():
    pool = small_pool(4)
    pool._holds.max_held = 3
    put(pool, range(8))
    leases = [pool.acquire(NAMESPACE, one(range(8))) for _ in range(5)]
    assert [lease.num_blocks for lease in leases] == [2, 2, 2, 0, 0]
    assert pool.stats().counts["refused_leases",] == 2
    pool.close()


def test_what_would_hold_nothing_is_not_refused():
    pool = small_pool(4)
    put(pool, range(8))
    pool._holds.max_held = 1
    lease = pool.acquire(NAMESPACE, one(range(8)))
    assert pool.acquire(NAMESPACE, range(500, 520)).num_blocks == 0, "a miss"
    assert pool.reserve(NAMESPACE, range(8)).num_blocks == 0, "nothing is missing"
    assert pool.reserve(NAMESPACE, range(100, 108), max_blocks=0).refused == 2
    assert pool.stats().counts["refused_leases",] == 0
    assert pool.acquire(NAMESPACE, one(range(8))).num_blocks == 0
    assert pool.reserve(NAMESPACE, range(100, 108)).num_blocks == 0
    assert pool.stats().counts["refused_leases",] == 2
    pool.release(lease)
    pool.close()


@pytest.mark.parametrize("flip", [0, 1, 3])
def test_corrupt_blocks_are_found_dropped_and_counted(flip):
    pool = small_pool(8)
    tokens = list(range(16))
    put(pool, tokens)
    lease = pool.acquire(NAMESPACE, one(tokens))
    assert pool.verify(lease) == 4
    CLIENT.slots(lease)[flip][17] ^= 1
    assert pool.verify(lease) == flip
    assert pool.lookup(NAMESPACE, one(tokens)) == 4 * flip
    assert pool.stats().counts["corrupt_blocks",] == 1
    pool.release(lease)
    pool.check_invariants()
    assert put(pool, tokens) == 4 - flip
    assert pool.verify(lease) == 0, "a released lease vouches for nothing"
    pool.close()


def test_corrupt_blocks_that_were_evicted_meanwhile_are_nobodys_alarm(caplog):
    pool = small_pool(8)
    put(pool, range(16))
    lease = pool.acquire(NAMESPACE, one(range(16)))
    CLIENT.slots(lease)[1][17] ^= 1
    pool.evict(NAMESPACE, range(16))
    assert pool.verify(lease) == 1
    assert not caplog.records
    assert pool.stats().counts.get(("corrupt_blocks",), 0) == 0
    pool.release(lease)
    pool.close()


def test_a_block_that_rotted_in_dram_is_not_promoted():
    pool = small_pool(4, 8)
    put(pool, range(16))
    pool.demote(NAMESPACE, range(16), "gpu")
    lease = pool.acquire(NAMESPACE, one(range(16)))
    CLIENT.slots(lease)[2][5] ^= 0x40
    pool.release(lease)
    assert pool.lookup(NAMESPACE, one(range(16))) == 8
    assert pool.stats().counts["corrupt_blocks",] == 1
    pool.check_invariants()
    assert [tier.used_bytes >> 12 for tier in pool.stats().tiers] == [2, 2]
    pool.close()


def test_a_copy_that_raises_leaves_nothing_behind(monkeypatch):
    mover = ManualMover()
    pool = small_pool(4, 8, mover=mover)
    put(pool, range(16))
    dram = pool._residency.tiers[1].store

    def fail(*_):
        raise OSError("the bus is on fire")

    monkeypatch.setattr(type(dram), "read_into", fail)
    pool.drain()
    pool.check_invariants()
    assert tiers_of(pool, one(range(16))) == ["gpu"] * 4
    assert pool.stats().counts["failed_moves", "gpu", "dram"] == 4
    pool.close()


def test_layouts_of_different_size_share_a_pool():
    """Each gets room from the other under pressure; bytes never mix."""
    pool = small_pool(96)
    rng = np.random.default_rng(0)
    for number in range(400):
        namespace = (NAMESPACE, LARGE)[int(rng.integers(0, 2))]
        tokens = range(number * 10, number * 10 + int(rng.integers(4, 60)))
        reservation = pool.reserve(namespace, tokens)
        CLIENT.fill(reservation, tokens)
        pool.commit(reservation)
        lease = pool.acquire(namespace, one(tokens))
        assert lease.num_blocks == len(tokens) // 4 - reservation.refused
        CLIENT.check(lease, tokens)
        pool.release(lease)
        if number % 20 == 0:
            pool.check_invariants()
    assert pool.stats().num_namespaces == 2
    pool.close()


def test_the_oldest_layout_gives_way():
    pool = small_pool(64)
    assert put(pool, range(256)) == 64
    assert put(pool, range(20), LARGE) == 5
    assert pool.lookup(NAMESPACE, range(257)) < 256
    assert pool.lookup(LARGE, one(range(20))) == 20
    pool.check_invariants()
    pool.close()


def test_namespaces_without_blocks_are_forgotten():
    pool = small_pool(8)
    for number in range(200):
        put(pool, range(8), Namespace(b"w", LAYOUT, salt=str(number)))
        pool.lookup(Namespace(b"w", LAYOUT, salt=f"miss {number}"), range(8))
    stats = pool.stats()
    assert (stats.num_namespaces, stats.num_nodes, stats.num_blocks) == (4, 4, 8)
    pool.clear()
    assert pool.stats().num_namespaces == 0
    pool.close()


def test_hash_namespaces_may_use_every_block():
    hashed = Namespace(b"w", LAYOUT, keys="hash")
    pool = small_pool(4)
    keys = bytes(range(96))
    reservation = pool.reserve(hashed, keys)
    assert reservation.num_blocks == 3
    pool.commit(reservation)
    with pool.acquire(hashed, keys) as lease:
        assert lease.hit_tokens == 12
    assert pool.lookup(hashed, keys[:64] + b"x" * 32) == 8
    pool.close()


def test_the_context_managers_end_on_every_path():
    pool = small_pool(4)
    with pytest.raises(ZeroDivisionError), pool.reserve(NAMESPACE, range(8)):
        raise ZeroDivisionError
    assert pool.lookup(NAMESPACE, range(9)) == 0
    with pool.reserve(NAMESPACE, range(8)) as reservation:
        CLIENT.fill(reservation, range(8))
    lease = pool.acquire(NAMESPACE, range(9))
    assert lease.num_blocks == 2
    with pytest.raises(ZeroDivisionError), lease:
        raise ZeroDivisionError
    stats = pool.stats()
    assert (stats.num_leases, stats.num_reservations, stats.held_blocks) == (0, 0, 0)
    pool.close()


def test_partial_room_is_used_and_counted():
    pool = small_pool(4)
    put(pool, range(8))
    lease = pool.acquire(NAMESPACE, one(range(8)))
    reservation = pool.reserve(NAMESPACE, range(100, 116))
    assert (reservation.indices.tolist(), reservation.refused) == ([0, 1], 2)
    CLIENT.fill(reservation, range(100, 116))
    assert pool.commit(reservation) == 2
    assert pool.lookup(NAMESPACE, one(range(100, 116))) == 8
    assert pool.stats().counts["refused_blocks",] == 2
    pool.release(lease)
    pool.close()


def test_growing_a_prompt_evicts_others_never_its_own_head():
    pool = small_pool(6)
    put(pool, range(1000, 1008))
    for length in range(4, 25, 4):
        assert put(pool, range(length)) == 1
        assert pool.lookup(NAMESPACE, one(range(length))) == length
    pool.close()


def test_a_million_tokens():
    pool = small_pool(70_000)
    namespace = Namespace(b"w", KVLayout(1, 1, 8, "int8", block_tokens=16))
    tokens = np.arange(1_000_000, dtype=np.int32)
    pool.commit(pool.reserve(namespace, tokens))
    with pool.acquire(namespace, tokens) as lease:
        assert lease.hit_tokens == 999_984
    pool.close()


def test_memory_of_the_table_is_what_the_docs_say():
    pool = small_pool(4096, 4096)
    namespace = Namespace(b"w", KVLayout(1, 1, 8, "int8", block_tokens=16))
    pool.commit(pool.reserve(namespace, np.arange(4096 * 16, dtype=np.int32)))
    table = pool._residency.table
    assert table.nbytes / len(table.states) <= 28
    assert pool.stats().index_bytes / pool.stats().num_blocks <= 96
    pool.close()


def test_patterns_are_distinct():
    """The bytes that these tests compare really tell blocks apart."""
    seen = {
        bytes(pattern(NAMESPACE, np.arange(n, dtype="<i4").tobytes())) for n in range(4, 400, 4)
    }
    assert len(seen) == 99


def test_verify_reads_what_the_lease_names_also_after_a_promotion():
    pool = small_pool(4, 8)
    put(pool, range(16))
    pool.demote(NAMESPACE, range(16), "gpu")
    first, second = (pool.acquire(NAMESPACE, one(range(16))) for _ in range(2))
    pool.release(first)  # promotes: there is a copy in the gpu tier
    CLIENT.slots(second)[1][3] ^= 1
    assert pool.verify(second) == 1
    assert pool.verify(second) == 1
    assert pool.stats().counts["corrupt_blocks",] == 1
    pool.release(second)
    pool.check_invariants()
    pool.close()


def test_an_expired_lease_raises_no_false_alarm():
    clock = FakeClock()
    pool = small_pool(4, clock=clock, lease_timeout_s=1)
    put(pool, range(8))
    lease = pool.acquire(NAMESPACE, one(range(8)))
    clock.advance(2)
    put(pool, range(100, 116))
    put(pool, range(8))
    pool.verify(lease)
    assert pool.stats().counts.get(("corrupt_blocks",), 0) == 0
    assert pool.lookup(NAMESPACE, one(range(8))) == 8
    pool.check_invariants()
    pool.close()


def test_one_promotion_serves_all_who_wait_for_it():
    mover = ManualMover()
    pool = small_pool(8, 16, mover=mover)
    put(pool, range(16))
    put(pool, range(100, 116))
    pool.drain()
    pool.demote(NAMESPACE, range(16), "gpu")
    leases = [pool.acquire(NAMESPACE, one(range(16))) for _ in range(4)]
    for lease in leases:
        pool.release(lease)
    assert len(mover.jobs) == 1
    pool.drain()
    assert tiers_of(pool, one(range(16))) == ["gpu"] * 4
    assert tiers_of(pool, one(range(100, 116))) == ["gpu"] * 4
    assert pool.stats().counts["failed_moves", "dram", "gpu"] == 0
    pool.close()


def test_a_write_through_that_was_skipped_is_made_up_for():
    mover = ManualMover(max_waiting=0)
    pool = small_pool(4, 8, mover=mover)
    put(pool, range(8))
    mover._max_waiting = 10
    pool.release(pool.acquire(NAMESPACE, one(range(8))))
    pool.drain()
    assert [tier.num_blocks for tier in pool.stats().tiers] == [2, 2]
    pool.close()


def test_another_layout_gets_room_without_emptying_the_cache():
    """One slab of the oldest blocks gives way; the hot prefix that was stored beside them stays."""
    pool = small_pool(640)
    hot = range(80)
    put(pool, hot)
    for number in range(1, 31):
        put(pool, range(number * 1000, number * 1000 + 80))
        pool.release(pool.acquire(NAMESPACE, one(hot)))
    before = pool.stats().num_blocks
    assert put(pool, range(8), LARGE) == 2
    pool.check_invariants()
    assert before - (pool.stats().num_blocks - 2) <= 20, "about one slab of 10 blocks"
    assert pool.lookup(NAMESPACE, one(hot)) == 80
    lease = pool.acquire(NAMESPACE, one(hot))
    CLIENT.check(lease, hot)
    assert pool.lookup(LARGE, one(range(8))) == 8
    pool.close()


def test_blocks_in_use_are_never_moved_for_another_layout():
    pool = small_pool(64)
    prompts = [range(number * 100, number * 100 + 8) for number in range(32)]
    for prompt in prompts:
        put(pool, prompt)
    leases = [pool.acquire(NAMESPACE, one(prompt)) for prompt in prompts[::2]]
    for number in range(20):
        reservation = pool.reserve(LARGE, range(number * 50, number * 50 + 12))
        CLIENT.fill(reservation, range(number * 50, number * 50 + 12))
        pool.commit(reservation)
        for lease, prompt in zip(leases, prompts[::2], strict=True):
            CLIENT.check(lease, prompt)
    pool.check_invariants()
    pool.close()


def test_only_what_is_missing_is_evicted():
    pool = small_pool(64)
    for number in range(8):
        put(pool, range(number * 100, number * 100 + 32))
    assert put(pool, range(5000, 5012)) == 3
    assert pool.stats().num_blocks == 64
    assert pool.stats().counts["evicted_blocks", "dram", "capacity"] == 3
    pool.close()


def test_refused_leases_and_reservations_hold_nothing():
    pool = small_pool(8)
    put(pool, range(8))
    pool._holds.max_held = 1
    lease = pool.acquire(NAMESPACE, one(range(8)))
    for _ in range(70_000):
        assert pool.reserve(NAMESPACE, range(16)).num_blocks == 0
    assert pool.stats().num_reservations == 0
    pool.check_invariants()
    put(pool, range(100, 132))
    CLIENT.check(lease, range(8))
    pool.close()


def test_a_closed_pool_misses_and_stores_nothing():
    pool = small_pool(8)
    put(pool, range(8))
    lease = pool.acquire(NAMESPACE, one(range(8)))
    reservation = pool.reserve(NAMESPACE, range(100, 108))
    pool.close()
    assert pool.lookup(NAMESPACE, one(range(8))) == 0
    assert pool.acquire(NAMESPACE, one(range(8))).num_blocks == 0
    assert pool.reserve(NAMESPACE, range(200, 208)).num_blocks == 0
    for end in (lambda: pool.release(lease), lambda: pool.commit(reservation)):
        with pytest.raises(LeaseNotHeldError):
            end()
    assert pool.stats().held_blocks == 0
    pool.close()


def test_another_pools_reservation_is_refused_before_anything_is_read():
    first, second = small_pool(8), small_pool(8)
    reservation = first.reserve(NAMESPACE, range(8))
    with pytest.raises(LeaseNotHeldError):
        second.commit(reservation)
    assert first.commit(reservation) == 2
    first.close()
    second.close()


def test_lookup_changes_nothing():
    pool = small_pool(4)
    put(pool, range(8))
    put(pool, range(100, 108))
    pool.lookup(NAMESPACE, one(range(8)))
    put(pool, range(200, 204))
    assert pool.lookup(NAMESPACE, one(range(8))) == 4, "the older one made room, looked up or not"
    pool.close()


def test_a_search_for_victims_ends_early_when_everything_is_in_use():
    pool = small_pool(400)
    for number in range(400):
        put(pool, range(number * 10, number * 10 + 4))
    leases = [
        pool.acquire(NAMESPACE, one(range(number * 10, number * 10 + 4))) for number in range(400)
    ]
    calls = 0
    policy = pool._residency.tiers[0].policy
    touch = policy.touch

    def counted(path):
        nonlocal calls
        calls += 1
        touch(path)

    policy.touch = counted
    assert pool.reserve(NAMESPACE, range(8000, 8004)).refused == 1
    assert calls <= 257
    for lease in leases:
        pool.release(lease)
    pool.close()


def test_a_lease_taken_while_its_block_is_relocated_keeps_its_place():
    mover = ManualMover()
    pool = small_pool(64, mover=mover, max_slabs=4)
    prompts = [range(number * 100, number * 100 + 8) for number in range(32)]
    for prompt in prompts:
        put(pool, prompt)
    for prompt in prompts:  # the oldest ones lie in different slabs
        if prompt.start % 800:
            pool.release(pool.acquire(NAMESPACE, one(prompt)))
    for number in range(20):  # until the rest of a slab is under way
        pool.commit(pool.reserve(LARGE, range(number * 50, number * 50 + 4)))
        if mover.jobs:
            break
    assert mover.jobs
    leases = [(pool.acquire(NAMESPACE, one(prompt)), prompt) for prompt in prompts]
    pool.drain()
    for number in range(3):
        put(pool, range(9000 + 100 * number, 9020 + 100 * number), LARGE)
    for lease, prompt in leases:
        CLIENT.check(lease, list(prompt)[: 4 * lease.num_blocks])
        pool.release(lease)
    pool.check_invariants()
    pool.close()


def test_a_block_that_its_relocation_spoils_is_dropped(monkeypatch, caplog):
    """Nobody is handed its bytes, and those that arrived whole stay."""
    mover = ManualMover()
    pool = small_pool(64, mover=mover, max_slabs=4)
    prompts = [range(number * 100, number * 100 + 8) for number in range(32)]
    for prompt in prompts:
        put(pool, prompt)
    for prompt in prompts:  # the oldest ones lie in different slabs
        if prompt.start % 800:
            pool.release(pool.acquire(NAMESPACE, one(prompt)))
    pool.drain()
    dram = pool._residency.tiers[0].store
    relocate, spoilt = dram.relocate, []

    def spoil(sources, targets, block_bytes):
        relocate(sources, targets, block_bytes)
        dram.buffer[targets[-1] + 17] ^= 1
        spoilt.append(len(targets))

    monkeypatch.setattr(dram, "relocate", spoil)
    for number in range(20):
        pool.commit(pool.reserve(LARGE, range(number * 50, number * 50 + 4)))
        before = pool.stats().num_blocks
        pool.drain()
        if spoilt:
            break
    assert spoilt[0] > 1
    stats = pool.stats()
    assert stats.counts["corrupt_blocks",] == len(spoilt) == 1
    assert stats.counts["moved_blocks", "dram", "dram"] >= spoilt[0] - 2
    assert 1 <= before - stats.num_blocks <= 2, "it, and what may be behind it"
    assert "1 blocks do not match" in caplog.text
    pool.check_invariants()
    for prompt in prompts:
        with pool.acquire(NAMESPACE, one(prompt)) as lease:
            CLIENT.check(lease, list(prompt)[: 4 * lease.num_blocks])
    pool.close()


def test_a_demotion_that_finds_half_the_room_keeps_that_half():
    mover = ManualMover(max_waiting=0)
    pool = small_pool(4, 4, mover=mover)
    put(pool, range(16))
    put(pool, range(100, 108))
    lease = pool.acquire(NAMESPACE, one(range(100, 108)))  # two blocks of dram are in use
    mover._max_waiting = 10
    pool.abort(pool.reserve(NAMESPACE, range(200, 216)))  # wants the whole gpu tier
    pool.drain()
    assert pool.lookup(NAMESPACE, one(range(16))) == 8
    assert tiers_of(pool, one(range(16))) == ["dram", "dram"]
    pool.release(lease)
    pool.check_invariants()
    pool.close()


def test_blocks_born_on_the_device_get_their_checksum_when_they_reach_the_host():
    pytest.importorskip("torch")
    import kvstore

    with kvstore.open(gpu=4 * 4096, dram=8 * 4096, device="cpu") as pool:
        put(pool, range(16))
        pool.drain()
        pool.demote(NAMESPACE, range(16), "gpu")
        lease = pool.acquire(NAMESPACE, one(range(16)))
        assert lease.tiers.tolist() == [1] * 4
        assert pool.verify(lease) == 4
        CLIENT.slots(lease)[3][0] ^= 1
        assert pool.verify(lease) == 3
        pool.release(lease)


def test_reservations_count_against_the_number_of_leases():
    pool = small_pool(8)
    pool._holds.max_held = 2
    first = pool.reserve(NAMESPACE, range(4))
    second = pool.reserve(NAMESPACE, range(100, 104))
    assert pool.reserve(NAMESPACE, range(200, 204)).refused == 1
    pool.commit(first)
    assert pool.reserve(NAMESPACE, range(200, 204)).num_blocks == 1
    pool.abort(second)
    pool.close()


def test_a_demoted_block_is_known_to_the_policy_of_its_new_tier():
    """Which may have forgotten the node while nothing of it was there."""
    mover = ManualMover(max_waiting=0)
    pool = small_pool(2, 4, mover=mover)
    put(pool, range(8))
    for node in pool._residency.trees[NAMESPACE.digest].walk():
        pool._residency.tiers[1].policy.remove(node)
    mover._max_waiting = 10
    pool.abort(pool.reserve(NAMESPACE, range(300, 308)))
    pool.drain()
    pool.check_invariants()
    assert [tier.num_blocks for tier in pool.stats().tiers] == [0, 2]
    for start in range(400, 1000, 100):
        put(pool, range(start, start + 8))
        pool.drain()
    assert pool.lookup(NAMESPACE, one(range(8))) == 0
    pool.close()


# -- checksums in the background


def count_hashes(monkeypatch):
    """Return a list that grows by the number of blocks of each batch that is hashed."""
    hashed = []
    checksums = kvstore.tiers.moves._checksums

    def counted(blocks):
        sums = checksums(blocks)
        hashed.append(len(sums))
        return sums

    monkeypatch.setattr(kvstore.tiers.moves, "_checksums", counted)
    return hashed


def flip(pool, tokens, block):
    """Change a byte of a stored block."""
    with pool.acquire(NAMESPACE, one(tokens)) as lease:
        CLIENT.slots(lease)[block][17] ^= 1


def verified(pool, tokens):
    with pool.acquire(NAMESPACE, one(tokens)) as lease:
        return pool.verify(lease)


def test_commit_reads_no_bytes_and_the_seal_reads_them_once(monkeypatch):
    hashed, mover = count_hashes(monkeypatch), ManualMover()
    pool = small_pool(8, mover=mover)
    put(pool, range(16))
    assert hashed == []
    assert pool.lookup(NAMESPACE, one(range(16))) == 16, "visible at once"
    assert pool.stats().held_blocks == 0, "what waits for its checksum may be evicted"
    pool.drain()
    assert hashed == [4]
    put(pool, range(100, 116))
    pool.evict(NAMESPACE, range(100, 116))
    pool.drain()
    assert hashed == [4], "what is gone is not read"
    flip(pool, range(16), 1)
    assert verified(pool, range(16)) == 1
    pool.close()


def test_what_is_written_through_is_not_hashed_twice(monkeypatch):
    hashed, mover = count_hashes(monkeypatch), ManualMover()
    pool = small_pool(2, 8, mover=mover)
    put(pool, range(16))  # two blocks in the gpu tier, two in dram
    pool.drain()
    assert sorted(hashed) == [2, 2]
    put(pool, range(100, 108))
    assert len(mover.jobs) == 1, "the move does it"
    pool.evict(NAMESPACE, range(100, 108))
    pool.drain()
    for block in range(4):
        pool.demote(NAMESPACE, range(16), "gpu")
        flip(pool, range(16), block)
        pool.drain()
        assert verified(pool, range(16)) == block
        pool.clear()
        put(pool, range(16))
        pool.drain()
    pool.close()


def test_blocks_that_the_mover_has_no_time_for_stay_without_checksum():
    mover = ManualMover(max_waiting=0)
    pool = small_pool(8, mover=mover)
    put(pool, range(16))
    assert pool.stats().counts["unsealed_blocks",] == 4
    flip(pool, range(16), 1)
    assert verified(pool, range(16)) == 4, "nothing is known against them"
    mover._max_waiting = 1
    put(pool, range(100, 108))
    pool.drain()
    assert pool.stats().counts["unsealed_blocks",] == 4
    flip(pool, range(100, 108), 1)
    assert verified(pool, range(100, 108)) == 1
    pool.close()


def test_a_seal_that_comes_too_late_says_nothing_about_the_next_block():
    """The row and the slot are in use again, with other bytes, whose own seal was refused."""
    mover = ManualMover()
    pool = small_pool(2, mover=mover)
    put(pool, range(8))
    pool.evict(NAMESPACE, range(8))
    mover._max_waiting = 0
    put(pool, range(100, 108))
    pool.drain()
    assert not pool._residency.table.checksums.any()
    assert verified(pool, range(100, 108)) == 2
    mover._max_waiting = 10
    pool.evict(NAMESPACE, range(100, 108))
    put(pool, range(200, 208))
    flip(pool, range(200, 208), 0)  # before it is sealed: nobody can tell
    pool.drain()
    assert verified(pool, range(200, 208)) == 2
    pool.check_invariants()
    pool.close()


def test_bytes_that_change_while_they_are_hashed_by_a_late_seal_are_no_corruption(monkeypatch):
    """Evicted, and written anew, between the seal's look at the table and its last word."""
    mover = ManualMover()
    pool = small_pool(2, mover=mover)
    put(pool, range(8))
    checksums = kvstore.movement.checksums

    def interrupted(*arguments):
        sums = checksums(*arguments)
        pool.evict(NAMESPACE, range(8))
        put(pool, range(100, 108))
        return sums

    with monkeypatch.context() as patch:
        patch.setattr(kvstore.movement, "checksums", interrupted)
        mover.run_one()
    pool.drain()
    assert verified(pool, range(100, 108)) == 2
    flip(pool, range(100, 108), 0)
    assert verified(pool, range(100, 108)) == 0
    pool.close()


def test_a_busy_mover_evicts_nothing_for_a_move_that_it_refuses():
    mover = ManualMover()
    pool = small_pool(2, 8, mover=mover)
    put(pool, range(8))
    pool.drain()
    put(pool, range(100, 108))  # takes the gpu tier
    pool.drain()
    mover._max_waiting = 0
    assert pool.prefetch(NAMESPACE, one(range(8))) == 8
    assert tiers_of(pool, one(range(100, 108))) == ["gpu", "gpu"]
    mover._max_waiting = 1
    assert pool.prefetch(NAMESPACE, one(range(8))) == 8
    pool.drain()
    assert tiers_of(pool, one(range(8))) == ["gpu", "gpu"]
    pool.close()


# -- pins, and what operators see


def press(pool, blocks=100):
    """Store until everything that may go is gone."""
    for start in range(10_000, 10_000 + 4 * blocks, 16):
        put(pool, range(start, start + 16))


def test_a_pinned_prefix_stays_until_it_is_unpinned():
    pool = small_pool(8)
    put(pool, range(16))
    assert pool.pin("system prompt", NAMESPACE, range(8)) == 8, "the last token counts too"
    (pin,) = pool.pins()
    assert (pin.name, pin.namespace, pin.tokens, pin.num_blocks) == (
        *("system prompt", NAMESPACE.digest.hex()),
        *(8, 2),
    )
    press(pool)
    assert pool.lookup(NAMESPACE, one(range(16))) == 8
    stats = pool.stats()
    assert (stats.num_pins, stats.held_blocks) == (1, 2)
    pool.check_invariants()
    assert pool.unpin("system prompt")
    assert not pool.unpin("system prompt")
    press(pool)
    assert pool.lookup(NAMESPACE, one(range(16))) == 0
    assert (pool.pins(), pool.stats().num_pins, pool.stats().held_blocks) == ([], 0, 0)
    pool.close()


def test_a_second_pin_of_a_name_replaces_the_first():
    pool = small_pool(8)
    put(pool, range(8))
    put(pool, range(100, 112))
    assert pool.pin("a", NAMESPACE, range(8)) == 8
    assert pool.pin("a", NAMESPACE, range(100, 112)) == 12
    assert [pin.tokens for pin in pool.pins()] == [12]
    press(pool)
    assert pool.lookup(NAMESPACE, one(range(8))) == 0
    assert pool.lookup(NAMESPACE, one(range(100, 112))) == 12
    assert pool.pin("a", NAMESPACE, range(7000, 7016)) == 0, "nothing is known of it"
    assert pool.pins() == []
    press(pool)
    assert pool.lookup(NAMESPACE, one(range(100, 112))) == 0
    pool.close()


def test_pins_hold_at_most_half_of_a_tier():
    pool = small_pool(8, 8)
    put(pool, range(16))
    put(pool, range(100, 116))
    assert pool.pin("a", NAMESPACE, range(12)) == 12
    assert pool.pin("the same blocks", NAMESPACE, range(12)) == 12, "they count once"
    with pytest.raises(UsageError, match=r"20480 bytes, at most 16384 .*gpu"):
        pool.pin("b", NAMESPACE, range(100, 108))
    with pytest.raises(UsageError):
        pool.pin("a", NAMESPACE, [0.5])
    assert [(pin.name, pin.tokens) for pin in pool.pins()] == [("a", 12), ("the same blocks", 12)]
    assert pool.pin("b", NAMESPACE, range(100, 104)) == 4
    pool.unpin("the same blocks")
    assert pool.pin("a", NAMESPACE, range(100, 116)) == 16, "what it replaces does not count"
    pool.check_invariants()
    pool.close()


def test_names_and_number_of_pins_are_bounded():
    pool = small_pool(8)
    put(pool, range(4))
    for name in ("", "x" * 256):
        with pytest.raises(UsageError, match="1 to 255"):
            pool.pin(name, NAMESPACE, range(4))
    for number in range(MAX_PINS):
        assert pool.pin(str(number), NAMESPACE, range(4)) == 4
    with pytest.raises(UsageError, match=str(MAX_PINS)):
        pool.pin("one more", NAMESPACE, range(4))
    assert pool.pin("7", NAMESPACE, range(4)) == 4
    pool.check_invariants()
    pool.close()


@pytest.mark.parametrize("forget", ["evict", "clear", "corrupt"])
def test_what_is_forgotten_is_pinned_no_more(forget):
    pool = small_pool(8)
    put(pool, range(8))
    put(pool, range(100, 108))
    pool.pin("a", NAMESPACE, range(8))
    pool.pin("b", NAMESPACE, range(100, 108))
    if forget == "evict":
        pool.evict(NAMESPACE, range(8))
    elif forget == "clear":
        pool.clear()
    else:
        flip(pool, range(8), 1)
        assert verified(pool, range(8)) == 1
        pool.reap()
    left = {"evict": [("b", 8)], "clear": [], "corrupt": [("a", 4), ("b", 8)]}[forget]
    stats = pool.stats()
    assert stats.held_blocks == stats.num_blocks == sum(tokens // 4 for _, tokens in left)
    assert [(pin.name, pin.tokens) for pin in pool.pins()] == left
    pool.check_invariants()
    for name, _ in left:
        assert pool.unpin(name)
    assert pool.stats().held_blocks == 0
    pool.close()


def test_reap_ends_the_leases_whose_time_is_over():
    clock = FakeClock()
    pool = small_pool(4, clock=clock, lease_timeout_s=5)
    put(pool, range(8))
    pool.acquire(NAMESPACE, one(range(8)))
    clock.advance(3)
    pool.acquire(NAMESPACE, one(range(4)))
    clock.advance(2)
    pool.reap()
    assert (pool.stats().num_leases, pool.stats().held_blocks) == (1, 1)
    clock.advance(3)
    pool.reap()
    assert (pool.stats().num_leases, pool.stats().held_blocks) == (0, 0)
    assert pool.stats().counts["expired_leases",] == 2
    pool.close()


def test_leases_reservations_and_namespaces_are_listed():
    clock = FakeClock()
    pool = small_pool(8, clock=clock, lease_timeout_s=5)
    put(pool, range(8))
    first = pool.acquire(NAMESPACE, one(range(8)))
    clock.advance(1)
    second = pool.acquire(NAMESPACE, one(range(4)))
    reservation = pool.reserve(LARGE, range(4))
    digest, large = NAMESPACE.digest.hex(), LARGE.digest.hex()
    assert [
        (held.id, held.namespace, held.num_blocks, held.kind, held.expires_in_s)
        for held in pool.leases()
    ] == [
        (first.held_id, digest, 2, "lease", 4),
        (second.held_id, digest, 1, "lease", 5),
        (reservation.held_id, large, 1, "reservation", None),
    ]
    clock.advance(4)
    assert [held.id for held in pool.leases()] == [second.held_id, reservation.held_id]
    assert [
        (space.digest, space.block_tokens, space.block_bytes, space.keys, space.num_blocks)
        for space in pool.namespaces()
    ] == [(digest, 4, 256, "tokens", 2), (large, 4, 12288, "tokens", 1)]
    assert pool.namespace(digest) == NAMESPACE
    assert pool.namespace(large) == LARGE
    for stranger in ("", "ab", "no hex", digest[:-2], digest[2:] + "00"):
        assert pool.namespace(stranger) is None
    pool.abort(reservation)
    assert pool.namespace(large) is None
    pool.close()


def test_prefetch_promotes_as_a_release_does_and_counts_as_no_use():
    mover = ManualMover()
    pool = small_pool(4, 8, mover=mover)
    put(pool, range(16))
    pool.drain()
    pool.demote(NAMESPACE, range(16), "gpu")
    before = pool.stats()
    assert pool.prefetch(NAMESPACE, range(16)) == 12
    assert len(mover.jobs) == 1
    pool.prefetch(NAMESPACE, range(16))
    assert len(mover.jobs) == 1, "one move serves both"
    after = pool.stats()
    assert (after.num_leases, after.counts) == (0, before.counts)
    pool.drain()
    assert [tier.num_blocks for tier in pool.stats().tiers] == [3, 4]
    assert tiers_of(pool, one(range(16))) == ["gpu"] * 3 + ["dram"]
    pool.check_invariants()
    pool.close()


def test_a_prefetched_block_is_known_to_the_policy_of_its_new_tier():
    """Which may have forgotten the node while nothing of it was there."""
    pool = small_pool(2, 8)
    put(pool, range(8))
    put(pool, range(100, 108))
    gpu = pool._residency.tiers[0].policy
    for node in pool._residency.trees[NAMESPACE.digest].walk():
        if node.blocks[0] == 0:
            gpu.remove(node)
    assert pool.prefetch(NAMESPACE, one(range(8))) == 8
    pool.check_invariants()
    assert tiers_of(pool, one(range(8))) == ["gpu", "gpu"]
    for start in range(200, 600, 100):
        put(pool, range(start, start + 8))
    assert pool.lookup(NAMESPACE, one(range(500, 508))) == 8
    assert tiers_of(pool, one(range(500, 508))) == ["gpu", "gpu"], "it can leave again"
    pool.close()


def test_prefetching_does_not_keep_a_block_in_the_pool():
    pool = small_pool(2, 4)
    put(pool, range(8))
    put(pool, range(100, 108))
    for _ in range(3):
        pool.prefetch(NAMESPACE, one(range(8)))
    put(pool, range(200, 204))
    assert pool.lookup(NAMESPACE, one(range(8))) == 4, "the older one made room, prefetched or not"
    assert pool.lookup(NAMESPACE, one(range(100, 108))) == 8
    pool.close()


def test_a_closed_pool_has_no_pins():
    pool = small_pool(8)
    put(pool, range(8))
    pool.pin("a", NAMESPACE, range(8))
    pool.close()
    assert (pool.pins(), pool.leases(), pool.namespaces()) == ([], [], [])
    assert pool.stats().held_blocks == 0
    assert pool.pin("a", NAMESPACE, range(8)) == 0
    assert pool.prefetch(NAMESPACE, range(9)) == 0


def test_a_reservation_of_at_most_so_many_blocks_is_the_head_of_what_is_missing():
    with small_pool(16) as pool:
        first = pool.reserve(NAMESPACE, range(8))
        second = pool.reserve(NAMESPACE, range(32), max_blocks=3)
        assert (second.indices.tolist(), second.refused) == ([2, 3, 4], 3)
        third = pool.reserve(NAMESPACE, range(32), max_blocks=0)
        assert (third.num_blocks, third.refused) == (0, 3)
        for reservation in (first, second, third):
            pool.commit(reservation)
        assert pool.lookup(NAMESPACE, range(33)) == 20
        pool.check_invariants()
