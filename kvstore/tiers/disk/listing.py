"""How blocks are put on the manifest's list: in transactions of limited size, under numbers of namespaces.

A part of a batch is written, flushed and listed as a whole. Its rows take several transactions, so that the
log stays short, and one flush of the log, with the last of them.
"""

from __future__ import annotations

import sqlite3
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from kvstore.protocol import encode_namespace
from kvstore.tiers.disk.manifest import (
    MAX_BATCH_BYTES,
    MAX_BATCH_ROWS,
    MAX_NAMESPACE_BYTES,
    PAGE_BYTES,
    Row,
    page_of,
    signed,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Sequence

    from kvstore.tiers.disk.batch import Batch
    from kvstore.tiers.disk.format import BlockIdentity
    from kvstore.tiers.disk.manifest import Manifest

Result = TypeVar("Result")

MAX_PART_BLOCKS = 4 * MAX_BATCH_ROWS
"""Blocks that share two flushes, and that are not stored where one of these fails."""


def can_be_listed(block: BlockIdentity) -> bool:
    """Whether namespace and key are short enough for one transaction."""
    num_bytes = len(encode_namespace(block.namespace))
    return num_bytes <= MAX_NAMESPACE_BYTES and num_bytes + len(block.key) <= MAX_BATCH_BYTES


def batches(blocks: Sequence[BlockIdentity], indices: Iterable[int]) -> Iterator[list[int]]:
    """Cut ``indices`` of ``blocks`` into parts, whose keys and namespaces fit into one transaction each."""
    part: list[int] = []
    num_bytes, known = 0, set[bytes]()
    for index in indices:
        block = blocks[index]
        new = 0
        if block.namespace.digest not in known:
            new = max(len(encode_namespace(block.namespace)), PAGE_BYTES)
        if len(part) == MAX_PART_BLOCKS or num_bytes + new + len(block.key) > MAX_BATCH_BYTES:
            if part:
                yield part
            part, num_bytes, known = [], 0, set()
            new = max(len(encode_namespace(block.namespace)), PAGE_BYTES)
        part.append(index)
        known.add(block.namespace.digest)
        num_bytes += new + len(block.key)
    if part:
        yield part


class Listing:
    """Lists blocks, and knows the numbers of their namespaces.

    Namespaces that no block is listed under leave the manifest when it is full. Not thread-safe.
    """

    def __init__(self) -> None:
        """Know nothing yet."""
        self._numbers: dict[bytes, int] = {}

    def forget(self) -> None:
        """Another manifest is there from here on."""
        self._numbers.clear()

    def number(self, manifest: Manifest, blocks: Iterable[BlockIdentity]) -> None:
        """Have numbers for the namespaces of a batch. Raises ``sqlite3.Error``, OSError."""
        namespaces = {block.namespace.digest: block.namespace for block in blocks}
        new = {
            digest: encode_namespace(namespace)
            for digest, namespace in namespaces.items()
            if digest not in self._numbers
        }
        if new:
            known = [self._numbers[digest] for digest in namespaces if digest not in new]
            self._numbers |= self._with_room(manifest, lambda: manifest.names(new), known)

    def insert(self, manifest: Manifest, batch: Batch, which: Iterable[int]) -> None:
        """List the blocks ``which`` of ``batch``, one part, which have numbers; they last on return.

        Raises:
            OSError, sqlite3.Error: some of them may be listed all the same.
        """
        rows = [_row(batch, index, self._numbers) for index in which]
        keep = {row.namespace for row in rows}
        for start in range(0, len(rows), MAX_BATCH_ROWS):
            stop = start + MAX_BATCH_ROWS
            insert = partial(manifest.insert, rows[start:stop], lasting=stop >= len(rows))
            self._with_room(manifest, insert, keep)

    def _with_room(
        self, manifest: Manifest, change: Callable[[], Result], keep: Collection[int]
    ) -> Result:
        """Do ``change``, once more where it helps to forget namespaces that nobody uses, but for ``keep``."""
        try:
            return change()
        except sqlite3.Error as error:
            if getattr(error, "sqlite_errorcode", None) != sqlite3.SQLITE_FULL:
                raise
            unused = [number for number in manifest.unused_namespaces() if number not in keep]
            if not unused:
                raise
        gone = set(unused)
        self._numbers = {at: number for at, number in self._numbers.items() if number not in gone}
        manifest.forget_namespaces(unused)
        return change()


def _row(batch: Batch, index: int, numbers: dict[bytes, int]) -> Row:
    block = batch.blocks[index]
    return Row(
        page_of(int(batch.offsets[index])),
        numbers[block.namespace.digest],
        block.position,
        block.parent,
        block.digest,
        block.key,
        signed(batch.checksums[index]),
        block.block_bytes,
        block.stored_bytes,
        batch.generations[index],
    )
