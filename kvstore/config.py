"""Every setting, in one model: file < environment (``KVSTORE_*``) < argument or flag.

Unknown names are refused, also in the environment, with the nearest known name.
"""

from __future__ import annotations

import difflib
import os
import tomllib
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import BaseModel, ByteSize, ConfigDict, Field, ValidationError

from kvstore.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

ENV_PREFIX = "KVSTORE_"
CONFIG_FILE_VARIABLE = "KVSTORE_CONFIG"


class Settings(BaseModel):
    """Settings of an embedded store. Sizes are numbers of bytes or text such as ``"8GiB"``."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", use_attribute_docstrings=True, hide_input_in_errors=False
    )

    dram: ByteSize = Field(ByteSize(1 << 30), ge=0)
    """Host memory for blocks, in bytes; 0 for none."""
    gpu: ByteSize = Field(ByteSize(0), ge=0)
    """Device memory for blocks, in bytes; 0 for none. Without CUDA this is host memory too."""
    device: str = "auto"
    """torch device of the gpu tier: ``cuda``, ``cuda:1``, ``cpu``; ``auto`` takes CUDA where present."""
    prefault: bool = True
    """Have the kernel provide all of dram at the start, so that no request pays for page faults."""
    block_tokens: int = Field(16, ge=1, le=4096)
    """Tokens of one block."""
    policy: Literal["lru"] = "lru"
    """What to evict first."""
    lease_timeout_s: float = Field(60.0, gt=0)
    """Seconds for which a lease protects its blocks."""
    max_leases: int = Field(16384, ge=1, le=32000)
    """Leases and reservations held at once; beyond it lookups miss and nothing is stored."""
    max_moves: int = Field(64, ge=1, le=500)
    """Moves between tiers that may wait; beyond it they are skipped."""
    max_event_bytes: ByteSize = Field(ByteSize(16 << 20), ge=0)
    """Memory for the newest events, in bytes; nothing is kept before somebody reads."""


def load_settings(
    arguments: Mapping[str, Any],
    environment: Mapping[str, str] | None = None,
    file: Path | None = None,
) -> Settings:
    """Merge ``file``, ``environment`` and ``arguments``, later ones winning.

    Args:
        arguments: settings by name; those that are None count as not given.
        environment: defaults to the process's. ``KVSTORE_CONFIG`` names the file if ``file`` is None.
        file: TOML with the settings as top-level keys.

    Raises:
        ConfigError: unknown name, impossible value, or unreadable file.
    """
    environment = os.environ if environment is None else environment
    if file is None and CONFIG_FILE_VARIABLE in environment:
        file = Path(environment[CONFIG_FILE_VARIABLE])
    merged = _from_file(file) if file else {}
    merged |= _from_environment(environment)
    given = {name: value for name, value in arguments.items() if value is not None}
    _check_names(given, "argument", str)
    try:
        return Settings.model_validate(merged | given)
    except ValidationError as error:
        first = error.errors()[0]
        size = first["type"] == "byte_size"
        reason = "not a size: write it as 512MiB or 8GiB" if size else first["msg"]
        raise ConfigError(f"setting {first['loc'][0]}={first['input']!r}: {reason}") from None


def _from_file(file: Path) -> dict[str, Any]:
    try:
        values = tomllib.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read settings from {file}: {error}") from None
    _check_names(values, f"key in {file}", str)
    return values


def _from_environment(environment: Mapping[str, str]) -> dict[str, str]:
    values = {
        name.removeprefix(ENV_PREFIX).lower(): value
        for name, value in environment.items()
        if name.startswith(ENV_PREFIX) and name != CONFIG_FILE_VARIABLE
    }
    _check_names(values, "environment variable", lambda name: ENV_PREFIX + name.upper())
    return values


def _check_names(names: Iterable[str], what: str, spell: Any) -> None:  # noqa: ANN401
    for name in names:
        if name not in Settings.model_fields:
            near = difflib.get_close_matches(name, Settings.model_fields, 1)
            known = ", ".join(map(spell, Settings.model_fields))
            hint = f"; did you mean {spell(near[0])}?" if near else f"; known are {known}"
            raise ConfigError(f"unknown {what} {spell(name)}{hint}")
