"""An engine in a process of its own: takes commands from a pipe until it is told to stop."""

from __future__ import annotations

import faulthandler
import os
import signal
import threading
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from tests.engines.vllm.messages import (
    Answer,
    Answers,
    Command,
    Done,
    EngineOptions,
    Failed,
    Forget,
    Generate,
    Measure,
    Metrics,
    Progress,
    Prompt,
    Reply,
    Stop,
)

if TYPE_CHECKING:
    from multiprocessing.connection import Connection


def main(pipe: Connection, encoded: bytes, log: str) -> None:
    """Run an engine with the options ``encoded``; what it prints goes to the file ``log``.

    SIGUSR1 adds the stacks of all threads to it.
    """
    os.setpgid(0, 0)  # who kills this process kills those of its engine with it
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(file, 1)
    os.dup2(file, 2)
    os.close(file)
    faulthandler.enable(2)
    faulthandler.register(signal.SIGUSR1, file=2)
    try:
        _serve(pipe, msgspec.msgpack.decode(encoded, type=EngineOptions))
    except EOFError:  # the tests have ended
        os._exit(1)
    except BaseException:  # noqa: BLE001 - told to the test, whatever it is
        _send(pipe, Failed(traceback.format_exc()))
        os._exit(1)


def _serve(pipe: Connection, options: EngineOptions) -> None:
    llm = _start(options)
    _send(pipe, Done())
    count = 0
    while True:
        match msgspec.msgpack.decode(pipe.recv_bytes(), type=Command):
            case Generate(prompts):
                answers = _generate(llm, prompts, pipe, f"{count}")
                count += 1
                _send(pipe, Answers(answers))
            case Forget():
                assert llm.reset_prefix_cache()
                _send(pipe, Done())
            case Measure():
                _send(pipe, Metrics(_metrics(llm)))
            case Stop():
                llm.llm_engine.engine_core.shutdown()
                _send(pipe, Done())
                return


def _start(options: EngineOptions) -> Any:
    os.environ.update(options.environment)
    if options.gate:
        _hold_loads(Path(options.gate))
    if options.processes or options.ranks > 1:
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "1"
    if options.ranks > 1:
        os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
    from vllm import LLM

    connector = {
        "kv_connector": "KVStoreConnector",
        "kv_role": options.role,
        "kv_connector_extra_config": {"url": options.url, **options.connector},
    }
    return LLM(
        **arguments(options),
        tensor_parallel_size=options.ranks,
        max_model_len=options.max_model_tokens,
        max_num_batched_tokens=options.max_batched_tokens,
        kv_transfer_config=connector if options.url else None,
    )


def arguments(options: EngineOptions) -> dict[str, Any]:
    """Return what every engine is started with, whatever its connector."""
    return {
        "model": options.model,
        "dtype": options.dtype,
        "enforce_eager": True,
        "skip_tokenizer_init": True,
        "disable_log_stats": False,
        "block_size": options.block_tokens,
        "num_gpu_blocks_override": options.num_blocks,
        "enable_prefix_caching": options.prefix_caching,
        "prefix_caching_hash_algo": "sha256_cbor",
    }


def _hold_loads(gate: Path) -> None:
    """Have loads wait, with their lease, while ``gate`` exists."""
    from engine_plugin.vllm.pages import Pages

    load, reached, pause = Pages.load, Path(f"{gate}.reached"), threading.Event()

    def held(pages: Pages, *arguments: Any) -> None:
        while gate.exists():
            reached.touch()
            pause.wait(0.01)
        load(pages, *arguments)

    Pages.load = held  # type: ignore[method-assign]


def _generate(llm: Any, prompts: list[Prompt], pipe: Connection, batch: str) -> list[Answer]:
    engine = llm.llm_engine
    names = [f"{batch}-{index}" for index in range(len(prompts))]
    known = {
        name: engine.add_request(name, _tokens(prompt), _sampling(prompt))
        for name, prompt in zip(names, prompts, strict=True)
    }
    answers: dict[str, Answer] = {}
    num_steps = 0
    while engine.has_unfinished_requests():
        for output in engine.step():
            if output.finished:
                answers[output.request_id] = _answer(output)
        num_steps += 1
        _send(pipe, Progress(num_steps, len(answers)))
        for name, prompt in zip(names, prompts, strict=True):
            if prompt.abort_after_steps == num_steps and name not in answers:
                engine.abort_request([known[name]], internal=True)
                answers[name] = Answer((), 0, "abort")
    return [answers[name] for name in names]


def _tokens(prompt: Prompt) -> dict[str, Any]:
    given: dict[str, Any] = {"prompt_token_ids": list(prompt.tokens)}
    if prompt.salt is not None:
        given["cache_salt"] = prompt.salt
    return given


def _sampling(prompt: Prompt) -> Any:
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    return SamplingParams(
        temperature=0,
        max_tokens=prompt.max_tokens,
        ignore_eos=True,
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
        extra_args={"kv_transfer_params": prompt.parameters} if prompt.parameters else None,
    )


def _answer(output: Any) -> Answer:
    text = output.outputs[0]
    return Answer(tuple(text.token_ids), output.num_cached_tokens or 0, str(text.finish_reason))


def _metrics(llm: Any) -> dict[str, float]:
    values: dict[str, float] = {}
    for metric in llm.get_metrics():
        value = getattr(metric, "value", None)
        if value is not None:
            source = metric.labels.get("source")
            name = metric.name if source is None else f"{metric.name}:{source}"
            values[name] = values.get(name, 0) + value
    return values


def _send(pipe: Connection, reply: Reply) -> None:
    pipe.send_bytes(msgspec.msgpack.encode(reply))
