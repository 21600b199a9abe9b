"""Token ids to key bytes; media spans."""

from __future__ import annotations

from array import array

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.errors import UsageError
from kvstore.namespace import KVLayout, Namespace
from kvstore.tokens import MediaSpan, block_keys
from radix import TokenError, token_bytes

EXPECTED = b"\x01\x00\x00\x00\x00\x01\x00\x00\xff\xff\xff\x7f"
IDS = [1, 256, 2**31 - 1]


@pytest.mark.parametrize(
    "tokens",
    [
        IDS,
        tuple(IDS),
        array("q", IDS),
        np.array(IDS),
        np.array(IDS, np.uint32),
        np.array(IDS, ">i4"),
        np.array([0, *IDS])[1:],
        np.repeat(np.array(IDS), 2)[::2],
        [np.int64(1), 256, np.uint32(2**31 - 1)],
        EXPECTED,
    ],
)
def test_every_int_sequence_gives_the_same_bytes(tokens):
    assert token_bytes(tokens) == EXPECTED


def test_torch_tensors():
    torch = pytest.importorskip("torch")
    assert token_bytes(torch.tensor(IDS)) == EXPECTED
    assert token_bytes(torch.tensor(IDS, dtype=torch.int32)) == EXPECTED
    for bad in (torch.tensor(IDS).float(), torch.tensor([True]), torch.tensor([IDS])):
        with pytest.raises(TokenError):
            token_bytes(bad)


def test_range_and_empty():
    assert token_bytes(range(3)) == np.arange(3, dtype="<i4").tobytes()
    for empty in ([], (), np.empty(0), np.empty(0, np.int32), b""):
        assert token_bytes(empty) == b""


@pytest.mark.parametrize(
    ("tokens", "says"),
    [
        ([1, 2.0], "float"),
        ([1, True], "bool"),
        ([1, None], "NoneType"),
        ([[1], [2]], "list"),
        ([1, -5], "-5"),
        ([2**31], "2147483648"),
        ([-(2**40)], "-1099511627776"),
        ([2**80], str(2**80)),
        (np.array([1.0]), "float64"),
        (np.array([True]), "bool"),
        (np.array([[1, 2]]), r"\(1, 2\)"),
        (np.array([3, -1]), "-1"),
        (np.array([2**31]), "2147483648"),
        (np.array([2**63], np.uint64), str(2**63)),
        ("12", "str"),
        (bytearray(b"\0\0\0\0"), "bytearray"),
        (b"123", "3 bytes"),
        (5, "int"),
        (None, "NoneType"),
        ({1, 2}, "set"),
        (iter([1]), "iterator"),
    ],
)
def test_anything_else_is_refused_and_named(tokens, says):
    with pytest.raises(TokenError, match=says):
        token_bytes(tokens)


@given(st.lists(st.integers(-(2**33), 2**33), max_size=20))
def test_refuses_exactly_what_is_outside_int32(ids):
    if all(0 <= i < 2**31 for i in ids):
        assert np.frombuffer(token_bytes(ids), "<i4").tolist() == ids
    else:
        with pytest.raises(TokenError):
            token_bytes(ids)


LAYOUT = KVLayout(1, 1, 8, "float32", block_tokens=8)
NAMESPACE = Namespace(b"w", LAYOUT)


def media_blocks(*spans, tokens=range(32), namespace=NAMESPACE):
    key = block_keys(namespace, list(tokens), spans)
    return [key[i : i + 32] for i in range(0, len(key), 32)]


PLAIN = media_blocks()
CAT, DOG = b"c" * 32, b"d" * 32


def test_a_span_changes_exactly_the_blocks_that_it_touches():
    assert [a == b for a, b in zip(media_blocks(MediaSpan(7, 10, CAT)), PLAIN, strict=True)] == [
        False,
        False,
        False,
        True,
    ]
    assert [a == b for a, b in zip(media_blocks(MediaSpan(8, 8, CAT)), PLAIN, strict=True)] == [
        True,
        False,
        True,
        True,
    ]


def test_a_single_placeholder_carries_the_full_digest():
    twin = bytearray(CAT)
    for position in range(32):
        twin[position] ^= 1
        assert (
            media_blocks(MediaSpan(3, 1, CAT))[0] != media_blocks(MediaSpan(3, 1, bytes(twin)))[0]
        )
        twin[position] ^= 1


def test_place_order_and_length_count():
    variants = [
        [MediaSpan(0, 4, CAT)],
        [MediaSpan(0, 4, DOG)],
        [MediaSpan(1, 4, CAT)],
        [MediaSpan(0, 5, CAT)],
        [MediaSpan(0, 4, CAT), MediaSpan(4, 4, DOG)],
        [MediaSpan(0, 4, DOG), MediaSpan(4, 4, CAT)],
        [MediaSpan(0, 4, CAT), MediaSpan(4, 4, CAT)],
    ]
    keys = [media_blocks(*spans)[0] for spans in variants]
    assert len(set(keys)) == len(variants)
    assert media_blocks(MediaSpan(4, 4, DOG), MediaSpan(0, 4, CAT)) == media_blocks(
        MediaSpan(0, 4, CAT), MediaSpan(4, 4, DOG)
    )


def test_a_media_block_can_never_equal_text():
    """The first word of its key is negative, which no token id is."""
    for digest in (CAT, DOG):
        assert np.frombuffer(media_blocks(MediaSpan(0, 8, digest))[0], "<i4")[0] < 0


def test_bad_spans_are_refused():
    for start, length, digest in ((-1, 2, CAT), (0, 0, CAT), (0, 1, b"short")):
        with pytest.raises(UsageError):
            MediaSpan(start, length, digest)
    with pytest.raises(UsageError, match="ends behind the 32 tokens"):
        media_blocks(MediaSpan(30, 3, CAT))
    narrow = Namespace(b"w", KVLayout(1, 1, 8, "float32", block_tokens=4))
    with pytest.raises(UsageError, match="at least 8 tokens"):
        media_blocks(MediaSpan(0, 1, CAT), namespace=narrow)


def test_hash_namespaces_take_the_engines_own_keys():
    hashed = Namespace(b"w", LAYOUT, keys="hash")
    assert hashed.key_bytes == 32
    assert block_keys(hashed, b"h" * 64) == b"h" * 64
    for bad in (b"h" * 33, [1, 2, 3]):
        with pytest.raises(UsageError, match="32 for each block"):
            block_keys(hashed, bad)
