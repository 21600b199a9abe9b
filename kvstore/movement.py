"""Copies of blocks on their way between tiers, and the checksums of what was written.

A *move* copies blocks to slots of another tier on a mover. Its blocks have references until it ends; at its
end a copy counts if its bytes are what their writer wrote. Which moves there are is decided elsewhere: by
:class:`kvstore.residency.Residency`, and for the disk by :class:`kvstore.offload.Offload`.

A block becomes visible before its checksum is known: a *seal* computes it in the background, where no
move under way does so anyway. Seals hold no reference, so that they never keep a slot from a writer:
the row says by the seal's number that it is still the block that the seal was made for.

All methods are called with the pool's lock held, except the copying part of a move and the hashing part of
a seal, which run on movers.
"""

from __future__ import annotations

import logging
from functools import partial
from typing import TYPE_CHECKING, Protocol

import numpy as np

from kvstore.blocks import FIRST_CHECKSUM, NO_CHECKSUM, BlockState
from kvstore.planner import Queue
from kvstore.tiers.moves import Move, Origin, Prompt, checksums, copy_blocks

if TYPE_CHECKING:
    from collections.abc import Callable
    from threading import RLock

    from numpy.typing import NDArray

    from kvstore.blocks import Ids
    from kvstore.copies import Copies
    from kvstore.tiers.mover import Lanes, Mover
    from kvstore.tiers.moves import Outcome, Path

logger = logging.getLogger(__name__)


PIECE_BYTES = 32 << 20
"""A move from or to the disk has about so much."""


class Owner(Protocol):
    """Who makes room for blocks, and forgets them."""

    def slots_for(self, index: int, ids: Ids) -> NDArray[np.int64]:
        """Slots of tier ``index`` for the first ones of pinned ``ids``, evicting what the policy says."""

    def refused(self, index: int, ids: Ids, path: Path) -> NDArray[np.int64]:
        """Have pinned ``ids``, which their codec refuses, stored plain from now on; do as :meth:`slots_for`."""

    def discard_corrupt(self, ids: Ids, path: Path | None) -> None:
        """Remove blocks, of ``path`` if it is known, whose bytes are not what their writer wrote."""

    def ended(self, move: Move, arrived: Ids, seconds: float | None) -> None:
        """Learn which blocks of ``move`` arrived, still pinned, and how long it took; None: it did not work."""


class Movement:
    """What is under way between tiers."""

    def __init__(
        self,
        copies: Copies,
        lanes: Lanes,
        lock: RLock,
        clock: Callable[[], float],
        owner: Owner,
    ) -> None:
        """Start with nothing under way. ``lock`` is the pool's; movers take it to apply their results."""
        self.moves: dict[Move, None] = {}
        """In the order in which they were started."""
        self.is_closing = False
        """Whether nothing need be loaded any more."""
        self.lanes = lanes
        self._copies = copies
        self._table = copies.table
        self._lock = lock
        self._clock = clock
        self._owner = owner
        self._last_seal = 0

    # -- sealing --------------------------------------------------------------------------------

    def seal(self, ids: Ids) -> None:
        """Have the checksums of those of READY ``ids`` computed that no move under way computes."""
        unknown = self._table.checksums[ids] < FIRST_CHECKSUM
        if self.moves:
            unknown &= ~np.isin(ids, np.concatenate([move.ids for move in self.moves]))
        if not self._copies.on_host.all():
            unknown &= self._copies.on_host[self._copies.where(ids)[0]]
        ids = ids[unknown]
        if not len(ids):
            return
        self._last_seal = seal = self._last_seal % (FIRST_CHECKSUM - 1) + 1
        self._table.checksums[ids] = seal
        if not self.lanes.memory.submit(partial(self._run_seal, seal, ids)):
            self._table.checksums[ids] = NO_CHECKSUM
            self._copies.counts["unsealed_blocks",] += len(ids)

    def _run_seal(self, seal: int, ids: Ids) -> None:
        """Compute checksums (no lock held), and record them for the blocks that are still there.

        A row keeps the seal's number until it is freed, or a move has recorded the checksum; until
        then its bytes stay where they are, since only such a move could let go of them.
        """
        with self._lock:
            ids = ids[self._table.checksums[ids] == seal]
            if not len(ids):
                return
            tiers, offsets = self._copies.where(ids)
            block_bytes = self._copies.size(self._copies.class_of(ids[0])).block_bytes
        sums = checksums(self._copies.tiers, tiers, offsets, block_bytes)
        with self._lock:
            left = self._table.checksums[ids] == seal
            self._table.checksums[ids[left]] = sums[left]

    # -- moving ---------------------------------------------------------------------------------

    def under_way(self, target: int) -> Ids:
        """Return the blocks that are being copied to tier ``target``."""
        ids = [move.ids for move in self.moves if move.target == target]
        return np.concatenate(ids) if ids else np.empty(0, np.int32)

    def queue(self, source: int, ids: Ids | None = None) -> Queue:
        """Moves from tier ``source`` that are under way: all, or up to the last one with any of ``ids``."""
        moves = [move for move in self.moves if move.source == source]
        if ids is not None:
            mine = [at for at, move in enumerate(moves) if np.isin(move.ids, ids).any()]
            moves = moves[: max(mine, default=-1) + 1]
        return Queue(len(moves), sum(self._copies.bytes_of(source, move.ids) for move in moves))

    def move(
        self, ids: Ids, source: int, target: int, path: Path, *, drop_source: bool = False
    ) -> int | None:
        """Start copying READY ``ids`` of ``path`` to tier ``target``, the first ones first.

        Returns:
            How many found room there, or None when the mover takes no more moves now.
        """
        ids = ids[~np.isin(ids, self.under_way(target))]
        if not len(ids):
            return 0
        durable = self._copies.num_memory in (source, target)
        num_bytes = self._copies.bytes_of(target, ids)
        step = max(1, PIECE_BYTES * len(ids) // num_bytes) if durable else len(ids)
        room = self._lane(source, target).room()
        if not room:
            return None
        ids = ids[: room * step]
        known = path.tree.match(path.key).block_ids() if durable else ids
        origin = self._origin(ids, known, path) if durable else None  # before anything is evicted
        self._copies.pin(known)  # what leads to blocks is not let go of to make room for them
        offsets = self._owner.slots_for(target, ids)
        moving = ids[: len(offsets)]
        self._copies.pin(moving)
        self._copies.unpin(known)
        started = 0
        for start in range(0, len(moving), step):
            part = slice(start, min(start + step, len(moving)))
            move = self._move(moving[part], source, target, offsets[part], drop_source=drop_source)
            self._name(move, path, origin and origin.take(part))
            started += len(move.ids) if self._start(move) else 0
        return started if started or not len(moving) else None

    def relocate(self, ids: Ids, index: int, offsets: NDArray[np.int64]) -> bool:
        """Start copying ``ids`` to slots of the same memory tier, whose arena gave ``offsets`` out for them.

        Returns:
            Whether that is over already, and worked.
        """
        self._copies.pin(ids)
        classes, moves = self._table.size_classes[ids], []
        for size_class in np.unique(classes).tolist():
            mine = classes == size_class
            self._copies.count_use(index, size_class, int(mine.sum()))
            moves.append(self._move(ids[mine], index, index, offsets[mine], drop_source=False))
        started = [self._start(move) for move in moves]
        return all(started) and not any(move in self.moves for move in moves)

    def _move(
        self, ids: Ids, source: int, target: int, offsets: NDArray[np.int64], *, drop_source: bool
    ) -> Move:
        starts = self._copies.offsets(source, ids)
        block_bytes = self._copies.size(self._copies.class_of(ids[0])).block_bytes
        return Move(ids, source, starts, target, offsets, block_bytes, drop_source)

    def _name(self, move: Move, path: Path, origin: Origin | None) -> None:
        """Say what the blocks of ``move`` are."""
        move.path, move.origin = path, origin
        if origin is not None:
            checksums, differs = self._table.checksums[move.ids], self._table.differs[move.ids]
            move.known = np.where(differs, np.uint64(NO_CHECKSUM), checksums)

    def _origin(self, ids: Ids, known: Ids, path: Path) -> Origin:
        """Say where in the prompt the blocks ``ids`` stand; ``known`` are all of ``path``."""
        order = np.argsort(known)
        places = order[np.searchsorted(known, ids, sorter=order)]
        prompt = Prompt(path.tree.namespace, path.key)
        return Origin(prompt, places, self._copies.are_plain(ids))

    def _lane(self, source: int, target: int) -> Mover:
        if source == self._copies.num_memory:
            return self.lanes.loads
        return self.lanes.stores if target == self._copies.num_memory else self.lanes.memory

    def _start(self, move: Move) -> bool:
        """Hand ``move``, whose blocks are pinned, to the mover; undo it when that refuses."""
        self.moves[move] = None
        started = False
        try:
            started = self._lane(move.source, move.target).submit(partial(self._run, move))
        finally:
            if not started:
                self._finish(move, None)
                self._copies.unpin(move.ids)
        return started

    def _run(self, move: Move) -> None:
        """Copy the bytes of ``move`` (no lock held), then apply the result."""
        outcome, began = None, self._clock()
        try:
            if not (self.is_closing and move.source == self._copies.num_memory):
                outcome = copy_blocks(move, self._copies.tiers)
        except Exception:  # whatever a device or driver raises: the blocks stay where they were
            logger.exception("moving %d blocks failed", len(move.ids))
        whole = outcome is not None and bool(outcome.copied.all())
        seconds = self._clock() - began if whole else None
        with self._lock:
            arrived = self._finish(move, outcome)
            self._owner.ended(move, arrived, seconds)
            refused = outcome is not None and outcome.refused.any()
            again = self._again(move, outcome.refused) if outcome and refused else None
            self._copies.unpin(move.ids)
            self.seal(self._unsealed(move.ids))
        if again is not None:
            self._run(again)

    def _finish(self, move: Move, outcome: Outcome | None) -> Ids:
        """End ``move``, but for the references; return what arrived: the bytes are what their writer wrote."""
        self.moves.pop(move, None)
        copies, ids = self._copies, move.ids
        arrived = self._arrived(move, outcome)
        refused = np.zeros(len(ids), bool) if outcome is None else outcome.refused
        alone = self._table.refs[ids] == 1  # a block that others use stays where it is
        if move.source == move.target:
            arrived &= alone
            copies.drop(move.source, ids[arrived])
        copies.give_back(move.target, ids[~arrived], move.target_offsets[~arrived])
        copies.put(move.target, ids[arrived], move.target_offsets[arrived])
        names = copies.tiers[move.source].name, copies.tiers[move.target].name
        copies.counts["moved_blocks", *names] += int(arrived.sum())
        copies.counts["failed_moves", *names] += int((~arrived & ~refused).sum())
        if move.drop_source:
            copies.drop(move.source, ids[arrived & alone])
        if outcome is not None and outcome.lost.any():
            self._lose(ids[outcome.lost], move)
        return ids[arrived]

    def _unsealed(self, ids: Ids) -> Ids:
        """Return those of ``ids`` that nobody has sealed, as they were being moved at that time."""
        there = self._copies.in_memory(ids) & (self._table.states[ids] == BlockState.READY)
        unsealed: Ids = ids[there & (self._table.checksums[ids] == NO_CHECKSUM)]
        return unsealed

    def _again(self, move: Move, refused: NDArray[np.bool_]) -> Move | None:
        """Return the next move, at once: of those blocks of ``move`` that their codec refused, as they are."""
        refused = refused & (self._table.states[move.ids] == BlockState.READY)
        refused &= ~self._copies.have(move.target, move.ids)
        places = np.flatnonzero(refused)
        if move.path is None or move.origin is None or not len(places):
            return None
        known = move.path.tree.match(move.path.key).block_ids()
        self._copies.pin(known)
        offsets = self._owner.refused(move.target, move.ids[places], move.path)
        places = places[: len(offsets)]
        self._copies.pin(move.ids[places])
        self._copies.unpin(known)
        if not len(places):
            return None
        again = self._move(move.ids[places], move.source, move.target, offsets, drop_source=False)
        self._name(again, move.path, move.origin.take(places).as_plain())
        self.moves[again] = None
        return again

    def _arrived(self, move: Move, outcome: Outcome | None) -> NDArray[np.bool_]:
        """Which blocks of ``move`` may be used at their target; corrupt ones are discarded."""
        ids, table = move.ids, self._table
        if outcome is None:
            return np.zeros(len(ids), bool)
        wanted = table.states[ids] == BlockState.READY
        if (
            move.source != move.target
        ):  # or another writer has brought it meanwhile, with its own checksum
            wanted &= ~self._copies.have(move.target, ids)
        sums, known = outcome.checksums, table.checksums[ids]
        hashed = sums != NO_CHECKSUM
        fresh = known < FIRST_CHECKSUM
        fresh |= outcome.changed
        right = fresh | ~hashed | (known == sums)
        new = fresh & hashed & wanted
        table.checksums[ids[new]] = sums[new]
        if (wrong := wanted & ~right).any():
            self._owner.discard_corrupt(ids[wrong], move.path)
        arrived: NDArray[np.bool_] = outcome.copied & right & wanted
        return arrived

    def _lose(self, ids: Ids, move: Move) -> None:
        """Let go of copies that cannot be read where ``move`` came from, and of blocks that have no other."""
        ids = ids[self._table.states[ids] == BlockState.READY]
        ids = ids[self._copies.have(move.source, ids)]
        spare = self._copies.spare(ids)
        self._copies.drop(move.source, ids[spare])
        self._owner.discard_corrupt(ids[~spare], move.path)
