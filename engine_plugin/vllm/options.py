"""What ``kv_connector_extra_config`` may say."""

from __future__ import annotations

from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from kvstore.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping


class Options(BaseModel):
    """Options of the connector, all of them optional."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, use_attribute_docstrings=True
    )

    url: str | None = None
    """The daemon: ``unix:///path/to.sock`` or ``tcp://127.0.0.1:PORT``; by default the setting ``socket``."""
    load: Literal["auto", "sync", "layerwise", "async"] = "auto"
    """When blocks are loaded: before the forward pass, layer by layer during it, or between steps."""
    on_load_failure: Literal["recompute", "fail"] = "recompute"
    """What becomes of a request whose blocks could not be loaded, whatever vLLM's own default is."""
    save_decode: bool = True
    """Whether blocks that the engine generated are stored, too, and not only those of prompts."""
    model_digest: str | None = Field(None, min_length=16, max_length=128, pattern="^[0-9a-f]*$")
    """Name of the weights in hex, for models without files on this host; by default their digest."""
    tenant: str | None = None
    """Whose blocks these are; engines with another tenant do not see them."""
    codec: Literal["lz4", "int8", "fp8"] | None = None
    """Has the disk store blocks in fewer bytes: ``lz4`` without loss; ``int8`` or ``fp8`` with a bounded one,
    in half of the bytes, and answers may differ then."""
    sync_load_s: float = Field(0.005, ge=0)
    """``load="auto"`` lets the engine wait for loads that take no longer than this, in seconds."""
    wait_s: float = Field(2.0, ge=0, le=60)
    """Longest that a request waits for blocks that another engine is about to store."""
    deadline_s: float = Field(0.25, gt=0, le=60)
    """Longest that the scheduler waits for an answer of the daemon, in seconds."""


def check_names(given: Mapping[str, Any], known: Collection[str], complaint: str) -> None:
    """Raise :class:`ConfigError` for a name in ``given`` that is not ``known``; say which may be meant."""
    for name in given:
        if name not in known:
            near = get_close_matches(name, known, 1)
            meant = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(known)}"
            raise ConfigError(f"{complaint} {name!r}: {meant}")


def parse_options(given: Mapping[str, Any]) -> Options:
    """Return the options that ``kv_connector_extra_config`` gives.

    Raises:
        ConfigError: an unknown name (with the one that was probably meant) or an impossible value.
    """
    check_names(given, Options.model_fields, "kv_connector_extra_config has no option")
    try:
        return Options.model_validate(dict(given))
    except ValidationError as error:
        first = error.errors()[0]
        name = ".".join(map(str, first["loc"]))
        raise ConfigError(
            f"kv_connector_extra_config: {name}={first['input']!r}: {first['msg']}"
        ) from None


def cache_file() -> Path:
    """Return the file that remembers digests of weights."""
    return Path.home() / ".cache" / "kvstore" / "weights.json"
