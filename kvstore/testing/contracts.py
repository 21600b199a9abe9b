"""Contract suites: inherit one, give it the object, and get its tests.

The suites read back past the object under test wherever they can.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from itertools import permutations
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from kvstore.errors import LeaseNotHeldError, TooLargeError, UsageError
from kvstore.namespace import KVLayout, Namespace
from kvstore.testing.doubles import pattern
from radix import RadixTree

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvstore.explain import Explanation
    from kvstore.interface import KVStore
    from kvstore.lease import Lease, Reservation
    from kvstore.tiers.store import Store
    from radix import EvictionOrder

PAGE = 4096


class StoreContract(ABC):
    """Every :class:`kvstore.tiers.store.Store`."""

    @abstractmethod
    def make_store(self, capacity_bytes: int) -> Store:
        """Return an open store."""

    def raw(self, store: Store) -> np.ndarray:
        """All bytes of ``store`` as a host array."""
        return np.asarray(store.buffer)

    def test_moves_exactly_the_named_blocks(self) -> None:
        """Batches land at their offsets, whole, and nowhere else."""
        store = self.make_store(8 * PAGE)
        rng = np.random.default_rng(1)
        blocks = [rng.integers(0, 256, PAGE, dtype=np.uint8) for _ in range(3)]
        before = self.raw(store).copy()
        offsets = np.array([6 * PAGE, 0, 3 * PAGE], np.int64)
        store.write_from(offsets, blocks)
        expected = before
        for offset, block in zip(offsets, blocks, strict=True):
            expected[offset : offset + PAGE] = block
        np.testing.assert_array_equal(self.raw(store), expected)
        targets = [np.zeros(PAGE, np.uint8) for _ in range(3)]
        store.read_into(offsets, targets)
        np.testing.assert_array_equal(targets, blocks)
        store.close()

    def test_relocates(self) -> None:
        """Blocks are copied within the store, and nothing else changes."""
        store = self.make_store(8 * PAGE)
        blocks = [np.full(PAGE, value, np.uint8) for value in (1, 2)]
        store.write_from(np.array([0, PAGE], np.int64), blocks)
        store.relocate(
            np.array([0, PAGE], np.int64), np.array([5 * PAGE, 3 * PAGE], np.int64), PAGE
        )
        pages = self.raw(store).reshape(8, PAGE)
        assert [set(page.tolist()) for page in pages[[0, 1, 3, 5]]] == [{1}, {2}, {2}, {1}]
        store.close()

    def test_empty_batch(self) -> None:
        """Moving nothing is fine."""
        store = self.make_store(PAGE)
        store.write_from(np.empty(0, np.int64), [])
        store.read_into(np.empty(0, np.int64), [])
        store.close()

    def test_disjoint_moves_from_threads(self) -> None:
        """Calls for disjoint ranges may run at the same time."""
        store = self.make_store(16 * PAGE)

        def write(worker: int) -> None:
            for _ in range(50):
                store.write_from(
                    np.arange(4 * worker, 4 * worker + 4) * PAGE,
                    [np.full(PAGE, worker, np.uint8)] * 4,
                )

        threads = [threading.Thread(target=write, args=(worker,)) for worker in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for worker in range(4):
            assert (self.raw(store)[worker * 4 * PAGE : (worker + 1) * 4 * PAGE] == worker).all()
        store.close()


class OrderContract(ABC):
    """Every :class:`radix.EvictionOrder`."""

    @abstractmethod
    def make_order(self) -> EvictionOrder:
        """Return an order that knows no node."""

    def tree(self) -> RadixTree:
        """Return a tree over one-byte keys that tells a new order."""
        return RadixTree(4, self.make_order())

    def insert(self, tree: RadixTree, tokens: Sequence[int]) -> None:
        """Insert ``tokens`` (a block each) with fresh ids."""
        known = tree.match(tokens).num_blocks
        first = max((int(node.blocks.max()) + 1 for node in tree.walk()), default=0)
        tree.insert(tokens, np.arange(first, first + len(tokens) - known, dtype=np.int32))

    def test_knows_what_is_in_the_tree(self) -> None:
        """Splits, merges and trims leave exactly the tree's nodes known."""
        tree = self.tree()
        for tokens in ([1, 2, 3], [1, 2, 4], [5], [1, 2, 3, 6], [1, 7]):
            self.insert(tree, tokens)
            assert set(tree.order) == set(tree.walk())
            assert len(tree.order) == tree.num_nodes
        while tree.num_blocks:
            tree.evict(1)
            assert set(tree.order) == set(tree.walk())

    def test_asking_changes_nothing(self) -> None:
        """The victim stays the same until it is removed or touched."""
        tree = self.tree()
        assert tree.order.victim() is None
        self.insert(tree, [1])
        self.insert(tree, [2])
        victim = tree.order.victim()
        assert victim is not None
        assert tree.order.victim() is victim
        tree.trim(victim, 0)
        assert tree.order.victim() is not victim

    def test_a_postponed_victim_lets_others_go_first(self) -> None:
        """It stays known, and goes when nothing else is left."""
        tree = self.tree()
        for tokens in ([1], [2], [3, 4], [3, 5]):
            self.insert(tree, tokens)
        first = tree.order.victim()
        assert first is not None
        tree.order.postpone(first)
        while tree.num_nodes > 1:
            victim = tree.order.victim()
            assert victim is not None
            assert victim is not first
            tree.trim(victim, 0)
        assert tree.order.victim() is first

    def test_what_arrives_is_known(self) -> None:
        """Also if it was forgotten."""
        tree = self.tree()
        self.insert(tree, [1, 2])
        self.insert(tree, [1, 3])
        victim = tree.order.victim()
        assert victim is not None
        tree.order.remove(victim)
        assert victim not in set(tree.order)
        tree.order.arrive(victim.path())
        assert set(tree.order) == set(tree.walk())

    def test_every_block_can_be_evicted_once(self) -> None:
        """Evicting one by one returns every id once and ends."""
        tree = self.tree()
        for tokens in ([1, 2, 3], [1, 2, 4], [9, 9, 9], [1, 8]):
            self.insert(tree, tokens)
        total = tree.num_blocks
        ids = np.concatenate([tree.evict(1) for _ in range(total)])
        assert len(np.unique(ids)) == total
        assert tree.num_blocks == 0

    def test_forgets_strangers_silently(self) -> None:
        """Removing a node that is not known is ignored."""
        order = self.make_order()
        tree = RadixTree(4)
        self.insert(tree, [1])
        order.remove(next(tree.walk()))
        assert len(order) == 0


class ClientContract(ABC):
    """Every store that engines talk to: the embedded pool, and clients of a daemon."""

    layout = KVLayout(num_layers=1, num_kv_heads=1, head_dim=8, dtype="float32", block_tokens=4)
    namespace = Namespace(b"weights", layout)
    ranks = Namespace(b"weights", KVLayout(2, 4, 8, "float32", block_tokens=4))
    """Blocks of four heads, as long as a page."""

    @abstractmethod
    def make_store(self, num_blocks: int) -> KVStore:
        """Return an empty store with room for ``num_blocks`` blocks of ``layout``."""

    def put(self, store: KVStore, tokens: Sequence[int], namespace: Namespace | None = None) -> int:
        """Store the pattern of every missing block of ``tokens``."""
        reservation = store.reserve(namespace or self.namespace, tokens)
        self.fill(reservation, tokens)
        return store.commit(reservation)

    def fill(self, held: Reservation, tokens: Sequence[int]) -> None:
        """Write patterns into reserved slots."""
        for index, slot in zip(held.indices.tolist(), self.slots(held), strict=True):
            slot[:] = pattern(held.namespace, _prefix(tokens, index + 1, held.namespace))

    def fill_part(self, held: Reservation, tokens: Sequence[int], heads: tuple[int, int]) -> None:
        """Write what patterns have of ``heads`` into reserved slots, and nothing else."""
        layout, part = held.namespace.layout, slice(*heads)
        rows = (layout.num_layers, 2, layout.num_kv_heads, -1)
        for index, slot in zip(held.indices.tolist(), self.slots(held), strict=True):
            whole = pattern(held.namespace, _prefix(tokens, index + 1, held.namespace))
            slot.reshape(rows)[:, :, part] = whole.reshape(rows)[:, :, part]

    def put_part(self, store: KVStore, tokens: Sequence[int], heads: tuple[int, int]) -> int:
        """Write ``heads`` of every block of ``tokens`` that lacks them."""
        reservation = store.reserve(self.ranks, tokens, heads=heads)
        self.fill_part(reservation, tokens, heads)
        return store.commit(reservation)

    def slots(self, held: Lease | Reservation) -> list[np.ndarray]:
        """Views of the held blocks' bytes."""
        return [np.asarray(slot) for slot in held.slots()]

    def check(self, lease: Lease, tokens: Sequence[int]) -> None:
        """Assert that every leased block has its own bytes."""
        for index, slot in enumerate(self.slots(lease)):
            np.testing.assert_array_equal(
                slot, pattern(lease.namespace, _prefix(tokens, index + 1, lease.namespace))
            )

    def test_what_has_a_lower_priority_goes_first(self) -> None:
        """However it was used; and storing again raises it, for the whole prompt."""
        with self.make_store(4) as store:
            store.commit(store.reserve(self.namespace, range(8), priority=10))
            store.commit(store.reserve(self.namespace, range(100, 104), priority=90))
            store.commit(store.reserve(self.namespace, range(200, 204), priority=0))
            assert store.reserve(self.namespace, range(200, 204), priority=80).num_blocks == 0
            for _ in range(3):
                store.release(store.acquire(self.namespace, range(9)))
            store.drain()  # what is being moved stays
            self.put(store, range(300, 308))
            assert store.lookup(self.namespace, range(9)) == 0
            assert store.lookup(self.namespace, range(100, 105)) == 4
            assert store.lookup(self.namespace, range(200, 205)) == 4

    def test_impossible_retention_is_refused_where_it_is_asked_for(self) -> None:
        """Also by a client without its daemon, and nothing is reserved."""
        with self.make_store(4) as store:
            for priority in (-1, 101, 5.0, True):
                with pytest.raises(UsageError, match="priority="):
                    store.reserve(self.namespace, range(8), priority=priority)  # type: ignore[arg-type]
            for ttl_s in (0, -1, float("nan"), float("inf"), True):
                with pytest.raises(UsageError, match="ttl_s="):
                    store.reserve(self.namespace, range(8), ttl_s=ttl_s)
            store.commit(store.reserve(self.namespace, range(8), ttl_s=3600))
            assert store.lookup(self.namespace, range(9)) == 8
            assert store.stats().num_reservations == 0

    def test_a_stored_prefix_is_found_and_right(self) -> None:
        """Whole blocks, never the last token, right bytes."""
        with self.make_store(16) as store:
            tokens = list(range(20))
            assert self.put(store, tokens) == 5
            for length in range(40):
                asked = (tokens + list(range(100, 120)))[:length]
                expected = 4 * (min(20, max(0, length - 1)) // 4)
                assert store.lookup(self.namespace, asked) == expected, length
                with store.acquire(self.namespace, asked) as lease:
                    assert lease.hit_tokens == expected
                    self.check(lease, asked)

    def test_a_difference_at_any_position_ends_the_hit_there(self) -> None:
        """Every token of a block counts, also its last."""
        with self.make_store(16) as store:
            tokens = list(range(16))
            self.put(store, tokens)
            for position in range(16):
                changed = [*tokens, 99]
                changed[position] += 1000
                assert store.lookup(self.namespace, changed) == position // 4 * 4

    def test_not_visible_before_commit(self) -> None:
        """Reserved is absent, committed is present, aborted is absent."""
        with self.make_store(16) as store:
            tokens = list(range(9))
            first = store.reserve(self.namespace, tokens)
            assert first.indices.tolist() == [0, 1]
            assert store.lookup(self.namespace, tokens) == 0
            second = store.reserve(self.namespace, tokens)
            assert second.num_blocks == 0, "what one writer writes is not handed to another"
            store.abort(first)
            assert store.lookup(self.namespace, tokens) == 0
            store.commit(second)
            assert self.put(store, tokens) == 2
            assert store.lookup(self.namespace, tokens) == 8

    def test_blocks_behind_an_aborted_one_never_show(self) -> None:
        """A prefix with a hole is not a prefix; the slots come back."""
        with self.make_store(4) as store:
            first = store.reserve(self.namespace, range(8))
            second = store.reserve(self.namespace, range(16))
            assert second.indices.tolist() == [2, 3]
            assert store.commit(second) == 2
            assert store.lookup(self.namespace, range(17)) == 0
            store.abort(first)
            assert store.lookup(self.namespace, range(17)) == 0
            assert self.put(store, range(100, 116)) == 4

    def test_ending_twice_is_refused(self) -> None:
        """A lease or reservation ends once, and slots are freed once."""
        with self.make_store(4) as store:
            self.put(store, range(8))
            lease = store.acquire(self.namespace, range(9))
            store.release(lease)
            with pytest.raises(LeaseNotHeldError):
                store.release(lease)
            reservation = store.reserve(self.namespace, range(16))
            store.commit(reservation)
            with pytest.raises(LeaseNotHeldError):
                store.commit(reservation)
            with pytest.raises(LeaseNotHeldError):
                store.abort(reservation)
            store.drain()
            assert store.stats().held_blocks == 0

    def test_leased_blocks_survive_pressure(self) -> None:
        """Other writers evict around a lease, never through it."""
        with self.make_store(8) as store:
            tokens = list(range(17))
            self.put(store, tokens)
            lease = store.acquire(self.namespace, tokens)
            for start in range(1000, 3000, 100):
                self.put(store, range(start, start + 16))
            self.check(lease, tokens)
            assert store.lookup(self.namespace, tokens) == 16
            store.release(lease)
            for start in range(5000, 7000, 100):
                self.put(store, range(start, start + 32))
            assert store.lookup(self.namespace, tokens) == 0

    def test_nothing_evictable_is_an_answer(self) -> None:
        """With every block leased, writers get no slots; afterwards they do."""
        with self.make_store(4) as store:
            self.put(store, range(16))
            lease = store.acquire(self.namespace, range(17))
            for start in range(1000, 1100):
                reservation = store.reserve(self.namespace, range(start, start + 16))
                assert (reservation.num_blocks, reservation.refused) == (0, 4)
                store.commit(reservation)
            store.release(lease)
            assert self.put(store, range(1000, 1016)) == 4

    def test_larger_than_the_store_is_refused_at_once(self) -> None:
        """With both numbers; others go on."""
        with self.make_store(4) as store:
            with pytest.raises(TooLargeError, match=r"5 blocks.*holds 4"):
                store.reserve(self.namespace, range(20))
            assert self.put(store, range(16)) == 4
            assert store.lookup(self.namespace, range(200)) == 16

    def test_steady_state_does_not_decay(self) -> None:
        """After hundreds of cycles every put succeeds, every recent prefix hits, nothing is held."""
        with self.make_store(64) as store:
            for cycle in range(600):
                prompt = range(cycle * 100, cycle * 100 + 33)
                assert self.put(store, prompt) == 8
                with store.acquire(self.namespace, prompt) as lease:
                    assert lease.num_blocks == 8
                if cycle > 2:
                    older = range((cycle - 2) * 100, (cycle - 2) * 100 + 33)
                    with store.acquire(self.namespace, older) as lease:
                        assert lease.num_blocks == 8
                        self.check(lease, older)
            store.drain()
            assert store.stats().held_blocks == 0

    def test_namespaces_do_not_share(self) -> None:
        """Same tokens, another salt, tenant, adapter or weights: no hit."""
        others = [
            Namespace(b"weights2", self.layout),
            Namespace(b"weights", self.layout, adapter=b"a"),
            Namespace(b"weights", self.layout, tenant=""),
            Namespace(b"weights", self.layout, salt=""),
            Namespace(b"weights", self.layout, tenant="x", salt="y"),
            Namespace(b"weights", self.layout, tenant="xy"),
        ]
        with self.make_store(64) as store:
            self.put(store, range(16))
            for other in others:
                assert store.lookup(other, range(17)) == 0
                assert self.put(store, range(16), other) == 4
            for namespace in [self.namespace, *others]:
                with store.acquire(namespace, range(17)) as lease:
                    assert lease.num_blocks == 4
                    self.check(lease, range(17))

    @pytest.mark.parametrize("tokens", [[1.5], [True], [-1], [2**31], [[1]], "ab", None, 7, {1: 2}])
    def test_bad_tokens_are_refused(self, tokens: object) -> None:
        """With an error, and without a trace."""
        with self.make_store(4) as store:
            for call in (store.lookup, store.acquire, store.reserve):
                with pytest.raises(UsageError):
                    call(self.namespace, tokens)
            stats = store.stats()
            assert (stats.num_leases, stats.num_reservations, stats.num_blocks) == (0, 0, 0)

    def test_prompts_shorter_than_a_block(self) -> None:
        """Nothing to hold, and everything still ends properly."""
        with self.make_store(4) as store:
            for length in range(4):
                assert self.put(store, range(length)) == 0
                with store.acquire(self.namespace, range(length)) as lease:
                    assert lease.hit_tokens == 0
            stats = store.stats()
            assert (stats.num_leases, stats.num_reservations, stats.num_blocks) == (0, 0, 0)

    def test_an_empty_lease_is_released_as_often_as_one_likes(self) -> None:
        """It holds nothing: that is no second release."""
        with self.make_store(4) as store:
            before = store.stats().counts.get(("refused_releases",), 0)
            lease = store.acquire(self.namespace, range(9))
            assert (lease.num_blocks, lease.hit_tokens, lease.failure) == (0, 0, None)
            for _ in range(3):
                store.release(lease)
            assert store.verify(lease) == 0
            reservation = store.reserve(self.namespace, range(3))
            for _ in range(2):
                assert store.commit(reservation) == 0
                store.abort(reservation)
            assert store.stats().counts.get(("refused_releases",), 0) == before

    def test_bytes_that_were_overwritten_are_found(self) -> None:
        """Once the checksums are there, ``verify`` says how many leading blocks are good."""
        with self.make_store(16) as store:
            self.put(store, range(16))
            store.drain()
            lease = store.acquire(self.namespace, range(17))
            assert store.verify(lease) == 4
            if not all(isinstance(slot, np.ndarray) for slot in lease.slots()):
                pytest.skip("device memory is not verified")
            self.slots(lease)[2][5] ^= 1
            assert store.verify(lease) == 2
            store.release(lease)
            assert store.lookup(self.namespace, range(17)) == 8
            assert store.verify(lease) == 0, "a released lease vouches for nothing"
            self.expect(store, range(17), ("hit", 8), ("corrupt", 8), ("incomplete_block", 1))

    def test_prefetch_answers_as_lookup_and_stores_nothing(self) -> None:
        """It may move blocks between tiers, and the bytes stay right."""
        with self.make_store(16) as store:
            assert store.prefetch(self.namespace, range(17)) == 0
            self.put(store, range(16))
            stored = store.stats().counts["stored_blocks",]
            for length in (0, 3, 4, 5, 16, 17, 30):
                expected = store.lookup(self.namespace, range(length))
                assert store.prefetch(self.namespace, range(length)) == expected
            store.drain()
            with store.acquire(self.namespace, range(17)) as lease:
                assert lease.num_blocks == 4
                self.check(lease, range(16))
            store.drain()
            stats = store.stats()
            assert (stats.held_blocks, stats.num_blocks) == (0, 4)
            assert stats.counts["stored_blocks",] == stored
            with pytest.raises(UsageError):
                store.prefetch(self.namespace, [0.5])

    def expect(self, store: KVStore, tokens: Sequence[int], *fates: tuple[str, int]) -> Explanation:
        """Assert that ``tokens`` meet these fates in order: the cause, and for how many tokens.

        And what holds for every answer: segments follow one another from token 0 to the end, what hits
        is what ``lookup`` says and lies in a tier, and the rest in none.
        """
        told = store.explain(self.namespace, tokens)
        stops = [segment.stop for segment in told.segments]
        assert [segment.start for segment in told.segments] == [0, *stops][: len(stops)]
        assert told.prompt_tokens == len(tokens) == ([0, *stops][-1])
        assert told.hit_tokens == store.lookup(self.namespace, tokens)
        found: list[tuple[str, int]] = []
        for segment in told.segments:
            assert (segment.cause == "hit") == (segment.tier in store.tier_names)
            assert segment.detail
            length = segment.stop - segment.start
            if found and found[-1][0] == segment.cause == "hit":  # in several tiers
                length += found.pop()[1]
            found.append((segment.cause, length))
        assert found == list(fates)
        return told

    def test_explains_what_was_never_stored(self) -> None:
        """Whole blocks were not stored; what is behind them could not be."""
        with self.make_store(16) as store:
            self.expect(store, [])
            self.expect(store, range(3), ("incomplete_block", 3))
            self.expect(store, range(4), ("last_token", 4))
            self.expect(store, range(10), ("not_stored", 8), ("incomplete_block", 2))
            self.expect(store, range(12), ("not_stored", 8), ("last_token", 4))
            self.put(store, range(8))
            self.expect(store, range(3), ("incomplete_block", 3))
            self.expect(store, range(8), ("hit", 4), ("last_token", 4))
            self.expect(store, range(9), ("hit", 8), ("incomplete_block", 1))
            self.expect(store, range(16), ("hit", 8), ("not_stored", 4), ("last_token", 4))
            with pytest.raises(UsageError):
                store.explain(self.namespace, [0.5])

    def test_explains_what_is_being_stored(self) -> None:
        """And that its writer gave up."""
        with self.make_store(16) as store:
            self.put(store, range(4))
            reservation = store.reserve(self.namespace, range(12))
            asked = range(17)
            self.expect(
                *(store, asked, ("hit", 4), ("being_stored", 8), ("not_stored", 4)),
                ("incomplete_block", 1),
            )
            store.abort(reservation)
            self.expect(store, asked, ("hit", 4), ("aborted", 12), ("incomplete_block", 1))
            self.put(store, range(16))
            self.expect(store, asked, ("hit", 16), ("incomplete_block", 1))

    def test_explains_what_was_lost(self) -> None:
        """To make room, or because somebody asked for it."""
        with self.make_store(8) as store:
            first = range(100, 117)
            self.put(store, range(17))
            self.put(store, first)
            assert store.evict(self.namespace, first) == 4
            self.expect(store, first, ("evicted", 16), ("incomplete_block", 1))
            self.expect(store, range(17), ("hit", 16), ("incomplete_block", 1))
            for start in range(1000, 3000, 100):
                self.put(store, range(start, start + 16))
            told = self.expect(store, range(17), ("evicted", 16), ("incomplete_block", 1))
            assert "room" in told.segments[0].detail
            self.expect(store, range(7000, 7005), ("not_stored", 4), ("incomplete_block", 1))
            store.clear()
            self.expect(store, range(2900, 2917), ("cleared", 16), ("incomplete_block", 1))

    def test_explains_that_another_namespace_has_it(self) -> None:
        """Named by the beginning of its digest."""
        other = Namespace(b"weights", self.layout, salt="pepper")
        with self.make_store(16) as store:
            self.put(store, range(16), other)
            self.put(store, range(4))
            told = self.expect(
                *(store, range(17), ("hit", 4), ("other_namespace", 12)), ("incomplete_block", 1)
            )
            assert other.digest.hex()[:8] in told.segments[-2].detail

    def test_evict_forgets_a_prefix_and_what_follows(self) -> None:
        """And nothing else. Who reads it reads on."""
        with self.make_store(16) as store:
            self.put(store, range(16))
            self.put(store, [*range(8), *range(50, 58)])
            self.put(store, range(100, 108))
            lease = store.acquire(self.namespace, range(17))
            assert store.evict(self.namespace, range(8)) == 2
            assert store.evict(self.namespace, range(8)) == 0
            for gone in (range(17), [*range(8), *range(50, 59)]):
                assert store.lookup(self.namespace, gone) == 0
            assert store.lookup(self.namespace, range(100, 109)) == 8
            self.check(lease, range(16))
            store.release(lease)
            store.drain()
            assert store.stats().num_blocks == 2
            assert self.put(store, range(16)) == 4
            with pytest.raises(UsageError):
                store.evict(self.namespace, [0.5])

    def test_clear_forgets_everything(self) -> None:
        """And what is stored afterwards is there. Who reads it reads on."""
        other = Namespace(b"weights", self.layout, salt="pepper")
        with self.make_store(16) as store:
            for namespace in (self.namespace, other):
                self.put(store, range(16), namespace)
            lease = store.acquire(other, range(17))
            reservation = store.reserve(self.namespace, range(24))
            store.clear()
            assert store.lookup(self.namespace, range(17)) == store.lookup(other, range(17)) == 0
            self.check(lease, range(16))
            store.release(lease)
            assert store.commit(reservation) == 0, "it was cleared too"
            store.drain()
            stats = store.stats()
            assert (stats.num_blocks, stats.held_blocks, stats.num_namespaces) == (0, 0, 0)
            assert all(tier.used_bytes == 0 for tier in stats.tiers)
            assert self.put(store, range(16)) == 4

    def test_counts_grow(self) -> None:
        """They say what was done, and never shrink."""
        with self.make_store(8) as store:
            seen = store.stats().counts
            for start in (0, 100, 200):
                self.put(store, range(start, start + 16))
                with store.acquire(self.namespace, range(start, start + 19)):
                    pass
                store.evict(self.namespace, range(start, start + 16))
                counts = store.stats().counts
                assert all(counts[name] >= value for name, value in seen.items())
                for name, grown in (("lookups", 1), ("stored_blocks", 4)):
                    assert counts[name,] == seen.get((name,), 0) + grown
                missed = "lookup_tokens", "miss"
                assert counts[missed] == seen.get(missed, 0) + 3
                seen = counts

    @pytest.mark.parametrize("order", [*permutations(((0, 1), (1, 2), (2, 4)))])
    def test_ranks_write_their_heads_into_the_same_blocks(
        self, order: tuple[tuple[int, int], ...]
    ) -> None:
        """In any order; the blocks show when every head is there, and then are right."""
        with self.make_store(8) as store:
            tokens = range(17)
            held = {heads: store.reserve(self.ranks, tokens, heads=heads) for heads in order}
            first, *others = held.values()
            for other in others:
                assert other.indices.tolist() == [0, 1, 2, 3]
                assert other.offsets.tolist() == first.offsets.tolist(), "the same blocks"
            for heads in reversed(order):
                self.fill_part(held[heads], tokens, heads)
            assert [store.commit(reservation) for reservation in held.values()] == [0, 0, 4]
            with store.acquire(self.ranks, tokens) as lease:
                assert lease.num_blocks == 4
                self.check(lease, tokens)
            store.drain()
            stats = store.stats()
            assert (stats.num_blocks, stats.held_blocks) == (4, 0)
            assert stats.counts["stored_blocks",] == 4
            assert not store.reserve(self.ranks, tokens, heads=(0, 2)).num_blocks

    def test_nothing_of_a_part_shows(self) -> None:
        """While others are missing, and while it is said to be stored."""
        with self.make_store(8) as store:
            tokens = range(17)
            assert self.put_part(store, tokens, (0, 2)) == 0
            assert store.lookup(self.ranks, tokens) == 0
            told = store.explain(self.ranks, tokens)
            assert [segment.cause for segment in told.segments] == [
                *("being_stored", "incomplete_block")
            ]
            assert not store.reserve(self.ranks, tokens, heads=(0, 2)).num_blocks, "it is there"
            assert self.put_part(store, range(24), (2, 4)) == 4, "and two of which nothing is there"
            assert store.lookup(self.ranks, range(25)) == 16
            assert self.put_part(store, range(24), (0, 2)) == 2
            with store.acquire(self.ranks, range(25)) as lease:
                assert lease.num_blocks == 6
                self.check(lease, range(24))

    def test_no_head_is_handed_to_two_writers(self) -> None:
        """Neither to another engine's rank, nor to a rank of other size, nor to who writes all."""
        with self.make_store(8) as store:
            tokens = range(16)
            first = store.reserve(self.ranks, tokens, heads=(1, 3))
            for heads in ((1, 3), (0, 2), (2, 4), (0, 4), None):
                assert not store.reserve(self.ranks, tokens, heads=heads).num_blocks, heads
            ends = [store.reserve(self.ranks, tokens, heads=heads) for heads in ((0, 1), (3, 4))]
            assert [end.num_blocks for end in ends] == [4, 4]
            for reservation in (first, *ends):
                store.abort(reservation)
            whole = store.reserve(self.ranks, tokens, heads=(0, 4))
            assert not store.reserve(self.ranks, tokens, heads=(0, 2)).num_blocks
            self.fill(whole, tokens)
            assert store.commit(whole) == 4
            assert store.lookup(self.ranks, range(17)) == 16

    def test_who_gives_up_a_part_leaves_the_others_theirs(self) -> None:
        """The blocks wait, invisible, for the next one with these heads."""
        with self.make_store(4) as store:
            tokens = range(17)
            first = store.reserve(self.ranks, tokens, heads=(0, 2))
            second = store.reserve(self.ranks, tokens, heads=(2, 4))
            self.fill_part(second, tokens, (2, 4))
            store.abort(first)
            assert store.commit(second) == 0
            assert store.lookup(self.ranks, tokens) == 0
            assert store.stats().held_blocks == 0
            again = store.reserve(self.ranks, tokens, heads=(0, 2))
            assert again.offsets.tolist() == second.offsets.tolist()
            self.fill_part(again, tokens, (0, 2))
            assert store.commit(again) == 4
            with store.acquire(self.ranks, tokens) as lease:
                assert lease.num_blocks == 4
                self.check(lease, tokens)

    def test_when_all_give_up_the_slots_come_back(self) -> None:
        """Whoever ends last."""
        with self.make_store(4) as store:
            for _ in range(3):
                held = [
                    store.reserve(self.ranks, range(16), heads=(rank, rank + 1)) for rank in (0, 3)
                ]
                for reservation in held:
                    assert store.stats().num_blocks == reservation.num_blocks == 4
                    store.abort(reservation)
                assert store.stats().num_blocks == 0
                told = store.explain(self.ranks, range(17))
                assert told.segments[0].cause == "aborted"

    def test_a_writer_of_whole_blocks_completes_what_is_left(self) -> None:
        """In the middle of what is known, together with what follows."""
        with self.make_store(8) as store:
            self.put(store, range(4), self.ranks)
            self.put_part(store, range(12), (0, 2))
            self.put_part(store, range(8), (2, 3))
            whole = store.reserve(self.ranks, range(20))
            assert whole.indices.tolist() == [1, 2, 3, 4]
            self.fill(whole, range(20))
            assert store.commit(whole) == 4
            with store.acquire(self.ranks, range(21)) as lease:
                assert lease.num_blocks == 5
                self.check(lease, range(20))
            store.drain()
            assert store.stats().held_blocks == 0

    def test_a_rewrite_that_is_half_done_counts_for_nothing(self) -> None:
        """Heads that were there are missing when a writer that has them too gives up."""
        with self.make_store(4) as store:
            tokens = range(17)
            self.put_part(store, tokens, (0, 2))
            overlapping = store.reserve(self.ranks, tokens, heads=(1, 4))
            assert overlapping.num_blocks == 4
            store.abort(overlapping)
            assert self.put_part(store, tokens, (2, 4)) == 0
            assert self.put_part(store, tokens, (0, 1)) == 0, "it has it, and gets nothing"
            assert self.put_part(store, tokens, (0, 2)) == 4
            with store.acquire(self.ranks, tokens) as lease:
                self.check(lease, tokens)

    def test_parts_that_nobody_completes_make_room(self) -> None:
        """They are evicted as other blocks are; those that somebody writes are not."""
        with self.make_store(8) as store:
            self.put_part(store, range(16), (0, 2))
            held = store.reserve(self.ranks, range(100, 116), heads=(0, 2))
            for start in range(200, 600, 100):
                assert self.put(store, range(start, start + 16), self.ranks) == 4
                assert store.lookup(self.ranks, range(start, start + 17)) == 16
            again = store.reserve(self.ranks, range(16), heads=(2, 4))
            assert again.num_blocks == 4, "all anew, in the place of the last prompt"
            self.fill_part(held, range(100, 116), (0, 2))
            self.fill_part(again, range(16), (2, 4))
            assert (store.commit(held), store.commit(again)) == (0, 0)
            assert self.put_part(store, range(100, 116), (2, 4)) == 4
            assert self.put_part(store, range(16), (0, 2)) == 4
            for start in (0, 100):
                with store.acquire(self.ranks, range(start, start + 17)) as lease:
                    assert lease.num_blocks == 4
                    self.check(lease, range(start, start + 16))

    @pytest.mark.parametrize("how", ["clear", "evict"])
    def test_what_is_forgotten_meanwhile_is_not_mixed_with_what_comes_later(self, how: str) -> None:
        """Old writers end without a trace, and keep their slots until then."""
        with self.make_store(8) as store:
            tokens = range(16)
            old = [store.reserve(self.ranks, tokens, heads=heads) for heads in ((0, 2), (2, 4))]
            if how == "clear":
                store.clear()
            else:
                assert store.evict(self.ranks, tokens) == 4
            new = store.reserve(self.ranks, tokens, heads=(0, 2))
            assert set(new.offsets.tolist()).isdisjoint(old[0].offsets.tolist())
            assert [store.commit(reservation) for reservation in old] == [0, 0]
            assert store.stats().num_blocks == 4
            self.fill_part(new, tokens, (0, 2))
            assert store.commit(new) == 0
            assert store.lookup(self.ranks, range(17)) == 0
            assert self.put_part(store, tokens, (2, 4)) == 4
            with store.acquire(self.ranks, range(17)) as lease:
                assert lease.num_blocks == 4
                self.check(lease, tokens)

    @pytest.mark.parametrize(
        "heads",
        [
            (0, 0),
            (2, 1),
            (-1, 2),
            (0, 5),
            (4, 5),
            (0, 1 << 70),
            (0,),
            (0, 1, 2),
            (0.0, 2.0),
            "ab",
            3,
        ],
    )
    def test_heads_that_the_layout_does_not_have_are_refused(self, heads: Any) -> None:  # noqa: ANN401
        """Before anything is done."""
        with self.make_store(4) as store:
            with pytest.raises(UsageError, match="heads"):
                store.reserve(self.ranks, range(16), heads=heads)
            many = Namespace(b"weights", KVLayout(1, 65, 1, "uint8", block_tokens=4))
            with pytest.raises(UsageError, match="at most 64"):
                store.reserve(many, range(16), heads=(0, 1))
            assert store.stats().num_blocks == 0
            whole = store.reserve(many, range(16), heads=(0, 65))
            assert store.commit(whole) == 4

    def test_threads_of_ranks(self) -> None:
        """Ranks of engines of several sizes write overlapping prompts under pressure, and some give up."""
        errors: list[BaseException] = []
        sizes = [((0, 2), (2, 4)), ((0, 1), (1, 2), (2, 3), (3, 4)), ((0, 4),)]

        def work(store: KVStore, seed: int) -> None:
            rng = np.random.default_rng(seed)
            try:
                for _ in range(60):
                    tokens = [7] * 8 + [int(rng.integers(0, 6))] * int(rng.integers(1, 24))
                    for heads in rng.permutation(sizes[seed % 3]).tolist():
                        reservation = store.reserve(self.ranks, tokens, heads=tuple(heads))
                        self.fill_part(reservation, tokens, heads)
                        (store.commit if rng.random() < 0.8 else store.abort)(reservation)
                    with store.acquire(self.ranks, tokens) as lease:
                        self.check(lease, tokens)
            except BaseException as error:  # noqa: BLE001  (told by the main thread)
                errors.append(error)

        with self.make_store(24) as store:
            threads = [threading.Thread(target=work, args=(store, seed)) for seed in range(6)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            assert not errors, errors[0]
            store.drain()
            stats = store.stats()
            assert stats.held_blocks == 0
            assert stats.counts["stored_blocks",] > 24

    def test_threads(self) -> None:
        """Readers and writers of overlapping prompts under pressure: own bytes or a miss."""
        errors: list[BaseException] = []

        def work(store: KVStore, seed: int) -> None:
            rng = np.random.default_rng(seed)
            try:
                for _ in range(150):
                    conversation = int(rng.integers(0, 12))
                    tokens = [7] * 8 + [conversation] * int(rng.integers(1, 30))
                    if rng.random() < 0.5:
                        self.put(store, tokens)
                    else:
                        with store.acquire(self.namespace, tokens) as lease:
                            self.check(lease, tokens)
            except BaseException as error:  # noqa: BLE001  (told by the main thread)
                errors.append(error)

        with self.make_store(24) as store:
            threads = [threading.Thread(target=work, args=(store, seed)) for seed in range(8)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            assert not errors, errors[0]
            store.drain()
            assert store.stats().held_blocks == 0


def _prefix(tokens: Sequence[int], num_blocks: int, namespace: Namespace) -> bytes:
    return np.array(list(tokens)[: num_blocks * namespace.layout.block_tokens], "<i4").tobytes()
