"""A tier: memory, the arena that divides it, and the policy that chooses what leaves it.

Every radix tree tells the policies of all tiers what is used, through one :class:`TierOrders`.
"""

from __future__ import annotations

from collections import UserDict
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvstore.errors import UsageError
from kvstore.tiers.arena import ALIGNMENT, MAX_SLABS, Arena
from radix import EvictionOrder, RadixTree

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Sequence

    from kvstore.namespace import Namespace
    from kvstore.tiers.store import Store
    from radix import Node

MAX_TIER_BYTES = (2**31 - 1) * ALIGNMENT
"""Slots are numbered by page in 32 bits: 8 TiB."""


@dataclass
class Tier:
    """A store, the arena that divides it, and the policy that chooses its victims."""

    name: str
    store: Store
    policy: EvictionOrder
    max_slabs: int = MAX_SLABS

    def __post_init__(self) -> None:
        """Divide the store's memory."""
        if self.store.capacity_bytes > MAX_TIER_BYTES:
            raise UsageError(f"tier {self.name} has more than {MAX_TIER_BYTES} bytes")
        self.arena = Arena(self.store.capacity_bytes, self.max_slabs)


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

    def __init__(self, policies: Sequence[EvictionOrder]) -> None:
        """Forward to ``policies``, fastest tier first."""
        self._policies = policies

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

    def remove(self, node: Node) -> None:
        """Tell every tier."""
        for policy in self._policies:
            policy.remove(node)

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

    def victim(self) -> Node | None:
        """Victim of the last tier."""
        return self._policies[-1].victim()

    def __len__(self) -> int:
        """Nodes known to the last tier."""
        return len(self._policies[-1])

    def __iter__(self) -> Iterator[Node]:
        """Nodes known to the last tier, the next victim first."""
        return iter(self._policies[-1])
