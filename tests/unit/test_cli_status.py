"""``kvstore status``, ``top`` and ``explain``: what they ask, what they print, and how they end."""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
import sys
import termios
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

import kvstore
from kvstore.cli import status as shown
from kvstore.cli.main import build
from kvstore.cli.status import duration, line, looks, overview, percent, rates
from kvstore.cli.top import HISTORY, screen
from kvstore.errors import UnavailableError, UsageError
from kvstore.explain import Explanation, Segment
from kvstore.sizes import size
from kvstore.stats import (
    ArenaStats,
    DaemonStatus,
    DiskStats,
    PoolStats,
    TenantStats,
    TierStats,
    status_document,
)

GIB = 1 << 30


def daemon_status(uptime_s=7384.0, epoch="ab" * 8, **counts):
    """A daemon with 1000 blocks of 1 MB; counters by name, labels behind ``__``."""
    pool = PoolStats(
        tiers=(TierStats("dram", 4_000_000_000, 1_000_000_000, 1000),),
        num_blocks=1000,
        held_blocks=7,
        num_leases=3,
        num_reservations=2,
        num_pins=1,
        num_namespaces=5,
        num_nodes=40,
        index_bytes=1 << 20,
        counts={tuple(name.split("__")): value for name, value in counts.items()},
    )
    return DaemonStatus(
        version="0.1.0",
        node="host-7",
        epoch=epoch,
        pid=4711,
        uptime_s=uptime_s,
        state="ready",
        socket="/run/kv.sock",
        num_clients=9,
        counts={"connects": 12, "dropped_clients": 0},
        arena=ArenaStats(4 * GIB, 2.25, GIB),
        pool=pool,
    )


BEFORE = daemon_status(
    100.0,
    lookups=10,
    lookup_tokens__dram=1600,
    lookup_tokens__miss=400,
    stored_blocks=5,
    evicted_blocks__dram__capacity=3,
)
AFTER = daemon_status(
    102.0,
    lookups=30,
    lookup_tokens__dram=1600 + 6400,
    lookup_tokens__miss=400 + 1600,
    stored_blocks=5 + 100,
    evicted_blocks__dram__capacity=3 + 10,
    evicted_blocks__dram__cleared=10,
)


class FakeClient:
    """Answers ``status`` with each of ``answers`` in turn, the last one for ever."""

    block_tokens = 16

    def __init__(self, answers=(), explanations=None):
        self.answers, self.explanations = list(answers), explanations or {}
        self.closed = False
        self.asked = []

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.closed = True

    def status(self):
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if isinstance(answer, BaseException):
            raise answer
        return answer

    def explain_all(self, tokens, digest=None):
        self.asked.append((np.asarray(tokens).tolist(), digest))
        if isinstance(self.explanations, Exception):
            raise self.explanations
        return {n: why for n, why in self.explanations.items() if digest in (None, n)}


@pytest.fixture
def daemon(monkeypatch):
    """Let ``kvstore.connect`` return a client of the test's choice, and note how it was called."""
    calls = []

    def use(client):
        def connect(url=None, **options):
            calls.append((url, options))
            if isinstance(client, Exception):
                raise client
            return client

        monkeypatch.setattr(kvstore, "connect", connect, raising=False)
        return calls

    return use


def run(*arguments, **options):
    return CliRunner().invoke(build(()), arguments, prog_name="kvstore", **options)


# ------------------------------------------------------------------------------ the document


def test_the_document_is_json_and_has_every_field():
    document = status_document(AFTER)
    assert json.loads(json.dumps(document)) == document
    assert document["pool"]["tiers"][0]["used_bytes"] == 1_000_000_000
    assert document["arena"] == {
        "capacity_bytes": 4 * GIB,
        "prefault_s": 2.25,
        "huge_page_bytes": GIB,
    }
    assert document["counts"] == [
        {"name": "connects", "labels": [], "value": 12},
        {"name": "dropped_clients", "labels": [], "value": 0},
    ]
    assert document["pool"]["counts"][:2] == [
        {"name": "evicted_blocks", "labels": ["dram", "capacity"], "value": 13},
        {"name": "evicted_blocks", "labels": ["dram", "cleared"], "value": 10},
    ]
    assert {"name": "lookups", "labels": [], "value": 30} in document["pool"]["counts"]


# ------------------------------------------------------------------------------------ status


class TestStatus:
    def test_as_json(self, daemon):
        calls, client = daemon(FakeClient([AFTER])), None
        result = run("status", "--socket", "/run/kv.sock", "--output", "json")
        assert json.loads(result.stdout) == status_document(AFTER)
        ((url, options),) = calls
        assert url == "unix:///run/kv.sock"
        assert options["access"] == "read"
        assert options["on_failure"] == "raise"
        assert 1 <= options["deadline_s"] <= 10
        assert client is None

    def test_as_tables(self, daemon):
        client = FakeClient([AFTER])
        daemon(client)
        lines = run("status").stdout.splitlines()
        facts = {row[:11].strip(): row[11:].strip() for row in lines[2:13]}
        assert facts["node"] == "host-7, kvstore 0.1.0, process 4711"
        assert facts["state"] == "ready, for 1 min 42 s (epoch abababababababab)"
        assert facts["huge pages"] == "1 GiB"
        assert facts["held by"] == "3 leases, 2 reservations, 1 pins"
        assert facts["hits"] == "80.0 % of 10000 tokens"
        assert ["dram", "3.725", "GiB", "953.7", "MiB", "25.0", "%", "1000"] in map(
            str.split, lines
        )
        assert ["evicted_blocks", "dram", "cleared", "10"] in map(str.split, lines)
        assert ["connects", "12"] in map(str.split, lines)
        assert not [row for row in lines if "dropped_clients" in row]
        assert client.closed

    def test_which_daemon(self, daemon, monkeypatch, tmp_path):
        calls = daemon(FakeClient([AFTER]))
        monkeypatch.chdir(tmp_path)
        assert run("status", "--url", "tcp://127.0.0.1:7").exit_code == 0
        assert run("status", "--socket", "kv.sock").exit_code == 0
        assert run("status").exit_code == 0
        assert [url for url, _ in calls] == [
            "tcp://127.0.0.1:7",
            f"unix://{tmp_path}/kv.sock",
            None,
        ]
        both = run("status", "--url", "unix:///a", "--socket", "/b")
        assert both.exit_code == 2
        assert len(calls) == 3

    @pytest.mark.parametrize("where", ["connect", "status"])
    def test_a_daemon_that_does_not_answer_is_exit_code_3(self, daemon, where):
        failure = UnavailableError("unreachable", "no daemon at unix:///kv.sock; start it")
        daemon(failure if where == "connect" else FakeClient([failure]))
        for command in ("status", "top"):
            result = run(command)
            assert result.exit_code == 3
            assert result.stdout == ""
            assert result.stderr == (
                "Error: no daemon at unix:///kv.sock; start it; or name another one with --socket "
                "or --url\n"
            )

    def test_a_wrong_address_is_exit_code_3(self):
        result = run("status", "--url", "http://127.0.0.1:80")
        assert result.exit_code == 3
        assert "http://127.0.0.1:80" in result.stderr

    def test_an_interval_of_0_is_refused(self, daemon):
        daemon(FakeClient([AFTER]))
        assert run("status", "--watch", "--interval", "0").exit_code == 2


# ------------------------------------------------------------------------ again and again


def stop_after(num_waits):
    """A ``wait`` that ends the looks after so many, without waiting."""
    waits = []

    def wait(seconds):
        waits.append(seconds)
        return len(waits) > num_waits

    return wait, waits


def test_rates_are_by_the_daemons_clock():
    rate = rates(BEFORE, AFTER, 16)
    assert rate.lookups == 10
    assert (rate.hit_tokens, rate.missed_tokens) == (3200, 800)
    assert rate.lent_bytes == 200 * 1e6
    assert (rate.stored_blocks, rate.stored_bytes) == (50, 50e6)
    assert rate.evicted_blocks == 10
    assert line(BEFORE, AFTER, 16).split() == [
        *("10", "3200", "80.0", "0.20", "50", "0.05", "10", "3", "9", "25.0", "-")
    ]


def with_disk(status):
    """``status``, with a full ``gpu`` and blocks of 3 MB on disk."""
    gpu = TierStats("gpu", 1_000_000_000, 1_000_000_000, 1000)
    disk = TierStats("disk", 12_000_000_000, 9_000_000_000, 3000)
    how = DiskStats("", "", 0.001, 3 * 2**30, 0)
    pool = replace(status.pool, tiers=(gpu, *status.pool.tiers, disk), disk=how)
    return replace(status, pool=pool)


def test_memory_and_disk_are_full_each_for_itself():
    cells = line(with_disk(BEFORE), with_disk(AFTER), 16).split()
    assert cells[-2:] == ["100.0", "75.0"], "of memory, the fullest tier"
    assert rates(with_disk(BEFORE), with_disk(AFTER), 16).lent_bytes == 200 * 1e6, "from memory"
    rows = [row.split() for row in overview(with_disk(AFTER)).splitlines()]
    assert [row for row in rows if row and row[0] in ("gpu", "dram", "disk")][-3:] == [
        ["gpu", "953.7", "MiB", "953.7", "MiB", "100.0", "%", "1000"],
        ["dram", "3.725", "GiB", "953.7", "MiB", "25.0", "%", "1000"],
        ["disk", "11.18", "GiB", "8.382", "GiB", "75.0", "%", "3000"],
    ]


def test_an_empty_daemon_has_no_rates_and_no_errors():
    idle = daemon_status(1.0)
    empty = replace(idle, pool=replace(idle.pool, tiers=(TierStats("dram", 4096, 0, 0),)))
    expected = ["0", "0", "-", "0.00", "0", "0.00", "0", "3", "9", "0.0", "-"]
    assert line(empty, empty, 16).split() == expected
    assert "\nhits         -\n" in overview(empty)


def test_looks_survive_a_daemon_that_goes_away_and_comes_back():
    restarted = replace(AFTER, epoch="cd" * 8, uptime_s=1.0)
    lost = UnavailableError("lost", "it went")
    client = FakeClient([BEFORE, AFTER, lost, lost, restarted, restarted])
    wait, waits = stop_after(5)
    assert list(looks(client, 0.5, wait)) == [
        (None, BEFORE),
        (BEFORE, AFTER),
        (None, "it went"),
        (None, "it went"),
        (None, restarted),  # no rates across a restart
        (restarted, restarted),
    ]
    assert waits == [0.5] * 6
    blip = looks(FakeClient([BEFORE, lost, AFTER]), 0.5, stop_after(2)[0])
    assert [last for last, _ in blip] == [None, None, BEFORE]


def test_lines_have_a_header_now_and_then(capsys, monkeypatch):
    monkeypatch.setattr(shown, "HEADER_EVERY", 2)
    client = FakeClient([BEFORE, AFTER, UnavailableError("timeout", "busy"), AFTER, AFTER])
    shown.print_lines(client, 1, "table", stop_after(4)[0])
    out, err = capsys.readouterr()
    rows = out.splitlines()
    assert [row.split()[0] for row in rows] == ["lookups/s", "10", "0", "lookups/s", "0"]
    assert {len(row) for row in rows} == {len(rows[0])}
    assert len(rows[0]) <= 100
    assert err == "busy\n"


def test_watching_as_json_is_one_object_a_line(capsys):
    shown.print_lines(FakeClient([BEFORE, AFTER]), 1, "json", stop_after(1)[0])
    documents = [json.loads(row) for row in capsys.readouterr().out.splitlines()]
    assert documents == [status_document(BEFORE), status_document(AFTER)]


@pytest.mark.parametrize("command", [["status", "--watch"], ["top"]])
def test_ctrl_c_ends_watching(daemon, command):
    client = FakeClient([BEFORE, AFTER, KeyboardInterrupt()])
    daemon(client)
    result = run(*command, "--interval", "0.05")
    assert result.exit_code == 0
    assert len(result.stdout.splitlines()) == 2
    assert client.closed


# --------------------------------------------------------------------------------------- top


def test_the_screen_fits_the_terminal():
    text = screen(AFTER, ["older", "newer"], 30, 16)
    rows = text.removeprefix("\x1b[H").removesuffix("\x1b[J").split("\x1b[K\r\n")
    assert len(rows) == 16
    assert rows[1:3] == ["newer", "older"]
    assert rows[HISTORY + 2].startswith("daemon")
    assert rows[-1] == "q quits\x1b[K"
    assert max(map(len, rows[:-1])) <= 30
    assert "it went" in screen("it went", [], 80, 24)


TOP = """
import sys, kvstore
sys.path.insert(0, {here!r})
import test_cli_status as test
from kvstore.cli.main import main
client = test.FakeClient([test.BEFORE, test.BEFORE, test.AFTER])
kvstore.connect = lambda url=None, **options: client
sys.argv = ["kvstore", "top", "--interval", "{interval}"]
main()
"""


class Terminal:
    """A process with a pseudo-terminal."""

    def __init__(self, interval):
        self.master, self.slave = pty.openpty()
        self.before = termios.tcgetattr(self.slave)
        script = TOP.format(here=str(Path(__file__).parent), interval=interval)
        self.process = subprocess.Popen(
            [sys.executable, "-c", script],
            stdin=self.slave,
            stdout=self.slave,
            stderr=subprocess.PIPE,
            cwd=Path(kvstore.__file__).parents[1],
        )

    def read_until(self, text):
        seen = b""
        while text not in seen:
            seen += os.read(self.master, 65536)
        return seen

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.process.kill()
        self.process.wait()
        self.process.stderr.close()
        os.close(self.master)
        os.close(self.slave)


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    ("end", "code"),
    [
        (lambda terminal: os.write(terminal.master, b"q"), 0),
        (lambda terminal: terminal.process.send_signal(signal.SIGINT), 0),
        (lambda terminal: terminal.process.terminate(), 128 + signal.SIGTERM),
    ],
    ids=["q", "interrupt", "terminate"],
)
def test_top_takes_the_terminal_and_gives_it_back_at_once(end, code):
    with Terminal(interval=3600) as terminal:
        seen = terminal.read_until(b"q quits")
        assert seen.startswith(b"\x1b[?1049h\x1b[?25l\x1b[H")
        assert b"lookups/s" in seen
        assert b"host-7" in seen
        assert not termios.tcgetattr(terminal.slave)[3] & termios.ECHO
        end(terminal)
        terminal.read_until(b"\x1b[?25h\x1b[?1049l")
        assert terminal.process.wait(20) == code
        assert termios.tcgetattr(terminal.slave) == terminal.before


@pytest.mark.timeout(60)
def test_top_looks_again_at_any_other_key():
    with Terminal(interval=3600) as terminal:
        assert b"3200" not in terminal.read_until(b"q quits")
        os.write(terminal.master, b"x")
        terminal.read_until(b"3200")
        os.write(terminal.master, b"Q")
        terminal.read_until(b"\x1b[?1049l")
        assert terminal.process.wait(20) == 0


# ----------------------------------------------------------------------------------- explain

LONG, OTHER = "aa" * 32, "ab" * 32
FOUND = {
    OTHER: Explanation(40, 0, (Segment(0, 40, None, "not_stored", "Never seen."),)),
    LONG: Explanation(
        40,
        32,
        (
            Segment(0, 32, "dram", "hit", "There."),
            Segment(32, 40, None, "incomplete_block", "Only whole blocks are stored."),
        ),
    ),
}


class TestExplain:
    @pytest.mark.parametrize(
        ("name", "content"),
        [
            ("t.json", b" [1, 2,\n-3]"),
            ("t.json", b'{"count": 3, "tokens": [1, 2, -3], "token_strs": null}'),
            ("t.txt", b"1 2\n-3\n"),
            ("t.csv", b"1,2, -3"),
            ("t.bin", np.array([1, 2, -3], "<i4").tobytes()),
            ("t.i32", np.array([1, 2, -3], "<i4").tobytes()),
        ],
    )
    def test_forms_of_tokens(self, daemon, tmp_path, name, content):
        client = FakeClient(explanations=FOUND)
        daemon(client)
        (tmp_path / name).write_bytes(content)
        assert run("explain", "--tokens-file", str(tmp_path / name)).exit_code == 0
        assert client.asked == [([1, 2, -3], None)]

    def test_from_standard_input_as_a_table(self, daemon):
        daemon(FakeClient(explanations=FOUND))
        result = run("explain", "--tokens-file", "-", input="1 2 3")
        rows = [row.split(None, 5) for row in result.stdout.splitlines()[2:]]
        assert rows == [
            ["aaaaaaaa", "0-31", "32", "dram", "hit", "There."],
            ["aaaaaaaa", "32-39", "8", "-", "incomplete_block", "Only whole blocks are stored."],
            ["abababab", "0-39", "40", "-", "not_stored", "Never seen."],
        ]

    def test_as_json(self, daemon):
        daemon(FakeClient(explanations=FOUND))
        result = run("explain", "--tokens-file", "-", "--output", "json", input="1 2 3")
        document = json.loads(result.stdout)
        assert document["prompt_tokens"] == 3
        assert [row["namespace"] for row in document["namespaces"]] == [LONG, OTHER]
        assert document["namespaces"][0]["hit_tokens"] == 32
        assert document["namespaces"][1]["segments"] == [
            {"start": 0, "stop": 40, "tier": None, "cause": "not_stored", "detail": "Never seen."}
        ]

    def test_one_namespace(self, daemon):
        client = FakeClient(explanations=FOUND)
        daemon(client)
        whole = run("explain", "--tokens-file", "-", "--namespace", OTHER.upper(), input="1")
        assert client.asked.pop() == ([1], OTHER)
        assert "abababab" in whole.stdout
        begin = run("explain", "--tokens-file", "-", "--namespace", "aaa", input="1")
        assert client.asked.pop() == ([1], None)
        assert "aaaaaaaa" in begin.stdout
        assert "abababab" not in begin.stdout
        for unknown in ("ac", "ac" * 32):
            none = run("explain", "--tokens-file", "-", "--namespace", unknown, input="1")
            assert none.exit_code == 1
            assert f"no namespace {unknown} has blocks" in none.stderr
        for wrong in ("xyz", "a" * 65):
            assert (
                run("explain", "--tokens-file", "-", "--namespace", wrong, input="1").exit_code == 2
            )

    def test_an_empty_store(self, daemon):
        daemon(FakeClient())
        result = run("explain", "--tokens-file", "-", input="1")
        assert (result.exit_code, "Nothing is stored" in result.stdout) == (0, True)
        result = run("explain", "--tokens-file", "-", "--output", "json", input="1")
        assert json.loads(result.stdout) == {"prompt_tokens": 1, "namespaces": []}

    @pytest.mark.parametrize(
        "content",
        [
            b"1 2 secret",
            b"[1, 2.5]",
            b"[1, true]",
            b'{"secret": 1}',
            b'{"tokens": "secret"}',
            b'{"tokens": {"secret": 1}}',
            b"[1",
            b"[[1]]",
            b"\xff\xfe",
            b"[" * 10**5,
        ],
    )
    def test_what_is_no_list_of_tokens_is_not_quoted(self, daemon, content):
        client = FakeClient(explanations=FOUND)
        daemon(client)
        result = run("explain", "--tokens-file", "-", input=content)
        assert result.exit_code == 2
        assert "not a list of token ids" in result.stderr
        assert "secret" not in result.output
        assert not client.asked

    def test_other_wrong_files(self, daemon, tmp_path):
        daemon(FakeClient(explanations=UsageError("token 3 is beyond int32")))
        cut = tmp_path / "cut.bin"
        cut.write_bytes(b"12345")
        for file, says in (
            (cut, "5 bytes"),
            (tmp_path / "none", "No such file"),
            ("-", "beyond int32"),
        ):
            result = run("explain", "--tokens-file", str(file), input="99999999999")
            assert result.exit_code == 2
            assert says in result.stderr

    def test_without_a_daemon(self, daemon):
        daemon(FakeClient(explanations=UnavailableError("timeout", "no answer")))
        result = run("explain", "--tokens-file", "-", input="1")
        assert result.exit_code == 3
        assert result.stderr == "Error: no answer; it is busy or stopped; see its log\n"


# ------------------------------------------------------------------------------------- words


def test_numbers_for_people():
    assert [size(n) for n in (0, 1023, 1536, 5 << 30, 3 << 40)] == [
        *("0 B", "1023 B", "1.5 KiB", "5 GiB", "3 TiB")
    ]
    assert [duration(s) for s in (0.25, 62, 3600 + 120, 90000)] == [
        *("0.2 s", "1 min 2 s", "1 h 2 min", "1 d 1 h")
    ]
    assert (percent(1, 3), percent(0, 0)) == ("33.3", "-")


def test_a_status_says_how_the_disk_does():
    disk = DiskStats("io_error", "", 0.001, 3 * 2**30, 8192)
    now = daemon_status()
    told = overview(replace(now, pool=replace(now.pool, disk=disk)))
    said = "reading is off: io_error; 8 KiB set aside as bad; loads are expected to give 3 GiB/s"
    assert said in told
    assert "disk" not in overview(now)


def test_a_status_shows_tenants_where_there_are_quotas():
    now = daemon_status()
    assert "tenant" not in overview(now)
    tenants = (TenantStats("acme", GIB, 4 * GIB, GIB >> 1), TenantStats("", 3 * GIB, None, 0))
    now = replace(now, pool=replace(now.pool, tenants=tenants))
    rows = [row.split() for row in overview(now).splitlines()]
    at = rows.index(["tenant", "used", "floor", "ceiling"])
    assert rows[at + 2 : at + 4] == [
        ["acme", "1", "GiB", "512", "MiB", "4", "GiB"],
        ["(all", "others)", "3", "GiB", "0", "B", "-"],
    ]
    document = status_document(now)
    assert json.loads(json.dumps(document)) == document
    assert [tenant["tenant"] for tenant in document["pool"]["tenants"]] == ["acme", ""]
