"""``kvstore config``: what the settings are, and where each came from."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click
from pydantic import ByteSize, SecretStr

from kvstore.cli.table import output_option, print_json, render
from kvstore.config import Settings, load_with_origins, redacted
from kvstore.sizes import exact_size

if TYPE_CHECKING:
    from kvstore.cli.table import Cell


@click.group()
def config() -> None:
    """Look at the settings."""


@config.command()
@click.option("--origin", is_flag=True, help="Say where each value came from.")
@click.option("--describe", is_flag=True, help="Say what each setting means.")
@click.option(
    "--config",
    "file",
    type=click.Path(path_type=Path),
    help="TOML file with settings; without it, the one that KVSTORE_CONFIG names.",
)
@output_option
def show(*, origin: bool, describe: bool, file: Path | None, output: str) -> None:
    """Show every setting as a daemon or store started here would have it.

    A token is shown only as being set. JSON always has the origins and meanings.
    """
    settings, origins = load_with_origins({}, file=file)
    values = redacted(settings)
    meanings = {
        name: str(field.description).replace("``", "`")
        for name, field in Settings.model_fields.items()
    }
    if output == "json":
        print_json(
            {
                name: {"value": value, "origin": origins[name], "meaning": meanings[name]}
                for name, value in values.items()
            }
        )
        return
    headers = [
        "setting",
        "value",
        *(["origin"] if origin else []),
        *(["meaning"] if describe else []),
    ]
    rows: list[list[Cell]] = []
    for name in values:
        value = setting_text(getattr(settings, name))
        texts = {
            "setting": name,
            "value": value,
            "origin": origins[name],
            "meaning": meanings[name],
        }
        rows.append([texts[header] for header in headers])
    click.echo(render(headers, rows))


def setting_text(value: object) -> str | None:
    """Return the value of a setting as people would write it: sizes exactly, no token."""
    if isinstance(value, ByteSize):
        return exact_size(value)
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float):
        return f"{value:g}"
    if isinstance(value, dict):
        return ", ".join(value) or None
    if isinstance(value, SecretStr):
        return "set"
    return None if value is None else str(value)
