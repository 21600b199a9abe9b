"""Which block is in which tier: making room, forgetting, and what was found again after a restart.

The pool's half that owns the bytes; how they move is in :mod:`kvstore.movement`. Blocks are placed in the
first memory tier that has room. A block whose last copy goes leaves the index, together with everything
below it in the tree: what is resident is always a usable prefix.

Every block that somebody reads or writes has references; eviction never touches those. All methods are
called with the pool's lock held.

A block that was written in part only (:mod:`kvstore.parts`) lies in one tier and is never moved: a writer
may bring the rest at any time. Where it is in the way it is dropped.
"""

from __future__ import annotations

import heapq
import logging
from collections import Counter
from operator import itemgetter
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from kvstore.blocks import FIRST_CHECKSUM, NO_CHECKSUM, NO_SLOT, BlockState, BlockTable
from kvstore.errors import TooLargeError, UsageError
from kvstore.events import BlockRemoved, EventLog
from kvstore.lifetimes import Lifetimes
from kvstore.movement import NO_REFILL, Movement, Refill
from kvstore.parts import Parts, mask_of
from kvstore.quotas import Quotas
from kvstore.retention import NORMAL_PRIORITY
from kvstore.tiers.arena import ALIGNMENT, Arena
from kvstore.tiers.moves import Move, Path, on_host
from kvstore.tiers.tier import NamespaceTree, Tier, TierOrders, Trees
from kvstore.tokens import TOKEN_BYTES
from radix import GroupedOrder, LeafOrder, PriorityOrder, check_invariants

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
    from threading import RLock

    from numpy.typing import NDArray

    from kvstore.blocks import Ids
    from kvstore.explain import Obituaries
    from kvstore.namespace import Namespace
    from kvstore.quotas import Quota
    from kvstore.tiers.disk import RecoveredNamespace
    from kvstore.tiers.mover import Lanes
    from radix import Match, Node

logger = logging.getLogger(__name__)

MAX_SIZE_CLASSES = 1024
"""Block sizes that may be stored at the same time."""

MAX_EXPIRED = 64
"""Nodes with expired blocks that one call lets go of; the next one goes on."""

MAX_SKIPS = 256
"""Nodes in use that one search for victims passes over: it ends early rather than hold the lock."""


class Found(NamedTuple):
    """What the index knows of a prompt; valid until it changes."""

    tree: NamespaceTree
    """Of the namespace; a new one, not yet in use, if it has no blocks."""
    match: Match
    ids: Ids
    """The leading matched blocks that are visible."""
    usable: Ids
    """Those that a lease may cover."""
    prompt_tokens: int
    max_hits: int
    """Blocks that could be hit: not the one with the last token, which must be computed to get logits;
    an engine that brings its own hashes may use all."""


class Residency(Movement):
    """Blocks, slots and trees of all tiers.

    Invariants (:meth:`check_invariants`, in this order; the pool adds those of leases):

    1. table, arenas and trees keep their own invariants;
    2. the blocks in the trees are exactly the RESERVED and READY rows;
    3. no two blocks share a slot, and an arena's used slots are those of blocks and moves;
    4. a tier's policy knows every node that has a block there, or one on its way there, and would evict it
       before its parent;
    5. blocks with a record of parts are RESERVED and not moving, and their record is one of
       :class:`kvstore.parts.Unfinished`; of a block that nobody writes something was committed; a RESERVED
       block without a reference has a record, and nobody writes it;
    6. those of :class:`kvstore.lifetimes.Lifetimes`;
    7. the bytes in use of the last memory tier are those of its groups of tenants.
    """

    def __init__(
        self,
        tiers: Sequence[Tier],
        lanes: Lanes,
        lock: RLock,
        clock: Callable[[], float],
        events: EventLog,
        obituaries: Obituaries,
        quotas: Mapping[str, Quota],
    ) -> None:
        """Start with what the disk has. ``lock`` is the pool's; movers take it to apply their results."""
        self.tiers = tuple(tiers)
        self._num_memory = sum(tier.disk is None for tier in self.tiers)
        assert all(tier.disk is None for tier in self.tiers[: self._num_memory])
        assert 0 < self._num_memory >= len(self.tiers) - 1, "memory first, and one disk at most"
        last = self.tiers[self._num_memory - 1]
        self.quotas = Quotas(quotas, last.arena.capacity_bytes)
        if self.quotas and not isinstance(last.policy, GroupedOrder):
            raise UsageError(f"quotas of tenants need a GroupedOrder as policy of tier {last.name}")
        self.table = BlockTable(len(self.tiers))
        self.trees = Trees()
        self.lifetimes = Lifetimes(self.table, clock)
        self.order = TierOrders([tier.policy for tier in self.tiers], self.lifetimes.deadlines)
        self.moves: set[Move] = set()
        self.parts = Parts()
        self.refills: set[Refill] = set()
        self._loads_in_a_row = []
        self.counts: Counter[tuple[str, ...]] = Counter()
        self.rules = self.tiers[-1].rules
        self._size_classes: list[tuple[int, tuple[int, ...], str]] = []
        self._lanes = lanes
        self._lock = lock
        self._clock = clock
        self._events = events
        self._on_host = on_host(self.tiers)
        self.obituaries = obituaries
        if self.tiers[-1].disk is not None:
            self._recover(self.tiers[-1].disk.recover())

    # -- blocks ---------------------------------------------------------------------------------

    def place(self, namespace: Namespace, count: int) -> Ids:
        """Make up to ``count`` RESERVED blocks with slots, in the fastest memory that has room."""
        if not count:
            return np.empty(0, np.int32)
        size_class = self._size_class(namespace)
        placed: list[Ids] = []
        missing = count
        for index in range(self._num_memory):
            offsets = self._take_slots(index, size_class, missing)
            ids = self.table.allocate(len(offsets), size_class)
            self.table.slots[index, ids] = offsets // ALIGNMENT
            placed.append(ids)
            missing -= len(ids)
            if not missing:
                break
        return np.concatenate(placed)

    def find(self, namespace: Namespace, key: bytes) -> Found:
        """Find the longest known prefix of ``key``. Changes nothing."""
        tree = self.trees.get(namespace.digest)
        if tree is None:
            tree = NamespaceTree(namespace, self.order)
        match = tree.match(key)
        ids = match.block_ids()
        visible = self._leading_ready(ids)
        block_tokens = namespace.layout.block_tokens
        if namespace.keys == "hash":
            max_hits = len(key) // namespace.key_bytes
            tokens = max_hits * block_tokens
        else:
            tokens = len(key) // TOKEN_BYTES
            max_hits = max(0, tokens - 1) // block_tokens
        return Found(tree, match, visible, visible[:max_hits], tokens, max_hits)

    def find_lasting(self, namespace: Namespace, key: bytes) -> Found:
        """Do as :meth:`find`, once what has expired of ``key`` left the index."""
        found = self.find(namespace, key)
        if len(found.ids) == found.match.num_blocks:
            return found
        known = found.match.block_ids()
        expired = known[self.lifetimes.expired(known)][:1]
        if not len(expired):
            return found
        self.detach(found.match.nodes, expired, "expired")
        return self.find(namespace, key)

    def _leading_ready(self, ids: Ids) -> Ids:
        hidden = self.table.states[ids] != BlockState.READY
        if self.lifetimes.deadlines:
            hidden |= self.lifetimes.expired(ids)
        return ids[: int(hidden.argmax())] if hidden.any() else ids

    def joinable(self, ids: Ids, heads: int) -> NDArray[np.intp]:
        """Positions of those of ``ids`` of which a writer may bring ``heads`` (a mask)."""
        if not self.parts:
            return np.empty(0, np.intp)
        hidden = np.flatnonzero(self.table.states[ids] == BlockState.RESERVED)
        return hidden[self.parts.joinable(ids[hidden], heads)]

    def away(self, known: Ids) -> NDArray[np.intp]:
        """Positions of those of ``known`` that only the disk has, and nobody loads."""
        if self.rules is None:
            return np.empty(0, np.intp)
        there = self._in_memory(known) | np.isin(known, self._under_way(self._num_memory - 1))
        return np.flatnonzero(~there & (self.table.states[known] == BlockState.READY))

    def begin_refill(self, known: Ids, positions: NDArray[np.intp]) -> Refill:
        """Take slots in the last memory tier for those of ``known``, all pinned, at ``positions``."""
        index = self._num_memory - 1
        if not len(positions):
            return NO_REFILL
        size_class = int(self.table.size_classes[known[positions[0]]])
        offsets = self._take_slots(index, size_class, len(positions))
        positions = positions[: len(offsets)]
        refill = Refill(known[positions], positions, index, offsets)
        if len(offsets):
            self.refills.add(refill)
        return refill

    def end_refill(self, refill: Refill, *, is_written: bool) -> None:
        """Put the blocks of ``refill`` into memory, if they were written and nobody else uses them; end it.

        What was written need not be bit for bit what the disk has, which stays there.
        """
        self.refills.discard(refill)
        ids, table, index = refill.ids, self.table, refill.tier
        if not len(ids):
            return
        wanted = is_written & (table.states[ids] == BlockState.READY) & (table.refs[ids] == 1)
        wanted &= ~self._in_memory(ids)
        slot_size = self._slot_size(index, int(table.size_classes[ids[0]]))
        self.tiers[index].arena.release(slot_size, refill.offsets[~wanted])
        self._count_use(index, int(table.size_classes[ids[0]]), -int((~wanted).sum()))
        ids = ids[wanted]
        table.slots[index, ids] = refill.offsets[wanted] // ALIGNMENT
        table.differs[ids] = True
        table.checksums[ids] = NO_CHECKSUM
        self.counts["refilled_blocks",] += len(ids)
        self._seal(ids)

    def pin(self, ids: Ids) -> None:
        """Add a reference to each of ``ids`` (distinct)."""
        self.table.refs[ids] += 1

    def unpin(self, ids: Ids) -> None:
        """Drop a reference from each of ``ids``; free those that are GONE and unused."""
        self.table.refs[ids] -= 1
        unused = ids[(self.table.refs[ids] == 0) & (self.table.states[ids] == BlockState.GONE)]
        if len(unused):
            self._free(unused)

    def where(self, ids: Ids) -> tuple[NDArray[np.int8], NDArray[np.int64]]:
        """Fastest tier (int8) and byte offset there (int64) of each block."""
        slots = self.table.slots[:, ids]
        tiers = (slots != NO_SLOT).argmax(axis=0)
        return tiers.astype(np.int8), slots[tiers, np.arange(len(ids))].astype(np.int64) * ALIGNMENT

    def _in_memory(self, ids: Ids) -> NDArray[np.bool_]:
        there: NDArray[np.bool_] = (self.table.slots[: self._num_memory, ids] != NO_SLOT).any(
            axis=0
        )
        return there

    def num_in_memory(self, ids: Ids) -> int:
        """How many of ``ids`` from the first one on have a copy in memory."""
        if self.rules is None:
            return len(ids)
        there = self._in_memory(ids)
        return len(ids) if there.all() else int(there.argmin())

    def held_bytes(self, index: int, ids: Ids) -> int:
        """Bytes of the slots that ``ids`` have in tier ``index``."""
        return self.bytes_of(index, ids[self.table.slots[index, ids] != NO_SLOT])

    def bytes_of(self, index: int, ids: Ids) -> int:
        """Bytes of one slot in tier ``index`` for each of ``ids``."""
        classes = np.bincount(self.table.size_classes[ids]).tolist()
        return sum(
            count * self._slot_size(index, number) for number, count in enumerate(classes) if count
        )

    def _recover(self, found: list[RecoveredNamespace]) -> None:
        """Take over what the disk has, oldest first.

        Only the disk's policy learns of it: whoever looks for victims in memory passes none of these blocks.
        """
        index = len(self.tiers) - 1
        prompts: list[Iterator[tuple[int, NamespaceTree, bytes, Ids]]] = []
        for blocks in found:
            size_class = self._size_class(blocks.namespace)
            ids = self.table.allocate(len(blocks), size_class)
            self.table.slots[index, ids] = blocks.offsets // ALIGNMENT
            self.table.checksums[ids] = blocks.checksums
            self.table.states[ids] = BlockState.READY
            self.table.refs[ids] = 0
            tree = NamespaceTree(blocks.namespace, self.tiers[index].policy)
            self.trees[blocks.namespace.digest] = tree
            prompts.append(_prompts(blocks, tree, ids))
        for _, tree, key, ids in heapq.merge(*prompts, key=itemgetter(0)):
            tree.insert(key, ids, level=NORMAL_PRIORITY)
        for tree in self.trees.values():
            tree.order = self.order

    def acquaint(self, found: Found, num_blocks: int) -> None:
        """Have the policies know the nodes of the first ``num_blocks`` blocks, some of which are going to move.

        In the tiers where those go that makes them recent; it is no use of them.
        """
        stops = np.cumsum([len(node.blocks) for node in found.match.nodes])
        nodes = found.match.nodes[: int(np.searchsorted(stops, num_blocks)) + 1]
        ids = found.usable[:num_blocks]
        for index, tier in enumerate(self.tiers):
            comes = (self.table.slots[index, ids] == NO_SLOT).any()
            if comes and (index + 1 < len(self.tiers) or any(n not in tier.policy for n in nodes)):
                tier.policy.arrive(nodes)

    def prefetch(self, found: Found, key: bytes) -> None:
        """:meth:`spread` the usable blocks, and load them; all policies learn of them."""
        if not len(found.usable):
            return
        path = Path(found.tree, key)
        self.pin(found.usable)
        self.acquaint(found, len(found.usable))
        self.spread(found.usable, path)
        self.load(found.usable, path)
        self.unpin(found.usable)

    # -- making room ----------------------------------------------------------------------------

    def _take_slots(self, index: int, size_class: int, count: int) -> NDArray[np.int64]:
        """Up to ``count`` slots of tier ``index``, evicting what the policy says."""
        arena, slot_size = self.tiers[index].arena, self._slot_size(index, size_class)
        count = min(count, arena.capacity_slots(slot_size))
        if self.quotas and index + 1 == self._num_memory:
            count = self._within_ceiling(index, size_class, count)
        offsets = arena.allocate(slot_size, count)
        while len(offsets) < count and self._evict(index, size_class, count - len(offsets)):
            offsets = np.concatenate([offsets, arena.allocate(slot_size, count - len(offsets))])
        self._count_use(index, size_class, len(offsets))
        return offsets

    def _within_ceiling(self, index: int, size_class: int, count: int) -> int:
        """Make room below the ceiling of a tenant with its own blocks; say for how many of ``count``."""
        slot_size, group = self._slot_size(index, size_class), self._size_classes[size_class][2]
        while (left := self.quotas.left_bytes(group)) is not None and left < count * slot_size:
            missing = -(-(count * slot_size - left) // slot_size)
            if not self._evict(index, size_class, missing, "quota"):
                return min(count, max(0, left) // slot_size)
        return count

    def _victim(self, index: int, group: str, reason: str) -> tuple[Node | None, int | None]:
        """Return which node of tier ``index`` gives way to ``group``, and how many bytes at most."""
        policy = self.tiers[index].policy
        if not self.quotas or index + 1 != self._num_memory:
            return policy.victim(), None
        assert isinstance(policy, GroupedOrder)
        if reason == "quota":
            return policy.victim_among([group]), None
        largest = max(self._slot_size(index, number) for number in range(len(self._size_classes)))
        node = policy.victim_among(self.quotas.givers(group, largest))
        if node is None:
            return None, None
        giver = self.quotas.group_of_tree(node.tree)  # type: ignore[arg-type]
        return node, None if giver == group else self.quotas.spare_bytes(giver)

    def _count_use(self, index: int, size_class: int, count: int) -> None:
        """Note that ``count`` slots of tier ``index`` were taken, or given back if that is negative."""
        if index + 1 == self._num_memory:
            group = self._size_classes[size_class][2]
            self.quotas.used_bytes[group] += count * self._slot_size(index, size_class)

    def _evict(self, index: int, size_class: int, count: int, reason: str = "capacity") -> bool:
        """Free about ``count`` slots of tier ``index``; say whether any slot came free.

        For ``reason`` ``quota`` only blocks of the tenant itself go.
        """
        policy, table = self.tiers[index].policy, self.table
        group, skipped = self._size_classes[size_class][2], 0
        while count > 0 and skipped < MAX_SKIPS:
            node, allowed_bytes = self._victim(index, group, reason)
            if node is None:
                return False
            ids = node.blocks
            here = table.slots[index, ids] != NO_SLOT
            unused = table.refs[ids] == 0
            free = np.flatnonzero(here & unused)
            if not len(free):
                if here.any() or not unused.all():
                    policy.postpone(node)
                    skipped += 1
                else:
                    policy.remove(node)
                continue
            slot_size = self._slot_size(index, int(table.size_classes[ids[0]]))
            if allowed_bytes is not None:
                free = free[-max(1, allowed_bytes // slot_size) :]
            if slot_size != self._slot_size(index, size_class) and reason == "capacity":
                if self.tiers[index].disk is not None:
                    return self._clear_slab(index, slot_size)
                shortage = self._free_slab(index, slot_size)
                return shortage is not None and (
                    shortage == 0 or self._give_up(index, node, free[-shortage:], reason, count)
                )
            if self._give_up(index, node, free[-count:], reason, count):
                return True
            count -= len(free)  # under way to the next tier, or refused by a busy mover
        return False

    def _give_up(
        self, index: int, node: Node, positions: NDArray[np.intp], reason: str, wanted: int
    ) -> bool:
        """Let go of unused blocks of ``node`` in tier ``index``, where ``wanted`` blocks need room.

        Returns:
            Whether any slot came free.
        """
        used = self.tiers[index].arena.used_bytes
        ids = node.blocks[positions]
        spare = (self.table.slots[:, ids] != NO_SLOT).sum(axis=0) > 1
        self.drop_copies(ids[spare], index)
        self.counts["evicted_blocks", self.tiers[index].name, "copy_elsewhere"] += int(spare.sum())
        if len(only := positions[~spare]):
            demotes = index + 1 < self._num_memory
            moved = self._demote(node, ids[~spare], index) if demotes else 0
            if moved is not None and moved < len(only) and node.parent is not None:
                self._trim(node, int(only[moved]), reason, wanted)
        return self.tiers[index].arena.used_bytes < used

    def _demote(self, node: Node, ids: Ids, index: int) -> int | None:
        """Move ``ids`` down, up to the first one that is not READY; say how many, as :meth:`move` does."""
        ids = self._leading_ready(ids)
        self.tiers[index + 1].policy.arrive(node.path())
        return self.move(ids, index, index + 1, self._path_of(node), drop_source=True)

    def _free_slab(self, index: int, slot_size: int) -> int | None:
        """Move the blocks of one slab into free slots of other slabs with slots of the same size.

        Returns:
            How many more slots must be free elsewhere for that; 0 when the slab is empty, or more is
            free than before; None when it cannot be had now: blocks of every slab are in use, or a
            move is under way.
        """
        arena, table = self.tiers[index].arena, self.table
        assert isinstance(arena, Arena)
        starts = table.slots[index].astype(np.int64) * ALIGNMENT
        coming = [move.target_offsets for move in self.moves if move.target == index]
        for start, stop in arena.slabs(slot_size):
            mates = np.flatnonzero((starts >= start) & (starts < stop)).astype(np.int32)
            if table.refs[mates].any() or any(
                ((offsets >= start) & (offsets < stop)).any() for offsets in coming
            ):
                continue
            if (orphans := table.states[mates] == BlockState.RESERVED).any():
                self.detach(list(self._nodes()), mates[orphans], "capacity")
                return 0
            offsets, missing = arena.allocate_outside(slot_size, len(mates), start, stop)
            if missing or not len(mates):
                return missing
            self.pin(mates)
            of_one_length = [
                table.size_classes[mates] == size_class
                for size_class in np.unique(table.size_classes[mates])
            ]
            for some in of_one_length:
                self._count_use(index, int(table.size_classes[mates[some][0]]), int(some.sum()))
            moves = [
                self._move(mates[some], index, index, offsets[some], drop_source=False)
                for some in of_one_length
            ]
            started = [self._start(move) for move in moves]
            return 0 if all(started) and self.moves.isdisjoint(moves) else None
        return None

    def _clear_slab(self, index: int, slot_size: int) -> bool:
        """Let go of all blocks in one slab of a durable tier; say whether there was one without users."""
        table = self.table
        starts = table.slots[index].astype(np.int64) * ALIGNMENT
        coming = [move.target_offsets for move in self.moves if move.target == index]
        for start, stop in self.tiers[index].arena.slabs(slot_size):
            mates = np.flatnonzero((starts >= start) & (starts < stop)).astype(np.int32)
            taken = any(((offsets >= start) & (offsets < stop)).any() for offsets in coming)
            if taken or table.refs[mates].any() or not len(mates):
                continue
            spare = (table.slots[:, mates] != NO_SLOT).sum(axis=0) > 1
            self.counts["evicted_blocks", self.tiers[index].name, "copy_elsewhere"] += int(
                spare.sum()
            )
            self.drop_copies(mates[spare], index)
            self.detach(list(self._nodes()), mates[~spare], "capacity")
            return True
        return False

    # -- forgetting -----------------------------------------------------------------------------

    def detach(self, nodes: Iterable[Node], ids: Ids, reason: str) -> None:
        """Remove those of ``ids`` that are in ``nodes`` from the index, and all blocks below them."""
        wanted = np.zeros(len(self.table.states), bool)
        wanted[ids] = True
        for node in nodes:
            hits = wanted[node.blocks]
            if node.parent is not None and hits.any():
                self._trim(node, int(hits.argmax()), reason)

    def discard_corrupt(self, nodes: Iterable[Node], ids: Ids) -> None:
        """Remove blocks whose bytes are not what their writer wrote."""
        ids = ids[self.table.states[ids] == BlockState.READY]
        if not len(ids):  # evicted meanwhile: nobody will read them
            return
        self.counts["corrupt_blocks",] += len(ids)
        logger.error("%d blocks do not match their checksums and are dropped", len(ids))
        self.detach(nodes, ids, "corrupt")

    def expire(self) -> bool:
        """Take blocks that have expired out of the index, of up to ``MAX_EXPIRED`` nodes; say if any left."""
        deadlines, left = self.lifetimes.deadlines, False
        for _ in range(min(MAX_EXPIRED, len(deadlines))):
            node = deadlines.pop(self._clock())
            if node is None:
                break
            expired = self.lifetimes.expired(node.blocks)
            if expired.any():
                self._trim(node, int(expired.argmax()), "expired")
                left = True
            if node.parent is not None:
                self.lifetimes.watch([node])
        return left

    def forget_lastingly(self) -> None:
        """Have the disk forget for good what was let go of: a crash brings none of it back."""
        disk = self.tiers[-1].disk
        if disk is not None:
            self._lanes.stores.submit(disk.flush)

    def tidy(self) -> None:
        """Have the disk forget what was let go of since it was written to last."""
        disk = self.tiers[-1].disk
        if (
            disk is not None
            and disk.slots.num_stale
            and not self._under_way(len(self.tiers) - 1).size
        ):
            self.forget_lastingly()

    def clear(self, tree: NamespaceTree) -> None:
        """Take every block of ``tree`` out of the index."""
        self.trees.pop(tree.namespace.digest)
        self.obituaries.add_cleared(tree.namespace.digest)
        self._drop(tree.clear(), "cleared")

    def _trim(self, node: Node, keep: int, reason: str, wanted: int = 0) -> None:
        """Take the blocks of ``node`` from ``keep`` on, and all below, out of the index and free them.

        ``reason``, and how many blocks need the room, are for whoever asks later.
        """
        tree = node.tree
        assert isinstance(tree, NamespaceTree)
        if self._events.active:
            self._tell_removed(node, keep)
        tier = self.tiers[int((self.table.slots[:, node.blocks[keep]] != NO_SLOT).argmax())]
        self.obituaries.add(
            tree.namespace.digest,
            node,
            keep,
            reason,
            tier=tier.name,
            policy=tier.policy.name,
            wanted=wanted,
        )
        self._drop(tree.trim(node, keep), reason)
        if not tree.num_blocks:
            self.trees.pop(tree.namespace.digest, None)

    def _drop(self, ids: Ids, reason: str) -> None:
        """Count blocks that left the index, and free those that nobody uses."""
        ready = ids[self.table.states[ids] == BlockState.READY]
        first = (self.table.slots[:, ready] != NO_SLOT).argmax(axis=0)
        for index, tier in enumerate(self.tiers):
            self.counts["evicted_blocks", tier.name, reason] += int((first == index).sum())
        self.table.states[ids] = BlockState.GONE
        self.parts.forget(ids)
        self._free(ids[self.table.refs[ids] == 0])

    def _free(self, ids: Ids) -> None:
        for index in range(len(self.tiers)):
            self._release_slots(index, ids[self.table.slots[index, ids] != NO_SLOT])
        self.table.free(ids)

    def _release_slots(self, index: int, ids: Ids) -> None:
        if not len(ids):
            return
        classes = self.table.size_classes[ids]
        for size_class in set(classes.tolist()):
            slots = self.table.slots[index, ids[classes == size_class]].astype(np.int64)
            self.tiers[index].arena.release(self._slot_size(index, size_class), slots * ALIGNMENT)
            self._count_use(index, size_class, -len(slots))

    def _tell_removed(self, node: Node, keep: int) -> None:
        tree = node.tree
        assert isinstance(tree, NamespaceTree)
        for gone in [node, *_below(node)]:
            prefix = tree.prefix(gone)
            first = len(prefix) // tree.key_bytes - len(gone.blocks)
            ready = np.flatnonzero(self.table.states[gone.blocks] == BlockState.READY)
            ready = ready[ready >= keep] if gone is node else ready
            for start, stop in runs(first + ready):
                key = prefix[: stop * tree.key_bytes]
                self._events.publish(BlockRemoved(tree.namespace.digest, key, start, stop))

    def _nodes(self) -> Iterator[Node]:
        for tree in self.trees.values():
            yield from tree.walk()

    def drop_copies(self, ids: Ids, index: int) -> None:
        """Free the slots that ``ids`` have in tier ``index``; each must have a copy elsewhere."""
        self._release_slots(index, ids)
        self.table.slots[index, ids] = NO_SLOT

    def _size_class(self, namespace: Namespace) -> int:
        """Number that stands for sizes and group of a block; those of no block are used again.

        Raises:
            TooLargeError: blocks of too many sizes are there.
        """
        sizes, group = self._size_classes, self.quotas.group_of(namespace.tenant)
        slot_sizes = tuple(tier.slot_bytes(namespace) for tier in self.tiers)
        size = (namespace.layout.block_bytes, slot_sizes, group)
        if size in sizes:
            return sizes.index(size)
        if len(sizes) < MAX_SIZE_CLASSES:
            sizes.append(size)
            return len(sizes) - 1
        used = self.table.size_classes[self.table.states != BlockState.FREE]
        unused = np.setdiff1d(np.arange(MAX_SIZE_CLASSES), used)
        if not len(unused):
            raise TooLargeError(
                f"blocks of {MAX_SIZE_CLASSES} sizes are stored: no other size fits before some leave"
            )
        sizes[int(unused[0])] = size
        return int(unused[0])

    def _slot_size(self, index: int, size_class: int) -> int:
        return self._size_classes[size_class][1][index]

    def check_invariants(self) -> None:
        """Raise AssertionError naming the first broken invariant."""
        table = self.table
        table.check_invariants()
        for tier in self.tiers:
            tier.arena.check_invariants()
        for tree in self.trees.values():
            check_invariants(tree)
        nodes = list(self._nodes())
        indexed = (
            np.sort(np.concatenate([node.blocks for node in nodes]))
            if nodes
            else np.empty(0, np.int32)
        )
        visible = (table.states == BlockState.RESERVED) | (table.states == BlockState.READY)
        assert np.array_equal(indexed, np.flatnonzero(visible)), (
            "2: blocks in trees = RESERVED and READY rows"
        )
        for index, tier in enumerate(self.tiers):
            rows = np.flatnonzero(table.slots[index] != NO_SLOT)
            starts = [table.slots[index, rows].astype(np.int64) * ALIGNMENT]
            sizes = [
                self._slot_size(index, int(size_class)) for size_class in table.size_classes[rows]
            ]
            for move in self.moves:
                if move.target == index:
                    starts.append(move.target_offsets)
                    sizes += [self._slot_size(index, move.size_class)] * len(move.target_offsets)
            for refill in self.refills if index + 1 == self._num_memory else ():
                starts.append(refill.offsets)
                size_class = int(table.size_classes[refill.ids[0]])
                sizes += [self._slot_size(index, size_class)] * len(refill.offsets)
            taken = np.concatenate(starts)
            assert len(np.unique(taken)) == len(taken), "3: no two blocks share a slot"
            assert tier.arena.used_bytes == sum(sizes), (
                "3: used slots are those of blocks and moves"
            )
            sealed = (table.checksums[rows] >= FIRST_CHECKSUM) | table.differs[rows]
            assert tier.disk is None or sealed.all(), "3: what is on disk has a checksum"
            if isinstance(tier.policy, LeafOrder | PriorityOrder | GroupedOrder):
                tier.policy.check_invariants()
            known = {node: age for age, node in enumerate(tier.policy)}
            for node in nodes:
                needed = (table.slots[index, node.blocks] != NO_SLOT) | np.isin(
                    node.blocks, self._under_way(index)
                )
                assert node in known or not needed.any(), (
                    "4: the policy knows nodes with blocks here or on their way"
                )
                if node in known and node.parent in known:
                    assert known[node] < known[node.parent], "4: what follows goes before"
        memory = self.tiers[self._num_memory - 1].arena
        assert sum(self.quotas.used_bytes.values()) == memory.used_bytes, (
            "7: all bytes are somebody's"
        )
        assert all(used >= 0 for used in self.quotas.used_bytes.values()), (
            "7: nobody has less than none"
        )
        self._check_parts(nodes)
        self.lifetimes.check_invariants(nodes)

    def _check_parts(self, nodes: list[Node]) -> None:
        table, records = self.table, self.parts.records
        moving = [move.ids for move in self.moves]
        rows = np.array([*records], np.int32)
        assert (table.states[rows] == BlockState.RESERVED).all(), "5: RESERVED rows have records"
        assert not np.isin(rows, np.concatenate(moving) if moving else []).any(), "5: none moves"
        for node in nodes:
            assert isinstance(node.tree, NamespaceTree)
            every = mask_of(node.tree.namespace.layout, None)
            for part in filter(None, map(records.get, node.blocks.tolist())):
                assert part.missing, "5: something is missing"
                assert part.claimed & ~part.missing == 0, "5: what is claimed is missing"
                assert part.missing & ~every == 0, "5: what is missing are heads of the block"
                assert part.claimed or part.missing != every, "5: something is there or coming"
        unheld = np.flatnonzero((table.states == BlockState.RESERVED) & (table.refs == 0))
        claims = [part.claimed if part else -1 for part in map(records.get, unheld.tolist())]
        assert not any(claims), "5: a RESERVED row without a reference waits for the rest"


def _prompts(
    blocks: RecoveredNamespace, tree: NamespaceTree, ids: Ids
) -> Iterator[tuple[int, NamespaceTree, bytes, Ids]]:
    """Yield generation, tree, key and new blocks of each path of ``blocks``, oldest first."""
    for key, fresh in blocks.prompts():
        yield int(blocks.generations[fresh[-1]]), tree, key, ids[fresh]


def _below(node: Node) -> Iterator[Node]:
    nodes = list(node.children.values())
    while nodes:
        below = nodes.pop()
        yield below
        nodes.extend(below.children.values())


def runs(positions: NDArray[np.int32] | NDArray[np.int64]) -> Iterator[tuple[int, int]]:
    """Cut ascending ``positions`` into runs ``[start, stop)`` without gaps."""
    for run in np.split(positions, np.flatnonzero(np.diff(positions) != 1) + 1):
        if len(run):
            yield int(run[0]), int(run[-1]) + 1
