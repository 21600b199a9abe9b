"""``kvstore demo --daemon``: two processes and a daemon between them.

This process asks about a document that nobody knows, and so stores it in the daemon. A second one,
which runs this module, asks another question about it, and finds it in the daemon's memory. The second
process reads orders from standard input and writes what it does to standard output: one JSON object a
line, ``{"step": text}`` or ``{"done": …}``.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from contextlib import contextmanager, suppress
from dataclasses import asdict
from queue import SimpleQueue
from tempfile import TemporaryDirectory
from threading import Thread
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import click
import torch

import kvstore
from engine_plugin.models import load_model
from engine_plugin.questions import QUESTIONS, Demo, DemoRow, ask
from engine_plugin.transformers import CachedModel
from kvstore.cli.daemon import connected
from kvstore.cli.plugins import UnavailableError
from kvstore.config import ENV_PREFIX

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from engine_plugin.questions import Tell

STOP_S = 10.0
"""How long a child that was asked to end may take."""


def measure(
    demo: Demo,
    longest_bytes: int,
    lengths: Sequence[int],
    tell: Tell,
    socket: Path | None,
    given: dict[str, Any],
) -> Iterator[DemoRow]:
    """Ask about a document of each length here, then in a second process.

    Args:
        demo: this process's model.
        longest_bytes: size of the blocks of the longest document.
        lengths: most tokens of the prompts, for each document.
        tell: hears what is done next.
        socket: of the daemon to use; None: start one.
        given: ``path`` and ``dtype`` of the same model, for the second process.
    """
    salt = uuid4().hex  # what earlier demos have stored does not hit
    with (
        # a client may have reserved no more than half of a daemon's memory
        serving(2 * longest_bytes, tell) if socket is None else running(socket) as url,
        second_process(
            given | {"url": url, "salt": salt, "answer_tokens": demo.answer_tokens}, tell
        ) as order,
        kvstore.connect(url) as store,
        CachedModel(demo.model, store, salt=salt) as cached,
    ):
        demo.answer(cached.generate, demo.prompt("", QUESTIONS[0]))  # warm up

        def forget(document: str) -> None:
            if namespace := cached.namespace():
                store.evict(namespace, demo.prompt(document, QUESTIONS[0])[0])

        for length in lengths:
            document = demo.document(length)
            forget(document)  # its head may be that of a shorter one
            yield ask(demo, cached, document, QUESTIONS[0], tell)
            yield DemoRow(**order({"document": document, "question": QUESTIONS[1]}))
            forget(document)


@contextmanager
def running(socket: Path) -> Iterator[str]:
    """Yield the address of the daemon at ``socket``. Without one the demo ends, with exit code 3."""
    with connected(socket, None) as store:
        store.status()
    yield f"unix://{socket.absolute()}"


@contextmanager
def serving(capacity_bytes: int, tell: Tell) -> Iterator[str]:
    """Run a daemon with ``capacity_bytes`` for blocks until this process ends; yield its address."""
    tell(f"starting a daemon with {capacity_bytes >> 20} MiB for blocks")
    with TemporaryDirectory(prefix="kvstore-demo-") as directory:
        socket = f"{directory}/kvstore.sock"
        command = ("kvstore", "serve", "--socket", socket, "--dram", str(capacity_bytes))
        with child("engine_plugin.tether", *command, stderr=subprocess.STDOUT) as (_, lines):
            said: list[str] = []
            for line in lines:
                if line.startswith("ready "):
                    yield f"unix://{socket}"
                    return
                said.append(line)
            raise UnavailableError("".join(["the daemon did not start:\n", *said]))


@contextmanager
def second_process(given: dict[str, Any], tell: Tell) -> Iterator[Callable[[dict[str, Any]], Any]]:
    """Run :func:`main` elsewhere; yield a function that gives it an order and returns what was done."""
    tell("starting a second process")
    with child("engine_plugin.demo_daemon") as (process, lines):

        def order(what: dict[str, Any]) -> Any:  # noqa: ANN401
            assert process.stdin is not None
            with suppress(BrokenPipeError):  # it has ended: so do its lines
                print(json.dumps(what), file=process.stdin, flush=True)
            for line in lines:
                said = json.loads(line)
                if "done" in said:
                    return said["done"]
                tell(f"second process: {said['step']}")
            raise click.ClickException("the second process ended early; it says above why")

        order(given)
        yield order


@contextmanager
def child(
    module: str, *arguments: str, stderr: int | None = None
) -> Iterator[tuple[subprocess.Popen[str], Iterator[str]]]:
    """Run a module as a process; yield it, and the lines that it writes to standard output.

    It is asked to end when the block does, also by SIGTERM or SIGHUP, and killed if it does not. Its
    standard input is open until then: when this process is killed, that is how it hears of it.
    """
    queue: SimpleQueue[str] = SimpleQueue()
    with (
        interruptible(),
        subprocess.Popen(  # noqa: S603 - our own modules
            [sys.executable, "-m", module, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
            process_group=0,
            env={
                name: text for name, text in os.environ.items() if not name.startswith(ENV_PREFIX)
            },
        ) as process,
    ):
        source = process.stdout
        assert source is not None

        def relay() -> None:  # so that the pipe is never full
            for line in source:
                queue.put(line)
            queue.put("")

        reader = Thread(target=relay, name="kvstore-demo", daemon=True)
        reader.start()
        try:
            yield process, iter(queue.get, "")
        finally:
            process.terminate()
            with suppress(subprocess.TimeoutExpired):
                process.wait(STOP_S)
            process.kill()
            reader.join()


@contextmanager
def interruptible() -> Iterator[None]:
    """Let SIGTERM and SIGHUP interrupt the block as ctrl-C does."""
    signals = [
        number
        for number in (signal.SIGTERM, signal.SIGHUP)
        if signal.getsignal(number) == signal.SIG_DFL
    ]
    for number in signals:
        signal.signal(number, signal.default_int_handler)
    try:
        yield
    finally:
        for number in signals:
            signal.signal(number, signal.SIG_DFL)


def main() -> None:
    """Be the second process: take one order a line, the first of which says what model and daemon."""

    def say(**what: object) -> None:
        click.echo(json.dumps(what))

    def tell(step: str) -> None:
        say(step=step)

    given = json.loads(sys.stdin.readline())
    dtype = getattr(torch, given["dtype"])
    model, tokenizer, _ = load_model(given["path"], dtype, on_progress=tell)
    model.to("cuda" if torch.cuda.is_available() else "cpu")
    demo = Demo(model, tokenizer, given["answer_tokens"])
    with (
        kvstore.connect(given["url"]) as store,
        CachedModel(model, store, salt=given["salt"]) as cached,
    ):
        demo.answer(cached.generate, demo.prompt("", QUESTIONS[0]))  # warm up
        say(done=None)
        for line in sys.stdin:
            what = json.loads(line)
            say(done=asdict(ask(demo, cached, what["document"], what["question"], tell)))


if __name__ == "__main__":
    main()
