"""What holds of a pool while no call is under way, checked after every step of the tests."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from kvstore.blocks import FIRST_CHECKSUM, NO_SLOT, BlockState
from kvstore.parts import mask_of
from kvstore.tiers.arena import ALIGNMENT
from kvstore.tiers.tier import NamespaceTree
from radix import GroupedOrder, LeafOrder, PriorityOrder, check_invariants

if TYPE_CHECKING:
    from kvstore.residency import Residency
    from kvstore.tiers.tier import Tier
    from radix import Node


def check_residency(residency: Residency) -> None:
    """Raise AssertionError naming the first broken invariant, in this order.

    1. table, arenas and trees keep their own invariants;
    2. the blocks in the trees are exactly the RESERVED and READY rows;
    3. no two blocks share a slot, and an arena's used slots are those of blocks, moves and refills; what is on
       disk has a checksum;
    4. a tier's policy knows every node that has a block there, or one on its way there, and would evict it
       before its parent;
    5. blocks with a record of parts are RESERVED and not moving, and their record is one of
       :class:`kvstore.parts.Unfinished`; of a block that nobody writes something was committed; a RESERVED
       block without a reference has a record, and nobody writes it;
    6. those of :class:`kvstore.lifetimes.Lifetimes`;
    7. the bytes in use of the last memory tier are those of its groups of tenants.
    """
    table = residency.table
    table.check_invariants()
    for tier in residency.tiers:
        tier.arena.check_invariants()
    for tree in residency.trees.values():
        check_invariants(tree)
    nodes = list(residency.nodes())
    indexed = np.concatenate([np.empty(0, np.int32), *(node.blocks for node in nodes)])
    visible = (table.states == BlockState.RESERVED) | (table.states == BlockState.READY)
    assert np.array_equal(np.sort(indexed), np.flatnonzero(visible)), (
        "2: blocks in trees = RESERVED and READY rows"
    )
    for index, tier in enumerate(residency.tiers):
        _check_slots(residency, index, tier)
        _check_policy(residency, index, tier, nodes)
    _check_parts(residency, nodes)
    residency.lifetimes.check_invariants(nodes)
    _check_use(residency)


def _check_slots(residency: Residency, index: int, tier: Tier) -> None:
    table, copies = residency.table, residency.copies
    rows = np.flatnonzero(table.slots[index] != NO_SLOT)
    starts = [table.slots[index, rows].astype(np.int64) * ALIGNMENT]
    sizes = copies.slot_sizes(index, rows.astype(np.int32)).tolist()
    for move in residency.movement.moves:
        if move.target == index:
            starts.append(move.target_offsets)
            sizes += copies.slot_sizes(index, move.ids).tolist()
    for refill in residency.refills:
        if refill.tier == index:
            starts.append(refill.offsets)
            sizes += copies.slot_sizes(index, refill.ids).tolist()
    taken = np.concatenate(starts)
    assert len(np.unique(taken)) == len(taken), "3: no two blocks share a slot"
    assert tier.arena.used_bytes == sum(sizes), "3: used slots are those of blocks and moves"
    sealed = (table.checksums[rows] >= FIRST_CHECKSUM) | table.differs[rows]
    assert tier.disk is None or sealed.all(), "3: what is on disk has a checksum"


def _check_policy(residency: Residency, index: int, tier: Tier, nodes: list[Node]) -> None:
    if isinstance(tier.policy, LeafOrder | PriorityOrder | GroupedOrder):
        tier.policy.check_invariants()
    known = {node: age for age, node in enumerate(tier.policy)}
    landing = residency.movement.under_way(index)
    for node in nodes:
        needed = residency.copies.have(index, node.blocks) | np.isin(node.blocks, landing)
        assert node in known or not needed.any(), (
            "4: the policy knows nodes with blocks here or on their way"
        )
        if node in known and node.parent in known:
            assert known[node] < known[node.parent], "4: what follows goes before"


def _check_parts(residency: Residency, nodes: list[Node]) -> None:
    table, records = residency.table, residency.parts.records
    moving = [move.ids for move in residency.movement.moves]
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


def _check_use(residency: Residency) -> None:
    used = residency.quotas.used_bytes
    memory = residency.tiers[residency.copies.num_memory - 1].arena
    assert sum(used.values()) == memory.used_bytes, "7: all bytes are somebody's"
    assert all(num_bytes >= 0 for num_bytes in used.values()), "7: nobody has less than none"
