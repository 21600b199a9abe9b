"""What the scheduler's half of the connector tells the workers' halves, and what they answer.

vLLM carries both between its processes. A request's prompt is told once, and then what was added.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)

from kvstore.retention import NORMAL_PRIORITY

if TYPE_CHECKING:
    from kvstore.namespace import KVLayout, Namespace

Mode = Literal["sync", "layerwise", "async"]
"""When a load is done: before the forward pass, layer by layer during it, or between steps."""


@dataclass(frozen=True)
class WorkerLayout(KVConnectorHandshakeMetadata):
    """What a worker found out about its KV memory; None when it cannot be used: it has said why."""

    layout: KVLayout | None


@dataclass(frozen=True)
class Load:
    """Blocks of a request that the workers copy from the store."""

    number: int
    """Of this load: a request may have several, one after the other."""
    prompt: int
    request_id: str
    first: int
    """Position of the first one in the prompt, in blocks."""
    blocks: list[int]
    """Engine blocks, one after the other."""
    mode: Mode


@dataclass(frozen=True)
class Save:
    """Blocks of a prompt that the workers copy to the store, if it has not got them."""

    job: int
    prompt: int
    first: int
    blocks: list[int]
    priority: int = NORMAL_PRIORITY
    ttl_s: float | None = None


@dataclass
class StepMetadata(KVConnectorMetadata):
    """One step's work. Prompts have numbers, since two requests may have one name."""

    idle: bool = False
    """Whether the model has nothing to compute."""
    namespaces: dict[int, Namespace] = field(default_factory=dict)
    """Of the prompts that are mentioned for the first time."""
    keys: dict[int, bytes] = field(default_factory=dict)
    """Key bytes to append to what is known of each prompt."""
    early_saves: list[Save] = field(default_factory=list)
    """To be begun before the forward pass: their blocks are free, and may be written by it."""
    overwritten: list[int] = field(default_factory=list)
    """Those of the blocks of saves not reported yet that this step writes to."""
    loads: list[Load] = field(default_factory=list)
    saves: list[Save] = field(default_factory=list)
    """To be begun after the forward pass, which fills their blocks."""
    forgotten: list[int] = field(default_factory=list)
    """Prompts that will not be mentioned again."""


@dataclass
class StepResults(KVConnectorWorkerMetadata):
    """What ended since the last step, and on how many ranks."""

    loads: dict[int, int] = field(default_factory=dict)
    """Ranks on which each load has ended, well or not."""
    saves: dict[int, int] = field(default_factory=dict)
    """Ranks on which each job has ended, well or not."""
    failed: set[int] = field(default_factory=set)
    """Loads that failed on some rank."""
    failed_saves: set[int] = field(default_factory=set)
    """Jobs that failed on some rank."""

    def aggregate(self, other: KVConnectorWorkerMetadata) -> StepResults:
        """Add up the ranks."""
        assert isinstance(other, StepResults)
        for mine, theirs in ((self.loads, other.loads), (self.saves, other.saves)):
            for number, ranks in theirs.items():
                mine[number] = mine.get(number, 0) + ranks
        self.failed |= other.failed
        self.failed_saves |= other.failed_saves
        return self

    def __bool__(self) -> bool:
        """Whether anything ended."""
        return bool(self.loads or self.saves)
