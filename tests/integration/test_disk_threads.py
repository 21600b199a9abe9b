"""Many threads on one disk store: nobody gets another one's bytes, whatever the device does meanwhile."""

import errno
import threading

import numpy as np
import pytest

from kvstore.namespace import KVLayout, Namespace
from kvstore.testing import FakeClock, pattern
from kvstore.testing.disk import FaultySystem, identities
from kvstore.tiers.disk import DiskOptions, DiskStore, slot_bytes_of

THREADS = 6
STEPS = 60
OPTIONS = DiskOptions(8 << 20, 1 << 20, reserve_bytes=0, manifest_bytes=1 << 20, threads=3)
NAMESPACE = Namespace(b"threads", KVLayout(2, 1, 65, "float16", 4))
SLOT_BYTES = slot_bytes_of(NAMESPACE)


class User(threading.Thread):
    """Writes prompts of its own, reads them again, and lets go of old ones."""

    def __init__(self, store, clock, number):
        super().__init__(name=f"kvstore-user-{number}")
        self.store, self.clock, self.number = store, clock, number
        self.rng = np.random.default_rng(number)
        self.held = []
        self.read = self.missed = 0
        self.wrong = None

    def run(self):
        try:
            for step in range(STEPS):
                self.write(step)
                for _ in range(3):
                    self.look(*self.held[int(self.rng.integers(len(self.held)))])
                while len(self.held) > 8:
                    self.store.release(SLOT_BYTES, self.held.pop(0)[0])
                self.clock.advance(0.2)
        except Exception as error:  # noqa: BLE001  (raised again by the test)
            self.wrong = error

    def write(self, step):
        tokens = np.array([self.number, step, 0, 0] * int(self.rng.integers(1, 6)), np.int32)
        key = tokens.tobytes()
        blocks, stride = identities(NAMESPACE, key), NAMESPACE.key_bytes
        payloads = [pattern(NAMESPACE, key[: stop * stride]) for stop in range(1, len(blocks) + 1)]
        offsets = self.store.allocate(SLOT_BYTES, len(blocks))
        stored, _ = self.store.write(offsets, blocks[: len(offsets)], payloads[: len(offsets)])
        self.held.append((offsets, blocks[: len(offsets)], payloads, stored))

    def look(self, offsets, blocks, payloads, stored):
        targets = [np.zeros(block.block_bytes, np.uint8) for block in blocks]
        verdicts = self.store.read(offsets, blocks, targets)
        for verdict, target, payload, there in zip(
            verdicts, targets, payloads, stored, strict=False
        ):
            self.read += verdict == "good"
            self.missed += verdict != "good"
            assert verdict == "good" or verdict in ("off", "missing", "unreadable"), verdict
            assert verdict != "good" or (there and (target == payload).all())
            assert verdict != "missing" or not there or self.store.slots.bad_bytes, "set aside"


@pytest.mark.parametrize("faults", [False, True])
def test_everybody_gets_their_own_bytes(path, faults):
    rng, lock = np.random.default_rng(7), threading.Lock()

    def fault(name, number):
        with lock:
            strikes = faults and name in ("read", "write", "commit", "stat") and rng.random() < 0.02
        if strikes:
            raise OSError(errno.EIO if name in ("read", "write") else errno.ENOENT, "now and then")

    clock, system = FakeClock(), FaultySystem()
    store = DiskStore(path, OPTIONS, clock, system)
    system.fault = fault
    users = [User(store, clock, number) for number in range(THREADS)]
    for user in users:
        user.start()
    for user in users:
        user.join()
    for user in users:
        if user.wrong:
            raise user.wrong
    store.check_invariants()
    assert sum(user.read for user in users) > 100
    assert bool(store.troubles) == faults
    assert faults or not sum(user.missed for user in users)
    assert (
        sum(store.counts.values())
        == sum(user.read + user.missed for user in users)
        + store.counts["written_blocks",]
        + store.counts["unwritten_blocks",]
    )
    for user in users:
        for offsets, *_ in user.held:
            store.release(SLOT_BYTES, offsets)
    store.check_invariants()
    assert store.slots.used_bytes == 0
    system.fault = None
    store.close()
