"""Inputs of a shape: one big pool of pages, and several page tables over parts of it that no other table touches.

Calls that rotate through the tables read different bytes each time, so that a cache which holds one call's pages is of
no use to the next.
"""

import functools
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from dots_jax.bench.shapes import PAGE_SIZE, Shape
from dots_jax.pages import PageTable

_RANDOM_ROWS = 16 * 1024 + 1  # a larger pool repeats these values, at other addresses and other offsets in the page


class Call(NamedTuple):
    """What differs from one call to the next."""

    q: jax.Array
    table: PageTable


@dataclass(frozen=True)
class Inputs:
    """The pool and the calls that rotate through it.

    Args:
      kv_pages: `[N, page_size, width]`.
      calls: each over pages of its own.
    """

    kv_pages: jax.Array
    calls: Sequence[Call]

    def sets(self, calls_per_launch: int) -> list[tuple[jax.Array, list[Call]]]:
        """Arguments of successive launches: the pool, and as many calls as one launch makes."""
        count = len(self.calls)
        launches = math.lcm(count, calls_per_launch) // calls_per_launch
        rotation = itertools.cycle(self.calls)
        return [(self.kv_pages, list(itertools.islice(rotation, calls_per_launch))) for _ in range(launches)]


def row_lengths(shape: Shape) -> np.ndarray:
    """int32[B] tokens of each row: the context; with a window up to 63 fewer, so that rows end anywhere in a page."""
    if shape.window is None:
        return np.full(shape.batch, shape.context, np.int32)
    return (shape.context - np.arange(shape.batch) * 37 % PAGE_SIZE).astype(np.int32)


def present_pages(shape: Shape) -> np.ndarray:
    """bool[B, P]: the pages that some query of the row sees; the others are absent, as an engine would have it."""
    lengths = row_lengths(shape)[:, None]
    column = np.arange(-(-shape.context // PAGE_SIZE))
    first = 0 if shape.window is None else np.maximum(lengths - shape.seq - (shape.window - 1), 0) // PAGE_SIZE
    return (column >= first) & (column < -(-lengths // PAGE_SIZE))


def abstract_arguments(shape: Shape, dtype, distinct: int, calls_per_launch: int) -> tuple[Any, list[Any]]:
    """Shapes of one element of `Inputs.sets`, for compiling before any input exists."""
    present = present_pages(shape)
    kv_pages = jax.ShapeDtypeStruct((distinct * int(present.sum()), PAGE_SIZE, shape.width), dtype)
    table = PageTable(jnp.zeros(present.shape, jnp.int32), jnp.zeros(shape.batch, jnp.int32))
    q: Any = jax.ShapeDtypeStruct((shape.batch, shape.seq, shape.heads, shape.width), dtype)
    call = Call(q, jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), table))
    return kv_pages, [call] * calls_per_launch


def make_inputs(shape: Shape, dtype, distinct: int, seed: int = 0) -> Inputs:
    """Random inputs on the default device.

    Args:
      shape: what to make them for.
      dtype: of q and the pool.
      distinct: how many calls with pages of their own.
      seed: of the values and of the order of the pages.
    """
    rng = np.random.default_rng(seed)
    lengths, present = row_lengths(shape), present_pages(shape)
    per_call = int(present.sum())
    order = rng.permutation(distinct * per_call).astype(np.int32).reshape(distinct, per_call)

    num_pages = distinct * per_call
    kv_pages = _repeat(_random_rows(shape.width, dtype, seed), 0, (num_pages, PAGE_SIZE, shape.width))
    query_rows = _random_rows(shape.width, dtype, seed + 1)
    q_shape = (shape.batch, shape.seq, shape.heads, shape.width)
    calls = []
    for index in range(distinct):
        pages = np.full(present.shape, -1, np.int32)
        pages[present] = order[index]
        q = _repeat(query_rows, index * 977, q_shape)
        calls.append(Call(q, PageTable(jnp.asarray(pages), jnp.asarray(lengths))))
    jax.block_until_ready((kv_pages, calls))
    return Inputs(kv_pages, calls)


@functools.lru_cache(maxsize=4)
def _random_rows(width: int, dtype, seed: int) -> jax.Array:
    """Normal rows, made once for each width: compiling a generator for every shape would take longer than timing it."""
    return jax.random.normal(jax.random.key(seed), (_RANDOM_ROWS, width), dtype)


@functools.partial(jax.jit, static_argnames="shape")
def _repeat(rows: jax.Array, start: int | jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """An array of `shape` filled with consecutive rows from `start` on, over and over."""
    return rows[(start + jnp.arange(math.prod(shape[:-1]))) % rows.shape[0]].reshape(shape)
