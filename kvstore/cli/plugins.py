"""Finds what packages add to the command line, and loads it no sooner than it is used.

Two entry-point groups: ``kvstore.commands`` (name → click command) and ``kvstore.checks`` (name →
function that returns ``(check, status, detail)`` rows for ``kvstore doctor``). What is already
part of this package goes through the same door.
"""

from __future__ import annotations

import ast
import re
from importlib import metadata
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

import click

DISTRIBUTION = "kvstore-llm"
COMMANDS = "kvstore.commands"
CHECKS = "kvstore.checks"


class UnavailableError(click.ClickException):
    """Something cannot start here; the message says why and what to do."""

    exit_code = 3


class DeferredCommand(click.Command):
    """Stands in for a click command until it is called: then, and only then, it is imported."""

    def __init__(self, entry: metadata.EntryPoint) -> None:
        super().__init__(entry.name)
        self._entry = entry

    def get_short_help_str(self, limit: int = 45) -> str:
        """Return the first line of the command's docstring, read without importing it."""
        return summary(self._entry) or super().get_short_help_str(limit)

    def make_context(
        self,
        info_name: str | None,
        args: list[str],
        parent: click.Context | None = None,
        **extra: Any,
    ) -> click.Context:
        """Import the real command and let it take over.

        Raises:
            UnavailableError: It cannot be imported.
        """
        try:
            command = self._entry.load()
        except Exception as error:  # whatever another package does when it is imported
            if parent is not None and parent.params.get("debug"):
                raise
            raise UnavailableError(f"{self.name} is unavailable ({remedy(error)})") from error
        if not isinstance(command, click.Command):
            raise UnavailableError(f"{self.name} is unavailable ({self._entry.value}: no command)")
        return command.make_context(info_name, args, parent=parent, **extra)


def entries(group: str) -> list[metadata.EntryPoint]:
    """Return the entry points of ``group``, one a name, sorted by name."""
    by_name = {entry.name: entry for entry in metadata.entry_points(group=group)}
    return [by_name[name] for name in sorted(by_name)]


def remedy(error: BaseException) -> str:
    """Return in one line why an import failed and, where we know it, what to install."""
    if isinstance(error, ModuleNotFoundError) and error.name:
        module = error.name.partition(".")[0]
        extra = _extra_with(module)
        if extra:
            return f"{module} is not installed: pip install '{DISTRIBUTION}[{extra}]'"
        return f"the module {error.name} is not installed"
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def _extra_with(module: str) -> str | None:
    """Return the first extra of this distribution that installs ``module``."""
    try:
        requirements = metadata.requires(DISTRIBUTION) or []
    except metadata.PackageNotFoundError:
        return None
    for requirement in requirements:
        match = re.match(r"([\w.-]+).*\bextra == ['\"]([^'\"]+)['\"]", requirement)
        if match and match[1].replace("-", "_").lower() == module.lower():
            return match[2]
    return None


def summary(entry: metadata.EntryPoint) -> str:
    """Return the first docstring line of the function behind ``entry``, or an empty string.

    The source is parsed, nothing is imported.
    """
    source = find_source(entry.module)
    if source is None:
        return ""
    try:
        tree = ast.parse(source.read_text(encoding="utf-8"))
    except (OSError, SyntaxError, ValueError):
        return ""
    for node in tree.body:
        if isinstance(node, ast.FunctionDef) and node.name == entry.attr:
            return (ast.get_docstring(node) or "").partition("\n")[0]
    return ""


def find_source(module: str) -> Path | None:
    """Return the source file of ``module`` without importing it or its parents."""
    path: list[str] | None = None
    origin: str | None = None
    parts = module.split(".")
    for depth in range(len(parts)):
        spec = PathFinder.find_spec(".".join(parts[: depth + 1]), path)
        if spec is None:
            return None
        path = list(spec.submodule_search_locations or [])
        origin = spec.origin
    return Path(origin) if origin and origin.endswith(".py") else None
