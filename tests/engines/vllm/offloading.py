"""vLLM's own offloading with tiers, on CPUs: its worker for that refuses to run there."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of torch, about itself

    from tests.engines.vllm.preload import LLM  # first: sets what vLLM reads when it is imported

    # isort: split
    from vllm.v1.kv_offload.base import OffloadingWorker, TransferResult
    from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
    from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

    from tests.engines.vllm import child

if TYPE_CHECKING:
    from collections.abc import Iterator
    from multiprocessing.connection import Connection

    from vllm.v1.kv_offload.base import CanonicalKVCaches, GPULoadStoreSpec
    from vllm.v1.kv_offload.cpu.common import CPULoadStoreSpec

    from tests.engines.vllm.messages import EngineOptions


class CPUTieringSpec(TieringOffloadingSpec):
    """As its base, which has all of the scheduler's side, but with :class:`CopyingWorker`."""

    def get_worker(self, kv_caches: CanonicalKVCaches) -> CopyingWorker:
        """Return the worker of the only rank."""
        region = SharedOffloadRegion(
            engine_id=self.config.engine_id,
            num_chunks=self.num_chunks,
            rank=0,
            kv_bytes_per_chunk=self.kv_bytes_per_chunk,
            cpu_page_size=self.cpu_page_size_per_worker,
        )
        return CopyingWorker(kv_caches, self.blocks_per_chunk, region)


class CopyingWorker(OffloadingWorker):
    """Copies at once, for models of one group of layers."""

    def __init__(
        self, kv_caches: CanonicalKVCaches, blocks_per_chunk: int, region: SharedOffloadRegion
    ) -> None:
        assert len(kv_caches.group_data_refs) == 1
        self._region, self._width = region, blocks_per_chunk
        self._pages = [cache.tensor for cache in kv_caches.tensors]
        self._rows = [
            region.create_next_worker_view(page.shape[1] * blocks_per_chunk).unflatten(
                1, (blocks_per_chunk, -1)
            )
            for page in self._pages
        ]
        self._finished: list[TransferResult] = []

    def submit_store(self, job_id: int, src: GPULoadStoreSpec, dst: CPULoadStoreSpec) -> bool:
        for block, chunk, part in self._places(src, dst):
            for page, row in zip(self._pages, self._rows, strict=True):
                row[chunk, part] = page[block]
        return self._done(job_id)

    def submit_load(self, job_id: int, src: CPULoadStoreSpec, dst: GPULoadStoreSpec) -> bool:
        for block, chunk, part in self._places(dst, src):
            for page, row in zip(self._pages, self._rows, strict=True):
                page[block] = row[chunk, part]
        return self._done(job_id)

    def get_finished(self) -> list[TransferResult]:
        finished, self._finished = self._finished, []
        return finished

    def wait(self, job_ids: set[int]) -> None:
        pass

    def shutdown(self) -> None:
        self._rows.clear()
        self._region.cleanup()

    def _places(
        self, blocks: GPULoadStoreSpec, chunks: CPULoadStoreSpec
    ) -> Iterator[tuple[int, int, int]]:
        """Yield each block with its chunk, and which part of that it is."""
        first = blocks.block_indices[0] % self._width if len(blocks.block_ids) else 0
        for position, block in enumerate(blocks.block_ids.tolist(), first):
            yield block, int(chunks.chunk_ids[position // self._width]), position % self._width

    def _done(self, job_id: int) -> bool:
        self._finished.append(TransferResult(job_id, success=True))
        return True


def main(pipe: Connection, encoded: bytes, log: str) -> None:
    """Run an engine with offloading; ``connector`` has the tier's options, and ``blocks_per_chunk``."""
    child._start = start
    child.main(pipe, encoded, log)


def start(options: EngineOptions) -> Any:
    tier = {"type": "kvstore", "url": options.url, **options.connector}
    extra = {
        "spec_name": "CPUTieringSpec",
        "spec_module_path": __name__,
        "cpu_bytes_to_use": 64 << 20,
        "blocks_per_chunk": tier.pop("blocks_per_chunk", 1),
        "secondary_tiers": [tier],
    }
    return LLM(
        **child.arguments(options),
        max_model_len=options.max_model_tokens,
        kv_transfer_config={
            "kv_connector": "OffloadingConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": extra,
        },
    )
