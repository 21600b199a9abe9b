"""A tier: a store of bytes, the arena that divides it, and the policy that chooses what leaves it.

Memory can be lent: leases and reservations say where in it their blocks are. A *durable* tier, the disk,
cannot; it comes behind all memory, its blocks have headers that say what they are, and it is found again
after a restart.

Every radix tree tells the policies of all tiers what is used, through one :class:`TierOrders`.
"""

from __future__ import annotations

from collections import UserDict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvstore.errors import UsageError
from kvstore.tiers.arena import MAX_SLABS, MAX_TIER_BYTES, Arena, slot_bytes
from kvstore.tiers.disk.format import slot_bytes_of
from kvstore.tiers.disk.store import DiskStore
from radix import EvictionOrder, RadixTree

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Sequence

    from kvstore.namespace import Namespace
    from kvstore.tiers.disk.slots import Slots
    from kvstore.tiers.rules import DiskRules
    from kvstore.tiers.store import Store
    from radix import Node
    from radix.deadlines import Deadlines


@dataclass
class Tier:
    """A store, the arena that divides it, and the policy that chooses its victims."""

    name: str
    store: Store | DiskStore
    policy: EvictionOrder
    max_slabs: int = MAX_SLABS
    rules: DiskRules | None = None
    """Of a durable tier."""

    def __post_init__(self) -> None:
        """Divide the store's bytes."""
        if (self.rules is None) != (self.disk is None):
            raise UsageError(f"tier {self.name}: a durable tier, and no other, needs rules")
        if self.store.capacity_bytes > MAX_TIER_BYTES:
            raise UsageError(f"tier {self.name} has more than {MAX_TIER_BYTES} bytes")
        self.arena: Arena | Slots = (
            self.store.slots
            if isinstance(self.store, DiskStore)
            else Arena(self.store.capacity_bytes, self.max_slabs)
        )

    @property
    def disk(self) -> DiskStore | None:
        """The store of a durable tier; None for memory."""
        return self.store if isinstance(self.store, DiskStore) else None

    @property
    def buffer(self) -> Any:  # noqa: ANN401  (numpy array or torch tensor)
        """The whole memory, as :attr:`kvstore.tiers.store.Store.buffer`; None for a durable tier."""
        return None if isinstance(self.store, DiskStore) else self.store.buffer

    def slot_bytes(self, namespace: Namespace, *, plain: bool) -> int:
        """Return the size of slots of blocks of ``namespace``, or (``plain``) those that its codec refuses."""
        if self.disk is None:
            return slot_bytes(namespace.layout.block_bytes)
        return slot_bytes_of(namespace, plain=plain)


class NamespaceTree(RadixTree):
    """The radix tree of one namespace."""

    def __init__(self, namespace: Namespace, order: EvictionOrder) -> None:
        """Make the empty tree of ``namespace``."""
        super().__init__(namespace.key_bytes, order)
        self.namespace = namespace


class Trees(UserDict[bytes, NamespaceTree]):
    """Trees by the digest of their namespace; those of one tenant are found without touching others."""

    def __init__(self) -> None:
        """Start empty."""
        super().__init__()
        self._tenants: dict[str | None, dict[bytes, NamespaceTree]] = {}

    def __setitem__(self, digest: bytes, tree: NamespaceTree) -> None:
        """Add ``tree``, or replace the one of the same namespace."""
        super().__setitem__(digest, tree)
        self._tenants.setdefault(tree.namespace.tenant, {})[digest] = tree

    def __delitem__(self, digest: bytes) -> None:
        """Remove a tree, and the record of a tenant with its last one."""
        tenant = self.data[digest].namespace.tenant
        super().__delitem__(digest)
        del self._tenants[tenant][digest]
        if not self._tenants[tenant]:
            del self._tenants[tenant]

    def of_tenant(self, tenant: str | None) -> Collection[NamespaceTree]:
        """Trees of the namespaces of ``tenant``, the oldest first."""
        return self._tenants.get(tenant, {}).values()


class TierOrders(EvictionOrder):
    """Tells the policies of all tiers; the last tier's one says what leaves the pool next."""

    def __init__(self, policies: Sequence[EvictionOrder], deadlines: Deadlines) -> None:
        """Forward to ``policies``, fastest tier first; ``deadlines`` learn of what happens to nodes."""
        self._policies = policies
        self._deadlines = deadlines

    def touch(self, path: Sequence[Node]) -> None:
        """Tell every tier."""
        for policy in self._policies:
            policy.touch(path)

    def arrive(self, path: Sequence[Node]) -> None:
        """Tell every tier."""
        for policy in self._policies:
            policy.arrive(path)

    def split(self, upper: Node, lower: Node) -> None:
        """Tell every tier."""
        for policy in self._policies:
            policy.split(upper, lower)
        self._deadlines.split(upper, lower)

    def remove(self, node: Node) -> None:
        """Tell every tier."""
        for policy in self._policies:
            policy.remove(node)
        self._deadlines.remove(node)

    def postpone(self, node: Node) -> None:
        """Tell the last tier, whose victim it is."""
        self._policies[-1].postpone(node)

    def alike(self, upper: Node, lower: Node) -> bool:
        """Whether every tier ranks them alike."""
        return all(policy.alike(upper, lower) for policy in self._policies)

    def join(self, upper: Node, lower: Node) -> None:
        """Tell every tier."""
        for policy in self._policies:
            policy.join(upper, lower)
        self._deadlines.join(upper, lower)

    def victim(self) -> Node | None:
        """Victim of the last tier."""
        return self._policies[-1].victim()

    def __len__(self) -> int:
        """Nodes known to the last tier."""
        return len(self._policies[-1])

    def __contains__(self, node: object) -> bool:
        """Whether the last tier knows ``node``."""
        return node in self._policies[-1]

    def __iter__(self) -> Iterator[Node]:
        """Nodes known to the last tier, the next victim first."""
        return iter(self._policies[-1])
