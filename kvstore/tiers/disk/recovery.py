"""From the rows of a manifest to the blocks of a prompt tree: what can be used, parents first.

Rows are taken at their word only where that is harmless: a row whose digest is not that of its parent,
position and key, whose parent is missing, or whose slot overlaps another one is dropped here. Everything
else a wrong row can say is found when the block is read, by its header.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from kvstore.errors import UsageError
from kvstore.protocol import decode_namespace
from kvstore.tiers.arena import ALIGNMENT
from kvstore.tiers.disk.format import (
    BlockIdentity,
    block_digest,
    codec_of,
    root_digest,
    slot_bytes_of,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

    from kvstore.namespace import Namespace

    Rows = Sequence[tuple[int, int, int, bytes, bytes, bytes, int, int, int, int]]

logger = logging.getLogger(__name__)

MAX_PREFIXES = 64
"""Beginnings that several prompts share and that are kept at hand."""


@dataclass(frozen=True)
class RecoveredNamespace:
    """The blocks of one namespace that a directory holds: columns, a parent before its children."""

    namespace: Namespace
    offsets: NDArray[np.int64]
    positions: NDArray[np.int64]
    parents: NDArray[np.int64]
    """Index here of the block before it, or -1 for the first block of a prompt."""
    keys: list[bytes]
    digests: list[bytes]
    checksums: NDArray[np.uint64]
    generations: NDArray[np.int64]
    plain: NDArray[np.bool_]
    """Which are stored as they are, though the namespace has a codec."""

    def __len__(self) -> int:
        """Blocks."""
        return len(self.keys)

    @property
    def slot_sizes(self) -> NDArray[np.int64]:
        """Length of each slot."""
        plain, coded = (slot_bytes_of(self.namespace, plain=form) for form in (True, False))
        return np.where(self.plain, plain, coded)

    def identity(self, index: int) -> BlockIdentity:
        """Return what :meth:`kvstore.tiers.disk.store.DiskStore.read` wants to know of a block."""
        parent = int(self.parents[index])
        before = root_digest(self.namespace) if parent < 0 else self.digests[parent]
        return BlockIdentity(
            self.namespace,
            int(self.positions[index]),
            before,
            self.digests[index],
            self.keys[index],
            int(self.checksums[index]),
            plain=bool(self.plain[index]),
        )

    def prompts(self) -> Iterator[tuple[bytes, NDArray[np.int64]]]:
        """Yield the paths that make up the tree: key bytes from the first block on, and the new blocks.

        Each block is new once; those before it on its path were new in earlier ones. What was written
        last comes last.
        """
        parents, keys = self.parents.tolist(), self.keys
        is_parent = np.zeros(len(self) + 1, bool)
        is_parent[self.parents] = True
        seen = bytearray(len(self))
        prefixes = {-1: b""}
        leaves = np.flatnonzero(~is_parent[:-1])
        for leaf in leaves[np.argsort(self.generations[leaves])].tolist():
            fresh, index = [], leaf
            while index >= 0 and not seen[index]:
                seen[index] = 1
                fresh.append(index)
                index = parents[index]
            fresh.reverse()
            if index not in prefixes:
                prefixes = {-1: b""} if len(prefixes) > MAX_PREFIXES else prefixes
                prefixes[index] = self._prefix(index, parents)
            yield prefixes[index] + b"".join([keys[at] for at in fresh]), np.array(fresh, np.int64)

    def _prefix(self, index: int, parents: list[int]) -> bytes:
        """Key bytes up to and with the block ``index``."""
        path = []
        while index >= 0:
            path.append(self.keys[index])
            index = parents[index]
        return b"".join(reversed(path))


def recover(
    rows: Rows, namespaces: dict[int, tuple[bytes, bytes]], capacity_bytes: int
) -> list[RecoveredNamespace]:
    """Return what ``rows``, in the order of slots, stand for; namespaces with no usable block are left out."""
    if not rows:
        return []
    columns = _Columns(rows)
    known = _decoded(namespaces)
    sizes = np.zeros(len(rows), np.int64)
    for number, namespace in known.items():
        mine = columns.namespaces == number
        mine &= columns.payload_bytes == namespace.layout.block_bytes
        for plain in (True, False):
            stored_bytes = codec_of(namespace, plain=plain).stored_bytes
            fits = mine & (columns.stored_bytes == stored_bytes)
            sizes[fits] = slot_bytes_of(namespace, plain=plain)
    offsets = columns.offsets
    fits = (sizes > 0) & (offsets >= 0) & (offsets + sizes <= capacity_bytes)
    fits &= ~_overlapping(offsets, np.where(fits, sizes, 0))
    found = (
        _linked(namespace, columns, np.flatnonzero(fits & (columns.namespaces == number)))
        for number, namespace in known.items()
    )
    return [blocks for blocks in found if len(blocks)]


class _Columns:
    """The rows of a manifest, turned round."""

    def __init__(self, rows: Rows) -> None:
        (
            slots,
            namespaces,
            positions,
            parents,
            digests,
            keys,
            checksums,
            lengths,
            stored,
            generations,
        ) = zip(*rows, strict=True)
        self.offsets = np.array(slots, np.int64) * ALIGNMENT
        self.namespaces = np.array(namespaces, np.int64)
        self.positions = np.array(positions, np.int64)
        self.parents: tuple[bytes, ...] = parents
        self.digests: tuple[bytes, ...] = digests
        self.keys: tuple[bytes, ...] = keys
        self.checksums = np.array(checksums, np.int64).view(np.uint64)
        self.payload_bytes = np.array(lengths, np.int64)
        self.stored_bytes = np.array(stored, np.int64)
        self.generations = np.array(generations, np.int64)


def _decoded(namespaces: dict[int, tuple[bytes, bytes]]) -> dict[int, Namespace]:
    known = {}
    for number, (digest, encoded) in namespaces.items():
        try:
            namespace = decode_namespace(encoded)
        except UsageError:
            continue
        if namespace.digest == digest:
            known[number] = namespace
    return known


def _overlapping(offsets: NDArray[np.int64], sizes: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Which slots (ascending) begin before the end of an earlier one."""
    ends = np.maximum.accumulate(offsets + sizes)
    return np.concatenate([[False], offsets[1:] < ends[:-1]])


def _linked(namespace: Namespace, columns: _Columns, mine: NDArray[np.intp]) -> RecoveredNamespace:
    """Order the rows ``mine`` by position, and keep those that hang from the root by true digests."""
    order = np.lexsort((-columns.generations[mine], columns.positions[mine]))
    rows = mine[order]
    parents, digests, keys = columns.parents, columns.digests, columns.keys
    index_of: dict[bytes, int] = {root_digest(namespace): -1}
    stride = namespace.key_bytes
    kept: list[int] = []
    above: list[int] = []
    for row, position in zip(rows.tolist(), columns.positions[rows].tolist(), strict=True):
        parent, digest, key = parents[row], digests[row], keys[row]
        up = index_of.get(parent)
        if up is None or digest in index_of or len(key) != stride or position < 0:
            continue
        if block_digest(parent, position, key) != digest:
            continue
        index_of[digest] = len(kept)
        above.append(up)
        kept.append(row)
    which = np.array(kept, np.intp)
    return RecoveredNamespace(
        namespace,
        columns.offsets[which],
        columns.positions[which],
        np.array(above, np.int64),
        [keys[row] for row in kept],
        [digests[row] for row in kept],
        columns.checksums[which],
        columns.generations[which],
        columns.stored_bytes[which] != codec_of(namespace).stored_bytes,
    )
