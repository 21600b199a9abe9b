"""The worker's half: copies blocks between the engine's memory and the store's.

Each rank has its own client of the daemon, and takes a lease of its own for every load: that it could be
released after the copy is what says that the bytes were the right ones. What cannot be loaded is
reported, and computed again. Loads and saves have a thread each, so that a save never delays a load.
A step that writes to blocks that wait to be copied waits for them first, but only for a moment: what is
not being copied by then is given up.
"""

from __future__ import annotations

import logging
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from engine_plugin.vllm.messages import StepResults
from engine_plugin.vllm.stats import Stats
from kvstore.errors import KVStoreError, LeaseError, UnavailableError, UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from contextlib import AbstractContextManager

    from engine_plugin.vllm.messages import Load, Save, StepMetadata
    from engine_plugin.vllm.pages import Pages
    from kvstore.interface import KVStore
    from kvstore.lease import Lease
    from kvstore.namespace import Namespace

logger = logging.getLogger("vllm.kvstore")


FENCE_S = 0.1
"""Longest that a step waits for blocks to be copied that it writes to, but for a copy that has begun."""
IDLE_S = 0.001
"""Longest that a step with nothing to compute waits for loads, instead of spinning beside them."""


@dataclass
class _Prompt:
    """What the scheduler told of a prompt."""

    namespace: Namespace
    key: bytearray = field(default_factory=bytearray)

    def head(self, num_blocks: int) -> bytes:
        """Key bytes of the first blocks."""
        return bytes(self.key[: num_blocks * self.namespace.key_bytes])


@dataclass
class _Ended:
    """What ended since it was taken last; filled by several threads under one lock."""

    results: StepResults = field(default_factory=StepResults)
    received: set[str] = field(default_factory=set)
    """Requests whose asynchronous load ended."""
    invalid: set[int] = field(default_factory=set)
    """Engine blocks that were to be loaded, and were not."""


class Worker:
    """Loads and saves of one rank. Its methods are called by the thread that runs the model."""

    def __init__(
        self, store: KVStore, pages: Pages, layer_of: Mapping[str, int], clock: Callable[[], float]
    ) -> None:
        """Start the threads.

        Args:
            store: a client of the daemon; closed with the worker.
            pages: the engine's KV memory.
            layer_of: number of each layer, by the names that vLLM has for it.
            clock: monotonic seconds, for statistics.
        """
        self.stats = Stats()
        self._store, self._pages, self._clock = store, pages, clock
        self._layer_of = layer_of
        self._prompts: dict[int, _Prompt] = {}
        self._waiting: dict[int, _SaveJob] = {}
        """Saves that have not been reported, by job."""
        self._lock = threading.Condition()
        self._ended = _Ended()
        self._idle = False
        """Whether the step has nothing to compute."""
        self._num_async = 0
        """Asynchronous loads under way."""
        self._loader = ThreadPoolExecutor(1, "kvstore-load")
        self._saver = ThreadPoolExecutor(1, "kvstore-save")
        self._layers_loaded = threading.Condition()
        self._num_loaded = self._pages.num_layers
        self._layerwise: Future[None] | None = None
        self._taken = _Ended()
        self._streams = _Streams() if not pages.on_host else None

    # -- one step -------------------------------------------------------------------------------

    def begin(self, step: StepMetadata) -> None:
        """Take note of what the scheduler tells; see to it that nothing is written before it is copied."""
        self._idle = step.idle
        for number, namespace in step.namespaces.items():
            self._prompts[number] = _Prompt(namespace)
        for number, key in step.keys.items():
            self._prompts[number].key += key
        self._start_saves(step.early_saves)
        if step.overwritten:
            self._fence(frozenset(step.overwritten))

    def _fence(self, overwritten: frozenset[int]) -> None:
        start = self._clock()
        for save in self._waiting.values():
            if not overwritten.isdisjoint(save.blocks):
                save.end_before(start + FENCE_S - self._clock())
        with self._lock:
            self.stats.add(fence_seconds=self._clock() - start)

    def start_loads(self, step: StepMetadata) -> None:
        """Load what this step needs, or begin to."""
        ready = self._streams.now() if self._streams else None
        layerwise = []
        for load in step.loads:
            prompt = self._prompts[load.prompt]
            job = _LoadJob(load, prompt.namespace, prompt.head(load.first + len(load.blocks)))
            if load.mode == "sync":
                self._load([job], ready)
            elif load.mode == "async":
                with self._lock:
                    self._num_async += 1
                self._loader.submit(self._load, [job], ready)
            else:
                layerwise.append(job)
        if layerwise:
            self._num_loaded = 0
            self._layerwise = self._loader.submit(self._load, layerwise, ready)

    def wait_for_layer(self, name: str) -> None:
        """Wait until layer ``name`` of the step's layerwise loads is there."""
        if self._layerwise is None:
            return
        layer = self._layer_of.get(name, -1)
        with self._layers_loaded:
            self._layers_loaded.wait_for(lambda: self._num_loaded > layer)

    def finish(self, step: StepMetadata) -> None:
        """End the layerwise loads, begin the saves."""
        if self._layerwise is not None:
            self._layerwise.result()
            self._layerwise = None
        self._start_saves(step.saves)
        for number in step.forgotten:
            self._prompts.pop(number, None)

    def _start_saves(self, saves: Sequence[Save]) -> None:
        written = self._streams.now() if self._streams and saves else None
        for save in saves:
            prompt = self._prompts[save.prompt]
            key = prompt.head(save.first + len(save.blocks))
            job = _SaveJob(save, prompt.namespace, key, written)
            self._waiting[save.job] = job
            self._saver.submit(self._save, job)

    def take_received(self) -> set[str]:
        """Return the requests whose asynchronous load has ended; their failures go with them."""
        with self._lock:
            if self._idle:
                self._lock.wait_for(lambda: self._ended.received or not self._num_async, IDLE_S)
            self._taken, self._ended = self._ended, _Ended()
        for job in self._taken.results.saves:
            del self._waiting[job]
        return self._taken.received

    def take_invalid(self) -> set[int]:
        """Return the blocks whose load had failed at the last :meth:`take_received`."""
        return self._taken.invalid

    def take_results(self) -> StepResults | None:
        """Return the rest of what had ended then."""
        return self._taken.results or None

    def close(self) -> None:
        """End the threads, storing what was to be stored; then the client."""
        for pool in (self._loader, self._saver):
            pool.shutdown(wait=True)
        self._store.close()

    # -- on the threads -------------------------------------------------------------------------

    def _load(self, jobs: list[_LoadJob], ready: Any) -> None:
        """Copy the blocks of ``jobs``, layer after layer if they are layerwise; never raises."""
        start = self._clock()
        failed = {job.load.number: list(job.load.blocks) for job in jobs}
        try:
            for job in jobs:
                job.lease = self._store.acquire(job.namespace, job.key_and_one)
            self._copy_in(jobs, ready)
        except Exception:  # whatever a device, a driver or the store raises: it is a miss
            logger.exception("a load failed")
        else:
            for job in jobs:
                failed[job.load.number] = list(job.load.blocks[job.num_found :])
        for job in jobs:
            if not self._release(job):
                failed[job.load.number] = list(job.load.blocks)
        with self._layers_loaded:
            self._num_loaded = self._pages.num_layers
            self._layers_loaded.notify_all()
        self._report_loads(jobs, failed, self._clock() - start)

    def _copy_in(self, jobs: list[_LoadJob], ready: Any) -> None:
        layers = self._pages.num_layers
        steps = (
            [slice(index, index + 1) for index in range(layers)]
            if jobs[0].load.mode == "layerwise"
            else [slice(None)]
        )
        for some in steps:
            with self._on_stream("load", ready):
                for job in jobs:
                    job.copy(self._pages, some)
            if some.stop is not None:
                with self._layers_loaded:
                    self._num_loaded = some.stop
                    self._layers_loaded.notify_all()

    def _release(self, job: _LoadJob) -> bool:
        """End the lease; say whether it held until now."""
        if job.lease is None:
            return False
        try:
            self._store.release(job.lease)
        except LeaseError as error:
            logger.warning("what was loaded is thrown away: %s", error)
            return False
        return True

    def _report_loads(
        self, jobs: list[_LoadJob], failed: dict[int, list[int]], seconds: float
    ) -> None:
        with self._lock:
            for job in jobs:
                number, missing = job.load.number, failed[job.load.number]
                loaded = len(job.load.blocks) - len(missing)
                self._ended.results.loads[number] = 1
                self._ended.invalid.update(missing)
                if missing:
                    self._ended.results.failed.add(number)
                if job.load.mode == "async":
                    self._num_async -= 1
                    self._ended.received.add(job.load.request_id)
                self.stats.add(
                    loaded_blocks=loaded,
                    loaded_bytes=loaded * self._pages.block_bytes,
                    failed_loads=bool(missing),
                )
            self.stats.add(load_seconds=seconds)
            self._lock.notify_all()

    def _save(self, job: _SaveJob) -> None:
        """Store blocks, and report the job whatever comes of it; never raises."""
        start, saved = self._clock(), 0
        failure: BaseException | None = None
        try:
            saved = self._store_blocks(job)
        except KVStoreError as error:
            failure = error
        except Exception as error:  # whatever a device, a driver or the store raises
            logger.exception("blocks could not be stored")
            failure = error
        job.ended()
        with self._lock:
            self._ended.results.saves[job.save.job] = 1
            if failure is not None:
                self._ended.results.failed_saves.add(job.save.job)
            self.stats.add(
                saved_blocks=saved,
                saved_bytes=saved * self._pages.block_bytes,
                save_seconds=self._clock() - start,
                failed_saves=failure is not None and not job.given_up,
                skipped_blocks=len(job.blocks) if job.given_up else 0,
            )

    def _store_blocks(self, job: _SaveJob) -> int:
        rank = self._pages.rank
        if not rank.stores:
            return 0
        job.check()
        with self._store.reserve(
            job.namespace,
            job.key,
            heads=rank.heads.get("heads"),
            priority=job.save.priority,
            ttl_s=job.save.ttl_s,
        ) as reservation:
            indices = np.asarray(reservation.indices) - job.save.first
            if (indices < 0).any():
                raise UsageError("the store has lost the blocks before these")
            blocks = [job.blocks[index] for index in indices.tolist()]
            if blocks:
                job.begin_copy()
                with self._on_stream("save", job.written):
                    self._pages.save(reservation.buffers[0], reservation.offsets, blocks)
                job.ended()
        if reservation.failure is not None:
            raise UnavailableError(reservation.failure, "the daemon did not answer")
        return len(blocks)

    def _on_stream(self, name: str, after: Any) -> AbstractContextManager[Any]:
        return self._streams.use(name, after) if self._streams else nullcontext()

    def take_stats(self) -> Stats | None:
        """Return what was counted since the last call."""
        with self._lock:
            return self.stats.take()


class _LoadJob:
    """A load on its way."""

    def __init__(self, load: Load, namespace: Namespace, key: bytes) -> None:
        self.load, self.namespace = load, namespace
        self.key_and_one = key + bytes(namespace.key_bytes)
        """Of all blocks, and of one more: the last token of a prompt is never lent."""
        self.lease: Lease | None = None

    @property
    def num_found(self) -> int:
        """How many of the blocks the lease covers."""
        leased = 0 if self.lease is None else self.lease.num_blocks
        return min(max(0, leased - self.load.first), len(self.load.blocks))

    def copy(self, pages: Pages, layers: slice) -> None:
        first, count = self.load.first, self.num_found
        if count and self.lease is not None:
            pages.load(
                self.lease.buffers[0],
                self.lease.offsets[first : first + count],
                self.load.blocks[:count],
                layers,
            )


class _SaveJob:
    """A save on its way: it waits, copies, and has ended; before it copies, it can be given up."""

    def __init__(self, save: Save, namespace: Namespace, key: bytes, written: Any) -> None:
        self.save, self.namespace, self.key, self.written = save, namespace, key, written
        self.blocks = save.blocks
        self.given_up = self.has_ended = False
        self._copies = False
        self._changed = threading.Condition()

    def check(self) -> None:
        """Raise :class:`UsageError` when the blocks were given up."""
        if self.given_up:
            raise UsageError("the engine has written to the blocks")

    def begin_copy(self) -> None:
        """Say that the blocks are being read; or raise as :meth:`check`."""
        with self._changed:
            self.check()
            self._copies = True

    def ended(self) -> None:
        """Say that the blocks are not read any more."""
        with self._changed:
            self.has_ended = True
            self._changed.notify_all()

    def end_before(self, timeout_s: float) -> None:
        """Wait until the blocks are copied; give them up if that has not begun in time."""
        with self._changed:
            if not self._changed.wait_for(self._is_over, max(0.0, timeout_s)):
                self.given_up = not self._copies
                self._changed.wait_for(self._is_over)

    def _is_over(self) -> bool:
        return self.has_ended or self.given_up


class _Streams:
    """Side streams of a CUDA device: one for loads, one for saves."""

    def __init__(self) -> None:
        self._streams = {name: torch.cuda.Stream() for name in ("load", "save")}

    def now(self) -> Any:
        """Return an event behind everything that the caller's stream was given so far."""
        event = torch.cuda.Event()
        event.record()
        return event

    @contextmanager
    def use(self, name: str, after: Any) -> Iterator[None]:
        """Run what follows on a side stream, behind the event ``after``; wait until all of it is done.

        Also after an exception: nothing may run on in memory that is given back.
        """
        stream = self._streams[name]
        if after is not None:
            stream.wait_event(after)
        try:
            with torch.cuda.stream(stream):
                yield
        finally:
            stream.synchronize()
