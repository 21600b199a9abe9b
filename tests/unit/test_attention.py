"""Attention of new tokens over a prefix, against float64 arithmetic, and its Transformers hook."""

from __future__ import annotations

import inspect
import itertools
import math
from typing import TYPE_CHECKING, Any

import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.functional import scaled_dot_product_attention
from transformers.masking_utils import (
    bidirectional_mask_function,
    causal_mask_function,
    sliding_window_causal_mask_function,
)

from engine_plugin import attention
from engine_plugin.attention import BACKENDS, Backend, attend
from kvstore.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import Tensor

HEADS = [(3, 3), (6, 2), (9, 3), (8, 1)]
LENGTHS = [
    *((1, 1), (1, 2), (1, 33), (2, 2), (2, 3), (15, 15), (15, 31), (16, 16), (16, 32)),
    *((17, 33), (31, 64), (32, 63), (33, 97), (64, 600), (65, 130), (200, 1100), (513, 513)),
]

# ---------------------------------------------------------------------------- the reference


def expected(query: Tensor, key: Tensor, value: Tensor, scale: float | None = None) -> Tensor:
    """Compute it in float64 from the definition: query ``i`` sees keys ``0 .. kv - q + i``."""
    group = query.shape[1] // key.shape[1]
    query, key, value = (x.detach().double().cpu() for x in (query, key, value))
    key, value = (x.repeat_interleave(group, dim=1) for x in (key, value))
    scores = query @ key.mT * (query.shape[-1] ** -0.5 if scale is None else scale)
    new, total = scores.shape[-2:]
    last_visible = torch.arange(total - new, total)
    hidden = torch.arange(total) > last_visible[:, None]
    return scores.masked_fill(hidden, -math.inf).softmax(-1) @ value


def assert_close(
    actual: Tensor, query: Tensor, key: Tensor, value: Tensor, scale: float | None = None
) -> None:
    """Bound the error by that of sums in fp32, or by the rounding of 16-bit results.

    Weights and partial results are rounded to 16 bits (half a unit each: ``eps / 2``), at most
    three times on the way, relative to values no larger than the largest one.
    """
    reference = expected(query, key, value, scale)
    assert (actual.shape, actual.dtype) == (query.shape, query.dtype)
    error = (actual.double().cpu() - reference).abs().max().item()
    if query.dtype == torch.float32:
        assert error <= 3e-6
    else:
        eps = torch.finfo(query.dtype).eps
        assert error <= 1.5 * eps * value.abs().max().item()


def states(
    heads: tuple[int, int],
    lengths: tuple[int, int],
    dtype: torch.dtype = torch.float32,
    *,
    batch: int = 1,
    dim: int = 16,
    device: str = "cpu",
) -> tuple[Tensor, Tensor, Tensor]:
    """Return random query, key, value as a model makes them: heads behind tokens in memory."""
    generator = torch.Generator().manual_seed(1)
    shapes = [(batch, lengths[i > 0], heads[i > 0], dim) for i in range(3)]
    made = (torch.randn(shape, generator=generator).to(device, dtype) for shape in shapes)
    query, key, value = (x.transpose(1, 2) for x in made)
    return query, key, value


# ------------------------------------------------------------------------------- back ends


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


ON_DEVICES = [
    pytest.param(device, name, marks=[pytest.mark.gpu] if device == "cuda" else [])
    for device in ("cpu", "cuda")
    for name, backend in BACKENDS.items()
    if backend.device_type in {None, device}
]


def skip_unless_usable(device: str, name: str, dtype: torch.dtype, dim: int = 16) -> None:
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    reason = {row[0]: row[2] for row in attention.describe(device, dtype, dim)}[name]
    if reason:
        pytest.skip(f"{name} on {device}: {reason}")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("device", "name"), ON_DEVICES)
def test_equals_the_reference(device: str, name: str, dtype: torch.dtype) -> None:
    skip_unless_usable(device, name, dtype)
    for heads in HEADS:
        for lengths in LENGTHS:
            query, key, value = states(heads, lengths, dtype, device=device)
            assert_close(attend(query, key, value, backend=name), query, key, value)


@pytest.mark.parametrize(("device", "name"), ON_DEVICES)
def test_batches_and_views_of_larger_buffers(device: str, name: str) -> None:
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    skip_unless_usable(device, name, dtype)
    for new, total in [(1, 33), (16, 48), (17, 17), (33, 47)]:
        query, _, _ = states((6, 2), (new, total), dtype, batch=2, device=device)
        generator = torch.Generator().manual_seed(2)
        buffer = torch.randn(2, 2, 2, 64, 16, generator=generator).to(device, dtype)
        buffer[..., total:, :] = math.nan
        key, value = buffer.narrow(3, 0, total)
        before = buffer.clone()
        assert_close(attend(query, key, value, backend=name), query, key, value)
        assert torch.equal(buffer.nan_to_num(), before.nan_to_num())


@pytest.mark.parametrize(("device", "name"), ON_DEVICES)
def test_head_dimension_is_not_last_in_memory(device: str, name: str) -> None:
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    skip_unless_usable(device, name, dtype)
    made = states((6, 2), (9, 40), dtype, device=device)
    query, key, value = (x.mT.contiguous().mT for x in made)
    assert key.stride(-1) != 1
    assert_close(attend(query, key, value, backend=name), query, key, value)


@given(
    batch=st.integers(1, 3),
    kv_heads=st.integers(1, 3),
    group=st.integers(1, 4),
    new=st.integers(1, 70),
    old=st.integers(0, 70),
    dim=st.integers(1, 40),
    name=st.sampled_from([name for name in BACKENDS if BACKENDS[name].device_type != "cuda"]),
)
@settings(max_examples=100, deadline=None)
def test_any_shape(
    batch: int, kv_heads: int, group: int, new: int, old: int, dim: int, name: str
) -> None:
    heads = (kv_heads * group, kv_heads)
    query, key, value = states(heads, (new, old + new), batch=batch, dim=dim)
    assert_close(attend(query, key, value, backend=name), query, key, value)


def test_the_prefix_outweighs_the_new_tokens_and_the_reverse() -> None:
    query, key, value = states((4, 2), (5, 30))
    for favoured in (slice(0, 25), slice(25, 30)):
        loud = key.clone()
        loud[:, :, favoured] *= 40
        assert_close(attend(query, loud, value), query, loud, value)


def test_scale() -> None:
    query, key, value = states((4, 2), (5, 30))
    for name in ("prefix_split", "lower_right", "masked"):
        for new in (1, 5):
            last = query[:, :, :new]
            actual = attend(last, key, value, scale=0.7, backend=name)
            assert_close(actual, last, key, value, 0.7)


def _top_left(query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
    return scaled_dot_product_attention(
        query, key, value, is_causal=True, scale=scale, enable_gqa=True
    )


def test_a_mask_aligned_at_the_top_left_would_be_noticed() -> None:
    query, key, value = states((6, 2), (16, 17))
    with pytest.raises(AssertionError):
        assert_close(_top_left(query, key, value, 0.25), query, key, value)


def test_gradients_after_inference() -> None:
    query, key, value = states((6, 2), (5, 12))
    with torch.inference_mode():
        attend(query, key, value, backend="masked")
    leaves = [x.detach().clone().requires_grad_() for x in (query, key, value)]
    attend(*leaves).square().sum().backward()
    exact = [x.detach().double().requires_grad_() for x in (query, key, value)]
    group = [exact[0], *(x.repeat_interleave(3, dim=1) for x in exact[1:])]
    hidden = torch.ones(5, 12, dtype=torch.bool).triu(8)
    scores = (group[0] @ group[1].mT / 4).masked_fill(hidden, -math.inf)
    (scores.softmax(-1) @ group[2]).square().sum().backward()
    for leaf, right in zip(leaves, exact, strict=True):
        assert leaf.grad is not None
        assert right.grad is not None
        torch.testing.assert_close(leaf.grad.double(), right.grad, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("query", "key", "value"),
    [
        ((1, 4, 5, 8), (1, 4, 4, 8), None),  # more queries than keys
        ((1, 4, 0, 8), (1, 4, 4, 8), None),  # nothing new
        ((1, 4, 2, 8), (1, 3, 4, 8), None),  # 3 does not divide 4
        ((1, 4, 2, 8), (1, 0, 4, 8), None),
        ((1, 4, 2, 8), (2, 4, 4, 8), None),
        ((1, 4, 2, 8), (1, 4, 4, 9), None),
        ((1, 4, 2, 8), (1, 4, 4, 8), (1, 4, 5, 8)),
        ((4, 2, 8), (4, 4, 8), None),
    ],
)
def test_impossible_shapes(
    query: tuple[int, ...], key: tuple[int, ...], value: tuple[int, ...] | None
) -> None:
    with pytest.raises(UsageError, match="1 <= q <= kv"):
        attend(torch.zeros(query), torch.zeros(key), torch.zeros(value or key))


def test_mixed_dtypes() -> None:
    query, key, value = states((2, 2), (2, 3))
    with pytest.raises(UsageError, match="float64"):
        attend(query, key.double(), value)


# ---------------------------------------------------------------------------------- choice


@pytest.fixture
def fresh_choice() -> Iterator[None]:
    caches = (attention.choose, attention._try)
    for function in caches:
        function.cache_clear()
    yield
    for function in caches:
        function.cache_clear()


def _broken(*_: object) -> Tensor:
    raise RuntimeError("no kernel image\nlong story")


@pytest.mark.usefixtures("fresh_choice")
@pytest.mark.parametrize(
    ("run", "reason"),
    [(_broken, "RuntimeError: no kernel image"), (_top_left, "wrong result")],
)
def test_what_raises_or_aligns_elsewhere_is_passed_over(
    monkeypatch: pytest.MonkeyPatch, run: Callable[..., Tensor], reason: str
) -> None:
    monkeypatch.setitem(BACKENDS, "prefix_split", Backend("prefix_split", "cpu", run))
    rows = {row[0]: row[1:] for row in attention.describe("cpu", torch.float32)}
    assert rows["prefix_split"][0] is False
    assert rows["prefix_split"][1].startswith(reason)
    assert attention.choose("cpu", torch.float32, 64).name == "lower_right"
    with pytest.raises(UsageError, match=reason):
        attention.choose("cpu", torch.float32, 64, "prefix_split")


def test_choice_on_the_processor() -> None:
    rows = attention.describe("cpu", torch.bfloat16)
    assert [row[0] for row in rows] == list(BACKENDS)
    assert [row[0] for row in rows if row[1]] == ["prefix_split", "lower_right", "masked"]
    assert attention.choose("cpu", torch.bfloat16, 64).name == "prefix_split"


@pytest.mark.usefixtures("fresh_choice")
def test_the_choice_ignores_default_device_and_dtype() -> None:
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device("meta"):
            assert attention.choose("cpu", torch.float32, 64).name == "prefix_split"
    finally:
        torch.set_default_dtype(torch.float32)


def test_unknown_or_foreign_back_ends_are_refused() -> None:
    with pytest.raises(UsageError, match="choose one of flash_attn, varlen_attn"):
        attention.choose("cpu", torch.float32, 64, "flash")
    with pytest.raises(UsageError, match="varlen_attn: serves cuda only"):
        attention.choose("cpu", torch.float32, 64, "varlen_attn")
    with pytest.raises(UsageError, match="on cpu"):
        attention.choose("cpu", torch.int64, 64)


def test_doctor_rows() -> None:
    rows = list(attention.doctor_rows())
    assert rows[-1] == ("attention on cpu", "ok", "prefix_split")
    assert len(rows) == 1 + torch.cuda.is_available()


# ---------------------------------------------------------------------------- Transformers

IMPLEMENTATIONS = ("eager", "sdpa", "kvstore")
TOKENS = 37


def _model(name: str, **config: Any) -> transformers.PreTrainedModel:
    torch.manual_seed(3)
    sizes = {"vocab_size": 61, "hidden_size": 48, "num_attention_heads": 6}
    sizes |= {"num_key_value_heads": 2, "num_hidden_layers": 2, "intermediate_size": 32}
    if name == "gpt2":
        sizes = {"vocab_size": 61, "n_embd": 48, "n_head": 6, "n_layer": 2}
    settings = transformers.AutoConfig.for_model(name, **(sizes | config))
    model = transformers.AutoModelForCausalLM.from_config(settings, attn_implementation="eager")
    return model.eval()


@pytest.fixture(scope="module")
def models() -> dict[str, transformers.PreTrainedModel]:
    attention.register()
    return {name: _model(name) for name in ("llama", "gpt2")}


@pytest.fixture(params=["llama", "gpt2"])
def model(
    request: pytest.FixtureRequest, models: dict[str, transformers.PreTrainedModel]
) -> transformers.PreTrainedModel:
    attention.register()
    model = models[request.param]
    model.set_attn_implementation("kvstore")
    return model


def tokens(batch: int = 1, length: int = TOKENS) -> Tensor:
    return torch.randint(0, 61, (batch, length), generator=torch.Generator().manual_seed(5))


@torch.inference_mode()
def logits(
    model: transformers.PreTrainedModel,
    ids: Tensor,
    chunks: tuple[int, ...] = (),
    cache: object = None,
    **arguments: Any,
) -> Tensor:
    """Run ``chunks`` tokens at a time, then the rest; an ``attention_mask`` is cut to fit."""
    mask, positions = (arguments.pop(key, None) for key in ("attention_mask", "position_ids"))
    bounds = [0, *(sum(chunks[: i + 1]) for i in range(len(chunks))), ids.shape[1]]
    if chunks and cache is None:
        cache = transformers.DynamicCache(config=model.config)
    parameters = inspect.signature(type(model.base_model).forward).parameters
    outputs = []
    for start, stop in itertools.pairwise(bounds):
        step = dict(arguments)
        if cache is not None:
            step["cache" if "cache" in parameters else "past_key_values"] = cache
        if mask is not None:
            step["attention_mask"] = mask[:, :stop]
        if positions is not None:
            step["position_ids"] = positions[:, start:stop]
        outputs.append(model(ids[:, start:stop], use_cache=cache is not None, **step).logits)
    return torch.cat(outputs, dim=1)


def with_implementation(model: transformers.PreTrainedModel, name: str, **run: Any) -> Tensor:
    model.set_attn_implementation(name)
    return logits(model, **run)


def assert_same_logits(actual: Tensor, right: Tensor) -> None:
    torch.testing.assert_close(actual, right, atol=1e-4, rtol=0)
    assert right.std() > 1e-2


@pytest.mark.parametrize("chunks", [(), (16,), (15, 1), (17, 16), (1, 1, 32), (36,)], ids=str)
def test_chunks_and_implementations_agree(
    model: transformers.PreTrainedModel, chunks: tuple[int, ...]
) -> None:
    right = with_implementation(model, "eager", ids=tokens())
    for name in IMPLEMENTATIONS:
        assert_same_logits(with_implementation(model, name, ids=tokens(), chunks=chunks), right)


def test_rows_with_padding_equal_rows_without(model: transformers.PreTrainedModel) -> None:
    ids, pads = tokens(3), (0, 5, 11)
    mask = torch.arange(TOKENS) >= torch.tensor(pads)[:, None]
    positions = (mask.long().cumsum(-1) - 1).clamp(min=0)
    for chunks in ((), (16,), (36,)):
        batch = logits(model, ids, chunks, attention_mask=mask.long(), position_ids=positions)
        assert batch.isfinite().all()
        for row, pad in enumerate(pads):
            alone = logits(model, ids[row : row + 1, pad:])
            assert_same_logits(batch[row : row + 1, pad:], alone)


def test_padding_behind(model: transformers.PreTrainedModel) -> None:
    mask = torch.ones(1, TOKENS, dtype=torch.long)
    mask[:, 30:] = 0
    padded = logits(model, tokens(), attention_mask=mask)[:, :30]
    assert_same_logits(padded, logits(model, tokens()[:, :30]))


def test_static_cache(model: transformers.PreTrainedModel) -> None:
    cache = transformers.StaticCache(config=model.config, max_cache_len=64)
    assert_same_logits(logits(model, tokens(), (10, 20, 1), cache), logits(model, tokens()))


def test_packed_sequences(model: transformers.PreTrainedModel) -> None:
    positions = torch.cat([torch.arange(20), torch.arange(TOKENS - 20)])[None]
    packed = logits(model, tokens(), position_ids=positions)
    assert_same_logits(packed[:, :20], logits(model, tokens()[:, :20]))
    assert_same_logits(packed[:, 20:], logits(model, tokens()[:, 20:]))


def test_generation(model: transformers.PreTrainedModel) -> None:
    results = []
    for name in IMPLEMENTATIONS:
        model.set_attn_implementation(name)
        results.append(model.generate(tokens(), max_new_tokens=12, do_sample=False, pad_token_id=0))
    assert all(torch.equal(result, results[0]) for result in results)


@pytest.mark.parametrize(
    ("name", "config"),
    [
        ("mistral", {"sliding_window": 8}),
        ("llama", {"is_causal": False}),
        ("llama", {"head_dim": 10, "num_key_value_heads": 1}),
    ],
    ids=str,
)
def test_other_masks_and_shapes(name: str, config: dict[str, Any]) -> None:
    attention.register()
    model = _model(name, **config)
    for chunks in ((), (16,)) if config.get("is_causal", True) else ((),):
        right = with_implementation(model, "eager", ids=tokens(), chunks=chunks)
        actual = with_implementation(model, "kvstore", ids=tokens(), chunks=chunks)
        assert_same_logits(actual, right)


def test_soft_capping_is_refused() -> None:
    attention.register()
    model = _model("gemma2", head_dim=8)
    model.set_attn_implementation("kvstore")
    with pytest.raises(UsageError, match=r"softcap.*attn_implementation='eager'"):
        logits(model, tokens())


@pytest.mark.usefixtures("fresh_choice")
def test_the_registered_back_end_runs(
    monkeypatch: pytest.MonkeyPatch, model: transformers.PreTrainedModel
) -> None:
    seen: list[tuple[int, int]] = []

    def spy(query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        seen.append((query.shape[2], key.shape[2]))
        return attention._masked(query, key, value, scale)

    monkeypatch.setitem(BACKENDS, "spy", Backend("spy", "cpu", spy))
    attention.register(backend="spy")
    logits(model, tokens(), (16, 20))
    attention.register()
    assert seen[1:] == [(16, 16)] * 2 + [(20, 36)] * 2 + [(1, 37)] * 2  # the first is the trial
    with pytest.raises(UsageError, match="no attention back end 'spi'"):
        attention.register(backend="spi")


MASK = {
    "batch_size": 1,
    "q_length": 4,
    "kv_length": 12,
    "q_offset": 8,
    "kv_offset": 0,
    "mask_function": causal_mask_function,
    "attention_mask": None,
    "allow_is_causal_skip": True,
}


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"q_offset": 0, "kv_length": 4},
        {"attention_mask": torch.ones(1, 12, dtype=torch.bool)},
        {"attention_mask": torch.arange(16)[None] < 12},
    ],
    ids=lambda change: "+".join(sorted(change)),
)
def test_no_mask_where_attend_masks(change: dict[str, Any]) -> None:
    assert attention.transformers_mask(**(MASK | change)) is None


@pytest.mark.parametrize(
    "change",
    [
        {"allow_is_causal_skip": False},
        {"attention_mask": torch.arange(12)[None] > 2},
        {"attention_mask": torch.ones(1, 11, dtype=torch.bool)},
        {"mask_function": sliding_window_causal_mask_function(100), "local_size": 100},
        {
            "mask_function": bidirectional_mask_function,
            "allow_is_causal_skip": False,
            "allow_is_bidirectional_skip": True,
        },
        {"q_offset": 0},
        {"q_offset": torch.tensor(8)},
        {"kv_offset": 1, "q_offset": 9},
    ],
    ids=lambda change: "+".join(sorted(change)),
)
def test_a_mask_wherever_attend_would_not_do(change: dict[str, Any]) -> None:
    mask = attention.transformers_mask(**(MASK | change))
    assert mask is not None
    assert mask.shape == (1, 1, 4, 12)


def test_what_the_hook_refuses() -> None:
    query, key, value = states((4, 2), (3, 9))
    layer = torch.nn.Module()
    for refused in ({"dropout": 0.1}, {"sliding_window": 8}, {"s_aux": torch.zeros(4)}):
        with pytest.raises(UsageError, match=next(iter(refused))):
            attention.transformers_attention(layer, query, key, value, None, **refused)
    output, weights = attention.transformers_attention(
        layer, query, key, value, None, sliding_window=9, dropout=0.0
    )
    assert weights is None
    assert_close(output.transpose(1, 2), query, key, value)


def test_a_layer_that_is_not_causal_sees_everything() -> None:
    query, key, value = states((4, 2), (9, 9))
    layer = torch.nn.Module()
    layer.is_causal = False  # type: ignore[assignment]
    output, _ = attention.transformers_attention(layer, query, key, value, None)
    for row in range(9):
        one = query[:, :, row : row + 1]
        assert_close(output.transpose(1, 2)[:, :, row : row + 1], one, key, value)
