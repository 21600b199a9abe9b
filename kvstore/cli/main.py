"""The command ``kvstore``: lazily loaded commands, and one place that turns errors into exit codes.

====  ==========================================================================
code  meaning
====  ==========================================================================
0     done
1     failed: what was asked for could not be done, or a check failed
2     usage: an unknown command, option or value
3     cannot start or reach: a setting is wrong, or a package is not installed
130   interrupted
====  ==========================================================================

Commands raise; they never print tracebacks or call ``sys.exit``. Data goes to standard output,
everything else to standard error.
"""

from __future__ import annotations

import platform
from importlib import metadata
from typing import TYPE_CHECKING

import click

from kvstore.cli.plugins import (
    COMMANDS,
    DISTRIBUTION,
    DeferredCommand,
    UnavailableError,
    entries,
    remedy,
)
from kvstore.cli.table import output_option, print_json
from kvstore.errors import ConfigError, KVStoreError

if TYPE_CHECKING:
    from collections.abc import Iterable

INTERRUPTED = 130
BUILT_IN = {
    "config": "kvstore.cli.config:config",
    "doctor": "kvstore.cli.doctor:doctor",
    "evict": "kvstore.cli.prefixes:evict",
    "explain": "kvstore.cli.explain:explain",
    "pin": "kvstore.cli.prefixes:pin",
    "serve": "kvstore.cli.serve:serve",
    "status": "kvstore.cli.status:status",
    "top": "kvstore.cli.top:top",
    "unpin": "kvstore.cli.prefixes:unpin",
    "version": "kvstore.cli.main:version",
}

_EPILOG = """\b
Exit codes:
  0    done
  1    failed, or a check failed
  2    wrong usage
  3    cannot start or reach: a wrong setting, a missing package
  130  interrupted
"""


class Commands(click.Group):
    """A group whose commands are imported on use and whose failures are one line and a code."""

    def invoke(self, ctx: click.Context) -> object:
        """Run the command; every error becomes a message on standard error and an exit code."""
        try:
            return super().invoke(ctx)
        except (click.ClickException, click.exceptions.Exit, BrokenPipeError):
            raise
        except (KeyboardInterrupt, click.Abort):
            click.echo("Interrupted.", err=True)
            ctx.exit(INTERRUPTED)
        except Exception as error:
            if ctx.params.get("debug"):
                raise
            raise _described(error) from error


def _described(error: Exception) -> click.ClickException:
    """Return the short message and the exit code that stand for ``error``."""
    if isinstance(error, ConfigError):
        return UnavailableError(str(error))
    if isinstance(error, ImportError):
        return UnavailableError(remedy(error))
    if isinstance(error, KVStoreError):
        return click.ClickException(str(error))
    return click.ClickException(f"{remedy(error)}\nRun `kvstore --debug …` to see where.")


def build(plugins: Iterable[metadata.EntryPoint]) -> click.Group:
    """Return the command group: ``plugins`` and what is built in. Nothing is imported yet.

    A plug-in cannot replace a built-in command.
    """
    group = Commands(
        name="kvstore",
        help="Tiered KV and prefix cache for LLM inference.",
        epilog=_EPILOG,
        params=[click.Option(["--debug"], is_flag=True, help="Show tracebacks.")],
        callback=lambda debug: None,  # noqa: ARG005 - read from the context where it matters
        context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    )
    built_in = (metadata.EntryPoint(*item, COMMANDS) for item in BUILT_IN.items())
    for entry in (*plugins, *built_in):
        group.add_command(DeferredCommand(entry))
    return group


@click.command()
@output_option
def version(output: str) -> None:
    """Print the version."""
    try:
        number = metadata.version(DISTRIBUTION)
    except metadata.PackageNotFoundError as error:
        raise UnavailableError(f"{DISTRIBUTION} is not installed: pip install .") from error
    document = {"name": DISTRIBUTION, "version": number, "python": platform.python_version()}
    if output == "json":
        print_json(document)
    else:
        click.echo(f"kvstore {number} (Python {document['python']})")


def main() -> None:
    """Run the command line and end the process with one of the exit codes above."""
    build(entries(COMMANDS))(prog_name="kvstore")


if __name__ == "__main__":
    main()
