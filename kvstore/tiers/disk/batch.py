"""Blocks that are written or read together: neighbouring slots with one call, many calls at a time."""

from __future__ import annotations

import errno
from typing import TYPE_CHECKING

import numpy as np

from kvstore.blocks import FIRST_CHECKSUM, NO_CHECKSUM
from kvstore.errors import CodecError
from kvstore.tiers.arena import slot_bytes as whole_pages
from kvstore.tiers.codec import Plain
from kvstore.tiers.disk.files import EndOfFileError
from kvstore.tiers.disk.format import (
    GOOD,
    aligned,
    check,
    checksum_of,
    encode_header,
    header_bytes,
    is_aligned,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    from kvstore.tiers.disk.files import Segments
    from kvstore.tiers.disk.format import BlockIdentity

    Pages = NDArray[np.uint8]

MIN_CALL_BYTES = 1 << 20
MAX_CALL_BYTES = 2 << 20
"""One call moves about this much, if as many slots lie side by side: the next calls are prepared meanwhile."""
MAX_CALL_SLOTS = 512
"""Two buffers each."""
MAX_BAD_IN_A_ROW = 3
"""After so many failed by themselves, no more are tried by themselves before a call of the batch succeeds."""
SPOT_ERRORS = (errno.EIO, errno.ENODATA, errno.EILSEQ)
"""What a device says of a bad spot: ``BLK_STS_IOERR``, ``_MEDIUM`` and ``_PROTECTION``."""


class Batch:
    """Blocks with their slots and memory, and what became of them."""

    def __init__(
        self,
        segments: Segments,
        offsets: NDArray[np.int64],
        blocks: Sequence[BlockIdentity],
        payloads: Sequence[Pages],
    ) -> None:
        """Describe a batch; arguments as for :class:`kvstore.tiers.disk.store.DiskStore`."""
        self.offsets = offsets
        self.blocks = blocks
        self.sizes = np.array([block.slot_bytes for block in blocks], np.int64)
        self.generations: list[int] = []
        self.checksums = [block.checksum for block in blocks]
        """Of the payloads, as a reader gets them; those that were not known, and those of codecs with a loss,
        are there after :meth:`write_run`."""
        self.failed = np.zeros(len(blocks), bool)
        """Blocks that :meth:`write_run` did not write."""
        self.bad = np.zeros(len(blocks), bool)
        """Blocks that were tried again by themselves, and failed."""
        self.refused = np.zeros(len(blocks), bool)
        """Blocks that :meth:`write_run` did not write, since their codec refuses them."""
        self.verdicts = [""] * len(blocks)
        """Of :meth:`read_run`; blocks that have one before are left alone.

        A block that could not be read, and was not tried by itself, is ``unreadable`` as well.
        """
        self._in_a_row = 0
        """Blocks, of all runs, that failed by themselves since one did not."""
        self._segments = segments
        self._payloads = payloads

    def __len__(self) -> int:
        """Blocks."""
        return len(self.blocks)

    def runs(self, threads: int) -> list[list[int]]:
        """Cut the batch into runs of neighbouring slots, about enough for so many threads."""
        wanted = [index for index, verdict in enumerate(self.verdicts) if not verdict]
        wanted.sort(key=self.offsets.tolist().__getitem__)
        total = int(self.sizes[wanted].sum())
        limit = min(max(total // threads, MIN_CALL_BYTES), MAX_CALL_BYTES)
        runs: list[list[int]] = []
        stop, length = -1, 0
        for index in wanted:
            offset, size = int(self.offsets[index]), int(self.sizes[index])
            joins = offset == stop and length + size <= limit and len(runs[-1]) < MAX_CALL_SLOTS
            if joins:
                runs[-1].append(index)
            else:
                runs.append([index])
            length = length + size if joins else size
            stop = offset + size
        return runs

    def leave_out(self, index: int, verdict: str) -> None:
        """Do nothing for a block; as if it had been tried."""
        self.verdicts[index] = verdict
        self.failed[index] = True

    def write_run(self, run: list[int]) -> OSError | None:
        """Write neighbouring blocks, one by one where not all can be written; return an error if any."""
        error = self._write(run)
        if error is not None and error.errno in SPOT_ERRORS:
            return self._one_by_one(run, self._write, error)
        return error

    def read_run(self, run: list[int]) -> OSError | None:
        """Read and check neighbouring blocks, one by one where not all can be read; return an error if any."""
        error = self._read(run)
        return error and self._one_by_one(run, self._read, error)

    def _one_by_one(
        self, run: list[int], move: Callable[[list[int]], OSError | None], together: OSError
    ) -> OSError | None:
        """Find the bad spots, but stop where it looks like a dead device, whose calls may take very long."""
        first = None
        for index in run:
            if self._in_a_row >= MAX_BAD_IN_A_ROW:
                return first or together
            error = move([index])
            first = first or error
            self.bad[index] = error is not None and not isinstance(error, EndOfFileError)
            self._in_a_row += bool(self.bad[index])
        return first

    def _write(self, run: list[int]) -> OSError | None:
        """Write neighbouring blocks with one call for those between two that a codec refuses."""
        error: OSError | None = None
        part: list[int] = []
        buffers: list[Pages] = []
        for index in run:
            try:
                pages = self._stored(index)
            except CodecError:
                self.refused[index] = True
                self.leave_out(index, "codec")
                error = self._write_pages(part, buffers) or error
                part, buffers = [], []
                continue
            block = self.blocks[index]
            header = aligned(header_bytes(len(block.key)))
            encoded = encode_header(block, self.checksums[index], self.generations[index])
            header[:] = np.frombuffer(encoded, np.uint8)
            part.append(index)
            buffers += [header, pages]
        return self._write_pages(part, buffers) or error

    def _write_pages(self, run: list[int], buffers: list[Pages]) -> OSError | None:
        if not run:
            return None
        try:
            self._segments.write(int(self.offsets[run[0]]), buffers)
        except OSError as error:
            self.failed[run] = True
            return error
        self.failed[run] = False
        self._in_a_row = 0
        return None

    def _stored(self, index: int) -> Pages:
        """Return the whole pages to be written for a block, of the payload's own memory where that can be.

        Its checksum is known from here on.
        """
        block, payload = self.blocks[index], self._payloads[index]
        original = kept = payload[: block.block_bytes]
        if isinstance(block.codec, Plain):
            pages, stored = _memory(payload, block.block_bytes), original
        else:
            encoded = block.codec.encode(original)
            if not block.is_exact:
                kept = np.empty_like(original)
                block.codec.decode(encoded, kept)
                self.checksums[index] = NO_CHECKSUM
            pages, stored = aligned(whole_pages(len(encoded))), np.frombuffer(encoded, np.uint8)
        if self.checksums[index] < FIRST_CHECKSUM:
            self.checksums[index] = checksum_of(kept)
        if not np.may_share_memory(pages, payload):
            pages[: len(stored)] = stored
            pages[len(stored) :] = 0
        return pages

    def _read(self, run: list[int]) -> OSError | None:
        headers = [aligned(header_bytes(len(self.blocks[index].key))) for index in run]
        pages = [self._place(index) for index in run]
        buffers = [buffer for pair in zip(headers, pages, strict=True) for buffer in pair]
        try:
            self._segments.read(int(self.offsets[run[0]]), buffers)
        except OSError as error:
            for index in run:
                ends = isinstance(error, EndOfFileError)
                self.verdicts[index] = "truncated" if ends else "unreadable"
            return error
        for index, header, read in zip(run, headers, pages, strict=True):
            block, target = (
                self.blocks[index],
                self._payloads[index][: self.blocks[index].block_bytes],
            )
            payload = _decoded(block, read[: block.stored_bytes], target)
            verdict = check(header, payload, block, self.generations[index])
            if payload is not None and verdict == GOOD and not np.may_share_memory(payload, target):
                target[:] = payload
            self.verdicts[index] = verdict
        self._in_a_row = 0
        return None

    def _place(self, index: int) -> Pages:
        """Return the whole pages to read a block into: where its payload belongs, if that can be."""
        block = self.blocks[index]
        if isinstance(block.codec, Plain):
            return _memory(self._payloads[index], block.block_bytes)
        return aligned(whole_pages(block.stored_bytes))


def _decoded(block: BlockIdentity, stored: Pages, target: Pages) -> Pages | None:
    """Return the block that ``stored`` stands for, in ``target`` if need be; None if it stands for none."""
    if isinstance(block.codec, Plain):
        return stored
    try:
        block.codec.decode(stored.tobytes(), target)
    except CodecError:
        return None
    return target


def _memory(payload: Pages, block_bytes: int) -> Pages:
    """Return the whole pages of ``payload`` itself, or new ones where direct I/O could not use it."""
    pages = payload[: whole_pages(block_bytes)]
    if len(pages) == whole_pages(block_bytes) and is_aligned(pages):
        return pages
    return aligned(whole_pages(block_bytes))
