"""What happened to blocks, for routers and directories: a bounded log that readers poll.

Events name blocks by namespace digest and tokens, not by hashes, so a reader can build any key it
needs. They are for programs: they carry prompts, so they are never logged.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from itertools import islice
from threading import Lock


@dataclass(frozen=True, slots=True)
class BlockStored:
    """Blocks ``[start, stop)`` of ``prefix`` became readable."""

    namespace: bytes
    prefix: bytes
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class BlockRemoved:
    """Blocks ``[start, stop)`` of ``prefix`` left the last tier that had them."""

    namespace: bytes
    prefix: bytes
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class AllBlocksCleared:
    """Every block of ``namespace`` was dropped from all tiers."""

    namespace: bytes


Event = BlockStored | BlockRemoved | AllBlocksCleared

EVENT_OVERHEAD_BYTES = 200


class EventLog:
    """Keeps the newest events, within ``max_bytes``; older ones are dropped and the gap is told.

    Thread-safe. Nothing is kept before the first :meth:`read`, so an unread log costs nothing.
    """

    def __init__(self, max_bytes: int) -> None:
        """Start empty and inactive."""
        self._max_bytes = max_bytes
        self._events: deque[Event] = deque()
        self._bytes = 0
        self._next = 0
        self._lock = Lock()
        self.active = False
        self.dropped = 0
        """Events that were dropped unread or not because the log was full."""

    def publish(self, event: Event) -> None:
        """Append ``event`` if anybody reads."""
        if not self.active:
            return
        with self._lock:
            self._events.append(event)
            self._next += 1
            self._bytes += _cost(event)
            while self._bytes > self._max_bytes:
                self._bytes -= _cost(self._events.popleft())
                self.dropped += 1

    def read(self, after: int) -> tuple[list[Event], int, int]:
        """Return events numbered ``after`` and up.

        Returns:
            ``(events, next, missed)``: pass ``next`` to the following call; ``missed`` events between
            ``after`` and the first one returned were dropped, so the reader must take a snapshot.
        """
        with self._lock:
            self.active = True
            first = self._next - len(self._events)
            events = list(islice(self._events, max(0, after - first), None))
            return events, self._next, max(0, first - after)


def _cost(event: Event) -> int:
    return EVENT_OVERHEAD_BYTES + (0 if isinstance(event, AllBlocksCleared) else len(event.prefix))
