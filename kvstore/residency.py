"""Which block is in which tier: making room, moving, forgetting. The pool's half that owns the bytes.

A block is *resident* while at least one tier has a copy of it. Tiers are ordered from the fastest
down. Blocks are placed in the first tier that has room; a block committed above the last tier is
copied one tier down in the background (write-through), so that evicting it later is only forgetting
a copy. A block whose last copy goes leaves the index, together with everything below it in the tree:
what is resident is always a usable prefix.

Every block that somebody reads or writes has references; eviction never touches those. All methods
are called with the pool's lock held, except the copying part of a move and the hashing part of a
seal, which run on the mover.

A block becomes visible before its checksum is known: a *seal* computes it in the background, where no
move under way does so anyway. Seals hold no reference, so that they never keep a slot from a writer:
the row says by the seal's number that it is still the block that the seal was made for.

A block that was written in part only (:mod:`kvstore.parts`) lies in one tier and is never moved: a writer
may bring the rest at any time. Where it is in the way it is dropped.
"""

from __future__ import annotations

import logging
from collections import Counter
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from kvstore.blocks import FIRST_CHECKSUM, NO_CHECKSUM, NO_SLOT, BlockState, BlockTable
from kvstore.errors import TooLargeError
from kvstore.events import BlockRemoved, EventLog
from kvstore.parts import Parts, mask_of
from kvstore.tiers.arena import ALIGNMENT, slot_bytes
from kvstore.tiers.moves import Move, checksums, copy_blocks, on_host
from kvstore.tiers.tier import NamespaceTree, Tier, TierOrders, Trees
from kvstore.tokens import TOKEN_BYTES
from radix import LRU, LeafOrder, check_invariants

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence
    from threading import RLock

    from numpy.typing import NDArray

    from kvstore.blocks import Ids
    from kvstore.explain import Obituaries
    from kvstore.namespace import Namespace
    from kvstore.tiers.mover import Mover
    from radix import Match, Node

logger = logging.getLogger(__name__)

MAX_SIZE_CLASSES = 1024
"""Block sizes that may be stored at the same time."""

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
    """Blocks, slots and trees of all tiers.

    Invariants (:meth:`check_invariants`, in this order; the pool adds those of leases):

    1. table, arenas and trees keep their own invariants;
    2. the blocks in the trees are exactly the RESERVED and READY rows;
    3. no two blocks share a slot, and an arena's used slots are those of blocks and moves;
    4. a tier's policy knows every node that has a block there, or one on its way there;
    5. blocks with a record of parts are RESERVED and not moving, and their record is one of
       :class:`kvstore.parts.Unfinished`; of a block that nobody writes something was committed; a RESERVED
       block without a reference has a record, and nobody writes it.
    """

    def __init__(
        self,
        tiers: Sequence[Tier],
        mover: Mover,
        lock: RLock,
        events: EventLog,
        obituaries: Obituaries,
    ) -> None:
        """Start empty. ``lock`` is the pool's; moves and seals take it to apply their results."""
        self.tiers = tuple(tiers)
        self.table = BlockTable(len(self.tiers))
        self.trees = Trees()
        self.order = TierOrders([tier.policy for tier in self.tiers])
        self.moves: set[Move] = set()
        self.parts = Parts()
        self.counts: Counter[tuple[str, ...]] = Counter()
        self._size_classes: list[int] = []
        self._mover = mover
        self._lock = lock
        self._events = events
        self._on_host = on_host(self.tiers)
        self._last_seal = 0
        self.obituaries = obituaries

    # -- blocks ---------------------------------------------------------------------------------

    def place(self, namespace: Namespace, count: int) -> Ids:
        """Make up to ``count`` RESERVED blocks with slots, in the fastest tiers that have room."""
        if not count:
            return np.empty(0, np.int32)
        size_class = self._size_class(namespace.layout.block_bytes)
        placed: list[Ids] = []
        missing = count
        for index in range(len(self.tiers)):
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

    def _leading_ready(self, ids: Ids) -> Ids:
        hidden = self.table.states[ids] != BlockState.READY
        return ids[: int(hidden.argmax())] if hidden.any() else ids

    def joinable(self, ids: Ids, heads: int) -> NDArray[np.intp]:
        """Positions of those of ``ids`` of which a writer may bring ``heads`` (a mask)."""
        if not self.parts:
            return np.empty(0, np.intp)
        hidden = np.flatnonzero(self.table.states[ids] == BlockState.RESERVED)
        return hidden[self.parts.joinable(ids[hidden], heads)]

    def publish(self, ids: Ids) -> Ids:
        """Make RESERVED ``ids`` READY, write them through, seal them; return those that were not GONE."""
        ready: Ids = ids[self.table.states[ids] == BlockState.RESERVED]
        self.table.states[ready] = BlockState.READY
        self.parts.forget(ready)
        for index in range(len(self.tiers) - 1):
            here = ready[self.table.slots[index, ready] != NO_SLOT]
            if len(here):
                self.move(here, index, index + 1)
        self._seal(ready)
        return ready

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

    def held_bytes(self, ids: Ids) -> int:
        """Bytes of one slot for each of ``ids``."""
        classes = np.bincount(self.table.size_classes[ids]).tolist()
        return sum(count * self._slot_size(index) for index, count in enumerate(classes) if count)

    # -- sealing --------------------------------------------------------------------------------

    def _seal(self, ids: Ids) -> None:
        """Have the checksums of those of READY ``ids`` computed that no move under way computes."""
        unknown = self.table.checksums[ids] < FIRST_CHECKSUM
        if self.moves:
            unknown &= ~np.isin(ids, np.concatenate([move.ids for move in self.moves]))
        if not self._on_host.all():
            unknown &= self._on_host[self.where(ids)[0]]
        ids = ids[unknown]
        if not len(ids):
            return
        self._last_seal = seal = self._last_seal % (FIRST_CHECKSUM - 1) + 1
        self.table.checksums[ids] = seal
        if not self._mover.submit(partial(self._run_seal, seal, ids)):
            self.table.checksums[ids] = NO_CHECKSUM
            self.counts["unsealed_blocks",] += len(ids)

    def _run_seal(self, seal: int, ids: Ids) -> None:
        """Compute checksums (no lock held), and record them for the blocks that are still there.

        A row keeps the seal's number until it is freed, or a move has recorded the checksum; until
        then its bytes stay where they are, since only such a move could let go of them.
        """
        with self._lock:
            ids = ids[self.table.checksums[ids] == seal]
            if not len(ids):
                return
            tiers, offsets = self.where(ids)
            block_bytes = self._size_classes[int(self.table.size_classes[ids[0]])]
        sums = checksums(self.tiers, tiers, offsets, block_bytes)
        with self._lock:
            left = self.table.checksums[ids] == seal
            self.table.checksums[ids[left]] = sums[left]

    # -- moving ---------------------------------------------------------------------------------

    def move(self, ids: Ids, source: int, target: int, *, drop_source: bool = False) -> int | None:
        """Start copying READY ``ids`` to tier ``target``, the first ones first.

        Returns:
            How many found room there, or None when the mover takes no more moves now.
        """
        ids = ids[~np.isin(ids, self._under_way(target))]
        if not len(ids):
            return 0
        if not self._mover.has_room():
            return None
        size_class = int(self.table.size_classes[ids[0]])
        self.pin(ids)
        offsets = self._take_slots(target, size_class, len(ids))
        moving, rest = ids[: len(offsets)], ids[len(offsets) :]
        self.unpin(rest)
        if not len(moving):
            return 0
        move = self._move(moving, source, target, offsets, drop_source=drop_source)
        return len(moving) if self._start(move) else None

    def _move(
        self, ids: Ids, source: int, target: int, offsets: NDArray[np.int64], *, drop_source: bool
    ) -> Move:
        starts = self.table.slots[source, ids].astype(np.int64) * ALIGNMENT
        size_class = int(self.table.size_classes[ids[0]])
        return Move(ids, source, starts, target, offsets, size_class, drop_source)

    def _start(self, move: Move) -> bool:
        """Hand ``move``, whose blocks are pinned, to the mover; undo it when that refuses."""
        self.moves.add(move)
        started = False
        try:
            started = self._mover.submit(partial(self._run, move))
        finally:
            if not started:
                self._finish(move, None)
        return started

    def _under_way(self, target: int) -> Ids:
        ids = [move.ids for move in self.moves if move.target == target]
        return np.concatenate(ids) if ids else np.empty(0, np.int32)

    def prefetch(self, found: Found) -> None:
        """:meth:`spread` the usable blocks; the policies of the tiers where they go learn of them."""
        stops = np.cumsum([len(node.blocks) for node in found.match.nodes])
        nodes = found.match.nodes[: int(np.searchsorted(stops, len(found.usable))) + 1]
        self.pin(found.usable)
        self.spread(found.usable, nodes if len(found.usable) else ())
        self.unpin(found.usable)

    def spread(self, ids: Ids, path: Sequence[Node] = ()) -> None:
        """Copy READY blocks one tier up from where they are, and what no slower tier has yet, down.

        Leading blocks first; one that is under way already is not moved again. Each of ``ids`` has a
        reference. ``path`` are its nodes, if the policies may have forgotten them: nothing was leased.
        """
        ids = ids[self.table.states[ids] == BlockState.READY]
        tiers, _ = self.where(ids)
        for index in range(len(self.tiers)):
            here = ids[tiers == index]
            if index and len(here):
                self.tiers[index - 1].policy.arrive(path)
                self.move(here, index, index - 1)
            only = here[(self.table.slots[index + 1 :, here] == NO_SLOT).all(axis=0)]
            if len(only) and index + 1 < len(self.tiers):
                self.tiers[index + 1].policy.arrive(path)
                self.move(only, index, index + 1)

    def drop_copies(self, ids: Ids, index: int) -> None:
        """Free the slots that ``ids`` have in tier ``index``; each must have a copy elsewhere."""
        self._release_slots(index, ids)
        self.table.slots[index, ids] = NO_SLOT

    def _run(self, move: Move) -> None:
        """Copy the bytes of ``move`` (no lock held), then apply the result."""
        checksums = None
        try:
            checksums = copy_blocks(move, self.tiers, self._size_classes[move.size_class])
        except Exception:  # whatever a device or driver raises: the blocks stay where they were
            logger.exception("moving %d blocks failed", len(move.ids))
        with self._lock:
            self._finish(move, checksums)

    def _finish(self, move: Move, checksums: NDArray[np.uint64] | None) -> None:
        """End ``move``: a block counts as arrived when its bytes are what its writer wrote."""
        self.moves.discard(move)
        ids, table = move.ids, self.table
        arrived = self._arrived(move, checksums)
        alone = table.refs[ids] == 1  # a block that others use stays where it is
        if move.source == move.target:
            arrived &= alone
            self.drop_copies(ids[arrived], move.source)
        arena = self.tiers[move.target].arena
        arena.release(self._slot_size(move.size_class), move.target_offsets[~arrived])
        table.slots[move.target, ids[arrived]] = move.target_offsets[arrived] // ALIGNMENT
        names = self.tiers[move.source].name, self.tiers[move.target].name
        self.counts["moved_blocks", *names] += int(arrived.sum())
        self.counts["failed_moves", *names] += int((~arrived).sum())
        if move.drop_source:
            self.drop_copies(ids[arrived & alone], move.source)
        self.unpin(ids)

    def _arrived(self, move: Move, checksums: NDArray[np.uint64] | None) -> NDArray[np.bool_]:
        """Which blocks of ``move`` may be used at their target; corrupt ones are discarded."""
        ids, table = move.ids, self.table
        if checksums is None:
            return np.zeros(len(ids), bool)
        known = table.checksums[ids]
        fresh = known < FIRST_CHECKSUM
        right = fresh | (checksums == NO_CHECKSUM) | (known == checksums)
        table.checksums[ids[fresh]] = checksums[fresh]
        if not right.all():
            self.discard_corrupt(list(self._nodes()), ids[~right])
        missing = table.slots[move.target, ids] == NO_SLOT
        ready = table.states[ids] == BlockState.READY
        arrived: NDArray[np.bool_] = right & ready & (missing | (move.source == move.target))
        return arrived

    # -- making room ----------------------------------------------------------------------------

    def _take_slots(self, index: int, size_class: int, count: int) -> NDArray[np.int64]:
        """Up to ``count`` slots of tier ``index``, evicting what the policy says."""
        arena, slot_size = self.tiers[index].arena, self._slot_size(size_class)
        count = min(count, arena.capacity_slots(slot_size))
        offsets = arena.allocate(slot_size, count)
        while len(offsets) < count and self._evict(index, size_class, count - len(offsets)):
            offsets = np.concatenate([offsets, arena.allocate(slot_size, count - len(offsets))])
        return offsets

    def _evict(self, index: int, size_class: int, count: int) -> bool:
        """Free about ``count`` slots of tier ``index``; say whether any slot came free."""
        policy, table = self.tiers[index].policy, self.table
        skipped = 0
        while count > 0 and skipped < MAX_SKIPS and (node := policy.victim()) is not None:
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
            slot_size = self._slot_size(int(table.size_classes[ids[0]]))
            if slot_size != self._slot_size(size_class):
                shortage = self._free_slab(index, slot_size)
                return shortage is not None and (
                    shortage == 0 or self._give_up(index, node, free[-shortage:])
                )
            if self._give_up(index, node, free[-count:]):
                return True
            count -= len(free)  # under way to the next tier, or refused by a busy mover
        return False

    def _give_up(self, index: int, node: Node, positions: NDArray[np.intp]) -> bool:
        """Let go of unused blocks of ``node`` in tier ``index``; say whether any slot came free."""
        used = self.tiers[index].arena.used_bytes
        ids = node.blocks[positions]
        spare = (self.table.slots[:, ids] != NO_SLOT).sum(axis=0) > 1
        self.drop_copies(ids[spare], index)
        self.counts["evicted_blocks", self.tiers[index].name, "copy_elsewhere"] += int(spare.sum())
        if len(only := positions[~spare]):
            moved = self._demote(node, ids[~spare], index) if index + 1 < len(self.tiers) else 0
            if moved is not None and moved < len(only) and node.parent is not None:
                self._trim(node, int(only[moved]), "capacity")
        return self.tiers[index].arena.used_bytes < used

    def _demote(self, node: Node, ids: Ids, index: int) -> int | None:
        """Move ``ids`` down, up to the first one that is not READY; say how many, as :meth:`move` does."""
        ids = self._leading_ready(ids)
        self.tiers[index + 1].policy.arrive(node.path())
        return self.move(ids, index, index + 1, drop_source=True)

    def _free_slab(self, index: int, slot_size: int) -> int | None:
        """Move the blocks of one slab into free slots of other slabs with slots of the same size.

        Returns:
            How many more slots must be free elsewhere for that; 0 when the slab is empty, or more is
            free than before; None when it cannot be had now: blocks of every slab are in use, or a
            move is under way.
        """
        arena, table = self.tiers[index].arena, self.table
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
            moves = [
                self._move(mates[some], index, index, offsets[some], drop_source=False)
                for some in of_one_length
            ]
            started = [self._start(move) for move in moves]
            return 0 if all(started) and self.moves.isdisjoint(moves) else None
        return None

    # -- forgetting -----------------------------------------------------------------------------

    def detach(self, nodes: Iterable[Node], ids: Ids, reason: str) -> None:
        """Remove those of ``ids`` that are in ``nodes`` from the index, and all blocks below them."""
        for node in nodes:
            hits = np.isin(node.blocks, ids)
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

    def clear(self, tree: NamespaceTree) -> None:
        """Take every block of ``tree`` out of the index."""
        self.trees.pop(tree.namespace.digest)
        self.obituaries.add_cleared(tree.namespace.digest)
        self._drop(tree.clear(), "cleared")

    def _trim(self, node: Node, keep: int, reason: str) -> None:
        """Take the blocks of ``node`` from ``keep`` on, and all below, out of the index and free them."""
        tree = node.tree
        assert isinstance(tree, NamespaceTree)
        if self._events.active:
            self._tell_removed(node, keep)
        tier = self.tiers[int((self.table.slots[:, node.blocks[keep]] != NO_SLOT).argmax())]
        policy = type(tier.policy).__name__
        self.obituaries.add(
            tree.namespace.digest, node, keep, reason, tier=tier.name, policy=policy
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
            self.tiers[index].arena.release(self._slot_size(size_class), slots * ALIGNMENT)

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

    def _size_class(self, block_bytes: int) -> int:
        """Number that stands for ``block_bytes`` in the table; those of no block are used again.

        Raises:
            TooLargeError: blocks of too many sizes are there.
        """
        sizes = self._size_classes
        if block_bytes in sizes:
            return sizes.index(block_bytes)
        if len(sizes) < MAX_SIZE_CLASSES:
            sizes.append(block_bytes)
            return len(sizes) - 1
        used = self.table.size_classes[self.table.states != BlockState.FREE]
        unused = np.setdiff1d(np.arange(MAX_SIZE_CLASSES), used)
        if not len(unused):
            raise TooLargeError(
                f"blocks of {MAX_SIZE_CLASSES} sizes are stored: no other size fits before some leave"
            )
        sizes[int(unused[0])] = block_bytes
        return int(unused[0])

    def _slot_size(self, size_class: int) -> int:
        return slot_bytes(self._size_classes[size_class])

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
            sizes = [self._slot_size(int(size_class)) for size_class in table.size_classes[rows]]
            for move in self.moves:
                if move.target == index:
                    starts.append(move.target_offsets)
                    sizes += [self._slot_size(move.size_class)] * len(move.target_offsets)
            taken = np.concatenate(starts)
            assert len(np.unique(taken)) == len(taken), "3: no two blocks share a slot"
            assert tier.arena.used_bytes == sum(sizes), (
                "3: used slots are those of blocks and moves"
            )
            if isinstance(tier.policy, LeafOrder):
                tier.policy.check_invariants()
            known = {node: age for age, node in enumerate(tier.policy)}
            for node in nodes:
                needed = (table.slots[index, node.blocks] != NO_SLOT) | np.isin(
                    node.blocks, self._under_way(index)
                )
                assert node in known or not needed.any(), (
                    "4: the policy knows nodes with blocks here or on their way"
                )
                if isinstance(tier.policy, LRU) and node in known and node.parent in known:
                    assert known[node] < known[node.parent], "4: LRU: parents are more recent"
        self._check_parts(nodes)

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
