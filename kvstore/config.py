"""Every setting, in one model: file < environment (``KVSTORE_*``) < argument or flag.

Unknown names are refused, also in the environment, with the nearest known name. The token is never
shown: not in errors, not by ``repr``, not by :func:`redacted`.
"""

from __future__ import annotations

import difflib
import os
import re
import tomllib
from ipaddress import ip_address
from pathlib import Path
from socket import gethostname
from typing import TYPE_CHECKING, Any, Literal

from pydantic import (
    BaseModel,
    ByteSize,
    ConfigDict,
    Field,
    SecretStr,
    ValidationError,
    ValidationInfo,
    field_validator,
)
from pydantic_core import PydanticCustomError

from kvstore.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

ENV_PREFIX = "KVSTORE_"
_SERVICE_LINK = re.compile(r"_SERVICE_(HOST|PORT)(_\w+)?$|_PORT_\d+_(TCP|UDP|SCTP)(_\w+)?$")
_LINKED_PORT = re.compile(r"(tcp|udp|sctp)://")
"""Variables that Kubernetes gives every container beside a Service named ``kvstore`` or
``kvstore-admin``: no settings."""
CONFIG_FILE_VARIABLE = "KVSTORE_CONFIG"
_NO_SETTINGS = {CONFIG_FILE_VARIABLE, "KVSTORE_TRACES"}
"""Variables of ours that are no settings: the second one is for benchmarks."""

MAX_SOCKET_BYTES = 107
"""Longest path of a unix socket on Linux, in bytes."""
TOKEN_LENGTHS = range(16, 256)
"""Numbers of characters that a token may have; 255 are what the protocol carries."""
DAY_S = 86400.0


def default_socket() -> Path:
    """Return the socket of this user's daemon: below ``XDG_RUNTIME_DIR`` where there is one."""
    runtime = os.environ.get("XDG_RUNTIME_DIR", "")
    if runtime.startswith("/"):
        return Path(runtime, "kvstore.sock")
    return Path(f"/tmp/kvstore-{os.getuid()}.sock")


class TenantSettings(BaseModel):
    """What one tenant may have of the last memory tier."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    ceiling: ByteSize | None = Field(None, ge=0)
    """Most bytes that it may have: beyond them its own blocks make room for its new ones."""
    floor: ByteSize = Field(ByteSize(0), ge=0)
    """Bytes that others cannot take from it."""


class Settings(BaseModel):
    """Settings of a store and of its daemon. Sizes are numbers of bytes or text such as ``"8GiB"``.

    Only :func:`load_settings` reads ``token_file``.
    """

    model_config = ConfigDict(
        frozen=True, extra="forbid", use_attribute_docstrings=True, hide_input_in_errors=True
    )

    dram: ByteSize = Field(ByteSize(1 << 30), ge=0)
    """Host memory for blocks, in bytes; 0 for none."""
    gpu: ByteSize = Field(ByteSize(0), ge=0)
    """Device memory for blocks, in bytes; 0 for none. Without CUDA this is host memory too."""
    disk: ByteSize = Field(ByteSize(0), ge=0)
    """Disk space for blocks, in bytes, all files of ``disk_path`` together; 0 for none."""
    disk_path: Path | None = None
    """Directory of the disk tier, for this store alone; made if it is missing."""
    disk_reserve: ByteSize = Field(ByteSize(1 << 30), ge=0)
    """Bytes that must stay free on that file system when all of disk is used."""
    disk_admission: Literal["always", "second_use", "value"] = "value"
    """Write every block to disk; those used again; or those, and what memory evicts next or has at the end."""
    disk_bytes_per_s: ByteSize = Field(ByteSize(256 << 20), ge=0)
    """Bytes a second written to disk on average, for the SSD's sake; 0 for no limit."""
    disk_threads: int = Field(4, ge=1, le=64)
    """Reads or writes of the disk at the same time."""
    load: Literal["auto", "always", "never"] = "auto"
    """Load from disk what is expected to be there sooner than computed; everything; or nothing."""
    device: str = "auto"
    """torch device of the gpu tier: ``cuda``, ``cuda:1``, ``cpu``; ``auto`` takes CUDA where present."""
    prefault: bool = True
    """Have the kernel provide all of dram at the start, so that no request pays for page faults."""
    huge_pages: Literal["off", "transparent", "reserved"] = "transparent"
    """Ask for transparent huge pages, or take those that ``vm.nr_hugepages`` reserved (daemon only)."""
    block_tokens: int = Field(16, ge=1, le=4096)
    """Tokens of one block."""
    policy: Literal["lru", "slru", "s3fifo", "arc", "lfu", "cost"] = "lru"
    """What to evict first: what was least recently used, or as another policy of ``radix`` says."""
    tenants: dict[str, TenantSettings] = Field({}, max_length=100)
    """Ceilings and floors, in bytes of the last memory tier, by tenant; tables of a file, or a dictionary."""
    lease_timeout_s: float = Field(60.0, gt=0, le=DAY_S)
    """Seconds for which a lease protects its blocks."""
    max_leases: int = Field(16384, ge=1, le=32000)
    """Leases and reservations held at once; beyond it lookups miss and nothing is stored."""
    max_moves: int = Field(64, ge=1, le=500)
    """Moves between tiers that may wait; beyond it they are skipped."""
    max_event_bytes: ByteSize = Field(ByteSize(16 << 20), ge=0)
    """Memory for the newest events, in bytes; nothing is kept before somebody reads."""
    socket: Path = Field(default_factory=default_socket)
    """Unix socket of the daemon."""
    node: str = Field(default_factory=gethostname)
    """Name of the daemon."""
    token: SecretStr | None = None
    """Secret that REST requests and TCP clients must show: 16 to 255 characters of printable ASCII."""
    token_file: Path | None = None
    """File that holds the token, in place of ``token``; only its owner may be able to read it."""
    tcp_port: int = Field(0, ge=0, le=65535)
    """Port on 127.0.0.1 where the daemon listens as well; 0 for none. Needs a token."""
    admin_host: str = "127.0.0.1"
    """Address of the admin REST API; any other than loopback needs a token."""
    admin_port: int | None = Field(None, ge=0, le=65535)
    """Port of the admin REST API; 0 for any free one, nothing for none."""
    max_clients: int = Field(256, ge=1, le=10000)
    """Connections held at once; more are refused."""
    max_session_bytes: ByteSize = Field(ByteSize(0), ge=0)
    """Bytes that one client may have reserved and not committed; 0 for half of dram."""
    busy_poll_us: int = Field(100, ge=0, le=100_000)
    """Microseconds for which the daemon looks for the next request before it sleeps; 0 for none."""
    drain_timeout_s: float = Field(5.0, ge=0, le=DAY_S)
    """Seconds that clients get to finish when the daemon is told to stop."""

    @field_validator("socket")
    @classmethod
    def _fits_a_socket_address(cls, value: Path) -> Path:
        length = len(os.fsencode(value))
        if not value.is_absolute():
            raise _wrong("not an absolute path: write it as /run/user/1000/kvstore.sock")
        if length > MAX_SOCKET_BYTES:
            raise _wrong(f"{length} bytes long, and a socket's path has at most 107: shorten it")
        return value

    @field_validator("disk_path")
    @classmethod
    def _is_absolute(cls, value: Path | None) -> Path | None:
        if value is not None and not value.is_absolute():
            raise _wrong("not an absolute path: write it as /var/lib/kvstore")
        return value

    @field_validator("node")
    @classmethod
    def _is_a_name(cls, value: str) -> str:
        plain = (
            value.isascii() and value.replace("-", "").replace(".", "").replace("_", "").isalnum()
        )
        if not plain or len(value) > 255:
            raise _wrong("not a name: use up to 255 letters, digits, dots, hyphens and underscores")
        return value

    @field_validator("token")
    @classmethod
    def _can_be_sent(cls, value: SecretStr | None) -> SecretStr | None:
        text = "" if value is None else value.get_secret_value()
        if value is None:
            return value
        if len(text) not in TOKEN_LENGTHS:
            raise _wrong(
                f"{len(text)} characters long, not 16 to 255: make one with `openssl rand -hex 32`"
            )
        if not all("!" <= letter <= "~" for letter in text):
            raise _wrong("has blanks or letters beyond ASCII: make one with `openssl rand -hex 32`")
        return value

    @field_validator("tcp_port")  # declared behind token, as what needs one must be
    @classmethod
    def _tcp_needs_a_token(cls, value: int, info: ValidationInfo) -> int:
        if value and not info.data.get("token"):
            raise _wrong("needs a token: set token_file, or tcp_port=0")
        return value

    @field_validator("admin_host")
    @classmethod
    def _strangers_need_a_token(cls, value: str, info: ValidationInfo) -> str:
        try:
            loopback = value == "localhost" or ip_address(value).is_loopback
        except ValueError:
            raise _wrong(
                "not an address: give one such as 127.0.0.1 or ::1, or localhost"
            ) from None
        if not loopback and not info.data.get("token"):
            raise _wrong("needs a token, as others can reach it: set token_file, or use 127.0.0.1")
        return value


def _wrong(reason: str) -> PydanticCustomError:
    return PydanticCustomError("setting", "{reason}", {"reason": reason})


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
        ConfigError: unknown name, impossible value, unreadable file, or a token that others can read.
    """
    return load_with_origins(arguments, environment, file)[0]


def load_with_origins(
    arguments: Mapping[str, Any],
    environment: Mapping[str, str] | None = None,
    file: Path | None = None,
) -> tuple[Settings, dict[str, str]]:
    """Do as :func:`load_settings`; also say where each setting came from.

    Returns:
        The settings, and for every name ``default``, ``file PATH``, ``environment KVSTORE_…`` or
        ``argument``. A token from a token file has that file as its origin.
    """
    environment = os.environ if environment is None else environment
    if file is None and CONFIG_FILE_VARIABLE in environment:
        file = Path(environment[CONFIG_FILE_VARIABLE])
    values: dict[str, tuple[Any, str]] = {}
    for layer in (
        _from_file(file) if file else {},
        _from_environment(environment),
        _from_arguments(arguments),
    ):
        _choose_token(values, layer)
        values |= layer
    if "token_file" in values:
        path = Path(str(values["token_file"][0]))
        values["token"] = _read_token(path), f"file {path}"
    origins = {
        name: values[name][1] if name in values else "default" for name in Settings.model_fields
    }
    try:
        return Settings.model_validate(
            {name: value for name, (value, _) in values.items()}
        ), origins
    except ValidationError as error:
        raise _refusal(error, origins) from None


def redacted(settings: Settings) -> dict[str, object]:
    """Return every setting ready for JSON: sizes in bytes, paths as text, a token only as ``"set"``."""
    return settings.model_dump(mode="json") | {"token": "set" if settings.token else None}


def _choose_token(values: dict[str, tuple[Any, str]], layer: Mapping[str, tuple[Any, str]]) -> None:
    """Drop from ``values`` whichever of the token's two forms ``layer`` does not give but overrides."""
    given = layer.keys() & {"token", "token_file"}
    if len(given) == 2:
        origins = " and ".join(dict.fromkeys(layer[name][1] for name in ("token", "token_file")))
        raise ConfigError(f"token and token_file are both given ({origins}): give one of them")
    if given:
        values.pop("token", None)
        values.pop("token_file", None)


def _refusal(error: ValidationError, origins: Mapping[str, str]) -> ConfigError:
    first = error.errors()[0]
    name, value = str(first["loc"][0]), first["input"]
    size = first["type"] == "byte_size"
    reason = "not a size: write it as 512MiB or 8GiB" if size else first["msg"]
    shown = "" if name == "token" else f"={str(value) if isinstance(value, Path) else value!r}"
    path = ".".join(map(str, first["loc"]))
    if first["type"] == "extra_forbidden":  # of a tenant: names of settings were checked before
        hint = _nearest(str(first["loc"][-1]), TenantSettings.model_fields, str)
        return ConfigError(f"setting {path} is unknown{hint} ({origins[name]})")
    return ConfigError(f"setting {path}{shown}: {reason} ({origins[name]})")


def _from_arguments(arguments: Mapping[str, Any]) -> dict[str, tuple[Any, str]]:
    given = {name: (value, "argument") for name, value in arguments.items() if value is not None}
    _check_names(given, "argument", str)
    return given


def _from_file(file: Path) -> dict[str, tuple[Any, str]]:
    try:
        text, others_can_read = _read(file)
        values = tomllib.loads(text)
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read settings from {file}: {error}") from None
    _check_names(values, f"key in {file}", str)
    if "token" in values and others_can_read:
        raise ConfigError(f"{file} holds a token and others can read it: chmod 600 {file}")
    return {name: (value, f"file {file}") for name, value in values.items()}


def _from_environment(environment: Mapping[str, str]) -> dict[str, tuple[Any, str]]:
    values = {
        name.removeprefix(ENV_PREFIX).lower(): (value, f"environment {name}")
        for name, value in environment.items()
        if name.startswith(ENV_PREFIX)
        and name not in _NO_SETTINGS
        and not (_SERVICE_LINK.search(name) or _is_linked_port(name, value))
    }
    if "tenants" in values:
        raise ConfigError(
            "KVSTORE_TENANTS is no variable: give tenants as tables [tenants.NAME] in the settings file, which "
            "KVSTORE_CONFIG names"
        )
    _check_names(values, "environment variable", variable_of)
    return values


def variable_of(name: str) -> str | None:
    """Return the environment variable of a setting; None: it has none."""
    return None if name == "tenants" else ENV_PREFIX + name.upper()


def _is_linked_port(name: str, value: str) -> bool:
    return name.endswith("_PORT") and _LINKED_PORT.match(value) is not None


def _read_token(file: Path) -> str:
    try:
        text, others_can_read = _read(file)
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read the token from token_file={file}: {error}") from None
    if others_can_read:
        raise ConfigError(f"others can read token_file={file}: chmod 600 {file}")
    return text.strip()


def _read(file: Path) -> tuple[str, bool]:
    """Return the text of ``file``, and whether its group or others can read it."""
    with file.open(encoding="utf-8") as opened:
        return opened.read(), bool(os.fstat(opened.fileno()).st_mode & 0o044)


def _check_names(names: Iterable[str], what: str, spell: Callable[[str], str | None]) -> None:
    for name in names:
        if name not in Settings.model_fields:
            hint = _nearest(name, Settings.model_fields, spell)
            raise ConfigError(f"unknown {what} {spell(name)}{hint}")


def _nearest(name: str, known: Iterable[str], spell: Callable[[str], str | None]) -> str:
    """Return the end of a message about an unknown ``name``: the known one that may be meant, or all."""
    spelled = {one: text for one in known if (text := spell(one)) is not None}
    near = difflib.get_close_matches(name, spelled, 1)
    if near:
        return f"; did you mean {spelled[near[0]]}?"
    return f"; known are {', '.join(spelled.values())}"
