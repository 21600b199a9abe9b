"""Why tokens hit or miss: causes, details and tiers."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from kvstore import diagnosis
from kvstore.diagnosis import LOSSES, MAX_BRANCHES, MAX_OTHERS, WITHHELD
from kvstore.explain import Segment, Withheld
from kvstore.namespace import KVLayout, Namespace
from kvstore.testing import FakeClock, small_pool
from kvstore.testing.contracts import ClientContract
from kvstore.tokens import MediaSpan, block_keys
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


SENTENCES = {
    "capacity": "evicted from dram 42 s ago to make room for 2 blocks, as lru chose",
    "quota": "evicted from dram 42 s ago because its tenant had all that it may have, as lru chose",
    "evicted": "evicted from dram 42 s ago because somebody asked for it",
    "expired": "dropped from dram 42 s ago at the end of its time to live",
    "corrupt": "dropped from dram 42 s ago because the bytes did not match their checksum",
    "aborted": "its writer gave up 42 s ago",
    "cleared": "everything in this namespace was forgotten 42 s ago",
}


@pytest.mark.parametrize("reason", LOSSES)
def test_a_loss_is_told_with_its_age_and_only_to_those_who_lost(reason):
    clock = FakeClock()
    pool = small_pool(8, clock=clock)
    put(pool, range(16))
    put(pool, range(100, 108))
    clock.advance(100)
    lose(pool, reason)
    clock.advance(42)
    cause, _ = LOSSES[reason]
    lost = [(cause, 16)] if reason in ("evicted", "cleared") else [("hit", 8), (cause, 8)]
    assert fates(pool, range(17)) == [*lost, ("incomplete_block", 1)]
    assert detail(pool, range(17)) == SENTENCES[reason]
    if reason != "cleared":
        for stranger in (range(8, 17), range(1, 18)):
            assert fates(pool, stranger)[0][0] == "not_stored", stranger
    pool.close()


def last_two(pool):
    """Ids of the last two blocks of ``range(16)``."""
    return pool._residency.find(NAMESPACE, block_keys(NAMESPACE, range(16))).ids[2:]


def lose(pool, reason):
    """Lose tokens 8 to 15 of ``range(16)``, or all of them, for ``reason``."""
    if reason == "expired":
        pool.evict(NAMESPACE, range(16))
        put(pool, range(8))
        pool.commit(pool.reserve(NAMESPACE, range(16), ttl_s=1))
        pool._clock.advance(1)
        pool.reap()
    elif reason == "quota":
        pool.evict(NAMESPACE, range(16))
        put(pool, range(8))
        put(pool, range(16))
        pool._residency.detach(list(pool._residency.nodes()), last_two(pool), "quota")
    elif reason == "capacity":
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
    elif reason in ("quota", "expired"):
        match = pool._residency.find(NAMESPACE, block_keys(NAMESPACE, range(16))).match
        pool._residency.detach(match.nodes, match.block_ids()[2:], reason)
    else:
        pool.evict(NAMESPACE, range(16))


def test_a_loss_names_the_tier_where_the_block_was_last():
    pool = small_pool(4, 8)
    put(pool, range(16))
    pool.demote(NAMESPACE, range(8), "gpu")
    pool.drain()
    pool.evict(NAMESPACE, range(16))
    assert detail(pool, range(17)).startswith("evicted from dram 0 s ago")
    put(pool, range(4))
    pool.evict(NAMESPACE, range(4))
    assert detail(pool, range(5)).startswith("evicted from gpu 0 s ago"), "the fastest one"
    pool.close()


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({}, "evicted 0 s ago to make room for other blocks"),
        ({"tier": "disk", "wanted": 1}, "evicted from disk 0 s ago to make room for a block"),
        (
            {"tier": "gpu", "policy": "s3fifo", "wanted": 12},
            "evicted from gpu 0 s ago to make room for 12 blocks, as s3fifo chose",
        ),
    ],
)
def test_a_loss_says_as_much_as_is_known_of_it(given, sentence):
    pool = small_pool(4)
    tree = RadixTree(NAMESPACE.key_bytes)
    tree.insert(block_keys(NAMESPACE, range(16)), np.arange(4, dtype=np.int32))
    (node,) = tree.walk()
    pool._residency.obituaries.add(NAMESPACE.digest, node, 0, "capacity", **given)
    assert detail(pool, range(17)) == sentence
    pool.close()


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
        "evicted from dram 7 s ago because somebody asked for it"
        f"; of that, only tokens 0-{head - 1} came back"
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


def test_the_namespace_that_has_most_is_named():
    pool = small_pool(64)
    some, most = (Namespace(b"w", LAYOUT, salt=salt) for salt in ("some", "most"))
    put(pool, range(8), some)
    put(pool, range(12), most)
    assert fates(pool, range(17)) == [("other_namespace", 16), ("incomplete_block", 1)]
    told = f"namespace {most.digest.hex()[:8]} has 12 tokens of it, and differs in salt"
    assert detail(pool, range(17)) == told
    put(pool, range(12))
    assert fates(pool, range(17))[1] == ("not_stored", 4), "nobody has more"
    pool.close()


def like(**changed):
    """``NAMESPACE`` with another value of some fields, its layout's among them."""
    parts = {name: changed.pop(name) for name in list(changed) if name in vars(LAYOUT)}
    return replace(NAMESPACE, layout=replace(LAYOUT, **parts), **changed)


@pytest.mark.parametrize(
    ("changed", "differing"),
    [
        ({"model": b"v"}, "weights"),
        ({"adapter": b"a"}, "adapter (none here)"),
        ({"settings": b"s"}, "attention settings (none here)"),
        ({"dtype": "float16"}, "dtype (float32 here, float16 there)"),
        ({"block_tokens": 2}, "block_tokens (4 here, 2 there)"),
        ({"block_tokens": 8}, "block_tokens (4 here, 8 there)"),
        ({"num_layers": 3}, "num_layers (1 here, 3 there)"),
        ({"num_kv_heads": 3}, "num_kv_heads (1 here, 3 there)"),
        ({"head_dim": 3}, "head_dim (8 here, 3 there)"),
        ({"attention": "mla"}, "attention (mha here, mla there)"),
        ({"layer_start": 3}, "layer_start (0 here, 3 there)"),
        ({"head_start": 3}, "head_start (0 here, 3 there)"),
        ({"opaque": "sesame"}, "opaque"),
        ({"salt": "sesame"}, "salt"),
        (
            {"salt": "", "dtype": "float16", "model": b"v"},
            "weights, dtype (float32 here, float16 there), salt",
        ),
    ],
)
def test_the_fields_in_which_another_namespace_differs_are_named(changed, differing):
    pool = small_pool(64)
    other = like(**changed)
    put(pool, range(16), other)
    assert fates(pool, range(17)) == [("other_namespace", 16), ("incomplete_block", 1)]
    told = f"namespace {other.digest.hex()[:8]} has 16 tokens of it, and differs in {differing}"
    assert detail(pool, range(17)) == told
    if other.layout.block_tokens == 4:
        put(pool, range(200, 204))
        assert fates(pool, range(200, 205), other)[0] == ("other_namespace", 4)
        mirrored = detail(pool, range(200, 205), other)
        assert differing.replace("none here", "none there").split(" (")[0] in mirrored
        assert ("none there" in mirrored) == ("none here" in differing)
    assert "sesame" not in str(pool.explain(NAMESPACE, range(17)))
    pool.close()


def test_of_namespaces_with_as_much_the_one_most_alike_is_named():
    pool = small_pool(64)
    put(pool, range(16), like(model=b"v", salt="s"))
    put(pool, range(16), like(head_dim=3))
    put(pool, range(16), like(model=b"v", dtype="float16"))
    assert detail(pool, range(17)).endswith("differs in head_dim (8 here, 3 there)")
    pool.close()


def test_namespaces_that_differ_in_the_kind_of_keys_are_not_compared():
    pool = small_pool(64)
    tokens = block_keys(NAMESPACE, range(16))
    pool.commit(pool.reserve(like(keys="hash"), tokens))
    assert fates(pool, range(17))[0] == ("not_stored", 16)
    pool.close()


@pytest.mark.parametrize("here", [None, "", "we"])
def test_the_namespaces_of_other_tenants_count_as_not_existing(here):
    pool = small_pool(64)
    for there in {None, "", "we", "they"} - {here}:
        put(pool, range(16), like(tenant=there))
        put(pool, range(16), like(tenant=there, salt="s"))
    mine = like(tenant=here)
    assert fates(pool, range(17), mine) == [("not_stored", 16), ("incomplete_block", 1)]
    put(pool, range(8), mine)
    assert fates(pool, range(17), mine)[1] == ("not_stored", 8)
    put(pool, range(12), like(tenant=here, salt="s"))
    assert fates(pool, range(17), mine)[1] == ("other_namespace", 8)
    pool.close()


def test_the_trees_of_other_tenants_are_not_looked_at(monkeypatch):
    """So they can neither use up what may be asked, nor time."""
    pool = small_pool(2 * MAX_OTHERS)
    for number in range(MAX_OTHERS + 1):
        put(pool, range(4), like(tenant="they", salt=str(number)))
    put(pool, range(16), like(salt="s"))
    put(pool, range(4))
    matched, match = [], RadixTree.match
    monkeypatch.setattr(
        RadixTree, "match", lambda tree, key: matched.append(tree) or match(tree, key)
    )
    assert fates(pool, range(17))[1] == ("other_namespace", 12)
    assert len(matched) == 2, "its own, and that of the other salt"
    pool.close()


def test_so_many_namespaces_are_asked_and_no_more():
    pool = small_pool(MAX_OTHERS + 2)
    for number in range(MAX_OTHERS):
        put(pool, range(4), Namespace(b"w", LAYOUT, salt=str(number)))
    put(pool, range(100, 104), Namespace(b"w", LAYOUT, salt="one too many"))
    assert fates(pool, range(5))[0] == ("other_namespace", 4)
    assert fates(pool, range(100, 105))[0] == ("not_stored", 4)
    pool.close()


def test_so_many_blocks_are_compared_in_other_namespaces_and_no_more(monkeypatch):
    monkeypatch.setattr(diagnosis, "MAX_COMPARED_BLOCKS", 6)
    pool = small_pool(64)
    for number, length in enumerate((12, 12, 16)):
        put(pool, range(length), like(salt=str(number)))
    assert "has 12 tokens of it" in detail(pool, range(17))
    monkeypatch.setattr(diagnosis, "MAX_COMPARED_BLOCKS", 7)
    assert "has 16 tokens of it" in detail(pool, range(17))
    pool.close()


def test_a_tenant_without_trees_leaves_nothing_behind():
    pool = small_pool(8)
    for salt in "ab":
        put(pool, range(4), like(tenant="we", salt=salt))
    trees = pool._residency.trees
    assert len(trees.of_tenant("we")) == 2
    pool.evict(like(tenant="we", salt="a"), range(4))
    assert [tree.namespace.salt for tree in trees.of_tenant("we")] == ["b"]
    pool.clear()
    assert len(trees) == len(trees._tenants) == 0
    pool.close()


# -- other continuations


def other_prompt(length, parting):
    """``range(length)`` with other tokens from ``parting`` on."""
    return [*range(parting), *range(1000 + parting, 1000 + length)]


@pytest.mark.parametrize("parting", range(1, 16))
@pytest.mark.parametrize("others", ["none", "that part earlier"])
def test_the_token_where_prompts_part_is_named(parting, others):
    pool = small_pool(128)
    put(pool, other_prompt(32, parting))
    for earlier in range(parting if others != "none" else 0):
        put(pool, [*other_prompt(16, earlier)[:15], 5000 + earlier])
    hit = parting // 4 * 4
    expected = [("hit", hit)] * (hit > 0) + [("diverges", 16 - hit), ("incomplete_block", 1)]
    assert fates(pool, range(17)) == expected
    assert detail(pool, range(17)) == (
        f"what is stored begins with the same {parting} tokens, and goes on with others at token {parting}"
    )
    pool.close()


def test_a_prompt_of_which_not_one_token_is_known_diverges_from_nothing():
    pool = small_pool(64)
    put(pool, other_prompt(32, 0))
    assert fates(pool, range(17))[0] == ("not_stored", 16)
    pool.close()


def test_of_many_continuations_the_one_with_most_in_common_counts_and_so_many_are_compared():
    pool = small_pool(MAX_BRANCHES + 8)
    for number in range(MAX_BRANCHES - 1):
        put(pool, [*range(4), 1000 + number, 5, 6, 7])
    put(pool, [*range(6), 1000, 1001])
    put(pool, [*range(7), 1000])
    assert fates(pool, range(9)) == [("hit", 4), ("diverges", 4), ("incomplete_block", 1)]
    assert "the same 6 tokens" in detail(pool, range(9))
    pool.close()


def test_what_was_lost_or_is_elsewhere_comes_before_other_continuations_and_clearing_after_them():
    clock = FakeClock()
    pool = small_pool(64, clock=clock)
    put(pool, range(16))
    pool.clear()
    clock.advance(5)
    put(pool, other_prompt(16, 6))
    assert fates(pool, range(17))[1] == ("diverges", 12)
    assert detail(pool, range(17)).endswith(
        "at token 6; everything in this namespace was forgotten 5 s ago; of that, only tokens 0-3 came back"
    )
    put(pool, range(16), like(salt="s"))
    assert fates(pool, range(17))[1] == ("other_namespace", 12)
    pool.abort(pool.reserve(NAMESPACE, range(16)))
    assert fates(pool, range(17))[1] == ("aborted", 12)
    pool.close()


def test_of_hashes_it_is_only_known_in_which_block_prompts_part():
    hashed = like(keys="hash")
    pool = small_pool(8)
    keys = bytes(range(128))
    pool.commit(pool.reserve(hashed, keys[:64] + keys[:32]))
    assert fates(pool, keys, hashed) == [("hit", 8), ("diverges", 8)]
    assert detail(pool, keys, hashed) == (
        "what is stored begins with the same 8 tokens, and goes on with others within tokens 8-11"
    )
    assert fates(pool, bytes([0, *keys[:31]]), hashed) == [("not_stored", 4)], (
        "the first bytes are no token"
    )
    pool.close()


@pytest.mark.parametrize(
    ("ours", "theirs"), [(b"a" * 16, b"b" * 16), (b"a" * 16, None), (None, b"b" * 16)]
)
def test_of_media_it_is_only_known_in_which_block_prompts_part(ours, theirs):
    layout = replace(LAYOUT, block_tokens=8)
    namespace = Namespace(b"w", layout)
    pool = small_pool(16)
    spans = [[MediaSpan(10, 2, medium)] if medium else [] for medium in (ours, theirs)]
    keys = [block_keys(namespace, range(25), span) for span in spans]
    pool.commit(pool.reserve(namespace, keys[1]))
    assert fates(pool, keys[0], namespace)[:2] == [("hit", 8), ("diverges", 16)]
    assert detail(pool, keys[0], namespace).endswith("with others within tokens 8-15")
    pool.close()


# -- what a store knows and would not lend


def explained(pool, tokens, *withheld):
    """Causes, details and lengths when the store says that it would not lend ``withheld``."""
    seen = []

    def hook(found):
        seen.append(found)
        return withheld

    key = block_keys(NAMESPACE, tokens)
    told = diagnosis.explain(pool._residency, NAMESPACE, key, hook)
    (found,) = seen
    assert np.array_equal(found.ids, pool._residency.find(NAMESPACE, key).ids)
    assert told.hit_tokens == sum(
        segment.stop - segment.start for segment in told.segments if segment.tier
    )
    assert [segment.start for segment in told.segments[1:]] == [
        segment.stop for segment in told.segments[:-1]
    ]
    return [
        (segment.cause, segment.stop - segment.start, segment.detail)
        for segment in told.segments
        if segment.cause != "incomplete_block"
    ]


@pytest.mark.parametrize("cause", WITHHELD)
def test_what_is_withheld_is_no_hit_and_what_is_behind_it_neither(cause):
    pool = small_pool(16)
    put(pool, range(24))
    usual = WITHHELD[cause]
    assert explained(pool, range(25), Withheld(2, 6, cause)) == [
        ("hit", 8, "in dram"),
        (cause, 16, usual),
    ]
    assert explained(pool, range(25), Withheld(0, 6, cause)) == [(cause, 24, usual)]
    assert explained(pool, range(25), Withheld(2, 3, cause, "because")) == [
        ("hit", 8, "in dram"),
        (cause, 16, "because"),
    ]
    pool.close()


def test_what_is_withheld_comes_before_every_other_cause():
    pool = small_pool(16)
    put(pool, range(8))
    writing = pool.reserve(NAMESPACE, range(16))
    told = explained(
        pool,
        range(29),
        *(
            Withheld(1, 2, "off"),
            Withheld(2, 3, "not_worth_loading"),
            Withheld(4, 6, "off", "late"),
        ),
    )
    assert [fate[:2] for fate in told] == [
        *(("hit", 4), ("off", 4), ("not_worth_loading", 4), ("being_stored", 4), ("off", 8)),
        ("not_stored", 4),
    ]
    told = explained(pool, range(29), Withheld(3, 7, "not_worth_loading"))
    assert [fate[:2] for fate in told] == [
        *(("hit", 8), ("being_stored", 4), ("not_worth_loading", 16))
    ]
    pool.abort(writing)
    pool.close()


def test_a_short_prompt_is_told_so():
    pool = small_pool(4)
    told = "the prompt is shorter than a block: only whole blocks of 4 tokens are stored"
    assert detail(pool, range(3)) == told
    told = "only whole blocks of 4 tokens are stored"
    for length in (5, 7, 9):
        assert pool.explain(NAMESPACE, range(length)).segments[-1].detail == told
    pool.close()
