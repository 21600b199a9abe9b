"""Layouts and namespaces: sizes, and digests that cannot be confused."""

from __future__ import annotations

import itertools
import subprocess
import sys
from dataclasses import replace

import pytest

from kvstore.errors import UsageError
from kvstore.namespace import KVLayout, Namespace, framed_digest
from kvstore.protocol import decode_namespace, encode_namespace

SMOLLM2 = KVLayout(30, 3, 64, "float32")


def test_sizes():
    assert SMOLLM2.token_bytes == 46_080
    assert SMOLLM2.block_bytes == 737_280
    assert SMOLLM2.shape == (30, 2, 3, 16, 64)
    assert KVLayout(32, 8, 128, "bfloat16").block_bytes == 2 << 20
    assert KVLayout(80, 8, 128, "bfloat16").block_bytes == 5 << 20
    latent = KVLayout(61, 1, 576, "bfloat16", attention="mla")
    assert latent.shape == (61, 16, 576)
    assert latent.block_bytes == 61 * 16 * 576 * 2


def test_every_field_of_the_layout_counts():
    variants = [
        SMOLLM2,
        replace(SMOLLM2, num_layers=3),
        replace(SMOLLM2, num_kv_heads=64, head_dim=3),
        replace(SMOLLM2, head_dim=65),
        replace(SMOLLM2, dtype="float16"),
        replace(SMOLLM2, dtype="bfloat16"),
        replace(SMOLLM2, block_tokens=32),
        replace(SMOLLM2, attention="mla"),
        replace(SMOLLM2, layer_start=1),
        replace(SMOLLM2, head_start=1),
        replace(SMOLLM2, opaque="avx512"),
        replace(SMOLLM2, opaque=""),
    ]
    assert len({layout.fingerprint for layout in variants}) == len(variants)
    assert len({Namespace(b"w", layout).digest for layout in variants}) == len(variants)


def test_every_field_of_the_namespace_counts_and_none_is_not_empty():
    variants = [
        Namespace(b"w", SMOLLM2, adapter, settings, tenant, salt, keys)
        for adapter, settings, tenant, salt, keys in itertools.product(
            (None, b"", b"ab", b"a"),
            (None, b"", b"b"),
            (None, "", "ab", "a"),
            (None, "", "c", "bc"),
            ("tokens", "hash"),
        )
    ]
    assert len({namespace.digest for namespace in variants}) == len(variants)


def test_framing():
    values = [
        ("ab", "c"),
        ("a", "bc"),
        ("abc",),
        (b"ab", "c"),
        (None, "abc"),
        ("", "abc"),
        (1, 23),
        (12, 3),
        ("1", 23),
    ]
    assert len({framed_digest(*value) for value in values}) == len(values)


def test_digest_is_a_fixed_function():
    """A golden value: blocks on disk and on other hosts depend on it, in every process."""
    golden = Namespace(b"weights", SMOLLM2, tenant="t", salt="s").digest.hex()
    assert golden == "404315130c1d1e963ba06d9a148d909d461c393f280883072644d49d192b79f3"
    program = (
        "from kvstore import KVLayout, Namespace;"
        "print(Namespace(b'weights', KVLayout(30, 3, 64, 'float32'), tenant='t', salt='s').digest.hex())"
    )
    output = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    ).stdout
    assert output.strip() == golden


@pytest.mark.parametrize(
    "change",
    [
        {"num_layers": 0},
        {"layer_start": 0.9},
        {"head_start": -1},
        {"attention": "MLA"},
        {"head_dim": -1},
        {"num_kv_heads": 1.5},
        {"block_tokens": True},
        {"block_tokens": 5000},
    ],
)
def test_impossible_layouts_are_refused(change):
    with pytest.raises(UsageError, match=next(iter(change))):
        replace(SMOLLM2, **change)


def test_wrong_types_are_refused():
    with pytest.raises(UsageError, match=r"float8_e4m3fn"):
        replace(SMOLLM2, dtype="fp8")
    for bad in ({"model": "name"}, {"model": b""}):
        with pytest.raises(UsageError, match="weights"):
            Namespace(**{"layout": SMOLLM2, "model": b"w", **bad})
    with pytest.raises(UsageError, match="salt"):
        Namespace(b"w", SMOLLM2, salt=b"bytes")
    with pytest.raises(UsageError, match="keys"):
        Namespace(b"w", SMOLLM2, keys="text")


def test_codecs_are_of_namespaces_of_their_own():
    plain = Namespace(b"w", SMOLLM2)
    spaces = [plain, *(replace(plain, codec=name) for name in ("lz4", "int8", "fp8"))]
    assert len({space.digest for space in spaces}) == 4
    assert all(decode_namespace(encode_namespace(space)) == space for space in spaces)
    with pytest.raises(UsageError, match="None or one of lz4, int8, fp8, got 'zstd'"):
        replace(plain, codec="zstd")


@pytest.mark.parametrize("change", [{"dtype": "int8"}, {"opaque": "tiles"}])
def test_only_codecs_without_loss_take_every_layout(change):
    layout = replace(SMOLLM2, **change)
    assert Namespace(b"w", layout, codec="lz4").codec == "lz4"
    for codec in ("int8", "fp8"):
        with pytest.raises(UsageError, match="use none or 'lz4'"):
            Namespace(b"w", layout, codec=codec)
