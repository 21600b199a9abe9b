"""The command line: what it loads, what it prints, and the exit codes it promises."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.metadata import EntryPoint
from typing import TYPE_CHECKING

import click
import pytest
from click.testing import CliRunner

from kvstore.cli import doctor, host, plugins
from kvstore.cli.main import build
from kvstore.cli.table import render
from kvstore.errors import ConfigError, TooLargeError
from kvstore.host import available_memory_bytes, cgroup_limit_bytes, memory_limit

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from click.testing import Result

    from kvstore.cli.table import Cell

RAISING = {
    "broken-setting": ConfigError("dram is '8GG': give a size such as 8GiB"),
    "too-large": TooLargeError("9 blocks do not fit into a pool of 8"),
    "bug": RuntimeError("first line\nsecond line"),
    "stopped": KeyboardInterrupt(),
    "refused": click.UsageError("no such thing"),
    "vanished": ModuleNotFoundError("No module named 'torch.x'", name="torch.x"),
}


def command_that_raises(name: str) -> click.Command:
    def body() -> None:
        raise RAISING[name]

    return click.Command(name, callback=body)


def run(*args: str, commands: tuple[EntryPoint, ...] = ()) -> Result:
    group = build(commands)
    for name in RAISING:
        group.add_command(command_that_raises(name))
    return CliRunner().invoke(group, args, prog_name="kvstore")


def command_entry(name: str, value: str) -> EntryPoint:
    return EntryPoint(name, value, plugins.COMMANDS)


@pytest.fixture
def plugin_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A directory on the import path, for packages that exist only during one test."""
    monkeypatch.syspath_prepend(tmp_path)
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        del sys.modules[name]


# ------------------------------------------------------------------------------- loading


def test_help_imports_nothing_heavy() -> None:
    script = (
        "import sys; sys.argv = ['kvstore', '--help']\n"
        "from kvstore.cli.main import main\n"
        "try: main()\n"
        "except SystemExit as stop: assert stop.code == 0, stop.code\n"
        "heavy = {'torch', 'transformers', 'pydantic', 'numpy', 'engine_plugin', 'gguf'}\n"
        "print(sorted(heavy & set(sys.modules)), file=sys.stderr)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stderr.strip() == "[]"
    for word in ("doctor", "version", "demo", "Exit codes", "130"):
        assert word in done.stdout


def test_commands_are_described_without_importing_them(plugin_dir: Path) -> None:
    package = plugin_dir / "parent_pkg"
    package.mkdir()
    (package / "__init__.py").write_text("raise RuntimeError('imported too early')\n")
    (package / "sub.py").write_text('def go():\n    """Go somewhere.\n\n    More.\n    """\n')
    result = run("--help", commands=(command_entry("go", "parent_pkg.sub:go"),))
    assert result.exit_code == 0
    assert "Go somewhere." in result.output
    assert "Check this machine and installation." in result.output
    assert "parent_pkg" not in sys.modules


def test_a_plugin_command_runs_with_its_arguments(plugin_dir: Path) -> None:
    (plugin_dir / "greeter.py").write_text(
        "import click\n"
        "@click.command()\n@click.argument('name')\n"
        "def greet(name):\n    '''Greet.'''\n    click.echo(f'hello {name}')\n"
    )
    entry = command_entry("greet", "greeter:greet")
    assert run("greet", "you", commands=(entry,)).output == "hello you\n"
    assert "NAME" in run("greet", "--help", commands=(entry,)).output
    assert run("greet", commands=(entry,)).exit_code == 2


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ("import torch_that_is_not_there", "the module torch_that_is_not_there is not installed"),
        ("raise OSError('libcuda.so: cannot open')", "OSError: libcuda.so: cannot open"),
        ("", "AttributeError"),
        ("broken = 1", "no command"),
    ],
)
def test_a_command_that_cannot_be_loaded_says_so_in_one_line(
    plugin_dir: Path, body: str, reason: str
) -> None:
    (plugin_dir / "broken_cmd.py").write_text(body + "\n")
    entry = command_entry("broken", "broken_cmd:broken")
    result = run("broken", commands=(entry,))
    assert result.exit_code == 3
    assert result.stderr.startswith("Error: broken is unavailable (")
    assert reason in result.stderr
    assert result.stderr.count("\n") == 1
    assert run("--help", commands=(entry,)).exit_code == 0


def test_plugins_cannot_replace_built_in_commands() -> None:
    result = run("version", commands=(command_entry("version", "nowhere:nothing"),))
    assert result.exit_code == 0


def test_a_missing_package_is_named_with_the_extra_that_brings_it() -> None:
    for module, extra in (("torch", "transformers"), ("flash_attn", "flash-attn")):
        text = plugins.remedy(ModuleNotFoundError(f"No module named '{module}'", name=module))
        assert text == f"{module} is not installed: pip install 'kvstore-llm[{extra}]'"


# ---------------------------------------------------------------------------- exit codes


@pytest.mark.parametrize(
    ("command", "code", "message"),
    [
        ("broken-setting", 3, "Error: dram is '8GG': give a size such as 8GiB"),
        ("too-large", 1, "Error: 9 blocks do not fit into a pool of 8"),
        ("bug", 1, "Error: RuntimeError: first line"),
        ("stopped", 130, "Interrupted."),
        ("refused", 2, "no such thing"),
        ("vanished", 3, "pip install 'kvstore-llm[transformers]'"),
        ("verson", 2, "No such command 'verson'"),
    ],
)
def test_errors_become_a_message_and_an_exit_code(command: str, code: int, message: str) -> None:
    result = run(command)
    assert result.exit_code == code
    assert message in result.stderr
    assert result.stdout == ""
    assert "Traceback" not in result.stderr


def test_debug_lets_the_error_through() -> None:
    result = run("--debug", "bug")
    assert isinstance(result.exception, RuntimeError)


# -------------------------------------------------------------------------------- version


def test_version() -> None:
    as_json = json.loads(run("version", "--output", "json").stdout)
    assert as_json["name"] == "kvstore-llm"
    assert run("version").stdout.startswith(f"kvstore {as_json['version']} (Python 3.")


# --------------------------------------------------------------------------------- doctor

MEMINFO = "MemTotal: 16777216 kB\nMemFree: 1 kB\nMemAvailable: 8388608 kB\nHugePages_Total: 0\n"


def write(root: Path, **files: str) -> None:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def test_doctor_prints_one_json_object_and_the_same_rows_as_a_table() -> None:
    result = run("doctor", "--output", "json")
    report = json.loads(result.stdout)
    assert result.exit_code == (1 if report["status"] == "fail" else 0)
    names = [check["check"] for check in report["checks"]]
    for expected in ("python", "numpy", "xxhash", "torch", "memory", "memlock", "processor"):
        assert expected in names
    assert all(check["status"] in doctor.STATUSES for check in report["checks"])
    table = run("doctor").stdout.splitlines()
    assert table[0].split() == ["check", "status", "detail"]
    assert len(table) == 2 + len(names)


def test_doctor_fails_when_a_check_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "python_check", lambda _: host.Check("python", "fail", "3.9"))
    result = run("doctor", "--output", "json")
    assert result.exit_code == 1
    assert json.loads(result.stdout)["status"] == "fail"


def test_old_python_fails() -> None:
    assert doctor.python_check((3, 10)).status == "fail"
    assert doctor.python_check((3, 11)).status == "ok"


def test_memory_without_a_limit(tmp_path: Path) -> None:
    write(tmp_path, **{"proc/meminfo": MEMINFO, "proc/self/cgroup": "0::/\n"})
    write(tmp_path, **{"sys/fs/cgroup/memory.max": "max\n"})
    row = host.memory(tmp_path)
    assert row == host.Check("memory", "ok", "16 GiB, 8 GiB available, no cgroup limit")
    assert available_memory_bytes(tmp_path) == 8 << 30


def test_memory_limit_of_a_parent_group_in_version_2(tmp_path: Path) -> None:
    write(
        tmp_path,
        **{
            "proc/self/cgroup": "0::/pod/box\n",
            "sys/fs/cgroup/pod/box/memory.max": "max\n",
            "sys/fs/cgroup/pod/memory.max": f"{512 << 20}\n",
            "proc/meminfo": MEMINFO,
        },
    )
    assert cgroup_limit_bytes(tmp_path) == 512 << 20
    assert host.memory(tmp_path).status == "warn"


@pytest.mark.parametrize(
    ("high", "most", "smaller"),
    [(1 << 30, "max", "high"), (1 << 30, 2 << 30, "high"), ("max", 2 << 30, "max")],
)
def test_where_a_group_is_slowed_down_is_a_limit_too(
    tmp_path: Path, high: int | str, most: int | str, smaller: str
) -> None:
    write(
        tmp_path,
        **{
            "proc/self/cgroup": "0::/box\n",
            "sys/fs/cgroup/box/memory.max": f"{most}\n",
            "sys/fs/cgroup/box/memory.high": f"{high}\n",
            "sys/fs/cgroup/box/memory.current": f"{256 << 20}\n",
            "proc/meminfo": MEMINFO,
        },
    )
    limit = memory_limit(tmp_path)
    assert limit is not None
    size = 1 << 30 if smaller == "high" else 2 << 30
    assert cgroup_limit_bytes(tmp_path) == limit.limit_bytes == size
    assert limit.available_bytes == size - (256 << 20)
    assert limit.source.endswith(f"sys/fs/cgroup/box/memory.{smaller}")


def test_memory_limit_in_version_1(tmp_path: Path) -> None:
    write(
        tmp_path,
        **{
            "proc/self/cgroup": "5:cpu,cpuacct:/x\n4:memory:/box\n",
            "sys/fs/cgroup/memory/box/memory.limit_in_bytes": f"{2 << 30}\n",
            "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
        },
    )
    assert cgroup_limit_bytes(tmp_path) == 2 << 30
    assert available_memory_bytes(tmp_path) == 2 << 30


def group_files(
    directory: str, names: tuple[str, str, str], limit: int, used: int, cached: int
) -> dict[str, str]:
    return {
        f"{directory}/{names[0]}": f"{limit << 30}\n",
        f"{directory}/{names[1]}": f"{used << 30}\n",
        f"{directory}/memory.stat": f"inactive_anon 1\n{names[2]} {cached << 30}\nfile 7\n",
    }


@pytest.mark.parametrize(
    ("groups", "parent", "names"),
    [
        ("0::/pod/box\n", "sys/fs/cgroup/pod", ("memory.max", "memory.current", "inactive_file")),
        (
            "4:memory:/pod/box\n0::/\n",
            "sys/fs/cgroup/memory/pod",
            ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
        ),
    ],
)
def test_what_a_group_uses_is_not_available_but_file_cache_is(
    tmp_path: Path, groups: str, parent: str, names: tuple[str, str, str]
) -> None:
    write(tmp_path, **{"proc/self/cgroup": groups, "proc/meminfo": MEMINFO})
    write(tmp_path, **group_files(f"{parent}/box", names, limit=9, used=2, cached=1))
    assert available_memory_bytes(tmp_path) == 8 << 30  # as much as the machine has
    write(tmp_path, **group_files(parent, names, limit=12, used=9, cached=4))
    limit = memory_limit(tmp_path)
    assert limit is not None
    assert (limit.limit_bytes, limit.available_bytes) == (12 << 30, 7 << 30)
    assert limit.source.endswith(f"{parent}/{names[0]}")
    write(tmp_path, **group_files(parent, names, limit=12, used=13, cached=0))
    assert available_memory_bytes(tmp_path) == 0
    assert host.memory(tmp_path).detail == "16 GiB, 0 B available, cgroup limit 9 GiB"


def test_a_machine_that_tells_nothing_is_no_failure(tmp_path: Path) -> None:
    assert "fail" not in {row.status for row in host.host_checks(tmp_path)}
    assert host.memory(tmp_path).detail == "not known on this system"
    assert available_memory_bytes(tmp_path) is None


@pytest.mark.parametrize(
    ("text", "status", "word"),
    [
        ("always [madvise] never\n", "ok", "madvise"),
        ("always madvise [never]\n", "warn", "never"),
    ],
)
def test_huge_pages(tmp_path: Path, text: str, status: str, word: str) -> None:
    write(tmp_path, **{"sys/kernel/mm/transparent_hugepage/enabled": text})
    row = host.huge_pages(tmp_path)
    assert row.status == status
    assert word in row.detail


@pytest.mark.parametrize(
    ("setting", "free", "reserved", "row"),
    [
        (
            "[never]",
            0,
            0,
            ("warn", "transparent: never, 0 reserved ones of 2 MiB free; for a daemon"),
        ),
        ("[never]", 9, 2, ("ok", "transparent: never, 7 reserved ones of 2 MiB free")),
        ("[advise]", 0, 0, ("ok", "transparent: advise, 0 reserved ones of 2 MiB free")),
        ("", 0, 0, ("warn", "not known on this system, 0 reserved")),
    ],
)
def test_huge_pages_of_shared_memory(
    tmp_path: Path, setting: str, free: int, reserved: int, row: tuple[str, str]
) -> None:
    meminfo = f"HugePages_Free: {free}\nHugePages_Rsvd: {reserved}\nHugepagesize: 2048 kB\n"
    write(tmp_path, **{"proc/meminfo": meminfo})
    if setting:
        file = "sys/kernel/mm/transparent_hugepage/shmem_enabled"
        write(tmp_path, **{file: f"always within_size {setting} deny\n"})
    check = host.shared_huge_pages(tmp_path)
    assert check.status == row[0]
    assert check.detail.startswith(row[1])


def test_open_files() -> None:
    assert host.open_files_row(None, can_be_raised=False).status == "ok"
    assert host.open_files_row(1024, can_be_raised=False).status == "ok"
    low = host.open_files_row(1023, can_be_raised=True)
    assert (low.status, low.detail[:12]) == ("warn", "at most 1023")
    assert "ulimit -n" in low.detail


def test_processor_extensions(tmp_path: Path) -> None:
    write(
        tmp_path,
        **{"proc/cpuinfo": "model name\t: Some CPU\nflags\t\t: fpu avx512f amx_bf16 sse\n"},
    )
    detail = host.processor(tmp_path).detail
    assert detail.startswith("Some CPU, ")
    assert detail.endswith("avx512f amx_bf16")


def test_locked_memory() -> None:
    assert host.memlock_row(None, can_be_raised=False).status == "ok"
    row = host.memlock_row(8 << 20, can_be_raised=True)
    assert row.status == "warn"
    assert row.detail.startswith("8 MiB; ")


def test_plugin_rows_and_plugins_that_fail(plugin_dir: Path) -> None:
    (plugin_dir / "checks.py").write_text(
        "def good(): return [('attention', 'ok', 'sdpa')]\n"
        "def odd(): return [('x', 'splendid', '')]\n"
        "def bad(): import torch_that_is_not_there\n"
    )
    points = [
        EntryPoint(name, f"checks:{name}", plugins.CHECKS)
        for name in ("good", "odd", "bad", "gone")
    ]
    rows = doctor.plugin_checks(points)
    assert rows[0] == host.Check("attention", "ok", "sdpa")
    assert [row.check for row in rows[1:]] == ["odd", "bad", "gone"]
    assert {row.status for row in rows[1:]} == {"warn"}
    assert rows[2].detail == "unavailable (the module torch_that_is_not_there is not installed)"


def test_a_package_that_hides_one_of_ours_is_a_failure(plugin_dir: Path) -> None:
    assert doctor.shadowing_check().status == "ok"
    (plugin_dir / "radix.py").write_text("")
    row = doctor.shadowing_check()
    assert row.status == "fail"
    assert str(plugin_dir) in row.detail


# ---------------------------------------------------------------------------------- table


def test_numbers_are_aligned_to_the_right() -> None:
    rows: list[list[Cell]] = [["cold", 1234, "12.5 ms", None], ["hit", 7, "0.3 ms", True]]
    assert render(["case", "tokens", "time", "same"], rows).splitlines() == [
        "case  tokens     time  same",
        "----  ------  -------  ----",
        "cold    1234  12.5 ms  -",
        "hit        7   0.3 ms  yes",
    ]


@pytest.mark.parametrize(
    ("cell", "text"),
    [(0.123456, "0.1235"), (12345.678, "12346"), (2.0, "2"), (False, "no"), (None, "-")],
)
def test_how_cells_look(cell: float | bool | None, text: str) -> None:
    assert render(["x"], [[cell]]).splitlines()[2] == text


def test_a_ragged_row_is_refused() -> None:
    with pytest.raises(ValueError, match="1 cells for 2 headers"):
        render(["a", "b"], [["only one"]])


def test_a_table_without_rows_still_has_its_headers() -> None:
    assert render(["a", "bc"], []).splitlines() == ["a  bc", "-  --"]
