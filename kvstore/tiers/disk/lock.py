"""Whose directory it is: of this user, changed by no other one, and used by one instance at a time."""

from __future__ import annotations

import fcntl
import os
import stat
from typing import TYPE_CHECKING

from kvstore.errors import ConfigError
from kvstore.tiers.disk.system import DIRECTORY_MODE

if TYPE_CHECKING:
    from pathlib import Path

    from kvstore.tiers.disk.system import System

LOCK_NAME = "kvstore.lock"
FOREIGN_NAMES = frozenset({"lost+found"})
"""What a directory may hold besides: the root of a file system has it."""


def lock_directory(directory: Path, system: System) -> int:
    """Return the descriptor that keeps every other instance out of ``directory`` while it is open.

    A directory that others may read is hidden from them; one that is refused is left as it is.

    Raises:
        ConfigError: another instance has it, other users may change it, or it holds other things.
        OSError: the file system refuses.
    """
    check_directory(directory, system)
    descriptor = system.open(directory / LOCK_NAME, os.O_RDWR | os.O_CREAT)
    try:
        system.lock(descriptor)
        if stat.S_IMODE(system.stat(directory).st_mode) != DIRECTORY_MODE:
            system.make_private(directory)
    except BlockingIOError:
        system.close(descriptor)
        raise ConfigError(
            f"disk directory {directory} is used by another kvstore: give each instance its own"
        ) from None
    except BaseException:
        system.close(descriptor)
        raise
    return descriptor


def check_directory(directory: Path, system: System) -> None:
    """Refuse a directory that others may change or that holds other things; change nothing.

    Raises:
        ConfigError: it says which.
        OSError: the file system refuses.
    """
    status = system.stat(directory)
    mode, user = stat.S_IMODE(status.st_mode), os.geteuid()
    if status.st_uid != user:
        raise ConfigError(
            f"disk directory {directory} belongs to user {status.st_uid}, and this is user {user}: "
            f"run chown {user} on it, or give another one"
        )
    if mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise ConfigError(
            f"disk directory {directory} has mode {mode:04o}, so that other users may change the blocks in "
            f"it: run chmod {DIRECTORY_MODE:o} on it, or give another one"
        )
    made = (directory / LOCK_NAME).exists()
    if not made and any(other.name not in FOREIGN_NAMES for other in directory.iterdir()):
        raise ConfigError(
            f"disk directory {directory} is not empty and was not made by kvstore: give it one of its own"
        )


def is_in_use(directory: Path) -> bool:
    """Whether an instance has ``directory`` open now. Raises OSError."""
    try:
        descriptor = os.open(directory / LOCK_NAME, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False
