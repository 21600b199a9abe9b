"""``KVStoreConnector``: what vLLM calls, in the process that schedules and in every worker.

vLLM makes one object for each role, and this module only passes its calls on: to
:class:`engine_plugin.vllm.scheduler.Scheduler` or :class:`engine_plugin.vllm.worker.Worker`. Where the
model, its KV memory or the set-up is one that cannot be stored, there is neither: vLLM runs as without
a connector, after one warning that says why. Wrong options are an error at the start.

The hybrid KV cache manager is not supported: vLLM then keeps the layers of models with sliding
windows like all others, in one group, and what is stored is right for them, too.
"""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
)
from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm.v1.metrics.cache_hit_source import CacheHitSource

import kvstore
from engine_plugin.vllm.messages import StepMetadata, StepResults, WorkerLayout
from engine_plugin.vllm.options import parse_options
from engine_plugin.vllm.pace import Pace
from engine_plugin.vllm.pages import Pages, Rank, find_layout
from engine_plugin.vllm.prompts import Namespaces
from engine_plugin.vllm.scheduler import Scheduler
from engine_plugin.vllm.stats import PromStats, Stats
from engine_plugin.vllm.worker import Worker
from kvstore.errors import KVStoreError, UsageError

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch
    from vllm.config import VllmConfig
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorHandshakeMetadata
    from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorStats
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

    from engine_plugin.vllm.options import Options

logger = logging.getLogger("vllm.kvstore")

NEEDS_NO_KV = frozenset({"ngram", "ngram_gpu", "suffix"})
"""Ways of speculative decoding without a draft model, which would have KV memory of its own."""


class KVStoreConnector(KVConnectorBase_V1):
    """A KV connector over a daemon of this host."""

    _cache_hit_source = CacheHitSource.HOST

    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> None:
        """Read the options. Raises :class:`kvstore.errors.ConfigError` for wrong ones."""
        super().__init__(vllm_config, role, kv_cache_config)
        _share_log()
        transfer = self._kv_transfer_config
        self._options = parse_options(transfer.kv_connector_extra_config)
        self._scheduler: Scheduler | None = None
        self._worker: Worker | None = None
        self._found: WorkerLayout | None = None
        if role is KVConnectorRole.SCHEDULER:
            transfer.kv_load_failure_policy = self._options.on_load_failure

    # -- workers: start and end -----------------------------------------------------------------

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Find out how blocks lie in ``kv_caches``, and connect."""
        try:
            check_set_up(self._vllm_config, self._kv_cache_config)
            pages, names = look_at(self._vllm_config, self._kv_cache_config, kv_caches)
        except Exception as error:  # noqa: BLE001 - whatever vLLM or a device has that we do not expect
            self._found = WorkerLayout(None)
            logger.warning("kvstore: this model runs uncached: %s", _words(error))
            return
        self._found = WorkerLayout(pages.layout)
        store = kvstore.connect(self._options.url)
        self._worker = Worker(store, pages, names, time.monotonic)  # noqa: TID251

    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata | None:
        """Tell the scheduler what was found."""
        return self._found

    def shutdown(self) -> None:
        """Store what is to be stored; end the threads and connections."""
        if self._worker is not None:
            self._worker.close()
        if self._scheduler is not None:
            self._scheduler.close()
        self._worker = self._scheduler = None

    # -- workers: one step ----------------------------------------------------------------------

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        """Begin a step."""
        super().bind_connector_metadata(connector_metadata)
        assert isinstance(connector_metadata, StepMetadata)
        if self._worker is not None:
            self._worker.begin(connector_metadata)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:  # noqa: ARG002
        """Load what the forward pass needs, or begin to."""
        if self._worker is not None:
            self._worker.start_loads(self._metadata)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Wait for a layer that is being loaded."""
        if self._worker is not None:
            self._worker.wait_for_layer(layer_name)

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any
    ) -> None:
        """Nothing: blocks are stored whole, behind the forward pass."""

    def wait_for_save(self) -> None:
        """Begin to store what the forward pass has filled."""
        if self._worker is not None:
            self._worker.finish(self._metadata)

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:  # noqa: ARG002
        """Return the requests whose asynchronous load has ended."""
        received = set() if self._worker is None else self._worker.take_received()
        return KVConnectorTransferResults(finished_recving=received)

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Return the blocks that could not be loaded, of the same moment."""
        return set() if self._worker is None else self._worker.take_invalid()

    def build_connector_worker_meta(self) -> StepResults | None:
        """Return what else has ended, of the same moment."""
        return None if self._worker is None else self._worker.take_results()

    @property
    def _metadata(self) -> StepMetadata:
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, StepMetadata)
        return metadata

    # -- scheduler: start -----------------------------------------------------------------------

    def set_xfer_handshake_metadata_pp_aware(
        self, metadata: dict[tuple[int, int], KVConnectorHandshakeMetadata]
    ) -> None:
        """Begin, when every worker found the same."""
        found = [item for item in metadata.values() if isinstance(item, WorkerLayout)]
        if any(item.layout is None for item in found):  # the worker has said why
            return
        try:
            self._begin(found)
        except Exception as error:  # noqa: BLE001 - whatever a configuration has that we do not expect
            logger.warning("kvstore: this model runs uncached: %s", _words(error))

    def _begin(self, found: Sequence[WorkerLayout]) -> None:
        ranks = self._vllm_config.parallel_config.tensor_parallel_size
        layouts = {item.layout for item in found}
        if len(found) != ranks or len(layouts) != 1:
            raise UsageError(f"{len(found)} of {ranks} workers found {len(layouts)} layouts")
        layout = layouts.pop()
        assert layout is not None
        assert self._kv_cache_manager is not None
        namespaces = Namespaces(self._vllm_config, self._options, layout)
        store = kvstore.connect(
            self._options.url, deadline_s=self._options.deadline_s, access="read"
        )
        self._scheduler = Scheduler(
            store,
            namespaces,
            self._options_here(),
            self._kv_cache_manager,
            num_ranks=ranks,
            block_bytes=layout.block_bytes // min(ranks, layout.num_kv_heads),
            clock=time.monotonic,  # noqa: TID251
        )
        overlap = steps_overlap(self._vllm_config)
        self._scheduler.pace = Pace(time.monotonic, steps_overlap=overlap)  # noqa: TID251
        role = self._kv_transfer_config.kv_role
        self._scheduler.reads, self._scheduler.writes = role != "kv_producer", role != "kv_consumer"
        logger.info(
            "kvstore: %s at %s, %s; blocks of %d tokens, %d bytes",
            *(
                role,
                store.address,
                "connected" if store.counters()["connects",] else "not there yet",
            ),
            *(layout.block_tokens, layout.block_bytes),
        )

    def _options_here(self) -> Options:
        """Return the options, less a way of loading that would give wrong tokens in this set-up."""
        options = self._options
        if not steps_overlap(self._vllm_config):
            return options
        if options.load not in ("async", "auto"):
            logger.warning(
                "kvstore: load=%s needs steps that do not overlap: loads are async", options.load
            )
        return options.model_copy(update={"load": "async"})

    # -- scheduler: requests --------------------------------------------------------------------

    def on_new_request(self, request: Request) -> None:
        """Take note of a request."""
        if self._scheduler is not None:
            self._scheduler.add(request)

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """Return how many tokens the store has behind those that vLLM has."""
        if self._scheduler is None:
            return 0, False
        return self._scheduler.find(request, num_computed_tokens)

    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        """Plan the load."""
        if self._scheduler is not None:
            ids = blocks.get_block_ids()[0]
            self._scheduler.allocated(request, ids, num_external_tokens)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        """Return the step's work for the workers."""
        if self._scheduler is None:
            return StepMetadata()
        return self._scheduler.build(scheduler_output)

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        """Take note of what the workers have done."""
        results = connector_output.kv_connector_worker_meta
        if self._scheduler is not None and isinstance(results, StepResults):
            self._scheduler.update(results)

    def request_finished(
        self,
        request: Request,
        block_ids: list[int],
    ) -> tuple[bool, dict[str, Any] | None]:
        """Forget a request; its blocks are free."""
        if self._scheduler is None:
            return False, None
        return False, self._scheduler.finish(request, block_ids)

    @property
    def requires_kv_delivery(self) -> bool:
        """A block that is not stored is a miss, and no harm."""
        return False

    def reset_cache(self) -> bool | None:
        """Never find again what was stored so far: the weights may have changed."""
        if self._scheduler is None:
            return None
        self._scheduler.start_anew()
        return True

    # -- both -----------------------------------------------------------------------------------

    def get_kv_connector_stats(self) -> KVConnectorStats | None:
        """Return the numbers since the last call."""
        if self._worker is not None:
            return self._worker.take_stats()
        return None if self._scheduler is None else self._scheduler.stats.take()

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KVConnectorStats:
        """Make numbers that came from another process."""
        return Stats(data=data or {})

    @classmethod
    def build_prom_metrics(cls, *arguments: Any, **named: Any) -> PromStats:
        """Export the numbers."""
        return PromStats(*arguments, **named)

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        """Layers can be waited for only between pieces of a graph."""
        return parse_options(extra_config).load == "layerwise"


def check_set_up(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> None:
    """Raise :class:`UsageError` for what cannot be cached, saying what it is."""
    parallel = vllm_config.parallel_config
    for name in (
        "pipeline_parallel_size",
        "prefill_context_parallel_size",
        "decode_context_parallel_size",
    ):
        if (size := getattr(parallel, name, 1)) > 1:
            raise UsageError(f"{name} is {size}: only tensor parallel ranks share blocks")
    check_speculation(vllm_config)
    groups = kv_cache_config.kv_cache_groups
    if len(groups) != 1:
        kinds = ", ".join(type(group.kv_cache_spec).__name__ for group in groups)
        raise UsageError(f"its KV memory has {len(groups)} groups ({kinds}), not one")
    spec = groups[0].kv_cache_spec
    if not isinstance(spec, FullAttentionSpec):
        raise UsageError(f"its KV memory is of {type(spec).__name__}: not all tokens are kept")


def check_speculation(vllm_config: VllmConfig) -> None:
    """Raise :class:`UsageError` for speculative decoding with a draft model."""
    speculative = vllm_config.speculative_config
    if speculative is not None and speculative.method not in NEEDS_NO_KV:
        raise UsageError(
            f"speculative decoding by {speculative.method} keeps KV of its own: use one of "
            f"{', '.join(sorted(NEEDS_NO_KV))}, or none"
        )


def steps_overlap(vllm_config: VllmConfig) -> bool:
    """Say whether a step may begin before it is known which loads of the last one have failed.

    Its output, or what the runner keeps of it, then cannot be taken back.
    """
    return vllm_config.use_v2_model_runner or vllm_config.max_concurrent_batches > 1


def look_at(
    vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, kv_caches: dict[str, torch.Tensor]
) -> tuple[Pages, dict[str, int]]:
    """Return how to copy blocks, and which layer each name stands for."""
    from vllm.distributed.parallel_state import get_tensor_model_parallel_rank

    group = kv_cache_config.kv_cache_groups[0]
    writers = vllm_config.compilation_config.static_forward_context
    layers: dict[int, str] = {}
    index_of: dict[str, int] = {}
    for name in group.layer_names:  # layers may share one memory
        address = kv_caches[name].data_ptr()
        layers.setdefault(address, name)
        index_of[name] = list(layers).index(address)
    tensors = [kv_caches[name] for name in layers.values()]
    expected = kv_cache_config.num_blocks, group.kv_cache_spec.block_size
    found = tensors[0].shape[0], tensors[0].shape[2]
    if found != expected:
        raise UsageError(
            f"KV memory of {found[0]} blocks of {found[1]} tokens, where vLLM counts {expected[0]} of "
            f"{expected[1]}: give the attention back end's own block size as --block-size"
        )
    model = vllm_config.model_config
    total = 1 if model.use_mla else model.get_total_num_kv_heads()
    rank = Rank.of(
        get_tensor_model_parallel_rank(),
        vllm_config.parallel_config.tensor_parallel_size,
        tensors[0].shape[1],
        total,
    )
    first = writers[next(iter(layers.values()))]
    spec = group.kv_cache_spec
    order = ":".join(
        (
            type(first.impl).__qualname__,
            str(getattr(first, "isa", "")),
            str(kv_cache_config.kv_cache_layout),
            minor_version(),
        )
    )
    head_dims = (spec.head_size, spec.head_size_v)
    pages = find_layout(
        tensors, [writers[name] for name in layers.values()], rank, head_dims, order
    )
    return pages, index_of


def _words(error: Exception) -> str:
    """Return what ``error`` says, and of which kind it is where that is not ours."""
    return str(error) if isinstance(error, KVStoreError) else repr(error)


def _share_log() -> None:
    """Have messages of the client written where vLLM writes its own, if nobody else takes them."""
    client = logging.getLogger("kvstore")
    if not client.hasHandlers():
        client.handlers = list(logging.getLogger("vllm").handlers)
        client.setLevel(logging.getLogger("vllm").level)


def minor_version() -> str:
    """Return vLLM's version without what changes no byte order, such as ``0.32``."""
    import vllm

    return ".".join(vllm.__version__.split(".")[:2])
