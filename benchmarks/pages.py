"""The cost of a step's page work, as ratios measured in one run.

    python -m benchmarks.pages [--json]

One step extends every row by its draft tokens, rolls back what was rejected and releases what left the window, under
`jax.jit` with pool and table donated. It is timed on pools of two sizes, turn by turn, so that whatever else the
machine does touches both alike; the ratio is that of the medians.
"""

import argparse
import json
import time

import jax
import jax.numpy as jnp
import numpy as np

from dots_jax.pages import PagePool, PageTable, extend, release_outside_window, rollback

ROWS, COLUMNS, WINDOW, DRAFTS = 256, 16, 513, 4
SMALL, LARGE = 4096, 65536  # pages; 16 times apart
CONTEXT = 640  # tokens; a row then holds 10 pages, which is all of them before the first release


@jax.jit
def _prompt(pool, table):
    return extend(pool, table, jnp.full(ROWS, CONTEXT, jnp.int32))[:2]


def _step(pool, table, accepted):
    pool, table, _, _ = extend(pool, table, jnp.full(ROWS, DRAFTS, jnp.int32))
    pool, table = rollback(pool, table, table.lengths - DRAFTS + accepted)
    return release_outside_window(pool, table, WINDOW, table.lengths)


class Lane:
    """A pool of one size with its table, stepped in place."""

    def __init__(self, num_pages: int, columns: int = COLUMNS):
        self.state = _prompt(PagePool.create(num_pages), PageTable.empty(ROWS, columns))
        compiled = jax.jit(_step, donate_argnums=(0, 1)).lower(*self.state, jnp.zeros(ROWS, jnp.int32)).compile()
        self.step, self.times = compiled, []
        memory = compiled.memory_analysis()
        assert memory is not None
        self.temporary_bytes = memory.temp_size_in_bytes
        self.copied_bytes = memory.output_size_in_bytes - memory.alias_size_in_bytes

    def turn(self, accepted) -> None:
        """Takes one step and notes its time."""
        start = time.perf_counter()
        self.state = jax.block_until_ready(self.step(*self.state, accepted))
        self.times.append(time.perf_counter() - start)


def measure(rounds: int = 200) -> dict[str, float]:
    """Returns milliseconds a step for both pool sizes and a wider table, and their ratios."""
    lanes = {"small": Lane(SMALL), "large": Lane(LARGE), "wide": Lane(SMALL, columns=4 * COLUMNS)}
    still = jnp.zeros(ROWS, jnp.int32)  # nothing accepted: every step takes, gives back and stays the same
    for _ in range(rounds):
        for lane in lanes.values():
            lane.turn(still)
    median = {name: float(np.median(lane.times[10:])) for name, lane in lanes.items()}
    return {
        "rows": ROWS,
        "columns": COLUMNS,
        "small_ms": 1e3 * median["small"],
        "large_ms": 1e3 * median["large"],
        "wide_ms": 1e3 * median["wide"],
        "ratio_pool_16_times": median["large"] / median["small"],
        "ratio_columns_4_times": median["wide"] / median["small"],
        "temporary_bytes_small": lanes["small"].temporary_bytes,
        "temporary_bytes_large": lanes["large"].temporary_bytes,
        "not_in_place_bytes": lanes["large"].copied_bytes,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    result = measure()
    if options.json:
        print(json.dumps(result))
        return
    print(f"page work of a step, {ROWS} rows, {COLUMNS} columns, {DRAFTS} drafts, window {WINDOW}")
    print(f"  {SMALL:6d} pages  {result['small_ms']:.3f} ms")
    print(f"  {LARGE:6d} pages  {result['large_ms']:.3f} ms   ratio {result['ratio_pool_16_times']:.2f}")
    print(f"  {4 * COLUMNS:6d} columns {result['wide_ms']:.3f} ms   ratio {result['ratio_columns_4_times']:.2f}")
    small, large = result["temporary_bytes_small"], result["temporary_bytes_large"]
    print(f"  temporary bytes {small:.0f} and {large:.0f}; not in place {result['not_in_place_bytes']:.0f}")


if __name__ == "__main__":
    main()
