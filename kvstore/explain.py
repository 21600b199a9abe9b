"""Why the tokens of a prompt hit or miss: the answer that :meth:`kvstore.pool.Pool.explain` gives.

And :class:`Obituaries`, what the pool remembers of blocks that it no longer has, to be able to answer.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from xxhash import xxh3_64_intdigest

if TYPE_CHECKING:
    from collections.abc import Callable

    from radix import Node

T = TypeVar("T")

CONTEXT_BYTES = 2048
"""Keys by which an obituary tells prompts apart: 32 blocks of 16 tokens, and at least one block."""

MAX_POSITIONS = 1024
"""Blocks up to a missing one, itself included, at which its loss may have begun."""


@dataclass(frozen=True)
class Segment:
    """Tokens ``[start, stop)`` of a prompt that share one fate."""

    start: int
    stop: int
    tier: str | None
    """Tier that has them; None for a miss."""
    cause: str
    """``hit``, or why not: ``not_stored``, ``diverges``, ``evicted``, ``expired``, ``corrupt``, ``aborted``,
    ``cleared``, ``being_stored``, ``not_worth_loading``, ``no_room``, ``off``,
    ``other_namespace``, ``incomplete_block``, ``last_token``."""
    detail: str
    """One sentence for people: how long ago, for what, what to do."""


@dataclass(frozen=True)
class Explanation:
    """The fate of every token of a prompt; the segments follow one another from token 0."""

    prompt_tokens: int
    hit_tokens: int
    segments: tuple[Segment, ...]


class Withheld(NamedTuple):
    """Blocks ``[start, stop)`` of a prompt that a store knows of and would not lend now."""

    start: int
    stop: int
    cause: str
    """``not_worth_loading``, ``no_room`` or ``off``."""
    detail: str = ""
    """As of a :class:`Segment`; empty: the usual one of the cause."""


class Loss(NamedTuple):
    """Why a block is not in the index any more."""

    reason: str
    """As in the counter ``evicted_blocks``."""
    age_s: float
    position: int
    """Of the first block that was lost with it, in the prompt; 0 when the namespace was cleared."""
    tier: str = ""
    """Fastest tier that had the first lost block; empty if not known."""
    policy: str = ""
    """Name of the policy of that tier; empty if not known."""
    wanted: int = 0
    """Blocks that somebody wanted room for; 0 if not known."""


class _Entry(NamedTuple):
    at_s: float
    stop: int
    """Position behind the last block that was lost."""
    loss: Loss
    """With age 0, and without a position: that depends on who asks."""


class Obituaries:
    """Remembers why blocks left the index: one entry for each subtree that was cut off, the newest ones.

    An entry is named by a 64-bit xxh3 of the namespace, the position of the first lost block, and the
    keys of the last blocks up to it (``CONTEXT_BYTES``): enough to tell prompts apart for people, at a
    price that no eviction notices. It stands for all blocks that went with that one, down to the
    deepest of them. Single-owner: the pool serialises access.
    """

    def __init__(self, clock: Callable[[], float], max_entries: int = 16384) -> None:
        """Start with no entry; the oldest of more than ``max_entries`` are forgotten."""
        self._clock = clock
        self._max_entries = max_entries
        self._entries: dict[int, _Entry] = {}
        self._cleared: dict[bytes, _Entry] = {}

    def __len__(self) -> int:
        """Entries kept, of subtrees and of namespaces."""
        return len(self._entries) + len(self._cleared)

    def add(
        self,
        digest: bytes,
        node: Node,
        keep: int,
        reason: str,
        *,
        tier: str = "",
        policy: str = "",
        wanted: int = 0,
    ) -> None:
        """Note that ``node`` is about to lose its blocks from ``keep`` on, with all below them.

        Args:
            digest: of the namespace whose tree has the node.
            node: in the tree, as it is before the loss.
            keep: blocks of the node that stay.
            reason: as in the counter ``evicted_blocks``.
            tier: fastest one that has the block at ``keep``.
            policy: name of the policy of that tier.
            wanted: blocks that somebody wants room for. A number and no name: it may be another tenant.
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
        stop = position - keep + len(node.blocks) + _blocks_below(node)
        name = _name(digest, position, context)
        if name in self._entries:  # not all that was lost before need have come back
            stop = max(stop, self._entries[name].stop)
        self._put(self._entries, name, stop, Loss(reason, 0.0, 0, tier, policy, wanted))

    def add_cleared(self, digest: bytes) -> None:
        """Note that everything in the namespace ``digest`` is lost."""
        self._put(self._cleared, digest, 0, Loss("cleared", 0.0, 0))

    def find(self, digest: bytes, key: bytes, stride: int, position: int) -> Loss | None:
        """Return the newest loss of block ``position`` of a prompt, or None if none is known.

        It may have gone with a block before it, of the last ``MAX_POSITIONS``, that is back by now.

        Args:
            digest: of the namespace.
            key: key bytes of the prompt, at least ``position + 1`` blocks.
            stride: key bytes of one block.
            position: of the first block that is missing.
        """
        width = _context_bytes(stride)
        newest, found = self._cleared.get(digest), 0
        for first in range(max(0, position + 1 - MAX_POSITIONS), position + 1):
            stop = (first + 1) * stride
            entry = self._entries.get(_name(digest, first, key[max(0, stop - width) : stop]))
            if entry and entry.stop > position and not (newest and newest.at_s > entry.at_s):
                newest, found = entry, first
        return newest and newest.loss._replace(age_s=self._clock() - newest.at_s, position=found)

    def _put(self, entries: dict[T, _Entry], name: T, stop: int, loss: Loss) -> None:
        entries.pop(name, None)
        entries[name] = _Entry(self._clock(), stop, loss)
        if len(entries) > self._max_entries:
            del entries[next(iter(entries))]


def _blocks_below(node: Node) -> int:
    """Blocks of the longest way down from the end of ``node``."""
    longest, ways = 0, [(node, 0)]
    while ways:
        above, length = ways.pop()
        longest = max(longest, length)
        ways.extend((below, length + len(below.blocks)) for below in above.children.values())
    return longest


def _context_bytes(stride: int) -> int:
    return max(1, CONTEXT_BYTES // stride) * stride


def _name(digest: bytes, position: int, context: bytes) -> int:
    return xxh3_64_intdigest(digest + position.to_bytes(8, "little") + context)
