"""Conversations through two engines, the second started cold: the same tokens, and the hits as computed.

Twelve conversations share a system prompt and take five turns: sixty requests for each engine, twelve at
a time. One engine without connector says which tokens are right: in float32 they do not depend on how a
prompt is cut into steps, blocks or hits.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest

from tests.engines.vllm.engine import wait_until
from tests.engines.vllm.messages import Prompt
from tests.engines.vllm.workload import Chats, Known

if TYPE_CHECKING:
    from tests.engines.vllm.engine import Daemon, Engine
    from tests.engines.vllm.messages import Answer

NUM_CHATS, NUM_TURNS = 12, 5


def conversations() -> Chats:
    """Return the conversations, at their beginning."""
    return Chats(1, num_chats=NUM_CHATS, num_turns=NUM_TURNS, system_tokens=300, max_tokens=20)


@pytest.fixture(scope="module")
def right(reference):
    """Prompts and answers of every turn, without connector."""
    chats, turns = conversations(), []
    while not chats.over:
        prompts = chats.prompts()
        answers = reference.generate(*prompts)
        turns.append((prompts, answers))
        chats.answered(answers)
    return turns


@dataclass(frozen=True)
class Case:
    """Options of both engines."""

    block_tokens: int
    load: str
    prefix_caching: bool
    max_batched_tokens: int = 4096
    kv_tokens: int = 65536
    """Tokens that vLLM's own KV memory holds: all of the conversations, unless said otherwise."""

    @property
    def options(self) -> dict[str, Any]:
        """Of the engine."""
        return {
            "block_tokens": self.block_tokens,
            "num_blocks": self.kv_tokens // self.block_tokens,
            "prefix_caching": self.prefix_caching,
            "max_batched_tokens": self.max_batched_tokens,
            "max_model_tokens": 1024,
            "connector": {"load": self.load},
        }

    def __str__(self) -> str:
        """Name of the test."""
        cache = "cached" if self.prefix_caching else "uncached"
        return f"{self.block_tokens}-{self.load}-{cache}-{self.max_batched_tokens}"


ROOMY = [
    Case(32, "sync", prefix_caching=False),
    Case(32, "async", prefix_caching=True, max_batched_tokens=512),
    Case(64, "layerwise", prefix_caching=False, max_batched_tokens=512),
    Case(64, "sync", prefix_caching=True),
    Case(128, "async", prefix_caching=False),
    Case(128, "auto", prefix_caching=True, max_batched_tokens=512),
]
TIGHT = [
    Case(32, "sync", prefix_caching=True, max_batched_tokens=512, kv_tokens=2048),
    Case(32, "async", prefix_caching=False, max_batched_tokens=512, kv_tokens=1280),
    Case(64, "layerwise", prefix_caching=False, max_batched_tokens=512, kv_tokens=2048),
]


def ask_all(engine: Engine, right) -> list[list[Answer]]:
    """Take all turns; check the tokens."""
    turns = []
    for prompts, expected in right:
        answers = engine.generate(*prompts)
        assert [a.tokens for a in answers] == [a.tokens for a in expected]
        turns.append(answers)
    return turns


def stored_by(right, block_tokens: int) -> Known:
    """What is stored when all turns were taken."""
    known = Known(block_tokens)
    for prompts, answers in right:
        for prompt, answer in zip(prompts, answers, strict=True):
            known.add(prompt, answer)
    return known


@pytest.mark.parametrize("case", ROOMY, ids=str)
def test_a_cold_engine_answers_from_what_another_has_stored(
    case, right, start_engine, start_daemon
):
    daemon = start_daemon()
    first = start_engine(url=daemon.url, **case.options)
    turn_by_turn(first, daemon, case, right)
    first.close()

    everything = stored_by(right, case.block_tokens)
    daemon.wait_for_blocks(everything.num_blocks)
    second = start_engine(url=daemon.url, **case.options)
    local, total, external = Known(case.block_tokens), 0, 0
    for turn, answers in enumerate(ask_all(second, right)):
        prompts, _ = right[turn]
        hits = [everything.hit_tokens(prompt) for prompt in prompts]
        assert [answer.cached_tokens for answer in answers] == hits
        total += sum(hits)
        external += external_of(prompts, answers, local, hits, case)
    metrics = second.metrics()
    second.close()
    daemon.close()
    assert metrics["prefix_cache_hits"] + metrics["external_prefix_cache_hits"] == total
    assert metrics["external_prefix_cache_hits"] == external
    assert metrics["prompt_tokens_by_source:external_kv_transfer"] == external


def turn_by_turn(engine: Engine, daemon: Daemon, case: Case, right) -> None:
    """Take all turns with the engine that stores; what turns after the first hit is known, too."""
    known = Known(case.block_tokens)
    for turn, (prompts, expected) in enumerate(right):
        hits = [known.hit_tokens(prompt) for prompt in prompts]
        answers = engine.generate(*prompts)
        assert [a.tokens for a in answers] == [a.tokens for a in expected]
        if turn:  # in the first one the system prompt is being stored meanwhile
            assert [answer.cached_tokens for answer in answers] == hits
        for prompt, answer in zip(prompts, expected, strict=True):
            known.add(prompt, answer)
        daemon.wait_for_blocks(known.num_blocks)


def external_of(
    prompts: list[Prompt], answers: list[Answer], local: Known, hits: list[int], case: Case
) -> int:
    """Return the tokens of a turn that vLLM had not itself, and let it have them.

    Requests are taken in order, and what one loads or computes the next ones find in vLLM's own cache.
    """
    external = 0
    for prompt, hit in zip(prompts, hits, strict=True):
        external += hit - (local.hit_tokens(prompt) if case.prefix_caching else 0)
        local.add(prompt)
    for prompt, answer in zip(prompts, answers, strict=True):
        local.add(prompt, answer)
    return external


@pytest.mark.parametrize("case", TIGHT, ids=str)
def test_requests_that_are_preempted(case, right, start_engine, start_daemon):
    daemon = start_daemon()
    for number in range(2):
        engine = start_engine(url=daemon.url, **case.options)
        turns = ask_all(engine, right)
        metrics = engine.metrics()
        engine.close()
        assert metrics["num_preemptions"] > 0, "nothing was preempted: the test shows nothing"
        if number:
            everything = stored_by(right, case.block_tokens)
            for (prompts, _), answers in zip(right, turns, strict=True):
                for prompt, answer in zip(prompts, answers, strict=True):
                    assert answer.cached_tokens <= everything.hit_tokens(prompt)
            assert metrics["external_prefix_cache_hits"] > 0
    daemon.close()


def test_a_restarted_engine_hits_at_once(right, start_engine, start_daemon):
    daemon = start_daemon()
    case = ROOMY[0]
    first = start_engine(url=daemon.url, **case.options)
    prompts, expected = right[0]
    first.generate(*prompts)
    known = Known(case.block_tokens)
    for prompt, answer in zip(prompts, expected, strict=True):
        known.add(prompt, answer)
    daemon.wait_for_blocks(known.num_blocks)
    first.submit(right[1][0])
    next(first.replies())
    first.kill()  # in the middle of the second turn

    again = start_engine(url=daemon.url, **case.options)
    answers = again.generate(*prompts)
    assert [a.tokens for a in answers] == [a.tokens for a in expected]
    assert [a.cached_tokens for a in answers] == [known.hit_tokens(p) for p in prompts]
    second = again.generate(*right[1][0])
    assert [a.tokens for a in second] == [a.tokens for a in right[1][1]]
    for prompt, answer in zip(*right[1], strict=True):
        known.add(prompt, answer)
    daemon.wait_for_blocks(known.num_blocks)
    again.close()
    daemon.close()


def until_connected(engine: Engine, daemon: Daemon) -> None:
    """Ask for something else until scheduler and worker have found the daemon."""
    stranger = Prompt(tokens=tuple(range(5, 45)), max_tokens=1)

    def stored() -> bool:
        engine.generate(stranger)
        return daemon.count("stored_blocks") > 0 and daemon.count("lookups") > 0

    wait_until(stored)


@pytest.mark.parametrize("load", ["sync", "async"])
def test_a_restarted_daemon_gives_what_its_disk_has(load, right, start_engine, start_daemon):
    daemon = start_daemon(disk="256MiB")
    case = Case(32, load, prefix_caching=False)
    engine = start_engine(url=daemon.url, **case.options)
    prompts, expected = right[0]
    engine.generate(*prompts)
    known = Known(case.block_tokens)
    for prompt, answer in zip(prompts, expected, strict=True):
        known.add(prompt, answer)
    daemon.wait_for_blocks(known.num_blocks)
    daemon.drain()
    daemon.kill()
    daemon.start()
    until_connected(engine, daemon)
    answers = engine.generate(*prompts)
    assert [a.tokens for a in answers] == [a.tokens for a in expected]
    assert [a.cached_tokens for a in answers] == [known.hit_tokens(p) for p in prompts]
    assert daemon.count("moved_blocks", "disk", "dram") > 0
    engine.close()
    daemon.close()


def test_a_producer_only_stores_and_a_consumer_only_reads(right, start_engine, start_daemon):
    daemon = start_daemon()
    prompts, expected = right[0]
    known = Known(32)
    for prompt, answer in zip(prompts, expected, strict=True):
        known.add(prompt, answer)

    producer = start_engine(url=daemon.url, role="kv_producer")
    for _ in range(2):
        answers = producer.generate(*prompts)
        assert [(a.tokens, a.cached_tokens) for a in answers] == [(a.tokens, 0) for a in expected]
    daemon.wait_for_blocks(known.num_blocks)
    producer.close()

    consumer = start_engine(url=daemon.url, role="kv_consumer")
    answers = consumer.generate(*prompts)
    assert [a.tokens for a in answers] == [a.tokens for a in expected]
    assert [a.cached_tokens for a in answers] == [known.hit_tokens(p) for p in prompts]
    later, more = right[1]
    for _ in range(2):
        answers = consumer.generate(*later)
        assert [a.tokens for a in answers] == [a.tokens for a in more]
        assert [a.cached_tokens for a in answers] == [known.hit_tokens(p) for p in later]
    consumer.close()
    assert daemon.num_blocks == known.num_blocks
    daemon.close()


def test_an_engine_whose_scheduler_and_worker_are_processes(right, start_engine, start_daemon):
    daemon = start_daemon()
    case = Case(64, "async", prefix_caching=True, max_batched_tokens=512)
    everything = Known(case.block_tokens)
    for number in range(2):
        engine = start_engine(url=daemon.url, processes=bool(number), **case.options)
        for prompts, expected in right[:2]:
            answers = engine.generate(*prompts)
            assert [a.tokens for a in answers] == [a.tokens for a in expected]
            if number:
                hits = [everything.hit_tokens(prompt) for prompt in prompts]
                assert [answer.cached_tokens for answer in answers] == hits
        if not number:
            for prompts, expected in right[:2]:
                for prompt, answer in zip(prompts, expected, strict=True):
                    everything.add(prompt, answer)
            daemon.wait_for_blocks(everything.num_blocks)
        engine.close()
    daemon.close()
