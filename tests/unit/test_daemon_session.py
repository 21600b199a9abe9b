"""What a session answers and holds: no sockets, no event loop, time that passes when told."""

from __future__ import annotations

from collections import Counter

import msgspec
import numpy as np
import pytest

from kvstore import protocol
from kvstore.daemon.answers import MAX_NAMESPACE_BYTES, namespace_of
from kvstore.daemon.session import Session
from kvstore.namespace import KVLayout, Namespace
from kvstore.protocol import (
    Abort,
    Acquire,
    Commit,
    Drain,
    Evict,
    Explain,
    ExplainAll,
    Failed,
    Held,
    Lookup,
    Number,
    Prefetch,
    Release,
    Reserve,
    Status,
    Told,
    Verify,
    decode_request,
    encode_namespace,
)
from kvstore.stats import ArenaStats, DaemonStatus
from kvstore.testing import FakeClock, pattern, small_pool
from radix import token_bytes

PAGE = 4096
LAYOUT = KVLayout(1, 1, 8, "float32", block_tokens=4)
NAMESPACE = Namespace(b"w", LAYOUT)
ENCODED = encode_namespace(NAMESPACE)
LEASE_TIMEOUT_S = 60.0


def key(tokens):
    return token_bytes(list(tokens))


class World:
    """A pool of ``pages`` blocks and the sessions on it."""

    def __init__(self, *pages):
        self.clock = FakeClock()
        self.pool = small_pool(*pages, clock=self.clock, lease_timeout_s=LEASE_TIMEOUT_S)
        self.capacity_bytes = len(self.pool.buffer(self.pool.tier_names[0]))
        self.counts = Counter()

    def session(self, access="write", max_reserved_bytes=1 << 30):
        return Session(
            self.pool,
            self.status,
            access=access,
            max_reserved_bytes=max_reserved_bytes,
            counts=self.counts,
        )

    def status(self):
        arena = ArenaStats(self.capacity_bytes, 0.0, 0)
        return DaemonStatus(
            "0", "n", "00", 1, 0.0, "ready", "/s", 1, dict(self.counts), arena, self.pool.stats()
        )

    def count(self, name):
        return self.pool.stats().counts.get((name,), 0)

    def put(self, session, tokens):
        """Store the missing blocks of ``tokens`` with bytes that say whose they are."""
        held = session.handle(Reserve(1, ENCODED, key(tokens)))
        buffer = self.pool.buffer(self.pool.tier_names[0])
        for offset, index in zip(offsets(held), np.frombuffer(held.indices, "<i4"), strict=True):
            prefix = key(tokens)[: (int(index) + 1) * NAMESPACE.key_bytes]
            buffer[offset : offset + LAYOUT.block_bytes] = pattern(NAMESPACE, prefix)
        return session.handle(Commit(2, held.held)).value

    def close(self):
        """Nothing may be held any more but what the test says; the pool is sound."""
        self.pool.drain()
        self.pool.check_invariants()
        self.pool.close()


@pytest.fixture
def world():
    world = World(8)
    yield world
    world.close()


def offsets(held):
    return np.frombuffer(held.offsets, "<i8").tolist()


def test_what_is_stored_is_found_with_its_bytes(world):
    session = world.session()
    assert world.put(session, range(8)) == 2
    assert session.handle(Lookup(3, ENCODED, key(range(9)))) == Number(3, 8)
    lease = session.handle(Acquire(4, ENCODED, key(range(9))))
    assert (lease.id, lease.indices, lease.refused) == (4, b"", 0)
    assert lease.held != 0
    for index, offset in enumerate(offsets(lease)):
        expected = pattern(NAMESPACE, key(range(9))[: (index + 1) * NAMESPACE.key_bytes])
        assert np.array_equal(
            world.pool.buffer("dram")[offset : offset + LAYOUT.block_bytes], expected
        )
    assert world.pool.stats().num_leases == 1
    assert session.handle(Release(lease.held)) is None
    assert world.pool.stats().num_leases == 0
    assert session.num_held == 0


def test_a_miss_holds_nothing(world):
    session = world.session()
    assert session.handle(Acquire(1, ENCODED, key(range(9)))) == Held(1, 0, b"", b"", 0)
    assert session.handle(Release(0)) is None
    assert world.count("refused_releases") == 0


def test_only_missing_blocks_are_reserved(world):
    session = world.session()
    world.put(session, range(8))
    held = session.handle(Reserve(1, ENCODED, key(range(16))))
    assert np.frombuffer(held.indices, "<i4").tolist() == [2, 3]
    assert session.handle(Abort(2, held.held)) == Number(2, 0)
    assert session.handle(Lookup(3, ENCODED, key(range(17)))) == Number(3, 8)


def test_what_another_session_holds_is_unknown(world):
    mine, other = world.session(), world.session()
    world.put(mine, range(8))
    lease = mine.handle(Acquire(1, ENCODED, key(range(9))))
    reservation = mine.handle(Reserve(2, ENCODED, key(range(100, 108))))
    assert other.handle(Release(lease.held)) is None
    assert world.count("refused_releases") == 1
    assert other.handle(Verify(3, lease.held)).error == "not_held"
    assert other.handle(Commit(4, reservation.held)).error == "not_held"
    assert other.handle(Abort(5, reservation.held)).error == "not_held"
    assert world.count("refused_releases") == 3
    stats = world.pool.stats()
    assert (stats.num_leases, stats.num_reservations) == (1, 1)
    assert mine.handle(Commit(6, reservation.held)) == Number(6, 2)
    mine.handle(Release(lease.held))


def test_ending_twice_is_refused_and_counted(world):
    session = world.session()
    world.put(session, range(8))
    lease = session.handle(Acquire(1, ENCODED, key(range(9))))
    session.handle(Release(lease.held))
    assert session.handle(Release(lease.held)) is None
    assert world.count("refused_releases") == 1
    held = session.handle(Reserve(2, ENCODED, key(range(100, 104))))
    session.handle(Commit(3, held.held))
    assert session.handle(Commit(4, held.held)).error == "not_held"
    assert session.handle(Abort(5, held.held)).error == "not_held"
    assert world.count("refused_releases") == 3
    assert session.reserved_bytes == 0


@pytest.mark.parametrize(
    ("request_", "error", "text"),
    [
        (Lookup(7, ENCODED, b"abc"), "usage", "bytes"),
        (Acquire(7, b"\xc1", key(range(4))), "usage", "no namespace"),
        (Acquire(7, b"x" * (MAX_NAMESPACE_BYTES + 1), b""), "usage", "at most"),
        (Reserve(7, ENCODED, key(range(36))), "too_large", "holds 8"),
        (Commit(7, 12345), "not_held", "ended before"),
        (Verify(7, 12345), "not_held", "no such lease"),
    ],
)
def test_errors_have_names(world, request_, error, text):
    answer = world.session().handle(request_)
    assert isinstance(answer, Failed)
    assert (answer.id, answer.error) == (7, error)
    assert text in answer.message


def test_a_failure_of_ours_is_told_logged_and_survived(world, monkeypatch, caplog):
    session = world.session()

    def broken(*_):
        raise RuntimeError("secret detail")

    with monkeypatch.context() as patch:
        patch.setattr(world.pool, "lookup", broken)
        answer = session.handle(Lookup(1, ENCODED, key(range(4))))
        patch.setattr(world.pool, "release", broken)
        assert session.handle(Release(5)) is None
        patch.setattr(world.pool, "verify", broken)
        patch.setattr(world.pool, "drain", broken)
        assert session.handle(Drain(9))() == Failed(
            9, "internal", "the daemon failed; its log says why"
        )
    assert (answer.error, "secret" in answer.message) == ("internal", False)
    assert [record.getMessage() for record in caplog.records] == [
        "Lookup failed",
        "Release failed",
        "Drain failed",
    ]
    assert session.handle(Lookup(2, ENCODED, key(range(4)))) == Number(2, 0)


def test_verifying_is_work_for_another_thread(world):
    session = world.session()
    world.put(session, range(16))
    world.pool.drain()  # the checksums are there
    lease = session.handle(Acquire(1, ENCODED, key(range(17))))
    work = session.handle(Verify(2, lease.held))
    assert work() == Number(2, 4)
    world.pool.buffer("dram")[offsets(lease)[2]] ^= 1
    assert session.handle(Verify(3, lease.held))() == Number(3, 2)
    session.handle(Release(lease.held))


def test_draining_and_explaining_are_work_for_another_thread(world):
    session = world.session()
    world.put(session, range(8))
    assert session.handle(Drain(1))() == Number(1, 0)
    answer = session.handle(Explain(2, ENCODED, key(range(9))))()
    assert (answer.id, answer.explanation.hit_tokens) == (2, 8)


def test_every_namespace_can_explain(world):
    session = world.session()
    world.put(session, range(8))
    other = Namespace(b"w", LAYOUT, salt="s")
    held = session.handle(Reserve(1, encode_namespace(other), key(range(4))))
    session.handle(Commit(2, held.held))
    answer = session.handle(ExplainAll(3, None, key(range(9))))()
    assert {name: e.hit_tokens for name, e in answer.explanations.items()} == {
        NAMESPACE.digest.hex(): 8,
        other.digest.hex(): 4,
    }
    one = session.handle(ExplainAll(4, other.digest.hex(), key(range(9))))()
    assert list(one.explanations) == [other.digest.hex()]
    assert session.handle(ExplainAll(5, "00", key(range(9))))().error == "usage"


def test_status_prefetch_evict_and_clear(world):
    session = world.session()
    world.put(session, range(8))
    told = session.handle(Status(1))
    assert isinstance(told, Told)
    assert told.status.pool.num_blocks == 2
    assert protocol.decode_reply(protocol.encode(told)[4:]) == told
    assert session.handle(Prefetch(2, ENCODED, key(range(9)))) == Number(2, 8)
    assert session.handle(Evict(3, ENCODED, key(range(4)))) == Number(3, 1)
    assert session.handle(Lookup(4, ENCODED, key(range(9)))) == Number(4, 0)
    world.put(session, range(8))
    assert session.handle(protocol.Clear(5)) == Number(5, 0)
    assert world.pool.stats().num_blocks == 0


class TestBudget:
    @pytest.fixture
    def session(self, world):
        session = world.session(max_reserved_bytes=4 * PAGE)
        self.first = session.handle(Reserve(1, ENCODED, key(range(12))))
        assert len(offsets(self.first)) == 3
        return session

    def test_what_exceeds_it_is_refused(self, world, session):
        answer = session.handle(Reserve(2, ENCODED, key(range(100, 108))))
        assert (len(offsets(answer)), answer.refused) == (1, 1)
        assert world.counts["refused_session_budget"] == 1
        answer = session.handle(Reserve(3, ENCODED, key(range(200, 208))))
        assert answer == Held(3, 0, b"", b"", 2)
        assert world.counts["refused_session_budget"] == 2
        assert session.reserved_bytes == 4 * PAGE
        session.end_reservations()

    def test_what_others_write_costs_nothing(self, world, session):
        other = world.session()
        held = other.handle(Reserve(2, ENCODED, key(range(100, 116))))
        answer = session.handle(Reserve(3, ENCODED, key(range(100, 120))))
        assert np.frombuffer(answer.indices, "<i4").tolist() == [4]
        assert world.counts["refused_session_budget"] == 0
        session.end_reservations()
        other.handle(Abort(4, held.held))

    def test_what_fits_exactly_is_not(self, world, session):
        answer = session.handle(Reserve(2, ENCODED, key(range(100, 104))))
        assert (len(offsets(answer)), answer.refused) == (1, 0)
        assert session.reserved_bytes == 4 * PAGE
        assert world.counts["refused_session_budget"] == 0
        session.end_reservations()

    def test_known_blocks_cost_nothing(self, world, session):
        session.handle(Commit(2, self.first.held))
        assert session.reserved_bytes == 0
        answer = session.handle(Reserve(3, ENCODED, key(range(28))))
        assert len(offsets(answer)) == 4
        session.end_reservations()

    @pytest.mark.parametrize("end", ["commit", "abort", "gone"])
    def test_it_comes_back(self, world, session, end):
        if end == "commit":
            session.handle(Commit(2, self.first.held))
        elif end == "abort":
            session.handle(Abort(2, self.first.held))
        else:
            session.end_reservations()
        assert session.reserved_bytes == 0
        again = session.handle(Reserve(3, ENCODED, key(range(100, 116))))
        assert len(offsets(again)) == 4
        session.handle(Abort(4, again.held))
        assert session.reserved_bytes == 0

    def test_what_never_fits_is_too_large_all_the_same(self, world, session):
        assert session.handle(Reserve(2, ENCODED, key(range(36)))).error == "too_large"
        session.end_reservations()


def test_readers_may_not_reserve(world):
    session = world.session("read")
    for request in (Reserve(1, ENCODED, key(range(4))), Commit(1, 1), Abort(1, 1)):
        answer = session.handle(request)
        assert (answer.error, "reading" in answer.message) == ("usage", True)
    assert world.pool.stats().num_reservations == 0


def test_the_same_bytes_are_the_same_namespace():
    again = bytes(bytearray(ENCODED))
    assert namespace_of(ENCODED) is namespace_of(again)
    assert namespace_of(ENCODED) == NAMESPACE


def test_what_a_client_stores_has_its_priority_and_its_time(world):
    session = world.session()
    held = session.handle(Reserve(1, ENCODED, key(range(8)), None, 90, 10.0))
    session.handle(Commit(2, held.held))
    node = next(world.pool._residency.trees[NAMESPACE.digest].walk())
    assert node.level == 90
    world.clock.advance(10)
    assert session.handle(Lookup(3, ENCODED, key(range(9)))) == Number(3, 0)


def test_an_older_client_says_nothing_of_either(world):
    """Its message is shorter."""
    shorter = msgspec.msgpack.encode([6, 1, ENCODED, key(range(8))])
    request = decode_request(shorter)
    assert (request.priority, request.ttl_s) == (50, None)
    with_heads = msgspec.msgpack.encode([6, 1, ENCODED, key(range(8)), [0, 1]])
    assert decode_request(with_heads).heads == (0, 1)


@pytest.mark.parametrize("retention", [(101, None), (-1, None), (50, 0.0), (50, float("inf"))])
def test_impossible_retention_is_refused(world, retention):
    answer = world.session().handle(Reserve(1, ENCODED, key(range(8)), None, *retention))
    assert answer.error == "usage"
    assert world.pool.stats().num_blocks == 0


def test_leases_that_ran_out_are_forgotten_and_may_still_be_released(world):
    session = world.session()
    world.put(session, range(8))
    lease = session.handle(Acquire(1, ENCODED, key(range(9))))
    world.clock.advance(LEASE_TIMEOUT_S)
    world.pool.reap()
    session.forget_expired(world.clock())
    assert session.num_held == 0
    assert session.handle(Verify(2, lease.held)).error == "expired"
    assert session.handle(Release(lease.held)) is None
    assert world.count("refused_releases") == 0
    assert world.count("expired_leases") == 1


def test_a_lease_that_has_not_run_out_is_kept(world):
    session = world.session()
    world.put(session, range(8))
    session.handle(Acquire(1, ENCODED, key(range(9))))
    world.clock.advance(LEASE_TIMEOUT_S - 1)
    session.forget_expired(world.clock())
    assert session.num_held == 1
    session.end_leases()


def test_the_end_gives_everything_back(world):
    session = world.session()
    world.put(session, range(8))
    for number in range(3):
        session.handle(Acquire(number, ENCODED, key(range(9))))
    session.handle(Reserve(9, ENCODED, key(range(100, 108))))
    session.end_leases()
    stats = world.pool.stats()
    assert (stats.num_leases, stats.num_reservations) == (0, 1)
    session.end_reservations()
    session.end_reservations()
    stats = world.pool.stats()
    assert (stats.num_reservations, stats.held_blocks) == (0, 0)
    assert world.counts["abandoned_leases"] == 3
    assert world.counts["abandoned_reservations"] == 1


def test_one_failure_does_not_keep_the_rest(world, monkeypatch, caplog):
    session = world.session()
    world.put(session, range(8))
    for number in range(2):
        session.handle(Acquire(number, ENCODED, key(range(9))))
    release, calls = world.pool.release, []

    def fails_once(lease):
        calls.append(lease)
        release(lease)
        if len(calls) == 1:
            raise RuntimeError

    monkeypatch.setattr(world.pool, "release", fails_once)
    session.end_leases()
    assert world.pool.stats().num_leases == 0
    assert "cannot end" in caplog.text


def test_nothing_new_is_held_while_draining(world):
    session = world.session()
    world.put(session, range(8))
    lease = session.handle(Acquire(1, ENCODED, key(range(9))))
    session.draining = True
    assert session.handle(Acquire(2, ENCODED, key(range(9)))) == Held(2, 0, b"", b"", 0)
    assert session.handle(Reserve(3, ENCODED, key(range(100, 108)))) == Held(3, 0, b"", b"", 2)
    assert session.handle(Lookup(4, ENCODED, key(range(9)))) == Number(4, 8)
    assert world.pool.stats().num_leases == 1
    session.handle(Release(lease.held))
    assert session.num_held == 0


class TestBlocksElsewhere:
    """With a second tier, only leading blocks that lie in the arena can be lent."""

    def test_none_is_a_miss(self):
        world = World(4, 8)
        session = world.session()
        world.put(session, range(8))
        world.pool.drain()
        assert world.pool.demote(NAMESPACE, key(range(8)), "gpu") == 2
        assert session.handle(Acquire(1, ENCODED, key(range(9)))) == Held(1, 0, b"", b"", 0)
        assert world.pool.stats().num_leases == 0
        world.pool.drain()  # but they are on their way
        lease = session.handle(Acquire(2, ENCODED, key(range(9))))
        assert len(offsets(lease)) == 2
        session.end_leases()
        world.close()

    def test_those_behind_are_left_out(self):
        world = World(2, 8)
        session = world.session()
        world.put(session, range(8))
        lease = world.pool.reserve(NAMESPACE, key(range(16)))
        world.pool.commit(lease)
        held = session.handle(Acquire(1, ENCODED, key(range(17))))
        assert len(offsets(held)) == 2
        assert session.handle(Verify(2, held.held))() == Number(2, 2)
        session.end_leases()
        world.close()


class TestParts:
    RANKS = Namespace(b"w", KVLayout(1, 4, 8, "float32", block_tokens=4))
    ENCODED = encode_namespace(RANKS)

    def reserve(self, session, tokens, heads):
        return session.handle(Reserve(1, self.ENCODED, key(tokens), heads))

    def test_sessions_share_blocks_and_a_block_shows_when_all_have_committed(self, world):
        left, right = world.session(), world.session()
        first, second = (
            self.reserve(session, range(8), heads)
            for session, heads in ((left, (0, 2)), (right, (2, 4)))
        )
        assert first.offsets == second.offsets
        assert first.held != second.held
        assert left.handle(Commit(2, second.held)).error == "not_held", "it is the other's"
        assert left.handle(Commit(2, first.held)) == Number(2, 0)
        assert right.handle(Commit(2, second.held)) == Number(2, 2)
        assert left.handle(Lookup(3, self.ENCODED, key(range(9)))) == Number(3, 8)

    def test_a_session_that_ends_leaves_the_others_theirs(self, world):
        left, right = world.session(), world.session()
        self.reserve(left, range(8), (0, 2))
        second = self.reserve(right, range(8), (2, 4))
        left.end_reservations()
        world.pool.check_invariants()
        assert right.handle(Commit(2, second.held)) == Number(2, 0)
        again = self.reserve(world.session(), range(8), (0, 2))
        assert again.offsets == second.offsets

    def test_a_part_counts_as_the_whole_block(self, world):
        session = world.session(max_reserved_bytes=3 * PAGE)
        for heads, blocks in (((0, 2), 2), ((2, 4), 1)):
            assert len(offsets(self.reserve(session, range(8), heads))) == blocks
        assert session.reserved_bytes == 3 * PAGE
        assert world.counts["refused_session_budget"] == 1

    @pytest.mark.parametrize("heads", [(0, 0), (3, 5), (-1, 2), (2**62, 2**63)])
    def test_heads_that_there_are_not_are_a_usage_error(self, world, heads):
        answer = self.reserve(world.session(), range(8), heads)
        assert (answer.id, answer.error) == (1, "usage")
        assert world.pool.stats().num_blocks == 0
