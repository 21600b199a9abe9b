"""The scheduler's half: asks the store once a request, and decides what is loaded and stored.

*Asking.* vLLM asks at every step for every waiting request. The daemon is asked once; its answer, a
lease, is kept until vLLM uses it, so that later calls cost microseconds. A request is asked to wait
only while another one loads the blocks that it needs, while the daemon brings them from a slower tier, or
(when its parameters say so) until another engine has stored them. One whose load failed is not offered
anything again: it is computed.

*Loading.* The lease is held until every rank has loaded; each rank takes one of its own for that time.
vLLM takes blocks into its own prefix cache before a synchronous load has succeeded. So nobody else may
use them, and nothing that was computed from them is stored, until that is known; if it fails, that
cache is emptied, since what else stems from them cannot be told.

*Storing.* A block is handed to the workers in the step that fills it. It may be freed and used again
before it is copied: so the workers are told which blocks a step writes to, and let it wait, for a
moment, until those are copied, or else give them up. Nothing is pinned, and vLLM's pool stays its own.
"""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from engine_plugin.vllm.messages import Load, Mode, Save, StepMetadata
from engine_plugin.vllm.pace import Pace
from engine_plugin.vllm.prompts import Prompt
from engine_plugin.vllm.stats import Stats
from kvstore.errors import KVStoreError, LeaseError, UsageError
from kvstore.retention import NORMAL_PRIORITY, check_priority, lifetime_of

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request

    from engine_plugin.vllm.messages import StepResults
    from engine_plugin.vllm.options import Options
    from engine_plugin.vllm.prompts import Namespaces
    from kvstore.interface import KVStore
    from kvstore.lease import Lease

logger = logging.getLogger("vllm.kvstore")

SKIP_READ, SKIP_WRITE = "kvstore.skip_read", "kvstore.skip_write"
EXPECT = "kvstore.expect_tokens"
"""Tokens of the prompt that another engine is about to store: wait for them, but not for long."""
PRIORITY, TTL = "kvstore.priority", "kvstore.ttl_s"
"""How what the request stores is kept, as :meth:`kvstore.pool.Pool.reserve` has it."""
PARAMETERS: dict[str, type] = {
    SKIP_READ: bool,
    SKIP_WRITE: bool,
    EXPECT: int,
    PRIORITY: int,
    TTL: float,
}
"""What ``kv_transfer_params`` of a request may say, and of which kind it is."""

COPY_BYTES_PER_S = 5e9
"""How fast a load is thought to be, to choose its mode."""
RETRY_S = 1.0
"""How long after a save that failed before the blocks are handed over again."""
POLL_S = 0.005
"""How long before the daemon is asked again for blocks that are expected."""


@dataclass(eq=False)
class _Request:
    """What is known of one request."""

    number: int
    """Its name for the workers."""
    request: Request
    prompt: Prompt
    reads: bool
    writes: bool
    priority: int
    ttl_s: float | None
    expected_blocks: int = 0
    """Blocks to wait for, until ``wait_until``."""
    wait_until: float = 0.0
    load_until: float = float("inf")
    """How long to wait for what the daemon loads from a slower tier, once that is known."""
    ask_at: float = 0.0
    """Not before."""
    lease: Lease | None = None
    """The daemon's answer, until it is used."""
    asked: bool = False
    local_blocks: int = 0
    """Blocks that vLLM had when it asked last."""
    mode: Mode = "sync"
    """How it was told that the load would be done."""
    handed_over: int = 0
    """Leading blocks that are in the store, or on their way there."""
    store_at: float = 0.0
    """Not before, after a save that failed."""
    told: int = 0
    """Key bytes that the workers know."""


@dataclass(eq=False)
class _Loading:
    """A load under way."""

    state: _Request
    load: Load
    lease: Lease
    ranks_left: int
    failed: bool = False
    ended: bool = False
    """Whether the request ended meanwhile."""
    save: Save | None = None
    """What it leaves to be stored, if the load succeeds."""


@dataclass(eq=False)
class _Saving:
    """A save that some rank has not reported."""

    state: _Request
    blocks: list[int]
    ranks_left: int


class Scheduler:
    """Plans the loads and saves of one engine. Called by the thread that schedules."""

    def __init__(
        self,
        store: KVStore,
        namespaces: Namespaces,
        options: Options,
        manager: KVCacheManager,
        *,
        num_ranks: int,
        block_bytes: int,
        clock: Callable[[], float],
    ) -> None:
        """Start with no request.

        Args:
            store: a client of the daemon, which answers within a deadline or misses.
            namespaces: of the engine's model.
            options: of the connector.
            manager: vLLM's blocks and prefix cache.
            num_ranks: workers that report each load and save.
            block_bytes: of one block on one rank, to guess how long a load takes.
            clock: monotonic seconds.
        """
        self.stats = Stats()
        self._store, self._namespaces, self._options = store, namespaces, options
        self._manager = manager
        self.reads = self.writes = True
        """Whether the engine uses what is stored, and whether it stores."""
        self.pace = Pace(clock, steps_overlap=True)
        self._num_ranks, self._clock = num_ranks, clock
        self._block_bytes = block_bytes
        self._width = namespaces.block_tokens
        self._requests: dict[str, _Request] = {}
        self._loads: dict[int, _Loading] = {}
        """Loads under way, by number."""
        self._saves: dict[int, _Saving] = {}
        """Saves under way, by job."""
        self._last_number = 0
        self._step = StepMetadata()

    # -- asking ---------------------------------------------------------------------------------

    def add(self, request: Request) -> None:
        """Take note of a new request."""
        try:
            prompt = Prompt(request, self._namespaces.of(request))
            prompt.head(request.num_tokens // self._width)
        except (KVStoreError, OSError) as error:
            logger.info("request %s is not cached: %s", request.request_id, error)
            return
        given = request.kv_transfer_params or {}
        _check_parameters(request.request_id, given)
        kept = _retention(request.request_id, given)
        priority, ttl_s = kept or (NORMAL_PRIORITY, None)
        self._requests[request.request_id] = _Request(
            self._number(),
            request,
            prompt,
            reads=self.reads and not given.get(SKIP_READ, False),
            writes=self.writes and not given.get(SKIP_WRITE, False) and kept is not None,
            priority=priority,
            ttl_s=ttl_s,
            expected_blocks=_count(given.get(EXPECT)) // self._width,
            wait_until=self._clock() + self._options.wait_s,
        )

    def _number(self) -> int:
        """Return a number that nothing had before."""
        self._last_number += 1
        return self._last_number

    def find(self, request: Request, num_computed: int) -> tuple[int | None, bool]:
        """Return how many tokens behind ``num_computed`` can be loaded, and whether between steps.

        None for the number: ask again later.
        """
        state = self._requests.get(request.request_id)
        if state is None:  # its prompt is not known: it may be the one of any load
            return (None if self._unsure_blocks() else 0), False
        state.local_blocks = num_computed // self._width
        if self._needs_other_load(state):
            self.stats.add(deferred=1)
            return None, False
        if (
            not state.reads
            or request.skip_reading_prefix_cache
            or state.local_blocks >= (request.num_tokens - 1) // self._width
        ):
            return 0, False
        try:
            if not self._has_answer(state) and not self._ask(state):
                return None, False
        except KVStoreError as error:
            logger.warning("request %s is not cached: %s", request.request_id, error)
            self._leave_out(state)
        lease = state.lease
        num_blocks = 0 if lease is None else lease.num_blocks - state.local_blocks
        if num_blocks <= 0:
            return 0, False
        state.mode = self._mode(num_blocks)
        return num_blocks * self._width, state.mode == "async"

    def _needs_other_load(self, state: _Request) -> bool:
        """Whether another request loads blocks that this one has from vLLM's cache, or needs next."""
        for loading in self._loads.values():
            load, other = loading.load, loading.state
            needed = state.local_blocks + 1
            if load.mode != "async":  # vLLM has taken them for its own already
                needed = min(needed, load.first + 1)
            if (
                other is not state
                and not (loading.ended and load.mode == "async")
                and load.first < needed <= load.first + len(load.blocks)
                and other.prompt.namespace == state.prompt.namespace
                and needed <= state.request.num_tokens // self._width
                and other.prompt.head(needed) == state.prompt.head(needed)
            ):
                return True
        return False

    def _has_answer(self, state: _Request) -> bool:
        """Whether the daemon was asked; an answer that has run out in the queue is given back."""
        lease = state.lease
        if lease is not None and lease.num_blocks and self._clock() >= lease.expires_at:
            self._release(lease)
            state.asked, state.lease = False, None
        return state.asked

    def _leave_out(self, state: _Request) -> None:
        """Neither read nor write for this request any more."""
        self._release(state.lease)
        state.lease, state.reads, state.writes = None, False, False

    def _ask(self, state: _Request) -> bool:
        """Take a lease; False to ask again later, because what is expected is not there yet."""
        start = self._clock()
        if start < state.ask_at:
            return False
        lease = self._store.acquire(
            state.prompt.namespace,
            state.prompt.lookup_key(),
            may_wait=start < state.load_until,
        )
        if self._comes(state, lease, start):
            return False
        self.stats.add(
            lookups=1,
            failed_lookups=lease.failure is not None,
            lookup_seconds=self._clock() - start,
        )
        expected = min(state.expected_blocks, (state.request.num_tokens - 1) // self._width)
        if lease.num_blocks < expected and lease.failure is None and start < state.wait_until:
            self._release(lease)
            state.ask_at = start + POLL_S
            return False
        state.asked, state.lease = True, lease
        state.handed_over = max(state.handed_over, lease.num_blocks)
        hits = max(0, lease.num_blocks - state.local_blocks)
        self.stats.add(hit_tokens=hits * self._width)
        return True

    def _comes(self, state: _Request, lease: Lease, now: float) -> bool:
        """Whether the daemon asks to wait, while it loads blocks from a slower tier, and there is time for it.

        The first such answer says how long that is.
        """
        if not lease.coming_blocks or lease.num_blocks or now >= state.load_until:
            return False
        if lease.ready_blocks + lease.coming_blocks <= state.local_blocks:
            state.load_until = now  # vLLM has them itself
            return True
        if state.load_until == float("inf"):
            state.load_until = now + lease.patience_s
        state.ask_at = now + max(POLL_S, min(lease.ready_in_s, state.load_until - now))
        self.stats.add(deferred=1)
        return True

    def _mode(self, num_blocks: int) -> Mode:
        if self._options.load != "auto":
            return self._options.load
        seconds = num_blocks * self._block_bytes / COPY_BYTES_PER_S
        return "sync" if seconds <= self._options.sync_load_s else "async"

    # -- loading --------------------------------------------------------------------------------

    def allocated(self, request: Request, blocks: Sequence[int], num_external: int) -> None:
        """Plan the load into the request's ``blocks``, of which the first ones are vLLM's own hits."""
        state = self._requests.get(request.request_id)
        if state is None:
            return
        if not num_external:
            if self._load_of(state) is None:
                self._release(state.lease)
                state.lease, state.asked = None, False
            return
        lease, state.lease, state.asked = state.lease, None, False
        assert lease is not None
        first, count = state.local_blocks, num_external // self._width
        number = self._number()
        load = Load(
            number,
            state.number,
            request.request_id,
            first,
            list(blocks[first : first + count]),
            state.mode,
        )
        self._loads[number] = _Loading(state, load, lease, self._num_ranks)
        self._tell(state, first + count)
        self._step.loads.append(load)

    def _load_of(self, state: _Request) -> _Loading | None:
        """Return the last load of a request that is under way."""
        mine = [loading for loading in self._loads.values() if loading.state is state]
        return mine[-1] if mine else None

    # -- storing --------------------------------------------------------------------------------

    def build(self, output: SchedulerOutput) -> StepMetadata:
        """Return the step's work."""
        tables = output.kv_connector_block_state
        unsure = self._unsure_blocks()
        self._step.idle = not output.total_num_scheduled_tokens
        self._step.overwritten = self._overwritten(output)
        for request_id, num_tokens in output.num_scheduled_tokens.items():
            state = self._requests.get(request_id)
            if state is None or not state.writes or self._clock() < state.store_at:
                continue
            stop = self._num_full(state.request, state.request.num_computed_tokens + num_tokens)
            if stop > state.handed_over:
                found = tables.get_block_ids(request_id) if tables else None
                if found is not None and unsure.isdisjoint(found[0]):
                    self._step.saves += self._save(state, found[0], stop)
        self._measure(output)
        step, self._step = self._step, StepMetadata()
        return step

    def _measure(self, output: SchedulerOutput) -> None:
        """Tell the daemon how long the last step's piece of a prompt took."""
        piece = self.pace.step(output.num_scheduled_tokens)
        state = self._requests.get(piece.request_id) if piece else None
        if piece and state:
            stop = state.request.num_computed_tokens  # where steps overlap, that of a later piece
            start = max(0, stop - piece.num_tokens)
            self._store.prefilled(state.prompt.namespace, start, stop, piece.seconds)

    def _overwritten(self, output: SchedulerOutput) -> list[int]:
        """Blocks that this step writes to, of those that wait to be copied to the store."""
        waiting = {block for saving in self._saves.values() for block in saving.blocks}
        if not waiting:
            return []
        written = {block for load in self._step.loads for block in load.blocks}
        for new in output.scheduled_new_reqs:
            written.update(new.block_ids[0][new.num_computed_tokens // self._width :])
        cached = output.scheduled_cached_reqs
        for name, ids, computed in zip(
            cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True
        ):
            resumed = name in cached.resumed_req_ids  # then it is told all of its blocks anew
            written.update(ids[0][computed // self._width if resumed else 0 :] if ids else ())
        return list(waiting & written)

    def _unsure_blocks(self) -> set[int]:
        """Engine blocks whose load a forward pass does not wait for to have succeeded.

        What is computed from them is stored when that is known, by whichever request.
        """
        loads = [loading.load for loading in self._loads.values()]
        return {block for load in loads if load.mode != "async" for block in load.blocks}

    def _num_full(self, request: Request, num_computed: int) -> int:
        """How many blocks of ``request`` are to be stored once so many tokens are computed."""
        known = request.num_tokens if self._options.save_decode else request.num_prompt_tokens
        return min(num_computed, known) // self._width

    def _save(self, state: _Request, block_ids: Sequence[int], stop: int) -> list[Save]:
        """Return a job, or none, for the blocks up to ``stop`` that are not in the store."""
        first = state.handed_over
        ids = list(block_ids[first:stop])
        if not ids or len(ids) < stop - first or 0 in ids:  # not there any more
            return []
        job = self._number()
        self._saves[job] = _Saving(state, ids, self._num_ranks)
        state.handed_over = stop
        self._tell(state, stop)
        return [Save(job, state.number, first, ids, state.priority, state.ttl_s)]

    def _tell(self, state: _Request, num_blocks: int) -> None:
        """Let the workers know the request's first blocks."""
        step, number = self._step, state.number
        key = state.prompt.head(num_blocks)
        if not state.told:
            step.namespaces[number] = state.prompt.namespace
        if len(key) > state.told:
            step.keys[number] = step.keys.get(number, b"") + key[state.told :]
            state.told = len(key)

    # -- ending ---------------------------------------------------------------------------------

    def finish(self, request: Request, block_ids: Sequence[int]) -> dict[str, Any] | None:
        """Forget a request, but for its load or saves that are under way, and store what is left.

        Returns:
            Parameters for the request with the same prompt to another engine, which can load what this
            one has stored.
        """
        state = self._requests.pop(request.request_id, None)
        if state is None:
            return None
        self._release(state.lease)
        self._save_rest(state, block_ids)
        if self.reads or not state.writes or not state.handed_over:
            return None
        return {EXPECT: min(state.handed_over * self._width, request.num_prompt_tokens)}

    def _save_rest(self, state: _Request, block_ids: Sequence[int]) -> None:
        """Store what a request that has ended leaves, or see to it when its load has ended."""
        request, loading = state.request, self._load_of(state)
        others = [other for other in self._loads.values() if other is not loading]
        unsure = {block for other in others for block in other.load.blocks}
        is_async = loading is not None and loading.load.mode == "async"
        saves: list[Save] = []
        if state.writes and not is_async and unsure.isdisjoint(block_ids):
            computed = request.num_computed_tokens - request.num_in_flight_tokens
            saves = self._save(state, block_ids, self._num_full(request, computed))
        if loading is None:
            self._step.early_saves += saves
            self._forget(state)
        else:
            loading.ended, loading.save = True, saves[0] if saves else None

    def _forget(self, state: _Request) -> None:
        if state.told:
            self._step.forgotten.append(state.number)

    def update(self, results: StepResults) -> None:
        """Take note of what the workers have done."""
        for number, ranks in results.loads.items():
            loading = self._loads[number]
            loading.failed |= number in results.failed
            loading.ranks_left -= ranks
            if not loading.ranks_left:
                del self._loads[number]
                self._end_load(loading)
        for job, ranks in results.saves.items():
            saving = self._saves[job]
            saving.ranks_left -= ranks
            if job in results.failed_saves:
                saving.state.handed_over = 0
                saving.state.store_at = self._clock() + RETRY_S
            if not saving.ranks_left:
                del self._saves[job]

    def _end_load(self, loading: _Loading) -> None:
        """Every rank has loaded, well or not."""
        state = loading.state
        self._release(loading.lease)
        if loading.failed:
            self._undo(loading)
        if loading.ended:
            if loading.save is not None and not loading.failed:
                self._step.early_saves.append(loading.save)
            self._forget(state)

    def _undo(self, loading: _Loading) -> None:
        """Offer nothing to this request again, and let nobody use what was not loaded.

        A request that goes on computes its blocks again, in place.
        """
        state = loading.state
        self._release(state.lease)
        state.lease, state.reads, state.handed_over = None, False, 0
        if loading.save is not None:
            del self._saves[loading.save.job]
        if loading.load.mode != "async":
            self._empty_prefix_cache()

    def _empty_prefix_cache(self) -> None:
        """Let no request hit what vLLM has computed so far: it may stem from blocks that are wrong."""
        blocks = self._manager.block_pool.blocks
        self._manager.evict_blocks({block.block_id for block in blocks if block.block_hash})

    def start_anew(self) -> None:
        """Know nothing of what was stored so far, for good: the weights may be other ones.

        Requests that have begun may mix keys and values of both: they are not stored any more.
        """
        for state in self._requests.values():
            self._leave_out(state)
        self._namespaces.start_anew(os.urandom(16))
        self._empty_prefix_cache()

    def close(self) -> None:
        """Give back what is held; close the client."""
        self._store.close()

    def _release(self, lease: Lease | None) -> None:
        if lease is None:
            return
        try:
            self._store.release(lease)
        except LeaseError as error:  # the workers' own leases say whether they read right bytes
            logger.debug("a lease ended early: %s", error)


def _check_parameters(request_id: str, given: Mapping[str, Any]) -> None:
    """Log what ``kv_transfer_params`` say to the store that it does not understand."""
    for name, value in given.items():
        kind = PARAMETERS.get(name)
        if kind is None and not name.startswith("kvstore."):
            continue
        if kind is None:
            logger.warning(
                "request %s: kv_transfer_params has no %s; known: %s",
                *(request_id, name, ", ".join(sorted(PARAMETERS))),
            )
        elif name not in (PRIORITY, TTL) and (
            type(value) is not kind or (isinstance(value, int) and value < 0)
        ):
            logger.warning("request %s: %s=%r is no %s", request_id, name, value, kind.__name__)


def _retention(request_id: str, given: Mapping[str, Any]) -> tuple[int, float | None] | None:
    """Return priority and time to live of what a request stores.

    None, and a line in the log, when they are impossible: it is not stored, as it might be kept for too long.
    """
    try:
        lifetime_of(given.get(TTL))
        return check_priority(given.get(PRIORITY, NORMAL_PRIORITY)), given.get(TTL)
    except UsageError as error:
        logger.warning("request %s is not stored: %s", request_id, error)
        return None


def _count(value: object) -> int:
    return value if isinstance(value, int) and value > 0 else 0
