"""Why tokens hit or miss: causes, details and tiers, and the bounded memory of what was lost."""

from __future__ import annotations

import numpy as np
import pytest

from kvstore.diagnosis import LOSSES, MAX_OTHERS
from kvstore.explain import MAX_POSITIONS, Obituaries, Segment
from kvstore.namespace import KVLayout, Namespace
from kvstore.testing import FakeClock, small_pool
from kvstore.testing.contracts import ClientContract
from radix import RadixTree

LAYOUT = KVLayout(1, 1, 8, "float32", block_tokens=4)
NAMESPACE = Namespace(b"w", LAYOUT)


class Client(ClientContract):
    def make_store(self, num_blocks):
        return small_pool(num_blocks)


def put(pool, tokens, namespace=NAMESPACE):
    return Client().put(pool, tokens, namespace)


def fates(pool, tokens, namespace=NAMESPACE):
    told = pool.explain(namespace, tokens)
    return [(segment.cause, segment.stop - segment.start) for segment in told.segments]


def detail(pool, tokens, namespace=NAMESPACE):
    """Of the first segment that misses."""
    segments = pool.explain(namespace, tokens).segments
    return next(segment.detail for segment in segments if segment.cause != "hit")


# -- hits


def test_hits_are_divided_by_tier():
    pool = small_pool(4, 8)
    put(pool, range(16))
    pool.demote(NAMESPACE, range(8), "gpu")
    assert pool.explain(NAMESPACE, range(17)).segments == (
        Segment(0, 8, "dram", "hit", "in dram"),
        Segment(8, 16, "gpu", "hit", "in gpu"),
        Segment(16, 17, None, "incomplete_block", "only whole blocks of 4 tokens are stored"),
    )
    pool.close()


def test_hashes_of_an_engine_have_no_last_token():
    hashed = Namespace(b"w", LAYOUT, keys="hash")
    pool = small_pool(8)
    keys = bytes(range(96))
    pool.commit(pool.reserve(hashed, keys[:64]))
    told = pool.explain(hashed, keys)
    assert (told.prompt_tokens, told.hit_tokens) == (12, 8)
    assert fates(pool, keys, hashed) == [("hit", 8), ("not_stored", 4)]
    assert fates(pool, keys[:64], hashed) == [("hit", 8)]
    pool.close()


def test_explaining_counts_as_no_use():
    pool = small_pool(4)
    put(pool, range(8))
    put(pool, range(100, 108))
    before = pool.stats()
    pool.explain(NAMESPACE, range(9))
    pool.explain(Namespace(b"nobody", LAYOUT), range(9))
    assert pool.stats() == before
    put(pool, range(200, 204))
    assert pool.lookup(NAMESPACE, range(9)) == 4, "the older one made room, explained or not"
    pool.close()


# -- losses


@pytest.mark.parametrize("reason", LOSSES)
def test_a_loss_is_told_with_its_age_and_only_to_those_who_lost(reason):
    clock = FakeClock()
    pool = small_pool(8, clock=clock)
    put(pool, range(16))
    put(pool, range(100, 108))
    clock.advance(100)
    lose(pool, reason)
    clock.advance(42)
    cause, sentence = LOSSES[reason]
    lost = [(cause, 16)] if reason in ("evicted", "cleared") else [("hit", 8), (cause, 8)]
    assert fates(pool, range(17)) == [*lost, ("incomplete_block", 1)]
    assert detail(pool, range(17)) == sentence.format("42 s")
    if reason != "cleared":
        for stranger in (range(8, 17), range(1, 18)):
            assert fates(pool, stranger)[0][0] == "not_stored", stranger
    pool.close()


def lose(pool, reason):
    """Lose tokens 8 to 15 of ``range(16)``, or all of them, for ``reason``."""
    if reason == "capacity":
        pool.release(pool.acquire(NAMESPACE, range(9)))  # the head is used, the tail is the oldest
        put(pool, range(200, 216))
    elif reason == "cleared":
        pool.clear()
    elif reason == "aborted":
        pool.evict(NAMESPACE, range(16))
        put(pool, range(8))
        pool.abort(pool.reserve(NAMESPACE, range(16)))
    elif reason == "corrupt":
        lease = pool.acquire(NAMESPACE, range(17))
        list(lease.slots())[2][0] ^= 1
        assert pool.verify(lease) == 2
        pool.release(lease)
    else:
        pool.evict(NAMESPACE, range(16))


def test_what_was_stored_again_hits_and_what_was_lost_last_counts():
    clock = FakeClock()
    pool = small_pool(8, clock=clock)
    put(pool, range(16))
    pool.evict(NAMESPACE, range(16))
    clock.advance(5)
    put(pool, range(16))
    assert fates(pool, range(17)) == [("hit", 16), ("incomplete_block", 1)]
    pool.clear()
    assert fates(pool, range(17))[0] == ("cleared", 16)
    clock.advance(5)
    put(pool, range(16))
    pool.evict(NAMESPACE, range(4))
    assert fates(pool, range(17))[0] == ("evicted", 16)
    assert "0 s ago" in detail(pool, range(17))
    pool.close()


@pytest.mark.parametrize("head", [4, 8, 12])
def test_what_went_with_its_head_and_did_not_come_back_with_it(head):
    clock = FakeClock()
    pool = small_pool(8, clock=clock)
    put(pool, range(16))
    pool.evict(NAMESPACE, range(4))
    clock.advance(7)
    put(pool, range(head))
    assert fates(pool, range(17))[:2] == [("hit", head), ("evicted", 16 - head)]
    assert detail(pool, range(17)) == (
        LOSSES["evicted"][1].format("7 s") + f"; of that, only tokens 0-{head - 1} came back"
    )
    grown = range(24)
    put(pool, range(16))
    assert fates(pool, grown)[:2] == [("hit", 16), ("not_stored", 4)], "nothing was ever there"
    pool.close()


def test_a_loss_is_told_by_the_newest_one_however_shallow():
    clock = FakeClock()
    pool = small_pool(8, clock=clock)
    put(pool, range(8))
    pool.abort(pool.reserve(NAMESPACE, range(16)))
    clock.advance(5)
    assert fates(pool, range(17))[1] == ("aborted", 8)
    put(pool, range(16))
    pool.evict(NAMESPACE, range(4))
    clock.advance(5)
    put(pool, range(8))
    assert fates(pool, range(17))[1] == ("evicted", 8)
    pool.abort(pool.reserve(NAMESPACE, range(16)))
    assert fates(pool, range(17))[1] == ("aborted", 8)
    clock.advance(5)
    pool.clear()
    put(pool, range(4))
    assert fates(pool, range(17))[1] == ("cleared", 12)
    assert detail(pool, range(17)).endswith("; of that, only tokens 0-3 came back")
    pool.close()


def test_losing_comes_before_other_namespaces_and_clearing_after_them():
    clock = FakeClock()
    other = Namespace(b"w", LAYOUT, salt="pepper")
    pool = small_pool(16, clock=clock)
    put(pool, range(16))
    put(pool, range(100, 108))
    pool.clear()
    clock.advance(1)
    put(pool, range(16), other)
    assert fates(pool, range(17))[0] == ("other_namespace", 16), "cleared, of all prompts"
    assert fates(pool, range(100, 109))[0] == ("cleared", 8)
    put(pool, range(16))
    pool.evict(NAMESPACE, range(16))
    assert fates(pool, range(17))[0] == ("evicted", 16)
    assert fates(pool, range(17), Namespace(b"x", LAYOUT))[0] == ("other_namespace", 16)
    pool.close()


# -- other namespaces


def test_the_namespace_that_has_most_is_named_and_keys_of_another_length_are_not_compared():
    pool = small_pool(64)
    some, most = (Namespace(b"w", LAYOUT, salt=salt) for salt in ("some", "most"))
    long = Namespace(b"w", KVLayout(1, 1, 8, "float32", block_tokens=2))
    put(pool, range(8), some)
    put(pool, range(12), most)
    put(pool, range(16), long)
    assert fates(pool, range(17)) == [("other_namespace", 16), ("incomplete_block", 1)]
    assert most.digest.hex()[:8] in detail(pool, range(17))
    put(pool, range(12))
    assert fates(pool, range(17))[1] == ("not_stored", 4), "nobody has more"
    pool.close()


def test_so_many_namespaces_are_asked_and_no_more():
    pool = small_pool(MAX_OTHERS + 2)
    for number in range(MAX_OTHERS):
        put(pool, range(4), Namespace(b"w", LAYOUT, salt=str(number)))
    put(pool, range(100, 104), Namespace(b"w", LAYOUT, salt="one too many"))
    assert fates(pool, range(5))[0] == ("other_namespace", 4)
    assert fates(pool, range(100, 105))[0] == ("not_stored", 4)
    pool.close()


# -- obituaries


def tree_of(tokens, stride=4):
    tree = RadixTree(stride)
    key = np.array(list(tokens), "<i4").tobytes()
    tree.insert(key, np.arange(len(key) // stride, dtype=np.int32))
    (node,) = tree.walk()
    return tree, node, key


def test_obituaries_are_bounded_and_the_oldest_go():
    clock = FakeClock()
    obituaries = Obituaries(clock, max_entries=10)
    _, node, key = tree_of(range(100))
    for position in range(50):
        obituaries.add(b"d", node, position, "capacity")
        obituaries.add_cleared(position.to_bytes(2, "little"))
        clock.advance(1)
    assert len(obituaries) == 20
    found = [obituaries.find(b"d", key, 4, position) for position in range(50)]
    assert [entry is not None for entry in found] == [False] * 40 + [True] * 10
    assert found[-1] == ("capacity", 1, 49)
    assert [
        obituaries.find(position.to_bytes(2, "little"), key, 4, 99) is None
        for position in range(50)
    ] == [True] * 40 + [False] * 10


def test_what_is_lost_again_is_remembered_as_new():
    clock = FakeClock()
    obituaries = Obituaries(clock, max_entries=2)
    _, node, key = tree_of(range(10))
    for position, reason in ((1, "capacity"), (2, "capacity"), (1, "corrupt"), (3, "aborted")):
        obituaries.add(b"d", node, position, reason)
        clock.advance(1)
    found = [obituaries.find(b"d", key, 4, position) for position in (0, 1, 2, 3, 9, 10)]
    corrupt, aborted = ("corrupt", 2, 1), ("aborted", 1, 3)
    assert found == [None, corrupt, corrupt, aborted, aborted, None]


def test_an_obituary_is_found_by_namespace_position_and_the_last_blocks():
    obituaries = Obituaries(FakeClock())
    _, node, key = tree_of([7] * 2000)
    obituaries.add(b"d", node, 1500, "capacity")
    lost = "capacity", 0, 1500
    for position in (1500, 1501, 1999):
        assert obituaries.find(b"d", key, 4, position) == lost
    assert obituaries.find(b"e", key, 4, 1500) is None
    assert obituaries.find(b"d", key, 4, 1499) is None, "repetitions are told apart"
    far, near = bytearray(key), bytearray(key)
    far[0] ^= 1
    near[1499 * 4] ^= 1
    assert obituaries.find(b"d", bytes(far), 4, 1500) == lost, "only the last 2 KiB"
    assert obituaries.find(b"d", bytes(near), 4, 1500) is None


def test_a_loss_reaches_down_to_the_deepest_block_that_went_and_so_far_is_looked_back():
    tree, _, key = tree_of(range(2000))
    tree.insert(key[:400] + b"x" * 400, np.arange(3000, 3100, dtype=np.int32))
    obituaries = Obituaries(FakeClock())
    (root,) = tree.root.children.values()
    obituaries.add(b"d", root, 50, "capacity")
    branch = key[:400] + b"x" * 8000
    for position, found in ((50, True), (1000, True), (50 + MAX_POSITIONS, False)):
        assert (obituaries.find(b"d", key, 4, position) is not None) == found, position
        assert (obituaries.find(b"d", branch, 4, position) is not None) == found, position
    assert obituaries.find(b"d", key, 4, 49 + MAX_POSITIONS) == ("capacity", 0, 50)
    tree.trim(root, 0)
    tree.insert(key[:240], np.arange(60, dtype=np.int32))
    (root,) = tree.root.children.values()
    obituaries.add(b"d", root, 50, "evicted")
    assert obituaries.find(b"d", key, 4, 60) == ("evicted", 0, 50), "what else went is not back"
    obituaries.add(b"e", root, 50, "evicted")
    assert obituaries.find(b"e", key, 4, 59) == ("evicted", 0, 50)
    assert obituaries.find(b"e", key, 4, 60) is None


@pytest.mark.parametrize("cuts", [[3], [1, 2, 3], list(range(1, 40)), [600], [511, 512, 513]])
def test_it_does_not_matter_how_the_tree_is_cut_into_nodes(cuts):
    tree, _, key = tree_of(range(700))
    for cut in cuts:  # branches off after so many blocks
        branch = key[: cut * 4] + b"\xff" * 4
        tree.insert(branch, np.array([10_000 + cut], np.int32))
    path = tree.match(key).nodes
    above = 0
    for node in path:
        for keep in {0, len(node.blocks) - 1}:
            obituaries = Obituaries(FakeClock())
            obituaries.add(b"d", node, keep, "capacity")
            lost = "capacity", 0, above + keep
            assert obituaries.find(b"d", key, 4, above + keep) == lost
            assert obituaries.find(b"d", key, 4, 699) == lost, "the last one went with it"
        above += len(node.blocks)
    assert above == 700


def test_a_block_longer_than_the_context_is_its_own_context():
    obituaries = Obituaries(FakeClock())
    _, node, key = tree_of(range(4096), stride=4096)
    obituaries.add(b"d", node, 2, "capacity")
    lost = "capacity", 0, 2
    assert obituaries.find(b"d", key, 4096, 2) == lost
    assert obituaries.find(b"d", b"x" + key[1:], 4096, 2) == lost
    assert obituaries.find(b"d", key[:-4097] + b"x" + key[-4096:], 4096, 3) is None
