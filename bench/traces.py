"""Recorded traffic: prompts as numbers of blocks, in the order in which they arrived.

Read from a folder that holds any of

* ``mooncake-conversation.jsonl``, ``mooncake-synthetic.jsonl``, ``mooncake-toolagent.jsonl``, or these
  with ``.gz``: the traces of R. Qin et al., "Mooncake: Trading More Storage for Less Computation", 2025
  (``FAST25-release/traces`` of https://github.com/kvcache-ai/Mooncake). A row is a request with
  ``input_length`` and ``hash_ids``, one for each 512 tokens with all before them; the last one may stand
  for fewer.
* ``agent-coding-sessions.tar.gz``: sessions of coding agents, a file each
  (https://github.com/callanjfox/kv-cache-tester), with ids of its own for each whole 64 tokens. They do
  not say when a session began: here one begins every ``SESSION_GAP_S`` seconds, so that some 16 are
  under way at a time.
"""

from __future__ import annotations

import gzip
import json
import tarfile
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import click
import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from numpy.typing import NDArray

MOONCAKE = ("conversation", "synthetic", "toolagent")
MOONCAKE_TOKENS = 512
SESSIONS = "agent-coding-sessions.tar.gz"
SESSION_TOKENS = 64
SESSION_GAP_S = 250.0
LFS_POINTER = "version https://git-lfs"


@dataclass(frozen=True)
class Request:
    """A prompt: the ids of its blocks (int64), and its tokens."""

    ids: NDArray[np.int64]
    num_tokens: int


@dataclass(frozen=True)
class Trace:
    """Requests in the order of arrival."""

    name: str
    block_tokens: int
    requests: list[Request]


def read_traces(folder: Path, *, partial: bool = False) -> Iterator[Trace]:
    """Read every trace of ``folder``.

    Args:
        folder: where the files lie.
        partial: count a last id that stands for fewer tokens than a block. The store does not: it keeps
            whole blocks.

    Raises:
        click.ClickException: there is none, or one cannot be read; says where.
    """
    found = False
    for name in MOONCAKE:
        for file in (folder / f"mooncake-{name}.jsonl.gz", folder / f"mooncake-{name}.jsonl"):
            if file.exists():
                found = True
                yield Trace(name, MOONCAKE_TOKENS, list(read_rows(file, partial=partial)))
                break
    if (file := folder / SESSIONS).exists():
        found = True
        yield Trace("sessions", SESSION_TOKENS, read_sessions(file))
    if not found:
        raise click.ClickException(
            f"{folder} holds no trace, such as mooncake-conversation.jsonl.gz; bench/traces.py names all"
        )


def read_rows(file: Path, *, partial: bool) -> Iterator[Request]:
    """Read the rows of a Mooncake trace, whose order is that of arrival.

    Raises:
        click.ClickException: a row is no request; its line is named.
    """
    with gzip.open(file, "rt") if file.suffix == ".gz" else file.open() as lines:
        for number, line in enumerate(lines, 1):
            where = f"{file}, line {number}"
            if line.startswith(LFS_POINTER):
                raise click.ClickException(f"{where}: a Git LFS pointer in place of the data")
            try:
                row = json.loads(line)
                ids, tokens = np.array(row["hash_ids"], "<i8"), int(row["input_length"])
            except (ValueError, KeyError, TypeError) as error:
                raise click.ClickException(f"{where}: no request: {error!r}") from None
            if len(ids) != -(-tokens // MOONCAKE_TOKENS):
                raise click.ClickException(f"{where}: {len(ids)} ids for {tokens} tokens")
            yield Request(ids if partial else ids[: tokens // MOONCAKE_TOKENS], tokens)


def read_sessions(file: Path) -> list[Request]:
    """Read the sessions of an archive, in the order of their names, and merge them by time."""
    with tarfile.open(file) as archive:
        members = sorted((m for m in archive if m.name.endswith(".json")), key=lambda m: m.name)
        timed: list[tuple[float, Request]] = []
        for number, member in enumerate(members):
            opened = archive.extractfile(member)
            assert opened is not None
            for time_s, row in _flat(json.load(opened)["requests"], number * SESSION_GAP_S):
                ids = np.array(row["hash_ids"], "<i8") + (number << 32)
                timed.append((time_s, Request(ids, int(row["in"]))))
    timed.sort(key=lambda pair: pair[0])
    return [request for _, request in timed]


def _flat(rows: list[dict[str, Any]], start_s: float) -> Iterator[tuple[float, dict[str, Any]]]:
    """Requests with their times, those of sub-agents among them."""
    for row in rows:
        time_s = start_s + row["t"]
        if "requests" in row:
            yield from _flat(row["requests"], time_s)
        else:
            yield time_s, row
