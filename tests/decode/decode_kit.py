"""Decode problems for tests: adversarial inputs and the comparison with the definition."""

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dots_jax.bench.run import cosine_difference
from dots_jax.decode import swa_latent_decode, swa_latent_decode_reference
from dots_jax.pages import PageTable


@dataclass(frozen=True)
class Problem:
    """One call of the decode, with host arrays that a test can tamper with."""

    q: Any
    kv_pages: Any
    pages: np.ndarray
    lengths: np.ndarray
    window: int | None = 513
    scale: float = 0.0625
    v_dim: int = 32
    counts: np.ndarray | None = None

    @property
    def table(self) -> PageTable:
        return PageTable(jnp.asarray(self.pages, jnp.int32), jnp.asarray(self.lengths, jnp.int32))

    @property
    def static(self) -> dict[str, Any]:
        return {"window": self.window, "scale": self.scale, "v_dim": self.v_dim, "counts": self.counts}

    def decode(self, **options) -> tuple[np.ndarray, np.ndarray]:
        counts = None if self.counts is None else jnp.asarray(self.counts)
        out, lse = _jitted_decode(
            jnp.asarray(self.q),
            jnp.asarray(self.kv_pages),
            self.table,
            counts,
            window=self.window,
            scale=self.scale,
            v_dim=self.v_dim,
            **options,
        )
        assert out.dtype == self.q.dtype
        assert lse.dtype == jnp.float32
        return np.asarray(out.astype(jnp.float32)), np.asarray(lse)

    def reference(self) -> tuple[np.ndarray, np.ndarray]:
        return swa_latent_decode_reference(self.q, self.kv_pages, self.table, **self.static)

    def but(self, **changes) -> "Problem":
        return replace(self, **changes)


@partial(jax.jit, static_argnames=("window", "scale", "v_dim", "implementation"))
def _jitted_decode(q, kv_pages, table, counts, **options):
    """Shared by all tests, so that problems of one shape compile once."""
    return swa_latent_decode(q, kv_pages, table, counts=counts, return_lse=True, **options)


def make_problem(
    lengths,
    *,
    steps=1,
    heads=2,
    width=48,
    v_dim=32,
    dtype=jnp.bfloat16,
    table_width=None,
    num_pages=None,
    seed=0,
    **rest,
) -> Problem:
    """Random queries and cache (scale 0.1) over a random page order, every page of each row present."""
    rng = np.random.default_rng(seed)
    lengths = np.asarray(lengths, np.int32)
    held = -(-lengths // 64)
    table_width = table_width or max(1, int(held.max(initial=1)))
    num_pages = num_pages or int(held.sum()) + 3
    order = rng.permutation(num_pages)
    pages = np.full((len(lengths), table_width), -1, np.int32)
    for b, n in enumerate(held):
        used, order = order[: min(n, table_width)], order[min(n, table_width) :]
        pages[b, : len(used)] = used

    def values(*shape):
        return (0.1 * rng.standard_normal(shape)).astype(np.float32).astype(dtype)

    q = values(len(lengths), steps, heads, width)
    return Problem(q, values(num_pages, 64, width), pages, lengths, v_dim=v_dim, **rest)


def readable_slots(problem: Problem) -> np.ndarray:
    """bool[N, 64]: the cache slots that some query of the step may read."""
    readable = np.zeros(problem.kv_pages.shape[:2], bool)
    steps = problem.q.shape[1]
    for b, length in enumerate(problem.lengths):
        count = steps if problem.counts is None else problem.counts[b]
        first = 0 if problem.window is None else max(0, length - count - problem.window + 1)
        for k in range(first, min(length, problem.pages.shape[1] * 64) if count else 0):
            page = problem.pages[b, k // 64]
            if 0 <= page < len(readable):
                readable[page, k % 64] = True
    return readable


def poison(problem: Problem, seed: int = 0) -> Problem:
    """The same problem with NaN, +Inf and -Inf in every slot that nobody may read."""
    kv_pages = np.array(problem.kv_pages)
    unreadable = ~readable_slots(problem)
    rng = np.random.default_rng(seed)
    kinds = np.array([np.nan, np.inf, -np.inf], np.float32).astype(kv_pages.dtype)
    kv_pages[unreadable] = rng.choice(kinds, (int(unreadable.sum()), kv_pages.shape[2]))
    return problem.but(kv_pages=kv_pages)


def zero_unreadable(problem: Problem) -> Problem:
    """The same problem with 0 in every slot that nobody may read."""
    kv_pages = np.array(problem.kv_pages)
    kv_pages[~readable_slots(problem)] = 0
    return problem.but(kv_pages=kv_pages)


def assert_close(got, expected, *, cosine=5e-6, absolute=1e-3, lse=1e-5) -> None:
    """Tight enough that one dropped key, a window off by one or a shifted column fails."""
    (out, out_lse), (want, want_lse) = got, expected
    assert np.array_equal(np.isneginf(out_lse), np.isneginf(want_lse))
    assert not out[np.isneginf(want_lse)].any()
    assert cosine_difference(out, want) < cosine
    np.testing.assert_allclose(out, want, rtol=0, atol=absolute)
    finite = np.isfinite(want_lse)
    np.testing.assert_allclose(out_lse[finite], want_lse[finite], rtol=0, atol=lse)


def uniform_problem(lengths, *, window, steps=1, heads=1) -> Problem:
    """Queries 0 and value column 0 = the token's position, in float32: the output is the mean visible position."""
    problem = make_problem(lengths, steps=steps, heads=heads, width=8, v_dim=1, dtype=np.float32, window=window)
    kv_pages = np.zeros_like(problem.kv_pages)
    for row in problem.pages:
        for column, page in enumerate(row):
            if page >= 0:
                kv_pages[page, :, 0] = np.arange(64) + 64 * column
    return problem.but(q=np.zeros_like(problem.q), kv_pages=kv_pages)
