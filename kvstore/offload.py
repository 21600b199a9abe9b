"""What goes to the disk, and what comes from there, and when.

A block is *resident* while at least one tier has a copy of it; the disk comes last. To it goes, as its rules
say (:class:`kvstore.tiers.rules.DiskRules`), what was used again, and what is about to be evicted; never
more bytes a second than the budget allows, and never what would be loaded more slowly than computed.

What a request wants and only the disk has is loaded into the last memory tier, leading blocks first, in
pieces, each of which counts as soon as it is there. Requests for the same blocks share one load.

How fast the disk reads is measured by every load; where it is read past the page cache, also before the first
one, by reading some of its blocks into nowhere: nobody waits for a slow disk to find out.

All methods are called with the pool's lock held, but for :meth:`Offload.keep`.
"""

from __future__ import annotations

import logging
from collections import Counter
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Literal, NamedTuple

import numpy as np

from kvstore.blocks import NO_SLOT, BlockState
from kvstore.movement import PIECE_BYTES
from kvstore.planner import Queue
from kvstore.stats import DiskStats
from kvstore.tiers.arena import ALIGNMENT
from kvstore.tiers.moves import Path

if TYPE_CHECKING:
    from collections.abc import Callable
    from threading import RLock

    from numpy.typing import NDArray

    from kvstore.blocks import Ids
    from kvstore.copies import Copies
    from kvstore.movement import Movement
    from kvstore.namespace import Namespace
    from kvstore.planner import Planner
    from kvstore.tiers.moves import Move
    from radix import Node

logger = logging.getLogger(__name__)

MAX_LOAD_BLOCKS = 2048
"""Blocks that one call makes room for; whoever asks again gets the next ones."""

MAX_PROBE_BLOCKS = 8
"""Blocks that are loaded to measure a disk that seemed too slow."""

TRIAL_BYTES = 4 << 20
"""What is read into nowhere to measure a disk before its first load."""

STUCK, STUCK_S = 3, 0.1
"""A disk that takes so many times what is expected for a piece, and so long, is not waited for."""
ALWAYS = 20
"""Times that, where everything is loaded whatever it takes."""

MIN_TRIAL_BYTES = 1 << 20
"""Less than this says little of how fast the disk is: more is read when there is more."""
MAX_TRIALS = 8
TRIES = 3
"""Reads of a trial, of which the fastest counts: others may have waited for writes."""

MAX_ROW = 16
"""Loads, one after another, of which the planner is told together."""

WRITE_BACK_FROM = 0.9
"""Share of a memory tier in use from which what would be evicted next is written to the disk."""
WRITE_BACK_BYTES = 0.1
"""Share of the tier that is looked at then."""
WRITE_BACK_NODES = 256
WRITE_BACK_S = 1.0
"""Seconds between two such looks."""


class Reach(NamedTuple):
    """How far a lease of a prompt would go."""

    num_blocks: int
    cause: str = ""
    """Why no further: ``off``, ``no_room`` or ``not_worth_loading``."""
    detail: str = ""
    """The same for people; empty where the cause says all."""


class Coming(NamedTuple):
    """Leading blocks that memory has, and those behind them that are being loaded."""

    ready_blocks: int
    num_blocks: int = 0
    """Those that are being loaded."""
    ready_in_s: float = 0.0
    """Expected seconds until all of them are there."""
    left_blocks: int = 0
    """Blocks behind these that stay where they are."""
    cause: str = ""
    """Why they do: ``off``, ``not_worth_loading``, ``no_room``, or ``busy``: others come first."""
    is_old: bool = True
    """Whether the index may have changed meanwhile."""


def engine_of(namespace: Namespace) -> bytes:
    """Name what decides how fast a prompt is computed: whose it is does not matter."""
    return namespace.model + namespace.layout.fingerprint


class Offload:
    """Traffic between the last memory tier and the disk; without a disk there is none."""

    def __init__(
        self, copies: Copies, movement: Movement, lock: RLock, clock: Callable[[], float]
    ) -> None:
        """Start without traffic. ``lock`` is the pool's, ``clock`` gives monotonic seconds."""
        last = copies.tiers[-1]
        self.rules = last.rules
        """Of the disk, where there is one."""
        self._disk = last.disk
        self._name = last.name
        self._index = len(copies.tiers) - 1
        self._memory = copies.num_memory - 1
        """The memory tier from which blocks go to the disk, and to which they come."""
        self._copies = copies
        self._table = copies.table
        self._movement = movement
        self._lock = lock
        self._clock = clock
        self._probes = 0
        self._trial: Literal["due", "running", "over"] = "over"
        """Whether the disk is to be measured before its first load."""
        self._trials = 0
        self._place: tuple[int, int] | None = None
        """Offset and bytes of the last trial."""
        self._row: list[tuple[int, float]] = []
        """Bytes and seconds of loads, one after another, that the planner was not told of."""
        self._loading_since_s = 0.0
        """When the load under way began, or the one before it ended."""
        self._written_back_at_s = float("-inf")
        is_direct = last.disk is not None and last.disk.is_direct
        if last.rules is not None and last.rules.planner.mode == "auto" and is_direct:
            self._trial = "due"

    # -- loading --------------------------------------------------------------------------------

    def load(self, ids: Ids, path: Path) -> Coming:
        """Start loading those of READY ``ids`` that no memory has, as far as that is worth it.

        Args:
            ids: leading blocks of a prompt, all from its first one on; the policies of all tiers know
                their nodes. Each has a reference.
            path: the prompt.
        """
        start, rules = self._copies.num_in_memory(ids), self.rules
        if start == len(ids) or rules is None:
            return Coming(len(ids))
        covered, cause, _ = self._reach(ids, start, path.tree.namespace)
        wanted = ids[start:covered]
        if not len(wanted):
            if cause == "not_worth_loading" and rules.planner.probe(self._name):
                self._probes += 1  # of different sizes, to tell latency and bandwidth apart
                self._fetch(ids[start : start + 1 + self._probes % MAX_PROBE_BLOCKS], path)
            return Coming(start, left_blocks=len(ids) - start, cause=cause)
        self.write_back()
        now = self._at_a_time(wanted)
        cause = cause if len(now) == len(wanted) else "busy"
        covered, wanted = start + len(now), now
        self._fetch(wanted, path)
        landing = self._movement.under_way(self._memory)
        there = self._copies.in_memory(wanted)
        coming = there | np.isin(wanted, landing)
        num_coming = len(wanted) if coming.all() else int(coming.argmin())
        left = len(ids) - start - num_coming
        cause = cause if start + num_coming == covered else "no_room"
        if there[:num_coming].all():
            return Coming(start + num_coming, left_blocks=left, cause=cause)
        ready_in_s = rules.planner.wait_s(self._name, self._queue(wanted[:num_coming]))
        ready = start + int(there.argmin())
        return Coming(ready, start + num_coming - ready, ready_in_s, left, cause)

    def reach(self, ids: Ids, namespace: Namespace) -> Reach:
        """Say how many of READY ``ids``, the leading blocks of a prompt, a lease would cover.

        Those that memory has, and of those behind them what is worth waiting for. Moves nothing.
        """
        return self._reach(ids, self._copies.num_in_memory(ids), namespace)

    def _reach(self, ids: Ids, start: int, namespace: Namespace) -> Reach:
        disk, rules, rest = self._disk, self.rules, ids[start:]
        if disk is None or rules is None or not len(rest):
            return Reach(len(ids))
        if not disk.readable or self.is_stuck():
            return Reach(start, "off")
        most = max(start, min(len(ids), self._most_blocks(rest)))
        reach = self._worth_waiting(ids[:most], start, rules.planner, namespace)
        return reach if reach.cause or most == len(ids) else Reach(most, "no_room")

    def _worth_waiting(self, ids: Ids, start: int, planner: Planner, namespace: Namespace) -> Reach:
        """Do as :meth:`reach`; memory has ``start`` of ``ids``."""
        rest, width, engine = ids[start:], namespace.layout.block_tokens, engine_of(namespace)
        if self._trial == "running" and not planner.is_measured(self._name):
            return Reach(start, "not_worth_loading", "the disk is being measured")
        landing = np.isin(rest, self._movement.under_way(self._memory))
        absent = ~landing & ~self._copies.in_memory(rest)
        sizes = np.where(absent, self._copies.slot_sizes(self._index, rest), 0)
        coming_s = planner.wait_s(self._name, self._queue(rest)) if landing.any() else 0.0
        loads, queued_bytes = self._queue()
        pieces = int(sizes.sum()) // PIECE_BYTES  # each but the last has a latency of its own
        plan = planner.plan(
            engine,
            width,
            start * width,
            sizes,
            self._name,
            len(rest),
            Queue(loads + pieces, queued_bytes),
            ready_s=np.maximum.accumulate(landing) * coming_s,
        )
        if plan.num_blocks == len(rest):
            return Reach(len(ids))
        rate = planner.expected(self._name)[1]
        detail = (
            f"computing it takes {plan.prefill_s:.3g} s, less than to load {sizes.sum()} bytes "
            f"behind {queued_bytes} others at {rate / 1e6:.0f} MB/s"
        )
        return Reach(start + plan.num_blocks, "not_worth_loading", detail)

    def _most_blocks(self, ids: Ids) -> int:
        """How many blocks like ``ids`` the memory holds into which they are loaded, by its size and quotas."""
        size = self._copies.size(self._copies.class_of(ids[0]))
        slot_size = size.slot_bytes[self._memory]
        most = self._copies.tiers[self._memory].arena.capacity_slots(slot_size)
        ceiling_bytes = self._copies.quotas.ceiling_bytes(size.group)
        return most if ceiling_bytes is None else min(most, ceiling_bytes // slot_size)

    def is_stuck(self) -> bool:
        """Whether a load under way has taken so long that nobody should wait for others."""
        if self.rules is None or not self._queue().loads:
            return False
        expected_s = self.rules.planner.load_s(self._name, PIECE_BYTES)
        limit_s = max(STUCK_S, STUCK * expected_s)
        limit_s *= ALWAYS if self.rules.planner.mode == "always" else 1
        return self._clock() > self._loading_since_s + limit_s

    def _at_a_time(self, ids: Ids) -> Ids:
        """Return so many leading ``ids`` that loads which wait for others take half of the memory at most."""
        ids = ids[:MAX_LOAD_BLOCKS]
        landing = self._movement.under_way(self._memory)
        if not self._queue().loads:
            return ids
        absent = ~self._copies.in_memory(ids) & ~np.isin(ids, landing)
        free = self._copies.tiers[self._memory].arena.capacity_bytes // 2
        free -= self._copies.bytes_of(self._memory, landing)
        sizes = self._copies.slot_sizes(self._memory, ids)
        return ids[np.cumsum(absent * sizes) <= max(free, 0)]

    def _fetch(self, ids: Ids, path: Path) -> None:
        """Start moving those of ``ids`` that only the disk has into the last memory tier."""
        if not self._queue().loads:
            self._loading_since_s = self._clock()
        self._movement.move(ids[~self._copies.in_memory(ids)], self._index, self._memory, path)

    def _queue(self, ids: Ids | None = None) -> Queue:
        return self._movement.queue(self._index, ids)

    # -- storing --------------------------------------------------------------------------------

    def store(self, ids: Ids, path: Path) -> bool:
        """Start writing READY ``ids`` to the disk, first ones first: what is worth it, and allowed.

        What will expire is not written: after a restart it would be there for ever.

        Returns:
            Whether all that the disk may have is there, or on its way.
        """
        disk, rules, name, copies = self._disk, self.rules, self._name, self._copies
        if disk is None or rules is None:
            return True
        ids = ids[~copies.have(self._index, ids)]
        ids = ids[~np.isin(ids, self._movement.under_way(self._index))]
        ids = ids[copies.lifetimes.lasting(ids)]
        reachable = copies.have(self._memory, ids)
        whole, ids = bool(reachable.all()), ids[reachable]
        if not len(ids):
            return whole
        sizes = copies.slot_sizes(self._index, ids)
        reason, allowed = "off", 0
        if disk.writable:
            reason = "not_worth_loading"
            if self._will_be_loaded(path, int(sizes.mean())):
                reason = "budget"
                allowed = rules.budget.take(sizes)
        copies.counts["unstored_blocks", name, reason] += len(ids) - allowed
        moved = self._movement.move(ids[:allowed], self._memory, self._index, path) or 0
        rules.budget.give_back(int(sizes[moved:allowed].sum()))
        copies.counts["unstored_blocks", name, "busy"] += allowed - moved
        return whole and moved == len(ids)

    def refused(self, before: NDArray[np.int64], after: NDArray[np.int64]) -> None:
        """Learn sizes of slots in which blocks were to be written, and of those that the first ones get."""
        assert self.rules is not None
        self.rules.budget.give_back(int(before.sum() - after.sum()))
        busy = "unstored_blocks", self._name, "busy"
        self._copies.counts[busy] += len(before) - len(after)

    def committed(self, ids: Ids, path: Path) -> None:
        """Store blocks that became visible, if all of them are to be."""
        if self.rules is not None and self.rules.admission == "always":
            self.store(ids[self._table.states[ids] == BlockState.READY], path)

    def _will_be_loaded(self, path: Path, slot_size: int) -> bool:
        """Whether a prompt on disk would be loaded, as far as that can be told: before any load it is tried."""
        assert self.rules is not None
        planner, namespace = self.rules.planner, path.tree.namespace
        length, width = len(path.key) // namespace.key_bytes, namespace.layout.block_tokens
        plan = planner.plan(engine_of(namespace), width, 0, slot_size, self._name, length)
        if planner.mode == "auto" and not planner.is_measured(self._name):
            return True
        if not plan.num_blocks and planner.probe(self._name):
            self._try()  # or nothing would be written any more, and no load show that it has become faster
        return plan.num_blocks > 0

    def write_back(self) -> None:
        """Start writing to the disk what the last memory tier would evict next, where that tier is nearly full.

        What the disk has is only forgotten when its turn comes, so that writers need not wait.
        """
        tier, now = self._copies.tiers[self._memory], self._clock()
        if self.rules is None or self.rules.admission != "value":
            return
        if tier.arena.used_bytes < WRITE_BACK_FROM * tier.arena.capacity_bytes:
            return
        if now < self._written_back_at_s + WRITE_BACK_S:
            return
        self._written_back_at_s = now
        left = WRITE_BACK_BYTES * tier.arena.capacity_bytes
        for node in list(islice(tier.policy, WRITE_BACK_NODES)):
            if left <= 0 or not self._movement.lanes.stores.has_room():
                return
            left -= self._copies.held_bytes(self._memory, node.blocks)
            self._store_node(node)

    def _store_node(self, node: Node) -> bool:
        """Start writing what only memory has of ``node``, and of what leads to it, to the disk.

        Returns:
            Whether all of it is there, or on its way.
        """
        if node.parent is None or self._copies.have(self._index, node.blocks).all():
            return True  # gone, to make room for others, or there
        ids = np.concatenate([step.blocks for step in node.path()])
        policy = self._copies.tiers[self._index].policy
        if node not in policy:
            policy.arrive(node.path())
        return self.store(self._copies.leading_ready(ids), Path.to(node))

    def keep(self, seconds: float) -> None:
        """Write to the disk what only memory has, but no block without those before it.

        Recently used blocks first, as the rules allow, for at most ``seconds``, and the writes under way. Takes
        the lock itself, for one node at a time.
        """
        if self.rules is None or self.rules.admission == "second_use":
            return
        until = self._clock() + seconds
        last, *faster = range(self._memory, -1, -1)
        for index in (last, *faster, last):  # the last time for what had to make room for others
            self._keep_tier(index, until)

    def _keep_tier(self, index: int, until: float) -> None:
        """Do as :meth:`keep` for what memory tier ``index`` has, until the clock says ``until``."""
        with self._lock:
            nodes = list(self._copies.tiers[index].policy)[::-1]
        left_out: set[Node] = set()
        for node in nodes:
            if self._clock() > until:
                return
            if index < self._memory:
                self._bring_down(node, index)
            if not self._movement.lanes.stores.has_room():
                self._movement.lanes.stores.drain()
            with self._lock:
                if node.parent in left_out or not self._store_node(node):
                    left_out.add(node)

    def _bring_down(self, node: Node, index: int) -> None:
        """Copy what only tier ``index`` has of ``node`` to the last memory tier."""
        for tier in range(index, self._memory):
            with self._lock:
                ids = node.blocks[self._copies.have(tier, node.blocks)]
                ids = ids[(self._table.slots[tier + 1 :, ids] == NO_SLOT).all(axis=0)]
                if node.parent is None or not len(ids):
                    return
                ids = self._copies.leading_ready(ids)
                self._copies.tiers[tier + 1].policy.arrive(node.path())
                self._movement.move(ids, tier, tier + 1, Path.to(node))
            self._movement.lanes.memory.drain()

    def forget_lastingly(self) -> None:
        """Have the disk forget for good what was let go of: a crash brings none of it back."""
        if self._disk is not None:
            self._movement.lanes.stores.submit(self._disk.flush)

    def tidy(self) -> None:
        """Have the disk forget what was let go of since it was written to last."""
        stale = self._disk is not None and self._disk.slots.num_stale > 0
        if stale and not len(self._movement.under_way(self._index)):
            self.forget_lastingly()

    # -- measuring ------------------------------------------------------------------------------

    def ended(self, move: Move, arrived: Ids, seconds: float | None) -> None:
        """Learn which blocks of ``move`` arrived, still pinned, and how long it took; None: it did not work."""
        if move.source == self._copies.num_memory:
            self._table.loaded[arrived] = True
            self._table.differs[arrived] = False
            self._loading_since_s = self._clock()
            self._tell_planner(move, seconds)
        elif move.target == self._copies.num_memory:
            self.measure(arrived)
        elif move.source < move.target == self._memory and move.path is not None:
            self.committed(arrived, move.path)

    def _tell_planner(self, move: Move, seconds: float | None) -> None:
        """Note how long a load took, None if it failed: with those in a row with it, unless it was slow."""
        assert self.rules is not None
        planner, slow = self.rules.planner, False
        if seconds is not None:
            num_bytes = self._copies.bytes_of(move.source, move.ids)
            self._row.append((num_bytes, seconds))
            slow = seconds > 2 * planner.load_s(self._name, num_bytes)
        full = len(self._row) >= MAX_ROW or not self._queue().loads
        if self._row and (seconds is None or slow or full):
            self._trial = "over"
            totals = map(sum, zip(*self._row, strict=True))
            planner.loaded(self._name, *totals, loads=len(self._row))
            self._row.clear()

    def measure(self, ids: Ids) -> None:
        """Have some of the bytes that the disk has of ``ids`` read into nowhere, until that has told enough."""
        if self._trial != "due" or not len(ids) or self._queue().loads:
            return
        sizes = self._copies.slot_sizes(self._index, ids)
        slot_size, ids = int(sizes[0]), ids[sizes == sizes[0]]
        offsets = np.sort(self._copies.offsets(self._index, ids))
        runs = np.split(offsets, np.flatnonzero(np.diff(offsets) != slot_size) + 1)
        longest = max(runs, key=len)
        self._place = int(longest[0]), min(len(longest) * slot_size, TRIAL_BYTES)
        self._try()

    def _try(self) -> None:
        """Start a trial at the place of the last one."""
        if self._place is not None and self._trial != "running":
            before, self._trial = self._trial, "running"
            if not self._movement.lanes.loads.submit(partial(self._run_trial, *self._place)):
                self._trial = before

    def _run_trial(self, offset: int, num_bytes: int) -> None:
        """Read a page, and then all (no lock held); tell the planner, if no load has meanwhile."""
        assert self._disk is not None
        assert self.rules is not None
        tries = []
        for size in (ALIGNMENT, num_bytes):
            times = [self._disk.try_reading(offset, size) for _ in range(TRIES)]
            tries.append((size, min((time for time in times if time is not None), default=None)))
        with self._lock:
            if self._trial != "running":  # a load was faster
                return
            self._trials += 1
            enough = num_bytes >= MIN_TRIAL_BYTES and tries[-1][1] is not None
            self._trial = "over" if enough or self._trials == MAX_TRIALS else "due"
            for size, seconds in tries:
                if seconds is not None:
                    self.rules.planner.loaded(self._name, size, seconds)

    # -- looking on -----------------------------------------------------------------------------

    def counts(self) -> Counter[tuple[str, ...]]:
        """Return what the disk counts, by the names of :data:`kvstore.metrics.COUNTERS`."""
        counts = Counter[tuple[str, ...]]()
        if self._disk is not None:
            for (name, *labels), count in self._disk.counts.items():
                if name == "read_blocks":
                    counts["disk_reads", *labels] = count
            for (side, reason), count in self._disk.troubles.items():
                counts["disk_troubles", side, reason] = count
        return counts

    def stats(self) -> DiskStats | None:
        """Say how the disk does."""
        if self._disk is None or self.rules is None:
            return None
        latency_s, bytes_per_s = self.rules.planner.expected(self._name)
        off = self._disk.off
        return DiskStats(
            off["read"], off["write"], latency_s, bytes_per_s, self._disk.slots.bad_bytes
        )
