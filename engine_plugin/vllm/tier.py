"""``kvstore`` as a secondary tier of vLLM's own offloading (``TieringOffloadingSpec``).

vLLM's ``OffloadingConnector`` copies *chunks* (one or more of its blocks, of all layers and ranks)
between the device and rows of a CPU tier of its own, and has further tiers copy rows out and in. This
one copies them to and from a daemon of this host, for other engines and later ones.

*Keys.* A chunk has no tokens here but vLLM's hash, which is chained over all tokens before it, so
each chunk is stored as a prompt of one block in a namespace of kind ``"hash"``
(:mod:`engine_plugin.vllm.chunks`).

*Threads.* vLLM calls from the thread that schedules, and no call waits for the daemon but
:meth:`KVStoreTier.drain_jobs` and :meth:`KVStoreTier.shutdown`. Lookups, loads and stores have a thread
each. What fails is reported as failed, and computed again.
"""

from __future__ import annotations

import logging
import os
import time
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import replace
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

import numpy as np
from vllm.v1.kv_offload.base import (
    Locality,
    LookupResult,
    Medium,
    RequestOffloadingContext,
    get_offload_block_hash,
    get_offload_group_idx,
)
from vllm.v1.kv_offload.tiering.async_lookup import AsyncLookupManager
from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager

import kvstore
from engine_plugin.vllm.chunks import config_of_caller, make_namespaces, parse_tier_options
from engine_plugin.vllm.scheduler import SKIP_READ, SKIP_WRITE
from kvstore.errors import KVStoreError, UnavailableError
from kvstore.namespace import framed_digest

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from numpy.typing import NDArray
    from vllm.v1.kv_offload.base import OffloadingSpec, OffloadKey, ReqContext, ScheduleEndContext
    from vllm.v1.kv_offload.tiering.backpressure import BackpressureDetector
    from vllm.v1.kv_offload.tiering.base import TransferJob

    from kvstore.interface import KVStore
    from kvstore.namespace import Namespace

    Namespaces = Mapping[int, Namespace]
    """Of each group of layers, by vLLM's number for it."""
    Row = NDArray[np.uint8]
    """A chunk in vLLM's CPU tier, uint8 ``[chunk_bytes]``."""

logger = logging.getLogger("vllm.kvstore")


class KVStoreTier(SecondaryTierManager):
    """A tier in the memory of a daemon of this host. Called by the thread that schedules."""

    medium = Medium.CPU

    def __init__(
        self,
        offloading_spec: OffloadingSpec,
        primary_kv_view: memoryview,
        tier_type: str,
        backpressure_detector: BackpressureDetector | None = None,
        **options: Any,
    ) -> None:
        """Digest the model and connect; the daemon need not be there yet.

        Args:
            offloading_spec: vLLM's description of what is offloaded.
            primary_kv_view: vLLM's CPU tier, int8 ``[num_chunks, chunk_bytes]``; it belongs to vLLM.
            tier_type: name of this tier in vLLM's metrics.
            backpressure_detector: vLLM's; decides which stores reach this tier.
            **options: :data:`engine_plugin.vllm.chunks.TIER_OPTIONS`.

        Raises:
            ConfigError: an unknown option, or an impossible value.
            UsageError: this engine's chunks cannot be stored; says why.
        """
        super().__init__(offloading_spec, primary_kv_view, tier_type, backpressure_detector)
        self.locality = Locality.LOCAL
        given = parse_tier_options(options)
        self._namespaces = make_namespaces(
            config_of_caller(), offloading_spec.config, self.block_size_bytes, given
        )
        self._clock = time.monotonic  # noqa: TID251
        self._store: KVStore = kvstore.connect(given.url)
        self._lookups = _Lookups(self, tier_type)
        self._loader = ThreadPoolExecutor(1, "kvstore-tier-load")
        self._saver = ThreadPoolExecutor(1, "kvstore-tier-save")
        self._running: set[Future[None]] = set()
        self._finished: SimpleQueue[tuple[TransferJob, JobResult]] = SimpleQueue()

    # -- requests -------------------------------------------------------------------------------

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:  # noqa: ARG002
        """Ask for chunks as they are filled."""
        return RequestOffloadingContext()

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        """Say whether the store has a chunk; ``RETRY`` until the daemon has answered.

        The answer stays the same for as long as a request asks for it, or until a load failed.
        """
        if _wants(req_context, SKIP_READ):
            return LookupResult.MISS
        found = self._lookups.lookup(key, req_context)
        if found is None:
            return LookupResult.RETRY
        return LookupResult.HIT if found else LookupResult.MISS

    def on_schedule_end(self, context: ScheduleEndContext) -> None:  # noqa: ARG002
        """Begin this step's lookups."""
        self._lookups.flush()

    def on_request_finished(self, req_context: ReqContext) -> None:
        """Forget the answers that only this request needed."""
        self._lookups.cleanup(req_context.req_id)

    # -- jobs -----------------------------------------------------------------------------------

    def submit_load(self, job_metadata: TransferJob) -> None:
        """Begin to copy chunks of the store to their rows."""
        self._submit(self._loader, self._load, job_metadata)

    def submit_store(self, job_metadata: TransferJob) -> None:
        """Begin to copy rows to the store, those that it has not got."""
        if _wants(job_metadata.req_context, SKIP_WRITE):
            self._finished.put((job_metadata, JobResult(job_metadata.job_id, success=True)))
        else:
            self._submit(self._saver, self._save, job_metadata)

    def get_finished_jobs(self) -> Iterable[JobResult]:
        """Return the jobs that ended since the last call; what could not be loaded is a miss from now on."""
        results = []
        while not self._finished.empty():
            job, result = self._finished.get()
            if job.is_promotion and not result.success:
                self._lookups.mark_miss(set(job.keys).difference(result.successful_keys or ()))
            results.append(result)
        return results

    def drain_jobs(self) -> None:
        """Wait for the jobs under way; later ones find nothing of what was stored so far.

        vLLM calls this when its caches are reset: the weights may be other ones after it.
        """
        wait(self._running)
        nonce = os.urandom(16)
        self._namespaces = {
            group: replace(namespace, model=framed_digest(namespace.model, nonce))
            for group, namespace in self._namespaces.items()
        }

    def shutdown(self) -> None:
        """End the jobs under way, the threads and the connection."""
        for pool in (self._loader, self._saver):
            pool.shutdown(wait=True)
        self._lookups.shutdown()
        self._store.close()

    def _submit(
        self,
        pool: ThreadPoolExecutor,
        copy: Callable[[Namespace, bytes, Row], bool],
        job: TransferJob,
    ) -> None:
        """Have ``copy`` called for each chunk, the last one of the prompt first.

        So the first ones are the last ones to be evicted: those behind them are of no use alone.
        """
        end_of = job.req_context.get_offload_key_position
        chunks = list(zip(job.keys, job.chunk_ids.tolist(), strict=True))
        chunks.sort(key=lambda chunk: end_of(chunk[0]) or 0, reverse=True)
        future = pool.submit(self._run, copy, job, chunks, self._namespaces)
        self._running.add(future)
        future.add_done_callback(self._running.discard)

    # -- on the threads -------------------------------------------------------------------------

    def _run(
        self,
        copy: Callable[[Namespace, bytes, Row], bool],
        job: TransferJob,
        chunks: list[tuple[OffloadKey, int]],
        namespaces: Namespaces,
    ) -> None:
        """Copy ``chunks``, and report the job whatever comes of it; never raises."""
        start, copied = self._clock(), []
        try:
            rows = np.asarray(self._primary_kv_view).view(np.uint8)
            for key, row in chunks:
                if copy(*_split(key, namespaces), rows[row]):
                    copied.append(key)
        except UnavailableError as error:  # the client has said so, once
            logger.debug("%d of %d chunks were copied: %s", len(copied), len(chunks), error)
        except KVStoreError as error:
            what = "loaded" if job.is_promotion else "stored"
            logger.warning("%d of %d chunks were %s: %s", len(copied), len(chunks), what, error)
        except Exception:  # whatever else: the chunks are computed again
            logger.exception("%d chunks could not be copied", len(chunks) - len(copied))
        result = JobResult(
            job.job_id,
            success=len(copied) == len(chunks),
            successful_keys=tuple(copied) if job.is_promotion else None,
            transfer_time=self._clock() - start,
            transfer_bytes=len(copied) * self.block_size_bytes,
        )
        self._finished.put((job, result))

    def _load(self, namespace: Namespace, key: bytes, row: Row) -> bool:
        """Copy a chunk to its row; False if it is not there any more."""
        with self._store.acquire(namespace, key) as lease:  # one that ended early raises at the end
            for slot in lease.slots():
                np.copyto(row, slot)
        _check_answer(lease.failure)
        return lease.num_blocks > 0

    def _save(self, namespace: Namespace, key: bytes, row: Row) -> bool:
        """Copy a row to the store, if it has not got it; False if there is no room for it."""
        with self._store.reserve(namespace, key) as reservation:
            for slot in reservation.slots():
                np.copyto(slot, row)
        _check_answer(reservation.failure)
        return not reservation.refused

    def has(self, key: OffloadKey) -> bool:
        """Ask the daemon for a chunk; on any thread."""
        return self._store.lookup(*_split(key, self._namespaces)) > 0


class _Lookups(AsyncLookupManager):
    """vLLM's own queue and thread for lookups, and its memory of their answers."""

    def __init__(self, tier: KVStoreTier, tier_type: str) -> None:
        self._tier = tier
        super().__init__(f"{tier_type}-kvstore")

    def batch_lookup(self, keys: list[OffloadKey], req_context: ReqContext) -> Iterable[bool]:  # noqa: ARG002
        """Ask for each; a daemon that does not answer is not asked again for a while."""
        return [self._tier.has(key) for key in keys]


def _split(key: OffloadKey, namespaces: Namespaces) -> tuple[Namespace, bytes]:
    return namespaces[get_offload_group_idx(key)], get_offload_block_hash(key)


def _check_answer(failure: str | None) -> None:
    if failure is not None:
        raise UnavailableError(failure, f"the daemon did not answer ({failure})")


def _wants(req_context: ReqContext, name: str) -> bool:
    return bool((req_context.kv_transfer_params or {}).get(name, False))
