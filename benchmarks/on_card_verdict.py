"""Holds a saved benchmark (`dots-jax bench --save FILE`) to the goals for an H200 and prints a short table.

Goals are about `mosaic_gpu` at 1088/1024 and window 513: time over the floor, share of the measured matrix rate,
microseconds at batch 1, and how many times faster than the unfused path. Exit code 1 if one is missed, 2 if the file
has nothing to judge.
"""

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Row = dict[str, Any]


@dataclass(frozen=True)
class Goal:
    """`figure` of every row that `applies` must be at most, or at least, `limit`."""

    text: str
    applies: Callable[[Row], bool]
    figure: Callable[[Row], float]
    limit: float
    at_most: bool = True

    def met(self, value: float) -> bool:
        """Whether a value reaches the goal; NaN never does."""
        return value <= self.limit if self.at_most else value >= self.limit


def _sliding(row: Row, heads: int, seqs: tuple[int, ...]) -> bool:
    return row["window"] is not None and row["heads"] == heads and row["seq"] in seqs


GOALS = (
    Goal("64 heads, S=1, batch >= 128: time / floor", lambda r: _sliding(r, 64, (1,)) and r["batch"] >= 128,
         lambda r: r["over_floor"], 1.25),
    Goal("64 heads, S=4, batch >= 128: share of matrix rate", lambda r: _sliding(r, 64, (4,)) and r["batch"] >= 128,
         lambda r: r["matrix_share"], 0.6, at_most=False),
    Goal("8 heads, batch >= 128: time / floor", lambda r: _sliding(r, 8, (1, 2, 4)) and r["batch"] >= 128,
         lambda r: r["over_floor"], 1.3),
    Goal("batch 1: microseconds", lambda r: r["window"] is not None and r["batch"] == 1,
         lambda r: r["seconds"] * 1e6, 12),
    Goal("any shape: times faster than unfused", lambda r: True, lambda r: r["vs_unfused"], 1, at_most=False),
    Goal("batch >= 64: times faster than unfused", lambda r: r["window"] is not None and r["batch"] >= 64,
         lambda r: r["vs_unfused"], 3, at_most=False),
)  # fmt: skip


def rows(report: dict[str, Any], implementation: str) -> list[Row]:
    """A row for each shape that the implementation was timed at."""
    found = []
    for shape in report["shapes"]:
        for timing in shape["timings"]:
            if timing["implementation"] == implementation and timing["seconds"] is not None:
                rate = shape["flops"] / timing["seconds"]
                found.append(shape | timing | {"matrix_share": rate / report["ceilings"]["flops_per_s"]})
    return found


def main(argv: list[str]) -> int:
    """Prints a line for each goal: verdict, the worst shape and its figure."""
    path, implementation = Path(argv[0]), argv[1] if len(argv) > 1 else "mosaic_gpu"
    try:
        timed = rows(json.loads(path.read_text()), implementation)
    except (OSError, ValueError, KeyError) as error:
        print(f"{path} is not a saved benchmark: {error!r}")
        return 2
    if not timed:
        print(f"{path} has no timing of {implementation}")
        return 2
    missed = 0
    for goal in GOALS:
        values = [(goal.figure(row), row["name"]) for row in timed if goal.applies(row)]
        if not values:
            print(f"-      {goal.text}: not measured")
            continue
        value, name = max(values) if goal.at_most else min(values)
        missed += not goal.met(value)
        verdict, sign = ("met   " if goal.met(value) else "MISSED"), ("<=" if goal.at_most else ">=")
        print(f"{verdict} {goal.text} {sign} {goal.limit:g}: worst {value:.2f} at {name}")
    return int(missed > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
