"""DiskStore against a dict: any order of writes, reads, releases, faults, damage, restarts and crashes."""

import errno
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvstore.namespace import KVLayout, Namespace
from kvstore.testing import FakeClock, pattern
from kvstore.testing.disk import Crash, FaultySystem, crashes_at, fails_at, identities
from kvstore.tiers.disk import DiskOptions, DiskStore, slot_bytes_of

OPTIONS = DiskOptions(
    (5 << 20) + (1 << 17) + 4096, 1 << 16, reserve_bytes=0, manifest_bytes=1 << 20, threads=1
)
NAMESPACES = (
    Namespace(b"one", KVLayout(1, 1, 8, "float16", 1)),
    Namespace(b"two", KVLayout(1, 1, 2050, "float16", 1), tenant="t"),
)
TOKENS = st.lists(st.integers(0, 1), min_size=1, max_size=4)


class DiskMachine(RuleBasedStateMachine):
    """The model maps namespace and tokens to the slot of every block that must be there."""

    def __init__(self):
        super().__init__()
        self.scratch = tempfile.mkdtemp(prefix="kvstore-machine-", dir="/var/tmp")
        self.path = Path(self.scratch) / "tier"
        self.clock = FakeClock()
        self.model = {}
        self.bad = set()
        """Slots with a flipped bit, until they are written again."""
        self.open()

    def open(self):
        self.system = FaultySystem()
        self.store = DiskStore(self.path, OPTIONS, self.clock, self.system)

    @staticmethod
    def key(tokens):
        return np.array(tokens, "<i4").tobytes()

    def name(self, block):
        namespace, tokens = block
        return identities(namespace, self.key(tokens))[-1]

    def children(self, block):
        namespace, tokens = block
        return [(namespace, (*tokens, token)) for token in (0, 1)]

    @rule(namespace=st.sampled_from(NAMESPACES), tokens=TOKENS)
    def write(self, namespace, tokens):
        """Write what is missing of a prompt, as far as there is room."""
        blocks = [(namespace, tuple(tokens[: at + 1])) for at in range(len(tokens))]
        missing = [block for block in blocks if block not in self.model]
        offsets = self.store.allocate(slot_bytes_of(namespace), len(missing))
        missing = missing[: len(offsets)]
        payloads = [pattern(block[0], self.key(block[1])).copy() for block in missing]
        stored, _ = self.store.write(offsets, [self.name(block) for block in missing], payloads)
        if not stored.all():
            assert self.store.off["write"] or self.store.slots.bad_bytes, "trouble, or bad spots"
            stop = int(stored.argmin())
            self.store.release(slot_bytes_of(namespace), offsets[stop:])
            missing = missing[:stop]
        self.model |= zip(missing, offsets.tolist(), strict=False)
        self.bad.difference_update(self.model[block] for block in missing)

    @rule(data=st.data())
    def release(self, data):
        """Let go of a block and everything below it."""
        if not self.model:
            return
        first = data.draw(st.sampled_from(sorted(self.model, key=repr)))
        gone, left = [], [first]
        while left:
            block = left.pop()
            if block in self.model:
                gone.append(block)
                left += self.children(block)
        offsets = np.array([self.model.pop(block) for block in gone], np.int64)
        self.store.release(slot_bytes_of(first[0]), offsets)

    @rule()
    def read(self):
        """Everything in the model is good, but for what was damaged."""
        blocks = list(self.model)
        names = [self.name(block) for block in blocks]
        targets = [np.zeros(name.block_bytes, np.uint8) for name in names]
        offsets = np.array([self.model[block] for block in blocks], np.int64)
        verdicts = self.store.read(offsets, names, targets)
        for block, verdict, target in zip(blocks, verdicts, targets, strict=True):
            if self.model[block] in self.bad:
                assert verdict in ("header", "payload", "missing")
            else:
                assert verdict == "good"
                assert (target == pattern(block[0], self.key(block[1]))).all()
        for block, verdict in zip(blocks, verdicts, strict=True):
            if verdict != "good" and block in self.model:
                self.drop(block)

    def drop(self, block):
        """Release a damaged block, and what hangs from it."""
        if block in self.model:
            self.store.release(slot_bytes_of(block[0]), np.array([self.model.pop(block)]))
            for child in self.children(block):
                self.drop(child)

    @precondition(lambda self: self.model)
    @rule(data=st.data(), in_payload=st.booleans())
    def damage(self, data, in_payload):
        """Flip a bit on disk."""
        block = data.draw(st.sampled_from(sorted(self.model, key=repr)))
        offset = self.model[block]
        if offset in self.bad:
            return
        place = offset + (4096 if in_payload else 1000)
        index, start = divmod(place, OPTIONS.segment_bytes)
        with (self.path / f"segment-{index:05}.kv").open("r+b") as file:
            file.seek(start)
            byte = file.read(1)[0]
            file.seek(start)
            file.write(bytes([byte ^ 1]))
        self.bad.add(offset)

    @rule(
        number=st.integers(1, 6),
        calls=st.integers(1, 3),
        code=st.sampled_from([errno.EIO, errno.ENOSPC]),
        namespace=st.sampled_from(NAMESPACES),
        tokens=TOKENS,
    )
    def write_with_a_fault(self, number, calls, code, namespace, tokens):
        """Some calls fail; after the pause everything works again, but for spots that looked bad."""
        first = len(self.system.calls) + number
        self.system.fault = fails_at(first, code, first + calls - 1)
        self.write(namespace, tokens)
        self.system.fault = None
        self.clock.advance(61.0)

    @rule(namespace=st.sampled_from(NAMESPACES), tokens=TOKENS, number=st.integers(1, 6))
    def crash(self, namespace, tokens, number):
        """Die in the middle of a write, and start again."""
        self.system.fault = crashes_at(len(self.system.calls) + number)
        with suppress(Crash):
            self.write(namespace, tokens)
        with suppress(Crash):
            self.store.close()
        self.reopen()

    @rule()
    def restart(self):
        """Close, and start again: exactly what the model has is there."""
        self.store.close()
        self.reopen(exactly=True)

    def reopen(self, *, exactly=False):
        self.open()
        names = {self.name(block).digest: block for block in self.model}
        found = {}
        for part in self.store.recover():
            for tokens, fresh in part.prompts():
                for index in fresh.tolist():
                    stop = (int(part.positions[index]) + 1) * part.namespace.key_bytes
                    prefix = tuple(np.frombuffer(tokens[:stop], "<i4").tolist())
                    found[part.namespace, prefix] = int(part.offsets[index])
        assert {names[digest] for digest in names} <= found.keys()
        assert all(found[block] == offset for block, offset in self.model.items())
        if exactly:
            assert found == self.model
        self.model = found

    @invariant()
    def nothing_is_lost(self):
        """The slots in use are those of the model."""
        self.store.check_invariants()
        sizes = sum(slot_bytes_of(namespace) for namespace, _ in self.model)
        assert self.store.slots.used_bytes == sizes

    def teardown(self):
        self.system.fault = None
        self.store.close()
        shutil.rmtree(self.scratch)


DiskMachine.TestCase.settings = settings(max_examples=40, stateful_step_count=30)
TestDiskMachine = DiskMachine.TestCase
