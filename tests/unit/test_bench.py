"""What benchmarks feed to the store."""

from __future__ import annotations

from itertools import islice

import numpy as np

from bench.store import BLOCK_TOKENS, fresh_prompts, prompts


def test_fresh_prompts_share_no_block_and_do_not_run_out():
    rng = np.random.default_rng(1)
    known = prompts(rng, 3, 2 * BLOCK_TOKENS)
    fresh = list(islice(fresh_prompts(rng, 2 * BLOCK_TOKENS), 2000))
    heads = {tokens[:BLOCK_TOKENS].tobytes() for tokens in [*known, *fresh]}
    assert len(heads) == 2003
    assert {(len(tokens), tokens.dtype.name) for tokens in fresh} == {(2 * BLOCK_TOKENS, "int32")}
