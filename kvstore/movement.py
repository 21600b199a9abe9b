"""Copies of blocks on their way between tiers: sealing, writing through, loading, writing back.

A block is *resident* while at least one tier has a copy of it. Tiers are ordered from the fastest down,
all memory before the disk. A block committed above the last memory tier is copied one tier down in the
background (write-through), so that evicting it later is only forgetting a copy. To the disk goes, as its
rules say (:class:`kvstore.tiers.rules.DiskRules`), what was used again, and what is about to be evicted; never
more bytes a second than the budget allows, and never what would be loaded more slowly than computed.

What a request wants and only the disk has is loaded into the last memory tier, leading blocks first, in
pieces, each of which counts as soon as it is there. Requests for the same blocks share one load.

A block becomes visible before its checksum is known: a *seal* computes it in the background, where no
move under way does so anyway. Seals hold no reference, so that they never keep a slot from a writer:
the row says by the seal's number that it is still the block that the seal was made for.

All methods are called with the pool's lock held, except the copying part of a move and the hashing part of
a seal, which run on movers.
"""

from __future__ import annotations

import logging
from collections import Counter
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from kvstore.blocks import FIRST_CHECKSUM, NO_CHECKSUM, NO_SLOT, BlockState
from kvstore.stats import DiskStats
from kvstore.tiers.arena import ALIGNMENT
from kvstore.tiers.moves import Move, Origin, Path, Prompt, checksums, copy_blocks

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from threading import RLock

    from numpy.typing import NDArray

    from kvstore.blocks import BlockTable, Ids
    from kvstore.lifetimes import Lifetimes
    from kvstore.namespace import Namespace
    from kvstore.parts import Parts
    from kvstore.tiers.mover import Lanes, Mover
    from kvstore.tiers.moves import Outcome
    from kvstore.tiers.rules import DiskRules
    from kvstore.tiers.tier import Tier, Trees
    from radix import Node

logger = logging.getLogger(__name__)

PIECE_BYTES = 32 << 20
"""A move from or to the disk has about so much."""

MAX_LOAD_BLOCKS = 2048
"""Blocks that one call makes room for; whoever asks again gets the next ones."""

MAX_PROBE_BLOCKS = 8
"""Blocks that are loaded to measure a disk that seemed too slow."""

STUCK_S = 2.0
"""A disk that has not finished a piece for so long is not waited for."""

WRITE_BACK_FROM = 0.9
"""Share of a memory tier in use from which what would be evicted next is written to the disk."""
WRITE_BACK_BYTES = 0.1
"""Share of the tier that is looked at then."""
WRITE_BACK_NODES = 256
WRITE_BACK_S = 1.0
"""Seconds between two such looks."""


@dataclass(eq=False)
class Refill:
    """Slots in a memory tier for blocks that only the disk has."""

    ids: Ids
    positions: NDArray[np.intp]
    """Places in the prompt, in blocks."""
    tier: int
    offsets: NDArray[np.int64]


NO_REFILL = Refill(np.empty(0, np.int32), np.empty(0, np.intp), 0, np.empty(0, np.int64))


class Reach(NamedTuple):
    """How far a lease of a prompt would go."""

    num_blocks: int
    cause: str = ""
    """Why no further: ``off`` or ``not_worth_loading``."""
    detail: str = ""
    """The same for people; empty where the cause says all."""


class Coming(NamedTuple):
    """Blocks behind those that memory has, which are being loaded."""

    num_blocks: int
    ready_in_s: float
    """Expected seconds until all of them are there."""
    left_blocks: int = 0
    """Blocks behind these that stay where they are."""
    cause: str = ""
    """Why they do: ``off``, ``not_worth_loading`` or ``no_room``."""
    is_old: bool = True
    """Whether the index may have changed meanwhile."""


NOTHING_COMES = Coming(0, 0.0, is_old=False)


def engine_of(namespace: Namespace) -> bytes:
    """Name what decides how fast a prompt is computed: whose it is does not matter."""
    return namespace.model + namespace.layout.fingerprint


class Movement:
    """The half of :class:`kvstore.residency.Residency` that moves."""

    tiers: tuple[Tier, ...]
    table: BlockTable
    moves: set[Move]
    parts: Parts
    counts: Counter[tuple[str, ...]]
    trees: Trees
    lifetimes: Lifetimes
    rules: DiskRules | None
    """Of the disk, where there is one."""
    _size_classes: list[tuple[int, tuple[int, ...], str]]
    """By number: bytes of a block, and of its slot in each tier; group of tenants that it belongs to."""
    _lanes: Lanes
    _lock: RLock
    _clock: Callable[[], float]
    _on_host: NDArray[np.bool_]
    _num_memory: int
    """Memory tiers, which come first."""
    _last_seal = 0
    _probes = 0
    _loads_in_a_row: list[tuple[int, float]]
    """Bytes and seconds of loads that the planner was not told of."""
    _loading_since_s = 0.0
    """When the load under way began, or the one before it ended."""
    _written_back_at_s = float("-inf")

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
        if not self._lanes.memory.submit(partial(self._run_seal, seal, ids)):
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
            block_bytes = self._size_classes[int(self.table.size_classes[ids[0]])][0]
        sums = checksums(self.tiers, tiers, offsets, block_bytes)
        with self._lock:
            left = self.table.checksums[ids] == seal
            self.table.checksums[ids[left]] = sums[left]

    # -- what moves where -----------------------------------------------------------------------

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
            here = ready[self.table.slots[index, ready] != NO_SLOT]
            self.move(here, index, index + 1, path)
        if self.rules and self.rules.admission == "always":
            self._store(ready, path)
        self._seal(ready)
        self._write_back()
        return ready

    def spread(self, ids: Ids, path: Path) -> None:
        """Copy READY blocks, which were used, one tier up from where they are, and those without one down.

        Leading blocks first; one that is under way already is not moved again. Each of ``ids`` has a
        reference, and the policies of all tiers know its node.
        """
        ids = ids[self.table.states[ids] == BlockState.READY]
        tiers, _ = self.where(ids)
        for index in range(self._num_memory):
            here = ids[tiers == index]
            if index:
                self.move(here, index, index - 1, path)
            if index + 1 < self._num_memory:
                only = here[(self.table.slots[index + 1 :, here] == NO_SLOT).all(axis=0)]
                self.move(only, index, index + 1, path)
        self._store(ids, path)

    def load(self, ids: Ids, path: Path) -> Coming:
        """Start loading those of READY ``ids`` that no memory has, as far as that is worth it.

        Args:
            ids: leading blocks of a prompt, all from its first one on; the policies of all tiers know
                their nodes. Each has a reference.
            path: the prompt.

        Returns:
            What comes behind the leading blocks that memory has.
        """
        start, rules = self.num_in_memory(ids), self.rules
        if start == len(ids) or rules is None:
            return NOTHING_COMES
        name = self.tiers[-1].name
        covered, cause, _ = self.reach(ids, path.tree.namespace)
        wanted = ids[start:covered]
        if not len(wanted):
            if cause == "not_worth_loading" and rules.planner.probe(name):
                self._probes += 1  # of different sizes, to tell latency and bandwidth apart
                self._fetch(ids[start : start + 1 + self._probes % MAX_PROBE_BLOCKS], path)
            return Coming(0, 0.0, len(ids) - start, cause)
        wanted = wanted[:MAX_LOAD_BLOCKS]
        self._write_back()
        self._fetch(wanted, path)
        landing = self._under_way(self._num_memory - 1)
        there = self._in_memory(wanted) | np.isin(wanted, landing)
        num_coming = len(wanted) if there.all() else int(there.argmin())
        left = len(ids) - start - num_coming
        cause = cause if start + num_coming == covered else "no_room"
        if self._in_memory(wanted[:num_coming]).all():
            return Coming(0, 0.0, left, cause)
        ready_in_s = rules.planner.wait_s(name, self._queued_bytes())
        return Coming(num_coming, ready_in_s, left, cause)

    def reach(self, ids: Ids, namespace: Namespace) -> Reach:
        """Say how many of READY ``ids``, the leading blocks of a prompt, a lease would cover.

        Those that memory has, and of those behind them what is worth waiting for. Moves nothing.
        """
        start = self.num_in_memory(ids)
        disk, rules, rest = self.tiers[-1].disk, self.rules, ids[start:]
        if disk is None or rules is None or not len(rest):
            return Reach(len(ids))
        if not disk.readable or self._is_stuck():
            return Reach(start, "off")
        slot_size = self._slot_size(len(self.tiers) - 1, int(self.table.size_classes[rest[0]]))
        landing = np.isin(rest, self._under_way(self._num_memory - 1))
        absent = np.flatnonzero(~landing & ~self._in_memory(rest))
        if not len(absent):  # what is landing was found worth it before others queued behind it
            return Reach(len(ids))
        width = namespace.layout.block_tokens
        plan = rules.planner.plan(
            engine_of(namespace),
            width,
            (start + int(absent[0])) * width,
            slot_size,
            self.tiers[-1].name,
            len(absent),
            max(0, self._queued_bytes() - int(landing.sum()) * slot_size),
        )
        if plan.num_blocks == len(absent):
            return Reach(len(ids))
        rate = rules.planner.expected(self.tiers[-1].name)[1]
        detail = (
            f"computing it takes {plan.prefill_s:.3g} s, less than to load {len(absent) * slot_size} bytes "
            f"at {rate / 1e6:.0f} MB/s"
        )
        return Reach(start + int(absent[plan.num_blocks]), "not_worth_loading", detail)

    def _is_stuck(self) -> bool:
        """Whether a load under way has taken so long that nobody should wait for others."""
        if not self._queued_bytes() or self.rules is None:
            return False
        expected_s = self.rules.planner.load_s(self.tiers[-1].name, PIECE_BYTES)
        return self._clock() > self._loading_since_s + max(STUCK_S, 8 * expected_s)

    def _fetch(self, ids: Ids, path: Path) -> None:
        """Start moving those of ``ids`` that only the disk has into the last memory tier."""
        self.move(ids[~self._in_memory(ids)], len(self.tiers) - 1, self._num_memory - 1, path)

    def _store(self, ids: Ids, path: Path) -> bool:
        """Start writing READY ``ids`` to the disk, first ones first: what is worth it, and allowed.

        What will expire is not written: after a restart it would be there for ever.

        Returns:
            Whether all that the disk may have is there, or on its way.
        """
        index, rules = len(self.tiers) - 1, self.rules
        name, disk = self.tiers[index].name, self.tiers[index].disk
        if disk is None or rules is None:
            return True
        slots = self.table.slots[:, ids]
        ids = ids[(slots[index - 1] != NO_SLOT) & (slots[index] == NO_SLOT)]
        ids = ids[~np.isin(ids, self._under_way(index))]
        ids = ids[self.lifetimes.lasting(ids)]
        if not len(ids):
            return True
        slot_size = self._slot_size(index, int(self.table.size_classes[ids[0]]))
        reason, allowed = "off", 0
        if disk.writable:
            reason = "not_worth_loading"
            if self._will_be_loaded(path, slot_size):
                reason = "budget"
                allowed = rules.budget.take(len(ids), slot_size)
        self.counts["unstored_blocks", name, reason] += len(ids) - allowed
        moved = self.move(ids[:allowed], index - 1, index, path) or 0
        rules.budget.give_back(allowed - moved, slot_size)
        self.counts["unstored_blocks", name, "busy"] += allowed - moved
        return moved == len(ids)

    def _will_be_loaded(self, path: Path, slot_size: int) -> bool:
        """Whether a prompt on disk would be loaded, as far as that can be told: before any load it is tried."""
        assert self.rules is not None
        planner, name, namespace = self.rules.planner, self.tiers[-1].name, path.tree.namespace
        length, width = len(path.key) // namespace.key_bytes, namespace.layout.block_tokens
        plan = planner.plan(engine_of(namespace), width, 0, slot_size, name, length)
        untried = planner.mode == "auto" and not planner.is_measured(name)
        return plan.num_blocks > 0 or untried

    def _write_back(self) -> None:
        """Start writing to the disk what the last memory tier would evict next, where that tier is nearly full.

        What the disk has is only forgotten when its turn comes, so that writers need not wait.
        """
        index = self._num_memory - 1
        arena, now = self.tiers[index].arena, self._clock()
        if self.rules is None or self.rules.admission != "value":
            return
        if arena.used_bytes < WRITE_BACK_FROM * arena.capacity_bytes:
            return
        if now < self._written_back_at_s + WRITE_BACK_S:
            return
        self._written_back_at_s = now
        left = WRITE_BACK_BYTES * arena.capacity_bytes
        for node in list(islice(self.tiers[index].policy, WRITE_BACK_NODES)):
            if left <= 0 or not self._lanes.stores.has_room():
                return
            left -= self.bytes_of(
                index, node.blocks[self.table.slots[index, node.blocks] != NO_SLOT]
            )
            self._store_node(node)

    def _store_node(self, node: Node) -> bool:
        """Start writing what only memory has of ``node``, and of what leads to it, to the disk.

        Returns:
            Whether all of it is there, or on its way.
        """
        index = self._num_memory
        if node.parent is None or (self.table.slots[index, node.blocks] != NO_SLOT).all():
            return True  # gone, to make room for others, or there
        ids = np.concatenate([step.blocks for step in node.path()])
        if node not in self.tiers[index].policy:
            self.tiers[index].policy.arrive(node.path())
        self.pin(ids)  # or the disk could let go of what leads to these blocks
        stored = self._store(self._leading_ready(ids), self._path_of(node))
        self.unpin(ids)
        return stored

    def unkept(self) -> list[Node]:
        """Nodes that the disk is to have before the end: recently used ones first, parents before children."""
        if self.rules is None or self.rules.admission == "second_use":
            return []
        return list(self.tiers[self._num_memory - 1].policy)[::-1]

    def keep(self, node: Node) -> bool | None:
        """Do as :meth:`_store_node`, for a node that may be gone; None: later, too many moves wait."""
        return self._store_node(node) if self._lanes.stores.has_room() else None

    def _path_of(self, node: Node) -> Path:
        tree = node.tree
        return Path(tree, tree.prefix(node))  # type: ignore[arg-type]

    # -- looking on -----------------------------------------------------------------------------

    def disk_counts(self) -> Counter[tuple[str, ...]]:
        """Return what the disk counts, by the names of :data:`kvstore.metrics.COUNTERS`."""
        disk, counts = self.tiers[-1].disk, Counter[tuple[str, ...]]()
        if disk is not None:
            for (name, *labels), count in disk.counts.items():
                if name == "read_blocks":
                    counts["disk_reads", *labels] = count
            for (side, reason), count in disk.troubles.items():
                counts["disk_troubles", side, reason] = count
        return counts

    def disk_stats(self) -> DiskStats | None:
        """Say how the disk does."""
        disk, rules = self.tiers[-1].disk, self.rules
        if disk is None or rules is None:
            return None
        latency_s, bytes_per_s = rules.planner.expected(self.tiers[-1].name)
        off = disk.off
        return DiskStats(off["read"], off["write"], latency_s, bytes_per_s, disk.slots.bad_bytes)

    # -- moving ---------------------------------------------------------------------------------

    def move(
        self, ids: Ids, source: int, target: int, path: Path, *, drop_source: bool = False
    ) -> int | None:
        """Start copying READY ``ids`` to tier ``target``, the first ones first.

        Returns:
            How many found room there, or None when the mover takes no more moves now.
        """
        ids = ids[~np.isin(ids, self._under_way(target))]
        if not len(ids):
            return 0
        size_class = int(self.table.size_classes[ids[0]])
        durable = self._num_memory in (source, target)
        step = max(1, PIECE_BYTES // self._slot_size(target, size_class)) if durable else len(ids)
        room = self._lane(source, target).room()
        if not room:
            return None
        ids = ids[: room * step]
        origin = self._origin(ids, path) if durable else None  # before anything is evicted
        self.pin(ids)
        offsets = self._take_slots(target, size_class, len(ids))
        moving, rest = ids[: len(offsets)], ids[len(offsets) :]
        self.unpin(rest)
        started = 0
        for start in range(0, len(moving), step):
            part = slice(start, min(start + step, len(moving)))
            move = self._move(moving[part], source, target, offsets[part], drop_source=drop_source)
            move.path = path
            if origin is not None:
                move.origin = origin.take(part)
                move.known = np.where(
                    self.table.differs[move.ids], NO_CHECKSUM, self.table.checksums[move.ids]
                )
            started += len(move.ids) if self._start(move) else 0
        return started if started or not len(moving) else None

    def _origin(self, ids: Ids, path: Path) -> Origin:
        """Say where in the prompt the blocks ``ids`` of ``path``, all of which are indexed, stand."""
        known = path.tree.match(path.key).block_ids()
        order = np.argsort(known)
        places = order[np.searchsorted(known, ids, sorter=order)]
        return Origin(Prompt(path.tree.namespace, path.key), places)

    def _move(
        self, ids: Ids, source: int, target: int, offsets: NDArray[np.int64], *, drop_source: bool
    ) -> Move:
        starts = self.table.slots[source, ids].astype(np.int64) * ALIGNMENT
        size_class = int(self.table.size_classes[ids[0]])
        return Move(ids, source, starts, target, offsets, size_class, drop_source)

    def _lane(self, source: int, target: int) -> Mover:
        if source == self._num_memory:
            return self._lanes.loads
        return self._lanes.stores if target == self._num_memory else self._lanes.memory

    def _start(self, move: Move) -> bool:
        """Hand ``move``, whose blocks are pinned, to the mover; undo it when that refuses."""
        if move.source == self._num_memory and not self._queued_bytes():
            self._loading_since_s = self._clock()
        self.moves.add(move)
        started = False
        try:
            started = self._lane(move.source, move.target).submit(partial(self._run, move))
        finally:
            if not started:
                self._finish(move, None)
        return started

    def _under_way(self, target: int) -> Ids:
        ids = [move.ids for move in self.moves if move.target == target]
        return np.concatenate(ids) if ids else np.empty(0, np.int32)

    def _queued_bytes(self) -> int:
        """Bytes that are being loaded, or wait for it."""
        moves = (move for move in self.moves if move.source == self._num_memory)
        return sum(self._slot_size(move.source, move.size_class) * len(move.ids) for move in moves)

    def _run(self, move: Move) -> None:
        """Copy the bytes of ``move`` (no lock held), then apply the result."""
        outcome, began = None, self._clock()
        try:
            outcome = copy_blocks(move, self.tiers, self._size_classes[move.size_class][0])
        except Exception:  # whatever a device or driver raises: the blocks stay where they were
            logger.exception("moving %d blocks failed", len(move.ids))
        seconds = self._clock() - began
        with self._lock:
            self._finish(move, outcome)
            if move.source == self._num_memory:
                self._loading_since_s = self._clock()
                self._tell_planner(move, seconds if outcome and outcome.copied.all() else None)

    def _tell_planner(self, move: Move, seconds: float | None) -> None:
        """Note how long a load took, None if it failed: with those in a row with it, unless it was slow."""
        assert self.rules is not None
        planner, name, row = self.rules.planner, self.tiers[-1].name, self._loads_in_a_row
        slow = False
        if seconds is not None:
            num_bytes = self._slot_size(move.source, move.size_class) * len(move.ids)
            row.append((num_bytes, seconds))
            slow = seconds > 2 * planner.load_s(name, num_bytes)
        if row and (seconds is None or slow or not self._queued_bytes()):
            planner.loaded(name, *map(sum, zip(*row, strict=True)), loads=len(row))
            row.clear()

    def _finish(self, move: Move, outcome: Outcome | None) -> None:
        """End ``move``: a block counts as arrived when its bytes are what its writer wrote."""
        self.moves.discard(move)
        ids, table = move.ids, self.table
        arrived = self._arrived(move, outcome)
        alone = table.refs[ids] == 1  # a block that others use stays where it is
        if move.source == move.target:
            arrived &= alone
            self.drop_copies(ids[arrived], move.source)
        arena = self.tiers[move.target].arena
        slot_size = self._slot_size(move.target, move.size_class)
        arena.release(slot_size, move.target_offsets[~arrived])
        self._count_use(move.target, move.size_class, -int((~arrived).sum()))
        table.slots[move.target, ids[arrived]] = move.target_offsets[arrived] // ALIGNMENT
        names = self.tiers[move.source].name, self.tiers[move.target].name
        self.counts["moved_blocks", *names] += int(arrived.sum())
        self.counts["failed_moves", *names] += int((~arrived).sum())
        if move.drop_source:
            self.drop_copies(ids[arrived & alone], move.source)
        always = self.rules is not None and self.rules.admission == "always"
        if always and move.source < move.target == self._num_memory - 1 and move.path is not None:
            self._store(ids[arrived & (table.states[ids] == BlockState.READY)], move.path)
        if move.source == self._num_memory:
            table.loaded[ids[arrived]] = True
            table.differs[ids[arrived]] = False
            if outcome is not None and outcome.lost.any():
                self._lose(ids[outcome.lost], move.source)
        self.unpin(ids)

    def _arrived(self, move: Move, outcome: Outcome | None) -> NDArray[np.bool_]:
        """Which blocks of ``move`` may be used at their target; corrupt ones are discarded."""
        ids, table = move.ids, self.table
        if outcome is None:
            return np.zeros(len(ids), bool)
        sums, known = outcome.checksums, table.checksums[ids]
        hashed = sums != NO_CHECKSUM
        fresh = known < FIRST_CHECKSUM
        fresh |= outcome.changed
        right = fresh | ~hashed | (known == sums)
        table.checksums[ids[fresh & hashed]] = sums[fresh & hashed]
        if not right.all():
            self.discard_corrupt(list(self._nodes()), ids[~right])
        missing = table.slots[move.target, ids] == NO_SLOT
        ready = table.states[ids] == BlockState.READY
        there = missing | (move.source == move.target)
        arrived: NDArray[np.bool_] = outcome.copied & right & ready & there
        return arrived

    def _lose(self, ids: Ids, index: int) -> None:
        """Let go of copies in tier ``index`` that cannot be read, and of blocks that have no other."""
        ids = ids[(self.table.states[ids] == BlockState.READY)]
        ids = ids[self.table.slots[index, ids] != NO_SLOT]
        spare = (self.table.slots[:, ids] != NO_SLOT).sum(axis=0) > 1
        self.drop_copies(ids[spare], index)
        self.discard_corrupt(list(self._nodes()), ids[~spare])

    # -- of the other half ----------------------------------------------------------------------

    if TYPE_CHECKING:

        def where(self, ids: Ids) -> tuple[NDArray[np.int8], NDArray[np.int64]]: ...  # noqa: D102
        def pin(self, ids: Ids) -> None: ...  # noqa: D102
        def unpin(self, ids: Ids) -> None: ...  # noqa: D102
        def num_in_memory(self, ids: Ids) -> int: ...  # noqa: D102
        def drop_copies(self, ids: Ids, index: int) -> None: ...  # noqa: D102
        def discard_corrupt(self, nodes: list[Node], ids: Ids) -> None: ...  # noqa: D102
        def _take_slots(self, index: int, size_class: int, count: int) -> NDArray[np.int64]: ...
        def _count_use(self, index: int, size_class: int, count: int) -> None: ...
        def _slot_size(self, index: int, size_class: int) -> int: ...
        def _in_memory(self, ids: Ids) -> NDArray[np.bool_]: ...
        def bytes_of(self, index: int, ids: Ids) -> int: ...  # noqa: D102
        def _nodes(self) -> Iterator[Node]: ...
        def _leading_ready(self, ids: Ids) -> Ids: ...
