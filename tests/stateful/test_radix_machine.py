"""Random operations on a tree against a dict of prefixes."""

from __future__ import annotations

import numpy as np
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from radix import RadixTree, check_invariants

TOKENS = st.lists(st.integers(0, 1), max_size=14)


class RadixMachine(RuleBasedStateMachine):
    """Two tokens and blocks of one to three, so that prefixes collide."""

    @initialize(block_tokens=st.integers(1, 3))
    def start(self, block_tokens):
        self.block_tokens = block_tokens
        self.tree = RadixTree(4 * block_tokens)
        self.model: dict[tuple[int, ...], int] = {}
        self.next_id = 0

    def prefixes(self, tokens):
        size = self.block_tokens
        return [tuple(tokens[:end]) for end in range(size, len(tokens) + 1, size)]

    def known(self, tokens):
        ids = []
        for prefix in self.prefixes(tokens):
            if prefix not in self.model:
                break
            ids.append(self.model[prefix])
        return ids

    @rule(tokens=TOKENS, whole=st.booleans())
    def insert(self, tokens, whole):
        prefixes = self.prefixes(tokens)
        known = self.known(tokens)
        first = 0 if whole else len(known)
        ids = np.arange(self.next_id, self.next_id + len(prefixes) - first, dtype=np.int32)
        self.next_id += len(ids)
        assert self.tree.insert(tokens, ids) == len(known)
        for index in range(len(known), len(prefixes)):
            self.model[prefixes[index]] = int(ids[index - first])

    @rule(tokens=TOKENS)
    def match(self, tokens):
        assert self.tree.match(tokens).block_ids().tolist() == self.known(tokens)

    @rule(tokens=TOKENS)
    def touch(self, tokens):
        self.tree.touch(self.tree.match(tokens))

    @rule(count=st.integers(1, 6))
    def evict(self, count):
        before = len(self.model)
        gone = set(self.tree.evict(count).tolist())
        assert len(gone) == min(count, before)
        self.model = {prefix: block for prefix, block in self.model.items() if block not in gone}
        for prefix in self.model:
            assert (
                prefix == ()
                or len(prefix) == self.block_tokens
                or prefix[: -self.block_tokens] in self.model
            )

    @rule(tokens=TOKENS, keep=st.integers(0, 2))
    def trim(self, tokens, keep):
        found = self.tree.match(tokens)
        if not found.nodes:
            return
        node = found.nodes[-1]
        keep = min(keep, len(node.blocks) - 1)
        first = int(node.blocks[keep])
        gone = set(self.tree.trim(node, keep).tolist())
        cut = next(prefix for prefix, block in self.model.items() if block == first)
        assert gone == {block for prefix, block in self.model.items() if prefix[: len(cut)] == cut}
        self.model = {prefix: block for prefix, block in self.model.items() if block not in gone}

    @invariant()
    def same_blocks(self):
        check_invariants(self.tree)
        assert self.tree.num_blocks == len(self.model)
        assert sorted(i for node in self.tree.walk() for i in node.blocks.tolist()) == sorted(
            self.model.values()
        )


TestRadix = RadixMachine.TestCase
