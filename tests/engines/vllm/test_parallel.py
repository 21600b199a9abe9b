"""Tensor parallelism: ranks in processes of their own write into the same blocks; other ranks, or one, read."""

from __future__ import annotations

from tests.engines.vllm.messages import Prompt
from tests.engines.vllm.workload import draw

BLOCK = 32
LENGTHS = (1000, 300, 64, 65, 5)


def prompts(seed: int) -> list[Prompt]:
    return [Prompt(tokens=draw(seed + index, length)) for index, length in enumerate(LENGTHS)]


def whole_blocks(asked: list[Prompt]) -> list[int]:
    """Tokens of each prompt that can hit when all of it is stored."""
    return [(len(prompt.tokens) - 1) // BLOCK * BLOCK for prompt in asked]


def test_two_ranks_and_one_read_what_the_other_has_stored(reference, start_engine, start_daemon):
    mine, yours = prompts(100), prompts(200)
    right = [answer.tokens for answer in reference.generate(*mine, *yours)]
    daemon = start_daemon()

    two = start_engine(url=daemon.url, ranks=2, connector={"load": "sync"})
    assert [a.tokens for a in two.generate(*mine)] == right[: len(mine)]
    num_blocks = sum((len(p.tokens) + p.max_tokens - 1) // BLOCK for p in mine)
    daemon.wait_for_blocks(num_blocks)
    again = two.generate(*mine)
    assert [a.tokens for a in again] == right[: len(mine)]
    assert [a.cached_tokens for a in again] == whole_blocks(mine)

    one = start_engine(url=daemon.url, connector={"load": "sync"})
    answers = one.generate(*mine)
    assert [a.tokens for a in answers] == right[: len(mine)]
    assert [a.cached_tokens for a in answers] == whole_blocks(mine)
    one.generate(*yours)
    daemon.wait_for_blocks(2 * num_blocks)

    answers = two.generate(*yours)
    assert [a.tokens for a in answers] == right[len(mine) :]
    assert [a.cached_tokens for a in answers] == whole_blocks(yours)
    daemon.wait_for_blocks(2 * num_blocks)
    one.close()
    two.close()
