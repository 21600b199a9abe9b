"""What this process may use of its machine, read from ``/proc`` and ``/sys`` below ``root``.

``root`` is ``/`` but in tests. What a system does not tell is ``None`` or absent, never an error.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

NO_LIMIT_BYTES = 1 << 60
"""Control groups of version 1 write about 2**63 where version 2 writes ``max``."""


def usable_memory_bytes(root: Path) -> int | None:
    """Return what this process may use at most: physical memory or its control group's limit."""
    limits = [meminfo(root).get("MemTotal"), cgroup_limit_bytes(root)]
    return min((limit for limit in limits if limit is not None), default=None)


def meminfo(root: Path) -> dict[str, int]:
    """Return the sizes of ``/proc/meminfo`` in bytes."""
    sizes: dict[str, int] = {}
    for line in read_text(root / "proc/meminfo").splitlines():
        key, _, value = line.partition(":")
        number, _, unit = value.strip().partition(" ")
        if number.isdigit() and unit == "kB":
            sizes[key] = int(number) << 10
    return sizes


def cgroup_limit_bytes(root: Path) -> int | None:
    """Return the smallest memory limit of this process's control groups, or ``None`` without one.

    Both versions are read, from the process's own group up to the top: a limit set on a parent
    holds as well.
    """
    limits = [int(text) for text in _cgroup_values(root) if text.isdigit()]
    return min((limit for limit in limits if limit < NO_LIMIT_BYTES), default=None)


def read_text(path: Path) -> str:
    """Return the text of a file, or an empty string when it cannot be read."""
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _cgroup_values(root: Path) -> Iterable[str]:
    top = root / "sys/fs/cgroup"
    for line in read_text(root / "proc/self/cgroup").splitlines():
        _, _, rest = line.partition(":")
        controllers, _, group = rest.partition(":")
        if controllers == "":
            base, name = top, "memory.max"
        elif "memory" in controllers.split(","):
            base, name = top / "memory", "memory.limit_in_bytes"
        else:
            continue
        below = Path(group.lstrip("/"))
        for directory in (below, *below.parents):
            yield read_text(base / directory / name).strip()
