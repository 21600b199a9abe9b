"""Settings, and stores built from them."""

from __future__ import annotations

import pytest
from prometheus_client import CollectorRegistry, generate_latest

import kvstore
from kvstore.config import Settings, load_settings
from kvstore.errors import ConfigError
from kvstore.metrics import COUNTERS
from kvstore.namespace import KVLayout, Namespace


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
        (lambda: load(policy="fifo"), "policy='fifo'"),
        (lambda: load(lease_timeout_s=0), "lease_timeout_s=0"),
    ],
)
def test_unknown_and_impossible_settings_are_named(call, says):
    with pytest.raises(ConfigError, match=says):
        call()


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


def test_every_counter_of_the_pool_is_in_the_table():
    """Counters are made by use; a name that the table does not know would not be exported."""
    import re
    from pathlib import Path

    sources = [
        Path(kvstore.__file__).with_name(name).read_text() for name in ("pool.py", "residency.py")
    ]
    used = {
        match.group(1): match.group(2).count(",")
        for source in sources
        for match in re.finditer(r'counts\["(\w+)"(,[^\]]*)\]', source)
    }
    assert set(used) == set(COUNTERS)
