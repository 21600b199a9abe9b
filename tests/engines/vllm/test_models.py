"""Other models, and other dtypes: what hits gives the same tokens as what is computed."""

from __future__ import annotations

import pytest

from tests.engines.vllm.messages import Prompt
from tests.engines.vllm.models import smollm2, write_model
from tests.engines.vllm.workload import draw

LENGTHS = (40, 130, 300, 700)


def prompts(seed: int, vocabulary: int = 512) -> list[Prompt]:
    """Return prompts that have nothing in common."""
    scale = vocabulary // 512
    return [
        Prompt(tokens=tuple(t * scale for t in draw(seed + n, n)), max_tokens=16) for n in LENGTHS
    ]


def check(engine, daemon, right, asked, block_tokens):
    """Answer cold and warm; the blocks are those of the prompts and answers, but for the last token."""
    cold = engine.generate(*asked)
    daemon.wait_for_blocks(sum((n + 15) // block_tokens for n in LENGTHS))
    warm = engine.generate(*asked)
    assert [a.tokens for a in cold] == [a.tokens for a in right]
    assert [a.tokens for a in warm] == [a.tokens for a in right]
    assert [a.cached_tokens for a in cold] == [0] * len(asked)
    assert [a.cached_tokens for a in warm] == [
        (n - 1) // block_tokens * block_tokens for n in LENGTHS
    ]


@pytest.mark.parametrize("kind", ["qwen3", "gemma3"])
def test_models_of_other_kinds(kind, tmp_path, start_engine, start_daemon):
    model = str(write_model(tmp_path / kind, kind))
    alone = start_engine(model=model)
    right = alone.generate(*prompts(1))
    alone.close()
    daemon = start_daemon()
    engine = start_engine(model=model, url=daemon.url, block_tokens=32)
    check(engine, daemon, right, prompts(1), 32)
    engine.close()
    daemon.close()


def test_other_weights_hit_nothing(tmp_path, start_engine, start_daemon):
    daemon = start_daemon()
    answers = []
    for seed in (1, 2):
        model = str(write_model(tmp_path / f"{seed}", "llama", seed=seed))
        engine = start_engine(model=model, url=daemon.url)
        answers.append(engine.generate(*prompts(1)))
        assert not any(answer.cached_tokens for answer in answers[-1])
        engine.close()
    assert answers[0] != answers[1]
    daemon.close()


@pytest.mark.skipif(smollm2() is None, reason="SmolLM2 was not converted by `make demo`")
def test_smollm2(start_engine, start_daemon):
    model = str(smollm2())
    asked = prompts(1, 49152)
    alone = start_engine(model=model)
    right = alone.generate(*asked)
    alone.close()
    daemon = start_daemon(dram="512MiB")
    engine = start_engine(model=model, url=daemon.url, block_tokens=64)
    check(engine, daemon, right, asked, 64)
    engine.close()
    daemon.close()


def test_bfloat16_says_what_it_says_with_vllms_own_cache(start_engine, start_daemon):
    """Its answers depend on how a prompt is cut, so that only hits of equal length can be compared."""
    daemon = start_daemon()
    engine = start_engine(url=daemon.url, dtype="bfloat16", prefix_caching=True, block_tokens=32)
    asked = prompts(1)
    hits = [(n - 1) // 32 * 32 for n in LENGTHS]
    engine.generate(*asked)
    daemon.wait_for_blocks(sum((n + 15) // 32 for n in LENGTHS))
    before = engine.external_hit_tokens
    own = [engine.generate(prompt)[0] for prompt in asked]
    assert engine.external_hit_tokens == before
    engine.forget()
    ours = [engine.generate(prompt)[0] for prompt in asked]
    assert engine.external_hit_tokens - before == sum(hits)
    assert [a.cached_tokens for a in own] == [a.cached_tokens for a in ours] == hits
    assert [a.tokens for a in own] == [a.tokens for a in ours]
    engine.close()
    daemon.close()
