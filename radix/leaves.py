"""What eviction policies other than LRU share: ranks of nodes, of which only leaves are looked at.

The policies of the literature rank equal, independent items. A tree's nodes are neither:

* A node must go after its children, whatever their ranks. So every node has a rank, but the heaps hold
  those of leaves only (nodes without a known child); a node enters when its last child has left.
* A node is a run of blocks. Sizes and shares are counted in blocks, as they were when the node was last
  touched: a policy is not told when a node loses its tail, which only makes the next touch correct it.
  A head that is split off inherits the rank. Runs are merged where they rank alike, else a new
  turn of a conversation would make the reused head look new, or itself look reused.
* A use touches all ancestors, so trunks count the uses of all their branches. Storing is no use, or a long
  answer that is stored piece by piece would promote itself. A request may look up more than once: touches
  of a node within ``correlated`` touches of its last counted one only refresh it (the correlated references
  of T. Johnson and D. Shasha, "2Q", 1994).
* A victim in use is postponed: it keeps its rank and is left out for the next ``POSTPONED`` touches.
* Evicted nodes that a policy remembers (*ghosts*) are keyed by the depth of their first block, its key and the
  key of the block before it: the same wherever runs are cut. Two prefixes may share that, which only
  makes one look as if it had been there before. Ghosts are bounded, in blocks and in number, by what is known.

Touching costs O(1) a node of the path, and O(log n) for the one that is a leaf and for each that a policy
moves. Heap entries that no longer hold stay until they come up, or are more than half of a heap, which is
then rebuilt.
"""

from __future__ import annotations

import heapq
from abc import abstractmethod
from collections import Counter, OrderedDict
from hashlib import blake2b
from typing import TYPE_CHECKING

from radix.entries import Entry, Ghosts
from radix.order import EvictionOrder

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from radix.tree import Node

CORRELATED = 16
"""Touches within which a node counts as used once."""

POSTPONED = 64
"""Touches for which a victim that was in use is left out."""

SLACK = 64
"""Entries that a heap may have beyond twice the known nodes."""


class LeafOrder(EvictionOrder):
    """Base of policies: the leaf with the smallest key goes first, from the queue that the policy prefers.

    A policy says what key and queue a node has when it is new (:meth:`_admit`), used again
    (:meth:`_reuse`), or only touched (:meth:`_refresh`), with :meth:`_place`.

    Invariants (:meth:`check_invariants`, in this order):

    1. a known node's known parent is its parent in the tree, and counts its known children;
    2. ``sizes`` has the blocks of each queue; a node has no more blocks than were counted;
    3. every leaf is in the heap of its queue or postponed, and what is on top of a heap is a leaf;
    4. a heap is at most ``SLACK`` longer than twice the known nodes;
    5. ghosts of one kind have no more names than there are known nodes, and all together no more blocks.
    """

    num_queues = 1

    def __init__(self, *, correlated: int = CORRELATED) -> None:
        """Start with no node. ``correlated``: touches within which a node counts as used once."""
        self._correlated = correlated
        self._entries: dict[Node, Entry] = {}
        self._heaps: list[list[tuple[float, int, int, Entry]]] = [
            [] for _ in range(self.num_queues)
        ]
        self._postponed: OrderedDict[Entry, int] = OrderedDict()
        """Leaves by the touch that ends it, the earliest first."""
        self.sizes = [0] * self.num_queues
        """Blocks by queue."""
        self._ghosts: tuple[Ghosts, ...] = ()
        """What the policy remembers, by kind."""
        self._touches = 0
        self._serial = 0
        self._pushes = 0

    # -- what policies decide -------------------------------------------------------------------

    @abstractmethod
    def _admit(self, entry: Entry) -> None:
        """Place a node that was not known."""

    @abstractmethod
    def _reuse(self, entry: Entry) -> None:
        """Place a node that was used again."""

    def _refresh(self, entry: Entry) -> None:
        """Place a node whose use was counted a moment ago: by default it becomes the newest of its key."""
        self._place(entry, entry.key, entry.queue)

    def _preferred(self) -> Sequence[int]:
        """Queues in the order in which victims are taken from them."""
        return range(self.num_queues)

    def _evicted(self, entry: Entry) -> None:
        """Note that a victim left."""

    def _settle(self) -> None:
        """Restore what the policy wants to be true, after any change."""

    # -- what the order is told -----------------------------------------------------------------

    def touch(self, path: Sequence[Node]) -> None:
        """Note a use of ``path``; ancestors become newer than their descendants."""
        self._touches += 1
        self._note(path, window=self._correlated)

    def arrive(self, path: Sequence[Node]) -> None:
        """Do as :meth:`touch`, but count no use of what is known."""
        self._note(path, window=self._touches + 1)

    def _note(self, path: Sequence[Node], window: int) -> None:
        """Touch ``path``; a node counts as used when it was counted more than ``window`` touches ago."""
        self._end_postponements()
        parent, start = None, sum(len(above.blocks) for above in path[0].path()[:-1]) if path else 0
        for node in path:
            entry = self._entries.get(node)
            if entry is None:
                entry = self._entries[node] = Entry(node)
            self._link(entry, parent)
            self._measure(entry, start)
            start += entry.num_blocks
            parent = entry
        for node in reversed(path):
            entry = self._entries[node]
            waited = self._postponed.pop(entry, None) is not None
            if entry.counted < 0:
                entry.counted = self._touches
                self._admit(entry)
            elif self._touches - entry.counted > window:
                entry.counted = self._touches
                self._reuse(entry)
            else:
                self._refresh(entry)
            if waited:
                self._push(entry)
        self._tidy()

    def split(self, upper: Node, lower: Node) -> None:
        """Give ``upper`` the rank of ``lower``."""
        below = self._entries.get(lower)
        if below is None:
            return
        above = self._entries[upper] = Entry(upper)
        above.uses, above.counted = below.uses, below.counted
        self._link(above, below.parent)
        self._link(below, above)
        self._measure(above, below.start)
        self._measure(below, above.start + above.num_blocks)
        self._place(above, below.key, below.queue)
        self._tidy()

    def join(self, upper: Node, lower: Node) -> None:
        """Give the rank of ``upper`` to ``lower`` if that is not known; else it keeps its own."""
        above = self._entries.pop(upper, None)
        if above is None:
            return
        below = self._entries.get(lower)
        if below is None:
            above.node = lower
            self._entries[lower] = above
        else:
            self._link(below, above.parent)
            below.start, below.name = above.start, above.name
            self._drop(above)
        self._tidy()

    def remove(self, node: Node) -> None:
        """Forget ``node``; if it is the victim, it counts as evicted."""
        entry = self._entries.get(node)
        if entry is None:
            return
        evicted = entry is self._candidate()
        del self._entries[node]
        self._drop(entry)
        for child in node.children.values():  # known still where an order has a part of the tree
            if (below := self._entries.get(child)) is not None:
                self._link(below, None)
        if evicted:
            self._evicted(entry)
        self._tidy()

    def postpone(self, node: Node) -> None:
        """Leave ``node`` out for some touches, or until nothing else is left."""
        entry = self._entries.get(node)
        if entry is not None:
            self._postponed.pop(entry, None)
            self._postponed[entry] = self._touches + POSTPONED
            self._tidy()

    def victim(self) -> Node | None:
        """Return the first leaf of the queue that the policy prefers."""
        entry = self._candidate()
        return entry.node if entry else None

    def __len__(self) -> int:
        """Number of known nodes."""
        return len(self._entries)

    def __contains__(self, node: object) -> bool:
        """Whether ``node`` is known."""
        return node in self._entries

    def __iter__(self) -> Iterator[Node]:
        """Nodes in the order in which they would leave if the policy preferred the same queues throughout."""
        places = {queue: place for place, queue in enumerate(self._preferred())}
        heap = [
            (places[entry.queue], entry.key, entry.serial, entry)
            for entry in self._entries.values()
            if not entry.children and entry not in self._postponed
        ]
        heap += [(len(places), 0.0, age, entry) for age, entry in enumerate(self._postponed)]
        heapq.heapify(heap)
        gone: Counter[Entry] = Counter()
        while heap:
            entry = heapq.heappop(heap)[-1]
            yield entry.node
            if (parent := entry.parent) is not None:
                gone[parent] += 1
                if gone[parent] == parent.children:
                    item = (places[parent.queue], parent.key, parent.serial, parent)
                    heapq.heappush(heap, item)

    # -- for policies ---------------------------------------------------------------------------

    def _place(self, entry: Entry, key: float, queue: int) -> None:
        """Rank ``entry`` by ``key`` in ``queue``, behind those of the same key."""
        self.sizes[entry.queue] -= entry.num_blocks
        self.sizes[queue] += entry.num_blocks
        self._serial += 1
        entry.key, entry.queue, entry.serial = key, queue, self._serial
        self._push(entry)

    def _candidate(self) -> Entry | None:
        """Entry of the victim."""
        for queue in self._preferred():
            if self._heaps[queue]:
                return self._heaps[queue][0][-1]
        return next(iter(self._postponed), None)

    # -- bookkeeping ----------------------------------------------------------------------------

    def _link(self, entry: Entry, parent: Entry | None) -> None:
        if entry.parent is parent:
            return
        if parent is not None:
            parent.children += 1
        before, entry.parent = entry.parent, parent
        if before is not None:
            before.children -= 1
            self._push(before)

    def _measure(self, entry: Entry, start: int) -> None:
        """Take the size and place of ``entry`` from the tree."""
        node, num_blocks = entry.node, len(entry.node.blocks)
        self.sizes[entry.queue] += num_blocks - entry.num_blocks
        entry.num_blocks = num_blocks
        if entry.start == start:
            return
        entry.start = start
        if self._ghosts:
            width = node.tree.key_bytes
            before = node.parent.key[-width:] if node.parent else b""
            name = blake2b(start.to_bytes(8, "little"), digest_size=8)
            name.update(before)
            name.update(node.key[:width])
            entry.name = name.digest()

    def _drop(self, entry: Entry) -> None:
        """Take ``entry``, which is no longer among the entries, out of everything else."""
        entry.serial = -1
        self.sizes[entry.queue] -= entry.num_blocks
        self._postponed.pop(entry, None)
        self._link(entry, None)

    def _push(self, entry: Entry) -> None:
        """Put ``entry`` into the heap of its queue if it belongs there."""
        if entry.serial > 0 and not entry.children and entry not in self._postponed:
            self._pushes += 1
            item = (entry.key, entry.serial, self._pushes, entry)
            heapq.heappush(self._heaps[entry.queue], item)

    def _holds(self, item: tuple[float, int, int, Entry]) -> bool:
        entry = item[-1]
        return item[1] == entry.serial and not entry.children and entry not in self._postponed

    def _end_postponements(self) -> None:
        while self._postponed:
            entry, due = next(iter(self._postponed.items()))
            if due > self._touches:
                return
            del self._postponed[entry]
            self._push(entry)

    def _tidy(self) -> None:
        """Take what no longer holds from the tops of the heaps, and let the policy settle."""
        self._clean()
        self._settle()
        self._clean()

    def _clean(self) -> None:
        for queue, heap in enumerate(self._heaps):
            while heap and not self._holds(heap[0]):
                heapq.heappop(heap)
            if len(heap) > 2 * len(self._entries) + SLACK:
                unique = {item[-1]: item for item in heap if self._holds(item)}
                self._heaps[queue] = list(unique.values())
                heapq.heapify(self._heaps[queue])

    def check_invariants(self) -> None:
        """Raise AssertionError naming the first broken invariant."""
        children = Counter(entry.parent for entry in self._entries.values())
        sizes = [0] * self.num_queues
        for node, entry in self._entries.items():
            parent = node.parent and self._entries.get(node.parent)
            assert entry.node is node, "1: an entry is its node's"
            assert entry.parent is parent, "1: the parent is the tree's"
            assert entry.children == children[entry], "1: children are counted"
            sizes[entry.queue] += entry.num_blocks
            assert entry.num_blocks >= len(node.blocks), "2: a node only loses blocks untold"
            above = sum(len(step.blocks) for step in node.path()[:-1])
            assert entry.start == above, "2: blocks before a node are counted"
        assert sizes == self.sizes, f"2: {self.sizes} blocks by queue are {sizes}"
        for queue, heap in enumerate(self._heaps):
            leaves = {item[-1] for item in heap if self._holds(item)}
            assert leaves == {
                entry
                for entry in self._entries.values()
                if not entry.children and entry.queue == queue and entry not in self._postponed
            }, "3: leaves are in the heap of their queue"
            assert not heap or self._holds(heap[0]), "3: a leaf is on top"
            assert len(heap) <= 2 * len(self._entries) + SLACK, "4: heaps are bounded"
        remembered = sum(ghosts.num_blocks for ghosts in self._ghosts)
        assert remembered <= sum(sizes), "5: blocks of ghosts are bounded"
        assert all(len(ghosts) <= len(self._entries) for ghosts in self._ghosts), (
            "5: names are bounded"
        )
