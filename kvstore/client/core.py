"""A client without its input and output: what both faces share.

A :class:`Call` is a request as a value, with what its answer means and what stands for it when no
answer comes. A :class:`Connection` is what is known about one connection. When it ends, for whatever
reason, three things happen in this order: it is marked as failed, its mapping of the arena is replaced
by zeros, its socket is closed. So a lease whose connection has not failed when it is released was read
from the daemon's memory, and the end of a socket tells the daemon that this process writes to none of
its slots any more.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from threading import Lock
from typing import TYPE_CHECKING, Any, Generic, NoReturn, TypeVar, cast

import numpy as np

from kvstore.errors import (
    KVStoreError,
    LeaseExpiredError,
    LeaseNotHeldError,
    TooLargeError,
    UnavailableError,
    UsageError,
)
from kvstore.explain import Explanation, Segment
from kvstore.lease import Lease, Reservation
from kvstore.parts import part_of
from kvstore.protocol import (
    MAX_FRAME_BYTES,
    Abort,
    Acquire,
    Clear,
    Commit,
    Drain,
    Evict,
    Explain,
    ExplainAll,
    Explained,
    ExplainedAll,
    Failed,
    FrameReader,
    Held,
    Lookup,
    Number,
    Prefetch,
    Prefilled,
    ProtocolError,
    Release,
    Reply,
    Reserve,
    Status,
    Told,
    Verify,
    decode_reply,
    encode,
    encode_namespace,
)
from kvstore.retention import NORMAL_PRIORITY, check_priority, lifetime_of
from kvstore.tokens import TOKEN_BYTES, block_keys
from radix import TokenError, token_bytes

if TYPE_CHECKING:
    from collections import Counter
    from collections.abc import Callable

    from numpy.typing import NDArray

    from kvstore.client.rules import Address
    from kvstore.interface import KVStore
    from kvstore.namespace import Namespace
    from kvstore.protocol import Message, Welcome
    from kvstore.stats import DaemonStatus
    from kvstore.tiers.shared import ClientMapping

T = TypeVar("T")

FRAME_OVERHEAD_BYTES = 64 << 10
"""Room in a frame for all that is not the key."""

MAX_NAMESPACES = 4096
"""Encoded namespaces that are kept; beyond it all are made anew."""

VERIFY_S, VERIFY_BYTES_PER_S = 2.0, 200e6
"""The daemon reads the blocks when it comes to it: other clients have theirs read as well."""
DRAIN_S = 60.0

_ERRORS: dict[str, type[KVStoreError]] = {
    "usage": UsageError,
    "too_large": TooLargeError,
    "expired": LeaseExpiredError,
    "not_held": LeaseNotHeldError,
}


class Connection:
    """One connection: its handshake's result, its mapping, and the requests under way.

    ``deliver`` of a request is called once, with its answer or with the reason why none comes.
    """

    def __init__(self, address: Address, welcome: Welcome, mapping: ClientMapping) -> None:
        """Take over ``mapping``."""
        self.address, self.welcome, self.mapping = address, welcome, mapping
        self.reader = FrameReader(MAX_FRAME_BYTES)
        self.failure: UnavailableError | None = None
        self._waiting: dict[int, Callable[[Reply | UnavailableError], None]] = {}
        self._next_id = 1
        self._lock = Lock()

    def begin(
        self, request: Callable[[int], Message], deliver: Callable[[Reply | UnavailableError], None]
    ) -> bytes:
        """Return the frame of a request, and remember who waits for its answer.

        Raises:
            UnavailableError: the connection has ended.
        """
        with self._lock:
            if self.failure is not None:
                raise self.failure
            number = self._next_id
            self._next_id += 1
            self._waiting[number] = deliver
        return encode(request(number))

    def received(self, num_bytes: int) -> None:
        """Take what was received into ``reader.buffer()``, and deliver the answers in it.

        Raises:
            UnavailableError: it makes no sense; the connection must be lost.
        """
        self.reader.received(num_bytes)
        try:
            while (body := self.reader.next_frame()) is not None:
                reply = decode_reply(body)
                number = getattr(reply, "id", 0)
                if number == 0:
                    message = reply.message if isinstance(reply, Failed) else "an answer to nothing"
                    raise UnavailableError("refused", f"{self.address} ends it: {message}")
                with self._lock:
                    deliver = self._waiting.pop(number, None)
                if deliver is not None:
                    deliver(reply)
        except ProtocolError as error:
            raise UnavailableError("protocol", f"{self.address} sent {error}") from None

    def fail(self, failure: UnavailableError) -> bool:
        """Mark it as failed, and tell who waits. Drop the mapping after this, then close the socket.

        Returns False when it had failed already.
        """
        with self._lock:
            if self.failure is not None:
                return False
            self.failure = failure
            waiting, self._waiting = self._waiting, {}
        for deliver in waiting.values():
            deliver(failure)
        return True


@dataclass(frozen=True, slots=True)
class Answer:
    """A reply, the connection it came through, and the clock before its request was sent."""

    connection: Connection
    reply: Reply
    asked_at: float


@dataclass(frozen=True, slots=True)
class Call(Generic[T]):
    """A request as a value."""

    name: str
    request: Callable[[int], Message]
    """Makes the message, given its id."""
    read: Callable[[Answer], T]
    """What the answer means."""
    missing: Callable[[str], T] | None
    """What stands for the answer when none comes, given the reason; None: it is an error."""
    num_tokens: int = 0
    """Tokens that it is about, for the deadline."""
    least_s: float = 0.0
    """The deadline is no shorter than this."""
    connection: Connection | None = None
    """The only connection on which it makes sense; None: any."""


@dataclass(frozen=True, slots=True)
class _Holding:
    """A lease or reservation, as the daemon knows it."""

    connection: Connection
    remote_id: int


@dataclass(frozen=True, slots=True)
class _Prompt:
    namespace: bytes
    key: bytes
    num_tokens: int


@dataclass
class Calls:
    """Makes the calls of one client, and keeps what it holds.

    Ids of leases and reservations are the client's own: those of two daemons may be alike.
    """

    store: Any
    """The face that leases and reservations belong to."""
    counts: Counter[tuple[str, ...]]
    _namespaces: dict[bytes, bytes] = field(default_factory=dict)
    _held: dict[int, _Holding] = field(default_factory=dict)
    _next_id: int = 1
    _lock: Lock = field(default_factory=Lock)

    # -- reading --------------------------------------------------------------------------------

    def lookup(self, namespace: Namespace, tokens: object) -> Call[int]:
        """See :meth:`kvstore.pool.Pool.lookup`."""
        return self._number_of(Lookup, namespace, tokens, lambda _: 0)

    def prefetch(self, namespace: Namespace, tokens: object) -> Call[int]:
        """See :meth:`kvstore.pool.Pool.prefetch`."""
        return self._number_of(Prefetch, namespace, tokens, lambda _: 0)

    def acquire(
        self, namespace: Namespace, tokens: object, *, may_wait: bool = False
    ) -> Call[Lease]:
        """See :meth:`kvstore.pool.Pool.acquire`."""
        prompt = self._prompt(namespace, tokens)

        def read(answer: Answer) -> Lease:
            held, offsets, _ = _held(answer, namespace)
            return Lease(
                self._owner,
                namespace,
                np.zeros(len(offsets), np.int8),
                offsets,
                answer.asked_at + answer.connection.welcome.lease_timeout_s,
                self._keep(answer.connection, held.held),
                buffers=(answer.connection.mapping.buffer,),
                ready_blocks=max(0, held.ready),
                coming_blocks=max(0, held.coming),
                ready_in_s=max(0.0, held.ready_in_s),
            )

        return Call(
            "acquire",
            lambda number: Acquire(number, prompt.namespace, prompt.key, may_wait),
            read,
            lambda reason: Lease(
                self._owner,
                namespace,
                np.empty(0, np.int8),
                np.empty(0, np.int64),
                0.0,
                failure=reason,
            ),
            prompt.num_tokens,
        )

    def verify(self, lease: Lease) -> Call[int] | None:
        """See :meth:`kvstore.pool.Pool.verify`; None: the lease is not held."""
        with self._lock:
            holding = self._held.get(lease.held_id) if lease.store is self.store else None
        if holding is None:
            return None
        return Call(
            "verify",
            lambda number: Verify(number, holding.remote_id),
            _number,
            partial(_failed, lease),
            lease.hit_tokens,
            VERIFY_S + lease.num_blocks * lease.block_bytes / VERIFY_BYTES_PER_S,
            holding.connection,
        )

    def release(self, lease: Lease) -> tuple[Connection, bytes] | None:
        """Forget ``lease``; return the frame that tells the daemon. None: it held nothing.

        The frame needs no answer. If it can be sent, and the lease has not run out by the client's
        own clock, its blocks were protected until now: a daemon that drops a client keeps what that
        client holds until the client has closed its end.

        Raises:
            LeaseNotHeldError: it was released before, or is not of this client.
        """
        if lease.num_blocks == 0:
            return None
        holding = self._take(lease, "lease")
        return holding.connection, encode(Release(holding.remote_id))

    # -- writing --------------------------------------------------------------------------------

    def reserve(
        self,
        namespace: Namespace,
        tokens: object,
        heads: tuple[int, int] | None = None,
        priority: int = NORMAL_PRIORITY,
        ttl_s: float | None = None,
    ) -> Call[Reservation]:
        """See :meth:`kvstore.pool.Pool.reserve`."""
        part = part_of(namespace.layout, heads)
        check_priority(priority)
        lifetime_of(ttl_s)
        prompt = self._prompt(namespace, tokens)

        def read(answer: Answer) -> Reservation:
            held, offsets, indices = _held(answer, namespace)
            return Reservation(
                self._owner,
                namespace,
                np.zeros(len(offsets), np.int8),
                offsets,
                float("inf"),
                self._keep(answer.connection, held.held),
                buffers=(answer.connection.mapping.buffer,),
                indices=indices,
                refused=held.refused,
            )

        return Call(
            "reserve",
            lambda number: Reserve(number, prompt.namespace, prompt.key, part, priority, ttl_s),
            read,
            lambda reason: self.no_reservation(namespace, reason),
            prompt.num_tokens,
        )

    def no_reservation(self, namespace: Namespace, reason: str) -> Reservation:
        """Return a reservation of nothing, and why."""
        return Reservation(
            self._owner,
            namespace,
            np.empty(0, np.int8),
            np.empty(0, np.int64),
            float("inf"),
            indices=np.empty(0, np.int32),
            failure=reason,
        )

    def commit(self, reservation: Reservation) -> Call[int] | None:
        """See :meth:`kvstore.pool.Pool.commit`; None: it holds nothing."""
        if reservation.num_blocks == 0:
            return None
        holding = self._take(reservation, "reservation")
        return Call(
            "commit",
            lambda number: Commit(number, holding.remote_id),
            _number,
            partial(_failed, reservation),
            reservation.num_blocks * reservation.namespace.layout.block_tokens,
            connection=holding.connection,
        )

    def abort(self, reservation: Reservation) -> Call[int] | None:
        """See :meth:`kvstore.pool.Pool.abort`; None: it holds nothing."""
        if reservation.num_blocks == 0:
            return None
        holding = self._take(reservation, "reservation")
        return Call(
            "abort",
            lambda number: Abort(number, holding.remote_id),
            _number,
            lambda _: 0,
            connection=holding.connection,
        )

    def prefilled(self, namespace: Namespace, start: int, stop: int, seconds: float) -> bytes:
        """Return the frame that tells how long an engine took for tokens ``[start, stop)`` of a prompt."""
        return encode(Prefilled(self._encoded(namespace), start, stop, seconds))

    # -- administration -------------------------------------------------------------------------

    def explain(self, namespace: Namespace, tokens: object) -> Call[Explanation]:
        """See :meth:`kvstore.pool.Pool.explain`."""
        prompt = self._prompt(namespace, tokens)

        def missing(reason: str) -> Explanation:
            why = Segment(0, prompt.num_tokens, None, reason, "The daemon could not be asked.")
            return Explanation(prompt.num_tokens, 0, (why,) if prompt.num_tokens else ())

        return Call(
            "explain",
            lambda number: Explain(number, prompt.namespace, prompt.key),
            lambda answer: _expect(answer.reply, Explained).explanation,
            missing,
            prompt.num_tokens,
        )

    def explain_all(self, tokens: object, digest: str | None) -> Call[dict[str, Explanation]]:
        """Explain ``tokens`` in the namespace named by ``digest`` (hex), or in all that have blocks."""
        try:
            key = token_bytes(tokens)
        except TokenError as error:
            raise UsageError(str(error)) from error
        return Call(
            "explain_all",
            lambda number: ExplainAll(number, digest, key),
            lambda answer: _expect(answer.reply, ExplainedAll).explanations,
            None,
            least_s=DRAIN_S,
        )

    def evict(self, namespace: Namespace, tokens: object) -> Call[int]:
        """See :meth:`kvstore.pool.Pool.evict`."""
        return self._number_of(Evict, namespace, tokens, None)

    def clear(self) -> Call[int]:
        """See :meth:`kvstore.pool.Pool.clear`."""
        return Call("clear", Clear, _number, None, least_s=DRAIN_S)

    def drain(self) -> Call[int]:
        """See :meth:`kvstore.pool.Pool.drain`."""
        return Call("drain", Drain, _number, None, least_s=DRAIN_S)

    def status(self) -> Call[DaemonStatus]:
        """Ask what the daemon is doing."""
        return Call("status", Status, lambda answer: _expect(answer.reply, Told).status, None)

    # -- inner ----------------------------------------------------------------------------------

    def successor(self) -> Calls:
        """Return a client's calls that hold nothing; what this one holds is not theirs."""
        return Calls(self.store, self.counts, _next_id=self._next_id)

    @property
    def _owner(self) -> KVStore:
        return cast("KVStore", self.store)

    def _number_of(
        self,
        kind: type[Lookup | Prefetch | Evict],
        namespace: Namespace,
        tokens: object,
        missing: Callable[[str], int] | None,
    ) -> Call[int]:
        prompt = self._prompt(namespace, tokens)
        return Call(
            kind.__name__.lower(),
            lambda number: kind(number, prompt.namespace, prompt.key),
            _number,
            missing,
            prompt.num_tokens,
        )

    def _prompt(self, namespace: Namespace, tokens: object) -> _Prompt:
        key = block_keys(namespace, tokens)
        if len(key) > MAX_FRAME_BYTES - FRAME_OVERHEAD_BYTES:
            raise TooLargeError(
                f"a prompt of {len(key)} key bytes: a request to the daemon holds at most "
                f"{MAX_FRAME_BYTES - FRAME_OVERHEAD_BYTES}; do not store prompts of this length"
            )
        encoded = self._encoded(namespace)
        if namespace.keys == "tokens":
            return _Prompt(encoded, key, len(key) // TOKEN_BYTES)
        blocks = len(key) // namespace.key_bytes
        return _Prompt(encoded, key, blocks * namespace.layout.block_tokens)

    def _encoded(self, namespace: Namespace) -> bytes:
        encoded = self._namespaces.get(namespace.digest)
        if encoded is None:
            if len(self._namespaces) >= MAX_NAMESPACES:
                self._namespaces.clear()
            encoded = self._namespaces[namespace.digest] = encode_namespace(namespace)
        return encoded

    def _keep(self, connection: Connection, remote_id: int) -> int:
        if remote_id == 0:
            return 0
        with self._lock:
            number = self._next_id
            self._next_id += 1
            self._held[number] = _Holding(connection, remote_id)
        return number

    def _take(self, record: Lease | Reservation, what: str) -> _Holding:
        with self._lock:
            holding = self._held.pop(record.held_id, None) if record.store is self.store else None
        if holding is None:
            self.counts["refused_releases",] += 1
            raise LeaseNotHeldError(f"the {what} was ended before, or belongs to another store")
        return holding


def raise_failed(reply: Failed) -> NoReturn:
    """Raise what the daemon's refusal means."""
    if reply.error in _ERRORS:
        raise _ERRORS[reply.error](reply.message)
    raise UnavailableError("refused", f"the daemon refused: {reply.message}")


R = TypeVar("R", bound="Message")


def _expect(reply: Reply, kind: type[R]) -> R:
    if isinstance(reply, Failed):
        raise_failed(reply)
    if not isinstance(reply, kind):
        raise UnavailableError(
            "protocol", f"a {type(reply).__name__} where {kind.__name__} belongs"
        )
    return reply


def _held(
    answer: Answer, namespace: Namespace
) -> tuple[Held, NDArray[np.int64], NDArray[np.int32]]:
    """Return what is held, with offsets that certainly lie in the mapping, and indices."""
    held = _expect(answer.reply, Held)
    try:
        offsets = np.frombuffer(held.offsets, "<i8")
        indices = np.frombuffer(held.indices, "<i4")
    except ValueError:
        raise UnavailableError("protocol", "offsets that are no numbers") from None
    last = answer.connection.welcome.capacity_bytes - namespace.layout.block_bytes
    if len(offsets) and not (offsets.min() >= 0 and offsets.max() <= last):
        raise UnavailableError("protocol", "offsets outside of the daemon's memory")
    return held, offsets, indices


def _failed(record: Lease | Reservation, reason: str) -> int:
    """Keep why no answer came: nothing is verified, nothing became visible."""
    record.failure = reason
    return 0


def _number(answer: Answer) -> int:
    return _expect(answer.reply, Number).value
