"""`dots-jax bench`: times the decode implementations against a floor measured in the same run."""

import argparse
import contextlib
import importlib.metadata
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from dots_jax.bench import shapes as shapes_module
from dots_jax.bench.device import Device, default_device
from dots_jax.bench.floor import Ceilings, measure_ceilings
from dots_jax.bench.run import Settings, ShapeResult, default_implementations, measure, refusal
from dots_jax.bench.shapes import Shape
from dots_jax.bench.table import as_json, print_table
from dots_jax.cli.errors import ArgumentError
from dots_jax.cli.output import json_text

_DESCRIPTION = """Times the decode implementations that this device can run over named serving shapes. For each: the
bytes and operations it needs, the floor that a copy and a matrix product measured in this run put under it, time /
floor, and how many times faster it is than the unfused path (gather, two products, softmax) and, where torch is
installed, than the same in torch; spread is (slowest - fastest round) / median. Inputs rotate through a pool larger
than the cache. Exit code 1 if an implementation fails or its output differs from the unfused path. On a CPU the default
is a few small shapes, and the pool is made larger than at most 64 MiB of cache."""

_IMPLEMENTATIONS = ("xla", "mosaic_gpu", "interpret")
_LONGEST_S = 7 * 24 * 3600  # some clocks cannot wait for much more
_MOST_ROUNDS = 1_000_000
_DTYPES = ("bfloat16", "float16", "float32")


def add_parser(subparsers) -> None:
    """Adds the command."""
    parser = subparsers.add_parser("bench", help="time the decode implementations", description=_DESCRIPTION)
    parser.add_argument(
        "--shapes",
        action="append",
        default=[],
        metavar="NAME[,NAME]",
        help="shell patterns of shape names (see --list)",
    )
    parser.add_argument(
        "--implementation", action="append", default=[], choices=_IMPLEMENTATIONS, help="repeatable; default: what fits"
    )
    parser.add_argument("--quick", action="store_true", help="few shapes and few rounds")
    parser.add_argument("--rounds", type=int, metavar="N", help="turns of each implementation; the median is printed")
    parser.add_argument("--dtype", choices=_DTYPES, default="bfloat16", help="of q and cache (default: %(default)s)")
    parser.add_argument("--no-torch", action="store_true", help="do not time torch where it is installed")
    parser.add_argument("--list", action="store_true", help="list the shapes and time nothing")
    parser.add_argument("--json", action="store_true", help="print one object instead of a table")
    parser.add_argument("--brief", action="store_true", help="only the implementations' rows, not those compared with")
    parser.add_argument("--save", type=Path, metavar="FILE", help="write the JSON object there too, after every shape")
    parser.add_argument("--time-limit", type=float, metavar="S", help="start no shape after this many seconds")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Runs the command.

    Returns:
      1 when an implementation failed or gave a wrong result, else 0.
    """
    if arguments.rounds is not None and not 1 <= arguments.rounds <= _MOST_ROUNDS:
        raise ArgumentError(f"--rounds must be at least 1 and at most {_MOST_ROUNDS}, got {arguments.rounds}")
    if arguments.time_limit is not None and not 0 < arguments.time_limit <= _LONGEST_S:
        raise ArgumentError(f"--time-limit must be positive and at most {_LONGEST_S}, got {arguments.time_limit:g}")
    if arguments.list:
        return _list(_chosen(arguments, tuple(shape.name for shape in shapes_module.ALL)), arguments.json)
    if arguments.save:
        _refuse_unless_writable(arguments.save)
    device = default_device()
    chosen = _chosen(arguments, shapes_module.default_names(device.platform, arguments.quick))
    settings = _settings(arguments, device)
    _refuse_what_runs_nowhere(arguments, chosen, settings)
    versions = {"jax_version": jax.__version__, "torch_version": _version("torch"), "dtype": arguments.dtype}
    results: list[ShapeResult] = []
    with _progress(chosen, settings) as on_step:
        ceilings = _ceilings(settings, device, arguments.quick)
        on_step("ceilings")
        report = as_json([], device, ceilings, **versions)
        # When time may run out, the shapes that say most come first.
        for result in measure(shapes_module.by_priority(chosen), settings, device, ceilings, on_step):
            results = sorted([*results, result], key=lambda done: chosen.index(done.shape))
            report = as_json(results, device, ceilings, **versions)
            if arguments.save:
                arguments.save.write_text(json_text(report))
    missing = [shape.name for shape in chosen if shape not in [result.shape for result in results]]
    if arguments.json:
        print(json_text(report | {"not_reached": missing}))
    else:
        # Wrapped rows in a narrow terminal are easier to read than figures cut short.
        print_table(results, device, ceilings, Console(width=max(150, Console().width)), arguments.brief)
        if missing:
            print(f"not reached in {arguments.time_limit:g} s: {', '.join(missing)}")
    return int(any(timing.failed for result in results for timing in result.timings))


def _chosen(arguments: argparse.Namespace, default: tuple[str, ...]) -> tuple[Shape, ...]:
    patterns = [name for text in arguments.shapes for name in text.split(",") if name]
    if arguments.shapes and not patterns:
        raise ArgumentError("--shapes names no shape")
    try:
        return shapes_module.select(patterns or default)
    except ValueError as error:
        raise ArgumentError(str(error)) from None


def _refuse_unless_writable(path: Path) -> None:
    """Now, rather than after the first shape was timed."""
    if not path.absolute().parent.is_dir():
        raise ArgumentError(f"--save {path}: there is no such folder")
    existed = path.exists()
    try:
        path.open("a").close()
    except OSError as error:
        raise ArgumentError(f"--save {path}: {error.strerror}") from None
    if not existed:
        path.unlink()


def _settings(arguments: argparse.Namespace, device: Device) -> Settings:
    on_cpu = not device.queues_launches
    return Settings(
        dtype=jnp.dtype(arguments.dtype),
        implementations=tuple(dict.fromkeys(arguments.implementation)) or default_implementations(device.platform),
        rounds=arguments.rounds or (3 if arguments.quick else 5 if on_cpu else 9),
        round_s=0.05 if on_cpu else 0.02,
        compile_threads=1 if on_cpu else min(8, os.cpu_count() or 1),
        torch=not arguments.no_torch,
        time_limit_s=arguments.time_limit,
    )


@contextlib.contextmanager
def _progress(chosen: tuple[Shape, ...], settings: Settings) -> Iterator[Callable[[str], None]]:
    """A bar on standard error while that is a terminal; gives the function that advances it."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True, disable=not sys.stderr.isatty()) as progress:
        task = progress.add_task("ceilings", total=1 + len(chosen) * (len(settings.implementations) + 2))
        yield lambda step: progress.update(task, advance=1, description=step)


def _ceilings(settings: Settings, device: Device, quick: bool) -> Ceilings:
    if device.queues_launches:
        copy_bytes, matrix_size = 2 << 30, 8192
    else:
        copy_bytes, matrix_size = ((128 << 20), 1024) if quick else ((256 << 20), 2048)
    return measure_ceilings(
        settings.dtype,
        copy_bytes=copy_bytes,
        matrix_size=matrix_size,
        rounds=settings.rounds,
        round_s=settings.round_s,
    )


def _refuse_what_runs_nowhere(arguments: argparse.Namespace, chosen: tuple[Shape, ...], settings: Settings) -> None:
    """An implementation that was asked for by name and takes no chosen shape is a bad argument, not an empty table."""
    for name in arguments.implementation:
        reasons = [refusal(shape, name, settings.dtype) for shape in chosen]
        if all(reasons):
            raise ArgumentError(f"--implementation {name}: {reasons[0]}")


def _list(chosen: tuple[Shape, ...], as_objects: bool) -> int:
    rows = [
        {"name": shape.name, "min_bytes": shape.min_bytes(2), "flops": shape.flops, "context": shape.context}
        for shape in chosen
    ]
    if as_objects:
        print(json_text(rows))
    else:
        for row in rows:
            print(f"{row['name']:22} {row['min_bytes'] / 1e6:10,.1f} MB {row['flops'] / 1e9:10,.2f} GFLOP")
    return 0


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
