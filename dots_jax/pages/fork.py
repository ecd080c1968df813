"""Forking rows: several continuations that share what they have in common."""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from dots_jax.pages.checks import as_int32
from dots_jax.pages.pool import PagePool, check_types, holder_counts
from dots_jax.pages.table import PageTable, pages_for


def fork(pool: PagePool, table: PageTable, parents: Any) -> tuple[PagePool, PageTable]:
    """Makes new rows that share their parents' pages.

    The returned table consists of the new rows only. `table` stays in use beside it: both hold pages of the returned
    pool, so `check_pool(pool, table, new_table)` passes. A parent may be named several times. Nothing is copied until a
    row grows into a shared, partly filled page (see `extend`).

    Args:
      pool: the pool.
      table: [B, P] table of this pool.
      parents: int32[B2], rows of `table`. A parent outside 0..B-1 makes an empty row.

    Returns:
      (pool, new table [B2, P]) of the same page size. Jit-able; the work is O(B2 P).

    Raises:
      TypeError: if `parents` is not of an integer dtype, or pool or table is of another type.
      ValueError: if it does not have one dimension.
    """
    check_types(pool, table)
    parents = as_int32("parents", parents)
    if len(parents.shape) != 1:
        raise ValueError(f"parents must have shape [new rows], got {tuple(parents.shape)}")
    return _fork(pool, table, parents)


@jax.jit
def _fork(pool: PagePool, table: PageTable, parents: Int[Array, " B2"]) -> tuple[PagePool, PageTable]:
    exists = (parents >= 0) & (parents < table.num_rows)
    padded = table.pad_rows(max(1, table.num_rows))  # something to read from where a table has no rows
    safe = jnp.where(exists, parents, 0)
    lengths = jnp.where(exists, padded.lengths[safe], 0)
    pages = padded.pages[safe]
    # Only what holds tokens is shared: a page past the length would be written by parent and child alike.
    column = jnp.arange(table.num_columns, dtype=jnp.int32)[None, :]
    within = column < pages_for(lengths, table.page_size)[:, None]
    shared = within & (holder_counts(pool, pages) > 0)
    holders = pool.holders.at[jnp.where(shared, pages, pool.num_pages)].add(1, mode="drop")
    pool = PagePool(pool.free_pages, pool.num_free, holders)
    return pool, PageTable(jnp.where(shared, pages, -1), lengths, table.page_size)
