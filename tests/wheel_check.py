"""Checks a wheel that was installed in an otherwise empty environment: ``make wheel-test``.

Run with the Python of that environment: ``python -I tests/wheel_check.py WHEEL``.
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

PACKAGES = {"radix", "kvstore", "connectors", "engine_plugin"}


def check_contents(wheel: Path) -> None:
    """The wheel holds our four packages and nothing else that could be imported."""
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    tops = {name.partition("/")[0] for name in names}
    packages = {top for top in tops if not top.endswith(".dist-info")}
    assert packages == PACKAGES, packages
    assert all(f"{package}/py.typed" in names for package in PACKAGES), names
    assert any(name.endswith("licenses/LICENSE") for name in names), names


def check_imports() -> None:
    """Every package is imported from this environment, not from the checkout."""
    for package in sorted(PACKAGES):
        module = importlib.import_module(package)
        assert module.__file__ is not None, package
        assert Path(module.__file__).resolve().is_relative_to(Path(sys.prefix).resolve()), module


def run(*command: str, cwd: str) -> str:
    """Run the installed ``kvstore`` and return what it printed; fail if it failed."""
    script = Path(sys.executable).with_name("kvstore")
    env = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    done = subprocess.run(
        [str(script), *command], cwd=cwd, env=env, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, f"kvstore {command}: {done.returncode}\n{done.stdout}{done.stderr}"
    return done.stdout


def check_daemon(directory: str) -> None:
    """The installed ``kvstore serve`` serves, and stops when it is told to."""
    path = Path(directory, "kvstore.sock")
    script = Path(sys.executable).with_name("kvstore")
    command = [str(script), "serve", "--socket", str(path), "--dram", "16MiB", "--admin-port", "0"]
    with subprocess.Popen(command, cwd=directory, stderr=subprocess.PIPE, text=True) as daemon:
        assert daemon.stderr is not None
        ready = next((line for line in daemon.stderr if line.startswith("ready ")), "")
        assert ready.startswith(f"ready unix://{path} node="), ready
        status = json.loads(run("status", "--socket", str(path), "--output", "json", cwd=directory))
        assert status["state"] == "ready", status
        daemon.terminate()
        daemon.communicate(timeout=20)
    assert daemon.returncode == 0, daemon.returncode


def main(wheel: Path) -> None:
    """Check the contents, the imports, and the commands from a directory of no importance."""
    check_contents(wheel)
    check_imports()
    with tempfile.TemporaryDirectory() as elsewhere:
        print(run("version", cwd=elsewhere), end="")
        print(run("doctor", cwd=elsewhere), end="")
        report = json.loads(run("doctor", "--output", "json", cwd=elsewhere))
        check_daemon(elsewhere)
    details = {check["check"]: check["detail"] for check in report["checks"]}
    assert "pip install 'kvstore-llm[transformers]'" in details["torch"], details
    print(f"{wheel.name}: contents, imports and commands are right")


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve())
