"""What authors of stores, policies and clients test with: contract suites, a clock, movers, patterns.

Needs pytest. Nothing in the product imports it.
"""

from __future__ import annotations

from kvstore.testing.doubles import FakeClock, ManualMover, pattern, small_pool

__all__ = ["FakeClock", "ManualMover", "pattern", "small_pool"]
