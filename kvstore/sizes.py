"""Sizes in bytes as people read and write them, in binary units."""

from __future__ import annotations

UNITS = {"TiB": 1 << 40, "GiB": 1 << 30, "MiB": 1 << 20, "KiB": 1 << 10}


def size(num_bytes: float) -> str:
    """Return a size for people, about: ``"1.5 GiB"``."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if num_bytes < 1024:
            return f"{num_bytes:.4g} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.4g} TiB"


def exact_size(num_bytes: int) -> str:
    """Return a size to the byte, in the largest unit that divides it: ``"8 GiB"``, ``"1000"``."""
    units = (unit for unit, size in UNITS.items() if num_bytes and num_bytes % size == 0)
    unit = next(units, None)
    return f"{num_bytes // UNITS[unit]} {unit}" if unit else str(int(num_bytes))


def typed_size(num_bytes: int) -> str:
    """Do as :func:`exact_size`, as one writes a setting: ``"8GiB"``."""
    return exact_size(num_bytes).replace(" ", "")
