"""A connection that threads share: one of those that wait receives for all."""

from __future__ import annotations

import os
import select
import socket
import struct
import threading
from contextlib import suppress
from typing import TYPE_CHECKING

from kvstore.errors import UnavailableError

if TYPE_CHECKING:
    import weakref
    from collections.abc import Callable

    from kvstore.client.core import Connection
    from kvstore.client.dial import Deadline
    from kvstore.protocol import Message, Reply

RECEIVE_S = 0.05
"""Longest that one receiving system call waits; a deadline may pass meanwhile by no more."""


class Line:
    """A connection and its socket, shared by threads. Only its own thread closes it."""

    def __init__(
        self,
        peer: socket.socket,
        connection: Connection,
        lose: weakref.WeakMethod[Callable[[Line, UnavailableError], None]],
    ) -> None:
        """Take over both, and watch for the end. Raises RuntimeError when no thread can be had."""
        self.connection = connection
        self._peer, self._lose = peer, lose
        self._sending = threading.Lock()
        self._changed = threading.Condition()
        self._has_receiver = False
        self._writable, self._readable = select.poll(), select.poll()
        self._writable.register(peer, select.POLLOUT)
        self._readable.register(peer, select.POLLIN)
        peer.setblocking(True)  # noqa: FBT003 - one system call where poll and receive are two
        peer.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, _timeval(RECEIVE_S))
        self._ended = os.eventfd(0, os.EFD_CLOEXEC)
        self._watcher = threading.Thread(target=self._watch, name="kvstore-client", daemon=True)
        try:
            self._watcher.start()
        except RuntimeError:
            os.close(self._ended)
            raise

    def exchange(self, request: Callable[[int], Message], deadline: Deadline) -> Reply:
        """Send a request and return its answer.

        Raises:
            UnavailableError: no answer came within the deadline, or the connection ended.
        """
        got: list[Reply | UnavailableError] = []
        frame = self.connection.begin(request, got.append)
        self.send(frame, deadline)
        self._wait(got, deadline)
        answer = got[0]
        if isinstance(answer, UnavailableError):
            raise answer
        return answer

    def send(self, frame: bytes, deadline: Deadline) -> None:
        """Send a whole frame. After an exception a part may have been sent: the line is of no use."""
        if not self._sending.acquire(timeout=deadline.left_s()):
            raise UnavailableError("timeout", "another thread is still sending")
        try:
            rest = memoryview(frame)
            while rest:
                try:
                    rest = rest[self._peer.send(rest, socket.MSG_DONTWAIT) :]
                except BlockingIOError:
                    self._writable.poll(_milliseconds(deadline))
        except OSError as error:
            raise UnavailableError("lost", f"the daemon ended the connection: {error}") from None
        finally:
            self._sending.release()

    def end(self, failure: UnavailableError) -> bool:
        """Fail the connection, and have its thread drop the mapping and hang up.

        Returns False when that was done before. Never waits.
        """
        if not self.connection.fail(failure):
            return False
        with self._changed:
            if self._ended >= 0:
                os.eventfd_write(self._ended, 1)
            self._changed.notify_all()
        return True

    def join(self, timeout_s: float | None = None) -> None:
        """Wait until the mapping of an ended line is gone. Raises :class:`UnavailableError`."""
        if threading.current_thread() is not self._watcher:
            self._watcher.join(timeout_s)
            if self._watcher.is_alive():
                raise UnavailableError("timeout", "the memory of the last connection is still held")

    def abandon(self) -> None:
        """In the child of a fork: close this process's copy."""
        if self._ended >= 0:
            os.close(self._ended)

    def _wait(self, got: list[Reply | UnavailableError], deadline: Deadline) -> None:
        """Wait until ``got`` has an item: receive, or let the thread that does deliver it."""
        with self._changed:
            while not got and self._has_receiver:
                self._changed.wait(deadline.left_s())
            if got:
                return
            self._has_receiver = True
        try:
            while not got:
                self._receive(deadline)
        finally:
            with self._changed:
                self._has_receiver = False
                self._changed.notify_all()

    def _receive(self, deadline: Deadline) -> None:
        """Receive what is there, and deliver what is complete."""
        if deadline.left_s() < RECEIVE_S and not self._readable.poll(_milliseconds(deadline)):
            return
        try:
            number = self._peer.recv_into(self.connection.reader.buffer())
        except BlockingIOError:
            return
        except OSError as error:
            raise UnavailableError("lost", f"the daemon ended the connection: {error}") from None
        if number == 0:
            raise self.connection.failure or UnavailableError("lost", "the daemon is gone")
        self.connection.received(number)
        with self._changed:
            self._changed.notify_all()

    def _watch(self) -> None:
        """Provide the mapping's pages, then wait for the end: also an idle client must let go.

        A restarted daemon takes as much memory again; that of the old one is free when the last
        client has dropped its mapping.
        """
        with suppress(OSError, RuntimeError):  # without it, copies are slower at first
            self.connection.mapping.prefault()
            self.connection.mapping.pin()
        ending = select.poll()
        ending.register(self._peer, select.POLLRDHUP)
        ending.register(self._ended, select.POLLIN)
        while not ending.poll():
            pass
        failure = self._last_words()
        lose = self._lose()
        if lose is not None:
            lose(self, failure)
        self.connection.fail(failure)
        self.connection.mapping.detach()
        with suppress(OSError):  # the daemon may have hung up
            self._peer.shutdown(socket.SHUT_RDWR)  # who is still in a system call returns
        with self._changed:
            os.close(self._ended)
            self._ended = -1
        with self._sending:
            self._peer.close()

    def _last_words(self) -> UnavailableError:
        """Return why the daemon hung up, if it said so."""
        with self._changed:
            self._changed.wait_for(lambda: not self._has_receiver, RECEIVE_S)
            if self._has_receiver or self.connection.failure is not None:
                return self.connection.failure or UnavailableError("lost", "the daemon is gone")
            self._has_receiver = True
        try:
            while number := self._peer.recv_into(
                self.connection.reader.buffer(), 0, socket.MSG_DONTWAIT
            ):
                self.connection.received(number)
        except UnavailableError as error:
            return error
        except OSError:
            pass
        finally:
            with self._changed:
                self._has_receiver = False
                self._changed.notify_all()
        return UnavailableError("lost", "the daemon is gone")


def _timeval(seconds: float) -> bytes:
    return struct.pack("ll", 0, int(seconds * 1e6))


def _milliseconds(deadline: Deadline) -> int:
    """Time left, rounded up, for ``poll``. Raises :class:`UnavailableError` when there is none."""
    return int(deadline.left_s() * 1000) + 1
