"""Profiles of Hypothesis, a place for files, and a check that no test leaves threads or descriptors behind."""

from __future__ import annotations

import gc
import os
import tempfile
import threading
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

settings.register_profile(
    "default", deadline=None, max_examples=60, suppress_health_check=[HealthCheck.too_slow]
)
settings.register_profile("ci", settings.get_profile("default"), max_examples=200, derandomize=True)
settings.register_profile("nightly", settings.get_profile("default"), max_examples=5000)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))


def pytest_collection_modifyitems(items):
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if marked and not _has_cuda():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))


def pytest_collection_finish(session):
    """Set aside what imports made, so that the collection after each test stays cheap."""
    gc.collect()
    gc.freeze()


def _has_cuda() -> bool:
    try:
        import torch
    except ImportError:
        return False
    return torch.cuda.is_available()


def _descriptors() -> set[str]:
    links = set()
    for descriptor in Path("/proc/self/fd").iterdir():
        try:
            links.add(f"{descriptor.name} -> {descriptor.readlink()}")
        except OSError:
            continue
    return links


def _shared_mappings() -> int:
    return Path("/proc/self/maps").read_text().count("memfd:kvstore")


@pytest.fixture
def path():
    """A directory that does not exist yet, on a real file system: ``/tmp`` may be memory."""
    with tempfile.TemporaryDirectory(prefix="kvstore-test-", dir="/var/tmp") as directory:
        yield Path(directory) / "tier"


@pytest.fixture(autouse=True)
def _nothing_leaks():
    threads, descriptors = set(threading.enumerate()), _descriptors()
    mappings = _shared_mappings()
    yield
    gc.collect()
    left = [
        thread
        for thread in threading.enumerate()
        if thread not in threads and "kvstore" in thread.name
    ]
    assert not left, f"threads left behind: {left}"
    opened = {
        link for link in _descriptors() - descriptors if "/dev/shm" in link or "memfd" in link
    }
    assert not opened, f"descriptors left behind: {opened}"
    assert _shared_mappings() == mappings, "memory of a daemon is still mapped"
