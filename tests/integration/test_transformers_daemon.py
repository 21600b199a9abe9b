"""Engines that share a daemon: whatever becomes of it, every request gives the text of the model alone.

Run as a program, this file is a second engine: a prompt a line comes in, an answer a line goes out.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers as hf

import kvstore
from engine_plugin import models
from engine_plugin.transformers import CachedModel
from kvstore.errors import UnavailableError
from kvstore.lease import Lease, Reservation

T = 16
VOCAB = 89
NEW = {"max_new_tokens": 5, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
DEADLINE_S = 0.5
REASONS = ["unreachable", "timeout", "lost", "breaker", "refused", "protocol"]


def make_llama():
    torch.manual_seed(7)
    config = hf.LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        initializer_range=0.3,
    )
    return hf.AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").eval()


def main(url):
    """Answer prompts from standard input until it ends."""
    torch.set_num_threads(1)
    with kvstore.connect(url) as client, CachedModel(make_llama(), client) as cached:
        for line in sys.stdin:
            text = new_tokens(cached, torch.tensor([json.loads(line)]))
            print(json.dumps({"text": text, "hit": cached.last.hit_tokens}), flush=True)


def new_tokens(model, ids):
    return model.generate(ids, **NEW)[0, ids.shape[1] :].tolist()


def prompt(length, seed=0):
    return torch.randint(1, VOCAB, (1, length), generator=torch.Generator().manual_seed(seed))


def joined(*parts):
    return torch.cat(parts, dim=1)


class Daemon:
    """``kvstore serve`` as a process, which tests start and end as they like."""

    def __init__(self, directory):
        self.socket = Path(directory, "kvstore.sock")
        self.url = f"unix://{self.socket}"
        self._process = None

    def start(self):
        command = ["kvstore", "serve", "--socket", self.socket, "--dram", "4MiB"]
        self._process = subprocess.Popen(
            [sys.executable, "-m", *command], stderr=subprocess.PIPE, text=True
        )
        said = []
        for line in self._process.stderr:
            if line.startswith("ready "):
                return
            said.append(line)
        raise AssertionError("".join(said))

    def stop(self):
        """Let it do nothing from now on."""
        self._process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, self._process.pid, os.WSTOPPED)

    def go_on(self):
        self._process.send_signal(signal.SIGCONT)

    def kill(self):
        """End it at once; its sockets are closed on return."""
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._process = None


@pytest.fixture(scope="module")
def directory():
    with tempfile.TemporaryDirectory(prefix="kvstore-test-") as made:
        yield made


@pytest.fixture
def daemon(directory):
    daemon = Daemon(directory)
    yield daemon
    daemon.kill()


@pytest.fixture(scope="module")
def llama():
    return make_llama()


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    """Threads only wait for one another on matrices this small."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


class Engine:
    """A model with a client of its own in this process."""

    def __init__(self, llama, url, wrap=lambda client: client, verify="never", **options):
        self._llama = llama
        self.client = kvstore.connect(url, deadline_s=DEADLINE_S, **options)
        self.cached = CachedModel(llama, wrap(self.client), verify=verify)

    def ask(self, ids):
        """Check the text of an answer; return how many tokens hit."""
        assert new_tokens(self.cached, ids) == new_tokens(self._llama, ids)
        return self.cached.last.hit_tokens

    def close(self):
        counts = self.cached.stats()
        misses = sum(number for name, number in counts.items() if name.startswith("miss."))
        assert counts["prompts"] == counts.get("hit", 0) + misses
        self.client.close()


@pytest.fixture
def engine(llama, daemon):
    opened = []

    def make(**options):
        opened.append(Engine(llama, daemon.url, **options))
        return opened[-1]

    yield make
    for each in opened:
        each.close()


class Worker:
    """An engine in another process, at any daemon that ever listens."""

    def __init__(self, llama, directory):
        self._llama = llama
        self._process = subprocess.Popen(
            [sys.executable, __file__, Daemon(directory).url],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def ask(self, ids):
        """Check the text of an answer; return how many tokens hit."""
        print(json.dumps(ids[0].tolist()), file=self._process.stdin, flush=True)
        said = json.loads(self._process.stdout.readline())
        assert said["text"] == new_tokens(self._llama, ids)
        return said["hit"]

    def close(self):
        self._process.communicate()


@pytest.fixture(scope="module")
def worker(llama, directory):
    worker = Worker(llama, directory)
    yield worker
    worker.close()


def until_hit(ask, ids):
    """Ask until a daemon that is there is found again; return how many tokens hit then."""
    give_up = time.monotonic() + 30
    while not (hit := ask(ids)):
        assert time.monotonic() < give_up, "the daemon was not found"
    return hit


# ------------------------------------------------------------------------------------- sharing


def test_two_processes_share_prefixes_also_of_a_daemon_that_was_killed(daemon, engine, worker):
    daemon.start()
    here = engine().ask
    for seed in (1, 2):
        head, middle, tail = (prompt(length, seed=seed * 10 + length) for length in (40, 30, 20))
        until_hit(worker.ask, prompt(40))  # it has found this daemon
        assert worker.ask(head) == 0
        assert here(joined(head, middle)) == 2 * T
        assert worker.ask(joined(head, middle, tail)) == 4 * T
        assert here(joined(head, middle, tail)) == 5 * T
        daemon.kill()
        assert worker.ask(head) == here(head) == 0
        daemon.start()
        until_hit(here, prompt(40))


def test_only_the_same_tokens_of_the_same_tenant_hit(daemon, llama, worker):
    daemon.start()
    ids = prompt(50, seed=1)
    until_hit(worker.ask, ids)
    other = ids.clone()
    other[0, 20] = ids[0, 20] % (VOCAB - 1) + 1
    with kvstore.connect(daemon.url) as client:
        for tenant, asked, hit in ((None, ids, 3 * T), (None, other, T), ("b", ids, 0)):
            with CachedModel(llama, client, tenant=tenant) as cached:
                assert new_tokens(cached, asked) == new_tokens(llama, asked)
                assert cached.last.hit_tokens == hit


def test_who_may_only_read_hits_what_others_store(daemon, engine):
    daemon.start()
    ids = prompt(40)
    writer, reader = engine(), engine(access="read")
    assert reader.ask(ids) == 0
    assert reader.client.lookup(reader.cached.namespace(), ids[0].int().numpy()) == 0
    assert writer.ask(ids) == 0
    assert reader.ask(ids) == 2 * T
    counts = reader.cached.stats()
    assert counts["offload.read_only"] == 2
    assert "offload.failed" not in counts


# ------------------------------------------------------------------------------------ failures


def test_an_engine_that_starts_first_finds_the_daemon_later(daemon, engine):
    first, ids = engine(), prompt(40)
    assert first.ask(ids) == 0
    assert first.cached.last.miss in ("unreachable", "breaker")
    counts = first.cached.stats()
    assert counts[f"miss.{first.cached.last.miss}"] == 1
    assert counts.get("offload.unreachable", 0) + counts.get("offload.breaker", 0) == 1
    daemon.start()
    assert until_hit(first.ask, ids) == 2 * T
    assert first.client.stats().num_blocks == 2


class At:
    """A client where something happens once, before or after one of its calls."""

    def __init__(self, client, when, name, act):
        self._client, self._when, self._name, self._act = client, when, name, act
        self.armed = False

    def __getattr__(self, name):
        real = getattr(self._client, name)
        if name != self._name or not self.armed:
            return real

        def call(*arguments, **options):
            self.armed = False
            if self._when == "before":
                self._act()
            result = real(*arguments, **options)
            if self._when == "after":
                self._act()
            return result

        return call


def at(engine, when, name, act, **options):
    """Return an engine that knows 40 tokens, and that ``act`` strikes during the next request."""
    made = []
    known = engine(
        wrap=lambda client: made.append(At(client, when, name, act)) or made[0], **options
    )
    known.ask(prompt(40))
    assert known.ask(prompt(40)) == 2 * T
    made[0].armed = True
    return known


LOOKUP = [("before", "acquire"), ("after", "acquire"), ("before", "release")]
OFFLOAD = [
    ("after", "release"),
    ("before", "reserve"),
    ("after", "reserve"),
    ("before", "commit"),
    ("after", "commit"),
]


@pytest.mark.parametrize(("when", "name"), LOOKUP + OFFLOAD)
def test_a_daemon_that_is_killed_during_a_request(when, name, daemon, engine):
    daemon.start()
    struck = at(engine, when, name, daemon.kill)
    longer = joined(prompt(40), prompt(20, seed=1))
    hit = struck.ask(longer)
    miss, counts = struck.cached.last.miss, struck.cached.stats()
    if (when, name) in OFFLOAD:
        assert (hit, miss) == (2 * T, None)
    elif name == "acquire" and when == "before":
        assert hit == 0
        assert miss in REASONS
    else:
        assert (hit, miss) == (0, "expired")  # what was read is not believed
        assert counts["load.expired"] == 1
    stored = struck.cached.last.offloaded_blocks
    failures = {key[1] for key in struck.client.counters() if key[0] == "failures"}
    if name == "commit" or (when, name) == ("after", "reserve"):
        assert stored == (2 if when == "after" and name == "commit" else 0)
        assert stored or "commit" in failures
        assert stored or any(counts.get(f"offload.{reason}") for reason in REASONS)
    else:
        assert stored == 0
        assert any(counts.get(f"offload.{reason}") for reason in REASONS)
    assert struck.ask(longer) == 0

    daemon.start()
    assert until_hit(struck.ask, longer) == 3 * T
    assert struck.client.stats().held_blocks == 0


@pytest.mark.parametrize(("when", "name"), LOOKUP + OFFLOAD)
def test_a_daemon_that_is_stopped_during_a_request(when, name, daemon, engine):
    daemon.start()
    struck = at(engine, when, name, daemon.stop)
    longer = joined(prompt(40), prompt(20, seed=1))
    hit = struck.ask(longer)
    last = struck.cached.last
    if (when, name) == ("before", "acquire"):
        assert (hit, last.miss) == (0, "timeout")
        assert last.lookup_s >= DEADLINE_S
    else:  # a lease that was granted is good while it lasts
        assert (hit, last.miss) == (2 * T, None)
    waited = last.lookup_s + last.load_s + last.offload_s
    assert waited < 2 * DEADLINE_S + 1  # one for the lookup, one for the offload
    assert struck.ask(longer) == 0
    assert struck.cached.last.miss in ("timeout", "breaker")

    daemon.go_on()
    assert until_hit(struck.ask, longer) >= 2 * T
    assert struck.ask(longer) == 3 * T


@pytest.mark.parametrize("act", ["kill", "stop"])
def test_a_daemon_that_cannot_verify_has_not_said_that_blocks_are_corrupt(act, daemon, engine):
    daemon.start()
    struck = at(engine, "before", "verify", getattr(daemon, act), verify="always")
    assert struck.ask(prompt(40)) == 0
    assert struck.cached.last.miss in (
        {"lost", "unreachable", "breaker"} if act == "kill" else {"timeout"}
    )


class Silent:
    """A client whose daemon does not answer: empty records that say why, or an exception."""

    tier_names, block_tokens = ("dram",), T

    def __init__(self, reason, *, raises):
        self._reason, self._raises = reason, raises

    def _record(self, kind, namespace, **more):
        if self._raises:
            raise UnavailableError(self._reason, "no answer")
        nothing = np.empty(0, np.int8), np.empty(0, np.int64)
        return kind(self, namespace, *nothing, 0.0, failure=self._reason, **more)

    def acquire(self, namespace, tokens, *, may_wait=False):
        return self._record(Lease, namespace)

    def prefilled(self, *_):
        pass

    def reserve(self, namespace, tokens, **_):
        return self._record(Reservation, namespace, indices=np.empty(0, np.int32))

    def release(self, lease):
        pass

    def commit(self, reservation):
        return 0


@pytest.mark.parametrize("raises", [False, True])
@pytest.mark.parametrize("reason", REASONS)
def test_why_a_daemon_gave_no_answer_is_counted(reason, raises, llama):
    ids = prompt(40)
    with CachedModel(llama, Silent(reason, raises=raises)) as cached:
        assert new_tokens(cached, ids) == new_tokens(llama, ids)
        assert cached.last.miss == reason
        counts = cached.stats()
        assert counts[f"miss.{reason}"] == counts[f"offload.{reason}"] == counts["prompts"] == 1


# ---------------------------------------------------------------------------------------- demo


@pytest.fixture(scope="module")
def random_model(directory):
    model, tokenizer = models._random_model(torch.float32)
    path = Path(directory, "model")
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


def demo(model, *options):
    command = ["kvstore", "demo", "--daemon", "--model", model, "--tokens", "256", *options]
    return [sys.executable, "-m", *command, "--answer-tokens", "4", "--output", "json"]


def children(pid):
    ids = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return {int(each): Path(f"/proc/{each}/cmdline").read_text() for each in ids}


@pytest.mark.parametrize("given", [False, True])
def test_the_demo_hits_in_another_process(given, random_model, daemon):
    if given:
        daemon.start()
    options = ["--socket", daemon.socket] if given else []
    done = subprocess.run(demo(random_model, *options), stdout=subprocess.PIPE, check=True)
    rows = json.loads(done.stdout)["rows"]
    assert [row["path"] for row in rows] == ["cold", "dram"]
    assert all(row["same_text"] for row in rows)
    assert rows[1]["hit_tokens"] >= 100
    if given:
        with kvstore.connect(daemon.url) as client:
            assert client.stats().num_blocks == 0


def test_a_demo_that_is_stopped_leaves_no_process_behind(random_model):
    with subprocess.Popen(demo(random_model), stderr=subprocess.PIPE, text=True) as process:
        next(line for line in process.stderr if line.startswith("second process"))
        started = children(process.pid)
        assert any("serve" in line for line in started.values())
        assert any("demo_daemon" in line for line in started.values())
        process.terminate()
        process.communicate()
    assert process.returncode == 130
    assert not any(Path(f"/proc/{each}").exists() for each in started)


def test_a_demo_without_its_daemon_says_so(random_model, directory):
    nobody = Path(directory, "nobody.sock")
    done = subprocess.run(
        demo(random_model, "--socket", nobody), stderr=subprocess.PIPE, text=True, check=False
    )
    assert done.returncode == 3
    assert "kvstore serve" in done.stderr


if __name__ == "__main__":
    main(sys.argv[1])
