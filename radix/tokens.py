"""Token ids to key bytes: little-endian int32, one word a token, refused rather than guessed."""

from __future__ import annotations

import sys
from array import array
from collections.abc import Sequence

import numpy as np

INT32_MAX = 2**31 - 1


class TokenError(ValueError):
    """The argument is not a flat sequence of token ids in ``0 .. 2**31 - 1``."""


def token_bytes(tokens: object) -> bytes:
    """Return ``tokens`` as little-endian int32 bytes (``4 * len(tokens)`` bytes).

    Args:
        tokens: a flat sequence of ints (list, tuple, range, ``array``), or a one-dimensional numpy
            array or torch tensor of an integer dtype. ``bytes`` are taken as key bytes already
            made and returned as they are.

    Raises:
        TokenError: for anything else: floats, bools, nested sequences, text, ids that are negative
            or do not fit int32. Nothing is rounded, wrapped or cast.
    """
    if isinstance(tokens, bytes):
        if len(tokens) % 4:
            raise TokenError(f"key bytes must be whole int32 words, got {len(tokens)} bytes")
        return tokens
    if hasattr(tokens, "detach"):  # a torch tensor, without importing torch
        tokens = tokens.detach().cpu().numpy()
    if isinstance(tokens, np.ndarray):
        return _from_array(tokens)
    if isinstance(tokens, memoryview | array):
        return _from_array(np.asarray(tokens))
    if isinstance(tokens, Sequence) and not isinstance(tokens, str | bytearray):
        return _from_sequence(tokens)
    raise TokenError(f"token ids must be a flat sequence of ints, got {type(tokens).__name__}")


def _from_array(ids: np.ndarray) -> bytes:
    if ids.ndim != 1:
        raise TokenError(
            f"token ids must be one-dimensional, got shape {ids.shape}; pass one row at a time"
        )
    if ids.size == 0:
        return b""
    if ids.dtype.kind not in "iu":
        raise TokenError(f"token ids must be of an integer dtype, got {ids.dtype}")
    if ids.dtype == np.int32 and int(ids.view(np.uint32).max()) <= INT32_MAX:
        return ids.astype("<i4", copy=False).tobytes()  # one pass: what is negative is large
    low, high = int(ids.min()), int(ids.max())
    if low < 0 or high > INT32_MAX:
        raise TokenError(f"token id {low if low < 0 else high} is outside 0 .. {INT32_MAX}")
    return ids.astype("<i4", copy=False).tobytes()


def _from_sequence(ids: Sequence[int]) -> bytes:
    for kind in {*map(type, ids)}:
        if kind is bool or not (kind is int or issubclass(kind, np.integer)):
            raise TokenError(f"token ids must be plain ints, got an item of type {kind.__name__}")
    try:
        words = array("i", ids)
    except OverflowError:
        worst = max(ids, key=abs)
        raise TokenError(f"token id {worst} is outside 0 .. {INT32_MAX}") from None
    if words and (low := int(np.frombuffer(words, np.int32).min())) < 0:
        raise TokenError(f"token id {low} is outside 0 .. {INT32_MAX}")
    if sys.byteorder == "big":
        words.byteswap()
    return words.tobytes()
