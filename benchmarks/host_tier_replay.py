"""Replays a trace of prefix blocks through a host tier: `SlotAllocator` slots under a least-recently-used index.

    python -m benchmarks.host_tier_replay [TRACE] [--blocks 500 1000 2000 4000] [--json]

A trace line is JSON with `hash_ids`: one id for each full 512-token block of a request's prompt, equal ids for equal
prefixes. A request hits the leading blocks that are resident; then all its blocks are touched or stored, the last one
first, so that the head of a prefix is the last of it to be evicted. The hit count is compared with an independent one
from stack distances, and every slot is accounted for.
"""

import argparse
import json
import time
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from dots_jax.host import SlotAllocator

BLOCK = 512  # tokens
PAGE = 64
DEFAULT_TRACE = Path(__file__).parents[2] / "shared/data/mooncake_conversation.jsonl"


def read_trace(path: Path) -> list[list[int]]:
    """The block ids of each request."""
    with path.open() as file:
        return [json.loads(line)["hash_ids"] for line in file if line.strip()]


class HostTier:
    """Blocks resident in a host buffer, each in slots of its own.

    `owner` stands for the buffer: what was last written to each page. A page handed out twice shows up as a block whose
    page belongs to another.
    """

    def __init__(self, blocks: int):
        self.blocks = blocks
        self.allocator = SlotAllocator.create(blocks * BLOCK // PAGE, PAGE)
        self.resident: OrderedDict[int, np.ndarray | None] = OrderedDict()  # least recently used first
        self.owner = np.full(self.allocator.num_pages, -1, np.int64)
        self.evicted = 0

    def request(self, ids: Sequence[int]) -> int:
        """Serves a request; the number of leading blocks that were resident."""
        hits = 0
        while hits < len(ids) and ids[hits] in self.resident:
            self.read(ids[hits])
            hits += 1
        for block in reversed(ids):
            self.resident.setdefault(block, None)
            self.resident.move_to_end(block)
        self.evict(len(self.resident) - self.blocks)
        self.store([block for block in dict.fromkeys(ids) if self.resident.get(block, ids) is None])
        return hits

    def read(self, block: int) -> None:
        """Stands for the transfer to the device."""
        slots = self.resident[block]
        assert slots is not None
        pages = slots[::PAGE] // PAGE
        if (self.owner[pages] != block).any():
            raise AssertionError(f"block {block} reads pages of {set(self.owner[pages].tolist())}")

    def evict(self, count: int) -> None:
        """Drops the blocks used longest ago; of a request larger than the tier, its own tail."""
        gone = [self.resident.popitem(last=False)[1] for _ in range(count)]
        held = [slots for slots in gone if slots is not None]
        if held:
            self.allocator = self.allocator.free(np.concatenate(held))
            self.evicted += len(held)

    def store(self, blocks: list[int]) -> None:
        """Stands for the backup from the device."""
        if not blocks:
            return
        self.allocator, slots = self.allocator.alloc(len(blocks) * BLOCK)
        if slots is None:
            raise AssertionError(f"no room for {len(blocks)} blocks beside {len(self.resident) - len(blocks)}")
        for block, own in zip(blocks, np.split(slots, len(blocks)), strict=True):
            self.resident[block] = own
            self.owner[own[::PAGE] // PAGE] = block

    def check(self) -> None:
        """Every slot is free, or held by exactly one block, and no block holds anything else."""
        self.allocator.check()
        held = [slots for slots in self.resident.values() if slots is not None]
        everything = np.sort(np.concatenate([self.allocator.free_slots, *held]))
        if not np.array_equal(everything, np.arange(self.allocator.num_slots)):
            raise AssertionError(f"{everything.size} slots accounted for, {self.allocator.num_slots} exist")
        for block in self.resident:
            self.read(block)


def count_by_stack_distance(trace: Iterable[Sequence[int]], capacities: Sequence[int]) -> dict[int, int]:
    """Leading blocks hit at each capacity, without simulating a cache.

    A least-recently-used cache of C blocks holds the C blocks touched last. So a block is resident exactly if fewer
    than C distinct blocks were touched after its own last touch; a Fenwick tree over touch times, with a one at the
    last touch of each block, counts them.
    """
    trace = list(trace)
    size = sum(map(len, trace)) + 1
    tree, last, now = [0] * (size + 1), {}, 0
    hits = dict.fromkeys(capacities, 0)

    def add(place: int, value: int) -> None:
        while place <= size:
            tree[place] += value
            place += place & -place

    def later_than(place: int) -> int:
        below = 0
        while place:
            below += tree[place]
            place -= place & -place
        return len(last) - below

    for ids in trace:
        distances = []
        for block in ids:
            if block not in last:
                break
            distances.append(later_than(last[block]))
        for capacity in capacities:
            hits[capacity] += next((i for i, d in enumerate(distances) if d >= capacity), len(distances))
        for block in reversed(ids):
            now += 1
            if block in last:
                add(last[block], -1)
            add(now, 1)
            last[block] = now
    return hits


def replay(trace: Sequence[Sequence[int]], blocks: int, *, check_every: int = 100) -> dict[str, Any]:
    """Runs a trace through a tier of `blocks` blocks; the clock stands still during the checks."""
    tier, hits, seconds, cpu = HostTier(blocks), 0, 0.0, 0.0
    for start in range(0, len(trace), check_every):
        begun, begun_cpu = time.perf_counter(), time.process_time()
        for ids in trace[start : start + check_every]:
            hits += tier.request(ids)
        seconds += time.perf_counter() - begun
        cpu += time.process_time() - begun_cpu
        tier.check()
    total = sum(map(len, trace))
    return {
        "blocks": blocks,
        "hits": hits,
        "hit_rate": round(hits / total, 4),
        "evicted": tier.evicted,
        "resident": len(tier.resident),
        "requests_per_s": round(len(trace) / seconds),
        "requests_per_cpu_s": round(len(trace) / cpu),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", type=Path, nargs="?", default=DEFAULT_TRACE, help="Mooncake JSON lines")
    parser.add_argument("--blocks", type=int, nargs="+", default=[500, 1000, 2000, 4000, 8000], help="capacities")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    try:
        trace = read_trace(options.trace)
    except OSError as error:
        parser.error(f"{error.strerror}: {error.filename} (the Mooncake FAST'25 conversation trace, JSON lines)")
    expected = count_by_stack_distance(trace, options.blocks)
    rows = [replay(trace, blocks) for blocks in options.blocks]
    wrong = [row for row in rows if row["hits"] != expected[row["blocks"]]]
    if options.json:
        print(json.dumps({"requests": len(trace), "accesses": sum(map(len, trace)), "rows": rows, "agree": not wrong}))
    else:
        print(f"{len(trace)} requests, {sum(map(len, trace))} blocks of {BLOCK} tokens, page size {PAGE}")
        for row in rows:
            print(
                f"{row['blocks']:6} blocks: hit rate {row['hit_rate']:.4f} (independent count "
                f"{expected[row['blocks']] / sum(map(len, trace)):.4f}), {row['evicted']} evicted, "
                f"{row['requests_per_s']} requests/s ({row['requests_per_cpu_s']} by processor time)"
            )
    if wrong:
        raise SystemExit(f"hits differ from the independent count {expected}: {wrong}")


if __name__ == "__main__":
    main()
