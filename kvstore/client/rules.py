"""Where a daemon is, how long a call may take, and when a daemon that failed is asked again."""

from __future__ import annotations

import logging
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvstore.errors import ConfigError, UnavailableError

if TYPE_CHECKING:
    from collections.abc import Callable

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Address:
    """Where a daemon listens: a socket's path, or a host and port."""

    path: str | None
    host: str = ""
    port: int = 0

    def __str__(self) -> str:
        """Return the URL."""
        return f"unix://{self.path}" if self.path else f"tcp://{self.host}:{self.port}"


def parse_url(url: str) -> Address:
    """Return the address that ``url`` names: ``unix:///path`` or ``tcp://127.0.0.1:port``.

    Raises:
        ConfigError: it names none, or another host: blocks are shared through this one's memory.
    """
    if match := re.fullmatch(r"unix://(/.+)", url):
        return Address(match[1])
    if match := re.fullmatch(r"tcp://([^:/]+|\[[^]]+\]):(\d{1,5})/?", url):
        host = match[1].strip("[]")
        if host in ("localhost", "::1") or re.fullmatch(r"127(\.\d{1,3}){3}", host):
            return Address(None, host, int(match[2]))
        raise ConfigError(f"{url!r} is another host: a client and its daemon share memory")
    raise ConfigError(f"{url!r} is no address: write unix:///path/to.sock or tcp://127.0.0.1:PORT")


@dataclass(frozen=True)
class Deadlines:
    """How long a call may take: never longer than recomputing the prompt would.

    ``fixed_s`` overrides that for every call.
    """

    fixed_s: float | None = None
    prefill_tokens_per_s: float = 10_000.0
    shortest_s: float = 0.1
    longest_s: float = 5.0

    def __call__(self, num_tokens: int) -> float:
        """Return the seconds that a call about ``num_tokens`` may take."""
        if self.fixed_s is not None:
            return self.fixed_s
        recompute_s = num_tokens / self.prefill_tokens_per_s
        return min(max(recompute_s, self.shortest_s), self.longest_s)


class Breaker:
    """Says when a daemon that failed may be asked again: exponential back-off with jitter.

    The wait is drawn from the upper half of a span that doubles with each failure in a row.
    """

    def __init__(
        self,
        clock: Callable[[], float],
        random: Callable[[], float],
        first_s: float = 0.05,
        longest_s: float = 2.0,
    ) -> None:
        """Start closed: anything may be tried. ``random`` draws from 0 to 1."""
        self._clock, self._random = clock, random
        self._first_s, self._longest_s = first_s, longest_s
        self._span_s = 0.0
        self._retry_at = 0.0
        self._why = self._reason = ""

    def check(self) -> None:
        """Raise :class:`UnavailableError`, with what happened last, until the next try may be made."""
        wait_s = self._retry_at - self._clock()
        if self._span_s and wait_s > 0:
            raise UnavailableError("breaker", f"{self._why}; tried again in {wait_s:.2f} s")

    def failed(self, failure: UnavailableError) -> None:
        """Wait before the next try, longer each time. Each new reason is logged, once."""
        if failure.reason != self._reason:
            logger.warning("kvstore: %s; going on without, and trying again", failure)
        self._why, self._reason = str(failure), failure.reason
        self._span_s = min(max(self._first_s, 2 * self._span_s), self._longest_s)
        self._retry_at = self._clock() + self._span_s * (1 + self._random()) / 2

    def succeeded(self) -> None:
        """Forget the failures."""
        self._span_s = 0.0
        self._reason = ""
