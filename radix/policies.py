"""Eviction policies beside LRU: SLRU, S3-FIFO, ARC, LFU with ageing, and cost-aware.

:mod:`radix.leaves` says what all of them do to fit a tree. None is told a capacity: the cache is what is known.
"""

from __future__ import annotations

from collections import OrderedDict
from math import exp2, log2
from typing import TYPE_CHECKING

from radix.entries import Entry, Ghosts
from radix.leaves import CORRELATED, LeafOrder

if TYPE_CHECKING:
    from collections.abc import Sequence

    from radix.tree import Node

NEW, KEPT = 0, 1
"""Queues of what was used once, and of what is kept for longer."""


class _TwoQueues(LeafOrder):
    """Base of policies with a queue for new nodes and one for those that proved useful."""

    num_queues = 2

    def _admit(self, entry: Entry) -> None:
        self._place(entry, 0.0, NEW)

    def _reuse(self, entry: Entry) -> None:
        self._place(entry, 0.0, KEPT)

    def alike(self, upper: Node, lower: Node) -> bool:
        """Whether both are in the same queue."""
        above, below = self._entries.get(upper), self._entries.get(lower)
        return above is None or above.queue == (below.queue if below else NEW)


class SLRU(_TwoQueues):
    """Segmented LRU: what was used once goes before what was used again.

    After R. Karedla, J. S. Love, B. G. Wherry, "Caching Strategies to Improve Disk System Performance", 1994.
    A node enters the probationary segment; a reuse takes it to the protected one, which has at most
    ``protected`` of all blocks: beyond that its least recent nodes become the newest probationary ones. A
    scan so passes through the probationary segment only.

    In a tree: a parent is in its child's segment and more recent there, or in the protected one alone, so the
    oldest node of the probationary segment is a leaf, as in LRU. A run larger than the protected segment
    falls through it. Half of the blocks suit conversations: what nobody continues is protected, too, as it
    was used at every turn, and new turns need room until the next one.
    """

    def __init__(self, protected: float = 0.5, *, correlated: int = CORRELATED) -> None:
        """Start with no node."""
        super().__init__(correlated=correlated)
        self._share = protected
        self._protected: OrderedDict[Entry, None] = OrderedDict()

    def _place(self, entry: Entry, key: float, queue: int) -> None:
        self._protected.pop(entry, None)
        if queue == KEPT:
            self._protected[entry] = None
        super()._place(entry, key, queue)

    def _drop(self, entry: Entry) -> None:
        self._protected.pop(entry, None)
        super()._drop(entry)

    def _settle(self) -> None:
        while self.sizes[KEPT] > self._share * sum(self.sizes):
            self._place(next(iter(self._protected)), 0.0, NEW)


class S3FIFO(_TwoQueues):
    """Three FIFO queues: a small one for new nodes, a main one for those used meanwhile, and ghosts.

    After J. Yang, Y. Zhang, Z. Qiu, Y. Yue, R. Vinayak, "FIFO Queues are All You Need for Cache Eviction",
    2023. A victim comes from the small queue while that has more than ``small`` of all blocks: if it was used
    ``promote_after`` times it moves to the main queue, else it leaves and is remembered; a node that comes
    back while it is remembered enters the main queue. A victim of the main queue that was used stays, at the
    newest end, with one use less (of at most three).

    In a tree: only leaves come up, so a node that has children moves to the main queue at the use
    that earns it; and what is moved takes its ancestors along, as they were used as often. Nodes are looked
    at as soon as they are next, not when room is needed, so that asking for a victim changes nothing.
    Ghosts: as many blocks and names as are known.
    """

    max_uses = 3

    def __init__(
        self, small: float = 0.1, promote_after: int = 2, *, correlated: int = CORRELATED
    ) -> None:
        """Start with no node."""
        super().__init__(correlated=correlated)
        self._share = small
        self._promote_after = promote_after
        self._ghosts = (Ghosts(),)

    def _admit(self, entry: Entry) -> None:
        super()._admit(entry)
        if self._ghosts[0].pop(entry.name):
            self._promote(entry)

    def _reuse(self, entry: Entry) -> None:
        entry.uses = min(entry.uses + 1, self.max_uses)
        if entry.queue == NEW and entry.children and entry.uses >= self._promote_after:
            self._promote(entry)

    def _refresh(self, entry: Entry) -> None:
        """Do nothing: FIFO."""

    def _preferred(self) -> Sequence[int]:
        small = self.sizes[NEW] > self._share * sum(self.sizes)
        return (NEW, KEPT) if small else (KEPT, NEW)

    def _evicted(self, entry: Entry) -> None:
        if entry.queue == NEW:
            self._ghosts[0].add(entry)

    def _promote(self, entry: Entry | None) -> None:
        while entry is not None and entry.queue == NEW and entry.serial > 0:
            entry.uses = 0
            self._place(entry, 0.0, KEPT)
            entry = entry.parent

    def _settle(self) -> None:
        self._ghosts[0].limit(sum(self.sizes), len(self._entries))
        while (entry := self._candidate()) is not None and entry not in self._postponed:
            if entry.queue == NEW and entry.uses >= self._promote_after:
                self._promote(entry)
            elif entry.queue == KEPT and entry.uses:
                entry.uses -= 1
                self._place(entry, 0.0, KEPT)
            else:
                return
            self._clean()

    def alike(self, upper: Node, lower: Node) -> bool:
        """Whether both are in the same queue and were used as often."""
        above, below = self._entries.get(upper), self._entries.get(lower)
        uses = below.uses if below else 0
        return super().alike(upper, lower) and (above is None or above.uses == uses)


class ARC(_TwoQueues):
    """Adaptive replacement: recency and frequency share the cache as their ghosts say.

    After N. Megiddo, D. S. Modha, "ARC: A Self-Tuning, Low Overhead Replacement Cache", 2003. What was used
    once and what was used again are two LRU queues. Each has ghosts of what it lost: a node that comes back
    from the ghosts of the first makes the first one's target larger, from those of the second smaller; either
    way it enters the second. The victim comes from the first queue while that is above its target.

    In a tree: the target moves by blocks, as many as the run had that came back; the victim is the least
    recent *leaf* of its queue, since below the least recent node of the second queue there may be nodes of
    the first. Ghosts: of the first queue, as many blocks as the second one has; all together no more
    than are known; and as many names each as there are known nodes.
    """

    def __init__(self, *, correlated: int = CORRELATED) -> None:
        """Start with no node."""
        super().__init__(correlated=correlated)
        self.target_blocks = 0.0
        """Blocks that the first queue should have."""
        self._ghosts = Ghosts(), Ghosts()

    def _admit(self, entry: Entry) -> None:
        once, again = (ghosts.num_blocks for ghosts in self._ghosts)
        queue = KEPT
        if size := self._ghosts[NEW].pop(entry.name):
            self.target_blocks += size * max(1.0, again / once)
        elif size := self._ghosts[KEPT].pop(entry.name):
            self.target_blocks -= size * max(1.0, once / again)
        else:
            queue = NEW
        self.target_blocks = min(max(self.target_blocks, 0.0), float(sum(self.sizes)))
        self._place(entry, 0.0, queue)

    def _preferred(self) -> Sequence[int]:
        return (NEW, KEPT) if self.sizes[NEW] > self.target_blocks else (KEPT, NEW)

    def _evicted(self, entry: Entry) -> None:
        self._ghosts[entry.queue].add(entry)

    def _settle(self) -> None:
        names = len(self._entries)
        self._ghosts[NEW].limit(self.sizes[KEPT], names)
        self._ghosts[KEPT].limit(sum(self.sizes) - self._ghosts[NEW].num_blocks, names)


class _Ranked(LeafOrder):
    """Base of policies with one queue, ranked by a key."""

    def _worth(self, entry: Entry) -> float:
        """How often the node was used, as the policy counts; 1 for a new one."""
        raise NotImplementedError

    def alike(self, upper: Node, lower: Node) -> bool:
        """Whether both are worth the same, within a factor of 1.4."""
        above, below = self._entries.get(upper), self._entries.get(lower)
        if above is None:
            return True
        ratio = self._worth(above) / (self._worth(below) if below else 1.0)
        return 1 / 1.4 < ratio < 1.4


class LFU(_Ranked):
    """Least frequently used, where a use counts half after so many further touches.

    After D. Lee et al., "LRFU: A Spectrum of Policies that Subsumes the Least Recently Used and Least
    Frequently Used Policies", 2001. A node is worth the sum of its uses, each halved every ``half_life``
    turnovers; a turnover is as many touches as there are known nodes, so that the policy is the same at every
    size. All nodes age alike, so the key, ``log2(worth) + age of the cache at the last use``, only changes
    with a use.

    In a tree: ancestors count the uses of all their branches, and are never worth less than a child was
    worth when it was new.
    """

    def __init__(self, half_life: float = 0.5, *, correlated: int = CORRELATED) -> None:
        """Start with no node."""
        super().__init__(correlated=correlated)
        self._half_life = half_life
        self._age = 0.0
        """In half-lives."""

    def touch(self, path: Sequence[Node]) -> None:
        """Note a use of ``path``, and let all nodes age."""
        self._age += 1 / (self._half_life * max(1, len(self._entries)))
        super().touch(path)

    def _worth(self, entry: Entry) -> float:
        return exp2(max(entry.key - self._age, -1000.0))

    def _admit(self, entry: Entry) -> None:
        self._place(entry, self._age, 0)

    def _reuse(self, entry: Entry) -> None:
        self._place(entry, self._age + log2(1.0 + self._worth(entry)), 0)


class CostAware(_Ranked):
    """What is cheap to compute again goes first: cost of a block times how often it was used.

    GreedyDual-Size-Frequency after L. Cherkasova, "Improving WWW Proxies Performance with
    Greedy-Dual-Size-Frequency Caching Policy", 1998, and P. Cao, S. Irani, "Cost-Aware WWW Proxy Caching
    Algorithms", 1997. The key is ``inflation + uses × cost / size``. ``inflation`` is the largest key that was
    evicted: what is not used any more is overtaken by what is new.

    In a tree: computing a block costs one unit plus what its attention to all blocks before it takes: twice as
    much ``doubling_blocks`` blocks into the prompt. Cost and size of a run are both in blocks, so its key is
    that of its middle block; every block of a namespace has as many bytes, and a shared order
    counts blocks of all namespaces alike. Uses stand for the probability of another one. Ancestors of a
    victim may have smaller keys, as they are cheaper; they could not go before it.
    """

    def __init__(self, doubling_blocks: float = 1536.0, *, correlated: int = CORRELATED) -> None:
        """Start with no node. By default attention costs as much as the rest at 24K tokens in blocks of 16."""
        super().__init__(correlated=correlated)
        self._doubling_blocks = doubling_blocks
        self._inflation = 0.0

    @property
    def name(self) -> str:
        """What settings call it."""
        return "cost"

    def _worth(self, entry: Entry) -> float:
        return float(entry.uses)

    def _admit(self, entry: Entry) -> None:
        entry.uses = 1
        self._refresh(entry)

    def _reuse(self, entry: Entry) -> None:
        entry.uses += 1
        self._refresh(entry)

    def _refresh(self, entry: Entry) -> None:
        middle = entry.start + entry.num_blocks / 2
        cost = 1.0 + middle / self._doubling_blocks
        self._place(entry, self._inflation + entry.uses * cost, 0)

    def _evicted(self, entry: Entry) -> None:
        self._inflation = max(self._inflation, entry.key)
