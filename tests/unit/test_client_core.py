"""The client without a daemon: addresses, deadlines, breaker, calls and connections."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

import kvstore
from kvstore.client.core import Answer, Calls, Connection
from kvstore.client.rules import Breaker, Deadlines, parse_url
from kvstore.errors import (
    ConfigError,
    LeaseNotHeldError,
    TooLargeError,
    UnavailableError,
    UsageError,
)
from kvstore.namespace import KVLayout, Namespace
from kvstore.protocol import Failed, Held, Lookup, Number, Welcome, encode
from kvstore.testing import FakeClock

NAMESPACE = Namespace(b"weights", KVLayout(1, 1, 8, "float32", block_tokens=4))


class Mapping:
    """Memory that knows whether it was dropped."""

    def __init__(self):
        self.buffer = np.zeros(8192, np.uint8)
        self.detached = False

    def detach(self):
        self.detached = True


def connection():
    welcome = Welcome(1, "node", b"epoch", "dram", 8192, 16, 60.0, 1, (0, 0, 0))
    return Connection(parse_url("unix:///x"), welcome, Mapping())


def feed(connection, *messages):
    for message in messages:
        frame = encode(message)
        connection.reader.buffer()[: len(frame)] = frame
        connection.received(len(frame))


@pytest.mark.parametrize(
    ("url", "text"),
    [
        ("unix:///run/kvstore.sock", "unix:///run/kvstore.sock"),
        ("tcp://127.0.0.1:7000", "tcp://127.0.0.1:7000"),
        ("tcp://localhost:7000/", "tcp://localhost:7000"),
        ("tcp://[::1]:7000", "tcp://::1:7000"),
    ],
)
def test_addresses(url, text):
    assert str(parse_url(url)) == text


@pytest.mark.parametrize(
    "url", ["", "/run/x.sock", "unix://x.sock", "http://127.0.0.1:1", "tcp://127.0.0.1", "tcp://:1"]
)
def test_what_is_no_address_is_refused(url):
    with pytest.raises(ConfigError, match="unix:///path"):
        parse_url(url)


def test_another_host_is_refused():
    with pytest.raises(ConfigError, match="another host"):
        parse_url("tcp://10.0.0.1:7000")


def test_a_call_may_take_as_long_as_its_tokens_would():
    deadlines = Deadlines(prefill_tokens_per_s=1000, shortest_s=0.1, longest_s=5)
    assert [deadlines(tokens) for tokens in (0, 10, 1000, 10**6)] == [0.1, 0.1, 1.0, 5.0]
    assert Deadlines(fixed_s=0.3)(10**6) == 0.3


@pytest.mark.parametrize("connect", [kvstore.connect, kvstore.connect_async])
@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("deadline_s", value) for value in (0, -1, 1e10, float("inf"), float("nan"))),
        *(("prefill_tokens_per_s", value) for value in (0, -1.0, float("inf"), float("nan"))),
        ("access", "rw"),
        ("on_failure", "rais"),
    ],
)
def test_options_that_make_no_sense_are_refused(connect, name, value):
    with pytest.raises(ConfigError, match=f"{name}={value!r}: give "):
        connect("unix:///nowhere", **{name: value})


def wait_of(breaker, clock):
    """Seconds until ``breaker`` lets the next try through; the clock is moved there."""
    start = clock.now_s
    while is_open(breaker):
        clock.advance(0.001)
    return round(clock.now_s - start, 2)


def is_open(breaker):
    try:
        breaker.check()
    except UnavailableError as error:
        return error.reason == "breaker"
    return False


def test_the_breaker_waits_longer_each_time_and_forgets_at_success():
    clock = FakeClock()
    breaker = Breaker(clock, lambda: 1.0, first_s=0.1, longest_s=0.5)
    waits = []
    for _ in range(4):
        breaker.check()
        breaker.failed(UnavailableError("lost", ""))
        waits.append(wait_of(breaker, clock))
    assert waits == [0.1, 0.2, 0.4, 0.5]
    breaker.succeeded()
    breaker.failed(UnavailableError("lost", ""))
    assert wait_of(breaker, clock) == 0.1


def test_the_breaker_spreads_its_waits_and_says_what_happened():
    clock = FakeClock()
    early, late = Breaker(clock, lambda: 0.0, 0.2), Breaker(clock, lambda: 1.0, 0.2)
    early.failed(UnavailableError("unreachable", "no daemon there"))
    late.failed(UnavailableError("unreachable", "no daemon there"))
    with pytest.raises(UnavailableError, match=r"no daemon there; tried again in 0\.20 s"):
        late.check()
    clock.advance(0.11)
    early.check()
    with pytest.raises(UnavailableError):
        late.check()


def test_each_reason_is_logged_once_until_all_is_well(caplog):
    breaker = Breaker(FakeClock(), lambda: 0.0)
    for reason in ("unreachable", "unreachable", "refused", "refused"):
        breaker.failed(UnavailableError(reason, f"it is {reason}"))
    told = [record.message for record in caplog.records]
    assert len(told) == 2
    assert told[0].startswith("kvstore: it is unreachable")
    breaker.succeeded()
    breaker.failed(UnavailableError("refused", "again"))
    assert len(caplog.records) == 3


class TestConnection:
    def test_answers_find_their_callers_in_any_order(self):
        line, got = connection(), {}
        for name in "ab":
            line.begin(
                lambda number: Lookup(number, b"", b""),
                lambda reply, name=name: got.__setitem__(name, reply),
            )
        feed(line, Number(2, 20), Number(1, 10))
        assert (got["a"].value, got["b"].value) == (10, 20)

    def test_an_answer_comes_once_and_strange_ones_are_ignored(self):
        line, got = connection(), []
        line.begin(lambda number: Lookup(number, b"", b""), got.append)
        feed(line, Number(1, 10), Number(1, 11), Number(99, 1))
        assert [reply.value for reply in got] == [10]

    def test_the_end_reaches_all_who_wait_once(self):
        line, got = connection(), []
        for _ in range(3):
            line.begin(
                lambda number: Lookup(number, b"", b""),
                lambda reply: got.append(reply.reason),
            )
        assert line.fail(UnavailableError("lost", "gone"))
        assert got == ["lost"] * 3
        assert not line.fail(UnavailableError("timeout", "later"))
        with pytest.raises(UnavailableError) as caught:
            line.begin(lambda number: Lookup(number, b"", b""), got.append)
        assert caught.value.reason == "lost"

    def test_who_is_told_of_the_end_finds_it_marked_and_the_memory_still_there(self):
        line, seen = connection(), []
        line.begin(
            lambda number: Lookup(number, b"", b""),
            lambda _: seen.append((line.failure.reason, line.mapping.detached)),
        )
        line.fail(UnavailableError("lost", "gone"))
        assert seen == [("lost", False)]

    @pytest.mark.parametrize(
        ("sent", "reason"),
        [
            (encode(Failed(0, "refused", "too slow")), "refused"),
            (encode(Welcome(1, "n", b"", "dram", 1, 1, 1.0, 1, (0, 0, 0))), "refused"),
            (b"\xff\xff\xff\xff", "protocol"),
            (b"\x01\x00\x00\x00\xc0", "protocol"),
            (encode(Number(1, 1)).replace(b"\x01\x01", b"\x01\xa1"), "protocol"),
        ],
    )
    def test_what_makes_no_sense_ends_it(self, sent, reason):
        line = connection()
        line.reader.buffer()[: len(sent)] = sent
        with pytest.raises(UnavailableError) as caught:
            line.received(len(sent))
        assert caught.value.reason == reason


class TestCalls:
    def make(self):
        counts = Counter()
        return Calls(object(), counts), counts

    def held(self, calls, line, call, remote_id):
        offsets = np.array([0, 4096], "<i8").tobytes()
        return call.read(Answer(line, Held(1, remote_id, offsets, b"", 0), asked_at=5.0))

    def test_a_lease_counts_from_before_it_was_asked_for(self):
        calls, _ = self.make()
        lease = self.held(calls, connection(), calls.acquire(NAMESPACE, range(9)), 7)
        assert (lease.hit_tokens, lease.expires_at) == (8, 65.0)
        assert [slot.nbytes for slot in lease.slots()] == [256, 256]

    def test_ids_of_two_daemons_do_not_meet(self):
        calls, _ = self.make()
        first, second = connection(), connection()
        old = self.held(calls, first, calls.acquire(NAMESPACE, range(9)), 7)
        new = self.held(calls, second, calls.acquire(NAMESPACE, range(9)), 7)
        assert calls.release(old)[0] is first
        assert calls.release(new)[0] is second

    def test_a_second_release_is_refused_and_counted(self):
        calls, counts = self.make()
        lease = self.held(calls, connection(), calls.acquire(NAMESPACE, range(9)), 7)
        calls.release(lease)
        with pytest.raises(LeaseNotHeldError):
            calls.release(lease)
        assert counts["refused_releases",] == 1

    def test_a_strangers_lease_is_refused(self):
        calls, _ = self.make()
        others, _ = self.make()
        lease = self.held(others, connection(), others.acquire(NAMESPACE, range(9)), 7)
        self.held(calls, connection(), calls.acquire(NAMESPACE, range(9)), 7)
        with pytest.raises(LeaseNotHeldError):
            calls.release(lease)

    def test_what_the_parent_held_is_not_the_childs(self):
        calls, _ = self.make()
        lease = self.held(calls, connection(), calls.acquire(NAMESPACE, range(9)), 7)
        child = calls.successor()
        self.held(child, connection(), child.acquire(NAMESPACE, range(9)), 7)
        with pytest.raises(LeaseNotHeldError):
            child.release(lease)

    def test_bad_tokens_never_leave_the_process(self):
        calls, _ = self.make()
        for make in (calls.lookup, calls.acquire, calls.reserve, calls.explain, calls.evict):
            with pytest.raises(UsageError):
                make(NAMESPACE, [1.5])
        with pytest.raises(UsageError):
            calls.explain_all("ab", None)

    def test_a_prompt_that_no_frame_holds_is_refused(self):
        calls, _ = self.make()
        with pytest.raises(TooLargeError, match="at most"):
            calls.acquire(NAMESPACE, np.zeros(9_000_000, np.int32))

    @pytest.mark.parametrize(
        ("error", "kind"),
        [
            ("usage", UsageError),
            ("too_large", TooLargeError),
            ("not_held", LeaseNotHeldError),
            ("internal", UnavailableError),
        ],
    )
    def test_refusals_become_the_exceptions_of_an_embedded_store(self, error, kind):
        calls, _ = self.make()
        call = calls.lookup(NAMESPACE, range(9))
        with pytest.raises(kind, match="why"):
            call.read(Answer(connection(), Failed(1, error, "why"), 0.0))

    def test_an_answer_of_another_kind_makes_no_sense(self):
        calls, _ = self.make()
        call = calls.lookup(NAMESPACE, range(9))
        with pytest.raises(UnavailableError) as caught:
            call.read(Answer(connection(), Held(1, 0, b"", b"", 0), 0.0))
        assert caught.value.reason == "protocol"
