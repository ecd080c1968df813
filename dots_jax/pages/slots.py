"""Tables for engines that keep one slot per token in two spaces, full and sliding-window."""

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Int

from dots_jax.pages.checks import as_int32, per_row
from dots_jax.pages.table import PageTable, check_page_size, pages_for


def swa_table_from_slots(slots: Any, full_to_swa: Any, lengths: Any, page_size: int = 64) -> PageTable:
    """Builds the sliding-window page table from token slots.

    The slot of each page's first token is translated and then divided by the page size; translating page numbers would
    be wrong, because the mapping is between token slots. Only the first token of a page decides, so eviction has to be
    aligned to pages. (`decode-semantics.md` §4.2.)

    Args:
      slots: int[B, T], the full-space slot of each token of each row; what is past a row's length is never used.
      full_to_swa: int[F], the sliding-window slot of each full-space slot; 0 is unmapped and a negative one absent.
      lengths: int32[B], tokens held by each row; one number stands for all rows.
      page_size: tokens in a page, a power of two; static.

    Returns:
      A table of `ceil(T / page_size)` columns. An entry is -1 where the page's first token is past the length, its slot
      is negative or outside `full_to_swa`, or the slot is unmapped.

    Raises:
      TypeError: if an argument is not of an integer dtype.
      ValueError: if ranks or rows do not fit, or `page_size` is not a positive power of two.
    """
    page_size = check_page_size(page_size)
    slots, full_to_swa = as_int32("slots", slots), as_int32("full_to_swa", full_to_swa)
    if len(slots.shape) != 2:
        raise ValueError(f"slots must have shape [rows, tokens], got {tuple(slots.shape)}")
    if len(full_to_swa.shape) != 1:
        raise ValueError(f"full_to_swa must have shape [slots], got {tuple(full_to_swa.shape)}")
    lengths = per_row("lengths", lengths, slots.shape[0])
    return PageTable(_first_pages(slots, full_to_swa, lengths, page_size), lengths, page_size)


def _first_pages(
    slots: Int[Array, "B T"], full_to_swa: Int[Array, " F"], lengths: Int[Array, " B"], page_size: int
) -> Int[Array, "B P"]:
    first = slots[:, ::page_size]
    column = jnp.arange(first.shape[1], dtype=jnp.int32)[None, :]
    known = (first >= 0) & (first < full_to_swa.shape[0]) & (column < pages_for(lengths, page_size)[:, None])
    if full_to_swa.shape[0] == 0:
        return jnp.full(first.shape, -1, jnp.int32)
    swa_slot = jnp.where(known, full_to_swa[jnp.where(known, first, 0)], 0)
    # The division rounds down, and only slots above 0 are left: -1 // 64 must not become page 0.
    return jnp.where(swa_slot > 0, swa_slot // page_size, -1)
