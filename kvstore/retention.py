"""What a writer may say of how its blocks are kept."""

from __future__ import annotations

from kvstore.errors import UsageError

MAX_TTL_S = 315_360_000.0
"""Ten years."""

NORMAL_PRIORITY, MAX_PRIORITY = 50, 100
"""Of blocks of whose priority nothing was said; and the highest one. The lowest is 0."""

FOREVER = float("inf")


def lifetime_of(ttl_s: float | None) -> float:
    """Return for how many seconds blocks live, given a writer's ``ttl_s``; ``FOREVER`` for None.

    Raises:
        UsageError: it is no number of seconds above 0, or more than ten years.
    """
    if ttl_s is None:
        return FOREVER
    if isinstance(ttl_s, bool) or not isinstance(ttl_s, (int, float)) or not 0 < ttl_s <= MAX_TTL_S:
        raise UsageError(
            f"ttl_s={ttl_s!r}: give seconds above 0, at most {MAX_TTL_S:.0f}, or None to keep them for ever"
        )
    return float(ttl_s)


def check_priority(priority: int) -> int:
    """Return ``priority``.

    Raises:
        UsageError: it is no integer from 0 to 100.
    """
    if (
        isinstance(priority, bool)
        or not isinstance(priority, int)
        or not 0 <= priority <= MAX_PRIORITY
    ):
        raise UsageError(
            f"priority={priority!r}: give an integer from 0, what goes first, to {MAX_PRIORITY}; "
            f"{NORMAL_PRIORITY} is that of blocks of which nothing is said"
        )
    return priority
