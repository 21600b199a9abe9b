"""Prompts, and what their blocks hold, in a store on disk that has room for some hundred of them."""

import numpy as np

from kvstore.namespace import KVLayout, Namespace
from kvstore.testing import FakeClock, pattern
from kvstore.testing.disk import identities
from kvstore.tiers.disk import DiskOptions, DiskStore, slot_bytes_of

BUDGET = 8 << 20
OPTIONS = DiskOptions(
    BUDGET, segment_bytes=(1 << 20) + 4096, reserve_bytes=0, manifest_bytes=1 << 20, threads=2
)
SMALL = Namespace(b"small", KVLayout(1, 1, 8, "float16", 4))
LARGE = Namespace(b"large", KVLayout(3, 5, 33, "float32", 16), tenant="t", salt="s")
SMALL_SLOT = slot_bytes_of(SMALL)


def opened(path, system=None, clock=None, options=OPTIONS):
    return DiskStore(path, options, clock or FakeClock(), system)


def prompt(namespace, first, num_blocks):
    """Key bytes of a prompt that no other ``first`` has a block in common with."""
    count = num_blocks * namespace.layout.block_tokens
    tokens = np.arange(count, dtype="<i4")
    tokens[0] = 1_000_000 + first
    return tokens.tobytes()


def contents(namespace, key):
    """What each block of ``key`` holds."""
    stride = namespace.key_bytes
    return [pattern(namespace, key[: stop + stride]).copy() for stop in range(0, len(key), stride)]


def put(store, namespace, key, start=0):
    """Write the blocks of ``key``; return offsets, identities and which were stored."""
    blocks = identities(namespace, key, start)
    offsets = store.allocate(slot_bytes_of(namespace), len(blocks))
    assert len(offsets) == len(blocks)
    stored, _ = store.write(offsets, blocks, contents(namespace, key)[start:])
    return offsets, blocks, stored


def get(store, offsets, blocks):
    """Read blocks; check every one that is said to be good."""
    targets = [np.full(block.block_bytes, 170, np.uint8) for block in blocks]
    verdicts = store.read(offsets, blocks, targets)
    for verdict, block, target in zip(verdicts, blocks, targets, strict=True):
        if verdict == "good":
            assert block.namespace in (SMALL, LARGE)
            assert target.tobytes() in expected(block), "good, but not what was written"
    return verdicts


def expected(block):
    """Every content that a test may have written for ``block``: that of one of its prompts."""
    found = []
    for first in range(40):
        key = prompt(block.namespace, first, 12)
        blocks = identities(block.namespace, key)
        if block.position < len(blocks) and blocks[block.position].digest == block.digest:
            found.append(contents(block.namespace, key)[block.position].tobytes())
    return found


def let_go(store, offsets, blocks, which=slice(None)):
    """Release the slots of ``which`` blocks."""
    sizes = np.array([slot_bytes_of(block.namespace) for block in blocks], np.int64)[which]
    for size in set(sizes.tolist()):
        store.release(size, offsets[which][sizes == size])


def everything(store):
    """Offsets and identities of all that a store found when it was opened."""
    offsets, blocks = [], []
    for found in store.recover():
        offsets += found.offsets.tolist()
        blocks += [found.identity(index) for index in range(len(found))]
    return np.array(offsets, np.int64), blocks


def files(path):
    return {file.name: file.stat() for file in path.iterdir()}
