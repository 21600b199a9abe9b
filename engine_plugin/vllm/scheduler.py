"""The scheduler's half: asks the store once a request, and decides what is loaded and stored.

*Asking.* vLLM asks at every step for every waiting request. The daemon is asked once; its answer, a
lease, is kept until vLLM uses it, so that later calls cost microseconds. A request is asked to wait
only while another one loads the blocks that it needs, or (when its parameters say so) until another
engine has stored them. One whose load failed is not offered anything again: it is computed.

*Loading.* The lease is held until every rank has loaded; each rank takes one of its own for that time.

*Storing.* A block is handed to the workers in the step that fills it. It is pinned in vLLM's block pool
until every rank has reported, so that neither preemption nor the end of the request can make it another
request's block meanwhile. Too many pinned blocks are not stored, or later.
"""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from engine_plugin.vllm.messages import Load, Mode, Save, StepMetadata
from engine_plugin.vllm.prompts import Prompt
from engine_plugin.vllm.stats import Stats
from kvstore.errors import KVStoreError, LeaseError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_utils import KVCacheBlock
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
KNOWN_PARAMETERS = frozenset({SKIP_READ, SKIP_WRITE, EXPECT})

COPY_BYTES_PER_S = 5e9
"""How fast a load is thought to be, to choose its mode."""
RETRY_S = 1.0
"""How long after a save that failed before the blocks are handed over again."""
POLL_S = 0.005
"""How long before the daemon is asked again for blocks that are expected."""


@dataclass
class _Request:
    """What is known of one request."""

    request: Request
    prompt: Prompt
    reads: bool
    writes: bool
    expected_blocks: int = 0
    """Blocks to wait for, until ``wait_until``."""
    wait_until: float = 0.0
    ask_at: float = 0.0
    """Not before."""
    lease: Lease | None = None
    """The daemon's answer, until it is used."""
    asked: bool = False
    local_blocks: int = 0
    """Blocks that vLLM had when it asked last."""
    mode: Mode = "sync"
    """How it was told that the load would be done."""
    loading: Load | None = None
    handed_over: int = 0
    """Leading blocks that are in the store, or on their way there, or were given up."""
    store_at: float = 0.0
    """Not before, after a save that failed."""
    told: int = 0
    """Key bytes that the workers know."""


@dataclass
class _Job:
    """Blocks on their way to the store."""

    request_id: str
    blocks: list[KVCacheBlock] = field(default_factory=list)


class Scheduler:
    """Plans the loads and saves of one engine. Called by the thread that schedules."""

    def __init__(
        self,
        store: KVStore,
        namespaces: Namespaces,
        options: Options,
        pool: BlockPool,
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
            pool: vLLM's blocks, to pin those that are read.
            num_ranks: workers that report each load and save.
            block_bytes: of one block on one rank, to guess how long a load takes.
            clock: monotonic seconds.
        """
        self.stats = Stats()
        self._store, self._namespaces, self._options, self._pool = store, namespaces, options, pool
        self.reads = self.writes = True
        """Whether the engine uses what is stored, and whether it stores."""
        self._num_ranks, self._clock = num_ranks, clock
        self._block_bytes = block_bytes
        self._width = namespaces.block_tokens
        self._requests: dict[str, _Request] = {}
        self._loads: dict[str, tuple[Lease, int]] = {}
        """Of every load under way: the lease, and how many ranks have still to report."""
        self._jobs: dict[int, tuple[_Job, int]] = {}
        """Of every save under way: what it is, and how many ranks have still to report."""
        self._failed: set[str] = set()
        """Requests whose load is under way and has failed on some rank."""
        self._parked: dict[str, tuple[Load, Save | None]] = {}
        """Of requests that ended before their load was known to have succeeded: what to store then."""
        self._next_job = 0
        self._num_pinned = 0
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
        if unknown := [n for n in given if n.startswith("kvstore.") and n not in KNOWN_PARAMETERS]:
            logger.warning(
                "request %s: kv_transfer_params has no %s; known: %s",
                *(request.request_id, ", ".join(unknown), ", ".join(sorted(KNOWN_PARAMETERS))),
            )
        self._requests[request.request_id] = _Request(
            request,
            prompt,
            reads=self.reads and not given.get(SKIP_READ, False),
            writes=self.writes and not given.get(SKIP_WRITE, False),
            expected_blocks=_count(given.get(EXPECT)) // self._width,
            wait_until=self._clock() + self._options.wait_s,
        )

    def find(self, request_id: str, num_computed: int) -> tuple[int | None, bool]:
        """Return how many tokens behind ``num_computed`` can be loaded, and whether between steps.

        None for the number: ask again later.
        """
        state = self._requests.get(request_id)
        if state is None or not state.reads or state.request.skip_reading_prefix_cache:
            return 0, False
        state.local_blocks = num_computed // self._width
        if state.local_blocks >= (state.request.num_tokens - 1) // self._width:
            return 0, False
        if self._is_being_loaded(state):
            self.stats.add(deferred=1)
            return None, False
        try:
            if not self._has_answer(state) and not self._ask(state):
                return None, False
        except KVStoreError as error:
            self._give_up(state, error)
        lease = state.lease
        num_blocks = 0 if lease is None else lease.num_blocks - state.local_blocks
        if num_blocks <= 0:
            return 0, False
        state.mode = self._mode(num_blocks)
        return num_blocks * self._width, state.mode == "async"

    def _has_answer(self, state: _Request) -> bool:
        """Whether the daemon was asked; an answer that has run out in the queue is given back."""
        lease = state.lease
        if lease is not None and lease.num_blocks and self._clock() >= lease.expires_at:
            self._release(lease)
            state.asked, state.lease = False, None
        return state.asked

    def _give_up(self, state: _Request, error: KVStoreError) -> None:
        """Leave the store out of a request that it has no use for."""
        logger.warning("request %s is not cached: %s", state.request.request_id, error)
        self._leave_out(state)

    def _leave_out(self, state: _Request) -> None:
        self._release(state.lease)
        state.lease, state.reads, state.writes = None, False, False

    def _ask(self, state: _Request) -> bool:
        """Take a lease; False to ask again later, because what is expected is not there yet."""
        start = self._clock()
        if start < state.ask_at:
            return False
        lease = self._store.acquire(state.prompt.namespace, state.prompt.lookup_key())
        self.stats.add(lookups=1, lookup_seconds=self._clock() - start)
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

    def _is_being_loaded(self, state: _Request) -> bool:
        """Whether another request loads the first block that this one lacks."""
        needed = state.local_blocks + 1
        for request_id, (lease, _) in self._loads.items():
            other = self._requests.get(request_id)
            if other is None or other is state:
                continue
            load = other.loading
            if (
                load
                and load.mode == "async"
                and lease.namespace == state.prompt.namespace
                and load.first < needed <= load.first + len(load.blocks)
                and other.prompt.head(needed) == state.prompt.head(needed)
            ):
                return True
        return False

    def _mode(self, num_blocks: int) -> Mode:
        if self._options.load != "auto":
            return self._options.load
        seconds = num_blocks * self._block_bytes / COPY_BYTES_PER_S
        return "sync" if seconds <= self._options.sync_load_s else "async"

    # -- loading --------------------------------------------------------------------------------

    def allocated(self, request_id: str, blocks: Sequence[int], num_external: int) -> None:
        """Plan the load into the request's ``blocks``, of which the first ones are vLLM's own hits."""
        state = self._requests.get(request_id)
        if state is None:
            return
        lease, state.lease = state.lease, None
        if not num_external:
            if state.loading is None:
                self._release(lease)
                state.asked = False
            return
        assert lease is not None
        first, count = state.local_blocks, num_external // self._width
        load = Load(request_id, first, list(blocks[first : first + count]), state.mode)
        state.loading, state.asked = load, False
        self._loads[request_id] = lease, self._num_ranks
        self._tell(state, first + count)
        self._step.loads.append(load)

    # -- storing --------------------------------------------------------------------------------

    def build(self, output: SchedulerOutput) -> StepMetadata:
        """Return the step's work."""
        tables = output.kv_connector_block_state
        unsure = self._unsure_blocks()
        for request_id, num_tokens in output.num_scheduled_tokens.items():
            state = self._requests.get(request_id)
            if state is None or not state.writes or self._clock() < state.store_at:
                continue
            stop = self._num_full(state.request, state.request.num_computed_tokens + num_tokens)
            if stop > state.handed_over:
                found = tables.get_block_ids(request_id) if tables else None
                if found is not None and unsure.isdisjoint(found[0]):
                    self._save(state, found[0], stop)
        step, self._step = self._step, StepMetadata()
        return step

    def _unsure_blocks(self) -> set[int]:
        """Engine blocks whose load a forward pass does not wait for to have succeeded.

        What is computed from them is stored when that is known, by whichever request.
        """
        loads = [state.loading for state in self._requests.values() if state.loading]
        loads += [load for load, _ in self._parked.values()]
        return {block for load in loads if load.mode != "async" for block in load.blocks}

    def _num_full(self, request: Request, num_computed: int) -> int:
        """How many blocks of ``request`` are to be stored once so many tokens are computed."""
        known = request.num_tokens if self._options.save_decode else request.num_prompt_tokens
        return min(num_computed, known) // self._width

    def _save(self, state: _Request, block_ids: Sequence[int], stop: int) -> None:
        """Hand the blocks up to ``stop`` that are not in the store to the workers, if room is left."""
        if save := self._pin(state, block_ids, stop):
            self._step.saves.append(save)

    def _pin(self, state: _Request, block_ids: Sequence[int], stop: int) -> Save | None:
        """Pin those blocks, and make a job of them."""
        first = state.handed_over
        limit = int(self._options.max_pinned_part * self._pool.num_gpu_blocks)
        stop = min(stop, first + limit - self._num_pinned)
        ids = list(block_ids[first:stop])
        if not ids or len(ids) < stop - first or 0 in ids:  # no room, or no such block any more
            return None
        request_id = state.request.request_id
        blocks = [self._pool.blocks[index] for index in ids]
        self._pool.touch(blocks)
        self._num_pinned += len(blocks)
        job, self._next_job = self._next_job, self._next_job + 1
        self._jobs[job] = _Job(request_id, blocks), self._num_ranks
        state.handed_over = stop
        self._tell(state, stop)
        return Save(job, request_id, first, ids)

    def _tell(self, state: _Request, num_blocks: int) -> None:
        """Let the workers know the request's first blocks."""
        request_id = state.request.request_id
        key = state.prompt.head(num_blocks)
        if not state.told:
            self._step.namespaces[request_id] = state.prompt.namespace
        if len(key) > state.told:
            self._step.keys[request_id] = self._step.keys.get(request_id, b"") + key[state.told :]
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
        if state.told and request.request_id not in self._parked:
            self._step.forgotten.append(request.request_id)
        if self.reads or not state.writes or not state.handed_over:
            return None
        return {EXPECT: min(state.handed_over * self._width, request.num_prompt_tokens)}

    def _save_rest(self, state: _Request, block_ids: Sequence[int]) -> None:
        """Store what a request that has ended leaves, or see to it when its load has ended."""
        request, load = state.request, state.loading
        stop = self._num_full(request, request.num_computed_tokens - request.num_in_flight_tokens)
        save = None
        if state.writes and stop > state.handed_over:
            sure = load is not None or self._unsure_blocks().isdisjoint(block_ids)
            if sure and not (load and load.mode == "async"):
                save = self._pin(state, block_ids, stop)
            self.stats.add(skipped_blocks=stop - state.handed_over)
        if load is not None:
            self._parked[request.request_id] = load, save
        elif save is not None:
            self._step.saves.append(save)

    def _unpark(self, request_id: str, *, failed: bool) -> None:
        """Store what a request has left whose load has ended well."""
        _, save = self._parked.pop(request_id)
        if save is not None and failed:
            self._unpin(self._jobs.pop(save.job)[0])
        elif save is not None:
            self._step.saves.append(save)
        self._step.forgotten.append(request_id)

    def _unpin(self, job: _Job) -> None:
        self._num_pinned -= len(job.blocks)
        self._pool.free_blocks(reversed(job.blocks))

    def update(self, results: StepResults) -> None:
        """Take note of what the workers have done."""
        for request_id in results.failed:
            self._failed.add(request_id)
            if state := self._requests.get(request_id):
                state.reads = False
                state.handed_over = 0
                self._release(state.lease)
                state.lease = None
        for request_id, ranks in results.loads.items():
            self._end_load(request_id, ranks)
        for number, ranks in results.saves.items():
            job, left = self._jobs.pop(number)
            if number in results.failed_saves and (state := self._requests.get(job.request_id)):
                state.handed_over, state.store_at = 0, self._clock() + RETRY_S
            if left > ranks:
                self._jobs[number] = job, left - ranks
            else:
                self._unpin(job)

    def _end_load(self, request_id: str, ranks: int) -> None:
        """Note that so many more ranks have loaded, well or not."""
        lease, left = self._loads.pop(request_id)
        if left > ranks:
            self._loads[request_id] = lease, left - ranks
            return
        self._release(lease)
        failed = request_id in self._failed
        self._failed.discard(request_id)
        if state := self._requests.get(request_id):
            state.loading = None
        if request_id in self._parked:
            self._unpark(request_id, failed=failed)

    @property
    def is_busy(self) -> bool:
        """Whether workers have something to report that only a step brings."""
        return bool(self._jobs or self._loads)

    def start_anew(self) -> None:
        """Know nothing of what was stored so far, for good: the weights may be other ones.

        Requests that have begun may mix keys and values of both: they are not stored any more.
        """
        for state in self._requests.values():
            self._leave_out(state)
        self._namespaces.start_anew(os.urandom(16))

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


def _count(value: Any) -> int:
    return value if isinstance(value, int) and value > 0 else 0
