"""Prints benchmark results for people, and as JSON."""

import dataclasses
from collections.abc import Sequence
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from dots_jax.bench.device import Device
from dots_jax.bench.floor import Ceilings
from dots_jax.bench.run import TORCH, UNFUSED, ShapeResult, Timing


def as_json(results: Sequence[ShapeResult], device: Device, ceilings: Ceilings, **more: Any) -> dict[str, Any]:
    """Everything measured, in seconds, bytes and operations."""
    shapes = []
    for result in results:
        timings = [dataclasses.asdict(timing) for timing in result.timings]
        shapes.append(
            dataclasses.asdict(result.shape)
            | {"min_bytes": result.min_bytes, "flops": result.shape.flops}
            | {"floor_s": result.floor_s, "bound_by": result.bound_by, "timings": timings}
        )
    return {**more, "device": dataclasses.asdict(device), "ceilings": dataclasses.asdict(ceilings), "shapes": shapes}


def print_table(
    results: Sequence[ShapeResult], device: Device, ceilings: Ceilings, console: Console, brief: bool = False
) -> None:
    """The ceilings, a row for each implementation at each shape, and a line for each problem.

    Args:
      results: what to print.
      device: where they were measured.
      ceilings: measured in the same run.
      console: to print on.
      brief: leave out the rows of the paths that are only compared with.
    """
    console.print(
        f"{device.kind} ({device.platform}): copy {_three_digits(ceilings.bytes_per_s / 1e9)} GB/s, "
        f"matrix product {_three_digits(ceilings.flops_per_s / 1e12)} TFLOP/s, measured now",
        highlight=False,
    )
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for title in ("shape", "implementation"):
        table.add_column(title, no_wrap=True)
    for title in ("MB", "GFLOP", "floor us", "time us", "/ floor", "x unfused", "x torch", "spread", "GB/s", "TFLOP/s"):
        table.add_column(title, justify="right", no_wrap=True)
    for result in results:
        shown = [timing for timing in result.timings if not (brief and timing.implementation in (UNFUSED, TORCH))]
        for index, timing in enumerate(shown):
            last = not brief and index == len(shown) - 1
            table.add_row(*_shape_cells(result, index == 0), *_timing_cells(result, timing), end_section=last)
    console.print(table)
    for result in results:
        for timing in result.timings:
            if timing.problem:
                line = f"{result.shape.name} {timing.implementation}: {timing.problem}"
                console.print(line, soft_wrap=True, highlight=False, markup=False)


def _shape_cells(result: ShapeResult, first: bool) -> tuple[str, ...]:
    return (result.shape.name if first else "",)


def _timing_cells(result: ShapeResult, timing: Timing) -> tuple[str, ...]:
    known = (f"{result.min_bytes / 1e6:,.1f}", f"{result.shape.flops / 1e9:,.2f}", f"{result.floor_s * 1e6:,.1f}")
    if timing.seconds is None:
        return (timing.implementation, *known, *["-"] * 7)

    def ratio(value: float | None) -> str:
        return "-" if value is None else f"{value:.2f}"

    return (
        timing.implementation,
        *known,
        f"{timing.seconds * 1e6:,.1f}",
        ratio(timing.over_floor),
        ratio(timing.vs_unfused),
        ratio(timing.vs_torch),
        f"{(timing.spread or 0) * 100:.0f} %",
        _three_digits(result.min_bytes / timing.seconds / 1e9),
        _three_digits(result.shape.flops / timing.seconds / 1e12),
    )


def _three_digits(value: float) -> str:
    """`4,310`, `31.2` or `0.0712`: large numbers whole, small ones to three digits."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
