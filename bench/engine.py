"""A vLLM engine in a process of its own, for benchmarks: answers prompts, and says how long each took.

The parent starts ``python -m bench.engine SETTINGS`` and sends one JSON object a line; each is answered
by one. Standard output belongs to these answers: whatever vLLM prints goes to standard error. The engine's
core runs in the same process, so that an engine that waits for its next line uses no core.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections import deque
from typing import TYPE_CHECKING, Any, BinaryIO

import click
import msgspec

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

ENVIRONMENT = {
    "DO_NOT_TRACK": "1",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "4",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_PLUGINS": "kvstore",
}
"""Of every engine, where the caller's environment says nothing else. One thread computes, so that another
core is left for what copies blocks."""
BLOCK_TOKENS = {"cpu": 128}
DEFAULT_BLOCK_TOKENS = 16
"""vLLM's own defaults, by the kind of device: the cache's size is given in blocks."""
END_S = 60.0
"""Longest that an engine may take to end."""
POLL_S = 0.001


class Settings(msgspec.Struct, frozen=True):
    """What an engine is made of."""

    model: str
    """Directory of the checkpoint."""
    max_tokens: int
    """Longest prompt with its answer."""
    cache_tokens: int
    """Tokens that the engine's own KV memory holds, at least one request's."""
    connector: str = ""
    """Name of vLLM's KV connector; none by default."""
    options: dict[str, str | float] = {}
    """Of the connector: ``kv_connector_extra_config``."""
    memory_part: float = 0.9
    """Part of a GPU's memory that is this engine's."""


class Ask(msgspec.Struct, tag=True):
    """Answer prompts, each with so many tokens, greedily."""

    prompts: list[list[int]]
    answer_tokens: int
    concurrency: int
    """Requests at a time; the next one comes when one has its answer."""


class Forget(msgspec.Struct, tag=True):
    """Empty vLLM's own prefix cache."""


class Ready(msgspec.Struct):
    """What the engine runs on. The answer to the start, and to :class:`Forget`."""

    vllm: str
    device: str
    """``cpu``, or the name of the GPU."""
    threads: int
    block_tokens: int


class Answer(msgspec.Struct):
    """What came of one prompt."""

    tokens: list[int]
    ttft_s: float
    """From when the engine was given the prompt to its first token."""
    cached_tokens: int
    """Tokens of the prompt that were not computed, whoever had them."""


class Served(msgspec.Struct):
    """What came of an :class:`Ask`."""

    seconds: float
    """From the first prompt to the last answer's end."""
    answers: list[Answer]
    """In the order of the prompts."""


class Engine:
    """The parent's end of an engine."""

    def __init__(self, settings: Settings) -> None:
        """Start it; :meth:`wait` says when it is there."""
        command = [sys.executable, "-m", "bench.engine", msgspec.json.encode(settings).decode()]
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**ENVIRONMENT, **os.environ, "VLLM_ENABLE_V1_MULTIPROCESSING": "0"},
        )

    def wait(self) -> Ready:
        """Wait until it can be asked; return what it runs on."""
        return msgspec.json.decode(self._line(), type=Ready)

    def ask(
        self, prompts: list[list[int]], *, answer_tokens: int = 1, concurrency: int = 1
    ) -> Served:
        """Return the answers to ``prompts``, when their blocks are stored, too."""
        self._send(Ask(prompts, answer_tokens, concurrency))
        return msgspec.json.decode(self._line(), type=Served)

    def forget(self) -> None:
        """Empty vLLM's own prefix cache."""
        self._send(Forget())
        self._line()

    def close(self) -> None:
        """Let it end in order; kill it if it does not."""
        try:
            self._process.communicate(timeout=END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.communicate()

    def _send(self, message: Ask | Forget) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(msgspec.json.encode(message) + b"\n")
        self._process.stdin.flush()

    def _line(self) -> bytes:
        assert self._process.stdout is not None
        if line := self._process.stdout.readline():
            return line
        raise click.ClickException(f"an engine ended with {self._process.wait()}: see above")


def make_checkpoint(directory: Path, layers: int) -> str:
    """Write a Llama of random bfloat16 weights to ``directory``; return it as vLLM takes it.

    A token's KV has 1 KiB in each layer.
    """
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=32000,
        hidden_size=1024,
        intermediate_size=2816,
        num_hidden_layers=layers,
        num_attention_heads=16,
        num_key_value_heads=4,
        max_position_embeddings=1 << 17,
        initializer_range=0.05,
    )
    torch.manual_seed(0)
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(directory)
    return str(directory)


class _Child:
    """The engine itself."""

    def __init__(self, settings: Settings) -> None:
        import torch
        import vllm
        from vllm.platforms import current_platform
        from vllm.usage.usage_lib import UsageContext

        kind = current_platform.device_type
        block_tokens = BLOCK_TOKENS.get(kind, DEFAULT_BLOCK_TOKENS)
        arguments: dict[str, Any] = {}
        if settings.connector:
            arguments["kv_transfer_config"] = {
                "kv_connector": settings.connector,
                "kv_role": "kv_both",
                "kv_connector_extra_config": settings.options,
            }
        engine_args = vllm.EngineArgs(
            settings.model,
            dtype="bfloat16",
            enforce_eager=kind == "cpu",
            block_size=block_tokens,
            max_model_len=settings.max_tokens,
            num_gpu_blocks_override=-(-settings.cache_tokens // block_tokens) + 1,
            gpu_memory_utilization=settings.memory_part,
            skip_tokenizer_init=True,
            **arguments,
        )
        self._engine = vllm.LLMEngine.from_engine_args(engine_args, UsageContext.OPENAI_API_SERVER)
        device = "cpu" if kind == "cpu" else current_platform.get_device_name()
        self.ready = Ready(vllm.__version__, device, torch.get_num_threads(), block_tokens)
        self._num_asked = 0

    def serve(self, questions: BinaryIO) -> Iterator[Ready | Served]:
        """Yield the answers to the lines of ``questions``."""
        yield self.ready
        for line in questions:
            question = msgspec.json.decode(line, type=Ask | Forget)
            if isinstance(question, Ask):
                served = self._answer(question)
                self._settle()
                yield served
            else:
                self._settle()
                if not self._engine.reset_prefix_cache():
                    raise click.ClickException("vLLM could not empty its prefix cache")
                yield self.ready

    def close(self) -> None:
        """End the engine in order."""
        self._engine.engine_core.shutdown()

    def _answer(self, ask: Ask) -> Served:
        from vllm import SamplingParams

        params = SamplingParams(
            temperature=0, max_tokens=ask.answer_tokens, ignore_eos=True, detokenize=False
        )
        waiting = deque(enumerate(ask.prompts))
        running: dict[str, tuple[int, float]] = {}
        """Number of the prompt, and when it was given."""
        first: dict[int, float] = {}
        answers: dict[int, Answer] = {}
        begin = time.perf_counter()
        while waiting or running:
            while waiting and len(running) < ask.concurrency:
                number, prompt = waiting.popleft()
                self._num_asked += 1
                name = str(self._num_asked)
                running[name] = number, time.perf_counter()
                self._engine.add_request(name, {"prompt_token_ids": prompt}, params)
            for output in self._engine.step():
                number, start = running[output.request_id]
                first.setdefault(number, time.perf_counter() - start)
                if output.finished:
                    del running[output.request_id]
                    tokens = list(output.outputs[0].token_ids)
                    answers[number] = Answer(tokens, first[number], output.num_cached_tokens or 0)
        seconds = time.perf_counter() - begin
        return Served(seconds, [answers[number] for number in range(len(ask.prompts))])

    def _settle(self) -> None:
        """Step as a server does that has nothing else to do, until what is to be stored is stored."""
        while self._engine.engine_core.engine_core.scheduler.has_requests():
            self._engine.step()
            time.sleep(POLL_S)


def main() -> None:
    """Be the engine that the only argument describes, until standard input ends."""
    with os.fdopen(os.dup(sys.stdout.fileno()), "wb", buffering=0) as answers:
        os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
        child = _Child(msgspec.json.decode(sys.argv[1], type=Settings))
        try:
            for answer in child.serve(sys.stdin.buffer):
                answers.write(msgspec.json.encode(answer) + b"\n")
        finally:
            child.close()


if __name__ == "__main__":
    main()
