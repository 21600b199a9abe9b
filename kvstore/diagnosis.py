"""Finds out why the tokens of a prompt hit or miss: the work behind :meth:`kvstore.pool.Pool.explain`.

What follows the hit is explained by its first missing block, in this order: the store knows it and would not
lend it; it has expired; somebody is writing it; it was lost, by itself or with a block before it, and when;
another namespace has more of the prompt; the index goes on with other tokens; its namespace was cleared; it was
never stored. The last tokens, which no lease could cover even if they were stored, are a case of their own.

Nothing is told across tenants: the trees of other tenants are not looked at, so neither an answer nor the time
that it takes depends on them. Salts are secrets: of two it is said that they differ, and no more. All of it
runs under the pool's lock, with its work bounded by the prompt and by the ``MAX_…`` below.
"""

from __future__ import annotations

from dataclasses import fields
from itertools import islice, pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from kvstore.explain import Explanation, Segment
from kvstore.namespace import KVLayout
from kvstore.tokens import TOKEN_BYTES

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from numpy.typing import NDArray

    from kvstore.explain import Loss, Withheld
    from kvstore.namespace import Namespace
    from kvstore.residency import Found, Residency
    from radix import Match, Node

MAX_OTHERS = 256
"""Namespaces of the tenant that are asked whether they have more of a prompt."""

MAX_COMPARED_BLOCKS = 1 << 16
"""Blocks found in other namespaces, all together, after which no more of them are asked."""

MAX_BRANCHES = 256
"""Continuations that are compared with the prompt where it leaves what is known."""

WITHHELD = {
    "no_room": "memory does not hold so much of one prompt, or its tenant may not have so much",
    "not_worth_loading": "loading it would take longer than computing it",
    "off": "in a tier that is turned off",
}
"""Usual detail by the cause for which a store does not lend blocks that it knows of."""

BEING_STORED = "being_stored", "somebody is writing these blocks, or has written a part of them"
EXPIRED = "expired", "their time to live, or that of the block before them, is over"

LOSSES = {
    "capacity": ("evicted", "evicted{tier} {age} ago to make room for {wanted}{policy}"),
    "quota": (
        "evicted",
        "evicted{tier} {age} ago because its tenant had all that it may have{policy}",
    ),
    "evicted": ("evicted", "evicted{tier} {age} ago because somebody asked for it"),
    "expired": ("expired", "dropped{tier} {age} ago at the end of its time to live"),
    "corrupt": (
        "corrupt",
        "dropped{tier} {age} ago because the bytes did not match their checksum",
    ),
    "aborted": ("aborted", "its writer gave up {age} ago"),
    "cleared": ("cleared", "everything in this namespace was forgotten {age} ago"),
}
"""Cause and detail by the reason for which blocks left the index."""

DIGESTS = {"model": "weights", "adapter": "adapter", "settings": "attention settings"}
"""What people call the fields of a namespace that are digests."""


def nothing_withheld(_: Found) -> Iterable[Withheld]:
    """Say that the store lends whatever it has."""
    return ()


def explain(
    residency: Residency,
    namespace: Namespace,
    key: bytes,
    withheld: Callable[[Found], Iterable[Withheld]] = nothing_withheld,
) -> Explanation:
    """Return the fate of every token of ``key``. Changes nothing; needs the pool's lock.

    Args:
        residency: what the index and the tables know.
        namespace: of the prompt.
        key: key bytes of all its tokens.
        withheld: the seam for whoever plans and moves. Asked once, under the lock, which blocks of what was
            found the store would not lend now, though it knows of them, and why. Its answers are not empty,
            ascend, do not overlap, and end at ``Found.max_hits`` or before. They come before all other
            explanations: the hit ends at the first of them, and what is there behind it shares its fate.
    """
    found = residency.find(namespace, key)
    held = list(withheld(found))
    hits = min(len(found.usable), held[0].start) if held else len(found.usable)
    width = namespace.layout.block_tokens
    tiers, _ = residency.copies.where(found.usable[:hits])
    segments = []
    for start, stop in _runs(tiers):
        name = residency.tiers[tiers[start]].name
        segments.append(Segment(start * width, stop * width, name, "hit", f"in {name}"))
    for start, stop, fate in _misses(residency, found, key, hits, held):
        segments.append(Segment(start * width, stop * width, None, *fate))
    tail = found.max_hits * width
    if tail < found.prompt_tokens:
        fate = _of_tail(found.prompt_tokens, width)
        segments.append(Segment(tail, found.prompt_tokens, None, *fate))
    return Explanation(found.prompt_tokens, hits * width, tuple(segments))


def _misses(
    residency: Residency, found: Found, key: bytes, hits: int, held: list[Withheld]
) -> Iterator[tuple[int, int, tuple[str, str]]]:
    """Runs of blocks, from ``hits`` on, that could have been hit, each with its cause and detail."""
    fates: dict[tuple[str, str], int] = {}
    labels = np.empty(found.max_hits, np.int32)

    def label(start: int, stop: int, cause: str, detail: str) -> None:
        labels[start:stop] = fates.setdefault((cause, detail), len(fates))

    reached = min(found.match.num_blocks, found.max_hits)
    if held:
        label(hits, len(found.usable), held[0].cause, held[0].detail or WITHHELD[held[0].cause])
    if len(found.usable) < reached:
        hidden = found.match.block_ids()[len(found.usable) :][:1]
        expired = residency.lifetimes.expired(hidden).any()
        label(len(found.usable), reached, *(EXPIRED if expired else BEING_STORED))
    if reached < found.max_hits:
        label(reached, found.max_hits, *_of_missing(residency, found, key))
    for run in held:
        label(run.start, run.stop, run.cause, run.detail or WITHHELD[run.cause])
    told = [*fates]
    for start, stop in _runs(labels[hits:]):
        yield hits + start, hits + stop, told[labels[hits + start]]


def _of_tail(prompt_tokens: int, width: int) -> tuple[str, str]:
    """Cause and detail of the last tokens, which no lease covers."""
    if prompt_tokens % width == 0:
        return "last_token", "the last token must be computed to get logits"
    short = "the prompt is shorter than a block: " if prompt_tokens < width else ""
    return "incomplete_block", f"{short}only whole blocks of {width} tokens are stored"


def _of_missing(residency: Residency, found: Found, key: bytes) -> tuple[str, str]:
    """Cause and detail of the first block that is not in the index."""
    namespace, position = found.tree.namespace, found.match.num_blocks
    width = namespace.layout.block_tokens
    loss = residency.obituaries.find(namespace.digest, key, namespace.key_bytes, position)
    lost = None if loss is None else _of_lost(loss, position, width)
    if lost and lost[0] != "cleared":
        return lost
    if told := _elsewhere(residency, namespace, key, position):
        return "other_namespace", told
    if told := _divergence(found, key):
        return "diverges", f"{told}; {lost[1]}" if lost else told
    return lost or ("not_stored", "never stored, or lost so long ago that it is forgotten")


def _of_lost(loss: Loss, position: int, width: int) -> tuple[str, str]:
    """Cause and detail of ``loss`` for block ``position``; blocks have ``width`` tokens."""
    cause, detail = LOSSES[loss.reason]
    wanted = "a block" if loss.wanted == 1 else f"{loss.wanted or 'other'} blocks"
    detail = detail.format(
        age=f"{loss.age_s:.0f} s",
        tier=loss.tier and f" from {loss.tier}",
        wanted=wanted,
        policy=loss.policy and f", as {loss.policy} chose",
    )
    if loss.position < position:
        back = f"{loss.position * width}-{position * width - 1}"
        detail += f"; of that, only tokens {back} came back"
    return cause, detail


# -- other namespaces


def _elsewhere(residency: Residency, namespace: Namespace, key: bytes, position: int) -> str:
    """Say which namespace of the tenant has most of ``key``, if one has block ``position``; else empty."""
    others = list(_others(residency, namespace, key))
    most = max((size for size, _ in others), default=0)
    if most <= position * namespace.key_bytes:
        return ""
    differing = [(_differences(namespace, other), other) for size, other in others if size == most]
    differences, other = min(differing, key=lambda pair: len(pair[0]))
    tokens = most // other.key_bytes * other.layout.block_tokens
    return (
        f"namespace {other.digest.hex()[:8]} has {tokens} tokens of it, and differs in "
        + ", ".join(differences)
    )


def _others(
    residency: Residency, namespace: Namespace, key: bytes
) -> Iterator[tuple[int, Namespace]]:
    """How many leading bytes of ``key`` the other namespaces of its tenant know."""
    left = MAX_COMPARED_BLOCKS
    for tree in islice(residency.trees.of_tenant(namespace.tenant), MAX_OTHERS):
        other = tree.namespace
        if left > 0 and other.keys == namespace.keys and other.digest != namespace.digest:
            num_blocks = tree.match(key).num_blocks
            left -= num_blocks
            yield num_blocks * tree.key_bytes, other


def _differences(here: Namespace, there: Namespace) -> list[str]:
    """Names of the fields in which namespaces of one tenant differ; values where they are no secrets."""
    told = []
    for field, name in DIGESTS.items():
        ours, theirs = getattr(here, field), getattr(there, field)
        if ours != theirs:
            absent = " (none here)" if ours is None else " (none there)" if theirs is None else ""
            told.append(name + absent)
    for field in (field.name for field in fields(KVLayout)):
        ours, theirs = getattr(here.layout, field), getattr(there.layout, field)
        if ours != theirs:
            told.append(field if field == "opaque" else f"{field} ({ours} here, {theirs} there)")
    if here.codec != there.codec:
        told.append(f"codec ({here.codec or 'none'} here, {there.codec or 'none'} there)")
    if here.salt != there.salt:
        told.append("salt")
    return told


# -- other continuations


def _divergence(found: Found, key: bytes) -> str:
    """Say where the prompt parts from other prompts of its namespace; empty if it simply goes on.

    Token ids are compared. Of blocks whose keys are none (an engine's hashes, media) it is known only that
    they differ somewhere.
    """
    namespace, position = found.tree.namespace, found.match.num_blocks
    stride, width = namespace.key_bytes, namespace.layout.block_tokens
    branches = _continuations(found.match, found.tree.root, stride)
    if not branches:
        return ""
    ours = key[position * stride : (position + 1) * stride]
    words = np.frombuffer(b"".join([ours, *branches]), "<i4").reshape(-1, stride // TOKEN_BYTES)
    same = int((words[1:] != words[0]).argmax(axis=1).max())
    exact = namespace.keys == "tokens" and (same > 0 or bool((words[:, 0] >= 0).all()))
    token = position * width + (same if exact else 0)
    if not token:
        return ""
    where = f"at token {token}" if exact else f"within tokens {token}-{token + width - 1}"
    return f"what is stored begins with the same {token} tokens, and goes on with others {where}"


def _continuations(match: Match, root: Node, stride: int) -> list[bytes]:
    """Keys of blocks that follow what is matched, ``stride`` bytes each."""
    last = match.nodes[-1] if match.nodes else root
    if match.last_blocks < len(last.blocks):
        return [last.key[match.last_blocks * stride : (match.last_blocks + 1) * stride]]
    return list(islice(last.children, MAX_BRANCHES))


def _runs(labels: NDArray[Any]) -> Iterator[tuple[int, int]]:
    """Cut ``labels`` into runs ``[start, stop)`` of equal ones."""
    if len(labels):
        edges = np.flatnonzero(np.diff(labels)) + 1
        yield from pairwise([0, *edges.tolist(), len(labels)])
