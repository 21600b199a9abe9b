"""Whether blocks of a slow tier are worth loading: expected seconds to load against seconds to compute.

A hit must not make a request slower. So both sides are measured, and doubt counts against loading.

*Loads.* ``n`` bytes of a tier take ``latency_s + n * byte_s`` seconds. Each load corrects both by ``GAIN`` of
its error, shared out by the squares of what each contributes: a normalised least-mean-squares filter (Nagumo,
Noda, "A learning method for system identification", 1967). What loads of one size do not tell apart stays as
it was. A load that took more than ``FAR`` times the expected seconds is believed as a whole: one is enough to
give up a broken disk, which comes back by ``GAIN``. Small loads say little about bandwidth: bytes beyond
``GROWTH`` times the largest measured load are not expected faster than by default.

*Prefill.* Seconds a token by position in the prompt, in buckets ``[0, 256)``, ``[256, 512)``, ``[512, 1024)``…,
averaged over the last ``MEMORY_TOKENS`` or so of each. A chunk changes all its buckets by the same factor.
A bucket without samples is as fast as the nearest one that has some, of two the earlier one. Here it is the
faster engine that is believed at once, and a slower one in steps of at most ``FAR``.

*Choice.* Of the first k blocks, the k that saves most, if that is more than a margin. With one bandwidth and
tokens that become dearer by position that is all or none; a part, when later tokens are cheaper than early
ones, or when a load would be much larger than any before.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

# Before anything is measured. Tiers: latency in seconds, seconds a byte; other names are as "remote".
DEFAULT_TIERS = {"disk": (1e-3, 1e-9), "remote": (5e-3, 2e-9)}
DEFAULT_TOKENS_PER_S = 10_000.0

GAIN = 0.3  # part of its error that a load corrects
FAR = 2.0  # a load this many times slower, or a chunk this many times faster is believed at once
GROWTH = 2  # up to this many times the largest load the measured bandwidth is trusted
MAX_SPEEDUP = 64  # a tier has at most this many times the bandwidth of its defaults
MARGIN, MARGIN_S = 0.05, 1e-3  # a load must save more than this part of its seconds, and these
PROBE_S = 2.0  # shortest time between probes of a tier, and between its last load and a probe
MAX_NAMESPACES = 256  # whose prefill is known; the least recently used one is forgotten
MIN_CHUNK_TOKENS = 64  # shorter ones are mostly fixed costs, which a hit does not save: ignored
MEMORY_TOKENS = 4096
# Where buckets begin, and where the last one ends. Tokens behind that cost nothing: they are not loaded.
EDGES = np.array([0, *(1 << bits for bits in range(8, 32))], np.float64)
MAX_BYTES, MAX_S, TOKEN_S_LIMITS = 1 << 50, 1e6, (1e-8, 1e3)  # measurements beyond are nonsense


class Queue(NamedTuple):
    """Loads out of one tier that come before."""

    loads: int = 0
    num_bytes: int = 0  # of all together


NO_QUEUE = Queue()


class Plan(NamedTuple):
    """What to load."""

    num_blocks: int  # leading blocks worth loading
    load_s: float  # expected seconds until they are there, with the queue; 0.0 for none
    prefill_s: float  # expected seconds to compute all blocks that were asked about


@dataclass(slots=True)
class _Tier:
    default_latency_s: float
    default_byte_s: float
    latency_s: float
    byte_s: float
    largest_bytes: int = 0
    loads: int = 0
    is_rejected: bool = False  # by the last plan
    probe_at_s: float = -np.inf

    def seconds(self, num_bytes: NDArray[np.float64]) -> NDArray[np.float64]:
        beyond = np.maximum(num_bytes - GROWTH * self.largest_bytes, 0.0)
        unproven_s = max(self.default_byte_s - self.byte_s, 0.0)
        return self.latency_s + self.byte_s * num_bytes + unproven_s * beyond

    def queue_s(self, queue: Queue) -> float:
        """Seconds for loads, one after another."""
        return queue.loads * self.latency_s + queue.num_bytes * self.byte_s

    def learn(self, num_bytes: int, seconds: float) -> None:
        expected_s = self.latency_s + self.byte_s * num_bytes
        error_s = (seconds - expected_s) * (1.0 if seconds > FAR * expected_s else GAIN)
        # Below its default a number counts as the default, or it would never grow again.
        fixed = max(self.latency_s, self.default_latency_s) ** 2
        by_size = (max(self.byte_s, self.default_byte_s) * num_bytes) ** 2
        part = fixed / (fixed + by_size)
        self.latency_s = max(self.latency_s + part * error_s, 0.0)
        byte_s = self.byte_s + (1 - part) * error_s / num_bytes
        self.byte_s = max(byte_s, self.default_byte_s / MAX_SPEEDUP)
        self.largest_bytes = max(self.largest_bytes, num_bytes)
        self.loads += 1


class _Prefill:
    """Seconds a token in each bucket, and how many tokens stand behind that: 0 if it was not measured."""

    def __init__(self) -> None:
        self.token_s = np.full(len(EDGES) - 1, 1 / DEFAULT_TOKENS_PER_S)
        self.tokens = np.zeros(len(EDGES) - 1)

    def seconds(self, start: int, stops: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return the seconds for tokens ``[start, stop)``, for each of ``stops``."""
        until_s = np.concatenate(([0.0], np.cumsum(self.token_s * np.diff(EDGES))))
        return np.interp(stops, EDGES, until_s) - np.interp(start, EDGES, until_s)

    def learn(self, start: int, stop: int, seconds: float) -> None:
        counts = np.diff(np.clip(EDGES, start, stop))
        ratio = seconds / float(counts @ self.token_s)
        anew = (counts > 0) & ((self.tokens == 0) | (ratio < 1 / FAR))
        gain = counts / np.maximum(counts + self.tokens, 1)
        self.token_s *= np.where(anew, ratio, 1 + gain * (min(ratio, FAR) - 1))
        self.tokens = np.minimum(np.where(anew, 0, self.tokens) + counts, MEMORY_TOKENS)
        measured = np.flatnonzero(self.tokens)
        nearest = np.abs(np.arange(len(self.tokens))[:, None] - measured).argmin(axis=1)
        self.token_s = np.clip(self.token_s[measured[nearest]], *TOKEN_S_LIMITS)


class Planner:
    """Compares loading with computing. Single-owner. Measurements that cannot be true, as NaN, are ignored."""

    def __init__(
        self, clock: Callable[[], float], *, mode: Literal["auto", "always", "never"] = "auto"
    ) -> None:
        """Start with the defaults; ``clock`` gives monotonic seconds. ``always`` loads all, ``never`` none."""
        self._clock = clock
        self.mode = mode
        self._tiers: dict[str, _Tier] = {}
        self._prefills: OrderedDict[bytes, _Prefill] = OrderedDict()

    def loaded(self, tier: str, num_bytes: int, seconds: float, *, loads: int = 1) -> None:
        """Note that ``loads`` of ``num_bytes`` together out of ``tier`` took ``seconds``, one after another.

        Their time in the queue does not count.

        Note one that was given up, too, if that took longer than :meth:`load_s`; but not one that failed.
        """
        if 0 < num_bytes <= MAX_BYTES and 0 < seconds <= MAX_S:
            known = self._tier(tier)
            known.learn(num_bytes // loads or 1, seconds / loads)
            known.largest_bytes = max(known.largest_bytes, num_bytes)
            known.probe_at_s = self._clock() + PROBE_S

    def prefilled(self, digest: bytes, start: int, stop: int, seconds: float) -> None:
        """Note that an engine computed tokens ``[start, stop)`` of a prompt of namespace ``digest``."""
        is_chunk = start >= 0 and stop - start >= MIN_CHUNK_TOKENS and stop <= EDGES[-1]
        if is_chunk and 0 < seconds <= MAX_S:
            known = self._prefills[digest] = self._prefill(digest)
            known.learn(start, stop, seconds)
            if len(self._prefills) > MAX_NAMESPACES:
                self._prefills.popitem(last=False)

    def load_s(self, tier: str, num_bytes: int) -> float:
        """Return the expected seconds to load ``num_bytes`` at once out of ``tier``, without a queue."""
        return float(self._tier(tier).seconds(np.array([num_bytes], np.float64))[0])

    def wait_s(self, tier: str, queue: Queue) -> float:
        """Return the expected seconds until all that is in ``queue`` is there."""
        return max(self._tier(tier).queue_s(queue), self.load_s(tier, queue.num_bytes))

    def prefill_s(self, digest: bytes, start: int, stop: int) -> float:
        """Return the expected seconds to compute tokens ``[start, stop)`` of a prompt."""
        return float(self._prefill(digest).seconds(start, np.array([stop], np.float64))[0])

    def plan(  # noqa: PLR0913 - one measure each
        self,
        digest: bytes,
        block_tokens: int,
        start: int,
        block_bytes: int | NDArray[np.int64],
        tier: str,
        num_blocks: int,
        queue: Queue = NO_QUEUE,
        *,
        ready_s: NDArray[np.float64] | float = 0.0,
    ) -> Plan:
        """Say how many of the ``num_blocks`` blocks behind token ``start`` are worth waiting for.

        Args:
            digest: of the engine.
            block_tokens: tokens of a block.
            start: the first token that is not there.
            block_bytes: to be loaded for each block, 0 for one that comes by itself; one number for all, or
                ``[num_blocks]``.
            tier: where they are, of several the slowest.
            num_blocks: blocks, leading ones first.
            queue: what is loaded out of the tier before them.
            ready_s: float64 ``[num_blocks]``, ascending: seconds until those of the first k blocks are there
                that come by themselves.
        """
        if num_blocks <= 0:
            return Plan(0, 0.0, 0.0)
        known = self._tier(tier)
        blocks = np.arange(1, num_blocks + 1, dtype=np.float64)
        num_bytes = np.cumsum(np.broadcast_to(np.asarray(block_bytes, np.float64), num_blocks))
        prefill_s = self._prefill(digest).seconds(start, start + blocks * block_tokens)
        load_s = known.seconds(num_bytes) + known.queue_s(queue)
        load_s = np.maximum(np.where(num_bytes > 0, load_s, 0.0), ready_s)
        best = num_blocks - 1
        if self.mode == "auto":
            saved_s = prefill_s - load_s
            best = int(saved_s.argmax())
            known.is_rejected = bool(saved_s[best] <= MARGIN * load_s[best] + MARGIN_S)
        if known.is_rejected or self.mode == "never":
            return Plan(0, 0.0, float(prefill_s[-1]))
        return Plan(best + 1, float(load_s[best]), float(prefill_s[-1]))

    def probe(self, tier: str) -> bool:
        """Say whether to load some blocks of ``tier`` in the background to measure it: its last plan was none.

        True at most once in ``PROBE_S``, and not so soon after a load. It is best to vary how many blocks.
        """
        known, now_s = self._tier(tier), self._clock()
        if is_due := known.is_rejected and now_s >= known.probe_at_s:
            known.probe_at_s = now_s + PROBE_S
        return is_due

    def is_measured(self, tier: str) -> bool:
        """Say whether a load out of ``tier`` was noted."""
        return self._tier(tier).loads > 0

    def expected(self, tier: str) -> tuple[float, float]:
        """Return the latency of ``tier`` in seconds, and its bytes a second, measured or assumed."""
        known = self._tier(tier)
        return known.latency_s, 1 / known.byte_s

    def _tier(self, name: str) -> _Tier:
        defaults = DEFAULT_TIERS.get(name, DEFAULT_TIERS["remote"])
        return self._tiers.setdefault(name, _Tier(*defaults, *defaults))

    def _prefill(self, digest: bytes) -> _Prefill:
        if digest in self._prefills:
            self._prefills.move_to_end(digest)
        return self._prefills.get(digest) or _Prefill()
