"""An engine in this process, so that a test can replace parts of it; and one on another back end."""

from __future__ import annotations

import warnings
from collections import deque
from itertools import count
from typing import TYPE_CHECKING, Any

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of torch, about itself

    from tests.engines.vllm.preload import LLM  # first: sets what vLLM reads when it is imported

    # isort: split
    from vllm import SamplingParams
    from vllm.distributed.kv_transfer import get_kv_transfer_group
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler
    from vllm.v1.request import Request

import numpy as np

import kvstore
from engine_plugin.vllm.worker import Worker
from kvstore.tokens import block_keys
from tests.engines.vllm import child

if TYPE_CHECKING:
    from collections.abc import Sequence
    from multiprocessing.connection import Connection

    import pytest
    from numpy.typing import NDArray

    from engine_plugin.vllm.scheduler import Scheduler

Tokens = tuple[int, ...]
OVERLAPPING = {
    "_spec_token_placeholders": [],
    "pp_size": 1,
    "decode_stagger": 1,
    "defer_block_free": True,
}
"""What vLLM's asynchronous scheduler has beside the attributes of the other one."""
WRONG = 0x3F
"""Each byte of what a load that goes wrong leaves in the engine's memory: 0.75 in float32."""


class Planted:
    """An engine whose own prefix cache is on, and whose memory is small: 48 blocks of 32 tokens."""

    def __init__(self, model: str, url: str) -> None:
        """Start it; it computes 64 tokens of a prompt in one step."""
        connector = {
            "kv_connector": "KVStoreConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {"url": url, "load": "sync"},
        }
        self._llm = LLM(
            model,
            dtype="float32",
            enforce_eager=True,
            skip_tokenizer_init=True,
            block_size=32,
            num_gpu_blocks_override=48,
            max_model_len=1400,
            max_num_batched_tokens=1024,
            long_prefill_token_threshold=64,
            enable_prefix_caching=True,
            prefix_caching_hash_algo="sha256_cbor",
            kv_transfer_config=connector,
        )
        self.client = kvstore.connect(url, on_failure="raise", deadline_s=20)
        self.core: Any = self._llm.llm_engine.engine_core.engine_core
        self._salts = (f"salt-{number}" for number in count())

    @property
    def half(self) -> Scheduler:
        """The connector's, of the scheduler."""
        half: Scheduler = self.core.scheduler.connector._scheduler
        return half

    @property
    def worker(self) -> Worker:
        """The connector's, of the worker."""
        worker: Worker = get_kv_transfer_group()._worker
        return worker

    def load_by(self, mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
        """Have loads done in another way than ``sync``."""
        options = self.half._options.model_copy(update={"load": mode})
        monkeypatch.setattr(self.half, "_options", options)

    def overlap_steps(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Have two steps in flight, vLLM's default on CUDA, and loads as the connector has them then."""
        scheduler = self.core.scheduler
        monkeypatch.setattr(scheduler, "__class__", AsyncScheduler)
        for name, value in OVERLAPPING.items():
            monkeypatch.setattr(scheduler, name, value, raising=False)
        config = scheduler.vllm_config
        monkeypatch.setattr(config.scheduler_config, "async_scheduling", True)
        connector = scheduler.connector
        monkeypatch.setattr(self.half, "_options", connector._options_here())

    def work_overlapped(self) -> dict[str, Tokens]:
        """Take steps until no request is left, each planned while another one is in flight."""
        scheduler, flight, got = self.core.scheduler, deque[Any](), dict[str, Tokens]()
        while scheduler.has_requests() or flight:
            if scheduler.has_requests():
                planned = scheduler.schedule()
                flight.append((planned, self._execute(planned)))
                if len(flight) == 1:
                    continue
            for outputs in scheduler.update_from_output(*flight.popleft()).values():
                for output in outputs.outputs:
                    name = output.request_id
                    got[name] = got.get(name, ()) + tuple(output.new_token_ids)
        return got

    def _execute(self, planned: Any) -> Any:
        executor = self.core.model_executor
        result = executor.execute_model(planned, non_block=True).result()
        return executor.sample_tokens(None) if result is None else result

    def salt(self) -> str:
        """Return one under which nothing is known."""
        return next(self._salts)

    def ask(self, salt: str, *prompts: Tokens) -> list[tuple[Tokens, int]]:
        """Submit all at once; return of each what was generated, and how much was cached."""
        given = [{"prompt_token_ids": list(p), "cache_salt": salt} for p in prompts]
        outputs = self._llm.generate(given, _sampling(), use_tqdm=False)  # type: ignore[arg-type]
        return [(tuple(o.outputs[0].token_ids), o.num_cached_tokens or 0) for o in outputs]

    def right(self, prompt: Tokens) -> tuple[Tokens, str]:
        """Return what is generated when all is computed; and the salt under which that is stored."""
        salt = self.salt()
        ((tokens, cached),) = self.ask(salt, prompt)
        assert not cached
        self.settle()
        return tokens, salt

    def add(self, name: str, salt: str, prompt: Tokens) -> None:
        """Submit to the scheduler; steps are taken by the test."""
        self.core.scheduler.add_request(
            Request(
                request_id=name,
                prompt_token_ids=list(prompt),
                sampling_params=_sampling(),
                pooling_params=None,
                cache_salt=salt,
                block_hasher=self.core.request_block_hasher,
            )
        )

    def work(self) -> None:
        """Take steps until no request is left."""
        while self.core.scheduler.has_requests():
            self.core.step()

    def settle(self) -> None:
        """Store all that is to be stored, and let the scheduler know of it."""
        for _ in range(2):
            self.ask(self.salt(), (7,))
            self.worker._saver.submit(int).result()
        self.ask(self.salt(), (7,))

    def forget(self) -> None:
        """Settle, and empty vLLM's own prefix cache."""
        self.settle()
        assert self._llm.reset_prefix_cache()

    def reset(self, **options: bool) -> bool:
        """Empty vLLM's own prefix cache, as its users can."""
        return self._llm.reset_prefix_cache(**options)

    def stored(self, salt: str, prompt: Tokens) -> list[NDArray[np.float32]]:
        """Return the leading blocks of ``prompt`` that are stored."""
        known = self.half._namespaces._known
        namespace = next(space for (_, given), space in known.items() if given == salt)
        size = namespace.layout.block_bytes
        lease = self.client.acquire(namespace, block_keys(namespace, [*prompt, 3]))
        memory = memoryview(lease.buffers[0]) if lease.num_blocks else memoryview(b"")
        offsets = lease.offsets.tolist()
        blocks = [np.frombuffer(memory[o : o + size].tobytes(), np.float32) for o in offsets]
        self.client.release(lease)
        return blocks

    def close(self) -> None:
        """End it."""
        self._llm.llm_engine.engine_core.shutdown()
        self.client.close()


def _sampling() -> Any:
    return SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, detokenize=False)


class Loads:
    """The loads of an engine; what they are to fill is :data:`WRONG` until it is filled."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Watch those that begin from now on."""
        self.seen: list[Any] = []
        load = Worker._load

        def watched(worker: Worker, jobs: list[Any], ready: Any) -> None:
            self.seen += jobs
            spoil(worker, jobs)
            load(worker, jobs, ready)

        monkeypatch.setattr(Worker, "_load", watched)


def spoil(worker: Worker, jobs: Sequence[Any]) -> None:
    """Write something else to the blocks of loads."""
    for job in jobs:
        for array in worker._pages._arrays:
            array[job.load.blocks] = WRONG


def serve_with_small_kernel_blocks(pipe: Connection, encoded: bytes, log: str) -> None:
    """Be a child process as usual, with an attention back end that has blocks of 32 tokens only."""

    def sizes(kv_cache_spec: Any = None) -> list[int]:
        return [32]

    CPUAttentionBackend.get_supported_kernel_block_sizes = staticmethod(sizes)
    child.main(pipe, encoded, log)
