"""Checks every variant of the decode kernel on the device against the float32 definition.

The variants are those of the kernel report, so what runs here is the very code whose registers and shared memory were
judged. Each gets adversarial inputs: rows of every length around page and window ends, absent and impossible pages,
poison (NaN, Inf) in every byte that no query may read; once with all query tokens, once with ragged counts; the first
twice, for bit-identical results. `--implementation xla` runs the same checks through the public function on any device,
which is how the script itself is tested.
"""

import argparse
import dataclasses
import fnmatch
import json
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dots_jax.bench.run import cosine_difference
from dots_jax.decode import swa_latent_decode, swa_latent_decode_reference
from dots_jax.pages import PageTable
from pallas_kernels.report.registry import load_variants

PAGE_SIZE = 64
VARIANTS = "pallas_kernels.swa_latent_decode.variants"
CHECKED_ROWS = 24  # the definition is slow; these rows hold all special lengths
LENGTHS = (0, 1, 63, 64, 65, 512, 513, 514, 576, 577, 640, 641, 700, 2**30)
IMPOSSIBLE = (-1, -7, -(2**31), 2**31 - 1)
DISPATCHED = ("column_split-d1088-h64-s1-w513", "swapped-d1088-h8-s4-w513")  # also through the public function
COSINE_LIMIT, LSE_LIMIT, SPLIT_LSE_LIMIT = 5e-6, 1e-5, 1e-4


@dataclasses.dataclass(frozen=True)
class Case:
    """One compiled function and the sizes of its inputs."""

    name: str
    function: Callable[..., tuple[jax.Array, jax.Array]]
    q: jax.ShapeDtypeStruct
    kv_pages: jax.ShapeDtypeStruct
    columns: int
    window: int | None
    scale: float
    v_dim: int
    splits: int

    @property
    def arguments(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        """Shapes of (q, kv_pages, pages, lengths, counts)."""
        rows = self.q.shape[0]
        integers = [(rows, self.columns), (rows,), (rows,)]
        return (self.q, self.kv_pages, *(jax.ShapeDtypeStruct(shape, jnp.int32) for shape in integers))


@dataclasses.dataclass(frozen=True)
class Inputs:
    """Arrays of one call, `counts` aside, on the host."""

    q: np.ndarray
    kv_pages: np.ndarray
    pages: np.ndarray
    lengths: np.ndarray


def cases(implementation: str, batch: int | None, num_pages: int | None, only: str = "*") -> Iterator[Case]:
    """A case for each variant whose name matches `only`; `batch` and `num_pages` shrink them for slow devices."""
    for variant in load_variants(VARIANTS):
        if not fnmatch.fnmatchcase(variant.name, only):
            continue
        q, kv_pages, pages, *_ = variant.arguments
        function: Any = variant.function  # a functools.partial of the kernel's `decode`
        static = dict(function.keywords)
        config = static.pop("config", None)
        if implementation != "kernel":
            function = public(implementation, **static)
        case = Case(
            name=variant.name,
            function=function,
            q=jax.ShapeDtypeStruct((batch or q.shape[0], *q.shape[1:]), q.dtype),
            kv_pages=jax.ShapeDtypeStruct((num_pages or kv_pages.shape[0], *kv_pages.shape[1:]), q.dtype),
            columns=pages.shape[1],
            splits=config.splits if config else 1,
            **static,
        )
        yield case
        if variant.name in DISPATCHED:
            # As a user calls it; how many splits it takes is its own choice.
            name = f"dispatch-{variant.name}"
            yield dataclasses.replace(case, name=name, function=public(None, **static), splits=2)


def public(implementation: str | None, **static: Any) -> Callable[..., tuple[jax.Array, jax.Array]]:
    """The public function with the argument order of the kernel's."""

    def decode(q, kv_pages, pages, lengths, counts):
        table = PageTable(pages, lengths)
        return swa_latent_decode(
            q, kv_pages, table, counts=counts, return_lse=True, implementation=implementation, **static
        )

    return decode


def visible_range(case: Case, length: int, count: int) -> tuple[int, int]:
    """Logical positions [first, last) that some query of a row sees, inside the table."""
    oldest = 0 if case.window is None else max(0, length - count - case.window + 1)
    return oldest, min(length, case.columns * PAGE_SIZE)


def make_inputs(case: Case, seed: int) -> Inputs:
    """Random values where a query may read, poison everywhere else."""
    rng = np.random.default_rng(seed)
    rows, seq = case.q.shape[:2]
    num_pages, width = case.kv_pages.shape[0], case.kv_pages.shape[2]
    dtype = np.dtype(case.q.dtype)
    made = (rng.standard_normal((min(num_pages, 251), PAGE_SIZE, width), np.float32) * 0.1).astype(dtype)
    kv_pages = made[np.arange(num_pages) % len(made)]
    free = list(rng.permutation(np.arange(1, num_pages)))
    kv_pages[0] = np.nan  # entries that no query may follow lead here
    pages = np.zeros((rows, case.columns), np.int32)
    lengths = np.zeros(rows, np.int32)
    for row in range(rows):
        length = LENGTHS[row] if row < len(LENGTHS) else int(rng.integers(1, case.columns * PAGE_SIZE + 1))
        first, last = visible_range(case, length, seq)
        needed = range(first // PAGE_SIZE, -(-last // PAGE_SIZE))
        if len(needed) > len(free):
            continue  # the pool is used up: an empty row
        lengths[row] = length
        for column in needed:
            pages[row, column] = page = free.pop()
            poison(kv_pages[page], column * PAGE_SIZE, first, last)
    holes = rng.random((rows, case.columns)) < 0.05
    pages = np.where(holes & (np.arange(rows)[:, None] % 3 == 2), rng.choice(IMPOSSIBLE, pages.shape), pages)
    q = (rng.standard_normal(case.q.shape, np.float32) * 0.1).astype(dtype)
    return Inputs(q, kv_pages, pages.astype(np.int32), lengths)


def poison(page: np.ndarray, start: int, first: int, last: int) -> None:
    """Fills a page's tokens outside [first, last) with NaN and Inf; `start` is the position of its first token."""
    position = start + np.arange(PAGE_SIZE)
    outside = (position < first) | (position >= last)
    page[outside] = np.nan
    page[outside & (position % 2 == 1)] = np.inf


def expected(case: Case, inputs: Inputs, counts: np.ndarray, rows: int) -> tuple[np.ndarray, np.ndarray]:
    table = PageTable(jnp.asarray(inputs.pages[:rows]), jnp.asarray(inputs.lengths[:rows]))
    return swa_latent_decode_reference(
        inputs.q[:rows],
        inputs.kv_pages,
        table,
        window=case.window,
        scale=case.scale,
        v_dim=case.v_dim,
        counts=counts[:rows],
    )


def check(case: Case, compiled: Any, seed: int = 0) -> dict[str, Any]:
    """Figures of one variant, and `problem`: what is wrong, or None."""
    inputs = make_inputs(case, seed)
    rows, seq = case.q.shape[:2]
    limit = min(rows, CHECKED_ROWS)
    kv_pages = jnp.asarray(inputs.kv_pages)
    fixed = (jnp.asarray(inputs.q), kv_pages, jnp.asarray(inputs.pages), jnp.asarray(inputs.lengths))
    ragged = np.random.default_rng(seed + 1).integers(0, seq + 1, rows).astype(np.int32)
    figures: dict[str, Any] = {"variant": case.name, "cosine_difference": 0.0, "lse_error": 0.0, "max_error": 0.0}
    problems = []
    for label, counts in (("all tokens", np.full(rows, seq, np.int32)), ("ragged counts", ragged)):
        out, lse = (np.asarray(x) for x in compiled(*fixed, jnp.asarray(counts)))
        if label == "all tokens":
            again = [np.asarray(x) for x in compiled(*fixed, jnp.asarray(counts))]
            if again[0].tobytes() != out.tobytes() or again[1].tobytes() != lse.tobytes():
                problems.append("two runs differ")
        if not np.isfinite(out.astype(np.float32)).all():
            problems.append(f"{label}: NaN or Inf in the output")
        want_out, want_lse = expected(case, inputs, counts, limit)
        problems += compare(case, label, figures, (out[:limit].astype(np.float32), lse[:limit]), (want_out, want_lse))
    return figures | {"problem": "; ".join(problems) or None}


def compare(case: Case, label: str, figures: dict[str, Any], got: tuple, want: tuple) -> list[str]:
    """Adds the errors to `figures`, keeping the largest, and returns what is over its limit."""
    (out, lse), (want_out, want_lse) = got, want
    problems = []
    empty = np.isneginf(want_lse)
    if not np.array_equal(np.isneginf(lse), empty):
        problems.append(f"{label}: LSE is -inf for other queries than it should be")
    if out[empty].any():
        problems.append(f"{label}: a query that sees no key has an output")
    both = ~empty & np.isfinite(lse)
    lse_errors = np.abs(lse[both] - want_lse[both]) / np.maximum(1, np.abs(want_lse[both]))
    errors = {
        "cosine_difference": cosine_difference(out, want_out),
        "lse_error": float(np.max(lse_errors, initial=0.0)),
        "max_error": float(np.max(np.abs(out - want_out), initial=0.0)),
    }
    limits = {
        "cosine_difference": COSINE_LIMIT,
        "lse_error": LSE_LIMIT if case.splits == 1 else SPLIT_LSE_LIMIT,
        "max_error": 1e-3,
    }
    for name, error in errors.items():
        if not error <= limits[name]:
            problems.append(f"{label}: {name} {error:.1e} over {limits[name]:.0e}")
        figures[name] = float(np.fmax(figures[name], error))
    return problems


def compile_case(case: Case) -> Any:
    compiled = jax.jit(case.function).lower(*case.arguments).compile()
    on_gpu = jax.devices()[0].platform == "gpu"
    if on_gpu and case.name.startswith("dispatch-") and "mosaic_gpu" not in (compiled.as_text() or ""):
        raise RuntimeError("the public function did not choose the kernel")
    return compiled


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Checks every variant of the decode kernel on the device.")
    parser.add_argument(
        "--implementation", choices=("kernel", "xla"), default="kernel", help="kernel: each variant; xla: a dry run"
    )
    parser.add_argument("--batch", type=int, help="rows, instead of the variant's")
    parser.add_argument("--pages", type=int, help="pages in the pool, instead of the variant's")
    parser.add_argument("--only", default="*", help="shell pattern of variant names")
    parser.add_argument("--threads", type=int, default=8, help="compilers at once (default: %(default)s)")
    parser.add_argument("--deadline", type=float, help="seconds after which no further variant is started")
    parser.add_argument("--json", type=Path, help="write all figures there")
    arguments = parser.parse_args(argv)
    started = time.monotonic()
    todo = list(cases(arguments.implementation, arguments.batch, arguments.pages, arguments.only))
    results = []
    print(f"{jax.devices()[0].device_kind}, jax {jax.__version__}: {len(todo)} variants")
    with ThreadPoolExecutor(arguments.threads) as pool:
        futures = [pool.submit(compile_case, case) for case in todo]
        for case, future in zip(todo, futures, strict=True):
            results.append(attempt(case, future, started, arguments.deadline))
            result = results[-1]
            figures = " ".join(f"{name} {result[name]:.1e}" for name in ("cosine_difference", "lse_error", "max_error"))
            print(f"{case.name:45} {figures}  {result['problem'] or 'ok'}", flush=True)
            if arguments.json:
                arguments.json.write_text(json.dumps(results, indent=2))
    bad = sum(result["problem"] is not None for result in results)
    print(f"{len(results) - bad} of {len(results)} variants agree, {time.monotonic() - started:.0f} s")
    return int(bad > 0)


def attempt(case: Case, future: Any, started: float, deadline: float | None) -> dict[str, Any]:
    """`check`, with a failure of any kind as the problem: one broken variant must not hide the others."""
    nothing = {"variant": case.name, **dict.fromkeys(("cosine_difference", "lse_error", "max_error"), float("nan"))}
    if deadline is not None and time.monotonic() - started > deadline:
        future.cancel()
        return nothing | {"problem": "not reached before the deadline"}
    try:
        return check(case, future.result())
    except Exception as error:  # compilers and drivers raise many kinds
        return nothing | {"problem": " ".join(f"{type(error).__name__}: {error}".split())[:300]}


if __name__ == "__main__":
    sys.exit(main())
