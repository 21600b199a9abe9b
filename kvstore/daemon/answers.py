"""From what a client sent to values, and from exceptions to answers."""

from __future__ import annotations

import logging
from functools import lru_cache
from typing import TYPE_CHECKING, Literal

from kvstore import protocol
from kvstore.errors import LeaseExpiredError, LeaseNotHeldError, TooLargeError, UsageError
from kvstore.protocol import Failed, Prefilled, Release

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvstore.namespace import Namespace
    from kvstore.protocol import Reply, Request

logger = logging.getLogger(__name__)

MAX_NAMESPACE_BYTES = 4 << 10
"""Longest encoded namespace: the decoded ones are kept."""

_ERRORS: tuple[
    tuple[type[Exception], Literal["usage", "too_large", "expired", "not_held"]], ...
] = (
    (UsageError, "usage"),
    (TooLargeError, "too_large"),
    (LeaseExpiredError, "expired"),
    (LeaseNotHeldError, "not_held"),
)


@lru_cache(maxsize=2048)
def namespace_of(encoded: bytes) -> Namespace:
    """Return the namespace that a client means; the same object for the same bytes, digest and all."""
    if len(encoded) > MAX_NAMESPACE_BYTES:
        raise UsageError(
            f"a namespace of {len(encoded)} encoded bytes: at most {MAX_NAMESPACE_BYTES} are allowed"
        )
    return protocol.decode_namespace(encoded)


def failed(request: Request, error: Exception) -> Failed:
    """Return the answer for a request that raised ``error``; what nobody expected is logged."""
    request_id = 0 if isinstance(request, Release | Prefilled) else request.id
    for known, name in _ERRORS:
        if isinstance(error, known):
            return Failed(request_id, name, str(error))
    logger.error("%s failed", type(request).__name__, exc_info=error)
    return Failed(request_id, "internal", "the daemon failed; its log says why")


def later(request: Request, call: Callable[[], Reply]) -> Callable[[], Reply]:
    """Return a function that makes the answer to ``request`` by ``call``, and never raises."""

    def work() -> Reply:
        try:
            return call()
        except Exception as error:  # noqa: BLE001  (a request must not end the daemon)
            return failed(request, error)

    return work
