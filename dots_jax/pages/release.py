"""Giving pages up: those that left the window, those of rejected drafts, and those of finished rows."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import Array, Bool, Int

from dots_jax.pages.checks import on_host, per_row, positive_int, refuse_rows
from dots_jax.pages.pool import PagePool, check_types, give_up
from dots_jax.pages.table import PageTable, host_values, pages_for


def release_outside_window(
    pool: PagePool, table: PageTable, window: Any, next_query: Any
) -> tuple[PagePool, PageTable]:
    """Gives up every page whose tokens no query at position `next_query[b]` or later can see.

    Page c of a row goes if and only if `page_size * (c + 1) <= next_query - (window - 1)`. Its entry becomes -1;
    lengths stay as they are.

    Args:
      pool: the pool.
      table: [B, P] table of this pool.
      window: tokens a query sees, itself included (513 for the released model); None is full attention, which lets
        nothing go.
      next_query: int32[B], the *smallest* position that any unfinished or possibly rejected step can still use. After
        verifying rows 638..641 of which 3 were rejected it is 639. One number stands for all rows.

    Returns:
      (pool, table). Jit-able; the work is O(B P).

    Raises:
      TypeError: if `next_query` or `window` is not of an integer type, or pool or table is of another type.
      ValueError: if `next_query` has another shape than [B], or `window` is below 1.
    """
    check_types(pool, table)
    next_query = per_row("next_query", next_query, table.num_rows)
    if window is None:
        return pool, table
    if not isinstance(window, Tracer):
        window = positive_int("window", window)
    return _release_outside_window(pool, table, jnp.asarray(window, jnp.int32), next_query)


@jax.jit
def _release_outside_window(
    pool: PagePool, table: PageTable, window: Int[Array, ""], next_query: Int[Array, " B"]
) -> tuple[PagePool, PageTable]:
    # Two differences in this order stay inside int32 for every window >= 1 and position >= 0.
    first_seen = jnp.where((next_query >= 0) & (window >= 1), next_query - (window - 1), 0)
    column = jnp.arange(table.num_columns, dtype=jnp.int32)
    gone = column[None, :] < (jnp.maximum(first_seen, 0) // table.page_size)[:, None]
    return _drop(pool, table, gone, table.lengths)


def rollback(pool: PagePool, table: PageTable, lengths: Any) -> tuple[PagePool, PageTable]:
    """Shortens rows, as after rejected drafts, and gives up the pages wholly past the new length.

    Args:
      pool: the pool.
      table: [B, P] table of this pool.
      lengths: int32[B], the new lengths in tokens, at most the present ones; one number stands for all rows.

    Returns:
      (pool, table). Jit-able; the work is O(B P). A traced length that is longer or negative leaves its row as it was.

    Raises:
      TypeError: if `lengths` is not of an integer dtype, or pool or table is of another type.
      ValueError: if its shape is not [B], or a length that is known is negative or longer than the row.
    """
    check_types(pool, table)
    new_lengths = per_row("lengths", lengths, table.num_rows)
    if (known := on_host(lengths, table.num_rows)) is not None:
        refuse_rows("a length must not be negative", known < 0, length=known)
        if (values := host_values(table)) is not None:
            held = values[1]
            refuse_rows("rollback cannot make a row longer", known > held, length=known, present=held)
    return _rollback(pool, table, new_lengths)


@jax.jit
def _rollback(pool: PagePool, table: PageTable, lengths: Int[Array, " B"]) -> tuple[PagePool, PageTable]:
    valid = (lengths >= 0) & (lengths <= table.lengths)
    column = jnp.arange(table.num_columns, dtype=jnp.int32)
    gone = valid[:, None] & (column[None, :] >= pages_for(lengths, table.page_size)[:, None])
    return _drop(pool, table, gone, jnp.where(valid, lengths, table.lengths))


def free_rows(pool: PagePool, table: PageTable, mask: Any) -> tuple[PagePool, PageTable]:
    """Gives up every page of the masked rows; their length becomes 0.

    Args:
      pool: the pool.
      table: [B, P] table of this pool.
      mask: bool[B], rows to free.

    Returns:
      (pool, table). Jit-able; the work is O(B P).

    Raises:
      TypeError: if `mask` is not boolean, or pool or table is of another type.
      ValueError: if its shape is not [B].
    """
    check_types(pool, table)
    if not hasattr(mask, "dtype"):
        mask = np.asarray(mask, bool) if np.size(mask) == 0 else np.asarray(mask)
    if mask.dtype != bool:
        raise TypeError(f"mask must be boolean, got {mask.dtype}")
    if mask.shape != (table.num_rows,):
        expected = (table.num_rows,)
        raise ValueError(f"mask must have one value per row of the table: expected shape {expected}, got {mask.shape}")
    return _free_rows(pool, table, jnp.asarray(mask))


@jax.jit
def _free_rows(pool: PagePool, table: PageTable, mask: Bool[Array, " B"]) -> tuple[PagePool, PageTable]:
    gone = jnp.broadcast_to(mask[:, None], table.pages.shape)
    return _drop(pool, table, gone, jnp.where(mask, 0, table.lengths))


def _drop(
    pool: PagePool, table: PageTable, gone: Bool[Array, "B P"], lengths: Int[Array, " B"]
) -> tuple[PagePool, PageTable]:
    """Gives up the entries in `gone` and puts -1 in their place."""
    pool = give_up(pool, table.pages, gone)
    return pool, PageTable(jnp.where(gone, -1, table.pages), lengths, table.page_size)
