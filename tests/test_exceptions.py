"""Exceptions cross process borders (multiprocessing, futures) as pickles."""

import pickle
import re
from pathlib import Path

import pytest

from dots_jax.cli.errors import ArgumentError
from dots_jax.host import HostMemoryError, PageStoreError, SlotTypeError
from dots_jax.pages.pool import PagePoolError
from dots_jax.workload.trace import TraceError
from pallas_kernels.report.parse import ReportFormatError
from pallas_kernels.report.target import UnsupportedArchitectureError

EXCEPTIONS = [
    ArgumentError("message"),
    HostMemoryError(20, 10),
    HostMemoryError(20, 10, ": the cap of a pool"),
    PagePoolError("message"),
    PageStoreError("message"),
    ReportFormatError("message"),
    SlotTypeError("message"),
    TraceError("message"),
    UnsupportedArchitectureError("message"),
]


@pytest.mark.parametrize("error", EXCEPTIONS, ids=lambda error: type(error).__name__)
def test_exceptions_survive_pickling(error):
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is type(error)
    assert str(copy) == str(error)
    assert vars(copy) == vars(error)


def test_the_table_is_complete():
    root = Path(__file__).parents[1]
    sources = [path for package in ("dots_jax", "pallas_kernels") for path in (root / package).rglob("*.py")]
    pattern = re.compile(r"^class (\w+)\([^)]*(?:Error|Exception)\b[^)]*\):", re.MULTILINE)
    defined = {name for path in sources for name in pattern.findall(path.read_text(encoding="utf-8"))}
    assert defined == {type(error).__name__ for error in EXCEPTIONS}
