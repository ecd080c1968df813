"""`dots-jax kernel-report`: compiles every GPU kernel without a GPU and prints what the compiler made of it."""

import argparse
import importlib
import importlib.util
import itertools
import sys
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from dots_jax.cli.errors import ArgumentError
from dots_jax.cli.output import json_text
from pallas_kernels.report import registry, toolchain
from pallas_kernels.report.compile import Entry, compile_variants
from pallas_kernels.report.table import print_table
from pallas_kernels.report.target import UnsupportedArchitectureError, target_config
from pallas_kernels.report.variant import Variant

_DESCRIPTION = """Compiles every variant of the Pallas kernels for a GPU that need not be present, and prints
registers, spilled bytes, shared memory, tensor-core instructions, bulk copies and compile seconds. Exit code 1 if a
variant spills, needs more shared memory than a block can have, lacks the instructions it should have, or does not
compile; 2 for bad arguments or missing packages."""


def add_parser(subparsers) -> None:
    """Adds the command."""
    parser = subparsers.add_parser(
        "kernel-report", help="compile the GPU kernels without a GPU and report on the code", description=_DESCRIPTION
    )
    parser.add_argument("--arch", default="sm_90a", help="architecture to compile for (default: %(default)s)")
    parser.add_argument("--json", action="store_true", help="print a list of objects instead of a table")
    parser.add_argument(
        "--kernel", action="append", default=[], metavar="NAME", help="only these kernels (shell pattern, repeatable)"
    )
    parser.add_argument(
        "--variant", action="append", default=[], metavar="NAME", help="only these variants (shell pattern, repeatable)"
    )
    parser.add_argument("--list", action="store_true", help="list the variants and compile nothing")
    parser.add_argument("--keep", type=Path, metavar="DIR", help="keep PTX, machine code and logs in this folder")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="compilers at once (default: %(default)s)")
    parser.add_argument(
        "--timeout", type=float, default=600, metavar="S", help="seconds for one variant (default: %(default)s)"
    )
    parser.add_argument(
        "--module", action="append", default=[], help="modules with a variants() function, instead of the built-in ones"
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Runs the command.

    Returns:
      1 when a variant has a fault, else 0.
    """
    if arguments.jobs < 1:
        raise ArgumentError(f"--jobs must be at least 1, got {arguments.jobs}")
    if not arguments.timeout > 0:
        raise ArgumentError(f"--timeout must be positive, got {arguments.timeout:g}")
    try:
        target_config(arguments.arch)
    except UnsupportedArchitectureError as error:
        raise ArgumentError(str(error)) from None
    if arguments.keep and arguments.keep.exists() and not arguments.keep.is_dir():
        raise ArgumentError(f"--keep {arguments.keep} is not a folder")
    pairs = _select(arguments)
    if arguments.list:
        return _list(pairs, arguments.json)
    if missing := toolchain.missing_packages():
        raise ArgumentError(f"{', '.join(missing)} not installed: {toolchain.INSTALL_HINT}")
    if mismatch := toolchain.version_mismatch():
        raise ArgumentError(mismatch)
    if arguments.keep:
        _make_folder(arguments.keep)
    entries = _compile(pairs, arguments)
    if arguments.json:
        print(json_text([entry.as_json() for entry in entries]))
    else:
        print_table(entries, _console())
    return int(any(entry.faults for entry in entries))


def _select(arguments: argparse.Namespace) -> list[tuple[str, Variant]]:
    modules = arguments.module or registry.kernel_modules()
    pairs: list[tuple[str, Variant]] = []
    for module in modules:
        if arguments.module and not _exists(module):
            raise ArgumentError(f"--module {module} cannot be imported")
        try:
            pairs += [(module, variant) for variant in registry.load_variants(module)]
        except AttributeError:
            if hasattr(importlib.import_module(module), "variants"):
                raise
            raise ArgumentError(f"--module {module} has no function variants()") from None
    chosen = registry.select(pairs, arguments.kernel, arguments.variant)
    if not chosen:
        names = ", ".join(f"{variant.kernel}/{variant.name}" for _, variant in pairs) or "none"
        raise ArgumentError(f"no variant matches; there are: {names}")
    return chosen


def _make_folder(path: Path) -> None:
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ArgumentError(f"--keep {path}: {error.strerror}") from None


def _exists(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):
        return False


def _list(pairs: list[tuple[str, Variant]], as_json: bool) -> int:
    if as_json:
        print(json_text([{"kernel": variant.kernel, "variant": variant.name} for _, variant in pairs]))
    else:
        for _, variant in pairs:
            shapes = itertools.groupby(f"{a.dtype}{list(a.shape)}" for a in variant.arguments)
            counted = [(shape, sum(1 for _ in same)) for shape, same in shapes]
            listed = ", ".join(shape if count == 1 else f"{count} x {shape}" for shape, count in counted)
            print(f"{variant.kernel}/{variant.name}: {listed}")
    return 0


def _compile(pairs: list[tuple[str, Variant]], arguments: argparse.Namespace) -> list[Entry]:
    """Entries in the order of `pairs`, with a bar on standard error while that is a terminal."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    order = {(variant.kernel, variant.name): position for position, (_, variant) in enumerate(pairs)}
    entries = []
    with Progress(*columns, console=Console(stderr=True), transient=True, disable=not sys.stderr.isatty()) as progress:
        task = progress.add_task(f"compiling for {arguments.arch}", total=len(pairs))
        for entry in compile_variants(
            pairs, arguments.arch, jobs=arguments.jobs, timeout_s=arguments.timeout, keep=arguments.keep
        ):
            entries.append(entry)
            progress.update(task, advance=1, description=f"{entry.kernel}/{entry.variant}")
    return sorted(entries, key=lambda entry: order[entry.kernel, entry.variant])


def _console() -> Console:
    # Wrapped rows in a narrow terminal are easier to read than figures cut short.
    return Console(width=max(180, Console().width))
