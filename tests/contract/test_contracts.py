"""The contract suites of kvstore.testing, for everything in the product that implements them."""

from __future__ import annotations

import threading
import time

import pytest

import kvstore
from kvstore.testing import ManualMover, small_pool
from kvstore.testing.contracts import PAGE, ClientContract, OrderContract, StoreContract
from kvstore.tiers.dram import DramStore
from kvstore.tiers.mover import InlineMover, ThreadMover
from kvstore.tiers.shared import SharedDramStore
from radix import ARC, LFU, LRU, S3FIFO, SLRU, CostAware


class TestDramStore(StoreContract):
    def make_store(self, capacity_bytes):
        return DramStore(capacity_bytes, prefault=True)


class TestSharedDramStore(StoreContract):
    def make_store(self, capacity_bytes):
        return SharedDramStore(capacity_bytes, time.monotonic, prefault=True)


class TestGpuStoreOnTheCpuDevice(StoreContract):
    device = "cpu"

    def make_store(self, capacity_bytes):
        pytest.importorskip("torch")
        from kvstore.tiers.gpu import GpuStore

        return GpuStore(capacity_bytes, self.device)

    def raw(self, store):
        return store.buffer.cpu().numpy()


@pytest.mark.gpu
class TestGpuStore(TestGpuStoreOnTheCpuDevice):
    device = "cuda"


class TestLRU(OrderContract):
    def make_order(self):
        return LRU()


class TestSLRU(OrderContract):
    def make_order(self):
        return SLRU()


class TestS3FIFO(OrderContract):
    def make_order(self):
        return S3FIFO()


class TestARC(OrderContract):
    def make_order(self):
        return ARC()


class TestLFU(OrderContract):
    def make_order(self):
        return LFU()


class TestCostAware(OrderContract):
    def make_order(self):
        return CostAware()


class TestOneTier(ClientContract):
    def make_store(self, num_blocks):
        return small_pool(num_blocks)


class TestTwoTiersInline(ClientContract):
    """A small tier in front: every hit and eviction moves blocks."""

    def make_store(self, num_blocks):
        return small_pool(max(1, num_blocks // 4), num_blocks)


class TestOpened(ClientContract):
    """What users open: settings, real clock, a mover thread, the gpu tier on the CPU device."""

    def make_store(self, num_blocks):
        pytest.importorskip("torch")
        return kvstore.open(
            dram=num_blocks * PAGE, gpu=max(1, num_blocks // 4) * PAGE, device="cpu", prefault=False
        )


@pytest.mark.parametrize("make", [InlineMover, ManualMover, lambda: ThreadMover(1000)])
class TestMovers:
    def test_runs_in_order_and_drains(self, make):
        mover = make()
        done = []
        for number in range(100):
            assert mover.has_room()
            assert mover.submit(lambda number=number: done.append(number))
        mover.drain()
        assert done == list(range(100))
        mover.close()

    def test_close_runs_what_was_submitted(self, make):
        mover = make()
        done = []
        mover.submit(lambda: done.append(1))
        mover.close()
        assert done == [1]


def test_a_closed_thread_mover_has_run_what_waited():
    mover = ThreadMover(1000)
    done = []

    def wait_for_close():
        while mover.has_room():
            pass

    mover.submit(wait_for_close)
    for number in range(500):
        assert mover.submit(lambda number=number: done.append(number))
    mover.close()
    assert done == list(range(500))


def test_a_full_thread_mover_refuses_and_recovers():
    mover = ThreadMover(2)
    go = threading.Event()
    assert mover.submit(go.wait)
    assert mover.has_room()
    assert mover.submit(lambda: None)
    assert not mover.has_room()
    assert not mover.submit(lambda: None)
    go.set()
    mover.drain()
    assert mover.has_room()
    assert mover.submit(lambda: None)
    mover.close()
    assert not mover.has_room()
    assert not mover.submit(lambda: None)


def test_a_failing_job_does_not_end_the_mover(caplog):
    mover = ThreadMover(10)
    done = []
    mover.submit(lambda: 1 / 0)
    mover.submit(lambda: done.append(1))
    deadline = time.monotonic() + 10
    mover.drain()
    assert time.monotonic() < deadline
    assert done == [1]
    assert "division" in caplog.text
    mover.close()


def test_draining_waits_for_what_was_submitted_before_and_no_longer():
    mover = ThreadMover(10)
    first, later, go = threading.Event(), threading.Event(), threading.Event()
    mover.submit(first.wait)
    drained = threading.Thread(target=mover.drain)
    drained.start()

    def finish():
        go.set()
        later.wait()

    mover.submit(finish)
    first.set()
    drained.join(10)
    assert not drained.is_alive(), "it waited for a job that came later"
    later.set()
    mover.close()


def test_where_no_thread_can_be_had_a_mover_is_not_made(monkeypatch):
    def refuse(self):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    with pytest.raises(RuntimeError):
        ThreadMover(10)
