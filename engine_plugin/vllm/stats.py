"""Numbers of the connector: logged by vLLM, and exported from its ``/metrics``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from prometheus_client import Counter
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
)

if TYPE_CHECKING:
    from vllm.config import VllmConfig

METRICS = {
    "lookups": "Requests that were looked up in the store.",
    "failed_lookups": "Requests that missed because the daemon did not answer.",
    "lookup_seconds": "Time that the scheduler waited for those answers.",
    "hit_tokens": "Tokens that the store had and the engine had not, when it was asked.",
    "loaded_blocks": "Blocks copied from the store, on all ranks.",
    "loaded_bytes": "Bytes copied from the store, on all ranks.",
    "load_seconds": "Time spent on loads, on all ranks.",
    "failed_loads": "Loads that failed on some rank: those requests were computed.",
    "saved_blocks": "Blocks copied to the store, on all ranks.",
    "saved_bytes": "Bytes copied to the store, on all ranks.",
    "save_seconds": "Time spent on saves, on all ranks.",
    "skipped_blocks": "Blocks not stored, because the engine needed their memory before they were copied.",
    "failed_saves": "Saves that failed on some rank.",
    "deferred": "Times that a request waited for another one's load of the same blocks to end.",
    "fence_seconds": "Time that forward passes waited for blocks to be copied before they wrote to them.",
}
"""Name and meaning of every counter; exported as ``vllm:kvstore_…_total``."""


class Stats(KVConnectorStats):
    """Sums since the last report."""

    data: dict[str, float]

    def add(self, **amounts: float) -> None:
        """Add to counters of :data:`METRICS`."""
        for name, amount in amounts.items():
            self.data[name] = self.data.get(name, 0) + amount

    def take(self) -> Stats | None:
        """Return what was added since the last call; None for nothing."""
        data, self.data = self.data, {}
        return Stats(data=data) if data else None

    def reset(self) -> None:
        """Start from nothing."""
        self.data = {}

    def aggregate(self, other: KVConnectorStats) -> Stats:
        """Add ``other`` up with this."""
        self.add(**other.data)
        return self

    def reduce(self) -> dict[str, int | float]:
        """Return the sums, and how fast loads and saves were."""
        numbers = dict(self.data)
        for what in ("load", "save"):
            seconds = numbers.get(f"{what}_seconds", 0)
            if seconds:
                moved = numbers.get("loaded_bytes" if what == "load" else "saved_bytes", 0)
                numbers[f"{what}_gb_per_s"] = round(moved / seconds / 1e9, 2)
        return {name: round(value, 4) for name, value in numbers.items()}

    def is_empty(self) -> bool:
        """Whether nothing was added."""
        return not self.data


class PromStats(KVConnectorPromMetrics):
    """Exports :data:`METRICS`."""

    def __init__(
        self,
        vllm_config: VllmConfig,
        metric_types: Any,
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        """Register a counter for each."""
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._counters = {
            name: metric_types[Counter](
                name=f"vllm:kvstore_{name}", documentation=meaning, labelnames=labelnames
            )
            for name, meaning in METRICS.items()
        }
        for labels in per_engine_labelvalues.values():
            for counter in self._counters.values():
                counter.labels(*labels)  # a rate can be told from the first event on

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Count what one report says."""
        labels = self.per_engine_labelvalues[engine_idx]
        for name, amount in transfer_stats_data.items():
            if name in self._counters:
                self._counters[name].labels(*labels).inc(amount)
