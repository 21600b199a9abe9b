"""The asyncio client: what ``kvstore.connect_async`` returns."""

from __future__ import annotations

import asyncio
import logging
import os
from collections import Counter
from typing import TYPE_CHECKING, Literal, Self, TypeVar

from kvstore.client.core import Answer, Call, Calls, Connection
from kvstore.client.dial import Deadline, dial, hang_up
from kvstore.errors import LeaseExpiredError, UnavailableError, UsageError
from kvstore.protocol import Abort, Held, Release, encode
from kvstore.retention import NORMAL_PRIORITY

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable

    from kvstore.client.rules import Address, Breaker, Deadlines
    from kvstore.explain import Explanation
    from kvstore.lease import Lease, Reservation
    from kvstore.namespace import Namespace
    from kvstore.protocol import Hello, Reply
    from kvstore.stats import DaemonStatus, PoolStats

logger = logging.getLogger(__name__)

T = TypeVar("T")


class AsyncClient:
    """A store in a daemon of this host, for one event loop.

    It belongs to the loop and the process of its first call. The calls are those of
    :class:`kvstore.client.blocking.Client`, and so is what happens when the daemon
    does not answer. Requests are pipelined. ``release`` needs no answer and is an ordinary function, so
    ``with await client.acquire(...) as lease`` works; a reservation is ended by ``await commit`` or
    ``await abort``. A call that is cancelled holds nothing afterwards.
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
        """Connect at the first call."""
        self._address, self._hello = address, hello
        self._access = hello().access
        self._on_failure, self._deadlines = on_failure, deadlines
        self._breaker, self._clock = breaker, clock
        self._counts: Counter[tuple[str, ...]] = Counter()
        self._calls = Calls(self, self._counts)
        self._line: _AsyncLine | None = None
        self._connecting = asyncio.Lock()
        self._closed = False
        self._process = os.getpid()
        self._loop: asyncio.AbstractEventLoop | None = None

    async def lookup(self, namespace: Namespace, tokens: object) -> int:
        """Return how many leading tokens a lease would cover."""
        return await self._run(self._calls.lookup(namespace, tokens))

    async def prefetch(self, namespace: Namespace, tokens: object) -> int:
        """Have the known prefix brought up to the arena; return its tokens."""
        return await self._run(self._calls.prefetch(namespace, tokens))

    async def acquire(
        self, namespace: Namespace, tokens: object, *, may_wait: bool = False
    ) -> Lease:
        """Lease the known leading blocks; nothing while others are being loaded, if it ``may_wait``."""
        return await self._run(self._calls.acquire(namespace, tokens, may_wait=may_wait))

    async def verify(self, lease: Lease) -> int:
        """Return how many leading blocks of ``lease`` match the checksums of their writers."""
        call = self._calls.verify(lease)
        return 0 if call is None else await self._run(call)

    def release(self, lease: Lease) -> None:
        """End ``lease``.

        Raises:
            LeaseExpiredError: it ran out, or its connection ended: throw away what was read.
            LeaseNotHeldError: it was released before, or is not of this client.
        """
        self._check_process()
        found = self._calls.release(lease)
        if found is None:
            return
        connection, frame = found
        line = self._line
        if line is None or line.connection is not connection or not line.write(frame):
            raise LeaseExpiredError(
                "the lease ended with its connection: what was read may be wrong"
            )
        if self._clock() >= lease.expires_at:
            self._counts["expired_leases",] += 1
            raise LeaseExpiredError(
                "the lease ran out before it was released: what was read may be wrong"
            )

    def prefilled(self, namespace: Namespace, start: int, stop: int, seconds: float) -> None:
        """Tell how long the engine took to compute tokens ``[start, stop)``; lost where nobody listens."""
        if self._line is not None:
            self._line.write(self._calls.prefilled(namespace, start, stop, seconds))

    async def reserve(
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
        return await self._run(self._calls.reserve(namespace, tokens, heads, priority, ttl_s))

    async def commit(self, reservation: Reservation) -> int:
        """Make the written blocks visible; return how many became so."""
        call = self._calls.commit(reservation)
        return 0 if call is None else await self._run(call)

    async def abort(self, reservation: Reservation) -> None:
        """Give the slots back."""
        call = self._calls.abort(reservation)
        if call is not None:
            await self._run(call)

    async def explain(self, namespace: Namespace, tokens: object) -> Explanation:
        """Say why tokens hit or miss."""
        return await self._run(self._calls.explain(namespace, tokens))

    async def evict(self, namespace: Namespace, tokens: object) -> int:
        """Forget a prefix and what follows it; return the number of blocks matched."""
        return await self._run(self._calls.evict(namespace, tokens))

    async def clear(self) -> None:
        """Forget every block of every namespace, of all clients."""
        await self._run(self._calls.clear())

    async def drain(self) -> None:
        """Wait for the moves between tiers that have begun."""
        await self._run(self._calls.drain())

    async def status(self) -> DaemonStatus:
        """Return what the daemon tells about itself."""
        return await self._run(self._calls.status())

    async def stats(self) -> PoolStats:
        """Return the sizes and counters of the daemon's pool."""
        return (await self.status()).pool

    @property
    def closed(self) -> bool:
        """Whether :meth:`close` was called."""
        return self._closed

    def counters(self) -> Counter[tuple[str, ...]]:
        """Return this client's own counters, by the names of ``CLIENT_COUNTERS``."""
        return Counter(self._counts)

    async def close(self) -> None:
        """End the connection and what is held on it; from here on everything misses."""
        self._closed = True
        if self._line is not None:
            self._lose(self._line, UnavailableError("closed", "the client was closed"))
            await self._line.join()

    async def __aenter__(self) -> Self:
        """Return the client itself."""
        return self

    async def __aexit__(self, *_: object) -> None:
        """Close."""
        await self.close()

    # -- inner ----------------------------------------------------------------------------------

    async def _run(self, call: Call[T]) -> T:
        """Make ``call``: the one place where a daemon that fails becomes a counted miss."""
        self._check_process()
        self._loop = self._loop or asyncio.get_running_loop()
        if self._loop is not asyncio.get_running_loop():
            raise UsageError(
                "an asyncio client belongs to the loop of its first call: make another"
            )
        self._counts["calls", call.name] += 1
        try:
            return await self._ask(call)
        except UnavailableError as error:
            self._counts["failures", call.name, error.reason] += 1
            if call.missing is None or self._on_failure == "raise":
                raise
            return call.missing(error.reason)

    def _check_process(self) -> None:
        if os.getpid() != self._process:
            raise UsageError("an asyncio client does not survive a fork: make another in the child")

    async def _ask(self, call: Call[T]) -> T:
        seconds = max(self._deadlines(call.num_tokens), call.least_s)
        deadline = Deadline(self._clock() + seconds, self._clock)
        if call.connection is not None and call.connection.failure is not None:
            raise call.connection.failure  # without connecting anew in vain
        line = await self._connected(deadline)
        if call.connection not in (None, line.connection):
            raise UnavailableError("lost", "the connection on which it was held has ended")
        asked_at = self._clock()
        try:
            reply = await line.exchange(call, deadline)
        except UnavailableError as error:
            self._lose(line, error)
            raise
        self._breaker.succeeded()
        return call.read(Answer(line.connection, reply, asked_at))

    async def _connected(self, deadline: Deadline) -> _AsyncLine:
        try:
            async with asyncio.timeout(deadline.left_s()):
                await self._connecting.acquire()
        except TimeoutError:
            raise UnavailableError("timeout", "another task is still connecting") from None
        try:
            if self._line is not None and self._line.connection.failure is None:
                return self._line
            if self._closed:
                raise UnavailableError("closed", "the client was closed")
            self._breaker.check()
            return await self._connect(deadline)
        finally:
            self._connecting.release()

    async def _connect(self, deadline: Deadline) -> _AsyncLine:
        if self._line is not None:  # memory of a restarted daemon is not needed twice
            try:
                async with asyncio.timeout(deadline.left_s()):
                    await self._line.join()
            except TimeoutError:
                raise UnavailableError(
                    "timeout", "the memory of the last connection is still held"
                ) from None
        loop = asyncio.get_running_loop()
        dialled = loop.run_in_executor(None, dial, self._address, self._hello(), deadline)
        try:
            peer, connection = await asyncio.shield(dialled)
        except UnavailableError as error:
            self._breaker.failed(error)
            raise
        except asyncio.CancelledError:  # the thread goes on
            dialled.add_done_callback(_forget)
            raise
        if self._closed:
            hang_up(peer, connection)
            raise UnavailableError("closed", "the client was closed")
        line = _AsyncLine(connection, self._lose)
        try:
            await loop.create_connection(lambda: line, sock=peer)
        except BaseException:
            hang_up(peer, connection)
            raise
        self._counts["connects",] += 1
        self._line = line
        return line

    def _lose(self, line: _AsyncLine, failure: UnavailableError) -> None:
        if line.end(failure) and failure.reason != "closed":
            self._breaker.failed(failure)


def _forget(dialled: asyncio.Future[tuple[socket.socket, Connection]]) -> None:
    """Close a connection that nobody wants any more."""
    if not dialled.cancelled() and dialled.exception() is None:
        hang_up(*dialled.result())


class _AsyncLine(asyncio.BufferedProtocol):
    """A connection and its transport."""

    def __init__(
        self, connection: Connection, lose: Callable[[_AsyncLine, UnavailableError], None]
    ) -> None:
        self.connection = connection
        self._lose = lose
        self._transport: asyncio.Transport | None = None
        self._closed = asyncio.Event()
        self._dropping: asyncio.Future[None] | None = None
        self._preparing = asyncio.get_running_loop().run_in_executor(None, self._prepare)

    async def exchange(self, call: Call[T], deadline: Deadline) -> Reply:
        """Send the request of ``call`` and return its answer.

        Raises:
            UnavailableError: no answer came within the deadline, or the connection ended.
        """
        future: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()

        def deliver(answer: Reply | UnavailableError) -> None:
            if future.done():
                self._give_back(call.name, answer)
            elif isinstance(answer, UnavailableError):
                future.set_exception(answer)
            else:
                future.set_result(answer)

        left_s = deadline.left_s()
        self.write(self.connection.begin(call.request, deliver))
        try:
            async with asyncio.timeout(left_s):
                return await future
        except asyncio.CancelledError:
            if future.done() and not future.cancelled() and future.exception() is None:
                self._give_back(call.name, future.result())  # it came in the same turn
            raise
        except TimeoutError:
            raise UnavailableError(
                "timeout", "the daemon did not answer within the deadline"
            ) from None

    def write(self, frame: bytes) -> bool:
        """Send ``frame``; say whether the connection still stands."""
        if self.connection.failure is not None or self._transport is None:
            return False
        self._transport.write(frame)
        return self.connection.failure is None and not self._transport.is_closing()

    def end(self, failure: UnavailableError) -> bool:
        """Fail the connection, drop the mapping, then hang up. Returns False when that was done before."""
        if not self.connection.fail(failure):
            return False
        loop = asyncio.get_running_loop()
        self._dropping = loop.run_in_executor(None, self.connection.mapping.detach)
        self._dropping.add_done_callback(self._hang_up)
        return True

    def _hang_up(self, _: object) -> None:
        if self._transport is not None:
            self._transport.abort()

    async def join(self) -> None:
        """Wait until the socket is closed."""
        await self._closed.wait()
        await asyncio.gather(self._preparing, return_exceptions=True)

    # -- asyncio.BufferedProtocol -----------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the transport."""
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def get_buffer(self, sizehint: int) -> memoryview:  # noqa: ARG002
        """Receive into the reader."""
        return self.connection.reader.buffer()

    def buffer_updated(self, nbytes: int) -> None:
        """Deliver what is complete."""
        try:
            self.connection.received(nbytes)
        except UnavailableError as error:
            self._lose(self, error)

    def eof_received(self) -> bool:
        """Note the end; the transport stays open until the mapping is gone."""
        self._lose(self, UnavailableError("lost", "the daemon is gone"))
        return True

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002
        """Note the end. The socket is closed after this."""
        self._lose(self, UnavailableError("lost", "the daemon is gone"))
        self.connection.mapping.detach()
        self._closed.set()

    # -- inner ----------------------------------------------------------------------------------

    def _give_back(self, name: str, answer: Reply | UnavailableError) -> None:
        """End what a cancelled call would have held."""
        if isinstance(answer, Held) and answer.held:
            if name == "acquire":
                self.write(encode(Release(answer.held)))
            else:
                held = answer.held
                self.write(
                    self.connection.begin(lambda number: Abort(number, held), lambda _: None)
                )

    def _prepare(self) -> None:
        try:
            self.connection.mapping.prefault()
            self.connection.mapping.pin()
        except (OSError, RuntimeError):  # copies are slower at first
            logger.debug("the mapping could not be prepared", exc_info=True)
