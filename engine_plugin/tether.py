"""Runs a module as a program that ends when standard input does.

Whoever starts it holds the other end of that pipe, which the kernel closes however they end: so the
program is told to end (SIGTERM) even where nobody is left to do so.

    python -m engine_plugin.tether MODULE ARGUMENT …
"""

from __future__ import annotations

import os
import runpy
import signal
import sys
from threading import Thread


def main() -> None:
    """Run the module that the arguments name."""
    Thread(target=_watch, name="kvstore-tether", daemon=True).start()
    del sys.argv[0]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)


def _watch() -> None:
    while os.read(0, 4096):  # not sys.stdin, whose lock a thread must not hold when Python ends
        pass
    os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    main()
