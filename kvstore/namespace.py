"""What must be equal for stored KV to be reusable: :class:`KVLayout` and :class:`Namespace`.

Both are digested over typed, length-framed fields, so two different values can never produce the
same input to the hash: absent is not empty, ``"ab" + "c"`` is not ``"a" + "bc"``, ``1`` is not
``"1"``. The digest is BLAKE2b (J.-P. Aumasson et al., RFC 7693, 2015), 256 bits.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Literal

from kvstore.errors import UsageError

DTYPE_BYTES = {
    "float64": 8,
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "int8": 1,
    "uint8": 1,
}
"""Bytes of one element for each dtype name that a layout may carry."""

CODECS = ("lz4", "int8", "fp8")
LOSSY_CODECS = ("int8", "fp8")
LOSSY_DTYPES = ("float64", "float32", "float16", "bfloat16")
"""Dtypes whose blocks those can store."""

HASH_KEY_BYTES = 32
MAX_BLOCK_TOKENS = 4096


def framed_digest(*parts: bytes | str | int | None) -> bytes:
    """Return the 32-byte BLAKE2b digest of typed, length-framed ``parts``.

    Each part is written as its type's tag, its length (8 bytes, little-endian) and its bytes;
    ``None`` is a tag of its own.
    """
    digest = hashlib.blake2b(digest_size=32)
    for part in parts:
        if part is None:
            tag, data = b"n", b""
        elif isinstance(part, bytes):
            tag, data = b"b", part
        elif isinstance(part, str):
            tag, data = b"s", part.encode()
        elif isinstance(part, int) and not isinstance(part, bool):
            tag, data = b"i", str(part).encode()
        else:
            raise UsageError(f"cannot digest {part!r}: only bytes, str, int and None")
        digest.update(tag + len(data).to_bytes(8, "little") + data)
    return digest.digest()


@dataclass(frozen=True)
class KVLayout:
    """Geometry of one block. The only place that computes block sizes.

    A canonical block is contiguous ``[num_layers][K, V][num_kv_heads][block_tokens][head_dim]`` of
    ``dtype`` (for ``attention="mla"``: ``[num_layers][block_tokens][head_dim]``, ``head_dim`` being
    the latent width). ``layer_start`` and ``head_start`` say which part of a model this is when
    ranks hold different parts. ``opaque`` names an engine's own byte order (back end, version,
    instruction set) when it is not a permutation of the canonical one.
    """

    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype: str
    block_tokens: int = 16
    attention: Literal["mha", "mla"] = "mha"
    layer_start: int = 0
    head_start: int = 0
    opaque: str | None = None

    def __post_init__(self) -> None:
        """Refuse sizes that make no block."""
        for name in ("num_layers", "num_kv_heads", "head_dim", "block_tokens"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise UsageError(f"KVLayout.{name} must be a positive integer, got {value!r}")
        for name in ("layer_start", "head_start"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 0:
                raise UsageError(f"KVLayout.{name} must be an integer >= 0, got {value!r}")
        if self.attention not in ("mha", "mla"):
            raise UsageError(f"KVLayout.attention must be 'mha' or 'mla', got {self.attention!r}")
        if self.block_tokens > MAX_BLOCK_TOKENS:
            raise UsageError(
                f"KVLayout.block_tokens is {self.block_tokens}; at most {MAX_BLOCK_TOKENS} are allowed"
            )
        if self.dtype not in DTYPE_BYTES:
            raise UsageError(
                f"KVLayout.dtype {self.dtype!r} is not known; use one of {', '.join(DTYPE_BYTES)}"
            )

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of one canonical block, in elements."""
        if self.attention == "mla":
            return (self.num_layers, self.block_tokens, self.head_dim)
        return (self.num_layers, 2, self.num_kv_heads, self.block_tokens, self.head_dim)

    @property
    def token_bytes(self) -> int:
        """Bytes of KV per token, all layers."""
        per_layer = (
            self.head_dim if self.attention == "mla" else 2 * self.num_kv_heads * self.head_dim
        )
        return self.num_layers * per_layer * DTYPE_BYTES[self.dtype]

    @cached_property
    def block_bytes(self) -> int:
        """Bytes of one block."""
        return self.token_bytes * self.block_tokens

    @cached_property
    def fingerprint(self) -> bytes:
        """32-byte digest of every field."""
        return framed_digest("kvlayout", *(getattr(self, field.name) for field in fields(self)))


def check_codec(codec: str | None) -> None:
    """Raise :class:`UsageError` for a name that is no codec's; None is for none."""
    if codec is not None and codec not in CODECS:
        raise UsageError(f"codec must be None or one of {', '.join(CODECS)}, got {codec!r}")


@dataclass(frozen=True)
class Namespace:
    """Everything that must be equal for stored KV to be valid. One radix tree each.

    ``model``, ``adapter`` and ``settings`` are digests made by the engine plug-in: of the weights
    themselves (never a name or a path), of the adapter's weights, and of the attention and RoPE
    settings. ``tenant`` and ``salt`` separate users; ``None`` and ``""`` are different values.
    ``keys`` says what a block's key is: its own tokens, or (``"hash"``) 32 bytes that an engine
    chained over all tokens up to the end of the block. ``codec`` has the disk store blocks in fewer bytes
    (:mod:`kvstore.tiers.codec`): ``lz4`` without loss, ``int8`` and ``fp8`` with a bounded one, and blocks come
    back as that left them; without those every bit comes back. Blocks of namespaces with and without a codec
    never mix.
    """

    model: bytes
    layout: KVLayout
    adapter: bytes | None = None
    settings: bytes | None = None
    tenant: str | None = None
    salt: str | None = None
    keys: Literal["tokens", "hash"] = "tokens"
    codec: Literal["lz4", "int8", "fp8"] | None = None

    def __post_init__(self) -> None:
        """Refuse wrong types early: they would silently change the digest."""
        if not isinstance(self.layout, KVLayout):
            raise UsageError(f"Namespace.layout must be a KVLayout, got {self.layout!r}")
        if not isinstance(self.model, bytes) or not self.model:
            raise UsageError("Namespace.model must be the non-empty digest (bytes) of the weights")
        for name, kind in (("adapter", bytes), ("settings", bytes), ("tenant", str), ("salt", str)):
            value = getattr(self, name)
            if value is not None and not isinstance(value, kind):
                raise UsageError(f"Namespace.{name} must be {kind.__name__} or None, got {value!r}")
        if self.keys not in ("tokens", "hash"):
            raise UsageError(f"Namespace.keys must be 'tokens' or 'hash', got {self.keys!r}")
        check_codec(self.codec)
        lossy = self.codec in LOSSY_CODECS
        if lossy and (self.layout.opaque or self.layout.dtype not in LOSSY_DTYPES):
            raise UsageError(
                f"codec {self.codec!r} stores canonical blocks of {', '.join(LOSSY_DTYPES)} only, not of "
                f"{self.layout.opaque or self.layout.dtype}: use none or 'lz4'"
            )

    @property
    def key_bytes(self) -> int:
        """Bytes of the index key of one block."""
        return HASH_KEY_BYTES if self.keys == "hash" else 4 * self.layout.block_tokens

    @cached_property
    def digest(self) -> bytes:
        """32 bytes that name this namespace everywhere."""
        return framed_digest(
            "namespace",
            self.model,
            self.layout.fingerprint,
            self.adapter,
            self.settings,
            self.tenant,
            self.salt,
            self.keys,
            *([self.codec] if self.codec else []),
        )
