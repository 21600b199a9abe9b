"""``kvstore top``: what a daemon is doing, on the whole terminal, until q or Ctrl-C."""

from __future__ import annotations

import os
import select
import shutil
import signal
import sys
import termios
import tty
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, NoReturn

import click

from kvstore.cli.daemon import connected, daemon_options
from kvstore.cli.status import header, interval_option, line, looks, overview, print_lines

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from kvstore.client.blocking import Client
    from kvstore.stats import DaemonStatus

HISTORY = 8
"""Lines of rates that are shown."""

ENTER, LEAVE = "\x1b[?1049h\x1b[?25l", "\x1b[?25h\x1b[?1049l"
"""The terminal's other screen, without a cursor; and back."""
HOME, CLEAR_LINE, CLEAR_REST = "\x1b[H", "\x1b[K", "\x1b[J"


@click.command()
@daemon_options
@interval_option
def top(*, socket: Path | None, url: str | None, interval: float) -> None:
    """Watch a daemon on the whole terminal, until q or Ctrl-C.

    Bytes are blocks times the mean size of a block, as engines copy them themselves. Without a
    terminal there is a line each time instead.
    """
    with connected(socket, url) as client:
        try:
            if sys.stdin.isatty() and sys.stdout.isatty():
                client.status()  # a daemon that does not answer is better told on the usual screen
                with _whole_screen() as signals:
                    _draw_until_quit(client, interval, signals)
            else:
                print_lines(client, interval, "table")
        except KeyboardInterrupt:
            return


def screen(now: DaemonStatus | str, recent: list[str], num_columns: int, num_lines: int) -> str:
    """Return what to write for the newest status, or for the reason why there is none.

    Args:
        now: the status, or the reason.
        recent: lines of rates, the newest last; it is shown first.
        num_columns: width of the terminal, which no line exceeds.
        num_lines: its height.
    """
    rows = [header(), *reversed(recent), *[""] * (HISTORY - len(recent)), ""]
    rows += [now] if isinstance(now, str) else overview(now).splitlines()
    rows = [*rows[: num_lines - 1], "q quits"]
    return HOME + "\r\n".join(row[:num_columns] + CLEAR_LINE for row in rows) + CLEAR_REST


def _draw_until_quit(client: Client, interval_s: float, signals: int) -> None:
    recent: list[str] = []
    for last, now in looks(client, interval_s, partial(_quit_was_pressed, signals)):
        if last is not None and not isinstance(now, str):
            recent = [*recent, line(last, now, client.block_tokens)][-HISTORY:]
        size = shutil.get_terminal_size()
        click.echo(screen(now, recent, size.columns, size.lines), nl=False)


def _quit_was_pressed(signals: int, timeout_s: float) -> bool:
    """Wait for a key, or a signal; any key but q only ends the wait."""
    ready, _, _ = select.select([sys.stdin, signals], [], [], timeout_s)
    keys = os.read(sys.stdin.fileno(), 64) if sys.stdin in ready else b" "
    return not keys or b"q" in keys.lower()


@contextmanager
def _whole_screen() -> Iterator[int]:
    """Take the terminal, and give it back as it was, also when told to end.

    Yields a descriptor that can be read once a signal has come: one that comes just before a wait
    would not end it otherwise.
    """
    terminal = sys.stdin.fileno()
    attributes = termios.tcgetattr(terminal)
    handlers = {
        signal.SIGTERM: signal.signal(signal.SIGTERM, _end),
        signal.SIGTSTP: signal.signal(signal.SIGTSTP, signal.SIG_IGN),
    }
    signals, told = os.pipe2(os.O_NONBLOCK)
    signal.set_wakeup_fd(told)
    try:
        tty.setcbreak(terminal, termios.TCSADRAIN)
        click.echo(ENTER, nl=False)
        yield signals
    finally:
        signal.set_wakeup_fd(-1)
        os.close(signals)
        os.close(told)
        click.echo(LEAVE, nl=False)
        termios.tcsetattr(terminal, termios.TCSADRAIN, attributes)
        for number, handler in handlers.items():
            signal.signal(number, handler)


def _end(number: int, _: object) -> NoReturn:
    raise SystemExit(128 + number)
