"""``kvstore status``, ``top`` and ``explain`` against a real daemon."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from click.testing import CliRunner

import kvstore
from kvstore import KVLayout, Namespace
from kvstore.cli import status as shown
from kvstore.cli.main import build
from kvstore.stats import DiskStats, TenantStats, status_document
from kvstore.testing.contracts import PAGE
from kvstore.testing.daemon import DaemonThread

TOKEN = "a token of its own".replace(" ", "-")
LAYOUT = KVLayout(num_layers=1, num_kv_heads=1, head_dim=PAGE // 128, dtype="float32")
NAMESPACE = Namespace(b"weights", LAYOUT)


def run(*arguments, **options):
    return CliRunner(env={"KVSTORE_TOKEN": TOKEN}).invoke(build(()), arguments, **options)


@pytest.fixture
def daemon(tmp_path):
    with DaemonThread(tmp_path / "kv.sock", 8 * PAGE, tcp_token=TOKEN) as daemon:
        pool = daemon.pool
        pool.commit(pool.reserve(NAMESPACE, range(64)))
        pool.release(pool.acquire(NAMESPACE, range(65)))
        yield daemon


@pytest.fixture(params=["socket", "tcp"])
def where(request, daemon):
    return (
        ["--socket", str(daemon.path)] if request.param == "socket" else ["--url", daemon.tcp_url]
    )


def test_status(daemon, where):
    document = json.loads(run("status", *where, "--output", "json").stdout)
    assert document["node"] == "test"
    assert document["pool"]["num_blocks"] == 4
    assert document["pool"]["tiers"] == [
        {"name": "dram", "capacity_bytes": 8 * PAGE, "used_bytes": 4 * PAGE, "num_blocks": 4}
    ]
    assert {"name": "lookup_tokens", "labels": ["dram"], "value": 64} in document["pool"]["counts"]
    rows = [row.split() for row in run("status", *where).stdout.splitlines()]
    assert ["lookup_tokens", "dram", "64"] in rows
    assert ["hits", "98.5", "%", "of", "65", "tokens"] in rows


def test_a_status_travels_unchanged(daemon, monkeypatch):
    tenants = (TenantStats("acme", 8192, None, 4096), TenantStats("", 0, None, 0))
    disk = DiskStats("io_error", "", 0.001, 1e9, 8192)
    stats = replace(daemon.pool.stats(), tenants=tenants, disk=disk)
    monkeypatch.setattr(daemon.pool, "stats", lambda: stats)
    with kvstore.connect(daemon.url, access="read", on_failure="raise", deadline_s=10) as client:
        before = status_document(client.status())
    assert set(before) == set(status_document(daemon.server.status()))
    assert before["pool"] == status_document(daemon.server.status())["pool"]


def test_rates_between_two_looks(daemon, capsys):
    def store_more(_):
        if daemon.pool.stats().num_blocks == 6:
            return True
        daemon.pool.commit(daemon.pool.reserve(NAMESPACE, range(96)))
        return False

    with kvstore.connect(daemon.url, access="read", on_failure="raise", deadline_s=10) as client:
        shown.print_lines(client, 1, "table", store_more)
    header, row = capsys.readouterr().out.splitlines()
    cells = dict(zip(shown.COLUMNS, row.split(), strict=True))
    assert header.split()[0] == "lookups/s"
    assert int(cells["stored/s"]) > 0
    assert (cells["hit tok/s"], cells["hit %"], cells["clients"]) == ("0", "-", "1")
    assert (cells["mem %"], cells["disk %"]) == ("75.0", "-")


def test_explain(daemon, where):
    prompt = json.dumps([*range(64), *range(200, 240)])
    result = run("explain", "--tokens-file", "-", *where, "--output", "json", input=prompt)
    document = json.loads(result.stdout)
    assert document["prompt_tokens"] == 104
    (found,) = document["namespaces"]
    assert found["namespace"] == NAMESPACE.digest.hex()
    assert found["hit_tokens"] == 64
    first, second = found["segments"][:2]
    assert (first["start"], first["stop"], first["tier"], first["cause"]) == (0, 64, "dram", "hit")
    assert (second["start"], second["tier"], second["cause"]) == (64, None, "not_stored")
    for digest in (NAMESPACE.digest.hex(), NAMESPACE.digest.hex()[:5]):
        table = run("explain", "--tokens-file", "-", "--namespace", digest, *where, input=prompt)
        assert table.stdout.splitlines()[2].split()[:5] == [
            *(NAMESPACE.digest.hex()[:8], "0-63", "64", "dram", "hit")
        ]
    unknown = run("explain", "--tokens-file", "-", "--namespace", "0" * 64, *where, input=prompt)
    assert unknown.exit_code in (1, 2)
    assert "0" * 64 in unknown.stderr


def test_a_wrong_token_and_no_daemon_are_exit_code_3(daemon, tmp_path):
    stranger = CliRunner(env={"KVSTORE_TOKEN": TOKEN[::-1]})
    refused = stranger.invoke(build(()), ["status", "--url", daemon.tcp_url])
    missing = run("status", "--socket", str(tmp_path / "none.sock"))
    for result in (refused, missing):
        assert result.exit_code == 3
        assert result.stdout == ""
        assert result.stderr.startswith("Error: ")
        assert TOKEN[::-1] not in result.stderr
    assert f"no daemon at unix://{tmp_path}/none.sock" in missing.stderr
    assert "refuses" in refused.stderr
