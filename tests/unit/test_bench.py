"""What benchmarks feed to the store."""

from __future__ import annotations

import gzip
import io
import json
import os
import tarfile
from collections import OrderedDict
from itertools import islice
from pathlib import Path

import click
import numpy as np
import pytest
from click.testing import CliRunner

from bench.policies import Cache, main, replay
from bench.store import BLOCK_TOKENS, fresh_prompts, prompts
from bench.traces import Request, Trace, read_rows, read_traces
from kvstore.assembly import POLICIES
from radix import LRU, check_invariants


def test_fresh_prompts_share_no_block_and_do_not_run_out():
    rng = np.random.default_rng(1)
    known = prompts(rng, 3, 2 * BLOCK_TOKENS)
    fresh = list(islice(fresh_prompts(rng, 2 * BLOCK_TOKENS), 2000))
    heads = {tokens[:BLOCK_TOKENS].tobytes() for tokens in [*known, *fresh]}
    assert len(heads) == 2003
    assert {(len(tokens), tokens.dtype.name) for tokens in fresh} == {(2 * BLOCK_TOKENS, "int32")}


def row(ids, tokens):
    return json.dumps({"timestamp": 0, "input_length": tokens, "output_length": 1, "hash_ids": ids})


def test_rows_of_a_trace(tmp_path):
    """A last id for fewer tokens than a block counts on request only."""
    text = row([7, 8, 9], 1100) + "\n" + row([7], 512) + "\n" + row([], 0) + "\n"
    with gzip.open(tmp_path / "mooncake-conversation.jsonl.gz", "wt") as file:
        file.write(text)
    for partial, first in ((False, [7, 8]), (True, [7, 8, 9])):
        (trace,) = read_traces(tmp_path, partial=partial)
        assert [request.ids.tolist() for request in trace.requests] == [first, [7], []]
        assert [request.num_tokens for request in trace.requests] == [1100, 512, 0]


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ('{"input_length": 5', "line 2: no request: JSONDecodeError"),
        ('{"input_length": 5}', "line 2: no request: KeyError"),
        (row([1, 2], 512), "line 2: 2 ids for 512 tokens"),
        ("version https://git-lfs.github.com/spec/v1", "line 2: a Git LFS pointer"),
    ],
)
def test_a_row_that_is_none_is_named(tmp_path, line, says):
    file = tmp_path / "mooncake-conversation.jsonl"
    file.write_text(row([1], 512) + "\n" + line)
    with pytest.raises(click.ClickException, match=says):
        list(read_rows(file, partial=False))


def test_sessions_do_not_share_ids_and_overlap_in_time(tmp_path):
    def turn(time_s, blocks):
        return {"t": time_s, "in": 64 * blocks + 5, "hash_ids": list(range(1, blocks + 1))}

    helper = {"t": 240.0, "type": "subagent", "requests": [turn(0.0, 3), turn(20.0, 4)]}
    sessions = {"b": [turn(0.0, 2)], "a": [turn(0.0, 1), helper, turn(255.0, 5)]}
    with tarfile.open(tmp_path / "agent-coding-sessions.tar.gz", "w:gz") as archive:
        for name, requests in sessions.items():
            data = json.dumps({"id": name, "requests": requests}).encode()
            member = tarfile.TarInfo(f"agent-coding-sessions/{name}.json")
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
    (trace,) = read_traces(tmp_path)
    assert [len(request.ids) for request in trace.requests] == [1, 3, 2, 5, 4]
    first, _, other, *_ = (request.ids.tolist() for request in trace.requests)
    assert not set(first) & set(other)


def random_trace(block_tokens=4):
    """Branching conversations, of blocks that know their prefix."""
    rng = np.random.default_rng(3)
    numbers: dict[tuple[int, ...], int] = {}
    requests = []
    for _ in range(600):
        prompt = rng.integers(0, 3, rng.integers(0, 9)).tolist()
        prefixes = [tuple(prompt[:stop]) for stop in range(1, len(prompt) + 1)]
        ids = np.array([numbers.setdefault(prefix, len(numbers)) for prefix in prefixes], "<i8")
        requests.append(Request(ids, len(ids) * block_tokens + int(rng.integers(0, block_tokens))))
    return Trace("random", block_tokens, requests)


def naive_lru_hits(trace, capacity):
    """Blocks one by one, those of a request from its end to its beginning."""
    cache: OrderedDict[int, None] = OrderedDict()
    hits = 0
    for request in trace.requests:
        ids = request.ids.tolist()
        known = next((i for i, block in enumerate(ids) if block not in cache), len(ids))
        hits += known
        for block in reversed(ids):
            cache[block] = None
            cache.move_to_end(block)
        while len(cache) > capacity:
            cache.popitem(last=False)
    return hits


@pytest.mark.parametrize("capacity", [8, 20, 100, 10**6])
def test_a_replay_with_lru_hits_what_a_list_of_blocks_does(capacity):
    trace = random_trace()
    tally = replay(trace, LRU(), capacity)
    assert tally.hit_blocks == naive_lru_hits(trace, capacity)
    assert tally.hit_tokens == 4 * tally.hit_blocks
    assert tally.blocks == sum(len(request.ids) for request in trace.requests)
    assert tally.tokens == sum(request.num_tokens for request in trace.requests)


@pytest.mark.parametrize("policy", POLICIES)
def test_a_cache_keeps_to_its_capacity_and_never_drops_what_is_in_use(policy):
    cache = Cache(POLICIES[policy](), 5)
    for request in random_trace().requests:
        before = cache.tree.match(request.ids.tobytes()).num_blocks
        assert cache.use(request) == before
        check_invariants(cache.tree)
        assert cache.tree.num_blocks <= 5
        stored = cache.tree.match(request.ids.tobytes()).num_blocks
        assert stored >= min(5, max(before, 1)) if len(request.ids) else True


def test_the_command_compares_all_policies(tmp_path):
    rows = [row([1, number], 1024) for number in range(2, 40)] * 2
    (tmp_path / "mooncake-synthetic.jsonl").write_text("\n".join(rows) + "\n")
    arguments = ["--share", "50", "--output", "json"]
    found = CliRunner().invoke(main, arguments, env={"KVSTORE_TRACES": str(tmp_path)})
    assert found.exit_code == 0, found.output
    lines = {(r["case"], r["metric"]): r for r in json.loads(found.stdout)["rows"]}
    assert lines["synthetic", "different_blocks"]["value"] == 39
    infinite = lines["synthetic_infinite", "hit_tokens"]["value"]
    assert infinite == pytest.approx(100 * (37 + 76) / 152)
    for policy in POLICIES:
        line = lines[f"synthetic_50pct_{policy}", "hit_tokens"]
        assert 0 < line["value"] <= line["limit"] == infinite


def test_missing_traces_are_named(tmp_path):
    for arguments, says in (
        ([], "Missing option '--traces'"),
        (["--traces", str(tmp_path / "no")], "does not exist"),
        (["--traces", str(tmp_path)], "holds no trace, such as mooncake-conversation.jsonl.gz"),
    ):
        found = CliRunner().invoke(main, arguments, env={"KVSTORE_TRACES": None})
        assert found.exit_code != 0
        assert says in found.stderr


@pytest.mark.skipif("KVSTORE_TRACES" not in os.environ, reason="KVSTORE_TRACES is not set")
def test_the_conversation_trace_has_its_known_hit_rates():
    """What a list of blocks gave, in blocks of all ids, of 288,500."""
    trace = next(read_traces(Path(os.environ["KVSTORE_TRACES"]), partial=True))
    known = {1000: 12_847, 10_000: 61_046, 10**6: 105_710}
    assert {size: replay(trace, LRU(), size).hit_blocks for size in known} == known
