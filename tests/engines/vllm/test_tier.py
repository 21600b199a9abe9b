"""The tier ``kvstore`` under vLLM's real managers of tiers, with real daemons; and a whole engine with it."""

from __future__ import annotations

from tests.engines.vllm import offloading  # first: vLLM's imports warn of much

# isort: split
import copy
import threading
from contextlib import ExitStack
from itertools import combinations, count

import numpy as np
import pytest
import torch
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.config import build_offloading_config
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheTensor,
)
from vllm.v1.kv_offload.base import LookupResult, ReqContext, ScheduleEndContext, make_offload_key
from vllm.v1.kv_offload.tiering.factory import SecondaryTierFactory
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

import kvstore
from engine_plugin.vllm import register
from engine_plugin.vllm.chunks import config_of_caller, make_namespaces, parse_tier_options
from engine_plugin.vllm.tier import KVStoreTier
from kvstore.errors import ConfigError, LeaseExpiredError, UsageError
from kvstore.testing.daemon import DaemonThread
from tests.engines.vllm import child
from tests.engines.vllm.engine import wait_until
from tests.engines.vllm.messages import Prompt
from tests.engines.vllm.workload import Known, draw

BLOCK, PAGE_BYTES = 32, 2 * 32 * 2 * 64 * 4
"""Tokens of a block; bytes of it in one of the model's two layers."""
CHUNK_BYTES = 2 * PAGE_BYTES
HIT, MISS, RETRY = LookupResult.HIT, LookupResult.MISS, LookupResult.RETRY
NAMES = ["model.layers.0.self_attn.attn", "model.layers.1.self_attn.attn"]


@pytest.fixture(autouse=True)
def _own_home(tmp_path_factory, monkeypatch):
    """Digests of weights are remembered there."""
    monkeypatch.setenv("HOME", str(tmp_path_factory.getbasetemp()))


@pytest.fixture
def vllm_config_of(llama):
    """A function that makes an engine's configuration."""
    register()

    def make(extra=None, **arguments):
        given = {"model": llama, "dtype": "float32", "block_size": BLOCK, "enforce_eager": True}
        given |= {"skip_tokenizer_init": True, "max_model_len": 2048}
        given |= {"prefix_caching_hash_algo": "sha256_cbor"}
        made = EngineArgs(**{**given, **arguments}).create_engine_config()
        made.kv_transfer_config = KVTransferConfig(
            kv_connector="OffloadingConnector",
            kv_role="kv_both",
            kv_connector_extra_config={"cpu_bytes_to_use": 16 * CHUNK_BYTES, **(extra or {})},
        )
        return made

    return make


def cache_config():
    """What vLLM finds for the model: one group of two layers."""
    attention = FullAttentionSpec(
        block_size=BLOCK, num_kv_heads=2, head_size=64, dtype=torch.float32
    )
    assert attention.page_size_bytes == PAGE_BYTES
    tensor = KVCacheTensor(8 * CHUNK_BYTES, NAMES, 8 * PAGE_BYTES, PAGE_BYTES)
    return KVCacheConfig(8, [tensor], [KVCacheGroupSpec(NAMES, attention)], kv_cache_layout="LBHNC")


def key_of(number):
    return make_offload_key(number.to_bytes(32, "big"), 0)


def keys_of(*numbers):
    return [key_of(number) for number in numbers]


def bytes_of(number):
    return np.random.default_rng(number).integers(0, 255, CHUNK_BYTES, np.uint8)


class Side:
    """The scheduler's side of an engine: vLLM's own managers, a CPU tier of 16 chunks, and ours."""

    def __init__(self, vllm_config):
        self.spec = TieringOffloadingSpec(build_offloading_config(vllm_config, cache_config()))
        self.manager = self.spec.get_manager()
        (self.tier,) = self.manager.secondary_tiers
        assert isinstance(self.tier, KVStoreTier)
        self._num_requests = 0

    def request(self, **parameters):
        """Begin a request whose prompt has the chunks 1, 2, 3, …"""
        self._num_requests += 1
        request = ReqContext(f"{self._num_requests}", parameters or None)
        for number in range(1, 100):
            request.set_offload_key_position(key_of(number), number * BLOCK)
        self.manager.on_new_request(request)
        return request

    def step(self):
        self.manager.on_schedule_end(ScheduleEndContext((), ()))

    def finish(self, request):
        self.manager.on_request_finished(request)

    def begin_store(self, request, keys):
        """Have the worker's copies of ``keys`` arrive in vLLM's CPU tier."""
        prepared = self.manager.prepare_store(keys, request)
        rows = self.manager.primary_tier.get_kv_memoryview()
        for key, row in zip(prepared.keys_to_store, prepared.store_spec.chunk_ids, strict=True):
            np.asarray(rows)[row] = bytes_of(int.from_bytes(key[:32], "big")).view(np.int8)
        self.manager.complete_store(prepared.keys_to_store, request)

    def store(self, *numbers, **parameters):
        """Compute and offload chunks, and wait until our tier has done its part."""
        request = self.request(**parameters)
        self.begin_store(request, keys_of(*numbers))
        self.settle()
        self.finish(request)

    def settle(self):
        """Step until no job is under way."""

        def settled():
            self.step()
            return not self.manager.has_pending_work()

        wait_until(settled)

    def find(self, request, *numbers):
        """Look chunks up until vLLM knows where they are, and has them in its CPU tier."""
        found = []

        def known():
            found[:] = [self.manager.lookup(key, request) for key in keys_of(*numbers)]
            self.step()
            return all(result in (HIT, MISS) for result in found)

        wait_until(known)
        return found

    def hits(self, *numbers, **parameters):
        """Return which chunks a new request gets, having checked their bytes."""
        request = self.request(**parameters)
        results = zip(numbers, self.find(request, *numbers), strict=True)
        hits = [number for number, result in results if result is HIT]
        self.check(request, *hits)
        self.finish(request)
        return hits

    def check(self, request, *numbers):
        keys = keys_of(*numbers)
        chunks = self.manager.prepare_load(keys, request).chunk_ids
        rows = np.asarray(self.manager.primary_tier.get_kv_memoryview()).view(np.uint8)
        for number, row in zip(numbers, chunks, strict=True):
            np.testing.assert_array_equal(rows[row], bytes_of(number))
        self.manager.complete_load(keys, request)

    def close(self):
        self.manager.shutdown()


@pytest.fixture
def side_of(vllm_config_of):
    """A function that starts the scheduler's side of an engine."""
    with ExitStack() as stack:

        def start(url, extra=None, tier=None, **arguments):
            tiers = {"secondary_tiers": [{"type": "kvstore", "url": url, **(tier or {})}]}
            side = Side(vllm_config_of({**tiers, **(extra or {})}, **arguments))
            stack.callback(side.close)
            return side

        yield start
    names = [thread.name for thread in threading.enumerate()]
    assert not [name for name in names if name.startswith(("kvstore-tier", "vllm_offloading"))]


@pytest.fixture
def daemon(tmp_path):
    with DaemonThread(tmp_path / "kv.sock", 32 * CHUNK_BYTES) as daemon:
        yield daemon


class TestWithADaemon:
    def test_another_engine_finds_the_same_bytes(self, side_of, daemon):
        side_of(daemon.url).store(1, 2, 3)
        assert daemon.pool.stats().num_blocks == 3
        other = side_of(daemon.url)
        assert other.hits(1, 2, 3, 4) == [1, 2, 3]
        assert other.hits(2, 9) == [2]

    def test_what_is_there_is_not_stored_again(self, side_of, daemon):
        side_of(daemon.url).store(1, 2)
        side_of(daemon.url).store(1, 2, 3)
        assert daemon.pool.stats().num_blocks == 3
        assert daemon.pool.stats().counts["stored_blocks",] == 3

    def test_an_engine_finds_again_what_its_own_cpu_tier_had_no_room_for(self, side_of, daemon):
        side = side_of(daemon.url)
        side.store(*range(1, 13))
        side.store(*range(13, 25))
        assert side.hits(*range(1, 9)) == list(range(1, 9))

    def test_keys_of_the_store_are_the_hashes_of_vllm(self, side_of, daemon):
        side = side_of(daemon.url)
        side.store(7)
        (namespace,) = side.tier._namespaces.values()
        assert namespace.keys == "hash"
        with kvstore.connect(daemon.url, on_failure="raise") as client:
            assert client.lookup(namespace, (7).to_bytes(32, "big")) == BLOCK
            assert client.lookup(namespace, (8).to_bytes(32, "big")) == 0

    def test_a_chunk_that_was_evicted_before_it_was_loaded(self, side_of, daemon):
        side_of(daemon.url).store(1, 2, 3)
        side = side_of(daemon.url)
        request = side.request()
        wait_until(lambda: looked_up(side, request, 1, 2, 3))
        daemon.pool.evict(side.tier._namespaces[0], key_of(2)[:32])
        assert side.find(request, 1, 2, 3) == [HIT, MISS, HIT]
        side.check(request, 1, 3)

    def test_the_first_chunks_of_a_prompt_stay_longest(self, side_of, tmp_path):
        with DaemonThread(tmp_path / "small.sock", 4 * CHUNK_BYTES) as daemon:
            side_of(daemon.url).store(*range(1, 7))
            assert side_of(daemon.url).hits(*range(1, 7)) == [1, 2, 3, 4]
            side_of(daemon.url).hits(*range(1, 5))
            side_of(daemon.url).store(21, 22)
            assert side_of(daemon.url).hits(1, 2, 3, 4, 21, 22) == [1, 2, 21, 22]

    def test_blocks_of_a_chunk_together(self, side_of, daemon):
        side = side_of(daemon.url, {"blocks_per_chunk": 2})
        assert side.tier._namespaces[0].layout.block_bytes == 2 * CHUNK_BYTES
        assert side.tier._namespaces[0].layout.block_tokens == 2 * BLOCK

    def test_tenants_see_only_their_own(self, side_of, daemon):
        side_of(daemon.url, tier={"tenant": "one"}).store(1)
        assert side_of(daemon.url).hits(1) == []
        assert side_of(daemon.url, tier={"tenant": "two"}).hits(1) == []
        assert side_of(daemon.url, tier={"tenant": "one"}).hits(1) == [1]

    def test_parameters_of_a_request(self, side_of, daemon):
        side = side_of(daemon.url)
        side.store(1, **{"kvstore.skip_write": True})
        assert daemon.pool.stats().num_blocks == 0
        side.store(2)
        other = side_of(daemon.url)
        assert other.hits(2, **{"kvstore.skip_read": True}) == []
        assert other.hits(2) == [2]

    def test_after_a_reset_the_old_chunks_are_not_found(self, side_of, daemon):
        side, other = side_of(daemon.url), side_of(daemon.url)
        side.store(1)
        request = side.request()
        assert side.find(request, 1) == [HIT]
        side.manager.reset_cache()
        assert side.find(request, 1) == [MISS]
        assert side.hits(1) == []
        side.store(1)
        assert daemon.pool.stats().num_blocks == 2
        assert other.hits(1) == [1]

    def test_the_rows_belong_to_vllm_again_after_the_shutdown(self, vllm_config_of, daemon):
        tiers = {"secondary_tiers": [{"type": "kvstore", "url": daemon.url}]}
        side = Side(vllm_config_of(tiers))
        side.store(1)
        view = side.manager.primary_tier.get_kv_memoryview()
        side.close()
        with pytest.raises(ValueError, match="released"):
            view.tobytes()


class TestFailures:
    def test_without_a_daemon_everything_misses(self, side_of, tmp_path):
        side = side_of(f"unix://{tmp_path / 'nobody.sock'}")
        side.store(1, 2)
        assert side.hits(1, 2) == [1, 2]  # of vLLM's own CPU tier
        assert side.hits(3) == []

    def test_a_daemon_that_is_killed_and_comes_back(self, side_of, start_daemon):
        daemon = start_daemon()
        side_of(daemon.url).store(1, 2, 3)
        side = side_of(daemon.url)
        request = side.request()
        wait_until(lambda: looked_up(side, request, 1, 2, 3))
        daemon.kill()
        assert side.find(request, 1, 2, 3) == [MISS, MISS, MISS]
        side.finish(request)
        side.store(4)
        daemon.start()
        numbers, tried = count(10), []

        def stored_again():
            tried.append(next(numbers))
            side.store(tried[-1])
            return daemon.num_blocks > 0

        wait_until(stored_again)
        assert side_of(daemon.url).hits(1, 4, *tried[-2:]) == tried[-1:]
        daemon.close()

    def test_a_lease_that_ended_early(self, side_of, daemon):
        side_of(daemon.url).store(1)
        side = side_of(daemon.url)
        store = Watched(side.tier)

        def release(lease):
            store.real.release(lease)
            raise LeaseExpiredError("late")

        store.release = release
        side.tier._store = store
        assert side.hits(1) == []
        side.tier._store = store.real
        assert side.hits(1) == [1]

    def test_what_was_stored_counts_only_when_it_was_committed(self, side_of, daemon):
        side = side_of(daemon.url)
        store = Watched(side.tier)

        def commit(reservation):
            reservation.failure = "lost"
            return 0

        store.commit = commit
        side.tier._store = store
        results = []
        taken = side.tier.get_finished_jobs
        side.tier.get_finished_jobs = lambda: results.extend(found := taken()) or found
        side.store(1)
        assert [result.success for result in results] == [False]

    def test_no_call_waits_for_the_daemon(self, side_of, daemon):
        side_of(daemon.url).store(1)
        side = side_of(daemon.url)
        store = side.tier._store = Watched(side.tier)
        request = side.request()
        assert side.manager.lookup(key_of(1), request) is RETRY
        store.open.clear()
        side.step()
        assert [side.manager.lookup(key_of(1), request) for _ in range(3)] == [RETRY] * 3
        side.begin_store(request, keys_of(2))
        store.entered.acquire(timeout=30)
        store.entered.acquire(timeout=30)  # both threads wait
        side.step()
        side.finish(request)
        assert side.manager.has_pending_work()
        store.open.set()
        side.settle()
        assert side.hits(1, 2) == [1, 2]
        assert len(store.callers) == 3
        assert threading.current_thread() not in store.callers

    @pytest.mark.parametrize("end", ["reset_cache", "shutdown"])
    def test_the_end_waits_for_copies(self, vllm_config_of, daemon, end):
        tiers = {"secondary_tiers": [{"type": "kvstore", "url": daemon.url}]}
        side = Side(vllm_config_of(tiers))
        store = side.tier._store = Watched(side.tier)
        store.open.clear()
        request = side.request()
        side.begin_store(request, keys_of(1))
        assert store.entered.acquire(timeout=30)
        ending = threading.Thread(target=getattr(side.manager, end))
        ending.start()
        ending.join(0.2)
        assert ending.is_alive()
        store.open.set()
        ending.join(30)
        assert not ending.is_alive()
        assert daemon.pool.stats().num_blocks == 1
        if end == "reset_cache":
            side.close()


class Watched:
    """A tier's client that lets calls through while ``open`` is set, and notes who called."""

    def __init__(self, tier):
        self.real = tier._store
        self.open, self.entered = threading.Event(), threading.Semaphore(0)
        self.open.set()
        self.callers = set()

    def __getattr__(self, name):
        method = getattr(self.real, name)
        if name not in ("lookup", "acquire", "reserve"):
            return method

        def call(*arguments):
            self.callers.add(threading.current_thread())
            self.entered.release()
            assert self.open.wait(30)
            held = method(*arguments)
            if name != "lookup":
                held.store = self
            return held

        return call

    def release(self, lease):
        lease.store = self.real
        self.real.release(lease)

    def commit(self, reservation):
        reservation.store = self.real
        return self.real.commit(reservation)


def looked_up(side, request, *numbers):
    """Whether the daemon has answered; the loads begin at the next step only."""
    results = [side.manager.lookup(key, request) for key in keys_of(*numbers)]
    if RETRY in results:
        side.step()
    return RETRY not in results


class TestNames:
    def digest(self, vllm_config, config=None, chunk_bytes=CHUNK_BYTES, **options):
        config = config or build_offloading_config(vllm_config, cache_config())
        found = make_namespaces(vllm_config, config, chunk_bytes, parse_tier_options(options))
        return found[0].digest

    def test_engines_alike_have_the_same(self, vllm_config_of):
        assert self.digest(vllm_config_of()) == self.digest(vllm_config_of(max_num_seqs=7))

    def test_whatever_decides_the_bytes_makes_another(self, vllm_config_of, tmp_path):
        from tests.engines.vllm.models import write_model

        one = vllm_config_of()
        config = build_offloading_config(one, cache_config())
        found = {
            "as it is": self.digest(one),
            "weights": self.digest(
                vllm_config_of(model=str(write_model(tmp_path / "other", "llama", seed=1)))
            ),
            "named": self.digest(one, model_digest="0123456789abcdef"),
            "tenant": self.digest(one, tenant="a"),
            "dtype": self.digest(vllm_config_of(dtype="bfloat16")),
            "chunk": self.digest(vllm_config_of({"blocks_per_chunk": 2})),
            "row": self.digest(one, chunk_bytes=2 * CHUNK_BYTES),
            "order": self.digest(one, changed(config, kv_cache_layout="LBNHC")),
            "canonical": self.digest(one, changed(config, canonical_layout=True)),
            "ranks": self.digest(one, with_ranks(config, tp_size=2)),
            "rope": self.digest(
                vllm_config_of(
                    hf_overrides={"rope_parameters": {"rope_type": "default", "rope_theta": 9e4}}
                )
            ),
        }
        same = [(a, b) for a, b in combinations(found, 2) if found[a] == found[b]]
        assert not same

    def test_ranks_share_where_vllms_layout_is_the_same_for_all(self, vllm_config_of):
        one = vllm_config_of()
        config = build_offloading_config(one, cache_config())
        agnostic = with_ranks(config, is_parallelism_agnostic=True)
        both = [changed(agnostic, canonical_layout=flag) for flag in (False, True)]
        direct, canonical = ([c, with_ranks(c, tp_size=2)] for c in both)
        assert len({self.digest(one, c) for c in direct}) == 2
        assert len({self.digest(one, c) for c in canonical}) == 1

    @pytest.mark.parametrize("algorithm", ["xxhash", "xxhash_cbor"])
    def test_short_hashes_are_refused(self, vllm_config_of, algorithm):
        with pytest.raises(UsageError, match="sha256_cbor"):
            Side(with_tier(vllm_config_of, prefix_caching_hash_algo=algorithm))

    def test_adapters_are_refused(self, vllm_config_of):
        with pytest.raises(UsageError, match="adapters"):
            Side(with_tier(vllm_config_of, enable_lora=True))

    def test_rows_that_tokens_do_not_divide(self, vllm_config_of):
        one = vllm_config_of()
        config = changed(build_offloading_config(one, cache_config()))
        group = changed(config.groups[0], tokens_per_block=48)
        config = changed(config, groups=(group,))
        (namespace,) = make_namespaces(one, config, 4096, parse_tier_options({})).values()
        assert namespace.layout.block_bytes == 4096

    def test_without_a_configuration_nothing_is_guessed(self):
        with pytest.raises(UsageError, match="KVStoreConnector"):
            config_of_caller()


class TestOptions:
    @pytest.mark.parametrize(
        ("given", "message"),
        [
            ({"tennant": "a"}, "did you mean 'tenant'"),
            ({"root_dir": "/"}, "known: url, model_digest, tenant"),
            ({"load": "sync"}, "no option 'load'"),
            ({"tenant": 5}, "tenant=5"),
            ({"url": "udp://x"}, "no address"),
        ],
    )
    def test_wrong_ones_are_an_error_at_the_start(self, vllm_config_of, given, message):
        with pytest.raises(ConfigError, match=message):
            Side(with_tier(vllm_config_of, given))


def test_registering_twice_changes_nothing():
    register()
    register()
    assert SecondaryTierFactory.get_tier_class({"type": "kvstore"}) is KVStoreTier


def with_tier(vllm_config_of, tier=None, **arguments):
    return vllm_config_of({"secondary_tiers": [{"type": "kvstore", **(tier or {})}]}, **arguments)


def changed(config, **fields):
    found = copy.copy(config)
    for name, value in fields.items():
        assert hasattr(found, name)
        object.__setattr__(found, name, value)
    return found


def with_ranks(config, **fields):
    return changed(config, parallel=changed(config.parallel, **fields))


@pytest.mark.parametrize(("local", "blocks_per_chunk"), [(False, 1), (True, 2)])
def test_a_second_engine_gets_what_the_first_has_computed(
    start_engine, start_daemon, reference, monkeypatch, local, blocks_per_chunk
):
    """``local``: whether vLLM keeps prefixes on the device, too."""
    monkeypatch.setattr(child, "main", offloading.main)
    daemon = start_daemon()
    width = BLOCK * blocks_per_chunk
    options = {
        "url": daemon.url,
        "block_tokens": BLOCK,
        "prefix_caching": local,
        "connector": {"blocks_per_chunk": blocks_per_chunk},
    }
    system = draw(1, 150)
    prompts = [Prompt(tokens=system + draw(seed, 20 * seed)) for seed in range(2, 8)]
    right = [answer.tokens for answer in reference.generate(*prompts)]
    known = Known(width)

    first = start_engine(**options)
    for prompt, tokens in zip(prompts, right, strict=True):
        (answer,) = first.generate(prompt)
        assert answer.tokens == tokens
        known.add(prompt)
        wait_until(lambda: stepped(first, daemon, known.num_blocks))
    first.close()

    second = start_engine(**options)
    for prompt, tokens in zip(prompts, right, strict=True):
        (answer,) = second.generate(prompt)
        assert answer.tokens == tokens
        assert answer.cached_tokens == (len(prompt.tokens) - 1) // width * width
    metrics = second.metrics()
    hits = metrics["external_prefix_cache_hits"] + metrics["prefix_cache_hits"]
    assert hits == sum((len(prompt.tokens) - 1) // width * width for prompt in prompts)
    daemon.kill()
    assert [a.tokens for a in second.generate(*prompts)] == right
    second.close()


def stepped(engine, daemon, num_blocks):
    """Whether so many chunks are stored. The engine stores when it takes a step, so it gets one to take."""
    engine.generate(Prompt(tokens=(7, 8, 9), max_tokens=1))
    return daemon.num_blocks == num_blocks
