"""Finds out why the tokens of a prompt hit or miss: the work behind :meth:`kvstore.pool.Pool.explain`.

What follows the hit is explained by its first missing block, in this order: somebody is writing it; it
was lost, by itself or with a block before it, and when; another namespace has more of the prompt; its
namespace was cleared; it was never stored. The last tokens, which no lease could cover even if they were
stored, are a case of their own.
"""

from __future__ import annotations

from itertools import islice, pairwise
from typing import TYPE_CHECKING

import numpy as np

from kvstore.explain import Explanation, Segment

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvstore.blocks import Ids
    from kvstore.explain import Loss
    from kvstore.namespace import Namespace
    from kvstore.residency import Residency

MAX_OTHERS = 256
"""Other namespaces that are asked whether they have more of a prompt."""

LOSSES = {
    "capacity": ("evicted", "evicted {} ago to make room for other blocks"),
    "evicted": ("evicted", "evicted {} ago because somebody asked for it"),
    "corrupt": ("corrupt", "dropped {} ago because the bytes did not match their checksum"),
    "aborted": ("aborted", "its writer gave up {} ago"),
    "cleared": ("cleared", "everything in this namespace was forgotten {} ago"),
}
"""Cause and detail by the reason for which blocks left the index."""


def explain(residency: Residency, namespace: Namespace, key: bytes) -> Explanation:
    """Return the fate of every token of ``key``. Changes nothing; needs the pool's lock."""
    found = residency.find(namespace, key)
    width = namespace.layout.block_tokens
    hits, reached = len(found.usable), min(found.match.num_blocks, found.max_hits)
    segments = list(_hits(residency, found.usable, width))
    if hits < reached:
        segments.append(
            _miss(
                hits * width,
                reached * width,
                "being_stored",
                "somebody is writing these blocks, or has written a part of them",
            )
        )
    if reached < found.max_hits:
        cause, detail = _why(residency, namespace, key, reached)
        segments.append(_miss(reached * width, found.max_hits * width, cause, detail))
    if found.max_hits * width < found.prompt_tokens:
        cause, detail = (
            ("incomplete_block", f"only whole blocks of {width} tokens are stored")
            if found.prompt_tokens % width
            else ("last_token", "the last token must be computed to get logits")
        )
        segments.append(_miss(found.max_hits * width, found.prompt_tokens, cause, detail))
    return Explanation(found.prompt_tokens, hits * width, tuple(segments))


def _hits(residency: Residency, ids: Ids, width: int) -> Iterator[Segment]:
    tiers, _ = residency.where(ids)
    edges = np.flatnonzero(np.diff(tiers, prepend=-1, append=-1)).tolist() if len(ids) else []
    for start, stop in pairwise(edges):
        name = residency.tiers[tiers[start]].name
        yield Segment(start * width, stop * width, name, "hit", f"in {name}")


def _miss(start: int, stop: int, cause: str, detail: str) -> Segment:
    return Segment(start, stop, None, cause, detail)


def _why(residency: Residency, namespace: Namespace, key: bytes, position: int) -> tuple[str, str]:
    """Cause and detail for block ``position``, which is not in the index."""
    loss = residency.obituaries.find(namespace.digest, key, namespace.key_bytes, position)
    width = namespace.layout.block_tokens
    if loss is not None and loss.reason != "cleared":
        return _told(loss, position, width)
    others = (
        (tree.match(key).num_blocks, tree.namespace.digest)
        for tree in residency.trees.values()
        if tree.key_bytes == namespace.key_bytes and tree.namespace.digest != namespace.digest
    )
    blocks, digest = max(islice(others, MAX_OTHERS), default=(0, b""))
    if blocks > position:
        return "other_namespace", (
            f"namespace {digest.hex()[:8]} has {blocks} blocks of it: another model, adapter, tenant or salt"
        )
    if loss is not None:
        return _told(loss, position, width)
    return "not_stored", "never stored, or lost so long ago that it is forgotten"


def _told(loss: Loss, position: int, width: int) -> tuple[str, str]:
    """Cause and detail of ``loss`` for block ``position``; blocks have ``width`` tokens."""
    cause, detail = LOSSES[loss.reason]
    detail = detail.format(f"{loss.age_s:.0f} s")
    if loss.position < position:
        back = f"{loss.position * width}-{position * width - 1}"
        detail += f"; of that, only tokens {back} came back"
    return cause, detail
