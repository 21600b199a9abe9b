"""kvstore: a tiered KV/prefix cache for LLM inference.

>>> store = kvstore.open(dram="8GiB")
>>> with store.acquire(namespace, tokens) as lease: ...

``kvstore.connect()`` uses the store of a daemon in the same way.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from kvstore.assembly import connect, connect_async, open  # noqa: A004
    from kvstore.config import Settings
    from kvstore.errors import KVStoreError
    from kvstore.interface import KVStore
    from kvstore.lease import Lease, Reservation
    from kvstore.namespace import KVLayout, Namespace
    from kvstore.pool import Pool
    from kvstore.tokens import MediaSpan

_HOME = {
    "open": "kvstore.assembly",
    "connect": "kvstore.assembly",
    "connect_async": "kvstore.assembly",
    "KVStore": "kvstore.interface",
    "Settings": "kvstore.config",
    "KVStoreError": "kvstore.errors",
    "Lease": "kvstore.lease",
    "Reservation": "kvstore.lease",
    "KVLayout": "kvstore.namespace",
    "Namespace": "kvstore.namespace",
    "Pool": "kvstore.pool",
    "MediaSpan": "kvstore.tokens",
}

__all__ = [
    "KVLayout",
    "KVStore",
    "KVStoreError",
    "Lease",
    "MediaSpan",
    "Namespace",
    "Pool",
    "Reservation",
    "Settings",
    "__version__",
    "connect",
    "connect_async",
    "open",
]


def __getattr__(name: str) -> Any:  # noqa: ANN401
    """Import public names on first use, so that ``import kvstore`` costs nothing."""
    if name in _HOME:
        return getattr(importlib.import_module(_HOME[name]), name)
    raise AttributeError(f"module 'kvstore' has no attribute {name!r}")
