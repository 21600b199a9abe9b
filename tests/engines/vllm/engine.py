"""Engines and daemons as processes of their own, for tests."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import threading
from contextlib import suppress
from typing import IO, TYPE_CHECKING, TypeVar

import msgspec

import kvstore
from tests.engines.vllm import child
from tests.engines.vllm.messages import (
    Answer,
    Answers,
    Command,
    Done,
    EngineOptions,
    Failed,
    Forget,
    Generate,
    Measure,
    Metrics,
    Progress,
    Prompt,
    Reply,
    Stop,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(["tests.engines.vllm.preload"])

Kind = TypeVar("Kind", bound=Reply)

START_S = 120.0
"""Longest that an engine may take to start: a slow machine that also imports vLLM."""
ANSWER_S = 60.0
"""Longest between two signs of life of an engine that has requests."""


def wait_until(condition: Callable[[], bool], timeout_s: float = 30.0) -> None:
    """Wait for something that another process does. Raises :class:`AssertionError` when it is late."""
    pause = threading.Event()
    for _ in range(int(timeout_s / 0.02)):
        if condition():
            return
        pause.wait(0.02)
    raise AssertionError(f"not within {timeout_s} s")


class Engine:
    """vLLM in a process of its own."""

    def __init__(self, options: EngineOptions, log: Path) -> None:
        """Start it and wait until it is ready; its output goes to the file ``log``."""
        self._log = log
        self._pipe, theirs = FORKS.Pipe()
        encoded = msgspec.msgpack.encode(options)
        self._process = FORKS.Process(target=child.main, args=(theirs, encoded, str(log)))
        self._process.start()
        theirs.close()
        try:
            self._expect(Done, START_S)
        except BaseException:
            self.kill()
            raise

    def generate(self, *prompts: Prompt) -> list[Answer]:
        """Submit all ``prompts`` at once and return their answers."""
        return self.watch(prompts, lambda progress: None)

    def watch(self, prompts: Sequence[Prompt], on_step: Callable[[Progress], None]) -> list[Answer]:
        """Do the same, and call ``on_step`` about each step that the engine has taken."""
        self.submit(prompts)
        for reply in self.replies():
            if isinstance(reply, Answers):
                return reply.answers
            on_step(reply)
        raise AssertionError("no answer")

    def submit(self, prompts: Sequence[Prompt]) -> None:
        """Only submit; :meth:`replies` must be read to the end."""
        self._send(Generate(list(prompts)))

    def replies(self) -> Iterator[Progress | Answers]:
        """Yield what the engine tells about what was submitted; the answers are the last."""
        while True:
            reply = self._receive(ANSWER_S)
            assert isinstance(reply, Progress | Answers), reply
            yield reply
            if isinstance(reply, Answers):
                return

    def forget(self) -> None:
        """Empty vLLM's own prefix cache."""
        self._send(Forget())
        self._expect(Done, ANSWER_S)

    def metrics(self) -> dict[str, float]:
        """Return all counters and gauges since the start, without their prefix ``vllm:``."""
        self._send(Measure())
        values = self._expect(Metrics, ANSWER_S).values
        return {name.removeprefix("vllm:"): value for name, value in values.items()}

    @property
    def external_hit_tokens(self) -> int:
        """Tokens that the connector has provided so far."""
        return int(self.metrics()["external_prefix_cache_hits"])

    @property
    def log(self) -> str:
        """What it has printed."""
        return self._log.read_text(errors="replace")

    def close(self) -> None:
        """Shut it down in good order."""
        if not self._process.is_alive():
            self.kill()
            return
        try:
            self._send(Stop())
            self._expect(Done, ANSWER_S)
            self._process.join(ANSWER_S)
            code = self._process.exitcode
        finally:
            self.kill()
        assert code == 0, f"the engine ended with {code}:\n{self.log[-4000:]}"

    def kill(self) -> None:
        """End it as SIGKILL does, and the processes that it has started with it."""
        group = self._process.pid
        assert group, "started by the constructor"
        with suppress(ProcessLookupError):
            os.killpg(group, signal.SIGKILL)
        self._process.kill()
        self._process.join()
        self._pipe.close()

    def _send(self, command: Command) -> None:
        self._pipe.send_bytes(msgspec.msgpack.encode(command))

    def _receive(self, timeout_s: float) -> Reply:
        try:
            if self._pipe.poll(timeout_s):
                reply: Reply = msgspec.msgpack.decode(self._pipe.recv_bytes(), type=Reply)
                if isinstance(reply, Failed):
                    raise AssertionError(f"{reply.traceback}\n{self.log[-4000:]}")
                return reply
            what = f"said nothing for {timeout_s} s"
            os.kill(self._process.pid or 0, signal.SIGUSR1)
            self._process.join(1)
        except (EOFError, ConnectionError):
            self._process.join(5)
            what = f"ended with {self._process.exitcode}"
        raise AssertionError(f"the engine {what}:\n{self.log[-6000:]}")

    def _expect(self, kind: type[Kind], timeout_s: float) -> Kind:
        reply = self._receive(timeout_s)
        assert isinstance(reply, kind), reply
        return reply


class Daemon:
    """``kvstore serve`` on a socket of its own."""

    def __init__(
        self,
        directory: Path,
        *,
        dram: str = "256MiB",
        lease_timeout: str = "10",
        disk: str = "0",
    ) -> None:
        """Prepare one in ``directory``, which it may fill; not started yet.

        With ``disk`` everything goes there, and comes back when it is wanted.
        """
        self.socket = directory / "kv.sock"
        self.url = f"unix://{self.socket}"
        self._sizes = ["--dram", dram, "--lease-timeout", lease_timeout]
        self._log = directory / "daemon.log"
        self._environment = {
            name: value for name, value in os.environ.items() if not name.startswith("KVSTORE_")
        } | {
            "XDG_CONFIG_HOME": str(directory),
            "KVSTORE_DISK": disk,
            "KVSTORE_DISK_RESERVE": "0",
            "KVSTORE_DISK_ADMISSION": "always",
            "KVSTORE_LOAD": "always",
        }
        if disk != "0":
            self._environment["KVSTORE_DISK_PATH"] = str(directory / "disk")
        self._process: subprocess.Popen[str] | None = None
        self._reader: threading.Thread | None = None

    def start(self) -> Daemon:
        """Start it and wait until clients can connect."""
        command = [sys.executable, "-m", "kvstore", "serve", "--socket", str(self.socket)]
        with self._log.open("a") as log:
            self._process = subprocess.Popen(
                [*command, *self._sizes],
                stdout=log,
                stderr=subprocess.PIPE,
                text=True,
                env=self._environment,
            )
        assert self._process.stderr is not None
        for line in self._process.stderr:
            if line.startswith("ready"):
                break
        else:
            raise AssertionError("the daemon did not start")
        self._reader = threading.Thread(
            target=_copy, args=(self._process.stderr, self._log), name="daemon-log"
        )
        self._reader.start()
        return self

    @property
    def num_blocks(self) -> int:
        """Blocks that are stored and visible."""
        with kvstore.connect(self.url, on_failure="raise", deadline_s=20) as client:
            return client.status().pool.num_blocks

    def count(self, *name: str) -> int:
        """Return a counter of the pool."""
        with kvstore.connect(self.url, on_failure="raise", deadline_s=20) as client:
            return client.status().pool.counts.get(name, 0)

    def drain(self) -> None:
        """Wait until everything is written that was to be."""
        with kvstore.connect(self.url, on_failure="raise") as client:
            client.drain()

    def wait_for_blocks(self, num_blocks: int) -> None:
        """Wait until ``num_blocks`` are stored, and see that it is not more."""
        last = -1

        def reached() -> bool:
            nonlocal last
            last = self.num_blocks
            return last >= num_blocks

        try:
            wait_until(reached)
        finally:
            assert last == num_blocks, f"{last} blocks are stored, not {num_blocks}"

    def send(self, number: signal.Signals) -> None:
        """Send it a signal."""
        assert self._process is not None
        self._process.send_signal(number)

    def kill(self) -> None:
        """End it as SIGKILL does."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            if self._reader is not None:
                self._reader.join()
            self._process = self._reader = None

    def close(self) -> None:
        """End it in good order if it runs, and see that it holds nothing for anyone."""
        if self._process is None:
            return
        self._process.send_signal(signal.SIGCONT)
        self._process.terminate()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(20)
        code = self._process.poll()
        self.kill()
        assert code == 0, f"the daemon ended with {code}"


def _copy(lines: IO[str], log: Path) -> None:
    """Copy what a daemon says, until it ends."""
    with lines, log.open("a") as file:
        file.writelines(lines)
