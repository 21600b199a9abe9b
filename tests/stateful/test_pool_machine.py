"""Random use of a pool against a naive model: a set of the prefixes that were stored.

Tiny tiers, two tokens, two block sizes, a codec that refuses some blocks, moves played in any order; writers of
whole blocks and of parts. After every step:

* what is resident was stored, and is closed under prefixes;
* a block is visible when each of its heads was committed, and handed to one writer of a head at a time;
* no block was lost: stored = resident + the evictions that were counted;
* every leased block still has its own bytes, where the lease says;
* what is pinned is resident until it is forgotten on request, or expires;
* what has expired is invisible, and nothing else expires;
* a checksum that is known is that of the block's own bytes;
* no tenant has more than its ceiling, nor loses what its floor keeps to others;
* the pool's own invariants hold, down to slots and reference counts.
"""

from __future__ import annotations

import errno
import shutil
import tempfile
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import xxhash
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

import kvstore.movement
from kvstore.assembly import POLICIES
from kvstore.blocks import FIRST_CHECKSUM, BlockState
from kvstore.errors import UsageError
from kvstore.namespace import KVLayout, Namespace
from kvstore.planner import Planner
from kvstore.quotas import Quota
from kvstore.testing import FakeClock, ManualMover, pattern, small_pool
from kvstore.testing.disk import FaultySystem, fails_at
from kvstore.tiers import codec
from kvstore.tiers.disk import DiskOptions, DiskStore
from kvstore.tiers.disk.format import _codec
from kvstore.tiers.rules import DiskRules, WriteBudget

TOKENS = st.builds(
    lambda trunk, branch, leaf: [0] * trunk + [1] * branch + [0] * leaf,
    *(st.integers(0, 9), st.integers(0, 3), st.integers(0, 2)),
)
"""Prompts that share trunks, so that most operations meet the blocks of another."""
NAMESPACES = [
    Namespace(b"a", KVLayout(1, 4, 2, "float32", block_tokens=2)),
    Namespace(b"b", KVLayout(1, 4, 6, "float32", block_tokens=2), tenant="t"),  # slots of one size
    # Two pages; on disk one, or two where LZ4 cannot make them smaller.
    Namespace(b"a", KVLayout(1, 4, 256, "float32", block_tokens=1), tenant="u", codec="lz4"),
]
ALL_HEADS = frozenset(range(4))
HEADS = st.sampled_from([None, None, None, (0, 2), (0, 2), (2, 4), (2, 4), (1, 2), (0, 3), (0, 4)])
SPACE = st.sampled_from([NAMESPACES[0], *NAMESPACES])
DISK = DiskOptions(
    (5 << 20) + (1 << 17), segment_bytes=1 << 20, reserve_bytes=0, manifest_bytes=1 << 20, threads=1
)
INDEX_REASONS = {"capacity", "aborted", "evicted", "cleared", "corrupt", "expired", "quota"}
PRIORITIES = st.sampled_from([50, 50, 50, 0, 80])
TTLS = st.sampled_from([None, None, None, 2.0, 7.0])


@pytest.fixture(autouse=True, scope="module")
def room_for_lz4():
    """Half of a block, so that small ones can save a page."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(codec.ROOM, 4, (1, 2))
        _codec.cache_clear()
        yield
    _codec.cache_clear()


def content(namespace, prefix):
    """What the block that ends ``prefix`` holds: mostly noise where there is a codec."""
    if namespace.codec is None or xxhash.xxh3_64_intdigest(prefix) % 4 == 0:
        return pattern(namespace, prefix)
    rng = np.random.default_rng(list(prefix))
    return rng.integers(0, 256, namespace.layout.block_bytes, np.uint8)


class Unfinished:
    """What the model knows of a block that is being written."""

    def __init__(self):
        self.written: frozenset[int] = frozenset()
        self.writers: dict[int, frozenset[int]] = {}
        """Heads by the id of their writer's reservation."""
        self.lifetime_s = 0.0
        """Longest that anybody asked for."""

    def lacks(self, heads):
        """Whether a writer of ``heads`` may have it."""
        claimed = frozenset().union(*self.writers.values())
        return not claimed & heads and bool(heads - self.written)


class PoolMachine(RuleBasedStateMachine):
    policy = "lru"
    leases = Bundle("leases")
    reservations = Bundle("reservations")

    @initialize(
        gpu=st.sampled_from([0, 1, 3, 5]),
        dram=st.sampled_from([2, 5, 9, 18, 140]),
        slabs=st.sampled_from([2, 3, 64]),
        ceiling=st.sampled_from([None, 1, 2, 4]),
        floors=st.tuples(st.integers(0, 1), st.integers(0, 2)),
        limited=st.booleans(),
    )
    def start(self, gpu, dram, slabs, ceiling, floors, limited):
        self.quotas = {
            "t": Quota(ceiling and ceiling << 12, floors[0] << 12),
            "u": Quota(None, min(floors[1], dram - floors[0]) << 12),
        }
        self.quotas = self.quotas if limited else {}
        policy = POLICIES[self.policy]
        self.mover, self.clock = ManualMover(max_waiting=4), FakeClock()
        pages = (gpu, dram) if gpu else (dram,)
        self.num_memory = len(pages)
        self.pool = small_pool(
            *pages,
            mover=self.mover,
            clock=self.clock,
            lease_timeout_s=1e9,
            max_slabs=slabs,
            policy=policy,
            quotas=self.quotas,
            **self.disk_options(),
        )
        self.stored: set[tuple[bytes, bytes]] = set()
        self.lost = 0
        self.held: dict[int, tuple] = {}
        self.pinned: dict[str, set[tuple[bytes, bytes]]] = {}
        self.unfinished: dict[tuple[bytes, bytes], Unfinished] = {}
        self.expires_at: dict[tuple[bytes, bytes], float] = {}

    # -- helpers

    def used_bytes(self):
        return {tenant.tenant: tenant.used_bytes for tenant in self.pool.tenants()}

    def expired(self, name):
        return name in self.stored and self.expires_at[name] <= self.clock()

    def disk_options(self):
        """What the pool has behind its memory."""
        return {}

    def prefixes(self, namespace, tokens):
        key = np.array(tokens, "<i4").tobytes()
        stride = namespace.key_bytes
        return [key[:end] for end in range(stride, len(key) + 1, stride)]

    def views(self, held):
        for tier, offset in zip(held.tiers.tolist(), held.offsets.tolist(), strict=True):
            yield self.pool.buffer(self.pool.tier_names[tier])[offset : offset + held.block_bytes]

    def resident(self, wanted=BlockState.READY):
        table = self.pool._residency.table
        found = set()
        for tree in self.pool._residency.trees.values():
            for node in tree.walk():
                prefix = tree.prefix(node)
                above = len(prefix) // tree.key_bytes - len(node.blocks)
                for position, state in enumerate(table.states[node.blocks].tolist()):
                    if state == wanted:
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
        expired = {name for name in gone if self.expired(name)}
        self.pinned = {name: pin - expired for name, pin in self.pinned.items()}
        assert not gone & set().union(*self.pinned.values()), "what is pinned stays"
        assert resident <= self.stored, "nothing is resident that was not stored"
        assert len(gone) == self.evictions() - self.lost, "every block that left was counted, once"
        self.lost += len(gone)
        self.stored = resident
        self.expires_at = {name: self.expires_at[name] for name in resident}
        unfinished = self.resident(BlockState.RESERVED)
        assert unfinished <= set(self.unfinished), "what is unfinished was begun"
        self.unfinished = {name: self.unfinished[name] for name in unfinished}
        for block in self.unfinished.values():
            assert block.writers or block.written, "it has bytes, or somebody brings them"
            assert block.written < ALL_HEADS, "it is not finished"
        return len(gone - expired)

    # -- rules

    @rule(
        target=reservations,
        namespace=SPACE,
        tokens=TOKENS,
        heads=HEADS,
        ttl_s=TTLS,
        priority=PRIORITIES,
    )
    def reserve(self, namespace, tokens, heads, ttl_s, priority):
        tiers = self.pool.stats().tiers
        slots = {tier.name: tier.capacity_bytes for tier in tiers[: self.num_memory]}
        prefixes = self.prefixes(namespace, tokens)
        size = -(-namespace.layout.block_bytes // 4096) * 4096
        if len(prefixes) > max(capacity // size for capacity in slots.values()):
            prefixes = prefixes[: max(capacity // size for capacity in slots.values())]
            tokens = tokens[: len(prefixes) * namespace.layout.block_tokens]
        small = {space.digest for space in NAMESPACES[:2]}
        alike = all(digest in small for digest, _ in self.stored) and namespace.digest in small
        mine = ALL_HEADS if heads is None else frozenset(range(*heads))
        names = [(namespace.digest, prefix) for prefix in prefixes]
        lasting = [*map(self.expired, names), True].index(True)
        known = min(lasting, self.indexed(namespace, prefixes))
        lifetime_s = float("inf") if ttl_s is None else ttl_s
        for name in names[:known]:
            if name in self.stored:
                until = self.clock() + lifetime_s
                self.expires_at[name] = max(self.expires_at[name], until)
            else:
                block = self.unfinished[name]
                block.lifetime_s = max(block.lifetime_s, lifetime_s)
        joined = [
            position
            for position, name in enumerate(names[:known])
            if name in self.unfinished and self.unfinished[name].lacks(mine)
        ]
        self.pool.reap()
        self.forget_evicted()
        away = self.away(namespace, prefixes[:known]) if mine == ALL_HEADS else []
        used = self.used_bytes()
        left = {name[0] for name, block in self.unfinished.items() if not block.writers}
        spared = {space.tenant for space in NAMESPACES if space.digest not in left}
        reservation = self.pool.reserve(
            namespace, tokens, heads=heads, ttl_s=ttl_s, priority=priority
        )
        for tenant, used_bytes in self.used_bytes().items():
            quota = self.quotas.get(tenant, Quota())
            if tenant != (namespace.tenant or "") and tenant in spared:
                assert used_bytes >= min(used[tenant], quota.floor_bytes), "others spare its floor"
        given = reservation.indices.tolist()
        refilled = [position for position in given if position in away]
        indices = [position for position in given if position not in away]
        assert given == sorted(given)
        assert refilled == away[: len(refilled)]
        assert indices[: len(joined)] == joined, "all that lack these heads"
        assert indices[len(joined) :] == [*range(known, known + len(indices) - len(joined))]
        wanted = len(joined) + len(away) + len(prefixes) - known
        assert reservation.refused == wanted - len(given)
        for position in indices:
            block = self.unfinished.setdefault(names[position], Unfinished())
            block.written -= mine
            block.lifetime_s = max(block.lifetime_s, lifetime_s)
            block.writers[reservation.held_id] = mine
        lost = self.forget_evicted()
        if alike and len(tiers) == 1:
            assert lost <= reservation.num_blocks, "no more is evicted than is needed"
        for index, view in zip(reservation.indices.tolist(), self.views(reservation), strict=True):
            rows, whole = (2, 4, -1), content(namespace, prefixes[index])
            part = slice(min(mine), max(mine) + 1)
            view.reshape(rows)[:, part] = whole.reshape(rows)[:, part]
        return (reservation, prefixes)

    @rule(held=consumes(reservations))
    def commit(self, held):
        finished = {}
        for name, block in [*self.written_by(*held)]:
            block.written |= block.writers.pop(held[0].held_id)
            if block.written == ALL_HEADS:
                finished[name] = self.clock() + block.lifetime_s
                del self.unfinished[name]
        assert self.pool.commit(held[0]) == len(finished)
        for prefix in held[1][: max(held[0].indices, default=0)] if finished else ():
            name = held[0].namespace.digest, prefix
            if name in self.expires_at:
                self.expires_at[name] = max(self.expires_at[name], *finished.values())
        self.stored |= set(finished)
        self.expires_at |= finished
        self.forget_evicted()

    def written_by(self, reservation, prefixes):
        """Blocks that a reservation still writes: those that were forgotten meanwhile are nobody's."""
        for position in reservation.indices.tolist():
            name = reservation.namespace.digest, prefixes[position]
            block = self.unfinished.get(name)
            if block and reservation.held_id in block.writers:
                yield name, block

    @rule(namespace=SPACE, tokens=TOKENS, heads=HEADS, ttl_s=TTLS, priority=PRIORITIES)
    def put(self, namespace, tokens, heads, ttl_s, priority):
        self.commit(self.reserve(namespace, tokens, heads, ttl_s, priority))

    @rule(seconds=st.sampled_from([1.0, 1.0, 5.0]))
    def time_passes(self, seconds):
        self.clock.advance(seconds)

    @rule(held=consumes(reservations))
    def abort(self, held):
        given_up = False
        for name, block in [*self.written_by(*held)]:
            del block.writers[held[0].held_id]
            given_up |= not block.writers and not block.written
            if given_up:  # and what is behind it
                del self.unfinished[name]
        left = len(self.unfinished)
        self.pool.abort(held[0])
        self.forget_evicted()
        assert given_up or len(self.unfinished) == left, "the others keep theirs"

    @rule(target=leases, namespace=SPACE, tokens=TOKENS)
    def acquire(self, namespace, tokens):
        lease = self.pool.acquire(namespace, tokens)
        self.forget_evicted()
        prefixes = self.prefixes(namespace, tokens)
        assert lease.num_blocks == self.loaded(namespace, tokens), "all that memory has is found"
        self.held[id(lease)] = (lease, prefixes)
        return lease

    def loaded(self, namespace, tokens):
        """Leading blocks that a lease may cover and memory has: all of them where there is no disk."""
        usable = self.usable(namespace, tokens)
        residency = self.pool._residency
        if self.num_memory == len(residency.tiers) or not usable:
            return usable
        tree, prefixes = residency.trees[namespace.digest], self.prefixes(namespace, tokens)
        return residency.copies.num_in_memory(tree.match(prefixes[-1]).block_ids()[:usable])

    @precondition(lambda self: self.stored)
    @rule(target=leases, data=st.data(), longer=st.integers(0, 2))
    def acquire_stored(self, data, longer):
        digest, prefix = data.draw(st.sampled_from(sorted(self.stored)))
        namespace = next(space for space in NAMESPACES if space.digest == digest)
        return self.acquire(namespace, np.frombuffer(prefix, "<i4").tolist() + [0] * longer)

    def away(self, namespace, known):
        """Positions of stored blocks that only the disk has, and nobody loads."""
        residency = self.pool._residency
        if self.num_memory == len(residency.tiers) or not known:
            return []
        ids = residency.trees[namespace.digest].match(known[-1]).block_ids()
        loads = [move for move in residency.movement.moves if move.source == self.num_memory]
        return [
            position
            for position, block in enumerate(ids.tolist())
            if (namespace.digest, known[position]) in self.stored
            and (residency.table.slots[: self.num_memory, block] < 0).all()
            and (residency.offload.is_stuck() or not any(block in move.ids for move in loads))
        ]

    def visible(self, namespace, tokens):
        """Leading blocks of ``tokens`` that are stored, with nothing unfinished before them."""
        prefixes = self.prefixes(namespace, tokens)
        known = 0
        while known < len(prefixes) and (namespace.digest, prefixes[known]) in self.stored:
            if self.expired((namespace.digest, prefixes[known])):
                break
            known += 1
        return min(known, self.first_hidden(namespace, prefixes))

    def usable(self, namespace, tokens):
        longest = max(0, len(tokens) - 1) // namespace.layout.block_tokens
        return min(self.visible(namespace, tokens), longest)

    def indexed(self, namespace, prefixes):
        """Leading blocks that are stored or being written."""
        tree = self.pool._residency.trees.get(namespace.digest)
        return tree.match(prefixes[-1]).num_blocks if tree and prefixes else 0

    def first_hidden(self, namespace, prefixes):
        """Blocks before the first one that is still being written."""
        tree = self.pool._residency.trees.get(namespace.digest)
        if tree is None or not prefixes:
            return 0
        states = self.pool._residency.table.states[tree.match(prefixes[-1]).block_ids()].tolist()
        return next((i for i, state in enumerate(states) if state != BlockState.READY), len(states))

    @rule(lease=consumes(leases))
    def release(self, lease):
        if self.held.pop(id(lease), None) is None:  # of the pool before the last restart
            return
        self.pool.release(lease)
        self.forget_evicted()

    @precondition(lambda self: self.held)
    @rule(lease=leases)
    def verify(self, lease):
        if id(lease) not in self.held:
            return
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
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(kvstore.movement, "copy_blocks", None)  # calling it raises
            self.mover.run_one()
        self.forget_evicted()

    @rule(namespace=SPACE, tokens=TOKENS)
    def prefetch(self, namespace, tokens):
        before = self.resident()
        known = self.usable(namespace, tokens) * namespace.layout.block_tokens
        told = self.pool.prefetch(namespace, tokens)
        assert told == known or (told < known and len(self.pool.tier_names) > self.num_memory)
        self.forget_evicted()
        assert self.stored <= before, "nothing is stored by it"

    @rule(namespace=SPACE, tokens=TOKENS)
    def explain(self, namespace, tokens):
        before = self.resident()
        told, tiers = self.pool.explain(namespace, tokens), self.pool.stats().tiers
        assert self.resident() == before
        width, hit_blocks = namespace.layout.block_tokens, self.usable(namespace, tokens)
        assert told.prompt_tokens == len(tokens)
        assert told.hit_tokens == self.pool.lookup(namespace, tokens)
        reached = told.hit_tokens // width
        assert reached == hit_blocks or (reached < hit_blocks and len(tiers) > self.num_memory)
        edges = [0, *(segment.stop for segment in told.segments)]
        assert [segment.start for segment in told.segments] == edges[:-1], "no gap, no overlap"
        assert edges[-1] == len(tokens)
        assert all(segment.start < segment.stop for segment in told.segments)
        for segment in told.segments:
            assert (segment.cause == "hit") == (segment.stop <= told.hit_tokens)
            assert (segment.tier in self.pool.tier_names) == (segment.cause == "hit")
        causes = [segment.cause for segment in told.segments if segment.cause != "hit"]
        tail = "incomplete_block" if len(tokens) % width else "last_token"
        assert causes[-1:] == [tail] * bool(tokens), "the last tokens never hit"
        prefixes = self.prefixes(namespace, tokens)
        longest = max(0, len(tokens) - 1) // width
        if hit_blocks < min(self.indexed(namespace, prefixes), longest):
            expired = self.expired((namespace.digest, prefixes[hit_blocks]))
            assert causes[0] == ("expired" if expired else "being_stored")
        else:
            assert "being_stored" not in causes

    @rule(name=st.sampled_from("abc"), namespace=SPACE, tokens=TOKENS)
    def pin(self, name, namespace, tokens):
        blocks = self.visible(namespace, tokens)
        wanted = {
            (namespace.digest, prefix) for prefix in self.prefixes(namespace, tokens)[:blocks]
        }
        others = [pin for other, pin in self.pinned.items() if other != name]
        if self.would_fill_a_tier(wanted.union(*others)):
            with pytest.raises(UsageError, match=r"at most \d+ may be pinned"):
                self.pool.pin(name, namespace, tokens)
            return
        assert self.pool.pin(name, namespace, tokens) == blocks * namespace.layout.block_tokens
        self.pinned.pop(name, None)
        if wanted:
            self.pinned[name] = wanted

    def would_fill_a_tier(self, names):
        """Whether the copies of these blocks take more than half of some tier."""
        residency = self.pool._residency
        held = [0] * len(residency.tiers)
        for digest, prefix in names:
            block = residency.trees[digest].match(prefix).block_ids()[-1]
            for index, slot in enumerate(residency.table.slots[:, block].tolist()):
                size = residency.copies.slot_size(index, residency.copies.class_of(block))
                held[index] += size if slot >= 0 or index + 1 == self.num_memory else 0
        return any(
            size > tier.arena.capacity_bytes // 2
            for size, tier in zip(held, residency.tiers, strict=True)
        )

    @rule(name=st.sampled_from("abc"))
    def unpin(self, name):
        assert self.pool.unpin(name) == (self.pinned.pop(name, None) is not None)

    @rule(namespace=SPACE, tokens=TOKENS)
    def demote(self, namespace, tokens):
        before = self.resident()
        self.pool.demote(namespace, tokens, self.pool.tier_names[0])
        assert self.resident() == before

    @precondition(lambda self: len(self.stored) > 5)
    @rule(namespace=SPACE, tokens=TOKENS)
    def evict(self, namespace, tokens):
        matched = self.prefixes(namespace, tokens)[:1]
        for name, pin in list(self.pinned.items()):
            self.pinned[name] = {
                (digest, prefix)
                for digest, prefix in pin
                if digest != namespace.digest or not matched or not prefix.startswith(matched[0])
            }
        self.pool.evict(namespace, tokens)
        self.forget_evicted()

    @precondition(lambda self: len(self.stored) > 5)
    @rule()
    def clear(self):
        self.pinned.clear()
        self.pool.clear()
        self.forget_evicted()
        assert not self.stored

    # -- invariants

    @invariant()
    def the_pool_is_sound(self):
        if hasattr(self, "pool"):
            self.pool.check_invariants()

    @invariant()
    def nobody_is_above_its_ceiling(self):
        """But for blocks that are on their way to another place in the same tier, which count twice."""
        if hasattr(self, "pool"):
            residency, twice = self.pool._residency, Counter()
            for move in residency.movement.moves:
                if move.source == move.target == self.num_memory - 1:
                    group = residency.copies.size(residency.copies.class_of(move.ids[0])).group
                    twice[group] += residency.copies.bytes_of(move.source, move.ids)
            for tenant in self.pool.tenants():
                most = tenant.ceiling_bytes
                assert most is None or tenant.used_bytes - twice[tenant.tenant] <= most

    @invariant()
    def pins_are_what_was_pinned(self):
        if hasattr(self, "pool"):
            self.pinned = {name: pin for name, pin in self.pinned.items() if pin}
            assert {pin.name: pin.num_blocks for pin in self.pool.pins()} == {
                name: len(pin) for name, pin in self.pinned.items()
            }

    @invariant()
    def checksums_are_right(self):
        if not hasattr(self, "pool"):
            return
        residency = self.pool._residency
        known = residency.table.checksums >= FIRST_CHECKSUM
        for tree in residency.trees.values():
            size = tree.namespace.layout.block_bytes
            for ids in (node.blocks[known[node.blocks]] for node in tree.walk()):
                for block, tier, offset in zip(ids, *residency.copies.where(ids), strict=True):
                    if tier == self.num_memory:  # on disk alone: checked when it is read
                        continue
                    data = residency.tiers[tier].store.buffer[offset : offset + size]
                    assert xxhash.xxh3_64_intdigest(data) == residency.table.checksums[block]

    @invariant()
    def leased_bytes_stay(self):
        for lease, prefixes in getattr(self, "held", {}).values():
            for prefix, view in zip(prefixes, self.views(lease), strict=False):
                np.testing.assert_array_equal(view, content(lease.namespace, prefix))

    def teardown(self):
        if not hasattr(self, "pool"):
            return
        for lease, _ in self.held.values():
            self.pool.release(lease)
        for hold in self.pool._holds.reservations.values():
            self.pool._abort(hold)
        self.pool._holds.reservations.clear()
        self.pool.drain()
        table = self.pool._residency.table
        assert not ((table.checksums > 0) & (table.checksums < FIRST_CHECKSUM)).any(), (
            "no seal is forgotten"
        )
        self.pool.clear()
        self.pool.check_invariants()
        stats = self.pool.stats()
        assert stats.num_blocks == stats.held_blocks == stats.num_namespaces == 0
        assert all(tier.used_bytes == 0 for tier in stats.tiers)
        self.pool.close()


class PoolWithDiskMachine(PoolMachine):
    """The same with a disk behind, whose device fails now and then."""

    admission = "always"

    def disk_options(self):
        self.path = Path(tempfile.mkdtemp(prefix="kvstore-machine-", dir="/var/tmp"))
        self.system = FaultySystem()
        disk = DiskStore(self.path / "tier", DISK, self.clock, self.system)
        return {"disk": disk, "rules": self.disk_rules()}

    def disk_rules(self):
        planner = Planner(self.clock, mode="always")
        return DiskRules(self.admission, WriteBudget(self.clock, 0), planner)

    @rule(seconds=st.sampled_from([0.5, 100.0]))
    def the_device_fails_for_a_while(self, seconds):
        """What is moved meanwhile does not arrive, and nothing is lost."""
        before = self.resident()
        self.system.fault = fails_at(1, errno.EIO, 1 << 40)
        self.mover.drain()
        self.system.fault = None
        self.clock.advance(seconds)
        assert self.resident() == before

    @precondition(lambda self: not self.pool._holds.reservations)
    @rule()
    def restart(self):
        """What the disk had is there again, and nothing else."""
        for lease, _ in self.held.values():
            self.pool.release(lease)
        self.held.clear()
        self.mover.drain()
        self.forget_evicted()
        residency = self.pool._residency
        rows = np.flatnonzero(residency.table.slots[self.num_memory] >= 0)
        written = {name for name, block in self.rows().items() if block in set(rows.tolist())}
        kept = {name for name in written if self.leading(name) <= written}
        if not self.all_have_room():
            kept = set()  # some may make room for what only memory has
        assert all(self.expires_at[name] == float("inf") for name in written)
        self.pool.close()
        assert residency.table.num_blocks == 0
        self.directory_again(kept)

    def all_have_room(self):
        """Whether the disk can have every block beside those that it has."""
        residency = self.pool._residency
        ready = np.flatnonzero(residency.table.states == BlockState.READY).astype(np.int32)
        sizes = residency.copies.slot_sizes(self.num_memory, ready)
        absent = ~residency.copies.have(self.num_memory, ready)
        slots = residency.tiers[-1].arena
        room = slots.capacity_bytes - slots.used_bytes
        return not absent.any() or (len(set(sizes)) == 1 and sizes[absent].sum() <= room)

    def leading(self, name):
        """The blocks up to this one."""
        digest, prefix = name
        stride = next(space.key_bytes for space in NAMESPACES if space.digest == digest)
        return {(digest, prefix[:stop]) for stop in range(stride, len(prefix) + 1, stride)}

    def rows(self):
        """Row of every stored block by its name."""
        found = {}
        for digest, prefix in self.stored:
            tree = self.pool._residency.trees[digest]
            found[digest, prefix] = int(tree.match(prefix).block_ids()[-1])
        return found

    def directory_again(self, kept):
        disk = DiskStore(self.path / "tier", DISK, self.clock, self.system)
        pages = [tier.capacity_bytes >> 12 for tier in self.pool.stats().tiers]
        self.pool = small_pool(
            *pages[: self.num_memory],
            mover=self.mover,
            clock=self.clock,
            lease_timeout_s=1e9,
            disk=disk,
            rules=self.disk_rules(),
            quotas=self.quotas,
        )
        self.lost, self.pinned, self.unfinished = 0, {}, {}
        before, self.stored = self.stored, self.resident()
        assert kept <= self.stored <= before, "and what was written at the end"
        self.expires_at = dict.fromkeys(self.stored, float("inf"))

    def teardown(self):
        try:
            super().teardown()
        finally:
            if hasattr(self, "path"):
                shutil.rmtree(self.path)


TestPool = PoolMachine.TestCase


@pytest.mark.parametrize("admission", ["always", "value"])
def test_with_a_disk(admission):
    """Fewer examples: each makes real files."""
    machine = type(f"DiskMachine_{admission}", (PoolWithDiskMachine,), {"admission": admission})
    run_state_machine_as_test(machine, settings=settings(max_examples=40, deadline=None))


@pytest.mark.parametrize("policy", [name for name in POLICIES if name != "lru"])
def test_other_policies(policy):
    """Shorter: what they share with the first one was tried with it."""
    machine = type(f"PoolMachine_{policy}", (PoolMachine,), {"policy": policy})
    run_state_machine_as_test(machine, settings=settings(max_examples=25, deadline=None))
