"""Settings, and stores built from them."""

from __future__ import annotations

import gc
import json
import os
import re
from pathlib import Path

import pytest
from click.testing import CliRunner
from prometheus_client import CollectorRegistry, generate_latest
from pydantic import ValidationError

import kvstore
from kvstore import assembly
from kvstore.cli.main import build
from kvstore.config import Settings, load_settings, load_with_origins, redacted
from kvstore.errors import ConfigError
from kvstore.metrics import COUNTERS, register
from kvstore.namespace import KVLayout, Namespace
from kvstore.pool import Pool
from kvstore.testing import small_pool
from kvstore.tiers.disk import DiskOptions

TOKEN = "0123456789abcdef-and-more"


def load(environment=None, file=None, **arguments):
    return load_settings(arguments, environment or {}, file)


def test_file_then_environment_then_argument(tmp_path):
    file = tmp_path / "kvstore.toml"
    file.write_text('dram = "1GiB"\ngpu = "2GiB"\nblock_tokens = 32\n')
    settings = load({"KVSTORE_DRAM": "3GiB", "KVSTORE_GPU": "4GiB"}, file, gpu="5GiB")
    assert (settings.dram, settings.gpu, settings.block_tokens) == (3 << 30, 5 << 30, 32)
    assert load({"KVSTORE_CONFIG": str(file)}).gpu == 2 << 30


def test_sizes():
    assert load(dram="8GiB").dram == 8 << 30
    assert load(dram="8GB").dram == 8 * 10**9
    assert load(dram=12345).dram == 12345


def test_the_variable_of_the_benchmarks_is_no_setting():
    assert load({"KVSTORE_TRACES": "/data"}) == load()


def test_none_means_not_given():
    assert load(dram=None) == load()


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: load(drm="1GiB"), "drm; did you mean dram"),
        (lambda: load({"KVSTORE_DRM": "1GiB"}), "KVSTORE_DRM; did you mean KVSTORE_DRAM"),
        (lambda: load({"KVSTORE_ZZZZ": "1"}), "KVSTORE_ZZZZ; known are KVSTORE_DRAM, "),
        (lambda: load(dram="lots"), "dram='lots': not a size: write it as 512MiB"),
        (lambda: load(dram=-1), "dram=-1"),
        (lambda: load(block_tokens=0), "block_tokens=0"),
        (lambda: load(policy="fifo"), "policy='fifo': .*'lru', 'slru', .* or 'cost'"),
        (lambda: load(lease_timeout_s=0), "lease_timeout_s=0"),
        (lambda: load(lease_timeout_s=float("inf")), "lease_timeout_s=inf: .* 86400"),
        (lambda: load(lease_timeout_s=float("nan")), "lease_timeout_s=nan: "),
        (lambda: load(drain_timeout_s=-1), "drain_timeout_s=-1: .* equal to 0"),
        (lambda: load(drain_timeout_s="1e9"), "drain_timeout_s='1e9': .* 86400"),
        (lambda: load(socket="kv.sock"), "socket='kv.sock': not an absolute path: .* /run"),
        (lambda: load(socket="~/kv.sock"), "socket='~/kv.sock': not an absolute path"),
        (lambda: load(socket="/" + "x" * 107), "xxx': 108 bytes long, .* at most 107"),
        (lambda: load(socket="/" + "é" * 54), "é': 109 bytes long, .* at most 107"),
        (lambda: load(node=""), "node='': not a name: "),
        (lambda: load(node="two words"), "node='two words': not a name: "),
        (lambda: load(node="x" * 256), "xxx': not a name: use up to 255"),
        (lambda: load(tcp_port=7000), "tcp_port=7000: needs a token: set token_file"),
        (lambda: load(tcp_port=65536), "tcp_port=65536: "),
        (lambda: load(admin_port=-1), "admin_port=-1: "),
        (lambda: load(admin_host="0.0.0.0"), "admin_host='0.0.0.0': needs a token"),
        (lambda: load(admin_host="::"), "admin_host='::': needs a token"),
        (lambda: load(admin_host="myhost"), "admin_host='myhost': not an address: "),
        (lambda: load({"KVSTORE_TENANTS": "acme"}), r"KVSTORE_TENANTS is no variable: .*\[tenants"),
        (lambda: load({"KVSTORE_TENANT": "x"}), "KVSTORE_TENANT; known are KVSTORE_DRAM, "),
        (
            lambda: load(tenants={"acme": {"flor": "4MiB"}}),
            "setting tenants.acme.flor is unknown; did you mean floor. .argument.",
        ),
        (
            lambda: load(tenants={"acme": {"zzz": 1}}),
            "tenants.acme.zzz is unknown; known are ceiling, floor",
        ),
        (lambda: load({"KVSTORE_MAX_CLIENTS": "0"}), "='0': .* .environment KVSTORE_MAX_CLIENTS."),
    ],
)
def test_unknown_and_impossible_settings_are_named(call, says):
    with pytest.raises(ConfigError, match=says):
        call()


@pytest.mark.parametrize(
    ("option", "hint"),
    [
        ("--policy", "No such option '--policy'. Set KVSTORE_POLICY, or policy in the file."),
        ("--disk-admission=always", "Set KVSTORE_DISK_ADMISSION, or disk_admission in the file."),
        ("--tenants", "No such option '--tenants'. Set tenants in the file."),
        ("--polity", "No such option '--polity'.\n"),
    ],
)
def test_an_option_that_is_only_a_setting_says_where_to_set_it(option, hint):
    result = CliRunner().invoke(build(()), ["serve", option])
    assert result.exit_code == 2
    assert hint in result.stderr


def test_unreadable_files(tmp_path):
    with pytest.raises(ConfigError, match=r"missing\.toml"):
        load(file=tmp_path / "missing.toml")
    broken = tmp_path / "broken.toml"
    broken.write_text("dram = ")
    with pytest.raises(ConfigError, match=r"broken\.toml"):
        load(file=broken)
    broken.write_text("gpus = 1")
    with pytest.raises(ConfigError, match="did you mean gpu"):
        load(file=broken)


def test_what_is_just_possible():
    assert len(str(load(socket="/" + "x" * 106).socket)) == 107
    assert load(tcp_port=7000, token=TOKEN).tcp_port == 7000
    assert load(admin_host="::", token=TOKEN).admin_host == "::"
    for host in ("localhost", "127.0.0.1", "127.9.9.9", "::1"):
        assert load(admin_host=host).admin_host == host
    assert load(admin_port=0).admin_port == 0
    assert load(node="gpu-host_7.example.org").node == "gpu-host_7.example.org"


def test_the_socket_is_below_the_runtime_directory_where_there_is_one(monkeypatch):
    monkeypatch.setenv("XDG_RUNTIME_DIR", "/run/user/7")
    assert str(load().socket) == "/run/user/7/kvstore.sock"
    for unusable in ("", "run/user/7"):
        monkeypatch.setenv("XDG_RUNTIME_DIR", unusable)
        assert str(load().socket) == f"/tmp/kvstore-{os.getuid()}.sock"


# ------------------------------------------------------------------------------- the token


def private(file, text):
    file.write_text(text)
    file.chmod(0o600)
    return file


def test_a_token_comes_from_a_file_the_environment_or_toml(tmp_path):
    in_file = private(tmp_path / "token", f"  {TOKEN}\n")
    toml = private(tmp_path / "kvstore.toml", f'token = "{TOKEN[::-1]}"\n')
    for settings, token in (
        (load(token_file=in_file), TOKEN),
        (load({"KVSTORE_TOKEN_FILE": str(in_file)}), TOKEN),
        (load({"KVSTORE_TOKEN": TOKEN}), TOKEN),
        (load(file=toml), TOKEN[::-1]),
        (load({"KVSTORE_TOKEN_FILE": str(in_file)}, toml), TOKEN),
        (load({"KVSTORE_TOKEN": "e" * 16}, toml, token_file=in_file), TOKEN),
        (load({"KVSTORE_TOKEN_FILE": "/missing"}, token=TOKEN), TOKEN),
    ):
        assert settings.token.get_secret_value() == token
    assert load().token is None


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o644])
def test_files_with_a_token_that_others_can_read_are_refused(tmp_path, mode):
    file = private(tmp_path / "file", TOKEN)
    file.chmod(mode)
    with pytest.raises(ConfigError, match=f"others can read token_file={file}: chmod 600 {file}"):
        load(token_file=file)
    file.write_text(f'token = "{TOKEN}"')
    with pytest.raises(ConfigError, match=f"{file} holds a token .*: chmod 600 {file}"):
        load(file=file)
    file.write_text('dram = "2GiB"')
    assert load(file=file).dram == 2 << 30


@pytest.mark.parametrize(
    ("token", "says"),
    [
        ("", "setting token: 0 characters long, not 16 to 255: make one with `openssl"),
        ("a" * 15, "setting token: 15 characters long"),
        ("a" * 256, "setting token: 256 characters long"),
        ("hidden in a sentence", "setting token: has blanks or letters beyond ASCII"),
        ("hidden-in-a-sentencé", "setting token: has blanks or letters beyond ASCII"),
        (["hidden-in-a-sentence"], "setting token: "),
    ],
)
def test_bad_tokens_are_refused_and_not_shown(token, says):
    with pytest.raises(ConfigError, match=says) as caught:
        load(token=token)
    with pytest.raises(ValidationError) as direct:
        Settings(token=token)
    for error in (caught, direct):
        assert "hidden" not in str(error.value)
        assert "aaaa" not in str(error.value)


def test_bad_token_files(tmp_path):
    with pytest.raises(ConfigError, match=r"cannot read the token from token_file=.*missing"):
        load(token_file=tmp_path / "missing")
    with pytest.raises(ConfigError, match=r"setting token: 0 characters long.*\(file .*empty\)"):
        load(token_file=private(tmp_path / "empty", "\n"))
    both = {"KVSTORE_TOKEN": TOKEN, "KVSTORE_TOKEN_FILE": str(tmp_path / "missing")}
    with pytest.raises(ConfigError, match=r"both given .environment KVSTORE_TOKEN and env.*_FILE"):
        load(both)


def test_a_token_is_never_shown():
    settings = load(token=TOKEN, tcp_port=7000)
    shown = [
        repr(settings),
        str(settings),
        json.dumps(redacted(settings)),
        str(settings.model_dump()),
    ]
    assert not [text for text in shown if TOKEN in text]
    with pytest.raises(ConfigError) as caught:
        load(token=TOKEN, max_clients=0)
    assert TOKEN not in str(caught.value)


# ----------------------------------------------------------------------------- the origins


def test_every_setting_has_an_origin(tmp_path):
    file = private(tmp_path / "kvstore.toml", 'dram = "1GiB"\ngpu = 0\nnode = "a"\n')
    token = private(tmp_path / "token", TOKEN)
    environment = {"KVSTORE_GPU": "0", "KVSTORE_NODE": "b", "KVSTORE_TOKEN_FILE": str(token)}
    settings, origins = load_with_origins({"node": "c", "dram": None}, environment, file)
    assert settings.node == "c"
    assert {name: origin for name, origin in origins.items() if origin != "default"} == {
        "dram": f"file {file}",
        "gpu": "environment KVSTORE_GPU",
        "node": "argument",
        "token": f"file {token}",
        "token_file": "environment KVSTORE_TOKEN_FILE",
    }
    assert list(origins) == list(Settings.model_fields)


def test_an_overridden_token_leaves_no_origin(tmp_path):
    file = private(tmp_path / "kvstore.toml", f'token = "{TOKEN}"\n')
    settings, origins = load_with_origins(
        {"token": "x" * 16}, {"KVSTORE_TOKEN_FILE": "/none"}, file
    )
    assert (origins["token"], origins["token_file"]) == ("argument", "default")
    assert settings.token_file is None


def test_redacted_settings_are_complete_and_json():
    settings = load(dram="2GiB", socket="/run/kv.sock", token=TOKEN)
    values = redacted(settings)
    assert json.loads(json.dumps(values)) == values
    assert list(values) == list(Settings.model_fields)
    assert (values["dram"], values["socket"], values["token"]) == (2 << 30, "/run/kv.sock", "set")
    assert redacted(load())["token"] is None


def show(*arguments, **environment):
    return CliRunner(env=environment).invoke(build(()), ["config", "show", *arguments])


@pytest.fixture
def _no_variables(monkeypatch):
    for name in [name for name in os.environ if name.startswith("KVSTORE_")]:
        monkeypatch.delenv(name)


@pytest.mark.usefixtures("_no_variables")
class TestConfigShow:
    def test_as_a_table(self):
        plain, full = show(), show("--origin", "--describe", KVSTORE_DRAM="1536MiB")
        assert plain.stdout.splitlines()[0].split() == ["setting", "value"]
        rows = dict(line.split(None, 1) for line in plain.stdout.splitlines()[2:])
        assert set(rows) == set(Settings.model_fields)
        assert (rows["dram"], rows["prefault"], rows["drain_timeout_s"]) == ("1 GiB", "true", "5")
        (dram,) = [line for line in full.stdout.splitlines() if line.startswith("dram ")]
        assert re.split("  +", dram) == [
            *("dram", "1536 MiB", "environment KVSTORE_DRAM"),
            "Host memory for blocks, in bytes; 0 for none.",
        ]

    def test_as_json_with_a_file(self, tmp_path):
        file = private(tmp_path / "kvstore.toml", f'token = "{TOKEN}"\ndram = 4097\n')
        result = show("--config", str(file), "--output", "json", KVSTORE_CONFIG="/ignored")
        document = json.loads(result.stdout)
        assert list(document) == list(Settings.model_fields)
        assert document["dram"]["value"] == 4097
        assert document["token"]["value"] == "set"
        assert document["token"]["origin"] == f"file {file}"
        assert document["token"]["meaning"].startswith("Secret that REST requests")
        assert TOKEN not in result.output
        assert "4097" in show("--config", str(file)).stdout

    def test_a_wrong_setting_is_exit_code_3(self):
        result = show(KVSTORE_BLOCK_TOKENS="0")
        assert result.exit_code == 3
        assert result.stderr.startswith("Error: setting block_tokens='0': ")
        assert result.stdout == ""

    def test_the_group_works_like_any_command(self):
        runner, group = CliRunner(), build(())
        assert "Look at the settings." in runner.invoke(group, ["--help"]).stdout
        assert "show" in runner.invoke(group, ["config", "--help"]).stdout
        assert "--describe" in runner.invoke(group, ["config", "show", "-h"]).stdout
        for wrong in (["config"], ["config", "shwo"], ["config", "show", "--orgin"]):
            assert runner.invoke(group, wrong).exit_code == 2


def test_every_setting_is_documented():
    for name, field in Settings.model_fields.items():
        assert field.description, name


def test_open_refuses_what_cannot_work():
    with pytest.raises(ConfigError, match="both dram and gpu are 0"):
        kvstore.open(dram=0)
    with pytest.raises(ConfigError, match="smaller than one page"):
        kvstore.open(dram=8)
    with pytest.raises(ConfigError, match=r"more than the .* this process may use"):
        kvstore.open(dram="1000TiB")
    pytest.importorskip("torch")
    with pytest.raises(ConfigError, match="device='tpu9'"):
        kvstore.open(gpu="1MiB", device="tpu9")


def test_open_refuses_a_disk_that_cannot_work(tmp_path):
    disk = {"disk": "64MiB", "disk_path": str(tmp_path / "tier"), "disk_reserve": 0}
    with pytest.raises(ConfigError, match="disk=64MiB has no place: set disk_path"):
        kvstore.open(dram="1MiB", disk="64MiB")
    with pytest.raises(
        ConfigError, match=r"^disk=1MiB leaves nothing for blocks: .* give it 6MiB or more"
    ):
        kvstore.open(dram="1MiB", **disk | {"disk": "1MiB"})
    with pytest.raises(ConfigError, match=r"^disk=10TiB: at most 8TiB$"):
        kvstore.open(dram="1MiB", **disk | {"disk": "10TiB"})
    full = r"used: [\d.]+ .iB are free, 7 TiB are needed \(disk 7 TiB, .* disk_reserve 0 B\): lower disk"
    with pytest.raises(ConfigError, match=full):
        kvstore.open(dram="1MiB", **disk | {"disk": "7TiB"})
    with pytest.raises(ConfigError, match="disk_path is set and disk is 0: set disk"):
        kvstore.open(dram="1MiB", disk_path=str(tmp_path / "tier"))
    (tmp_path / "letter.txt").touch()
    with pytest.raises(ConfigError, match="was not made by kvstore"):
        kvstore.open(dram="1MiB", **disk | {"disk_path": str(tmp_path)})
    with kvstore.open(dram="1MiB", **disk) as store:
        assert store.tier_names == ("dram", "disk")
        with pytest.raises(ConfigError, match="used by another kvstore"):
            kvstore.open(dram="1MiB", **disk)
    pytest.importorskip("torch")
    with pytest.raises(ConfigError, match="needs dram"):
        kvstore.open(dram=0, gpu="1MiB", device="cpu", **disk)


def test_what_is_said_to_be_the_least_and_the_most_of_a_disk_is_possible(tmp_path):
    with kvstore.open(dram="1MiB", disk="6MiB", disk_path=tmp_path / "tier", disk_reserve=0):
        pass
    assert DiskOptions(8 << 40).capacity_bytes > 7 << 40
    assert Settings(disk="8TiB").disk == 8 << 40


@pytest.mark.parametrize("tenants", [{}, {"acme": {"floor": 4096}}])
@pytest.mark.parametrize("policy", assembly.POLICIES)
def test_explain_calls_policies_as_settings_do(policy, tenants):
    namespace = Namespace(b"w", KVLayout(1, 1, 256, "float32", block_tokens=4), tenant="acme")
    with kvstore.open(dram="16KiB", policy=policy, block_tokens=4, tenants=tenants) as store:
        for start in (0, 100):
            store.commit(store.reserve(namespace, range(start, start + 8)))
        details = [
            segment.detail
            for start in (0, 100)
            for segment in store.explain(namespace, range(start, start + 9)).segments
            if segment.cause == "evicted"
        ]
    assert details
    assert all(detail.endswith(f", as {policy} chose") for detail in details)


def no_memory(*_, **__):
    raise AssertionError("memory was taken before the settings were checked")


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"disk": "64MiB"}, "has no place"),
        ({"disk_path": "/nowhere"}, "disk is 0"),
        ({"disk": "1MiB", "disk_path": "/nowhere"}, "leaves nothing"),
        ({"tenants": {"acme": {"floor": "2MiB"}}}, "are 2 MiB, more than the 1 MiB of the last"),
        ({"tenants": {"acme": {"floor": 8192, "ceiling": 4096}}}, "of 8 KiB is above .* 4 KiB"),
    ],
)
def test_settings_are_checked_before_memory_is_taken(monkeypatch, settings, says):
    monkeypatch.setattr(assembly, "DramStore", no_memory)
    monkeypatch.setattr(assembly, "SharedDramStore", no_memory)
    for build_store in (assembly.build, assembly.build_shared):
        with pytest.raises(ConfigError, match=says):
            build_store(load(dram="1MiB", **settings))


@pytest.mark.parametrize("build_store", [assembly.build, assembly.build_shared])
def test_a_disk_is_opened_before_memory_is_taken_and_closed_when_there_is_none(
    monkeypatch, tmp_path, build_store
):
    disk = {"disk": "64MiB", "disk_path": str(tmp_path / "tier"), "disk_reserve": 0}
    with monkeypatch.context() as patch:
        patch.setattr(assembly, "DramStore", no_memory)
        patch.setattr(assembly, "SharedDramStore", no_memory)
        (tmp_path / "letter.txt").touch()
        with pytest.raises(ConfigError, match="was not made by kvstore"):
            build_store(load(dram="1MiB", **disk | {"disk_path": str(tmp_path)}))
        with pytest.raises(AssertionError, match="before the settings"):
            build_store(load(dram="1MiB", **disk))
    with kvstore.open(dram="1MiB", **disk) as store:
        assert store.tier_names == ("dram", "disk")


def test_open_names_its_tiers_and_sizes():
    with kvstore.open(dram="1MiB") as store:
        assert store.tier_names == ("dram",)
        assert store.buffer("dram").shape == (1 << 20,)
        assert store.block_tokens == 16
    pytest.importorskip("torch")
    with kvstore.open(dram="1MiB", gpu="64KiB", device="cpu", block_tokens=32) as store:
        assert store.tier_names == ("gpu", "dram")
        assert store.buffer("gpu").shape == (1 << 16,)
        assert store.block_tokens == 32


def test_metrics_are_those_of_the_table_and_registries_do_not_clash():
    registries = CollectorRegistry(), CollectorRegistry()
    with (
        kvstore.open(dram="1MiB", registry=registries[0]) as store,
        kvstore.open(dram="1MiB", registry=registries[1]),
    ):
        namespace = Namespace(b"w", KVLayout(1, 1, 8, "float32"))
        store.commit(store.reserve(namespace, range(40)))
        store.release(store.acquire(namespace, range(40)))
        store.acquire(namespace, range(40))
        text = generate_latest(registries[0]).decode()
        for name in COUNTERS:
            assert f"# TYPE kvstore_{name}_total counter" in text
        assert "kvstore_stored_blocks_total 2.0" in text
        assert 'kvstore_lookup_tokens_total{source="dram"} 64.0' in text
        assert 'kvstore_lookup_tokens_total{source="miss"} 16.0' in text
        assert 'kvstore_tier_capacity_bytes{tier="dram"} 1.048576e+06' in text
        assert "kvstore_leases 1.0" in text
        assert "kvstore_stored_blocks_total 0.0" in generate_latest(registries[1]).decode()


@pytest.mark.parametrize("auto_describe", [False, True])
@pytest.mark.parametrize("end", ["close", "forget"])
def test_a_registry_exports_the_store_that_is_open(auto_describe, end):
    registry = CollectorRegistry(auto_describe=auto_describe)
    stores = [small_pool(1)]
    register(stores[0], registry)
    if end == "close":
        stores[0].close()
    else:
        stores.clear()
        gc.collect()
    assert "kvstore" not in generate_latest(registry).decode()
    with kvstore.open(dram="1MiB", registry=registry):
        text = generate_latest(registry).decode()
        samples = [line.rpartition(" ")[0] for line in text.splitlines()]
        assert len(samples) == len(set(samples))
        assert samples.count("kvstore_lookups_total") == 1
        with pytest.raises(ConfigError, match="give each its own registry"):
            kvstore.open(dram="1MiB", registry=registry)
        assert generate_latest(registry).decode() == text
    assert "kvstore" not in generate_latest(registry).decode()


def test_a_store_that_a_registry_refuses_gives_its_memory_back(monkeypatch):
    closed, close = [], Pool.close

    def noted(pool):
        closed.append(pool)
        close(pool)

    monkeypatch.setattr(Pool, "close", noted)
    registry = CollectorRegistry()
    with kvstore.open(dram="1MiB", registry=registry) as store:
        with pytest.raises(ConfigError):
            kvstore.open(dram="1MiB", registry=registry)
        assert len(closed) == 1
        assert store not in closed


def test_every_counter_of_the_pool_is_in_the_table():
    """Counters are made by use; a name that the table does not know would not be exported."""
    sources = [file.read_text() for file in Path(kvstore.__file__).parent.glob("*.py")]
    used = {
        match.group(1): match.group(2).count(",")
        for source in sources
        for match in re.finditer(r'counts\["(\w+)"(,[^\]]*)\]', source)
    }
    assert set(used) == set(COUNTERS)


def test_service_links_of_kubernetes_are_no_settings():
    links = {
        "KVSTORE_SERVICE_HOST": "10.0.0.1",
        "KVSTORE_SERVICE_PORT": "80",
        "KVSTORE_SERVICE_PORT_HTTP": "80",
        "KVSTORE_PORT": "tcp://10.0.0.1:80",
        "KVSTORE_PORT_80_TCP": "tcp://10.0.0.1:80",
        "KVSTORE_PORT_80_TCP_ADDR": "10.0.0.1",
        "KVSTORE_ADMIN_PORT": "tcp://10.0.0.1:80",
    }
    assert load_settings({}, links).admin_port is None
    assert load_settings({}, links | {"KVSTORE_ADMIN_PORT": "8200"}).admin_port == 8200
    for wrong in ({"KVSTORE_PORTS": "80"}, {"KVSTORE_PORTS": "tcp://10.0.0.1:80"}):
        with pytest.raises(ConfigError, match="KVSTORE_PORTS"):
            load_settings({}, wrong)
    with pytest.raises(ConfigError, match="KVSTORE_SOCKET"):
        load_settings({}, {"KVSTORE_SOCKET": "tcp://10.0.0.1:80"})
