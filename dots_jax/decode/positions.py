"""From logical positions to cache slots, without ever wrapping or clamping into a stranger's page."""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int


def locate(
    pages: Int[Array, "B P"], positions: Int[Array, "B T"], page_size: int, num_pages: int
) -> tuple[Int[Array, "B T"], Int[Array, "B T"], Bool[Array, "B T"]]:
    """The cache slot of each logical position of each row.

    Returns:
      `(page, offset, present)`. Where the position is negative or its page absent (outside the table, negative, or past
      the pool), `present` is False and `page` is 0, which is safe to index with unless the pool is empty.
    """
    column = positions // page_size
    in_table = (positions >= 0) & (column < pages.shape[1])
    if not pages.shape[1]:
        page = jnp.full_like(positions, -1)
    else:
        page = jnp.take_along_axis(pages, jnp.where(in_table, column, 0), axis=1)
    present = in_table & (page >= 0) & (page < num_pages)
    return jnp.where(present, page, 0), positions % page_size, present
