"""What single requests find and leave behind. vLLM's own prefix cache is off: all hits are ours."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from tests.engines.vllm.engine import Daemon, Engine, wait_until
from tests.engines.vllm.messages import Answer, Prompt
from tests.engines.vllm.workload import Known, draw

BLOCK = 32


@dataclass
class Place:
    """An engine and its daemon, and what that must hold."""

    engine: Engine
    daemon: Daemon
    known: Known

    def ask(self, *prompts: Prompt) -> list[Answer]:
        """Submit all at once; check what hits, take note of what is stored, and wait for that."""
        expected = [
            0 if prompt.parameters.get("kvstore.skip_read") else self.known.hit_tokens(prompt)
            for prompt in prompts
        ]
        answers = self.engine.generate(*prompts)
        for prompt, answer in zip(prompts, answers, strict=True):
            if not prompt.parameters.get("kvstore.skip_write"):
                self.known.add(prompt, answer)
        assert [answer.cached_tokens for answer in answers] == expected
        self.daemon.wait_for_blocks(self.known.num_blocks)
        return answers


@pytest.fixture(scope="module")
def place(start_engine, start_daemon):
    daemon = start_daemon()
    engine = start_engine(url=daemon.url, block_tokens=BLOCK)
    place = Place(engine, daemon, Known(BLOCK))
    yield place
    engine.close()
    daemon.close()


@pytest.mark.parametrize("num_tokens", [1, 5, 31, 32, 33, 63, 64, 65, 96])
def test_prompts_of_every_length(place, reference, num_tokens):
    prompt = Prompt(tokens=draw(num_tokens, num_tokens), max_tokens=4)
    (right,) = reference.generate(prompt)
    (cold,) = place.ask(prompt)
    (warm,) = place.ask(prompt)
    assert cold.tokens == warm.tokens == right.tokens
    assert warm.cached_tokens == (num_tokens - 1) // BLOCK * BLOCK
    assert warm.finish_reason == "length"


def test_what_was_generated_is_found_too(place, reference):
    first = Prompt(tokens=draw(200, 40), max_tokens=60)
    (answer,) = place.ask(first)
    second = Prompt(tokens=first.tokens + answer.tokens + draw(201, 20), max_tokens=4)
    (warm,) = place.ask(second)
    assert warm.cached_tokens == 96  # of 40 + 60 tokens the last was not computed: 99
    assert warm.tokens == reference.generate(second)[0].tokens


def test_one_other_token_at_either_side_of_a_blocks_end(place, reference):
    tokens = draw(210, 100)
    place.ask(Prompt(tokens=tokens, max_tokens=2))
    others = []
    for position in (0, 1, 30, 31, 32, 33, 62, 63, 64, 65, 95, 96, 99):
        other = list(tokens)
        other[position] = tokens[position] % 500 + 3
        others.append(Prompt(tokens=tuple(other), max_tokens=2))
    right = reference.generate(*others)
    for prompt, answer in zip(others, right, strict=True):
        assert place.ask(prompt)[0].tokens == answer.tokens


def test_the_prompts_of_a_batch_hit_each_for_itself(place, reference):
    base = draw(220, 128)
    place.ask(Prompt(tokens=base, max_tokens=2))
    batch = [
        Prompt(tokens=base[:stop] + draw(221 + stop, 10), max_tokens=6)
        for stop in (0, 20, 32, 50, 64, 96, 127, 128)
    ]
    right = reference.generate(*batch)
    assert [a.tokens for a in place.ask(*batch)] == [a.tokens for a in right]


class TestParameters:
    def test_skip_read_computes_and_stores(self, place, reference):
        prompt = Prompt(tokens=draw(300, 80), max_tokens=2)
        place.ask(prompt)
        longer = replaced(prompt, tokens=prompt.tokens + draw(301, 40))
        before = place.known.num_blocks
        skipping = replaced(longer, parameters={"kvstore.skip_read": True})
        assert place.ask(skipping)[0].tokens == reference.generate(longer)[0].tokens
        assert place.known.num_blocks == before + 1  # the third of 120 tokens
        place.ask(longer)

    def test_skip_write_reads_and_stores_nothing(self, place):
        prompt = Prompt(tokens=draw(310, 80), max_tokens=2)
        place.ask(replaced(prompt, parameters={"kvstore.skip_write": True}))
        place.ask(prompt)  # nothing was there
        longer = replaced(
            prompt,
            tokens=prompt.tokens + draw(311, 80),
            parameters={"kvstore.skip_write": True},
        )
        assert place.ask(longer)[0].cached_tokens == 64
        assert place.ask(longer)[0].cached_tokens == 64

    def test_both(self, place):
        prompt = Prompt(tokens=draw(320, 80), max_tokens=2)
        place.ask(prompt)
        neither = {"kvstore.skip_read": True, "kvstore.skip_write": True}
        place.ask(replaced(prompt, parameters=neither))


def test_other_salts_see_nothing(place, reference):
    tokens = draw(330, 100)
    right = reference.generate(Prompt(tokens=tokens))[0].tokens
    for salt in (None, "one", "two"):
        prompt = Prompt(tokens=tokens, salt=salt)
        (cold,) = place.ask(prompt)
        (warm,) = place.ask(prompt)
        assert (cold.cached_tokens, warm.cached_tokens) == (0, 96)
        assert cold.tokens == warm.tokens == right


def test_the_engine_counts_external_tokens(place):
    prompt = Prompt(tokens=draw(340, 100), max_tokens=2)
    place.ask(prompt)
    before = place.engine.metrics()
    place.ask(prompt)
    after = place.engine.metrics()
    grown = {name: value - before.get(name, 0) for name, value in after.items()}
    assert grown["external_prefix_cache_hits"] == 96
    assert grown["external_prefix_cache_queries"] == 100
    assert grown["prefix_cache_hits"] == 0
    assert grown["prompt_tokens_cached_by_source:host"] == 96
    assert grown["prompt_tokens_by_source:external_kv_transfer"] == 96


@pytest.mark.parametrize("steps", [1, 2, 3])
def test_an_aborted_request_leaves_nothing_wrong(place, reference, steps):
    tokens = draw(400 + steps, 900)
    prompt = Prompt(tokens=tokens, max_tokens=20)
    aborted = replaced(prompt, abort_after_steps=steps)
    (answer,) = place.engine.generate(aborted)
    assert answer.finish_reason == "abort"
    right = reference.generate(prompt)[0].tokens
    assert place.engine.generate(prompt)[0].tokens == right
    place.known.add(prompt, reference.generate(prompt)[0])
    place.daemon.wait_for_blocks(place.known.num_blocks)
    place.ask(prompt)


def test_requests_that_end_while_they_load(start_engine, start_daemon, reference):
    daemon = start_daemon()
    engine = start_engine(url=daemon.url, block_tokens=BLOCK, connector={"load": "async"})
    prompt = Prompt(tokens=draw(410, 1500), max_tokens=4)
    (right,) = reference.generate(prompt)
    assert engine.generate(prompt)[0].tokens == right.tokens
    daemon.wait_for_blocks(1503 // BLOCK)
    used = usage(engine)
    for _ in range(5):
        first, second = engine.generate(replaced(prompt, abort_after_steps=1), prompt)
        assert first.finish_reason == "abort"
        assert (second.tokens, second.cached_tokens) == (right.tokens, 1472)
    wait_until(lambda: usage(engine) == used)
    engine.close()
    daemon.close()


def usage(engine: Engine) -> float:
    """Return the part of the engine's blocks that is in use, by a short request and whatever else."""
    engine.generate(Prompt(tokens=(7, 8, 9), max_tokens=2))
    return engine.metrics()["kv_cache_usage_perc"]


def replaced(prompt: Prompt, **changes: object) -> Prompt:
    """Return ``prompt`` with some fields changed."""
    fields = {name: getattr(prompt, name) for name in prompt.__struct_fields__}
    return Prompt(**{**fields, **changes})
