"""The prefix index: matching, inserting, evicting, and its memory.

Limits are memcmp and memcpy of the same bytes in the same run. With vllm importable, its block hashing
of the same prompt, which a hash-keyed cache pays before it can look anything up, stands beside.
"""

from __future__ import annotations

import tracemalloc
from typing import TYPE_CHECKING

import click
import numpy as np

from bench.report import Row, interleave, report, row
from kvstore.blocks import BlockTable
from kvstore.cli.table import output_option
from radix import RadixTree, check_invariants

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

BLOCK_TOKENS = 16
LONG = 128 * 1024
ROUNDS = 201
MICRO = 1e6


def prompt(rng: np.random.Generator, num_tokens: int) -> bytes:
    """Random tokens as key bytes."""
    return rng.integers(0, 50_000, num_tokens, dtype=np.int32).tobytes()


def fresh(first: int, count: int) -> NDArray[np.int32]:
    """Ids ``first`` and up."""
    return np.arange(first, first + count, dtype=np.int32)


def add(tree: RadixTree, key: bytes) -> None:
    """Insert ``key`` with ids that are not used yet."""
    found = tree.match(key)
    tree.insert(key, fresh(tree.num_blocks, len(key) // tree.key_bytes - found.num_blocks), found)


def long_prompt(rng: np.random.Generator) -> Iterator[Row]:
    """One conversation of 128K tokens: fully cached match, fresh insert."""
    key = prompt(rng, LONG)
    twin = bytes(bytearray(key))
    tree = RadixTree()
    add(tree, key)

    def match() -> None:
        assert len(tree.match(twin).block_ids()) == LONG // BLOCK_TOKENS

    compare_s, match_s = interleave(ROUNDS, lambda: key == twin, match)
    yield row("match_128k", "time", match_s * MICRO, "us", compare_s * MICRO)

    keys = [prompt(rng, LONG) for _ in range(41)]
    ids = [fresh(LONG * (number + 1), LONG // BLOCK_TOKENS) for number in range(41)]
    pending = iter(zip(keys, ids, strict=True))
    copy_s, insert_s = interleave(41, lambda: bytearray(key), lambda: tree.insert(*next(pending)))
    yield row("insert_128k", "time", insert_s * MICRO, "us", copy_s * MICRO)


def conversations(rng: np.random.Generator) -> Iterator[Row]:
    """10,000 conversations of 8K tokens that share a system prompt of 2K; a follow-up adds 512."""
    system = prompt(rng, 2048)
    keys = [system + prompt(rng, 6144) for _ in range(10_000)]
    tree = RadixTree()
    for key in keys:
        add(tree, key)
    asked = [keys[number] + prompt(rng, 512) for number in rng.integers(0, len(keys), ROUNDS)]
    stored = [keys[number] for number in rng.integers(0, len(keys), ROUNDS)]
    twins = [bytes(bytearray(key)) for key in stored]
    yield _look_up("follow_up_8k", tree, list(zip(stored, twins, strict=True)), asked)

    branches = iter(keys[number][: 4096 * 4] + prompt(rng, 512) for number in range(2000))
    copy_s, split_s = interleave(
        2000, lambda: bytearray(keys[0][: 4608 * 4]), lambda: add(tree, next(branches))
    )
    yield row("insert_split", "time", split_s * MICRO, "us", copy_s * MICRO)

    (evict_s,) = interleave(401, lambda: tree.evict(256))
    yield row("evict_block", "time", evict_s / 256 * MICRO, "us")


def million_blocks(rng: np.random.Generator) -> Iterator[Row]:
    """Look-ups of 8K-token prompts among 1K and 1M blocks; memory of the larger index."""
    for case, num_blocks in (("match_at_1k_blocks", 1024), ("match_at_1m_blocks", 1 << 20)):
        keys = [prompt(rng, 8192) for _ in range(num_blocks // 512)]
        tree = RadixTree()
        for key in keys:
            add(tree, key)
        stored = [keys[number] for number in rng.integers(0, len(keys), ROUNDS)]
        twins = [bytes(bytearray(key)) for key in stored]
        asked = [keys[number] + b"\0" * 64 for number in rng.integers(0, len(keys), ROUNDS)]
        yield _look_up(case, tree, list(zip(stored, twins, strict=True)), asked)


def _look_up(
    case: str, tree: RadixTree, pairs: list[tuple[bytes, bytes]], asked: list[bytes]
) -> Row:
    """Match prompts picked at random, beside memcmp of others picked at random."""
    compared, followed = iter(pairs), iter(asked)

    def compare() -> None:
        left, right = next(compared)
        assert left == right

    def match() -> None:
        assert len(tree.match(next(followed)).block_ids()) == 512

    compare_s, match_s = interleave(ROUNDS, compare, match)
    return row(case, "time", match_s * MICRO, "us", compare_s * MICRO)


def memory(rng: np.random.Generator) -> Iterator[Row]:
    """Bytes of tree and block table for each block, at 1M blocks in 1,980 branching prompts."""
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        tree = RadixTree()
        table = BlockTable(2)
        stems: list[bytes] = []
        key, found = b"", tree.match(b"")
        while tree.num_blocks < 1 << 20:
            stem = stems[int(rng.integers(0, len(stems)))] if len(stems) > 100 else b""
            cut = int(rng.integers(0, len(stem) // 64 + 1)) * 64
            key = stem[:cut] + prompt(rng, 8192)
            found = tree.match(key)
            tree.insert(key, table.allocate(len(key) // 64 - found.num_blocks, 0), found)
            if len(stems) < 400:
                stems.append(key)
        key, found = b"", tree.match(b"")
        stems.clear()
        after, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    check_invariants(tree)
    spare = table.nbytes * (1 - table.num_blocks / len(table.states))
    yield row(
        "index_bytes_per_block",
        "tree and table",
        (after - before - spare) / tree.num_blocks,
        "bytes",
    )
    tree_bytes = after - before - table.nbytes
    yield row("index_bytes_per_block", "tree", tree_bytes / tree.num_blocks, "bytes", 64.0)


def vllm_hashing(rng: np.random.Generator) -> Iterator[Row]:
    """The chained block hashes of a 128K prompt, as vLLM computes them for every request."""
    try:
        from vllm.utils.hashing import sha256  # type: ignore[import-not-found, unused-ignore]
        from vllm.v1.core.kv_cache_utils import (  # type: ignore[import-not-found, unused-ignore]
            hash_block_tokens,
            init_none_hash,
        )
    except ImportError:
        return
    tokens = np.frombuffer(prompt(rng, LONG), np.int32).tolist()
    init_none_hash(sha256)

    def chain() -> None:
        parent = None
        for start in range(0, LONG, BLOCK_TOKENS):
            parent = hash_block_tokens(sha256, parent, tokens[start : start + BLOCK_TOKENS], None)

    (hash_s,) = interleave(5, chain)
    yield row("vllm_hash_128k", "time", hash_s * MICRO, "us")


@click.command()
@output_option
def main(output: str) -> None:
    """Measure the prefix index."""
    rng = np.random.default_rng(0)
    parts = (long_prompt, conversations, million_blocks, memory, vllm_hashing)
    report("index", (line for part in parts for line in part(rng)), output)


if __name__ == "__main__":
    main()
