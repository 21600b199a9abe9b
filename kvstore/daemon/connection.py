"""One client's connection after the handshake: frames in, answers out, fair and bounded.

*Fairness.* A turn handles a few frames, then the others get theirs; what is left is handled in the next
turn, and nothing more is read before that. *Slow readers.* While a client does not take its answers,
nothing of it is read or handled; after a while it is dropped.

*The end.* When the client's end of the socket is closed, nobody writes to its slots any more: its
leases are released and its reservations aborted. A client that the daemon drops sees the end of the
stream, but may be copying right now. So the daemon shuts down only its own sending half, and what
the client holds stays until the client closes its end (leases may run out before that).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvstore.protocol import Failed, ProtocolError, decode_request, encode

if TYPE_CHECKING:
    from collections import Counter
    from collections.abc import Callable
    from concurrent.futures import Executor

    from kvstore.daemon.session import Session, Work
    from kvstore.protocol import FrameReader, Reply

logger = logging.getLogger(__name__)

TURN_FRAMES = 16
TURN_S = 1e-3
"""A turn of one client ends after so many frames, or so long."""
MAX_WORKS = 4
"""Requests of one client that may wait for the worker thread."""
WRITE_BUFFER_BYTES = 1 << 20
"""Answers that may wait for a client before it counts as slow."""
DISCARD_BYTES = 64 << 10


@dataclass
class Shared:
    """What all connections of a daemon share."""

    clock: Callable[[], float]
    counts: Counter[str]
    worker: Executor
    slow_client_s: float
    """Seconds for which a client may leave its answers unread."""
    dma_grace_s: float
    """Seconds for which a device may go on writing after its process has ended."""
    open: set[Connection] = field(default_factory=set)
    """Connections whose socket is open, or whose client's slots are not free yet."""


class Connection(asyncio.BufferedProtocol):
    """Everything runs on the event loop, but for the work that the session gives out."""

    def __init__(
        self,
        session: Session,
        peer: socket.socket,
        reader: FrameReader,
        shared: Shared,
        *,
        client: str,
        dma: bool,
    ) -> None:
        """Take over after the handshake.

        Args:
            session: what the client holds; owned by the connection from here on.
            peer: the socket, which will be the transport's.
            reader: the stream, which may have frames already.
            shared: what the daemon's connections have in common.
            client: name for people.
            dma: whether a device may write for a moment after the client has ended.
        """
        self.session = session
        self.client = client
        self._peer = peer
        self._reader = reader
        self._shared = shared
        self._dma = dma
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._works: deque[Work] = deque()
        """Requests that take their time, in their order: the first is being done."""
        self._paused = False
        self._scheduled = False
        self._done = False
        """No more frames are handled: the client has gone, or was dropped."""
        self._left: socket.socket | None = None
        """The socket, when the transport has been taken away from a client that was dropped."""
        self._lost = False
        self._slow: asyncio.TimerHandle | None = None
        shared.open.add(self)

    # -- called by the transport ----------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begin with what came behind the handshake."""
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        transport.set_write_buffer_limits(high=WRITE_BUFFER_BYTES)
        self._schedule()

    def get_buffer(self, sizehint: int) -> memoryview:  # noqa: ARG002
        """Lend free memory of the reader."""
        return self._reader.buffer()

    def buffer_updated(self, nbytes: int) -> None:
        """Handle what came."""
        self._reader.received(nbytes)
        if not self._scheduled:
            self._turn()

    def pause_writing(self) -> None:
        """The client does not read: handle nothing until it does, and not forever."""
        self._paused = True
        self._read_on()
        self._slow = self._loop.call_later(
            self._shared.slow_client_s, self._drop, "slow_clients", "it does not read its answers"
        )

    def resume_writing(self) -> None:
        """The client has read its answers."""
        self._paused = False
        if self._slow is not None:
            self._slow.cancel()
        self._schedule()

    def eof_received(self) -> None:
        """The client has closed its end, after everything it sent was handled.

        The transport closes itself when the answers are read, for which there is a limit as always.
        """
        assert self._transport is not None
        if self._transport.get_write_buffer_size():
            self._slow = self._loop.call_later(self._shared.slow_client_s, self._transport.abort)
        self._end()

    def connection_lost(self, exc: Exception | None) -> None:
        """The socket is gone. An error other than of the connection says nothing about the client."""
        self._lost = True
        if self._slow is not None:
            self._slow.cancel()
        if self._done:
            self._forget()
        elif exc is None or isinstance(exc, (ConnectionError, TimeoutError)):
            self._end()
        else:
            self._done = True
            logger.error("client %r: its slots are lost until the end: %r", self.client, exc)

    def settle(self, now: float) -> None:
        """Forget the leases that ran out before ``now``, and a dropped client that holds nothing more."""
        self.session.forget_expired(now)
        if self._left is not None and not self.session.num_held:
            self._forget_left()
            self._forget()

    # -- called by the daemon -------------------------------------------------------------------

    def close(self) -> None:
        """End the connection with the daemon: nothing is lent any more, so nothing is kept."""
        self._done = True
        if self._left is not None:
            self._forget_left()
        elif self._transport is not None:
            _shut_down(self._peer, socket.SHUT_RDWR)
            self._transport.abort()
        self.session.end_leases()
        self.session.end_reservations()
        self._shared.open.discard(self)

    # -- inner ----------------------------------------------------------------------------------

    @property
    def _blocked(self) -> bool:
        return self._paused or len(self._works) >= MAX_WORKS

    def _schedule(self) -> None:
        """Have a turn soon; read nothing before."""
        if not self._scheduled and not self._done:
            self._scheduled = True
            self._read_on()
            self._loop.call_soon(self._scheduled_turn)

    def _scheduled_turn(self) -> None:
        self._scheduled = False
        self._turn()

    def _read_on(self) -> None:
        """Read from the socket or not, as the state says."""
        assert self._transport is not None
        if self._transport.is_closing():
            return
        if self._scheduled or self._blocked:
            self._transport.pause_reading()
        else:
            self._transport.resume_reading()

    def _turn(self) -> None:
        answers: list[Reply] = []
        try:
            self._handle_some(answers)
            self._write(answers)
        except ProtocolError as error:
            self._write([*answers, Failed(0, "refused", str(error))])
            self._drop("protocol_errors", str(error))
        except Exception:
            logger.exception("client %r: the daemon failed", self.client)
            self._drop("internal_errors", "the daemon failed")

    def _handle_some(self, answers: list[Reply]) -> None:
        """Handle the frames of one turn; append the answers that are known at once."""
        stop = self._shared.clock() + TURN_S
        for _ in range(TURN_FRAMES):
            body = None if self._done or self._blocked else self._reader.next_frame()
            if body is None:
                self._read_on()
                break
            self._shared.counts["requests"] += 1
            answer = self.session.handle(decode_request(body))
            if callable(answer):
                self._begin(answer)
            elif answer is not None:
                answers.append(answer)
            if self._shared.clock() >= stop:
                self._schedule()
                break
        else:
            self._schedule()

    def _begin(self, work: Work) -> None:
        self._works.append(work)
        if len(self._works) == 1:
            self._do_next()

    def _do_next(self) -> None:
        work = self._works[0]
        self._loop.run_in_executor(self._shared.worker, work).add_done_callback(self._finished)

    def _finished(self, future: asyncio.Future[Reply]) -> None:
        self._works.popleft()
        if self._done or future.cancelled():
            return
        if self._works:
            self._do_next()
        self._write([future.result()])
        self._schedule()

    def _write(self, answers: list[Reply]) -> None:
        assert self._transport is not None
        if not answers or self._transport.is_closing():
            return
        for answer in answers:
            if isinstance(answer, Failed):
                self._shared.counts["failed_requests"] += 1
                self._shared.counts["internal_errors"] += answer.error == "internal"
        self._transport.write(b"".join(map(encode, answers)))

    def _drop(self, counter: str, reason: str) -> None:
        """End the connection from this side, and wait for the client to close its own."""
        if self._done:
            return
        assert self._transport is not None
        self._done = True
        self._shared.counts["dropped_clients"] += 1
        self._shared.counts[counter] += 1
        logger.warning("client %r dropped: %s", self.client, reason)
        if not self.session.num_held:
            _shut_down(self._peer, socket.SHUT_RDWR)
            self._transport.abort()
            return
        _shut_down(self._peer, socket.SHUT_WR)
        self._transport.abort()
        self._left = socket.socket(fileno=self._peer.detach())  # the transport must not close it
        self._left.setblocking(False)  # noqa: FBT003
        self._loop.add_reader(self._left, self._discard)

    def _discard(self) -> None:
        """Read on without listening, up to the end."""
        assert self._left is not None
        try:
            if self._left.recv(DISCARD_BYTES):
                return
        except BlockingIOError:
            return
        except OSError:
            pass  # reset by the client: that is an end as well
        self._forget_left()
        self._end()

    def _forget_left(self) -> None:
        assert self._left is not None
        self._loop.remove_reader(self._left)
        self._left.close()
        self._left = None

    def _end(self) -> None:
        """The client has closed its end."""
        self._done = True
        self.session.end_leases()
        if self._dma:
            self._loop.call_later(self._shared.dma_grace_s, self._end_reservations)
        else:
            self._end_reservations()

    def _end_reservations(self) -> None:
        self.session.end_reservations()
        self._forget()

    def _forget(self) -> None:
        if self._lost and self._left is None and not self.session.num_held:
            self._shared.open.discard(self)


def _shut_down(end: socket.socket, how: int) -> None:
    with contextlib.suppress(OSError):  # the other side was quicker
        end.shutdown(how)
