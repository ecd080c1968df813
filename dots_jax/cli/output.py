"""What every command does with its output."""

import json
import math
import os
import sys
from typing import Any

READER_GONE = 141  # what a shell reports for a program that a closed pipe ended


def json_text(value: Any) -> str:
    """Strict JSON: NaN and infinities, for which it has no words, become null."""
    return json.dumps(_finite(value), indent=2, allow_nan=False)


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value


def discard_output() -> None:
    """Sends what is still unwritten nowhere, so that Python's own flush at exit does not complain again."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
