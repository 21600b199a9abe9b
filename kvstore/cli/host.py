"""What the machine offers: memory, limits and processor, as rows for ``kvstore doctor``.

Everything is read below ``root``, so that tests can give it a machine. What a system does not tell
is reported as not known, never as an error.
"""

from __future__ import annotations

import os
import platform
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from kvstore.host import (
    available_memory_bytes,
    cgroup_limit_bytes,
    meminfo,
    read_text,
    reserved_huge_pages,
)
from kvstore.sizes import size

if TYPE_CHECKING:
    from pathlib import Path

Status = Literal["ok", "warn", "fail"]

GIB = 1 << 30
MIN_OPEN_FILES = 1024
SHARED_HUGE_PAGES = ("always", "within_size", "advise", "force")
"""Settings with which the kernel puts shared memory on huge pages when asked."""
NOTED_CPU_FLAGS = (
    *("avx2", "avx512f", "avx512_bf16", "avx512_fp16", "amx_tile", "amx_bf16"),
    *("asimd", "sve", "bf16"),
)


@dataclass(frozen=True)
class Check:
    """One row of the report: ``warn`` is worse than it could be, ``fail`` does not work."""

    check: str
    status: Status
    detail: str


def host_checks(root: Path) -> list[Check]:
    """Return every check of this module for the machine below ``root`` (normally ``/``)."""
    return [
        *(memory(root), memlock(), open_files(), shared_memory(root)),
        *(huge_pages(root), shared_huge_pages(root), processor(root)),
    ]


def memory(root: Path) -> Check:
    """Report total memory, the control group's limit where one is set, and what may still be taken."""
    available = available_memory_bytes(root)
    total = meminfo(root).get("MemTotal")
    if available is None or total is None:
        return Check("memory", "warn", "not known on this system")
    limit = cgroup_limit_bytes(root)
    limit_text = "no cgroup limit" if limit is None else f"cgroup limit {size(limit)}"
    detail = f"{size(total)}, {size(available)} available, {limit_text}"
    return Check("memory", "warn" if available < GIB else "ok", detail)


def memlock() -> Check:
    """Report how much memory this process may lock, which pinning for a device can need."""
    try:
        import resource
    except ImportError:  # not a Unix system
        return Check("memlock", "warn", "not known on this system")
    soft, hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return memlock_row(None if soft == resource.RLIM_INFINITY else soft, hard != soft)


def memlock_row(limit: int | None, can_be_raised: bool) -> Check:  # noqa: FBT001
    """Return the row for a soft ``limit`` in bytes (``None``: unlimited)."""
    if limit is None:
        return Check("memlock", "ok", "unlimited")
    how = "raise it with `ulimit -l`" if can_be_raised else "ask for `memlock unlimited`"
    return Check("memlock", "warn", f"{size(limit)}; to pin more for devices or RDMA, {how}")


def open_files() -> Check:
    """Report how many descriptors this process may have open: a daemon needs one for each client."""
    try:
        import resource
    except ImportError:  # not a Unix system
        return Check("open files", "warn", "not known on this system")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    return open_files_row(None if soft == resource.RLIM_INFINITY else soft, hard != soft)


def open_files_row(limit: int | None, can_be_raised: bool) -> Check:  # noqa: FBT001
    """Return the row for a soft ``limit`` (``None``: unlimited)."""
    if limit is None or limit >= MIN_OPEN_FILES:
        return Check("open files", "ok", "unlimited" if limit is None else f"at most {limit}")
    how = "raise it with `ulimit -n`" if can_be_raised else "ask for `nofile 4096`"
    return Check("open files", "warn", f"at most {limit}; for a daemon with many clients, {how}")


def shared_memory(root: Path) -> Check:
    """Report the size of ``/dev/shm``, which engines of several processes use; a daemon does not."""
    try:
        stat = os.statvfs(root / "dev/shm")
    except (OSError, AttributeError):
        return Check("shared memory", "warn", "/dev/shm is not there")
    total, free = stat.f_blocks * stat.f_frsize, stat.f_bavail * stat.f_frsize
    detail = f"/dev/shm {size(total)}, {size(free)} free"
    if total < GIB:
        return Check("shared memory", "warn", f"{detail}; in a container, set --shm-size")
    return Check("shared memory", "ok", detail)


def huge_pages(root: Path) -> Check:
    """Report the setting of transparent huge pages: with them, large copies miss the TLB less."""
    setting = _chosen(root, "enabled")
    if not setting:
        return Check("huge pages", "warn", "not known on this system")
    if setting == "never":
        return Check("huge pages", "warn", "never; `madvise` makes large copies cheaper")
    return Check("huge pages", "ok", f"transparent: {setting}")


def shared_huge_pages(root: Path) -> Check:
    """Report which huge pages the memory of a daemon can have: with them, clients attach at once."""
    name, setting = "shared huge pages", _chosen(root, "shmem_enabled")
    page_bytes, free = reserved_huge_pages(root)
    reserved = f"{free} reserved ones of {size(page_bytes)} free" if page_bytes else "none reserved"
    if setting in SHARED_HUGE_PAGES or free:
        return Check(name, "ok", f"transparent: {setting or 'not known'}, {reserved}")
    if not setting:
        return Check(name, "warn", f"not known on this system, {reserved}")
    remedy = "write `advise` to /sys/kernel/mm/transparent_hugepage/shmem_enabled"
    return Check(name, "warn", f"transparent: {setting}, {reserved}; for a daemon, {remedy}")


def processor(root: Path) -> Check:
    """Report the processor, the cores this process may use, and the extensions of note."""
    fields: dict[str, str] = {}
    for line in read_text(root / "proc/cpuinfo").splitlines():
        key, colon, value = line.partition(":")
        if colon:
            fields.setdefault(key.strip().lower(), value.strip())
    flags = set(fields.get("flags", fields.get("features", "")).split())
    noted = [flag for flag in NOTED_CPU_FLAGS if flag in flags]
    name = fields.get("model name") or platform.machine() or "unknown"
    cores = f"{_usable_cores()} cores"
    return Check("processor", "ok", ", ".join([name, cores, " ".join(noted) or "no extensions"]))


def _chosen(root: Path, name: str) -> str:
    """Return the choice that a setting of transparent huge pages has in brackets; empty if unknown."""
    text = read_text(root / "sys/kernel/mm/transparent_hugepage" / name)
    setting, closed, _ = text.partition("[")[2].partition("]")
    return setting if closed else ""


def _usable_cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
