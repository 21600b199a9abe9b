"""``kvstore explain``: why the tokens of a prompt hit or miss."""

from __future__ import annotations

import json
import re
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, BinaryIO

import click
import numpy as np

from kvstore.cli.daemon import connected, daemon_options
from kvstore.cli.table import output_option, print_json, render
from kvstore.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from kvstore.explain import Explanation

DIGEST_LETTERS = 64
SHORT_LETTERS = 8
RAW_SUFFIXES = (".bin", ".i32")


@click.command()
@click.option(
    "--tokens-file",
    "file",
    type=click.File("rb"),
    required=True,
    help="Token ids of the prompt: a JSON list, or an object that has one as `tokens`; numbers between "
    "blanks or commas; or, in a file named .bin or .i32, little-endian int32. `-` is standard input.",
)
@click.option("--namespace", help="Digest of one namespace, in hex, or how it begins.")
@daemon_options
@output_option
def explain(
    *, file: BinaryIO, namespace: str | None, socket: Path | None, url: str | None, output: str
) -> None:
    """Say which tokens of a prompt a daemon has, and why it has not the others."""
    wanted = digest_beginning(namespace or "")
    tokens = read_tokens(file)
    digest = wanted if len(wanted) == DIGEST_LETTERS else None
    try:
        with connected(socket, url) as client:
            found = client.explain_all(tokens, digest)
    except UsageError as error:
        raise click.UsageError(f"{_name(file)}: {error}") from error
    by_hits = sorted(found.items(), key=lambda item: (-item[1].hit_tokens, item[0]))
    chosen = {name: why for name, why in by_hits if name.startswith(wanted)}
    if wanted and not chosen:
        raise click.ClickException(unknown_namespace(wanted, [name for name, _ in by_hits]))
    if output == "json":
        print_json({"prompt_tokens": len(tokens), "namespaces": document(chosen)})
    elif chosen:
        click.echo(table(chosen))
    else:
        click.echo("Nothing is stored: no namespace has blocks.")


def digest_beginning(namespace: str) -> str:
    """Return what ``--namespace`` says in lower case. Raises UsageError: it is no beginning of a digest."""
    wanted = namespace.lower()
    if not re.fullmatch(f"[0-9a-f]{{0,{DIGEST_LETTERS}}}", wanted):
        raise click.UsageError(f"--namespace {namespace!r} is no hex digest: see `kvstore explain`")
    return wanted


def unknown_namespace(wanted: str, known: Iterable[str]) -> str:
    """Return what to say where no digest in ``known`` begins with ``wanted``."""
    those = ", ".join(digest[:SHORT_LETTERS] for digest in known) or "none"
    return f"no namespace {wanted} has blocks; those that do: {those}"


def read_tokens(file: BinaryIO) -> Any:  # noqa: ANN401  (list of int, or int32 array)
    """Return the token ids in ``file``, by its name and first letter in one of the three forms.

    Raises:
        UsageError: there is something else in it. The message does not quote it.
    """
    name, data = _name(file), file.read()
    if name.endswith(RAW_SUFFIXES):
        if len(data) % 4:
            raise click.UsageError(f"{name}: {len(data)} bytes are no whole number of int32")
        return np.frombuffer(data, "<i4")
    try:
        text = data.decode()
        if text.lstrip().startswith(("[", "{")):
            words = json.loads(text)
            words = words.get("tokens") if isinstance(words, dict) else words
        else:
            words = [int(word) for word in text.replace(",", " ").split()]
    except (ValueError, RecursionError):
        words = None
    if not isinstance(words, list) or not all(type(word) is int for word in words):
        raise click.UsageError(
            f"{name}: not a list of token ids: write [1, 2, 3] or 1 2 3; raw int32 belongs in "
            "a file named .bin"
        )
    return words


def _name(file: BinaryIO) -> str:
    return str(getattr(file, "name", "standard input"))


def document(found: dict[str, Explanation]) -> list[dict[str, Any]]:
    """Return explanations by digest ready for JSON, in their order."""
    return [{"namespace": digest, **asdict(why)} for digest, why in found.items()]


def table(found: dict[str, Explanation]) -> str:
    """Return explanations by digest for people: one row a segment."""
    headers = ["namespace", "tokens", "count", "tier", "cause", "detail"]
    rows = [
        [
            digest[:SHORT_LETTERS],
            f"{segment.start}-{segment.stop - 1}",
            segment.stop - segment.start,
            segment.tier,
            segment.cause,
            segment.detail,
        ]
        for digest, why in found.items()
        for segment in why.segments
    ]
    return render(headers, rows)
