"""``kvstore pin``, ``unpin`` and ``evict`` against a real admin interface."""

import json

import pytest
from click.testing import CliRunner
from prometheus_client import CollectorRegistry

from kvstore.admin.app import Source, create_app
from kvstore.admin.server import AdminServer
from kvstore.cli import prefixes
from kvstore.cli.main import build
from kvstore.namespace import KVLayout, Namespace
from kvstore.testing import small_pool

TOKEN = "a-token-of-its-own"
NAMESPACE = Namespace(b"w", KVLayout(1, 1, 8, "float32", block_tokens=4))
DIGEST = NAMESPACE.digest.hex()


@pytest.fixture
def pool():
    with small_pool(16) as made:
        made.commit(made.reserve(NAMESPACE, range(8)))
        yield made


@pytest.fixture
def port(pool):
    source = Source(pool, dict, dict, CollectorRegistry(), TOKEN, lambda: (True, "ready"))
    server = AdminServer(create_app(source), "127.0.0.1", 0)
    yield server.address[1]
    server.close()


@pytest.fixture
def run(port, monkeypatch):
    monkeypatch.setenv("KVSTORE_ADMIN_PORT", str(port))
    monkeypatch.setenv("KVSTORE_TOKEN", TOKEN)

    def run(*arguments, tokens=range(8)):
        return CliRunner().invoke(build(()), arguments, input=json.dumps(list(tokens)))

    return run


def test_pin_and_unpin(run, pool):
    done = run("pin", "mine", "--namespace", DIGEST, "--tokens", "-")
    assert (done.exit_code, done.stdout) == (0, "8 tokens are pinned as mine.\n")
    assert [(pin.name, pin.num_blocks) for pin in pool.pins()] == [("mine", 2)]
    assert run("unpin", "mine").exit_code == 0
    assert pool.pins() == []
    again = run("unpin", "mine")
    assert again.exit_code == 1
    assert "no pin has this name" in again.stderr


def test_evict(run, pool):
    done = run("evict", "--namespace", DIGEST, "--tokens", "-", tokens=range(4))
    assert done.exit_code == 0
    assert done.stdout.startswith("1 blocks")
    assert pool.stats().num_blocks == 0


def test_a_namespace_may_be_named_by_its_beginning(run, pool):
    for beginning in (DIGEST[:8], DIGEST[:8].upper()):
        done = run("pin", "mine", "--namespace", beginning, "--tokens", "-")
        assert (done.exit_code, done.stdout) == (0, "8 tokens are pinned as mine.\n"), done.stderr
    assert run("evict", "--namespace", DIGEST[:8], "--tokens", "-").exit_code == 0
    assert pool.stats().num_blocks == 0


def test_a_beginning_of_none_or_many_namespaces_is_refused(run, pool):
    others = (Namespace(b"%d" % number, NAMESPACE.layout) for number in range(1000))
    alike = next(other for other in others if other.digest.hex()[0] == DIGEST[0])
    wrong = alike.digest.hex()[:8]
    unknown = run("evict", "--namespace", wrong, "--tokens", "-")
    assert unknown.exit_code == 1
    assert f"no namespace {wrong} has blocks; those that do: {DIGEST[:8]}" in unknown.stderr
    pool.commit(pool.reserve(alike, range(8)))
    many = run("evict", "--namespace", DIGEST[0], "--tokens", "-")
    assert many.exit_code == 1
    assert "2 namespaces begin with" in many.stderr
    assert DIGEST in many.stderr
    for unusable in ("mine", ""):
        assert run("evict", "--namespace", unusable, "--tokens", "-").exit_code == 2
    assert pool.stats().num_blocks == 4


def test_a_beginning_is_looked_for_on_all_pages(run, monkeypatch):
    asked, digests = [], [f"{number:064x}" for number in range(3)]

    def ask(_, method, path, body=None):
        asked.append(path)
        if body is not None:
            return {"num_blocks": 0, "name": body["namespace"]}
        page = int(path.rpartition("after=")[2] or "0", 16)
        return {"items": [{"digest": digests[page]}], "next": f"{page + 1:x}" if page < 2 else None}

    monkeypatch.setattr(prefixes, "ask", ask)
    assert run("evict", "--namespace", digests[2][:63], "--tokens", "-").exit_code == 1
    assert "3 namespaces begin" in run("evict", "--namespace", "00", "--tokens", "-").stderr
    assert asked == [f"/v1/namespaces?limit=1000&after={after}" for after in ("", "1", "2")] * 2


def test_an_address_may_be_given(run, pool, port, monkeypatch):
    monkeypatch.delenv("KVSTORE_ADMIN_PORT")
    assert "give --admin" in run("unpin", "mine").stderr
    assert run("unpin", "mine").exit_code == 3
    address = f"http://127.0.0.1:{port}"
    pin = run("pin", "a", "--namespace", DIGEST, "--tokens", "-", "--admin", address)
    assert pin.exit_code == 0
    for wrong in (
        "127.0.0.1:80",
        "https://127.0.0.1:80",
        "http://:80",
        "http://a:b",
        address + "/v1",
    ):
        assert run("unpin", "a", "--admin", wrong).exit_code == 2
    assert len(pool.pins()) == 1


def test_what_is_refused_is_said(run, pool, monkeypatch):
    unknown = run("pin", "a", "--namespace", "0" * 64, "--tokens", "-")
    assert unknown.exit_code == 1
    assert "no blocks are stored in this namespace" in unknown.stderr
    assert run("pin", "a/b", "--namespace", DIGEST, "--tokens", "-").exit_code == 1
    monkeypatch.setenv("KVSTORE_TOKEN", "another-token-than-that")
    stranger = run("evict", "--namespace", DIGEST, "--tokens", "-")
    assert stranger.exit_code == 1
    assert "token" in stranger.stderr
    assert pool.stats().num_blocks == 2


def test_nobody_there(run):
    gone = run("unpin", "a", "--admin", "http://127.0.0.1:1")
    assert gone.exit_code == 3
    assert "does not answer" in gone.stderr
