"""Codecs on real KV: how small, how fast, how wrong, and whether the model's answers change.

A model reads pieces of this project's own documents; the KV of each piece is cut into blocks, which every
codec encodes and decodes; those that it refuses are copied, as the disk does. ``stored``: the bytes that a
codec needs, without what fills up their room; ``slots``: what blocks, refused ones too, take on disk, with
their headers. Limit of speed: a plain copy of as many bytes. ``agreement`` of a lossy codec: answers, and
tokens up to the first other one, that are the same when the model goes on from KV that went through the codec
as when it goes on from its own.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import ml_dtypes
import numpy as np
import torch
from transformers import DynamicCache

from bench.report import Row, interleave, model_options, report, row, torch_facts
from engine_plugin.adapter import cache_keyword
from engine_plugin.models import load_model
from kvstore.cli.table import output_option
from kvstore.errors import CodecError
from kvstore.namespace import KVLayout, Namespace
from kvstore.tiers.codec import CODECS, FLOATS, Codec, PlanesLZ4
from kvstore.tiers.disk import slot_bytes_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

BLOCK_TOKENS = 16
PREFIX_TOKENS = 256
NEW_TOKENS = 16
ANSWER_TOKENS = 24
MIB = 1 << 20
DOCUMENTS = sorted((Path(__file__).parents[1] / "docs").rglob("*.md"))


@dataclass
class Piece:
    """A piece of text, the KV of its first tokens, and what the model answers to all of it."""

    tokens: list[int]
    blocks: list[NDArray[np.uint8]]
    answer: list[int]


class Reader:
    """Reads text with a model, and goes on from KV that somebody else gives it."""

    def __init__(self, model: Any, tokenizer: Any) -> None:
        """Find out the layout of the model's KV."""
        self.model = model
        text = "\n".join(path.read_text() for path in DOCUMENTS)
        self._tokens: list[int] = tokenizer(text)["input_ids"]
        config = model.config
        dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        dtype = str(model.dtype).removeprefix("torch.")
        self.layout = KVLayout(
            config.num_hidden_layers, config.num_key_value_heads, dim, dtype, BLOCK_TOKENS
        )

    def pieces(self, count: int) -> Iterator[Piece]:
        """Yield pieces that do not overlap, spread over the text."""
        length = PREFIX_TOKENS + NEW_TOKENS
        step = len(self._tokens) // count
        if step < length:
            raise click.ClickException(f"the documents have {len(self._tokens)} tokens: too few")
        for number in range(count):
            tokens = self._tokens[number * step : number * step + length]
            cache = DynamicCache(config=self.model.config)
            self._forward(tokens[:PREFIX_TOKENS], cache)
            blocks = self._cut(cache)
            yield Piece(tokens, blocks, self._answer(tokens, cache))

    def answer_from(self, piece: Piece, blocks: list[NDArray[np.uint8]]) -> list[int]:
        """Return the answer to ``piece`` when its prefix has ``blocks``."""
        cache = DynamicCache(config=self.model.config)
        whole = np.concatenate([self._view(block) for block in blocks], axis=3)
        like = self.model.device, self.model.dtype
        for layer, (keys, values) in enumerate(torch.from_numpy(whole.astype(np.float32))):
            cache.update(keys[None].to(*like), values[None].to(*like), layer)
        return self._answer(piece.tokens, cache)

    def _view(self, block: NDArray[np.uint8]) -> NDArray[Any]:
        found: NDArray[Any] = block.view(FLOATS[self.layout.dtype]).reshape(self.layout.shape)
        return found

    def _cut(self, cache: DynamicCache) -> list[NDArray[np.uint8]]:
        kv = torch.stack([torch.stack([x.keys[0], x.values[0]]) for x in cache.layers])
        numbers = kv.float().cpu().numpy().astype(FLOATS[self.layout.dtype])
        parts = np.split(numbers, PREFIX_TOKENS // BLOCK_TOKENS, axis=3)
        return [np.ascontiguousarray(part).reshape(-1).view(np.uint8) for part in parts]

    @torch.inference_mode()
    def _forward(self, tokens: list[int], cache: DynamicCache) -> int:
        ids = torch.tensor([tokens], device=self.model.device)
        given = {cache_keyword(self.model): cache}
        logits = self.model(input_ids=ids, use_cache=True, **given).logits
        return int(logits[0, -1].argmax())

    def _answer(self, tokens: list[int], cache: DynamicCache) -> list[int]:
        answer = [self._forward(tokens[PREFIX_TOKENS:], cache)]
        while len(answer) < ANSWER_TOKENS:
            answer.append(self._forward(answer[-1:], cache))
        return answer


def encoded(codec: Codec, block: NDArray[np.uint8]) -> bytes | None:
    """Return what is stored of ``block``; None: it is refused."""
    try:
        return codec.encode(block)
    except CodecError:
        return None


def decode_into(
    target: NDArray[np.uint8], codec: Codec, stored: bytes | None, block: NDArray[np.uint8]
) -> None:
    """Do what the disk does with ``block``, of which ``stored`` is there."""
    if stored is None:
        np.copyto(target, block)
    else:
        codec.decode(stored, target)


def sizes(codec: Codec, blocks: list[NDArray[np.uint8]]) -> Iterator[Row]:
    """How small."""
    case, total = f"codec_{codec.name}", sum(map(len, blocks))
    fit = sum(encoded(codec, block) is not None for block in blocks)
    needed = codec.pack if isinstance(codec, PlanesLZ4) else codec.encode
    named: Any = None if codec.name == "none" else codec.name
    namespace = Namespace(b"model", codec.layout, codec=named)
    plain, coded = (slot_bytes_of(namespace, plain=form) for form in (True, False))
    slots = fit * coded + (len(blocks) - fit) * plain
    yield row(case, "stored", sum(len(needed(block)) for block in blocks) / MIB, "MiB", total / MIB)
    yield row(case, "blocks that have room", fit, "", len(blocks))
    yield row(case, "slots", slots / MIB, "MiB", len(blocks) * plain / MIB)


def speed(codec: Codec, blocks: list[NDArray[np.uint8]], rounds: int) -> Iterator[Row]:
    """Rates."""
    stored = [encoded(codec, block) for block in blocks]
    target = np.empty_like(blocks[0])
    total = sum(map(len, blocks))

    def encode() -> None:
        for block in blocks:
            encoded(codec, block)

    def decode() -> None:
        for block, packed in zip(blocks, stored, strict=True):
            decode_into(target, codec, packed, block)

    def copy() -> None:
        for block in blocks:
            np.copyto(target, block)

    case = f"codec_{codec.name}"
    encode_s, decode_s, copy_s = interleave(rounds, encode, decode, copy)
    for metric, seconds in (("encode", encode_s), ("decode", decode_s)):
        value, limit = total / seconds / 1e9, total / copy_s / 1e9
        yield Row(case, metric, value, "GB/s", limit, limit / value)


def errors(codec: Codec, blocks: list[NDArray[np.uint8]]) -> Iterator[Row]:
    """How far elements are off, as parts of the largest element of their head."""
    heads = (*codec.layout.shape[:-2], -1)
    kind = FLOATS[codec.layout.dtype]
    off = []
    for block in blocks:
        back = np.empty_like(block)
        codec.decode(codec.encode(block), back)
        numbers, found = (b.view(kind).astype(np.float64).reshape(heads) for b in (block, back))
        off.append(np.abs(found - numbers) / np.abs(numbers).max(axis=-1, keepdims=True))
    case = f"codec_{codec.name}"
    yield Row(case, "largest error / largest of head", float(np.max(off)), "")
    yield Row(case, "mean error / largest of head", float(np.mean(off)), "")


def agreement(codec: Codec, reader: Reader, pieces: list[Piece]) -> Iterator[Row]:
    """Whether answers are the same."""
    same, until_other = 0, 0
    for piece in pieces:
        blocks = [np.empty_like(block) for block in piece.blocks]
        for block, target in zip(piece.blocks, blocks, strict=True):
            decode_into(target, codec, encoded(codec, block), block)
        answer = reader.answer_from(piece, blocks)
        pairs = list(zip(answer, piece.answer, strict=True))
        same += answer == piece.answer
        until_other += next((n for n, (a, b) in enumerate(pairs) if a != b), len(pairs))
    case = f"codec_{codec.name}"
    yield row(case, "answers that are the same", same, "", len(pieces))
    yield row(
        case, "tokens before the first other one", until_other, "", len(pieces) * ANSWER_TOKENS
    )


@click.command()
@click.option("--prompts", default=50, show_default=True, help="Pieces of text.")
@click.option("--rounds", default=5, show_default=True)
@model_options
@output_option
def main(prompts: int, rounds: int, path: str | None, dtype: str, output: str) -> None:
    """Measure codecs on the KV of a real model."""
    model, tokenizer, _ = load_model(path, getattr(torch, dtype))
    model.to("cuda" if torch.cuda.is_available() else "cpu")
    reader = Reader(model, tokenizer)
    pieces = list(reader.pieces(prompts))
    some = [block for piece in pieces[:8] for block in piece.blocks]
    rows: list[Row] = []
    for kind in CODECS.values():
        codec = kind(reader.layout)
        rows += [*sizes(codec, some), *speed(codec, some, rounds)]
        if not codec.lossless:
            rows += errors(codec, some)
        rows += agreement(codec, reader, pieces)
    facts = torch_facts(model) | {"block_bytes": reader.layout.block_bytes}
    report("codec", rows, output, **facts, ml_dtypes=ml_dtypes.__version__)


if __name__ == "__main__":
    main()
