"""Which block is in which tier: the index, making room, forgetting, and what was found again after a restart.

Blocks are placed in the first memory tier that has room. A block whose last copy goes leaves the index,
together with everything below it in the tree: what is resident is always a usable prefix. A block committed
above the last memory tier is copied one tier down in the background (write-through), so that evicting it
later is only forgetting a copy.

Eviction never touches blocks that somebody reads, writes or moves. All methods are called with the pool's
lock held.

A block that was written in part only (:mod:`kvstore.parts`) lies in one tier and is never moved: a writer
may bring the rest at any time. Where it is in the way it is dropped.
"""

from __future__ import annotations

import heapq
import logging
from contextlib import suppress
from operator import itemgetter
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from kvstore.blocks import NO_CHECKSUM, NO_SLOT, BlockState
from kvstore.copies import NO_REFILL, Copies, Refill
from kvstore.errors import TooLargeError, UsageError
from kvstore.events import BlockRemoved, EventLog
from kvstore.movement import Movement
from kvstore.offload import Coming, Offload
from kvstore.parts import Parts
from kvstore.quotas import Quotas
from kvstore.retention import NORMAL_PRIORITY
from kvstore.tiers.arena import Arena
from kvstore.tiers.moves import Path
from kvstore.tiers.tier import NamespaceTree, Tier, TierOrders, Trees
from kvstore.tokens import TOKEN_BYTES
from radix import GroupedOrder

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
    from kvstore.tiers.moves import Move
    from radix import Match, Node

logger = logging.getLogger(__name__)

MAX_EXPIRED = 64
"""Nodes with expired blocks that one call lets go of; the next one goes on."""

MAX_IN_VAIN = 4
"""Times in a row that room is made of which nothing is seen: then there is none."""

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


class Residency:
    """Index, rows and slots of all tiers; what keeps them in order is in :mod:`kvstore.invariants`."""

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
        memory = [tier for tier in tiers if tier.disk is None]
        self.quotas = Quotas(quotas, memory[-1].arena.capacity_bytes)
        if self.quotas and not isinstance(memory[-1].policy, GroupedOrder):
            raise UsageError(
                f"quotas of tenants need a GroupedOrder as policy of tier {memory[-1].name}"
            )
        self.copies = Copies(tiers, self.quotas, clock)
        self.movement = Movement(self.copies, lanes, lock, clock, self)
        self.offload = Offload(self.copies, self.movement, lock, clock)
        self.tiers = self.copies.tiers
        self.table = self.copies.table
        self.counts = self.copies.counts
        self.lifetimes = self.copies.lifetimes
        self.trees = Trees()
        self.order = TierOrders([tier.policy for tier in self.tiers], self.lifetimes.deadlines)
        self.parts = Parts()
        self.refills: set[Refill] = set()
        self.obituaries = obituaries
        self._num_memory = self.copies.num_memory
        self._clock = clock
        self._events = events
        if self.tiers[-1].disk is not None:
            self._recover(self.tiers[-1].disk.recover())

    # -- blocks ---------------------------------------------------------------------------------

    def place(self, namespace: Namespace, count: int) -> Ids:
        """Make up to ``count`` RESERVED blocks with slots, in the fastest memory that has room."""
        if not count:
            return np.empty(0, np.int32)
        size_class = self.copies.size_class(namespace)
        placed: list[Ids] = []
        missing = count
        for index in range(self._num_memory):
            offsets = self.take_slots(index, size_class, missing)
            ids = self.table.allocate(len(offsets), size_class)
            self.copies.put(index, ids, offsets)
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
        visible = self.copies.leading_ready(ids)
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

    def joinable(self, ids: Ids, heads: int) -> NDArray[np.intp]:
        """Positions of those of ``ids`` of which a writer may bring ``heads`` (a mask)."""
        if not self.parts:
            return np.empty(0, np.intp)
        hidden = np.flatnonzero(self.table.states[ids] == BlockState.RESERVED)
        return hidden[self.parts.joinable(ids[hidden], heads)]

    def away(self, known: Ids) -> NDArray[np.intp]:
        """Positions of those of ``known`` that only the disk has, and nobody loads in time."""
        if self._num_memory == len(self.tiers):
            return np.empty(0, np.intp)
        there = self.copies.in_memory(known)
        if not self.offload.is_stuck():
            there |= np.isin(known, self.movement.under_way(self._num_memory - 1))
        return np.flatnonzero(~there & (self.table.states[known] == BlockState.READY))

    def begin_refill(self, known: Ids, positions: NDArray[np.intp]) -> Refill:
        """Take slots in the last memory tier for those of ``known``, all pinned, at ``positions``."""
        index = self._num_memory - 1
        if not len(positions):
            return NO_REFILL
        offsets = self.slots_for(index, known[positions])
        positions = positions[: len(offsets)]
        refill = Refill(known[positions], positions, index, offsets)
        if len(offsets):
            self.refills.add(refill)
        return refill

    def end_refill(self, refill: Refill, *, is_written: bool) -> None:
        """Put the blocks of ``refill`` into memory, if they were written and nobody else was faster; end it.

        What was written need not be bit for bit what the disk has, which stays there.
        """
        self.refills.discard(refill)
        ids, table = refill.ids, self.table
        if not len(ids):
            return
        wanted = is_written & (table.states[ids] == BlockState.READY) & ~self.copies.in_memory(ids)
        self.copies.give_back(refill.tier, ids[~wanted], refill.offsets[~wanted])
        ids = ids[wanted]
        self.copies.put(refill.tier, ids, refill.offsets[wanted])
        table.differs[ids] = True
        table.checksums[ids] = NO_CHECKSUM
        self.counts["refilled_blocks",] += len(ids)
        self.movement.seal(ids)

    def _recover(self, found: list[RecoveredNamespace]) -> None:
        """Take over what the disk has, oldest first.

        Only the disk's policy learns of it: whoever looks for victims in memory passes none of these blocks.
        """
        index = len(self.tiers) - 1
        prompts: list[Iterator[tuple[int, NamespaceTree, bytes, Ids]]] = []
        for blocks in found:
            size_class = self.copies.size_class(blocks.namespace)
            ids = self.table.allocate(len(blocks), size_class)
            if blocks.plain.any():
                plain = self.copies.size_class(blocks.namespace, plain=True)
                self.table.size_classes[ids[blocks.plain]] = plain
            self.copies.put(index, ids, blocks.offsets)
            self.table.checksums[ids] = blocks.checksums
            self.table.states[ids] = BlockState.READY
            self.table.refs[ids] = 0
            tree = NamespaceTree(blocks.namespace, self.tiers[index].policy)
            self.trees[blocks.namespace.digest] = tree
            prompts.append(_prompts(blocks, tree, ids))
            self.offload.measure(ids)
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
            comes = not self.copies.have(index, ids).all()
            if comes and (index + 1 < len(self.tiers) or any(n not in tier.policy for n in nodes)):
                tier.policy.arrive(nodes)

    # -- using ----------------------------------------------------------------------------------

    def publish(self, ids: Ids, before: Ids, path: Path) -> Ids:
        """Make RESERVED ``ids`` of ``path`` READY, write them through, seal them.

        Args:
            ids: of blocks that are written as a whole.
            before: the other blocks of the prompt before the last of them.
            path: the prompt.

        Returns:
            Those that were not GONE.
        """
        ready: Ids = ids[self.table.states[ids] == BlockState.RESERVED]
        self.table.states[ready] = BlockState.READY
        if self.lifetimes.committed(ready, before):
            self.lifetimes.watch(path.tree.match(path.key).nodes)
        self.parts.forget(ready)
        for index in range(self._num_memory - 1):
            here = ready[self.copies.have(index, ready)]
            self.movement.move(here, index, index + 1, path)
        self.offload.committed(ready, path)
        self.movement.seal(ready)
        self.offload.write_back()
        return ready

    def spread(self, ids: Ids, path: Path) -> None:
        """Copy READY blocks, which were used, one tier up from where they are, and those without one down.

        Leading blocks first; one that is under way already is not moved again. Each of ``ids`` has a
        reference, and the policies of all tiers know its node.
        """
        ids = ids[self.table.states[ids] == BlockState.READY]
        tiers, _ = self.copies.where(ids)
        for index in range(self._num_memory):
            here = ids[tiers == index]
            if index:
                self.movement.move(here, index, index - 1, path)
            if index + 1 < self._num_memory:
                only = here[(self.table.slots[index + 1 :, here] == NO_SLOT).all(axis=0)]
                self.movement.move(only, index, index + 1, path)
        self.offload.store(ids, path)

    def load(self, found: Found, ids: Ids, key: bytes) -> Coming:
        """Start loading what memory does not have of ``ids``, leading usable blocks: none goes meanwhile."""
        if (ready := self.copies.num_in_memory(ids)) == len(ids):
            return Coming(ready, is_old=False)
        self.copies.pin(ids)
        try:
            self.acquaint(found, len(ids))
            return self.offload.load(ids, Path(found.tree, key))
        finally:
            self.copies.unpin(ids)

    def prefetch(self, found: Found, key: bytes) -> int:
        """Do as :meth:`spread` and :meth:`load`; return how many blocks are in memory then, or on their way."""
        ids = found.usable
        if not len(ids):
            return 0
        self.copies.pin(ids)
        try:
            self.acquaint(found, len(ids))
            self.spread(ids, Path(found.tree, key))
            coming = self.offload.load(ids, Path(found.tree, key))
        finally:
            self.copies.unpin(ids)
        return len(ids) - coming.left_blocks

    def ended(self, move: Move, arrived: Ids, seconds: float | None) -> None:
        """Learn what became of a move."""
        self.offload.ended(move, arrived, seconds)

    def refused(self, index: int, ids: Ids, path: Path) -> NDArray[np.int64]:
        """Have pinned ``ids``, which their codec refuses, stored plain from now on; do as :meth:`slots_for`."""
        before, offsets = self.copies.slot_sizes(index, ids), np.empty(0, np.int64)
        with suppress(TooLargeError):  # then they are tried again when they are used again
            self.table.size_classes[ids] = self.copies.size_class(path.tree.namespace, plain=True)
            offsets = self.slots_for(index, ids)
        self.offload.refused(before, self.copies.slot_sizes(index, ids[: len(offsets)]))
        return offsets

    # -- making room ----------------------------------------------------------------------------

    def slots_for(self, index: int, ids: Ids) -> NDArray[np.int64]:
        """Slots of tier ``index`` for the first ones of pinned ``ids``, evicting what the policy says."""
        found = [np.empty(0, np.int64)]
        sizes = self.copies.slot_sizes(index, ids)
        for part in np.split(ids, np.flatnonzero(np.diff(sizes)) + 1):
            offsets = self.take_slots(index, self.copies.class_of(part[0]), len(part))
            found.append(offsets)
            if len(offsets) < len(part):
                break
        return np.concatenate(found)

    def take_slots(self, index: int, size_class: int, count: int) -> NDArray[np.int64]:
        """Up to ``count`` slots of tier ``index``, evicting what the policy says."""
        slot_size = self.copies.slot_size(index, size_class)
        count = min(count, self.tiers[index].arena.capacity_slots(slot_size))
        if self.quotas and index + 1 == self._num_memory:
            count = self._within_ceiling(index, size_class, count)
        offsets, in_vain = self.copies.take(index, size_class, count), 0
        while len(offsets) < count and in_vain < MAX_IN_VAIN:
            used_bytes = self.tiers[index].arena.used_bytes
            if not self._evict(index, size_class, count - len(offsets)):
                break
            less = self.tiers[index].arena.used_bytes < used_bytes
            more = self.copies.take(index, size_class, count - len(offsets))
            in_vain = 0 if less or len(more) else in_vain + 1
            offsets = np.concatenate([offsets, more])
        return offsets

    def _within_ceiling(self, index: int, size_class: int, count: int) -> int:
        """Make room below the ceiling of a tenant with its own blocks; say for how many of ``count``."""
        slot_size = self.copies.slot_size(index, size_class)
        group = self.copies.size(size_class).group
        while (left := self.quotas.left_bytes(group)) is not None and left < count * slot_size:
            missing = -(-(count * slot_size - left) // slot_size)
            if not self._evict(index, size_class, missing, "quota"):
                return min(count, max(0, left) // slot_size)
        return count

    def _victim(
        self, index: int, group: str, largest: int, reason: str
    ) -> tuple[Node | None, int | None]:
        """Return which node of tier ``index`` gives way to ``group``, and how many bytes at most.

        ``largest``: no slot of the tier has more bytes.
        """
        policy = self.tiers[index].policy
        if not self.quotas or index + 1 != self._num_memory:
            return policy.victim(), None
        assert isinstance(policy, GroupedOrder)
        if reason == "quota":
            return policy.victim_among([group]), None
        node = policy.victim_among(self.quotas.givers(group, largest))
        if node is None:
            return None, None
        giver = self.quotas.group_of_tree(node.tree)  # type: ignore[arg-type]
        return node, None if giver == group else self.quotas.spare_bytes(giver)

    def _evict(self, index: int, size_class: int, count: int, reason: str = "capacity") -> bool:
        """Free about ``count`` slots of tier ``index``; say whether any slot came free.

        For ``reason`` ``quota`` only blocks of the tenant itself go.
        """
        policy, table, copies = self.tiers[index].policy, self.table, self.copies
        wanted_size, group = copies.slot_size(index, size_class), copies.size(size_class).group
        largest, skipped = copies.largest_slot(index), 0
        while count > 0 and skipped < MAX_SKIPS:
            node, allowed_bytes = self._victim(index, group, largest, reason)
            if node is None:
                return False
            ids = node.blocks
            here = copies.have(index, ids)
            unused = table.refs[ids] == 0
            free = np.flatnonzero(here & unused)
            if not len(free):
                if here.any() or not unused.all():
                    policy.postpone(node)
                    skipped += 1
                else:
                    policy.remove(node)
                continue
            slot_size = copies.slot_size(index, copies.class_of(ids[free[-1]]))
            if allowed_bytes is not None:
                free = free[-max(1, allowed_bytes // slot_size) :]
            like = np.flatnonzero(copies.slot_sizes(index, ids[free]) == wanted_size)
            if not len(like) and reason == "capacity":
                if self.tiers[index].disk is not None:
                    return self._clear_slab(index, slot_size)
                shortage = self._free_slab(index, slot_size)
                return shortage is not None and (
                    shortage == 0 or self._give_up(index, node, free[-shortage:], reason, count)
                )
            first = int(like[-count:][0]) if len(like) else -count
            if self._give_up(index, node, free[first:], reason, count):
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
        spare = self._drop_spare(index, ids)
        if len(only := positions[~spare]):
            demotes = index + 1 < self._num_memory
            moved = self._demote(node, ids[~spare], index) if demotes else 0
            if moved is not None and moved < len(only) and node.parent is not None:
                self._trim(node, int(only[moved]), reason, wanted)
        return self.tiers[index].arena.used_bytes < used

    def _drop_spare(self, index: int, ids: Ids) -> NDArray[np.bool_]:
        """Drop those copies in tier ``index`` that are not the last ones; say which ``ids`` had such."""
        spare = self.copies.spare(ids)
        self.copies.drop(index, ids[spare])
        self.counts["evicted_blocks", self.tiers[index].name, "copy_elsewhere"] += int(spare.sum())
        return spare

    def _demote(self, node: Node, ids: Ids, index: int) -> int | None:
        """Move ``ids`` down, up to the first one that is not READY; say how many, as a move does."""
        ids = self.copies.leading_ready(ids)
        self.tiers[index + 1].policy.arrive(node.path())
        return self.movement.move(ids, index, index + 1, Path.to(node), drop_source=True)

    def _free_slab(self, index: int, slot_size: int) -> int | None:
        """Move the blocks of one slab into free slots of other slabs with slots of the same size.

        Returns:
            How many more slots must be free elsewhere for that; 0 when the slab is empty, or more is
            free than before; None when it cannot be had now: blocks of every slab are in use, or a
            move is under way.
        """
        arena = self.tiers[index].arena
        assert isinstance(arena, Arena)
        for start, stop, mates in self._idle_slabs(index, slot_size):
            if (orphans := self.table.states[mates] == BlockState.RESERVED).any():
                self.detach(list(self.nodes()), mates[orphans], "capacity")
                return 0
            offsets, missing = arena.allocate_outside(slot_size, len(mates), start, stop)
            if missing or not len(mates):
                return missing
            return 0 if self.movement.relocate(mates, index, offsets) else None
        return None

    def _clear_slab(self, index: int, slot_size: int) -> bool:
        """Let go of all blocks in one slab of a durable tier; say whether there was one without users."""
        for _, _, mates in self._idle_slabs(index, slot_size):
            if len(mates):
                spare = self._drop_spare(index, mates)
                self.detach(list(self.nodes()), mates[~spare], "capacity")
                self._drop_behind(index, mates[spare])
                return True
        return False

    def _drop_behind(self, index: int, ids: Ids) -> None:
        """Drop copies of what follows ``ids`` in a tier that lost these: after a restart it is of no use."""
        lost = np.zeros(len(self.table.states), bool)
        lost[ids] = True
        for node in list(self.nodes()) if len(ids) else ():
            if (hits := lost[node.blocks]).any():
                behind = [node.blocks[int(hits.argmax()) :]]
                behind += [below.blocks for below in _below(node)]
                together = np.concatenate(behind)
                self._drop_spare(index, together[self.copies.have(index, together)])

    def _idle_slabs(self, index: int, slot_size: int) -> Iterator[tuple[int, int, Ids]]:
        """Begin, end and blocks of each slab in which nobody uses a block, and none is on its way there."""
        starts = self.copies.offsets(index, np.arange(len(self.table.states), dtype=np.int32))
        moves = self.movement.moves
        coming = [move.target_offsets for move in moves if move.target == index]
        coming += [refill.offsets for refill in self.refills if refill.tier == index]
        for start, stop in self.tiers[index].arena.slabs(slot_size):
            mates = np.flatnonzero((starts >= start) & (starts < stop)).astype(np.int32)
            taken = any(((offsets >= start) & (offsets < stop)).any() for offsets in coming)
            if not taken and not self.table.refs[mates].any():
                yield start, stop, mates

    # -- forgetting -----------------------------------------------------------------------------

    def detach(self, nodes: Iterable[Node], ids: Ids, reason: str) -> None:
        """Remove those of ``ids`` that are in ``nodes`` from the index, and all blocks below them."""
        wanted = np.zeros(len(self.table.states), bool)
        wanted[ids] = True
        for node in nodes:
            hits = wanted[node.blocks]
            if node.parent is not None and hits.any():
                self._trim(node, int(hits.argmax()), reason)

    def discard_corrupt(self, ids: Ids, path: Path | None) -> None:
        """Remove blocks, of ``path`` if it is known, whose bytes are not what their writer wrote."""
        ids = ids[self.table.states[ids] == BlockState.READY]
        if not len(ids):  # evicted meanwhile: nobody will read them
            return
        self.counts["corrupt_blocks",] += len(ids)
        logger.error("%d blocks do not match their checksums and are dropped", len(ids))
        nodes = list(self.nodes()) if path is None else path.tree.match(path.key).nodes
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
        tier = self.tiers[int(self.copies.where(node.blocks[keep : keep + 1])[0][0])]
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
        first, _ = self.copies.where(ready)
        for index, tier in enumerate(self.tiers):
            self.counts["evicted_blocks", tier.name, reason] += int((first == index).sum())
        self.table.states[ids] = BlockState.GONE
        self.parts.forget(ids)
        self.copies.free(ids[self.table.refs[ids] == 0])

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

    def nodes(self) -> Iterator[Node]:
        """All nodes of all trees."""
        for tree in self.trees.values():
            yield from tree.walk()


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
