"""How blocks are written to slower tiers: as they are, smaller without loss, or smaller with a bounded one.

A codec turns one block, uint8 ``[block_bytes]`` in the order of its layout, into stored bytes and back. It
knows nothing of tiers. What it stores carries no checksum: the tier keeps one. All blocks of a layout are
stored in one length, as slots have one; a block that cannot be is refused.

* ``none``: the bytes.
* ``lz4``: lossless. Bytes of equal weight lie together (*byte planes*), each plane compressed by LZ4
  (Y. Collet) where that helps: signs and exponents of KV repeat, mantissas do not. Zeros fill it up to
  ``ROOM`` of the block.
* ``int8``, ``fp8``: lossy. One float32 scale for each layer, K or V, and head of a block, and one byte for each
  element: a whole number of ``[-127, 127]``, or an 8-bit float of 4 exponent and 3 mantissa bits
  (P. Micikevicius et al., "FP8 Formats for Deep Learning", 2022).

Bounds are those before results are rounded, to float32 and to the dtype of the layout, for heads whose
largest element is above 1e-35. A lossy codec refuses what it cannot bound: layouts of an engine's own byte
order, elements that are no floats of two bytes or more, numbers that are not finite in float32.
"""

from __future__ import annotations

import struct
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

import lz4.block
import ml_dtypes
import numpy as np

from kvstore.errors import CodecError, UsageError
from kvstore.namespace import DTYPE_BYTES

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from kvstore.namespace import KVLayout

    Block = NDArray[np.uint8]

FLOATS: dict[str, Any] = {
    "float64": np.float64,
    "float32": np.float32,
    "float16": np.float16,
    "bfloat16": ml_dtypes.bfloat16,
}
"""Dtypes of layouts that lossy codecs take."""

ROOM: dict[int, tuple[int, int]] = {2: (7, 8)}
"""How much of a block ``lz4`` may take, by the width of elements: just above the mean of real KV."""
OTHER_ROOM = (15, 16)


class Codec(ABC):
    """One way to store the blocks of one layout. Stateless: any number of threads may use one."""

    name: str
    number: int
    """As it stands in headers of blocks. Never given to another codec."""
    lossless: bool

    def __init__(self, layout: KVLayout) -> None:
        """Store blocks of ``layout``. Raises :class:`UsageError` when they cannot be."""
        self.layout = layout

    @property
    @abstractmethod
    def stored_bytes(self) -> int:
        """Length of every stored block."""

    @abstractmethod
    def encode(self, block: Block) -> bytes:
        """Return what is to be stored of ``block``, uint8 ``[block_bytes]``: ``stored_bytes``.

        Raises:
            CodecError: it cannot be stored within the bound, or in the room; store it as it is, or not.
        """

    @abstractmethod
    def decode(self, stored: bytes, block: Block) -> None:
        """Fill ``block``, uint8 ``[block_bytes]``, from what :meth:`encode` has returned.

        Raises:
            CodecError: ``stored`` is something else; ``block`` then holds garbage.
        """


class Plain(Codec):
    """The bytes themselves."""

    name, number, lossless = "none", 0, True

    @property
    def stored_bytes(self) -> int:
        """As the block."""
        return self.layout.block_bytes

    def encode(self, block: Block) -> bytes:
        """Return a copy."""
        return block.tobytes()

    def decode(self, stored: bytes, block: Block) -> None:
        """Copy back."""
        if len(stored) != len(block):
            raise CodecError(f"{len(stored)} bytes stored of a block of {len(block)}")
        block[:] = np.frombuffer(stored, np.uint8)


class PlanesLZ4(Codec):
    """Byte planes, compressed by LZ4 where that makes them smaller.

    Stored: for each plane the length of what is stored of it (uint32, little-endian); then the planes; then
    zeros. A plane that is as long as itself is not compressed.
    """

    name, number, lossless = "lz4", 1, True

    def __init__(self, layout: KVLayout) -> None:
        """Cut elements of ``layout`` into bytes; those of an engine's own order are taken as they are."""
        super().__init__(layout)
        self._width = 1 if layout.opaque else DTYPE_BYTES[layout.dtype]
        self._lengths = struct.Struct(f"<{self._width}I")
        part, whole = ROOM.get(self._width, OTHER_ROOM)
        self._room = layout.block_bytes * part // whole

    @property
    def stored_bytes(self) -> int:
        """The room that a block has."""
        return self._room

    def encode(self, block: Block) -> bytes:
        """Return lengths, planes and zeros; refuse what has no room."""
        packed = self.pack(block)
        if len(packed) > self._room:
            raise CodecError(f"a block needs {len(packed)} bytes, and has room for {self._room}")
        return packed.ljust(self._room, b"\0")

    def pack(self, block: Block) -> bytes:
        """Return lengths and planes, as long as they are."""
        planes = [np.ascontiguousarray(part) for part in block.reshape(-1, self._width).T]
        parts = [self._smaller(plane) for plane in planes]
        return b"".join([self._lengths.pack(*map(len, parts)), *parts])

    @staticmethod
    def _smaller(plane: Block) -> bytes:
        packed: bytes = lz4.block.compress(plane, store_size=False)
        return packed if len(packed) < len(plane) else plane.tobytes()

    def decode(self, stored: bytes, block: Block) -> None:
        """Put the planes together again."""
        target = block.reshape(-1, self._width)
        begin = self._lengths.size
        try:
            lengths = self._lengths.unpack_from(stored)
        except struct.error:
            raise CodecError(f"{len(stored)} bytes are no lengths of planes") from None
        end = begin + sum(lengths)
        if len(stored) != self._room or end > self._room or stored[end:].strip(b"\0"):
            raise CodecError("planes of other lengths than said")
        for index, length in enumerate(lengths):
            target[:, index] = self._plane(stored[begin : begin + length], len(target))
            begin += length

    @staticmethod
    def _plane(stored: bytes, num_bytes: int) -> Block:
        if len(stored) == num_bytes:
            return np.frombuffer(stored, np.uint8)
        try:
            plane = lz4.block.decompress(stored, uncompressed_size=num_bytes)
        except lz4.block.LZ4BlockError as error:
            raise CodecError(f"a plane that LZ4 cannot read: {error}") from None
        if len(plane) != num_bytes:
            raise CodecError(f"a plane of {len(plane)} bytes instead of {num_bytes}")
        return np.frombuffer(plane, np.uint8)


class Scaled(Codec):
    """One byte for each element, and a scale for each layer, K or V, and head."""

    lossless = False
    largest: float
    """Number that the largest element of a head becomes."""

    @property
    def stored_bytes(self) -> int:
        """Length of every stored block."""
        return self._num_scales * (4 + self._heads[-1])

    def __init__(self, layout: KVLayout) -> None:
        """Take ``layout``, or refuse it."""
        super().__init__(layout)
        if layout.opaque or layout.dtype not in FLOATS:
            raise UsageError(
                f"codec {self.name!r} stores canonical blocks of {', '.join(FLOATS)} only, not of "
                f"{layout.opaque or layout.dtype}: use 'none' or 'lz4'"
            )
        self._dtype = np.dtype(FLOATS[layout.dtype])
        self._heads = (*layout.shape[:-2], layout.block_tokens * layout.head_dim)
        self._num_scales = int(np.prod(self._heads[:-1]))

    def encode(self, block: Block) -> bytes:
        """Return scales, float32, and elements, one byte each."""
        with np.errstate(over="ignore"):  # of float64: infinite, and refused
            numbers = block.view(self._dtype).reshape(self._heads).astype(np.float32)
        scales = np.abs(numbers).max(axis=-1, keepdims=True) / np.float32(self.largest)
        if not np.isfinite(scales).all():
            raise CodecError(f"codec {self.name!r} cannot store numbers that are not finite")
        limits = np.finfo(np.float32)
        most = np.nextafter(limits.max / np.float32(self.largest), np.float32(0))
        scales = np.clip(scales, limits.tiny, most)
        stored: bytes = scales.tobytes() + self._to_bytes(numbers / scales).tobytes()
        return stored

    def decode(self, stored: bytes, block: Block) -> None:
        """Multiply back."""
        if len(stored) != self.stored_bytes:
            raise CodecError(f"{len(stored)} bytes are no scales and elements of a block")
        scales = np.frombuffer(stored, "<f4", self._num_scales).reshape(*self._heads[:-1], 1)
        parts = np.frombuffer(stored, np.uint8, offset=4 * self._num_scales)
        with np.errstate(over="ignore", invalid="ignore"):  # of what somebody else stored
            numbers = self._from_bytes(parts).reshape(self._heads) * scales
            block.view(self._dtype)[:] = numbers.astype(self._dtype).reshape(-1)

    @abstractmethod
    def _to_bytes(self, scaled: NDArray[np.float32]) -> Block: ...

    @abstractmethod
    def _from_bytes(self, stored: Block) -> NDArray[np.float32]: ...


class Int8(Scaled):
    """Whole numbers: an element is off by at most half a step, ``max |head| / 254``."""

    name, number, largest = "int8", 2, 127.0

    def _to_bytes(self, scaled: NDArray[np.float32]) -> Block:
        return np.rint(scaled).astype(np.int8).view(np.uint8)

    def _from_bytes(self, stored: Block) -> NDArray[np.float32]:
        return stored.view(np.int8).astype(np.float32)


class Float8(Scaled):
    """Floats of 8 bits (e4m3): off by at most 1/16 of the element, or ``max |head| / 448 / 1024`` near 0."""

    name, number, largest = "fp8", 3, 448.0

    def _to_bytes(self, scaled: NDArray[np.float32]) -> Block:
        return scaled.astype(ml_dtypes.float8_e4m3fn).view(np.uint8)

    def _from_bytes(self, stored: Block) -> NDArray[np.float32]:
        numbers: NDArray[np.float32] = stored.view(ml_dtypes.float8_e4m3fn).astype(np.float32)
        return numbers


CODECS: dict[str, type[Codec]] = {kind.name: kind for kind in (Plain, PlanesLZ4, Int8, Float8)}
