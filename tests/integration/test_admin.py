"""The admin interface over real sockets: every route, every kind of error, who is let in, and limits."""

from __future__ import annotations

import base64
import http.client
import json
import os
import random
import re
import socket
import subprocess
import sys
import threading
from contextlib import contextmanager
from pathlib import Path
from queue import Queue

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry

from kvstore.admin import guard, openapi, prefixes, server
from kvstore.admin.app import Source, create_app
from kvstore.admin.problems import ProblemError
from kvstore.admin.server import AdminServer
from kvstore.errors import ConfigError
from kvstore.metrics import register
from kvstore.namespace import KVLayout, Namespace
from kvstore.quotas import Quota
from kvstore.stats import ArenaStats, DaemonStatus
from kvstore.testing import small_pool
from radix import token_bytes

ROOT = Path(__file__).parents[2]
TOKEN = "a-secret-that-nobody-may-see"
NAMESPACE = Namespace(b"w", KVLayout(1, 1, 8, "float32", block_tokens=4))
HASHES = Namespace(b"w", NAMESPACE.layout, keys="hash")
DIGEST = NAMESPACE.digest.hex()
LOCKED = ["/metrics", "/v1/status", "/v1/config", "/v1/tiers", "/v1/namespaces", "/v1/leases"]
LOCKED += ["/v1/tenants", "/v1/pins", "/openapi.json"]
OPEN = ["/healthz", "/readyz"]
HALF_A_BODY = (
    b"POST /v1/prefixes:match HTTP/1.1\r\nHost: localhost\r\n"
    b"Content-Type: application/json\r\nContent-Length: 1000\r\n\r\n{"
)


def put(pool, tokens, namespace=NAMESPACE):
    with pool.reserve(namespace, tokens):
        pass  # the bytes do not matter here


def make_source(pool, token=None):
    registry = CollectorRegistry()
    register(pool, registry)

    def status():
        return DaemonStatus(
            version="0",
            node="here",
            epoch="00ff",
            pid=1,
            uptime_s=1.5,
            state="ready",
            socket="/run/kvstore.sock",
            num_clients=0,
            counts={"requests": 3},
            arena=ArenaStats(capacity_bytes=4096, prefault_s=0.0, huge_page_bytes=0),
            pool=pool.stats(),
        )

    settings = {
        "dram": {"value": 4096, "origin": "default"},
        "token": {"value": "set" if token else None, "origin": "environment KVSTORE_TOKEN"},
    }
    return Source(pool, status, lambda: settings, registry, token, lambda: (True, "ready"))


@contextmanager
def serve(source):
    running = AdminServer(create_app(source), "127.0.0.1", 0)
    try:
        yield running
    finally:
        running.close()


@pytest.fixture
def pool():
    with small_pool(64) as made:
        yield made


@pytest.fixture(scope="module")
def shared():
    """A server without a token and one with it, and what they show: to start them takes longer than a test."""
    with small_pool(1) as nothing:
        sources = [make_source(nothing), make_source(nothing, TOKEN)]
        with serve(sources[0]) as unlocked, serve(sources[1]) as locked:
            yield {
                source.token: (source, server)
                for source, server in zip(sources, (unlocked, locked), strict=True)
            }


@pytest.fixture
def source(pool, shared):
    return showing(shared[None][0], pool)


@pytest.fixture
def admin(source, shared):
    return shared[None][1]


def showing(source, pool):
    """Let ``source`` show ``pool``; return it."""
    vars(source).update(vars(make_source(pool, source.token)))
    return source


@contextmanager
def connected(admin):
    connection = http.client.HTTPConnection(*admin.address, timeout=20)
    try:
        yield connection
    finally:
        connection.close()


def ask(admin, method, path, body=None, headers=()):
    """Return status, headers and (if it is JSON) the document of an answer."""
    headers = dict(headers)
    if body is not None and not isinstance(body, bytes):
        body = json.dumps(body)
    if body is not None:
        headers.setdefault("Content-Type", "application/json")
    with connected(admin) as connection:
        connection.request(method, path, body, headers)
        answer = connection.getresponse()
        text = answer.read().decode()
    is_json = "json" in answer.headers.get("Content-Type", "")
    return answer.status, answer.headers, json.loads(text) if is_json and text else text


def get(admin, path):
    status, _, document = ask(admin, "GET", path)
    assert status == 200, document
    return document


def post(admin, path, body):
    status, _, document = ask(admin, "POST", path, body)
    assert status == 200, document
    return document


def problem(answer, status, kind=None):
    """Check that ``answer`` is this problem; return it."""
    code, headers, document = answer
    assert code == status, document
    assert headers["Content-Type"] == "application/problem+json"
    assert document["type"] == (f"urn:kvstore:problem:{kind}" if kind else "about:blank")
    assert document["status"] == status
    assert document["title"]
    assert document["detail"]
    return document


def prefix(tokens, form="tokens", digest=DIGEST):
    if form == "tokens":
        return {"namespace": digest, "tokens": list(tokens)}
    encoded = base64.b64encode(token_bytes(tokens)).decode()
    return {"namespace": digest, "token_bytes": encoded}


class TestRoutes:
    def test_life(self, admin, source):
        assert get(admin, "/healthz") == {"state": "alive"}
        assert get(admin, "/readyz") == {"state": "ready"}
        source.ready = lambda: (False, "draining")
        assert "draining" in problem(ask(admin, "GET", "/readyz"), 503, "not-ready")["detail"]
        assert get(admin, "/healthz") == {"state": "alive"}

    def test_nothing_needs_the_pool_before_it_is_there(self, admin, source):
        source.pool = None
        for path in ("/v1/status", "/v1/tiers", "/v1/leases", "/v1/namespaces", "/v1/pins"):
            problem(ask(admin, "GET", path), 503, "not-ready")
        for path in ("/healthz", "/metrics", "/v1/config"):
            get(admin, path)

    def test_metrics_are_those_of_the_registry(self, admin, pool):
        put(pool, range(8))
        text = get(admin, "/metrics")
        assert "kvstore_stored_blocks_total 2.0\n" in text
        assert text.count("# TYPE kvstore_blocks gauge") == 1

    def test_status(self, admin, pool):
        put(pool, range(8))
        status = get(admin, "/v1/status")
        assert status["node"] == "here"
        assert status["counts"] == [{"name": "requests", "labels": [], "value": 3}]
        assert {"name": "stored_blocks", "labels": [], "value": 2} in status["pool"]["counts"]
        assert status["pool"]["num_blocks"] == 2
        assert status["pool"]["tiers"][0] == get(admin, "/v1/tiers")["items"][0]

    def test_config_says_where_settings_come_from(self, admin):
        assert get(admin, "/v1/config")["dram"] == {"value": 4096, "origin": "default"}

    def test_tiers_are_in_their_order(self):
        with small_pool(4, 8) as pool, serve(make_source(pool)) as admin:
            tiers = get(admin, "/v1/tiers")["items"]
        assert [(tier["name"], tier["capacity_bytes"]) for tier in tiers] == [
            ("gpu", 4 << 12),
            ("dram", 8 << 12),
        ]

    def test_namespaces(self, admin, pool):
        assert get(admin, "/v1/namespaces") == {"items": [], "next": None}
        put(pool, range(8))
        (item,) = get(admin, "/v1/namespaces")["items"]
        assert item == {
            "digest": DIGEST,
            "block_tokens": 4,
            "block_bytes": NAMESPACE.layout.block_bytes,
            "keys": "tokens",
            "num_blocks": 2,
            "tenant": None,
            "codec": None,
        }

    def test_namespaces_tell_tenant_and_codec(self, admin, pool):
        put(pool, range(8), Namespace(b"w", NAMESPACE.layout, tenant="acme", codec="lz4"))
        (item,) = get(admin, "/v1/namespaces")["items"]
        assert (item["tenant"], item["codec"]) == ("acme", "lz4")

    def test_tenants(self, source, admin):
        quotas = {"acme": Quota(8 << 12, 2 << 12), "zed": Quota(floor_bytes=4096)}
        with small_pool(16, quotas=quotas) as pool:
            showing(source, pool)
            acme = Namespace(b"weights", NAMESPACE.layout, tenant="acme")
            pool.commit(pool.reserve(acme, range(8)))
            put(pool, range(4))
            keys = "tenant", "used_bytes", "ceiling_bytes", "floor_bytes"
            page = get(admin, "/v1/tenants")
            assert [tuple(item[key] for key in keys) for item in page["items"]] == [
                ("acme", 8192, 8 << 12, 2 << 12),
                ("zed", 0, None, 4096),
                ("", 4096, None, 0),
            ]
            assert page["next"] is None
            assert get(admin, "/v1/status")["pool"]["tenants"] == page["items"]

    def test_retain(self, admin, pool):
        put(pool, range(8))
        body = (
            json.loads(prefix(range(9))) if isinstance(prefix(range(9)), str) else prefix(range(9))
        )
        answer = post(admin, "/v1/prefixes:retain", body | {"priority": 90, "ttl_s": 60})
        assert answer == {"tokens": 8}
        assert next(pool._residency.trees[NAMESPACE.digest].walk()).level == 90
        assert post(admin, "/v1/prefixes:retain", body | {"ttl_s": None}) == {"tokens": 8}
        assert post(admin, "/v1/prefixes:retain", body) == {"tokens": 8}
        for wrong in ({"priority": 101}, {"priority": 1.5}, {"ttl_s": 0}, {"ttl": 60}):
            answer = ask(admin, "POST", "/v1/prefixes:retain", body | wrong)
            problem(answer, 422, "invalid-request")
        problem(
            ask(admin, "POST", "/v1/prefixes:match", body | {"priority": 90}),
            422,
            "invalid-request",
        )

    def test_leases_and_reservations(self, admin, pool):
        put(pool, range(8))
        lease = pool.acquire(NAMESPACE, [*range(8), 0])
        reservation = pool.reserve(NAMESPACE, range(100, 112))
        first, second = get(admin, "/v1/leases")["items"]
        assert (first["kind"], first["num_blocks"], first["expires_in_s"]) == ("lease", 2, 60.0)
        assert (second["kind"], second["num_blocks"], second["expires_in_s"]) == (
            "reservation",
            3,
            None,
        )
        assert first["namespace"] == DIGEST
        pool.release(lease)
        pool.abort(reservation)
        assert get(admin, "/v1/leases")["items"] == []


class TestPages:
    def test_leases_page_by_page(self, admin, pool):
        put(pool, range(8))
        held = [pool.acquire(NAMESPACE, [*range(8), 0]) for _ in range(7)]
        seen, after = [], "0"
        for expected in (3, 3, 1):
            page = get(admin, f"/v1/leases?limit=3&after={after}")
            assert len(page["items"]) == expected
            seen += [item["id"] for item in page["items"]]
            after = page["next"]
        assert after is None
        assert seen == [lease.held_id for lease in held]
        assert get(admin, "/v1/leases?limit=7")["next"] is None
        for lease in held:
            pool.release(lease)

    def test_an_item_that_goes_between_two_pages_hides_no_other(self, admin, pool):
        put(pool, range(8))
        for name in ("a", "b", "c", "d"):
            pool.pin(name, NAMESPACE, range(8))
        page = get(admin, "/v1/pins?limit=2")
        assert [pin["name"] for pin in page["items"]] == ["a", "b"]
        pool.unpin("b")
        rest = get(admin, f"/v1/pins?limit=2&after={page['next']}")
        assert [pin["name"] for pin in rest["items"]] == ["c", "d"]
        assert rest["next"] is None

    def test_namespaces_page_by_digest(self, admin, pool):
        spaces = [Namespace(bytes([i + 1]), NAMESPACE.layout) for i in range(5)]
        for space in spaces:
            put(pool, range(4), space)
        first = get(admin, "/v1/namespaces?limit=4")
        second = get(admin, f"/v1/namespaces?limit=4&after={first['next']}")
        digests = [item["digest"] for item in first["items"] + second["items"]]
        assert digests == sorted(space.digest.hex() for space in spaces)

    @pytest.mark.parametrize("query", ["limit=0", "limit=1001", "limit=x", "after=-1", "after=x"])
    def test_bad_queries(self, admin, query):
        document = problem(ask(admin, "GET", f"/v1/leases?{query}"), 422, "invalid-request")
        assert document["errors"][0]["parameter"] == query.split("=")[0]


@pytest.mark.parametrize("form", ["tokens", "token_bytes"])
class TestPrefixes:
    def test_match(self, admin, pool, form):
        put(pool, range(12))
        assert post(admin, "/v1/prefixes:match", prefix(range(13), form)) == {
            "prompt_tokens": 13,
            "hit_tokens": 12,
        }
        known = post(admin, "/v1/prefixes:match", prefix([*range(8), 99, 98], form))
        assert known["hit_tokens"] == 8
        assert post(admin, "/v1/prefixes:match", prefix([], form))["prompt_tokens"] == 0
        assert pool.stats().counts["lookups",] == 0

    def test_explain(self, admin, pool, form):
        put(pool, range(8))
        answer = post(admin, "/v1/prefixes:explain", prefix([*range(8), 70, 71, 72, 73, 74], form))
        assert (answer["prompt_tokens"], answer["hit_tokens"]) == (13, 8)
        assert [segment["cause"] for segment in answer["segments"]][:2] == ["hit", "not_stored"]
        assert answer["segments"][0] | {"detail": ""} == {
            "start": 0,
            "stop": 8,
            "tier": "dram",
            "cause": "hit",
            "detail": "",
        }

    def test_evict(self, admin, pool, form):
        put(pool, range(12))
        assert post(admin, "/v1/prefixes:evict", prefix([*range(8), 99], form)) == {"num_blocks": 2}
        assert pool.lookup(NAMESPACE, range(13)) == 0

    def test_a_million_tokens(self, admin, pool, form):
        tokens = np.random.default_rng(1).integers(0, 150_000, 1_000_000).tolist()
        put(pool, tokens[:160])
        known = post(admin, "/v1/prefixes:match", prefix(tokens, form))
        assert known == {"prompt_tokens": 1_000_000, "hit_tokens": 160}
        explained = post(admin, "/v1/prefixes:explain", prefix(tokens, form))
        assert (explained["hit_tokens"], explained["segments"][-1]["stop"]) == (160, 1_000_000)

    def test_namespaces_keyed_by_hash(self, admin, pool, form):
        hashes = bytes(range(64))
        put(pool, hashes, HASHES)
        body = {"namespace": HASHES.digest.hex()}
        if form == "tokens":
            answer = ask(admin, "POST", "/v1/prefixes:match", body | {"tokens": []})
            assert "kind 'hash'" in problem(answer, 422, "invalid-request")["detail"]
        else:
            encoded = base64.b64encode(hashes).decode()
            known = post(admin, "/v1/prefixes:match", body | {"token_bytes": encoded})
            assert known == {"prompt_tokens": 8, "hit_tokens": 8}


SECRET_TOKENS = "31337"
BAD_BODIES = {
    "no JSON": (b"hello", "#"),
    "empty": (b"", "#"),
    "cut off": (b'{"namespace": "' + DIGEST.encode() + b'", "tokens": [31337, 2', "#"),
    "a list": (b"[31337]", "#"),
    "not UTF-8": (b'{"namespace": "\xff"}', "#"),
    "no namespace": ({"tokens": [31337]}, "#"),
    "short namespace": ({"namespace": "ab", "tokens": [31337]}, "#/namespace"),
    "namespace and a newline": ({"namespace": DIGEST + "\n", "tokens": [1]}, "#/namespace"),
    "neither": ({"namespace": DIGEST}, "#"),
    "both": ({"namespace": DIGEST, "tokens": [31337], "token_bytes": "AAAAAA=="}, "#"),
    "unknown field": ({"namespace": DIGEST, "tokens": [31337], "x": 1}, "#"),
    "text": ({"namespace": DIGEST, "tokens": "31337"}, "#/tokens"),
    "texts": ({"namespace": DIGEST, "tokens": ["31337"]}, "#/tokens"),
    "nested": ({"namespace": DIGEST, "tokens": [[31337]]}, "#/tokens"),
    "floats": ({"namespace": DIGEST, "tokens": [31337.0]}, "#/tokens"),
    "bools": ({"namespace": DIGEST, "tokens": [True]}, "#/tokens"),
    "negative": ({"namespace": DIGEST, "tokens": [31337, -1]}, "#/tokens"),
    "large": ({"namespace": DIGEST, "tokens": [31337, 2**31]}, "#/tokens"),
    "huge": ({"namespace": DIGEST, "tokens": [31337, 10**4000]}, "#/tokens"),
    "twice": (f'{{"namespace":"{DIGEST}","tokens":[1],"tokens":[31337]}}'.encode(), "#/tokens"),
    "deep": (b'{"namespace":"' + DIGEST.encode() + b'","tokens":' + b"[" * 99999, "#"),
    "no base64": ({"namespace": DIGEST, "token_bytes": "31337!"}, "#/token_bytes"),
    "half a token": ({"namespace": DIGEST, "token_bytes": "AAA="}, "#/token_bytes"),
}


class TestErrors:
    @pytest.mark.parametrize("name", BAD_BODIES)
    @pytest.mark.parametrize(
        ("method", "path"), [("POST", "/v1/prefixes:explain"), ("PUT", "/v1/pins/a")]
    )
    def test_bad_bodies(self, admin, pool, method, path, name):
        put(pool, range(8))
        body, pointer = BAD_BODIES[name]
        document = problem(ask(admin, method, path, body), 422, "invalid-request")
        assert [field["pointer"] for field in document["errors"]] == [pointer]
        assert SECRET_TOKENS not in json.dumps(document)
        assert pool.pins() == []

    def test_a_namespace_without_blocks(self, admin):
        answer = ask(admin, "POST", "/v1/prefixes:match", prefix([1, 2]))
        assert "GET /v1/namespaces" in problem(answer, 404, "unknown-namespace")["detail"]

    @pytest.mark.parametrize("path", ["/", "/v1", "/v1/tiers/", "//v1/tiers", "/docs", "/redoc"])
    def test_unknown_paths(self, admin, path):
        problem(ask(admin, "GET", path), 404)

    @pytest.mark.parametrize(
        ("method", "path", "allowed"),
        [
            ("POST", "/v1/status", "GET"),
            ("OPTIONS", "/v1/prefixes:match", "POST"),
            ("GET", "/v1/pins/a", "DELETE, PUT"),
            ("BREW", "/healthz", "GET"),
        ],
    )
    def test_other_methods(self, admin, method, path, allowed):
        answer = ask(admin, method, path)
        problem(answer, 405)
        assert answer[1]["Allow"] == allowed

    def test_head_has_no_body(self, admin):
        status, _, text = ask(admin, "HEAD", "/v1/status")
        assert (status, text) == (405, "")

    def test_what_is_no_json(self, admin, pool):
        put(pool, range(8))
        headers = {"Content-Type": "application/x-www-form-urlencoded"}
        answer = ask(admin, "POST", "/v1/prefixes:evict", prefix(range(8)), headers)
        problem(answer, 415, "not-json")
        assert pool.stats().num_blocks == 2

    def test_an_announced_body_that_is_too_large(self, admin):
        with connected(admin) as connection:
            connection.putrequest("POST", "/v1/prefixes:match")
            connection.putheader("Content-Type", "application/json")
            connection.putheader("Content-Length", str(prefixes.MAX_BODY_BYTES + 1))
            connection.endheaders()
            answer = connection.getresponse()
            document = json.loads(answer.read())
        problem((answer.status, answer.headers, document), 413, "body-too-large")

    def test_a_body_that_turns_out_too_large(self, admin, monkeypatch):
        monkeypatch.setattr(prefixes, "MAX_BODY_BYTES", 100_000)
        headers = {"Content-Type": "application/json", "Transfer-Encoding": "chunked"}
        with connected(admin) as connection:
            connection.request(
                "POST", "/v1/prefixes:match", iter([b"x" * 9999] * 20), headers, encode_chunked=True
            )
            answer = connection.getresponse()
            document = json.loads(answer.read())
            problem((answer.status, answer.headers, document), 413, "body-too-large")
            connection.request("GET", "/healthz")
            assert connection.getresponse().status == 200

    def test_bodies_are_bounded_together(self, admin, monkeypatch, pool):
        put(pool, range(8))
        monkeypatch.setattr(prefixes, "MAX_BODIES_BYTES", 100)
        problem(ask(admin, "POST", "/v1/prefixes:match", prefix(range(99))), 503, "overloaded")
        monkeypatch.setattr(prefixes, "MAX_BODIES_BYTES", 1000)
        for _ in range(20):
            assert post(admin, "/v1/prefixes:match", prefix(range(9)))["hit_tokens"] == 8

    def test_a_failure_gives_no_details_away(self, admin, source, caplog):
        def fail():
            raise RuntimeError("a detail")

        source.status = fail
        document = problem(ask(admin, "GET", "/v1/status"), 500)
        assert "detail" not in document["detail"]
        assert "a detail" in caplog.text
        assert get(admin, "/healthz")

    @pytest.mark.parametrize(
        ("request_bytes", "status"),
        [
            (b"hello\r\n\r\n", 400),
            (b"GET / HTTP/1.1\r\n\r\n", 400),
            (b"GET / HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n", 400),
            (b"GET / HTTP/1.1\r\nHost: localhost\r\nX: " + b"x" * 100_000, 431),
        ],
    )
    def test_malformed_requests(self, admin, request_bytes, status):
        with socket.create_connection(admin.address, 20) as client:
            client.sendall(request_bytes)
            answer = http.client.HTTPResponse(client)
            answer.begin()
            problem((answer.status, answer.headers, json.loads(answer.read())), status)


class TestPins:
    def test_life_of_a_pin(self, admin, pool):
        put(pool, range(8))
        for _ in range(2):
            status, _, document = ask(admin, "PUT", "/v1/pins/a.b-C_9", prefix(range(8)))
            assert (status, document) == (200, {"name": "a.b-C_9", "tokens": 8})
        assert get(admin, "/v1/pins")["items"] == [
            {"name": "a.b-C_9", "namespace": DIGEST, "tokens": 8, "num_blocks": 2}
        ]
        assert get(admin, "/v1/status")["pool"]["num_pins"] == 1
        status, _, text = ask(admin, "DELETE", "/v1/pins/a.b-C_9")
        assert (status, text) == (204, "")
        problem(ask(admin, "DELETE", "/v1/pins/a.b-C_9"), 404, "unknown-pin")
        assert pool.stats().held_blocks == 0

    def test_an_unknown_prefix(self, admin, pool):
        put(pool, range(8))
        problem(ask(admin, "PUT", "/v1/pins/a", prefix([9] * 8)), 404, "unknown-prefix")
        assert pool.pins() == []

    def test_over_budget(self, admin, pool):
        put(pool, range(4 * 40))
        answer = ask(admin, "PUT", "/v1/pins/a", prefix(range(4 * 40)))
        assert str(40 << 12) in problem(answer, 409, "pin-budget")["detail"]
        assert ask(admin, "PUT", "/v1/pins/a", prefix(range(4 * 32)))[0] == 200

    @pytest.mark.parametrize("name", ["a" * 129, "a%20b", "%C3%A9", "a%0A", "a:b"])
    def test_bad_names(self, admin, pool, name):
        put(pool, range(8))
        answer = ask(admin, "PUT", f"/v1/pins/{name}", prefix(range(8)))
        assert problem(answer, 422, "invalid-request")["errors"][0]["parameter"] == "name"


class TestToken:
    @pytest.fixture
    def admin(self, pool, shared):
        source, running = shared[TOKEN]
        showing(source, pool)
        return running

    @pytest.mark.parametrize("path", OPEN)
    def test_open(self, admin, path):
        assert ask(admin, "GET", path)[0] == 200

    @pytest.mark.parametrize("path", LOCKED)
    def test_the_token_opens(self, admin, path):
        for scheme in ("Bearer", "bearer"):
            status, _, _ = ask(admin, "GET", path, headers={"Authorization": f"{scheme} {TOKEN}"})
            assert status == 200

    @pytest.mark.parametrize(
        ("method", "path"),
        [
            *(("GET", path) for path in LOCKED),
            ("POST", "/v1/prefixes:match"),
            ("POST", "/v1/prefixes:explain"),
            ("POST", "/v1/prefixes:evict"),
            ("PUT", "/v1/pins/a"),
            ("DELETE", "/v1/pins/a"),
            ("OPTIONS", "/v1/status"),
            ("BREW", "/v1/status"),
            ("GET", "/"),
            ("GET", "/nothing"),
            ("GET", "/healthz/"),
            ("GET", "//healthz"),
            ("GET", "/healthz/../v1/status"),
            ("GET", "/v1/status/"),
            ("GET", "//v1/status"),
            ("GET", "/%76%31/status"),
            ("GET", "/HEALTHZ"),
        ],
    )
    def test_all_else_is_closed(self, admin, method, path):
        answer = ask(admin, method, path)
        problem(answer, 401, "unauthorized")
        assert answer[1]["WWW-Authenticate"] == "Bearer"

    def test_head_is_closed(self, admin):
        assert ask(admin, "HEAD", "/v1/status")[0] == 401

    @pytest.mark.parametrize(
        "value",
        [
            "",
            "Bearer",
            "Bearer ",
            TOKEN,
            f"Basic {TOKEN}",
            f"Bearer {TOKEN}x",
            f"Bearer {TOKEN[:-1]}",
            f"Bearer {TOKEN.upper()}",
            f"Bearer{TOKEN}",
            f"Bearer {TOKEN} {TOKEN}",
            "Bearer " + "x" * 50_000,
            b"Bearer \xe9\xff".decode("latin-1"),
        ],
    )
    def test_wrong_tokens(self, admin, value):
        answer = ask(admin, "GET", "/v1/status", headers={"Authorization": value})
        problem(answer, 401, "unauthorized")

    def test_a_token_of_a_megabyte(self, admin):
        """Longer than any head may be: refused before it is looked at."""
        with socket.create_connection(admin.address, 20) as client:
            client.sendall(b"GET /v1/status HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer ")
            client.sendall(b"x" * (1 << 20))
            answer = http.client.HTTPResponse(client)
            answer.begin()
            problem((answer.status, answer.headers, json.loads(answer.read())), 431)

    def test_two_tokens(self, admin):
        with connected(admin) as connection:
            connection.putrequest("GET", "/v1/status")
            connection.putheader("Authorization", f"Bearer {TOKEN}")
            connection.putheader("Authorization", "Bearer other")
            connection.endheaders()
            assert connection.getresponse().status == 401

    def test_a_token_beyond_ascii(self, pool):
        with serve(make_source(pool, "schlüssel")) as admin:
            given = "Bearer schlüssel".encode().decode("latin-1")
            assert ask(admin, "GET", "/v1/pins", headers={"Authorization": given})[0] == 200

    def test_any_host_name_will_do(self, admin):
        headers = {"Authorization": f"Bearer {TOKEN}", "Host": "cache-7.example:8080"}
        assert ask(admin, "GET", "/v1/status", headers=headers)[0] == 200

    def test_pages_of_other_sites_are_refused_with_the_token(self, admin):
        headers = {"Authorization": f"Bearer {TOKEN}", "Origin": "https://example.com"}
        problem(ask(admin, "GET", "/v1/status", headers=headers), 403, "foreign-origin")

    def test_the_token_is_never_shown(self, admin, caplog):
        caplog.set_level("DEBUG")
        for authorization in (f"Bearer {TOKEN}", f"Basic {TOKEN}"):
            for path in [*OPEN, *LOCKED, "/nothing", "/v1/leases?limit=x"]:
                answer = ask(admin, "GET", path, headers={"Authorization": authorization})
                assert TOKEN not in f"{answer[1]}{answer[2]}"
        assert TOKEN not in caplog.text

    def test_an_empty_token_is_no_token(self, pool):
        with pytest.raises(ConfigError, match="token is empty"):
            create_app(make_source(pool, ""))


class TestWithoutToken:
    @pytest.mark.parametrize("host", ["localhost", "127.0.0.1:80", "[::1]:1", "[::1]", "LocalHost"])
    def test_names_of_this_machine(self, admin, host):
        assert ask(admin, "GET", "/v1/status", headers={"Host": host})[0] == 200

    @pytest.mark.parametrize(
        "host",
        [
            "example.com",
            "localhost.example.com",
            "127.0.0.1.example.com:80",
            "",
            "localhost:x",
            "::1",
        ],
    )
    @pytest.mark.parametrize("path", ["/v1/status", "/healthz", "/nothing"])
    def test_other_names(self, admin, host, path):
        problem(ask(admin, "GET", path, headers={"Host": host}), 403, "foreign-host")

    def test_no_name(self, admin):
        with socket.create_connection(admin.address, 20) as client:
            client.sendall(b"GET /v1/status HTTP/1.0\r\n\r\n")
            answer = http.client.HTTPResponse(client)
            answer.begin()
            problem((answer.status, answer.headers, json.loads(answer.read())), 403, "foreign-host")

    @pytest.mark.parametrize("address", ["127.0.0.2", "::1"])
    def test_the_address_that_is_listened_on(self, pool, address):
        running = AdminServer(create_app(make_source(pool)), address, 0)
        try:
            for host in (f"[{address}]" if ":" in address else address, "localhost"):
                for name in (host, f"{host}:{running.address[1]}"):
                    assert ask(running, "GET", "/v1/status", headers={"Host": name})[0] == 200
            for name in ("127.0.0.3", f"{address}.example.com"):
                answer = ask(running, "GET", "/v1/status", headers={"Host": name})
                assert "127.0.0.1" in problem(answer, 403, "foreign-host")["detail"]
        finally:
            running.close()

    @pytest.mark.parametrize(
        "origin",
        [
            "https://example.com",
            "null",
            "http://localhost:1",
            "",
            "x",
            *(
                "http://evil{host}",
                "http://evil.{host}",
                "http://{host}.evil",
                "http://evil@{host}",
            ),
        ],
    )
    def test_pages_of_other_sites(self, admin, pool, origin):
        put(pool, range(8))
        host, port = admin.address
        origin = origin.format(host=f"{host}:{port}")
        answer = ask(
            admin, "POST", "/v1/prefixes:evict", prefix(range(8)), headers={"Origin": origin}
        )
        problem(answer, 403, "foreign-origin")
        assert "Access-Control-Allow-Origin" not in answer[1]
        assert pool.stats().num_blocks == 2

    def test_its_own_pages(self, admin):
        origin = f"http://127.0.0.1:{admin.address[1]}"
        assert ask(admin, "GET", "/v1/status", headers={"Origin": origin})[0] == 200


class TestServer:
    def test_64_at_once(self, admin, pool):
        put(pool, range(8))
        answers = at_once(64, lambda: post(admin, "/v1/prefixes:match", prefix(range(9))))
        assert answers == [{"prompt_tokens": 9, "hit_tokens": 8}] * 64

    def test_more_than_that_are_turned_away_but_for_the_signs_of_life(self, admin, source):
        go, answer, done = threading.Event(), source.status(), Queue()

        def wait():
            assert go.wait(20)
            return answer

        source.status = wait
        for _ in range(guard.MAX_REQUESTS + 6):
            start(lambda: done.put(ask(admin, "GET", "/v1/status")))
        for _ in range(6):
            turned_away = done.get(timeout=20)
            problem(turned_away, 503, "overloaded")
            assert turned_away[1]["Retry-After"] == "1"
        assert get(admin, "/healthz")
        assert get(admin, "/readyz")
        assert done.empty()
        go.set()
        for _ in range(guard.MAX_REQUESTS):
            assert done.get(timeout=20)[0] == 200
        assert get(admin, "/v1/config")

    def test_a_client_that_sends_nothing_stops_nobody(self, admin, source):
        with many_connections(admin, 100, b"GET /v1/status HTTP/1.1\r\nHos"):
            assert get(admin, "/v1/status")

    def test_connections_are_bounded(self, admin, monkeypatch):
        monkeypatch.setattr(server, "MAX_CONNECTIONS", 10)
        sent = b"GET /healthz HTTP/1.1\r\nHos"
        with (
            many_connections(admin, 10, sent),
            socket.create_connection(admin.address, 20) as one_more,
        ):
            assert is_closed(one_more)

    @pytest.mark.parametrize(
        "sent",
        [
            b"",
            b"GET /healthz HTTP/1.1\r\nHost: localhost\r\nX: ",
            HALF_A_BODY,
        ],
    )
    def test_slow_clients_are_dropped(self, source, monkeypatch, sent):
        monkeypatch.setattr(server, "REQUEST_TIMEOUT_S", 0.2)
        with serve(source) as admin, socket.create_connection(admin.address, 20) as client:
            client.sendall(sent)
            assert is_closed(client)
            assert get(admin, "/healthz")

    def test_several_requests_on_one_connection(self, admin):
        with connected(admin) as connection:
            for path in ("/healthz", "/v1/status", "/nothing", "/v1/tiers"):
                connection.request("GET", path)
                answer = connection.getresponse()
                answer.read()
                assert answer.status == (404 if path == "/nothing" else 200)

    def test_the_end_leaves_nothing_behind(self, source):
        before = set(threading.enumerate())
        with serve(source) as admin:
            at_once(8, lambda: get(admin, "/v1/status"))
            idle = socket.create_connection(admin.address, 20)
            half = socket.create_connection(admin.address, 20)
            half.sendall(HALF_A_BODY)
            get(admin, "/healthz")
        with idle, half:
            assert is_closed(idle)
            assert half.recv(99).startswith(b"HTTP/1.1 503 ")
        for thread in set(threading.enumerate()) - before:
            thread.join(5)  # the last workers were told to end
        assert set(threading.enumerate()) == before
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(admin.address, 20)
        admin.close()

    def test_it_ends_although_a_request_does_not(self, source, caplog):
        go, entered = threading.Event(), threading.Event()
        answer = source.status()

        def wait():
            entered.set()
            assert go.wait(20)
            return answer

        source.status = wait
        before = set(threading.enumerate())
        with serve(source) as admin, socket.create_connection(admin.address, 20) as client:
            client.sendall(b"GET /v1/status HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert entered.wait(20)
            admin.close()
            assert not admin._thread.is_alive()
            assert client.recv(99).startswith(b"HTTP/1.1 503 ")
            assert "does not end" not in caplog.text
        go.set()
        for thread in set(threading.enumerate()) - before:
            thread.join(20)

    def test_the_address_is_ready_at_once(self, source):
        with serve(source) as first, pytest.raises(ConfigError, match=r"admin_port=.* in use"):
            AdminServer(create_app(source), *first.address)
        with serve(source) as second:
            assert get(second, "/healthz")

    @pytest.mark.parametrize("host", ["0.0.0.0", "", "::", "10.0.0.1", "example.com"])
    def test_others_may_reach_it_only_with_a_token(self, source, host):
        with pytest.raises(ConfigError, match="set a token"):
            AdminServer(create_app(source), host, 0)

    def test_everywhere_with_a_token(self, pool):
        running = AdminServer(create_app(make_source(pool, TOKEN)), "0.0.0.0", 0)
        running.address = ("127.0.0.1", running.address[1])
        assert get(running, "/healthz")
        running.close()

    def test_localhost(self, source):
        running = AdminServer(create_app(source), "localhost", 0)
        assert running.address[0] == "127.0.0.1"
        running.close()

    def test_no_such_address(self, pool):
        with pytest.raises(ConfigError, match=r"cannot listen on 192\.0\.2\.1"):
            AdminServer(create_app(make_source(pool, TOKEN)), "192.0.2.1", 0)


LISTS = st.one_of(
    st.lists(st.integers(0, 2**31 - 1)).map(json.dumps),
    st.lists(st.integers(-2, 2**31)).map(lambda ids: json.dumps(ids, indent=1)),
    st.text('0123456789-,.eE []{}"\n:tn', max_size=30).map(lambda text: f"[{text}]"),
)


def in_pieces(text):
    """Key bytes of the list that ``text`` is."""
    body = bytearray(text.encode())
    return prefixes._list_keys(NAMESPACE, body, 1, len(body) - 1)


class TestPieces:
    @given(LISTS, st.integers(0, 12))
    @example("[1,      ,2]", 2)
    @example("[1,2,]", 2)
    @example("[1,2, ]", 2)
    @example("[ ]", 2)
    @example('[1],"tokens":[2]', 2)
    def test_a_list_read_in_pieces_is_what_it_is_as_a_whole(self, text, piece_bytes):
        try:
            expected = token_bytes(json.loads(text))
        except ValueError:
            expected = None
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(prefixes, "_PIECE_BYTES", piece_bytes)
            try:
                found = in_pieces(text)
            except ProblemError:
                found = None
        assert found == expected

    def test_the_order_is_kept_across_pieces(self):
        ids = random.Random(1).choices(range(2**31), k=50_000)
        assert in_pieces(json.dumps(ids)) == token_bytes(ids)


class TestDocuments:
    def test_openapi_is_checked_in(self):
        assert (ROOT / "docs/openapi.json").read_text() == openapi.document()

    def test_openapi_is_served(self, admin):
        assert get(admin, "/openapi.json") == json.loads(openapi.document())

    def test_every_route_is_in_the_reference_and_every_path_of_it_exists(self):
        paths = json.loads(openapi.document())["paths"]
        routes = {
            f"{method.upper()} {path}" for path, methods in paths.items() for method in methods
        }
        text = REFERENCE.read_text()
        assert set(re.findall(r"`((?:GET|POST|PUT|DELETE) [^`]+)`", text)) == routes

    def test_the_kinds_of_problems_are_in_the_reference(self):
        source = "".join(path.read_text() for path in (ROOT / "kvstore/admin").glob("*.py"))
        kinds = set(re.findall(r'\d{3},\s+"([a-z-]+)"', source))
        text = REFERENCE.read_text()
        assert kinds == set(re.findall(r"^\| `([a-z-]+)` \| \d", text, re.MULTILINE))

    def test_the_examples_run(self, admin, pool, tmp_path):
        put(pool, range(16))
        block = re.search(r"```sh\n(ADMIN=.+?)```", REFERENCE.read_text(), re.DOTALL)[1]
        assert block.count("\ncurl ") >= 10
        (tmp_path / "curl").write_text(CURL.format(python=sys.executable))
        (tmp_path / "curl").chmod(0o755)
        script = re.sub(r"ADMIN=\S+", f"ADMIN=http://127.0.0.1:{admin.address[1]}", block)
        environment = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
        done = subprocess.run(
            ["bash", "-eo", "pipefail", "-c", script],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        for answer in ('"hit_tokens":16', '"cause":"hit"', '"tokens":16', '{"num_blocks":4}'):
            assert answer in done.stdout, done.stdout


REFERENCE = ROOT / "docs/rest.md"
CURL = """#!{python}
import sys, urllib.request
words = [word for word in sys.argv[1:] if word != "-s"]
body = method = None
while len(words) > 1:
    option, value, *words = words
    if option == "--json":
        assert value[0] == "@", value
        body = open(value[1:], "rb").read()
    else:
        assert option == "-X", option
        method = value
headers = {{"Content-Type": "application/json"}} if body else {{}}
request = urllib.request.Request(words[0], body, headers, method=method)
print(urllib.request.urlopen(request).read().decode())
"""
"""Stands for curl, with the options that the examples use; an answer that is an error is one here too."""


def start(function):
    """Run ``function`` in a thread; return what waits for its result."""
    results = []

    def run():
        try:
            results.append(function())
        except BaseException as error:  # noqa: BLE001
            results.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()

    def result():
        thread.join(30)
        assert results, "no answer"
        if isinstance(results[0], BaseException):
            raise results[0]
        return results[0]

    return result


def at_once(count, function):
    return [result() for result in [start(function) for _ in range(count)]]


@contextmanager
def many_connections(admin, count, sent):
    clients = [socket.create_connection(admin.address, 20) for _ in range(count)]
    try:
        for client in clients:
            client.sendall(sent)
        yield
    finally:
        for client in clients:
            client.close()


def is_closed(client):
    """Wait until the other side ends the connection; False if it says something instead."""
    try:
        return client.recv(1) == b""
    except ConnectionResetError:
        return True
