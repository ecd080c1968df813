"""The replay of a trace as a host tier: hits agree with independent counts, and no slot is lost, doubled or leaked."""

import json
import random
from pathlib import Path

import numpy as np
import pytest

from benchmarks import host_tier_replay
from benchmarks.host_tier_replay import HostTier, count_by_stack_distance, read_trace, replay

TRACE = Path(__file__).parents[3] / "shared/data/mooncake_conversation.jsonl"


def generated(path, requests=300, seed=0):
    """A file in the trace's format: conversations that grow, come back, and share their first block."""
    rng, next_id, conversations = random.Random(seed), 1, [[0]]
    with path.open("w") as file:
        for _ in range(requests):
            base = rng.choice(conversations[-20:])
            ids = [*base[: rng.randint(1, len(base))], *range(next_id, next_id + rng.randint(1, 12))]
            next_id += 12
            conversations.append(ids)
            line = {"timestamp": 0, "input_length": 512 * len(ids), "output_length": 1, "hash_ids": ids}
            file.write(json.dumps(line) + "\n")
    return read_trace(path)


@pytest.fixture
def trace(tmp_path):
    return read_trace(TRACE)[:400] if TRACE.exists() else generated(tmp_path / "trace.jsonl")


def count_naively(trace, blocks):
    """A list of block ids, most recent last; nothing else."""
    stack, hits = [], 0
    for ids in trace:
        for block in ids:
            if block not in stack:
                break
            hits += 1
        for block in reversed(ids):
            if block in stack:
                stack.remove(block)
            stack.append(block)
            del stack[:-blocks]
    return hits


@pytest.mark.parametrize("blocks", [1, 7, 60, 400, 5000])
def test_hits_agree_with_two_independent_counts(trace, blocks):
    row = replay(trace, blocks, check_every=200)
    assert row["hits"] == count_by_stack_distance(trace, [blocks])[blocks]
    if blocks <= 400:
        assert row["hits"] == count_naively(trace, blocks)
    assert row["resident"] == min(blocks, len({block for ids in trace for block in ids}))


def test_generated_traces_agree_too(tmp_path):
    trace = generated(tmp_path / "trace.jsonl", seed=3)
    counts = count_by_stack_distance(trace, [5, 50, 500])
    assert counts == {blocks: count_naively(trace, blocks) for blocks in (5, 50, 500)}
    assert counts == {blocks: replay(trace, blocks)["hits"] for blocks in (5, 50, 500)}
    assert 0 < counts[5] < counts[50] <= counts[500]


def test_the_checks_notice_a_page_that_is_held_twice():
    tier = HostTier(4)
    tier.request([1, 2])
    tier.check()
    tier.resident[2] = tier.resident[1]
    with pytest.raises(AssertionError, match="slots accounted for"):
        tier.check()
    with pytest.raises(AssertionError, match="block 2 reads pages of"):
        tier.read(2)


def test_the_checks_notice_a_page_that_leaks():
    tier = HostTier(4)
    tier.request([1, 2])
    del tier.resident[1]
    with pytest.raises(AssertionError, match="1536 slots accounted for, 2048 exist"):
        tier.check()


def test_the_command_prints_its_table_and_fails_on_a_difference(tmp_path, capsys, monkeypatch):
    generated(tmp_path / "trace.jsonl", requests=50)
    monkeypatch.setattr("sys.argv", ["replay", str(tmp_path / "trace.jsonl"), "--blocks", "20", "--json"])
    host_tier_replay.main()
    report = json.loads(capsys.readouterr().out)
    assert report["agree"]
    assert report["requests"] == 50
    monkeypatch.setattr(host_tier_replay, "count_by_stack_distance", lambda trace, blocks: dict.fromkeys(blocks, -1))
    with pytest.raises(SystemExit, match="hits differ from the independent count"):
        host_tier_replay.main()


def test_a_trace_that_is_not_there_is_one_line(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("sys.argv", ["replay", str(tmp_path / "absent.jsonl")])
    with pytest.raises(SystemExit, match="2"):
        host_tier_replay.main()
    assert f"error: No such file or directory: {tmp_path / 'absent.jsonl'} (" in capsys.readouterr().err


def test_the_owner_array_has_one_entry_a_page():
    tier = HostTier(3)
    tier.request([5])
    assert np.count_nonzero(tier.owner == 5) == 8
