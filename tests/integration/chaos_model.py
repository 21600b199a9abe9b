"""Generates with a tiny model through a daemon that is killed again and again; reports at "stop".

python chaos_model.py URL REPORT
"""

from __future__ import annotations

import json
import select
import sys
from collections import Counter
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import kvstore
from engine_plugin.transformers import CachedModel


def main(url, report):
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=128, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=512,
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval()
    draw = torch.Generator().manual_seed(1)
    prompts = [torch.randint(0, 128, (1, 100 + 9 * n), generator=draw) for n in range(6)]
    right = [model.generate(p, max_new_tokens=4, do_sample=False) for p in prompts]
    counts = Counter()
    print("ready", flush=True)
    with kvstore.connect(url, deadline_s=0.5) as store, CachedModel(model, store) as cached:
        while not select.select([sys.stdin], [], [], 0.0)[0]:
            number = counts["requests"] % len(prompts)
            counts["requests"] += 1
            try:
                text = cached.generate(prompts[number], max_new_tokens=4, do_sample=False)
            except Exception as error:  # noqa: BLE001
                print(repr(error), file=sys.stderr)
                counts["failed"] += 1
                continue
            counts["different"] += not torch.equal(text, right[number])
            counts["hits"] += cached.last.hit_tokens > 0
    names = ("requests", "failed", "different", "hits")
    Path(report).write_text(json.dumps({name: counts[name] for name in names}))


if __name__ == "__main__":
    main(*sys.argv[1:])
