"""Everything that wants a CUDA device, in one run: tests, conformance, time to first token, doctor.

Writes one JSON file a part into ``results/`` and prints where. Exits with 1 if a part failed. Runs on the
CPU as well, where the tests that need a device are skipped and say so.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import click

PARTS = {
    "tests": ["pytest", "-m", "gpu", "-p", "no:randomly", "--timeout", "300"],
    "conformance_float32": ["bench.conformance", "--output", "json"],
    "conformance_bfloat16": ["bench.conformance", "--dtype", "bfloat16", "--output", "json"],
    "ttft_bfloat16": ["bench.ttft", "--dtype", "bfloat16", "--output", "json"],
    "ttft_float32": ["bench.ttft", "--output", "json"],
    "pages": ["bench.pages", "--output", "json"],
    "doctor": ["kvstore.cli.main", "doctor", "--output", "json"],
}


@click.command()
@click.option(
    "--results", default="results", show_default=True, help="Directory for the JSON files."
)
@click.option(
    "--only", multiple=True, type=click.Choice(list(PARTS)), help="Parts to run; all by default."
)
def main(results: str, only: tuple[str, ...]) -> None:
    """Run the parts one after the other."""
    directory = Path(results)
    directory.mkdir(parents=True, exist_ok=True)
    failed = []
    for name in only or PARTS:
        click.echo(f"==> {name}", err=True)
        done = subprocess.run(
            [sys.executable, "-m", *PARTS[name]], stdout=subprocess.PIPE, check=False
        )
        file = directory / f"{name}.{'txt' if name == 'tests' else 'json'}"
        file.write_bytes(done.stdout)
        click.echo(file)
        failed += [name] * (done.returncode != 0)
    if failed:
        raise click.ClickException(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
