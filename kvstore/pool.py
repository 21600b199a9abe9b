"""The pool: finds, lends and takes the KV blocks of prefixes. What an embedded store *is*.

Reading, once a request::

    lease = pool.acquire(namespace, tokens)     # leading blocks that are known, held in place
    … copy lease.offsets out of pool.buffer(tier) …
    pool.release(lease)                         # raises if the lease ran out meanwhile

Writing, when blocks are computed::

    reservation = pool.reserve(namespace, tokens)   # slots for the missing blocks only
    … copy the blocks reservation.indices into pool.buffer(tier) …
    pool.commit(reservation)                        # visible from here on; or pool.abort(reservation)

*The disk.* A lease covers blocks in memory. What follows those and is on disk is being loaded from then on,
as far as that is expected to be faster than computing it: a caller that can wait a little says so
(``may_wait``), is told for how long (``lease.ready_in_s``), and asks again.

*Threads.* Every method may be called from any thread. One lock guards all metadata: it is held for
microseconds where something is found, for longer where much must be evicted to make room. Bytes are
copied, hashed and checked outside it.

*Ownership.* A reservation's bytes belong to its writer until commit; a lease's blocks may be read
until its deadline. On CUDA, wait for the copies to finish before release or commit.

*Parts.* Ranks of an engine that hold some KV heads each write those into the same blocks: every rank
reserves the prompt for its ``heads``, writes and commits. A block is visible when each of its heads has
been committed, by whomever; until then it belongs to no single writer (:mod:`kvstore.parts`).
"""

from __future__ import annotations

import logging
from threading import RLock
from typing import TYPE_CHECKING, Any

import numpy as np

from kvstore.blocks import FIRST_CHECKSUM, NO_CHECKSUM, BlockState
from kvstore.claims import Claims
from kvstore.errors import TooLargeError, UsageError
from kvstore.events import BlockStored, EventLog
from kvstore.explain import Obituaries
from kvstore.holds import HOLDS_NOTHING, Hold, Holds
from kvstore.invariants import check_residency
from kvstore.lease import Lease, Reservation
from kvstore.offload import engine_of
from kvstore.parts import mask_of, part_of
from kvstore.residency import Residency, runs
from kvstore.retention import NORMAL_PRIORITY, check_priority, lifetime_of
from kvstore.tiers.arena import slot_bytes
from kvstore.tiers.mover import Lanes, Mover
from kvstore.tiers.moves import Path, checksums
from kvstore.tokens import block_keys
from kvstore.upkeep import Upkeep

if TYPE_CHECKING:
    from collections import Counter
    from collections.abc import Callable, Mapping, Sequence

    from numpy.typing import NDArray

    from kvstore.blocks import Ids
    from kvstore.copies import Refill
    from kvstore.namespace import Namespace
    from kvstore.offload import Coming
    from kvstore.quotas import Quota
    from kvstore.residency import Found
    from kvstore.tiers.tier import Tier

logger = logging.getLogger(__name__)

KEEP_S = 10.0
"""For how long a pool that is closed writes to its disk what only memory has."""

CLAIM_S, MAX_CLAIM_S = 0.1, 60.0
"""What is being loaded is kept for who waits for it: so long and twice what it should take; at most."""


class Pool(Upkeep):
    """Blocks of many namespaces in an ordered list of tiers.

    Invariants (:meth:`check_invariants`, in this order):

    1. those of :func:`kvstore.invariants.check_residency`;
    2. a block has one reference for each lease, reservation, pin, claim and move that holds it, and no more;
    3. a RESERVED block without a record of parts is written by one reservation, of whole blocks; of one with
       a record, each head that is claimed is written by one reservation, and no other head is.
    """

    def __init__(  # noqa: PLR0913 - one setting each
        self,
        tiers: Sequence[Tier],
        mover: Mover | Lanes,
        clock: Callable[[], float],
        *,
        block_tokens: int = 16,
        lease_timeout_s: float = 60.0,
        max_leases: int = 16384,
        max_event_bytes: int = 16 << 20,
        quotas: Mapping[str, Quota] | None = None,
    ) -> None:
        """Make a pool over ``tiers``, fastest first, with what the disk has.

        Args:
            tiers: memory, then at most one durable tier; each is owned by the pool from here on.
            mover: runs moves between tiers; closed with the pool.
            clock: monotonic seconds, for lease deadlines.
            block_tokens: block length for callers that make their own layouts.
            lease_timeout_s: seconds for which a lease protects its blocks.
            max_leases: leases and reservations held at once; beyond it lookups miss and nothing is
                stored. At most :data:`kvstore.holds.MAX_LEASES`.
            max_event_bytes: memory for events that nobody has read yet.
            quotas: by tenant, in the last memory tier, whose policy is then a
                :class:`radix.GroupedOrder` of the same groups.

        Raises:
            ConfigError: the quotas contradict each other, or the tier.
        """
        if not tiers or tiers[0].disk is not None:
            raise UsageError("a pool needs at least one tier of memory")
        self.tier_names = tuple(tier.name for tier in tiers)
        self.block_tokens = block_tokens
        self.events = EventLog(max_event_bytes)
        self._lock = RLock()
        self._mover = Lanes(mover, mover, mover) if isinstance(mover, Mover) else mover
        self._residency = Residency(
            tiers, self._mover, self._lock, clock, self.events, Obituaries(clock), quotas or {}
        )
        self._holds = Holds(clock, max_leases, self._residency.counts)
        self._claims = Claims(self._residency.copies)
        self._buffers: tuple[Any, ...] = tuple(tier.buffer for tier in tiers if tier.disk is None)
        self._clock = clock
        self._lease_timeout_s = lease_timeout_s
        self._closed = False

    # -- reading --------------------------------------------------------------------------------

    def lookup(self, namespace: Namespace, tokens: object) -> int:
        """Number of leading tokens of ``tokens`` that a lease would cover. Changes nothing.

        What would have to be loaded counts if that is worth waiting for. The last token never counts: it must
        be computed to get logits.

        Raises:
            UsageError: ``tokens`` are not token ids.
        """
        key = block_keys(namespace, tokens)
        with self._lock:
            found = self._residency.find(namespace, key)
            covered = self._residency.offload.reach(found.usable, namespace).num_blocks
        return covered * namespace.layout.block_tokens

    def prefetch(self, namespace: Namespace, tokens: object) -> int:
        """Start bringing the known blocks of ``tokens`` one tier up, and no more.

        The order in which blocks leave the pool stays as it is. Returns how many tokens memory has or will have
        soon: no more than :meth:`lookup` says, and fewer where much is being loaded already.

        Raises:
            UsageError: ``tokens`` are not token ids.
        """
        key = block_keys(namespace, tokens)
        with self._lock:
            found = self._residency.find(namespace, key)
            covered = self._residency.prefetch(found, key)
        return covered * namespace.layout.block_tokens

    def acquire(self, namespace: Namespace, tokens: object, *, may_wait: bool = False) -> Lease:
        """Lease the leading blocks of ``tokens`` that memory has, and count them as used.

        What follows those on disk is being loaded from now on, as far as it is worth it.

        Args:
            namespace: of the blocks.
            tokens: of the prompt.
            may_wait: while blocks are being loaded lease nothing, and count no lookup: the caller asks
                again, after ``ready_in_s`` or when it likes, at the end without this.

        Returns:
            A lease of at most ``len(tokens) - 1`` tokens, in whole blocks; an empty one is a miss, or, with
            ``ready_in_s``, a request to wait.

        Raises:
            UsageError: ``tokens`` are not token ids.
        """
        key = block_keys(namespace, tokens)
        now = self._clock()
        with self._lock:
            self._reap(now)
            found = self._residency.find_lasting(namespace, key)
            ids = found.usable[: None if self._may_hold(len(found.usable)) else 0]
            coming = self._residency.load(found, ids, key)
            deferred = may_wait and coming.num_blocks > 0
            ids = ids[: 0 if deferred else coming.ready_blocks]
            self._residency.copies.pin(ids)
            tiers, offsets = self._residency.copies.where(ids)
            if deferred:
                self._counts["deferred_lookups",] += 1
                self._claim(found, key, coming)
            else:
                found.tree.touch(found.tree.match(key) if coming.is_old else found.match)
                self._count_lookup(found, ids, tiers, coming)
            expires_at = now + self._lease_timeout_s
            hold = Hold(found.tree, key, ids, ids[:0], tiers, offsets, expires_at)
            held_id = self._holds.add(self._holds.leases, hold) if len(ids) else HOLDS_NOTHING
        return Lease(
            self,
            namespace,
            tiers,
            offsets,
            expires_at,
            held_id,
            buffers=self._buffers,
            ready_blocks=coming.ready_blocks,
            coming_blocks=coming.num_blocks,
            ready_in_s=coming.ready_in_s,
        )

    def release(self, lease: Lease) -> None:
        """End ``lease``; blocks that were read from a slower tier are promoted in the background.

        Raises:
            LeaseExpiredError: the deadline passed and the blocks were no longer protected: throw
                away what was read.
            LeaseNotHeldError: it was released before, or is not of this pool.
        """
        with self._lock:
            self._reap(self._clock())
            if lease.held_id == HOLDS_NOTHING:
                return
            hold = self._holds.end(self, lease)
            self._residency.spread(hold.known, Path(hold.tree, hold.key))
            self._residency.copies.unpin(hold.known)

    def verify(self, lease: Lease) -> int:
        """Compare the leased blocks with the checksums of what was stored; drop the wrong ones.

        A block without a checksum counts as good: one in device memory, which gets its checksum when it
        is first copied to the host, and one that was committed a moment ago (:meth:`drain` waits).

        Returns:
            Number of leading blocks that are good.
        """
        with self._lock:
            hold = self._holds.leases.get(lease.held_id)
            if hold is None or lease.store is not self:
                return 0
            ids = hold.known
            written = self._residency.table.checksums[ids]
            self._residency.copies.pin(ids)  # the lease may run out meanwhile
        size = hold.tree.namespace.layout.block_bytes
        sums = checksums(self._residency.tiers, hold.tiers, hold.offsets, size)
        wrong = (sums != NO_CHECKSUM) & (written >= FIRST_CHECKSUM) & (sums != written)
        with self._lock:
            if wrong.any():
                self._residency.discard_corrupt(ids[wrong], Path(hold.tree, hold.key))
            self._residency.copies.unpin(ids)
        return int(wrong.argmax()) if wrong.any() else len(ids)

    # -- writing --------------------------------------------------------------------------------

    def reserve(
        self,
        namespace: Namespace,
        tokens: object,
        *,
        heads: tuple[int, int] | None = None,
        max_blocks: int | None = None,
        priority: int = NORMAL_PRIORITY,
        ttl_s: float | None = None,
    ) -> Reservation:
        """Get slots for the whole blocks of ``tokens`` that no one holds or writes yet.

        Among them are blocks that others have left unfinished, or, if ``heads`` says so, are writing other
        heads of; and, for who writes whole blocks, those that only the disk has and nobody loads: who computed
        them all the same brings them back to memory. Never waits: what finds no room is left out, and counted
        as ``Reservation.refused``.

        Args:
            namespace: of the blocks.
            tokens: of the prompt; a last part that fills no block is ignored.
            heads: range ``[start, stop)`` of the layout's KV heads that the caller will write in every
                block that it gets; None: all. The bytes of other heads are not the caller's to touch.
            max_blocks: slots to give at most; what goes beyond it counts as refused.
            priority: 0 to 100. Blocks of a lower priority are evicted first. All blocks of the prompt, known or
                new, have this priority from now on, if theirs is not higher.
            ttl_s: seconds after their commit in which the blocks expire, from where on they are misses; None:
                never. Known blocks of the prompt expire no earlier than that from now, or from their commit.
                What will expire is not written to disk. A lease stays good, a pin does not.

        Raises:
            UsageError: ``tokens`` are not token ids, ``heads`` no range of the layout's heads, ``priority`` or
                ``ttl_s`` impossible; blocks of more than 64 heads are written as a whole only.
            TooLargeError: the prompt has more blocks than the largest tier.
        """
        part, lifetime_s = part_of(namespace.layout, heads), lifetime_of(ttl_s)
        level = check_priority(priority)
        key = block_keys(namespace, tokens)
        total = len(key) // namespace.key_bytes
        self._check_fits(namespace, total)
        with self._lock:
            self._reap(self._clock())
            tree, match = self._residency.find_lasting(namespace, key)[:2]
            known = match.block_ids()
            self._residency.copies.pin(known)
            mine = mask_of(namespace.layout, part)
            joined = self._residency.joinable(known, mine)
            away = self._residency.away(known) if part is None else joined[:0]
            wanted = len(joined) + len(away) + total - len(known)
            allowed = wanted if max_blocks is None else min(wanted, max_blocks)
            allowed = allowed if self._may_hold(allowed) else 0
            joined, away = joined[:allowed], away[: max(0, allowed - len(joined))]
            refill = self._residency.begin_refill(known, away)
            new = self._residency.place(namespace, allowed - len(joined) - len(away))
            self._residency.lifetimes.reserved(new, known, lifetime_s)
            refused = wanted - len(joined) - len(refill.ids) - len(new)
            self._counts["refused_blocks",] += refused
            if part is not None:
                self._residency.parts.begin(new, mine, mask_of(namespace.layout, None))
            self._residency.parts.join(known[joined], mine)
            if len(new):
                self._residency.trees[namespace.digest] = tree
                tree.insert(key[: (len(known) + len(new)) * namespace.key_bytes], new, match, level)
            else:
                tree.touch(match, level)
            hold = self._written(Path(tree, key), known, joined, refill, new)
            hold.heads = None if part is None else mine
            held = len(hold.indices) > 0
            held_id = self._holds.add(self._holds.reservations, hold) if held else HOLDS_NOTHING
        return Reservation(
            self,
            namespace,
            hold.tiers,
            hold.offsets,
            hold.expires_at,
            held_id,
            buffers=self._buffers,
            indices=hold.indices,
            refused=refused,
        )

    def commit(self, reservation: Reservation) -> int:
        """Say that what was reserved is written: blocks of which no head is missing become visible.

        Their checksums are computed in the background.

        Returns:
            How many became visible: fewer than reserved when a block before them was aborted, or when
            others have not written their heads yet.

        Raises:
            LeaseNotHeldError: the reservation was ended before, or is not of this pool.
        """
        if reservation.held_id == HOLDS_NOTHING:
            return 0
        with self._lock:
            hold, whole = self._holds.end(self, reservation), self._residency.parts.commit
            written = hold.fresh if hold.heads is None else whole(hold.fresh, hold.heads)
            ready = self._residency.publish(written, hold.known, Path(hold.tree, hold.key))
            self._residency.end_refill(hold.refill, is_written=True)
            self._counts["stored_blocks",] += len(ready)
            if self.events.active:
                self._tell_stored(hold, ready)
            self._residency.copies.unpin(hold.ids)
        return len(ready)

    def abort(self, reservation: Reservation) -> None:
        """Give the slots back without making anything visible.

        Blocks that other writers put behind these become unreachable and go with them. Blocks of which
        others write other heads, or have written some, stay.

        Raises:
            LeaseNotHeldError: the reservation was ended before, or is not of this pool.
        """
        if reservation.held_id == HOLDS_NOTHING:
            return
        with self._lock:
            self._abort(self._holds.end(self, reservation))

    def prefilled(self, namespace: Namespace, start: int, stop: int, seconds: float) -> None:
        """Say how long an engine took to compute tokens ``[start, stop)`` of a prompt in ``namespace``.

        From this the pool knows what is worth loading. Nonsense is ignored.
        """
        rules = self._residency.offload.rules
        if rules is None:
            return
        with self._lock:
            rules.planner.prefilled(engine_of(namespace), start, stop, seconds)

    # -- the end --------------------------------------------------------------------------------

    def close(self) -> None:
        """Finish the moves and give the memory back: from here on everything misses, and nothing is stored.

        Before that the disk gets what only memory has, for ``KEEP_S`` seconds and as its rules allow.
        Leases and reservations should have ended before; those that have not hold nothing any more.
        """
        with self._lock:
            self._closed = self._residency.movement.is_closing = True
        try:
            self._residency.offload.keep(KEEP_S)
        finally:
            self._end()

    def _end(self) -> None:
        self._mover.close()
        with self._lock:
            for hold in self._holds.reservations.values():
                self._abort(hold)
            for lease in self._holds.leases.values():
                self._residency.copies.unpin(lease.ids)
            self._claims.clear()
            self._holds.reservations.clear()
            self._holds.leases.clear()
            for tier in self._residency.tiers:
                if tier.disk is not None:  # before its blocks are let go of: it keeps them
                    stats = self.stats()
                    on_disk = stats.tiers[-1].num_blocks
                    logger.info(
                        "closed: %d blocks on disk, %d not", on_disk, stats.num_blocks - on_disk
                    )
                    tier.disk.close()
            self.clear()
            self._buffers = ()
            for tier in self._residency.tiers:
                tier.store.close()

    @property
    def closed(self) -> bool:
        """Whether :meth:`close` was called."""
        return self._closed

    def __enter__(self) -> Pool:
        """Return the pool itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close."""
        self.close()

    # -- inner ----------------------------------------------------------------------------------

    @property
    def _counts(self) -> Counter[tuple[str, ...]]:
        return self._residency.counts

    def _claim(self, found: Found, key: bytes, coming: Coming) -> None:
        """Keep the blocks of a prompt for about as long as somebody waits for what is ``coming``."""
        copies = self._residency.copies
        pinned_bytes = sum(
            copies.held_bytes(copies.num_memory - 1, pin.ids) for pin in self._holds.pins.values()
        )
        until_s = self._clock() + min(CLAIM_S + 2 * coming.ready_in_s, MAX_CLAIM_S)
        ids = found.usable[: coming.ready_blocks + coming.num_blocks]
        self._claims.keep((found.tree.namespace.digest, key), ids, until_s, pinned_bytes)

    def _may_hold(self, num_blocks: int) -> bool:
        """Whether one more lease or reservation may hold so many blocks; counted when one is too many."""
        if self._closed or num_blocks < 1:
            return False
        return self._holds.has_room()

    def _written(
        self, path: Path, known: Ids, joined: NDArray[np.intp], refill: Refill, new: Ids
    ) -> Hold:
        """Make the record of a reservation: of ``known`` those at ``joined`` and of ``refill``; ``new`` behind.

        Each has a reference. Of the other known blocks those keep it that something written follows.
        """
        fresh, others = np.concatenate([known[joined], new]), np.delete(known, joined)
        if not len(new):
            last = max([*joined[-1:].tolist(), *refill.positions[-1:].tolist()], default=-1)
            before = last + 1 - int((joined <= last).sum())
            self._residency.copies.unpin(others[before:])
            others = others[:before]
        added = np.arange(len(known), len(known) + len(new))
        indices = np.concatenate([joined, added, refill.positions]).astype(np.int32)
        tiers, offsets = self._residency.copies.where(fresh)
        tiers = np.concatenate([tiers, np.full(len(refill.ids), refill.tier, np.int8)])
        offsets = np.concatenate([offsets, refill.offsets])
        order = np.argsort(indices)
        hold = Hold(*path, others, fresh, tiers[order], offsets[order], float("inf"))
        hold.indices, hold.refill = indices[order], refill
        return hold

    def _tell_stored(self, hold: Hold, ready: Ids) -> None:
        digest, stride = hold.tree.namespace.digest, hold.tree.key_bytes
        written = hold.indices[~np.isin(hold.indices, hold.refill.positions)]
        for start, stop in runs(written[np.isin(hold.fresh, ready)]):
            self.events.publish(BlockStored(digest, hold.key[: stop * stride], start, stop))

    def _abort(self, hold: Hold) -> None:
        left = hold.fresh
        if hold.heads is not None:
            every = mask_of(hold.tree.namespace.layout, None)
            left = self._residency.parts.abort(left, hold.heads, every)
        self._counts["aborted_blocks",] += len(hold.fresh)
        self._residency.end_refill(hold.refill, is_written=False)
        if len(left):
            self._residency.detach(hold.tree.match(hold.key).nodes, left, "aborted")
        self._residency.copies.unpin(hold.ids)

    def _check_fits(self, namespace: Namespace, num_blocks: int) -> None:
        size = slot_bytes(namespace.layout.block_bytes)
        if namespace.key_bytes > size:
            raise UsageError(
                f"blocks of {namespace.layout.block_bytes} bytes under keys of {namespace.key_bytes}: the "
                "index would be larger than the tiers; use fewer tokens a block"
            )
        memory = [tier for tier in self._residency.tiers if tier.disk is None]
        room = max(tier.arena.capacity_slots(size) for tier in memory)
        if num_blocks > room:
            with self._lock:
                self._counts["refused_blocks",] += num_blocks
            raise TooLargeError(
                f"the prompt has {num_blocks} blocks of {namespace.layout.block_bytes} bytes, the largest "
                f"memory tier holds {room}: raise its capacity or do not store prompts of this length"
            )

    def _count_lookup(self, found: Found, ids: Ids, tiers: np.ndarray, coming: Coming) -> None:
        """Count a lookup; blocks that were loaded for it count for the tier from which they came."""
        tokens = found.tree.namespace.layout.block_tokens
        counts, loaded = self._counts, self._residency.table.loaded
        counts["lookups",] += 1
        if coming.left_blocks:
            counts["unloaded_blocks", self.tier_names[-1], coming.cause] += coming.left_blocks
        counts["lookup_tokens", "miss"] += found.prompt_tokens - len(tiers) * tokens
        tiers = np.where(loaded[ids], len(self.tier_names) - 1, tiers)
        loaded[ids] = False
        for index, hits in enumerate(np.bincount(tiers, minlength=len(self.tier_names)).tolist()):
            counts["lookup_tokens", self.tier_names[index]] += hits * tokens

    def check_invariants(self) -> None:
        """Raise AssertionError naming the first broken invariant."""
        with self._lock:
            check_residency(self._residency)
            table = self._residency.table
            refs = np.zeros(len(table.refs), np.int16)
            for ids in [*self._holds.references(), *self._claims.references()]:
                refs[ids] += 1
            for move in self._residency.movement.moves:
                refs[move.ids] += 1
            assert np.array_equal(refs, table.refs), "2: one reference for each holder"
            self._check_writers()

    def _check_writers(self) -> None:
        states, records = self._residency.table.states, self._residency.parts.records
        writers = dict.fromkeys(np.flatnonzero(states == BlockState.RESERVED).tolist(), 0)
        for hold in self._holds.reservations.values():
            for block in hold.fresh[states[hold.fresh] == BlockState.RESERVED].tolist():
                every = mask_of(hold.tree.namespace.layout, None)
                assert block in records or hold.heads is None, "3: a part has a record"
                heads = every if hold.heads is None else hold.heads
                assert not writers[block] & heads, "3: no head has two writers"
                writers[block] |= heads
        for block, heads in writers.items():
            part = records.get(block)
            assert heads == part.claimed if part else heads, "3: what is claimed is written"
