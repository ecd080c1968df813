"""Requests from recorded traces of real serving workloads.

Two public formats are read, told apart by the first line: the Azure LLM inference trace (CSV with `ContextTokens` and
`GeneratedTokens`) and the Mooncake trace (one JSON object a line with `input_length` and `output_length`). Arrival
times and prefix identities are not used: the job replays the requests in order, as fast as pages allow.
"""

import contextlib
import csv
import json
import os
from collections.abc import Iterator
from pathlib import Path

from dots_jax.workload.request import Request

CSV_COLUMNS = ("ContextTokens", "GeneratedTokens")
JSON_KEYS = ("input_length", "output_length")


class TraceError(ValueError):
    """A trace cannot be used; the message starts with `file:line: `."""


def read_trace(path: str | os.PathLike[str], *, longest: int) -> tuple[Request, ...]:
    """Reads a trace of either format.

    Args:
      path: the file.
      longest: tokens, context and output together, above which a request is an error of the trace.

    Raises:
      TraceError: a column or key is missing, a length is not a whole number, below 1 or above `longest`, or there is no
        request at all.
      OSError: the file cannot be read.
    """
    file = Path(path)
    try:
        lines = file.read_text(encoding="utf-8-sig").splitlines()
    except UnicodeDecodeError as error:
        raise TraceError(f"{file}:1: not a text file ({error.reason} at byte {error.start})") from None
    rows = _json_rows if lines and lines[0].lstrip().startswith("{") else _csv_rows
    requests = []
    for place, fields in rows(file, lines):
        lengths = [_tokens(place, name, value, longest) for name, value in fields.items()]
        request = Request(*lengths)
        if request.tokens > longest:
            raise TraceError(f"{place}: {' + '.join(fields)} = {request.tokens} tokens, at most {longest} are possible")
        requests.append(request)
    if not requests:
        raise TraceError(f"{file}:{len(lines) + 1}: expected a request, got the end of the file")
    return tuple(requests)


def _json_rows(file: Path, lines: list[str]) -> Iterator[tuple[str, dict[str, object]]]:
    for number, line in enumerate(lines, 1):
        place = f"{file}:{number}"
        if not line.strip():
            continue
        try:
            data = json.loads(line)
        except json.JSONDecodeError as error:
            raise TraceError(f"{place}: not a JSON object ({error.msg} at column {error.colno})") from None
        except (ValueError, RecursionError) as error:  # thousands of digits, thousands of brackets
            raise TraceError(f"{place}: cannot be read as JSON ({error})") from None
        if not isinstance(data, dict):
            raise TraceError(f"{place}: expected a JSON object, got {type(data).__name__}")
        yield place, _pick(place, data, JSON_KEYS)


def _csv_rows(file: Path, lines: list[str]) -> Iterator[tuple[str, dict[str, object]]]:
    reader = csv.reader(lines)
    try:
        header = [name.strip() for name in next(reader, [])]
        _pick(f"{file}:1", dict.fromkeys(header), CSV_COLUMNS)
        for cells in reader:
            place = f"{file}:{reader.line_num}"
            if not cells:
                continue
            yield place, _pick(place, dict(zip(header, cells, strict=False)), CSV_COLUMNS)
    except csv.Error as error:
        raise TraceError(f"{file}:{max(1, reader.line_num)}: cannot be read as CSV ({error})") from None


def _pick(place: str, data: dict, names: tuple[str, ...]) -> dict[str, object]:
    """The named entries; a missing one is an error that lists what there is."""
    for name in names:
        if name not in data:
            raise TraceError(f"{place}: no {name!r}; found {', '.join(map(str, data)) or 'nothing'}")
    return {name: data[name] for name in names}


def _tokens(place: str, name: str, value: object, longest: int) -> int:
    if isinstance(value, str):
        with contextlib.suppress(ValueError):  # the check below words the error
            value = int(value)
    if isinstance(value, bool) or not isinstance(value, int):
        raise TraceError(f"{place}: {name}: expected a whole number of tokens, got {value!r}")
    if not 1 <= value <= longest:
        raise TraceError(f"{place}: {name}: expected 1 to {longest} tokens, got {value}")
    return value
