"""The commands that README shows for a running daemon do as it says, as they are written."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import kvstore
from kvstore import KVLayout, Namespace
from tests.integration.test_serve import Process

README = Path(__file__).parents[2] / "README.md"
NAMESPACE = Namespace(b"w", KVLayout(1, 1, 8, "float32"))


def test_the_commands_beside_a_daemon(tmp_path):
    block = re.search(r"```sh\n(export KVSTORE_ADMIN_PORT=.+?)```", README.read_text(), re.DOTALL)[
        1
    ]
    assert "kvstore serve --dram 8GiB --admin-port 8200 " in README.read_text()
    assert "KVSTORE_ADMIN_PORT=8200 " in block
    (tmp_path / "kvstore").write_text(f'#!/bin/sh\nexec {sys.executable} -m kvstore "$@"\n')
    (tmp_path / "kvstore").chmod(0o755)
    (tmp_path / "prompt.json").write_text(str(list(range(50))))
    daemon = Process(tmp_path / "kv.sock", "--admin-port=0")
    try:
        port = daemon.wait_ready()[6]
        with kvstore.connect(f"unix://{daemon.path}", on_failure="raise") as store:
            store.commit(store.reserve(NAMESPACE, range(50)))
        script = block.replace("=8200", f"={port}").replace(" --watch", "")  # which never ends
        here = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "KVSTORE_SOCKET": str(daemon.path)}
        command = ["bash", "-eo", "pipefail", "-c", script]
        done = subprocess.run(
            command,
            cwd=tmp_path,
            env=os.environ | here,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        assert "48 tokens are pinned as manual.\nmanual is pinned no more.\n3 blocks" in done.stdout
    finally:
        daemon.close()
