"""A daemon that is not there, is killed, or hangs: every request is answered, with the right tokens.

``CHAOS_S`` is how long engines work while their daemon is killed again and again (20 s by default).
"""

from __future__ import annotations

import os
import random
import signal
import threading
from itertools import cycle
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest

import kvstore
from kvstore import KVLayout, Namespace
from tests.engines.vllm.engine import Daemon, Engine, wait_until
from tests.engines.vllm.messages import Answer, Progress, Prompt
from tests.engines.vllm.workload import Known, draw

if TYPE_CHECKING:
    from collections.abc import Callable

CHAOS_S = float(os.environ.get("CHAOS_S", "20"))
CHAOS_SEED = int(os.environ.get("CHAOS_SEED", "1"))
BLOCK = 32
MODES = ["sync", "layerwise", "async"]


@pytest.fixture(scope="module")
def batches(reference):
    """Batches of prompts with beginnings in common, and their answers without connector."""
    shared = [draw(1000 + index, 640) for index in range(3)]
    made = []
    for batch in range(6):
        prompts = [
            Prompt(
                tokens=shared[index % 3][: 640 - 64 * batch] + draw(2000 + 10 * batch + index, 40)
            )
            for index in range(6)
        ]
        made.append((prompts, [answer.tokens for answer in reference.generate(*prompts)]))
    return made


@pytest.fixture(scope="module")
def daemon(start_daemon):
    daemon = start_daemon()
    yield daemon
    daemon.close()


@pytest.fixture(scope="module")
def engines(start_engine, daemon):
    """An engine for each mode of loading; the daemon is not running when they start."""
    daemon.kill()
    daemon.socket.unlink()
    engines = {
        mode: start_engine(url=daemon.url, block_tokens=BLOCK, connector={"load": mode})
        for mode in MODES
    }
    daemon.start()
    yield engines
    daemon.send(signal.SIGCONT)
    for engine in engines.values():
        engine.close()


@pytest.fixture(params=MODES)
def engine(request, engines, daemon):
    engine = engines[request.param]
    yield engine
    restart(daemon, [engine])


def restart(daemon: Daemon, engines: list[Engine]) -> None:
    """Have the daemon run, and the engines know it, whatever happened."""
    daemon.kill()
    daemon.start()
    for engine in engines:
        wait_until(lambda engine=engine: hits(engine))


def hits(engine: Engine, count=iter(range(10_000, 20_000))) -> bool:  # noqa: B008 - one for all calls
    """Whether what an engine stores hits, soon."""
    prompt = Prompt(tokens=draw(next(count), BLOCK + 1), max_tokens=1)
    return any(engine.generate(prompt)[0].cached_tokens for _ in range(10))


class Gated:
    """An engine whose loads can be held while they have a lease."""

    def __init__(self, engine: Engine, gate: Path) -> None:
        self.engine, self._gate, self._reached = engine, gate, Path(f"{gate}.reached")

    def load_while(self, prompt: Prompt, happens: Callable[[], None]) -> Answer:
        """Ask ``prompt``; what ``happens`` does so between the lease and the copy of its load."""
        self._reached.unlink(missing_ok=True)
        self._gate.touch()
        try:
            self.engine.submit([prompt])
            wait_until(self._reached.exists)
            happens()
        finally:
            self._gate.unlink()
            *_, last = self.engine.replies()
        return last.answers[0]

    @property
    def failed_loads(self) -> float:
        return self.engine.metrics().get("kvstore_failed_loads", 0)


@pytest.fixture(scope="module", params=MODES)
def gated(request, start_engine, start_daemon, tmp_path_factory):
    """The daemon holds 64 MiB, and lends for one second."""
    daemon = start_daemon(dram="64MiB", lease_timeout="1")
    gate = tmp_path_factory.mktemp("gate") / "loads"
    load = {"load": request.param}
    engine = start_engine(url=daemon.url, block_tokens=BLOCK, connector=load, gate=str(gate))
    yield Gated(engine, gate), daemon
    engine.close()
    daemon.close()


def test_blocks_that_change_while_they_are_loaded_are_not_used(gated, reference):
    gated, daemon = gated
    prompt = Prompt(tokens=draw(6000, 500))
    (expected,) = reference.generate(prompt)
    gated.engine.generate(prompt)
    daemon.wait_for_blocks(507 // BLOCK)
    before = gated.failed_loads

    def lend_the_memory_to_another() -> None:
        with kvstore.connect(daemon.url, on_failure="raise", deadline_s=20) as client:
            wait_until(lambda: client.status().pool.num_leases == 0)
            client.clear()
            layout = KVLayout(2, 2, 64, "float32", BLOCK)
            blocks, written = (64 << 20) // layout.block_bytes, set()
            for model in (b"another", b"a third"):
                other = Namespace(model, layout)
                with client.reserve(other, range(blocks // 2 * BLOCK)) as reservation:
                    memory = np.asarray(reservation.buffers[0])
                    for offset in reservation.offsets.tolist():
                        memory[offset : offset + layout.block_bytes] = 60
                        written.add(offset)
            assert len(written) == blocks

    answer = gated.load_while(prompt, lend_the_memory_to_another)
    assert answer.tokens == expected.tokens
    assert gated.failed_loads == before + 1


def test_a_load_whose_daemon_dies_is_not_used(gated, reference):
    gated, daemon = gated
    wait_until(lambda: hits(gated.engine))
    prompt = Prompt(tokens=draw(6001, 500))
    (expected,) = reference.generate(prompt)
    gated.engine.generate(prompt)
    wait_until(lambda: gated.engine.generate(prompt)[0].cached_tokens == 480)
    before = gated.failed_loads
    answer = gated.load_while(prompt, daemon.kill)
    assert answer.tokens == expected.tokens
    assert gated.failed_loads == before + 1
    daemon.start()
    wait_until(lambda: hits(gated.engine))
    assert gated.engine.generate(prompt)[0].tokens == expected.tokens


def right(answers: list[Answer], expected) -> bool:
    assert [answer.tokens for answer in answers] == expected
    assert all(answer.finish_reason == "length" for answer in answers)
    return True


def test_a_daemon_that_starts_later_is_found(engines, daemon, batches):
    prompts, expected = batches[0]
    for engine in engines.values():
        wait_until(lambda engine=engine: hits(engine))
        right(engine.generate(*prompts), expected)
    known = Known(BLOCK)
    for prompt in prompts:
        known.add(prompt)
    for engine in engines.values():
        answers = engine.generate(*prompts)
        assert [a.cached_tokens for a in answers] == [known.hit_tokens(p) for p in prompts]
        right(answers, expected)


def test_without_a_daemon_requests_are_computed(engine, daemon, batches):
    daemon.kill()
    before = engine.metrics()
    for prompts, expected in batches[:3]:
        answers = engine.generate(*prompts)
        right(answers, expected)
        assert not any(answer.cached_tokens for answer in answers)
    lookups, failed = (
        engine.metrics().get(f"kvstore_{name}", 0) - before.get(f"kvstore_{name}", 0)
        for name in ("lookups", "failed_lookups")
    )
    assert lookups == failed > 0
    assert engine.log.count(f"at {daemon.url}, not there yet; blocks of {BLOCK} tokens") == 1
    assert "[rules.py:" in engine.log  # as vLLM writes its own lines


def test_a_daemon_that_is_killed_between_requests_and_comes_back(engine, daemon, batches):
    prompts, expected = batches[1]
    right(engine.generate(*prompts), expected)
    daemon.kill()
    daemon.start()
    right(engine.generate(*prompts), expected)
    wait_until(lambda: hits(engine))
    right(engine.generate(*prompts), expected)


@pytest.mark.parametrize("step", [1, 2, 3, 5])
def test_a_daemon_that_is_killed_during_requests(engine, daemon, batches, step):
    prompts, expected = batches[2]
    right(engine.generate(*prompts), expected)

    def kill(progress: Progress) -> None:
        if progress.num_steps == step:
            daemon.kill()

    right(engine.watch(prompts, kill), expected)


def test_a_daemon_that_is_killed_during_loads(engine, daemon, reference):
    """Loads of some 20 MB begin a few milliseconds after the requests came; the daemon ends somewhere there."""
    shared = draw(5000, 1800)
    prompts = [Prompt(tokens=shared + draw(5001 + n, 100), max_tokens=4) for n in range(6)]
    expected = [answer.tokens for answer in reference.generate(*prompts)]
    rng, moment = random.Random(CHAOS_SEED), threading.Event()
    for _ in range(12):
        restart(daemon, [engine])
        right(engine.generate(*prompts), expected)
        engine.submit(prompts)
        moment.wait(rng.uniform(0, 0.06))
        daemon.kill()
        *_, last = engine.replies()
        right(last.answers, expected)


def test_a_daemon_that_hangs(engine, daemon, batches):
    prompts, expected = batches[3]
    right(engine.generate(*prompts), expected)

    def stop(progress: Progress) -> None:
        if progress.num_steps == 1:
            daemon.send(signal.SIGSTOP)

    right(engine.watch(prompts, stop), expected)
    for prompts, expected in batches:
        right(engine.generate(*prompts), expected)
    daemon.send(signal.SIGCONT)
    wait_until(lambda: hits(engine))
    right(engine.generate(*prompts), expected)


@pytest.mark.timeout(CHAOS_S + 200)
def test_a_daemon_that_is_killed_again_and_again(engines, daemon, batches):
    """Engines of all modes work on one daemon, which is killed every two seconds or so."""
    restart(daemon, list(engines.values()))
    over, failures = threading.Event(), []
    num_batches = dict.fromkeys(engines, 0)
    before = {mode: engine.external_hit_tokens for mode, engine in engines.items()}

    def work(mode: str) -> None:
        try:
            for prompts, expected in cycle(batches):
                if over.is_set():
                    return
                right(engines[mode].generate(*prompts), expected)
                num_batches[mode] += 1
        except BaseException as error:  # noqa: BLE001 - told to the test
            failures.append(f"{mode}: {error}")
            over.set()

    workers = [threading.Thread(target=work, args=(mode,), name=f"work-{mode}") for mode in MODES]
    for worker in workers:
        worker.start()
    rng, num_kills, spent_s = random.Random(CHAOS_SEED), 0, 0.0
    while spent_s < CHAOS_S and not over.is_set():
        pause_s = rng.uniform(0.5, 3)
        over.wait(pause_s)
        daemon.kill()
        down_s = rng.choice([0, 0, 0.3, 1])
        over.wait(down_s)
        daemon.start()
        num_kills += 1
        spent_s += pause_s + down_s
    over.set()
    for worker in workers:
        worker.join(120)
        assert not worker.is_alive()
    assert not failures, failures[0]
    for mode, engine in engines.items():
        assert engine.external_hit_tokens > before[mode], f"nothing was ever loaded: {mode}"
        assert num_batches[mode] > num_kills / 2, f"{num_batches} batches, {num_kills} kills"
