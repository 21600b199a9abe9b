"""Random use of a pool against a naive model: a set of the prefixes that were stored.

Tiny tiers, two tokens, two block sizes, moves played in any order. After every step:

* what is resident was stored, and is closed under prefixes;
* no block was lost: stored = resident + the evictions that were counted;
* every leased block still has its own bytes, where the lease says;
* the pool's own invariants hold, down to slots and reference counts.
"""

from __future__ import annotations

import numpy as np
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    precondition,
    rule,
)

from kvstore.blocks import BlockState
from kvstore.namespace import KVLayout, Namespace
from kvstore.testing import FakeClock, ManualMover, pattern, small_pool

TOKENS = st.builds(
    lambda trunk, branch, leaf: [0] * trunk + [1] * branch + [0] * leaf,
    *(st.integers(0, 9), st.integers(0, 3), st.integers(0, 2)),
)
"""Prompts that share trunks, so that most operations meet the blocks of another."""
NAMESPACES = [
    Namespace(b"a", KVLayout(1, 1, 8, "float32", block_tokens=2)),
    Namespace(b"b", KVLayout(1, 1, 8, "float32", block_tokens=2)),
    Namespace(b"a", KVLayout(1, 1, 1024, "float32", block_tokens=1)),  # two pages
]
SPACE = st.sampled_from([NAMESPACES[0], *NAMESPACES])
INDEX_REASONS = {"capacity", "aborted", "evicted", "cleared", "corrupt"}


class PoolMachine(RuleBasedStateMachine):
    leases = Bundle("leases")
    reservations = Bundle("reservations")

    @initialize(
        gpu=st.sampled_from([0, 1, 3, 5]),
        dram=st.sampled_from([2, 5, 9, 18, 140]),
        slabs=st.sampled_from([2, 3, 64]),
    )
    def start(self, gpu, dram, slabs):
        self.mover, self.clock = ManualMover(max_waiting=4), FakeClock()
        pages = (gpu, dram) if gpu else (dram,)
        self.pool = small_pool(
            *pages, mover=self.mover, clock=self.clock, lease_timeout_s=10, max_slabs=slabs
        )
        self.stored: set[tuple[bytes, bytes]] = set()
        self.lost = 0
        self.held: dict[int, tuple] = {}

    # -- helpers

    def prefixes(self, namespace, tokens):
        key = np.array(tokens, "<i4").tobytes()
        stride = namespace.key_bytes
        return [key[:end] for end in range(stride, len(key) + 1, stride)]

    def views(self, held):
        for tier, offset in zip(held.tiers.tolist(), held.offsets.tolist(), strict=True):
            yield self.pool.buffer(self.pool.tier_names[tier])[offset : offset + held.block_bytes]

    def resident(self):
        table = self.pool._residency.table
        found = set()
        for tree in self.pool._residency.trees.values():
            for node in tree.walk():
                prefix = tree.prefix(node)
                above = len(prefix) // tree.key_bytes - len(node.blocks)
                for position, state in enumerate(table.states[node.blocks].tolist()):
                    if state == BlockState.READY:
                        stop = (above + position + 1) * tree.key_bytes
                        found.add((tree.namespace.digest, prefix[:stop]))
        return found

    def evictions(self):
        counts = self.pool.stats().counts
        return sum(
            value
            for key, value in counts.items()
            if key[0] == "evicted_blocks" and key[2] in INDEX_REASONS
        )

    def forget_evicted(self):
        """Account for what left the index since the last step."""
        resident = self.resident()
        gone = self.stored - resident
        assert resident <= self.stored, "nothing is resident that was not stored"
        assert len(gone) == self.evictions() - self.lost, "every block that left was counted, once"
        self.lost += len(gone)
        self.stored = resident
        return len(gone)

    # -- rules

    @rule(target=reservations, namespace=SPACE, tokens=TOKENS)
    def reserve(self, namespace, tokens):
        slots = {tier.name: tier.capacity_bytes for tier in self.pool.stats().tiers}
        prefixes = self.prefixes(namespace, tokens)
        size = -(-namespace.layout.block_bytes // 4096) * 4096
        if len(prefixes) > max(capacity // size for capacity in slots.values()):
            prefixes = prefixes[: max(capacity // size for capacity in slots.values())]
            tokens = tokens[: len(prefixes) * namespace.layout.block_tokens]
        small = {space.digest for space in NAMESPACES[:2]}
        alike = all(digest in small for digest, _ in self.stored) and namespace.digest in small
        reservation = self.pool.reserve(namespace, tokens)
        lost = self.forget_evicted()
        if alike and len(slots) == 1:
            assert lost <= reservation.num_blocks, "no more is evicted than is needed"
        for index, view in zip(reservation.indices.tolist(), self.views(reservation), strict=True):
            view[:] = pattern(namespace, prefixes[index])
        return (reservation, prefixes)

    @rule(held=consumes(reservations))
    def commit(self, held):
        reservation, prefixes = held
        table = self.pool._residency.table
        alive = table.states[reservation.block_ids] == BlockState.RESERVED
        assert self.pool.commit(reservation) == alive.sum()
        for index in reservation.indices[alive].tolist():
            self.stored.add((reservation.namespace.digest, prefixes[index]))
        self.forget_evicted()

    @rule(namespace=SPACE, tokens=TOKENS)
    def put(self, namespace, tokens):
        self.commit(self.reserve(namespace, tokens))

    @rule(held=consumes(reservations))
    def abort(self, held):
        self.pool.abort(held[0])
        self.forget_evicted()

    @rule(target=leases, namespace=SPACE, tokens=TOKENS)
    def acquire(self, namespace, tokens):
        lease = self.pool.acquire(namespace, tokens)
        prefixes = self.prefixes(namespace, tokens)
        known = 0
        while known < len(prefixes) and (namespace.digest, prefixes[known]) in self.stored:
            known += 1
        usable = min(known, max(0, len(tokens) - 1) // namespace.layout.block_tokens)
        hidden = self.first_hidden(namespace, prefixes)
        assert lease.num_blocks == min(usable, hidden), "all that is stored and visible is found"
        self.held[id(lease)] = (lease, prefixes)
        return lease

    @precondition(lambda self: self.stored)
    @rule(target=leases, data=st.data(), longer=st.integers(0, 2))
    def acquire_stored(self, data, longer):
        digest, prefix = data.draw(st.sampled_from(sorted(self.stored)))
        namespace = next(space for space in NAMESPACES if space.digest == digest)
        return self.acquire(namespace, np.frombuffer(prefix, "<i4").tolist() + [0] * longer)

    def first_hidden(self, namespace, prefixes):
        """Blocks before the first one that is still being written."""
        tree = self.pool._residency.trees.get(namespace.digest)
        if tree is None or not prefixes:
            return 0
        states = self.pool._residency.table.states[tree.match(prefixes[-1]).block_ids()].tolist()
        return next((i for i, state in enumerate(states) if state != BlockState.READY), len(states))

    @rule(lease=consumes(leases))
    def release(self, lease):
        del self.held[id(lease)]
        self.pool.release(lease)
        self.forget_evicted()

    @precondition(lambda self: self.held)
    @rule(lease=leases)
    def verify(self, lease):
        assert self.pool.verify(lease) == lease.num_blocks

    @precondition(lambda self: self.mover.jobs)
    @rule()
    def run_a_move(self):
        self.mover.run_one()
        self.forget_evicted()

    @rule(waiting=st.sampled_from([0, 1, 4]))
    def keep_the_mover_busy(self, waiting):
        self.mover._max_waiting = waiting

    @precondition(lambda self: self.mover.jobs)
    @rule()
    def fail_a_move(self):
        copy = self.pool._residency._copy
        self.pool._residency._copy = None  # calling it raises
        self.mover.run_one()
        self.pool._residency._copy = copy
        self.forget_evicted()

    @rule(namespace=SPACE, tokens=TOKENS)
    def demote(self, namespace, tokens):
        before = self.resident()
        self.pool.demote(namespace, tokens, self.pool.tier_names[0])
        assert self.resident() == before

    @precondition(lambda self: len(self.stored) > 5)
    @rule(namespace=SPACE, tokens=TOKENS)
    def evict(self, namespace, tokens):
        self.pool.evict(namespace, tokens)
        self.forget_evicted()

    @precondition(lambda self: len(self.stored) > 5)
    @rule()
    def clear(self):
        self.pool.clear()
        self.forget_evicted()
        assert not self.stored

    # -- invariants

    @invariant()
    def the_pool_is_sound(self):
        if hasattr(self, "pool"):
            self.pool.check_invariants()

    @invariant()
    def leased_bytes_stay(self):
        for lease, prefixes in getattr(self, "held", {}).values():
            for prefix, view in zip(prefixes, self.views(lease), strict=False):
                np.testing.assert_array_equal(view, pattern(lease.namespace, prefix))

    def teardown(self):
        if not hasattr(self, "pool"):
            return
        for lease, _ in self.held.values():
            self.pool.release(lease)
        for held_id in list(self.pool._reservations):
            hold = self.pool._reservations.pop(held_id)
            self.pool._residency.detach(hold.tree.match(hold.key).nodes, hold.fresh, "aborted")
            self.pool._residency.unpin(np.concatenate([hold.known, hold.fresh]))
        self.pool.drain()
        self.pool.clear()
        self.pool.check_invariants()
        stats = self.pool.stats()
        assert stats.num_blocks == stats.held_blocks == stats.num_namespaces == 0
        assert all(tier.used_bytes == 0 for tier in stats.tiers)
        self.pool.close()


TestPool = PoolMachine.TestCase
