"""Whether something is done at the moment: off after trouble, tried again after a growing pause."""

from __future__ import annotations

import errno
import logging
import sqlite3
import threading
from collections import Counter
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

logger = logging.getLogger(__name__)

FIRST_PAUSE_S = 1.0
MAX_PAUSE_S = 60.0

_REASONS = {
    errno.ENOSPC: "no_space",
    errno.EDQUOT: "no_space",
    errno.EIO: "io_error",
    errno.EROFS: "read_only",
    errno.ENOENT: "vanished",
    errno.ENOTDIR: "vanished",
    errno.ESTALE: "vanished",
    errno.EACCES: "no_permission",
    errno.EPERM: "no_permission",
    errno.ENODATA: "truncated",
}


def reason_of(error: Exception) -> str:
    """Return the word under which ``error`` is counted."""
    if isinstance(error, OSError):
        return _REASONS.get(error.errno or 0, "io_error")
    if isinstance(error, sqlite3.Error):
        full = getattr(error, "sqlite_errorcode", None) == sqlite3.SQLITE_FULL
        return "manifest_full" if full else "manifest"
    return "not_ours"


class Health:
    """Says when I/O may be tried. Thread-safe."""

    def __init__(self, name: str, clock: Callable[[], float]) -> None:
        """Start on. ``name`` says in logs what it is about; ``clock`` gives monotonic seconds."""
        self._name = name
        self._troubles: Counter[str] = Counter()
        self.reason = ""
        """Why it is off; empty when it is on."""
        self._clock = clock
        self._pause_s = FIRST_PAUSE_S
        self._retry_at = float("-inf")
        self._lock = threading.Lock()

    def may_try(self) -> bool:
        """Whether it is on, or the pause is over."""
        with self._lock:
            return not self.reason or self._clock() >= self._retry_at

    @property
    def troubles(self) -> dict[str, int]:
        """How often each reason turned it off."""
        with self._lock:
            return dict(self._troubles)

    def trouble(self, reason: str, detail: object) -> None:
        """Turn it off for a pause that doubles while trouble goes on."""
        with self._lock:
            self._pause_s = min(2 * self._pause_s, MAX_PAUSE_S) if self.reason else FIRST_PAUSE_S
            self._retry_at = self._clock() + self._pause_s
            self.reason = reason
            self._troubles[reason] += 1
            pause_s = self._pause_s
        logger.error("%s is off for %.0f s: %s (%s)", self._name, pause_s, reason, detail)

    def fine(self) -> None:
        """Turn it on: I/O went well."""
        with self._lock:
            before, self.reason = self.reason, ""
        if before:
            logger.warning("%s is on again after: %s", self._name, before)
