"""What engines talk to: :class:`KVStore`, embedded in their process or a client of a daemon.

One contract suite (:class:`kvstore.testing.contracts.ClientContract`) runs against both, so a plug-in
need not know which it has. :class:`kvstore.pool.Pool` describes the calls; a client differs in that
a daemon that fails to answer is a counted miss: an empty lease or reservation, 0 tokens, 0 blocks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, Self

from kvstore.retention import NORMAL_PRIORITY

if TYPE_CHECKING:
    from kvstore.explain import Explanation
    from kvstore.lease import Lease, Reservation
    from kvstore.namespace import Namespace
    from kvstore.stats import PoolStats


class KVStore(Protocol):
    """The blocks of prefixes: find, lend, take. Thread-safe."""

    @property
    def block_tokens(self) -> int:
        """Block length for callers that make their own layouts."""
        ...

    @property
    def tier_names(self) -> tuple[str, ...]:
        """Names that the tier numbers of leases and reservations stand for."""
        ...

    def lookup(self, namespace: Namespace, tokens: object, /) -> int: ...  # noqa: D102

    def prefetch(self, namespace: Namespace, tokens: object, /) -> int: ...  # noqa: D102

    def acquire(  # noqa: D102
        self, namespace: Namespace, tokens: object, /, *, may_wait: bool = False
    ) -> Lease: ...

    def verify(self, lease: Lease, /) -> int: ...  # noqa: D102

    def release(self, lease: Lease, /) -> None: ...  # noqa: D102

    def reserve(  # noqa: D102
        self,
        namespace: Namespace,
        tokens: object,
        /,
        *,
        heads: tuple[int, int] | None = None,
        priority: int = NORMAL_PRIORITY,
        ttl_s: float | None = None,
    ) -> Reservation: ...

    def commit(self, reservation: Reservation, /) -> int: ...  # noqa: D102

    def abort(self, reservation: Reservation, /) -> None: ...  # noqa: D102

    def prefilled(  # noqa: D102
        self, namespace: Namespace, start: int, stop: int, seconds: float, /
    ) -> None: ...

    def explain(self, namespace: Namespace, tokens: object, /) -> Explanation: ...  # noqa: D102

    def evict(self, namespace: Namespace, tokens: object, /) -> int: ...  # noqa: D102

    def clear(self) -> None: ...  # noqa: D102

    def drain(self) -> None: ...  # noqa: D102

    def stats(self) -> PoolStats: ...  # noqa: D102

    def close(self) -> None: ...  # noqa: D102

    def __enter__(self) -> Self: ...

    def __exit__(self, *_: object) -> None: ...
