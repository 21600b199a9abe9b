"""Parts of the connector alone: the fence before blocks are overwritten, the end, and what names blocks."""

from __future__ import annotations

from tests.engines.vllm import offloading  # noqa: F401 - first: vLLM's imports warn of much

# isort: split

import threading
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, Phi3Config

from engine_plugin.vllm import prompts, scheduler, worker
from engine_plugin.vllm.messages import Load, Save, StepMetadata
from engine_plugin.vllm.options import Options
from engine_plugin.vllm.pages import Rank
from engine_plugin.vllm.prompts import Namespaces, engine_settings
from engine_plugin.vllm.scheduler import Scheduler
from engine_plugin.vllm.worker import Worker
from kvstore import KVLayout, Namespace
from kvstore.errors import UsageError

LAYOUT = KVLayout(1, 1, 8, "uint8", 4)
SPACE = Namespace(b"model", LAYOUT)
PATIENCE_S = 20.0
"""Far longer than anything here takes."""


class Reservation:
    """Of all blocks that are asked for."""

    failure = None

    def __init__(self, store: Store, num_blocks: int) -> None:
        self.indices, self.offsets = np.arange(num_blocks), np.arange(num_blocks)
        self.buffers = (None,)
        self._store = store

    def __enter__(self) -> Reservation:
        return self

    def __exit__(self, kind, error, trace) -> None:
        self._store.ended.append("committed" if kind is None else "aborted")


class Store:
    """Says of each reservation how it ended; can be held before it answers."""

    def __init__(self) -> None:
        self.ended: list[str] = []
        self.asked, self.answers = threading.Event(), threading.Event()
        self.answers.set()
        self.closed = False

    def reserve(self, namespace, key, **heads):
        assert not self.closed
        self.asked.set()
        assert self.answers.wait(PATIENCE_S)
        return Reservation(self, len(key) // namespace.key_bytes)

    def close(self) -> None:
        self.closed = True


class Pages:
    """A number for each engine block; a copy can be held while it is under way."""

    layout, num_layers, on_host, rank = LAYOUT, 1, True, Rank(1, 0, 1, stores=True)
    block_bytes = LAYOUT.block_bytes

    def __init__(self) -> None:
        self.content = {block: block for block in range(10)}
        self.copied: list[int] = []
        self.copies, self.goes_on = threading.Event(), threading.Event()
        self.goes_on.set()

    def save(self, buffer, offsets, blocks) -> None:
        self.copies.set()
        assert self.goes_on.wait(PATIENCE_S)
        self.copied += [self.content[block] for block in blocks]


@pytest.fixture
def store():
    return Store()


@pytest.fixture
def pages():
    return Pages()


@pytest.fixture
def rank(store, pages):
    clock = SimpleNamespace(now=0.0)
    rank = Worker(store, pages, {}, lambda: clock.now)
    yield rank
    store.answers.set()
    pages.goes_on.set()
    rank.close()
    assert not [t for t in threading.enumerate() if t.name.startswith("kvstore-")]


def save(number: int, *blocks: int) -> StepMetadata:
    """A step that fills ``blocks`` of a new prompt."""
    return StepMetadata(
        namespaces={number: SPACE},
        keys={number: bytes(len(blocks) * SPACE.key_bytes)},
        saves=[Save(number, number, 0, list(blocks))],
    )


def fill(rank: Worker, step: StepMetadata) -> None:
    rank.begin(step)
    rank.finish(step)


def results(rank: Worker):
    rank._saver.submit(int).result(PATIENCE_S)
    rank.take_received()
    return rank.take_results()


class Overwriting(threading.Thread):
    """A step that writes to a block, once the worker lets it begin."""

    def __init__(
        self, rank: Worker, pages: Pages, block: int, step: StepMetadata | None = None
    ) -> None:
        super().__init__(name="step")
        self._rank, self._pages, self._block = rank, pages, block
        self._step = step or StepMetadata()
        self._step.overwritten = [block]
        self.start()

    def run(self) -> None:
        self._rank.begin(self._step)
        self._pages.content[self._block] = 99


def ends_within(thread: threading.Thread, timeout_s: float) -> bool:
    thread.join(timeout_s)
    return not thread.is_alive()


def test_a_copy_that_has_begun_is_waited_for_however_long_it_takes(rank, store, pages):
    pages.goes_on.clear()
    fill(rank, save(1, 3, 4))
    assert pages.copies.wait(PATIENCE_S)
    step = Overwriting(rank, pages, 4)
    assert not ends_within(step, 4 * worker.FENCE_S)
    pages.goes_on.set()
    assert ends_within(step, PATIENCE_S)
    found = results(rank)
    assert pages.copied == [3, 4]
    assert store.ended == ["committed"]
    assert found.saves == {1: 1}
    assert not found.failed_saves


def test_a_copy_that_has_not_begun_is_given_up(rank, store, pages):
    store.answers.clear()
    fill(rank, save(1, 3, 4))
    assert store.asked.wait(PATIENCE_S)
    step = Overwriting(rank, pages, 4)
    assert ends_within(step, PATIENCE_S)
    store.answers.set()
    found = results(rank)
    assert pages.copied == []
    assert store.ended == ["aborted"]
    assert (found.saves, found.failed_saves) == ({1: 1}, {1})
    counted = rank.take_stats().data
    assert counted["skipped_blocks"] == 2
    assert not counted["failed_saves"]
    assert not counted["saved_blocks"]


def test_only_saves_of_blocks_that_are_overwritten_are_waited_for(rank, store, pages):
    store.answers.clear()
    fill(rank, save(1, 3, 4))
    assert store.asked.wait(PATIENCE_S)
    rank.begin(StepMetadata(overwritten=[5]))
    rank.begin(StepMetadata())
    store.answers.set()
    assert not results(rank).failed_saves
    assert store.ended == ["committed"]


def test_what_a_copy_that_begins_within_the_wait_reads_is_not_overwritten(
    rank, store, pages, monkeypatch
):
    monkeypatch.setattr(worker, "FENCE_S", PATIENCE_S)
    store.answers.clear()
    fill(rank, save(1, 3, 4))
    step = Overwriting(rank, pages, 3)
    assert store.asked.wait(PATIENCE_S)
    store.answers.set()
    assert ends_within(step, PATIENCE_S)
    assert not results(rank).failed_saves
    assert pages.copied == [3, 4]
    assert pages.content[3] == 99


def test_all_that_is_queued_at_the_end_is_stored(rank, store, pages):
    pages.goes_on.clear()
    for number in range(1, 6):
        fill(rank, save(number, number, number + 1))
    assert pages.copies.wait(PATIENCE_S)
    end = threading.Thread(target=rank.close, name="end")
    end.start()
    assert not ends_within(end, 0.05)
    assert not store.closed
    pages.goes_on.set()
    assert ends_within(end, PATIENCE_S)
    assert store.closed
    assert store.ended == ["committed"] * 5
    assert pages.copied == [1, 2, 2, 3, 3, 4, 4, 5, 5, 6]


@pytest.mark.parametrize(
    ("loaded", "new", "grown", "resumed", "expected"),
    [
        ([3], [], [], [], {3}),
        ([], [2, 4], [], [], {4}),
        ([], [], [5], [], {5}),
        ([], [], [], [2, 3, 4], {3, 4}),
        ([6], [3, 7], [8], [2], set()),
    ],
    ids=["loaded", "of a new request", "of a running request", "of a resumed one", "none"],
)
def test_blocks_that_a_step_writes_to(loaded, new, grown, resumed, expected):
    half = object.__new__(Scheduler)
    half._width = 4
    half._saves = {1: SimpleNamespace(blocks=[2, 3]), 2: SimpleNamespace(blocks=[4, 5])}
    half._step = StepMetadata(loads=[Load(9, 1, "a", 0, loaded, "sync")])
    output = SimpleNamespace(
        scheduled_new_reqs=[SimpleNamespace(block_ids=(new,), num_computed_tokens=4)],
        scheduled_cached_reqs=SimpleNamespace(
            req_ids=["b", "c", "d"],
            resumed_req_ids={"d"},
            num_computed_tokens=[8, 8, 4],
            new_block_ids=[None, (grown,), (resumed,)],
        ),
    )
    assert set(half._overwritten(output)) == expected


def configuration(
    *, config=None, dtype=torch.float16, kv_dtype="fp8", max_tokens=4096, architectures=("A",)
):
    model = SimpleNamespace(
        hf_config=config or LlamaConfig(),
        dtype=dtype,
        quantization=None,
        max_model_len=max_tokens,
        architectures=list(architectures),
        multimodal_config=None,
    )
    cache = SimpleNamespace(cache_dtype=kv_dtype)
    return SimpleNamespace(model_config=model, cache_config=cache, lora_config=None)


def long_rope() -> Phi3Config:
    factors = [1.0] * 48
    scaling = {"type": "longrope", "short_factor": factors, "long_factor": factors}
    return Phi3Config(rope_scaling=scaling, original_max_position_embeddings=4096, pad_token_id=0)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"dtype": torch.float16}, {"dtype": torch.bfloat16}),
        ({"architectures": ["A"]}, {"architectures": ["B"]}),
        ({"kv_dtype": "fp8"}, {"kv_dtype": "auto"}),
        ({"config": long_rope()}, {"config": long_rope(), "max_tokens": 131072}),
    ],
    ids=["dtype beside an explicit KV dtype", "architectures", "KV dtype", "longrope's length"],
)
def test_engines_that_compute_otherwise_do_not_share_blocks(one, other):
    assert engine_settings(configuration(**one)) != engine_settings(configuration(**other))
    assert engine_settings(configuration(**one)) == engine_settings(configuration(**one))


def test_engines_for_longer_prompts_share_blocks_where_that_decides_nothing():
    assert engine_settings(configuration()) == engine_settings(configuration(max_tokens=131072))


@pytest.fixture
def adapter(tmp_path):
    (tmp_path / "adapter_config.json").write_text('{"r": 8}')
    (tmp_path / "adapter_model.safetensors").write_bytes(b"weights")
    return tmp_path


def test_an_adapter_whose_files_have_changed_is_refused(adapter, monkeypatch):
    read = []
    monkeypatch.setattr(prompts, "adapter_digest", lambda path: read.append(path) or b"a" * 32)
    options = Options(model_digest="0" * 32)
    namespaces = Namespaces(configuration(), options, LAYOUT)

    def space(**more):
        lora = {"lora_path": str(adapter), "lora_int_id": 1, "lora_name": "one"} | more
        return namespaces.of(
            SimpleNamespace(
                prompt_token_ids=[1],
                prompt_embeds=None,
                resumable=False,
                cache_salt=None,
                lora_request=SimpleNamespace(**{"load_inplace": False} | lora),
            )
        )

    first = space()
    assert space() is first
    assert len(read) == 1
    (adapter / "adapter_model.safetensors").write_bytes(b"other weights")
    for _ in range(2):
        with pytest.raises(UsageError, match="have changed"):
            space()
    space(lora_int_id=2)
    assert len(read) == 2
    for _ in range(2):
        space(load_inplace=True)  # vLLM has read them again, once
    assert len(read) == 3


def test_saves_begun_before_a_step_are_fenced_as_well(rank, pages):
    pages.goes_on.clear()
    step = save(1, 3, 4)
    step.early_saves, step.saves = step.saves, []
    overwriting = Overwriting(rank, pages, 4, step)
    assert pages.copies.wait(PATIENCE_S)
    assert not ends_within(overwriting, 4 * worker.FENCE_S)
    pages.goes_on.set()
    assert ends_within(overwriting, PATIENCE_S)
    assert not results(rank).failed_saves
    assert pages.copied == [3, 4]


def test_what_was_given_up_is_not_waited_for_again(rank, store):
    store.answers.clear()
    fill(rank, save(1, 3, 4, 5))
    assert store.asked.wait(PATIENCE_S)
    waits = []
    (job,) = rank._waiting.values()
    wait_for = job._changed.wait_for
    job._changed.wait_for = lambda over, timeout=None: (
        waits.append(over()) or wait_for(over, timeout)
    )
    for block in (3, 4, 5):
        rank.begin(StepMetadata(overwritten=[block]))
    assert waits == [False, True, True, True]  # the first fence looks twice


def test_saves_that_were_reported_are_forgotten(rank):
    for number in range(1, 9):
        fill(rank, save(number, number))
        results(rank)
    assert not rank._waiting


@pytest.mark.parametrize(
    ("given", "complaint"),
    [
        ({"kvstore.skipwrite": True}, "has no kvstore.skipwrite"),
        ({"kvstore.skip_read": "yes"}, "'yes' is no bool"),
        ({"kvstore.skip_write": 1}, "1 is no bool"),
        ({"kvstore.expect_tokens": -4}, "-4 is no int"),
        ({"kvstore.expect_tokens": True}, "True is no int"),
        ({"kvstore.skip_read": True, "kvstore.expect_tokens": 64, "other": "x"}, ""),
    ],
)
def test_parameters_of_requests_that_mean_nothing_are_named(given, complaint, caplog):
    scheduler._check_parameters("r1", given)
    told = [record.getMessage() for record in caplog.records]
    assert len(told) == bool(complaint)
    assert all(complaint in message for message in told)


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        ({}, (50, None)),
        ({"kvstore.priority": 80, "kvstore.ttl_s": 60}, (80, 60)),
        ({"kvstore.ttl_s": 0.5}, (50, 0.5)),
        ({"kvstore.priority": 101}, None),
        ({"kvstore.priority": "80"}, None),
        ({"kvstore.ttl_s": 0}, None),
        ({"kvstore.ttl_s": "60", "kvstore.priority": 80}, None),
    ],
)
def test_what_cannot_be_kept_as_it_was_asked_is_not_stored(given, kept, caplog):
    scheduler._check_parameters("r1", given)
    assert scheduler._retention("r1", given) == kept
    assert len(caplog.records) == (kept is None)
