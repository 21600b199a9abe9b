"""The eviction policies: as published on single blocks, and what trees make of them."""

from __future__ import annotations

from functools import partial
from typing import get_args

import numpy as np
import pytest

import kvstore
from kvstore.assembly import POLICIES
from kvstore.config import Settings
from kvstore.namespace import KVLayout, Namespace
from kvstore.retention import NORMAL_PRIORITY
from kvstore.testing import small_pool
from radix import ARC, LFU, LRU, S3FIFO, SLRU, CostAware, RadixTree, check_invariants
from radix.leaves import CORRELATED, POSTPONED, SLACK


class Cache:
    """A tree over one-token blocks that evicts when it has more than ``capacity``."""

    def __init__(self, order, capacity):
        self.tree, self.order, self.capacity = RadixTree(4, order), order, capacity
        self.next_id = 0
        self.evicted = []

    def known(self, tokens):
        return self.tree.match(tokens).num_blocks

    def touch(self, tokens, times=1):
        for _ in range(times):
            self.tree.touch(self.tree.match(tokens))

    def store(self, tokens):
        tokens = list(tokens)
        found = self.tree.match(tokens)
        missing = len(tokens) - found.num_blocks
        self.evict(self.tree.num_blocks + missing - self.capacity, found.nodes)
        self.next_id += missing
        self.tree.insert(tokens, np.arange(self.next_id - missing, self.next_id, dtype=np.int32))
        check_invariants(self.tree)

    def evict(self, count, in_use=()):
        while count > 0:
            node = self.order.victim()
            if node in in_use:
                self.order.postpone(node)
                continue
            self.evicted.append(np.frombuffer(self.tree.prefix(node), "<i4").tolist())
            count -= len(self.tree.trim(node, max(0, len(node.blocks) - count)))

    def use(self, *tokens):
        """Look up, and store what is missing, as one request."""
        self.touch(tokens)
        self.store(tokens)

    def fill(self, first=1000):
        """Store prompts of one block, each once, until there is no room."""
        for number in range(first, first + self.capacity - self.tree.num_blocks):
            self.store([number])

    def hot(self):
        """Let two prompts be used three times in all."""
        for _ in range(3):
            self.use(1, 2)
            self.use(3, 4)

    def scan(self, count=30):
        for number in range(100, 100 + count):
            self.use(number, number)


# -- as published: naive models for blocks without a tree


class NaiveSLRU:
    def __init__(self, share):
        self.share, self.new, self.kept = share, [], []

    def victim(self):
        return (self.new or self.kept)[0]

    def remove(self, item):
        (self.new if item in self.new else self.kept).remove(item)
        self.settle()

    def use(self, item):
        if item in self.new + self.kept:
            (self.new if item in self.new else self.kept).remove(item)
            self.kept.append(item)
        else:
            self.new.append(item)
        self.settle()

    def settle(self):
        while len(self.kept) > self.share * len(self.new + self.kept):
            self.new.append(self.kept.pop(0))


class NaiveS3FIFO:
    def __init__(self, share, promote_after):
        self.share, self.promote_after = share, promote_after
        self.small, self.main, self.ghosts, self.uses = [], [], [], {}

    def queue(self):
        large = len(self.small) > self.share * len(self.uses)
        return (large and self.small) or self.main or self.small

    def victim(self):
        return self.queue()[0]

    def remove(self, item):
        queue = self.queue()
        assert queue.pop(0) == item
        del self.uses[item]
        if queue is self.small:
            self.ghosts.append(item)
        self.settle()

    def use(self, item):
        if item in self.uses:
            self.uses[item] = min(3, self.uses[item] + 1)
        else:
            self.uses[item] = 0
            (self.main if item in self.ghosts else self.small).append(item)
            self.ghosts = [ghost for ghost in self.ghosts if ghost != item]
        self.settle()

    def settle(self):
        self.ghosts = self.ghosts[max(0, len(self.ghosts) - len(self.uses)) :]
        while self.uses:
            queue = self.queue()
            item = queue[0]
            if queue is self.small and self.uses[item] >= self.promote_after:
                self.uses[item] = 0
            elif queue is self.main and self.uses[item]:
                self.uses[item] -= 1
            else:
                return
            queue.pop(0)
            self.main.append(item)


class NaiveARC:
    def __init__(self):
        self.queues, self.ghosts, self.target = ([], []), ([], []), 0.0

    def victim(self):
        once, again = self.queues
        return (once if once and (len(once) > self.target or not again) else again)[0]

    def remove(self, item):
        for queue, ghosts in zip(self.queues, self.ghosts, strict=True):
            if item in queue:
                queue.remove(item)
                ghosts.append(item)
        self.settle()

    def use(self, item):
        once, again = self.queues
        lost_once, lost_again = self.ghosts
        if item in once + again:
            (once if item in once else again).remove(item)
            again.append(item)
        elif item in lost_once:
            self.move_target(max(1, len(lost_again) / len(lost_once)))
            lost_once.remove(item)
            again.append(item)
        elif item in lost_again:
            self.move_target(-max(1, len(lost_once) / len(lost_again)))
            lost_again.remove(item)
            again.append(item)
        else:
            self.move_target(0)
            once.append(item)
        self.settle()

    def move_target(self, by):
        self.target = min(max(0, self.target + by), len(self.queues[0] + self.queues[1]) + 1)

    def settle(self):
        (once, again), (lost_once, lost_again) = self.queues, self.ghosts
        del lost_once[: max(0, len(lost_once) - len(again))]
        del lost_again[: max(0, len(lost_once + lost_again) - len(once + again))]


class NaiveLFU:
    def __init__(self, half_life):
        self.half_life, self.age, self.uses = half_life, 0.0, {}

    def worth(self, item):
        return sum(0.5 ** (self.age - age) for age in self.uses[item])

    def is_victim(self, item):
        return self.worth(item) <= min(map(self.worth, self.uses)) * (1 + 1e-9)

    def remove(self, item):
        del self.uses[item]

    def use(self, item):
        if item in self.uses:  # storing is no use
            self.age += 1 / (self.half_life * len(self.uses))
        self.uses.setdefault(item, []).append(self.age)


class NaiveGDSF:
    def __init__(self, doubling_blocks):
        self.cost, self.inflation, self.ranks, self.uses = 1 + 0.5 / doubling_blocks, 0.0, {}, {}

    def victim(self):
        return min(self.ranks, key=lambda item: self.ranks[item])

    def remove(self, item):
        self.inflation = max(self.inflation, self.ranks.pop(item))
        del self.uses[item]

    def use(self, item):
        self.uses[item] = self.uses.get(item, 0) + 1
        rank = self.inflation + self.uses[item] * self.cost
        self.ranks.pop(item, None)  # it becomes the newest of its rank
        self.ranks[item] = rank


@pytest.mark.parametrize(
    ("make", "make_naive"),
    [
        (lambda: SLRU(0.6, correlated=0), lambda: NaiveSLRU(0.6)),
        (lambda: S3FIFO(0.3, 2, correlated=0), lambda: NaiveS3FIFO(0.3, 2)),
        (lambda: S3FIFO(0.1, 1, correlated=0), lambda: NaiveS3FIFO(0.1, 1)),
        (lambda: ARC(correlated=0), NaiveARC),
        (lambda: LFU(1.5, correlated=0), lambda: NaiveLFU(1.5)),
        (lambda: CostAware(4, correlated=0), lambda: NaiveGDSF(4)),
    ],
    ids=["slru", "s3fifo", "s3fifo-1", "arc", "lfu", "gdsf"],
)
@pytest.mark.parametrize("skew", [0.4, 0.8, 1.5])
def test_single_blocks_leave_as_published(make, make_naive, skew):
    rng = np.random.default_rng(7)
    for capacity in [1, 2, 3, 4, 5, 6, 8, 8, 12, 16]:
        cache, naive = Cache(make(), capacity), make_naive()
        for item in (rng.pareto(skew, 250).astype(int) % (2 * capacity + 2)).tolist():
            if cache.known([item]):
                cache.touch([item])
            else:
                cache.store([item])
                for (gone,) in cache.evicted:
                    if isinstance(naive, NaiveLFU):
                        assert naive.is_victim(gone)
                    else:
                        assert gone == naive.victim()
                    naive.remove(gone)
                cache.evicted.clear()
            naive.use(item)


# -- what sets each apart from LRU


@pytest.mark.parametrize("make", [SLRU, S3FIFO, ARC, partial(LFU, 20.0)])
def test_what_is_used_again_survives_a_scan(make):
    cache, lru = Cache(make(correlated=1), 20), Cache(LRU(), 20)
    for each in (cache, lru):
        each.fill()
        each.hot()
        each.scan()
    assert (lru.known([1, 2]), lru.known([3, 4])) == (0, 0)
    assert (cache.known([1, 2]), cache.known([3, 4])) == (2, 2)


def test_slru_lets_go_of_what_is_protected_beyond_its_share():
    cache = Cache(SLRU(0.5, correlated=0), 8)
    for number in range(8):
        cache.use(number)
    for number in range(8):
        cache.touch([number])
    assert cache.order.sizes == [4, 4]
    cache.evict(4)
    assert [cache.known([number]) for number in range(8)] == [0, 0, 0, 0, 1, 1, 1, 1]


def test_s3fifo_remembers_what_left_the_small_queue():
    cache = Cache(S3FIFO(correlated=0), 10)
    for number in range(12):
        cache.store([number])
    assert cache.evicted == [[0], [1]]
    cache.store([0])
    assert cache.order.sizes == [9, 1], "it came back to the main queue"
    cache.scan(20)
    assert cache.known([0])
    assert not cache.known([11])


def test_s3fifo_keeps_a_trunk_whose_branches_are_not_used_again():
    """A trunk never comes up itself, and would make the small queue look full."""
    cache = Cache(S3FIFO(0.1, 2, correlated=0), 30)
    for number in range(100, 104):
        cache.use(*range(10), number)
    assert cache.order.sizes == [4, 10]
    assert cache.order.victim().blocks.tolist() == [10], "the oldest branch"


def test_s3fifo_moves_ancestors_along():
    cache = Cache(S3FIFO(0.1, 4, correlated=0), 20)  # no use is enough: only ghosts are
    cache.use(1, 2)
    cache.use(1, 2, 3)
    cache.evict(1)
    assert cache.evicted == [[1, 2, 3]]
    cache.store([1, 2, 3])
    assert cache.order.sizes == [0, 3], "the leaf came back, and its trunk is worth no less"


def test_arc_adapts_to_which_ghosts_come_back():
    cache = Cache(ARC(correlated=0), 8)
    for number in range(4):
        cache.store([number])
        cache.touch([number])
    for number in range(10, 20):
        cache.store([number])
    assert cache.order.target_blocks == 0
    recent = int(cache.evicted[-1][0])
    cache.store([recent])
    grown = cache.order.target_blocks
    assert grown >= 1, "recency was cut too short"
    for number in range(30, 38):
        cache.order.target_blocks = 8.0
        cache.store([number])
    lost = next(number for number in range(4) if not cache.known([number]))
    cache.store([lost])
    assert cache.order.target_blocks < 8, "frequency was"


def test_lfu_prefers_the_frequent_and_forgets_old_fame():
    cache = Cache(LFU(8.0, correlated=0), 4)
    cache.fill()
    cache.touch([1000], times=5)
    for number in range(1001, 1004):
        cache.touch([number])
    cache.touch([1001])
    cache.store([1])
    cache.store([2])
    assert cache.evicted == [[1002], [1]], "not the oldest use: the least used"
    for _ in range(100):
        cache.touch([1003])
    cache.store([3])
    cache.store([4])
    cache.store([5])
    assert not cache.known([1000])
    assert cache.known([1003])


def test_cost_aware_keeps_what_is_dear_to_compute_until_it_is_overtaken():
    cache = Cache(CostAware(doubling_blocks=4, correlated=0), 24)
    cache.store(range(1, 21))
    cache.touch(list(range(1, 11)))  # cut into halves: the second one is deep, and older
    cache.store([50, 51])
    cache.store([60, 61, 62])
    assert cache.evicted == [[50, 51]], "cheap, though newer than the deep half"
    cache.scan(40)
    assert cache.known(list(range(1, 21))) < 20, "dear, but nobody asks for it any more"


# -- what trees ask of all of them

LEAF_POLICIES = [SLRU, S3FIFO, ARC, LFU, CostAware]


def ranks(order):
    return {entry.node: (entry.key, entry.queue, entry.uses) for entry in order._entries.values()}


@pytest.mark.parametrize("make", LEAF_POLICIES)
def test_looking_up_and_storing_is_one_use(make):
    """Also of a prompt that is stored piece by piece: it stays one new node."""
    cache = Cache(make(), 100)
    cache.fill()
    cache.use(1, 2)
    first = ranks(cache.order)[cache.tree.match([1]).nodes[0]][1:]
    for stop in range(3, 10):
        cache.use(*range(1, stop))
    (node,) = cache.tree.match([*range(1, 9)]).nodes
    assert len(node.blocks) == 8
    assert ranks(cache.order)[node][1:] == first


@pytest.mark.parametrize("make", LEAF_POLICIES)
def test_storing_is_no_use_of_what_is_there(make):
    """An answer that is stored as it grows, while others look up, does not promote its prompt."""
    cache, twin = Cache(make(), 100), Cache(make(), 100)
    for each in (cache, twin):
        each.fill()
        each.use(1, 2)
    for stop in range(3, 9):
        cache.touch([], times=2 * CORRELATED)
        twin.touch([], times=2 * CORRELATED)
        cache.store(range(1, stop))
    found = cache.tree.match([1, 2]).nodes[0], twin.tree.match([1, 2]).nodes[0]
    once, never = ranks(cache.order)[found[0]], ranks(twin.order)[found[1]]
    assert once[1:] == never[1:]
    assert once[0] == pytest.approx(never[0], abs=0.01)


@pytest.mark.parametrize("make", LEAF_POLICIES)
def test_a_new_turn_does_not_inherit_the_uses_of_the_old_ones(make):
    cache = Cache(make(correlated=2), 100)
    cache.fill()
    for _ in range(4):
        cache.use(1, 2)
        cache.touch([], times=3)  # other requests
    cache.use(1, 2, 3, 4)
    head, tail = cache.tree.match([1, 2, 3, 4]).nodes
    assert ranks(cache.order)[head] != ranks(cache.order)[tail]


@pytest.mark.parametrize("make", LEAF_POLICIES)
def test_both_parts_of_a_split_keep_the_rank(make):
    cache = Cache(make(correlated=0), 100)
    cache.store([1, 2, 3, 4])
    cache.touch([1, 2, 3, 4], times=2)
    (node,) = cache.tree.walk()
    before = ranks(cache.order)[node]
    cache.tree._split(node, 2)
    upper, lower = cache.tree.match([1, 2, 3, 4]).nodes
    check_invariants(cache.tree)
    assert ranks(cache.order) == {upper: before, lower: before}
    assert cache.order.victim() is lower


@pytest.mark.parametrize("make", LEAF_POLICIES)
def test_a_victim_in_use_waits_and_is_not_promoted(make):
    cache = Cache(make(), 100)
    for number in range(3):
        cache.store([number])
    order = cache.order
    first, before = order.victim(), ranks(order)
    seen = []
    for _ in range(9):
        seen.append(order.victim())
        order.postpone(seen[-1])
    assert seen[:3] == seen[3:6] == seen[6:]
    assert len(set(seen)) == 3
    assert ranks(order) == before
    cache.touch([], times=POSTPONED)
    assert order.victim() is first
    check_invariants(cache.tree)


@pytest.mark.parametrize("make", LEAF_POLICIES)
def test_what_only_arrives_was_not_used(make):
    cache = Cache(make(correlated=0), 100)
    cache.fill()
    node = cache.tree.match([1050]).nodes[0]
    before = ranks(cache.order)[node]
    for _ in range(5):
        cache.order.arrive([node])
    assert ranks(cache.order)[node] == before
    cache.order.remove(node)
    cache.order.arrive([node])
    assert node in set(cache.order)


@pytest.mark.parametrize("make", [S3FIFO, ARC])
def test_only_what_was_evicted_is_remembered(make):
    cache = Cache(make(), 100)
    cache.use(1, 2)
    cache.use(1, 2, 3)  # a run that grows is the victim, and is still one new run
    assert cache.order.sizes == [3, 0]
    cache.use(8)
    cache.use(9)
    cache.tree.trim(cache.tree.match([9]).nodes[0], 0)
    cache.use(9)
    assert cache.order.sizes == [5, 0], "it was dropped, for a reason of the owner"


@pytest.mark.parametrize("make", LEAF_POLICIES)
def test_a_lease_is_one_use_however_often_it_is_in_the_way(make):
    namespace = Namespace(b"weights", KVLayout(1, 1, 8, "float32", block_tokens=1))
    pool = small_pool(3, policy=lambda: make(correlated=2))
    pool.commit(pool.reserve(namespace, [1]))
    with pool.acquire(namespace, [1, 0]) as lease:
        assert lease.num_blocks == 1
        order = pool._residency.tiers[0].policy._levels[NORMAL_PRIORITY].order
        before = ranks(order)[next(iter(order))]
        for number in range(2, 300):
            pool.commit(pool.reserve(namespace, [number]))
        held = next(node for node in order if node.key[0] == 1)
        assert ranks(order)[held] == before
    pool.close()


@pytest.mark.parametrize("make", [S3FIFO, ARC])
def test_a_run_that_comes_back_is_recognised_however_it_was_cut(make):
    cache = Cache(make(correlated=0), 30)
    cache.store(range(200, 210))
    cache.touch([*range(200, 210)], times=3)
    cache.store([1, 2, 3, 4])
    cache.tree._split(cache.tree.match([1]).nodes[0], 2)
    for number in range(10, 34):
        cache.use(number)
    assert cache.known([1]) == 0
    cache.store([1, 2, 3, 4])
    assert [entry.queue for node, entry in cache.order._entries.items() if node.key[0] == 1] == [1]


@pytest.mark.parametrize("make", LEAF_POLICIES)
def test_memory_is_that_of_known_nodes(make):
    """Neither heaps nor ghosts grow with what was there once."""
    cache = Cache(make(correlated=0), 20)
    cache.store([1])
    cache.store([2])
    for _ in range(1000):
        cache.touch([2])
    assert sum(map(len, cache.order._heaps)) <= 4 + 2 * SLACK
    rng = np.random.default_rng(0)
    for prompt in rng.integers(0, 6, (1500, 4)).tolist():
        cache.use(*prompt)  # checks the bounds each time
    cache.evict(20)
    assert len(cache.order) == 0
    assert [len(ghosts) for ghosts in cache.order._ghosts] == [0] * len(cache.order._ghosts)
    assert not any(cache.order._heaps)


@pytest.mark.parametrize("make", LEAF_POLICIES)
def test_uses_in_a_row_count_once(make):
    cache, twin = Cache(make(), 100), Cache(make(), 100)
    for each, times in ((cache, CORRELATED), (twin, CORRELATED + 1)):
        each.fill()
        each.touch([1099], times=times)
    once, again = (ranks(each.order)[each.tree.match([1099]).nodes[0]] for each in (cache, twin))
    assert once[1:] == (0, int(make is CostAware))
    assert again[1:] != once[1:] or again[0] > once[0] + 0.5


def test_settings_name_the_policies():
    assert get_args(Settings.model_fields["policy"].annotation) == tuple(POLICIES)


@pytest.mark.parametrize(("name", "make"), POLICIES.items())
def test_a_store_is_opened_with_each(name, make):
    namespace = Namespace(b"weights", KVLayout(1, 1, 8, "float32", block_tokens=1))
    with kvstore.open(dram="64KiB", policy=name, prefault=False) as pool:
        assert pool._residency.tiers[0].policy._make is make
        for number in range(40):
            pool.commit(pool.reserve(namespace, [number, number]))
        assert pool.stats().num_blocks == 16
        pool.check_invariants()
