"""Which keys a tile of query rows can see, and which pages hold them: scalar arithmetic inside a kernel."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.swa_latent_decode.config import PAGE_SIZE


class Span(NamedTuple):
    """What one tile reads in one split.

    Attributes:
      first_key: First position some query of the tile sees.
      last_key: Last one; less than `first_key` when there is none.
      start: First step of this split; step n holds keys [n * tokens, (n + 1) * tokens).
      end: One past its last; equal to `start` or less when the split is empty. Never past the table.
    """

    first_key: jax.Array
    last_key: jax.Array
    start: jax.Array
    end: jax.Array


def tile_span(
    length: jax.Array,
    count: jax.Array,
    *,
    first_row: jax.Array,
    tile_rows: int,
    heads: int,
    window: int | None,
    split: jax.Array,
    splits: int,
    table_width: int,
    tokens: int = PAGE_SIZE,
) -> Span:
    """The span of the tile that starts at packed row `first_row` (row = query token * heads + head).

    Args:
      length: Tokens the sequence holds, at least 0.
      count: Its query tokens.
      first_row: Packed index of the tile's first row.
      tile_rows: Rows of the tile.
      heads: Rows per query token.
      window: Visible keys per query, or None.
      split: Which of `splits` parts.
      splits: Parts of about equal numbers of steps.
      table_width: Columns of the page table.
      tokens: Keys of one step, a power of two that divides the page size.
    """
    shift = jnp.int32(tokens.bit_length() - 1)
    first_token = lax.div(first_row, jnp.int32(heads))
    last_token = jnp.minimum(lax.div(first_row + (tile_rows - 1), jnp.int32(heads)), count - 1)
    start = length - count
    last_key = jnp.where(first_token <= last_token, start + last_token, -1)
    older = 0 if window is None else window - 1
    # The maximum first: less a window of nearly 2^31 tokens, a position below 0 would wrap.
    first_key = jnp.int32(0) if window is None else jnp.maximum(start + first_token, older) - older
    first = lax.shift_right_arithmetic(first_key, shift)
    end = jnp.minimum(lax.shift_right_arithmetic(last_key, shift) + 1, table_width * (PAGE_SIZE // tokens))
    per_split = lax.div(jnp.maximum(end - first, 0) + (splits - 1), jnp.int32(splits))
    start_step = first + split * per_split
    return Span(first_key, last_key, start_step, jnp.minimum(start_step + per_split, end))


def next_present(pages_ref: Any, row: jax.Array, step: jax.Array, end: jax.Array, num_pages: int, tokens: int):
    """The first step >= `step` and < `end` whose page exists, and that page; (`end` or more, 0) when there is none.

    Args:
      pages_ref: int32 [B, P], the page table.
      row: Which row of it.
      step: Where to start.
      end: One past the last step to look at, inside the table.
      num_pages: Physical pages of the cache.
      tokens: Keys of one step.
    """
    shift = jnp.int32((PAGE_SIZE // tokens).bit_length() - 1)

    def missing(state):
        at, found, _ = state
        return jnp.logical_and(at < end, jnp.logical_not(found))

    def advance(state):
        at, _, _ = state
        page = pages_ref[row, lax.shift_right_arithmetic(at, shift)]
        present = jnp.logical_and(page >= 0, page < num_pages)
        return jnp.where(present, at, at + 1), present, jnp.where(present, page, 0)

    at, _, page = lax.while_loop(missing, advance, (step, jnp.bool_(False), jnp.int32(0)))
    return at, page


def row_limits(rows: jax.Array, length: jax.Array, count: jax.Array, *, heads: int, seq: int) -> jax.Array:
    """Position of each packed query row, or -1 (which sees nothing) for rows past the count and padding rows.

    Args:
      rows: int32, packed row indices of the sequence.
      length: Tokens the sequence holds.
      count: Its query tokens.
      heads: Rows per query token.
      seq: Most query tokens.
    """
    position = jnp.zeros_like(rows) + (length - count)
    for token in range(1, seq):
        position = position + jnp.where(rows >= token * heads, 1, 0)
    return jnp.where(rows < count * heads, position, -1)
