"""Why the tokens of a prompt hit or miss: the answer that :meth:`kvstore.pool.Pool.explain` gives.

And :class:`Obituaries`, what the pool remembers of blocks that it no longer has, to be able to answer.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from xxhash import xxh3_64_intdigest

if TYPE_CHECKING:
    from collections.abc import Callable

    from radix import Node

T = TypeVar("T")

CONTEXT_BYTES = 2048
"""Keys by which an obituary tells prompts apart: 32 blocks of 16 tokens, and at least one block."""


@dataclass(frozen=True)
class Segment:
    """Tokens ``[start, stop)`` of a prompt that share one fate."""

    start: int
    stop: int
    tier: str | None
    """Tier that has them; None for a miss."""
    cause: str
    """``hit``, or why not: ``not_stored``, ``evicted``, ``corrupt``, ``aborted``, ``cleared``,
    ``being_stored``, ``other_namespace``, ``incomplete_block``, ``last_token``."""
    detail: str
    """One sentence for people: how long ago, for what, what to do."""


@dataclass(frozen=True)
class Explanation:
    """The fate of every token of a prompt; the segments follow one another from token 0."""

    prompt_tokens: int
    hit_tokens: int
    segments: tuple[Segment, ...]


class Obituaries:
    """Remembers why blocks left the index: one entry for each subtree that was cut off, the newest ones.

    An entry is named by a 64-bit xxh3 of the namespace, the position of the first lost block, and the
    keys of the last blocks up to it (``CONTEXT_BYTES``): enough to tell prompts apart for people, at a
    price that no eviction notices. Single-owner: the pool serialises access.
    """

    def __init__(self, clock: Callable[[], float], max_entries: int = 16384) -> None:
        """Start with no entry; the oldest of more than ``max_entries`` are forgotten."""
        self._clock = clock
        self._max_entries = max_entries
        self._entries: dict[int, tuple[str, float]] = {}
        self._cleared: dict[bytes, tuple[str, float]] = {}

    def __len__(self) -> int:
        """Entries kept, of subtrees and of namespaces."""
        return len(self._entries) + len(self._cleared)

    def add(self, digest: bytes, node: Node, keep: int, reason: str) -> None:
        """Note that ``node`` is about to lose its blocks from ``keep`` on, with all below them.

        Args:
            digest: of the namespace whose tree has the node.
            node: in the tree, as it is before the loss.
            keep: blocks of the node that stay.
            reason: as in the counter ``evicted_blocks``.
        """
        stride = node.tree.key_bytes
        stop, width = (keep + 1) * stride, _context_bytes(stride)
        context = node.key[max(0, stop - width) : stop]
        position, above = keep, node.parent
        while above is not None and above.parent is not None:
            if len(context) < width:
                context = above.key[len(context) - width :] + context
            position += len(above.blocks)
            above = above.parent
        self._put(self._entries, _name(digest, position, context), reason)

    def add_cleared(self, digest: bytes) -> None:
        """Note that everything in the namespace ``digest`` is lost."""
        self._put(self._cleared, digest, "cleared")

    def find(
        self, digest: bytes, key: bytes, stride: int, position: int
    ) -> tuple[str, float] | None:
        """Why block ``position`` of a prompt was lost, and how many seconds ago; None if unknown.

        Args:
            digest: of the namespace.
            key: key bytes of the prompt, at least ``position + 1`` blocks.
            stride: key bytes of one block.
            position: of the first block that is missing.
        """
        stop = (position + 1) * stride
        context = key[max(0, stop - _context_bytes(stride)) : stop]
        own = self._entries.get(_name(digest, position, context))
        cleared = self._cleared.get(digest)
        lost = max((entry for entry in (own, cleared) if entry), key=lambda e: e[1], default=None)
        return lost and (lost[0], self._clock() - lost[1])

    def _put(self, entries: dict[T, tuple[str, float]], name: T, reason: str) -> None:
        entries.pop(name, None)
        entries[name] = reason, self._clock()
        if len(entries) > self._max_entries:
            del entries[next(iter(entries))]


def _context_bytes(stride: int) -> int:
    return max(1, CONTEXT_BYTES // stride) * stride


def _name(digest: bytes, position: int, context: bytes) -> int:
    return xxh3_64_intdigest(digest + position.to_bytes(8, "little") + context)
