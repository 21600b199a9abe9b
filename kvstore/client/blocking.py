"""The blocking client: what ``kvstore.connect`` returns."""

from __future__ import annotations

import logging
import os
import threading
import weakref
from collections import Counter
from typing import TYPE_CHECKING, Literal, TypeVar

from kvstore.client.core import Answer, Call, Calls, Connection
from kvstore.client.dial import Deadline, dial, hang_up
from kvstore.client.line import Line
from kvstore.errors import LeaseExpiredError, UnavailableError
from kvstore.retention import NORMAL_PRIORITY

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable

    from kvstore.client.rules import Address, Breaker, Deadlines
    from kvstore.explain import Explanation
    from kvstore.lease import Lease, Reservation
    from kvstore.namespace import Namespace
    from kvstore.protocol import Hello
    from kvstore.stats import DaemonStatus, PoolStats

logger = logging.getLogger(__name__)

T = TypeVar("T")

DEFAULT_BLOCK_TOKENS = 16
DEFAULT_TIER = "dram"


class Client:
    """A store in a daemon of this host: :class:`kvstore.interface.KVStore`.

    The calls are those of :class:`kvstore.pool.Pool`. In addition every call has a deadline, and when
    the daemon does not answer, the call returns what stands for a miss (an empty lease or
    reservation, 0 tokens, 0 blocks) and counts why in :meth:`counters`; with ``on_failure="raise"``,
    and for administration (``evict``, ``clear``, ``drain``, ``stats``, ``status``), it raises
    :class:`kvstore.errors.UnavailableError`. A daemon that is down is looked for again at later calls,
    with back-off; what was held when a connection ended is void.

    *Threads.* All calls may be made from any thread; they share one connection, and one of the
    threads that wait receives for all.

    *Processes.* After ``fork`` the child starts anew, with a connection of its own: what the parent
    holds is not the child's.
    """

    def __init__(
        self,
        address: Address,
        hello: Callable[[], Hello],
        *,
        on_failure: Literal["miss", "raise"],
        deadlines: Deadlines,
        breaker: Breaker,
        clock: Callable[[], float],
    ) -> None:
        """Connect if the daemon is there; if it is not, that is counted (or raised)."""
        self._address, self._hello = address, hello
        self._access = hello().access
        self._on_failure, self._deadlines = on_failure, deadlines
        self._breaker, self._clock = breaker, clock
        self._counts: Counter[tuple[str, ...]] = Counter()
        self._calls = Calls(self, self._counts)
        self._line: Line | None = None
        self._connecting = threading.Lock()
        self._closed = False
        self.block_tokens = DEFAULT_BLOCK_TOKENS
        self.tier_names: tuple[str, ...] = (DEFAULT_TIER,)
        _CLIENTS.add(self)
        try:
            welcome = self._connected(self._deadline(0)).connection.welcome
        except UnavailableError as error:
            self._failed("connect", error)
            if on_failure == "raise":
                raise
        else:
            self.block_tokens, self.tier_names = welcome.block_tokens, (welcome.tier,)

    # -- the store ------------------------------------------------------------------------------

    def lookup(self, namespace: Namespace, tokens: object) -> int:
        """Return how many leading tokens a lease would cover."""
        return self._run(self._calls.lookup(namespace, tokens))

    def prefetch(self, namespace: Namespace, tokens: object) -> int:
        """Have the known prefix brought up to the arena; return its tokens."""
        return self._run(self._calls.prefetch(namespace, tokens))

    def acquire(self, namespace: Namespace, tokens: object, *, may_wait: bool = False) -> Lease:
        """Lease the known leading blocks; nothing while others are being loaded, if it ``may_wait``."""
        return self._run(self._calls.acquire(namespace, tokens, may_wait=may_wait))

    def verify(self, lease: Lease) -> int:
        """Return how many leading blocks of ``lease`` match the checksums of their writers."""
        call = self._calls.verify(lease)
        return 0 if call is None else self._run(call)

    def release(self, lease: Lease) -> None:
        """End ``lease``.

        Raises:
            LeaseExpiredError: it ran out, or its connection ended: throw away what was read.
            LeaseNotHeldError: it was released before, or is not of this client.
        """
        found = self._calls.release(lease)
        if found is None:
            return
        try:
            self._tell(*found, lease.namespace)
        except UnavailableError as error:
            self._failed("release", error)
            raise LeaseExpiredError(
                f"the lease ended with its connection ({error}): what was read may be wrong"
            ) from None
        if self._clock() >= lease.expires_at:
            self._counts["expired_leases",] += 1
            raise LeaseExpiredError(
                "the lease ran out before it was released: what was read may be wrong"
            )

    def reserve(
        self,
        namespace: Namespace,
        tokens: object,
        *,
        heads: tuple[int, int] | None = None,
        priority: int = NORMAL_PRIORITY,
        ttl_s: float | None = None,
    ) -> Reservation:
        """Get slots for the blocks that no one holds or writes yet; none with ``access="read"``.

        ``heads`` is the range ``[start, stop)`` of the KV heads that are going to be written; None: all.
        Blocks of a lower ``priority`` (0 to 100) are evicted first; ``ttl_s`` seconds after their commit the
        blocks expire.
        """
        if self._access == "read":
            return self._calls.no_reservation(namespace, "read_only")
        return self._run(self._calls.reserve(namespace, tokens, heads, priority, ttl_s))

    def commit(self, reservation: Reservation) -> int:
        """Make the written blocks visible; return how many became so."""
        call = self._calls.commit(reservation)
        return 0 if call is None else self._run(call)

    def abort(self, reservation: Reservation) -> None:
        """Give the slots back."""
        call = self._calls.abort(reservation)
        if call is not None:
            self._run(call)

    def prefilled(self, namespace: Namespace, start: int, stop: int, seconds: float) -> None:
        """Tell how long the engine took to compute tokens ``[start, stop)``; lost where nobody listens."""
        line = self._line
        if line is None or line.connection.failure is not None:
            return
        try:
            line.send(self._calls.prefilled(namespace, start, stop, seconds), self._deadline(0))
        except UnavailableError as error:
            self._lose(line, error)

    # -- administration -------------------------------------------------------------------------

    def explain(self, namespace: Namespace, tokens: object) -> Explanation:
        """Say why tokens hit or miss."""
        return self._run(self._calls.explain(namespace, tokens))

    def explain_all(self, tokens: object, digest: str | None = None) -> dict[str, Explanation]:
        """Say it for every namespace that has blocks, or for the one named by ``digest`` (hex)."""
        return self._run(self._calls.explain_all(tokens, digest))

    def evict(self, namespace: Namespace, tokens: object) -> int:
        """Forget a prefix and what follows it; return the number of blocks matched."""
        return self._run(self._calls.evict(namespace, tokens))

    def clear(self) -> None:
        """Forget every block of every namespace, of all clients."""
        self._run(self._calls.clear())

    def drain(self) -> None:
        """Wait for the moves between tiers that have begun."""
        self._run(self._calls.drain())

    def status(self) -> DaemonStatus:
        """Return what the daemon tells about itself."""
        return self._run(self._calls.status())

    def stats(self) -> PoolStats:
        """Return the sizes and counters of the daemon's pool."""
        return self.status().pool

    @property
    def address(self) -> str:
        """URL of the daemon."""
        return str(self._address)

    @property
    def closed(self) -> bool:
        """Whether :meth:`close` was called."""
        return self._closed

    def counters(self) -> Counter[tuple[str, ...]]:
        """Return this client's own counters, by the names of ``CLIENT_COUNTERS``."""
        return Counter(self._counts)

    def close(self) -> None:
        """End the connection and what is held on it; from here on everything misses."""
        self._closed = True
        line = self._line
        if line is not None:
            self._lose(line, UnavailableError("closed", "the client was closed"))
            line.join()

    def __del__(self) -> None:
        """Let go of the connection also when nobody closed the client."""
        line = getattr(self, "_line", None)
        if line is not None:
            line.end(UnavailableError("closed", "nobody uses the client any more"))

    def __enter__(self) -> Client:
        """Return the client itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close."""
        self.close()

    # -- inner ----------------------------------------------------------------------------------

    def _run(self, call: Call[T]) -> T:
        """Make ``call``: the one place where a daemon that fails becomes a counted miss."""
        self._counts["calls", call.name] += 1
        try:
            return self._ask(call)
        except UnavailableError as error:
            self._failed(call.name, error)
            if call.missing is None or self._on_failure == "raise":
                raise
            return call.missing(error.reason)

    def _ask(self, call: Call[T]) -> T:
        deadline = self._deadline(call.num_tokens, call.least_s)
        if call.connection is not None and call.connection.failure is not None:
            raise call.connection.failure  # without connecting anew in vain
        line = self._connected(deadline)
        if call.connection not in (None, line.connection):
            raise UnavailableError("lost", "the connection on which it was held has ended")
        asked_at = self._clock()
        try:
            reply = line.exchange(call.request, deadline)
        except UnavailableError as error:
            self._lose(line, error)
            raise
        except BaseException:  # interrupted: nobody would end what the answer holds
            self._lose(line, UnavailableError("interrupted", "the caller was interrupted"))
            raise
        self._breaker.succeeded()
        return call.read(Answer(line.connection, reply, asked_at))

    def _tell(self, connection: Connection, frame: bytes, namespace: Namespace) -> None:
        """Send ``frame`` on ``connection``, which must be there until now."""
        line = self._line
        if connection.failure is not None:  # from then on zeros may have been read
            raise connection.failure
        if line is None or line.connection is not connection:
            raise UnavailableError("lost", "the connection on which it was held has ended")
        deadline = self._deadline(0)
        try:
            if self._address.path is None:  # on TCP, sending does not tell that the peer is there
                line.exchange(self._calls.lookup(namespace, b"").request, deadline)
            line.send(frame, deadline)
        except UnavailableError as error:
            self._lose(line, error)
            raise

    def _deadline(self, num_tokens: int, least_s: float = 0.0) -> Deadline:
        return Deadline(self._clock() + max(self._deadlines(num_tokens), least_s), self._clock)

    def _connected(self, deadline: Deadline) -> Line:
        """Return the line to the daemon, connecting if there is none and the breaker allows it."""
        line = self._line
        if line is not None and line.connection.failure is None:
            return line
        if not self._connecting.acquire(timeout=deadline.left_s()):
            raise UnavailableError("timeout", "another thread is still connecting")
        try:
            if self._line is not None and self._line.connection.failure is None:
                return self._line
            if self._closed:
                raise UnavailableError("closed", "the client was closed")
            self._breaker.check()
            return self._connect(deadline)
        finally:
            self._connecting.release()

    def _connect(self, deadline: Deadline) -> Line:
        if self._line is not None:
            self._line.join(deadline.left_s())  # memory of a restarted daemon is not needed twice
            self._line = None
        try:
            peer, connection = dial(self._address, self._hello(), deadline)
            line = self._new_line(peer, connection)
        except UnavailableError as error:
            if error.reason != "closed":
                self._breaker.failed(error)
            raise
        welcome = connection.welcome
        logger.info("kvstore: connected to node %s at %s", welcome.node, self._address)
        self._counts["connects",] += 1
        if self._counts["connects",] > 1 and welcome.block_tokens != self.block_tokens:
            logger.warning(
                "the daemon at %s has blocks of %d tokens, this client goes on with %d",
                *(self._address, welcome.block_tokens, self.block_tokens),
            )
        self._line = line
        return line

    def _new_line(self, peer: socket.socket, connection: Connection) -> Line:
        if self._closed:
            hang_up(peer, connection)
            raise UnavailableError("closed", "the client was closed")
        try:
            return Line(peer, connection, weakref.WeakMethod(self._lose))
        except (RuntimeError, OSError) as error:
            hang_up(peer, connection)
            raise UnavailableError("refused", f"this process has no thread left: {error}") from None

    def _lose(self, line: Line, failure: UnavailableError) -> None:
        """End ``line``, once; the next call connects anew, when the breaker allows it."""
        if line.end(failure) and failure.reason != "closed":
            self._breaker.failed(failure)

    def _failed(self, what: str, error: UnavailableError) -> None:
        self._counts["failures", what, error.reason] += 1

    def _forked(self) -> None:
        """Start anew in the child of a fork: no thread of the parent goes on here."""
        line, self._line = self._line, None
        self._connecting = threading.Lock()
        self._calls = self._calls.successor()
        if line is not None:
            line.abandon()


_CLIENTS: weakref.WeakSet[Client] = weakref.WeakSet()


def _after_fork() -> None:
    for client in list(_CLIENTS):
        client._forked()  # noqa: SLF001 - of this module


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
