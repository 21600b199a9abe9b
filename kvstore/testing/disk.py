"""A disk that fails, stops short or dies at the call that a test names."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import numpy as np

from kvstore.blocks import NO_CHECKSUM
from kvstore.tiers.disk.system import System
from kvstore.tiers.moves import Prompt

if TYPE_CHECKING:
    import os
    import sqlite3
    from collections.abc import Sequence
    from pathlib import Path

    from kvstore.namespace import Namespace
    from kvstore.tiers.disk import BlockIdentity
    from kvstore.tiers.disk.system import Buffers


def identities(
    namespace: Namespace, key: bytes, start: int = 0, checksums: Sequence[int] = ()
) -> list[BlockIdentity]:
    """Name the blocks from ``start`` on of the prompt whose block keys are ``key``, none of which is refused.

    Args:
        namespace: of the prompt.
        key: keys of all its blocks from the first one on.
        start: the first block to name.
        checksums: of the blocks from ``start`` on; none: not known.
    """
    positions = np.arange(start, len(key) // namespace.key_bytes)
    if not len(positions):
        return []
    sums = np.array(checksums or [NO_CHECKSUM] * len(positions), np.uint64)
    return Prompt(namespace, key).identities(positions, sums, np.zeros(len(positions), bool))


class Crash(BaseException):
    """Stands for the death of the process: nothing may catch it, and no later call does anything."""


class Fault(Protocol):
    """What happens at a call."""

    def __call__(self, name: str, number: int) -> int | None:
        """Do nothing, or raise.

        Args:
            name: of the method of :class:`System`.
            number: of the call, from 1 on.

        Returns:
            How many bytes a read or write may move; None: all.
        """


def fails_at(first: int, code: int, last: int | None = None) -> Fault:
    """Raise ``OSError(code)`` at the calls from ``first`` to ``last`` (by default: only that one)."""

    def fault(name: str, number: int) -> int | None:
        if first <= number <= (first if last is None else last):
            raise OSError(code, f"{name} fails, as the test wants")
        return None

    return fault


def crashes_at(first: int) -> Fault:
    """Die at call ``first``, before it does anything."""

    def fault(name: str, number: int) -> int | None:
        if number >= first:
            raise Crash(name)
        return None

    return fault


def is_short(num_bytes: int) -> Fault:
    """Move at most ``num_bytes`` with each read or write."""
    return lambda name, number: num_bytes  # noqa: ARG005


class FaultySystem(System):
    """The real system, after ``fault`` has had its say. Closing is left alone: it is how a crash ends."""

    def __init__(self, fault: Fault | None = None) -> None:
        """Let ``fault`` decide; it may be replaced at any time."""
        self.fault = fault
        self.calls: list[str] = []

    def _step(self, name: str) -> int | None:
        self.calls.append(name)
        return self.fault(name, len(self.calls)) if self.fault else None

    def make_directory(self, path: Path) -> None:
        """Make a directory."""
        self._step("make_directory")
        super().make_directory(path)

    def make_private(self, path: Path) -> None:
        """Change the mode of a directory."""
        self._step("make_private")
        super().make_private(path)

    def sync_directory(self, path: Path) -> None:
        """Flush a directory."""
        self._step("sync_directory")
        super().sync_directory(path)

    def open(self, path: Path, flags: int) -> int:
        """Open a file."""
        self._step("open")
        return super().open(path, flags)

    def lock(self, descriptor: int) -> None:
        """Lock a file."""
        self._step("lock")
        super().lock(descriptor)

    def allocate(self, descriptor: int, num_bytes: int) -> None:
        """Allocate a file."""
        self._step("allocate")
        super().allocate(descriptor, num_bytes)

    def truncate(self, descriptor: int, num_bytes: int) -> None:
        """Cut a file."""
        self._step("truncate")
        super().truncate(descriptor, num_bytes)

    def read(self, descriptor: int, buffers: Buffers, offset: int) -> int:
        """Read, perhaps less than wanted."""
        return super().read(descriptor, _first(buffers, self._step("read")), offset)

    def write(self, descriptor: int, buffers: Buffers, offset: int) -> int:
        """Write, perhaps less than wanted."""
        return super().write(descriptor, _first(buffers, self._step("write")), offset)

    def sync(self, descriptor: int) -> None:
        """Flush a file."""
        self._step("sync")
        super().sync(descriptor)

    def remove(self, path: Path) -> None:
        """Remove a file."""
        self._step("remove")
        super().remove(path)

    def stat(self, path: Path) -> os.stat_result:
        """Look at a file."""
        self._step("stat")
        return super().stat(path)

    def num_links(self, descriptor: int) -> int:
        """Look at an open file."""
        self._step("num_links")
        return super().num_links(descriptor)

    def free_bytes(self, path: Path) -> int:
        """Look at a file system."""
        self._step("free_bytes")
        return super().free_bytes(path)

    def commit(self, connection: sqlite3.Connection) -> None:
        """End a transaction."""
        self._step("commit")
        super().commit(connection)


def _first(buffers: Buffers, num_bytes: int | None) -> Buffers:
    if num_bytes is None:
        return buffers
    first = []
    for buffer in buffers:
        first.append(buffer[:num_bytes])
        num_bytes -= len(first[-1])
        if not num_bytes:
            break
    return first
