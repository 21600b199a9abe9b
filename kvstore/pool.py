"""The pool: finds, lends and takes the KV blocks of prefixes. What an embedded store *is*.

Reading, once a request::

    lease = pool.acquire(namespace, tokens)     # leading blocks that are known, held in place
    … copy lease.offsets out of pool.buffer(tier) …
    pool.release(lease)                         # raises if the lease ran out meanwhile

Writing, when blocks are computed::

    reservation = pool.reserve(namespace, tokens)   # slots for the missing blocks only
    … copy the blocks reservation.indices into pool.buffer(tier) …
    pool.commit(reservation)                        # visible from here on; or pool.abort(reservation)

*Threads.* Every method may be called from any thread. One lock guards all metadata: it is held for
microseconds where something is found, for longer where much must be evicted to make room. Bytes are
copied, hashed and checked outside it.

*Ownership.* A reservation's bytes belong to its writer until commit; a lease's blocks may be read
until its deadline. On CUDA, wait for the copies to finish before release or commit.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from threading import RLock
from typing import TYPE_CHECKING, Any

import numpy as np

from kvstore.blocks import NO_CHECKSUM, NO_SLOT, BlockState
from kvstore.errors import LeaseExpiredError, LeaseNotHeldError, TooLargeError, UsageError
from kvstore.events import AllBlocksCleared, BlockStored, EventLog
from kvstore.lease import Lease, Reservation
from kvstore.residency import Residency
from kvstore.stats import PoolStats, TierStats
from kvstore.tiers.arena import slot_bytes
from kvstore.tiers.tier import NamespaceTree, Tier
from kvstore.tokens import TOKEN_BYTES, block_keys

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    from kvstore.blocks import Ids
    from kvstore.namespace import Namespace
    from kvstore.tiers.mover import Mover
    from radix import Match

MAX_LEASES = 32000
"""A block counts its users in 16 bits."""

HOLDS_NOTHING = 0
"""Id of leases and reservations without blocks: ending them, however often, does nothing."""


@dataclass(eq=False)
class _Hold:
    """The pool's own record of a lease or reservation."""

    tree: NamespaceTree
    key: bytes
    known: Ids
    """Blocks leased; or, for a reservation, the known ones that the new ones follow."""
    fresh: Ids
    """Blocks being written; none for a lease."""
    tiers: NDArray[np.int8]
    offsets: NDArray[np.int64]
    """Where the holder reads the leased blocks, or writes the fresh ones."""
    expires_at: float


class Pool:
    """Blocks of many namespaces in an ordered list of tiers.

    Invariants (:meth:`check_invariants`, in this order):

    1. those of :class:`kvstore.residency.Residency`;
    2. a block has one reference for each lease, reservation and move that holds it, and no more.
    """

    def __init__(
        self,
        tiers: Sequence[Tier],
        mover: Mover,
        clock: Callable[[], float],
        *,
        block_tokens: int = 16,
        lease_timeout_s: float = 60.0,
        max_leases: int = 16384,
        max_event_bytes: int = 16 << 20,
    ) -> None:
        """Make an empty pool over ``tiers``, fastest first.

        Args:
            tiers: at least one; each is owned by the pool from here on.
            mover: runs moves between tiers; closed with the pool.
            clock: monotonic seconds, for lease deadlines.
            block_tokens: block length for callers that make their own layouts.
            lease_timeout_s: seconds for which a lease protects its blocks.
            max_leases: leases and reservations held at once; beyond it lookups miss and nothing is
                stored. At most ``MAX_LEASES``.
            max_event_bytes: memory for events that nobody has read yet.
        """
        if not 0 < max_leases <= MAX_LEASES:
            raise UsageError(f"max_leases must be in 1 .. {MAX_LEASES}, got {max_leases}")
        if not tiers:
            raise UsageError("a pool needs at least one tier")
        self.tier_names = tuple(tier.name for tier in tiers)
        self.block_tokens = block_tokens
        self.events = EventLog(max_event_bytes)
        self._lock = RLock()
        self._residency = Residency(tiers, mover, self._lock, self.events)
        self._mover = mover
        self._clock = clock
        self._lease_timeout_s = lease_timeout_s
        self._max_leases = max_leases
        self._leases: dict[int, _Hold] = {}
        self._reservations: dict[int, _Hold] = {}
        self._next_id = 1
        self._closed = False

    # -- reading --------------------------------------------------------------------------------

    def lookup(self, namespace: Namespace, tokens: object) -> int:
        """Number of leading tokens of ``tokens`` that a lease would cover. Changes nothing.

        The last token never counts: it must be computed to get logits.

        Raises:
            UsageError: ``tokens`` are not token ids.
        """
        key = block_keys(namespace, tokens)
        with self._lock:
            _, _, ids = self._find(namespace, key)
        return _usable(namespace, key, len(ids)) * namespace.layout.block_tokens

    def acquire(self, namespace: Namespace, tokens: object) -> Lease:
        """Lease the leading blocks of ``tokens`` that are known, and count them as used.

        Returns:
            A lease of at most ``len(tokens) - 1`` tokens, in whole blocks; an empty one is a miss.

        Raises:
            UsageError: ``tokens`` are not token ids.
        """
        key = block_keys(namespace, tokens)
        now = self._clock()
        with self._lock:
            self._reap(now)
            tree, found, ids = self._find(namespace, key)
            ids = ids[: _usable(namespace, key, len(ids)) if self._may_hold() else 0]
            tree.touch(found)
            self._residency.pin(ids)
            tiers, offsets = self._residency.where(ids)
            self._count_lookup(namespace, key, tiers)
            expires_at = now + self._lease_timeout_s
            hold = _Hold(tree, b"", ids, ids[:0], tiers, offsets, expires_at)
            held_id = self._hold(self._leases, hold) if len(ids) else HOLDS_NOTHING
        return Lease(self, namespace, ids, tiers, offsets, expires_at, held_id)

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
            hold = self._unhold(self._leases, lease, "lease")
            self._spread(hold.known)
            self._residency.unpin(hold.known)

    def verify(self, lease: Lease) -> int:
        """Compare the leased blocks with the checksums of their writers; drop the wrong ones.

        Blocks in device memory, which have no checksum before they are first copied to the host,
        are not read.

        Returns:
            Number of leading blocks that are good.
        """
        with self._lock:
            hold = self._leases.get(lease.held_id)
            if hold is None or lease.store is not self:
                return 0
            ids = hold.known
            written = self._residency.table.checksums[ids]
            self._residency.pin(ids)  # the lease may run out meanwhile
        sums = self._residency.checksums(ids, hold.tiers, hold.offsets)
        wrong = (sums != NO_CHECKSUM) & (written != NO_CHECKSUM) & (sums != written)
        with self._lock:
            if wrong.any():
                self._residency.discard_corrupt(list(hold.tree.walk()), ids[wrong])
            self._residency.unpin(ids)
        return int(wrong.argmax()) if wrong.any() else len(ids)

    # -- writing --------------------------------------------------------------------------------

    def reserve(self, namespace: Namespace, tokens: object) -> Reservation:
        """Get slots for the whole blocks of ``tokens`` that no one holds or writes yet.

        Never waits: what finds no room now is left out and counted in ``Reservation.refused``.

        Raises:
            UsageError: ``tokens`` are not token ids.
            TooLargeError: the prompt has more blocks than the largest tier.
        """
        key = block_keys(namespace, tokens)
        total = len(key) // namespace.key_bytes
        self._check_fits(namespace, total)
        with self._lock:
            self._reap(self._clock())
            tree, found, _ = self._find(namespace, key)
            known = found.block_ids()
            self._residency.pin(known)
            wanted = total - len(known)
            fresh = self._residency.place(namespace, wanted if self._may_hold() else 0)
            refused = wanted - len(fresh)
            self._counts["refused_blocks",] += refused
            tiers, offsets = self._residency.where(fresh)
            hold = _Hold(tree, key, known, fresh, tiers, offsets, float("inf"))
            if len(fresh):
                self._residency.trees[namespace.digest] = tree
                tree.insert(key[: (len(known) + len(fresh)) * namespace.key_bytes], fresh, found)
                held_id = self._hold(self._reservations, hold)
            else:
                tree.touch(found)
                self._residency.unpin(known)
                held_id = HOLDS_NOTHING
        indices = np.arange(len(known), len(known) + len(fresh), dtype=np.int32)
        return Reservation(
            self,
            namespace,
            fresh,
            tiers,
            offsets,
            hold.expires_at,
            held_id,
            indices=indices,
            refused=refused,
        )

    def commit(self, reservation: Reservation) -> int:
        """Make the written blocks visible.

        Returns:
            How many became visible: fewer than reserved when a block before them was aborted.

        Raises:
            LeaseNotHeldError: the reservation was ended before, or is not of this pool.
        """
        if reservation.held_id == HOLDS_NOTHING:
            return 0
        with self._lock:
            hold = self._unhold(self._reservations, reservation, "reservation")
        checksums = self._residency.checksums(hold.fresh, hold.tiers, hold.offsets)
        with self._lock:
            ready = self._residency.publish(hold.fresh, checksums)
            self._counts["stored_blocks",] += len(ready)
            if len(ready) and self.events.active:
                start, stride = len(hold.known), hold.tree.key_bytes
                stop = start + len(ready)
                self.events.publish(
                    BlockStored(hold.tree.namespace.digest, hold.key[: stop * stride], start, stop)
                )
            self._residency.unpin(np.concatenate([hold.known, hold.fresh]))
        return len(ready)

    def abort(self, reservation: Reservation) -> None:
        """Give the slots back without making anything visible.

        Blocks that other writers put behind these become unreachable and go with them.

        Raises:
            LeaseNotHeldError: the reservation was ended before, or is not of this pool.
        """
        if reservation.held_id == HOLDS_NOTHING:
            return
        with self._lock:
            hold = self._unhold(self._reservations, reservation, "reservation")
            self._counts["aborted_blocks",] += len(hold.fresh)
            self._residency.detach(hold.tree.match(hold.key).nodes, hold.fresh, "aborted")
            self._residency.unpin(np.concatenate([hold.known, hold.fresh]))

    # -- administration -------------------------------------------------------------------------

    def demote(self, namespace: Namespace, tokens: object, tier: str) -> int:
        """Drop the copies of a prefix in ``tier`` that a slower tier has too and nobody uses.

        Returns:
            Number of blocks that left the tier.

        Raises:
            UsageError: unknown tier, or ``tokens`` are not token ids.
        """
        index = self._tier_index(tier)
        with self._lock:
            _, _, ids = self._find(namespace, block_keys(namespace, tokens))
            table = self._residency.table
            slots = table.slots[:, ids]
            below = (slots[index + 1 :] != NO_SLOT).any(axis=0)
            ids = ids[(slots[index] != NO_SLOT) & below & (table.refs[ids] == 0)]
            self._residency.drop_copies(ids, index)
            return len(ids)

    def evict(self, namespace: Namespace, tokens: object) -> int:
        """Forget the known blocks of ``tokens`` and everything that follows them, in all tiers.

        Blocks in use stay readable for those who hold them. Returns the number of blocks matched.
        """
        with self._lock:
            _, found, _ = self._find(namespace, block_keys(namespace, tokens))
            self._residency.detach(found.nodes[:1], found.block_ids()[:1], "evicted")
        return found.num_blocks

    def clear(self) -> None:
        """Forget every block of every namespace. Blocks in use stay readable for those who hold them."""
        with self._lock:
            for tree in list(self._residency.trees.values()):
                self._residency.clear(tree)
                self.events.publish(AllBlocksCleared(tree.namespace.digest))

    def buffer(self, tier: str) -> Any:  # noqa: ANN401  (numpy array or torch tensor)
        """Memory of ``tier``, uint8 ``[capacity_bytes]``: a numpy array on the host, else a torch tensor."""
        return self._residency.tiers[self._tier_index(tier)].store.buffer

    def drain(self) -> None:
        """Wait until every move between tiers that was started is done."""
        self._mover.drain()

    def stats(self) -> PoolStats:
        """Return a consistent snapshot of sizes and counters."""
        with self._lock:
            residency = self._residency
            tiers = tuple(
                TierStats(
                    tier.name,
                    tier.arena.capacity_bytes,
                    tier.arena.used_bytes,
                    int((residency.table.slots[index] != NO_SLOT).sum()),
                )
                for index, tier in enumerate(residency.tiers)
            )
            trees = residency.trees.values()
            return PoolStats(
                tiers=tiers,
                num_blocks=residency.table.num_blocks,
                held_blocks=int((residency.table.refs > 0).sum()),
                num_leases=len(self._leases),
                num_reservations=len(self._reservations),
                num_namespaces=len(trees),
                num_nodes=sum(tree.num_nodes for tree in trees),
                index_bytes=sum(tree.num_blocks * (tree.key_bytes + 4) for tree in trees)
                + residency.table.nbytes,
                counts=Counter(self._counts),
            )

    def close(self) -> None:
        """Finish the moves and give the memory back: from here on everything misses, and nothing is stored.

        Leases and reservations should have ended before; those that have not hold nothing any more.
        """
        with self._lock:
            self._closed = True
        self._mover.close()
        with self._lock:
            for hold in [*self._leases.values(), *self._reservations.values()]:
                self._residency.detach(list(hold.tree.walk()), hold.fresh, "aborted")
                self._residency.unpin(np.concatenate([hold.known, hold.fresh]))
            self._leases.clear()
            self._reservations.clear()
            self.clear()
            for tier in self._residency.tiers:
                tier.store.close()

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

    def _find(self, namespace: Namespace, key: bytes) -> tuple[NamespaceTree, Match, Ids]:
        """Tree, whole match, and the leading matched blocks that are visible."""
        tree = self._residency.trees.get(namespace.digest)
        if tree is None:
            tree = NamespaceTree(namespace, self._residency.order)
        found = tree.match(key)
        ids = found.block_ids()
        hidden = self._residency.table.states[ids] != BlockState.READY
        return tree, found, ids[: int(hidden.argmax())] if hidden.any() else ids

    def _tier_index(self, name: str) -> int:
        if name not in self.tier_names:
            raise UsageError(f"unknown tier {name!r}: there are {', '.join(self.tier_names)}")
        return self.tier_names.index(name)

    def _may_hold(self) -> bool:
        """Whether one more lease or reservation may hold blocks; counted when not."""
        if self._closed:
            return False
        free = len(self._leases) + len(self._reservations) < self._max_leases
        self._counts["refused_leases",] += not free
        return free

    def _hold(self, holds: dict[int, _Hold], hold: _Hold) -> int:
        held_id = self._next_id
        self._next_id += 1
        holds[held_id] = hold
        return held_id

    def _unhold(self, holds: dict[int, _Hold], record: Lease | Reservation, what: str) -> _Hold:
        hold = holds.pop(record.held_id, None) if record.store is self else None
        if hold is not None:
            return hold
        if record.store is self and self._clock() >= record.expires_at:
            raise LeaseExpiredError(
                f"the {what} ran out before it was released: what was read may be wrong"
            )
        self._counts["refused_releases",] += 1
        raise LeaseNotHeldError(f"the {what} was ended before, or belongs to another store")

    def _reap(self, now: float) -> None:
        """End leases past their deadline; they are kept in the order in which they run out."""
        while self._leases:
            held_id, hold = next(iter(self._leases.items()))
            if hold.expires_at > now:
                return
            del self._leases[held_id]
            self._counts["expired_leases",] += 1
            self._residency.unpin(hold.known)

    def _spread(self, ids: Ids) -> None:
        """Copy READY blocks one tier up from where they are, and what no slower tier has yet, down.

        Leading blocks first; one that is under way already is not moved again.
        """
        table = self._residency.table
        ids = ids[table.states[ids] == BlockState.READY]
        tiers, _ = self._residency.where(ids)
        for index in range(len(self.tier_names)):
            here = ids[tiers == index]
            if index and len(here):
                self._residency.move(here, index, index - 1)
            only = here[(table.slots[index + 1 :, here] == NO_SLOT).all(axis=0)]
            if len(only) and index + 1 < len(self.tier_names):
                self._residency.move(only, index, index + 1)

    def _check_fits(self, namespace: Namespace, num_blocks: int) -> None:
        size = slot_bytes(namespace.layout.block_bytes)
        room = max(tier.arena.capacity_slots(size) for tier in self._residency.tiers)
        if num_blocks > room:
            with self._lock:
                self._counts["refused_blocks",] += num_blocks
            raise TooLargeError(
                f"the prompt has {num_blocks} blocks of {namespace.layout.block_bytes} bytes, the largest tier "
                f"holds {room}: raise its capacity or do not store prompts of this length"
            )

    def _count_lookup(self, namespace: Namespace, key: bytes, tiers: np.ndarray) -> None:
        tokens = namespace.layout.block_tokens
        counts = self._counts
        counts["lookups",] += 1
        total = (
            len(key) // namespace.key_bytes * tokens
            if namespace.keys == "hash"
            else len(key) // TOKEN_BYTES
        )
        counts["lookup_tokens", "miss"] += total - len(tiers) * tokens
        for index, hits in enumerate(np.bincount(tiers, minlength=len(self.tier_names)).tolist()):
            counts["lookup_tokens", self.tier_names[index]] += hits * tokens

    def check_invariants(self) -> None:
        """Raise AssertionError naming the first broken invariant."""
        with self._lock:
            self._residency.check_invariants()
            table = self._residency.table
            refs = np.zeros(len(table.refs), np.int16)
            for hold in [*self._leases.values(), *self._reservations.values()]:
                refs[hold.known] += 1
                refs[hold.fresh] += 1
            for move in self._residency.moves:
                refs[move.ids] += 1
            assert np.array_equal(refs, table.refs), "2: one reference for each holder"


def _usable(namespace: Namespace, key: bytes, num_blocks: int) -> int:
    """Blocks of a match that may be used: all but the last token; an engine's own hashes, all."""
    if namespace.keys == "hash":
        return num_blocks
    longest = max(0, len(key) // TOKEN_BYTES - 1) // namespace.layout.block_tokens
    return min(num_blocks, longest)
