"""The scheduler alone: how long a request waits for blocks that the daemon loads from a slower tier."""

from __future__ import annotations

from tests.engines.vllm import offloading  # noqa: F401 - first: vLLM's imports warn of much

# isort: split

from types import SimpleNamespace

import numpy as np
import pytest

from engine_plugin.vllm.options import Options
from engine_plugin.vllm.scheduler import POLL_S, Scheduler
from kvstore import KVLayout, Namespace
from kvstore.lease import LEAST_PATIENCE_S, PATIENCE, Lease
from kvstore.testing import FakeClock

WIDTH = 4
SPACE = Namespace(b"model", KVLayout(1, 1, 8, "uint8", WIDTH))
COMING, EXPECTED_S = 4, 2.0
PATIENCE_S = PATIENCE * EXPECTED_S + LEAST_PATIENCE_S


class Store:
    """Loads the first four blocks of every prompt; until ``loaded`` who cannot wait gets none."""

    def __init__(self) -> None:
        self.loaded = False
        self.asked: list[bool] = []
        """Whether each who asked could wait."""

    def acquire(self, namespace, key, *, may_wait):
        self.asked.append(may_wait)
        count = COMING if self.loaded else 0
        waits = {"coming_blocks": COMING, "ready_in_s": EXPECTED_S}
        return Lease(
            self,
            namespace,
            np.zeros(count, np.int8),
            np.arange(count),
            float("inf"),
            **waits if may_wait and not self.loaded else {},
        )


@pytest.fixture
def clock():
    return FakeClock()


@pytest.fixture
def store():
    return Store()


@pytest.fixture
def find(store, clock):
    """A function that asks for a request of ten blocks, of which vLLM has so many itself."""
    space = SimpleNamespace(of=lambda request: SPACE, block_tokens=WIDTH)
    half = Scheduler(store, space, Options(), None, num_ranks=1, block_bytes=32, clock=clock)
    tokens = list(range(10 * WIDTH))
    request = SimpleNamespace(
        request_id="a",
        kv_transfer_params=None,
        mm_features=None,
        all_token_ids=tokens,
        num_tokens=len(tokens),
        skip_reading_prefix_cache=False,
    )
    half.add(request)
    return lambda local_blocks=0: half.find(request, local_blocks * WIDTH)[0]


def test_what_comes_in_time_is_loaded(find, store, clock):
    assert find() is None
    clock.advance(EXPECTED_S / 2)
    assert find() is None
    assert store.asked == [True], "it is not asked before that can have come"
    store.loaded = True
    clock.advance(EXPECTED_S / 2)
    assert find() == COMING * WIDTH


def test_it_waits_a_little_longer_than_expected_and_no_more(find, store, clock):
    assert find() is None
    clock.advance(EXPECTED_S)
    assert find() is None
    clock.advance(PATIENCE_S - EXPECTED_S - POLL_S)
    assert find() is None
    clock.advance(POLL_S)
    assert find() == 0
    assert store.asked == [True, True, False]


@pytest.mark.parametrize(("local_blocks", "goes_on"), [(3, False), (4, True), (6, True)])
def test_what_vllm_has_itself_meanwhile_is_not_waited_for(
    find, store, clock, local_blocks, goes_on
):
    assert find() is None
    clock.advance(EXPECTED_S)
    found = [find(local_blocks) for _ in range(2)]
    assert found == [None, 0 if goes_on else None]
    assert store.asked == [True, True, *[False] * goes_on]
