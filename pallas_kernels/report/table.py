"""Prints report entries as a table for people."""

from collections.abc import Sequence

from rich import box
from rich.console import Console
from rich.table import Table

from pallas_kernels.report.compile import Entry

_COLUMNS = (
    ("registers", "regs"),
    ("spill_bytes", "spill B"),
    ("stack_bytes", "stack B"),
    ("smem_bytes", "smem B"),
    ("tensor_core_instructions", "tensor"),
    ("bulk_copies", "bulk"),
    ("cluster_stores", "cluster st"),
    ("barrier_instructions", "barrier"),
    ("instructions", "all"),
)


def print_table(entries: Sequence[Entry], console: Console) -> None:
    """One row for each variant, then a line for each fault."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name in ("kernel", "variant"):
        table.add_column(name, no_wrap=True)
    for _, title in _COLUMNS:
        table.add_column(title, justify="right", no_wrap=True)
    table.add_column("compile s", justify="right", no_wrap=True)
    table.add_column("", no_wrap=True)
    for entry in entries:
        figures = [f"{getattr(entry.figures, name):,}" if entry.figures else "-" for name, _ in _COLUMNS]
        seconds = "-" if entry.compile_s is None else f"{entry.compile_s:.1f}"
        verdict = "FAULT" if entry.faults else "ok"
        table.add_row(entry.kernel, entry.variant, *figures, seconds, verdict)
    console.print(table)
    for entry in entries:
        for fault in entry.faults:
            console.print(f"{entry.kernel}/{entry.variant}: {fault}", soft_wrap=True, highlight=False, markup=False)
