"""What operators ask of a pool: the half of :class:`kvstore.pool.Pool` that reads and writes no blocks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from kvstore import diagnosis
from kvstore.blocks import NO_SLOT, BlockState
from kvstore.errors import UsageError
from kvstore.events import AllBlocksCleared
from kvstore.explain import Withheld
from kvstore.holds import Pin
from kvstore.retention import FOREVER, check_priority, lifetime_of
from kvstore.stats import NamespaceStats, PoolStats, TierStats
from kvstore.tokens import block_keys

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from threading import RLock

    from kvstore.blocks import Ids
    from kvstore.claims import Claims
    from kvstore.events import EventLog
    from kvstore.explain import Explanation
    from kvstore.holds import Holds
    from kvstore.namespace import Namespace
    from kvstore.residency import Found, Residency
    from kvstore.stats import LeaseStats, PinStats, TenantStats
    from kvstore.tiers.mover import Lanes


class Upkeep:
    """Forgetting, pinning and looking on. Every method may be called from any thread."""

    tier_names: tuple[str, ...]
    events: EventLog
    _residency: Residency
    _holds: Holds
    _claims: Claims
    _mover: Lanes
    _lock: RLock
    _clock: Callable[[], float]

    # -- forgetting -----------------------------------------------------------------------------

    def demote(self, namespace: Namespace, tokens: object, tier: str) -> int:
        """Drop the copies of a prefix in ``tier`` that a slower tier has too and nobody uses.

        Returns:
            Number of blocks that left the tier.

        Raises:
            UsageError: unknown tier, or ``tokens`` are not token ids.
        """
        index = self._tier_index(tier)
        key = block_keys(namespace, tokens)
        with self._lock:
            self._claims.end(self._clock())
            ids = self._residency.find(namespace, key).ids
            table = self._residency.table
            slots = table.slots[:, ids]
            below = (slots[index + 1 :] != NO_SLOT).any(axis=0)
            ids = ids[(slots[index] != NO_SLOT) & below & (table.refs[ids] == 0)]
            self._residency.copies.drop(index, ids)
            return len(ids)

    def evict(self, namespace: Namespace, tokens: object) -> int:
        """Forget the known blocks of ``tokens`` and everything that follows them, in all tiers.

        Blocks in use stay readable for those who hold them; pins let go of them. Returns the number
        of blocks matched.
        """
        key = block_keys(namespace, tokens)
        with self._lock:
            found = self._residency.find(namespace, key).match
            self._residency.detach(found.nodes[:1], found.block_ids()[:1], "evicted")
            self._unpin_gone()
            self._residency.offload.forget_lastingly()
        return found.num_blocks

    def retain(
        self,
        namespace: Namespace,
        tokens: object,
        *,
        priority: int = 0,
        lifetime_s: float = 0.0,
    ) -> int:
        """Keep the known whole blocks of ``tokens`` as if they were stored again. Counts as no use.

        Args:
            namespace: of the blocks.
            tokens: a prefix; other than in a lookup the last token counts too.
            priority: 0 to 100: that of all blocks from now on whose own is not higher.
            lifetime_s: seconds from now before which none of them expires; infinity: none ever does.

        Returns:
            Tokens that are kept so.

        Raises:
            UsageError: ``tokens`` are not token ids, or ``priority`` or ``lifetime_s`` is impossible.
        """
        key, level = block_keys(namespace, tokens), check_priority(priority)
        if lifetime_s not in (0.0, FOREVER):
            lifetime_of(lifetime_s)
        with self._lock:
            found = self._residency.find_lasting(namespace, key)
            if not len(found.ids):
                return 0
            if lifetime_s:
                self._residency.lifetimes.reserved(found.ids[:0], found.ids, lifetime_s)
            known = key[: found.match.num_blocks * namespace.key_bytes]
            found.tree.insert(known, found.ids[:0], found.match, level)
        return len(found.ids) * namespace.layout.block_tokens

    def clear(self) -> None:
        """Forget every block of every namespace, and all pins.

        Blocks in use stay readable for those who hold them.
        """
        with self._lock:
            for tree in list(self._residency.trees.values()):
                self._residency.clear(tree)
                self.events.publish(AllBlocksCleared(tree.namespace.digest))
            self._unpin_gone()
            self._residency.offload.forget_lastingly()

    def reap(self) -> None:
        """End leases past their deadline, forget blocks that expired, let pins go of what left the index.

        Every lease, release and reservation does the former two, some blocks at a time. Where nobody comes
        for long, call this now and then, so that what was forgotten gives its room back.
        """
        with self._lock:
            self._reap(self._clock())
            self._unpin_gone()
            self._residency.offload.tidy()

    # -- pins -----------------------------------------------------------------------------------

    def pin(self, name: str, namespace: Namespace, tokens: object) -> int:
        """Hold the known whole blocks of ``tokens`` against eviction until they are unpinned.

        Other than in a lookup the last token counts too. A pin of the same name is replaced at once,
        or stays as it is when this one is refused. A pinned block stays in the tiers where it is. One
        that leaves the index by other ways (``evict``, ``clear``, expiry, wrong bytes) is pinned no more,
        and a pin without blocks is gone.

        Args:
            name: 1 to 255 characters, to unpin it by.
            namespace: where to look.
            tokens: a prefix; what is not known of it is not pinned, also when it is stored later.

        Returns:
            Tokens that are pinned now; with 0 there is no pin of that name.

        Raises:
            UsageError: bad name or ``tokens``, too many pins, or together they would hold more than
                half of a tier.
        """
        key = block_keys(namespace, tokens)
        with self._lock:
            self._unpin_gone()
            self._holds.check_name(name)
            ids = self._residency.find(namespace, key).ids
            together = np.union1d(self._holds.pinned_without(name), ids)
            self._check_pins(together)
            self._residency.copies.pin(ids)
            self.unpin(name)
            if len(ids):
                self._holds.pins[name] = Pin(namespace, ids)
        return len(ids) * namespace.layout.block_tokens

    def _check_pins(self, ids: Ids) -> None:
        """Refuse pins of ``ids``, all together, that would hold more than half of a tier."""
        copies = self._residency.copies
        landing = copies.num_memory - 1
        for index, tier in enumerate(copies.tiers):
            may_come = copies.bytes_of if index == landing else copies.held_bytes
            wanted = may_come(index, ids)
            limit = tier.arena.capacity_bytes // 2
            if wanted > limit:
                raise UsageError(
                    f"all pins together would hold {wanted} bytes, at most {limit} may be pinned, half of "
                    f"tier {tier.name}: pin less, unpin something, or raise its capacity"
                )

    def unpin(self, name: str) -> bool:
        """Let go of what was pinned as ``name``; say whether there was such a pin."""
        with self._lock:
            pin = self._holds.pins.pop(name, None)
            if pin is not None:
                self._residency.copies.unpin(pin.ids)
        return pin is not None

    def pins(self) -> list[PinStats]:
        """Return what is pinned, oldest pin first."""
        with self._lock:
            self._unpin_gone()
            return self._holds.pin_stats()

    def _unpin_gone(self) -> None:
        """Let pins and claims go of blocks that left the index: to evict on request must give the room back."""
        self._claims.forget_gone()
        table = self._residency.table
        for name, pin in list(self._holds.pins.items()):
            gone = table.states[pin.ids] == BlockState.GONE
            if gone.any():
                self._residency.copies.unpin(pin.ids[gone])
                pin.ids = pin.ids[~gone]
                if not len(pin.ids):
                    del self._holds.pins[name]

    # -- looking on -----------------------------------------------------------------------------

    def explain(self, namespace: Namespace, tokens: object) -> Explanation:
        """Say of every token of ``tokens`` where it is, or why it is not there. Changes nothing.

        Its ``hit_tokens`` are what :meth:`kvstore.pool.Pool.lookup` returns.

        Raises:
            UsageError: ``tokens`` are not token ids.
        """
        key = block_keys(namespace, tokens)
        with self._lock:
            return diagnosis.explain(self._residency, namespace, key, self._withheld)

    def _withheld(self, found: Found) -> Iterator[Withheld]:
        """Say which blocks of a prompt are on disk and are not going to be loaded, and why."""
        covered, cause, detail = self._residency.offload.reach(found.usable, found.tree.namespace)
        if covered < len(found.usable):
            yield Withheld(covered, len(found.usable), cause, detail)

    def leases(self) -> list[LeaseStats]:
        """Return the leases that have not run out, the next to run out first, then the reservations."""
        with self._lock:
            self._reap(self._clock())
            return self._holds.lease_stats()

    def tenants(self) -> list[TenantStats]:
        """Return what each tenant with a quota has of the last memory tier, and the rest together."""
        with self._lock:
            return self._residency.quotas.stats()

    def namespaces(self) -> list[NamespaceStats]:
        """Return the namespaces that have blocks."""
        with self._lock:
            return [
                NamespaceStats(
                    digest.hex(),
                    tree.namespace.layout.block_tokens,
                    tree.namespace.layout.block_bytes,
                    tree.namespace.keys,
                    tree.num_blocks,
                    tree.namespace.tenant,
                    tree.namespace.codec,
                )
                for digest, tree in self._residency.trees.items()
            ]

    def namespace(self, digest_hex: str) -> Namespace | None:
        """Return the namespace with this digest, if it has blocks."""
        try:
            digest = bytes.fromhex(digest_hex)
        except ValueError:
            return None
        with self._lock:
            tree = self._residency.trees.get(digest)
        return None if tree is None else tree.namespace

    def stats(self) -> PoolStats:
        """Return a consistent snapshot of sizes and counters."""
        with self._lock:
            residency, table = self._residency, self._residency.table
            tiers = tuple(
                TierStats(
                    tier.name,
                    tier.arena.capacity_bytes,
                    tier.arena.used_bytes,
                    int((table.slots[index] != NO_SLOT).sum()),
                )
                for index, tier in enumerate(residency.tiers)
            )
            trees = residency.trees.values()
            return PoolStats(
                tiers=tiers,
                num_blocks=table.num_blocks,
                held_blocks=int((table.refs > 0).sum()),
                num_leases=len(self._holds.leases),
                num_reservations=len(self._holds.reservations),
                num_pins=len(self._holds.pins),
                num_namespaces=len(trees),
                num_nodes=sum(tree.num_nodes for tree in trees),
                index_bytes=sum(tree.num_blocks * (tree.key_bytes + 4) for tree in trees)
                + table.nbytes
                + residency.lifetimes.nbytes,
                counts=residency.counts + residency.offload.counts(),
                disk=residency.offload.stats(),
                tenants=tuple(residency.quotas.stats()) if residency.quotas else (),
            )

    def buffer(self, tier: str) -> Any:  # noqa: ANN401  (numpy array or torch tensor)
        """Memory of ``tier``, uint8 ``[capacity_bytes]``: a numpy array on the host, else a torch tensor."""
        return self._residency.tiers[self._tier_index(tier)].buffer

    def drain(self) -> None:
        """Wait until every move between tiers, and every checksum, that was started is done."""
        self._mover.drain()

    def _tier_index(self, name: str) -> int:
        if name not in self.tier_names:
            raise UsageError(f"unknown tier {name!r}: there are {', '.join(self.tier_names)}")
        return self.tier_names.index(name)

    def _reap(self, now: float) -> None:
        for hold in self._holds.expired(now):
            self._residency.copies.unpin(hold.ids)
        self._claims.end(now)
        if self._residency.expire():
            self._unpin_gone()
