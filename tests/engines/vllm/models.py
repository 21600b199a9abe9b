"""Tiny checkpoints with random weights, as vLLM reads them; without a tokenizer."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any, Literal

import numpy as np
from safetensors.numpy import save_file

Kind = Literal["llama", "qwen3", "gemma3"]

VOCABULARY = 512
LAYERS = 2
HIDDEN, INTERMEDIATE = 256, 512
HEADS, KV_HEADS, HEAD_DIM = 4, 2, 64
WINDOW = 64
"""Tokens that the sliding layers of the Gemma see: fewer than the prompts have."""
STD = 0.05
"""Large enough for wrong keys or values to change what is generated."""

ARCHITECTURE = {
    "llama": "LlamaForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "gemma3": "Gemma3ForCausalLM",
}


def write_model(directory: Path, kind: Kind, *, seed: int = 0) -> Path:
    """Write a checkpoint in float32 to ``directory`` and return it. Equal seeds give equal weights."""
    directory.mkdir(parents=True)
    layers = _GEMMA_LAYERS if kind == "gemma3" else LAYERS
    config = _config(kind, layers)
    (directory / "config.json").write_text(json.dumps(config))
    rng = np.random.default_rng(seed)
    tensors = {name: _weights(rng, shape, kind) for name, shape in _shapes(kind, layers).items()}
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})
    return directory


def smollm2() -> Path | None:
    """Return SmolLM2-135M where `make demo` or `make test` converted it before; or None."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    found = sorted(cache.glob("kvstore/models/SmolLM2-135M*/config.json"))
    return found[-1].parent if found else None


_GEMMA_LAYERS = 6
"""Five with a sliding window, and one that sees everything."""


def _config(kind: Kind, layers: int) -> dict[str, Any]:
    config: dict[str, Any] = {
        "architectures": [ARCHITECTURE[kind]],
        "model_type": {"gemma3": "gemma3_text"}.get(kind, kind),
        "dtype": "float32",
        "vocab_size": VOCABULARY,
        "hidden_size": HIDDEN,
        "intermediate_size": INTERMEDIATE,
        "num_hidden_layers": layers,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "max_position_embeddings": 16384,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": kind == "gemma3",
        "bos_token_id": 0,
        "eos_token_id": 1,
        "pad_token_id": 0,
    }
    if kind == "gemma3":
        config |= {
            "hidden_activation": "gelu_pytorch_tanh",
            "query_pre_attn_scalar": HEAD_DIM,
            "sliding_window": WINDOW,
            "layer_types": ["sliding_attention"] * (layers - 1) + ["full_attention"],
        }
    else:
        config |= {"hidden_act": "silu"}
    return config


def _shapes(kind: Kind, layers: int) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (VOCABULARY, HIDDEN),
        "model.norm.weight": (HIDDEN,),
    }
    if kind != "gemma3":
        shapes["lm_head.weight"] = (VOCABULARY, HIDDEN)
    layer: dict[str, tuple[int, ...]] = {
        "input_layernorm": (HIDDEN,),
        "post_attention_layernorm": (HIDDEN,),
        "self_attn.q_proj": (HEADS * HEAD_DIM, HIDDEN),
        "self_attn.k_proj": (KV_HEADS * HEAD_DIM, HIDDEN),
        "self_attn.v_proj": (KV_HEADS * HEAD_DIM, HIDDEN),
        "self_attn.o_proj": (HIDDEN, HEADS * HEAD_DIM),
        "mlp.gate_proj": (INTERMEDIATE, HIDDEN),
        "mlp.up_proj": (INTERMEDIATE, HIDDEN),
        "mlp.down_proj": (HIDDEN, INTERMEDIATE),
    }
    if kind in ("qwen3", "gemma3"):
        layer |= {"self_attn.q_norm": (HEAD_DIM,), "self_attn.k_norm": (HEAD_DIM,)}
    if kind == "gemma3":
        layer |= {"pre_feedforward_layernorm": (HIDDEN,), "post_feedforward_layernorm": (HIDDEN,)}
    for index in range(layers):
        for name, shape in layer.items():
            shapes[f"model.layers.{index}.{name}.weight"] = shape
    return shapes


def _weights(rng: np.random.Generator, shape: tuple[int, ...], kind: Kind) -> np.ndarray[Any, Any]:
    if len(shape) == 1:  # of a norm; Gemma's are counted from one
        return np.full(shape, 0 if kind == "gemma3" else 1, np.float32)
    return rng.normal(0, STD, shape).astype(np.float32)
