"""From a prompt to the key bytes of its blocks.

Text tokens are their own key. A block that holds placeholders of a medium (image, audio, …) gets a
512-bit key derived from its tokens and the *full* digest of every medium that touches it, so two media
can only share a block by colliding BLAKE2b. The sign bit of such a key's first word is set, which no
token id can do: a media block never equals a text block.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvstore.errors import UsageError
from kvstore.namespace import HASH_KEY_BYTES, framed_digest
from radix import TokenError, token_bytes

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvstore.namespace import Namespace

TOKEN_BYTES = 4
MIN_DIGEST_BYTES = 16


@dataclass(frozen=True)
class MediaSpan:
    """Placeholder tokens ``[start, start + length)`` of one medium, named by a digest of its content."""

    start: int
    length: int
    digest: bytes

    def __post_init__(self) -> None:
        """Refuse spans that name no token or no content."""
        if self.start < 0 or self.length < 1:
            raise UsageError(
                f"a media span needs start >= 0 and length >= 1, got {self.start}, {self.length}"
            )
        if len(self.digest) < MIN_DIGEST_BYTES:
            raise UsageError(
                f"a media digest needs at least {MIN_DIGEST_BYTES} bytes, got {len(self.digest)}"
            )


def block_keys(namespace: Namespace, tokens: object, media: Sequence[MediaSpan] = ()) -> bytes:
    """Return the key bytes of ``tokens`` in ``namespace``; keys already made (bytes) pass unchanged.

    Args:
        namespace: says how a block is keyed. In a namespace of kind ``"hash"``, ``tokens`` are the
            engine's own hashes: bytes, 32 for each block.
        tokens: what :func:`radix.token_bytes` accepts.
        media: spans whose content decides the KV of their tokens; they must lie within ``tokens``.

    Raises:
        UsageError: the tokens or spans cannot be used; the message says which and why.
    """
    if namespace.keys == "hash":
        if not isinstance(tokens, bytes) or len(tokens) % HASH_KEY_BYTES or media:
            raise UsageError(
                f"a namespace of kind 'hash' takes bytes, {HASH_KEY_BYTES} for each block"
            )
        return tokens
    try:
        key = token_bytes(tokens)
    except TokenError as error:
        raise UsageError(str(error)) from error
    return _with_media(key, namespace.key_bytes, media) if media else key


def _with_media(key: bytes, stride: int, media: Sequence[MediaSpan]) -> bytes:
    if stride < 2 * MIN_DIGEST_BYTES:
        raise UsageError(
            f"media need blocks of at least {2 * MIN_DIGEST_BYTES // TOKEN_BYTES} tokens"
        )
    num_tokens, block_tokens = len(key) // TOKEN_BYTES, stride // TOKEN_BYTES
    touching: dict[int, list[MediaSpan]] = {}
    for span in media:
        stop = span.start + span.length
        if stop > num_tokens:
            raise UsageError(
                f"media span {span.start}..{stop} ends behind the {num_tokens} tokens of the prompt"
            )
        for block in range(span.start // block_tokens, -(-stop // block_tokens)):
            touching.setdefault(block, []).append(span)
    keyed = bytearray(key)
    for block, spans in touching.items():
        start = block * stride
        keyed[start : start + stride] = _media_key(
            key[start : start + stride], block * block_tokens, spans
        )
    return bytes(keyed)


def _media_key(tokens: bytes, first_token: int, spans: list[MediaSpan]) -> bytes:
    """Key of one block (same length as ``tokens``) that the media of ``spans`` touch."""
    parts: list[bytes | int] = [tokens]
    for span in sorted(spans, key=lambda span: span.start):
        parts += [span.start - first_token, span.length, span.digest]
    words = bytearray(hashlib.shake_256(framed_digest("media", *parts)).digest(len(tokens)))
    if len(words) >= TOKEN_BYTES:
        words[TOKEN_BYTES - 1] |= 0x80
    return bytes(words)
