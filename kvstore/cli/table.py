"""Output that every command shares: ``--output table|json``, one JSON object, aligned tables."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

Cell = str | int | float | bool | None
"""What a table can hold; ``None`` is shown as ``-``."""

_GAP = "  "
_NUMBER = re.compile(r"[<>~≤≥+-]? ?\d[\d.,]*(e[+-]?\d+)?( ?[%×µA-Za-z][\w/]*)?%?")


def output_option(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add ``--output table|json`` (argument name ``output``) to a click command."""
    return click.option(
        "--output",
        type=click.Choice(["table", "json"]),
        default="table",
        show_default=True,
        help="A table to read, or exactly one JSON object on standard output.",
    )(command)


def print_json(document: Mapping[str, Any]) -> None:
    """Write ``document`` to standard output as one JSON object."""
    click.echo(json.dumps(document, indent=2, ensure_ascii=False))


def render(headers: Sequence[str], rows: Sequence[Sequence[Cell]]) -> str:
    """Return an aligned text table.

    A column that holds only numbers, with or without a unit (``3``, ``0.25``, ``"12.5 ms"``,
    ``"26.8x"``), is aligned to the right, its header too; every other column to the left.

    Args:
        headers: One title a column.
        rows: One sequence of cells a row, each as long as ``headers``.

    Returns:
        The lines joined by newlines: header, rule, rows. No trailing newline or blanks.

    Raises:
        ValueError: A row has more or fewer cells than there are headers.
    """
    for row in rows:
        if len(row) != len(headers):
            raise ValueError(f"a row has {len(row)} cells for {len(headers)} headers: {row!r}")
    columns = [[_text(row[i]) for row in rows] for i in range(len(headers))]
    widths = [max(map(len, [head, *cells])) for head, cells in zip(headers, columns, strict=True)]
    right = [_is_numeric(cells) for cells in columns]

    def line(cells: Sequence[str]) -> str:
        padded = (
            cell.rjust(width) if is_right else cell.ljust(width)
            for cell, width, is_right in zip(cells, widths, right, strict=True)
        )
        return _GAP.join(padded).rstrip()

    body = [line(cells) for cells in zip(*columns, strict=True)]
    return "\n".join([line(headers), line(["-" * width for width in widths]), *body])


def _text(cell: Cell) -> str:
    if cell is None:
        return "-"
    if isinstance(cell, bool):
        return "yes" if cell else "no"
    if isinstance(cell, float):
        return f"{cell:.0f}" if abs(cell) >= 1000 else f"{cell:.4g}"
    return str(cell)


def _is_numeric(cells: Sequence[str]) -> bool:
    present = [cell for cell in cells if cell not in {"", "-"}]
    return bool(present) and all(_NUMBER.fullmatch(cell) for cell in present)
