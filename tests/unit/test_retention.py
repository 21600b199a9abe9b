"""How long, and how dearly, blocks are kept: times to live, priorities, tenants."""

import numpy as np
import pytest

import kvstore
from kvstore.errors import ConfigError, UsageError
from kvstore.events import BlockRemoved
from kvstore.namespace import KVLayout, Namespace
from kvstore.quotas import Quota
from kvstore.residency import MAX_EXPIRED
from kvstore.testing import FakeClock, pattern, small_pool

NAMESPACE = Namespace(b"w", KVLayout(1, 1, 8, "float32", block_tokens=4))
WRONG_TTLS = [0, -1.0, float("nan"), float("inf"), 1e12, True, "60"]


@pytest.fixture
def clock():
    return FakeClock()


@pytest.fixture
def pool(clock):
    with small_pool(64, clock=clock) as pool:
        yield pool
        pool.check_invariants()


def put(pool, tokens, **options):
    key = np.array(tokens, "<i4").tobytes()
    with pool.reserve(NAMESPACE, tokens, **options) as reservation:
        for index, slot in zip(reservation.indices.tolist(), reservation.slots(), strict=True):
            slot[:] = pattern(NAMESPACE, key[: (index + 1) * NAMESPACE.key_bytes])
    return reservation.num_blocks


def known(pool, tokens):
    return pool.lookup(NAMESPACE, [*tokens, 0]) // 4


# -- times to live


def test_blocks_are_misses_from_the_moment_on_when_their_time_is_over(pool, clock):
    clock.advance(100)
    put(pool, range(8), ttl_s=10)
    clock.advance(9.9)
    assert known(pool, range(8)) == 2
    clock.advance(0.1)
    assert known(pool, range(8)) == pool.prefetch(NAMESPACE, range(9)) == 0
    assert pool.stats().num_blocks == 2, "nothing changed"
    assert pool.acquire(NAMESPACE, range(9)).num_blocks == 0
    assert pool.stats().num_blocks == 0


def test_the_time_begins_with_the_commit(pool, clock):
    reservation = pool.reserve(NAMESPACE, range(8), ttl_s=10)
    clock.advance(50)
    assert pool.commit(reservation) == 2
    clock.advance(9)
    assert known(pool, range(8)) == 2
    clock.advance(1)
    assert known(pool, range(8)) == 0


def test_expired_blocks_give_their_room_back_and_are_counted(pool, clock):
    put(pool, range(8), ttl_s=10)
    put(pool, range(100, 104))
    clock.advance(10)
    pool.reap()
    stats = pool.stats()
    assert stats.num_blocks == 1
    assert stats.counts["evicted_blocks", "dram", "expired"] == 2
    assert known(pool, range(100, 104)) == 1


def test_one_call_forgets_so_many_and_the_next_one_goes_on(clock):
    with small_pool(2 * MAX_EXPIRED, clock=clock) as pool:
        for number in range(MAX_EXPIRED + 3):
            put(pool, [number + 1] * 4, ttl_s=1 + number / 100)
        clock.advance(100)
        pool.reap()
        assert pool.stats().num_blocks == 3
        pool.reap()
        assert pool.stats().num_blocks == 0


def test_a_lease_outlives_the_time(pool, clock):
    put(pool, range(8), ttl_s=10)
    lease = pool.acquire(NAMESPACE, range(9))
    clock.advance(11)
    pool.reap()
    assert known(pool, range(8)) == 0
    np.testing.assert_array_equal(
        list(lease.slots())[1], pattern(NAMESPACE, np.arange(8, dtype="<i4").tobytes())
    )
    assert pool.verify(lease) == 2
    pool.release(lease)
    assert pool.stats().tiers[0].used_bytes == 0


def test_storing_again_extends_and_never_shortens(pool, clock):
    put(pool, range(8), ttl_s=10)
    clock.advance(5)
    assert put(pool, range(8), ttl_s=10) == 0, "all known"
    put(pool, range(4), ttl_s=1)
    clock.advance(9)
    assert known(pool, range(8)) == 2
    clock.advance(1)
    assert known(pool, range(8)) == 0


def test_storing_again_for_ever(pool, clock):
    put(pool, range(8), ttl_s=10)
    put(pool, range(4))
    put(pool, range(4), ttl_s=1)
    clock.advance(10)
    pool.reap()
    assert known(pool, range(8)) == 1


def test_what_follows_keeps_what_it_follows(pool, clock):
    put(pool, range(4), ttl_s=10)
    put(pool, range(8), ttl_s=20)
    clock.advance(15)
    pool.reap()
    assert known(pool, range(8)) == 2
    clock.advance(5)
    assert known(pool, range(8)) == 0


def test_a_later_commit_extends_what_comes_before_it(pool, clock):
    first = pool.reserve(NAMESPACE, range(4), ttl_s=1)
    second = pool.reserve(NAMESPACE, range(8), ttl_s=20)
    pool.commit(first)
    clock.advance(10)
    pool.commit(second)
    clock.advance(19)
    assert known(pool, range(8)) == 2
    pool.check_invariants()


def test_a_tail_expires_and_its_prompt_stays(pool, clock):
    put(pool, range(8))
    put(pool, range(16), ttl_s=10)
    clock.advance(10)
    assert known(pool, range(16)) == 2
    assert put(pool, range(16)) == 2, "the tail is missing"
    clock.advance(100)
    assert known(pool, range(16)) == 4


def test_branches_of_one_node_expire_each_at_its_time(pool, clock):
    put(pool, [1] * 8, ttl_s=10)
    put(pool, [1] * 4 + [2] * 4, ttl_s=30)
    clock.advance(10)
    pool.reap()
    assert pool.stats().num_blocks == 2
    clock.advance(20)
    pool.reap()
    assert pool.stats().num_blocks == 0


def test_an_expired_pin_lets_go(pool, clock):
    put(pool, range(8), ttl_s=10)
    assert pool.pin("mine", NAMESPACE, range(8)) == 8
    clock.advance(10)
    pool.reap()
    assert pool.pins() == []
    assert pool.stats().tiers[0].used_bytes == 0


def test_what_expired_is_told_to_those_who_follow_events(pool, clock):
    after = pool.events.read(0)[1]
    put(pool, range(8), ttl_s=10)
    clock.advance(10)
    pool.reap()
    removed = [event for event in pool.events.read(after)[0] if isinstance(event, BlockRemoved)]
    assert [(event.start, event.stop) for event in removed] == [(0, 2)]


@pytest.mark.parametrize("reaped", [False, True])
def test_explain_says_that_a_prompt_has_expired(pool, clock, reaped):
    put(pool, range(4))
    put(pool, range(8), ttl_s=10)
    clock.advance(10)
    if reaped:
        pool.reap()
    told = pool.explain(NAMESPACE, range(9))
    assert [segment.cause for segment in told.segments] == ["hit", "expired", "incomplete_block"]
    assert told.hit_tokens == 4


@pytest.mark.parametrize("ttl_s", WRONG_TTLS)
def test_impossible_times_are_refused(pool, ttl_s):
    with pytest.raises(UsageError, match="give seconds above 0"):
        pool.reserve(NAMESPACE, range(8), ttl_s=ttl_s)
    assert pool.stats().num_blocks == 0


def test_without_times_no_memory_is_taken_for_them(pool, clock):
    put(pool, range(8))
    before = pool.stats().index_bytes
    put(pool, range(8), ttl_s=10)
    assert pool.stats().index_bytes > before


# -- priority


def test_blocks_of_a_lower_priority_make_room():
    with small_pool(4) as pool:
        put(pool, range(4), priority=10)
        put(pool, range(100, 104), priority=90)
        put(pool, range(200, 204))
        put(pool, range(300, 304))
        pool.release(pool.acquire(NAMESPACE, range(5)))
        put(pool, range(400, 408), priority=0)
        assert known(pool, range(4)) == 0, "used last, and the first to go"
        assert known(pool, range(200, 204)) == 0
        assert known(pool, range(100, 104)) == known(pool, range(300, 304)) == 1
        pool.check_invariants()


def test_storing_again_raises_the_priority_of_the_whole_prompt():
    with small_pool(4) as pool:
        put(pool, range(8), priority=10)
        put(pool, range(100, 108))
        assert put(pool, range(8), priority=90) == 0
        put(pool, range(100, 108), priority=20)
        put(pool, range(200, 208))
        assert known(pool, range(8)) == 2
        assert known(pool, range(100, 108)) == 0


def test_a_leased_block_of_low_priority_gives_way_to_the_others():
    with small_pool(3) as pool:
        put(pool, range(4), priority=10)
        lease = pool.acquire(NAMESPACE, range(5))
        put(pool, range(100, 108), priority=90)
        assert put(pool, range(200, 208)) == 2
        assert known(pool, range(4)) == 1
        pool.release(lease)


def test_priority_holds_in_every_tier():
    with small_pool(2, 4) as pool:
        put(pool, range(8), priority=90)
        put(pool, range(100, 104))
        put(pool, range(200, 204))
        lease = pool.acquire(NAMESPACE, range(9))
        assert lease.tiers.tolist() == [0, 1], "one made room, there being nothing less important"
        pool.release(lease)
        put(pool, range(300, 304))
        assert known(pool, range(8)) == 2


@pytest.mark.parametrize("priority", [-1, 101, 50.0, True, "50", None])
def test_impossible_priorities_are_refused(pool, priority):
    with pytest.raises(UsageError, match="give an integer from 0"):
        pool.reserve(NAMESPACE, range(8), priority=priority)
    assert pool.stats().num_blocks == 0


# -- tenants


def of(tenant):
    return Namespace(b"w", NAMESPACE.layout, tenant=tenant)


def store(pool, tenant, *numbers, blocks=1, priority=50):
    """Store a prompt of so many blocks for each number; return how many blocks were refused."""
    refused = 0
    for number in numbers:
        tokens = range(1000 * number, 1000 * number + 4 * blocks)
        with pool.reserve(of(tenant), tokens, priority=priority) as reservation:
            refused += reservation.refused
        pool.check_invariants()
    return refused


def kept(pool, tenant, *numbers):
    """Those of the prompts whose first block is stored."""
    return [
        number
        for number in numbers
        if pool.lookup(of(tenant), range(1000 * number, 1000 * number + 5))
    ]


def used_pages(pool):
    return {tenant.tenant: tenant.used_bytes >> 12 for tenant in pool.tenants()}


def test_at_its_ceiling_a_tenant_loses_its_own_blocks():
    with small_pool(8, quotas={"a": Quota(ceiling_bytes=2 << 12)}) as pool:
        store(pool, None, 1)
        store(pool, "a", 1, 2)
        pool.release(pool.acquire(of("a"), range(1000, 1005)))
        assert store(pool, "a", 3) == 0
        assert kept(pool, "a", 1, 2, 3) == [1, 3], "the least recently used one, and nobody else's"
        assert kept(pool, None, 1) == [1]
        assert used_pages(pool) == {"a": 2, "": 1}
        assert pool.stats().counts["evicted_blocks", "dram", "quota"] == 1
        told = pool.explain(of("a"), range(2000, 2005))
        assert told.segments[0].cause == "evicted"
        assert "its tenant" in told.segments[0].detail


def test_at_its_ceiling_a_tenant_gives_up_what_has_the_lowest_priority():
    with small_pool(8, quotas={"a": Quota(ceiling_bytes=2 << 12)}) as pool:
        store(pool, "a", 1, priority=90)
        store(pool, "a", 2, priority=10)
        store(pool, "a", 3)
        assert kept(pool, "a", 1, 2, 3) == [1, 3]


def test_what_finds_no_room_below_the_ceiling_is_refused():
    with small_pool(8, quotas={"a": Quota(ceiling_bytes=2 << 12)}) as pool:
        assert store(pool, "a", 1, blocks=3) == 1
        lease = pool.acquire(of("a"), range(1000, 1009))
        assert store(pool, "a", 2) == 1
        assert kept(pool, "a", 1, 2) == [1]
        assert pool.stats().counts[("refused_blocks",)] == 2
        pool.release(lease)


def test_others_take_nothing_below_a_floor():
    with small_pool(4, quotas={"a": Quota(floor_bytes=2 << 12)}) as pool:
        store(pool, "a", 1, 2, 3)
        for number in range(1, 9):
            assert store(pool, "b", number) == 0
        assert kept(pool, "a", 1, 2, 3) == [2, 3], "down to its floor"
        assert kept(pool, "b", *range(1, 9)) == [7, 8]
        assert store(pool, "b", 20, blocks=4) == 2, "refused: the rest is not to be had"
        assert used_pages(pool) == {"a": 2, "": 2}


def test_below_its_floor_a_tenant_takes_from_others_before_itself():
    with small_pool(4, quotas={"a": Quota(floor_bytes=3 << 12)}) as pool:
        store(pool, "a", 1)
        store(pool, "b", 1, 2, 3)
        store(pool, "a", 2, 3)
        assert kept(pool, "a", 1, 2, 3) == [1, 2, 3]
        assert kept(pool, "b", 1, 2, 3) == [3]


def test_a_tenant_at_its_floor_still_makes_room_for_itself():
    with small_pool(2, quotas={"a": Quota(floor_bytes=2 << 12)}) as pool:
        store(pool, "a", 1, 2, 3)
        assert kept(pool, "a", 1, 2, 3) == [2, 3]


def test_one_large_victim_loses_no_more_than_it_has_above_its_floor():
    with small_pool(4, quotas={"a": Quota(floor_bytes=3 << 12)}) as pool:
        store(pool, "a", 1, blocks=4)
        assert store(pool, "b", 1, blocks=3) == 2
        assert used_pages(pool) == {"a": 3, "": 1}


def test_without_quotas_between_them_tenants_share_by_use():
    with small_pool(4, quotas={"a": Quota(), "b": Quota()}) as pool:
        store(pool, "a", 1)
        store(pool, "b", 1)
        store(pool, None, 1)
        store(pool, "a", 2)
        pool.release(pool.acquire(of("a"), range(1000, 1005)))
        store(pool, "b", 2, 3)
        assert kept(pool, "a", 1, 2) == [1, 2]
        assert kept(pool, "b", 1, 2, 3) == [2, 3]
        assert kept(pool, None, 1) == []


def test_what_is_in_use_of_one_tenant_is_no_obstacle_to_the_others():
    with small_pool(4, quotas={"a": Quota(), "b": Quota()}) as pool:
        store(pool, "a", 1, priority=0)
        lease = pool.acquire(of("a"), range(1000, 1005))
        store(pool, "b", 1, 2, 3, priority=90)
        assert store(pool, "b", 4) == 0
        assert kept(pool, "a", 1) == [1]
        pool.release(lease)


@pytest.mark.parametrize(
    ("quotas", "complaint"),
    [
        ({"a": Quota(floor_bytes=3 << 12), "b": Quota(floor_bytes=2 << 12)}, "together"),
        ({"a": Quota(ceiling_bytes=4096, floor_bytes=8192)}, "above its ceiling"),
    ],
)
def test_quotas_that_cannot_be_kept_are_refused(quotas, complaint):
    with pytest.raises(ConfigError, match=complaint):
        small_pool(4, quotas=quotas)


def test_quotas_are_settings(tmp_path):
    file = tmp_path / "kvstore.toml"
    file.write_text('dram = "64KiB"\n[tenants.a]\nceiling = "8KiB"\nfloor = 4096\n')
    with kvstore.open(config=file, prefault=False) as pool:
        (tenant, rest) = pool.tenants()
        assert (tenant.tenant, tenant.ceiling_bytes, tenant.floor_bytes) == ("a", 8192, 4096)
        assert rest.tenant == ""
        assert pool.stats().tenants == (tenant, rest)
    with kvstore.open(dram="64KiB", prefault=False) as pool:
        assert pool.stats().tenants == ()
    with kvstore.open(dram="64KiB", prefault=False, tenants={"a": {"floor": "4KiB"}}) as pool:
        assert pool.tenants()[0].floor_bytes == 4096
    for wrong, complaint in (
        ({"a": {"floors": 1}}, r"setting tenants.a.floors is unknown; did you mean floor"),
        ({"a": {"floor": "much"}}, r"setting tenants\.a\.floor='much': not a size"),
        ({"a": {"floor": "1MiB"}}, "the floors of all tenants"),
        ("a", "setting tenants='a': "),
    ):
        with pytest.raises(ConfigError, match=complaint):
            kvstore.open(dram="64KiB", prefault=False, tenants=wrong)


# -- what is stored already


def test_what_is_stored_can_be_kept_for_longer_and_dearer(pool, clock):
    put(pool, range(8), ttl_s=10, priority=10)
    assert pool.retain(NAMESPACE, range(4), priority=90, lifetime_s=50) == 4
    assert [node.level for node in pool._residency.trees[NAMESPACE.digest].walk()] == [90, 10]
    assert pool.retain(NAMESPACE, range(8), priority=5) == 8, "nothing is lowered"
    clock.advance(10)
    assert known(pool, range(8)) == 1
    assert pool.retain(NAMESPACE, range(8), lifetime_s=1) == 4
    assert pool.retain(NAMESPACE, range(8), lifetime_s=float("inf")) == 4
    clock.advance(1000)
    pool.reap()
    assert known(pool, range(8)) == 1
    assert pool.retain(NAMESPACE, range(100, 108)) == 0


def test_to_retain_shortens_nothing(pool, clock):
    put(pool, range(8))
    pool.retain(NAMESPACE, range(8), lifetime_s=1)
    clock.advance(10)
    assert known(pool, range(8)) == 2


@pytest.mark.parametrize("options", [{"priority": 101}, {"lifetime_s": -1}, {"lifetime_s": 1e12}])
def test_to_retain_impossibly_is_refused(pool, options):
    with pytest.raises(UsageError):
        pool.retain(NAMESPACE, range(8), **options)
