"""What a test says to an engine's process, and what that answers."""

from __future__ import annotations

from typing import Any, Literal

import msgspec


class EngineOptions(msgspec.Struct, frozen=True, kw_only=True):
    """One engine."""

    model: str
    dtype: str = "float32"
    block_tokens: int = 32
    num_blocks: int = 2048
    """Of vLLM's own KV memory."""
    max_batched_tokens: int = 4096
    max_model_tokens: int = 2048
    prefix_caching: bool = False
    """Whether vLLM keeps prefixes itself, besides."""
    url: str | None = None
    """Of the daemon; None: no connector."""
    role: Literal["kv_both", "kv_producer", "kv_consumer"] = "kv_both"
    connector: dict[str, Any] = {}
    """More of ``kv_connector_extra_config``."""
    processes: bool = False
    """Whether scheduler and worker run in processes of their own."""
    ranks: int = 1
    """Of tensor parallelism; each has a process, and so has the scheduler."""
    environment: dict[str, str] = {}
    gate: str | None = None
    """While this file exists, loads stop before their first copy, and say so by a file ``….reached``."""


class Prompt(msgspec.Struct, frozen=True, kw_only=True):
    """One request. Sampling is greedy."""

    tokens: tuple[int, ...]
    max_tokens: int = 8
    salt: str | None = None
    parameters: dict[str, Any] = {}
    """``kv_transfer_params``."""
    abort_after_steps: int | None = None
    """Steps of the engine after which it is aborted."""


class Answer(msgspec.Struct, frozen=True):
    """What became of one request."""

    tokens: tuple[int, ...]
    cached_tokens: int
    """Of the prompt, wherever they came from."""
    finish_reason: str


class Generate(msgspec.Struct, tag=True):
    """Submit all ``prompts`` at once. Answered by :class:`Progress`, several times, and :class:`Answers`."""

    prompts: list[Prompt]


class Forget(msgspec.Struct, tag=True):
    """Empty vLLM's own prefix cache. Answer: :class:`Done`."""


class Measure(msgspec.Struct, tag=True):
    """Answer: :class:`Metrics`."""


class Stop(msgspec.Struct, tag=True):
    """Shut the engine down. Answer: :class:`Done`; then the process ends."""


class Progress(msgspec.Struct, tag=True):
    """A step has been taken, the ``num_steps``-th of this batch."""

    num_steps: int
    num_finished: int


class Answers(msgspec.Struct, tag=True):
    """In the order of the prompts."""

    answers: list[Answer]


class Metrics(msgspec.Struct, tag=True):
    """Every counter and gauge of vLLM; labels other than ``source`` are summed over."""

    values: dict[str, float]


class Done(msgspec.Struct, tag=True):
    """As asked."""


class Failed(msgspec.Struct, tag=True):
    """The engine raised."""

    traceback: str


Command = Generate | Forget | Measure | Stop
Reply = Progress | Answers | Metrics | Done | Failed
