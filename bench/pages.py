"""Copies between slots of the store and vLLM's KV pages, as the connector makes them.

The KV memory of an engine is made without one, in the order that vLLM has it; blocks lie one after the
other (``runs``), or all over it and over the store (``scattered``). Limit of the same run: one plain copy
of as many bytes, between two host buffers, or over the link between pinned memory and the GPU.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import click
import numpy as np
import torch

from bench.report import Row, interleave, report
from engine_plugin.vllm.pages import Pages, Rank
from kvstore.cli.table import output_option
from kvstore.namespace import KVLayout

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

BLOCK_TOKENS, HEADS, DIM = 16, 8, 128
BATCH_BYTES = 256 << 20
"""What is copied at a time: the KV of one prompt."""
SLOTS = 3
"""The store, and the engine's memory, are so many times larger."""


class Copies:
    """One engine's pages, and memory of a store."""

    def __init__(self, layers: int, device: str) -> None:
        """Make both; the store's memory is pinned where there is a GPU."""
        self.device = device
        self.layout = KVLayout(layers, HEADS, DIM, "bfloat16", BLOCK_TOKENS)
        self.count = BATCH_BYTES // self.layout.block_bytes
        shape = (layers, SLOTS * self.count + 1, HEADS, BLOCK_TOKENS, 2 * DIM)
        kv = torch.ones(shape, dtype=torch.bfloat16, device=device)
        self.pages = Pages(list(kv), self.layout, Rank(HEADS, 0, HEADS, stores=True))
        self.store = self._host(SLOTS * BATCH_BYTES).numpy()
        self.near, self.far = (
            torch.ones(BATCH_BYTES, dtype=torch.uint8, device=device),
            self._host(),
        )

    def _host(self, num_bytes: int = BATCH_BYTES) -> torch.Tensor:
        pin = self.device == "cuda"
        return torch.ones(num_bytes, dtype=torch.uint8, pin_memory=pin)

    def rows(self, rounds: int) -> Iterator[Row]:
        """Loads and saves of both orders."""
        rng = np.random.default_rng(0)
        everywhere = SLOTS * self.count
        orders = {
            "runs": (np.arange(self.count), np.arange(self.count)),
            "scattered": tuple(rng.permutation(everywhere)[: self.count] for _ in range(2)),
        }
        for name, (slots, blocks) in orders.items():
            offsets = slots.astype(np.int64) * self.layout.block_bytes
            numbers = (blocks + 1).tolist()
            sides = [
                self._timed(partial(self.pages.load, self.store, offsets, numbers, slice(None))),
                self._timed(partial(self.near.copy_, self.far, non_blocking=True)),
                self._timed(partial(self.pages.save, self.store, offsets, numbers)),
                self._timed(partial(self.far.copy_, self.near, non_blocking=True)),
            ]
            interleave(1, *sides)
            load_s, in_s, save_s, out_s = interleave(rounds, *sides)
            yield _rate(f"pages_load_{name}", load_s, in_s)
            yield _rate(f"pages_save_{name}", save_s, out_s)

    def _timed(self, copy: Callable[[], object]) -> Callable[[], None]:
        """Return ``copy``, and the wait for its end."""

        def run() -> None:
            copy()
            if self.device == "cuda":
                torch.cuda.synchronize()

        return run


def _rate(case: str, seconds: float, limit_s: float) -> Row:
    value, limit = BATCH_BYTES / seconds / 1e9, BATCH_BYTES / limit_s / 1e9
    return Row(case, "rate", value, "GB/s", limit, limit / value)


@click.command()
@click.option("--layers", default=32, show_default=True, help="Layers of the model.")
@click.option("--rounds", default=15, show_default=True)
@output_option
def main(layers: int, rounds: int, output: str) -> None:
    """Measure copies between the store and vLLM's pages."""
    torch.set_num_threads(1)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    copies = Copies(layers, device)
    name = torch.cuda.get_device_name() if device == "cuda" else device
    report(
        "pages", copies.rows(rounds), output, device=name, torch=torch.__version__, layers=layers
    )


if __name__ == "__main__":
    main()
