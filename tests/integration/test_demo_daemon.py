"""The daemon that the demo starts for itself ends with the demo."""

from __future__ import annotations

import os
import select
import shutil
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

import kvstore

pytest.importorskip("torch")

SERVE = """
from engine_plugin.demo_daemon import serving
with serving(1 << 20, lambda step: None) as url:
    print(url, flush=True)
    input()
"""


@pytest.fixture
def demo():
    """A process that runs a daemon as the demo does; yield it and the daemon's address."""
    command = [sys.executable, "-c", SERVE]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        yield process, process.stdout.readline().strip()
        process.kill()


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM, None])
def test_the_daemon_ends_however_the_demo_does(demo, how):
    process, url = demo
    with kvstore.connect(url, on_failure="raise") as client:
        pid = client.status().pid
    watched = os.pidfd_open(pid)
    try:
        if how is None:
            process.communicate("\n")
            assert process.returncode == 0
        else:
            process.send_signal(how)
        ended, _, _ = select.select([watched], [], [], 30)
        assert ended, "the daemon is still there"
        assert not Path(url.removeprefix("unix://")).exists(), "it ended in good order"
    finally:
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(watched, signal.SIGKILL)
        os.close(watched)
        shutil.rmtree(Path(url.removeprefix("unix://")).parent, ignore_errors=True)
