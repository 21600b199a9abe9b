"""What commands share that ask a daemon: its address, the connection, and what to do without one."""

from __future__ import annotations

import logging
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

import kvstore
from kvstore import errors
from kvstore.cli.plugins import UnavailableError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from kvstore.client.blocking import Client

DEADLINE_S = 5.0
"""How long a person waits for an answer."""

_SILENT = logging.NullHandler()
_REMEDIES = {
    "unreachable": "or name another one with --socket or --url",
    "breaker": "start it with `kvstore serve`, or name another one with --socket or --url",
    "refused": "see its log",
    "timeout": "it is busy or stopped; see its log",
    "lost": "it ended or was restarted; try again",
    "protocol": "use the same release of kvstore on both sides",
}


def daemon_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add ``--socket`` and ``--url`` (arguments ``socket`` and ``url``) to a click command."""
    socket = click.option(
        "--socket",
        type=click.Path(path_type=Path),
        help="Unix socket of the daemon; without it, the one of the settings.",
    )
    url = click.option(
        "--url",
        help="Address of the daemon: unix:///PATH, or tcp://127.0.0.1:PORT with the token of the settings.",
    )
    return socket(url(command))


@contextmanager
def connected(socket: Path | None, url: str | None) -> Iterator[Client]:
    """Connect to the daemon that the options name, to read; close the connection at the end.

    Raises:
        UnavailableError: it does not answer, inside the ``with`` too. Exit code 3, with a remedy.
        ConfigError: the address is none.
    """
    if socket is not None and url is not None:
        raise click.UsageError("--socket and --url both name a daemon: give one of them")
    logging.getLogger("kvstore").addHandler(
        _SILENT
    )  # commands show themselves what the client logs
    address = url if socket is None else f"unix://{socket.absolute()}"
    try:
        with kvstore.connect(
            address, access="read", on_failure="raise", deadline_s=DEADLINE_S
        ) as client:
            yield client
    except errors.UnavailableError as error:
        remedy = _REMEDIES.get(error.reason, "see its log")
        raise UnavailableError(f"{error}; {remedy}") from error
