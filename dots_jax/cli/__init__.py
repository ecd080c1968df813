"""The command line: `python -m dots_jax` or `dots-jax`.

Each command is one module with `add_parser(subparsers)`, whose parser has `run=<function of the parsed arguments>`
among its defaults; the function returns the exit code, or raises `ArgumentError` for a value that argparse
could not judge.
"""

import argparse
import errno
import importlib
import sys
from collections.abc import Sequence
from typing import NoReturn

import dots_jax
from dots_jax.cli.errors import ArgumentError
from dots_jax.cli.output import READER_GONE, discard_output
from dots_jax.cli.platform import check_platform

COMMANDS = ("decode", "bench", "info", "kernel_report")


class OneLineParser(argparse.ArgumentParser):
    """A parser whose errors are one line, without the usage that would push it off the screen."""

    def error(self, message: str) -> NoReturn:
        """Prints the message and exits with code 2."""
        self.exit(2, f"{self.prog}: error: {message} (see {self.prog} --help)\n")


def build_parser() -> argparse.ArgumentParser:
    """The parser with every command."""
    parser = OneLineParser(
        prog="dots-jax", description="Sliding-window latent decode of the Dots hybrid models, in JAX."
    )
    parser.add_argument("--version", action="version", version=f"dots-jax {dots_jax.__version__}")
    subparsers = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name in COMMANDS:
        importlib.import_module(f"dots_jax.cli.{name}").add_parser(subparsers)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command.

    Returns:
      0 when all went well, 1 when a check failed, 2 for bad arguments (one line on standard error, no traceback).
    """
    try:
        return _run(argv)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130


def _run(argv: Sequence[str] | None) -> int:
    try:
        arguments = build_parser().parse_args(argv)
    except SystemExit as stop:  # argparse exits by itself for --help and for bad arguments
        return int(stop.code or 0)
    try:
        if arguments.command != "kernel-report":  # which compiles for a GPU that is not here
            check_platform()
        return arguments.run(arguments)
    except ArgumentError as error:
        print(f"dots-jax {arguments.command.replace('_', '-')}: error: {error}", file=sys.stderr)
        return 2


def entry_point() -> None:
    """What the `dots-jax` script calls."""
    try:
        code = main()
        sys.stdout.flush()
    except BrokenPipeError:  # as `| head` does once it has seen enough
        discard_output()
        code = READER_GONE
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        discard_output()
        print(f"dots-jax: error: the output could not be written: {error.strerror}", file=sys.stderr)
        code = 1
    sys.exit(code)
