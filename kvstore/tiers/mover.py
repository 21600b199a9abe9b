"""Runs moves between tiers off the caller's path, a bounded number at a time."""

from __future__ import annotations

import logging
import os
import threading
from abc import ABC, abstractmethod
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

logger = logging.getLogger(__name__)


class Mover(ABC):
    """Runs jobs one after the other, in the order in which they were submitted.

    A job is a callable that copies bytes and then tells the pool. It handles its own failures.
    """

    @abstractmethod
    def has_room(self) -> bool:
        """Whether :meth:`submit` would take a job now, as far as can be told before it is made."""

    def room(self) -> int:
        """How many jobs :meth:`submit` would take now, as far as can be told."""
        return 1 << 20 if self.has_room() else 0

    @abstractmethod
    def submit(self, job: Callable[[], object]) -> bool:
        """Take ``job``, or refuse it (False) because too many wait. Never blocks on other jobs."""

    @abstractmethod
    def drain(self) -> None:
        """Wait until every job submitted so far has run. Not to be called from a job."""

    @abstractmethod
    def close(self) -> None:
        """Run what was submitted, then stop. Submitting afterwards is refused."""


class Lanes(NamedTuple):
    """Movers by what they do, so that what a request waits for does not wait for the rest; may be one."""

    memory: Mover
    """Copies and hashes within memory."""
    loads: Mover
    """Reads from slow tiers."""
    stores: Mover
    """Writes to them."""

    def distinct(self) -> Iterator[Mover]:
        """Each mover once."""
        yield from dict.fromkeys(self)

    def drain(self) -> None:
        """Drain all."""
        for mover in self.distinct():
            mover.drain()

    def close(self) -> None:
        """Close all."""
        for mover in self.distinct():
            mover.close()


class InlineMover(Mover):
    """Runs each job at once, on the caller's thread: deterministic, for tests and simulation."""

    def has_room(self) -> bool:
        """Always."""
        return True

    def submit(self, job: Callable[[], object]) -> bool:
        """Run ``job``."""
        job()
        return True

    def drain(self) -> None:
        """Nothing waits."""

    def close(self) -> None:
        """Nothing to stop."""


NICENESS = 10


def _give_way() -> None:
    """Lower the priority of the calling thread (Linux has one for each)."""
    with suppress(OSError, AttributeError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)


class ThreadMover(Mover):
    """One background thread with a bounded queue; where cores are scarce, it gives way to all others."""

    def __init__(self, max_waiting: int, name: str = "mover") -> None:
        """Start with an idle thread.

        Args:
            max_waiting: jobs that may wait; more are refused.
            name: of the thread, for people.
        """
        self._executor = ThreadPoolExecutor(1, f"kvstore-{name}", _give_way)
        self._executor.submit(
            int
        ).result()  # where no thread can be had, fail now and not in a commit
        self._max_waiting = max_waiting
        self._submitted = self._waiting = 0
        self._closed = False
        self._changed = threading.Condition()

    def has_room(self) -> bool:
        """Whether the queue is open and not full."""
        with self._changed:
            return not self._closed and self._waiting < self._max_waiting

    def room(self) -> int:
        """What is left of the queue."""
        with self._changed:
            return 0 if self._closed else self._max_waiting - self._waiting

    def submit(self, job: Callable[[], object]) -> bool:
        """Queue ``job``."""
        with self._changed:
            if self._closed or self._waiting >= self._max_waiting:
                return False
            try:
                self._executor.submit(self._run, job)
            except RuntimeError:  # the interpreter is about to end
                return False
            self._submitted += 1
            self._waiting += 1
        return True

    def drain(self) -> None:
        """Wait until every job submitted so far has run; others may be submitted meanwhile."""
        with self._changed:
            last = self._submitted
            self._changed.wait_for(lambda: self._submitted - self._waiting >= last)

    def close(self) -> None:
        """Drain and end the thread."""
        with self._changed:
            self._closed = True
        self._executor.shutdown(wait=True)

    def _run(self, job: Callable[[], object]) -> None:
        try:
            job()
        except Exception:  # thread top loop: a failed job must not end the mover
            logger.exception("a move between tiers failed")
        finally:
            with self._changed:
                self._waiting -= 1
                self._changed.notify_all()
