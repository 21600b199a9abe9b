"""``kvstore pin``, ``unpin`` and ``evict``: what is stored of a prefix, over a daemon's admin interface."""

from __future__ import annotations

import json
from http.client import HTTPConnection, HTTPException
from typing import TYPE_CHECKING, Any, BinaryIO
from urllib.parse import quote, urlsplit

import click

from kvstore.cli.explain import (
    DIGEST_LETTERS,
    digest_beginning,
    read_tokens,
    unknown_namespace,
)
from kvstore.cli.plugins import UnavailableError
from kvstore.config import load_settings

if TYPE_CHECKING:
    from collections.abc import Callable

DEADLINE_S = 30.0
"""How long a person waits for an answer."""


def _admin_option(command: Callable[..., Any]) -> Callable[..., Any]:
    return click.option(
        "--admin",
        help="Address of the admin interface, http://HOST:PORT; without it, admin_host and admin_port of "
        "the settings. The token is that of the settings.",
    )(command)


def _prefix_options(command: Callable[..., Any]) -> Callable[..., Any]:
    namespace = click.option(
        "--namespace",
        required=True,
        help="Digest of the namespace, in hex, or how it begins, as `kvstore explain` shows it.",
    )
    tokens = click.option(
        "--tokens",
        "file",
        type=click.File("rb"),
        required=True,
        help="Token ids of the prefix, in the forms that `kvstore explain` takes. `-` is standard input.",
    )
    return namespace(tokens(_admin_option(command)))


@click.command()
@click.argument("name")
@_prefix_options
def pin(*, name: str, namespace: str, file: BinaryIO, admin: str | None) -> None:
    """Hold what is stored of a prefix against eviction, as NAME, until it is unpinned."""
    prefix = _prefix(admin, namespace, file)
    answer = ask(admin, "PUT", f"/v1/pins/{quote(name, safe='')}", prefix)
    click.echo(f"{answer['tokens']} tokens are pinned as {answer['name']}.")


@click.command()
@click.argument("name")
@_admin_option
def unpin(*, name: str, admin: str | None) -> None:
    """Let go of what is pinned as NAME."""
    ask(admin, "DELETE", f"/v1/pins/{quote(name, safe='')}")
    click.echo(f"{name} is pinned no more.")


@click.command()
@_prefix_options
def evict(*, namespace: str, file: BinaryIO, admin: str | None) -> None:
    """Forget what is stored of a prefix, and all that follows it."""
    answer = ask(admin, "POST", "/v1/prefixes:evict", _prefix(admin, namespace, file))
    click.echo(f"{answer['num_blocks']} blocks of it are forgotten, and what followed them.")


def _prefix(admin: str | None, namespace: str, file: BinaryIO) -> dict[str, Any]:
    beginning = digest_beginning(namespace)
    if not beginning:  # as of a variable of the shell that is not set
        raise click.UsageError("--namespace is empty: `kvstore explain` shows how digests begin")
    tokens = [int(token) for token in read_tokens(file)]
    return {"namespace": _whole_digest(admin, beginning), "tokens": tokens}


def _whole_digest(admin: str | None, beginning: str) -> str:
    """Return the only digest that begins so, of the namespaces that have blocks."""
    if len(beginning) == DIGEST_LETTERS:
        return beginning
    known, after = [], ""
    while True:
        page = ask(admin, "GET", f"/v1/namespaces?limit=1000&after={after}")
        known += [item["digest"] for item in page["items"]]
        if page["next"] is None:
            break
        after = page["next"]
    found = [digest for digest in known if digest.startswith(beginning)]
    if not found:
        raise click.ClickException(unknown_namespace(beginning, known))
    if len(found) > 1:
        raise click.ClickException(
            f"{len(found)} namespaces begin with {beginning}: {', '.join(found)}; give more digits"
        )
    return str(found[0])


def ask(
    admin: str | None, method: str, path: str, body: dict[str, Any] | None = None
) -> dict[str, Any]:
    """Return what the admin interface answers.

    Raises:
        UnavailableError: it cannot be reached. Exit code 3, with a remedy.
        click.ClickException: it refuses; with its reason.
    """
    settings = load_settings({})
    if admin is None and not settings.admin_port:
        raise UnavailableError(
            "no admin interface is named: give --admin http://127.0.0.1:PORT, or set admin_port"
        )
    host = f"[{settings.admin_host}]" if ":" in settings.admin_host else settings.admin_host
    connection = _connection(admin or f"http://{host}:{settings.admin_port}")
    headers = {"Content-Type": "application/json"}
    if settings.token is not None:
        headers["Authorization"] = f"Bearer {settings.token.get_secret_value()}"
    try:
        connection.request(method, path, None if body is None else json.dumps(body), headers)
        answer = connection.getresponse()
        text = answer.read()
    except (OSError, HTTPException) as error:
        raise UnavailableError(
            f"http://{connection.host}:{connection.port} does not answer: {error}; start a daemon with "
            "admin_port, or name another one with --admin"
        ) from error
    finally:
        connection.close()
    return _read(answer.status, text)


def _connection(url: str) -> HTTPConnection:
    address = urlsplit(url)
    try:
        host, port = address.hostname, address.port
    except ValueError:
        host = port = None
    if address.scheme != "http" or not host or address.path.strip("/"):
        raise click.UsageError(f"--admin {url!r} is no address: write it as http://127.0.0.1:8200")
    return HTTPConnection(host, port, timeout=DEADLINE_S)


def _read(status: int, text: bytes) -> dict[str, Any]:
    try:
        document = json.loads(text or b"{}")
        detail = document.get("detail") or document.get("title") or "no reason given"
    except (ValueError, AttributeError):
        raise click.ClickException(f"the answer is none of kvstore's (status {status})") from None
    if not 200 <= status < 300:
        raise click.ClickException(f"refused: {detail}")
    result: dict[str, Any] = document
    return result
