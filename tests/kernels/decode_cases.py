"""Test kit of the decode kernels: adversarial inputs, the comparison with the definition, and the list of cases.

Every cache byte that no query may read is NaN or Inf, and every table entry that does not matter is the id of such a
page.
"""

import dataclasses

import jax.numpy as jnp
import numpy as np
from jax._src.pallas.mosaic_gpu.interpret import interpret_pallas_call

from dots_jax.bench.run import cosine_difference
from dots_jax.decode.reference import swa_latent_decode_reference
from dots_jax.pages import PageTable
from pallas_kernels.swa_latent_decode import Config, decode

PAGE = 64


@dataclasses.dataclass(frozen=True)
class Case:
    """One call. `lengths` (and `counts`, default all `seq`) give the batch; `holes` plants (row, column, page id)."""

    name: str
    lengths: tuple[int, ...]
    seq: int = 1
    heads: int = 8
    width: int = 192
    v_dim: int = 128
    window: int | None = 65
    counts: tuple[int, ...] | None = None
    table_width: int = 12
    holes: tuple[tuple[int, int, int], ...] = ()
    shared: tuple[tuple[int, int, int, int], ...] = ()  # (row, column) takes the page of (row, column)
    dtype: str = "bfloat16"
    amplitude: float = 0.1
    scale: float = 0.0625
    seed: int = 0


@dataclasses.dataclass(frozen=True)
class Inputs:
    q: np.ndarray
    kv_pages: np.ndarray
    pages: np.ndarray
    lengths: np.ndarray
    counts: np.ndarray


def visible(case: Case, inputs: Inputs, row: int, token: int) -> list[tuple[int, int]]:
    """(physical page, offset) of the keys that query `token` of `row` sees, in order."""
    if token >= inputs.counts[row]:
        return []
    position = int(inputs.lengths[row]) - int(inputs.counts[row]) + token
    start = 0 if case.window is None else max(0, position - case.window + 1)
    stop = min(position + 1, PAGE * inputs.pages.shape[1])
    keys = ((int(inputs.pages[row, k // PAGE]), k % PAGE) for k in range(start, stop))
    return [(page, offset) for page, offset in keys if 0 <= page < inputs.kv_pages.shape[0]]


def build(case: Case) -> Inputs:
    """Inputs of a case: random where something may be read, poison everywhere else."""
    rng = np.random.default_rng(case.seed)
    batch = len(case.lengths)
    dtype = jnp.dtype(case.dtype)
    num_pages = batch * case.table_width + 1
    pages = rng.permutation(num_pages)[: batch * case.table_width].reshape(batch, case.table_width).astype(np.int32)
    for row, column, page in case.holes:
        pages[row, column] = page
    for row, column, other_row, other_column in case.shared:
        pages[row, column] = pages[other_row, other_column]
    q = rng.normal(size=(batch, case.seq, case.heads, case.width)) * case.amplitude
    counts = np.asarray(case.counts if case.counts is not None else [case.seq] * batch, np.int32)
    kv = np.full((num_pages, PAGE, case.width), np.nan, np.float32)
    kv[:, ::3] = np.inf
    kv[:, 1::3] = -np.inf
    inputs = Inputs(q.astype(dtype), kv, pages, np.asarray(case.lengths, np.int32), counts)
    seen = {key for row in range(batch) for token in range(case.seq) for key in visible(case, inputs, row, token)}
    for page, offset in sorted(seen):
        kv[page, offset] = rng.normal(size=case.width) * case.amplitude
    return dataclasses.replace(inputs, kv_pages=kv.astype(dtype))


def reference(case: Case, inputs: Inputs) -> tuple[np.ndarray, np.ndarray]:
    """The project's definition on the rounded inputs: float32 output and natural-log LSE."""
    table = PageTable(jnp.asarray(inputs.pages), jnp.asarray(inputs.lengths))
    named = {"window": case.window, "scale": case.scale, "v_dim": case.v_dim}
    q, kv_pages, counts = jnp.asarray(inputs.q), jnp.asarray(inputs.kv_pages), jnp.asarray(inputs.counts)
    return swa_latent_decode_reference(q, kv_pages, table, **named, counts=counts)


def run(case: Case, config: Config | None, inputs: Inputs | None = None) -> tuple[np.ndarray, np.ndarray]:
    """The kernel, simulated with race detection."""
    inputs = build(case) if inputs is None else inputs
    out, lse = decode(
        jnp.asarray(inputs.q),
        jnp.asarray(inputs.kv_pages),
        jnp.asarray(inputs.pages),
        jnp.asarray(inputs.lengths),
        jnp.asarray(inputs.counts),
        window=case.window,
        scale=case.scale,
        v_dim=case.v_dim,
        config=config,
        interpret=True,
    )
    assert out.dtype == inputs.q.dtype
    out, lse = np.asarray(out), np.asarray(lse)
    races = interpret_pallas_call.get_races()  # JAX 0.11 only logs them
    assert races is None or not races.races_found
    return out, lse


def compare(case: Case, got: tuple[np.ndarray, np.ndarray], expected: tuple[np.ndarray, np.ndarray], splits: int = 1):
    """Asserts the tolerances of the project: cosine difference 5e-6, LSE 1e-5 (1e-4 with splits, relative above 1)."""
    (out, lse), (expected_out, expected_lse) = got, expected
    assert np.isfinite(out.astype(np.float32)).all(), case.name
    empty = np.isneginf(expected_lse)
    np.testing.assert_array_equal(np.isneginf(lse), empty, case.name)
    assert not out[empty].astype(np.float32).any(), case.name
    assert cosine_difference(out, expected_out) < 5e-6, case.name
    if case.amplitude <= 0.1:
        assert np.abs(out.astype(np.float64) - expected_out).max() < 1e-3, case.name
    tolerance = 1e-5 if splits == 1 else 1e-4
    np.testing.assert_allclose(lse[~empty], expected_lse[~empty], rtol=tolerance, atol=tolerance, err_msg=case.name)


def check(case: Case, config: Config | None):
    """Builds the inputs, runs the kernel and compares."""
    inputs = build(case)
    compare(case, run(case, config, inputs), reference(case, inputs), 1 if config is None else config.splits)


_HUGE, _NEGATIVE = 2**31 - 1, -(2**31)

ADVERSARIAL = (
    Case("length far past the table", (2**30, 70), seq=2, window=None, table_width=2),
    Case("length and window far past the table", (2**30, 70), seq=2, table_width=2),
    Case(
        "page ids huge, negative and one past the pool",
        (150, 300, 130),
        seq=2,
        window=100,
        table_width=5,
        holes=((0, 1, _HUGE), (1, 3, _NEGATIVE), (1, 4, -1), (2, 0, 3 * 5 + 1)),
    ),
    Case("pages shared between rows and repeated in one", (190, 150), window=None, table_width=3,
         shared=((1, 0, 0, 1), (0, 2, 0, 0))),
    Case("valid ids behind the length and before the window", (130, 65, 3), window=65, table_width=6),
    Case("window start and end inside tiles of the pool's last pages", (97, 161), seq=3, window=33, table_width=3),
    Case("all pages of one row absent", (100, 180, 190), window=None, table_width=3,
         holes=((1, 0, -1), (1, 1, _HUGE), (1, 2, _NEGATIVE))),
    Case("scores of 1e4", (150, 70), window=None, table_width=3, amplitude=30.0, scale=1.0),
    Case("ragged counts", (130, 66, 9, 2, 1, 0), seq=4,
         counts=(4, 2, 0, 4, 4, 4), table_width=3),
    Case("lengths at the ends of int32", (-1, _NEGATIVE, _NEGATIVE + 3, _HUGE, 70), seq=2, window=None, table_width=2),
    Case("window of nearly 2^31, more queries than tokens", (4, _NEGATIVE, 70), seq=8, heads=4, window=_HUGE - 1,
         table_width=2),
    Case("length and window of nearly 2^31", (_HUGE, 70), seq=2, window=_HUGE - 60, table_width=2),
    Case("window of one", (1, 64, 65), window=1, table_width=3),
    Case("float16", (150, 20), seq=2, window=100, dtype="float16", table_width=3),
)  # fmt: skip


def covering(values: dict[str, tuple], seed: int = 0) -> list[dict]:
    """A small set of settings in which every pair of values of two different keys occurs. Greedy, repeatable."""
    rng = np.random.default_rng(seed)
    keys = list(values)
    missing = {
        ((a, x), (b, y)) for i, a in enumerate(keys) for b in keys[i + 1 :] for x in values[a] for y in values[b]
    }
    chosen = []
    while missing:
        candidates = [{key: values[key][rng.integers(len(values[key]))] for key in keys} for _ in range(60)]
        gains = [
            [pair for pair in missing if all(setting[key] == value for key, value in pair)] for setting in candidates
        ]
        best = max(range(len(candidates)), key=lambda n: len(gains[n]))
        if gains[best]:
            chosen.append(candidates[best])
            missing -= set(gains[best])
    return chosen
