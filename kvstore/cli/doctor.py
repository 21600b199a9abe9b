"""``kvstore doctor``: what this machine and installation offer, and what stands in the way."""

from __future__ import annotations

import importlib
import platform
import sys
from dataclasses import asdict
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

import click

from kvstore.cli.disk import disk_checks
from kvstore.cli.host import Check, Status, host_checks
from kvstore.cli.plugins import CHECKS, DISTRIBUTION, entries, find_source, remedy
from kvstore.cli.table import output_option, print_json, render

if TYPE_CHECKING:
    from collections.abc import Iterable

OLDEST_PYTHON = (3, 11)
PACKAGES = ("radix", "kvstore", "connectors", "engine_plugin")
STATUSES: tuple[Status, ...] = ("ok", "warn", "fail")


@click.command()
@click.option(
    "--disk", metavar="SIZE", help="Size of a disk tier; by default that of the settings."
)
@click.option("--disk-path", metavar="DIR", help="Its directory, which need not exist yet.")
@output_option
def doctor(disk: str | None, disk_path: str | None, output: str) -> None:
    """Check this machine and installation.

    The directory of a disk tier is checked too, if the settings or the options name one.
    """
    checks = run_checks(disk=disk, disk_path=disk_path)
    worst = max((c.status for c in checks), key=STATUSES.index, default="ok")
    if output == "json":
        print_json({"status": worst, "checks": [asdict(check) for check in checks]})
    else:
        headers = ["check", "status", "detail"]
        click.echo(render(headers, [[c.check, c.status, c.detail] for c in checks]))
    click.get_current_context().exit(1 if worst == "fail" else 0)


def run_checks(root: Path = Path("/"), **settings: str | None) -> list[Check]:
    """Return all rows: Python and packages, torch, the machine below ``root``, disk, and plug-ins.

    ``settings`` go before those of the environment.
    """
    return [
        python_check(sys.version_info[:2]),
        package_check(),
        shadowing_check(),
        *(module_check(name) for name in ("numpy", "xxhash")),
        *torch_checks(),
        *host_checks(root),
        *disk_checks(root, settings),
        *plugin_checks(entries(CHECKS)),
    ]


def python_check(version: tuple[int, ...]) -> Check:
    """Fail on a Python that is older than this package supports."""
    detail = f"{platform.python_implementation()} {platform.python_version()}"
    if version >= OLDEST_PYTHON:
        return Check("python", "ok", detail)
    return Check("python", "fail", f"{detail}; {'.'.join(map(str, OLDEST_PYTHON))} is needed")


def package_check() -> Check:
    """Report the installed version of this distribution."""
    try:
        return Check(DISTRIBUTION, "ok", metadata.version(DISTRIBUTION))
    except metadata.PackageNotFoundError:
        detail = "not installed, so no plug-in is found: pip install ."
        return Check(DISTRIBUTION, "warn", detail)


def shadowing_check() -> Check:
    """Fail when another installed package hides one of ours: ``radix`` is not a rare name."""
    home = Path(__file__).resolve().parents[2]
    for name in PACKAGES:
        source = find_source(name)
        if source is None:
            return Check("packages", "fail", f"{name} is missing: reinstall {DISTRIBUTION}")
        if source.resolve().parents[1] != home:
            detail = f"{name} comes from {source.parent}, not from {home}"
            return Check("packages", "fail", f"{detail}: uninstall what brought it")
    return Check("packages", "ok", f"{', '.join(PACKAGES)} in {home}")


def module_check(name: str) -> Check:
    """Import a package that kvstore cannot work without, and report its version."""
    try:
        importlib.import_module(name)
        return Check(name, "ok", metadata.version(name))
    except Exception as error:  # noqa: BLE001 - whatever it is, it belongs in the report
        return Check(name, "fail", remedy(error))


def torch_checks() -> list[Check]:
    """Report torch and its devices, and the versions of what is used together with it."""
    try:
        import torch
    except ModuleNotFoundError as error:
        return [Check("torch", "warn", remedy(error))]
    except Exception as error:  # noqa: BLE001 - a broken installation raises anything
        return [Check("torch", "fail", f"installed, but cannot be imported: {remedy(error)}")]
    rows = [Check("torch", "ok", torch.__version__), _optional("transformers")]
    if not torch.cuda.is_available():
        return [*rows, Check("cuda", "warn", "no device: models run on the processor")]
    names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    cuda = Check("cuda", "ok", f"CUDA {torch.version.cuda}: {', '.join(names)}")
    return [*rows, cuda, _optional("flash-attn")]


def _optional(name: str) -> Check:
    try:
        return Check(name, "ok", metadata.version(name))
    except metadata.PackageNotFoundError:
        return Check(name, "warn", f"not installed: pip install '{DISTRIBUTION}[{name}]'")


def plugin_checks(points: Iterable[metadata.EntryPoint]) -> list[Check]:
    """Return the rows of every plug-in; one that cannot be asked is a row that says so."""
    rows: list[Check] = []
    for point in points:
        try:
            rows += [_row(*row) for row in point.load()()]
        except Exception as error:  # noqa: BLE001 - a plug-in must not break the report
            rows.append(Check(point.name, "warn", f"unavailable ({remedy(error)})"))
    return rows


def _row(check: str, status: Status, detail: str) -> Check:
    if status not in STATUSES:
        raise ValueError(f"the status of {check!r} is {status!r}, not one of {STATUSES}")
    return Check(check, status, detail)
