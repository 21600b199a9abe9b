"""A block on disk: one header of whole pages, and the payload directly behind it.

The header says everything that the bytes behind it are (``docs/formats/block-file.md``). A reader knows
what it wants: it makes the header that must be there and compares; only when they differ the fields are
looked at one by one, to name the reason.
"""

from __future__ import annotations

import hashlib
import struct
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np
import xxhash

from kvstore.blocks import FIRST_CHECKSUM, NO_CHECKSUM
from kvstore.tiers.arena import ALIGNMENT
from kvstore.tiers.arena import slot_bytes as whole_pages
from kvstore.tiers.codec import CODECS, Plain

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from kvstore.namespace import KVLayout, Namespace
    from kvstore.tiers.codec import Codec

MAGIC: Final = b"kvblock\0"
VERSION: Final = 1
DIGEST_BYTES: Final = 16
GOOD: Final = "good"

_HEADER = struct.Struct("<8sII32s32s16s16sQQQIIQQQ")
_PERSON = b"kvstore block"
_CHECKSUM_AT = _HEADER.size - 8


@dataclass(frozen=True, slots=True)
class BlockIdentity:
    """What a block is, apart from its bytes."""

    namespace: Namespace
    position: int
    """Place in the prompt, in blocks; 0 is the first."""
    parent: bytes
    """Digest of the block before it; of the first block: of the namespace."""
    digest: bytes
    """:func:`block_digest` of the block itself."""
    key: bytes
    """``namespace.key_bytes`` bytes: what the index compares."""
    checksum: int = NO_CHECKSUM
    """:func:`checksum_of` the payload, or a number below ``FIRST_CHECKSUM`` where it is not known."""
    plain: bool = False
    """Stored as it is, since the codec of the namespace has refused it."""

    @property
    def block_bytes(self) -> int:
        """Length of the payload."""
        return self.namespace.layout.block_bytes

    @property
    def stored_bytes(self) -> int:
        """Length of what stands for the payload behind the header."""
        return self.codec.stored_bytes

    @property
    def slot_bytes(self) -> int:
        """Length of its slot."""
        return slot_bytes_of(self.namespace, plain=self.plain)

    @property
    def codec(self) -> Codec:
        """What it is stored by."""
        return codec_of(self.namespace, plain=self.plain)

    @property
    def is_exact(self) -> bool:
        """Whether what comes back is what was stored, to the bit."""
        return self.codec.lossless


class _Fields(NamedTuple):
    magic: bytes
    version: int
    header_bytes: int
    namespace: bytes
    layout: bytes
    parent: bytes
    digest: bytes
    position: int
    payload_bytes: int
    stored_bytes: int
    codec: int
    key_bytes: int
    generation: int
    checksum: int
    header_checksum: int


def root_digest(namespace: Namespace) -> bytes:
    """Return what the first block of every prompt in ``namespace`` has as its parent."""
    return namespace.digest[:DIGEST_BYTES]


def block_digest(parent: bytes, position: int, key: bytes) -> bytes:
    """Return the 16-byte name of the block under ``key`` at ``position`` whose parent is ``parent``.

    BLAKE2b over three fields, the first two of fixed length: the chain binds every block before it.
    """
    data = parent + position.to_bytes(8, "little") + key
    return hashlib.blake2b(data, digest_size=DIGEST_BYTES, person=_PERSON).digest()


def header_bytes(key_bytes: int) -> int:
    """Return the length of the header of a block whose key has ``key_bytes``: whole pages."""
    return whole_pages(_HEADER.size + key_bytes)


def codec_of(namespace: Namespace, *, plain: bool = False) -> Codec:
    """Return what blocks of ``namespace`` are stored by, or (``plain``) those that its codec refuses."""
    return _codec(Plain.name if plain else namespace.codec or Plain.name, namespace.layout)


@lru_cache(maxsize=512)
def _codec(name: str, layout: KVLayout) -> Codec:
    """Return a codec, if it saves pages; lengths tell what is stored by it from what is not."""
    codec = CODECS[name](layout)
    saves = whole_pages(codec.stored_bytes) < whole_pages(layout.block_bytes)
    return codec if saves else Plain(layout)


def slot_bytes_of(namespace: Namespace, *, plain: bool = False) -> int:
    """Return the length of slots of ``namespace``: a header, and what is stored of a block, in pages.

    Args:
        namespace: of the blocks.
        plain: whether it is about blocks that the codec of the namespace refuses.
    """
    stored_bytes = codec_of(namespace, plain=plain).stored_bytes
    return header_bytes(namespace.key_bytes) + whole_pages(stored_bytes)


def checksum_of(payload: NDArray[np.uint8]) -> int:
    """Return the xxh3-64 of ``payload``, at least ``FIRST_CHECKSUM``."""
    return max(xxhash.xxh3_64_intdigest(payload.data), FIRST_CHECKSUM)


def encode_header(block: BlockIdentity, checksum: int, generation: int) -> bytes:
    """Return the header of ``block`` whose payload has ``checksum``, as ``generation`` wrote it."""
    total = header_bytes(len(block.key))
    fields = _Fields(
        MAGIC,
        VERSION,
        total,
        block.namespace.digest,
        block.namespace.layout.fingerprint,
        block.parent,
        block.digest,
        block.position,
        block.block_bytes,
        block.stored_bytes,
        block.codec.number,
        len(block.key),
        generation,
        checksum,
        0,
    )
    header = bytearray(total)
    _HEADER.pack_into(header, 0, *fields)
    header[_HEADER.size : _HEADER.size + len(block.key)] = block.key
    header[_CHECKSUM_AT : _HEADER.size] = _own_checksum(header)
    return bytes(header)


def check(
    header: NDArray[np.uint8],
    payload: NDArray[np.uint8] | None,
    block: BlockIdentity,
    generation: int,
) -> str:
    """Say whether what was read is ``block``, as ``generation`` wrote it.

    Args:
        header: uint8 ``[header_bytes]``, as read.
        payload: uint8 ``[block_bytes]``, as read; None: its codec cannot read it.
        block: what must be there; a checksum that is not known is taken from the header.
        generation: that of the write.

    Returns:
        ``GOOD``, or the first field that is wrong: ``magic``, ``version``, ``header``, ``namespace``,
        ``layout``, ``identity``, ``key``, ``length``, ``codec``, ``generation``, ``checksum`` (the header has
        another one than expected), ``payload`` (the bytes do not have the checksum of the header).
    """
    data = header.tobytes()
    found = _Fields(*_HEADER.unpack_from(data))
    checksum = found.checksum if block.checksum < FIRST_CHECKSUM else block.checksum
    if data != encode_header(block, checksum, generation):
        return _reason(data, found, block, generation)
    return GOOD if payload is not None and checksum_of(payload) == checksum else "payload"


def _own_checksum(header: bytes | bytearray) -> bytes:
    """Return the 8 bytes at ``_CHECKSUM_AT``: xxh3-64 of the header in which they are zero."""
    blank = bytearray(header)
    blank[_CHECKSUM_AT : _HEADER.size] = bytes(8)
    return xxhash.xxh3_64_intdigest(blank).to_bytes(8, "little")


def _reason(data: bytes, found: _Fields, block: BlockIdentity, generation: int) -> str:
    key = data[_HEADER.size : _HEADER.size + len(block.key)]
    identity = (block.parent, block.digest, block.position)
    lengths = (len(data), block.block_bytes, block.stored_bytes, len(block.key))
    checks = (
        ("magic", found.magic == MAGIC),
        ("version", found.version == VERSION),
        ("header", _own_checksum(data) == data[_CHECKSUM_AT : _HEADER.size]),
        ("namespace", found.namespace == block.namespace.digest),
        ("layout", found.layout == block.namespace.layout.fingerprint),
        ("identity", (found.parent, found.digest, found.position) == identity),
        ("key", key == block.key),
        (
            "length",
            (found.header_bytes, found.payload_bytes, found.stored_bytes, found.key_bytes)
            == lengths,
        ),
        ("codec", found.codec == block.codec.number),
        ("generation", found.generation == generation),
        ("checksum", block.checksum < FIRST_CHECKSUM or block.checksum == found.checksum),
    )
    return next((name for name, right in checks if not right), "header")


def aligned(num_bytes: int) -> NDArray[np.uint8]:
    """Return uint8 ``[num_bytes]`` of new memory whose address is a multiple of ``ALIGNMENT``."""
    memory = np.empty(num_bytes + ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % ALIGNMENT
    return memory[start : start + num_bytes]


def is_aligned(array: NDArray[np.uint8]) -> bool:
    """Say whether direct I/O can use ``array`` as it is."""
    return (
        not (array.ctypes.data % ALIGNMENT or len(array) % ALIGNMENT) and array.flags.c_contiguous
    )
