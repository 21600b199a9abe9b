"""Loads and saves that go wrong at the worst moment: right tokens, and nothing wrong in the store."""

from __future__ import annotations

from tests.engines.vllm import planted  # first: vLLM's imports warn of much

# isort: split

import threading

import numpy as np
import pytest
from vllm.v1.request import RequestStatus

from engine_plugin.vllm.pages import Pages
from engine_plugin.vllm.worker import Worker
from kvstore.errors import LeaseExpiredError
from tests.engines.vllm.engine import Engine, wait_until
from tests.engines.vllm.messages import Prompt
from tests.engines.vllm.workload import draw

pytestmark = pytest.mark.filterwarnings("ignore")  # vLLM runs in this process, and warns of much

BLOCK = 32
SHARED = draw(1, 10 * BLOCK)


@pytest.fixture(scope="module")
def engine(llama, start_daemon, tmp_path_factory):
    daemon = start_daemon()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HOME", str(tmp_path_factory.mktemp("home")))
        engine = planted.Planted(llama, daemon.url)
        yield engine
        engine.close()
    assert not [t for t in threading.enumerate() if "kvstore" in t.name]
    daemon.close()


@pytest.fixture
def salt(engine):
    """One under which ``SHARED`` is stored, and not in vLLM's own cache."""
    salt = engine.salt()
    engine.ask(salt, (*SHARED, 7))
    engine.forget()
    assert len(engine.stored(salt, SHARED)) == 10
    yield salt
    engine.forget()


@pytest.fixture(params=["sync"])
def loads(request, engine, monkeypatch, salt):
    engine.load_by(request.param, monkeypatch)
    return planted.Loads(monkeypatch)


in_a_step = pytest.mark.parametrize("loads", ["sync", "layerwise"], indirect=True)
in_every_mode = pytest.mark.parametrize("loads", ["sync", "layerwise", "async"], indirect=True)


def fail_once(monkeypatch) -> None:
    """Let the next load fail before anything was copied."""
    load, left = Pages.load, [1]

    def failing(pages, *arguments):
        if left:
            left.pop()
            raise RuntimeError("planted")
        load(pages, *arguments)

    monkeypatch.setattr(Pages, "load", failing)


def same(found, expected) -> bool:
    """Whether blocks are equal, but for what other shapes of matrices change in sums."""
    return all(np.abs(a - b).max() < 1e-3 for a, b in zip(found, expected, strict=False))


def check_store(engine, salt, prompt, clean, num_blocks) -> None:
    found = engine.stored(salt, prompt)
    assert len(found) >= num_blocks
    assert same(found, engine.stored(clean, prompt))


def abort_beside_load(engine, monkeypatch, names) -> list[str]:
    """Abort requests in the step of the next load, between the forward pass and its results."""
    scheduler, done = engine.core.scheduler, []
    update = scheduler.update_from_output

    def aborting(output, results):
        if output.kv_connector_metadata.loads and not done:
            done.extend(name for name in names if name in output.num_scheduled_tokens)
            scheduler.finish_requests(done, RequestStatus.FINISHED_ABORTED)
        return update(output, results)

    monkeypatch.setattr(scheduler, "update_from_output", aborting)
    return done


@pytest.mark.parametrize("fails", [False, True])
def test_loads_where_steps_overlap(engine, salt, monkeypatch, fails):
    """vLLM cannot take back a step that is in flight when the load of the one before it has failed."""
    prompt = SHARED + draw(3, 40)
    right, clean = engine.right(prompt)
    with monkeypatch.context() as patch:
        engine.overlap_steps(patch)
        loads = planted.Loads(patch)
        if fails:
            fail_once(patch)
        engine.add("a", salt, prompt)
        answers = engine.work_overlapped()
        assert len(loads.seen) == 1
    assert answers == {"a": right}
    engine.settle()
    check_store(engine, salt, prompt, clean, 11)


@in_a_step
def test_a_failed_load_of_a_request_that_is_aborted(engine, salt, loads, monkeypatch):
    other = SHARED + draw(2, 170)
    right, clean = engine.right(other)
    fail_once(monkeypatch)
    aborted = abort_beside_load(engine, monkeypatch, ["a"])
    engine.add("a", salt, SHARED + draw(3, 100))
    engine.work()
    assert aborted == ["a"]
    assert len(loads.seen) == 1
    assert engine.ask(salt, other)[0][0] == right
    engine.settle()
    check_store(engine, salt, other, clean, 15)
    engine.forget()
    assert engine.ask(salt, other) == [(right, 15 * BLOCK)]


@in_a_step
def test_a_failed_load_beside_an_aborted_request_with_the_same_prefix(
    engine, salt, loads, monkeypatch
):
    other = SHARED + draw(4, 170)
    right, clean = engine.right(other)
    fail_once(monkeypatch)
    abort_beside_load(engine, monkeypatch, ["b"])
    engine.add("a", salt, SHARED + draw(5, 40))
    engine.add("b", salt, other)
    engine.work()
    assert len(loads.seen) >= 1
    assert engine.ask(salt, other)[0][0] == right
    engine.settle()
    check_store(engine, salt, other, clean, 15)


@in_a_step
def test_two_requests_that_wait_for_a_load_that_fails(engine, salt, loads, monkeypatch):
    prompts = SHARED + draw(6, 40), SHARED + draw(7, 100)
    expected = [engine.right(prompt) for prompt in prompts]
    fail_once(monkeypatch)
    assert [tokens for tokens, _ in engine.ask(salt, *prompts)] == [t for t, _ in expected]
    engine.settle()
    for prompt, (_, clean) in zip(prompts, expected, strict=True):
        check_store(engine, salt, prompt, clean, len(prompt) // BLOCK)
    engine.forget()
    answers = engine.ask(salt, *prompts)
    assert [tokens for tokens, _ in answers] == [t for t, _ in expected]
    assert all(cached >= 10 * BLOCK for _, cached in answers)


@in_every_mode
@pytest.mark.parametrize("num_blocks", [0, 4, 9])
def test_a_lease_of_fewer_blocks_than_were_promised(engine, salt, loads, monkeypatch, num_blocks):
    prompt = SHARED + draw(10 + num_blocks, 70)
    right, clean = engine.right(prompt)
    expected = engine.stored(clean, prompt)
    acquire = engine.worker._store.acquire

    def shorter(namespace, key):
        lease = acquire(namespace, key[: (num_blocks + 1) * namespace.key_bytes])
        engine.client.clear()  # what was not found must be stored anew
        return lease

    with monkeypatch.context() as patch:
        patch.setattr(engine.worker._store, "acquire", shorter)
        ((tokens, _),) = engine.ask(salt, prompt)
    assert tokens == right
    assert len(loads.seen) == 1
    assert loads.seen[0].num_found == num_blocks
    engine.settle()
    found = engine.stored(salt, prompt)
    assert len(found) >= 12
    assert same(found, expected)
    engine.forget()
    assert engine.ask(salt, prompt) == [(right, 12 * BLOCK)]


@in_every_mode
def test_a_lease_that_ran_out_during_the_copy(engine, salt, loads, monkeypatch):
    prompt = SHARED + draw(20, 70)
    right, clean = engine.right(prompt)
    release = engine.worker._store.release

    def late(lease):
        release(lease)
        planted.spoil(engine.worker, loads.seen)  # another's bytes, by the time of the copy
        raise LeaseExpiredError("planted")

    with monkeypatch.context() as patch:
        patch.setattr(engine.worker._store, "release", late)
        ((tokens, _),) = engine.ask(salt, prompt)
    assert tokens == right
    assert len(loads.seen) == 1
    engine.settle()
    check_store(engine, salt, prompt, clean, 12)


def test_a_request_that_loads_again_before_its_first_load_is_reported(engine, salt, loads):
    prompt = SHARED + draw(21, 70)
    right, clean = engine.right(prompt)
    scheduler = engine.core.scheduler
    engine.add("twice", salt, prompt)
    first = scheduler.schedule()
    results = execute(engine, first)
    assert scheduler.reset_prefix_cache(reset_running_requests=True)
    second = scheduler.schedule()
    assert len(second.kv_connector_metadata.loads) == 1
    scheduler.update_from_output(first, results)
    scheduler.update_from_output(second, execute(engine, second))
    engine.work()
    assert len(loads.seen) == 2
    assert not engine.half._loads
    wait_until(lambda: engine.client.status().pool.num_leases == 0)
    engine.settle()
    check_store(engine, salt, prompt, clean, 12)
    assert engine.ask(salt, prompt)[0][0] == right


def execute(engine, output):
    model = engine.core.model_executor
    results = model.execute_model(output, non_block=True).result()
    return model.sample_tokens(None) if results is None else results


@pytest.mark.parametrize("steps", [1, 2, 3])
def test_a_name_that_is_used_again_at_once(engine, salt, steps):
    prompts = SHARED + draw(22, 70), draw(23, 500)
    right, clean = engine.right(prompts[1])
    engine.add("same", salt, prompts[0])
    for _ in range(steps):
        engine.core.step()
    engine.core.scheduler.finish_requests("same", RequestStatus.FINISHED_ABORTED)
    engine.add("same", salt, prompts[1])
    engine.work()
    engine.settle()
    assert not engine.half._loads
    assert not engine.half._requests
    assert not engine.worker._prompts
    check_store(engine, salt, prompts[1], clean, 15)
    assert engine.ask(salt, prompts[1])[0][0] == right


class Gate:
    """Holds the saves of an engine before they copy, but none for longer than ``longest_s``."""

    def __init__(self, monkeypatch, longest_s=30.0) -> None:
        save = Pages.save
        self.reached, self.open = threading.Event(), threading.Event()

        def held(pages, *arguments):
            self.reached.set()
            self.open.wait(longest_s)
            save(pages, *arguments)

        monkeypatch.setattr(Pages, "save", held)


def test_vllms_cache_is_emptied_while_a_save_is_slow(engine, monkeypatch):
    salt, prompt = engine.salt(), draw(30, 300)
    gate = Gate(monkeypatch)
    try:
        ((right, _),) = engine.ask(salt, prompt)
        assert gate.reached.wait(30)
        assert engine.reset()
        engine.add("running", salt, draw(31, 100))
        engine.core.step()
        assert engine.core.scheduler.running
        assert engine.reset(reset_running_requests=True, reset_connector=True)
        engine.core.pause_scheduler("abort")
        engine.core.resume_scheduler()
    finally:
        gate.open.set()
    engine.settle()
    assert engine.ask(salt, prompt) == [(right, 0)]
    engine.forget()
    assert engine.ask(salt, prompt) == [(right, 9 * BLOCK)]


def test_slow_saves_in_a_small_memory(engine, monkeypatch):
    """It has room for two prompts: each is computed or loaded over blocks that wait to be stored."""
    prompts = [draw(40 + index, 700) for index in range(4)]
    clean = [engine.right(prompt) for prompt in prompts]
    salt = engine.salt()
    engine.ask(salt, prompts[0])
    engine.forget()
    save, fence, fenced = Pages.save, Worker._fence, []

    def slow(pages, *arguments):
        assert not threading.Event().wait(0.06)
        save(pages, *arguments)

    def counted(worker, overwritten):
        fenced.append(overwritten)
        fence(worker, overwritten)

    with monkeypatch.context() as patch:
        patch.setattr(Pages, "save", slow)
        patch.setattr(Worker, "_fence", counted)
        for index in (1, 2, 0, 3, 1, 0):
            assert engine.ask(salt, prompts[index])[0][0] == clean[index][0]
        engine.settle()
    blocks = [engine.stored(salt, prompt) for prompt in prompts]
    assert len(blocks[0]) == 21
    assert sum(map(len, blocks[1:])) > 2
    for found, prompt, (_, other) in zip(blocks, prompts, clean, strict=True):
        assert same(found, engine.stored(other, prompt))
    assert fenced


def test_an_attention_back_end_with_blocks_of_its_own_runs_uncached(
    start_engine, start_daemon, reference, monkeypatch
):
    monkeypatch.setattr("tests.engines.vllm.child.main", planted.serve_with_small_kernel_blocks)
    daemon = start_daemon()
    engine: Engine = start_engine(url=daemon.url, block_tokens=64)
    beginnings = [draw(50 + index, length) for index, length in enumerate((63, 60, 50, 40))]
    engine.generate(*(Prompt(tokens=tokens, max_tokens=4) for tokens in beginnings))
    prompts = [Prompt(tokens=tokens + draw(60, 100)) for tokens in beginnings]
    answers = engine.generate(*prompts)
    assert [a.tokens for a in answers] == [a.tokens for a in reference.generate(*prompts)]
    assert not any(answer.cached_tokens for answer in answers)
    assert "this model runs uncached" in engine.log
    assert "--block-size" in engine.log
    assert daemon.num_blocks == 0
    engine.close()
    daemon.close()
