"""The disk tier's bytes: writes, reads and finds again blocks of KV in a directory of its own.

*Slots.* The caller takes slots with :meth:`DiskStore.allocate`, writes blocks into them, and gives them back
with :meth:`DiskStore.release`. These two do no I/O and may be called under a lock. A slot that was released
is written again only after its row is gone from the manifest.

*Promise.* A block that :meth:`DiskStore.write` reports as stored survives the death of the process and the
loss of power: :meth:`DiskStore.recover` finds it. What :meth:`DiskStore.read` calls good is byte for byte what
was written for exactly that block; everything else is a verdict of its own, and the slot is set aside.

*Trouble.* No I/O error ever reaches the caller. Writing to a disk that is full, read-only, broken, gone or
too slow turns itself off for a pause, in which nothing is stored; so does reading, on its own account, and
every read says ``off`` meanwhile. After the pause it is tried again, on files that are opened anew where that
may help.

*Threads.* Every method may be called from any thread. One batch is written at a time; any number are read.
A slot is not written while it is read, and released when nobody uses it: the caller sees to that.
"""

from __future__ import annotations

import errno
import logging
import sqlite3
import threading
from collections import Counter
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from kvstore.errors import ConfigError
from kvstore.tiers.disk.access import Access
from kvstore.tiers.disk.batch import Batch
from kvstore.tiers.disk.format import GOOD, aligned
from kvstore.tiers.disk.listing import Listing, batches, can_be_listed
from kvstore.tiers.disk.slots import EMPTY, LOST, Slots
from kvstore.tiers.disk.system import System
from kvstore.tiers.disk.workers import Workers

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from numpy.typing import NDArray

    from kvstore.tiers.disk.directory import Directory, DiskOptions
    from kvstore.tiers.disk.format import BlockIdentity
    from kvstore.tiers.disk.health import Health
    from kvstore.tiers.disk.recovery import RecoveredNamespace

    Offsets = NDArray[np.int64]
    Payloads = Sequence[NDArray[np.uint8]]

logger = logging.getLogger(__name__)

_WRONG_PLACE = (errno.ENOENT, errno.EEXIST, errno.ENOTDIR, errno.EROFS, errno.EACCES, errno.EPERM)


class Written(NamedTuple):
    """What became of blocks that were to be stored; bool ``[n]`` each."""

    stored: NDArray[np.bool_]
    """Which will be found again."""
    refused: NDArray[np.bool_]
    """Which were not stored since the codec of their namespace refuses them: they can be stored plain."""


class DiskStore:
    """Blocks in a directory, which no other instance uses at the same time."""

    def __init__(
        self,
        path: Path,
        options: DiskOptions,
        clock: Callable[[], float],
        system: System | None = None,
    ) -> None:
        """Open ``path``, which is made if it is missing, and find what is there.

        Args:
            path: a directory for this store alone.
            options: how much it may take.
            clock: monotonic seconds.
            system: the system calls; tests have others.

        Raises:
            ConfigError: the directory cannot be used, or is in use by another instance.
        """
        self.options = options
        self.capacity_bytes = options.capacity_bytes
        self._counts: Counter[tuple[str, ...]] = Counter()
        self.slots = Slots(self.capacity_bytes)
        self._count_lock = threading.Lock()
        self._clock = clock
        self._listing = Listing()
        began = clock()
        try:
            self._access = Access(path, options, clock, system or System())
        except (OSError, sqlite3.Error) as error:
            raise _refusal(path, error) from error
        self.open_s = clock() - began
        """How long it took to open the directory."""
        self._found, self._access.found = self._access.found, []
        self._generation = self._access.generation
        if self._found:
            self._occupy(self._found)
        try:
            self._workers = Workers(options.threads)
        except BaseException:
            self._access.close()
            raise

    # -- what is there --------------------------------------------------------------------------

    def recover(self) -> list[RecoveredNamespace]:
        """Hand over what the directory held when it was opened, for the first caller only.

        The slots are in use; the caller releases those that it does not want.
        """
        found, self._found = self._found, []
        return found

    @property
    def is_direct(self) -> bool:
        """Whether the files are read and written past the page cache."""
        directory = self._access.directory
        return directory is not None and directory.segments.direct

    @property
    def off(self) -> dict[str, str]:
        """Why ``read`` and ``write`` failed when they were last tried; empty strings where they did not."""
        return {"read": self._access.reading.reason, "write": self._access.writing.reason}

    @property
    def readable(self) -> bool:
        """Whether a read would be tried now: no trouble, or the pause after it is over."""
        return self._access.may_try(self._access.reading)

    @property
    def writable(self) -> bool:
        """Whether a write would be tried now: no trouble, or the pause after it is over."""
        return self._access.may_try(self._access.writing)

    @property
    def troubles(self) -> dict[tuple[str, str], int]:
        """How often each reason turned ``read`` or ``write`` off, by (which, reason)."""
        sides = ("read", self._access.reading), ("write", self._access.writing)
        return {
            (name, reason): count for name, side in sides for reason, count in side.troubles.items()
        }

    @property
    def counts(self) -> Counter[tuple[str, ...]]:
        """Blocks so far: ``written_blocks``, ``unwritten_blocks``, and (``read_blocks``, verdict).

        ``uncoded_blocks`` were neither: their codec has refused them.

        ``refused_blocks`` are those of the unwritten ones whose namespace is too long to be listed.
        """
        with self._count_lock:
            return self._counts.copy()

    # -- slots ----------------------------------------------------------------------------------

    def allocate(self, slot_size: int, count: int) -> Offsets:
        """Take up to ``count`` slots of ``slot_size`` (:func:`slot_bytes_of`); fewer when the disk is full."""
        return self.slots.allocate(slot_size, count)

    def release(self, slot_size: int, offsets: Offsets) -> None:
        """Forget the blocks at ``offsets``, if any, and give the slots of ``slot_size`` back.

        After a crash before the next :meth:`write` or :meth:`flush` they may be found again; what is
        released after :meth:`close` is found again.
        """
        self.slots.release(slot_size, offsets)

    # -- bytes ----------------------------------------------------------------------------------

    def write(
        self, offsets: Offsets, blocks: Sequence[BlockIdentity], payloads: Payloads
    ) -> Written:
        """Store ``blocks`` in slots that were allocated for them and hold nothing yet.

        Args:
            offsets: int64 ``[n]``, distinct.
            blocks: what they are. A checksum that is known is not computed again.
            payloads: uint8 arrays of ``block_bytes`` each, or longer ones that have those first. Those that
                go on to a whole page, at the address of one, are written without a copy.

        Returns:
            Which are stored, and which are refused. The slots of those that are not stored stay with the
            caller, empty; those that are bad are set aside until the next start, and released all the same.
        """
        stored, refused = np.zeros(len(blocks), bool), np.zeros(len(blocks), bool)
        listed = [index for index, block in enumerate(blocks) if can_be_listed(block)]
        with self._access.lock:
            for part in batches(blocks, listed):
                if not self._ready(self._access.writing):
                    break
                with self._access.shared() as directory:
                    if directory is not None:
                        batch = Batch(
                            directory.segments,
                            offsets[part],
                            [blocks[index] for index in part],
                            [payloads[index] for index in part],
                        )
                        stored[part] = self._write(directory, batch)
                        refused[part] = batch.refused
        self._count(
            {
                ("written_blocks",): int(stored.sum()),
                ("unwritten_blocks",): int((~stored & ~refused).sum()),
                ("uncoded_blocks",): int(refused.sum()),
                ("refused_blocks",): len(blocks) - len(listed),
            }
        )
        return Written(stored, refused)

    def read(
        self, offsets: Offsets, blocks: Sequence[BlockIdentity], targets: Payloads
    ) -> list[str]:
        """Read the blocks at ``offsets`` into ``targets``; see :meth:`write` for their form.

        Returns:
            A verdict for each: ``good``, ``off`` (not tried, or the device fails), ``missing`` (nothing is
            stored there), ``unreadable``, ``truncated``, or what :func:`kvstore.tiers.disk.format.check` found
            wrong. A target whose verdict is not ``good`` holds garbage. Slots that are bad, or whose contents
            are wrong, are set aside until the next start; the caller releases them all the same.
        """
        verdicts = ["off"] * len(blocks)
        if self._ready(self._access.reading):
            with self._access.shared() as directory:
                if directory is not None:
                    batch = Batch(directory.segments, offsets, blocks, targets)
                    verdicts = self._read(directory, batch)
        self._count(
            {("read_blocks", verdict): count for verdict, count in Counter(verdicts).items()}
        )
        return verdicts

    def try_reading(self, offset: int, num_bytes: int) -> float | None:
        """Read whole pages into nowhere: the seconds that it took, or None if it did not work now."""
        began = self._clock()
        with self._access.shared() as directory:
            if directory is None or not self.readable:
                return None
            try:
                directory.segments.read(offset, [aligned(num_bytes)])
            except OSError:
                return None
        return self._clock() - began

    def flush(self) -> bool:
        """Make what was released so far unfindable; say whether that worked."""
        with self._access.lock, self._access.shared() as directory:
            if directory is None:
                return False
            try:
                self._delete_stale(directory, lasting=True)
            except (OSError, sqlite3.Error) as error:
                self._access.trouble(self._access.writing, error)
                return False
            return True

    def close(self) -> None:
        """Flush, and close everything: from here on every read and write is ``off``."""
        try:
            self.flush()
        finally:
            self._access.close()
            self._workers.close()

    def check_invariants(self) -> None:
        """Raise AssertionError naming the first broken invariant of the slots."""
        self.slots.check_invariants()

    # -- inner ----------------------------------------------------------------------------------

    def _count(self, more: dict[tuple[str, ...], int]) -> None:
        with self._count_lock:
            self._counts.update(more)

    def _write(self, directory: Directory, batch: Batch) -> NDArray[np.bool_]:
        """Bytes, then the flush, then the rows."""
        began = self._clock()
        for index, held in enumerate(self.slots.generations(batch.offsets)):
            assert held <= EMPTY, "blocks are written into slots that hold nothing"
            if held == LOST:
                batch.leave_out(index, "bad")
        try:
            directory.check_place()
            self._delete_stale(directory, lasting=False)
            self._listing.number(directory.manifest, batch.blocks)
            first = self._generation + 1
            self._generation += len(batch)
            batch.generations = list(range(first, first + len(batch)))
            error = self._workers.run(batch.write_run, batch.runs(self._workers.count))
            there = ~batch.failed
            if there.any():
                directory.segments.sync(batch.offsets[there], batch.sizes[there])
                self._listing.insert(directory.manifest, batch, np.flatnonzero(there).tolist())
        except (OSError, sqlite3.Error) as failure:
            self._access.trouble(self._access.writing, failure)
            self.slots.doubt(batch.offsets)
            return np.zeros(len(batch), bool)
        kept = np.flatnonzero(there).tolist()
        self.slots.stored(batch.offsets[kept].tolist(), [batch.generations[at] for at in kept])
        if error is None or self._only_spots(directory, batch, error):
            self._access.ended(self._access.writing, *self._cost(began, batch))
        else:
            self._access.trouble(self._access.writing, error)
        return there

    def _only_spots(self, directory: Directory, batch: Batch, error: OSError) -> bool:
        """Set slots aside that cannot be written, where others can; say whether that was all the trouble."""
        if batch.failed.all() and not (batch.bad.any() and directory.can_write()):
            return False
        for offset in batch.offsets[batch.bad].tolist():
            if self.slots.quarantine(offset, EMPTY):
                logger.error("disk tier: the slot at %d cannot be written: %s", offset, error)
        explained = batch.bad | [bool(verdict) for verdict in batch.verdicts]
        return not (batch.failed & ~explained).any()

    def _read(self, directory: Directory, batch: Batch) -> list[str]:
        began = self._clock()
        batch.generations = self.slots.generations(batch.offsets)
        for index, generation in enumerate(batch.generations):
            if generation <= EMPTY:
                batch.verdicts[index] = "missing"
        error = self._workers.run(batch.read_run, batch.runs(self._workers.count))
        verdicts = batch.verdicts
        tried = [verdict for verdict in verdicts if verdict != "missing"]
        if error is not None and all(verdict == "unreadable" for verdict in tried):
            try:
                directory.segments.probe()
            except OSError:  # the device, not bad spots on it
                self._access.trouble(self._access.reading, error)
                return ["off" if verdict == "unreadable" else verdict for verdict in verdicts]
        for index, verdict in enumerate(verdicts):
            if verdict in (GOOD, "missing"):
                continue
            if verdict == "unreadable" and not batch.bad[index]:  # not tried, after others failed
                verdicts[index] = "off"
                continue
            offset, generation = int(batch.offsets[index]), batch.generations[index]
            if self.slots.quarantine(offset, generation):
                logger.error("disk tier: the block at %d is dropped: %s is wrong", offset, verdict)
        if tried:
            self._access.ended(self._access.reading, *self._cost(began, batch))
        return verdicts

    def _delete_stale(self, directory: Directory, *, lasting: bool) -> None:
        stale = self.slots.stale()
        if stale or lasting:
            directory.delete(stale, lasting=lasting)
            self.slots.deleted(stale)

    def _ready(self, side: Health) -> bool:
        return self._access.ready(side, self._resume)

    def _resume(self, directory: Directory) -> None:
        """Go on with a directory that was opened anew: what it lost is missing from here on."""
        self.slots.keep_only(directory.generations())
        self._listing.forget()
        self._generation = max(self._generation, directory.generation)

    def _cost(self, began: float, batch: Batch) -> tuple[float, int]:
        """Seconds since ``began``, and bytes of ``batch``."""
        return self._clock() - began, int(batch.sizes.sum())

    def _occupy(self, found: Sequence[RecoveredNamespace]) -> None:
        offsets = np.concatenate([block.offsets for block in found])
        sizes = np.concatenate([block.slot_sizes for block in found])
        generations = np.concatenate([block.generations for block in found])
        order = np.argsort(offsets)
        self.slots.occupy(offsets[order], sizes[order], generations[order])


def _refusal(path: Path, error: OSError | sqlite3.Error) -> ConfigError:
    """Say why ``path`` cannot be opened, and what to do where that is known."""
    if isinstance(error, FileExistsError) and path.is_file():
        return ConfigError(f"disk directory {path} is a file: give a directory")
    reason = (error.strerror if isinstance(error, OSError) else None) or str(error)
    if isinstance(error, OSError) and error.errno in _WRONG_PLACE:
        reason += ": choose another disk_path"
    return ConfigError(f"disk directory {path} cannot be used: {reason}")
