"""Blocks that are written or read together: neighbouring slots with one call, many calls at a time."""

from __future__ import annotations

import errno
from typing import TYPE_CHECKING

import numpy as np

from kvstore.blocks import FIRST_CHECKSUM
from kvstore.tiers.arena import slot_bytes as whole_pages
from kvstore.tiers.disk.format import (
    GOOD,
    aligned,
    check,
    checksum_of,
    encode_header,
    header_bytes,
    is_aligned,
    slot_bytes,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from kvstore.tiers.disk.files import Segments
    from kvstore.tiers.disk.format import BlockIdentity

    Pages = NDArray[np.uint8]

MIN_CALL_BYTES = 1 << 20
MAX_CALL_BYTES = 8 << 20
"""One call moves about this much, if as many slots lie side by side."""
MAX_CALL_SLOTS = 512
"""Two buffers each."""


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
        self.sizes = np.array(
            [slot_bytes(block.block_bytes, len(block.key)) for block in blocks], np.int64
        )
        self.generations: list[int] = []
        self.checksums = [block.checksum for block in blocks]
        """Of the payloads; those that were not known are there after :meth:`write_run`."""
        self.failed = np.zeros(len(blocks), bool)
        """Blocks that :meth:`write_run` could not write."""
        self.verdicts = [""] * len(blocks)
        """Of :meth:`read_run`; blocks that have one before are left alone."""
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

    def write_run(self, run: list[int]) -> OSError | None:
        """Write neighbouring blocks; what fails is marked, and the error returned."""
        buffers: list[Pages] = []
        for index in run:
            block, payload = self.blocks[index], self._payloads[index]
            if self.checksums[index] < FIRST_CHECKSUM:
                self.checksums[index] = checksum_of(payload[: block.block_bytes])
            header = aligned(header_bytes(len(block.key)))
            encoded = encode_header(block, self.checksums[index], self.generations[index])
            header[:] = np.frombuffer(encoded, np.uint8)
            pages = _memory(payload, block.block_bytes)
            if not np.may_share_memory(pages, payload):
                pages[: block.block_bytes] = payload[: block.block_bytes]
                pages[block.block_bytes :] = 0
            buffers += [header, pages]
        try:
            self._segments.write(int(self.offsets[run[0]]), buffers)
        except OSError as error:
            self.failed[run] = True
            return error
        return None

    def read_run(self, run: list[int]) -> OSError | None:
        """Read and check neighbouring blocks, one by one where not all can be read; return an error if any."""
        headers = [aligned(header_bytes(len(self.blocks[index].key))) for index in run]
        pages = [_memory(self._payloads[index], self.blocks[index].block_bytes) for index in run]
        buffers = [buffer for pair in zip(headers, pages, strict=True) for buffer in pair]
        try:
            self._segments.read(int(self.offsets[run[0]]), buffers)
        except OSError as error:
            if len(run) == 1:
                short = error.errno == errno.ENODATA
                self.verdicts[run[0]] = "truncated" if short else "unreadable"
                return error
            errors = [self.read_run([index]) for index in run]
            return next(filter(None, errors), None)
        for index, header, read in zip(run, headers, pages, strict=True):
            block, target = self.blocks[index], self._payloads[index]
            payload = read[: block.block_bytes]
            verdict = check(header, payload, block, self.generations[index])
            if verdict == GOOD and not np.may_share_memory(read, target):
                target[: block.block_bytes] = payload
            self.verdicts[index] = verdict
        return None


def _memory(payload: Pages, block_bytes: int) -> Pages:
    """Return the whole pages of ``payload`` itself, or new ones where direct I/O could not use it."""
    pages = payload[: whole_pages(block_bytes)]
    if len(pages) == whole_pages(block_bytes) and is_aligned(pages):
        return pages
    return aligned(whole_pages(block_bytes))
