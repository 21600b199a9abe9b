"""The pool's own behaviour: tiers, moves, sizes, deadlines. What every client sees is in the contract suite."""

from __future__ import annotations

import numpy as np
import pytest

from kvstore.errors import LeaseExpiredError, LeaseNotHeldError
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
    CLIENT.check(pool, lease, tokens)
    pool._residency.unpin(pool._leases.pop(lease.held_id).known)  # released without promotion
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
        CLIENT.check(pool, lease, range(16))
    assert tiers_of(pool, one(range(16))) == ["gpu"] * 4
    pool.check_invariants()
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
    CLIENT.check(pool, lease, range(8))
    pool.abort(reservation)
    put(pool, range(200, 208))
    CLIENT.check(pool, lease, range(8))
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
    CLIENT.check(pool, lease, range(8))
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
    CLIENT.check(pool, lease, range(8))
    clock.advance(0.1)
    assert put(pool, range(100, 108)) == 2
    with pytest.raises(LeaseExpiredError):
        pool.release(lease)
    assert pool.stats().counts["expired_leases",] == 1
    pool.check_invariants()
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
    pool._max_leases = 3
    put(pool, range(8))
    leases = [pool.acquire(NAMESPACE, one(range(8))) for _ in range(5)]
    assert [lease.num_blocks for lease in leases] == [2, 2, 2, 0, 0]
    assert pool.stats().counts["refused_leases",] == 2
    pool.close()


@pytest.mark.parametrize("flip", [0, 1, 3])
def test_corrupt_blocks_are_found_dropped_and_counted(flip):
    pool = small_pool(8)
    tokens = list(range(16))
    put(pool, tokens)
    lease = pool.acquire(NAMESPACE, one(tokens))
    assert pool.verify(lease) == 4
    CLIENT.slots(pool, lease)[flip][17] ^= 1
    assert pool.verify(lease) == flip
    assert pool.lookup(NAMESPACE, one(tokens)) == 4 * flip
    assert pool.stats().counts["corrupt_blocks",] == 1
    pool.release(lease)
    pool.check_invariants()
    assert put(pool, tokens) == 4 - flip
    assert pool.verify(lease) == 0, "a released lease vouches for nothing"
    pool.close()


def test_a_block_that_rotted_in_dram_is_not_promoted():
    pool = small_pool(4, 8)
    put(pool, range(16))
    pool.demote(NAMESPACE, range(16), "gpu")
    lease = pool.acquire(NAMESPACE, one(range(16)))
    CLIENT.slots(pool, lease)[2][5] ^= 0x40
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
        CLIENT.fill(pool, reservation, tokens)
        pool.commit(reservation)
        lease = pool.acquire(namespace, one(tokens))
        assert lease.num_blocks == len(tokens) // 4 - reservation.refused
        CLIENT.check(pool, lease, tokens)
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
        CLIENT.fill(pool, reservation, range(8))
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
    CLIENT.fill(pool, reservation, range(100, 116))
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
    CLIENT.slots(pool, second)[1][3] ^= 1
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
    CLIENT.check(pool, lease, hot)
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
        CLIENT.fill(pool, reservation, range(number * 50, number * 50 + 12))
        pool.commit(reservation)
        for lease, prompt in zip(leases, prompts[::2], strict=True):
            CLIENT.check(pool, lease, prompt)
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
    pool._max_leases = 1
    lease = pool.acquire(NAMESPACE, one(range(8)))
    for _ in range(70_000):
        assert pool.reserve(NAMESPACE, range(16)).num_blocks == 0
    assert pool.stats().num_reservations == 0
    pool.check_invariants()
    put(pool, range(100, 132))
    CLIENT.check(pool, lease, range(8))
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
        CLIENT.check(pool, lease, list(prompt)[: 4 * lease.num_blocks])
        pool.release(lease)
    pool.check_invariants()
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
        CLIENT.slots(pool, lease)[3][0] ^= 1
        assert pool.verify(lease) == 3
        pool.release(lease)


def test_reservations_count_against_the_number_of_leases():
    pool = small_pool(8)
    pool._max_leases = 2
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
