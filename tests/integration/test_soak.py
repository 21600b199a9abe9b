"""A few seconds of :mod:`bench.soak`: right, fair, and nothing stays behind."""

from __future__ import annotations

import math
import statistics
from collections import Counter

import pytest

from bench import soak

SECONDS = 5.0
CLIENTS = 8


@pytest.fixture(scope="module")
def soaked(tmp_path_factory):
    return soak.soak(tmp_path_factory.mktemp("soak"), SECONDS, CLIENTS, seed=1)


@pytest.mark.timeout(100)
@pytest.mark.xdist_group("soak")
class TestSoak:
    def test_every_byte_is_right_and_no_call_fails(self, soaked):
        total = sum(map(Counter, soaked.tallies), Counter())
        print(dict(total), {"evicted": soaked.evicted_blocks})
        assert total["wrong_blocks"] == 0
        assert total["failed_calls"] == total["late_calls"] == 0
        assert total["loaded_blocks"] > 1000, "hardly anything was loaded"
        assert total["stored_blocks"] > 1000, "hardly anything was stored"
        assert soaked.evicted_blocks > 1000, "hardly anything had to go"

    def test_nothing_is_left(self, soaked):
        assert soaked.leaks == dict.fromkeys(soak.LEAKS, 0)
        assert soaked.is_good

    def test_every_client_gets_its_share(self, soaked):
        calls = [tally["calls"] for tally in soaked.tallies]
        assert len(calls) == CLIENTS
        assert min(calls) * 4 >= statistics.median(calls), calls

    def test_the_rows_say_what_happened(self, soaked):
        rows = {(row.case, row.metric): row.value for row in soak.rows(soaked)}
        for call in ("acquire", "release", "reserve", "commit", "lookup"):
            assert 0 < rows[call, "p50"] <= rows[call, "p99"] <= rows[call, "max"]
            assert rows[call, "p99_spread"] >= 1
        assert rows["total", "calls"] == sum(
            len(seconds) for latencies in soaked.latencies_s for seconds in latencies.values()
        )
        assert all(rows["leak", name] == 0 for name in soak.LEAKS)
        assert all(map(math.isfinite, rows.values()))
