"""What this process may use of its machine, read from ``/proc`` and ``/sys`` below ``root``.

``root`` is ``/`` but in tests. What a system does not tell is ``None`` or absent, never an error.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

NO_LIMIT_BYTES = 1 << 60
"""Control groups of version 1 write about 2**63 where version 2 writes ``max``."""


@dataclass(frozen=True)
class MemoryLimit:
    """One of the limits on the memory of this process."""

    limit_bytes: int
    available_bytes: int
    """What is not in use yet, or can be had back at once because it only caches files."""
    source: str
    """For people: the machine, or the file of a control group."""


def available_memory_bytes(root: Path) -> int | None:
    """Return how much memory may still be taken, by all processes that share its limits together."""
    limit = memory_limit(root)
    return limit.available_bytes if limit else None


def memory_limit(root: Path) -> MemoryLimit | None:
    """Return the limit that leaves the least: the machine's memory, or that of a control group."""
    limits = list(cgroup_limits(root))
    sizes = meminfo(root)
    if {"MemTotal", "MemAvailable"} <= sizes.keys():
        limits.append(MemoryLimit(sizes["MemTotal"], sizes["MemAvailable"], "this machine"))
    return min(limits, key=lambda limit: limit.available_bytes, default=None)


def cgroup_limit_bytes(root: Path) -> int | None:
    """Return the smallest memory limit of this process's control groups, or ``None`` without one."""
    return min((limit.limit_bytes for limit in cgroup_limits(root)), default=None)


def cgroup_limits(root: Path) -> Iterator[MemoryLimit]:
    """Yield the memory limits of this process's control groups.

    Both versions are read, from the process's own group up to the top: a limit set on a parent
    holds as well. Beyond ``memory.high`` nothing fails, but everything is slowed down.
    """
    for directory, version in _cgroups(root):
        names = _FILES[version]
        for file in names.limits:
            limit = read_text(directory / file).strip()
            if limit.isdigit() and int(limit) < NO_LIMIT_BYTES:
                available = max(0, int(limit) - _bytes_in_use(directory, names))
                yield MemoryLimit(int(limit), available, f"the control group's {directory / file}")


def meminfo(root: Path) -> dict[str, int]:
    """Return the sizes of ``/proc/meminfo`` in bytes, and its other numbers as they are."""
    numbers: dict[str, int] = {}
    for line in read_text(root / "proc/meminfo").splitlines():
        key, _, value = line.partition(":")
        number, _, unit = value.strip().partition(" ")
        if number.isdigit():
            numbers[key] = int(number) << 10 if unit == "kB" else int(number)
    return numbers


def reserved_huge_pages(root: Path) -> tuple[int, int]:
    """Return the size in bytes of a huge page that can be reserved, and how many of them are free.

    Both are 0 where the kernel has none.
    """
    numbers = meminfo(root)
    free = numbers.get("HugePages_Free", 0) - numbers.get("HugePages_Rsvd", 0)
    return numbers.get("Hugepagesize", 0), max(0, free)


def file_system(root: Path, path: Path) -> str:
    """Return the type of the file system that ``path``, which need not exist yet, is or would be on."""
    best, kind = -1, "unknown"
    for line in read_text(root / "proc/self/mounts").splitlines():
        _, place, found, *_ = line.split()
        place = place.replace("\\040", " ")
        if path.resolve().is_relative_to(place) and len(place) >= best:
            best, kind = len(place), found
    return kind


def read_text(path: Path) -> str:
    """Return the text of a file, or an empty string when it cannot be read."""
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


@dataclass(frozen=True)
class _Names:
    """Files of a control group, and the field of ``memory.stat`` that counts reclaimable cache."""

    limits: tuple[str, ...]
    used: str
    cached: str


_FILES = {
    1: _Names(("memory.limit_in_bytes",), "memory.usage_in_bytes", "total_inactive_file"),
    2: _Names(("memory.high", "memory.max"), "memory.current", "inactive_file"),
}


def _bytes_in_use(directory: Path, names: _Names) -> int:
    """Return what the control group at ``directory`` uses, without the cache that can be had back."""
    used = read_text(directory / names.used).strip()
    fields = dict(
        line.split(" ", 1)
        for line in read_text(directory / "memory.stat").splitlines()
        if " " in line
    )
    return max(0, int(used) - int(fields.get(names.cached, 0))) if used.isdigit() else 0


def _cgroups(root: Path) -> Iterator[tuple[Path, int]]:
    """Yield the directories of this process's control groups for memory, with their version."""
    top = root / "sys/fs/cgroup"
    for line in read_text(root / "proc/self/cgroup").splitlines():
        _, _, rest = line.partition(":")
        controllers, _, group = rest.partition(":")
        if controllers == "":
            base, version = top, 2
        elif "memory" in controllers.split(","):
            base, version = top / "memory", 1
        else:
            continue
        below = Path(group.lstrip("/"))
        for directory in (below, *below.parents):
            yield base / directory, version
