"""How fast the engine computes prompts, as its scheduler sees it: from one step to the next."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

LEAST_TOKENS = 128
"""Shorter pieces of a prompt say little."""
LEAST_SHARE = 0.8
"""Of the tokens of a step, so that its time is that of the piece."""


class Piece(NamedTuple):
    """Tokens of a prompt that were computed, and how long that took."""

    request_id: str
    num_tokens: int
    seconds: float


class Pace:
    """Says how long the largest piece of a prompt in a step took, where that can be told.

    A step is planned when the one before has ended, if the engine has more to do: so a step counts only if its
    request goes on in the next one. Where steps overlap, one is planned while the one before it runs: the time
    between two plans is that of the step before the first of them, if the engine was at work all along.
    """

    def __init__(self, clock: Callable[[], float], *, steps_overlap: bool) -> None:
        """Start before the first step. ``clock`` gives monotonic seconds."""
        self._clock = clock
        self._behind = 1 if steps_overlap else 0
        self._at_s = 0.0
        self._pieces: list[tuple[str, int] | None] = []
        """Of the last steps, the newest last."""

    def step(self, num_tokens: Mapping[str, int]) -> Piece | None:
        """Begin a step with so many tokens of each request; return what an earlier one tells."""
        now, found = self._clock(), None
        if len(self._pieces) > self._behind:
            last = self._pieces.pop(0)
            if last is not None and last[0] in num_tokens:
                found = Piece(*last, now - self._at_s)
        if not num_tokens:  # the engine may wait from here on
            self._pieces.clear()
        else:
            self._pieces.append(_largest(num_tokens))
        self._at_s = now
        return found


def _largest(num_tokens: Mapping[str, int]) -> tuple[str, int] | None:
    """Return the request that has nearly all tokens of a step, and their number."""
    largest = max(num_tokens, key=num_tokens.__getitem__)
    count = num_tokens[largest]
    enough = count >= max(LEAST_TOKENS, LEAST_SHARE * sum(num_tokens.values()))
    return (largest, count) if enough else None
