"""Conversations to submit, and how many of their tokens must hit."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from tests.engines.vllm.messages import Answer, Prompt
from tests.engines.vllm.models import VOCABULARY

if TYPE_CHECKING:
    from collections.abc import Iterable

Tokens = tuple[int, ...]


def draw(seed: int, num_tokens: int) -> Tokens:
    """Return random tokens; different seeds have no prefix in common."""
    rng = np.random.default_rng(seed)
    return tuple(rng.integers(2, VOCABULARY, num_tokens).tolist())


class Chats:
    """Conversations that begin with the same system prompt; all take their turns at once.

    Each turn's prompt is the one before, its answer, and what the user says next.
    """

    def __init__(
        self, seed: int, *, num_chats: int, num_turns: int, system_tokens: int, max_tokens: int
    ) -> None:
        """Draw what the users say: 1 to 90 tokens at each turn."""
        self._rng = np.random.default_rng(seed)
        system = draw(seed, system_tokens)
        self._max_tokens = max_tokens
        self._says = [
            [draw(seed * 10_000 + chat * 100 + turn + 1, n) for chat, n in enumerate(row)]
            for turn, row in enumerate(self._rng.integers(1, 90, (num_turns, num_chats)).tolist())
        ]
        self._histories = [system] * num_chats
        self.turn = 0

    def prompts(self) -> list[Prompt]:
        """Return this turn's prompts, one for each conversation."""
        return [
            Prompt(tokens=history + says, max_tokens=self._max_tokens)
            for history, says in zip(self._histories, self._says[self.turn], strict=True)
        ]

    def answered(self, answers: Iterable[Answer]) -> None:
        """Go on to the next turn."""
        self._histories = [
            prompt.tokens + answer.tokens
            for prompt, answer in zip(self.prompts(), answers, strict=True)
        ]
        self.turn += 1

    @property
    def over(self) -> bool:
        """Whether every turn was taken."""
        return self.turn == len(self._says)


class Known:
    """Which prefixes a cache holds, as plainly as can be: a set of them, whole blocks only."""

    def __init__(self, block_tokens: int) -> None:
        """Hold nothing."""
        self._width = block_tokens
        self._prefixes: set[tuple[str | None, Tokens]] = set()

    def add(self, prompt: Prompt, answer: Answer | None = None) -> None:
        """Hold what an engine has computed: the answer's last token is not, nobody asked what follows."""
        tokens = prompt.tokens + (answer.tokens[:-1] if answer else ())
        for stop in range(self._width, len(tokens) + 1, self._width):
            self._prefixes.add((prompt.salt, tokens[:stop]))

    def hit_tokens(self, prompt: Prompt) -> int:
        """Tokens of the longest prefix that is held; the prompt's last token is always computed."""
        hit = 0
        for stop in range(self._width, len(prompt.tokens), self._width):
            if (prompt.salt, prompt.tokens[:stop]) not in self._prefixes:
                break
            hit = stop
        return hit

    @property
    def num_blocks(self) -> int:
        """How many blocks that is."""
        return len(self._prefixes)
