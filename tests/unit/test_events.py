"""The event log, and what the pool tells it."""

from __future__ import annotations

import numpy as np

from kvstore.events import AllBlocksCleared, BlockRemoved, BlockStored, EventLog
from kvstore.namespace import KVLayout, Namespace
from kvstore.testing import small_pool

NAMESPACE = Namespace(b"w", KVLayout(1, 1, 8, "float32", block_tokens=4))


def key(tokens):
    return np.array(list(tokens), "<i4").tobytes()


def put(pool, tokens):
    pool.commit(pool.reserve(NAMESPACE, tokens))


def test_nobody_reads_nothing_is_kept():
    log = EventLog(1000)
    log.publish(AllBlocksCleared(b"n"))
    assert log.read(0) == ([], 0, 0)


def test_readers_go_on_where_they_stopped_and_see_gaps():
    log = EventLog(5 * 200)
    log.read(0)
    for number in range(4):
        log.publish(AllBlocksCleared(bytes([number])))
    events, after, missed = log.read(0)
    assert ([event.namespace for event in events], after, missed) == (
        [b"\0", b"\1", b"\2", b"\3"],
        4,
        0,
    )
    assert log.read(after) == ([], 4, 0)
    for number in range(4, 12):
        log.publish(AllBlocksCleared(bytes([number])))
    events, after, missed = log.read(after)
    assert (len(events), after, missed, log.dropped) == (5, 12, 3, 7)


def test_the_log_is_bounded_in_bytes():
    log = EventLog(10_000)
    log.read(0)
    for _ in range(100):
        log.publish(BlockStored(b"n", b"x" * 3000, 0, 1))
    assert len(log.read(0)[0]) == 3


def test_events_replay_to_what_is_resident():
    """A reader that applies every event knows exactly the blocks that a lookup finds."""
    pool = small_pool(12)
    pool.events.read(0)
    rng = np.random.default_rng(3)
    known: set[bytes] = set()
    after = 0
    for _ in range(300):
        tokens = rng.integers(0, 2, rng.integers(0, 30)).tolist()
        action = rng.random()
        if action < 0.1:
            pool.evict(NAMESPACE, tokens)
        elif action < 0.12:
            pool.clear()
        elif action < 0.2:
            pool.abort(pool.reserve(NAMESPACE, tokens))
        else:
            put(pool, tokens)
        events, after, missed = pool.events.read(after)
        assert missed == 0
        for event in events:
            if isinstance(event, AllBlocksCleared):
                known.clear()
                continue
            blocks = {event.prefix[: 16 * stop] for stop in range(event.start + 1, event.stop + 1)}
            if isinstance(event, BlockStored):
                assert not blocks & known
                known |= blocks
            else:
                assert isinstance(event, BlockRemoved)
                assert blocks <= known
                known -= blocks
        resident = {
            tree.prefix(node)[: len(tree.prefix(node)) - 16 * back]
            for tree in pool._residency.trees.values()
            for node in tree.walk()
            for back in range(len(node.blocks))
        }
        assert known == resident
    pool.close()
