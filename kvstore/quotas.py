"""How much of the last memory tier each tenant has, and who has to give way.

A *ceiling* is the most that a tenant may have: beyond it, its own blocks make room for its new ones. A *floor*
is what others cannot take from it. Tenants without either share what is left as one group.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvstore.errors import ConfigError
from kvstore.sizes import size
from kvstore.stats import TenantStats
from radix import GroupedOrder, PriorityOrder

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from kvstore.tiers.tier import NamespaceTree
    from radix import EvictionOrder

THE_REST = ""
"""Group of the tenants of whom nothing is said, and of what belongs to no tenant."""


@dataclass(frozen=True)
class Quota:
    """What one tenant may have. Plain numbers: they are told to clients as they are."""

    ceiling_bytes: int | None = None
    """None: all."""
    floor_bytes: int = 0


def ordered_by(policy: Callable[[], EvictionOrder], quotas: Mapping[str, Quota]) -> EvictionOrder:
    """Return an order by priority, and by ``policy`` in each: one for each tenant that has a quota."""
    if not quotas:
        return PriorityOrder(policy)
    return GroupedOrder(
        lambda: PriorityOrder(policy), lambda tree: _group_of(tree.namespace.tenant, quotas)
    )


def _group_of(tenant: str | None, quotas: Mapping[str, Quota]) -> str:
    return tenant if tenant is not None and tenant in quotas else THE_REST


class Quotas:
    """Bytes in use by group, and what is allowed. Single-owner: the pool serialises access."""

    def __init__(self, quotas: Mapping[str, Quota], capacity_bytes: int) -> None:
        """Start with nothing in use.

        Raises:
            ConfigError: floors are more than ``capacity_bytes`` together, or one is above its ceiling.
        """
        self._quotas = dict(quotas)
        floors = sum(quota.floor_bytes for quota in quotas.values())
        if floors > capacity_bytes:
            raise ConfigError(
                f"the floors of all tenants together are {size(floors)}, more than the {size(capacity_bytes)} "
                "of the last memory tier: lower them, or give it more"
            )
        for name, quota in quotas.items():
            if quota.ceiling_bytes is not None and quota.floor_bytes > quota.ceiling_bytes:
                raise ConfigError(
                    f"tenant {name!r}: its floor of {size(quota.floor_bytes)} is above its ceiling of "
                    f"{size(quota.ceiling_bytes)}"
                )
        self.used_bytes: Counter[str] = Counter()

    def __bool__(self) -> bool:
        """Whether anything is said of any tenant."""
        return bool(self._quotas)

    def group_of(self, tenant: str | None) -> str:
        """Return the group of ``tenant``: itself, or that of the rest."""
        return _group_of(tenant, self._quotas)

    def group_of_tree(self, tree: NamespaceTree) -> str:
        """Return the group to which ``tree`` belongs."""
        return self.group_of(tree.namespace.tenant)

    def ceiling_bytes(self, group: str) -> int | None:
        """Bytes that ``group`` may have at most; None: all."""
        return self._quotas.get(group, Quota()).ceiling_bytes

    def left_bytes(self, group: str) -> int | None:
        """Bytes that ``group`` may take before its own blocks must make room; None: any number."""
        ceiling = self.ceiling_bytes(group)
        return None if ceiling is None else ceiling - self.used_bytes[group]

    def spare_bytes(self, group: str) -> int:
        """Bytes that ``group`` can lose to others."""
        return self.used_bytes[group] - self._quotas.get(group, Quota()).floor_bytes

    def givers(self, group: str, slot_bytes: int) -> list[str]:
        """Groups that make room for ``group``: those that can lose a slot, and itself.

        While it is below its own floor, it does so only if nobody else can.
        """
        others = [other for other in self.used_bytes if other != group]
        others = [other for other in others if self.spare_bytes(other) >= slot_bytes]
        below = self.spare_bytes(group) < 0
        return others if below and others else [*others, group]

    def stats(self) -> list[TenantStats]:
        """Describe every tenant of whom something is said, by name, then the rest."""
        return [
            TenantStats(
                name,
                self.used_bytes[name],
                self._quotas[name].ceiling_bytes,
                self._quotas[name].floor_bytes,
            )
            for name in sorted(self._quotas)
        ] + [TenantStats(THE_REST, self.used_bytes[THE_REST], None, 0)]
